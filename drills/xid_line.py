"""One line of an Xid in the kernel's log, announced to the agent, and at the end the one that takes it back.

The synthetic gpu-reset: it proves the way from the log to the alert, and the alert's end, with no risk to the hardware.
The Xid asks for no reset, so that nobody's policy acts on it; other watchers of the log are refused all the same. An
Xid line that anybody else writes is a forgery to the agent: these carry a one-time mark, and it is told each exactly.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent import client
from drills import proc
from drills.gpu import Gpu
from drills.model import Command, Drill, Plan, Refused, announces

KMSG = Path("/dev/kmsg")
XID, ENDED_BY = 163, 162  # power smoothing is off, and on again: neither asks for anything, and one ends the other
ANNOUNCED_FOR_S = 10.0
NEEDS = ("root",)  # the agent believes root alone
# Who else acts on an Xid line, and would drain the node for ours.
WATCHERS: Mapping[str, str] = {
    "dcgm-health-monitor": "NVSentinel", "fault-quarantine": "NVSentinel", "gpu-health-monitor": "NVSentinel",
    "gpud": "gpud", "healthagent": "healthagent", "node-problem-detector": "node-problem-detector",
    "nvsentinel": "NVSentinel", "sichek": "sichek", "syslog-health-monitor": "NVSentinel",
}  # fmt: skip


def plan(drill: Drill, run: str, one: Gpu) -> Plan:
    """The line, before it is written. Raises Refused."""
    if not one.bdf:
        raise Refused(f"{one.uuid}: NVML does not tell its PCI address, which is what the kernel's line names")
    _refuse_watchers(frozenset(drill.target.get("other_watchers_ok") or ()))
    if not os.access(KMSG, os.W_OK):
        raise Refused(f"{KMSG} cannot be written: this needs root, and in a container the device; `tocsin drill unit`")
    mark = secrets.token_hex(8)
    said = f"drill {run} mark {mark}"
    line, end = (f"NVRM: Xid (PCI:{_kernel_bdf(one.bdf)}): {number}, pid={os.getpid()}, name=tocsin, {said}"
                 for number in (XID, ENDED_BY))
    facts = {"mode": "synthetic", "uuid": one.uuid, "line": line, "end": end, "mark": mark, "kmsg": str(KMSG),
             "socket": str(drill.target.get("socket", ""))}
    return Plan(
        fault=drill.fault,
        run=run,
        targets=[f"the kernel log: a line about {one.uuid} ({one.bdf})"],
        commands=[Command(f"echo '{line}' > {KMSG}", f"announced to the agent for {ANNOUNCED_FOR_S:g} s, once")],
        undo=[Command(f"echo '{end}' > {KMSG}", "announced, too; without it the alert ends by itself after an hour")],
        facts=facts,
        notes=[
            "nothing is done to the GPU: this proves the way from the kernel's log to the alert, not a restart",
            "a line cannot be taken out of the kernel's log; it carries the drill's name",
        ],
        needs=NEEDS,
        expects=announces("gpu-reset", "synthetic"),
        blast={"replicas": 0},
    )


def _kernel_bdf(bdf: str) -> str:
    """As the driver writes it: 0000:1a:00, of 00000000:1A:00.0."""
    domain, _, rest = bdf.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _refuse_watchers(allowed: frozenset[str]) -> None:
    """Raise Refused beside what else would act on the line."""
    found: dict[str, int] = {}
    for pid, seen in proc.processes().items():
        words = proc.command_line(pid)
        names = {seen.comm, *(Path(word).name for word in words[:2])}
        found |= {name: pid for name in names & WATCHERS.keys() if not {name, WATCHERS[name]} & allowed}
    if found:
        named = ", ".join(f"{name} (pid {pid})" for name, pid in sorted(found.items()))
        raise Refused(f"{named} would act on the line: stop it, or list it in drill_guards.other_watchers_ok")


def proven(plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """The kernel's log has the line."""
    found = any(sample.get("logged") for sample in samples)
    return found, f"the line is {'in' if found else 'not in'} the kernel's log: {plan.facts['line']}"


class Written:
    """A line that was written. Nothing holds it; another line ends what it said."""

    def __init__(self, plan: Plan, log: int) -> None:
        self._plan, self._log = plan, log
        self._logged = False

    def sample(self) -> Mapping[str, Any]:
        """Whether the kernel's log has it."""
        while not self._logged and self._log >= 0:
            try:
                record = os.read(self._log, 8192)
            except BlockingIOError:
                break
            except OSError:  # EPIPE: what was next has been overwritten; the next read goes on
                continue
            if not record:
                break
            self._logged = str(self._plan.facts["mark"]).encode() in record
        return {"logged": self._logged}

    def undo(self) -> None:
        """Write the line that ends it; may be called twice. Where the agent is gone, its alert ends by its own time."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
            with contextlib.suppress(Refused):
                _announced_and_written(self._plan, "end")


def write(plan: Plan) -> Written:
    """Announce the line, then write it. Raises Refused, OSError."""
    log = os.open(plan.facts["kmsg"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(log, 0, os.SEEK_END)
        _announced_and_written(plan, "line")
    except BaseException:
        os.close(log)
        raise
    return Written(plan, log)


def _announced_and_written(plan: Plan, which: str) -> None:
    line = str(plan.facts[which])
    _announce(Path(plan.facts["socket"]), line)
    kmsg = os.open(plan.facts["kmsg"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(kmsg, f"<4>{line}\n".encode())  # one write is one record
    finally:
        os.close(kmsg)


def _announce(path: Path, line: str) -> None:
    """Tell the agent, which believes root alone. Raises Refused."""
    try:
        told = client.expect_kernel_line(path, line, ANNOUNCED_FOR_S)
    except (client.NotRunning, client.AgentError) as error:
        raise Refused(f"the agent cannot be told of the line, and would call it a forgery: {error}") from None
    if not told["expected"]:
        raise Refused("the agent does not read the kernel's log, and would not see the line: kernel_log, tocsin doctor")
