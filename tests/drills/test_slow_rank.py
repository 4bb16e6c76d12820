"""slow-rank on the NVML stand-in: the limit reads back, is put back by the ledger alone; nobody else's is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from drills.faults import slow_rank
from drills.faults.slow_rank import FAULT
from drills.model import Drill, Left, Refused
from tests.drills.gpu_scene import NODE, OTHER, UUID, Node
from tests.needs import need

RUN = "slow-20261129T210000Z-ab12"


def scenario(limit_w: float, own_clock: int = 1980, load: int = 97) -> dict[str, Any]:
    """Two GPUs; the second one's limit is what nvidia-smi sets."""
    own = {**NODE["gpus"][1], "own_w": 0, "power_limit_w": limit_w, "sm_clock": own_clock}
    defaults = {**NODE["defaults"], "utilization": load}
    defaults.pop("power_limit_w")
    return {"defaults": defaults, "gpus": [{**NODE["gpus"][0], "power_limit_w": 700}, own]}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node with two GPUs under load."""
    need("gcc", "make")
    monkeypatch.setattr(slow_rank, "SAMPLE_EVERY_S", 0.0)
    with ExitStack() as stack:
        made = Node(tmp_path, monkeypatch, stack)
        made.play(scenario(700))
        yield made


def drill(share: float | None = None, **target: Any) -> Drill:
    """As drills.config makes it."""
    whole = {"engine": "llama", "gpus": [0, 1], "part": "rank:1", **target}
    return Drill("d", "slow-rank", target=whole, params={} if share is None else {"share": share})


def test_slowed_proven_and_as_before(node: Node) -> None:
    """One rank of two got 420 of its 700 W; its clock fell under load, and afterwards it has them again."""
    plan = FAULT.plan(drill(share=0.6), RUN)
    assert plan.targets == [f"{OTHER} (index 1), one of 2 GPUs of the engine"]
    assert [command.text for command in plan.commands] == [f"nvidia-smi -i {OTHER} -pl 420"]
    assert node.asked() == []
    held = FAULT.inject(plan, ())
    assert node.asked() == [f"-i {OTHER} -pl 420"]
    idle = held.sample()
    node.play(scenario(420, own_clock=1400))
    assert FAULT.proven(plan, [idle]) == (
        False, "the power limit reads back as 420 W (was 700 W) in 1 samples; its clock is that of its peers")
    told = "the power limit reads back as 420 W (was 700 W) in 2 samples; busy, its SM clock was down to 1400 MHz"
    assert FAULT.proven(plan, [idle, held.sample()]) == (True, f"{told} beside 1980 MHz")
    assert FAULT.left(plan) == [
        Left(f"the power limit of {OTHER} is 420 W, it was 700 W", f"nvidia-smi -i {OTHER} -pl 700")]
    held.undo()
    held.undo()
    FAULT.undo(plan)
    assert FAULT.left(plan) == []
    assert node.asked()[1:] == [f"-i {OTHER} -pl 700"]


@pytest.mark.heavy
def test_undone_from_the_ledger_alone(node: Node) -> None:
    """The limit outlives every process: whoever reads the plan puts it back. One that somebody set since is theirs."""
    plan = FAULT.plan(drill(), RUN)
    assert plan.facts["limit_w"] == 200.0
    node.play(scenario(200))
    FAULT.undo(plan)
    assert node.asked() == [f"-i {OTHER} -pl 700"]
    node.play(scenario(650))
    FAULT.undo(plan)
    assert FAULT.left(plan) == []
    assert len(node.asked()) == 1
    node.play({"errors": {"nvmlInitWithFlags": 9}, "gpus": []})
    with pytest.raises(Refused, match="NVML: "):  # not known is not clean
        FAULT.left(plan)


@pytest.mark.heavy
def test_what_cannot_be_slowed(node: Node) -> None:
    """One GPU alone, a rank that there is not, a limit that is the least already, one that changed since the plan."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gpus": [0]}, "two GPUs or more: the engine has 1"), ({"part": "rank:2"}, "rank:0 to rank:1"),
        ({"gpus": [0, 7]}, "GPU 7 is not listed"), ({"gpu": "GPU-x"}, "is not one of the engine's"),
    ]  # fmt: skip
    for target, said in wrong:
        with pytest.raises(Refused, match=said):
            FAULT.plan(drill(**target), RUN)
    plan = FAULT.plan(drill(gpu=UUID), RUN)
    assert plan.facts["uuid"] == UUID
    plan = FAULT.plan(drill(), RUN)
    node.play(scenario(650))
    with pytest.raises(Refused, match=r"has a limit of 650\.0 W, and had 700 W in the plan"):
        FAULT.inject(plan, ())
    node.play(scenario(200))
    with pytest.raises(Refused, match="200 W are its limit, and 200 W would be: nothing to do"):
        FAULT.plan(drill(), RUN)


@pytest.mark.heavy
def test_a_driver_that_refuses(node: Node) -> None:
    """Without root the driver says no, and nothing was touched."""
    plan = FAULT.plan(drill(), RUN)
    (node.folder / "refuses").touch()
    with pytest.raises(Refused, match=r"-pl 200: Insufficient Permissions \(exit 4\); it needs root"):
        FAULT.inject(plan, ())
    assert FAULT.left(plan) == []


def test_what_proves_it(node: Node) -> None:
    """A limit that the driver did not take, and a GPU on which nothing ran, prove nothing."""
    plan = FAULT.plan(drill(share=0.5), RUN)
    rows = {UUID: [700.0, 1980.0, 97.0], OTHER: [350.0, 1500.0, 97.0]}
    assert FAULT.proven(plan, [])[1] == "no sample was taken"
    assert FAULT.proven(plan, [{"gpus": rows}])[0]
    assert FAULT.proven(plan, [{"gpus": {**rows, OTHER: [700.0, 1980.0, 97.0]}}])[1] == (
        "the power limit read back as 700.0 W, asked 350 W")
    idle = {**rows, UUID: [700.0, 345.0, 0.0]}
    assert FAULT.proven(plan, [{"gpus": idle}])[1].endswith("it was never busy beside busy peers")
