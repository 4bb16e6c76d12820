"""pod-kill from end to end: the API, pods that are real engine processes, a real router, agent, runner and verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drills import lease, ledger, pods
from drills.lease import said_of
from tests.agent_process import ROOT, AgentProcess
from tests.drills.stand_ins import streaming, tmpfs, wait_for
from tests.kube.kubelet import Workload
from tests.kube.scene import SELECTOR, Api
from tests.needs import find, need

pytestmark = pytest.mark.heavy

IPS = [f"127.0.77.{number}" for number in range(1, 5)]
WITHIN_S = 240.0
NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream engines {{ {servers} keepalive 32; }}
    server {{ listen 127.0.0.1:{port}; location / {{
        proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        proxy_connect_timeout 10s; proxy_next_upstream error timeout http_502 non_idempotent; }} }}
}}
"""
DRILL: dict[str, Any] = {
    "name": "kill", "fault": "pod-kill", "baseline": "4s", "for": "33s", "recovery": "8s", "resolve_within": "12s",
    "holds": {"goodput": "95% in 15s", "restart_within": "30s"},
}  # fmt: skip


@contextmanager
def router(folder: Path, port: int, engines: int) -> Iterator[dict[str, Any]]:
    """A real nginx before all addresses that a pod may have; the load of those who ask it."""
    need("nginx")
    program = find("nginx")
    assert program is not None
    servers = " ".join(f"server {ip}:{engines} max_fails=1 fail_timeout=2s;" for ip in IPS)
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, servers=servers, port=port))
    with subprocess.Popen([program, "-c", str(file), "-e", str(folder / "error.log")]) as process:
        try:
            yield {"url": f"http://127.0.0.1:{port}/v1", "rate": "26/s", "max_tokens": 4, "deadline": "10s"}
        finally:
            process.terminate()
            process.wait(30)


@dataclass
class Ran:
    """A drill that ran, and what it left in the API."""

    status: int
    record: Mapping[str, Any]
    said: str

    def row(self, name: str) -> Mapping[str, Any]:
        """One row of the judgement."""
        rows: list[Mapping[str, Any]] = self.record["rows"]
        return next(row for row in rows if row["name"] == name)


@dataclass
class Scene:
    """A router, and where the engines behind it listen."""

    load: Mapping[str, Any]
    engines: int


@pytest.fixture
def scene(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Scene]:
    """Free ports for both."""
    engines = free_port()
    with router(tmp_path, free_port(), engines) as load:
        yield Scene(load, engines)


def drilled(api: Api, folder: Path, scene: Scene, work: Workload, **more: Any) -> Ran:
    """Run the drill beside an agent, once all pods are Ready."""
    wait_for(lambda: sum(map(pods.is_ready, work.pods())) == work.replicas, WITHIN_S)
    target = {"namespace": api.namespace, "selector": SELECTOR}
    drill = DRILL | {"target": target, "load": dict(scene.load)} | more
    config = {"node": work.node, "poll": "1s", "nvml": "off", "kernel_log": "off", "discover": False,
              # No busy machine's stall is over it: 4 slow ones of 858 are no PASS any more.
              "slo": {"ttft_p99": "8s", "itl_p99": "8s"}, "drills": [drill],
              "drill_guards": {"lever_file": str(folder / "NO-DRILLS")}}  # fmt: skip
    with AgentProcess(folder / "agent", config) as agent:
        command = [sys.executable, "-m", "agent", "drill", "run", "kill", "--foreground", "--accept-unknown-budget",
                   "--config", str(agent.path)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    (run,) = (folder / "agent" / "state" / "drills" / "runs").iterdir()
    return Ran(done.returncode, json.loads((run / "run.json").read_bytes()), done.stdout + done.stderr)


def lease_of(api: Api) -> lease.Said:
    """The fleet's lease, afterwards."""
    found = api.cluster.lease(api.namespace, lease.NAME)
    assert found is not None
    return said_of(found)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_pod_is_killed_and_another_one_serves(stateful: bool, api: Api, scene: Scene, tmp_path: Path) -> None:
    """The drill that passes: traffic moved, no error, another pod Ready and answering, also under the same name."""
    with Workload(api, api.node(), IPS, stateful=stateful, port=scene.engines) as work:
        ran = drilled(api, tmp_path, scene, work)
        facts = ran.record["plan"]["facts"]
        assert (ran.record["verdict"], ran.status) == ("PASS", 0), ran.said
        assert facts["uid"] not in {pod["metadata"]["uid"] for pod in work.pods()}
    proof = next(row["evidence"] for row in ran.record["timeline"] if row["what"] == "fault proven")
    assert proof.startswith("deletionTimestamp set")
    restart = ran.row("restart")
    steps = ["down_s", "gone_s", "made_s", "ready_s", "completion_s"]
    took = [restart["detail"][name] for name in steps]
    assert None not in took
    assert took == sorted(took)
    assert ran.row("goodput")["verdict"] == "PASS"
    assert ran.row("no_other_stream_cut")["verdict"] == "PASS"
    said = lease_of(api)
    assert (said.node, said.targets) == ("", "")
    assert (said.marks["kill"].verdict, said.marks["kill"].run) == ("PASS", ran.record["run"])
    about = api.cluster.all("api/v1/namespaces/default/events", fields=f"involvedObject.name={work.node}")[0]
    ours = {event["reason"] for event in about if event["source"]["component"] == "tocsin"}
    assert ours == {"DrillInjected", "DrillEnded"}


def test_a_pod_that_nobody_brings_back(api: Api, scene: Scene, tmp_path: Path) -> None:
    """Users saw nothing, the replica never came back: FAIL, with what the API says of it."""
    holds = {"goodput": "95% in 15s", "restart_within": "10s"}
    with Workload(api, api.node(), IPS, brings_back=False, port=scene.engines) as work:
        ran = drilled(api, tmp_path, scene, work, holds=holds)
    assert (ran.record["verdict"], ran.status) == ("FAIL", 1), ran.said
    assert ran.row("restart")["got"].startswith("never answered (> 10 s): no replacement was made")
    assert ran.row("goodput")["verdict"] == "PASS"


def test_a_budget_that_refuses_the_eviction(api: Api, scene: Scene, tmp_path: Path) -> None:
    """The budget had no room: nothing was killed, and that is what the report says."""
    with Workload(api, api.node(), IPS, port=scene.engines) as work:
        api.budget("p", allowed=0)
        before = {pod["metadata"]["uid"] for pod in work.pods()}
        ran = drilled(api, tmp_path, scene, work, params={"mode": "evict"})
        assert {pod["metadata"]["uid"] for pod in work.pods() if pods.is_ready(pod)} == before
    assert (ran.record["verdict"], ran.status) == ("INVALID", 4), ran.said
    assert "not injected, blocked_by_pdb: The disruption budget p needs 2 healthy pods and has 2" in ran.record["why"]


def test_the_last_replica_is_not_killed(api: Api, scene: Scene, tmp_path: Path) -> None:
    """One pod is all there is: the guard counts what Kubernetes says is Ready."""
    with Workload(api, api.node(), IPS, replicas=1, port=scene.engines) as work:
        ran = drilled(api, tmp_path, scene, work)
        assert sum(map(pods.is_ready, work.pods())) == 1
    assert (ran.record["verdict"], ran.status) == ("SKIPPED", 6), ran.said
    assert "1 of 1 replicas are healthy, 0 after the fault; at least 1" in ran.record["why"]
    assert lease_of(api).node == ""


def free_bytes(disk: Path) -> int:
    """For those who are not root."""
    size = os.statvfs(disk)
    return size.f_bavail * size.f_frsize


def test_a_runner_that_is_stopped_past_its_lease(api: Api, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The runner stood still for a minute, another node might have begun: by then its fault was out, without it."""
    node, ports = api.node(), [free_port(), free_port()]
    with tmpfs(tmp_path / "disk", "48m") as disk, ExitStack() as stack:
        for port in ports:
            stack.enter_context(streaming(port))
        target, none = {"path": str(disk)}, dict.fromkeys(("goodput", "ttft_p99", "itl_p99", "error_ratio"))
        drill = {"name": "full", "fault": "disk-full", "target": target, "params": {"leave": "4MiB"}, "for": "200s",
                 "baseline": "1s", "recovery": "2s", "holds": none}  # fmt: skip
        engines = [{"name": f"e{port}", "url": f"http://127.0.0.1:{port}"} for port in ports]
        config = {"node": node, "poll": "1s", "nvml": "off", "kernel_log": "off", "discover": False, "engines": engines,
                  "drills": [drill], "drill_guards": {"lever_file": str(tmp_path / "NO-DRILLS")}}  # fmt: skip
        agent = stack.enter_context(AgentProcess(tmp_path / "agent", config))
        command = [sys.executable, "-m", "agent", "drill", "run", "full", "--foreground", "--accept-unknown-budget",
                   "--config", str(agent.path)]  # fmt: skip
        before = free_bytes(disk)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process, \
                ended(process):
            wait_for(lambda: free_bytes(disk) < before / 2, WITHIN_S)
            (run,) = (tmp_path / "agent" / "state" / "drills" / "runs").iterdir()
            runner = ledger.process_of(ledger.read(run), "runner")
            assert runner is not None
            os.kill(runner.pid, signal.SIGSTOP)
            try:
                took_s = wait_for(lambda: free_bytes(disk) >= before / 2, WITHIN_S)
                assert took_s < lease.PACE.lease_s
                assert lease_of(api).run == run.name  # and nobody had given it back meanwhile
            finally:
                os.kill(runner.pid, signal.SIGCONT)
            assert process.wait(WITHIN_S) == 5
    record = json.loads((run / "run.json").read_bytes())
    assert record["verdict"] == "ABORTED"
    assert lease.STALE in record["why"] or "the holder ended before its time" in record["why"]
    assert (lease_of(api).node, lease_of(api).marks["full"].verdict) == ("", "ABORTED")


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever the test finds: who waits for a process that goes on waits long."""
    try:
        yield
    finally:
        process.kill()
