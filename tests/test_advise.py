"""The decision checklists: Atlas's worked numbers from the seed, the edges, and what a person types and reads."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import advise
from agent.__main__ import main
from agent.advise import Missing, gb, size_bytes
from agent.facts import facts_of
from agent.model import GpuFacts
from agent.windows import Windows
from tests.page_server import PageServer
from tests.scenes import GPU, read, read_many, scene, times

FOLDER = Path(__file__).resolve().parents[1] / "runbooks" / "checklists"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
# The seed's running example: 70B, BF16, 140 GB, 320 KiB of KV a token, TP4 on four GPUs of 80 GB.
WEIGHTS, GPU_MEMORY, KV_TOKEN, LINK = 140e9, 80e9, 327_680.0, 25e9
SECTIONS = ["## Inputs", "## Procedure", "## Atlas", "## Mind"]


# --- Atlas, as the seed works it out ----------------------------------------------------------------------------------


def test_atlas_has_35_gb_on_each_of_four_gpus() -> None:
    """140 > 64 (0.8 × 80): not on one GPU; 140 ÷ 4 = 35 < 64: TP4 on one node."""
    found = advise.parallelism(weight_bytes=WEIGHTS, gpu_bytes=GPU_MEMORY, gpus=4)
    assert (found.decision, found.numbers["weight_bytes_per_gpu"]) == ("tp4", 35e9)
    assert found.why[0].endswith("0.8 × 80 GB = 64 GB of them")


def test_atlas_needs_85_9_of_144_gb() -> None:
    """327,680 × 4,096 × 64 = 85.9 GB; (80 − 35 − 3 − 2 − 4) × 4 = 144 GB."""
    found = advise.kv_cache(context_tokens=4096, sequences=64, token_bytes=KV_TOKEN, gpu_bytes=GPU_MEMORY, gpus=4,
                            weight_bytes_per_gpu=35e9)
    assert (found.decision, found.numbers["demand_bytes"]) == ("fits", 85_899_345_920.0)
    assert (found.numbers["available_bytes_per_gpu"], found.numbers["available_bytes"]) == (36e9, 144e9)


def test_atlas_at_128k_would_need_2_75_tb() -> None:
    """The same 64 sequences at 131,072 tokens: 2.75 TB; 3 of them fit 144 GB (43 GB each)."""
    found = advise.kv_cache(context_tokens=131_072, sequences=64, token_bytes=KV_TOKEN, gpu_bytes=GPU_MEMORY, gpus=4,
                            weight_bytes_per_gpu=35e9)
    assert (found.decision, found.numbers["sequences_that_fit"]) == ("does-not-fit", 3)
    assert found.why[0].endswith("= 2.75 TB")


def test_atlas_s_kv_bytes_a_token() -> None:
    """80 layers, 8 KV heads of 128, two bytes: 320 KiB. With full attention (64 heads) it would be eight times that."""
    assert advise.kv_bytes_per_token(80, 8, 128) == KV_TOKEN == 320 * 1024
    assert advise.kv_bytes_per_token(80, 64, 128, 1.0) == 4 * KV_TOKEN


def test_atlas_s_largest_chunk_is_3000() -> None:
    """(150 − 45) ÷ 0.035 = 3,000, and not 2,999 by a rounding of floats."""
    found = advise.chunked_prefill(decode_step_s=0.045, prefill_s_per_token=0.000035, itl_target_s=0.150)
    assert (found.decision, found.numbers["max_chunk_tokens"]) == ("chunk", 3000)


def test_atlas_s_transfer_is_told_in_our_numbers_and_in_the_seed_s() -> None:
    """4,096 × 327,680 = 1,342,177,280 bytes: 1.34 GB, 1.25 GiB, 53.7 ms at 25 GB/s. The seed: 1.28 GB, 51 ms."""
    found = advise.disaggregation(prompt_tokens=4096, token_bytes=KV_TOKEN, link_bytes_per_s=LINK, prefill_s=2.0,
                                  spikes_with_long_prompts=True)
    assert found.decision == "try"
    assert found.why[:2] == ["4,096 tokens × 327,680 bytes = 1.34 GB (1.25 GiB), over 25 GB/s: 53.7 ms",
                             "counted as the seed does (MiB ÷ 1,000 as GB): 1.28 GB, 51 ms"]
    assert found.numbers["transfer_bytes"] == 1_342_177_280.0


def test_atlas_s_short_prompts_stay_colocated() -> None:
    """256 tokens, 80 MiB: the wait behind their prefill (9 ms) is short too, little gain for the overhead."""
    found = advise.disaggregation(prompt_tokens=256, token_bytes=KV_TOKEN, link_bytes_per_s=LINK, prefill_s=0.009)
    assert (found.decision, found.numbers["transfer_bytes"]) == ("little-gain", 80 * 2.0**20)


# --- the other ways that each can go ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("story", "decide", "decision", "told"), [
    ("a 7B on an H100", lambda: advise.parallelism(weight_bytes=14e9, gpu_bytes=80e9, gpus=8), "one-gpu", "14 GB < 64"),
    ("just under the limit", lambda: advise.parallelism(weight_bytes=60e9, gpu_bytes=80e9, gpus=1), "one-gpu",
     "tight"),
    ("eight GPUs, four are enough", lambda: advise.parallelism(weight_bytes=WEIGHTS, gpu_bytes=80e9, gpus=8), "tp4",
     "fits in the node"),
    ("700 GB on a node for 512", lambda: advise.parallelism(weight_bytes=700e9, gpu_bytes=80e9, gpus=8), "pp2-tp8",
     "bubbles about (2 − 1) ÷ 8"),
    ("experts", lambda: advise.parallelism(weight_bytes=WEIGHTS, gpu_bytes=80e9, gpus=4, moe=True), "tp4", "MoE"),
    ("an engine that tells its blocks", lambda: advise.kv_cache(
        context_tokens=400, sequences=6, capacity_tokens=1792.0), "does-not-fit", "holds 1,792 tokens; 2,400 are"),
    ("decode alone breaks the ITL", lambda: advise.chunked_prefill(
        decode_step_s=0.2, prefill_s_per_token=1e-5, itl_target_s=0.15), "decode-too-slow", "no chunk is small enough"),
    ("under the knee", lambda: advise.chunked_prefill(
        decode_step_s=0.14, prefill_s_per_token=35e-6, itl_target_s=0.15), "below-knee", "285 tokens at most"),
    ("a cache that nobody hits", lambda: advise.prefix_caching(reuse="rag", hit_rate=0.14), "off", "14 %"),
    ("hits, in a full cache", lambda: advise.prefix_caching(hit_rate=0.6, kv_usage=0.9), "on", "90 % full"),
    ("no spikes", lambda: advise.disaggregation(
        prompt_tokens=4096, token_bytes=KV_TOKEN, link_bytes_per_s=LINK, prefill_s=2, spikes_with_long_prompts=False),
     "no", "does not spike"),
    ("a slow link", lambda: advise.disaggregation(
        prompt_tokens=4096, token_bytes=KV_TOKEN, link_bytes_per_s=1e9, prefill_s=1), "no", "longer than the 1 s"),
    ("BF16 fits", lambda: advise.quantization(weight_bytes=WEIGHTS, gpu_bytes=80e9, gpus=4, kv_fits=True), "skip",
     "leaves the KV cache its room"),
    ("outliers", lambda: advise.quantization(
        weight_bytes=WEIGHTS, gpu_bytes=80e9, gpus=4, kv_fits=False, outlier_ratio=180), "weight-only", "180 × their"),
    ("a point lost", lambda: advise.quantization(
        weight_bytes=WEIGHTS, gpu_bytes=80e9, gpus=1, quality_drop=0.01), "do-not-ship", "1 % lost"),
    ("too large for all", lambda: advise.quantization(weight_bytes=1e12, gpu_bytes=80e9, gpus=1), "more-gpus", "INT4"),
    ("a large batch", lambda: advise.speculative(batch=96, acceptance=0.9), "off", "over 64 it is a net loss"),
    ("few accepted", lambda: advise.speculative(batch=8, acceptance=0.49), "off", "under 50 % it wastes compute"),
    ("marginal", lambda: advise.speculative(batch=8, acceptance=0.70), "profile", "70 % or less is marginal"),
    ("break-even", lambda: advise.speculative(batch=32, acceptance=0.8), "profile", "32 is about break-even"),
    ("no room for the draft", lambda: advise.speculative(batch=4, draft_bytes=4e9, free_bytes=2e9), "off", "4 GB do"),
    ("one replica", lambda: advise.routing(replicas=1), "none", "one replica"),
    ("alike", lambda: advise.routing(replicas=2, uniform_cost=True), "least-connections", "cost the same"),
    ("unlike", lambda: advise.routing(replicas=2), "least-estimated-work", "costs differ"),
    ("the hit is not worth it", lambda: advise.routing(
        replicas=2, prefix_reuse=True, prefill_saved_s=0.5, longer_wait_s=0.45, telemetry_age_s=0.1), "hybrid",
     "go elsewhere"),
    ("a spike", lambda: advise.autoscaling(startup_s=300, spike_per_s=24, replica_per_s=6), "scale-on-queue-age",
     "24 requests/s at its height ÷ 6 of a replica = 4 in all"),
])
def test_each_way_a_checklist_can_go(story: str, decide: Callable[[], advise.Advice], decision: str, told: str) -> None:
    """The seed's limits, on their right side: 0.8, 15 %, 50 and 70 %, 16, 32 and 64, one point."""
    found = decide()
    assert (found.decision, any(told in line for line in found.why)) == (decision, True), (story, found)


def test_tokens_of_a_speculative_step() -> None:
    """Acceptance 0.5, two drafted: (1 − 0.125) ÷ 0.5 = 1.75."""
    assert "2 drafted tokens give 1.8 tokens a step" in " ".join(
        advise.speculative(batch=1, acceptance=0.5, draft_tokens=2).why)


@pytest.mark.parametrize("decide", [
    lambda: advise.kv_cache(context_tokens=1, sequences=1), advise.prefix_caching, advise.speculative,
    lambda: advise.autoscaling(startup_s=300, spike_per_s=24)])
def test_what_cannot_be_decided_says_what_it_takes(decide: Callable[[], Any]) -> None:
    """No number, no advice: never a default that looks like one."""
    with pytest.raises(Missing, match="it takes --"):
        decide()


@pytest.mark.parametrize(("text", "want"), [
    ("140GB", 140e9), ("80 GiB", 80 * 2.0**30), ("327680", 327_680), ("327,680", 327_680), ("320KiB", 327_680),
    ("25GB/s", 25e9), ("1.5T", 1.5e12), ("512M", 512e6), ("12B", 12),
])
def test_sizes_as_people_write_them(text: str, want: float) -> None:
    """GB is 10^9, GiB 2^30: the difference is 7 %."""
    assert size_bytes(text) == want


@pytest.mark.parametrize("text", ["", "GB", "80 GPUs", "-1GB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With the form that it should have."""
    with pytest.raises(ValueError, match="write 140GB"):
        size_bytes(text)


@pytest.mark.parametrize(("name", "value", "want"), [
    ("decode_step_s", 0.0147, "decode step 14.7 ms"), ("prefill_s_per_token", 35e-6, "prefill per token 0.035 ms"),
    ("gpu_bytes", 80e9, "gpu 80 GB"), ("hit_rate", 0.61, "hit rate 61 %"), ("capacity_tokens", 1792.0,
                                                                         "capacity tokens 1,792"),
    ("capacity_tokens", 432000.0, "capacity tokens 432,000"), ("running", 3.667, "running 3.667"),
    ("replica_per_s", 7.04, "replica 7.04/s"),
])
def test_what_an_engine_told_has_its_unit(name: str, value: float, want: str) -> None:
    """It once read `decodetep s 14.7 ms`."""
    assert advise.shown(name, value) == want


def test_sizes_are_told_as_hardware_is_sold() -> None:
    """Three digits and the unit."""
    assert [gb(n) for n in (35e9, 2.7488e12, 83.9e6, 1500, 12)] == ["35 GB", "2.75 TB", "83.9 MB", "1.5 KB", "12 B"]


# --- from an engine ---------------------------------------------------------------------------------------------------


def test_the_facts_of_an_engine() -> None:
    """600 s: 60 requests of 800 + 200 tokens, 3 s of which 1 s is queue; 1,000 blocks of 16 tokens; two GPUs."""
    windows = Windows(5.0)
    other = "GPU-bb"
    for at in times(0, 600):
        n = at / 10
        read(windows, at, "e", {
            "running": 8.0, "waiting": 0.0, "kv_usage": 0.5, "kv_blocks": 1000.0, "kv_block_tokens": 16.0,
            "prompt_tokens": 800 * n, "generation_tokens": 200 * n, "ttft.sum": 3 * n, "ttft.count": n,
            "queue_time.sum": n, "queue_time.count": n, "itl.sum": 9.0 * n, "itl.count": 200 * n, "finished.stop": n,
            "prefix_queries": 800 * n, "prefix_hits": 200 * n, "preemptions": 0.0})
        read_many(windows, at, "nvml", {GPU: {"gpu_mem_total": 80e9}, other: {"gpu_mem_total": 80e9}})
    here = scene(windows, 600, gpus=(0, 1), gpu_facts={GPU: GpuFacts(GPU, 0, "H100", "b"),
                                                       other: GpuFacts(other, 1, "H100", "c")})
    found = {k: v and round(v, 6) for k, v in facts_of(here, here.targets["e"], "e").items()}

    assert found == {
        "gpu_bytes": 80e9, "gpus": 2.0, "capacity_tokens": 16_000.0, "sequences": 8.0, "kv_usage": 0.5, "running": 8.0,
        "prompt_tokens": 800.0, "output_tokens": 200.0, "decode_step_s": 0.045, "ttft_s": 3.0, "queue_s": 1.0,
        "prefill_s": 2.0, "prefill_s_per_token": 0.0025, "hit_rate": 0.25, "acceptance": None,
        "preemptions": 0.0, "itl_target_s": 0.15, "drafted": None, "watched_s": 600.0}
    assert set(advise.TOLD) - {"queue_age_s", "replicas", "replica_per_s"} <= set(found)


def test_an_engine_that_did_nothing_tells_no_means() -> None:
    """0 ÷ 0 is not known, and no advice is made of it."""
    windows = Windows(5.0)
    for at in times(0, 60):
        read(windows, at, "e", {"running": 0.0, "waiting": 0.0, "ttft.sum": 7.0, "ttft.count": 7.0, "itl.sum": 1.0,
                                "itl.count": 9.0, "prompt_tokens": 70.0})
    here = scene(windows, 60)
    found = facts_of(here, here.targets["e"], "e")
    assert [found[name] for name in ("ttft_s", "decode_step_s", "prompt_tokens", "gpu_bytes", "kv_usage")] == [None] * 5


# --- the command ------------------------------------------------------------------------------------------------------

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `tocsin advise …` in this process: exit code, stdout, stderr."""
    config = tmp_path / "tocsin.yaml"
    config.write_text(f"node: n\nnvml: off\nkernel_log: off\ndiscover: false\nsocket: {tmp_path}/no.sock\n")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tocsin", "--config", str(config), "advise", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_every_checklist_has_its_page_and_every_page_its_command() -> None:
    """The command named a page that nobody had written."""
    assert sorted(PAGES) == sorted(advise.CHECKLISTS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_all_parts_and_its_examples_are_true(name: str, cli: Cli) -> None:
    """The same form for all nine; what stands under a command is what it prints."""
    text = PAGES[name]
    assert text.startswith(f"# {name}: ")
    assert [line for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert f"Checklist {advise.CHECKLISTS.index(name) + 1} of 9" in text
    examples = re.findall(r"^    \$ tocsin advise (.*)\n((?:    .*\n)+?)(?=\n)", text, flags=re.MULTILINE)
    assert examples
    for command, want in examples:
        code, out, err = cli(*shlex.split(command))
        assert (code, err) == (0, ""), command
        assert out == "".join(f"{line.removeprefix('    ')}\n" for line in want.splitlines()), command


def test_json_has_the_numbers(cli: Cli) -> None:
    """Stable keys, each number with its unit in its name."""
    code, out, _ = cli("chunked-prefill", "--decode-step", "45ms", "--prefill-per-token", "0.035ms", "--itl", "150ms",
                       "--json")
    told = json.loads(out)
    assert (code, told["decision"], told["numbers"]["max_chunk_tokens"], told["from"]) == (0, "chunk", 3000, None)
    assert set(told) == {"checklist", "decision", "answer", "why", "numbers", "then", "from", "taken"}


@pytest.mark.parametrize(("words", "code", "said"), [
    (["kv-cache", "--context", "4096"], 2, "it takes --sequences, or --from an engine that tells it"),
    (["kv-cache", "--context", "4096", "--sequences", "4"], 2, "it takes --kv-bytes-per-token"),
    (["parallelism", "--weights", "much"], 2, "'much' is not a size; write 140GB"),
    (["chunked-prefill", "--itl", "150"], 2, "'150' is not a time; write 45ms"),
    (["speculative", "--acceptance", "72"], 2, "72 is over 1; write 72% or 0.72"),
    (["prefix-caching", "--reuse", "some"], 2, "'some' is none of system-prompt"),
    (["kv-cache", "--context", "1", "--from", "llama"], 3, "name the engine by its address: --from http://"),
    (["kv-cache", "--context", "0", "--sequences", "4", "--kv-bytes-per-token", "1", "--gpu-memory", "80GB"], 2,
     "--context must be over 0"),
    (["chunked-prefill", "--decode-step", "45ms", "--prefill-per-token", "0ms", "--itl", "150ms"], 2,
     "--prefill-per-token must be over 0"),
    (["routing", "--from", "127.0.0.1:9", "--watch-for", "1s"], 3, "127.0.0.1:9"),
])
def test_what_is_wrong_says_what_to_write(cli: Cli, words: list[str], code: int, said: str) -> None:
    """Exit 2 for a question that cannot be answered, 3 for an engine that is not there; no traceback."""
    got, _, err = cli(*words)
    assert (got, said in " ".join(err.replace("│", " ").split()), "Traceback" in err) == (code, True, False), err


@pytest.mark.parametrize(("words", "said"), [
    (["kv-cache", "--context", "400"], "it takes --sequences; "),
    (["speculative"], "it takes --batch or a measured --acceptance")])
def test_an_idle_engine_tells_no_batch(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    """None ran: KV sizing divided by 0, and "batch 0: the GPU has compute to spare" turned speculation on."""
    monkeypatch.setattr("agent.oneshot.DOCTOR_POLL_S", 0.01)
    with PageServer() as server:
        server.set_page(lambda: 'vllm:num_requests_running{model_name="m"} 0\n'
                        'vllm:num_requests_waiting{model_name="m"} 0\n'
                        'vllm:cache_config_info{block_size="128",num_gpu_blocks="14",model_name="m"} 1\n')
        code, _, err = cli(*words, "--from", server.url, "--watch-for", "1s")
    assert (code, said in err, "Traceback" in err) == (2, True, False), err


def test_replicas_come_from_the_agent_and_are_said_to(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines on a node are three replicas only where they serve one model: it says where the 3 is from."""
    facts: dict[str, float | None] = {"hit_rate": None}
    monkeypatch.setattr("agent.client.ask", lambda *_: {"targets": [
        {"facts": {"llama": facts}}, {"facts": {"llama-2": facts}}, {"facts": {"llama-3": facts}}]})
    code, out, err = cli("routing", "--from", "llama")
    assert code == 0, err
    assert "replicas 3 (engines that the agent watches; give --replicas where not all" in " ".join(out.split())


@pytest.mark.parametrize(("served", "code", "said"), [
    (None, 2, "it takes --per-replica beside --spike"),  # 0.248 requests/s came to it: 97 replicas were to stand ready
    (7.0, 0, "From llama: replica 7/s (the most requests that it finished in a minute in which others waited)"),
])
def test_what_an_idle_engine_finishes_is_no_throughput(
        cli: Cli, monkeypatch: pytest.MonkeyPatch, served: float | None, code: int, said: str) -> None:
    """24 ÷ 7 = 3.4: four; of one in which nobody waited it is asked, and what it told is named."""
    facts = {"running": 1.0, "queue_age_s": 0.0, "replica_per_s": served}
    monkeypatch.setattr("agent.client.ask", lambda *_: {"targets": [{"facts": {"llama": facts}}]})
    got, out, err = cli("autoscaling", "--startup", "5m", "--spike", "24", "--from", "llama")
    assert (got, said in " ".join((out + err).split())) == (code, True), (out, err)
    assert ("4 warm" in out) == (served is not None)


def test_an_engine_fills_in_what_is_not_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 blocks of 128 tokens hold 1,792: of six sequences of 400 tokens four do."""
    monkeypatch.setattr("agent.oneshot.DOCTOR_POLL_S", 0.01)
    page = ('vllm:num_requests_running{model_name="m"} 6\nvllm:num_requests_waiting{model_name="m"} 0\n'
            'vllm:cache_config_info{block_size="128",num_gpu_blocks="14",model_name="m"} 1\n')
    with PageServer() as server:
        server.set_page(lambda: page)
        code, out, err = cli("kv-cache", "--context", "400", "--from", server.url, "--watch-for", "1s", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["decision"], told["numbers"]["sequences_that_fit"]) == ("does-not-fit", 4)
    assert told["taken"] == {"sequences": 6, "capacity_tokens": 1792.0}


def test_advise_starts_without_the_daemon() -> None:
    """A calculator that loads SQLite and a web server is slow for nothing."""
    script = "import sys, agent.advise_commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          cwd=FOLDER.parents[1])
    assert not {"sqlite3", "waitress", "requests", "agent.loop"} & set(done.stdout.split())
