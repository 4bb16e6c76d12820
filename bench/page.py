"""What the status page costs: `tocsin run` with 16 GPUs and 8 engines, one view drawn anew, its memory, 20 open pages.

    python -m bench.page [--short]      (from the repository's root: it builds tests' stand-in)

Drawing is the fastest of the requests for the view that met a new tick, over HTTP: a busy machine only makes it slower.
Memory is the agent's resident size when every view was opened once, less that before the first: templates, plots,
Markdown, and what they drew. The open pages ask as the page's own script does, every 5 s; their cost is the agent's CPU
with them less that without.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from bench.figures import MIB, Figure, arguments, cpu_s, say, tell
from tests.agent_process import AgentProcess
from tests.engine_pages import GOLDEN
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.page_server import PageServer

GOAL_DRAWN_MS = 50.0
GOAL_PAGES_PERCENT = 2.0  # of a core
GOAL_MEMORY_MIB = 10.0
PAGES, EVERY_S, POLL_S = 20, 5.0, 5.0
VIEW = "/?part=1"
SIGNAL = "gpu-temperature/GPU-fa4e0000-0000-4000-8000-000000000003"
VIEWS = ("/", "/engines", "/gpus", "/alerts", "/incidents", "/silences", "/drills", "/rules", "/runbooks",
         "/runbooks/queue-age", "/numbers/H2", f"/signals/{SIGNAL}", f"/plots/{SIGNAL}?span=2h",
         f"/plots/{SIGNAL}?span=24h")  # fmt: skip


def address(agent: AgentProcess) -> str:
    """Where the page is, as the agent's log says a moment after its socket answers."""
    deadline = time.monotonic() + 30.0
    while (found := re.search(r'"listen": ?"([^"]+)"', agent.log.read_text())) is None:
        assert time.monotonic() < deadline, agent.log.read_text()
        time.sleep(0.05)
    return f"http://{found[1]}"


def get(url: str, path: str = VIEW) -> float:
    """Ask for a view as a browser does; ms until all of it was there."""
    began = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url + path, headers={"Accept": "text/html"}), timeout=30) as got:
        got.read()
    return 1000 * (time.perf_counter() - began)


def resident_mib(agent: AgentProcess) -> float:
    """The agent's resident size now."""
    line = next(x for x in Path(f"/proc/{agent.pid()}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / MIB


def more_mib(agent: AgentProcess, url: str) -> float:
    """What the agent is larger by when each view was opened once."""
    before = resident_mib(agent)
    for path in VIEWS:
        get(url, path)
    return resident_mib(agent) - before


def drawn_ms(url: str, times_drawn: int) -> float:
    """The fastest of so many views of which each met a new tick."""
    times = []
    for _ in range(times_drawn):
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
    """Measure, tell, and say whether the goals are met."""
    args = arguments(__doc__).parse_args()
    times_drawn, seconds = (4, 20.0) if args.short else (12, 60.0)
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
        say("16 GPUs, 8 engines: a few ticks")
        time.sleep(3 * POLL_S)
        memory = more_mib(agent, url)
        say("views drawn anew")
        drawn = drawn_ms(url, times_drawn)
        say(f"{seconds:.0f} s without open pages")
        without = percent(agent, seconds)
        say(f"{seconds:.0f} s with {PAGES} of them")
        over = threading.Event()
        for _ in range(PAGES):
            threading.Thread(target=look, args=(url, over), daemon=True).start()
            time.sleep(EVERY_S / PAGES)  # people do not open their pages at one moment
        more = percent(agent, seconds) - without
        over.set()
    return tell([Figure("page_drawn", drawn, "ms", GOAL_DRAWN_MS),
                 Figure("page_20_open", more, "percent_of_a_core", GOAL_PAGES_PERCENT),
                 Figure("page_memory", memory, "MiB", GOAL_MEMORY_MIB)])


if __name__ == "__main__":
    sys.exit(main())
