"""Every engine and each of its name eras: the ten read from its golden page, with the right value, N/A or Gap.

The pages are those of tests/engine_pages.py, whose head tells their story and so every number below.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache

import pytest

from agent import signals
from agent.engines import KINDS, ROUTER_KINDS, detect, load_map
from agent.engines.pages import PageReader
from agent.exposition import Reader
from agent.model import SAMPLES, Batch, EngineFacts, Found, Gap, Sample, Signal
from agent.signals import Scene, Target, compute
from agent.windows import Windows
from tests.engine_pages import GOLDEN, GOLDEN_AT_S, PAGES, sglang
from tests.scenes import SLO, T0, ask, built_in, times

EVERY_S, LASTS_S = 30.0, 2400.0

# The ten, but for temperature (NVML tells it). A number is the value; else the state, or the Gap's reason.
H1, H2, H3, H4, H5, H6, H7, H8, H10 = TEN = (
    "queue-age", "kv-cache-utilization", "preemptions", "graph-fallback", "ttft-p99", "itl-p99", "error-rate",
    "rank-spread", "prefix-cache-hit-rate")
ALL: Mapping[str, float | str] = {
    H1: 0.5, H2: 0.83, H3: 25, H4: 0.025, H5: 0.1, H6: 0.02, H7: 0.0099, H8: 0.1132, H10: 0.6}
VLLM = {**ALL, H4: "na", H8: "na"}
SGLANG_OLD = {**ALL, H4: "na", H8: "na", H3: "na"}
WANT: Mapping[str, Mapping[str, float | str]] = {
    "vllm-0.4.3": {**VLLM, H10: "na"},
    "vllm-0.6.6": VLLM,
    "vllm-0.7.3": VLLM,
    "vllm-0.7.3-v1": {**VLLM, H3: "missing"},
    "vllm-0.8.5": VLLM,
    "vllm-0.9.0": VLLM,
    "vllm-0.9.2": VLLM,
    "vllm-0.10.2": VLLM,
    "vllm-0.11.2": VLLM,
    "vllm-0.12": VLLM,
    "vllm-0.16": VLLM,
    "vllm-0.20": VLLM,
    "vllm-0.30": VLLM,
    "vllm-0.32": VLLM,
    "vllm-muted": dict.fromkeys(TEN, "missing") | {H4: "na", H8: "na"},
    "ray-2.49": {**VLLM, H3: 0},
    "ray-2.50": {**VLLM, H3: 0},
    "sglang-0.4.0": {**SGLANG_OLD, H10: "na", H7: "na"},
    "sglang-0.4.6": {**SGLANG_OLD, H7: 0.0},
    "sglang-0.5.1": {**SGLANG_OLD, H3: 25},
    "sglang-0.5.3": SGLANG_OLD,
    "sglang-0.5.6": {**SGLANG_OLD, H3: 25},
    "sglang-0.5.8": {**ALL, H8: "na"},
    "sglang-0.5.12-tp2": ALL,
    "sglang-0.5.23-dp2": {**ALL, H8: "na"},
    "trtllm-1.1": {**ALL, **dict.fromkeys((H1, H3, H4, H6, H8), "na"), H7: 0.0},
    "trtllm-1.3": {**ALL, **dict.fromkeys((H3, H4, H6, H8), "na")},
    "triton-23.10": {**dict.fromkeys(TEN, "na"), H7: 0.0099},
    "triton-25.03": {**dict.fromkeys(TEN, "na"), H1: 0.5, H2: 0.83, H5: 0.1, H7: 0.0099},
    "triton-25.03-no-fraction": {**dict.fromkeys(TEN, "na"), H1: 0.5, H2: 0.83, H5: 0.1, H7: 0.0099},
    "tgi-3.3.7": {**dict.fromkeys(TEN, "na"), H2: 0.83, H7: 0.0099},
    "llamacpp-b5000": {**dict.fromkeys(TEN, "na"), H2: 0.83},
    "llamacpp-b10519": {**dict.fromkeys(TEN, "na"), H10: 0.6},
    "lmdeploy-0.9.2": {**ALL, **dict.fromkeys((H3, H4, H8, H10), "na")},
    "lmdeploy-0.12.3": {**ALL, **dict.fromkeys((H3, H4, H8), "na")},
    "dynamo": {**ALL, **dict.fromkeys((H2, H3, H4, H8), "na"), H10: "idle"},
    "dynamo-worker": VLLM,
    "dynamo-worker-silent": {
        **dict.fromkeys(TEN, "na"), **dict.fromkeys((H1, H3, H5, H6), "missing"), H2: 0.83, H7: 0.0099},
}


@cache
def played(era: str) -> tuple[EngineFacts, Mapping[tuple[str, str], Signal]]:
    """The era's story, read to its end: what the target says of itself, and every rule's signals."""
    reader, windows = PageReader("t"), Windows(EVERY_S)
    for n in range(1, int(LASTS_S / EVERY_S) + 1):
        at = n * EVERY_S
        readings = reader.read(PAGES[era](at).encode(), "text/plain; version=0.0.4", T0 + at)
        windows.ingest(Batch("engine:t", T0 + at, 0.0, tuple(readings)))
    facts = reader.facts
    assert facts is not None
    target = Target("t", facts.engines or ("t",), SLO, gpus=(0, 1))
    scene = Scene(windows, T0 + LASTS_S, "node", SLO, {"t": target})
    rules = [rule for id_, rule in built_in().items() if id_ in (*TEN, "ttft-p99-undecided", "engine-stuck")]
    return facts, compute(scene, rules, {})


def told(era: str, rule: str, subject: str) -> float | str:
    """A signal as the table has it."""
    signal = played(era)[1][rule, subject]
    if signal.state != "value":
        return signal.code.value if signal.code is not None else signal.state
    if rule in (H5, H6):
        return float(signal.evidence["slow"] / signal.evidence["n"])
    if rule == H7:
        return float(signal.evidence["errors"] / signal.evidence["requests"])
    assert signal.value is not None
    return signal.value


@pytest.mark.parametrize("era", PAGES)
def test_the_ten_are_read_from_every_page_of_every_era(era: str) -> None:
    """A rename, and a threshold was silently dead: what an era tells is the right number, what it does not says so."""
    engines = played(era)[0].engines or ("t",)
    for rule, want in WANT[era].items():
        for subject in ("t",) if rule in (H5, H6, H7) else engines:
            got = told(era, rule, subject)
            assert got == (want if isinstance(want, str) else pytest.approx(want, rel=0.03)), f"{rule} of {subject}"


@pytest.mark.parametrize("era", PAGES)
def test_the_golden_pages_are_what_the_generator_writes(era: str) -> None:
    """A page that nobody can make again proves nothing: `python -m tests.engine_pages` makes them."""
    assert (GOLDEN / f"{era}.txt").read_text() == PAGES[era](GOLDEN_AT_S)


def test_no_golden_page_outlives_its_era() -> None:
    """And none is there that no test reads."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(PAGES) == set(WANT)


def kind_of(era: str) -> str:
    """The map by which a page is read, told by its era's name."""
    kinds = {"ray": "ray-serve-llm", "trtllm": "trtllm-serve", "dynamo-worker": "vllm"}
    word = era.partition("-")[0]
    return "dynamo-worker" if era == "dynamo-worker-silent" else kinds.get(era, kinds.get(word, word))


@pytest.mark.parametrize("era", [era for era in PAGES if era != "vllm-muted"])
def test_every_page_shows_whose_it_is(era: str) -> None:
    """With `kind: auto`, and whatever other engines are known."""
    assert played(era)[0].kind == kind_of(era)


@pytest.mark.parametrize("era", PAGES)
def test_a_steady_load_is_not_stuck(era: str) -> None:
    """Engines that count no tokens were taken for hung after two minutes of work."""
    for subject in played(era)[0].engines:
        signal = played(era)[1]["engine-stuck", subject]
        if era == "dynamo-worker-silent":
            assert signal.state == "gap"
        elif signal.state != "na":
            assert signal.value is not None
            assert signal.value < 0.5, signal


def found(era: str, name: str, subject: str = "t") -> Found:
    return next(f for f in played(era)[0].found if (f.name, f.subject) == (name, subject))


@pytest.mark.parametrize("era", PAGES)
def test_doctor_has_a_word_for_every_quantity(era: str) -> None:
    """A metric, or a sentence that says why there is none: never an empty line."""
    for one in played(era)[0].found:
        assert one.how or one.why, one
        assert (one.how is None) == (one.why is not None), one


def test_what_sglangs_ranks_tell_is_not_added_up() -> None:
    """aibrix#1614: two tensor-parallel ranks each tell the whole: 4 waited, 50 were preempted; it was 2 and 25."""
    facts, of = played("sglang-0.5.12-tp2")
    assert facts.engines == ("t",)
    assert of[H1, "t"].evidence["waiting"] == 2
    assert of[H3, "t"].value == 25
    assert of[H8, "t"].evidence["slow_rank"] == "1"


def test_what_data_parallel_engines_count_together_is_counted_once() -> None:
    """SGLang's front counts first tokens for both engines: given to each, one request was two."""
    facts, of = played("sglang-0.5.23-dp2")
    assert facts.engines == ("t/0", "t/1")
    assert of[H5, "t"].evidence["n"] == pytest.approx(600)
    assert of[H1, "t/1"].evidence["waiting"] == 2


def test_sglangs_slo_inside_a_bucket_is_undecided() -> None:
    """0.5 s lies between SGLang's bounds 0.4 and 0.6: the certain ones are over 0.6, and the text says the bounds."""
    signal = played("sglang-0.5.8")[1]["ttft-p99", "t"]
    assert signal.evidence["bounds_s"] == [0.4, 0.6]


def test_few_eager_steps_of_sglang_are_taken_for_none() -> None:
    """SGLang does not tell the sizes: up to 1 % may be steps over the captured ones, and are evidence alone."""
    reader, windows = PageReader("t"), Windows(EVERY_S)
    for n in range(1, 41):
        page = sglang("0.5.8")(n * EVERY_S)
        page = "\n".join(f'{line.rpartition(" ")[0]} {n * EVERY_S * 0.1}' if "decode_none" in line else line
                         for line in page.splitlines()) + "\n"
        readings = reader.read(page.encode(), "text/plain", T0 + n * EVERY_S)
        windows.ingest(Batch("engine:t", T0 + n * EVERY_S, 0.0, tuple(readings)))
    scene = Scene(windows, T0 + 1200, "node", SLO, {"t": Target("t", ("t",), SLO)})
    signal = compute(scene, [built_in()[H4]], {})[H4, "t"]
    assert (signal.value, signal.method) == (0.0, "estimate")
    assert signal.evidence["eager_share"] == pytest.approx(0.1 / 19.6)


def test_an_engines_own_rate_is_shown_and_never_judged() -> None:
    """sglang#4244: gen_throughput sticks at its last value when idle. No signal reads it."""
    assert "never judged" in found("sglang-0.5.8", "throughput").note
    assert '"throughput"' not in inspect.getsource(signals)


def test_a_clients_fault_is_no_error() -> None:
    """Validation failures of TGI, 400s of trtllm-serve, cancelled requests of Triton: as many as half of all."""
    for era in ("tgi-3.3.7", "trtllm-1.3", "triton-25.03"):
        assert played(era)[1][H7, "t"].evidence["errors"] == pytest.approx(6, abs=1), era


def test_ray_leaves_out_what_has_not_counted_and_that_is_0() -> None:
    """Counter.inc(0) is dropped under Ray: no preemption yet is 0 preemptions, and not a lost metric."""
    assert found("ray-2.50", "preemptions").how == "0"
    assert "appears with its first event" in found("ray-2.50", "preemptions").note


@pytest.mark.parametrize(("reason", "state"), [("error", "gap"), ("repetition", "na"), ("stop", "value")])
def test_a_reason_under_which_ray_counts_everything_is_no_reason(reason: str, state: str) -> None:
    """vllm#40840: each request was counted under the last reason of its version, so all of them failed, or none."""
    reader, windows = PageReader("t"), Windows(EVERY_S)
    for n in range(1, 41):
        page = ("ray_vllm_num_requests_running 3\nray_serve_deployment_queued_queries 0\n"
                f'ray_vllm_request_success{{finished_reason="{reason}"}} {60 * n}\n')
        readings = reader.read(page.encode(), "text/plain", T0 + n * EVERY_S)
        windows.ingest(Batch("engine:t", T0 + n * EVERY_S, 0.0, tuple(readings)))
    scene = Scene(windows, T0 + 1200, "node", SLO, {"t": Target("t", ("t",), SLO)})
    signal = compute(scene, [built_in()[H7]], {})[H7, "t"]
    assert (signal.state, "vllm#40840" in (signal.why or "")) == (state, state != "value")
    counted = {r.key: r.value for r in readings if r.name == "finished" and isinstance(r, Sample)}
    assert counted == {"stop" if reason == "stop" else "any": 2400}  # the load goes on being told


def test_a_reason_that_stands_alone_no_more_counts_from_there() -> None:
    """500 errors of the first minute, a quiet hour, one good answer: all 500 were counted as of the last 5 minutes."""
    reader, windows = PageReader("t"), Windows(EVERY_S)
    for n in range(1, 123):
        reason = 'ray_vllm_request_success{{finished_reason="{}"}} {}\n'
        page = "ray_vllm_num_requests_running 3\nray_serve_deployment_queued_queries 0\n" + reason.format(
            "error", min(500, 250 * n)) + (reason.format("stop", 1) if n > 120 else "")
        readings = reader.read(page.encode(), "text/plain", T0 + n * EVERY_S)
        windows.ingest(Batch("engine:t", T0 + n * EVERY_S, 0.0, tuple(readings)))
    rises = windows.increases("t", "finished", T0 + 117 * EVERY_S)
    assert (rises["error"], rises["stop"]) == (0, 1)


@pytest.mark.parametrize(("kind", "page", "why"), [
    ("sglang", PAGES["vllm-0.32"](600), "this is a page of vLLM, and its kind was given as SGLang: write kind: vllm"),
    ("vllm", PAGES["tgi-3.3.7"](600), "this is a page of TGI, and its kind was given as vLLM: write kind: tgi"),
    ("sglang", "python_info 1\n", "no engine that this version knows (only SGLang) writes this page"),
])
def test_a_wrong_kind_is_no_old_version(kind: str, page: str, why: str) -> None:
    """Every number was "SGLang tells it since 0.4.0; this page is older", so not applicable, and all was well."""
    readings = PageReader("t", kind=kind).read(page.encode(), "text/plain", 1.0)
    gaps = [r for r in readings if isinstance(r, Gap)]
    assert len(gaps) == len(readings) > 20
    assert {gap.code for gap in gaps} == {"missing"}
    assert all(gap.why.startswith(why) for gap in gaps)


@pytest.mark.parametrize("page", ["vllm:requests_now 3\nprocess_start_time_seconds 1\n", "sglang:lora_pool_usage 1\n"])
def test_a_page_of_none_of_the_names_that_we_know_is_not_old(page: str) -> None:
    """A version that renames all of them, or a proxy that lets few pass: "this page is older", and all was well."""
    readings = read_once(page)
    for name in ("waiting", "kv_usage", "ttft"):
        assert getattr(readings[name], "code", None) == "missing"


def test_a_worker_that_passes_nothing_on_is_its_own_diagnosis() -> None:
    """dynamo#14121: the worker is up and its engine's families are missing; the flag that gives them is named."""
    assert "event publishing" in (found("dynamo-worker-silent", "ttft").remedy or "")


def test_a_ratio_of_two_gauges_needs_both() -> None:
    """TGI's budget was not on the page: its reserved tokens were read as a share of 830,000 %."""
    page = "".join(f"{line}\n" for line in PAGES["tgi-3.3.7"](600).splitlines() if "batch_max_total" not in line)
    told_of = {r.name: r for r in PageReader("t").read(page.encode(), "text/plain", 1.0)}
    assert getattr(told_of["kv_usage"], "why", "").startswith("tgi_batch_max_total_tokens is not on the page")
    zero = PAGES["tgi-3.3.7"](600).replace("tgi_batch_max_total_tokens 10000", "tgi_batch_max_total_tokens 0")
    told_of = {r.name: r for r in PageReader("t").read(zero.encode(), "text/plain", 1.0)}
    assert getattr(told_of["kv_usage"], "code", None) == "no_data"


def read_once(page: str) -> dict[str, Sample | Gap]:
    """A page's readings by their name, of those without a key."""
    return {r.name: r for r in PageReader("t").read(page.encode(), "text/plain", 1.0) if not r.key}


def test_a_waiting_request_does_not_run_on_triton() -> None:
    """`active` is scheduled + waiting (tensorrtllm_backend#725): added to them, 3 that ran were 8, and a queue that
    nobody serves looked served."""
    page = PAGES["triton-25.03"](600)
    assert getattr(read_once(page)["running"], "value", None) == 3
    only = "".join(f"{line}\n" for line in page.splitlines() if 'request_type="scheduled"' not in line)
    assert getattr(read_once(only)["running"], "value", None) == 5


def test_a_counter_that_has_not_counted_is_no_missing_feature() -> None:
    """SGLang counts requests as they come and answers as they go: until the first answer, doctor said that this
    version counts none."""
    page = "".join(f"{line}\n" for line in PAGES["sglang-0.5.8"](600).splitlines() if "http_responses" not in line)
    reader = PageReader("t")
    reader.read((page + 'sglang:http_requests_total{endpoint="/generate"} 1\n').encode(), "text/plain", 1.0)
    assert reader.facts is not None
    assert next(f.why for f in reader.facts.found if f.name == "http") == \
        "sglang:http_responses_total counts nothing yet"


@pytest.mark.parametrize("told", ["nan", "inf", "None", "-1"])
def test_a_label_that_is_no_number_is_a_gap(told: str) -> None:
    """num_gpu_blocks stood as "None" on pages of vLLM, and as a float "nan" would have been one."""
    readings = read_once(PAGES["vllm-0.32"](600).replace('num_gpu_blocks="8192"', f'num_gpu_blocks="{told}"'))
    assert getattr(readings["kv_blocks"], "code", None) == "not_a_number"


def test_a_name_that_is_only_declared_hides_no_older_one() -> None:
    """A client that declares every family and fills the old one: the cache, 83 % full, was neither read nor missed."""
    page = ("# TYPE vllm:kv_cache_usage_perc gauge\n# TYPE vllm:gpu_cache_usage_perc gauge\n"
            'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.83\n'
            "# TYPE vllm:inter_token_latency_seconds histogram\n# TYPE vllm:time_per_output_token_seconds histogram\n"
            'vllm:time_per_output_token_seconds_bucket{engine="0",model_name="m",le="+Inf"} 5\n')
    reader = PageReader("t")
    told = {(r.name, r.key): r.value for r in reader.read(page.encode(), "text/plain", 1.0) if isinstance(r, Sample)}
    assert (told["kv_usage", ""], told["itl", "+Inf"]) == (0.83, 5.0)
    assert reader.facts is not None
    assert next(f.how for f in reader.facts.found if f.name == "kv_usage") == "vllm:gpu_cache_usage_perc"


def test_a_gauge_beside_a_counter_of_its_name_is_another_number() -> None:
    """prometheus-net#477: a page has both x and x_total, and we took the larger: 300 ran since the start, and 3 run."""
    page = ("# TYPE vllm:num_requests_running gauge\n"
            'vllm:num_requests_running{model_name="m"} 3\nvllm:num_requests_running_total{model_name="m"} 300\n'
            'vllm:prompt_tokens_total{model_name="m"} 100\nvllm:prompt_tokens{model_name="m"} 555\n')
    readings = read_once(page)
    assert [getattr(readings[name], "value", None) for name in ("running", "prompt_tokens")] == [3, 100]


@pytest.mark.parametrize("told", ["", '{quantile="0.99"}'])
def test_a_latency_that_is_one_number_is_no_latency_that_counts_nothing_yet(told: str) -> None:
    """A gateway wrote the mean of the first tokens, or only its quantiles: doctor said that nothing was counted yet."""
    name = "vllm:time_to_first_token_seconds"
    reader = PageReader("t")
    gaps = [r for r in reader.read(f"vllm:num_requests_running 3\n{name}{told} 7\n".encode(), "text/plain", 1.0)
            if isinstance(r, Gap) and r.name == "ttft"]
    assert ["has no buckets on this page" in gap.why for gap in gaps] == [True]
    assert reader.facts is not None
    assert [found.how for found in reader.facts.found if found.name == "ttft"] == [None]


def test_a_version_is_told_by_its_own_name() -> None:
    """The names under Ray are vLLM's, and so are the versions that they show: doctor spoke of Ray Serve LLM 0.11.2."""
    page = found("ray-2.50", "page")
    assert page.how == "Ray Serve LLM: vLLM 0.11.2 or later, by its names"
    assert "vLLM's name since 0.9.2" in found("ray-2.50", "kv_usage").note


def test_a_model_without_a_name_is_not_called_undefined() -> None:
    """trtllm-serve to about 1.2 wrote its labels so (aibrix#2004)."""
    assert played("trtllm-1.1")[0].model is None
    assert played("trtllm-1.3")[0].model == "m"


def test_an_engine_that_the_page_never_told_of_is_blind_and_the_others_are_judged() -> None:
    """vllm-ascend#10049: three of four engines on the page from the start was a remark, and woke nobody. It costs the
    fourth's signals, and not the first tokens of all."""
    windows, reader = Windows(EVERY_S), PageReader("t")
    for n in range(1, 41):
        page = "".join(PAGES["vllm-0.32"](n * EVERY_S).replace('engine="0"', f'engine="{i}"') for i in (0, 1, 3))
        readings = reader.read(page.encode(), "text/plain", T0 + n * EVERY_S)
        windows.ingest(Batch("engine:t", T0 + n * EVERY_S, 0.0, tuple(readings)))
    assert reader.facts is not None
    scene = Scene(windows, T0 + 1200, "node", SLO, {"t": Target("t", reader.facts.engines, SLO)})
    of = compute(scene, [built_in()[H1], built_in()[H2], built_in()[H5], built_in()["blind"]], {})
    assert [of[H2, f"t/{i}"].value for i in (0, 1, 3)] == [0.83] * 3
    assert (of[H1, "t/2"].state, of[H2, "t/2"].why) == ("gap", "engine t/2 is not on the page")
    assert of[H5, "t"].evidence["n"] == pytest.approx(1800)
    assert set(of["blind", "t"].evidence["lost"]) == {"queue_age of t/2", "kv_cache_utilization of t/2"}


def test_a_garbled_counter_does_not_stand_still_ever_after() -> None:
    """Two lines of a page ran into one another once, and preemptions were 1e17: from there a float counts in steps of
    16, so the one a minute was none. And 1e308 twice was "inf" for as long as it was kept."""
    reader, windows, page = PageReader("t"), Windows(EVERY_S), PAGES["vllm-0.32"]
    for n in range(1, 41):
        of = page(n * EVERY_S)
        if n in (3, 5, 7):
            known = next(line for line in of.splitlines() if line.startswith("vllm:num_preemptions_total"))
            of = of.replace(known, f"{known.rpartition(' ')[0]} {'1e17' if n == 3 else '1e308'}")
        readings = reader.read(of.encode(), "text/plain", T0 + n * EVERY_S)
        windows.ingest(Batch("engine:t", T0 + n * EVERY_S, 0.0, tuple(readings)))
        if n == 3:
            assert next(r.why for r in readings if r.name == "preemptions" and isinstance(r, Gap)) == \
                "vllm:num_preemptions_total is 1e+17, and cannot be over 2^53"
    assert windows.increase("t", "preemptions", T0 + 600, T0 + 1200) == 10


def reasons(page: str, of: range) -> bytes:
    """A page of vLLM on which requests also ended for these reasons, one each."""
    known = next(line for line in page.splitlines() if 'finished_reason="stop"' in line).rpartition(" ")[0]
    more = "".join(known.replace("stop", f"user {i}") + " 1\n" for i in of)
    return page.replace(known, more + known).encode()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_label_that_is_new_each_time_costs_its_own_number_and_no_memory(at_once: bool) -> None:
    """A fork of vLLM wrote the user into finished_reason: 600 users are 600 reasons, on one page or one after the
    other, each of which was remembered for three days. The error rate says so; the rest goes on, and so does it once
    the engine restarts without that."""
    reader, page = PageReader("t"), PAGES["vllm-0.32"](600)
    asked = [range(600)] if at_once else [range(i, i + 1) for i in range(600)]
    for n, of in enumerate(asked):
        readings = reader.read(reasons(page, of), "text/plain", T0 + n)
    (gap,) = [r for r in readings if r.name == "finished"]
    assert isinstance(gap, Gap)
    assert gap.code == "too_large"
    assert "more than 500 values of finished_reason" in gap.why
    assert next(r for r in readings if r.name == "kv_usage" and isinstance(r, Sample)).value == 0.83
    assert len(readings) < 200
    restarted = page.replace("process_start_time_seconds 9.9999e+08", "process_start_time_seconds 1.0001e+09")
    again = reader.read(reasons(restarted, range(2)), "text/plain", T0 + 9000)
    assert {"user 0", "user 1", "stop"} <= {r.key for r in again if r.name == "finished" and isinstance(r, Sample)}


def test_an_engine_that_one_garbled_page_names_is_none() -> None:
    """engine="0" came as engine="o" once: the engine was called t/0 from then on, so all its alerts ended, and t/o was
    missed until it restarted. The next in number (data parallelism grew) is taken at once, another at the second page
    that tells of it; both are missed when they are gone."""
    reader, page = PageReader("t"), PAGES["vllm-0.32"](600)
    grown = page + page.replace('engine="0"', 'engine="1"')
    named = grown + page.replace('engine="0"', 'engine="b"')
    told = []
    for of in (page, page.replace('engine="0"', 'engine="o"', 1), page, grown, page, named, page, named, page):
        readings = reader.read(of.encode(), "text/plain", T0)
        assert reader.facts is not None
        missed = {r.subject for r in readings if r.name == "kv_usage" and isinstance(r, Gap)}
        told.append((reader.facts.engines, missed))
    alone, two, three = (("t",), set[str]()), ("t/0", "t/1"), ("t/0", "t/1", "t/b")
    assert told == [alone, alone, alone, (two, set()), (two, {"t/1"}), (two, set()), (two, {"t/1"}),
                    (three, set()), (three, {"t/1", "t/b"})]


def two_ranks(waits: float, until_s: float) -> Mapping[tuple[str, str], Signal]:
    """SGLang's two data-parallel engines at second 300: one first token a second of t/0 until `until_s`, nine of t/1;
    from 100 s on so many wait at t/0. First tokens are told for both together."""
    reader, windows = PageReader("t"), Windows(5.0)
    for n in range(1, 61):
        t = n * 5.0
        own, lines = min(t, until_s), []
        for rank, tokens, queue in (("0", own, waits if t > 100 else 0), ("1", 9 * t, 0)):
            of = f'{{dp_rank="{rank}",tp_rank="0"}}'
            lines += [f"sglang:num_running_reqs{of} 3", f"sglang:token_usage{of} 0.5",
                      f"sglang:num_queue_reqs{of} {queue}",
                      f'sglang:realtime_tokens_total{{dp_rank="{rank}",tp_rank="0",mode="decode"}} {20 * tokens}']
        lines += [f"sglang:time_to_first_token_seconds_{part} {own + 9 * t}" for part in (
            'bucket{le="1"}', 'bucket{le="+Inf"}', "sum", "count")]
        readings = reader.read("".join(f"{line}\n" for line in lines).encode(), "text/plain", T0 + t)
        windows.ingest(Batch("engine:t", T0 + t, 0.0, tuple(readings)))
    scene = Scene(windows, T0 + 300, "node", SLO, {"t": Target("t", ("t/0", "t/1"), SLO)})
    return compute(scene, [built_in()[H1], built_in()["engine-stuck"]], {})


def test_a_queue_age_by_a_count_of_several_engines_is_at_least_and_not_at_most() -> None:
    """The head had waited for 10 s, and the other engine's nine in ten first tokens made it 0.9 s, at most 5 s."""
    signal = two_ranks(10, 300)[H1, "t/0"]
    assert signal.low is not None
    assert signal.low <= 10
    assert signal.high is None or signal.high >= 10
    assert "for all engines together" in signal.evidence["note"]


def test_one_of_several_engines_that_hangs_is_stuck_though_the_others_count_on() -> None:
    """First tokens that both count together moved on, so the one that made no token for 200 s was never stuck."""
    of = two_ranks(5, 100)
    assert of["engine-stuck", "t/0"].evidence["flat_s"] == pytest.approx(200, abs=5)
    assert of["engine-stuck", "t/1"].value == 0


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_says_something_of_every_number(kind: str) -> None:
    """What a map leaves out would be neither a value nor N/A: a rule that nobody sees."""
    names = list(SAMPLES)
    of_an_engine = set(names[: names.index("down")])
    quantities = load_map(kind).quantities
    assert set(quantities) == of_an_engine
    assert all(q.names or q.absent_means for q in quantities.values())
    assert all(SAMPLES[name] == "counter" for name, q in quantities.items() if q.zero_beside)


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_every_router_says_something_of_every_number(kind: str) -> None:
    """The same for routers, which are never engines."""
    router = load_map(kind)
    assert router.role == "router"
    assert set(router.quantities) == {name for name in SAMPLES if name.startswith("router_")}
    assert all((q.names or q.absent_means) and q.of == "target" for q in router.quantities.values())


@pytest.mark.parametrize("era", [era for era in PAGES if era != "vllm-muted"])
def test_a_page_without_its_colons_shows_whose_it_is(era: str) -> None:
    """A collector in between writes `sglang_…`: a Dynamo worker's page was no engine's."""
    page = re.sub("(?m)^(# TYPE )?(vllm|sglang|llamacpp|lmdeploy):", r"\1\2_", PAGES[era](600))
    assert detect([load_map(kind) for kind in KINDS], Reader(frozenset()).read(page.encode()).families)[0] == load_map(
        kind_of(era))


@pytest.mark.parametrize("era", PAGES)
def test_no_engine_is_taken_for_another(era: str) -> None:
    """A page that two maps claim is read by the one that its families are of."""
    families = Reader(frozenset()).read(PAGES[era](600).encode()).families
    others = [load_map(kind) for kind in reversed(KINDS) if kind not in (kind_of(era), "vllm", "ray-serve-llm")]
    mine = detect([*others], families)[0]
    passed_on = {"dynamo-worker": {"dynamo-worker"}}.get(era, set())
    assert mine is None or mine.kind in passed_on, mine


def test_an_index_and_a_bound_that_are_no_numbers_are_left_out() -> None:
    """Found by tests.fuzz: each failed the whole read with a fault of ours, at every page."""
    page = (GOLDEN / "vllm-0.32.txt").read_text()
    wrong = page.replace('engine="0"', f'engine="{"9" * 5000}"')
    assert PageReader("t").read(wrong.encode(), "text/plain", T0)
    for name in ("sglang-0.5.12-tp2", "vllm-0.32", "trtllm-1.1"):
        page = (GOLDEN / f"{name}.txt").read_text()
        readings = PageReader("t").read(page.replace('le="0.5"', 'le="5t_llm"').encode(), "text/plain", T0)
        assert "5t_llm" not in {reading.key for reading in readings}


def test_tgis_queue_that_only_rises_is_no_witness() -> None:
    """TGI#2192: the gauge stood at 3 all night with nothing there, and somebody was woken for a stuck engine."""
    idle = ("tgi_request_count 9\ntgi_request_success 9\ntgi_batch_current_size %d\ntgi_queue_size 3\n"
            "tgi_batch_current_max_tokens 0\ntgi_batch_max_total_tokens 10000\ntgi_batch_inference_count 9\n")
    for running, want in ((0, 0.0), (1, 1.5)):
        reader, windows = PageReader("t"), Windows(5.0)
        for at in times(0, 180):
            windows.ingest(Batch("t", T0 + at, 0.0, tuple(reader.read((idle % running).encode(), "", T0 + at))))
        assert reader.facts is not None
        drifting = frozenset(one.name for one in reader.facts.found if one.drifts)
        target = Target("t", ("t",), drifting=drifting)
        got = ask(Scene(windows, T0 + 180, "node", SLO, {"t": target}), "engine-stuck", "t")
        assert (set(drifting), got.value) == ({"waiting"}, want)


@pytest.mark.parametrize(("era", "at_end"), [("tgi-3.3.7", True), ("vllm-0.32", False)])
def test_the_map_says_whose_tokens_count_at_the_end(era: str, at_end: bool) -> None:
    """A counter that stands still for the length of an answer shows no hang."""
    assert found(era, "generation_tokens").at_end is at_end
