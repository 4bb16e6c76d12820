"""The holder: its fault ends with it, and it ends with the runner, at its timer, or by whatever kills it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills import proc
from drills.faults.table import FAULTS
from drills.holder import Holder, HolderError, start
from drills.ledger import Ledger
from drills.model import Drill, Left, Plan
from tests.drills.stand_ins import HOLDER, MARKER, arm, new_run, wait_for


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAULTS, "marker", MARKER)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What the fault leaves in the world while it acts."""
    return tmp_path / "fault"


@pytest.fixture
def started() -> Iterator[list[Holder]]:
    """Holders to be ended whatever the test did to them."""
    holders: list[Holder] = []
    yield holders
    for one in holders:
        with contextlib.suppress(ProcessLookupError):
            proc.end(one.process_id, 5.0)
        assert one.wait_gone(5.0)


def armed(
    tmp_path: Path, started: list[Holder], deadline_s: float = 20.0, **params: object
) -> tuple[Holder, Plan, Path]:
    """A holder that waits for `inject`."""
    drill = Drill("d", "marker", params={"file": str(tmp_path / "fault"), **params})
    plan = MARKER.plan(drill, "d-20261129T210000Z-ab12")
    folder, ledger = new_run(tmp_path / "runs", plan)
    started.append(arm(folder, ledger, plan, deadline_s, HOLDER))
    ledger.close()
    return started[0], plan, folder


def test_a_run_in_good_order(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The usual case: in, watched, out, and the process is gone."""
    held, _, _ = armed(tmp_path, started)
    before = time.time()
    assert before <= held.inject(5.0) <= time.time()
    assert file.exists()
    wait_for(lambda: len(held.samples) >= 2)
    assert [one["error"] for one in held.samples[:2]] == ["the counter is gone"] * 2
    assert held.samples[1]["at"] - held.samples[0]["at"] == pytest.approx(1.0, abs=0.3)
    assert held.revert(5.0) == []
    assert not file.exists()
    assert not held.alive
    assert [one["event"] for one in held.events() if one["event"] != "sample"] == ["up", "injected", "undone"]


def test_it_ends_at_a_word_of_the_signal_handler(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The agent hung, the runner waited for it, and the abort with it: the fault was in for 12 s more."""
    held, _, _ = armed(tmp_path, started)
    held.inject(5.0)
    held.revert_now()
    wait_for(lambda: not file.exists())
    assert held.revert(5.0) == []
    held.revert_now()


def test_it_ends_with_its_runner(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The runner was killed by the OOM killer in the middle of the fault; the pipe's end was all that it left."""
    held, _, _ = armed(tmp_path, started)
    held.inject(5.0)
    assert held.wait_gone(1.0)
    assert not file.exists()


def test_it_outlives_a_polite_end(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """A unit is stopped: systemd signals all of it at once, and the holder must be there to undo."""
    held, _, _ = armed(tmp_path, started)
    held.inject(5.0)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(held.process_id.pid, sig)
    assert os.getsid(held.process_id.pid) == held.process_id.pid
    wait_for(lambda: len(held.samples) >= 2)
    assert held.alive
    assert held.revert(5.0) == []
    assert not file.exists()


def boot_s() -> float:
    """Seconds since the boot, as the lease counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_fleet_s_lease_ends(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The runner was stopped (SIGSTOP) past its lease, another node's drill began, and this fault was still in."""
    held, _, _ = armed(tmp_path, started, 60.0)
    held.lease(boot_s() + 60.0)
    held.inject(5.0)
    held.lease(boot_s() + 1.5)  # and from here on the runner says nothing
    wait_for(lambda: not file.exists())
    wait_for(lambda: not held.alive)
    assert held.events()[-1]["event"] == "undone"


def test_a_lease_that_is_renewed(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """Renewed in time, it goes on."""
    held, _, _ = armed(tmp_path, started, 60.0)
    held.lease(boot_s() + 1.5)
    held.inject(5.0)
    held.lease(boot_s() + 60.0)
    wait_for(lambda: len(held.samples) >= 3)
    assert file.exists()
    assert held.revert(5.0) == []


def test_nothing_is_put_in_without_a_good_lease(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The host slept between the last renewal and the injection."""
    held, _, _ = armed(tmp_path, started)
    held.lease(boot_s() - 1.0)
    with pytest.raises(HolderError):
        held.inject(5.0)
    assert not file.exists()


def test_time_is_up(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The runner hangs in a call that never returns: the fault must not last for ever."""
    held, _, _ = armed(tmp_path, started, 1.0)
    held.inject(5.0)
    wait_for(lambda: not held.alive, 2.0)
    assert not file.exists()
    assert held.events()[-1]["event"] == "undone"


def test_the_kernel_ends_it_at_the_deadline(tmp_path: Path, started: list[Holder]) -> None:
    """The injection itself never returns; then nobody reads a clock, and only the timer is left."""
    held, _, _ = armed(tmp_path, started, 1.5, bad="hangs")
    with pytest.raises(HolderError, match=r"the holder ended \(-14\)"):
        held.inject(5.0)


def test_a_stuck_injection_ends_with_the_runner(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """The runner died while the injection hung: nobody reads the pipe then, and the fault would come late."""
    held, _, _ = armed(tmp_path, started, bad="hangs")
    with pytest.raises(HolderError, match="gave no answer"):
        held.inject(0.3)
    wait_for(file.with_suffix(".hangs").exists)
    assert held.wait_gone(1.5)
    assert not file.exists()


def test_gone_means_the_injector_too(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """3 of 150 kills injected after the undo: a child of the dead injector had gone on with its work."""
    held, _, _ = armed(tmp_path, started, bad="child")
    with pytest.raises(HolderError):
        held.inject(0.2)
    wait_for(file.with_suffix(".child").exists)
    os.kill(held.process_id.pid, signal.SIGKILL)
    wait_for(lambda: not held.alive)
    assert not file.exists()
    assert held.revert(5.0) == []
    assert not file.exists()
    child = int(file.with_suffix(".child").read_text())
    wait_for(lambda: child not in proc.processes(), 0.2)


def test_a_failed_injection_is_undone(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """Half of the rules were in when the third was refused; half of a fault is a fault."""
    held, _, _ = armed(tmp_path, started, bad="fails")
    with pytest.raises(HolderError, match="half-way"):
        held.inject(5.0)
    assert not file.exists()
    assert held.revert(5.0) == []


def test_what_is_left_is_told(tmp_path: Path, file: Path, started: list[Holder]) -> None:
    """Undo did nothing and said nothing: the run must read ORPHANED, with the command that ends it."""
    held, _, _ = armed(tmp_path, started, stays=True)
    held.inject(5.0)
    assert held.revert(5.0) == [Left(f"file {file}", f"rm {file}")]


def test_no_plan_no_fault(tmp_path: Path, started: list[Holder]) -> None:
    """The ledger could not be written, and the runner went on: what is not on disk is not done."""
    folder = tmp_path / "run"
    Ledger.create(folder, {}).close()
    started.append(start(folder, 20.0, HOLDER))
    with pytest.raises(HolderError, match="holds no plan: nothing was touched"):
        started[0].inject(10.0)
    assert started[0].revert(5.0) == []


def test_a_holder_that_cannot_start_touches_nothing(tmp_path: Path, started: list[Holder]) -> None:
    """The folder of the run was removed under it."""
    started.append(start(tmp_path / "gone", 20.0))
    with pytest.raises(HolderError, match="did not come up"):
        started[0].wait_up(10.0)
    assert started[0].revert(5.0) == []
