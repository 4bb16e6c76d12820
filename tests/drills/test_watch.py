"""What is watched while a drill runs, where its sources say something odd."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drills import watch
from drills.judge import Alarm
from drills.model import Drill, Load
from drills.tell import is_drilled
from tests.drills.test_guards import Agent, agent
from tests.receiver import Arrival, Receiver, Reply, wait_until

__all__ = ["agent"]

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


class Driver:
    """What NVML says of who holds memory, one answer a question; the last one stays."""

    def __init__(self, *answers: Mapping[int, int] | None) -> None:
        self.answers = list(answers)

    def ask(self) -> Mapping[int, int] | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.parametrize(
    ("story", "answers", "completion_at", "want"),
    [
        ("freed, then the new one loads", [{41: 9, 7: 5}, {41: 9}, None, {99: 9}], 90.0, True),
        ("a zombie's context is kept", [{41: 9}, {41: 9, 99: 1}], 90.0, False),
        ("freed after the first answer of the new one", [{41: 9}, {41: 9}, {}], 40.0, False),
        ("an engine without a GPU", [{7: 5}], 90.0, None),
        ("no driver", [None], 90.0, None),
    ],
)
def test_gpu_memory_of_a_killed_engine(story: str, answers: list[Mapping[int, int] | None], completion_at: float,
                                       want: bool | None) -> None:
    """The killed engine's core lived on, the new one found no room, and the restart was called a success."""
    gpu = watch.GpuMemory(Driver(*answers).ask, lambda: 50.0)
    gpu.before([41, 42])
    gpu.start()
    if want is False and answers[-1]:
        gpu.stop()  # it would never be free
    if gpu._thread is not None:
        gpu._thread.join(30)
    assert gpu.is_free(completion_at) is want, story


@pytest.mark.parametrize(
    ("told", "want"),
    [({"processes": {"41": 1024}}, {41: 1024}), ({"processes": None}, None), ([], None), ({}, None)],
)
def test_who_holds_gpu_memory_as_the_agent_says(agent: Agent, tmp_path: Path, told: object,
                                                want: Mapping[int, int] | None) -> None:
    """An agent of another version, or none: then it is unknown, and the drill goes on."""
    agent.answers = {"/nvml/processes": told}
    assert watch.gpu_holders(tmp_path / "agent.sock") == want
    assert watch.gpu_holders(tmp_path / "none") is None


def test_pages_that_are_not_this_nodes() -> None:
    """Our own are told by the agent, sooner; an Alertmanager that is away tells nothing and ends nothing."""
    own, other, theirs = ({"labels": {"rule": rule, "node": name}} for rule, name in (
        ("gpu-lost", "gpu-17"), ("gpu-lost", "gpu-18"), ("DiskFull", "gpu-17")))
    told = [b"[]", json.dumps([own]).encode(), b"<html>", json.dumps([own, other]).encode(),
            json.dumps([own, theirs]).encode()]
    paged = threading.Event()
    with Receiver(lambda _: Reply(body=told.pop(0) if len(told) > 1 else told[0])) as alertmanager:
        elsewhere = watch.PagesElsewhere([alertmanager.url, "http://127.0.0.1:9"], "gpu-17", {"gpu-lost"}, paged.set)
        elsewhere.start()
        assert paged.wait(60)
        wait_until(lambda: len(elsewhere.pages()) > 1)
        elsewhere.stop()
    # Another node's first; then what another tool says of this very node.
    assert elsewhere.pages() == [{"rule": "gpu-lost", "node": "gpu-18"}, {"rule": "DiskFull", "node": "gpu-17"}]
    assert alertmanager.arrivals[0].path == '/api/v2/alerts?filter=severity%3D%22page%22'


def test_a_restart_is_asked_with_the_users_key() -> None:
    """Started with an API key, the engine was up and called "never answered"; without it that cannot be known."""

    def engine(arrival: Arrival) -> Reply:
        if arrival.path == "/health":
            return Reply()
        if arrival.headers.get("Authorization") != "Bearer k":
            return Reply(401)
        body = {"data": [{"id": "m"}]} if arrival.path == "/v1/models" else {"choices": [{"finish_reason": "stop"}]}
        return Reply(body=json.dumps(body).encode())

    with Receiver(engine) as up:
        assert [watch.completion_status(up.url, key) for key in ("k", None)] == [200, 401]
        way = watch.WayBack(up.url, lambda: 7.0, down_at=1.0)
        way.start()
        wait_until(lambda: way.wants_key)
        way.stop()
    assert (way.completion_at, watch.completion_status(up.url, "k")) == (None, None)


def test_an_alert_that_is_pending_again_has_resolved_all_the_same() -> None:
    """firing, resolved, pending, inactive: it was called "still firing", and the run waited for it to its end."""
    states = ("pending", "firing", "resolved", "pending", "inactive")
    rows = [{"rule": "a", "state": state, "at": 10.0 + i} for i, state in enumerate(states)]
    assert watch.alarm_of({"for_s": 0.0}, "a", rows, 0.0, None).resolved_at == 12.0
    rows.append({"rule": "a", "state": "firing", "at": 20.0})
    assert watch.alarm_of({"for_s": 0.0}, "a", rows, 0.0, None).resolved_at is None


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


@pytest.mark.parametrize(("story", "told", "was_on"), [
    ("its own", [("pending", 101.0, "a"), ("firing", 131.0, "a")], False),
    ("pending in the baseline", [("pending", 75.0, "a"), ("firing", 105.0, "a")], True),
    ("pending before anybody watched", [("firing", 103.0, "a")], True),
    ("over before the fault, and again", [("pending", 75.0, "a"), ("inactive", 80.0, "a"), ("pending", 101.0, "a"),
                                          ("firing", 131.0, "a")], False),
    ("another engine's was pending", [("pending", 75.0, "b"), ("pending", 101.0, "a"), ("firing", 131.0, "a")], False),
    ("it never fired", [("pending", 75.0, "a")], False),
])  # fmt: skip
def test_an_alert_that_was_on_before_the_fault(story: str, told: list[tuple[str, float, str]], was_on: bool) -> None:
    """An engine had been down for 25 s when the drill began: "detected after 5 s", said the report."""
    rows = [{"rule": "r", "state": state, "at": at, "subject": subject} for state, at, subject in told]
    assert watch.alarm_of({"for_s": 30.0}, "r", rows, 100.0, None).was_on is was_on, story


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


def test_a_drill_without_an_engine_announces_for_its_users_and_node_alone() -> None:
    """A target by port claimed every engine: a real outage of another one was called a drill."""
    drill = Drill("d", "packet-loss", target={"port": 8000}, load=Load("http://llm.internal:8080/v1"))
    assert [s for s in ("b", "n1", "llm.internal:8080") if is_drilled(drill, "n1", s)] == ["n1", "llm.internal:8080"]
    pods = Drill("d", "pod-kill", target={"namespace": "llm", "selector": "app=vllm"})
    assert is_drilled(pods, "n1", "llm/vllm#1")  # which of them a selector finds is not known
