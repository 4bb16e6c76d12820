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
from typing import Any, NamedTuple

from agent.model import AlertKey, Sample, Signal
from agent.signals import Scene, Target, engine_buckets
from agent.stats import add_buckets, quantile
from agent.words import span

LOOK_EVERY_S = 15.0
MINUTE_S = 60.0
PAGE_RUNG = 3.0  # of the ladder: its /metrics answered
LOST_S = 60.0  # without a look for so long, nothing is advised, and what was quiet must be quiet anew
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
    """One replica at one look. None: it does not tell. `free`: requests for which its KV cache has room.

    `ttft_p95_s`: of the last minute, `ttft_before_s`: of the last ten; `limit_s`: what was promised for TTFT.
    `arrived_per_s`, `served_per_s`: requests over the last minute.
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
    start to the first page.
    """

    at: float = 0.0
    out: bool = False
    into: bool = False
    why: str = ""
    over: int = 0
    under_s: float | None = None
    since_change_s: float | None = None
    since_out_s: float | None = None
    starts: tuple[float, ...] = ()
    process: float | None = None  # unix s, when its process started
    was_down: bool = False
    peak_per_s: float = 0.0
    peak_at: float = 0.0
    served_per_s: float = 0.0  # the most that it finished in a minute

    @property
    def startup_s(self) -> float:
        """How fast a new replica can help: the slowest start of the last few, else what the seed expects."""
        return max(SHORTEST_STARTUP_S, *self.starts) if self.starts else STARTUP_S

    @property
    def warm_pool(self) -> int | None:
        """Replicas that must stand ready for a spike shorter than a start: what came beyond what one serves ÷ that."""
        if not self.served_per_s:
            return None
        return max(0, math.ceil((self.peak_per_s - self.served_per_s) / self.served_per_s - 1e-9))


def from_plain(told: Mapping[str, Any]) -> Advice:
    """What was saved; fields of another version are left out."""
    known = {k: v for k, v in told.items() if k in Advice.__dataclass_fields__}
    return Advice(**known | {"starts": tuple(known.get("starts", ()))})


def to_plain(advice: Advice) -> dict[str, Any]:
    """As it is saved."""
    return asdict(advice)


def met(known: Advice, process: float | None, now: float, *, up: bool) -> Advice:
    """Learn how long a start takes: from the process's start to the first page that it answers with.

    Only of a start that was seen: another process than before, or one that was down at the last look. `process`: when
    it started, unix s, as its page tells. The image's pull and the node's are not in it.
    """
    if not up:
        return replace(known, was_down=True) if not known.was_down else known
    starts = known.starts
    is_new = process is not None and (known.was_down if known.process is None else process - known.process > 1.0)
    if is_new and process is not None and 0.0 < now - process < 86400.0:
        starts = (*starts, round(now - process, 1))[-STARTS_KEPT:]
    if (starts, process, False) == (known.starts, known.process, known.was_down):
        return known
    return replace(known, starts=starts, process=process, was_down=False)


def look(known: Advice, seen: Seen, now: float) -> Advice:
    """The advice after one more look. A number that is not told asks for nothing; without a queue's age all waits."""
    if seen.queue_age_s is None:
        return known
    passed_s = now - known.at if known.at else 0.0
    gone = not 0.0 <= passed_s <= LOST_S
    passed_s = 0.0 if gone else passed_s
    asks = asking(seen)
    over = 0 if not asks else 1 if gone else known.over + 1
    quiet = not asks and seen.queue_age_s < IN_S
    under_s = None if not quiet else 0.0 if gone or known.under_s is None else known.under_s + passed_s
    since = _later(known.since_change_s, passed_s), _later(known.since_out_s, passed_s)
    next_ = replace(known, at=now, over=over, under_s=under_s, since_change_s=since[0], since_out_s=since[1])
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
    """Remember the highest load of a day and the most that it served, for the warm pool."""
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
            "startup_s": advice.startup_s, "starts_seen": len(advice.starts), "warm_pool": advice.warm_pool,
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

    def total(name: str) -> float | None:
        told = [windows.latest(engine, name, now) for engine in target.engines]
        values = [got.value for got in told if isinstance(got, Sample)]
        return sum(values) if values else None

    def level(name: str, at: float) -> float:
        return sum(windows.level(engine, name, at) or 0.0 for engine in target.engines)

    def p95(start: float) -> float | None:
        tellers = scene.tellers(target, "ttft")
        buckets = add_buckets(engine_buckets(windows, engine, "ttft", start) for engine in tellers)
        enough = buckets and buckets[-1][1] >= LEAST_FIRST_TOKENS
        return quantile(0.95, buckets) if enough else None

    served = sum(sum(windows.increases(engine, "finished", minute).values())
                 for engine in scene.tellers(target, "finished"))
    inside = sum(level(name, now) - level(name, minute) for name in ("running", "waiting"))
    recent = p95(minute)
    return Seen(_age_s(signals, target), total("waiting"), _free(scene, target), recent,
                None if recent is None else p95(ten), target.slo.ttft_p99, max(0.0, served + inside) / MINUTE_S,
                served / MINUTE_S)


def _age_s(signals: Mapping[AlertKey, Signal], target: Target) -> float | None:
    """The longest wait in a target's queues; None where one of them does not tell."""
    ages = []
    for engine in target.engines:
        told = signals.get(("queue-age", engine))
        if told is None or told.state not in ("value", "idle") or (told.state == "idle" and told.value is None):
            return None
        ages.append(told.value or 0.0)
    return max(ages, default=None)


def _free(scene: Scene, target: Target) -> float | None:
    """How many more requests as long as those that run find room in the KV cache; None where nothing runs."""
    room = []
    for engine in target.engines:
        running, usage = (scene.windows.latest(engine, name, scene.now) for name in ("running", "kv_usage"))
        if isinstance(running, Sample) and isinstance(usage, Sample) and running.value > 0 < usage.value:
            room.append(math.floor(running.value * max(0.0, 1.0 - usage.value) / usage.value))
    return float(sum(room)) if room else None
