"""The kernel log as a source: a file, a FIFO and the real /dev/kmsg; nothing counted twice, nothing missed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.hardware.history import History, findings
from agent.model import Batch, Event, Gap, Why
from agent.sources.kernel_log import KernelLog
from agent.sources.log_files import Kmsg
from tests.hardware.cases import cases
from tests.needs import need

XID = "NVRM: Xid (PCI:0000:1a:00): 79, pid=12, name=a, GPU has fallen off the bus."
OTHER = "NVRM: Xid (PCI:0000:1b:00): 13, pid=13, name=b, Graphics Exception"

Start = Callable[..., KernelLog]


@pytest.fixture
def start() -> Iterator[Start]:
    """Sources that end with the test."""
    begun: list[KernelLog] = []

    def begin(path: Path | None, cursor: Mapping[str, Any] | None = None, **more: Any) -> KernelLog:
        begun.append(KernelLog(path, cursor, **more))
        return begun[-1]

    yield begin
    for source in begun:
        source.close()
    for source in begun:
        if source._thread is not None:
            source._thread.join(30)


def add(path: Path, *lines: str) -> None:
    """What a kernel would write."""
    with path.open("a") as log:
        log.write("".join(f"{line}\n" for line in lines))


def events(source: KernelLog, enough: Callable[[list[Event]], bool] = bool, within_s: float = 30.0) -> list[Event]:
    """What is handed over until it is enough; for nothing to come there is `quiet`."""
    found: list[Event] = []
    end = time.monotonic() + within_s
    while not enough(found):
        assert time.monotonic() < end, found
        found += source.read(time.time()).events
        time.sleep(0.01)
    return found


def quiet(source: KernelLog, path: Path) -> list[Event]:
    """What comes before a line that comes last."""
    add(path, "5,99,99,-;NVRM: GPU at PCI:0000:ee:00: GPU-00000000-ffff")
    return [e for e in events(source, lambda got: any(e.kind == "map" for e in got)) if e.kind != "map"]


def last(source: KernelLog) -> Batch:
    """One more read."""
    return source.read(time.time())


def test_a_line_is_told_and_wakes_the_loop(tmp_path: Path, start: Start) -> None:
    """A fallen GPU was noticed at the next poll, a minute later."""
    log = tmp_path / "kmsg"
    log.touch()
    source, woken = start(log), threading.Event()
    source.wake_with(woken.set)
    assert last(source).events == ()
    began = time.monotonic()
    add(log, f"3,1,1000,-;{XID}")
    assert woken.wait(30)
    waited_s = time.monotonic() - began
    (event,) = events(source)

    assert waited_s < 25
    assert (event.kind, event.device, event.number, event.count) == ("xid", "0000:1a:00", 79, 1)
    assert (event.detail["pid"], event.detail["process"]) == (12, "a")
    assert abs(event.at - time.time()) < 30


def test_nothing_old_again_and_nothing_between_two_runs_is_missed(tmp_path: Path, start: Start) -> None:
    """After each restart of the monitor the GPU that fell in spring fell again."""
    log = tmp_path / "kmsg"
    now_us = int(time.monotonic() * 1e6)
    add(log, f"3,1,{now_us},-;{XID}")
    first = start(log)
    assert [e.number for e in events(first)] == [79]
    cursor = dict(last(first).cursor or {})
    first.close()
    add(log, f"3,2,{now_us},-;{OTHER}")
    second = start(log, cursor)

    assert [e.number for e in events(second)] == [13]
    assert quiet(second, log) == []


def test_a_file_that_is_rotated(tmp_path: Path, start: Start) -> None:
    """logrotate took the file away between two runs, with a line in it that nobody had read."""
    log = tmp_path / "kern.log"
    log.touch()
    first = start(log)
    last(first)
    add(log, f"kernel: {XID}")
    events(first)
    cursor = dict(last(first).cursor or {})
    first.close()
    add(log, f"kernel: {OTHER}")
    log.rename(tmp_path / "kern.log.1")
    add(log, f"kernel: {XID.replace('79', '48')}")
    second = start(log, cursor)

    assert sorted(e.number or 0 for e in events(second, lambda got: len(got) >= 2)) == [13, 48]
    log.rename(tmp_path / "kern.log.2")
    add(log, f"kernel: {XID.replace('79', '62')}")
    assert [e.number for e in events(second)] == [62]


def test_a_file_is_read_where_the_kernel_tells_no_changes(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs of this user had used up fs.inotify.max_user_instances: the log is looked at every second."""
    libc = SimpleNamespace(inotify_init1=lambda flags: -1, inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr("agent.sources.log_files.ctypes.CDLL", lambda _: libc)
    log = tmp_path / "kern.log"
    log.touch()
    source = start(log)
    last(source)
    add(log, XID)

    assert [e.number for e in events(source)] == [79]


def test_an_old_text_without_times_is_not_news(tmp_path: Path, start: Start) -> None:
    """A saved dmesg tells no hour: a daemon that meets it does not alarm; who looks once is shown it."""
    log = tmp_path / "dmesg.txt"
    add(log, XID)

    assert quiet(start(log), log) == []
    assert [e.number for e in events(start(log, undated=True)) if e.kind == "xid"] == [79]


def test_a_log_of_months_is_read_from_near_its_end(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start on a kern.log of ten gigabytes took a core for minutes."""
    monkeypatch.setattr("agent.sources.log_files.FIRST_BYTES", 100)
    log = tmp_path / "kmsg"
    now_us = int(time.monotonic() * 1e6)
    add(log, *[f"3,1,{now_us},-;{XID}"] * 50, f"3,2,{now_us},-;{OTHER}")

    assert [(e.number, e.count) for e in events(start(log))] == [(13, 1)]


def test_what_came_before_the_last_boot_is_over(tmp_path: Path, start: Start) -> None:
    """Installed an hour after the reboot that brought the GPU back: its Xid of before stood in kern.log, and paged."""
    booted_at = time.time() - time.monotonic()
    before, after = (datetime.fromtimestamp(booted_at + s, UTC).isoformat() for s in (-3600, 20))
    log = tmp_path / "kern.log"
    add(log, f"{before} gpu-17 kernel: {XID}", f"{after} gpu-17 kernel: {OTHER}")

    found = events(start(log), lambda got: len(got) >= 3)
    history = History()
    history.fold(found, lambda _: None)
    assert [(e.kind, e.number) for e in found] == [("boot", None), ("xid", 79), ("xid", 13)]
    assert [f.code for f in findings(history, booted_at + 60, {}, {})] == ["xid.13"]


def test_an_old_record_keeps_its_own_time(tmp_path: Path, start: Start) -> None:
    """What happened an hour ago is not told as of now."""
    log = tmp_path / "kmsg"
    happened = time.time() - 100.0
    add(log, f"3,1,{int((time.monotonic() - 100) * 1e6)},-;{XID}")
    (event,) = events(start(log))

    assert event.at == pytest.approx(happened, abs=5)


def test_a_new_boot_is_told(tmp_path: Path, start: Start) -> None:
    """A reboot mends a fallen GPU; the history must know of it."""
    log, boot_id = tmp_path / "kmsg", tmp_path / "boot_id"
    log.touch()
    boot_id.write_text("two\n")
    found = events(start(log, {"boot": "one", "inode": 1, "offset": 0}, boot_id=boot_id))

    assert [e.kind for e in found] == ["boot"]


def test_c061_a_storm_is_one_event(tmp_path: Path, start: Start) -> None:
    """800,000 entries of Xid 95 with 29 distinct ones filled a disk and a pager: here they are one, with a count."""
    log = tmp_path / "kmsg"
    line = "NVRM: Xid (PCI:0000:1a:00): 95, pid={}, name=a, Uncontained ECC error"
    assert line.format(1) in cases()["C061"]["input"]["recipe"].replace("\\", "")
    log.touch()
    source, wakes = start(log), []
    source.wake_with(lambda: wakes.append(1))
    last(source)
    add(log, *[f"3,1,1,-;{line.format(1)}"] * 10_000, *(f"3,1,1,-;{line.format(pid)}" for pid in range(29)))
    found = events(source, lambda got: sum(e.count for e in got) >= 10_029)

    assert sum(e.count for e in found) == 10_029
    assert {(e.kind, e.device, e.number) for e in found} == {("xid", "0000:1a:00", 95)}
    assert len(source._events) <= 1
    assert len(wakes) <= 20  # one in five seconds: a busy machine takes a few of those


@pytest.mark.heavy
def test_a_storm_of_800_000_lines(tmp_path: Path, start: Start) -> None:
    """The same at its full size: seconds, and no memory that grows with it."""
    log = tmp_path / "kmsg"
    log.touch()
    source = start(log)
    last(source)
    block = "3,1,1,-;NVRM: Xid (PCI:0000:1a:00): 95, pid=1, name=a, Uncontained ECC error\n" * 10_000
    with log.open("a") as out:
        for _ in range(80):
            out.write(block)
    began = time.monotonic()
    found = events(source, lambda got: sum(e.count for e in got) >= 800_000, within_s=300)

    assert sum(e.count for e in found) == 800_000
    assert len(source._events) + len(source._woken) <= 4  # whatever came
    print(f"800,000 lines in {time.monotonic() - began:.1f} s")


def test_c110_a_forged_line_is_no_xid(tmp_path: Path, start: Start) -> None:
    """Anybody who may write to /dev/kmsg could have had a GPU reset."""
    log = tmp_path / "kmsg"
    add(log, *cases()["C110"]["input"].values())
    log_now = [f"11,1,2,-;{XID}", f"3,2,3,-;{XID}", f"4,3,4,-;oom-kill: task=x\\x0a{XID}"]
    source = start(log)
    found = events(source, lambda got: sum(e.kind in ("xid", "forged") for e in got) >= 2)
    add(log, *log_now)
    more = events(source, lambda got: sum(e.kind in ("xid", "forged") for e in got) >= 2)

    for got in (found, more):
        assert sorted((e.kind, e.count) for e in got) == [("forged", 1), ("xid", 1)]
    assert XID in more[0].detail["text"] or XID in more[1].detail["text"]


def test_a_message_of_three_lines_as_dmesg_indents_them(tmp_path: Path, start: Start) -> None:
    """Two of its lines begin with spaces, as what follows a record of /dev/kmsg does: the lost GPU was passed over.

    The same by `logger`, of another GPU, is no word of the kernel's, and completes nothing.
    """
    rest = ("               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands.")
    log = tmp_path / "dmesg"
    log.touch()
    source = start(log)
    assert last(source).events == ()
    add(log, "Nov 30 13:45:20 gpu-17 x[1]: NVRM: The NVIDIA GPU 0000:1a:00.0", *rest, " SUBSYSTEM=pci")
    assert quiet(source, log) == []
    add(log, "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0", *rest)
    assert [(e.kind, e.device) for e in events(source)] == [("lost", "0000:b3:00")]


def test_a_flood_of_forged_lines_hides_nothing(tmp_path: Path, start: Start) -> None:
    """A user writes ten thousand lines of ten thousand GPUs: the memory of what the kernel said must not overflow."""
    log = tmp_path / "kmsg"
    log.touch()
    source = start(log)
    last(source)
    forged = (f"11,1,2,-;NVRM: Xid (PCI:{n % 256:04x}:{n // 256:02x}:00): {n % 999}, x" for n in range(10_000))
    add(log, *forged, f"3,1,2,-;{XID}")
    found = events(source, lambda got: any(e.kind == "xid" for e in got))

    assert {e.kind for e in found} == {"forged", "xid"}
    assert sum(e.count for e in found if e.kind == "forged") == 10_000
    assert len(source._events) <= 1


def test_a_line_that_a_drill_announced(tmp_path: Path, start: Start) -> None:
    """The fire drill writes one Xid; it counts once, in its time, and to the letter. All else stays forged."""
    log = tmp_path / "kmsg"
    log.touch()
    source = start(log)
    last(source)
    source.expect(XID, for_s=60)
    source.expect(OTHER, for_s=0)
    add(log, f"11,1,2,-;{XID} ", f"11,1,2,-;{XID}", f"11,1,2,-;{XID}", f"11,1,2,-;{OTHER}")
    found = events(source, lambda got: sum(e.count for e in got) >= 4)

    counts = {(kind, number): sum(e.count for e in found if (e.kind, e.number) == (kind, number))
              for kind, number in {(e.kind, e.number) for e in found}}
    assert counts == {("xid", 79): 1, ("forged", None): 3}
    (counted,) = (e for e in found if e.kind == "xid")
    assert counted.detail["drill"] is True


def test_a_fifo_is_read_as_it_is_written(tmp_path: Path, start: Start) -> None:
    """A pseudo kernel log without an end: writers come and go."""
    log = tmp_path / "pipe"
    os.mkfifo(log)
    source = start(log)
    last(source)
    for number in (79, 48):
        with log.open("w") as out:
            out.write(f"[12.5] {XID.replace('79', str(number))}\n")
        assert [e.number for e in events(source)] == [number]


def test_a_log_that_cannot_be_read_says_so(tmp_path: Path, start: Start) -> None:
    """In an unprivileged pod there is no /dev/kmsg: that is N/A; a path that somebody wrote down is a fault."""
    automatic, asked = start(None, kmsg=tmp_path / "none", journals=(), fallbacks=()), start(tmp_path / "none")
    (gap,), (fault,) = last(automatic).readings, last(asked).readings
    assert isinstance(gap, Gap)
    assert isinstance(fault, Gap)

    assert (gap.code, last(automatic).error) == (Why.NOT_SUPPORTED, None)
    assert "CAP_SYSLOG" in gap.why
    assert fault.code is Why.ERROR
    assert "No such file" in (last(asked).error or "")


def test_a_fault_of_ours_does_not_end_the_reading(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that broke the parser ended the thread, and the log was "open" and silent for ever."""
    monkeypatch.setattr("agent.sources.kernel_log.REOPEN_S", 0.05)
    log = tmp_path / "kmsg"
    add(log, f"3,1,1,-;{XID}")
    with monkeypatch.context() as broken:
        broken.setattr("agent.sources.kernel_log.Reader.read", lambda *_: 1 // 0)
        source = start(log)
        (gap,) = last(source).readings
        assert isinstance(gap, Gap)
        assert (gap.code, "ZeroDivisionError" in gap.why) == (Why.ERROR, True)

    assert [e.number for e in events(source)] == [79]


def test_a_syslog_file_where_kmsg_cannot_be_read(tmp_path: Path, start: Start) -> None:
    """An agent without CAP_SYSLOG, and in the group adm: syslog's copy of the kernel's messages will do."""
    log = tmp_path / "kern.log"
    log.touch()
    source = start(None, kmsg=tmp_path / "none", journals=(), fallbacks=(tmp_path / "other", log))
    last(source)
    add(log, f"Nov 29 23:44:01 gpu-17 kernel: [12345.678901] {XID}", f"Nov 29 23:44:01 gpu-17 app[7]: {XID}")
    found = events(source, lambda got: sum(e.count for e in got) >= 2)

    assert sorted((e.kind, e.device, e.number) for e in found) == [("forged", "", None), ("xid", "0000:1a:00", 79)]
    assert source.note == f"reads {log}"


@pytest.mark.parametrize(("story", "cursor", "reads", "lost"), [
    ("overwritten while we looked", {}, [b"3,7,1,-;a", BrokenPipeError(), b"3,12,1,-;b"], 4),
    ("overwritten between two runs", {"boot": "b", "seq": 10}, [b"3,15,1,-;a", b"3,16,1,-;b"], 4),
    ("nothing was", {"boot": "b", "seq": 10}, [b"3,9,1,-;a", b"3,10,1,-;b", b"3,11,1,-;c"], 0),
    ("of another boot", {"boot": "a", "seq": 10}, [b"3,15,1,-;a"], 0),
])
def test_records_that_were_overwritten_are_counted(
    monkeypatch: pytest.MonkeyPatch, story: str, cursor: dict[str, Any], reads: list[bytes | Exception], lost: int,
) -> None:
    """A flood pushed records out of the kernel's ring before anybody had read them, and nobody was told."""
    script = iter([*reads, BlockingIOError()])

    def read(fd: int, size: int) -> bytes:
        told = next(script)
        if isinstance(told, Exception):
            raise told
        return told

    log = Kmsg(Path("/dev/null"), cursor, "b")
    monkeypatch.setattr("agent.sources.log_files.os.read", read)
    try:
        given = [record.message for record, _ in log.records()]
    finally:
        log.close()

    assert log.lost == lost, story
    assert len(given) == sum(isinstance(told, bytes) for told in reads)


@pytest.mark.heavy
def test_the_real_kmsg(tmp_path: Path, start: Start) -> None:
    """A user's line in the real /dev/kmsg is a security notice; a restart with the cursor sees it no second time."""
    need("root")
    source = start(None)
    before = last(source)
    assert before.error is None
    assert (before.cursor or {})["seq"] > 0
    with Path("/dev/kmsg").open("w") as out:
        out.write(f"<3>{XID} {tmp_path.name}\n")
    found = events(source, lambda got: any(tmp_path.name in str(e.detail.get("text")) for e in got))
    cursor = last(source).cursor
    source.close()
    again = start(None, cursor)
    again.read(time.time())

    (forged,) = (e for e in found if tmp_path.name in str(e.detail.get("text")))
    assert (forged.kind, forged.number) == ("forged", None)
    assert not [e for e in last(again).events if tmp_path.name in str(e.detail)]
