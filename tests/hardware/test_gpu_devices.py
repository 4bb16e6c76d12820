"""What the kernel shows without NVML: counts, and the versions of the driver's two halves."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.model import Batch, GpuFacts, Sample, Slo
from agent.node import Node, Setup
from agent.sources.gpu_devices import GpuDevices
from rules import severity_of
from tests.scenes import T0, built_in

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: gcc\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"


def machine(root: Path, version: str = OPEN, library: str = "570.86.15", folder: str = "usr/lib64") -> None:
    """Two GPUs with their sound, a switch, somebody's else's card; a driver."""
    for name, vendor, kind in (("0000:1b:00.0", "0x10de", "0x030200"), ("0000:1b:00.1", "0x10de", "0x040300"),
                               ("0000:1c:00.0", "0x10DE", "0x030000"), ("0000:05:00.0", "0x10de", "0x068000"),
                               ("0000:02:00.0", "0x1a03", "0x030000")):
        device = root / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    for name in ("0000:1b:00.0", "0000:1c:00.0"):
        (root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(version)
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (root / "dev" / name).touch()
    install(root, library, folder)


def install(root: Path, version: str, folder: str = "usr/lib64") -> None:
    """The library of a version, as a package upgrade leaves it."""
    where = root / folder
    where.mkdir(parents=True, exist_ok=True)
    (where / f"libnvidia-ml.so.{version}").touch()
    (where / "libnvidia-ml.so.1").unlink(missing_ok=True)
    (where / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")


def told(root: Path) -> dict[str, float]:
    """What one read gives."""
    return {r.name: r.value for r in GpuDevices(root).read(T0).readings if isinstance(r, Sample)}


@pytest.mark.parametrize(("version", "library", "folder", "differs"), [
    (OPEN, "570.86.15", "usr/lib/x86_64-linux-gnu", 0.0),
    (CLOSED, "535.183.01", "usr/lib64", 0.0),
    (OPEN, "575.57.08", "usr/lib/aarch64-linux-gnu", 1.0),
    ("something else\n", "570.86.15", "usr/lib", None),
    (OPEN, "unknown", "usr/lib", None),
])
def test_what_the_kernel_shows(tmp_path: Path, version: str, library: str, folder: str, differs: float | None) -> None:
    """Two GPUs on each way; both halves of the driver by their versions, in each distribution's folder."""
    machine(tmp_path, version, library, folder)
    want = {"gpus_pci": 2.0, "gpus_proc": 2.0, "gpus_dev": 2.0}
    assert told(tmp_path) == (want if differs is None else want | {"driver_differs": differs})


def test_a_machine_without_any(tmp_path: Path) -> None:
    """No GPU and no driver: zeros, and no word of versions."""
    assert told(tmp_path) == {"gpus_pci": 0.0, "gpus_proc": 0.0, "gpus_dev": 0.0}


def test_an_upgrade_under_a_running_driver(tmp_path: Path) -> None:
    """apt put in a new library at six; at three the next night an engine restarted, and never found its GPU again."""
    machine(tmp_path)
    node = Node(Setup("gpu-17", 15.0, Slo(written=True), (), tuple(built_in().values()), severity_of,
                      gpus_expected=1))
    facts = GpuFacts("GPU-aa", 0, "NVIDIA H100", "0000:1b:00")
    source, seen = GpuDevices(tmp_path), []
    for tick, version in enumerate(("570.86.15", "575.57.08", "575.57.08", "570.86.15", "570.86.15")):
        install(tmp_path, version)
        now = T0 + 15.0 * tick
        node.take(Batch("nvml", now, 0.0, (Sample("gpu_temp_c", "GPU-aa", 60.0, now),), gpus=(facts,)))
        node.take(source.read(now))
        seen += [(t.kind, t.alert.rule, tick) for t in node.step(now, 15.0) if t.kind in ("firing", "resolved")]
        if tick == 1:
            assert "module 570.86.15, library 575.57.08" in source.note
            (alert,) = (a for a in node.book.alerts.values() if a.state == "firing")
            assert "will not find its GPU" in node.annotations(alert)["description"]
            assert node.signals[("blind", "GPU-aa")].state == "value"  # NVML works: who is blind is told
    assert seen == [("firing", "driver-mismatch", 1), ("resolved", "driver-mismatch", 3)]
