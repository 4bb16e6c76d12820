"""drilld and the runner as they are, in a hurry, with drills that a configuration would refuse as too short.

`python -m tests.torture.processes drilld --config FILE`, and in the runner's place `… runner RUN_FOLDER`. The drills
are read from the file that DRILLS names; it changes between runs, since a killed engine comes back elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from drills import daemon, runner
from drills.model import Drill, State

DRILLS = "TOCSIN_TORTURE_DRILLS"
PAUSE_S = 0.03  # after each state: some follow each other within a millisecond, and no kill would ever fall between


class Run(runner.Run):
    """A run whose every pair of states can be hit."""

    def enter(self, state: State, **data: Any) -> None:
        """Write it down, and dawdle."""
        super().enter(state, **data)
        time.sleep(PAUSE_S)


def drills_of(*_: object) -> list[Drill]:
    """The drills of now, whatever the configuration says."""
    return msgspec.json.decode(Path(os.environ[DRILLS]).read_bytes(), type=list[Drill])


def popen(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """The runner that drilld starts, in a hurry like the rest."""
    assert command[1:3] == ["-m", "drills.runner"]
    return subprocess.Popen([sys.executable, "-m", "tests.torture.processes", "runner", *command[3:]], **how)


def main(arguments: list[str]) -> int:
    """Be one of them. A fault lasts 3 s at most: its own time, the time to prove it, and the holder's grace."""
    if arguments[0] == "drilld":
        waiting = SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
        vars(daemon).update(drills_of=drills_of, subprocess=waiting)
        return daemon.main(arguments[1:])
    vars(runner).update(drills_of=drills_of, Run=Run, TICK_S=0.1, PROVE_WITHIN_S=2.0, HOLDER_GRACE_S=0.5)
    return runner.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
