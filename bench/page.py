"""What the status page costs: `tocsin run` with 16 GPUs and 8 engines, one view drawn anew, and 20 open pages.

    python -m bench.page [--seconds 60]      (from the repository's root: it builds tests' stand-in)

Drawing is the fastest of the requests for the view that met a new tick, over HTTP: a busy machine only makes it slower.
The open pages ask as the page's own script does, every 5 s; their cost is the agent's CPU with them less that without.
Prints `name value unit goal ok|short`; exits 1 when short.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from bench.figures import cpu_s
from tests.agent_process import AgentProcess
from tests.engine_pages import GOLDEN
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.page_server import PageServer

GOAL_DRAWN_MS = 50.0
GOAL_PAGES_PERCENT = 2.0  # of a core
PAGES, EVERY_S, POLL_S = 20, 5.0, 5.0
VIEW = "/?part=1"


def address(agent: AgentProcess) -> str:
    """Where the page is, as the agent's log says."""
    found = re.search(r'"listen": ?"([^"]+)"', agent.log.read_text())
    assert found is not None, agent.log.read_text()
    return f"http://{found[1]}"


def get(url: str) -> float:
    """Ask for the view; ms until all of it was there."""
    began = time.perf_counter()
    with urllib.request.urlopen(url + VIEW, timeout=30) as reply:
        reply.read()
    return 1000 * (time.perf_counter() - began)


def drawn_ms(url: str) -> float:
    """The fastest of twelve views of which each met a new tick."""
    times = []
    for _ in range(12):
        time.sleep(POLL_S)
        times.append(get(url))
    return min(times)


def percent(agent: AgentProcess, seconds: float) -> float:
    """The agent's CPU over so long."""
    before = cpu_s(agent.pid())
    time.sleep(seconds)
    return 100 * (cpu_s(agent.pid()) - before) / seconds


def look(url: str, over: threading.Event) -> None:
    """One open page."""
    while not over.wait(EVERY_S):
        get(url)


def main() -> int:
    """Measure, print, and say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure the cost, each time (60)")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_scenario(folder / "gpus.json", gpus(16))
        body = (GOLDEN / "vllm-0.30.txt").read_bytes()
        servers = [stack.enter_context(PageServer(body)) for _ in range(8)]
        engines = [{"name": f"llama-{n}", "url": s.url, "gpus": [2 * n, 2 * n + 1]} for n, s in enumerate(servers)]
        config = {"node": "bench", "poll": f"{POLL_S:g}s", "engines": engines}
        env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(folder / "gpus.json")}
        agent = stack.enter_context(AgentProcess(folder / "agent", config, env))
        url = address(agent)
        drawn = drawn_ms(url)
        without = percent(agent, args.seconds)
        over = threading.Event()
        for _ in range(PAGES):
            threading.Thread(target=look, args=(url, over), daemon=True).start()
            time.sleep(EVERY_S / PAGES)  # people do not open their pages at one moment
        more = percent(agent, args.seconds) - without
        over.set()
    rows = (("page_drawn", drawn, "ms", GOAL_DRAWN_MS), ("page_20_open", more, "percent_of_a_core", GOAL_PAGES_PERCENT))
    for what, value, unit, goal in rows:
        print(f"{what} {value:.3g} {unit} <={goal:g} {'ok' if value <= goal else 'short'}")
    return int(any(value > goal for _, value, _, goal in rows))


if __name__ == "__main__":
    sys.exit(main())
