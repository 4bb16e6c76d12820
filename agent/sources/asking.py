"""Asking one address now and then, in a thread of its own: a read tells what was told last, and waits for nobody.

What PromQL and JSON sources share: the pace, the deadline, the token, and that nothing old is told as if it were new.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from agent.model import Batch, Gap, Sample, Why
from agent.phase import first_two, next_at
from agent.sources.fetch import Answer, Fetcher, FetchError, shown_address
from agent.threads import begin

EVERY_S = 15.0
CONNECT_S = 2.0
TOTAL_S = 10.0  # connecting included
FIRST_S = 4.0  # how long the first read waits for the first answer: `check` and `doctor` have hardly more
MOST_BYTES = 1024 * 1024
GONE_S = 86400.0  # a series that is in no answer any more is a Gap for so long
SHOWN = 3  # series in a note


class Told(NamedTuple):
    """What one question brought. `notes`: what a person should know of it."""

    readings: tuple[Sample | Gap, ...]
    error: str | None = None
    notes: tuple[str, ...] = ()


class NoValue(Exception):  # noqa: N818  (it says what there is)
    """An answer that holds no number that can be used."""

    def __init__(self, code: Why, message: str) -> None:
        super().__init__(message)
        self.code = code


class Asking(ABC):
    """Fulfils agent.model.Source; who inherits says what to ask.

    Args:
        source: its configured name; the subject of what it tells begins with it.
        kind: "promql" or "json".
        url: as configured.
        token: reads the bearer's token when it is used (raises an OSError or ValueError of its own words); None: none.
        judged_by: the rules that judge it, for the note.
        every_s, connect_s, total_s: the pace and the deadlines.
        phase_s: how far into each `every_s` it asks; a fleet that is started at once asks one address.
    """

    def __init__(self, source: str, kind: str, url: str, *, token: Callable[[], str] | None = None,
                 judged_by: str = "", every_s: float = EVERY_S, connect_s: float = CONNECT_S,
                 total_s: float = TOTAL_S, phase_s: float = 0.0) -> None:
        self.name = f"{kind}:{source}"
        self.source, self.url, self.judged_by = source, shown_address(url), judged_by
        self.note = ""
        self._token, self._every_s, self._connect_s, self._total_s = token, every_s, connect_s, total_s
        self._begins_s = first_two(phase_s, every_s)
        self.wall_s = 0.0  # unix s - monotonic s, as of the last read
        self._last: tuple[float, Told] | None = None  # when it was told (monotonic), and what
        self._seen: dict[str, float] = {}  # subject -> when it last had a value (monotonic)
        self._fetchers: dict[str, Fetcher] = {}  # address with its query -> who asks it
        self._sent = ""  # the token with which they ask
        self._first, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def read(self, now: float) -> Batch:
        """What was told last, if that is not too long ago. Waits for the first answer only, and not for long."""
        start = time.monotonic()
        self.wall_s = now - start
        if self._thread is None and not self._stop.is_set():
            self._thread = begin(self._run, self.name)
            self._first.wait(0.0 if self._begins_s[0] else FIRST_S)  # what asks later is awaited by nobody
        last = self._last
        ago_s = time.monotonic() - (start if last is None else last[0])
        if last is None or ago_s > 2 * self._every_s + self._total_s:
            why = "it has not answered yet" if last is None else f"it told the last value {ago_s:.0f} s ago"
            gaps = tuple(Gap("sourced", subject, Why.LATE, why, now) for subject in self._subjects())
            return Batch(self.name, now, time.monotonic() - start, gaps, error=f"{self.url}: {why}")
        told = last[1]
        readings = tuple(reading._replace(at=now) for reading in told.readings)
        return Batch(self.name, now, time.monotonic() - start, readings, error=told.error)

    def close(self) -> None:
        """Ask no more; what is under way ends at its deadline."""
        self._stop.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        first_s, second_s = self._begins_s
        second_at = time.monotonic() + second_s
        self._stop.wait(first_s)
        while not self._stop.is_set():
            told = self._whole(time.monotonic())
            self._last = (time.monotonic(), told)
            self.note = "; ".join(filter(None, (summary(told.readings), *told.notes, self.judged_by)))
            self._first.set()
            now = time.monotonic()  # a question that took longer skips a beat
            self._stop.wait(max(0.5, max(second_at, next_at(now, self._every_s, second_at)) - now))
        for fetcher in self._fetchers.values():
            fetcher.close()

    def _whole(self, start: float) -> Told:
        """One question, whatever comes of it: an error of ours must not end the thread."""
        try:
            told = self.ask(start)
        except (FetchError, NoValue) as fault:
            told = self._failed(fault.code, str(fault))
        except Exception as error:
            told = self._failed(Why.ERROR, f"{type(error).__name__}: {error}")
        self._seen |= {r.subject: start for r in told.readings if isinstance(r, Sample) and r.name == "sourced"}
        self._seen = {subject: at for subject, at in self._seen.items() if start - at < GONE_S}
        return told

    @abstractmethod
    def ask(self, start: float) -> Told:
        """Ask once. Raises FetchError, NoValue."""

    def get(self, url: str, *, again: bool = True) -> Answer:
        """One answer of an address, with the token as it is now. `again`: it will be asked again. Raises FetchError."""
        try:
            token = "" if self._token is None else self._token()
        except Exception as error:  # the file is gone, or holds no token: its own text names it and never the content
            raise FetchError(Why.ERROR, str(error), connected=False) from error
        if token != self._sent:  # rotated
            self._forget()
        self._sent = token
        fetcher = self._fetchers.get(url)
        if fetcher is None:
            headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "tocsin"}
            headers |= {"Authorization": f"Bearer {token}"} if token else {}
            fetcher = Fetcher(url, headers, connect_s=self._connect_s, total_s=self._total_s, limit_bytes=MOST_BYTES)
        if again:
            self._fetchers[url] = fetcher
            return fetcher.get()
        with closing(fetcher):
            return fetcher.get()

    def _forget(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers = {}

    def _subjects(self) -> Sequence[str]:
        return list(self._seen) or [self.source]

    def _failed(self, code: Why, why: str) -> Told:
        """All that it told is not known now."""
        return Told(tuple(Gap("sourced", subject, code, why, 0.0) for subject in self._subjects()),
                    f"{self.url}: {why}")

    def missing(self, told: Mapping[str, float], code: Why, why: str) -> list[Gap]:
        """A Gap for each series that was in an answer within the last day and is not in this one."""
        return [Gap("sourced", subject, code, why, 0.0) for subject in self._seen if subject not in told]


def refusal(status: int, whose: str) -> str:
    """What a status means that is no answer, and what to do."""
    advice = {
        401: "it wants credentials: write token_file or token_env, or see that the token still holds",
        403: "the token may not ask this",
        404: f"no {whose} at this address: Mimir's has /prometheus at its end",
        429: "it is asked too much",
    }.get(status, "it sends us elsewhere, and a token follows nowhere: give that address" if 300 <= status < 400
          else "")
    return f"HTTP {status}" + (f": {advice}" if advice else "")


def summary(readings: Sequence[Sample | Gap]) -> str:
    """What was told, in a few words: how many series, and the first of them."""
    told = [r for r in readings if isinstance(r, Sample) and r.name == "sourced"]
    if not told:
        return ""
    first = ", ".join(f"{r.subject} {r.value:.6g}" for r in told[:SHOWN])
    more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return f"told {first}{more}"
