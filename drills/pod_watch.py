"""The way back after a pod-kill, watched through the API: told to go, gone, a new one scheduled, Ready, answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from drills import pods
from drills.cluster import Cluster, ClusterError, Object, has_condition, pods_path, uid_of
from drills.watch import completes, status_of

EVERY_S = 0.5
WATCH_S = 2.0  # so long its end takes at most


@dataclass
class PodsBack:
    """As watch.WayBack, over the pods of a selector. Times are unix seconds; None: not reached. `facts`: the plan's."""

    facts: Mapping[str, Any]
    clock: Callable[[], float] = time.time
    down_at: float | None = None  # told to go
    port_at: float | None = None
    ready_at: float | None = None
    completion_at: float | None = None
    steps: dict[str, float] = field(default_factory=dict)  # gone, made, scheduled, started
    _seen: Mapping[str, Object] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to watch, in threads."""
        for run in (self._follow, self._ask):
            thread = threading.Thread(target=run, name=f"pods-back{run.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(3 * WATCH_S)

    @property
    def healthy(self) -> int | None:
        """How many pods are Ready and stay; None while nobody has told."""
        seen = self._seen
        return None if seen is None else sum(map(pods.is_ready, seen.values()))

    def why_not(self) -> str:
        """What keeps the new pod, as the API tells now; "" where one is Ready."""
        seen, facts = self._seen, self.facts
        if seen is None:
            return "the Kubernetes API told nothing"
        events: list[Object] = []
        with suppress(ClusterError), Cluster() as cluster:  # without the right to read them the pods must do
            events = [event for pod in self._new(seen)
                      for event in cluster.events_of(facts["namespace"], uid_of(pod))]
        return pods.why_not_back(list(seen.values()), facts["uid"], facts["before"], facts["workload"], events)

    def _new(self, seen: Mapping[str, Object]) -> list[Object]:
        return pods.newcomers(list(seen.values()), self.facts["before"], self.facts["workload"])

    def _follow(self) -> None:
        facts = self.facts
        while not self._stop.is_set():
            with suppress(ClusterError), Cluster() as cluster:
                path = pods_path(facts["namespace"])
                for seen in cluster.follow(path, self._stop, labels=facts["selector"], for_s=WATCH_S):
                    self._note(seen)  # first: whoever is asked by what is seen is Ready before it answers
                    self._seen = dict(seen)
            self._stop.wait(EVERY_S)

    def _note(self, seen: Mapping[str, Object]) -> None:
        """What of the way is reached, by what is seen now."""
        now, victim = self.clock(), seen.get(self.facts["uid"])
        if victim is None or pods.is_terminating(victim):
            self.down_at = self.down_at or now
        if victim is None:
            self.steps.setdefault("gone", now)
        fresh = self._new(seen)
        if not fresh:
            return
        new = fresh[0]
        self.steps.setdefault("made", now)
        if (new.get("spec") or {}).get("nodeName") or has_condition(new, "PodScheduled"):
            self.steps.setdefault("scheduled", now)
        if (new.get("status") or {}).get("phase") == "Running":
            self.steps.setdefault("started", now)
        if pods.is_ready(new):
            self.ready_at = self.ready_at or now

    def _ask(self) -> None:
        """Ask the new pod itself: Ready is what a probe says, a completion is what users get."""
        while not self._stop.wait(EVERY_S) and self.completion_at is None:
            for new in self._new(self._seen or {}):
                url = pods.url_of(new)
                if url is None or status_of(url, "/health") is None:
                    continue
                self.port_at = self.port_at or self.clock()
                if pods.is_ready(new) and completes(url):
                    self.completion_at = self.clock()
                    break
