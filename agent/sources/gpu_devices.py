"""How many NVIDIA GPUs the kernel shows, on three ways that do not need NVML: PCI, the driver's /proc, /dev."""

from __future__ import annotations

import re
import time
from pathlib import Path

from agent.model import Batch, Sample

SUBJECT = "gpu_devices"


def nvidia_devices(pci: Path) -> list[str]:
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


def count(folder: Path, name: str) -> int:
    """Entries of a folder whose name is as `name` says; 0 where there is no such folder."""
    try:
        return sum(re.fullmatch(name, entry.name) is not None for entry in folder.iterdir())
    except OSError:
        return 0


class GpuDevices:
    """The kernel's counts as a Source: samples gpus_pci, gpus_proc, gpus_dev."""

    name = "gpu_devices"

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: where /sys, /proc and /dev are."""
        self.note = "PCI, /proc/driver/nvidia, /dev"
        self._root = root

    def read(self, now: float) -> Batch:
        """Count. A few files, no driver call."""
        began = time.monotonic()
        counts = {
            "gpus_pci": len(nvidia_devices(self._root / "sys/bus/pci/devices")),
            "gpus_proc": count(self._root / "proc/driver/nvidia/gpus", r".+"),
            "gpus_dev": count(self._root / "dev", r"nvidia\d+"),
        }
        readings = tuple(Sample(name, SUBJECT, float(value), now) for name, value in counts.items())
        return Batch(self.name, now, time.monotonic() - began, readings)

    def close(self) -> None:
        """Nothing is held."""
