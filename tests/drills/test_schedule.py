"""When drills run: the public cases of scheduling, what is tried again and what is given up. Times are written out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.strict import Unfit
from drills import cron, schedule
from drills.model import Drill, Schedule, Verdict
from drills.schedule import CronTrigger, Hands, Look, Owed, Past, Seen, Step, Timetable, decide, look, overdue

DAY, HOUR = 86_400.0, 3_600.0


def at(text: str) -> float:
    """2026-11-29T03:00Z, or with an offset, as unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def utc(seconds: float | None) -> str:
    assert seconds is not None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


def fires(line: str, zone: str, after: str, n: int) -> list[str]:
    """The next n times, as APScheduler would have them from our trigger, one after the other."""
    trigger = CronTrigger(line, zone)
    found: list[str] = []
    previous: datetime | None = None
    for _ in range(n):
        previous = trigger.get_next_fire_time(previous, datetime.fromisoformat(after))
        assert previous is not None
        found.append(utc(previous.timestamp()))
    return found


def daily(line: str = "0 3 * * *", **more: object) -> Drill:
    return Drill("net", "packet-loss", schedule=replace(Schedule(line), **more))  # type: ignore[arg-type]


def seen_at(text: str, drill: Drill, owed: Owed | None = None) -> Seen:
    assert drill.schedule is not None
    return Seen(f"{drill.schedule.cron} {drill.schedule.zone}", at(text), at(text), owed)


def step(drill: Drill, owed: Owed, now: str, active: str | None = None, last_run: str | None = None) -> Step:
    last = None if last_run is None else at(last_run)
    return decide(drill, owed, at(now), node="n", active=active, last_run_at=last, min_gap_s=20 * HOUR)


# ---- the public cases ----


def test_c077_the_hour_that_does_not_exist() -> None:
    """A daily drill at 02:30 in the night without 02:30: once, right after the jump, and no endless search."""
    assert fires("30 2 * * *", "Europe/Amsterdam", "2027-03-27T12:00:00+01:00", 3) == [
        "2027-03-28T01:00Z",
        "2027-03-29T00:30Z",
        "2027-03-30T00:30Z",
    ]


def test_c078_the_hour_that_comes_twice() -> None:
    """A fixed time fires once, the first time; a wildcard keeps its rhythm."""
    zone = "America/New_York"

    assert fires("30 1 * * *", zone, "2026-10-31T12:00:00-04:00", 2) == ["2026-11-01T05:30Z", "2026-11-02T06:30Z"]
    assert fires("*/30 * * * *", zone, "2026-11-01T04:45:00+00:00", 5) == [
        "2026-11-01T05:00Z",
        "2026-11-01T05:30Z",
        "2026-11-01T06:00Z",
        "2026-11-01T06:30Z",
        "2026-11-01T07:00Z",
    ]


def test_c078_asked_in_the_second_of_the_two_hours() -> None:
    """Restarted at 01:10 of the second round: the 01:30 of the first one is past, and must not come back."""
    assert fires("30 1 * * *", "America/New_York", "2026-11-01T06:10:00+00:00", 1) == ["2026-11-02T06:30Z"]


def test_c080_midnight_on_the_day_of_the_change() -> None:
    """The day after must not be jumped over; where midnight itself does not exist it is the first minute after."""
    assert fires("0 0 * * *", "America/Los_Angeles", "2022-03-13T00:00:07-08:00", 2) == [
        "2022-03-14T07:00Z",
        "2022-03-15T07:00Z",
    ]
    assert fires("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00:00-03:00", 2) == [
        "2018-11-04T03:00Z",
        "2018-11-05T02:00Z",
    ]


def test_c081_a_day_of_23_hours_and_a_later_month() -> None:
    """Noon of the Sunday of the change is not left out; April's first run has April's offset."""
    assert fires("0 12 * * 0", "Europe/Berlin", "2022-03-24T12:00:00+01:00", 1) == ["2022-03-27T10:00Z"]
    assert cron.next_due("* * * */3 *", "America/New_York", at("2015-02-15T00:00:00-05:00")) == 1_427_860_800


def test_c083_day_of_month_or_day_of_week_and_impossible_dates() -> None:
    """Both set mean either; 30 February is refused at once; 29 February waits for its year."""
    assert fires("0 0 13 * 5", "UTC", "2026-11-29T00:00:00+00:00", 4) == [
        "2026-12-04T00:00Z",
        "2026-12-11T00:00Z",
        "2026-12-13T00:00Z",
        "2026-12-18T00:00Z",
    ]
    with pytest.raises(Unfit, match="never matches"):
        cron.check("0 0 30 2 *")
    cron.check("0 0 29 2 *")
    assert fires("0 0 29 2 *", "UTC", "2026-11-29T00:00:00+00:00", 1) == ["2028-02-29T00:00Z"]


@pytest.mark.parametrize(("line", "want"), [
    ("0 0 * * SAT-SUN", ["2026-12-05T00:00Z", "2026-12-06T00:00Z", "2026-12-12T00:00Z"]),
    ("0 0 * * FRI-SUN/2,TUE", ["2026-12-01T00:00Z", "2026-12-04T00:00Z", "2026-12-06T00:00Z"]),
    ("0 0 * * 6-7", ["2026-12-05T00:00Z", "2026-12-06T00:00Z", "2026-12-12T00:00Z"]),
    ("0 0 * * 7", ["2026-12-06T00:00Z", "2026-12-13T00:00Z", "2026-12-20T00:00Z"]),
    ("0 0 * * SUN-TUE", ["2026-12-01T00:00Z", "2026-12-06T00:00Z", "2026-12-07T00:00Z"]),
])  # fmt: skip
def test_a_week_may_end_with_sunday(line: str, want: list[str]) -> None:
    """cronie#200: `sat-sun` was no range, since Sunday is 0. 30 November 2026 is a Monday."""
    cron.check(line)

    assert fires(line, "UTC", "2026-11-30T00:00:00+00:00", 3) == want


@pytest.mark.parametrize(("line", "said"), [
    ("*/90 * * * *", r"\*/90 is no rhythm"), ("0 */36 * * *", r"\*/36 is no rhythm"),
    (f"*/{'9' * 5000} * * * *", "rhythm"), ("0 22-2 * * *", "22-2 ends before"),
    ("0 0 * * FRI-MON", "FRI-MON ends before"), ("0 0 1 NOV-FEB *", "NOV-FEB ends before"),
])  # fmt: skip
def test_a_line_that_says_another_rhythm_than_it_has(line: str, said: str) -> None:
    """`*/90` was due each hour, and of a range that ends before it begins nobody knows what was meant."""
    with pytest.raises(Unfit, match=said):
        cron.check(line)


def test_c084_a_little_late_still_runs() -> None:
    """The machine was busy for 1.8 s: the run of the month is not dropped for that."""
    drill = daily()
    woke = at("2026-11-29T03:00Z") + 1.776

    found = look(drill, seen_at("2026-11-28T12:00Z", drill), woke)

    assert not found.missed
    assert found.seen.owed == Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))
    assert decide(drill, found.seen.owed, woke, node="n", active=None, last_run_at=None, min_gap_s=0).kind == "run"


def test_c084_after_nine_days_down_one_run_and_one_entry() -> None:
    """Ten times fell into the stop: the last one is made up for, the nine others are one entry."""
    drill = daily(grace_s=DAY)

    found = look(drill, seen_at("2026-11-20T00:00Z", drill), at("2026-11-29T09:00Z"))

    assert found.seen.owed == Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))
    assert len(found.missed) == 9
    assert schedule.missed_text(found.missed) == (
        "missed 9 times, 2026-11-20 03:00Z to 2026-11-28 03:00Z: drilld was not running"
    )
    assert step(drill, found.seen.owed, "2026-11-29T09:00Z").kind == "run"
    assert look(drill, found.seen, at("2026-11-29T09:01Z")) == Look(
        replace(found.seen, looked_at=at("2026-11-29T09:01Z"))
    )


def test_c084_a_short_grace_makes_up_for_nothing() -> None:
    """The last time is six hours ago and grace is one: no run, all ten missed, said once."""
    drill = daily(grace_s=HOUR)

    found = look(drill, seen_at("2026-11-20T00:00Z", drill), at("2026-11-29T09:00Z"))

    assert found.seen.owed is None
    assert len(found.missed) == 10


def test_c084_its_last_run_still_goes_on() -> None:
    """Never two at once: skipped, with the run that is in the way."""
    owed = Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))

    assert step(daily(), owed, "2026-11-29T03:00Z", active="net-1") == Step(
        "skip", at("2026-11-29T03:00Z"), "its run net-1 has not ended yet"
    )


# ---- what is due ----


def test_nothing_fires_because_it_was_loaded() -> None:
    """A drill was applied at noon and broke something at noon."""
    drill = daily("* * * * *")

    new = look(drill, None, at("2026-11-29T12:00:30Z"))
    changed = look(daily("*/2 * * * *"), new.seen, at("2026-11-29T18:00:00Z"))

    assert (new.seen.owed, new.missed) == (None, ())
    assert (changed.seen.owed, changed.missed) == (None, ())
    assert look(drill, new.seen, at("2026-11-29T12:00:59Z")).seen.owed is None
    assert look(drill, new.seen, at("2026-11-29T12:01:00Z")).seen.owed is not None


def test_a_clock_that_steps_back_fires_nothing_twice() -> None:
    """NTP took ten minutes back: 03:00 came again, the drill did not. A clock wrong by years is forgotten."""
    drill = daily()
    seen = look(drill, seen_at("2026-11-28T12:00Z", drill), at("2026-11-29T03:05Z")).seen
    seen = schedule.tried(seen, at("2026-11-29T03:06Z"), Verdict.PASS, "")

    again = look(drill, seen, at("2026-11-29T02:55Z")).seen

    assert look(drill, again, at("2026-11-29T03:02Z")).seen.owed is None
    assert look(drill, replace(seen, looked_at=at("2099-01-01T00:00Z")), at("2026-11-29T03:00Z")).seen.looked_at == at(
        "2026-11-29T03:00Z"
    )


def test_a_clock_that_was_wrong_by_years_holds_nothing_up() -> None:
    """An empty CMOS battery: the node was in 2099 for a minute, and a run of then would have put all others off."""
    drill, owed = daily(), Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))
    monthly = daily("0 10 * * TUE#1")
    real = Past("net", at("2026-12-01T10:00Z"), Verdict.PASS)
    wrong = Past("net", at("2099-01-01T00:00Z"), Verdict.PASS)

    assert step(drill, owed, "2026-11-29T03:10Z", last_run="2099-01-01T00:00Z") == Step("run", at("2026-11-29T03:10Z"))
    assert overdue(monthly, [real, wrong], at("2027-01-25T10:01Z"), None, at("2099-01-01T00:00Z")) is not None
    then = replace(seen_at("2099-01-01T00:00Z", drill), verdict_at=at("2099-01-01T00:00Z"))
    kept = look(drill, then, at("2026-11-29T03:00Z"))
    assert kept.seen.verdict_at is None


def test_a_clock_that_is_put_back_is_looked_at_anew(tmp_path: Path) -> None:
    """The timetable slept until a time of 2099, and NTP had put the clock right long before."""
    now = [at("2099-01-01T00:00Z")]
    table = Timetable([daily()], Life().hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    jobs = table._scheduler
    jobs.start(paused=True)  # what it waits for is seen, and nobody waits
    try:
        table.keep_time()
        assert jobs.get_job("look").next_run_time.timestamp() == at("2099-01-01T00:00Z")
        now[0] = at("2026-11-29T02:00Z")

        table.keep_time()

        assert jobs.get_job("look").next_run_time.timestamp() == now[0]
        assert utc(jobs.get_job("due net").next_run_time.timestamp()) != "2099-01-01T03:00Z"
    finally:
        jobs.shutdown()


def test_a_year_of_minutes_is_counted_in_no_time() -> None:
    """`* * * * *` and a machine that was in a drawer for a year."""
    drill = daily("* * * * *")
    started = time.monotonic()

    found = look(drill, seen_at("2025-11-29T00:00Z", drill), at("2026-11-29T00:00Z"))

    assert found.seen.owed is not None
    assert found.seen.owed.due_at == at("2026-11-29T00:00Z")
    assert time.monotonic() - started < 10


# ---- tried again, given up ----


def test_a_no_is_tried_again_each_day_at_its_hour_until_grace_ends() -> None:
    """The window was open, a page was firing: it is tried the next day, not the next minute, and not for ever."""
    drill = daily("0 10 * * TUE#1", zone="Europe/Berlin", window=(600, 960), grace_s=3 * DAY)
    seen = look(drill, seen_at("2026-11-30T00:00Z", drill), at("2026-12-01T09:00Z")).seen
    assert seen.owed is not None
    assert step(drill, seen.owed, "2026-12-01T09:00Z").kind == "run"

    seen = schedule.tried(seen, at("2026-12-01T09:00Z"), Verdict.SKIPPED, "pages: engine-down on a fires on this node")
    assert seen.owed is not None

    assert step(drill, seen.owed, "2026-12-01T09:05Z") == Step("wait", at("2026-12-02T09:00Z"))
    assert step(drill, seen.owed, "2026-12-02T09:00Z").kind == "run"
    seen = schedule.tried(seen, at("2026-12-03T09:00Z"), Verdict.DEFERRED, "lock: held by run a")
    assert seen.owed is not None
    assert step(drill, seen.owed, "2026-12-03T12:00Z") == Step("wait", at("2026-12-04T09:00Z"))
    assert step(drill, seen.owed, "2026-12-04T09:00Z") == Step(
        "skip", at("2026-12-04T09:00Z"), "not once in 3 d: pages: engine-down on a fires on this node"
        " (2026-12-01 09:00Z); lock: held by run a (2026-12-03 09:00Z)"
    )
    assert schedule.tried(seen, 9.0, Verdict.FAIL, "").owed is None
    assert schedule.tried(seen, 9.0, Verdict.FAIL, "").verdict_at == 9.0


@pytest.mark.parametrize(
    ("story", "window", "now", "want"),
    [
        ("late, and the window still open", (120, 360), "2026-11-29T05:00Z", "run"),
        ("late, and the window closed", (120, 360), "2026-11-29T09:00Z", "defer 2026-11-30T03:00Z"),
        ("a window over midnight", (22 * 60, 240), "2026-11-29T03:59Z", "run"),
        ("a window over midnight, closed", (22 * 60, 240), "2026-11-29T04:00Z", "defer 2026-11-30T03:00Z"),
        ("no window", None, "2026-11-29T23:00Z", "run"),
    ],
)
def test_late_runs_only_inside_its_window(story: str, window: tuple[int, int] | None, now: str, want: str) -> None:
    """A drill that woke up at noon killed an engine in the busiest hour."""
    owed = Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))

    found = step(daily(window=window), owed, now)

    assert f"{found.kind} {utc(found.at)}".startswith(want), story


def test_a_blackout_puts_it_off_to_the_day_after() -> None:
    """Due on the first day of the holidays: it runs on the first day after them, in its zone."""
    blackouts = (("2026-12-20", "2027-01-07"),)
    drill = daily("0 3 * * *", zone="Europe/Berlin", blackouts=blackouts, grace_s=30 * DAY)
    owed = Owed(at("2026-12-20T02:00Z"), at("2026-12-20T02:00Z"))

    found = step(drill, owed, "2026-12-20T02:00Z")

    assert found == Step("defer", at("2027-01-07T02:00Z"), "2026-12-20 is in the blackout 2026-12-20/2027-01-06"
                         " Europe/Berlin")  # fmt: skip


def test_two_drills_keep_their_distance() -> None:
    """The gap of 20 h after another drill is open: put off to the next day at its hour."""
    owed = Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))

    assert step(daily(), owed, "2026-11-29T03:00Z", last_run="2026-11-28T12:00Z") == Step(
        "defer", at("2026-11-30T03:00Z"), "another drill ran 15.0 h ago; drill_guards.min_gap is 20 h"
    )
    assert step(daily(), owed, "2026-11-30T03:00Z", last_run="2026-11-28T12:00Z").kind == "run"


def test_longest_since_its_last_verdict_first() -> None:
    """One drill took each free hour, and the others never ran."""
    owed = Owed(100.0, 100.0)
    seen = {
        "often": Seen("", 0, 0, owed, 90.0),
        "seldom": Seen("", 0, 0, owed, 10.0),
        "new": Seen("", 0, 0, owed),
        "older": Seen("", 0, 0, Owed(50.0, 100.0), 10.0),
    }

    assert schedule.in_turn(seen, seen) == ["new", "older", "seldom", "often"]


# ---- jitter ----


def test_jitter_is_the_run_s_own_and_stays_inside_the_window() -> None:
    """A thousand nodes asked their router at the same second; after a restart each node keeps its own."""
    drill = Schedule("55 15 * * *", "UTC", (600, 960), jitter_s=300.0)
    slot = at("2026-11-29T15:55Z")
    runs = [schedule.run_id("net", slot, f"node-{n}") for n in range(200)]
    found = [schedule.jitter_s(drill, run, slot) for run in runs]

    assert found == [schedule.jitter_s(drill, run, slot) for run in runs]
    assert runs[0].startswith("net-20261129T155500Z-")
    assert 0 <= min(found) < 40 < 200 < max(found) < 240  # the window closes after 300 s
    minute = Schedule("0 10 * * *", window=(600, 601), jitter_s=300.0)
    assert schedule.jitter_s(minute, runs[0], at("2026-11-29T10:00Z")) == 0


def test_it_waits_for_its_jitter() -> None:
    """Due at 03:00, it starts some minutes later."""
    drill = daily(jitter_s=300.0)
    owed = Owed(at("2026-11-29T03:00Z"), at("2026-11-29T03:00Z"))

    found = step(drill, owed, "2026-11-29T03:00Z")

    assert found.kind == "wait"
    assert 0 < found.at - at("2026-11-29T03:00Z") < 300
    assert decide(drill, owed, found.at, node="n", active=None, last_run_at=None, min_gap_s=0).kind == "run"


# ---- no-drill ----


@pytest.mark.parametrize(
    ("story", "history", "known", "now", "said"),
    [
        ("it ran in its month", [("2026-12-01T10:00Z", "PASS", None)], None, "2027-01-20T00:00Z", None),
        ("a failed run is a run", [("2026-12-01T10:00Z", "FAIL", None)], None, "2027-01-20T00:00Z", None),
        ("due, 20 days ago", [("2026-12-01T10:00Z", "PASS", None)], None, "2027-01-25T10:01Z", "2027-01-05 10:"),
        ("never ran", [], "2026-12-02T00:00Z", "2027-01-25T10:01Z", "was due 2027-01-05 10:00Z and has not run"),
        ("new", [], "2027-01-10T00:00Z", "2027-01-25T10:01Z", None),
        ("given up", [("2026-12-02T00:00Z", "SKIPPED", "2026-12-01T10:00Z")], None, "2026-12-03T00:00Z", "skipped: w"),
        ("refused by hand", [("2026-12-02T00:00Z", "SKIPPED", None)], None, "2026-12-03T00:00Z", None),
        ("run", [("2026-12-02T00:00Z", "SKIPPED", "2026-12-01T10:00Z"), ("2026-12-02T10:00Z", "PASS", None)], None,
         "2026-12-03T00:00Z", None),
    ],
)  # fmt: skip
def test_a_drill_that_was_due_and_did_not_run(
    story: str, history: Sequence[tuple[str, str, str | None]], known: str | None, now: str, said: str | None
) -> None:
    """No drill this month, and nobody noticed."""
    drill = daily("0 10 * * TUE#1")
    past = [Past("net", at(when), Verdict(verdict), at(due) if due else None, "why") for when, verdict, due in history]
    past.append(Past("other", at("2027-01-24T00:00Z"), Verdict.PASS))

    found = overdue(drill, past, at(now), None if known is None else at(known))

    assert (found is None) == (said is None), story
    assert (said or "") in (found or ""), story
    assert overdue(replace(drill, enabled=False), past, at(now), at("2020-01-01T00:00Z")) is None


def test_a_drill_that_another_node_has_held() -> None:
    """Each of 49 nodes opened a ticket that the monthly drill had not run: the fiftieth had held it."""
    drill, now = daily("0 10 * * TUE#1"), at("2027-01-28T00:00Z")
    known = at("2026-12-02T00:00Z")
    assert overdue(drill, [], now, known) is not None
    assert overdue(drill, [], now, known, at("2027-01-06T10:00Z")) is None


def test_another_line_was_never_due_before_it_was_written() -> None:
    """On 29 November the drill of the 1st became one of the 10th: that of 10 November had not been missed."""
    drill, past = daily("0 10 10 * *"), [Past("net", at("2026-11-01T10:00Z"), Verdict.PASS)]

    assert overdue(drill, past, at("2026-11-30T11:00Z"), at("2026-11-29T00:00Z")) is None
    assert overdue(drill, past, at("2026-12-30T10:01Z"), at("2026-11-29T00:00Z")) == (
        "net was due 2026-12-10 10:00Z and has not run in 20 d")


def test_a_run_is_of_its_own_drill_alone() -> None:
    """`net` was given up for its month since a run of `net-both` had not ended."""
    run = schedule.run_id("net-both", at("2026-11-29T03:00Z"), "n")

    assert schedule.is_of(run, "net-both")
    assert not schedule.is_of(run, "net")


# ---- properties ----


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["30 2 * * *", "*/20 * * * *", "15 */3 * * *", "0 0 * * 0", "30 1 31 * *", "59 23 * * MON#1"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca"]),
    st.integers(1_577_836_800, 1_893_456_000),
)
def test_times_rise_and_do_not_depend_on_where_one_looks_from(line: str, zone: str, after: int) -> None:
    """Whether drilld was restarted in between or not, the same times come."""
    first = cron.dues_between(line, zone, float(after), after + 400 * DAY, 5)

    assert first == sorted(set(first))
    assert all(due > after for due in first)
    for earlier, later in pairwise(first):
        assert cron.next_due(line, zone, earlier) == later
        assert cron.next_due(line, zone, later - 1) == later


def test_windows_of_the_day_in_a_zone() -> None:
    """A window is the wall clock's, on days of 23 and 25 hours too."""
    plan = Schedule("0 10 * * *", "Europe/Berlin", (600, 960))
    for day in ("2027-03-28", "2026-10-25", "2026-11-29"):
        opens = datetime.fromisoformat(f"{day}T10:00").replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
        assert cron.closed(plan, opens) == ""
        assert "outside the window 10:00-16:00 Europe/Berlin" in cron.closed(plan, opens - 1)
        assert cron.window_left_s(plan, opens) == 6 * HOUR
        assert cron.closed(plan, opens + 6 * HOUR) != ""


# ---- the edge ----


class Life:
    """The hands of a timetable: remembers what it was asked, and answers as told."""

    def __init__(self, answers: Callable[[str], tuple[Verdict, str]] = lambda name: (Verdict.PASS, "")) -> None:
        self.answers = answers
        self.ran: list[tuple[str, float]] = []
        self.skipped: list[tuple[str, str]] = []
        self.changed = threading.Event()
        self.deferred: list[tuple[str, str]] = []
        self.last_run_at: float | None = None
        self.hands = Hands(self.run, self.skip, self.defer, lambda name: None, lambda: self.last_run_at)

    def run(self, drill: Drill, run: str, due_at: float) -> tuple[Verdict, str]:
        assert run.startswith(f"{drill.name}-2")
        self.ran.append((drill.name, due_at))
        self.changed.set()
        return self.answers(drill.name)

    def skip(self, drill: Drill, run: str, due_at: float, why: str) -> None:
        self.skipped.append((drill.name, why))

    def defer(self, drill: Drill, run: str, due_at: float, why: str) -> None:
        assert run.startswith(f"{drill.name}-2")
        self.deferred.append((drill.name, why))


def test_a_timetable_remembers_over_a_restart(tmp_path: Path) -> None:
    """Nine days off: one run, one entry, and after one more restart nothing again."""
    life, drill = Life(), daily(grace_s=DAY)
    now = [at("2026-11-20T00:00Z")]

    def table() -> Timetable:
        return Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])

    table().look()
    now[0] = at("2026-11-29T09:00Z")
    table().look()
    table().look()

    assert life.ran == [("net", at("2026-11-29T03:00Z"))]
    assert [(name, why[:14]) for name, why in life.skipped] == [("net", "missed 9 times")]


def test_a_refused_drill_waits_for_its_next_hour_and_is_given_up_in_the_end(tmp_path: Path) -> None:
    """A guard says no for three days: one try a day, then SKIPPED with the reason, once."""
    life = Life(lambda name: (Verdict.SKIPPED, "pages: engine-down on a"))
    drill = daily("0 3 29 * *", grace_s=3 * DAY)
    now = [at("2026-11-29T00:00Z")]
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    wanted = []

    while now[0] < at("2026-12-06T00:00Z"):
        wanted.append(table.look())
        now[0] += HOUR / 2

    assert life.ran == [("net", at("2026-11-29T03:00Z"))] * 3
    assert life.skipped == [
        ("net", "not once in 3 d: pages: engine-down on a (2026-11-29 03:00Z to 2026-12-01 03:00Z)")]
    assert all(later > at("2026-11-29T00:00Z") for later in wanted)


def test_each_no_leaves_a_report_and_all_of_them_are_told_in_the_end(tmp_path: Path) -> None:
    """A month went by without the drill: the window, the gap and a page, of which the report named the last one."""
    life = Life(lambda name: (Verdict.DEFERRED, "pages: engine-down on a"))
    drill = daily("0 3 29 * *", grace_s=5 * DAY, window=(180, 300))
    now = [at("2026-11-29T00:00Z")]
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=20 * HOUR, clock=lambda: now[0])
    table.look()
    for moment, last_run in (
        ("2026-11-29T06:00Z", None), ("2026-11-30T03:00Z", "2026-11-29T23:00Z"), ("2026-12-01T03:00Z", None),
        ("2026-12-02T03:00Z", None), ("2026-12-03T06:00Z", None), ("2026-12-04T03:00Z", None),
    ):  # fmt: skip
        now[0], life.last_run_at = at(moment), None if last_run is None else at(last_run)
        table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=20 * HOUR, clock=lambda: now[0])
        table.look()

    closed = "06:00 is outside the window 03:00-05:00 UTC"
    gap = "another drill ran 4.0 h ago; drill_guards.min_gap is 20 h"
    assert [why for _, why in life.deferred] == [closed, gap, closed]
    assert len(life.ran) == 2
    ((_, why),) = life.skipped
    assert why == (f"not once in 5 d: {gap} (2026-11-30 03:00Z); pages: engine-down on a (2026-12-01 03:00Z to"
                   f" 2026-12-02 03:00Z); {closed} (2026-11-29 06:00Z to 2026-12-03 06:00Z)")  # fmt: skip


def test_of_very_many_noes_the_first_and_the_latest_are_kept() -> None:
    """Each minute another text, for 20 days: schedule.json must not grow with it."""
    seen = Seen("", 0, 0, Owed(1.0, 1.0))
    for n in range(100):
        seen = schedule.tried(seen, 100.0 + n, Verdict.DEFERRED, f"no {n}")
    assert seen.owed is not None
    assert len(seen.owed.noes) == schedule.MOST_NOES
    assert [seen.owed.noes[n].why for n in (0, 1, -1)] == ["no 0", "no 61", "no 99"]


def test_the_gap_of_a_new_configuration(tmp_path: Path) -> None:
    """SIGHUP with a shorter drill_guards.min_gap: the drill waited for the old one all the same."""
    life, drill = Life(), daily()
    now = [at("2026-11-28T12:00Z")]
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=20 * HOUR, clock=lambda: now[0])
    table.look()
    now[0], life.last_run_at = at("2026-11-29T03:00Z"), at("2026-11-29T01:00Z")

    table.load([drill], HOUR)
    table.look()

    assert life.deferred == []
    assert len(life.ran) == 1


def test_a_crash_in_the_middle_of_a_run_starts_none_at_once(tmp_path: Path) -> None:
    """drilld was killed while its drill ran; started again by systemd, it must not break the same thing anew."""

    def dies(name: str) -> tuple[Verdict, str]:
        raise SystemExit

    life, drill = Life(dies), daily()
    now = [at("2026-11-28T12:00Z")]
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    table.look()
    now[0] = at("2026-11-29T03:00Z")
    with pytest.raises(SystemExit):
        table.look()

    again = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0] + 60)
    again.look()

    assert len(life.ran) == 1
    assert again.book["net"].owed is not None
    assert again.book["net"].owed.why == "drilld ended while it ran"


def test_what_cannot_be_remembered_is_not_run(tmp_path: Path) -> None:
    """On a full disk a drill would have run again and again."""
    life, drill = Life(), daily()
    now = [at("2026-11-28T12:00Z")]
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    table.look()
    now[0] = at("2026-11-29T03:00Z")
    (tmp_path / ".schedule.json").mkdir()

    with pytest.raises(OSError, match="Is a directory"):
        table.look()

    assert life.ran == []


def test_what_came_while_it_was_off_is_not_made_up_for(tmp_path: Path) -> None:
    """A drill was off for nine days, over a restart; put on again on the 29th, it ran at once, in the afternoon."""
    life, drill = Life(), daily()
    now = [at("2026-11-20T00:00Z")]

    def look_again(enabled: bool, when: str) -> None:
        now[0] = at(when)
        Timetable([replace(drill, enabled=enabled)], life.hands, root=tmp_path, node="n", min_gap_s=0,
                  clock=lambda: now[0]).look()

    look_again(True, "2026-11-20T00:00Z")
    look_again(False, "2026-11-20T12:00Z")
    look_again(False, "2026-11-29T08:00Z")
    look_again(True, "2026-11-29T14:00Z")
    assert life.ran == []

    look_again(True, "2026-11-30T03:10Z")

    assert life.ran == [("net", at("2026-11-30T03:00Z"))]
    assert life.skipped == []


def test_it_may_be_put_off_while_it_runs(tmp_path: Path) -> None:
    """A SIGHUP came with `enabled: false` during its run; put on again three days later, it ran at once."""
    def run(_: str) -> tuple[Verdict, str]:
        table.load([])
        return Verdict.PASS, ""

    life, now = Life(run), [at("2026-11-28T12:00Z")]
    table = Timetable([daily()], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    table.look()
    now[0] = at("2026-11-29T03:10Z")
    table.look()
    now[0] = at("2026-12-02T14:00Z")
    table.load([daily()])

    table.look()

    assert life.ran == [("net", at("2026-11-29T03:00Z"))]
    assert life.skipped == []


def test_what_was_owed_stays_owed_while_it_is_off(tmp_path: Path) -> None:
    """Deferred on the 29th, off over noon, on again: it is still tried on the 30th."""
    noes = [(Verdict.DEFERRED, "a page fires")]
    life = Life(lambda name: noes.pop() if noes else (Verdict.PASS, ""))
    now = [at("2026-11-28T12:00Z")]
    table = Timetable([daily()], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    table.look()
    now[0] = at("2026-11-29T03:10Z")
    table.look()
    table.load([])
    table.look()
    table.load([daily(), Drill("other", "disk-full")])
    table.look()
    now[0] = at("2026-11-30T03:10Z")

    table.look()

    assert life.ran == [("net", at("2026-11-29T03:00Z")), ("net", at("2026-11-30T03:00Z"))]


def test_a_damaged_memory_fires_nothing(tmp_path: Path) -> None:
    """Half a file after a crash: all drills are as new."""
    (tmp_path / "schedule.json").write_text('{"net": {"form":')

    assert schedule.read_book(tmp_path) == {}


def test_apscheduler_runs_it_even_when_it_is_late(tmp_path: Path) -> None:
    """With the real scheduler: what is owed runs when the timetable starts, and a job that exits does not stop it."""
    left = [SystemExit(3)]

    def once(name: str) -> tuple[Verdict, str]:
        if left:
            raise left.pop()
        return Verdict.PASS, ""

    life, drill = Life(once), daily("* * * * *")
    now = time.time()
    seen = Seen("* * * * * UTC", now - 300, now - 150, None)
    schedule.write_book(tmp_path, {"net": seen})
    table = Timetable([drill], life.hands, root=tmp_path, node="n", min_gap_s=0)
    table.start()
    try:
        assert life.changed.wait(30)
    finally:
        table.stop()

    assert len(life.ran) == 1
    assert life.skipped[0][1].startswith("missed ")


def test_other_drills_take_the_place_of_those_before(tmp_path: Path) -> None:
    """SIGHUP: a drill that is gone, off, or without a schedule is never due again."""
    life = Life()
    now = [at("2026-11-28T12:00Z")]
    table = Timetable([daily()], life.hands, root=tmp_path, node="n", min_gap_s=0, clock=lambda: now[0])
    table.look()
    other = replace(daily(), name="disk")

    table.load([other, replace(daily(), enabled=False), Drill("hand", "disk-full")])
    table.look()
    now[0] = at("2026-11-29T03:00Z")
    table.look()

    assert life.ran == [("disk", at("2026-11-29T03:00Z"))]
