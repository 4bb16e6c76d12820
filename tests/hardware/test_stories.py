"""Eight GPUs through the real pynvml and the C stand-in: each fault fires its alert, with its action, and clears."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.config import Config, GpusConfig, without_function
from agent.daemon import setup_of
from agent.hardware.lines import line_of
from agent.model import Batch, Event, Sample, Slo
from agent.node import Learned, Node, Setup
from agent.sources.kernel_log import told_by
from agent.sources.nvml_state import STATE
from rules import RulesConfig, XidOverride, severity_of
from tests.hardware.cases import cases
from tests.hardware.stories import H100, POLL_S, T0, Story, Tell, gpus, xid
from tests.scenes import built_in

NO_FAULT = 1e9


def actions(story: Story, rule: str) -> set[str]:
    """What the alerts of a rule asked for when they fired."""
    return {t.alert.annotations["action"] for t in story.seen if t.kind == "firing" and t.alert.rule == rule}


# --- a healthy node --------------------------------------------------------------------------------------------------


def test_every_state_of_an_h100(tell: Tell) -> None:
    """Each number of the state arrives under its name; none is missing where the card tells it."""
    story = tell(gpus())
    batch = story.reader.read(T0).batch
    mine = {r.name: r.value for r in batch.readings if r.subject.endswith("2") and isinstance(r, Sample)}

    assert set(mine) >= {name for group in STATE for name in group.names}
    assert (mine["gpu_nvlink_up"], mine["gpu_nvlink_count"], mine["gpu_pcie_gen"]) == (0x3FFFF, 18, 5)
    assert (mine["gpu_ecc_corrected"], mine["gpu_ecc_uncorrected_ever"], mine["gpu_fabric"]) == (3, 1, 3)


def test_a_healthy_node_is_quiet(tell: Tell) -> None:
    """Eight healthy GPUs for a quarter of an hour: no alert, eight times HEALTHY."""
    story = tell(gpus(8))

    assert story.run(900) == []
    report = story.node.gpus_report()
    assert {g["verdict"] for g in report["gpus"]} == {"HEALTHY"}
    assert report["verdict"] == "healthy"
    assert not [u for g in report["gpus"] for u in g["unchecked"] if u["state"] == "UNKNOWN"]


def test_a_card_that_tells_little_is_not_at_fault(tell: Tell) -> None:
    """A PCIe card of an old driver: no NVLink, no fabric, no recovery action. That is N/A, and not down."""
    few = {key: H100[key] for key in ("temperature", "utilization", "memory", "sm_clock", "sm_clock_max", "throttle")}
    story = tell({"gpus": [few]})

    assert story.run(900) == []
    assert story.verdict(0)["verdict"] == "HEALTHY"
    unchecked = {u["code"]: u["state"] for u in story.verdict(0)["unchecked"]}
    assert {"nvlink.down", "fabric.state", "recovery", "remap.failed", "ecc.rate"} <= set(unchecked)
    assert set(unchecked.values()) == {"N/A"}


# --- the faults ------------------------------------------------------------------------------------------------------


def test_a_gpu_falls_off_the_bus_and_comes_back(tell: Tell) -> None:
    """GPU lost, with its Xid 79: one GPU's alerts, seven go on; after the reset all clear, whatever its index."""
    story = tell(gpus(8, gpu3={"uuid": "GPU-cc"}))
    assert story.run(60) == []
    story.reader.play(gpus(8, gpu3={"uuid": "GPU-cc", "lost": True}))
    fired = story.run(60, xid(79, story.at_s, "0000:1e:00", text="pid=12, name=python3, GPU has fallen off the bus."))

    assert {rule for state, rule in fired} == {"xid-gpu", "gpu-lost", "gpu-count"}
    assert actions(story, "xid-gpu") == {"drain the node and reboot it"}
    assert story.verdict(3)["verdict"] == "DRAIN"
    assert {f["code"] for f in story.verdict(3)["findings"]} == {"xid.79", "gpu.lost"}
    assert {story.verdict(i)["verdict"] for i in range(8) if i != 3} == {"HEALTHY"}
    steps = [b - a for uuid, times in story.read_at.items() if uuid != "GPU-cc" for a, b in pairwise(times)]
    assert max(steps) <= 2 * POLL_S

    moved = gpus(8, gpu0={"uuid": "GPU-cc", "pci": "0000:1e:00.0"}, gpu3={"pci": "0000:1b:00.0", "uuid": "GPU-dd"})
    story.reader.play(moved)
    ended = story.run(360)
    assert {rule for state, rule in ended if state == "resolved"} >= {"xid-gpu", "gpu-lost"}
    assert story.verdict(0)["subject"] == "GPU-cc"
    assert story.verdict(0)["verdict"] == "HEALTHY"


def test_an_ecc_burst(tell: Tell) -> None:
    """A card that corrects 17,657 errors a second was called healthy, since nobody looked at the rate."""
    story = tell(gpus(), poll_s=30.0)
    story.run(300)
    fired = []
    for n in range(25):
        story.reader.play(gpus(gpu2={"ecc_corrected": 3 + 500_000 * (n + 1), "ecc_uncorrected": int(n > 10)}))
        fired += story.run(30)
    assert {rule for _, rule in fired} == {"gpu-ecc-rate", "gpu-ecc-uncorrected"}
    assert story.verdict(2)["code"] in ("ecc.rate", "ecc.uncorrected")
    assert story.verdict(2)["verdict"] == "WATCH"
    ended = story.run(4200)
    assert set(ended) == {("resolved", "gpu-ecc-rate"), ("resolved", "gpu-ecc-uncorrected")}


def test_c049_rows_and_errors(tell: Tell) -> None:
    """a: a row waits, a ticket for a reset. b: an uncorrected error, a ticket. c: remapping failed, a page: replace."""
    of = cases()["C049"]["input"]
    assert [of[name]["pending"] for name in "abc"] == [True, False, False]
    story = tell(gpus(), poll_s=60.0)
    story.run(30)
    rows = {"correctable": 0, "uncorrectable": 4, "pending": 1, "failure": 0, "exhausted": 0}
    story.reader.play(gpus(gpu0={"remapped": rows}, gpu1={"ecc_uncorrected": 1},
                           gpu2={"remapped": {**rows, "pending": 0, "failure": 1}}))
    fired = story.run(30)

    assert set(fired) == {("firing", "gpu-remap-pending"), ("firing", "gpu-ecc-uncorrected"),
                          ("firing", "gpu-remap-failed")}
    assert [story.verdict(i)["verdict"] for i in range(3)] == ["WATCH", "WATCH", "REPLACE"]
    assert story.pages() == {"gpu-remap-failed"}
    assert "Reset the GPU" in next(iter(actions(story, "gpu-remap-pending")))

    reloaded = {"energy_mj": 10, "ecc_corrected": 0, "ecc_uncorrected": 0}
    failed = {**rows, "pending": 0, "failure": 1}
    story.reader.play(gpus(gpu0=reloaded, gpu1=reloaded, gpu2={**reloaded, "remapped": failed}))
    ended = story.run(4200)
    assert set(ended) == {("resolved", "gpu-remap-pending"), ("resolved", "gpu-ecc-uncorrected")}
    assert story.pages() == {"gpu-remap-failed"}  # no all-clear for what is broken


def test_power_brake_for_seven_of_ten_minutes(tell: Tell) -> None:
    """The brake held for 36 h on nine nodes and nobody was told; the software power cap was told on 69 % of nodes."""
    capped = gpus(3, **{f"gpu{i}": {"throttle": 0x4} for i in range(3)})
    story = tell(capped)
    assert story.run(700) == []
    story.reader.play(gpus(gpu1={"throttle": 0x80 | 0x4}))
    assert story.run(345) == []
    assert story.run(75) == [("firing", "gpu-power-brake")]
    assert story.verdict(1)["code"] == "throttle.power_brake"
    assert "power brake" in story.verdict(1)["text"]
    story.reader.play(capped)
    assert story.run(600) == [("resolved", "gpu-power-brake")]


def test_thermal_slowdown_that_comes_and_goes(tell: Tell) -> None:
    """On for 30 s and off for 15: no spell is long enough for gpu-thermal-limit, and the clock is cut all the same."""
    story = tell(gpus())
    story.run(600)
    fired = []
    for _ in range(20):
        story.reader.play(gpus(gpu1={"throttle": 0x40}))
        fired += story.run(30)
        story.reader.play(gpus())
        fired += story.run(15)
    assert ("firing", "gpu-thermal-slowdown") in fired
    assert ("firing", "gpu-thermal-limit") not in fired
    assert ("resolved", "gpu-thermal-slowdown") in story.run(600)


def test_one_nvlink_down(tell: Tell) -> None:
    """Link 7 of GPU 4 goes down; the alert names it, the others stay; it clears when the link is up again."""
    story = tell(gpus())
    story.run(60)
    story.reader.play(gpus(gpu2={"nvlinks": 0x3FFFF & ~(1 << 7)}))
    assert story.run(30) == [("firing", "gpu-nvlink-down")]
    assert story.verdict(2)["text"] == "NVLink down: link 7; 17 are up"
    assert story.verdict(2)["verdict"] == "DRAIN"
    story.reader.play(gpus())
    assert story.run(90) == [("resolved", "gpu-nvlink-down")]


def test_nvlink_that_was_never_up_is_not_down(tell: Tell) -> None:
    """Healthy GPUs with idle fabric show no link at all, on every card alike. One card that lags behind is at fault."""
    story = tell(gpus(3, **{f"gpu{i}": {"nvlinks": 0} for i in range(3)}))
    assert story.run(120) == []
    other = tell(gpus(gpu2={"nvlinks": 0x1FFFF}))
    assert other.run(60) == [("firing", "gpu-nvlink-down")]
    assert other.verdict(2)["text"] == "NVLink down: 1 fewer links than its neighbours have; 17 are up"


@pytest.mark.parametrize("counter", ["nvlink_recoveries", "nvlink5_recoveries"])
def test_a_link_that_recovers_again_and_again(tell: Tell, counter: str) -> None:
    """505 recoveries in the five days before it failed for good (NVLink5), and no dashboard had the counter."""
    card = {k: v for k, v in H100.items() if k != "nvlink_recoveries"} | {counter: 1}
    story = tell({**gpus(), "defaults": card}, poll_s=30.0)
    story.run(300)
    fired = []
    for n in range(4):
        story.reader.play({**gpus(gpu2={counter: 2 + n}), "defaults": card})
        fired += story.run(60)
    assert fired == [("firing", "gpu-nvlink-recovery")]
    assert story.run(4000) == [("resolved", "gpu-nvlink-recovery")]


def test_a_slow_pcie_link_counts_under_load_alone(tell: Tell) -> None:
    """An idle GPU lowers its link on purpose; a busy one on gen 3 x8 has lost most of its bandwidth."""
    slow = {"pcie_gen": 3, "pcie_width": 8}
    story = tell(gpus(gpu1={**slow, "utilization": 2}, gpu2=slow))
    assert story.run(600) == [("firing", "gpu-pcie-link")]
    assert story.verdict(1)["verdict"] == "HEALTHY"
    assert story.verdict(2)["text"] == "PCIe gen 3 x8 of gen 5 x16"
    story.reader.play(gpus())
    assert story.run(400) == [("resolved", "gpu-pcie-link")]


@pytest.mark.parametrize(("story_of", "fault", "rule", "clear_s"), [
    ("hot memory", {"memory_temperature": 97}, "gpu-memory-temperature", 300),
    ("no spare rows", {"remapped": {**H100["remapped"], "exhausted": 1}}, "gpu-spare-rows", 60),
    ("a page waits to be retired", {"retired_pending": 1}, "gpu-retired-pages", 60),
    ("its table of pages is full", {"retired_corrected": 55, "retired_uncorrected": 6}, "gpu-retired-pages", 60),
    ("the fabric has not taken it in", {"fabric_state": 2}, "gpu-fabric", 120),
    ("the fabric has an error", {"fabric_status": 999}, "gpu-fabric", 120),
    ("the driver asks for a reset", {"recovery_action": 1}, "gpu-recovery", 60),
])
def test_a_state_fires_and_clears(tell: Tell, story_of: str, fault: dict[str, Any], rule: str, clear_s: float) -> None:
    """Each state of the hardware has an alert, on its GPU alone, and a way to clear."""
    story = tell(gpus())
    story.run(30)
    story.reader.play(gpus(gpu1=fault))
    assert story.run(300) == [("firing", rule)], story_of
    assert story.verdict(1)["verdict"] != "HEALTHY"
    assert {story.verdict(i)["verdict"] for i in range(3) if i != 1} == {"HEALTHY"}
    story.reader.play(gpus())
    assert story.run(clear_s) == [("resolved", rule)], story_of


def test_replays(tell: Tell) -> None:
    """A link that sends its packets twice: PCIe's and NVLink's rates, each against what is usual."""
    story = tell(gpus(), poll_s=30.0)
    story.run(400)
    fired = []
    for n in range(30):
        story.reader.play(gpus(gpu0={"pcie_replays": 2 + n // 3, "nvlink_replays": 4 + n // 3},
                               gpu1={"pcie_replays": 2 + 60 * n}, gpu2={"nvlink_replays": 4 + 600 * n}))
        fired += story.run(30)
    assert set(fired) == {("firing", "gpu-pcie-replays"), ("firing", "gpu-nvlink-errors")}
    assert story.verdict(0)["verdict"] == "HEALTHY"
    assert set(story.run(1500)) == {("resolved", "gpu-pcie-replays"), ("resolved", "gpu-nvlink-errors")}


@pytest.mark.parametrize(("told", "fires", "code"), [(1, True, "recovery.reset"), (2, True, "recovery.reboot"),
                                                     (3, True, "recovery.drain_p2p"), (0, False, None),
                                                     (None, False, None)])
def test_c101_what_the_driver_asks_at_the_first_poll(
    tell: Tell, told: int | None, fires: bool, code: str | None
) -> None:
    """The fault came while the agent was down: no event, no counter. The driver's recovery action still says it."""
    case = cases()["C101"]["input"]
    assert case["recovery_action"] == "Reset"
    assert case["older_driver"]["recovery_action"] is None
    story = tell(gpus(gpu1={"recovery_action": told}))

    assert story.run(POLL_S) == ([("firing", "gpu-recovery")] if fires else [])
    assert story.verdict(1)["code"] == code
    assert fires or story.verdict(1)["verdict"] == "HEALTHY"


def test_a_gpu_that_must_be_reset_says_so_in_place_of_every_number(tell: Tell) -> None:
    """NVML_ERROR_RESET_REQUIRED (16) on every call was a GPU that cannot be read: a ticket after 5 min (gpud#1133)."""
    story = tell(gpus())
    assert story.run(60) == []
    named = dict.fromkeys(("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
                           "nvmlDeviceGetPciInfo"), 0)
    story.reader.play(gpus(gpu1={"errors": {"*": 16} | named}))

    assert story.run(30) == [("firing", "gpu-recovery")]
    assert story.verdict(1)["code"] == "recovery.reset"


def test_one_of_eight_hangs_nvml(tell: Tell) -> None:
    """A call to GPU 2 does not return: it is UNKNOWN, the seven others miss no more than one read."""
    story = tell(gpus(8), deadline_s=2.0)
    story.run(60)
    story.reader.play(gpus(8, gpu2={"hangs": {"nvmlDeviceGetMemoryInfo": True}}))
    story.run(120)

    uuid = story.verdict(2)["subject"]
    assert story.verdict(2)["verdict"] == "UNKNOWN"
    assert {story.verdict(i)["verdict"] for i in range(8) if i != 2} == {"HEALTHY"}
    steps = [b - a for other, times in story.read_at.items() if other != uuid for a, b in pairwise(times)]
    assert max(steps) <= 2 * POLL_S
    assert story.pages() == set()
    story.run(240)
    assert [(t.alert.rule, t.alert.subject) for t in story.seen if t.kind == "firing"] == [("blind", uuid)]

    story.reader.play(gpus(8))
    ended = story.run(120)
    assert ("resolved", "blind") in ended
    assert story.verdict(2)["verdict"] == "HEALTHY"


def test_gpu_count_by_the_configuration(tell: Tell) -> None:
    """Seven of eight that are written: a page at once, though this agent never saw the eighth."""
    story = tell({"defaults": H100, "gpus": [{}] * 7}, gpus_expected=8)
    assert story.run(30) == [("firing", "gpu-count")]
    report = story.node.gpus_report()
    assert report["verdict"] == "page"
    assert report["node_findings"][0]["text"] == "1 of 8 GPUs missing: NVML shows 7"


def restarted(story: Story) -> Story:
    """The same node after a restart of the agent: what was learned, and nothing read yet."""
    saved = json.loads(json.dumps(story.node.learned.__dict__))
    node = Node(Setup("gpu-17", POLL_S, Slo(written=True), (), tuple(built_in().values()), severity_of))
    node.restore(story.node.book, saved)
    again = Story(story.reader, node=node)
    again.at_s = story.at_s
    return again


def test_a_gpu_that_is_missing_after_a_reboot(tell: Tell, tmp_path: Path) -> None:
    """The node came back with seven of eight; the eighth was still in memory, and was called there for ten minutes."""
    story = tell(gpus(8, gpu7={"uuid": "GPU-hh"}))
    story.run(60)
    story.reader.begin(gpus(7), tmp_path)
    again = restarted(story)
    assert again.run(45) == [("firing", "gpu-count")]
    (finding,) = again.node.gpus_report()["node_findings"]
    assert finding["text"] == "1 of 8 GPUs missing: NVML shows 7"
    story.reader.begin({**gpus(8), "errors": {"nvmlInitWithFlags": 9}}, tmp_path)
    blind = restarted(again)
    assert blind.run(15) == []
    assert blind.node.signals[("gpu-count", "gpu-17")].state == "gap"  # neither a page nor an all-clear
    blind = restarted(again)
    blind.node.windows = again.node.windows  # as the store gives them back
    blind.run(75)
    assert blind.node.signals[("gpu-count", "gpu-17")].state == "gap"


def pci_shows(story: Story, count: int) -> None:
    """So many GPUs in the reader's PCI tree."""
    for device in range(count):
        folder = story.reader.pci / f"0000:{0x1b + device:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")


def devices(story: Story, **counts: float) -> None:
    """What the kernel shows without NVML, from now on at each read."""
    run = story.node.step

    def step(now: float, dt_s: float) -> Any:
        told = tuple(Sample(name, "gpu_devices", value, now) for name, value in counts.items())
        story.node.take(Batch("gpu_devices", now, 0.0, told))
        return run(now, dt_s)

    story.node.step = step  # type: ignore[method-assign]


def test_a_driver_that_is_not_loaded_after_a_reboot(tell: Tell, tmp_path: Path) -> None:
    """All eight are there and none can be used: eight tickets "blind", while one missing GPU was a page.

    Read every 15 s. The driver may be loaded two minutes late: first judged at 120 s, told 10 s later, at 135 s.
    """
    story = tell(gpus(8))
    story.run(60)
    story.reader.begin({**gpus(8), "errors": {"nvmlInitWithFlags": 9}}, tmp_path)
    pci_shows(story, 8)
    booted = restarted(story)
    devices(booted, gpus_pci=8, gpus_proc=0, gpus_dev=0)
    assert booted.run(135) == []
    assert booted.run(15) == [("firing", "gpu-count")]
    (finding,) = booted.node.gpus_report()["node_findings"]
    assert finding["text"] == ("8 of 8 GPUs missing: the kernel module nvidia is not loaded, PCI 8, /dev/nvidia* 0")
    assert booted.node.gpus_report()["verdict"] == "page"
    assert booted.run(600) == []  # and not one more ticket for each GPU
    booted.reader.play(gpus(8))
    devices(booted, gpus_pci=8, gpus_proc=8, gpus_dev=8)
    assert booted.run(180) == [("resolved", "gpu-count")]


def test_no_gpu_in_pci_after_a_reboot(tell: Tell, tmp_path: Path) -> None:
    """The switch before all eight is dead: eight tickets, a silence of ten minutes, and then the page.

    Read every 15 s. PCI may be late as the driver may: first judged at 120 s, told at 135 s.
    """
    story = tell(gpus(8))
    story.run(60)
    story.reader.begin({**gpus(8), "errors": {"nvmlInitWithFlags": 9}}, tmp_path)
    booted = restarted(story)
    booted.node.windows = story.node.windows  # as the store gives them back: all eight are late, and none is there
    devices(booted, gpus_pci=0, gpus_proc=0, gpus_dev=0)
    assert booted.run(135) == []
    assert booted.run(15) == [("firing", "gpu-count")]
    (finding,) = booted.node.gpus_report()["node_findings"]
    assert finding["text"] == "8 of 8 GPUs missing: NVML shows 0, PCI 0, /dev/nvidia* 0"
    assert booted.run(900) == []


def test_a_module_that_is_loaded_and_not_for_us(tell: Tell, tmp_path: Path) -> None:
    """A container without its devices hears "not loaded", too; /proc shows that it is: no GPU is missing."""
    story = tell(gpus(8))
    story.run(60)
    story.reader.begin({**gpus(8), "errors": {"nvmlInitWithFlags": 9}}, tmp_path)
    pci_shows(story, 8)
    inside = restarted(story)
    devices(inside, gpus_pci=8, gpus_proc=8, gpus_dev=0)
    assert inside.run(600) == [("firing", "device-access")]


@pytest.mark.parametrize(("code", "rule", "text"), [
    (4, "device-access", "NVML may not use them"), (12, "device-access", "libnvidia-ml.so.1 is not found"),
    (17, "device-access", "NVML does not start (its error 17)"), (18, "driver-mismatch", "different versions"),
    (999, "device-access", "NVML may not use them")])
def test_a_first_start_without_nvml_is_no_missing_gpu(tell: Tell, code: int, rule: str, text: str) -> None:
    """Installed in a container without the driver's library: "8 of 8 GPUs missing", a page, and all were at work."""
    story = tell({**gpus(8), "errors": {"nvmlInitWithFlags": code}})
    pci_shows(story, 8)
    devices(story, gpus_pci=8, gpus_proc=8, gpus_dev=8)

    assert story.run(600) == [("firing", rule)]
    (finding,) = story.node.gpus_report()["node_findings"]
    assert text in finding["text"]


def test_what_a_driver_tells_no_more_is_not_well_again(tell: Tell, tmp_path: Path) -> None:
    """Remapping had failed, a page. Tocsin was started anew on a driver that does not tell it: that closed the page."""
    failed = {**H100["remapped"], "failure": 1}
    story = tell(gpus(gpu2={"remapped": failed}), poll_s=60.0)
    assert story.run(120) == [("firing", "gpu-remap-failed")]
    silent = {**gpus(), "defaults": {k: v for k, v in H100.items() if k not in ("remapped", "ecc_corrected")}}
    story.reader.begin(silent, tmp_path)
    again = restarted(story)
    again.poll_s = 60.0
    assert again.run(7200) == []
    assert again.verdict(2)["code"] == "remap.failed"
    assert (again.verdict(0)["verdict"], again.node.gpus_report()["verdict"]) == ("UNKNOWN", "page")
    unchecked = {u["code"]: (u["state"], u["why"]) for u in again.verdict(0)["unchecked"]}
    why = "it was told before, and is no more: another driver, or what tells it was switched off"
    assert {code for code, told in unchecked.items() if told == ("UNKNOWN", why)} == {
        "ecc.rate", "remap.pending", "remap.failed", "remap.exhausted"}

    again.at_s += 7 * 86400.0  # somebody has meant it so
    assert ("resolved", "gpu-remap-failed") in again.run(120)
    assert again.verdict(0)["verdict"] == "HEALTHY"


def test_heat_that_is_told_no_more_is_not_over(tell: Tell) -> None:
    """A GPU at its limit; then its driver says "not supported" to that, for good: the page was closed by it."""
    story = tell(gpus(gpu1={"margin": -5, "temperature": 91}))
    assert set(story.run(90)) == {("firing", "gpu-temperature"), ("firing", "gpu-thermal-limit")}
    mute = dict.fromkeys(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetMarginTemperature",
                          "nvmlDeviceGetTemperatureThreshold"), 3)
    story.reader.play(gpus(gpu1={"errors": mute}))

    assert story.run(420) == [("firing", "blind")]
    assert "gpu-thermal-limit" in story.pages()


@pytest.mark.parametrize(("hot", "silent"), [
    ({"margin": -5, "temperature": 91}, "nvmlDeviceGetMarginTemperature"),
    ({"throttle": 0x40, "temperature": 91}, "nvmlDeviceGetCurrentClocksEventReasons")])
def test_half_of_what_tells_of_heat_does_not_tell_that_it_is_over(tell: Tell, hot: dict[str, Any], silent: str) -> None:
    """The margin could not be read for a while: judged by 85 °C and no slowdown, a GPU at its limit was well again."""
    story = tell(gpus(gpu1=hot))
    assert ("firing", "gpu-thermal-limit") in story.run(90)
    story.reader.play(gpus(gpu1={**hot, "errors": {silent: 999}}))
    assert ("resolved", "gpu-thermal-limit") not in story.run(600)
    story.reader.play(gpus())
    assert ("resolved", "gpu-thermal-limit") in story.run(600)


def test_a_reset_while_the_agent_is_down(tell: Tell) -> None:
    """Tocsin was stopped, the GPU reset, Tocsin started: its Xid was told for a day more as if nobody had come."""
    story = tell(gpus())
    story.run(30)
    assert story.run(15, xid(119, story.at_s)) == [("firing", "xid-gpu")]
    story.reader.play(gpus(gpu2={"energy_mj": 500}))
    assert restarted(story).run(30) == [("resolved", "xid-gpu")]


def test_an_energy_counter_that_tells_nothing_is_no_reset(tell: Tell) -> None:
    """A GPU whose firmware is gone told 0 mJ, and its own page was closed by it."""
    story = tell(gpus())
    story.run(30)
    assert story.run(15, xid(119, story.at_s)) == [("firing", "xid-gpu")]
    story.reader.play(gpus(gpu2={"energy_mj": 0}))
    assert story.run(30) == []
    story.reader.play(gpus())
    assert story.run(30) == []


def test_a_reset_ends_what_came_before_its_uuid_was_known(tell: Tell, tmp_path: Path) -> None:
    """The log told of 0000:1d:00 before NVML had told whose that is; the reset of that GPU ends it all the same."""
    story = tell({**gpus(), "errors": {"nvmlInitWithFlags": 9}})
    assert story.run(15, xid(119, 0.0)) == [("firing", "xid-gpu")]
    story.reader.begin(gpus(), tmp_path)
    assert story.run(30) == []
    story.reader.play(gpus(gpu2={"energy_mj": 500}))
    assert ("resolved", "xid-gpu") in story.run(30)


def test_a_switch_is_reset_with_its_gpus(tell: Tell) -> None:
    """No counter of a switch falls; all GPUs reset within minutes took it along. One alone did not."""
    line = line_of("nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    assert line is not None
    story = tell(gpus(2), poll_s=60.0)
    story.run(60)
    event = Event("sxid", "0000:07:00", 20034, T0 + story.at_s, T0 + story.at_s, detail=told_by(line))
    assert story.run(60, event) == [("firing", "xid-link")]
    story.reader.play(gpus(2, gpu0={"energy_mj": 500}))
    assert story.run(120) == []
    story.reader.play(gpus(2, gpu0={"energy_mj": 900}, gpu1={"energy_mj": 500}))
    assert story.run(60) == [("resolved", "xid-link")]


def test_a_card_that_was_replaced(tell: Tell, tmp_path: Path) -> None:
    """RMA: remapping has failed, which nothing but another card ends. Its alert closes when its UUID is gone."""
    failed = {**H100["remapped"], "failure": 1}
    story = tell(gpus(gpu2={"uuid": "GPU-old", "remapped": failed}), poll_s=60.0)
    assert story.run(60) == [("firing", "gpu-remap-failed")]
    story.reader.begin(gpus(gpu2={"uuid": "GPU-new"}), tmp_path)
    again = restarted(story)
    again.poll_s = 60.0
    assert again.run(900) == [("resolved", "gpu-remap-failed")]
    assert (again.verdict(2)["subject"], again.verdict(2)["verdict"]) == ("GPU-new", "HEALTHY")
    assert not again.node.book.alerts


def test_driver_and_library_of_different_versions(tell: Tell) -> None:
    """An unattended upgrade: one clear ticket, and not eight GPUs lost."""
    story = tell(gpus())
    story.run(30)
    story.reader("release", 1.0)
    story.reader.play({**gpus(), "errors": {"nvmlInitWithFlags": 18}})
    assert story.run(600) == [("firing", "driver-mismatch")]
    story.reader.play(gpus())
    assert ("resolved", "driver-mismatch") in story.run(120)


def test_a_container_that_lost_its_devices(tell: Tell) -> None:
    """NVML says Unknown Error to everything while the kernel shows the GPUs: that is no GPU lost."""
    story = tell(gpus())
    story.run(30)
    pci_shows(story, 8)
    story.reader("release", 1.0)
    story.reader.play({**gpus(), "errors": {"nvmlInitWithFlags": 999}})
    story.run(5)
    seen = Sample("gpus_pci", "gpu_devices", 8.0, T0 + story.at_s)
    fired = []
    for _ in range(14):
        story.node.take(Batch("gpu_devices", T0 + story.at_s, 0.0, (seen._replace(at=T0 + story.at_s),)))
        fired += story.run(POLL_S)
    assert ("firing", "device-access") in fired
    assert "gpu-lost" not in {rule for _, rule in fired}
    story.reader.play(gpus())
    assert ("resolved", "device-access") in story.run(120)


# --- the log beside it -----------------------------------------------------------------------------------------------


def test_c059_the_event_finds_its_gpu(tell: Tell) -> None:
    """000b:00:00 of the log is the GPU that NVML calls 0000000B:00:00.0."""
    case = cases()["C059"]["input"]
    gpus = [{"pci": bus_id, "uuid": f"GPU-{n}"} for n, bus_id in enumerate(case["nvml_bus_ids"])]
    story = tell({"defaults": H100, "gpus": gpus})
    story.run(10)
    story.run(10, xid(79, story.at_s, device="000b:00:00"))

    assert story.verdict(1)["code"] == "xid.79"
    assert story.verdict(0)["verdict"] == "HEALTHY"


def test_hardware_alerts_outlive_a_restart_without_repeating(tell: Tell) -> None:
    """Each restart of the monitor paged the same Xid anew."""
    story = tell(gpus())
    story.run(10)
    assert story.run(10, xid(119, story.at_s)) == [("firing", "xid-gpu")]
    assert set(story.node.learned.__dict__) == set(Learned.__dataclass_fields__)
    again = restarted(story)

    assert again.run(60) == []
    assert again.verdict(2)["code"] == "xid.119"
    booted = Event("boot", "", None, T0 + again.at_s, T0 + again.at_s)
    assert again.run(10, booted) == [("resolved", "xid-gpu")]


def other(kind: str, at_s: float, count: int = 1) -> Event:
    """A forged line, or records that were overwritten."""
    return Event(kind, "", None, T0 + at_s, T0 + at_s, count, detail={"text": "NVRM: …"})  # type: ignore[arg-type]


def test_what_asks_for_more_pages_anew(tell: Tell) -> None:
    """94 at two: the engine is restarted, one sleeps. 95 at half past was a line more in an alert that was read."""
    story = tell(gpus(), poll_s=60.0)
    assert story.run(60, xid(94, 0.0)) == [("firing", "xid-app")]
    assert story.run(1740) == []
    assert story.run(60, xid(95, story.at_s)) == [("firing", "xid-memory")]
    assert len(story.node.incidents) == 2
    assert (story.verdict(2)["verdict"], story.verdict(2)["code"]) == ("DRAIN", "xid.95")
    assert story.run(60, xid(140, story.at_s)) == []  # the same again: the GPU is to be drained already
    (alert,) = (a for a in story.node.book.alerts.values() if a.rule == "xid-memory")
    assert "Xid 140" in story.node.annotations(alert)["description"]


@pytest.mark.parametrize(("rule", "happens", "clear_s"), [
    ("xid-gpu", lambda at: xid(46, at), 24 * 3600.0),
    ("xid-app", lambda at: xid(94, at), 3600.0),
    ("xid-memory", lambda at: xid(95, at), 24 * 3600.0),
    ("xid-link", lambda at: xid(74, at, text="NVLink: fatal error detected on link 3(0x0)"), 24 * 3600.0),
    ("xid-ticket", lambda at: xid(4711, at), 3600.0),
    ("xid-note", lambda at: xid(43, at), 3600.0),
    ("kernel-log-forged", lambda at: other("forged", at), 3600.0),
    ("kernel-log-gap", lambda at: other("overrun", at, 12), 3600.0),
])
def test_what_happened_fires_once_and_clears(rule: str, happens: Callable[[float], Event], clear_s: float) -> None:
    """Each alert of an event fires at the step that hears of it, holds for as long as its runbook says, and ends."""
    setup = Setup("gpu-17", POLL_S, Slo(written=True), (), tuple(built_in().values()), severity_of,
                  xid_severity={43: "info", 79: "log"})
    node, fired, at_s = Node(setup), [], 0.0
    steps = [0.0, 15.0, 30.0, 45.0, clear_s - 60.0, clear_s + 60.0, clear_s + 75.0]
    for at_s in steps:
        now = T0 + at_s
        events = (happens(15.0), xid(79, 15.0)) if at_s == 15.0 else ()
        opened = Sample("kernel_log_open", "kernel_log", 1.0, now)
        node.take(Batch("kernel_log", now, 0.0, (opened,), events=events))
        fired += [(t.kind, t.alert.rule, at_s) for t in node.step(now, POLL_S) if t.kind in ("firing", "resolved")]

    assert fired == [("firing", rule, 15.0), ("resolved", rule, clear_s + 60.0)]


def test_the_owner_s_severities_reach_the_node() -> None:
    """`rules: {xid: {13: {severity: page}}}` and `gpus: {expected: 8}` were checked and not acted on."""
    config = Config(rules=RulesConfig(dirs=(), xid={13: XidOverride(severity="page")}), gpus=GpusConfig(expected=8))

    setup = setup_of(config, ())
    assert (dict(setup.xid_severity), setup.gpus_expected) == ({13: "page"}, 8)
    assert without_function(config) == [note for note in without_function(Config()) if note]


def test_gpu_count_clears_when_the_gpu_is_back(tell: Tell) -> None:
    """The eighth GPU comes back after a power cycle; and a node that persistence mode was off on says so, quietly."""
    story = tell(gpus(2), gpus_expected=3)
    assert story.run(30) == [("firing", "gpu-count")]
    story.reader.play(gpus(3))
    story.reader("release", 1.0)
    assert story.run(150) == [("resolved", "gpu-count")]
    story.reader.play(gpus(gpu1={"persistence": 0}))
    story.run(400)
    assert [a.rule for a in story.node.book.alerts.values()] == ["gpu-persistence"]
    story.reader.play(gpus())
    story.run(120)
    assert not story.node.book.alerts


def test_without_a_log_and_events_xids_are_not_judged(tell: Tell) -> None:
    """"No Xid" must not be said by one who cannot hear any."""
    story = tell(gpus())
    story.run(10, log_open=False)

    assert {u["state"] for u in story.verdict(0)["unchecked"] if u["code"] == "xid"} == {"N/A"}
