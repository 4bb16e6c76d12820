"""One drill at a time on a node: a lock on `<state_dir>/drills/lock`, held as long as its runner lives.

A run that left its fault in the world, or was cut off before it could say that it did not, holds the next one up too:
until it is healed, or somebody says `tocsin drill heal --release`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drills import ledger, owner
from drills.ledger import Entry, Ledger
from drills.model import REFUSED, Refused, State

LOCK = "lock"
RUNS = "runs"
MAX_NAME_BYTES = 256
# States after which a fault may be in the world, until one of the others says what became of it.
_IN = frozenset({State.ARMED, State.INJECTING, State.PROVEN, State.INVALID, State.OBSERVING, State.REVERTING})


@dataclass(slots=True)
class Lock:
    """The lock, held. It ends with the process that holds it, whatever ends that."""

    run: str
    _fd: int

    def release(self) -> None:
        """Give it back; may be called twice."""
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, 0)  # a full disk does not hinder this
            finally:
                os.close(self._fd)
                self._fd = -1


def take(root: Path, run: str) -> Lock:
    """Take the lock for `run` under `<state_dir>/drills`. Raises Refused, which names who has it, or why it cannot be.

    The file stays when the lock is given back: to remove it would let two runs hold two files of one name.
    """
    try:
        owner.make_folder(root)
        fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refused(f"the drill lock {root / LOCK} cannot be opened: {error.strerror}; no drill without it") from None
    owner.give(root / LOCK)
    lock = Lock(run, fd)
    try:
        _take(fd, root, run)
    except BaseException:
        os.close(fd)
        raise
    return lock


def _take(fd: int, root: Path, run: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        name = _name_in(fd)
        raise Refused(f"run {name} holds the drill lock; one drill at a time: wait, or `tocsin drill abort`") from None
    except OSError as error:
        raise Refused(f"the drill lock {root / LOCK} cannot be taken: {error.strerror}; use a local disk") from None
    left = unsettled(root, run)
    if left:
        name, why = left[0]
        raise Refused(f"run {name} {why}; `tocsin drill heal` undoes it, or `tocsin drill heal --release` forgets it")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{run}\n".encode(), 0)
        os.fsync(fd)
    except OSError as error:
        raise Refused(f"the drill lock {root / LOCK} cannot be written: {error.strerror}") from None


def _name_in(fd: int) -> str:
    return os.pread(fd, MAX_NAME_BYTES, 0).decode(errors="replace").strip() or "(just beginning)"


def holder_of(root: Path) -> str | None:
    """The run that holds the lock; None where nobody does. Raises OSError."""
    try:
        fd = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name_in(fd)
    else:
        return None
    finally:
        os.close(fd)


def unsettled(root: Path, but: str = "") -> list[tuple[str, str]]:
    """The runs (but one) whose fault may still be in the world, oldest first, and why that may be. Raises Refused."""
    try:
        folders = ledger.run_folders(root / RUNS)
    except OSError as error:
        raise Refused(f"the ledgers in {root / RUNS} cannot be read: {error.strerror}; no drill without") from None
    found = [(folder.name, "" if folder.name == but else _trouble_of(folder)) for folder in folders]
    return [(name, why) for name, why in found if why]


def _trouble_of(folder: Path) -> str:
    try:
        return trouble(ledger.read(folder))
    except OSError as error:  # what nobody can read may be in the world
        return f"cannot be read ({error.strerror}), and nobody knows what of it is left"


def trouble(entries: Sequence[Entry]) -> str:
    """Why a run's fault may still be in the world, as its ledger says; "" where it is not."""
    why = ""
    for entry in entries:
        over = entry.state is State.REVERTED or entry.state in REFUSED
        if over or entry.data.get("healed") or entry.data.get("released"):
            why = ""
        elif entry.state is State.ORPHANED:
            why = "is ORPHANED: something of it is still in the world"
        elif entry.state in _IN:
            why = f"was cut off in {entry.state}, and nobody has looked what of it is left"
    return why


def release(root: Path) -> list[str]:
    """Let drills run again although these runs left something behind; their names. Raises Refused, OSError.

    Said in their ledgers, so that it is known who did what; `heal` goes on trying.
    """
    holder = holder_of(root)
    if holder is not None:
        raise Refused(f"run {holder} is alive and holds the drill lock; `tocsin drill abort` ends it first")
    names = [name for name, _ in unsettled(root)]
    for name in names:
        opened = Ledger.open(root / RUNS / name)
        try:
            opened.note(released=True)
        finally:
            opened.close()
    return names
