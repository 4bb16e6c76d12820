"""systemd's journal, where /dev/kmsg may not be read: a real journalctl on a journal that grows, and a scripted one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.model import Event, Gap, Sample, Why
from agent.sources.kernel_log import KernelLog
from tests.needs import find, need

XID = "NVRM: Xid (PCI:0000:1a:00): 79, pid=12, name=a, GPU has fallen off the bus."
BOOT, OLD_BOOT = "1" * 8 + "-1111-1111-1111-" + "1" * 12, "2" * 8 + "-2222-2222-2222-" + "2" * 12
KERNEL = {"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "SYSLOG_IDENTIFIER": "kernel"}
USER = {"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "1", "SYSLOG_IDENTIFIER": "NVRM"}  # as journald parts a user's line
MISSED = {"MESSAGE_ID": "e9bf28e6e834481bb6f48f548ad13606"}


class Machine:
    """A machine's journal, its ids, and the sources that read it, which end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "journal"
        self.machine_id, self.boot_id = folder / "machine-id", folder / "boot_id"
        self.machine_id.write_text("a" * 32 + "\n")
        self.boot_id.write_text(BOOT + "\n")
        self.path = self.folder / ("a" * 32) / "system.journal"
        self.path.parent.mkdir(parents=True)
        self.written = 0
        self.sources: list[KernelLog] = []

    def add(self, *messages: str | bytes, boot: str = BOOT, **fields: str) -> None:
        """Have systemd-journal-remote append entries, a second apart, the last of them now."""
        program = find("systemd-journal-remote")
        assert program
        text = b""
        for message in messages:
            self.written += 1
            told = {"__REALTIME_TIMESTAMP": str(int((time.time() - 1000 + self.written) * 1e6)),
                    "__MONOTONIC_TIMESTAMP": str(self.written * 1_000_000), "_BOOT_ID": boot.replace("-", ""),
                    **(fields or KERNEL)}
            body = message if isinstance(message, bytes) else message.encode()
            text += "".join(f"{name}={value}\n" for name, value in told.items()).encode()
            text += b"MESSAGE\n" + len(body).to_bytes(8, "little") + body + b"\n\n"
        command = [program, "--output", str(self.path), "-"]
        subprocess.run(command, input=text, capture_output=True, check=True, timeout=60)

    def start(self, cursor: Mapping[str, Any] | None = None, **more: Any) -> KernelLog:
        """A source without /dev/kmsg."""
        source = KernelLog(None, cursor, kmsg=self.folder / "none", journals=(self.folder,), fallbacks=(),
                           boot_id=self.boot_id, machine_id=self.machine_id, **more)
        self.sources.append(source)
        return source

    def end(self) -> None:
        """Every thread and every journalctl has ended."""
        for source in self.sources:
            source.close()
        for source in self.sources:
            if source._thread is not None:
                source._thread.join(30)
                assert not source._thread.is_alive()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One with an empty journal."""
    monkeypatch.setattr("agent.sources.kernel_log.REOPEN_S", 0.1)
    one = Machine(tmp_path)
    yield one
    one.end()


@pytest.fixture
def real(machine: Machine) -> Machine:
    """The same, where there are the real programs."""
    need("journalctl", "systemd-journal-remote")
    return machine


def events(source: KernelLog, enough: Callable[[list[Event]], bool] = bool) -> list[Event]:
    """What is handed over until it is enough."""
    found: list[Event] = []
    end = time.monotonic() + 60
    while not enough(found):
        assert time.monotonic() < end, (found, source.note)
        found += source.read(time.time()).events
        time.sleep(0.01)
    return found


def seen(found: list[Event]) -> list[tuple[str, int | None, int]]:
    """(kind, number, count) of each."""
    return sorted((e.kind, e.number, e.count) for e in found if e.kind != "map")


def mark(one: Machine, source: KernelLog) -> list[tuple[str, int | None, int]]:
    """What comes before a line that comes last."""
    one.add("NVRM: GPU at PCI:0000:ee:00: GPU-00000000-ffff")
    return seen(events(source, lambda got: any(e.kind == "map" for e in got)))


def test_the_journal_is_read_where_kmsg_is_not(real: Machine) -> None:
    """An agent in the group systemd-journal and without CAP_SYSLOG: what was told in this boot, and what comes."""
    real.add(XID, boot=OLD_BOOT)  # who has never run here does not alarm of what an earlier boot told
    real.add("eth0: link up", XID.replace("79", "48"))
    source = real.start()
    (old,) = events(source)
    assert seen([old]) == [("xid", 48, 1)]
    assert 990 < time.time() - old.at < 1060  # by its own time
    assert old.detail["process"] == "a"
    woken: list[int] = []
    source.wake_with(lambda: woken.append(1))
    real.add(XID)
    assert seen(events(source)) == [("xid", 79, 1)]
    assert woken
    assert source.note == f"reads {real.path.parent}"
    batch = source.read(time.time())
    assert (batch.error, [r.value for r in batch.readings if isinstance(r, Sample)]) == (None, [1.0])


def test_only_the_kernel_s_own_lines_count(real: Machine) -> None:
    """What a user wrote to /dev/kmsg, by `logger`, or by journald's own socket with fields of his choice."""
    source = real.start()
    source.read(time.time())
    line = XID.removeprefix("NVRM: ")
    real.add(line, **USER)
    real.add(XID, _TRANSPORT="syslog", SYSLOG_FACILITY="0", SYSLOG_IDENTIFIER="kernel")
    real.add(XID, _TRANSPORT="journal", SYSLOG_FACILITY="0", SYSLOG_IDENTIFIER="kernel", TRANSPORT="kernel")
    real.add("Missed 12 kernel messages", _TRANSPORT="journal", **MISSED)
    real.add(XID, _TRANSPORT="kernel", SYSLOG_IDENTIFIER="kernel", PRIORITY="3")  # an old journald: without facility
    found = events(source, lambda got: sum(e.count for e in got) >= 2)
    assert seen(found) == [("forged", None, 1), ("xid", 79, 1)]
    (forged,) = (e for e in found if e.kind == "forged")
    assert (forged.detail["text"], forged.detail["facility"]) == (XID, 1)
    assert mark(real, source) == []


def test_what_journald_itself_missed_is_told(real: Machine) -> None:
    """The ring was overwritten before journald had read it: it says so, and so do we."""
    real.add("Missed 3 kernel messages", _TRANSPORT="driver", **MISSED)  # before any run of ours
    source = real.start()
    assert mark(real, source) == []
    real.add("Missed 12 kernel messages", _TRANSPORT="driver", **MISSED)
    assert seen(events(source)) == [("overrun", None, 12)]


def test_messages_that_are_no_plain_text(real: Machine) -> None:
    """journald keeps line ends and bytes that are no UTF-8; the driver's message in three lines is one record."""
    source = real.start()
    source.read(time.time())
    lost = "\n".join(("NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: (PCI ID: 10de:26b5) installed in this system has",
                      "NVRM: fallen off the bus and is not responding to commands."))
    real.add(b"NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=\xff\xfe, x", lost, f"oom-kill: task=x\n{XID}", "x" * 9000)
    found = events(source, lambda got: len(got) >= 2)
    assert seen(found) == [("lost", None, 1), ("xid", 13, 1)]
    assert {e.device for e in found} == {"0000:1b:00", "0000:b3:00"}
    assert mark(real, source) == []


def test_nothing_again_and_nothing_missed_between_two_runs(real: Machine) -> None:
    """With the cursor of the run before, also over a reboot, which is told."""
    real.add(XID)
    first = real.start()
    events(first)
    cursor = json.loads(json.dumps(first.read(time.time()).cursor))
    first.close()
    real.add(XID.replace("79", "48"))
    second = real.start(cursor)
    assert seen(events(second)) == [("xid", 48, 1)]
    cursor = json.loads(json.dumps(second.read(time.time()).cursor))
    second.close()
    real.add(XID.replace("79", "62"))
    real.boot_id.write_text(OLD_BOOT + "\n")
    real.add(XID.replace("79", "119"), boot=OLD_BOOT)
    third = real.start(cursor)
    found = events(third, lambda got: len(got) >= 3)
    assert seen(found) == [("boot", None, 1), ("xid", 62, 1), ("xid", 119, 1)]


def test_journalctl_that_is_killed(real: Machine) -> None:
    """It is said, it is started anew, and nothing is lost or told twice."""
    real.add(XID)
    source = real.start()
    events(source)
    children = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and
                str(real.path.parent) in _command(p) and "--follow" in _command(p)]
    assert len(children) == 1
    subprocess.run(["kill", "-9", str(children[0])], check=True)
    real.add(XID.replace("79", "48"))
    assert seen(events(source)) == [("xid", 48, 1)]
    assert mark(real, source) == []


@pytest.mark.heavy
def test_journalctl_ends_with_an_agent_that_is_killed(real: Machine) -> None:
    """kill -9 of the agent, without systemd: nobody is left behind who follows the journal for ever."""
    real.add(XID)
    code = ("import sys, time; from pathlib import Path; from agent.sources.journal import Journal\n"
            "log = Journal(Path(sys.argv[1]), {}, '1' * 32)\n"
            "while log.behind: list(log.records()); log.wait(0.1)\n"
            "print(log._child.pid, flush=True); time.sleep(600)")
    agent = subprocess.Popen([sys.executable, "-c", code, str(real.path.parent)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout
    child = Path("/proc") / agent.stdout.readline().strip()
    assert "--follow" in _command(child)
    agent.kill()
    agent.wait(60)
    agent.stdout.close()
    end = time.monotonic() + 60
    while "--follow" in _command(child):  # gone, or a zombie where nobody waits for orphans
        assert time.monotonic() < end
        time.sleep(0.05)


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_a_folder_by_its_path(real: Machine) -> None:
    """`kernel_log: /var/log/journal` in a pod that has the host's: its machine id is another than the container's."""
    real.add(XID)
    source = KernelLog(real.folder, boot_id=real.boot_id)
    real.sources.append(source)
    assert seen(events(source)) == [("xid", 79, 1)]


# --- without a journal, and by a scripted journalctl -----------------------------------------------------------------


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A journalctl that does this."""
    path = folder / "bin" / "journalctl"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


def gap_of(source: KernelLog, word: str) -> tuple[Why, str, str | None]:
    """The reason for which the log is not read, once it is this one."""
    end = time.monotonic() + 60
    while True:
        batch = source.read(time.time())
        (reading,) = batch.readings
        if isinstance(reading, Gap) and word in reading.why:
            return reading.code, reading.why, batch.error
        assert time.monotonic() < end, reading
        time.sleep(0.01)


def test_why_there_is_no_journal(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a pod: neither. On a node: not in the group. Both are said beside what /dev/kmsg needs, and are N/A."""
    script(tmp_path, monkeypatch, "exit 0")
    unread = machine.start()
    code, why, error = gap_of(unread, "this user may not read it")
    assert (code, error) == (Why.NOT_SUPPORTED, None)
    assert "No such file or directory" in why
    assert "or the group systemd-journal" in why
    machine.machine_id.write_text("b" * 32)
    assert "no journal of this machine" in gap_of(machine.start(), "no journal")[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "journalctl is not installed" in gap_of(machine.start(), "not installed")[1]


def test_a_journalctl_that_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own words are the reason."""
    machine.path.touch()
    script(tmp_path, monkeypatch, 'echo "Failed to open files: Too many open files" >&2; exit 1')
    code, why, error = gap_of(machine.start(), "journalctl ended")
    assert code is Why.ERROR
    assert why.endswith("journalctl ended with status 1: Failed to open files: Too many open files")
    assert error == why


def test_what_is_no_entry_is_passed_over(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a line, an entry without a cursor, numbers where text belongs: the next entry counts."""
    machine.path.touch()
    entry = {"__CURSOR": "s=1;i=1", "__REALTIME_TIMESTAMP": str(int(time.time() * 1e6)), "MESSAGE": XID, **KERNEL}
    lines = ['{"MESSAGE": "NVRM', "[]", "null", json.dumps(entry | {"__REALTIME_TIMESTAMP": "soon"}),
             json.dumps({k: v for k, v in entry.items() if k != "__CURSOR"}), json.dumps(entry | {"MESSAGE": None}),
             json.dumps(entry | {"MESSAGE": 7}), json.dumps(entry | {"MESSAGE": []}), json.dumps(entry)]
    (tmp_path / "out").write_text("\n".join(lines) + "\n")
    script(tmp_path, monkeypatch, f'case "$*" in *--follow*) exec sleep 600;; *) exec cat {tmp_path}/out;; esac')
    source = machine.start()
    assert seen(events(source)) == [("xid", 79, 1)]
    assert (source.read(time.time()).cursor or {})["journal"] == "s=1;i=1"
