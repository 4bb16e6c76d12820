"""Which processes and ports a drill means, and which it may never mean."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from drills import proc
from drills.model import ProcessId, Refused, port_of

if TYPE_CHECKING:  # the holder imports the faults, and starts in half the time without it
    from agent.config import Config

# Without these nobody can log in, resolve a name, or ask Kubernetes to undo anything.
RESERVED_PORTS: Mapping[int, str] = {
    22: "ssh",
    53: "DNS",
    2379: "etcd",
    2380: "etcd",
    6443: "the Kubernetes API",
    10250: "the kubelet",
}
# The same by name, for those who moved the port; and what every other process of the node depends on.
RESERVED_NAMES: Mapping[str, str] = {
    "alertmanager": "the alert path",
    "containerd": "the container runtime",
    "coredns": "DNS",
    "crio": "the container runtime",
    "dnsmasq": "DNS",
    "dockerd": "the container runtime",
    "etcd": "etcd",
    "kube-apiserver": "the Kubernetes API",
    "kubelet": "the kubelet",
    "named": "DNS",
    "sshd": "ssh",
    "systemd": "the service manager",
    "systemd-resolve": "DNS",
    "unbound": "DNS",
}
# What these do to a service, they can do from its client's side.
REMOTE_FAULTS = frozenset({"packet-loss", "upstream-timeout"})
_OURS = re.compile(r"(agent|drills)(\.\w+)+")
_CORE = re.compile(r"(VLLM::EngineCore|sglang::scheduler)")
_WORKER = re.compile(r"(VLLM::Worker|sglang::scheduler)")
_API = re.compile(r"VLLM::APIServer")
_RANK = re.compile(r"([DPT]P)(\d+)")


# Ports


def reserved_ports(config: Config) -> dict[int, str]:
    """Ports that no drill may touch: the fixed ones, the agent's own and the alert path's.

    Of an alert path on another machine only that address is meant: its port is reserved where a drill reaches there.
    """
    found = dict(RESERVED_PORTS)
    api = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if api.isdigit():
        found[int(api)] = "the Kubernetes API"
    found[int(config.listen.rpartition(":")[2])] = "the agent"
    for host, port in alert_path(config):
        if is_here(host, config.node):
            found[port] = "the alert path"
            continue
        for other, number in _drilled_elsewhere(config):
            if number == port and other == host:
                found[port] = "the alert path"
            elif number == port and _is_address(other) != _is_address(host):  # no name is asked for here
                found.setdefault(port, f"the alert path, if {host} is {other}")
    return found


def alert_path(config: Config) -> list[tuple[str, int]]:
    """Host and port of each Alertmanager and webhook that alerts go to, as far as the configuration itself says."""
    urls: list[str] = []
    for channel in config.notify:
        urls += channel.alertmanager.urls if channel.alertmanager is not None else ()
        urls += [channel.webhook.url] if channel.webhook is not None and channel.webhook.url else ()
    return [(host_of(url), port_of(url)) for url in urls]


def host_of(url: str) -> str:
    """The host of an address, in the one way in which it is compared."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_here(host: str, node: str | None) -> bool:
    """Whether a host, as from `host_of`, is this machine. A name that is not its own is another: none is asked for."""
    if not _is_address(host):
        own = {one.lower() for one in (socket.gethostname(), node or "") if one}
        return host in {"", "localhost", *own, *(one.partition(".")[0] for one in own)} or host.endswith(".localhost")
    address = ip_address(host)
    if address.is_loopback or address.is_unspecified:
        return True
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((host, 0))  # sends nothing, and only an address of our own can be had
        except OSError:
            return False
    return True


def is_elsewhere(url: str) -> bool:
    """Whether the address in a URL is another machine's; of a name nobody is asked."""
    host = host_of(url)
    return _is_address(host) and not is_here(host, None)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _drilled_elsewhere(config: Config) -> list[tuple[str, int]]:
    """Host and port of each service that a drill reaches over the network, where these are another machine's."""
    from agent.config import target_name

    engines = {target_name(engine): engine.url for engine in config.engines}
    found: list[tuple[str, int | None]] = []
    for target in (drill.target for drill in config.drills if drill.fault in REMOTE_FAULTS):
        url = engines.get(target.engine or "", "")
        if target.upstream is not None:
            found.append((host_of(_url(target.upstream[0])), target.upstream[1]))
        elif url or target.address:
            host = host_of(_url(target.address)) if target.address else host_of(url)
            found.append((host, port_of(url) if url else target.port))
    return [(host, port) for host, port in found if port is not None and not is_here(host, config.node)]


def _url(host: str) -> str:
    return f"//[{host}]" if ":" in host else f"//{host}"


def addresses_here(target: Mapping[str, Any]) -> list[str]:
    """The addresses of a target, one of which is this machine's at least; none where it does not say, or need not.

    One that is named by its process or its network namespace is here, whatever its address. Raises Refused where it is
    another machine's: here its port is somebody else's.
    """
    named = target.get("address")
    if named is None or target.get("pid") is not None or target.get("netns") is not None:
        return []
    host = host_of(_url(str(named)))
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise Refused(f"address {named!r} of the target: {error.strerror}") from None
    hosts = sorted(host_of(_url(one)) for one in found)
    if not any(is_here(one, None) for one in hosts):
        port = target.get("port")
        raise Refused(f"{named} is not this machine: port {port} here is another service's; drill it where it runs, or"
                      " name its network namespace (target.netns)")
    return hosts


def refuse(port: int, reserved: Mapping[int, str] | None = None) -> None:
    """Raise Refused where `port` is one that no drill may touch; `reserved` as from `reserved_ports`."""
    why = {**RESERVED_PORTS, **(reserved or {})}.get(port)
    if why is not None:
        raise Refused(f"port {port} is {why}: no drill may touch it; name the engine's own port")


# Processes


def refuse_processes(found: Iterable[ProcessId]) -> None:
    """Raise Refused where one of them is the first process, we ourselves, or what the node cannot do without."""
    above = {os.getpid(), *proc.ancestors(os.getpid())}
    for one in found:
        words = proc.command_line(one.pid)
        name = words[0].rpartition("/")[2] if words else one.comm
        if one.pid == 1:
            why = "the first process of the machine or container"
        elif one.pid in above or ("-m" in words and any(_OURS.fullmatch(word) for word in words)):
            why = "Tocsin itself or what it runs under"
        else:
            why = RESERVED_NAMES.get(one.comm) or RESERVED_NAMES.get(name.rstrip(":")) or ""
        if why:
            raise Refused(f"process {one.pid} ({one.comm}) is {why}: no drill may touch it; name the engine")


def _refuse_listening(main: ProcessId, reserved: Mapping[int, str] | None) -> None:
    """Raise Refused where a process, or one below it, listens on a port that no drill may touch, whatever its name."""
    own = {main.pid, *(one.pid for one in proc.descendants(main.pid))}
    for port, why in {**RESERVED_PORTS, **(reserved or {})}.items():
        if own & set(proc.listeners(port, main.netns or None)):
            raise Refused(f"process {main.pid} ({main.comm}) listens on port {port}, {why}: no drill may touch it")


def netns_inode(target: Mapping[str, Any]) -> int | None:
    """The network namespace that `target.netns` names: a path such as /run/netns/NAME, or a process. Raises Refused."""
    named = target.get("netns")
    if named is None:
        return None
    path = Path(f"/proc/{named}/ns/net") if isinstance(named, int) else Path(str(named))
    try:
        return path.stat().st_ino
    except OSError as error:
        raise Refused(f"target.netns {named!r}: {error.strerror}; `ip netns list` shows what there is") from None


def main_of(target: Mapping[str, Any]) -> ProcessId:
    """The process that a target names: `pid`, or the first owner of the listening `port`. Raises Refused."""
    pid = target.get("pid")
    if pid is not None:
        try:
            main = proc.identify(int(pid))
        except ProcessLookupError:
            raise Refused(f"target.pid {pid}: no such process") from None
        _refuse_listening(main, target.get("reserved"))
        return main
    port = target.get("port")
    if port is None:
        raise Refused("target names no process: write `engine: NAME`, `port: N` or `pid: N`")
    here = addresses_here(target)
    refuse(int(port), target.get("reserved"))
    found = proc.listeners(int(port), netns_inode(target), here)
    if not found:
        where = f" in {target['netns']}" if target.get("netns") else ""
        raise Refused(
            f"target.port {port}: no process that we can see listens there{where}; is the engine up, and may we look"
            " (root, or CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH)?"
        )
    # A server hands its socket to its forks: it is the one whose parent does not hold it.
    roots = [one for one in found if not set(proc.ancestors(one)) & set(found)]
    return proc.identify(roots[0])


def processes_of(target: Mapping[str, Any]) -> dict[str, list[ProcessId]]:
    """The processes of each part: main, api, core, workers, all, and rank:0, rank:1 …. Raises Refused.

    By title where the engine writes them (vLLM, SGLang), else by descent: the oldest child of main is the core, what
    comes after it are workers; an engine of one process is its own core.
    """
    main = main_of(target)
    below = [one for one in (_identified(seen.pid) for seen in proc.descendants(main.pid)) if one is not None]
    titles = {one.pid: " ".join(proc.command_line(one.pid)) for one in (main, *below)}
    # Started by multiprocessing before any worker, and no part of the engine.
    below = [one for one in below if "multiprocessing.resource_tracker" not in titles[one.pid]]
    api = [main, *(one for one in below if _API.match(titles[one.pid]))]
    core = [one for one in below if _CORE.match(titles[one.pid])]
    workers = [one for one in below if _WORKER.match(titles[one.pid])]
    ranks = sorted(workers, key=lambda one: _rank(titles[one.pid]))
    if not core:
        rest = [one for one in below if one not in api]
        core, workers = rest[:1], rest[1:]
        ranks = workers
    parts = {"main": [main], "api": api, "core": core or [main], "workers": workers, "all": [main, *below]}
    for number, one in enumerate(ranks or parts["core"]):
        parts[f"rank:{number}"] = [one]
    return parts


def _rank(title: str) -> tuple[int, ...]:
    """The numbers in VLLM::Worker_PP0_TP1, in the order in which they count."""
    numbers = {name: int(number) for name, number in _RANK.findall(title)}
    return tuple(numbers.get(name, 0) for name in ("DP", "PP", "TP"))


def _identified(pid: int) -> ProcessId | None:
    try:
        return proc.identify(pid)
    except ProcessLookupError:
        return None


def part_of(parts: Mapping[str, Sequence[ProcessId]], part: str) -> list[ProcessId]:
    """The processes of one part, none that a drill may not touch. Raises Refused."""
    found = list(parts.get(part, ()))
    if not found:
        have = ", ".join(name for name, members in parts.items() if members and name != "workers")
        raise Refused(f"target.part {part!r}: this engine has no such part; it has {have}")
    refuse_processes([*parts["main"], *found])
    return found


def describe(one: ProcessId) -> str:
    """For people: `process 4242 (vllm serve llama)`."""
    return f"process {one.pid} ({' '.join(proc.command_line(one.pid))[:60] or one.comm})"
