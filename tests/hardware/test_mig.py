"""A GPU in MIG slices: each instance is a subject of its own, and what is the whole GPU's stays the GPU's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.backtest import Row, gpu_batch
from agent.hardware.history import History, findings
from agent.hardware.lines import line_of
from agent.model import Alert, Batch, Event, FoundEngine, Gap, PodFacts, Sample, Slo, Why
from agent.node import Learned, Node, Setup
from agent.record import gpu_row
from agent.show import gpus_report, plain
from agent.signals import Target, alert_labels
from agent.sources.kernel_log import told_by
from rules import severity_of
from tests.fake_nvml.reader import Reader, Seen
from tests.hardware.stories import GIB, POLL_S, T0, Story, Tell, gpus, xid
from tests.scenes import built_in

PROFILE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
UUIDS = {1: "MIG-11111111", 2: "MIG-22222222", 5: "MIG-55555555"}


def instance(gi: int, ci: int = 0, used: float = 4.0, **more: Any) -> dict[str, Any]:
    """A slice of 10 GiB, of which so many GiB are used."""
    return {"gi": gi, "ci": ci, "uuid": UUIDS[gi] + (f"-{ci}" if ci else ""), "name": PROFILE,
            "memory": {"total": 10 * GIB, "used": int(used * GIB)}, **more}


def sliced(*instances: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """What a GPU in MIG mode tells of itself: no utilization."""
    return {"mig": 1, "utilization": None, "mig_instances": list(instances), **more}


def node(gpu2: Mapping[str, Any]) -> dict[str, Any]:
    """Three H100, of which the third is sliced."""
    return gpus(gpu2=gpu2)


THREE = sliced(instance(1), None, instance(2), instance(5))


# --- what NVML tells -------------------------------------------------------------------------------------------------

Start = Callable[[Mapping[str, Any]], Reader]


@pytest.fixture
def start(nvml: Reader, tmp_path: Path) -> Start:
    """Begin a story of the source alone."""

    def begin(scenario: Mapping[str, Any], deadline_s: float = 5.0) -> Reader:
        nvml.begin(scenario, tmp_path, deadline_s)
        return nvml

    return begin


def of(seen: Seen, uuid: str) -> dict[str, float | Why]:
    """What one subject tells: numbers, or the codes of Gaps."""
    return {r.name: r.value if isinstance(r, Sample) else r.code for r in seen.batch.readings if r.subject == uuid}


def test_what_an_instance_tells(start: Start) -> None:
    """Its own memory under its own UUID; what NVML refuses on such a handle is not asked of it."""
    reader = start(node(sliced(instance(1), None, instance(5, ci=1, used=9.5, processes={"41": 1, "7": 2}))))
    first = reader.read()
    second = reader.read()

    for seen in (first, second):
        assert of(seen, "MIG-11111111") == {
            "gpu_mem_used": 4.0 * GIB, "gpu_mem_total": 10.0 * GIB, "gpu_mem_free": 6.0 * GIB,
            "gpu_util": Why.NOT_SUPPORTED}
        assert of(seen, "MIG-55555555-1")["gpu_mem_used"] == 9.5 * GIB
        assert [(m.uuid, m.gi, m.ci, m.name) for m in seen.gpu(2).instances] == [
            ("MIG-11111111", 1, 0, PROFILE), ("MIG-55555555-1", 5, 1, PROFILE)]
        assert seen.gpu(0).instances == ()
        assert seen.value(2, "gpu_mig") == 1.0
        assert seen.value(2, "gpu_temp_c") == 61.0
    assert [m.pids for m in first.gpu(2).instances] == [(), (7, 41)]
    assert first.gpu(2).pids == (7, 41)
    assert reader.calls("nvmlDeviceGetUtilizationRates", 2) == 1  # the whole GPU's; once, for it does not tell
    assert reader.calls("nvmlDeviceGetGpuInstanceId", 2) == 2  # once an instance
    assert reader("processes") == {41: 1, 7: 2}


def test_instances_that_come_and_go(start: Start) -> None:
    """A slice is destroyed and another is made in its slot: which one a handle is, is asked at each read."""
    reader = start(node(sliced(instance(1), instance(2))))
    reader.read()
    reader.play(node(sliced(instance(5), instance(2))))
    seen = reader.read()
    assert [m.uuid for m in seen.gpu(2).instances] == ["MIG-55555555", "MIG-22222222"]
    assert of(seen, "MIG-11111111") == {}
    reader.play(node({"mig": 0}))
    assert reader.read().gpu(2).instances == ()


@pytest.mark.parametrize(("fault", "code"), [
    ({"errors": {"nvmlDeviceGetMigDeviceHandleByIndex": 4}}, Why.ERROR),
    ({"lost": 1}, Why.LOST),
    ({"hangs": {"nvmlDeviceGetMigDeviceHandleByIndex": True}}, Why.HUNG),
])
def test_instances_that_cannot_be_read(nvml: Reader, tmp_path: Path, fault: dict[str, Any], code: Why) -> None:
    """What cannot be asked is a Gap with its reason for each slice, and no slice has ended."""
    nvml.begin(node(THREE), tmp_path, 0.6)
    nvml.read()
    nvml.play(node({**THREE, **fault}))
    first, second = nvml.read(), nvml.read()

    for seen in (first, second):
        assert [m.gi for m in seen.gpu(2).instances] == [1, 2, 5]
        assert of(seen, "MIG-55555555")["gpu_mem_used"] is code
    assert {second.codes(i) == {"value"} for i in (0, 1)} == {True}
    nvml.play(node(THREE))
    if code is Why.ERROR:
        problems = [f.why for f in second.gpu(2).found if f.name == "gpu_mig_instances"]
        assert problems == ["its MIG instances cannot be listed: Insufficient Permissions"]
        assert of(nvml.read(), "MIG-55555555")["gpu_mem_used"] == 4.0 * GIB


def test_one_instance_s_memory_that_fails_costs_itself(start: Start) -> None:
    """One slice's query fails: a Gap of that slice."""
    bad = instance(2, errors={"nvmlDeviceGetMemoryInfo": 999})
    seen = start(node(sliced(instance(1), bad))).read()
    assert of(seen, "MIG-22222222")["gpu_mem_used"] is Why.ERROR
    assert of(seen, "MIG-11111111")["gpu_mem_used"] == 4.0 * GIB
    (gap,) = (r for r in seen.batch.readings if r.subject == "MIG-22222222" and r.name == "gpu_mem_used")
    assert isinstance(gap, Gap)
    assert "MemoryInfo" in gap.why


# --- a mig gpu, as a story -------------------------------------------------------------------------------------------


def test_a_mig_gpu(tell: Tell) -> None:
    """A contained error of one slice: that slice's alert, by its UUID; the card and the other slices are well."""
    story = tell(node(THREE), poll_s=60.0)
    assert story.run(300) == []
    assert [g["verdict"] for g in story.node.gpus_report()["gpus"]] == ["HEALTHY"] * 6
    contained = xid(94, story.at_s, instance=" GPU-I:05", text="pid=7194, Contained: CE User Channel (0x9). RST: No")
    assert story.run(30, contained) == [("firing", "xid-app")]

    (alert,) = story.node.book.alerts.values()
    assert alert.subject == "MIG-55555555"
    assert (alert.labels["gpu"], alert.labels["mig"]) == (story.verdict(2)["subject"], "MIG-55555555")
    assert "MIG 5/0 of GPU 2 on gpu-17" in alert.annotations["summary"]
    assert f"MIG 5/0 of GPU 2 (MIG-55555555, {PROFILE})" in alert.annotations["description"]
    hurt = story.verdict(2, (5, 0))
    assert (hurt["verdict"], hurt["code"]) == ("WATCH", "xid.94")
    assert "restart the application" in hurt["do"]
    assert {story.verdict(2, mig)["verdict"] for mig in (None, (1, 0), (2, 0))} == {"HEALTHY"}
    assert story.node.gpus_report()["verdict"] == "ticket"
    assert story.run(3700) == [("resolved", "xid-app")]
    assert story.verdict(2, (5, 0))["verdict"] == "HEALTHY"


@pytest.mark.parametrize(("story_of", "number", "text", "action"), [
    ("it was not contained", 95, "pid=7062, Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No", "reset"),
    ("the driver's word", 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "reset"),
])
def test_what_asks_for_a_reset_is_the_gpu_s(tell: Tell, story_of: str, number: int, text: str, action: str) -> None:
    """No slice can be reset alone: the card's alert names the slice, and every slice of it has to be drained."""
    story = tell(node(THREE))
    story.run(30)
    fired = story.run(30, xid(number, story.at_s, instance=" GPU-I:05", text=text))
    assert [state for state, _ in fired] == ["firing"], story_of
    whole = story.verdict(2)
    assert (whole["verdict"], whole["code"]) == ("DRAIN", f"xid.{number}")
    assert "MIG instance 5" in whole["text"]
    for gi in (1, 2, 5):
        of_it = story.verdict(2, (gi, 0))
        assert (of_it["verdict"], of_it["code"]) == ("DRAIN", f"xid.{number}")
        assert of_it["text"].startswith("its GPU 2: Xid ")
    assert {story.verdict(i)["verdict"] for i in (0, 1)} == {"HEALTHY"}
    assert action in whole["do"]
    story.reader.play(node({**THREE, "energy_mj": 10}))  # it was reset
    assert [state for state, _ in story.run(60)] == ["resolved"]


def test_a_hot_gpu_is_one_alert(tell: Tell) -> None:
    """Temperature, ECC, links are the card's: seven slices do not make seven alerts of it."""
    story = tell(node(THREE))
    story.run(30)
    story.reader.play(node({**THREE, "temperature": 91, "ecc_uncorrected": 2}))
    assert sorted(story.run(120)) == [("firing", "gpu-ecc-uncorrected"), ("firing", "gpu-temperature")]
    assert {a.subject for a in story.node.book.alerts.values()} == {story.verdict(2)["subject"]}
    assert story.verdict(2, (1, 0))["verdict"] == "WATCH"


def test_a_full_instance_on_a_half_empty_gpu(tell: Tell) -> None:
    """The slice has no memory left while the card shows 70 of 80 GiB as it did before: the engine dies all the same."""
    story = tell(node(sliced(instance(1), instance(5, used=4))))
    story.run(120)
    fired = []
    for used in (9.55, 9.7, 9.8):
        story.reader.play(node(sliced(instance(1), instance(5, used=used))))
        fired += story.run(60)
    assert ("firing", "gpu-memory-low") in fired
    assert {a.subject for a in story.node.book.alerts.values()} == {"MIG-55555555"}
    utilization = story.node.signals[("gpu-utilization", "MIG-55555555")]
    assert (utilization.state, utilization.why) == ("na", "NVML tells no utilization of a MIG instance")
    story.reader.play(node(sliced(instance(1))))  # the slice is destroyed, and its alerts with it
    ended = story.run(30)
    assert ("resolved", "gpu-memory-low") in ended
    assert not [s for _, s in story.node.signals if s == "MIG-55555555"]


@pytest.mark.parametrize(("told", "why"), [
    (sliced(), "MIG mode is on and NVML shows no instance"),
    (sliced(instance(1), errors={"nvmlDeviceGetMigDeviceHandleByIndex": 4}), "cannot be listed: Insufficient Perm"),
])
def test_instances_that_nobody_may_see_are_said(tell: Tell, told: dict[str, Any], why: str) -> None:
    """An agent without /dev/nvidia-caps judged the card alone, and did not tell that its slices were not."""
    story = tell(node(told))
    story.run(60)
    assert story.verdict(2)["verdict"] == "HEALTHY"
    (unseen,) = (u for u in story.verdict(2)["unchecked"] if u["code"] == "mig.instances")
    assert why in unseen["why"]
    shown = plain(gpus_report(story.node.gpus_report(), show_all=False))
    assert "Not checked: mig.instances of GPU 2: " in shown
    story.reader.play(node(sliced(instance(1))))
    story.run(30)
    assert not [u for u in story.verdict(2)["unchecked"] if u["code"] == "mig.instances"]


def test_the_alerts_of_an_instance_outlive_a_restart(tell: Tell) -> None:
    """A restart closed the slice's alert, since nobody knew of the slice yet, and paged it anew a second later."""
    story = tell(node(THREE))
    story.run(30)
    assert story.run(15, xid(94, story.at_s, instance=" GPU-I:02")) == [("firing", "xid-app")]
    saved = json.loads(json.dumps(story.node.learned.__dict__))
    assert set(saved) == set(Learned.__dataclass_fields__)
    again = Node(Setup("gpu-17", POLL_S, Slo(written=True), (), tuple(built_in().values()), severity_of))
    again.restore(story.node.book, saved)
    moved = again.step(T0 + story.at_s, POLL_S)  # before the first read of NVML
    assert [t.alert.rule for t in moved if t.kind in ("firing", "resolved")] == []
    later = Story(story.reader, node=again)
    later.at_s = story.at_s
    assert later.run(60) == []
    assert later.verdict(2, (2, 0))["code"] == "xid.94"


def test_an_instance_s_error_is_the_cause_of_its_engine_s(tell: Tell) -> None:
    """Two engines on one card, each in its slice: by their processes it is known whose slice was hurt."""
    story = tell(node(sliced(instance(1, processes={"41": 1}), instance(5, processes={"42": 1}))))
    rules = tuple(built_in().values())
    targets = tuple(Target(f"127.0.0.1:{port}", (), port=port) for port in (8001, 8002))
    story.node = Node(Setup("gpu-17", POLL_S, Slo(written=True), targets, rules, severity_of))
    story.node.see([FoundEngine(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "vllm", "ss", port, (pid,))
                    for port, pid in ((8001, 41), (8002, 42))], T0)
    story.run(30, xid(94, 15.0, instance=" GPU-I:05"))

    scene = story.node.scene
    on = scene.target_on("MIG-55555555")
    assert on is not None
    assert on.name == "127.0.0.1:8002"
    assert story.node._related("MIG-55555555", "127.0.0.1:8002")
    assert not story.node._related("MIG-55555555", "127.0.0.1:8001")
    labels = alert_labels(scene, built_in()["xid-app"], Alert("xid-app", "MIG-55555555", "firing", "page", T0))
    assert labels["mig"] == "MIG-55555555"


def test_the_pod_in_an_instance(tell: Tell) -> None:
    """The kubelet gives slices by their own UUID: an error of one names its pod, one of the card the pods in all."""
    story = tell(node(sliced(instance(1), instance(5))))
    story.run(30)
    pods = (PodFacts("llm", "small", gpus=("MIG-11111111",)), PodFacts("llm", "other", gpus=("MIG-55555555",)))
    story.node.take(Batch("kubelet", T0 + 30, 0.0, pods=pods))
    assert [pod.name for pod in story.node.pods_of("MIG-55555555")] == ["other"]
    assert sorted(pod.name for pod in story.node.pods_of(story.verdict(2)["subject"])) == ["other", "small"]
    assert story.node.pods_of(story.verdict(0)["subject"]) == []


def test_a_recording_keeps_the_instances(tell: Tell) -> None:
    """A back-test of a sliced node must judge the slices as the agent did."""
    story = tell(node(sliced(instance(1), instance(5, errors={"nvmlDeviceGetMemoryInfo": 999}))))
    batch = story.reader.read(T0).batch
    row = json.loads(json.dumps(gpu_row(batch)))
    again = gpu_batch(Row(T0, "nvml", None, row["gpus"]), T0)

    def of_mig(told: Batch) -> list[Sample | Gap]:
        return [r for r in told.readings if r.subject.startswith("MIG-")]

    assert of_mig(again)
    assert of_mig(again) == of_mig(batch)
    assert [gpu.instances for gpu in again.gpus or ()] == [gpu.instances for gpu in batch.gpus or ()]


# --- whose line it is ------------------------------------------------------------------------------------------------

A = "0000:1d:00"


def of_log(where: str, number: int = 94, at_s: float = 0.0) -> Event:
    """A line of one instance."""
    line = line_of(f"NVRM: Xid (PCI:{A}{where}): {number}, x")
    assert line is not None
    return Event("xid", A, number, T0 + at_s, T0 + at_s, detail=told_by(line))


def of_nvml(gi: int | None, ci: int | None, number: int = 94, at_s: float = 0.0) -> Event:
    """The same by NVML's event; None: not attributable."""
    told = {"instance": gi, "compute_instance": ci}
    detail = {name: value for name, value in told.items() if value is not None}
    return Event("xid", A, number, T0 + at_s, T0 + at_s, origin="nvml", detail=detail)


def told(*events: Event) -> list[tuple[str, int]]:
    """(subject, how often) of what stands, on a GPU with instances 5/0, 6/0 and 6/1."""
    known = {(5, 0): "MIG-5", (6, 0): "MIG-6", (6, 1): "MIG-61"}

    def instance_at(device: str, gi: int, ci: int | None) -> str | None:
        found = [uuid for (g, c), uuid in known.items() if device == A and g == gi and ci in (None, c)]
        return found[0] if len(found) == 1 else None

    history = History()
    for event in events:
        history.fold([event], lambda _: "GPU-aa", instance_at)
    return sorted((f.subject, f.times) for f in findings(history, T0 + 60, {}, {}))


@pytest.mark.parametrize(("story", "events", "want"), [
    ("GPU instance alone", [of_log(" GPU-I:05")], [("MIG-5", 1)]),
    ("and compute instance", [of_log(" GPU-I:06 GPU-CI:01")], [("MIG-61", 1)]),
    ("of one of two compute instances, it does not say which", [of_log(" GPU-I:06")], [("GPU-aa", 1)]),
    ("of an instance that NVML does not show", [of_log(" GPU-I:09 GPU-CI:00")], [("GPU-aa", 1)]),
    ("of no instance", [of_log("")], [("GPU-aa", 1)]),
    ("of two instances at once", [of_log(" GPU-I:05"), of_log(" GPU-I:06 GPU-CI:00")], [("MIG-5", 1), ("MIG-6", 1)]),
    ("the log, then NVML", [of_log(" GPU-I:05"), of_nvml(5, 0, at_s=1)], [("MIG-5", 1)]),
    ("NVML, then the log", [of_nvml(5, 0), of_log(" GPU-I:05", at_s=1)], [("MIG-5", 1)]),
    ("NVML cannot attribute it", [of_nvml(None, None), of_log(" GPU-I:05", at_s=1)], [("MIG-5", 1)]),
    ("nor afterwards", [of_log(" GPU-I:05"), of_nvml(None, None, at_s=1)], [("MIG-5", 1)]),
    ("NVML tells the other one's", [of_log(" GPU-I:05"), of_nvml(6, 0, at_s=1)], [("MIG-5", 1), ("MIG-6", 1)]),
    ("NVML alone", [of_nvml(6, 1)], [("MIG-61", 1)]),
])
def test_whose_line_it_is(story: str, events: list[Event], want: list[tuple[str, int]]) -> None:
    """The log tells instances by number, NVML on the parent's handle: each error once, on the one that was hurt."""
    assert told(*events) == want, story


def test_five_incidents_in_different_instances_are_one_gpu_s() -> None:
    """Each slice had its one or two; the card had five, and is to be replaced."""
    history = History()
    for n in range(5):
        history.fold([of_log(f" GPU-I:{1 + n % 2:02}", at_s=600.0 * n)], lambda _: "GPU-aa",
                     lambda _, gi, __: f"MIG-{gi}")
    found = findings(history, T0 + 2460, {}, {})
    assert [(f.subject, f.action) for f in found if f.code == "xid.burst"] == [("GPU-aa", "replace")]


def test_how_instances_are_shown(tell: Tell) -> None:
    """Behind their card, with their numbers; counted apart."""
    story = tell(node(sliced(instance(1), instance(5))))
    story.run(30)
    story.run(15, xid(94, story.at_s, instance=" GPU-I:05"))
    shown = plain(gpus_report(story.node.gpus_report(), show_all=False)).splitlines()

    assert [line.split()[:2] for line in shown[2:7]] == [
        ["0", "HEALTHY"], ["1", "HEALTHY"], ["2", "HEALTHY"], ["2:1/0", "HEALTHY"], ["2:5/0", "WATCH"]]
    assert [line for line in shown if line.startswith("MIG 5/0 of GPU 2: xid.94 (page): Xid 94")]
    assert shown[-1] == "TICKET: 3 HEALTHY; MIG: 1 HEALTHY, 1 WATCH"


def test_an_instance_of_a_gpu_that_is_forgotten(tell: Tell) -> None:
    """The card is pulled: ten minutes later nothing of it or of its slices is asked for any more."""
    story = tell(node(THREE), poll_s=60.0)
    story.run(60)
    facts = story.node.gpus[story.verdict(2)["subject"]]
    story.node._forget_gpu(facts.uuid)
    assert story.node.windows.track_of("MIG-55555555", "gpu_mem_used") is None
    assert replace(facts, instances=()).uuid in story.node.gone
