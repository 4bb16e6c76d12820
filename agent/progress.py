"""What a command is at, on stderr, while somebody waits for it: since when, and how long it can still take.

On a terminal it is one line, drawn anew by itself, that is gone when the command ends. Elsewhere nothing but the lines
that stay is written, so that a log or a pipe has no more than it needs. stdout is the answer's alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, floor
from typing import Any, NoReturn, Protocol, Self

from agent.threads import begin
from agent.words import clean

DRAWN_PER_S = 4
BAR_COLUMNS = 20
SIGNALLED = 128  # and the signal's number: the exit status, as shells have it


class Tell(Protocol):
    """As `Progress.__call__`: what is done now, and how long it is until the end of all."""

    def __call__(self, line: str, left_s: float | None = None, *, lasting: bool = False,
                 at_most: bool = False) -> None: ...


def quiet(line: str, left_s: float | None = None, *, lasting: bool = False, at_most: bool = False) -> None:
    """For who waits for nothing."""


class Progress:
    """The line, as a context. Called with what is done now; on a terminal it goes on counting without being called."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._began = monotonic()
        self._line = ""
        self._ends: float | None = None  # monotonic; None: nobody knows
        self._at_most = False
        self._live: Any = None

    def __enter__(self) -> Self:
        self._began = self._monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), get_renderable=self._drawn, transient=True,
                              refresh_per_second=DRAWN_PER_S, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, line: str, left_s: float | None = None, *, lasting: bool = False, at_most: bool = False) -> None:
        """Show a line in place of the one before, or (`lasting`) one that stays above it.

        Args:
            line: what is done now.
            left_s: how long it is until the end of all, where that is known; it is counted down.
            lasting: it stays, and is written where no terminal is, too.
            at_most: it may well be over sooner.
        """
        line = clean(line)
        if lasting and self._live is not None:
            self._live.console.print(line, markup=False, soft_wrap=True)
        elif lasting:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        else:
            self._line, self._at_most = line, at_most
            self._ends = None if left_s is None else self._monotonic() + left_s

    def text(self) -> str:
        """The line as it is now: what is done, for how long, and how long still."""
        now = self._monotonic()
        told = [self._line, f"{passed(floor(now - self._began))} elapsed"]
        if self._ends is not None:
            left_s = ceil(self._ends - now)
            limit = "at most " if self._at_most else ""
            told.append(f"{limit}{passed(left_s)} left" if left_s >= 0 else f"{passed(-left_s)} over its time")
        return " · ".join(told)

    def _drawn(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self._line:
            return Text("")
        text = Text(self.text(), no_wrap=True, overflow="ellipsis")
        if self._ends is None:
            return text
        now = self._monotonic()
        row = Table.grid(padding=(0, 1))
        whole_s = max(self._ends - self._began, 1e-9)
        row.add_row(ProgressBar(total=whole_s, completed=min(now - self._began, whole_s), width=BAR_COLUMNS), text)
        return row


def passed(whole: int) -> str:
    """A span of so many seconds that is seen to move: 9 s, 4 min 07 s, 2 h 05 min."""
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def in_order() -> Iterator[None]:
    """SIGTERM ends what is drawn on a terminal as an exception would: the terminal is given back as it was."""
    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(SIGNALLED + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_at_signals() -> threading.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set, where an exception out of nowhere would tear what is being done.

    A thread sets it: a handler runs in the midst of the main thread's own `wait`, whose lock `set` would wait for.
    """
    stop = threading.Event()
    told, tell = os.pipe()

    def relay() -> None:
        os.read(told, 1)
        stop.set()

    begin(relay, "signals")
    for wish in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(wish, lambda *_: os.write(tell, b"."))
    return stop
