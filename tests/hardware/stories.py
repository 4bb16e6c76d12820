"""A node whose GPUs are the C stand-in's: the real pynvml, our source, windows, rules and alerts; time as we say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.hardware.lines import line_of
from agent.model import SEVERITY_RANK, Batch, Event, Sample, Slo, Transition
from agent.node import Node, Setup
from agent.sources.kernel_log import told_by
from rules import severity_of
from tests.fake_nvml.reader import Reader
from tests.scenes import built_in

T0 = 1_790_000_000.0
POLL_S = 15.0
GIB = 1 << 30
H100: Mapping[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "temperature": 61, "margin": 26, "slowdown_tlimit": -2, "utilization": 97,
    "memory": {"total": 80 * GIB, "reserved": GIB, "used": 70 * GIB}, "sm_clock": 1755, "sm_clock_max": 1980,
    "throttle": 4, "thermal_ns": 5_000_000_000, "power_ns": 120_000_000, "power_w": 612.5, "power_limit_w": 700,
    "memory_temperature": 70, "memory_max": 95, "recovery_action": 0, "ecc_corrected": 3, "ecc_uncorrected": 0,
    "ecc_corrected_ever": 30, "ecc_uncorrected_ever": 1, "retired_corrected": 0, "retired_uncorrected": 0,
    "retired_pending": 0, "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_replays": 2,
    "remapped": {"correctable": 0, "uncorrectable": 0, "pending": 0, "failure": 0, "exhausted": 0},
    "nvlinks": 0x3FFFF, "nvlink_replays": 4, "nvlink_recoveries": 1, "nvlink_crc_flit": 0, "nvlink_crc_data": 0,
    "fabric_state": 3, "fabric_status": 0, "persistence": 1, "energy_mj": 1_000_000, "mig": 0,
}  # fmt: skip


class Story:
    """Reads the stand-in every `poll_s` of its own time, and judges."""

    def __init__(self, reader: Reader, *, node: Node | None = None, gpus_expected: int | None = None,
                 poll_s: float = POLL_S) -> None:
        self.reader, self.poll_s = reader, poll_s
        rules = tuple(built_in().values())
        self.node = node or Node(Setup("gpu-17", poll_s, Slo(written=True), (), rules, severity_of,
                                       gpus_expected=gpus_expected))
        self.at_s = 0.0
        self.seen: list[Transition] = []
        self.read_at: dict[str, list[float]] = {}

    def run(self, for_s: float, *events: Event, log_open: bool = True) -> list[tuple[str, str]]:
        """Go on for a while; returns what fired and resolved, as (state, rule)."""
        end, new = self.at_s + for_s, []
        happened: Sequence[Event] = events
        while self.at_s < end:
            now = T0 + self.at_s
            batch = self.reader.read(now).batch
            for reading in batch.readings:
                if isinstance(reading, Sample) and reading.name == "gpu_temp_c":
                    self.read_at.setdefault(reading.subject, []).append(now)
            self.node.take(batch)
            if log_open:
                opened = Sample("kernel_log_open", "kernel_log", 1.0, now)
                self.node.take(Batch("kernel_log", now, 0.0, (opened,), events=tuple(happened)))
                happened = ()
            new += self.node.step(now, self.poll_s)
            self.reader("advance", self.poll_s)
            self.at_s += self.poll_s
        self.seen += new
        return [(t.kind, t.alert.rule) for t in new if t.kind in ("firing", "resolved")
                and SEVERITY_RANK[t.alert.severity] > 0]

    def verdict(self, index: int, mig: tuple[int, int] | None = None) -> dict[str, Any]:
        """The entry of `check --gpus` of one GPU, or of a MIG instance of it (GPU instance, compute instance)."""
        found: dict[str, Any] = next(
            g for g in self.node.gpus_report()["gpus"]
            if g["index"] == index and (None if g["mig"] is None else (g["mig"]["gi"], g["mig"]["ci"])) == mig)
        return found

    def pages(self) -> set[str]:
        """Rules of page severity that fire now."""
        return {a.rule for a in self.node.book.alerts.values() if a.state == "firing" and a.severity == "page"}


Tell = Callable[..., Story]  # the fixture `tell`: a scenario, and Story's arguments


def xid(number: int, at_s: float, device: str = "0000:1d:00", text: str = "x", instance: str = "") -> Event:
    """A line of the kernel log."""
    line = line_of(f"NVRM: Xid (PCI:{device}{instance}): {number}, {text}")
    assert line is not None
    return Event("xid", device, number, T0 + at_s, T0 + at_s, detail=told_by(line))


def gpus(count: int = 3, **changed: Any) -> dict[str, Any]:
    """So many H100, the first at 0000:1b:00; `gpu2={...}` changes one of them."""
    return {"defaults": H100, "gpus": [{"pci": f"0000:{0x1b + i:02x}:00.0", **changed.get(f"gpu{i}", {})}
                                       for i in range(count)]}
