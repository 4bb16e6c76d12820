"""A world to drill in: client | router | engine a | engine b, each in a network namespace of its own.

The router is a real nginx, the engines are streaming servers of two processes that a supervisor brings back, and with
the client live the real agent, a real Alertmanager and a receiver that echoes: it reads the engines over links of its
own, as one on their nodes would.

    with world(tmp_path, drills=[{"name": "kill", "fault": "process-kill", "target": {"engine": "a"}, …}]) as made:
        ran = made.drill("kill")
        assert ran.verdict == "PASS"
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from drills import proc, runner
from drills.model import Drill, Request
from drills.prober import read_requests
from tests.agent_process import ROOT, AgentProcess
from tests.alertmanager import RealAlertmanager
from tests.drills.netns import NEEDS as NETNS_NEEDS
from tests.drills.netns import Lab, Netns, lab
from tests.receiver import Receiver, wait_until

T = TypeVar("T")
NEEDS = (*NETNS_NEEDS, "nginx", "alertmanager")
CLONE_NEWNET = 0x40000000
USERS = "http://10.77.0.2:8080/v1"
ENGINES = {"a": ("10.77.1.2", "10.78.1.2"), "b": ("10.77.2.2", "10.78.2.2")}  # as the router and as the agent see it
PORT, HOOK_PORT, ALERTMANAGER_PORT = 8000, 9000, 9093
HOOK = f"http://127.0.0.1:{HOOK_PORT}"
RESTART_S = 5.0  # so long a supervisor waits: the agent must see three failed reads, a second apart
RUN_WITHIN_S = 300.0
FAIL_OVER = "proxy_next_upstream error timeout http_502 non_idempotent;"
NO_FAIL_OVER = "proxy_next_upstream off;"
NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream engines {{ {servers} keepalive 32; }}
    server {{
        listen 8080;
        location / {{
            proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
            proxy_connect_timeout 1s; proxy_read_timeout {read_timeout}; {next_upstream}
        }}
    }}
}}
"""


def inside(netns: Netns, do: Callable[[], T]) -> T:
    """Do something as a thread in a namespace: its sockets and the processes that it starts stay there."""

    def enter() -> T:
        with open(netns.path, "rb") as opened:  # noqa: PTH123
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(opened.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        return do()

    with ThreadPoolExecutor(1) as pool:  # the thread ends with it
        return pool.submit(enter).result()


class Supervised:
    """An engine, and whoever brings it back after `restart_s`, as systemd would."""

    def __init__(self, net: Lab, netns: Netns, words: Sequence[str], restart_s: float = RESTART_S) -> None:
        self.netns, self._net, self._words, self._restart_s = netns, net, words, restart_s
        self._stopping = threading.Event()
        self.restarts = 0
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[str]:
        process = self._net.start(self.netns, sys.executable, "-m", "tests.drills.streaming_engine", *self._words)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def _watch(self) -> None:
        while True:
            self.process.wait()
            if self._stopping.wait(self._restart_s):
                return
            self.process = self._start()
            self.restarts += 1

    def states(self) -> set[str]:
        """The states of all threads of its processes: t is stopped by a tracer."""
        pids = [self.process.pid, *(one.pid for one in proc.descendants(self.process.pid))]
        return {state for pid in pids for state in proc.threads(pid).values()}

    def stop(self) -> None:
        """End it for good."""
        self._stopping.set()
        self.process.kill()
        self._thread.join()


@dataclass(frozen=True)
class Ran:
    """A drill that ran: exit status, run.json, what it said, its folder."""

    status: int
    record: Mapping[str, Any]
    said: str
    folder: Path

    @property
    def verdict(self) -> str:
        """PASS, FAIL …"""
        return str(self.record["verdict"])

    @property
    def why(self) -> str:
        """And why."""
        return str(self.record["why"])

    def row(self, name: str) -> Mapping[str, Any]:
        """One row of the judgement."""
        rows: list[Mapping[str, Any]] = self.record["rows"]
        return next(row for row in rows if row["name"] == name)

    def requests(self) -> list[Request]:
        """What the prober sent, one at a time."""
        return list(read_requests(self.folder / "requests.jsonl"))

    def span(self, phase: str) -> tuple[float, float]:
        """From when to when a phase lasted."""
        start, end = self.record["spans"][phase]
        return float(start), float(end)

    def at(self, what: str) -> float:
        """When something of the timeline happened."""
        return next(float(row["at"]) for row in self.record["timeline"] if row["what"] == what)


@dataclass
class World:
    """What there is."""

    folder: Path
    net: Lab
    client: Netns
    router: Netns
    engines: dict[str, Supervised] = field(default_factory=dict)
    nginx: subprocess.Popen[str] | None = None
    receiver: Receiver | None = None
    alertmanager: RealAlertmanager | None = None
    agent: AgentProcess | None = None

    @property
    def namespaces(self) -> list[Netns]:
        """All four."""
        return [self.client, self.router, *(engine.netns for engine in self.engines.values())]

    def rulesets(self) -> list[str]:
        """Their nftables, for comparison byte by byte."""
        return [netns.ruleset() for netns in self.namespaces]

    def processes(self) -> set[tuple[int, str]]:
        """All that run in them."""
        inodes = {os.stat(netns.path).st_ino for netns in self.namespaces}  # noqa: PTH116
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (folder / "ns/net").stat().st_ino in inodes:
                    found.add((int(folder.name), (folder / "comm").read_text().strip()))
        return found

    @property
    def config(self) -> Path:
        """tocsin.yaml."""
        return self.folder / "agent" / "tocsin.yaml"

    @property
    def runs(self) -> Path:
        """Where the runs are."""
        return self.folder / "agent" / "state" / "drills" / "runs"

    def alerts(self) -> list[dict[str, Any]]:
        """What fires, as the agent says."""
        assert self.agent is not None
        return [row for row in self.agent.ask("/alerts?resolved=0") if row["state"] == "firing"]

    def tocsin(self, *words: str, main: Sequence[str] = ("agent",)) -> subprocess.CompletedProcess[str]:
        """The command line, beside the agent. `main`: the module that is run, and its own words."""
        command = [sys.executable, "-m", *main, *words, "--config", str(self.config)]
        return inside(self.client, lambda: subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=False))  # fmt: skip

    @contextmanager
    def drilld(self) -> Iterator[None]:
        """The drill daemon, beside the agent."""
        command = [sys.executable, "-m", "drills.daemon", "--config", str(self.config)]
        with (self.folder / "drilld.log").open("wb") as log:
            process = inside(self.client, lambda: subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        try:
            wait_until((self.folder / "agent" / "drilld.sock").exists, 20.0, "drilld's socket")
            yield
        finally:
            process.terminate()
            assert process.wait(30.0) == 0, (self.folder / "drilld.log").read_text()

    def drill(self, name: str, *, accept: bool = True, main: Sequence[str] = ("agent",)) -> Ran:
        """Run a drill to its end. `accept`: an unknown error budget."""
        known = set(self.runs.iterdir()) if self.runs.exists() else set()
        more = ["--accept-unknown-budget"] * accept
        done = self.tocsin("drill", "run", name, "--foreground", *more, main=main)
        said = done.stdout + done.stderr
        new = set(self.runs.iterdir()) - known if self.runs.exists() else set()
        assert len(new) == 1, said
        folder = new.pop()
        return Ran(done.returncode, json.loads((folder / "run.json").read_bytes()), said, folder)

    def drill_due(self, name: str) -> Ran:
        """Run a drill as drilld does when it is due."""
        due_at, drill = time.time(), Drill(name, "")
        folder = runner.create(self.runs.parent, drill, f"{name}-{due_at:.0f}-due", started_by="schedule",
                               config_path=self.config, due_at=due_at)  # fmt: skip
        command = [sys.executable, "-m", "drills.runner", str(folder)]
        done = inside(self.client, lambda: subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=False))  # fmt: skip
        return Ran(done.returncode, json.loads((folder / "run.json").read_bytes()), done.stderr, folder)

    def wait_running(self, what: str, timeout_s: float = 60.0) -> Path:
        """The folder of a run under way, once its timeline says `what`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for file in self.runs.glob("*/run.json"):
                told = json.loads(file.read_bytes())
                if any(row["what"] == what for row in told["timeline"]) and told["ended_at"] is None:
                    return file.parent
            time.sleep(0.05)
        raise AssertionError(f"no run said {what!r} within {timeout_s:g} s")


def load(rate: float = 26.0, **more: Any) -> dict[str, Any]:
    """`load:` at the users' address: short streams, so many in 41 s (1,066) that five slow ones still prove 1 %."""
    return {"url": USERS, "rate": f"{rate:g}/s", "max_tokens": 4, "deadline": "10s"} | more


def settings(folder: Path, drills: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """tocsin.yaml of this world. The limits leave room for a machine of two cores that others use too."""
    told = {
        "node": "n1", "poll": "1s", "nvml": "off", "kernel_log": "off", "discover": False,
        "slo": {"ttft_p99": "1s", "itl_p99": "500ms"},
        "engines": [{"name": name, "url": f"http://{seen}:{PORT}"} for name, (_, seen) in ENGINES.items()],
        "notify": [{"alertmanager": {"urls": [f"http://127.0.0.1:{ALERTMANAGER_PORT}"], "resend": "1s",
                                     "min_visible": "2s"}}],
        "rules": {"override": {"engine-down": {"keep": "1s"}}},
        "drill_guards": {"lever_file": str(folder / "NO-DRILLS")},
        "drills": list(drills),
    }  # fmt: skip
    return told | more


@contextmanager
def world(
    folder: Path, *, drills: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None,
    engines: Sequence[str] = (), next_upstream: str = FAIL_OVER, max_fails: int = 1, read_timeout: str = "60s",
    hears: bool = True,
) -> Iterator[World]:  # fmt: skip
    """Make one. `engines`: more words for both; `hears` False: nobody listens behind the Alertmanager.

    In `drills` "@a", "@b", "@router" stand for the paths of the namespaces.
    """
    with lab() as net, ExitStack() as stack:
        made = World(folder, net, net.namespace("client"), net.namespace("router"))
        net.link(made.client, "10.77.0.1/24", made.router, "10.77.0.2/24")
        words = ["--port", str(PORT), "--preempted", str(folder / "preempted"), *engines]
        for number, name in enumerate(ENGINES, 1):
            netns = net.namespace(name)
            net.link(made.router, f"10.77.{number}.1/24", netns, f"10.77.{number}.2/24")
            net.link(made.client, f"10.78.{number}.1/24", netns, f"10.78.{number}.2/24")
            made.engines[name] = Supervised(net, netns, ["--name", name, *words])
            stack.callback(made.engines[name].stop)
        servers = " ".join(f"server {seen}:{PORT} max_fails={max_fails} fail_timeout=10s;" for seen, _ in
                           ENGINES.values())  # fmt: skip
        (folder / "nginx.conf").write_text(NGINX.format(
            folder=folder, servers=servers, next_upstream=next_upstream, read_timeout=read_timeout))  # fmt: skip
        made.nginx = net.start(made.router, "nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
        if hears:
            made.receiver = Receiver(port=HOOK_PORT, echoes=True)
            inside(made.client, made.receiver.__enter__)
            stack.callback(made.receiver.__exit__, None, None, None)
        made.alertmanager = RealAlertmanager(folder / "alertmanager", ALERTMANAGER_PORT, HOOK)
        inside(made.client, made.alertmanager.start)
        stack.callback(made.alertmanager.stop)
        text = json.dumps(settings(folder, drills, **(config or {})))
        for name, netns in (("router", made.router), *((n, engine.netns) for n, engine in made.engines.items())):
            text = text.replace(f'"@{name}"', f'"{netns.path}"')
        made.agent = AgentProcess(folder / "agent", json.loads(text))
        inside(made.client, made.agent.start)
        stack.callback(made.agent.kill)
        yield made
