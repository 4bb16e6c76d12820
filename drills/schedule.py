"""When drills run: what is due, what was missed, what is tried again, what is given up. Time is an argument.

The decisions are pure; `Timetable` is the edge, on APScheduler. Nothing fires because it was loaded: a drill that was
never seen before, or whose cron line is another one now, is due from its next time on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import structlog
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.date import DateTrigger

from drills import cron, ledger, owner
from drills.lock import RUNS
from drills.model import DAY_S, Drill, Schedule, Verdict, is_past

log = structlog.get_logger()

BOOK = "schedule.json"
MOST_DUES = 2_000  # counted one by one, after a long stop
MOST_NOES = 40  # different ones, of one drill that is owed
LOOK_AGAIN_S = 300.0  # also when nothing is to come: a clock was set, a host slept
OFF = "off "  # before the form of a drill that is not enabled
NOT_RUN = frozenset({Verdict.SKIPPED, Verdict.DEFERRED})


@dataclass(frozen=True, slots=True)
class No:
    """What said no, and when first and last."""

    why: str
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class Owed:
    """A drill that was due and has not run yet. Grace counts from `since`, its first time that is not given up."""

    since: float
    due_at: float  # the latest time that one run will stand for
    tried_at: float | None = None
    why: str = ""  # what said no to the last try
    noes: tuple[No, ...] = ()  # what said no to all of them, each once


@dataclass(frozen=True, slots=True)
class Seen:
    """What is remembered of a drill between two looks. `form` is its cron line and zone, after OFF while it is off."""

    form: str
    known_at: float
    looked_at: float
    owed: Owed | None = None
    verdict_at: float | None = None  # when it last had a verdict of its own


class Look(NamedTuple):
    """What a look at the calendar found. `missed`: times that nobody will make up for, as one entry."""

    seen: Seen
    missed: Sequence[float] = ()


class Step(NamedTuple):
    """What to do about something owed: run it, wait until `at`, put it off until `at`, or give it up."""

    kind: Literal["run", "wait", "defer", "skip"]
    at: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """A run or a refusal that a ledger tells of. `due_at`: the time it stood for; None: a person started it."""

    drill: str
    at: float
    verdict: Verdict
    due_at: float | None = None
    why: str = ""


# ---- deciding, pure ----


def look(drill: Drill, seen: Seen | None, now: float) -> Look:
    """What became due since the last look. Several times are one run, for the latest; what is over grace is missed."""
    schedule = drill.schedule
    assert schedule is not None  # noqa: S101  (others are never asked)
    form = f"{schedule.cron} {schedule.zone}"
    if seen is not None and seen.form == f"{OFF}{form}":  # what was owed still is; what came meanwhile was not wanted
        seen = replace(seen, form=form, known_at=now, looked_at=now)
    if seen is None or seen.form != form or not is_past(seen.looked_at, now):
        verdict_at = None if seen is None or not is_past(seen.verdict_at or 0.0, now) else seen.verdict_at
        return Look(Seen(form, now, now, None, verdict_at))
    dues = _dues(schedule, seen.looked_at, now)
    seen = replace(seen, looked_at=max(now, seen.looked_at))
    if not dues:
        return Look(seen)
    fresh = [at for at in dues if now - at < schedule.grace_s]
    if not fresh:
        return Look(seen, dues)
    owed = seen.owed or Owed(fresh[0], fresh[-1])
    return Look(replace(seen, owed=replace(owed, due_at=fresh[-1])), dues[:-1])


def put_away(seen: Seen) -> Seen:
    """What is remembered of a drill that is not enabled, or was taken out: nothing becomes due until it is back."""
    return seen if seen.form.startswith(OFF) else replace(seen, form=f"{OFF}{seen.form}")


def _dues(schedule: Schedule, after: float, until: float) -> list[float]:
    dues = cron.dues_between(schedule.cron, schedule.zone, after, until, MOST_DUES)
    if len(dues) == MOST_DUES:  # each minute for a month: the last day is enough
        dues += cron.dues_between(schedule.cron, schedule.zone, max(dues[-1], until - DAY_S), until, MOST_DUES)
    return dues


def decide(
    drill: Drill, owed: Owed, now: float, *, node: str, active: str | None, last_run_at: float | None, min_gap_s: float
) -> Step:
    """What to do now about a drill that is owed. `active`: its own run that goes on; `last_run_at`: any drill's."""
    schedule = drill.schedule
    assert schedule is not None  # noqa: S101
    ends = owed.since + schedule.grace_s
    if active is not None:
        return Step("skip", now, f"its run {active} has not ended yet")
    if now >= ends:
        return Step("skip", now, f"not once in {schedule.grace_s / DAY_S:g} d: {_noes_text(owed)}")
    slot = owed.due_at if owed.tried_at is None else cron.daily(schedule, owed.due_at, owed.tried_at)
    start = slot + jitter_s(schedule, run_id(drill.name, slot, node), slot)
    if now < start:
        return Step("wait", min(start, ends))
    why = cron.closed(schedule, now)
    if not why and last_run_at is not None and is_past(last_run_at, now) and now - last_run_at < min_gap_s:
        gap = f"{max(0.0, now - last_run_at) / 3600:.1f} h ago; drill_guards.min_gap is {min_gap_s / 3600:g} h"
        why = f"another drill ran {gap}"
    if why:
        return Step("defer", min(cron.daily(schedule, owed.due_at, now), ends), why)
    return Step("run", now)


def tried(seen: Seen, now: float, verdict: Verdict, why: str) -> Seen:
    """What is remembered after a try: a no leaves it owed, everything else is a verdict."""
    if verdict not in NOT_RUN:
        return replace(seen, owed=None, verdict_at=now)
    if seen.owed is None:
        return seen
    return replace(seen, owed=replace(seen.owed, tried_at=now, why=why, noes=_more(seen.owed.noes, why, now)))


def _more(noes: Sequence[No], why: str, now: float) -> tuple[No, ...]:
    """One more no: the same again is later only. Of very many the first and the latest stay."""
    before = next((no for no in noes if no.why == why), None)
    others = [no for no in noes if no is not before]
    found = [*others, No(why, now if before is None else before.first_at, now)]
    return (*found[:1], *found[1:][-(MOST_NOES - 1):])


def _noes_text(owed: Owed) -> str:
    """All reasons with their times, the latest last."""
    noes = owed.noes or ((No(owed.why, owed.tried_at, owed.tried_at),) if owed.why and owed.tried_at else ())
    times = ((no, f"{_utc(no.first_at)}{f' to {_utc(no.last_at)}' if no.last_at > no.first_at else ''}") for no in noes)
    return "; ".join(f"{no.why} ({when})" for no, when in times) or "never tried"


def in_turn(seen: Mapping[str, Seen], names: Iterable[str]) -> list[str]:
    """Several drills want to run: longest since its last verdict first, those that never had one before all."""

    def rank(name: str) -> tuple[float, float, str]:
        one = seen[name]
        return (one.verdict_at or 0.0, one.owed.since if one.owed else 0.0, name)

    return sorted(names, key=rank)


def run_id(drill: str, at: float, node: str) -> str:
    """The id of the run of a drill for one time: the same again after a restart, another one on another node."""
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{drill}-{stamp}-{hashlib.sha256(f'{node}/{drill}/{stamp}'.encode()).hexdigest()[:4]}"


def is_of(run: str, drill: str) -> bool:
    """Whether a run's id is of a drill: `net` is no part of `net-both`."""
    return re.fullmatch(rf"{re.escape(drill)}-[0-9]{{8}}T[0-9]{{6}}Z-[0-9a-f]{{4}}", run) is not None


def jitter_s(schedule: Schedule, run: str, slot: float) -> float:
    """How much later than its time a run begins: always the same for a run, and never out of its window."""
    part = int(hashlib.sha256(run.encode()).hexdigest()[:8], 16) / 2**32
    return part * min(schedule.jitter_s, max(0.0, cron.window_left_s(schedule, slot) - 60.0))


def overdue(drill: Drill, history: Sequence[Past], now: float, known_at: float | None = None,
            verdict_at: float | None = None) -> str | None:
    """Why rule no-drill is in breach: the drill was due and did not run; None where all is well.

    `known_at`: since when the drill is configured, for one that never ran; `verdict_at`: when the timetable last heard
    of a verdict, of another node's run as well.
    """
    schedule = drill.schedule
    if schedule is None or not drill.enabled:
        return None
    mine = [past for past in history if past.drill == drill.name and is_past(past.at, now)]
    verdict_at = verdict_at if is_past(verdict_at or 0.0, now) else None
    ran = [past.at for past in mine if past.verdict not in NOT_RUN]
    ran_at = max([*ran, *([verdict_at] if verdict_at is not None else ())], default=None)
    given_up = [p for p in mine if p.verdict is Verdict.SKIPPED and p.due_at is not None and p.at > (ran_at or 0.0)]
    if given_up:
        last = max(given_up, key=lambda past: past.at)
        return f"{drill.name} was due {_utc(last.due_at or last.at)} and was skipped: {last.why}"
    since = max((at for at in (ran_at, known_at) if at is not None), default=None)  # before, it had another line
    due = None if since is None else cron.next_due(schedule.cron, schedule.zone, since)
    if due is None or now <= due + schedule.grace_s:
        return None
    return f"{drill.name} was due {_utc(due)} and has not run in {schedule.grace_s / DAY_S:g} d"


def _utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%MZ}"


def missed_text(missed: Sequence[float]) -> str:
    """One sentence for all times that nobody will make up for."""
    times = f"{len(missed)} times" if len(missed) > 1 else "once"
    return f"missed {times}, {_utc(missed[0])} to {_utc(missed[-1])}: drilld was not running"


# ---- the edge ----


class CronTrigger(BaseTrigger):  # type: ignore[misc]  # (APScheduler 3 has no types)
    """A cron line for APScheduler, whose own trigger gets clock changes and day OR weekday wrong."""

    __slots__ = ("cron", "zone")

    def __init__(self, line: str, zone: str) -> None:
        self.cron, self.zone = line, zone

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The next time after the last one, or after now; None for never."""
        at = cron.next_due(self.cron, self.zone, (previous_fire_time or now).timestamp())
        return None if at is None else datetime.fromtimestamp(at, UTC)


@dataclass(frozen=True, slots=True)
class Hands:
    """What the timetable has others do. Called in its one thread, one after the other."""

    run: Callable[[Drill, str, float], tuple[Verdict, str]]  # (drill, run id, due at) -> how it ended, after its end
    skip: Callable[[Drill, str, float, str], None]  # (drill, run id, due at, why): write a run that is SKIPPED
    defer: Callable[[Drill, str, float, str], None]  # the same, DEFERRED: it is tried again
    active: Callable[[str], str | None]  # a drill's run that has not ended, whoever started it
    last_run_at: Callable[[], float | None]  # when a fault was last in on this node


class Timetable:
    """Runs drills when they are due. Remembers in `<state_dir>/drills/schedule.json` what was seen and what is owed."""

    def __init__(
        self, drills: Sequence[Drill], hands: Hands, *, root: Path, node: str, min_gap_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._hands, self._root, self._node, self._min_gap_s, self._clock = hands, root, node, min_gap_s, clock
        self._drills: Mapping[str, Drill] = {}
        self.book: dict[str, Seen] = read_book(root)
        # One worker: never two drills at once. No grace: whether a late one still counts is decided here, not there.
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            timezone=UTC,
        )
        self.load(drills)

    def load(self, drills: Sequence[Drill], min_gap_s: float | None = None) -> None:
        """Take these drills, and this gap between two of them, from now on; a run under way goes on. Starts nothing."""
        self._min_gap_s = self._min_gap_s if min_gap_s is None else min_gap_s
        self._drills = {drill.name: drill for drill in drills if drill.schedule is not None and drill.enabled}
        self.book = {name: seen if name in self._drills else put_away(seen) for name, seen in self.book.items()}
        for job in self._scheduler.get_jobs():
            if job.id.startswith("due "):
                job.remove()
        for name, drill in self._drills.items():
            assert drill.schedule is not None  # noqa: S101
            trigger = CronTrigger(drill.schedule.cron, drill.schedule.zone)
            self._scheduler.add_job(self._woken, trigger, id=f"due {name}", replace_existing=True)
        self._again(self._clock())

    def start(self) -> None:
        """Begin, with a look at what was missed meanwhile."""
        self._scheduler.start()

    def stop(self) -> None:
        """Start nothing more. A run that is under way is its runner's business."""
        # Shut down while its thread puts a job away, APScheduler 3 does not find that job any more, and the thread ends
        # with a traceback. Paused, it begins with none; to list them waits until it is done with one.
        self._scheduler.pause()
        self._scheduler.get_jobs()
        self._scheduler.shutdown(wait=False)

    def _again(self, at: float) -> None:
        when = DateTrigger(datetime.fromtimestamp(at, UTC))
        self._scheduler.add_job(self._woken, when, id="look", replace_existing=True)

    def keep_time(self) -> None:
        """Look now, where a clock that was put back would have the next look wait until it has caught up."""
        next_look = self._scheduler.get_job("look")
        if next_look is not None and next_look.next_run_time.timestamp() > self._clock() + 2 * LOOK_AGAIN_S:
            log.info("clock_put_back", next_look=_utc(next_look.next_run_time.timestamp()))
            self.load(list(self._drills.values()))

    def _woken(self) -> None:
        """A job. APScheduler swallows whatever a job raises, an exit too: it is said here, and looked again later."""
        at = self._clock() + LOOK_AGAIN_S
        try:
            at = min(at, self.look())
        except BaseException:
            log.exception("schedule_failed")
        self._again(at)

    def look(self) -> float:
        """Look at the calendar, run what may run, one after the other; returns when the next one may be due.

        Raises OSError where nothing can be remembered: then nothing is run.
        """
        while True:
            now, drills = self._clock(), self._drills
            for drill in drills.values():
                self._note(drill, look(drill, self.book.get(drill.name), now))
            steps = {name: self._step(drill, owed, now) for name, drill in drills.items()
                     if (owed := self.book[name].owed)}  # fmt: skip
            for name, step in steps.items():
                self._put_off(drills[name], step, now)
            self._remember()
            ready = in_turn(self.book, [name for name, step in steps.items() if step.kind == "run"])
            if not ready:
                return min((step.at for step in steps.values() if step.kind != "skip"), default=now + LOOK_AGAIN_S)
            self._try(drills[ready[0]])

    def _step(self, drill: Drill, owed: Owed, now: float) -> Step:
        active, last_run_at = self._hands.active(drill.name), self._hands.last_run_at()
        return decide(
            drill, owed, now, node=self._node, active=active, last_run_at=last_run_at, min_gap_s=self._min_gap_s
        )

    def _note(self, drill: Drill, found: Look) -> None:
        self.book[drill.name] = found.seen
        if found.missed:
            self._skip(drill, found.missed[-1], found.missed[-1], missed_text(found.missed))

    def _put_off(self, drill: Drill, step: Step, now: float) -> None:
        seen = self.book[drill.name]
        assert seen.owed is not None  # noqa: S101
        if step.kind == "defer":
            log.info("drill_deferred", drill=drill.name, why=step.why, until=_utc(step.at))
            self._hands.defer(drill, run_id(drill.name, now, self._node), seen.owed.due_at, step.why)
            self.book[drill.name] = tried(seen, now, Verdict.DEFERRED, step.why)
        elif step.kind == "skip":
            self._skip(drill, now, seen.owed.due_at, step.why)
            self.book[drill.name] = replace(seen, owed=None)

    def _skip(self, drill: Drill, at: float, due_at: float, why: str) -> None:
        log.warning("drill_skipped", drill=drill.name, due=_utc(due_at), why=why)
        self._hands.skip(drill, run_id(drill.name, at, self._node), due_at, why)

    def _try(self, drill: Drill) -> None:
        seen, now = self.book[drill.name], self._clock()
        assert seen.owed is not None  # noqa: S101
        # Said before it is done: a crash in the middle of the run does not start it again at once.
        self.book[drill.name] = tried(seen, now, Verdict.DEFERRED, "drilld ended while it ran")
        self._remember()
        verdict, why = self._hands.run(drill, run_id(drill.name, now, self._node), seen.owed.due_at)
        log.info("drill_tried", drill=drill.name, verdict=verdict, why=why)
        seen = tried(seen, self._clock(), verdict, why)
        self.book[drill.name] = seen if drill.name in self._drills else put_away(seen)  # it was put off meanwhile
        self._remember()

    def _remember(self) -> None:
        write_book(self._root, self.book)


def read_book(root: Path) -> dict[str, Seen]:
    """What was remembered; empty where there is nothing to be read: then all drills are as new."""
    try:
        return msgspec.json.decode((root / BOOK).read_bytes(), type=dict[str, Seen])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("schedule_forgotten", file=str(root / BOOK), error=str(error))
        return {}


def write_book(root: Path, book: Mapping[str, Seen]) -> None:
    """Remember it, whole or not at all. Raises OSError."""
    owner.make_folder(root)
    aside = root / f".{BOOK}"
    with aside.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(book), indent=1))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(root / BOOK)
    owner.give(root / BOOK)


def history_of(root: Path) -> list[Past]:
    """Every run that has a record, oldest first, for `overdue`. Raises OSError."""
    found = []
    for folder in ledger.run_folders(root / RUNS):
        try:
            record = json.loads((folder / "run.json").read_bytes())
            at = record["ended_at"] or record["started_at"] or record["planned_at"]
            verdict = Verdict(record["verdict"])
            found.append(Past(record["drill"]["name"], at, verdict, record.get("due_at"), record["why"]))
        except (OSError, ValueError, LookupError, TypeError):
            continue  # half a record, or one that another version wrote
    return found
