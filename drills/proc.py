"""Processes as /proc shows them: who is it, does it still run, who listens, who descends from whom.

A number alone names nobody: the kernel gives it to the next process. Whatever touches a process holds a pidfd whose
start time was read after it was opened.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from drills.model import ProcessId

PROC = Path("/proc")
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_ENDED = frozenset("ZX")


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of /proc/PID/stat, or of /proc/PID/task/TID/stat."""

    pid: int
    comm: str
    state: str  # one letter: R, S, D, T (stopped), t (stopped by its tracer), Z …
    ppid: int
    start_ticks: int  # since boot


def parse_stat(line: str) -> Stat:
    """Read one stat line. The name may hold blanks and parentheses, so all is counted from the last `)`."""
    head, _, tail = line.rpartition(")")
    pid, _, comm = head.partition(" (")
    fields = tail.split()
    return Stat(int(pid), comm, fields[0], int(fields[1]), int(fields[19]))


def stat(pid: int, tid: int | None = None) -> Stat:
    """The state of a process, or of one of its threads. Raises ProcessLookupError where it is gone."""
    path = PROC / str(pid) / "stat" if tid is None else PROC / str(pid) / "task" / str(tid) / "stat"
    try:
        return parse_stat(path.read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {tid or pid} is gone") from None


def boot_id() -> str:
    """This boot: a start time of another one names another process."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def netns_of(pid: int) -> int:
    """Inode of the network namespace; 0 where we may not look, or it is gone."""
    try:
        return (PROC / str(pid) / "ns/net").stat().st_ino
    except OSError:
        return 0


def identify(pid: int) -> ProcessId:
    """Who a process is. Raises ProcessLookupError."""
    seen = stat(pid)
    return ProcessId(pid, seen.start_ticks, boot_id(), seen.comm, netns_of(pid))


def is_same(process: ProcessId) -> bool:
    """Whether it still runs: same boot, same start time, not a zombie (nothing of a zombie can act)."""
    try:
        seen = stat(process.pid)
    except ProcessLookupError:
        return False
    return seen.start_ticks == process.start_ticks and boot_id() == process.boot_id and _runs(seen)


def _runs(seen: Stat) -> bool:
    """Whether anything of a process can act: the first thread may have ended, and the others go on."""
    return seen.state not in _ENDED or bool(threads(seen.pid))


def open_pidfd(process: ProcessId) -> int:
    """A descriptor that means this process for ever, to be closed. Raises ProcessLookupError, OSError."""
    fd = os.pidfd_open(process.pid)
    # In this order: the descriptor pins whoever has the number now, and then we ask who that is.
    if not is_same(process):
        os.close(fd)
        raise ProcessLookupError(f"process {process.pid} ({process.comm}) is gone; the number may be another's now")
    return fd


def has_ended(pidfd: int, wait_s: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended (a zombie has), after waiting for it up to `wait_s`."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(wait_s * 1000.0))


def end(process: ProcessId, wait_s: float, sig: signal.Signals = signal.SIGKILL) -> bool:
    """Send `sig` to exactly this process and wait until it has ended. False: it still runs. Raises PermissionError."""
    try:
        fd = open_pidfd(process)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(fd, sig)
        return has_ended(fd, wait_s)
    except ProcessLookupError:
        return True
    finally:
        os.close(fd)


def wait_ended(process: ProcessId, wait_s: float) -> bool:
    """Wait until a process has ended by itself. False: it still runs."""
    try:
        fd = open_pidfd(process)
    except ProcessLookupError:
        return True
    try:
        return has_ended(fd, wait_s)
    finally:
        os.close(fd)


def pids() -> list[int]:
    """All processes that we can see."""
    return sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def command_line(pid: int) -> list[str]:
    """Its arguments, as it shows them now: engines write titles there. Empty where it is gone or has none."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.rstrip(b"\0 ").split(b"\0")] if raw.strip(b"\0 ") else []


def threads(pid: int) -> dict[int, str]:
    """State of each thread that has not ended: {tid: letter}. Empty where the process is gone."""
    found = {}
    try:
        names = [entry.name for entry in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return {}
    for name in names:
        try:
            state = stat(pid, int(name)).state
        except ProcessLookupError:
            continue
        if state not in _ENDED:
            found[int(name)] = state
    return found


def tracer_of(pid: int, tid: int | None = None) -> int:
    """Who traces it by ptrace; 0 where nobody does, or it is gone."""
    try:
        text = (PROC / str(pid) / "task" / str(tid or pid) / "status").read_text(errors="replace")
    except OSError:
        return 0
    match = re.search(r"^TracerPid:\s+(\d+)$", text, flags=re.MULTILINE)
    return int(match[1]) if match else 0


def processes() -> dict[int, Stat]:
    """Every process that runs now, by number; zombies are left out."""
    found = {}
    for pid in pids():
        try:
            seen = stat(pid)
        except ProcessLookupError:
            continue
        if _runs(seen):
            found[pid] = seen
    return found


def descendants(pid: int) -> list[Stat]:
    """Children, their children and so on, each generation oldest first. Those whose parent ended are not found."""
    running = processes()
    found: list[Stat] = []
    generation = [pid]
    while generation:
        parents, seen = set(generation), {pid, *(one.pid for one in found)}
        children = [one for one in running.values() if one.ppid in parents and one.pid not in seen]
        children.sort(key=lambda one: (one.start_ticks, one.pid))
        found += children
        generation = [one.pid for one in children]
    return found


def ancestors(pid: int) -> list[int]:
    """Its parent, that one's parent and so on, up to the first process."""
    found: list[int] = []
    while pid > 1:
        try:
            pid = stat(pid).ppid
        except ProcessLookupError:
            break
        if pid > 0:
            found.append(pid)
    return found


def _listening_sockets(pid: int, port: int) -> Iterator[tuple[int, str]]:
    """Inode and address of the sockets that listen on `port` in the network namespace of `pid`; "" for any address."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                yield int(rest[5]), _address(local.partition(":")[0])


def _address(raw: str) -> str:
    """0100007F as 127.0.0.1 (each word of four bytes is in the machine's order), v4 as v4; "" for any."""
    packed = b"".join(bytes.fromhex(raw[at:at + 8])[::-1] for at in range(0, len(raw), 8))
    if not any(packed):
        return ""
    text = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return text.removeprefix("::ffff:") if "." in text else text


def sockets_of(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open. Empty where we may not look, or it is gone."""
    found: set[int] = set()
    try:
        links = list(os.scandir(PROC / str(pid) / "fd"))
    except OSError:
        return found
    for link in links:
        try:
            target = os.readlink(link.path)  # noqa: PTH115  (a Path would make a name of "socket:[7]")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def open_files(pid: int) -> list[os.stat_result]:
    """What a process has open. Empty where we may not look, or it is gone."""
    found: list[os.stat_result] = []
    try:
        for link in os.scandir(PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                found.append(Path(link.path).stat())
    except OSError:
        pass
    return found


def listeners(port: int, netns: int | None = None, at: Collection[str] = ()) -> list[int]:
    """Processes that hold a socket listening on `port`, oldest first; a server and its forks hold the same one.

    Of several that share a port those that listen on one of the addresses `at`, else those that listen on any.
    `netns` is the inode of a network namespace, None is our own. Sockets of other users' processes are seen by root
    or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH only.
    """
    inside = os.getpid() if netns in {None, netns_of(os.getpid())} else _any_pid_in(netns or 0)
    sockets = list(_listening_sockets(inside, port)) if inside else []
    own = [inode for inode, address in sockets if address in at]
    any_ = [inode for inode, address in sockets if at and not address]
    wanted = set(own or any_ or [inode for inode, _ in sockets])
    if not wanted:
        return []
    found = [one for pid, one in processes().items() if wanted & sockets_of(pid)]
    return [one.pid for one in sorted(found, key=lambda one: (one.start_ticks, one.pid))]


def _any_pid_in(netns: int) -> int | None:
    return next((pid for pid in pids() if netns_of(pid) == netns), None)
