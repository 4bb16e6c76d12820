"""Against a real Alertmanager with a real webhook receiver behind it: what people would get."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agent.model import AlertMessage, Book
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.webhook import fingerprint, payload
from agent.outbox import Outbox
from agent.store import Store
from tests.alertmanager import RealAlertmanager
from tests.receiver import Receiver, Reply, wait_until

pytestmark = pytest.mark.heavy


class Node:
    """The loop's part: a book of what fires, and a commit for each change."""

    def __init__(self, path: Path, urls: list[str], resend_s: float = 0.5, min_visible_s: float = 0.0) -> None:
        self.firing: dict[str, AlertMessage] = {}
        self.store = Store(path)
        self.channel = Alertmanager("alertmanager", urls, lambda: list(self.firing.values()), resend_s, min_visible_s)
        self.outbox = Outbox(self.store, [self.channel], time.time)
        self.outbox.start()

    def fire(self, name: str, **labels: str) -> None:
        """An alert fires."""
        found = {"alertname": name, "node": "n1", "severity": "page"} | labels
        message = AlertMessage(name, "firing", "page", found, {"summary": "°"}, time.time())
        self._commit(message)
        self.firing[name] = message

    def resolve(self, name: str) -> None:
        """It resolves."""
        was = self.firing[name]
        changed = {"summary": "otherwise than when it fired"}
        self._commit(AlertMessage(name, "resolved", "page", was.labels, changed, was.starts_at, time.time()))
        del self.firing[name]

    def _commit(self, message: AlertMessage) -> None:
        self.store.commit_tick(time.time(), Book(), (), [("alertmanager", message)])
        self.outbox.wake()

    def close(self) -> None:
        """SIGTERM."""
        self.outbox.stop(5.0)
        self.store.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Whom Alertmanager tells."""
    with Receiver() as listening:
        yield listening


@pytest.fixture
def real(tmp_path: Path, receiver: Receiver, free_port: Callable[[], int]) -> Iterator[RealAlertmanager]:
    """Alertmanager, running."""
    with RealAlertmanager(tmp_path / "am", free_port(), receiver.url) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts nodes that end with the test."""
    with ExitStack() as stack:

        def begin(*urls: str, **more: Any) -> Node:
            node = Node(tmp_path / "tocsin.db", list(urls), **more)
            stack.callback(node.close)
            return node

        yield begin


def test_fired_once_and_resolved_once(real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]) -> None:
    """Ten resends while it fires: one page; then its end, with other texts but the same labels."""
    node = start(real.url)
    node.fire("KvCacheUtilization", engine="llama-70b")
    receiver.wait_for(1)
    began = real.alerts()[0]["updatedAt"]
    wait_until(lambda: node.channel._next > node.firing["KvCacheUtilization"].starts_at + 5.0)
    assert real.alerts()[0]["updatedAt"] > began
    assert receiver.alerts() == [("firing", "KvCacheUtilization")]
    node.resolve("KvCacheUtilization")
    receiver.wait_for(2)
    assert receiver.alerts() == [("firing", "KvCacheUtilization"), ("resolved", "KvCacheUtilization")]


def test_our_webhook_says_what_alertmanagers_says(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """The same alert through Alertmanager and through our webhook: same keys, same fingerprint, same labels."""
    node = start(real.url)
    node.fire("Hot°", gpu="GPU-1\n\"x\"", **{"odd.name[2]": "ü", "empty": ""})
    (arrival,) = receiver.wait_for(1)
    ours, theirs = payload(node.firing["Hot°"], "hook", ""), arrival.json
    assert ours.keys() == theirs.keys()
    assert ours["alerts"][0].keys() == theirs["alerts"][0].keys()
    for key in ("version", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels", "groupKey"):
        assert ours[key] == theirs[key]
    for key in ("status", "labels", "annotations", "endsAt", "fingerprint"):
        assert ours["alerts"][0][key] == theirs["alerts"][0][key]
    began = [datetime.fromisoformat(told["alerts"][0]["startsAt"]) for told in (ours, theirs)]
    assert began[0] == began[1]  # Go leaves zeros at the end of the fraction out
    assert real.alerts()[0]["fingerprint"] == fingerprint(ours["alerts"][0]["labels"])


def test_a_short_alert_is_seen_thanks_to_min_visible(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """Fired and resolved within group_wait (1 s): without the hold nobody would have learned of it."""
    node = start(real.url, min_visible_s=2.0)
    node.fire("Short")
    node.resolve("Short")
    receiver.wait_for(2)
    assert receiver.alerts() == [("firing", "Short"), ("resolved", "Short")]


def test_without_the_hold_it_would_vanish(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """What min_visible is for: Alertmanager accepts both within group_wait (1 s), and tells nobody of either."""
    node = start(real.url, min_visible_s=0.0)
    node.fire("Short")
    node.resolve("Short")
    wait_until(lambda: node.store.owed("alertmanager") == [])
    node.fire("Later")
    receiver.wait_for(1)  # sent after Short and told a group_wait later: what has not come by now does not come
    assert receiver.alerts() == [("firing", "Later")]


def test_one_bad_alert_does_not_block_its_batch(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """An alert without any label is refused by Alertmanager with a 400 for the whole batch."""
    node = start()
    node.store.commit_tick(
        time.time(),
        Book(),
        (),
        [
            ("alertmanager", AlertMessage("1", "firing", "page", {"alertname": "First"}, {}, time.time())),
            ("alertmanager", AlertMessage("2", "firing", "page", {"": "x"}, {}, time.time())),
            ("alertmanager", AlertMessage("3", "firing", "page", {"alertname": "Last"}, {}, time.time())),
        ],
    )
    node.outbox.stop(5.0)
    again = Outbox(node.store, [Alertmanager("alertmanager", [real.url], list, 0.5, 0.0)], time.time)
    again.start()
    receiver.wait_for(2)
    assert sorted(receiver.alerts()) == [("firing", "First"), ("firing", "Last")]
    assert node.store.outbox_counts()["alertmanager"] == {"pending": 0, "delivered": 2, "rejected": 1}
    (problem,) = again.problems()
    assert "at least one label pair required" in problem
    again.stop(5.0)


def test_one_of_two_peers_is_dead(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node], free_port: Callable[[], int], tmp_path: Path
) -> None:
    """Delivered through the living one; the dead one, back, knows within a resend what fires."""
    port = free_port()
    with Receiver() as other_receiver:
        other = RealAlertmanager(tmp_path / "am2", port, other_receiver.url)
        node = start(other.url, real.url)
        node.fire("Page")
        receiver.wait_for(1)
        wait_until(lambda: node.store.owed("alertmanager") == [])
        assert node.outbox.problems() == []
        with other:
            other_receiver.wait_for(1)
            node.resolve("Page")
            receiver.wait_for(2)
            other_receiver.wait_for(2)
        assert receiver.alerts() == other_receiver.alerts() == [("firing", "Page"), ("resolved", "Page")]


def test_nothing_is_lost_while_alertmanager_is_down(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """It is down while one alert fires, one resolves and one does both; the agent is restarted, too."""
    node = start(real.url, min_visible_s=2.0)
    node.fire("Resolves")
    receiver.wait_for(1)
    wait_until(lambda: node.store.owed("alertmanager") == [])
    wait_until(lambda: real.flushes() >= 2, 60.0, "its own note of what it sent: without, it sends no resolve")
    real.stop()
    node.fire("Fires")
    node.fire("Both")
    node.resolve("Both")
    node.resolve("Resolves")
    wait_until(lambda: node.outbox.status()["alertmanager"].retried > 0)
    assert "Connection refused" in node.outbox.problems()[0]
    firing = node.firing
    node.close()
    node = start(real.url, min_visible_s=2.0)
    node.firing |= firing
    real.start()
    want = {("firing", "Fires"), ("firing", "Both"), ("resolved", "Both"), ("resolved", "Resolves")}
    receiver.wait_until(lambda _: want <= set(receiver.alerts()), 60.0, str(want))
    assert receiver.alerts().count(("firing", "Both")) == 1
    assert receiver.alerts().count(("firing", "Resolves")) == 1


def test_alertmanager_forgets_and_is_told_again(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """A restart of Alertmanager loses its alerts, but not whom it told: they are back, and nobody is paged twice."""
    node = start(real.url)
    node.fire("Page")
    receiver.wait_for(1)
    wait_until(lambda: real.flushes() >= 2, 60.0, "its own note of whom it told")
    real.stop()
    real.start()
    wait_until(lambda: [a["labels"]["alertname"] for a in real.alerts()] == ["Page"], 60.0)
    node.resolve("Page")
    receiver.wait_for(2)
    assert receiver.alerts() == [("firing", "Page"), ("resolved", "Page")]


def test_the_receiver_behind_may_fail_meanwhile(
    real: RealAlertmanager, receiver: Receiver, start: Callable[..., Node]
) -> None:
    """The webhook answers 503 at first: that is Alertmanager's to retry, and ours is delivered all the same."""
    receiver.script(Reply(503))
    node = start(real.url)
    node.fire("Page")
    receiver.wait_for(2)
    assert node.store.outbox_counts()["alertmanager"]["delivered"] == 1
