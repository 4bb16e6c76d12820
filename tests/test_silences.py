"""Silences: who is not woken, who is all the same, and that what still fires at the end pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent import noise
from agent import silences as mutes
from agent.model import SILENCED, Alert, AlertMessage
from agent.notifiers import Channel, Route, Wanted
from agent.silences import Silence, matchers
from agent.store import Store
from tests.scenes import T0
from tests.test_loop import Life, Scripted, hot

HOT = ("gpu-thermal-limit", "GPU-8f6a")
NOW = 1_000_000.0
ALL_FIRING = {name: [("firing", False)] for name in ("hook", "pager", "am")}  # (status, said to be silenced)
ALL_RESOLVED = {name: [("resolved", False)] for name in ("hook", "pager", "am")}


def silence(rule: str = HOT[0], subject: str = HOT[1], until: float = NOW + 60) -> Silence:
    """One by anna."""
    return Silence(1, rule, subject, NOW, until, "fans are swapped", "anna")


# --- what one covers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "subject", "alert", "covered"), [
    (*HOT, HOT, True), (HOT[0], "*", HOT, True), ("*", "*", HOT, True), ("gpu-*", "GPU-8*", HOT, True),
    (HOT[0], "GPU-77aa", HOT, False), ("gpu-temperature", HOT[1], HOT, False),
    ("itl-p99", "llama", ("itl-p99", "llama/1"), True), ("itl-p99", "llama", ("itl-p99", "llama-2"), False),
    ("engine-down", "[::1]:8000", ("engine-down", "[::1]:8000"), True),
    ("engine-down", "[::1]:*", ("engine-down", "[::1]:8000"), True),
    ("engine-down", "[::1]:8000", ("engine-down", "::8000"), False),  # the brackets are no "one of : and 1"
    ("engine-down", "[::1]:800?", ("engine-down", "[fe80::1]:8000"), False),
    ("*", "*", ("watcher", "channel:pagerduty"), False), ("w*", "*", ("watcher", "channel:pagerduty"), False),
    ("*", "*", ("drill-orphaned", "run-1"), False), ("watcher", "*", ("watcher", "channel:pagerduty"), True),
])
def test_what_a_silence_covers(rule: str, subject: str, alert: tuple[str, str], covered: bool) -> None:
    """As `match:` does; and no pattern hides that nobody watches, or that a drill's fault is still there."""
    assert silence(rule, subject).covers(*alert) is covered


@pytest.mark.parametrize(("for_s", "why", "said"), [
    (7 * 86400 + 1, "x", "at most 7 d"), (0, "x", "at most 7 d"), (float("nan"), "x", "at most 7 d"),
    (float("inf"), "x", "at most 7 d"), (60, "  ", "a reason"), (60, "x\x1b[2J", "a reason"),
    (60, "x" * 301, "a reason"),
])
def test_an_endless_or_unexplained_one_is_refused(for_s: float, why: str, said: str) -> None:
    """The mute that outlived its reason."""
    with pytest.raises(ValueError, match=said):
        mutes.add((), "itl-p99", "*", for_s, why, "anna", NOW)


def test_of_two_the_one_that_lasts_longest_is_told() -> None:
    """Else the alert would be said to page before it can."""
    short, long = silence(until=NOW + 60), silence("*", "*", NOW + 600)
    assert mutes.over((short, long), *HOT, NOW) is long
    assert mutes.over((short, long), *HOT, NOW + 60) is long
    assert mutes.over((short, long), *HOT, NOW + 600) is None


@pytest.mark.parametrize(("now", "holds"), [
    (NOW, True), (NOW + 59, True), (NOW + 60, False), (NOW - 3600, True), (NOW - 86400, True),
    (NOW - 86401, False), (0.0, False),
])
def test_a_clock_that_stepped_back(now: float, holds: bool) -> None:
    """A dead battery started the node in 1970, and all silences of the quarter held at once."""
    assert silence().is_active(now) is holds


def test_what_somebody_ended_does_not_hold_again() -> None:
    """Ended at NOW + 30; the clock then went back a minute."""
    (ended,) = mutes.end((silence(),), [1], "ben", NOW + 30)
    assert (ended.is_active(NOW + 29), ended.is_active(NOW + 31)) == (False, False)


def test_numbers_are_never_given_twice_and_old_ones_are_forgotten() -> None:
    """`tocsin unsilence 1` of yesterday's terminal must not end today's."""
    one, _ = mutes.add((), "a", "*", 60, "x", "anna", NOW)
    later = NOW + mutes.KEPT_S + 120
    assert mutes.pruned(one, later) == one
    two, made = mutes.add(one, "b", "*", 60, "x", "anna", later)
    assert made.id == 2
    assert [s.id for s in mutes.pruned(two, later)] == [2]
    assert mutes.from_plain([row | {"new": 1} for row in mutes.to_plain(two)]) == two


@pytest.mark.parametrize(("rule", "subject", "want"), [
    (*HOT, ['node="n-1"', 'rule="gpu-thermal-limit"', 'subject="GPU-8f6a"']),
    ("*", "*", ['node="n-1"']), ("gpu-*", "*", ['node="n-1"', 'rule=~"gpu-.*"']),
    ("itl-p99", "llm/llama#0", ['node="n-1"', 'rule="itl-p99"', 'subject=~"llm/llama\\\\#0(/.*)?"']),
])
def test_the_same_silence_in_alertmanager_s_words(rule: str, subject: str, want: list[str]) -> None:
    """Which we print and do not send: what is muted there is its owner's business."""
    assert matchers(rule, subject, "n-1") == want


# --- who is told ------------------------------------------------------------------------------------------------------


class Told(Channel):
    """A channel of which only what it is owed is looked at."""

    def __init__(self, name: str, *, by_incident: bool = False) -> None:
        self.name, self.by_incident = name, by_incident

    def address(self) -> str:
        """None."""
        return self.name


class Story:
    """A GPU that is hot while `temp_c` says so; a webhook, a pager and an Alertmanager that are owed things."""

    def __init__(self, life: Life) -> None:
        life.rules = (HOT[0], "itl-p99")
        self.life, self.temp_c, self.seen = life, 91.0, dict.fromkeys(("hook", "pager", "am"), 0)
        self.start()

    def start(self) -> None:
        """A process, or another one after kill -9."""
        agent = self.life.start(Scripted("nvml", lambda now: hot(now, HOT[1], self.temp_c)))
        channels = [Told("hook"), Told("pager", by_incident=True), Told("am")]
        agent.routes = [Route(one, Wanted(one.name, frozenset({"page"}), silenced=one.name == "am"))
                        for one in channels]

    def go(self, seconds: float) -> dict[str, list[tuple[str, bool]]]:
        """Time passes: (status, said to be silenced) of each message that is new to each channel."""
        self.life.tick(round(seconds / 5))
        found: dict[str, list[tuple[str, bool]]] = {}
        for name, seen in self.seen.items():
            owed = self.store.owed(name)
            found[name] = [(n.message.status, SILENCED in n.message.annotations) for n in owed[seen:]]
            self.seen[name] = len(owed)
        return {name: told for name, told in found.items() if told}

    @property
    def store(self) -> Store:
        """What is owed."""
        assert self.life.agent is not None
        return self.life.agent.store

    def silence(self, for_s: float = 7200, rule: str = HOT[0], subject: str = "*") -> int:
        """By anna."""
        assert self.life.agent is not None
        number: int = self.life.agent.silence(rule, subject, for_s, "fans are swapped", "anna")["id"]
        return number


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """The story, ended with the test."""
    life = Life(tmp_path)
    yield Story(life)
    life.kill()


def test_what_fires_under_a_silence_wakes_nobody_and_pages_at_its_end(story: Story) -> None:
    """Alertmanager gets it at once, and says that it is silenced; the others when the 20 minutes are over."""
    story.silence(for_s=1200)
    assert story.go(60) == {"am": [("firing", True)]}
    agent = story.life.agent
    assert agent is not None
    (row,) = agent.alerts(False)
    assert row["state"] == "firing"
    assert row["silenced"].endswith("UTC by anna: fans are swapped")
    assert agent.check()["verdict"] == "page"  # it mutes the page, not the alert
    assert [s["mutes"] for s in agent.check()["silences"]] == [[{"rule": HOT[0], "subject": HOT[1]}]]
    assert [s["silenced"] is not None for s in agent.check()["signals"] if s["rule"] == HOT[0]] == [True]
    assert agent.healthz()[1]["silences"][0].startswith(f"{HOT[0]}, until ")

    assert story.go(1080) == {}
    assert story.go(120) == ALL_FIRING
    assert story.go(600) == {}
    story.temp_c = 60.0
    assert story.go(300) == ALL_RESOLVED


def test_what_fires_and_ends_under_a_silence_is_told_to_alertmanager_alone(story: Story) -> None:
    """No "resolved" of what nobody was told."""
    story.silence()
    story.go(60)
    story.temp_c = 60.0
    assert story.go(300) == {"am": [("resolved", True)]}
    assert story.life.agent is not None
    assert [row["silenced"] is not None for row in story.life.agent.alerts(True)] == [True]


def test_what_was_told_before_the_silence_ends_at_every_channel(story: Story) -> None:
    """The page is open on somebody's phone: its end is told, silenced or not, and no second firing at the silence's."""
    assert story.go(60) == ALL_FIRING
    number = story.silence()
    assert story.go(60) == {}
    assert story.life.agent is not None
    story.life.agent.unsilence([number], "bob")
    assert story.go(60) == {}
    story.silence()
    story.temp_c = 60.0
    assert story.go(300) == ALL_RESOLVED


def test_a_silence_and_what_it_holds_back_survive_kill_9(story: Story) -> None:
    """After the restart it still mutes; ended early, what fires under it pages at the next tick, and only once."""
    number = story.silence()
    assert story.go(60) == {"am": [("firing", True)]}
    story.start()
    assert story.go(60) == {}
    assert story.life.agent is not None
    (held,) = story.life.agent.silences()["silences"]
    assert (held["id"], held["by"], held["why"]) == (number, "anna", "fans are swapped")
    story.life.agent.unsilence([number], "bob")
    story.start()
    assert story.go(5)["pager"] == [("firing", False)]
    assert "pager" not in story.go(60)
    past = story.life.agent.silences()
    assert (past["silences"], past["ended"][0]["ended_by"]) == ([], "bob")


def test_a_rule_that_is_not_there_is_not_silenced(story: Story) -> None:
    """A typing error that mutes nothing is found by the page that it was to mute."""
    assert story.life.agent is not None
    with pytest.raises(ValueError, match="did you mean gpu-thermal-limit"):
        story.silence(rule="gpu-thermal-limits")
    with pytest.raises(ValueError, match="tocsin silence --list"):
        story.life.agent.unsilence([1], "anna")


def test_only_those_who_have_silences_of_their_own_are_told_of_what_is_silenced() -> None:
    """Also again and again: a channel's repeats go by the same word."""
    page = AlertMessage("k", "firing", "page", {"rule": "r", "subject": "s"}, {}, NOW)
    muted = replace(page, annotations={SILENCED: "until …"})
    ours, theirs = Wanted("hook", frozenset({"page"})), Wanted("am", frozenset({"page"}), silenced=True)
    assert [ours(page), ours(muted), theirs(page), theirs(muted)] == [True, False, True, True]


# --- learning from noise ----------------------------------------------------------------------------------------------


def change(at: float, kind: str, rule: str, subject: str = "llama", *, silenced: bool = False) -> dict[str, object]:
    """One row of Store.changes."""
    return {"at": at, "kind": kind, "rule": rule, "subject": subject, "severity": "page", "silenced": silenced}


def test_how_often_for_how_long_and_how_many_were_short() -> None:
    """Worked out by hand: itl-p99 60 s, 299.9 s, 300 s; ttft-p99 one hour so far; a resolve of before is no firing."""
    told = noise.stats([
        change(5, "resolved", "ttft-p99"), change(10, "firing", "itl-p99"), change(20, "firing", "itl-p99", "qwen"),
        change(70, "resolved", "itl-p99"), change(319.9, "resolved", "itl-p99", "qwen"),
        change(400, "firing", "ttft-p99", silenced=True), change(500, "firing", "itl-p99"),
        change(800, "resolved", "itl-p99")], 0.0, 4000.0)
    assert [(r["rule"], r["fired"], r["short"], r["firing"], r["silenced"], r["subjects"], r["total_s"], r["longest_s"])
            for r in told["rules"]] == [("itl-p99", 3, 2, 0, 0, 2, pytest.approx(659.9), 300.0),
                                        ("ttft-p99", 1, 0, 1, 1, 1, 3600.0, 3600.0)]


def test_the_agent_counts_from_what_it_has_saved(story: Story) -> None:
    """Two firings, of which one was muted; the one of before the span asked for is left out."""
    story.silence(for_s=120)
    story.go(60)
    story.temp_c = 60.0
    story.go(300)
    story.temp_c = 91.0
    story.go(60)
    assert story.life.agent is not None
    (row,) = story.life.agent.alert_stats(86400)["rules"]
    assert (row["rule"], row["fired"], row["short"], row["silenced"], row["firing"]) == (HOT[0], 2, 1, 1, 1)
    assert row["last_at"] > T0
    assert [r["fired"] for r in story.life.agent.alert_stats(100)["rules"]] == [1]


def test_a_muted_alert_neither_opens_nor_joins_an_incident(story: Story) -> None:
    """Its symptom, which nobody silenced, pages: a page that was never sent explains nothing to anybody."""
    agent = story.life.agent
    assert agent is not None
    story.silence()
    story.go(60)
    assert agent.node.incidents == {}
    book = agent.node.book
    slow = Alert("itl-p99", "llama", "firing", "page", agent.node.scene.now, agent.node.scene.now)
    agent.node.book = replace(book, alerts={**book.alerts, ("itl-p99", "llama"): slow})
    agent.node._group(agent.node.scene.now)
    (incident,) = agent.node.incidents.values()
    assert (incident.root, len(incident.members)) == (("itl-p99", "llama"), 1)


