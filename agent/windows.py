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
# It was told, but not as a number: when it is told again it does not "first appear".
UNREADABLE = frozenset({Why.NOT_A_NUMBER, Why.BAD_LINE, Why.SENTINEL, Why.OUT_OF_RANGE})
NAN = math.nan


class Row(NamedTuple):
    """A saved read: `values` in the order of `keys`, as they were read (NaN: not told)."""

    track: str
    res: str  # "raw" or "coarse"
    at: float
    keys: tuple[SeriesKey, ...]
    values: array[float]


class Track:
    """One source's reads in time. `interval_s` is how often it has a row, `poll_s` how often its source is read."""

    def __init__(self, interval_s: float, keep_s: float, poll_s: float) -> None:
        self.interval_s = interval_s
        self.poll_s = poll_s
        self.keep_s = keep_s
        self.times: array[float] = array("d")
        self.watched: array[float] = array("d")  # seconds watched since the track began
        self.columns: dict[SeriesKey, array[float]] = {}
        self.groups: dict[tuple[str, str], dict[str, array[float]]] = {}  # (name, subject) -> key -> the same columns
        self.last_raw: dict[SeriesKey, float] = {}  # last value read of each counter
        self.restarted_at: float | None = None  # when the process behind it last (re)started, as far as it tells
        self.started_at: float | None = None  # its process start time

    def append(self, at: float, values: Mapping[SeriesKey, float]) -> float:
        """Add one read. Where the clock has stepped back, what is known moves back with it: by how much is returned."""
        shift_s = 0.0
        if self.times and at <= self.times[-1]:
            shift_s = at - self.times[-1] - self.poll_s
            self.shift(shift_s)
        self._note_restart(at, values)
        first = not self.times
        step = 0.0 if first else at - self.times[-1]
        self.watched.append((self.watched[-1] if self.watched else 0.0)
                            + (step if step <= LATE_INTERVALS * self.interval_s else 0.0))
        self.times.append(at)
        rows = len(self.times)
        for key, value in values.items():
            column = self.columns.get(key)
            if column is None:
                column = self._begin(key, value, rows - 1)
            column.append(self._total(key, value, column) if SAMPLES.get(key[0], "gauge") != "gauge" else value)
        if len(values) < len(self.columns):
            for column in self.columns.values():
                if len(column) < rows:
                    column.append(NAN)
        self._trim(at)
        return shift_s

    def shift(self, by_s: float) -> None:
        """Move all that is known in time."""
        self.times = array("d", [t + by_s for t in self.times])
        if self.restarted_at is not None:
            self.restarted_at += by_s

    def _begin(self, key: SeriesKey, value: float, rows: int) -> array[float]:
        """A new series. A counter that first appears on a target already watched counts from 0.

        Not so one whose first word was unreadable (NaN), nor one that was gone for longer than rows are kept.
        """
        counts = SAMPLES.get(key[0], "gauge") != "gauge" and not math.isnan(value)
        column = self.columns[key] = array("d", [0.0 if counts else NAN]) * rows
        self.groups.setdefault(key[:2], {})[key[2]] = column
        if counts and rows:
            self.last_raw.setdefault(key, 0.0)
        return column

    def _note_restart(self, at: float, values: Mapping[SeriesKey, float]) -> None:
        """Let counters count from 0: all where the process start time moved, else what dropped.

        With what dropped goes what its subject does not tell now: it will come back as the new process counts it.
        """
        last_raw = self.last_raw
        dropped = {key[1] for key, value in values.items() if key in last_raw and value < last_raw[key]}
        for subject in dropped:
            self.restarted_at = at
            for key, last in last_raw.items():
                if key[1] == subject and not values.get(key, NAN) >= last:
                    last_raw[key] = 0.0
        for key, value in values.items():
            if key[0] == "process_start" and not math.isnan(value):
                known, self.started_at = self.started_at, value
                if known is None:
                    self.restarted_at = min(value, at)
                elif abs(value - known) > 1.0:
                    self.restarted_at = at  # its first page, not its start: a large model loads for minutes
                    self.last_raw = dict.fromkeys(last_raw, 0.0)

    def _total(self, key: SeriesKey, value: float, column: Sequence[float]) -> float:
        if math.isnan(value):
            return NAN
        last = self.last_raw.get(key)
        self.last_raw[key] = value
        total = last_number(column)
        return total if last is None else total + value - last

    def _trim(self, at: float) -> None:
        extra = bisect_right(self.times, at - self.keep_s)
        if extra < 64:  # cut rarely: moving arrays costs more than a few old rows
            return
        for column in (self.times, self.watched, *self.columns.values()):
            del column[:extra]
        self._drop([k for k, c in self.columns.items() if all(map(math.isnan, c))])

    def forget(self, subject: str) -> None:
        """Let go of the numbers of a subject; what its counters stood at is kept, lest it come back."""
        self._drop([k for k in self.columns if k[1] == subject])

    def _drop(self, keys: Iterable[SeriesKey]) -> None:
        for key in keys:
            group = self.groups[key[:2]]
            del self.columns[key], group[key[2]]
            if not group:
                del self.groups[key[:2]]

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
        i, in_gap = self.at_or_before(start)
        j, end_in_gap = (len(self.times) - 1, 0.0) if end is None else self.at_or_before(end)
        until = self.times[j] if end is None else end
        return {key: self._total_at(column, j, until, in_gap=end_in_gap > 0)
                - self._total_at(column, i, start, in_gap=in_gap > 0)
                for key, column in self.groups.get(group, {}).items()}

    def _total_at(self, column: Sequence[float], i: int, at: float, *, in_gap: bool) -> float:
        """A counter's total at row i. Inside what was not watched, of the track or of it alone, the rise is spread."""
        total = column[i]
        if total == total and not in_gap:
            return total
        before, after = i, i + 1
        while before >= 0 and math.isnan(column[before]):
            before -= 1
        while after < len(column) and math.isnan(column[after]):
            after += 1
        if before < 0:
            return 0.0
        if after == len(column):
            return column[before]
        step = self.times[after] - self.times[before]
        if step <= LATE_INTERVALS * self.interval_s:
            return column[before]
        return column[before] + (at - self.times[before]) / step * (column[after] - column[before])

    def watched_since(self, start: float) -> float:
        """Seconds watched between `start` and the last row."""
        if not self.times:
            return 0.0
        i, share = self.at_or_before(start)
        into = max(0.0, start - self.times[i]) if not share and start >= self.times[i] else 0.0
        return max(0.0, self.watched[-1] - self.watched[i] - into)


def last_number(column: Sequence[float]) -> float:
    """The last number of a column that is not NaN, else 0."""
    return number_before(column, len(column) - 1, 0.0)


def number_before(column: Sequence[float], i: int, otherwise: float) -> float:
    """The number at row i or the nearest before it."""
    while i >= 0:
        if not math.isnan(column[i]):
            return column[i]
        i -= 1
    return otherwise


def only_coarse(values: Mapping[SeriesKey, float]) -> dict[SeriesKey, float]:
    """What of a read is kept for days."""
    return {k: v for k, v in values.items() if k[0] in COARSE_NAMES or (k[0] == "ttft" and k[2] == "count")}


class Windows:
    """All tracks of a node, found by the subjects that they tell of."""

    def __init__(self, interval_s: float, raw_keep_s: float = RAW_KEEP_S) -> None:
        self.interval_s = interval_s
        self.raw_keep_s = raw_keep_s
        self.tracks: dict[str, Track] = {}
        self.coarse: dict[str, Track] = {}
        self.owners: dict[tuple[str, str], str] = {}  # (subject, name) -> track
        self.gaps: dict[tuple[str, str], Gap] = {}  # (subject, name) -> why it is not told now
        self._unsaved: list[Row] = []
        self._kept: dict[str, tuple[float, dict[SeriesKey, float]]] = {}  # track -> its last read, for the coarse one

    def ingest(self, batch: Batch) -> None:
        """Take one read of one source."""
        values: dict[SeriesKey, float] = {}
        live: dict[SeriesKey, float] = {}
        gaps: list[Gap] = []
        for reading in batch.readings:
            if isinstance(reading, Gap):
                gaps.append(reading)
                continue
            into = live if reading.name in LIVENESS_NAMES else values
            into[(reading.name, reading.subject, reading.key)] = reading.value
            self.gaps.pop((reading.subject, reading.name), None)
        for gap in gaps:  # after the samples: one bad bucket makes the histogram a Gap
            self.gaps[(gap.subject, gap.name)] = gap
            kind = SAMPLES.get(gap.name, "gauge")
            if values and gap.code in UNREADABLE and (kind == "counter" or (kind == "histogram" and gap.key)):
                values[(gap.name, gap.subject, gap.key)] = NAN
        if live:
            self._take(f"{batch.source}#live", batch.at, live)
        if values:
            self._take(batch.source, batch.at, values)

    def _take(self, name: str, at: float, values: Mapping[SeriesKey, float]) -> None:
        row = Row(name, "raw", at, tuple(values), array("d", values.values()))
        self._unsaved.append(row)
        restarted_at = self._restarted_at(name)
        shift_s = self._add(row)
        self._thin_out(name, at, values, broken=shift_s != 0 or self._restarted_at(name) != restarted_at)

    def _restarted_at(self, name: str) -> float | None:
        return self.tracks[name].restarted_at if name in self.tracks else None

    def _thin_out(self, source: str, at: float, values: Mapping[SeriesKey, float], *, broken: bool) -> None:
        """A row a minute, and the two around a break.

        Around a restart, else what rose just before a crash would be lost; around a step back of the clock, so that
        both tracks move alike, also when they are restored.
        """
        kept = only_coarse(values)
        track, last = self.coarse.get(source), self._kept.get(source)
        if kept:
            self._kept[source] = (at, kept)
        if track is None or not broken:
            due = [(at, kept)] if track is None or at - track.times[-1] >= COARSE_EVERY_S - 0.5 else []
        else:
            due = [(at, kept)] if last is None or last[0] <= track.times[-1] else [last, (at, kept)]
        for row_at, told in due:
            if told:
                row = Row(source, "coarse", row_at, tuple(told), array("d", told.values()))
                self._unsaved.append(row)
                self._add(row)

    def _add(self, row: Row) -> float:
        coarse = row.res == "coarse"
        tracks = self.coarse if coarse else self.tracks
        track = tracks.get(row.track)
        if track is None:
            interval_s = max(self.interval_s, COARSE_EVERY_S) if coarse else self.interval_s
            track = Track(interval_s, COARSE_KEEP_S if coarse else self.raw_keep_s, self.interval_s)
            tracks[row.track] = track
        if not coarse:
            for series, subject, _ in row.keys:
                self.owners[(subject, series)] = row.track
        return track.append(row.at, dict(zip(row.keys, row.values, strict=True)))

    def unsaved(self) -> list[Row]:
        """Rows since the last call, for the store."""
        rows, self._unsaved = self._unsaved, []
        return rows

    def restore(self, rows: Iterable[Row]) -> None:
        """Take back saved rows, in the order in which they were saved (the clock may have stepped back)."""
        for row in rows:
            self._add(row)
            if row.res == "raw":
                kept = only_coarse(dict(zip(row.keys, row.values, strict=True)))
                if kept:
                    self._kept[row.track] = (row.at, kept)

    def forget(self, subject: str) -> None:
        """Let go of a subject that has ended."""
        for owner in [o for o in self.owners if o[0] == subject]:
            del self.owners[owner]
        for known in [g for g in self.gaps if g[0] == subject]:
            del self.gaps[known]
        for track in (*self.tracks.values(), *self.coarse.values()):
            track.forget(subject)

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

    def keys_now(self, subject: str, name: str) -> set[str]:
        """The keys that the last read told."""
        track = self.track_of(subject, name)
        return set() if track is None else {
            key for key, column in track.groups.get((name, subject), {}).items() if not math.isnan(column[-1])}

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
        if coarse is None or start >= raw.times[0] or coarse.times[0] >= raw.times[0]:
            return raw.rises(group, start, end)
        joint = coarse.times[-1] if end is None else min(end, coarse.times[-1])
        long, after = coarse.rises(group, start, joint), raw.rises(group, joint, end)
        return {key: long[key] + (after[key] if joint != end else 0.0) if key in long else rise
                for key, rise in raw.rises(group, start, end).items()}

    def level(self, subject: str, name: str, at: float) -> float | None:
        """What a gauge stood at at a time: its last number at or before it. None where memory does not reach back."""
        owner = self.owners.get((subject, name))
        tracks = () if owner is None else (self.tracks[owner], self.coarse.get(owner))
        for track in tracks:
            column = None if track is None else track.columns.get((name, subject, ""))
            i = -1 if track is None else bisect_right(track.times, at) - 1
            if column is not None and i >= 0:
                number = number_before(column, i, NAN)
                return None if math.isnan(number) else number
        return None

    def told_at(self, subject: str, name: str) -> float | None:
        """When the page or call that tells `name` of `subject` was last read."""
        track = self.track_of(subject, name)
        return None if track is None else track.times[-1]

    def watched_s(self, subject: str, name: str, start: float) -> float:
        """Seconds watched since `start`, from whichever track reaches that far back."""
        owner = self.owners.get((subject, name))
        if owner is None:
            return 0.0
        raw, coarse = self.tracks[owner], self.coarse.get(owner)
        if coarse is None or start >= raw.times[0] or coarse.times[0] >= raw.times[0]:
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

    def last_over(self, subject: str, name: str, limit: float) -> float | None:
        """When a gauge was last over a limit; None: not as long as rows are kept."""
        track = self.track_of(subject, name)
        column = None if track is None else track.columns.get((name, subject, ""))
        if track is None or column is None:
            return None
        return next((track.times[i] for i in range(len(column) - 1, -1, -1) if column[i] > limit), None)

    def restarted_at(self, subject: str, name: str) -> float | None:
        """When the process behind a subject last (re)started, as far as its page tells."""
        track = self.track_of(subject, name)
        return None if track is None else track.restarted_at
