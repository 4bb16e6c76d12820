"""What 1,000 kills at random instants cost: pages lost, sent twice without their key, or out of order.

The long form takes about 12 minutes; tests/torture/agent.py says what is done and what is looked at.
"""

from __future__ import annotations

import sys
import time

from bench.figures import Figure, arguments, say, tell
from tests.torture.agent import torture

KILLS, SHORT_KILLS = 1000, 30


def main() -> int:
    """Torture and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    say(f"seed {asked.seed}")
    result = torture(SHORT_KILLS if asked.short else KILLS, asked.seed, say=say)
    say(result.summary())
    return tell([Figure("agent_kills", result.kills, "kills"),
                 Figure("agent_killed_transitions", result.transitions, "transitions"),
                 Figure("agent_killed_lost_or_disordered", len(result.wrong), "transitions", 0.0)])


if __name__ == "__main__":
    sys.exit(main())
