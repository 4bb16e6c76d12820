"""disk-full: as full as asked, never the disk that the node lives on, and free again whatever dies."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills.faults import disk_full
from drills.faults.disk_full import FAULT, GIB, MIB, Mount, kept_bytes, mount_of, shares_space
from drills.ledger import read
from drills.model import Drill, Left, Plan, Refused
from tests.drills.stand_ins import arm, new_run, tmpfs, wait_for

RUN = "disk-20261129T210000Z-ab12"
MOUNTINFO = r"""21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:21 / /data rw - btrfs /dev/sdb rw,subvol=/@data
23 21 0:22 / /data/models rw - btrfs /dev/sdb rw,subvol=/@models
24 21 0:23 / /mnt/two\040words rw - tmpfs tmpfs rw
25 21 0:24 / /data rw - xfs /dev/sdc rw
"""


def free(disk: Path) -> int:
    """By another way than the code: what statvfs says an ordinary user may write."""
    seen = os.statvfs(disk)
    return seen.f_bavail * seen.f_bsize


def drill(path: Path, leave_bytes: int | None = None, state_dir: str = "/") -> Drill:
    """A drill of one file system."""
    params: dict[str, object] = {"path": str(path)}
    if leave_bytes is not None:
        params["leave_bytes"] = leave_bytes
    return Drill("d", "disk-full", target={"state_dir": state_dir}, params=params)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB in memory."""
    with tmpfs(tmp_path / "disk", "64m") as mounted:
        yield mounted


@pytest.mark.parametrize(
    ("total", "leave", "kept"),
    [
        (10 * GIB, None, GIB),  # 3 % are 0.3 GiB
        (1000 * GIB, None, 30 * GIB),
        (10 * GIB, 2 * GIB, 2 * GIB),
        (1000 * GIB, 2 * GIB, 30 * GIB),
        (64 * MIB, MIB, 2013265),  # 3 % of 67108864, whole bytes
    ],
)
def test_what_stays_free(total: int, leave: int | None, kept: int) -> None:
    """1 GiB of a large disk is less than what its log rotation needs."""
    assert kept_bytes(total, leave) == kept


def test_mounts() -> None:
    """Blanks in a mount point, a mount over a mount, and a folder that only begins like one."""
    assert mount_of(Path("/mnt/two words/x"), MOUNTINFO) == Mount("/mnt/two words", "tmpfs", "tmpfs")
    assert mount_of(Path("/data/models/m"), MOUNTINFO) == Mount("/data/models", "btrfs", "/dev/sdb")
    assert mount_of(Path("/data"), MOUNTINFO) == Mount("/data", "xfs", "/dev/sdc")
    assert mount_of(Path("/database"), MOUNTINFO) == Mount("/", "ext4", "/dev/vda")
    line = "90 1 0:9 / /mnt/größe\\040x rw - tmpfs tmpfs rw"
    assert mount_of(Path("/mnt/größe x/y"), f"{MOUNTINFO.rstrip()}\n{line}") == Mount("/mnt/größe x", "tmpfs", "tmpfs")


@pytest.mark.heavy
def test_full_proven_and_free_again(tmp_path: Path, disk: Path) -> None:
    """A log filled the disk: serving must go on, and afterwards every byte is back."""
    before = free(disk)
    plan = FAULT.plan(drill(disk, 4 * MIB), RUN)
    assert plan.commands[0].text == f"fallocate -l {before - 4 * MIB} {disk}/(no name)"
    assert plan.targets == [f"file system tocsin-test (tmpfs) on {disk}: 64.0 MiB of 64.0 MiB free"]
    folder, ledger = new_run(tmp_path / "runs", plan)
    held = arm(folder, ledger, plan)
    ledger.close()
    held.inject(5.0)
    assert 4 * MIB - 65536 <= free(disk) <= 4 * MIB
    assert list(disk.iterdir()) == []
    wait_for(lambda: len(held.samples) >= 2)
    told = "statvfs: 4.0 MiB to 4.0 MiB free for an ordinary user, asked 4.0 MiB"
    assert FAULT.proven(plan, held.samples[:2]) == (True, told)
    with pytest.raises(OSError, match="No space left") as caught:
        (disk / "log").write_bytes(bytes(5 * MIB))
    assert caught.value.errno == errno.ENOSPC
    (disk / "log").unlink()
    assert FAULT.left(plan) == [
        Left(f"holder {held.process_id.pid} still fills {disk}", f"kill -KILL {held.process_id.pid}")
    ]
    assert held.revert(5.0) == []
    assert free(disk) == before


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["runner", "holder", "both"])
def test_free_again_whatever_dies(tmp_path: Path, disk: Path, how: str) -> None:
    """Everything was killed with the disk full: no heal was needed."""
    before = free(disk)
    plan = FAULT.plan(drill(disk, 4 * MIB), RUN)
    folder, ledger = new_run(tmp_path / "runs", plan)
    held = arm(folder, ledger, plan)
    ledger.close()
    held.inject(5.0)
    assert free(disk) <= 4 * MIB
    if how in {"holder", "both"}:
        os.kill(held.process_id.pid, signal.SIGKILL)
    if how in {"runner", "both"}:
        held._hang_up()  # what the runner's death does
    wait_for(lambda: free(disk) == before, 1.0)
    assert FAULT.left(plan) == []
    assert held.wait_gone(5.0)
    assert read(folder)[-1].state == "ARMED"


@pytest.mark.heavy
def test_a_file_system_without_unnamed_files(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS has no O_TMPFILE: the name is there for an instant, and in the plan for a crash in that instant."""
    opened = os.open

    def without(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", without)
    before = free(disk)
    plan = FAULT.plan(drill(disk, 4 * MIB), RUN)
    held = FAULT.inject(plan, ())
    assert free(disk) <= 4 * MIB
    assert list(disk.iterdir()) == []
    held.undo()
    held.undo()
    assert free(disk) == before
    named = disk / f".tocsin-{RUN}"
    named.touch()
    assert FAULT.left(plan) == [Left(f"file {named}", f"rm -f {named}")]
    FAULT.undo(plan)
    FAULT.undo(plan)
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_another_disk_under_the_path(tmp_path: Path, disk: Path) -> None:
    """The disk was unmounted between plan and injection, and the path was the root's own folder."""
    plan = FAULT.plan(drill(disk, 4 * MIB), RUN)
    elsewhere = Plan(**{**{name: getattr(plan, name) for name in Plan.__slots__}, "facts": {**plan.facts, "device": 1}})
    with pytest.raises(Refused, match="another file system is mounted on"):
        FAULT.inject(elsewhere, ())


@pytest.mark.heavy
def test_what_may_not_be_filled(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the ledger, of the kubelet, of the containers: each takes the node down."""
    with pytest.raises(Refused, match=r"is on the file system of .*: Tocsin's own state"):
        FAULT.plan(drill(disk, 4 * MIB, state_dir=str(disk / "not" / "yet" / "there")), RUN)
    monkeypatch.setattr(disk_full, "NODE_FOLDERS", (str(disk),))
    with pytest.raises(Refused, match=f"is on the file system of {disk}: the kubelet or a container runtime"):
        FAULT.plan(drill(disk, 4 * MIB), RUN)
    monkeypatch.setattr(disk_full, "NODE_FOLDERS", ())
    monkeypatch.setattr(disk_full, "_memory_available_bytes", lambda: 200 * MIB)
    with pytest.raises(Refused, match=r"is in memory: to write 60.0 MiB is more than a quarter of the 200.0 MiB"):
        FAULT.plan(drill(disk, 4 * MIB), RUN)
    monkeypatch.setattr(disk_full, "_memory_available_bytes", lambda: 240 * MIB)
    FAULT.plan(drill(disk, 4 * MIB), RUN)
    with pytest.raises(Refused, match=r"has 64.0 MiB free already, and 1.0 GiB shall stay: nothing to do"):
        FAULT.plan(drill(disk), RUN)


def test_a_wrong_request(tmp_path: Path) -> None:
    """What is missing is named, with what to write."""
    with pytest.raises(Refused, match=r"params.path '/nowhere' is not a folder"):
        FAULT.plan(drill(Path("/nowhere")), RUN)
    with pytest.raises(Refused, match=r"params.leave is 1048575 bytes; leave 1 MiB or more"):
        FAULT.plan(drill(tmp_path, MIB - 1), RUN)
    with pytest.raises(Refused, match="nobody said where state_dir is"):
        FAULT.plan(drill(tmp_path, state_dir=""), RUN)
    with pytest.raises(Refused, match="Tocsin's own state"):
        FAULT.plan(drill(tmp_path, MIB, state_dir=str(tmp_path)), RUN)


def test_subvolumes_share_their_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two subvolumes of one btrfs have two device numbers and one space."""
    pool = {tmp_path: Mount("/a", "btrfs", "/dev/sdb"), Path("/proc"): Mount("/b", "btrfs", "/dev/sdb")}
    monkeypatch.setattr(disk_full, "_mount", pool.__getitem__)
    assert shares_space(tmp_path, Path("/proc"))
    pool[Path("/proc")] = Mount("/proc", "proc", "proc")
    assert not shares_space(tmp_path, Path("/proc"))


def test_what_proves_it() -> None:
    """A disk that was never full, or that a log rotation emptied, was no drill."""
    plan = Plan("disk-full", RUN, [], [], [], {"keep_bytes": 100 * MIB})
    full, emptied, never = ({"free_bytes": n * MIB} for n in (100, 300, 102))
    assert FAULT.proven(plan, []) == (False, "no sample was taken")
    assert FAULT.proven(plan, [full, full])[0]
    seen = "statvfs: 100.0 MiB to 300.0 MiB free for an ordinary user, asked 100.0 MiB"
    assert FAULT.proven(plan, [full, emptied]) == (False, f"{seen}: something gave space back meanwhile")
    assert FAULT.proven(plan, [never])[1].endswith("never full")
