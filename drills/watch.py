"""What is watched while a drill runs: the agent's transitions, the target's way back, receivers, Alertmanagers."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import yaml

from agent import client
from agent.proxy import DIRECT, proxies_for
from drills.judge import AT_ONCE_S, Alarm

EVERY_S = 0.25  # a page ends the fault within 2 s, and the fault needs some of them to end
ANSWER_S = 2.0
ELSEWHERE_EVERY_S = 1.0
GPU_EVERY_S = 0.5
REFUSED = (401, 403)
COMPLETION_S = 30.0
GROUP_WAIT_S = 30.0  # Alertmanager's default
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
PROMPT = "hello world, count from one to eight please"  # at least 8 tokens: fewer have killed an engine


class AgentWatch:
    """The agent's transitions from now on, kept by a thread of its own. `stale_s`: since the agent last answered."""

    def __init__(self, socket: Path, on_page: Callable[[], None] = lambda: None) -> None:
        self._socket, self._on_page = socket, on_page
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._after = 0
        self._answered_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="agent-watch", daemon=True)

    def start(self) -> None:
        """Begin after the newest transition there is. Raises as client.ask does."""
        while rows := client.ask(self._socket, f"/transitions?after={self._after}"):
            self._after = rows[-1]["id"]
        self._answered_at = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                rows = client.ask(self._socket, f"/transitions?after={self._after}")
            except (client.NotRunning, client.AgentError):
                continue  # how long it has been silent is a guard's business
            with self._lock:
                self._answered_at = time.monotonic()
                self._rows += rows
                if rows:
                    self._after = rows[-1]["id"]
            if any(map(is_page, rows)):
                self._on_page()

    @property
    def stale_s(self) -> float:
        """Seconds since the agent last answered."""
        return time.monotonic() - self._answered_at

    def rows(self) -> list[dict[str, Any]]:
        """Every transition since the start, oldest first."""
        with self._lock:
            return list(self._rows)

    def pages(self) -> list[dict[str, Any]]:
        """The pages that fired since the start."""
        return [row for row in self.rows() if is_page(row)]

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(3 * ANSWER_S)


def is_page(row: Mapping[str, Any]) -> bool:
    """Whether a transition pages somebody."""
    return bool(row["state"] == "firing" and row["severity"] == "page")


def alarm_of(rule: Mapping[str, Any] | None, rule_id: str, rows: Sequence[Mapping[str, Any]], since: float,
             delivered_at: float | None) -> Alarm:
    """What became of an announced alert, from the transitions. `rule`: its row of the catalogue; None: disabled.

    It is resolved where that is the last that was said of it: one that flaps may fire still.
    """
    of_rule = [row for row in rows if row["rule"] == rule_id]
    own = [row for row in of_rule if row["at"] >= since]
    first = {row["state"]: row["at"] for row in reversed(own)}
    told = [row for row in own if row["state"] in ("firing", "resolved")]  # pending again is no news
    resolved_at = told[-1]["at"] if told and told[-1]["state"] == "resolved" else None
    return Alarm(rule_id, float(rule["for_s"]) if rule else 0.0, rule is not None, first.get("pending"),
                 first.get("firing"), delivered_at, resolved_at, _was_on(of_rule, since))


def _was_on(rows: Sequence[Mapping[str, Any]], since: float) -> bool:
    """Whether what fired first since then was pending or firing already: nothing else was said of it in between."""
    fired = next((row for row in rows if row["at"] >= since and row["state"] == "firing"), None)
    if fired is None:
        return False
    before = [row for row in rows[:rows.index(fired)] if row.get("subject") == fired.get("subject")]
    return not before or (before[-1]["state"] in ("pending", "firing") and before[-1]["at"] < since - AT_ONCE_S)


@dataclass
class WayBack:
    """The restart of a killed target, watched from outside: down, port, ready, first completion (unix seconds)."""

    url: str  # of the engine itself, without a path
    clock: Callable[[], float] = time.time
    key: str | None = None  # that completions are asked with
    wants_key: bool = False
    down_at: float | None = None
    port_at: float | None = None
    ready_at: float | None = None
    completion_at: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._thread = threading.Thread(target=self._run, name="way-back", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(COMPLETION_S)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S) and self.completion_at is None:
            health = status_of(self.url, "/health")
            if health is None:
                self.down_at, self.port_at, self.ready_at = self.down_at or self.clock(), None, None
                continue
            if self.down_at is None:
                continue  # it has not gone yet
            self.port_at = self.port_at or self.clock()
            if health != http.client.OK:
                continue
            self.ready_at = self.ready_at or self.clock()
            answer = completion_status(self.url, self.key)
            self.wants_key = answer in REFUSED
            if answer == http.client.OK:
                self.completion_at = self.clock()


def gpu_holders(socket: Path) -> dict[int, int] | None:
    """Bytes of GPU memory by pid, as the agent's NVML tells them; None where nobody can tell."""
    try:
        told = client.ask(socket, "/nvml/processes")["processes"]
        return None if told is None else {int(pid): int(held_bytes) for pid, held_bytes in told.items()}
    except (client.NotRunning, client.AgentError, LookupError, TypeError, ValueError, AttributeError):
        return None


@dataclass
class GpuMemory:
    """Whether the memory that killed processes held on GPUs is free again: the agent's NVML is asked until it is."""

    ask: Callable[[], Mapping[int, int] | None]
    clock: Callable[[], float] = time.time
    held: frozenset[int] = frozenset()  # those of the victims that held any before the kill
    freed_at: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def before(self, victims: Iterable[int]) -> None:
        """Who of these holds GPU memory now."""
        self.held = frozenset((self.ask() or {}).keys() & set(victims))

    def start(self) -> None:
        """Begin to watch, in a thread, where there is anything to watch."""
        if self.held:
            self._thread = threading.Thread(target=self._run, name="gpu-memory", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3 * ANSWER_S)

    def _run(self) -> None:
        while not self._stop.wait(GPU_EVERY_S) and self.freed_at is None:
            told = self.ask()
            if told is not None and not self.held & told.keys():
                self.freed_at = self.clock()

    def is_free(self, by: float | None) -> bool | None:
        """Whether it was free before the restart counted; None where they held none, or nobody could tell."""
        if not self.held:
            return None
        return self.freed_at is not None and (by is None or self.freed_at <= by)


def status_of(url: str, path: str) -> int | None:
    """The HTTP status of a GET; None where nobody answers in time."""
    try:
        with requests.get(f"{url}{path}", timeout=ANSWER_S, stream=True, allow_redirects=False,
                          proxies=DIRECT) as answer:
            return answer.status_code
    except requests.RequestException:
        return None


def completes(url: str, key: str | None = None) -> bool:
    """Whether the engine itself answers one short completion whole."""
    return completion_status(url, key) == http.client.OK


def completion_status(url: str, key: str | None = None) -> int | None:
    """One short completion by the engine itself, read to its end: 200, or the status that it was refused with.

    None where there was no whole one.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        models = requests.get(f"{url}/v1/models", headers=headers, timeout=ANSWER_S, proxies=DIRECT)
        if not models.ok:
            return models.status_code
        body = {"model": models.json()["data"][0]["id"], "prompt": PROMPT, "max_tokens": 4}
        answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=(ANSWER_S, COMPLETION_S),
                               proxies=DIRECT)
        if not answer.ok:
            return answer.status_code
        return answer.status_code if answer.json()["choices"][0].get("finish_reason") else None
    except (requests.RequestException, ValueError, LookupError, TypeError):
        return None


def pages_at(url: str) -> list[dict[str, str]]:
    """The labels of each page that one Alertmanager knows of, muted or not.

    Raises requests.RequestException, ValueError, LookupError, TypeError.
    """
    answer = requests.get(f"{url}/api/v2/alerts", params={"filter": 'severity="page"'}, timeout=ANSWER_S,
                          proxies=proxies_for(url))
    answer.raise_for_status()
    return [dict(alert["labels"]) for alert in answer.json()]


class PagesElsewhere:
    """The pages that Alertmanager knows of beside the agent's own (that tells them itself): a thread asks each second.

    An Alertmanager that does not answer tells nothing: whether alerts are delivered is judged at the end.
    """

    def __init__(self, urls: Sequence[str], node: str | None, rules: Container[str],
                 on_page: Callable[[], None] = lambda: None) -> None:
        self._urls, self._node, self._rules, self._on_page = urls, node, rules, on_page
        self._stop = threading.Event()
        self._found: list[dict[str, str]] = []
        self._thread = threading.Thread(target=self._run, name="pages-elsewhere", daemon=True)

    def start(self) -> None:
        """Begin to ask, where there is anybody to ask."""
        if self._urls:
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(ELSEWHERE_EVERY_S):
            found = [labels for url in self._urls for labels in self._told_by(url)]
            news = [labels for labels in found if labels not in self._found]
            self._found += news
            if news:
                self._on_page()

    def _told_by(self, url: str) -> list[dict[str, str]]:
        try:
            return [labels for labels in pages_at(url)
                    if labels.get("node") != self._node or labels.get("rule") not in self._rules]
        except (requests.RequestException, ValueError, LookupError, TypeError):
            return []

    def pages(self) -> list[dict[str, str]]:
        """The labels of all that were found since the start."""
        return list(self._found)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(3 * ANSWER_S)


def failed_notifications(urls: Sequence[str]) -> float | None:
    """All notifications that these Alertmanagers failed to deliver so far; None where none tells."""
    told = [n for url in urls if (n := _failed_of(url)) is not None]
    return sum(told) if told else None


def _failed_of(url: str) -> float | None:
    try:
        page = requests.get(f"{url}/metrics", timeout=ANSWER_S, proxies=proxies_for(url)).text
    except requests.RequestException:
        return None
    lines = [x for x in page.splitlines() if x.startswith("alertmanager_notification_requests_failed_total")]
    return sum(float(x.rpartition(" ")[2]) for x in lines) if lines else None


def group_wait_s(urls: Sequence[str]) -> float:
    """How long an alert may wait for others of its group: the longest of any route of these Alertmanagers.

    0 where there is none of them; Alertmanager's own default where one does not tell.
    """
    return max((_group_wait_of(url) for url in urls), default=0.0)


def _group_wait_of(url: str) -> float:
    try:
        answer = requests.get(f"{url}/api/v2/status", timeout=ANSWER_S, proxies=proxies_for(url))
        told = answer.json()["config"]["original"]
        waits = list(_group_waits(yaml.safe_load(told)["route"], GROUP_WAIT_S))
    except (requests.RequestException, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):
        return GROUP_WAIT_S
    return max(waits)


def _group_waits(route: Mapping[str, Any], above_s: float) -> Iterator[float]:
    """Of a route and those below it, each as it was said there or above."""
    told = route.get("group_wait")
    parts = re.findall(r"(\d+)(ms|[smhdw])", str(told))
    own_s = above_s if told is None else sum(int(number) * UNITS_S[unit] for number, unit in parts)
    yield own_s
    for below in route.get("routes") or ():
        yield from _group_waits(below, own_s)


def echoed_at(url: str, rule_id: str, since: float, is_own: Callable[[str], bool]) -> float | None:
    """When a receiver that can be asked got the firing of a rule on a subject of ours: it tells what reached it, when.

    The answer is a JSON list of {"at": unix seconds, "alerts": [Alertmanager's webhook alerts]}; None where it is not.
    """
    try:
        arrivals = requests.get(url, timeout=ANSWER_S, proxies=proxies_for(url)).json()
        found = [a["at"] for a in arrivals if a["at"] >= since for alert in a.get("alerts", ())
                 if alert["labels"].get("rule") == rule_id and alert.get("status") == "firing"
                 and is_own(str(alert["labels"].get("subject", "")))]
        return float(min(found)) if found else None
    except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError):
        return None
