"""`tocsin doctor` on golden pages: what a person reads, as it is in tests/golden/doctor; and what it says beside.

`python -m tests.test_doctor` writes those texts anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Config
from agent.daemon import setup_of
from agent.engines.pages import PageReader
from agent.loop import doctor_report
from agent.model import Batch, EngineFacts, FoundEngine, Sample
from agent.node import Node
from agent.show import Table, is_missing
from agent.show import doctor_report as shown
from agent.signals import Target, imbalance
from tests.engine_pages import PAGES
from tests.scenes import SLO, T0, built_in

GOLDEN = Path(__file__).parent / "golden" / "doctor"


def node_of(*batches: Batch) -> Node:
    """A node with one target, `t`, that has had these reads."""
    target = Target("t", (), SLO, address="127.0.0.1:8000", port=8000)
    node = Node(replace(setup_of(Config(node="n"), tuple(built_in().values())), targets=(target,)))
    for batch in batches:
        node.take(batch)
    node.step(T0 + 10, 5.0)
    return node


def text_of(era: str) -> str:
    """What `tocsin doctor` prints of an era's page, unwrapped, one row a line."""
    reader = PageReader("t")
    readings = tuple(reader.read(PAGES[era](600).encode(), "text/plain", T0))
    answer = doctor_report(node_of(Batch("engine:t", T0, 0.0, readings, engine=reader.facts)), {}, 0.0)
    lines = []
    for part in shown(answer):
        if isinstance(part, Table):
            lines += [part.title or "", *("  ".join(row) for row in part.rows)]
        else:
            lines.append(str(part))
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("era", PAGES)
def test_what_a_person_reads(era: str) -> None:
    """Advice that one can follow: the metric of each number, or why there is none and the flag that would give it."""
    assert text_of(era) == (GOLDEN / f"{era}.txt").read_text()


@pytest.mark.parametrize("era", PAGES)
def test_what_an_engine_cannot_tell_is_not_missing(era: str) -> None:
    """doctor ended with 3 on every TGI for ever: it has no first-token histogram, and nobody can give it one."""
    lines = text_of(era).splitlines()
    missing = [line for line in lines if line.startswith("MISSING")]
    wanting = {"vllm-0.7.3-v1", "vllm-muted", "dynamo-worker-silent"}
    assert bool(missing) == (era in wanting), missing
    assert not is_missing({"how": None, "required": True, "code": "not_supported"})
    assert is_missing({"how": None, "required": True, "code": "missing"})


def test_a_hang_that_nobody_would_see_is_said_until_a_canary_is_there() -> None:
    """vLLM's page is green while its core hangs: doctor says so, and what to write."""
    facts = EngineFacts("t", ("t",))
    blind = node_of(Batch("engine:t", T0, 0.0, (Sample("running", "t", 0.0, T0),), engine=facts)).advice("t")
    assert 'probe.canary: {urls: ["http://127.0.0.1:8000"]} would show it' in blind[0]
    canary = Batch("canary:x", T0, 0.0, (Sample("canary_age_s", "t", 0.0, T0),))
    assert node_of(Batch("engine:t", T0, 0.0, (), engine=facts), canary).advice("t") == []
    in_flight = Sample("router_worker_inflight", "edge", 0.0, T0, "http://127.0.0.1:8000")
    routed = Batch("router:edge", T0, 0.0, (in_flight,), router=EngineFacts("edge", ()))
    assert node_of(Batch("engine:t", T0, 0.0, (), engine=facts), routed).advice("t") == []


def test_c034_fast_and_slow_ranks_are_named_and_no_mean_hides_them() -> None:
    """Eight data-parallel ranks, three of them four times as fast: max/min 4.0; 3, 4 and 5; 601.40 together."""
    ranks = [35.42, 35.43, 35.42, 141.75, 141.74, 140.76, 35.44, 35.44]
    found = imbalance({f"t/{i}": value for i, value in enumerate(ranks)})
    assert found is not None
    assert round(found["max_over_min"], 1) == 4.0
    assert found["fast"] == ["t/3", "t/4", "t/5"]
    assert found["total"] == pytest.approx(601.40)
    page = "".join(f'sglang:gen_throughput{{dp_rank="{i}",engine_type="unified"}} {value}\n'
                   for i, value in enumerate(ranks))
    reader = PageReader("t")
    readings = tuple(reader.read(page.encode(), "text/plain", T0))
    said = node_of(Batch("engine:t", T0, 0.0, readings, engine=reader.facts)).advice("t")[-1]
    assert "601.40 tokens/s together, largest ÷ smallest 4.0, fast: t/3, t/4, t/5" in said


@pytest.mark.parametrize("values", [{}, {"t": 1.0}, {"t/0": 0.0, "t/1": 3.0}])
def test_no_two_ranks_no_spread(values: dict[str, float]) -> None:
    """One rank, or one that stands still: nothing to divide by."""
    assert imbalance(values) is None


def test_what_discovery_found_says_how() -> None:
    """Nobody configured it, and somebody will ask where it came from."""
    node = node_of()
    node.see([FoundEngine("127.0.0.1:9", "http://127.0.0.1:9", "vllm", "its command line (process 7)", 9)], T0)
    node.add_target(Target("127.0.0.1:9", (), SLO, address="127.0.0.1:9", port=9))
    assert node.advice("127.0.0.1:9")[0] == "found by its command line (process 7); nobody configured it"


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for era in PAGES:
        (GOLDEN / f"{era}.txt").write_text(text_of(era))


if __name__ == "__main__":
    main()
