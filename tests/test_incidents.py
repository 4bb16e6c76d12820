"""Incidents: one page for what belongs together, one each for what does not, and the cause first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from agent.incidents import Incident, Step, can_cause, chain, from_plain, group
from agent.model import Alert, Rule, Severity
from tests.scenes import built_in

RULES = tuple(
    Rule(name, "signal", ">", 1.0, "page", causes=causes)
    for name, causes in (
        ("gpu-thermal-limit", ("rank-straggler",)), ("rank-straggler", ("itl-p99", "queue-age")),
        ("queue-age", ("ttft-p99",)), ("itl-p99", ()), ("ttft-p99", ()), ("engine-down", ("ttft-p99",)), ("other", ()),
    )
)  # fmt: skip
CAUSES = can_cause(RULES)
GPUS = {"GPU-3": "llama", "GPU-9": "qwen"}


def related(one: str, other: str) -> bool:
    """GPU 3 is llama's, GPU 9 qwen's."""
    return GPUS.get(one, one) == GPUS.get(other, other)


@dataclass
class Story:
    """Alerts that come and go; what is told of it."""

    firing: dict[tuple[str, str], Alert] = field(default_factory=dict)
    step: Step = field(default_factory=lambda: Step({}))
    told: list[str] = field(default_factory=list)

    def at(self, now: float, *fires: tuple[str, str], ends: Sequence[tuple[str, str]] = (),
           severity: Severity = "page", only_to: Mapping[tuple[str, str], str] | None = None) -> None:
        """One step. `only_to`: alerts that a drill has told to one channel alone."""
        to = only_to or {}
        for key in ends:
            del self.firing[key]
        for rule, subject in fires:
            self.firing[(rule, subject)] = Alert(rule, subject, "firing", severity, now, now)
        self.step = group(self.step.open, list(self.firing.values()), CAUSES, related, "n", now,
                          audience_of=lambda alert: to.get((alert.rule, alert.subject), ""))
        self.told += [f"{now:.0f} {change} {i.root[0]}" for change, i in self.step.changes]

    def one(self) -> Incident:
        """The one that is open."""
        (incident,) = self.step.open.values()
        return incident


def test_what_a_rule_can_cause_through_others() -> None:
    """A hot GPU slows a rank, which slows everything behind it."""
    assert CAUSES["gpu-thermal-limit"] == {"rank-straggler", "itl-p99", "queue-age", "ttft-p99"}
    assert CAUSES["ttft-p99"] == frozenset()
    loop = can_cause([Rule("a", "s", ">", 1, "page", causes=("b",)), Rule("b", "s", ">", 1, "page", causes=("a",))])
    assert loop == {"a": {"b"}, "b": {"a"}}


def test_one_page_for_a_hot_gpu_and_all_that_it_brings() -> None:
    """Five alerts in six minutes: one page, updated, resolved once, and it names the GPU throughout."""
    story = Story()
    story.at(0, ("gpu-thermal-limit", "GPU-3"))
    story.at(60, ("rank-straggler", "llama"))
    story.at(150, ("itl-p99", "llama"))
    story.at(240, ("queue-age", "llama"))
    story.at(360, ("ttft-p99", "llama"))
    story.at(400, ends=[("gpu-thermal-limit", "GPU-3")])
    story.at(500, ends=[key for key in story.firing if key[1] == "llama"])
    assert story.told == ["0 opened gpu-thermal-limit", "60 updated gpu-thermal-limit", "150 updated gpu-thermal-limit",
                          "240 updated gpu-thermal-limit", "360 updated gpu-thermal-limit",
                          "500 resolved gpu-thermal-limit"]  # fmt: skip


def test_a_cause_that_is_found_later_takes_over_the_title() -> None:
    """The symptom paged first: its page is updated, and names the engine that is down from then on."""
    story = Story()
    story.at(0, ("ttft-p99", "llama"))
    story.at(30, ("engine-down", "llama"))
    assert story.told == ["0 opened ttft-p99", "30 updated engine-down"]
    incident = story.one()
    assert [incident.role(key) for key in story.firing] == ["symptom", "cause"]


def test_both_at_once_the_cause_opens_it() -> None:
    """In one tick: the page is the cause's from the start."""
    story = Story()
    story.at(0, ("ttft-p99", "llama"), ("engine-down", "llama"))
    assert story.told == ["0 opened engine-down"]
    assert len(story.one().members) == 2


@pytest.mark.parametrize(
    ("why", "later", "fires"),
    [
        ("another engine's", 60, ("itl-p99", "qwen")),
        ("another GPU's engine", 60, ("rank-straggler", "qwen")),
        ("no declared path", 60, ("other", "llama")),
        ("16 minutes later", 960, ("itl-p99", "llama")),
    ],
)
def test_what_does_not_belong_to_it_pages(why: str, later: float, fires: tuple[str, str]) -> None:
    """A second failure that a first page swallowed was found in the morning."""
    story = Story()
    story.at(0, ("gpu-thermal-limit", "GPU-3"))
    story.at(later, fires)
    assert story.told == ["0 opened gpu-thermal-limit", f"{later:.0f} opened {fires[0]}"], why


def test_tickets_neither_open_nor_join_nor_hold_open() -> None:
    """A ticket that fires for days kept an incident open, and its next page was an update that woke nobody."""
    story = Story()
    story.at(0, ("gpu-thermal-limit", "GPU-3"), severity="ticket")
    assert story.told == []
    story.at(10, ("rank-straggler", "llama"))
    story.at(20, ("itl-p99", "llama"), severity="ticket")
    story.at(30, ends=[("rank-straggler", "llama")])
    assert story.told == ["10 opened rank-straggler", "30 resolved rank-straggler"]
    story.at(60, ("rank-straggler", "llama"))
    assert story.told[-1] == "60 opened rank-straggler"


def test_what_a_drill_told_to_one_channel_alone_swallows_nobody_else_s_page() -> None:
    """The drill's engine-down went to its test channel; ttft-p99, which it had not announced, is everybody's page."""
    story = Story()
    drill = {("engine-down", "llama"): "webhook-2"}
    story.at(0, ("engine-down", "llama"), only_to=drill)
    story.at(30, ("ttft-p99", "llama"), only_to=drill)
    assert story.told == ["0 opened engine-down", "30 opened ttft-p99"]
    assert sorted(i.audience for i in story.step.open.values()) == ["", "webhook-2"]
    story.at(60)  # the drill is over and the engine still down: from now on it is everybody's
    assert [i.audience for i in story.step.open.values()] == ["", ""]


def test_a_page_of_16_minutes_later_is_joined_by_what_its_latest_symptom_causes() -> None:
    """15 minutes count from each alert of the incident, not from its first: a slow chain is still one chain."""
    story = Story()
    story.at(0, ("gpu-thermal-limit", "GPU-3"))
    story.at(800, ("rank-straggler", "llama"))
    story.at(1600, ("queue-age", "llama"))
    story.at(2600, ("itl-p99", "llama"))
    assert story.told == ["0 opened gpu-thermal-limit", "800 updated gpu-thermal-limit",
                          "1600 updated gpu-thermal-limit", "2600 opened itl-p99"]  # fmt: skip


def test_an_alert_that_comes_back_while_its_cause_lasts_is_the_same_page() -> None:
    """ITL is back for a minute and breaks again: nobody is woken twice."""
    story = Story()
    story.at(0, ("rank-straggler", "llama"))
    story.at(60, ("itl-p99", "llama"))
    story.at(120, ends=[("itl-p99", "llama")])
    story.at(180, ("itl-p99", "llama"))
    assert story.told == ["0 opened rank-straggler", "60 updated rank-straggler", "180 updated rank-straggler"]


def test_two_of_one_rule_in_one_second_have_two_names() -> None:
    """Their keys join what receivers show: a shared one would have hidden the second."""
    story = Story()
    story.at(0, ("itl-p99", "llama"), ("itl-p99", "qwen"))
    assert sorted(story.step.open) == ["n/itl-p99/0", "n/itl-p99/0-2"]


@pytest.mark.parametrize(("story", "first", "then"), [
    ("a storm of errors", "error-rate-high", ["error-burn-fast", "node-error-burn-fast"]),
    ("the burn rates are first", "node-error-burn-fast", ["error-burn-fast", "error-rate-high"]),
    ("slow decode, no hardware to blame", "itl-p99", ["queue-age", "ttft-p99", "latency-p99"]),
    ("whole answers are late, for want of a first token", "latency-p99", ["ttft-p99"]),
    ("out of GPU memory", "gpu-memory-low", ["engine-down"]),
    ("a memory row that cannot be replaced", "gpu-remap-failed", ["xid-memory"])])
def test_the_shipped_rules_page_once_for_one_thing(story: str, first: str, then: list[str]) -> None:
    """The same failed requests rang thrice: as a rate, as an engine's burn rate and as the node's."""
    causes = can_cause(built_in().values())
    open_, told = Step({}), []
    for n in range(len(then) + 1):
        firing = [Alert(rule, "llama", "firing", "page", at * 60.0, at * 60.0)
                  for at, rule in enumerate([first, *then][:n + 1])]
        open_ = group(open_.open, firing, causes, related, "n", n * 60.0)
        told += [change for change, _ in open_.changes]
    assert told == ["opened", *["updated"] * len(then)], story


def test_it_survives_being_written_down() -> None:
    """A restart between cause and symptom."""
    from dataclasses import asdict

    import msgspec

    story = Story()
    story.at(0, ("rank-straggler", "llama"))
    plain = msgspec.json.decode(msgspec.json.encode({k: asdict(i) for k, i in story.step.open.items()}))
    assert {k: from_plain(told) for k, told in plain.items()} == story.step.open


def test_the_chain_names_each_step_and_no_short_cut() -> None:
    """GPU -> rank -> ITL and queue -> TTFT; the GPU's own arrow to TTFT says nothing that these do not."""
    fired = ("ttft-p99", "gpu-thermal-limit", "itl-p99", "rank-straggler", "queue-age", "other")
    assert sorted(chain(fired, CAUSES)) == [
        ("gpu-thermal-limit", "rank-straggler"), ("queue-age", "ttft-p99"), ("rank-straggler", "itl-p99"),
        ("rank-straggler", "queue-age")]
    assert chain(("gpu-thermal-limit", "ttft-p99"), CAUSES) == [("gpu-thermal-limit", "ttft-p99")]
