"""What binds an engine: numbers worked out by hand, what truly happened in recordings, and the moment of a change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agent import binds
from agent.backtest import Row, batch_of, name_of
from agent.binds import GpuSeen, Mark, Read, Seen, concurrency_that_fits, judge, mark
from agent.engines.pages import PageReader
from agent.facts import facts_of
from agent.model import Gap, Slo, Why
from agent.node import Node, Setup
from agent.signals import Target
from agent.windows import Windows
from agent.words import binds_lines
from rules import severity_of
from tests.recordings import KV_PRESSURE, STARVED_HOST, rows, truth
from tests.scenes import T0, read, scene, times


def seen(*reads: tuple[Any, ...], **more: Any) -> Seen:
    """A minute of an engine of vLLM's: (running, waiting, KV usage) at each read."""
    of = [Read(*one) for one in reads]
    return Seen("e", more.pop("kind", "vllm"), 60.0, of, more.pop("peak", max((r.running for r in of), default=0.0)),
                **more)


# 16 run, none waits, 12 s of TTFT and 588 s between tokens in a minute: 9.8 decode at a time, 98 % of the time.
DECODES = {"ttft_s": 12.0, "ttft_n": 40.0, "itl_s": 588.0, "itl_n": 29_400.0, "prompt_tokens": 20_000.0,
           "generation_tokens": 29_440.0, "preemptions": 0.0}
FLOWS = {"prompt_tokens": 90_000.0, "generation_tokens": 6_000.0, "preemptions": 0.0}


@pytest.mark.parametrize(("story", "here", "by", "told", "knob"), [
    ("nothing to do", seen((0, 0, 0.0), (0, 0, 0.0), generation_tokens=0.0), "idle", "nothing ran or waited", ""),
    ("asleep", seen(asleep=True), "idle", "asleep", ""),
    ("one read shows no rate", seen((4, 0, 0.2)), "cannot-tell", "1 read so far, it takes 2", ""),
    ("its page is gone", seen(trouble="it does not tell how many are running: refused"), "cannot-tell", "refused", ""),
    ("a full cache and a queue", seen((24, 0, 0.80), (25, 9, 0.97), **FLOWS), "kv-bound",
     "KV cache 97 % full, 9 wait", "more KV blocks: --gpu-memory-utilization"),
    ("victims and no queue", seen((6, 0, 0.9), (5, 0, 0.7), **{**FLOWS, "preemptions": 4.0}), "kv-bound",
     "4 preempted in 60 s", "more KV blocks"),
    ("a well packed engine", seen((24, 0, 0.95), (24, 0, 0.95), **DECODES), "decode-bound", "none waits", "replicas"),
    ("the seats are taken", seen((16, 3, 0.40), (16, 5, 0.42), (16, 7, 0.44), **FLOWS), "sequence-cap",
     "7 wait and exactly 16 run in every read while the KV cache is 44 % full", "--max-num-seqs over 16 (up to 32:"),
    ("one seat is just free", seen(*[(16, 3, 0.4)] * 4, (15, 5, 0.4), **FLOWS), "sequence-cap",
     "5 wait and exactly 16 run in 4 of 5 reads while", "--max-num-seqs over 16"),
    ("more once ran: not the seats", seen((16, 3, 0.4), (16, 5, 0.42), peak=32.0, **FLOWS), "prefill-bound",
     "5 wait while the KV cache is 42 % full and 16 of 32 seats are taken; 1500 prompt tokens/s", "--max-num-batched"),
    ("room, and prompts in the way", seen((6, 2, 0.3), (7, 4, 0.35), **FLOWS), "prefill-bound", "4 wait",
     "--max-num-batched-tokens: larger"),
    ("a wait that nothing explains", seen((6, 2, 0.3), (7, 4, 0.35), prompt_tokens=0.0, generation_tokens=9.0),
     "cannot-tell", "no prompt was computed", ""),
    ("a queue behind an unknown cache", seen((6, 2), (7, 4), **FLOWS), "cannot-tell", "how full its KV cache", ""),
    ("slots, and no cache told", seen((4, 2), (4, 3), kind="llamacpp", generation_tokens=50.0), "sequence-cap",
     "exactly 4 run", "--parallel over 4"),
    ("all time before the first token", seen((3, 0, 0.2), (2, 0, 0.2), ttft_s=90.0, ttft_n=30.0, itl_s=30.0,
                                             itl_n=900.0, prompt_tokens=240_000.0), "prefill-bound",
     "75 % of the requests' time is before their first token (mean 3 s)", "--max-num-batched-tokens"),
    ("decode", seen((16, 0, 0.4), (16, 0, 0.4), **DECODES), "decode-bound",
     "98 % of the requests' time is between tokens, at a batch of 9.8, 20 ms a token", "replicas"),
    ("little arrives", seen((0, 0, 0.0), (1, 0, 0.1), ttft_s=0.6, ttft_n=6.0, itl_s=5.4, itl_n=600.0,
                            generation_tokens=606.0), "idle", "nearly: 0.1 requests", ""),
    ("it waits in the router", seen((2, 0, 0.1), (2, 0, 0.1), router_queue=40.0, **DECODES), "upstream",
     "40 wait in the router", ""),
    ("the GPUs wait", seen((2, 0, 0.1), (2, 0, 0.1), gpus=[GpuSeen(0, 0.0, "heat", util=0.31)], **DECODES), "upstream",
     "busy 31 % of the time", ""),
    ("GPU 3 is hot", seen((16, 0, 0.4), (16, 2, 0.4), gpus=[
        GpuSeen(2, 0.0, "heat", 1980, 1980, 71, 0.9), GpuSeen(3, 0.75, "heat", 1110, 1980, 91, 0.99)], **DECODES),
     "hardware-bound", "GPU 3 was slowed by heat in 75 % of the last 60 s, 91 °C, SM clock 1110 of 1980 MHz and paces",
     ""),
    ("hot and idle", seen((0, 0, 0.0), (0, 0, 0.0), gpus=[GpuSeen(3, 1.0, "heat")]), "idle", "nothing ran", ""),
    ("C030: a livelock", seen((0, 6, 0.0), (0, 6, 0.0)), "cannot-tell", "6 wait and none runs; see engine-stuck", ""),
    ("C043: a hang", seen((3, 0, 0.2), (3, 0, 0.2), prompt_tokens=0.0, generation_tokens=0.0, ttft_n=0.0, itl_n=0.0),
     "cannot-tell", "no token came in 60 s", ""),
    ("it tells neither", seen((3, 0, None), (3, 0, None)), "cannot-tell", "neither first tokens nor gaps", ""),
])
def test_one_verdict_with_its_number_and_its_knob(story: str, here: Seen, by: str, told: str, knob: str) -> None:
    """Who turned the wrong knob made it worse: more seats on a full cache only bought preemptions."""
    found = judge(here)
    assert (found.by, found.name) == (by, binds.NAMES[found.by]), (story, found)
    assert told in found.why, story
    assert found.knob.startswith(knob) if knob else not found.knob, (story, found.knob)
    assert bool(found.no_help) == (by not in ("idle", "cannot-tell")), story


def test_what_would_not_help_is_said() -> None:
    """KV-bound: no larger --max-num-seqs. A full set of seats: no more blocks. SGLang's knobs have SGLang's names."""
    full, seats = seen((9, 4, 0.97), (9, 4, 0.97), **FLOWS), seen((9, 4, 0.4), (9, 4, 0.4), kind="sglang", **FLOWS)
    assert judge(full).no_help.startswith("a larger --max-num-seqs")
    assert (judge(seats).knob[:22], judge(seats).no_help[:14]) == ("--max-running-requests", "more KV blocks")


@pytest.mark.parametrize(("kind", "knob", "no_help"), [
    ("llamacpp", "--batch-size: larger", "a larger --parallel"),  # n_batch bounds the prompts of a step, not n_ubatch
    ("ray-serve-llm", "max_num_batched_tokens (engine_kwargs): larger", "a larger max_num_seqs (engine_kwargs)"),
    ("dynamo-worker", "size of a prefill chunk: larger", "a larger number of sequences at once"),  # of any engine
    ("unknown", "size of a prefill chunk: larger", "a larger number of sequences at once")])
def test_a_knob_that_is_not_sure_is_said_in_words(kind: str, knob: str, no_help: str) -> None:
    """A flag that the engine does not have is worse than none: vLLM's on a worker of SGLang would not start."""
    late = judge(seen((9, 4, 0.4), (8, 4, 0.4), kind=kind, **(FLOWS | {"peak": 16.0})))
    assert late.by == "prefill-bound"
    assert late.knob.startswith(knob)
    assert late.no_help.startswith(no_help)


def test_how_many_fit_is_worked_out_from_those_that_run() -> None:
    """4 run on 80 % of the cache: a fifth each, 4.25 fit under 85 %; 16 on 40 %: 34. None runs: nobody can say."""
    assert concurrency_that_fits(seen((4, 0, 0.8), (4, 0, 0.8))) == 4
    assert concurrency_that_fits(seen((16, 0, 0.4))) == 34
    assert concurrency_that_fits(seen((0, 0, 0.0))) is None
    assert concurrency_that_fits(seen((9, 0, 1e-323), (9, 0, 1e-323))) == 1_000_000_000  # a page that says nonsense
    assert concurrency_that_fits(seen((9, 0, 0.5), (9, 0, -0.5))) == 15


# --- from windows -----------------------------------------------------------------------------------------------------


def test_a_scene_is_looked_at_over_the_last_minute() -> None:
    """16 of 16 seats, 40 % of 1,000 blocks of 16 tokens; what happened before the minute does not count."""
    windows = Windows(5.0)
    for at in times(0, 180):
        queue = 4.0 if at > 120 else 0.0
        read(windows, at, "e", {"running": 16.0, "waiting": queue, "kv_usage": 0.4, "preemptions": min(at, 60.0),
                                "prompt_tokens": 100.0 * at, "generation_tokens": 10.0 * at, "ttft.sum": at * 0.5,
                                "ttft.count": at, "itl.sum": at, "itl.count": at * 20, "kv_blocks": 1000.0,
                                "kv_block_tokens": 16.0})
    here = scene(windows, 180)
    found = binds.look(here, here.targets["e"], "e", "vllm")

    assert (found.preemptions, found.prompt_tokens, found.ttft_s, found.itl_n) == (0.0, 6000.0, 30.0, 1200.0)
    assert (found.peak, found.kv_tokens, len(found.reads)) == (16.0, 16_000.0, 13)
    assert judge(found).by == "sequence-cap"


def test_an_engine_that_came_back_with_fewer_seats_is_judged_by_those() -> None:
    """64 seats until it was started again with 16: "16 of 64 seats are taken" named prefill, where the cap binds."""
    windows = Windows(5.0)
    for at in times(0, 180):
        running, since = (64.0, at) if at < 60 else (16.0, at - 60)
        read(windows, at, "e", {"running": running, "waiting": 4.0, "kv_usage": 0.4, "preemptions": 0.0,
                                "prompt_tokens": 100.0 * since, "generation_tokens": 10.0 * since,
                                "ttft.sum": since * 0.5, "ttft.count": since, "itl.sum": since,
                                "itl.count": since * 20})
    here = scene(windows, 180)
    found = binds.look(here, here.targets["e"], "e", "vllm")

    assert (found.peak, judge(found).by) == (16.0, "sequence-cap")
    assert facts_of(here, here.targets["e"], "e")["sequences"] == 16.0


def test_an_engine_whose_page_is_gone_is_not_judged() -> None:
    """A minute-old queue is no news: the reason stands there instead."""
    windows = Windows(5.0)
    read(windows, 0, "e", {"running": 1.0, "waiting": 0.0})
    read(windows, 5, "e", {"running": None, "waiting": None})
    here = scene(windows, 5)
    found = judge(binds.look(here, here.targets["e"], "e"))
    assert (found.by, found.why) == ("cannot-tell", "it does not tell how many are running: running is nan")
    assert isinstance(windows.latest("e", "running", T0 + 5), Gap)
    assert windows.latest("e", "running", T0 + 5).code is Why.NOT_A_NUMBER  # type: ignore[union-attr]


# What the load generator did there (phases_s of the truth beside the recording), and what a person would say of it.
TRUE_STORIES = [
    (KV_PRESSURE, 20.0, "idle", "idle"),
    (KV_PRESSURE, 110.0, "heavy-kv-pressure", "kv-bound"),  # 28 long requests on a cache for 4
    (KV_PRESSURE, 125.0, "heavy-kv-pressure", "kv-bound"),
    (KV_PRESSURE, 279.0, "idle2", "idle"),
    (STARVED_HOST, 10.0, "idle", "idle"),
    (STARVED_HOST, 64.6, "heavy-kv-pressure", "cannot-tell"),  # no page came
    (STARVED_HOST, 156.1, "heavy-kv-pressure", "kv-bound"),
]


@pytest.mark.parametrize(("recording", "at_s", "phase", "by"), TRUE_STORIES)
def test_what_bound_a_real_engine(recording: str, at_s: float, phase: str, by: str) -> None:
    """What it calls the binding limit is what the load generator was doing to it."""
    facts = truth(recording)
    assert [name for since, name in facts["phases_s"] if since <= at_s][-1] == phase
    node, readers = None, {}
    for one in rows(recording):
        if not at_s - 70 <= one["t"] - facts["start"] <= at_s + 0.1:
            continue
        name = name_of(one["target"])
        if node is None:
            node = Node(Setup("n", 1.0, Slo(), (Target(name, ()),), (), severity_of, raw_keep_s=math.inf))
            readers = {name: PageReader(name)}
        node.take(batch_of(Row(one["t"], one["target"], one["body"], None), one["t"], {one["target"]: name}, readers))
    assert node is not None
    node.step(facts["start"] + at_s + 0.1, 1.0)
    assert [bound.by for bound in node.bounds.values()] == [by], node.bounds


# --- the moment of a change -------------------------------------------------------------------------------------------


def test_a_change_counts_once_it_has_lasted() -> None:
    """decode → KV at 100 s, one read of idle in between: one change, marked with the moment at which it began."""
    told = {0: "cannot-tell", 5: "decode-bound", 50: "idle", 55: "decode-bound", 100: "kv-bound", 130: "kv-bound"}
    known: Mark | None = None
    found = []
    for at in range(0, 140, 5):
        by: Any = told[max(t for t in told if t <= at)]
        known = mark(known, by, float(at))
        found.append((known.by, known.since, known.was))
    assert list(dict.fromkeys(found)) == [
        ("cannot-tell", 0.0, None), ("decode-bound", 5.0, None), ("kv-bound", 100.0, "decode-bound")]


def test_a_line_for_people() -> None:
    """The verdict first, since when and what was before, the number, the knob, what would not help."""
    row = {"engine": "llama", "by": "kv-bound", "name": "KV-bound", "why": "KV cache 97 % full, 9 wait",
           "knob": "more KV blocks: --x", "no_help": "a larger --y", "held": "kv-bound", "since": 100.0,
           "was": "decode-bound"}
    assert binds_lines([row], 220.0)[0] == (
        "What binds llama: KV-BOUND for 2 min (before: decode-bound): KV cache 97 % full, 9 wait. Turn: more KV blocks:"
        " --x. Would not help: a larger --y.")
    assert binds_lines([{**row, "held": "idle", "knob": None, "no_help": None}], 220.0) == [
        "What binds llama: KV-BOUND (just now; before: idle): KV cache 97 % full, 9 wait."]
