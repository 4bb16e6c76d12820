"""process-kill: SIGKILL of one part of an engine, as the OOM killer or a crash does it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from drills import proc
from drills.model import Command, Drill, Fault, Left, Plan, ProcessId, Refused, announces
from drills.targets import describe, part_of, processes_of

# To see who listens, and to signal a process of another user.
NEEDS = ("CAP_KILL", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")


class Killed:
    """What was killed, by descriptors that go on meaning it when the number is another's."""

    def __init__(self, pidfds: Mapping[int, int], others: Sequence[ProcessId]) -> None:
        self._pidfds = dict(pidfds)
        self._others = others

    def sample(self) -> Mapping[str, Any]:
        """`ended` of each killed process, and the pids of its engine that outlive it."""
        ended = {str(pid): proc.has_ended(fd) for pid, fd in self._pidfds.items()}
        return {"ended": ended, "outlive": [one.pid for one in self._others if proc.is_same(one)]}

    def undo(self) -> None:
        """Nothing brings a process back but its supervisor."""
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()


class ProcessKill:
    """The fault."""

    name = "process-kill"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find the processes. Raises Refused."""
        part = str(drill.target.get("part", "main"))
        parts = processes_of(drill.target)
        victims = part_of(parts, part)
        others = [one for one in parts["all"] if one not in victims]
        return Plan(
            fault=self.name,
            run=run,
            targets=[describe(one) for one in victims],
            commands=[Command(f"kill -KILL {one.pid}", f"part {part}") for one in victims],
            undo=[],
            facts={
                "part": part,
                "victims": msgspec.to_builtins(victims),
                "others": msgspec.to_builtins(others),
            },
            notes=["the supervisor of the engine must bring it back; what of it outlives the kill is a finding"],
            needs=NEEDS,
            expects=announces(self.name, None),
            blast={"replicas": 1},
            restarts=True,
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Killed:  # noqa: ARG002  (no subprocess)
        """Kill them all, or none: every descriptor is had and may be signalled before the first is. Raises Refused."""
        victims = msgspec.convert(plan.facts["victims"], list[ProcessId])
        pidfds: dict[int, int] = {}
        try:
            for one in victims:
                pidfds[one.pid] = proc.open_pidfd(one)
            for sig in (0, signal.SIGKILL):  # 0 only asks
                for fd in pidfds.values():
                    signal.pidfd_send_signal(fd, sig)
        except OSError as error:
            for fd in pidfds.values():
                os.close(fd)
            what = "it needs root or CAP_KILL" if isinstance(error, PermissionError) else "plan again"
            raise Refused(f"process-kill: {error}; {what}") from error
        for fd in pidfds.values():
            proc.has_ended(fd, 1.0)
        return Killed(pidfds, msgspec.convert(plan.facts["others"], list[ProcessId]))

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """All of them have ended, as their own descriptors say."""
        victims = [str(one["pid"]) for one in plan.facts["victims"]]
        ended = [pid for pid in victims if any(sample.get("ended", {}).get(pid) for sample in samples)]
        outlive = samples[-1].get("outlive", []) if samples else []
        told = f"{len(ended)} of {len(victims)} killed processes have ended (pidfd)"
        if outlive:
            told += f"; of the same engine still alive: {', '.join(map(str, outlive))}"
        return len(ended) == len(victims), told

    def left(self, plan: Plan) -> list[Left]:  # noqa: ARG002
        """A killed process leaves nothing of ours."""
        return []

    def undo(self, plan: Plan) -> None:
        """Nothing to undo."""


FAULT: Fault = ProcessKill()
