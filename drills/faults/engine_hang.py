"""engine-hang: every thread of a part stopped by ptrace, as a deadlock or a stuck driver call does it.

Not SIGSTOP: a stopped process stays stopped when whoever stopped it dies, a traced one runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from drills import proc
from drills.model import Command, Drill, Fault, Left, Plan, ProcessId, Refused, announces
from drills.targets import describe, part_of, processes_of

NEEDS = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_PTRACE_O_TRACECLONE = 8
_WALL = 0x40000000  # threads and children alike
_STOPPED = "t"
STOPPED_WITHIN_S = 2.0
RUNS_ON_WITHIN_S = 0.2  # what is not let go by then (it waits for a disk) is let go by the end of the holder
_ENDS_WITHIN_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, data: int = 0) -> None:
    """One ptrace request. Raises OSError."""
    if _libc.ptrace(request, tid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Stopped:
    """Processes that this one stopped. They run on when it ends."""

    def __init__(self, processes: Sequence[ProcessId]) -> None:
        self._processes = processes
        self._tids: set[int] = set()
        self._signals: dict[int, int] = {}  # that a thread was about to get when it stopped
        self._handler = signal.getsignal(signal.SIGCHLD)

    def _reap(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Take the news of our threads: a death that we do not take is never told to the real parent."""
        for tid in list(self._tids):
            try:
                _, status = os.waitpid(tid, os.WNOHANG | _WALL)
            except ChildProcessError:
                self._tids.discard(tid)
                continue
            if os.WIFSTOPPED(status) and status >> 16 == 0:
                self._signals[tid] = os.WSTOPSIG(status)

    def stop(self) -> None:
        """Stop every thread, those too that begin meanwhile, and wait for it. Raises OSError."""
        until = time.monotonic() + STOPPED_WITHIN_S
        while True:
            new = [(one, tid) for one in self._processes for tid in self._states(one) if tid not in self._tids]
            for one, tid in new:
                self._seize(one, tid)
            running = [tid for one in self._processes for tid, state in self._states(one).items() if state != _STOPPED]
            # A thread that sleeps in the kernel stops when it wakes; the samples show it.
            if (not new and not running) or time.monotonic() > until:
                break
            if not new:
                time.sleep(0.001)
        # Not before: each of a thousand threads tells that it stopped, and each time all would be asked.
        signal.signal(signal.SIGCHLD, self._reap)
        self._reap()

    def _seize(self, one: ProcessId, tid: int) -> None:
        try:
            _ptrace(_PTRACE_SEIZE, tid, _PTRACE_O_TRACECLONE)
        except OSError as error:
            if error.errno == errno.ESRCH or tid not in proc.threads(one.pid):
                return
            if proc.tracer_of(one.pid, tid) != os.getpid():
                raise
            # A thread that a seized one began: it was seized and stopped with its first step.
            self._tids.add(tid)
        else:
            self._tids.add(tid)
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_PTRACE_INTERRUPT, tid)

    def _states(self, one: ProcessId) -> dict[int, str]:
        return proc.threads(one.pid) if proc.is_same(one) else {}

    def sample(self) -> Mapping[str, Any]:
        """The state letter of every thread, a string a process; "" where it has ended."""
        self._reap()
        return {"threads": {str(one.pid): "".join(sorted(self._states(one).values())) for one in self._processes}}

    def undo(self) -> None:
        """Let them run on."""
        until = time.monotonic() + RUNS_ON_WITHIN_S
        while self._tids and time.monotonic() < until:
            self._reap()
            for tid in list(self._tids):
                # Only a stopped thread can be let go; one on its way to stop is asked again. With it goes the signal
                # that it was about to get, which would be lost.
                with contextlib.suppress(OSError):
                    _ptrace(_PTRACE_DETACH, tid, self._signals.get(tid, 0))
                    self._tids.discard(tid)
            if self._tids:
                time.sleep(0.001)
        signal.signal(signal.SIGCHLD, self._handler)


class EngineHang:
    """The fault."""

    name = "engine-hang"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find the processes and see that they can be stopped. Raises Refused."""
        part = str(drill.target.get("part", "core"))
        parts = processes_of(drill.target)
        victims = part_of(parts, part)
        if part == "core":
            victims += [one for one in parts["workers"] if one not in victims]
        _refuse_traced(victims)
        seen = {one.pid: len(proc.threads(one.pid)) for one in victims}
        return Plan(
            fault=self.name,
            run=run,
            targets=[f"{describe(one)}, {seen[one.pid]} threads" for one in victims],
            commands=[
                Command(f"ptrace SEIZE and INTERRUPT of each of /proc/{one.pid}/task/*", f"part {part}")
                for one in victims
            ],
            undo=[Command(f"pkill -KILL -f 'drills.holder .*{run}'", "a traced process runs on when its tracer ends")],
            facts={"part": part, "victims": msgspec.to_builtins(victims)},
            notes=[
                "the port accepts while nobody answers; a liveness probe may restart the engine meanwhile",
                "a system call that was waiting may return EINTR once, as after any signal",
            ],
            needs=NEEDS,
            expects=announces(self.name, None),  # a port that accepts and does not answer is slow or stuck, never down
            blast={"replicas": 1},
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Stopped:  # noqa: ARG002  (no subprocess)
        """Stop them all. Raises Refused, OSError."""
        victims = msgspec.convert(plan.facts["victims"], list[ProcessId])
        gone = [one.pid for one in victims if not proc.is_same(one)]
        if gone:
            raise Refused(f"engine-hang: {', '.join(map(str, gone))} ended since the plan; plan again")
        held = Stopped(victims)
        try:
            held.stop()
        except OSError as error:
            held.undo()
            raise Refused(
                f"engine-hang: ptrace: {error.strerror}; it needs root or CAP_SYS_PTRACE, and no debugger attached"
            ) from error
        return held

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Every thread of every process was stopped in every sample."""
        victims = [str(one["pid"]) for one in plan.facts["victims"]]
        if not samples:
            return False, "no sample was taken"
        threads = running = stopped = 0
        tail = ""
        for sample in samples:
            states = sample.get("threads", {})
            ended = [pid for pid in victims if not states.get(pid)]
            if ended:  # what it was until then is proven all the same
                tail = f"process {', '.join(ended)} ended while it was stopped: did a liveness probe kill it?"
                break
            stopped += 1
            threads = sum(len(states[pid]) for pid in victims)
            running = max(running, sum(state != _STOPPED for pid in victims for state in states[pid]))
        if running:
            return False, f"{running} of {threads} threads were not stopped in one of {stopped} samples"
        if not stopped:
            return False, tail
        said = f"{threads} of {threads} threads in state t (ptrace stop) in each of {stopped} samples"
        return True, f"{said}; {tail}" if tail else said

    def left(self, plan: Plan) -> list[Left]:
        """Threads that a holder of this run still stops."""
        tracers: dict[int, int] = {}
        for one in msgspec.convert(plan.facts["victims"], list[ProcessId]):
            if proc.is_same(one):
                tracers |= dict.fromkeys(_tracers(one, plan.run), one.pid)
        return [
            Left(f"process {pid} is stopped by holder {tracer}", f"kill -KILL {tracer}")
            for tracer, pid in tracers.items()
        ]

    def undo(self, plan: Plan) -> None:
        """End the holder that stops them, unless this is it."""
        for one in msgspec.convert(plan.facts["victims"], list[ProcessId]):
            if not proc.is_same(one):
                continue
            for tracer in _tracers(one, plan.run):
                if tracer != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        proc.end(proc.identify(tracer), _ENDS_WITHIN_S)


def _tracers(one: ProcessId, run: str) -> set[int]:
    """Who traces its threads on behalf of this run."""
    found = {proc.tracer_of(one.pid, tid) for tid in proc.threads(one.pid)} - {0}
    return {pid for pid in found if any(Path(word).name == run for word in proc.command_line(pid))}


def _refuse_traced(victims: Iterable[ProcessId]) -> None:
    for one in victims:
        tracer = proc.tracer_of(one.pid)
        if tracer:
            who = " ".join(proc.command_line(tracer)) or "?"
            raise Refused(f"process {one.pid} is traced by {tracer} ({who}); a process has one tracer: end that first")
    with contextlib.suppress(FileNotFoundError):
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "3":
            raise Refused("kernel.yama.ptrace_scope is 3: nothing may be traced until the next boot")


FAULT: Fault = EngineHang()
