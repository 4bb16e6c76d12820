"""The kernel log: /dev/kmsg, or a file or pipe that holds the same lines.

A thread of its own waits for the log and wakes the loop; `read` hands over what has come since. Equal lines are one
event with a count from the moment they are read, so a storm of them costs no memory. Only what the kernel itself wrote
counts: a line that a user wrote and that looks like the driver's is told as forged.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from agent.hardware.lines import Line, Reader, Record, record_of
from agent.model import Batch, Event, EventKind, Gap, Sample, Why

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Where a syslog daemon writes the kernel's messages, for who may not read /dev/kmsg.
FALLBACKS = (Path("/var/log/kern.log"), Path("/var/log/messages"))
KMSG_DEVICE = os.makedev(1, 11)
NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.ENOENT)
SUBJECT = "kernel_log"
OPEN = "kernel_log_open"  # sample: 1 while the log is read
LOOK_EVERY_S = 0.2  # a regular file has nothing to wait on
RECORD_BYTES = 8192  # the most that /dev/kmsg gives of one record
CHUNK_BYTES = 1 << 16
FIRST_BYTES = 16 << 20  # of a file that no run of ours has read before
REOPEN_S = 5.0
MOST_KINDS = 1024  # of events that are different and were not handed over yet; what comes beyond is counted as lost
WOKEN_S = 5.0  # the same event wakes the loop no more often
TOLD = tuple(f.name for f in fields(Line) if f.name not in ("kind", "device", "number", "words"))


class When(Enum):
    """When a record came: while we looked, before that, or before any run of ours looked at all."""

    LIVE = "live"
    BEFORE = "before"
    FIRST = "first"


class _Log(Protocol):
    """An open log. `wait` blocks until there may be more; `cursor` is where what was given by `records` ends."""

    cursor: dict[str, Any]
    lost: int

    def records(self) -> Iterator[tuple[Record, When]]:
        """What has come."""

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class _Kmsg:
    """/dev/kmsg: one record a read, each with its number. The kernel keeps as many as fit into its ring."""

    def __init__(self, path: Path, cursor: Mapping[str, Any], boot: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        same = cursor.get("boot") == boot and isinstance(cursor.get("seq"), int)
        self._seen: int | None = cursor["seq"] if same else None
        self._when = When.BEFORE if cursor.get("boot") else When.FIRST
        self.cursor: dict[str, Any] = {"boot": boot, "seq": self._seen}
        self.lost = 0

    def records(self) -> Iterator[tuple[Record, When]]:
        while True:
            try:
                raw = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                self._when = When.LIVE
                return
            except BrokenPipeError:  # overwritten before we read them: the next number tells how many
                continue
            record = record_of(raw.decode("utf-8", "replace"))
            if record is None or record.seq is None:
                continue
            if self._seen is not None and record.seq <= self._seen:
                yield record._replace(seq=-1), self._when  # only for the names of GPUs
                continue
            if self._seen is not None:
                self.lost += record.seq - self._seen - 1
            self._seen = self.cursor["seq"] = record.seq
            yield record, self._when

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self._fd)


class _Tail:
    """A regular file that grows, and that somebody may rotate."""

    def __init__(self, path: Path, cursor: Mapping[str, Any], boot: str, year: int) -> None:
        self._path, self._year = path, year
        self._rest = b""
        self.lost = 0
        self._when = When.BEFORE if cursor.get("inode") else When.FIRST
        self._queue: list[int] = []
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        inode, offset = os.fstat(fd).st_ino, 0
        if cursor.get("inode") == inode and os.fstat(fd).st_size >= int(cursor.get("offset") or 0):
            offset = int(cursor["offset"])
        elif cursor.get("inode"):
            before = self._rotated(int(cursor["inode"]), int(cursor.get("offset") or 0))
            if before is not None:
                self._queue, fd = [fd], before
                inode, offset = int(cursor["inode"]), int(cursor.get("offset") or 0)
        else:  # a log of months is not read from its beginning; the line in which we land is no line of ours
            offset = max(0, os.fstat(fd).st_size - FIRST_BYTES)
        os.lseek(fd, offset, os.SEEK_SET)
        self._fd = fd
        self.cursor: dict[str, Any] = {"boot": boot, "inode": inode, "offset": offset}

    def _rotated(self, inode: int, offset: int) -> int | None:
        """The file that we read before, under its new name."""
        for other in (self._path.with_name(f"{self._path.name}.1"), self._path.with_name(f"{self._path.name}.old")):
            try:
                fd = os.open(other, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if os.fstat(fd).st_ino == inode and os.fstat(fd).st_size >= offset:
                return fd
            os.close(fd)
        return None

    def records(self) -> Iterator[tuple[Record, When]]:
        while True:
            chunk = os.read(self._fd, CHUNK_BYTES)
            if not chunk:
                if not self._next():
                    self._when = When.LIVE
                    return
                continue
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[-CHUNK_BYTES:]
            for line in lines:
                self.cursor["offset"] += len(line) + 1
                record = record_of(line.decode("utf-8", "replace"), self._year)
                if record is not None:
                    yield record, self._when

    def _next(self) -> bool:
        """Go on with the file that has come in place of the one that was read to its end."""
        if not self._queue:
            try:
                there, here = self._path.stat(), os.fstat(self._fd)
            except OSError:
                return False
            if there.st_ino == here.st_ino and here.st_size >= os.lseek(self._fd, 0, os.SEEK_CUR):
                return False
            self._queue.append(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
        os.close(self._fd)
        self._fd, self._rest = self._queue.pop(), b""
        self.cursor.update(inode=os.fstat(self._fd).st_ino, offset=0)
        return True

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, LOOK_EVERY_S))

    def close(self) -> None:
        for fd in (self._fd, *self._queue):
            os.close(fd)


class _Pipe:
    """A FIFO or a terminal: what is written while we look, and nothing else."""

    def __init__(self, path: Path, boot: str, year: int) -> None:
        # for writing, too: a FIFO without any writer would be at its end for ever
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._rest, self._year, self.lost = b"", year, 0
        self.cursor: dict[str, Any] = {"boot": boot}

    def records(self) -> Iterator[tuple[Record, When]]:
        while True:
            try:
                chunk = os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[-CHUNK_BYTES:]
            for line in lines:
                record = record_of(line.decode("utf-8", "replace"), self._year)
                if record is not None:
                    yield record, When.LIVE

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self._fd)


@lru_cache(1024)
def told_by(line: Line) -> Mapping[str, Any]:
    """What a line says beyond its device and number, in plain values."""
    detail = {name: value for name in TOLD if (value := getattr(line, name)) is not None and value != ""}
    if not line.injected:
        del detail["injected"]
    return detail


class _Counted:
    """Equal events, while they are waiting to be handed over."""

    __slots__ = ("at", "count", "detail", "event", "first_at")

    def __init__(self, event: Event, at: float) -> None:
        self.event, self.count, self.first_at, self.at = event, 0, at, at
        self.detail: Mapping[str, Any] = {}

    def whole(self) -> Event:
        """All of them as one."""
        return replace(self.event, at=self.at, first_at=self.first_at, count=self.count, detail=self.detail)


class KernelLog:
    """The kernel log as a Source.

    A read gives the sample kernel_log_open, or a Gap that says why the log is not read: NOT_SUPPORTED where /dev/kmsg
    may not be read and nobody asked for it. `note` says in words what is read.
    """

    name = "kernel_log"

    def __init__(self, path: Path | None = None, cursor: Mapping[str, Any] | None = None, *, kmsg: Path = KMSG,
                 fallbacks: Sequence[Path] = FALLBACKS, boot_id: Path = BOOT_ID, undated: bool = False) -> None:
        """`path` None: /dev/kmsg, else the first of `fallbacks` that can be read. `cursor`: where an earlier run was.

        `undated`: count also the old lines of a text that tell no time (as now), as a single look does.
        """
        self.note = "not read yet"
        self._path, self._asked, self._fallbacks = path or kmsg, path is not None, fallbacks
        self._cursor: Mapping[str, Any] = cursor or {}
        self._boot_id, self._undated = boot_id, undated
        self._wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._caught_up = threading.Event()
        self._closed = False
        self._events: dict[tuple[Any, ...], _Counted] = {}
        self._booted: tuple[Event, ...] = ()
        self._woken: dict[tuple[Any, ...], float] = {}
        self._expected: dict[str, float] = {}  # a drill's line -> until when, monotonic
        self._at: tuple[float, float] = (0.0, 0.0)  # unix and monotonic time of the last read
        self._error: str | None = None
        self._why: Gap | None = None
        self._missed = 0  # records that could not be kept

    # --- the loop's side --------------------------------------------------------------------------------------------

    def wake_with(self, wake: Callable[[], object]) -> None:
        """`wake` is called from this source's thread when something has come that cannot wait for the tick."""
        self._wake = wake

    def expect(self, message: str, for_s: float = 10.0) -> None:
        """A drill will write exactly this message to /dev/kmsg: once, and within `for_s`, it counts as the kernel's."""
        with self._lock:
            self._expected[message] = time.monotonic() + for_s

    def read(self, now: float) -> Batch:
        """Hand over what has come since the last read. Never blocks, but the first time: for what is there already."""
        began = time.monotonic()
        self._at = (now, began)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="kernel log", daemon=True)
            self._thread.start()
            self._caught_up.wait(2.0)
        with self._lock:
            events = (*self._booted, *(counted.whole() for counted in self._events.values()))
            self._events, self._booted = {}, ()
            if self._missed:
                events = (*events, Event("overrun", "", None, now, now, self._missed))
                self._missed = 0
            self._expected = {m: until for m, until in self._expected.items() if until > began}
            cursor, why, error = dict(self._cursor), self._why, self._error
        took_s = time.monotonic() - began
        reading: Sample | Gap = Sample(OPEN, SUBJECT, 1.0, now)
        if why is not None:
            reading = why._replace(at=now)
        return Batch(self.name, now, took_s, (reading,), error=error, events=events, cursor=cursor)

    def close(self) -> None:
        """Let the thread end; it does within a second."""
        self._closed = True

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._closed:
            try:
                log = self._open()
            except OSError as error:
                self._tell(error)
                self._caught_up.set()
                self._sleep(REOPEN_S)
                continue
            try:
                self._read_on(log)
            except OSError as error:
                self._tell(error)
                self._sleep(REOPEN_S)
            finally:
                log.close()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closed and time.monotonic() < end:
            time.sleep(0.2)

    def _open(self) -> _Log:
        boot = self._boot_id.read_text().strip()
        try:
            path, log = self._path, self._open_at(self._path, boot)
        except OSError as error:
            found = next((p for p in self._fallbacks if not self._asked and os.access(p, os.R_OK)), None)
            if found is None or error.errno not in NOT_FOR_US:
                raise
            path, log = found, self._open_at(found, boot)
        with self._lock:
            if self._cursor.get("boot") not in (None, boot):
                booted_at = self._now() - time.monotonic()
                self._booted = (Event("boot", "", None, booted_at, booted_at),)
            self._why = self._error = None
            self.note = f"reads {path}"
        return log

    def _open_at(self, path: Path, boot: str) -> _Log:
        kind = path.stat()
        year = datetime.fromtimestamp(self._at[0], UTC).year
        if stat.S_ISREG(kind.st_mode):
            return _Tail(path, self._cursor, boot, year)
        if stat.S_ISCHR(kind.st_mode) and kind.st_rdev == KMSG_DEVICE:
            return _Kmsg(path, self._cursor, boot)
        return _Pipe(path, boot, year)

    def _tell(self, error: OSError) -> None:
        text = f"{self._path}: {error.strerror or error}"
        if not self._asked and error.errno in NOT_FOR_US:
            text += "; it needs CAP_SYSLOG, and /dev/kmsg in the container (deploy/systemd/tocsin.service gives both)"
            code, told = Why.NOT_SUPPORTED, None
        else:
            code, told = Why.ERROR, text
        with self._lock:
            self.note, self._error = text, told
            self._why = Gap(OPEN, SUBJECT, code, text, 0.0)

    def _read_on(self, log: _Log) -> None:
        reader = Reader()
        lost = 0
        while not self._closed:
            for record, when in log.records():
                self._take(record, reader, when, log.cursor)
                if log.lost != lost:
                    self._count_lost(log.lost - lost)
                    lost = log.lost
                if self._is_closed():
                    return
            with self._lock:
                self._cursor = dict(log.cursor)
            self._caught_up.set()
            log.wait(0.5)

    def _is_closed(self) -> bool:
        return self._closed

    def _now(self) -> float:
        now, mono = self._at
        return now + time.monotonic() - mono

    def _count_lost(self, count: int) -> None:
        if count > 0:
            with self._lock:
                self._missed += count
            self._wake()

    def _take(self, record: Record, reader: Reader, when: When, cursor: Mapping[str, Any]) -> None:
        """One record, which ends at `cursor`."""
        line = reader.read(record.message)
        if line is None or line.kind == "more" or (record.seq == -1 and line.kind != "map"):
            return
        now = self._now()
        boot_at = now - time.monotonic()
        told_at = record.time(boot_at)
        if when is When.FIRST and told_at is None and not self._undated and line.kind != "map":
            return  # a text without times: who knows how old it is
        at = now if told_at is None or when is When.LIVE else min(told_at, now)
        kind: EventKind = line.kind
        detail = told_by(line)
        if not record.trusted:
            if not record.message.startswith(("NVRM: ", "nvidia-nvswitch")) or kind in ("map", "limited"):
                return
            if self._is_expected(record.message):
                detail = {**detail, "drill": True}
            else:
                # all as one: who writes a thousand of them must not push out what the kernel said
                kind, line = "forged", Line("more")
                detail = {"text": record.message[:200], "facility": record.facility}
        key = self._add(kind, line, detail, at, cursor)
        if when is When.LIVE and kind not in ("map", "limited"):  # the first read waits for what was there before
            self._call(key)

    def _is_expected(self, message: str) -> bool:
        with self._lock:
            until = self._expected.pop(message, None)
        return until is not None and time.monotonic() <= until

    def _add(self, kind: EventKind, line: Line, detail: Mapping[str, Any], at: float, cursor: Mapping[str, Any],
             ) -> tuple[Any, ...]:
        told = (line.action, line.fatal, line.instance, line.uuid, line.injected, "drill" in detail)
        key = (kind, line.device, line.number, *told)
        with self._lock:
            self._cursor = dict(cursor)  # handed over together: nothing is counted twice, and nothing is lost
            known = self._events.pop(key, None)  # the last is last: it may end what came before it
            if known is None:
                if len(self._events) >= MOST_KINDS:
                    self._missed += 1
                    return key
                known = _Counted(Event(kind, line.device, line.number, at, at), at)
            known.count += 1
            known.first_at, known.at, known.detail = min(known.first_at, at), at, detail
            self._events[key] = known
        return key

    def _call(self, key: tuple[Any, ...]) -> None:
        """Wake the loop, but for what woke it a moment ago."""
        mono = time.monotonic()
        if mono - self._woken.get(key, -WOKEN_S) >= WOKEN_S:
            if len(self._woken) >= MOST_KINDS:
                self._woken.clear()
            self._woken[key] = mono
            self._wake()
