"""The twelve principles: each with a deployment that keeps it and one that does not; the seed's arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import lint, lint_facts, lint_report
from agent.budget import Shape, budget, kv_token_bytes, least_gpus, shape_of, weight_bytes
from agent.lint import Facts
from agent.model import FoundEngine
from agent.signals import Target
from agent.sources.discovery import options_of
from tests.test_node import node, restarted

NOW = 1_000_000_000.0
DAY = 86400.0
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
              "intermediate_size": 11008, "vocab_size": 32000, "torch_dtype": "float16"}
LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
             "intermediate_size": 28672, "vocab_size": 128256, "torch_dtype": "bfloat16"}
GPU = {"gpu_bytes": 80e9, "gpus": 1.0}
LATENCY, THROUGHPUT = {"profile": "latency"}, {"profile": "throughput"}
SPECULATES = {"speculative-config": "{}"}


def facts(options: dict[str, str] | None = None, **more: Any) -> Facts:
    """An engine of vLLM's whose command line has these options."""
    return Facts("llama", "vllm", options={} if options is None else options, now=NOW, **more)


def row(rule: str, value: float | None = 1.0, state: str = "OK") -> dict[str, Any]:
    """A row of `check`."""
    return {"rule": rule, "subject": "llama", "state": state, "value": value, "unit": "s", "text": ""}


def drill(fault: str, days_ago: float = 3.0, verdict: str = "PASS") -> dict[str, Any]:
    """A row of `drill history`."""
    return {"drill": fault, "fault": fault, "verdict": verdict, "started": NOW - days_ago * DAY}


ALL_DRILLS = [drill(fault) for fault in ("process-kill", "gpu-reset", "packet-loss", "upstream-timeout")]
ALL_RULES = [row(rules[0]) for rules in lint.WATCHED.values()]
CHANGED = [{"at": NOW - DAY, "what": "--max-num-seqs 32 → 64"}]
BINDS = {"name": "KV-bound", "why": "KV cache 98 % full", "knob": "more KV blocks", "no_help": "a larger chunk"}


@pytest.mark.parametrize(("number", "right", "wrong", "change"), [
    (1, facts({"max-num-seqs": "32"}, **LATENCY), facts({"max-num-seqs": "64"}, **LATENCY), "--max-num-seqs 32"),
    (1, facts({"max-num-seqs": "128"}, **THROUGHPUT), facts({"max-num-seqs": "16"}, **THROUGHPUT), "--max-num-seqs"),
    (1, facts({"max-num-seqs": "16", **SPECULATES}, **LATENCY), facts({"max-num-seqs": "256", **SPECULATES},
     **THROUGHPUT), "--speculative-config"),
    (1, facts({"max-num-seqs": "16"}, **LATENCY), facts({"max-num-seqs": "16", "no-enable-chunked-prefill": ""},
     **LATENCY), "--enable-chunked-prefill"),
    (2, facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=4096.0, numbers={**GPU, "gpus": 4.0}),
     facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=4096.0, numbers=GPU), "--tensor-parallel-size 4"),
    (2, facts({"max-num-seqs": "4"}, context_tokens=1024.0, numbers={"capacity_tokens": 8192.0}),
     facts({"max-num-seqs": "32"}, context_tokens=1024.0, numbers={"capacity_tokens": 8192.0}), "--max-num-seqs 8"),
    (3, facts(signals=[row("outside-engine", 0.004)]), facts(signals=[row("outside-engine", 0.08)]), "proxies"),
    (4, facts(evidence={"streamed": 0.97}), facts(evidence={"streamed": 0.2}), "stream"),
    (5, facts(binds={**BINDS, "by": "decode-bound"}), facts(binds={**BINDS, "by": "kv-bound"}), "more KV blocks"),
    (6, facts({"quantization": "fp8"}, evidence={"outlier_ratio": 40.0}),
     facts({"quantization": "fp8"}, evidence={"outlier_ratio": 180.0}), "weights only"),
    (6, facts({"quantization": "awq"}), facts({"quantization": "fp8"}), "outlier_ratio"),
    (7, facts({"max-num-seqs": "16", **SPECULATES}), facts({"max-num-seqs": "64", **SPECULATES}), "--max-num-seqs 16"),
    (7, facts(SPECULATES, numbers={"running": 9.0, "acceptance": 0.7}),
     facts(SPECULATES, numbers={"running": 9.0, "acceptance": 0.3}), "draft"),
    (8, facts(changes=CHANGED, canaries=[{"at": NOW - 2 * DAY, "verdict": "pass"}]),
     facts(changes=CHANGED, canaries=[{"at": NOW - 2 * DAY, "verdict": "fail"}]), "tocsin canary"),
    (9, facts(signals=ALL_RULES), facts(signals=[*ALL_RULES[:-1], row("ttft-p99", None, "UNKNOWN")]), "business"),
    (10, facts(drills=ALL_DRILLS), facts(drills=[*ALL_DRILLS[1:], drill("process-kill", verdict="ABORTED")]),
     "process-kill"),
    (10, facts(drills=ALL_DRILLS), facts(drills=[*ALL_DRILLS[1:], drill("process-kill", 40.0)]), "process-kill"),
    (11, facts({"quantization": "awq"}, evidence={"score_before": 71.2, "score_after": 70.9}),
     facts({"quantization": "awq"}, evidence={"score_before": 71.2, "score_after": 66.0}), "loses less"),
    (11, facts(), facts(cache={"cache_dtype": "fp8_e4m3"}), "score_before"),
    (12, facts(signals=[row("user-ttft-p99", 0.4)]), facts(signals=[row("ttft-p99", 0.4)]), "canary"),
])
def test_a_right_and_a_wrong_deployment(number: int, right: Facts, wrong: Facts, change: str) -> None:
    """Each finding has its evidence; what is at odds says what it costs and what to change."""
    judged = [next(one for one in lint.judge(of) if one["number"] == number) for of in (right, wrong)]
    assert [one["verdict"] for one in judged] == ["kept", "at odds"], judged
    assert all(one["evidence"] for one in judged)
    assert judged[1]["costs"]
    assert change in judged[1]["change"]


def test_an_engine_of_which_nothing_is_known_is_not_called_right() -> None:
    """No command line, no agent, no model: each of the twelve says what would tell, and none is kept."""
    found = lint.judge(Facts("llama", now=NOW))
    assert [one["verdict"] for one in found] == ["cannot tell"] * 12
    assert all(one["would_tell"] for one in found)


def test_what_the_cache_cannot_hold_is_at_odds_however_large_the_gpu_is() -> None:
    """8 sequences of 32,768 tokens on four GPUs that have room for them, and a cache that was made for 20,000."""
    of = facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=32768.0,
               numbers={**GPU, "gpus": 8.0, "capacity_tokens": 20000.0})
    memory = next(one for one in lint.judge(of) if one["number"] == 2)
    assert (memory["verdict"], "0 of 8 full sequences" in memory["costs"]) == ("at odds", True), memory


def test_the_worst_comes_first_and_the_page_says_what_to_do() -> None:
    """A colleague reads from the top."""
    found = lint.judge(facts({"max-num-seqs": "64", **SPECULATES}, **LATENCY))
    head = {"engine": "llama", "url": "http://a:8000", "kind": "vllm", "model": "m", "version": "0.32.0"}
    lines = lint_report.report({"engines": [{**head, "findings": found}], "errors": ["b: refused"]})
    assert lines[0] == "Not looked at: b: refused"
    assert lines[2] == "llama (vllm 0.32.0, m): 2 at odds, 8 cannot tell, 2 kept"
    assert lines.index("AT ODDS") < lines.index("CANNOT TELL") < lines.index("KEPT")
    assert "     Change: --max-num-seqs 32 (16 to 32), or declare profile: throughput" in lines


# --- the seed's arithmetic -------------------------------------------------------------------------------------------


def test_a_70b_model_on_one_80_gb_card_is_refused() -> None:
    """140 GB of weights: no KV cache is small enough. With 20 % on top it takes four such cards, not two."""
    assert weight_bytes(70e9) == 140e9
    assert not budget(weights=140e9, kv=0.0, gpu_bytes=80e9).fits
    assert least_gpus(weights=140e9, kv=0.0, gpu_bytes=80e9) == 4  # on two: 1.2 × (70 + 1.5) = 85.8 GB


def test_the_seed_s_line_for_llama_2_7b_and_ours() -> None:
    """14 GB of weights; of its KV cache the seed prints 2.1 GB, its formula makes 68.7 GB, its text says 8 GB."""
    assert weight_bytes(7e9) == 14e9
    assert 2 * 32 * 128 * 4096 * 32 * 2 == 2_147_483_648  # as printed
    assert 2 * 32 * 4096 * 4096 * 32 * 2 == 68_719_476_736  # its formula, with the hidden size
    shape = shape_of(LLAMA_2_7B)
    assert shape is not None
    assert (shape.parameters, kv_token_bytes(shape, 2.0)) == (6_738_415_616.0, 524_288.0)  # 6.74 billion, 512 KiB
    assert kv_token_bytes(shape, 2.0) * 4096 * 32 == 68_719_476_736.0
    assert budget(weights=14e9, kv=8e9, gpu_bytes=40e9).fits  # the seed's 23.5 GB: 28.2 GB with 20 %
    assert not budget(weights=14e9, kv=32e9, gpu_bytes=40e9).fits  # its counterexample, 47.5 GB
    assert "2.1 GB" in " ".join(lint.explained(2))


@pytest.mark.parametrize(("story", "config", "token_bytes"), [
    ("Atlas: 320 KiB a token", LLAMA_70B, 327_680.0),
    ("MLA keeps one vector", {**LLAMA_70B, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
     61 * 576 * 2.0),
    ("a state is no KV cache", {**LLAMA_70B, "layer_types": ["linear_attention", "full_attention"]}, None),
    ("not told", {"model_type": "x"}, None),
])
def test_kv_bytes_of_a_token(story: str, config: dict[str, Any], token_bytes: float | None) -> None:
    """From the model's own file; what is not attention has no answer rather than a wrong one."""
    shape: Shape | None = shape_of(config)
    assert (None if shape is None else kv_token_bytes(shape, 2.0)) == token_bytes, story


# --- what is asked of the world --------------------------------------------------------------------------------------


def test_a_command_line_is_remembered_without_its_secrets() -> None:
    """`--api-key` in the agent's database would be one secret more to lose."""
    line = ("python -m vllm.entrypoints.openai.api_server --model /m --max_num_seqs=32 --enforce-eager --api-key s3cret"
            " --hf-token=s3cret --max-num-batched-tokens 2048")
    assert options_of(line.split()) == {"model": "/m", "max-num-seqs": "32", "enforce-eager": "",
                                "max-num-batched-tokens": "2048"}
    assert options_of(["vllm", "serve", "org/m", "--port", "8000"])["model"] == "org/m"
    assert options_of(["vllm", "serve", "/m", "--skip-tokenizer-init"]) == {"model": "/m", "skip-tokenizer-init": ""}


def test_a_change_is_said_and_survives_a_restart() -> None:
    """The agent remembers under which options and version each engine ran, since when."""
    here, name = node("queue-age"), "llama"
    here.setup = replace(here.setup, targets=(Target(name, (name,), port=8000),))
    engine = FoundEngine("127.0.0.1:8000", "http://127.0.0.1:8000", "vllm", "its command line", 8000)
    for at, options, version in [(1.0, {"max-num-seqs": "32"}, None), (2.0, {"max-num-seqs": "32"}, "0.31.0"),
                                 (3.0, {"max-num-seqs": "32"}, "0.31.0")]:
        here.see([engine._replace(options=options, version=version)], at)
    later = restarted(here)
    later.see([engine._replace(options={"max-num-seqs": "64", "enforce-eager": ""}, version="0.32.0")], 9.0)
    assert [one["at"] for one in later.learned.configs[name]] == [2.0, 9.0]
    assert lint_facts.changes(later.learned.configs[name]) == [
        {"at": 9.0, "what": "version 0.31.0 → 0.32.0, --enforce-eager absent → given, --max-num-seqs 32 → 64"}]


@pytest.mark.parametrize(("text", "fault"), [
    ("llama: {streamd: 0.9}", "streamd"),
    ("llama: {streamed: many}", "float"),
    ("llama: [", "flow"),
])
def test_a_wrong_evidence_file_says_where(text: str, fault: str, tmp_path: Path) -> None:
    """A misspelt key would be evidence that nobody reads."""
    path = tmp_path / "evidence.yaml"
    path.write_text(text)
    with pytest.raises(lint_facts.Unusable, match=fault):
        lint_facts.evidence_in(path, must=True)


def test_canaries_are_written_down_and_read_past_a_torn_line(tmp_path: Path) -> None:
    """A power cut in the midst of a line costs that line."""
    assert lint_facts.note_canary(tmp_path, {"at": 5.0, "verdict": "pass"}) is None
    with (tmp_path / lint_facts.CANARIES).open("a") as out:
        out.write('{"at": 6.0, "ver\n')
    assert [one["at"] for one in lint_facts.canaries(tmp_path / lint_facts.CANARIES)] == [5.0]
