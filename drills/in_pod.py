"""A drill on a pod of this node: which pod of a selector, which of its processes, and its network namespace.

What comes of it is a target by process, as a drill on a host has one. The namespace is its sandbox's: it outlives a
container that is restarted. A pod with the host's network has the host's, where its port tells it from others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from drills import gpu, pods, proc
from drills.cluster import Cluster, ClusterError, Object, uid_of
from drills.faults.pod_kill import refuse_namespace
from drills.model import Drill, Plan, Refused

SANDBOX = "pause"  # the process that keeps a pod's namespaces


def resolve(drill: Drill, run: str) -> Drill:
    """The drill with its pod found, where its target is one by a selector; pod-kill finds its own. Raises Refused."""
    if drill.fault == "pod-kill" or not drill.target.get("selector"):
        return drill
    namespace, selector = str(drill.target.get("namespace", "")), str(drill.target["selector"])
    try:
        with Cluster() as cluster:
            refuse_namespace(cluster, namespace)
            found = cluster.pods(namespace, labels=selector)
    except ClusterError as error:
        raise Refused(f"{drill.fault}: {error}") from error
    node = drill.target.get("node")
    own = [pod for pod in found if (pod.get("spec") or {}).get("nodeName") == node]
    victim, spared = pods.choose(own, time.time(), run)
    if victim is None:
        told = "; ".join(f"{name}: {why}" for name, why in spared.items()) or f"{len(found)} elsewhere"
        raise Refused(f"{drill.fault}: no pod with {selector} to be had on node {node} ({told})")
    return _aimed(drill, victim, found)


def _aimed(drill: Drill, pod: Object, found: Sequence[Object]) -> Drill:
    """At the process of the pod that listens where its engine does. Raises Refused."""
    name, port = f"{pod['metadata']['namespace']}/{pods.name_of(pod)}", pods.port_of(pod)
    members = processes_of(uid_of(pod))
    if not members:
        raise Refused(f"{drill.fault}: no process of pod {name} is to be seen here: is this its node, with hostPID?")
    seen = proc.processes()  # one of them may end meanwhile
    sandbox = next((one for one in members if one in seen and seen[one].comm == SANDBOX), members[0])
    netns = proc.netns_of(sandbox)
    listening = [pid for pid in proc.listeners(port, netns) if pid in members]
    if not listening:
        raise Refused(f"{drill.fault}: no process of pod {name} listens on port {port}; annotate {pods.PORT}: the port")
    aimed = {"pid": listening[0], "port": port, "netns": sandbox, "url": pods.url_of(pod),
             "address": (pod.get("status") or {}).get("podIP"), "pod": f"pod {name} (uid {uid_of(pod)})",
             "ready": sum(map(pods.is_ready, found)), "of": len(pods.standing(found))}
    return replace(drill, target={**drill.target, **{key: value for key, value in aimed.items() if value is not None}})


def processes_of(uid: str) -> list[int]:
    """The processes of a pod by their cgroups, oldest first."""
    found = []
    for pid, seen in proc.processes().items():
        if gpu.pod_of(gpu.cgroups_of(pid)) == uid:
            found.append((seen.start_ticks, pid))
    return [pid for _, pid in sorted(found)]


def counted(plan: Plan, drill: Drill) -> Plan:
    """The plan with its pod named, and the pods counted as Kubernetes tells them: guards go by that."""
    if drill.target.get("pod") is None:
        return plan
    facts = {**plan.facts, "ready": drill.target["ready"]}
    blast = {**plan.blast, "of": drill.target["of"]}
    return replace(plan, targets=[str(drill.target["pod"]), *plan.targets], facts=facts, blast=blast)
