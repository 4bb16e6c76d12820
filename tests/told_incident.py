"""A hot GPU's incident as the agent keeps and tells it; its numbers are what the tests of its reports work out by hand.

Second 0 is the onset: paged at 30 s, the symptom at 60 s, over at 630 s. 36 of 6,000 requests failed: 0.6 % for 10.5
min are 0.063 min of a budget of 43.2 min (99.9 % over 30 d), 0.15 %.
"""

from __future__ import annotations

from typing import Any

START = 1_795_937_438.0  # 2026-11-29 07:30:38 UTC
COST = {"target": "llama", "requests": 6000.0, "errors": 36.0, "ttft": 5964.0, "ttft_slow": 700.0, "itl": 120000.0,
        "itl_slow": 2400.0, "how": "engine (lower bound)", "budget_minutes": 0.063, "budget_share": 0.063 / 43.2,
        "ttft_slo_s": 0.5, "itl_slo_s": 0.15, "availability": 0.999, "slo_window_s": 2592000.0}


def member(rule: str, subject: str, place: str, onset_s: float, ended_s: float | None, **more: Any) -> dict[str, Any]:
    """One alert of it."""
    return {"rule": rule, "subject": subject, "onset": START + onset_s, "summary": f"{rule} as it fired",
            "ended_at": None if ended_s is None else START + ended_s, "place": place, "action": f"Do for {rule}.",
            **more}


def record(days_ago: float = 0.0, *, over: bool = True, drill: str | None = None) -> dict[str, Any]:
    """The incident, or one like it so many days before."""
    back = days_ago * 86400.0
    hot = member("gpu-thermal-limit", "GPU-8f6a", "GPU 3 on gpu-17", 0.0, 600.0, worst=-6.0, worst_at=START + 90.0,
                 limit=0.0, unit="kelvin", number="H9")
    late = member("itl-p99", "llama", "llama on gpu-17", 60.0, 630.0 if over else None, worst=0.08,
                  worst_at=START + 120, limit=0.01, unit="ratio", number="H6")
    return {"id": f"gpu-17/gpu-thermal-limit/{START + 30 - back:.0f}", "node": "gpu-17", "opened_at": START + 30 - back,
            "ended_at": START + 630 - back if over else None, "began_at": START - back,
            "root": ["gpu-thermal-limit", "GPU-8f6a"], "members": [hot, late], "drill": drill, "audience": "",
            "chain": [["gpu-thermal-limit", "itl-p99"]],
            "impact": {"span_s": 630.0, "latency_span_s": 630.0, "targets": {"llama": COST}} if over else None}


def transition(number: int, at_s: float, kind: str, rule: str, subject: str) -> dict[str, Any]:
    """An alert changed."""
    return {"id": number, "at": START + at_s, "kind": kind, "rule": rule, "subject": subject, "severity": "page",
            "value": 1.0, "limit": 0.0, "why": "", "alert": {}}


def notice(at_s: float, took_s: float | None, status: str = "firing", channel: str = "pagerduty",
           **more: Any) -> dict[str, Any]:
    """One delivery, or what is still owed."""
    return {"channel": channel, "state": "pending" if took_s is None else "delivered", "key": record()["id"],
            "status": status, "created_at": START + at_s, "done_at": None if took_s is None else START + at_s + took_s,
            "tries": 0, "last_error": None, **more}


def told() -> dict[str, Any]:
    """Everything, as `/incidents/ID` answers."""
    return {
        "incident": record(), "now": START + 1000.0,
        "transitions": [transition(7, 0.0, "pending", "gpu-thermal-limit", "GPU-8f6a"),
                        transition(8, 30.0, "firing", "gpu-thermal-limit", "GPU-8f6a"),
                        transition(9, 45.0, "firing", "gpu-temperature", "GPU-8f6a"),
                        transition(10, 60.0, "firing", "itl-p99", "llama"),
                        transition(11, 600.0, "resolved", "gpu-thermal-limit", "GPU-8f6a")],
        "notices": [notice(30.0, 95.0, tries=3, last_error="https://hooks.slack.com/services/T0/SECRET: 503"),
                    notice(125.5, 0.5),
                    notice(630.0, 1.0, "resolved")],
        "earlier": [record(20.0), record(3.0)]}
