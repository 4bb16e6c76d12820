"""drilld in a fleet: what it leaves to others, what it gives back, and for whom it pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import Config
from drills import lease, lock, tell
from drills.cluster import MERGE, path_of
from drills.daemon import Daemon
from drills.lease import Fleet, Pace
from drills.ledger import Ledger
from drills.model import Drill, Left, Refused, State, Verdict
from tests.kube.scene import Api

PACE = Pace(look_s=1.0)
DUE = 1_796_000_000.0
KILL = Drill("kill", "pod-kill")


def drilld(tmp_path: Path, node: str) -> Daemon:
    """A daemon that starts nothing by itself."""
    return Daemon(Config(node=node, state_dir=tmp_path / node, socket=tmp_path / "sock"), [KILL], [], None)


def hold(node: str, *, verdict: Verdict | None = None, pace: Pace = PACE) -> None:
    """A node's run, to its end (with a verdict), or cut off."""
    held = Fleet(node, pace=pace).take("run-1", "kill", None)
    held.bind("kill", DUE, ["GPU-7"])
    if verdict is None:
        held.end()
    else:
        held.release("kill", verdict)


def now(api: Api) -> lease.Said:
    """What the Lease says."""
    found = api.cluster.lease(api.namespace, lease.NAME)
    assert found is not None
    return lease.said_of(found)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """So much later on the lease's clock, which stands still otherwise."""
    now_s = [1000.0]

    def move(span_s: float) -> None:
        now_s[0] += span_s

    monkeypatch.setattr(lease, "boot_s", lambda: now_s[0])
    return move


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the agent was told of orphans: run and text."""
    said: list[tuple[str, str]] = []

    def orphaned(socket: Path, run: str, left: Sequence[Left]) -> bool:
        said.append((run, "; ".join(one.what for one in left)))
        return True

    monkeypatch.setattr(tell, "orphaned", orphaned)
    return said


def test_what_another_node_has_held(api: Api, tmp_path: Path) -> None:
    """It was due here, too: no run of its own, the other's verdict, and no ticket that it did not run."""
    hold("n1", verdict=Verdict.FAIL)
    daemon = drilld(tmp_path, "n2")
    assert daemon.run_due(KILL, "kill-1", DUE) == (Verdict.FAIL, "node n1 held it: run run-1, FAIL")
    assert not (tmp_path / "n2" / "drills" / "runs").exists()


def test_a_silent_api_defers(api: Api, tmp_path: Path) -> None:
    """Nobody knows whether another node drills: tried again tomorrow."""
    if api.stand_in is None:
        pytest.skip("a real server answers")
    api.stand_in.fail_next(503, "ServiceUnavailable", "etcd is down", of="GET /apis/coordination")
    verdict, why = drilld(tmp_path, "n2").run_due(KILL, "kill-1", DUE)
    assert verdict is Verdict.DEFERRED
    assert "etcd is down" in why
    api.stand_in.fail_next(503, "ServiceUnavailable", "etcd is down", of="GET /apis/coordination")
    drilld(tmp_path, "n2").sweep()  # and is no end of drilld


def test_a_healed_node_gives_back(api: Api, tmp_path: Path, later: Callable[[float], None]) -> None:
    """The node came back: not before its ledger is clean, then at once."""
    daemon = drilld(tmp_path, "n1")
    hold("n1")
    folder = daemon.root / "runs" / "run-1"
    ledger = Ledger.create(folder, {"drill": "kill"})
    ledger.write(State.ARMED)
    daemon.tidy_lease()
    later(PACE.lease_s)
    daemon.tidy_lease()
    assert (now(api).node, now(api).run) == ("n1", "run-1")
    ledger.write(State.REVERTED)
    ledger.close()
    running = lock.take(daemon.root, "by-hand")
    daemon.tidy_lease()
    assert now(api).node == "n1"  # a run by hand goes on: the lease may be its own
    running.release()
    daemon.tidy_lease()
    assert (now(api).node, now(api).targets, now(api).marks["kill"].verdict) == ("", "", "ABORTED")
    assert daemon.run_due(KILL, "kill-1", DUE)[0] is Verdict.ABORTED


def test_the_finder_pages_for_a_dead_node(
    api: Api, tmp_path: Path, told: list[tuple[str, str]], later: Callable[[float], None]
) -> None:
    """The node that is away cannot page. One of the others does, until it is back and has given back."""
    dead, finder = api.node(), drilld(tmp_path, "n2")
    hold(dead)
    finder.tidy_lease()
    assert told == []  # nobody has found it yet
    with pytest.raises(Refused, match="is ORPHANED"):
        Fleet("n2", pace=PACE, sleep=later).take("run-2", "kill", None)
    finder.tidy_lease()
    drilld(tmp_path, "n3").tidy_lease()
    assert [run for run, _ in told] == ["run-1"]
    assert f"run run-1 of node {dead} is ORPHANED (GPU-7): its node undoes it when it is back" in told[0][1]
    back = Fleet(dead, pace=PACE)
    back.tidy(lambda: True)
    later(PACE.lease_s)
    back.tidy(lambda: True)
    finder.tidy_lease()
    finder.tidy_lease()
    assert told[1:] == [("run-1", "")]


def test_an_orphan_is_paged_for_before_the_next_drill(
    api: Api, tmp_path: Path, told: list[tuple[str, str]], later: Callable[[float], None]
) -> None:
    """For all other nodes it was held elsewhere, none asked for the lease, and the fault was found a month later."""
    dead, first, second = api.node(), drilld(tmp_path, "n2"), drilld(tmp_path, "n3")
    hold(dead)
    for daemon in (first, second):
        assert daemon.run_due(KILL, "kill-1", DUE)[0] is Verdict.DEFERRED
        daemon.tidy_lease()
    later(2.9 * PACE.lease_s)  # its own node may be healing it
    first.tidy_lease()
    assert told == []
    later(0.2 * PACE.lease_s)
    for daemon in (first, second, first):
        daemon.tidy_lease()
    assert now(api).reporter == "n2"
    assert {run for run, _ in told} == {"run-1"}
    assert f"run run-1 of node {dead} is ORPHANED (GPU-7)" in told[0][1]
    # Its node never comes back, and a person has looked: as the page says, word for word.
    words = told[0][1].partition("`kubectl annotate lease -n ")[2].partition("`")[0].split()
    assert words[:2] == [api.namespace, lease.NAME]
    change = {"metadata": {"annotations": {word.removesuffix("-"): None for word in words[2:]}}}
    path = path_of("coordination.k8s.io", "v1", "leases", api.namespace, lease.NAME)
    api.cluster.ask("PATCH", path, body=change, headers=MERGE)
    first.tidy_lease()
    assert told[-1] == ("run-1", "")


def test_a_run_that_goes_on_is_no_orphan(api: Api, tmp_path: Path, later: Callable[[float], None]) -> None:
    """It renews; and one whose node is gone from the cluster has nothing left to undo."""
    here, held = drilld(tmp_path, "n2"), Fleet(api.node(), pace=PACE).take("run-1", "kill", None)
    for number in range(8):
        held.bind("kill", DUE, [f"GPU-{number}"])
        here.tidy_lease()
        later(0.8 * PACE.lease_s)
    assert now(api).reporter == ""
    held.release("kill", Verdict.PASS)
    hold("gone")
    for _ in range(2):
        here.tidy_lease()
        later(4 * PACE.lease_s)
    assert (now(api).node, now(api).reporter) == ("gone", "")


def test_on_a_host_without_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks nobody."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    daemon = drilld(tmp_path, "n1")
    daemon.tidy_lease()
    assert daemon.is_over()
    started: list[Any] = []
    monkeypatch.setattr(daemon, "start_run", lambda *_, **more: started.append(more))
    daemon.run_due(replace(KILL, name="other"), "other-1", time.time())
    assert len(started) == 1
