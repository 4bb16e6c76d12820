"""What the agent makes of tocsin-probe's numbers: where it tells, it wins over every estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from agent.evaluate import judge
from agent.model import Batch, EngineFacts, FoundEngine, Gap, ProbeFacts, Sample, Signal, Why
from agent.node import Node, Setup, probe_advice
from agent.signals import Target, probe_signals
from agent.windows import Windows
from rules import severity_of
from tests.scenes import PAGE, SLO, T0, ask, built_in, read, scene, times

PROBE = "engine_probe"
Numbers = Mapping[str, float | None]


def story(end: float, page: Callable[[float], Numbers], probe: Callable[[float], Numbers] | None = None) -> Windows:
    """A page every 5 s, and the probe's file beside it."""
    windows = Windows(5.0)
    for at in times(0, end):
        read(windows, at, "e", {**PAGE, **page(at)})
        if probe is not None:
            read(windows, at, "e", probe(at), source=PROBE)
    return windows


def lose(windows: Windows, at_s: float, *names: str, code: Why = Why.LOST, why: str = "its writer has ended") -> None:
    windows.ingest(Batch(PROBE, T0 + at_s, 0.0, tuple(Gap(name, "e", code, why, T0 + at_s) for name in names)))


def verdict(got: Signal, rule: str) -> str:
    return judge(built_in()[rule], got, built_in()[rule].limit(SLO))


def test_the_probe_s_queue_age_wins_over_the_bound() -> None:
    """The page's bound would say 0 to 200 s of the same queue; the probe knows the request of 0.3 s ago."""
    windows = story(200, lambda at: {"waiting": 3.0, "ttft.count": at},
                    lambda at: {"probe_queue_age_s": 0.3, "probe_queued": 3.0, "probe_first_token_age_s": 0.9})
    got = ask(scene(windows, 200), "queue-age")
    assert (got.value, got.method) == (0.3, "exact: probe")
    assert got.evidence == {"queued": 3.0, "no_first_token_age_s": 0.9}
    assert verdict(got, "queue-age") == "breach"  # half of 500 ms is 250 ms


def test_the_probe_tells_the_queue_of_a_page_that_no_longer_answers() -> None:
    """The web server hangs and the core goes on: the age is still read."""
    windows = story(60, lambda at: {"waiting": 3.0}, lambda at: {"probe_queue_age_s": at})
    for at in times(65, 100):
        windows.ingest(Batch("source of e", T0 + at, 0.0, (Gap("waiting", "e", Why.TIMEOUT, "late", T0 + at),)))
        read(windows, at, "e", {"probe_queue_age_s": at}, source=PROBE)
    assert ask(scene(windows, 100), "queue-age").value == 100.0


def test_a_probe_that_has_ended_leaves_the_bound_and_says_so() -> None:
    """kill -9 of a process: better the bound than nothing, and nobody takes it for exact."""
    windows = story(200, lambda at: {"waiting": 0.0, "ttft.count": at}, lambda at: {"probe_queue_age_s": 0.0})
    read(windows, 205, "e", {**PAGE, "waiting": 1.0, "ttft.count": 205.0})
    lose(windows, 205, "probe_queue_age_s")
    got = ask(scene(windows, 205), "queue-age")
    assert got.method == "bound"
    assert "its writer has ended" in got.evidence["note"]


def test_graph_fallbacks_are_a_share_of_the_decode_steps() -> None:
    """30,000 decode steps in 5 minutes, 30 eager though captured; 300 above the captured sizes are by design."""
    windows = story(600, lambda at: {}, lambda at: {
        "probe_graph_steps.graph": 98.9 * at, "probe_graph_steps.eager": 0.1 * at, "probe_graph_steps.over": at,
        "probe_graph_largest": 512.0})
    got = ask(scene(windows, 600), "graph-fallback")
    assert got.value == pytest.approx(0.001)
    assert got.method == "exact: probe"
    assert got.evidence["eager_steps"] == pytest.approx(30.0)
    assert got.evidence["over_captured_sizes"] == pytest.approx(300.0)
    assert got.evidence["largest_captured"] == 512.0
    assert verdict(got, "graph-fallback") == "breach"


def test_steps_above_the_captured_sizes_are_no_fallback() -> None:
    """All eager steps are too large for any graph: 0, and not 1 %."""
    windows = story(600, lambda at: {}, lambda at: {
        "probe_graph_steps.graph": 99 * at, "probe_graph_steps.eager": 0.0, "probe_graph_steps.over": at})
    assert verdict(ask(scene(windows, 600), "graph-fallback"), "graph-fallback") == "clear"


def test_enforce_eager_has_no_fallbacks() -> None:
    """N/A, not 100 %."""
    windows = story(600, lambda at: {}, lambda at: {"probe_queue_age_s": 0.0})
    lose(windows, 600, "probe_graph_steps", code=Why.NOT_SUPPORTED, why="CUDA graphs are off (--enforce-eager)")
    got = ask(scene(windows, 600), "graph-fallback")
    assert got.state == "na"
    assert got.why == "CUDA graphs are off (--enforce-eager)"


def ranks(slow_s: float, *, steps_per_s: float = 10.0) -> Callable[[float], Numbers]:
    """Two ranks that compute 10 ms a step, the second of them longer."""
    return lambda at: {"probe_steps": steps_per_s * at, "probe_tp_size": 2.0,
                       **{f"probe_rank_steps.{rank}": 10 * at for rank in (0, 1)},
                       "probe_rank_seconds.0": 0.1 * at, "probe_rank_seconds.1": 10 * at * slow_s,
                       "probe_rank_late_s.0": 0.0, "probe_rank_late_s.1": 0.0004}


@pytest.mark.parametrize(("slow_s", "spread", "ticket", "page"), [
    (0.0102, 0.0198, "clear", "clear"), (0.0108, 0.0769, "breach", "clear"), (0.015, 0.4, "breach", "breach")])
def test_the_spread_names_the_slow_rank(slow_s: float, spread: float, ticket: str, page: str) -> None:
    """(max − min) ÷ median of 10 ms and 10.2, 10.8 or 15 ms; the median of two is their middle."""
    windows = story(600, lambda at: {}, ranks(slow_s))
    got = ask(scene(windows, 600), "rank-spread")
    assert got.value == pytest.approx(spread, abs=1e-3)
    assert (got.method, got.evidence["slow_rank"], got.evidence["late_rank"]) == ("exact: probe", "1", "1")
    assert (verdict(got, "rank-spread"), verdict(got, "rank-straggler")) == (ticket, page)


def test_a_thousand_steps_are_asked_for() -> None:
    """The noise of 150 steps is as large as the limit."""
    windows = story(600, lambda at: {}, ranks(0.015, steps_per_s=3.0))
    got = ask(scene(windows, 600), "rank-straggler")
    assert (got.state, got.why) == ("idle", "900 of at least 1000 steps")


def test_the_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    """Ranks 0 and 1 are one group, 2 and 3 the next, which has twice the layers: only within a group is one slow."""
    windows = story(600, lambda at: {}, lambda at: {
        "probe_steps": 10 * at, "probe_tp_size": 2.0, **{f"probe_rank_steps.{r}": 10 * at for r in range(4)},
        **{f"probe_rank_seconds.{r}": 10 * at * s for r, s in enumerate((0.01, 0.01, 0.02, 0.022))}})
    got = ask(scene(windows, 600), "rank-spread")
    assert got.value == pytest.approx(0.002 / 0.021)
    assert got.evidence["slow_rank"] == "3"


def own_ranks(names: Callable[[float], int], slow: float = 1.0) -> Callable[[float], Numbers]:
    """SGLang's own seconds per rank: each computes 0.1 s of a second, the last of four `slow` times that."""
    return lambda at: {"graph_passes.decode_cuda_graph": 10 * at,
                       **{f"rank_seconds.{r}": 0.1 * at * (slow if r == 3 else 1.0) for r in range(names(at))}}


@pytest.mark.parametrize(("end", "names", "state", "why"), [
    (600, lambda at: 4, "value", ""),
    (600, lambda at: 4 if at < 450 else 3, "gap", "rank 3 tells its time no more"),  # 150 s of 300 s would look slow
    (600, lambda at: 3 if at < 450 else 4, "idle", "rank 3 had computed nothing when this window began"),
    (800, lambda at: 3 if at < 450 else 4, "value", ""),  # a whole window later it is compared as the others are
    (800, lambda at: 4 if at < 450 else 3, "value", ""),
])
def test_a_rank_that_goes_or_comes_makes_no_healthy_one_slow(
        end: float, names: Callable[[float], int], state: str, why: str) -> None:
    """Four ranks that compute alike; the fourth goes, or comes, 150 s ago. It paged, and named a healthy rank."""
    got = ask(scene(story(end, own_ranks(names)), end), "rank-straggler")
    assert got.state == state
    if state == "value":
        assert got.value == pytest.approx(0.0, abs=1e-6)
    else:
        assert got.why == why


def test_a_slow_rank_that_vanishes_has_not_become_even_with_the_others() -> None:
    """Rank 3 computes half as long again, and is gone for 10 s: the three that are left say nothing of it."""
    def probe(at: float) -> Numbers:
        there = range(4 if at < 590 else 3)
        return {"probe_steps": 10 * at, "probe_tp_size": 4.0, **{f"probe_rank_steps.{r}": 10 * at for r in there},
                **{f"probe_rank_seconds.{r}": 0.1 * at * (1.5 if r == 3 else 1.0) for r in there}}

    before = ask(scene(story(585, lambda at: {}, probe), 585), "rank-straggler")
    assert before.value == pytest.approx(0.5)
    assert verdict(before, "rank-straggler") == "breach"
    for windows in (story(600, lambda at: {}, probe), story(600, own_ranks(lambda at: 4 if at < 590 else 3, 1.5))):
        gone = ask(scene(windows, 600), "rank-straggler")
        assert (gone.state, gone.why) == ("gap", "rank 3 tells its time no more")


def hidden(profiled: int) -> Windows:
    """Ranks under CUDA graphs, and so many profiled steps of 10 and 12 ms."""
    windows = story(600, lambda at: {}, lambda at: {
        "probe_rank_late_s.0": 0.0, "probe_rank_late_s.1": 0.0031, "probe_tp_size": 2.0,
        **({f"probe_profiled_steps.{r}": profiled * at / 600 for r in (0, 1)} | {
            "probe_profiled_seconds.0": profiled * at / 600 * 0.010,
            "probe_profiled_seconds.1": profiled * at / 600 * 0.012} if profiled else {})})
    lose(windows, 600, "probe_rank_seconds", code=Why.NOT_SUPPORTED, why="CUDA graphs hide the waiting")
    return windows


def test_under_cuda_graphs_the_skew_is_shown_and_nothing_is_claimed() -> None:
    """N/A with the reason, how late rank 1 enters, and the setting that would tell more."""
    got = ask(scene(hidden(0), 600), "rank-spread")
    assert got.state == "na"
    assert got.why is not None
    assert "CUDA graphs hide the waiting; rank 1 enters a step 3.10 ms after the first" in got.why
    assert "TOCSIN_PROBE_PROFILE_MINUTES" in got.why


def test_profiled_steps_stand_in_where_somebody_asked_for_them() -> None:
    """Six of them: 12 ms against 10 ms is 0.18; two are too few."""
    got = ask(scene(hidden(6), 600), "rank-spread")
    assert got.value == pytest.approx(0.002 / 0.011)
    assert got.method == "estimate: profiled steps"
    assert ask(scene(hidden(2), 600), "rank-spread").state == "na"


HUNG = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "generation_tokens": 700.0, "ttft.count": 30.0}


def test_a_hang_that_the_page_hides_is_seen_by_the_probe() -> None:
    """vLLM's core was stopped: running 0, waiting 0, /health 200. The oldest request without a token came 31 s ago."""
    windows = story(60, lambda at: {**HUNG, "generation_tokens": 10 * at},
                    lambda at: {"probe_first_token_age_s": 0.2, "probe_steps": 10 * at})
    for at in times(65, 95):
        read(windows, at, "e", {**PAGE, **HUNG})
        read(windows, at, "e", {"probe_first_token_age_s": at - 64, "probe_steps": 600.0}, source=PROBE)
        if at == 75:
            assert verdict(ask(scene(windows, 75), "engine-stuck"), "engine-stuck") == "clear"
    got = ask(scene(windows, 95), "engine-stuck")
    assert verdict(got, "engine-stuck") == "breach"
    assert got.evidence["no_first_token_age_s"] == 31.0
    assert got.evidence["flat_with_probe_s"] == 30.0


def test_one_long_prefill_is_no_hang_where_the_probe_sees_its_steps() -> None:
    """200,000 tokens in chunks: no token for 90 s, and a step every 300 ms."""
    windows = story(100, lambda at: {**HUNG, "running": 1.0, "generation_tokens": 0.0},
                    lambda at: {"probe_first_token_age_s": at, "probe_steps": 3 * at})
    got = ask(scene(windows, 100), "engine-stuck")
    assert got.value is not None
    assert got.value < 0.5


def test_the_age_without_a_first_token_is_told_beside_the_signals() -> None:
    """No rule judges it: it is prefill too. A person and a test may ask."""
    windows = story(10, lambda at: {}, lambda at: {"probe_first_token_age_s": 4.5})
    assert [(s.id, s.value, s.method) for s in probe_signals(scene(windows, 10))] == [
        ("no_first_token_age", 4.5, "exact: probe")]


# --- whose process it is, and what a person is told ------------------------------------------------------------------


def test_a_process_is_of_the_target_at_whose_port_discovery_saw_it() -> None:
    """Configured or found: discovery knows the processes at a port; engines are those that the page told."""
    node = Node(Setup("n", 5.0, SLO, (Target("llama", (), port=8000), Target("far", ())), (), severity_of))
    node.see([FoundEngine("127.0.0.1:8000", "http://127.0.0.1:8000", "vllm", "its command line", 8000, (11, 12))], T0)
    assert node.owners() == {11: ("llama", ("llama",)), 12: ("llama", ("llama",))}
    node.take(Batch("engine:llama", T0, 0.0, (), engine=EngineFacts("llama", ("llama/0", "llama/1"), "vllm")))
    assert node.owners()[12] == ("llama", ("llama/0", "llama/1"))


def test_doctor_says_what_the_probe_tells_and_what_it_would() -> None:
    """A vLLM without it is told what it would give; with it, what stands aside and why."""
    vllm = EngineFacts("e", ("e",), "vllm")
    assert probe_advice(None, vllm)[0].startswith("no tocsin-probe in it: installed into vLLM's environment")
    assert probe_advice(None, EngineFacts("e", ("e",), "sglang")) == []
    facts = ProbeFacts("e", "0.34.0", ("front end", "2 ranks"), ("queue: AttributeError: no schedule",), (77,))
    assert probe_advice(facts, vllm) == [
        "tocsin-probe tells of its front end, 2 ranks (vLLM 0.34.0)",
        "tocsin-probe stands aside at the queue: AttributeError: no schedule",
        "process 77 of it is stopped (SIGSTOP)"]


def test_with_the_probe_a_hang_can_be_seen_and_nobody_is_told_otherwise() -> None:
    """`doctor` recommends a canary only where nothing else would see a hang."""
    node = Node(Setup("n", 5.0, SLO, (Target("e", (), port=8000, address="127.0.0.1:8000"),), (), severity_of))
    node.take(Batch("engine:e", T0, 0.0, (Sample("waiting", "e", 0.0, T0),), engine=EngineFacts("e", ("e",), "vllm")))
    node.step(T0, 0.0)
    assert any(text.startswith("not seen: a hang") for text in node.advice("e"))
    node.take(Batch(PROBE, T0, 0.0, (), probes=(ProbeFacts("e", "0.32.0", ("front end",), (), ()),)))
    assert not any(text.startswith("not seen: a hang") for text in node.advice("e"))
