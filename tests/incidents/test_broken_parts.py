"""One part of a node after the other breaks; each turns UNKNOWN with its reason, and the others keep their rhythm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agent_process import AgentProcess
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.needs import need
from tests.page_server import PageServer
from tests.receiver import wait_until
from tests.recordings import KV_PRESSURE, rows

POLL_S = 1.0
WATCHED_S = 6.0
GPUS: list[dict[str, Any]] = [
    {"uuid": "GPU-good", "temperature": 61}, {"errors": {"*": 999}},
    {"uuid": "GPU-late", "temperature": 62},
]


class BrokenNode:
    """A node whose engines and GPUs a test can break."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        bodies = [row["body"].encode() for row in rows(KV_PRESSURE)[40:80]]
        began = time.monotonic()
        self.scenario = folder / "nvml.json"
        write_scenario(self.scenario, {"defaults": {"utilization": 97}, "gpus": GPUS})
        self.servers = {name: stack.enter_context(PageServer(lambda: bodies[int(time.monotonic() - began) % 40]))
                        for name in ("good", "garbage", "hanging")}
        config = {"node": "gpu-17", "poll": f"{POLL_S:.0f}s",
                  "engines": [{"name": name, "url": server.url} for name, server in self.servers.items()]}
        env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(self.scenario)}
        self.agent = stack.enter_context(AgentProcess(folder, config, env))

    def row(self, rule: str, subject: str) -> dict[str, Any]:
        """One signal as `tocsin check --json` has it."""
        found: list[dict[str, Any]] = self.agent.ask("/check")["signals"]
        return next((r for r in found if r["rule"] == rule and r["subject"] == subject), {"state": "absent"})

    def state(self, rule: str, subject: str) -> str:
        """Its state."""
        return str(self.row(rule, subject)["state"])

    def wait_for(self, rule: str, subject: str, state: str) -> None:
        """Until it is in this state."""
        wait_until(lambda: self.state(rule, subject) == state, 30, f"{rule} of {subject} to be {state}")

    def oldest_s(self, *asked: tuple[str, str]) -> float:
        """The greatest age that any of these signals shows while a while passes; all must be OK throughout."""
        end, oldest = time.monotonic() + WATCHED_S, 0.0
        while time.monotonic() < end:
            for rule, subject in asked:
                row = self.row(rule, subject)
                assert row["state"] == "OK", row
                oldest = max(oldest, row["age_s"])
            time.sleep(0.2)
        return oldest


@pytest.fixture
def node(tmp_path: Path) -> Iterator[BrokenNode]:
    """A node with three engines and three GPUs, of which the second fails every call, up and judged."""
    need("gcc")
    with ExitStack() as stack:
        broken = BrokenNode(tmp_path, stack)
        for name in broken.servers:
            broken.wait_for("kv-cache-utilization", name, "OK")
        yield broken


@pytest.mark.heavy
def test_broken_engines_and_a_broken_gpu_are_unknown_alone(node: BrokenNode) -> None:
    """Garbage, a hang and a failing GPU: each says why; the good engine's and GPU's signals stay fresh."""
    node.servers["garbage"].set_page("<html>it works!</html>", headers={"Content-Type": "text/html"})
    node.servers["hanging"].fault("hang")
    for name in ("garbage", "hanging"):
        node.wait_for("kv-cache-utilization", name, "UNKNOWN")

    oldest_s = node.oldest_s(("kv-cache-utilization", "good"), ("gpu-temperature", "GPU-good"))

    assert oldest_s < 3 * POLL_S
    assert "no whole answer" in node.row("kv-cache-utilization", "hanging")["why"]
    assert node.row("kv-cache-utilization", "garbage")["why"]
    broken = node.row("gpu-temperature", "index-1")  # it cannot even say its UUID
    assert broken["state"] == "UNKNOWN"
    assert "unknown" in broken["why"].lower()  # NVML's text of code 999
    health = node.agent.ask("/healthz")
    assert health["ok"] is False
    told = " ".join(health["problems"] + health["unknown"])
    assert all(name in told for name in ("garbage", "hanging", "index-1"))


@pytest.mark.heavy
def test_a_hanging_driver_costs_the_gpus_alone_and_comes_back(node: BrokenNode) -> None:
    """A call into NVML that does not return: GPUs turn UNKNOWN, engines go on, /livez stays well; then all is back."""
    hung = [*GPUS[:2], GPUS[2] | {"hangs": {"nvmlDeviceGetTemperature": True, "nvmlDeviceGetTemperatureV": True}}]
    write_scenario(node.scenario, {"defaults": {"utilization": 97}, "gpus": hung})
    node.wait_for("gpu-temperature", "GPU-late", "UNKNOWN")

    oldest_s = node.oldest_s(("kv-cache-utilization", "good"))

    assert oldest_s < 3 * POLL_S
    assert "nvmlDeviceGetTemperature" in node.row("gpu-temperature", "GPU-late")["why"]
    health = node.agent.ask("/healthz")
    assert any("nvml" in problem for problem in health["problems"])
    assert not any("tick" in problem for problem in health["problems"])  # what /livez goes by
    write_scenario(node.scenario, {"defaults": {"utilization": 97}, "gpus": GPUS})
    node.wait_for("gpu-temperature", "GPU-late", "OK")
