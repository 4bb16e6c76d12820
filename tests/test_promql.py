"""PromQL and JSON sources, and M7 on them: nothing that is no number becomes one, and nothing old looks new."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config import Config, RouterConfig, business_of, load_all, rules_for, told_by_each
from agent.daemon import not_asked, setup_of, sources_of
from agent.json_path import steps_of
from agent.model import Batch, Gap, Sample, Why
from agent.node import Node, Setup
from agent.signals import CATALOGUE
from agent.sources.asking import NoValue
from agent.sources.fetch import Answer, FetchError
from agent.sources.json_address import JsonSource, number_at
from agent.sources.promql import MOST_SERIES, PromqlSource, subject_of, vector_of
from agent.stats import events_needed
from agent.strict import ConfigErrors
from rules import severity_of
from tests.scenes import SLO, T0, built_in

DAY_S = 86400.0


def answer(result: Any, status: int = 200, kind: str = "vector", **more: Any) -> Answer:
    """Prometheus's answer to an instant query."""
    body = {"status": "success", "data": {"resultType": kind, "result": result}, **more}
    return Answer(status, {}, json.dumps(body).encode())


def one(value: str, at: float | str = T0, **labels: str) -> dict[str, Any]:
    """A series of it."""
    return {"metric": labels, "value": [at, value]}


class Scripted(PromqlSource):
    """Answers as a test says, without a network. `asked`: the addresses."""

    def __init__(self, *replies: Answer | FetchError, **more: Any) -> None:
        super().__init__("orders", "http://prometheus:9090", "q", **more)
        self.wall_s = T0
        self.replies, self.asked = list(replies), list[str]()

    def get(self, url: str, *, again: bool = True) -> Answer:
        del again
        self.asked.append(url)
        reply = self.replies.pop(0)
        if isinstance(reply, FetchError):
            raise reply
        return reply

    def once(self, start: float = 0.0) -> list[Sample | Gap]:
        """What one question brought."""
        return list(self._whole(start).readings)


@pytest.mark.parametrize(("reply", "code", "said"), [
    (answer([]), Why.NO_DATA, "its answer is empty"),
    (answer([], kind="matrix"), Why.BAD_PAGE, "gives a matrix"),
    (answer([T0, "a"], kind="string"), Why.BAD_PAGE, "gives a string"),
    (answer([one("1", a=str(n)) for n in range(MOST_SERIES + 1)]), Why.TOO_LARGE, "51 series, and at most 50 are read"),
    (answer([{"metric": {}, "histogram": [T0, {}]}]), Why.BAD_PAGE, "gives histograms"),
    (answer([one("1")], warnings=["store gateway 10.0.0.3: connection refused"]), Why.ERROR, "is only a part: store"),
    (Answer(200, {}, b"<html>Grafana</html>"), Why.BAD_PAGE, "the answer is not Prometheus's"),
    (Answer(200, {}, b'{"status": "success", "data": {}}'), Why.BAD_PAGE, "another form"),
    (Answer(401, {}, b"Unauthorized"), Why.BAD_STATUS, "HTTP 401: it wants credentials"),
    (Answer(404, {}, b"not found"), Why.BAD_STATUS, "HTTP 404: no Prometheus API at this address: Mimir's has"),
    (Answer(302, {"location": "https://sso/"}, b""), Why.BAD_STATUS, "HTTP 302: it sends us elsewhere"),
])
def test_what_is_no_vector_is_said_in_words(reply: Answer, code: Why, said: str) -> None:
    """Half of the stores of a Thanos were away, and the sum of the others was a fall of the business."""
    with pytest.raises(NoValue, match=said) as caught:
        vector_of(reply, T0)
    assert caught.value.code is code


def test_a_harmless_annotation_costs_no_number() -> None:
    """Since 2.48 a rate over a gauge is remarked upon: its number is whole."""
    vector = vector_of(answer([one("3")], warnings=["PromQL warning: bucket label \"le\" is missing"]), T0)
    assert (vector.values, len(vector.notes)) == ((({}, 3.0),), 1)
    assert vector_of(answer([T0, "7"], kind="scalar"), T0).values == (({}, 7.0),)


def test_series_are_told_apart_by_their_labels_and_named_in_bounds() -> None:
    """Two regions were one subject; a label of 3 kB became a subject of 3 kB."""
    assert subject_of("orders", {}) == subject_of("orders", {"__name__": "x"}) == "orders"
    assert subject_of("orders", {"region": "eu", "a": 'say "hi"\n'}) == r'orders{a="say \"hi\"",region="eu"}'
    long = [subject_of("orders", {"path": "/x" * 900 + end}) for end in "ab"]
    assert all(len(subject) <= 160 for subject in long)
    assert len({subject_of("orders", {"path": "y" * 100, "q": "/x" * 90 + end}) for end in "ab"}) == 2


def test_a_series_that_leaves_the_answer_is_a_gap_and_not_forgotten() -> None:
    """Europe's shop was gone, and with it the series: its alert closed as if all were well."""
    source = Scripted(answer([one("8", r="eu"), one("5", r="us")]), answer([one("5", r="us")]),
                      FetchError(Why.UNREACHABLE, "refused: nothing listens there", connected=False, is_down=True))
    both = ['orders{r="eu"}', 'orders{r="us"}']
    assert [(r.subject, r.value) for r in source.once() if isinstance(r, Sample)] == [(both[0], 8.0), (both[1], 5.0)]
    gone = [(r.subject, r.code, r.why) for r in source.once() if isinstance(r, Gap)]
    assert gone == [(both[0], Why.MISSING, "this series is not in the answer any more")]
    assert [(r.subject, r.code) for r in source.once() if isinstance(r, Gap)] == [(s, Why.UNREACHABLE) for s in both]


def test_the_past_is_asked_of_the_source_itself_and_once_a_minute() -> None:
    """A day and a week before the moment of its answer, by its own clock."""
    empty = answer([])
    source = Scripted(answer([one("8")]), answer([one("10", T0 - DAY_S)]), empty, answer([one("8")]), with_past=True)
    told = source.once(0.0)
    assert [(r.name, r.value) for r in told if isinstance(r, Sample)] == [("sourced", 8.0), ("sourced_1d", 10.0)]
    assert [(r.name, r.code) for r in told if isinstance(r, Gap)] == [("sourced_7d", Why.NO_DATA)]
    assert [url.rpartition("time=")[2] for url in source.asked[1:]] == [f"{T0 - DAY_S:.3f}", f"{T0 - 7 * DAY_S:.3f}"]
    again = source.once(15.0)
    assert len(source.asked) == 4
    assert [r.name for r in again] == ["sourced", "sourced_1d", "sourced_7d"]
    assert "partial_response=false" in source.asked[0]


@pytest.mark.parametrize(("story", "result", "said"), [
    ("5 minutes are a slow clock", [one("8", T0 - 300)], None),
    ("a cache's answer of two hours ago", [one("8", T0 - 7200)], "2 h before the one asked of: a cache stands"),
    ("one store of two has stood still", [one("8", r="eu"), one("5", T0 - 301, r="us")], "before the one asked of"),
    ("its clock, or ours", [one("8", T0 + 3600)], "60 min after the one asked of"),
    ("no time at all", [one("8", "NaN")], "of another time, which it does not tell"),
])
def test_a_number_of_another_time_is_no_reading(story: str, result: list[dict[str, Any]], said: str | None) -> None:
    """A caching front end told 8 orders/s while the shop stood still, and each look took it for fresh."""
    told = Scripted(answer(result)).once()
    stale = [r.why for r in told if isinstance(r, Gap) and r.code == Why.STALE]
    assert (len(stale), said is None or said in stale[0]) == (0 if said is None else 1, True), story
    assert len(told) == 1


def test_a_past_of_another_day_is_none() -> None:
    """Asked of a day ago it answered of now: 8 against 8 is no comparison."""
    source = Scripted(answer([one("8")]), answer([one("8")]), answer([one("9", T0 - 7 * DAY_S)]), with_past=True)
    told = source.once()
    assert [(r.name, r.value) for r in told if isinstance(r, Sample)] == [("sourced", 8.0), ("sourced_7d", 9.0)]
    assert [(r.name, r.code) for r in told if isinstance(r, Gap)] == [("sourced_1d", Why.STALE)]


def test_a_source_that_hangs_keeps_nobody_and_tells_nothing_old() -> None:
    """The tick waited for a query of 9 s; a value of ten minutes ago was told as of now."""
    source = Scripted(every_s=15.0, total_s=10.0)
    source._thread = object()  # type: ignore[assignment]  # as if it ran and hung
    source._seen = {"orders": 0.0}
    source._last = (time.monotonic() - 41.0, source._failed(Why.ERROR, "x"))
    batch = source.read(T0)
    assert [(g.code, g.why) for g in batch.readings if isinstance(g, Gap)] == [
        (Why.LATE, "it told the last value 41 s ago")]
    assert batch.took_s < 1.0
    assert batch.error == "http://prometheus:9090: it told the last value 41 s ago"


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "steps"), [
    ("orders", ("orders",)), ("data.days[0].count", ("data", "days", 0, "count")), ("[-1].n", (-1, "n")),
    ('a["orders.paid"].b', ("a", "orders.paid", "b")), ("orders per min", ("orders per min",)),
])
def test_paths(path: str, steps: tuple[str | int, ...]) -> None:
    """The way to the number."""
    assert steps_of(path) == steps


@pytest.mark.parametrize(("path", "rest"), [
    ("", "^$"), (".a", r"^\.a$"), ("a..b", r"^\.\.b$"), ("a[x]", r"^\[x\]$"), ("a[", r"^\[$"), ("a]b", r"^\]b$"),
    ('a["b]', r'^\["b\]$'),
])
def test_what_is_no_path_is_refused(path: str, rest: str) -> None:
    """A typing error that would only be found when the first answer comes; from where on it is wrong is said."""
    with pytest.raises(ValueError, match=rest):
        steps_of(path)


@pytest.mark.parametrize(("body", "code", "said"), [
    ({"a": {"c": 1}}, Why.MISSING, "the answer has no 'b' under a: there is only c"),
    ({"a": [1]}, Why.MISSING, "there is a list of 1"),
    ({"a": {"b": None}}, Why.NO_DATA, "a.b is null"),
    ({"a": {"b": True}}, Why.NOT_A_NUMBER, "a.b is a bool, not a number"),
    ({"a": {"b": "soon"}}, Why.NOT_A_NUMBER, "a.b is a text, not a number"),
    ({"a": {"b": {}}}, Why.NOT_A_NUMBER, "a.b is a dict, not a number"),
])
def test_a_path_that_leads_to_no_number_says_how_far_it_leads(body: Any, code: Why, said: str) -> None:
    """The shop renamed a field: "KeyError" was all that was said."""
    with pytest.raises(NoValue, match=said) as caught:
        number_at(body, steps_of("a.b"))
    assert caught.value.code is code
    assert number_at({"a": {"b": "12.50"}}, ("a", "b")) == 12.5


# --- configuration ----------------------------------------------------------------------------------------------------

SOURCES = """
discover: false
nvml: off
kernel_log: off
sources:
  promql: [{name: orders, url: "http://prometheus:9090", query: "sum(increase(orders_total[1h]))", token_file: %s}]
  json: [{name: rated, url: "http://shop/api", path: good.share}]
"""


def test_each_source_is_judged_by_its_own_rule_or_as_a_business_metric(tmp_path: Path) -> None:
    """A share of good answers is judged by a rule of its owner's; M7 judges the rest, and says what it needs."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "own.yaml").write_text(
        "- {id: rated-low, signal: source_value, params: {source: rated}, fires: '< 0.9', severity: ticket}\n")
    file = tmp_path / "tocsin.yaml"
    file.write_text(SOURCES % (tmp_path / "token") + f"rules: {{dirs: [{tmp_path / 'rules'}]}}\n")
    config, rules = load_all(file, {}, CATALOGUE)

    assert business_of(config, rules.rules) == ("orders",)
    assert [note for note in rules.notes if note.startswith("business-metric")] == [(
        "business-metric judges orders: 5% less is told from noise only where a window of the query counts 3,600"
        " events or more (3 sigma)")]
    judged = {source.name: getattr(source, "judged_by", None) for source in sources_of(config, {})}
    assert judged == {"promql:orders": "judged by business-metric, business-metric-day",
                      "json:rated": "judged by rated-low"}


def test_on_twenty_nodes_one_agent_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ConfigMap for all: 20 times the queries, and 20 tickets."""
    file = tmp_path / "tocsin.yaml"
    file.write_text(SOURCES % "/t")
    config, rules = load_all(file, {}, CATALOGUE)
    one = msgspec.structs.replace(config, cluster_rules=True)
    assert len(sources_of(config, {})) == 2  # a machine that is nobody's node
    assert not_asked(config) == []
    monkeypatch.setenv("NODE_NAME", "gpu-17")
    assert sources_of(config, {}) == []
    assert (setup_of(config, rules.rules).sourced, setup_of(config, rules.rules).business) == ((), frozenset())
    assert not_asked(config)[0].startswith("sources: orders, rated are not asked here")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert [source.name for source in sources_of(one, {})] == ["promql:orders", "json:rated"]
    assert setup_of(one, rules.rules).sourced == ("orders", "rated")
    assert not_asked(one) == []


def test_how_a_router_shares_out_is_judged_by_one_agent_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes read the router, for what it tells of their own engine; 20 of them told one hot replica 20 times."""
    every = Config(routers=(RouterConfig(url="http://edge:29000", name="edge"),))
    one = msgspec.structs.replace(every, cluster_rules=True)
    assert told_by_each(every)[0].startswith("routers: edge: in a fleet without Kubernetes each agent that has them")
    assert (not_asked(every), told_by_each(one), setup_of(every, ()).judges_all) == ([], [], True)
    monkeypatch.setenv("NODE_NAME", "gpu-17")
    assert [setup_of(config, ()).judges_all for config in (every, one)] == [False, True]
    assert not_asked(every)[0].startswith("routers: how edge shares requests out (replica-hotspot) is not judged here")
    assert "router:edge" in [source.name for source in sources_of(every, {})]


@pytest.mark.parametrize(("changed", "said"), [
    (("path: good.share", "path: good..share"), "'good..share' is no path, from '..share' on"),
    (('query: "sum(increase(orders_total[1h]))"', 'query: " "'), "is empty; write a query"),
    (("name: rated", "name: orders"), "a second source orders"),
])
def test_a_source_that_cannot_work_is_refused_at_load(tmp_path: Path, changed: tuple[str, str], said: str) -> None:
    """It would be a Gap for ever."""
    file = tmp_path / "tocsin.yaml"
    file.write_text((SOURCES % "/t").replace(*changed))
    with pytest.raises(ConfigErrors, match=said.replace("[", r"\[").replace(".", r"\.")):
        load_all(file, {}, CATALOGUE)


def test_a_rule_for_a_source_that_nobody_configured_is_refused(tmp_path: Path) -> None:
    """It would never fire, and nobody would know."""
    (tmp_path / "own.yaml").write_text(
        "- {id: mine, signal: source_value, params: {source: order}, fires: '< 9', severity: ticket}\n")
    file = tmp_path / "tocsin.yaml"
    file.write_text(SOURCES % "/t" + f"rules: {{dirs: [{tmp_path}]}}\n".replace(str(tmp_path), str(tmp_path / "r")))
    (tmp_path / "r").mkdir()
    (tmp_path / "own.yaml").rename(tmp_path / "r" / "own.yaml")
    with pytest.raises(ConfigErrors, match=r"own.yaml:1: mine.params.source: there is no source 'order'; did you mean"):
        load_all(file, {}, CATALOGUE)


def test_the_token_is_read_when_it_is_used_and_never_shown(tmp_path: Path) -> None:
    """Rotated at noon; its file gone at one: the file is named, and the token is not."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    file = tmp_path / "tocsin.yaml"
    file.write_text(SOURCES % token)
    source = next(s for s in sources_of(load_all(file, {}, CATALOGUE)[0], {}) if isinstance(s, PromqlSource))
    with pytest.raises(FetchError):  # no such host; the token went into the header
        source.get("http://127.0.0.1:9/api/v1/query?query=1")
    assert source._sent == "s3cret"
    assert b"Authorization: Bearer s3cret" in next(iter(source._fetchers.values()))._wire
    token.write_text("new\n")
    with pytest.raises(FetchError):
        source.get("http://127.0.0.1:9/api/v1/query?query=1")
    assert b"Bearer new" in next(iter(source._fetchers.values()))._wire
    token.unlink()
    with pytest.raises(FetchError, match="token cannot be read: No such file") as caught:
        source.get("http://127.0.0.1:9/api/v1/query?query=1")
    assert "new" not in str(caught.value)


# --- M7 ---------------------------------------------------------------------------------------------------------------

Told = Mapping[str, Mapping[str, float | None]]  # subject -> name -> value; None: a Gap


def shop(**setup: Any) -> Node:
    """A node that judges one source."""
    rules = tuple(built_in()[rule] for rule in ("business-metric", "business-metric-day", "blind"))
    return Node(Setup("gpu-17", 5.0, SLO, (), rules, severity_of,
                      **({"sourced": ("orders",), "business": frozenset({"orders"})} | setup)))


def play(node: Node, start_s: float, end_s: float, tell: Callable[[float], Told], step_s: float = 5.0,
         kind: str = "promql") -> list[tuple[str, str, str, float]]:
    """Reads and judges from one second of the story to another; (rule, subject, what, when) of each change."""
    found, at_s = list[tuple[str, str, str, float]](), start_s
    while at_s <= end_s:
        at = T0 + at_s
        readings = tuple(Gap(name, subject, Why.UNREACHABLE, "refused", at) if value is None
                         else Sample(name, subject, value, at)
                         for subject, names in tell(at_s).items() for name, value in names.items())
        node.take(Batch(f"{kind}:orders", at, 0.0, readings))
        found += [(c.alert.rule, c.alert.subject, c.kind, at_s) for c in node.step(at, step_s)
                  if c.kind in ("firing", "resolved")]
        at_s += step_s
    return found


def test_a_week_ago_decides_where_it_is_known() -> None:
    """Saturday: 30 % under Friday, as each week. Nobody is woken; it is noted."""
    told = {"orders": {"sourced": 7000.0, "sourced_1d": 10000.0, "sourced_7d": 7100.0}}
    assert play(shop(), 0, 900, lambda _: told) == [("business-metric-day", "orders", "firing", 600.0)]


def test_a_day_ago_stands_in_for_a_week_that_nobody_knows() -> None:
    """The first week of a new Prometheus: yesterday is all there is, and it pages."""
    told = {"orders": {"sourced": 9000.0, "sourced_1d": 10000.0}}
    node = shop()
    assert play(node, 0, 700, lambda _: told) == [("business-metric", "orders", "firing", 600.0)]
    signal = node.signals["business-metric", "orders"]
    assert signal.value == pytest.approx(0.1)
    assert "note" not in signal.evidence


@pytest.mark.parametrize(("story", "now", "day", "fires"), [
    ("Saturday, as a week ago, and 30 % under Friday", 7000.0, 10000.0, []),
    ("it fell, and was as low yesterday", 5000.0, 5000.0, [("business-metric", "orders", "firing", 600.0)]),
])
def test_a_week_that_could_not_be_asked_is_not_yesterday(story: str, now: float, day: float, fires: list[Any]) -> None:
    """The query of last week's value timed out: Friday stood in, and Saturday paged, or a page ended."""
    node = shop()
    changes = play(node, 0, 700, lambda _: {"orders": {"sourced": now, "sourced_1d": day, "sourced_7d": 7100.0}})
    changes += play(node, 705, 2500, lambda _: {"orders": {"sourced": now, "sourced_1d": day, "sourced_7d": None}})
    assert [change for change in changes if change[0] == "business-metric"] == fires, story
    signal = node.signals["business-metric", "orders"]
    assert (signal.state, signal.why) == ("gap", "its value a week ago: refused")


def test_4_9_percent_is_no_alert_and_a_small_count_says_how_much_it_varies() -> None:
    """The limit of 5 %; of 900 events 10 % are noise (3 / sqrt(900))."""
    node = shop()
    assert play(node, 0, 900, lambda _: {"orders": {"sourced": 9510.0, "sourced_7d": 10000.0}}) == []
    young = shop()
    play(young, 0, 5, lambda _: {"orders": {"sourced": 812.0}})
    signal = young.signals["business-metric", "orders"]  # the number itself is no share: "81200 %" stood there
    assert (signal.value, signal.why) == (None, "it is 812; no value of a day or a week ago yet")
    small = shop()
    play(small, 0, 5, lambda _: {"orders": {"sourced": 800.0, "sourced_7d": 900.0}})
    assert small.signals["business-metric", "orders"].evidence["note"] == (
        "if it counts events, 900 vary by ±10.0% by themselves; 5% is told from noise from 3,600 on")
    assert events_needed(0.05) == 3600.0


def test_a_json_address_is_compared_with_what_it_told_yesterday() -> None:
    """It has no past of its own: after a day its fall is noted, through a restart. No Saturday pages by Friday."""
    node = shop()
    assert play(node, 0, DAY_S, lambda _: {"orders": {"sourced": 10000.0}}, 60.0, "json") == []
    assert node.signals["business-metric-day", "orders"].value == 0.0
    rows = node.windows.unsaved()
    again = shop()
    again.restore(node.book, {"sourced": node.learned.sourced})
    again.windows.restore(row for row in rows if row.res == "coarse" or row.at > T0 + DAY_S - 4000)
    changes = play(again, DAY_S + 5, DAY_S + 700, lambda _: {"orders": {"sourced": 9000.0}}, 5.0, "json")
    assert changes == [("business-metric-day", "orders", "firing", DAY_S + 605.0)]
    assert again.signals["business-metric", "orders"].state == "idle"


def test_a_gap_holds_the_alert_and_five_minutes_of_it_are_blindness() -> None:
    """Prometheus was down while it fired: it fires on, also after a restart of the agent, and `blind` says why."""
    node, low = shop(), {'orders{r="eu"}': {"sourced": 8000.0, "sourced_7d": 10000.0}}
    play(node, 0, 700, lambda _: low)
    again = shop()
    again.restore(node.book, {"sourced": node.learned.sourced})
    again.windows.restore(node.windows.unsaved())
    changes = play(again, 705, 1100, lambda _: {"orders": {"sourced": None}})
    assert [change[:3] for change in changes] == [("blind", "orders", "firing")]
    assert 1000.0 <= changes[0][3] <= 1040.0
    assert [key for key, alert in again.book.alerts.items() if alert.state == "firing"] == [
        ("business-metric", 'orders{r="eu"}'), ("blind", "orders")]


def test_a_source_that_is_taken_out_closes_its_alerts() -> None:
    """`sources:` was emptied, and the alert fired for ever."""
    node = shop()
    play(node, 0, 700, lambda _: {"orders": {"sourced": 8000.0, "sourced_7d": 10000.0}})
    without = shop(sourced=(), business=frozenset())
    without.restore(node.book, {"sourced": node.learned.sourced})
    ended = without.step(T0 + 705, 5.0)
    assert {(c.alert.rule, c.kind, c.why) for c in ended} == {("business-metric", "resolved", "subject removed")}
    assert without.learned.sourced == {}


def test_a_rule_of_ones_own_judges_a_source() -> None:
    """`source_value` with the source's name: any query, any limit."""
    rule = replace(built_in()["swapped"], id="mine", signal="source_value", op="<", factor=0.9, for_s=0.0,
                   params={"source": "orders"})
    node = Node(Setup("n", 5.0, SLO, (), (rule,), severity_of, sourced=("orders",)))
    assert play(node, 0, 5, lambda _: {'orders{m="a"}': {"sourced": 0.8}, 'orders{m="b"}': {"sourced": 0.95}}) == [
        ("mine", 'orders{m="a"}', "firing", 0.0)]


def test_a_node_without_sources_pays_nothing() -> None:
    """No subject, no signal, and nothing in memory."""
    node = shop(sourced=(), business=frozenset())
    node.step(T0, 5.0)
    assert not [key for key in node.signals if key[0].startswith("business")]
    assert rules_for(Config(), CATALOGUE).notes == ()


def test_json_is_read_as_it_is_told() -> None:
    """One address, one number; what is no JSON is said."""

    class Shop(JsonSource):
        def get(self, url: str, *, again: bool = True) -> Answer:
            return Answer(200, {}, b'{"orders": {"per_min": 12}}' if url.endswith("good") else b"<html>")

    good, bad = (Shop("orders", f"http://shop/{word}", "orders.per_min") for word in ("good", "bad"))
    assert [(r.subject, r.value) for r in good._whole(0.0).readings if isinstance(r, Sample)] == [("orders", 12.0)]
    assert bad._whole(0.0).error == "http://shop/bad: the answer is not JSON"
