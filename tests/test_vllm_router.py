"""A real vllm-router in front of two small streaming engines: what it counts is what the load generator knows."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.config import Config
from agent.daemon import setup_of
from agent.model import Signal
from agent.node import Node
from agent.signals import router_signals
from agent.sources.router import RouterSource
from tests.needs import find, need
from tests.receiver import wait_until

ROOT = Path(__file__).resolve().parents[1]
LONG_S = 60.0
REQUESTS = 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def answers(port: int, path: str) -> bool:
    """Whether a GET is answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        with connection.getresponse() as reply:
            reply.read()
            return reply.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Site:
    """Two engines and the router; `served` counts what its clients got, by status."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.engines = [stack.enter_context(subprocess.Popen(
            [sys.executable, "-m", "tests.drills.streaming_engine"], cwd=ROOT, stdout=subprocess.PIPE, text=True))
            for _ in range(2)]
        stack.callback(self._kill, *self.engines)
        self.ports = []
        for engine in self.engines:
            assert engine.stdout is not None
            self.ports.append(int(engine.stdout.readline()))
        self.workers = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.port, self.metrics = free_port(), free_port()
        log = stack.enter_context((folder / "router.log").open("w"))
        router = stack.enter_context(subprocess.Popen(
            [find("vllm-router") or "", "--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", *self.workers,
             "--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics),
             "--retry-max-retries", "3", "--health-check-interval-secs", "600"],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "NO_PROXY": "*"}))
        stack.callback(self._kill, router)
        wait_until(lambda: answers(self.port, "/health"), LONG_S, "the router")
        wait_until(lambda: answers(self.metrics, "/metrics"), LONG_S, "its metrics")
        self.served: Counter[int] = Counter()

    @staticmethod
    def _kill(*processes: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        for process in processes:
            process.kill()

    def ask(self, n: int) -> None:
        """So many streamed completions, four at a time."""
        turns = threading.Semaphore(4)

        def one() -> None:
            with turns:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
                asked = {"model": "tiny", "prompt": "count from one to eight, please, in words", "stream": True}
                connection.request("POST", "/v1/completions", json.dumps({**asked, "max_tokens": 3}),
                                   {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                connection.close()
                self.served[reply.status] += 1

        threads = [threading.Thread(target=one) for _ in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    need("vllm-router")
    with ExitStack() as stack:
        yield Site(stack, tmp_path)


def told(node: Node, source: RouterSource, at: float) -> dict[tuple[str, str], Signal]:
    """The router's signals after another read."""
    batch = source.read(at)
    assert batch.error is None
    node.take(batch)
    node.step(at, 5.0)
    return {(s.id, s.evidence.get("key", "")): s for s in router_signals(node.scene)}


def value(of: dict[tuple[str, str], Signal], name: str, key: str = "") -> float:
    found = of.get((name, key))
    return 0.0 if found is None or found.value is None else found.value


@pytest.mark.heavy
def test_arrivals_errors_and_shares_are_those_of_the_load_generator(site: Site) -> None:
    """Half of 40 requests to each; then one engine is killed: each try there fails, is counted there, and retried."""
    source = RouterSource("edge", f"http://127.0.0.1:{site.metrics}")
    node, now = Node(setup_of(Config(node="n"), ())), time.time()
    told(node, source, now)
    site.ask(REQUESTS)
    before = told(node, source, now + 5)

    assert site.served == {200: REQUESTS}
    assert value(before, "router_requests") == REQUESTS
    shares = [value(before, "router_worker_requests", worker) for worker in site.workers]
    assert sum(shares) == REQUESTS
    assert abs(shares[0] - shares[1]) <= 2
    assert value(before, "router_retries") == 0

    site.engines[0].kill()
    site.engines[0].wait()
    site.ask(REQUESTS)
    after = told(node, source, now + 10)

    dead, well = site.workers
    failed, in_vain = value(after, "router_worker_errors", dead), value(after, "router_errors", "retries exhausted")
    assert site.served.total() == 2 * REQUESTS
    assert in_vain == 2 * REQUESTS - site.served[200]  # the router gave those up
    assert value(after, "router_requests") == site.served[200]
    assert failed > 0
    assert failed == value(after, "router_worker_requests", dead) - shares[0]  # each try at the dead one failed
    assert value(after, "router_worker_requests", well) == shares[1] + REQUESTS - in_vain
    assert value(after, "router_retries") == failed - in_vain  # the last try of those has no retry
    source.close()
