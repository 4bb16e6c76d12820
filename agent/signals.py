"""Samples and windows to signals: one small pure function each, one table (`SIGNALS`).

Meanings and formulas: the product's threshold specification (README, "The ten thresholds"); which engine's metric feeds
a sample: agent/engines/*.yaml. A signal is computed for one rule, since window, counts and SLO are the rule's.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

from agent import watchlist
from agent.hardware import signals as hardware
from agent.hardware.history import Finding, History, findings
from agent.hardware.table import Severity as XidSeverity
from agent.model import Alert, Gap, GpuFacts, Rule, Sample, Signal, SignalSpec, Slo, Why
from agent.stats import (
    Buckets,
    SlowShare,
    add_buckets,
    events_needed,
    in_last_bucket,
    quantile,
    slow_share,
    wilson_lower,
)
from agent.windows import LATE_INTERVALS, Windows

WARMUP_S = 180.0  # after an engine's (re)start
COLD_CACHE_S = 600.0
RESTART_HUSH_S = 900.0  # qps-change
STALE_S = 60.0
SETTLED_S = 600.0  # 10 m after its engine's start a GPU holds what it is meant to hold
FALL_SHARE = 0.01  # of the floor: free memory that varies by less does not fall
EMPTY_KV = 0.05  # "near 0"
CROWDED_KV = 0.5  # below, no request was preempted
NOT_WORTH_IT = 0.15  # prefix-cache hit rate
HALF = 0.5
MISCOUNT = 1.01  # times +Inf: what is read while it is counted may be one off
SHARE_TOP = 1.0 + 1e-9  # what rounding may make of 1
LIVE = (("generation_tokens", ""), ("itl", "count"), ("steps", ""), ("graph_passes", "graph"),
        ("graph_passes", "eager"), ("probe_steps", ""))  # move while an answer is written
PROGRESS = (*LIVE, ("ttft", "count"), ("prompt_tokens", ""), ("finished", "stop"), ("finished", "length"))
HW_THERMAL, HW_POWER_BRAKE = 0x40, 0x80  # nvml.h: nvmlClocksEventReasonHwThermalSlowdown, ...HwPowerBrakeSlowdown
PROFILED = 3  # profiled steps of each rank, at least
DAY_S, WEEK_S = 86400.0, 7 * 86400.0
PAST_WITHIN_S = 180.0  # a value of yesterday that is remembered is one of these minutes
MANY = 720  # failed reads in a row: more are not counted


@dataclass(frozen=True, slots=True)
class Target:
    """One /metrics address as configured or found, and what is known of it. `gpus` are indices."""

    name: str
    engines: tuple[str, ...]
    slo: Slo = field(default_factory=Slo)
    profile: str = "latency"
    gpus: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()  # MIG instances, by UUID
    first_seen_at: float = 0.0
    ever_up: bool = True
    startup_within_s: float = 600.0
    address: str = ""  # host:port, as routers name it
    port: int = 0  # of this machine; 0: it is another's
    stopping_at: float | None = None  # its pod was asked to stop, or is gone
    at_end: frozenset[str] = frozenset()  # samples of it that move only when a request ends
    drifting: frozenset[str] = frozenset()  # samples of it that may rise for ever


@dataclass(frozen=True, slots=True)
class Scene:
    """What signals are computed from. `gpu_full_at_start`: memory share of a GPU 10 m after its engine's start."""

    windows: Windows
    now: float
    node: str
    slo: Slo
    targets: Mapping[str, Target]
    gpus: Mapping[str, GpuFacts] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    users: Mapping[str, Target] = field(default_factory=dict)  # addresses that users use, while a prober tells of them
    told: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # signal -> subject -> text, as drilld says
    gpu_full_at_start: Mapping[str, float] = field(default_factory=dict)
    clip_windows_to_s: float | None = None  # `tocsin check` without an agent: windows as long as it watched
    routers: tuple[str, ...] = ()
    history: History = field(default_factory=History)  # what happened to the hardware
    xid_severity: Mapping[int, XidSeverity] = field(default_factory=dict)  # number -> as its owner wants it
    gpus_expected: int | None = None  # written, or learned
    nvlinks_seen: Mapping[str, int] = field(default_factory=dict)  # uuid -> bit mask of links that were up in this boot
    workloads: tuple[str, ...] = ()  # namespace/name in Kubernetes, on the one agent that watches the cluster
    gpus_allocatable: int = 0  # the most that the kubelet gave to pods
    canaries: Mapping[str, str | None] = field(default_factory=dict)  # address -> the target whose own it is
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # what several rules ask of one tick
    state_told: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # GPU -> number -> when it told it
    sourced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # PromQL or JSON source -> its subjects
    business: frozenset[str] = frozenset()  # of these the sources that no rule of their own judges
    models: Mapping[str, str] = field(default_factory=dict)  # target -> model
    roles: Mapping[str, str] = field(default_factory=dict)  # target -> "prefill" or "decode", where it says so
    judges_all: bool = True  # what spans nodes is judged here, and not by another agent of the cluster

    def target_of(self, subject: str) -> Target | None:
        """The target of a target's, an engine's or a user's address's subject."""
        if subject in self.targets:
            return self.targets[subject]
        if subject in self.users:
            return self.users[subject]
        if ("engines",) not in self.memo:  # of a name that several have, the first is meant
            self.memo[("engines",)] = {e: t for t in reversed(tuple(self.targets.values())) for e in t.engines}
        found: Target | None = self.memo[("engines",)].get(subject)
        return found

    def is_sourced(self, subject: str) -> bool:
        """Whether a subject is a PromQL or JSON source, or a series of one: it belongs to no node."""
        return any(subject == name or subject in of_it for name, of_it in self.sourced.items())

    def tellers(self, target: Target, name: str) -> tuple[str, ...]:
        """Who tells a number of a target: each of its engines, or the target for all of them together."""
        return tellers(self.windows, target, name)

    def slo_of(self, subject: str) -> Slo:
        """The service levels that hold for a subject."""
        target = self.target_of(subject)
        return self.slo if target is None else target.slo

    def sleeps(self, engine: str) -> bool:
        """Whether an engine says that it is asleep."""
        asleep: bool | None = self.memo.get((engine, "asleep"))
        if asleep is None:
            got = self.windows.latest(engine, "asleep", self.now)
            asleep = self.memo[(engine, "asleep")] = isinstance(got, Sample) and got.value > 0
        return asleep

    def findings(self) -> list[Finding]:
        """What happened to the hardware and still asks for somebody."""
        if ("findings",) not in self.memo:
            recovery = {uuid: hardware.recovery_action(self.windows, uuid, self.now) for uuid in self.gpus}
            self.memo[("findings",)] = findings(self.history, self.now, self.xid_severity, recovery)
        found: list[Finding] = self.memo[("findings",)]
        return found

    def target_on(self, uuid: str) -> Target | None:
        """The one target on a GPU or MIG instance; None where there is none, or more than one."""
        gpu = self.gpus.get(uuid)
        on = [t for t in self.targets.values() if (gpu is not None and gpu.index in t.gpus) or uuid in t.instances]
        return on[0] if len(on) == 1 else None

    @property
    def instances(self) -> Mapping[str, GpuFacts]:
        """The MIG instances by UUID, each with its GPU."""
        if ("instances",) not in self.memo:
            self.memo[("instances",)] = {one.uuid: gpu for gpu in self.gpus.values() for one in gpu.instances}
        found: Mapping[str, GpuFacts] = self.memo[("instances",)]
        return found


def tellers(windows: Windows, target: Target, name: str) -> tuple[str, ...]:
    """Who tells a number of a target: each of its engines, or the target for all of them, as SGLang's front does.

    An engine that never told a word is blind; what the others tell is judged all the same.
    """
    if len(target.engines) < 2:
        return target.engines
    if target.name in target.engines or not windows.keys_now(target.name, name):
        return tuple(engine for engine in target.engines if windows.track_of(engine, name)) or target.engines
    return (target.name,)


class Ask:
    """One question: a rule about a subject, now. Short words for what every signal function needs."""

    def __init__(self, scene: Scene, spec: SignalSpec, rule: Rule, subject: str, not_before: float) -> None:
        self.scene, self.spec, self.rule, self.subject = scene, spec, rule, subject
        self.windows, self.now = scene.windows, scene.now
        self.not_before = not_before  # observations from before an alert's last resolve never count again
        target = scene.target_of(subject)
        self.target = target
        self.slo = scene.slo if target is None else target.slo

    def value(self, value: float, *, at: float | None = None, **more: Any) -> Signal:
        """A measured value. `at`: when it was read; alerts count only what is new."""
        return Signal(self.rule.signal, self.subject, "value", self.now if at is None else at, value,
                      self.spec.unit, **more)

    def gap(self, code: Why, why: str, **more: Any) -> Signal:
        """It should be there and is not; what a card or version does not have at all is N/A."""
        if code is Why.NOT_SUPPORTED:
            return self.na(why)
        return Signal(self.rule.signal, self.subject, "gap", self.now, unit=self.spec.unit, why=why, code=code, **more)

    def idle(self, why: str, value: float | None = None, **more: Any) -> Signal:
        """Nothing to judge; a value may be shown."""
        return Signal(self.rule.signal, self.subject, "idle", self.now, value, self.spec.unit, why=why, **more)

    def na(self, why: str) -> Signal:
        """No such thing here."""
        return Signal(self.rule.signal, self.subject, "na", self.now, unit=self.spec.unit, why=why)

    def teller(self, name: str) -> str:
        """Who tells a number of this engine: itself, or its target for all of its engines together."""
        if self.target is None or self.subject not in self.target.engines:
            return self.subject
        by = self.scene.tellers(self.target, name)
        return self.subject if self.subject in by or not by else by[0]

    def latest(self, name: str, subject: str | None = None) -> Sample | Signal:
        """A gauge's last sample, or the signal that says why there is none."""
        got = self.windows.latest(subject or self.subject, name, self.now)
        return got if isinstance(got, Sample) else self.gap(got.code, got.why)

    def told_at(self, name: str, *subjects: str) -> float:
        """When what a windowed signal is made of was last read; of several subjects the oldest."""
        told = [at for s in subjects or (self.subject,) if (at := self.windows.told_at(s, name)) is not None]
        return min(told, default=self.now)

    def problem(self, name: str, subject: str | None = None, key: str | None = None) -> Signal | None:
        """Why a counter or histogram is not told now, or its series of one key."""
        gap = self.windows.problem(subject or self.subject, name, self.now, key)
        return None if gap is None else self.gap(gap.code, gap.why)

    def window_s(self, window_s: float | None = None) -> float:
        """The rule's window, or as long as was watched where `check` samples alone."""
        asked = window_s or self.rule.window_s or 300.0
        return asked if self.scene.clip_windows_to_s is None else min(asked, self.scene.clip_windows_to_s)

    def start(self, window_s: float | None = None) -> float:
        """Where the window starts: never before the alert's last resolve."""
        return max(self.now - self.window_s(window_s), self.not_before)

    def uncovered(self, name: str, subject: str | None = None) -> Signal | None:
        """A window less than half covered is a Gap."""
        window_s = self.window_s()
        enough_s = HALF * window_s - self.windows.interval_s / 2
        watched_s = self.windows.watched_s(subject or self.subject, name, self.now - window_s)
        if watched_s >= enough_s:
            return None
        # someone looked all the time and got no page: that is blindness, and not a young agent
        looked_s = 0.0 if self.target is None else \
            self.windows.watched_s(self.target.name, "rung", self.now - window_s)
        return self.gap(Why.NOT_COVERED, f"watched {watched_s:.0f} s of the last {window_s:.0f} s",
                        evidence={"young": looked_s < enough_s})

    def started_s(self, name: str, subject: str | None = None) -> float | None:
        """Seconds since the engine (re)started; None where it is not known."""
        at = self.windows.restarted_at(subject or self.subject, name)
        return None if at is None else self.now - at

    def asleep(self, subject: str | None = None) -> Signal | None:
        """An engine that sleeps is judged by nothing."""
        return self.na("asleep") if self.scene.sleeps(subject or self.subject) else None

    def warming_up(self, name: str, span_s: float = WARMUP_S, subject: str | None = None) -> str | None:
        """Why an engine that has just (re)started is not judged yet."""
        up_s = self.started_s(name, subject)
        return f"warming up, started {up_s:.0f} s ago" if up_s is not None and up_s < span_s else None

    def count(self, name: str, subject: str, start: float, key: str = "") -> float:
        """Increase of one counter since `start`."""
        return self.windows.increase(subject, name, start, key=key)


def progress_at(ask: Ask, subject: str, since: float) -> float | None:
    """When tokens, first tokens or prompt tokens of an engine last moved, not looking back beyond `since`."""
    last: float | None = None
    for by, name, key in progress_series(ask, subject):
        at = ask.windows.moved_at(by, name, since, key)
        if at is not None and (last is None or at > last):
            last = at
            if at == ask.windows.told_at(by, name):  # no other can have moved later
                break
    return last


def progress_series(ask: Ask, subject: str) -> list[tuple[str, str, str]]:
    """The (subject, name, key) that move when an engine does its work; none: it tells nothing of the kind."""
    memo, by = ask.scene.memo, subject if subject != ask.subject else None
    if (ask.subject, subject, "progress") not in memo:
        asked = [(by or ask.teller(name), name, key) for name, key in PROGRESS]
        found = [(who, name, key) for who, name, key in asked if key in ask.windows.keys_now(who, name)]
        own = [one for one in found if one[0] == subject]
        # what all engines of a target count together moves while one of them hangs
        memo[ask.subject, subject, "progress"] = own if tells_live(ask, own) else found
    series: list[tuple[str, str, str]] = memo[ask.subject, subject, "progress"]
    return series


def is_live(ask: Ask) -> bool:
    """Whether an engine tells of its work while an answer is written; else one long answer would look like a hang."""
    return tells_live(ask, progress_series(ask, ask.subject))


def tells_live(ask: Ask, series: Sequence[tuple[str, str, str]]) -> bool:
    """Whether one of these moves while an answer is written, and not only at its end."""
    late = ask.target.at_end if ask.target is not None else frozenset[str]()
    return any((name, key) in LIVE and name not in late for _, name, key in series)


def stale(ask: Ask, name: str, value: float) -> Signal | None:
    """A gauge that claims work, unchanged for 60 s while no counter moves, is not believed."""
    since = ask.now - STALE_S - 2 * ask.windows.interval_s
    if value <= 0 or ask.windows.moved_at(ask.subject, name, since) is not None:
        return None
    times = [at for at, _ in ask.windows.history(ask.subject, name, since)]
    series = progress_series(ask, ask.subject)
    if not times or times[-1] - times[0] < STALE_S or any(
            ask.windows.moved_at(by, name, since, key) is not None for by, name, key in series):
        return None
    if not series:  # nothing here could have moved
        return None
    return ask.gap(Why.STALE, f"stands at {value:g} for {STALE_S:.0f} s while no counter moves")


# --- the ten ---------------------------------------------------------------------------------------------------------


def age_of_queue(ask: Ask) -> Signal:
    """H1, worked out once a tick: a pattern's rule asks it of every replica again."""
    known: Signal | None = ask.scene.memo.get((ask.subject, "queue_age"))
    if known is None:
        known = ask.scene.memo[(ask.subject, "queue_age")] = queue_age_s(ask)
    return known


def queue_age_s(ask: Ask) -> Signal:
    """H1. Age of the oldest request never yet scheduled: as the in-engine probe tells it, else the bound.

    The first-come-first-served bound: with A_j = first tokens so far + waiting at read j, the head of the queue is
    request number (first tokens + 1); it arrived between the two reads around which A crossed that number, and where in
    between is interpolated.
    """
    sleeping = ask.asleep()
    if sleeping:
        return sleeping
    probed = ask.windows.latest(ask.subject, "probe_queue_age_s", ask.now)
    if isinstance(probed, Sample):
        warm, evidence = ask.warming_up("waiting"), probe_evidence(ask, {})
        return ask.idle(warm, probed.value, method="exact: probe", evidence=evidence) if warm else \
            ask.value(probed.value, at=probed.at, method="exact: probe", evidence=evidence)
    waiting = ask.latest("waiting")
    if isinstance(waiting, Signal):
        return waiting
    told = ask.problem("ttft", ask.teller("ttft"), "count")  # a bad bucket costs the quantiles, not the queue
    if told is not None:
        return told
    frozen = stale(ask, "waiting", waiting.value)
    if frozen is not None:
        return frozen
    age_s, low_s, high_s = queue_age_bound(ask, waiting)
    warm = ask.warming_up("waiting")
    evidence = {"waiting": waiting.value, "low_s": low_s, "high_s": high_s}
    if ask.teller("ttft") != ask.subject and waiting.value > 0:
        evidence["note"] = "first tokens are told for all engines together, so it may be older"
    if probed.code is Why.LOST:
        evidence["note"] = f"tocsin-probe told it and does no more: {probed.why}"
    method = "exact" if waiting.value <= 0 else "bound"
    if warm:
        return ask.idle(warm, age_s, method=method, evidence=evidence)
    return ask.value(age_s, at=waiting.at, method=method, evidence=evidence, low=low_s, high=high_s)


def probe_evidence(ask: Ask, evidence: dict[str, Any]) -> dict[str, Any]:
    """What the probe tells of requests that wait: how many were never scheduled, and the age without a first token."""
    assert ask.target is not None  # noqa: S101
    for name, subject in (("probe_queued", ask.subject), ("probe_first_token_age_s", ask.target.name)):
        got = ask.windows.latest(subject, name, ask.now)
        if isinstance(got, Sample):
            evidence[{"probe_queued": "queued"}.get(name, "no_first_token_age_s")] = got.value
    return evidence


def queue_age_bound(ask: Ask, waiting: Sample) -> tuple[float, float, float | None]:
    """(age, at least, at most) of the head of the queue in seconds; at most is None where the wait began unseen."""
    if waiting.value <= 0:
        return 0.0, 0.0, 0.0
    started_at = ask.windows.restarted_at(ask.subject, "waiting") or 0.0
    teller = ask.teller("ttft")
    age_s, low_s, high_s = head_age(ask.windows.backward(ask.subject, ("ttft", "count", teller), ("waiting", "")),
                                    started_at)
    if teller != ask.subject:  # counted for all engines together: the count runs ahead of this queue, the age is more
        return age_s, low_s, head_age(without_count(ask), started_at)[2]
    less = without_preempted(ask, started_at)
    if less:
        age_s, low_s, _ = head_age(less, started_at)
    return age_s, low_s, high_s


def head_age(rows: Iterable[tuple[float, ...]], started_at: float) -> tuple[float, float, float | None]:
    """The same from (at, first tokens so far, waiting) of each read, newest first."""
    head = now = after_at = after = None
    for at, first, wait in rows:
        if head is None or now is None or after_at is None or after is None:
            if wait <= 0:
                return 0.0, 0.0, 0.0
            head, now, after_at, after = first + 1, at, at, first + wait
            continue
        arrived = first + wait
        if at < started_at:  # an older process's queue: the head arrived after its last page
            return now - after_at, now - after_at, now - at
        if arrived < head:
            share = (head - arrived) / (after - arrived)
            return now - (at + share * (after_at - at)), now - after_at, now - at
        after_at, after = at, arrived
    return (0.0, 0.0, None) if now is None or after_at is None else (now - after_at, now - after_at, None)


def without_count(ask: Ask) -> Iterator[tuple[float, ...]]:
    """(at, fewest that can have begun, counted from now, waiting) of each read, newest first: those by which the queue
    became shorter from one read to the next. Many more may have begun, so the head may be younger, and not older."""
    left, later = 0.0, None
    for at, waits in ask.windows.backward(ask.subject, ("waiting", "")):
        left -= max(0.0, waits - later) if later is not None else 0.0
        later = waits
        yield at, left, waits


def without_preempted(ask: Ask, started_at: float) -> list[tuple[float, float, float]]:
    """(at, first tokens so far, waiting for their first) of each read since nobody waited, newest first.

    A gauge of waiting requests holds preempted ones, too, and those have had their first token. Of all that had one, so
    many have ended and so many run; the rest was preempted and waits. Clients that leave in mid-answer are counted
    nowhere: what was so when nobody waited is taken off, and no more are preempted than now run less than did at most.
    Empty: nothing was preempted, or it cannot be told (what counts no preemptions keeps its paused requests apart).
    """
    ends = [("finished", reason) for reason in ask.windows.keys_now(ask.subject, "finished")]
    if not ends or not ask.windows.keys_now(ask.subject, "preemptions") or ask.teller("ttft") != ask.subject:
        return []
    rows: list[tuple[float, ...]] = []
    for row in ask.windows.backward(
            ask.subject, ("ttft", "count"), ("waiting", ""), ("running", ""), ("kv_usage", ""), *ends):
        rows.append(row)
        if row[2] <= 0 or row[0] < started_at:
            break
    if not rows or rows[-1][2] > 0 or rows[-1][0] < started_at or max(row[4] for row in rows) < CROWDED_KV:
        return []
    _, first, _, running, _, *ended = rows[-1]
    lost, most = first - sum(ended) - running, max(row[3] for row in rows)
    return [(at, first, waits - max(0.0, min(waits, first - sum(ended) - lost - runs, most - runs)))
            for at, first, waits, runs, _, *ended in rows]


def kv_cache_utilization(ask: Ask) -> Signal:
    """H2. The share of KV-cache blocks that requests refer to."""
    sleeping = ask.asleep()
    got = ask.latest("kv_usage")
    if sleeping or isinstance(got, Signal):
        return sleeping or got  # type: ignore[return-value]
    return stale(ask, "kv_usage", got.value) or ask.value(got.value, at=got.at)


def preemptions(ask: Ask) -> Signal:
    """H3. Preemptions in the window (an hour); vLLM counts one at its victim's next output."""
    missing = ask.asleep() or ask.problem("preemptions") or ask.uncovered("preemptions")
    if missing:
        return missing
    start = ask.start()
    return ask.value(ask.count("preemptions", ask.subject, start), at=ask.told_at("preemptions"),
                     evidence={"window_s": ask.window_s()})


def graph_fallback(ask: Ask) -> Signal:
    """H4. Decode steps that ran eager though their shape is captured; no stock vLLM tells it, SGLang without sizes."""
    if ask.windows.track_of(ask.subject, "probe_graph_steps") or (ask.subject, "probe_graph_steps") in ask.windows.gaps:
        return probed_fallback(ask)
    got = ask.windows.latest(ask.subject, "graph_fallback", ask.now)
    if isinstance(got, Sample):
        warm = ask.warming_up("graph_fallback")
        return ask.asleep() or (ask.idle(warm, got.value) if warm else ask.value(got.value, at=got.at))
    trouble = ask.problem("graph_passes")
    if trouble is not None and (trouble.state == "na" or ask.windows.track_of(ask.subject, "graph_passes") is None):
        return ask.na("this engine does not tell its CUDA-graph fallbacks (vLLM: tocsin-probe would)")
    return estimated_fallback(ask)


def probed_fallback(ask: Ask) -> Signal:
    """H4 from the in-engine probe, which knows how each decode step ran and which sizes are captured."""
    missing = ask.asleep() or ask.problem("probe_graph_steps") or ask.uncovered("probe_graph_steps")
    if missing:
        return missing
    warm = ask.warming_up("waiting")
    if warm:
        return ask.idle(warm)
    steps = ask.windows.increases(ask.subject, "probe_graph_steps", ask.start())
    total = sum(steps.values())
    if total <= 0:
        return ask.idle("no decode step")
    largest = ask.windows.latest(ask.subject, "probe_graph_largest", ask.now)
    evidence: dict[str, Any] = {"eager_steps": steps.get("eager", 0.0), "over_captured_sizes": steps.get("over", 0.0),
                                "steps": total}
    evidence |= {"largest_captured": largest.value} if isinstance(largest, Sample) else {}
    return ask.value(steps.get("eager", 0.0) / total, at=ask.told_at("probe_graph_steps"), method="exact: probe",
                     evidence=evidence)


def estimated_fallback(ask: Ask) -> Signal:
    """H4 from decode steps by mode, whatever their sizes: up to the rule's `estimate` is what sizes may explain."""
    missing = ask.asleep() or ask.problem("graph_passes") or ask.uncovered("graph_passes")
    if missing:
        return missing
    warm = ask.warming_up("graph_passes")
    if warm:
        return ask.idle(warm)
    passes = ask.windows.increases(ask.subject, "graph_passes", ask.start())
    eager, steps = passes.get("eager", 0.0), sum(passes.values())
    if steps <= 0:
        return ask.idle("no decode step")
    share, most = eager / steps, float(ask.rule.params["estimate"])
    evidence: dict[str, Any] = {"eager_share": share, "eager_steps": eager, "steps": steps}
    if 0 < share <= most:
        evidence["note"] = f"up to {most:.0%} may be steps over the captured sizes: taken for none"
    return ask.value(share if share > most else 0.0, at=ask.told_at("graph_passes"), method="estimate",
                     evidence=evidence)


def latency_buckets(ask: Ask, name: str, start: float) -> Buckets:
    """A histogram's increase since `start`, all engines of the target added bound by bound."""
    assert ask.target is not None  # noqa: S101  (subjects of this signal are targets)
    memo = ask.scene.memo
    if (ask.target.name, name, start) not in memo:
        memo[(ask.target.name, name, start)] = add_buckets(
            ask.windows.buckets(engine, name, start) for engine in ask.scene.tellers(ask.target, name))
    buckets: Buckets = memo[(ask.target.name, name, start)]
    return buckets


def slow_signal(name: str) -> Callable[[Ask], Signal]:
    """H5, H6, M2. Wilson's lower bound of the share that was certainly slower than the SLO."""
    return lambda ask: judge_slow(ask, name, undecided=False)


def undecided_signal(name: str) -> Callable[[Ask], Signal]:
    """The same for what was possibly slower, where what is certain does not decide: the SLO lies inside a bucket."""
    return lambda ask: judge_slow(ask, name, undecided=True)


def judge_slow(ask: Ask, name: str, *, undecided: bool) -> Signal:
    """A target's slow share over the rule's window, or over 30 m where that has too few observations."""
    limit_s = promised(ask, "limit")
    if limit_s is None:
        return ask.na(f"slo.{ask.rule.params['limit'][1]} is not set")
    missing = target_trouble(ask, name)
    if missing:
        return missing
    buckets, window_s = enough(ask, name)
    n = buckets[-1][1] if buckets else 0.0
    needed = ask.rule.min_count or 1
    if n < needed:
        last = f"{window_s / 60:.0f} min" if window_s >= 120 else f"{window_s:.0f} s"
        return ask.idle(f"{n:.0f} of at least {needed} in the last {last}")
    few = too_few_requests(ask, window_s)
    if few:
        return few
    return slow_verdict(ask, name, buckets, limit_s, window_s, undecided=undecided)


def slow_verdict(ask: Ask, name: str, buckets: Buckets, limit_s: float, window_s: float, *, undecided: bool) -> Signal:
    """Certain or possible slow share as a signal, with p99, n and the bounds as evidence."""
    if zeros_only(ask, name, buckets, window_s):
        return ask.gap(Why.NO_DATA, f"all {buckets[-1][1]:.0f} observations are 0 s: the engine records zeros")
    if miscounted(ask, name, buckets, window_s):
        return ask.gap(Why.OUT_OF_RANGE, "its buckets hold less than its count: each tells only its own, not all below")
    share, evidence = measured_share(ask, name, buckets, limit_s, window_s)
    possible = counted(ask, share.possible, share.n)
    if math.isinf(share.high_bound) and possible > ask.rule.factor:  # else it is in range wherever they lie
        return ask.gap(Why.OFF_SCALE, f"{share.possible:.0f} of {share.n:.0f} are over the last bound"
                       f" {share.low_bound:g} s and the limit {limit_s:g} s lies above it")
    certain = counted(ask, share.certain, share.n)
    assert ask.target is not None  # noqa: S101
    at = ask.told_at(name, *ask.scene.tellers(ask.target, name))
    judged = certain if not undecided else 0.0 if certain > ask.rule.factor else possible
    return ask.value(judged, at=at, method="histogram", evidence=evidence)


def measured_share(ask: Ask, name: str, buckets: Buckets, limit_s: float, window_s: float,
                   ) -> tuple[SlowShare, dict[str, Any]]:
    """What a target's buckets say of a limit, and the evidence: the same for what is certain and what is possible."""
    memo, key = ask.scene.memo, (ask.subject, name, "share", limit_s, window_s, ask.start(window_s))
    if key not in memo:
        share = slow_share(limit_s, buckets)
        memo[key] = share, {
            "p99_s": quantile(0.99, buckets), "p99_over": in_last_bucket(0.99, buckets), "n": share.n,
            "window_s": window_s, "slow": share.certain, "possibly_slow": share.possible, "slo_s": limit_s,
            "bounds_s": [share.low_bound, share.high_bound]}
    share, evidence = memo[key]
    return share, dict(evidence)


def counted(ask: Ask, bad: float, n: float) -> float:
    """Wilson's lower bound of bad in n; 0 below the rule's smallest number of bad ones."""
    return wilson_lower(bad, n) if bad >= (ask.rule.min_bad or 0) else 0.0


def zeros_only(ask: Ask, name: str, buckets: Buckets, window_s: float) -> bool:
    """Every observation in the first bucket with a sum of 0: an engine that records zeros proves nothing."""
    if not buckets or buckets[0][1] < buckets[-1][1]:
        return False
    assert ask.target is not None  # noqa: S101
    sums = [ask.windows.increases(e, name, ask.start(window_s)).get("sum")
            for e in ask.scene.tellers(ask.target, name)]
    return all(total == 0 for total in sums)  # a sum that is not told (None) proves nothing either


def miscounted(ask: Ask, name: str, buckets: Buckets, window_s: float) -> bool:
    """Buckets that are not cumulative, as some exporters write them: +Inf is not the count."""
    assert ask.target is not None  # noqa: S101
    tellers, start = ask.scene.tellers(ask.target, name), ask.start(window_s)
    if any("count" not in ask.windows.keys_now(e, name) or (ask.windows.restarted_at(e, name) or 0.0) > start
           for e in tellers):  # after a restart its buckets may be younger than its count
        return False
    return sum(ask.count(name, e, start, "count") for e in tellers) > MISCOUNT * buckets[-1][1]


def target_trouble(ask: Ask, name: str) -> Signal | None:
    """Why a target is not judged: asleep as a whole, not told, not covered, warming up."""
    memo, key = ask.scene.memo, (ask.subject, name, "no trouble", ask.window_s())
    if key in memo:
        return None
    trouble = find_trouble(ask, name)
    if trouble is None:
        memo[key] = True
    return trouble


def find_trouble(ask: Ask, name: str) -> Signal | None:
    """The looking behind target_trouble."""
    assert ask.target is not None  # noqa: S101
    if not ask.target.engines:
        return ask.gap(Why.MISSING, "no page was read yet")
    if all(ask.scene.sleeps(e) for e in ask.target.engines):
        return ask.na("asleep")
    for engine in ask.scene.tellers(ask.target, name):
        trouble = ask.problem(name, engine) or ask.uncovered(name, engine)
        if trouble:
            return trouble
        warm = ask.warming_up(name, subject=engine)
        if warm:
            return ask.idle(warm)
    return None


def enough(ask: Ask, name: str) -> tuple[Buckets, float]:
    """The increase over the rule's window, or over 30 m where that has too few and 30 m were watched."""
    window_s = ask.window_s()
    buckets = latency_buckets(ask, name, ask.start())
    if buckets and buckets[-1][1] >= (ask.rule.min_count or 1):
        return buckets, window_s
    long_s = ask.window_s(1800.0)
    assert ask.target is not None  # noqa: S101
    watched = min(ask.windows.watched_s(e, name, ask.now - long_s) for e in ask.scene.tellers(ask.target, name))
    if watched < HALF * long_s:
        return buckets, window_s
    return latency_buckets(ask, name, ask.start(long_s)), long_s


def too_few_requests(ask: Ask, window_s: float) -> Signal | None:
    """Many gaps between tokens may come from a handful of requests: those say nothing of p99."""
    needed = ask.rule.params.get("min_requests")
    if needed is None or ask.target is None:
        return None
    name = "user_ttft" if ask.spec.subject == "user" else "ttft"
    requests = sum(ask.count(name, e, ask.start(window_s), "count") for e in ask.scene.tellers(ask.target, name))
    return ask.idle(f"{requests:.0f} of at least {needed:.0f} requests") if requests < needed else None


def promised(ask: Ask, param: str) -> float | None:
    """A parameter that may refer to the SLO: a number, or (factor, key of slo)."""
    value = ask.rule.params[param]
    if isinstance(value, tuple):
        factor, key = value
        level: float | None = getattr(ask.slo, key)
        return None if level is None else factor * level
    return float(value)


def errors_and_requests(ask: Ask, target: Target, start: float) -> tuple[float, float, str]:
    """(errors, requests, how) of a target since `start`.

    Errors: the larger of HTTP 5xx and of (finished with error + refused admissions), never their sum: a refusal is a
    503 too. 429 counts only where exact codes are told; other 4xx are the client's.
    """
    memo = ask.scene.memo
    if (target.name, "errors", start) not in memo:
        own = count_errors(ask.windows, target, start, ask.now)
        routed = count_routed(ask.scene, target, start)
        # the router's word is better, if it is through this router that most requests come
        memo[(target.name, "errors", start)] = routed if routed is not None and 2 * routed[1] >= own[1] else own
    counts: tuple[float, float, str] = memo[(target.name, "errors", start)]
    return counts


def count_errors(windows: Windows, target: Target, start: float, now: float) -> tuple[float, float, str]:
    """The counting behind errors_and_requests."""
    by_status = windows.increases(target.name, "http", start) if told(windows, target.name, "http", now) else {}
    refused = sum(windows.increases(target.name, "rejections", start).values())
    finished: dict[str, float] = {}
    for engine in tellers(windows, target, "finished"):
        for reason, rise in windows.increases(engine, "finished", start).items():
            finished[reason] = finished.get(reason, 0.0) + rise
    sent, failed = (windows.increase(target.name, name, start) for name in ("canary_requests", "canary_errors"))
    errors, n, how = errors_among(by_status, finished, refused)
    return max(0.0, errors - failed), max(0.0, n - sent), how


def errors_among(by_status: Mapping[str, float], finished: Mapping[str, float], refused: float,
                 ) -> tuple[float, float, str]:
    """(errors, requests, how) of what HTTP statuses, finish reasons and refused admissions tell."""
    from_http = sum(v for k, v in by_status.items() if k.startswith("5") or k == "429")
    from_engine = finished.get("error", 0.0) + refused
    if by_status:
        return max(from_http, from_engine), max(sum(by_status.values()), from_engine), "engine (lower bound)"
    return from_engine, sum(finished.values()) + refused, "engine's finish reasons (lower bound)"


def count_routed(scene: Scene, target: Target, start: float) -> tuple[float, float, str] | None:
    """(errors, requests, how) of a target as a router counts them; None where none tells its share."""
    for router in scene.routers:
        if not told(scene.windows, router, "router_worker_requests", scene.now):
            continue
        n, errors = (sum(rise for key, rise in scene.windows.increases(router, name, start).items()
                         if replica_of(target, key)) for name in ("router_worker_requests", "router_worker_errors"))
        if n > 0:
            return errors, n, f"router {router}"
    return None


def told(windows: Windows, subject: str, name: str, now: float) -> bool:
    """A counter is told now."""
    return windows.problem(subject, name, now) is None


def error_trouble(ask: Ask, target: Target) -> Signal | None:
    """Why a target's errors are not told, neither by HTTP status nor by finish reason; N/A while it sleeps."""
    if not target.engines:
        return ask.gap(Why.MISSING, "no page was read yet")
    if all(ask.scene.sleeps(e) for e in target.engines):
        return ask.na("asleep")
    if told(ask.windows, target.name, "http", ask.now) or count_routed(ask.scene, target, ask.start()) is not None:
        return None
    by = ask.scene.tellers(target, "finished")
    return next((trouble for e in by if (trouble := ask.problem("finished", e))), None)


def error_burn(ask: Ask) -> Signal:
    """H7. Burn of the error budget, as a multiple of the rule's factor: the worst of its (long, short) window pairs.

    burn = Wilson's lower bound of errors ÷ requests, ÷ (1 − availability), x min(1, watched ÷ window).
    """
    of_node = ask.spec.subject == "node" or ask.target is None
    targets = list(ask.scene.targets.values()) if of_node or ask.target is None else [ask.target]
    slo = ask.scene.slo if of_node else ask.slo
    troubles = [error_trouble(ask, t) for t in targets]
    judged = [t for t, trouble in zip(targets, troubles, strict=True) if trouble is None]
    if not judged:
        first = next((t for t in troubles if t), None)
        return first or ask.idle("no engine here")
    pairs = ask.rule.params["pairs"]
    if spent(ask, judged, max(pair["long"] for pair in pairs))[0] <= 0:
        return nothing_burnt(ask, judged, pairs)
    ratios: list[float] = []
    evidence = {"watched_s": errors_watched_s(ask, judged, pairs)}
    for pair in pairs:
        long_burn, _ = burn(ask, judged, pair["long"], slo)
        short_burn, recent = burn(ask, judged, pair["short"], slo)
        evidence[f"burn_{span(pair['long'])}"] = long_burn
        evidence[f"burn_{span(pair['short'])}"] = short_burn
        if recent > 0:  # no request in the short window: nothing to judge, and not "no error"
            ratios.append(min(long_burn, short_burn) / pair["factor"])
    if not ratios:
        return ask.idle("no requests", evidence=evidence)
    at = max(error_told_at(ask, t) for t in judged)
    return ask.value(max(ratios), at=at, method="engine (lower bound)", evidence=evidence)


def nothing_burnt(ask: Ask, judged: list[Target], pairs: Sequence[Mapping[str, float]]) -> Signal:
    """What error_burn says where the longest window holds no error: then none holds any, and they need no counting."""
    evidence = {"watched_s": errors_watched_s(ask, judged, pairs)}
    evidence |= {f"burn_{span(pair[end])}": 0.0 for pair in pairs for end in ("long", "short")}
    if spent(ask, judged, max(pair["short"] for pair in pairs))[1] <= 0:
        return ask.idle("no requests", evidence=evidence)
    at = max(error_told_at(ask, t) for t in judged)
    return ask.value(0.0, at=at, method="engine (lower bound)", evidence=evidence)


def errors_watched_s(ask: Ask, judged: list[Target], pairs: Sequence[Mapping[str, float]]) -> float:
    """For how much of the longest window errors were watched: a drill asks how well its budget is known."""
    start = ask.now - max(pair["long"] for pair in pairs)
    return max(ask.windows.watched_s(subject, name, start) for t in judged for subject, name in errors_told_by(ask, t))


def errors_told_by(ask: Ask, target: Target) -> list[tuple[str, str]]:
    """The (subject, name) that tell a target's errors."""
    routed = [(r, "router_worker_requests") for r in ask.scene.routers
              if any(replica_of(target, key) for key in ask.windows.keys(r, "router_worker_requests"))]
    return [(target.name, "http"), *((by, "finished") for by in ask.scene.tellers(target, "finished")), *routed]


@lru_cache(256)
def span(seconds: float) -> str:
    """A window in its largest whole unit: 5m, 6h, 3d."""
    size, unit = next(((n, u) for n, u in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")) if seconds % n == 0), (1.0, "s"))
    return f"{seconds / size:g}{unit}"


def error_told_at(ask: Ask, target: Target) -> float:
    """When a target's errors were last read."""
    told_at = [at for subject, name in errors_told_by(ask, target)
               if (at := ask.windows.told_at(subject, name)) is not None]
    return max(told_at, default=ask.now)


def burn(ask: Ask, targets: list[Target], window_s: float, slo: Slo) -> tuple[float, float]:
    """(burn rate, requests) over a window, all targets added: what was really spent of the window's budget.

    After a resolve only what came later counts, and so spends only its share of the window.
    """
    start = ask.start(window_s)
    errors, n = spent(ask, targets, window_s)
    if errors <= 0:
        return 0.0, n
    watched_s = max((ask.windows.watched_s(subject, name, start) for t in targets
                     for subject, name in errors_told_by(ask, t)), default=0.0)
    return wilson_lower(errors, n) / (1 - slo.availability) * min(1.0, watched_s / window_s), n


def spent(ask: Ask, targets: list[Target], window_s: float) -> tuple[float, float]:
    """(errors, requests) over a window, all targets added."""
    start = ask.start(window_s)
    counts = [errors_and_requests(ask, t, start) for t in targets]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def rank_step_spread(ask: Ask) -> Signal:
    """H8. Spread of compute time over the ranks: they make the same steps, so of their seconds it is that of a step."""
    if ask.windows.keys_now(ask.subject, "probe_rank_seconds"):
        return probed_spread(ask)
    hidden = ask.windows.gaps.get((ask.subject, "probe_rank_seconds"))
    told = ask.windows.problem(ask.subject, "rank_seconds", ask.now)
    ranks = ask.windows.keys(ask.subject, "rank_seconds")
    if not ranks or (told is not None and told.code is Why.NOT_SUPPORTED):
        if hidden is not None:
            return ask.asleep() or profiled_spread(ask, hidden.why) if hidden.code is Why.NOT_SUPPORTED \
                else ask.gap(hidden.code, hidden.why)
        return ask.na("compute time per rank is told by no stock vLLM (tocsin-probe would), by SGLang only with"
                      " --enable-metrics-for-all-schedulers; see rank-clock-spread")
    missing = ask.asleep() or ask.problem("rank_seconds") or ask.uncovered("rank_seconds")
    if missing:
        return missing
    now = ask.windows.keys_now(ask.subject, "rank_seconds")
    missing = rank_gone(ask, "rank_seconds", now)
    if missing:
        return missing
    if len(now) == 1:
        return ask.na("one rank tells its time: compare them with --enable-metrics-for-all-schedulers")
    late = newcomer(ask, "rank_seconds", now)
    if late is not None:
        return ask.idle(f"rank {late} had computed nothing when this window began")
    seconds = {rank: rise for rank, rise in ask.windows.increases(ask.subject, "rank_seconds", ask.start()).items()
               if rank in now}
    steps = sum(ask.windows.increases(ask.subject, "graph_passes", ask.start()).values())
    needed = float(ask.rule.params["steps"])
    if steps < needed:
        return ask.idle(f"{steps:.0f} of at least {needed:.0f} decode steps")
    found = spread_of(ask, seconds)
    if found is None:
        return ask.idle("no rank computed")
    spread, evidence = found
    return ask.value(spread, at=ask.told_at("rank_seconds"), method="engine's own seconds per rank",
                     evidence=evidence | {"steps": steps})


def rank_rows_from(ask: Ask, name: str) -> float:
    """Where the rows of this window and of this start of the engine begin: an earlier one may have had other ranks."""
    return max(ask.start(), ask.windows.restarted_at(ask.subject, name) or 0.0)


def rank_gone(ask: Ask, name: str, now: Set[str]) -> Signal | None:
    """A rank that told its time in this window and does not now: of what is left nobody can be called slow or even."""
    start = rank_rows_from(ask, name)
    gone = sorted(rank for rank in ask.windows.keys(ask.subject, name)
                  if rank not in now and any(ask.windows.history(ask.subject, name, start, rank)))
    return ask.gap(Why.MISSING, f"rank {', '.join(gone)} tells its time no more") if gone else None


def newcomer(ask: Ask, name: str, now: Set[str]) -> str | None:
    """The rank that had counted nothing where the others' count of this window begins: theirs are other steps."""
    start = rank_rows_from(ask, name)
    first = {rank: row for rank in sorted(now)
             if (row := next(ask.windows.history(ask.subject, name, start, rank), None)) is not None}
    begun = min((at for at, _ in first.values()), default=0.0) + 2 * ask.windows.interval_s
    working = any(total > 0 for _, total in first.values())
    return next((rank for rank, (at, total) in first.items() if at > begun or (working and total <= 0)), None)


def spread_of(ask: Ask, seconds: Mapping[str, float]) -> tuple[float, dict[str, Any]] | None:
    """(max − min) ÷ median of seconds by rank, and who is slow; None where nobody computed."""
    middle = median(seconds.values())
    if middle <= 0:
        return None
    slow = max(seconds, key=lambda rank: seconds[rank])
    evidence: dict[str, Any] = {"slow_rank": slow, "slow_s": seconds[slow], "median_s": middle}
    if ask.target is not None and slow.isdigit() and int(slow) < len(ask.target.gpus):
        index = ask.target.gpus[int(slow)]
        evidence["slow_gpu"] = next((g.uuid for g in ask.scene.gpus.values() if g.index == index), f"GPU {index}")
    return (seconds[slow] - min(seconds.values())) / middle, evidence


def worst_stage(ask: Ask, seconds: Mapping[str, float]) -> tuple[float, dict[str, Any]] | None:
    """The largest spread of a tensor-parallel group: the stages of a pipeline do not make the same steps."""
    size = ask.windows.latest(ask.subject, "probe_tp_size", ask.now)
    of = int(size.value) if isinstance(size, Sample) and size.value >= 1 else len(seconds)
    stages: dict[int, dict[str, float]] = {}
    for rank, value in seconds.items():
        stages.setdefault(int(rank) // of, {})[rank] = value
    found = [one for stage in stages.values() if len(stage) > 1 and (one := spread_of(ask, stage)) is not None]
    return max(found, key=lambda one: one[0], default=None)


def probed_spread(ask: Ask) -> Signal:
    """H8 from the in-engine probe: each rank's time in a step without what it waited in collectives."""
    missing = ask.asleep() or ask.problem("probe_rank_seconds") or ask.uncovered("probe_rank_seconds")
    if missing:
        return missing
    now = ask.windows.keys_now(ask.subject, "probe_rank_seconds")
    if len(now) < 2:
        return ask.gap(Why.MISSING, f"rank {', '.join(now)} alone tells its time")
    missing = rank_gone(ask, "probe_rank_seconds", now)
    if missing:
        return missing
    steps, seconds = ({rank: rise for rank, rise in ask.windows.increases(ask.subject, name, ask.start()).items()
                       if rank in now} for name in ("probe_rank_steps", "probe_rank_seconds"))
    watched = ask.count("probe_steps", ask.subject, ask.start())
    needed = float(ask.rule.params["steps"])
    if watched < needed:
        return ask.idle(f"{watched:.0f} of at least {needed:.0f} steps")
    found = worst_stage(ask, {rank: seconds[rank] / steps[rank] for rank in now if steps.get(rank)})
    if found is None:
        return ask.idle("no step was timed")
    spread, evidence = found
    return ask.value(spread, at=ask.told_at("probe_rank_seconds"), method="exact: probe",
                     evidence=evidence | {"steps": watched, "timed_steps": min(steps.values())} | entry_skew(ask))


def entry_skew(ask: Ask) -> dict[str, Any]:
    """How late the last host enters a step, and whose it is."""
    late = {rank: got.value for rank in ask.windows.keys_now(ask.subject, "probe_rank_late_s")
            if isinstance(got := ask.windows.latest(ask.subject, "probe_rank_late_s", ask.now, rank), Sample)}
    if not late:
        return {}
    last = max(late, key=lambda rank: late[rank])
    return {"late_rank": last, "late_by_s": late[last]}


def profiled_spread(ask: Ask, why: str) -> Signal:
    """H8 where the host sees no collective: by profiled steps where somebody asked for them, else the skew is shown."""
    window_s = max(ask.window_s(), 1800.0)
    steps, seconds = (ask.windows.increases(ask.subject, name, ask.start(window_s))
                      for name in ("probe_profiled_steps", "probe_profiled_seconds"))
    skew = entry_skew(ask)
    if len(steps) > 1 and min(steps.values()) >= PROFILED:
        found = worst_stage(ask, {rank: seconds[rank] / count for rank, count in steps.items()})
        if found is not None:
            return ask.value(found[0], at=ask.told_at("probe_profiled_steps"), method="estimate: profiled steps",
                             evidence=found[1] | {"profiled_steps": min(steps.values())} | skew)
    late_ms = 1000 * skew.get("late_by_s", 0.0)
    shown = f"; rank {skew['late_rank']} enters a step {late_ms:.2f} ms after the first" if skew else ""
    return ask.na(f"{why}{shown}; TOCSIN_PROBE_PROFILE_MINUTES=10 in the engine's environment profiles one step in 10"
                  " min; see rank-clock-spread")


def rank_clock_spread(ask: Ask) -> Signal:
    """H8. 1 − slowest ÷ fastest SM clock of the ranks' GPUs while all are busy and hardware holds the slow one back."""
    assert ask.target is not None  # noqa: S101
    sleeping = ask.asleep()
    if sleeping:
        return sleeping
    if len(ask.target.gpus) < 2:
        return ask.na("which GPUs its ranks are on is not known: name them under `engines: gpus:`")
    clocks: dict[str, float] = {}
    by_index = {g.index: g for g in ask.scene.gpus.values()}
    for index in ask.target.gpus:
        gpu = by_index.get(index)
        if gpu is None:
            return ask.gap(Why.MISSING, f"GPU {index}, named in the configuration, is not there")
        clock, util = ask.latest("gpu_sm_clock_mhz", gpu.uuid), ask.latest("gpu_util", gpu.uuid)
        if isinstance(clock, Signal) or isinstance(util, Signal):
            return next(s for s in (clock, util) if isinstance(s, Signal))
        if util.value < HALF:
            return ask.idle("not all ranks are busy")
        clocks[gpu.uuid] = clock.value
    slow = min(clocks, key=lambda u: clocks[u])
    spread = 1 - clocks[slow] / max(clocks.values()) if max(clocks.values()) > 0 else 0.0
    evidence = {"slow_rank": list(clocks).index(slow), "slow_gpu": slow, "sm_clock_mhz": clocks[slow],
                "fastest_mhz": max(clocks.values())}
    reason = ask.latest("gpu_throttle", slow)
    if isinstance(reason, Signal):
        return reason
    held = int(reason.value) & (HW_THERMAL | HW_POWER_BRAKE)
    if not held and spread > ask.rule.factor:
        return ask.idle("no hardware thermal or power-brake reason on the slow GPU", spread, evidence=evidence)
    evidence["reason"] = "hardware thermal" if held & HW_THERMAL else "power brake" if held else "none"
    return ask.value(spread, method="estimate: clocks", evidence=evidence)


def gpu_temperature(ask: Ask) -> Signal:
    """H9. The GPU's temperature."""
    got = hardware.latest_told(ask, "gpu_temp_c")
    return got if isinstance(got, Signal) else ask.value(got.value, at=got.at, evidence=gpu_evidence(ask))


def gpu_evidence(ask: Ask) -> dict[str, Any]:
    """What a person asks next of a hot GPU."""
    names = ("gpu_margin_c", "gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz", "gpu_throttle", "gpu_power_w", "gpu_util")
    got = {name: ask.windows.latest(ask.subject, name, ask.now) for name in names}
    return {name: s.value for name, s in got.items() if isinstance(s, Sample)}


def gpu_thermal_margin(ask: Ask) -> Signal:
    """H9. Kelvins left to the card's own limit; 0 while hardware slows it for heat; else to the rule's `fallback`.

    What was told before and is not now may be bad: a Gap, where the other one does not say that it is.
    """
    temp, margin, reason = (hardware.latest_told(ask, n) for n in ("gpu_temp_c", "gpu_margin_c", "gpu_throttle"))
    slowed = isinstance(reason, Sample) and int(reason.value) & HW_THERMAL
    unknown = next((one for one, name in ((margin, "gpu_margin_c"), (reason, "gpu_throttle"))
                    if isinstance(one, Signal) and hardware.was_told(ask, name)), None)
    if unknown is not None and not slowed and (isinstance(margin, Signal) or margin.value > 0):
        return unknown
    if isinstance(margin, Sample):
        left, method = margin.value, "exact"
    elif isinstance(temp, Signal):
        if not slowed:
            return temp
        left, method = 0.0, ""
    else:
        over = temp.value - float(ask.rule.params["fallback"])
        # "> 85" and not ">= 85"; and only where the card tells neither a limit nor that it slows down
        hot = over > 0 and not isinstance(reason, Sample)
        left, method = (-over if hot else max(-over, 0.5)), "fallback limit"
    if slowed:
        left, method = min(left, 0.0), "hardware thermal slowdown"
    evidence: dict[str, Any] = gpu_evidence(ask)
    if not isinstance(temp, Signal):
        own = {"own_limit_c": temp.value + margin.value} if isinstance(margin, Sample) else {}
        evidence |= {"gpu_temp_c": temp.value, "slowed": bool(slowed), **own}
    at = next((s.at for s in (margin, temp, reason) if isinstance(s, Sample)), None)
    return ask.value(left, at=at, method=method, evidence=evidence)


def prefix_cache_hit_rate(ask: Ask) -> Signal:
    """H10. Prefix-cache hits ÷ queries, in tokens."""
    caching = ask.windows.latest(ask.subject, "prefix_caching", ask.now)
    if isinstance(caching, Sample) and caching.value <= 0:
        return ask.na("prefix caching is off")
    missing = ask.asleep() or ask.problem("prefix_queries", ask.teller("prefix_queries")) \
        or ask.problem("prefix_hits", ask.teller("prefix_hits"))
    if missing is not None and missing.state == "na" and ask.scene.sleeps(ask.subject) is False:
        return told_hit_rate(ask) or missing
    missing = missing or ask.uncovered("prefix_queries", ask.teller("prefix_queries"))
    if missing:
        return missing
    cold = cold_cache(ask, "prefix_queries")
    if cold:
        return ask.idle(cold)
    start = ask.start()
    queries, hits = (ask.count(name, ask.teller(name), start) for name in ("prefix_queries", "prefix_hits"))
    needed = ask.rule.min_count or 1
    if queries < needed:
        return ask.idle(f"{queries:.0f} of at least {needed} tokens looked up")
    if hits > queries * SHARE_TOP:
        return ask.gap(Why.OUT_OF_RANGE, f"{hits:.0f} hits of {queries:.0f} tokens looked up: not counted alike")
    rate = hits / queries
    evidence: dict[str, Any] = {"hits_tokens": hits, "queries_tokens": queries}
    if rate < NOT_WORTH_IT:
        evidence["note"] = "does not pay for itself"
    if ask.count("preemptions", ask.subject, start) > 0:
        return ask.idle("preemptions in the window inflate it", rate, evidence=evidence)
    return ask.value(rate, at=ask.told_at("prefix_queries", ask.teller("prefix_queries")), evidence=evidence)


def cold_cache(ask: Ask, name: str) -> str | None:
    """Why a prefix cache cannot have hits yet: the engine (re)started, or woke from a sleep that emptied it."""
    warm = ask.warming_up(name, COLD_CACHE_S, ask.teller(name))
    if warm:
        return warm
    slept = ask.windows.last_over(ask.subject, "asleep", 0.0)
    return f"woke {ask.now - slept:.0f} s ago" if slept is not None and ask.now - slept < COLD_CACHE_S else None


def told_hit_rate(ask: Ask) -> Signal | None:
    """H10 where an engine counts no tokens and works the rate out itself; None where it does neither."""
    got = ask.windows.latest(ask.subject, "prefix_hit_ratio", ask.now)
    if not isinstance(got, Sample):
        return None if got.code is Why.NOT_SUPPORTED or ask.windows.track_of(
            ask.subject, "prefix_hit_ratio") is None else ask.gap(got.code, got.why)
    cold = cold_cache(ask, "prefix_hit_ratio")
    if cold:
        return ask.idle(cold, got.value)
    looked_up, needed = ask.count("prompt_tokens", ask.teller("prompt_tokens"), ask.start()), ask.rule.min_count or 1
    if looked_up < needed and ask.windows.keys_now(ask.teller("prompt_tokens"), "prompt_tokens"):
        return ask.idle(f"{looked_up:.0f} of at least {needed} prompt tokens", got.value)
    return ask.value(got.value, at=got.at, method="engine's own rate", evidence={"prompt_tokens": looked_up})


# --- the rest of the monitoring set ----------------------------------------------------------------------------------


def qps_change(ask: Ask) -> Signal:
    """M1. How far the last minute's arrivals are off from both baselines: the 30 m before, and yesterday's."""
    missing = target_trouble(ask, "ttft") or hushed(ask)
    if missing:
        return (routed_change(ask) if missing.state == "na" else None) or missing
    span_s = ask.window_s()
    current = arrivals(ask, ask.now - span_s, ask.now)
    before_s, day_s = 1800.0, 86400.0
    assert ask.target is not None  # noqa: S101
    first = ask.scene.tellers(ask.target, "ttft")[0]
    start, track = ask.now - span_s - before_s, ask.windows.track_of(first, "ttft")
    if track is None or ask.windows.watched_s(first, "ttft", start) < HALF * before_s:
        return ask.idle("learning the usual rate")
    began = max(start, track.times[0])  # a young agent was told of less than the 30 min
    expected = {"30 min before": arrivals(ask, began, ask.now - span_s) * span_s / (ask.now - span_s - began)}
    if ask.windows.watched_s(first, "ttft", ask.now - day_s - before_s / 2) > day_s * 0.9:
        middle = ask.now - day_s
        expected["yesterday"] = arrivals(ask, middle - before_s / 2, middle + before_s / 2) * span_s / before_s
    needed = ask.rule.min_count or 1
    if min(expected.values()) < needed:
        return ask.idle(f"{min(expected.values()):.0f} of at least {needed} requests expected in {span_s:.0f} s")
    off = min(abs(current / e - 1) for e in expected.values())
    at = ask.told_at("ttft", *ask.scene.tellers(ask.target, "ttft"))
    return ask.value(off, at=at, method="estimate: first tokens + waiting",
                     evidence={"requests": current} | expected)


def routed_change(ask: Ask) -> Signal | None:
    """M1 of an engine that counts no first tokens, by a router in front of it; None where none tells its share."""
    assert ask.target is not None  # noqa: S101
    if all(ask.scene.sleeps(e) for e in ask.target.engines):
        return None
    name, span_s, before_s = "router_worker_requests", ask.window_s(), 1800.0
    for router in ask.scene.routers:
        keys = [key for key in ask.windows.keys(router, name) if replica_of(ask.target, key)]
        if not keys or not told(ask.windows, router, name, ask.now):
            continue
        up_s = ask.started_s(name, router)
        if up_s is not None and up_s < RESTART_HUSH_S:
            return ask.idle(f"the router started {up_s:.0f} s ago")
        start, track = ask.now - span_s - before_s, ask.windows.track_of(router, name)
        if track is None or ask.windows.watched_s(router, name, start) < HALF * before_s:
            return ask.idle("learning the usual rate")
        began = max(start, track.times[0])
        current, before = (sum(ask.windows.increase(router, name, a, b, key) for key in keys)
                           for a, b in ((ask.now - span_s, ask.now), (began, ask.now - span_s)))
        expected, needed = before * span_s / (ask.now - span_s - began), ask.rule.min_count or 1
        if expected < needed:
            return ask.idle(f"{expected:.0f} of at least {needed} requests expected in {span_s:.0f} s")
        return ask.value(abs(current / expected - 1), at=ask.told_at(name, router), method=f"router {router}",
                         evidence={"requests": current, "30 min before": expected})
    return None


def hushed(ask: Ask) -> Signal | None:
    """Not judged for 15 m after a restart, or after an engine came in addition."""
    assert ask.target is not None  # noqa: S101
    for engine in ask.scene.tellers(ask.target, "waiting"):
        warm = ask.warming_up("waiting", RESTART_HUSH_S, engine)
        if warm:
            return ask.idle(warm)
        if ask.windows.level(engine, "waiting", ask.now - RESTART_HUSH_S) is None:
            return ask.idle(f"{engine} has been watched for less than {RESTART_HUSH_S / 60:.0f} min")
    return None


def arrivals(ask: Ask, start: float, end: float) -> float:
    """Requests that arrived: first tokens + change of waiting (aborts before the first token are missed)."""
    assert ask.target is not None  # noqa: S101
    total = 0.0
    for engine in ask.target.engines:
        before, after = ask.windows.level(engine, "waiting", start), ask.windows.level(engine, "waiting", end)
        total += 0.0 if before is None or after is None else after - before
    total += sum(ask.windows.increase(by, "ttft", start, end, "count") for by in ask.scene.tellers(ask.target, "ttft"))
    return max(0.0, total)


def gpu_utilization(ask: Ask) -> Signal:
    """M3. Mean utilization over the window while an engine on the GPU runs requests."""
    got = ask.latest("gpu_util")
    if isinstance(got, Signal):
        return got
    target = ask.scene.target_on(ask.subject)
    if target is None or not target.engines:
        return ask.idle("no engine is known on this GPU", got.value)
    if all(ask.scene.sleeps(e) for e in target.engines):
        return ask.na("asleep")
    warm = next((w for e in target.engines if (w := ask.warming_up("running", subject=e))), None)
    if warm:
        return ask.idle(warm, got.value)
    start = ask.start()
    step_s = ask.windows.interval_s
    busy = busy_at(ask, target, start)
    values = [v for at, v in ask.windows.history(ask.subject, "gpu_util", start)
              if (i := bisect_left(busy, at - step_s)) < len(busy) and busy[i] <= at + step_s]
    if len(values) * step_s < HALF * ask.window_s():
        return ask.idle("the engine on it ran too little to judge", got.value)
    return ask.value(sum(values) / len(values), at=got.at, evidence={"samples": len(values)})


def busy_at(ask: Ask, target: Target, start: float) -> list[float]:
    """The times since `start` at which an engine of the target ran requests and was awake."""
    memo = ask.scene.memo
    if (target.name, "busy", start) not in memo:
        asleep = {at for e in target.engines for at, v in ask.windows.history(e, "asleep", start) if v > 0}
        memo[(target.name, "busy", start)] = sorted(
            at for e in target.engines for at, v in ask.windows.history(e, "running", start)
            if v > 0 and at not in asleep)
    times: list[float] = memo[(target.name, "busy", start)]
    return times


def memory(ask: Ask, name: str) -> tuple[Sample, Sample] | Signal:
    """A GPU's used or free memory beside its total, or why there is none."""
    part, total = hardware.latest_told(ask, name), hardware.latest_told(ask, "gpu_mem_total")
    if isinstance(part, Signal):
        return part
    if isinstance(total, Signal):
        return total
    return (part, total) if total.value > 0 else ask.na("this GPU tells no memory size")


def gpu_memory(ask: Ask) -> Signal:
    """M4. Memory used ÷ total. What was so 10 m after the engine's start is by design: shown, and wakes nobody."""
    told = memory(ask, "gpu_mem_used")
    if isinstance(told, Signal):
        return told
    used, total = told
    share = used.value / total.value
    at_start = ask.scene.gpu_full_at_start.get(ask.subject)
    evidence = {"used_bytes": used.value, "total_bytes": total.value, "at_start": at_start}
    quiet = None
    if at_start is None:
        quiet = not_settled(ask)
    elif at_start > ask.rule.factor:
        quiet = "it was so 10 min after the engine's start"
    return ask.value(share, at=used.at, evidence=evidence, quiet=quiet)


def not_settled(ask: Ask) -> str | None:
    """Why it is too early to say what the engine on a GPU is meant to hold; None where nobody is awaited."""
    target = ask.scene.target_on(ask.subject)
    up_s = None if target is None or not target.engines else ask.started_s("running", target.engines[0])
    return f"the engine started {up_s:.0f} s ago" if up_s is not None and up_s < SETTLED_S else None


def gpu_memory_low(ask: Ask) -> Signal:
    """M4. Free memory ÷ the larger of 1 % and 512 MiB, judged only while it falls."""
    told = memory(ask, "gpu_mem_free")
    if isinstance(told, Signal):
        return told
    free, total = told
    floor = max(float(ask.rule.params["share"]) * total.value, float(ask.rule.params["bytes"]))
    earlier = next((v for _, v in ask.windows.history(ask.subject, "gpu_mem_free", ask.start())), free.value)
    evidence = {"free_bytes": free.value, "floor_bytes": floor, "free_bytes_before": earlier}
    quiet = None if free.value < earlier - FALL_SHARE * floor else "it does not fall"
    return ask.value(free.value / floor, at=free.at, evidence=evidence, quiet=quiet)


def gpu_memory_growth(ask: Ask) -> Signal:
    """M4. Growth of used memory over the window as a share of the total, from 30 m after the engine's start."""
    told = memory(ask, "gpu_mem_used")
    if isinstance(told, Signal):
        return told
    used, total = told
    target = ask.scene.target_on(ask.subject)
    if target is None or not target.engines:
        return ask.idle("no engine is known on this GPU")
    up_s = awake_s(ask, target)
    settle_s = float(ask.rule.params["settle"])
    if up_s is not None and up_s < settle_s + 300.0:
        return ask.idle(f"the engine started or woke {up_s / 60:.0f} min ago")
    start = max(ask.start(), ask.now - (up_s - settle_s) if up_s is not None else 0.0)
    first_at, first = next(ask.windows.history(ask.subject, "gpu_mem_used", start), (used.at, used.value))
    if used.at - first_at < 300.0:
        return ask.idle("watched for too short a time")
    growth = (used.value - first) / total.value
    return ask.value(growth, at=used.at, evidence={"from_bytes": first, "to_bytes": used.value})


def awake_s(ask: Ask, target: Target) -> float | None:
    """Seconds since the engines of a target (re)started or woke; None where neither is known."""
    memo = ask.scene.memo
    if (target.name, "awake") not in memo:
        since = [up for e in target.engines if (up := ask.started_s("running", e)) is not None]
        for engine in target.engines:
            slept = ask.windows.last_over(engine, "asleep", 0.0)
            since += [] if slept is None else [ask.now - slept]
        memo[(target.name, "awake")] = min(since, default=None)
    awake: float | None = memo[(target.name, "awake")]
    return awake


def swapped(ask: Ask) -> Signal:
    """M5. Requests swapped out to the host, by engines that swap."""
    got = ask.latest("swapped")
    return ask.asleep() or (got if isinstance(got, Signal) else ask.value(got.value, at=got.at))


def error_rate(ask: Ask) -> Signal:
    """M6. Wilson's lower bound of errors ÷ requests."""
    assert ask.target is not None  # noqa: S101
    trouble = error_trouble(ask, ask.target)
    if trouble:
        return trouble
    uncovered = [ask.uncovered(name, subject) for subject, name in errors_told_by(ask, ask.target)]
    if all(uncovered):
        return next(signal for signal in uncovered[::-1] if signal)
    errors, n, how = errors_and_requests(ask, ask.target, ask.start())
    if n <= 0:
        return ask.idle("no requests")
    return ask.value(counted(ask, errors, n), at=error_told_at(ask, ask.target), method=how,
                     evidence={"errors": errors, "requests": n})


def spec_decode_acceptance(ask: Ask) -> Signal:
    """M8. Accepted ÷ drafted tokens of speculative decoding."""
    missing = ask.asleep() or ask.problem("spec_draft") or ask.problem("spec_accepted") or ask.uncovered("spec_draft")
    if missing:
        got = ask.windows.latest(ask.subject, "spec_acceptance", ask.now)
        if missing.state != "na" or not isinstance(got, Sample) or ask.scene.sleeps(ask.subject):
            return missing
        if progress_at(ask, ask.subject, ask.now - STALE_S) is None:
            return ask.idle("no token in the last minute: the engine's rate sticks", got.value)
        return ask.value(got.value, at=got.at, method="engine's own rate")
    drafted = ask.count("spec_draft", ask.subject, ask.start())
    accepted = ask.count("spec_accepted", ask.subject, ask.start())
    needed = ask.rule.min_count or 1
    if drafted < needed:
        return ask.idle(f"{drafted:.0f} of at least {needed} tokens drafted")
    if accepted > drafted * SHARE_TOP:
        return ask.gap(Why.OUT_OF_RANGE, f"{accepted:.0f} of {drafted:.0f} drafts accepted: not counted alike")
    return ask.value(accepted / drafted, at=ask.told_at("spec_draft"),
                     evidence={"accepted_tokens": accepted, "drafted_tokens": drafted})


# --- liveness --------------------------------------------------------------------------------------------------------


def starting(ask: Ask) -> bool:
    """A target that never answered since it was first watched may still be starting."""
    target = ask.target
    return target is not None and not target.ever_up and ask.now - target.first_seen_at < target.startup_within_s


def asked_to_stop(ask: Ask) -> bool:
    """Its pod was told to go: whoever did that has as long as for a start to bring another one."""
    target = ask.target
    return target is not None and target.stopping_at is not None \
        and ask.now - target.stopping_at < target.startup_within_s


def failures(ask: Ask, name: str) -> Sample | Signal:
    """How many reads in a row have failed so, up to the last one."""
    got = ask.latest(name)
    if isinstance(got, Signal):
        return got
    row = 0.0
    for _, value in ask.windows.backward(ask.subject, (name, "")):
        if value <= 0 or row >= MANY:
            break
        row += 1
    return got._replace(value=row)


def engine_down(ask: Ask) -> Signal:
    """L1. Reads in a row that were refused or reset, or whose /health said 5xx."""
    row = failures(ask, "down")
    if isinstance(row, Signal):
        return row
    if starting(ask):
        return ask.idle("starting", row.value)
    if asked_to_stop(ask):
        return ask.idle("its pod was asked to stop", row.value)
    rung = ask.windows.latest(ask.subject, "rung", ask.now)
    fails = {0: "TCP", 1: "/health", 2: "/metrics"}.get(int(rung.value)) if isinstance(rung, Sample) else None
    return ask.value(row.value, at=row.at, evidence={"failing": fails, "failed_reads": row.value})


def engine_slow(ask: Ask) -> Signal:
    """L1. Reads in a row that timed out."""
    row = failures(ask, "slow")
    return row if isinstance(row, Signal) else ask.value(row.value, at=row.at, evidence={"late_reads": row.value})


def engine_stopped(ask: Ask) -> Signal:
    """L1. Reads in a row that failed while the engine is still starting, or its pod was asked to stop."""
    row = failures(ask, "down")
    if isinstance(row, Signal):
        return row
    stops = asked_to_stop(ask)
    return ask.value(row.value if starting(ask) or stops else 0.0, at=row.at,
                     evidence={"starting": starting(ask), "text": "its pod was told to go" if stops else None})


def engine_stuck(ask: Ask) -> Signal:
    """L2. Time without progress while work is in flight, as a multiple of what is allowed.

    Tokens, first tokens and prompt tokens flat, or no answer at all (`flat`); or requests waiting while none runs and
    the KV cache is near empty (`queue`). A frozen page is "no change" here, and evidence.
    """
    sleeping = ask.asleep()
    running, waiting = ask.latest("running"), ask.latest("waiting")
    waits = [w for w in (witness_waits(ask, name) for name in WITNESSES) if w is not None]
    outstanding = max(waits, key=lambda w: w.value or 0.0, default=None)
    if sleeping:
        return sleeping
    if isinstance(running, Signal) or isinstance(waiting, Signal):
        gone = next(s for s in (running, waiting) if isinstance(s, Signal))
        return unanswered(ask) or (outstanding if outstanding is not None and outstanding.value else gone)
    kv = ask.windows.latest(ask.subject, "kv_usage", ask.now)
    flat_limit_s, queue_limit_s = float(ask.rule.params["flat"]), float(ask.rule.params["queue"])
    told = is_live(ask)
    vetoed = running.value + waiting.value > 0 and nobody_is_connected(ask)
    drifts = queue_drifts(ask)  # then only what runs is a witness
    flat_s = held_s(ask, flat_limit_s, lambda runs, waits: runs + (0.0 if drifts else waits) > 0, flat=True) \
        if told and not vetoed else 0.0
    routed_s = routed_and_flat_s(ask, flat_limit_s) if told else 0.0
    queue_s = 0.0
    if isinstance(kv, Sample) and kv.value < EMPTY_KV and not drifts:
        queue_s = held_s(ask, queue_limit_s, lambda runs, waits: waits > 0 and runs <= 0, flat=False)
    value = max(flat_s / flat_limit_s, routed_s / flat_limit_s, queue_s / queue_limit_s)
    evidence: dict[str, Any] = {"running": running.value, "waiting": waiting.value, "flat_s": flat_s,
                                "waiting_alone_s": queue_s}
    evidence |= {"flat_while_routed_s": routed_s} if routed_s else {}
    evidence |= {"note": "nobody is connected: its gauges are stale"} if vetoed else {}
    for witness in waits:
        evidence |= witness.evidence
        value = max(value, witness.value or 0.0)
    return ask.value(value, at=min(running.at, waiting.at), evidence=evidence)


def queue_drifts(ask: Ask) -> bool:
    """Whether this engine's gauge of waiting requests may rise for ever: alone it would page of every idle hour."""
    return ask.target is not None and "waiting" in ask.target.drifting


def nobody_is_connected(ask: Ask) -> bool:
    """Whether no client at all has been connected for 60 s, though some have been seen before: then nothing can run.

    A connection proves nothing (pools keep them), and a table that never showed one may not show them.
    """
    assert ask.target is not None  # noqa: S101
    now = ask.windows.latest(ask.target.name, "connections", ask.now)
    last = ask.windows.last_over(ask.target.name, "connections", 0.0)
    return isinstance(now, Sample) and now.value <= 0 and last is not None and ask.now - last >= STALE_S


# who knows of a request that waits, whatever the page says: sample of the target -> what it is called as evidence
WITNESSES = {"canary_age_s": ("canary_waits_s", "flat_with_canary_s"),
             "probe_first_token_age_s": ("no_first_token_age_s", "flat_with_probe_s")}


def witness_waits(ask: Ask, name: str) -> Signal | None:
    """L2 by the canary or the probe: a request has waited for `outstanding`, and no counter moved for `seen`.

    In a real hang vLLM's page says running 0 and waiting 0, and stays so: then these alone see it. None: not there.
    """
    assert ask.target is not None  # noqa: S101
    age = ask.windows.latest(ask.target.name, name, ask.now)
    if not isinstance(age, Sample):
        return None
    seen_s, outstanding_s = float(ask.rule.params["seen"]), float(ask.rule.params["outstanding"])
    since = ask.now - 2 * seen_s - age.value
    moved_at = progress_at(ask, ask.subject, since) or since
    flat_s = ask.now - max(moved_at, ask.windows.restarted_at(ask.subject, "running") or since)
    waits, flat = WITNESSES[name]
    return ask.value(min(flat_s / seen_s, age.value / outstanding_s), at=age.at,
                     evidence={waits: age.value, flat: flat_s})


def routed_and_flat_s(ask: Ask, limit_s: float) -> float:
    """Seconds for which a router had requests in flight at this engine while no counter of it moved."""
    assert ask.target is not None  # noqa: S101
    if not ask.scene.routers:
        return 0.0
    since = ask.now - 2 * limit_s - 3 * ask.windows.interval_s
    moved_at, restarted_at = progress_at(ask, ask.subject, since), ask.windows.restarted_at(ask.subject, "running")
    floor = max(moved_at or since, restarted_at or since)
    longest = 0.0
    for router in ask.scene.routers:
        for key in ask.windows.keys(router, "router_worker_inflight"):
            if not replica_of(ask.target, key):
                continue
            busy = list(takewhile(lambda row: row[1] > 0,
                                  ask.windows.backward(router, ("router_worker_inflight", key))))
            if busy and ask.windows.problem(router, "router_worker_inflight", ask.now) is None:
                longest = max(longest, ask.windows.watched_s(ask.subject, "running", max(floor, busy[-1][0])))
    return longest


def unanswered(ask: Ask) -> Signal | None:
    """L2 of an engine whose server takes connections and answers nothing, /health neither, with work on its last page.

    None where it is otherwise: what was refused in between is another process, without that work.
    """
    assert ask.target is not None  # noqa: S101
    name, last = ask.target.name, next(ask.windows.backward(ask.subject, ("running", ""), ("waiting", "")), None)
    silent, rung = ask.windows.problem(ask.subject, "running", ask.now), ask.windows.latest(name, "rung", ask.now)
    if last is None or silent is None or silent.code is not Why.TIMEOUT:
        return None
    at, running, waiting = last
    busy = running + (0.0 if queue_drifts(ask) else waiting) > 0
    refused = any(down > 0 for _, down in ask.windows.history(name, "down", at))
    if not busy or refused or not isinstance(rung, Sample) or rung.value > 1:
        return None
    reads = [at, *(read_at for read_at, _ in ask.windows.history(name, "rung", at) if read_at > at)]
    most_s = LATE_INTERVALS * ask.windows.interval_s  # a suspended host is not a silent engine
    silent_s = sum(min(b - a, most_s) for a, b in pairwise(reads))
    return ask.value(silent_s / float(ask.rule.params["flat"]), at=rung.at,
                     evidence={"running": running, "waiting": waiting, "flat_s": silent_s, "unanswered": True})


def held_s(ask: Ask, limit_s: float, holds: Callable[[float, float], bool], *, flat: bool) -> float:
    """Watched seconds for which `holds(running, waiting)` was true at every read, in this process of the engine.

    `flat`: and no progress counter moved. What was not watched (a suspended host, a clock that stepped) is not counted.
    """
    since = ask.now - 2 * limit_s - 3 * ask.windows.interval_s
    rows = ask.windows.backward(ask.subject, ("running", ""), ("waiting", ""))
    held = takewhile(lambda row: row[0] >= since and holds(row[1], row[2]), rows)
    began = next((row[0] for row in held), None)
    if began is None:
        return 0.0
    floor = ask.windows.restarted_at(ask.subject, "running") or since
    if flat:
        floor = max(floor, progress_at(ask, ask.subject, since) or since)
    while began > floor:
        earlier = next((row[0] for row in held), None)
        if earlier is None:
            break
        began = earlier
    return ask.windows.watched_s(ask.subject, "running", max(began, floor))


def watcher(ask: Ask) -> Signal:
    """L5. How late a source is, or for how long a channel could not deliver, as a multiple of what is allowed."""
    late = ask.windows.latest(ask.subject, "source_late_s", ask.now)
    failing = ask.windows.latest(ask.subject, "delivery_failing_s", ask.now)
    if isinstance(late, Sample):
        allowed_s = float(ask.rule.params["late_intervals"]) * ask.windows.interval_s
        return ask.value(late.value / allowed_s, at=late.at, evidence={"late_s": late.value})
    if isinstance(failing, Sample):
        allowed_s = float(ask.rule.params["failing"])
        return ask.value(failing.value / allowed_s, at=failing.at, evidence={"failing_s": failing.value})
    return ask.idle("nothing known yet")


def user_error_rate(ask: Ask) -> Signal:
    """U1. Wilson's lower bound of errors ÷ requests at the address that users use, as a prober gets them."""
    trouble = ask.problem("user_requests") or ask.uncovered("user_requests")
    if trouble:
        return trouble
    n = ask.count("user_requests", ask.subject, ask.start())
    errors = ask.count("user_errors", ask.subject, ask.start())
    if n <= 0:
        return ask.idle("no requests")
    return ask.value(counted(ask, errors, n), evidence={"errors": errors, "requests": n})


def outside_engine(name: str) -> Callable[[Ask], Signal]:
    """U2. What users wait for beyond the engine: the canary's mean at their address less that at the engines' own.

    The same short question at both, so what differs lies between: network, router, proxies. `name`: user_ttft
    (streamed) or user_whole (not). Where no canary asks an engine itself, first tokens are compared with the engines'
    own median, which has other prompts in it: an estimate.
    """
    return lambda ask: measured_outside(ask, name)


def measured_outside(ask: Ask, name: str) -> Signal:
    """The measuring behind outside_engine."""
    if ask.scene.canaries.get(ask.subject, "") is not None:
        return ask.na("an engine's own address" if ask.subject in ask.scene.canaries else "told by the canary alone")
    trouble = ask.problem(name) or ask.uncovered(name)
    if trouble:
        return trouble
    n, total_s = summed(ask, [ask.subject], name)
    needed = ask.rule.min_count or 1
    if n < needed:
        return ask.idle(f"{n:.0f} of at least {needed} answers")
    user_s, method = total_s / n, "the same question at the engine"
    inside_n, inside_s = summed(ask, [at for at, target in ask.scene.canaries.items() if target is not None], name)
    if inside_n >= needed:
        inside_s /= inside_n
    elif name == "user_ttft" and (told := engines_median(ask)) is not None:
        middle_s = quantile(0.5, add_buckets([ask.windows.buckets(ask.subject, name, ask.start())]))
        user_s, (inside_n, inside_s), method = middle_s or 0.0, told, "estimate: the engines' own median"
    else:
        return ask.na("no canary asks an engine itself; name its own address under probe.canary.urls, too")
    evidence = {"user_s": user_s, "inside_s": inside_s, "n": n, "n_inside": inside_n}
    return ask.value(user_s - inside_s, method=method, evidence=evidence)


def summed(ask: Ask, subjects: Sequence[str], name: str) -> tuple[float, float]:
    """(how many, s in all) of some histograms over the window."""
    rises = [ask.windows.increases(subject, name, ask.start()) for subject in subjects]
    return sum(r.get("count", 0.0) for r in rises), sum(r.get("sum", 0.0) for r in rises)


def engines_median(ask: Ask) -> tuple[float, float] | None:
    """(how many, median) of all engines' first tokens over the window; None: there were none."""
    buckets = add_buckets(ask.windows.buckets(engine, "ttft", ask.start())
                          for target in ask.scene.targets.values() for engine in ask.scene.tellers(target, "ttft"))
    median_s = quantile(0.5, buckets)
    return None if median_s is None else (buckets[-1][1], median_s)


def replicas_missing(ask: Ask) -> Signal:
    """K1. How many replicas of a workload are asked for and not Ready; while a rollout progresses that is its way."""
    desired, ready, rollout = (ask.latest(name) for name in ("replicas_desired", "replicas_ready", "rollout"))
    for got in (desired, ready, rollout):
        if isinstance(got, Signal):
            return got
    assert isinstance(desired, Sample) and isinstance(ready, Sample) and isinstance(rollout, Sample)  # noqa: S101, PT018
    missing = max(0.0, desired.value - ready.value)
    evidence = {"ready": ready.value, "desired": desired.value,
                "text": f"{ready.value:.0f} of {desired.value:.0f} replicas are Ready"}
    if rollout.value > 0:
        return ask.idle("a rollout progresses", missing, evidence=evidence)
    return ask.value(missing, at=ready.at, evidence=evidence)


def gpus_unallocatable(ask: Ask) -> Signal:
    """K2. GPUs that the kubelet gave to pods once and would give to none now: its device plugin calls them unhealthy.

    That is room for new pods alone: a pod that has such a GPU runs on, and one that is given again was not repaired.
    """
    got = ask.windows.latest("kubelet", "gpus_allocatable", ask.now)
    if not isinstance(got, Sample):
        untold = ask.windows.track_of("kubelet", "gpus_allocatable") is None
        return ask.na("the kubelet's pod-resources socket is not read here") if untold else ask.gap(got.code, got.why)
    most = ask.scene.gpus_allocatable
    if not most:
        return ask.na("the kubelet gives no GPUs to pods here")
    text = f"the kubelet gives {got.value:.0f} of {most} GPUs to pods"
    return ask.value(max(0.0, most - got.value), at=got.at, evidence={"text": text})


def business_drop(ask: Ask) -> Signal:
    """M7. How far a business metric is below itself a week ago, or a day ago (params `back`).

    A week ago it was the same day of the week; where the source says that it has nothing of then, a day ago stands in
    for it. A source that could not be asked says no such thing. Of a JSON address, which tells no past, the day before
    is remembered, and that alone is information: no Saturday is to be measured by a Friday.
    """
    got = ask.latest("sourced")
    if isinstance(got, Signal):
        return got
    week, day = past_of(ask, "sourced_7d", WEEK_S), past_of(ask, "sourced_1d", DAY_S)
    wants_week = float(ask.rule.params["back"]) > DAY_S
    no_week = isinstance(week, Gap) and week.code in (Why.NO_DATA, Why.MISSING)
    tells_past = any(ask.windows.track_of(ask.subject, name) for name in ("sourced_1d", "sourced_7d"))
    if wants_week and no_week and isinstance(day, float) and not tells_past:
        return ask.idle("it tells no value of a week ago: business-metric-day compares with yesterday")
    if not wants_week and no_week and tells_past:
        return ask.idle("no value of a week ago: business-metric itself compares with yesterday")
    before, back = (day, "a day ago") if no_week or not wants_week else (week, "a week ago")
    if not isinstance(before, float):
        if before.code in (Why.NO_DATA, Why.MISSING):
            back = "a day or a week ago yet" if wants_week else "a day ago"
            return ask.idle(f"it is {got.value:.6g}; no value of {back}")
        return ask.gap(before.code, f"its value {back}: {before.why}")
    if before <= 0:
        return ask.idle(f"it is {got.value:.6g}, and was {before:g} {back}")
    drop = 1 - got.value / before
    evidence: dict[str, Any] = {"now": got.value, "before": before, "back": back, "text":
                                f"{got.value:.6g}, {abs(drop):.1%} {'under' if drop >= 0 else 'over'} the {before:.6g}"
                                f" of {back}"}
    needed = events_needed(ask.rule.factor)
    if before < needed:
        evidence["note"] = (f"if it counts events, {before:.6g} vary by ±{3 / math.sqrt(before):.1%} by themselves;"
                            f" {ask.rule.factor:.0%} is told from noise from {needed:,.0f} on")
    return ask.value(drop, at=got.at, evidence=evidence)


def past_of(ask: Ask, name: str, back_s: float) -> float | Gap:
    """What a source stood at so long ago: as it tells itself, else as we remember it; a Gap: why it is not known."""
    told = ask.windows.latest(ask.subject, name, ask.now)
    if isinstance(told, Sample):
        return told.value
    known = ask.windows.level_near(ask.subject, "sourced", ask.now - back_s, PAST_WITHIN_S)
    return told if known is None else known


def source_value(ask: Ask) -> Signal:
    """What a PromQL or JSON source tells, for rules of one's own (params `source`)."""
    got = ask.latest("sourced")
    return got if isinstance(got, Signal) else ask.value(got.value, at=got.at)


def told_by_drilld(ask: Ask) -> Signal:
    """What the drill daemon says of a run or a drill: it stands until it says otherwise."""
    return ask.value(1.0, evidence={"text": ask.scene.told[ask.spec.id][ask.subject]})


def blind(scene: Scene, rule: Rule, root: str, signals: Mapping[tuple[str, str], Signal],
          required: frozenset[str]) -> Signal:
    """L3. How many required signals of a target, its engines or a GPU are Gaps, and which.

    A window that a young agent has not watched for long enough is no blindness; nor is an engine that still starts.
    """
    target = scene.targets.get(root)
    ask = Ask(scene, SIGNALS[rule.signal][0], rule, root, 0.0)
    if target is not None and (starting(ask) or asked_to_stop(ask)):
        return ask.idle("starting" if starting(ask) else "its pod was asked to stop")
    if root in scene.gpus and any(found.value and not found.evidence.get("nvml_works")
                                  for rule_id in hardware.NVML_AS_A_WHOLE
                                  if (found := signals.get((rule_id, scene.node))) is not None):
        return ask.idle("NVML fails as a whole, and that has an alert of its own")
    count = signals.get(("gpu-count", scene.node))
    if root in scene.gpus and count is not None and count.evidence.get("all_gone"):
        return ask.idle("no GPU can be used at all: gpu-count tells")
    if root in scene.gpus and hardware.never_told(scene, root):
        return ask.idle("NVML shows other GPUs since Tocsin was started, and not this one: gpu-count tells")
    if ("lost",) not in scene.memo:
        scene.memo[("lost",)] = [(subject, s) for (rule_id, subject), s in signals.items()
                                 if s.state == "gap" and rule_id in required and not s.evidence.get("young")]
    instances = [uuid for uuid, gpu in scene.instances.items() if gpu.uuid == root]
    subjects = {root, *(target.engines if target else ()), *instances, *scene.sourced.get(root, ())}
    lost = {f"{s.id} of {s.subject}": s.why for subject, s in scene.memo[("lost",)] if subject in subjects}
    return ask.value(float(len(lost)), evidence={"lost": lost})


def _row(id_: str, unit: str, subject: Any, help_: str, function: Callable[[Ask], Signal], *, windowed: bool = False,
         counted: bool = False, most: float | None = None, **params: str,
         ) -> tuple[SignalSpec, Callable[[Ask], Signal]]:
    return SignalSpec(id_, unit, subject, help_, windowed, counted, params, most), function


def _told_elsewhere(ask: Ask) -> Signal:
    return ask.idle("computed from the other signals")


SIGNALS: Mapping[str, tuple[SignalSpec, Callable[[Ask], Signal]]] = {row[0].id: row for row in (
    _row("queue_age", "s", "engine", "age of the oldest request never yet scheduled", age_of_queue),
    _row("kv_cache_utilization", "ratio", "engine", "share of KV-cache blocks in use", kv_cache_utilization, most=1.0),
    _row("preemptions", "count", "engine", "requests preempted in the window", preemptions, windowed=True),
    _row("graph_fallback", "ratio", "engine", "decode steps that ran eager though captured", graph_fallback,
         windowed=True, estimate="ratio", most=1.0),
    _row("ttft_slow_share", "ratio", "target", "share of first tokens slower than the SLO, lower bound",
         slow_signal("ttft"), windowed=True, counted=True, limit="slo", most=1.0),
    _row("ttft_possibly_slow_share", "ratio", "target", "the same, where the SLO lies inside a bucket",
         undecided_signal("ttft"), windowed=True, counted=True, limit="slo", most=1.0),
    _row("itl_slow_share", "ratio", "target", "share of inter-token gaps slower than the SLO, lower bound",
         slow_signal("itl"), windowed=True, counted=True, limit="slo", min_requests="number", most=1.0),
    _row("itl_possibly_slow_share", "ratio", "target", "the same, where the SLO lies inside a bucket",
         undecided_signal("itl"), windowed=True, counted=True, limit="slo", min_requests="number", most=1.0),
    _row("e2e_slow_share", "ratio", "target", "share of requests slower end to end than allowed, lower bound",
         slow_signal("e2e"), windowed=True, counted=True, limit="slo", most=1.0),
    _row("e2e_possibly_slow_share", "ratio", "target", "the same, where the limit lies inside a bucket",
         undecided_signal("e2e"), windowed=True, counted=True, limit="slo", most=1.0),
    _row("error_burn", "of limit", "target", "burn of the error budget, as a multiple of the rule's factor", error_burn,
         pairs="pairs"),
    _row("node_error_burn", "of limit", "node", "the same for all engines of the node", error_burn, pairs="pairs"),
    _row("rank_step_spread", "ratio", "group", "spread of compute time over the ranks", rank_step_spread,
         windowed=True, steps="number"),
    _row("rank_clock_spread", "ratio", "group", "spread of SM clocks over the busy ranks", rank_clock_spread, most=1.0),
    _row("gpu_temperature", "celsius", "gpu", "temperature of the GPU", gpu_temperature, most=126.0),
    _row("gpu_thermal_margin", "kelvin", "gpu", "kelvins left to the card's own limit", gpu_thermal_margin,
         fallback="number"),
    _row("prefix_cache_hit_rate", "ratio", "engine", "prefix-cache hits per token looked up", prefix_cache_hit_rate,
         windowed=True, counted=True, most=1.0),
    _row("qps_change", "ratio", "target", "how far arrivals are off from what is usual", qps_change, windowed=True,
         counted=True),
    _row("gpu_utilization", "ratio", "gpu", "mean utilization while requests run", gpu_utilization, windowed=True,
         most=1.0),
    _row("gpu_memory", "ratio", "gpu", "memory used", gpu_memory, most=1.0),
    _row("gpu_memory_low", "of limit", "gpu", "free memory as a multiple of the floor", gpu_memory_low, windowed=True,
         share="ratio", bytes="number"),
    _row("gpu_memory_growth", "ratio", "gpu", "growth of used memory", gpu_memory_growth, windowed=True,
         settle="duration", most=1.0),
    _row("swapped", "count", "engine", "requests swapped out to the host", swapped),
    _row("error_rate", "ratio", "target", "errors per request, lower bound", error_rate, windowed=True, counted=True,
         most=1.0),
    _row("spec_decode_acceptance", "ratio", "engine", "accepted per drafted token", spec_decode_acceptance,
         windowed=True, counted=True, most=1.0),
    _row("engine_down", "count", "target", "failed reads in a row", engine_down),
    _row("engine_slow", "count", "target", "reads in a row that timed out", engine_slow),
    _row("engine_stopped", "count", "target", "failed reads in a row while it starts or was asked to stop",
         engine_stopped),
    _row("engine_stuck", "of limit", "engine", "time without progress while work is in flight", engine_stuck,
         flat="duration", queue="duration", seen="duration", outstanding="duration"),
    _row("blind", "count", "any", "required signals that cannot be measured", _told_elsewhere),
    _row("user_ttft_slow_share", "ratio", "user", "share of first tokens that users got later than the SLO",
         slow_signal("user_ttft"), windowed=True, counted=True, limit="slo", most=1.0),
    _row("user_itl_slow_share", "ratio", "user", "share of gaps between tokens that users saw over the SLO",
         slow_signal("user_itl"), windowed=True, counted=True, limit="slo", min_requests="number", most=1.0),
    _row("user_error_rate", "ratio", "user", "errors per request as users get them, lower bound", user_error_rate,
         windowed=True, counted=True, most=1.0),
    _row("outside_engine", "s", "user", "wait for a streamed first token that is not the engine's, of the canary",
         outside_engine("user_ttft"), windowed=True, counted=True),
    _row("outside_engine_whole", "s", "user", "the same of an answer that was not streamed",
         outside_engine("user_whole"), windowed=True, counted=True),
    *(_row(*row[:-1], windowed=row[-1]) for row in hardware.ROWS),
    *(_row(*row[:5], windowed=row[5], counted=row[6]) for row in watchlist.rows(
        lambda ask, engine: age_of_queue(Ask(ask.scene, SIGNALS["queue_age"][0], ask.rule, engine, ask.not_before)))),
    _row("replicas_missing", "count", "workload", "replicas that are asked for and not Ready", replicas_missing),
    _row("gpus_unallocatable", "count", "node", "GPUs that the kubelet would give to no pod now", gpus_unallocatable),
    _row("business_drop", "ratio", "source", "how far a business metric is below itself a week or a day ago",
         business_drop, back="duration", most=1.0),
    _row("source_value", "count", "source", "what a PromQL or JSON source tells", source_value, source="name"),
    _row("drill_orphaned", "count", "any", "a drill left something in the world", told_by_drilld),
    _row("drill_overdue", "count", "any", "a drill that was due did not run", told_by_drilld),
    _row("watcher", "of limit", "any", "how late a source is, or a channel cannot deliver", watcher,
         late_intervals="number", failing="duration"),
)}
OF_INSTANCES = frozenset({"gpu_utilization", "gpu_memory", "gpu_memory_low", "gpu_memory_growth"})  # of MIG ones too
CATALOGUE: Mapping[str, SignalSpec] = {name: spec for name, (spec, _) in SIGNALS.items()}


def subjects(scene: Scene, spec: SignalSpec) -> list[str]:
    """The subjects that a signal is computed for."""
    if spec.subject == "any":
        return list(scene.told.get(spec.id, ()))
    if spec.id in hardware.XID_SIGNALS:  # of a GPU that nobody can name any more, and of switches too
        ended = {s for s in scene.history.subjects() if s.startswith("MIG-") and s not in scene.instances}
        return list(dict.fromkeys([*scene.gpus, *(s for s in scene.history.subjects() if s not in ended)]))
    if spec.id in OF_INSTANCES:
        return [*scene.gpus, *scene.instances]
    memo, key = scene.memo, ("subjects", spec.subject)
    if key not in memo:
        engines = [e for t in scene.targets.values() for e in t.engines]
        groups = [e for t in scene.targets.values() for e in t.engines
                  if len(t.gpus) > 1 or any(len(scene.windows.keys(e, name)) > 1 for name in (
                      "rank_seconds", "probe_rank_seconds", "probe_rank_late_s"))]
        memo[key] = {"engine": engines, "target": list(scene.targets), "gpu": list(scene.gpus), "node": [scene.node],
                     "group": groups, "user": list(scene.users), "workload": list(scene.workloads),
                     "source": [s for name in sorted(scene.business) for s in scene.sourced.get(name, ())],
                     }[spec.subject]
    found: list[str] = memo[key]
    return found


def subjects_of(scene: Scene, rule: Rule, spec: SignalSpec) -> Sequence[str]:
    """The subjects that a rule judges."""
    if rule.signal == "watcher":
        return scene.sources
    if rule.signal == "source_value":
        return scene.sourced.get(str(rule.params["source"]), ())
    return subjects(scene, spec)


ROUTER_COUNTS = ("router_requests", "router_errors", "router_responses", "router_retries", "router_worker_requests",
                 "router_worker_errors")
ROUTER_LEVELS = ("router_worker_up", "router_worker_inflight", "router_inflight", "router_queue")
ROUTER_SPANS_S = (60.0, 300.0)


def router_signals(scene: Scene) -> list[Signal]:
    """What routers count, judged by no rule: one signal a series, its key in the evidence.

    A count's value is what it has risen since it was first read, through restarts of the router; `rise_60s` and
    `rise_300s` are that of the last minute and of five.
    """
    return [signal for router in scene.routers for name in (*ROUTER_COUNTS, *ROUTER_LEVELS)
            for signal in router_series(scene, router, name)]


def router_series(scene: Scene, router: str, name: str) -> list[Signal]:
    """Every series of one number of a router, or why there is none."""
    windows, is_count = scene.windows, name in ROUTER_COUNTS
    trouble = windows.problem(router, name, scene.now)
    unit = "count" if is_count else "requests"
    if trouble is not None:
        missing = windows.gaps.get((router, name)) or trouble  # a counter that has not counted yet was never told
        if missing.code is Why.NOT_SUPPORTED:
            return [Signal(name, router, "na", scene.now, unit=unit, why=missing.why)]
        if windows.track_of(router, name) is None and (router, name) not in windows.gaps:
            return [Signal(name, router, "value", scene.now, 0.0, unit, evidence={"key": ""})] if is_count else []
        return [Signal(name, router, "gap", scene.now, unit=unit, why=missing.why, code=missing.code)]
    found = []
    for key in sorted(windows.keys_now(router, name)):
        latest = windows.latest(router, name, scene.now, key)
        if not isinstance(latest, Sample):
            continue
        evidence: dict[str, Any] = {"key": key}
        if name.startswith("router_worker"):
            evidence["worker"] = key
        if is_count:
            evidence |= {f"rise_{span_s:.0f}s": windows.increase(router, name, scene.now - span_s, key=key)
                         for span_s in ROUTER_SPANS_S}
        found.append(Signal(name, router, "value", latest.at, latest.value, unit, evidence=evidence))
    return found


def probe_signals(scene: Scene) -> list[Signal]:
    """What tocsin-probe tells and no rule judges: the oldest age without a first token at each target."""
    told = [scene.windows.latest(target, "probe_first_token_age_s", scene.now) for target in scene.targets]
    return [Signal("no_first_token_age", got.subject, "value", got.at, got.value, "s", "exact: probe")
            for got in told if isinstance(got, Sample)]


def imbalance(values: Mapping[str, float]) -> dict[str, Any] | None:
    """How far apart the engines of a target are: largest ÷ smallest, which are fast, and all together.

    Never one of them for all, never their mean: either hides the slow ones. None: fewer than two, or one stands.
    """
    if len(values) < 2 or min(values.values()) <= 0:
        return None
    least, most = min(values.values()), max(values.values())
    return {"max_over_min": most / least, "total": sum(values.values()),
            "fast": [subject for subject, value in values.items() if value > math.sqrt(least * most) and most > least]}


def replica_of(target: Target, worker: str) -> bool:
    """Whether a router's word for a replica means this target: its address, with or without scheme and path."""
    return bool(target.address) and re.sub(r"^\w+://|/.*$", "", worker) == target.address


def compute(scene: Scene, rules: list[Rule], resolved_at: Mapping[tuple[str, str], float],
            ) -> dict[tuple[str, str], Signal]:
    """Every rule's signal for every subject, keyed by (rule id, subject)."""
    required = frozenset(r.id for r in rules if r.required)
    signals: dict[tuple[str, str], Signal] = {}
    for rule in rules:
        spec, function = SIGNALS[rule.signal]
        if rule.signal == "blind":
            continue
        for subject in subjects_of(scene, rule, spec):
            ask = Ask(scene, spec, rule, subject, resolved_at.get((rule.id, subject), 0.0))
            try:
                signals[(rule.id, subject)] = function(ask)
            except Exception as error:  # one formula that fails must not blind all the others
                signals[(rule.id, subject)] = ask.gap(Why.ERROR, f"{type(error).__name__}: {error}")
    for rule in rules:
        if rule.signal == "blind":
            for root in (*scene.targets, *scene.gpus, *scene.sourced):
                signals[(rule.id, root)] = blind(scene, rule, root, signals, required)
    return signals


def alert_labels(scene: Scene, rule: Rule, alert: Alert) -> dict[str, str]:
    """What identifies an alert at a receiver. Only what never changes while it fires."""
    labels = {"rule": rule.id, "number": rule.number or "", "node": scene.node, "subject": alert.subject,
              "severity": alert.severity}
    if alert.subject in scene.workloads or scene.is_sourced(alert.subject):
        del labels["node"]  # it is the cluster's, whichever node tells it
    elif alert.subject in scene.gpus:
        labels["gpu"] = alert.subject
        target = scene.target_on(alert.subject)
        if target is not None and target.ever_up:
            labels |= {"engine": target.engines[0]} if len(target.engines) == 1 else {}
    elif alert.subject in scene.instances:
        labels |= {"gpu": scene.instances[alert.subject].uuid, "mig": alert.subject}
        target = scene.target_on(alert.subject)
        labels |= {"engine": target.engines[0]} if target is not None and len(target.engines) == 1 else {}
    elif alert.subject not in scene.users and scene.target_of(alert.subject) is not None:
        labels["engine"] = alert.subject
    return {k: v for k, v in labels.items() if v}
