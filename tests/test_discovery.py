"""Engines that nobody configured: what a command line says, which ports are asked, and what happens when one ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.config import Config
from agent.daemon import adopt, local_port
from agent.model import Batch, FoundEngine, GpuFacts
from agent.node import Node, Setup
from agent.signals import Target
from agent.sources.discovery import (
    DiscoverySource,
    Named,
    engine_of,
    kind_of_page,
    listening,
    ranks_of,
)
from agent.sources.discovery import Process as Seen
from agent.sources.fetch import is_local
from rules import severity_of
from tests.engine_pages import PAGES
from tests.page_server import PageServer
from tests.receiver import wait_until
from tests.scenes import SLO, T0, built_in
from tests.test_loop import Life, Scripted

LONG_S = 30.0


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("/usr/bin/python3 /usr/local/bin/vllm serve meta-llama/Llama --port 8123 -tp 4", Named("vllm", 8123)),
        ("vllm serve m", Named("vllm", 8000)),
        ("python -m vllm.entrypoints.openai.api_server --port=8001 --host 127.0.0.1", Named("vllm", 8001, "127.0.0.1")),
        ("python3 -u -m vllm.entrypoints.openai.api_server", Named("vllm", 8000)),
        ("vllm serve m --ssl-keyfile k --ssl-certfile c", Named("vllm", 8000, None, True)),
        ("python -m sglang.launch_server --model-path m --port 30001", Named("sglang", 30001)),
        ("python -m sglang.launch_server --model-path m", Named("sglang", 30000)),
        ("trtllm-serve m --host 0.0.0.0 --port 8003", Named("trtllm-serve", 8003, "0.0.0.0")),
        ("text-generation-launcher --model-id m -p 8080", Named("tgi", 8080)),
        ("/app/llama-server -m m.gguf --port 8081 --metrics", Named("llamacpp", 8081)),
        ("lmdeploy serve api_server m --server-port 23334", Named("lmdeploy", 23334)),
        ("tritonserver --model-repository /m --metrics-port 8012 --http-port 8000", Named("triton", 8012)),
        ("python -m dynamo.frontend --http-port 8100", Named("dynamo", 8100)),
        ("llama-server -m m.gguf", Named("llamacpp", 8080, None, False, True)),  # LLAMA_ARG_PORT may say another
        ("text-generation-launcher --model-id m", Named("tgi", 3000, None, False, True)),  # PORT, as in its image
        ("vllm serve m --config c.yaml", Named("vllm", 8000, None, False, True)),
        ("vllm serve m --config c.yaml --port 8123", Named("vllm", 8123)),
        ("vllm serve m --headless --data-parallel-start-rank 4", None),  # a second node's ranks serve nobody
        ("python -m sglang.launch_server --model-path m --nnodes 2 --node-rank 1", None),
        ("python -m sglang.launch_server --model-path m --nnodes 2 --node_rank 0", Named("sglang", 30000)),
        ("vllm serve m --uds /run/vllm.sock", None),  # no port
        ("vllm serve m --port ${PORT}", None),  # not one that we could know
        ("vllm bench serve --port 8000", None),
        ("grep vllm serve", None),
        ("vim vllm serve", None),
        ("docker run vllm/vllm-openai --port 8000", None),  # its own process is another
        ("bash -c vllm serve m", None),
        ("python train.py --note vllm serve --port 29500", None),
        ("torchrun --master-port 29500 -m sglang.launch_server", None),
        ("VLLM::EngineCore", None),
        ("", None),
    ],
)
def test_what_a_command_line_says(line: str, want: Named | None) -> None:
    """The kind and the port, and nothing for what only looks so."""
    assert engine_of(line.split()) == want


class FakeProc:
    """A /proc with the processes that one puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add(1, "init", name="self")
        (folder / "self" / "net").mkdir()
        self.listen()

    def add(self, pid: int, line: str, *, parent: int = 1, namespace: str | None = "net:[1]", name: str = "",
            sockets: Sequence[int] = ()) -> None:
        home = self.folder / (name or str(pid))
        (home / "ns").mkdir(parents=True)
        (home / "cmdline").write_bytes(b"\0".join(word.encode() for word in line.split()) + b"\0")
        (home / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        if namespace is not None:
            (home / "ns" / "net").symlink_to(namespace)
        (home / "fd").mkdir()
        for number, inode in enumerate(sockets):
            (home / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    def listen(self, *ports: int) -> None:
        """These ports listen on 0.0.0.0, each with its number as inode; and NCCL's on 127.0.0.1 does, too."""
        rows = [f"   {i}: 00000000:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {port}" for i, port in enumerate(ports)]
        rows.append("   9: 0100007F:733C 00000000:0000 0A 0:0 0:0 0 0 0 29500")
        (self.folder / "self" / "net" / "tcp").write_text("\n".join(["  sl  local_address", *rows]) + "\n")

    def look(self) -> tuple[tuple[FoundEngine, ...], str]:
        source = DiscoverySource(proc=self.folder)
        return source.read(1.0).found or (), source.note


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def test_an_engine_with_its_workers(proc: FakeProc) -> None:
    """Four processes, one engine; those that descend from it are its own, with the ranks that their titles tell."""
    proc.add(100, "/usr/bin/python3 /opt/bin/vllm serve m --port 8123")
    proc.add(101, "VLLM::EngineCore", parent=100)
    proc.add(102, "VLLM::Worker_TP0", parent=101)
    proc.add(103, "VLLM::Worker_TP1", parent=101)
    proc.add(104, "/usr/bin/python3 /opt/bin/vllm serve m --port 8123", parent=100)  # forked, with the same words
    proc.listen(8123)
    (engine,), note = proc.look()

    assert (engine.name, engine.url, engine.kind) == ("127.0.0.1:8123", "http://127.0.0.1:8123", "vllm")
    assert engine.pids == (100, 101, 102, 103, 104)
    assert engine.ranks == {102: 0, 103: 1}
    assert engine.how == "its command line (process 100)"
    assert note == ""


def test_an_engine_that_still_loads_is_found(proc: FakeProc) -> None:
    """It does not listen yet: it is starting, and not absent."""
    proc.add(100, "vllm serve m")
    assert [engine.name for engine in proc.look()[0]] == ["127.0.0.1:8000"]


def test_a_launcher_is_not_at_the_port_that_its_router_names_otherwise(proc: FakeProc) -> None:
    """TGI's image says PORT=80 in its environment: its launcher was awaited on 3000, and paged as down for ever."""
    proc.add(100, "text-generation-launcher --model-id m")
    assert proc.look()[0] == ()
    assert proc.look()[1] == ("process 100 (text-generation-launcher) does not say its port on its command line, and"
                              " does not listen on 3000: name its address under engines")
    proc.add(101, "text-generation-router --port 80", parent=100)
    proc.listen(80)
    found, note = proc.look()
    assert ([engine.name for engine in found], note) == (["127.0.0.1:80"], "")


@pytest.mark.parametrize(("owner", "want"), [(100, ["127.0.0.1:8080"]), (200, [])])
def test_a_default_port_is_taken_where_it_is_the_engines_own(proc: FakeProc, owner: int, want: list[str]) -> None:
    """The environment may name another port, and somebody else's server listen on the default one."""
    proc.add(100, "llama-server -m m.gguf", sockets=[8080] if owner == 100 else [])
    proc.add(200, "java -jar jenkins.war", sockets=[8080] if owner == 200 else [])
    proc.listen(8080)
    (proc.folder / "100" / "net").symlink_to(proc.folder / "self" / "net")
    assert [engine.name for engine in proc.look()[0]] == want


def test_an_engine_in_a_container_of_its_own_is_said(proc: FakeProc) -> None:
    """Its port 8000 is another one than ours: a GET to ours would ask somebody else."""
    proc.add(100, "vllm serve m", namespace="net:[2]")
    found, note = proc.look()
    assert found == ()
    assert note == ("a vLLM (process 100) in another network namespace: name its address under engines")


CGROUPS = {
    "systemd": "0::/../../kubepods-burstable-pod1f2e3d4c_0000_4000_8000_00000000000a.slice/cri-containerd-ab.scope\n",
    "cgroupfs": "9:pids:/kubepods/pod1f2e3d4c-0000-4000-8000-00000000000a/ab\n0::/kubepods/pod1f2e3d4c-0000-4000-8000"
                "-00000000000a/ab\n",
}
TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     +-- 10.244.3.0/24 2 0 2
        |-- 10.244.3.0
           /24 link UNICAST
        |-- 10.244.3.7
           /32 host LOCAL
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
Local:
        |-- 10.244.3.7
           /32 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
"""  # as kernel 6.18 writes it, shortened


@pytest.mark.parametrize("driver", CGROUPS)
@pytest.mark.parametrize("namespace", ["net:[2]", None])
def test_an_engine_in_a_pod_is_asked_at_the_pod_s_address(proc: FakeProc, driver: str, namespace: str | None) -> None:
    """With the node's process namespace and nothing else: whose pod by the control group, and its address."""
    for pid, parent in ((100, 101), (101, 100)):  # a ring: one of their numbers was given anew meanwhile
        proc.add(pid, "vllm serve m --port 8123", namespace=namespace, parent=parent)
        (proc.folder / str(pid) / "net").mkdir()
        (proc.folder / str(pid) / "net" / "fib_trie").write_text(TRIE)
        (proc.folder / str(pid) / "cgroup").write_text(CGROUPS[driver])
    proc.listen(8123)  # ours, and another's
    (engine,), note = proc.look()
    assert (engine.url, engine.kind, engine.port) == ("http://10.244.3.7:8123", "vllm", 0)
    assert (engine.pod, engine.pids) == ("1f2e3d4c-0000-4000-8000-00000000000a", (100, 101))
    assert note == ""


def test_a_pod_with_two_addresses_is_said(proc: FakeProc) -> None:
    """Of a pod on the node's own network, or on two: which of them answers is not known."""
    proc.add(100, "vllm serve m", namespace="net:[2]")
    (proc.folder / "100" / "net").mkdir()
    (proc.folder / "100" / "net" / "fib_trie").write_text(TRIE.replace("10.244.3.7", "192.168.7.7", 1))
    (proc.folder / "100" / "cgroup").write_text(CGROUPS["systemd"])
    found, note = proc.look()
    assert found == ()
    assert "name its address under engines" in note


def test_a_process_that_we_may_not_look_into_is_taken_at_its_word_if_its_port_listens(proc: FakeProc) -> None:
    """Another user's: the command line is there to read, the namespace is not."""
    proc.add(100, "vllm serve m --port 8123", namespace=None)
    assert proc.look()[0] == ()
    proc.listen(8123)
    assert [engine.port for engine in proc.look()[0]] == [8123]


def test_no_port_is_asked_that_nobody_named(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GET into NCCL's or TCPStore's port broke the start of a training job: only well-known ports are asked."""
    asked: list[str] = []

    def ask(url: str) -> str:
        asked.append(url)
        return "sglang"

    monkeypatch.setattr("agent.sources.discovery.kind_of_page", ask)
    proc.listen(29500, 5555, 8080, 30000, 8000)
    proc.add(50, "python -m http.server 8000", sockets=[8000])  # its owner is seen, and is no engine
    source = DiscoverySource(proc=proc.folder, every_s=0)

    for _ in range(3):
        found = source.read(1.0).found or ()
    assert [(engine.name, engine.kind) for engine in found] == [("127.0.0.1:30000", "sglang")]
    assert asked == ["http://127.0.0.1:30000/metrics"]  # once a socket


def test_a_page_shows_whose_it_is_or_that_it_is_nobodys() -> None:
    """The metrics of a web shop stood on port 8000."""
    with PageServer(PAGES["sglang-0.5.8"](60)) as server:
        url = f"{server.url}/metrics"
        assert kind_of_page(url) == "sglang"
        server.set_page("shop_orders_total 7\n")
        assert kind_of_page(url) is None
        server.set_page(b"<html>", headers={"Content-Type": "text/html"})
        assert kind_of_page(url) is None
        server.set_page(b"", status=404)
        assert kind_of_page(url) is None
    assert kind_of_page(url) is None


def test_it_looks_every_30_seconds(proc: FakeProc) -> None:
    """Between two looks it says that it did not look, which is not "nothing there"."""
    now = [100.0]
    source = DiscoverySource(proc=proc.folder, clock=lambda: now[0])
    assert source.read(1.0).found == ()
    now[0] += 29
    assert source.read(30.0).found is None
    now[0] += 1
    assert source.read(31.0).found == ()


def test_the_real_proc_shows_what_listens() -> None:
    """The form of /proc/net/tcp, and a wildcard asked through loopback."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as wide:
        seen = listening(Path("/proc"))
        assert seen[one.getsockname()[1]][0] == "127.0.0.1"
        assert seen[wide.getsockname()[1]] == ("127.0.0.1", os.fstat(wide.fileno()).st_ino)


@pytest.mark.parametrize(
    "title", ["VLLM::Worker_TP1", "VLLM::Worker_TP1_EP1", "sglang::scheduler_TP1", "VLLM::Worker1"]
)
def test_ranks_by_their_titles(title: str) -> None:
    """As vLLM and SGLang name their workers."""
    assert ranks_of((7,), [Seen(7, (title,))]) == {7: 1}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process whose command line is vLLM's, and whose page is one of vLLM 0.32."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (tmp_path / "page.txt").write_text(PAGES["vllm-0.32"](600))
    (package / "api_server.py").write_text(
        "import sys, http.server, pathlib\n"
        "page = pathlib.Path(sys.argv[-1]).read_bytes()\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', str(len(page))); self.end_headers()\n"
        "        self.wfile.write(page)\n"
        "    def log_message(self, *args): pass\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[2])), Handler).serve_forever()\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
               str(tmp_path / "page.txt")]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
        yield process, port
        process.kill()


def test_an_engine_is_found_read_and_when_it_has_ended_let_go(
    tmp_path: Path, engine: tuple[subprocess.Popen[bytes], int]
) -> None:
    """Nothing is configured. It is found by its command line, read, down when it was killed, and closed 10 m later."""
    process, port = engine
    name = f"127.0.0.1:{port}"
    wait_until(lambda: port in listening(Path("/proc")), LONG_S, "the port")
    discovery = DiscoverySource(every_s=0)

    def look(now: float) -> Batch:
        found = discovery.read(now).found or ()
        return Batch("discovery", now, 0.0, found=tuple(one for one in found if one.port == port))

    life = Life(tmp_path)
    life.targets, life.rules = (), ("engine-down", "kv-cache-utilization")
    agent = life.start(Scripted("discovery", look))
    agent.adopt = lambda found: adopt(Config(), found, None)

    def is_read() -> bool:
        life.tick()
        return ("kv-cache-utilization", "OK") in [(row["rule"], row["state"]) for row in agent.check()["signals"]]

    def is_down() -> bool:
        life.tick()
        return ("engine-down", name) in life.fired()

    wait_until(is_read, LONG_S, "its first page")
    assert [target.name for target in agent.node.setup.targets] == [name]
    process.kill()
    process.wait()
    wait_until(is_down, LONG_S, "engine-down")
    for _ in range(125):
        life.tick()
    assert agent.node.setup.targets == ()
    assert f"engine:{name}" not in agent.collector.slots
    resolved = [row for row in agent.transitions(-1) if row["state"] == "resolved"]
    assert [(row["rule"], row["why"]) for row in resolved] == [("engine-down", "subject removed")]
    life.kill()


def node_with(*targets: Target) -> Node:
    return Node(Setup("gpu-17", 5.0, SLO, targets, tuple(built_in().values()), severity_of))


def test_what_is_configured_is_read_as_configured() -> None:
    """Its name, its GPUs and its service levels stand; discovery only tells whose processes it has."""
    node = node_with(Target("llama", (), SLO, address="localhost:8000", port=8000))
    node.see([FoundEngine("127.0.0.1:8000", "http://127.0.0.1:8000", "vllm", "", 8000, (100, 102, 103))], T0)
    assert node.found_engines() == {}


def test_gpus_are_those_that_its_processes_compute_on_in_the_order_of_the_ranks() -> None:
    """Rank 0 is on GPU 5 and rank 1 on GPU 2; GPU 0 is somebody else's."""
    node = node_with(Target("llama", (), SLO, address="localhost:8000", port=8000),
                     Target("other", (), SLO, gpus=(7,), address="localhost:8001", port=8001))
    node.see([FoundEngine("127.0.0.1:8000", "", "vllm", "", 8000, (100, 102, 103), {102: 0, 103: 1})], T0)
    pids = {0: (999,), 2: (103,), 5: (102,), 7: (100,)}
    gpus = tuple(GpuFacts(f"GPU-{i}", i, "H200", "", pids=on) for i, on in pids.items() if i != 7)
    node.take(Batch("nvml", T0, 0.0, gpus=gpus))
    node.step(T0, 5.0)
    assert node.scene.targets["llama"].gpus == (5, 2)
    assert node.scene.targets["other"].gpus == (7,)


def test_what_was_found_is_known_again_after_a_restart_of_ours(tmp_path: Path) -> None:
    """The engine is down while Tocsin restarts: its alert goes on, though no process shows it."""
    seen = FoundEngine("127.0.0.1:1", "http://127.0.0.1:1", "vllm", "its command line", 1)
    present = [True]

    def look(now: float) -> Batch:
        return Batch("discovery", now, 0.0, found=(seen,) if present[0] else ())

    life = Life(tmp_path)
    life.targets, life.rules = (), ("engine-down",)
    for there in (True, False):
        present[0] = there
        agent = life.start(Scripted("discovery", look))
        agent.adopt = lambda found: adopt(Config(), found, None)
        life.tick(2)
        assert [target.name for target in agent.node.setup.targets] == ["127.0.0.1:1"]
    life.kill()


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://127.0.0.1:8000", 8000), ("http://localhost", 80), ("http://[::1]:8000", 8000), ("http://10.9.8.7", 0)],
)
def test_which_port_of_this_machine_an_address_means(url: str, port: int) -> None:
    """Another machine's port 8000 is not ours."""
    assert local_port(url) == port


@pytest.mark.parametrize(
    ("host", "want"),
    [("127.0.0.2", True), ("0.0.0.0", True), ("::1", True), (os.uname().nodename, True),
     (f"{os.uname().nodename}.example.net", True), ("192.0.2.7", False), ("edge.example.net", False), ("", False)],
)
def test_what_is_this_machine(host: str, want: bool) -> None:
    """An engine written with the node's own name or address was found a second time on loopback, and watched twice."""
    assert is_local(host) is want
