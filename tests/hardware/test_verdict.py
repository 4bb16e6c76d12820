"""The verdict on each GPU, from rows of `check`: what decides, what could not be checked, how it is shown."""

from __future__ import annotations

from typing import Any

import pytest

from agent.hardware.verdict import RULES, verdicts
from agent.model import GpuFacts
from agent.show import gpus_report, plain
from tests.scenes import built_in

GPU = GpuFacts("GPU-8f6a", 3, "NVIDIA H100 80GB HBM3", "0000:1e:00")
NODE = "gpu-17"


def row(rule: str, state: str = "OK", subject: str = GPU.uuid, **more: Any) -> dict[str, Any]:
    """A row of `check`."""
    known = built_in()[rule]
    return {"rule": rule, "subject": subject, "state": state, "severity": known.severity, "value": 0.0, "unit": "count",
            "why": None, "text": "", "action": known.action, "evidence": {}} | more


def judge(*rows: dict[str, Any], there: bool = True) -> dict[str, Any]:
    """The whole answer for these rows."""
    return verdicts(rows, {GPU.uuid: GPU} if there else {}, NODE)


def test_every_hardware_rule_has_a_code() -> None:
    """A rule of the hardware that no verdict knows of would break without a word in `check --gpus`."""
    hardware = {rule for rule, r in built_in().items() if (r.number or "").startswith(("X", "L4"))}
    assert hardware <= set(RULES)
    assert set(RULES) <= set(built_in())


@pytest.mark.parametrize(("story", "rows", "verdict", "code", "overall"), [
    ("all in range", [row("gpu-lost"), row("xid-gpu")], "HEALTHY", None, "healthy"),
    ("a page", [row("xid-gpu", "BREACH", evidence={"codes": ["xid.79"], "action": "reboot"})], "DRAIN", "xid.79",
     "page"),
    ("a page that asks only for a restart", [row("xid-app", "BREACH", evidence={
        "codes": ["xid.94"], "action": "restart_app"})], "WATCH", "xid.94", "ticket"),
    ("a burst", [row("xid-gpu", "BREACH", evidence={"codes": ["xid.burst", "xid.62"], "action": "replace"})], "REPLACE",
     "xid.burst", "page"),
    ("pending counts", [row("gpu-nvlink-down", "PENDING")], "DRAIN", "nvlink.down", "page"),
    ("the driver's word", [row("gpu-recovery", "BREACH", evidence={"action": "reset"})], "DRAIN", "recovery.reset",
     "page"),
    ("the worse one decides", [row("gpu-ecc-rate", "BREACH"), row("gpu-remap-failed", "BREACH")], "REPLACE",
     "remap.failed", "page"),
    ("for information", [row("gpu-persistence", "BREACH"), row("gpu-lost")], "HEALTHY", None, "healthy"),
    ("it cannot be read", [row("gpu-temperature", "UNKNOWN", why="a call hangs"), row("xid-gpu")], "UNKNOWN",
     "temperature.high", "unknown"),
    ("nothing applies", [row("gpu-ecc-rate", "N/A", why="not told")], "UNKNOWN", None, "unknown"),
])
def test_what_decides(story: str, rows: list[dict[str, Any]], verdict: str, code: str | None, overall: str) -> None:
    """A script acts by the code and the exit status; neither may depend on how many things are wrong."""
    answer = judge(*rows)
    (gpu,) = answer["gpus"]

    assert (gpu["verdict"], gpu["code"], answer["verdict"]) == (verdict, code, overall), story


def test_without_a_gpu_it_is_unknown() -> None:
    """A node on which NVML shows nothing is not healthy, also where only somebody's forged lines were found."""
    assert judge(there=False)["verdict"] == "unknown"
    assert judge(row("kernel-log-forged", "BREACH", NODE), there=False)["verdict"] == "unknown"
    assert judge(row("gpu-count", "BREACH", NODE), there=False)["verdict"] == "page"


def test_how_it_is_shown() -> None:
    """One line for each thing that is wrong, each with what to do; what could not be checked is said."""
    rows = [row("xid-gpu", "BREACH", text="Xid 79 (fallen): reboot it", action="reboot it",
                evidence={"codes": ["xid.79"], "action": "reboot"}),
            row("gpu-fabric", "UNKNOWN", why="a call hangs"), row("gpu-ecc-rate", "N/A", why="not told"),
            row("gpu-count", "BREACH", NODE, text="1 of 8 GPUs missing", action="Find it.")]
    shown = plain(gpus_report(judge(*rows), show_all=False))

    assert shown.splitlines() == [
        "GPUs of gpu-17",
        "GPU  VERDICT  CODE    PCI         UUID      NAME                   WHY",
        "3    DRAIN    xid.79  0000:1e:00  GPU-8f6a  NVIDIA H100 80GB HBM3  Xid 79 (fallen): reboot it",
        "",
        "GPU 3: xid.79 (page): Xid 79 (fallen): reboot it",
        "gpu-17: gpu.count (page): 1 of 8 GPUs missing. Do: Find it.",
        "Not checked: fabric.state of GPU 3: a call hangs",
        "Not applicable here: 1 checks; --all shows them.",
        "PAGE: 1 DRAIN",
    ]
    assert "Not checked: ecc.rate of GPU 3: not told" in plain(gpus_report(judge(*rows), show_all=True))
