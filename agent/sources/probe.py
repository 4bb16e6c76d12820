"""The canary: one short completion every 30 s, through an engine's address or the one that users use.

Three of four are streamed; the fourth is asked for whole, and timed apart: a proxy that gathers a stream before it
passes it on makes the one as slow as the other, and nobody who looks at either alone sees why.

What no engine tells of itself: a hang (its page says running 0 and /health 200), errors inside a stream, clients that
are refused or time out, and the network and proxies in between. It is asked for (`probe.canary.urls`), never by itself.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from agent.model import Batch, Gap, Sample, Why
from agent.phase import first_two
from agent.sources.fetch import shown_address
from agent.threads import begin

PROMPT = "This is a test of one short answer, and nobody will read it. Count from one to eight:"  # 8 tokens and more
MAX_TOKENS = 8
CONNECT_S = 2.0
ANSWER_S = 60.0  # then it is given up, and has timed out
LINE_BYTES = 64 * 1024
BODY_BYTES = 64 * 1024
BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0,
            30.0, 60.0)
WHOLE_EVERY = 4  # of so many questions one is not streamed
BAD_ENDINGS = frozenset({"error", "abort"})  # finish reasons of an answer that is none
SPOKEN = ("content", "reasoning_content", "reasoning")  # the last is what vLLM calls it since 0.11


class Failed(Exception):  # noqa: N818  (what a canary did)
    """An answer that a user would call an error. `is_late`: none came. `is_5xx`: the engine counts it, too."""

    def __init__(self, message: str, *, is_late: bool = False, is_5xx: bool = False) -> None:
        super().__init__(message)
        self.is_late, self.is_5xx = is_late, is_5xx


class Refused(Exception):  # noqa: N818
    """The address takes no canary: a wrong key, no such model, an engine that does not generate. Nobody's outage."""


class Histogram:
    """Counts by upper bound, as a page would tell them."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """One observation."""
        self.counts[bisect_left(self.bounds_s, value_s)] += 1
        self.sum_s += value_s

    def samples(self, name: str, subject: str, at: float) -> Iterator[Sample]:
        """The histogram as samples."""
        running = 0
        for bound, count in zip((*map(repr, self.bounds_s), "+Inf"), self.counts, strict=True):
            running += count
            yield Sample(name, subject, float(running), at, bound)
        yield Sample(name, subject, self.sum_s, at, "sum")
        yield Sample(name, subject, float(running), at, "count")


class CanarySource:
    """Asks one address; fulfils agent.model.Source. A read only tells what its thread has counted.

    Args:
        url: with or without /v1.
        asks: the target whose own address it is; None: users'.
        model: None: the first that /v1/models names.
        api_key: reads it when it is used; None: no key is sent.
        every_s: from one question to the next.
        slo_s: bounds that its histograms have besides, so that the service levels can be judged.
        whole_every: of so many questions one is not streamed; 0: all are.
        phase_s: how far into each `every_s` it asks; a fleet that is started at once asks one address.
    """

    def __init__(self, url: str, *, asks: str | None = None, model: str | None = None,
                 api_key: Callable[[], str] | None = None, every_s: float = 30.0, slo_s: tuple[float, ...] = (),
                 answer_s: float = ANSWER_S, whole_every: int = WHOLE_EVERY, phase_s: float = 0.0) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.url = shown_address(base)
        self.name = f"canary:{self.url}"
        self.asks = asks
        self.held = False  # its engine sleeps: nothing is asked
        self._base, self._model, self._api_key = base, model, api_key
        self._every_s, self._answer_s = every_s, answer_s
        self._begins_s = first_two(phase_s, every_s)
        bounds_s = tuple(sorted({*BOUNDS_S, *slo_s}))
        self._lock = threading.Lock()
        self._ttft, self._itl, self._whole = Histogram(bounds_s), Histogram(bounds_s), Histogram(bounds_s)
        self._whole_every, self._asked = whole_every, 0
        self._requests = self._errors = self._counted_errors = 0
        self._waits_since: float | None = None  # monotonic; kept through questions that time out
        self._refusal: str | None = None
        self._is_chat = False
        self._found_model: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._reply: http.client.HTTPResponse | None = None

    def read(self, now: float) -> Batch:
        """What was counted so far."""
        start = time.monotonic()
        if self._thread is None and not self._stop.is_set():
            self._thread = begin(self._run, self.name)
        with self._lock:
            readings = tuple(self._readings(now, start))
            error = self._refusal
        return Batch(self.name, now, time.monotonic() - start, readings, error=error)

    def close(self) -> None:
        """Ask no more, and leave what is asked."""
        self._stop.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)

    def _readings(self, now: float, mono: float) -> Iterator[Sample | Gap]:
        if self._refusal is not None:
            for name in ("user_requests", "user_errors", "user_ttft", "user_itl", "user_whole"):
                yield Gap(name, self.url, Why.BAD_STATUS, self._refusal, now)
            if self.asks is not None:
                yield Gap("canary_age_s", self.asks, Why.BAD_STATUS, self._refusal, now)
            return
        yield Sample("user_requests", self.url, float(self._requests), now)
        yield Sample("user_errors", self.url, float(self._errors), now)
        yield from self._ttft.samples("user_ttft", self.url, now)
        yield from self._itl.samples("user_itl", self.url, now)
        yield from self._whole.samples("user_whole", self.url, now)
        if self.asks is not None:
            since = None if self.held else self._waits_since
            yield Sample("canary_age_s", self.asks, 0.0 if since is None else mono - since, now)
            yield Sample("canary_requests", self.asks, float(self._requests), now)
            yield Sample("canary_errors", self.asks, float(self._counted_errors), now)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        first_s, second_s = self._begins_s
        self._stop.wait(first_s)
        every_s = second_s - first_s  # once; from then on its own pace
        while not self._stop.is_set():
            start = time.monotonic()
            is_late = False if self.held else self._ask(start)
            self._stop.wait(0.1 if is_late else max(0.1, every_s - (time.monotonic() - start)))
            every_s = self._every_s

    def _ask(self, start: float) -> bool:
        """Ask once, and count. Whether no answer came in time."""
        with self._lock:
            self._waits_since = start if self._waits_since is None else self._waits_since
        failure: Failed | None = None
        refusal: str | None = None
        times_s: list[float] = []
        self._asked += 1
        streams = not self._whole_every or self._asked % self._whole_every != 0
        try:
            times_s = self._answer(start + self._answer_s, streams=streams)
        except Refused as refused:
            refusal = f"{self.url} takes no canary: {refused}"
        except Failed as failed:
            failure = failed
        except TimeoutError:
            failure = Failed("no answer in time", is_late=True)
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = Failed(f"{type(error).__name__}: {error}")
        finally:
            self._drop()
        if self._stop.is_set():
            return False
        with self._lock:
            self._refusal = refusal
            is_late = failure is not None and failure.is_late
            if not is_late:
                self._waits_since = None
            if refusal is not None:
                return False
            self._requests += 1
            if failure is not None:
                self._errors += 1
                self._counted_errors += failure.is_5xx
            elif times_s and not streams:
                self._whole.add(times_s[-1] - start)
            elif times_s:
                self._ttft.add(times_s[0] - start)
                for earlier, later in pairwise(times_s):
                    self._itl.add(later - earlier)
            return is_late

    def _answer(self, deadline: float, *, streams: bool) -> list[float]:
        """When each piece of text came (monotonic). Raises Failed, Refused, OSError, http.client.HTTPException."""
        model = self._model or self._found_model or self._first_model(deadline)
        asked: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "stream": streams, "temperature": 0}
        read = self._pieces if streams else self._one
        if not self._is_chat:
            reply = self._post("/v1/completions", {**asked, "prompt": PROMPT}, deadline)
            body = b"" if reply.status == 200 else reply.read(BODY_BYTES)
            if reply.status != 404 or b"model" in body.lower():
                self._check(reply.status, body)
                return read(reply, deadline)
            self._is_chat = True
        messages = [{"role": "user", "content": PROMPT}]
        return read(self._post("/v1/chat/completions", {**asked, "messages": messages}, deadline), deadline)

    def _first_model(self, deadline: float) -> str:
        reply = self._send("GET", "/v1/models", None, deadline)
        body = reply.read(BODY_BYTES)
        self._check(reply.status, body)
        try:
            self._found_model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise Refused("/v1/models names no model; write probe.canary.model") from None
        return self._found_model

    def _check(self, status: int, body: bytes) -> None:
        if status == 200:
            return
        said = " ".join(body.decode("utf-8", "replace").split())[:200]
        if status >= 500 or status == 429:
            raise Failed(f"HTTP {status}: {said}", is_5xx=status >= 500)
        self._found_model = None
        raise Refused(f"HTTP {status}: {said}")

    def _post(self, path: str, question: dict[str, Any], deadline: float) -> http.client.HTTPResponse:
        return self._send("POST", path, json.dumps(question).encode(), deadline)

    def _send(self, method: str, path: str, body: bytes | None, deadline: float) -> http.client.HTTPResponse:
        self._drop()
        parts = urlsplit(self._base)
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.netloc, timeout=CONNECT_S, context=ssl.create_default_context())
        else:
            self._connection = http.client.HTTPConnection(parts.netloc, timeout=CONNECT_S)
        headers = {"Content-Type": "application/json", "User-Agent": "tocsin-canary"}
        if self._api_key is not None:
            try:
                headers["Authorization"] = f"Bearer {self._api_key()}"
            except Exception as error:  # whoever reads it says what is wrong with the file or variable
                raise Refused(str(error)) from error
        try:
            self._connection.connect()
        except TimeoutError:
            raise Failed("no connection in time") from None
        self._wait_until(deadline)
        self._connection.request(method, parts.path.rstrip("/") + path, body, headers)
        self._wait_until(deadline)
        self._reply = self._connection.getresponse()
        return self._reply

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(left_s)

    def _drop(self) -> None:
        for held in (self._reply, self._connection):  # the answer holds the socket, too
            if held is not None:
                held.close()
        self._reply = self._connection = None

    def _one(self, reply: http.client.HTTPResponse, deadline: float) -> list[float]:
        """When a whole answer had come."""
        self._wait_until(deadline)
        body = reply.read(BODY_BYTES)
        self._check(reply.status, body)
        try:
            ended = json.loads(body)["choices"][0]["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise Failed(f"no answer, but {body[:200].decode('utf-8', 'replace')!r}") from None
        if ended is None or ended in BAD_ENDINGS:
            raise Failed(f"finish reason {ended!r}")
        return [time.monotonic()]

    def _pieces(self, reply: http.client.HTTPResponse, deadline: float) -> list[float]:
        if reply.status != 200:
            self._check(reply.status, reply.read(BODY_BYTES))
        came: list[float] = []
        ended: str | None = None
        while True:
            self._wait_until(deadline)
            line = reply.readline(LINE_BYTES)
            if not line or line.strip() == b"data: [DONE]":
                break
            if not line.startswith(b"data:"):
                if line.lstrip().startswith(b"{"):
                    raise Failed(f"no stream, but {line[:200].decode('utf-8', 'replace')!r}")
                continue
            text, ended = piece_of(line, ended)
            if text:
                came.append(time.monotonic())
        if ended is None:
            raise Failed("the stream ended without a finish reason")
        if ended in BAD_ENDINGS:
            raise Failed(f"finish reason {ended!r}")
        return came


def piece_of(line: bytes, ended: str | None) -> tuple[str, str | None]:
    """(text, finish reason) of one event of a stream.

    Raises:
        Failed: it is an error, in a stream that began with HTTP 200.
    """
    try:
        event = json.loads(line[5:])
        if not isinstance(event, dict) or event.get("error"):
            raise Failed(f"an error inside the stream: {str(event)[:200]}")
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = choice.get("text") or next((delta[name] for name in SPOKEN if delta.get(name)), "")
        return str(text), choice.get("finish_reason") or ended
    except (ValueError, AttributeError, TypeError, IndexError):
        raise Failed(f"an event that is none: {line[:100].decode('utf-8', 'replace')!r}") from None
