"""gpu-reset: a GPU is reset under a running engine; or, by default, only the kernel's line of such a fault is written.

`params.mode: reset` is the real one, only where the node opts in. Our agent lets NVML go, the engine is killed with its
restart gated (systemd: drills.gate; Kubernetes: the node is cordoned and the pod evicted), `nvidia-smi` resets the GPU
by its UUID in a child with a deadline, all is taken off again, and the supervisor must bring the engine back.

`params.mode: synthetic`, the default, is drills.xid_line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agent import client
from drills import gate, gpu, proc, xid_line
from drills.gate import Gate
from drills.gpu import Gpu, Holder
from drills.model import Command, Drill, Fault, Left, Plan, ProcessId, Refused, announces
from drills.targets import RESERVED_NAMES, describe, part_of, processes_of

if TYPE_CHECKING:
    from drills.cluster import Cluster

OPT_IN = Path("/etc/tocsin/GPU-RESET-ALLOWED")  # systemd: a file of root's
OPT_IN_LABEL = "tocsin.dev/gpu-reset"  # Kubernetes: "allowed" on the node
RELEASED_WITHIN_S = 5.0
SET_WITHIN_S = 10.0
FREE_WITHIN_S = 10.0  # a killed process gives its memory back
EVICTED_WITHIN_S = 120.0
RESET_WITHIN_S = 60.0
BACK_WITHIN_S = 30.0
GATED_AT_MOST_S = RELEASED_WITHIN_S + FREE_WITHIN_S + RESET_WITHIN_S + BACK_WITHIN_S + 30.0
NEEDS = ("root",)  # nvidia-smi, systemctl, the holders of a device


class GpuReset:
    """The fault."""

    name = "gpu-reset"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find GPU, engine and holders. Raises Refused."""
        if drill.params.get("mode", "synthetic") == "synthetic":
            return xid_line.plan(drill, run, chosen(drill, gpu.look()))
        return _plan_reset(drill, run)

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Resetting | xid_line.Written:
        """Begin the reset, which goes on in a thread; or write the line. Raises Refused, OSError."""
        if plan.facts["mode"] == "synthetic":
            return xid_line.write(plan)
        return Resetting(plan, injector_fds)

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """The driver said that it was reset, and NVML has the same UUID back; or the line is in the kernel's log."""
        if not samples:
            return False, "no sample was taken"
        if plan.facts["mode"] == "synthetic":
            return xid_line.proven(plan, samples)
        return _proven(plan, samples[-1])

    def left(self, plan: Plan) -> list[Left]:
        """What outlives the process and is still there: gate, cordon, persistence mode, a reset that hangs."""
        if plan.facts["mode"] == "synthetic":
            return []  # a line in the kernel's log cannot be taken back, and acts on nothing
        found = _hung(plan)
        if plan.facts.get("unit"):
            found += gate.left(_gate(plan))
        if _persistence_lost(plan):
            told = f"persistence mode of {plan.facts['uuid']} is off, it was on"
            found.append(Left(told, _persistence(plan, 1).text))
        return found + _cordon_left(plan)

    def undo(self, plan: Plan) -> None:
        """Take all that off again. Raises Refused, OSError."""
        if plan.facts["mode"] == "reset":
            _put_back(plan)


# ---- the plan ----


def _plan_reset(drill: Drill, run: str) -> Plan:
    gpus = gpu.look()
    one = chosen(drill, gpus)
    if one.recovery is not None:
        raise Refused(f"{one.uuid}: the driver asks for {one.recovery} already: that is an incident, not a drill")
    if peers := gpu.peers_of(one, gpus):
        raise Refused(f"{one.uuid} is reset only with {', '.join(p.uuid for p in peers)} (NVLink): not drilled")
    device = gpu.device_of(one)
    found = gpu.holders(device)
    agent = _agent_pid(str(drill.target.get("socket", "")))
    pod = _pod_of(found, agent)
    facts: dict[str, Any] = {
        "mode": "reset", "uuid": one.uuid, "before": asdict(one), "device": str(device),
        "socket": str(drill.target.get("socket", "")), "prove_within_s": GATED_AT_MOST_S, "drain_s": RESET_WITHIN_S,
        "reset_within_s": RESET_WITHIN_S, "free_within_s": FREE_WITHIN_S, "back_within_s": BACK_WITHIN_S,
    }
    if pod is not None or "KUBERNETES_SERVICE_HOST" in os.environ:
        facts |= _facts_of_pod(str(drill.target.get("node", "")), pod, run)
        victims = [holder.process for holder in found if holder.pod == pod]
        facts["prove_within_s"] = GATED_AT_MOST_S + EVICTED_WITHIN_S
    else:
        _refuse_not_opted_in(OPT_IN)
        victims, facts["unit"] = _engine_of(drill, found)
        facts["folder"] = str(gate.RUNTIME)
        gate.check(facts["unit"])
    facts["victims"] = msgspec.to_builtins(victims)
    _refuse_strangers(one.uuid, _strangers(found, victims, agent))
    return Plan(
        fault=GpuReset.name,
        run=run,
        targets=[f"{one.uuid} (index {one.index}, {one.bdf}, {device})", *map(describe, victims)],
        commands=list(_commands(one, facts, run)),
        undo=list(_undo_commands(one, facts, run)),
        facts=facts,
        notes=[
            "requests in flight on the engine are lost, and so is its KV cache",
            "the GPU's instances, if it is partitioned, are reset with it",
            *(["persistence mode is switched off for the reset, and on again"] if one.persistence else []),
        ],
        needs=NEEDS,
        expects=announces("gpu-reset", "reset"),
        blast={"replicas": 1},
        restarts=True,
    )


def chosen(drill: Drill, gpus: Sequence[Gpu]) -> Gpu:
    """The GPU that a drill names, or the one of its engine. Raises Refused."""
    uuid = drill.target.get("gpu")
    if uuid is not None:
        found = gpu.find(str(uuid), gpus)
        if found is None:
            raise Refused(f"target.gpu {uuid}: NVML lists {', '.join(one.uuid for one in gpus)}")
        return found
    indices = list(drill.target.get("gpus") or ())
    if len(indices) != 1:
        raise Refused(f"the engine has {len(indices)} GPUs under `gpus:`; name one: target: {{engine: …, gpu: UUID}}")
    found = next((one for one in gpus if one.index == indices[0]), None)
    if found is None:
        raise Refused(f"the engine's GPU {indices[0]}: NVML lists {len(gpus)}")
    return found


def _engine_of(drill: Drill, found: Sequence[Holder]) -> tuple[list[ProcessId], str]:
    """All processes of the engine, and its service. Raises Refused."""
    if drill.target.get("port") is None:
        raise Refused("which engine is it? write target: {engine: NAME, gpu: UUID}")
    victims = part_of(processes_of(drill.target), "all")
    unit = gpu.unit_of(gpu.cgroups_of(victims[0].pid))
    if unit is None:
        raise Refused(f"{describe(victims[0])} is no service of systemd's: its restart cannot be gated")
    if unit.removesuffix(".service") in RESERVED_NAMES or unit.startswith("tocsin"):
        raise Refused(f"{unit} is what the node or Tocsin itself depends on: no drill may touch it")
    known = {one.pid for one in victims}
    victims += [h.process for h in found if h.unit == unit and h.process.pid not in known]
    if not {one.pid for one in victims} & {h.process.pid for h in found}:
        raise Refused(f"{describe(victims[0])} does not run on this GPU: it would be killed for nothing")
    return victims, unit


def _pod_of(found: Sequence[Holder], agent: int) -> str | None:
    """The one pod whose processes hold a GPU; None where none does. Raises Refused where there are several."""
    pods = sorted({holder.pod for holder in found if holder.pod and holder.process.pid != agent})
    if len(pods) > 1:
        named = ", ".join(_named(pods))
        raise Refused(f"{len(pods)} pods hold the GPU ({named}): one is drilled, stop the others on this node for it")
    return pods[0] if pods else None


def _named(uids: Sequence[str]) -> list[str]:
    """Pods as people call them, where the API tells."""
    from drills.cluster import ClusterError, uid_of

    known: dict[str, str] = {}
    with contextlib.suppress(ClusterError), _cluster() as cluster:
        known = {uid_of(one): f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in cluster.pods(None)}
    return [known.get(uid, uid) for uid in uids]


def _facts_of_pod(node: str, uid: str | None, run: str) -> dict[str, Any]:
    """What undoing needs to know of node and pod. Raises Refused."""
    from drills.cluster import CORDONED, ClusterError, is_schedulable, own_taints, uid_of

    if uid is None:
        raise Refused("no pod holds the GPU: nothing would come back")
    try:
        with _cluster() as cluster:
            found = cluster.node(node)
            pods = cluster.pods(None, fields=f"spec.nodeName={node}")
            pod = next((one for one in pods if uid_of(one) == uid), None)
            opted_in = pod is not None and cluster.opted_in(str(pod["metadata"]["namespace"]))
    except ClusterError as error:
        raise Refused(f"Kubernetes: {error}; a GPU is reset only on a node that can be cordoned") from None
    if found is None or pod is None:
        raise Refused(f"Kubernetes does not know {'node ' + node if found is None else 'the pod ' + uid}")
    meta = pod["metadata"]
    if (found["metadata"].get("labels") or {}).get(OPT_IN_LABEL) != "allowed":
        raise Refused(f"node {node} has not opted in: kubectl label node {node} {OPT_IN_LABEL}=allowed")
    if not opted_in:
        raise Refused(f"namespace {meta['namespace']} has not opted in: label it tocsin.dev/drills=true")
    owners = {owner.get("kind") for owner in meta.get("ownerReferences") or ()}
    if not owners or "DaemonSet" in owners or "Node" in owners:
        raise Refused(f"pod {meta['namespace']}/{meta['name']} would not come back elsewhere: its owner is "
                      f"{', '.join(map(str, owners)) or 'nobody'}")
    cordon = {"node": node, "uid": uid_of(found), "run": run, "was_schedulable": is_schedulable(found),
              "taints": own_taints(found), "annotation": CORDONED}
    return {"cordon": cordon, "pod": {"namespace": meta["namespace"], "name": meta["name"], "uid": uid}}


def _strangers(found: Sequence[Holder], victims: Sequence[ProcessId], agent: int) -> list[Holder]:
    """Holders that are neither the engine nor our agent."""
    known = {one.pid for one in victims} | {agent}
    return [holder for holder in found if holder.process.pid not in known]


def _refuse_strangers(uuid: str, strangers: Sequence[Holder]) -> None:
    if strangers:
        named = "; ".join(map(str, strangers))
        raise Refused(f"{uuid} is held by what is not ours: {named}; stop it for the drill, or drill another GPU")


def _refuse_not_opted_in(file: Path) -> None:
    """A file that only root can have made. Raises Refused."""
    try:
        seen = file.lstat()
    except OSError:
        raise Refused(f"this node has not opted in to real resets: sudo touch {file}; or mode: synthetic") from None
    if seen.st_uid != 0 or seen.st_mode & 0o022:
        raise Refused(f"{file} does not belong to root alone: it opts nobody in")


def _agent_pid(path: str) -> int:
    """The process that listens on the agent's socket, which lets NVML go when asked; 0 where none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return 0
        told = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", told)[0])


def _commands(one: Gpu, facts: Mapping[str, Any], run: str) -> Iterator[Command]:
    yield Command("POST /nvml/release", "the agent lets its handles go")
    if facts.get("unit"):
        yield Command(f"touch {Gate(run, facts['unit'], Path(facts['folder'])).flag}", f"{facts['unit']} waits there")
        yield from (Command(f"kill -KILL {victim['pid']}", "the engine") for victim in facts.get("victims", ()))
    else:
        pod = facts["pod"]
        yield Command(f"kubectl cordon {facts['cordon']['node']}", "nothing new comes to the node")
        yield Command(f"evict {pod['namespace']}/{pod['name']}", f"uid {pod['uid']}")
    if one.persistence:
        yield Command(f"nvidia-smi -i {one.uuid} -pm 0", "it holds the device")
    yield Command(f"nvidia-smi --gpu-reset -i {one.uuid}", f"at most {RESET_WITHIN_S:g} s, once")


def _undo_commands(one: Gpu, facts: Mapping[str, Any], run: str) -> Iterator[Command]:
    if facts.get("unit"):
        yield Gate(run, facts["unit"], Path(facts["folder"])).undo_command()
    if facts.get("cordon", {}).get("was_schedulable"):
        yield Command(_uncordon_text(facts["cordon"]), "only if nobody changed it since")
    if one.persistence:
        yield Command(f"nvidia-smi -i {one.uuid} -pm 1")


def _uncordon_text(cordon: Mapping[str, Any]) -> str:
    return f"kubectl uncordon {cordon['node']} && kubectl annotate node {cordon['node']} {cordon['annotation']}-"


def _gate(plan: Plan) -> Gate:
    return Gate(plan.run, str(plan.facts["unit"]), Path(plan.facts["folder"]))


def _cluster() -> Cluster:
    from drills.cluster import Cluster

    return Cluster()


# ---- the reset ----


class Resetting:
    """A reset under way, in a thread of its own: the holder goes on telling, and hears `revert`."""

    def __init__(self, plan: Plan, injector_fds: Sequence[int]) -> None:
        self._plan, self._fds = plan, tuple(injector_fds)
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[str, Any] = {"phase": "started"}
        victims = msgspec.convert(plan.facts["victims"], list[ProcessId])
        # Helpers of an engine come and go; its first process, or what of a pod had the GPU, must be the one planned.
        if not any(map(proc.is_same, victims[:1] if plan.facts.get("unit") else victims)):
            raise Refused(f"gpu-reset: {', '.join(str(one.pid) for one in victims)} ended since the plan; plan again")
        self._victims = victims
        self._thread = threading.Thread(target=self._run, name="gpu-reset", daemon=True)
        self._thread.start()

    def sample(self) -> Mapping[str, Any]:
        """How far it is, what the driver answered, what NVML told afterwards; the engine's processes that live on."""
        with self._lock:
            seen = dict(self._seen)
        return {**seen, "outlive": [one.pid for one in self._victims if proc.is_same(one)]}

    def undo(self) -> None:
        """No further step is begun; a reset under way is waited for, since one that is cut off may lose the GPU."""
        self._cancelled.set()
        self._thread.join(RESET_WITHIN_S + RELEASED_WITHIN_S)

    def _tell(self, **seen: Any) -> None:
        with self._lock:
            self._seen |= seen

    def _run(self) -> None:
        from drills.cluster import ClusterError

        try:
            for phase, step in self._steps():
                if self._cancelled.is_set():
                    self._tell(phase="cancelled")
                    return
                self._tell(phase=phase)
                step()
            self._tell(phase="done")
        except (Refused, OSError, ClusterError) as error:
            self._tell(error=str(error))
        finally:
            try:
                _put_back(self._plan)
            except (Refused, OSError, ClusterError) as error:  # what it left is looked for by whoever reverts
                self._tell(undo_error=str(error))
            self._tell(over=True)

    def _steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "NVML is released", self._release
        yield "holders", self._refuse_strangers
        if self._plan.facts.get("unit"):
            yield "gate", lambda: gate.shut(_gate(self._plan), GATED_AT_MOST_S)
            yield "kill", self._kill
        else:
            yield "cordon", self._cordon
            yield "evict", self._evict
        if self._plan.facts["before"]["persistence"]:
            yield "persistence mode off", self._persistence_off
        yield "free", self._wait_free
        yield "reset", self._reset
        yield "back", self._back

    def _release(self) -> None:
        _released(str(self._plan.facts["socket"]))

    def _refuse_strangers(self) -> None:
        """Whoever came since the plan, before anything is killed. The agent must have let go by now."""
        until = time.monotonic() + RELEASED_WITHIN_S
        while strangers := self._strangers():
            if time.monotonic() > until:
                _refuse_strangers(str(self._plan.facts["uuid"]), strangers)
            time.sleep(0.1)

    def _holders(self) -> list[Holder]:
        return [one for one in gpu.holders(Path(self._plan.facts["device"])) if one.process.pid != os.getpid()]

    def _strangers(self) -> list[Holder]:
        return [one for one in _strangers(self._holders(), self._victims, 0) if not self._is_engine_s(one)]

    def _is_engine_s(self, one: Holder) -> bool:
        """Whether a process that came since the plan is of the engine's service or pod."""
        unit, pod = self._plan.facts.get("unit"), self._plan.facts.get("pod", {}).get("uid")
        return (unit is not None and one.unit == unit) or (pod is not None and one.pod == pod)

    def _kill(self) -> None:
        known = {one.pid for one in self._victims}
        came = [one.process for one in self._holders() if self._is_engine_s(one) and one.process.pid not in known]
        self._victims += came
        for one in self._victims:
            with contextlib.suppress(ProcessLookupError):
                fd = proc.open_pidfd(one)
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    proc.has_ended(fd, 1.0)
                finally:
                    os.close(fd)

    def _cordon(self) -> None:
        with _cluster() as cluster:
            cluster.cordon(str(self._plan.facts["cordon"]["node"]), self._plan.run)

    def _evict(self) -> None:
        from drills.cluster import ClusterError, denied

        pod = self._plan.facts["pod"]
        until = time.monotonic() + EVICTED_WITHIN_S
        with _cluster() as cluster:
            while not self._cancelled.is_set():
                try:
                    cluster.evict_pod(pod["namespace"], pod["name"], pod["uid"])
                except ClusterError as error:
                    if error.code == HTTPStatus.NOT_FOUND:
                        break
                    no = denied(error.code, error.status)
                    if no.retry_after_s is None or time.monotonic() + no.retry_after_s > until:
                        told = f"pod {pod['namespace']}/{pod['name']} was not evicted: {no.kind}: {no.why}"
                        raise Refused(told) from None
                    self._cancelled.wait(no.retry_after_s)
                else:
                    break
        while any(map(proc.is_same, self._victims)) and time.monotonic() < until and not self._cancelled.is_set():
            time.sleep(0.2)

    def _persistence_off(self) -> None:
        status, said = gpu.smi(["-i", str(self._plan.facts["uuid"]), "-pm", "0"], SET_WITHIN_S, self._fds)
        if status != 0:
            raise Refused(f"nvidia-smi -pm 0: {' '.join(said.split())} (exit {status})")

    def _wait_free(self) -> None:
        until = time.monotonic() + float(self._plan.facts["free_within_s"])
        while (found := self._holders()) and not self._cancelled.is_set():
            if time.monotonic() > until:
                raise Refused(f"{self._plan.facts['uuid']} is still held by {'; '.join(map(str, found))}: not reset")
            time.sleep(0.1)

    def _reset(self) -> None:
        """Once, never in a loop: what refused it will refuse it again."""
        uuid = str(self._plan.facts["uuid"])
        answer = gpu.parse_reset(*gpu.smi(["--gpu-reset", "-i", uuid], self._plan.facts["reset_within_s"], self._fds),
                                 persistence=self._plan.facts["before"]["persistence"])
        self._tell(answer=msgspec.to_builtins(answer))
        if not answer.done:
            hints = f"; {'; '.join(answer.hints)}" if answer.hints else ""
            raise Refused(f"not reset: {answer.reason} (exit {answer.exit}): {answer.text}{hints}")

    def _back(self) -> None:
        within_s, why = float(self._plan.facts["back_within_s"]), ""
        before, until = Gpu(**self._plan.facts["before"]), time.monotonic() + within_s
        after: Gpu | None = None
        while time.monotonic() < until and not self._cancelled.is_set():
            try:
                after = gpu.find(before.uuid, gpu.look())
            except Refused as no:
                after, why = None, str(no)
            if after is not None:
                worse = gpu.worse(before, after)
                self._tell(back={"index": after.index, "was": before.index}, not_as_before=worse)
                if not worse:
                    return
            time.sleep(0.5)
        if after is not None:  # back, and not as it was: what trains its links or joins a fabric had its time
            return
        told = f"NVML does not list {before.uuid} within {within_s:g} s after the reset"
        raise Refused(f"{told}: {why}" if why else told)


def _released(path: str) -> None:
    """Have the agent let NVML go, for as long as this may take; it takes it up by itself. Raises Refused."""
    until = time.monotonic() + RELEASED_WITHIN_S
    while True:
        try:
            told = client.release_nvml(Path(path), GATED_AT_MOST_S + EVICTED_WITHIN_S)
        except client.NotRunning:
            return  # then it holds nothing
        except client.AgentError as error:
            raise Refused(f"the agent does not let NVML go: {error}") from None
        if told["released"] or "not there" in str(told["why"]):
            return
        if time.monotonic() > until:
            raise Refused(f"the agent does not let NVML go: {told['why']}")
        time.sleep(0.2)


def _put_back(plan: Plan) -> None:
    """All that outlives the process; each, whatever became of the others. Raises the last failure."""
    failed: Exception | None = None
    for step in (_open_gate, _restore_persistence, _reopen, _uncordon):
        try:
            step(plan)
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed


def _open_gate(plan: Plan) -> None:
    if plan.facts.get("unit"):
        gate.open_again(_gate(plan))


def _persistence_lost(plan: Plan) -> bool:
    """Whether persistence mode was on and is off now. Raises Refused where NVML cannot be asked."""
    if not plan.facts["before"]["persistence"]:
        return False
    now = gpu.find(str(plan.facts["uuid"]), gpu.look())
    return now is not None and now.persistence is False


def _persistence(plan: Plan, on: int) -> Command:
    return Command(f"nvidia-smi -i {plan.facts['uuid']} -pm {on}")


def _restore_persistence(plan: Plan) -> None:
    if _persistence_lost(plan):
        status, said = gpu.smi(_persistence(plan, 1).text.split()[1:], SET_WITHIN_S)
        if status != 0:
            raise Refused(f"persistence mode: {' '.join(said.split())}")


def _reopen(plan: Plan) -> None:
    with contextlib.suppress(client.NotRunning, client.AgentError):  # it reopens by itself after its time
        client.reopen_nvml(Path(plan.facts["socket"]))


def _uncordon(plan: Plan) -> None:
    if plan.facts.get("cordon", {}).get("was_schedulable"):
        with _cluster() as cluster:
            cluster.uncordon(plan.facts["cordon"])


def _cordon_left(plan: Plan) -> list[Left]:
    """A cordon that is ours to take off and still on. One that somebody changed is theirs by now."""
    from drills.cluster import ClusterError, labels_or, why_left_cordoned

    cordon = plan.facts.get("cordon")
    if not cordon or not cordon["was_schedulable"]:
        return []
    try:
        with _cluster() as cluster:
            node = cluster.node(cordon["node"])
    except ClusterError as error:
        return [Left(f"node {cordon['node']} may be cordoned: {error}", _uncordon_text(cordon))]
    if node is None or why_left_cordoned(cordon, node):
        return []
    if labels_or(node, "annotations").get(cordon["annotation"]) != plan.run:
        return []
    return [Left(f"node {cordon['node']} is cordoned by this run", _uncordon_text(cordon))]


def _hung(plan: Plan) -> list[Left]:
    """A reset of this GPU that still runs: it was waited for, and hangs in the driver."""
    found = []
    for pid in proc.pids():
        words = proc.command_line(pid)
        if "--gpu-reset" in words and plan.facts["uuid"] in words:
            text = f"nvidia-smi --gpu-reset of {plan.facts['uuid']} hangs, pid {pid}"
            found.append(Left(text, f"kill -KILL {pid}   # in state D only a reboot ends it"))
    return found


def _proven(plan: Plan, last: Mapping[str, Any]) -> tuple[bool, str]:
    back, answer = last.get("back"), last.get("answer") or {}
    if back is None:
        return False, str(last.get("error") or f"the reset is not done: {last.get('phase')}")
    where = f"index {back['index']}" + (f" (was {back['was']})" if back["was"] != back["index"] else "")
    return True, f"nvidia-smi: {answer.get('text')}; NVML has {plan.facts['uuid']} back at {where}"


FAULT: Fault = GpuReset()
