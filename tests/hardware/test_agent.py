"""The real agent on a pseudo kernel log and the C stand-in: woken by events, repeating nothing, telling scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.agent_process import ROOT, AgentProcess
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.needs import need
from tests.receiver import wait_until

pytestmark = pytest.mark.heavy
XID = "NVRM: Xid (PCI:0000:1c:00): 79, pid=12, name=python3, GPU has fallen off the bus."
EVENTS = {"event_types": 8}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Three GPUs that tell their Xids by events."""
    need("gcc", "make")
    path = tmp_path / "scenario.json"
    write_scenario(path, gpus(gpu0=EVENTS, gpu1=EVENTS, gpu2=EVENTS))
    return path


def agent(folder: Path, scenario: Path, log: Path, poll: str = "60s", **more: Any) -> AgentProcess:
    """An agent whose ticks are far apart: what comes sooner was woken."""
    config = {"node": "gpu-17", "poll": poll, "discover": False, "kernel_log": str(log), **more}
    return AgentProcess(folder / "agent", config, {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)})


def firing(one: AgentProcess) -> dict[str, Mapping[str, Any]]:
    """What fires now, by rule."""
    return {a["rule"]: a for a in one.ask("/alerts?resolved=0") if a["state"] == "firing"}


def tocsin(one: AgentProcess, *arguments: str) -> tuple[int, str]:
    """The real command on this agent's configuration: (exit status, stdout)."""
    done = subprocess.run([sys.executable, "-m", "agent", *arguments, "--config", str(one.path)], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "COLUMNS": "200"}, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def add(log: Path, *lines: str) -> None:
    """What a kernel would write."""
    with log.open("a") as out:
        out.write("".join(f"{line}\n" for line in lines))


def test_an_xid_is_an_alert_at_once_and_once(tmp_path: Path, scenario: Path) -> None:
    """With a minute between two ticks: the alert comes within the second, and not again after a kill -9."""
    log = tmp_path / "kmsg"
    log.touch()
    with agent(tmp_path, scenario, log) as one:
        wait_until(lambda: bool(one.ask("/gpus")["gpus"]), 30, "the first tick")
        assert tocsin(one, "check", "--gpus")[0] == 0
        add(log, f"11,1,1,-;{XID}")
        wait_until(lambda: "kernel-log-forged" in firing(one), 30, "the security notice")
        assert "xid-gpu" not in firing(one)
        began = time.monotonic()
        add(log, f"3,2,2,-;{XID}", f"3,3,3,-;{XID}")
        wait_until(lambda: "xid-gpu" in firing(one), 30, "the alert")
        waited_s = time.monotonic() - began
        assert waited_s < 20  # and under 1 s on a machine that is not busy: bench.hardware
        alert = firing(one)["xid-gpu"]
        assert alert["value"] == 2
        assert "Xid 79 (the GPU has fallen off the bus) 2 times" in alert["description"]

        code, out = tocsin(one, "check", "--gpus")
        assert code == 2
        assert "DRAIN" in out
        assert "xid.79 (page)" in out
        assert "drain the node and reboot it" in out
        code, out = tocsin(one, "check", "--gpus", "--json")
        answer = json.loads(out)
        assert [g["verdict"] for g in answer["gpus"]] == ["HEALTHY", "DRAIN", "HEALTHY"]
        assert answer["gpus"][1]["code"] == "xid.79"

        before = one.ask("/transitions?after=0")
        one.kill()
        add(log, f"3,4,4,-;{XID}")
        one.start()
        wait_until(lambda: bool(one.ask("/gpus")["gpus"]), 30, "the first tick")
        wait_until(lambda: firing(one)["xid-gpu"]["value"] == 3, 30, "what came between the two runs")
        assert one.ask("/transitions?after=0") == before


def test_nvml_s_events_and_the_log_are_one(tmp_path: Path, scenario: Path) -> None:
    """NVML tells an Xid at once, also without a log; what the log tells beside it is the same one."""
    log = tmp_path / "kmsg"
    log.touch()
    with agent(tmp_path, scenario, log) as one:
        wait_until(lambda: bool(one.ask("/gpus")["gpus"]), 30, "the first tick")
        write_scenario(scenario, gpus(gpu0=EVENTS, gpu1={**EVENTS, "xids": [[0, 119], [0, 999]]}, gpu2=EVENTS))
        add(log, "3,1,1,-;NVRM: Xid (PCI:0000:1c:00): 119, pid=1, name=nvidia-smi, Timeout after 6s",
            "3,2,2,-;NVRM: Xid (PCI:0000:1c:00): 176, x")
        wait_until(lambda: {"xid-gpu", "xid-ticket"} <= set(firing(one)), 30, "both alerts")
        wait_until(lambda: one.ask("/healthz")["sources"]["nvml_events"]["errors"] == 0, 30, "the source")
        time.sleep(1.5)  # whoever comes second comes within two seconds

        assert firing(one)["xid-gpu"]["value"] == 1
        (gpu,) = (g for g in one.ask("/gpus")["gpus"] if g["index"] == 1)
        assert {f["code"] for f in gpu["findings"]} == {"xid.119", "xid.176"}


def test_without_an_agent_it_looks_for_itself(tmp_path: Path, scenario: Path) -> None:
    """Slurm's HealthCheckProgram on a node without the daemon: a verdict and an exit code after one look."""
    log = tmp_path / "dmesg.txt"
    log.touch()
    one = agent(tmp_path, scenario, log)
    os.environ.update({"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)})
    try:
        code, out = tocsin(one, "check", "--gpus", "--watch-for", "2s", "--json")
        assert (code, json.loads(out)["verdict"]) == (0, "healthy")
        add(log, "NVRM: Xid (PCI:0000:1d:00): 63, pid=1, Row Remapper: New row marked for remapping")
        write_scenario(scenario, gpus(gpu1={"recovery_action": 2}))
        code, out = tocsin(one, "check", "--gpus", "--watch-for", "2s")
        assert code == 2
        assert "recovery.reboot" in out
        assert "xid.63" in out
        write_scenario(scenario, gpus())
        assert tocsin(one, "check", "--gpus", "--watch-for", "2s")[0] == 1
    finally:
        for name in ("LD_LIBRARY_PATH", "TOCSIN_FAKE_NVML"):
            del os.environ[name]


def test_the_real_kernel_log(tmp_path: Path, scenario: Path) -> None:
    """As root on this machine: an agent on the real /dev/kmsg, and a user's line in it: a ticket, and no page."""
    need("root")
    mark = f"tocsin-test-{os.getpid()}"
    with agent(tmp_path, scenario, Path("/dev/kmsg")) as one:
        wait_until(lambda: bool(one.ask("/gpus")["gpus"]), 30, "the first tick")
        with Path("/dev/kmsg").open("w") as out:
            out.write(f"<0>{XID} {mark}\n")
        wait_until(lambda: mark in str(firing(one).get("kernel-log-forged")), 30, "the security notice")

        assert "xid-gpu" not in firing(one)
        assert not [a for a in one.ask("/alerts?resolved=0") if a["severity"] == "page"]
