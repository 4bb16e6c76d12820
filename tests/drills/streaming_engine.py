"""A small engine of two processes: a page that speaks the OpenAI API, and a worker that makes the tokens.

`python -m tests.drills.streaming_engine --port 8000` serves /v1/*, /health and /metrics (vLLM's names) until it is
killed. As in vLLM, each can be killed or stopped without the other: without the worker the page ends; a stopped
worker leaves a page that answers /health and takes requests, to which no token comes. The worker ends with its page.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
ITL_S = (0.01, 0.05, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)


# The worker


def work(first_s: float, pace_s: float, service_s: float) -> None:
    """Read `number chunks` lines; answer with the number when each token is due. One request is taken a `service_s`."""
    os.write(1, b"ready\n")
    due: list[tuple[float, int, int]] = []  # (when, request, tokens to come)
    free_at, pending = 0.0, b""
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        if select.select([0], [], [], wait_s)[0]:
            told = os.read(0, 65536)
            if not told:
                return
            *lines, pending = (pending + told).split(b"\n")
            for line in lines:
                number, chunks = map(int, line.split())
                free_at = max(time.monotonic(), free_at) + service_s
                heapq.heappush(due, (free_at + first_s, number, chunks))
        while due and due[0][0] <= time.monotonic():
            at, number, chunks = heapq.heappop(due)
            os.write(1, b"%d\n" % number)
            if chunks > 1:
                heapq.heappush(due, (at + pace_s, number, chunks - 1))


# The page


class Metrics:
    """What vLLM's page tells, as far as the agent asks for it."""

    def __init__(self, model: str, preempted: Path | None) -> None:
        self.registry, self._preempted, self._told = CollectorRegistry(), preempted, 0
        names = {"model_name": model, "engine": "0"}

        def own(kind: Any, name: str, **more: Any) -> Any:
            return kind(f"vllm:{name}", name, names, registry=self.registry, **more).labels(**names)

        self.running = own(Gauge, "num_requests_running")
        own(Gauge, "num_requests_waiting").set(0)
        own(Gauge, "kv_cache_usage_perc").set(0.1)
        self.preemptions = own(Counter, "num_preemptions")
        self.prompt_tokens = own(Counter, "prompt_tokens")
        self.generation_tokens = own(Counter, "generation_tokens")
        self.ttft = own(Histogram, "time_to_first_token_seconds", buckets=TTFT_S)
        self.itl = own(Histogram, "inter_token_latency_seconds", buckets=ITL_S)
        self.e2e = own(Histogram, "e2e_request_latency_seconds", buckets=TTFT_S)
        finished = [*names, "finished_reason"]
        success = Counter("vllm:request_success", "request_success", finished, registry=self.registry)
        self.success = success.labels(**names, finished_reason="length")
        self.http = Counter("http_requests", "requests", ["method", "handler", "status"], registry=self.registry)

    def page(self) -> bytes:
        """The page; `preempted` names a file with the number of preemptions that it shall tell."""
        if self._preempted is not None and self._preempted.exists():
            told = int(self._preempted.read_text() or 0)
            self.preemptions.inc(max(0, told - self._told))
            self._told = max(told, self._told)
        return generate_latest(self.registry)


class Engine:
    """The page's side of the worker."""

    def __init__(self, name: str, worker: subprocess.Popen[bytes], metrics: Metrics) -> None:
        self.name, self.metrics = name, metrics
        self._worker = worker
        self._numbers = itertools.count()
        self._asked: dict[int, queue.Queue[float]] = {}
        self._lock = threading.Lock()
        self._drains = False
        assert worker.stdout is not None
        worker.stdout.readline()  # it is ready: nobody is served before
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._worker.stdout is not None
        for line in self._worker.stdout:
            if (waiting := self._asked.get(int(line))) is not None:
                waiting.put(time.monotonic())
        os._exit(1)  # an engine without its core

    def ask(self, chunks: int) -> tuple[int, queue.Queue[float]] | None:
        """Ask for tokens; each comes into the queue with its time. None: it takes nothing new."""
        assert self._worker.stdin is not None
        with self._lock:
            if self._drains:
                return None
            number = next(self._numbers)
            self._asked[number] = queue.Queue()
            self._worker.stdin.write(b"%d %d\n" % (number, chunks))
            self._worker.stdin.flush()
        return number, self._asked[number]

    def forget(self, number: int) -> None:
        """The request is over."""
        self._asked.pop(number, None)

    def drain(self) -> None:
        """End when what is in flight is answered."""
        with self._lock:
            self._drains = True
        while self._asked:
            time.sleep(0.01)
        os._exit(0)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    engine: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Quiet."""

    def do_GET(self) -> None:
        """Models, health, metrics."""
        if self.path == "/metrics":
            self._send(200, self.engine.metrics.page(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode())
        else:
            self._send(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        """A completion."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        metrics, chunks = self.engine.metrics, int(asked.get("max_tokens", 4))
        taken = self.engine.ask(chunks)
        if taken is None:  # not a word: a router asks the next engine
            self.close_connection = True
            return
        number, tokens = taken
        metrics.running.inc()
        metrics.prompt_tokens.inc(8)
        try:
            self._answer(asked, chunks, tokens)
            metrics.success.inc()
            metrics.http.labels("POST", self.path, "2xx").inc()
        except OSError:  # the client gave up
            self.close_connection = True
        finally:
            metrics.running.dec()
            self.engine.forget(number)

    def _answer(self, asked: dict[str, Any], chunks: int, tokens: queue.Queue[float]) -> None:
        metrics, start, last = self.engine.metrics, time.monotonic(), 0.0
        if asked.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
        for number in range(chunks):
            at = tokens.get()
            self._raise_if_gone()
            (metrics.ttft if number == 0 else metrics.itl).observe(at - (last or start))
            last = at
            metrics.generation_tokens.inc()
            if asked.get("stream"):
                if number == 0:
                    self.end_headers()
                self._event(json.dumps(self._part(asked, f" {number}", "length" if number == chunks - 1 else None)))
        metrics.e2e.observe(time.monotonic() - start)
        if asked.get("stream"):
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._send(200, json.dumps(self._part(asked, " 1 2 3", "length")).encode())

    def _part(self, asked: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        chat = self.path.endswith("/chat/completions")
        said: dict[str, Any] = {"text": text}
        if chat:
            said = {("delta" if asked.get("stream") else "message"): {"role": "assistant", "content": text}}
        return {"id": "c", "object": "completion", "created": 1, "model": asked.get("model", "tiny"),
                "choices": [{"index": 0, **said, "finish_reason": reason}]}  # fmt: skip

    def _raise_if_gone(self) -> None:
        """An engine counts no latency for a client that has gone."""
        if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError

    def _event(self, text: str) -> None:
        body = b"data: " + text.encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.wfile.flush()

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Says nothing of a client that gave up."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Many tests are about such clients."""


def main(argv: Sequence[str] | None = None) -> None:
    """Be a page, or its worker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="", help="the address to listen on; all of them")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name", default="a")
    parser.add_argument("--first", type=float, default=0.02, help="seconds until the first token")
    parser.add_argument("--pace", type=float, default=0.01, help="seconds between tokens")
    parser.add_argument("--service", type=float, default=0.0, help="seconds that it takes up a request before the next")
    parser.add_argument("--preempted", type=Path, help="a file with the number of preemptions to tell")
    parser.add_argument("--drain", action="store_true", help="at SIGTERM, end when what is in flight is answered")
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args(argv)
    if args.worker:
        work(args.first, args.pace, args.service)
        return
    own = [sys.executable, "-m", "tests.drills.streaming_engine", "--worker", "--first", str(args.first),
           "--pace", str(args.pace), "--service", str(args.service)]  # fmt: skip
    worker = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1)
    engine = Handler.engine = Engine(args.name, worker, Metrics("tiny", args.preempted))
    if args.drain:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=engine.drain, daemon=True).start())
    with Server((args.host, args.port), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
