"""What a pod tells a drill: the kubernetes cases of the public list, and those beside them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from drills import pods
from drills.cluster import OPT_IN

NOW = datetime.fromisoformat("2026-11-29T12:00:00Z").timestamp()
VLLM = "ReplicaSet/vllm"
OWNER = {"kind": "ReplicaSet", "name": "vllm", "uid": "rs-1", "controller": True}


def pod(name: str, *, uid: str = "", phase: str = "Running", ready: bool = False, owners: Any = (OWNER,),
        spec: Any = None, **meta: Any) -> dict[str, Any]:
    """A pod as the API gives it."""
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {"metadata": {"name": name, "namespace": "llm", "uid": uid or f"u-{name}", "ownerReferences": list(owners),
                         **meta},
            "spec": spec or {"containers": [{"ports": [{"containerPort": 8000}]}]},
            "status": {"phase": phase, "conditions": [condition], "podIP": "10.0.0.7"}}


def test_c088_a_pod_that_is_stuck_in_terminating() -> None:
    """C088: one that had been terminating for an hour was chosen as victim, and the drill proved that it was gone."""
    stuck = pod("a", ready=True, deletionTimestamp="2026-11-29T11:00:00Z", deletionGracePeriodSeconds=30,
                finalizers=["x/y"])
    found = [stuck, pod("b", ready=True), pod("c", phase="Succeeded"), pod("d", phase="Pending")]

    victim, spared = pods.choose(found, NOW, "run-1")

    assert victim is not None
    assert pods.name_of(victim) == "b"
    assert spared == {"a": "stuck_terminating, overdue by 3600 s, finalizer x/y", "c": "it is Succeeded",
                      "d": "it is Pending"}
    assert not pods.is_ready(stuck)


def test_c091_a_replacement_that_never_gets_ready() -> None:
    """C091: the Deployment had its two pods, and one of them waited for the GPU that the old one held."""
    found = [pod("vllm-1", uid="u-1", deletionTimestamp="2026-11-29T11:59:00Z"), pod("vllm-2", uid="u-2", ready=True),
             pod("vllm-3", uid="u-3", phase="Pending")]
    found[2]["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    event = {"type": "Warning", "message": "Insufficient nvidia.com/gpu", "involvedObject": {"uid": "u-3"}}

    said = pods.why_not_back(found, "u-1", ["u-1", "u-2"], VLLM, [event])

    assert said == ("replacement vllm-3 (u-3) not ready: Insufficient nvidia.com/gpu; vllm-1 (u-1) still terminating")
    assert "ContainerCreating" in pods.why_not_back(found, "u-1", ["u-1", "u-2"], VLLM)
    assert pods.why_not_back(found[:2], "u-1", ["u-1", "u-2"], VLLM).startswith("no replacement was made; vllm-1")
    assert pods.why_not_back([*found[1:2], pod("vllm-3", uid="u-3", ready=True)], "u-1", ["u-1", "u-2"], VLLM) == ""


def test_what_a_replacement_waits_for_now() -> None:
    """It had waited for a GPU, had got one, and its image could not be pulled: the report named the GPU."""
    new = pod("vllm-3", uid="u-3", phase="Pending")
    about = {"type": "Warning", "involvedObject": {"uid": "u-3"}}
    events: list[dict[str, Any]] = [
        {**about, "reason": "FailedScheduling", "message": "Insufficient nvidia.com/gpu", "lastTimestamp": None,
         "eventTime": "2026-11-29T11:59:00.000000Z"},
        {**about, "reason": "FailedMount", "message": "no such volume", "lastTimestamp": "2026-11-29T11:59:30Z"},
        {**about, "reason": "Failed", "message": "Failed to pull image", "lastTimestamp": "2026-11-29T11:59:50Z"},
    ]

    assert "Failed to pull image" in pods.why_not_back([new], "u-1", [], VLLM, events)
    assert "Insufficient nvidia.com/gpu" in pods.why_not_back([new], "u-1", [], VLLM, events[:1])
    new["status"] |= {"conditions": [{"type": "PodScheduled", "status": "True"}], "initContainerStatuses": [
        {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}}]}
    assert "CrashLoopBackOff: back-off 5m0s" in pods.why_not_back([new], "u-1", [], VLLM, events[:1])


def test_replacements_that_the_kubelet_does_not_take() -> None:
    """k8s-device-plugin#231: a lost GPU failed one new pod after the other, 12,000 of them, each with its reason."""
    failed = [pod(f"vllm-{n}", uid=f"u-{n}", phase="Failed") for n in range(3, 9)]
    for one in failed:
        one["status"] |= {"reason": "UnexpectedAdmissionError",
                          "message": "Allocate failed: no healthy devices present"}

    said = pods.why_not_back(failed, "u-1", ["u-1"], VLLM)

    assert said.startswith("replacement vllm-3 (u-3) not ready: UnexpectedAdmissionError: Allocate failed: no healthy")
    assert said.endswith("replacement vllm-5 (u-5) not ready: UnexpectedAdmissionError: Allocate failed: no healthy"
                         " devices present; and 3 more")
    waits = pod("vllm-9", uid="u-9", phase="Pending")
    assert pods.newcomers([*failed, waits], ["u-1"], VLLM)[0] is waits


def test_pods_that_have_ended_are_no_replicas() -> None:
    """Ten that the kubelet had evicted long ago stood beside two: at least six of twelve had to be healthy."""
    evicted = [pod(f"old-{n}", phase="Failed") for n in range(10)]
    live = [pod("a", ready=True), pod("b", ready=True), pod("c", phase="Pending")]
    leaving = pod("d", ready=True, deletionTimestamp="2026-11-29T12:00:20Z")

    assert pods.standing([*evicted, *live, pod("job", phase="Succeeded"), leaving]) == live


def test_a_name_that_comes_back_is_another_pod() -> None:
    """C089: llm-0 of a StatefulSet came back as llm-0, and the drill took the old one for the new one."""
    old, new = pod("llm-0", uid="u-1", ready=True), pod("llm-0", uid="u-2", ready=True)
    assert pods.newcomers([old], ["u-1"], VLLM) == []
    assert pods.newcomers([new], ["u-1"], VLLM) == [new]


def test_another_workload_s_pod_replaces_nothing() -> None:
    """The selector chose the canary's pods as well: one that was scaled up stood for the pod that never came back."""
    canary = pod("canary-1", ready=True, owners=({**OWNER, "name": "canary"},))
    assert pods.newcomers([canary], [], VLLM) == []
    assert pods.why_not_back([canary], "u-1", ["u-1"], VLLM) == "no replacement was made"
    rolled = [pod(f"vllm-{hash_}-x", labels={"pod-template-hash": hash_}, owners=({**OWNER, "name": f"vllm-{hash_}"},))
              for hash_ in ("5d9c", "77fb")]  # fmt: skip
    assert {pods.workload_of(one) for one in rolled} == {VLLM}


@pytest.mark.parametrize(
    ("spared", "why"),
    [
        (pod("a", ready=True, owners=()), "no controller owns it"),
        (pod("a", ready=True, owners=({**OWNER, "controller": False},)), "no controller owns it"),
        (pod("a", ready=True, owners=({"kind": "Node", "name": "n1", "controller": True},)), "a mirror pod"),
        (pod("a", ready=True, annotations={"kubernetes.io/config.mirror": "x"}), "a mirror pod"),
        (pod("a", ready=True, labels={"app.kubernetes.io/name": "tocsin"}), "Tocsin's own"),
        (pod("a", phase="Failed"), "it is Failed"),
        (pod("a"), "it is not Ready"),
        (pod("a", ready=True, deletionTimestamp="2026-11-29T12:00:20Z"), "it is terminating"),
        (pod("a", ready=True), ""),
    ],
)
def test_who_is_spared(spared: dict[str, Any], why: str) -> None:
    """A pod that nobody would bring back was killed, and stayed away."""
    said = pods.why_spared(spared, NOW)
    assert why in said
    assert bool(said) == bool(why)


def test_chance_is_the_run_s() -> None:
    """Each run chooses by itself, plan and run of one id choose the same, and over many runs all are chosen."""
    found = [pod(name, ready=True) for name in "abc"]
    chosen = [pods.choose(found[::way], NOW, f"run-{n}")[0] for n in range(60) for way in (1, -1)]
    names = [pods.name_of(one) for one in chosen if one is not None]
    assert names[::2] == names[1::2]
    assert min(names.count(name) for name in "abc") > 20


@pytest.mark.parametrize(
    ("spec", "annotations", "url"),
    [
        ({"containers": [{"ports": [{"containerPort": 8001}]}]}, {}, "http://10.0.0.7:8001"),
        ({"containers": [{}]}, {}, "http://10.0.0.7:8000"),
        ({"containers": [{"ports": [{"containerPort": 9}]}]}, {pods.PORT: "30000"}, "http://10.0.0.7:30000"),
        ({"containers": [{"ports": [{"containerPort": 9}, {"name": "api", "containerPort": 8080}],
                          "readinessProbe": {"httpGet": {"port": "api"}}}]}, {}, "http://10.0.0.7:8080"),
        ({"containers": [{"ports": [{"containerPort": 9}], "readinessProbe": {"httpGet": {"port": 7}}}]}, {},
         "http://10.0.0.7:7"),
        ({"containers": [{"ports": [{"name": "metrics", "containerPort": 9},
                                    {"name": "http", "containerPort": 8080}]}]}, {}, "http://10.0.0.7:8080"),
    ],
)
def test_where_the_engine_of_a_pod_answers(spec: Any, annotations: dict[str, str], url: str) -> None:
    """A side-car's metrics port came first in the pod, and the new engine "never answered"."""
    assert pods.url_of(pod("a", spec=spec, annotations=annotations)) == url


def test_an_address_of_v6_and_none() -> None:
    """A pod without an IP has no address yet."""
    found = pod("a")
    found["status"]["podIP"] = "fd00::7"
    assert pods.url_of(found) == "http://[fd00::7]:8000"
    found["status"]["podIP"] = ""
    assert pods.url_of(found) is None
    assert OPT_IN == "tocsin.dev/drills"
