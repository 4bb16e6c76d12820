"""Advice on scaling: should there be one replica more, or one fewer? Advice alone: nothing here acts. Pure.

By checklist 9 (Appendix D, autoscaling): out on the queue's age, a rising TTFT or requests that wait for a free KV
slot, several looks in a row; in on a short queue for ten minutes; never by GPU utilization, which trails. A change is
said no more often than a replica takes to start, and never "in" within ten minutes of "out". Time is handed in, and
only watched time counts: an agent that was away has seen no quiet ten minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.model import AlertKey, Sample, Signal
from agent.stats import add_buckets, quantile
from agent.words import span

if TYPE_CHECKING:
    from agent.signals import Scene, Target

LOOK_EVERY_S = 15.0
MINUTE_S = 60.0
PAGE_RUNG = 3.0  # of the ladder: its /metrics answered
LOST_S = 60.0  # without a look for so long, nothing is advised, and what was quiet must be quiet anew. Time is a wall
# clock's: one that is set forward by less counts as watched, a minute of ten at most; more, or back, does not
OUT_S, IN_S, IN_FOR_S = 2.0, 0.5, 600.0  # checklist 9, step 4
LOOKS = 3  # "N consecutive intervals": 45 s, of the minutes that a start takes
RISING = 1.5  # p95 of TTFT of the last minute ÷ of the last ten, ours: the seed says "rising" without a number
LEAST_FIRST_TOKENS = 20  # in that minute, for a p95
SLOT_SHARE = 1.0  # requests that wait ÷ those for which the KV cache has room
STARTUP_S = 300.0  # until one was seen: checklist 9 expects 3 to 8 minutes
SHORTEST_STARTUP_S = 60.0  # a toy's start of 2 s would let the advice flap
STARTS_KEPT = 5
SAID_S = 60.0  # "out" stays for at least so long: autoscalers look every 15 to 30 s
PEAK_FOR_S = 86400.0  # a spike of yesterday is one to have room for


class Seen(NamedTuple):
    """One replica at one look. None: it does not tell. `free`: requests for which the KV cache has room.

    `waiting`, `free`: of the one engine that has the least room for those that wait.
    `ttft_p95_s`: of the last minute, `ttft_before_s`: of the last ten; `limit_s`: what was promised for TTFT.
    `arrived_per_s`: requests of the last minute; `served_per_s`: those finished in it, if requests waited in it.
    """

    queue_age_s: float | None = None
    waiting: float | None = None
    free: float | None = None
    ttft_p95_s: float | None = None
    ttft_before_s: float | None = None
    limit_s: float = math.inf
    arrived_per_s: float | None = None
    served_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What is advised of one replica, and what it takes to go on. Spans are of watched seconds; None: never.

    `out`, `into`: one replica more, one fewer; never both. `why`: the number that made it. `over`: looks in a row that
    ask for more. `under_s`: for how long the queue has been short; None: it is not. `starts`: seconds from process
    start to the first page. `met_at`, `met_since`: the last look at the process, and the first in an unbroken row.
    `is_blind`: since `at` there was a look at which the queue's age was not known.
    """

    at: float = 0.0
    out: bool = False
    into: bool = False
    why: str = ""
    over: int = 0
    under_s: float | None = None
    is_blind: bool = False
    since_change_s: float | None = None
    since_out_s: float | None = None
    starts: tuple[float, ...] = ()
    process: float | None = None  # unix s, when its process started
    was_down: bool = False
    met_at: float = 0.0
    met_since: float = 0.0
    peak_per_s: float = 0.0
    peak_at: float = 0.0
    served_per_s: float = 0.0  # the most that it finished in a minute in which requests waited

    @property
    def startup_s(self) -> float:
        """How fast a new replica can help: the slowest start of the last few, else what the seed expects."""
        return max(SHORTEST_STARTUP_S, *self.starts) if self.starts else STARTUP_S


def from_plain(told: Mapping[str, Any]) -> Advice:
    """What was saved; fields of another version are left out."""
    known = {k: v for k, v in told.items() if k in Advice.__dataclass_fields__}
    return Advice(**known | {"starts": tuple(known.get("starts", ())), "is_blind": True})  # nobody looked meanwhile


def to_plain(advice: Advice) -> dict[str, Any]:
    """As it is saved."""
    return asdict(advice)


def met(known: Advice, process: float | None, now: float, *, up: bool) -> Advice:
    """Learn how long a start takes: from the process's start to the first page that it answers with.

    Only of a start that was seen from before it began, without a pause of over LOST_S: of another, nobody knows when
    its first page came. `process`: when it started, unix s, as its page tells. The image's pull and the node's are not
    in it.
    """
    gone = not 0.0 <= now - known.met_at <= LOST_S
    known = replace(known, met_at=now, met_since=now if gone else known.met_since)
    if not up:
        return replace(known, was_down=True)
    starts = known.starts
    if process is not None and known.met_since < process < now:
        is_new = known.was_down if known.process is None else process - known.process > 1.0
        starts = (*starts, round(now - process, 1))[-STARTS_KEPT:] if is_new else starts
    return replace(known, starts=starts, process=process, was_down=False)


def look(known: Advice, seen: Seen, now: float) -> Advice:
    """The advice after one more look. A number that is not told asks for nothing.

    Without a queue's age all waits, but that nobody is let go by what is not known any more. Quiet is the time between
    two looks in a row at which it was known.
    """
    if seen.queue_age_s is None:
        return replace(known, into=False, is_blind=True, why="" if known.into else known.why)
    passed_s = now - known.at if known.at else 0.0
    gone = not 0.0 <= passed_s <= LOST_S
    passed_s = 0.0 if gone else passed_s
    asks = asking(seen)
    over = 0 if not asks else 1 if gone else known.over + 1
    quiet = not asks and seen.queue_age_s < IN_S
    quiet_s = 0.0 if known.is_blind else passed_s
    under_s = None if not quiet else 0.0 if gone or known.under_s is None else known.under_s + quiet_s
    since = _later(known.since_change_s, passed_s), _later(known.since_out_s, passed_s)
    next_ = replace(known, at=now, over=over, under_s=under_s, is_blind=False, since_change_s=since[0],
                    since_out_s=since[1])
    return _loaded(_advised(next_, asks, quiet=quiet, age_s=seen.queue_age_s), seen, now)


def _advised(known: Advice, asks: str, *, quiet: bool, age_s: float) -> Advice:
    may = known.since_change_s is None or known.since_change_s >= known.startup_s
    if known.out:
        if asks or (known.since_change_s or 0.0) < SAID_S:
            return replace(known, since_out_s=0.0, why=asks or known.why)
        return replace(known, out=False, why="")
    if known.into:  # no longer true is taken back at once: nobody should leave while others come
        return known if quiet else replace(known, into=False, why="")
    if known.over >= LOOKS and may:
        return replace(known, out=True, why=asks, since_change_s=0.0, since_out_s=0.0)
    rested = known.since_out_s is None or known.since_out_s >= IN_FOR_S
    if (known.under_s or 0.0) >= IN_FOR_S and rested and may:
        why = f"the oldest request has waited {span(age_s)}, under {span(IN_S)} for {span(IN_FOR_S)}"
        return replace(known, into=True, why=why, since_change_s=0.0)
    return known


def asking(seen: Seen) -> str:
    """The number that asks for another replica, in words; "" where none does."""
    if seen.queue_age_s is not None and seen.queue_age_s > OUT_S:
        return f"the oldest request waits for {span(seen.queue_age_s)}, over {span(OUT_S)}"
    if seen.waiting and seen.free is not None and seen.waiting > SLOT_SHARE * seen.free:
        return f"{seen.waiting:.0f} wait and the KV cache has room for {seen.free:.0f}"
    p95, before = seen.ttft_p95_s, seen.ttft_before_s
    if p95 is not None and before and p95 >= RISING * before and p95 > seen.limit_s / 2:
        return f"TTFT rises: its p95 is {span(p95)} in the last minute, {span(before)} in the last ten"
    return ""


def _loaded(known: Advice, seen: Seen, now: float) -> Advice:
    """Remember the highest load of a day and the most that it served: its parts of the fleet's warm pool.

    Checklist 9, step 3: peak_spike_requests / per_replica_throughput, of all replicas together.
    """
    peak, at = (0.0, 0.0) if now - known.peak_at > PEAK_FOR_S else (known.peak_per_s, known.peak_at)
    served = 0.0 if peak == 0.0 else known.served_per_s  # of yesterday's requests, which may have been others
    if seen.arrived_per_s is not None and seen.arrived_per_s > peak:
        peak, at = seen.arrived_per_s, now
    return replace(known, peak_per_s=peak, peak_at=at, served_per_s=max(served, seen.served_per_s or 0.0))


def _later(since_s: float | None, passed_s: float) -> float | None:
    return None if since_s is None else since_s + passed_s


def row(replica: str, advice: Advice) -> dict[str, Any]:
    """One replica's advice as `check --json` tells it; keys are stable."""
    return {"subject": replica, "out": advice.out, "in": advice.into, "why": advice.why or None, "at": advice.at,
            "startup_s": advice.startup_s, "starts_seen": len(advice.starts),
            "peak_per_s": advice.peak_per_s or None, "served_per_s": advice.served_per_s or None}


# --- looking at a node -----------------------------------------------------------------------------------------------


def start_of(scene: Scene, target: Target) -> tuple[bool, float | None]:
    """Whether a target answers with its page, and when its process started (unix s; None: it does not tell)."""
    rung = scene.windows.latest(target.name, "rung", scene.now)
    process = scene.windows.latest(target.name, "process_start", scene.now)
    up = isinstance(rung, Sample) and rung.value >= PAGE_RUNG
    return up, process.value if up and isinstance(process, Sample) else None


def watch(scene: Scene, target: Target, signals: Mapping[AlertKey, Signal]) -> Seen:
    """One replica's numbers now: the queue's age as the ten have it, the rest of the last minute."""
    windows, now = scene.windows, scene.now
    minute, ten = now - MINUTE_S, now - IN_FOR_S

    def p95(start: float) -> float | None:
        tellers = scene.tellers(target, "ttft")
        buckets = add_buckets(windows.buckets(engine, "ttft", start) for engine in tellers)
        enough = buckets and buckets[-1][1] >= LEAST_FIRST_TOKENS
        return quantile(0.95, buckets) if enough else None

    recent = p95(minute)
    return Seen(_age_s(signals, target), *_slots(scene, target), recent, None if recent is None else p95(ten),
                target.slo.ttft_p99, *flow(scene, target))


def flow(scene: Scene, target: Target) -> tuple[float | None, float | None]:
    """Requests/s of the last minute that arrived, and that were served while others waited.

    None where the minute was not watched, or either of its ends is not known.
    """
    windows, now, minute = scene.windows, scene.now, scene.now - MINUTE_S
    engines = scene.tellers(target, "finished")
    watched = all(windows.watched_s(e, "running", minute) >= MINUTE_S - LOOK_EVERY_S for e in target.engines)
    ends = {(at, name): [windows.level(engine, name, at) for engine in target.engines]
            for at in (minute, now) for name in ("running", "waiting")}
    if not watched or not engines or any(None in told for told in ends.values()):
        return None, None
    held = {end: sum(value or 0.0 for value in told) for end, told in ends.items()}
    served = sum(sum(windows.increases(engine, "finished", minute).values()) for engine in engines)
    inside = sum(held[now, name] - held[minute, name] for name in ("running", "waiting"))
    waited = held[minute, "waiting"] > 0 < held[now, "waiting"]
    return max(0.0, served + inside) / MINUTE_S, served / MINUTE_S if waited else None


def _age_s(signals: Mapping[AlertKey, Signal], target: Target) -> float | None:
    """The longest wait in a target's queues; None where one of them does not tell."""
    ages = []
    for engine in target.engines:
        told = signals.get(("queue-age", engine))
        if told is None or told.state not in ("value", "idle") or (told.state == "idle" and told.value is None):
            return None
        ages.append(told.value or 0.0)
    return max(ages, default=None)


def _slots(scene: Scene, target: Target) -> tuple[float | None, float | None]:
    """How many wait, and how many as long as those that run find room in the KV cache, of the engine that lacks most.

    An engine where nothing runs is left out with its queue: how much a request takes there is not known.
    """
    told = []
    for engine in target.engines:
        waiting, running, usage = (scene.windows.latest(engine, name, scene.now)
                                   for name in ("waiting", "running", "kv_usage"))
        if isinstance(waiting, Sample) and isinstance(running, Sample) and isinstance(usage, Sample) \
                and running.value > 0 < usage.value:
            free = math.floor(running.value * max(0.0, 1.0 - usage.value) / usage.value)
            told.append((waiting.value, float(free)))
    return max(told, key=lambda one: one[0] - one[1], default=(None, None))
