"""What is watched while a drill runs, where its sources say something odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from drills import watch
from drills.judge import Alarm
from drills.model import Drill, Load
from drills.runner import is_drilled
from tests.receiver import Receiver, Reply

ROUTES = """
route:
  receiver: all
  routes:
    - {receiver: night, group_wait: 1m30s, routes: [{receiver: quiet}]}
    - {receiver: pager, group_wait: 500ms}
"""


@pytest.mark.parametrize(
    ("original", "want_s"),
    [
        (ROUTES, 90.0),
        ("route: {receiver: all, group_wait: 2s}", 2.0),
        ("route: {receiver: all}", 30.0),  # Alertmanager's own default
        ("route: [", 30.0),
        ("", 30.0),
    ],
)
def test_group_wait(original: str, want_s: float) -> None:
    """A page that waited 30 s for others of its group was called late."""
    body = json.dumps({"config": {"original": original}}).encode()
    with Receiver(lambda _: Reply(body=body)) as alertmanager:
        assert watch.group_wait_s([alertmanager.url]) == want_s
    assert watch.group_wait_s([]) == 0.0


def echo(*alerts: object) -> Callable[[object], Reply]:
    """A receiver that tells of these, at second 105."""
    return lambda _: Reply(body=json.dumps([{"at": 105.0, "alerts": alerts}]).encode())


@pytest.mark.parametrize(
    ("alert", "want_at"),
    [
        ({"status": "firing", "labels": {"rule": "engine-down", "subject": "a"}}, 105.0),
        ({"status": "firing", "labels": {"rule": "engine-down", "subject": "b"}}, None),
        ({"status": "resolved", "labels": {"rule": "engine-down", "subject": "a"}}, None),
        ({"status": "firing", "labels": {"rule": "ttft-p99", "subject": "a"}}, None),
        ({"status": "firing"}, None),
        ("no alert", None),
    ],
)
def test_what_a_receiver_tells(alert: object, want_at: float | None) -> None:
    """The same alert of another engine was taken for the drill's own page."""
    with Receiver(echo(alert)) as receiver:
        assert watch.echoed_at(receiver.url, "engine-down", 100.0, lambda subject: subject == "a") == want_at
        assert watch.echoed_at(receiver.url, "engine-down", 106.0, lambda _: True) is None
    assert watch.echoed_at(receiver.url, "engine-down", 100.0, lambda _: True) is None  # nobody listens


def test_what_became_of_an_alert() -> None:
    """It fired before the drill too, and flapped in it: first pending and firing count, and how it ended."""
    rows: list[dict[str, Any]] = [{"rule": "r", "state": state, "at": at} for state, at in (
        ("firing", 90.0), ("resolved", 95.0), ("pending", 101.0), ("firing", 102.0), ("resolved", 110.0),
        ("pending", 111.0), ("firing", 111.0), ("resolved", 120.0))]  # fmt: skip

    assert watch.alarm_of({"for_s": 1.0}, "r", rows, 100.0, None) == Alarm("r", 1.0, True, 101.0, 102.0, None, 120.0)
    assert watch.alarm_of({"for_s": 1.0}, "r", rows[:-1], 100.0, None).resolved_at is None
    assert not watch.alarm_of(None, "r", [], 100.0, None).enabled


@pytest.mark.parametrize(
    ("subject", "want"),
    [("a", True), ("a/0", True), ("n1", True), ("llm:8080", True), ("ab", False), ("b", False), ("llm:8081", False)],
)
def test_what_a_drill_announces_is_of_its_own_service(subject: str, want: bool) -> None:
    """Engine b died by itself while a was drilled: its page was called announced, and nobody came."""
    drill = Drill("d", "process-kill", target={"engine": "a"}, load=Load("http://llm:8080/v1"))

    assert is_drilled(drill, "n1", subject) == want


def test_a_drill_without_an_engine_announces_for_all() -> None:
    """A port or a pid names no subject."""
    assert is_drilled(Drill("d", "packet-loss", target={"port": 8000}), "n1", "whatever")
