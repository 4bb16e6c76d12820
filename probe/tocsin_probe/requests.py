"""The two that watch requests: which is the oldest without a first token, and which was never scheduled.

Both keep what they were told of in the order of arrival and look at the head alone: a step costs the same whether one
request waits or ten thousand. What has left by another way than ours is noticed when it is the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tocsin_probe import page as pages
from tocsin_probe.page import FRONT, SCHEDULER, Page

SPARE = 1024  # entries of requests that are gone, kept until they are the head


class Oldest:
    """Requests in the order of arrival, of which only the head is looked at."""

    def __init__(self, waits: Callable[[str, Any], bool]) -> None:
        self._waits = waits  # (id, what holds the engine's own record) -> it still waits
        self.held: dict[str, tuple[float, Any]] = {}

    def add(self, name: str, arrived: float, owner: Any) -> None:
        if name not in self.held:
            self.held[name] = (arrived, owner)

    def arrived(self) -> float:
        """Unix s of the head's arrival; 0.0: nobody waits."""
        held = self.held
        while held:
            name = next(iter(held))
            arrived, owner = held[name]
            if self._waits(name, owner):
                return arrived
            del held[name]
        return 0.0

    def compact(self, alive: int) -> None:
        """A head that stays would keep all that came after it: leave out what is gone."""
        if len(self.held) > 2 * alive + SPARE:
            self.held = {name: kept for name, kept in self.held.items() if self._waits(name, kept[1])}


class FrontEnd:
    """Age without a first token, as one API server sees it: its OutputProcessor's requests still prefilling."""

    def __init__(self, page: Callable[[], Page]) -> None:
        self._page = page
        self._oldest = Oldest(lambda name, states: getattr(states.get(name), "is_prefilling", False) is True)
        self._added = 0
        self._written: tuple[float, int] = (-1.0, -1)

    def added(self, processor: Any, request: Any) -> None:
        """After OutputProcessor.add_request: the request's state is there now."""
        self._added += 1
        self._oldest.add(request.request_id, float(request.arrival_time), processor.request_states)
        self.looked(processor)

    def looked(self, processor: Any) -> None:
        """After outputs were processed, or requests aborted."""
        arrived = self._oldest.arrived() if self._oldest.held else 0.0
        if arrived == self._written[0] and self._added == self._written[1]:
            return
        self._oldest.compact(len(processor.request_states))
        self._written = (arrived, self._added)
        self._page().write(FRONT, arrived, time.time(), self._added, len(self._oldest.held))


class Queue:
    """Arrival of the oldest request that was never scheduled, as the scheduler of one engine core has it."""

    def __init__(self, page: Callable[[], Page]) -> None:
        self._page = page
        self._oldest = Oldest(_never_scheduled)
        self._steps = 0
        self._index: int | None = None
        self._written = -1.0  # the head's arrival as it was written last
        self._due = 0.0  # monotonic s

    def added(self, scheduler: Any, request: Any) -> None:
        """After Scheduler.add_request."""
        self._oldest.add(request.request_id, float(request.arrival_time), scheduler.requests)
        self._write(scheduler)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """After Scheduler.schedule: those of `scheduled_new_reqs` wait no more."""
        held = self._oldest.held
        for new in output.scheduled_new_reqs:
            held.pop(new.req_id, None)
        if output.total_num_scheduled_tokens > 0:  # one that schedules nothing moves nothing
            self._steps += 1
        if len(held) > SPARE:
            self._oldest.compact(len(scheduler.requests))
        self._write(scheduler)

    def left(self, scheduler: Any) -> None:
        """After requests were finished or aborted."""
        if self._oldest.held:
            self._write(scheduler)

    def _write(self, scheduler: Any) -> None:
        arrived = self._oldest.arrived() if self._oldest.held else 0.0
        now = time.monotonic()
        if arrived == self._written and now < self._due:
            return
        if self._index is None:
            self._index = engine_index(scheduler.vllm_config.parallel_config)
        self._written, self._due = arrived, pages.next_write_s(now)
        self._page().write(SCHEDULER, arrived, time.time(), self._steps, len(self._oldest.held), self._index)


def _never_scheduled(name: str, requests: Any) -> bool:
    """A request that has run is PREEMPTED when it waits again, or, in a session, waits for its next input."""
    request = requests.get(name)
    if request is None:
        return False
    status = request.status.name
    return bool(status.startswith("WAITING")) and status != "WAITING_FOR_STREAMING_REQ"


def engine_index(parallel: Any) -> int:
    """Which of the engines of a server with data parallelism this is; vLLM 0.8 and 0.9 know only the rank."""
    index = getattr(parallel, "data_parallel_index", None)
    return int(getattr(parallel, "data_parallel_rank", 0) if index is None else index)
