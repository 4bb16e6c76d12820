"""What survives a crash: one SQLite file (WAL), and the only code that writes it.

A tick is one transaction: its transitions, the notices that they owe, the open alerts, the window memory. What is owed
to the channels is also held in memory, and memory is what the outbox reads: a full disk must not silence a page. What
could not be written waits here and goes first in the next transaction. Where the file system takes no write at the
start, the database is kept in memory, with what the file held, until it can be written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import structlog

from agent.model import SILENCED, Alert, AlertKey, AlertMessage, Book, Notice, Transition

log = structlog.get_logger()

SCHEMA_VERSION = 2
TRANSITIONS_KEPT_S = 400 * 86400.0
DELIVERED_KEPT_S = 7 * 86400.0  # with what was sent; that it was sent is kept as long as transitions are
MOST_INCIDENTS = 10_000

_SCHEMA = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE alerts(rule TEXT, subject TEXT, alert TEXT NOT NULL, PRIMARY KEY(rule, subject)) WITHOUT ROWID;
CREATE TABLE resolved(rule TEXT, subject TEXT, at REAL NOT NULL, PRIMARY KEY(rule, subject)) WITHOUT ROWID;
CREATE TABLE transitions(id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT, rule TEXT, subject TEXT, severity TEXT,
                         value REAL, threshold REAL, why TEXT, alert TEXT NOT NULL);
CREATE TABLE notices(id INTEGER PRIMARY KEY, channel TEXT, state TEXT, key TEXT, status TEXT, created_at REAL,
                     due_at REAL, tries INTEGER, last_error TEXT, done_at REAL, message TEXT NOT NULL);
CREATE INDEX notices_by_state ON notices(state, channel);
CREATE TABLE layouts(track TEXT, layout INTEGER, keys_json TEXT NOT NULL, PRIMARY KEY(track, layout)) WITHOUT ROWID;
CREATE TABLE frames(res TEXT, track TEXT, at REAL NOT NULL, layout INTEGER, blob BLOB);
CREATE INDEX frames_by_time ON frames(res, at);
"""
# What each version added to the one before.
_ADDED: Mapping[int, str] = {2: """
CREATE TABLE incidents(id TEXT PRIMARY KEY, opened_at REAL NOT NULL, ended_at REAL, record TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE days(day INTEGER, target TEXT, requests REAL, errors REAL, ttft REAL, ttft_slow REAL, itl REAL,
                  itl_slow REAL, PRIMARY KEY(day, target)) WITHOUT ROWID;
CREATE INDEX transitions_by_time ON transitions(at);
CREATE INDEX notices_by_key ON notices(key);
"""}
_ADD_DAY = ("INSERT INTO days VALUES(?,?,?,?,?,?,?,?) ON CONFLICT(day, target) DO UPDATE SET requests=requests+excluded"
            ".requests, errors=errors+excluded.errors, ttft=ttft+excluded.ttft, ttft_slow=ttft_slow+excluded.ttft_slow,"
            " itl=itl+excluded.itl, itl_slow=itl_slow+excluded.itl_slow")
DAY_KEYS = ("day", "target", "requests", "errors", "ttft", "ttft_slow", "itl", "itl_slow")
ACCOUNTED = "accounted"  # the fact: up to where each target was counted into `days`
_ADD_TRANSITION = "INSERT INTO transitions VALUES(?,?,?,?,?,?,?,?,?,?)"
_ADD_NOTICE = "INSERT INTO notices VALUES(?,?,'pending',?,?,?,?,?,?,NULL,?)"
_END_NOTICE = "UPDATE notices SET state=?, done_at=?, last_error=? WHERE id=?"
_RETRY_NOTICE = "UPDATE notices SET due_at=?, tries=?, last_error=? WHERE id=?"
_SELECT_TRANSITIONS = "SELECT * FROM transitions WHERE id>?1"
_SELECT_CHANGES = ("SELECT at, kind, rule, subject, severity, alert FROM transitions"
                   " WHERE at>=? AND kind IN ('firing', 'resolved') ORDER BY id")
# In the order in which they were told: after a clock that stepped back their times are not in order.
_SELECT_FRAMES = (
    "SELECT track, at, layout, blob, res, rowid FROM frames NOT INDEXED WHERE res=? AND at>=? AND rowid>?"
    " ORDER BY rowid LIMIT 512"
)
_SELECT_FRAMES_BY_TIME = "SELECT track, at, layout, blob, res FROM frames WHERE res=? AND at>=? ORDER BY at"
_UNUSED_LAYOUTS = "DELETE FROM layouts WHERE (track, layout) NOT IN (SELECT DISTINCT track, layout FROM frames)"
_SELECT_OWED = (
    "SELECT id, channel, created_at, due_at, tries, last_error, message FROM notices"
    " WHERE state='pending' ORDER BY id"
)
_TRANSITION_KEYS = ("id", "at", "kind", "rule", "subject", "severity", "value", "limit", "why", "alert")

_TAKEN = {sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_ROWID}
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# What a file system says that is read-only, full or failing; a wrong user or path ends the start instead.
_NO_WRITE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_NO_WRITE_OS = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}

_Row = tuple[str, tuple[Any, ...]]  # a statement and its arguments


class FrameRow(NamedTuple):
    """One moment of one track of window memory. `layout` names the LayoutRow that says how to read `blob`."""

    track: str
    at: float
    layout: int
    blob: bytes
    res: str = "raw"  # "raw": every poll; "coarse": one a minute; those of agent.trend


class LayoutRow(NamedTuple):
    """What the numbers of a frame mean: the series of `track`, as JSON."""

    track: str
    layout: int
    keys_json: str


class StoreError(Exception):
    """The database cannot be opened or used. The text names the file and the remedy."""


class NotSaved(StoreError):  # noqa: N818  (it says what happened)
    """A transaction failed (disk full, read-only). Its transitions and notices are kept and are written next time:
    do not hand them in again. The book is compared afresh at each commit; window frames are lost but the last
    tick's."""


class Store:
    """The agent's memory on disk. Safe to use from several threads; one process at a time holds the file.

    `notes` tells what was lost or moved while opening; `problem` is the last failure to write, None once all that
    failed is saved: on a full disk a small fact may still fit where a tick does not.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the database at `path` (mode 0600), or one in memory meanwhile. Raises StoreError."""
        self.path = path
        self.notes: list[str] = []
        self.problem: str | None = None
        self._lock = threading.RLock()
        self._unsaved: list[_Row] = []
        self._left: list[_Row] | None = None  # the frames of the last tick that could not be saved; None: it was saved
        self._saved = Book()
        self._pending: dict[str, dict[int, Notice]] = defaultdict(dict)
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._failing_since: dict[str, float] = {}
        self._meta: dict[str, str] = {}
        self._sync = ""
        self._is_open = True
        self._in_memory = False
        self._guard = -1
        self._said: set[str] = set()  # problems that the log has been told of since all was saved last
        self._device = _device_of(path)  # of the file system on which we began
        try:
            try:
                self._guard = _claim(path)
                self._device = _device_of(path)
                self._db = self._open()
            except StoreError as error:
                if not _takes_no_write(error.__cause__):
                    raise
                self._begin_in_memory(error)
            self._load_or_begin_afresh()
        except BaseException:
            if self._guard >= 0:
                os.close(self._guard)
            raise

    def close(self) -> None:
        """Write what still waits, and let go of the file. Closing twice is closing once."""
        with self._lock:
            if not self._is_open:
                return
            if self._in_memory:  # the last chance
                self._move_to_disk()
            self._save_quietly([])
            self._db.close()
            if self._guard >= 0:
                os.close(self._guard)
            self._is_open = False

    # ---- the tick ----

    def commit_tick(
        self,
        now: float,
        book: Book,
        transitions: Sequence[Transition] = (),
        notices: Sequence[tuple[str, AlertMessage]] = (),
        frames: Sequence[FrameRow] = (),
        layouts: Sequence[LayoutRow] = (),
        incidents: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Save one tick in one transaction; returns the ids of `notices` (channel, message), due now.

        On disk before it returns (fsync) when something happened; else within seconds. Raises NotSaved, and even then
        the notices are owed and will be delivered from memory.
        """
        with self._lock:
            if self._in_memory:
                self._move_to_disk()
                self._tell_problem()
            owed = [self._owe(now, channel, message) for channel, message in notices]  # first: whatever fails below
            durable: list[_Row] = [("INSERT OR REPLACE INTO layouts VALUES(?,?,?)", tuple(row)) for row in layouts]
            durable += [self._transition_row(change) for change in transitions]
            durable += [_notice_row(notice) for notice in owed]
            durable += [("INSERT OR REPLACE INTO incidents VALUES(?,?,?,?)", (
                one["id"], one["opened_at"], one["ended_at"], msgspec.json.encode(one).decode())) for one in incidents]
            memory: list[_Row] = [
                ("INSERT INTO frames(track, at, layout, blob, res) VALUES(?,?,?,?,?)", tuple(row)) for row in frames
            ]
            self._save(durable, memory, book, sync=bool(transitions or notices))
            return [notice.id for notice in owed]

    def load_book(self) -> Book:
        """All open alerts and resolve times, as they were last saved."""
        with self._lock:
            return self._saved

    def transitions(self, *, since_id: int | None = None, last: int = 100) -> list[dict[str, Any]]:
        """Past transitions, oldest first: the `last` ones, or up to `last` that follow `since_id`.

        Keys: id, at, kind, rule, subject, severity, value, limit, why, alert (as a dict).
        """
        first = -1 if since_id is None else since_id
        order = " ORDER BY id DESC LIMIT ?2" if since_id is None else " ORDER BY id LIMIT ?2"
        with self._lock:
            rows = self._read(_SELECT_TRANSITIONS + order, (first, last))
            waiting = [args for sql, args in self._unsaved if sql == _ADD_TRANSITION and args[0] > first]
        found = [dict(zip(_TRANSITION_KEYS, row, strict=True)) for row in sorted(rows) + waiting]
        for entry in found:
            entry["alert"] = msgspec.json.decode(entry["alert"])
        return found[-last:] if since_id is None else found[:last]

    def changes(self, since: float) -> list[dict[str, Any]]:
        """When alerts fired and resolved since a time, in the order in which it was told.

        Keys: at, kind, rule, subject, severity, silenced (whether it fired under a silence).
        """
        with self._lock:
            rows = self._read(_SELECT_CHANGES, (since,))
            rows += [(args[1], *args[2:6], args[9]) for sql, args in self._unsaved
                     if sql == _ADD_TRANSITION and args[1] >= since and args[2] in ("firing", "resolved")]
        keys = ("at", "kind", "rule", "subject", "severity")
        return [dict(zip(keys, row, strict=False)) | {"silenced": _is_silenced(row[-1])} for row in rows]

    # ---- what reports are made of ----

    def incidents(self, since: float = 0.0, most: int = 2000) -> list[dict[str, Any]]:
        """The records of incidents that were open at `since` or later, oldest first; the latest so many."""
        query = ("SELECT record FROM incidents WHERE ended_at IS NULL OR ended_at>=? ORDER BY opened_at DESC, id DESC"
                 " LIMIT ?")
        with self._lock:
            rows = self._read(query, (since, most))
        return [msgspec.json.decode(text) for (text,) in reversed(rows)]

    def transitions_in(self, start: float, end: float, most: int = 500) -> list[dict[str, Any]]:
        """Transitions between two times, in the order in which they were told; keys as of `transitions`."""
        query = "SELECT * FROM transitions WHERE at BETWEEN ? AND ? ORDER BY id LIMIT ?"
        with self._lock:
            rows = self._read(query, (start, end, most))
        found = [dict(zip(_TRANSITION_KEYS, row, strict=True)) for row in rows]
        for entry in found:
            entry["alert"] = msgspec.json.decode(entry["alert"])
        return found

    def notices_of(self, keys: Sequence[str], start: float, end: float, most: int = 500) -> list[dict[str, Any]]:
        """What was owed to whom of these keys, made between two times.

        Keys: channel, state, key, status, created_at, done_at, tries, last_error.
        """
        names = ("channel", "state", "key", "status", "created_at", "done_at", "tries", "last_error")
        query = (f"SELECT {', '.join(names)} FROM notices WHERE key IN ({','.join('?' * len(keys))})"  # noqa: S608  (ours)
                 " AND created_at BETWEEN ? AND ? ORDER BY id LIMIT ?")
        with self._lock:
            rows = self._read(query, (*keys, start, end, most))
        return [dict(zip(names, row, strict=True)) for row in rows]

    def add_days(self, rows: Sequence[tuple[Any, ...]], accounted: Mapping[str, float]) -> None:
        """Add to what days brought (rows as DAY_KEYS), and note up to where, in one transaction."""
        text = msgspec.json.encode(accounted).decode()
        with self._lock:
            if self._meta.get(ACCOUNTED) == text:
                return
            self._meta[ACCOUNTED] = text
            self._save_quietly([*((_ADD_DAY, row) for row in rows),
                                ("INSERT OR REPLACE INTO meta VALUES(?,?)", (ACCOUNTED, text))])

    def days(self, since_day: int) -> list[dict[str, Any]]:
        """What each day since `since_day` (unix days, UTC) brought each target."""
        with self._lock:
            rows = self._read("SELECT * FROM days WHERE day>=? ORDER BY day, target", (since_day,))
        return [dict(zip(DAY_KEYS, row, strict=True)) for row in rows]

    # ---- what is owed ----

    def owed(self, channel: str) -> list[Notice]:
        """Everything not yet delivered to `channel`, oldest first."""
        with self._lock:
            return list(self._pending[channel].values())

    def notice_delivered(self, notice_id: int, at: float) -> None:
        """The receiver has it."""
        self._end(notice_id, "delivered", at, None)

    def notice_rejected(self, notice_id: int, at: float, error: str) -> None:
        """The receiver refused it for good; a person must look."""
        self._end(notice_id, "rejected", at, error)

    def notice_retry(self, notice_id: int, at: float, due_at: float, error: str) -> None:
        """It failed at `at` and is tried again at `due_at`."""
        with self._lock:
            notice = self._find(notice_id)
            if notice is None:
                return
            later = replace(notice, due_at=due_at, tries=notice.tries + 1, last_error=error)
            self._pending[notice.channel][notice_id] = later
            self._failing_since.setdefault(notice.channel, at)
            self._save_quietly([(_RETRY_NOTICE, (due_at, later.tries, error, notice_id))])

    def accepted_at(self, channel: str) -> dict[str, float]:
        """When each alert's latest firing was delivered to `channel`, by the message's key."""
        query = (
            "SELECT key, MAX(done_at) FROM notices"
            " WHERE state='delivered' AND message<>'' AND channel=? AND status='firing' GROUP BY key"
        )
        with self._lock:
            return dict(self._read(query, (channel,)))

    def outbox_counts(self) -> dict[str, dict[str, int]]:
        """Notices by channel and state: pending, delivered (of the last days), rejected."""
        with self._lock:
            names = {name for name, owed in self._pending.items() if owed} | set(self._counts)
            return {name: {"pending": len(self._pending[name]), **self._counts[name]} for name in sorted(names)}

    def failing_since(self, channel: str) -> float | None:
        """Since when `channel` has answered nothing usable though it was tried; None: its last answer was one."""
        with self._lock:
            return self._failing_since.get(channel)

    # ---- facts, and window memory ----

    def meta(self, name: str) -> Any:
        """A fact that was saved under `name`; None if there is none."""
        with self._lock:
            text = self._meta.get(name)
        return None if text is None else msgspec.json.decode(text)

    def set_meta(self, name: str, value: Any) -> None:
        """Save a fact (anything that JSON can hold)."""
        text = msgspec.json.encode(value).decode()
        with self._lock:
            if self._meta.get(name) != text:
                self._meta[name] = text
                self._save_quietly([("INSERT OR REPLACE INTO meta VALUES(?,?)", (name, text))])

    def frames(self, since: float, res: str = "raw") -> Iterator[FrameRow]:
        """Window memory from `since` on, in the order in which it was told."""
        last = -1
        while True:  # in pages: days of memory must not be in ours all at once, nor hold the lock
            with self._lock:
                rows = self._read(_SELECT_FRAMES, (res, since, last))
            yield from (FrameRow(*row[:-1]) for row in rows)
            if not rows:
                return
            last = rows[-1][-1]

    def frames_by_time(self, res: str, since: float) -> list[FrameRow]:
        """The frames of one resolution from `since` on, oldest first; by the index, for a resolution with few."""
        with self._lock:
            return [FrameRow(*row) for row in self._read(_SELECT_FRAMES_BY_TIME, (res, since))]

    def layouts(self, but: str | None = None) -> list[LayoutRow]:
        """The meaning of every frame that is kept, of all tracks `but` one."""
        query = "SELECT track, layout, keys_json FROM layouts WHERE track IS NOT ?"
        with self._lock:
            return [LayoutRow(*row) for row in self._read(query, (but,))]

    def layout(self, track: str, number: int) -> LayoutRow | None:
        """The meaning of some frames; None: it is lost."""
        query = "SELECT track, layout, keys_json FROM layouts WHERE track=? AND layout=?"
        with self._lock:
            return next((LayoutRow(*row) for row in self._read(query, (track, number))), None)

    def last_layout(self) -> int:
        """The largest number that a layout has; 0: there is none."""
        with self._lock:
            return int(self._read("SELECT MAX(layout) FROM layouts", ())[0][0] or 0)

    def prune_layouts(self) -> frozenset[tuple[str, int]]:
        """Forget layouts without frames; what is left (track, number). Whoever gives out numbers must forget the rest.

        Not while frames of a new layout are on their way here.
        """
        with self._lock:
            self._save_quietly([], [(_UNUSED_LAYOUTS, ())])
            return frozenset(self._read("SELECT track, layout FROM layouts", ()))

    def prune(self, now: float, frame_ages_s: Mapping[str, float]) -> None:
        """Forget what is too old: transitions, delivered and rejected notices, frames by resolution."""
        with self._lock:
            soft: list[_Row] = [("DELETE FROM transitions WHERE at<?", (now - TRANSITIONS_KEPT_S,))]
            soft.append(("DELETE FROM notices WHERE state<>'pending' AND done_at<?", (now - TRANSITIONS_KEPT_S,)))
            soft.append(("UPDATE notices SET message='' WHERE state='delivered' AND message<>'' AND done_at<?",
                         (now - DELIVERED_KEPT_S,)))
            soft.append(("DELETE FROM incidents WHERE ended_at<?", (now - TRANSITIONS_KEPT_S,)))
            oldest = "SELECT id FROM incidents ORDER BY opened_at DESC LIMIT -1 OFFSET ?"
            soft.append((f"DELETE FROM incidents WHERE id IN ({oldest})", (MOST_INCIDENTS,)))  # noqa: S608  (ours)
            soft.append(("DELETE FROM days WHERE day<?", ((now - TRANSITIONS_KEPT_S) // 86400,)))
            soft += [("DELETE FROM frames WHERE res=? AND at<?", (r, now - age)) for r, age in frame_ages_s.items()]
            self._save_quietly([], soft)
            self._count()

    # ---- inside ----

    def _owe(self, now: float, channel: str, message: AlertMessage) -> Notice:
        notice = Notice(self._next_notice, channel, message, created_at=now, due_at=now)
        self._next_notice += 1
        self._pending[channel][notice.id] = notice
        return notice

    def _find(self, notice_id: int) -> Notice | None:
        return next((owed[notice_id] for owed in self._pending.values() if notice_id in owed), None)

    def _end(self, notice_id: int, state: str, at: float, error: str | None) -> None:
        with self._lock:
            notice = self._find(notice_id)
            if notice is None:
                return
            del self._pending[notice.channel][notice_id]
            self._counts[notice.channel][state] += 1
            self._failing_since.pop(notice.channel, None)  # it answered; what it thinks of this notice is in `state`
            self._save_quietly([(_END_NOTICE, (state, at, error or notice.last_error, notice_id))])

    def _transition_row(self, change: Transition) -> _Row:
        alert = change.alert
        number = self._next_transition
        self._next_transition += 1
        text = msgspec.json.encode(alert).decode()
        values = (alert.severity, alert.value, alert.limit, change.why, text)
        return _ADD_TRANSITION, (number, change.at, change.kind, alert.rule, alert.subject, *values)

    def _save_quietly(self, durable: list[_Row], soft: Sequence[_Row] = ()) -> None:
        """As _save, for callers who have nothing better to do than wait: `problem` tells, and the log once."""
        with suppress(NotSaved):
            self._save(durable, soft)

    def _save(self, durable: list[_Row], soft: Sequence[_Row], book: Book | None = None, *, sync: bool = False) -> None:
        """One transaction: what still waits, `durable`, `soft`, and what is new in `book`.

        On failure `durable` waits for the next time; of `soft` only what belongs to a tick, until the next one.
        """
        if not self._is_open:
            raise NotSaved(f"{self.path}: closed; what was done since is done again after the restart")
        self._unsaved += durable
        left = self._left or [] if book is not None else []
        try:
            try:
                self._write([*self._unsaved, *left, *soft, *_book_rows(self._saved, book)],
                            sync=sync or bool(self.problem))
            except sqlite3.DatabaseError as error:
                # Numbers are given in order: one that is taken stands where the file says that none does.
                if _code(error) in _BROKEN or getattr(error, "sqlite_errorcode", 0) in _TAKEN:
                    self._begin_afresh(error)
                elif not self._leave_disk():
                    raise
                self._write([*self._unsaved, *left, *soft, *_book_rows(self._saved, book)], sync=True)
        except (sqlite3.OperationalError, StoreError) as error:
            self.problem = _unsaved_text(self.path, error)
            if book is not None:
                self._left = list(soft) or left
            self._tell_problem()
            raise NotSaved(self.problem) from error
        except Exception:
            # A row that SQLite cannot take is a fault of ours: it must not come back with every later tick.
            del self._unsaved[len(self._unsaved) - len(durable) :]
            raise
        self._unsaved.clear()
        if book is not None:
            self._left = None
            self._saved = book
        if self._left is None and not self._in_memory:
            self.problem = None
        self._tell_problem()

    def _tell_problem(self) -> None:
        """What is wrong is in the log once, however many ticks fail; and that it is over."""
        if self.problem is not None and self.problem not in self._said:
            self._said.add(self.problem)
            log.error("database_not_saved", error=self.problem)
        elif self.problem is None and self._said:
            self._said.clear()
            log.info("database_saved", path=str(self.path))

    def _write(self, rows: Sequence[_Row], *, sync: bool) -> None:
        if not rows:
            return
        wanted = "FULL" if sync else "NORMAL"
        if wanted != self._sync:
            self._db.execute(f"PRAGMA synchronous={wanted}")
            self._sync = wanted
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, args in rows:
                self._db.execute(statement, args)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _read(self, query: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            return self._db.execute(query, args).fetchall()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path}: cannot be read ({error}); restart tocsin to have it checked") from error

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self.path)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _BROKEN:
                raise StoreError(_open_text(self.path, error)) from error
            self._move_aside(error)
        try:
            return _connect(self.path)
        except sqlite3.DatabaseError as error:
            raise StoreError(_open_text(self.path, error)) from error

    def _begin_in_memory(self, why: StoreError) -> None:
        """Nothing can be written: what the file holds is taken into memory, and alerts go on from there."""
        self._in_memory = True
        self.problem = _unsaved_text(self.path, why.__cause__ or why)
        log.error("database_in_memory", error=self.problem)
        if self.path.exists():
            # Without a -wal all is in the file itself; SQLite would want to make one, and must be told not to.
            how = "mode=ro" if self.path.with_name(f"{self.path.name}-wal").exists() else "mode=ro&immutable=1"
            try:
                with closing(sqlite3.connect(f"file:{quote(str(self.path))}?{how}", uri=True)) as file:
                    self._db = _copy_in_memory(file, self.path)
            except sqlite3.Error as error:
                self.notes.append(f"{self.path}: cannot be read ({error}); alerts that were open fire again")
            else:
                return
        self._db = _new_in_memory(self.path)

    def _leave_disk(self) -> bool:
        """Where the file system became read-only under us: go on in memory, and hold no file there.

        A kernel that met an error does not take that back before the file system is unmounted, and it cannot be while
        we hold it. False: it takes writes, or what it has cannot be read.
        """
        fault = _read_only(self._guard)
        if fault is None:
            return False
        try:
            memory = _copy_in_memory(self._db, self.path)
        except sqlite3.Error:
            return False
        with suppress(sqlite3.Error):  # it cannot put the -wal in order
            self._db.close()
        os.close(self._guard)
        self._guard, self._in_memory, self._db, self._sync = -1, True, memory, ""
        self.problem = _unsaved_text(self.path, fault)
        return True

    def _move_to_disk(self) -> None:
        """Try to write what is in memory in place of the file, from which it began, and go on there."""
        file: sqlite3.Connection | None = None
        if _device_of(self.path) != self._device:  # what is written beneath a mount point is hidden by the mount
            self.problem = (f"{self.path}: its file system is not mounted, or another one is; mount it, or restart "
                            "tocsin to begin in the new one: alerts go on, but not through a restart")
            return
        try:
            self._guard = _claim(self.path) if self._guard < 0 else self._guard
            file = self._open()
            self._db.backup(file)
        except (StoreError, sqlite3.Error) as error:
            self.problem = _unsaved_text(self.path, error.__cause__ or error)
            if file is not None:
                file.close()
            return
        self._db.close()
        self._db, self._in_memory, self._sync = file, False, ""
        log.info("database_on_disk", path=str(self.path))

    def _begin_afresh(self, error: sqlite3.DatabaseError) -> None:
        """The file broke while in use: move it aside; all that memory knows goes into a new one."""
        self._db.close()
        try:
            self._move_aside(error)
            self._db = _connect(self.path)
        except StoreError as fault:  # what broke the file has made its file system read-only
            if not _takes_no_write(fault.__cause__):
                raise
            log.error("database_in_memory", error=str(fault))  # noqa: TRY400  (its text is the whole story)
            self._in_memory, self._db = True, _new_in_memory(self.path)
        self._sync = ""
        self._saved = Book()
        known = {args[0] for sql, args in self._unsaved if sql == _ADD_NOTICE}
        owed = [notice for pending in self._pending.values() for notice in pending.values() if notice.id not in known]
        facts: list[_Row] = [("INSERT OR REPLACE INTO meta VALUES(?,?)", item) for item in self._meta.items()]
        self._unsaved = [*facts, *(_notice_row(notice) for notice in owed), *self._unsaved]

    def _move_aside(self, error: BaseException) -> None:
        aside = self.path.with_name(f"{self.path.name}.broken-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        try:
            for suffix in ("", "-wal", "-shm"):
                part = self.path.with_name(self.path.name + suffix)
                if part.exists():
                    part.replace(aside.with_name(aside.name + suffix))
        except OSError as fault:
            raise StoreError(_open_text(self.path, fault)) from fault
        note = (
            f"{self.path} is damaged ({error}); it was moved to {aside} and a new one begins: alerts that were open "
            "fire again, notices that were still owed and the windows' memory are in the old file only"
        )
        self.notes.append(note)
        log.error("database_moved_aside", path=str(self.path), aside=str(aside), error=str(error))

    def _load_or_begin_afresh(self) -> None:
        """A file whose pages are in order may hold rows that are not: one that cannot be taken back is moved aside."""
        try:
            self._load()
        except (StoreError, sqlite3.Error, TypeError, ValueError) as error:
            self._db.close()
            if not self._in_memory:
                self._move_aside(error.__cause__ or error)
            self._meta, self._pending, self._failing_since = {}, defaultdict(dict), {}
            self._db = _new_in_memory(self.path) if self._in_memory else self._open()
            self._load()

    def _load(self) -> None:
        for name, text in self._read("SELECT name, value FROM meta", ()):
            if self._decode(text, Any, f"the fact {name}") is not None:
                self._meta[name] = text
        alerts: dict[AlertKey, Alert] = {}
        for rule, subject, text in self._read("SELECT rule, subject, alert FROM alerts", ()):
            alert = self._decode(text, Alert, f"the alert {rule} of {subject}")
            if alert is not None:
                alerts[rule, subject] = alert
        resolved = {(r, s): at for r, s, at in self._read("SELECT rule, subject, at FROM resolved", ())}
        self._saved = Book(alerts, resolved)
        for row in self._read(_SELECT_OWED, ()):
            self._load_notice(*row)
        self._next_transition = 1 + (self._read("SELECT MAX(id) FROM transitions", ())[0][0] or 0)
        largest = self._read("SELECT MAX(id) FROM notices", ())[0][0] or 0  # of a damaged file it need not be
        self._next_notice = 1 + max(largest, *(max(owed, default=0) for owed in self._pending.values()), 0)
        self._count()
        self.prune_layouts()

    def _load_notice(
        self, number: int, channel: str, created: float, due: float, tries: int, error: str | None, text: str
    ) -> None:
        message = self._decode(text, AlertMessage, f"notice {number} to {channel}")
        if message is None:
            return
        self._pending[channel][number] = Notice(number, channel, message, created, due, tries, error)
        if tries:
            self._failing_since[channel] = min(created, self._failing_since.get(channel, created))

    def _decode(self, text: str, kind: type[Any], what: str) -> Any:
        """The value, or None with a note: a row of another version must not keep the agent from starting."""
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            note = f"{self.path}: {what} cannot be read ({error}) and was left out"
        self.notes.append(note)
        log.warning("row_unreadable", note=note)
        return None

    def _count(self) -> None:
        self._counts.clear()
        query = "SELECT channel, state, COUNT(*) FROM notices WHERE state<>'pending' AND message<>'' GROUP BY 1, 2"
        for channel, state, number in self._read(query, ()):
            self._counts[channel][state] = number


def _claim(path: Path) -> int:
    """Take the file for this process: two agents on one state would page twice. Returns the lock's descriptor."""
    # A file of its own: closing a second descriptor of the database would drop SQLite's own locks.
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(_open_text(path, error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(
            f"{path}: another tocsin (process {holder}) uses it; stop that one, or give this one its own state_dir"
        ) from error
    os.ftruncate(descriptor, 0)
    try:
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:  # a full disk: the lock holds all the same, only the message above would be poorer
        log.warning("lock_without_pid", path=str(lock))
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    """Open, check and, if new, fill the database. Raises sqlite3.DatabaseError; StoreError for a newer schema."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)  # -wal and -shm take it over
    except OSError as error:
        raise StoreError(_open_text(path, error)) from error
    db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path)
    except UnicodeDecodeError as error:  # SQLite's own words on a damaged schema quote it
        db.close()
        raise _damaged("its schema is no text") from error
    except BaseException:
        db.close()
        raise
    return db


def _read_only(guard: int) -> OSError | None:
    """What a file system says that takes no write any more; SQLite calls that an I/O error like any other."""
    try:
        if guard >= 0:
            os.pwrite(guard, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        return error if error.errno == errno.EROFS else None
    return None


def _device_of(path: Path) -> int | None:
    """On which file system a path is, or its nearest folder that exists."""
    for place in (path, *path.parents):
        with suppress(OSError):
            return place.stat().st_dev
    return None


def _copy_in_memory(file: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """All that a database holds, in memory. Raises sqlite3.Error."""
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        file.backup(memory)
        _prepare(memory, path)
    except BaseException:
        memory.close()
        raise
    return memory


def _new_in_memory(path: Path) -> sqlite3.Connection:
    """An empty database for as long as `path` cannot be written."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _prepare(db, path)
    return db


def _damaged(why: str) -> sqlite3.DatabaseError:
    """As SQLite says it of a file that is broken."""
    error = sqlite3.DatabaseError(why)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.text_factory = partial(str, encoding="utf-8", errors="replace")  # one bad byte must not make the rest unreadable
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA cache_size=-512")  # KiB: the daemon's memory is one of its features
    db.execute("PRAGMA journal_size_limit=8388608")
    answer = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if answer != "ok":
        raise _damaged(answer)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: written by a newer Tocsin (schema {version}, this one knows {SCHEMA_VERSION}); "
            "install the newer one, or move the file away and start without it"
        )
    if version == 0:
        db.executescript(f"BEGIN; {_SCHEMA} {''.join(_ADDED.values())} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    elif version < SCHEMA_VERSION:
        added = "".join(text for number, text in _ADDED.items() if number > version)
        db.executescript(f"BEGIN; {added} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")


def _takes_no_write(error: BaseException | None) -> bool:
    """Whether a file system said that it is read-only, full or failing."""
    return (isinstance(error, OSError) and error.errno in _NO_WRITE_OS) or (
        isinstance(error, sqlite3.Error) and _code(error) in _NO_WRITE)


def _is_silenced(alert: str) -> bool:
    """Whether a saved alert had the annotation of a silence."""
    return f'"{SILENCED}"' in alert and SILENCED in msgspec.json.decode(alert).get("annotations", {})


def _code(error: BaseException) -> int:
    """SQLite's primary result code: the extended ones keep it in their low byte."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _notice_row(notice: Notice) -> _Row:
    message = notice.message
    text = msgspec.json.encode(message).decode()
    state = (notice.created_at, notice.due_at, notice.tries, notice.last_error)
    return _ADD_NOTICE, (notice.id, notice.channel, message.key, message.status, *state, text)


def _book_rows(old: Book, new: Book | None) -> list[_Row]:
    """The statements that turn the saved book into `new`."""
    if new is None:
        return []
    rows: list[_Row] = []
    for key, alert in new.alerts.items():
        was = old.alerts.get(key)
        if was is not alert and was != alert:
            text = msgspec.json.encode(alert).decode()
            rows.append(("INSERT OR REPLACE INTO alerts VALUES(?,?,?)", (*key, text)))
    rows += [("DELETE FROM alerts WHERE rule=? AND subject=?", k) for k in old.alerts.keys() - new.alerts.keys()]
    if new.resolved_at is not old.resolved_at:
        for key, at in new.resolved_at.items():
            if old.resolved_at.get(key) != at:
                rows.append(("INSERT OR REPLACE INTO resolved VALUES(?,?,?)", (*key, at)))
        gone = old.resolved_at.keys() - new.resolved_at.keys()
        rows += [("DELETE FROM resolved WHERE rule=? AND subject=?", key) for key in gone]
    return rows


def _open_text(path: Path, error: Exception) -> str:
    return (
        f"{path}: cannot be opened ({error}); see that its directory exists, belongs to tocsin's user and has "
        "space, or set state_dir in tocsin.yaml"
    )


def _unsaved_text(path: Path, error: BaseException) -> str:
    if _code(error) == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
        return f"{path}: the disk is full; free some space on {path.parent}: alerts go on, but not through a restart"
    why = getattr(error, "strerror", None) or error
    return f"{path}: cannot be written ({why}); see its file system: alerts go on, but not through a restart"
