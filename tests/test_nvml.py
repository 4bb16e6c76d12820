"""NVML through the real pynvml and a C stand-in for the driver's library, one process a story."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.model import SAMPLES, Gap, Sample, Why
from agent.sources.nvml_values import FIELDS, NAMES, bdf, is_blank
from tests.fake_nvml.build import SCENARIOS
from tests.fake_nvml.reader import Reader
from tests.needs import need

GIB = 1 << 30
H100: Mapping[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "temperature": 61,
    "margin": 26,
    "slowdown_tlimit": -2,
    "utilization": 97,
    "memory": {"total": 80 * GIB, "reserved": GIB, "used": 70 * GIB},
    "sm_clock": 1755,
    "sm_clock_max": 1980,
    "throttle": 4,
    "thermal_ns": 5_000_000_000,
    "power_ns": 120_000_000,
    "power_w": 612.5,
    "power_limit_w": 700,
}
NOT_SUPPORTED, UNINITIALIZED, NOT_LOADED, FUNCTION_NOT_FOUND, LOST, UNKNOWN = 3, 1, 9, 13, 15, 999

Start = Callable[..., Reader]


@pytest.fixture
def start(nvml: Reader, tmp_path: Path) -> Start:
    """Begin a story."""

    def begin(scenario: Mapping[str, Any] | Path, deadline_s: float = 5.0) -> Reader:
        nvml.begin(scenario, tmp_path, deadline_s)
        return nvml

    return begin


@pytest.fixture
def without_library(tmp_path: Path) -> Iterator[Reader]:
    """A machine without NVIDIA's library, also where there is one: what the linker finds first cannot be loaded."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    reader = Reader(library=tmp_path)
    reader.begin({"gpus": []}, tmp_path)
    yield reader
    reader.end()


def node(*gpus: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
    return {"defaults": H100, "gpus": [*gpus], **rest}


def until(met: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for a condition, not for a time."""
    end = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def pci_device(folder: Path, address: str, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = folder / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


# --- a healthy node --------------------------------------------------------------------------------------------------


def test_every_value_of_an_h100(start: Start) -> None:
    """A healthy card tells everything, each number in its own unit, under its UUID, at the time that was handed in."""
    seen = start(node({"uuid": "GPU-aa", "pci": "00000000:1B:00.0"})).read(now=1234.5)

    assert seen.batch.error is None
    assert {r.name: r.value for r in seen.batch.readings if isinstance(r, Sample)} == {
        "gpu_temp_c": 61.0,
        "gpu_margin_c": 28.0,  # 26 left to the T.Limit, and slowing down 2 beyond it
        "gpu_util": 0.97,
        "gpu_mem_used": 70.0 * GIB,
        "gpu_mem_total": 80.0 * GIB,
        "gpu_mem_free": 9.0 * GIB,
        "gpu_sm_clock_mhz": 1755.0,
        "gpu_sm_clock_max_mhz": 1980.0,
        "gpu_throttle": 4.0,
        "gpu_thermal_ns": 5e9,
        "gpu_power_ns": 1.2e8,
        "gpu_power_w": 612.5,
        "gpu_power_limit_w": 700.0,
    }
    assert {(r.subject, r.at) for r in seen.batch.readings} == {("GPU-aa", 1234.5)}
    facts = seen.gpu(0)
    assert (facts.uuid, facts.name, facts.bdf) == ("GPU-aa", "NVIDIA H100 80GB HBM3", "0000:1b:00")
    assert {found.name: found.how for found in facts.found}["gpu_thermal_ns"] == "field 75 (thermal policy)"


def test_every_name_is_in_the_table_of_samples() -> None:
    """A sample that nobody knows would be dropped in silence."""
    assert set(NAMES) <= set(SAMPLES)


@pytest.mark.parametrize("scenario", sorted(SCENARIOS.glob("*.json")), ids=lambda path: path.stem)
def test_the_ready_scenarios_play(start: Start, scenario: Path) -> None:
    """The files that the README offers for use by hand show eight GPUs, whatever is wrong with one of them."""
    seen = start(scenario).read()

    assert [gpu.index for gpu in seen.batch.gpus or ()] == list(range(8))
    assert sum(reading.name in NAMES for reading in seen.batch.readings) == 8 * 13
    assert seen.value(0, "gpu_temp_c") == 61.0


def test_values_follow_the_scenario(start: Start) -> None:
    """A card heats up along a ramp, and its clock falls in a step."""
    now = time.time()
    at = {"temperature": {"ramp": [[0, 60], [100, 90]]}, "sm_clock": [[0, 1980], [45, 1170]]}
    reader = start(node(at, start=now - 40))

    first = reader.read()
    reader.play(node(at, start=now - 50))
    second = reader.read()

    assert 71.5 <= float(first.value(0, "gpu_temp_c")) <= 74.5  # 60 + 30 x 0.4 = 72, and a test that may be slow
    assert 74.5 <= float(second.value(0, "gpu_temp_c")) <= 77.5
    assert (first.value(0, "gpu_sm_clock_mhz"), second.value(0, "gpu_sm_clock_mhz")) == (1980.0, 1170.0)


def test_whose_processes_compute_on_a_gpu(start: Start) -> None:
    """By them an engine is known to be on it; a library that does not tell costs nothing."""
    seen = start(node({"processes": {"4711": 1, "42": 1}})).read()
    assert seen.gpu(0).pids == (42, 4711)
    assert start(node({"processes": {}})).read().gpu(0).pids == ()
    assert start(node({})).read().gpu(0).pids == ()


def test_a_poll_of_eight_gpus_is_cheap(start: Start) -> None:
    """The monitor of eight GPUs must not be felt on the node: under 5 ms of CPU a poll."""
    reader = start(SCENARIOS / "healthy.json")
    reader.read()

    assert min(reader("cost", 20) for _ in range(3)) < 0.005


# --- what a card does not tell ---------------------------------------------------------------------------------------


def test_c044_an_unsupported_value_costs_itself_alone(start: Start) -> None:
    """A card without a temperature sensor must not end the monitoring of all GPUs, nor look cool."""
    reader = start(node({"temperature": None, "memory": {"used": 10 * GIB}}, {}))

    first, second = reader.read(), reader.read()

    for seen in (first, second):
        assert seen.value(0, "gpu_temp_c") == "not_supported"
        assert seen.value(0, "gpu_mem_used") == 10.0 * GIB
        assert seen.codes(1) == {"value"}
    assert reader.calls("nvmlDeviceGetTemperatureV", 0) == reader.calls("nvmlDeviceGetTemperature", 0) == 1
    assert reader.calls("nvmlDeviceGetTemperatureV", 1) == 2
    (found,) = (found for found in second.gpu(0).found if found.name == "gpu_temp_c")
    assert (found.how, found.why) == (
        None,
        "this card or driver does not tell it (nvmlDeviceGetTemperatureV, nvmlDeviceGetTemperature)",
    )


def test_what_a_card_told_a_moment_ago_it_does_not_lack(start: Start) -> None:
    """One "not supported" of a sick GPU, and its temperature was not asked for again: a page of heat closed as N/A."""
    reader = start(node({}, {}))
    assert reader.read().codes(0) == {"value"}
    broken = dict.fromkeys(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetFieldValues",
                            "nvmlDeviceGetPowerUsage"), NOT_SUPPORTED)
    reader.play(node({"errors": broken}, {}))
    sick = reader.read()
    reader.play(node({}, {}))
    well = reader.read()

    names = ("gpu_temp_c", "gpu_power_w")
    assert [sick.value(0, name) for name in names] == ["error"] * 2
    assert sick.codes(1) == {"value"}
    assert [well.value(0, name) for name in names] == [61.0, 612.5]


def test_a_gpu_that_is_put_into_mig_mode_tells_no_utilization(start: Start) -> None:
    """It was read as a fault of the driver for as long as the GPU was sliced; it is not applicable there (M3)."""
    reader = start(node({"mig": 0}))
    assert isinstance(reader.read().value(0, "gpu_util"), float)
    reader.play(node({"mig": 1, "utilization": None}))
    reader.read()  # which tells of the mode

    assert reader.read().value(0, "gpu_util") == "not_supported"


def test_c046_unified_memory_has_no_size(start: Start) -> None:
    """On a GB10 the framebuffer query is not supported and shows zeros: no 0 of 0, and the rest is read."""
    gpu = {"memory": None, "utilization": 0, "power_w": 11.17, "temperature": 35}
    seen = start({"gpus": [gpu]}).read()

    assert {seen.value(0, f"gpu_mem_{part}") for part in ("used", "total", "free")} == {"not_supported"}
    assert [seen.value(0, name) for name in ("gpu_util", "gpu_power_w", "gpu_temp_c")] == [0.0, 11.17, 35.0]


def test_c046_a_size_of_zero_is_none(start: Start) -> None:
    """The same card where the driver says success and zeros."""
    seen = start({"gpus": [{"memory": {"total": 0, "used": 0}}]}).read()

    assert seen.value(0, "gpu_mem_used") == "not_supported"


def test_c046_more_than_all_of_the_memory_is_no_size(start: Start) -> None:
    """82 of 80 GiB used, and "free" wrapped below zero: 10^19 bytes free looked like room for ever."""
    seen = start(node({"memory": {"total": 80 * GIB, "used": 82 * GIB}}, {})).read()

    assert {seen.value(0, f"gpu_mem_{part}") for part in ("used", "total", "free")} == {"out_of_range"}
    assert seen.codes(1) == {"value"}


C047 = {"pcie": 9223372036854775792, "nvlink": 9223372036854775794, "sm_active": 140737488355328.0, "int32": 2147483632}


def test_c047_a_filler_is_no_data(start: Start) -> None:
    """DCGM's and NVML's fillers for "no data" were exported as huge numbers of watts and seconds."""
    seen = start(node(*({"fields": {"185": filler}} for filler in C047.values()), {"power_w": 69.437})).read()

    assert [seen.value(i, "gpu_power_w") for i in range(5)] == ["sentinel"] * 4 + [69.437]
    assert seen.codes(0) == {"value", "sentinel"}
    assert all(is_blank(filler) for filler in C047.values())


def test_c047_all_ones_are_a_filler(start: Start) -> None:
    """NVML itself writes all ones into what it does not know, also where the number is signed."""
    ones = 0xFFFFFFFFFFFFFFFF
    gpu = {"fields": {"75": ones, "74": C047["pcie"]}, "temperature": 0xFFFFFFFF, "sm_clock": 0xFFFFFFFF}
    seen = start(node(gpu, {**gpu, "errors": {"nvmlDeviceGetTemperatureV": 13}})).read()

    names = ("gpu_thermal_ns", "gpu_power_ns", "gpu_temp_c", "gpu_sm_clock_mhz")
    assert {seen.value(i, name) for i in (0, 1) for name in names} == {"sentinel"}


def test_c047_a_field_of_32_bits_has_its_own_filler(start: Start) -> None:
    """A recovery action of 4294967295 is none, nor are as many retired pages: a field's type tells how wide it is."""
    filler = {"value": 0xFFFFFFFF, "type": "uint"}
    narrow = {"230": filler, "29": filler, "94": {"value": 0x7FFFFFF0, "type": "int"}}
    reader = start(node({"fields": narrow}, {"fields": {"3": {"value": 0xFFFFFFFF, "type": "ull"}}}))
    told = {(r.subject, r.name): r for r in reader.read().batch.readings}
    first, second = (reader.read().gpu(i).uuid for i in (0, 1))

    assert not {(first, name) for name in ("gpu_recovery", "gpu_retired", "gpu_pcie_replays")} & told.keys()
    many = told[second, "gpu_ecc_corrected"]
    assert isinstance(many, Sample)
    assert many.value == 4294967295.0  # of 64 bits: so many


def test_c047_a_wide_counter_may_pass_a_narrow_filler() -> None:
    """2 147 483 632 ns of throttling are 2.1 s, and as many bytes are 2 GiB: only a 32-bit value may mean "none"."""
    assert not is_blank(2147483632, wide=True)
    assert not is_blank(0xFFFFFFFF, wide=True)
    assert is_blank(0xFFFFFFFF)
    assert not is_blank(69.437)


@pytest.mark.parametrize("raw", [9223372036854776000, 9.223372036854776e18, 1.8446744073709552e19, 2**64 - 1])
def test_c047_a_filler_that_was_rounded(raw: float) -> None:
    """A memory of 9223372036854776000 °C on every T4: a filler that went through a double (gpu-monitoring-tools#97)."""
    assert is_blank(raw, wide=True)
    assert not is_blank(raw / 3, wide=True)


C050: list[tuple[str, dict[str, Any], float | str]] = [
    ("a: healthy", {"margin": 56, "slowdown_tlimit": -2}, 58.0),
    ("b: at the slowdown", {"margin": -2, "slowdown_tlimit": -2}, 0.0),
    ("c: past it", {"margin": -5, "slowdown_tlimit": -2}, -3.0),
    ("d: 127 is a placeholder", {"margin": None, "slowdown": 127}, "not_supported"),
    ("255 is one, too", {"margin": None, "slowdown": 255}, "not_supported"),
    ("the slowdown is not told", {"margin": -1, "slowdown_tlimit": None}, -1.0),
    ("an A100 tells degrees", {"margin": None, "slowdown": 92, "temperature": 61}, 31.0),
    ("an A100 past its limit", {"margin": None, "slowdown": 92, "temperature": 93}, -1.0),
    ("neither", {"margin": None}, "not_supported"),
    ("a threshold without a temperature", {"margin": None, "slowdown": 92, "temperature": None}, "not_supported"),
    ("a driver that tells -2 as unsigned", {"margin": 0, "fields": {"194": 4294967294}}, 2.0),
]


def test_c050_margin_to_the_cards_own_limit(start: Start) -> None:
    """A T.Limit counts down and goes negative; taken for degrees it turned the alert upside down."""
    seen = start(node(*(gpu for _, gpu, _ in C050))).read()

    assert {story: seen.value(i, "gpu_margin_c") for i, (story, _, _) in enumerate(C050)} == {
        story: want for story, _, want in C050
    }


def test_the_cards_own_limit_is_told(start: Start) -> None:
    """The message of a hot A100 names the card's limit; 127 is none."""
    seen = start(node({"margin": None, "slowdown": 92}, {"margin": None, "slowdown": 127})).read()

    assert (seen.gpu(0).limit_c, seen.gpu(1).limit_c) == (92.0, None)


def test_an_old_driver_is_asked_in_the_old_ways(start: Start) -> None:
    """A driver of R470 has none of the newer functions and fields; each number comes by its older call."""
    newer = ("TemperatureV", "MarginTemperature", "MemoryInfo_v2", "CurrentClocksEventReasons", "FieldValues")
    seen = start(node({"slowdown": 90}, errors={f"nvmlDeviceGet{name}": 13 for name in newer})).read()

    assert seen.codes(0) == {"value"}
    assert seen.value(0, "gpu_margin_c") == 29.0
    assert seen.value(0, "gpu_mem_used") == 71.0 * GIB  # the first version counts the reserved part as used
    assert seen.value(0, "gpu_thermal_ns") == 5e9
    assert {found.name: found.how for found in seen.gpu(0).found}["gpu_power_w"] == "nvmlDeviceGetPowerUsage"


def test_an_unknown_field_number_is_an_invalid_argument(start: Start) -> None:
    """Older drivers answer fields that they do not know with INVALID_ARGUMENT: the older call gives the number."""
    seen = start(node({"fields": {"185": {"error": 2}, "75": {"error": 2}}})).read()

    assert (seen.value(0, "gpu_power_w"), seen.value(0, "gpu_thermal_ns")) == (612.5, 5e9)


def test_fields_that_cannot_be_read_together(start: Start) -> None:
    """On a GB200 some fields fail when asked for in one call: they are then asked for one by one, for good."""
    reader = start(node({"fields_one_by_one": True}))

    seen = [reader.read(), reader.read()][-1]

    assert seen.codes(0) == {"value"}
    # all at once, then each; the four that are told here a second time; 215, which is asked apart, once
    assert reader.calls("nvmlDeviceGetFieldValues", 0) == (1 + len(FIELDS)) + 4 + 1


def test_mig_has_no_utilization(start: Start) -> None:
    """A card cut into MIG slices tells no utilization; that is N/A, and the other values and cards are read."""
    seen = start(node({"utilization": None}, {})).read()

    assert (seen.value(0, "gpu_util"), seen.value(1, "gpu_util")) == ("not_supported", 0.97)
    assert seen.codes(0) == {"value", "not_supported"}


def test_a_utilization_over_one_is_refused(start: Start) -> None:
    """A share cannot be 1.3: a broken sensor is a Gap, not a number."""
    assert start(node({"utilization": 130})).read().value(0, "gpu_util") == "out_of_range"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_costs_its_own_value_and_comes_back(start: Start) -> None:
    """One failing call is one Gap that names the call and the error; it is tried again at the next poll."""
    reader = start(node({"errors": {"nvmlDeviceGetClockInfo": UNKNOWN}}, {}))
    first = reader.read()
    reader.play(node({}, {}))
    second = reader.read()

    gap = first[0, "gpu_sm_clock_mhz"]
    assert isinstance(gap, Gap)
    assert (gap.code, gap.why) == (Why.ERROR, "nvmlDeviceGetClockInfo(SM): Unknown Error")
    assert first.codes(0) == {"value", "error"}
    assert second.codes(0) == {"value"}


def test_one_gpu_that_errs_on_every_call(start: Start) -> None:
    """The GPU with the broken driver state turns unknown; the seven others keep their rhythm."""
    reader = start(SCENARIOS / "one-broken.json")

    for _ in range(3):
        seen = reader.read()
        assert seen.codes(5) == {"error"}
        assert [seen.codes(i) for i in range(8) if i != 5] == [{"value"}] * 7
        reader("advance", 5.0)


def test_a_gpu_whose_uuid_is_garbage(start: Start) -> None:
    """pynvml could not decode what a broken GPU calls itself: those after it were never read, and nobody was told."""
    reader = start(node({}, {"uuid": "GPU-\udcff"}, {}))

    for _ in range(2):
        seen = reader.read()
        assert [seen.codes(i) for i in range(3)] == [{"value"}, {"error"}, {"value"}]
        reader("advance", 5.1)


def test_a_gpu_that_is_lost_and_comes_back(start: Start) -> None:
    """One GPU falls off the bus: its values are LOST, the others go on, and a new start of NVML finds it again."""
    reader = start(node({}, {}))
    uuid = reader.read().gpu(0).uuid
    reader.play(node({"uuid": uuid, "lost": True}, {}))
    gone = reader.read()
    still = reader.read()
    asked = reader.calls("nvmlDeviceGetTemperatureV", 0)
    reader.play(node({"uuid": uuid}, {}))
    dead = reader.read()  # the old handle stays lost
    reader("advance", 5.1)
    back = reader.read()

    for seen in (gone, still, dead):
        assert seen.codes(0) == {"lost"}
        assert seen.codes(1) == {"value"}
        assert seen.batch.error is None
    assert asked == reader.calls("nvmlDeviceGetTemperatureV", 0) - 1  # a lost handle is left alone until then
    assert back.codes(0) == back.codes(1) == {"value"}
    assert back.gpu(0).uuid == uuid


def test_a_lost_gpu_keeps_its_name_while_nvml_cannot_open_it(start: Start) -> None:
    """After a new start NVML refuses a handle to the lost GPU: the Gaps still carry the UUID that it had."""
    reader = start(node({"uuid": "GPU-aa", "pci": "0000:41:00.0"}, {}))
    reader.read()
    reader.play(node({"uuid": "GPU-aa", "lost": True}, {}))
    reader.read()
    reader("advance", 5.1)
    seen = reader.read()

    assert seen.codes(0) == {"lost"}
    assert (seen.gpu(0).uuid, seen.gpu(0).bdf) == ("GPU-aa", "0000:41:00")
    assert seen.codes(1) == {"value"}


def test_a_gpu_that_is_no_longer_listed(start: Start) -> None:
    """A new start of NVML lists one GPU less and the indices move: the missing UUID is told, not its neighbour."""
    reader = start(node({"uuid": "GPU-aa"}, {"uuid": "GPU-bb"}))
    reader.read()
    reader.play(node({"uuid": "GPU-bb"}))
    reader.read()
    reader("advance", 5.1)
    seen = reader.read()

    by_uuid = {r.subject: r for r in seen.batch.readings if r.name == "gpu_temp_c"}
    gap = by_uuid["GPU-aa"]
    assert isinstance(gap, Gap)
    assert (gap.code, gap.why) == (Why.LOST, "NVML no longer lists this GPU; it lists 1")
    assert isinstance(by_uuid["GPU-bb"], Sample)


def test_a_gpu_that_was_broken_from_the_start(start: Start) -> None:
    """A GPU that never gave a handle has no UUID; it is told by its index rather than left out."""
    seen = start(node({}, {"errors": {"*": UNKNOWN}})).read()

    assert seen.gpu(1).uuid == "index-1"
    assert seen.codes(1) == {"error"}
    assert seen.codes(0) == {"value"}


def test_nvml_that_was_shut_down_under_us(start: Start) -> None:
    """A driver that forgets its clients answers UNINITIALIZED: all is a Gap, and NVML is started anew by itself."""
    reader = start(node({}, {}))
    reader.read()
    reader.play(node({}, {}, errors={"nvmlDeviceGetUtilizationRates": UNINITIALIZED}))
    bad = reader.read()
    reader.play(node({}, {}))
    reader("advance", 5.1)
    good = reader.read()

    assert bad.batch.error == "nvmlDeviceGetUtilizationRates: Uninitialized; NVML is started anew"
    assert bad.value(0, "gpu_temp_c") == 61.0
    assert bad.codes(1) == {"error"}
    assert good.batch.error is None
    assert good.codes(0) == good.codes(1) == {"value"}


# --- starts ----------------------------------------------------------------------------------------------------------


def test_no_gpu_on_this_machine_is_no_fault(without_library: Reader) -> None:
    """A laptop has neither the library nor a GPU: none here, no error, and the note says what was looked for."""
    reader = without_library
    seen = reader.read()

    assert (seen.batch.gpus, seen.batch.error, seen.batch.readings) == ((), None, ())
    assert str(reader.pci) in reader("get", "note")
    assert reader("get", "note").startswith("no NVIDIA GPU here: ")


def test_a_gpu_without_its_library_is_a_fault(without_library: Reader) -> None:
    """PCI shows a GPU and the library cannot be found: that is said, with where it was looked for."""
    reader = without_library
    pci_device(reader.pci, "0000:1b:00.0")
    pci_device(reader.pci, "0000:1b:00.1", kind="0x040300")  # its sound
    error = reader.read().batch.error

    assert error is not None
    assert "PCI shows 1 NVIDIA GPU(s)" in error
    assert "libnvidia-ml.so.1" in error
    assert "LD_LIBRARY_PATH" in error


def test_a_driver_that_is_loaded_late(start: Start) -> None:
    """At boot the module may load after us: the start is tried again with back-off, and then all is read."""
    reader = start(node({}, errors={"nvmlInitWithFlags": NOT_LOADED}))
    pci_device(reader.pci, "0000:1b:00.0")
    errors = [reader.read().batch.error for _ in range(3)]
    tries = reader.calls("nvmlInitWithFlags")
    reader.play(node({}))
    early = reader.read().batch.error
    reader("advance", 5.1)
    seen = reader.read()

    assert errors[0] is not None
    assert "modprobe nvidia" in errors[0]
    assert errors == [errors[0]] * 3
    assert tries == 1
    assert early == errors[0]
    assert seen.codes(0) == {"value"}


def test_a_driver_that_is_unloaded_under_us(start: Start) -> None:
    """After a reload that fails, the GPUs known before are Gaps with the reason, not forgotten."""
    reader = start(node({}))
    reader.read()
    reader("release", 1.0)
    reader.play(node({}, errors={"nvmlInitWithFlags": NOT_LOADED}))
    reader("advance", 1.1)
    seen = reader.read()

    assert seen.codes(0) == {"error"}
    assert seen.batch.error is not None
    assert "Driver Not Loaded" in seen.batch.error


# --- calls that hang -------------------------------------------------------------------------------------------------


def test_a_call_that_hangs(start: Start) -> None:
    """A call into the driver hangs: what was had is kept, the rest is HUNG with the call's name, and nothing stacks.

    From the next read on the other GPUs are read by another thread; the one at which it hangs is left alone.
    """
    hung = {"hangs": {"nvmlDeviceGetUtilizationRates": True}}
    reader = start(node({}, {}, {}), deadline_s=0.3)
    reader.read()
    before = reader.calls("nvmlDeviceGetTemperatureV", 2)
    reader.play(node({}, hung, {}))
    began = time.monotonic()
    first = reader.read()
    first_s = time.monotonic() - began
    later = [reader.read() for _ in range(20)]
    later_s = time.monotonic() - began - first_s

    assert 0.25 < first_s < 1.5
    assert first.codes(0) == {"value"}
    assert first.codes(1) == {"value", "hung"}
    assert first.value(1, "gpu_temp_c") == 61.0
    assert first.codes(2) == {"hung"}
    assert first.batch.error is not None
    assert first.batch.error.startswith("nvmlDeviceGetUtilizationRates of GPU 1 (GPU-")
    assert {code for seen in later for code in seen.codes(1)} == {"hung"}
    assert {code for seen in later for i in (0, 2) for code in seen.codes(i)} == {"value"}
    assert all(len(seen.batch.readings) == 3 * len(NAMES) for seen in later)
    assert later_s < 5.0  # and not a deadline each
    assert reader.calls("nvmlDeviceGetTemperatureV", 2) == before + 20
    assert reader.calls("nvmlDeviceGetTemperatureV", 1) == 2  # the good read, and the one that then hung
    assert 0.25 < first.batch.hung_s < later[-1].batch.hung_s < first_s + later_s + 1.0

    reader.play(node({}, {}, {}))  # it returns
    until(lambda: reader.read().batch.error is None)
    assert reader.read().codes(2) == {"value"}
    assert reader.read().batch.hung_s == 0.0


def test_hanging_calls_do_not_pile_up(start: Start) -> None:
    """Four GPUs hang one after the other: three threads are left in the driver, and then nothing more is called."""
    hung = {"hangs": {"nvmlDeviceGetUtilizationRates": True}}
    reader = start(node(*[{}] * 5), deadline_s=0.6)
    reader.read()
    reader.play(node({}, hung, hung, hung, hung))
    seen = [reader.read() for _ in range(8)]

    assert [seen[-1].codes(i) for i in range(5)] == [{"hung"}] * 5
    assert sum(reader.calls("nvmlDeviceGetTemperatureV", i) for i in range(1, 5)) == 4 + 3
    reader.play(node(*[{}] * 5))
    until(lambda: reader.read().batch.error is None, 30)
    assert all(reader.read().codes(i) == {"value"} for i in range(5))


def test_release_waits_for_what_hangs_at_one_gpu(start: Start) -> None:
    """While another thread reads the other GPUs, NVML must not be shut down under the call that hangs."""
    reader = start(node({}, {}), deadline_s=0.6)
    reader.read()
    reader.play(node({}, {"hangs": {"nvmlDeviceGetClockInfo": True}}))
    reader.read()
    assert reader.read().codes(0) == {"value"}
    why = reader("release")
    assert why.startswith("nvmlDeviceGetClockInfo of GPU 1 (GPU-")
    assert reader.calls("nvmlShutdown") == 0
    reader.play(node({}, {}))
    until(lambda: reader.calls("nvmlShutdown") == 1, 30)


def test_a_gpu_that_hung_is_read_last(start: Start) -> None:
    """A GPU that hangs at every poll costs the others only once: from then on it is read after them."""
    reader = start(node({}, {}), deadline_s=0.3)
    reader.read()
    slow = {"hangs": {"nvmlDeviceGetUtilizationRates": 0.5}}
    reader.play(node(slow, {}))
    first = reader.read()
    until(lambda: reader.read().codes(1) == {"value"})

    assert first.codes(1) == {"hung"}


def test_nvmlinit_that_hangs(start: Start) -> None:
    """On one driver nvmlInit hung after ten hours: the read returns, says so, and goes on when it returns."""
    reader = start(node({}, hangs={"nvmlInitWithFlags": True}), deadline_s=0.2)
    seen = reader.read()
    reader.play(node({}))

    assert seen.batch.gpus is None
    assert (seen.batch.error or "").startswith("nvmlInit has not returned for ")
    until(lambda: reader.read().batch.error is None)


def test_a_handle_that_hangs_at_the_start(start: Start) -> None:
    """One GPU hangs while its handle is opened: those before it are read, and later those after it too."""
    reader = start(node({}, {"hangs": {"nvmlDeviceGetHandleByIndex": 0.4}}, {}), deadline_s=0.3)
    first = reader.read()
    until(lambda: len(reader.read().batch.gpus or ()) == 3)

    assert [gpu.index for gpu in first.batch.gpus or ()] == [0]
    assert first.codes(0) == {"value"}
    assert (first.batch.error or "").startswith("nvmlDeviceGetHandleByIndex of GPU 1 has not returned for ")


def test_close_does_not_wait_for_a_call_that_hangs(tmp_path: Path) -> None:
    """SIGTERM must end the agent in 5 s also while a thread is stuck in the driver."""
    need("gcc", "make")
    reader = Reader()
    reader.begin(node({}, hangs={"nvmlDeviceGetClockInfo": True}), tmp_path, deadline_s=0.2)
    reader.read()
    began = time.monotonic()
    reader("close")
    reader.end()  # the process ends with the thread still in the call

    assert time.monotonic() - began < 5.0


# --- release ---------------------------------------------------------------------------------------------------------


def test_release_lets_go_of_every_handle_and_comes_back(start: Start) -> None:
    """A GPU reset fails while anyone holds a handle: released means nvmlShutdown, for a time, and then all is back."""
    reader = start(node({}))
    reader.read()

    assert reader("release", 60.0) is None
    released = reader.read()
    assert reader.calls("nvmlShutdown") == 1
    reader("advance", 59.0)
    assert reader.read().codes(0) == {"error"}
    reader("advance", 1.0)
    assert reader.read().codes(0) == {"value"}
    gap = released[0, "gpu_temp_c"]
    assert isinstance(gap, Gap)
    assert gap.why == "released on request (POST /nvml/release) for 60 s more"
    assert released.batch.error is None
    assert reader.calls("nvmlInitWithFlags") == 2


def test_release_until_reopened(start: Start) -> None:
    """A release without an end lasts until someone reopens it."""
    reader = start(node({}))
    reader.read()
    reader("release")
    reader("advance", 1e6)

    assert reader.read().codes(0) == {"error"}
    reader("reopen")
    assert reader.read().codes(0) == {"value"}


def test_release_while_a_call_hangs(start: Start) -> None:
    """What cannot be let go of now is let go of when the call returns; whoever asked is told."""
    reader = start(node({}, hangs={"nvmlDeviceGetClockInfo": True}), deadline_s=0.2)
    reader.read()
    why = reader("release")
    reader.play(node({}))

    assert why.startswith("nvmlDeviceGetClockInfo of GPU 0 (GPU-")
    until(lambda: reader.calls("nvmlShutdown") == 1)


# --- the stand-in itself ---------------------------------------------------------------------------------------------


def test_a_broken_scenario_keeps_the_last_good_one(start: Start) -> None:
    """An editor saves half a file: the library goes on with what it had."""
    reader = start(node({"temperature": 70}))
    reader.read()
    reader.path.write_text('{"gpus": [{"temperature": 50')

    assert reader.read().value(0, "gpu_temp_c") == 70.0


def test_the_file_is_read_while_it_is_replaced(start: Start) -> None:
    """A test replaces the scenario hundreds of times under a reader: each read sees one whole scenario."""
    reader = start(node({"temperature": 50, "sm_clock": 50}))
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for value in (50, 51):
                reader.play(node({"temperature": value, "sm_clock": value}))

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        temperatures = {reader.read().value(0, "gpu_temp_c") for _ in range(100)}
    finally:
        stop.set()
        writer.join()
    assert temperatures <= {50.0, 51.0}


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("00000000:1B:00.0", "0000:1b:00"),
        ("0000:1b:00", "0000:1b:00"),
        ("PCI:0000:05:00", "0000:05:00"),
        ("000b:00:00", "000b:00:00"),  # C059, the log's spelling of ...
        ("0000000B:00:00.0", "000b:00:00"),  # ... what NVML calls so
        ("1b:00.0", "0000:1b:00"),
        ("10000:01:00.0", "10000:01:00"),
    ],
)
def test_c059_addresses_are_compared_as_numbers(text: str, want: str) -> None:
    """The log and NVML spell one PCI address in two ways; the event must still find its GPU."""
    assert bdf(text) == want


@pytest.mark.parametrize("text", ["", "0000:1b", "0000:1b:00.9", "0000:1b:00:00", "gpu0", "0000:1bb:00"])
def test_what_is_no_address(text: str) -> None:
    """A line that holds no address names itself in the error."""
    with pytest.raises(ValueError, match="is not a PCI address"):
        bdf(text)


# --- who holds memory -------------------------------------------------------------------------------------------------


def test_who_holds_gpu_memory(start: Start) -> None:
    """A drill asks whether a killed engine's memory is free: over all GPUs, by pid; one that let go holds none."""
    reader = start(node({"processes": {"41": 1000, "42": 0}}, {"processes": {"41": 24}, "graphics_processes": {"7": 3}},
                        {"errors": {"nvmlDeviceGetGraphicsRunningProcesses": NOT_SUPPORTED}}))
    assert reader("processes") is None  # no GPU is open yet
    reader.read()
    assert reader("processes") == {41: 1024, 7: 3}


def test_a_look_at_the_processes_that_fails_moves_no_engine(start: Start) -> None:
    """One failed look, and an engine of two ranks was on one GPU: its group was gone, and its alert with it."""
    reader = start(node({"processes": {"41": 24}}))
    assert reader.read().gpu(0).pids == (41,)
    reader.play(node({"processes": {"41": 24}, "errors": {"nvmlDeviceGetComputeRunningProcesses": UNKNOWN}}))
    reader("advance", 31.0)
    assert reader.read().gpu(0).pids == (41,)
    reader.play(node({"processes": {"42": 24}}))
    reader("advance", 31.0)
    assert reader.read().gpu(0).pids == (42,)


def test_a_driver_of_before_510_has_an_older_call_for_its_processes(start: Start) -> None:
    """pynvml says so with an error that is none of NVML's: each look at processes cost all GPUs their reading."""
    gpu = {"processes": {"41": 24}, "errors": {"nvmlDeviceGetComputeRunningProcesses_v3": FUNCTION_NOT_FOUND}}
    older = {"errors": {"nvmlDeviceGetComputeRunningProcesses": FUNCTION_NOT_FOUND}}
    seen = start(node(gpu, older, {"processes": {"7": 1}})).read()

    assert [seen.codes(i) for i in range(3)] == [{"value"}] * 3
    assert [seen.gpu(i).pids for i in range(3)] == [(41,), (), (7,)]


@pytest.mark.parametrize("story", [{"errors": {"nvmlDeviceGetComputeRunningProcesses": UNKNOWN}},
                                   {"hangs": {"nvmlDeviceGetComputeRunningProcesses": True}}])
def test_nobody_can_tell_who_holds_gpu_memory(start: Start, story: Mapping[str, Any]) -> None:
    """Unknown is not free; and a driver that hangs on the question holds nobody up who asks."""
    reader = start(node({}, {"processes": {"41": 24}, **story}), 0.3)
    reader.read()
    assert reader("processes") is None
    assert reader("processes") is None


def test_released_gpus_are_not_asked(start: Start) -> None:
    """A GPU reset waits until nobody has it open: a question must not open it."""
    reader = start(node({"processes": {"41": 24}}))
    reader.read()
    assert reader("release") is None
    before = reader.calls("nvmlDeviceGetComputeRunningProcesses_v3", 0)
    assert reader("processes") is None
    assert reader.calls("nvmlDeviceGetComputeRunningProcesses_v3", 0) == before
