"""Kubernetes Events on the node, and, where asked for, a condition of the node: what `kubectl describe node` shows.

One Event object for an alert's beginning and one for its end, each time that happens again counted on it: however often
an alert comes and goes, the API keeps two objects of it. The condition is True while a page fires here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus

from agent.model import AlertMessage, Notice, Rejected, TryLater
from agent.notifiers.channel import BadMessage, Channel, cut_to
from drills.cluster import Cluster, ClusterError, Object

CONDITION = "TocsinPage"
HEARTBEAT_S = 300.0  # how often a condition that has not changed is written, as the kubelet does with its own
TEXT_LENGTH = 1000  # characters; the API takes 1024 bytes of an Event's
_NO_RIGHT = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
_BAD = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})


class Kubernetes(Channel):
    """`firing`: what fires and this channel is told; `node`: Kubernetes' name of it. Alerts of no node are left out."""

    def __init__(self, name: str, node: str, firing: Callable[[], Iterable[AlertMessage]], *, events: bool = True,
                 condition: bool = False) -> None:
        self.name = name
        self._node, self._firing = node, firing
        self._events, self._has_condition = events, condition
        self._cluster: Cluster | None = None
        self._shown: Mapping[str, str] | None = None  # the condition as it was written last
        self._next = 0.0

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """Write an Event for each. Raises Rejected or TryLater."""
        for notice in notices:
            if self._events and "node" in notice.message.labels:
                self._tell(notice.message, now)
        return {}

    def pulse(self, now: float, held: Sequence[AlertMessage]) -> float:  # noqa: ARG002
        """Write the condition where it has changed, and from time to time. Raises Rejected or TryLater."""
        if not self._has_condition:
            return super().pulse(now, ())
        pages = [message for message in self._firing() if message.severity == "page"]
        wanted = condition(pages)
        due = not now < self._next <= now + HEARTBEAT_S  # further off than that: the clock was stepped
        if due or self._shown is None or any(self._shown[key] != wanted[key] for key in wanted):
            self._shown = self._call(lambda cluster: cluster.put_condition(self._node, CONDITION, wanted, now=now))
            self._next = now + HEARTBEAT_S
        return self._next

    def close(self) -> None:
        """Let go of the connection."""
        if self._cluster is not None:
            self._cluster.close()

    def _tell(self, message: AlertMessage, now: float) -> None:
        name, reason, text, warns = event_of(message, self._node)
        about = {"kind": "Node", "name": self._node, "uid": self._node}  # as the kubelet does: no right to read nodes
        self._call(lambda cluster: cluster.count_event(name, about, reason, text, now=now, warning=warns))

    def _call(self, ask: Callable[[Cluster], Object]) -> Object:
        failure: Rejected | TryLater
        try:
            if self._cluster is None:
                self._cluster = Cluster()
            return ask(self._cluster)
        except ClusterError as error:
            failure = outcome(error)
        raise failure


def outcome(error: ClusterError) -> Rejected | TryLater:
    """What a no of the API means to a channel."""
    if error.code in _NO_RIGHT:
        return Rejected(f"{error}; see components/events and components/node-condition of deploy/kubernetes")
    if error.code in _BAD:
        return BadMessage(str(error))
    return TryLater(str(error))


def event_of(message: AlertMessage, node: str) -> tuple[str, str, str, bool]:
    """Name, reason, text of an alert's Event, and whether it is a warning. The name is the same for each time."""
    ended = message.status == "resolved"
    warns = not ended and message.severity != "info"
    digest = hashlib.sha256(f"{message.key}\0{message.status}".encode()).hexdigest()[:16]
    reason = message.labels.get("alertname", "Alert") + ("Resolved" if ended else "")
    return f"{node}.{digest}", reason, cut_to(message.annotations.get("summary", message.key), TEXT_LENGTH), warns


def condition(pages: Sequence[AlertMessage]) -> dict[str, str]:
    """Status, reason and message of the condition by the pages that fire. Pure."""
    if not pages:
        return {"status": "False", "reason": "NoPageFiring", "message": "no page of Tocsin fires on this node"}
    first = min(pages, key=lambda message: (message.starts_at, message.key))
    texts = [message.annotations.get("summary", message.key) for message in pages]
    return {"status": "True", "reason": first.labels.get("alertname", "Alert"),
            "message": cut_to(f"{len(pages)} firing: " + "; ".join(sorted(texts)), TEXT_LENGTH)}
