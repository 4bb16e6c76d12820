"""The agent with real sources and a real store in this process, its time handed in: ticks follow each other at once.

The engines are real HTTP servers in a process of their own, each of which serves the next page of a recording to each
scrape; the GPUs are the C stand-in's (this process must have been started with `environment`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from agent.config import Config, load_all
from agent.daemon import build, close
from agent.signals import CATALOGUE
from rules import RuleSet
from tests.fake_nvml import build as stand_in
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.page_server import PageServer
from tests.recordings import KV_PRESSURE, rows

ROOT = Path(__file__).parents[1]
POLL_S = 5.0
SCENARIO = "TOCSIN_FAKE_NVML"


class Clock:
    """Unix seconds, moved by hand."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def environment(folder: Path, gpu_count: int) -> dict[str, str]:
    """What a process needs to see so many simulated GPUs."""
    scenario = folder / "gpus.json"
    write_scenario(scenario, gpus(gpu_count))
    return {**os.environ, "LD_LIBRARY_PATH": str(stand_in.build()), SCENARIO: str(scenario)}


class Engines:
    """`count` engines that serve one page after the other, in a process of their own. `page_bytes`: about so large."""

    def __init__(self, count: int, page_bytes: int = 0) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "bench.replay", str(count), str(page_bytes)], cwd=ROOT,
                                         stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.urls: list[str] = json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self._process.kill()
        self._process.wait()


def recorded_pages(page_bytes: int = 0) -> list[bytes]:
    """A real vLLM's pages in their order; enlarged by series that are there on larger servers, and nobody asks for."""
    bodies: list[bytes] = [row["body"].encode() for row in rows(KV_PRESSURE) if row["body"]]
    more = max(0, page_bytes - len(bodies[0]))
    line = 'vllm:lora_request_seconds_bucket{{adapter="adapter-{}",le="{}",model_name="m"}} {}\n'
    extra: list[str] = ["# TYPE vllm:lora_request_seconds histogram\n"]
    size = 0
    for n in range(more):
        if size >= more:
            break
        extra.append(line.format(n // 12, n % 12, n))
        size += len(extra[-1])
    tail = "".join(extra).encode() if more else b""
    return [body + tail for body in bodies]


def serve(count: int, page_bytes: int) -> None:
    """Serve until killed; prints the URLs as JSON."""
    bodies = recorded_pages(page_bytes)
    servers = []
    for i in range(count):
        place = i * len(bodies) // count  # each engine's own
        servers.append(PageServer(partial(next, cycle([*bodies[place:], *bodies[:place]]))))
    print(json.dumps([server.url for server in servers]), flush=True)
    signal.pause()


class Replay:
    """The agent, whole but for its loop and discovery, and how to make it tick. `rule_times`: its rules so often."""

    def __init__(self, folder: Path, urls: Sequence[str] = (), extra: Mapping[str, Any] | None = None,
                 rule_times: int = 1, at: float | None = None) -> None:
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
        self.clock = Clock(time.time() if at is None else at)
        self.config, rules = configured(folder, urls, extra or {})
        more = [replace(rule, id=f"{rule.id}-{n}") for n in range(1, rule_times) for rule in rules.rules]
        self.rules = replace(rules, rules=(*rules.rules, *more))
        self.agent = build(self.config, self.rules, clock=self.clock, monotonic=self.clock)
        assert self.agent.outbox is not None
        self.agent.outbox.start()

    def tick(self, count: int = 1) -> None:
        """So many polls."""
        for _ in range(count):
            self.clock.at += POLL_S
            self.agent.tick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        close(self.agent, [])


def configured(folder: Path, urls: Sequence[str], extra: Mapping[str, Any]) -> tuple[Config, RuleSet]:
    """A configuration as a person would write it, with all rules."""
    log = folder / "kmsg"
    log.touch()
    engines = [{"name": f"engine-{i}", "url": url} for i, url in enumerate(urls)]
    config = {"node": "bench", "state_dir": str(folder / "state"), "socket": str(folder / "sock"), "discover": False,
              "poll": f"{POLL_S:g}s", "engines": engines, "kernel_log": str(log)}
    path = folder / "tocsin.yaml"
    path.write_text(json.dumps({**config, **extra}))  # JSON is YAML
    return load_all(path, {}, CATALOGUE)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
