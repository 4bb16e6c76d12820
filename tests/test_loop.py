"""Source threads, the tick, and what the agent tells of itself: real threads, a real store, the time as an argument."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agent import client, postmortem
from agent.daemon import DATABASE
from agent.loop import LAYOUTS_EVERY_S, Agent, Collector, doctor_report
from agent.model import Batch, EngineFacts, Event, Found, Gap, GpuFacts, Sample, Severity, Why
from agent.node import Node, Setup
from agent.notifiers import Channel, Route, Wanted
from agent.notifiers.pagerduty import PagerDuty
from agent.notifiers.webhook import Webhook
from agent.outbox import Outbox
from agent.show import check_report
from agent.signals import CATALOGUE, Target
from agent.store import Store, StoreError
from agent.trend import TRACK
from agent.web.app import PRIVATE, make_app
from agent.web.server import serve_unix
from rules import severity_of
from tests.agent_process import AgentProcess
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.needs import need
from tests.receiver import Receiver, wait_until
from tests.scenes import SLO, T0, built_in, samples

POLL_S = 5.0
GRACE_S = 5.0  # longer than anything takes that is not meant to hang


class Scripted:
    """A source that does what `play` says at each read; `hold` makes it hang."""

    def __init__(self, name: str, play: Callable[[float], Batch]) -> None:
        self.name = name
        self.play = play
        self.reads = 0
        self.free = threading.Event()
        self.free.set()
        self.began = threading.Semaphore(0)

    def hold(self) -> None:
        """Hang from the next read on, until `free` is set."""
        self.free.clear()

    def read(self, now: float) -> Batch:
        """As agent.model.Source has it."""
        self.reads += 1
        self.began.release()
        self.free.wait(30)
        return self.play(now)

    def close(self) -> None:
        """End what hangs."""
        self.free.set()


def nothing(name: str) -> Callable[[float], Batch]:
    """A read that tells nothing."""
    return lambda now: Batch(name, now, 0.01)


def engine(numbers: Mapping[str, float | None], target: str = "llama") -> Callable[[float], Batch]:
    """A read of an engine that tells these numbers."""
    return lambda now: Batch(f"engine:{target}", now, 0.01, tuple(samples(target, now, numbers)),
                             EngineFacts(target, (target,)))


def hot(now: float, uuid: str = "GPU-8f6a", temp_c: float = 91.0) -> Batch:
    """A read of NVML with one hot GPU."""
    return Batch("nvml", now, 0.01, tuple(samples(uuid, now, {"gpu_temp_c": temp_c})),
                 gpus=(GpuFacts(uuid, 0, "H200", "0000:1b:00"),))


class Clocks:
    """Unix and monotonic time, moved by hand."""

    def __init__(self) -> None:
        self.unix, self.mono = T0, 500.0

    def go(self, seconds: float) -> None:
        """Both go on."""
        self.unix += seconds
        self.mono += seconds


class Life:
    """An agent with a store on disk that can be killed and started again, tick by tick."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clocks = Clocks()
        self.sources: list[Scripted] = []
        self.rules: Sequence[str] = ()
        self.targets: tuple[Target, ...] = (Target("llama", (), SLO, gpus=(0,)),)
        self.agent: Agent | None = None

    def start(self, *sources: Scripted, channels: Sequence[Channel] = ()) -> Agent:
        """A new process, as far as anyone can tell: only the file is the same."""
        self.kill()
        self.sources = list(sources)
        known = built_in()
        rules = tuple(known[r] for r in self.rules) or tuple(known.values())
        node = Node(Setup("gpu-17", POLL_S, SLO, self.targets, rules, severity_of))
        store = Store(self.folder / DATABASE)
        self.agent = Agent(node, Collector(sources, lambda: self.clocks.unix, lambda: self.clocks.mono), store,
                           clock=lambda: self.clocks.unix, monotonic=lambda: self.clocks.mono)
        self.agent.restore()
        told = frozenset[Severity](("page", "ticket"))
        self.agent.routes = [Route(channel, Wanted(channel.name, told)) for channel in channels]
        self.agent.outbox = Outbox(store, channels, lambda: self.clocks.unix, lambda low, _: low)
        return self.agent

    def tick(self, n: int = 1) -> None:
        """So many polls."""
        assert self.agent is not None
        for _ in range(n):
            self.clocks.go(POLL_S)
            self.agent.tick()

    def kill(self) -> None:
        """As kill -9: nothing is written that was not written before."""
        if self.agent is not None:
            self.agent.collector.stop()
            store, self.agent = self.agent.store, None
            store._unsaved.clear()
            store.close()

    def fired(self) -> list[tuple[str, str]]:
        """(rule, subject) of every alert that ever fired."""
        assert self.agent is not None
        return [(t["rule"], t["subject"]) for t in self.agent.transitions(-1) if t["state"] == "firing"]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """An agent's life, ended with the test."""
    one = Life(tmp_path)
    yield one
    one.kill()


@pytest.fixture
def collector() -> Iterator[Callable[..., Collector]]:
    """Makes collectors that are stopped with the test."""
    made: list[Collector] = []

    def make(*sources: Scripted, **clocks: Any) -> Collector:
        made.append(Collector(sources, **clocks))
        return made[-1]

    yield make
    for one in made:
        one.stop()


# --- the source threads -----------------------------------------------------------------------------------------------


def test_a_source_that_hangs_delays_the_others_by_the_grace_alone(collector: Callable[..., Collector]) -> None:
    """Its neighbour's numbers are there after 0.2 s, round after round."""
    good, stuck = Scripted("good", nothing("good")), Scripted("stuck", nothing("stuck"))
    stuck.hold()
    both = collector(good, stuck)

    began = time.monotonic()
    rounds = [[batch.source for batch in both.gather(0.2)] for _ in range(3)]

    assert rounds == [["good"]] * 3
    assert time.monotonic() - began < 20


def test_a_source_that_hangs_is_never_started_a_second_time(collector: Callable[..., Collector]) -> None:
    """A hundred reads stacked on a dead driver would be a hundred threads; the late one is taken when it comes."""
    stuck = Scripted("stuck", nothing("stuck"))
    stuck.hold()
    one = collector(stuck)
    for _ in range(5):
        assert one.gather(0.02) == []
    assert stuck.reads == 1

    stuck.free.set()
    wait_until(lambda: one.slots["stuck"].fresh is not None, 30, "the late answer")
    late = one.gather(GRACE_S)

    assert [batch.source for batch in late] == ["stuck", "stuck"]  # the late one, and one of now
    assert stuck.reads == 2
    assert late[0].at <= late[1].at


def test_a_source_that_is_always_a_little_late_keeps_its_rhythm(collector: Callable[..., Collector]) -> None:
    """Slower than the grace and faster than a poll: one read a round, not one in two."""
    slow = Scripted("slow", nothing("slow"))
    one = collector(slow)
    taken = 0
    for _ in range(6):
        slow.hold()
        taken += len(one.gather(0.01))
        slow.free.set()
        wait_until(lambda: one.slots["slow"].fresh is not None, 30, "its answer between two rounds")

    assert (slow.reads, taken) == (6, 5)


def test_a_source_that_raises_is_an_error_and_lives_on(collector: Callable[..., Collector]) -> None:
    """A fault of ours in one source: said with its class, counted, and read again at the next round."""
    answers: list[Callable[[float], Batch]] = [nothing("odd")]

    def play(now: float) -> Batch:
        if answers:
            return answers.pop()(now)
        raise ZeroDivisionError("1/0")

    odd = Scripted("odd", play)
    one = collector(odd)
    rounds = [one.gather(GRACE_S) for _ in range(3)]

    assert [b.error for batches in rounds for b in batches] == [None] + ["ZeroDivisionError: 1/0"] * 2
    assert one.slots["odd"].errors == 2
    thread = one.slots["odd"].thread
    assert thread is not None
    assert thread.is_alive()


def test_how_late_a_source_is_counts_from_when_it_was_asked(collector: Callable[..., Collector]) -> None:
    """0 while it answers; then the time since it was asked in vain."""
    clocks = Clocks()
    source = Scripted("nvml", nothing("nvml"))
    one = collector(source, clock=lambda: clocks.unix, monotonic=lambda: clocks.mono)
    one.gather(GRACE_S)
    assert one.late_s() == {"nvml": 0.0}

    source.hold()
    one.gather(0.01)
    clocks.go(7.5)

    assert one.late_s() == {"nvml": 7.5}


def test_a_stop_does_not_wait_for_a_source_that_hangs(collector: Callable[..., Collector]) -> None:
    """SIGTERM comes while a tick waits: it goes on at once, and the threads that can end do."""
    stuck = Scripted("stuck", nothing("stuck"))
    stuck.hold()
    one = collector(stuck)
    taken: list[Batch] = []
    waiting = threading.Thread(target=lambda: taken.extend(one.gather(30)))
    waiting.start()
    assert stuck.began.acquire(timeout=30)

    one.stop()
    waiting.join(30)

    assert not waiting.is_alive()
    thread = one.slots["stuck"].thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


# --- a restart --------------------------------------------------------------------------------------------------------


def test_a_preemption_50_minutes_before_a_kill_still_counts(life: Life) -> None:
    """The hour of H3 is the engine's, not our process's: 61 minutes after it, and not before, the alert resolves."""
    life.rules = ("preemptions",)
    count = {"preemptions": 0.0, "generation_tokens": 0.0}
    source = Scripted("engine:llama", engine(count))
    life.start(source)
    life.tick(370)  # half an hour and more: the window is covered
    count["preemptions"] = 1.0
    life.tick()
    counted_at = life.clocks.unix
    life.tick(599)
    assert life.fired() == [("preemptions", "llama")]

    life.start(Scripted("engine:llama", engine(count)))
    life.tick(110)  # 59 min 10 s after it

    assert life.agent is not None
    assert [a["state"] for a in life.agent.alerts(False)] == ["firing"]
    life.tick(14)
    [resolved] = [t for t in life.agent.transitions(-1) if t["state"] == "resolved"]
    assert 3600 <= resolved["at"] - counted_at <= 3610
    assert life.fired() == [("preemptions", "llama")]


def test_a_pending_alert_goes_on_where_it_was(life: Life) -> None:
    """15 of 30 s too hot, an hour without us, 15 s more: fired then, and the hour counts for nothing."""
    life.rules = ("gpu-temperature",)
    life.start(Scripted("nvml", hot))
    life.tick(4)
    life.clocks.go(3600)

    life.start(Scripted("nvml", hot))
    life.tick(3)
    assert life.fired() == []
    life.tick()

    assert life.fired() == [("gpu-temperature", "GPU-8f6a")]


def test_labels_and_start_of_a_firing_alert_are_those_of_before_the_kill(life: Life) -> None:
    """Byte for byte, though another engine appeared on its GPU meanwhile."""
    life.rules = ("gpu-temperature",)
    life.start(Scripted("nvml", hot), Scripted("engine:llama", engine({"running": 1.0})))
    life.tick(8)
    assert life.agent is not None
    [before] = life.agent.firing()
    life.targets = (*life.targets, Target("chat", (), SLO, gpus=(0,)))

    agent = life.start(Scripted("nvml", hot), Scripted("engine:llama", engine({"running": 1.0})),
                       Scripted("engine:chat", engine({"running": 1.0}, "chat")))
    [at_start] = agent.firing()
    life.tick(3)
    [after] = agent.firing()

    assert before.labels["engine"] == "llama"
    assert dict(at_start.labels) == dict(after.labels) == dict(before.labels)
    assert list(after.labels) == list(before.labels)
    assert at_start.starts_at == after.starts_at == before.starts_at


def test_layouts_that_were_pruned_are_not_given_out_again(life: Life) -> None:
    """The numbers of an old frame must not come back under another series' name."""
    life.rules = ("kv-cache-utilization",)
    numbers: dict[str, float | None] = {"kv_usage": 0.5}
    source = Scripted("engine:llama", engine(numbers))
    life.start(source)
    life.tick(2)
    numbers["running"] = 3.0
    life.tick(2)
    assert life.agent is not None
    with sqlite3.connect(life.folder / DATABASE) as db:  # an hour later the first frames are gone
        db.execute("DELETE FROM frames WHERE layout = (SELECT MIN(layout) FROM layouts)")
    db.close()

    numbers["waiting"] = 7.0
    life.start(Scripted("engine:llama", engine(numbers)))
    life.tick(2)
    agent = life.start(Scripted("engine:llama", engine(numbers)))

    windows = agent.node.windows
    assert [v for _, v in windows.history("llama", "kv_usage", 0)] == [0.5] * 4
    assert [v for _, v in windows.history("llama", "running", 0)] == [3.0] * 4
    assert [v for _, v in windows.history("llama", "waiting", 0)] == [7.0] * 2


def test_a_clock_step_neither_fires_nor_resolves(life: Life) -> None:
    """Back an hour, and ahead a day: the alert fires on, nothing else starts, and /livez goes by its own clock."""
    life.rules = ()
    page = {"kv_usage": 0.5, "running": 1.0, "waiting": 0.0, "generation_tokens": 0.0, "preemptions": 3.0,
            "process_start": T0 - 9e5}

    def read(now: float) -> Batch:
        page["generation_tokens"] += 50.0
        return engine(page)(now)

    life.start(Scripted("nvml", hot), Scripted("engine:llama", read))
    life.tick(12)
    assert life.agent is not None
    before = {key: alert.state for key, alert in life.agent.book().alerts.items()}
    assert before["gpu-temperature", "GPU-8f6a"] == "firing"
    told = len(life.agent.transitions(-1))

    for step_s in (-3600.0, 86400.0):
        life.clocks.unix += step_s
        life.tick(3)
        assert life.agent.livez(life.clocks.unix)[0]

    kinds = [(t["state"], t["rule"]) for t in life.agent.transitions(-1)[told:]]
    assert [k for k in kinds if k[0] in ("firing", "resolved")] == []
    assert life.agent.book().alerts["gpu-temperature", "GPU-8f6a"].state == "firing"


# --- what cannot be saved, and what fails -----------------------------------------------------------------------------


NOBODY = "http://127.0.0.1:9/"  # refuses


def hook(url: str = NOBODY) -> Channel:
    """The webhook channel."""
    return Webhook("webhook", lambda: url, None)


def fill_the_disk(store: Store) -> None:
    """Let every commit fail as on a full disk: SQLite may not grow the file any more."""
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")


def test_a_full_disk_still_pages_and_says_so(life: Life) -> None:
    """The tick cannot be saved: its page goes out all the same, /healthz tells, and it is saved once there is room."""
    life.rules = ("gpu-temperature",)
    with Receiver() as receiver:
        wide = engine({f"x{i}": 1.0 for i in range(1000)})  # two pages of the file a tick
        agent = life.start(Scripted("nvml", hot), Scripted("engine:llama", wide), channels=[hook(receiver.url)])
        outbox = agent.outbox
        assert outbox is not None
        outbox.start()
        life.tick(2)
        fill_the_disk(agent.store)
        life.tick(10)

        receiver.wait_until(lambda _: ("firing", "GpuTemperature") in receiver.alerts(), 60, "the page")
        wait_until(lambda: [status.delivered for status in outbox.status().values()] == [1])  # and noted, which may fit
        life.tick()
        ok, health = agent.healthz()
        agent.store._db.execute("PRAGMA max_page_count=1073741823")
        life.tick()
        outbox.stop(2)

    assert not ok
    assert any("disk is full" in problem for problem in health["problems"])
    assert agent.livez(life.clocks.unix)[0]
    assert agent.store.problem is None
    with sqlite3.connect(life.folder / DATABASE) as db:
        assert db.execute("SELECT COUNT(*) FROM transitions WHERE kind='firing'").fetchone() == (1,)
    db.close()


def test_a_fault_of_ours_in_a_tick_loses_no_page(life: Life) -> None:
    """What was judged but not handed over is judged again: the alert fires at the next tick that works."""
    life.rules = ("gpu-temperature",)
    agent = life.start(Scripted("nvml", hot))
    life.tick(6)
    real, calls = agent._notices, []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if any(change.kind == "firing" for change in args[0]):
            raise ZeroDivisionError
        return real(*args)

    agent._notices = broken  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        life.tick()
    agent._notices = real  # type: ignore[method-assign]
    assert life.fired() == []
    life.tick()

    assert life.fired() == [("gpu-temperature", "GPU-8f6a")]
    assert calls


def test_what_fails_after_the_commit_pages_nobody_twice(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database broke between the commit and the cleaning up: the page is owed once, and the tick is whole."""
    life.rules = ("gpu-temperature",)
    agent = life.start(Scripted("nvml", hot), channels=[hook()])

    def broken(*_: Any) -> None:
        raise StoreError("cannot be read")

    monkeypatch.setattr(agent.store, "prune", broken)
    monkeypatch.setattr("agent.loop.PRUNE_EVERY_S", 0.0)
    life.tick(12)

    assert life.fired() == [("gpu-temperature", "GPU-8f6a")]
    assert len(agent.store.owed("webhook")) == 1


def test_a_row_that_the_database_refuses_pages_nobody_twice(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice is owed in memory before anything is written: judged again, it would be owed again."""
    life.rules = ("gpu-temperature",)
    agent = life.start(Scripted("nvml", hot), channels=[hook()])
    life.tick(6)

    def broken(*_: Any, **__: Any) -> None:
        raise sqlite3.InterfaceError("bad parameter")

    with monkeypatch.context() as patch:
        patch.setattr(agent.store, "_write", broken)
        with pytest.raises(sqlite3.InterfaceError):
            life.tick()
    life.tick(3)

    assert len(agent.store.owed("webhook")) == 1
    assert len(agent.firing()) == 1


def test_the_loop_outlives_a_tick_that_fails_but_does_not_call_itself_alive(life: Life) -> None:
    """It goes on ticking and names the fault; the watchdog is fed only while ticks succeed."""
    agent = life.start(Scripted("nvml", hot))
    life.clocks.go(40)  # no tick since the start: late already
    fed: list[float] = []
    failed = threading.Event()

    def broken(dt: float) -> list[Batch]:
        failed.set()
        raise ZeroDivisionError("x")

    agent.collector.gather = broken  # type: ignore[assignment]
    thread = threading.Thread(target=agent.run, args=(lambda: fed.append(1.0),))
    thread.start()
    assert failed.wait(30)
    wait_until(lambda: agent._fault is not None, 30, "the fault")
    _, health = agent.healthz()
    agent.stop()
    thread.join(30)

    assert fed == []
    assert any("ZeroDivisionError: x" in problem for problem in health["problems"])
    assert any("last tick" in problem and "limit 30" in problem for problem in health["problems"])


def test_the_watchdog_is_fed_more_often_than_a_slow_poll(life: Life) -> None:
    """WatchdogSec is 60 s and a poll may be: between two ticks it is fed each 10 s."""
    agent = life.start()
    waits: list[float] = []
    fed: list[float] = []

    class Woken:
        """An event whose waits pass at once, on our clock."""

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            life.clocks.go(seconds)
            return False

    agent._woken = Woken()  # type: ignore[assignment]
    agent._wait_until(life.clocks.mono + 35, lambda: fed.append(life.clocks.mono))

    assert waits == [10, 10, 10, 5]
    assert fed == [500, 510, 520, 530]


class Herald(Scripted):
    """A source that wakes the loop when something has come."""

    wake: Callable[[], object]

    def wake_with(self, wake: Callable[[], object]) -> None:
        """As agent.sources.kernel_log.KernelLog has it."""
        self.wake = wake


def test_what_cannot_wait_for_the_tick_is_judged_at_once(life: Life) -> None:
    """An Xid came a second after the tick and lay there until the next: only the herald is read, and that now."""
    slow, herald = Scripted("nvml", hot), Herald("kernel_log", nothing("kernel_log"))
    agent = life.start(slow, herald)
    agent.node.setup = replace(agent.node.setup, poll_s=3600.0)
    thread = threading.Thread(target=agent.run, args=(lambda: None,))
    thread.start()
    try:
        wait_until(lambda: herald.reads == 1 and agent.tick_at() is not None, 30, "the tick")
        for reads in (2, 3):
            herald.wake()
            wait_until(lambda n=reads: herald.reads == n, 30, "the read")  # type: ignore[misc]
    finally:
        agent.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert slow.reads == 1


def test_events_that_came_after_their_round_are_judged_at_once(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the log's reader answered a moment after the tick had gone on: its Xid lay there for a poll."""
    monkeypatch.setattr("agent.loop.GRACE_S", 0.05)
    at_once = Event("xid", "0000:1b:00", 79, 0.0, 0.0)
    herald = Herald("kernel_log", lambda now: Batch("kernel_log", now, 0.01, events=(at_once,)))
    herald.hold()
    agent = life.start(herald)
    agent.node.setup = replace(agent.node.setup, poll_s=3600.0)
    thread = threading.Thread(target=agent.run, args=(lambda: None,))
    thread.start()
    try:
        wait_until(lambda: agent.tick_at() is not None, 30, "the tick that went on without it")
        assert not agent.node.history.entries
        herald.free.set()
        wait_until(lambda: bool(agent.node.history.entries), 30, "its events")
    finally:
        agent.stop()
        thread.join(30)
    assert not thread.is_alive()


def test_a_storm_of_events_does_not_put_off_the_tick(life: Life) -> None:
    """A GPU that tells a new error every moment kept the loop busy, and nothing else was read any more."""
    herald = Herald("kernel_log", nothing("kernel_log"))
    agent = life.start(herald)
    play = herald.play

    def again(now: float) -> Batch:
        herald.wake()
        life.clocks.go(1.0)
        return play(now)

    herald.play = again
    herald.wake()
    waiting = threading.Thread(target=agent._wait_until, args=(life.clocks.mono + 3, lambda: None))
    waiting.start()
    waiting.join(30)

    assert not waiting.is_alive()
    assert 1 <= herald.reads <= 4


# --- what it tells of itself ------------------------------------------------------------------------------------------


def test_livez_goes_by_the_ticks_alone(life: Life) -> None:
    """Late after 30 s without a tick (or three polls), whatever else is broken; well again after the next."""
    agent = life.start(Scripted("nvml", lambda now: Batch("nvml", now, 0.0, error="driver gone")))
    life.tick()
    assert agent.livez(0.0)[0]

    life.clocks.go(30)
    assert agent.livez(0.0) == (True, "last tick 30.0 s ago (limit 30 s)")
    life.clocks.go(1)
    assert agent.livez(0.0) == (False, "last tick 31.0 s ago (limit 30 s)")
    assert agent.healthz()[1]["problems"][-2] == "last tick 31.0 s ago (limit 30 s)"
    assert not agent.healthy()

    life.tick()
    assert agent.livez(0.0)[0]


def test_a_check_is_not_healthy_once_the_agent_has_stopped_judging(life: Life) -> None:
    """The tick hangs on a disk: what it last saw is shown with its true age, and is no verdict any more."""
    life.rules = ("kv-cache-utilization",)
    agent = life.start(Scripted("engine:llama", engine({"kv_usage": 0.5})))
    life.tick(2)
    assert (agent.check()["verdict"], agent.check()["why"]) == ("healthy", None)

    life.clocks.go(95)
    told = agent.check()

    assert told["verdict"] == "unknown"
    assert told["why"] == ("the agent no longer judges: last tick 95.0 s ago (limit 30 s); see /healthz and its log")
    assert [s["age_s"] for s in told["signals"]] == [95.0]
    assert check_report(told, show_all=False)[-1] == f"UNKNOWN: {told['why']}"


def test_healthz_names_every_broken_part(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing source, a hanging one, a channel that cannot deliver, and each signal that is not told, with why."""
    monkeypatch.setattr("agent.loop.GRACE_S", 0.3)
    good = Scripted("engine:llama", engine({"kv_usage": None, "waiting": 0.0}))
    failing = Scripted("nvml", lambda now: Batch("nvml", now, 0.0, error="nvmlInit: Driver Not Loaded"))
    hanging = Scripted("engine:chat", nothing("engine:chat"))
    hanging.hold()
    agent = life.start(good, failing, hanging, channels=[hook()])
    life.tick(5)

    ok, health = agent.healthz()

    problems = "\n".join(health["problems"])
    assert not ok
    assert "source nvml: nvmlInit: Driver Not Loaded" in problems
    assert "source engine:chat: no answer for 20 s" in problems
    assert "source engine:chat: not read yet" in problems
    assert "kv_cache_utilization of llama: kv_usage is nan" in health["unknown"]
    assert health["sources"]["nvml"] == {"error": "nvmlInit: Driver Not Loaded", "late_s": 0.0, "errors": 5}
    assert health["channels"]["webhook"]["pending"] == 1  # the watcher's ticket about the hanging one
    assert "llama" not in problems


def test_without_a_channel_healthz_says_loudly_that_nobody_is_told(life: Life) -> None:
    """The most dangerous of all configurations."""
    agent = life.start()

    assert any("nobody is told" in problem for problem in agent.healthz()[1]["problems"])


def test_a_source_that_is_late_raises_the_watcher(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three polls without an answer: a ticket that names the source and how long it is, closed when it is back."""
    monkeypatch.setattr("agent.loop.GRACE_S", 0.2)
    life.rules = ("watcher",)
    source = Scripted("nvml", nothing("nvml"))
    agent = life.start(source)
    life.tick()
    source.hold()
    life.tick(3)
    assert life.fired() == []
    life.tick()

    [told] = agent.firing()
    source.free.set()
    wait_until(lambda: agent.collector.slots["nvml"].fresh is not None, 30, "its late answer")
    life.tick(14)

    assert life.fired() == [("watcher", "source:nvml")]
    assert told.annotations["summary"] == "source:nvml on gpu-17: no answer for 15 s, 0 s"
    assert agent.alerts(False) == []
    assert [(a["state"], a["subject"]) for a in agent.alerts(True)] == [("resolved", "source:nvml")]


def test_a_call_into_the_driver_that_hangs_raises_the_watcher(life: Life) -> None:
    """NVML gives each read back at its deadline, with Gaps: never late, yet nobody would be told that it hangs."""
    life.rules = ("watcher",)
    since: list[float] = []

    def read(now: float) -> Batch:
        since.append(now)
        return Batch("nvml", now, 2.0, error="nvmlDeviceGetTemperature has not returned", hung_s=2.0 + now - since[0])

    source = Scripted("nvml", read)
    agent = life.start(source)
    life.tick(3)
    assert life.fired() == []  # 12 s
    life.tick()
    assert life.fired() == [("watcher", "source:nvml")]  # 17 s
    assert "source nvml: no answer for 17 s" in agent.healthz()[1]["problems"]

    source.play = nothing("nvml")
    life.tick(14)
    assert agent.alerts(False) == []


def test_a_channel_that_fails_for_5_minutes_raises_the_watcher(life: Life) -> None:
    """The other channels then tell it: a ticket, and not before the five minutes are over."""
    life.rules = ("watcher", "gpu-temperature")
    agent = life.start(Scripted("nvml", hot), channels=[hook()])
    life.tick(7)
    assert agent.outbox is not None
    [worker] = agent.outbox.workers
    worker.step()  # its first try fails
    life.tick(59)
    assert ("watcher", "channel:webhook") not in life.fired()

    life.tick(2)

    assert ("watcher", "channel:webhook") in life.fired()
    told = next(m for m in agent.firing() if m.labels["rule"] == "watcher")
    assert told.annotations["summary"].partition(": ")[2].startswith("nothing delivered for 5")


def test_doctor_tells_how_each_number_was_had(life: Life) -> None:
    """By target, GPU and source; what a required rule is made of is marked, a source's error stands beside it."""
    kv = Found("kv_usage", "llama", "vllm:kv_cache_usage_perc")
    lost = Found("ttft", "llama", None, why="gone", remedy="see --disable-log-stats")

    def read(now: float) -> Batch:
        return Batch("engine:llama", now, 0.01, (), EngineFacts("llama", ("llama",), model="m", found=(kv, lost)))

    gone = Scripted("nvml", lambda now: Batch("nvml", now, 0.0, error="no"))
    agent = life.start(Scripted("engine:llama", read), gone)
    life.tick()

    report = agent.doctor()

    [target] = report["targets"]
    assert (target["target"], target["model"], target["error"]) == ("llama", "m", None)
    assert [(f["name"], f["how"], f["required"]) for f in target["found"]] == [
        ("kv_usage", "vllm:kv_cache_usage_perc", True), ("ttft", None, True)]
    assert [(s["name"], s["error"]) for s in report["sources"]] == [("engine:llama", None), ("nvml", "no")]
    [unread] = doctor_report(Node(agent.node.setup), {}, 0.0)["targets"]
    assert (unread["found"], unread["kind"]) == ([], "unknown")


def test_own_numbers_for_metrics(life: Life) -> None:
    """Duration and errors of each source, notices by state, deliveries by outcome, the time of the tick."""
    agent = life.start(Scripted("nvml", lambda now: Batch("nvml", now, 0.25, error="no")), channels=[hook()])
    assert agent.tick_at() is None
    life.tick(2)

    assert [tuple(s) for s in agent.source_stats()] == [("nvml", 0.25, 2)]
    assert agent.tick_at() == T0 + 10
    assert agent.delivery_counts() == {"webhook": {"delivered": 0, "rejected": 0, "retried": 0}}
    assert agent.outbox_counts() == {}
    assert {s.id for s in agent.signals()} >= {"watcher"}


def test_nvml_that_is_off_cannot_be_released(life: Life) -> None:
    """Said, not a fault."""
    agent = life.start()

    assert agent.release_nvml(5.0) == {"released": False, "why": "NVML is off or not there"}
    assert agent.reopen_nvml() == {"reopened": False, "why": "NVML is off or not there"}


def test_a_drill_s_line_is_told_to_the_reader_of_the_kernel_s_log(life: Life) -> None:
    """Where nobody reads that log, the drill hears it before it writes."""
    class Log(Scripted):
        told: ClassVar[list[tuple[str, float]]] = []

        def expect(self, line: str, for_s: float) -> None:
            self.told.append((line, for_s))

    agent = life.start(Log("kernel_log", hot))

    assert agent.expect_kernel_line("NVRM: Xid", 10.0)
    assert Log.told == [("NVRM: Xid", 10.0)]


def test_no_line_is_expected_where_no_log_is_read(life: Life) -> None:
    """kernel_log: off."""
    assert not life.start().expect_kernel_line("NVRM: Xid", 10.0)


def test_the_agent_is_asked_over_its_socket(life: Life) -> None:
    """check, alerts, transitions as the command line and the drills read them."""
    agent = life.start(Scripted("nvml", hot))
    life.tick(8)
    server = serve_unix(make_app(agent, CATALOGUE, lambda: life.clocks.unix, routes=PRIVATE), life.folder / "s")
    try:
        check = client.ask(life.folder / "s", "/check")
        alerts = client.ask(life.folder / "s", "/alerts")
        moves = client.ask(life.folder / "s", "/transitions?after=0")
    finally:
        server.close()

    assert (check["verdict"], check["node"]) == ("page", "gpu-17")  # 91 °C and no limit told: gpu-thermal-limit
    assert {a["rule"] for a in alerts} >= {"gpu-temperature", "gpu-thermal-limit"}
    assert {m["state"] for m in moves} == {"pending", "firing"}


def test_nvml_is_released_and_reopened_over_the_socket(tmp_path: Path) -> None:
    """Before a GPU reset: every handle is let go, reads say that it was asked for, and come back afterwards."""
    need("gcc")
    scenario, calls = tmp_path / "nvml.json", tmp_path / "calls"
    write_scenario(scenario, {"calls": str(calls), "gpus": [{"uuid": "GPU-aa", "temperature": 61}]})
    env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)}
    with AgentProcess(tmp_path / "agent", {"poll": "1s", "discover": False}, env) as agent:

        def temperature() -> dict[str, Any]:
            found: list[dict[str, Any]] = agent.ask("/check")["signals"]
            return next((r for r in found if r["rule"] == "gpu-temperature"), {"state": "absent"})

        wait_until(lambda: temperature()["state"] == "OK", 10, "the first reading")
        released = client.release_nvml(agent.socket)
        shut = calls.read_text().count("nvmlShutdown")
        wait_until(lambda: temperature()["state"] == "UNKNOWN", 10, "unknown")
        why = temperature()["why"]
        client.reopen_nvml(agent.socket)
        wait_until(lambda: temperature()["state"] == "OK", 10, "the next reading")

    assert (released["released"], shut) == (True, 1)
    assert "released on request" in why


def test_gaps_are_not_saved_as_numbers(life: Life) -> None:
    """A Gap before a restart is no 0 after it."""
    life.rules = ("kv-cache-utilization",)

    def read(now: float) -> Batch:
        gap = Gap("kv_usage", "llama", Why.NOT_A_NUMBER, "kv_usage is nan", now)
        told = (Sample("running", "llama", 1.0, now), gap)
        return Batch("engine:llama", now, 0.0, told, EngineFacts("llama", ("llama",)))

    life.start(Scripted("engine:llama", read))
    life.tick(3)
    agent = life.start(Scripted("engine:llama", read))

    assert list(agent.node.windows.history("llama", "kv_usage", 0)) == []
    assert len(list(agent.node.windows.history("llama", "running", 0))) == 3


def test_the_curves_of_the_page_outlive_a_kill(life: Life) -> None:
    """The agent was killed in the incident: the engineer still sees how the KV cache filled before it."""
    life.rules = ("kv-cache-utilization",)
    numbers = {"kv_usage": 0.25}
    key = ("kv-cache-utilization", "llama")
    life.start(Scripted("engine:llama", engine(numbers)))
    life.tick(36)  # three minutes
    numbers["kv_usage"] = 0.75
    life.tick(12)
    agent = life.start(Scripted("engine:llama", engine(numbers)))
    numbers["kv_usage"] = 0.5
    life.tick()
    fine, day = agent.trend(3600.0, frozenset({key}))[key], agent.trend(86400.0)[key]
    assert {value for _, value in fine} == {0.25, 0.75, 0.5}
    assert life.clocks.unix - 5 * 60.0 <= fine[0][0]
    assert 36 <= len(fine) <= 49  # the minute under way when it was killed may be lost
    assert [value for _, value in day][-2:] == [0.75, 0.5]
    assert len(day) <= 6


def test_the_curves_of_what_came_and_went_are_drawn_and_then_forgotten(life: Life) -> None:
    """A node whose cards were swapped every 12 minutes: each one's curve for a day, and no row of it after that."""
    life.rules = ("gpu-temperature",)
    card = [0]
    agent = life.start(Scripted("nvml", lambda now: hot(now, f"GPU-{card[0]:04d}")))
    for card[0] in range(10):
        life.tick(14)  # a minute and more
        life.clocks.go(650.0)
    drawn = {subject for (_, subject), points in agent.trend(86400.0).items() if points}
    assert drawn == {f"GPU-{n:04d}" for n in range(10)}
    columns = {row.layout for row in agent.store.layouts() if row.track == TRACK}
    assert len(columns) >= 10

    life.clocks.go(86400.0)
    life.tick(14)
    life.clocks.go(LAYOUTS_EVERY_S)
    life.tick(14)
    left = {row.layout for row in agent.store.layouts() if row.track == TRACK}
    assert len(left) <= 2
    assert not left & columns - {max(columns)}
    assert [subject for _, subject in agent.trend(86400.0)] == ["GPU-0009"]


def test_an_incident_is_kept_with_its_worst_value_and_can_be_reported(life: Life) -> None:
    """At 91 °C, then 97, then cool: the record outlives a kill, and its postmortem names the 97 and both deliveries."""
    life.rules = ("gpu-temperature", "gpu-thermal-limit")
    temps = [61.0] * 3 + [91.0] * 9 + [97.0] * 2 + [91.0] * 3 + [61.0] * 40
    source = Scripted("nvml", lambda now: hot(now, temp_c=temps[min(len(temps) - 1, int((now - T0) // POLL_S) - 1)]))
    with Receiver() as receiver:
        agent = life.start(source, channels=[PagerDuty("pagerduty", lambda: "k" * 32, receiver.url)])
        assert agent.outbox is not None
        life.tick(14)
        (open_,) = agent.incident_list(0.0)
        assert (open_["ended_at"], open_["members"][0]["worst"]) == (None, -12.0)  # 97 of 85 °C
        life.kill()
        agent = life.start(source, channels=[PagerDuty("pagerduty", lambda: "k" * 32, receiver.url)])
        life.tick(40)
        assert agent.outbox is not None
        for worker in agent.outbox.workers:
            worker.step()
            worker.step()
        told = agent.incident_told("last")
        assert told is not None
        found = postmortem.view(told)
        assert agent.incident_told("no-such") is None
    (row,) = found["alerts"]
    assert (row["rule"], row["worst"], row["limit"], row["role"]) == ("gpu-thermal-limit", "-12 K", "0 K", "cause")
    assert found["header"]["state"] == "over"
    assert found["header"]["cause"] == "gpu-thermal-limit on GPU 0 on gpu-17"
    whats = [one["what"] for one in found["timeline"]]
    assert whats[0] == "threshold crossed"
    assert [what for what in whats if "delivered" in what] == ["firing delivered to pagerduty",
                                                               "resolved delivered to pagerduty"]
    assert [one["event_action"] for one in (a.json for a in receiver.arrivals)][-1] == "resolve"


def test_what_a_day_brought_is_counted_through_a_restart(life: Life) -> None:
    """10 requests a poll, one of them failed: a review after a kill has them all, but for the minute under way."""
    polls = 0

    def served(now: float) -> Batch:
        nonlocal polls
        polls += 1
        finished = {"finished.stop": 9.0 * polls, "finished.error": 1.0 * polls}
        return engine({"running": 1.0, "waiting": 0.0, **finished})(now)

    life.start(Scripted("engine:llama", served))
    life.tick(30)
    agent = life.start(Scripted("engine:llama", served))
    life.tick(30)
    (row,) = agent.review(86400.0)["targets"]
    assert row["errors"] * 10 == row["requests"]
    assert 450 <= row["requests"] <= 590
    assert (row["slo"][0]["attained"], row["slo"][0]["kept"]) == (0.9, False)
