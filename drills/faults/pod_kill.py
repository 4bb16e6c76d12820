"""pod-kill: one random Ready pod of a selector is deleted, or evicted, with its normal grace.

The API is asked by uid: a pod that came back under the same name is another one, and is let be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from drills import pods
from drills.cluster import OPT_IN, Cluster, ClusterError, Denied, denied, time_of, uid_of
from drills.model import Command, Drill, Fault, Left, Plan, Refused, announces

SAMPLE_S = 3.0  # an answer that takes longer is no sample
ASK_WITHIN_S = 10.0  # an eviction that is put off for a while is asked for again so long
OVERDUE_S = 30.0  # a pod that is later than this after its grace is stuck


class Deleted:
    """The pod that was told to go, watched by its uid until it is gone."""

    def __init__(self, cluster: Cluster, plan: Plan, deletion_at: float | None) -> None:
        self._cluster, self._facts, self._deletion_at = cluster, plan.facts, deletion_at

    def sample(self) -> Mapping[str, Any]:
        """`deletion_at`: by when it is to be gone (unix seconds); `gone`: nobody has its uid; `finalizers` hold it."""
        facts = self._facts
        pod = self._cluster.pod(facts["namespace"], facts["name"], answer_s=SAMPLE_S)
        if pod is None or uid_of(pod) != facts["uid"]:
            return {"deletion_at": self._deletion_at, "gone": True, "finalizers": []}
        meta = pod["metadata"]
        self._deletion_at = time_of(meta.get("deletionTimestamp")) or self._deletion_at
        return {"deletion_at": self._deletion_at, "gone": False, "finalizers": meta.get("finalizers") or []}

    def undo(self) -> None:
        """Nothing brings a pod back but its controller."""
        self._cluster.close()


class PodKill:
    """The fault."""

    name = "pod-kill"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Choose the pod. Raises Refused."""
        namespace, selector = str(drill.target.get("namespace", "")), str(drill.target.get("selector", ""))
        try:
            with Cluster() as cluster:
                refuse_namespace(cluster, namespace)
                found = cluster.pods(namespace, labels=selector)
                own = on_node(cluster, found, drill.target.get("node"))
        except ClusterError as error:
            raise Refused(f"pod-kill: {error}") from error
        victim, spared = pods.choose(own, time.time(), run)  # its age is told, nothing is decided by it
        notes = [f"{name} is spared: {why}" for name, why in spared.items()]
        if victim is None:
            told = "; ".join(notes) or f"no pod has {selector} here"
            raise Refused(f"pod-kill: nothing to kill in namespace {namespace}: {told}")
        return _plan(drill, run, victim, found, notes)

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Deleted:  # noqa: ARG002  (no subprocess)
        """Delete or evict it, if it still is the pod that was planned. Raises Refused."""
        facts = plan.facts
        try:
            cluster = Cluster()
        except ClusterError as error:
            raise Refused(f"pod-kill: {error}") from error
        try:
            refuse_namespace(cluster, facts["namespace"])
            refuse_another(cluster, facts)
            return Deleted(cluster, plan, _told_to_go(cluster, facts))
        except ClusterError as error:
            cluster.close()
            raise Refused(f"pod-kill: {_why(error, facts)}") from error
        except BaseException:
            cluster.close()
            raise

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Two rows: its deletionTimestamp was set, and its uid is gone."""
        told = [sample for sample in samples if "gone" in sample]
        if not told:
            error = next((str(sample["error"]) for sample in reversed(samples) if "error" in sample), "no sample came")
            return False, error
        set_ = next((sample["deletion_at"] for sample in told if sample["deletion_at"]), None)
        gone = next((sample for sample in told if sample["gone"]), None)
        rows = ["deletionTimestamp set" if set_ else "deletionTimestamp never seen"]
        if gone is not None:
            rows.append(f"UID {plan.facts['uid']} gone after {gone['at'] - samples[0]['at']:.0f} s")
            return True, "; ".join(rows)
        last = told[-1]
        late_s = float(last["at"]) - float(set_) if set_ else 0.0
        rows.append(f"UID {plan.facts['uid']} still there")
        if late_s > 0:
            rows[-1] += f", overdue by {late_s:.0f} s"
        if last["finalizers"]:
            rows[-1] += f", finalizer {', '.join(last['finalizers'])}"
        return set_ is not None and late_s <= OVERDUE_S, "; ".join(rows)

    def left(self, plan: Plan) -> list[Left]:  # noqa: ARG002
        """A pod that is gone leaves nothing of ours."""
        return []

    def undo(self, plan: Plan) -> None:
        """Nothing to undo."""


def refuse_namespace(cluster: Cluster, namespace: str) -> None:
    """Raise Refused where drills may not kill in a namespace. Raises ClusterError."""
    if namespace in pods.NEVER:
        raise Refused(f"pod-kill: namespace {namespace} is the cluster's own: no drill may touch it")
    if not cluster.opted_in(namespace):
        told = f"kubectl label namespace {namespace or 'NAME'} {OPT_IN}=true"
        raise Refused(f"pod-kill: namespace {namespace} has not opted in; its owner says `{told}`")


def refuse_another(cluster: Cluster, facts: Mapping[str, Any]) -> None:
    """Raise Refused where the pod is not the one that was planned, or may not be killed any more."""
    pod = cluster.pod(facts["namespace"], facts["name"])
    why = "it is another pod now, or gone"
    if pod is not None and uid_of(pod) == facts["uid"]:
        why = pods.why_spared(pod, time.time())
    if why:
        raise Refused(f"pod-kill: {facts['name']}: {why}; skipped, nothing was killed: plan again")


def on_node(cluster: Cluster, found: Sequence[Any], node: str | None) -> list[Any]:
    """Those on our node, whose agent sees their end; all of them where we are no node of the cluster.

    Raises Refused, ClusterError.
    """
    own = [pod for pod in found if node and (pod.get("spec") or {}).get("nodeName") == node]
    if own or not found or not node:
        return list(own or found)
    try:
        known = cluster.node(node) is not None
    except ClusterError as error:
        if error.code != HTTPStatus.FORBIDDEN:
            raise
        known = True  # we may not look: then we do not look elsewhere
    if known:
        raise Refused(f"pod-kill: none of its {len(found)} pods is on node {node}: their alarms are another node's")
    return list(found)


def _plan(drill: Drill, run: str, victim: Mapping[str, Any], found: Sequence[Any], notes: Sequence[str]) -> Plan:
    meta, spec, owner = victim["metadata"], victim.get("spec") or {}, pods.owner_of(victim) or {}
    mode = str(drill.params.get("mode", "delete"))
    namespace, name = str(meta["namespace"]), str(meta["name"])
    facts = {
        "namespace": namespace, "name": name, "uid": uid_of(victim), "node": spec.get("nodeName"), "mode": mode,
        "selector": str(drill.target["selector"]), "grace_s": spec.get("terminationGracePeriodSeconds"),
        "owner": f"{owner.get('kind')}/{owner.get('name')}", "workload": pods.workload_of(victim),
        "before": [uid_of(pod) for pod in found],
        "ready": sum(map(pods.is_ready, found)), "of": len(pods.standing(found)),
    }
    how = f"kubectl delete pod -n {namespace} {name}" if mode == "delete" else f"evict pod {namespace}/{name}"
    return Plan(
        fault=PodKill.name,
        run=run,
        targets=[f"pod {namespace}/{name} (uid {facts['uid']}) of {facts['owner']} on {facts['node']}"],
        commands=[Command(how, f"uid {facts['uid']}, grace {facts['grace_s']} s")],
        undo=[],
        facts=facts,
        notes=[f"one of {len(found)} pods with {facts['selector']}, at random by the run", *notes],
        expects=announces("pod-kill", None),
        blast={"replicas": 1, "of": facts["of"]},
        restarts=True,
    )


def _told_to_go(cluster: Cluster, facts: Mapping[str, Any]) -> float | None:
    """Delete or evict it; by when it is to be gone, where that is told. Raises ClusterError, Refused."""
    namespace, name, uid = facts["namespace"], facts["name"], facts["uid"]
    if facts["mode"] == "delete":
        told = cluster.delete_pod(namespace, name, uid).get("metadata") or {}
        return time_of(told.get("deletionTimestamp"))
    end = time.monotonic() + ASK_WITHIN_S
    while True:
        try:
            cluster.evict_pod(namespace, name, uid)
        except ClusterError as error:
            no = denied(error.code, error.status)
            # A budget's no is a finding: whoever asks again and again takes the pod in the moment when it hurts most.
            if not _may_ask_again(no) or time.monotonic() + (no.retry_after_s or 0.0) > end:
                raise
            time.sleep(no.retry_after_s or 1.0)
        else:
            pod = cluster.pod(namespace, name)
            same = pod is not None and uid_of(pod) == uid
            return time_of(pod["metadata"].get("deletionTimestamp")) if pod is not None and same else None


def _may_ask_again(no: Denied) -> bool:
    return no.kind in {"throttled", "processing"}


def _why(error: ClusterError, facts: Mapping[str, Any]) -> str:
    """The sentence for the report, where the API said no."""
    if error.code == HTTPStatus.CONFLICT:
        return f"{facts['name']} is another pod now (409): skipped, nothing was killed"
    if facts["mode"] == "evict" and error.code:
        no = denied(error.code, error.status)
        return f"not injected, {no.kind}: {no.why}"
    return str(error)


FAULT: Fault = PodKill()
