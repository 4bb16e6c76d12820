"""`tocsin review`: what a quarter was like. Service levels kept, error budget spent, who was woken how often. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent import noise
from agent.model import Slo

LATENCY_KEPT = 0.99  # a p99 within its service level leaves so many at least within it
UNACKNOWLEDGED = "no channel tells Tocsin who acknowledged; PagerDuty's own report does"
OFTEN = 3  # incidents of one cause that ask for an end to it
Row = Mapping[str, Any]


def review(days: Iterable[Row], incidents: Sequence[Row], changes: Iterable[Row], slo_of: Callable[[str], Slo],
           since: float, now: float) -> dict[str, Any]:
    """Everything since a time, of which it is unix seconds.

    Args:
        days: rows of the store: {"day", "target", "requests", "errors", "ttft", "ttft_slow", "itl", "itl_slow"}.
        incidents: records (agent.records) of those that opened since then.
        changes: as agent.noise takes them.
        slo_of: the service levels of a target.
    """
    sums: dict[str, Counter[str]] = {}
    counted_days: dict[str, set[int]] = {}
    for row in days:
        own = sums.setdefault(row["target"], Counter())
        own.update({key: row[key] for key in ("requests", "errors", "ttft", "ttft_slow", "itl", "itl_slow")})
        counted_days.setdefault(row["target"], set()).add(row["day"])
    pages = _pages(incidents, now)
    return {
        "since": since, "until": now,
        "targets": [{"target": name, "days": len(counted_days[name]), **_attained(own, slo_of(name))}
                    for name, own in sorted(sums.items())],
        "pages": pages, "causes": _causes(incidents, now), "noise": noise.stats(changes, since, now)["rules"],
        "actions": [{"what": f'{cause["rule"]}: {cause["incidents"]} incidents; see "If it returns" in its runbook',
                     "run": None, "owner": None, "due_at": None}
                    for cause in _causes(incidents, now) if cause["incidents"] >= OFTEN]}


def _attained(own: Mapping[str, float], slo: Slo) -> dict[str, Any]:
    """Shares kept against those promised. The budget is this period's own: what of its requests might have failed."""
    bad = own["errors"] / own["requests"] if own["requests"] > 0 else None
    levels = [_level("availability", slo.availability, None if bad is None else 1 - bad, own["requests"])]
    for name, limit_s in (("ttft", slo.ttft_p99), ("itl", slo.itl_p99)):
        within = 1 - own[f"{name}_slow"] / own[name] if own[name] > 0 else None
        levels.append({**_level(f"{name}_p99", LATENCY_KEPT, within, own[name]), "limit_s": limit_s})
    return {"requests": own["requests"], "errors": own["errors"], "slo": levels, "written": slo.written,
            "budget_spent": None if bad is None else bad / (1 - slo.availability)}


def _level(name: str, promised: float, attained: float | None, n: float) -> dict[str, Any]:
    return {"name": name, "promised": promised, "attained": attained, "n": n,
            "kept": None if attained is None else attained >= promised}


def lasted_s(incident: Row, now: float) -> float:
    """How long an incident has been open."""
    end: float = now if incident["ended_at"] is None else incident["ended_at"]
    return max(0.0, end - float(incident["opened_at"]))


def _pages(incidents: Sequence[Row], now: float) -> dict[str, Any]:
    """One page an incident: how many there were, and how many for nothing. A drill's wakes nobody who does not know."""
    real = [one for one in incidents if one.get("drill") is None]
    return {"incidents": len(real), "of_drills": len(incidents) - len(real),
            "open": sum(one["ended_at"] is None for one in real),
            "short": sum(one["ended_at"] is not None and lasted_s(one, now) < noise.SHORT_S for one in real),
            "short_s": noise.SHORT_S, "open_s": sum(lasted_s(one, now) for one in real),
            "longest_s": max((lasted_s(one, now) for one in real), default=None),
            "alerts": sum(len(one["members"]) for one in real),
            "unacknowledged": None, "unacknowledged_why": UNACKNOWLEDGED}


def _causes(incidents: Sequence[Row], now: float) -> list[dict[str, Any]]:
    """Real incidents by their cause, the costliest first."""
    found: dict[str, dict[str, Any]] = {}
    for one in incidents:
        if one.get("drill") is None:
            row = found.setdefault(one["root"][0], {"rule": one["root"][0], "incidents": 0, "open_s": 0.0,
                                                    "errors": 0.0, "last": one["id"]})
            row["incidents"] += 1
            row["open_s"] += lasted_s(one, now)
            row["errors"] += sum(t["errors"] for t in ((one.get("impact") or {}).get("targets") or {}).values())
            row["last"] = one["id"]
    return sorted(found.values(), key=lambda row: (-row["open_s"], row["rule"]))
