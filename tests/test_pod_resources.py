"""Which pod has which GPU, by the kubelet's socket; and that an alert of a GPU names the pods that are on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.config import Config
from agent.daemon import discoveries
from agent.model import Batch, Event, FoundEngine, Gap, GpuFacts, PodFacts, Sample
from agent.node import Node, Setup
from agent.signals import Target
from agent.sources.pod_resources import Given, NoAnswer, PodResourcesSource, call, may_ask, pods_in, uuids
from rules import severity_of
from tests.hardware.cases import DATA
from tests.kubelet_socket import ANSWERS, PODS, KubeletSocket
from tests.scenes import SLO, T0, built_in

CASE = next(case for case in map(json.loads, (DATA / "cases-kubernetes.jsonl").read_text().splitlines())
            if case["id"] == "C092")
HOLDERS = (PodFacts("llm", "vllm-0", gpus=("GPU-a", "GPU-b")), PodFacts("dev", "shared-1", gpus=("GPU-c",)))


def read(path: Path) -> Batch:
    """One read of a source that has asked nothing yet."""
    return PodResourcesSource(path).read(T0)


def test_who_has_which_gpu(tmp_path: Path) -> None:
    """From messages that another library wrote; a GPU that is shared by time is one GPU."""
    with KubeletSocket(tmp_path / "kubelet.sock") as kubelet:
        source = PodResourcesSource(kubelet.path)
        batch = source.read(T0)
        assert (batch.error, batch.pods) == (None, HOLDERS)
        assert batch.readings == (Sample("gpus_allocatable", "kubelet", 7.0, T0),)
        assert source.note == "2 pods hold GPUs; the kubelet gives: 7 GPUs"
        again = source.read(T0 + 5.0)  # not asked anew within 15 s: what it said stands, and pods are not told again
        assert (again.pods, again.readings) == (None, (Sample("gpus_allocatable", "kubelet", 7.0, T0 + 5.0),))


WHOLE = "GPU-5d4f12ab-0000-4000-8000-00000000abcd"


@pytest.mark.parametrize(("given", "want"), [
    (WHOLE, WHOLE), (f"{WHOLE}::3", WHOLE), (f"{WHOLE}-3", WHOLE), (f"MIG-{WHOLE}/7/0", WHOLE),
    ("MIG-5d4f12ab-0000-5000-8000-00000000abcd", "MIG-5d4f12ab-0000-5000-8000-00000000abcd"),
    ("MIG-5d4f12ab-0000-5000-8000-00000000abcd::1", "MIG-5d4f12ab-0000-5000-8000-00000000abcd"),
    ("nvidia0", "nvidia0"), ("nvidia0/gi7", "nvidia0"), ("nvidia12/vgpu1", "nvidia12"),
])  # fmt: skip
def test_what_device_plugins_call_a_gpu(given: str, want: str) -> None:
    """NVIDIA/dcgm-exporter#92 and others: of a shared GPU, and on GKE, no alert named the pod."""
    assert uuids([Given("nvidia.com/gpu", (given, given))]) == (want,)


def test_a_long_answer_comes_whole(tmp_path: Path) -> None:
    """A node of 3000 pods: more than HTTP/2's first window of 65,535 bytes."""
    with KubeletSocket(tmp_path / "kubelet.sock", {**ANSWERS, "List": PODS * 1000}) as kubelet:
        answer = call(kubelet.path, "List")
        assert len(answer) == 1000 * len(PODS) > 2 * 65535
        assert len(pods_in(answer)) == 3000


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not one whole message"),
        (b"\0\0\0\0\x09abc", "not one whole message"),
        (b"\1\0\0\0\0", "not one whole message"),  # compressed, which nobody asked for
        (b"\0\0\0\0\2\x0a\x7f", "no protobuf message"),  # a field of 127 bytes, of which none came
        (b"\0\0\0\0\1\x0f", "no protobuf message"),  # a form that there is not
        (b"\0\0\0\0\1\x80", "cut off"),
        (b"\0\0\0\0\x0b" + b"\x80" * 11, "cut off"),  # a number without an end
    ],
)
def test_nonsense_is_said(tmp_path: Path, raw: bytes, says: str) -> None:
    """And is a Gap, not "no pod has a GPU"."""
    with KubeletSocket(tmp_path / "kubelet.sock", raw=raw) as kubelet:
        batch = read(kubelet.path)
    assert batch.pods is None
    assert says in (batch.error or "")
    assert isinstance(batch.readings[0], Gap)


def test_an_old_kubelet_tells_its_pods_all_the_same(tmp_path: Path) -> None:
    """Before 1.23 it did not tell what it could give."""
    with KubeletSocket(tmp_path / "kubelet.sock", {"List": PODS}) as kubelet:
        batch = read(kubelet.path)
    assert (batch.error, batch.pods) == (None, HOLDERS)
    (gap,) = batch.readings
    assert isinstance(gap, Gap)
    assert gap.why == "the kubelet says no (gRPC status 12): unknown method"


def test_a_kubelet_that_is_not_there_or_hangs(tmp_path: Path) -> None:
    """It restarts, and its socket is gone; or it accepts and says nothing."""
    assert "No such file" in (read(tmp_path / "nothing.sock").error or "")
    with KubeletSocket(tmp_path / "kubelet.sock", silent=True) as kubelet, pytest.raises(NoAnswer, match="timed out"):
        call(kubelet.path, "List", deadline_s=0.2)


def test_it_is_asked_where_we_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is root's: an agent without it is not told of an error each 15 s."""
    assert not may_ask(tmp_path / "nothing.sock")
    with KubeletSocket(tmp_path / "kubelet.sock") as kubelet:
        assert may_ask(kubelet.path)
    monkeypatch.setattr("agent.daemon.may_ask", lambda: True)
    assert [source.name for source in discoveries(Config(), {})] == ["discovery", "pod-resources"]


# ---- the node ----

GPUS = tuple(GpuFacts(f"GPU-{letter}", index, "H200", f"0000:{index + 1:02x}:00")
             for index, letter in enumerate("abcdefgh"))


class Told:
    """A node that is told what it has, every 15 s."""

    def __init__(self, *targets: Target) -> None:
        wanted = ("xid-gpu", "gpu-allocatable", "gpu-temperature", "engine-down")
        rules = tuple(built_in()[rule] for rule in wanted)
        self.node = Node(Setup("gpu-17", 15.0, SLO, targets, rules, severity_of))
        self.at = T0
        self.node.take(Batch("nvml", T0, 0.0, gpus=GPUS))

    def go(self, for_s: float, allocatable: int, *, events: tuple[Event, ...] = (),
           pods: tuple[PodFacts, ...] | None = None) -> list[tuple[str, str]]:
        """What fired and resolved meanwhile."""
        seen: list[tuple[str, str]] = []
        for number in range(round(for_s / 15.0)):
            self.node.take(Batch("nvml", self.at, 0.0, gpus=GPUS))
            reading = Sample("gpus_allocatable", "kubelet", float(allocatable), self.at)
            self.node.take(Batch("pod-resources", self.at, 0.0, (reading,), pods=pods))
            opened = Sample("kernel_log_open", "kernel_log", 1.0, self.at)
            self.node.take(Batch("kernel_log", self.at, 0.0, (opened,), events=events if number == 0 else ()))
            seen += [(change.alert.rule, change.kind) for change in self.node.step(self.at, 15.0)
                     if change.kind in ("firing", "resolved")]
            self.at += 15.0
        return seen


def test_an_alert_names_the_pod_on_its_gpu_and_a_plugin_s_restart_repairs_nothing() -> None:
    """C092: Xid 79 on GPU-a, whose pod's phase stays Running; 7 of 8 are allocatable, and 8 again after a restart."""
    given = CASE["input"]
    uuid, phase = given["pod"]["gpu"], given["pod"]["phase"]
    holders = (PodFacts("llm", "vllm-0", gpus=(uuid,)), PodFacts("llm", "vllm-1", gpus=("GPU-b",)))
    told = Told()
    told.node.take(Batch("pods", T0, 0.0, pods=(PodFacts("llm", "vllm-0", "u-1", phase),
                                                PodFacts("llm", "vllm-1", "u-2", phase))))
    assert told.go(60.0, given["node_allocatable_gpu_before"], pods=holders) == []
    fell = Event("xid", GPUS[0].bdf, 79, told.at, told.at)
    assert given["event"] == f"Xid 79 on {uuid}"

    assert told.go(120.0, given["after"], events=(fell,), pods=holders) == [
        ("xid-gpu", "firing"), ("gpu-allocatable", "firing")]
    firing = {message.labels["rule"]: message for message in told.node.firing()}
    page, capacity = firing["xid-gpu"], firing["gpu-allocatable"]
    assert (page.annotations["namespace"], page.annotations["pod"]) == ("llm", "vllm-0")
    assert "Affected: pod llm/vllm-0 (Running)" in page.annotations["description"]
    assert not {"pod", "namespace"} & page.labels.keys()
    assert (capacity.severity, capacity.labels["subject"]) == ("ticket", "gpu-17")
    assert "7 of 8 GPUs" in capacity.annotations["summary"]
    assert "pod" not in capacity.annotations

    assert told.go(180.0, given["node_allocatable_gpu_before"], pods=holders) == [("gpu-allocatable", "resolved")]
    assert [message.labels["rule"] for message in told.node.firing()] == ["xid-gpu"]


def test_a_node_whose_kubelet_gives_no_gpus_lacks_none() -> None:
    """Dynamic resource allocation: no device plugin, and 0 of them allocatable from the start."""
    told = Told()
    assert told.go(120.0, 0) == []
    (row,) = [row for row in told.node.check()["signals"] if row["rule"] == "gpu-allocatable"]
    assert (row["state"], row["why"]) == ("N/A", "the kubelet gives no GPUs to pods here")


@pytest.mark.parametrize(
    ("holders", "want"),
    [
        ((PodFacts("llm", "vllm-0", gpus=("GPU-a", "GPU-b")),), {"pod": "vllm-0", "namespace": "llm"}),
        ((PodFacts("llm", "vllm-0", gpus=("GPU-a",)), PodFacts("llm", "other", gpus=("GPU-b",))), {}),  # whose is it?
        ((PodFacts("llm", "vllm-0", gpus=("GPU-h",)),), {}),
    ],
)
def test_an_engine_that_is_configured_is_in_the_pod_that_alone_has_its_gpus(
    holders: tuple[PodFacts, ...], want: Mapping[str, str]
) -> None:
    """Without access to the API, by the kubelet alone."""
    told = Told(Target("llama", ("llama",), SLO, gpus=(0, 1), address="10.0.0.7:8000"))
    told.go(15.0, 8, pods=holders)
    for number in range(4):
        at = told.at + number * 15.0
        down = (Sample("down", "llama", 1.0, at), Sample("rung", "llama", 0.0, at))
        told.node.take(Batch("engine:llama", at, 0.0, down))
        told.node.learned.targets["llama"] = {"first_seen_at": T0 - 9999.0, "ever_up": True}
        told.node.step(at, 15.0)
    (page,) = [message for message in told.node.firing() if message.labels["rule"] == "engine-down"]
    assert {key: page.annotations[key] for key in ("pod", "namespace") if key in page.annotations} == want


def test_a_pod_on_gke_is_named_by_its_device() -> None:
    """The kubelet told nvidia0, the driver a UUID: the alert on the GPU named no pod."""
    told = Told()
    told.go(15.0, 8, pods=(PodFacts("llm", "vllm-0", gpus=("nvidia0",)), PodFacts("llm", "b", gpus=("nvidia9",))))

    assert [pod.name for pod in told.node.pods_of("GPU-a")] == ["vllm-0"]
    assert told.node.pods_of("GPU-b") == []


def test_gpus_of_an_engine_in_a_pod() -> None:
    """By the kubelet's word, else by the processes that compute on them."""
    told = Told()
    seen = FoundEngine("10.0.0.7:8000", "http://10.0.0.7:8000", "vllm", "", 0, (100, 101), {101: 0}, pod="u-1")
    told.node.see([seen], T0)
    told.node.add_target(Target("10.0.0.7:8000", (), address="10.0.0.7:8000"))
    on = tuple(GpuFacts(gpu.uuid, gpu.index, "H200", gpu.bdf, pids=(101,) if gpu.index == 5 else ()) for gpu in GPUS)
    told.node.take(Batch("nvml", T0, 0.0, gpus=on))

    def gpus(at: float) -> tuple[int, ...]:
        told.node.step(at, 15.0)
        return told.node.scene.targets["10.0.0.7:8000"].gpus

    assert gpus(T0) == (5,)
    told.node.take(Batch("pods", T0, 0.0, pods=(PodFacts("llm", "vllm-0", "u-1", "Running"),)))
    told.node.take(Batch("pod-resources", T0, 0.0, pods=HOLDERS))
    assert gpus(T0 + 15.0) == (0, 1)
