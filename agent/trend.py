"""How each signal went, for the curves of the status page: every value for 2 h, the worst of each minute for 24 h.

What a minute brought is one frame of the store at its end, so that plots cost a write a minute and a few kilobytes of
memory; a crash loses at most the last minute of a curve, and nothing of what alerts are judged by.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping
from math import isnan, nan
from typing import NamedTuple

from agent.model import AlertKey

TRACK = "trend"
FINE, MINUTE = "trend", "trend-minute"  # the two resolutions, as the store calls them
KEPT_S: Mapping[str, float] = {FINE: 2 * 3600.0, MINUTE: 24 * 3600.0}
MINUTE_S = 60.0


class Saved(NamedTuple):
    """A frame to save: `keys` are its columns, `blob` its moments."""

    res: str
    at: float
    keys: tuple[AlertKey, ...]
    blob: bytes


class Trend:
    """The minute under way. `keys` are the series, in the order of their values."""

    def __init__(self) -> None:
        self._keys: tuple[AlertKey, ...] = ()
        self._at: list[float] = []
        self._values = array("f")

    def take(self, now: float, values: Mapping[AlertKey, float | None], falls: Iterable[str] = ()) -> list[Saved]:
        """Note each series' value at `now` (None: not known); what is to be saved of the minute before, if it is over.

        `falls`: rules of which the lowest value is the worst.
        """
        saved: list[Saved] = []
        if self._at and (_minute(self._at[0]) != _minute(now) or values.keys() != set(self._keys)):
            saved = self.minute(falls)
            self._at, self._values = [], array("f")
        if not self._at:
            self._keys = tuple(values)
        self._at.append(now)
        self._values.extend(nan if (value := values[key]) is None else value for key in self._keys)
        return saved

    def minute(self, falls: Iterable[str] = ()) -> list[Saved]:
        """The minute so far: each of its moments, and the worst of them."""
        if not self._at or not self._keys:
            return []
        width, low = len(self._keys), frozenset(falls)
        worst = array("f")
        for column, (rule, _) in enumerate(self._keys):
            known = [value for value in self._values[column::width] if not isnan(value)]
            worst.append((min(known) if rule in low else max(known)) if known else nan)
        return [Saved(FINE, self._at[-1], self._keys, _pack(self._at, self._values)),
                Saved(MINUTE, self._at[-1], self._keys, _pack(self._at[-1:], worst))]


def _minute(at: float) -> int:
    return int(at // MINUTE_S)


def _pack(moments: Iterable[float], values: array[float]) -> bytes:
    return zlib.compress(array("d", moments).tobytes() + values.tobytes(), 1)


def unpack(blob: bytes, width: int) -> tuple[array[float], array[float]]:
    """The moments of a frame (unix seconds), and its values, moment by moment, `width` each.

    Raises ValueError: it is no such frame.
    """
    try:
        raw = zlib.decompress(blob)
    except zlib.error as error:
        raise ValueError(f"a trend's frame cannot be read: {error}") from error
    count, rest = divmod(len(raw), 8 + 4 * width)
    if rest:
        raise ValueError(f"a trend's frame of {len(raw)} bytes does not hold whole moments of {width} values")
    moments, values = array("d"), array("f")
    moments.frombytes(raw[: 8 * count])
    values.frombytes(raw[8 * count:])
    return moments, values


Points = dict[AlertKey, list[tuple[float, float]]]


def points(saved: Iterable[Saved], wanted: frozenset[AlertKey] | None = None) -> Points:
    """The known values of each series (of `wanted` alone, if given) by time: (unix seconds, value).

    A frame that is damaged is left out: a curve with a hole is better than none.
    """
    found: Points = {}
    for frame in saved:
        columns = [(n, key) for n, key in enumerate(frame.keys) if wanted is None or key in wanted]
        if not columns:
            continue
        try:
            moments, values = unpack(frame.blob, len(frame.keys))
        except ValueError:
            continue
        rows = [(column, found.setdefault(key, [])) for column, key in columns]
        for moment, at in enumerate(moments):
            start = moment * len(frame.keys)
            for column, row in rows:
                value = values[start + column]
                if value == value:  # not NaN, forty thousand times a page
                    row.append((at, value))
    return found
