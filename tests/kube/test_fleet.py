"""Fifty nodes, one monthly drill, twelve months: real processes against the API, on a simulated calendar."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from drills import cron, lease
from drills.cluster import Cluster
from tests.drills.stand_ins import ROOT, wait_for
from tests.kube.fleet_agent import SCHEDULE
from tests.kube.scene import Api

DAY_S = 86_400.0
BEGIN = datetime(2026, 12, 5, tzinfo=UTC).timestamp()
LEASE_S = 4.0  # where nodes die: so long the others wait
WITHIN_S = 120.0  # for whatever only takes long when it is broken


class Agent:
    """One node's process; a life may end, and another one begin."""

    def __init__(self, name: str, folder: Path, lease_s: float, drills: Sequence[str]) -> None:
        self.name, self.folder, self.lease_s, self.drills = name, folder, lease_s, drills
        self.owes = False
        self.busy = False
        self._start()

    def _start(self) -> None:
        words = [self.name, str(self.folder / self.name), str(self.folder / "world"), str(self.folder / "log"),
                 str(self.lease_s), *self.drills]
        with (self.folder / f"{self.name}.err").open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kube.fleet_agent", *words], cwd=ROOT, stderr=err, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)  # fmt: skip
        self.busy = True  # until it says `up`
        self.ear = threading.Thread(target=self._hear, args=(self.process,), daemon=True)
        self.ear.start()

    def tell(self, now: float) -> None:
        """It is so late."""
        assert self.process.stdin is not None
        self.busy = True
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"now {now}\n")

    def _hear(self, process: subprocess.Popen[str]) -> None:
        """What one life says, beside what it logs."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("looked"):
                self.owes = line.split()[1] != "0"
            if line.startswith(("looked", "up")):
                self.busy = False

    def kill(self, everything: bool) -> None:
        """SIGKILL: of the runner alone (its holder sees that), or of the node with all that runs on it."""
        if everything:
            for pid in self.children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.close()

    def children(self) -> list[int]:
        """Its holder, if one runs."""
        file = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def stop(self, everything: bool, sig: int = signal.SIGSTOP) -> None:
        """Stop it (or go on): the runner alone, or a frozen node."""
        for pid in [*(self.children() if everything else ()), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, sig)

    def again(self) -> None:
        """The node is back."""
        self._start()

    def close(self) -> None:
        """End it for good."""
        self.process.kill()
        self.process.wait()
        self.ear.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class World:
    """What is in at any instant: a thread looks, all the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most, self.seen = 0, set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            names = set(os.listdir(self.folder))  # noqa: PTH208  (as fast as can be)
            self.most, self.seen = max(self.most, len(names)), self.seen | names

    def __enter__(self) -> World:
        self.folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def fleet(api: Api, folder: Path, size: int, lease_s: float, drills: Sequence[str]) -> Iterator[dict[str, Agent]]:
    """So many nodes, opted in and Ready, and two that are not."""
    agents = {}
    try:
        for number in range(size):
            name = api.node(f"{api.namespace}-n{number}")
            agents[name] = Agent(name, folder, lease_s, drills)
        for name in (api.node(f"{api.namespace}-out", opted_in=False), api.node(f"{api.namespace}-sick", ready=False)):
            agents[name] = Agent(name, folder, lease_s, drills)
        yield agents
    finally:
        for agent in agents.values():
            agent.close()


def settle(agents: dict[str, Agent]) -> None:
    """Wait until all have answered."""
    wait_for(lambda: not any(agent.busy for agent in agents.values()), WITHIN_S)


def a_day(agents: dict[str, Agent], now: float) -> None:
    """All look at their timetables."""
    for agent in agents.values():
        agent.tell(now)


def dues(months: int) -> list[float]:
    """The first Tuesday of each month."""
    found, at = [], BEGIN
    for _ in range(months):
        at = cron.next_due(SCHEDULE.cron, "UTC", at) or 0.0
        found.append(at)
    return found


def runs_of(folder: Path) -> list[list[str]]:
    """due, node, drill of each, in order."""
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def begin(agents: dict[str, Agent]) -> None:
    """All have seen the drill, long before it is due."""
    settle(agents)
    a_day(agents, BEGIN)
    settle(agents)


@pytest.mark.heavy
def test_a_monthly_schedule_fires_once_in_a_fleet_of_fifty(api: Api, tmp_path: Path) -> None:
    """Fifty nodes had one configuration, and each first Tuesday fifty drills were due at the same minute."""
    with fleet(api, tmp_path, 50, 30.0, ["kill"]) as agents, World(tmp_path / "world") as world:
        begin(agents)
        for due_at in dues(12):
            for day in range(5):
                a_day(agents, due_at + day * DAY_S + 1.0)
                settle(agents)
                able = [agent for name, agent in agents.items() if not name.endswith(("out", "sick"))]
                if not any(agent.owes for agent in able):
                    break
            else:
                raise AssertionError("some node still owes this month's drill after 5 days")
        assert not any(agent.owes for agent in agents.values())  # nor those that may not run it
    ran = runs_of(tmp_path)
    assert [float(due) for due, _, _ in ran] == dues(12)
    assert not {node for _, node, _ in ran} & {f"{api.namespace}-out", f"{api.namespace}-sick"}
    assert len({node for _, node, _ in ran}) >= 8  # 12 of 50 at random: fewer than 8 once in 100,000 times
    assert (world.most, len(world.seen)) == (1, 12)
    assert os.listdir(tmp_path / "world") == []  # noqa: PTH208


@pytest.mark.heavy
def test_never_two_at_once_whatever_dies_or_stops(api: Api, tmp_path: Path) -> None:
    """Runners and whole nodes killed, stopped past their lease and let go on, while others want to drill as well."""
    chance = random.Random(20261129)
    both = ["kill", "hang"]
    with fleet(api, tmp_path, 12, LEASE_S, both) as agents, World(tmp_path / "world") as world, Cluster() as own:
        begin(agents)
        able = [agent for name, agent in agents.items() if not name.endswith(("out", "sick"))]
        for number, due_at in enumerate(dues(8)):
            a_day(agents, due_at + 1.0)
            wait_for(lambda: holder_of(own) in agents, WITHIN_S)
            time.sleep(chance.uniform(0.0, 1.8))
            victim = agents.get(holder_of(own))
            if victim is not None:
                harm(victim, number, chance)
            for day in range(1, 19):
                settle(agents)
                if not any(agent.owes for agent in able):
                    break
                a_day(agents, due_at + day * DAY_S + 1.0)
            else:
                raise AssertionError("some node still owes this month's drill after 18 days")
    ran = [(float(due), drill) for due, _, drill in runs_of(tmp_path)]
    wanted = {(due, drill) for due in dues(8) for drill in both}
    assert len(set(ran)) == len(ran)  # never twice for one time
    # One that is killed between its mark in the lease and its line in the log is held, and in no log.
    assert set(ran) <= wanted
    assert len(ran) >= len(wanted) - 2
    assert world.most == 1
    assert os.listdir(tmp_path / "world") == []  # noqa: PTH208


def holder_of(own: Cluster) -> str:
    """The node that has the lease; "" for nobody."""
    found = own.lease(own.namespace, lease.NAME)
    return "" if found is None else lease.said_of(found).node


def harm(victim: Agent, number: int, chance: random.Random) -> None:
    """Kill or stop it, the runner alone or the whole node; it comes back later."""
    everything = number % 2 == 1
    if number % 4 < 2:
        victim.kill(everything)
        time.sleep(chance.uniform(0.0, 1.5 * LEASE_S))
        victim.again()
        return
    victim.stop(everything)
    time.sleep(LEASE_S + chance.uniform(0.5, 3.0))
    victim.stop(everything, signal.SIGCONT)
