"""K1: replicas that are asked for and not Ready, as the status of a workload tells, but for rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from agent.config import Config
from agent.daemon import sources_of, without_api
from agent.model import Batch, Gap, Sample
from agent.node import Node, Setup
from agent.sources.workloads import (
    Replicas,
    WorkloadsSource,
    is_watched,
    of_daemonset,
    of_deployment,
    of_statefulset,
    slim,
)
from drills.cluster import MERGE, path_of
from drills.model import announces
from rules import severity_of
from tests.kube.scene import LABELS, Api
from tests.receiver import wait_until
from tests.scenes import SLO, T0, built_in

LONG_S = 60.0
GENERATION = 7


def deployment(wished: int | None = 3, *, reason: str | None = "NewReplicaSetAvailable", status: str = "True",
               generation: int = GENERATION, **counts: int) -> dict[str, Any]:
    """A Deployment whose controller has seen GENERATION."""
    conditions = [] if reason is None else [{"type": "Progressing", "status": status, "reason": reason}]
    return {"metadata": {"generation": generation}, "spec": {} if wished is None else {"replicas": wished},
            "status": {"observedGeneration": GENERATION, "conditions": conditions, **counts}}


@pytest.mark.parametrize(
    ("story", "told", "want"),
    [
        ("all there", deployment(3, replicas=3, updatedReplicas=3, readyReplicas=3), (3, 3, False)),
        ("a pod was killed", deployment(3, replicas=3, updatedReplicas=3, readyReplicas=2), (3, 2, False)),
        ("none is Ready: the API leaves the 0 out", deployment(3, replicas=3, updatedReplicas=3), (3, 0, False)),
        ("nobody wrote replicas: 1", deployment(None, replicas=1, updatedReplicas=1), (1, 0, False)),
        ("scaled to nothing", deployment(0), (0, 0, False)),
        ("a new template", deployment(3, reason="ReplicaSetUpdated", replicas=4, updatedReplicas=1, readyReplicas=2),
         (3, 2, True)),
        ("its controller has not seen it yet", deployment(3, generation=8, readyReplicas=2), (3, 2, True)),
        ("given up after 10 min", deployment(3, reason="ProgressDeadlineExceeded", status="False", replicas=4,
                                             updatedReplicas=1, readyReplicas=2), (3, 2, False)),
        ("paused half-way", deployment(3, reason="DeploymentPaused", status="Unknown", replicas=4, updatedReplicas=1,
                                       readyReplicas=2), (3, 2, False)),
        ("without a deadline, rolling", deployment(3, reason=None, replicas=4, updatedReplicas=2, readyReplicas=2),
         (3, 2, True)),
        ("without a deadline, done", deployment(3, reason=None, replicas=3, updatedReplicas=3, readyReplicas=2),
         (3, 2, False)),
    ],
)  # fmt: skip
def test_a_deployment(story: str, told: dict[str, Any], want: tuple[int, int, bool]) -> None:
    """Desired, Ready, and whether a rollout progresses: as its controller writes it."""
    assert of_deployment(told) == Replicas(*want), story


@pytest.mark.parametrize(
    ("story", "strategy", "status", "want"),
    [
        ("all there", {}, {"readyReplicas": 4, "updatedReplicas": 4}, (4, 4, False)),
        ("one is gone", {}, {"readyReplicas": 3, "updatedReplicas": 4}, (4, 3, False)),
        ("rolling", {}, {"readyReplicas": 3, "updatedReplicas": 1, "updateRevision": "b"}, (4, 3, True)),
        ("as far as its partition lets it", {"type": "RollingUpdate", "rollingUpdate": {"partition": 3}},
         {"readyReplicas": 3, "updatedReplicas": 1, "updateRevision": "b"}, (4, 3, False)),
        ("changed by hand, pod by pod", {"type": "OnDelete"},
         {"readyReplicas": 3, "updatedReplicas": 0, "updateRevision": "b"}, (4, 3, False)),
    ],
)
def test_a_statefulset(story: str, strategy: dict[str, Any], status: dict[str, Any],
                       want: tuple[int, int, bool]) -> None:
    """Revisions differ for ever under a partition: that is no rollout that progresses."""
    told = {"metadata": {}, "spec": {"replicas": 4, "updateStrategy": strategy},
            "status": {"currentRevision": "a", "updateRevision": "a", **status}}
    assert of_statefulset(told) == Replicas(*want), story


@pytest.mark.parametrize(
    ("updated", "ready", "strategy", "want"),
    [(5, 5, {}, (5, 5, False)), (5, 4, {}, (5, 4, False)), (2, 4, {}, (5, 4, True)),
     (2, 4, {"type": "OnDelete"}, (5, 4, False))],
)
def test_a_daemonset(updated: int, ready: int, strategy: dict[str, Any], want: tuple[int, int, bool]) -> None:
    """One engine a node."""
    status = {"desiredNumberScheduled": 5, "updatedNumberScheduled": updated, "numberReady": ready}
    assert of_daemonset({"metadata": {}, "spec": {"updateStrategy": strategy}, "status": status}) == Replicas(*want)


@pytest.mark.parametrize(
    ("container", "annotations", "want"),
    [
        ({"command": ["vllm", "serve", "m"]}, {}, True),
        ({"image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}, {}, True),  # a Ray worker of an engine
        ({"image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}, {"tocsin.dev/engine": "false"}, False),
        ({"image": "nginx", "ports": [{"containerPort": 80}]}, {}, False),
    ],
)
def test_which_workloads_are_watched(container: dict[str, Any], annotations: dict[str, str], want: bool) -> None:
    """A ticket for the replicas of a web shop was nobody's here."""
    thing = {"metadata": {"namespace": "a", "name": "b", "uid": "u"}, "spec": {"template": {
        "metadata": {"annotations": annotations}, "spec": {"containers": [container]}}}}
    assert is_watched(thing) is want
    assert is_watched(slim(thing)) is want


# ---- the rule ----


def play(steps: list[tuple[int, int, bool]], every_s: float = 5.0) -> list[tuple[float, str]]:
    """(desired, ready, rollout) at each step; when the rule fired and resolved, in seconds."""
    node = Node(Setup("cluster", every_s, SLO, (), (built_in()["replicas-missing"],), severity_of))
    seen: list[tuple[float, str]] = []
    for number, told in enumerate(steps):
        now = T0 + number * every_s
        names = ("replicas_desired", "replicas_ready", "rollout")
        readings = tuple(Sample(name, "llm/vllm", float(value), now) for name, value in zip(names, told, strict=True))
        node.take(Batch("workloads", now, 0.0, readings, workloads=("llm/vllm",)))
        for change in node.step(now, every_s if number else 0.0):
            if change.kind in ("firing", "resolved"):
                seen.append((number * every_s, change.kind))
                assert change.alert.severity == "ticket"
                assert change.alert.labels == {"alertname": "ReplicasMissing", "rule": "replicas-missing",
                                               "number": "K1", "subject": "llm/vllm", "severity": "ticket"}
                assert "2 of 3 replicas are Ready" in change.alert.annotations["summary"]
    return seen


@pytest.mark.parametrize(
    ("story", "steps", "want"),
    [
        ("missing for 30 s, back for 30 s", [(3, 2, False)] * 8 + [(3, 3, False)] * 8,
         [(30.0, "firing"), (70.0, "resolved")]),
        ("back within 30 s", [(3, 2, False)] * 5 + [(3, 3, False)] * 8, []),
        ("a rollout", [(3, 2, True)] * 20, []),
        ("a rollout that was given up", [(3, 2, True)] * 20 + [(3, 2, False)] * 8, [(130.0, "firing")]),
    ],
)
def test_replicas_missing(story: str, steps: list[tuple[int, int, bool]], want: list[tuple[float, str]]) -> None:
    """A ticket without `node`: it is the cluster's, whichever agent tells it."""
    assert play(steps) == want, story


def test_a_pod_kill_announces_it() -> None:
    """The ticket of a drill was taken for a finding."""
    assert "replicas-missing" in announces("pod-kill", None)


def test_cluster_rules_without_a_cluster_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured, and nothing was ever told: one agent has it, where there is an API."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    config = Config(cluster_rules=True, nvml="off", kernel_log="off")
    assert "replicas-missing is N/A" in without_api(config)[0]
    assert sources_of(config, {}) == []
    assert without_api(Config()) == []
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    assert without_api(config) == []
    assert [source.name for source in sources_of(config, {})] == ["workloads"]


# ---- with an API ----


def test_what_the_api_tells(api: Api) -> None:
    """A Deployment of engines, its status as its controller writes it, and no web shop."""
    if api.controlled:
        pytest.skip("its own controller writes the status")
    for name, image in (("vllm", "example.invalid/vllm"), ("shop", "example.invalid/shop")):
        container = {"name": "c", "image": image, "ports": [{"containerPort": 8080}]}
        labels = {**LABELS, "app": name}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        api.post("apps", "deployments", {"metadata": {"name": name}, "spec": {
            "replicas": 3, "selector": {"matchLabels": labels}, "template": template}}, "Deployment")
    subject, path = f"{api.namespace}/vllm", f"{path_of('apps', 'v1', 'deployments', api.namespace, 'vllm')}/status"

    def report(ready: int) -> None:
        status = {"observedGeneration": 1, "replicas": 3, "updatedReplicas": 3, "readyReplicas": ready,
                  "conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]}
        api.cluster.ask("PATCH", path, body={"status": status}, headers=MERGE)

    def told(source: WorkloadsSource) -> dict[str, float | None]:
        batch = source.read(T0)
        assert all(f"{api.namespace}/shop" != name for name in batch.workloads or ())
        return {r.name: None if isinstance(r, Gap) else r.value for r in batch.readings if r.subject == subject}

    report(2)
    source = WorkloadsSource(again_s=0.2, watch_s=1.0)
    try:
        wait_until(lambda: subject in (source.read(T0).workloads or ()), LONG_S, "the first lists")
        assert told(source) == {"replicas_desired": 3.0, "replicas_ready": 2.0, "rollout": 0.0}
        report(3)
        wait_until(lambda: told(source)["replicas_ready"] == 3.0, LONG_S, "the change")
        if api.stand_in is not None:
            api.stand_in.fail_next(403, "Forbidden", "deployments is forbidden", times=9999, of="GET /apis/apps/v1/dep")
            wait_until(lambda: told(source)["replicas_ready"] is None, LONG_S, "that nothing is known")
            assert "overlays/cluster-rules" in (source.read(T0).error or "")
    finally:
        source.close()
        for name in ("vllm", "shop"):
            api.cluster.ask("DELETE", path_of("apps", "v1", "deployments", api.namespace, name))
