"""A small load generator that keeps what it saw: each request in a thread, streamed, every piece with its time."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from tests.engine.vllm import MODEL, WORDS

ANSWER_S = 300.0
NOISE_EVERY_S = 0.01


@dataclass
class Seen:
    """One request as its client saw it. Times are unix s; `tokens` is the count that each piece told."""

    prompt_tokens: int
    sent_at: float
    piece_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended_at: float | None = None
    error: str = ""

    @property
    def first_at(self) -> float | None:
        """When the first token came."""
        return self.piece_at[0] if self.piece_at else None

    def tokens_at(self, at: float) -> int:
        """How many had come."""
        return max((n for n, came in zip(self.tokens, self.piece_at, strict=True) if came <= at), default=0)


class Load:
    """Sends to one engine; `seen` has every request since it was made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._late: list[tuple[float, float]] = []  # (when, by how much this process was late)
        self.seen: list[Seen] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._measure_noise, name="noise", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def send(self, prompt: str, max_tokens: int) -> threading.Thread:
        """One request, in a thread of its own."""
        thread = threading.Thread(target=self.ask, args=(prompt, max_tokens), daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def ask(self, prompt: str, max_tokens: int) -> Seen:
        """One request, here and now."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        asked = json.dumps({
            "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        one = Seen(len(prompt.split()), time.time())
        self.seen.append(one)
        try:
            connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
            with connection.getresponse() as reply:
                for event in events(reply):
                    if event["choices"]:
                        one.piece_at.append(time.time())
                        one.tokens.append(event["usage"]["completion_tokens"])
        except (OSError, http.client.HTTPException, ValueError, KeyError) as failure:
            one.error = f"{type(failure).__name__}: {failure}"
        finally:
            one.ended_at = time.time()
            connection.close()
        return one

    def closed_loop(self, prompts: list[str], max_tokens: int, at_once: int) -> None:
        """All of these, so many at a time; returns when all have ended."""
        rest = iter(prompts)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    prompt = next(rest, None)
                if prompt is None:
                    return
                self.ask(prompt, max_tokens)

        workers = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(ANSWER_S)

    def wait(self) -> None:
        """Until every request that was sent has ended."""
        for thread in self._threads:
            thread.join(ANSWER_S)
        assert all(one.ended_at for one in self.seen)

    def oldest_wait_s(self, at: float) -> float:
        """The age at some time of the oldest request without its first token."""
        return max((at - one.sent_at for one in self.seen
                    if one.sent_at <= at and (one.first_at is None or one.first_at > at)), default=0.0)

    def ttfts_s(self) -> list[float]:
        """Of all that have ended."""
        return [one.first_at - one.sent_at for one in self.seen if one.first_at is not None]

    def gaps_s(self) -> list[float]:
        """Between the tokens of all; tokens that came in one piece have come at once."""
        gaps: list[float] = []
        for one in self.seen:
            gaps += [0.0] * (one.tokens[0] - 1)
            for (came, count), (next_came, next_count) in pairwise(zip(one.piece_at, one.tokens, strict=True)):
                gaps += [next_came - came] * (next_count > count) + [0.0] * (next_count - count - 1)
        return gaps

    def noise_s(self, start: float, end: float) -> float:
        """By how much this process was late at most between two times: as late may everything be that it saw."""
        return max((late for at, late in self._late if start <= at <= end), default=0.0)

    def _measure_noise(self) -> None:
        while not self._stop.is_set():
            due = time.time() + NOISE_EVERY_S
            time.sleep(NOISE_EVERY_S)
            self._late.append((due, max(0.0, time.time() - due)))


def events(reply: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream. Raises ValueError where it is none."""
    if reply.status != 200:
        raise ValueError(f"HTTP {reply.status}: {reply.read()[:300]!r}")
    while line := reply.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("error"):
                raise ValueError(str(event)[:300])
            yield event


def words(count: int, seed: int) -> str:
    """A prompt of so many tokens; another for each seed from its first word on."""
    return " ".join(f"w{(seed * 7919 + i * (seed % 17 + 1)) % WORDS}" for i in range(count))


def quantile(share: float, values: list[float]) -> float:
    """The smallest that at least this share does not exceed, as histogram_quantile picks its bucket."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
