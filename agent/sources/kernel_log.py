"""The kernel log: /dev/kmsg, else systemd's journal, or a file or pipe that holds the same lines.

A thread of its own waits for the log and wakes the loop; `read` hands over what has come since. Equal lines are one
event with a count from the moment they are read, so a storm of them costs no memory. Only what the kernel itself wrote
counts: a line that a user wrote and that looks like the driver's is told as forged.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent.hardware.lines import Line, Reader, Record, line_of
from agent.model import Batch, Event, EventKind, Gap, Sample, Why
from agent.sources.journal import FOLDERS, MACHINE_ID, Journal, folder_here
from agent.sources.log_files import Kmsg, Log, Pipe, Tail, When
from agent.threads import begin

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Where a syslog daemon writes the kernel's messages, for who may not read /dev/kmsg.
FALLBACKS = (Path("/var/log/kern.log"), Path("/var/log/messages"))
KMSG_DEVICE = os.makedev(1, 11)
NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.ENOENT)
SUBJECT = "kernel_log"
OPEN = "kernel_log_open"  # sample: 1 while the log is read
REOPEN_S = 5.0
BOOT_S = 5.0  # as exactly as the time of the boot is known
WAIT_S = 1.0  # at most, for more to come: so long until the thread sees that it shall end
MOST_KINDS = 1024  # of events that are different and were not handed over yet; what comes beyond is counted as lost
WOKEN_S = 5.0  # the same event wakes the loop no more often
TOLD = tuple(f.name for f in fields(Line) if f.name not in ("kind", "device", "number", "words"))


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
                 journals: Sequence[Path] = FOLDERS, fallbacks: Sequence[Path] = FALLBACKS, boot_id: Path = BOOT_ID,
                 machine_id: Path = MACHINE_ID, undated: bool = False) -> None:
        """`path` None: /dev/kmsg, else this machine's journal in `journals`, else the first of `fallbacks` that can be
        read. A folder is a journal's, read by journalctl. `cursor`: where an earlier run was.

        `undated`: count also the old lines of a text that tell no time (as now), as a single look does.
        """
        self.note = "not read yet"
        self._path, self._asked, self._fallbacks = path or kmsg, path is not None, fallbacks
        self._journals, self._machine_id = journals, machine_id
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
            self._thread = begin(self._follow, "kernel log")
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
            log: Log | None = None
            try:
                log = self._open()
                self._read_on(log)
            except OSError as error:
                self._tell(error)
            except Exception as error:  # a fault of ours must not end this thread: it would be deaf without a word
                self._tell(OSError(f"{type(error).__name__}: {error}"))
            finally:
                if log is not None:
                    log.close()
            if not self._closed:
                self._caught_up.set()
                self._sleep(REOPEN_S)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closed and time.monotonic() < end:
            time.sleep(0.2)

    def _open(self) -> Log:
        boot = self._boot_id.read_text().strip()
        try:
            path, log = self._path, self._open_at(self._path, boot)
        except OSError as error:
            if self._asked or error.errno not in NOT_FOR_US:
                raise
            path, log = self._open_instead(boot, error)
        with self._lock:
            if self._cursor.get("boot") not in (None, boot):
                booted_at = self._now() - time.monotonic()
                self._booted = (Event("boot", "", None, booted_at, booted_at),)
            self._why = self._error = None
            self.note = f"reads {path}"
        return log

    def _open_instead(self, boot: str, error: OSError) -> tuple[Path, Log]:
        """What this user may read instead of /dev/kmsg. Raises OSError: `error`, and why nothing else can be."""
        journal = folder_here(self._journals, self._machine_id)
        if isinstance(journal, Path):
            return journal, Journal(journal, self._cursor, boot)
        found = next((p for p in self._fallbacks if os.access(p, os.R_OK)), None)
        if found is None:
            raise OSError(error.errno, f"{error.strerror}; and {journal}")
        return found, self._open_at(found, boot)

    def _open_at(self, path: Path, boot: str) -> Log:
        kind = path.stat()
        if stat.S_ISDIR(kind.st_mode):
            return Journal(path, self._cursor, boot)
        if stat.S_ISREG(kind.st_mode):
            return Tail(path, self._cursor, boot, self._now())
        if stat.S_ISCHR(kind.st_mode) and kind.st_rdev == KMSG_DEVICE:
            return Kmsg(path, self._cursor, boot)
        return Pipe(path, boot, self._now())

    def _tell(self, error: OSError) -> None:
        text = f"{self._path}: {error.strerror or error}"
        if not self._asked and error.errno in NOT_FOR_US:
            text += ("; it needs CAP_SYSLOG, and /dev/kmsg in the container (deploy/systemd/tocsin.service gives both),"
                     " or the group systemd-journal")
            code, told = Why.NOT_SUPPORTED, None
        else:
            code, told = Why.ERROR, text
        with self._lock:
            self.note, self._error = text, told
            self._why = Gap(OPEN, SUBJECT, code, text, 0.0)

    def _read_on(self, log: Log) -> None:
        reader = Reader()
        lost = 0
        while not self._closed:
            for record, when in log.records():
                self._take(record, reader, when, log.cursor)
                lost = self._count_lost(log, lost)
                if self._is_closed():
                    return
            lost = self._count_lost(log, lost)
            with self._lock:
                self._cursor = dict(log.cursor)
            if not log.behind:
                self._caught_up.set()
            log.wait(WAIT_S)

    def _is_closed(self) -> bool:
        return self._closed

    def _now(self) -> float:
        now, mono = self._at
        return now + time.monotonic() - mono

    def _count_lost(self, log: Log, before: int) -> int:
        """How many records the log has lost by now; what is new of it is told."""
        if log.lost > before:
            with self._lock:
                self._missed += log.lost - before
            self._wake()
        return log.lost

    def _take(self, record: Record, reader: Reader, when: When, cursor: Mapping[str, Any]) -> None:
        """One record, which ends at `cursor`."""
        line = reader.read(record.message) if record.trusted else line_of(record.message)
        if line is None or line.kind == "more" or (record.seq == -1 and line.kind != "map"):
            return
        now = self._now()
        boot_at = now - time.monotonic()
        told_at = record.time(boot_at)
        if when is When.FIRST and told_at is None and not self._undated and line.kind != "map":
            return  # a text without times: who knows how old it is
        if when is When.FIRST and told_at is not None and told_at < boot_at - BOOT_S:
            # a file that outlives reboots: what came before the last one was mended by it
            self._booted = (Event("boot", "", None, boot_at, boot_at),)
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
