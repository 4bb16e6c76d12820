"""Who is connected to a port of this machine, besides ourselves: from /proc/net/tcp, without asking anybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ESTABLISHED = "01"  # TCP_ESTABLISHED in /proc/net/tcp


def foreign(port: int, proc: Path = Path("/proc")) -> int | None:
    """How many connections to a port are not our own.

    None where this table cannot tell: it does not show our own connection to that port (another network namespace), or
    we hold none now.
    """
    rows = list(_rows(proc, f":{port:04X} "))
    held = _own_inodes(proc)
    ours = {local for local, remote, inode in rows if remote == port and inode in held}
    clients = [remote for local, remote, _ in rows if local == port]
    if not ours & set(clients):
        return None
    return sum(client not in ours for client in clients)


def _rows(proc: Path, needle: str) -> Iterator[tuple[int, int, int]]:
    """(local port, remote port, inode) of the connections in our network namespace whose line has `needle`."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "self" / "net" / name).read_text().splitlines():
                fields = line.split() if needle in line else []
                if len(fields) > 9 and fields[3] == _ESTABLISHED:
                    yield int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16), int(fields[9])


def _own_inodes(proc: Path) -> set[int]:
    """The sockets that this process holds."""
    found = set()
    for descriptor in (proc / "self" / "fd").iterdir():
        with suppress(OSError):
            kind, _, inode = str(descriptor.readlink()).partition(":[")
            if kind == "socket":
                found.add(int(inode.rstrip("]")))
    return found
