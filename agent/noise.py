"""Learning from noise: how often each rule fired, for how long, and how often for too short a time to act. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SHORT_S = 300.0  # a person who is woken has not opened the laptop by then


def stats(changes: Iterable[Mapping[str, Any]], since: float, now: float) -> dict[str, Any]:
    """Per rule, the noisiest first, from `changes` in order: {"at", "kind", "rule", "subject", "severity", "silenced"}.

    Times are unix seconds. A firing counts that began in [since, now]; one that still fires lasts until now, and is not
    counted as short.
    """
    began: dict[tuple[str, str], tuple[float, Mapping[str, Any]]] = {}
    rules: dict[str, dict[str, Any]] = {}

    def count(change: Mapping[str, Any], lasted_s: float, *, is_open: bool) -> None:
        row = rules.setdefault(change["rule"], {
            "rule": change["rule"], "severity": change["severity"], "fired": 0, "firing": 0, "total_s": 0.0,
            "longest_s": 0.0, "short": 0, "silenced": 0, "subjects": set(), "last_at": 0.0})
        row["fired"] += 1
        row["firing"] += is_open
        row["total_s"] += lasted_s
        row["longest_s"] = max(row["longest_s"], lasted_s)
        row["short"] += not is_open and lasted_s < SHORT_S
        row["silenced"] += change["silenced"]
        row["subjects"].add(change["subject"])
        row["last_at"] = max(row["last_at"], change["at"])
        row["severity"] = change["severity"]

    for change in changes:
        key = (change["rule"], change["subject"])
        if change["kind"] == "firing":
            began[key] = (change["at"], change)
        elif key in began:
            at, fired = began.pop(key)
            count(fired, max(0.0, change["at"] - at), is_open=False)
    for at, fired in began.values():
        count(fired, max(0.0, now - at), is_open=True)
    for row in rules.values():
        row["subjects"] = len(row["subjects"])
    order = sorted(rules.values(), key=lambda row: (-row["short"], -row["fired"], row["rule"]))
    return {"since": since, "until": now, "short_s": SHORT_S, "rules": order}
