"""One second of a run, without one: what ends it before its time, and what is then kept of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.config import Config
from drills.guards import Check
from drills.holder import HolderError
from drills.model import Drill, Left, Plan, Verdict
from drills.runner import Ended, Run, is_moving


def run(**known: Any) -> Run:
    """A run that knows no more than one second of it needs."""
    made = Run.__new__(Run)
    made.wake = threading.Event()
    made.wake.set()
    made.clock, made.spans, made.stop_why, made.unexpected = (lambda: 7.0), {"fault": [1.0, 6.0]}, "", []
    made.plan, made.drill, made.lease = None, Drill("d", "process-kill", expects=("engine-down",)), None
    made.is_armed, made.judged, made.stalest_s, made.rules = True, [], 0.0, {}
    made.begun, made.wall_s, made.stepped_s, made.clock_was_set = {}, 7.0 - time.monotonic(), 0.0, False
    made.record = SimpleNamespace(moment=lambda *told: None)  # type: ignore[assignment]
    known = {"elsewhere": SimpleNamespace(pages=list), "config": Config(node="gpu-17"), **known}
    for name, value in known.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("now", "told"), [
    (7.5, []), (3607.0, ["the clock was put forward by 3600 s"]), (-3593.0, ["the clock was put back by 3600 s"]),
])  # fmt: skip
def test_a_clock_that_is_set_while_it_runs(now: float, told: list[str]) -> None:
    """NTP took an hour back: the fault was to last an hour longer, and the alarm had come 59 minutes before it."""
    moments: list[str] = []
    seen = run(record=SimpleNamespace(moment=lambda what, evidence: moments.append(what)))
    seen.wall_s = 7.0 - time.monotonic()
    seen.clock = lambda: now + 0.0

    seen.mind_clock()
    seen.mind_clock()

    assert moments == told


@pytest.mark.parametrize("later_s", [3600.0, -3600.0])
def test_a_phase_lasts_its_time_whatever_the_clock_says(later_s: float) -> None:
    """A fault of 300 s that had begun 1 s ago, on a clock that was put forward, or back, by an hour."""
    seen, breaths = run(), list[str]()
    seen.begun["fault"] = time.monotonic() - 299.0
    seen.clock = lambda: 7.0 + later_s

    def breathe(phase: str) -> None:
        breaths.append(phase)
        time.sleep(0.1)

    seen.breathe = breathe  # type: ignore[method-assign]
    seen.pass_time("fault", 300.0)

    assert 1 <= len(breaths) <= 11


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
        ("the same alert, by the exported rules", {"rule": "engine-down", "subject": "a", "node": "gpu-17"}, ""),
        ("the same rule on another node", {"rule": "engine-down", "subject": "a", "node": "gpu-18"},
         "engine-down on a of node gpu-18, in Alertmanager"),
        ("the same rule on another engine", {"rule": "engine-down", "subject": "b"},
         "engine-down on b of node unknown, in Alertmanager"),
    ],
)
def test_a_page_of_the_fleet_ends_it(story: str, labels: dict[str, str], why: str) -> None:
    """All hands were needed at the next node, and this one went on breaking things."""
    drill = Drill("d", "process-kill", target={"engine": "a"}, expects=("engine-down",))
    seen = run(agent=SimpleNamespace(pages=list), elsewhere=SimpleNamespace(pages=lambda: [labels]), drill=drill)
    if not why:
        seen.judge_pages()
        return
    with pytest.raises(Ended, match=f"a page that nothing announced: {why}"):
        seen.judge_pages()
    assert seen.unexpected == [why], story


def page(number: int, rule: str, subject: str = "a") -> dict[str, Any]:
    """A transition that pages."""
    return {"id": number, "rule": rule, "subject": subject, "state": "firing", "severity": "page"}


def test_nothing_is_announced_before_it_is_armed() -> None:
    """engine-down in the baseline was a real one: the drill went on, into it."""
    drill = Drill("d", "process-kill", target={"engine": "a"}, expects=("engine-down",))
    seen = run(agent=SimpleNamespace(pages=lambda: [page(1, "engine-down")]), drill=drill, is_armed=False)
    with pytest.raises(Ended, match="a page that nothing announced: engine-down on a") as ended:
        seen.judge_pages()
    assert not ended.value.early
    armed = run(agent=SimpleNamespace(pages=lambda: [page(1, "engine-down")]), drill=drill)
    armed.judge_pages()


def test_a_page_is_judged_once() -> None:
    """It ended the fault early, and then the way back too, after one second: "never answered"."""
    pages = [page(1, "ttft-p99")]
    seen = run(agent=SimpleNamespace(pages=lambda: pages))
    with pytest.raises(Ended) as ended:
        seen.judge_pages()
    assert ended.value.early
    seen.judge_pages()  # the way back goes on
    pages.append(page(2, "gpu-lost", "GPU-1"))
    with pytest.raises(Ended, match="gpu-lost on GPU-1"):
        seen.judge_pages()


def test_the_guards_are_asked_again_right_before_the_injection(tmp_path: Path) -> None:
    """The other replica hung during the baseline, and the last one that served was killed."""
    asked: list[bool] = []

    def ask(*, again: bool = False) -> list[Check]:
        asked.append(again)
        return [Check("window", True, "open"), Check("healthy replicas", False, "0 after the fault")]

    seen = run(agent=SimpleNamespace(pages=list), ask_guards=ask, holder=SimpleNamespace(),
               plan=Plan("process-kill", "r", [], [], [], {}))
    with pytest.raises(Ended, match="right before the injection: healthy replicas: 0 after the fault"):
        seen.inject()
    assert asked == [True]


def test_an_orphan_counts_as_it_was_when_the_restart_would_count() -> None:
    """Its core lived on for 45 s beside the new engine, which answered after 30: no orphan, said the report."""
    samples = [{"at": 100.0 + s, "outlive": [41] if s < 45 else []} for s in range(60)]
    way = SimpleNamespace(down_at=101.0, port_at=120.0, ready_at=129.0, completion_at=130.0)
    back = run(way_back=way, samples=samples, gpu_memory=SimpleNamespace(is_free=lambda by: None),
               plan=Plan("process-kill", "r", [], [], [], {}), folder=Path("/r")).restart()
    assert back is not None
    assert back.orphans == ["pid 41"]


@pytest.mark.parametrize(
    ("samples", "want"),
    [([{"at": 1.0, "n": 1}], False), ([{"at": 1.0, "n": 1}, {"at": 2.0, "n": 1}], False),
     ([{"at": 1.0, "n": 1}, {"at": 2.0, "n": 1}, {"at": 3.0, "n": 2}], True), ([], False)],
)
def test_evidence_that_moves_is_waited_for(samples: list[dict[str, Any]], want: bool) -> None:
    """0.2 % of loss takes 4,491 packets to tell: after 15 s it was INVALID, always."""
    assert is_moving(samples) is want


def test_an_abort_tells_the_holder_itself() -> None:
    """The runner waited for an agent that hung, and only then for the fault's end."""
    told: list[str] = []
    aborted = run(holder=SimpleNamespace(revert_now=lambda: told.append("revert")))
    aborted.abort("by root")
    assert told == ["revert"]
    with pytest.raises(Ended, match="by root"):
        aborted.breathe("fault")


def test_a_lease_that_is_good_no_more_ends_the_run() -> None:
    """This node slept for a minute, another one had begun a drill, and this one went on."""
    stale = SimpleNamespace(fresh=lambda: False, lost="the lease is not ours any more: run x of node y holds it")
    with pytest.raises(Ended, match="run x of node y holds it") as ended:
        run(agent=SimpleNamespace(pages=list), lease=stale).breathe("fault")
    assert not ended.value.early


class StoodStill:
    """A holder whose runner stood still past its lease right while it injected: what it is told then, and finds."""

    def __init__(self, lease: SimpleNamespace, answer: float | None) -> None:
        self.lease_, self.answer = lease, answer
        self.samples, self.process_id = [{"over": True}], SimpleNamespace(pid=41)

    def lease(self, until: float) -> None:
        """It is told how long the lease is good."""

    def inject(self, within_s: float) -> float:
        """A minute passes for all but the runner's own code."""
        self.lease_.fresh = lambda: False
        if self.answer is None:
            raise HolderError(f"the holder gave no answer within {within_s:g} s of `inject`; revert")
        return self.answer


@pytest.mark.parametrize("answer", [None, 5.0])
def test_a_runner_that_stood_still_while_it_injected_is_aborted(answer: float | None) -> None:
    """The disk was still filling as it was stopped: its lease was over, and the report said INVALID, exit 4."""
    lease = SimpleNamespace(fresh=lambda: True, lost="the lease may be another's", good_until=9.0)
    seen = run(agent=SimpleNamespace(pages=list), lease=lease, holder=StoodStill(lease, answer), way_back=None,
               ask_guards=lambda *, again: [], enter=lambda *state, **data: None, tell_node=lambda *told: None,
               record=SimpleNamespace(moment=lambda *told: None), plan=Plan("disk-full", "r", [], [], [], {}), run="r")
    with pytest.raises(Ended, match="the lease may be another's"):
        seen.inject()


def test_a_lost_lease_tells_the_holder_at_once() -> None:
    """The lease's thread knows it first: the fault does not wait for the runner's next second."""
    told: list[str] = []
    holder = SimpleNamespace(revert_now=lambda: told.append("revert"), lease=lambda at: told.append(f"until {at:g}"))
    seen = run(holder=holder)
    seen.lease_renewed(70.0)
    seen.lease_lost("it is another's")
    assert told == ["until 70", "revert"]
    with pytest.raises(Ended, match="it is another's"):
        seen.breathe("fault")


@pytest.mark.parametrize(("left", "told"), [([], ["release d PASS"]), ([Left("x", "rm x")], ["end"])])
def test_what_is_left_keeps_the_lease(left: list[Left], told: list[str]) -> None:
    """ORPHANED: the next node's drill waits until this node has healed."""
    said: list[str] = []
    held = SimpleNamespace(release=lambda drill, verdict: said.append(f"release {drill} {verdict}"),
                           end=lambda: said.append("end"))
    run(lease=held, left=left).give_lease_back(Verdict.PASS)
    assert said == told


def test_a_nap_ends_when_the_run_is_to_stop() -> None:
    """Its turn would come in twenty minutes; `tocsin drill abort` waited for it."""
    start = time.monotonic()
    run(stop_why="by root").nap(1200.0)
    assert time.monotonic() - start < 60.0
