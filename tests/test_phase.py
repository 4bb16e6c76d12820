"""A fleet that is started in one moment: when each node polls and resends, counted by second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent.loop import Agent, Collector
from agent.model import AlertMessage, Source
from agent.node import Node, Setup
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.heartbeat import Heartbeat
from agent.phase import first_two, next_at, phase_of
from agent.store import Store
from rules import severity_of
from tests.scenes import SLO, T0

FLEETS: Sequence[Callable[[int], str]] = (
    "gpu-{}".format, "gpu-{:04}.eu-west-1.example.com".format, lambda n: f"rack{n // 16:02}-node{n % 16:02}")


@pytest.mark.parametrize("name", FLEETS, ids=["numbered", "long", "racks"])
@pytest.mark.parametrize("every_s", [5, 60])
def test_no_second_has_more_than_twice_its_share(name: Callable[[int], str], every_s: int) -> None:
    """1,000 names by the second of a poll (200 a second in the mean) and of a resend (16.7)."""
    seconds = Counter(int(phase_of(name(n), every_s)) for n in range(1000))
    assert sum(seconds.values()) == 1000
    assert set(seconds) == set(range(every_s))
    assert max(seconds.values()) <= 2 * 1000 / every_s


@pytest.mark.parametrize("name", FLEETS, ids=["numbered", "long", "racks"])
@pytest.mark.parametrize("every_s", [15, 30, 60])
def test_a_fleet_started_at_once_asks_no_shared_address_at_once(name: Callable[[int], str], every_s: int) -> None:
    """1,000 agents, one Prometheus: within 5 s each has asked (200 a second in the mean), then in its own second."""
    starts = [first_two(phase_of(name(n), every_s), every_s) for n in range(1000)]
    firsts = Counter(int(first) for first, _ in starts)
    assert set(firsts) == set(range(5))
    assert max(firsts.values()) <= 2 * 200
    later = Counter(int(second % every_s) for _, second in starts)
    assert max(later.values()) <= 2 * 1000 / every_s
    assert all(every_s / 2 <= second - first <= 2 * every_s for first, second in starts)


def test_the_first_two_times_by_hand() -> None:
    """A quarter into a minute: after 1.25 s, and after a whole minute more; nine tenths: after 4.5 s, and after 54."""
    assert first_two(15.0, 60.0) == (1.25, 75.0)
    assert first_two(54.0, 60.0) == (4.5, 54.0)
    assert first_two(0.0, 15.0) == (0.0, 15.0)
    assert first_two(1.0, 2.0) == (1.0, 3.0)  # a period of less than 5 s is its own


def test_heartbeats_of_a_fleet_are_spread_after_the_first() -> None:
    """All were started at once; a node that is started anew beats at once, and then at the same second as before."""
    beats = Counter[int]()
    for n in range(1000):
        heart = Heartbeat("heartbeat", lambda: "", 60.0, lambda: True, phase_of(f"gpu-{n}", 60.0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agent.notifiers.heartbeat.request", lambda *_: None)
            beats[int(heart.pulse(T0, ()) % 60)] += 1
    assert sum(beats.values()) == 1000
    assert max(beats.values()) <= 2 * 1000 / 60
    again = Heartbeat("heartbeat", lambda: "", 60.0, lambda: True, phase_of("gpu-17", 60.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent.notifiers.heartbeat.request", lambda *_: None)
        assert again.pulse(T0 + 7.0, ()) % 60 == pytest.approx(60 * 0x197545B3CFE4 / 2**48)


def test_a_name_keeps_its_phase() -> None:
    """Through restarts and releases: blake2b of "gpu-17" as b2sum -l 48 has it, 197545b3cfe4."""
    assert phase_of("gpu-17", 5.0) == pytest.approx(5 * 0x197545B3CFE4 / 2**48)
    assert 0.0 <= phase_of("a\udcff", 60.0) < 60.0  # a host's name need not be UTF-8


@pytest.mark.parametrize(("now", "then"), [(120.0, 137.0), (136.9, 137.0), (137.0, 197.0), (137.1, 197.0)])
def test_the_next_time_is_later_by_at_most_a_period(now: float, then: float) -> None:
    """17 s into each minute, counted from 0."""
    assert next_at(now, 60.0, 17.0) == pytest.approx(then)


@pytest.mark.parametrize("first_tick_s", [0.0, 4.9])
def test_the_first_tick_is_at_once_and_the_second_at_the_nodes_phase(
        tmp_path: Path, first_tick_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of 5 s; a first tick that runs over the phase is followed by the next due one."""
    mono, ticks = [500.0], list[float]()
    agent = Agent(Node(Setup("gpu-17", 5.0, SLO, (), (), severity_of)), Collector(list[Source]()),
                  Store(tmp_path / "tocsin.db"), clock=lambda: T0, monotonic=lambda: mono[0])

    def tick(names: object = None) -> None:
        del names
        ticks.append(mono[0])
        mono[0] += first_tick_s if len(ticks) == 1 else 0.1
        if len(ticks) == 3:
            agent.stop()

    def wait_until(due: float, alive: object) -> None:
        del alive
        mono[0] = due

    monkeypatch.setattr(agent, "tick", tick)
    monkeypatch.setattr(agent, "_wait_until", wait_until)
    agent.run(lambda: None)
    agent.store.close()
    phase_s = 5 * 0x197545B3CFE4 / 2**48  # 0.50 s
    late_s = 5.0 if first_tick_s > phase_s else 0.0
    assert ticks == pytest.approx([500.0, 500.0 + phase_s + late_s, 505.0 + phase_s + late_s])


def test_a_resend_is_at_the_same_second_of_each_minute_whenever_the_agent_was_started() -> None:
    """Also of one that is killed every 20 s: else Alertmanager would end what fires after 5 minutes."""
    def nothing() -> list[AlertMessage]:
        return []

    starts = [T0 + 20.0 * n for n in range(6)]
    firsts = [Alertmanager("alertmanager", [], nothing, 60.0, 0.0, phase_of("gpu-17", 60.0)).pulse(at, ())
              for at in starts]
    assert {round(at % 60, 3) for at in firsts} == {round(60 * 0x197545B3CFE4 / 2**48, 3)}
    assert all(0 < first - start <= 60 for first, start in zip(firsts, starts, strict=True))
    channel = Alertmanager("alertmanager", [], nothing, 60.0, 0.0, phase_of("gpu-17", 60.0))
    first = channel.pulse(T0, ())
    assert channel.pulse(first - 0.1, ()) == first
