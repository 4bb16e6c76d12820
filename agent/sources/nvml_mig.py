"""The MIG instances of a GPU: which there are, and what NVML tells of each, which is its memory and its processes.

Everything else (temperature, clocks, power, ECC, links, the recovery action) is the whole GPU's and is asked of that.
A handle of an instance may be another one's at the next read: which it is, is asked each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pynvml

from agent.model import Gap, GpuFacts, Sample, Why
from agent.sources.nvml_values import (
    CODES,
    MEMORY,
    NAMES,
    STALE,
    UNSUPPORTED,
    Call,
    Gpu,
    Reader,
    gaps_of,
    read_group,
    text_of,
)

MODE = "gpu_mig"
NONE_SHOWN = ("MIG mode is on and NVML shows no instance: none was made, or this user may not see them (each needs its "
              "/dev/nvidia-caps/nvidia-cap*, which only root may open unless it was given)")
NO_SUCH_SLOT = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)


def poll_instances(call: Call, gpu: Gpu, now: float, readings: list[Sample | Gap]) -> None:
    """Append what the instances of a GPU tell, after the GPU itself was read; they are in `gpu.instances` then.

    Raises pynvml.NVMLError where NVML itself must be started anew (`STALE`).
    """
    if not gpu.had.get(MODE):
        gpu.instances, gpu.mig_problem = {}, None
        return
    if gpu.lost is None:
        try:
            gpu.instances = _instances(call, gpu)
            gpu.mig_problem = None if gpu.instances else NONE_SHOWN
        except pynvml.NVMLError as error:
            if error.value in STALE:
                raise
            gpu.mig_problem = f"its MIG instances cannot be listed: {error}"
            if CODES.get(error.value) is Why.LOST:
                gpu.lost = gpu.mig_problem
    for instance in gpu.instances.values():
        if gpu.lost is not None or gpu.mig_problem is not None:
            code = Why.ERROR if gpu.lost is None else Why.LOST
            readings.extend(gaps_of(instance.uuid, MEMORY.names, code, gpu.lost or gpu.mig_problem or "", now))
        else:
            _poll_instance(call, instance, now, readings)


def _poll_instance(call: Call, instance: Gpu, now: float, readings: list[Sample | Gap]) -> None:
    had = read_group(Reader(call, instance), instance, MEMORY, now)
    if isinstance(had, Gap):
        readings.extend(gaps_of(instance.uuid, MEMORY.names, had.code, had.why, now))
    else:
        readings.extend(Sample(n, instance.uuid, float(v), now) for n, v in zip(MEMORY.names, had, strict=True))
    why = "NVML tells no utilization of a MIG instance"
    readings.append(Gap("gpu_util", instance.uuid, Why.NOT_SUPPORTED, why, now))


def _instances(call: Call, gpu: Gpu) -> dict[str, Gpu]:
    """Every instance of a GPU by its UUID; of one that was known, what is remembered of it."""
    found: dict[str, Gpu] = {}
    try:
        slots = int(call("nvmlDeviceGetMaxMigDeviceCount", gpu.label, gpu.handle))
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return found
        raise
    for slot in range(slots):
        try:
            handle = call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.label, gpu.handle, slot)
            uuid = text_of(call("nvmlDeviceGetUUID", gpu.label, handle))
            found[uuid] = gpu.instances.get(uuid) or _open(call, gpu, handle, uuid)
            found[uuid].handle = handle
        except pynvml.NVMLError as error:
            if error.value not in NO_SUCH_SLOT:  # an empty slot, or destroyed while we looked
                raise
    return found


def _open(call: Call, gpu: Gpu, handle: object, uuid: str) -> Gpu:
    whose = f" of {uuid} of GPU {gpu.index}"
    gi = int(call("nvmlDeviceGetGpuInstanceId", whose, handle))
    ci = int(call("nvmlDeviceGetComputeInstanceId", whose, handle))
    try:
        name = text_of(call("nvmlDeviceGetName", whose, handle))
    except pynvml.NVMLError as error:
        if error.value in STALE or CODES.get(error.value) is Why.LOST:
            raise
        name = ""
    return Gpu(gpu.index, handle, uuid, name, gpu.bdf, gi=gi, ci=ci)


def gaps_of_gpu(facts: GpuFacts, code: Why, why: str, now: float, names: Sequence[str] = NAMES) -> Iterator[Gap]:
    """A Gap for each of `names` of a GPU, and for what its MIG instances would tell."""
    yield from gaps_of(facts.uuid, names, code, why, now)
    for instance in facts.instances:
        yield from gaps_of(instance.uuid, MEMORY.names, code, why, now)
