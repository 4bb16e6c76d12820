"""What is known without NVML: how many NVIDIA GPUs, by PCI, the driver's /proc and /dev; the driver's versions."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from agent.model import Batch, Sample

SUBJECT = "gpu_devices"
# Where the library lies that whatever starts next will load: Debian, Red Hat, a container's own.
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
VERSION = r"\d+(?:\.\d+)+"


def nvidia_devices(pci: Path, known: dict[str, bool] | None = None) -> list[str]:
    """PCI addresses of NVIDIA display and compute devices (class 03): not their sound, not NVSwitch.

    `known`: address -> whether it is one, of the look before: what a device is the kernel reads once, when it appears.
    """
    known = {} if known is None else known
    names = _names(pci)
    for gone in known.keys() - set(names):
        del known[gone]
    for name in names:
        if name not in known:
            with suppress(OSError):
                vendor, kind = ((pci / name / what).read_text().strip().lower() for what in ("vendor", "class"))
                known[name] = vendor == "0x10de" and kind.startswith("0x03")
    return sorted(name for name in names if known.get(name))


def count(folder: Path, name: str) -> int:
    """Entries of a folder whose name is as `name` says; 0 where there is no such folder."""
    return len(list(filter(re.compile(name).fullmatch, _names(folder))))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  (a Path for each of hundreds costs more than all else here)
    except OSError:
        return []


def module_version(root: Path) -> str | None:
    """The version of the kernel module that is loaded; None where none is, or it does not tell."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    told = re.search(rf"Kernel Module(?: for \S+)?\s+({VERSION})", text)
    return None if told is None else told[1]


def library_version(root: Path) -> str | None:
    """The version of the driver's library on disk, by the name of the file behind it; None where it is not found."""
    for folder in LIBRARIES:
        path = root / folder / "libnvidia-ml.so.1"
        if not os.path.exists(path):  # noqa: PTH110  (one call, where resolving asks for each folder)
            continue
        try:
            name = path.resolve(strict=True).name
        except (OSError, RuntimeError):
            continue
        told = re.fullmatch(rf"libnvidia-ml\.so\.({VERSION})", name)
        return None if told is None else told[1]
    return None


class GpuDevices:
    """The kernel's counts as a Source: samples gpus_pci, gpus_proc, gpus_dev; driver_differs where both are told."""

    name = "gpu_devices"

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: where /sys, /proc and /dev are."""
        self.note = "PCI, /proc/driver/nvidia, /dev"
        self._root = root
        self._pci: dict[str, bool] = {}

    def read(self, now: float) -> Batch:
        """Count. A few files, no driver call."""
        began = time.monotonic()
        counts = {
            "gpus_pci": len(nvidia_devices(self._root / "sys/bus/pci/devices", self._pci)),
            "gpus_proc": count(self._root / "proc/driver/nvidia/gpus", r".+"),
            "gpus_dev": count(self._root / "dev", r"nvidia\d+"),
        }
        readings = [Sample(name, SUBJECT, float(value), now) for name, value in counts.items()]
        module, library = module_version(self._root), library_version(self._root)
        if module is not None and library is not None:
            readings.append(Sample("driver_differs", SUBJECT, float(module != library), now))
        self.note = f"PCI, /proc/driver/nvidia, /dev; module {module or 'not loaded'}, library {library or 'not found'}"
        return Batch(self.name, now, time.monotonic() - began, tuple(readings))

    def close(self) -> None:
        """Nothing is held."""
