"""A short torture, as part of the heavier tests; the long one is `make torture`."""

from __future__ import annotations

import os

import pytest

from tests.drills.netns import NEEDS
from tests.needs import need
from tests.torture import agent
from tests.torture.__main__ import last_line, torture
from tests.torture.scene import FAULTS

RUNS = 60
KILLS = 30


@pytest.mark.heavy
def test_nothing_survives_a_kill() -> None:
    """The node lost power for its containers in the middle of a drill, and a port stayed lossy for a week."""
    need(*NEEDS)
    seed = int.from_bytes(os.urandom(4), "big")
    said = [f"seed {seed}"]

    results = torture(RUNS, seed, FAULTS, said.append)

    assert last_line(results) == f"runs {RUNS}, residue 0, reports missing 0", "\n".join(said)


@pytest.mark.heavy
def test_no_page_is_lost_by_kill_9_of_the_agent() -> None:
    """The kernel killed the agent for memory, again and again, while alerts came and went and receivers failed."""
    seed = int.from_bytes(os.urandom(4), "big")
    said = [f"seed {seed}"]

    result = agent.torture(KILLS, seed, say=said.append)

    assert result.kills == KILLS
    assert result.transitions > 0
    assert not result.wrong, "\n".join(said)
