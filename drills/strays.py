"""What of ours is in the world though no ledger tells of it: its run's folder was moved away, or is lost.

Found by the tags alone. A runner and a holder name the folder of their run on their command line; where that folder is
there, the run is no stray: whoever heals its state heals it, be it another `state_dir` or a container. A table has its
name, and lives as long as the `nft -i` that names it; one that nobody holds is left by a kernel that knows no owners.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from drills import nft, proc
from drills.model import Left, ProcessId, Refused

log = structlog.get_logger()

MODULES = frozenset({"drills.runner", "drills.holder"})
ENDED_WITHIN_S = 5.0


def heal_strays() -> list[Left]:
    """End them, and return what would not end. Never raises: what cannot be looked at is not ours to touch."""
    left = []
    for process, folder in strays():
        log.info("ending_stray", pid=process.pid, folder=folder)
        with suppress(PermissionError):
            if proc.end(process, ENDED_WITHIN_S):
                continue
        left.append(Left(f"process {process.pid} of a run whose folder {folder} is gone does not end",
                         f"kill -KILL {process.pid}"))
    for place, table in unheld_tables():
        log.info("ending_stray", table=table, netns=place.path)
        nft.end(place, table)
        left += nft.left(place, table)
    return left


def strays() -> list[tuple[ProcessId, str]]:
    """Runners and holders whose run's folder is not there, runners first: a holder's fault ends with it or before."""
    found = []
    for pid in proc.pids():
        words = proc.command_line(pid)
        if len(words) < 4 or words[1] != "-m" or words[2] not in MODULES:
            continue
        with suppress(OSError):
            process = proc.identify(pid)
            if not _is_there(pid, words[3]) and proc.command_line(pid) == words:
                found.append((words[2] == "drills.holder", process, words[3]))
    return [(process, folder) for _, process, folder in sorted(found, key=lambda one: one[0])]


def _is_there(pid: int, folder: str) -> bool:
    """Whether a process finds its folder, where it lives. Raises OSError where that cannot be seen."""
    root = Path(f"/proc/{pid}/root")
    at = Path(f"/proc/{pid}/cwd").readlink() / folder
    root.stat()  # else "not allowed to look" would read as "not there"
    return (root / at.relative_to("/")).exists()


def unheld_tables() -> Iterator[tuple[nft.Place, str]]:
    """Tables of ours that no `nft -i` holds, in each network namespace that can be looked into.

    None where an nft runs of which we may not know what it was started with: it may hold one.
    """
    if any(seen.comm in ("nft", "nsenter") and _is_hidden(pid) for pid, seen in proc.processes().items()):
        return
    for place in places():
        with suppress(OSError, Refused):
            for table in nft.tables(place):
                if not nft.owners(table):
                    yield place, table


def _is_hidden(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:  # it has ended
        return False
    return False


def places() -> Iterator[nft.Place]:
    """Every network namespace that a process is in, or that has a name; each once."""
    seen = set[int]()
    paths = [*(f"/proc/{pid}/ns/net" for pid in (os.getpid(), *proc.pids())), *map(str, Path("/run/netns").glob("*"))]
    for path in paths:
        with suppress(OSError):
            inode = Path(path).stat().st_ino
            if inode not in seen:
                seen.add(inode)
                yield nft.Place(path, inode)
