"""What is owed to whom: one thread a channel takes due notices from the store and sends them, at least once.

A notice is marked delivered after it was sent, so a crash in between sends it again; receivers join by the alert's
labels. The notices of one alert keep their order, and a failing one holds back only its own alert. What a receiver
refuses for a reason that a person must mend (a revoked key) is kept, and not tried again until something has changed.
"""

from __future__ import annotations

import math
import random
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import structlog

from agent.model import Notice, Rejected, TryLater
from agent.notifiers.channel import BadMessage, Channel
from agent.store import Store
from agent.threads import begin

log = structlog.get_logger()

SHORTEST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
LONGEST_RETRY_AFTER_S = 300.0  # a receiver may ask for a pause, not for silence
STUCK_S = 30.0  # a send that takes longer counts as failing
REFUSAL_SHOWN_S = 86400.0

_T = TypeVar("_T")


class ChannelStatus(NamedTuple):
    """How a channel does. Counts are of this process, but `pending`; `failing_s` is 0 while deliveries succeed."""

    pending: int
    delivered: int
    rejected: int
    retried: int
    failing_s: float
    last_error: str | None


class Outbox:
    """Threads that deliver. `clock` gives unix seconds."""

    def __init__(
        self,
        store: Store,
        channels: Sequence[Channel],
        clock: Callable[[], float],
        dice: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._store = store
        self._clock = clock
        self.workers = [Worker(store, channel, clock, dice) for channel in channels]
        self._threads: list[threading.Thread] = []

    def give_up_unknown(self) -> None:
        """What a channel that is no longer configured was owed is given up, aloud."""
        known = {worker.name for worker in self.workers}
        for name in self._store.outbox_counts().keys() - known:
            for notice in self._store.owed(name):
                why = f"{name} is no longer configured"
                self._store.notice_rejected(notice.id, self._clock(), why)
                log.warning("notice_given_up", channel=name, alert=notice.message.key, why=why)

    def start(self, after_s: float = 0.0) -> None:
        """Begin, to deliver after so long: a fleet that is started at once must not ring at its receivers at once.

        Raises NoThread: a channel would be silent.
        """
        for worker in self.workers:
            worker.hold(after_s)
            self._threads.append(begin(worker.run, f"outbox-{worker.name}"))

    def wake(self) -> None:
        """Something new is owed."""
        for worker in self.workers:
            worker.wake()

    def stop(self, deadline_s: float) -> None:
        """End the threads; a send that outlasts the deadline is left alone, and is made again by the next process."""
        for worker in self.workers:
            worker.stop()
        share_s = deadline_s / max(1, len(self._threads))
        for thread in self._threads:
            thread.join(share_s)
        for worker in self.workers:
            worker.channel.close()

    def status(self) -> dict[str, ChannelStatus]:
        """How each channel does."""
        now = self._clock()
        return {worker.name: worker.status(now) for worker in self.workers}

    def problems(self) -> list[str]:
        """What a person should look at, a sentence each, for /healthz."""
        now = self._clock()
        return [sentence for worker in self.workers for sentence in worker.problems(now)]


class Worker:
    """One channel's deliveries. `step` does what is due; `run` calls it for ever."""

    def __init__(
        self, store: Store, channel: Channel, clock: Callable[[], float], dice: Callable[[float, float], float]
    ) -> None:
        self.channel = channel
        self.name = channel.name
        self._store = store
        self._clock = clock
        self._dice = dice
        self._wake = threading.Event()
        self._stopping = False
        keeps = bool(channel.min_visible_s or channel.hours.repeat_s)
        self._accepted_at = store.accepted_at(channel.name) if keeps else {}  # when a firing was last told, by key
        self._failures = 0  # in a row
        self._pause_until = 0.0
        self._busy_since: float | None = None
        self._pulse_failing_since: float | None = None
        self._refused_since: float | None = None  # it takes nothing of ours (401, 403, 404)
        self._kept: dict[int, str] = {}  # ids of the notices that were refused so, each with why
        self._refused_address: int | None = None  # a hash of the address that they were refused at
        self._last_error: str | None = None
        self._refusal: tuple[float, str] | None = None
        self._delivered = self._rejected = self._retried = 0

    def run(self) -> None:
        """Until stopped."""
        while not self._stopping:
            self._wake.clear()
            try:
                again_at = self.step()
            except Exception:  # a thread that ends here would be a channel that is silent for ever
                log.exception("outbox_fault", channel=self.name)
                again_at = self._clock() + LONGEST_WAIT_S
            self._wake.wait(min(LONGEST_WAIT_S, max(0.0, again_at - self._clock())))

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    def hold(self, span_s: float) -> None:
        """Deliver nothing for so long."""
        self._pause_until = self._clock() + span_s

    def stop(self) -> None:
        """End `run` after the send that it is in."""
        self._stopping = True
        self._wake.set()

    def step(self) -> float:
        """Do what is due; returns the time at which to come back."""
        now = self._clock()
        if now < self._pause_until <= now + LONGEST_RETRY_AFTER_S:  # further off than that: the clock was stepped
            return self._pause_until
        self._pause_until = 0.0
        next_due = self._deliver()
        if self._pause_until or self._stopping:
            return self._pause_until
        next_due = min(next_due, self._pulse())
        return self._pause_until or min(next_due, self._repeat(now))

    def status(self, now: float) -> ChannelStatus:
        """How this channel does."""
        since = [self._store.failing_since(self.name), self._pulse_failing_since, self._refused_since]
        if self._busy_since is not None and now - self._busy_since > STUCK_S:
            since.append(self._busy_since)
        begun = [at for at in since if at is not None]
        failing_s = max(0.0, now - min(begun)) if begun else 0.0
        pending = len(self._store.owed(self.name))
        error = self._last_error if begun else None
        return ChannelStatus(pending, self._delivered, self._rejected, self._retried, failing_s, error)

    def problems(self, now: float) -> list[str]:
        """What a person should look at."""
        found = []
        status = self.status(now)
        if status.failing_s:
            why = status.last_error or "no answer yet"
            found.append(
                f"{self.name}: nothing delivered for {status.failing_s:.0f} s, {status.pending} waiting ({why})"
            )
        if kept := list(self._kept.values()):
            found.append(f"{self.name}: {len(kept)} refused and kept ({kept[-1]}); mend it: they go out when the "
                         "channel's secret is another, a delivery succeeds, or at a reload")
        if self._refusal is not None and now - self._refusal[0] < REFUSAL_SHOWN_S:
            found.append(f"{self.name}: refused and not tried again ({self._refusal[1]})")
        return found

    # ---- inside ----

    def _deliver(self) -> float:
        """Send all that is due, until a failure; returns when the next is."""
        if self._kept and self._address() != self._refused_address:
            self._kept.clear()
        while True:
            due = self._due()
            now = self._clock()
            ready = [notice for at, notice in due if at <= now]
            if not ready or self._stopping:
                return due[0][0] if due else float("inf")
            # After a failure one at a time: in a batch that fails as a whole one of them may be the reason.
            self._send(ready[: 1 if self._failures else self.channel.batch])
            if self._pause_until:
                return self._pause_until

    def _due(self) -> list[tuple[float, Notice]]:
        """The oldest notice of each alert with the time at which it is due, the most urgent first."""
        now = self._clock()
        hold_s = self.channel.min_visible_s
        heads: dict[str, tuple[float, Notice]] = {}
        for notice in self._store.owed(self.name):
            key = notice.message.key
            if key in heads:
                continue
            at = notice.due_at
            if notice.message.status == "resolved" and key in self._accepted_at:
                at = max(at, self._accepted_at[key] + hold_s)
            if at > now + max(LONGEST_RETRY_AFTER_S, hold_s):  # the clock was stepped back
                at = now
            at = max(at, self.channel.hours.quiet_until(notice.message.severity, now) or at)
            if notice.id in self._kept:
                at = math.inf
            heads[key] = (at, notice)
        return sorted(heads.values(), key=lambda head: (head[0], head[1].id))

    def _send(self, notices: Sequence[Notice]) -> None:
        outcome = self._try(lambda: self.channel.send(notices, self._clock()))
        now = self._clock()
        if isinstance(outcome, TryLater):
            self._pause(outcome, now)
            for notice in notices:
                wait_s = self._wait_s(notice.tries + 1, outcome.after_s)
                self._store.notice_retry(notice.id, now, now + wait_s, str(outcome))
            self._retried += len(notices)
            return
        self._failures = 0
        refused = dict.fromkeys((n.id for n in notices), outcome) if isinstance(outcome, Rejected) else outcome
        for notice in notices:
            if (error := refused.get(notice.id)) is not None:
                self._refuse(notice, error, now)
            else:
                self._done(notice, now)

    def _done(self, notice: Notice, now: float) -> None:
        message = notice.message
        self._store.notice_delivered(notice.id, now)
        self._delivered += 1
        self._refused_since = None
        self._kept.clear()  # it takes ours again
        if message.status == "resolved":
            self._accepted_at.pop(message.key, None)
        elif self.channel.min_visible_s or self.channel.hours.repeat_s:
            self._accepted_at[message.key] = now
        tries = notice.tries + 1
        log.info("notice_sent", channel=self.name, alert=message.key, status=message.status, tries=tries)

    def _refuse(self, notice: Notice, error: Rejected, now: float) -> None:
        """Give up what is wrong with the message; keep what is wrong with the channel: a person can mend that."""
        text, key = str(error), notice.message.key
        self._rejected += 1
        self._last_error = text
        is_kept = not isinstance(error, BadMessage)
        if is_kept:
            self._store.notice_retry(notice.id, now, now, text)
            self._refused_since = now if self._refused_since is None else self._refused_since
            self._kept[notice.id], self._refused_address = f"{key}: {text}", self._address()
        else:
            self._store.notice_rejected(notice.id, now, text)
            self._refusal = (now, f"{key}: {text}")
        log.error("notice_refused", channel=self.name, alert=key, error=text, kept=is_kept)

    def _address(self) -> int | None:
        """A hash of the channel's address and secret as they are now; None while they cannot be read."""
        try:
            return hash(self.channel.address())
        except TryLater:
            return None

    def _pulse(self) -> float:
        now = self._clock()
        heads = [notice for at, notice in self._due() if at < math.inf]
        # One that was tried may have arrived: to tell its firing again would open it anew.
        held = [one.message for one in heads if one.message.status == "resolved" and not one.tries]
        outcome = self._try(lambda: self.channel.pulse(now, held))
        if isinstance(outcome, float | int):
            if self._pulse_failing_since is not None:
                self._pulse_failing_since = None
                self._failures = 0
            return outcome
        if self._pulse_failing_since is None:
            self._pulse_failing_since = now
        wait = outcome if isinstance(outcome, TryLater) else TryLater(str(outcome), LONGEST_WAIT_S)
        self._pause(wait, self._clock())
        return self._pause_until

    def _repeat(self, now: float) -> float:
        """Tell again what still fires and was told long enough ago; returns when the next is due.

        After a restart a repeat counts from the first telling: at most one comes too soon.
        """
        every_s, next_at = self.channel.hours.repeat_s, math.inf
        if every_s is None:
            return next_at
        for message in self.channel.hours.firing():
            told_at = self._accepted_at.get(message.key)
            if told_at is None:  # its first telling is still owed
                continue
            if told_at > now:  # the clock was stepped back: it would be silent for as long
                told_at = self._accepted_at[message.key] = now
            at = max(told_at + every_s, self.channel.hours.quiet_until(message.severity, now) or 0.0)
            if at <= now and not self._stopping:
                outcome = self._try(partial(self.channel.send, [Notice(0, self.name, message, now, now)], now))
                if isinstance(outcome, TryLater):
                    self._pause(outcome, self._clock())
                    return self._pause_until
                log.info("notice_repeated", channel=self.name, alert=message.key,
                         error=str(outcome) if isinstance(outcome, Rejected) else None)
                self._accepted_at[message.key] = now  # also where it was refused: not again before the next time
                at = now + every_s
            next_at = min(next_at, at)
        return next_at

    def _pause(self, failure: TryLater, now: float) -> None:
        self._failures += 1
        self._last_error = str(failure)
        wait_s = self._wait_s(self._failures, failure.after_s)
        self._pause_until = now + wait_s
        log.warning("delivery_failed", channel=self.name, error=str(failure), again_in_s=round(wait_s, 1))

    def _wait_s(self, tries: int, after_s: float | None) -> float:
        """Full jitter, and never under a second: a hundred nodes must not come back to a restarted receiver at once."""
        if after_s is not None:
            return max(SHORTEST_WAIT_S, min(after_s, LONGEST_RETRY_AFTER_S)) + self._dice(0.0, SHORTEST_WAIT_S)
        return self._dice(SHORTEST_WAIT_S, min(LONGEST_WAIT_S, 2.0 ** min(tries, 10)))

    def _try(self, action: Callable[[], _T]) -> _T | Rejected | TryLater:
        """The one seam: whatever a channel raises becomes Rejected or TryLater."""
        self._busy_since = self._clock()
        try:
            return action()
        except (Rejected, TryLater) as error:
            return error
        except Exception as error:  # its text may hold a URL, and a URL a secret: only its class and place are told
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{PurePath(frame.filename).name}:{frame.lineno}"
            return TryLater(f"{self.name}: {type(error).__name__} at {place}, a fault of Tocsin's: please report it")
        finally:
            self._busy_since = None
