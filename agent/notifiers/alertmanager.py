"""Alertmanager, API v2: every peer is told of every alert, and again every `resend` while it fires.

Alertmanager forgets what it is not told again, so what fires is taken from the book each time, not from a queue. Only
transitions are notices; one is delivered when one peer accepted it. A peer that does not answer is left to the next
resend: what it missed by then is stale. Each node resends at its own phase of a wall clock's `resend`, so that a fleet
that was started together does not resend together, and an agent that is started again and again still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent.model import AlertMessage, Notice, Rejected, TryLater
from agent.notifiers.channel import BadMessage, Channel, clean_labels, post_json, rfc3339, web_address
from agent.phase import next_at

SHORTEST_LIFE_S = 300.0  # an alert ends by itself where nothing is told of it for this long, or for 4 resends
BATCH = 64

_Id = TypeVar("_Id")
Alerts = Mapping[_Id, dict[str, Any]]


class Alertmanager(Channel):
    """`firing` gives everything that fires now, as the book has it; `resend_s` and `min_visible_s` are seconds.

    `phase_s`: how far into each `resend_s` of unix time it resends; None: at its first pulse, and from there on.
    """

    batch = BATCH

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        firing: Callable[[], Iterable[AlertMessage]],
        resend_s: float = 60.0,
        min_visible_s: float = 60.0,
        phase_s: float | None = None,
    ) -> None:
        self.name = name
        self.min_visible_s = min_visible_s
        self._peers = [f"{url.rstrip('/').removesuffix('/api/v2/alerts')}/api/v2/alerts" for url in urls]
        self._firing = firing
        self._resend_s = resend_s
        self._life_s = max(SHORTEST_LIFE_S, 4 * resend_s)
        self._phase_s = phase_s
        self._next = 0.0  # 0: no pulse yet
        self._silent: set[str] = set()  # peers whose last answer was none
        self._ended: dict[str, float] = {}  # key -> start of the alert whose resolve was delivered
        self._bad: set[tuple[str, float]] = set()  # (key, start) that no resend need try again

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """Tell the peers that answered last, or all if none did. Raises TryLater or Rejected if none accepts."""
        answering = [peer for peer in self._peers if peer not in self._silent]
        alerts = {notice.id: self._alert(notice.message, now) for notice in notices}
        refused = self._tell(answering or self._peers, alerts, now)
        for notice in notices:
            if notice.message.status == "resolved":
                self._ended[notice.message.key] = notice.message.starts_at
        return refused

    def pulse(self, now: float, held: Sequence[AlertMessage]) -> float:
        """Resend everything that fires, and what is held back as still firing. Raises as `send`."""
        if self._next == 0.0 and self._phase_s is not None:
            self._next = self._after(now)
        if now < self._next <= now + self._resend_s:  # further off than that: the clock was stepped
            return self._next
        wanted = self._wanted(held)
        messages = [message for message in wanted if (message.key, message.starts_at) not in self._bad]
        for start in range(0, len(messages), BATCH):
            part = messages[start : start + BATCH]
            alerts = {(message.key, message.starts_at): self._alert(message, now) for message in part}
            self._bad |= self._tell(self._peers, alerts, now).keys()
        self._bad &= {(message.key, message.starts_at) for message in wanted}
        self._next = self._after(now)
        return self._next

    def _after(self, now: float) -> float:
        return now + self._resend_s if self._phase_s is None else next_at(now, self._resend_s, self._phase_s)

    def _wanted(self, held: Sequence[AlertMessage]) -> list[AlertMessage]:
        firing = {message.key: message for message in self._firing()}
        # Between the commit of a resolve and the loop's new book, `firing` still has the alert: telling it again after
        # its resolve would open it anew.
        self._ended = {key: start for key, start in self._ended.items() if key in firing}
        current = {key: message for key, message in firing.items() if self._ended.get(key) != message.starts_at}
        # Until its resolve is sent, the receiver must go on believing in the alert that it was told of.
        return list((current | {m.key: replace(m, status="firing", ends_at=None) for m in held}).values())

    def _alert(self, message: AlertMessage, now: float) -> dict[str, Any]:
        ends_at = now + self._life_s if message.ends_at is None else message.ends_at
        alert: dict[str, Any] = {
            "labels": clean_labels(message.labels),
            "annotations": clean_labels(message.annotations),
            "startsAt": rfc3339(message.starts_at),
            "endsAt": rfc3339(max(message.starts_at, ends_at)),
        }
        if link := web_address(message.generator_url):
            alert["generatorURL"] = link
        return alert

    def _tell(self, peers: Sequence[str], alerts: Alerts[_Id], now: float) -> dict[_Id, Rejected]:
        """Tell each of `peers`; returns what none of those that answered would take."""
        accepted: set[_Id] = set()
        refused: dict[_Id, Rejected] = {}
        failures: list[Rejected | TryLater] = []
        for peer in peers:
            try:
                wrong = _post(peer, alerts, now)
            except (Rejected, TryLater) as error:
                failures.append(error)
                self._silent.add(peer)
                continue
            self._silent.discard(peer)
            accepted |= alerts.keys() - wrong.keys()
            refused |= wrong
        if len(failures) == len(peers):
            raise _joined(failures)
        return {number: error for number, error in refused.items() if number not in accepted}


def _post(peer: str, alerts: Alerts[_Id], now: float) -> dict[_Id, Rejected]:
    """POST to one peer; where it refuses, each alone, since one bad alert makes it answer 400 for all."""
    try:
        post_json(peer, list(alerts.values()), now, tell_body=True)
    except BadMessage as error:
        if len(alerts) == 1:
            return dict.fromkeys(alerts, error)
    else:
        return {}
    wrong: dict[_Id, Rejected] = {}
    for number, alert in alerts.items():
        wrong |= _post(peer, {number: alert}, now)
    return wrong


def _joined(failures: Sequence[Rejected | TryLater]) -> Rejected | TryLater:
    """One failure for all peers: worth another try if one of them is."""
    text = "; ".join(map(str, failures))
    later = [failure for failure in failures if isinstance(failure, TryLater)]
    if not later:
        return Rejected(text)
    waits = [failure.after_s for failure in later if failure.after_s is not None]
    return TryLater(text, min(waits) if len(waits) == len(later) else None)
