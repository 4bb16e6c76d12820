"""The process that owns a fault: the fault ends when it does, whoever or whatever ends it.

`python -m drills.holder RUN_FOLDER DEADLINE_S` reads commands (`inject`, `revert`, `lease UNTIL`) from the runner's
pipe on its stdin and tells events as JSON lines on its stdout. It reverts at `revert`, at end-of-file (the runner is
gone), when the fleet's lease is good no more, and shortly before the deadline; at the deadline the kernel ends it.
`start` is the runner's side.

Whatever injects on its behalf inherits `injector_fds`: a copy of stdout, so that the runner's end-of-file comes only
after the last injector is gone, and the lock on the ledger, which tells the same to heal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drills.faults.table import FAULTS
from drills.ledger import LEDGER, plan_of, read
from drills.model import Held, Left, Plan, ProcessId
from drills.proc import end, identify, wait_ended
from drills.undo import look, undo_plan

COMMAND = (sys.executable, "-m", "drills.holder")
SAMPLE_EVERY_S = 1.0
# Of an injection whose runner is gone: then the process ends, and with it what it owns.
INJECTION_ENDS_WITHIN_S = 0.5


class HolderError(Exception):
    """The fault could not be put in, or the holder is gone; the text says why."""


# The holder itself


class _Child:
    """What the holder knows. All in one thread: a traced process answers only the thread that stopped it."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self.folder = folder
        # In good order before the kernel does it: what outlives this process needs its undo to run.
        self.reverts_at = time.monotonic() + deadline_s - min(1.0, deadline_s / 4)
        self.lock_fd = os.open(folder / LEDGER, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self.lock_fd, fcntl.LOCK_SH)
        self.injector_fds = (os.dup(sys.stdout.fileno()), self.lock_fd)
        self.plan: Plan | None = None
        self.held: Held | None = None
        self.injecting = threading.Event()
        self.lease_until: float | None = None  # on CLOCK_BOOTTIME, which counts a suspended host; None: there is none

    @property
    def lease_left_s(self) -> float:
        """How long the fleet's lease is good; a runner that is stopped, or lost it, says nothing any more."""
        if self.lease_until is None:
            return float("inf")
        return self.lease_until - time.clock_gettime(time.CLOCK_BOOTTIME)

    def inject(self) -> None:
        """Put the fault in that the ledger names: what is not on disk is not done."""
        if self.lease_left_s <= 0:
            emit("failed", why="the fleet's drill lease is not good any more: nothing was touched")
            return
        self.plan = plan_of(read(self.folder))
        if self.plan is None:
            emit("failed", why=f"{self.folder / LEDGER} holds no plan: nothing was touched")
            return
        fault = FAULTS.get(self.plan.fault)
        if fault is None:
            emit("failed", why=f"unknown fault {self.plan.fault!r}")
            return
        self.injecting.set()
        try:
            self.held = fault.inject(self.plan, self.injector_fds)
        except Exception as error:  # of whatever fault: the runner must hear why, and then it is undone
            left = undo_plan(self.plan)
            emit("failed", why=f"{error}" or type(error).__name__, left=[[one.what, one.command] for one in left])
        else:
            emit("injected")
        finally:
            self.injecting.clear()

    def sample(self) -> None:
        """Tell the evidence of now."""
        if self.held is not None:
            try:
                seen: Mapping[str, Any] = self.held.sample()
            except Exception as error:  # evidence that cannot be had is a finding, not the end of the fault's owner
                seen = {"error": str(error) or type(error).__name__}
            emit("sample", **seen)

    def revert(self) -> None:
        """End the fault and tell what is left of it."""
        why: str | None = None
        if self.held is not None:
            try:
                self.held.undo()
            except Exception as error:  # what it left is looked for, and ends with this process at the latest
                why = str(error) or type(error).__name__
        self.held = None
        left = [] if self.plan is None else undo_plan(self.plan)
        emit("undone", left=[[one.what, one.command] for one in left], why=why)


def emit(event: str, **data: Any) -> None:
    """Tell the runner; one that is gone or does not read must not hold the holder up."""
    line = json.dumps({"event": event, "at": time.time(), **data}, default=str) + "\n"
    with contextlib.suppress(OSError):
        # A pipe that is writable takes PIPE_BUF bytes at once; a runner that stopped reading gets no more samples.
        if event == "sample" and not select.select([], [sys.stdout], [], 0)[1]:
            return
        os.write(sys.stdout.fileno(), line.encode())


def _prepare(deadline_s: float) -> None:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGCHLD})
    signal.setitimer(signal.ITIMER_REAL, deadline_s)


def _end_stuck_injection(child: _Child) -> None:
    """Watch for a runner that dies while the main thread injects and cannot read its pipe."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # only the hang-up, which is always told
    poller.poll()
    if child.injecting.is_set():
        time.sleep(INJECTION_ENDS_WITHIN_S)
        if child.injecting.is_set():
            os._exit(3)


def _serve(child: _Child) -> None:
    """Obey the runner until it says `revert`, is gone, or time is up."""
    stdin = sys.stdin.fileno()
    poller = select.poll()
    poller.register(stdin, select.POLLIN)
    pending = b""
    sample_at = float("inf")
    while (now := time.monotonic()) < child.reverts_at and child.lease_left_s > 0:
        if now >= sample_at:
            child.sample()
            sample_at = max(sample_at + SAMPLE_EVERY_S, now)
        wait_s = min(min(sample_at, child.reverts_at) - time.monotonic(), child.lease_left_s)
        if not poller.poll(max(0.0, wait_s) * 1000.0 + 1.0):
            continue
        told = os.read(stdin, 4096)
        if not told:
            return
        *commands, pending = (pending + told).split(b"\n")
        for command in commands:
            if command == b"revert":
                return
            if command.startswith(b"lease "):
                child.lease_until = float(command.split()[1])
            if command == b"inject" and child.plan is None:
                child.inject()
                sample_at = time.monotonic()


def main(arguments: Sequence[str]) -> int:
    """Hold the fault of one run."""
    folder, deadline_s = Path(arguments[0]), float(arguments[1])
    _prepare(deadline_s)
    child = _Child(folder, deadline_s)
    me = identify(os.getpid())
    emit("up", pid=me.pid, start_ticks=me.start_ticks)
    threading.Thread(target=_end_stuck_injection, args=(child,), daemon=True).start()
    _serve(child)
    child.revert()
    return 0


# The runner's side


class Holder:
    """A running holder. Its events are read by a thread of its own, so that it never waits for the runner."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.folder = folder
        self._process = process
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="holder-events", daemon=True)
        self._reader.start()
        self.process_id: ProcessId = identify(process.pid)

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        with stdout:
            for line in stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # cut by the death of the holder
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def events(self) -> list[dict[str, Any]]:
        """All that it told so far: up, injected or failed, sample, undone."""
        with self._changed:
            return list(self._events)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The evidence so far; `at` is unix seconds."""
        return [event for event in self.events() if event["event"] == "sample"]

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _wait_for(self, *wanted: str, timeout_s: float) -> dict[str, Any] | None:
        def told() -> dict[str, Any] | None:
            return next((event for event in self._events if event["event"] in wanted), None)

        with self._changed:
            self._changed.wait_for(lambda: told() is not None or self._ended, timeout_s)
            return told()

    def _tell(self, command: str) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):  # it is gone: what it leaves is looked at
                stdin.write(f"{command}\n".encode())
                stdin.flush()

    def wait_up(self, timeout_s: float) -> None:
        """Wait until it is ready to inject. Raises HolderError."""
        if self._wait_for("up", timeout_s=timeout_s) is None:
            raise HolderError(f"the holder did not come up within {timeout_s:g} s: nothing was touched")

    def inject(self, timeout_s: float) -> float:
        """Put in the fault whose plan is in the ledger; the time at which it was in. Raises HolderError."""
        self._tell("inject")
        event = self._wait_for("injected", "failed", timeout_s=timeout_s)
        if event is None:
            how = "gave no answer"
            if self._ended:  # its files are closed a moment before it has ended
                wait_ended(self.process_id, 1.0)
                how = f"ended ({self._process.poll()})"
            raise HolderError(f"the holder {how} within {timeout_s:g} s of `inject`; revert")
        if event["event"] == "failed":
            raise HolderError(str(event["why"]))
        return float(event["at"])

    def lease(self, until: float) -> None:
        """Have it end the fault by itself then (CLOCK_BOOTTIME seconds), unless it is told of a later time before."""
        with contextlib.suppress(ValueError):  # its pipe was closed this moment: it is over
            self._tell(f"lease {until!r}")

    def revert(self, timeout_s: float) -> list[Left]:
        """End the fault and the holder, in good order or not, and look at what is left. Never raises."""
        self._tell("revert")
        self._wait_for("undone", timeout_s=timeout_s)
        self._hang_up()
        if not wait_ended(self.process_id, min(timeout_s, 1.0)):
            end(self.process_id, timeout_s)
        gone = self.wait_gone(timeout_s)
        try:
            plan = plan_of(read(self.folder))
        except Exception as error:  # the ledger is on a disk, and disks fail
            return [Left(f"{self.folder / LEDGER}: {error}", "tocsin drill heal")]
        if plan is None:
            return []
        undone = self._wait_for("undone", timeout_s=0.0) is not None
        left = look(plan) if undone else undo_plan(plan)
        if not gone:
            left.append(Left("a process that injects still runs", f"fuser -k {self.folder / LEDGER}"))
        return left

    def revert_now(self) -> None:
        """Have it end the fault, and wait for nothing: for a signal handler, which may interrupt a write of ours."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), b"\nrevert\n")

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the holder and all that inject for it are gone. False: one of them still runs."""
        self._hang_up()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout_s):
                return False
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def start(folder: Path, deadline_s: float, command: Sequence[str] = COMMAND) -> Holder:
    """Start the holder of a run; it touches nothing before `inject`. Raises OSError, HolderError."""
    process = subprocess.Popen(
        [*command, str(folder), repr(deadline_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return Holder(process, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
