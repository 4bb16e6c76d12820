"""The statistics, against numbers worked out by hand, by promtool or by published examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.stats import SlowShare, add_buckets, in_last_bucket, quantile, slow_share, wilson_lower

INF = math.inf


@pytest.mark.parametrize(("bad", "n", "want"), [
    (10, 100, 0.0552),  # Newcombe 1998, table I: 10/100 gives 0.0552 to 0.1744
    (1, 10, 0.0179),  # one error in ten is not an error rate of 10 %
    (81, 263, 0.2553),  # Newcombe 1998: 81/263
    (0, 20, 0.0),
    (1, 29, 0.0061),  # Newcombe 1998: 1/29
    (0, 0, 0.0),
    (5, 5, 0.5655),  # 1 / (1 + 1.96^2 / 5)
])
def test_few_requests_prove_little(bad: float, n: float, want: float) -> None:
    """The lower bound of Wilson's interval, as Newcombe's paper prints it (method 3)."""
    assert wilson_lower(bad, n) == pytest.approx(want, abs=0.00005)


def test_c028_p99_of_inter_token_latency() -> None:
    """90 of 100 gaps within 50 ms, all within 100 ms: 0.05 + 0.05 x (99 - 90) / 10."""
    assert quantile(0.99, [(0.05, 90), (0.1, 100), (INF, 100)]) == pytest.approx(0.095)


def test_c037_zeros_have_a_quantile_all_the_same() -> None:
    """208 zeros, all in the first bucket: 0.001 x 0.99; that it is suspicious the signal says."""
    assert quantile(0.99, [(0.001, 208), (0.005, 208), (10.0, 208), (INF, 208)]) == pytest.approx(0.00099)


def test_c039_no_observation_has_no_quantile() -> None:
    """An idle window: no number, no division by zero, no 0 s."""
    assert quantile(0.99, [(0.1, 0), (1.0, 0), (INF, 0)]) is None
    assert quantile(0.99, []) is None
    assert slow_share(0.5, []) == SlowShare(0, 0, 0, 0, INF)


def test_c040_buckets_are_added_before_the_quantile() -> None:
    """A busy fast engine and an idle slow one: 0.1 + 0.9 x (108.9 - 100) / 10 = 0.901, not the mean 0.545."""
    both = add_buckets([{0.1: 100, 1.0: 100, INF: 100}, {0.1: 0, 1.0: 10, INF: 10}])
    assert both == [(0.1, 100), (1.0, 110), (INF, 110)]
    assert quantile(0.99, both) == pytest.approx(0.901)


def test_c040_the_first_bound_may_be_zero() -> None:
    """ClickHouse's documented example of the same algorithm: the median is 0.35."""
    assert quantile(0.5, [(0.0, 6), (0.5, 11), (1.0, 14), (INF, 19)]) == pytest.approx(0.35)
    assert quantile(0.2, [(0.0, 6), (0.5, 11), (1.0, 14), (INF, 19)]) == 0.0


def test_a_quantile_over_the_last_bound_is_said_to_be() -> None:
    """Prometheus answers the last bound; beside it stands "over"."""
    buckets = [(0.1, 50), (10.0, 90), (INF, 100)]
    assert quantile(0.99, buckets) == 10.0
    assert in_last_bucket(0.99, buckets)
    assert not in_last_bucket(0.9, buckets)


def test_a_histogram_without_its_last_bucket_has_no_quantile() -> None:
    """Prometheus gives NaN where +Inf is lost: the rest does not say how many there were."""
    assert quantile(0.5, [(0.1, 50), (10.0, 90)]) is None


def test_engines_with_other_buckets_are_added_where_both_count() -> None:
    """One engine started with custom buckets: what it counted up to the other's 0.1 s nobody knows."""
    assert add_buckets([{0.1: 5, 0.5: 8, INF: 9}, {0.25: 1, 0.5: 2, INF: 4}, {}]) == [(0.5, 10), (INF, 13)]


@pytest.mark.parametrize(("story", "limit", "want"), [
    ("the SLO is a bound: certain and possible are the same", 0.5, SlowShare(100, 10, 10, 0.5, 0.5)),
    ("the SLO lies inside a bucket: 10 are over 0.5, 40 over 0.25", 0.3, SlowShare(100, 10, 40, 0.25, 0.5)),
    ("under the first bound all that is not certain is possible", 0.1, SlowShare(100, 40, 100, 0.0, 0.25)),
    ("over the last bound nothing is certain", 30.0, SlowShare(100, 0, 4, 10.0, INF)),
    ("on the last bound", 10.0, SlowShare(100, 4, 4, 10.0, 10.0)),
])
def test_slow_share(story: str, limit: float, want: SlowShare) -> None:
    """n − F(hi) were certainly slow, n − F(lo) possibly."""
    assert slow_share(limit, [(0.25, 60), (0.5, 90), (10.0, 96), (INF, 100)]) == want, story


def test_a_product_of_floats_is_still_on_its_bound() -> None:
    """1.5 x slo.e2e_p99 with 0.2 s is 0.30000000000000004, and the bucket says 0.3."""
    assert slow_share(1.5 * 0.2, [(0.3, 60), (0.4, 90), (INF, 100)]) == SlowShare(100, 40, 40, 0.3, 0.3)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 0.999))
@example([0, 13, 0, 13], 0.5)
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(counts: list[int], q: float) -> None:
    """Whatever was counted, the quantile is between the bounds around the observation of that rank."""
    bounds = [0.1, 1.0, 10.0, INF]
    rising = [(b, float(sum(counts[: i + 1]))) for i, b in enumerate(bounds)]
    got = quantile(q, rising)
    if sum(counts) == 0:
        assert got is None
        return
    i = next(i for i, (_, c) in enumerate(rising) if c >= q * rising[-1][1])
    assert got is not None
    assert ([0.0, *bounds][i] if i < 3 else 10.0) <= got <= (bounds[i] if i < 3 else 10.0)
