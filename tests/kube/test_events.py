"""What `kubectl describe node` shows of alerts: Events, counted and never a flood, and a condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from agent.config import Config, KubernetesConfig, NotifyConfig
from agent.model import AlertMessage, Notice, Rejected, TryLater
from agent.notifiers import Needs, build_channels, channel_names
from agent.notifiers.channel import BadMessage
from agent.notifiers.kubernetes import CONDITION, HEARTBEAT_S, Kubernetes, condition, outcome
from drills.cluster import ClusterError, Object, has_condition, path_of
from tests.kube.scene import Api

NOW = 1795937438.0  # 2026-11-29T07:30:38Z
SUMMARY = "gpu-temperature 91 °C, limit 85 °C: GPU 3 on gpu-17, 4 min"


def message(status: str = "firing", severity: str = "page", rule: str = "gpu-lost", **more: str) -> AlertMessage:
    """An alert as channels get it."""
    labels = {"alertname": "GpuLost", "rule": rule, "node": "gpu-17", "subject": "GPU-8f6a", **more}
    return AlertMessage(f"gpu-17/{rule}/GPU-8f6a", status, severity, labels,  # type: ignore[arg-type]
                        {"summary": SUMMARY}, NOW, None if status == "firing" else NOW + 60.0)


def owed(told: AlertMessage) -> Notice:
    """Owed to this channel."""
    return Notice(1, "kubernetes", told, NOW, NOW)


class Scene:
    """A node, the channel that tells of it, and what fires."""

    def __init__(self, api: Api, *, condition: bool = False) -> None:
        self.api, self.node = api, api.node()
        self.firing: list[AlertMessage] = []
        self.channel = Kubernetes("kubernetes", self.node, lambda: self.firing, condition=condition)
        if api.cluster.get(path_of("", "v1", "namespaces", None, "default")) is None:
            api.make_namespace("default", opted_in=False)

    def send(self, *told: AlertMessage) -> Mapping[int, Rejected]:
        """As the outbox does."""
        return self.channel.send([owed(one) for one in told], NOW)

    def events(self) -> list[Object]:
        """The Events of the node, by their reasons."""
        of = f"involvedObject.uid={self.node}"
        found, _ = self.api.cluster.all(path_of("", "v1", "events", "default"), fields=of)
        return sorted(found, key=lambda one: str(one["reason"]))

    def conditions(self) -> dict[str, Mapping[str, Any]]:
        """Those of the node, by their types."""
        node = self.api.cluster.node(self.node) or {}
        return {one["type"]: one for one in node["status"]["conditions"]}

    def clear(self) -> None:
        """Take away what a real server would keep for an hour."""
        for event in self.events():
            self.api.cluster.ask("DELETE", path_of("", "v1", "events", "default", event["metadata"]["name"]))
        self.channel.close()


@pytest.fixture
def scene(api: Api) -> Iterator[Scene]:
    """A node whose condition is told too."""
    made = Scene(api, condition=True)
    yield made
    made.clear()


def test_an_alert_that_comes_and_goes_is_two_events(scene: Scene) -> None:
    """A flapping alert wrote an Event a minute; the API's own were lost among them."""
    for _ in range(7):
        assert scene.send(message()) == {}
        assert scene.send(message("resolved")) == {}
    began, ended = scene.events()
    assert (began["reason"], began["type"], began["count"]) == ("GpuLost", "Warning", 7)
    assert (ended["reason"], ended["type"], ended["count"]) == ("GpuLostResolved", "Normal", 7)
    assert began["message"] == SUMMARY
    assert began["involvedObject"]["kind"] == "Node"
    assert began["involvedObject"]["name"] == scene.node
    assert began["lastTimestamp"] == "2026-11-29T07:30:38Z"
    assert began["source"]["component"] == "tocsin"


def test_what_is_the_cluster_s_is_no_event_of_a_node(scene: Scene) -> None:
    """replicas-missing has no node: the node that tells it has nothing to do with it."""
    told = message()
    told = AlertMessage(told.key, "firing", "ticket", {k: v for k, v in told.labels.items() if k != "node"}, {}, NOW)
    assert scene.send(told) == {}
    assert scene.events() == []


def test_the_condition_is_true_while_a_page_fires_and_false_again(scene: Scene) -> None:
    """A scheduler looked at the node: Ready, and nothing else to see. The kubelet's own conditions stay as they are."""
    ready = scene.conditions()["Ready"]
    assert scene.channel.pulse(NOW, ()) == NOW + HEARTBEAT_S
    assert scene.conditions()[CONDITION]["status"] == "False"
    scene.firing = [message(), message(severity="ticket", rule="gpu-temperature")]
    scene.channel.pulse(NOW + 20.0, ())
    told = scene.conditions()[CONDITION]
    assert (told["status"], told["reason"], told["message"]) == ("True", "GpuLost", f"1 firing: {SUMMARY}")
    assert told["lastTransitionTime"] == "2026-11-29T07:30:58Z"
    scene.firing = [message(), message(rule="gpu-count")]
    scene.channel.pulse(NOW + 30.0, ())  # one more: its text changes, and not since when it is so
    told = scene.conditions()[CONDITION]
    assert told["message"].startswith("2 firing: ")
    assert (told["lastTransitionTime"], told["lastHeartbeatTime"]) == ("2026-11-29T07:30:58Z", "2026-11-29T07:31:08Z")
    scene.firing = []
    scene.channel.pulse(NOW + 60.0, ())
    assert scene.conditions()[CONDITION]["status"] == "False"
    assert scene.conditions()["Ready"] == ready
    assert has_condition(scene.api.cluster.node(scene.node) or {}, "Ready")


def test_a_condition_that_does_not_change_is_written_every_five_minutes(api: Api) -> None:
    """A thousand nodes wrote theirs each tick, and etcd did nothing else."""
    if api.stand_in is None:
        return  # counted at the stand-in alone
    scene = Scene(api, condition=True)
    asked = api.stand_in.asked
    writes = [sum(method == "PATCH" for method, *_ in asked)]
    for at in (0.0, 5.0, 100.0, 299.0, 300.0, 305.0):
        scene.channel.pulse(NOW + at, ())
        writes.append(sum(method == "PATCH" for method, *_ in asked) - writes[0])
    assert writes[1:] == [1, 1, 1, 1, 2, 2]
    scene.clear()


def test_without_its_word_there_is_no_condition(api: Api) -> None:
    """Opt-in: it takes the right to write the status of nodes."""
    scene = Scene(api)
    scene.firing = [message()]
    scene.channel.pulse(NOW, ())
    assert CONDITION not in scene.conditions()
    scene.clear()


def test_a_missing_right_is_kept_and_a_silent_api_tried_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Event was lost while the control plane restarted."""
    kinds = {0: TryLater, 403: Rejected, 422: BadMessage, 429: TryLater, 500: TryLater, 409: TryLater}
    assert {code: type(outcome(ClusterError("x", code))) for code in kinds} == kinds
    assert "components/events" in str(outcome(ClusterError("forbidden", 403)))
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(TryLater, match="no Kubernetes here"):
        Kubernetes("kubernetes", api.node(), list).send([owed(message())], NOW)


@pytest.mark.parametrize(
    ("pages", "want"),
    [([], ("False", "NoPageFiring")), ([message()], ("True", "GpuLost")),
     ([message(), message(rule="xid-gpu", alertname="XidGpu")], ("True", "GpuLost"))],
)
def test_what_the_condition_says(pages: Sequence[AlertMessage], want: tuple[str, str]) -> None:
    """Its reason is the oldest page's; a reason is one word."""
    told = condition(pages)
    assert (told["status"], told["reason"]) == want


def test_configured() -> None:
    """Pages and tickets unless `match` says otherwise; the node as Kubernetes knows it."""
    config = Config(notify=(NotifyConfig(kubernetes=KubernetesConfig(condition=True)),))
    needs = Needs(list, lambda: True, node="gpu-17")
    (route,) = build_channels(config, needs, channel_names(config, {}))
    assert route.channel.name == "kubernetes"
    assert route.wants.severities == {"page", "ticket"}
