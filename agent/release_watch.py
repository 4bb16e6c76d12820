"""`tocsin canary`: reads both groups until a verdict is proven or the time is over, and fires the way back once.

An engine that hangs, restarts or does not answer delays nobody and is no verdict by itself. The way back is fired in
this process, at most once, and is not torn by Ctrl-C: it runs in a session of its own, and is waited for.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from agent import release
from agent.loop import Collector
from agent.model import Batch, Rejected, Sample, Slo, TryLater
from agent.notifiers.channel import post_json, safe_url
from agent.progress import Tell
from agent.release import END, LOOK, Group, Tally, Verdict
from agent.sources.engine import EngineSource
from agent.sources.fetch import Fetcher, FetchError, shown_address
from agent.words import quantity, span

GRACE_S = 3.5  # an engine's read takes 3 s at most
LATE_READS = 3
ROLLBACK_WITHIN_S = 900.0
POST_TRIES = 5
POST_PAUSE_S = 2.0
CONNECT_S, ANSWER_S, NUMBER_BYTES = 2.0, 3.0, 1 << 20


class NumberSource:
    """A business number: an address that answers a number, or JSON in which one stands (`URL#path.to.it`)."""

    def __init__(self, name: str, where: str) -> None:
        url, _, path = where.partition("#")
        self.name, self._path = f"number:{name}", [part for part in path.split(".") if part]
        self.url = shown_address(url)
        self._fetcher = Fetcher(url, {"Accept": "application/json", "User-Agent": "tocsin"}, connect_s=CONNECT_S,
                                total_s=ANSWER_S, limit_bytes=NUMBER_BYTES)

    def read(self, now: float) -> Batch:
        """Read it once; what is no number is an error, never 0."""
        start = time.monotonic()
        try:
            value = number_in(self._fetcher.get(), self._path)
        except (FetchError, ValueError) as error:
            return Batch(self.name, now, time.monotonic() - start, error=f"{self.url}: {error}")
        return Batch(self.name, now, time.monotonic() - start, (Sample("business", self.name, value, now),))

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()


def number_in(answer: Any, path: Sequence[str]) -> float:
    """The number of an answer. Raises ValueError."""
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status}")
    try:
        found = json.loads(answer.body)
        for part in path:
            found = found[int(part)] if isinstance(found, list) else found[part]
        value = float(found)
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"no number at {'.'.join(path) or 'its top'}") from None
    if value - value != 0:  # NaN, infinite
        raise ValueError(f"{value} is no number to compare")
    return value


@dataclass(frozen=True, slots=True)
class Plan:
    """What is watched. `business`: (old, new) sources of a number; `rollback`: a command, `webhook`: an address."""

    old: Sequence[str]
    new: Sequence[str]
    slo: Slo
    for_s: float
    every_s: float = 5.0
    business: tuple[str, str] | None = None
    rollback: Sequence[str] = ()
    webhook: str | None = None


class Watch:
    """One watch. `clock` gives unix seconds, `monotonic` measures."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._clock, self._monotonic = plan, clock, monotonic
        self._tallies = {side: [Tally(url) for url in urls] for side, urls in (("old", plan.old), ("new", plan.new))}
        self._of = {f"engine:{side}-{n}": one for side, group in self._tallies.items() for n, one in enumerate(group)}
        sources: list[Any] = [EngineSource(name.removeprefix("engine:"), one.url) for name, one in self._of.items()]
        self._numbers: dict[str, list[tuple[float, float | None]]] = {"old": [], "new": []}
        if plan.business is not None:
            sources += [NumberSource(side, where) for side, where in zip(("old", "new"), plan.business, strict=True)]
        self._collector = Collector(sources, clock, monotonic)
        self._seen, self._since = 0.0, clock()

    def run(self, stop: threading.Event, progress: Tell) -> dict[str, Any]:
        """Watch until it fails, the time is over or `stop` is set; what came of it, as `--json` tells it."""
        started, began, stopped = self._clock(), self._monotonic(), False
        verdict: Verdict | None = None
        try:
            while verdict is None:
                due = self._monotonic() + self._plan.every_s
                self._read()
                left_s = began + self._plan.for_s - self._monotonic()
                stopped = stop.is_set()
                verdict = self._look(end=left_s <= 0 or stopped)
                progress(self._line(), max(0.0, left_s))
                if verdict is None:
                    stop.wait(max(0.0, min(due - self._monotonic(), left_s)))
        finally:
            self._collector.stop()
        if stopped and verdict.verdict == "pass":
            verdict = Verdict("unknown", f"stopped before its time; so far {verdict.why}", verdict.rows)
        old, new = self.groups()
        return {"verdict": verdict.verdict, "why": verdict.why, "started": started, "ended": self._clock(),
                "watched_s": self._monotonic() - began, "for_s": self._plan.for_s, "stopped": stopped,
                "criteria": [asdict(row) for row in verdict.rows], "notes": release.notes(old, new, self._plan.slo),
                "groups": {"old": release.told(old), "new": release.told(new)}, "rollback": None}

    def groups(self) -> tuple[Group, Group]:
        """(old, new), as of now."""
        late_s = LATE_READS * self._plan.every_s + GRACE_S
        now = self._clock()
        old, new = (release.group(self._tallies[side], self._numbers[side], now, late_s, self._since)
                    for side in ("old", "new"))
        return old, new

    def _read(self) -> None:
        """One round; whoever is late is taken with the next."""
        numbers: dict[str, float] = {}
        for batch in self._collector.gather(GRACE_S):
            if batch.source in self._of:
                self._of[batch.source].take(batch)
            else:
                numbers |= {batch.source.removeprefix("number:"): r.value for r in batch.readings
                            if isinstance(r, Sample)}
        if self._plan.business is not None:
            for side, rows in self._numbers.items():
                rows.append((self._clock(), numbers.get(side)))

    def _look(self, *, end: bool) -> Verdict | None:
        """Judge where it is worth it; None: go on."""
        old, new = self.groups()
        now = self._clock()
        if end:
            return release.judge(old, new, self._plan.slo, END, now)
        if not release.worth_a_look(new, self._seen):
            down = release.down_row(old, new, now)
            return Verdict("fail", f"{down.name}: {down.why}", (down,)) if down.state == "BAD" else None
        self._seen = release.progress_of(new)
        verdict = release.judge(old, new, self._plan.slo, LOOK, now)
        return verdict if verdict.verdict == "fail" else None

    def _line(self) -> str:
        old, new = self.groups()
        parts = [f"{name} {one.answering} of {one.engines} answer, {one.requests:.0f} requests, errors "
                 + (quantity(one.errors / one.requests, "ratio") if one.requests else "–")
                 for name, one in (("new:", new), ("old:", old))]
        return " · ".join(parts)


# --- the way back -----------------------------------------------------------------------------------------------------


def roll_back(plan: Plan, answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fire the way back, once; None where none was given. The verdict goes along: on stdin, or as the body.

    A command is started once and never again. A webhook that failed to answer well (no connection, 429, 5xx) is asked
    again, with the same `id`.
    """
    if plan.rollback:
        return {"how": plan.rollback[0], **_run(plan.rollback, answer)}
    if plan.webhook is not None:
        return {"how": safe_url(plan.webhook), **_post(plan.webhook, answer)}
    return None


def _run(command: Sequence[str], answer: Mapping[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "TOCSIN_VERDICT": str(answer["verdict"]), "TOCSIN_WHY": str(answer["why"])}
    try:
        done = subprocess.run(command, input=msgspec.json.encode(answer), stdout=subprocess.DEVNULL, env=environment,
                              timeout=ROLLBACK_WITHIN_S, check=False, start_new_session=True)
    except subprocess.TimeoutExpired:
        return {"ok": False, "why": f"it had not ended after {span(ROLLBACK_WITHIN_S)}, and was killed"}
    except OSError as error:
        return {"ok": False, "why": f"it could not be started: {error.strerror}"}
    return {"ok": done.returncode == 0, "why": None if done.returncode == 0 else f"it ended with {done.returncode}"}


def _post(url: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    body = {"id": f"tocsin-canary-{answer['started']:.0f}", **answer}
    why = ""
    for number in range(POST_TRIES):
        if number:
            time.sleep(POST_PAUSE_S)
        try:
            post_json(url, body, float(answer["ended"]))
        except TryLater as error:
            why = str(error)
        except Rejected as error:
            return {"ok": False, "why": str(error)}
        else:
            return {"ok": True, "why": None}
    return {"ok": False, "why": why}
