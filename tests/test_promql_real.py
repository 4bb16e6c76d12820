"""A real Prometheus as a source: its restart, a slow, an empty and a wrong query, and a business that falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from agent.model import Gap, Sample, Why
from agent.node import Node, Setup
from agent.sources.promql import PromqlSource
from rules import severity_of
from tests.page_server import PageServer
from tests.prometheus import RealPrometheus
from tests.receiver import wait_until
from tests.scenes import SLO, built_in

pytestmark = pytest.mark.heavy

DAY_S = 86400.0
# 31 million steps over some seconds of counters: far more than it gets through in the time that it is given.
SLOW = "count_over_time((sum(rate(prometheus_http_requests_total[5m])))[360d:1s])"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealPrometheus, PageServer]]:
    """A shop that tells its orders by region, and a Prometheus that knows what they were a day and a week ago."""
    with PageServer(b'orders_last_hour{region="eu"} 8100\norders_last_hour{region="us"} 5000\nblank NaN\n') as shop:
        prometheus = RealPrometheus(tmp_path_factory.mktemp("prometheus"), port=free_port(),
                                    targets=[f"127.0.0.1:{shop.port}"])
        now = time.time()
        # eu: 10000 a week ago (19 % less now), 9000 a day ago (10 % less); us: 5000 a week ago, unknown a day ago
        prometheus.remember(["# TYPE orders_last_hour gauge", *(
            f'orders_last_hour{{region="{region}",job="t",instance="x"}} {count} {now - back_s + 15 * i:.0f}'
            for region, count, back_s in (("eu", 10000, 7 * DAY_S), ("eu", 9000, DAY_S), ("us", 5000, 7 * DAY_S))
            for i in range(-20, 40))])
        with prometheus:
            yield prometheus, shop


def free_port() -> int:
    """A port that nobody has now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why(source: PromqlSource, until: Callable[[list[Sample | Gap]], bool], what: str) -> list[Sample | Gap]:
    """What a source tells once it is so."""
    told: list[Sample | Gap] = []

    def is_so() -> bool:
        told[:] = source.read(time.time()).readings
        return until(told)

    wait_until(is_so, 60.0, f"{what}; told {told}")
    return told


def is_gap(told: list[Sample | Gap]) -> bool:
    """Nothing has a value."""
    return bool(told) and all(isinstance(r, Gap) for r in told)


def test_a_business_that_falls_pages_and_one_that_does_not_is_quiet(world: tuple[RealPrometheus, PageServer]) -> None:
    """Europe sells 19 % less than a week ago: a page after 10 minutes, whatever yesterday was. America: none."""
    prometheus, _ = world
    source = PromqlSource("orders", prometheus.url, "sum by (region) (orders_last_hour)", with_past=True, every_s=1.0)
    why(source, lambda told: {r.subject for r in told if isinstance(r, Sample)} ==
        {'orders{region="eu"}', 'orders{region="us"}'}, "both regions are told")
    rules = tuple(rule for name, rule in built_in().items() if name.startswith("business-metric"))
    node = Node(Setup("gpu-17", 5.0, SLO, (), rules, severity_of, sourced=("orders",), business=frozenset({"orders"})))
    start, fired = time.time(), []
    for tick in range(125):
        node.take(source.read(start + 5.0 * tick))
        fired += [(change.alert.rule, change.alert.subject, change.alert.severity, 5 * tick)
                  for change in node.step(start + 5.0 * tick, 5.0) if change.kind == "firing"]
    source.close()

    assert fired == [("business-metric", 'orders{region="eu"}', "page", 600),
                     ("business-metric-day", 'orders{region="eu"}', "info", 600)]
    week, day = (node.signals[rule.id, 'orders{region="eu"}'] for rule in rules)
    assert [week.value, day.value] == pytest.approx([0.19, 0.1])
    assert week.evidence["text"] == "8100, 19.0% under the 10000 of a week ago"
    assert node.signals["business-metric", 'orders{region="us"}'].value == 0.0
    assert node.signals["business-metric-day", 'orders{region="us"}'].state == "idle"
    message = next(m for m in node.firing() if m.labels["rule"] == "business-metric")
    assert "node" not in message.labels  # it is the cluster's
    assert message.annotations["summary"].startswith('orders{region="eu"}')


@pytest.mark.parametrize(("query", "code", "said"), [
    ("sum(", Why.BAD_STATUS, "the query is wrong: invalid parameter \"query\": 1:5: parse error: unclosed left paren"),
    ("no_such_metric", Why.NO_DATA, "the query is right and its answer is empty: no such series now"),
    ("orders_last_hour[1m]", Why.BAD_PAGE, "the query gives a matrix, not one number a series"),
    ("blank", Why.NOT_A_NUMBER, "the query gives nan"),
    ("orders_last_hour + on () group_right () orders_last_hour", Why.ERROR, "the query cannot be worked out: "),
    (SLOW, Why.TIMEOUT, "the query takes too long, and it was given up there: make a recording rule of it"),
])
def test_what_is_no_value_is_a_gap_in_words(world: tuple[RealPrometheus, PageServer], query: str, code: Why,
                                            said: str) -> None:
    """An empty answer was read as 0 orders, and a typing error as silence."""
    source = PromqlSource("q", world[0].url, query, every_s=1.0, total_s=2.0)
    told = why(source, lambda told: is_gap(told) and (query != "blank" or told[0].subject != "q"), "a gap")
    source.close()

    assert {gap.code for gap in told if isinstance(gap, Gap)} == {code}
    assert all(gap.why.startswith(said) for gap in told if isinstance(gap, Gap)), told


def test_it_survives_the_restart_of_prometheus(world: tuple[RealPrometheus, PageServer]) -> None:
    """While it is down each series that was known is a Gap that says so; when it is back its value is."""
    prometheus, _ = world
    source = PromqlSource("orders", prometheus.url, "sum by (region) (orders_last_hour)", every_s=0.5)
    both = {'orders{region="eu"}', 'orders{region="us"}'}
    why(source, lambda told: {r.subject for r in told if isinstance(r, Sample)} == both, "told")
    prometheus.stop()
    down = why(source, is_gap, "gaps")
    prometheus.start()
    up = why(source, lambda told: all(isinstance(r, Sample) for r in told), "told again")
    source.close()

    assert {gap.subject for gap in down} == both
    assert {(gap.code, gap.why) for gap in down if isinstance(gap, Gap)} == {
        (Why.UNREACHABLE, "refused: nothing listens there")}
    assert {r.subject: r.value for r in up if isinstance(r, Sample)} == {
        'orders{region="eu"}': 8100.0, 'orders{region="us"}': 5000.0}
