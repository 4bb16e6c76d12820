"""The memory of numbers: increase, history and coverage over a window, through counter resets and restarts.

Every source has a track: one row a good read, one column a series. Counters are kept as what they have risen since the
track began (a drop, or a moved process start time, is a restart and counts from 0), so an increase over any window is
one subtraction. Rows are saved as they were read and come back through the same door, so a restart of Tocsin changes
nothing. Names that long windows need are kept a second time, one row a minute, for three days.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import itemgetter, lt, ne
from typing import NamedTuple

from agent.model import SAMPLES, Batch, Gap, Sample, Why

SeriesKey = tuple[str, str, str]  # (name, subject, key)

RAW_KEEP_S = 3600.0 + 600.0
COARSE_KEEP_S = 3 * 86400.0 + 3600.0
COARSE_EVERY_S = 60.0
HOUR_S = 3600.0
MOST_COARSE_AN_HOUR = 180  # one a minute and those around 60 breaks: enough for an engine that dies each minute
LATE_INTERVALS = 3  # a gap longer than this many intervals was not watched

# What windows over an hour need: error ratios for burn rates, arrivals and business metrics for "this time yesterday",
# and updates of weights since an engine's start.
COARSE_NAMES = frozenset({"http", "finished", "rejections", "waiting", "process_start", "sourced",
                          "weight_updates"})
# Told at every read, also by one that got no page: kept apart, so that a dead target adds no row to its numbers.
LIVENESS_NAMES = frozenset({"down", "slow", "rung"})
# It was told, but not as a number: when it is told again it does not "first appear".
UNREADABLE = frozenset({Why.NOT_A_NUMBER, Why.BAD_LINE, Why.SENTINEL, Why.OUT_OF_RANGE})
# Counted by a device over its life: what it stood at when it was first seen happened before.
LIFETIME = frozenset(name for name, kind in SAMPLES.items() if kind == "counter" and name.startswith("gpu_"))
NAN = math.nan
ROUNDING = 1e-9  # of a counter's value


class Row(NamedTuple):
    """A saved read: `values` in the order of `keys`, as they were read (NaN: not told)."""

    track: str
    res: str  # "raw" or "coarse"
    at: float
    keys: tuple[SeriesKey, ...]
    values: array[float]


class _Alike(NamedTuple):
    """Where the numbers of a row go, as long as every row tells the same series, and numbers only."""

    keys: tuple[SeriesKey, ...]
    is_counter: list[bool]
    is_gauge: list[bool]
    is_start: list[bool]  # process start times
    counters: list[array[float]]  # columns
    gauges: list[array[float]]
    silent: list[array[float]]  # columns of what is not told


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
        self.restarted_at: float | None = None  # when the process behind it last (re)started, as far as it tells
        self.started_at: float | None = None  # its process start time
        self._last_raw: dict[SeriesKey, float] = {}  # last value read of each counter, but of the row in `_last`
        self._alike: _Alike | None = None  # of the last row
        self._last: Sequence[float] = ()  # its numbers as they were read
        self._rows: dict[float, tuple[int, float]] = {}  # answers that hold until the next row
        self._watched_since: dict[float, float] = {}
        self._told: dict[tuple[str, str], frozenset[str]] = {}

    def append(self, at: float, keys: tuple[SeriesKey, ...], values: Sequence[float]) -> float:
        """Add one read. Where the clock has stepped back, what is known moves back with it: by how much is returned."""
        shift_s = 0.0
        if self.times and at <= self.times[-1]:
            shift_s = at - self.times[-1] - self.poll_s
            self.shift(shift_s)
        if not self._append_alike(keys, values):
            self._append_any(at, keys, values)
        step = at - self.times[-1] if self.times else 0.0
        self.watched.append((self.watched[-1] if self.watched else 0.0)
                            + (step if step <= LATE_INTERVALS * self.interval_s else 0.0))
        self.times.append(at)
        self._trim(at)
        self._forget_answers()
        return shift_s

    def _append_alike(self, keys: tuple[SeriesKey, ...], values: Sequence[float]) -> bool:
        """Nearly every row: the series of the last one, all numbers, nothing dropped, so nothing to find out anew.

        False: this row must be looked at more closely; nothing was changed.
        """
        alike, last = self._alike, self._last
        if alike is None or keys != alike.keys:
            return False
        counts, counted = list(compress(values, alike.is_counter)), list(compress(last, alike.is_counter))
        started = any(map(ne, compress(values, alike.is_start), compress(last, alike.is_start)))
        if started or any(map(lt, counts, counted)) or math.isnan(sum(values)):
            return False
        for column, count, was in zip(alike.counters, counts, counted, strict=True):
            column.append(column[-1] + count - was)
        for column, value in zip(alike.gauges, compress(values, alike.is_gauge), strict=True):
            column.append(value)
        for column in alike.silent:
            column.append(NAN)
        self._last = values
        return True

    def _append_any(self, at: float, keys: tuple[SeriesKey, ...], values: Sequence[float]) -> None:
        self._end_alike()
        told = dict(zip(keys, values, strict=True))
        self._note_restart(at, told)
        rows = len(self.times)
        for key, value in told.items():
            column = self.columns.get(key)
            if column is None:
                column = self._begin(key, value, rows)
            column.append(value if is_gauge(key) else self._total(key, value, column))
        silent = [column for column in self.columns.values() if len(column) == rows]
        for column in silent:
            column.append(NAN)
        if len(told) == len(keys) and not any(map(math.isnan, values)):
            gauge = [is_gauge(key) for key in keys]
            told_in = [self.columns[key] for key in keys]
            counter = [not yes for yes in gauge]
            self._alike = _Alike(keys, counter, gauge, [key[0] == "process_start" for key in keys],
                                 list(compress(told_in, counter)), list(compress(told_in, gauge)), silent)
            self._last = values

    def _end_alike(self) -> None:
        if self._alike is not None:
            told = zip(self._alike.keys, self._last, strict=True)
            self._last_raw.update(compress(told, self._alike.is_counter))
            self._alike = None

    def _forget_answers(self) -> None:
        self._rows.clear()
        self._watched_since.clear()
        self._told.clear()

    def shift(self, by_s: float) -> None:
        """Move all that is known in time."""
        self.times = array("d", [t + by_s for t in self.times])
        if self.restarted_at is not None:
            self.restarted_at += by_s
        self._forget_answers()

    def _begin(self, key: SeriesKey, value: float, rows: int) -> array[float]:
        """A new series. A counter that first appears on a target already watched counts from 0.

        Not so one whose first word was unreadable (NaN), nor one that was gone for longer than rows are kept, nor a
        device's own.
        """
        counts = not is_gauge(key) and not math.isnan(value) and key[0] not in LIFETIME
        column = self.columns[key] = array("d", [0.0 if counts else NAN]) * rows
        self.groups.setdefault(key[:2], {})[key[2]] = column
        if counts and rows:
            self._last_raw.setdefault(key, 0.0)
        return column

    def _note_restart(self, at: float, values: Mapping[SeriesKey, float]) -> None:
        """Let counters count from 0: all where the process start time moved, else what dropped.

        With what dropped goes what its subject does not tell now: it will come back as the new process counts it.
        """
        last_raw = self._last_raw
        dropped = {key[1] for key, value in values.items() if key in last_raw and is_drop(last_raw[key], value)}
        for subject in dropped:
            self.restarted_at = at
            for key, last in last_raw.items():
                if key[1] == subject and (key not in values or is_drop(last, values[key]) or math.isnan(values[key])):
                    last_raw[key] = 0.0
        for key, value in values.items():
            if key[0] == "process_start" and not math.isnan(value):
                known, self.started_at = self.started_at, value
                if known is None:
                    self.restarted_at = min(value, at)
                elif abs(value - known) > 1.0:
                    self.restarted_at = at  # its first page, not its start: a large model loads for minutes
                    self._last_raw = dict.fromkeys(last_raw, 0.0)

    def _total(self, key: SeriesKey, value: float, column: Sequence[float]) -> float:
        if math.isnan(value):
            return NAN
        last = self._last_raw.get(key)
        self._last_raw[key] = value
        total = last_number(column)
        return total if last is None or value < last else total + value - last

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

    def _drop(self, keys: Sequence[SeriesKey]) -> None:
        if keys:
            self._end_alike()
            self._told.clear()
        for key in keys:
            group = self.groups[key[:2]]
            del self.columns[key], group[key[2]]
            if not group:
                del self.groups[key[:2]]

    def rows_since(self, start: float) -> int:
        """How many rows there are from a time on."""
        return len(self.times) - bisect_left(self.times, start)

    def keys_now(self, group: tuple[str, str]) -> frozenset[str]:
        """The keys of a (name, subject) that the last row told."""
        told = self._told.get(group)
        if told is None:
            told = self._told[group] = frozenset(
                key for key, column in self.groups.get(group, {}).items() if not math.isnan(column[-1]))
        return told

    def at_or_before(self, at: float) -> tuple[int, float]:
        """The row at or before `at`, and how far `at` lies into an unwatched gap after it (0 to 1; 0: no such gap)."""
        found = self._rows.get(at)
        if found is None:
            found = self._rows[at] = self._look_up(at)
        return found

    def _look_up(self, at: float) -> tuple[int, float]:
        i = bisect_right(self.times, at) - 1
        if i < 0 or i + 1 >= len(self.times):
            return max(i, 0), 0.0
        step = self.times[i + 1] - self.times[i]
        if step <= LATE_INTERVALS * self.interval_s:
            return i, 0.0
        return i, (at - self.times[i]) / step

    def rises(self, group: tuple[str, str], start: float, end: float | None, key: str | None = None,
              ) -> dict[str, float]:
        """What each counter of a (name, subject) rose between two times, by key; or the one of `key` alone."""
        columns: Mapping[str, array[float]] = self.groups.get(group, {})
        if key is not None:
            columns = {key: columns[key]} if key in columns else {}
        i, in_gap = self.at_or_before(start)
        j, end_in_gap = (len(self.times) - 1, 0.0) if end is None else self.at_or_before(end)
        if not in_gap and not end_in_gap:
            rises = {key: column[j] - column[i] for key, column in columns.items()}
            if not math.isnan(sum(rises.values())):  # they were all told in both rows
                return rises
        until = self.times[j] if end is None else end
        return {key: self._total_at(column, j, until, in_gap=end_in_gap > 0)
                - self._total_at(column, i, start, in_gap=in_gap > 0)
                for key, column in columns.items()}

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
        watched_s = self._watched_since.get(start)
        if watched_s is None:
            i, share = self.at_or_before(start)
            into = max(0.0, start - self.times[i]) if not share and start >= self.times[i] else 0.0
            watched_s = self._watched_since[start] = max(0.0, self.watched[-1] - self.watched[i] - into)
        return watched_s


def is_gauge(key: SeriesKey) -> bool:
    """Whether a series is no counter: what is not known is none."""
    return SAMPLES.get(key[0], "gauge") == "gauge"


@lru_cache(1024)
def bound(key: str) -> float:
    """A bucket's upper bound from its `le`."""
    return math.inf if key == "+Inf" else float(key)


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


def is_drop(last: float, value: float) -> bool:
    """Whether a counter fell, and with it its process. A sum of floats, added up in another order, may lose a bit."""
    return value < last - ROUNDING * last


def is_coarse(key: SeriesKey) -> bool:
    """Whether a series is kept for days."""
    return key[0] in COARSE_NAMES or (key[0] == "ttft" and key[2] == "count")


def only_coarse(row: Row) -> Row:
    """What of a read is kept for days."""
    kept = list(map(is_coarse, row.keys))
    return Row(row.track, "coarse", row.at, tuple(compress(row.keys, kept)), array("d", compress(row.values, kept)))


def tells_less(row: Row, last: Row) -> bool:
    """Something that is kept for days was told by the last read, and is not by this one."""
    if row.keys == last.keys and not math.isnan(sum(row.values)):
        return False
    told = {key for key, value in zip(row.keys, row.values, strict=True) if not math.isnan(value)}
    return any(is_coarse(key) and key not in told and not math.isnan(value)
               for key, value in zip(last.keys, last.values, strict=True))


_KEY_OF = itemgetter(*map(Sample._fields.index, ("name", "subject", "key")))  # of a Sample


class _Form(NamedTuple):
    """Which series one read of a source told, and which of them go into which row: mostly as in the read before."""

    told: list[SeriesKey]
    groups: list[tuple[str, str]]  # (subject, name)
    is_live: list[bool]
    live: tuple[SeriesKey, ...]
    is_other: list[bool]
    other: tuple[SeriesKey, ...]


class _Owned(NamedTuple):
    """What a row tells: its series, the (subject, name) that are its track's, whether any is kept for days."""

    keys: tuple[SeriesKey, ...]
    by: dict[tuple[str, str], str]
    is_kept: bool


def form_of(told: list[SeriesKey]) -> _Form:
    """The form of a read. Where it told a series twice, the second word counts."""
    last = {key: i for i, key in enumerate(told)}
    is_live = [key[0] in LIVENESS_NAMES and last[key] == i for i, key in enumerate(told)]
    is_other = [key[0] not in LIVENESS_NAMES and last[key] == i for i, key in enumerate(told)]
    groups = list(dict.fromkeys((subject, name) for name, subject, _ in told))
    return _Form(told, groups, is_live, tuple(compress(told, is_live)), is_other, tuple(compress(told, is_other)))


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
        self._kept: dict[str, Row] = {}  # track -> its last read, for the coarse one
        self._forms: dict[str, _Form] = {}  # source -> of its last read
        self._owned: dict[str, _Owned] = {}  # track -> what its last row tells

    def ingest(self, batch: Batch) -> None:
        """Take one read of one source."""
        samples = [reading for reading in batch.readings if isinstance(reading, Sample)]
        told = list(map(_KEY_OF, samples))
        form = self._forms.get(batch.source)
        if form is None or form.told != told:
            form = self._forms[batch.source] = form_of(told)
        for group in form.groups:
            self.gaps.pop(group, None)
        numbers = [sample.value for sample in samples]
        live = array("d", compress(numbers, form.is_live))
        if live:
            # known when the read had ended: one that ran into its deadline would else be late as soon as it is told
            self._take(Row(f"{batch.source}#live", "raw", batch.at + batch.took_s, form.live, live))
        keys, values = form.other, array("d", compress(numbers, form.is_other))
        if len(samples) < len(batch.readings):
            gaps = [reading for reading in batch.readings if isinstance(reading, Gap)]
            keys, values = self._note_gaps(gaps, keys, values)
        if values:
            self._take(Row(batch.source, "raw", batch.at, keys, values))

    def _note_gaps(self, gaps: Sequence[Gap], keys: tuple[SeriesKey, ...], values: array[float],
                   ) -> tuple[tuple[SeriesKey, ...], array[float]]:
        """Remember why numbers are missing. What was told, but unreadably, has a place in the row."""
        unreadable: dict[SeriesKey, float] = {}
        for gap in gaps:  # after the samples: one bad bucket makes the histogram a Gap
            self.gaps[(gap.subject, gap.name)] = gap
            kind = SAMPLES.get(gap.name, "gauge")
            if gap.code in UNREADABLE and (kind == "counter" or (kind == "histogram" and gap.key)):
                unreadable[(gap.name, gap.subject, gap.key)] = NAN
        if not (values and unreadable):
            return keys, values
        row = dict(zip(keys, values, strict=True)) | unreadable
        return tuple(row), array("d", row.values())

    def _take(self, row: Row) -> None:
        self._unsaved.append(row)
        restarted_at = self._restarted_at(row.track)
        shift_s = self._add(row)
        self._thin_out(row, stepped=shift_s != 0, restarted=self._restarted_at(row.track) != restarted_at)

    def _restarted_at(self, name: str) -> float | None:
        return self.tracks[name].restarted_at if name in self.tracks else None

    def _thin_out(self, row: Row, *, stepped: bool, restarted: bool) -> None:
        """A row a minute, and the two around a break.

        Around a restart and where a series is told no more, else what rose just before would be lost; around a step
        back of the clock, so that both tracks move alike, also when they are restored. Where every read is a break (an
        address behind which two engines answer in turn) the numbers mean nothing, and must not fill the memory.
        """
        track, last = self.coarse.get(row.track), self._kept.get(row.track)
        torn = restarted or (last is not None and tells_less(row, last))
        broken = stepped or (torn and track is not None and track.rows_since(row.at - HOUR_S) < MOST_COARSE_AN_HOUR)
        self._keep(row)
        if track is None or not broken:
            due = [row] if track is None or row.at - track.times[-1] >= COARSE_EVERY_S - 0.5 else []
        else:
            due = [row] if last is None or last.at <= track.times[-1] else [last, row]
        for told in map(only_coarse, due):
            if told.keys:
                self._unsaved.append(told)
                self._add(told)

    def _keep(self, row: Row) -> None:
        if self._owned[row.track].is_kept:
            self._kept[row.track] = row

    def _add(self, row: Row) -> float:
        coarse = row.res == "coarse"
        tracks = self.coarse if coarse else self.tracks
        track = tracks.get(row.track)
        if track is None:
            interval_s = max(self.interval_s, COARSE_EVERY_S) if coarse else self.interval_s
            track = Track(interval_s, COARSE_KEEP_S if coarse else self.raw_keep_s, self.interval_s)
            tracks[row.track] = track
        if not coarse:
            self._own(row)
        return track.append(row.at, row.keys, row.values)

    def _own(self, row: Row) -> None:
        owned = self._owned.get(row.track)
        if owned is None or owned.keys != row.keys:
            owned = self._owned[row.track] = _Owned(
                row.keys, {(subject, name): row.track for name, subject, _ in row.keys}, any(map(is_coarse, row.keys)))
        self.owners.update(owned.by)

    def unsaved(self) -> list[Row]:
        """Rows since the last call, for the store."""
        rows, self._unsaved = self._unsaved, []
        return rows

    def restore(self, rows: Iterable[Row]) -> None:
        """Take back saved rows, in the order in which they were saved (the clock may have stepped back)."""
        for row in rows:
            self._add(row)
            if row.res == "raw":
                self._keep(row)

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

    def problem(self, subject: str, name: str, now: float, key: str | None = None) -> Gap | None:
        """Why `name` of `subject` is not told now; None when it is. `key`: whatever is wrong with its other series."""
        return self._problem(self.track_of(subject, name), subject, name, now, key)

    def _problem(self, track: Track | None, subject: str, name: str, now: float, key: str | None = None) -> Gap | None:
        gap = self.gaps.get((subject, name))
        if gap is not None and (key is None or gap.key in ("", key) or not self._tells(track, (name, subject, key))):
            return gap
        if track is None:
            return Gap(name, subject, Why.MISSING, f"{name} of {subject} was never told", now)
        late_s = now - track.times[-1]
        if late_s > LATE_INTERVALS * track.interval_s:
            return Gap(name, subject, Why.LATE, f"last told {late_s:.0f} s ago", now)
        return None

    def _tells(self, track: Track | None, series: SeriesKey) -> bool:
        column = None if track is None else track.columns.get(series)
        return column is not None and not math.isnan(column[-1])

    def keys(self, subject: str, name: str) -> list[str]:
        """The keys (buckets, statuses, reasons) of a name that are known of a subject."""
        track = self.track_of(subject, name)
        return [] if track is None else list(track.groups.get((name, subject), ()))

    def keys_now(self, subject: str, name: str) -> frozenset[str]:
        """The keys that the last read told."""
        track = self.track_of(subject, name)
        return frozenset() if track is None else track.keys_now((name, subject))

    def latest(self, subject: str, name: str, now: float, key: str = "") -> Sample | Gap:
        """The last number of a gauge, or why there is none."""
        track = self.track_of(subject, name)
        gap = self._problem(track, subject, name, now)
        if gap is not None:
            return gap
        assert track is not None  # noqa: S101  (_problem has said so)
        column = track.columns.get((name, subject, key))
        if column is None or math.isnan(column[-1]):
            return Gap(name, subject, Why.MISSING, f"{name} of {subject} was not on the last page", now)
        return Sample(name, subject, column[-1], track.times[-1], key)

    def increase(self, subject: str, name: str, start: float, end: float | None = None, key: str = "") -> float:
        """What one counter rose between `start` and `end` (None: its last row). 0 for a series that was never seen."""
        return self.increases(subject, name, start, end, key).get(key, 0.0)

    def increases(self, subject: str, name: str, start: float, end: float | None = None, key: str | None = None,
                  ) -> dict[str, float]:
        """What each series of a counter or histogram rose between `start` and `end` (None: its last row), by key.

        `key`: only that one.
        """
        owner = self.owners.get((subject, name))
        if owner is None:
            return {}
        raw, coarse = self.tracks[owner], self.coarse.get(owner)
        group = (name, subject)
        if coarse is None or start >= raw.times[0] or coarse.times[0] >= raw.times[0]:
            return raw.rises(group, start, end, key)
        joint = coarse.times[-1] if end is None else min(end, coarse.times[-1])
        long, after = coarse.rises(group, start, joint, key), raw.rises(group, joint, end, key)
        if long.keys() >= after.keys():
            return {k: long[k] + (rise if joint != end else 0.0) for k, rise in after.items()}
        return {k: long[k] + (after[k] if joint != end else 0.0) if k in long else rise
                for k, rise in raw.rises(group, start, end, key).items()}

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

    def level_near(self, subject: str, name: str, at: float, within_s: float) -> float | None:
        """What a gauge stood at at a time, if it was read in the `within_s` before it; from the rows kept for days."""
        owner = self.owners.get((subject, name))
        track = None if owner is None else self.coarse.get(owner)
        column = None if track is None else track.columns.get((name, subject, ""))
        if track is None or column is None:
            return None
        i = bisect_right(track.times, at) - 1
        known = i >= 0 and at - track.times[i] <= within_s and not math.isnan(column[i])
        return column[i] if known else None

    def known_since(self, subject: str, name: str) -> float | None:
        """The time of the oldest row that is remembered of the source that tells `name` of `subject`."""
        owner = self.owners.get((subject, name))
        tracks = () if owner is None else (self.tracks[owner], self.coarse.get(owner))
        return min((track.times[0] for track in tracks if track is not None and track.times), default=None)

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
        column = None if track is None else track.columns.get((name, subject, key))
        if track is None or column is None:
            return iter(())
        first = bisect_left(track.times, start)
        return ((at, value) for at, value in zip(track.times[first:], column[first:], strict=True)
                if not math.isnan(value))

    def levels(self, subject: str, name: str, start: float) -> Sequence[float]:
        """What a gauge stood at in each row since `start` that told it."""
        track = self.track_of(subject, name)
        column = None if track is None else track.columns.get((name, subject, ""))
        if track is None or column is None:
            return ()
        recent = column[bisect_left(track.times, start):]
        return [value for value in recent if not math.isnan(value)] if math.isnan(sum(recent)) else recent

    def highest(self, subject: str, name: str) -> float | None:
        """The most that a gauge has stood at in memory, since its process (re)started; None where it was never told."""
        since = self.restarted_at(subject, name)
        return max(self.levels(subject, name, -math.inf if since is None else since), default=None)

    def backward(self, subject: str, *series: tuple[str, str] | tuple[str, str, str]) -> Iterator[tuple[float, ...]]:
        """(time, value, value, …) of each row that told all of the given (name, key), newest first.

        A series of another subject, told by the same source, is (name, key, subject).
        """
        keys = [(one[0], one[2] if len(one) == 3 else subject, one[1]) for one in series]
        track = self.track_of(keys[0][1], keys[0][0])
        columns = [] if track is None else [track.columns.get(key) for key in keys]
        if track is None or None in columns:
            return
        told = [c for c in columns if c is not None]
        for row in zip(reversed(track.times), *map(reversed, told), strict=True):
            if not any(map(math.isnan, row)):
                yield row

    def buckets(self, subject: str, name: str, since: float) -> dict[float, float]:
        """A histogram's increase since then, by bound.

        An engine that came back with other bounds is judged since then: what was counted up to its new bounds before
        is not known, and would look slow.
        """
        rises, now = self.increases(subject, name, since), self.keys_now(subject, name)
        restarted_at = self.restarted_at(subject, name)
        if now != rises.keys() and restarted_at is not None and restarted_at > since:
            rises = self.increases(subject, name, restarted_at)
        found = {bound(key): rise for key, rise in rises.items() if key in now and key not in ("sum", "count")}
        if found and math.inf not in found and "count" in now:  # what is over the last bound is in the count
            found[math.inf] = rises["count"]
        return found

    def moved_at(self, subject: str, name: str, since: float, key: str = "") -> float | None:
        """When a series last told another number than before, not looking back beyond `since`; None: it did not."""
        track = self.track_of(subject, name)
        column = None if track is None else track.columns.get((name, subject, key))
        if track is None or column is None:
            return None
        recent = column[bisect_left(track.times, since):]
        if not recent or recent.count(recent[-1]) == len(recent):  # nothing moved, and C has seen to it
            return None
        later_at, later = 0.0, NAN
        for at, value in zip(reversed(track.times), reversed(column), strict=True):
            if at < since:
                break
            if not math.isnan(value):
                if value != later and not math.isnan(later):
                    return later_at
                later_at, later = at, value
        return None

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
