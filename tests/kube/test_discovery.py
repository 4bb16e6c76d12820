"""Engines of this node found as pods: their subjects through restarts and rollouts, and what an alert says of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.config import Config
from agent.daemon import adopt, discoveries
from agent.model import Batch, FoundEngine, PodFacts
from agent.notifiers.kubernetes import CONDITION
from agent.sources.pods import PodsSource, engine_in, kept, workload_of
from drills.cluster import Cluster, Object, has_condition, path_of, pods_path
from tests.agent_process import AgentProcess
from tests.engine_pages import PAGES
from tests.kube.scene import Api
from tests.page_server import PageServer
from tests.receiver import wait_until
from tests.scenes import T0
from tests.test_loop import Life, Scripted

LONG_S = 60.0
GPU = {"limits": {"nvidia.com/gpu": "4"}}


def pod(container: Mapping[str, Any] | None = None, *, labels: Mapping[str, str] | None = None,
        **annotations: str) -> dict[str, Any]:
    """A pod as the API tells it. `port="8000"`: its annotation tocsin.dev/port."""
    return {"metadata": {"namespace": "llm", "name": "a-0", "uid": "u-1", "labels": dict(labels or {}),
                         "annotations": {f"tocsin.dev/{name}": value for name, value in annotations.items()}},
            "spec": {"containers": [{"name": "c", "image": "example.invalid/x", **(container or {})}]}}


HTTP = {"ports": [{"name": "grpc", "containerPort": 9000}, {"name": "http", "containerPort": 8080}]}


@pytest.mark.parametrize(
    ("story", "told", "want"),
    [
        ("its own word", pod(engine="sglang"), ("sglang", 30000)),
        ("its own word, with a port", pod(engine="auto", port="9001"), ("auto", 9001)),
        ("a port alone is its word too", pod(port="9001"), ("auto", 9001)),
        ("a port that is none", pod(port="0"), None),
        ("it says that it is none", pod({"command": ["vllm", "serve", "m"]}, engine="false"), None),
        ("a command line", pod({"command": ["vllm", "serve"], "args": ["m", "--port=8123"]}), ("vllm", 8123)),
        ("an annotation corrects it", pod({"command": ["vllm", "serve", "m"]}, port="8001"), ("vllm", 8001)),
        ("an image", pod({"image": "docker.io/vllm/vllm-openai:v0.32@sha256:aa", **HTTP}), ("vllm", 8080)),
        ("an image of a registry with a port", pod({"image": "r:5000/lmsysorg/sglang", **HTTP}), ("sglang", 8080)),
        ("the probe knows the port", pod({"image": "vllm/vllm-openai", **HTTP, "readinessProbe": {"httpGet": {
            "path": "/health", "port": "grpc"}}}), ("vllm", 9000)),
        ("a label", pod(HTTP, labels={"app": "vllm"}), ("vllm", 8080)),
        ("a Ray worker of an engine serves nothing", pod({"image": "vllm/vllm-openai", "command": ["ray"]}), None),
        ("a worker of a LeaderWorkerSet", pod({"command": ["vllm", "serve", "m"]}, labels={
            "leaderworkerset.sigs.k8s.io/worker-index": "1"}), None),
        ("its leader", pod({"command": ["vllm", "serve", "m"]}, labels={
            "leaderworkerset.sigs.k8s.io/worker-index": "0"}), ("vllm", 8000)),
        ("a GPU and a well-known port: its page decides", pod({
            "ports": [{"containerPort": 8000}], "resources": GPU}), (None, 8000)),
        ("a web shop on port 8000", pod({"ports": [{"containerPort": 8000}]}), None),
        ("a training job", pod({"ports": [{"containerPort": 29500}], "resources": GPU}), None),
        ("Tocsin itself", pod(HTTP, labels={"app.kubernetes.io/name": "tocsin", "app": "vllm"}), None),
        ("nothing at all", {"metadata": {"namespace": "x", "name": "y", "uid": "z"}}, None),
    ],
)  # fmt: skip
def test_which_pod_is_an_engine(story: str, told: dict[str, Any], want: tuple[str | None, int] | None) -> None:
    """And where it listens. Only what says so is ever asked: a GET into NCCL's port broke the start of a job."""
    for one in (told, kept(told)):  # what is kept in memory is enough to tell
        found = engine_in(one)
        assert (None if found is None else (found.kind, found.port)) == want, story


@pytest.mark.parametrize(
    ("owner", "labels", "want"),
    [
        (("ReplicaSet", "vllm-7d9f8"), {"pod-template-hash": "7d9f8"}, "llm/vllm"),
        (("StatefulSet", "vllm"), {}, "llm/vllm"),
        (None, {}, "llm/a-0"),
        (("Node", "n1"), {}, "llm/a-0"),  # the kubelet's own
    ],
)
def test_whose_pod_it_is(owner: tuple[str, str] | None, labels: Mapping[str, str], want: str) -> None:
    """Through a rollout it stays the same workload, and so the same subject."""
    told = pod(labels=labels)
    if owner is not None:
        told["metadata"]["ownerReferences"] = [{"kind": owner[0], "name": owner[1], "controller": True}]
    assert workload_of(told) == want


def test_who_looks_for_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's KUBECONFIG made a laptop list the pods of a cluster."""
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    assert [source.name for source in discoveries(Config(), {})] == ["discovery"]
    assert [source.name for source in discoveries(Config(), {"NODE_NAME": "n1"})] == ["discovery", "pods"]
    assert discoveries(Config(discover=False), {"NODE_NAME": "n1"}) == []
    monkeypatch.delenv("KUBECONFIG")
    assert [source.name for source in discoveries(Config(), {"NODE_NAME": "n1"})] == ["discovery"]


# ---- subjects ----


class Pods:
    """What the API tells of this node's pods, as the source gives it."""

    def __init__(self) -> None:
        self.here: dict[str, tuple[str, str, bool]] = {}  # uid -> (phase, address, stopping)

    def read(self, now: float) -> Batch:
        found = tuple(FoundEngine(at, f"http://{at}", "vllm", "its label app", 0, pod=uid, workload="llm/vllm")
                      for uid, (phase, at, _) in self.here.items() if phase == "Running")
        pods = tuple(PodFacts("llm", f"vllm-{uid}", uid, phase, stopping)
                     for uid, (phase, _, stopping) in self.here.items())
        return Batch("pods", now, 0.0, found=found, pods=pods)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Pods, Life]]:
    """An agent that is told of pods, and reads them at addresses where nobody answers."""
    pods, life = Pods(), Life(tmp_path)
    life.targets, life.rules = (), ("engine-down", "engine-stopped")
    agent = life.start(Scripted("pods", pods.read))
    agent.adopt = lambda found: adopt(Config(), found, None)
    yield pods, life
    life.kill()


def named(life: Life) -> dict[str, str]:
    """Subject -> address, as the agent reads them now."""
    assert life.agent is not None
    return {target.name: target.address for target in life.agent.node.setup.targets}


def test_a_pod_keeps_its_number_and_a_new_one_gets_the_lowest_that_is_free(scene: tuple[Pods, Life]) -> None:
    """The alert of a replica was called by the name of a pod, and none knew it again after the next rollout."""
    pods, life = scene
    pods.here = {"u-1": ("Running", "127.0.0.1:1", False), "u-2": ("Running", "127.0.0.1:2", False)}
    life.tick()
    assert named(life) == {"llm/vllm#0": "127.0.0.1:1", "llm/vllm#1": "127.0.0.1:2"}
    pods.here["u-1"] = ("Running", "127.0.0.1:1", True)  # a rollout: the old one goes while the new one comes
    pods.here["u-3"] = ("Running", "127.0.0.1:3", False)
    life.tick()
    assert named(life)["llm/vllm#2"] == "127.0.0.1:3"
    del pods.here["u-1"]
    pods.here["u-4"] = ("Running", "127.0.0.1:4", False)
    life.tick()
    assert named(life) == {
        "llm/vllm#0": "127.0.0.1:4", "llm/vllm#1": "127.0.0.1:2", "llm/vllm#2": "127.0.0.1:3"}  # fmt: skip


def test_a_pod_that_was_told_to_go_is_stopped_and_not_down(scene: tuple[Pods, Life]) -> None:
    """A scale-down paged at night. What comes back under its number starts; what does not is let go after 10 m."""
    pods, life = scene
    assert life.agent is not None
    pods.here = {"u-1": ("Running", "127.0.0.1:1", True)}
    life.agent.node.learned.targets["llm/vllm#0"] = {"first_seen_at": T0 - 9999.0, "ever_up": True}
    for _ in range(2):
        life.tick(4)
        assert life.fired() == [("engine-stopped", "llm/vllm#0")]
        pods.here = {}  # and then it is gone
        (told,) = life.agent.firing()
        assert "its pod was told to go" in told.annotations["summary"]
    life.tick(130)
    assert named(life) == {}
    ended = [row for row in life.agent.transitions(-1) if row["state"] == "resolved"]
    assert [(row["rule"], row["why"]) for row in ended] == [("engine-stopped", "subject removed")]


def test_a_pod_that_failed_was_told_nothing(scene: tuple[Pods, Life]) -> None:
    """The kubelet evicted it for a full disk: nobody asked it to stop, and it is down."""
    pods, life = scene
    assert life.agent is not None
    pods.here = {"u-1": ("Running", "127.0.0.1:1", False)}
    life.tick()
    life.agent.node.learned.targets["llm/vllm#0"]["ever_up"] = True
    pods.here = {"u-1": ("Failed", "127.0.0.1:1", False)}
    life.tick(5)
    assert life.fired() == [("engine-down", "llm/vllm#0")]
    (alert,) = life.agent.firing()
    assert (alert.annotations["namespace"], alert.annotations["pod"]) == ("llm", "vllm-u-1")
    assert "Affected: pod llm/vllm-u-1 (Failed)" in alert.annotations["description"]
    assert not {"pod", "namespace"} & alert.labels.keys()


def test_an_api_that_is_silent_ends_nothing(scene: tuple[Pods, Life]) -> None:
    """The control plane was down for an hour, and every engine of the node was forgotten."""
    pods, life = scene
    pods.here = {"u-1": ("Running", "127.0.0.1:1", False)}
    life.tick()
    told = pods.read
    pods.read = lambda now: Batch("pods", now, 0.0, error="no answer")  # type: ignore[method-assign]
    life.tick(130)
    assert list(named(life)) == ["llm/vllm#0"]
    pods.read = told  # type: ignore[method-assign]


# ---- with an API ----


def test_the_pods_of_this_node_and_no_other(api: Api) -> None:
    """Through a real watch: an engine appears, is read by what the API says of it, and goes."""
    node, other = api.node(), api.node()
    with PageServer(PAGES["vllm-0.32"](600)) as page:
        port = page.url.rpartition(":")[2]
        own = api.pod("vllm-a", node=node, annotations={"tocsin.dev/port": port}, finalizers=["tocsin.dev/test"])
        api.pod("vllm-b", node=other, annotations={"tocsin.dev/port": port})
        api.pod("shop", node=node, labels={"app": "shop"}, annotations={"tocsin.dev/engine": "false"})
        source = PodsSource(node, again_s=0.2)
        try:
            wait_until(lambda: source.read(T0).found is not None, LONG_S, "the first list")
            batch = source.read(T0)
            assert batch.error is None
            assert sorted(one.name for one in batch.pods or ()) == ["shop", "vllm-a"]
            (engine,) = batch.found or ()
            assert (engine.url, engine.kind, engine.pod) == (page.url, "vllm", own["metadata"]["uid"])
            assert engine.workload == f"{api.namespace}/vllm"
            api.cluster.delete_pod(api.namespace, "vllm-a", own["metadata"]["uid"])
            wait_until(lambda: [one.stopping for one in source.read(T0).pods or () if one.name == "vllm-a"] == [True],
                       LONG_S, "that it is to stop")
            api.gone(api.cluster.pod(api.namespace, "vllm-a") or {})
            wait_until(lambda: not source.read(T0).found, LONG_S, "that it is gone")
        finally:
            source.close()


def test_a_failure_is_said_and_it_is_tried_again(api: Api) -> None:
    """A right was taken away: nothing said so, and the list stood still for ever."""
    said: list[int] = []
    stop = threading.Event()
    node = api.node()
    api.pod("vllm-a", node=node)
    paths = iter(["api/v9/pods", pods_path(None)])

    class Mended(Cluster):
        """Asked for something that is not there, and then for pods."""

        def all(self, path: str, *, labels: str = "", fields: str = "") -> tuple[list[Object], str]:
            return super().all(next(paths), labels=labels, fields=fields)

    with Mended() as cluster:
        for seen in cluster.follow("", stop, fields=f"spec.nodeName={node}", again_s=0.05, keep=kept,
                                   failed=lambda error: said.append(error.code)):
            assert [one["metadata"]["name"] for one in seen.values()] == ["vllm-a"]
            stop.set()
    assert said == [404]


@pytest.mark.heavy
def test_the_agent_of_a_node_from_a_pod_to_an_event_of_it(api: Api, tmp_path: Path) -> None:
    """The real daemon: it finds the pod's engine, the engine dies, `kubectl describe node` says so until it is back."""
    node, of = api.node(), f"{api.namespace}/vllm#0"
    if not api.has_namespace("default"):
        api.make_namespace("default", opted_in=False)

    def events() -> dict[str, Object]:
        found, _ = api.cluster.all(path_of("", "v1", "events", "default"), fields=f"involvedObject.uid={node}")
        return {one["reason"]: one for one in found}

    def pages() -> bool:
        return has_condition(api.cluster.node(node) or {}, CONDITION)

    config = {"poll": "1s", "nvml": "off", "discover": True, "notify": [{"kubernetes": {"condition": True}}],
              "rules": {"override": {"engine-down": {"for": "2s", "keep": "2s"}}}}  # fmt: skip
    with PageServer(PAGES["vllm-0.32"](600)) as page, \
            AgentProcess(tmp_path / "agent", config, {"NODE_NAME": node}) as agent:
        api.pod("vllm-a", node=node, annotations={"tocsin.dev/port": page.url.rpartition(":")[2]})
        wait_until(lambda: any((one["rule"], one["subject"], one["state"]) == ("engine-down", of, "OK")
                               for one in agent.ask("/check")["signals"]), LONG_S, "that its engine is read")
        assert not pages()
        page.stop()
        wait_until(pages, LONG_S, "the condition")
        wait_until(lambda: "EngineDown" in events(), LONG_S, "the Event")
        told = events()["EngineDown"]
        assert (told["type"], told["involvedObject"]["name"]) == ("Warning", node)
        assert of in told["message"]
        page.start()
        wait_until(lambda: "EngineDownResolved" in events() and not pages(), LONG_S, "its end")
        assert rss_mib(agent.pid()) < 128.0 - 16.0  # the container's limit; its volume in memory counts, too
    for event in events().values():
        api.cluster.ask("DELETE", path_of("", "v1", "events", "default", event["metadata"]["name"]))


def rss_mib(pid: int) -> float:
    """The memory of a process."""
    (kib,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(kib) / 1024.0
