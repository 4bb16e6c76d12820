"""What the tests of this folder put into the API: a namespace, nodes, pods as a kubelet would report them, budgets."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drills.cluster import MERGE, OPT_IN, Cluster, ClusterError, Object, path_of, pods_path, text_of, time_of
from tests.kube.stand_in import StandIn

BEAT_S = 10.0  # a kubelet's; a node that is silent for 40 s is Unknown to its controller
LABELS = {"app": "vllm"}
SELECTOR = "app=vllm"


def kubeconfig(folder: Path, namespace: str, *, url: str = "", like: Path | None = None) -> str:
    """A kubeconfig file for an address, or like another one, with this namespace; its path."""
    if like is not None:
        told = yaml.safe_load(like.read_text())
        name = told["current-context"]
        for context in told["contexts"]:
            if context["name"] == name:
                context["context"]["namespace"] = namespace
    else:
        told = {"apiVersion": "v1", "kind": "Config", "current-context": "test",
                # Plain HTTP: without this each connection would load the machine's certificates all the same.
                "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "test", "user": {"token": "of-a-test"}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}]}
    # Beside the other one: its certificates may be named by relative paths.
    file = folder / "kubeconfig" if like is None else like.with_name(f".{like.name}.{namespace}")
    file.touch(mode=0o600)  # it holds the other one's key
    file.write_text(json.dumps(told))
    return str(file)


@dataclass
class Api:
    """The API, and a namespace of the test's own. `stand_in` None: a real API server."""

    cluster: Cluster
    namespace: str
    stand_in: StandIn | None
    controlled: bool = False  # by Kubernetes' own controllers, as in a whole cluster
    nodes: dict[str, bool] = field(default_factory=dict)  # name -> Ready
    namespaces: list[str] = field(default_factory=list)

    def make_namespace(self, name: str | None = None, *, opted_in: bool = True) -> str:
        """A namespace, if there is none, and the account without which a real server takes no pod into it."""
        name = name or self.namespace
        labels = {OPT_IN: "true"} if opted_in else {}
        if not self.has_namespace(name):
            self.post("", "namespaces", {"metadata": {"name": name, "labels": labels}}, "Namespace", namespace=None)
            self.namespaces.append(name)
        with suppress(ClusterError):  # its controller was faster
            self.post("", "serviceaccounts", {"metadata": {"name": "default"}}, "ServiceAccount", namespace=name)
        return name

    def has_namespace(self, name: str) -> bool:
        """Whether there is one; one that is ending is waited for: nothing new comes into it."""
        deadline = time.monotonic() + 60.0
        while True:
            found = self.cluster.get(path_of("", "v1", "namespaces", None, name))
            if found is None or "deletionTimestamp" not in found["metadata"]:
                return found is not None
            assert time.monotonic() < deadline, f"namespace {name} does not end: who or what keeps it?"
            time.sleep(0.5)

    def clear(self) -> None:
        """Take away what a real server would keep."""
        for namespace in self.namespaces:
            for pod in self.cluster.pods(namespace):
                self.gone(pod)
        for name in self.nodes:
            with suppress(ClusterError):
                self.cluster.ask("DELETE", path_of("", "v1", "nodes", None, name))
        for namespace in self.namespaces:
            self.drop_namespace(namespace)

    def drop_namespace(self, name: str) -> None:
        """Take a namespace away: without a controller it never ends, and takes nothing new under its name meanwhile."""
        path = path_of("", "v1", "namespaces", None, name)
        with suppress(ClusterError):
            left = self.cluster.ask("DELETE", path)
            if not self.controlled:
                self.cluster.ask("PUT", f"{path}/finalize", body={**left, "spec": {"finalizers": []}})

    def post(self, group: str, plural: str, body: Mapping[str, Any], kind: str, namespace: str | None = "") -> Object:
        """Make an object in the test's namespace, in another one, or (None) in none."""
        where = self.namespace if namespace == "" else namespace
        whole = {"apiVersion": f"{group}/v1" if group else "v1", "kind": kind, **body}
        return self.cluster.ask("POST", path_of(group, "v1", plural, where), body=whole)

    def node(self, name: str = "", *, ready: bool = True, opted_in: bool = True) -> str:
        """A node."""
        name = name or f"n-{uuid.uuid4().hex[:6]}"
        labels = {OPT_IN: "true"} if opted_in else {}
        self.post("", "nodes", {"metadata": {"name": name, "labels": labels}, "spec": {}}, "Node", namespace=None)
        self.be_ready("nodes", None, name, ready)
        self.nodes[name] = ready
        return name

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Where Kubernetes' own controllers look at the nodes: say that they live, as their kubelets would."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_S):
                for name, ready in list(self.nodes.items()):
                    with suppress(ClusterError):
                        self.be_ready("nodes", None, name, ready)

        thread = threading.Thread(target=beat, daemon=True)
        if self.controlled:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if self.controlled:
                thread.join()

    def be_ready(self, plural: str, namespace: str | None, name: str, ready: bool = True, **status: Any) -> None:
        """The status that a kubelet would write."""
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        if plural == "nodes":
            condition |= {"reason": "test", "message": "", "lastHeartbeatTime": text_of(time.time()),
                          "lastTransitionTime": "2026-11-29T12:00:00Z"}
        body = {"status": {"conditions": [condition], **status}}
        self.cluster.ask("PATCH", f"{path_of('', 'v1', plural, namespace, name)}/status", body=body, headers=MERGE)

    def pod(self, name: str = "", *, ready: bool = True, node: str = "n1", owned: bool = True, namespace: str = "",
            labels: Mapping[str, str] = LABELS, annotations: Mapping[str, str] | None = None, grace_s: int = 30,
            finalizers: list[str] | None = None, phase: str = "Running", ip: str = "127.0.0.1", owner: str = "vllm",
            container: Mapping[str, Any] | None = None) -> Object:
        """A pod of a ReplicaSet, as its kubelet reports it. `phase` Pending: nothing was reported yet."""
        where = namespace or self.namespace
        meta: dict[str, Any] = {"name": name or f"vllm-{uuid.uuid4().hex[:6]}", "labels": dict(labels),
                                "annotations": dict(annotations or {})}
        if owned:  # of a group that no garbage collector knows: it ends pods whose owner is not there
            meta["ownerReferences"] = [{"apiVersion": "test.tocsin.dev/v1", "kind": "ReplicaSet", "name": owner,
                                        "uid": "0f0f0f0f-0000-4000-8000-000000000001", "controller": True}]
        if finalizers:
            meta["finalizers"] = finalizers
        spec: dict[str, Any] = {
            "terminationGracePeriodSeconds": grace_s, "automountServiceAccountToken": False,
            "containers": [{"name": "engine", "image": "example.invalid/vllm", "ports": [{"containerPort": 8000}],
                            **(container or {})}]}
        if node:
            spec["nodeName"] = node
        made = self.post("", "pods", {"metadata": meta, "spec": spec}, "Pod", namespace=where)
        if phase != "Pending":
            self.be_ready("pods", where, meta["name"], ready, phase=phase, podIP=ip, podIPs=[{"ip": ip}])
        return self.cluster.pod(where, meta["name"]) or made

    def gone(self, pod: Object) -> None:
        """What a kubelet says when the containers of a pod have ended."""
        meta = pod["metadata"]
        if meta.get("finalizers"):
            with suppress(ClusterError):
                self.cluster.ask("PATCH", pods_path(meta["namespace"], meta["name"]), headers=MERGE,
                                 body={"metadata": {"finalizers": None}})
        with suppress(ClusterError):
            self.cluster.delete_pod(meta["namespace"], meta["name"], meta["uid"], grace_s=0)

    def budget(self, name: str, allowed: int, *, has: int = 2, seen: bool = True) -> None:
        """A disruption budget for LABELS, as its controller reports it. `seen` False: it has not looked yet."""
        needs = has - allowed
        spec = {"minAvailable": needs, "selector": {"matchLabels": LABELS}}
        made = self.post("policy", "poddisruptionbudgets", {"metadata": {"name": name}, "spec": spec},
                         "PodDisruptionBudget")
        if seen:
            status = {"observedGeneration": made["metadata"].get("generation", 1), "disruptionsAllowed": allowed,
                      "desiredHealthy": needs, "currentHealthy": has, "expectedPods": has}
            self.cluster.ask("PATCH", f"{path_of('policy', 'v1', 'poddisruptionbudgets', self.namespace, name)}/status",
                             body={"status": status}, headers=MERGE)


def has_controllers(cluster: Cluster) -> bool:
    """Whether Kubernetes' own controllers are at work: who leads them renews a Lease."""
    lease = cluster.lease("kube-system", "kube-controller-manager")
    renewed_at = None if lease is None else time_of(lease["spec"].get("renewTime"))
    return renewed_at is not None and time.time() - renewed_at < 60.0
