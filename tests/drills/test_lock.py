"""One drill at a time: the lock names who has it, dies with its holder, and remembers what was left in the world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills import lock
from drills.ledger import Ledger
from drills.model import Refused, State

HOLD = """
import sys, time
from pathlib import Path
from drills import lock
held = lock.take(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""
TORN = [State.PLANNED, State.LOCKED, State.ARMED, State.INJECTING]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the lock for the run `first`."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), "first"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def ran(root: Path, name: str, *states: State) -> Ledger:
    """A run that wrote these states."""
    ledger = Ledger.create(root / "runs" / name, {"drill": name})
    for state in states:
        ledger.write(state)
    return ledger


def test_the_refusal_names_the_run_that_holds_it(other: subprocess.Popen[str], tmp_path: Path) -> None:
    """Two people start a drill at the same time: the second one learns who was first."""
    with pytest.raises(Refused, match="run first holds the drill lock"):
        lock.take(tmp_path, "second")

    assert lock.holder_of(tmp_path) == "first"


def test_a_killed_holder_leaves_no_lock(other: subprocess.Popen[str], tmp_path: Path) -> None:
    """A runner was killed: the next drill did not wait for a person to remove a file."""
    os.kill(other.pid, signal.SIGKILL)
    other.wait()

    assert lock.holder_of(tmp_path) is None
    held = lock.take(tmp_path, "second")
    assert lock.holder_of(tmp_path) == "second"

    held.release()
    held.release()

    assert lock.holder_of(tmp_path) is None


def test_nobody_held_it_yet(tmp_path: Path) -> None:
    """The first look at a new machine is no error, and makes no file."""
    assert lock.holder_of(tmp_path / "drills") is None
    assert not (tmp_path / "drills").exists()


def test_an_orphaned_run_holds_the_next_one_up(tmp_path: Path) -> None:
    """A rule that would not go was left, the run was reported all the same, and the next drill put its own on top."""
    ledger = ran(tmp_path, "net-1", *TORN, State.REVERTING, State.ORPHANED, State.REPORTED)

    with pytest.raises(Refused, match=r"run net-1 is ORPHANED.*heal --release"):
        lock.take(tmp_path, "second")

    ledger.note(healed=True)
    lock.take(tmp_path, "second").release()


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (TORN, "run net-1 was cut off in INJECTING"),
        ([*TORN, State.REVERTING], "run net-1 was cut off in REVERTING"),
        ([*TORN, State.REVERTING, State.REVERTED, State.REPORTED], ""),
        ([*TORN, State.REVERTING, State.ORPHANED, State.REVERTED], ""),
        ([State.PLANNED, State.LOCKED, State.BASELINE], ""),
        ([State.PLANNED, State.SKIPPED], ""),
        ([State.PLANNED, State.LOCKED, State.ARMED, State.SKIPPED], ""),  # refused before its holder was started
        ([State.PLANNED, State.LOCKED, State.ARMED, State.DEFERRED], ""),
    ],
)
def test_what_a_run_left_may_be_told_by_its_ledger(states: list[State], said: str, tmp_path: Path) -> None:
    """Power failed while a fault was in: the next run waits until somebody has looked."""
    ran(tmp_path, "net-1", *states).close()

    if said:
        with pytest.raises(Refused, match=said):
            lock.take(tmp_path, "second")
        assert lock.holder_of(tmp_path) is None
    else:
        lock.take(tmp_path, "second").release()


def test_release_forgets_what_was_left_and_says_so(tmp_path: Path) -> None:
    """The owner knows better: the ledger keeps who let the next drill run."""
    ran(tmp_path, "net-1", *TORN, State.REVERTING, State.ORPHANED).close()

    assert lock.release(tmp_path) == ["net-1"]

    lock.take(tmp_path, "second").release()
    assert '"released":true' in (tmp_path / "runs" / "net-1" / "ledger.jsonl").read_text()


def test_a_live_run_is_not_released(other: subprocess.Popen[str], tmp_path: Path) -> None:
    """`--release` under a running drill would have let a second one begin."""
    with pytest.raises(Refused, match="run first is alive"):
        lock.release(tmp_path)


def test_its_own_ledger_does_not_hold_a_run_up(tmp_path: Path) -> None:
    """A runner that was started again for its run takes its own lock."""
    ran(tmp_path, "net-1", *TORN).close()

    lock.take(tmp_path, "net-1").release()


def test_a_lock_that_cannot_be_had_is_a_no(tmp_path: Path) -> None:
    """The folder is a file: nothing runs without a lock."""
    (tmp_path / "drills").write_text("")

    with pytest.raises(Refused, match="cannot be opened"):
        lock.take(tmp_path / "drills", "first")
