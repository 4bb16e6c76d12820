"""`tocsin run` as it is, that from its start on gets no further thread: the kernel's own limit of its user is reached.

`python -m tests.incidents.starved --config FILE`, in the place of `python -m agent.daemon`, by a user without rights.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

from agent import daemon, sdnotify


def starving(ready: Callable[[str], bool]) -> Callable[[str], bool]:
    """Told to be ready, it has all threads that it begins with, and none of those that its first tick asks for."""

    def ready_and_starved(status: str) -> bool:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        return ready(status)

    return ready_and_starved


if __name__ == "__main__":
    vars(sdnotify).update(ready=starving(sdnotify.ready))
    sys.exit(daemon.main())
