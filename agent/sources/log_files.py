"""Logs that hold the kernel's records: /dev/kmsg, a file that grows, a FIFO; each with its cursor."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from agent.hardware.lines import Record, record_of

LINES_APART_S = 0.05  # of a file that grows: what is written at once is read at once
IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100  # sys/inotify.h
RECORD_BYTES = 8192  # the most that /dev/kmsg gives of one record
CHUNK_BYTES = 1 << 16
FIRST_BYTES = 16 << 20  # of a file that no run of ours has read before


class When(Enum):
    """When a record came: while we looked, before that, or before any run of ours looked at all."""

    LIVE = "live"
    BEFORE = "before"
    FIRST = "first"


class Log(Protocol):
    """An open log. `wait` blocks until there may be more; `cursor` is where what was given by `records` ends."""

    cursor: dict[str, Any]
    lost: int
    behind: bool  # there is more from before we looked

    def records(self) -> Iterator[tuple[Record, When]]:
        """What has come."""

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class Kmsg:
    """/dev/kmsg: one record a read, each with its number. The kernel keeps as many as fit into its ring."""

    behind = False

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


class Tail:
    """A regular file that grows, and that somebody may rotate."""

    behind = False

    def __init__(self, path: Path, cursor: Mapping[str, Any], boot: str, now: float) -> None:
        self._path, self._now = path, now
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
        self._changes = Changes(path)
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
                record = record_of(line.decode("utf-8", "replace"), self._now)
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
        self._changes.follow()
        self.cursor.update(inode=os.fstat(self._fd).st_ino, offset=0)
        return True

    def wait(self, timeout_s: float) -> None:
        self._changes.wait(timeout_s)

    def close(self) -> None:
        for fd in (self._fd, *self._queue):
            os.close(fd)
        self._changes.close()


class Changes:
    """What the kernel tells of a file that grows, and of others that come in its place (inotify)."""

    def __init__(self, path: Path) -> None:
        self._path, self._libc = path, ctypes.CDLL(None)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        if self._fd >= 0:  # else this user has too many already, and each wait is as long as it may be
            self._poll.register(self._fd, select.POLLIN)
            self._libc.inotify_add_watch(self._fd, os.fsencode(path.parent), IN_CREATE | IN_MOVED_TO)
            self.follow()

    def follow(self) -> None:
        """Look at the file that has its name now."""
        self._libc.inotify_add_watch(self._fd, os.fsencode(self._path), IN_MODIFY)

    def wait(self, timeout_s: float) -> None:
        """Until something was written, or another file came; a moment longer, for what comes with it."""
        if self._poll.poll(timeout_s * 1000):
            time.sleep(LINES_APART_S)
            os.read(self._fd, CHUNK_BYTES)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Pipe:
    """A FIFO or a terminal: what is written while we look, and nothing else."""

    behind = False

    def __init__(self, path: Path, boot: str, now: float) -> None:
        # for writing, too: a FIFO without any writer would be at its end for ever
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._rest, self._now, self.lost = b"", now, 0
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
                record = record_of(line.decode("utf-8", "replace"), self._now)
                if record is not None:
                    yield record, When.LIVE

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self._fd)
