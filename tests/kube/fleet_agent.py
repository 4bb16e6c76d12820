"""One node of a fleet, for tests: the real timetable, lock, lease, ledger and holder, on a clock that it is told.

`python -m tests.kube.fleet_agent NODE FOLDER WORLD LOG LEASE_S DRILL…` heals what its last life left, then reads
`now SECONDS` lines: it looks at its timetable as if it were so late, and answers `looked OWED`. The fault is a file in
the folder WORLD; it is in LOG before it is in.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drills import heal, lock
from drills.cluster import ClusterError
from drills.faults.table import FAULTS
from drills.lease import Fleet, Held, Pace
from drills.model import Drill, Refused, Schedule, State, Verdict
from drills.schedule import Hands, Timetable
from tests.drills.stand_ins import HOLDER, MARKER, arm, new_run

PACE = Pace(renew_s=0.4, margin_s=1.5, rank_s=0.3, look_s=0.2)
PREFLIGHT_S = 0.3
RUN_S = 1.0
SCHEDULE = Schedule("0 10 * * TUE#1")


class Node:
    """A node's drilld and runner, in one."""

    def __init__(self, name: str, root: Path, world: Path, log: Path, lease_s: float) -> None:
        self.name, self.root, self.world, self.log = name, root, world, log
        self.now = 0.0
        self.fleet = Fleet(name, pace=replace(PACE, lease_s=lease_s))

    def heal(self) -> None:
        """As drilld does at its start: undo, then give the lease back."""
        heal.heal(self.root / "runs", finish=lambda folder, entries, left: None)
        self.tidy()

    def tidy(self) -> None:
        """As drilld does each minute."""
        try:
            self.fleet.tidy(self.is_over)
        except ClusterError as error:
            print(f"{self.name}: {error}", file=sys.stderr)

    def is_over(self) -> bool:
        """Nothing goes on here, nothing is left."""
        return lock.holder_of(self.root) is None and not lock.unsettled(self.root)

    def run_due(self, drill: Drill, run: str, due_at: float) -> tuple[Verdict, str]:
        """As drilld and its runner do, in this order."""
        try:
            told = self.fleet.held(drill.name, due_at)
        except ClusterError as error:
            return Verdict.DEFERRED, str(error)
        if told is not None:
            return told
        try:
            own = lock.take(self.root, run)
        except Refused as no:
            return Verdict.DEFERRED, str(no)
        try:
            held = self.fleet.take(run, drill.name, due_at)
        except Refused as no:
            own.release()
            return Verdict.DEFERRED, str(no)
        verdict: Verdict | None = None
        try:
            verdict = self.drill(held, drill, run, due_at)
        except Refused as no:
            return Verdict.DEFERRED, str(no)
        finally:
            held.release(drill.name, verdict)
            own.release()
        return verdict, ""

    def drill(self, held: Held, drill: Drill, run: str, due_at: float) -> Verdict:
        """The fault, in a real holder, for as long as the lease is good."""
        lost: list[str] = []
        held.keep(lambda until: None, lost.append)
        time.sleep(PREFLIGHT_S)
        held.bind(drill.name, due_at, [f"file of {self.name}"])
        self.write(f"{due_at:.0f} {self.name} {drill.name}")
        plan = MARKER.plan(Drill("kill", "marker", params={"file": str(self.world / run)}), run)
        folder, ledger = new_run(self.root / "runs", plan)
        holder = arm(folder, ledger, plan, 60.0, HOLDER)
        try:
            ledger.write(State.INJECTING)
            if held.fresh():
                holder.lease(held.good_until)
                holder.inject(10.0)
                end = time.monotonic() + RUN_S
                while time.monotonic() < end and held.fresh():
                    holder.lease(held.good_until)
                    time.sleep(0.05)
        finally:
            left = holder.revert(10.0)
            ledger.write(State.ORPHANED if left else State.REVERTED)
            ledger.write(State.REPORTED)
            ledger.close()
        return Verdict.ABORTED if lost else Verdict.PASS

    def write(self, line: str) -> None:
        """One line, at once, beside those of the others."""
        with self.log.open("ab", buffering=0) as log:
            log.write(f"{line}\n".encode())


def main(arguments: Sequence[str]) -> int:
    """Be a node until standard input ends."""
    FAULTS["marker"] = MARKER
    name, root, world, log = arguments[0], *(Path(one) for one in arguments[1:4])
    drills = [Drill(one, "marker", schedule=SCHEDULE) for one in arguments[5:]]
    node = Node(name, root, world, log, float(arguments[4]))
    root.mkdir(parents=True, exist_ok=True)
    node.heal()
    hands = Hands(node.run_due, lambda *_: None, lambda *_: None, lambda _: None, lambda: None)
    table: Timetable | None = None
    print("up", flush=True)
    for line in sys.stdin:
        node.now = float(line.split()[1])
        if table is None:
            table = Timetable(drills, hands, root=root, node=name, min_gap_s=0.0, clock=lambda: node.now)
        node.tidy()
        table.look()
        owed = sum(seen.owed is not None for seen in table.book.values())
        print(f"looked {owed}", flush=True)
    os._exit(0)  # APScheduler's threads


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
