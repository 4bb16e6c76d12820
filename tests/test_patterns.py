"""The eight deployment patterns: each recognised or chosen, its watch list on a right and on a wrong deployment.

Every number is worked out by hand in the story that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import patterns
from agent.config import ConfigErrors, load_all
from agent.engines import load_map
from agent.engines.pages import PageReader
from agent.loop import Collector, tell_sources
from agent.model import Batch, EngineFacts, Gap, GpuFacts, Sample, Why
from agent.node import Node, Setup
from agent.patterns import FEEDS, PATTERNS, Seen, parse, recognise
from agent.show import doctor_report, plain
from agent.signals import CATALOGUE, Target
from agent.sources.engine import EngineSource
from agent.words import told as in_words
from rules import severity_of
from tests.scenes import SLO, T0, built_in, hist, samples

Numbers = Mapping[str, float | None]
Tell = Callable[[float], Mapping[str, Numbers]]
CALM: dict[str, float | None] = {"running": 4.0, "waiting": 0.0, "kv_usage": 0.3, "asleep": 0.0}
RULES = tuple(rule for rule in built_in().values() if rule.patterns or rule.id in ("queue-age", "engine-down"))


class World:
    """A node, its targets (name -> facts), and a clock. `sources`: PromQL sources of these names, by this label."""

    def __init__(self, facts: Mapping[str, EngineFacts], pattern: str | None = None, sources: tuple[str, ...] = (),
                 gpus: int = 0, label: str = "n") -> None:
        self.label = label
        targets = tuple(Target(name, (), SLO, address=name, gpus=tuple(range(gpus))) for name in facts)
        self.facts, self.pattern = facts, pattern
        self.node = Node(Setup("gpu-17", 5.0, SLO, targets, RULES, severity_of, sourced=sources,
                               patterns=None if pattern is None else parse(pattern)))
        for n in range(gpus):
            self.node.gpus[f"GPU-{n}"] = GpuFacts(f"GPU-{n}", n, "H200", f"0000:{n:02x}:00")
        self.fired: dict[str, float] = {}  # rule -> when it fired first

    def play(self, start_s: float, end_s: float, tell: Tell, step_s: float = 5.0) -> World:
        """Read and judge from one second to another. What is told of a subject belongs to the target before its /."""
        at_s = start_s
        while at_s <= end_s:
            at, told = T0 + at_s, tell(at_s)
            for name, facts in self.facts.items():
                of_it = {s: numbers for s, numbers in told.items() if s in (name, *facts.engines)}
                readings = tuple(r for s, numbers in of_it.items() for r in samples(s, at, numbers))
                self.node.take(Batch(f"engine:{name}", at, 0.0, readings, engine=facts))
            for source in self.node.setup.sourced:
                told_of = told.get(source, {})
                readings = tuple(r for n, value in told_of.items()
                                 for r in samples(f'{source}{{{self.label}="{n}"}}', at, {"sourced": value}))
                self.node.take(Batch(f"promql:{source}", at, 0.0, readings))
            for change in self.node.step(at, step_s):
                if change.kind == "firing":
                    self.fired.setdefault(change.alert.rule, at_s)
            at_s += step_s
        return self

    def text(self, rule: str, subject: str = "gpu-17") -> str:
        """What was measured, in words."""
        return in_words(self.node.signals[rule, subject]) or str(self.node.signals[rule, subject].why)

    def state(self, rule: str, subject: str = "gpu-17") -> str:
        """The state of a signal."""
        return self.node.signals[rule, subject].state


def engine(name: str, model: str = "llama", *indices: int, role: str = "", shows: Mapping[int, str] | None = None,
           ) -> EngineFacts:
    """What a target says of itself."""
    return EngineFacts(name, tuple(f"{name}/{n}" for n in indices) or (name,), "vllm", model, "b", shows=shows or {},
                       role=role)


def world(*names: str, **more: Any) -> World:
    """Targets of one model."""
    return World({name: engine(name) for name in names}, **more)


# --- recognising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("targets", "routers", "gpus", "sources", "found"), [
    ([Seen("a", "llama", gpus=1)], {}, 1, (), {1: "one engine (a) on one GPU, and no router"}),
    ([Seen("a", "llama", gpus=4)], {}, 4, (), {}),
    ([Seen("a", "llama")], {}, 8, (), {}),
    ([Seen("a", "llama")], {}, 1, (), {1: "one engine (a) on no GPU that is seen, and no router"}),
    ([Seen("a", "llama"), Seen("b", "llama")], {"edge": 2}, 2, (),
     {2: "2 replicas of llama (a, b) behind the router edge"}),
    ([Seen("a", "llama"), Seen("b", "qwen")], {}, 2, (), {}),
    ([Seen("a", "llama")], {"edge": 3}, 1, (), {2: "3 replicas that the router edge tells of"}),
    ([Seen("a", "llama", ranks=16, gpus=8)], {}, 8, (), {3: "16 ranks of a on a node of 8 GPUs"}),
    ([Seen("a", "moe", shows={4: "sglang:eplb_balancedness"})], {}, 8, (),
     {4: "sglang:eplb_balancedness on the page of a"}),
    ([Seen("p", "llama", role="prefill"), Seen("d", "llama", role="decode")], {"edge": 2}, 8, (),
     {5: "p, which is a prefill engine"}),
    ([], {}, 0, ("expert-load", "orders"), {4: "the source expert-load"}),
    ([], {}, 0, (), {}),
])
def test_a_pattern_is_recognised_from_what_is_there(targets: list[Seen], routers: dict[str, int], gpus: int,
                                                    sources: tuple[str, ...], found: dict[int, str]) -> None:
    """Two engines of other models are no replicas of one another; prefill and decode are not, either."""
    assert recognise(targets, routers, gpus, sources) == found


@pytest.mark.parametrize(("text", "numbers"), [
    ("2", (2,)), ("pd-disaggregated", (5,)), ("replicas + hierarchical-cache", (2, 7)), ("2+2", (2,))])
def test_a_pattern_is_written_by_number_or_word(text: str, numbers: tuple[int, ...]) -> None:
    """`pattern:` in tocsin.yaml."""
    assert parse(text) == numbers


def test_an_unknown_pattern_is_refused_with_the_nearest(tmp_path: Path) -> None:
    """`pattern: replica`."""
    file = tmp_path / "tocsin.yaml"
    file.write_text("pattern: replica\n")
    with pytest.raises(ConfigErrors, match=r"tocsin.yaml:1: pattern: 'replica' is no deployment pattern; did you mean"):
        load_all(file, {}, CATALOGUE)


def test_a_rule_for_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    """It would run nowhere, and nobody would know."""
    (tmp_path / "r.yaml").write_text(
        "- {id: mine, patterns: [9], signal: swapped, fires: '> 1', severity: ticket}\n")
    (tmp_path / "tocsin.yaml").write_text(f"rules: {{dirs: [{tmp_path / 'd'}]}}\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "r.yaml").rename(tmp_path / "d" / "r.yaml")
    with pytest.raises(ConfigErrors, match=r"r.yaml:1: mine.patterns\[0\]: there is no pattern 9; write one of 1 to 8"):
        load_all(tmp_path / "tocsin.yaml", {}, CATALOGUE)


def test_every_rule_of_a_pattern_is_on_its_watch_list_and_every_name_there_is_a_rule() -> None:
    """A rule that no list names is found by nobody; a list that names no rule promises what is not there."""
    folder = Path(__file__).resolve().parents[1] / "rules"
    all_rules = {rule["id"]: rule for path in folder.rglob("*.yaml") for rule in yaml.safe_load(path.read_text())}
    listed = {rule for pattern in PATTERNS.values() for item in pattern.watch for rule in item.rules}
    assert listed <= all_rules.keys()
    for name, rule in all_rules.items():
        for number in rule.get("patterns", ())[:1]:
            assert any(name in item.rules for item in PATTERNS[number].watch), name
    assert all(item.rules or item.gap for pattern in PATTERNS.values() for item in pattern.watch)
    assert {feed.rule for feed in FEEDS.values()} <= all_rules.keys()
    assert sorted(PATTERNS) == list(range(1, 9))


def test_rules_run_only_where_their_pattern_is_and_nothing_is_computed_elsewhere() -> None:
    """Two replicas make pattern 2: its rules come, those of one device go, and what fired of them is closed."""
    here = world("a")
    here.play(0, 40, lambda _: {"a": CALM})
    assert here.node.deployment == {1: "recognised from one engine (a) on no GPU that is seen, and no router"}
    assert {rule for rule, _ in here.node.signals} == {"queue-age", "engine-down", "cpu-preprocessing",
                                                       "cold-start-slow"}
    both = world("a", "b").play(0, 40, lambda _: {"a": CALM, "b": CALM})
    assert both.node.deployment == {2: "recognised from 2 replicas of llama (a, b)"}
    assert "cache-fragmented" in {rule for rule, _ in both.node.signals}
    assert "experts-hot" not in {rule for rule, _ in both.node.signals}


def test_a_restart_of_the_agent_forgets_no_pattern() -> None:
    """Until the engines were read again no rule of the pattern was there, and its alert closed."""
    here = world("a", "b").play(0, 40, lambda _: {"a": CALM, "b": CALM})
    again = world("a", "b")
    again.node.restore(here.node.book, {"patterns": here.node.learned.patterns, "targets": here.node.learned.targets})
    again.node.step(T0 + 45, 5.0)
    assert list(again.node.deployment) == [2]
    again.node.step(T0 + 45 + 700, 5.0)  # ten minutes without any sign of it
    assert again.node.deployment == {}


def test_check_and_doctor_say_the_pattern_and_its_watch_list() -> None:
    """Which one, whence it is known, by which rule each thing is watched, and what nobody can tell."""
    here = world("a", pattern="expert-parallel").play(0, 40, lambda _: {"a": CALM})
    said = here.node.check()["patterns"]
    assert [one["text"] for one in said] == ["pattern 4, experts on several GPUs (expert-parallel): as `pattern:` says"]
    shown = plain(doctor_report({"targets": [], "gpus": [{"uuid": "g", "found": []}], "sources": [], "patterns": said}))
    assert ("  watch hot experts: experts-hot UNKNOWN (load by expert is on no page here (SGLang tells its balance with"
            " --expert-balancedness-report-mode prometheus; vLLM only logs it): a PromQL or JSON source named"
            " expert-load would tell it (one series a expert or expert rank: tokens that it was given in the query's"
            " window))") in shown
    assert "  watch network rails: not told: the network cards' counters are node_exporter's" in shown


# --- 1: one device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "fires"), [(0.97, True), (0.4, False)])
def test_1_the_front_end_is_out_of_cpu(share: float, fires: bool) -> None:
    """0.97 s of CPU a second: over 0.90 of a core for 2 min. At 0.4 it is quiet."""
    here = world("a").play(0, 600, lambda at: {"a": CALM | {"frontend_cpu": share * at}})
    assert ("cpu-preprocessing" in here.fired) is fires
    assert here.node.signals["cpu-preprocessing", "a"].value == pytest.approx(share)


def test_1_without_the_cpu_time_of_the_front_end_it_is_a_gap_that_says_what_would_tell() -> None:
    """Several API servers write one page: none of them its CPU time."""
    here = world("a").play(0, 40, lambda _: {"a": CALM})
    assert here.state("cpu-preprocessing", "a") == "gap"
    assert "process-exporter" in here.text("cpu-preprocessing", "a")


def cpu_read(page: PageReader, at: float) -> list[float]:
    """The CPU time that one more read of a vLLM's page tells."""
    text = "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 1\nprocess_cpu_seconds_total 7\n"
    return [r.value for r in page.read(text.encode(), "text/plain", at)
            if r.name == "frontend_cpu" and isinstance(r, Sample)]


def test_1_the_front_end_s_cpu_is_read_where_a_pattern_is() -> None:
    """It was read of every engine on every node, and stood in every doctor, though no rule asked for it."""
    page, collector = PageReader("a"), Collector([EngineSource("a", "http://127.0.0.1:1")])
    (slot,) = collector.slots.values()
    nowhere, one = Node(Setup("gpu-17", 5.0, SLO, (), RULES, severity_of)), world("a", pattern="one-device").node
    told: list[object] = []
    for node in (nowhere, one):
        tell_sources(node, collector)
        assert slot.by_pattern is not None
        told.append(slot.by_pattern.is_patterned)
        if told[-1]:
            page.read_patterns()
        told.append(cpu_read(page, T0))
    assert told == [False, [], True, [7.0]]


@pytest.mark.parametrize(("cold_s", "fires"), [(2.0, True), (0.5, False)])
def test_1_the_first_requests_after_a_start_wait_longer(cold_s: float, fires: bool) -> None:
    """2 s in the first 5 min against 0.4 s later is 5 times; 0.5 s against 0.4 s is 1.25 times."""
    def tell(at: float) -> Mapping[str, Numbers]:
        n = at  # a request a second
        total = min(at, 300) * cold_s + max(0.0, at - 300) * 0.4
        return {"a": CALM | {"process_start": T0, **hist("ttft", {"+Inf": n}, total)}}

    here = world("a").play(0, 1300, tell, 15.0)
    assert ("cold-start-slow" in here.fired) is fires
    assert here.node.signals["cold-start-slow", "a"].value == pytest.approx(cold_s / 0.4, rel=0.02)


# --- 2: replicas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "fires"), [(0.2, True), (0.55, False)])
def test_2_fragmented_caches(share: float, fires: bool) -> None:
    """One replica finds 60 % of its tokens, the other 20 % (40 points apart) or 55 % (5)."""
    def tell(at: float) -> Mapping[str, Numbers]:
        return {name: CALM | {"prefix_queries": 100 * at, "prefix_hits": 100 * at * hits, "preemptions": 0.0}
                for name, hits in (("a", 0.6), ("b", share))}

    here = world("a", "b").play(0, 1500, tell, 15.0)
    assert ("cache-fragmented" in here.fired) is fires
    assert here.node.signals["cache-fragmented", "gpu-17"].value == pytest.approx(0.6 - share)


def test_2_replicas_that_started_together_and_one_by_one() -> None:
    """At 1000 s both start anew (a node's reboot): a ticket. Ten minutes apart: none."""
    def tell(apart_s: float) -> Tell:
        starts = {"a": 1000.0, "b": 1000.0 + apart_s}
        return lambda at: {name: CALM | {"process_start": T0 + (s if at >= s else -9000)} for name, s in starts.items()}

    together = world("a", "b").play(900, 1100, tell(60))
    assert together.fired["restarts-together"] == 1060
    assert together.text("restarts-together") == "2 replicas started within 5 min: a, b"
    assert "restarts-together" not in world("a", "b").play(900, 2000, tell(600), 15.0).fired


@pytest.mark.parametrize(("late", "fires"), [("both", True), ("one", False)])
def test_2_overload_everywhere(late: str, fires: bool) -> None:
    """From 100 s on requests wait and none begins: at both replicas, or at one that routing could spare."""
    def tell(at: float) -> Mapping[str, Numbers]:
        stuck = {"waiting": 5.0 if at > 100 else 0.0, "ttft.count": 50.0}
        fine = {"waiting": 0.0, "ttft.count": 50.0 + at}
        return {"a": CALM | stuck, "b": CALM | (stuck if late == "both" else fine)}

    here = world("a", "b").play(0, 200, tell)
    assert ("overload-everywhere" in here.fired) is fires
    assert "queue-age" in here.fired
    assert next(r for r in RULES if r.id == "overload-everywhere").severity == "ticket"


def test_2_a_replica_whose_numbers_are_lost_neither_fires_nor_resolves() -> None:
    """b finds 20 % and a and c 60 %: fired. From 1500 s on b's numbers are unreadable: a and c resolve nothing."""
    def tell(at: float) -> Mapping[str, Numbers]:
        told = {name: CALM | {"prefix_queries": 100 * at, "prefix_hits": 100 * at * hits}
                for name, hits in (("a", 0.6), ("b", 0.2), ("c", 0.6))}
        return told if at < 1500 else told | {"b": CALM | {"prefix_queries": None, "prefix_hits": None}}

    here = world("a", "b", "c").play(0, 4000, tell, 15.0)
    assert here.state("cache-fragmented") == "gap"
    assert here.node.book.alerts["cache-fragmented", "gpu-17"].state == "firing"


@pytest.mark.parametrize(("source", "rule", "before", "after", "fires"), [
    ("feature-transfer-failures", "feature-transfer-failed", {"e0": 2.0, "e1": 0.0}, {"e1": 0.0}, True),
    ("pipeline-bubble", "pipeline-bubble", {"0": 0.4, "1": 0.0}, {"1": 0.0}, True),
    ("expert-load", "experts-hot", {"0": 400.0, "1": 100.0, "2": 100.0}, {"1": 100.0, "2": 100.0}, True),
    ("weights-version", "weights-stale", {"trainer": 9.0, "a": 7.0, "b": 7.0}, {"a": 7.0, "b": 7.0}, True),
    ("replica-queue-age", "overload-everywhere", {"0": 9.0, "1": 9.0, "2": 0.0}, {"0": 9.0, "1": 9.0}, False),
])
def test_a_series_that_vanishes_neither_fires_nor_resolves(source: str, rule: str, before: dict[str, float],
                                                           after: dict[str, float], fires: bool) -> None:
    """At 1500 s the one series that made the alert, or kept it from firing, is not in the answer any more."""
    here = world("a", sources=(source,)).play(
        0, 4000, lambda at: {"a": CALM, source: before if at < 1500 else {**dict.fromkeys(before), **after}}, 15.0)
    assert here.state(rule) == "gap"
    assert (rule in here.fired) is fires
    assert ((rule, "gpu-17") in here.node.book.alerts) is fires


def test_a_series_whose_target_has_ended_is_no_member_any_more() -> None:
    """Else each replica that was taken away would make it a Gap for a day."""
    here = world("a", "b", sources=("weights-version",))
    here.play(0, 60, lambda _: {"a": CALM, "b": CALM, "weights-version": {"trainer": 3.0, "a": 3.0, "b": 3.0}})
    here.node.drop_target("b")
    here.facts = {"a": engine("a")}
    here.play(65, 100, lambda _: {"a": CALM, "weights-version": {"trainer": 3.0, "a": 3.0, "b": None}})
    assert (here.state("weights-stale"), here.node.signals["weights-stale", "gpu-17"].value) == ("value", 0.0)


@pytest.mark.parametrize(("story", "label", "others", "ends"), [
    ("a rollout: b7 is there in the place of a4", "pod", {"b7": 3.0}, True),
    ("that of a rank, a host or a stage comes back", "n", {"b7": 3.0}, False),
    ("a Prometheus that scrapes no pod any more has seen none end", "pod", {}, False),
])
def test_the_series_of_a_pod_ends_with_it(story: str, label: str, others: Mapping[str, float], ends: bool) -> None:
    """a4 is told until 100 s: after each rollout every rule of the source was a Gap for a day; now for ten minutes."""
    here = world("a", sources=("replica-queue-age",), pattern="replicas", label=label)

    def tell(at: float) -> Mapping[str, Numbers]:
        told = {"a4": 3.0, "b6": 3.0} if at <= 100 else {"a4": None, "b6": 3.0 if others else None, **others}
        return {"a": CALM, "replica-queue-age": told}

    here.play(0, 700, tell, 20.0)
    assert here.state("overload-everywhere") == "gap", story
    here.play(720, 740, tell, 20.0)
    assert here.state("overload-everywhere") == ("value" if ends else "gap"), story


def test_2_everywhere_is_everywhere_that_answers() -> None:
    """c is down from 100 s on, and a and b have the load of three: it was a Gap for as long as c was down."""
    def tell(at: float) -> Mapping[str, Numbers]:
        stuck = CALM | {"waiting": 5.0 if at > 100 else 0.0, "ttft.count": 50.0, "down": 0.0}
        return {"a": stuck, "b": stuck, "c": stuck if at < 100 else {"down": 1.0}}

    here = world("a", "b", "c").play(0, 150, tell)
    assert {"engine-down", "overload-everywhere"} <= here.fired.keys()
    assert here.text("overload-everywhere").startswith("each of 2 replicas has a request that has queued")
    assert here.text("overload-everywhere").endswith("; 1 more do not answer (engine-down)")


def test_2_one_replica_on_a_node_is_judged_by_a_source_or_a_gap_that_names_it() -> None:
    """The others are on other nodes: their hit ratios come from the Prometheus that sees all."""
    alone = world("a", pattern="replicas").play(0, 40, lambda _: {"a": CALM})
    assert alone.state("cache-fragmented") == "gap"
    assert "a PromQL or JSON source named replica-hit-ratio would tell it" in alone.text("cache-fragmented")
    fed = world("a", pattern="replicas", sources=("replica-hit-ratio", "replica-uptime", "replica-queue-age"))
    fed.play(0, 700, lambda _: {"a": CALM, "replica-hit-ratio": {"0": 0.7, "1": 0.2},
                                "replica-uptime": {"0": 70, "1": 9}, "replica-queue-age": {"0": 1.5, "1": 0.9}}, 15.0)
    assert {"cache-fragmented", "restarts-together", "overload-everywhere"} <= fed.fired.keys()
    assert fed.node.signals["cache-fragmented", "gpu-17"].value == pytest.approx(0.5)
    assert fed.node.signals["overload-everywhere", "gpu-17"].value == 0.9


# --- 3: several nodes -------------------------------------------------------------------------------------------------


def test_3_a_rank_that_is_gone_and_one_that_never_came() -> None:
    """Four ranks told their time; from 60 s on rank 2 does not. Of a group of four only three ever did."""
    def ranks(*names: str, size: float = 4.0) -> dict[str, float | None]:
        return {**{f"probe_rank_seconds.{rank}": 1.0 for rank in names}, "probe_tp_size": size}

    gone = world("a", pattern="multi-node").play(
        0, 200, lambda at: {"a": CALM | ranks("0", "1", "3", *(() if at >= 60 else ("2",)))})
    assert gone.fired["members-missing"] == 120
    assert gone.text("members-missing", "a") == "missing: rank 2 of a"
    never = world("a", pattern="multi-node").play(0, 100, lambda _: {"a": CALM | ranks("0", "1", "3")})
    assert never.text("members-missing", "a") == "missing: 1 of 4 ranks of a"
    whole = world("a", pattern="multi-node").play(0, 100, lambda _: {"a": CALM | ranks("0", "1", "2", "3")})
    assert (whole.text("members-missing", "a"), whole.fired) == ("all 4 are there", {})


def test_3_no_rank_is_missing_where_the_probe_is_lost_or_the_group_was_made_smaller() -> None:
    """From 60 s on the probe's numbers are no numbers; or TP4 comes back as TP2, with ranks 0 and 1."""
    def probe(at: float) -> Mapping[str, Numbers]:
        ranks: dict[str, float | None] = {f"probe_rank_seconds.{n}": 1.0 for n in range(4)}
        return {"a": CALM | (ranks if at < 60 else {"probe_rank_seconds": None})}

    lost = world("a", pattern="multi-node").play(0, 300, probe)
    assert (lost.fired, lost.state("members-missing", "a")) == ({}, "gap")

    def smaller(at: float) -> Mapping[str, Numbers]:
        size = 4 if at < 60 else 2
        return {"a": CALM | {f"probe_rank_seconds.{n}": 1.0 for n in range(size)} | {"probe_tp_size": float(size)}}

    less = world("a", pattern="multi-node").play(0, 300, smaller)
    assert (less.fired, less.text("members-missing", "a")) == ({}, "all 2 are there")


def test_3_the_second_node_has_the_upper_indices() -> None:
    """Of data-parallel engines 0 to 7 this node serves 4 to 7; the page shows 4, 5 and 7."""
    here = World({"a": engine("a", "llama", 4, 5, 7)}, "3").play(0, 40, lambda _: {f"a/{n}": CALM for n in (4, 5, 7)})
    assert here.text("members-missing", "a") == "missing: engine index 6"


def test_3_an_engine_index_that_is_gone() -> None:
    """vllm-ascend#10049: of data-parallel engines the page shows a part; index 1 of 0 to 2 is missing."""
    here = World({"a": engine("a", "llama", 0, 2)}, "multi-node")
    here.play(0, 100, lambda _: {"a/0": CALM, "a/2": CALM})
    assert here.text("members-missing", "a") == "missing: engine index 1"
    lost = World({"a": engine("a", "llama", 0, 1)}, "3")
    lost.play(0, 200, lambda at: {"a/0": CALM} | ({"a/1": CALM} if at < 60 else {"a/1": {"running": None}}))
    assert lost.text("members-missing", "a") == "missing: engine a/1"
    assert "members-missing" in lost.fired
    untold = world("a", pattern="3").play(0, 40, lambda _: {"a": CALM})
    assert untold.state("members-missing", "a") == "gap"
    assert "tocsin-probe" in untold.text("members-missing", "a")


@pytest.mark.parametrize(("share", "fires"), [(0.4, True), (0.1, False)])
def test_3_pipeline_bubbles_come_from_a_source_or_are_a_gap(share: float, fires: bool) -> None:
    """Stage 1 waits 40 % of the time, or 10 %."""
    here = world("a", sources=("pipeline-bubble",)).play(
        0, 700, lambda _: {"a": CALM, "pipeline-bubble": {"0": 0.05, "1": share}}, 15.0)
    assert ("pipeline-bubble" in here.fired) is fires
    assert here.node.deployment[3] == "recognised from the source pipeline-bubble"
    bare = world("a", pattern="3").play(0, 40, lambda _: {"a": CALM})
    assert "named pipeline-bubble would tell it" in bare.text("pipeline-bubble")


# --- 4: experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("balance", "fires"), [(0.4, True), (0.9, False)])
def test_4_hot_experts(balance: float, fires: bool) -> None:
    """Mean ÷ largest is 0.4 a pass: the busiest has 2.5 times the mean; at 0.9 1.1 times."""
    shown = {"a": engine("a", "moe", shows={4: "sglang:eplb_balancedness"})}
    here = World(shown).play(0, 1300, lambda at: {"a": CALM | {
        "expert_balance_sum": at * balance, "expert_balance_count": at}}, 15.0)
    assert ("experts-hot" in here.fired) is fires
    assert here.node.signals["experts-hot", "gpu-17"].value == pytest.approx(1 / balance)
    fed = world("a", sources=("expert-load",)).play(
        0, 700, lambda _: {"a": CALM, "expert-load": {"0": 100.0, "1": 100.0, "2": 400.0 if fires else 110.0}}, 15.0)
    assert ("experts-hot" in fed.fired) is fires  # 400 of a mean of 200 is 2 times


def test_4_too_few_passes_are_no_missing_page() -> None:
    """60 passes in 10 min of the 100 that are wanted: nothing to judge yet; it was called "on no page here"."""
    shown = {"a": engine("a", "moe", shows={4: "sglang:eplb_balancedness"})}
    here = World(shown).play(0, 900, lambda at: {"a": CALM | {
        "expert_balance_sum": at / 100, "expert_balance_count": at / 10}}, 15.0)
    assert (here.state("experts-hot"), here.text("experts-hot")) == ("idle", "fewer than 100 passes in 10 min")


@pytest.mark.parametrize(("moves", "fires"), [(9.0, True), (2.0, False)])
def test_4_rebalancing(moves: float, fires: bool) -> None:
    """9 moves within an hour, or 2."""
    here = world("a", sources=("expert-rebalances",))
    here.play(0, 40, lambda _: {"a": CALM, "expert-rebalances": {"": moves}})
    assert ("experts-rebalancing" in here.fired) is fires


# --- 5: prefill and decode --------------------------------------------------------------------------------------------


def pools(tell_prefill: Callable[[float], Numbers], tell_decode: Callable[[float], Numbers]) -> World:
    """A prefill and a decode engine that say what they are, for half an hour."""
    here = World({"p": engine("p", role="prefill"), "d": engine("d", role="decode")})
    return here.play(0, 1500, lambda at: {"p": {**CALM, **tell_prefill(at)}, "d": {**CALM, **tell_decode(at)}}, 15.0)


def test_5_a_right_deployment_is_quiet() -> None:
    """Two wait for their transfer, prefill holds up to five, nothing fails."""
    here = pools(lambda at: {"handover_held": at % 6, "kv_transfer_failures.transfer": 0.0, "waiting": 0.0},
                 lambda _: {"handover_waiting.transfer": 2.0, "kv_transfer_failures.transfer": 0.0})
    assert here.fired == {}
    assert here.node.deployment == {5: "recognised from p, which is a prefill engine"}
    assert here.state("handover-queue", "p") == "na"  # its decode side tells it


def test_5_a_wrong_one_has_coupled_queues_failures_state_and_pools_of_the_wrong_size() -> None:
    """12 of 16 wait at decode (75 %); a transfer fails at 1000 s; prefill holds 1 more each 20 s; 9 wait at prefill."""
    here = pools(lambda at: {"handover_held": at // 20, "kv_transfer_failures.transfer": 0.0, "waiting": 9.0,
                             "prompt_tokens": 900 * at},
                 lambda at: {"handover_waiting.allocation": 12.0, "kv_usage": 0.2,
                             "kv_transfer_failures.transfer": float(at >= 1000)})
    assert {"handover-queue", "kv-transfer-failed", "handover-state", "pool-ratio"} <= here.fired.keys()
    assert here.fired["kv-transfer-failed"] == 1005  # the first read from then on
    assert here.text("handover-queue", "d") == ("12 wait for their KV cache from prefill (12 allocation), 4 run")
    assert here.text("pool-ratio").startswith("9.0 requests wait at each of 1 prefill engines; of 1 decode engines")
    assert here.node.signals["handover-state", "p"].value == 30.0  # 600 s of 1 in 20 s


def test_5_a_floor_that_rises_with_the_traffic_is_no_leak() -> None:
    """Traffic triples from 600 s to 1500 s, and so does what is under way: 20 requests, then 60.

    At 1500 s the floor of the last 10 min is 33, 13 over that of the 10 before. Once all is steady it is quiet.
    """
    def tell(at: float) -> Numbers:
        more = min(1.0, max(0.0, (at - 600) / 900))
        tokens = at + max(0.0, at - 600) * more if at < 1500 else 2400 + 3 * (at - 1500)
        return CALM | {"handover_held": 20 + 40 * more, "kv_transfer_failures.transfer": 0.0, "prompt_tokens": tokens}

    here = World({"p": engine("p", role="prefill"), "d": engine("d", role="decode")})
    here.play(0, 1500, lambda at: {"p": tell(at), "d": CALM}, 15.0)
    assert ("handover-state" in here.fired, here.state("handover-state", "p")) == (False, "gap")
    here.play(1515, 3300, lambda at: {"p": tell(at), "d": CALM}, 15.0)
    assert ("handover-state" in here.fired, here.state("handover-state", "p")) == (False, "value")


def test_5_a_pool_whose_fullest_engine_is_lost_is_not_said_to_have_room() -> None:
    """9 wait at prefill; of two decode engines one is 95 % full, and from 300 s on unreadable; the other 20 %."""
    here = World({"p": engine("p", role="prefill"), "d": engine("d", role="decode"), "e": engine("e", role="decode")})
    here.play(0, 1500, lambda at: {"p": CALM | {"waiting": 9.0}, "d": CALM | {"kv_usage": 0.2},
                                   "e": CALM | {"kv_usage": 0.95 if at < 300 else None}}, 15.0)
    assert ("pool-ratio" in here.fired, here.state("pool-ratio")) == (False, "gap")


def test_5_expired_blocks_are_counted_and_roles_of_vllm_are_seen_by_its_tokens() -> None:
    """A vLLM says no role: who gets 80 % of its prompt tokens from elsewhere decodes. 3 requests expired at prefill."""
    shown = {5: "vllm:nixl_num_failed_transfers_total"}
    here = World({name: engine(name, shows=shown) for name in ("p", "d")})
    here.play(0, 900, lambda at: {
        "p": CALM | {"kv_transfer_failures.transfer": 0.0, "handover_expired": 3.0 if at > 600 else 0.0,
                     "prompt_tokens": 100 * at, "external_hits": 0.0, "waiting": 6.0},
        "d": CALM | {"kv_transfer_failures.transfer": 0.0, "handover_expired": 0.0, "prompt_tokens": 100 * at,
                     "external_hits": 80 * at}}, 15.0)
    assert here.node.signals["handover-state", "p"].value == 3.0
    assert here.text("pool-ratio").endswith("prompt tokens came from: p prefill, d decode")
    assert here.node.signals["pool-ratio", "gpu-17"].method == "estimate: roles"
    assert {"handover-state", "pool-ratio"} <= here.fired.keys()


def test_5_where_nobody_tells_it_is_a_gap_with_its_reason() -> None:
    """One vLLM before 0.32, declared as prefill and decode: what is not known is not called well."""
    here = world("a", pattern="pd-disaggregated").play(0, 60, lambda _: {"a": CALM})
    for rule, subject in (("handover-queue", "a"), ("kv-transfer-failed", "a"), ("handover-state", "a"),
                          ("pool-ratio", "gpu-17")):
        assert here.state(rule, subject) == "gap", rule
    assert "name both pools under engines:" in here.text("pool-ratio")


# --- 6: encoder, prefill, decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttft_s", "fires"), [(2.0, True), (0.8, False)])
def test_6_what_the_first_output_waits_for(ttft_s: float, fires: bool) -> None:
    """0.1 s of queue and 0.5 s of prefill: of 2 s 70 % is elsewhere, of 0.8 s 25 %."""
    here = world("a", pattern="6").play(0, 1300, lambda at: {"a": CALM | {
        **hist("ttft", {"+Inf": at}, at * ttft_s), **hist("queue_time", {"+Inf": at}, at * 0.1),
        "prefill_count": at, "prefill_seconds": at * 0.5}}, 15.0)
    assert ("first-output-elsewhere" in here.fired) is fires
    assert here.node.signals["first-output-elsewhere", "a"].value == pytest.approx(1 - 0.6 / ttft_s)


def test_6_two_boundaries_one_by_the_engines_and_one_by_a_source() -> None:
    """From encoder to prefill no engine counts; from prefill to decode they do."""
    def tell(at: float) -> Mapping[str, Numbers]:
        return {"a": CALM | {"kv_transfer_failures.transfer": float(at >= 100)}}

    bare = world("a", pattern="6").play(0, 200, tell)
    assert "named feature-transfer-failures would tell it" in bare.text("feature-transfer-failed")
    assert bare.fired == {"kv-transfer-failed": 100}
    fed = world("a", pattern="6", sources=("feature-transfer-failures",)).play(
        0, 60, lambda at: {**tell(0), "feature-transfer-failures": {"encoder-0": 2.0 if at >= 30 else 0.0}})
    assert fed.fired == {"feature-transfer-failed": 30}


# --- 7: tiers of cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("busy", "fires"), [(0.7, True), (0.05, False)])
def test_7_promotion_traffic(busy: float, fires: bool) -> None:
    """0.7 s of each second goes into moving cache up, and 12 times as much is written down as is read; or 0.05 s."""
    shown = {"a": engine("a", shows={7: "sglang:hicache_host_used_tokens"})}
    here = World(shown).play(0, 1300, lambda at: {"a": CALM | {
        "kv_up_seconds.rank": busy * at, "kv_up": 100 * at, "kv_down": 1200 * at}}, 15.0)
    assert ("promotion-traffic" in here.fired) is fires
    assert here.text("promotion-traffic", "a") == (
        f"cache is moved up for {busy:.0%} of the time; 12.0 times as much was written down")


def test_7_the_time_of_all_ranks_is_shared_among_them() -> None:
    """vLLM adds 0.2 s a second of each of 4 ranks: 20 %, not 80 %. Where its GPUs are not known it is a Gap."""
    shown = {"a": engine("a", shows={7: "vllm:kv_offload_load_bytes_total"})}

    def tell(at: float) -> Mapping[str, Numbers]:
        return {"a": CALM | {"kv_up_seconds": 0.8 * at, "kv_up": 100 * at, "kv_down": 0.0}}

    known = World(shown, gpus=4).play(0, 1300, tell, 15.0)
    assert known.node.signals["promotion-traffic", "a"].value == pytest.approx(0.2)
    assert known.fired == {}
    unknown = World(shown).play(0, 1300, tell, 15.0)
    assert (unknown.fired, unknown.state("promotion-traffic", "a")) == ({}, "gap")
    probed = World(shown).play(0, 1300, lambda at: {"a": {**tell(at)["a"], "probe_tp_size": 1.0}}, 15.0)
    assert "promotion-traffic" in probed.fired


def test_7_a_queue_that_is_not_known_is_no_queue_and_no_calm() -> None:
    """The hot replica's queue is unreadable: it counted as a queue. Behind a router it may be nobody's here."""
    def tell(at: float) -> Mapping[str, Numbers]:
        return {"a": CALM | {"ttft.count": 8 * at, "waiting": None}, "b": CALM | {"ttft.count": at}}

    here = world("a", "b", pattern="7").play(0, 1300, tell, 15.0)
    assert (here.fired, here.state("replica-hotspot")) == ({}, "gap")


@pytest.mark.parametrize(("rate", "waiting", "fires"), [(8.0, 3.0, True), (8.0, 0.0, False), (1.2, 3.0, False)])
def test_7_a_hot_replica(rate: float, waiting: float, fires: bool) -> None:
    """8 of 10 requests at one of three replicas is 2.4 times its share; without a queue it hurts nobody."""
    here = world("a", "b", "c", pattern="hierarchical-cache").play(0, 1300, lambda at: {
        "a": CALM | {"ttft.count": rate * at, "waiting": waiting},
        "b": CALM | {"ttft.count": at}, "c": CALM | {"ttft.count": at}}, 15.0)
    assert ("replica-hotspot" in here.fired) is fires
    assert here.node.signals["replica-hotspot", "gpu-17"].value == pytest.approx(3 * rate / (rate + 2))


@pytest.mark.parametrize(("judges_all", "state"), [(True, "value"), (False, "na")])
def test_7_a_hot_replica_behind_a_router_that_all_nodes_read(judges_all: bool, state: str) -> None:
    """8 of 10 requests go to the replica here, which has a queue: 8 × 2 ÷ 10 = 1.6 times its share."""
    here = world("a", pattern="hierarchical-cache")
    here.node.setup = replace(here.node.setup, judges_all=judges_all)
    for at in range(0, 1300, 20):
        counts = {"router_worker_requests.http://a": 8.0 * at, "router_worker_requests.http://b": 2.0 * at}
        here.node.take(Batch("router:edge", T0 + at, 0.0, tuple(samples("edge", T0 + at, counts)),
                             router=EngineFacts("edge", (), "vllm-router")))
        here.play(at, at, lambda _: {"a": CALM | {"waiting": 3.0}}, 20.0)
    assert here.state("replica-hotspot") == state
    assert here.node.signals["replica-hotspot", "gpu-17"].value == (1.6 if judges_all else None)


# --- 8: post-training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slow", "fires"), [(0.05, True), (0.0, False)])
def test_8_long_tail_groups(slow: float, fires: bool) -> None:
    """5 % of answers take up to 120 s and the rest up to 10 s, or all up to 10 s."""
    here = world("a", pattern="post-training").play(0, 2000, lambda at: {"a": CALM | hist(
        "e2e", {"5.0": 0.0, "10.0": at * (1 - slow), "60.0": at * (1 - slow), "120.0": at, "+Inf": at}, at)}, 15.0)
    assert ("rollout-tail" in here.fired) is fires


@pytest.mark.parametrize(("behind", "fires"), [(2.0, True), (0.0, False)])
def test_8_stale_weights(behind: float, fires: bool) -> None:
    """Both were updated each minute until one got no more; or both still are."""
    shown = {8: "vllm:rl_weight_update_operations_total"}
    here = World({name: engine(name, shows=shown) for name in "ab"})
    here.play(0, 1500, lambda at: {
        "a": CALM | {"weight_updates.finish": at // 60},
        "b": CALM | {"weight_updates.finish": max(0.0, at // 60 - behind)}}, 15.0)
    assert ("weights-stale" in here.fired) is fires
    fed = world("a", sources=("weights-version",)).play(
        0, 700, lambda _: {"a": CALM, "weights-version": {"trainer": 40.0, "a": 40.0 - behind}}, 15.0)
    assert ("weights-stale" in fed.fired) is fires


def updates(tell: Tell, end_s: float = 3500.0) -> World:
    """Two engines of a rollout pool that tell their updates."""
    shown = {8: "vllm:rl_weight_update_operations_total"}
    return World({name: engine(name, shows=shown) for name in "ab"}).play(0, end_s, tell, 15.0)


def test_8_an_engine_that_was_started_with_the_newest_weights_is_not_behind() -> None:
    """One update a minute; b starts anew at 2000 s, counts from 0, and takes all that come from then on."""
    def tell(at: float) -> Mapping[str, Numbers]:
        b, start = (at // 60, T0) if at < 2000 else (at // 60 - 2000 // 60, T0 + 1940)
        return {"a": CALM | {"weight_updates.finish": at // 60, "process_start": T0},
                "b": CALM | {"weight_updates.finish": b, "process_start": start}}

    here = updates(tell)
    assert here.node.signals["weights-stale", "gpu-17"].value == 0.0
    assert "weights-stale" not in here.fired


def test_8_a_missed_update_is_missed_for_as_long_as_the_engine_runs() -> None:
    """At 600 s b misses the last one: over an hour later it is behind all the same, whatever `update` says.

    Once b starts anew, at 5400 s, with what is newest, nobody is behind.
    """
    def tell(at: float) -> Mapping[str, Numbers]:
        b, start = (1.0, T0) if at < 5400 else (0.0, T0 + 5390)
        return {"a": CALM | {"weight_updates.finish": 1.0 + (at >= 600), "weight_updates.update": 1.0 + (at >= 600),
                             "process_start": T0},
                "b": CALM | {"weight_updates.finish": b, "weight_updates.update": 2.0, "process_start": start}}

    here = updates(tell, 5390)
    assert here.text("weights-stale") == "b has taken 1 updates less than a"
    assert here.node.book.alerts["weights-stale", "gpu-17"].state == "firing"
    anew = updates(tell, 5700)
    assert anew.node.signals["weights-stale", "gpu-17"].value == 0.0


def test_8_an_engine_that_was_behind_is_not_known_to_be_up_to_date_when_another_starts_anew() -> None:
    """b misses the update of 600 s, and a, which has it, starts anew at 2000 s: only the version itself tells."""
    def tell(at: float) -> Mapping[str, Numbers]:
        a, start = (1.0 + (at >= 600), T0) if at < 2000 else (0.0, T0 + 1990)
        return {"a": CALM | {"weight_updates.update": a, "process_start": start},
                "b": CALM | {"weight_updates.update": 1.0, "process_start": T0}}

    here = updates(tell, 2500)
    assert here.state("weights-stale") == "gap"
    assert "named weights-version would tell it" in here.text("weights-stale")


def test_8_mixed_rank_failure_and_what_nobody_tells() -> None:
    """A rank of the rollout engine is gone while the others run."""
    here = world("a", pattern="8").play(0, 200, lambda at: {"a": CALM | {
        "probe_rank_seconds.0": 1.0, **({} if at >= 60 else {"probe_rank_seconds.1": 1.0})}})
    assert here.fired == {"members-missing": 120}
    assert "named weights-version would tell it" in here.text("weights-stale")


# --- pages ------------------------------------------------------------------------------------------------------------

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0
"""
NIXL = """# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 2
# TYPE vllm:nixl_num_failed_notifications_total counter
vllm:nixl_num_failed_notifications_total{engine="0",model_name="m"} 1
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 4
# TYPE vllm:num_requests_kv_fetch_by_stage gauge
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="in_progress"} 5
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="waiting_to_start"} 6
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",model_name="m",le="+Inf"} 8
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 4.5
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 8
# TYPE vllm:rl_weight_update_operation_duration_seconds histogram
vllm:rl_weight_update_operation_duration_seconds_count{operation="update"} 9
vllm:rl_weight_update_operation_duration_seconds_sum{operation="update"} 90
# TYPE vllm:rl_weight_update_operations_total counter
vllm:rl_weight_update_operations_total{operation="init",status="success"} 1
vllm:rl_weight_update_operations_total{operation="update",status="success"} 7
vllm:rl_weight_update_operations_total{operation="update",status="error"} 2
vllm:rl_weight_update_operations_total{operation="finish",status="success"} 6
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="decode",model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 3
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="decode",model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 0
# TYPE sglang:num_decode_prealloc_queue_reqs gauge
sglang:num_decode_prealloc_queue_reqs{engine_type="decode",model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 2
# TYPE sglang:num_decode_transfer_queue_reqs gauge
sglang:num_decode_transfer_queue_reqs{engine_type="decode",model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 9
# TYPE sglang:eplb_balancedness summary
sglang:eplb_balancedness_sum{engine_type="decode",forward_mode="decode",model_name="m"} 40
sglang:eplb_balancedness_count{engine_type="decode",forward_mode="decode",model_name="m"} 100
# TYPE sglang:hicache_host_used_tokens gauge
sglang:hicache_host_used_tokens{engine_type="decode",model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 5000
# TYPE sglang:load_back_duration_seconds histogram
sglang:load_back_duration_seconds_sum{engine_type="decode",model_name="m",tp_rank="0"} 1.5
sglang:load_back_duration_seconds_count{engine_type="decode",model_name="m",tp_rank="0"} 3
"""
OF_PATTERNS = frozenset({"handover_waiting", "handover_held", "handover_expired", "kv_transfer_failures",
                         "external_hits", "kv_up", "kv_down", "kv_up_seconds", "expert_balance_sum",
                         "expert_balance_count", "prefill_seconds", "prefill_count", "weight_updates"})


def read_twice(page: str) -> tuple[dict[tuple[str, str], float], PageReader]:
    """What of patterns is read of a page: on the first read it is seen that there is such a thing."""
    reader = PageReader("t")
    for at in (1.0, 6.0):
        told = reader.read(page.encode(), "text/plain; version=0.0.4", at)
    return {(r.name, r.key): r.value for r in told if isinstance(r, Sample) and r.name in OF_PATTERNS}, reader


def test_a_page_that_shows_no_pattern_is_read_for_none() -> None:
    """Neither a number nor a Gap, nor a line in `doctor`; and what fails owes none of them."""
    reader = PageReader("t")
    told = [*reader.read(VLLM.encode(), "text/plain", 1.0), *reader.failed(Why.TIMEOUT, "late", 2.0)]
    assert not {r.name for r in told} & OF_PATTERNS
    assert reader.facts is not None
    assert not {found.name for found in reader.facts.found} & OF_PATTERNS
    assert not {r.name for r in PageReader("t").failed(Why.UNREACHABLE, "refused", 1.0)} & OF_PATTERNS


def test_what_vllm_tells_of_its_pattern() -> None:
    """Names of vLLM 0.32's own source."""
    told, reader = read_twice(VLLM + NIXL)
    assert told == {
        ("kv_transfer_failures", "transfer"): 2.0, ("kv_transfer_failures", "notification"): 1.0,
        ("handover_expired", ""): 4.0, ("handover_waiting", "in_progress"): 5.0,
        ("handover_waiting", "waiting_to_start"): 6.0, ("prefill_seconds", ""): 4.5, ("prefill_count", ""): 8.0,
        ("weight_updates", "update"): 7.0, ("weight_updates", "finish"): 6.0}
    assert reader.facts is not None
    assert dict(reader.facts.shows) == {5: "vllm:nixl_num_failed_transfers_total",
                                        8: "vllm:rl_weight_update_operations_total"}
    failed = [r for r in reader.failed(Why.TIMEOUT, "late", 9.0) if r.name in OF_PATTERNS]
    assert {r.name for r in failed} == {name for name, _ in told}
    assert all(isinstance(r, Gap) for r in failed)


def test_what_sglang_tells_of_its_pattern_and_role() -> None:
    """Names of SGLang's own collector."""
    told, reader = read_twice(SGLANG)
    assert told == {
        ("handover_waiting", "allocation"): 2.0, ("handover_waiting", "transfer"): 9.0,
        ("expert_balance_sum", ""): 40.0, ("expert_balance_count", ""): 100.0, ("kv_up_seconds", "rank"): 1.5}
    assert reader.facts is not None
    assert (reader.facts.role, sorted(reader.facts.shows)) == ("decode", [4, 7])


def test_sglang_is_prefill_or_decode_by_its_own_word_alone() -> None:
    """Many versions write the gauge of the transfer's latency wherever they run; the word is what tells."""
    page = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3
# TYPE sglang:kv_transfer_latency_ms gauge
sglang:kv_transfer_latency_ms{engine_type="unified",model_name="m",tp_rank="0"} 0
# TYPE sglang:num_prefill_inflight_queue_reqs gauge
sglang:num_prefill_inflight_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2
"""
    told, reader = read_twice(page)
    assert reader.facts is not None
    assert (told, reader.facts.role, dict(reader.facts.shows)) == ({}, "", {})
    told, reader = read_twice(page.replace("unified", "prefill"))
    assert reader.facts is not None
    assert (told, reader.facts.role) == ({("handover_held", ""): 2.0}, "prefill")


def test_the_table_of_patterns_is_told_in_words() -> None:
    """As `check` says it."""
    assert patterns.told(2, "recognised from 2 replicas of llama (a, b)") == (
        "pattern 2, replicas on single nodes (replicas): recognised from 2 replicas of llama (a, b)")


def test_the_document_names_every_source_rule_and_word() -> None:
    """docs/patterns.md promised a source of a name that no rule reads."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "patterns.md").read_text()
    for name, feed in FEEDS.items():
        assert f"| {name} | {feed.of} | {feed.what} | {feed.rule} |" in text
    for pattern in PATTERNS.values():
        assert f"| {pattern.number} | {pattern.word} |" in text
    assert all(f"\n| {rule.id} | " in text for rule in RULES if rule.patterns)
    told = {name for kind in ("vllm", "sglang") for quantity in load_map(kind).patterns.values()
            for name in ([alias.name for alias in quantity.names] + [also.name for also in quantity.also])}
    assert {name for name in told if f"`{name}`" not in text} == set()
