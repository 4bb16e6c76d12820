"""One second of a run, without one: what ends it before its time, and what is then kept of it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drills.model import Drill
from drills.runner import Ended, Run


def run(**known: Any) -> Run:
    """A run that knows no more than one second of it needs."""
    made = Run.__new__(Run)
    made.wake = threading.Event()
    made.wake.set()
    made.clock, made.spans, made.stop_why, made.unexpected = (lambda: 7.0), {"fault": [1.0, 6.0]}, "", []
    made.plan, made.drill = None, Drill("d", "process-kill", expects=("engine-down",))
    known.setdefault("elsewhere", SimpleNamespace(pages=list))
    for name, value in known.items():
        setattr(made, name, value)
    return made


def test_a_prober_that_died_ends_the_run(tmp_path: Path) -> None:
    """It ran out of memory, nobody asked any more, and the drill went on for the rest of its 5 minutes."""
    agent, dead = SimpleNamespace(pages=list), SimpleNamespace(alive=False)
    with pytest.raises(Ended, match="the prober ended"):
        run(agent=agent, prober=dead, folder=tmp_path).breathe("fault")


def test_a_page_that_nothing_announced_is_kept() -> None:
    """The run was aborted by a lost GPU, and its report said that nothing unexpected had paged."""
    page = {"rule": "gpu-lost", "subject": "GPU-1", "state": "firing", "severity": "page"}
    seen = run(agent=SimpleNamespace(pages=lambda: [page]), rules={})
    with pytest.raises(Ended, match="a page that nothing announced: gpu-lost on GPU-1"):
        seen.breathe("fault")
    assert seen.unexpected == ["gpu-lost on GPU-1"]


@pytest.mark.parametrize(
    ("story", "labels", "why"),
    [
        ("another node's own crisis", {"rule": "gpu-lost", "subject": "GPU-9", "node": "gpu-18"},
         "gpu-lost on GPU-9 of node gpu-18, in Alertmanager"),
        ("a page of another tool's", {"alertname": "RouterDown"},
         "RouterDown on something of node unknown, in Alertmanager"),
        ("the same alert, by the exported rules", {"rule": "engine-down", "subject": "a", "node": "prometheus-1"}, ""),
    ],
)
def test_a_page_of_the_fleet_ends_it(story: str, labels: dict[str, str], why: str) -> None:
    """All hands were needed at the next node, and this one went on breaking things."""
    seen = run(agent=SimpleNamespace(pages=list), elsewhere=SimpleNamespace(pages=lambda: [labels]))
    if not why:
        seen.judge_pages()
        return
    with pytest.raises(Ended, match=f"a page that nothing announced: {why}"):
        seen.judge_pages()
    assert seen.unexpected == [why], story


def test_an_abort_tells_the_holder_itself() -> None:
    """The runner waited for an agent that hung, and only then for the fault's end."""
    told: list[str] = []
    aborted = run(holder=SimpleNamespace(revert_now=lambda: told.append("revert")))
    aborted.abort("by root")
    assert told == ["revert"]
    with pytest.raises(Ended, match="by root"):
        aborted.breathe("fault")
