"""A simulated vLLM replica as a real HTTP server: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

Run by its path, not as a module of ours: no drill may touch Tocsin itself, and this is the drill's target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent.demo import gpus, scheduler

MODEL = "llama-70b"
# vLLM's own bounds, in s
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
LOOK_S = 0.25  # how often the GPUs' clocks are looked at, and how often the load is told
ANSWER_WITHIN_S = 120.0
WORDS = ("the", "bell", "rings", "once", "for", "each", "fire", "and", "names", "it")


class Metrics:
    """vLLM's page, as far as the agent asks for it."""

    def __init__(self, started_at: float) -> None:
        self.registry = CollectorRegistry()
        names = {"model_name": MODEL, "engine": "0"}

        def own(kind: Any, name: str, **more: Any) -> Any:
            return kind(f"vllm:{name}", name, names, registry=self.registry, **more).labels(**names)

        Gauge("process_start_time_seconds", "start", registry=self.registry).set(started_at)
        self.running, self.waiting = own(Gauge, "num_requests_running"), own(Gauge, "num_requests_waiting")
        self.kv_share = own(Gauge, "kv_cache_usage_perc")
        self.preemptions = own(Counter, "num_preemptions")
        self.prompt_tokens, self.generation_tokens = own(Counter, "prompt_tokens"), own(Counter, "generation_tokens")
        self.prefix_queries, self.prefix_hits = own(Counter, "prefix_cache_queries"), own(Counter, "prefix_cache_hits")
        self.ttft = own(Histogram, "time_to_first_token_seconds", buckets=TTFT_S)
        self.itl = own(Histogram, "inter_token_latency_seconds", buckets=ITL_S)
        self.e2e = own(Histogram, "e2e_request_latency_seconds", buckets=E2E_S)
        finished = Counter("vllm:request_success", "request_success", [*names, "finished_reason"],
                           registry=self.registry)
        self.success = finished.labels(**names, finished_reason="length")
        cache = {**names, "num_gpu_blocks": str(scheduler.BLOCKS), "block_size": str(scheduler.BLOCK_TOKENS),
                 "enable_prefix_caching": "True"}
        Gauge("vllm:cache_config_info", "cache_config_info", cache, registry=self.registry).labels(**cache).set(1)
        self.http = Counter("http_requests", "requests", ["method", "handler", "status"], registry=self.registry)


class Engine:
    """The scheduler, moved on in time by a thread of its own. Each request's tokens come into a queue, with their time.

    Latencies are those of the model: a machine that is busy with something else makes no breach here.
    """

    def __init__(self, own: Sequence[int], gpus_file: Path, load_file: Path, started_at: float) -> None:
        self.metrics = Metrics(started_at)
        self._own, self._gpus_file, self._load_file = own, gpus_file, load_file
        self._scheduler = scheduler.Scheduler()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[float]] = {}
        self._last: dict[int, float] = {}  # when a request got its last token
        self._told = (0, 0, 0)
        self._speeds: Sequence[float] = (1.0,)
        self._busy_s = 0.0
        threading.Thread(target=self._run, name="engine core", daemon=True).start()
        threading.Thread(target=self._look, name="ranks", daemon=True).start()

    def ask(self, words: Sequence[str], wanted: int) -> tuple[int, queue.SimpleQueue[float]]:
        """A request arrives; the time of each of its tokens comes into the queue."""
        with self._changed:
            number = next(self._numbers)
            found: queue.SimpleQueue[float] = queue.SimpleQueue()
            self._asked[number] = found
            self._scheduler.add(scheduler.Request(number, len(words), scheduler.hashes(words), wanted,
                                                  time.monotonic()))
            self.metrics.prompt_tokens.inc(len(words))
            self._changed.notify()
        return number, found

    def forget(self, number: int) -> None:
        """It is over, or its client has gone."""
        with self._changed:
            self._asked.pop(number, None)
            self._last.pop(number, None)
            self._scheduler.drop(number)

    def page(self) -> bytes:
        """What /metrics says now."""
        with self._changed:
            now, metrics = self._scheduler, self.metrics
            metrics.running.set(len(now.running))
            metrics.waiting.set(len(now.waiting))
            metrics.kv_share.set(now.kv_share)
            counted = (now.preemptions, now.prefix_queries, now.prefix_hits)
            for counter, value, before in zip((metrics.preemptions, metrics.prefix_queries, metrics.prefix_hits),
                                              counted, self._told, strict=True):
                counter.inc(value - before)
            self._told = counted
        return generate_latest(metrics.registry)

    # --- the threads ---

    def _run(self) -> None:
        at = 0.0
        while True:
            with self._changed:
                step = self._scheduler.step(self._speeds)
                if step is None:
                    at = 0.0
                    self._changed.wait()
                    continue
            at = max(at, time.monotonic() - 1.0) if at else time.monotonic()  # a stall of the machine is forgotten
            at += step.took_s
            time.sleep(max(0.0, at - time.monotonic()))
            self._busy_s += step.took_s
            with self._changed:
                for one in step.served:
                    self._serve(one, at)

    def _serve(self, one: scheduler.Request, at: float) -> None:
        before = self._last.get(one.number)
        waiting = self._asked.get(one.number)
        if waiting is None:
            return
        if before is None:
            self.metrics.ttft.observe(at - one.arrived_s)
        else:
            self.metrics.itl.observe(at - before)
        self._last[one.number] = at
        self.metrics.generation_tokens.inc()
        if one.made >= one.wanted:
            self.metrics.e2e.observe(at - one.arrived_s)
            self.metrics.success.inc()
        waiting.put(at)

    def _look(self) -> None:
        """What the GPUs are; how busy we keep them. An engine whose GPU is gone ends, as NCCL would have it."""
        busy_s, share, started = 0.0, 0.0, time.monotonic()
        while True:
            time.sleep(LOOK_S)
            took_s, started = time.monotonic() - started, time.monotonic()
            share += 0.3 * (min(1.0, (self._busy_s - busy_s) / took_s) - share)
            busy_s = self._busy_s
            new = self._load_file.with_suffix(".new")
            try:
                ranks = [gpus.load(self._gpus_file)[index] for index in self._own]
                new.write_text(f"{share:.3f}")
                os.replace(new, self._load_file)  # noqa: PTH105
            except (OSError, ValueError):
                os._exit(0)  # the demo has ended and its folder with it
            if any(rank.lost for rank in ranks):
                sys.stderr.write("a rank's GPU is gone\n")
                os._exit(1)
            self._speeds = [rank.clock_mhz / gpus.MOST_MHZ for rank in ranks]


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
            self._send(200, self.engine.page(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
        else:
            self._send(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        """A completion."""
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wanted = max(1, int(asked.get("max_tokens", 16)))
            words = self._words(asked)
        except (ValueError, TypeError, AttributeError):
            self._refuse("the body is no request of the OpenAI API")
            return
        if scheduler.blocks_for(len(words) + wanted + 1) > scheduler.BLOCKS:
            self._refuse(f"at most {scheduler.BLOCKS * scheduler.BLOCK_TOKENS - 1} tokens of prompt and answer")
            return
        number, tokens = self.engine.ask(words, wanted)
        try:
            self._answer(asked, wanted, tokens)
            self.engine.metrics.http.labels("POST", self.path, "2xx").inc()
        except (OSError, queue.Empty):  # the client gave up
            self.close_connection = True
        finally:
            self.engine.forget(number)

    def _words(self, asked: dict[str, Any]) -> list[str]:
        if self.path.endswith("/chat/completions"):
            return " ".join(str(one.get("content", "")) for one in asked.get("messages", ())).split()
        return str(asked.get("prompt", "")).split()

    def _answer(self, asked: dict[str, Any], wanted: int, tokens: queue.SimpleQueue[float]) -> None:
        streams = bool(asked.get("stream"))
        said = [f" {WORDS[number % len(WORDS)]}" for number in range(wanted)]
        for number, word in enumerate(said):
            tokens.get(timeout=ANSWER_WITHIN_S)
            self._raise_if_gone()
            if not streams:
                continue
            if number == 0:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            self._event(json.dumps(self._part(word, True, "length" if number == wanted - 1 else None)))
        if streams:
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._send(200, json.dumps(self._part("".join(said), False, "length")).encode())

    def _part(self, text: str, streams: bool, reason: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.path.endswith("/chat/completions"):
            said = {"delta" if streams else "message": {"role": "assistant", "content": text}}
        return {"id": "c", "object": "completion", "created": 1, "model": MODEL,
                "choices": [{"index": 0, **said, "finish_reason": reason}]}

    def _raise_if_gone(self) -> None:
        if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError

    def _event(self, text: str) -> None:
        body = b"data: " + text.encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.wfile.flush()

    def _refuse(self, why: str) -> None:
        self.engine.metrics.http.labels("POST", self.path, "4xx").inc()
        self._send(400, json.dumps({"error": {"message": why}}).encode())

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
        """That is its own affair."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default=MODEL, help="only to be seen in ps")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", required=True, help="the GPU of each rank")
    parser.add_argument("--gpus-file", type=Path, required=True)
    parser.add_argument("--load-file", type=Path, required=True)
    parser.add_argument("--up-for", type=float, default=0.0, help="seconds that it says to have run already")
    args = parser.parse_args(argv)
    Handler.engine = Engine(args.gpus, args.gpus_file, args.load_file, time.time() - args.up_for)
    with Server(("127.0.0.1", args.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
