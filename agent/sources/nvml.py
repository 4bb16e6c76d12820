"""NVIDIA GPUs through NVML: what the driver tells of each card, by UUID.

Every call into the driver runs in a worker thread. A call that hangs costs its GPU: `read` returns at its deadline
with Gaps, and from then on another worker reads the other GPUs; nothing more is asked of that one until the call has
returned, and no more than MOST_STUCK calls are let hang (a process can collect a hundred threads in D state otherwise).
A call that fails costs its own value; a GPU that is lost costs its own values.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pynvml

from agent.model import Batch, Gap, GpuFacts, Sample, Why
from agent.sources.gpu_devices import nvidia_devices
from agent.sources.nvml_events import XidEvents
from agent.sources.nvml_mig import gaps_of_gpu, poll_instances
from agent.sources.nvml_state import STATE
from agent.sources.nvml_values import CODES, NAMES, STALE, UNSUPPORTED, Gpu, bdf, poll_gpu, text_of
from agent.threads import NoThread, begin

FIRST_RETRY_S = 5.0  # back-off after a failed start, or of opening anew after a loss: doubles to the caps below
RETRY_CAP_S = 60.0  # of a failing start: a driver that is loaded late is seen within a minute
COMPUTE, GRAPHICS = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"
PIDS_EVERY_S = 30.0
MOST_STUCK = 2  # calls that hang, each in its thread; with one more nothing is called until one of them returns
REOPEN_CAP_S = 300.0  # of opening anew, which disturbs the healthy GPUs a little


# --- the worker's side -----------------------------------------------------------------------------------------------


class _LateError(Exception):
    """The reader has given this pass up; nothing more is called in it."""


class _Job:
    """One piece of work of the worker, and what it has brought so far; the reader may look at any moment."""

    def __init__(self, run: Callable[[_Job], None], left_out: Mapping[int, str]) -> None:
        self.run = run
        self.left_out = left_out  # GPUs at which another call hangs: index -> that call, in words
        self.index: int | None = None  # the GPU that is asked now
        self.done = Event()
        self.abandoned = False
        self.readings: list[Sample | Gap] = []
        self.gpus: dict[str, GpuFacts] = {}
        self.processes: dict[int, int] | None = None
        self.error: str | None = None
        self.absent: str | None = None
        self.driver_version = ""
        self.at_call: tuple[str, str, float] = ("", "", time.monotonic())

    def call(self, name: str, whose: str, *args: Any) -> Any:
        """Call pynvml's function of that name; an older pynvml without it is as a driver without it."""
        if self.abandoned and name not in ("nvmlEventSetFree", "nvmlShutdown"):
        # what was let go of must really be let go of
            raise _LateError
        self.at_call = (name, whose, time.monotonic())
        function = getattr(pynvml, name, None)
        if function is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        with suppress(pynvml.NVMLLibraryMismatchError):  # its own word for that, and no NVMLError
            return function(*args)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


class _Worker:
    """The one thread that calls NVML, one job after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_begun = False
        self._running: _Job | None = None
        self.last: _Job | None = None

    def submit(self, run: Callable[[_Job], None], left_out: Mapping[int, str] | None = None) -> _Job:
        """Have it done. Raises NoThread: there is none yet, and none to be had."""
        if not self._is_begun:
            # A daemon: a thread that hangs in the driver must not keep the process from ending.
            begin(self._work, "nvml")
            self._is_begun = True
        job = self.last = _Job(run, left_out or {})
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """End the thread when its queue is done."""
        self._jobs.put(None)

    def is_stuck(self) -> bool:
        """Whether a job that was given up is still running."""
        running = self._running
        return running is not None and running.abandoned

    def hangs_index(self) -> int | None:
        """The GPU at which a job that was given up hangs; None where it hangs elsewhere, or not."""
        running = self._running
        return running.index if running is not None and running.abandoned else None

    def give_up(self, job: _Job) -> None:
        """Nobody waits for this job, or the one that it stands behind, any more."""
        (self._running or job).abandoned = True

    def hangs_at(self) -> tuple[str, float]:
        """The call that has not returned, in words, and for how many seconds."""
        job = self._running or self.last
        if job is None:
            return "nothing", 0.0
        name, whose, since = job.at_call
        hung_s = time.monotonic() - since
        return f"{name}{whose} has not returned for {hung_s:.1f} s", hung_s

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


class _Driver:
    """The state of NVML in this process. Only the worker thread touches it."""

    def __init__(self, clock: Callable[[], float], pci: Path, events: XidEvents) -> None:
        self._clock = clock
        self._events = events
        self._pci = pci
        self._started = False
        self._count: int | None = None
        self._handles: dict[int, Any] = {}
        self._gpus: dict[int, Gpu] = {}
        self._failed: dict[int, tuple[Why, str]] = {}  # index -> why its handle could not be opened
        self._known: dict[str, GpuFacts] = {}
        self._suspects: set[int] = set()  # a call on them hung once: they are read last
        self._backoff_s = FIRST_RETRY_S
        self._retry_at = -math.inf
        self._failure = ""
        self._code: int | None = None  # of the last start, if it failed
        self._absent: str | None = None
        self._reopen_at: float | None = None
        self._version = ""

    def poll(self, job: _Job, now: float) -> None:
        """Read all GPUs in the order of their index, but those that hung before last."""
        try:
            if not self._ensure_started(job):
                if self._code is not None and job.absent is None:
                    job.readings.append(Sample("nvml_error", "nvml", float(self._code), now))
                return
            asked = [index for index in range(self._count or 0) if index not in job.left_out]
            order = sorted(asked, key=lambda index: (index in self._suspects, index))
            healthy = True
            for index in order:
                job.index = index
                try:
                    healthy &= self._poll_gpu(job, index, now)
                except _LateError:
                    self._suspects.add(index)
                    raise
                except pynvml.NVMLError:
                    raise
                except Exception as error:  # what pynvml makes of an answer (a UUID of garbage) costs this GPU alone
                    self._failed[index] = (Why.ERROR, f"{job.at_call[0]}: {type(error).__name__}")
                    healthy = False
            job.index = None
            if not job.left_out:
                self._events.register(job.call, self._gpus.values())
            self._tell_left_out(job, now)
            healthy &= self._tell_missing(job, now)
        except pynvml.NVMLError as error:
            if error.value not in STALE:
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
        self._events.stop(job.call)
        self._count = None
        self._handles.clear()
        self._gpus.clear()
        self._failed.clear()
        self._reopen_at = None
        try:
            job.call("nvmlShutdown", "")
        except pynvml.NVMLError as error:
            job.error = f"nvmlShutdown: {error}"

    def ask_processes(self, job: _Job) -> None:
        """Which processes hold memory of the GPUs that are open, and how many bytes over all of them."""
        found: Counter[int] = Counter()
        for gpu in self._gpus.values():
            for name in (COMPUTE, GRAPHICS):
                whole = _processes_of(job, gpu, name) or Counter()
                parts: Counter[int] = Counter()
                for instance in gpu.instances.values():
                    parts.update(_processes_of(job, instance, name) or {})
                # of a GPU in MIG mode a privileged reader is told everything twice, another only by instance
                found.update({pid: max(whole[pid], parts[pid]) for pid in {*whole, *parts}})
        job.processes = dict(found) if self._gpus else None

    def _reopen_later(self) -> None:
        if self._reopen_at is None:
            self._reopen_at = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, REOPEN_CAP_S)

    def _ensure_started(self, job: _Job) -> bool:
        due = self._started and self._reopen_at is not None and self._clock() >= self._reopen_at
        if due and not job.left_out:  # nothing may be shut down under a call that hangs
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
        self._code = None
        return True

    def _ask_version(self, job: _Job) -> str:
        try:
            return text_of(job.call("nvmlSystemGetDriverVersion", ""))
        except pynvml.NVMLError as error:
            return f"of a version that it does not tell ({error})"

    def _note_failed_start(self, job: _Job, error: pynvml.NVMLError) -> None:
        where = job.at_call[0]
        self.stop(job)
        self._retry_at = self._clock() + min(self._backoff_s, RETRY_CAP_S)
        self._backoff_s = min(2 * self._backoff_s, RETRY_CAP_S)
        self._failure, self._absent, self._code = _why_no_start(where, error, self._pci), None, error.value
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED) and not (
            self._known or nvidia_devices(self._pci)
        ):
            self._failure, self._absent = "", f"no NVIDIA GPU here: {where}: {error}, and none under {self._pci}"
        job.error, job.absent = self._failure or None, self._absent

    def _open(self, job: _Job, index: int) -> Gpu:
        whose = f" of GPU {index}"
        # This sets the GPU up, which takes seconds without persistence mode: what came too late is not asked for again.
        handle = self._handles.get(index)
        if handle is None:
            handle = self._handles[index] = job.call("nvmlDeviceGetHandleByIndex", whose, index)
        uuid = text_of(job.call("nvmlDeviceGetUUID", whose, handle))
        try:
            name = text_of(job.call("nvmlDeviceGetName", whose, handle))
            address = bdf(text_of(job.call("nvmlDeviceGetPciInfo", whose, handle).busId))
        except (pynvml.NVMLError, ValueError) as error:
            if isinstance(error, pynvml.NVMLError) and error.value in STALE:
                raise
            before = self._known.get(uuid)
            name, address = (before.name, before.bdf) if before else ("", "")
        return Gpu(index, handle, uuid, name, address)

    def _poll_gpu(self, job: _Job, index: int, now: float) -> bool:
        """Whether it is well. A GPU whose handle cannot be had is told by _tell_missing, when all others are known."""
        if index in self._failed:
            return False
        gpu = self._gpus.get(index)
        if gpu is None:
            try:
                gpu = self._gpus[index] = self._open(job, index)
            except pynvml.NVMLError as error:
                if error.value in STALE:
                    raise
                self._failed[index] = (CODES.get(error.value, Why.ERROR), f"{job.at_call[0]}: {error}")
                return False
        if gpu.uuid not in self._known:
            self._remember(job, gpu.facts())
        gaps = poll_gpu(job.call, gpu, now, job.readings, STATE)
        poll_instances(job.call, gpu, now, job.readings)
        if self._clock() >= gpu.ask_pids_at:
            self._ask_pids(job, gpu)
        self._remember(job, gpu.facts(gaps))
        return (gpu.lost is None and len(gaps) < len(NAMES)) or all(gap.code is Why.NOT_SUPPORTED for gap in gaps)

    def _ask_pids(self, job: _Job, gpu: Gpu) -> None:
        """Whose processes compute on a GPU: by them an engine is known to be on it. Asked last, and seldom."""
        gpu.ask_pids_at = self._clock() + PIDS_EVERY_S
        asked = (*gpu.instances.values(), gpu)
        for one in asked:
            try:
                told = _processes_of(job, one, COMPUTE)
            except pynvml.NVMLError:
                continue  # who computed on it a moment ago; a process that has ended is no engine's any more
            one.pids = tuple(sorted(told or ()))
            if told is None and len(asked) == 1:
                gpu.ask_pids_at = math.inf
        gpu.pids = tuple(sorted({pid for one in asked for pid in one.pids}))

    def _remember(self, job: _Job, facts: GpuFacts) -> None:
        self._known[facts.uuid] = job.gpus[facts.uuid] = facts

    def _tell_left_out(self, job: _Job, now: float) -> None:
        """The GPUs that nobody asked, since a call to them hangs."""
        for index, why in job.left_out.items():
            known = [facts for facts in self._known.values() if facts.index == index and facts.uuid not in job.gpus]
            facts = known[0] if known else GpuFacts(f"index-{index}", index, "", "")
            job.gpus[facts.uuid] = facts
            names = (*NAMES, *(self._gpus[index].had if index in self._gpus else ()))
            job.readings.extend(gaps_of_gpu(facts, Why.HUNG, why, now, names))

    def _tell_missing(self, job: _Job, now: float) -> bool:
        """Name the GPUs that could not be opened: by the index they had, else as the one that is missing."""
        missing = {uuid: facts for uuid, facts in self._known.items() if uuid not in job.gpus}
        for index, (code, why) in self._failed.items():
            at_index = [uuid for uuid, facts in missing.items() if facts.index == index]
            uuid = next(iter(at_index or missing), f"index-{index}")
            job.gpus[uuid] = missing.pop(uuid) if uuid in missing else GpuFacts(uuid, index, "", "")
            job.readings.extend(gaps_of_gpu(job.gpus[uuid], code, why, now))
        for uuid, facts in missing.items():
            job.gpus[uuid] = facts
            why = f"NVML no longer lists this GPU; it lists {self._count}"
            job.readings.extend(gaps_of_gpu(facts, Why.LOST, why, now))
        return not missing and not self._failed


def _processes_of(job: _Job, gpu: Gpu, name: str) -> Counter[int] | None:
    """Bytes by pid of who computes or draws on one GPU or MIG instance; None where that is not told here.

    Raises pynvml.NVMLError for every other reason.
    """
    told: list[Any] | None = None
    for version in ("", "_v2"):  # drivers before 510 have the latter
        try:
            told = job.call(f"{name}{version}", gpu.label, gpu.handle)
            break
        except pynvml.NVMLError as error:
            if error.value not in UNSUPPORTED:
                raise
    if told is None:
        return None
    found: Counter[int] = Counter()
    for process in told:
        found[int(process.pid)] += int(process.usedGpuMemory or 0)
    return found


def _why_no_start(call: str, error: pynvml.NVMLError, pci: Path) -> str:
    """What failed, what PCI shows, and the next step: the message of a person's first minute with this."""
    devices = nvidia_devices(pci)
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
        self.events = XidEvents()
        self._driver = _Driver(clock, pci, self.events)
        self._worker = _Worker()
        self._stuck: list[tuple[_Worker, int]] = []  # with the index of the GPU at which each hangs
        self._facts: dict[str, GpuFacts] = {}
        self._released_until: float | None = None
        self._closed = False

    def read(self, now: float) -> Batch:
        """Read all GPUs; returns within `deadline_s`, keeping what was had by then. Never raises."""
        began = time.monotonic()
        released = self._released()
        if released is not None:
            return self._batch(now, began, (), Why.ERROR, released)
        self._leave_stuck()
        last = self._worker.last
        if self._worker.is_stuck():  # known to hang: not waited for again, the rhythm of the others is worth more
            return self._hung(now, began, ())
        if last is not None and not last.done.wait(self._deadline_s):
            self._worker.give_up(last)
            return self._hung(now, began, ())
        left_out = {index: worker.hangs_at()[0] for worker, index in self._stuck}
        try:
            job = self._worker.submit(lambda job: self._poll(job, now), left_out)
        except NoThread as error:
            return self._batch(now, began, (), Why.ERROR, str(error), failed=True)
        if not job.done.wait(max(0.0, self._deadline_s - (time.monotonic() - began))):
            self._worker.give_up(job)
            self._facts.update(job.gpus)
            return self._hung(now, began, tuple(job.readings))
        if job.error is not None:
            self._facts.update(job.gpus)
            return self._batch(now, began, tuple(job.readings), Why.ERROR, job.error, failed=True)
        self._facts = dict(job.gpus)
        if self._stuck:
            why, hung_s = self._stuck[0][0].hangs_at()
            took_s = time.monotonic() - began
            self.note = why
            return Batch(self.name, now, took_s, tuple(job.readings), gpus=self._in_order(), error=why, hung_s=hung_s)
        self.note = job.absent or f"NVIDIA driver {job.driver_version}, {len(job.gpus)} GPU(s)"
        return Batch(self.name, now, time.monotonic() - began, tuple(job.readings), gpus=self._in_order())

    def _leave_stuck(self) -> None:
        """Let a worker whose call hangs at one GPU be, and go on with another; end those whose call has returned."""
        for worker, _ in self._stuck:
            if not worker.is_stuck():
                worker.end()
        self._stuck = [(worker, index) for worker, index in self._stuck if worker.is_stuck()]
        index = self._worker.hangs_index()
        if index is not None and len(self._stuck) < MOST_STUCK and self._facts:
            self._stuck.append((self._worker, index))
            self._worker = _Worker()

    def _holder(self) -> _Worker:
        """Whoever must be done before NVML can be shut down."""
        return next((worker for worker, _ in self._stuck if worker.is_stuck()), self._worker)

    def release(self, for_s: float | None = None) -> str | None:
        """Shut NVML down, so that GPU resets and driver reloads work; for `for_s` seconds, or until `reopen`.

        Returns None once every handle is let go of, else why that is not so yet (a call hangs; it follows by itself).
        Until then reads give Gaps that say it was asked for. May be called from another thread.
        """
        self._released_until = math.inf if for_s is None else self._clock() + for_s
        holder = self._holder()
        stuck = holder.is_stuck()
        try:
            job = holder.submit(self._driver.stop)
        except NoThread as error:
            return str(error)
        if stuck or not job.done.wait(self._deadline_s):
            return f"{holder.hangs_at()[0]}; NVML is shut down as soon as it returns"
        return job.error

    def processes(self) -> dict[int, int] | None:
        """Bytes of GPU memory by pid, now; None where that cannot be had. May be called from another thread."""
        if self._closed or self._released() is not None or self._worker.is_stuck():
            return None
        try:
            job = self._worker.submit(self._driver.ask_processes)
        except NoThread:
            return None
        if not job.done.wait(self._deadline_s):
            self._worker.give_up(job)
        return job.processes if job.error is None else None

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
        holder = self._holder()
        stuck = holder.is_stuck()
        job = holder.submit(self._driver.stop)
        for worker in {self._worker, *(worker for worker, _ in self._stuck)}:
            worker.end()
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
        why, hung_s = self._worker.hangs_at()
        return replace(self._batch(now, began, had, Why.HUNG, why, failed=True), hung_s=hung_s)

    def _batch(
        self, now: float, began: float, had: tuple[Sample | Gap, ...], code: Why, why: str, failed: bool = False
    ) -> Batch:
        """What was had, and a Gap for everything else of the GPUs that are known."""
        self.note = why
        told = {(reading.name, reading.subject) for reading in had}
        gaps = (gap for facts in self._facts.values() for gap in gaps_of_gpu(facts, code, why, now))
        rest = tuple(gap for gap in gaps if (gap.name, gap.subject) not in told)
        took_s = time.monotonic() - began
        gpus = self._in_order() or None
        return Batch(self.name, now, took_s, had + rest, gpus=gpus, error=why if failed else None)
