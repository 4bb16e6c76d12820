"""The demo's simulated node: heat, clocks and queues by numbers worked out by hand; scenarios and their faults."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from agent.demo import gpus, scenario
from agent.demo.gpus import Gpu, SimulatedGpus
from agent.demo.node import Node
from agent.demo.router import Router
from agent.demo.scheduler import BASE_S, SEQUENCE_S, TOKEN_S, Request, Scheduler, hashes
from agent.demo.story import Narrator, Story, Unmet
from agent.hardware.lines import line_of
from agent.model import Gap, Sample, Why
from agent.strict import ConfigErrors
from tests.needs import find, need
from tests.receiver import Receiver, Reply
from tests.scenes import built_in

RULES = {rule.id: rule.severity for rule in built_in().values()}


def warmed(gpu: Gpu, for_s: float) -> Gpu:
    """So many seconds later."""
    for _ in range(int(for_s / 0.25)):
        gpu.advance(0.25)
    return gpu


# --- heat ---


def test_a_gpu_with_all_its_air_stays_under_its_limit() -> None:
    """700 W at 0.06 K/W over 30 °C are 72 °C, and nothing is slowed."""
    gpu = warmed(Gpu(0, load=1.0), 300)
    assert gpu.temp_c == pytest.approx(72.0, abs=0.1)
    assert (gpu.slowed, gpu.clock_mhz, gpu.slowed_s) == (False, 1980.0, 0.0)
    assert warmed(Gpu(0), 300).temp_c == pytest.approx(34.5, abs=0.1)  # 75 W without load


def test_a_quarter_of_the_air_slows_it_until_it_has_all_again() -> None:
    """By hand: at 89.4 °C the clock is 690 - 60 x 2.4 = 546 MHz, that is 247 W, and 30 + 0.24 x 247 = 89.4 °C."""
    gpu = warmed(Gpu(0, load=1.0, cooling=0.25), 300)
    assert gpu.slowed
    assert gpu.temp_c == pytest.approx(89.4, abs=0.3)
    assert gpu.clock_mhz == pytest.approx(546, abs=20)
    assert gpu.readings()["gpu_margin_c"] == -2
    gpu.cooling = 1.0
    assert not warmed(gpu, 30).slowed
    assert warmed(gpu, 300).temp_c == pytest.approx(72.0, abs=0.1)


def test_the_source_tells_what_the_story_has(tmp_path: Path) -> None:
    """A file of eight; one is off the bus: its numbers are Gaps, and the others' are not."""
    made = [Gpu(index) for index in range(8)]
    made[2].lost = True
    gpus.save(tmp_path / "gpus.json", made)
    now = (tmp_path / "gpus.json").stat().st_mtime
    batch = SimulatedGpus(tmp_path / "gpus.json").read(now + 1)
    assert batch.error is None
    assert batch.gpus is not None
    assert [facts.index for facts in batch.gpus] == list(range(8))
    temps = {reading.subject: reading for reading in batch.readings if reading.name == "gpu_temp_c"}
    assert len(temps) == 8
    lost = temps.pop(made[2].uuid)
    assert isinstance(lost, Gap)
    assert lost.code is Why.LOST
    assert all(isinstance(one, Sample) and one.value == 45 for one in temps.values())


def test_a_demo_that_is_gone_is_no_healthy_node(tmp_path: Path) -> None:
    """The last numbers of a story that was killed would be told for ever."""
    gpus.save(tmp_path / "gpus.json", [Gpu(0)])
    now = (tmp_path / "gpus.json").stat().st_mtime
    batch = SimulatedGpus(tmp_path / "gpus.json").read(now + 60)
    assert batch.readings == ()
    assert "60 s old" in str(batch.error)
    assert SimulatedGpus(tmp_path / "none.json").read(now).error is not None


def test_its_xid_is_a_line_of_the_driver() -> None:
    """Read by the agent's own parser, as from a syslog file."""
    told = gpus.xid_line(Gpu(3), 79, "pid=1, GPU has fallen off the bus.", "2026-11-30T03:00:00+00:00")
    line = line_of(told.split("kernel: ", 1)[1].strip())
    assert line is not None
    assert (line.kind, line.device, line.number) == ("xid", "0000:1e:00", 79)


# --- the engine ---


def words(count: int, start: int = 0) -> list[str]:
    """A prompt."""
    return [f"w{number}" for number in range(start, start + count)]


def request(number: int, prompt: list[str], wanted: int = 4) -> Request:
    """One that came at 0."""
    return Request(number, len(prompt), hashes(prompt), wanted, 0.0)


def test_the_slowest_rank_paces_all() -> None:
    """A prompt of 100 tokens alone: 45 + 0.2 + 2 ms at full clock; with one rank at a quarter, four times that."""
    took_s = BASE_S + SEQUENCE_S + 100 * TOKEN_S
    assert took_s == pytest.approx(0.0472)
    for speeds, factor in (([1.0, 1.0], 1.0), ([1.0, 0.25], 4.0)):
        engine = Scheduler()
        engine.add(request(1, words(100)))
        step = engine.step(speeds)
        assert step is not None
        assert step.took_s == pytest.approx(factor * took_s)
        assert (step.batch, step.graph) == (1, 1)


def test_a_batch_is_padded_to_its_graph_and_beyond_the_largest_it_has_none() -> None:
    """5 run in the graph of 8; 49 are over the largest, 48, and run without one, 1.4 times as long."""
    for count, graph, padded, slower in ((5, 8, 8, 1.0), (48, 48, 48, 1.0), (49, 0, 49, 1.4)):
        engine = Scheduler()
        for number in range(count):
            engine.add(request(number, words(1)))
        step = engine.step([1.0])
        assert step is not None
        assert (step.batch, step.graph) == (count, graph)
        assert step.took_s == pytest.approx(slower * (BASE_S + padded * SEQUENCE_S + count * TOKEN_S))


def test_an_equal_beginning_is_not_computed_twice() -> None:
    """64 shared tokens are 4 blocks: of the second prompt's 80 tokens 16 are new; another beginning has no hit."""
    engine = Scheduler()
    for number, prompt in enumerate((words(80), words(64) + words(16, 1000), words(80, 2000))):
        engine.add(request(number, prompt, wanted=1))
        engine.step([1.0])
    assert (engine.prefix_queries, engine.prefix_hits) == (240, 64)
    assert (engine.free, engine.kv_share) == (engine.blocks, 0.0)


def test_without_a_free_block_the_youngest_goes_back_and_comes_again() -> None:
    """4 blocks, two prompts of 31 tokens (2 blocks each): at the 33rd token the second loses its two, and waits."""
    engine = Scheduler(blocks=4)
    for number in (1, 2):
        engine.add(request(number, words(31, 100 * number), wanted=20))
    served = [step.served for step in iter(lambda: engine.step([1.0]), None) if step is not None]
    assert engine.preemptions == 1
    assert [one.number for one in served[0]] == [1, 2]
    assert [one.number for one in served[2]] == [1]
    assert sum(one.number == 2 for step in served for one in step) == 20  # it got all of its tokens in the end
    assert not engine.waiting


def test_a_client_that_has_gone_frees_its_blocks() -> None:
    """Whether it waited or ran."""
    engine = Scheduler(blocks=4)
    engine.add(request(1, words(50)))
    engine.add(request(2, words(50)))
    engine.step([1.0])
    assert (len(engine.running), len(engine.waiting), engine.free) == (1, 1, 0)
    engine.drop(1)
    engine.drop(2)
    assert engine.free == 4
    assert engine.step([1.0]) is None


# --- scenarios ---


def test_the_own_story_is_one() -> None:
    """With a page, its end, and a drill."""
    story = scenario.read(scenario.STORY, RULES)
    assert story.seed == 7
    assert [step.drill for step in story.steps if step.drill] == ["llama-b"]
    assert {"gpu-thermal-limit", "itl-p99"} == {step.expect.fires for step in story.steps
                                                if step.expect is not None and step.expect.fires}


@pytest.mark.parametrize(
    ("step", "line", "told"),
    [
        ("{cooling: {gpu: 9, share: 10%}}", 4, "steps[1].cooling.gpu: there is no GPU 9; write 0 to 7"),
        ("{say: x, expect: {fires: gpu-temp}}", 4,
         "steps[1].expect.fires: rule 'gpu-temp' is unknown; did you mean gpu-temperature?"),
        ("{say: x, expect: {within: 3s}}", 4,
         "exactly one of fires, resolves, quiet, healthy is wanted, and there is none"),
        ("{say: x, expect: {resolves: xid-note}}", 4,
         "rule 'xid-note' is of severity info, which tells nobody; write a rule that pages or is a ticket"),
        ("{drill: llama-aa}", 4, "steps[1].drill: engine 'llama-aa' is unknown; did you mean llama-a?"),
        ("{kill: llama-a, reset: 1}", 4, "steps[1].kill: reset and kill in one step; make two steps of it"),
        ("{say: x, ask: why}", 4, "steps[1]: ask and answer belong together; add answer"),
        ("{after: 3s}", 4, "steps[1]: nothing happens in this step; add say, expect, or one of cooling"),
        ("{after: 3}", 4, "steps[1].after: missing unit in duration 3; write 3s"),
        ("{cool: {gpu: 1}}", 4, "steps[1].cool"),
        ("{users: 0/s}", 4, "steps[1].users: 0/s must be over 0"),
    ],
)
def test_a_faulty_scenario_says_where_and_what_instead(tmp_path: Path, step: str, line: int, told: str) -> None:
    """A rehearsal that ended after a minute with a traceback was the last one of that team."""
    path = tmp_path / "own.yaml"
    path.write_text(f"name: ours\nsteps:\n  - say: All is well.\n  - {step}\n")
    with pytest.raises(ConfigErrors) as caught:
        scenario.read(path, RULES)
    assert f"{path}:{line}: " in str(caught.value)
    assert told in str(caught.value)


def test_a_scenario_without_steps(tmp_path: Path) -> None:
    """Or one that is no file."""
    (tmp_path / "empty.yaml").write_text(json.dumps({"name": "x", "steps": []}))
    with pytest.raises(ConfigErrors, match="nothing happens; write at least one step"):
        scenario.read(tmp_path / "empty.yaml", RULES)
    with pytest.raises(ConfigErrors, match="cannot be read"):
        scenario.read(tmp_path / "none.yaml", RULES)


def test_make_demo_hands_its_words_on() -> None:
    """`make run` stays the plain agent."""
    need("make")
    for target, wanted in (("demo", ".venv/bin/tocsin demo --headless"), ("run", ".venv/bin/tocsin run --config")):
        shown = subprocess.run([find("make") or "", "-n", target, "ARGS=--headless"], capture_output=True, text=True,
                               cwd=Path(__file__).parents[1], check=True).stdout
        assert wanted in shown


class Answering:
    """A node whose agent answers what the test says."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.receiver = SimpleNamespace(events=[])

    def ask(self, path: str) -> Any:
        return self.answers[path]

    def firing(self) -> list[dict[str, Any]]:
        return [row for row in self.answers["/alerts"] if row["state"] == "firing"]


def expected(answers: dict[str, Any], **wanted: Any) -> str:
    """What a story says that expects this of such an agent. Raises Unmet."""
    out = io.StringIO()
    story = Story(cast(Node, Answering(answers)), Narrator(out, plain=True))
    step = scenario.Step(expect=scenario.Expect(**wanted, within=0.01))
    story._wait = lambda true, within_s: true()  # type: ignore[method-assign]
    story._step(step)
    return out.getvalue()


def test_what_never_fired_is_not_resolved() -> None:
    """It was told as resolved at once; and so was what had been resolved before the play began."""
    past = {"rule": "engine-down", "subject": "llama-a", "state": "resolved", "until": time.time() - 60}
    for rows in ([], [past], [past | {"until": time.time() + 60}, past | {"state": "firing", "until": None}]):
        with pytest.raises(Unmet, match="engine-down is resolved"):
            expected({"/alerts": rows}, resolves="engine-down")
    assert "engine-down is resolved, 0 s later" in expected({"/alerts": [past | {"until": time.time() + 60}]},
                                                            resolves="engine-down")


def test_a_report_that_somebody_else_reads_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page lets one at a time ask drilld, and says 503 to the next; the story failed where two had opened it."""
    busy = urllib.error.HTTPError("http://a/reports/r", 503, "Service Unavailable", Message(), None)
    gone = urllib.error.HTTPError("http://a/reports/r", 404, "Not Found", Message(), None)
    answers: list[Any] = [busy, io.BytesIO(b"whole"), gone]

    def urlopen(*_: object, **__: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    story = Story(cast(Node, Answering({})), Narrator(io.StringIO(), plain=True))
    assert story._report("http://a/reports/r") == b"whole"
    with pytest.raises(Unmet, match="404"):
        story._report("http://a/reports/r")


def test_all_is_well_only_where_the_verdict_says_so() -> None:
    """Nothing fired, and so the story said that all is well; the agent said UNKNOWN to its end."""
    blind = {"rule": "preemptions", "subject": "llama-a", "state": "UNKNOWN", "required": True,
             "why": "watched 134 s of the last 3600 s"}
    quiet: dict[str, Any] = {"/alerts": [], "/check": {"verdict": "unknown", "why": None, "signals": [blind]}}
    with pytest.raises(Unmet, match=r"the verdict is healthy; .*watched 134 s of the last 3600 s"):
        expected(quiet, healthy=True)
    quiet["/check"]["verdict"] = "healthy"
    assert "(/check): the verdict is healthy, 0 s later" in expected(quiet, healthy=True)


# --- the router, where there is no nginx ---


def test_the_small_router_goes_on_to_the_other_engine() -> None:
    """The first of two ports refuses: every request is answered by the second; with none left it says 502."""
    with Receiver() as engine, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead, alive = closed.getsockname()[1], int(engine.url.rpartition(":")[2])
        router = Router(0, [dead, alive])
        try:
            url = f"http://127.0.0.1:{router.server_address[1]}/v1/completions"
            answers = [requests.post(url, json={"prompt": "x"}, timeout=30).status_code for _ in range(4)]
            engine.script(*[Reply(status=429, body=b"later")])
            late = requests.post(url, json={"prompt": "x"}, timeout=30)
        finally:
            router.shutdown()
            router.server_close()
        assert answers == [200] * 4
        assert [arrival.json for arrival in engine.arrivals] == [{"prompt": "x"}] * 5
        assert (late.status_code, late.content) == (429, b"later")
        none = Router(0, [dead])
        try:
            assert requests.get(f"http://127.0.0.1:{none.server_address[1]}/health", timeout=30).status_code == 502
        finally:
            none.shutdown()
            none.server_close()
