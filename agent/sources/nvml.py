"""NVIDIA GPUs through NVML: what the driver tells of each card, by UUID.

Every call into the driver runs in one worker thread. A call that hangs costs this source alone: `read` returns at its
deadline with Gaps, and no second call is made until the first has returned (a process can collect a hundred threads
in D state otherwise). A call that fails costs its own value; a GPU that is lost costs its own values.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import pynvml

from agent.model import Batch, Found, Gap, GpuFacts, Sample, Why

FIRST_RETRY_S = 5.0  # back-off after a failed start, or of opening anew after a loss: doubles to the caps below
RETRY_CAP_S = 60.0  # of a failing start: a driver that is loaded late is seen within a minute
REOPEN_CAP_S = 300.0  # of opening anew, which disturbs the healthy GPUs a little
NO_LIMIT_C = 127  # what cards without a limit tell as their threshold

# Answers that will not change on this handle: the call is not made again.
_UNSUPPORTED = frozenset(
    (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    )
)
# Answers that say that the library must be started anew.
_STALE = frozenset((pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
_CODES: Mapping[int, Why] = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Why.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Why.LOST,
    pynvml.NVML_ERROR_TIMEOUT: Why.TIMEOUT,
}


def bdf(text: str) -> str:
    """A PCI address as domain:bus:device in lower-case hex, from NVML's, the kernel's or lspci's spelling.

    `00000000:1B:00.0`, `PCI:0000:1b:00`, `000b:00:00` (three parts: no function) and `1b:00.0` (domain 0) are
    understood. Raises ValueError for anything else.
    """
    found = re.fullmatch(
        r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-7])?", text.strip(), re.IGNORECASE
    )
    if found is None:
        raise ValueError(f"{text!r} is not a PCI address; expected domain:bus:device, as in 0000:1b:00")
    domain, bus, device = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def is_blank(raw: float, wide: bool = False) -> bool:
    """Whether a number is one of the fillers that NVML and DCGM write for "no data". `wide`: it has 64 bits.

    A 64-bit quantity may well pass through the 32-bit fillers: those count only where it is not wide.
    """
    if raw == 0xFFFFFFFFFFFFFFFF or 0x7FFFFFFFFFFFFFF0 <= raw <= 0x7FFFFFFFFFFFFFFF + 1:
        return True
    if isinstance(raw, float) and 140737488355328.0 <= raw < 140737488355344.0:
        return True
    return not wide and (raw == 0xFFFFFFFF or 0x7FFFFFF0 <= raw <= 0x7FFFFFFF)


# --- what is read ----------------------------------------------------------------------------------------------------


class _NoValueError(Exception):
    """A call succeeded, but what it gave is not a number that can be used."""

    def __init__(self, code: Why, text: str) -> None:
        super().__init__(text)
        self.code = code


class _UnsupportedError(Exception):
    """This way leads nowhere on this card; the next one may."""


class _LateError(Exception):
    """The reader has given this pass up; nothing more is called in it."""


class _Field(NamedTuple):
    id: int
    signed: bool = False  # told as unsigned by some drivers


POWER_NS = _Field(pynvml.NVML_FI_DEV_PERF_POLICY_POWER)
THERMAL_NS = _Field(pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL)
POWER_MW = _Field(185)  # NVML_FI_DEV_POWER_AVERAGE, what nvidia-smi calls power.draw
SLOWDOWN_TLIMIT = _Field(194, signed=True)  # NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT
FIELDS: Mapping[int, _Field] = {f.id: f for f in (POWER_NS, THERMAL_NS, POWER_MW, SLOWDOWN_TLIMIT)}
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class _Reader:
    """One GPU in one pass: calls by name, the fields that were fetched together, the values had so far."""

    def __init__(self, job: _Job, gpu: _Gpu) -> None:
        self._job = job
        self._gpu = gpu
        self.fields: dict[int, float | pynvml.NVMLError] = {}
        self.got: dict[str, float] = {}
        self.missed: dict[str, Why] = {}

    def call(self, name: str, *args: Any) -> Any:
        return self._job.call(name, self._gpu.label, self._gpu.handle, *args)

    def field(self, wanted: _Field) -> float:
        value = self.fields.get(wanted.id)
        if value is None:
            raise _UnsupportedError
        if isinstance(value, pynvml.NVMLError):
            raise value
        return value


def _temperature(r: _Reader) -> tuple[float, ...]:
    # It is signed in the newer call: the filler of 32 ones arrives as -1, which no die in a server has.
    return (r.call("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU) % 2**32,)


def _temperature_v0(r: _Reader) -> tuple[float, ...]:
    return (r.call("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),)


def _margin_tlimit(r: _Reader) -> tuple[float, ...]:
    """Hopper and newer count down to a limit, and slow down a little past it: at -2, on an H100."""
    margin = float(_usable(r.call("nvmlDeviceGetMarginTemperature")))
    try:
        return (margin - _usable(r.field(SLOWDOWN_TLIMIT)),)
    except _UnsupportedError:
        return (margin,)


def _margin_threshold(r: _Reader) -> tuple[float, ...]:
    limit_c = r.call("nvmlDeviceGetTemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if limit_c == NO_LIMIT_C or is_blank(limit_c) or limit_c <= 0:
        raise _UnsupportedError
    r.got["limit_c"] = float(limit_c)
    if r.missed.get("gpu_temp_c") is Why.NOT_SUPPORTED:
        raise _UnsupportedError
    if "gpu_temp_c" not in r.got:
        raise _NoValueError(Why.ERROR, "the temperature was not had")
    return (limit_c - r.got["gpu_temp_c"],)


def _utilization(r: _Reader) -> tuple[float, ...]:
    return (_usable(r.call("nvmlDeviceGetUtilizationRates").gpu) / 100,)


def _memory_v2(r: _Reader) -> tuple[float, ...]:
    return _sizes(r.call("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2))


def _memory(r: _Reader) -> tuple[float, ...]:
    return _sizes(r.call("nvmlDeviceGetMemoryInfo"))


def _sizes(memory: Any) -> tuple[float, ...]:
    if memory.total == 0:  # unified memory has no framebuffer: 0 of 0 is not a size
        raise _UnsupportedError
    return memory.used, memory.total, memory.free


def _violation(policy: int) -> Callable[[_Reader], tuple[float, ...]]:
    return lambda r: (r.call("nvmlDeviceGetViolationStatus", policy).violationTime,)


def _watts(milliwatts: float) -> tuple[float, ...]:
    return (_usable(milliwatts) / 1000,)


class _Way(NamedTuple):
    """One way to have the values of a group. `how` is what `tocsin doctor` and the Gaps call it."""

    how: str
    read: Callable[[_Reader], tuple[float, ...]]


class _Group(NamedTuple):
    """Values had together. The first way that the card supports is used for as long as its handle lives."""

    names: tuple[str, ...]
    ways: tuple[_Way, ...]
    wide: bool = False
    low: float = 0.0
    high: float = math.inf


# The margin comes after the temperature, which it may need.
GROUPS: tuple[_Group, ...] = (
    _Group(
        ("gpu_temp_c",),
        (_Way("nvmlDeviceGetTemperatureV", _temperature), _Way("nvmlDeviceGetTemperature", _temperature_v0)),
        high=200,
    ),
    _Group(
        ("gpu_margin_c",),
        (
            _Way("nvmlDeviceGetMarginTemperature - field 194 (slowdown T.Limit)", _margin_tlimit),
            _Way("nvmlDeviceGetTemperatureThreshold(slowdown) - temperature", _margin_threshold),
        ),
        low=-200,
        high=260,
    ),
    _Group(("gpu_util",), (_Way("nvmlDeviceGetUtilizationRates", _utilization),), high=1),
    _Group(
        ("gpu_mem_used", "gpu_mem_total", "gpu_mem_free"),
        (_Way("nvmlDeviceGetMemoryInfo_v2", _memory_v2), _Way("nvmlDeviceGetMemoryInfo", _memory)),
        wide=True,
    ),
    _Group(
        ("gpu_sm_clock_mhz",),
        (_Way("nvmlDeviceGetClockInfo(SM)", lambda r: (r.call("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),)),),
    ),
    _Group(
        ("gpu_sm_clock_max_mhz",),
        (
            _Way(
                "nvmlDeviceGetMaxClockInfo(SM)",
                lambda r: (r.call("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),),
            ),
        ),
    ),
    _Group(
        ("gpu_throttle",),
        (
            _Way(
                "nvmlDeviceGetCurrentClocksEventReasons",
                lambda r: (r.call("nvmlDeviceGetCurrentClocksEventReasons"),),
            ),
            _Way(
                "nvmlDeviceGetCurrentClocksThrottleReasons",
                lambda r: (r.call("nvmlDeviceGetCurrentClocksThrottleReasons"),),
            ),
        ),
        wide=True,
    ),
    _Group(
        ("gpu_thermal_ns",),
        (
            _Way("field 75 (thermal policy)", lambda r: (r.field(THERMAL_NS),)),
            _Way("nvmlDeviceGetViolationStatus(thermal)", _violation(pynvml.NVML_PERF_POLICY_THERMAL)),
        ),
        wide=True,
    ),
    _Group(
        ("gpu_power_ns",),
        (
            _Way("field 74 (power policy)", lambda r: (r.field(POWER_NS),)),
            _Way("nvmlDeviceGetViolationStatus(power)", _violation(pynvml.NVML_PERF_POLICY_POWER)),
        ),
        wide=True,
    ),
    _Group(
        ("gpu_power_w",),
        (
            _Way("field 185 (average power)", lambda r: _watts(r.field(POWER_MW))),
            _Way("nvmlDeviceGetPowerUsage", lambda r: _watts(r.call("nvmlDeviceGetPowerUsage"))),
        ),
    ),
    _Group(
        ("gpu_power_limit_w",),
        (
            _Way("nvmlDeviceGetEnforcedPowerLimit", lambda r: _watts(r.call("nvmlDeviceGetEnforcedPowerLimit"))),
            _Way("nvmlDeviceGetPowerManagementLimit", lambda r: _watts(r.call("nvmlDeviceGetPowerManagementLimit"))),
        ),
    ),
)
NAMES: tuple[str, ...] = tuple(name for group in GROUPS for name in group.names)


def _usable(raw: float, wide: bool = False) -> float:
    if isinstance(raw, float) and not math.isfinite(raw):
        raise _NoValueError(Why.NOT_A_NUMBER, f"it gave {raw}")
    if is_blank(raw, wide):
        raise _NoValueError(Why.SENTINEL, f"it gave {raw:.0f}, the filler for no data")
    return raw


def _bounded(group: _Group, values: tuple[float, ...]) -> tuple[float, ...]:
    for value in values:
        _usable(value, group.wide)
        if not group.low <= value <= group.high:
            raise _NoValueError(Why.OUT_OF_RANGE, f"it gave {value:g}, outside {group.low:g} to {group.high:g}")
    return values


# --- the worker's side -----------------------------------------------------------------------------------------------


class _Job:
    """One piece of work of the worker, and what it has brought so far; the reader may look at any moment."""

    def __init__(self, run: Callable[[_Job], None]) -> None:
        self.run = run
        self.done = Event()
        self.abandoned = False
        self.readings: list[Sample | Gap] = []
        self.gpus: dict[str, GpuFacts] = {}
        self.error: str | None = None
        self.absent: str | None = None
        self.driver_version = ""
        self.at_call: tuple[str, str, float] = ("", "", time.monotonic())

    def call(self, name: str, whose: str, *args: Any) -> Any:
        """Call pynvml's function of that name; an older pynvml without it is as a driver without it."""
        if self.abandoned and name != "nvmlShutdown":  # what was let go of must really be let go of
            raise _LateError
        self.at_call = (name, whose, time.monotonic())
        function = getattr(pynvml, name, None)
        if function is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return function(*args)


class _Worker:
    """The one thread that calls NVML, one job after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._running: _Job | None = None
        self.last: _Job | None = None

    def submit(self, run: Callable[[_Job], None]) -> _Job:
        if self._thread is None:
            # A daemon: a thread that hangs in the driver must not keep the process from ending.
            self._thread = Thread(target=self._work, name="nvml", daemon=True)
            self._thread.start()
        job = self.last = _Job(run)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """End the thread when its queue is done."""
        self._jobs.put(None)

    def is_stuck(self) -> bool:
        """Whether a job that was given up is still running."""
        running = self._running
        return running is not None and running.abandoned

    def give_up(self, job: _Job) -> None:
        """Nobody waits for this job, or the one that it stands behind, any more."""
        (self._running or job).abandoned = True

    def hangs_at(self) -> str:
        job = self._running or self.last
        if job is None:
            return "nothing"
        name, whose, since = job.at_call
        return f"{name}{whose} has not returned for {time.monotonic() - since:.1f} s"

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._running = job
            try:
                job.run(job)
            except _LateError:
                pass
            except Exception as error:  # this one thread must outlive whatever a driver answers
                job.error = f"{job.at_call[0]}: {type(error).__name__}: {error}"
            self._running = None
            job.done.set()


@dataclass(slots=True)
class _Gpu:
    """An open handle, and what is remembered for as long as it is open."""

    index: int
    handle: Any
    uuid: str
    name: str
    bdf: str
    limit_c: float | None = None
    unsupported: set[str] = field(default_factory=set)  # ways
    live_fields: list[int] = field(default_factory=lambda: list(FIELDS))
    one_by_one: bool = False  # fields cannot be read together here
    how: dict[str, str] = field(default_factory=dict)  # name -> way that gave it last
    lost: str | None = None

    @property
    def label(self) -> str:
        return f" of GPU {self.index} ({self.uuid})"

    def facts(self, gaps: Mapping[str, str]) -> GpuFacts:
        found = tuple(Found(name, self.uuid, self.how.get(name), why=gaps.get(name)) for name in NAMES)
        return GpuFacts(self.uuid, self.index, self.name, self.bdf, self.limit_c, found)


class _Driver:
    """The state of NVML in this process. Only the worker thread touches it."""

    def __init__(self, clock: Callable[[], float], pci: Path) -> None:
        self._clock = clock
        self._pci = pci
        self._started = False
        self._count: int | None = None
        self._gpus: dict[int, _Gpu] = {}
        self._failed: dict[int, tuple[Why, str]] = {}  # index -> why its handle could not be opened
        self._known: dict[str, GpuFacts] = {}
        self._suspects: set[int] = set()  # a call on them hung once: they are read last
        self._backoff_s = FIRST_RETRY_S
        self._retry_at = -math.inf
        self._failure = ""
        self._absent: str | None = None
        self._reopen_at: float | None = None
        self._version = ""

    def poll(self, job: _Job, now: float) -> None:
        """Read all GPUs in the order of their index, but those that hung before last."""
        try:
            if not self._ensure_started(job):
                return
            order = sorted(range(self._count or 0), key=lambda index: (index in self._suspects, index))
            healthy = True
            for index in order:
                try:
                    healthy &= self._poll_gpu(job, index, now)
                except _LateError:
                    self._suspects.add(index)
                    raise
            healthy &= self._tell_missing(job, now)
        except pynvml.NVMLError as error:
            if error.value not in _STALE:
                raise
            job.error = f"{job.at_call[0]}: {error}; NVML is started anew"
            self._reopen_later()
            return
        if healthy:
            self._backoff_s = FIRST_RETRY_S
        else:
            self._reopen_later()

    def stop(self, job: _Job) -> None:
        """Let go of every handle, so that a GPU can be reset and the driver reloaded."""
        if not self._started:
            return
        self._started = False
        self._count = None
        self._gpus.clear()
        self._failed.clear()
        self._reopen_at = None
        try:
            job.call("nvmlShutdown", "")
        except pynvml.NVMLError as error:
            job.error = f"nvmlShutdown: {error}"

    def _reopen_later(self) -> None:
        if self._reopen_at is None:
            self._reopen_at = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, REOPEN_CAP_S)

    def _ensure_started(self, job: _Job) -> bool:
        if self._started and self._reopen_at is not None and self._clock() >= self._reopen_at:
            self.stop(job)
            job.error = None
        if not self._started and self._clock() < self._retry_at:
            job.error, job.absent = self._failure or None, self._absent
            return False
        try:
            if not self._started:
                job.call("nvmlInit", "")
                self._started = True
            if self._count is None:
                self._count = int(job.call("nvmlDeviceGetCount", ""))
                self._version = self._ask_version(job)
        except pynvml.NVMLError as error:
            self._note_failed_start(job, error)
            return False
        job.driver_version = self._version
        return True

    def _ask_version(self, job: _Job) -> str:
        try:
            return _text(job.call("nvmlSystemGetDriverVersion", ""))
        except pynvml.NVMLError as error:
            return f"of a version that it does not tell ({error})"

    def _note_failed_start(self, job: _Job, error: pynvml.NVMLError) -> None:
        where = job.at_call[0]
        self.stop(job)
        self._retry_at = self._clock() + min(self._backoff_s, RETRY_CAP_S)
        self._backoff_s = min(2 * self._backoff_s, RETRY_CAP_S)
        self._failure, self._absent = _why_no_start(where, error, self._pci), None
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED) and not (
            self._known or _nvidia_devices(self._pci)
        ):
            self._failure, self._absent = "", f"no NVIDIA GPU here: {where}: {error}, and none under {self._pci}"
        job.error, job.absent = self._failure or None, self._absent

    def _open(self, job: _Job, index: int) -> _Gpu:
        whose = f" of GPU {index}"
        handle = job.call("nvmlDeviceGetHandleByIndex", whose, index)
        uuid = _text(job.call("nvmlDeviceGetUUID", whose, handle))
        try:
            name = _text(job.call("nvmlDeviceGetName", whose, handle))
            address = bdf(_text(job.call("nvmlDeviceGetPciInfo", whose, handle).busId))
        except (pynvml.NVMLError, ValueError) as error:
            if isinstance(error, pynvml.NVMLError) and error.value in _STALE:
                raise
            before = self._known.get(uuid)
            name, address = (before.name, before.bdf) if before else ("", "")
        return _Gpu(index, handle, uuid, name, address)

    def _poll_gpu(self, job: _Job, index: int, now: float) -> bool:
        """Whether it is well. A GPU whose handle cannot be had is told by _tell_missing, when all others are known."""
        if index in self._failed:
            return False
        gpu = self._gpus.get(index)
        if gpu is None:
            try:
                gpu = self._gpus[index] = self._open(job, index)
            except pynvml.NVMLError as error:
                if error.value in _STALE:
                    raise
                self._failed[index] = (_CODES.get(error.value, Why.ERROR), f"{job.at_call[0]}: {error}")
                return False
        if gpu.uuid not in self._known:
            self._remember(job, gpu.facts({}))
        gaps = _poll_open_gpu(job, gpu, now)
        self._remember(job, gpu.facts({gap.name: gap.why for gap in gaps}))
        return len(gaps) < len(NAMES) or all(gap.code is Why.NOT_SUPPORTED for gap in gaps)

    def _remember(self, job: _Job, facts: GpuFacts) -> None:
        self._known[facts.uuid] = job.gpus[facts.uuid] = facts

    def _tell_missing(self, job: _Job, now: float) -> bool:
        """Name the GPUs that could not be opened: by the index they had, else as the one that is missing."""
        missing = {uuid: facts for uuid, facts in self._known.items() if uuid not in job.gpus}
        for index, (code, why) in self._failed.items():
            at_index = [uuid for uuid, facts in missing.items() if facts.index == index]
            uuid = next(iter(at_index or missing), f"index-{index}")
            job.gpus[uuid] = missing.pop(uuid) if uuid in missing else GpuFacts(uuid, index, "", "")
            job.readings.extend(_gaps(uuid, NAMES, code, why, now))
        for uuid, facts in missing.items():
            job.gpus[uuid] = facts
            why = f"NVML no longer lists this GPU; it lists {self._count}"
            job.readings.extend(_gaps(uuid, NAMES, Why.LOST, why, now))
        return not missing and not self._failed


def _poll_open_gpu(job: _Job, gpu: _Gpu, now: float) -> list[Gap]:
    """Read one GPU into the job; returns its Gaps."""
    reader = _Reader(job, gpu)
    gaps: list[Gap] = []
    try:
        if gpu.lost is None:
            _fetch_fields(reader, gpu)
    except pynvml.NVMLError as error:
        if error.value in _STALE:
            raise
        gpu.lost = f"{job.at_call[0]}: {error}"
    for group in GROUPS:
        outcome: tuple[float, ...] | Gap = (
            Gap(group.names[0], gpu.uuid, Why.LOST, gpu.lost, now)
            if gpu.lost is not None
            else _read_group(reader, gpu, group, now)
        )
        if isinstance(outcome, Gap):
            reader.missed.update(dict.fromkeys(group.names, outcome.code))
            told = list(_gaps(gpu.uuid, group.names, outcome.code, outcome.why, now))
            gaps.extend(told)
            job.readings.extend(told)
            continue
        for name, value in zip(group.names, outcome, strict=True):
            reader.got[name] = float(value)
            job.readings.append(Sample(name, gpu.uuid, float(value), now))
    gpu.limit_c = reader.got.get("limit_c", gpu.limit_c)
    return gaps


def _read_group(reader: _Reader, gpu: _Gpu, group: _Group, now: float) -> tuple[float, ...] | Gap:
    for way in group.ways:
        if way.how in gpu.unsupported:
            continue
        code, why = Why.ERROR, ""
        try:
            values = _bounded(group, way.read(reader))
        except _UnsupportedError:
            gpu.unsupported.add(way.how)
            continue
        except _NoValueError as error:
            code, why = error.code, str(error)
        except pynvml.NVMLError as error:
            if error.value in _STALE:
                raise
            if error.value in _UNSUPPORTED:
                gpu.unsupported.add(way.how)
                continue
            code, why = _CODES.get(error.value, Why.ERROR), str(error)
            if code is Why.LOST:
                gpu.lost = f"{way.how}: {why}"
        else:
            gpu.how.update(dict.fromkeys(group.names, way.how))
            return values
        return Gap(group.names[0], gpu.uuid, code, f"{way.how}: {why}", now)
    for name in group.names:
        gpu.how.pop(name, None)
    tried = ", ".join(way.how for way in group.ways)
    return Gap(group.names[0], gpu.uuid, Why.NOT_SUPPORTED, f"this card or driver does not tell it ({tried})", now)


def _fetch_fields(reader: _Reader, gpu: _Gpu) -> None:
    """All fields in one call; one by one where a card refuses them together. Raises for a GPU that is lost."""
    if not gpu.live_fields:
        return
    parts = [[f] for f in gpu.live_fields] if gpu.one_by_one else [list(gpu.live_fields)]
    for ids in parts:
        try:
            for told in reader.call("nvmlDeviceGetFieldValues", ids):
                reader.fields[told.fieldId] = _field_value(told)
        except pynvml.NVMLError as error:
            if error.value in _STALE or _CODES.get(error.value) is Why.LOST:
                raise
            if len(ids) > 1 and error.value not in _UNSUPPORTED:
                gpu.one_by_one = True
                _fetch_fields(reader, gpu)
                return
            reader.fields.update(dict.fromkeys(ids, error))
    gpu.live_fields = [f for f in gpu.live_fields if not _is_unsupported_field(reader.fields.get(f))]
    for f in FIELDS:
        if f not in gpu.live_fields:
            reader.fields.pop(f, None)


def _field_value(told: Any) -> float | pynvml.NVMLError:
    if told.nvmlReturn != pynvml.NVML_SUCCESS:
        return pynvml.NVMLError(told.nvmlReturn)
    if FIELDS[told.fieldId].signed:
        return int(told.value.siVal)
    if not 0 <= told.valueType < len(_MEMBERS):
        return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    value: float = getattr(told.value, _MEMBERS[told.valueType])
    return value


def _is_unsupported_field(value: object) -> bool:
    # A driver that does not know a field's number calls it an invalid argument.
    return isinstance(value, pynvml.NVMLError) and (
        value.value in _UNSUPPORTED or value.value == pynvml.NVML_ERROR_INVALID_ARGUMENT
    )


def _gaps(uuid: str, names: Iterable[str], code: Why, why: str, now: float) -> Iterator[Gap]:
    return (Gap(name, uuid, code, why, now) for name in names)


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode(errors="replace")


def _nvidia_devices(pci: Path) -> list[str]:
    """PCI addresses of NVIDIA display and compute devices (class 03): not their sound, not NVSwitch."""
    found = []
    for device in sorted(pci.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip().lower() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(device.name)
    return found


def _why_no_start(call: str, error: pynvml.NVMLError, pci: Path) -> str:
    """What failed, what PCI shows, and the next step: the message of a person's first minute with this."""
    devices = _nvidia_devices(pci)
    shown = f"PCI shows {len(devices)} NVIDIA GPU(s)" if devices else f"{pci} shows no NVIDIA GPU"
    steps: Mapping[int, str] = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was looked for where the dynamic linker looks "
        "(LD_LIBRARY_PATH, ld.so.cache): install the driver's user-space part, or give the container the utility "
        "capability (NVIDIA_DRIVER_CAPABILITIES=utility)",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the kernel module nvidia is not loaded: modprobe nvidia, then look at "
        "dmesg | grep NVRM",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the library and the loaded kernel module are of different versions "
        "(compare /proc/driver/nvidia/version): reload the module or reboot, then restart tocsin",
        pynvml.NVML_ERROR_UNKNOWN: "in a container this is what losing /dev/nvidia* to `systemctl daemon-reload` looks "
        "like: compare nvidia-smi on the host, and restart the container",
        pynvml.NVML_ERROR_NO_PERMISSION: "/dev/nvidia* cannot be opened by this user: look at ls -l /dev/nvidia*",
    }
    return f"{call}: {error}; {shown}; {steps.get(error.value, 'look at nvidia-smi and dmesg | grep NVRM')}"


# --- the reader's side -----------------------------------------------------------------------------------------------


class NvmlSource:
    """All NVIDIA GPUs of this machine as a Source.

    A read gives one Sample or Gap for each of NAMES and each GPU that was ever seen, subject: its UUID (`index-3` for
    a GPU whose handle could never be opened). `Batch.gpus` is () and `Batch.error` None where this machine has no
    NVIDIA GPU; `note` says then what was looked for. `Batch.error` is set when NVML as a whole failed or hangs; the
    Gaps of the GPUs known by then are in `readings` all the same.
    """

    name = "nvml"

    def __init__(
        self,
        deadline_s: float = 2.0,
        *,
        pci: Path = Path("/sys/bus/pci/devices"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s` bounds one read; `clock` (monotonic, s) is for back-off and the end of a release."""
        self.note = "not read yet"
        self._deadline_s = deadline_s
        self._clock = clock
        self._driver = _Driver(clock, pci)
        self._worker = _Worker()
        self._facts: dict[str, GpuFacts] = {}
        self._released_until: float | None = None
        self._closed = False

    def read(self, now: float) -> Batch:
        """Read all GPUs; returns within `deadline_s`, keeping what was had by then. Never raises."""
        began = time.monotonic()
        released = self._released()
        if released is not None:
            return self._batch(now, began, (), Why.ERROR, released)
        last = self._worker.last
        if self._worker.is_stuck():  # known to hang: not waited for again, the rhythm of the others is worth more
            return self._hung(now, began, ())
        if last is not None and not last.done.wait(self._deadline_s):
            self._worker.give_up(last)
            return self._hung(now, began, ())
        job = self._worker.submit(lambda job: self._poll(job, now))
        if not job.done.wait(max(0.0, self._deadline_s - (time.monotonic() - began))):
            self._worker.give_up(job)
            self._facts.update(job.gpus)
            return self._hung(now, began, tuple(job.readings))
        if job.error is not None:
            self._facts.update(job.gpus)
            return self._batch(now, began, tuple(job.readings), Why.ERROR, job.error, failed=True)
        self._facts = dict(job.gpus)
        self.note = job.absent or f"NVIDIA driver {job.driver_version}, {len(job.gpus)} GPU(s)"
        return Batch(self.name, now, time.monotonic() - began, tuple(job.readings), gpus=self._in_order())

    def release(self, for_s: float | None = None) -> str | None:
        """Shut NVML down, so that GPU resets and driver reloads work; for `for_s` seconds, or until `reopen`.

        Returns None once every handle is let go of, else why that is not so yet (a call hangs; it follows by itself).
        Until then reads give Gaps that say it was asked for. May be called from another thread.
        """
        self._released_until = math.inf if for_s is None else self._clock() + for_s
        stuck = self._worker.is_stuck()
        job = self._worker.submit(self._driver.stop)
        if stuck or not job.done.wait(self._deadline_s):
            return f"{self._worker.hangs_at()}; NVML is shut down as soon as it returns"
        return job.error

    def reopen(self) -> None:
        """End a release; the next read starts NVML anew."""
        self._released_until = None

    def close(self) -> None:
        """Shut NVML down and end the worker; does not wait for a call that hangs."""
        if self._closed:
            return
        self._closed = True
        self._released_until = math.inf
        if self._worker.last is None:
            return
        stuck = self._worker.is_stuck()
        job = self._worker.submit(self._driver.stop)
        self._worker.end()
        if not stuck:
            job.done.wait(min(1.0, self._deadline_s))

    def _poll(self, job: _Job, now: float) -> None:
        """In the worker: a release that overtook the read must not be undone by it."""
        released = self._released()
        if released is None:
            self._driver.poll(job, now)
        else:
            job.error = released

    def _released(self) -> str | None:
        until = self._released_until
        if until is None:
            return None
        left_s = until - self._clock()
        if left_s <= 0:
            self._released_until = None
            return None
        when = "until it is reopened" if math.isinf(left_s) else f"for {left_s:.0f} s more"
        return f"released on request (POST /nvml/release) {when}"

    def _in_order(self) -> tuple[GpuFacts, ...]:
        return tuple(sorted(self._facts.values(), key=lambda facts: facts.index))

    def _hung(self, now: float, began: float, had: tuple[Sample | Gap, ...]) -> Batch:
        return self._batch(now, began, had, Why.HUNG, self._worker.hangs_at(), failed=True)

    def _batch(
        self, now: float, began: float, had: tuple[Sample | Gap, ...], code: Why, why: str, failed: bool = False
    ) -> Batch:
        """What was had, and a Gap for everything else of the GPUs that are known."""
        self.note = why
        told = {(reading.name, reading.subject) for reading in had}
        gaps = (gap for uuid in self._facts for gap in _gaps(uuid, NAMES, code, why, now))
        rest = tuple(gap for gap in gaps if (gap.name, gap.subject) not in told)
        took_s = time.monotonic() - began
        gpus = self._in_order() or None
        return Batch(self.name, now, took_s, had + rest, gpus=gpus, error=why if failed else None)
