"""Which processes and ports a drill means, and which it may never mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from drills import proc
from drills.model import ProcessId, Refused

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
_OURS = re.compile(r"(agent|drills)(\.\w+)+")
_CORE = re.compile(r"(VLLM::EngineCore|sglang::scheduler)")
_WORKER = re.compile(r"(VLLM::Worker|sglang::scheduler)")
_API = re.compile(r"VLLM::APIServer")
_RANK = re.compile(r"([DPT]P)(\d+)")


# Ports


def reserved_ports(config: Config) -> dict[int, str]:
    """Ports of this node that no drill may touch: the fixed ones, the agent's own and the alert path's."""
    found = dict(RESERVED_PORTS)
    api = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if api.isdigit():
        found[int(api)] = "the Kubernetes API"
    found[int(config.listen.rpartition(":")[2])] = "the agent"
    for channel in config.notify:
        urls: list[str | None] = []
        if channel.alertmanager is not None:
            urls += channel.alertmanager.urls
        if channel.webhook is not None:
            urls.append(channel.webhook.url)
        for url in urls:
            port = urlsplit(url or "").port
            if port is not None:
                found[port] = "the alert path"
    return found


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
    refuse(int(port), target.get("reserved"))
    found = proc.listeners(int(port), netns_inode(target))
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
