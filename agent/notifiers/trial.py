"""`tocsin notify test`: one marked alert and its end through every channel, so that the way is known to work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from agent.model import SEVERITY_RANK, AlertMessage, Notice, Rejected, TryLater
from agent.notifiers import Route

TEXT = "TEST of Tocsin's channels from {node}: nothing is wrong, and there is nothing to do"


class Tried(NamedTuple):
    """How one channel did. `why` is "" where it was delivered."""

    channel: str
    delivered: bool
    why: str


def try_all(routes: Sequence[Route], node: str, clock: Callable[[], float] = time.time) -> list[Tried]:
    """Send through each channel, as loud as the loudest that it is told of; a heartbeat is sent as ever."""
    return [_tried(route, node, clock()) for route in routes]


def _tried(route: Route, node: str, now: float) -> Tried:
    name = route.channel.name
    try:
        if not route.wants.severities:  # a heartbeat
            route.channel.pulse(now, ())
            return Tried(name, True, "")
        refused: list[Rejected] = []
        for message in messages(route, node, now):
            refused += route.channel.send([Notice(0, name, message, now, now)], now).values()
    except (Rejected, TryLater) as error:
        return Tried(name, False, str(error))
    return Tried(name, not refused, "; ".join(map(str, refused)))


def messages(route: Route, node: str, now: float) -> tuple[AlertMessage, AlertMessage]:
    """The alert and its end. Its rule is none of ours, so no route by rule takes it for a real one."""
    severity = max(route.wants.severities, key=SEVERITY_RANK.__getitem__)
    labels = {"alertname": "TocsinTest", "rule": "tocsin-test", "node": node, "subject": node, "severity": severity}
    text = TEXT.format(node=node)
    fired = AlertMessage(f"{node}/tocsin-test/{node}", "firing", severity, labels,
                         {"summary": text, "description": text}, now)
    return fired, replace(fired, status="resolved", ends_at=now)
