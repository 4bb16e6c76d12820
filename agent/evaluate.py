"""The alert state machine. Pure: it is handed the time, and counts watched seconds only.

    absent --breach--> pending --breach for `for`--> firing --back in range for `keep`--> resolved
                          |                             |
                          +-- back in range: inactive   +-- in breach again: nothing happened

A Gap moves nothing. IDLE ends what is pending and holds what fires for 30 m. N/A, a lost subject or rule closes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from agent.model import COMPARE, Alert, AlertKey, Book, Rule, Severity, Signal, Transition

IDLE_HOLD_S = 1800.0
LATE_INTERVALS = 3
RESOLVED_KEPT_S = 4 * 86400.0  # longer than any window: an older resolve holds nothing back
Verdict = Literal["breach", "clear", "undecided", "gap", "idle", "na"]


def judge(rule: Rule, signal: Signal, limit: float | None) -> Verdict:
    """What a rule says of a signal. Where an estimate's bounds disagree about the limit, it is undecided."""
    if signal.state == "gap":
        return "gap"
    if signal.state == "na" or limit is None:
        return "na"
    if signal.state == "idle" or signal.value is None:
        return "idle"
    if not math.isfinite(signal.value):  # compared, NaN would be "back in range"
        return "gap"
    compare = COMPARE[rule.op]
    if signal.low is not None:
        low, high = compare(signal.low, limit), signal.high is None or compare(signal.high, limit)
        if low != high:
            return "undecided"
    return "breach" if compare(signal.value, limit) else "clear"


def evaluate(book: Book, rules: Sequence[Rule], signals: Mapping[AlertKey, Signal], now: float, dt_s: float, *,
             poll_s: float, limit_of: Callable[[Rule, str], float | None],
             severity_of: Callable[[Rule, str], Severity]) -> tuple[Book, list[Transition]]:
    """One step of every alert.

    `dt_s`: watched seconds since the last step. `limit_of`, `severity_of`: what holds for a (rule, subject).
    """
    by_id = {rule.id: rule for rule in rules}
    alerts: dict[AlertKey, Alert] = {}
    # a resolve that lies ahead (the clock has stepped back) must not blind the rule until then
    resolved_at = {key: min(at, now) for key, at in book.resolved_at.items() if now - at < RESOLVED_KEPT_S}
    transitions: list[Transition] = []

    def settle(key: AlertKey, after: Alert | None, made: list[Transition]) -> None:
        if after is not None:
            alerts[key] = after
        transitions.extend(made)
        if any(t.kind == "resolved" for t in made):
            resolved_at[key] = now

    for key, alert in book.alerts.items():
        if key not in signals:
            why = "subject removed" if alert.rule in by_id else "rule removed"
            settle(key, None, [closed(alert, now, why)])
    for key, signal in signals.items():
        rule, known = by_id[key[0]], book.alerts.get(key)
        if known is None and signal.state != "value":
            continue
        limit = limit_of(rule, signal.subject)
        verdict = judge(rule, signal, limit)
        if known is None:
            if verdict not in ("breach", "undecided") or signal.quiet:
                continue
            known = Alert(rule.id, signal.subject, "pending", severity_of(rule, signal.subject), now)
            transitions.append(Transition("pending", now, seen(known, signal, limit)))
        after, made = step(rule, known, signal, verdict, now, watched(known, signal, dt_s, poll_s), poll_s=poll_s,
                           limit=limit)
        settle(key, after, made)
    return Book(alerts, resolved_at), transitions


def watched(alert: Alert, signal: Signal, dt_s: float, poll_s: float) -> float:
    """Seconds that a signal adds to the timers: none where it is not new; all since the last one where it was late."""
    if signal.at == alert.seen_at:
        return 0.0
    since_s = signal.at - alert.seen_at
    return since_s if 0 < dt_s < since_s <= LATE_INTERVALS * poll_s else dt_s


def step(rule: Rule, alert: Alert, signal: Signal, verdict: Verdict, now: float, dt_s: float, *, poll_s: float,
         limit: float | None) -> tuple[Alert | None, list[Transition]]:
    """One step of one alert that is pending or firing."""
    if verdict == "gap":
        return replace(alert, blind_s=alert.blind_s + dt_s, seen_at=signal.at), []
    if verdict == "na":
        return None, [closed(alert, now, signal.why or "not applicable")]
    if verdict == "idle" or (verdict == "breach" and signal.quiet and alert.state == "pending"):
        if alert.state == "pending":
            return None, [Transition("inactive", now, alert, signal.why or "")]
        alert = replace(alert, idle_s=alert.idle_s + dt_s, seen_at=signal.at)
        return (None, [closed(alert, now, "no traffic")]) if alert.idle_s >= IDLE_HOLD_S else (alert, [])
    alert = replace(seen(alert, signal, limit), idle_s=0.0, blind_s=0.0)
    if alert.state == "pending":
        return step_pending(rule, alert, verdict, now, dt_s, poll_s)
    return step_firing(rule, alert, verdict, now, dt_s)


def step_pending(rule: Rule, alert: Alert, verdict: Verdict, now: float, dt_s: float, poll_s: float,
                 ) -> tuple[Alert | None, list[Transition]]:
    """Breach long enough fires; back in range ends it; undecided waits without counting."""
    if verdict == "clear":
        return None, [Transition("inactive", now, alert)]
    if verdict == "undecided":
        return alert, []
    breach_s = 0.0 if alert.breach_s is None else alert.breach_s + dt_s
    alert = replace(alert, breach_s=breach_s)
    if breach_s < rule.for_s - poll_s / 2:
        return alert, []
    alert = replace(alert, state="firing", fired_at=now)
    return alert, [Transition("firing", now, alert)]


def step_firing(rule: Rule, alert: Alert, verdict: Verdict, now: float, dt_s: float,
                ) -> tuple[Alert | None, list[Transition]]:
    """Back in range for `keep` resolves; in breach again, or undecided, it was never away."""
    if verdict != "clear":
        return replace(alert, clear_s=None), []
    clear_s = 0.0 if alert.clear_s is None else alert.clear_s + dt_s
    if clear_s >= rule.keep_s:
        return None, [Transition("resolved", now, alert)]
    return replace(alert, clear_s=clear_s), []


def seen(alert: Alert, signal: Signal, limit: float | None) -> Alert:
    """The alert with what was measured last."""
    return replace(alert, value=signal.value, limit=limit, seen_at=signal.at)


def closed(alert: Alert, now: float, why: str) -> Transition:
    """The end of an alert that did not come back in range."""
    return Transition("resolved" if alert.state == "firing" else "inactive", now, alert, why)
