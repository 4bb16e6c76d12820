"""Threads of ours, and what is said where the kernel gives none: a limit of threads is reached, by us or by others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WHERE = "see TasksMax= of the unit, the container's limit of pids, and `ulimit -u` of the user"


class NoThread(RuntimeError):  # noqa: N818  (it says what happened)
    """No thread could be begun. The text says for what, and where the limits stand."""


def begin(run: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Run it in a thread that has begun, and does not keep the process from ending. Raises NoThread.

    Whoever keeps the thread as the sign that it runs keeps it only then: where it could not begin, it is tried again.
    """
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    with beginning(name):
        thread.start()
    return thread


@contextmanager
def beginning(name: str) -> Iterator[None]:
    """Around what begins threads by itself. Raises NoThread."""
    try:
        yield
    except RuntimeError as error:  # of threading itself, which has no class of its own for it
        if "start new thread" not in str(error):
            raise
        raise NoThread(f"no thread for {name}: {error}: a limit of threads is reached: {WHERE}") from error
