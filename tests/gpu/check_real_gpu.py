"""For a machine with a real NVIDIA GPU: what NvmlSource reads beside what nvidia-smi says, and what a read costs.

    .venv/bin/python tests/gpu/check_real_gpu.py

Exit status: 0 all agree, nothing on the GPU changed and every handle was let go of; 1 not so; 2 nothing to compare.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.model import Batch, Sample
from agent.sources.nvml import NvmlSource
from agent.sources.nvml_state import STATE
from agent.sources.nvml_values import NAMES

MIB = float(1 << 20)


class Twin(NamedTuple):
    """nvidia-smi's name of one of ours: its unit, and how far apart two reads a moment apart may lie."""

    query: str
    scale: float
    absolute: float
    relative: float = 0.0


TWINS = {
    "gpu_temp_c": Twin("temperature.gpu", 1, 3),
    "gpu_util": Twin("utilization.gpu", 0.01, 0.3),
    "gpu_mem_used": Twin("memory.used", MIB, 64 * MIB),
    "gpu_mem_total": Twin("memory.total", MIB, MIB),
    "gpu_mem_free": Twin("memory.free", MIB, 64 * MIB),
    "gpu_sm_clock_mhz": Twin("clocks.current.sm", 1, 100, 0.2),
    "gpu_sm_clock_max_mhz": Twin("clocks.max.sm", 1, 0),
    "gpu_power_w": Twin("power.draw", 1, 25, 0.2),
    "gpu_power_limit_w": Twin("enforced.power.limit", 1, 1),
    "gpu_ecc_corrected": Twin("ecc.errors.corrected.volatile.total", 1, 0),
    "gpu_ecc_uncorrected": Twin("ecc.errors.uncorrected.volatile.total", 1, 0),
    "gpu_ecc_corrected_ever": Twin("ecc.errors.corrected.aggregate.total", 1, 0),
    "gpu_ecc_uncorrected_ever": Twin("ecc.errors.uncorrected.aggregate.total", 1, 0),
    "gpu_memory_temp_c": Twin("temperature.memory", 1, 3),
    "gpu_pcie_gen": Twin("pcie.link.gen.gpucurrent", 1, 4),
    "gpu_pcie_gen_max": Twin("pcie.link.gen.max", 1, 0),
    "gpu_pcie_width": Twin("pcie.link.width.current", 1, 0),
    "gpu_pcie_width_max": Twin("pcie.link.width.max", 1, 0),
}
STATE_NAMES = tuple(name for group in STATE for name in group.names)
SHOWN = ("temperature.gpu.tlimit", "clocks_event_reasons.active")  # beside gpu_margin_c and gpu_throttle, by eye
SETTINGS = (
    "persistence_mode",
    "power.limit",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "clocks.applications.graphics",
)


def ask_smi(uuid: str, query: str) -> str:
    """One value of nvidia-smi as text; one query a call, since a version that lacks one refuses them all."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else "not told"


def compare(batch: Batch, uuid: str) -> bool:
    """Print all values of one GPU beside nvidia-smi's; whether they agree."""
    ours = {reading.name: reading for reading in batch.readings if reading.subject == uuid}
    agree = True
    for name in (*NAMES, *STATE_NAMES):
        reading = ours.get(name)
        twin = TWINS.get(name)
        theirs = ask_smi(uuid, twin.query) if twin else ""
        shown = "not told" if reading is None else f"{reading.value:g}" if isinstance(reading, Sample) else \
            f"{reading.code}: {reading.why}"
        verdict = ""
        if twin is not None:
            try:
                wanted = float(theirs) * twin.scale
            except ValueError:
                good = not isinstance(reading, Sample)  # [N/A] there must not be a number here
            else:
                near = twin.absolute + twin.relative * wanted
                good = isinstance(reading, Sample) and abs(reading.value - wanted) <= near
                theirs = f"{wanted:g}"
            verdict = "" if good else "DIFFERS"
            agree &= good
        print(f"  {name:22} {shown:>24}   nvidia-smi {theirs or '-':>14}  {verdict}")
    for query in SHOWN:
        print(f"  {'':22} {'':>24}   {query}: {ask_smi(uuid, query)}")
    return agree


def instances_agree(batch: Batch) -> bool:
    """Print the MIG instances, with their memory; whether they are those that nvidia-smi lists. Changes nothing."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    theirs = set(re.findall(r"UUID: (MIG-[^)\s]+)", done.stdout))
    ours = {one.uuid: (gpu, one) for gpu in batch.gpus or () for one in gpu.instances}
    for uuid, (gpu, one) in ours.items():
        told = {r.name: f"{r.value / MIB:.0f} MiB" if isinstance(r, Sample) else f"{r.code}: {r.why}"
                for r in batch.readings if r.subject == uuid}
        print(f"  MIG {one.gi}/{one.ci} of GPU {gpu.index} {uuid} {one.name}, pids {one.pids}: {told}")
    print(f"MIG instances: {len(ours)}, nvidia-smi lists {len(theirs)}{'' if set(ours) == theirs else '  DIFFERS'}")
    return set(ours) == theirs


def open_handles() -> list[str]:
    """Device files of NVIDIA that this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except OSError:
            continue
    return [target for target in targets if target.startswith("/dev/nvidia")]


def main() -> int:
    source = NvmlSource(deadline_s=10.0)
    batch = source.read(time.time())
    if not batch.gpus or shutil.which("nvidia-smi") is None:
        print(batch.error or source.note if not batch.gpus else "nvidia-smi is not on PATH: nothing to compare with")
        return 2
    before = {(gpu.uuid, query): ask_smi(gpu.uuid, query) for gpu in batch.gpus for query in SETTINGS}
    walls, began_cpu = [], time.process_time()
    for _ in range(50):
        batch = source.read(time.time())
        walls.append(batch.took_s)
    cpu_s = (time.process_time() - began_cpu) / 50
    agree = True
    for gpu in batch.gpus or ():
        print(f"GPU {gpu.index} {gpu.name} {gpu.uuid} {gpu.bdf}, own limit {gpu.limit_c}")
        agree &= compare(source.read(time.time()), gpu.uuid)
        for found in gpu.found:
            print(f"  {found.name:22} by {found.how or found.why}")
    agree &= instances_agree(batch)
    after = {(uuid, query): ask_smi(uuid, query) for uuid, query in before}
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    held = len(open_handles())
    why = source.release()
    left = open_handles()
    print(source.note)
    print(f"one poll: median {median(walls) * 1e3:.2f} ms, max {max(walls) * 1e3:.2f} ms, CPU {cpu_s * 1e3:.2f} ms")
    print(f"changed on the GPU: {changed or 'nothing'}")
    print(f"device files open: {held}, after release: {left or 'none'} {why or ''}")
    source.close()
    return 0 if agree and not changed and not left and why is None else 1


if __name__ == "__main__":
    sys.exit(main())
