"""The daemon, to which every engine is warm: the 3 and the 10 minutes after an engine's start are waited for by nobody.

`python -m tests.engine.warm_agent --config FILE`, otherwise as agent.daemon.
"""

from __future__ import annotations

import sys
from typing import Any

from agent import daemon, signals


def never(*_: Any, **__: Any) -> None:
    """It does not warm up."""


if __name__ == "__main__":
    signals.Ask.warming_up = never  # type: ignore[method-assign]
    sys.exit(daemon.main())
