"""A day in minutes, then half an hour as it is: what grows in the agent, and whether a tick is missed.

    python -m bench.soak [--short]        (from the repository's root: it builds tests' stand-in)

Simulated: the real agent (HTTP sources on a recording that begins anew every 23 minutes, as an engine that restarts
does; the C stand-in's GPUs; an Xid in the kernel log every ten minutes; a store on disk; a webhook that is told what
comes and goes; its page and metrics asked every minute) for 24 hours of its own time, short: 2. Growth counts from when
the 70 minutes of raw numbers are full. Then, in the long form, `tocsin run` takes over that day's database for 30
minutes on the wall clock, warm after 5; a tick is missed when the next comes later than one and a half polls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

from agent.daemon import serve, tune_memory
from bench.figures import MIB, Figure, arguments, peak_mib, say, tell
from bench.replay import POLL_S, ROOT, Engines, Replay, environment
from tests.agent_process import AgentProcess
from tests.receiver import Receiver

ENGINES, GPUS = 8, 8
DAY_H = 24.0
WARM_S = 85 * 60.0
SAMPLE_S = 60.0
REAL_S, REAL_WARM_S = 1800.0, 300.0
GOAL_GROWTH_MIB = 2.0
GOAL_MEMORY_MIB = 64.0
GOAL_DATABASE_MIB = 64.0
XID = "3,{n},1,-;NVRM: Xid (PCI:0000:1b:00): {number}, pid=1, name=a, Ch 00000001\n"


def resident_mib(pid: int) -> float:
    """What a process holds in memory that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / MIB


def files_and_threads(pid: int) -> int:
    """How many of both a process has open."""
    return sum(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))


class Sampled:
    """Memory, files and threads of a process after its warm-up, in time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.memory: list[float] = []
        self.open: list[int] = []

    def take(self) -> None:
        """Once more."""
        self.memory.append(resident_mib(self._pid))
        self.open.append(files_and_threads(self._pid))

    def figures(self, name: str) -> list[Figure]:
        """How much higher the last third stands than the first: memory by the median, what is open by the least."""
        third = max(1, len(self.memory) // 3)
        memory = statistics.median(self.memory[-third:]) - statistics.median(self.memory[:third])
        opened = min(self.open[-third:]) - min(self.open[:third])
        return [Figure(f"{name}_memory_growth", memory, "MiB", GOAL_GROWTH_MIB),
                Figure(f"{name}_files_and_threads_growth", opened, "count", 0.0),
                Figure(f"{name}_memory", peak_mib(self._pid), "MiB", GOAL_MEMORY_MIB)]


def simulated(folder: Path, hours: float, hook: str, engines: list[str]) -> list[Figure]:
    """A day of the agent in this process, which ends now."""
    extra = {"listen": "127.0.0.1:0", "notify": notify(hook)}
    tune_memory()
    log, sampled, missed, ticks = folder / "kmsg", Sampled(os.getpid()), 0, 0
    with Replay(folder, engines, extra, at=time.time() - hours * 3600) as replay:
        servers, began, start = serve(replay.agent, replay.config), time.monotonic(), replay.clock.at
        page = f"http://{servers[1].address}"
        while replay.clock.at < start + hours * 3600:
            try:
                replay.tick()
            except Exception as error:
                say(f"tick {ticks}: {type(error).__name__}: {error}")
            missed += replay.agent.tick_at() != replay.clock.at
            ticks += 1
            gone_s = replay.clock.at - start
            if gone_s % 600 < POLL_S:
                with log.open("a") as out:
                    out.write(XID.format(n=ticks, number=(13, 31, 43, 63, 94)[ticks // 120 % 5]))
            if gone_s % SAMPLE_S < POLL_S:
                for path in ("/", "/metrics", "/healthz"):
                    with urllib.request.urlopen(page + path, timeout=30) as reply:
                        reply.read()
                if gone_s >= WARM_S:
                    sampled.take()
            if gone_s % 3600 < POLL_S:
                say(f"hour {gone_s / 3600:.0f} of {hours:g}: {resident_mib(os.getpid()):.1f} MiB")
        speed = (replay.clock.at - start) / (time.monotonic() - began)
        figures = sampled.figures("soak")[:2]
        failed = sum(slot.errors for slot in replay.agent.collector.slots.values())
        figures += [Figure("soak_ticks_missed", missed, f"of_{ticks}", 0.0),
                    Figure("soak_reads_failed", failed, "count"), Figure("soak_hours", hours, "h"),
                    Figure("soak_speed", speed, "x_the_wall_clock", 60.0 if hours >= DAY_H else None, True)]
        for server in servers:
            server.close()
    size = sum(path.stat().st_size for path in (folder / "state").iterdir()) / MIB
    figures.append(Figure("soak_database", size, "MiB", GOAL_DATABASE_MIB))
    return figures


def notify(hook: str) -> list[dict[str, Any]]:
    """A webhook that is told everything."""
    return [{"webhook": {"url": hook}, "match": {"severity": ["page", "ticket"]}}]


def real(folder: Path, hook: str, engines: list[str], env: dict[str, str]) -> list[Figure]:
    """Half an hour of `tocsin run` on what the simulated day has left."""
    config = {"poll": f"{POLL_S:g}s", "kernel_log": str(folder / "kmsg"), "state_dir": str(folder / "state"),
              "engines": [{"name": f"engine-{i}", "url": url} for i, url in enumerate(engines)], "node": "bench",
              "notify": notify(hook)}
    with AgentProcess(folder / "real", config, env) as agent:
        sampled, ticks, began, sampled_at = Sampled(agent.pid()), [], time.monotonic(), 0.0
        while (gone_s := time.monotonic() - began) < REAL_S:
            time.sleep(POLL_S / 2)
            ticks.append(tick_at(agent))
            if gone_s >= REAL_WARM_S and gone_s - sampled_at >= SAMPLE_S / 4:
                sampled_at = gone_s
                sampled.take()
                say(f"{gone_s / 60:.0f} of {REAL_S / 60:.0f} min: {sampled.memory[-1]:.1f} MiB")
        grown = sampled.figures("soak_real")
    seen = sorted(set(ticks))
    missed = sum(max(0, round((b - a) / POLL_S) - 1) for a, b in pairwise(seen) if b - a > 1.5 * POLL_S)
    return [*grown, Figure("soak_real_ticks_missed", missed, f"of_{len(seen)}", 0.0)]


def tick_at(agent: AgentProcess) -> float:
    """When it ticked last, by its own metrics."""
    found = re.search(r'"listen": ?"([^"]+)"', agent.log.read_text())
    assert found is not None, agent.log.read_text()
    with urllib.request.urlopen(f"http://{found[1]}/metrics", timeout=30) as reply:
        told = re.search(r"^tocsin_tick_timestamp_seconds (\S+)$", reply.read().decode(), re.MULTILINE)
    assert told is not None
    return float(told[1])


def main() -> int:
    """Measure and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--hours", type=float, help="how many simulated hours (24; short: 1.75)")
    parser.add_argument("--simulate", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.simulate:
        asked = json.loads(args.simulate)
        return tell(simulated(Path(asked["folder"]), asked["hours"], asked["hook"], asked["engines"]))
    hours = args.hours or (1.75 if args.short else DAY_H)
    with tempfile.TemporaryDirectory() as name, Engines(ENGINES) as engines, Receiver() as receiver:
        folder = Path(name)
        env = environment(folder, GPUS)
        asked = {"folder": name, "hours": hours, "hook": receiver.url, "engines": engines.urls}
        rc = subprocess.run([sys.executable, "-u", "-m", "bench.soak", "--simulate", json.dumps(asked)], cwd=ROOT,
                            env=env, check=False).returncode
        if rc not in (0, 1) or args.short:
            return rc
        return max(rc, tell(real(folder, receiver.url, engines.urls, env)))


if __name__ == "__main__":
    sys.exit(main())
