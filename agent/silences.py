"""Silences: who shall not be woken by what, until when, and why. Pure; times are unix seconds.

A silence mutes a page, never an alert: what it covers goes on being judged, shown and counted, and Alertmanager, which
has silences of its own, is told of it as ever. What still fires when a silence ends pages then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

ALL = "*"
LONGEST_S = 7 * 86400.0  # longer, and nobody remembers that it is there
STEP_S = 86400.0  # of a clock that went back
KEPT_S = 90 * 86400.0  # of what has ended, for the quarter's review
KEPT = 500
WHY_LENGTH = 300
# No pattern covers these: that nobody is watching, and that a fault which we put in is still there, is told to whoever
# works on the node as well. Named as they are they can be silenced.
BY_NAME_ONLY = frozenset({"watcher", "drill-orphaned"})


@dataclass(frozen=True, slots=True)
class Silence:
    """One silence. `rule` and `subject` may hold * and ?, as in `match:`; a target's covers its engines."""

    id: int
    rule: str
    subject: str
    since: float
    until: float
    why: str
    by: str
    ended_by: str | None = None  # who ended it before its time; `until` is when

    def is_active(self, now: float) -> bool:
        """Whether it holds. One from before a clock that stepped back a little holds until its end.

        A machine whose clock is dead starts in another year, where every silence of the past would hold again.
        """
        return self.ended_by is None and self.since - STEP_S <= now < self.until

    def covers(self, rule: str, subject: str) -> bool:
        """Whether an alert is muted by it, as far as rule and subject go."""
        if rule != self.rule and (rule in BY_NAME_ONLY or not fnmatchcase(rule, self.rule)):
            return False
        return is_of(subject, self.subject)

    def text(self) -> str:
        """Until when, by whom, why: what stands beside a muted alert."""
        return f"until {datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M} UTC by {self.by}: {self.why}"

    def __str__(self) -> str:
        """What it mutes, and until when: a line for /healthz."""
        what = "all of this node" if (self.rule, self.subject) == (ALL, ALL) else self.rule + (
            "" if self.subject == ALL else f" of {self.subject}")
        return f"{what}, {self.text()}"


def is_like(subject: str, pattern: str) -> bool:
    """Whether a pattern with * and ? matches all of a subject. Brackets are an IPv6 address's, and mean themselves."""
    return fnmatchcase(subject, pattern.replace("[", "[[]"))


def is_of(subject: str, pattern: str) -> bool:
    """Whether an alert's subject is one that is meant: a target's name means its engines (llama/1), too."""
    return subject.startswith(f"{pattern}/") or is_like(subject, pattern)


def active(silences: Iterable[Silence], now: float) -> list[Silence]:
    """Those that hold now."""
    return [one for one in silences if one.is_active(now)]


def over(silences: Iterable[Silence], rule: str, subject: str, now: float) -> Silence | None:
    """The silence that mutes an alert; of several the one that lasts longest."""
    found = [one for one in silences if one.is_active(now) and one.covers(rule, subject)]
    return max(found, key=lambda one: one.until, default=None)


def add(silences: Sequence[Silence], rule: str, subject: str, for_s: float, why: str, by: str, now: float,
        ) -> tuple[tuple[Silence, ...], Silence]:
    """One more, from now on. Raises ValueError for a span or a reason that is none."""
    if not 0 < for_s <= LONGEST_S:
        raise ValueError(f"a silence lasts at most {LONGEST_S / 86400:g} d and ends by itself; what shall never page is"
                         " taken out by `rules: disable:` in tocsin.yaml, or made a ticket by `rules: override:`")
    why = " ".join(why.split())
    if not why or not why.isprintable() or len(why) > WHY_LENGTH:
        raise ValueError("a silence needs a reason that the next person on call can understand, of at most"
                         f" {WHY_LENGTH} characters")
    made = Silence(max((one.id for one in silences), default=0) + 1, rule, subject, now, now + for_s,
                   why, by)
    return (*silences, made), made


def end(silences: Sequence[Silence], ids: Iterable[int], by: str, now: float) -> tuple[Silence, ...]:
    """The same with some ended before their time."""
    wanted = frozenset(ids)
    return tuple(replace(one, until=now, ended_by=by) if one.id in wanted and one.is_active(now) else one
                 for one in silences)


def pruned(silences: Sequence[Silence], now: float) -> tuple[Silence, ...]:
    """Without those that ended long ago; the newest is kept, so that its number is not given again."""
    kept = [one for one in silences[:-1] if one.until > now - KEPT_S]
    return (*kept[-KEPT:], *silences[-1:])


def matchers(rule: str, subject: str, node: str) -> list[str]:
    """The same silence as Alertmanager's matchers on the labels that we send, as amtool takes them."""
    found = [f"node={_quoted(node)}"]
    if rule != ALL:
        found.append(f"rule=~{_quoted(_regex(rule))}" if _is_pattern(rule) else f"rule={_quoted(rule)}")
    if subject != ALL:
        # a target's engines are its own with a slash behind; a GPU's subject has nothing behind
        exact = subject.startswith("GPU-") and not _is_pattern(subject)
        found.append(f"subject={_quoted(subject)}" if exact else f"subject=~{_quoted(f'{_regex(subject)}(/.*)?')}")
    return found


def _is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".").replace(r"\-", "-")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def to_plain(silences: Iterable[Silence]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [asdict(one) for one in silences]


def from_plain(rows: Iterable[Mapping[str, Any]] | None) -> tuple[Silence, ...]:
    """The same back; keys of another version are left out."""
    known = Silence.__dataclass_fields__.keys()
    return tuple(Silence(**{key: value for key, value in row.items() if key in known}) for row in rows or ())
