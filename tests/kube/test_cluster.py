"""drills.cluster against the API: what is compared and set, what is told apart, what a no means."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from drills import cluster
from drills.cluster import CORDONED, MERGE, Cluster, ClusterError, Denied, denied, path_of, uid_of
from tests.drills.stand_ins import wait_for
from tests.kube.scene import LABELS, SELECTOR, Api, kubeconfig

FAR = "99999999999"


def code_of(do: Any, *args: Any, **more: Any) -> int:
    """The HTTP status of a no."""
    with pytest.raises(ClusterError) as caught:
        do(*args, **more)
    return caught.value.code


def lease(api: Api, holder: str = "n1", name: str = "drill") -> dict[str, Any]:
    """A new Lease."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": name, "namespace": api.namespace},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 60, "leaseTransitions": 0}}


# Leases


def test_a_lease_is_compared_and_set(api: Api) -> None:
    """Two nodes read a free lock and both took it."""
    made = api.cluster.create_lease(lease(api))
    assert code_of(api.cluster.create_lease, lease(api, "n2")) == 409
    won = api.cluster.put_lease({**made, "spec": {**made["spec"], "holderIdentity": "n2"}})
    assert code_of(api.cluster.put_lease, {**made, "spec": {**made["spec"], "holderIdentity": "n3"}}) == 409
    read = api.cluster.lease(api.namespace, "drill")
    assert read == won
    assert read is not None
    assert read["spec"]["holderIdentity"] == "n2"
    assert api.cluster.lease(api.namespace, "other") is None


def test_no_lease_is_written_blindly(api: Api) -> None:
    """A write without the resourceVersion took a lock that was held: we never send it, and the server refuses a PUT."""
    made = api.cluster.create_lease(lease(api))
    blind = {**made, "metadata": {k: v for k, v in made["metadata"].items() if k != "resourceVersion"}}
    with pytest.raises(ClusterError, match="only with the resourceVersion"):
        api.cluster.put_lease(blind)
    path = path_of("coordination.k8s.io", "v1", "leases", api.namespace, "drill")
    assert code_of(api.cluster.ask, "PUT", path, body=blind) == 422
    # That is why: a PATCH would have been taken.
    patched = api.cluster.ask("PATCH", path, body={"spec": {"holderIdentity": "thief"}}, headers=MERGE)
    assert patched["spec"]["holderIdentity"] == "thief"
    assert code_of(api.cluster.put_lease, made) == 409


# Pods


def test_pods_by_label_and_field(api: Api) -> None:
    """A drill of app=vllm on n1 chose a pod of another app, of another node."""
    mine = api.pod("mine", node="n1")
    api.pod("elsewhere", node="n2")
    api.pod("other", node="n1", labels={"app": "vllm-canary"})
    found = api.cluster.pods(api.namespace, labels=SELECTOR, fields="spec.nodeName=n1")
    assert [uid_of(pod) for pod in found] == [uid_of(mine)]
    both = api.cluster.pods(api.namespace, labels="app in (vllm,vllm-canary)", fields="spec.nodeName!=n2")
    assert sorted(pod["metadata"]["name"] for pod in both) == ["mine", "other"]
    assert api.cluster.pod(api.namespace, "nobody") is None


def test_a_pod_is_deleted_by_uid(api: Api) -> None:
    """C089: llm-0 came back under its name while the drill made up its mind, and the new one was killed."""
    api.gone(api.pod("llm-0"))
    new = api.pod("llm-0")
    assert code_of(api.cluster.delete_pod, api.namespace, "llm-0", "0f0f0f0f-0000-4000-8000-00000000dead") == 409
    assert code_of(api.cluster.evict_pod, api.namespace, "llm-0", "0f0f0f0f-0000-4000-8000-00000000dead") == 409
    assert "deletionTimestamp" not in (api.cluster.pod(api.namespace, "llm-0") or {})["metadata"]
    told = api.cluster.delete_pod(api.namespace, "llm-0", uid_of(new))
    assert told["metadata"]["deletionTimestamp"]
    assert told["metadata"]["deletionGracePeriodSeconds"] == 30
    left = api.cluster.pod(api.namespace, "llm-0")
    assert left is not None
    assert cluster.has_condition(left, "Ready")  # to its end
    api.gone(new)
    assert api.cluster.pod(api.namespace, "llm-0") is None


def test_an_eviction(api: Api) -> None:
    """With room in its budget a pod is told to go, with its normal grace."""
    pod = api.pod("a", grace_s=45)
    api.budget("p", allowed=1, has=1)
    api.cluster.evict_pod(api.namespace, "a", uid_of(pod))
    left = api.cluster.pod(api.namespace, "a")
    assert left is not None
    assert left["metadata"]["deletionGracePeriodSeconds"] == 45


def test_an_eviction_that_takes_nothing_from_a_budget(api: Api) -> None:
    """One that is on its way out, or is not Ready while enough others are, counts for no budget."""
    gone, unready = api.pod("gone"), api.pod("unready", ready=False)
    api.pod("a")
    api.pod("b")
    api.cluster.delete_pod(api.namespace, "gone", uid_of(gone))
    api.budget("p", allowed=0)
    for pod in (gone, unready):
        api.cluster.evict_pod(api.namespace, pod["metadata"]["name"], uid_of(pod))
    metas = [pod["metadata"] for pod in api.cluster.pods(api.namespace)]
    assert {meta["name"] for meta in metas if "deletionTimestamp" in meta} == {"gone", "unready"}


@pytest.mark.parametrize(
    ("budgets", "kind", "again_s", "names"),
    [
        ([{"name": "p", "allowed": 0}], "blocked_by_pdb", 5.0, "p needs 2 healthy pods and has 2"),
        ([{"name": "p", "allowed": 0, "seen": False}], "processing", 10.0, "p is still being processed"),
        ([{"name": "p", "allowed": 1}, {"name": "q", "allowed": 1}], "misconfigured", None, "more than one"),
    ],
)
def test_a_budget_says_no(
    budgets: list[Mapping[str, Any]], kind: str, again_s: float | None, names: str, api: Api
) -> None:
    """429 is "never", "not yet" and "later"; a budget is asked before the uid is looked at; two of them are 500."""
    if api.controlled and kind == "processing":
        pytest.skip("its controller has looked at once")
    api.pod("a")
    api.pod("b")
    for budget in budgets:
        api.budget(**budget)
    with pytest.raises(ClusterError) as caught:
        api.cluster.evict_pod(api.namespace, "a", "0f0f0f0f-0000-4000-8000-00000000dead")
    told = denied(caught.value.code, caught.value.status)
    assert (told.kind, told.retry_after_s) == (kind, again_s)
    assert names in told.why
    assert "deletionTimestamp" not in (api.cluster.pod(api.namespace, "a") or {})["metadata"]


def test_a_pending_pod_answers_slowly(api: Api) -> None:
    """Evicting a Pending pod under a wrong uid took 10 s; a client that waited for 5 s never knew the answer."""
    api.pod("a", phase="Pending", node="")
    start = time.monotonic()
    assert code_of(api.cluster.evict_pod, api.namespace, "a", "0f0f0f0f-0000-4000-8000-00000000dead") == 409
    assert time.monotonic() - start > 0.5


def test_what_a_429_means() -> None:
    """C086: a drain asked again after 0 s, and went on asking."""
    pdb = {"code": 429, "reason": "TooManyRequests", "message": "Cannot evict pod …", "details": {"causes": [
        {"reason": "DisruptionBudget", "message": "The disruption budget p needs 2 healthy pods and has 2 currently"}]}}
    assert denied(429, pdb) == Denied("blocked_by_pdb", pdb["details"]["causes"][0]["message"], 5.0)  # type: ignore[index]
    assert denied(429, {"code": 429, "details": {"retryAfterSeconds": 1}}).retry_after_s == 1.0
    assert denied(429, {"code": 429}) == Denied("throttled", "HTTP 429", 1.0)
    busy = {"retryAfterSeconds": 10, "causes": [{"reason": "DisruptionBudget", "message": "still being processed"}]}
    assert denied(429, {"code": 429, "details": busy}) == Denied("processing", "still being processed", 10.0)
    assert denied(403, {"message": "no"}) == Denied("other", "no")


def test_what_else_an_eviction_is_answered_with() -> None:
    """A budget's no without a cause was asked for again each second; a server out of order is no wrong budget."""
    old = "Cannot evict pod as it would violate the pod's disruption budget."
    assert denied(429, {"code": 429, "message": old}) == Denied("blocked_by_pdb", old, 5.0)
    two = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
    assert denied(500, {"code": 500, "message": two}) == Denied("misconfigured", two)
    assert denied(500, {"code": 500, "message": "etcdserver: leader changed"}).kind == "other"


def test_who_throttles_by_a_header_alone() -> None:
    """kubernetes/kubernetes: priority and fairness answers in plain text, and says how long in Retry-After."""
    error = cluster._error(429, b"Too many requests, please try again later.\n", "7")
    assert str(error) == "the Kubernetes API says 429: Too many requests, please try again later."
    assert denied(error.code, error.status).retry_after_s == 7.0
    told = cluster._error(429, b'{"message": "m", "details": {"retryAfterSeconds": 10}}', "1")
    assert denied(told.code, told.status).retry_after_s == 10.0
    assert denied(429, cluster._error(429, b"", "soon").status).retry_after_s == 1.0


# Watches


def follow(api: Api, seen: list[set[str]], stop: threading.Event) -> threading.Thread:
    """Follow the pods in a thread; the names of each state are added to `seen`."""

    def run() -> None:
        with Cluster() as own:
            for pods in own.follow(cluster.pods_path(api.namespace), stop, labels=SELECTOR, again_s=0.1):
                seen.append({pod["metadata"]["name"] for pod in pods.values()})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_what_happens_to_pods(api: Api) -> None:
    """A pod that came, one whose label went, one that was deleted: each state is told as it is."""
    api.pod("a")
    seen, stop = list[set[str]](), threading.Event()
    thread = follow(api, seen, stop)
    wait_for(lambda: {"a"} in seen)
    b = api.pod("b")
    wait_for(lambda: seen[-1] == {"a", "b"})
    path = cluster.pods_path(api.namespace, "a")
    api.cluster.ask("PATCH", path, body={"metadata": {"labels": {"app": None}}}, headers=MERGE)
    wait_for(lambda: seen[-1] == {"b"})
    api.gone(b)
    wait_for(lambda: seen[-1] == set())
    stop.set()
    api.pod("wakes-it")
    thread.join(30.0)
    assert not thread.is_alive()


def end_of_watch(api: Api, path: str) -> int:
    """With which code a watch from the first version on ends; 0: with none."""
    try:
        for _ in api.cluster.watch(path, "1", for_s=2.0):
            pass
    except ClusterError as error:
        return error.code
    return 0


@contextmanager
def forgotten(api: Api) -> Iterator[str]:
    """A path of whose first versions the API knows nothing any more."""
    if api.stand_in is not None:
        api.pod("a")
        api.stand_in.compact()
        yield cluster.pods_path(api.namespace)
        return
    # A new server still knows all that its own kinds ever were; it knows nothing of what was before it had a kind.
    group, kinds = f"{api.namespace}.tocsin.dev", path_of("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
    spec = {"group": group, "scope": "Namespaced", "names": {"plural": "bells", "kind": "Bell"}, "versions": [version]}
    api.cluster.ask("POST", kinds, body={"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                                         "metadata": {"name": f"bells.{group}"}, "spec": spec})
    path = path_of(group, "v1", "bells", api.namespace)
    try:
        wait_for(lambda: end_of_watch(api, path) not in (404, 429), 60.0)  # not served yet; being set up
        yield path
    finally:
        api.cluster.ask("DELETE", f"{kinds}/bells.{group}")


def test_a_watch_of_long_ago(api: Api) -> None:
    """The API had forgotten what was asked for (410), and the watch went on without what had happened meanwhile."""
    with forgotten(api) as path:
        assert end_of_watch(api, path) == 410


def test_a_watch_that_fails_is_begun_anew(api: Api) -> None:
    """410 in the middle, 504 at a beginning (etcd 3.4 tells no progress): the list tells what was missed."""
    if api.stand_in is None:
        pytest.skip("a real server fails when it likes")
    seen, stop = list[set[str]](), threading.Event()
    thread = follow(api, seen, stop)
    wait_for(lambda: seen == [set()])
    api.stand_in.fail_next(504, "Timeout", "Too large resource version", times=2, of="GET /api/v1/namespaces/")
    with api.stand_in.lock:
        api.stand_in.create("", "pods", api.namespace, {"metadata": {"name": "a", "labels": LABELS}, "spec": {}})
        api.stand_in.compact()  # before the watch is told of it
    wait_for(lambda: bool(seen) and seen[-1] == {"a"})
    stop.set()
    api.pod("wakes-it")
    thread.join(30.0)


class Silent(Cluster):
    """A server that ends each watch at once, and says nothing: kubernetes/kubernetes#104171."""

    def __init__(self) -> None:
        self.asked = 0

    def all(self, path: str, *, labels: str = "", fields: str = "") -> tuple[list[dict[str, Any]], str]:
        return [], "7"

    def watch(self, path: str, since: str, *, labels: str = "", fields: str = "",
              for_s: float = 20.0) -> Iterator[tuple[str, dict[str, Any]]]:
        self.asked += 1
        return iter(())


def test_a_watch_that_ends_at_once_is_not_asked_for_in_a_loop() -> None:
    """Instead of 410 it said nothing: the API was asked thousands of times a second, and the list never again."""
    silent = Silent()
    lists = silent.follow("pods", threading.Event(), again_s=0.05)
    begun = time.monotonic()

    for _ in range(3):
        next(lists)

    assert silent.asked == 2
    assert time.monotonic() - begun >= 0.1


def test_a_list_of_the_future(api: Api) -> None:
    """A resourceVersion that this server has not reached yet is 504, not an empty list."""
    path = cluster.pods_path(api.namespace)
    assert code_of(api.cluster.ask, "GET", path, {"resourceVersion": FAR}) == 504


# Nodes


def cordoned(api: Api, name: str) -> tuple[bool, str | None]:
    """Whether it is, and by whom."""
    node = api.cluster.node(name)
    assert node is not None
    return not cluster.is_schedulable(node), cluster.labels_or(node, "annotations").get(CORDONED)


def test_a_cordon_and_its_end(api: Api) -> None:
    """Put on and taken off, twice each: nothing of ours is left."""
    name = api.node()
    facts = api.cluster.cordon(name, "run-1")
    assert cordoned(api, name) == (True, "run-1")
    assert api.cluster.uncordon(facts) == ""
    assert cordoned(api, name) == (False, None)
    assert api.cluster.uncordon(facts) == ""


def test_a_node_that_a_person_cordoned(api: Api) -> None:
    """A person had taken the node out for its disk; the drill put it back in."""
    name = api.node()
    path = path_of("", "v1", "nodes", None, name)
    api.cluster.ask("PATCH", path, body={"spec": {"unschedulable": True}}, headers=MERGE)
    facts = api.cluster.cordon(name, "run-1")
    assert cordoned(api, name) == (True, None)
    assert "was cordoned before the drill" in api.cluster.uncordon(facts)
    assert cordoned(api, name) == (True, None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([{"metadata": {"annotations": {CORDONED: "run-2"}}}], "is cordoned by run-2"),
        ([{"metadata": {"annotations": {CORDONED: None}}}], "somebody who took our annotation off"),
        ([{"spec": {"taints": [{"key": "broken", "value": "disk", "effect": "NoSchedule"}]}}], "changed node"),
        ([{"spec": {"unschedulable": None}}, {"spec": {"unschedulable": True}}], "changed node"),
    ],
)
def test_a_cordon_that_somebody_changed(changes: list[Mapping[str, Any]], why: str, api: Api) -> None:
    """Meanwhile a person decided that the node stays out: that is not ours to undo."""
    name = api.node()
    facts = api.cluster.cordon(name, "run-1")
    for change in changes:
        api.cluster.ask("PATCH", path_of("", "v1", "nodes", None, name), {"fieldManager": "kubectl"}, change,
                        headers=MERGE)
    assert why in api.cluster.uncordon(facts)
    assert cordoned(api, name)[0]


# What others see


def test_an_event(api: Api) -> None:
    """`kubectl describe` of the pod tells who killed it."""
    pod = api.pod("a")
    about = {"kind": "Pod", "name": "a", "namespace": api.namespace, "uid": uid_of(pod)}
    api.cluster.event(about, "TocsinDrill", "pod-kill run-1", now=1764417600.0)
    (event,) = api.cluster.events_of(api.namespace, uid_of(pod))
    assert (event["reason"], event["message"], event["type"]) == ("TocsinDrill", "pod-kill run-1", "Normal")
    assert event["firstTimestamp"] == "2025-11-29T12:00:00Z"


def test_who_may_do_what(api: Api) -> None:
    """One verb in one namespace, and nothing beside it."""
    role = {"metadata": {"name": "kill"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}]}
    api.post("rbac.authorization.k8s.io", "roles", role, "Role")
    binding = {"metadata": {"name": "kill"}, "subjects": [{"kind": "ServiceAccount", "name": "drilld",
                                                           "namespace": api.namespace}],
               "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kill"}}
    api.post("rbac.authorization.k8s.io", "rolebindings", binding, "RoleBinding")
    user = f"system:serviceaccount:{api.namespace}:drilld"
    wait_for(lambda: api.cluster.may(user, "delete", "pods", namespace=api.namespace))
    assert not api.cluster.may(user, "delete", "pods", namespace="default")
    assert not api.cluster.may(user, "list", "pods", namespace=api.namespace)
    assert not api.cluster.may(user, "create", "pods/eviction", namespace=api.namespace)


# The connection


def test_no_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without Kubernetes the refusal says what would change that."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not cluster.configured()
    with pytest.raises(ClusterError, match="set KUBECONFIG"):
        Cluster()


def test_an_api_that_is_gone(api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No answer is an error with code 0: never "there is no such pod"."""
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "gone", "x", url="http://127.0.0.1:1"))
    with Cluster() as gone:
        assert code_of(gone.pod, "x", "a") == 0


def test_pages_of_a_list(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list comes in pages; only the first was read."""
    for number in range(3):
        api.pod(f"p{number}", labels=LABELS)
    monkeypatch.setattr(cluster, "PAGE", 2)
    assert len(api.cluster.pods(api.namespace)) == 3


def test_a_list_whose_first_page_is_forgotten(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second page was 410 (compacted), and a drill was refused for it: the whole list is asked for instead."""
    for number in range(3):
        api.pod(f"p{number}", labels=LABELS)
    monkeypatch.setattr(cluster, "PAGE", 2)
    ask = api.cluster.ask

    def forgets(method: str, path: str, params: Any = None, *args: Any, **more: Any) -> Any:
        if params and "continue" in params:
            raise ClusterError("the provided continue parameter is too old", 410)
        return ask(method, path, params, *args, **more)

    monkeypatch.setattr(api.cluster, "ask", forgets)

    assert {pod["metadata"]["name"] for pod in api.cluster.pods(api.namespace)} == {"p0", "p1", "p2"}
