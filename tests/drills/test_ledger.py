"""The ledger: what was written is there after a crash, on a full disk, and half of a line is nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from drills.ledger import LEDGER, SIZE_BYTES, Ledger, last_state, plan_of, process_of, read, run_folders, short_tag
from drills.model import Command, Plan, ProcessId, State
from tests.drills.stand_ins import ROOT, tmpfs

PLAN = Plan(
    fault="process-kill",
    run="kill-20261129T210000Z-ab12",
    targets=["process 4242 (vllm serve), port 8000"],
    commands=[Command("kill -KILL 4242", "part main")],
    undo=[],
    facts={"victims": [{"pid": 4242, "start_ticks": 7, "boot_id": "b"}]},
    needs=("CAP_KILL",),
)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    """The next process knows from the ledger alone what was armed, by whom, and how far it came."""
    folder = tmp_path / "runs" / PLAN.run
    ledger = Ledger.create(folder, {"run": PLAN.run, "runner": {"pid": 9, "start_ticks": 1, "boot_id": "b"}})
    ledger.write(State.LOCKED)
    ledger.write(State.ARMED, plan=msgspec.to_builtins(PLAN))
    ledger.note(holder={"pid": 10, "start_ticks": 2, "boot_id": "b", "comm": "a) R 1 (x"})
    ledger.write(State.INJECTING)
    ledger.close()
    entries = read(folder)
    assert [(entry.n, entry.state) for entry in entries] == [
        (0, None), (1, State.LOCKED), (2, State.ARMED), (3, None), (4, State.INJECTING),
    ]  # fmt: skip
    found = plan_of(entries)
    assert found is not None
    assert (found.facts, found.commands, list(found.needs)) == (PLAN.facts, PLAN.commands, ["CAP_KILL"])
    assert last_state(entries) == State.INJECTING
    assert process_of(entries, "runner") == ProcessId(9, 1, "b")
    assert process_of(entries, "holder") == ProcessId(10, 2, "b", "a) R 1 (x")
    assert abs(entries[0].at - time.time()) < 5.0
    assert abs(entries[0].boot_s - float(Path("/proc/uptime").read_text().split()[0])) < 5.0
    assert entries[0].boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_file_has_its_size_before_the_first_line(tmp_path: Path) -> None:
    """The drill that fills the disk must still be able to write that it does."""
    Ledger.create(tmp_path / "run", {}).close()
    seen = (tmp_path / "run" / LEDGER).stat()
    assert (seen.st_size, seen.st_mode & 0o777) == (65536, 0o600)
    assert seen.st_blocks * 512 >= 65536


@pytest.mark.parametrize(
    ("story", "tail"),
    [
        ("half a line", b'{"n":2,"at":1.0,"boot'),
        ("a whole line without its end", b'{"n":2,"at":1.0,"boot_s":1.0,"boot_id":"b","state":"ARMED","data":{}}'),
        ("a line of another kind", b'{"n":2,"at":1.0,"boot_s":1.0,"boot_id":"b","state":"EXPLODED","data":{}}\n'),
        ("noise", b"\xff\xfe\n"),
    ],
)
def test_half_a_line_is_nothing(tmp_path: Path, story: str, tail: bytes) -> None:
    """The power failed in the middle of a write: what was whole counts, and the next line does not stick to it."""
    ledger = Ledger.create(tmp_path, {"run": "r"})
    ledger.write(State.LOCKED)
    ledger.close()
    raw = (tmp_path / LEDGER).read_bytes()
    end = raw.index(b"\0")
    (tmp_path / LEDGER).write_bytes(raw[:end] + tail + raw[end + len(tail) :])
    assert [entry.n for entry in read(tmp_path)] == [0, 1], story
    again = Ledger.open(tmp_path)
    again.note(x=1)
    again.close()
    assert [(entry.n, entry.data) for entry in read(tmp_path)] == [(0, {"run": "r"}), (1, {}), (2, {"x": 1})]
    assert (tmp_path / LEDGER).stat().st_size == 65536


def test_notes_leave_room_for_states(tmp_path: Path) -> None:
    """A talkative phase filled the ledger up, and REVERTED could not be written any more."""
    ledger = Ledger.create(tmp_path, {})
    for _ in range(50):
        ledger.note(text="x" * 1000)
    with pytest.raises(OSError, match="bytes are full") as caught:
        ledger.note(text="x" * 8000)
    assert caught.value.errno == errno.ENOSPC
    ledger.write(State.REVERTED)
    with pytest.raises(OSError, match="bytes are full"):
        ledger.write(State.REPORTED, text="x" * SIZE_BYTES)
    ledger.write(State.REPORTED)
    ledger.close()
    assert last_state(read(tmp_path)) == State.REPORTED


def test_a_run_has_one_ledger(tmp_path: Path) -> None:
    """Two runners with one id must not write over each other's undo."""
    Ledger.create(tmp_path, {}).close()
    with pytest.raises(FileExistsError):
        Ledger.create(tmp_path, {})


def test_cat_shows_it(tmp_path: Path) -> None:
    """At three at night, with nothing but a shell, on a disk that takes no write."""
    ledger = Ledger.create(tmp_path, {"run": "r"})
    ledger.write(State.ARMED, undo="kill -KILL 77")
    ledger.close()
    shown = subprocess.run(["cat", str(tmp_path / LEDGER)], capture_output=True, check=True).stdout.decode()
    assert "kill -KILL 77" in shown.splitlines()[1]


def test_folders_of_runs_in_order(tmp_path: Path) -> None:
    """Two drills: what ran first is healed first, whatever its drill is called."""
    root = tmp_path / "runs"
    assert run_folders(root) == []
    for name in ("loss-20261201T100000Z-00aa", "hang-20261203T100000Z-0001", "kill-a-20261102T100000Z-ffff"):
        Ledger.create(root / name, {}).close()
    (root / "empty").mkdir()
    assert [folder.name[:6] for folder in run_folders(root)] == ["kill-a", "loss-2", "hang-2"]
    assert read(root / "empty") == []


def test_short_tag() -> None:
    """`printf %s kill-20261129T210000Z-ab12 | sha256sum | cut -c1-8` says so."""
    assert short_tag("kill-20261129T210000Z-ab12") == "0511091a"


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """Killed while it wrote: every line that was said to be on disk is there."""
    script = (
        "import sys; from pathlib import Path; from drills.ledger import Ledger\n"
        "ledger = Ledger.create(Path(sys.argv[1]), {})\n"
        "n = 0\n"
        "while True:\n"
        "    ledger.note(i=n); print(n, flush=True); n += 1\n"
    )
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(40):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        told = [39, *map(int, process.stdout.read().split())][-1]
    entries = read(folder)
    assert told <= len(entries) - 2 <= told + 1
    assert [entry.data.get("i") for entry in entries[1:]] == list(range(len(entries) - 1))


@pytest.mark.heavy
def test_a_full_disk(tmp_path: Path) -> None:
    """The disk is full: a new run is refused and leaves nothing, one that began writes on in what it has."""
    with tmpfs(tmp_path / "disk", "512k") as disk:
        ledger = Ledger.create(disk / "begun", {})
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 20))
        ledger.write(State.REVERTED)
        ledger.close()
        assert last_state(read(disk / "begun")) == State.REVERTED
        with pytest.raises(OSError, match="No space left"):
            Ledger.create(disk / "new", {})
        assert run_folders(disk) == [disk / "begun"]
