"""What a run proves. Pure: evidence in, verdict out.

Three kinds of judgement, never mixed: guards stopped the run (ABORTED), evidence makes it valid (INVALID,
INCONCLUSIVE), must-holds make the verdict (PASS, FAIL).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drills.model import Drill, Request, Row, Verdict

ALLOWED = 0.01  # the share of requests that a p99 leaves over the limit
CONFIDENCE = 0.95
STORM = 1.5  # upstream attempts ÷ requests
STORM_AFTER = 1.2  # times the baseline, still 2 m after the fault
STORM_AFTER_S = 120.0
BACK_WITHIN_S = 120.0  # p99 back inside the SLO after a fault that is not judged while it lasts
FIRE_WITHIN_S = 60.0  # beside the rule's own `for`
DELIVER_WITHIN_S = 15.0  # beside the group_wait
LATE_S = 1.0  # a prober that is later than this did not keep its rate
KEPT = 0.98
STEP_S = 5.0
GOODPUT_STEP_S = 5.0
# The rows that make a run valid; all others are must-holds.
EVIDENCE = frozenset({"fault_proven", "load_kept", "telemetry_fresh"})


@dataclass(frozen=True, slots=True)
class Alarm:
    """What became of one announced alert. Times are unix seconds; None: it did not happen."""

    rule: str
    for_s: float
    enabled: bool = True
    pending_at: float | None = None
    firing_at: float | None = None
    delivered_at: float | None = None
    resolved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """How deliveries can be proven. `failures`: growth of Alertmanager's failed notifications over the run."""

    has_echo: bool = False
    group_wait_s: float = 1.0
    failures: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """The way back of a target that was killed. None: not reached."""

    within_s: float
    down_at: float | None = None
    port_at: float | None = None
    ready_at: float | None = None
    completion_at: float | None = None
    orphans: Sequence[str] = ()  # processes of the killed engine that lived on
    gpu_free: bool | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters each second: (time, requests at the router, upstream attempts). Empty: nobody tells."""

    rows: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a run brought. Phases are [from, to] in unix seconds."""

    drill: Drill
    baseline: tuple[float, float]
    fault: tuple[float, float]
    recovery: tuple[float, float]
    slo_ttft_p99_s: float
    slo_itl_p99_s: float
    proven: bool
    proof: str
    requests: Sequence[Request] = ()
    sent_ratio: float = 1.0  # of the asked rate, as the prober kept it
    late_p99_s: float = 0.0
    alarms: Sequence[Alarm] = ()
    delivery: Delivery = field(default_factory=Delivery)
    restart: Restart | None = None
    counts: Counts = field(default_factory=Counts)
    unexpected: Sequence[str] = ()  # pages that nothing announced
    ended_early: str | None = None  # a must-hold's own page ended it: FAIL
    aborted: str | None = None  # a guard, a person or a crash ended it
    left: Sequence[str] = ()  # of ours, still in the world
    stale: Sequence[str] = ()  # telemetry that was not fresh
    judge_latency_during: bool = True  # False for packet loss: TCP hides it from some and not from others


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, why, and every row behind it."""

    verdict: Verdict
    why: str
    rows: Sequence[Row]
    times: Mapping[str, float | None]  # detect_s, deliver_s, mitigate_s, recover_s
    impact: Mapping[str, Any]


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X <= k) of n tries with probability p."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 1.0 if k >= n else 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    terms = (math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q
             for i in range(min(k, n) + 1))
    return min(1.0, math.fsum(math.exp(t) for t in terms))


def clopper_pearson(k: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """One-sided lower and upper bounds of a share of k in n (Clopper and Pearson 1934), each at `confidence`."""
    if n <= 0:
        return 0.0, 1.0
    alpha = 1 - confidence
    upper = 1.0 if k >= n else _root(lambda p: binomial_tail(k, n, p) - alpha)
    lower = 0.0 if k <= 0 else _root(lambda p: alpha - (1 - binomial_tail(k - 1, n, p)))
    return lower, upper


def _root(falling: Any) -> float:
    """Where a function that falls from positive to negative over [0, 1] is 0."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def k_of_n(k: int, n: int, allowed: float = ALLOWED) -> Verdict:
    """PASS where at most `allowed` is sure, FAIL where more is, else INCONCLUSIVE."""
    lower, upper = clopper_pearson(k, n)
    if upper <= allowed + 1e-12:
        return Verdict.PASS
    return Verdict.FAIL if lower > allowed else Verdict.INCONCLUSIVE


def overlapping(requests: Iterable[Request], span: tuple[float, float]) -> list[Request]:
    """A request belongs to every phase that it overlaps."""
    return [r for r in requests if r.sent_at < span[1] and r.ended_at > span[0]]


def quantile(values: Sequence[float], q: float = 0.99) -> float | None:
    """The q-quantile by nearest rank; None of nothing."""
    return sorted(values)[min(len(values) - 1, math.ceil(q * len(values)) - 1)] if values else None


def judge(evidence: Evidence) -> Judgement:
    """The verdict of a run: the worst of what applies, ORPHANED above all."""
    rows = [*validity(evidence), *must_holds(evidence), *alarm_rows(evidence)]
    verdict, why = overall(evidence, rows)
    return Judgement(verdict, why, rows, times_of(evidence), impact_of(evidence))


def overall(evidence: Evidence, rows: Sequence[Row]) -> tuple[Verdict, str]:
    """Which judgement outranks which."""
    if evidence.left:
        return Verdict.ORPHANED, f"left in the world: {'; '.join(evidence.left)}"
    if evidence.aborted:
        return Verdict.ABORTED, evidence.aborted
    if not evidence.proven:
        return Verdict.INVALID, f"the fault is not proven: {evidence.proof}"
    if evidence.ended_early:
        return Verdict.FAIL, f"ended early: {evidence.ended_early}"
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        bad = [row for row in rows if row.verdict is verdict]
        if bad:
            return verdict, "; ".join(f"{row.name}: {row.got} (asked: {row.asked})" for row in bad)
    held = sum(row.verdict is Verdict.PASS for row in rows)
    return Verdict.PASS, f"{held} of {len(rows)} held" + ("" if held == len(rows) else ", the rest cannot be told here")


# --- evidence --------------------------------------------------------------------------------------------------------


def validity(evidence: Evidence) -> list[Row]:
    """What must be true for the rest to mean anything."""
    proven = Verdict.PASS if evidence.proven else Verdict.INVALID
    rows = [Row("fault_proven", proven, "proven by counters or the kernel", evidence.proof)]
    if evidence.drill.load is not None:
        kept = evidence.sent_ratio >= KEPT and evidence.late_p99_s <= LATE_S
        rows.append(Row("load_kept", Verdict.PASS if kept else Verdict.INCONCLUSIVE,
                        f"{evidence.drill.load.rate_per_s:g} requests/s, at most {LATE_S:g} s late",
                        f"{evidence.sent_ratio:.0%} of them, p99 {evidence.late_p99_s:.3f} s late"))
    if evidence.stale:
        rows.append(Row("telemetry_fresh", Verdict.INCONCLUSIVE, "fresh throughout", "; ".join(evidence.stale)))
    return rows


# --- must-holds ------------------------------------------------------------------------------------------------------


def must_holds(evidence: Evidence) -> list[Row]:
    """Traffic, latency, errors, restart, retries, degradation."""
    holds = evidence.drill.holds
    rows = []
    if evidence.drill.load is not None:
        rows += [row for row in (goodput_row(evidence), latency_row(evidence, "ttft"), latency_row(evidence, "itl"),
                                 error_row(evidence)) if row is not None]
    if evidence.restart is not None:
        rows += restart_rows(evidence, evidence.restart)
    if holds.retry_storm:
        rows.append(storm_row(evidence))
    if holds.degraded is not None:
        rows.append(degraded_row(evidence, holds.degraded))
    return rows


def goodput_row(evidence: Evidence) -> Row | None:
    """Answers a second at the user's address: back at the asked share of the rate in time, and staying there."""
    holds, load = evidence.drill.holds, evidence.drill.load
    if holds.goodput is None or load is None:
        return None
    start, end = evidence.fault[0] + holds.goodput_within_s, evidence.fault[1]
    asked = f"{holds.goodput:.0%} of {load.rate_per_s:g}/s within {holds.goodput_within_s:g} s"
    before, after = (goodput(evidence.requests, s, load.rate_per_s) for s in (evidence.baseline, evidence.recovery))
    if end - start < GOODPUT_STEP_S:
        return Row("goodput", Verdict.INCONCLUSIVE, asked, "the fault was shorter than that", share(before), "unknown",
                   share(after))
    during = goodput(evidence.requests, (start, end), load.rate_per_s)
    verdict = Verdict.PASS if during is not None and during >= holds.goodput else Verdict.FAIL
    back_at = shifted_at(evidence)
    detail = {"shifted_after_s": None if back_at is None else back_at - evidence.fault[0]}
    return Row("goodput", verdict, asked, share(during), share(before), share(during), share(after), detail)


def goodput(requests: Iterable[Request], span: tuple[float, float], rate_per_s: float) -> float | None:
    """Good answers to requests that were due in a span ÷ those asked for in it."""
    asked = rate_per_s * (span[1] - span[0])
    good = sum(r.outcome == "ok" and span[0] <= r.due_at < span[1] for r in requests)
    return min(1.0, good / asked) if asked > 0 else None


def shifted_at(evidence: Evidence) -> float | None:
    """When goodput was back for good: the start of the first step from which every step has its share."""
    holds, load = evidence.drill.holds, evidence.drill.load
    if holds.goodput is None or load is None:
        return None
    start, end = evidence.fault
    back: float | None = None
    for i in range(int((end - start) // GOODPUT_STEP_S)):
        step = (start + i * GOODPUT_STEP_S, start + (i + 1) * GOODPUT_STEP_S)
        ok = (goodput(evidence.requests, step, load.rate_per_s) or 0.0) >= holds.goodput - 1 / max(
            1.0, load.rate_per_s * GOODPUT_STEP_S)
        back = (step[0] if back is None else back) if ok else None
    return back


def latency_row(evidence: Evidence, what: str) -> Row | None:
    """p99 of TTFT or ITL by k of n: how many were over the limit, from injection to recovery."""
    asked = getattr(evidence.drill.holds, f"{what}_p99")
    if asked is None:
        return None
    limit_s = getattr(evidence, f"slo_{what}_p99_s") if asked == "slo" else float(asked)
    during = evidence.fault if evidence.judge_latency_during else (evidence.fault[1] + BACK_WITHIN_S,
                                                                   evidence.recovery[1])
    judged = (during[0], evidence.recovery[1])
    values = samples(evidence.requests, judged, what)
    over = sum(v > limit_s for v in values)
    if judged[1] <= judged[0] or not values:
        verdict, got = Verdict.INCONCLUSIVE, "nothing was measured"
    else:
        verdict = k_of_n(over, len(values))
        got = f"{over} of {len(values)} over {limit_s * 1000:.0f} ms"
    before, lasting, after = (p99_text(samples(evidence.requests, span, what))
                              for span in (evidence.baseline, evidence.fault, evidence.recovery))
    when = "" if evidence.judge_latency_during else f" from {BACK_WITHIN_S:.0f} s after the fault"
    return Row(f"{what}_p99", verdict, f"p99 <= {limit_s * 1000:.0f} ms{when}", got, before, lasting, after,
               {"k": over, "n": len(values)})


def samples(requests: Iterable[Request], span: tuple[float, float], what: str) -> list[float]:
    """TTFTs, or gaps between chunks, of the requests of a phase."""
    found: list[float] = []
    for request in overlapping(requests, span):
        if what == "ttft" and (request.first_at is not None or request.outcome == "timeout"):
            # who gave up before the first token waited at least so long: without them overload would look fast
            found.append((request.first_at or request.ended_at) - request.sent_at)
        elif what == "itl":
            found += request.itl_s
    return found


def error_row(evidence: Evidence) -> Row | None:
    """Failed requests by k of n, from injection to recovery; streams that broke on the victim are told apart."""
    allowed = evidence.drill.holds.error_ratio
    if allowed is None:
        return None
    judged = overlapping(evidence.requests, (evidence.fault[0], evidence.recovery[1]))
    failed = [r for r in judged if r.outcome != "ok"]
    broken = [r for r in failed if r.outcome == "broken" and evidence.restart is not None
              and r.sent_at < evidence.fault[0] + 1.0]
    counted, n = len(failed) - len(broken), len(judged) - len(broken)
    classes: dict[str, int] = {}
    for request in failed:
        classes[request.outcome] = classes.get(request.outcome, 0) + 1
    verdict = k_of_n(counted, n, allowed) if n else Verdict.INCONCLUSIVE
    got = f"{counted} of {n} failed" + (f", beside {len(broken)} streams cut on the victim" if broken else "")
    before, lasting, after = (errors_text(overlapping(evidence.requests, span))
                              for span in (evidence.baseline, evidence.fault, evidence.recovery))
    return Row("error_ratio", verdict, f"<= {allowed:.3g} of requests", got, before, lasting, after,
               {"k": counted, "n": n, "classes": classes})


def restart_rows(evidence: Evidence, restart: Restart) -> list[Row]:
    """The killed target came back by itself, answered, and left nothing behind."""
    start = restart.down_at if restart.down_at is not None else evidence.fault[0]
    took = {name: None if at is None else at - start for name, at in (
        ("port_s", restart.port_at), ("ready_s", restart.ready_at), ("completion_s", restart.completion_at))}
    done = took["completion_s"]
    verdict = Verdict.PASS if done is not None and done <= restart.within_s else Verdict.FAIL
    got = "never answered" if done is None else f"first completion after {done:.1f} s"
    orphans = Row("no_orphans", Verdict.FAIL if restart.orphans else Verdict.PASS, "no process of it lives on",
                  "; ".join(restart.orphans) or "none")
    return [Row("restart", verdict, f"a completion within {restart.within_s:.0f} s", got, detail=took), orphans]


def storm_row(evidence: Evidence) -> Row:
    """Upstream attempts ÷ requests per 5 s: no storm while the fault lasts, and none that outlives it."""
    asked = f"<= {STORM:g}, and <= {STORM_AFTER:g} × baseline {STORM_AFTER_S:.0f} s after the fault"
    before = amplification(evidence.counts, evidence.baseline)
    during = amplification(evidence.counts, (evidence.fault[0], evidence.recovery[1]))
    late = amplification(evidence.counts, (evidence.fault[1] + STORM_AFTER_S, evidence.recovery[1]))
    if not during:
        return Row("no_retry_storm", Verdict.SKIPPED, asked, "unknown: no router tells its attempts")
    usual = max(1.0, sum(before) / len(before)) if before else 1.0
    storm = max(during) > STORM or (bool(late) and late[-1] > STORM_AFTER * usual)
    return Row("no_retry_storm", Verdict.FAIL if storm else Verdict.PASS, asked, f"at most {max(during):.2f}",
               f"{usual:.2f}", f"{max(during):.2f}", f"{late[-1]:.2f}" if late else "unknown")


def amplification(counts: Counts, span: tuple[float, float]) -> list[float]:
    """Attempts ÷ requests of each 5 s step of a span in which there were requests."""
    rows = [row for row in counts.rows if span[0] <= row[0] <= span[1]]
    found, first = [], rows[0] if rows else None
    for row in rows:
        if first is not None and row[0] - first[0] >= STEP_S:
            if row[1] > first[1]:
                found.append((row[2] - first[2]) / (row[1] - first[1]))
            first = row
    return found


def degraded_row(evidence: Evidence, asked: Mapping[str, Any]) -> Row:
    """Degradation came on in time, as the answers themselves show, and went off again."""
    by, within_s = asked["by"], float(asked["within_s"])
    during = [r for r in evidence.requests if evidence.fault[0] + within_s <= r.sent_at < evidence.fault[1]]
    shown = [r for r in during if is_degraded(r, by)]
    in_baseline = [r for r in overlapping(evidence.requests, evidence.baseline) if is_degraded(r, by)]
    what = ", ".join(f"{k}: {v}" for k, v in by.items())
    if not during:
        return Row("degraded", Verdict.INCONCLUSIVE, f"{what} within {within_s:g} s", "no request was sent then")
    verdict = Verdict.PASS if len(shown) == len(during) and not in_baseline else Verdict.FAIL
    first = min((r.sent_at for r in shown), default=None)
    return Row("degraded", verdict, f"{what} within {within_s:g} s", f"{len(shown)} of {len(during)} answers show it",
               f"{len(in_baseline)} answers", f"{len(shown)} answers",
               detail={"first_after_s": None if first is None else first - evidence.fault[0]})


def is_degraded(request: Request, by: Mapping[str, Any]) -> bool:
    """Does an answer show the degradation: another model, or a header."""
    if "model" in by and request.model != by["model"]:
        return False
    headers = {k.lower(): v for k, v in request.headers.items()}
    return all(k == "model" or headers.get(str(k).lower()) == str(v) for k, v in by.items())


# --- the alarm -------------------------------------------------------------------------------------------------------


def alarm_rows(evidence: Evidence) -> list[Row]:
    """Each announced alert fired in time, reached a person's channel, and resolved; nothing else paged."""
    rows = [row for alarm in evidence.alarms for row in rows_of_alarm(evidence, alarm)]
    unexpected = "; ".join(evidence.unexpected)
    verdict = Verdict.FAIL if unexpected else Verdict.PASS
    return [*rows, Row("nothing_unexpected", verdict, "no page that was not announced", unexpected or "none")]


def rows_of_alarm(evidence: Evidence, alarm: Alarm) -> list[Row]:
    """Fired, delivered, resolved: each within its limit."""
    start, limit_s = evidence.fault[0], FIRE_WITHIN_S + alarm.for_s
    fired_s = None if alarm.firing_at is None else alarm.firing_at - start
    name, asked = f"alarm.{alarm.rule}", f"firing within {limit_s:.0f} s"
    if not alarm.enabled:
        return [Row(f"{name}.fired", Verdict.FAIL, asked, "the rule is disabled")]
    if fired_s is None:
        return [Row(f"{name}.fired", Verdict.FAIL, asked, "it never fired")]
    rows = [Row(f"{name}.fired", Verdict.PASS if fired_s <= limit_s else Verdict.FAIL, asked, f"after {fired_s:.1f} s"),
            delivered_row(evidence, alarm)]
    within_s = evidence.drill.resolve_within_s
    resolved_s = None if alarm.resolved_at is None else alarm.resolved_at - evidence.fault[1]
    ok = resolved_s is not None and resolved_s <= within_s
    got = "still firing" if resolved_s is None else f"{max(0.0, resolved_s):.1f} s after the fault"
    return [*rows, Row(f"{name}.resolved", Verdict.PASS if ok else Verdict.FAIL, f"within {within_s:.0f} s", got)]


def delivered_row(evidence: Evidence, alarm: Alarm) -> Row:
    """Echoed by a receiver; else only "accepted", and Alertmanager's failure counters speak against it."""
    delivery, name = evidence.delivery, f"alarm.{alarm.rule}.delivered"
    limit_s = delivery.group_wait_s + DELIVER_WITHIN_S
    asked = f"at the receiver within {limit_s:.0f} s of firing"
    failing = f"Alertmanager failed {delivery.failures:.0f} notifications" if delivery.failures else ""
    if alarm.delivered_at is not None and alarm.firing_at is not None:
        took_s = alarm.delivered_at - alarm.firing_at
        return Row(name, Verdict.PASS if took_s <= limit_s else Verdict.FAIL, asked, f"after {took_s:.1f} s")
    if failing:
        return Row(name, Verdict.FAIL, asked, failing)
    if delivery.has_echo:
        return Row(name, Verdict.FAIL, asked, "it never reached the receiver")
    return Row(name, Verdict.INCONCLUSIVE, asked, "accepted by Alertmanager; no receiver can be asked (`echo:`)")


# --- what it cost ----------------------------------------------------------------------------------------------------


def times_of(evidence: Evidence) -> dict[str, float | None]:
    """Times to detect, deliver, mitigate and recover, from the injection."""
    start = evidence.fault[0]
    fired = [a.firing_at for a in evidence.alarms if a.firing_at is not None]
    delivered = [a.delivered_at for a in evidence.alarms if a.delivered_at is not None]
    back = shifted_at(evidence)
    recovered = evidence.restart.completion_at if evidence.restart is not None else evidence.fault[1]
    return {"detect_s": min(fired) - start if fired else None,
            "deliver_s": min(delivered) - start if delivered else None,
            "mitigate_s": None if back is None else back - start,
            "recover_s": None if recovered is None else recovered - start}


def impact_of(evidence: Evidence) -> dict[str, Any]:
    """Requests that failed or were slow from injection to recovery."""
    judged = overlapping(evidence.requests, (evidence.fault[0], evidence.recovery[1]))
    slow = [r for r in judged if r.first_at is not None and r.first_at - r.sent_at > evidence.slo_ttft_p99_s]
    failed = [r for r in judged if r.outcome != "ok"]
    return {"requests": len(judged), "failed": len(failed), "slow_first_token": len(slow),
            "broken_streams": sum(r.outcome == "broken" for r in judged),
            "second_attempts": sum(r.attempts - 1 for r in judged)}


def share(value: float | None) -> str:
    """A share for the report."""
    return "unknown" if value is None else f"{value:.1%}"


def p99_text(values: Sequence[float]) -> str:
    """A p99 for the report."""
    p99 = quantile(values)
    return "unknown" if p99 is None else f"p99 {p99 * 1000:.0f} ms of {len(values)}"


def errors_text(requests: Sequence[Request]) -> str:
    """Errors for the report."""
    return f"{sum(r.outcome != 'ok' for r in requests)} of {len(requests)}" if requests else "unknown"
