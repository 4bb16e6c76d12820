"""The alert state machine: `for`, `keep`, gaps, idleness, ends. Time is a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.evaluate import evaluate, judge
from agent.model import Alert, AlertKey, Book, Rule, Severity, Signal, Transition, Why

POLL_S = 15.0
HOT = Rule("gpu-temperature", "gpu_temperature", ">", 85.0, "ticket", for_s=30.0, keep_s=60.0)
KEY = (HOT.id, "GPU-a")
GAP, IDLE, NA = "gap", "idle", "na"


def signal(value: float | str, at: float, **more: object) -> Signal:
    """A number, or the name of a state."""
    if isinstance(value, str):
        why = {GAP: "NVML: GPU is lost", IDLE: "no requests", NA: "asleep"}[value]
        return Signal("gpu_temperature", "GPU-a", value, at, why=why,  # type: ignore[arg-type]
                      code=Why.LOST if value == GAP else None)
    return Signal("gpu_temperature", "GPU-a", "value", at, value, **more)  # type: ignore[arg-type]


def limit_of(rule: Rule, _subject: str) -> float:
    """The limit without any SLO."""
    return rule.factor


def severity_of(rule: Rule, _subject: str) -> Severity:
    """The rule's own."""
    return rule.severity


def tick(book: Book, got: Signal | None, now: float, dt_s: float, rule: Rule = HOT, *, poll_s: float = POLL_S,
         rules: Sequence[Rule] | None = None) -> tuple[Book, list[Transition]]:
    """One step of one rule about one subject; None: the subject is gone."""
    signals: dict[AlertKey, Signal] = {} if got is None else {(rule.id, "GPU-a"): got}
    return evaluate(book, [rule] if rules is None else rules, signals, now, dt_s, poll_s=poll_s, limit_of=limit_of,
                    severity_of=severity_of)


def play(rule: Rule, values: Sequence[float | str | Signal | None], every_s: float = POLL_S) -> list[str]:
    """What happened at which second: "firing 30"."""
    book, told = Book(), []
    for i, value in enumerate(values):
        now = i * every_s
        got = value if value is None or isinstance(value, Signal) else signal(value, now)
        book, transitions = tick(book, got, now, every_s if i else 0.0, rule, poll_s=every_s)
        told += [f"{t.kind} {now:g}" + (f": {t.why}" if t.why else "") for t in transitions]
    return told


@pytest.mark.parametrize(("story", "values", "want"), [
    ("85 is not over 85", [85] * 9, []),
    ("a spike shorter than `for` wakes nobody", [80, 90, 90, 80], ["pending 15", "inactive 45"]),
    ("`for` counts from 0 at the first sample in breach", [90, 90, 90], ["pending 0", "firing 30"]),
    ("`keep` counts from 0 at the first sample back in range",
     [90, 90, 90, 80, 80, 80, 80, 80], ["pending 0", "firing 30", "resolved 105"]),
    ("in breach again while it is kept: it was never away",
     [90, 90, 90, 80, 80, 80, 90, 80, 80, 80, 80, 80], ["pending 0", "firing 30", "resolved 165"]),
    ("a lost GPU neither fires nor resolves, and holds the timer",
     [90, 90, GAP, GAP, GAP, 90], ["pending 0", "firing 75"]),
    ("a lost GPU does not resolve what fires", [90, 90, 90, GAP, GAP, GAP, GAP, GAP, GAP], ["pending 0", "firing 30"]),
    ("a gap holds `keep` too: 15 s before, 45 s after it",
     [90, 90, 90, 80, 80, GAP, GAP, GAP, 80, 80, 80], ["pending 0", "firing 30", "resolved 150"]),
    ("idle ends what is pending", [90, IDLE, 90], ["pending 0", "inactive 15: no requests", "pending 30"]),
    ("asleep closes", [90, 90, 90, NA], ["pending 0", "firing 30", "resolved 45: asleep"]),
    ("a subject that is gone closes", [90, 90, 90, None], ["pending 0", "firing 30", "resolved 45: subject removed"]),
    ("a subject that is gone ends what is pending", [90, None], ["pending 0", "inactive 15: subject removed"]),
    ("it fires again after it resolved", [90, 90, 90, 80, 80, 80, 80, 80, 90, 90, 90],
     ["pending 0", "firing 30", "resolved 105", "pending 120", "firing 150"]),
])
def test_hot_gpu(story: str, values: list[float | str | None], want: list[str]) -> None:
    """> 85 for 30 s, kept for 60 s, read every 15 s."""
    assert play(HOT, values) == want, story


def test_c074_it_keeps_firing_and_fires_again() -> None:
    """True from 0 to 300, false from 360, true at 1200, keep 600: resolved at 960, firing anew at 1200."""
    rule = replace(HOT, for_s=0.0, keep_s=600.0)
    told = play(rule, [90.0] * 6 + [80.0] * 14 + [90.0], every_s=60.0)
    assert told == ["pending 0", "firing 0", "resolved 960", "pending 1200", "firing 1200"]


def test_c039_no_data_neither_fires_nor_resolves() -> None:
    """An idle window between two bad ones: the alert that fires stays, one that does not fire does not begin."""
    assert play(HOT, [GAP] * 20) == []
    nan = Signal("gpu_temperature", "GPU-a", "value", 45.0, float("nan"))
    assert judge(HOT, nan, 85.0) == "gap"
    assert play(HOT, [90, 90, 90, nan, GAP]) == ["pending 0", "firing 30"]


def test_it_fires_half_a_poll_before_for_is_over() -> None:
    """A tick that comes a moment early must not cost a whole poll: 59.9 s of 60 s fire, 52.4 s do not."""
    rule = replace(HOT, for_s=60.0)
    for first_s, fires in ((14.9, True), (7.5, True), (7.4, False)):
        book, told = Book(), []
        for now, dt_s in ((0.0, 0.0), (first_s, first_s), *((first_s + 15 * i, 15.0) for i in (1, 2, 3))):
            book, transitions = tick(book, signal(90, now), now, dt_s, rule)
            told += [t.kind for t in transitions]
        assert told == (["pending", "firing"] if fires else ["pending"]), first_s


def test_a_restart_and_a_suspended_host_add_no_seconds() -> None:
    """Watched seconds only: the tick after an hour of sleep has dt 0."""
    book = Book()
    for now, dt_s, want in ((0.0, 0.0, 1), (15.0, 15.0, 0), (3615.0, 0.0, 0), (3630.0, 15.0, 1)):
        book, transitions = tick(book, signal(90, now), now, dt_s)
        assert len(transitions) == want, now


def test_one_sample_seen_twice_counts_once() -> None:
    """The source is late: the tick sees the old sample again, and no time is added; its next one brings all of it."""
    book, fired = Book(), []
    for now, at in ((0.0, 0.0), (15.0, 0.0), (30.0, 0.0), (45.0, 45.0)):
        book, transitions = tick(book, signal(90, at), now, 15.0 if now else 0.0)
        fired += [(t.kind, now) for t in transitions]
    assert fired == [("pending", 0), ("firing", 45)]


def test_what_was_unknown_is_not_made_up_for() -> None:
    """Late, then a gap in between: the seconds of the gap do not count although the samples are 30 s apart."""
    book = Book()
    for now, value in ((0.0, 90.0), (15.0, GAP), (30.0, 90.0)):
        book, _ = tick(book, signal(value, now), now, 15.0 if now else 0.0)
    assert book.alerts[KEY].breach_s == 15


def test_blind_seconds_grow_only_in_a_gap() -> None:
    """And are 0 again with the next number."""
    book = Book()
    for now, value, want in ((0.0, 90.0, 0.0), (15.0, GAP, 15.0), (30.0, GAP, 30.0), (45.0, 90.0, 0.0)):
        book, _ = tick(book, signal(value, now), now, 15.0 if now else 0.0)
        assert book.alerts[KEY].blind_s == want


QUEUE = Rule("queue-age", "queue_age", ">=", 0.25, "page", for_s=10.0, keep_s=30.0)


def test_an_estimate_whose_bounds_disagree_is_pending_and_counts_nothing() -> None:
    """Between 0 and 5 s old: undecided for a minute, then surely over 5 s: `for` starts there."""
    assert judge(QUEUE, signal(0.1, 0, low=0.0, high=5.0), 0.25) == "undecided"
    assert judge(QUEUE, signal(3.0, 0, low=0.0, high=None), 0.25) == "undecided"
    assert judge(QUEUE, signal(5.1, 0, low=5.0, high=None), 0.25) == "breach"
    assert judge(QUEUE, signal(0.1, 0, low=0.05, high=0.2), 0.25) == "clear"
    unsure, sure = [signal(0.3, i * 5.0, low=0.0, high=5.0) for i in range(12)], \
        [signal(9.0, i * 5.0, low=8.0, high=10.0) for i in range(12, 16)]
    assert play(QUEUE, [*unsure, *sure], every_s=5.0) == ["pending 0", "firing 70"]


def test_undecided_then_in_range_was_nothing() -> None:
    """It is shown as pending and ends as inactive."""
    assert play(QUEUE, [signal(0.3, 0, low=0.0, high=5.0), 0.0], every_s=5.0) == ["pending 0", "inactive 5"]


def test_undecided_is_not_back_in_range() -> None:
    """What fires stays while nobody can say that it is over."""
    story = [signal(9.0, i * 5.0, low=8.0, high=10.0) for i in range(3)] + \
        [signal(0.3, i * 5.0, low=0.0, high=5.0) for i in range(3, 30)]
    assert play(QUEUE, story, every_s=5.0) == ["pending 0", "firing 10"]


def test_no_traffic_holds_an_alert_for_half_an_hour() -> None:
    """Firing at 30; idle from 45 on: closed when 30 min are full, with its value kept."""
    told = play(HOT, [90.0, 90, 90] + [IDLE] * 125)
    assert told == ["pending 0", "firing 30", "resolved 1830: no traffic"]


def test_idleness_between_bad_windows_does_not_add_up() -> None:
    """29 min idle, one bad window, 29 min idle: still firing."""
    assert play(HOT, [90.0, 90, 90] + [IDLE] * 116 + [90] + [IDLE] * 116) == ["pending 0", "firing 30"]


def test_a_breach_by_design_starts_nothing_and_ends_what_is_pending() -> None:
    """vLLM holds 96 % of the memory from the start: shown as a breach, wakes nobody."""
    quiet = [signal(96.0, i * 15.0, quiet="it was so at the start") for i in range(9)]
    assert judge(HOT, quiet[0], 85.0) == "breach"
    assert play(HOT, quiet) == []
    assert play(HOT, [96.0, *quiet[1:]]) == ["pending 0", "inactive 15"]
    assert play(HOT, [96.0, 96, 96, *quiet[3:]]) == ["pending 0", "firing 30"]


def test_a_rule_that_is_gone_closes_its_alerts_and_says_so() -> None:
    """After SIGHUP the rule is disabled."""
    book = Book({KEY: Alert(HOT.id, "GPU-a", "firing", "ticket", 0.0, fired_at=30.0, value=90.0)})
    after, (end,) = tick(book, None, 60.0, 15.0, rules=[])
    assert (end.kind, end.why, end.alert.value) == ("resolved", "rule removed", 90.0)
    assert after.alerts == {}
    assert after.resolved_at == {KEY: 60.0}


def test_an_alert_keeps_the_severity_with_which_it_began() -> None:
    """Labels must not change while it fires, whatever the configuration says now."""
    book, _ = tick(Book(), signal(90, 0), 0.0, 0.0)
    book, _ = tick(book, signal(90, 30), 30.0, 30.0, replace(HOT, severity="page"))
    assert (book.alerts[KEY].state, book.alerts[KEY].severity) == ("firing", "ticket")


def test_a_limit_that_nobody_promised_is_not_judged() -> None:
    """No slo.e2e_p99: not applicable, and an alert from before closes."""
    assert judge(HOT, signal(90, 0), None) == "na"


def test_a_resolve_that_lies_ahead_of_the_clock_does_not_blind_the_rule() -> None:
    """The clock stepped back by an hour: from now on observations count again. Old resolves are let go."""
    book = Book(resolved_at={KEY: 9000.0, ("old", "x"): -400_000.0})
    after, _ = tick(book, signal(80, 5400), 5400.0, 15.0)
    assert after.resolved_at == {KEY: 5400.0}


STATES = st.one_of(st.floats(80, 95), st.sampled_from([GAP, IDLE, NA, None]))


@given(st.lists(STATES, max_size=60))
def test_every_end_has_a_beginning(values: list[float | str | None]) -> None:
    """Whatever comes: pending, then inactive, or firing and resolved; nothing twice, nothing out of the blue."""
    may_follow = {"start": ["pending"], "pending": ["firing", "inactive"], "firing": ["resolved"],
                  "inactive": ["pending"], "resolved": ["pending"]}
    last = "start"
    for told in play(HOT, values):
        kind = told.split()[0]
        assert kind in may_follow[last]
        last = kind


def test_transitions_tell_value_and_time() -> None:
    """What the receiver needs: when the breach began, when it fired, with which number."""
    book: Book = Book()
    found: list[Transition] = []
    for i, value in enumerate((90.0, 91.0, 92.0)):
        book, transitions = tick(book, signal(value, i * 15.0), i * 15.0, 15.0 if i else 0.0)
        found += transitions
    pending, firing = found
    assert (pending.alert.value, pending.alert.state) == (90.0, "pending")
    alert = firing.alert
    assert (alert.value, alert.since, alert.fired_at, alert.limit) == (92.0, 0.0, 30.0, 85.0)
