"""What watching the hardware costs, and how soon an Xid is an alert: `tocsin run` on 8 GPUs x 18 NVLinks.

    python -m bench.hardware [--short]      (from the repository's root: it builds tests' stand-in)

Then the same GPUs in seven MIG slices each. The GPUs are the C stand-in's, which answers every call; the driver's own
time is not in the numbers. Lines are written to a file that stands for the kernel log, each a moment after the last;
the latency is from the write to the alert on the agent's socket, asked every 5 ms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.figures import Figure, arguments, cpu_s, peak_mib, say, tell
from tests.agent_process import AgentProcess
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus

GOAL_CPU_PERCENT = 1.0  # of a core
GOAL_MEMORY_MIB = 64.0
GOAL_ALERT_S = 1.0
STORM_LINES = 800_000
PAGES = (46, 62, 79, 95, 109, 110, 119, 120, 140, 143)


def latency_s(agent: AgentProcess, log: Path, n: int) -> float:
    """From the write of one line to the alert that counts it."""
    gpu, number = n % 8, PAGES[n // 8 % len(PAGES)]
    code = f"xid.{number}"

    def told() -> bool:
        found = next(g for g in agent.ask("/gpus")["gpus"] if g["index"] == gpu)["findings"]
        return any(f["code"] == code for f in found)

    began = time.monotonic()
    with log.open("a") as out:
        out.write(f"3,{n},1,-;NVRM: Xid (PCI:0000:{0x1b + gpu:02x}:00): {number}, pid=1, name=a, x\n")
    while not told():
        time.sleep(0.005)
    return time.monotonic() - began


def slices(gpu: int) -> dict[str, Any]:
    """A GPU in as many MIG instances as it can have, each with a process."""
    return {"mig": 1, "utilization": None, "mig_instances": [
        {"gi": gi, "ci": 0, "uuid": f"MIG-{gpu}-{gi}", "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
         "memory": {"total": 10 << 30, "used": 4 << 30}, "processes": {str(1000 + 10 * gpu + gi): 1}}
        for gi in range(7, 14)]}


def cpu_percent(agent: AgentProcess, seconds: float) -> float:
    """Of one core, over so many seconds."""
    before = cpu_s(agent.pid())
    time.sleep(seconds)
    return 100 * (cpu_s(agent.pid()) - before) / seconds


def storm_s(agent: AgentProcess, log: Path) -> float:
    """Until 800,000 equal lines are counted."""
    line = "3,1,1,-;NVRM: Xid (PCI:0000:1b:00): 74, pid=1, name=a, NVLink: fatal error detected on link 1(0x0)\n"
    with log.open("a") as out:
        for _ in range(STORM_LINES // 10_000):
            out.write(line * 10_000)
    began = time.monotonic()
    while not any(a["rule"] == "xid-link" and a["value"] >= STORM_LINES for a in agent.ask("/alerts?resolved=0")):
        time.sleep(0.2)
    return time.monotonic() - began


def main() -> int:
    """Measure and tell."""
    short = arguments(__doc__).parse_args().short
    warm_up_s, seconds, lines = (6.0, 15.0, 20) if short else (20.0, 60.0, 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, scenario = folder / "kmsg", folder / "scenario.json"
        log.touch()
        write_scenario(scenario, gpus(8))
        config = {"node": "bench", "poll": "5s", "discover": False, "kernel_log": str(log)}
        env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)}
        with AgentProcess(folder / "agent", config, env) as agent:
            say(f"8 GPUs, {warm_up_s + seconds:.0f} s")
            time.sleep(warm_up_s)
            cpu = cpu_percent(agent, seconds)
            say(f"{lines} Xids, one after the other")
            waits = [latency_s(agent, log, n) for n in range(lines)]
            before_mib = peak_mib(agent.pid())
            say(f"a storm of {STORM_LINES} lines")
            storm = storm_s(agent, log)
            after_mib = peak_mib(agent.pid())
            say(f"56 MIG slices, {warm_up_s + seconds:.0f} s")
            write_scenario(scenario, gpus(8, **{f"gpu{n}": slices(n) for n in range(8)}))
            time.sleep(warm_up_s)
            mig_cpu, mig_mib = cpu_percent(agent, seconds), peak_mib(agent.pid())
    return tell([Figure("hardware_cpu", cpu, "percent_of_a_core", GOAL_CPU_PERCENT),
                 Figure("hardware_memory", before_mib, "MiB", GOAL_MEMORY_MIB),
                 Figure("xid_alert_median", statistics.median(waits), "s", GOAL_ALERT_S),
                 Figure("xid_alert_worst", max(waits), "s", GOAL_ALERT_S),
                 Figure("storm_memory", after_mib, "MiB", GOAL_MEMORY_MIB),
                 Figure("mig_cpu", mig_cpu, "percent_of_a_core", GOAL_CPU_PERCENT),
                 Figure("mig_memory", mig_mib, "MiB", GOAL_MEMORY_MIB),
                 Figure("storm_of_800000_lines", storm, "s")])


if __name__ == "__main__":
    sys.exit(main())
