"""Windows of the day: (start, end) in minutes from midnight, the end outside; they may wrap midnight."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

DAY_MINUTES = 1440
Window = tuple[int, int]


def in_window(window: Window, minute: int) -> bool:
    """Whether a minute of the day lies in a window."""
    start, end = window
    return start <= minute < end if start < end else minute >= start or minute < end


def minute_of_day(zone: str, at: float) -> int:
    """The minute of the day that a clock in `zone` shows at a time (unix seconds)."""
    local = datetime.fromtimestamp(at, ZoneInfo(zone))
    return local.hour * 60 + local.minute


def left_s(window: Window, zone: str, at: float) -> float:
    """How long a window that is open at a time stays open. On a day whose clock steps, an hour off at most."""
    second = datetime.fromtimestamp(at, ZoneInfo(zone)).second
    return ((window[1] - minute_of_day(zone, at) - 1) % DAY_MINUTES + 1) * 60.0 - second
