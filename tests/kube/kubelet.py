"""A controller and a kubelet of tests: pods of one owner run as real engine processes here, each on its own IP."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from drills.cluster import Cluster, ClusterError, Object, uid_of
from drills.watch import status_of
from tests.drills.stand_ins import ROOT
from tests.kube.scene import LABELS, SELECTOR, Api

EVERY_S = 0.1


class Workload:
    """`replicas` pods, brought back after `delay_s`. `stateful`: under the same names. The engines listen on `port`."""

    def __init__(self, api: Api, node: str, ips: Sequence[str], *, replicas: int = 2, stateful: bool = False,
                 delay_s: float = 0.5, grace_s: int = 2, port: int = 8000, brings_back: bool = True) -> None:
        self.api, self.node, self.ips, self.replicas = api, node, ips, replicas
        self.stateful, self.delay_s, self.grace_s, self.port = stateful, delay_s, grace_s, port
        self.brings_back = brings_back
        self.engines: dict[str, tuple[str, subprocess.Popen[str]]] = {}  # uid -> (ip, process)
        self._missing_since: float | None = None
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Workload:
        for _ in range(self.replicas):
            self._make(self.pods())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30.0)
        for process in [process for _, process in self.engines.values()]:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def pods(self) -> list[Object]:
        """As the API tells."""
        return self.api.cluster.pods(self.api.namespace, labels=SELECTOR)

    def _run(self) -> None:
        with Cluster() as cluster:
            while not self._stop.wait(EVERY_S):
                with suppress(ClusterError):
                    self._step(cluster.pods(self.api.namespace, labels=SELECTOR))

    def _step(self, pods: list[Object]) -> None:
        for pod in pods:
            if pod["metadata"].get("deletionTimestamp"):
                self._end(pod)
            elif pod["status"]["phase"] != "Running":
                self._report(pod)
        now = time.monotonic()
        if len(pods) >= self.replicas or not self.brings_back:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since >= self.delay_s:
            self._make(pods)

    def _make(self, pods: list[Object]) -> None:
        """A new pod and its engine."""
        taken = {pod["metadata"]["name"] for pod in pods}
        self._number += 1
        names = [f"vllm-{n}" for n in range(self.replicas)] if self.stateful else [f"vllm-{self._number}-x"]
        name = next(name for name in names if name not in taken)
        used = {ip for ip, _ in self.engines.values()}
        ip = next(ip for ip in self.ips if ip not in used)
        pod = self.api.pod(name, phase="Pending", node=self.node, grace_s=self.grace_s, labels=LABELS,
                           annotations={"tocsin.dev/port": str(self.port)})
        # A kubelet on a busy machine may be late with its SIGTERM: a stream that began meanwhile is not to be cut.
        words = ["--host", ip, "--port", str(self.port), "--name", name, "--drain"]
        process = subprocess.Popen([sys.executable, "-m", "tests.drills.streaming_engine", *words], cwd=ROOT,
                                   stdout=subprocess.PIPE, text=True)
        self.engines[uid_of(pod)] = (ip, process)

    def _report(self, pod: Object) -> None:
        """Ready as soon as the engine says so."""
        ip, _ = self.engines[uid_of(pod)]
        if status_of(f"http://{ip}:{self.port}", "/health") == 200:
            more: dict[str, Any] = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
            self.api.be_ready("pods", self.api.namespace, pod["metadata"]["name"], **more)

    def _end(self, pod: Object) -> None:
        """SIGTERM, and the pod is gone when its process is."""
        _, process = self.engines.get(uid_of(pod), ("", None))
        if process is None:
            return
        process.terminate()
        if process.poll() is not None:
            if process.stdout is not None:
                process.stdout.close()
            del self.engines[uid_of(pod)]
            self.api.gone(pod)
