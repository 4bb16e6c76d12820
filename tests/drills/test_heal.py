"""heal: whatever a ledger says is undone, offline, again and again, and one damaged run keeps no other broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from agent import client
from agent.config import load_config
from drills import daemon, history, lock, proc, record, runner, tell
from drills import heal as heal_module
from drills.faults.table import FAULTS
from drills.heal import heal, is_clean
from drills.holder import HolderError
from drills.ledger import Entry, Ledger, aborted_by, last_state, read
from drills.model import Drill, Left, Plan, ProcessId, State
from tests.drills.netns import NEEDS, lab
from tests.drills.stand_ins import (
    HOLDER,
    MARKER,
    NOBODY,
    ROOT,
    arm,
    as_nobody,
    engine,
    new_run,
    open_folder,
    runner_of,
    tmpfs,
    wait_for,
)
from tests.drills.test_process_faults import may_trace
from tests.needs import need

__all__ = ["may_trace"]

Finished = list[tuple[str, list[Entry], list[Left]]]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAULTS, "marker", MARKER)


@pytest.fixture
def finished() -> Finished:
    """What `finish` was called with."""
    return []


def healed(root: Path, finished: Finished) -> list[Left]:
    """Heal, and keep what the reports would be made from."""
    finished.clear()
    return heal(root, finish=lambda folder, entries, left: finished.append((folder.name, entries, left)))


def crashed(root: Path, run: str, runner: ProcessId | None = None, **params: object) -> Path:
    """A run whose processes are all gone, and whose fault is still in; the file is the fault."""
    file = root.parent / f"{run}.fault"
    plan = MARKER.plan(Drill("d", "marker", params={"file": str(file), **params}), run)
    gone = ProcessId(4194304, 1, proc.boot_id())
    ledger = Ledger.create(root / run, {"run": run, "runner": msgspec.to_builtins(runner or gone)})
    ledger.write(State.ARMED, plan=msgspec.to_builtins(plan), holder=msgspec.to_builtins(gone))
    ledger.write(State.INJECTING)
    ledger.close()
    file.touch()
    return file


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no part of a drill."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_outlived_every_process(tmp_path: Path, finished: Finished) -> None:
    """The machine's power failed, all processes are gone, and the fault is still in."""
    root = tmp_path / "runs"
    files = [crashed(root, f"d-2026112{n}T210000Z-0000") for n in (8, 9)]
    assert healed(root, finished) == []
    assert not any(file.exists() for file in files)
    assert [(name, last_state(entries), left) for name, entries, left in finished] == [
        ("d-20261128T210000Z-0000", State.INJECTING, []),
        ("d-20261129T210000Z-0000", State.INJECTING, []),
    ]
    assert read(root / "d-20261128T210000Z-0000")[-1].data == {"healed": True}
    assert healed(root, finished) == []
    assert finished == []


def test_what_cannot_be_undone_is_tried_again(tmp_path: Path, finished: Finished) -> None:
    """Undo did nothing: the command is told each time, until somebody has done it."""
    root = tmp_path / "runs"
    file = crashed(root, "d-20261129T210000Z-0000", stays=True)
    left = [Left(f"file {file}", f"rm {file}")]
    for _ in range(2):
        assert healed(root, finished) == left
        assert [one[2] for one in finished] == [left]
    file.unlink()
    assert healed(root, finished) == []
    assert [one[2] for one in finished] == [[]]


def test_one_damaged_run(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of an older version could not be read, and for that the disk of another run stayed full."""
    root = tmp_path / "runs"
    damaged = Ledger.create(root / "d-20261127T210000Z-0000", {})
    damaged.write(State.ARMED, plan={"fault": 7})
    damaged.close()
    crashed(root, "d-20261128T210000Z-0000")
    file = crashed(root, "d-20261129T210000Z-0000")
    undo = MARKER.undo

    def fails(plan: Plan) -> None:
        if "20261128" in plan.run:
            raise ValueError("no such table")
        undo(plan)

    monkeypatch.setattr(MARKER, "undo", fails)
    first, second = healed(root, finished)
    assert first.what.startswith("run d-20261127T210000Z-0000: ")
    assert first.command == f"cat {root}/d-20261127T210000Z-0000/ledger.jsonl"
    assert second.what == f"file {tmp_path}/d-20261128T210000Z-0000.fault (undo: no such table)"
    assert not file.exists()
    assert len(finished) == 3


def test_a_fault_of_another_version(tmp_path: Path, finished: Finished) -> None:
    """Rolled back in the middle of a drill: what this version cannot undo, a person can."""
    root = tmp_path / "runs"
    file = crashed(root, "d-20261129T210000Z-0000")
    entries = read(root / "d-20261129T210000Z-0000")
    plan = {**entries[1].data["plan"], "fault": "solar-flare"}
    ledger = Ledger.open(root / "d-20261129T210000Z-0000")
    ledger.note(plan=plan)
    ledger.close()
    assert healed(root, finished) == [
        Left("run d-20261129T210000Z-0000: this version does not know its fault 'solar-flare'", f"rm {file}")
    ]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    """The disk is full: the report fails, the world is healed."""
    root = tmp_path / "runs"
    files = [crashed(root, f"d-2026112{n}T210000Z-0000") for n in (8, 9)]

    def finish(_folder: Path, _entries: list[Entry], _left: list[Left]) -> None:
        raise OSError(28, "No space left on device")

    assert heal(root, finish=finish) == []
    assert not any(file.exists() for file in files)


def test_a_heal_that_is_killed_before_the_report(tmp_path: Path, finished: Finished) -> None:
    """systemd killed drilld while it healed: the run was called healed, and its report never said how it ended."""
    root = tmp_path / "runs"
    crashed(root, "d-20261128T210000Z-0000")

    def killed(folder: Path, entries: list[Entry], left: list[Left]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(root, finish=killed)
    assert healed(root, finished) == []

    assert [run for run, _, _ in finished] == ["d-20261128T210000Z-0000"]


def test_a_pid_of_another_boot(tmp_path: Path, finished: Finished) -> None:
    """The machine was booted again, and the runner's number is somebody else's now."""
    root = tmp_path / "runs"
    with sleeper() as process:
        who = proc.identify(process.pid)
        for number, other in enumerate((replace(who, boot_id="x"), replace(who, start_ticks=who.start_ticks - 1))):
            crashed(root, f"d-20261129T210000Z-000{number}", runner=other)
        assert healed(root, finished) == []
        assert len(finished) == 2
        assert process.poll() is None


@pytest.mark.usefixtures("may_trace")
def test_a_live_run_is_ended_first(tmp_path: Path, finished: Finished) -> None:
    """`heal` in the middle of a drill: undoing under a live runner would be undone by it."""
    with engine(tmp_path / "engine") as stub:
        run = "hang-20261129T210000Z-ab12"
        target = json.dumps({"pid": stub.page.pid, "part": "core"})
        parameters = '{"hold_s": 60.0}'
        command = [sys.executable, "-m", "tests.drills.stand_ins", "run", str(tmp_path / "runs"), "engine-hang", run]
        with subprocess.Popen([*command, target, parameters], cwd=ROOT) as runner:
            wait_for(lambda: last_state(read(tmp_path / "runs" / run)) == State.PROVEN, 10.0)
            assert "t" in proc.threads(stub.core.pid).values()
            assert healed(tmp_path / "runs", finished) == []
            assert runner.wait(30) == -signal.SIGTERM
        assert stub.runs_on()
        assert [(name, last_state(entries)) for name, entries, _ in finished] == [(run, State.PROVEN)]


def test_a_live_run_is_aborted_and_has_time_for_its_report(tmp_path: Path, finished: Finished) -> None:
    """`heal` killed the runner: its report broke off, and users whom a delayed upstream still served were cut off."""
    folder = tmp_path / "runs" / "d-20261129T210000Z-ab12"
    Ledger.create(folder, {}).close()
    with runner_of(folder) as runner:
        left = heal(tmp_path / "runs", by="ada, by heal",
                    finish=lambda folder, entries, left: finished.append((folder.name, entries, left)))  # fmt: skip
        assert left == []
        assert runner.wait(30) == 5
    assert [last_state(entries) for _, entries, _ in finished] == [State.REPORTED]
    assert read(folder)[-2].data == {"by": "ada, by heal"}
    assert read(folder)[-1].data == {"healed": True, "aborted_by": "ada, by heal"}


def test_a_live_run_that_does_not_heed(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """It hung: asked to end it did not, and after its time it is ended."""
    monkeypatch.setattr(heal_module, "RUNNER_ENDS_WITHIN_S", 0.3)
    folder = tmp_path / "runs" / "d-20261129T210000Z-ab12"
    Ledger.create(folder, {}).close()
    with runner_of(folder, heeds=False) as runner:
        assert healed(tmp_path / "runs", finished) == []
        assert runner.wait(30) == -signal.SIGKILL
    assert [last_state(entries) for _, entries, _ in finished] == [State.BASELINE]


def test_a_live_run_of_another_user_s(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """drilld was asked to heal while root held a drill by hand: it may not end that, and paged for an orphan."""

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder = tmp_path / "runs" / "d-20261129T210000Z-ab12"
    Ledger.create(folder, {}).close()
    with runner_of(folder):
        monkeypatch.setattr(os, "kill", denied)
        monkeypatch.setattr(proc, "end", denied)
        assert healed(tmp_path / "runs", finished) == [
            Left(f"run {folder.name}: [Errno 1] Operation not permitted", "sudo tocsin drill heal")
        ]
        monkeypatch.undo()
    assert finished == []
    assert aborted_by(folder) == ""


def test_a_fault_that_was_put_in_while_it_was_ended(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The ledger was read, the run armed its fault, then it was ended: heal knew of no plan, and called it clean."""
    root = tmp_path / "runs"
    folder = root / "d-20261129T210000Z-0000"
    ledger = Ledger.create(folder, {})
    file = tmp_path / "fault"

    def ends(folder: Path, entries: list[Entry], by: str) -> list[Left]:
        plan = MARKER.plan(Drill("d", "marker", params={"file": str(file)}), folder.name)
        ledger.write(State.ARMED, plan=msgspec.to_builtins(plan))
        file.touch()
        return []

    monkeypatch.setattr(heal_module, "end_runner", ends)
    assert healed(root, finished) == []
    ledger.close()
    assert not file.exists()


def test_a_run_that_root_keeps_to_itself(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `sudo tocsin drill run --foreground`, and drilld's user could heal nothing any more."""
    monkeypatch.setattr(heal_module, "heal_strays", list)  # nobody cannot see who holds what other tests hold
    with open_folder() as folder:
        root = folder / "runs"
        kept, other = "d-20261128T210000Z-0000", "d-20261129T210000Z-0000"
        files = [crashed(root, run) for run in (kept, other)]
        for one in (folder, root, root / other, root / other / "ledger.jsonl"):
            os.chown(one, NOBODY, NOBODY)
        with as_nobody():
            (left,) = healed(root, finished)
        assert left == Left(f"run {kept}: [Errno 13] Permission denied: '{root / kept}/ledger.jsonl'",
                            "sudo tocsin drill heal")  # fmt: skip
        assert [name for name, _, _ in finished] == [other]
        assert [file.exists() for file in files] == [True, False]

        assert healed(root, finished) == []  # by root, who gives it to drilld
        assert not files[0].exists()
        assert (root / kept).stat().st_uid == NOBODY
        with as_nobody():
            assert healed(root, finished) == []
        assert finished == []


def test_not_before_the_injector_is_gone(tmp_path: Path, finished: Finished) -> None:
    """Runner and holder were killed, a child of the holder went on and injected after the undo."""
    root, file = tmp_path / "runs", tmp_path / "fault"
    drill = Drill("d", "marker", params={"file": str(file), "bad": "child"})
    plan = MARKER.plan(drill, "d-20261129T210000Z-ab12")
    folder, ledger = new_run(root, plan)
    held = arm(folder, ledger, plan, 20.0, HOLDER)
    ledger.close()
    with pytest.raises(HolderError):
        held.inject(0.2)
    wait_for(file.with_suffix(".child").exists)
    os.kill(held.process_id.pid, signal.SIGKILL)
    assert not file.exists()
    assert healed(root, finished) == []
    child = int(file.with_suffix(".child").read_text())
    wait_for(lambda: child not in proc.processes(), 0.2)
    assert not file.exists()
    assert held.wait_gone(5.0)


@pytest.mark.heavy
def test_a_disk_that_takes_no_write(tmp_path: Path, finished: Finished) -> None:
    """The file system went read-only after an error: undo needs no successful write, and is done each time."""
    with tmpfs(tmp_path / "disk", "1m") as disk:
        file = crashed(disk / "runs", "d-20261129T210000Z-0000")
        outside = tmp_path / "outside"
        ledger = Ledger.open(disk / "runs" / "d-20261129T210000Z-0000")
        plan = MARKER.plan(Drill("d", "marker", params={"file": str(outside)}), "d-20261129T210000Z-0000")
        ledger.note(plan=msgspec.to_builtins(plan))
        ledger.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for _ in range(2):
            outside.touch()
            assert healed(disk / "runs", finished) == []
            assert not outside.exists()
            assert len(finished) == 1
        assert file.exists()


@pytest.mark.parametrize(
    ("story", "states", "clean"),
    [
        ("nothing was written", [], False),
        ("killed while it watched the baseline", ["LOCKED", "BASELINE"], False),
        ("killed in the fault", ["ARMED", "INJECTING", "PROVEN"], False),
        ("reverted, and killed before its report", ["ARMED", "REVERTING", "REVERTED"], False),
        ("in good order", ["ARMED", "REVERTING", "REVERTED", "RECOVERED", "REPORTED"], True),
        ("reported, and something was left", ["ARMED", "REVERTING", "ORPHANED", "REPORTED"], False),
        ("left, and then undone", ["ORPHANED", "REVERTED", "REPORTED"], True),
        ("left, and healed later", ["ORPHANED", "REPORTED", None], True),
        ("a guard said no", ["PLANNED", "SKIPPED"], True),
        ("a guard said not now", ["PLANNED", "DEFERRED"], True),
        ("deferred, then begun", ["DEFERRED", "LOCKED", "ARMED"], False),
    ],
)
def test_which_runs_are_clean(story: str, states: list[str | None], clean: bool) -> None:
    """A run that was REPORTED as ORPHANED is not over; one that was never armed has still no report."""
    entries = [
        Entry(n, 0.0, 0.0, "b", State(state) if state else None, {} if state else {"healed": True})
        for n, state in enumerate(states)
    ]
    assert is_clean(entries) is clean, story


@pytest.mark.parametrize("due_at", [None, 1.0], ids=["SKIPPED", "DEFERRED"])
@pytest.mark.parametrize("moment", ["before its report", "before its record"])
def test_a_refusal_that_is_killed_before_its_report(
    due_at: float | None, moment: str, drilld: daemon.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SKIPPED was in the ledger with its reason, SIGKILL came some ms later: the history said ABORTED for ever."""
    folder = runner.create(drilld.root, Drill("d", "marker"), "d-20261130T090000Z-0000", started_by="schedule",
                           config_path=None, due_at=due_at, node="gpu-17")
    child = os.fork()
    if child == 0:
        run = runner.Run(folder, Drill("d", "marker"), drilld.config, (), started_by="schedule", due_at=due_at)
        monkeypatch.setattr(run.record, "finish" if moment == "before its report" else "enter",
                            lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run.refuse("error_budget: 3 % is left")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    before = record.load(folder)
    assert before is not None
    assert before["verdict"] == "ABORTED"

    for _ in range(2):
        daemon.heal_all(drilld.config, "drilld")

    verdict = "SKIPPED" if due_at is None else "DEFERRED"
    (row,) = history.runs(drilld.root)
    entries = read(folder)
    assert (row["verdict"], row["why"], row["ended"]) == (verdict, "error_budget: 3 % is left", entries[-1].at)
    assert verdict in (folder / "report.md").read_text()
    assert is_clean(entries)


def test_a_refusal_whose_process_still_writes_is_its_own(drilld: daemon.Daemon) -> None:
    """It has some ms to go: two writers of one report would tear it."""
    folder = runner.create(drilld.root, Drill("d", "marker"), "d-20261130T090000Z-0000", started_by="cli",
                           config_path=None)
    with sleeper() as other:
        ledger = Ledger.open(folder)
        ledger.note(runner=msgspec.to_builtins(proc.identify(other.pid)))
        ledger.write(State.SKIPPED, why="a maintenance")
        daemon.heal_all(drilld.config, "drilld")
        assert record.load(folder) is None
    daemon.heal_all(drilld.config, "drilld")
    (row,) = history.runs(drilld.root)
    assert (row["verdict"], row["why"]) == ("SKIPPED", "a maintenance")


@pytest.fixture
def drilld(tmp_path: Path) -> daemon.Daemon:
    """A drilld whose state is in tmp_path; nobody listens where its agent would."""
    config = tmp_path / "tocsin.yaml"
    config.write_text(f"state_dir: {tmp_path}\nsocket: {tmp_path}/agent.sock\n")
    return daemon.Daemon(load_config(config, {}), [], [], None)


def test_drilld_goes_on_trying(drilld: daemon.Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page for a healed orphan never ended: the agent was told what was left, and not that it is gone."""
    told = list[tuple[str, list[Left]]]()
    monkeypatch.setattr(tell, "orphaned", lambda _, run, left: told.append((run, list(left))))
    run = "d-20261129T210000Z-0000"
    file = crashed(drilld.root / "runs", run, stays=True)
    left = [Left(f"file {file}", f"rm {file}")]
    for _ in range(2):
        drilld.sweep()
    assert told == [(run, left)] * 2
    file.unlink()
    drilld.sweep()
    found = record.load(drilld.root / "runs" / run)
    assert told[2:] == [(run, [])]
    assert found is not None
    assert (found["verdict"], found["left"]) == ("ORPHANED", [])
    assert lock.unsettled(drilld.root) == []


def test_the_sweep_lets_a_live_run_be(drilld: daemon.Daemon, tmp_path: Path) -> None:
    """drilld was restarted, and killed the run that somebody had started by hand."""
    held = lock.take(drilld.root, "other")
    file = crashed(drilld.root / "runs", "d-20261129T210000Z-0000")
    drilld.sweep(at_start=True)
    assert file.exists()
    held.release()
    drilld.sweep()
    assert not file.exists()


def test_a_second_drilld_leaves_the_first_one_alone(drilld: daemon.Daemon) -> None:
    """A second one was started by hand, and removed the socket of the first."""
    first = daemon.only_one(drilld.root)
    socket = daemon.socket_of(drilld.config)
    socket.touch()
    with pytest.raises(OSError, match="another drilld runs"):
        drilld.serve_for_ever()
    assert socket.exists()
    os.close(first)
    os.close(daemon.only_one(drilld.root))


def test_what_is_no_json_is_said_so(drilld: daemon.Daemon) -> None:
    """Half a line arrived on drilld's socket, and its thread broke off without an answer."""
    need("root")
    server = daemon.serve(drilld)
    try:
        for body, status in (("{", 400), ("[]", 400), ('{"name": "a"}', 404)):
            asked = client._UnixConnection(daemon.socket_of(drilld.config))
            asked.request("POST", "/run", body)
            assert asked.getresponse().status == status
            asked.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_runner_that_breaks_off_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own exit status after an exception is 1, which is FAIL's: drilld did not heal, and a person waited."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(runner, "execute", fails)
    assert runner.main([str(tmp_path)]) not in runner.EXIT.values()


# --- without a ledger -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("may_trace")
def test_a_run_whose_folder_was_moved_away(tmp_path: Path, finished: Finished) -> None:
    """Somebody tidied /var/lib during a drill: no ledger told of the holder, and the engine hung until its deadline."""
    run, other = "d-20261129T210000Z-0001", "d-20261129T210000Z-0002"
    with engine(tmp_path / "a") as moved, engine(tmp_path / "b") as kept:
        held = []
        for one, name, root in ((moved, run, tmp_path / "runs"), (kept, other, tmp_path / "elsewhere" / "runs")):
            drill = Drill("d", "engine-hang", target={"pid": one.page.pid, "part": "all"})
            plan = FAULTS["engine-hang"].plan(drill, name)
            folder, ledger = new_run(root, plan)
            held.append(arm(folder, ledger, plan))
            ledger.write(State.INJECTING)
            held[-1].inject(10.0)
        assert not moved.runs_on()
        (tmp_path / "runs" / run).rename(tmp_path / "tidied")

        assert healed(tmp_path / "runs", finished) == []

        assert held[0].wait_gone(30.0)
        assert moved.runs_on()
        assert held[1].alive  # the run of another state_dir, whose folder is there
        assert not kept.runs_on()
        assert held[1].revert(10.0) == []


@pytest.mark.heavy
def test_a_table_that_nobody_holds(tmp_path: Path, finished: Finished) -> None:
    """A kernel without owned tables leaves it; no run's ledger is there, and the name says whose it is."""
    need(*NEEDS)
    with lab() as net:
        netns = net.namespace("engine")
        netns.run("nft", "add", "table", "inet", "tocsin_d_20261129T210000Z_0003")
        netns.run("nft", "add", "table", "inet", "theirs")

        assert healed(tmp_path / "runs", finished) == []

        assert netns.run("nft", "list", "tables").split() == ["table", "inet", "theirs"]
