"""What the drills of the torture act upon, and the eye that looks for what they left."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

from drills import nft, proc
from drills.ledger import short_tag
from drills.model import Drill, Load
from tests.drills.netns import Netns, lab, says
from tests.drills.openai_server import Behaviour, OpenAiServer
from tests.drills.stand_ins import Engine, engine, tmpfs

FAULTS = ("process-kill", "engine-hang", "packet-loss", "upstream-timeout", "disk-full")
ENGINE, CLIENT, PORT = "10.77.0.2", "10.77.0.1", 8000
TAG = "TOCSIN_TORTURE_BY"  # our pid, in the environment of drilld, and so of all that it starts
FAULT_S = 0.5

SERVER = f"""
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")
class Server(ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *words): pass
server = Server(("{ENGINE}", {PORT}), Handler)
print("up", flush=True)
server.serve_forever()
"""
# Requests for the proxy to delay, and bare packets to lose: TCP itself would wait for what is lost.
TRAFFIC = f"""
import http.client, socket, struct, threading, time
def ask():
    while True:
        try:
            connection = http.client.HTTPConnection("{ENGINE}", {PORT}, timeout=2.0)
            connection.request("GET", "/"); connection.getresponse().read(); connection.close()
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)
threading.Thread(target=ask, daemon=True).start()
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
print("up", flush=True)
while True:
    for _ in range(5):
        raw.sendto(struct.pack("!HHIIBBHHH", 40000, {PORT}, 0, 0, 5 << 4, 0x10, 512, 0, 0), ("{ENGINE}", 0))
    time.sleep(0.01)
"""


class Agent:
    """A stand-in of the agent: calm, fresh, and told what the drills tell it."""

    def __init__(self, socket: Path) -> None:
        self.announced: set[str] = set()
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nothing."""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                fresh: dict[str, Any] = {"at": time.time(), "signals": [], "silences": []}
                self._say(fresh if path == "/check" else [])

            def do_POST(self) -> None:
                told = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                if path == "/drills/announce":
                    agent.announced.add(json.loads(told)["run"])
                elif path == "/drills/end":
                    agent.announced.discard(query.removeprefix("run="))
                self._say({"ok": True})

            def _say(self, told: object) -> None:
                body = json.dumps(told).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):
                    self.wfile.write(body)

        class Server(ThreadingMixIn, UnixStreamServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A runner was killed in the middle of its question."""

        self.server = Server(str(socket), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Health(BaseHTTPRequestHandler):
    """An engine that is well."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def do_GET(self) -> None:
        """Say so."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@dataclass
class Scene:
    """All of it. `victims`: engines of two processes, made anew for each kill."""

    folder: Path
    agent: Agent
    disk: Path
    places: Mapping[str, Netns]  # engine, client
    users_url: str
    stack: ExitStack
    victim: Engine | None = None
    runs: set[str] = field(default_factory=set)
    _victim_stack: ExitStack = field(default_factory=ExitStack)
    _before: dict[str, str] = field(default_factory=dict)
    _made: int = 0

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.folder / "tocsin.yaml"

    @property
    def root(self) -> Path:
        """The drills' state."""
        return self.folder / "state" / "drills"

    def drill(self, fault: str, *, loaded: bool) -> Drill:
        """A drill of the shortest kind."""
        target: dict[str, Any] = {"port": PORT, "netns": self.places["engine"].path, "address": ENGINE}
        params: dict[str, Any] = {}
        if fault in {"process-kill", "engine-hang"}:
            target = {"port": self.fresh_victim().port}
        elif fault == "packet-loss":
            params = {"share": 0.3, "direction": "both", "peer": {"netns": self.places["client"].path}}
        elif fault == "upstream-timeout":
            params = {"delay_s": 0.1}
        else:
            target, params = {"state_dir": str(self.root)}, {"path": str(self.disk), "leave_bytes": 1 << 20}
        load = Load(self.users_url, rate_per_s=10.0, deadline_s=1.0, max_tokens=4) if loaded else None
        return Drill(
            fault, fault, target, load=load, for_s=FAULT_S, baseline_s=0.1, recovery_s=0.2, params=params,
            resolve_within_s=0.2,
        )  # fmt: skip

    def fresh_victim(self) -> Engine:
        """An engine whose processes are all there."""
        if self.victim is None or not (proc.is_same(self.victim.page) and proc.is_same(self.victim.core)):
            self._victim_stack.close()
            self._made += 1
            self.victim = self._victim_stack.enter_context(engine(self.folder / "engines" / str(self._made)))
        return self.victim

    def remember(self) -> None:
        """How the world looks before a drill."""
        self._before = self._kernel()

    def _kernel(self) -> dict[str, str]:
        """Rulesets, listeners and the disk, of each place that a drill touches."""
        found = {f"ruleset in {name}": place.ruleset() for name, place in self.places.items()}
        for name, place in self.places.items():
            lines = place.run("ss", "-Hltn").splitlines()
            found[f"listeners in {name}"] = " ".join(line.split()[3] for line in lines)
        ours = {f"{nft.PREFIX}{short_tag(run)}" for run in self.runs}  # others may test here at the same time
        found["tables in the host"] = " ".join(ours & set(nft.tables(nft.place_of(None))))
        size = os.statvfs(self.disk)
        found["disk"] = f"{sorted(one.name for one in self.disk.iterdir())}, {size.f_bavail} blocks free"
        return found

    def left(self, spared: frozenset[int] = frozenset()) -> list[str]:
        """What is in the world that was not; `spared`: processes of ours that may live."""
        # One without a command line is at its end: it holds nothing any more.
        lines = {pid: " ".join(proc.command_line(pid)) for pid in tagged() if pid not in spared}
        found = [f"process {pid}: {line[:90]}" for pid, line in lines.items() if line]
        for one in (self.victim.page, self.victim.core) if self.victim else ():
            if set(proc.threads(one.pid).values()) & {"t", "T"}:
                found.append(f"process {one.pid} is stopped")
        now = self._kernel()
        return found + [f"{what}: {now[what]!r}, was {was!r}" for what, was in self._before.items() if now[what] != was]

    def close(self) -> None:
        """End all of it."""
        self._victim_stack.close()
        self.stack.close()


def tagged() -> list[int]:
    """Every process that drilld, or what it started, has started, whoever is its parent now."""
    return [pid for pid in proc.pids() if _is_tagged(pid)]


def _is_tagged(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{TAG}={os.getpid()}".encode() in words


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """Namespaces, engines, a disk, an agent; root and nftables are needed."""
    with ExitStack() as stack:
        net = stack.enter_context(lab())
        client, server = net.namespace("client"), net.namespace("engine")
        net.link(client, f"{CLIENT}/24", server, f"{ENGINE}/24")
        for place, program in ((server, SERVER), (client, TRAFFIC)):
            assert says(net.start(place, sys.executable, "-c", program)) == "up"
        disk = stack.enter_context(tmpfs(folder / "disk", "16m"))
        agent = Agent(folder / "tocsin.sock")
        users = stack.enter_context(OpenAiServer(Behaviour(chunks=2)))
        ports = []
        for _ in range(2):
            health = ThreadingHTTPServer(("127.0.0.1", 0), Health)
            threading.Thread(target=health.serve_forever, daemon=True).start()
            ports.append(health.server_address[1])
        engines = "".join(f'  - {{name: e{port}, url: "http://127.0.0.1:{port}"}}\n' for port in ports)
        made = Scene(folder, agent, disk, {"engine": server, "client": client}, users.url, stack.pop_all())
        made.config.write_text(
            f'state_dir: "{folder}/state"\nsocket: "{folder}/tocsin.sock"\nnode: torture\nengines:\n{engines}'
            f'drill_guards: {{lever_file: "{folder}/NO-DRILLS"}}\n'
        )
    try:
        yield made
    finally:
        made.close()
