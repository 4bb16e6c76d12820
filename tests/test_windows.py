"""The memory of numbers: resets, gaps, clocks that step, restarts of Tocsin, windows of days."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.model import Batch, Gap, Sample, Why
from agent.windows import COARSE_KEEP_S, RAW_KEEP_S, SeriesKey, Track, Windows
from tests.scenes import T0, read, read_many, times

HOUR, DAY = 3600.0, 86400.0


def counted(values: Sequence[float | None], every_s: float = 5.0, name: str = "preemptions",
            start: Sequence[float] | None = None) -> Windows:
    """A target read every so often; `start` is its process start time at each read."""
    windows = Windows(every_s)
    for i, value in enumerate(values):
        extra = {} if start is None else {"process_start": start[i]}
        read(windows, i * every_s, "e", {"running": 1.0, name: value, **extra})
    return windows


def rise(windows: Windows, start_s: float, end_s: float | None = None, name: str = "preemptions", key: str = "",
         ) -> float:
    """The increase between two seconds of the story."""
    return windows.increase("e", name, T0 + start_s, None if end_s is None else T0 + end_s, key)


# --- resets ---------------------------------------------------------------------------------------------------------


def test_c036_after_a_drop_the_counter_counts_from_zero() -> None:
    """An engine restarted: 497, 500, 3, 5 rose by 3 + 3 + 2 = 8, and never by −497."""
    windows = counted([497, 500, 3, 5], every_s=60.0)
    assert rise(windows, 0) == 8
    assert rise(windows, 60) == 5
    assert windows.restarted_at("e", "preemptions") == T0 + 120


def test_a_sum_that_lost_a_bit_is_no_restart() -> None:
    """Several processes' sums were added in another order: 1e-12 less read as a restart, and the lifetime as new."""
    story: list[float] = [1234.5, 1240.5, 1240.5 - 1e-12, 1240.5, 1241.5]
    windows = Windows(5.0)
    for i, total in enumerate(story):
        read(windows, 5.0 * i, "e", {"ttft.sum": total, "ttft.count": 100.0})
    assert windows.increase("e", "ttft", T0, key="sum") == pytest.approx(7.0)
    assert windows.restarted_at("e", "ttft") is None


def test_a_restart_that_counts_past_the_old_total_shows_in_the_process_start_time() -> None:
    """The new process has counted 700 since: that is 700 more, not 200."""
    assert rise(counted([500, 500, 700], start=[T0 - 99, T0 - 99, T0 + 6]), 0) == 700


def test_a_process_start_time_that_wobbles_is_no_restart() -> None:
    """Rounding moves it by milliseconds."""
    windows = counted([500, 500, 510], start=[T0 - 99, T0 - 99.01, T0 - 99.4])
    assert rise(windows, 0) == 10
    assert windows.restarted_at("e", "preemptions") == T0 - 99


def test_a_counter_first_seen_on_a_watched_target_counts_from_zero() -> None:
    """prometheus_client shows a 5xx series only when there is one: the first counts."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"http.2xx": 100.0})
    read(windows, 5, "e", {"http.2xx": 103.0, "http.5xx": 2.0})
    assert windows.increases("e", "http", T0) == {"2xx": 3, "5xx": 2}


def test_what_stood_there_at_first_sight_is_the_base() -> None:
    """A lifetime total of 31 is no increase."""
    assert rise(counted([31, 31, 33]), 0) == 2


def test_a_counter_that_was_unreadable_at_first_does_not_first_appear() -> None:
    """NaN, then 500: nobody knows what rose; afterwards it counts."""
    windows = counted([None, 500, 501])
    assert rise(windows, 0) == 1


def test_a_labelled_counter_is_gone_after_a_restart_and_counts_from_zero_when_it_returns() -> None:
    """7 errors, restart (errors not shown until there are some), 9 errors: 9 more."""
    windows = Windows(5.0)
    for at, start, errors in ((0, 1.0, 7.0), (5, 100.0, None), (10, 100.0, 9.0)):
        read(windows, at, "e", {"finished.stop": 50.0, "process_start": start}
             | ({} if errors is None else {"finished.error": errors}))
    assert windows.increases("e", "finished", T0) == {"stop": 50, "error": 9}


def test_without_a_process_start_time_the_drop_of_one_series_tells_of_its_siblings() -> None:
    """Multiprocess mode: stop fell from 50 to 2, so the errors that come back count from 0 too."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"finished.stop": 50.0, "finished.error": 7.0})
    read(windows, 5, "e", {"finished.stop": 2.0})
    read(windows, 10, "e", {"finished.stop": 4.0, "finished.error": 9.0})
    assert windows.increases("e", "finished", T0) == {"stop": 4, "error": 9}


def test_a_series_that_vanishes_and_returns_goes_on_from_where_it_stood() -> None:
    """No restart: 5, gone for half a minute, 8 is 3 more; also when it was gone for longer than rows are kept."""
    windows = Windows(5.0)
    for at in times(0, 30):
        told = {} if 5 <= at <= 20 else {"preemptions": 8.0 if at else 5.0}
        read(windows, at, "e", {"running": 1.0, **told})
    assert rise(windows, 0) == 3
    for at in times(40, 40 + 2 * RAW_KEEP_S, 60):
        read(windows, at, "e", {"running": 1.0})
    at = 40 + 2 * RAW_KEEP_S + 60
    read(windows, at, "e", {"running": 1.0, "preemptions": 10.0})
    assert rise(windows, at - 120) == 2


# --- windows and gaps -----------------------------------------------------------------------------------------------


def test_the_base_is_the_last_sample_at_or_before_the_start() -> None:
    """Read at 0, 5, 10: from 7 on the base is the sample at 5; from 5 on it is the same."""
    windows = counted([0, 10, 100])
    assert rise(windows, 7) == 90
    assert rise(windows, 5) == 90
    assert rise(windows, 5.1) == 90
    assert rise(windows, -60) == 100
    assert rise(windows, 0, 5) == 10


def test_what_rose_while_nobody_watched_is_spread_evenly() -> None:
    """60 more over a gap of 60 s: a window that begins 45 s into the gap has 15 of them."""
    windows = Windows(5.0)
    for at, value in ((0, 0.0), (5, 0.0), (65, 60.0), (70, 61.0)):
        read(windows, at, "e", {"preemptions": value})
    assert rise(windows, 50) == pytest.approx(16)
    assert rise(windows, 5, 50) == pytest.approx(45)
    assert windows.watched_s("e", "preemptions", T0) == 10
    assert windows.watched_s("e", "preemptions", T0 + 50) == 5


def test_three_intervals_are_not_yet_a_gap() -> None:
    """15 s at a poll of 5 s counts as watched, and what rose is counted when it was seen."""
    windows = Windows(5.0)
    for at, value in ((0, 0.0), (15, 60.0)):
        read(windows, at, "e", {"preemptions": value})
    assert rise(windows, 10) == 60
    assert windows.watched_s("e", "preemptions", T0) == 15


def test_one_series_that_was_unreadable_for_a_minute_is_spread_too() -> None:
    """The page came every 5 s, this counter was NaN from 5 to 60 and 65 higher at 65: in the last 10 s, 10 of 65."""
    windows = Windows(5.0)
    for at in times(0, 65):
        read(windows, at, "e", {"running": 1.0, "preemptions": 0.0 if at < 5 else None if at < 65 else 65.0})
    assert rise(windows, 55) == pytest.approx(10)
    assert rise(windows, 0) == 65


def test_a_restart_inside_a_gap_counts_what_the_new_process_tells() -> None:
    """Tocsin was away for 100 s; the engine restarted meanwhile and has counted 40: spread, 20 in the last half."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"preemptions": 500.0, "process_start": T0 - 9})
    read(windows, 100, "e", {"preemptions": 40.0, "process_start": T0 + 50})
    assert rise(windows, 0) == 40
    assert rise(windows, 50) == pytest.approx(20)


# --- gaps as answers ------------------------------------------------------------------------------------------------


def test_c027_the_value_is_unknown_where_the_metric_is_missing() -> None:
    """0.83 is 0.83; with no line at all it is unknown with a reason, not 0."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"kv_usage": 0.83})
    read(windows, 0, "other", {"running": 1.0})
    assert windows.latest("e", "kv_usage", T0) == Sample("kv_usage", "e", 0.83, T0)
    missing = windows.latest("other", "kv_usage", T0)
    assert isinstance(missing, Gap)
    assert missing.code is Why.MISSING


def test_a_source_that_is_late_tells_nothing() -> None:
    """After 3 intervals without a read the last number is no number any more."""
    windows = counted([1, 2])
    assert isinstance(windows.latest("e", "running", T0 + 5 + 15), Sample)
    late = windows.latest("e", "running", T0 + 5 + 16)
    assert isinstance(late, Gap)
    assert late.code is Why.LATE


def test_a_gauge_that_left_the_page_is_missing() -> None:
    """It was told at the last read but one."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"running": 1.0, "kv_usage": 0.9})
    read(windows, 5, "e", {"running": 1.0})
    got = windows.latest("e", "kv_usage", T0 + 5)
    assert isinstance(got, Gap)
    assert got.code is Why.MISSING


def test_one_bad_bucket_makes_the_histogram_a_gap_wherever_it_stands_in_the_batch() -> None:
    """The bad line comes first, the good ones after it: it is a Gap; at the next good read it is none."""
    windows = Windows(5.0)
    bad = Gap("ttft", "e", Why.BAD_LINE, "line 7", T0, "0.5")
    windows.ingest(Batch("s", T0, 0.0, (bad, Sample("ttft", "e", 3.0, T0, "+Inf"))))
    problem = windows.problem("e", "ttft", T0)
    assert problem is not None
    assert problem.code is Why.BAD_LINE
    read(windows, 5, "e", {"ttft.0.5": 3.0, "ttft.+Inf": 4.0}, source="s")
    assert windows.problem("e", "ttft", T0 + 5) is None
    assert windows.increases("e", "ttft", T0) == {"0.5": 0, "+Inf": 1}


def test_a_dead_target_adds_no_row_to_its_numbers() -> None:
    """Liveness is told at every read, also without a page: it must not make the numbers look watched."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"running": 1.0, "down": 0.0, "rung": 3.0})
    for at in times(5, 100):
        read(windows, at, "e", {"down": 1.0, "rung": 0.0, "running": None})
    assert windows.watched_s("e", "running", T0) == 0
    assert windows.watched_s("e", "down", T0) == 100
    assert [v for _, v in windows.history("e", "down", T0 + 90)] == [1, 1, 1]


def test_c034_eight_ranks_are_eight_series() -> None:
    """Throughput by rank: never one for all, never an average; 601.40 in all, and the fastest is 4 x the slowest."""
    rates = [35.42, 35.43, 35.42, 141.75, 141.74, 140.76, 35.44, 35.44]
    windows = Windows(1.0)
    for at in (0.0, 1.0):
        page = {f"e/{i}": {"generation_tokens": 1000 + rate * at} for i, rate in enumerate(rates)}
        read_many(windows, at, "page", page)
    rises = {i: windows.increase(f"e/{i}", "generation_tokens", T0) for i in range(8)}
    assert rises == pytest.approx(dict(enumerate(rates)))
    assert sum(rises.values()) == pytest.approx(601.40)
    assert [i for i, r in rises.items() if r > 100] == [3, 4, 5]
    assert max(rises.values()) / min(rises.values()) == pytest.approx(4.0, abs=0.01)


# --- clocks ---------------------------------------------------------------------------------------------------------


def test_a_clock_stepped_back_moves_what_is_known_with_it() -> None:
    """One preemption, the clock goes back by an hour, another one: two in ten minutes, none lost, none twice."""
    windows = counted([0, 1, 1], every_s=5.0)
    read(windows, -3600, "e", {"running": 1.0, "preemptions": 1.0})
    read(windows, -3595, "e", {"running": 1.0, "preemptions": 2.0})
    assert rise(windows, -3595 - 600) == 2
    assert rise(windows, -3595 - 5) == 1
    assert windows.watched_s("e", "preemptions", T0 - 3595 - 600) == 20


def test_a_clock_stepped_back_does_not_stop_the_long_memory() -> None:
    """The minute rows go on at once, and an error before the step counts in six hours after it, once."""
    windows = Windows(5.0)
    for at in times(0, 600):
        read(windows, at, "e", {"finished.error": 3.0 if at >= 300 else 0.0})
    for at in times(600 - 7200, 600 - 7200 + 5400):
        read(windows, at, "e", {"finished.error": 3.0 if at < 0 else 4.0})
    end = 600 - 7200 + 5400
    assert rise(windows, end - 6 * HOUR, name="finished", key="error") == 3
    read(windows, end + 5, "e", {"finished.error": 5.0})
    assert rise(windows, end - 6 * HOUR, name="finished", key="error") == 5
    assert windows.watched_s("e", "finished", T0 + end - 6 * HOUR) == pytest.approx(6000, abs=130)


def test_a_clock_stepped_forward_or_a_suspended_host_is_a_gap() -> None:
    """An hour is missing: not watched, and nothing in it is invented."""
    windows = counted([0, 1, 2])
    read(windows, 3610, "e", {"running": 1.0, "preemptions": 2.0})
    assert windows.watched_s("e", "preemptions", T0) == 10
    assert rise(windows, 3000) == 0


# --- days -----------------------------------------------------------------------------------------------------------


def a_day_of_errors() -> Windows:
    """Three days at a poll of 60 s: 100 requests a minute; one error a minute on the first day and in the last hour."""
    windows = Windows(60.0)
    errors = 0.0
    for i in range(3 * 1440 + 1):
        if 0 < i <= 1440 or i > 3 * 1440 - 60:
            errors += 1
        read(windows, i * 60.0, "e", {"finished.stop": 99.0 * i, "finished.error": errors})
    return windows


def test_windows_of_hours_and_days_join_the_minute_rows_with_the_raw_ones() -> None:
    """1 h: 60; 6 h and 1 d: still the 60 of the last hour; 3 d: 1440 + 60. None counted twice at the joint."""
    windows = a_day_of_errors()
    end = 3 * DAY
    for span_s, errors in ((HOUR, 60), (6 * HOUR, 60), (DAY, 60), (2.5 * DAY, 720 + 60), (3 * DAY, 1440 + 60)):
        assert rise(windows, end - span_s, name="finished", key="error") == errors, span_s
        assert windows.watched_s("e", "finished", T0 + end - span_s) == span_s
    assert rise(windows, DAY - HOUR, DAY + HOUR, name="finished", key="error") == 60


def test_raw_rows_at_five_seconds_join_minute_rows_to_the_second() -> None:
    """One error at every read for three hours: 2 h are 1440, 90 min are 1080, whatever the joint."""
    windows = Windows(5.0)
    for i in range(2161):
        read(windows, i * 5.0, "e", {"finished.error": float(i)})
    end = 2160 * 5.0
    assert rise(windows, end - 7200, name="finished", key="error") == 1440
    assert rise(windows, end - 5400, name="finished", key="error") == 1080
    assert rise(windows, end - 600, name="finished", key="error") == 120
    assert windows.watched_s("e", "finished", T0 + end - 7200) == pytest.approx(7200)


def test_a_burst_of_errors_just_before_a_crash_is_in_the_long_memory() -> None:
    """Multiprocess mode: 50 errors within a minute, then a restart that counts past them within the next: 50 + 60."""
    windows = Windows(5.0)
    for i in range(2 * 720 + 1):
        at = i * 5.0
        errors, stops = 0.0, 1000.0
        if 125 <= at < 130:
            errors = 50.0
        if at >= 130:
            errors, stops = min(60.0, (at - 130) * 4), 10.0
        read(windows, at, "e", {"finished.error": errors, "finished.stop": stops})
    assert rise(windows, -6 * HOUR, name="finished", key="error") == 110


def test_two_engines_behind_one_address_do_not_fill_the_long_memory() -> None:
    """A balancer before two replicas: every read is a restart, and 720 rows an hour were kept for three days. Of an
    engine that dies each minute, with 55 errors in each, none is lost: 180 rows an hour, and 60 × 55 errors."""
    balanced, dying = Windows(5.0), Windows(5.0)
    for i in range(3 * 720 + 1):
        read(balanced, i * 5.0, "e", {"finished.stop": (100.0 if i % 2 else 5000.0) + i})
        read(dying, i * 5.0, "e", {"finished.error": 5.0 * (i % 12), "finished.stop": 100.0 * (i % 12)})
    assert len(balanced.coarse["source of e"].times) < 3 * 180 + 60
    assert rise(dying, 0, 2 * HOUR, name="finished", key="error") == 2 * 60 * 55


def test_a_young_agent_answers_from_the_raw_rows() -> None:
    """Watched for 3 minutes, asked for 5: the buckets are not in the minute rows, the count is; both are whole."""
    windows = Windows(5.0)
    for i in range(37):
        read(windows, i * 5.0, "e", {"ttft.0.5": float(i), "ttft.+Inf": 2.0 * i, "ttft.count": 2.0 * i})
    assert windows.increases("e", "ttft", T0 - 120) == {"0.5": 36, "+Inf": 72, "count": 72}


def test_memory_is_bounded() -> None:
    """Two weeks at a poll of a minute: no row is kept for longer than it is asked for (and 64 rows of slack)."""
    windows = Windows(60.0)
    for i in range(14 * 1440):
        read(windows, i * 60.0, "e", {"finished.error": float(i), "waiting": 0.0, "kv_usage": 0.5})
        windows.unsaved()
    (raw,), (coarse,) = windows.tracks.values(), windows.coarse.values()
    assert len(raw.times) <= RAW_KEEP_S / 60 + 65
    assert len(coarse.times) <= COARSE_KEEP_S / 60 + 65
    assert {len(c) for c in raw.columns.values()} == {len(raw.times)}


def test_a_series_that_is_gone_for_good_leaves_no_column() -> None:
    """Statuses and adapters come and go; their columns must not stay for ever."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"running": 1.0, "http.404": 1.0})
    for at in times(60, 2 * RAW_KEEP_S, 10):
        read(windows, at, "e", {"running": 1.0})
    assert windows.keys("e", "http") == []


def test_a_subject_that_ended_is_let_go_and_may_come_back() -> None:
    """A GPU fell off the bus and returned: its counter goes on, and is not counted as if it had been 0."""
    windows = Windows(5.0)
    read(windows, 0, "GPU-a", {"gpu_thermal_ns": 5e9, "gpu_temp_c": 60.0}, source="nvml")
    windows.forget("GPU-a")
    assert isinstance(windows.latest("GPU-a", "gpu_temp_c", T0), Gap)
    read(windows, 5, "GPU-a", {"gpu_thermal_ns": 5.5e9, "gpu_temp_c": 61.0}, source="nvml")
    got = windows.latest("GPU-a", "gpu_temp_c", T0 + 5)
    assert isinstance(got, Sample)
    assert got.value == 61
    assert windows.increase("GPU-a", "gpu_thermal_ns", T0) <= 0.5e9


def test_a_gauge_at_an_earlier_time() -> None:
    """The level at a time is the last number at or before it; NaN and missing rows are skipped."""
    windows = Windows(5.0)
    for at, waiting in ((0, 3.0), (5, 4.0), (10, None), (15, 6.0)):
        read(windows, at, "e", {"running": 1.0} | ({} if waiting is None else {"waiting": waiting}))
    assert [windows.level("e", "waiting", T0 + s) for s in (-1, 0, 7, 12, 99)] == [None, 3, 4, 4, 6]


# --- restart of Tocsin ----------------------------------------------------------------------------------------------


def test_a_preemption_50_minutes_before_a_restart_of_tocsin_still_counts() -> None:
    """Seen at 10 min; Tocsin is down from 55 to 58 min; at 60 min it is one in the hour."""
    first = Windows(5.0)
    for at in times(0, 3300):
        read(first, at, "e", {"preemptions": 1.0 if at >= 600 else 0.0})
    second = Windows(5.0)
    second.restore(first.unsaved())
    for at in times(3480, 3600):
        read(second, at, "e", {"preemptions": 1.0})
    assert rise(second, 0) == 1
    assert rise(second, 700) == 0
    assert second.watched_s("e", "preemptions", T0) == 3300 + 120


def test_an_engine_that_restarted_while_tocsin_was_down_is_seen_by_its_start_time() -> None:
    """Before: 500 preemptions in all. After: 620, of a process that started meanwhile."""
    first = Windows(5.0)
    for at in times(0, 100):
        read(first, at, "e", {"preemptions": 500.0, "process_start": T0 - 1000})
    second = Windows(5.0)
    second.restore(first.unsaved())
    read(second, 160, "e", {"preemptions": 620.0, "process_start": T0 + 120})
    assert rise(second, 0) == 620
    assert second.restarted_at("e", "preemptions") == T0 + 160


def test_a_model_that_loads_for_minutes_warms_up_from_its_first_page() -> None:
    """The process began at 110 s, its first page came at 400 s: only then could requests come."""
    windows = Windows(5.0)
    for at in times(0, 100):
        read(windows, at, "e", {"running": 1.0, "process_start": T0 - 1000})
    read(windows, 400, "e", {"running": 1.0, "process_start": T0 + 110})
    read(windows, 405, "e", {"running": 1.0, "process_start": T0 + 110})
    assert windows.restarted_at("e", "running") == T0 + 400
    late = Windows(5.0)  # a Tocsin that comes later knows only what the process tells
    read(late, 405, "e", {"running": 1.0, "process_start": T0 + 110})
    assert late.restarted_at("e", "running") == T0 + 110


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[float, dict[str, float | None]]]:
    """Reads of one engine: irregular, with gaps, clock steps, restarts, and series that come and go."""
    at, start = 0.0, -50.0
    totals = {"preemptions": 7.0, "finished.error": 2.0, "finished.stop": 5.0}
    story: list[tuple[float, dict[str, float | None]]] = []
    for _ in range(draw(st.integers(4, 40))):
        at += draw(st.sampled_from([5.0, 5.0, 5.0, 5.1, 4.9, 12.0, 16.0, 60.0, 400.0, -30.0]))
        if draw(st.integers(0, 9)) == 0:
            start, totals = at - 2.0, dict.fromkeys(totals, 0.0)
        totals = {k: v + draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])) for k, v in totals.items()}
        numbers: dict[str, float | None] = dict(totals)
        for name in totals:
            numbers |= {name: None} if draw(st.integers(0, 9)) == 0 else {}
        if draw(st.integers(0, 5)) == 0:
            numbers.pop("finished.error")
        if draw(st.booleans()):
            numbers["process_start"] = start
        story.append((at, numbers | {"waiting": float(len(story) % 3)}))
    return story


@settings(max_examples=100, deadline=None)
@given(stories(), st.integers(0, 40))
def test_a_restart_of_tocsin_changes_no_answer(story: list[tuple[float, dict[str, float | None]]], cut: int) -> None:
    """All in one go, or half, saved, restored into a new memory, and the rest: every answer is the same."""
    whole, before, after = Windows(5.0), Windows(5.0), Windows(5.0)
    for at, numbers in story:
        read(whole, at, "e", numbers)
    for at, numbers in story[:cut]:
        read(before, at, "e", numbers)
    rows = before.unsaved()
    after.restore([r for r in rows if r.res == "coarse"])  # as the loop does: each resolution in one go
    after.restore([r for r in rows if r.res == "raw"])
    for at, numbers in story[cut:]:
        read(after, at, "e", numbers)
    end = story[-1][0]
    for back_s in (7.0, 33.0, 300.0, 3600.0):
        since = T0 + end - back_s
        for name in ("preemptions", "finished"):
            assert after.increases("e", name, since) == pytest.approx(whole.increases("e", name, since))
            assert after.watched_s("e", name, since) == pytest.approx(whole.watched_s("e", name, since))
    assert list(after.backward("e", ("waiting", ""))) == list(whole.backward("e", ("waiting", "")))
    assert after.restarted_at("e", "waiting") == whole.restarted_at("e", "waiting")


@settings(max_examples=100, deadline=None)
@given(stories())
def test_an_increase_is_never_negative_and_adds_up(story: list[tuple[float, dict[str, float | None]]]) -> None:
    """Whatever the engine does, what rose until a moment and since it is what rose in all."""
    windows = Windows(5.0)
    for at, numbers in story:
        read(windows, at, "e", numbers)
    end = story[-1][0]
    for name in ("preemptions", "finished"):
        for back_s in (20.0, 100.0):
            middle = T0 + end - back_s
            late = windows.increases("e", name, middle)
            early = windows.increases("e", name, T0 + end - 2000, middle)
            total = windows.increases("e", name, T0 + end - 2000)
            for key, value in total.items():
                assert value >= -1e-9
                assert late[key] >= -1e-9
                assert not math.isnan(value)
                assert early[key] + late[key] == pytest.approx(value)


# --- the short way for a row like the last one -----------------------------------------------------------------------

NUMBERS = st.sampled_from([0.0, 0.1, 1.0, 2.5, 7.0, math.nan])
SERIES: list[SeriesKey] = [("finished", "e", "stop"), ("finished", "e", "error"), ("kv_usage", "e", ""),
                           ("process_start", "e", ""), ("preemptions", "f", "")]
ROWS = st.lists(st.tuples(st.sampled_from([5.0, 5.0, 5.0, 40.0, 5000.0, -3.0]),
                          st.dictionaries(st.sampled_from(SERIES), NUMBERS, min_size=1),
                          st.integers(1, 4), st.sampled_from([0.0, 1.0])), max_size=12)


@given(ROWS)
def test_a_row_like_the_last_one_is_added_as_any_other(rows: list[tuple[float, dict[SeriesKey, float], int, float]],
                                                       ) -> None:
    """Most rows tell the series of the row before: the short way for them gives what the long way gives."""
    short, long = Track(5.0, 3600.0, 5.0), Track(5.0, 3600.0, 5.0)
    at = T0
    for step_s, told, repeat, growth in rows:
        for i in range(repeat):
            at += step_s
            keys, values = tuple(told), [value + growth * i for value in told.values()]
            long._end_alike()  # so that it finds no row to be like
            assert short.append(at, keys, values) == long.append(at, keys, values)
            assert short.watched_since(at - 60) == long.watched_since(at - 60)
    assert (short.times, short.watched) == (long.times, long.watched)
    assert (short.restarted_at, short.started_at) == (long.restarted_at, long.started_at)
    assert repr(short.columns) == repr(long.columns)  # NaN is not equal to itself, but it is written alike


def test_a_series_told_twice_in_one_read_counts_with_its_second_word() -> None:
    """A source's slip must not make a row longer than its names."""
    windows = Windows(5.0)
    for at in (0.0, 5.0):
        windows.ingest(Batch("engine:e", T0 + at, 0.0, tuple(
            Sample("finished", "e", value, T0 + at, "stop") for value in (1.0, 3.0 + at))))
    assert rise(windows, 0, name="finished", key="stop") == 5


@given(st.lists(st.tuples(st.sampled_from([5.0, 5.0, 60.0, 900.0, 8000.0, 90000.0]), st.integers(1, 30),
                          st.sampled_from([None, 0.0, 1.0, 3.0]), st.booleans()), min_size=1, max_size=12))
def test_what_is_in_a_window_is_in_every_longer_one(spells: list[tuple[float, int, float | None, bool]]) -> None:
    """No error in three days is no error in an hour: burn rates count the longest window first, and stop at nothing."""
    windows, at, total = Windows(5.0), 0.0, 7.0
    for every_s, reads, growth, restarts in spells:
        total = 0.0 if restarts else total
        for _ in range(reads):
            at += every_s
            total += growth or 0.0
            read(windows, at, "e", {"waiting": 0.0, **({} if growth is None else {"finished.error": total})})
    rose = [rise(windows, at - span_s, name="finished", key="error")
            for span_s in (60, 300, 1800, HOUR, 2 * HOUR, 6 * HOUR, DAY, 3 * DAY)]
    any_rise = [rose_by > 0 for rose_by in rose]
    assert any_rise == sorted(any_rise)


def test_the_highest_of_a_gauge_passes_over_what_is_missing() -> None:
    """The busiest moment of the hour, although a page broke in between; of nothing there is none."""
    windows = Windows(5.0)
    for i, value in enumerate((2.0, 7.0, None, 3.0)):
        read(windows, i * 5.0, "e", {"running": value})
        read(windows, i * 5.0, "whole", {"running": float(i)})
        read(windows, i * 5.0, "blind", {"running": None})
    found = [windows.highest(subject, "running") for subject in ("e", "whole", "blind", "nobody")]
    assert found == [7.0, 3.0, None, None]
