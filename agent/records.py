"""What is kept of an incident when its alerts are long gone: members, their worst values, causes, and what it cost.

Plain data, so that a report of last year's incident needs nothing of today's rules. Pure; times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent import incidents
from agent.impact import impact
from agent.incidents import Incident, Member
from agent.model import Rule, Signal
from agent.signals import SIGNALS, Scene

Worst = dict[str, list[float]]  # "<rule> <subject>" -> [value, when]


def worst_of(known: Worst, open_: Sequence[Incident], signals: Mapping[tuple[str, str], Signal],
             rules: Mapping[str, Rule]) -> Worst:
    """The worst value of every alert of these incidents, this step's included."""
    found: Worst = {}
    for member in (member for incident in open_ for member in incident.members):
        name, signal, rule = name_of(member), signals.get(member.key), rules.get(member.rule)
        if name in known:
            found[name] = known[name]
        if member.ended_at is not None or rule is None or signal is None or signal.state != "value" \
                or signal.value is None:
            continue
        sign = -1.0 if rule.op in ("<", "<=") else 1.0
        if name not in found or sign * signal.value > sign * found[name][0]:
            found[name] = [signal.value, signal.at]
    return found


def name_of(member: Member) -> str:
    """An alert's name in Worst."""
    return f"{member.rule} {member.subject}"


def record(incident: Incident, scene: Scene, rules: Mapping[str, Rule], causes: Mapping[str, frozenset[str]],
           worst: Worst, place: Callable[[str], str], limit_of: Callable[[Rule, str], float | None], *, node: str,
           drill: str | None) -> dict[str, Any]:
    """What to keep of an incident as it stands; what it cost stands in it once it is over.

    `place`: a subject for people ("GPU 3 on gpu-17"); `drill`: the drill that announced it.
    """
    end = incident.ended_at
    members = []
    for member in incident.members:
        rule = rules.get(member.rule)
        value, at = worst.get(name_of(member), (None, None))
        members.append({
            **asdict(member), "place": place(member.subject), "worst": value, "worst_at": at,
            "limit": None if rule is None else limit_of(rule, member.subject), "number": rule.number if rule else None,
            "unit": SIGNALS[rule.signal][0].unit if rule else "", "action": rule.action if rule else ""})
    start = min(member.onset for member in incident.members)
    return {"id": incident.id, "node": node, "opened_at": incident.opened_at, "ended_at": end, "began_at": start,
            "root": list(incident.root), "members": members, "drill": drill, "audience": incident.audience,
            "chain": [list(pair) for pair in incidents.chain([m.rule for m in incident.members], causes)],
            "impact": None if end is None else impact(scene, start, end)}
