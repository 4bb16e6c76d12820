"""What an incident cost, counted from an engine's page: the numbers by hand."""

from __future__ import annotations

import pytest

from agent.impact import counted, impact, since_last
from agent.signals import Scene
from agent.windows import Windows
from tests.scenes import T0, hist, read, scene

PAGE = {"running": 1.0, "waiting": 0.0}


def served(windows: Windows, at_s: float, requests: float, errors: float, slow: float) -> None:
    """A page: so many finished, of which so many failed; one first token each, of which so many took a second."""
    buckets = {"0.25": requests - slow, "0.5": requests - slow, "1.0": requests, "+Inf": requests}
    finished = {"finished.stop": requests - errors, "finished.error": errors}
    read(windows, at_s, "e", PAGE | finished | hist("ttft", buckets))


def hour() -> Scene:
    """100 requests a minute for ten minutes, then ten in which 6 of 100 fail and 20 are slow."""
    windows, slow, errors = Windows(5.0), 0.0, 0.0
    for minute in range(21):
        slow, errors = (20.0 * max(0, minute - 10), 6.0 * max(0, minute - 10))
        served(windows, 60.0 * minute, 100.0 * minute, errors, slow)
    return scene(windows, 1200.0)


def test_requests_errors_and_slow_ones_since_the_onset() -> None:
    """From 600 s on: 1,000 requests, 60 failed, 200 slow; 6 % of 10 min are 0.6 min of 43.2 (99.9 % over 30 d)."""
    cost = impact(hour(), T0 + 600.0, T0 + 1200.0)
    one = cost["targets"]["e"]
    assert cost["span_s"] == 600.0
    assert (one["requests"], one["errors"], one["ttft"], one["ttft_slow"]) == (1000.0, 60.0, 1000.0, 200.0)
    assert one["budget_minutes"] == pytest.approx(0.6)
    assert one["budget_share"] == pytest.approx(0.6 / 43.2)


def test_days_are_counted_once_and_whole() -> None:
    """Counted each minute, with nothing twice and nothing between: the sum is what one look would have told."""
    windows, last, total = Windows(5.0), dict[str, float](), [0.0, 0.0]
    for step in range(100):
        served(windows, 7.0 * step, 10.0 * step, 1.0 * step, 0.0)
        if step % 9 == 0:
            rows, last = since_last(scene(windows, 7.0 * step + 3.0), last)
            total = [total[0] + sum(row.requests for row in rows), total[1] + sum(row.errors for row in rows)]
    whole = counted(scene(windows, 700.0), scene(windows, 700.0).targets["e"], T0)
    assert total == [whole.requests, whole.errors] == [990.0, 99.0]
    assert last == {"e": T0 + 693.0}


def test_a_target_that_is_gone_is_counted_no_more() -> None:
    """What was removed from the configuration stays in its days, and not in what is still to be counted."""
    windows = Windows(5.0)
    served(windows, 0.0, 0.0, 0.0, 0.0)
    assert since_last(scene(windows, 5.0), {"gone": T0})[1] == {"e": T0}
