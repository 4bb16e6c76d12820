"""The ledger of a run: one file of JSON lines that a crash, a full disk or a read-only one leave readable with `cat`.

Each state is here before it is acted on. The plan of the fault, in the ARMED entry, is all that undo needs; undo itself
never writes. Whoever runs or owns a fault is named by a ProcessId under "runner" or "holder", in whatever entry.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from drills.model import Plan, ProcessId, State
from drills.proc import boot_id

LEDGER = "ledger.jsonl"
ABORTED_BY = "aborted_by"
SIZE_BYTES = 65_536
# Notes may not use the end of the file up: a state must still find room.
KEPT_FOR_STATES_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `boot_s` is CLOCK_BOOTTIME, which no step of the clock moves and which counts a suspended host."""

    n: int
    at: float
    boot_s: float
    boot_id: str
    state: State | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class Ledger:
    """An open ledger, written by one process at a time. Each write is on disk when it returns, or raises OSError."""

    def __init__(self, path: Path, fd: int, n: int, offset: int) -> None:
        self.path = path
        self._fd = fd
        self._n = n
        self._offset = offset
        self._boot_id = boot_id()
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path, header: Mapping[str, Any]) -> Ledger:
        """Make the folder of a new run and its ledger; the header is entry 0. Raises OSError (also: it exists)."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / LEDGER
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, SIZE_BYTES)
            # Written once, too: on a full disk even a reserved block may need room for the map that says it is written.
            os.pwrite(fd, bytes(SIZE_BYTES), 0)
            os.fsync(fd)
            for parent in (folder, folder.parent):
                _sync_folder(parent)
            ledger = cls(path, fd, 0, 0)
            ledger.note(**header)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)  # nothing was touched: no run, rather than one that says nothing
            raise
        return ledger

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """Go on with a ledger that another process wrote. Raises OSError."""
        path = folder / LEDGER
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            raw = os.pread(fd, SIZE_BYTES, 0)
            entries, offset = _parse(raw)
            rest = raw[offset:].rstrip(b"\0")
            if rest:  # half a line of a crash: what comes next must not grow together with it
                os.pwrite(fd, bytes(len(rest)), offset)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, entries[-1].n + 1 if entries else 0, offset)

    def write(self, state: State, **data: Any) -> None:
        """Say that the run is about to act on `state`. Raises OSError: then it must not."""
        self._append(state, data, SIZE_BYTES)

    def note(self, **data: Any) -> None:
        """Write down something between two states. Raises OSError."""
        self._append(None, data, SIZE_BYTES - KEPT_FOR_STATES_BYTES)

    def _append(self, state: State | None, data: Mapping[str, Any], limit_bytes: int) -> None:
        with self._lock:
            boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            line = msgspec.json.encode(Entry(self._n, time.time(), boot_s, self._boot_id, state, data)) + b"\n"
            if self._offset + len(line) > limit_bytes:
                raise OSError(errno.ENOSPC, f"the ledger's {SIZE_BYTES} bytes are full", str(self.path))
            written = os.pwrite(self._fd, line, self._offset)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written", str(self.path))
            os.fdatasync(self._fd)
            self._n += 1
            self._offset += len(line)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _parse(raw: bytes) -> tuple[list[Entry], int]:
    """The whole lines before the first NUL, and where they end."""
    entries: list[Entry] = []
    offset = 0
    text = raw.partition(b"\0")[0]
    for line in text.splitlines(keepends=True):
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except msgspec.DecodeError:
            break
        if not line.endswith(b"\n"):
            break
        entries.append(entry)
        offset += len(line)
    return entries, offset


def read(folder: Path) -> list[Entry]:
    """What a ledger says, up to the first NUL, half or damaged line; empty where there is none. Raises OSError."""
    try:
        raw = (folder / LEDGER).read_bytes()
    except FileNotFoundError:
        return []
    return _parse(raw)[0]


def run_folders(root: Path) -> list[Path]:
    """The folders of all runs under `<state_dir>/drills/runs`, oldest first. Raises OSError.

    One that we may not look into is among them: its readers meet the error, and the others are not lost for it.
    """
    try:
        found = [folder for folder in root.iterdir() if _has_ledger(folder)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda folder: (folder.name.rsplit("-", 2)[1:], folder.name))


def _has_ledger(folder: Path) -> bool:
    try:
        return stat.S_ISREG((folder / LEDGER).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def say_aborted_by(folder: Path, by: str) -> None:
    """Say who ends a run, before its runner is told to. The first one stays.

    Beside the ledger, which the runner alone writes while it lives; a full disk costs the name, never the abort.
    """
    with suppress(OSError), (folder / ABORTED_BY).open("x") as file:
        file.write(by)


def aborted_by(folder: Path) -> str:
    """Who ended a run before its time; "" where nobody said so."""
    try:
        return (folder / ABORTED_BY).read_text(errors="replace")
    except OSError:
        return ""


def plan_of(entries: Sequence[Entry]) -> Plan | None:
    """The plan of the fault; None before ARMED: then nothing was touched. Raises msgspec.ValidationError."""
    for entry in reversed(entries):
        if entry.data.get("plan") is not None:
            return msgspec.convert(entry.data["plan"], Plan)
    return None


def last_change(entries: Sequence[Entry]) -> Entry | None:
    """The last entry that told a state."""
    return next((entry for entry in reversed(entries) if entry.state is not None), None)


def last_state(entries: Sequence[Entry]) -> State | None:
    """Where the run was when it last wrote."""
    last = last_change(entries)
    return None if last is None else last.state


def process_of(entries: Sequence[Entry], role: str) -> ProcessId | None:
    """The last process that the ledger names as "runner" or "holder". Raises msgspec.ValidationError."""
    for entry in reversed(entries):
        if entry.data.get(role) is not None:
            return msgspec.convert(entry.data[role], ProcessId)
    return None


def short_tag(run: str) -> str:
    """Eight characters that stand for a run where the kernel takes no more."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]
