"""When a drill is due: cron lines in their zone, windows of the day, blackouts. Pure; times are unix seconds.

Fixed times behave as in Debian's cron on the days on which the clock is put forward or back: one in the hour that does
not exist comes right after it, one in the repeated hour comes once; day of month and day of week together mean OR.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from agent import daytime
from agent.daytime import DAY_MINUTES
from agent.strict import Unfit
from drills.model import Schedule

# Of each field its name and its numbers; a week's Sunday is 0 and 7.
_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 1, 7))
_NAMES = {name: number for names, begin in (("SUN MON TUE WED THU FRI SAT", 0),
                                            ("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1))
          for number, name in enumerate(names.split(), begin)}


def _parsed(cron: str, since: datetime) -> CronSim:
    """A line, to be asked for its times after `since`; a week may end with Sunday: SAT-SUN. Raises CronSimError."""
    return CronSim(re.sub(r"(?i)(?<![\s,]SUN)-SUN(?=[,/]|\s*$)", "-7", cron), since)


def check(cron: str) -> None:
    """Raise Unfit where a line cannot be read, can never be due, or says another rhythm than it has."""
    since = datetime(2000, 1, 1, tzinfo=UTC)
    fields = cron.split()
    remedy = 'write minute, hour, day, month and weekday, as "0 10 * * TUE#1"'
    if len(fields) != 5:  # a sixth would be seconds, for which the days of the clock change have no rule
        raise Unfit(f"{cron!r} has {len(fields)} fields", remedy)
    for field, (name, low, top) in zip(fields, _FIELDS, strict=True):
        _refuse_misread(cron, field, name, low, top)
    try:
        next(_parsed(cron, since))
    except StopIteration:
        raise Unfit(f"{cron!r} never matches", "no month has such a day; choose another day or month") from None
    except CronSimError as error:
        try:  # is it the day itself, or the day in these months?
            _parsed(" ".join([*fields[:3], "*", fields[4]]), since)
            _parsed(" ".join([*fields[:2], "*", *fields[3:]]), since)
        except CronSimError:
            raise Unfit(f"{cron!r}: {str(error).lower()}", remedy) from None
        raise Unfit(f"{cron!r} never matches", "no month has such a day; choose another day or month") from None


def _refuse_misread(cron: str, field: str, name: str, low: int, top: int) -> None:
    """Raise Unfit for a step that leaves its field, and for a range that ends before it begins. Others may be wrong."""
    for part in field.split(","):
        span, _, step = part.partition("/")
        if step.isdecimal() and (len(step) > 4 or int(step) > top - low + 1):
            told = f"{part} is no rhythm: {name}s are counted anew from {low} each time"
            raise Unfit(f"{cron!r}: {told}", f"write a step of at most {top - low + 1}, or the {name}s themselves")
        begin, end = (_NAMES.get(word.upper(), int(word) if word.isdecimal() and len(word) < 5 else None)
                      for word in (f"{span}-".split("-")[:2]))
        if begin is not None and end is not None and begin > (7 if span.upper().endswith("-SUN") else end):
            raise Unfit(f"{cron!r}: {span} ends before it begins", "write it as two ranges, as 22-23,0-2 for hours")


def minutes_of_day(cron: str) -> list[int]:
    """The minutes of the day at which a line can be due."""
    parsed = _parsed(cron, datetime(2000, 1, 1, tzinfo=UTC))
    return sorted(hour * 60 + minute for hour in parsed.hours for minute in parsed.minutes)


def dues(cron: str, zone: str, after: float) -> Iterator[float]:
    """Each time at which a line is due, strictly later than `after`, rising; none after fifty years without one."""
    last = after
    for moment in _parsed(cron, datetime.fromtimestamp(after, ZoneInfo(zone))):
        at = moment.timestamp()
        if at > last:  # in the repeated hour the wall clock alone would lead back
            yield at
            last = at


def next_due(cron: str, zone: str, after: float) -> float | None:
    """The next time at which a line is due, strictly later than `after`."""
    return next(dues(cron, zone, after), None)


def dues_between(cron: str, zone: str, after: float, until: float, most: int) -> list[float]:
    """The times in (after, until], at most the first `most`."""
    found: list[float] = []
    for at in islice(dues(cron, zone, after), most):
        if at > until:
            break
        found.append(at)
    return found


def closed(schedule: Schedule, at: float) -> str:
    """Why a drill may not begin at `at`: its window or a blackout; "" where it may."""
    local = datetime.fromtimestamp(at, ZoneInfo(schedule.zone))
    if schedule.window is not None and not daytime.in_window(schedule.window, local.hour * 60 + local.minute):
        start, end = (f"{minute // 60:02d}:{minute % 60:02d}" for minute in schedule.window)
        return f"{local:%H:%M} is outside the window {start}-{end} {schedule.zone}"
    for first, end in schedule.blackouts:
        if first <= local.date().isoformat() < end:
            last = date.fromisoformat(end) - timedelta(days=1)
            return f"{local:%Y-%m-%d} is in the blackout {first}/{last} {schedule.zone}"
    return ""


def window_left_s(schedule: Schedule, at: float) -> float:
    """How long the window that is open at `at` stays open; a day where there is none."""
    return DAY_MINUTES * 60.0 if schedule.window is None else daytime.left_s(schedule.window, schedule.zone, at)


def daily(schedule: Schedule, due_at: float, after: float) -> float:
    """The first opening strictly later than `after` at the drill's hour: that of `due_at` where the window has it.

    Days in a blackout are passed over, at most a year of them. A time that a day does not have comes right after.
    """
    zone = ZoneInfo(schedule.zone)
    local = datetime.fromtimestamp(due_at, zone)
    own = local.hour * 60 + local.minute
    inside = [minute for minute in minutes_of_day(schedule.cron)
              if schedule.window is None or daytime.in_window(schedule.window, minute)]
    hour, minute = divmod(own if not inside or own in inside else inside[0], 60)
    at = after
    for at in islice(dues(f"{minute} {hour} * * *", schedule.zone, after), 366):
        if not closed(schedule, at):
            break
    return at
