"""Engines that nobody configured: by their processes' command lines and the ports named there.

No port is asked that no engine's command line names, but for a short list of well-known ones whose owner cannot be
seen; what listens on the others (NCCL, TCPStore, ZMQ) is never touched. Reads /proc alone, and changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from agent.engines import KINDS, detect, load_map
from agent.escape import is_secret, plain_value
from agent.exposition import ACCEPT, PageError, Reader, decode
from agent.model import Batch, FoundEngine
from agent.sources.fetch import Fetcher, FetchError

EVERY_S = 30.0
WELL_KNOWN = (8000, 30000, 8002, 23333)  # vLLM, SGLang, Triton's metrics, LMDeploy
ASK_S = 1.0
MAX_BYTES = 8 * 1024 * 1024
# As systemd writes it (kubepods-burstable-pod1f2e_….slice), and as cgroupfs does (kubepods/burstable/pod1f2e-…).
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


class Form(NamedTuple):
    """How one engine's command line looks. `words`: all of them, in this order, are arguments of it (or end one)."""

    kind: str
    words: tuple[str, ...]
    ports: tuple[str, ...]  # options that name the port of its metrics
    default: int
    hosts: tuple[str, ...] = ("--host",)
    is_env: bool = False  # where no option names the port, its environment may


FORMS: tuple[Form, ...] = (
    Form("vllm", ("vllm", "serve"), ("--port",), 8000),
    Form("vllm", ("vllm.entrypoints.openai.api_server",), ("--port",), 8000),
    Form("sglang", ("sglang.launch_server",), ("--port",), 30000),
    Form("sglang", ("sglang", "serve"), ("--port",), 30000),
    Form("trtllm-serve", ("trtllm-serve",), ("--port",), 8000),
    Form("tgi", ("text-generation-launcher",), ("--port", "-p"), 3000, ("--hostname",), is_env=True),
    Form("tgi", ("text-generation-router",), ("--port", "-p"), 3000, ("--hostname",), is_env=True),
    Form("llamacpp", ("llama-server",), ("--port",), 8080, is_env=True),
    Form("lmdeploy", ("lmdeploy", "serve", "api_server"), ("--server-port",), 23333, ("--server-name",)),
    Form("triton", ("tritonserver",), ("--metrics-port",), 8002, ("--metrics-address",)),
    Form("dynamo", ("dynamo.frontend",), ("--http-port",), 8000, ("--http-host",)),
)


class Named(NamedTuple):
    """What a command line says."""

    kind: str
    port: int
    host: str | None = None
    is_tls: bool = False
    is_guessed: bool = False  # the port is the default one, and a file or the environment may name another


def engine_of(argv: Sequence[str]) -> Named | None:
    """The engine that a command line starts; None where it starts none that we know, or one without a port."""
    if not argv or "-c" in argv[1:3] or any(word.startswith("--uds") for word in argv):
        return None
    for form in FORMS:
        at = _after(argv, form.words)
        if at is None:
            continue
        options = argv[at:]
        if "--headless" in options or _option(options, ("--node-rank",)) not in (None, "0"):
            return None  # ranks of a server on another node: nobody serves here
        port = _option(options, form.ports)
        if port is not None and not re.fullmatch(r"[0-9]{1,5}", port):
            return None
        is_tls = _option(options, ("--ssl-certfile", "--ssl-keyfile")) is not None
        is_guessed = port is None and (form.is_env or _option(options, ("--config",)) is not None)
        port_number = form.default if port is None else int(port)
        return Named(form.kind, port_number, _option(options, form.hosts), is_tls, is_guessed)
    return None


LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers", "collect-detailed-traces", "cuda-graph-bs",
                   "cudagraph-capture-sizes", "lora-modules", "lora-paths", "lora-target-modules", "middleware",
                   "served-model-name"})  # options of vLLM and SGLang with several values: no model comes after them
MODEL = frozenset({"model", "model-path", "model-id"})


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """An engine's options by name without dashes ("" where one has no value), and its model; never a secret.

    Several values are told with a space between them.
    """
    at = next((after for form in FORMS if (after := _after(argv, form.words)) is not None), None)
    words = [] if at is None else list(argv[at:])
    told: list[tuple[str, list[str]]] = [("", [])]  # before the first option stands the model
    for word in words:
        name, values = told[-1]
        is_key = len(word) > 6 and word[1] != "-" and not values and is_secret(name)  # of llama.cpp
        if not word.startswith("-") or word[1:2].isdigit() or is_key:
            told[-1][1].append(word)
            continue
        name, is_joined, value = word.lstrip("-").partition("=")
        told.append((name.replace("_", "-"), [value] if is_joined else []))
    found = {"model": plain_value(told[0][1][:1])} if told[0][1] else {}
    is_named = bool(found) or any(name in MODEL for name, _ in told)
    for name, values in told[1:]:
        if not name or is_secret(name):
            continue
        if len(values) > 1 and not is_named and name not in LISTS:
            found["model"] = plain_value([values.pop()])  # serve --port 8000 org/m
            is_named = True
        found[name] = plain_value(values)
    return found


def _after(argv: Sequence[str], words: Sequence[str]) -> int | None:
    """Where the options begin, if the program or module of a command line is this one.

    It stands within its first words (an interpreter, its options, `-m`), never among the options of another program.
    """
    head = next((i for i, word in enumerate(argv) if i and word.startswith("--")), len(argv))
    start = next((i for i, word in enumerate(argv[:min(head, 6)]) if word.rpartition("/")[2] == words[0]), None)
    if start is None or list(argv[start + 1:start + len(words)]) != list(words[1:]):
        return None
    if start and not (argv[start - 1] == "-m" or _is_interpreter(argv[0])):
        return None
    return start + len(words)


def _is_interpreter(word: str) -> bool:
    return re.fullmatch(r"(python|pypy)[0-9.]*|bash|sh|env|numactl|taskset|nsys|tini", Path(word).name) is not None


def _option(argv: Sequence[str], names: Iterable[str]) -> str | None:
    """The last value of an option, written `--port 8000` or `--port=8000`."""
    wanted, found = frozenset(names), None
    for i, word in enumerate(argv):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") in wanted:
            found = value if is_joined else (argv[i + 1] if i + 1 < len(argv) else None)
    return found


class Process(NamedTuple):
    """One process as /proc shows it."""

    pid: int
    argv: tuple[str, ...]


def processes(proc: Path) -> list[Process]:
    """All that have a command line."""
    found = []
    for name in os.listdir(proc):  # noqa: PTH208  (a Path for each of thousands costs more than reading them)
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/cmdline", "rb") as file:  # noqa: PTH123
                raw = file.read()
        except OSError:
            continue
        if raw:
            argv = tuple(word.decode("utf-8", "replace") for word in raw.rstrip(b"\0").split(b"\0"))
            found.append(Process(int(name), argv))
    return sorted(found)


def is_here(proc: Path, pid: int) -> bool | None:
    """Whether a process is in our network namespace; None where we may not look."""
    ours, theirs = _namespace(proc / "self"), _namespace(proc / str(pid))
    return None if theirs is None or ours is None else theirs == ours


def _namespace(folder: Path) -> str | None:
    try:
        return str((folder / "ns" / "net").readlink())
    except OSError:
        return None


def pod_of(proc: Path, pid: int) -> str:
    """The uid of the pod that a process is in, by the name of its control group; "" where it is in none."""
    try:
        told = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return ""
    match = _POD.search(told)
    return "" if match is None else match[1].replace("_", "-")


def address_in(process: Path) -> str | None:
    """The one address that a process's network namespace has beside loopback; None where there are none, or several.

    `process`: its folder in /proc. Anybody may read that of anybody.
    """
    try:
        lines = (process / "net" / "fib_trie").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = {before.rpartition(" ")[2] for before, line in pairwise(lines) if line.strip() == "/32 host LOCAL"}
    own = [address for address in found if not address.startswith("127.")]
    return own[0] if len(own) == 1 else None


def listening(proc: Path, where: str = "self") -> dict[int, tuple[str, int]]:
    """Port -> (address, inode) of what listens in a process's network namespace, ours if no other is asked for."""
    found: dict[int, tuple[str, int]] = {}
    for name in ("tcp6", "tcp"):
        with suppress(OSError), (proc / where / "net" / name).open() as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) < 10 or fields[3] != _LISTEN:
                    break  # the kernel tells who listens first; its tables of connections take milliseconds to walk
                address, _, port = fields[1].rpartition(":")
                found[int(port, 16)] = (_address(address), int(fields[9]))
    return found


def _address(text: str) -> str:
    """An address of /proc/net/tcp, each 32 bits in the order of this machine; a wildcard is loopback."""
    raw = b"".join(struct.pack("=I", int(text[i:i + 8], 16)) for i in range(0, len(text), 8))
    shown = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    shown = shown.removeprefix("::ffff:")
    return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(shown, shown)  # noqa: S104  (asked, not listened on)


def owner_of(proc: Path, inode: int, of: Iterable[Process]) -> Process | None:
    """Whose a socket is; None where nobody whom we may look at holds it."""
    wanted = f"socket:[{inode}]"
    for process in of:
        try:
            if any(str(link.readlink()) == wanted for link in (proc / str(process.pid) / "fd").iterdir()):
                return process
        except OSError:
            continue
    return None


def descendants(pid: int, of: Iterable[Process], proc: Path) -> tuple[int, ...]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for process in of:
        with suppress(OSError):
            stat = (proc / str(process.pid) / "stat").read_text(errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(process.pid)
    found, todo = set[int](), [pid]
    while todo:  # read one after the other, with numbers given anew in between, it may even be a ring
        one = todo.pop()
        todo += [] if one in found else children.get(one, [])
        found.add(one)
    return tuple(sorted(found))


RANK = re.compile(r"(?:Worker|TP|rank)[_ ]?(?:TP)?[_ ]?([0-9]+)", re.IGNORECASE)


def ranks_of(pids: Iterable[int], of: Iterable[Process]) -> dict[int, int]:
    """Process -> rank, where it says so in its title (`VLLM::Worker_TP1`, `sglang::scheduler_TP1`)."""
    ours = frozenset(pids)
    titles = {process.pid: process.argv[0] for process in of if process.pid in ours and "::" in process.argv[0]}
    return {pid: int(match[1]) for pid, title in titles.items() if (match := RANK.search(title)) is not None}


class DiscoverySource:
    """Looks for engines every 30 s; fulfils agent.model.Source. `Batch.found` is None where it did not look.

    `note` says, for a person, what was seen and cannot be read.
    """

    name = "discovery"

    def __init__(self, *, proc: Path = Path("/proc"), every_s: float = EVERY_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.note = ""
        self._proc, self._every_s, self._clock = proc, every_s, clock
        self._looked_at: float | None = None
        self._asked: dict[tuple[int, int], str | None] = {}  # (port, inode) -> kind, None: no engine
        self._versions: dict[tuple[str, int], str] = {}  # (engine, inode) -> as it was told

    def read(self, now: float) -> Batch:
        """Look, if it is time."""
        start = time.monotonic()
        if self._looked_at is not None and self._clock() - self._looked_at < self._every_s:
            return Batch(self.name, now, 0.0)
        self._looked_at = self._clock()
        found = tuple(self._look())
        return Batch(self.name, now, time.monotonic() - start, found=found)

    def close(self) -> None:
        """Nothing is held."""

    def _look(self) -> Iterator[FoundEngine]:
        of, open_ports, notes = processes(self._proc), listening(self._proc), []
        claimed: set[int] = set()
        in_pods: set[str] = set()
        for process in of:
            named = engine_of(process.argv)
            if named is None:
                continue
            if named.is_guessed and (why := self._why_not(process, named.port, of)) is not None:
                notes += [why] if why else []
                continue
            pod = self._in_pod(process, named, of)
            if pod is not None:
                if pod.name not in in_pods:  # forked, with the same words
                    yield pod
                in_pods.add(pod.name)
                continue
            if named.port in claimed:
                continue
            is_open, here = named.port in open_ports, is_here(self._proc, process.pid)
            if here is False or (here is None and not is_open):
                apart = self._apart(process, named, of)
                at = "" if apart is None else f" ({apart.url})"
                notes.append(f"a {load_map(named.kind).title} (process {process.pid}) in another network namespace:"
                             f" name its address under engines{at}")
                if apart is not None and apart.name not in in_pods:
                    yield apart
                    in_pods.add(apart.name)
                continue
            claimed.add(named.port)
            host = open_ports[named.port][0] if is_open else _host(named.host)
            pids = descendants(process.pid, of, self._proc)
            engine = found_engine(host, named.port, named.kind, f"its command line (process {process.pid})", pids=pids,
                                  ranks=ranks_of(pids, of), is_tls=named.is_tls)
            version = self._version(engine, open_ports[named.port][1]) if is_open else None
            yield engine._replace(options=options_of(process.argv), version=version)
        for port in WELL_KNOWN:
            if port in open_ports and port not in claimed:
                kind = self._kind_at(port, open_ports[port], of)
                if kind is not None:
                    yield found_engine(open_ports[port][0], port, kind, "the page on its well-known port")
        self.note = "; ".join(dict.fromkeys(notes))

    def _why_not(self, process: Process, port: int, of: Sequence[Process]) -> str | None:
        """Why an engine whose command line names no port is not taken to be at its default one; None: it may be.

        "": a process that it started says the port, as TGI's launcher does to its router.
        """
        under = frozenset(descendants(process.pid, of, self._proc))
        named = (engine_of(one.argv) for one in of if one.pid in under)
        if any(one is not None and not one.is_guessed for one in named):
            return ""
        where = listening(self._proc, str(process.pid)).get(port)
        owner = None if where is None else owner_of(self._proc, where[1], of)
        if where is not None and (owner is None or owner.pid in under):
            return None
        return (f"process {process.pid} ({Path(process.argv[0]).name}) does not say its port on its command line, and"
                f" does not listen on {port}: name its address under engines")

    def _in_pod(self, process: Process, named: Named, of: Sequence[Process]) -> FoundEngine | None:
        """An engine in a pod of this node with a network of its own. Seen only in the node's process namespace."""
        pod = pod_of(self._proc, process.pid)
        if not pod or is_here(self._proc, process.pid):
            return None
        apart = self._apart(process, named, of)
        return None if apart is None else apart._replace(how=f"{apart.how[:-1]} in a pod)", pod=pod)

    def _apart(self, process: Process, named: Named, of: Sequence[Process]) -> FoundEngine | None:
        """An engine in a network namespace of its own, a pod's or a docker bridge's, at the one address that has."""
        host = address_in(self._proc / str(process.pid))
        if host is None or host == address_in(self._proc / "self"):
            return None
        pids = descendants(process.pid, of, self._proc)
        how = f"its command line (process {process.pid})"
        ranks = ranks_of(pids, of)
        found = found_engine(host, named.port, named.kind, how, pids=pids, ranks=ranks, is_tls=named.is_tls)
        where = listening(self._proc, str(process.pid)).get(named.port)
        version = None if where is None else self._version(found, where[1])
        return found._replace(port=0, options=options_of(process.argv), version=version)

    def _version(self, engine: FoundEngine, inode: int) -> str | None:
        """The version of vLLM, asked once a socket; None where it did not answer."""
        at = (engine.name, inode)
        if at not in self._versions and engine.kind == "vllm":
            version = version_at(engine.url)
            if version is None:
                return None
            self._versions = {key: told for key, told in self._versions.items() if key[0] != engine.name}
            self._versions[at] = version
        return self._versions.get(at, "")

    def _kind_at(self, port: int, where: tuple[str, int], of: Sequence[Process]) -> str | None:
        """Which engine's page stands on a port whose owner cannot be seen. Asked once a socket."""
        address, inode = where
        if (port, inode) not in self._asked:
            self._asked = {key: kind for key, kind in self._asked.items() if key[0] != port}
            seen = owner_of(self._proc, inode, of) is not None
            self._asked[port, inode] = None if seen else kind_of_page(f"http://{_bracketed(address)}:{port}/metrics")
        return self._asked[port, inode]


def kind_of_page(url: str) -> str | None:
    """Which engine's page this is; None where it is none of those that we know."""
    fetcher = Fetcher(url, {"Accept": ACCEPT, "User-Agent": "tocsin"}, connect_s=ASK_S, total_s=ASK_S,
                      limit_bytes=MAX_BYTES)
    try:
        answer = fetcher.get()
        if answer.status != 200:
            return None
        body = decode(answer.body, answer.headers.get("content-encoding"), MAX_BYTES)
        families = Reader(frozenset()).read(body, answer.headers.get("content-type", "")).families
    except (FetchError, PageError):
        return None
    finally:
        fetcher.close()
    shown = detect([load_map(kind) for kind in KINDS], families)[0]
    return None if shown is None else shown.kind


def version_at(url: str) -> str | None:
    """What vLLM says at /version; "" where it says nothing that can be read, None where nobody answers."""
    fetcher = Fetcher(f"{url}/version", {"User-Agent": "tocsin"}, connect_s=ASK_S, total_s=ASK_S, limit_bytes=65536)
    try:
        answer = fetcher.get()
        told = json.loads(answer.body) if answer.status == 200 else {}
        return str(told["version"])[:64] if isinstance(told, dict) and isinstance(told.get("version"), str) else ""
    except FetchError:
        return None
    except ValueError:
        return ""
    finally:
        fetcher.close()


def found_engine(host: str, port: int, kind: str, how: str, *, pids: tuple[int, ...] = (),
                 ranks: Mapping[int, int] | None = None, is_tls: bool = False) -> FoundEngine:
    """An engine at an address of this machine."""
    name = f"{_bracketed(host)}:{port}"
    return FoundEngine(name, f"{'https' if is_tls else 'http'}://{name}", kind, how, port, pids, dict(ranks or {}))


def _host(named: str | None) -> str:
    return named if named and re.fullmatch(r"[0-9.]+", named) and named != "0.0.0.0" else "127.0.0.1"  # noqa: S104


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
