"""The command line and the holder with a fault table of the tests' own: `python -m tests.drills.other_faults WHICH …`.

`idle`: a process-kill that kills nobody and says that it did. `wide`: one that would take both replicas away. `leaky`:
a packet-loss whose rehearsal goes wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drills import guards, holder
from drills.faults.process_kill import ProcessKill
from drills.faults.table import FAULTS
from drills.model import Drill, Plan, Refused


class Idle(ProcessKill):
    """Injects nothing."""

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Any:
        """Say that it is in."""
        return Nothing()


class Nothing:
    """What is not there."""

    def sample(self) -> Mapping[str, Any]:
        """No process has ended."""
        return {"ended": {}, "outlive": []}

    def undo(self) -> None:
        """Nothing was done."""


class Wide(ProcessKill):
    """Hits more than it may."""

    def plan(self, drill: Drill, run: str) -> Plan:
        """All replicas."""
        return replace(super().plan(drill, run), blast={"replicas": 2, "of": 2})


def leak(plan: Plan) -> None:
    """In the scratch namespace."""
    raise Refused("the rehearsal lost packets of another port")


def main(which: str, words: Sequence[str]) -> None:
    """Be a holder, or the command line."""
    if which == "leaky":
        guards.REHEARSALS = {"packet-loss": leak}
    else:
        own = {"idle": Idle, "wide": Wide}[which]()
        FAULTS[own.name] = own
    if words[0] == "hold":
        sys.exit(holder.main(words[1:]))
    command = (sys.executable, "-m", "tests.drills.other_faults", which, "hold")
    holder.start = functools.partial(holder.start, command=command)
    sys.argv = ["tocsin", *words]
    from agent.__main__ import main as tocsin  # a holder has no command line

    tocsin()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
