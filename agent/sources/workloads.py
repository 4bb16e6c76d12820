"""The cluster's engines as workloads: how many replicas are wished, how many are Ready, whether a rollout progresses.

For the one agent that has `cluster_rules: true`. The API is asked once for each kind, and then watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agent.model import Batch, Gap, Sample, Why
from agent.sources.pods import AGAIN_S, KIND, engine_in, gives_gpus, kept
from agent.threads import begin
from drills.cluster import WATCH_S, Cluster, ClusterError, Object, labels_or, path_of


class Replicas(NamedTuple):
    """What a workload tells of itself. `rollout`: one progresses."""

    desired: int
    ready: int
    rollout: bool


def of_deployment(thing: Mapping[str, Any]) -> Replicas:
    """A Deployment. What its controller gave up (ProgressDeadlineExceeded) progresses no more."""
    spec, status = thing["spec"], thing.get("status") or {}
    desired, updated, old = int(spec.get("replicas", 1)), int(status.get("updatedReplicas", 0)), _behind(thing)
    told = next((one for one in status.get("conditions") or () if one.get("type") == "Progressing"), None)
    if told is None:  # it has no deadline: then its counts alone tell
        moves = updated < desired or int(status.get("replicas", 0)) > updated
    else:
        moves = told.get("status") == "True" and told.get("reason") != "NewReplicaSetAvailable"
    return Replicas(desired, int(status.get("readyReplicas", 0)), old or moves)


def of_statefulset(thing: Mapping[str, Any]) -> Replicas:
    """A StatefulSet. With OnDelete nothing progresses by itself; below a partition nothing is to be changed."""
    spec, status = thing["spec"], thing.get("status") or {}
    desired, strategy = int(spec.get("replicas", 1)), spec.get("updateStrategy") or {}
    wanted = desired - int((strategy.get("rollingUpdate") or {}).get("partition") or 0)
    other = status.get("updateRevision", "") != status.get("currentRevision", "")
    moves = strategy.get("type") != "OnDelete" and other and int(status.get("updatedReplicas", 0)) < wanted
    return Replicas(desired, int(status.get("readyReplicas", 0)), _behind(thing) or moves)


def of_daemonset(thing: Mapping[str, Any]) -> Replicas:
    """A DaemonSet: one on each node that it is for."""
    status, strategy = thing.get("status") or {}, thing["spec"].get("updateStrategy") or {}
    desired = int(status.get("desiredNumberScheduled", 0))
    moves = strategy.get("type") != "OnDelete" and int(status.get("updatedNumberScheduled", 0)) < desired
    return Replicas(desired, int(status.get("numberReady", 0)), _behind(thing) or moves)


def _behind(thing: Mapping[str, Any]) -> bool:
    """Its controller has not yet seen what was last asked of it."""
    wanted = int(thing["metadata"].get("generation", 0))
    return int((thing.get("status") or {}).get("observedGeneration", 0)) < wanted


KINDS: Mapping[str, Callable[[Mapping[str, Any]], Replicas]] = {
    "deployments": of_deployment, "statefulsets": of_statefulset, "daemonsets": of_daemonset,
}  # fmt: skip


def is_watched(thing: Mapping[str, Any]) -> bool:
    """Whether its pods are engines, or hold GPUs, and nobody says that they are none."""
    template = thing["spec"].get("template") or {}
    pod = {"spec": template.get("spec") or {}, "metadata": {**(template.get("metadata") or {}), "name": "", "uid": ""}}
    if labels_or(pod, "annotations").get(KIND) == "false":
        return False
    return engine_in(pod) is not None or gives_gpus(pod)


def slim(thing: Object) -> Object:
    """What of a workload is looked at."""
    meta, template = thing["metadata"], thing["spec"].get("template") or {}
    pod = kept({"metadata": template.get("metadata") or {}, "spec": template.get("spec") or {}})
    spec = {name: thing["spec"][name] for name in ("replicas", "updateStrategy") if name in thing["spec"]}
    return {"metadata": {name: meta[name] for name in ("namespace", "name", "uid", "generation") if name in meta},
            "spec": {**spec, "template": pod}, "status": thing.get("status") or {}}


class WorkloadsSource:
    """Fulfils agent.model.Source. `Batch.workloads` is None until the API has told of every kind once."""

    name = "workloads"

    def __init__(self, *, again_s: float = AGAIN_S, watch_s: float = WATCH_S) -> None:
        self.note = ""
        self._again_s, self._watch_s = again_s, watch_s
        self._seen: dict[str, Mapping[str, Object]] = {}  # plural -> uid -> object
        self._errors: dict[str, str] = {}  # plural -> why it is not told now
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def read(self, now: float) -> Batch:
        """What is known now: three samples a workload, or three Gaps while its kind is not told."""
        for plural in list(KINDS)[len(self._threads):]:
            self._threads.append(begin(self._follow, plural, plural))
        errors = dict(self._errors)
        error = "; ".join(dict.fromkeys(errors.values())) or None
        readings: list[Sample | Gap] = []
        names: list[str] = []
        for plural, count in KINDS.items():
            for thing in dict(self._seen.get(plural, {})).values():
                if not is_watched(thing):
                    continue
                name = f"{thing['metadata']['namespace']}/{thing['metadata']['name']}"
                if name in names:  # a Deployment and a StatefulSet of one name
                    name = f"{thing['metadata']['namespace']}/{plural.removesuffix('s')}.{thing['metadata']['name']}"
                names.append(name)
                told = zip(("replicas_desired", "replicas_ready", "rollout"), count(thing), strict=True)
                readings += [Sample(what, name, float(value), now) if plural not in errors
                             else Gap(what, name, Why.UNREACHABLE, errors[plural], now) for what, value in told]
        self.note = f"{len(names)} workloads of engines or GPUs in the cluster"
        known = tuple(names) if self._seen.keys() == KINDS.keys() else None
        return Batch(self.name, now, 0.0, tuple(readings), error=error, workloads=known)

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _follow(self, plural: str) -> None:
        def failed(error: ClusterError) -> None:
            if error.code not in (410, 504):  # these only ask for a new list
                advice = "; is overlays/cluster-rules applied?" if error.code == 403 else ""
                self._errors[plural] = f"{plural}: {error}{advice}"

        while not self._stop.is_set():
            try:
                with Cluster() as cluster:
                    for seen in cluster.follow(path_of("apps", "v1", plural), self._stop, again_s=self._again_s,
                                               for_s=self._watch_s, keep=slim, failed=failed):
                        self._seen[plural] = dict(seen)
                        self._errors.pop(plural, None)
            except ClusterError as error:
                failed(error)
                self._stop.wait(self._again_s)
