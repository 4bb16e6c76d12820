"""What a run proves. Pure: evidence in, verdict out.

Three kinds of judgement, never mixed: guards stopped the run (ABORTED), evidence makes it valid (INVALID,
INCONCLUSIVE), must-holds make the verdict (PASS, FAIL).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drills.model import Drill, Request, Row, Verdict, may_fire

ALLOWED = 0.01  # the share of requests that a p99 leaves over the limit
CONFIDENCE = 0.95
STORM = 1.5  # upstream attempts ÷ requests
STORM_AFTER = 1.2  # times the baseline, still 2 m after the fault
STORM_AFTER_S = 120.0
SLOW_FAULTS = frozenset({"packet-loss", "upstream-timeout"})  # slowness is what they are
BACK_WITHIN_S = 120.0  # p99 back inside the SLO after a fault that is not judged while it lasts
NAMING_A_RANK = ("rank-straggler", "rank-clock-spread")  # of slow-rank's alerts, one must fire
FIRE_WITHIN_S = 60.0  # beside the rule's own `for`
DELIVER_WITHIN_S = 15.0  # beside the group_wait
SOONEST_SHARE = 0.8  # of a rule's `for`: a breach that began with the fault fires no sooner, but for half a poll
AT_ONCE_S = 1.0  # two instants that different processes wrote down are told apart no better
GOES_WITHIN_S = 5.0  # so long before its kubelet has said that a pod is gone its processes may have ended
LATE_S = 1.0  # a prober that is later than this did not keep its rate
KEPT = 0.98
STEP_S = 5.0
GOODPUT_STEP_S = 5.0
SEEN_BY_USERS = ("goodput", "ttft_p99", "itl_p99", "error_ratio")  # of `holds`: the prober alone can tell
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
    was_on: bool = False  # what fired was pending or firing before the fault was in


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
    wants_key: bool = False  # it is up, and answers completions only to who has a key
    steps: Mapping[str, float] = field(default_factory=dict)  # what else was reached on the way: gone, scheduled …
    why: str = ""  # what keeps it, where it is not back


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters each second: (time, requests at the router, upstream attempts). Empty: nobody tells."""

    rows: Sequence[tuple[float, float, float]] = ()


Rows = Sequence[tuple[float, float]]  # (unix seconds, count so far)


@dataclass(frozen=True, slots=True)
class Routed:
    """What one router counted. `attempts`: how often it sent a request to a replica; empty where it does not tell."""

    requests: Rows = ()
    attempts: Rows = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests at each replica and each router, as the agent counted them."""

    replicas: Mapping[str, Rows] = field(default_factory=dict)
    routers: Mapping[str, Routed] = field(default_factory=dict)


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
    arrivals: Mapping[str, Rows] = field(default_factory=dict)  # by replica
    unexpected: Sequence[str] = ()  # pages that nothing announced
    ended_early: str | None = None  # a must-hold's own page ended it: FAIL
    aborted: str | None = None  # a guard, a person or a crash ended it
    left: Sequence[str] = ()  # of ours, still in the world
    stale: Sequence[str] = ()  # telemetry that was not fresh
    slo_availability: float | None = None  # share of good requests that was promised; None: unknown
    slo_window_s: float | None = None  # over which
    unwatched_restart: bool = False  # it was killed and must come back, and nobody could watch it
    not_as_before: Sequence[str] | None = None  # what of the target's hardware is not as it was; None: not asked


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, why, and every row behind it."""

    verdict: Verdict
    why: str
    rows: Sequence[Row]
    times: Mapping[str, float | None]  # detect_s, deliver_s, mitigate_s, recover_s
    impact: Mapping[str, Any]
    replicas: Sequence[Replica] = ()


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica got: its share (0 to 1) of all arrivals in a phase, and its rate in steps of 5 s.

    `rates`: (middle of the step, requests/s). Shares are None where nothing arrived anywhere, or nobody counted.
    """

    name: str
    before: float | None
    during: float | None
    after: float | None
    rates: Sequence[tuple[float, float]] = ()


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X <= k) of n tries with probability p."""
    if p <= 0 or k >= n:
        return 1.0
    if p >= 1:
        return 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    terms = (math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q
             for i in range(min(k, n) + 1))
    return min(1.0, math.fsum(math.exp(t) for t in terms))


def k_of_n(k: int, n: int, allowed: float = ALLOWED) -> Verdict:
    """PASS where at most `allowed` is sure, FAIL where more is, else INCONCLUSIVE.

    Sure: the one-sided 95 % bounds of Clopper and Pearson (1934). The upper one is at most `allowed` where so few as k
    would then be a chance of at most 5 %, the lower one above it where so many would be one of under 5 %.
    """
    if n <= 0:
        return Verdict.INCONCLUSIVE
    alpha = 1 - CONFIDENCE
    if binomial_tail(k, n, allowed) <= alpha:
        return Verdict.PASS
    return Verdict.FAIL if k > 0 and 1 - binomial_tail(k - 1, n, allowed) < alpha else Verdict.INCONCLUSIVE


def ended_before(evidence: Evidence, at: float) -> bool:
    """Whether a run was cut short, so that nobody looked at its alarms any more at a time."""
    start, end = evidence.recovery
    cut = evidence.aborted or evidence.ended_early or evidence.left or not evidence.proven
    return bool(cut) and (end if end > start else evidence.fault[1]) < at


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
    return Judgement(verdict, why, rows, times_of(evidence, rows), impact_of(evidence), replicas_of(evidence))


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
        rows.append(Row("load_kept", Verdict.PASS if kept_its_rate(evidence) else Verdict.INCONCLUSIVE,
                        f"{evidence.drill.load.rate_per_s:g} requests/s, at most {LATE_S:g} s late",
                        f"{evidence.sent_ratio:.0%} of them, p99 {evidence.late_p99_s:.3f} s late"))
    fresh = Verdict.INCONCLUSIVE if evidence.stale else Verdict.PASS
    return [*rows, Row("telemetry_fresh", fresh, "fresh throughout", "; ".join(evidence.stale) or "it was")]


def kept_its_rate(evidence: Evidence) -> bool:
    """Whether the prober sent what it was asked to send, when it was asked to."""
    return evidence.sent_ratio >= KEPT and evidence.late_p99_s <= LATE_S


# --- must-holds ------------------------------------------------------------------------------------------------------


def must_holds(evidence: Evidence) -> list[Row]:
    """Traffic, latency, errors, restart, retries, degradation."""
    holds = evidence.drill.holds
    rows = [end_row(evidence)]
    if evidence.drill.load is not None:
        rows += [row for row in (goodput_row(evidence), latency_row(evidence, "ttft"), latency_row(evidence, "itl"),
                                 error_row(evidence), streams_row(evidence), deadline_row(evidence)) if row is not None]
    elif asked := [name for name in SEEN_BY_USERS if getattr(holds, name) is not None]:
        rows.append(Row("user_seen", Verdict.INCONCLUSIVE, f"{', '.join(asked)} hold",
                        "unknown: no load was asked for (`load:`)"))
    if evidence.restart is not None:
        rows += restart_rows(evidence, evidence.restart)
    elif evidence.unwatched_restart:
        rows.append(Row("restart", Verdict.INCONCLUSIVE, "the killed target answers again",
                        "unknown: nobody could watch it; name an engine of the configuration as target"))
    if evidence.not_as_before is not None:
        changed = "; ".join(evidence.not_as_before)
        rows.append(Row("as_before", Verdict.FAIL if changed else Verdict.PASS, "the GPU is as it was before",
                        changed or "it is"))
    if holds.retry_storm:
        rows.append(storm_row(evidence))
    if holds.degraded is not None:
        rows.append(degraded_row(evidence, holds.degraded))
    return rows


def end_row(evidence: Evidence) -> Row:
    """The fault lasted its time: no page of a must-hold and no guard ended it."""
    early, aborted = evidence.ended_early, evidence.aborted
    verdict = Verdict.FAIL if early else Verdict.ABORTED if aborted else Verdict.PASS
    asked = f"the fault lasts its {evidence.drill.for_s:g} s"
    return Row("not_ended_early", verdict, asked, early or aborted or "it did")


def goodput_row(evidence: Evidence) -> Row | None:
    """Answers a second at the user's address: back at the asked share of the rate in time, and staying there."""
    holds, load = evidence.drill.holds, evidence.drill.load
    if holds.goodput is None or load is None:
        return None
    start, end = evidence.fault[0] + holds.goodput_within_s, evidence.fault[1]
    asked = f"{holds.goodput:.0%} of {load.rate_per_s:g}/s within {holds.goodput_within_s:g} s"
    before, after = (goodput(evidence.requests, s, load.rate_per_s) for s in (evidence.baseline, evidence.recovery))
    if end - start < GOODPUT_STEP_S:
        return Row("goodput", Verdict.INCONCLUSIVE, asked, "the fault was shorter than that", share(before),
                   after=share(after), detail={"took_s": None})
    during, back_at = goodput(evidence.requests, (start, end), load.rate_per_s), shifted_at(evidence)
    took_s = None if back_at is None else back_at - evidence.fault[0]
    back = "never back for good" if took_s is None else f"back after {took_s:.0f} s" if took_s else "never gone"
    ok = during is not None and during >= holds.goodput and took_s is not None and took_s <= holds.goodput_within_s
    verdict = Verdict.PASS if ok else Verdict.FAIL if kept_its_rate(evidence) else Verdict.INCONCLUSIVE
    detail = {"took_s": took_s, "limit_s": holds.goodput_within_s, "shifted_at": back_at if took_s else None}
    return Row("goodput", verdict, asked, f"{share(during)} from then on, {back}", share(before), share(during),
               share(after), detail)


def goodput(requests: Iterable[Request], span: tuple[float, float], rate_per_s: float) -> float | None:
    """Good answers to requests that were due in a span ÷ those asked for in it."""
    asked = rate_per_s * (span[1] - span[0])
    good = sum(r.outcome == "ok" and span[0] <= r.due_at < span[1] for r in requests)
    return min(1.0, good / asked) if asked > 0 else None


def shifted_at(evidence: Evidence) -> float | None:
    """When goodput was back for good: after the last two steps in a row (10 s) that had not their share."""
    holds, load = evidence.drill.holds, evidence.drill.load
    if holds.goodput is None or load is None:
        return None
    start, asked = evidence.fault[0], load.rate_per_s * GOODPUT_STEP_S
    least = holds.goodput - 1 / max(1.0, asked)  # one request of a step may be late
    good = Counter(int((r.due_at - start) // GOODPUT_STEP_S) for r in evidence.requests if r.outcome == "ok")
    return back_for_good(evidence.fault, lambda i: good[i] / asked >= least)


def back_for_good(span: tuple[float, float], is_good: Callable[[int], bool]) -> float | None:
    """The start of the first good step after the last two bad ones in a row; None: it ends badly, or has no step."""
    good = [is_good(i) for i in range(int((span[1] - span[0]) // GOODPUT_STEP_S))]
    bad = [i for i in range(len(good)) if not good[i] and (i == 0 or not good[i - 1])]
    first = max(bad, default=-1) + 1
    return span[0] + first * GOODPUT_STEP_S if first < len(good) else None


def latency_row(evidence: Evidence, what: str) -> Row | None:
    """p99 of TTFT or ITL by k of n: how many were over the limit, from injection to recovery.

    A fault that is slowness itself is only reported while it lasts, unless the drill names its own limit: its p99 must
    be back from 2 m after it on.
    """
    limit, load = getattr(evidence.drill.holds, f"{what}_p99"), evidence.drill.load
    if limit is None or load is None:
        return None
    limit_s = getattr(evidence, f"slo_{what}_p99_s") if limit == "slo" else float(limit)
    lasting = limit != "slo" or evidence.drill.fault not in SLOW_FAULTS
    judged = (evidence.fault[0] if lasting else evidence.fault[1] + BACK_WITHIN_S, evidence.recovery[1])
    asked = f"p99 <= {limit_s * 1000:.0f} ms{'' if lasting else f' from {BACK_WITHIN_S:.0f} s after the fault'}"
    if not load.streaming:
        return Row(f"{what}_p99", Verdict.SKIPPED, asked, "unknown: without streaming nobody sees it")
    values = samples(evidence.requests, judged, what) if judged[1] > judged[0] else []
    over = sum(v > limit_s for v in values)
    got = f"{over} of {len(values)} over {limit_s * 1000:.0f} ms" if values else "nothing was measured then"
    before, during, after = (p99_text(samples(evidence.requests, span, what))
                             for span in (evidence.baseline, evidence.fault, evidence.recovery))
    detail = {"k": over, "n": len(values), "allowed": ALLOWED, "limit_s": limit_s,
              "slow_until": slow_until(evidence, what, limit_s),
              "back_limit_s": evidence.fault[1] - evidence.fault[0] + BACK_WITHIN_S}
    return Row(f"{what}_p99", k_of_n(over, len(values)), asked, got, before, during, after, detail)


def slow_until(evidence: Evidence, what: str, limit_s: float) -> float | None:
    """When the p99 of the last step of 5 s was over the limit before it was back for good; None: it never was over.

    Infinite where it was not back at the end.
    """
    start, end = evidence.fault[0], max(evidence.fault[1], evidence.recovery[1])
    steps: dict[int, list[float]] = {}
    for request in evidence.requests:
        if start <= request.sent_at < end:
            own = samples([request], (-math.inf, math.inf), what)
            steps.setdefault(int((request.sent_at - start) // GOODPUT_STEP_S), []).extend(own)
    slow = {i for i, values in steps.items() if (quantile(values) or 0.0) > limit_s}
    if not slow:
        return None
    back = back_for_good((start, end), lambda i: i not in slow)
    return math.inf if back is None else back


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


def victims_streams(evidence: Evidence) -> list[Request]:
    """Streams that were cut since they ran on the target when it was killed: in flight then, as far as can be told.

    A pod that was told to go is sent streams until all have heard of it, and cuts those of its last moment, too.
    """
    if evidence.restart is None:
        return []
    start, gone = evidence.fault[0], evidence.restart.steps.get("gone")
    ends = [(start, start), *([] if gone is None else [(gone - GOES_WITHIN_S, gone)])]
    return [r for r in evidence.requests if r.outcome == "broken" and any(
        r.sent_at <= last + AT_ONCE_S and r.ended_at >= first - AT_ONCE_S for first, last in ends)]


def error_row(evidence: Evidence) -> Row | None:
    """Failed requests by k of n, from injection to recovery; streams that were cut on the victim are told apart."""
    allowed = evidence.drill.holds.error_ratio
    if allowed is None:
        return None
    judged = overlapping(evidence.requests, (evidence.fault[0], evidence.recovery[1]))
    failed = [r for r in judged if r.outcome != "ok"]
    cut = {r.id for r in victims_streams(evidence)} & {r.id for r in failed}
    counted, n = len(failed) - len(cut), len(judged) - len(cut)
    classes: dict[str, int] = {}
    for request in failed:
        classes[request.outcome] = classes.get(request.outcome, 0) + 1
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(classes.items()))
    got = f"{counted} of {n} failed" + (f", beside {len(cut)} streams cut on the victim" if cut else "")
    before, during, after = (errors_text(overlapping(evidence.requests, span))
                             for span in (evidence.baseline, evidence.fault, evidence.recovery))
    return Row("error_ratio", k_of_n(counted, n, allowed), f"<= {allowed:.3g} of requests",
               got + (f" ({told})" if told else ""), before, during, after,
               {"k": counted, "n": n, "allowed": allowed, "classes": classes})


def streams_row(evidence: Evidence) -> Row | None:
    """A killed target cuts the streams that ran on it, and no other."""
    if evidence.restart is None or evidence.drill.load is None or not evidence.drill.load.streaming:
        return None
    victims = {r.id for r in victims_streams(evidence)}
    judged = overlapping(evidence.requests, (evidence.fault[0], evidence.recovery[1]))
    others = [r for r in judged if r.outcome == "broken" and r.id not in victims]
    return Row("no_other_stream_cut", Verdict.FAIL if others else Verdict.PASS, "none but those on the victim",
               f"{len(others)} others, {len(victims)} on the victim")


def deadline_row(evidence: Evidence) -> Row | None:
    """A slow upstream keeps nobody waiting until the client gives up."""
    if evidence.drill.fault != "upstream-timeout" or evidence.drill.load is None:
        return None
    judged = overlapping(evidence.requests, (evidence.fault[0], evidence.recovery[1]))
    gave_up = sum(r.outcome == "timeout" for r in judged)
    return Row("deadline_respected", k_of_n(gave_up, len(judged)),
               f"answered within the client's {evidence.drill.load.deadline_s:g} s",
               f"{gave_up} of {len(judged)} were not",
               detail={"k": gave_up, "n": len(judged), "allowed": ALLOWED})


def restart_rows(evidence: Evidence, restart: Restart) -> list[Row]:
    """The killed target came back by itself, answered, and left nothing behind: else its return does not count."""
    start = evidence.fault[0]
    reached = {"down": restart.down_at, **restart.steps, "port": restart.port_at, "ready": restart.ready_at,
               "completion": restart.completion_at}
    took_s = None if restart.completion_at is None else restart.completion_at - start
    split = ", ".join(f"{name} {at - start:.1f} s" for name, at in reached.items() if at is not None)
    counts = not restart.orphans and restart.gpu_free is not False
    ok = took_s is not None and took_s <= restart.within_s and counts
    cut = took_s is None and ended_before(evidence, start + restart.within_s)
    got = "never answered" if took_s is None else f"first completion after {took_s:.1f} s"
    got += f" (> {restart.within_s:.0f} s): {restart.why}" if took_s is None and restart.why else ""
    verdict = Verdict.PASS if ok else Verdict.FAIL
    if took_s is None and restart.wants_key:
        verdict, got = Verdict.INCONCLUSIVE, "unknown: it asks for a key; give load.api_key_file"
    elif cut:
        verdict, got = Verdict.SKIPPED, "unknown: the run ended before"
    got += f" ({split})" if split else ""
    detail = {"took_s": took_s, "limit_s": restart.within_s, **{f"{name}_at": at for name, at in reached.items()},
              **{f"{name}_s": None if at is None else at - start for name, at in reached.items()}}
    is_free = None if cut and restart.gpu_free is False else restart.gpu_free
    free = {True: Verdict.PASS, False: Verdict.FAIL, None: Verdict.SKIPPED}[is_free]
    return [
        Row("restart", verdict, f"Ready and a completion within {restart.within_s:.0f} s",
            got if counts or cut else f"{got}, while something of the killed one was still there", detail=detail),
        Row("no_orphans", Verdict.FAIL if restart.orphans else Verdict.PASS, "no process of it lives on",
            "; ".join(restart.orphans) or "none"),
        Row("gpu_memory_free", free, "its GPU memory is free again",
            {True: "it is", False: "it is still held", None: "unknown: the run ended before" if cut
             else "unknown: no GPU was asked"}[is_free]),
    ]


def storm_row(evidence: Evidence) -> Row:
    """Upstream attempts ÷ requests per 5 s: no storm while the fault lasts, and none that outlives it."""
    asked = f"<= {STORM:g}, and <= {STORM_AFTER:g} × baseline {STORM_AFTER_S:.0f} s after the fault"
    before = amplification(evidence.counts, evidence.baseline)
    during = amplification(evidence.counts, (evidence.fault[0], evidence.recovery[1]))
    late = amplification(evidence.counts, (evidence.fault[1] + STORM_AFTER_S, evidence.recovery[1]))
    if not during:
        return Row("no_retry_storm", Verdict.SKIPPED, asked, "unknown: no router tells its attempts")
    usual = sum(before) / len(before) if before else None
    storm = max(during) > STORM or (bool(late) and max(late) > STORM_AFTER * (usual or 1.0))
    return Row("no_retry_storm", Verdict.FAIL if storm else Verdict.PASS, asked, f"at most {max(during):.2f}",
               "unknown" if usual is None else f"{usual:.2f}", f"{max(during):.2f}",
               f"{max(late):.2f}" if late else "unknown")


def counts_of(traffic: Traffic) -> Counts:
    """Requests and attempts of the router through which most requests come; nothing where there is no router.

    Where it does not tell its attempts, they are what arrived at the engines.
    """
    routed = max(traffic.routers.values(), key=lambda one: rise_of(one.requests), default=None)
    if routed is None:
        return Counts()
    if routed.attempts:
        sent = dict(routed.attempts)
        return Counts([(at, count, sent[at]) for at, count in routed.requests if at in sent])
    engines = [moved(rows) for rows in traffic.replicas.values()]
    return Counts([(at, count, sum(count_at(rows, at) for rows in engines)) for at, count in routed.requests] if engines
                  else ())


def rise_of(rows: Rows) -> float:
    """What a count rose by from its first read to its last."""
    return rows[-1][1] - rows[0][1] if rows else 0.0


def moved(rows: Rows) -> Rows:
    """The reads at which a count had moved, and the first: of an engine that hung nobody knows when it was asked.

    What it counts at once when it goes on is spread over the time in which it did not.
    """
    return [row for i, row in enumerate(rows) if i == 0 or row[1] != rows[i - 1][1]]


def amplification(counts: Counts, span: tuple[float, float]) -> list[float]:
    """Attempts ÷ requests of each 5 s step of a span in which there were requests."""
    rows = [row for row in counts.rows if span[0] <= row[0] <= span[1]]
    found, first = [], rows[0] if rows else None
    for row in rows:
        if first is not None and row[0] - first[0] >= STEP_S:
            if row[1] > first[1] and row[2] >= first[2]:  # else nobody asked, or a counter began anew
                found.append((row[2] - first[2]) / (row[1] - first[1]))
            first = row
    return found


def degraded_row(evidence: Evidence, asked: Mapping[str, Any]) -> Row:
    """Degradation came on in time, as every good answer since then shows; what shows it before proves nothing."""
    by, within_s = asked["by"], float(asked["within_s"])
    what = f"{', '.join(f'{k} {v}' for k, v in by.items())} within {within_s:g} s"
    good = [r for r in evidence.requests if r.outcome == "ok"]
    during = [r for r in good if evidence.fault[0] + within_s <= r.sent_at < evidence.fault[1]]
    shown = [r for r in good if evidence.fault[0] <= r.sent_at < evidence.fault[1] and is_degraded(r, by)]
    before, after = (sum(is_degraded(r, by) for r in good if span[0] <= r.sent_at < span[1])
                     for span in (evidence.baseline, evidence.recovery))
    first_s = min((r.sent_at for r in shown), default=math.inf) - evidence.fault[0]
    late = sum(is_degraded(r, by) for r in during)
    verdict = Verdict.PASS if late == len(during) and not before else Verdict.FAIL
    if not during:
        verdict = Verdict.INCONCLUSIVE
    got = f"{late} of {len(during)} good answers show it" if during else "nothing was answered well then"
    return Row("degraded", verdict, what, got, f"{before} answers", f"{len(shown)} answers", f"{after} answers",
               {"first_after_s": first_s if shown else None})


def is_degraded(request: Request, by: Mapping[str, Any]) -> bool:
    """Does an answer show the degradation: `model` of the answer, or `header`, a name or "name: value"."""
    if "model" in by and request.model != by["model"]:
        return False
    if "header" in by:
        name, _, value = str(by["header"]).partition(":")
        got = {k.lower(): v.strip() for k, v in request.headers.items()}.get(name.strip().lower())
        return got is not None and value.strip() in ("", got)
    return "model" in by


def replicas_of(evidence: Evidence) -> list[Replica]:
    """Where the traffic went, before, during and after the fault."""
    spans = (evidence.baseline, evidence.fault, evidence.recovery)
    got = {name: [arrived(rows, *span) for span in spans] for name, rows in evidence.arrivals.items()}
    totals = [sum(counts[i] for counts in got.values()) for i in range(len(spans))]
    found = []
    for name, counts in got.items():
        shares = [count / total if total > 0 else None for count, total in zip(counts, totals, strict=True)]
        found.append(Replica(name, shares[0], shares[1], shares[2], rates_of(evidence.arrivals[name])))
    return found


def arrived(rows: Rows, start: float, end: float) -> float:
    """How many arrived in a span, of a count that was read now and then: between two reads it is spread evenly."""
    return max(0.0, count_at(rows, end) - count_at(rows, start))


def count_at(rows: Rows, at: float) -> float:
    """The count at a time; before the first read what that one told, after the last likewise."""
    i = bisect_left(rows, at, key=lambda row: row[0])
    if i == 0 or i == len(rows):
        return rows[min(i, len(rows) - 1)][1] if rows else 0.0
    (before_at, before), (after_at, after) = rows[i - 1], rows[i]
    return before + (after - before) * (at - before_at) / (after_at - before_at)


def rates_of(rows: Rows) -> list[tuple[float, float]]:
    """Requests/s in steps of 5 s between the first and the last read."""
    if len(rows) < 2:
        return []
    steps = int((rows[-1][0] - rows[0][0]) // STEP_S)
    starts = [rows[0][0] + i * STEP_S for i in range(steps)]
    return [(start + STEP_S / 2, arrived(rows, start, start + STEP_S) / STEP_S) for start in starts]


# --- the alarm -------------------------------------------------------------------------------------------------------


def alarm_rows(evidence: Evidence) -> list[Row]:
    """Each announced alert fired in time, reached a person's channel, and resolved; nothing else paged."""
    rows = [row for alarm in evidence.alarms for row in rows_of_alarm(evidence, alarm)]
    if evidence.drill.route_to is not None:
        rows.append(Row("on_call_route", Verdict.SKIPPED, "the alarm goes its normal route",
                        f"on-call route not proven: route_to sent it to {evidence.drill.route_to} alone"))
    unexpected = "; ".join(evidence.unexpected)
    verdict = Verdict.FAIL if unexpected else Verdict.PASS
    if evidence.drill.fault == "slow-rank" and not evidence.drill.expects:
        rows.append(rank_named_row(evidence))
    return [*rows, Row("nothing_unexpected", verdict, "no page that was not announced", unexpected or "none")]


def is_of_before(evidence: Evidence, alarm: Alarm) -> bool:
    """Whether an alert fired for what was there before the fault: sooner than a breach of its own could have made it.

    That it was pending alone says nothing: where too little is known yet, an alert waits as pending.
    """
    return alarm.was_on and alarm.firing_at is not None \
        and alarm.firing_at - evidence.fault[0] < SOONEST_SHARE * alarm.for_s


def rank_named_row(evidence: Evidence) -> Row:
    """Each alert that names the slow rank may fail to see it; one must not."""
    named = [alarm.rule for alarm in evidence.alarms if alarm.rule in NAMING_A_RANK and alarm.firing_at is not None
             and not is_of_before(evidence, alarm)]
    return Row("rank_named", Verdict.PASS if named else Verdict.FAIL, f"one of {', '.join(NAMING_A_RANK)} fires",
               ", ".join(named) or "neither did: nobody was told which rank is slow")


def rows_of_alarm(evidence: Evidence, alarm: Alarm) -> list[Row]:
    """Fired, delivered, resolved: each within its limit."""
    start, limit_s = evidence.fault[0], FIRE_WITHIN_S + alarm.for_s
    fired_s = None if alarm.firing_at is None else alarm.firing_at - start
    name, asked = f"alarm.{alarm.rule}", f"firing within {limit_s:.0f} s"
    may = may_fire(evidence.drill)
    detail = {"took_s": fired_s, "limit_s": limit_s, "pending_at": alarm.pending_at, "firing_at": alarm.firing_at}
    if not alarm.enabled or fired_s is None:
        got = "it never fired" if alarm.enabled else "the rule is disabled"
        if alarm.enabled and ended_before(evidence, start + limit_s):
            return [Row(f"{name}.fired", Verdict.SKIPPED, asked, "unknown: the run ended before", detail=detail)]
        return [Row(f"{name}.fired", Verdict.SKIPPED if may else Verdict.FAIL, asked,
                    f"{got}; it may fire, and need not" if may else got, detail=detail)]
    within_s, in_time = evidence.drill.resolve_within_s, fired_s <= limit_s or may
    resolved_s = None if alarm.resolved_at is None else max(0.0, alarm.resolved_at - evidence.fault[1])
    ok = resolved_s is not None and resolved_s <= within_s
    verdict = Verdict.PASS if ok else Verdict.FAIL
    got = "still firing" if resolved_s is None else f"after {resolved_s:.1f} s" if resolved_s else "before it ended"
    if resolved_s is None and ended_before(evidence, evidence.fault[1] + within_s):
        verdict, got = Verdict.SKIPPED, "unknown: the run ended before"
    in_order, said = Verdict.PASS if in_time else Verdict.FAIL, f"after {fired_s:.1f} s"
    if is_of_before(evidence, alarm):
        in_order = Verdict.SKIPPED if may else Verdict.INCONCLUSIVE
        said += ", for what was there before the fault: it was pending by then"
        detail["took_s"] = None
    return [
        Row(f"{name}.fired", in_order, asked, said, detail=detail),
        delivered_row(evidence, alarm),
        Row(f"{name}.resolved", verdict, f"within {within_s:.0f} s of the fault's end", got,
            detail={"took_s": resolved_s, "limit_s": within_s, "resolved_at": alarm.resolved_at}),
    ]


def delivered_row(evidence: Evidence, alarm: Alarm) -> Row:
    """Echoed by a receiver; else only "accepted", and Alertmanager's failure counters speak against it."""
    delivery, name = evidence.delivery, f"alarm.{alarm.rule}.delivered"
    limit_s = delivery.group_wait_s + DELIVER_WITHIN_S
    asked = f"at the receiver within {limit_s:.0f} s of firing"
    detail: dict[str, Any] = {"took_s": None, "limit_s": limit_s, "delivered_at": alarm.delivered_at}
    if alarm.delivered_at is not None and alarm.firing_at is not None:
        told_s = alarm.delivered_at - alarm.firing_at
        detail["took_s"] = took_s = max(0.0, told_s)
        behind = f": the receiver's clock is {-told_s:.1f} s behind at least" if told_s < -AT_ONCE_S else ""
        return Row(name, Verdict.PASS if took_s <= limit_s else Verdict.FAIL, asked, f"after {took_s:.1f} s{behind}",
                   detail=detail)
    if delivery.failures is not None and delivery.failures > 0:
        failed = f"Alertmanager failed {delivery.failures:.0f} notifications"
        return Row(name, Verdict.FAIL, asked, failed, detail=detail)
    if delivery.has_echo and alarm.firing_at is not None and ended_before(evidence, alarm.firing_at + limit_s):
        return Row(name, Verdict.SKIPPED, asked, "unknown: the run ended before", detail=detail)
    if delivery.has_echo:
        return Row(name, Verdict.FAIL, asked, "it never reached the receiver", detail=detail)
    accepted = "unknown" if delivery.failures is None else "accepted by Alertmanager"
    return Row(name, Verdict.INCONCLUSIVE, asked, f"{accepted}; no receiver can be asked (`echo:`)", detail=detail)


# --- what it cost ----------------------------------------------------------------------------------------------------


def times_of(evidence: Evidence, rows: Sequence[Row]) -> dict[str, float | None]:
    """Times to detect, deliver, mitigate and recover, from the injection."""
    start = evidence.fault[0]
    own = [a for a in evidence.alarms if not is_of_before(evidence, a)]
    fired = [a.firing_at for a in own if a.firing_at is not None]
    # Stamped by the receiver, whose clock may be behind: nothing is delivered before it fires.
    delivered = [max(a.delivered_at, a.firing_at or 0.0) for a in own if a.delivered_at is not None]
    recovered = recovered_at(evidence, rows)
    return {"detect_s": min(fired) - start if fired else None,
            "deliver_s": min(delivered) - start if delivered else None,
            "mitigate_s": next((row.detail["took_s"] for row in rows if row.name == "goodput"), None),
            "recover_s": None if recovered is None else recovered - start}


def recovered_at(evidence: Evidence, rows: Sequence[Row]) -> float | None:
    """When all was as before: the target answered, or the fault was out; and the latency was back."""
    if evidence.fault[1] <= evidence.fault[0] or evidence.left or evidence.aborted:
        return None
    ends = [evidence.fault[1] if evidence.restart is None else evidence.restart.completion_at or math.inf]
    ends += [row.detail["slow_until"] for row in rows if row.detail.get("slow_until") is not None]
    return max(ends) if math.isfinite(max(ends)) else None


def impact_of(evidence: Evidence) -> dict[str, Any]:
    """Requests that failed or were slow from injection to recovery; the error budget as these requests spent it."""
    span = (evidence.fault[0], max(evidence.fault[1], evidence.recovery[1]))
    judged = overlapping(evidence.requests, span)
    slow = [r for r in judged if r.first_at is not None and r.first_at - r.sent_at > evidence.slo_ttft_p99_s]
    failed = [r for r in judged if r.outcome != "ok"]
    minutes = len(failed) / len(judged) * (span[1] - span[0]) / 60 if judged else None
    budget = None  # minutes of it in all
    if evidence.slo_availability is not None and evidence.slo_window_s is not None:
        budget = (1 - evidence.slo_availability) * evidence.slo_window_s / 60
    return {"requests": len(judged), "failed": len(failed), "slow_first_token": len(slow),
            "broken_streams": sum(r.outcome == "broken" for r in judged),
            "second_attempts": sum(r.attempts - 1 for r in judged), "budget_minutes": minutes,
            "budget_share": minutes / budget if minutes is not None and budget else None}


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
