"""What watching costs: `tocsin run` with everything on beside Prometheus and node_exporter, at once, as ratios.

    python -m bench.cost [--short] [--engines 8]        (from the repository's root: it serves tests' pages)

Tocsin reads 8 engines and 8 simulated GPUs every 5 s, the kernel log, the processes of this machine, and judges all its
rules; its page is opened once. Prometheus scrapes the same engines and node_exporter every 5 s and judges our rules as
`tocsin rules export` gives them; of GPUs it sees nothing, since nothing here would export them. The pages change from
scrape to scrape: each engine serves a recording of a real vLLM from another place in it. CPU is user + system time of
the whole processes after a warm-up of 5 minutes (short: 20 s), memory their peak resident size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.figures import Figure, arguments, cpu_s, free_port, peak_mib, say, tell
from tests.agent_process import AgentProcess
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.page_server import PageServer
from tests.recordings import KV_PRESSURE, rows

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "tocsin-engines.rules.yml"
POLL_S = 5
GPUS = 8
GOAL_CPU_RATIO = 0.2
GOAL_MEMORY_MIB = 64.0


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


def agent(folder: Path, urls: Sequence[str]) -> AgentProcess:
    """The agent with all that it has."""
    folder.mkdir()
    log, scenario = folder / "kmsg", folder / "gpus.json"
    log.touch()
    write_scenario(scenario, gpus(GPUS))
    engines = [{"name": f"engine-{i}", "url": url, "gpus": [i % GPUS]} for i, url in enumerate(urls)]
    config = {"poll": f"{POLL_S}s", "engines": engines, "discover": True, "kernel_log": str(log), "slo": {}}
    return AgentProcess(folder / "agent", config, {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)})


def open_page(process: AgentProcess) -> None:
    """The status page, as a browser asks for it once: all of it, and its first change."""
    found = re.search(r'"listen": ?"([^"]+)"', process.log.read_text())
    assert found is not None, process.log.read_text()
    for path in ("/", "/?part=1"):
        with urllib.request.urlopen(f"http://{found[1]}{path}", timeout=30) as reply:
            reply.read()


def start_prometheus(folder: Path, urls: Sequence[str], program: str, exporter: int | None) -> subprocess.Popen[bytes]:
    """Prometheus on the same engines, and on node_exporter's port where there is one, with our rules."""
    jobs = [{"job_name": "vllm", "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}]
    if exporter is not None:
        jobs.append({"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]})
    config = {"global": {"scrape_interval": f"{POLL_S}s", "evaluation_interval": f"{POLL_S}s"},
              "rule_files": [str(RULES)], "scrape_configs": jobs}
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with (folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen(
            [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{free_port()}"], stderr=log, stdout=log)


def measure(warm_up_s: float, seconds: float, count: int, program: str) -> dict[str, tuple[float, float]]:
    """Of each program its CPU as a share of a core and its peak memory in MiB, over the same time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def run(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        engines = run(subprocess.Popen([sys.executable, "-m", "bench.cost", "--serve", str(count)], cwd=ROOT,
                                       stdout=subprocess.PIPE))
        assert engines.stdout is not None
        urls = json.loads(engines.stdout.readline())
        pids = {}
        exporter, port = shutil.which("prometheus-node-exporter"), free_port()
        if exporter is not None:
            pids["node_exporter"] = run(subprocess.Popen([exporter, f"--web.listen-address=127.0.0.1:{port}"],
                                                         stderr=subprocess.DEVNULL)).pid
        pids["prometheus"] = run(start_prometheus(folder, urls, program, None if exporter is None else port)).pid
        tocsin = stack.enter_context(agent(folder / "tocsin", urls))
        pids["tocsin"] = tocsin.pid()
        say(f"{count} engines, {GPUS} GPUs: {warm_up_s:.0f} s to warm up")
        time.sleep(warm_up_s)
        open_page(tocsin)
        say(f"measured over {seconds:.0f} s")
        before = {who: cpu_s(pid) for who, pid in pids.items()}
        time.sleep(seconds)
        return {who: ((cpu_s(pid) - before[who]) / seconds, peak_mib(pid)) for who, pid in pids.items()}


def main() -> int:
    """Measure and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--engines", type=int, default=8, help="how many engines (8)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    program = shutil.which("prometheus")
    if program is None:
        print("bench.cost needs prometheus: apt-get install prometheus", file=sys.stderr)
        return 2
    got = measure(*((20.0, 40.0) if args.short else (300.0, 300.0)), args.engines, program)
    if "node_exporter" not in got:
        print("# there is no node_exporter here (apt-get install prometheus-node-exporter): Prometheus stands alone")
    theirs_cpu = sum(cpu for who, (cpu, _) in got.items() if who != "tocsin")
    theirs_mib = sum(mib for who, (_, mib) in got.items() if who != "tocsin")
    cpu, mib = got["tocsin"]
    told = [Figure("cost_cpu_ratio", cpu / theirs_cpu, "x", GOAL_CPU_RATIO),
            Figure("cost_memory", mib, "MiB", GOAL_MEMORY_MIB),
            Figure("cost_memory_ratio", mib / theirs_mib, "x")]
    for who, (cpu, mib) in got.items():
        told += [Figure(f"cost_{who}_cpu", 100 * cpu, "percent_of_a_core"), Figure(f"cost_{who}_memory", mib, "MiB")]
    return tell(told)


if __name__ == "__main__":
    sys.exit(main())
