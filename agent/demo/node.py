"""The demo's node: its processes, its folder, its ports. What is started here is ended here, whatever happens.

Engines, router and users are simulated; `tocsin run` and `tocsin drilld` are the real ones, on a configuration that is
written here and that says what of it is otherwise than by default.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from grp import getgrgid
from pathlib import Path
from typing import Any

from agent import client
from agent.demo import gpus, router
from agent.demo.receiver import HOOK, PAGER, Receiver
from agent.demo.scenario import ENGINES, TELLS, Scenario
from agent.demo.users import Users

ROOT = Path(__file__).resolve().parents[2]
OWN = {ENGINES[0]: range(4), ENGINES[1]: range(4, 8)}  # the GPUs of each engine's ranks
ADVANCE_S = 0.25
SERVED_S = 3600.0  # that the engines say to have run for when the story begins: one that just started is not judged
RESTART_S = 5.0  # so long a supervisor waits: three failed reads are an alert
READY_WITHIN_S = 60.0
END_WITHIN_S = {"drilld": 60.0}  # a run under way is aborted in good order
LEFT_WITHIN_S = 5.0  # for what the ended ones have started themselves
PR_SET_PDEATHSIG = 1
# Otherwise than by default, so that three minutes are enough; the story says so. A real node keeps the defaults.
SHORTENED: Mapping[str, Mapping[str, Any]] = {
    "gpu-thermal-limit": {"for": "4s", "keep": "6s"},
    "gpu-temperature": {"for": "4s", "keep": "6s"},
    "rank-clock-spread": {"for": "6s", "keep": "6s"},
    "itl-p99": {"for": "4s", "keep": "6s", "window": "20s"},
    "engine-down": {"keep": "5s"},
    # half of a window must have been watched before the verdict is more than UNKNOWN
    "preemptions": {"window": "20s"},
    "preemption-storm": {"window": "20s"},
    "ttft-p99": {"window": "20s", "min_count": 20},
}


class NotStarted(RuntimeError):  # noqa: N818  (it says what is the case)
    """Something of the demo does not come up; the text names it and its log."""


def free_port() -> int:
    """A port of loopback that nobody has just now."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


class Node:
    """All of it. `with Node(scenario) as node` starts it; at the end nothing is left."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.folder = Path(tempfile.mkdtemp(prefix="tocsin-demo-"))
        self.engines = {name: free_port() for name in ENGINES}
        self.router_port, self.port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket, self.drilld_socket = self.folder / "tocsin.sock", self.folder / "drilld.sock"
        self.receiver = Receiver()
        self.gpus = [gpus.Gpu(index) for index in range(gpus.COUNT)]
        self.nginx = router.nginx()
        self._router: router.Router | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # of the GPUs, and of who is started
        self._stopping = threading.Event()
        self.users: Users | None = None

    # --- start and end ---

    def __enter__(self) -> Node:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        (self.folder / "kern.log").touch()
        gpus.save(self.folder / "gpus.json", self.gpus)
        self._write_config()
        threading.Thread(target=self._advance, name="gpus", daemon=True).start()
        for name in self.engines:
            threading.Thread(target=self._supervise, args=(name,), name=f"supervisor of {name}", daemon=True).start()
        ports = list(self.engines.values())
        if self.nginx is not None:
            self._spawn("router", router.nginx_command(self.nginx, self.folder, self.router_port, ports))
        else:
            self._router = router.Router(self.router_port, ports)
        for name, port in (*self.engines.items(), ("router", self.router_port)):
            self._await(name, partial(_answers, port))
        self.users = Users(self.router_port, self.scenario.users, self.scenario.seed)
        config = str(self.folder / "tocsin.yaml")
        self._spawn("agent", [sys.executable, "-P", "-m", "agent.demo.agent", "--config", config])
        self._await("agent", lambda: bool(self.ask("/check")))
        self._spawn("drilld", [sys.executable, "-P", "-m", "drills.daemon", "--config", config])
        self._await("drilld", lambda: bool(client.ask(self.drilld_socket, "/")))

    def close(self) -> None:
        """End all of it, who watches first; then its folder goes too."""
        self._stopping.set()
        if self.users is not None:
            self.users.stop()
        for name in ("drilld", "agent", "router", *self.engines):
            with self._lock:
                process = self._processes.pop(name, None)
            if process is not None:
                _end(process, END_WITHIN_S.get(name, 10.0))
        if self._router is not None:
            self._router.shutdown()
            self._router.server_close()
        self.receiver.shutdown()
        self.receiver.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[str]:
        """After the end: what is there all the same, processes (each began in the folder) and the folder itself."""
        deadline = time.monotonic() + LEFT_WITHIN_S
        while True:
            pids = [path.name for path in Path("/proc").glob("[0-9]*") if _works_in(path, self.folder)]
            if not pids or time.monotonic() > deadline:
                return [f"process {pid}" for pid in pids] + [str(self.folder)] * self.folder.exists()
            time.sleep(0.1)

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start a process that Ctrl-C does not reach, and that does not outlive us; None where the end has begun."""
        environment = os.environ | {"TOCSIN_DEMO_GPUS": str(self.folder / "gpus.json"), "PYTHONUNBUFFERED": "1"}
        if not {"site-packages", "dist-packages"} & set(ROOT.parts):  # from a checkout, which -P would not find
            known = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([known] if known else [])])
        with self._lock, (self.folder / f"{name}.log").open("ab") as log:
            if self._stopping.is_set():
                return None
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True, preexec_fn=die_with_us)
            self._processes[name] = process
        return process

    def _await(self, name: str, is_up: Callable[[], bool]) -> None:
        """Raises NotStarted."""
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            with suppress(client.NotRunning, client.AgentError, OSError):
                if is_up():
                    return
            process = self._processes.get(name)
            ended = process is not None and process.poll() is not None and name not in self.engines
            if ended or time.monotonic() > deadline:
                raise NotStarted(f"{name} does not come up: {self._last_words(name)}")
            time.sleep(0.1)

    def _last_words(self, name: str) -> str:
        try:
            lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else f"it said nothing within {READY_WITHIN_S:g} s; is the machine overloaded?"

    def _supervise(self, name: str) -> None:
        """Keep an engine running, as systemd would: RESTART_S after its end it is started anew."""
        # by its path: what runs as a module of ours no drill may touch
        command = [sys.executable, "-P", str(ROOT / "agent/demo/engine.py"), "--name", name, "--port",
                   str(self.engines[name]), "--gpus", *map(str, OWN[name]), "--gpus-file",
                   str(self.folder / "gpus.json"), "--load-file", str(self.folder / f"load-{name}")]
        up_s = SERVED_S
        while (process := self._spawn(name, [*command, "--up-for", f"{up_s:g}"])) is not None:
            process.wait()
            up_s = 0.0
            (self.folder / f"load-{name}").unlink(missing_ok=True)
            if self._stopping.wait(RESTART_S):
                return

    def _advance(self) -> None:
        """The GPUs, moved on by the load that their engines tell."""
        last = time.monotonic()
        while not self._stopping.wait(ADVANCE_S):
            now = time.monotonic()
            with self._lock:
                for name, own in OWN.items():
                    try:
                        load = float((self.folder / f"load-{name}").read_text())
                    except (OSError, ValueError):
                        load = 0.0
                    for index in own:
                        self.gpus[index].load = load
                        self.gpus[index].advance(min(now - last, 1.0))
                with suppress(OSError):
                    gpus.save(self.folder / "gpus.json", self.gpus)
            last = now

    # --- what a story does ---

    def cool(self, index: int, share: float) -> None:
        """A GPU gets this share of its air."""
        with self._lock:
            self.gpus[index].cooling = share

    def reset(self, index: int) -> None:
        """A GPU comes back, cool and whole."""
        with self._lock:
            self.gpus[index] = gpus.Gpu(index)

    def xid(self, index: int, number: int, text: str) -> None:
        """The driver's line in the kernel log; some numbers cost the GPU."""
        with self._lock, (self.folder / "kern.log").open("a") as log:
            log.write(gpus.xid_line(self.gpus[index], number, text, datetime.now(UTC).isoformat()))
            self.gpus[index].lost |= number == gpus.OFF_THE_BUS

    def kill(self, name: str) -> None:
        """An engine dies, unannounced."""
        with self._lock:
            self._processes[name].kill()

    def ask(self, path: str) -> Any:
        """The agent's answer. Raises as agent.client.ask does."""
        return client.ask(self.socket, path)

    def firing(self) -> list[Mapping[str, Any]]:
        """Pages and tickets that fire now."""
        return [row for row in self.ask("/alerts?resolved=0")
                if row["state"] == "firing" and row["severity"] in TELLS]

    # --- its configuration ---

    def _write_config(self) -> None:
        (self.folder / "pager-key").write_text("demo\n")
        told: dict[str, Any] = {
            "node": "demo-node", "poll": "1s", "state_dir": str(self.folder / "state"), "socket": str(self.socket),
            "listen": f"127.0.0.1:{self.port}", "external_url": self.url, "discover": False,
            "kernel_log": str(self.folder / "kern.log"), "slo": {"ttft_p99": "1s", "itl_p99": "150ms"},
            "engines": [{"name": name, "url": f"http://127.0.0.1:{port}", "gpus": list(OWN[name])}
                        for name, port in self.engines.items()],
            "notify": [
                {"pagerduty": {"url": f"{self.receiver.url}{PAGER}",
                               "routing_key_file": str(self.folder / "pager-key")}},
                {"webhook": {"url": f"{self.receiver.url}{HOOK}"}, "match": {"severity": ["page"]}},
            ],
            "rules": {"override": SHORTENED},
            "drill_guards": {"lever_file": str(self.folder / "NO-DRILLS"), "min_gap": "0s"},
            "drills": [self._drill(name) for name in self.engines],
        }
        if os.geteuid() != 0:  # drilld obeys root and this group
            with suppress(KeyError):
                told["drill_group"] = getgrgid(os.getegid()).gr_name
        (self.folder / "tocsin.yaml").write_text(json.dumps(told, indent=2))  # JSON is YAML

    def _drill(self, name: str) -> Mapping[str, Any]:
        """A drill that kills an engine. Its limits leave room for a machine that others use too."""
        return {
            "name": f"kill-{name}", "fault": "process-kill", "target": {"engine": name}, "baseline": "4s",
            "for": "33s", "recovery": "8s", "resolve_within": "40s", "echo": f"{self.receiver.url}{HOOK}",
            "load": {"url": f"http://127.0.0.1:{self.router_port}/v1", "rate": "15/s", "max_tokens": 4,
                     "deadline": "10s"},
            "holds": {"goodput": "95% in 10s", "ttft_p99": "2s", "itl_p99": "1s", "restart_within": "30s"},
        }


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1.0):
        return True


def _works_in(process: Path, folder: Path) -> bool:
    """Whether a process of /proc has its working directory there; that of a process of somebody else is not told."""
    with suppress(OSError):
        return (process / "cwd").readlink().as_posix().removesuffix(" (deleted)") == str(folder)
    return False


def die_with_us() -> None:
    """In the child: the kernel ends it should we be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes], within_s: float) -> None:
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
