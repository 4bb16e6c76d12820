"""gpu-reset on the NVML stand-in and a scripted nvidia-smi: every path ends restored and says what the driver said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent import client
from agent.config import load_all
from agent.signals import CATALOGUE
from drills import gate, gpu, heal, proc, runner, xid_line
from drills.config import XID_RULES, drills_of
from drills.faults import gpu_reset
from drills.faults.gpu_reset import FAULT, Resetting
from drills.gate import Gate
from drills.gpu import Group, groups_of, parse_reset, recovery_of, uncovered
from drills.heal import is_clean
from drills.ledger import Ledger, read
from drills.model import Left, Plan, Refused, State
from tests.agent_process import AgentProcess
from tests.drills.gpu_scene import BUS, DONE, IN_USE, NODE, OTHER, PARTIAL, STRANGER, UNIT, UUID, Node
from tests.drills.stand_ins import ROOT, arm, new_run, wait_for
from tests.needs import find, need

RUN = "reset-20261129T210000Z-ab12"
LINES = (ROOT / "tests/data/cases-gpu-reset.jsonl").read_text().splitlines()
CASES = {case["id"]: case for case in map(json.loads, LINES)}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node with two GPUs."""
    need("gcc", "make")
    with ExitStack() as stack:
        yield Node(tmp_path, monkeypatch, stack)


def done(plan: Plan) -> tuple[bool, str, dict[str, Any]]:
    """Inject in this process, wait until it is over, and end it: proof, sentence and the last sample."""
    held = FAULT.inject(plan, ())
    wait_for(lambda: bool(held.sample().get("over")))
    last = dict(held.sample())
    held.undo()
    FAULT.undo(plan)
    return (*FAULT.proven(plan, [last]), last)


# ---- the cases ----


def test_c098_in_use_by_another_client(node: Node) -> None:
    """C098: exit 255 is a failure with the GPU and the reason; persistence mode is put back; nobody tries again."""
    given = CASES["C098"]["input"]
    answer = parse_reset(given["exit"], given["stdout"], persistence=given["persistence_mode"] == "Enabled")
    assert (answer.done, answer.exit, answer.gpus, answer.reason) == (False, 255, ["00000000:1A:00.0"], "in_use")
    assert "persistence mode is on" in answer.hints[0]

    node.play({**NODE, "defaults": {**NODE["defaults"], "persistence": 1}})
    _, drill = node.engine()
    node.answers(given["exit"], given["stdout"])
    plan = FAULT.plan(drill, RUN)
    proven, why, last = done(plan)
    assert (proven, last["answer"]["reason"], last["answer"]["gpus"]) == (False, "in_use", [BUS])
    assert why.startswith("not reset: in_use (exit 255)")
    assert [line for line in node.asked() if "reset" in line] == [f"--gpu-reset -i {UUID}"]
    assert [line for line in node.asked() if "-pm" in line] == [f"-i {UUID} -pm 0", f"-i {UUID} -pm 1"]
    assert FAULT.left(plan) == []


@pytest.mark.parametrize(("status", "said", "reason", "gpus"), [
    (255, "The following GPUs could not be reset:\n  GPU 00000000:10:00.0: Unknown Error\n", "unknown",
     ["00000000:10:00.0"]),
    (255, "GPU Reset couldn't run because GPU 00000000:3D:00.0 is the primary GPU.\n", "not_supported", []),
    (255, "GPU 00000000:0A:00.0 is connected through NVLink to 00000000:0B:00.0: reset them together.\n", "peers", []),
    (255, "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n", "driver", []),
    (15, "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system\n", "driver",
     ["0000:01:00.0"]),
    (255, "GPU 00000000:C1:00.0 is currently in use by another process.\n", "in_use", []),
    (0, "All done.\n", "unknown", []),
])  # fmt: skip
def test_what_else_nvidia_smi_says(status: int, said: str, reason: str, gpus: list[str]) -> None:
    """gpu-operator#118, mig-parted#9 (exit 0, and nothing was reset), a display's GPU, peers by NVLink, a lost one."""
    answer = parse_reset(status, said)
    assert (answer.done, answer.reason, list(answer.gpus)) == (False, reason, gpus)


def test_c100_what_a_reset_takes_along() -> None:
    """C100: the preview lists the pods of the whole group, once; nothing beyond what was approved is reset."""
    given = CASES["C100"]["input"]
    pods = [{**one, "pods": one["pods"]} for one in given["gpus"]]
    mig = {"i": given["mig"]["gpu"], "instances": given["mig"]["instances"], "pods": given["mig"]["pods"]}
    gpus = [*pods, mig]
    assert groups_of(gpus, [0]) == [Group([0, 1], ["a", "b"])]
    assert groups_of(gpus, given["reset"]) == [Group([0, 1], ["a", "b"])]
    assert groups_of(gpus, [3]) == [Group([3], ["d", "e"])]
    assert uncovered(groups_of(gpus, [0]), ["a"]) == ["b"]
    assert uncovered(groups_of(gpus, [3]), ["d", "e"]) == []


def test_c101_the_driver_asks_for_a_reset_already(node: Node) -> None:
    """C101: no counter moved, and the driver's own word says it: that is an incident, and no drill is put on top."""
    given = CASES["C101"]["input"]
    assert recovery_of(given["recovery_action"]) == "Reset"
    older = given["older_driver"]["recovery_action"]
    nothing = (older, "None", "N/A", "", 0, "[Not Supported]", 0x7FFFFFFF, 0xFFFFFFFF)
    assert [recovery_of(none) for none in nothing] == [None] * len(nothing)
    assert recovery_of(9) == "action 9"  # of a newer driver: that is one
    node.play({**NODE, "gpus": [{**NODE["gpus"][0], "fields": {"230": {"value": 1, "type": "uint"}}}]})
    _, drill = node.engine()
    with pytest.raises(Refused, match="the driver asks for GPU Reset already: that is an incident"):
        FAULT.plan(drill, RUN)
    node.play({**NODE, "defaults": {**NODE["defaults"], "fields": {}}})
    assert FAULT.plan(drill, RUN).facts["before"]["recovery"] is None


# ---- the plan ----


def test_the_plan_says_all_and_touches_nothing(node: Node) -> None:
    """Whoever approves sees every command, and the ones that undo them."""
    engine, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    flag = Gate(RUN, UNIT, node.units).flag
    assert [command.text for command in plan.commands] == [
        "POST /nvml/release", f"touch {flag}", f"kill -KILL {engine.pid}", f"nvidia-smi --gpu-reset -i {UUID}",
    ]  # fmt: skip
    assert plan.targets[0] == f"{UUID} (index 0, {BUS}, {node.dev}/nvidia3)"
    assert [command.text for command in plan.undo] == [Gate(RUN, UNIT, node.units).undo_command().text]
    assert (plan.expects, plan.restarts, plan.blast) == (("engine-down",), True, {"replicas": 1})
    assert [*node.asked(), *node.shut()] == []
    msgspec.json.encode(msgspec.to_builtins(plan))


def test_a_holder_that_is_not_ours_is_named(node: Node) -> None:
    """DCGM's handle would have refused the reset, after the engine was killed for it."""
    _, drill = node.engine()
    stranger, _ = node.start(STRANGER, unit="nvidia-dcgm.service")
    other_gpu, _ = node.start(STRANGER, device="nvidia0")
    named = rf"held by what is not ours: process {stranger.pid} \(.*\), nvidia-dcgm.service;"
    with pytest.raises(Refused, match=named):
        FAULT.plan(drill, RUN)
    stranger.kill()
    stranger.wait(30)
    assert str(other_gpu.pid) not in str(FAULT.plan(drill, RUN))
    assert node.asked() == []


def test_a_device_that_is_mapped_and_closed(node: Node) -> None:
    """Some clients map the device and close its descriptor: /proc/PID/fd shows nothing, /proc/PID/maps does."""
    (node.dev / "nvidia3").write_bytes(bytes(4096))
    script = "import mmap, sys\nwith open(sys.argv[1], 'r+b') as f: held = mmap.mmap(f.fileno(), 4096)\n"
    mapped, _ = node.start(f"{script}print(flush=True)\nsys.stdin.read()\n")
    assert [holder.process.pid for holder in gpu.holders(node.dev / "nvidia3")] == [mapped.pid]


@pytest.mark.parametrize("who", ["nobody", "everybody"])
def test_a_node_that_has_not_opted_in(node: Node, who: str) -> None:
    """One configuration for all nodes: the one that must not be reset was reset, too."""
    _, drill = node.engine()
    if who == "nobody":
        node.opt_in.unlink()
    else:
        node.opt_in.chmod(0o666)
    with pytest.raises(Refused, match="has not opted in to real resets" if who == "nobody" else "opts nobody in"):
        FAULT.plan(drill, RUN)


@pytest.mark.heavy
def test_what_may_not_be_reset(node: Node) -> None:
    """Another GPU's UUID, an engine under no service, one that the node depends on, GPUs that fall together."""
    engine, drill = node.engine()
    with pytest.raises(Refused, match=f"target.gpu GPU-x: NVML lists {UUID}, {OTHER}"):
        FAULT.plan(replace(drill, target={**drill.target, "gpu": "GPU-x"}), RUN)
    with pytest.raises(Refused, match="has 2 GPUs under `gpus:`; name one"):
        FAULT.plan(replace(drill, target={**drill.target, "gpu": None, "gpus": [0, 1]}), RUN)
    with pytest.raises(Refused, match="does not run on this GPU: it would be killed for nothing"):
        FAULT.plan(replace(drill, target={**drill.target, "gpu": OTHER}), RUN)
    node.units_of[engine.pid] = "user@0.service/app.slice"
    with pytest.raises(Refused, match="is no service of systemd's: its restart cannot be gated"):
        FAULT.plan(drill, RUN)
    node.units_of[engine.pid] = "containerd.service"
    with pytest.raises(Refused, match="no drill may touch it"):
        FAULT.plan(drill, RUN)
    volta = [gpu.Gpu(uuid, i, minor=i, nvlinks=6, capability=7) for i, uuid in enumerate((UUID, OTHER))]
    assert [one.uuid for one in gpu.peers_of(volta[0], volta)] == [OTHER]
    assert gpu.peers_of(replace(volta[0], capability=9), volta) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"index": 3, "power_limit_w": 600.0}, []),
        ({"recovery": "Drain and Reset"}, ["the driver asks for: Drain and Reset"]),
        ({"remap_pending": True}, ["a row remapping is pending"]),
        ({"ecc": False, "mig": True}, ["ECC was on and is off", "MIG mode was off and is on"]),
        ({"nvlinks": 17}, ["17 of 18 NVLinks are active"]),
        ({"mig_devices": 0}, ["it has 0 MIG devices, and had 2"]),
        ({"fabric": False}, ["it has not joined the NVLink fabric again"]),
        ({"ecc": None, "nvlinks": None, "fabric": None, "mig_devices": None}, []),  # not told any more is not worse
    ],
)
def test_what_is_not_as_before(change: dict[str, Any], said: list[str]) -> None:
    """The engine answered again, with one link of eighteen down."""
    before = gpu.Gpu(UUID, 0, ecc=True, mig=False, remap_pending=False, nvlinks=18, mig_devices=2, fabric=True)
    assert gpu.worse(before, replace(before, **change)) == said


def test_a_power_limit_that_the_reset_lost() -> None:
    """A card that its owner had capped at 300 W drew 700 W after the drill, and the report said: as before."""
    before = gpu.Gpu(UUID, 0, power_limit_w=300.0)
    assert gpu.worse(before, replace(before, power_limit_w=700.0)) == ["its power limit was 300 W and is 700 W"]
    assert gpu.worse(before, replace(before, power_limit_w=300.0004)) == []


def test_units_and_pods_by_cgroup() -> None:
    """Two hierarchies, three runtimes, and what they call a pod."""
    pod = "1b2c3d4e-0000-4000-8000-00000000abcd"
    sliced = f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod.replace('-', '_')}.slice/x.scope"
    assert gpu.pod_of(sliced) == gpu.pod_of(f"12:devices:/kubepods/burstable/pod{pod}/0a1b") == pod
    assert gpu.unit_of("1:name=systemd:/system.slice/vllm.service\n0::/system.slice/vllm.service") == "vllm.service"
    assert gpu.unit_of("0::/system.slice/system-vllm.slice/vllm@1.service/payload") == "vllm@1.service"
    assert gpu.unit_of(sliced) is gpu.unit_of("0::/user.slice/user@0.service/app.slice/x.service") is None
    assert gpu.pod_of("0::/system.slice/vllm.service") is None


# ---- the reset ----


def test_reset_proven_and_left_alone(node: Node) -> None:
    """The engine died, waited behind the gate, and its GPU came back: then nothing of ours is in the way."""
    engine, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    proven, why, last = done(plan)
    assert proven, why
    assert why == f"nvidia-smi: {' '.join(DONE.split())}; NVML has {UUID} back at index 0"
    assert last["not_as_before"] == last["outlive"] == []
    assert engine.wait(30) == -signal.SIGKILL
    assert node.asked() == ["systemctl daemon-reload", f"--gpu-reset -i {UUID}", "systemctl daemon-reload"]
    assert node.shut() == []
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_back_under_another_index_and_not_as_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the reset the bus was enumerated anew: the UUID is the GPU, and its ECC errors ask for a reboot now."""
    monkeypatch.setattr(gpu_reset, "BACK_WITHIN_S", 1.5)
    _, drill = node.engine()
    broken = {**NODE["gpus"][0], "fields": {"230": {"value": 2, "type": "uint"}}}
    node.answers(0, DONE, after={**NODE, "gpus": [NODE["gpus"][1], broken]})
    proven, why, last = done(FAULT.plan(drill, RUN))
    assert proven
    assert why.endswith("back at index 1 (was 0)")
    assert last["not_as_before"] == ["the driver asks for: Node Reboot"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("status", "text", "after", "said"),
    [
        (255, IN_USE, None, r"not reset: in_use \(exit 255\)"),
        (15, PARTIAL, None, r"not reset: driver \(exit 15\)"),
        (0, "", None, r"not reset: unknown \(exit 0\)"),
        (3, "GPU reset is not supported", None, "not reset: not_supported"),
        (0, DONE, {**NODE, "gpus": [NODE["gpus"][1]]}, f"NVML does not list {UUID} within 1 s after the reset"),
    ],
)
def test_a_reset_that_fails_leaves_nothing_of_ours(
    node: Node, monkeypatch: pytest.MonkeyPatch, status: int, text: str, after: Any, said: str
) -> None:
    """Refused, half done, or the GPU did not come back: it is told, the gate is off, and nobody tries again."""
    monkeypatch.setattr(gpu_reset, "BACK_WITHIN_S", 1.0)
    _, drill = node.engine()
    node.answers(status, text, after)
    plan = FAULT.plan(drill, RUN)
    proven, why, _ = done(plan)
    assert not proven
    assert re.search(said, why)
    assert len([line for line in node.asked() if "reset" in line]) == 1
    assert node.shut() == []
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_a_reset_that_hangs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver did not come back: the child is ended at its deadline, and the engine may start again."""
    monkeypatch.setattr(gpu_reset, "RESET_WITHIN_S", 1.0)
    _, drill = node.engine()
    (node.folder / "hang").touch()
    plan = FAULT.plan(drill, RUN)
    proven, why, _ = done(plan)
    assert not proven
    assert why.startswith("not reset: hang (exit None): no answer within 1 s")
    assert node.shut() == []
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_a_reset_in_state_d_is_left(node: Node) -> None:
    """What the kernel holds cannot be ended: it is named, with what to do, and no other drill starts."""
    plan = Plan("gpu-reset", RUN, [], [], [], {"mode": "reset", "uuid": UUID, "before": {"persistence": None}})
    words = [sys.executable, "-c", "import time; time.sleep(60)", "--gpu-reset", "-i", UUID]
    with subprocess.Popen(words) as stuck:
        wait_for(lambda: bool(proc.command_line(stuck.pid)) and proc.command_line(stuck.pid)[-1] == UUID)
        assert [one.what for one in FAULT.left(plan)] == [f"nvidia-smi --gpu-reset of {UUID} hangs, pid {stuck.pid}"]
        stuck.kill()
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_who_comes_between_plan_and_reset(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger opened the GPU after the plan: the engine is not killed for nothing."""
    monkeypatch.setattr(gpu_reset, "RELEASED_WITHIN_S", 0.3)
    engine, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    stranger, _ = node.start(STRANGER)
    proven, why, _ = done(plan)
    assert not proven
    assert f"held by what is not ours: process {stranger.pid} " in why
    assert engine.poll() is None
    assert not [line for line in node.asked() if "reset" in line]


@pytest.mark.heavy
def test_a_worker_that_began_after_the_plan(node: Node) -> None:
    """Two minutes of baseline later the engine had started a worker anew: it is the engine's, and dies with it."""
    engine, drill = node.engine()
    helper, _ = node.start(STRANGER, unit=UNIT)
    plan = FAULT.plan(drill, RUN)
    assert {victim["pid"] for victim in plan.facts["victims"]} == {engine.pid, helper.pid}
    helper.kill()
    helper.wait(30)
    worker, _ = node.start(STRANGER, unit=UNIT)
    proven, why, last = done(plan)
    assert proven, why
    assert worker.wait(30) == engine.wait(30) == -signal.SIGKILL
    assert last["outlive"] == []


@pytest.mark.heavy
def test_an_engine_that_ended_meanwhile(node: Node) -> None:
    """The number may be another's by now."""
    engine, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    engine.kill()
    engine.wait(30)
    with pytest.raises(Refused, match=f"{engine.pid} ended since the plan"):
        FAULT.inject(plan, ())


@pytest.mark.heavy
def test_persistence_mode_is_off_for_the_reset_alone(node: Node) -> None:
    """With it on, this driver calls itself another client; left off, each start of the engine took 10 s longer."""
    node.play({**NODE, "defaults": {**NODE["defaults"], "persistence": 1}})
    _, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    assert plan.undo[-1].text == f"nvidia-smi -i {UUID} -pm 1"
    assert done(plan)[0]
    assert [line for line in node.asked() if not line.startswith("systemctl")] == [
        f"-i {UUID} -pm 0", f"--gpu-reset -i {UUID}", f"-i {UUID} -pm 1",
    ]  # fmt: skip
    node.play(NODE)
    assert FAULT.left(plan) == [
        Left(f"persistence mode of {UUID} is off, it was on", f"nvidia-smi -i {UUID} -pm 1"),
    ]  # fmt: skip


@pytest.mark.heavy
def test_revert_waits_for_a_reset_under_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort cut a reset off in the middle, and the GPU was lost until the next boot. No further step is begun."""
    monkeypatch.setattr(gpu_reset, "RESET_WITHIN_S", 2.0)
    _, drill = node.engine()
    (node.folder / "hang").touch()
    held = FAULT.inject(FAULT.plan(drill, RUN), ())
    assert isinstance(held, Resetting)
    wait_for(lambda: any("reset" in line for line in node.asked()))
    held.undo()
    assert held.sample()["over"]
    assert held.sample()["answer"]["reason"] == "hang"
    assert node.shut() == []


@pytest.mark.heavy
def test_everything_is_killed_with_the_gate_shut(node: Node) -> None:
    """Runner and holder were killed while the reset ran: the gate is in the ledger, and heal opens it by that alone."""
    _, drill = node.engine()
    (node.folder / "hang").touch()
    plan = FAULT.plan(drill, RUN)
    folder, ledger = new_run(node.folder / "runs", plan)
    held = arm(folder, ledger, plan)
    ledger.close()
    held.inject(10.0)
    wait_for(lambda: any("reset" in line for line in node.asked()))
    asleep = [pid for pid in proc.pids() if proc.command_line(pid)[:1] == ["sleep"]]
    (smi,) = [pid for pid in asleep if Path(f"/proc/{pid}/cwd").resolve() == node.folder.resolve()]
    assert len(node.shut()) == 3
    os.kill(held.process_id.pid, signal.SIGKILL)
    wait_for(lambda: not proc.is_same(held.process_id))
    assert node.shut(), "nobody could have opened it"
    os.kill(smi, signal.SIGKILL)  # else it is told as left: something still injects
    held.wait_gone(10.0)
    header = Ledger.create(node.folder / "runs" / "other", {})  # a run that never was armed does not keep it up
    header.close()
    assert heal.heal(node.folder / "runs", finish=lambda *_: None) == []
    assert node.shut() == []


@pytest.mark.heavy
def test_killed_at_any_instant(node: Node) -> None:
    """The holder was killed between any two steps: after heal the gate is off, persistence mode on, no reset runs."""
    node.play({**NODE, "defaults": {**NODE["defaults"], "persistence": 1}})
    (node.folder / "slow").touch()
    root = node.folder / "runs"
    for number in range(6):
        _, drill = node.engine()
        run = f"reset-20261129T2100{number:02d}Z-ab12"
        plan = FAULT.plan(drill, run)
        folder, ledger = new_run(root, plan)
        held = arm(folder, ledger, plan)
        held.inject(10.0)
        time.sleep(0.4 * number)
        os.kill(held.process_id.pid, signal.SIGKILL)
        assert held.wait_gone(30.0)  # a reset under way is not cut off
        ledger.close()
        assert heal.heal(root, finish=lambda *_: None) == [], number
        assert FAULT.left(plan) == []
        assert node.shut() == []
        seen = gpu.find(UUID, gpu.look())
        assert seen is not None
        assert seen.persistence is True, number
        assert not [pid for pid in proc.pids() if "--gpu-reset" in proc.command_line(pid) and UUID in
                    proc.command_line(pid)]  # fmt: skip


@pytest.mark.heavy
def test_through_the_holder(node: Node) -> None:
    """As the runner does it: samples tell how far it is, and revert leaves nothing."""
    engine, drill = node.engine()
    plan = FAULT.plan(drill, RUN)
    folder, ledger = new_run(node.folder / "runs", plan)
    held = arm(folder, ledger, plan, deadline_s=60.0)
    held.inject(10.0)
    wait_for(lambda: any(sample.get("over") for sample in held.samples))
    proven, why = FAULT.proven(plan, held.samples)
    assert proven, why
    assert engine.wait(30) == -signal.SIGKILL
    ledger.write(State.REVERTING)
    assert held.revert(10.0) == []
    ledger.close()
    assert node.shut() == []


# An engine that has a GPU open, whatever else it is.
ON_A_GPU = """
import runpy, sys
held = open(sys.argv.pop(1))
runpy.run_module("tests.drills.streaming_engine", run_name="__main__")
"""


LOADS_S = 20.0  # until a model is loaded: an engine that is back within a second is no page


class Systemd:
    """Starts an engine again when it has ended, as soon as no gate is shut before it."""

    def __init__(self, node: Node, port: int) -> None:
        self.node, self.port = node, port
        self.stopping, self.waited = threading.Event(), False
        self.process = self._start()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ON_A_GPU, str(self.node.dev / "nvidia3"), "--port", str(self.port)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.node.units_of[process.pid] = UNIT
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def _watch(self) -> None:
        while not self.stopping.is_set():
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            while not self.stopping.wait(0.05) and any(name.endswith(".shut") for name in self.node.shut()):
                self.waited = True
            if not self.stopping.wait(LOADS_S):
                self.process = self._start()

    def stop(self) -> None:
        """End it for good."""
        self.stopping.set()
        self.process.kill()
        self.thread.join(30)


@pytest.mark.heavy
def test_a_whole_run(node: Node, free_port: Callable[[], int]) -> None:
    """Real agent, runner and holder: the alert rang, the engine waited behind the gate and came back by itself."""
    ports = [free_port(), free_port()]
    engine = Systemd(node, ports[0])
    node.stack.callback(engine.stop)
    other = subprocess.Popen([sys.executable, "-m", "tests.drills.streaming_engine", "--port", str(ports[1])], cwd=ROOT,
                             stdout=subprocess.PIPE, text=True)
    node.stack.callback(other.wait, 30)
    node.stack.callback(other.kill)
    assert other.stdout is not None
    node.stack.callback(other.stdout.close)
    other.stdout.readline()
    config = {
        "node": "n1", "poll": "1s", "kernel_log": "off", "discover": False,
        "engines": [{"name": name, "url": f"http://127.0.0.1:{port}"} for name, port in zip("ab", ports, strict=True)],
        "rules": {"override": {"engine-down": {"keep": "1s"}}},
        "drill_guards": {"lever_file": str(node.folder / "NO-DRILLS")},
        "drills": [{"name": "reset", "fault": "gpu-reset", "target": {"engine": "a", "gpu": UUID},
                    "params": {"mode": "reset"}, "for": "33s", "baseline": "2s", "recovery": "5s",
                    "resolve_within": "60s",
                    "holds": {"goodput": None, "ttft_p99": None, "itl_p99": None, "error_ratio": None,
                              "restart_within": "60s", "retry_storm": False}}],
    }  # fmt: skip
    with AgentProcess(node.folder / "agent", config) as agent:
        told, rules = load_all(agent.path, {}, CATALOGUE)
        (drill,) = drills_of(told, rules.rules)
        wait_for(lambda: {s["state"] for s in agent.ask("/check")["signals"] if s["rule"] == "engine-down"} == {"OK"})
        folder = runner.create(node.folder / "drills", drill, RUN, started_by="a test", config_path=agent.path)
        run = runner.Run(folder, drill, told, rules.rules)
        verdict = run.execute(accept_unknown_budget=True)
        record = json.loads((folder / "run.json").read_text())
        rows = {row["name"]: (row["verdict"], row["got"]) for row in record["rows"]}
        log = agent.log.read_text()

    assert rows["fault_proven"][0] == "PASS", rows
    held = ("restart", "no_orphans", "as_before", "not_ended_early", "nothing_unexpected", "alarm.engine-down.fired",
            "alarm.engine-down.resolved")  # fmt: skip
    assert [name for name in held if rows[name][0] != "PASS"] == [], rows
    assert verdict == "INCONCLUSIVE", rows  # no receiver that could be asked whether the page arrived
    assert engine.waited
    assert "nvml_released" in log
    assert node.shut() == []
    assert is_clean(read(folder))


# ---- the gate ----

# systemd itself, as a user's manager in namespaces of its own: the gate's units are the same.
SYSTEMD = """
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/user/0 || exit 9
export XDG_RUNTIME_DIR=/run/user/0 SYSTEMD_UNIT_PATH=$1/units SYSTEMD_LOG_TARGET=null
mkdir -p $1/units
printf '[Service]\\nExecStart=/bin/sleep 1000\\nRestart=always\\nRestartSec=100ms\\n' > $1/units/vllm.service
for t in basic shutdown exit default; do printf '[Unit]\\nDefaultDependencies=no\\n' > $1/units/$t.target; done
/lib/systemd/systemd --user </dev/null >/dev/null 2>&1 &
for i in $(seq 300); do systemctl --user start vllm.service 2>/dev/null && break; sleep 0.1; done
exec "$2" -m tests.drills.test_gpu_reset "$1"
"""


@pytest.mark.heavy
def test_the_gate_before_a_real_systemd(tmp_path: Path) -> None:
    """The service was killed, waited, and systemd alone started it when the gate went; without anyone, at its time."""
    need("root", "systemctl", "unshare")
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SYSTEMD, "sh"]
    done = subprocess.run([*command, str(tmp_path), sys.executable], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, check=False, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["waits", "starts", "nothing-left", "starts-by-itself"]


def play_before_systemd(folder: Path) -> None:
    """Inside those namespaces."""
    units = folder / "units"
    real = find("systemctl")
    (folder / "systemctl").write_text(f'#!/bin/sh\nexec {real} --user "$@"\n')
    (folder / "systemctl").chmod(0o755)

    def main_pid() -> int:
        told = subprocess.run(["systemctl", "show", UNIT, "-p", "MainPID", "--value"], capture_output=True, text=True,
                              check=True)
        return int(told.stdout)

    for at_most_s, open_it in ((60.0, True), (2.0, False)):
        shut = Gate(f"{RUN}-{open_it}", UNIT, units)
        gate.shut(shut, at_most_s)
        before = main_pid()
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: main_pid() == 0)
        if open_it:
            time.sleep(1.0)
            print("waits" if main_pid() == 0 else "does not wait")
            gate.open_again(shut)
        wait_for(lambda before=before: main_pid() not in {0, before})  # type: ignore[misc]
        if not open_it:
            print("starts-by-itself")
            return
        print("starts")
        print("nothing-left" if not gate.left(shut) and not shut.drop_in.parent.exists() else "something is left")


# ---- synthetic ----


def test_a_line_is_announced_and_then_written(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hears of exactly this line first; nothing is done to the GPU."""
    told: list[tuple[Path, str, float]] = []

    def expect(path: Path, line: str, for_s: float) -> dict[str, Any]:
        assert line not in node.kmsg.read_text()
        told.append((path, line, for_s))
        return {"expected": True}

    monkeypatch.setattr(client, "expect_kernel_line", expect)
    plan = FAULT.plan(node.drill("synthetic"), RUN)
    for which, number in (("line", 163), ("end", 162)):
        words = rf"NVRM: Xid \(PCI:0000:1a:00\): {number}, pid=\d+, name=tocsin, drill {RUN} mark [0-9a-f]{{16}}"
        assert re.fullmatch(words, plan.facts[which])
    assert (plan.expects, plan.restarts, plan.blast) == (XID_RULES, False, {"replicas": 0})
    held = FAULT.inject(plan, ())
    assert told == [(node.socket, plan.facts["line"], 10.0)]
    assert node.kmsg.read_text() == f"<4>{plan.facts['line']}\n"
    assert FAULT.proven(plan, [held.sample()]) == (True, f"the line is in the kernel's log: {plan.facts['line']}")
    held.undo()
    held.undo()
    FAULT.undo(plan)
    assert told[1:] == [(node.socket, plan.facts["end"], 10.0)]
    assert node.kmsg.read_text().splitlines() == [f"<4>{plan.facts['line']}", f"<4>{plan.facts['end']}"]
    assert FAULT.left(plan) == []
    assert node.asked() == []
    assert FAULT.plan(node.drill("synthetic"), RUN).facts["mark"] != plan.facts["mark"]


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["no agent", "not read"])
def test_nothing_is_written_that_the_agent_was_not_told(node: Node, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """To an agent that knows nothing of it, the line is a forgery."""
    plan = FAULT.plan(node.drill("synthetic"), RUN)
    if how == "not read":
        monkeypatch.setattr(client, "expect_kernel_line", lambda *_: {"expected": False})
    said = "cannot be told of the line" if how == "no agent" else "does not read the kernel's log"
    with pytest.raises(Refused, match=said):
        FAULT.inject(plan, ())
    assert node.kmsg.read_text() == ""


@pytest.mark.heavy
def test_other_watchers_of_the_log_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSentinel saw the drill's line, and drained the node."""
    name = f"gpud{os.getpid()}"  # of this test: others may run beside it
    monkeypatch.setattr(xid_line, "WATCHERS", {name: "gpud"})
    words = [f"/opt/x/{name}", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(words, executable=sys.executable) as other:
        wait_for(lambda: proc.command_line(other.pid)[:1] == words[:1])
        with pytest.raises(Refused, match=rf"{name} \(pid {other.pid}\) would act on the line"):
            FAULT.plan(node.drill("synthetic"), RUN)
        FAULT.plan(node.drill("synthetic", other_watchers_ok=["gpud"]), RUN)
        other.kill()
    FAULT.plan(node.drill("synthetic"), RUN)


@pytest.mark.heavy
def test_a_log_that_cannot_be_written(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod there is no /dev/kmsg."""
    monkeypatch.setattr(xid_line, "KMSG", node.folder / "no" / "kmsg")
    with pytest.raises(Refused, match="cannot be written: this needs root"):
        FAULT.plan(node.drill("synthetic"), RUN)


if __name__ == "__main__":
    play_before_systemd(Path(sys.argv[1]))
