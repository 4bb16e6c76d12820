"""The statistics behind the signals: Wilson's bound, Prometheus's quantile, slow shares of a histogram. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution

Buckets = Sequence[tuple[float, float]]  # (upper bound, cumulative count), rising, the last bound +inf


class SlowShare(NamedTuple):
    """How many of n observations were slower than a limit: certainly, and possibly (the limit lies inside a bucket)."""

    n: float
    certain: float
    possible: float
    low_bound: float  # the bucket bounds around the limit
    high_bound: float


def wilson_lower(hits: float, n: float, z: float = Z_95) -> float:
    """Lower bound of Wilson's score interval for a share of hits in n (E. B. Wilson 1927); 0 when n is 0."""
    if n <= 0 or hits <= 0:
        return 0.0
    share = min(1.0, hits / n)
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n))


def add_buckets(histograms: Iterable[Mapping[float, float]]) -> list[tuple[float, float]]:
    """Add histograms bound by bound (never average their quantiles) and make the counts rise.

    Only bounds that all of them have: what a histogram counted up to a bound that it lacks is not known.
    """
    given = [h for h in histograms if h]
    bounds = sorted(set(given[0]).intersection(*given[1:])) if given else []
    counts = map(sum, zip(*(map(h.__getitem__, bounds) for h in given), strict=True))
    rising = accumulate(counts, max, initial=0.0)
    next(rising)
    return list(zip(bounds, rising, strict=True))


def quantile(q: float, buckets: Buckets) -> float | None:
    """Prometheus's histogram_quantile (promql/quantile.go, BucketQuantile): None for no observations or no +Inf.

    In the last bucket it gives the last finite bound, as Prometheus does: say "over" beside it (see `in_last_bucket`).
    """
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    i = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if i == len(buckets) - 1:
        return buckets[-2][0]
    bound, count = buckets[i]
    if i == 0 and bound <= 0:
        return bound
    start, before = (0.0, 0.0) if i == 0 else buckets[i - 1]
    if count <= before:
        return bound
    # Rounding must not lift it over its bound: a limit that is the bound would look passed.
    return min(bound, start + (bound - start) * ((rank - before) / (count - before)))


def in_last_bucket(q: float, buckets: Buckets) -> bool:
    """The quantile lies over the last finite bound."""
    return len(buckets) >= 2 and q * buckets[-1][1] > buckets[-2][1]


def slow_share(limit: float, buckets: Buckets) -> SlowShare:
    """Observations over `limit`, by the bucket bounds around it (engine_metrics 11.2)."""
    n = buckets[-1][1] if buckets else 0.0
    low, under_low = 0.0, 0.0
    for bound, count in buckets:
        if math.isclose(bound, limit):  # 1.5 x 0.2 s is not quite 0.3 s
            return SlowShare(n, n - count, n - count, bound, bound)
        if bound > limit:
            return SlowShare(n, n - count, n - under_low, low, bound)
        low, under_low = bound, count
    return SlowShare(n, 0.0, n - under_low, low, math.inf)


def events_needed(drop: float) -> float:
    """How many events a window must count so that a drop of this share is no noise: 3 sigma of Poisson's sqrt(n)."""
    return math.inf if drop <= 0 else round((3 / drop) ** 2, 6)
