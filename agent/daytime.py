"""Windows of the day: (start, end) in minutes from midnight, the end outside; they may wrap midnight."""

from __future__ import annotations

from datetime import datetime, timedelta
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
    """How long a window that is open at a time stays open: until a clock in `zone` shows its end.

    On a day of 23 or 25 hours, too; only an end within the hour that is left out or comes twice may be an hour off.
    """
    local = datetime.fromtimestamp(at, ZoneInfo(zone))
    end = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0) + timedelta(minutes=window[1])
    if end <= local:  # of one zone: compared as the clock shows them
        end += timedelta(days=1)
    left = end.timestamp() - at
    return left if left > 0 else end.replace(fold=1).timestamp() - at  # in the hour that a clock shows twice
