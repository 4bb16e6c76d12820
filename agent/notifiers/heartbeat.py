"""The dead man's switch: a request every `every` while the tick is on time. Its absence is the alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.model import AlertMessage
from agent.notifiers.channel import Channel, request
from agent.phase import next_at

LOOK_AGAIN_S = 5.0


class Heartbeat(Channel):
    """GETs the address that `url` gives, every `every_s`, while `healthy()`; no notice is ever sent through it.

    `phase_s`: how far into each `every_s` of unix time it beats, after a first beat at once; None: counted from that.
    """

    def __init__(self, name: str, url: Callable[[], str], every_s: float, healthy: Callable[[], bool],
                 phase_s: float | None = None) -> None:
        self.name = name
        self._url = url
        self._every_s = every_s
        self._healthy = healthy
        self._phase_s = phase_s
        self._next = 0.0

    def pulse(self, now: float, held: Sequence[AlertMessage]) -> float:  # noqa: ARG002
        """Beat if it is time and all is well. Raises Rejected or TryLater."""
        if now < self._next <= now + self._every_s:  # further off than that: the clock was stepped
            return self._next
        if not self._healthy():
            return now + min(LOOK_AGAIN_S, self._every_s)
        request("GET", self._url(), now)
        self._next = now + self._every_s if self._phase_s is None else next_at(now, self._every_s, self._phase_s)
        return self._next
