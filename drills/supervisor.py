"""The first process of drilld's container: `python -m drills.supervisor [--config FILE]`.

What systemd does on a host, where there is none: drilld is its child; however drilld ends, `tocsin drill heal` runs
before this process does, and the kubelet starts the container anew. Signals go on to drilld; whatever process of ours
loses its parent is reaped. Where the pod sees the node's processes (hostPID) this is not process 1, and orphans come to
it all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})
STOPS_WITHIN_S = 75.0  # as systemd's TimeoutStopSec: a run that is ended drains for 30 s
HEALS_WITHIN_S = 25.0  # the pod's terminationGracePeriodSeconds is more than both
DRILLD = (sys.executable, "-m", "drills.daemon")
HEAL = (sys.executable, "-m", "agent", "drill", "heal")
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """drilld, and what comes after it."""

    def __init__(self, arguments: Sequence[str], *, drilld: Sequence[str] = DRILLD, heal: Sequence[str] = HEAL,
                 stops_within_s: float = STOPS_WITHIN_S, heals_within_s: float = HEALS_WITHIN_S) -> None:
        self._drilld, self._heal = [*drilld, *arguments], [*heal, *arguments]
        self._stops_within_s, self._heals_within_s = stops_within_s, heals_within_s
        self._stop_by: float | None = None  # monotonic

    def run(self) -> int:
        """Until drilld has ended and all is healed: its exit status, 128 + the signal that ended it; heal's, if any."""
        signals = {*FORWARDED, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # waited for, one after the other: none is lost
        _adopt_orphans()
        drilld = _start(self._drilld)
        status = self._await(drilld, signals)
        healed = self._wait_heal(_start(self._heal), signals)
        return status if healed == 0 else healed

    def _await(self, drilld: int, signals: set[signal.Signals]) -> int:
        """Pass signals on and reap until drilld has ended; one that does not stop in time is killed."""
        while True:
            ended = _reap()
            if drilld in ended:
                return ended[drilld]
            got = signal.sigtimedwait(signals, self._left_s())
            if got is None:
                if self._stop_by is not None and time.monotonic() >= self._stop_by:
                    _tell(f"drilld {drilld} did not stop within {self._stops_within_s:g} s: it is killed, then healed")
                    os.kill(drilld, signal.SIGKILL)
                    self._stop_by = None
                continue
            if got.si_signo in FORWARDED:
                os.kill(drilld, got.si_signo)
                if got.si_signo in STOPPING and self._stop_by is None:
                    self._stop_by = time.monotonic() + self._stops_within_s

    def _left_s(self) -> float:
        """How long to wait for a signal: orphans are reaped at their own SIGCHLD, which may have come before."""
        return 1.0 if self._stop_by is None else max(0.0, min(1.0, self._stop_by - time.monotonic()))

    def _wait_heal(self, heal: int, signals: set[signal.Signals]) -> int:
        """Nothing interrupts it but its time: what it was asked to stop for is stopping already."""
        until = time.monotonic() + self._heals_within_s
        while time.monotonic() < until:
            ended = _reap()
            if heal in ended:
                return ended[heal]
            signal.sigtimedwait(signals, 0.2)
        _tell(f"heal did not end within {self._heals_within_s:g} s: the next start goes on")
        os.kill(heal, signal.SIGKILL)
        return 1


def _start(command: Sequence[str]) -> int:
    """Start a child with no signal blocked; it is waited for by `_reap`, with all others."""
    signals = {*FORWARDED, signal.SIGCHLD}
    child = subprocess.Popen(command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals))
    child.returncode = 0  # not its business: else it would warn that nobody waited
    return child.pid


def _reap() -> dict[int, int]:
    """Every child that has ended: {pid: exit status, or 128 + the signal that ended it}."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    """Be the parent of every descendant that loses its own, as process 1 is anyway."""
    if os.getpid() != 1 and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _tell(f"orphans cannot be reaped: {os.strerror(ctypes.get_errno())}")


def _tell(text: str) -> None:
    sys.stderr.write(f"tocsin supervisor: {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Supervise."""
    return Supervisor(arguments).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
