"""gpu-reset on a node of Kubernetes: cordoned, evicted, reset, and uncordoned whatever became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drills.cluster import CORDONED, MERGE, OPT_IN, labels_or, path_of, uid_of
from drills.faults import gpu_reset
from drills.faults.gpu_reset import FAULT, OPT_IN_LABEL
from drills.model import Drill, Refused
from tests.drills.gpu_scene import DONE, ENGINE, IN_USE, NODE, PARTIAL, STRANGER, UUID, Node
from tests.drills.stand_ins import wait_for
from tests.kube.scene import Api
from tests.needs import need

RUN = "reset-20261129T210000Z-ab12"


class Scene:
    """A node with a GPU, on it a pod whose engine holds it; a kubelet that ends what is evicted."""

    def __init__(self, api: Api, node: Node) -> None:
        self.api, self.node = api, node
        self.name = api.node()
        self.label(OPT_IN_LABEL, "allowed")
        self.pod = api.pod(node=self.name, grace_s=1)
        self.engine, _ = node.start(ENGINE)
        node.pods_of[self.engine.pid] = uid_of(self.pod)
        self.stop = threading.Event()
        self.kubelet = threading.Thread(target=self._kubelet, daemon=True)
        self.kubelet.start()

    def _kubelet(self) -> None:
        meta = self.pod["metadata"]
        while not self.stop.wait(0.05):
            now = self.api.cluster.pod(meta["namespace"], meta["name"])
            if now is None or now["metadata"].get("deletionTimestamp"):
                self.engine.kill()
                self.api.gone(self.pod)
                return

    def drill(self) -> Drill:
        """As drills.config makes it."""
        return self.node.drill(node=self.name)

    def label(self, key: str, value: str | None) -> None:
        """A label of the node."""
        self.patch({"metadata": {"labels": {key: value}}})

    def patch(self, change: dict[str, Any]) -> None:
        """Change the node as somebody else would."""
        self.api.cluster.ask("PATCH", path_of("", "v1", "nodes", None, self.name), body=change, headers=MERGE)

    def cordoned(self) -> tuple[bool, str | None]:
        """Whether the node is, and by whom."""
        found = self.api.cluster.node(self.name)
        assert found is not None
        return bool(found["spec"].get("unschedulable")), labels_or(found, "annotations").get(CORDONED)


@pytest.fixture
def scene(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """One of them."""
    need("gcc", "make")
    (tmp_path / "node").mkdir()
    with ExitStack() as stack:
        node = Node(tmp_path / "node", monkeypatch, stack)
        made = Scene(api, node)
        try:
            yield made
        finally:
            made.stop.set()
            made.kubelet.join(30)


def run(scene: Scene, during: Callable[[], object] = lambda: None) -> tuple[bool, str]:
    """Inject, wait for its end, undo: proof and sentence."""
    plan = FAULT.plan(scene.drill(), RUN)
    held = FAULT.inject(plan, ())
    during()
    wait_for(lambda: bool(held.sample().get("over")))
    samples = [held.sample()]
    held.undo()
    FAULT.undo(plan)
    assert FAULT.left(plan) == []
    return FAULT.proven(plan, samples)


def test_cordoned_evicted_reset_uncordoned(scene: Scene) -> None:
    """The replacement must not come to a node whose GPU is just being reset; afterwards it may."""
    plan = FAULT.plan(scene.drill(), RUN)
    meta = scene.pod["metadata"]
    assert [command.text for command in plan.commands] == [
        "POST /nvml/release", f"kubectl cordon {scene.name}", f"evict {meta['namespace']}/{meta['name']}",
        f"nvidia-smi --gpu-reset -i {UUID}",
    ]  # fmt: skip
    assert plan.undo[0].text == f"kubectl uncordon {scene.name} && kubectl annotate node {scene.name} {CORDONED}-"
    assert scene.cordoned() == (False, None)
    seen: list[tuple[bool, str | None]] = []

    def look() -> None:
        wait_for(lambda: scene.cordoned()[0])
        seen.append(scene.cordoned())

    proven, why = run(scene, look)
    assert proven, why
    assert seen == [(True, RUN)]
    assert scene.cordoned() == (False, None)
    assert scene.engine.wait(30) < 0
    assert scene.node.shut() == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("status", "text", "after", "said"),
    [
        (255, IN_USE, None, "not reset: in_use (exit 255)"),
        (15, PARTIAL, None, "not reset: driver (exit 15)"),
        (0, "", None, "not reset: unknown (exit 0)"),
        (None, "", None, "not reset: hang (exit None)"),
        (0, DONE, {**NODE, "gpus": NODE["gpus"][::-1]}, "back at index 1 (was 0)"),
        (0, DONE, {**NODE, "gpus": NODE["gpus"][1:]}, f"NVML does not list {UUID}"),
    ],
    ids=["in use", "partial", "silent", "hang", "another index", "not back"],
)
def test_each_ending_of_a_reset_uncordons(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, status: int | None, text: str, after: Any, said: str
) -> None:
    """The drill failed, and the node was out of the cluster until Monday."""
    monkeypatch.setattr(gpu_reset, "BACK_WITHIN_S", 1.0)
    if status is None:
        monkeypatch.setattr(gpu_reset, "RESET_WITHIN_S", 1.0)
        (scene.node.folder / "hang").touch()
    else:
        scene.node.answers(status, text, after)
    proven, why = run(scene)
    assert proven is ("back at" in said)
    assert said in why
    assert len([line for line in scene.node.asked() if "reset" in line]) == 1
    assert scene.cordoned() == (False, None)


@pytest.mark.heavy
def test_an_eviction_that_a_budget_refuses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas needed, two there: nothing is killed, and the reason has the budget's name."""
    monkeypatch.setattr(gpu_reset, "EVICTED_WITHIN_S", 1.0)
    scene.api.budget("two-of-two", 0)
    proven, why = run(scene)
    assert not proven
    assert "was not evicted: blocked_by_pdb" in why
    assert "two-of-two" in why
    assert scene.engine.poll() is None
    assert scene.cordoned() == (False, None)
    assert not [line for line in scene.node.asked() if "reset" in line]


@pytest.mark.heavy
def test_a_node_that_somebody_had_cordoned_stays_so(scene: Scene) -> None:
    """The drill uncordoned a node that was out for repair."""
    scene.patch({"spec": {"unschedulable": True}})
    assert run(scene)[0]
    assert scene.cordoned() == (True, None)


@pytest.mark.heavy
def test_healed_from_the_ledger_alone(scene: Scene) -> None:
    """Everything died after the cordon: the plan names the node, and heal takes off what is ours."""
    plan = FAULT.plan(scene.drill(), RUN)
    scene.api.cluster.cordon(scene.name, RUN)
    (left,) = FAULT.left(plan)
    assert left.what == f"node {scene.name} is cordoned by this run"
    FAULT.undo(plan)
    FAULT.undo(plan)
    assert FAULT.left(plan) == []
    assert scene.cordoned() == (False, None)


@pytest.mark.heavy
def test_an_api_that_is_silent_is_not_clean(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say whether the node is cordoned: that is left, with the command."""
    plan = FAULT.plan(scene.drill(), RUN)
    monkeypatch.delenv("KUBECONFIG")
    (left,) = FAULT.left(plan)
    assert "may be cordoned: no Kubernetes here" in left.what
    assert left.command.startswith(f"kubectl uncordon {scene.name}")


@pytest.mark.heavy
def test_who_has_not_opted_in(scene: Scene) -> None:
    """The node, then the namespace; a pod that nobody would bring back; a second pod on the GPU."""
    scene.label(OPT_IN_LABEL, None)
    with pytest.raises(Refused, match=f"kubectl label node {scene.name} {OPT_IN_LABEL}=allowed"):
        FAULT.plan(scene.drill(), RUN)
    scene.label(OPT_IN_LABEL, "allowed")
    path = path_of("", "v1", "namespaces", None, scene.api.namespace)
    scene.api.cluster.ask("PATCH", path, body={"metadata": {"labels": {OPT_IN: None}}}, headers=MERGE)
    with pytest.raises(Refused, match=f"namespace {scene.api.namespace} has not opted in"):
        FAULT.plan(scene.drill(), RUN)
    scene.api.cluster.ask("PATCH", path, body={"metadata": {"labels": {OPT_IN: "true"}}}, headers=MERGE)
    FAULT.plan(scene.drill(), RUN)
    alone = scene.api.pod(node=scene.name, owned=False)
    scene.node.pods_of[scene.engine.pid] = uid_of(alone)
    with pytest.raises(Refused, match="would not come back elsewhere: its owner is nobody"):
        FAULT.plan(scene.drill(), RUN)
    scene.node.pods_of[scene.engine.pid] = uid_of(scene.pod)
    exporter, _ = scene.node.start(STRANGER)
    scene.node.pods_of[exporter.pid] = uid_of(alone)
    with pytest.raises(Refused, match=rf"2 pods hold the GPU \(.*{scene.api.namespace}/{alone['metadata']['name']}"):
        FAULT.plan(scene.drill(), RUN)
    del scene.node.pods_of[exporter.pid]
    with pytest.raises(Refused, match=f"held by what is not ours: process {exporter.pid} "):
        FAULT.plan(scene.drill(), RUN)


@pytest.mark.heavy
def test_a_cluster_that_does_not_know_the_node(scene: Scene) -> None:
    """A NODE_NAME that was never set."""
    drill = scene.drill()
    with pytest.raises(Refused, match="Kubernetes does not know node n-nowhere"):
        FAULT.plan(replace(drill, target={**drill.target, "node": "n-nowhere"}), RUN)


