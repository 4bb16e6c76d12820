"""The file of one process: a page of memory, written under a sequence lock, read by Tocsin's agent.

All numbers are little-endian. A section is (sequence u64, CRC-32 of its numbers u32, 4 bytes unused, numbers): the
sequence is odd while it is written. Times are unix seconds of the engine's clock, but for the ring of a rank's steps,
which is CLOCK_MONOTONIC: only differences between the processes of one machine are made of it. The agent has these
layouts a second time (agent/sources/engine_probe.py); a change of them is a new MAGIC.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import struct
import time
import zlib
from typing import NamedTuple

MAGIC = b"TOCSINP1"
SIZE = 4096
HEAD = struct.Struct("<8sIIQQd")  # magic, size, pid, start in clock ticks since boot, PID namespace, created at
GUARD = struct.Struct("<QII")  # sequence, CRC-32, unused
TEXT_BYTES = 1536
RING = 32
WRITE_EVERY_S = 0.25  # what moves with every step is written so often; who waits, at once
SUFFIX = ".probe"
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


class Section(NamedTuple):
    """Where a part of the file lies, and its numbers."""

    offset: int
    numbers: struct.Struct


# oldest arrival without a first token (0: none), written at, requests added so far, how many are without at most
FRONT = Section(64, struct.Struct("<ddQQ"))
# oldest arrival never scheduled (0: none), written at, steps that scheduled a token, how many wait at most, engine
SCHEDULER = Section(192, struct.Struct("<ddQQq"))
# compute s, s waited in collectives, steps timed, steps, decode steps by graph, eager though captured, eager over the
# captured sizes, profiled steps, their compute s, step of the last, rank, tensor-parallel rank and size, pipeline rank,
# engine index, how it was timed (BASIS), CUDA graphs (GRAPHS), largest captured size in tokens
RANK = Section(320, struct.Struct("<dd6QdQ5q3q"))
STEPS = Section(640, struct.Struct(f"<{RING}d"))  # entry of step n at place n % RING, monotonic s
TEXT = Section(1024, struct.Struct(f"<I{TEXT_BYTES}s"))  # bytes of JSON, JSON

BASIS = {"nothing yet": 0, "host clock": 1, "device events": 2, "hidden": 3}
GRAPHS = {"unknown": 0, "used": 1, "off": 2, "not told": 3}


class Unfit(Exception):  # noqa: N818  (what the folder is)
    """There is no place to write to, and why."""


class Page:
    """The file of this process. Raises Unfit."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        kind = file_system_of(folder)
        if kind not in MEMORY:
            raise Unfit(f"{folder} is on {kind}: a disk could make the engine wait; name a folder on tmpfs (/run,"
                        " /dev/shm) in TOCSIN_PROBE_DIR")
        sweep(folder)
        pid, ticks, space = os.getpid(), start_ticks("self"), pid_namespace()
        self.pid = pid
        self.path = os.path.join(folder, f"{space}-{pid}-{ticks}{SUFFIX}")
        draft = f"{self.path}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        if os.path.lexists(draft):
            os.unlink(draft)
        file = os.open(draft, flags, 0o644)
        try:
            os.fchmod(file, 0o644)  # whatever the umask: the agent is somebody else
            os.posix_fallocate(file, 0, SIZE)  # a full tmpfs fails here, and not as SIGBUS at the first write
            self._map = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._sequences = {section.offset: 0 for section in (FRONT, SCHEDULER, RANK, STEPS, TEXT)}
        HEAD.pack_into(self._map, 0, MAGIC, SIZE, pid, ticks, space, time.time())
        os.rename(draft, self.path)
        atexit.register(self.remove)

    def write(self, section: Section, *numbers: float | bytes) -> None:
        """Write one section."""
        data = section.numbers.pack(*numbers)
        offset, page = section.offset, self._map
        sequence = self._sequences[offset] + 2
        self._sequences[offset] = sequence
        GUARD.pack_into(page, offset, sequence - 1, 0, 0)
        start = offset + GUARD.size
        page[start:start + len(data)] = data
        GUARD.pack_into(page, offset, sequence, zlib.crc32(data), 0)

    def say(self, told: dict[str, object]) -> None:
        """Write what is not a number: versions, and what each seam is."""
        text = json.dumps(told, ensure_ascii=True).encode()
        while len(text) > TEXT_BYTES and isinstance(told.get("seams"), dict):
            told = {**told, "seams": {name: str(why)[:80] for name, why in told["seams"].items()}}  # type: ignore[attr-defined]
            text = json.dumps(told, ensure_ascii=True).encode()[:TEXT_BYTES]
        self.write(TEXT, len(text), text)

    def remove(self) -> None:
        """At the end of the process that made it, not of one forked from it."""
        if os.getpid() == self.pid:
            try:
                os.unlink(self.path)
            except OSError:
                return


def next_write_s(now: float) -> float:
    """When what moves with every step is written again, of now in monotonic s.

    At full quarters of a second: the ranks of one machine write after the same step, so that their rings hold it both.
    """
    return now - now % WRITE_EVERY_S + WRITE_EVERY_S


def file_system_of(folder: str) -> str:
    """The kind of file system that a folder is on: that of the longest mount point before it."""
    real = os.path.realpath(folder)
    best, kind = "", "an unknown file system"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split()
            where = fields[4].encode().decode("unicode_escape")
            if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(best):
                best, kind = where, fields[fields.index("-") + 1]
    return kind


def start_ticks(process: str | int) -> int:
    """When a process started, in clock ticks since boot; its name may hold anything, so it is read from the end."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def pid_namespace() -> int:
    """The number of our PID namespace; 0 where it is not told."""
    try:
        return int(os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0


def sweep(folder: str) -> None:
    """Remove the files of our user's processes in our PID namespace that have ended without doing so."""
    space = pid_namespace()
    for name in os.listdir(folder):
        parts = name.partition(SUFFIX)[0].split("-")
        if len(parts) != 3 or parts[0] != str(space) or not (parts[1] + parts[2]).isdigit():
            continue
        try:
            if start_ticks(parts[1]) == int(parts[2]):
                continue
        except (OSError, ValueError, IndexError):
            pass  # nobody has this number now
        try:
            if os.lstat(os.path.join(folder, name)).st_uid == os.geteuid():
                os.unlink(os.path.join(folder, name))
        except OSError:
            continue
