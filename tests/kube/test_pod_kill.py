"""pod-kill against the API: who is chosen, how it is killed and proven, and the way back of another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from drills import pod_watch, pods
from drills.cluster import ClusterError, uid_of
from drills.faults.pod_kill import FAULT
from drills.model import Drill, Plan, Refused
from tests.drills.stand_ins import wait_for
from tests.kube.kubelet import Workload
from tests.kube.scene import SELECTOR, Api

RUN = "kill-20261129T120000Z-ab12"


def drill(api: Api, mode: str = "delete", **target: Any) -> Drill:
    """A drill on the test's pods."""
    whole = {"namespace": api.namespace, "selector": SELECTOR, "node": "n1", **target}
    return Drill("kill", "pod-kill", target=whole, params={"mode": mode})


def sampled(held: Any, samples: list[Mapping[str, Any]]) -> bool:
    """One more sample; whether the pod is gone."""
    samples.append({"at": time.time(), **held.sample()})
    return bool(samples[-1]["gone"])


# What is planned


def test_a_plan(api: Api) -> None:
    """What a person reads before it runs: the pod by uid, whose it is, why the others are spared."""
    victim = api.pod("a")
    api.pod("b", owned=False)
    plan = FAULT.plan(drill(api), RUN)
    uid = uid_of(victim)
    assert plan.targets == [f"pod {api.namespace}/a (uid {uid}) of ReplicaSet/vllm on n1"]
    assert [one.text for one in plan.commands] == [f"kubectl delete pod -n {api.namespace} a"]
    assert "b is spared: no controller owns it: nobody would bring it back" in plan.notes
    assert (plan.blast, plan.facts["ready"], plan.restarts) == ({"replicas": 1, "of": 2}, 2, True)
    assert FAULT.left(plan) == []


def test_a_namespace_that_has_not_opted_in(api: Api) -> None:
    """The selector fitted the pods of another team, too."""
    api.pod("a")
    other = api.make_namespace(f"{api.namespace}-other", opted_in=False)
    api.pod("a", namespace=other)
    with pytest.raises(Refused, match=r"has not opted in; its owner says `kubectl label namespace .*=true`"):
        FAULT.plan(drill(api, namespace=other), RUN)
    with pytest.raises(Refused, match="namespace kube-system is the cluster's own"):
        FAULT.plan(drill(api, namespace="kube-system"), RUN)
    with pytest.raises(Refused, match=r"nothing to kill.*no pod has app=nobody"):
        FAULT.plan(drill(api, selector="app=nobody"), RUN)


def test_only_pods_of_our_own_node(api: Api) -> None:
    """The pod that died was another node's: its alarm rang there, not announced, and here none rang at all."""
    node = api.node()
    api.pod("here", node=node)
    for number in range(4):
        api.pod(f"there-{number}", node="elsewhere")
    assert "/here " in FAULT.plan(drill(api, node=node), RUN).targets[0]
    idle = api.node()
    with pytest.raises(Refused, match=f"none of its 5 pods is on node {idle}"):
        FAULT.plan(drill(api, node=idle), RUN)
    assert FAULT.plan(drill(api, node="laptop"), RUN).facts["of"] == 5  # no node of the cluster


def test_without_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without a cluster it says so."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(Refused, match="no Kubernetes here"):
        FAULT.plan(Drill("d", "pod-kill", target={"namespace": "llm", "selector": "app=vllm"}), RUN)


# How it is killed


@pytest.mark.parametrize("mode", ["delete", "evict"])
def test_a_kill_in_two_rows(mode: str, api: Api) -> None:
    """Told to go is not gone: the pod was terminating for an hour, and the drill called it killed."""
    victim = api.pod("a")
    plan = FAULT.plan(drill(api, mode), RUN)
    held = FAULT.inject(plan, ())
    samples: list[Mapping[str, Any]] = []
    assert not sampled(held, samples)
    left = api.cluster.pod(api.namespace, "a")
    assert left is not None
    assert left["metadata"]["deletionGracePeriodSeconds"] == 30  # its own
    proven, told = FAULT.proven(plan, samples)
    assert (proven, told) == (True, f"deletionTimestamp set; UID {uid_of(victim)} still there")
    api.gone(victim)
    assert sampled(held, samples)
    proven, told = FAULT.proven(plan, samples)
    assert proven
    assert told.startswith(f"deletionTimestamp set; UID {uid_of(victim)} gone after ")
    held.undo()
    held.undo()


def test_a_name_under_another_uid_counts_as_gone(api: Api) -> None:
    """C089: the StatefulSet's llm-0 was there again within the second, and the proof never came."""
    victim = api.pod("llm-0")
    plan = FAULT.plan(drill(api), RUN)
    held = FAULT.inject(plan, ())
    api.gone(victim)
    api.pod("llm-0")
    samples: list[Mapping[str, Any]] = []
    assert sampled(held, samples)
    assert FAULT.proven(plan, samples)[0]
    held.undo()


def test_c089_another_pod_under_its_name_is_let_be(api: Api) -> None:
    """C089: between the plan and the kill the pod came back under its name: 409, skipped, nothing killed."""
    victim = api.pod("llm-0")
    plan = FAULT.plan(drill(api), RUN)
    api.gone(victim)
    new = api.pod("llm-0")
    with pytest.raises(Refused, match="another pod now, or gone; skipped, nothing was killed"):
        FAULT.inject(plan, ())
    with pytest.raises(ClusterError, match="409"):  # also between the last look and the kill
        api.cluster.delete_pod(api.namespace, "llm-0", uid_of(victim))
    still = api.cluster.pod(api.namespace, "llm-0")
    assert still is not None
    assert uid_of(still) == uid_of(new)
    assert not pods.is_terminating(still)


def test_the_kill_itself_names_the_uid(api: Api) -> None:
    """The request on the wire: DELETE with uid=, no grace of ours."""
    if api.stand_in is None:
        pytest.skip("only the stand-in tells what it was asked")
    victim = api.pod("a")
    FAULT.inject(FAULT.plan(drill(api), RUN), ()).undo()
    (asked,) = [one for one in api.stand_in.asked if one[0] == "DELETE"]
    assert asked[2:] == ({"uid": uid_of(victim)}, None)


def test_c086_a_budget_that_says_no_is_a_finding(api: Api) -> None:
    """C086: the drain asked again and again until it hit the moment in which the budget allowed it."""
    api.pod("a")
    api.budget("p", allowed=0)
    plan = FAULT.plan(drill(api, "evict"), RUN)
    with pytest.raises(Refused, match=r"not injected, blocked_by_pdb: The disruption budget p needs 2 healthy pods"):
        FAULT.inject(plan, ())
    pod = api.cluster.pod(api.namespace, "a")
    assert pod is not None
    assert not pods.is_terminating(pod)
    if api.stand_in is not None:
        assert sum(path.endswith("/eviction") for _, path, _, _ in api.stand_in.asked) == 1


def test_two_budgets_are_a_finding(api: Api) -> None:
    """500: this pod can never be evicted, and the drain of its node will hang."""
    api.pod("a")
    api.budget("p", allowed=1)
    api.budget("q", allowed=1)
    with pytest.raises(Refused, match=r"not injected, misconfigured: .*more than one PodDisruptionBudget"):
        FAULT.inject(FAULT.plan(drill(api, "evict"), RUN), ())


def test_a_throttled_eviction_waits_as_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 of the API's own throttling: as long as it says, never 0 s, and not for ever."""
    if api.stand_in is None:
        pytest.skip("a real server throttles when it likes")
    naps: list[float] = []
    monkeypatch.setattr("drills.faults.pod_kill.time.sleep", naps.append)
    api.pod("a")
    plan = FAULT.plan(drill(api, "evict"), RUN)
    api.stand_in.fail_next(429, "TooManyRequests", "slow down", times=2, of="POST /api/v1/namespaces/")
    FAULT.inject(plan, ()).undo()
    assert naps == [1.0, 1.0]


# What is proven, pure


@pytest.mark.parametrize(
    ("samples", "proven", "told"),
    [
        ([], False, "no sample came"),
        ([{"at": 1.0, "error": "the API gives no answer"}], False, "the API gives no answer"),
        ([{"at": 1.0, "deletion_at": None, "gone": False, "finalizers": []}], False, "deletionTimestamp never seen"),
        ([{"at": 100.0, "deletion_at": 90.0, "gone": False, "finalizers": []}], True, "overdue by 10 s"),
        ([{"at": 100.0, "deletion_at": 60.0, "gone": False, "finalizers": ["x/y"]}], False, "40 s, finalizer x/y"),
        ([{"at": 1.0, "deletion_at": None, "gone": True, "finalizers": []}], True, "never seen; UID u-1 gone after 0"),
    ],
)
def test_what_the_samples_prove(samples: list[Mapping[str, Any]], proven: bool, told: str) -> None:
    """A pod that a finalizer holds is not gone, however long ago it was told to go."""
    plan = Plan("pod-kill", RUN, [], [], [], {"uid": "u-1"})
    said = FAULT.proven(plan, samples)
    assert said[0] is proven
    assert told in said[1]


# The way back


@pytest.mark.parametrize("stateful", [False, True])
def test_the_way_back_of_another_pod(stateful: bool, api: Api, free_port: Callable[[], int]) -> None:
    """Down, gone, made, scheduled, Ready, and an answer of the new pod itself: each with its time, in this order."""
    node = api.node()
    with Workload(api, node, ["127.0.1.1", "127.0.1.2", "127.0.1.3"], stateful=stateful, port=free_port()) as work:
        wait_for(lambda: sum(map(pods.is_ready, work.pods())) == 2, 60.0)
        plan = FAULT.plan(drill(api, node=node), RUN)
        back = pod_watch.PodsBack(plan.facts)
        back.start()
        wait_for(lambda: back.healthy == 2)
        held = FAULT.inject(plan, ())
        samples: list[Mapping[str, Any]] = []
        wait_for(lambda: sampled(held, samples))
        wait_for(lambda: back.completion_at is not None, 60.0)
        held.undo()
        back.stop()
        names = {pods.name_of(pod) for pod in work.pods()}
        assert (plan.facts["name"] in names) is stateful
        assert plan.facts["uid"] not in {uid_of(pod) for pod in work.pods()}
    assert FAULT.proven(plan, samples)[0]
    way = [back.down_at, back.steps["gone"], back.steps["made"], back.ready_at, back.completion_at]
    assert None not in way
    assert way == sorted(way)  # type: ignore[type-var]
    assert back.why_not() == ""


def test_a_way_back_that_is_never_gone(api: Api) -> None:
    """Nobody brought the pod back: the report says what the API says, not just that nobody answered."""
    victim = api.pod("a")
    plan = FAULT.plan(drill(api), RUN)
    back = pod_watch.PodsBack(plan.facts)
    back.start()
    FAULT.inject(plan, ()).undo()
    wait_for(lambda: back.down_at is not None)
    assert back.healthy == 0  # Ready to its end, and yet not one that stays
    assert back.why_not() == f"no replacement was made; a ({uid_of(victim)}) still terminating"
    api.pod("b", phase="Pending", node="")
    wait_for(lambda: "replacement b " in back.why_not())
    assert (back.ready_at, back.completion_at) == (None, None)
    back.stop()
