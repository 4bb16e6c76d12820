"""The memory of numbers: increase, history and coverage over a window, through counter resets and restarts.

Every source has a track: one row a good read, one column a series. Counters are kept as what they have risen since the
track began (a drop, or a moved process start time, is a restart and counts from 0), so an increase over any window is
one subtraction. Rows are saved as they were read and come back through the same door, so a restart of Tocsin changes
nothing. Names that long windows need are kept a second time, one row a minute, for three days.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from agent.model import SAMPLES, Batch, Gap, Sample, Why

SeriesKey = tuple[str, str, str]  # (name, subject, key)

RAW_KEEP_S = 3600.0 + 600.0
COARSE_KEEP_S = 3 * 86400.0 + 3600.0
COARSE_EVERY_S = 60.0
LATE_INTERVALS = 3  # a gap longer than this many intervals was not watched

# What windows over an hour need: error ratios for burn rates, arrivals for "the same time yesterday".
COARSE_NAMES = frozenset({"http", "finished", "rejections", "waiting", "process_start"})
# Told at every read, also by one that got no page: kept apart, so that a dead target adds no row to its numbers.
LIVENESS_NAMES = frozenset({"down", "slow", "rung"})
NAN = math.nan


class Row(NamedTuple):
    """A saved read: `values` in the order of `keys`, as they were read (NaN: not told)."""

    track: str
    res: str  # "raw" or "coarse"
    at: float
    keys: tuple[SeriesKey, ...]
    values: array[float]


class Track:
    """One source's reads in time. `interval_s` is how often it is meant to be read."""

    def __init__(self, interval_s: float, keep_s: float) -> None:
        self.interval_s = interval_s
        self.keep_s = keep_s
        self.times: array[float] = array("d")
        self.watched: array[float] = array("d")  # seconds watched since the track began
        self.columns: dict[SeriesKey, array[float]] = {}
        self.groups: dict[tuple[str, str], dict[str, array[float]]] = {}  # (name, subject) -> key -> the same columns
        self.last_raw: dict[SeriesKey, float] = {}  # last value read of each counter
        self.restarted_at: float | None = None  # when the process behind it last (re)started, as far as it tells
        self.started_at: float | None = None  # its process start time

    def append(self, at: float, values: Mapping[SeriesKey, float]) -> None:
        """Add one read. Where the clock has stepped back, what is known moves back with it."""
        if self.times and at <= self.times[-1]:
            self._shift(at - self.times[-1] - self.interval_s)
        restarted = self._restarted(at, values)
        first = not self.times
        step = 0.0 if first else at - self.times[-1]
        self.watched.append((self.watched[-1] if self.watched else 0.0)
                            + (step if step <= LATE_INTERVALS * self.interval_s else 0.0))
        self.times.append(at)
        rows = len(self.times)
        for key, value in values.items():
            column = self.columns.get(key)
            counter = SAMPLES.get(key[0], "gauge") != "gauge"
            if column is None:
                # a counter that first appears on a target already watched counts from 0
                column = self.columns[key] = array("d", [0.0 if counter else NAN]) * (rows - 1)
                self.groups.setdefault(key[:2], {})[key[2]] = column
                if counter and not first:
                    self.last_raw[key] = 0.0
            column.append(self._total(key, value, restarted, at) if counter else value)
        for column in self.columns.values():
            if len(column) < rows:
                column.append(NAN)
        self._trim(at)

    def _shift(self, by_s: float) -> None:
        self.times = array("d", [t + by_s for t in self.times])
        if self.restarted_at is not None:
            self.restarted_at += by_s

    def _restarted(self, at: float, values: Mapping[SeriesKey, float]) -> bool:
        for (name, _, _), value in values.items():
            if name == "process_start" and not math.isnan(value):
                known, self.started_at = self.started_at, value
                if known is None or abs(value - known) > 1.0:
                    self.restarted_at = min(value, at)
                    return known is not None
        return False

    def _total(self, key: SeriesKey, value: float, restarted: bool, at: float) -> float:
        if math.isnan(value):
            return NAN
        last = self.last_raw.get(key)
        self.last_raw[key] = value
        column = self.columns[key]
        total = last_number(column)
        if last is None:
            return total
        if restarted:
            return total + value
        if value < last:
            self.restarted_at = at
            return total + value
        return total + value - last

    def _trim(self, at: float) -> None:
        extra = bisect_right(self.times, at - self.keep_s)
        if extra < 64:  # cut rarely: moving arrays costs more than a few old rows
            return
        for column in (self.times, self.watched, *self.columns.values()):
            del column[:extra]
        for key in [k for k, c in self.columns.items() if all(map(math.isnan, c))]:
            del self.columns[key], self.groups[key[:2]][key[2]]
            self.last_raw.pop(key, None)

    def at_or_before(self, at: float) -> tuple[int, float]:
        """The row at or before `at`, and how far `at` lies into an unwatched gap after it (0 to 1; 0: no such gap)."""
        i = bisect_right(self.times, at) - 1
        if i < 0 or i + 1 >= len(self.times):
            return max(i, 0), 0.0
        step = self.times[i + 1] - self.times[i]
        if step <= LATE_INTERVALS * self.interval_s:
            return i, 0.0
        return i, (at - self.times[i]) / step

    def rises(self, group: tuple[str, str], start: float, end: float | None) -> dict[str, float]:
        """What each counter of a (name, subject) rose between two times, by key."""
        i, share = self.at_or_before(start)
        j, end_share = (len(self.times) - 1, 0.0) if end is None else self.at_or_before(end)
        return {key: between(column, j, end_share) - between(column, i, share)
                for key, column in self.groups.get(group, {}).items()}

    def watched_since(self, start: float) -> float:
        """Seconds watched between `start` and the last row."""
        if not self.times:
            return 0.0
        i, share = self.at_or_before(start)
        into = max(0.0, start - self.times[i]) if not share and start >= self.times[i] else 0.0
        return max(0.0, self.watched[-1] - self.watched[i] - into)


def between(column: Sequence[float], i: int, share: float) -> float:
    """A counter's total at row i, or a share of the way into the unwatched gap after it, which is spread evenly."""
    before = column[i]
    if before != before:
        before = number_before(column, i)
    if share and not math.isnan(column[i + 1]):
        return before + share * (column[i + 1] - before)
    return before


def last_number(column: Sequence[float]) -> float:
    """The last number of a column that is not NaN, else 0."""
    return number_before(column, len(column) - 1)


def number_before(column: Sequence[float], i: int) -> float:
    """The number at row i or the nearest before it, else 0."""
    while i >= 0:
        if not math.isnan(column[i]):
            return column[i]
        i -= 1
    return 0.0


class Windows:
    """All tracks of a node, found by the subjects that they tell of."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.tracks: dict[str, Track] = {}
        self.coarse: dict[str, Track] = {}
        self.owners: dict[tuple[str, str], str] = {}  # (subject, name) -> track
        self.gaps: dict[tuple[str, str], Gap] = {}  # (subject, name) -> why it is not told now
        self._unsaved: list[Row] = []

    def ingest(self, batch: Batch) -> None:
        """Take one read of one source."""
        values: dict[SeriesKey, float] = {}
        live: dict[SeriesKey, float] = {}
        for reading in batch.readings:
            if isinstance(reading, Gap):
                self.gaps[(reading.subject, reading.name)] = reading
                continue
            into = live if reading.name in LIVENESS_NAMES else values
            into[(reading.name, reading.subject, reading.key)] = reading.value
            self.gaps.pop((reading.subject, reading.name), None)
        for name, group in ((batch.source, values), (f"{batch.source}#live", live)):
            if group:
                self._unsaved.append(self._add(name, "raw", batch.at, tuple(group), array("d", group.values())))
        self._thin_out(batch.source, batch.at, values)

    def _thin_out(self, source: str, at: float, values: Mapping[SeriesKey, float]) -> None:
        kept = {k: v for k, v in values.items() if k[0] in COARSE_NAMES or (k[0] == "ttft" and k[2] == "count")}
        track = self.coarse.get(source)
        if not kept or (track is not None and track.times and at - track.times[-1] < COARSE_EVERY_S - 0.5):
            return
        self._unsaved.append(self._add(source, "coarse", at, tuple(kept), array("d", kept.values())))

    def _add(self, name: str, res: str, at: float, keys: tuple[SeriesKey, ...], values: array[float]) -> Row:
        tracks = self.coarse if res == "coarse" else self.tracks
        track = tracks.get(name)
        if track is None:
            interval_s = max(self.interval_s, COARSE_EVERY_S) if res == "coarse" else self.interval_s
            keep_s = COARSE_KEEP_S if res == "coarse" else RAW_KEEP_S
            track = tracks[name] = Track(interval_s, keep_s)
        track.append(at, dict(zip(keys, values, strict=True)))
        if res == "raw":
            for series, subject, _ in keys:
                self.owners[(subject, series)] = name
        return Row(name, res, at, keys, values)

    def unsaved(self) -> list[Row]:
        """Rows since the last call, for the store."""
        rows, self._unsaved = self._unsaved, []
        return rows

    def restore(self, rows: Iterable[Row]) -> None:
        """Take back saved rows, oldest first."""
        for row in rows:
            self._add(row.track, row.res, row.at, row.keys, row.values)

    def forget(self, subject: str) -> None:
        """Let go of a subject that has ended."""
        for owner in [o for o in self.owners if o[0] == subject]:
            del self.owners[owner]
        for known in [g for g in self.gaps if g[0] == subject]:
            del self.gaps[known]

    # --- asking -----------------------------------------------------------------------------------------------------

    def track_of(self, subject: str, name: str) -> Track | None:
        """The track that tells `name` of `subject`."""
        owner = self.owners.get((subject, name))
        return None if owner is None else self.tracks.get(owner)

    def problem(self, subject: str, name: str, now: float) -> Gap | None:
        """Why `name` of `subject` is not told now; None when it is."""
        gap = self.gaps.get((subject, name))
        if gap is not None:
            return gap
        track = self.track_of(subject, name)
        if track is None:
            return Gap(name, subject, Why.MISSING, f"{name} of {subject} was never told", now)
        late_s = now - track.times[-1]
        if late_s > LATE_INTERVALS * track.interval_s:
            return Gap(name, subject, Why.LATE, f"last told {late_s:.0f} s ago", now)
        return None

    def keys(self, subject: str, name: str) -> list[str]:
        """The keys (buckets, statuses, reasons) of a name that are known of a subject."""
        track = self.track_of(subject, name)
        return [] if track is None else list(track.groups.get((name, subject), ()))

    def latest(self, subject: str, name: str, now: float, key: str = "") -> Sample | Gap:
        """The last number of a gauge, or why there is none."""
        gap = self.problem(subject, name, now)
        if gap is not None:
            return gap
        track = self.track_of(subject, name)
        assert track is not None  # noqa: S101  (problem() has said so)
        column = track.columns.get((name, subject, key))
        if column is None or math.isnan(column[-1]):
            return Gap(name, subject, Why.MISSING, f"{name} of {subject} was not on the last page", now)
        return Sample(name, subject, column[-1], track.times[-1], key)

    def increase(self, subject: str, name: str, start: float, end: float | None = None, key: str = "") -> float:
        """What one counter rose between `start` and `end` (None: its last row). 0 for a series that was never seen."""
        return self.increases(subject, name, start, end).get(key, 0.0)

    def increases(self, subject: str, name: str, start: float, end: float | None = None) -> dict[str, float]:
        """What each series of a counter or histogram rose between `start` and `end` (None: its last row), by key."""
        owner = self.owners.get((subject, name))
        if owner is None:
            return {}
        raw, coarse = self.tracks[owner], self.coarse.get(owner)
        group = (name, subject)
        if coarse is None or group not in coarse.groups or start >= raw.times[0]:
            return raw.rises(group, start, end)
        joint = coarse.times[-1] if end is None else min(end, coarse.times[-1])
        long = coarse.rises(group, start, joint)
        if end is not None and end <= joint:
            return long
        return {key: rise + long.get(key, 0.0) for key, rise in raw.rises(group, joint, end).items()}

    def watched_s(self, subject: str, name: str, start: float) -> float:
        """Seconds watched since `start`, from whichever track reaches that far back."""
        owner = self.owners.get((subject, name))
        if owner is None:
            return 0.0
        raw, coarse = self.tracks[owner], self.coarse.get(owner)
        if coarse is None or not raw.times or start >= raw.times[0] or not coarse.times:
            return raw.watched_since(start)
        return max(raw.watched_since(start), coarse.watched_since(start) + raw.watched_since(coarse.times[-1]))

    def history(self, subject: str, name: str, start: float, key: str = "") -> Iterator[tuple[float, float]]:
        """(time, value) of each row since `start` that told it; of a counter its total since the track began."""
        track = self.track_of(subject, name)
        if track is None:
            return
        column = track.columns.get((name, subject, key))
        if column is None:
            return
        for i in range(max(0, bisect_right(track.times, start) - 1), len(track.times)):
            if track.times[i] >= start and not math.isnan(column[i]):
                yield track.times[i], column[i]

    def backward(self, subject: str, *series: tuple[str, str]) -> Iterator[tuple[float, ...]]:
        """(time, value, value, …) of each row that told all of the given (name, key), newest first."""
        track = self.track_of(subject, series[0][0])
        columns = [] if track is None else [track.columns.get((name, subject, key)) for name, key in series]
        if track is None or None in columns:
            return
        told = [c for c in columns if c is not None]
        for i in range(len(track.times) - 1, -1, -1):
            row = tuple(column[i] for column in told)
            if not any(map(math.isnan, row)):
                yield (track.times[i], *row)

    def restarted_at(self, subject: str, name: str) -> float | None:
        """When the process behind a subject last (re)started, as far as its page tells."""
        track = self.track_of(subject, name)
        return None if track is None else track.restarted_at
