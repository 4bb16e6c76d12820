"""Whole drills, run for real and judged: real namespaces, nginx, agent and Alertmanager; nothing is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drills import world
from tests.needs import need

pytestmark = pytest.mark.heavy

KILL: dict[str, Any] = {
    "name": "kill", "fault": "process-kill", "load": world.load(), "baseline": "3s", "for": "33s", "recovery": "10s",
    "holds": {"goodput": "95% in 5s", "restart_within": "30s"}, "echo": world.HOOK,
}  # fmt: skip


def test_a_killed_engine_is_survived(tmp_path: Path) -> None:
    """One of two engines is killed: the router fails over, the page comes and goes, the supervisor brings it back."""
    need(*world.NEEDS)
    drill = KILL | {"target": {"engine": "a", "netns": "@a"}}
    with world.world(tmp_path, drills=[drill]) as made:
        ran = made.drill("kill")
    print(ran.said)
    assert ran.verdict == "PASS", ran.said
