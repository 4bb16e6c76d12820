"""The curves of the status page: what they keep, what they cost, and that a damaged one harms nothing."""

from __future__ import annotations

import random
import zlib
from math import isnan

import pytest

from agent.model import AlertKey
from agent.trend import FINE, KEPT_S, MINUTE, Saved, Trend, points, unpack

KV: AlertKey = ("kv-cache-utilization", "llama")
HIT: AlertKey = ("prefix-cache-hit-rate", "llama")


def played(moments: list[tuple[float, float | None, float | None]]) -> list[Saved]:
    """What was saved of (time, KV cache utilization, hit rate)."""
    trend = Trend()
    saved = [one for at, kv, hit in moments for one in trend.take(at, {KV: kv, HIT: hit}, ["prefix-cache-hit-rate"])]
    return saved + trend.minute(["prefix-cache-hit-rate"])


def test_a_minute_keeps_its_worst() -> None:
    """A spike of 5 s must be seen in the curve of the day: the highest where high is bad, the lowest where low is."""
    saved = played([(600.0, 0.5, 0.75), (605.0, 0.9375, 0.25), (655.0, 0.5, 0.75), (660.0, 0.625, 0.5)])
    day = points(one for one in saved if one.res == MINUTE)
    assert day == {KV: [(655.0, 0.9375), (660.0, 0.625)], HIT: [(655.0, 0.25), (660.0, 0.5)]}
    fine = points((one for one in saved if one.res == FINE), frozenset({KV}))
    assert fine == {KV: [(600.0, 0.5), (605.0, 0.9375), (655.0, 0.5), (660.0, 0.625)]}


def test_what_was_not_known_is_a_hole() -> None:
    """The engine hung for half a minute: no value is drawn that nobody measured."""
    saved = played([(600.0, 0.5, None), (605.0, None, None), (610.0, 0.75, None)])
    assert points(one for one in saved if one.res == FINE) == {KV: [(600.0, 0.5), (610.0, 0.75)], HIT: []}
    (minute,) = (one for one in saved if one.res == MINUTE)
    assert isnan(unpack(minute.blob, 2)[1][1])


def test_an_engine_that_comes_begins_new_columns() -> None:
    """Its values must not be read as another's."""
    trend = Trend()
    trend.take(600.0, {KV: 0.5})
    first = trend.take(605.0, {KV: 0.5, HIT: 0.25})
    assert [(one.res, one.keys) for one in first] == [(FINE, (KV,)), (MINUTE, (KV,))]
    assert points(trend.minute()) == {KV: [(605.0, 0.5), (605.0, 0.5)], HIT: [(605.0, 0.25), (605.0, 0.25)]}


def test_a_clock_that_steps_back_ends_the_minute() -> None:
    """NTP set it back by an hour; the curve goes on, and nothing raises."""
    saved = played([(7200.0, 0.5, None), (3600.0, 0.75, None)])
    assert [one.at for one in saved if one.res == MINUTE] == [7200.0, 3600.0]


@pytest.mark.parametrize("blob", [b"", b"not zlib", b"x\x01\x03\x00\x00\x00\x00\x01"])
def test_a_damaged_frame_is_left_out(blob: bytes) -> None:
    """One torn page of the database must not cost the status page."""
    whole = played([(600.0, 0.5, 0.25)])
    assert points([Saved(FINE, 1.0, (KV, HIT), blob), *whole])[KV] == [(600.0, 0.5), (600.0, 0.5)]


def test_a_day_of_a_large_node_fits_in_a_few_megabytes() -> None:
    """16 GPUs and 8 engines are some 700 series; noise in every value is worse than any real node."""
    noise = random.Random(17)
    keys = [(f"rule-{n % 50}", f"subject-{n // 50}") for n in range(700)]
    trend, saved = Trend(), []
    for tick in range(25):
        saved += trend.take(600.0 + 5.0 * tick, {key: noise.random() for key in keys})
    per_minute = {res: max(len(one.blob) for one in saved if one.res == res) for res in (FINE, MINUTE)}
    held = {res: per_minute[res] * KEPT_S[res] / 60.0 for res in per_minute}
    assert held[FINE] + held[MINUTE] < 8e6
    raw = {one.res: len(zlib.decompress(one.blob)) for one in saved}
    assert raw == {FINE: 12 * (8 + 700 * 4), MINUTE: 8 + 700 * 4}  # a moment is 8 bytes, a value 4
