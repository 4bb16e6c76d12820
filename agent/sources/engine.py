"""One inference engine over HTTP: its /metrics page at every read, and /health beside it.

The ladder is TCP, /health, /metrics: `rung` says how far it was climbed, `down` that nobody serves (refused, reset, or
/health says 5xx), `slow` that an answer was late. A /metrics that fails is not an engine that fails: then `down` is 0.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from agent.engines import trtllm_json
from agent.engines.pages import PageReader
from agent.exposition import ACCEPT, MAX_BYTES, PageError, check_length, decode
from agent.model import Batch, Gap, Sample, Why
from agent.sources.connections import foreign
from agent.sources.fetch import Answer, Fetcher, FetchError, is_local, shown_address
from agent.threads import NoThread, begin

CONNECT_S = 1.0
TOTAL_S = 3.0  # connecting included
HEALTH_EVERY_S = 15.0
HEALTH_TOTAL_S = 5.0
HEALTH_MAX_BYTES = 256 * 1024
CONNECTIONS_EVERY_S = 300.0  # the table of a busy machine is long
SUSPECT_EVERY_S = 15.0  # while it says that it works and nothing moves
OTHER_PATH = "/prometheus/metrics"  # trtllm-serve's

WORK = frozenset({"running", "waiting", "generation_tokens"})
_RUNGS = ("TCP", "/health", "/metrics")  # the rung that fails, by the number of those climbed


class EngineSource:
    """Reads one target; fulfils agent.model.Source.

    Args:
        target: its name, the subject of what belongs to no single engine.
        url: its address without /metrics, as "http://127.0.0.1:8000".
        kind: "auto", or one of agent.engines.KINDS.
        shape: whether its engines' subjects carried an index before a restart of ours; None at first sight.
        patterned: whether what deployment patterns have is read even if no page shows one; `is_patterned`, which may
            be set later, where the node is recognised as one.
        connect_s, total_s: the deadlines of one read of /metrics.
        health_every_s, health_total_s: how often /health is asked while it is well, and how long it may take.

    Raises:
        KeyError: `kind` is not known.
    """

    def __init__(
        self,
        target: str,
        url: str,
        *,
        kind: str = "auto",
        shape: bool | None = None,
        patterned: bool = False,
        connect_s: float = CONNECT_S,
        total_s: float = TOTAL_S,
        health_every_s: float = HEALTH_EVERY_S,
        health_total_s: float = HEALTH_TOTAL_S,
    ) -> None:
        self.name = f"engine:{target}"
        self.target = target
        self._pages = PageReader(target, kind=kind, shape=shape)
        self.is_patterned = patterned
        self.url = shown_address(url)
        base = url.rstrip("/").removesuffix("/metrics")
        self._metrics, self._other = (
            Fetcher(base + path, {"Accept": ACCEPT, "Accept-Encoding": "identity", "User-Agent": "tocsin"},
                    connect_s=connect_s, total_s=total_s, limit_bytes=MAX_BYTES)
            for path in ("/metrics", OTHER_PATH))
        parts = urlsplit(base)
        self._port = (parts.port or 80) if is_local(parts.hostname or "") else None
        self._connections: tuple[float, int | None] = (-math.inf, None)  # when counted (monotonic), how many
        self._worked: list[tuple[str, float]] = []  # WORK as last told
        self._is_elsewhere: bool | None = None  # the page stands at OTHER_PATH; None: nobody had to look
        fetcher = Fetcher(
            base + "/health",
            {"Accept": "*/*", "User-Agent": "tocsin", "Connection": "close"},
            connect_s=connect_s,
            total_s=health_total_s,
            limit_bytes=HEALTH_MAX_BYTES,
        )
        self._health = _Health(fetcher, health_every_s, stale_s=health_every_s + 2 * health_total_s)

    def read(self, now: float) -> Batch:
        """Read /metrics once, and look at what /health said last. Ends after 3 s at most, 4 where it is reset."""
        start = time.monotonic()
        readings: list[Sample | Gap]
        error: str | None = None
        health: _Asked | None = None
        if self.is_patterned:
            self._pages.read_patterns()
        try:
            health = self._health.look()
        except NoThread as e:  # the page is worth more, and is judged
            error = f"/health of {self.url} is not asked: {e}"
        try:
            readings = self._page(now)
            failure = None
        except FetchError as e:
            failure = e
            self._is_elsewhere = self._is_elsewhere or None  # who comes up again may have another page
            error = f"{self._failed_rung(e, health)} of {self.url} fails: {e}"
            readings = self._pages.failed(e.code, error, now, is_down=e.is_down)
        readings += self._ladder(failure, health, "" if failure is None else error or "", now)
        connected = self._connected(readings) if failure is None else None
        if connected is not None:
            readings.append(Sample("connections", self.target, float(connected), now))
        took_s = time.monotonic() - start
        return Batch(self.name, now, took_s, tuple(readings), engine=self._pages.facts, error=error)

    def close(self) -> None:
        """Stop asking /health, and close both connections."""
        self._health.close()
        self._metrics.close()
        self._other.close()

    def _answer(self) -> Answer:
        """The page from where it stands: trtllm-serve has JSON at /metrics, and each read of that empties it."""
        if self._is_elsewhere:
            answer = self._other.get()
            if answer.status != 404:
                return answer
            self._is_elsewhere = None  # another server listens here now
        answer = self._metrics.get()
        if answer.status == 200 and trtllm_json.is_json(answer.body) and self._is_elsewhere is None:
            self._is_elsewhere = False
            with suppress(FetchError):
                other = self._other.get()
                self._is_elsewhere = other.status == 200 and not trtllm_json.is_json(other.body)
                return other if self._is_elsewhere else answer
        return answer

    def _page(self, now: float) -> list[Sample | Gap]:
        answer = self._answer()
        if answer.status != 200:
            raise FetchError(Why.BAD_STATUS, _status_text(answer, self._pages.unmute))
        content_type = answer.headers.get("content-type", "")
        try:
            check_length(len(answer.body), answer.headers.get("content-length"))
            body = decode(answer.body, answer.headers.get("content-encoding"), MAX_BYTES)
            if trtllm_json.is_json(body):
                body, content_type = trtllm_json.as_page(body), "text/plain"
            return self._pages.read(body, content_type, now)
        except PageError as e:
            said = f" (it calls itself {content_type[:60]})" if "json" in content_type or "html" in content_type else ""
            raise FetchError(e.code, f"{e}{said}") from e

    def _connected(self, readings: Sequence[Sample | Gap]) -> int | None:
        """Connections to it that are not ours, counted now and then, and often while it says that it works in vain."""
        if self._port is None:
            return None
        told = [(r.name, r.value) for r in readings if r.name in WORK and isinstance(r, Sample)]
        works = any(value > 0 for name, value in told if name != "generation_tokens")
        is_suspect, self._worked = works and told == self._worked, told
        start = time.monotonic()
        if start - self._connections[0] >= (SUSPECT_EVERY_S if is_suspect else CONNECTIONS_EVERY_S):
            self._connections = (start, foreign(self._port))
        return self._connections[1]

    def _failed_rung(self, failure: FetchError, health: _Asked | None) -> str:
        return _RUNGS[_climbed(failure, health)]

    def _ladder(self, failure: FetchError | None, health: _Asked | None, error: str, now: float) -> list[Sample | Gap]:
        late = health is not None and health.code is Why.TIMEOUT
        climbed = _climbed(failure, health)
        readings: list[Sample | Gap] = [Sample("rung", self.target, float(climbed), now)]
        timed_out = failure is not None and failure.code is Why.TIMEOUT
        is_loaded = health is not None and health.is_5xx and failure is None and self._pages.is_health_load
        readings.append(Sample("slow", self.target, float(timed_out or late or is_loaded), now))
        if (health is not None and health.is_5xx and not is_loaded) or (failure is not None and failure.is_down):
            readings.append(Sample("down", self.target, 1.0, now))
        elif failure is not None and (timed_out or not failure.connected):
            readings.append(Gap("down", self.target, failure.code, error, now))  # nobody knows
        else:
            readings.append(Sample("down", self.target, 0.0, now))
        return readings


class _Asked(NamedTuple):
    """What /health said. `code` None: it answered with `status`."""

    status: int
    code: Why | None
    at: float  # monotonic

    @property
    def is_5xx(self) -> bool:
        return self.code is None and self.status >= 500

    @property
    def is_well(self) -> bool:
        return self.code is None and self.status < 500  # 404: this server has no /health, and answers


def _climbed(failure: FetchError | None, health: _Asked | None) -> int:
    """Rungs climbed: 0 none, 1 TCP, 2 /health, 3 /metrics."""
    if failure is not None and not failure.connected:
        return 0
    if health is not None and (health.is_5xx or health.code is Why.TIMEOUT):
        return 1
    if failure is None:
        return 3
    return 2 if health is None or health.is_well else 1


class _Health:
    """Asks /health in a thread of its own, so that one that hangs delays nothing."""

    def __init__(self, fetcher: Fetcher, every_s: float, stale_s: float) -> None:
        self._fetcher = fetcher
        self._every_s = every_s
        self._stale_s = stale_s
        self._asked: _Asked | None = None
        self._now = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> _Asked | None:
        """The last answer, None if there is none yet. After a bad one the next is asked for at once.

        Raises NoThread: nobody asks.
        """
        if self._thread is None and not self._stop.is_set():
            self._thread = begin(self._run, "health")
        asked = self._asked
        if asked is None or time.monotonic() - asked.at > self._stale_s:
            return None
        if not asked.is_well:
            self._now.set()
        return asked

    def close(self) -> None:
        self._stop.set()
        self._now.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._now.clear()
            start = time.monotonic()
            self._asked = self._ask()
            self._now.wait(max(0.0, self._every_s - (time.monotonic() - start)))
        self._fetcher.close()

    def _ask(self) -> _Asked:
        try:
            return _Asked(self._fetcher.get().status, None, time.monotonic())
        except FetchError as e:
            return _Asked(0, e.code, time.monotonic())


def _status_text(answer: Answer, unmute: str) -> str:
    status = answer.status
    if 300 <= status < 400:
        there = shown_address(answer.headers.get("location", ""))[:200]
        return f"HTTP {status}: it sends us to {there!r}, and we follow to no other place: give that address"
    advice = {
        401: "it wants credentials, and Tocsin sends none: let this machine read /metrics without",
        403: "it refuses us: let this machine read /metrics",
        404: "no page at this path: is it the engine's own port, and are its metrics on?"
        + (f" If they are off, {unmute}" if unmute else ""),
        501: "its metrics are off: llama.cpp needs --metrics",
    }.get(status)
    return f"HTTP {status}" + (f": {advice}" if advice else "")
