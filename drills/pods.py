"""What a pod's JSON says to a drill: may it be killed, is it stuck, where does its engine answer, is one back. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from drills.cluster import Object, has_condition, labels_of, labels_or, time_of, uid_of

PORT = "tocsin.dev/port"  # annotation: where the engine of a pod listens
USUAL_PORT = 8000
MOST_NAMED = 3  # replacements that were made and did not become Ready: a node without a GPU may fail thousands
MIRROR = "kubernetes.io/config.mirror"
OURS = ("app.kubernetes.io/name", "tocsin")
# Without these the cluster cannot bring anything back, whatever label somebody put on them.
NEVER = frozenset({"kube-system", "kube-public", "kube-node-lease"})


def name_of(pod: Mapping[str, Any]) -> str:
    """Its name, which a StatefulSet gives to the next one."""
    return str(pod["metadata"]["name"])


def is_terminating(pod: Mapping[str, Any]) -> bool:
    """Whether it was told to go; it may be Ready to its end."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether it serves, and is to go on."""
    return (pod.get("status") or {}).get("phase") == "Running" and has_condition(pod, "Ready") \
        and not is_terminating(pod)


def owner_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The controller that brings another one."""
    return next((one for one in pod["metadata"].get("ownerReferences") or () if one.get("controller")), None)


def workload_of(pod: Mapping[str, Any]) -> str:
    """Whose pod it is, through a rollout too: a Deployment's ReplicaSets differ by the hash at their ends."""
    owner, hash_ = owner_of(pod) or {}, labels_of(pod).get("pod-template-hash", "")
    name = str(owner.get("name", ""))
    return f"{owner.get('kind', '')}/{name.removesuffix(f'-{hash_}') if hash_ else name}"


def overdue_s(pod: Mapping[str, Any], now: float) -> float | None:
    """Seconds since a pod ought to be gone (its deletionTimestamp contains its grace); None where it need not be."""
    ends_at = time_of(pod["metadata"].get("deletionTimestamp"))
    return None if ends_at is None or now <= ends_at else now - ends_at


def stuck(pod: Mapping[str, Any], now: float) -> str:
    """Since when a pod ought to be gone, and what holds it; "" where nothing does. Nobody forces it."""
    late_s = overdue_s(pod, now)
    if late_s is None:
        return ""
    holds = pod["metadata"].get("finalizers") or ()
    return f"stuck_terminating, overdue by {late_s:.0f} s" + (f", finalizer {', '.join(holds)}" if holds else "")


def why_spared(pod: Mapping[str, Any], now: float) -> str:
    """Why a drill may not kill a pod; "" where it may."""
    owner, phase = owner_of(pod), (pod.get("status") or {}).get("phase")
    if is_terminating(pod):
        return stuck(pod, now) or "it is terminating"
    if MIRROR in labels_or(pod, "annotations") or (owner is not None and owner.get("kind") == "Node"):
        return "it is the kubelet's own (a mirror pod): deleting it here ends nothing"
    if owner is None:
        return "no controller owns it: nobody would bring it back"
    if labels_of(pod).get(OURS[0]) == OURS[1]:
        return "it is Tocsin's own"
    if phase != "Running":
        return f"it is {phase}"
    return "" if is_ready(pod) else "it is not Ready"


def choose(pods: Sequence[Object], now: float, seed: str) -> tuple[Object | None, dict[str, str]]:
    """One that may be killed, at random by the run, and why the others may not."""
    spared = {name_of(pod): why for pod in pods if (why := why_spared(pod, now))}
    fit = sorted((pod for pod in pods if name_of(pod) not in spared), key=uid_of)
    return (random.Random(seed).choice(fit) if fit else None), spared  # noqa: S311  (chance, no secret)


def port_of(pod: Mapping[str, Any]) -> int:
    """Where its engine listens: as annotated, where its readiness is asked, `http`, its first port, the usual one."""
    told = labels_or(pod, "annotations").get(PORT, "")
    if told.isdigit():
        return int(told)
    containers = (pod.get("spec") or {}).get("containers") or ()
    named = {port.get("name"): port["containerPort"] for one in containers for port in one.get("ports") or ()}
    for one in containers:
        asked = ((one.get("readinessProbe") or {}).get("httpGet") or {}).get("port")
        if asked is not None:
            found = named.get(asked, asked)
            if str(found).isdigit():
                return int(found)
    return int(named.get("http") or next(iter(named.values()), USUAL_PORT))


def url_of(pod: Mapping[str, Any]) -> str | None:
    """The address of its engine itself, without a path; None while it has no IP."""
    ip = (pod.get("status") or {}).get("podIP")
    return None if not ip else f"http://{f'[{ip}]' if ':' in ip else ip}:{port_of(pod)}"


def standing(pods: Sequence[Object]) -> list[Object]:
    """Those that are replicas: neither told to go, nor ended (a Job's, or evicted long ago)."""
    return [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
            and not is_terminating(pod)]


def newcomers(pods: Sequence[Object], before: Sequence[str], workload: str) -> list[Object]:
    """Those of a workload that were not there before, whatever their names, and are to stay: the likeliest first.

    A selector may choose several workloads' pods: another one's new pod replaces nothing.
    """

    def rank(pod: Object) -> tuple[bool, bool, str, str]:
        ended = (pod.get("status") or {}).get("phase") == "Failed"  # the kubelet did not take it: another one is made
        return not is_ready(pod), ended, str(pod["metadata"].get("creationTimestamp") or ""), uid_of(pod)

    fresh = (pod for pod in pods if uid_of(pod) not in before and not is_terminating(pod))
    return sorted((pod for pod in fresh if workload_of(pod) == workload), key=rank)


def why_not_back(pods: Sequence[Object], victim: str, before: Sequence[str], workload: str,
                 events: Sequence[Object] = ()) -> str:
    """What keeps a killed pod's replacement from being Ready, as the API tells. "" where one is."""
    fresh, said = newcomers(pods, before, workload), list[str]()
    if any(is_ready(pod) for pod in fresh):
        return ""
    said += [f"replacement {name_of(pod)} ({uid_of(pod)}) not ready: {_waits_for(pod, events)}"
             for pod in fresh[:MOST_NAMED]]
    said += [f"and {len(fresh) - MOST_NAMED} more"] if len(fresh) > MOST_NAMED else []
    said += [] if fresh else ["no replacement was made"]
    said += [f"{name_of(pod)} ({victim}) still terminating" for pod in pods if uid_of(pod) == victim]
    return "; ".join(said)


def _happened_at(event: Object) -> float:
    """When it was last counted; events of a series keep that apart."""
    series = event.get("series") or {}
    told = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return time_of(told or (event.get("metadata") or {}).get("creationTimestamp")) or 0.0


def _waits_for(pod: Object, events: Sequence[Object]) -> str:
    """The latest warning that still holds, else what its conditions and containers say."""
    status = pod.get("status") or {}
    own = [one for one in events if (one.get("involvedObject") or {}).get("uid") == uid_of(pod)
           and one.get("type") == "Warning"
           and not (one.get("reason") == "FailedScheduling" and has_condition(pod, "PodScheduled"))]
    told = [str(one.get("message", "")) for one in sorted(own, key=_happened_at, reverse=True)]
    told += [str(one.get("message") or one.get("reason")) for one in status.get("conditions") or ()
             if one.get("type") == "PodScheduled" and one.get("status") == "False"]
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting:
            told.append(": ".join(filter(None, (waiting.get("reason"), waiting.get("message")))))
    told += [": ".join(filter(None, (status.get("reason"), status.get("message"))))] if status.get("reason") else []
    return told[0] if told else f"phase {status.get('phase', 'unknown')}"
