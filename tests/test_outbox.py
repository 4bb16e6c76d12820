"""The outbox: at least once, in order for each alert, and no receiver is hammered."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from agent.model import AlertMessage, Book, Notice, Rejected, TryLater
from agent.notifiers.channel import BadMessage, Channel, Hours
from agent.notifiers.webhook import Webhook
from agent.outbox import Outbox, Worker
from agent.store import Store
from tests.receiver import Receiver, Reply, wait_until


def message(key: str, status: str = "firing", severity: str = "page") -> AlertMessage:
    """An alert as a receiver gets it."""
    ends_at = None if status == "firing" else 1060.0
    return AlertMessage(
        key,
        "firing" if status == "firing" else "resolved",
        "page" if severity == "page" else "ticket",
        {"alertname": key},
        {},
        1000.0,
        ends_at,
    )


class Clock:
    """Time that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Tape(Channel):
    """A channel that writes down what it was sent and when, and fails as it is told."""

    def __init__(self, clock: Clock, name: str = "tape", batch: int = 1, min_visible_s: float = 0.0) -> None:
        self.name, self.batch, self.min_visible_s = name, batch, min_visible_s
        self.clock = clock
        self.sent: list[tuple[float, str, str]] = []
        self.calls: list[list[str]] = []
        self.faults: list[Exception | Mapping[str, Rejected] | None] = []
        self.poison: Mapping[str, Exception] = {}
        self.held: list[str] = []

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """Take them, or do as `faults` and `poison` say."""
        self.calls.append([n.message.key for n in notices])
        fault = self.faults.pop(0) if self.faults else None
        for notice in notices:
            fault = self.poison.get(notice.message.key, fault)
        if isinstance(fault, Exception):
            raise fault
        refused = fault or {}
        self.sent += [(now, n.message.key, n.message.status) for n in notices if n.message.key not in refused]
        return {n.id: refused[n.message.key] for n in notices if n.message.key in refused}

    def pulse(self, now: float, held: Sequence[AlertMessage]) -> float:
        """Remember what was held back."""
        self.held = [m.key for m in held]
        return float("inf")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store."""
    opened = Store(tmp_path / "tocsin.db")
    yield opened
    opened.close()


def owe(store: Store, now: float, *messages: AlertMessage, channel: str = "tape") -> list[int]:
    """A tick that owes `messages`."""
    return store.commit_tick(now, Book(), (), [(channel, m) for m in messages])


def worker_of(store: Store, channel: Channel, clock: Clock) -> Worker:
    """A worker that a test steps by hand; its dice always show the shortest wait."""
    return Outbox(store, [channel], clock, dice=lambda low, _: low).workers[0]


def play(worker: Worker, clock: Clock, until: float) -> None:
    """Let time pass as the thread would: to each moment at which the worker wants to come back."""
    while True:
        again_at = worker.step()
        if again_at > until:
            clock.now = until
            return
        clock.now = max(again_at, clock.now + 0.001)


def test_a_start_holds_back_what_is_owed_until_the_nodes_own_moment(store: Store) -> None:
    """A fleet is started anew with pages owed: each agent rings in its own part of the first poll, and not before."""
    clock = Clock()
    tape = Tape(clock)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))

    worker.hold(2.5)
    worker.wake()
    play(worker, clock, 1010.0)

    assert tape.sent == [(1002.5, "a", "firing")]


def test_what_is_owed_is_sent_once_and_in_order(store: Store) -> None:
    """Two pages and a resolve: each arrives once, the resolve after its firing."""
    clock = Clock()
    tape = Tape(clock)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"), message("b"), message("a", "resolved"))
    play(worker, clock, 1010.0)
    assert tape.sent == [(1000.0, "a", "firing"), (1000.0, "b", "firing"), (1000.0, "a", "resolved")]
    assert store.owed("tape") == []
    assert worker.status(1010.0)[:5] == (0, 3, 0, 0, 0.0)


def test_a_resolve_never_overtakes_its_firing(store: Store) -> None:
    """The firing met a 503 while the resolve came: sent first, the resolve would leave an alert open for ever."""
    clock = Clock()
    tape = Tape(clock)
    tape.faults = [TryLater("503"), TryLater("503")]
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    worker.step()
    owe(store, 1000.0, message("a", "resolved"))
    play(worker, clock, 1100.0)
    assert [(key, status) for _, key, status in tape.sent] == [("a", "firing"), ("a", "resolved")]


def test_one_alert_that_cannot_be_sent_does_not_block_the_others(store: Store) -> None:
    """The receiver answered 500 to one message whatever came; the page after it waited for hours."""
    clock = Clock()
    tape = Tape(clock)
    tape.poison = {"poison": TryLater("500")}
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("poison"), message("a"), message("b"))
    play(worker, clock, 1060.0)
    assert {key for _, key, _ in tape.sent} == {"a", "b"}
    assert all(at < 1010.0 for at, _, _ in tape.sent)
    assert [n.message.key for n in store.owed("tape")] == ["poison"]


def test_a_batch_that_fails_as_a_whole_is_taken_apart(store: Store) -> None:
    """One alert of a batch made the receiver answer 500 for all of them."""
    clock = Clock()
    tape = Tape(clock, batch=10)
    tape.poison = {"poison": TryLater("500")}
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, *[message(key) for key in ("a", "poison", "b", "c")])
    play(worker, clock, 1060.0)
    assert {key for _, key, _ in tape.sent} == {"a", "b", "c"}
    assert tape.calls[0] == ["a", "poison", "b", "c"]


def test_back_off_grows_to_a_minute(store: Store) -> None:
    """A receiver that is down for hours is asked once a minute, not 720 times an hour by each of 100 nodes."""
    clock = Clock()
    tape = Tape(clock)
    tape.poison = {"a": TryLater("refused")}
    waits: list[tuple[float, float]] = []

    def dice(low: float, high: float) -> float:
        waits.append((low, high))
        return high

    worker = Outbox(store, [tape], clock, dice).workers[0]
    owe(store, 1000.0, message("a"))
    play(worker, clock, 1000.0 + 3600.0)
    assert sorted(set(waits)) == [(1.0, 2.0), (1.0, 4.0), (1.0, 8.0), (1.0, 16.0), (1.0, 32.0), (1.0, 60.0)]
    assert len(tape.calls) < 70
    assert worker.status(clock.now).failing_s == pytest.approx(3600.0)


def test_a_resolve_is_held_until_its_firing_was_seen(store: Store) -> None:
    """Fired and resolved within Alertmanager's group_wait vanish both: nobody learned of the alert."""
    clock = Clock()
    tape = Tape(clock, min_visible_s=60.0)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    worker.step()
    clock.now = 1005.0
    owe(store, 1005.0, message("a", "resolved"), message("b"))
    play(worker, clock, 1059.9)
    assert tape.sent == [(1000.0, "a", "firing"), (1005.0, "b", "firing")]
    assert tape.held == ["a"]
    play(worker, clock, 1200.0)
    assert tape.sent[2] == (1060.0, "a", "resolved")
    assert tape.held == []


def test_a_resolve_that_was_tried_is_no_longer_told_as_firing(store: Store) -> None:
    """Alertmanager took the resolve and its answer was lost: a resend of the firing would open the alert anew."""
    clock = Clock()
    tape = Tape(clock, min_visible_s=60.0)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    worker.step()
    owe(store, 1001.0, message("a", "resolved"))
    worker.step()
    assert tape.held == ["a"]
    tape.faults = [TryLater("no answer within 10 s")]
    clock.now = 1060.0
    worker.step()
    assert tape.calls == [["a"], ["a"]]
    worker._pulse()
    assert tape.held == []


def test_the_hold_survives_a_restart_and_counts_from_acceptance(store: Store) -> None:
    """Alertmanager was down when the alert fired and resolved, and the agent was restarted meanwhile."""
    clock = Clock()
    tape = Tape(clock, min_visible_s=60.0)
    tape.faults = [TryLater("refused")] * 3
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    play(worker, clock, 1001.0)
    owe(store, 1001.0, message("a", "resolved"))
    while not tape.sent:
        clock.now = worker.step()
    accepted_at = tape.sent[0][0]
    again = worker_of(store, tape, clock)
    play(again, clock, accepted_at + 200.0)
    assert [(at - accepted_at, status) for at, _, status in tape.sent] == [(0.0, "firing"), (60.0, "resolved")]


def test_it_fires_again_while_its_resolve_is_held(store: Store) -> None:
    """A flapping alert: the receiver sees fired, resolved, fired, in this order."""
    clock = Clock()
    tape = Tape(clock, min_visible_s=60.0)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    worker.step()
    owe(store, 1001.0, message("a", "resolved"), message("a"))
    play(worker, clock, 1300.0)
    assert [status for _, _, status in tape.sent] == ["firing", "resolved", "firing"]
    assert store.owed("tape") == []


def test_a_clock_that_was_set_back_does_not_delay_a_page(store: Store) -> None:
    """NTP set the clock back by an hour during a back-off: the page must not wait for that hour."""
    clock = Clock(100_000.0)
    tape = Tape(clock)
    tape.faults = [TryLater("503")]
    worker = worker_of(store, tape, clock)
    owe(store, clock.now, message("a"))
    worker.step()
    clock.now -= 3600.0
    worker.step()
    assert [key for _, key, _ in tape.sent] == ["a"]


def test_a_refusal_surfaces_and_does_not_spin(store: Store) -> None:
    """The key was revoked: one try, then /healthz tells it and L5 sees it; once a delivery works it goes too."""
    clock = Clock()
    tape = Tape(clock)
    tape.faults = [Rejected("https://hook.example: 403 Forbidden; see the credentials of this channel")]
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    play(worker, clock, 1400.0)
    assert len(tape.calls) == 1
    assert store.outbox_counts() == {"tape": {"pending": 1}}
    status = worker.status(1400.0)
    assert (status.rejected, status.failing_s) == (1, 400.0)
    assert "403 Forbidden" in (status.last_error or "")
    assert any("1 refused and kept (a: https://hook.example: 403" in p for p in worker.problems(1400.0))
    owe(store, 1400.0, message("b"))
    play(worker, clock, 1401.0)
    assert worker.status(1401.0).failing_s == 0.0
    assert [key for _, key, _ in tape.sent] == ["b", "a"]
    assert worker.problems(1401.0) == []


def test_a_rotated_secret_brings_what_the_old_one_was_refused(store: Store, tmp_path: Path) -> None:
    """401 at night with the old token: kept in its order, and sent as soon as the file holds the new one."""
    clock = Clock()
    secret = tmp_path / "hook"
    with Receiver(lambda arrival: Reply(200 if arrival.path == "/new" else 401)) as receiver:
        secret.write_text(f"{receiver.url}/old")
        worker = worker_of(store, Webhook("tape", secret.read_text), clock)
        owe(store, 1000.0, message("a"), message("a", "resolved"))
        play(worker, clock, 9000.0)
        assert [arrival.path for arrival in receiver.arrivals] == ["/old"]
        secret.write_text(f"{receiver.url}/new")
        play(worker, clock, 9001.0)

    assert receiver.alerts()[1:] == [("firing", "a"), ("resolved", "a")]
    assert worker.status(9001.0)[:5] == (0, 2, 1, 0, 0.0)


def test_what_was_refused_is_tried_once_by_the_next_process(store: Store) -> None:
    """A person mends the receiver or the configuration and reloads: that is a start, and every debt is due at it."""
    clock = Clock()
    tape = Tape(clock)
    tape.faults = [Rejected("404"), Rejected("404")]
    owe(store, 1000.0, message("a"))
    play(worker_of(store, tape, clock), clock, 2000.0)
    play(worker_of(store, tape, clock), clock, 3000.0)
    assert len(tape.calls) == 2
    play(worker_of(store, tape, clock), clock, 4000.0)
    assert [key for _, key, _ in tape.sent] == ["a"]


def test_one_bad_alert_in_a_batch_is_no_failing_channel(store: Store) -> None:
    """The others of its batch were taken, so the channel works; the bad one is told of, once."""
    clock = Clock()
    tape = Tape(clock, batch=10)
    tape.faults = [{"bad": BadMessage("400")}]
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"), message("bad"), message("b"))
    play(worker, clock, 1400.0)
    assert [key for _, key, _ in tape.sent] == ["a", "b"]
    assert tape.calls == [["a", "bad", "b"]]
    assert worker.status(1400.0)[1:5] == (2, 1, 0, 0.0)


def test_a_fault_of_ours_is_tried_again_and_tells_no_text(store: Store) -> None:
    """A KeyError in a channel: its text may hold what it was working on, so only class and place are told."""
    clock = Clock()
    tape = Tape(clock)
    tape.faults = [KeyError("https://hooks.example/SECRETPART")]
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))
    worker.step()
    (owed,) = store.owed("tape")
    assert owed.last_error is not None
    assert owed.last_error.startswith("tape: KeyError at test_outbox.py:")
    play(worker, clock, 1010.0)
    assert len(tape.sent) == 1


def test_sent_but_not_marked_is_sent_again(store: Store, tmp_path: Path) -> None:
    """kill -9 between the answer and the mark: the page goes out twice rather than never."""
    clock = Clock()
    tape = Tape(clock)
    owe(store, 1000.0, message("a"))
    tape.send(store.owed("tape"), 1000.0)  # and here the process died
    store.close()
    again = Store(tmp_path / "tocsin.db")
    worker_of(again, tape, clock).step()
    again.close()
    assert [key for _, key, _ in tape.sent] == ["a", "a"]


def test_a_hanging_channel_does_not_hold_the_others(store: Store) -> None:
    """One webhook never answered; the pages to the other went out, and stopping took no longer than allowed."""
    go_on = threading.Event()
    clock = Clock()

    class Hanging(Tape):
        def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
            go_on.wait(30)
            return super().send(notices, now)

    hanging, tape = Hanging(clock, "hanging"), Tape(clock)
    outbox = Outbox(store, [hanging, tape], clock)
    outbox.start()
    owe(store, 1000.0, message("a"))
    owe(store, 1000.0, message("a"), channel="hanging")
    outbox.wake()
    wait_until(lambda: len(tape.sent) == 1)
    wait_until(lambda: outbox.workers[0]._busy_since is not None)
    clock.now = 1100.0
    assert outbox.status()["hanging"].failing_s == 100.0
    assert outbox.problems() == ["hanging: nothing delivered for 100 s, 1 waiting (no answer yet)"]
    outbox.stop(0.2)
    assert [n.message.key for n in store.owed("hanging")] == ["a"]
    go_on.set()
    for thread in outbox._threads:
        thread.join(30)


def test_a_channel_that_was_removed_is_owed_nothing(store: Store) -> None:
    """Its notices would have stayed in the outbox for ever; they are given up aloud, with the reason."""
    owe(store, 1000.0, message("a"), channel="old-webhook")
    Outbox(store, [], Clock()).give_up_unknown()
    assert store.outbox_counts() == {"old-webhook": {"pending": 0, "rejected": 1}}


def test_c069_429_is_retried_once_and_not_before_its_time(store: Store) -> None:
    """429 with Retry-After: 1 (prometheus/alertmanager#2111): not dropped, not hammered, in real time."""
    with Receiver() as receiver:
        receiver.script(Reply(429, {"Retry-After": "1"}, b'{"ok":false,"error":"rate_limited"}'))
        outbox = Outbox(store, [Webhook("tape", lambda: receiver.url + "/hook")], time.time)
        owe(store, time.time(), message("a"))
        outbox.start()
        first, second = receiver.wait_for(2)
        wait_until(lambda: store.owed("tape") == [])
        outbox.stop(5.0)
        assert 1.0 <= second.at - first.at < 2.5
        assert first.body == second.body
        assert len(receiver.arrivals) == 2


def test_c069_403_is_not_retried(store: Store) -> None:
    """403 invalid_token: a person must mend it; the error is shown and nothing is sent again."""
    clock = Clock()
    with Receiver() as receiver:
        receiver.script(Reply(403, body=b"invalid_token"))
        worker = worker_of(store, Webhook("tape", lambda: receiver.url + "/hook"), clock)
        owe(store, 1000.0, message("a"))
        play(worker, clock, 5000.0)
        assert len(receiver.arrivals) == 1
        (problem,) = [p for p in worker.problems(5000.0) if "refused" in p]
        assert f"{receiver.url}: 403 Forbidden; see the credentials of this channel" in problem


def test_c069_503_is_retried_with_back_off_until_200(store: Store) -> None:
    """503, 503, 200: three requests with growing pauses, then delivered."""
    clock = Clock()
    times: list[float] = []

    def judge(arrival: object) -> Reply:
        times.append(clock.now)
        return Reply(503 if len(times) < 3 else 200)

    with Receiver(judge) as receiver:
        outbox = Outbox(store, [Webhook("tape", lambda: receiver.url)], clock, dice=lambda _, high: high)
        owe(store, 1000.0, message("a"))
        play(outbox.workers[0], clock, 1100.0)
    assert times == [1000.0, 1002.0, 1006.0]
    assert store.outbox_counts() == {"tape": {"pending": 0, "delivered": 1}}


def test_c069_a_retry_after_of_0_hammers_nobody(store: Store) -> None:
    """A receiver that is down says 0, or a date that has passed: a second between two tries all the same."""
    clock = Clock()
    times: list[float] = []

    def judge(arrival: object) -> Reply:
        times.append(clock.now)
        return Reply(503, {"Retry-After": ("0", "Thu, 01 Jan 1970 00:10:00 GMT")[len(times) % 2]})

    with Receiver(judge) as receiver:
        outbox = Outbox(store, [Webhook("tape", lambda: receiver.url)], clock, dice=lambda low, _: low)
        owe(store, 1000.0, message("a"))
        play(outbox.workers[0], clock, 1003.0)
    assert times == [1000.0, 1001.0, 1002.0, 1003.0]


CHILD = """
import sys, time
from pathlib import Path
from agent.model import AlertMessage, Book
from agent.notifiers.webhook import Webhook
from agent.outbox import Outbox
from agent.store import Store

store = Store(Path(sys.argv[1]))
outbox = Outbox(store, [Webhook("tape", lambda: sys.argv[2])], time.time)
outbox.start()
told = store._next_notice - 1  # of the same transaction as the notices: nothing is owed twice by this script itself
while True:
    number, is_end = divmod(told, 2)
    state = ("resolved", "page", {"alertname": f"A{number}"}, {}, 1.0, 2.0)
    message = AlertMessage(f"k{number}", *(state if is_end else ("firing", *state[1:-1])))
    store.commit_tick(time.time(), Book(), (), [("tape", message)])
    outbox.wake()
    told += 1
    print(told, flush=True)
    time.sleep(0.01 * is_end)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.heavy)])
def test_kill_9_loses_no_page_and_keeps_their_order(tmp_path: Path, kills: int) -> None:
    """Killed in the middle of sending, again and again: the receiver gets each alert's firing, then its resolve."""
    path = tmp_path / "tocsin.db"
    dice = random.Random(11)
    with Receiver() as receiver:
        for _ in range(kills):
            child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), receiver.url], stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline()
            time.sleep(dice.uniform(0.0, 0.15))
            child.send_signal(signal.SIGKILL)
            child.communicate()
        store = Store(path)
        number = (store._next_notice - 1) // 2
        outbox = Outbox(store, [Webhook("tape", lambda: receiver.url)], time.time)
        outbox.start()
        wait_until(lambda: store.owed("tape") == [])
        outbox.stop(5.0)
        store.close()
        got = receiver.alerts()
    for n in range(number):
        states = [status for status, name in got if name == f"A{n}"]
        assert states.index("firing") < states.index("resolved"), (n, states)
        assert states[states.index("resolved") :] == ["resolved"] * states.count("resolved"), (n, states)
    assert len(got) <= len(set(got)) + 2 * kills  # twice only what was under way when it was killed


# ---- quiet hours and repeats ----


def test_a_ticket_waits_for_the_morning_and_a_page_does_not(store: Store) -> None:
    """Quiet until 3,000 s: the ticket and its end come then, in order; the page came at once."""
    clock = Clock()
    tape = Tape(clock)
    tape.hours = Hours(lambda severity, now: 3000.0 if severity == "ticket" and now < 3000.0 else None)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("ticket", severity="ticket"), message("page"))
    owe(store, 1060.0, message("ticket", "resolved", "ticket"))

    play(worker, clock, 4000.0)

    assert tape.sent == [(1000.0, "page", "firing"), (3000.0, "ticket", "firing"), (3000.0, "ticket", "resolved")]


def test_what_still_fires_is_told_again(store: Store) -> None:
    """Every 600 s while it fires; a failing one is tried again, one that ended is told no more."""
    clock = Clock()
    tape, fires = Tape(clock), [message("a")]
    tape.hours = Hours(repeat_s=600.0, firing=lambda: fires)
    worker = worker_of(store, tape, clock)
    owe(store, 1000.0, message("a"))

    play(worker, clock, 1599.0)
    tape.faults = [TryLater("503", 7.0)]
    play(worker, clock, 2300.0)
    fires.clear()
    play(worker, clock, 9000.0)

    assert tape.sent == [(1000.0, "a", "firing"), (1607.0, "a", "firing"), (2207.0, "a", "firing")]


def test_a_clock_that_is_stepped_back_delays_no_repeat_for_longer_than_one(store: Store) -> None:
    """A wrong clock was set right by a day: nothing was told again for a day and 600 s."""
    clock = Clock()
    clock.now = 90000.0
    tape = Tape(clock)
    tape.hours = Hours(repeat_s=600.0, firing=lambda: [message("a")])
    worker = worker_of(store, tape, clock)
    owe(store, 90000.0, message("a"))
    play(worker, clock, 90100.0)
    clock.now = 3700.0

    play(worker, clock, 5000.0)

    assert tape.sent == [(90000.0, "a", "firing"), (4300.0, "a", "firing"), (4900.0, "a", "firing")]


def test_a_repeat_keeps_quiet_hours_and_waits_for_the_first_telling(store: Store) -> None:
    """It was told again at night; and the second telling of a page overtook the first."""
    clock = Clock()
    tape = Tape(clock)
    tape.hours = Hours(lambda severity, now: 5000.0 if 2000.0 <= now < 5000.0 else None, 600.0, lambda: [message("a")])
    worker = worker_of(store, tape, clock)
    play(worker, clock, 1500.0)
    assert tape.sent == []
    owe(store, 1500.0, message("a"))

    play(worker, clock, 5500.0)

    assert tape.sent == [(1500.0, "a", "firing"), (5000.0, "a", "firing")]
