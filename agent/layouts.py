"""What the columns of saved frames mean: each set of them has a number, which is told to the store once. Pure."""

from __future__ import annotations

from collections.abc import Collection

from agent.windows import SeriesKey

IDLE_S = 600.0  # a set that was not written for so long is forgotten: engines came and went
Keys = tuple[SeriesKey, ...]


class Layouts:
    """The sets of columns that are being written. One that comes back after it was forgotten has a new number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Keys], int] = {}
        self._used_at: dict[tuple[str, Keys], float] = {}  # monotonic
        self._next = 1

    def __len__(self) -> int:
        return len(self._numbers)

    def take_back(self, track: str, keys: Keys, number: int, mono: float) -> None:
        """One that was told before the restart."""
        self._numbers[(track, keys)], self._used_at[(track, keys)] = number, mono
        self.follow(number)

    def follow(self, number: int) -> None:
        """Up to this number they are given away: what was pruned left holes, their count says nothing."""
        self._next = max(self._next, number + 1)

    def number(self, track: str, keys: Keys, mono: float) -> tuple[int, bool]:
        """The number of a set, and whether it is new and must be told."""
        key = (track, keys)
        is_new = key not in self._numbers
        if is_new:
            self._numbers[key] = self._next
            self._next += 1
        self._used_at[key] = mono
        return self._numbers[key], is_new

    def of_track(self, track: str) -> dict[int, Keys]:
        """The sets of one track by their numbers."""
        return {number: keys for (name, keys), number in self._numbers.items() if name == track}

    def forget(self, mono: float, kept: Collection[tuple[str, int]] | None = None) -> None:
        """Forget what is not written any more; and what the store has no more, where it tells what it has kept."""
        for key in [key for key, number in self._numbers.items() if mono - self._used_at[key] > IDLE_S
                    or (kept is not None and (key[0], number) not in kept)]:
            del self._numbers[key], self._used_at[key]
