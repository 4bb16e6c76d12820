"""A router in front of the engines: its /metrics page at every read, for arrivals, errors and shares per replica.

It is never an engine: what it repeats of its engines is not read, and nothing of it is judged as theirs.
"""

from __future__ import annotations

import time
from dataclasses import replace

from agent.engines import ROUTER_KINDS, load_map
from agent.engines.pages import PageReader
from agent.exposition import ACCEPT, MAX_BYTES, PageError, check_length, decode
from agent.model import Batch, Gap, Sample, Why
from agent.sources.fetch import Fetcher, FetchError, shown_address

CONNECT_S = 1.0
TOTAL_S = 3.0  # connecting included


class RouterSource:
    """Reads one router; fulfils agent.model.Source.

    Args:
        router: its name, the subject of all that it tells.
        url: the address of its metrics without /metrics: Rust routers have a port of their own for them.
        kind: "auto", or one of agent.engines.ROUTER_KINDS.
    """

    def __init__(self, router: str, url: str, *, kind: str = "auto", connect_s: float = CONNECT_S,
                 total_s: float = TOTAL_S) -> None:
        self.name = f"router:{router}"
        self.url = shown_address(url)
        self._pages = PageReader(router, kind=kind, maps=[
            load_map(one) for one in (ROUTER_KINDS if kind == "auto" else (kind,))])
        self._metrics = Fetcher(
            url.rstrip("/").removesuffix("/metrics") + "/metrics",
            {"Accept": ACCEPT, "Accept-Encoding": "identity", "User-Agent": "tocsin"},
            connect_s=connect_s, total_s=total_s, limit_bytes=MAX_BYTES)

    def read(self, now: float) -> Batch:
        """Read the page once. Ends after 3 s at most."""
        start = time.monotonic()
        readings: list[Sample | Gap]
        error: str | None = None
        try:
            readings = self._page(now)
        except FetchError as fault:
            error = f"{self.url}: {fault}"
            readings = self._pages.failed(fault.code, error, now, is_down=fault.is_down)
        facts = self._pages.facts
        return Batch(self.name, now, time.monotonic() - start, tuple(readings), error=error,
                     router=None if facts is None else replace(facts, engines=()))

    def close(self) -> None:
        """Close the connection."""
        self._metrics.close()

    def _page(self, now: float) -> list[Sample | Gap]:
        answer = self._metrics.get()
        if answer.status != 200:
            raise FetchError(Why.BAD_STATUS, f"HTTP {answer.status}: is it the port of its metrics?")
        try:
            check_length(len(answer.body), answer.headers.get("content-length"))
            body = decode(answer.body, answer.headers.get("content-encoding"), MAX_BYTES)
            return self._pages.read(body, answer.headers.get("content-type", ""), now)
        except PageError as fault:
            raise FetchError(fault.code, str(fault)) from fault
