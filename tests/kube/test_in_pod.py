"""A fault in one pod of a selector: whose process, whose namespace, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drills import gpu, in_pod, nft, proc
from drills.cluster import uid_of
from drills.faults.packet_loss import FAULT as LOSS
from drills.faults.process_kill import FAULT as KILL
from drills.model import Drill, Refused
from tests.drills.netns import NEEDS, lab
from tests.drills.stand_ins import arm, new_run, streaming, wait_for
from tests.kube.scene import SELECTOR, Api
from tests.needs import need

RUN = "loss-20261129T120000Z-ab12"


class Cgroups:
    """Which pod a process belongs to, as the kubelet would have it in /proc/PID/cgroup."""

    def __init__(self) -> None:
        self.pods: dict[int, str] = {}

    def of(self, pid: int) -> str:
        """Of a process."""
        uid = self.pods.get(pid, "")
        slice_ = f"kubepods-pod{uid.replace('-', '_')}.slice"
        return f"0::/kubepods.slice/{slice_}/cri-containerd-77.scope\n" if uid else "0::/system.slice/x.service\n"


@pytest.fixture
def cgroups(monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    """No process of ours is in a pod: this says which are."""
    made = Cgroups()
    monkeypatch.setattr(gpu, "cgroups_of", made.of)
    return made


@pytest.fixture
def pause(tmp_path: Path) -> Path:
    """A program whose process is called as a sandbox's."""
    program = tmp_path / "pause"
    program.symlink_to(shutil.which("sleep") or "/bin/sleep")
    return program


@pytest.fixture
def engine(free_port: Callable[[], int]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An engine, and its port."""
    port = free_port()
    with streaming(port) as process:
        yield process, port


def drill(api: Api, fault: str = "process-kill", **target: Any) -> Drill:
    """A drill on a pod."""
    return Drill("d", fault, target={"namespace": api.namespace, "selector": SELECTOR, "node": "n1", **target})


def test_a_process_of_a_pod(api: Api, cgroups: Cgroups, engine: tuple[subprocess.Popen[str], int]) -> None:
    """Six engines on a node listen on port 8000, each in its pod: the drill is on the one that was chosen."""
    process, port = engine
    pod = api.pod("a", annotations={"tocsin.dev/port": str(port)})
    api.pod("b", node="n2")
    cgroups.pods = {process.pid: uid_of(pod)}
    found = in_pod.resolve(drill(api), RUN)
    assert found.target["pid"] == process.pid
    assert found.target["url"] == f"http://127.0.0.1:{port}"
    plan = in_pod.counted(KILL.plan(found, RUN), found)
    assert plan.targets[0] == f"pod {api.namespace}/a (uid {uid_of(pod)})"
    assert (plan.facts["ready"], plan.blast) == (2, {"replicas": 1, "of": 2})


def test_who_is_not_aimed_at(api: Api, cgroups: Cgroups, engine: tuple[subprocess.Popen[str], int]) -> None:
    """Another node's pod, one whose processes are not to be seen, one that listens elsewhere: each says so."""
    process, _ = engine
    with pytest.raises(Refused, match=r"no pod with app=vllm to be had on node n1 \(0 elsewhere\)"):
        in_pod.resolve(drill(api), RUN)
    pod = api.pod("a", annotations={"tocsin.dev/port": "9"})
    with pytest.raises(Refused, match="on node n9"):
        in_pod.resolve(drill(api, node="n9"), RUN)
    with pytest.raises(Refused, match=r"no process of pod .*/a is to be seen here: is this its node, with hostPID"):
        in_pod.resolve(drill(api), RUN)
    cgroups.pods = {process.pid: uid_of(pod)}
    with pytest.raises(Refused, match=r"no process of pod .*/a listens on port 9; annotate tocsin\.dev/port"):
        in_pod.resolve(drill(api), RUN)
    other = api.make_namespace(f"{api.namespace}-other", opted_in=False)
    with pytest.raises(Refused, match="has not opted in"):
        in_pod.resolve(drill(api, namespace=other), RUN)


def test_a_drill_on_no_pod_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kubernetes nothing is asked of it."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    plain = Drill("d", "process-kill", target={"port": 8000})
    assert in_pod.resolve(plain, RUN) is plain
    with pytest.raises(Refused, match="no Kubernetes here"):
        in_pod.resolve(Drill("d", "process-kill", target={"namespace": "llm", "selector": "app=vllm"}), RUN)


@pytest.mark.heavy
def test_a_container_that_restarts_under_the_loss(api: Api, cgroups: Cgroups, pause: Path, tmp_path: Path) -> None:
    """The liveness probe killed the lossy engine, and the rules were looked for in the namespace of a dead process."""
    for name in NEEDS:
        need(name)
    with lab() as net:
        client, inside = net.namespace("client"), net.namespace("engine")
        net.link(client, "10.77.3.1/24", inside, "10.77.3.2/24")
        sandbox = net.start(inside, str(pause), "600")
        first = net.start(inside, sys.executable, "-m", "tests.drills.streaming_engine", "--port", "8000")
        assert first.stdout is not None
        first.stdout.readline()
        pod = api.pod("a", ip="10.77.3.2")
        cgroups.pods = {sandbox.pid: uid_of(pod), first.pid: uid_of(pod)}
        found = in_pod.resolve(drill(api, "packet-loss"), RUN)
        assert (found.target["netns"], found.target["pid"]) == (sandbox.pid, first.pid)
        plan = LOSS.plan(found, RUN)
        assert plan.facts["places"][0]["place"]["path"] == f"/proc/{sandbox.pid}/ns/net"
        assert plan.facts["places"][0]["place"]["inode"] == proc.netns_of(sandbox.pid)
        folder, ledger = new_run(tmp_path / "runs", plan)
        held = arm(folder, ledger, plan, 60.0)
        ledger.close()
        held.inject(15.0)
        assert nft.PREFIX in inside.ruleset()
        first.kill()
        first.wait()
        wait_for(lambda: len(held.samples) >= 3)
        assert nft.PREFIX in inside.ruleset()
        assert held.revert(15.0) == []
        assert nft.PREFIX not in inside.ruleset()
        assert nft.PREFIX not in client.ruleset()
