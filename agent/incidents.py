"""Alerts -> incidents: one page an incident, the cause first. Pure; times are unix seconds.

An alert joins an incident silently only where the rules say that the one can cause the other (`causes`), on subjects
that belong together, within 15 m of the other's onset, and only where the incident has paged whoever this alert would
page: one that a drill has told to one channel alone has not. Every other alert that pages opens an incident of its own.
Tickets never open, join or hold open one, nor does what is silenced. An incident ends with its last alert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agent.model import Alert, AlertKey, Rule

JOINS_WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class Member:
    """An alert of an incident; `ended_at` is set when it is over, and None while it fires."""

    rule: str
    subject: str
    onset: float  # first sample in breach
    summary: str = ""  # as it was when it joined
    ended_at: float | None = None

    @property
    def key(self) -> AlertKey:
        """Of the alert."""
        return self.rule, self.subject


@dataclass(frozen=True, slots=True)
class Incident:
    """What one page is about. `root`: the cause as far as it is known; members in the order in which they came.

    `audience`: the one channel that is told of it, "" for all.
    """

    id: str
    opened_at: float
    root: AlertKey
    members: tuple[Member, ...]
    ended_at: float | None = None
    audience: str = ""

    def role(self, key: AlertKey) -> str:
        """Cause or symptom."""
        return "cause" if key == self.root else "symptom"

    def has(self, key: AlertKey) -> bool:
        """Whether an alert that fires is one of it."""
        return any(member.key == key and member.ended_at is None for member in self.members)


def from_plain(told: Mapping[str, Any]) -> Incident:
    """An incident as `asdict` and JSON have left it."""
    return Incident(**{**told, "root": tuple(told["root"]), "members": tuple(Member(**m) for m in told["members"])})


Change = Literal["opened", "updated", "resolved"]


@dataclass(frozen=True, slots=True)
class Step:
    """The open incidents after a step, and what changed in it, each incident once."""

    open: Mapping[str, Incident]
    changes: Sequence[tuple[Change, Incident]] = field(default_factory=tuple)


def can_cause(rules: Iterable[Rule]) -> Mapping[str, frozenset[str]]:
    """What each rule can cause, by itself or through others."""
    direct = {rule.id: set(rule.causes) for rule in rules}
    found: dict[str, frozenset[str]] = {}
    for rule_id in direct:
        reached, todo = set[str](), [rule_id]
        while todo:
            for effect in direct.get(todo.pop(), ()):
                if effect not in reached:
                    reached.add(effect)
                    todo.append(effect)
        found[rule_id] = frozenset(reached - {rule_id})
    return found


def chain(rules: Iterable[str], causes: Mapping[str, frozenset[str]]) -> list[tuple[str, str]]:
    """(cause, effect) among the rules of an incident, without what another of them stands between."""
    own = list(dict.fromkeys(rules))

    def between(cause: str, effect: str) -> bool:
        return any(other in causes.get(cause, ()) and effect in causes.get(other, ())
                   for other in own if other not in (cause, effect))

    return [(cause, effect) for cause in own for effect in own
            if cause != effect and effect in causes.get(cause, ()) and not between(cause, effect)]


def group(open_: Mapping[str, Incident], firing: Sequence[Alert], causes: Mapping[str, frozenset[str]],
          related: Callable[[str, str], bool], node: str, now: float, *,
          audience_of: Callable[[Alert], str] = lambda _: "") -> Step:
    """One step: which alerts that page (`firing`) are of which incident.

    `related` tells of two subjects; `audience_of` the one channel that is told of an alert, "" for all.
    """
    pages = sorted((alert for alert in firing if alert.severity == "page"), key=lambda alert: (alert.since, alert.rule))
    found: dict[str, Incident] = {}
    changed: dict[str, Change] = {}
    for incident in open_.values():
        after = _with_ends(incident, {(alert.rule, alert.subject): audience_of(alert) for alert in pages}, now)
        found[after.id] = after
        if after.ended_at is not None:
            changed[after.id] = "resolved"
    causes_first = sorted(pages, key=lambda alert: -sum(other.rule in causes.get(alert.rule, ()) for other in pages))
    for alert in causes_first:
        key = (alert.rule, alert.subject)
        if any(incident.has(key) for incident in found.values()):
            continue
        member = Member(alert.rule, alert.subject, alert.since, alert.annotations.get("summary", ""))
        audience = audience_of(alert)
        joined = next((i for i in found.values() if i.ended_at is None and i.audience == audience
                       and _joins(i, member, causes, related)), None)
        if joined is None:
            opened = Incident(_name(node, member, now, found), now, key, (member,), audience=audience)
            found[opened.id], changed[opened.id] = opened, "opened"
            continue
        root = key if joined.root[0] in causes.get(alert.rule, ()) else joined.root
        found[joined.id] = replace(joined, root=root, members=(*joined.members, member))
        changed.setdefault(joined.id, "updated")
    return Step({i.id: i for i in found.values() if i.ended_at is None},
                [(change, found[name]) for name, change in changed.items()])


def _with_ends(incident: Incident, firing: Mapping[AlertKey, str], now: float) -> Incident:
    """Its members that fire no more have ended; and so has it, with the last of them. `firing`: with their audience."""
    members = tuple(replace(m, ended_at=now) if m.ended_at is None and m.key not in firing else m
                    for m in incident.members)
    left = [firing[m.key] for m in members if m.ended_at is None]
    return replace(incident, members=members, ended_at=None if left else now,
                   audience="" if "" in left else incident.audience)


def _joins(incident: Incident, member: Member, causes: Mapping[str, frozenset[str]],
           related: Callable[[str, str], bool]) -> bool:
    """Whether it is caused by, or causes, an alert of this incident, near in time and place."""
    return any(
        (member.rule in causes.get(one.rule, ()) or one.rule in causes.get(member.rule, ()))
        and abs(member.onset - one.onset) <= JOINS_WITHIN_S and related(one.subject, member.subject)
        for one in incident.members)


def _name(node: str, member: Member, now: float, taken: Mapping[str, Incident]) -> str:
    """<node>/<rule>/<unix second of the opening>: to be said on the telephone, and unique."""
    name = f"{node}/{member.rule}/{now:.0f}"
    return next(x for n in range(len(taken) + 1) if (x := name if n == 0 else f"{name}-{n + 1}") not in taken)
