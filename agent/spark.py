"""How each signal went in the last ten minutes, for the one line of a page: twenty half minutes each, no more. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from math import isnan, nan

from agent.model import AlertKey

SPAN_S = 600.0
SLOTS = 20
SLOT_S = SPAN_S / SLOTS
BARS = "▁▂▃▄▅▆▇█"


class Sparks:
    """The last value of each half minute of each signal; what is older, or no longer told, is forgotten."""

    def __init__(self) -> None:
        self._slots: dict[AlertKey, array[float]] = {}
        self._slot = 0  # of the newest value

    def take(self, now: float, values: Mapping[AlertKey, float]) -> None:
        """Note these values."""
        slot = int(now // SLOT_S)
        for passed in range(max(self._slot + 1, slot - SLOTS + 1), slot + 1):  # what nobody watched has no value
            for row in self._slots.values():
                row[passed % SLOTS] = nan
        if slot < self._slot:  # the clock has stepped back: nothing of later is true
            self._slots = {}
        self._slot = slot
        for key, value in values.items():
            if key not in self._slots:
                self._slots[key] = array("f", [nan] * SLOTS)
            self._slots[key][slot % SLOTS] = value
        for key in [key for key, row in self._slots.items() if key not in values and all(map(isnan, row))]:
            del self._slots[key]

    def values(self, key: AlertKey) -> list[float]:
        """Oldest first; NaN where nobody knows, and none before the first that is known."""
        row = self._slots.get(key)
        if row is None:
            return []
        ordered = [row[n % SLOTS] for n in range(self._slot + 1, self._slot + 1 + SLOTS)]
        first = next((n for n, value in enumerate(ordered) if not isnan(value)), SLOTS)
        return ordered[first:]


def line(values: Iterable[float]) -> str:
    """Values as bars, the lowest ▁ and the highest █; a gap is a space. All the same: the middle one."""
    row = list(values)
    known = [value for value in row if not isnan(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(BARS) - 1)
    return "".join(" " if isnan(v) else BARS[3] if not step else BARS[round((v - low) / step)] for v in row)
