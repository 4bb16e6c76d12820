"""disk-full: a file system filled until an ordinary user has next to nothing left, as logs and caches do it.

By one file without a name, held open: it is gone with the holder. Where the file system has no such files, one whose
name is removed at once; the name is in the plan, for the instant between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drills import proc
from drills.model import Command, Drill, Fault, Left, Plan, Refused

GIB = 1 << 30
MIB = 1 << 20
LEAVE_BYTES = GIB
LEAVE_SHARE = 0.03
TMPFS_SHARE_OF_FREE_MEMORY = 0.25
# Full, these take the node down rather than one service.
NODE_FOLDERS = (
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/crio",
    "/var/lib/docker",
    "/var/lib/rancher",
    "/run/containerd",
    "/run/crio",
    "/run/docker",
    "/run/k3s",
)
_CHUNK_BYTES = 64 * GIB  # so that a dying runner is not waited for long
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str  # ext4, tmpfs …
    source: str


def free_bytes(where: int | str | Path) -> int:
    """What an ordinary user may still write: root's reserve is not in it."""
    seen = os.statvfs(where)
    return seen.f_bavail * seen.f_frsize


def kept_bytes(total_bytes: int, leave_bytes: int | None) -> int:
    """What stays free: the larger of `leave` and 3 % of the file system."""
    return max(LEAVE_BYTES if leave_bytes is None else leave_bytes, int(total_bytes * LEAVE_SHARE))


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that a resolved path lies on; the last of several on one point is the one that counts."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])  # a blank is \040
        kind, source = right.split()[:2]
        inside = path == Path(point) or Path(point) in path.parents
        if inside and (found is None or len(point) >= len(found.point)):
            found = Mount(point, kind, source)
    return found


def _mount(path: Path) -> Mount:
    found = mount_of(path, Path("/proc/self/mountinfo").read_text())
    if found is None:
        raise Refused(f"{path}: no mount found for it in /proc/self/mountinfo")
    return found


def shares_space(one: Path, other: Path) -> bool:
    """Whether filling the file system of `one` fills that of `other`. Raises OSError."""
    if one.stat().st_dev == other.stat().st_dev:
        return True
    # Subvolumes of btrfs and data sets show devices of their own over one pool.
    first, second = _mount(one.resolve()), _mount(other.resolve())
    return (first.kind, first.source) == (second.kind, second.source) and first.source.startswith("/")


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that there is."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _refuse_shared(path: Path, state_dir: str) -> None:
    reasons = {state_dir: "Tocsin's own state (state_dir)"}
    reasons |= {folder: "the kubelet or a container runtime" for folder in NODE_FOLDERS if Path(folder).exists()}
    for folder, why in reasons.items():
        if shares_space(path, _existing(Path(folder))):
            raise Refused(f"disk-full: {path} is on the file system of {folder}: {why}; give a path on another one")


def _memory_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class Filled:
    """The open file that fills the disk."""

    def __init__(self, fd: int, folder: str) -> None:
        self._fd = fd
        self._folder = folder

    def sample(self) -> Mapping[str, Any]:
        """Bytes free for an ordinary user, and bytes that we hold."""
        return {"free_bytes": free_bytes(self._folder), "held_bytes": os.fstat(self._fd).st_blocks * 512}

    def undo(self) -> None:
        """Give the space back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskFull:
    """The fault."""

    name = "disk-full"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find out how much to write, and whether it may be. Raises Refused."""
        folder, leave_bytes = _asked(drill)
        state_dir = drill.target.get("state_dir")
        if not state_dir:
            raise Refused("disk-full: nobody said where state_dir is, so it cannot be spared")
        try:
            _refuse_shared(folder, str(state_dir))
            size = os.statvfs(folder)
            device = folder.stat().st_dev
        except OSError as error:
            raise Refused(f"disk-full: {error.filename or folder}: {error.strerror}") from error
        mount = _mount(folder)
        total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
        keep = kept_bytes(total, leave_bytes)
        _refuse_size(folder, mount, free, keep)
        return Plan(
            fault=self.name,
            run=run,
            targets=[f"file system {mount.source} ({mount.kind}) on {mount.point}: {_mib(free)} of {_mib(total)} free"],
            commands=[
                Command(f"fallocate -l {free - keep} {folder}/(no name)", f"O_TMPFILE; {_mib(keep)} stay free")
            ],
            undo=[
                Command(f"pkill -KILL -f 'drills.holder .*{run}'", "the file is gone with the process that holds it"),
                Command(f"rm -f {folder}/.tocsin-{run}", "where the file system has no files without a name"),
            ],
            facts={
                "folder": str(folder),
                "device": device,
                "file": f"{folder}/.tocsin-{run}",
                "keep_bytes": keep,
                "free_bytes": free,
            },
            notes=["root may still write into its reserve; an ordinary user may not"],
            blast={"replicas": 0},
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Filled:  # noqa: ARG002  (no subprocess)
        """Fill it. Raises Refused, OSError."""
        folder = str(plan.facts["folder"])
        if Path(folder).stat().st_dev != plan.facts["device"]:
            raise Refused(f"disk-full: another file system is mounted on {folder} since the plan; plan again")
        fd = _open_unnamed(folder, str(plan.facts["file"]))
        try:
            _fill(fd, folder, int(plan.facts["keep_bytes"]))
        except BaseException:
            os.close(fd)
            raise
        return Filled(fd, folder)

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """It was as full as asked, and stayed so."""
        keep = int(plan.facts["keep_bytes"])
        seen = [int(sample["free_bytes"]) for sample in samples if "free_bytes" in sample]
        if not seen:
            return False, "no sample was taken"
        told = f"statvfs: {_mib(min(seen))} to {_mib(max(seen))} free for an ordinary user, asked {_mib(keep)}"
        if min(seen) > keep + max(MIB // 4, keep // 100):
            return False, f"{told}: never full"
        if max(seen) > 2 * keep:
            return False, f"{told}: something gave space back meanwhile"
        return True, told

    def left(self, plan: Plan) -> list[Left]:
        """The name, where it was not removed, and a holder that still has the file open."""
        file = str(plan.facts["file"])
        left = [Left(f"file {file}", f"rm -f {file}")] if Path(file).exists() else []
        for pid in _holders(plan):
            left.append(Left(f"holder {pid} still fills {plan.facts['folder']}", f"kill -KILL {pid}"))
        return left

    def undo(self, plan: Plan) -> None:
        """Remove the name and end the holder, unless this is it. Raises OSError."""
        Path(str(plan.facts["file"])).unlink(missing_ok=True)
        for pid in _holders(plan):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    proc.end(proc.identify(pid), 1.0)


def _asked(drill: Drill) -> tuple[Path, int | None]:
    path = drill.params.get("path")
    if not path or not Path(str(path)).is_dir():
        raise Refused(f"disk-full: params.path {path!r} is not a folder; name one on the file system to fill")
    leave = drill.params.get("leave_bytes")
    if leave is not None and int(leave) < MIB:
        raise Refused(f"disk-full: params.leave is {int(leave)} bytes; leave 1 MiB or more")
    return Path(str(path)).resolve(), None if leave is None else int(leave)


def _refuse_size(folder: Path, mount: Mount, free: int, keep: int) -> None:
    if mount.kind == "overlay":
        raise Refused(f"disk-full: {folder} is on an overlay, whose space is another file system's; name that one")
    if free <= keep:
        raise Refused(f"disk-full: {folder} has {_mib(free)} free already, and {_mib(keep)} shall stay: nothing to do")
    if mount.kind in {"tmpfs", "ramfs"}:
        memory = _memory_available_bytes()
        if free - keep > TMPFS_SHARE_OF_FREE_MEMORY * memory:
            raise Refused(
                f"disk-full: {folder} is in memory: to write {_mib(free - keep)} is more than a quarter of the"
                f" {_mib(memory)} that are free"
            )


def _open_unnamed(folder: str, file: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
            raise
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    Path(file).unlink()
    return fd


def _fill(fd: int, folder: str, keep: int) -> None:
    """Reserve until only `keep` is free. The map of what is reserved needs space too, so ask again and again."""
    size = 0
    for _ in range(_TRIES):
        missing = free_bytes(folder) - keep
        if missing < os.statvfs(folder).f_frsize:
            return
        while missing > 0:
            part = min(missing, _CHUNK_BYTES)
            try:
                # Where the file system cannot reserve, libc writes a byte a block, and it takes as long as writing.
                os.posix_fallocate(fd, size, part)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return  # somebody else was faster
            size, missing = size + part, missing - part


def _holders(plan: Plan) -> list[int]:
    """Holders of this run that have a file without a name open on that file system."""
    found = []
    for pid in proc.pids():
        words = proc.command_line(pid)
        if "drills.holder" not in words or not any(Path(word).name == plan.run for word in words):
            continue
        for fd in proc.open_files(pid):
            if fd.st_dev == plan.facts["device"] and fd.st_nlink == 0 and fd.st_blocks > 0:
                found.append(pid)
                break
    return found


def _mib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


FAULT: Fault = DiskFull()
