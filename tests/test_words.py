"""What a person reads at night: numbers with units, values that do not read like their limit, one line for a phone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agent import words
from agent.model import Alert, Rule, Signal

T0 = 1_000_000_000.0
HOT = Rule("gpu-temperature", "gpu_temperature", ">", 85.0, "ticket", action="Look at cooling and airflow.")
TTFT = Rule("ttft-p99", "ttft_slow_share", ">", 0.01, "page", action="Look at prefill scheduling.")
SLOW = {"p99_s": 1.25, "p99_over": False, "n": 400.0, "slow": 12.0, "possibly_slow": 15.0, "slo_s": 0.5}


def alert(rule: Rule, value: float | None, limit: float | None, subject: str = "llama") -> Alert:
    """An alert that fires."""
    return Alert(rule.id, subject, "firing", rule.severity, T0, T0, value=value, limit=limit)


def signal(rule: Rule, value: float | None, **more: Any) -> Signal:
    """What was measured."""
    return Signal(rule.signal, "llama", more.pop("state", "value"), T0, value, **more)


@pytest.mark.parametrize(("value", "unit", "want"), [
    (None, "s", "–"), (math.nan, "ratio", "–"), (math.inf, "count", "–"), (math.inf, "s", "–"),
    (0.85, "ratio", "85 %"), (0.07, "ratio", "7 %"), (0.4237, "ratio", "42.4 %"),
    (0.0, "ratio", "0 %"), (1.0, "ratio", "100 %"), (-0.0, "ratio", "0 %"),
    (0.9995, "ratio", "99.95 %"), (0.0004, "ratio", "0.04 %"), (0.99999, "ratio", "99.999 %"),
    (1.142, "ratio", "114.2 %"),
    (91.0, "celsius", "91 °C"), (-3.0, "kelvin", "-3 K"), (-0.0, "kelvin", "0 K"), (2.4, "of limit", "2.4×"),
    (1234.5, "of limit", "1234×"), (12.0, "count", "12"), (1234567.0, "count", "1234567"),
    (0.00002, "count", "0.00002"),
    (0.0, "bytes", "0 B"), (1023.0 * 1024 + 512, "bytes", "1024 KiB"), (85520809984.0, "bytes", "79.6 GiB"),
    (4.0, "tokens", "4 tokens"),
])
def test_a_quantity_has_its_unit_and_few_digits(value: float | None, unit: str, want: str) -> None:
    """No exponent, no number without unit, and nothing that rounds to all or nothing but is neither."""
    assert words.quantity(value, unit) == want


@pytest.mark.parametrize(("seconds", "want"), [
    (0.0, "0 s"), (0.0004, "0.4 ms"), (0.212, "212 ms"), (0.25, "250 ms"), (1.0, "1 s"), (4.13, "4.13 s"),
    (90.0, "90 s"), (119.0, "119 s"), (120.0, "2 min"), (740.0, "12.3 min"), (7200.0, "2 h"), (172800.0, "2 d"),
    (86400e3, "1000 d"), (-30.0, "-30 s"),
])
def test_a_span_is_told_in_the_unit_that_a_person_would_take(seconds: float, want: str) -> None:
    """Milliseconds under a second, then seconds, minutes, hours, days."""
    assert words.span(seconds) == want


@pytest.mark.parametrize(("value", "limit", "unit", "want"), [
    (0.8504, 0.85, "ratio", "85.04 %"), (0.9985, 0.999, "ratio", "99.85 %"), (0.2504, 0.25, "s", "250.4 ms"),
    (85.0, 85.0, "celsius", "85 °C"), (91.0, 85.0, "celsius", "91 °C"), (0.9, None, "ratio", "90 %"),
    (0.850_000_1, 0.85, "ratio", "85.00001 %"), (0.850_000_000_1, 0.85, "ratio", "85 %"),
])
def test_a_value_over_its_limit_does_not_read_like_its_limit(value: float, limit: float | None, unit: str, want: str,
                                                             ) -> None:
    """85.04 % breaks 85 %: "85 %, limit 85 %" would look like a fault of ours."""
    assert words.beside(value, limit, unit) == want


@pytest.mark.parametrize(("evidence", "want"), [
    ({"burn_1h": 16.94, "burn_5m": 1234.5}, "burn 16.9× over 1h, 1234× over 5m"),
    ({"burn_1h": 0.0, "burn_5m": 0.0}, "burn 0× over 1h, 0× over 5m"),
    ({"burn_3d": 1.5, "burn_6h": 2.0}, "burn 1.5× over 3d, 2× over 6h"),
    ({"late_s": 31.0}, "no answer for 31 s"), ({"failing_s": 360.0}, "nothing delivered for 6 min"),
    ({"running": 3.0, "waiting": 2.0, "flat_s": 130.0, "waiting_alone_s": 0.0},
     "no token for 2.17 min with 3 running, 2 waiting"),
    ({"running": 0.0, "waiting": 2.0, "flat_s": 0.0, "waiting_alone_s": 65.0},
     "2 waiting and none running for 65 s"),
    ({"gpu_temp_c": 91.0, "slowed": True, "own_limit_c": 89.0}, "91 °C, its own limit 89 °C, slowed by its hardware"),
    ({"user_s": 0.7, "inside_s": 0.2, "n": 15.0}, "700 ms at the users' address, 200 ms at the engine"),
    ({"gpu_temp_c": 85.5, "slowed": False, "own_limit_c": 87.0}, "85.5 °C, its own limit 87 °C"),
    ({"lost": {"queue_age of e": "timeout"}}, "queue_age of e: timeout"), ({"lost": {}}, "0"),
    ({"free_bytes": 314572800.0, "floor_bytes": 536870912.0}, "300 MiB free and falling, limit 512 MiB"), ({}, "0"),
])
def test_what_was_measured_is_told_in_its_own_words(evidence: dict[str, Any], want: str) -> None:
    """A burn as rates over its windows, a hang as the time without a token, blindness as what is lost and why."""
    assert words.what(signal(TTFT, 0.0, evidence=evidence), "count") == want


def test_how_an_alert_ended() -> None:
    """Back in range, or closed for a reason: never the one told as the other."""
    assert words.ending(1740.2, "") == "back in range after 29 min"
    assert words.ending(300.0, "subject removed") == "closed after 5 min: subject removed"
