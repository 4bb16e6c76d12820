"""What watching costs: `tocsin run` on 8 engines every 5 s beside Prometheus with the same targets and equal rules.

    python -m bench.cost [--seconds 120] [--engines 8]          (from the repository's root: it serves tests' pages)

Both run at once for the same time. The pages change from scrape to scrape, as a live engine's do: each engine serves a
recording of a real vLLM from another place in it. CPU is user + system time of the whole process after a warm-up,
memory its peak resident size. Prints `name value unit goal ok|short`; exits 1 when short.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.page_server import PageServer
from tests.recordings import KV_PRESSURE, rows

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).parent / "prometheus_rules.yml"
POLL_S = 5
WARM_UP_S = 30.0
GOAL_CPU_RATIO = 0.3
GOAL_MEMORY_MIB = 64.0
MIB = 1024.0 * 1024.0


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, from /proc/PID/stat (fields 14 and 15, after the command's bracket)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Peak resident size of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MIB


def serve(count: int) -> None:
    """Serve `count` engines until killed; prints their URLs as JSON."""
    bodies: list[bytes] = [row["body"].encode() for row in rows(KV_PRESSURE) if row["body"]]
    began = time.monotonic()
    servers = []
    for i in range(count):
        def page(offset: int = i * len(bodies) // count) -> bytes:
            return bodies[(offset + int(time.monotonic() - began)) % len(bodies)]
        servers.append(PageServer(page))
    print(json.dumps([server.url for server in servers]), flush=True)
    signal.pause()


def start_tocsin(folder: Path, urls: list[str]) -> subprocess.Popen[bytes]:
    """The agent on all engines."""
    engines = [{"name": f"engine-{i}", "url": url} for i, url in enumerate(urls)]
    config = {"state_dir": str(folder / "state"), "socket": str(folder / "sock"), "listen": "127.0.0.1:0",
              "poll": f"{POLL_S}s", "nvml": "off", "engines": engines}
    path = folder / "tocsin.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with (folder / "tocsin.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "agent.daemon", "--config", str(path)], cwd=ROOT, stderr=log)


def start_prometheus(folder: Path, urls: list[str], program: str) -> subprocess.Popen[bytes]:
    """Prometheus on the same engines, with rules that say the same as far as PromQL can."""
    targets = [url.removeprefix("http://") for url in urls]
    config = {"global": {"scrape_interval": f"{POLL_S}s", "evaluation_interval": f"{POLL_S}s"},
              "rule_files": [str(RULES)],
              "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": targets}]}]}
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    with (folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen(
            [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}",
             "--web.listen-address=127.0.0.1:0"], stderr=log, stdout=log)


def measure(seconds: float, count: int, program: str) -> dict[str, float]:
    """CPU share of a core and peak memory of both, over the same time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = subprocess.Popen([sys.executable, "-m", "bench.cost", "--serve", str(count)], cwd=ROOT,
                                   stdout=subprocess.PIPE)
        assert engines.stdout is not None
        urls = json.loads(engines.stdout.readline())
        pids = {"tocsin": start_tocsin(folder, urls), "prometheus": start_prometheus(folder, urls, program)}
        try:
            time.sleep(WARM_UP_S)
            before = {who: cpu_s(p.pid) for who, p in pids.items()}
            time.sleep(seconds)
            found = {f"{who}_cpu": (cpu_s(p.pid) - before[who]) / seconds for who, p in pids.items()}
            return found | {f"{who}_peak_mib": peak_mib(p.pid) for who, p in pids.items()}
        finally:
            for process in (*pids.values(), engines):
                process.kill()
                process.wait()


def main() -> int:
    """Measure, print, and say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to measure after the warm-up (120)")
    parser.add_argument("--engines", type=int, default=8, help="how many engines (8)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    program = shutil.which("prometheus")
    if program is None:
        print("bench.cost needs prometheus: apt-get install prometheus", file=sys.stderr)
        return 2
    got = measure(args.seconds, args.engines, program)
    ratio = got["tocsin_cpu"] / got["prometheus_cpu"]
    short = False
    for name, value, unit, goal in (
            ("cost_cpu_ratio", ratio, "x_prometheus", GOAL_CPU_RATIO),
            ("cost_memory", got["tocsin_peak_mib"], "MiB", GOAL_MEMORY_MIB)):
        short = short or value > goal
        print(f"{name} {value:.3g} {unit} <={goal:g} {'ok' if value <= goal else 'short'}")
    for who in ("tocsin", "prometheus"):
        print(f"cost_{who}_cpu {100 * got[f'{who}_cpu']:.3g} percent_of_a_core - ok")
    print(f"cost_prometheus_memory {got['prometheus_peak_mib']:.3g} MiB - ok")
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
