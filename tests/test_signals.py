"""Signals, each as an incident: what the engine and the GPU told, and the number worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import words
from agent.evaluate import judge
from agent.model import Alert, Batch, Gap, GpuFacts, Rule, Sample, Signal, Slo, Why
from agent.signals import SIGNALS, Ask, Scene, Target, alert_labels, compute, queue_age_bound
from agent.windows import Windows
from tests.scenes import GPU, PAGE, SLO, T0, ask, built_in, hist, read, read_many, samples, scene, times

Numbers = Mapping[str, float | None]
QUEUE_DATA = Path(__file__).parent / "data" / "kv-pressure-queue.json"


def serve(start: float, end: float, tells: Callable[[float], Numbers] | Numbers, *, step: float = 5.0,
          into: Windows | None = None, subject: str = "e") -> Windows:
    """An engine that is read every `step` seconds and tells PAGE, changed by `tells`."""
    windows = Windows(step) if into is None else into
    for at in times(start, end, step):
        told = tells(at) if callable(tells) else tells
        read(windows, at, subject, {**PAGE, **told})
    return windows


def at_end(windows: Windows, rule: str | Rule, at_s: float, **more: Any) -> Signal:
    """The signal at a second of the story."""
    resolved_s = more.pop("resolved_s", None)
    subject = more.pop("subject", "e")
    return ask(scene(windows, at_s, **more), rule, subject, resolved_s)


def verdict(got: Signal, rule: str, slo: Slo = SLO) -> str:
    """What the built-in rule says of a signal."""
    asked = built_in(slo)[rule]
    return judge(asked, got, asked.limit(slo))


def started(at_s: float) -> Callable[[float], Numbers]:
    """A process that replaced another one at a second of the story."""
    return lambda at: {"process_start": T0 + at_s if at >= at_s else T0 - 9999}


# --- H1: the queue --------------------------------------------------------------------------------------------------


def queue_ages(poll: int, offset: int) -> dict[float, tuple[float, float, float | None]]:
    """The bound at every `poll`-th scrape of the recording."""
    windows, found = Windows(float(poll)), {}
    for at, waiting, first_tokens in json.loads(QUEUE_DATA.read_text())["scrapes"][offset::poll]:
        read(windows, at, "e", {"waiting": float(waiting), "ttft.count": float(first_tokens)})
        asked = Ask(scene(windows, at), SIGNALS["queue_age"][0], built_in()["queue-age"], "e", 0.0)
        sample = windows.latest("e", "waiting", T0 + at)
        assert isinstance(sample, Sample)
        found[at] = queue_age_bound(asked, sample)
    return found


def true_ages(scrapes: Mapping[float, Any]) -> dict[float, float]:
    """The true age at each scrape; 0 where none is listed."""
    listed = json.loads(QUEUE_DATA.read_text())["oldest_age_s"]
    return {at: next((age for t, age in listed if abs(t - at) < 0.3), 0.0) for at in scrapes}


def test_the_queue_age_of_a_real_engine_is_near_the_load_generators_own_clock() -> None:
    """vLLM 0.32 under KV pressure, read every second: −1.3 s to +2 s wherever the bound is over 0."""
    ages = queue_ages(1, 0)
    truth = true_ages(ages)
    errors = [age - truth[at] for at, (age, _, _) in ages.items() if age > 0]
    assert len(errors) > 30
    assert min(errors) >= -1.3
    assert max(errors) <= 2.0


@pytest.mark.parametrize("poll", [1, 2, 5])
def test_the_queue_age_finds_every_long_wait_of_the_recording_but_one(poll: int) -> None:
    """34 of the 35 scrapes with a request of 0.25 s or older, and none of the other 246, whatever the poll."""
    ages = {at: age for offset in range(poll) for at, (age, _, _) in queue_ages(poll, offset).items()}
    truth = true_ages(ages)
    found = [at for at, age in ages.items() if age >= 0.25]
    assert len([at for at in ages if truth[at] >= 0.25]) == 35
    assert len([at for at in found if truth[at] >= 0.25]) == 34
    assert [at for at in found if truth[at] < 0.25] == []


def test_the_head_of_the_queue_is_the_request_after_the_last_first_token() -> None:
    """A_j = 10, 13, 15 at 0, 5, 10; 11 have begun: number 12 arrived two thirds into 0 to 5, and is 10 − 3.3 s old."""
    told = {0.0: (10.0, 0.0), 5.0: (10.0, 3.0), 10.0: (11.0, 4.0)}
    windows = serve(0, 10, lambda at: {"ttft.count": told[at][0], "waiting": told[at][1]})
    got = at_end(windows, "queue-age", 10)
    assert got.value == pytest.approx(10 - 10 / 3)
    assert (got.low, got.high, got.method) == (5.0, 10.0, "bound")
    assert verdict(got, "queue-age") == "breach"


def test_an_empty_queue_has_no_age() -> None:
    """Exactly 0."""
    got = at_end(serve(0, 60, {}), "queue-age", 60)
    assert (got.value, got.method, verdict(got, "queue-age")) == (0.0, "exact", "clear")


def test_a_queue_seen_for_the_first_time_is_undecided() -> None:
    """It began within the last 5 s: between 0 and 5 s old, the limit is 0.25 s."""
    got = at_end(serve(0, 60, lambda at: {"waiting": 2.0 if at == 60 else 0.0}), "queue-age", 60)
    assert (got.low, got.high) == (0.0, 5.0)
    assert verdict(got, "queue-age") == "undecided"


def test_a_queue_older_than_the_watching_is_at_least_so_old() -> None:
    """Waiting from the first read on, 20 s ago: at least 20 s, and nobody knows how much more."""
    windows = serve(0, 20, lambda at: {"waiting": 3.0, "generation_tokens": at})
    got = at_end(windows, "queue-age", 20)
    assert (got.value, got.low, got.high) == (20.0, 20.0, None)
    assert verdict(got, "queue-age") == "breach"


def test_the_uncertainty_of_the_queue_age_spans_what_nobody_saw() -> None:
    """No scrape got through for a minute before the wait: it is 0 to 60 s old, so undecided, not 30 s."""
    windows = serve(0, 60, {})
    serve(120, 120, {"waiting": 2.0}, into=windows)
    got = at_end(windows, "queue-age", 120)
    assert (got.low, got.high) == (0.0, 60.0)
    assert verdict(got, "queue-age") == "undecided"


def crowded(first: float, waiting: float, running: float, ended: float = 0.0) -> Numbers:
    """An engine whose KV cache is full."""
    return {"ttft.count": first, "waiting": waiting, "running": running, "finished.stop": ended, "kv_usage": 1.0}


def test_a_preempted_request_is_no_head_of_the_queue() -> None:
    """4 have begun; from 5 s on one of them waits again. 2 new ones come between 10 and 15 s: number 5 at 12.5 s.

    Counting the preempted one, number 5 would have come before 5 s, into a queue that nobody was in at 10 s.
    """
    told = {0.0: crowded(4, 0, 4), 5.0: crowded(4, 1, 3), 10.0: crowded(4, 1, 3), 15.0: crowded(4, 3, 3)}
    only_it = at_end(serve(0, 10, told.__getitem__), "queue-age", 10)
    assert (only_it.value, only_it.low, only_it.high) == (0.0, 0.0, 10.0)
    with_others = at_end(serve(0, 15, told.__getitem__), "queue-age", 15)
    assert (with_others.value, with_others.low) == (2.5, 0.0)
    windows = Windows(5.0)
    for at in (0.0, 5.0, 10.0):  # an engine that counts no preemptions has none in its queue
        read(windows, at, "e", told[at])
    assert at_end(windows, "queue-age", 10).value == 5.0


def test_a_client_that_left_is_not_taken_for_a_preempted_request_for_ever() -> None:
    """4 ran, a client left, counted nowhere: who waits may be new or preempted, until 4 run again: then it is new."""
    told = {0.0: crowded(4, 0, 4), 5.0: crowded(4, 1, 3), 10.0: crowded(5, 1, 4), 15.0: crowded(5, 1, 4)}
    assert verdict(at_end(serve(0, 5, told.__getitem__), "queue-age", 5), "queue-age") == "undecided"
    assert at_end(serve(0, 15, told.__getitem__), "queue-age", 15).low == 5.0


def test_clients_that_gave_up_are_not_the_head() -> None:
    """5 waited and left without a first token; the one that came now is young."""
    waits = {0.0: 5.0, 5.0: 5.0, 10.0: 0.0, 15.0: 0.0, 20.0: 1.0}
    got = at_end(serve(0, 20, lambda at: {"waiting": waits[at], "ttft.count": 7.0}), "queue-age", 20)
    assert (got.low, got.high) == (0.0, 5.0)


def test_the_queue_of_a_dead_process_is_not_the_new_ones() -> None:
    """Last page of the old one at 995, two wait on the first of the new one at 1000: 200 to 205 s old, not 300."""
    windows = serve(900, 995, {"waiting": 9.0, "process_start": T0, "ttft.count": 50.0})
    serve(1000, 1200, lambda at: {"waiting": 2.0, "process_start": T0 + 998, "ttft.count": 0.0,
                                  "generation_tokens": at}, into=windows)
    got = at_end(windows, "queue-age", 1200)
    assert (got.low, got.high) == (200.0, 205.0)


def test_a_frozen_queue_is_not_believed() -> None:
    """Three waiting for over a minute while no counter moves and nobody else sees a request: a Gap (L2 decides)."""
    got = at_end(serve(0, 100, {"waiting": 3.0}), "queue-age", 100)
    assert (got.state, got.code) == ("gap", Why.STALE)
    moving = serve(0, 100, lambda at: {"waiting": 3.0, "generation_tokens": at})
    assert at_end(moving, "queue-age", 100).state == "value"


# --- H2, M5, H4 -----------------------------------------------------------------------------------------------------


def test_c027_kv_utilization_is_unknown_where_nothing_tells_it() -> None:
    """0.83 is under 0.85; a page without either name is a Gap that says so, and not 0."""
    told = at_end(serve(0, 0, {"kv_usage": 0.83}), "kv-cache-utilization", 0)
    assert (told.value, verdict(told, "kv-cache-utilization")) == (0.83, "clear")
    windows = Windows(5.0)
    read(windows, 0, "e", {k: v for k, v in PAGE.items() if k != "kv_usage"})
    lost = at_end(windows, "kv-cache-utilization", 0)
    assert (lost.state, lost.code, lost.value) == ("gap", Why.MISSING, None)


def test_a_full_cache_breaches_at_85_percent() -> None:
    """At, not only over."""
    got = at_end(serve(0, 0, {"kv_usage": 0.85}), "kv-cache-utilization", 0)
    assert verdict(got, "kv-cache-utilization") == "breach"


def test_a_cache_that_stands_full_while_nothing_moves_is_stale() -> None:
    """After a mass abort vLLM's gauge stood at 99 % for hours (vllm#29928)."""
    got = at_end(serve(0, 100, {"kv_usage": 0.99, "running": 0.0}), "kv-cache-utilization", 100)
    assert (got.state, got.code) == ("gap", Why.STALE)


def test_an_engine_that_sleeps_is_judged_by_nothing() -> None:
    """Its page tells old numbers; alerts close with "asleep"."""
    windows = serve(0, 400, {"asleep": 1.0, "kv_usage": 0.99, "waiting": 3.0})
    for rule in ("queue-age", "kv-cache-utilization", "preemptions", "ttft-p99", "error-burn-fast", "engine-stuck",
                 "prefix-cache-hit-rate", "error-rate"):
        got = at_end(windows, rule, 400)
        assert (got.state, got.why) == ("na", "asleep"), rule


def test_graph_fallbacks_are_not_told_by_stock_vllm() -> None:
    """N/A with the reason; a probe that tells them is believed."""
    assert at_end(serve(0, 5, {}), "graph-fallback", 5).state == "na"
    got = at_end(serve(0, 5, {"graph_fallback": 0.2}), "graph-fallback", 5)
    assert (got.value, verdict(got, "graph-fallback")) == (0.2, "breach")


# --- H3 -------------------------------------------------------------------------------------------------------------


def test_one_preemption_in_the_hour_is_a_ticket_until_the_hour_is_clean() -> None:
    """Seen at 2000 s: still there at 5590, gone at 5610."""
    windows = serve(0, 5590, lambda at: {"preemptions": 1.0 if at >= 2000 else 0.0})
    assert at_end(windows, "preemptions", 5590).value == 1
    serve(5595, 5610, {"preemptions": 1.0}, into=windows)
    got = at_end(windows, "preemptions", 5610)
    assert (got.value, verdict(got, "preemptions")) == (0, "clear")


def test_preemptions_from_before_the_last_resolve_never_count_again() -> None:
    """61 before it resolved at 3000, 2 after: 2; and that an hour is not over since does not make it a Gap."""
    windows = serve(0, 3600, lambda at: {"preemptions": 63.0 if at > 3300 else 61.0 if at >= 1000 else 0.0})
    assert at_end(windows, "preemption-storm", 3600).value == 63
    got = at_end(windows, "preemption-storm", 3600, resolved_s=3000)
    assert (got.state, got.value) == ("value", 2)


def test_an_hour_that_was_watched_for_less_than_half_is_a_gap() -> None:
    """29 min watched of the hour; with 30 it is a number."""
    windows = serve(0, 1740, {})
    got = at_end(windows, "preemptions", 1740)
    assert (got.state, got.code) == ("gap", Why.NOT_COVERED)
    assert at_end(serve(1745, 1800, {}, into=windows), "preemptions", 1800).value == 0


# --- H5, H6, M2: slow shares ----------------------------------------------------------------------------------------


def latency(name: str, buckets: Mapping[str, float], *, end: float = 600.0, total_s: float = 50.0,
            extra: Numbers | None = None) -> Windows:
    """Ten minutes of watching; all observations come in the last five, at 400 s."""
    nothing = dict.fromkeys(hist(name, buckets), 0.0)
    return serve(0, end, lambda at: {**(extra or {}), **(hist(name, buckets, total_s) if at >= 400 else nothing)})


@pytest.mark.parametrize(("story", "buckets", "ttft", "undecided"), [
    # 5 of 100: Wilson 95 % lower bound 0.0215; 4 of 100 would be 0.0157, but fewer than 5 prove nothing
    ("5 of 100 over the SLO on a bound", {"0.25": 90, "0.5": 95, "1.0": 99, "+Inf": 100}, "breach", "clear"),
    ("4 of 100: fewer than five", {"0.25": 90, "0.5": 96, "1.0": 99, "+Inf": 100}, "clear", "clear"),
    ("5 of 300: 1.67 %, lower bound 0.0072", {"0.25": 90, "0.5": 295, "1.0": 299, "+Inf": 300}, "clear", "clear"),
    ("inside a bucket: 2 surely, 20 possibly", {"0.25": 80, "0.6": 98, "+Inf": 100}, "clear", "breach"),
    ("inside a bucket, and 6 surely", {"0.25": 80, "0.6": 94, "+Inf": 100}, "breach", "clear"),
    ("under the first bound: all are possibly slow", {"0.6": 100, "+Inf": 100}, "clear", "breach"),
    ("99 observations are too few", {"0.25": 0, "0.5": 0, "1.0": 0, "+Inf": 99}, "idle", "idle"),
    ("over the last bound: nobody knows", {"0.1": 60, "0.25": 80, "+Inf": 100}, "gap", "gap"),
    ("over the last bound, but nothing is there", {"0.1": 60, "0.25": 100, "+Inf": 100}, "clear", "clear"),
    ("over the last bound, but 3 of 1000 break nothing", {"0.1": 60, "0.25": 997, "+Inf": 1000}, "clear", "clear"),
])
def test_time_to_first_token(story: str, buckets: dict[str, float], ttft: str, undecided: str) -> None:
    """SLO 0.5 s, 1 % may be slower."""
    windows = latency("ttft", buckets)
    assert verdict(at_end(windows, "ttft-p99", 600), "ttft-p99") == ttft, story
    assert verdict(at_end(windows, "ttft-p99-undecided", 600), "ttft-p99-undecided") == undecided, story


def test_what_a_person_asks_of_a_slow_share() -> None:
    """p99 as Prometheus has it: 0.5 + 0.5 x (99 − 95) / (99 − 95) = 1 s; 5 slow of 100, over 300 s; lower bound."""
    got = at_end(latency("ttft", {"0.25": 90, "0.5": 95, "1.0": 99, "+Inf": 100}), "ttft-p99", 600)
    assert got.value == pytest.approx(0.0215, abs=0.0001)  # Newcombe's formula for 5 of 100
    assert got.evidence["p99_s"] == pytest.approx(1.0)
    assert (got.evidence["n"], got.evidence["slow"], got.evidence["window_s"]) == (100, 5, 300)
    assert got.evidence["bounds_s"] == [0.5, 0.5]


def test_c028_p99_is_shown_beside_the_slow_share() -> None:
    """90 gaps within 50 ms and 10 within 100 ms, three times over: 0.095 s."""
    windows = latency("itl", {"0.05": 270, "0.1": 300, "+Inf": 300}, extra={"ttft.count": 0.0})
    after = hist("itl", {"0.05": 270, "0.1": 300, "+Inf": 300}, total_s=50.0)
    serve(605, 610, {**after, "ttft.count": 30.0}, into=windows)
    got = at_end(windows, "itl-p99", 610)
    assert got.evidence["p99_s"] == pytest.approx(0.095)


def test_c037_an_engine_that_records_zeros_proves_nothing() -> None:
    """208 first tokens, all in the first bucket, sum 0: suspicious, a Gap."""
    zeros = {"0.001": 208, "0.005": 208, "10.0": 208, "+Inf": 208}
    got = at_end(latency("ttft", zeros, total_s=0.0), "ttft-p99", 600)
    assert (got.state, got.code) == ("gap", Why.NO_DATA)
    assert at_end(latency("ttft", zeros, total_s=0.1), "ttft-p99", 600).state == "value"


def test_c039_no_request_in_the_window_is_nothing_to_judge() -> None:
    """p99 would be NaN: IDLE, no number, no division by zero."""
    got = at_end(latency("ttft", {"0.1": 0, "1.0": 0, "+Inf": 0}), "ttft-p99", 600)
    assert (got.state, got.value) == ("idle", None)


def test_what_is_over_the_last_bound_is_in_the_count_where_no_bucket_tells_it() -> None:
    """A page without le="+Inf": 50 of 1,000 were over half a second, and looked like none of 950."""
    told = {"ttft.0.25": 900.0, "ttft.0.5": 950.0, "ttft.count": 1000.0, "ttft.sum": 50.0}
    got = at_end(serve(0, 600, lambda at: told if at >= 400 else dict.fromkeys(told, 0.0)), "ttft-p99", 600)
    assert (got.evidence["n"], got.evidence["slow"], verdict(got, "ttft-p99")) == (1000, 50, "breach")


def test_buckets_that_are_not_cumulative_are_no_histogram() -> None:
    """Each bucket told its own: of 1,000 first tokens 600 under 0.25 s, 300 to 0.5 s, 100 over: none was slow."""
    own = {"ttft.0.25": 600.0, "ttft.0.5": 300.0, "ttft.+Inf": 100.0, "ttft.count": 1000.0, "ttft.sum": 300.0}
    told = own | {"ttft.0.5": 900.0, "ttft.+Inf": 1000.0}
    for numbers, want in ((own, "gap"), (told, "breach")):
        def tells(at: float, numbers: Numbers = numbers) -> Numbers:
            return numbers if at >= 400 else dict.fromkeys(numbers, 0.0)
        assert verdict(at_end(serve(0, 600, tells), "ttft-p99", 600), "ttft-p99") == want


def test_a_latency_without_buckets_is_unknown_and_not_idle() -> None:
    """1,000 first tokens counted, in no bucket (a summary): nobody knows how many were slow, and that is no quiet."""
    told = {"ttft.count": 1000.0, "ttft.sum": 7000.0}
    windows = serve(0, 600, lambda at: told if at >= 400 else dict.fromkeys(told, 0.0))
    gap = Gap("ttft", "e", Why.MISSING, "no buckets", T0 + 605, "+Inf")
    windows.ingest(Batch("engine:e", T0 + 605, 0.0, (*samples("e", T0 + 605, {**PAGE, **told}), gap)))
    got = at_end(windows, "ttft-p99", 605)
    assert (got.code, got.why, verdict(got, "ttft-p99")) == (Why.MISSING, "no buckets", "gap")


def two_engines(one: Numbers, two: Numbers | None, end: float = 600.0) -> Windows:
    """A page that tells two engines of one target; None: it tells only the first any more, for the last 100 s."""
    windows = Windows(5.0)
    for at in times(0, end):
        page: dict[str, Numbers] = {"e/0": {**PAGE, **{k: v if at >= 400 else 0.0 for k, v in one.items()}}}
        if two is None:
            page["e/1"] = {**PAGE, **dict.fromkeys(one, None if at >= 500 else 0.0)}
        else:
            page["e/1"] = {**PAGE, **{k: v if at >= 400 else 0.0 for k, v in two.items()}}
        read_many(windows, at, "page", page)
    return windows


def test_c040_the_buckets_of_two_engines_are_added_before_the_quantile() -> None:
    """0.1 + 0.9 x 8.9 / 10 = 0.901 s for the target, not 0.545."""
    windows = two_engines(hist("ttft", {"0.1": 100, "1.0": 100, "+Inf": 100}),
                          hist("ttft", {"0.1": 0, "1.0": 10, "+Inf": 10}))
    got = at_end(windows, "ttft-p99", 600, engines=("e/0", "e/1"))
    assert got.evidence["p99_s"] == pytest.approx(0.901)
    assert got.evidence["n"] == 110


def test_one_of_two_engines_that_is_not_told_makes_the_target_unknown() -> None:
    """Half of the requests would be judged for all."""
    windows = two_engines(hist("ttft", {"0.1": 100, "1.0": 100, "+Inf": 100}), None)
    assert at_end(windows, "ttft-p99", 600, engines=("e/0", "e/1")).state == "gap"


def test_one_of_two_engines_that_sleeps_does_not_silence_the_other() -> None:
    """The target is asleep when all of it sleeps."""
    buckets = hist("ttft", {"0.25": 50, "0.5": 50, "1.0": 100, "+Inf": 100})
    windows = two_engines(buckets, dict.fromkeys(buckets, 0.0) | {"asleep": 1.0})
    got = at_end(windows, "ttft-p99", 600, engines=("e/0", "e/1"))
    assert verdict(got, "ttft-p99") == "breach"
    assert at_end(windows, "kv-cache-utilization", 600, engines=("e/0", "e/1"), subject="e/1").why == "asleep"


def test_too_few_in_five_minutes_are_judged_over_thirty() -> None:
    """10 requests a minute, 8 of 100 slow: 50 in 5 min are too few, 300 in 30 min with 24 slow are enough."""
    def tells(at: float) -> Numbers:
        n = float(int(at / 6))
        return hist("ttft", {"0.25": n * 0.9, "0.5": n * 0.92, "+Inf": n}, n)
    windows = serve(0, 2400, tells)
    got = at_end(windows, "ttft-p99", 2400)
    assert (got.evidence["window_s"], got.evidence["n"]) == (1800, 300)
    assert verdict(got, "ttft-p99") == "breach"


def test_thirty_minutes_of_which_half_is_not_watched_do_not_stand_in() -> None:
    """A young agent says that it is too few."""
    windows = serve(0, 600, lambda at: hist("ttft", {"0.5": 0.0, "+Inf": float(int(at / 6))}, at))
    got = at_end(windows, "ttft-p99", 600)
    assert (got.state, got.why) == ("idle", "50 of at least 100 in the last 5 min")
    short = at_end(windows, "ttft-p99", 600, clip_windows_to_s=6.0)
    assert (short.state, short.why) == ("idle", "2 of at least 100 in the last 6 s")


def test_gaps_between_tokens_of_a_handful_of_requests_say_nothing() -> None:
    """1000 gaps of 19 requests: IDLE; of 20: judged, and 30 slow ones break it, 29 do not."""
    slow = {"0.1": 960.0, "0.15": 970.0, "+Inf": 1000.0}
    def windows(requests: float, buckets: dict[str, float]) -> Windows:
        return serve(0, 600, lambda at: {**{k: v if at >= 400 else 0.0 for k, v in hist("itl", buckets).items()},
                                         "ttft.count": requests if at >= 400 else 0.0})
    assert at_end(windows(19, slow), "itl-p99", 600).why == "19 of at least 20 requests"
    assert verdict(at_end(windows(20, slow), "itl-p99", 600), "itl-p99") == "breach"
    assert verdict(at_end(windows(20, slow | {"0.15": 971.0}), "itl-p99", 600), "itl-p99") == "clear"


def test_the_first_three_minutes_of_an_engine_are_not_judged() -> None:
    """Warm-up: first requests compile. The value of the queue is shown all the same."""
    buckets = hist("ttft", {"0.5": 0, "+Inf": 500})
    windows = serve(0, 600, lambda at: {**{k: v if at >= 590 else 0.0 for k, v in buckets.items()},
                                        **started(430)(at), "waiting": 1.0 if at > 580 else 0.0})
    assert at_end(windows, "ttft-p99", 600).state == "idle"
    queue = at_end(windows, "queue-age", 600)
    assert (queue.state, queue.value is not None) == ("idle", True)


def test_latency_without_a_promise_is_not_judged() -> None:
    """slo.e2e_p99 is not set: M2 is off; set to 2 s it judges against 1.5 x 2 s."""
    windows = latency("e2e", {"3.0": 90, "5.0": 100, "+Inf": 100})
    assert at_end(windows, "latency-p99", 600).state == "na"
    slo = replace(SLO, e2e_p99=2.0)
    got = ask(scene(windows, 600, slo=slo), built_in(slo)["latency-p99"])
    assert (got.evidence["slo_s"], got.evidence["slow"]) == (3.0, 10)
    assert verdict(got, "latency-p99", slo) == "breach"


def test_an_engine_that_came_back_with_other_buckets_is_judged_since_then() -> None:
    """400 fast ones up to 0.5 s; restart at 400 s with a bound at 0.6 s: its 200 fast ones are not 200 of 600."""
    def tells(at: float) -> Numbers:
        if at < 400:
            n = at if at >= 300 else 0.0
            return {**hist("ttft", {"0.5": n * 4, "+Inf": n * 4}, n), **started(400)(at)}
        n = min(200.0, at - 400)
        return {**hist("ttft", {"0.6": n, "+Inf": n}, n), **started(400)(at)}
    got = at_end(serve(0, 600, tells), "ttft-p99", 600)
    assert (got.evidence["n"], got.evidence["slow"], got.evidence["possibly_slow"]) == (200, 0, 200)


def test_slow_requests_from_before_the_last_resolve_never_count_again() -> None:
    """All 100 came before it: what is left is too few, and no Gap."""
    windows = latency("ttft", {"0.5": 0, "+Inf": 100})
    assert at_end(windows, "ttft-p99", 600, resolved_s=450).state == "idle"


# --- H7, M6: errors -------------------------------------------------------------------------------------------------


def erring(end: float, counters: Callable[[float], Numbers], step: float = 60.0) -> Windows:
    """A target read every minute."""
    return serve(0, end, counters, step=step)


def test_errors_are_the_larger_of_two_counts_never_their_sum() -> None:
    """20 answers 503: 12 finished with error and 5 refused are among them. 20 of 1000; 429 counts, 404 does not."""
    told = {"http.2xx": 900.0, "http.503": 20.0, "http.404": 80.0, "finished.stop": 900.0, "finished.error": 12.0,
            "rejections.queue": 5.0}
    zero = dict.fromkeys(told, 0.0)
    windows = serve(0, 600, lambda at: told if at >= 400 else zero)
    got = at_end(windows, "error-rate", 600)
    assert (got.evidence["errors"], got.evidence["requests"]) == (20, 1000)
    assert got.value == pytest.approx(0.0130, abs=0.0001)  # Wilson, 20 of 1000
    windows = serve(0, 600, lambda at: {**told, "http.429": 30.0, "finished.error": 60.0} if at >= 400
                    else {**zero, "http.429": 0.0})
    got = at_end(windows, "error-rate", 600)
    assert (got.evidence["errors"], got.evidence["requests"]) == (65, 1030)  # 60 + 5 refused, against 20 + 30


def test_without_http_counters_the_finish_reasons_count() -> None:
    """8 of 100 finished with error: Wilson 0.0411 is over 1 %, but not over 10 %."""
    told = {"finished.stop": 92.0, "finished.error": 8.0}
    windows = serve(0, 600, lambda at: told if at >= 400 else {})
    got = at_end(windows, "error-rate", 600)
    assert got.value == pytest.approx(0.0411, abs=0.0001)
    assert (verdict(got, "error-rate"), verdict(got, "error-rate-high")) == ("breach", "clear")


def test_four_errors_of_ten_are_too_few_to_page() -> None:
    """Lower bound 0.168 is over 10 %, but fewer than 5, or 10, errors prove nothing."""
    windows = serve(0, 600, lambda at: {"finished.stop": 6.0, "finished.error": 4.0} if at >= 400 else {})
    for rule in ("error-rate", "error-rate-high"):
        assert verdict(at_end(windows, rule, 600), rule) == "clear"


def test_http_counters_that_are_lost_do_not_hide_the_finish_reasons() -> None:
    """Their page is silent from 300 on: 8 of 100 by finish reason after it."""
    windows = serve(0, 600, lambda at: {"http.2xx": None if at >= 300 else 50.0, "finished.stop": 92.0 if at >= 400
                                        else 0.0, "finished.error": 8.0 if at >= 400 else 0.0})
    got = at_end(windows, "error-rate", 600)
    assert (got.evidence["errors"], got.evidence["requests"]) == (8, 100)


def test_lost_finish_reasons_do_not_hide_the_http_counters() -> None:
    """What is left is a number, and a lower bound."""
    windows = serve(0, 600, lambda at: {"http.2xx": 920.0 if at >= 400 else 0.0, "http.5xx": 80.0 if at >= 400 else 0.0,
                                        "finished.stop": None, "finished.error": None})
    got = at_end(windows, "error-rate", 600)
    assert (got.evidence["errors"], got.evidence["requests"]) == (80, 1000)


@pytest.mark.parametrize(("case", "errors_before", "errors_last_5m", "want"), [
    # 100,000 requests an hour, so that Wilson's bound is near the ratio; 2 % of an hour burn 20, over 14.4
    ("d: the short window is clean", 0.02, 0.0, "clear"),
    ("e: both windows burn", 0.0191, 0.03, "breach"),
])
def test_c075_both_windows_must_burn(case: str, errors_before: float, errors_last_5m: float, want: str) -> None:
    """Availability 99.9 %: 2 % of errors in the hour are a burn of 20, 3 % in the last 5 min of 30."""
    per_min = 100_000 / 60

    def tells(at: float) -> Numbers:
        minutes, late = min(at, 3300) / 60, max(0.0, at - 3300) / 60
        bad = per_min * (minutes * errors_before + late * errors_last_5m)
        return {"finished.error": bad, "finished.stop": per_min * at / 60 - bad}
    got = at_end(erring(3600, tells), "error-burn-fast", 3600)
    assert verdict(got, "error-burn-fast") == want, case
    if want == "breach":
        # Wilson's lower bounds: 2,001 of 100,000 is at least 1.916 %, 250 of 8,333 at least 2.655 %
        assert got.evidence["burn_1h"] == pytest.approx(19.16, abs=0.02)
        assert got.evidence["burn_5m"] == pytest.approx(26.55, abs=0.02)
        assert got.value == pytest.approx(got.evidence["burn_1h"] / 14.4)


def test_c075_f_no_request_is_no_burn_and_no_division() -> None:
    """Nothing in the hour: nothing to judge. Errors half an hour ago and silence since: also not "no error"."""
    assert at_end(erring(3600, lambda _: {}), "error-burn-fast", 3600).state == "idle"
    windows = erring(3600, lambda at: {"finished.error": 500.0 if at >= 1200 else 0.0})
    got = at_end(windows, "error-burn-fast", 3600)
    assert (got.state, got.evidence["burn_5m"]) == ("idle", 0.0)


def test_a_young_agent_has_seen_only_its_share_of_the_budget_spent() -> None:
    """6 min of 3 %: a ratio of 30 x the allowed one, but a tenth of the hour: a burn of 3, no page."""
    windows = erring(360, lambda at: {"finished.error": 50 * at, "finished.stop": 1617 * at})
    got = at_end(windows, "error-burn-fast", 360)
    assert got.evidence["burn_1h"] == pytest.approx(3.0, rel=0.02)
    assert got.evidence["burn_5m"] == pytest.approx(30, rel=0.02)
    assert got.evidence["watched_s"] == 360
    assert verdict(got, "error-burn-fast") == "clear"
    quiet = at_end(erring(360, lambda at: {"finished.stop": 1617 * at}), "error-burn-fast", 360)
    assert quiet.evidence == {"watched_s": 360, "burn_1h": 0, "burn_5m": 0, "burn_6h": 0, "burn_30m": 0}


def test_after_a_resolve_the_budget_must_be_spent_anew() -> None:
    """2 % of errors all along, resolved 6 min ago: 20 x 360 / 3600 = 2, not 20 at the first error."""
    windows = erring(3600, lambda at: {"finished.error": 33 * at, "finished.stop": 1617 * at})
    assert at_end(windows, "error-burn-fast", 3600).evidence["burn_1h"] == pytest.approx(20, rel=0.02)
    got = at_end(windows, "error-burn-fast", 3600, resolved_s=3240)
    assert got.evidence["burn_1h"] == pytest.approx(2, rel=0.02)


def test_the_slow_burn_looks_back_for_three_days() -> None:
    """0.3 % for three days burns 3 over 1 d and 3 over 3 d; the limits are 3 and 1: 3 x."""
    windows = erring(3 * 86400, lambda at: {"finished.error": 5 * at, "finished.stop": 1662 * at}, step=300.0)
    got = at_end(windows, "error-burn-slow", 3 * 86400)
    assert got.evidence["burn_3d"] == pytest.approx(3.0, rel=0.01)
    assert got.evidence["burn_1d"] == pytest.approx(3.0, rel=0.01)
    assert got.value == pytest.approx(3.0, rel=0.01)


def test_the_node_burns_what_its_engines_burn_together() -> None:
    """100 of 1,000 on one, none of 9,000 on the other: 1 % of the node, 10 %, and not 5 %, of the first."""
    windows = Windows(60.0)
    for at in times(0, 3600, 60):
        read(windows, at, "a", {**PAGE, "finished.error": at / 36, "finished.stop": at / 4})
        read(windows, at, "b", {**PAGE, "finished.stop": at * 2.5})
    here = Scene(windows, T0 + 3600, "node", SLO, {n: Target(n, (n,), SLO) for n in "ab"})
    got = ask(here, "node-error-burn-fast", "node")
    assert got.evidence["burn_1h"] == pytest.approx(8.23, abs=0.02)  # Wilson: 100 of 10,000 is at least 0.823 %
    assert ask(here, "error-burn-fast", "b").value == 0


def test_a_node_that_is_called_like_its_engine_is_still_the_node() -> None:
    """One box, one name for both: the node's burn adds all targets."""
    windows = Windows(60.0)
    for at in times(0, 3600, 60):
        read(windows, at, "node", {**PAGE, "finished.stop": at})
        read(windows, at, "b", {**PAGE, "finished.error": at})
    here = Scene(windows, T0 + 3600, "node", SLO, {n: Target(n, (n,), SLO) for n in ("node", "b")})
    assert ask(here, "error-burn-fast", "node").value == 0
    value = ask(here, "node-error-burn-fast", "node").value
    assert value is not None
    assert value > 14


# --- H8, H9: GPUs ---------------------------------------------------------------------------------------------------


def gpus(numbers: Mapping[str, Numbers], at: float = 0.0, into: Windows | None = None) -> Windows:
    """One read of NVML."""
    windows = Windows(5.0) if into is None else into
    read_many(windows, at, "nvml", numbers)
    return windows


def test_a_rank_that_hardware_holds_back_is_named() -> None:
    """1 − 1200 / 1980 = 39 %: rank 2 is slow for a power brake; without such a reason it is noise."""
    uuids = [f"GPU-{i}" for i in range(4)]
    facts = {u: GpuFacts(u, i, "H200", "") for i, u in enumerate(uuids)}
    busy = {"gpu_sm_clock_mhz": 1980.0, "gpu_util": 1.0, "gpu_throttle": 0.0}
    slow = {"gpu_sm_clock_mhz": 1200.0, "gpu_util": 1.0, "gpu_throttle": 128.0}

    def told(rank: Numbers, others: Numbers = busy) -> Signal:
        windows = gpus({u: rank if i == 2 else others for i, u in enumerate(uuids)})
        read(windows, 0, "e", PAGE)
        return at_end(windows, "rank-clock-spread", 0, gpus=(0, 1, 2, 3), gpu_facts=facts)
    got = told(slow)
    assert got.value == pytest.approx(0.394, abs=0.001)
    assert (got.evidence["slow_rank"], got.evidence["slow_gpu"], got.evidence["reason"]) == (2, "GPU-2", "power brake")
    assert told({**slow, "gpu_throttle": 4.0}).state == "idle"  # software power cap alone
    assert told({**slow, "gpu_util": 0.1}).state == "idle"  # not all are busy
    assert told({**slow, "gpu_throttle": 0.0, "gpu_sm_clock_mhz": 1900.0}).value == pytest.approx(0.0404, abs=0.001)


def test_a_gpu_breaches_over_85_degrees() -> None:
    """91 is, 85 is not; a GPU that does not answer is a Gap."""
    for temp, want in ((91.0, "breach"), (85.0, "clear"), (None, "gap")):
        got = at_end(gpus({GPU: {"gpu_temp_c": temp, "gpu_util": 0.1}}), "gpu-temperature", 0, gpus=(0,), subject=GPU)
        assert verdict(got, "gpu-temperature") == want


@pytest.mark.parametrize(("case", "told", "want"), [
    ("a: 56 K left", {"gpu_margin_c": 56.0, "gpu_temp_c": 31.0, "gpu_throttle": 0.0}, "clear"),
    ("b: at the limit", {"gpu_margin_c": 0.0, "gpu_temp_c": 87.0, "gpu_throttle": 0.0}, "breach"),
    ("c: past it", {"gpu_margin_c": -3.0, "gpu_temp_c": 90.0, "gpu_throttle": 0.0}, "breach"),
    ("d: 127 is no limit, nor is a reason told: the configured 85", {"gpu_temp_c": 86.0}, "breach"),
    ("d: at 85 it is not over", {"gpu_temp_c": 85.0}, "clear"),
    ("margin left, but slowed down", {"gpu_margin_c": 5.0, "gpu_throttle": 64.0, "gpu_temp_c": 80.0}, "breach"),
    ("no margin told, but that it does not slow down", {"gpu_temp_c": 88.0, "gpu_throttle": 0.0}, "clear"),
    ("the reason alone is enough", {"gpu_throttle": 64.0}, "breach"),
    ("nothing is told", {"gpu_util": 0.5}, "gap"),
])
def test_c050_a_margin_counts_down(case: str, told: Numbers, want: str) -> None:
    """Kelvins left to the card's own limit: at 0 and under it is past it, whatever 85 °C says."""
    got = at_end(gpus({GPU: told}), "gpu-thermal-limit", 0, gpus=(0,), subject=GPU)
    assert verdict(got, "gpu-thermal-limit") == want, case


# --- H10, M8 --------------------------------------------------------------------------------------------------------


def test_c031_the_hit_rate_is_of_the_window() -> None:
    """20 of the 10,000 of the last 10 min are 0.2 %, not 15.1 % of a lifetime; then nothing is asked: IDLE."""
    windows = serve(0, 600, lambda at: {"prefix_queries": 20_000.0 if at > 300 else 10_000.0,
                                        "prefix_hits": 3020.0 if at > 300 else 3000.0})
    got = at_end(windows, "prefix-cache-hit-rate", 600)
    assert got.value == pytest.approx(0.002)
    assert got.evidence["note"] == "does not pay for itself"
    serve(605, 1300, {"prefix_queries": 20_000.0, "prefix_hits": 3020.0}, into=windows)
    assert at_end(windows, "prefix-cache-hit-rate", 1300).state == "idle"


def test_more_hits_than_lookups_are_no_rate() -> None:
    """Retried requests were counted among the hits alone (vllm#43736): 120 % is no healthy cache. Nor are drafts."""
    for of, part, rule in (("prefix_queries", "prefix_hits", "prefix-cache-hit-rate"),
                           ("spec_draft", "spec_accepted", "spec-decode-acceptance")):
        windows = serve(0, 1200, lambda at, of=of, part=part: {  # type: ignore[misc]
            of: 10_000.0 if at >= 1000 else 0.0, part: 12_000.0 if at >= 1000 else 0.0})
        got = at_end(windows, rule, 1200)
        assert (got.state, got.code) == ("gap", Why.OUT_OF_RANGE)


def test_what_makes_a_hit_rate_no_verdict() -> None:
    """Preemptions inflate it; the first 10 min are cold; 9,999 tokens are few; and where it is off there is none."""
    def story(more: Callable[[float], Numbers]) -> Signal:
        return at_end(serve(0, 900, lambda at: {"prefix_queries": at * 100, "prefix_hits": at * 10, **more(at)}),
                      "prefix-cache-hit-rate", 900)
    assert story(lambda _: {}).value == pytest.approx(0.1)
    preempted = story(lambda at: {"preemptions": 1.0 if at > 600 else 0.0})
    assert preempted.state == "idle"
    assert preempted.value == pytest.approx(0.1)
    assert story(started(301)).state == "idle"
    assert story(started(299)).state == "value"
    assert story(lambda at: {"prefix_queries": at * 16}).state == "idle"
    assert story(lambda _: {"prefix_caching": 0.0}).state == "na"


def test_drafts_that_are_not_accepted() -> None:
    """1,200 of 3,000 drafted tokens in 10 min are 40 %; 960 drafted are too few."""
    windows = serve(0, 600, lambda at: {"spec_draft": at * 5, "spec_accepted": at * 2})
    got = at_end(windows, "spec-decode-acceptance", 600)
    assert got.value == pytest.approx(0.4)
    few = serve(0, 600, lambda at: {"spec_draft": at * 1.6, "spec_accepted": at})
    assert at_end(few, "spec-decode-acceptance", 600).state == "idle"


# --- M1 -------------------------------------------------------------------------------------------------------------


def arrivals(rate_a_second: Callable[[float], float], end: float, step: float = 5.0, **more: float) -> Windows:
    """Requests that come at a rate; every one gets its first token at once."""
    total = 0.0
    windows = Windows(step)
    for at in times(0, end, step):
        total += rate_a_second(at) * step if at else 0.0
        read(windows, at, "e", {**PAGE, "ttft.count": total, **more})
    return windows


@pytest.mark.parametrize(("story", "last_minute", "want", "off"), [
    ("steady", 2.0, "clear", 0.0),
    ("half is not more than half", 1.0, "clear", 0.5),
    ("a drop to nothing", 0.0, "breach", 1.0),
    ("three times as many", 6.0, "breach", 2.0),
])
def test_traffic_that_changes_at_once(story: str, last_minute: float, want: str, off: float) -> None:
    """2 a second for 30 min before: 120 expected in the minute."""
    windows = arrivals(lambda at: last_minute if at > 2340 else 2.0, 2400)
    got = at_end(windows, "qps-change", 2400)
    assert got.value == pytest.approx(off), story
    assert verdict(got, "qps-change") == want, story


def test_traffic_is_compared_with_yesterday_too() -> None:
    """Every day at this time it doubles: off against the last half hour, as it was yesterday: no ticket."""
    def rate(at: float) -> float:
        day = at % 86400
        return 6.0 if 3000 < day <= 5400 else 2.0
    windows = arrivals(rate, 86400 + 3120, step=60.0)
    got = at_end(windows, "qps-change", 86400 + 3120)
    assert got.evidence["yesterday"] == pytest.approx(60 * (2 * 780 + 6 * 1020) / 1800)  # 22:30 min before, 30 around
    assert got.evidence["30 min before"] == pytest.approx(60 * (2 * 1740 + 6 * 60) / 1800)
    assert verdict(got, "qps-change") == "clear"


def test_requests_that_only_queue_have_arrived_too() -> None:
    """No first token in the last minute, 120 more waiting: nothing has changed."""
    total, windows = 0.0, Windows(5.0)
    for at in times(0, 2400):
        total += 10.0 if 0 < at <= 2340 else 0.0
        read(windows, at, "e", {**PAGE, "ttft.count": total, "waiting": max(0.0, at - 2340) * 2})
    assert at_end(windows, "qps-change", 2400).value == pytest.approx(0.0)


@pytest.mark.parametrize("age_s", [905, 1200, 1500, 1860, 2400])
def test_steady_traffic_under_a_fresh_agent_has_not_changed(age_s: int) -> None:
    """2 a second since it was started 15 to 40 min ago: 120 expected in the minute, whatever it has seen before."""
    got = at_end(arrivals(lambda _: 2.0, age_s), "qps-change", age_s)
    assert got.evidence["30 min before"] == pytest.approx(120)
    assert got.value == pytest.approx(0)


def test_traffic_is_not_judged_where_little_is_known() -> None:
    """Under 100 expected, under 15 min watched, under 15 min after a restart."""
    assert at_end(arrivals(lambda _: 1.0, 2400), "qps-change", 2400).state == "idle"
    assert at_end(arrivals(lambda _: 2.0, 890), "qps-change", 890).state == "idle"
    for restarted_s, want in ((1600, "idle"), (1400, "value")):
        windows = Windows(5.0)
        for at in times(0, 2400):
            read(windows, at, "e", {**PAGE, **started(restarted_s)(at), "ttft.count": at * 2})
        assert at_end(windows, "qps-change", 2400).state == want


def test_an_engine_that_came_in_addition_changes_no_traffic() -> None:
    """A second engine appears 10 min ago and takes half: not judged until 15 min later."""
    windows = Windows(5.0)
    for at in times(0, 3600):
        page: dict[str, Numbers] = {"e/0": {**PAGE, "ttft.count": at * 2}}
        if at >= 2700:
            page["e/1"] = {**PAGE, "ttft.count": (at - 2700) * 2}
        read_many(windows, at, "page", page)
    assert at_end(windows, "qps-change", 3300, engines=("e/0", "e/1")).state == "idle"
    assert at_end(windows, "qps-change", 3600, engines=("e/0", "e/1")).state == "value"


# --- M3, M4: the GPU's use ------------------------------------------------------------------------------------------

GIB = 1024.0**3


def node_with_gpu(end: float, gpu: Callable[[float], Numbers], engine: Callable[[float], Numbers] = lambda _: {},
                  step: float = 5.0) -> Windows:
    """An engine "e" on GPU 0, both read at the same moments, not in the same instant."""
    windows = Windows(step)
    for at in times(0, end, step):
        read(windows, at, "e", {**PAGE, **engine(at)})
        read(windows, at + 0.3, GPU, gpu(at), source="nvml")
    return windows


def gpu_signal(windows: Windows, rule: str, at_s: float, **more: Any) -> Signal:
    """A signal of GPU 0 with engine "e" on it."""
    return at_end(windows, rule, at_s, gpus=(0,), subject=GPU, **more)


def test_a_gpu_that_waits_while_requests_run() -> None:
    """30 % on average over 5 min with 2 running: breach. Idle engine: no verdict, whatever the utilization."""
    windows = node_with_gpu(600, lambda at: {"gpu_util": 0.2 if at % 10 else 0.4}, lambda _: {"running": 2.0})
    got = gpu_signal(windows, "gpu-utilization", 600)
    assert got.value == pytest.approx(0.3, abs=0.005)
    assert verdict(got, "gpu-utilization") == "breach"
    quiet = node_with_gpu(600, lambda _: {"gpu_util": 0.0}, lambda _: {"running": 0.0})
    assert gpu_signal(quiet, "gpu-utilization", 600).state == "idle"


def test_only_the_time_with_requests_counts_for_utilization() -> None:
    """Requests ran for the last 200 s at 90 %, before that none at 0 %: 90 %; for 100 s only: too little to judge."""
    for ran_s, state in ((200, "value"), (100, "idle")):
        windows = node_with_gpu(600, lambda at, since=600 - ran_s: {"gpu_util": 0.9 if at >= since else 0.0},  # type: ignore[misc]
                                lambda at, since=600 - ran_s: {"running": 1.0 if at >= since else 0.0})  # type: ignore[misc]
        got = gpu_signal(windows, "gpu-utilization", 600)
        assert got.state == state
        assert state == "idle" or got.value == pytest.approx(0.9, abs=0.03)


def test_utilization_of_a_gpu_whose_engine_sleeps_or_is_unknown_is_no_verdict() -> None:
    """Asleep: N/A. No engine on it: nothing to judge. Not told (MIG): N/A."""
    windows = node_with_gpu(600, lambda _: {"gpu_util": 0.1}, lambda _: {"asleep": 1.0, "running": 0.0})
    assert gpu_signal(windows, "gpu-utilization", 600).why == "asleep"
    assert gpu_signal(windows, "gpu-utilization", 600, engines=()).state == "idle"


def test_c046_a_gpu_without_memory_of_its_own_is_not_judged_for_it() -> None:
    """Unified memory: 0 of 0 is not supported; no share, no division by zero."""
    windows = node_with_gpu(0, lambda _: {"gpu_mem_used": 0.0, "gpu_mem_total": 0.0, "gpu_mem_free": 0.0})
    for rule in ("gpu-memory", "gpu-memory-low", "gpu-memory-growth"):
        assert gpu_signal(windows, rule, 0.3).state == "na", rule


def test_memory_that_was_full_by_design_is_shown_and_wakes_nobody() -> None:
    """96 % 10 min after the start: a breach in `check`, but quiet. 90 % then and 96 % now: a ticket."""
    windows = node_with_gpu(900, lambda _: {"gpu_mem_used": 96.0, "gpu_mem_total": 100.0})
    got = gpu_signal(windows, "gpu-memory", 900, gpu_full_at_start={GPU: 0.96})
    assert (verdict(got, "gpu-memory"), bool(got.quiet)) == ("breach", True)
    got = gpu_signal(windows, "gpu-memory", 900, gpu_full_at_start={GPU: 0.90})
    assert (verdict(got, "gpu-memory"), got.quiet) == ("breach", None)


def test_memory_that_fills_while_the_engine_loads_wakes_nobody_yet() -> None:
    """Three minutes after its start it is not known what it is meant to hold."""
    windows = node_with_gpu(300, lambda _: {"gpu_mem_used": 96.0, "gpu_mem_total": 100.0}, started(120))
    assert gpu_signal(windows, "gpu-memory", 300).quiet == "the engine started 180 s ago"


@pytest.mark.parametrize(("story", "free_gib", "want", "quiet"), [
    ("0.76 GiB of 80 are under 1 %, and it falls", lambda at: 1.96 - at / 500, "breach", False),
    ("1.4 GiB are over 1 %", lambda _: 1.4, "clear", True),
    ("0.4 GiB, but so it always was", lambda _: 0.4, "breach", True),
    ("0.4 GiB, and a few pages come and go", lambda at: 0.4 - (0.001 if at == 600 else 0), "breach", True),
])
def test_free_memory_that_falls(story: str, free_gib: Callable[[float], float], want: str, quiet: bool) -> None:
    """Floor: the larger of 1 % (0.8 GiB here) and 512 MiB."""
    windows = node_with_gpu(600, lambda at: {"gpu_mem_free": free_gib(at) * GIB, "gpu_mem_total": 80 * GIB})
    got = gpu_signal(windows, "gpu-memory-low", 600)
    assert (verdict(got, "gpu-memory-low"), bool(got.quiet)) == (want, quiet), story
    if want == "breach" and not quiet:
        assert got.value == pytest.approx(0.95)  # 0.76 of 0.8 GiB


def test_a_small_card_has_a_floor_of_512_mib() -> None:
    """1 % of 16 GiB would be 164 MiB."""
    windows = node_with_gpu(600, lambda at: {"gpu_mem_free": (1.0 - at / 960) * GIB, "gpu_mem_total": 16 * GIB})
    assert gpu_signal(windows, "gpu-memory-low", 600).value == pytest.approx(0.75)


def test_memory_that_grows_for_an_hour() -> None:
    """3 % of the total more than an hour ago: breach. The first 30 min after start or wake are no leak."""
    def grows(at: float) -> Numbers:
        return {"gpu_mem_used": 70.0 + 3.0 * at / 3600, "gpu_mem_total": 100.0}
    windows = node_with_gpu(4000, grows, step=20.0)
    got = gpu_signal(windows, "gpu-memory-growth", 4000)
    assert got.value == pytest.approx(0.03, abs=0.001)
    assert verdict(got, "gpu-memory-growth") == "breach"
    restarted = node_with_gpu(4000, grows, started(1000), step=20.0)
    assert gpu_signal(restarted, "gpu-memory-growth", 4000).value == pytest.approx(0.01, abs=0.001)  # since 2800 s
    young = node_with_gpu(4000, grows, started(3000), step=20.0)
    assert gpu_signal(young, "gpu-memory-growth", 4000).state == "idle"
    woken = node_with_gpu(4000, grows, lambda at: {"asleep": 1.0 if at <= 3000 else 0.0}, step=20.0)
    assert gpu_signal(woken, "gpu-memory-growth", 4000).state == "idle"


def test_swapped_requests_are_told_by_engines_that_swap() -> None:
    """One is one too many."""
    got = at_end(serve(0, 0, {"swapped": 1.0}), "swapped", 0)
    assert verdict(got, "swapped") == "breach"


# --- L1, L2 ---------------------------------------------------------------------------------------------------------


def alive(down: str, *, slow: str = "") -> Windows:
    """One read every 5 s; "1" failed, "0" did not, "?" nobody knows."""
    windows = Windows(5.0)
    for i, one in enumerate(down):
        told: dict[str, float | None] = {"rung": 0.0 if one == "1" else 3.0, "slow": float(slow[i] if slow else 0)}
        read(windows, i * 5.0, "e", told | {"down": None if one == "?" else float(one)})
    return windows


@pytest.mark.parametrize(("reads", "want"), [
    ("000111", "breach"), ("000011", "clear"), ("001101", "clear"), ("0001110", "clear"), ("01?11", "breach"),
    ("0111?", "gap"),
])
def test_an_engine_is_down_after_three_refusals_in_a_row(reads: str, want: str) -> None:
    """Twice may be a restart of the proxy; what nobody knows neither counts nor excuses."""
    got = at_end(alive(reads), "engine-down", (len(reads) - 1) * 5.0)
    assert verdict(got, "engine-down") == want
    assert want != "breach" or got.evidence["failing"] == "TCP"


def test_an_engine_that_starts_is_stopped_not_down() -> None:
    """Never answered yet: info for ten minutes; then it is down."""
    for at_s, down, stopped in ((595.0, "idle", "breach"), (600.0, "breach", "clear")):
        windows = alive("1" * int(at_s / 5 + 1))
        for rule, want in (("engine-down", down), ("engine-stopped", stopped)):
            assert verdict(at_end(windows, rule, at_s, ever_up=False, first_seen_at=T0), rule) == want


def test_an_engine_that_times_out_is_slow() -> None:
    """Three in a row."""
    got = at_end(alive("????", slow="0111"), "engine-slow", 15)
    assert verdict(got, "engine-slow") == "breach"


def stuck(windows: Windows, at_s: float, **more: Any) -> float:
    """engine-stuck as a multiple of what is allowed."""
    got = at_end(windows, "engine-stuck", at_s, **more)
    assert got.state == "value", got
    assert got.value is not None
    return got.value


def test_c030_a_queue_that_nobody_serves() -> None:
    """6 wait (not 12: reasons are a breakdown), none runs, KV 0: stuck after 60 s."""
    windows = serve(0, 60, {"running": 0.0, "waiting": 6.0, "kv_usage": 0.0}, step=15.0)
    got = at_end(windows, "engine-stuck", 60)
    assert got.evidence["waiting"] == 6
    assert got.evidence["waiting_alone_s"] == 60
    assert verdict(got, "engine-stuck") == "breach"
    assert stuck(serve(0, 45, {"running": 0.0, "waiting": 6.0, "kv_usage": 0.0}, step=15.0), 45) < 1
    held = serve(0, 90, {"running": 0.0, "waiting": 6.0, "kv_usage": 0.4}, step=15.0)
    assert stuck(held, 90) == pytest.approx(90 / 120)


def test_c043_no_token_in_two_minutes_although_the_gpus_are_busy() -> None:
    """A tensor-parallel deadlock: NCCL spins at 100 %, three running, 70,000 tokens and not one more."""
    def story(end: float) -> Windows:
        return node_with_gpu(end, lambda _: {"gpu_util": 1.0},
                             lambda at: {"running": 3.0, "generation_tokens": min(70_000.0, 69_820 + at)})
    assert stuck(story(295), 295) == pytest.approx(115 / 120)  # the last token came at 180 s
    got = at_end(story(300), "engine-stuck", 300)
    assert (got.evidence["flat_s"], verdict(got, "engine-stuck")) == (120, "breach")
    assert verdict(gpu_signal(story(300), "gpu-utilization", 300), "gpu-utilization") == "clear"


def test_work_that_moves_is_not_stuck() -> None:
    """Prompt tokens alone (a long prefill in chunks), or first tokens, or a moment with nothing in flight."""
    for tells in (lambda at: {"prompt_tokens": at}, lambda at: {"ttft.count": at},
                  lambda at: {"running": 0.0 if at == 500 else 1.0}):
        assert stuck(serve(0, 600, tells), 600) < 1


def test_a_suspended_host_is_not_a_stuck_engine() -> None:
    """Running 1 before, 200 s of nothing, running 1 after: nobody watched, the counters had no time to move."""
    windows = serve(0, 100, lambda at: {"generation_tokens": at})
    serve(300, 305, {"generation_tokens": 100.0}, into=windows)
    assert stuck(windows, 305) < 0.1


def test_a_fresh_process_is_not_stuck_for_what_the_old_one_did() -> None:
    """Restarted 30 s ago, in its first prefill; the old one stood still for 90 s before."""
    windows = serve(0, 90, {"process_start": T0 - 9})
    serve(95, 120, {"process_start": T0 + 92}, into=windows)
    assert stuck(windows, 120) == pytest.approx(28 / 120, abs=0.05)


def test_one_bad_bucket_costs_the_quantiles_and_not_the_queue() -> None:
    """A proxy broke one bucket's line: TTFT's slow share is unknown, its count is told, and the queue's age with it."""
    windows = serve(0, 400, lambda at: {**hist("ttft", {"0.5": at, "+Inf": at}), "waiting": 3.0,
                                        "generation_tokens": at})
    read(windows, 405, "e", {**PAGE, **hist("ttft", {"0.5": 405.0, "+Inf": 405.0}), "waiting": 3.0,
                             "generation_tokens": 405.0, "ttft.0.5": None})
    assert at_end(windows, "ttft-p99", 405).code is Why.NOT_A_NUMBER
    assert at_end(windows, "queue-age", 405).value == pytest.approx(2.0)  # number 406 came as 403 had been served
    read(windows, 410, "e", {**PAGE, **hist("ttft", {"0.5": 410.0, "+Inf": 410.0}), "waiting": 3.0,
                             "generation_tokens": 410.0, "ttft.count": None})
    assert at_end(windows, "queue-age", 410).state == "gap"


def test_a_frozen_page_is_evidence_here() -> None:
    """What is stale to H1 and H2 is "no change" to L2."""
    windows = serve(0, 300, {"waiting": 3.0, "kv_usage": 0.9})
    assert at_end(windows, "queue-age", 300).state == "gap"
    assert stuck(windows, 300) > 2


def silence(end: float, page: Numbers, *, from_s: float = 100.0, **live: float) -> Windows:
    """An engine with tokens that flow, whose server from a second on takes connections and answers nothing."""
    windows = serve(0, from_s, lambda at: {**page, "generation_tokens": at, "rung": 3.0, "down": 0.0, "slow": 0.0})
    for at in times(from_s + 5, end):
        told = {"rung": 1.0, "slow": 1.0} | live
        gaps = [Gap(name, "e", Why.TIMEOUT, "no whole answer within 3 s", T0 + at) for name in
                ("running", "waiting", "down", "kv_usage")]
        alive = [Sample(name, "e", value, T0 + at) for name, value in told.items()]
        windows.ingest(Batch("source of e", T0 + at, 0.0, (*alive, *(g for g in gaps if g.name not in told))))
    return windows


def test_an_engine_that_takes_connections_and_answers_nothing_is_stuck() -> None:
    """Its API server hangs with three requests in flight: engine-slow is a ticket, this is the page, after 2 min."""
    busy = {"running": 3.0, "waiting": 0.0}
    assert stuck(silence(215, busy), 215) == pytest.approx(115 / 120)
    got = at_end(silence(220, busy), "engine-stuck", 220)
    assert verdict(got, "engine-stuck") == "breach"
    assert (got.evidence["flat_s"], words.what(got, "of limit")) == (
        120, "no answer for 2 min with 3 running, 0 waiting")


def test_silence_alone_is_not_stuck() -> None:
    """Nothing was in flight; or /health answers; or another process refused in between; or our host was suspended."""
    busy = {"running": 3.0, "waiting": 0.0}
    for windows in (silence(400, {"running": 0.0}), silence(400, busy, rung=2.0), silence(400, busy, down=1.0)):
        assert at_end(windows, "engine-stuck", 400).code is Why.TIMEOUT
    asleep = silence(110, busy)
    read(asleep, 900, "e", {"rung": 1.0, "slow": 1.0}, source="source of e")
    asleep.gaps[("e", "running")] = Gap("running", "e", Why.TIMEOUT, "", T0 + 900)
    assert stuck(asleep, 900) == pytest.approx((10 + 15) / 120)


# --- L3, L5 ---------------------------------------------------------------------------------------------------------


def blind(windows: Windows, at_s: float, **more: Any) -> Signal:
    """The blindness of target "e" with all built-in rules."""
    here = scene(windows, at_s, **more)
    return compute(here, list(built_in().values()), {})[("blind", "e")]


def healthy(at: float) -> Numbers:
    """All that the required rules need, with tokens that flow."""
    return {**hist("ttft", {"0.5": 0.0, "+Inf": 0.0}, 0.0), **hist("itl", {"0.15": 0.0, "+Inf": 0.0}, 0.0),
            "generation_tokens": at, "rung": 3.0, "down": 0.0, "slow": 0.0}


def test_blindness_lists_what_is_lost_and_why() -> None:
    """The KV gauge has a new name that nobody told us."""
    windows = serve(0, 400, lambda at: {**healthy(at), "kv_usage": None if at >= 200 else 0.5})
    got = blind(windows, 400)
    assert got.value == 1
    assert got.evidence["lost"] == {"kv_cache_utilization of e": "kv_usage is nan"}


def test_a_young_agent_is_not_blind() -> None:
    """It has watched for 2 min: an hour of preemptions is not covered, and that is no fault."""
    windows = serve(0, 120, healthy)
    assert at_end(windows, "preemptions", 120).code is Why.NOT_COVERED
    assert blind(windows, 120).value == 0


def test_an_engine_whose_page_failed_for_most_of_the_hour_is_blindness() -> None:
    """We asked all the time; the page came for 20 min of 60: H3 cannot be told, and that is said."""
    windows = serve(0, 600, healthy)
    for at in times(605, 3000):
        read(windows, at, "e", {"rung": 1.0, "down": 0.0, "slow": 1.0, "preemptions": None})
    serve(3005, 3600, healthy, into=windows)
    lost = blind(windows, 3600).evidence["lost"]
    assert list(lost) == ["preemptions of e"]
    assert lost["preemptions of e"].startswith("watched 1195 s of the last 3600 s")


def test_an_agent_that_was_away_is_as_young_as_a_new_one() -> None:
    """Tocsin was down for 50 min, and so nobody asked: no ticket for it."""
    windows = serve(0, 300, healthy)
    serve(3300, 3600, healthy, into=windows)
    assert at_end(windows, "preemptions", 3600).code is Why.NOT_COVERED
    assert blind(windows, 3600).value == 0


def test_an_engine_that_still_starts_or_sleeps_is_not_blindness() -> None:
    """No page yet within startup_within: idle. Asleep: N/A is no Gap."""
    windows = Windows(5.0)
    for at in times(0, 60):
        read(windows, at, "e", {"rung": 0.0, "down": 1.0, "slow": 0.0, "kv_usage": None})
    assert blind(windows, 60, ever_up=False, first_seen_at=T0).state == "idle"
    assert blind(serve(0, 400, {**healthy(0), "asleep": 1.0}), 400).value == 0


def test_a_late_source_and_a_dead_channel_are_told_as_multiples_of_what_is_allowed() -> None:
    """3 intervals of 5 s are the limit: 15 s late is 1; 150 s without a delivery is half of 5 min."""
    windows = Windows(5.0)
    read(windows, 0, "source:e", {"source_late_s": 15.0})
    read(windows, 0, "channel:am", {"delivery_failing_s": 150.0})
    here = scene(windows, 0, sources=("source:e", "channel:am"))
    assert ask(here, "watcher", "source:e").value == 1
    assert ask(here, "watcher", "channel:am").value == 0.5


# --- labels, times --------------------------------------------------------------------------------------------------


def test_the_labels_of_a_gpus_alert_name_its_engine_only_where_there_is_one() -> None:
    """One engine on it: named. Two engines of one target, or none seen yet: not."""
    alert = Alert("gpu-temperature", GPU, "firing", "ticket", T0)
    rule = built_in()["gpu-temperature"]
    windows = serve(0, 0, {})
    want = {"rule": "gpu-temperature", "number": "H9", "node": "node", "subject": GPU, "severity": "ticket", "gpu": GPU}
    assert alert_labels(scene(windows, 0, gpus=(0,)), rule, alert) == want | {"engine": "e"}
    assert alert_labels(scene(windows, 0, gpus=(0,), engines=("e/0", "e/1")), rule, alert) == want
    assert alert_labels(scene(windows, 0, gpus=(0,), engines=()), rule, alert) == want


@pytest.mark.parametrize("rule", ["queue-age", "kv-cache-utilization", "preemptions", "error-rate", "engine-stuck"])
def test_a_signal_is_as_old_as_the_page_that_it_was_read_from(rule: str) -> None:
    """The last page came 9 s ago: not late yet, but nothing new, so no timer may count it twice."""
    windows = serve(0, 3600, lambda at: {"finished.stop": at, "generation_tokens": at})
    got = at_end(windows, rule, 3609)
    assert (got.state, got.at) == ("value", T0 + 3600)


def test_every_built_in_rule_has_an_answer_for_every_subject() -> None:
    """An empty node, and one of which nothing has been read yet: no exception, no number."""
    rules = [rule for rule in built_in().values() if not rule.patterns]  # those run only where their pattern is
    empty = Scene(Windows(5.0), T0, "node", Slo(), {})
    assert {s.state for s in compute(empty, rules, {}).values()} <= {"idle", "na"}
    told = compute(scene(Windows(5.0), 0, gpus=(0,), engines=()), rules, {})
    assert {key for key, s in told.items() if s.state == "value"} == {("blind", "e"), ("blind", GPU)}


def test_a_restart_of_tocsin_changes_no_signal() -> None:
    """Two hours with preemptions, errors, slow tokens, an engine restart; Tocsin restarts 50 min before the end."""
    def story(at: float) -> Numbers:
        since = at if at < 1800 else at - 1800
        slow = max(0.0, since - 4000) / 5
        return {**healthy(at), **started(1800)(at), "preemptions": 2.0 if since >= 2000 else 0.0,
                "finished.stop": since * 3, "finished.error": since / 50, "http.2xx": since * 3, "http.5xx": since / 40,
                **hist("ttft", {"0.25": since * 2, "0.6": since * 3 - slow, "+Inf": since * 3}, since),
                **hist("itl", {"0.1": since * 90, "0.15": since * 99, "+Inf": since * 100}, since),
                "waiting": float(at % 3), "generation_tokens": since * 100, "prefix_queries": since * 50,
                "prefix_hits": since * 20}
    whole = serve(0, 7200, story)
    before, after = serve(0, 4200, story), Windows(5.0)
    rows = before.unsaved()
    for res in ("coarse", "raw"):
        after.restore([row for row in rows if row.res == res])
    serve(4205, 7200, story, into=after)
    rules = list(built_in().values())
    told, want = compute(scene(after, 7200), rules, {}), compute(scene(whole, 7200), rules, {})
    assert {k: (s.state, s.why) for k, s in told.items()} == {k: (s.state, s.why) for k, s in want.items()}
    for key, signal in want.items():
        assert told[key].value == pytest.approx(signal.value), key
    assert want[("preemptions", "e")].value == 2
    assert verdict(want[("ttft-p99", "e")], "ttft-p99") == "breach"
    assert verdict(want[("error-burn-fast", "e")], "error-burn-fast") == "clear"


# --- the witnesses of a hang ------------------------------------------------------------------------------------------

HUNG = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "generation_tokens": 700.0, "ttft.count": 30.0}


def test_a_hang_that_the_page_hides_is_seen_by_the_canary() -> None:
    """vLLM's core was stopped for 300 s: running 0, waiting 0, /health 200, all green; one canary waited for 16 s."""
    windows = serve(0, 60, {**HUNG, "running": 2.0, "generation_tokens": 0.0})
    serve(65, 95, HUNG, into=windows)
    read(windows, 95, "e", {"canary_age_s": 11.0}, source="canary")
    assert verdict(at_end(windows, "engine-stuck", 95), "engine-stuck") == "clear"
    serve(100, 100, HUNG, into=windows)
    read(windows, 100, "e", {"canary_age_s": 16.0}, source="canary")
    got = at_end(windows, "engine-stuck", 100)
    assert verdict(got, "engine-stuck") == "breach"
    assert got.evidence["canary_waits_s"] == 16.0


def test_a_slow_canary_on_an_engine_that_works_is_no_hang() -> None:
    """The queue is long and the canary waits in it for 40 s; tokens flow."""
    windows = serve(0, 100, lambda at: {**HUNG, "running": 9.0, "generation_tokens": 40 * at})
    read(windows, 100, "e", {"canary_age_s": 40.0}, source="canary")
    got = at_end(windows, "engine-stuck", 100)
    assert got.value is not None
    assert got.value < 0.5


def test_a_canary_that_is_answered_clears_it() -> None:
    """After SIGCONT: the canary got its answer."""
    windows = serve(0, 300, HUNG)
    read(windows, 300, "e", {"canary_age_s": 0.0}, source="canary")
    assert verdict(at_end(windows, "engine-stuck", 300), "engine-stuck") == "clear"


def test_a_silent_page_with_a_canary_that_waits_is_stuck() -> None:
    """The server process itself was stopped, with no work on its last page: the canary is the only witness."""
    windows = serve(0, 60, HUNG)
    for at in times(65, 120):
        gap = Gap("running", "e", Why.TIMEOUT, "no answer", T0 + at)
        windows.ingest(Batch("source of e", T0 + at, 0.0, (gap,)))
        read(windows, at, "e", {"canary_age_s": at - 64.0}, source="canary")
    assert verdict(at_end(windows, "engine-stuck", 120), "engine-stuck") == "breach"


def test_requests_in_flight_at_a_router_are_a_witness() -> None:
    """The page says that nothing runs; the router has three requests there, and no counter moves for two minutes."""
    windows = serve(0, 200, HUNG)
    for at in times(0, 200):
        read(windows, at, "edge", {"router_worker_inflight.http://10.0.0.1:8000": 3.0 if at > 50 else 0.0})
    here = scene(windows, 200, routers=("edge",))
    at_router = replace(here, targets={"e": replace(here.targets["e"], address="10.0.0.1:8000")})
    got = ask(at_router, "engine-stuck")
    assert got.evidence["flat_while_routed_s"] == 145.0
    assert verdict(got, "engine-stuck") == "breach"
    elsewhere = replace(here, memo={}, targets={"e": replace(here.targets["e"], address="10.0.0.2:8000")})
    assert verdict(ask(elsewhere, "engine-stuck"), "engine-stuck") == "clear"


@pytest.mark.parametrize(
    ("story", "told", "want"),
    [
        ("SGLang counts its tokens when a request ends; its gaps and passes go on", {"itl.count": 20.0}, "clear"),
        ("TGI counts its steps", {"steps": 20.0}, "clear"),
        ("and where those stand too, it hangs", {"steps": 0.0}, "breach"),
    ],
)
def test_one_long_answer_is_no_hang(story: str, told: Numbers, want: str) -> None:
    """An answer of five minutes, alone on its engine: no request begins or ends meanwhile."""
    windows = serve(0, 300, lambda at: {name: at * (rate or 0.0) for name, rate in told.items()} | {"running": 1.0})
    assert verdict(at_end(windows, "engine-stuck", 300), "engine-stuck") == want, story


def test_an_engine_that_counts_only_at_the_end_is_not_judged_by_that() -> None:
    """Triton and TensorRT-LLM: only the canary can tell a long answer from a hang."""
    windows = Windows(5.0)
    for at in times(0, 300):
        read(windows, at, "e", {"running": 1.0, "waiting": 0.0, "ttft.count": 3.0, "finished.stop": 3.0})
    assert verdict(at_end(windows, "engine-stuck", 300), "engine-stuck") == "clear"
    for at in times(0, 300):
        read(windows, at, "e", {"canary_age_s": 20.0}, source="canary")
    got = at_end(windows, "engine-stuck", 300)
    assert got.evidence["canary_waits_s"] == 20.0


def test_requests_that_run_though_nobody_is_connected_are_a_stale_gauge() -> None:
    """vllm#22545: running stood at 3 after all clients had gone; nothing can run for nobody, so nobody is woken."""
    def tells(clients: Callable[[float], float]) -> Windows:
        return serve(0, 300, lambda at: {"running": 3.0, "generation_tokens": 700.0, "connections": clients(at)})

    gone = at_end(tells(lambda at: 4.0 if at < 60 else 0.0), "engine-stuck", 300)
    assert verdict(gone, "engine-stuck") == "clear"
    assert "nobody is connected" in gone.evidence["note"]
    for story in (lambda at: 4.0, lambda at: 0.0, lambda at: 4.0 if at < 270 else 0.0):  # pools; an odd table; just now
        assert verdict(at_end(tells(story), "engine-stuck", 300), "engine-stuck") == "breach"


def test_traffic_of_an_engine_that_counts_no_first_tokens_is_the_routers() -> None:
    """llama.cpp tells no arrivals; the router in front of it does: from 5 a second to 1, off by 0.8."""
    windows = Windows(5.0)
    worker, after = "http://10.0.0.1:8000", 2400.0
    for at in times(0, 2460):
        gap = Gap("ttft", "e", Why.NOT_SUPPORTED, "llama.cpp does not tell it", T0 + at)
        told = samples("e", T0 + at, {"running": 1.0, "waiting": 0.0})
        windows.ingest(Batch("source of e", T0 + at, 0.0, (*told, gap)))
        read(windows, at, "edge", {f"router_worker_requests.{worker}": 5 * min(at, after) + max(0.0, at - after)})
    here = scene(windows, 2460, routers=("edge",))
    routed = replace(here, targets={"e": replace(here.targets["e"], address="10.0.0.1:8000")})
    got = ask(routed, "qps-change")
    assert got.method == "router edge"
    assert got.value == pytest.approx(0.8, abs=0.01)
    elsewhere = replace(here, memo={}, targets={"e": replace(here.targets["e"], address="10.0.0.2:8000")})
    assert ask(elsewhere, "qps-change").state == "na"


def test_errors_are_the_routers_where_it_is_through_it_that_requests_come() -> None:
    """Clients that gave up are 2xx to vLLM; the router in front of it counted 60 of 600 as failed."""
    windows = serve(0, 600, lambda at: {"http.2xx": at, "finished.stop": at})
    worker = "http://10.0.0.1:8000"
    for at in times(0, 600):
        read(windows, at, "edge", {f"router_worker_requests.{worker}": at, f"router_worker_errors.{worker}": at / 10,
                                   "router_worker_requests.http://10.0.0.2:8000": 9 * at})
    here = scene(windows, 600, routers=("edge",))
    here = replace(here, targets={"e": replace(here.targets["e"], address="10.0.0.1:8000")})
    got = ask(here, "error-rate")
    assert (got.evidence["errors"], got.evidence["requests"], got.method) == (30.0, 300.0, "router edge")
    direct = replace(here, memo={}, targets={"e": replace(here.targets["e"], address="10.9.9.9:8000")})
    assert ask(direct, "error-rate").evidence["errors"] == 0


def test_the_canarys_own_requests_are_taken_out() -> None:
    """An idle engine failed only the canary: no user had an error."""
    windows = serve(0, 600, lambda at: {"http.2xx": 0.0, "http.5xx": at / 30, "finished.stop": 0.0})
    for at in times(0, 600):
        read(windows, at, "e", {"canary_requests": at / 30, "canary_errors": at / 30}, source="canary")
    assert at_end(windows, "error-rate", 600).state == "idle"


def test_a_cache_is_cold_after_a_sleep() -> None:
    """Woken after a sleep that dropped the cache: a hit rate of 10 % for ten minutes is no finding."""
    def tells(at: float) -> Numbers:
        return {"asleep": 1.0 if 600 <= at < 900 else 0.0, "prefix_queries": 1000 * at, "prefix_hits": 100 * at}

    windows = serve(0, 1400, tells)
    assert at_end(windows, "prefix-cache-hit-rate", 1400).why == "woke 505 s ago"
    assert at_end(serve(0, 1600, tells), "prefix-cache-hit-rate", 1600).state == "value"


def test_gauges_that_lag_behind_the_load_are_no_hang() -> None:
    """sglang PR#26495: the load ended and running stood at 3 for another 30 s, until SGLang flushed it."""
    windows = serve(0, 120, lambda at: {"running": 3.0 if at < 90 else 0.0, "generation_tokens": 40 * min(at, 60.0)})
    assert verdict(at_end(windows, "engine-stuck", 120), "engine-stuck") == "clear"
    windows = serve(0, 90, lambda at: {"running": 3.0, "generation_tokens": 40 * min(at, 60.0)})
    assert verdict(at_end(windows, "engine-stuck", 90), "engine-stuck") == "clear"
    assert at_end(windows, "kv-cache-utilization", 90).state == "value"


# --- U2: what lies outside the engine ---------------------------------------------------------------------------------

EDGE, OWN = "http://edge:8080", "http://127.0.0.1:8000"


def asked(edge_s: float, own_s: float | None, *, whole: bool = False, engine_s: float = 0.2) -> Scene:
    """A canary a minute at the users' address, and at the engine's own where it is given; each took so many seconds."""
    windows, name = Windows(5.0, 7200.0), "user_whole" if whole else "user_ttft"
    for at in times(0.0, 3600.0, 10.0):
        minute = float(at // 60)
        for address, took_s in ((EDGE, edge_s), (OWN, own_s)):
            if took_s is not None:
                buckets = {bound: minute * (took_s <= float(bound)) for bound in ("0.25", "0.5", "2.5", "+Inf")}
                read(windows, at, address, {"user_requests": minute} | hist(name, buckets, minute * took_s),
                     f"canary:{address}")
        engine = {"0.1": 0.0, "0.3": 50.0 * minute, "+Inf": 50.0 * minute}
        read(windows, at, "e", PAGE | hist("ttft", engine, 50.0 * minute * engine_s))
    users = {address: Target(address, (address,), SLO) for address in (EDGE, OWN)}
    return scene(windows, 3600.0, users=users, canaries={EDGE: None} | ({} if own_s is None else {OWN: "e"}))


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_lost_between_user_and_engine(whole: bool) -> None:
    """0.7 s at the router, 0.2 s at the engine, the same question: 0.5 s lie between, streamed or not, each apart."""
    rule = "outside-engine-whole" if whole else "outside-engine"
    told = ask(asked(0.7, 0.2, whole=whole), rule, EDGE)
    assert (told.state, round(told.value or 0.0, 6), told.method) == ("value", 0.5, "the same question at the engine")
    assert told.evidence["inside_s"] == pytest.approx(0.2)
    other = "outside-engine" if whole else "outside-engine-whole"
    assert ask(asked(0.7, 0.2, whole=whole), other, EDGE).state != "value"


def test_without_a_canary_at_the_engine_it_is_an_estimate_or_nothing() -> None:
    """The engines' own median, 0.2 s of a bucket from 0.1 to 0.3, against the users', 1.5 s of one from 0.5 to 2.5."""
    told = ask(asked(0.7, None), "outside-engine", EDGE)
    assert (told.method, round(told.value or 0.0, 6)) == ("estimate: the engines' own median", 1.3)
    whole = ask(asked(0.7, None, whole=True), "outside-engine-whole", EDGE)
    assert (whole.state, "probe.canary.urls" in str(whole.why)) == ("na", True)


def test_only_a_canary_at_the_users_address_tells_it() -> None:
    """Neither the canary at the engine's own address, nor a drill's prober, whose prompts are others."""
    assert ask(asked(0.7, 0.2), "outside-engine", OWN).state == "na"
    here = asked(0.7, 0.2)
    assert ask(replace(here, canaries={OWN: "e"}), "outside-engine", EDGE).state == "na"
