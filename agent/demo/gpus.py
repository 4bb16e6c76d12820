"""Eight simulated GPUs: load makes heat, heat makes slow clocks; and the source that tells of them in NVML's place.

The story's process moves them on and writes them to one small file; the agent's source and the engines read it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.model import Batch, Found, Gap, GpuFacts, Sample, Why

COUNT = 8
NAME = "Simulated H100 80GB HBM3"
IDLE_W, MOST_W = 75.0, 700.0
INLET_C = 30.0
KELVIN_PER_W = 0.06  # with all of its air: 72 °C at 700 W
WARMING_S = 25.0  # time constant: a real chassis takes minutes, a story has three
LIMIT_C, RELEASE_C = 87.0, 82.0  # hardware slows the card at the one, and lets go at the other
MOST_MHZ, SLOWED_MHZ, LEAST_MHZ = 1980.0, 690.0, 210.0
MHZ_PER_KELVIN = 60.0  # that the slowdown takes for each kelvin over the limit
HW_THERMAL, IDLE = 0x40, 0x1  # nvml.h: nvmlClocksEventReason…
TOTAL_BYTES, ENGINE_BYTES = 80 << 30, 62 << 30
OFF_THE_BUS = 79  # the Xid with which a GPU is gone
STALE_S = 10.0


@dataclass
class Gpu:
    """One card. `cooling`: share of its air, 0 to 1; `load`: share of the time in which it computes."""

    index: int
    temp_c: float = 45.0
    load: float = 0.0
    cooling: float = 1.0
    slowed: bool = False
    slowed_s: float = 0.0
    joules: float = 0.0
    lost: bool = False

    @property
    def uuid(self) -> str:
        """As NVML writes one."""
        return f"GPU-de300000-0000-4000-8000-{self.index:012d}"

    @property
    def bdf(self) -> str:
        """Its place on the bus."""
        return f"0000:{0x1B + self.index:02x}:00"

    @property
    def clock_mhz(self) -> float:
        """Full, unless the hardware slows it: the hotter, the more."""
        if not self.slowed:
            return MOST_MHZ
        return max(LEAST_MHZ, SLOWED_MHZ - MHZ_PER_KELVIN * max(0.0, self.temp_c - LIMIT_C))

    @property
    def power_w(self) -> float:
        """What it draws at this load and clock."""
        return IDLE_W + (MOST_W - IDLE_W) * self.load * self.clock_mhz / MOST_MHZ

    def advance(self, dt_s: float) -> None:
        """Warm up or cool down toward what power and air give: T = inlet + K/W × W ÷ cooling."""
        power_w = self.power_w
        toward_c = INLET_C + KELVIN_PER_W * power_w / max(self.cooling, 0.05)
        self.temp_c += (toward_c - self.temp_c) * (1.0 - math.exp(-dt_s / WARMING_S))
        self.slowed = self.temp_c >= (RELEASE_C if self.slowed else LIMIT_C)
        self.slowed_s += dt_s if self.slowed else 0.0
        self.joules += power_w * dt_s

    def readings(self) -> Mapping[str, float]:
        """What NVML would tell of it, by the names of agent.sources.nvml_values and nvml_state."""
        used = ENGINE_BYTES + (1 << 30)
        return {
            "gpu_temp_c": round(self.temp_c), "gpu_margin_c": round(LIMIT_C - self.temp_c), "gpu_util": self.load,
            "gpu_mem_used": used, "gpu_mem_total": TOTAL_BYTES, "gpu_mem_free": TOTAL_BYTES - used,
            "gpu_sm_clock_mhz": round(self.clock_mhz), "gpu_sm_clock_max_mhz": MOST_MHZ,
            "gpu_throttle": HW_THERMAL if self.slowed else 0 if self.load else IDLE,
            "gpu_thermal_ns": self.slowed_s * 1e9, "gpu_power_ns": 0.0, "gpu_power_w": self.power_w,
            "gpu_power_limit_w": MOST_W, "gpu_recovery": 0, "gpu_ecc_corrected": 0, "gpu_ecc_uncorrected": 0,
            "gpu_remap_pending": 0, "gpu_remap_failed": 0, "gpu_pcie_gen": 5, "gpu_pcie_gen_max": 5,
            "gpu_pcie_width": 16, "gpu_pcie_width_max": 16, "gpu_pcie_replays": 0, "gpu_nvlink_up": 0x3FFFF,
            "gpu_nvlink_count": 18, "gpu_energy_mj": self.joules * 1000,
        }  # fmt: skip


def xid_line(gpu: Gpu, number: int, text: str, when: str) -> str:
    """The line that the driver would write, as a syslog daemon keeps it. `when`: ISO 8601."""
    return f"{when} demo-node kernel: NVRM: Xid (PCI:{gpu.bdf}): {number}, {text}\n"


def save(path: Path, gpus: Sequence[Gpu]) -> None:
    """Write all of them; a reader sees the file of before or of now, never half of one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(gpu) for gpu in gpus]))
    os.replace(new, path)  # noqa: PTH105


def load(path: Path) -> list[Gpu]:
    """Read them. Raises OSError, ValueError."""
    return [Gpu(**told) for told in json.loads(path.read_text())]


class SimulatedGpus:
    """They, as a Source of the agent: the same Batch, samples and name as NVML's."""

    name = "nvml"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note = f"SIMULATED: {COUNT} GPUs of tocsin demo, from {path}"

    def read(self, now: float) -> Batch:
        """All GPUs as the story has them now."""
        began = time.monotonic()
        try:
            gpus = load(self._path)
            old_s = now - self._path.stat().st_mtime
        except (OSError, ValueError) as error:
            return Batch(self.name, now, 0.0, error=f"{self._path}: {error}; is tocsin demo still there?")
        if old_s > STALE_S:
            return Batch(self.name, now, 0.0, error=f"{self._path}: {old_s:.0f} s old; is tocsin demo still there?")
        readings: list[Sample | Gap] = []
        for gpu in gpus:
            for name, value in gpu.readings().items():
                readings.append(Gap(name, gpu.uuid, Why.LOST, "GPU is lost", now) if gpu.lost
                                else Sample(name, gpu.uuid, float(value), now))
        facts = tuple(GpuFacts(gpu.uuid, gpu.index, NAME, gpu.bdf, LIMIT_C,
                               tuple(Found(name, gpu.uuid, "simulated") for name in gpu.readings())) for gpu in gpus)
        return Batch(self.name, now, time.monotonic() - began, tuple(readings), gpus=facts)

    def processes(self) -> None:
        """Nobody holds memory of a GPU that is not there."""

    def release(self, for_s: float | None = None) -> None:
        """There is no handle to let go of."""

    def reopen(self) -> None:
        """Nor one to take."""

    def close(self) -> None:
        """Nor one to close."""
