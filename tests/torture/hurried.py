"""`tocsin run` as it is, in a hurry: a poll of 0.2 s, and no wait for a receiver or until another try of over a second.

`python -m tests.torture.hurried --config FILE`, in the place of `python -m agent.daemon`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent import daemon, outbox
from agent.config import Config, load_all
from agent.model import SignalSpec
from agent.notifiers import channel
from rules import RuleSet

POLL_S = 0.2
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.1, 1.0
ANSWER_S = 1.0


def hurried(path: Path | None, env: Mapping[str, str], catalogue: Mapping[str, SignalSpec]) -> tuple[Config, RuleSet]:
    """The configuration with a poll that no configuration may have."""
    config, rules = load_all(path, env, catalogue)
    return msgspec.structs.replace(config, poll=POLL_S), rules


def main() -> int:
    """Be the daemon."""
    vars(daemon).update(load_all=hurried)
    vars(outbox).update(SHORTEST_WAIT_S=SHORTEST_WAIT_S, LONGEST_WAIT_S=LONGEST_WAIT_S)
    vars(channel).update(ANSWER_S=ANSWER_S)
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
