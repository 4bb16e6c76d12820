"""What NVML tells of one GPU: which call or field gives which number, and which answers are no numbers.

nvml.py opens the GPUs and guards the calls; here is what is asked of a handle that is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pynvml

from agent.hardware.lines import bdf
from agent.model import Found, Gap, GpuFacts, MigFacts, Sample, Why

__all__ = [
    "MEMORY", "NAMES", "Gpu", "Group", "Reader", "UnsupportedError", "Way", "bdf", "gaps_of", "is_blank", "poll_gpu",
    "read_group", "text_of",
]  # fmt: skip

Call = Callable[..., Any]  # (pynvml's function by name, whose GPU for messages, its arguments)

NO_LIMIT_C = 127  # what cards without a limit tell as their threshold, or more: no silicon is meant to reach it

# Answers that will not change on this handle: the call is not made again.
UNSUPPORTED = frozenset(
    (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    )
)
# Answers that say that the library must be started anew.
STALE = frozenset((pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
CODES: Mapping[int, Why] = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Why.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Why.LOST,
    pynvml.NVML_ERROR_TIMEOUT: Why.TIMEOUT,
}


def is_blank(raw: float, wide: bool = False) -> bool:
    """Whether a number is one of the fillers that NVML and DCGM write for "no data". `wide`: it has 64 bits.

    A 64-bit quantity may well pass through the 32-bit fillers: those count only where it is not wide. What went through
    a double or a decimal text is a filler rounded: 9223372036854776000, 2^63 and 2^64.
    """
    if raw >= 0xFFFFFFFFFFFFF800 or 0x7FFFFFFFFFFFFFF0 <= raw <= 0x7FFFFFFFFFFFFFF0 + 2048:
        return True
    if isinstance(raw, float) and 140737488355328.0 <= raw < 140737488355344.0:
        return True
    return not wide and (raw == 0xFFFFFFFF or 0x7FFFFFF0 <= raw <= 0x7FFFFFFF)


class NoValueError(Exception):
    """A call succeeded, but what it gave is not a number that can be used."""

    def __init__(self, code: Why, text: str) -> None:
        super().__init__(text)
        self.code = code


class UnsupportedError(Exception):
    """This way leads nowhere on this card; the next one may."""

    def __init__(self, text: str = "it tells none") -> None:
        super().__init__(text)


class Field(NamedTuple):
    id: int
    signed: bool = False  # told as unsigned by some drivers


POWER_NS = Field(pynvml.NVML_FI_DEV_PERF_POLICY_POWER)
THERMAL_NS = Field(pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL)
POWER_MW = Field(185)  # NVML_FI_DEV_POWER_AVERAGE, what nvidia-smi calls power.draw
SLOWDOWN_TLIMIT = Field(194, signed=True)  # NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT
RECOVERY_ACTION = Field(230)  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
RECOVERY_NAME, RESET = "gpu_recovery", 1.0  # nvml.h: NVML_GPU_RECOVERY_ACTION_GPU_RESET
ECC_CORRECTED, ECC_UNCORRECTED, ECC_CORRECTED_EVER, ECC_UNCORRECTED_EVER = (Field(n) for n in (3, 4, 5, 6))
RETIRED_CORRECTED, RETIRED_UNCORRECTED, RETIRED_PENDING = Field(29), Field(30), Field(31)
NVLINK_CRC_FLIT, NVLINK_CRC_DATA, NVLINK_REPLAYS, NVLINK_RECOVERIES = (Field(n) for n in (38, 45, 52, 59))
MEMORY_TEMP, PCIE_REPLAYS = Field(82), Field(94)
NVLINK5_RECOVERIES = Field(215)  # NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, which NVLink5 has instead of 59
ALL_LINKS = 0xFFFFFFFF  # scope of the fields that NVLink5 counts by link
FIELDS: Mapping[int, Field] = {
    f.id: f
    for f in (
        POWER_NS, THERMAL_NS, POWER_MW, SLOWDOWN_TLIMIT, RECOVERY_ACTION, ECC_CORRECTED, ECC_UNCORRECTED,
        ECC_CORRECTED_EVER, ECC_UNCORRECTED_EVER, RETIRED_CORRECTED, RETIRED_UNCORRECTED, RETIRED_PENDING,
        NVLINK_CRC_FLIT, NVLINK_CRC_DATA, NVLINK_REPLAYS, NVLINK_RECOVERIES, MEMORY_TEMP, PCIE_REPLAYS,
    )
}  # fmt: skip
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
_NARROW = frozenset(("uiVal", "siVal"))  # of 32 bits


class Reader:
    """One GPU in one pass: calls by name, the fields that were fetched together, the values had so far."""

    def __init__(self, call: Call, gpu: Gpu) -> None:
        self._call = call
        self._gpu = gpu
        self.fields: dict[int, float | pynvml.NVMLError | NoValueError] = {}
        self.got: dict[str, float] = {}
        self.missed: dict[str, Why] = {}
        self.needs_reset = False  # a call was refused with NVML_ERROR_RESET_REQUIRED

    def call(self, name: str, *args: Any) -> Any:
        try:
            return self._call(name, self._gpu.label, self._gpu.handle, *args)
        except pynvml.NVMLError as error:
            self.needs_reset |= error.value == pynvml.NVML_ERROR_RESET_REQUIRED
            raise

    def field(self, wanted: Field) -> float:
        value = self.fields.get(wanted.id)
        if value is None:
            raise UnsupportedError
        if isinstance(value, Exception):
            raise value
        return value

    def field_of_all_links(self, wanted: Field) -> float:
        """A field of NVLink5 over all links. Asked by itself: GB200 refuses these beside others."""
        (told,) = self.call("nvmlDeviceGetFieldValues", [(wanted.id, ALL_LINKS)])
        value = _field_value(told, wanted)
        if _is_unsupported_field(value):
            raise UnsupportedError
        if isinstance(value, Exception):
            raise value
        return value


def _temperature(r: Reader) -> tuple[float, ...]:
    # It is signed in the newer call: the filler of 32 ones arrives as -1, which no die in a server has.
    return (r.call("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU) % 2**32,)


def _temperature_v0(r: Reader) -> tuple[float, ...]:
    return (r.call("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),)


def _margin_tlimit(r: Reader) -> tuple[float, ...]:
    """Hopper and newer count down to a limit, and slow down a little past it: at -2, on an H100."""
    margin = float(usable(r.call("nvmlDeviceGetMarginTemperature")))
    try:
        return (margin - usable(r.field(SLOWDOWN_TLIMIT)),)
    except UnsupportedError:
        return (margin,)


def _margin_threshold(r: Reader) -> tuple[float, ...]:
    limit_c = r.call("nvmlDeviceGetTemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if is_blank(limit_c) or not 0 < limit_c < NO_LIMIT_C:
        raise UnsupportedError
    r.got["limit_c"] = float(limit_c)
    if r.missed.get("gpu_temp_c") is Why.NOT_SUPPORTED:
        raise UnsupportedError
    if "gpu_temp_c" not in r.got:
        raise NoValueError(Why.ERROR, "the temperature was not had")
    return (limit_c - r.got["gpu_temp_c"],)


def _utilization(r: Reader) -> tuple[float, ...]:
    return (usable(r.call("nvmlDeviceGetUtilizationRates").gpu) / 100,)


def _memory_v2(r: Reader) -> tuple[float, ...]:
    return _sizes(r.call("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2))


def _memory(r: Reader) -> tuple[float, ...]:
    return _sizes(r.call("nvmlDeviceGetMemoryInfo"))


def _sizes(memory: Any) -> tuple[float, ...]:
    if memory.total == 0:  # unified memory has no framebuffer: 0 of 0 is not a size
        raise UnsupportedError
    for part in ("used", "free"):
        size = usable(getattr(memory, part), wide=True)
        if size > memory.total:  # below zero is a huge number here
            raise NoValueError(Why.OUT_OF_RANGE, f"it gave {size / 2**30:.4g} GiB {part} of {memory.total / 2**30:.4g}")
    return memory.used, memory.total, memory.free


def _violation(policy: int) -> Callable[[Reader], tuple[float, ...]]:
    return lambda r: (r.call("nvmlDeviceGetViolationStatus", policy).violationTime,)


def _watts(milliwatts: float) -> tuple[float, ...]:
    return (usable(milliwatts) / 1000,)


class Way(NamedTuple):
    """One way to have the values of a group. `how` is what `tocsin doctor` and the Gaps call it."""

    how: str
    read: Callable[[Reader], tuple[float, ...]]


class Group(NamedTuple):
    """Values had together. The first way that the card supports is used for as long as its handle lives."""

    names: tuple[str, ...]
    ways: tuple[Way, ...]
    wide: bool = False
    low: float = 0.0
    high: float = math.inf


# What a MIG instance tells, too.
MEMORY = Group(
    ("gpu_mem_used", "gpu_mem_total", "gpu_mem_free"),
    (Way("nvmlDeviceGetMemoryInfo_v2", _memory_v2), Way("nvmlDeviceGetMemoryInfo", _memory)),
    wide=True,
)
# The margin comes after the temperature, which it may need.
GROUPS: tuple[Group, ...] = (
    Group(
        ("gpu_temp_c",),
        (Way("nvmlDeviceGetTemperatureV", _temperature), Way("nvmlDeviceGetTemperature", _temperature_v0)),
        high=200,
    ),
    Group(
        ("gpu_margin_c",),
        (
            Way("nvmlDeviceGetMarginTemperature - field 194 (slowdown T.Limit)", _margin_tlimit),
            Way("nvmlDeviceGetTemperatureThreshold(slowdown) - temperature", _margin_threshold),
        ),
        low=-200,
        high=260,
    ),
    Group(("gpu_util",), (Way("nvmlDeviceGetUtilizationRates", _utilization),), high=1),
    MEMORY,
    Group(
        ("gpu_sm_clock_mhz",),
        (Way("nvmlDeviceGetClockInfo(SM)", lambda r: (r.call("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),)),),
    ),
    Group(
        ("gpu_sm_clock_max_mhz",),
        (
            Way(
                "nvmlDeviceGetMaxClockInfo(SM)",
                lambda r: (r.call("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),),
            ),
        ),
    ),
    Group(
        ("gpu_throttle",),
        (
            Way(
                "nvmlDeviceGetCurrentClocksEventReasons",
                lambda r: (r.call("nvmlDeviceGetCurrentClocksEventReasons"),),
            ),
            Way(
                "nvmlDeviceGetCurrentClocksThrottleReasons",
                lambda r: (r.call("nvmlDeviceGetCurrentClocksThrottleReasons"),),
            ),
        ),
        wide=True,
    ),
    Group(
        ("gpu_thermal_ns",),
        (
            Way("field 75 (thermal policy)", lambda r: (r.field(THERMAL_NS),)),
            Way("nvmlDeviceGetViolationStatus(thermal)", _violation(pynvml.NVML_PERF_POLICY_THERMAL)),
        ),
        wide=True,
    ),
    Group(
        ("gpu_power_ns",),
        (
            Way("field 74 (power policy)", lambda r: (r.field(POWER_NS),)),
            Way("nvmlDeviceGetViolationStatus(power)", _violation(pynvml.NVML_PERF_POLICY_POWER)),
        ),
        wide=True,
    ),
    Group(
        ("gpu_power_w",),
        (
            Way("field 185 (average power)", lambda r: _watts(r.field(POWER_MW))),
            Way("nvmlDeviceGetPowerUsage", lambda r: _watts(r.call("nvmlDeviceGetPowerUsage"))),
        ),
    ),
    Group(
        ("gpu_power_limit_w",),
        (
            Way("nvmlDeviceGetEnforcedPowerLimit", lambda r: _watts(r.call("nvmlDeviceGetEnforcedPowerLimit"))),
            Way("nvmlDeviceGetPowerManagementLimit", lambda r: _watts(r.call("nvmlDeviceGetPowerManagementLimit"))),
        ),
    ),
)
NAMES: tuple[str, ...] = tuple(name for group in GROUPS for name in group.names)


def usable(raw: float, wide: bool = False) -> float:
    if isinstance(raw, float) and not math.isfinite(raw):
        raise NoValueError(Why.NOT_A_NUMBER, f"it gave {raw}")
    if is_blank(raw, wide):
        raise NoValueError(Why.SENTINEL, f"it gave {raw:.0f}, the filler for no data")
    return raw


def _bounded(group: Group, values: tuple[float, ...]) -> tuple[float, ...]:
    for value in values:
        usable(value, group.wide)
        if not group.low <= value <= group.high:
            raise NoValueError(Why.OUT_OF_RANGE, f"it gave {value:g}, outside {group.low:g} to {group.high:g}")
    return values


@dataclass(slots=True)
class Gpu:
    """An open handle of a GPU or of a MIG instance of one, and what is remembered for as long as it is open."""

    index: int
    handle: Any
    uuid: str
    name: str
    bdf: str
    limit_c: float | None = None
    unsupported: set[str] = field(default_factory=set)  # ways
    live_fields: list[int] = field(default_factory=lambda: list(FIELDS))
    told_fields: set[int] = field(default_factory=set)  # that gave a value once: they are asked for again
    one_by_one: bool = False  # fields cannot be read together here
    how: dict[str, str] = field(default_factory=dict)  # name -> way that gave it last
    lost: str | None = None
    pids: tuple[int, ...] = ()  # of processes that compute on it
    ask_pids_at: float = 0.0  # monotonic
    had: dict[str, float] = field(default_factory=dict)  # of the state: what was told last
    gi: int | None = None  # of a MIG instance: its GPU instance and its compute instance
    ci: int | None = None
    instances: dict[str, Gpu] = field(default_factory=dict)  # MIG instances by UUID
    mig_problem: str | None = None  # why they are not known

    @property
    def label(self) -> str:
        return f" of GPU {self.index} ({self.uuid})"

    def facts(self, gaps: Iterable[Gap] = ()) -> GpuFacts:
        missing = {gap.name: Found(gap.name, self.uuid, None, why=gap.why, code=gap.code) for gap in gaps}
        found = tuple(missing.get(name) or Found(name, self.uuid, self.how.get(name)) for name in NAMES)
        if self.mig_problem is not None:
            found += (Found("gpu_mig_instances", self.uuid, None, why=self.mig_problem, code=Why.ERROR),)
        instances = tuple(MigFacts(one.uuid, one.gi or 0, one.ci or 0, one.name, one.pids)
                          for one in self.instances.values())
        return GpuFacts(self.uuid, self.index, self.name, self.bdf, self.limit_c, found, self.pids, instances)


def poll_gpu(
    call: Call, gpu: Gpu, now: float, readings: list[Sample | Gap], state: Iterable[Group] = ()
) -> list[Gap]:
    """Append what one GPU gives to `readings`, one by one, so that a hang keeps what was had; returns its Gaps.

    Of `state` what a card does not tell is left out, and a Gap is given only for what it told before; those Gaps are
    not among the returned ones. Raises pynvml.NVMLError where NVML itself must be started anew (`STALE`).
    """
    reader = Reader(call, gpu)
    gaps: list[Gap] = []
    try:
        if gpu.lost is None:
            _fetch_fields(reader, gpu)
    except pynvml.NVMLError as error:
        if error.value in STALE:
            raise
        gpu.lost = f"nvmlDeviceGetFieldValues: {error}"
    for group in GROUPS:
        outcome = read_group(reader, gpu, group, now)
        if isinstance(outcome, Gap):
            reader.missed.update(dict.fromkeys(group.names, outcome.code))
            told = list(gaps_of(gpu.uuid, group.names, outcome.code, outcome.why, now))
            gaps.extend(told)
            readings.extend(told)
            continue
        for name, value in zip(group.names, outcome, strict=True):
            reader.got[name] = float(value)
            readings.append(Sample(name, gpu.uuid, float(value), now))
    gpu.limit_c = reader.got.get("limit_c", gpu.limit_c)
    _poll_state(reader, gpu, now, readings, state)
    return gaps


def _poll_state(
    reader: Reader, gpu: Gpu, now: float, readings: list[Sample | Gap], state: Iterable[Group]
) -> None:
    for group in state:
        outcome = read_group(reader, gpu, group, now)
        if isinstance(outcome, Gap) and group.names == (RECOVERY_NAME,) and reader.needs_reset:
            outcome = (RESET,)  # it is what the driver says in place of every number
        if isinstance(outcome, Gap):
            if outcome.code is not Why.NOT_SUPPORTED:
                known = [name for name in group.names if name in gpu.had]
                readings.extend(gaps_of(gpu.uuid, known, outcome.code, outcome.why, now))
            continue
        told = {name: float(value) for name, value in zip(group.names, outcome, strict=True)}
        gpu.had |= told
        readings.extend(Sample(name, gpu.uuid, value, now) for name, value in told.items())


def _asked(way: Way, reader: Reader) -> tuple[float, ...]:
    """What a way gives. Raises UnsupportedError also where the driver says so itself."""
    try:
        return way.read(reader)
    except pynvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
        failure = UnsupportedError(str(error))
    raise failure


def _leave(gpu: Gpu, group: Group, way: Way, error: UnsupportedError) -> str:
    """A way that leads nowhere is not tried again, unless it gave a value before; then it returns what it says now.

    Of a GPU that was put into MIG mode meanwhile much is told no more.
    """
    if gpu.how.get(group.names[0]) == way.how and not gpu.had.get("gpu_mig"):
        return f"{way.how}: {error}, and it gave a value before"
    gpu.unsupported.add(way.how)
    return ""


def read_group(reader: Reader, gpu: Gpu, group: Group, now: float) -> tuple[float, ...] | Gap:
    """The values of a group by the first way that works on this handle, or why there are none."""
    if gpu.lost is not None:
        return Gap(group.names[0], gpu.uuid, Why.LOST, gpu.lost, now)
    silent = ""  # what the way says now that gave these numbers before: this card does not lack them
    for way in group.ways:
        if way.how in gpu.unsupported:
            continue
        code, why = Why.ERROR, ""
        try:
            values = _bounded(group, _asked(way, reader))
        except UnsupportedError as error:
            silent = _leave(gpu, group, way, error) or silent
            continue
        except NoValueError as error:
            code, why = error.code, str(error)
        except pynvml.NVMLError as error:
            if error.value in STALE:
                raise
            code, why = CODES.get(error.value, Why.ERROR), str(error)
            if code is Why.LOST:
                gpu.lost = f"{way.how}: {why}"
        else:
            gpu.how.update(dict.fromkeys(group.names, way.how))
            return values
        return Gap(group.names[0], gpu.uuid, code, f"{way.how}: {why}", now)
    if silent:
        return Gap(group.names[0], gpu.uuid, Why.ERROR, silent, now)
    for name in group.names:
        gpu.how.pop(name, None)
    tried = ", ".join(way.how for way in group.ways)
    return Gap(group.names[0], gpu.uuid, Why.NOT_SUPPORTED, f"this card or driver does not tell it ({tried})", now)


def _fetch_fields(reader: Reader, gpu: Gpu) -> None:
    """All fields in one call; one by one where a card refuses them together. Raises for a GPU that is lost."""
    if not gpu.live_fields:
        return
    parts = [[f] for f in gpu.live_fields] if gpu.one_by_one else [list(gpu.live_fields)]
    for ids in parts:
        try:
            for told in reader.call("nvmlDeviceGetFieldValues", ids):
                reader.fields[told.fieldId] = _field_value(told, FIELDS[told.fieldId])
        except pynvml.NVMLError as error:
            if error.value in STALE or CODES.get(error.value) is Why.LOST:
                raise
            if len(ids) > 1 and error.value not in UNSUPPORTED:
                gpu.one_by_one = True
                _fetch_fields(reader, gpu)
                return
            reader.fields.update(dict.fromkeys(ids, error))
    gpu.told_fields |= {f for f, told in reader.fields.items() if not isinstance(told, Exception)}
    gpu.live_fields = [f for f in gpu.live_fields
                       if f in gpu.told_fields or not _is_unsupported_field(reader.fields.get(f))]
    for f in FIELDS:
        if f not in gpu.live_fields:
            reader.fields.pop(f, None)


def _field_value(told: Any, wanted: Field) -> float | pynvml.NVMLError | NoValueError:
    if told.nvmlReturn != pynvml.NVML_SUCCESS:
        return pynvml.NVMLError(told.nvmlReturn)
    if wanted.signed:
        return int(told.value.siVal)
    if not 0 <= told.valueType < len(_MEMBERS):
        return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    value: float = getattr(told.value, _MEMBERS[told.valueType])
    if _MEMBERS[told.valueType] in _NARROW and is_blank(value):
        return NoValueError(Why.SENTINEL, f"it gave {value:.0f}, the filler for no data")
    return value


def _is_unsupported_field(value: object) -> bool:
    # A driver that does not know a field's number calls it an invalid argument.
    return isinstance(value, pynvml.NVMLError) and (
        value.value in UNSUPPORTED or value.value == pynvml.NVML_ERROR_INVALID_ARGUMENT
    )


def gaps_of(uuid: str, names: Iterable[str], code: Why, why: str, now: float) -> Iterator[Gap]:
    return (Gap(name, uuid, code, why, now) for name in names)


def text_of(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode(errors="replace")
