"""Threads, slots, the tick. The only reader of the clock.

One thread a source, never a second read of it while one is under way. At each tick the sources are started together,
and after a short grace the tick takes what has come: whoever is late is late alone. One tick is one SQLite transaction.
"""

from __future__ import annotations

import difflib
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import msgspec
import structlog

from agent import noise, review, silences
from agent.impact import impact
from agent.layouts import Layouts
from agent.model import (
    Alert,
    AlertKey,
    AlertMessage,
    Announcement,
    Batch,
    Book,
    EngineFacts,
    FoundEngine,
    IncidentMessage,
    Rule,
    Sample,
    Signal,
    Source,
    Transition,
)
from agent.node import Node, Traffic
from agent.notifiers import Route, owed_for_incidents, owed_to
from agent.outbox import ChannelStatus, Outbox
from agent.phase import phase_of
from agent.signals import Target, probe_signals, router_signals
from agent.store import ACCOUNTED, FrameRow, LayoutRow, NotSaved, Store, StoreError
from agent.threads import NoThread, begin
from agent.trend import FINE, KEPT_S, MINUTE, TRACK, Points, Saved, Trend, points
from agent.web.metrics import SourceStat
from agent.windows import COARSE_KEEP_S, LATE_INTERVALS, RAW_KEEP_S, Row, SeriesKey

log = structlog.get_logger()

GRACE_S = 1.0  # how long a tick waits for its sources
PRUNE_EVERY_S = 60.0
LAYOUTS_EVERY_S = 3600.0  # to see which are in use, every frame is looked at
EVENTS_APART_S = 0.5  # an event is judged at once, a storm of them no more often than this
ALIVE_EVERY_S = 10.0  # how often the watchdog is fed between two ticks: it may be set shorter than a poll
SELF = "self"
SILENCES = "silences"  # the fact in the store
# The samples without which a required signal is a Gap.
MADE_FROM: Mapping[str, tuple[str, ...]] = {
    "queue_age": ("waiting", "ttft"), "kv_cache_utilization": ("kv_usage",), "preemptions": ("preemptions",),
    "ttft_slow_share": ("ttft",), "itl_slow_share": ("itl",), "error_burn": ("finished",),
    "gpu_temperature": ("gpu_temp_c",), "gpu_memory": ("gpu_mem_used", "gpu_mem_total"),
}
HISTORY_ROWS = 200  # past transitions in `tocsin alerts`


Adopt = Callable[[FoundEngine], tuple[Target, Source]]  # an engine that discovery found, as a target and its source


@runtime_checkable
class Asks(Protocol):
    """A source that asks an engine for work (the canary). `held`: it must not."""

    asks: str | None
    held: bool


@runtime_checkable
class ByProcess(Protocol):
    """A source that finds things by process. `owners`: process -> its target and that one's engines."""

    owners: Mapping[int, tuple[str, tuple[str, ...]]]


@runtime_checkable
class ByPattern(Protocol):
    """A source that reads what deployment patterns have only where one is."""

    is_patterned: bool


@dataclass
class Slot:
    """What is known of one source between ticks."""

    source: Source
    go: threading.Event
    thread: threading.Thread | None = None
    starved_at: float | None = None  # monotonic: since when a thread is wanting, for it or within it
    ended: bool = False  # it is read no more
    reading: bool = False
    fresh: Batch | None = None  # read, not yet taken by a tick
    last: Batch | None = None
    asked_at: float = 0.0  # monotonic, of the read under way
    answered_at: float = 0.0  # monotonic
    errors: int = 0
    asks: Asks | None = None  # the source, if it is one
    by_process: ByProcess | None = None  # the source, if it is one
    by_pattern: ByPattern | None = None  # the source, if it is one


class Collector:
    """The source threads. `clock` tells unix time to the sources, `monotonic` measures."""

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._answered = threading.Condition()
        self._stopping = False
        self._gathering: Collection[str] = ()  # of these sources somebody awaits the answer
        self.late_events: Callable[[], object] = lambda: None  # called when events came after their round had ended
        self.slots: dict[str, Slot] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        """One more source, read from the next round on; then its thread begins."""
        slot = Slot(source, threading.Event(), answered_at=self._monotonic(),
                    asks=source if isinstance(source, Asks) else None,
                    by_process=source if isinstance(source, ByProcess) else None,
                    by_pattern=source if isinstance(source, ByPattern) else None)
        with self._answered:
            self.slots = {**self.slots, source.name: slot}  # others walk over the old one

    def remove(self, name: str) -> None:
        """Read a source no more. What hangs in it is left behind."""
        with self._answered:
            slot = self.slots[name]
            self.slots = {other: kept for other, kept in self.slots.items() if other != name}
            slot.ended = True
            slot.reading = False
        slot.go.set()
        slot.source.close()

    def _serve(self, slot: Slot) -> None:
        name = slot.source.name
        while True:
            slot.go.wait()
            slot.go.clear()
            if self._stopping or slot.ended:
                return
            now = self._clock()
            try:
                batch = slot.source.read(now)
                slot.starved_at = None
            except NoThread as error:  # it wants one of its own, and asks for it again at each read
                batch = self._starved(slot, error)
            except Exception as error:  # a source must never end its thread: it would be blind for ever
                log.exception("source_failed", source=name)
                batch = Batch(name, now, self._clock() - now, error=f"{type(error).__name__}: {error}")
            with self._answered:
                slot.fresh, slot.reading, slot.answered_at = batch, False, self._monotonic()
                slot.errors += batch.error is not None
                late = bool(batch.events) and name not in self._gathering
                if not any(self.slots[other].reading for other in self._gathering if other in self.slots):
                    self._answered.notify_all()  # each wake-up of the tick before that would be for nothing
            if late:
                self.late_events()

    def gather(self, grace_s: float, names: Collection[str] | None = None) -> list[Batch]:
        """Start every idle source, wait for them up to `grace_s`, and take what has come, late ones of before too.

        `names`: start and await only these.
        """
        asked = [slot for name, slot in self.slots.items() if names is None or name in names]
        with self._answered:
            batches = self._taken()
            for slot in asked:
                if not slot.reading and self._has_thread(slot):
                    slot.reading, slot.asked_at = True, self._monotonic()
                    slot.go.set()
            self._gathering = [slot.source.name for slot in asked]
            self._answered.wait_for(lambda: self._stopping or not any(slot.reading for slot in asked), grace_s)
            self._gathering = ()
            return batches + self._taken()

    def _has_thread(self, slot: Slot) -> bool:
        """Whether it can be read. Where no thread is to be had that is told of it, and tried again in each round."""
        if slot.thread is None:
            try:
                slot.thread = begin(self._serve, f"source {slot.source.name}", slot)
                slot.starved_at = None
            except NoThread as error:
                slot.fresh = self._starved(slot, error)
                slot.errors += 1
        return slot.thread is not None

    def _starved(self, slot: Slot, error: NoThread) -> Batch:
        """What is told of a source for which there is no thread; in the log once, in /healthz while it lasts."""
        name = slot.source.name
        if slot.starved_at is None:
            slot.starved_at = self._monotonic()
            log.error("source_without_thread", source=name, error=str(error))
        return Batch(name, self._clock(), 0.0, error=str(error))

    def _taken(self) -> list[Batch]:
        batches = []
        for slot in self.slots.values():
            if slot.fresh is not None:
                batches.append(slot.fresh)
                slot.last, slot.fresh = slot.fresh, None
        return batches

    def late_s(self) -> dict[str, float]:
        """For how long each source has not answered, or a call of it has not returned; 0 where all is done."""
        now = self._monotonic()
        found = {}
        for name, slot in self.slots.items():
            hung_s = slot.last.hung_s if slot.last is not None else 0.0
            since_s = now - slot.answered_at if hung_s else 0.0
            starved_s = 0.0 if slot.starved_at is None else now - slot.starved_at
            found[name] = max(now - slot.asked_at if slot.reading else 0.0, hung_s + since_s, starved_s)
        return found

    def stop(self) -> None:
        """Ask every thread to end; one that hangs in a driver call is left behind (it is a daemon thread)."""
        with self._answered:
            self._stopping = True
            self._answered.notify_all()
        for slot in self.slots.values():
            slot.go.set()
            slot.source.close()


class Agent:
    """The running agent: what `tocsin run` is. It fulfils agent.web.app.View."""

    def __init__(self, node: Node, collector: Collector, store: Store, *, notes: Sequence[str] = (),
                 clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.node, self.collector, self.store = node, collector, store
        self.notes = list(notes)
        self.adopt: Adopt | None = None  # None: what discovery finds is not read
        self._adopted: dict[str, tuple[str, str]] = {}  # engine that discovery found -> its kind and address
        self.routes: Sequence[Route] = ()
        self.outbox: Outbox | None = None
        self.other_problems: Callable[[], Sequence[str]] = tuple  # what /healthz tells of parts that are not the loop's
        self._clock, self._monotonic = clock, monotonic
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._woken = threading.Event()  # something cannot wait for the tick, or the end has come
        self._heralds = [name for name, slot in collector.slots.items() if hasattr(slot.source, "wake_with")]
        collector.late_events = self._wake
        for name in self._heralds:
            collector.slots[name].source.wake_with(self._wake)  # type: ignore[attr-defined]
        self._tick_at: float | None = None
        self._ticked_mono = monotonic()
        self._started_mono = monotonic()
        self._layouts = Layouts()
        self._layouts_pruned_mono = monotonic()
        self._trend = Trend()
        self._fault: str | None = None  # why the last tick failed
        self._pruned_at = 0.0
        self._probed: dict[str, list[Sample]] = {}  # address -> what its prober told since the last tick

    # --- the tick ---------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Take back book, windows and what was learned from the store."""
        now = self._clock()
        book = self.store.load_book()
        try:
            self.node.restore(book, self.store.meta("learned") or {})
            self.node.silences = silences.from_plain(self.store.meta(SILENCES))
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a damaged file, and yet good JSON
            self.notes.append(f"{self.store.path}: what was learned or silenced cannot be read ({error!r}) and was "
                              "left out: alerts stay, the rest is learnt anew")
            self.node.restore(book, {})
        keys: dict[tuple[str, int], tuple[SeriesKey, ...]] = {}
        self._layouts.follow(self.store.last_layout())
        for row in self.store.layouts(but=TRACK):  # of curves there may be hundreds, read when they are drawn
            if series := _series(row):
                keys[(row.track, row.layout)] = series
                self._layouts.take_back(row.track, series, row.layout, self._monotonic())
        for res, keep_s in (("coarse", COARSE_KEEP_S), ("raw", RAW_KEEP_S)):
            self.node.windows.restore(_rows(self.store.frames(now - keep_s, res), keys))

    def tick(self, names: Collection[str] | None = None) -> None:
        """One round: start the sources (or only those of `names`), take what came, judge, save, wake the senders."""
        grace_s = min(GRACE_S, self.node.setup.poll_s / 2)
        batches = self.collector.gather(grace_s) if names is None else self.collector.gather(grace_s, names)
        now, mono = self._clock(), self._monotonic()
        dt_s = min(max(0.0, mono - self._ticked_mono), LATE_INTERVALS * self.node.setup.poll_s)
        if self._tick_at is None:
            dt_s = 0.0
        before = self.node.book, self.node.incidents
        try:
            with self._lock:
                for batch in batches:
                    self.node.take(batch)
                self._follow(now, {b.source: b.found for b in batches if b.found is not None})
                for address, readings in self._probed.items():
                    self.node.take_user(address, readings, readings[0].at)
                self._probed = {}
                self.node.take(self._of_ourselves(now))
                transitions = self.node.step(now, dt_s)
                self._hold_canaries()
                tell_sources(self.node, self.collector)
                notices = self._notices(transitions, now)
                kept = self.node.incident_records()
                frames, layouts = self._frames(self.node.windows.unsaved(), self._curves(now))
                learned = msgspec.Raw(msgspec.json.encode(self.node.learned))  # as it is now, under the lock
        except BaseException:
            # What was not handed over must happen again, or its page is lost.
            self.node.book, self.node.incidents = before
            raise
        # From here on they are owed, whatever fails.
        self._save(now, transitions, notices, frames, layouts, learned, kept)
        for change in transitions:
            log.info("transition", rule=change.alert.rule, subject=change.alert.subject, state=change.kind,
                     value=change.alert.value, limit=change.alert.limit, severity=change.alert.severity,
                     why=change.why or None)
        for engine in self.node.newly_bound:
            mark, bound = self.node.marks[engine], self.node.bounds[engine]
            log.info("binds_changed", engine=engine, by=mark.by, was=mark.was, since=mark.since, why=bound.why)
        if notices and self.outbox is not None:
            self.outbox.wake()
        self._ticked_mono, self._tick_at = mono, now

    def _follow(self, now: float, looks: Mapping[str, Sequence[FoundEngine]]) -> None:
        """Read what the discoveries found; leave what has ended and not come back for 10 m."""
        if self.adopt is None:
            return
        for by, found in looks.items():
            self.node.see(found, now, by)
        engines = self.node.found_engines()
        for name, engine in engines.items():
            known = self._adopted.get(name)
            if known == (engine.kind, engine.url):
                continue
            if known is not None:
                self.collector.remove(f"engine:{name}")  # another engine listens there now, or it is elsewhere
            self._adopted[name] = (engine.kind, engine.url)
            target, source = self.adopt(engine)
            self.node.add_target(target)
            self.collector.add(source)
            log.info("engine_found", engine=name, kind=engine.kind, how=engine.how)
        gone = self.node.lost_engines() if looks else []
        for name in dict.fromkeys([*gone, *(self._adopted.keys() - engines.keys())]):
            self.node.drop_target(name)
            self.collector.remove(f"engine:{name}")
            del self._adopted[name]
            log.info("engine_gone", engine=name, text="it has ended and not come back")

    def _hold_canaries(self) -> None:
        """An engine that sleeps is asked nothing: the question would wake it, or fail."""
        scene = self.node.scene
        for asks in (slot.asks for slot in self.collector.slots.values() if slot.asks is not None):
            target = scene.targets.get(asks.asks or "")
            if target is not None:
                engines = target.engines
                asks.held = bool(engines) and all(scene.sleeps(engine) for engine in engines)

    def _of_ourselves(self, now: float) -> Batch:
        late = [Sample("source_late_s", f"source:{name}", s, now) for name, s in self.collector.late_s().items()]
        failing = [Sample("delivery_failing_s", f"channel:{name}", status.failing_s, now)
                   for name, status in self._channels().items()]
        self.node.sources = tuple(s.subject for s in (*late, *failing))
        return Batch(SELF, now, 0.0, (*late, *failing))

    def _channels(self) -> Mapping[str, ChannelStatus]:
        return {} if self.outbox is None else self.outbox.status()

    def _notices(self, transitions: Sequence[Transition], now: float) -> list[tuple[str, AlertMessage]]:
        ends = {"firing": None, "resolved": now}
        told = [self.node.message(c.alert, ends[c.kind], c.why) for c in transitions if c.kind in ends]
        undiverted = self.node.no_longer_diverted()
        return owed_to(self.routes, [*told, *undiverted, *self.node.no_longer_muted()]) + owed_for_incidents(
            self.routes, self.node.incidents_told(told, undiverted))

    def _curves(self, now: float) -> list[Saved]:
        """What the minute before this tick brought, where it is over."""
        values = {key: signal.value if signal.state == "value" else None
                  for key, signal in self.node.signals.items()}
        return self._trend.take(now, values, self._falling())

    def _frames(self, rows: Iterable[Row], curves: Iterable[Saved]) -> tuple[list[FrameRow], list[LayoutRow]]:
        frames, layouts = [], []
        mono = self._monotonic()

        def layout_of(track: str, keys: tuple[SeriesKey, ...]) -> int:
            layout, is_new = self._layouts.number(track, keys, mono)
            if is_new:
                layouts.append(LayoutRow(track, layout, msgspec.json.encode(keys).decode()))
            return layout

        for row in rows:
            if row.track != SELF:
                layout = layout_of(row.track, row.keys)
                frames.append(FrameRow(row.track, row.at, layout, row.values.tobytes(), row.res))
        for curve in curves:
            layout = layout_of(TRACK, tuple((rule, subject, "") for rule, subject in curve.keys))
            frames.append(FrameRow(TRACK, curve.at, layout, curve.blob, curve.res))
        return frames, layouts

    def _save(self, now: float, transitions: Sequence[Transition], notices: Sequence[tuple[str, AlertMessage]],
              frames: Sequence[FrameRow], layouts: Sequence[LayoutRow], learned: msgspec.Raw,
              kept: Sequence[Mapping[str, Any]]) -> None:
        with suppress(NotSaved):  # the store says so, and writes what matters next time; pages go out all the same
            self.store.commit_tick(now, self.node.book, transitions, notices, frames, layouts, kept)
        try:
            self.store.set_meta("learned", learned)
            if not 0 <= now - self._pruned_at <= PRUNE_EVERY_S:  # also when the clock has stepped back
                self._pruned_at = now
                self._count_days()
                self.store.prune(now, {"raw": RAW_KEEP_S, "coarse": COARSE_KEEP_S, **KEPT_S})
                self._forget_layouts()
        except StoreError as error:  # what matters is saved: the rest of the tick, and its pages, must not wait
            log.error("store_not_kept", error=str(error))  # noqa: TRY400

    def _forget_layouts(self) -> None:
        """Engines that came and went leave columns that nobody writes or reads any more. Frames are saved by now."""
        mono, kept = self._monotonic(), None
        if mono - self._layouts_pruned_mono > LAYOUTS_EVERY_S:
            self._layouts_pruned_mono, kept = mono, self.store.prune_layouts()
        with self._lock:
            self._layouts.forget(mono, kept)

    def _count_days(self) -> None:
        """Add what each target did since the last time to its day, so that a quarter can be reviewed."""
        with self._lock:
            rows, upto = self.node.count_days(self.store.meta(ACCOUNTED) or {})
        self.store.add_days([(int(upto[row.target] // 86400), row.target, row.requests, row.errors, row.ttft,
                              row.ttft_slow, row.itl, row.itl_slow) for row in rows], upto)

    def run(self, alive: Callable[[], object]) -> None:
        """Tick every poll until stopped. `alive` feeds the watchdog: after each tick, and while the next is awaited.

        The first tick is at once, the second at the node's own phase of a poll from there: nodes that were started
        together, or see the same fault, do not all tell it in the same moment.
        """
        poll_s = self.node.setup.poll_s
        due = self._monotonic() + phase_of(self.node.setup.node, poll_s) - poll_s
        while not self._stop.is_set():
            self._try_tick()
            poll_s = self.node.setup.poll_s
            over = self._monotonic() - due
            due += poll_s * max(1, -(-over // poll_s))  # a tick that ran over is followed by the next due one
            self._wait_until(due, alive)

    def _try_tick(self, names: Collection[str] | None = None) -> None:
        try:
            self.tick(names)
            self._fault = None
        except Exception as error:  # a fault of ours: the next tick may do; if none does, the watchdog ends us
            self._fault = f"{type(error).__name__}: {error}"
            log.exception("tick_failed")

    def _wait_until(self, due: float, alive: Callable[[], object]) -> None:
        """Until the next tick is due; what cannot wait for it is judged in between."""
        while not self._stop.is_set():
            if self.healthy():
                alive()
            left_s = due - self._monotonic()
            if left_s <= 0:  # a storm of events does not put off the tick
                return
            woken = self._woken.wait(min(left_s, ALIVE_EVERY_S))
            if self._stop.is_set() or (not woken and left_s <= ALIVE_EVERY_S):
                return
            if woken:
                self._woken.clear()
                self._try_tick(self._heralds)
                self._stop.wait(min(EVENTS_APART_S, max(0.0, due - self._monotonic())))

    def _wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """End `run` after the tick under way."""
        self._stop.set()
        self._woken.set()

    # --- the View of agent.web.app ----------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """The contract's `check`, as of the last tick; where that is too long ago, nothing in it is still healthy."""
        alive, tick = self.livez(self._clock())
        with self._lock:
            since_s = 0.0 if self._tick_at is None else self._monotonic() - self._ticked_mono
            answer = self.node.check(since_s)
        if not alive:
            answer["why"] = f"the agent no longer judges: {tick}; see /healthz and its log"
            answer["verdict"] = "unknown" if answer["verdict"] == "healthy" else answer["verdict"]
        return answer

    def scaling(self) -> list[dict[str, Any]]:
        """Advice on each replica, as of the last look."""
        with self._lock:
            return self.node.scaling_rows()

    def gpus(self) -> dict[str, Any]:
        """A verdict on each GPU, as of the last tick; where that is too long ago, nothing is still healthy."""
        alive, tick = self.livez(self._clock())
        with self._lock:
            since_s = 0.0 if self._tick_at is None else self._monotonic() - self._ticked_mono
            answer = self.node.gpus_report(since_s)
        if not alive:
            answer["why"] = f"the agent no longer judges: {tick}; see /healthz and its log"
            answer["verdict"] = "unknown" if answer["verdict"] == "healthy" else answer["verdict"]
        return answer

    def alerts(self, include_resolved: bool) -> list[dict[str, Any]]:
        """The open alerts, then (if asked) the past ones, newest first."""
        with self._lock:
            rows = self.node.alerts()
        if include_resolved:
            for past in reversed(self.store.transitions(last=HISTORY_ROWS)):
                if past["kind"] == "resolved":
                    rows.append(self.node.alert_row(msgspec.convert(past["alert"], Alert), past["at"]))
        return rows

    def incident_list(self, since: float) -> list[dict[str, Any]]:
        """The records of incidents that were open at `since` or later, the newest first."""
        kept = {one["id"]: one for one in self.store.incidents(since)}
        with self._lock:  # of those that are open, as they stand now
            kept |= {name: self.node.incident_record(one) for name, one in self.node.incidents.items()}
        return sorted(kept.values(), key=lambda one: -float(one["opened_at"]))

    def incident_told(self, name: str) -> dict[str, Any] | None:
        """All that a postmortem is made of: {"incident", "transitions", "notices", "earlier", "now"}; None: no such.

        `name`: its id, or the end of it, or "last".
        """
        now, known = self._clock(), self.incident_list(0.0)
        found = next((one for one in known if name in ("last", one["id"]) or one["id"].endswith(f"/{name}")), None)
        if found is None:
            return None
        end = found["ended_at"] or now
        with self._lock:
            cost = found["impact"] or impact(self.node.scene, found["began_at"], now)
        return {
            "incident": {**found, "impact": cost}, "now": now,
            "transitions": self.store.transitions_in(found["began_at"] - 1.0, end + 1.0),
            "notices": self._notices_of(found, now),
            "earlier": [one for one in known if one["root"][0] == found["root"][0] and one["opened_at"]
                        < found["opened_at"]]}

    def pages_of(self, incident: Mapping[str, Any]) -> Mapping[str, int]:
        """How often each channel has accepted something new of it: one page an incident or an alert, no updates."""
        told = {(one["channel"], one["key"]) for one in self._notices_of(incident, self._clock())
                if (one["status"], one["state"]) == ("firing", "delivered")}
        return Counter(channel for channel, _ in sorted(told))

    def _notices_of(self, incident: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
        """What was owed to whom of an incident, as a whole and of each of its alerts."""
        keys = [f"{incident['node']}/{member['rule']}/{member['subject']}" for member in incident["members"]]
        end = incident["ended_at"] or now
        return self.store.notices_of([incident["id"], *keys], incident["began_at"] - 1.0, end + 1.0)

    def review(self, last_s: float) -> dict[str, Any]:
        """A quarter, or however long, in numbers: service levels kept, budget spent, pages; see agent.review."""
        now = self._clock()
        with self._lock:
            levels = {name: target.slo for name, target in self.node.scene.targets.items()}
            general = self.node.setup.slo
        since = now - last_s
        known = [one for one in self.store.incidents(since) if one["opened_at"] >= since]
        changes = self.store.changes(since)
        return review.review(self.store.days(int(since // 86400)), known, changes,
                             lambda name: levels.get(name, general), since, now)

    def trend(self, span_s: float, wanted: frozenset[AlertKey] | None = None) -> Points:
        """How signals went in the last `span_s`: of `wanted` each value within 2 h, else the worst of each minute."""
        res = FINE if span_s <= KEPT_S[FINE] and wanted is not None else MINUTE
        since = self._clock() - span_s
        with self._lock:
            under_way = [saved for saved in self._trend.minute(self._falling()) if saved.res == res]
            known = self._layouts.of_track(TRACK)
        return points(chain(self._saved_curves(res, since, known), under_way), wanted)

    def _saved_curves(self, res: str, since: float, known: Mapping[int, tuple[SeriesKey, ...]]) -> Iterator[Saved]:
        """The saved minutes, one after the other; columns that are not known any more are read as they are met."""
        layout, keys = 0, tuple[AlertKey, ...]()
        for frame in self.store.frames_by_time(res, since):
            if frame.layout != layout:
                row = None if frame.layout in known else self.store.layout(TRACK, frame.layout)
                series = known.get(frame.layout, ()) if row is None else _series(row)
                layout, keys = frame.layout, tuple((rule, subject) for rule, subject, _ in series)
            if keys:
                yield Saved(res, frame.at, keys, frame.blob)

    def _falling(self) -> list[str]:
        """The rules of which the lowest value is the worst."""
        return [rule.id for rule in self.node.setup.rules if rule.op in ("<", "<=")]

    def doctor(self) -> dict[str, Any]:
        """How each quantity was had, by target, GPU and source."""
        with self._lock:
            return doctor_report(self.node, self.collector.slots, self._monotonic())

    def healthz(self) -> tuple[bool, dict[str, Any]]:
        """Every part of the agent by name, and whether all are well."""
        late = self.collector.late_s()
        errors = {n: slot.last.error if slot.last else "not read yet" for n, slot in self.collector.slots.items()}
        sources = {n: {"error": errors[n], "late_s": round(late[n], 1), "errors": slot.errors}
                   for n, slot in self.collector.slots.items()}
        alive, tick = self.livez(self._clock())
        channels = {name: status._asdict() for name, status in self._channels().items()}
        problems = [f"source {name}: {error}" for name, error in errors.items() if error]
        problems += [f"source {name}: no answer for {late_s:.0f} s" for name, late_s in late.items()
                     if late_s > LATE_INTERVALS * self.node.setup.poll_s]
        problems += [] if self.outbox is None else self.outbox.problems()
        problems += [] if alive else [tick]
        problems += [f"the last tick failed, a fault of Tocsin's: {self._fault}"] if self._fault else []
        problems += [self.store.problem] if self.store.problem else []
        problems += self.other_problems()
        problems += [] if channels else ["no channel is configured under `notify:`: nobody is told of an alert"]
        with self._lock:
            unknown = [f"{s.id} of {s.subject}: {s.why}" for s in self.node.signals.values() if s.state == "gap"]
            muted = [row["text"] for row in self.node.silences_now()]
        return not problems, {"problems": problems, "tick": tick, "sources": sources, "channels": channels,
                              "silences": muted,
                              "store": self.store.problem or "ok", "unknown": sorted(set(unknown)),
                              "notes": [*self.notes, *self.store.notes]}

    def livez(self, now: float) -> tuple[bool, str]:
        """Is the tick in time? Told by the monotonic clock: a stepped clock is no stall."""
        del now
        ago_s = self._monotonic() - (self._ticked_mono if self._tick_at is not None else self._started_mono)
        limit_s = max(30.0, 3 * self.node.setup.poll_s)
        return ago_s <= limit_s, f"last tick {ago_s:.1f} s ago (limit {limit_s:.0f} s)"

    def transitions(self, after_id: int) -> list[dict[str, Any]]:
        """The saved transitions with a larger id, oldest first."""
        return [{"state": row.pop("kind"), **row} for row in self.store.transitions(since_id=after_id)]

    def signals(self) -> list[Signal]:
        """All signals of the last tick."""
        with self._lock:
            return list(self.node.signals.values())

    def readings(self) -> list[Signal]:
        """What is told and judged by no rule: what routers count per replica, the age without a first token."""
        with self._lock:
            return [*router_signals(self.node.scene), *probe_signals(self.node.scene)]

    def book(self) -> Book:
        """The open alerts of the last tick."""
        return self.node.book

    def firing(self) -> list[AlertMessage]:
        """Everything that fires now, for the Alertmanager's resend."""
        with self._lock:
            return self.node.firing()

    def incidents(self) -> list[IncidentMessage]:
        """Every open incident, for those who are told again."""
        with self._lock:
            return self.node.incidents_open()

    def rules(self) -> Sequence[Rule]:
        """All rules that are judged here."""
        return self.node.setup.rules

    def healthy(self) -> bool:
        """The tick is in time: what the heartbeat promises."""
        return self.livez(self._clock())[0]

    def take_user(self, address: str, counted: Mapping[str, Any]) -> None:
        """What a prober has counted so far: {"ttft": {le: n, "sum", "count"}, "itl": …, "requests": n, "errors": n}."""
        at = self._clock()
        readings = [Sample(f"user_{name}", address, float(value), at, key)
                    for name in ("ttft", "itl") for key, value in (counted.get(name) or {}).items()]
        readings += [Sample(f"user_{name}", address, float(counted[name]), at) for name in ("requests", "errors")]
        with self._lock:
            self._probed[address] = readings

    def announce(self, told: Announcement) -> None:
        """A drill says which alerts it will cause, and on what. Raises LookupError: no channel of that name."""
        names = [route.channel.name for route in self.routes if route.wants.severities]
        if told.route_to is not None and told.route_to not in names:
            known = ", ".join(names) or "none"
            raise LookupError(f"there is no channel {told.route_to!r} to route to; there are: {known}")
        with self._lock:
            self.node.announce(told)

    def traffic(self, since: float) -> Traffic:
        """Requests at each engine and router since a time: (unix seconds, count so far)."""
        with self._lock:
            return self.node.traffic(since)

    def end_announcement(self, run: str) -> None:
        """The drill is over."""
        with self._lock:
            self.node.end_announcement(run)

    def silences(self) -> dict[str, Any]:
        """The silences that hold, those that have ended, and what drills have announced."""
        now = self._clock()
        with self._lock:
            ended = [one for one in self.node.silences if not one.is_active(now)]
            return {"silences": self.node.silences_now(now), "expected": self.node.expected(),
                    "ended": silences.to_plain(reversed(ended))}

    def silence(self, rule: str, subject: str, for_s: float, why: str, by: str) -> dict[str, Any]:
        """Mute the pages of a rule on a subject (* and ? as in `match:`) for so long; what it mutes now is told.

        Raises:
            ValueError: no such rule, no end, or no reason.
        """
        rules = self.node.setup.rules
        if not any(fnmatchcase(known.id, rule) for known in rules):
            near = difflib.get_close_matches(rule, [known.id for known in rules], 1)
            raise ValueError(f"there is no rule {rule!r}; " + (f"did you mean {near[0]}?" if near else
                                                               "`tocsin rules list` has them all"))
        now = self._clock()
        with self._lock:
            self.node.silences, made = silences.add(self.node.silences, rule, subject, for_s, why, by, now)
            self._keep_silences(now)
            shown = next(row for row in self.node.silences_now(now) if row["id"] == made.id)
        log.warning("silenced", silence=made.id, rule=rule, subject=subject, until=made.until, why=made.why, by=by)
        return shown

    def unsilence(self, wanted: Collection[int], by: str) -> list[dict[str, Any]]:
        """End silences before their time; what fires under them pages at the next tick. Those that ended are told.

        Raises:
            ValueError: none of them holds.
        """
        now = self._clock()
        with self._lock:
            ended = [one for one in silences.active(self.node.silences, now) if one.id in wanted]
            if not ended:
                raise ValueError("there is no such silence; `tocsin silence --list` shows those that hold")
            self.node.silences = silences.end(self.node.silences, wanted, by, now)
            self._keep_silences(now)
        for one in ended:
            log.warning("silence_ended", silence=one.id, rule=one.rule, subject=one.subject, by=by)
        return silences.to_plain(ended)

    def _keep_silences(self, now: float) -> None:
        self.node.silences = silences.pruned(self.node.silences, now)
        self.store.set_meta(SILENCES, silences.to_plain(self.node.silences))

    def alert_stats(self, last_s: float) -> dict[str, Any]:
        """How often each rule fired in the last so many seconds, for how long, and how often for less than 5 min."""
        now = self._clock()
        return noise.stats(self.store.changes(now - last_s), now - last_s, now)

    def tell(self, signal: str, subject: str, text: str | None) -> None:
        """What drilld says of a run or a drill; None: it is no longer so."""
        with self._lock:
            self.node.tell(signal, subject, text)

    def release_nvml(self, for_s: float | None) -> dict[str, Any]:
        """Close all NVML handles, so that a reset or a driver reload can proceed."""
        source: Any = self._nvml()
        if source is None:
            return {"released": False, "why": "NVML is off or not there"}
        why = source.release(for_s)
        log.info("nvml_released", for_s=for_s, not_yet=why)
        return {"released": why is None, "why": why, "for_s": for_s}

    def reopen_nvml(self) -> dict[str, Any]:
        """Open NVML again now."""
        source: Any = self._nvml()
        if source is None:
            return {"reopened": False, "why": "NVML is off or not there"}
        source.reopen()
        return {"reopened": True}

    def gpu_processes(self) -> dict[int, int] | None:
        """Bytes of GPU memory by pid; None where nobody can tell."""
        source: Any = self._nvml()
        found: dict[int, int] | None = None if source is None else source.processes()
        return found

    def expect_kernel_line(self, message: str, for_s: float = 10.0) -> bool:
        """A drill will write exactly this to /dev/kmsg: once, within `for_s`, it counts. False: the log is not read."""
        slot = self.collector.slots.get("kernel_log")
        if slot is None:
            return False
        source: Any = slot.source
        source.expect(message, for_s)
        return True

    def _nvml(self) -> Source | None:
        slot = self.collector.slots.get("nvml")
        return None if slot is None else slot.source

    def tick_at(self) -> float | None:
        """When the last tick was finished."""
        return self._tick_at

    def source_stats(self) -> Iterable[SourceStat]:
        """One row a source."""
        return [SourceStat(name, slot.last.took_s if slot.last else None, slot.errors)
                for name, slot in self.collector.slots.items()]

    def saved(self) -> bool:
        """Whether all that was judged and is owed would outlive this process."""
        return self.store.problem is None

    def outbox_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Notices by channel and state."""
        return self.store.outbox_counts()

    def delivery_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Deliveries since the start by channel and outcome."""
        return {name: {"delivered": s.delivered, "rejected": s.rejected, "retried": s.retried}
                for name, s in self._channels().items()}


def tell_sources(node: Node, collector: Collector) -> None:
    """Sources learn what the node knows: whose each process is, and that it is one of a deployment pattern."""
    is_patterned = bool(node.deployment)
    for slot in collector.slots.values():
        if slot.by_pattern is not None and is_patterned:
            slot.by_pattern.is_patterned = True
        if slot.by_process is not None:
            slot.by_process.owners = node.owners()


def _series(row: LayoutRow) -> tuple[SeriesKey, ...]:
    """What the numbers of a frame mean; () where that is damaged, and the frames of it are left out."""
    try:
        return tuple(msgspec.json.decode(row.keys_json, type=list[tuple[str, str, str]]))
    except msgspec.MsgspecError:
        return ()


def _rows(frames: Iterable[FrameRow], keys: Mapping[tuple[str, int], tuple[SeriesKey, ...]]) -> Iterable[Row]:
    """Saved frames as rows of windows; one whose layout is lost is left out."""
    for frame in frames:
        series = keys.get((frame.track, frame.layout))
        values = array("d")
        values.frombytes(frame.blob[: len(frame.blob) // 8 * 8])
        if series is not None and len(series) == len(values):
            yield Row(frame.track, frame.res, frame.at, series, values)


def doctor_report(node: Node, slots: Mapping[str, Slot], mono: float) -> dict[str, Any]:
    """What `tocsin doctor` shows: how each quantity was had."""
    required = {name for rule in node.setup.rules if rule.required for name in MADE_FROM.get(rule.signal, ())}
    targets = []
    for target in node.setup.targets:
        slot = slots.get(f"engine:{target.name}")
        facts = node.facts.get(target.name) or EngineFacts(target.name, ())
        targets.append({"target": target.name, "url": getattr(slot.source, "url", None) if slot else None,
                        "kind": facts.kind, "model": facts.model, "build": facts.build,
                        "engines": list(facts.engines), "error": slot.last.error if slot and slot.last else None,
                        "found": [f._asdict() | {"required": f.name in required} for f in facts.found],
                        "notes": node.advice(target.name), "configs": node.learned.configs.get(target.name, []),
                        "profile": None if target.name in node.learned.found else target.profile,
                        "binds": node.bound_rows(target.name) if target.name in node.scene.targets else [],
                        "facts": node.facts_told(node.scene.targets[target.name]) if target.name in node.scene.targets
                        else {}})
    routers = [{"target": name, "url": getattr(slots[source].source, "url", None), "kind": facts.kind, "model": None,
                "build": facts.build, "engines": [], "error": _error_of(slots[source]),
                "found": [f._asdict() | {"required": False} for f in facts.found]}
               for source in slots if source.startswith("router:") and (name := source.removeprefix("router:"))
               for facts in [node.routers.get(name) or EngineFacts(name, ())]]
    gpus = [{"uuid": g.uuid, "index": g.index, "name": g.name, "bdf": g.bdf, "limit_c": g.limit_c,
             "found": [f._asdict() | {"required": f.name in required} for f in g.found]} for g in node.gpus.values()]
    sources = [{"name": name, "age_s": round(mono - slot.answered_at, 1),
                "took_s": slot.last.took_s if slot.last else None, "error": slot.last.error if slot.last else None,
                "note": getattr(slot.source, "note", None)}
               for name, slot in slots.items()]
    return {"targets": targets, "routers": routers, "gpus": gpus, "sources": sources,
            "patterns": node.check()["patterns"]}


def _error_of(slot: Slot) -> str | None:
    return slot.last.error if slot.last else None
