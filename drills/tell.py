"""What the drills tell the agent: which alerts are announced, what users get, what was left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agent import client
from drills.model import Drill, Left, Refused

SILENT = (client.NotRunning, client.AgentError)
NOT_ERRORS = frozenset({"ok", "http_4xx"})


def address_of(url: str) -> str:
    """The subject of what users see at an address: its host and port, never its credentials."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port}" if parts.port else f"{host}"


def subjects_of(drill: Drill, node: str | None) -> list[str] | None:
    """What alerts of this drill's making are on: its engine, GPU, users' address, node; None: on any.

    The same alert on another engine is a real one. Which engine a pod is that a selector finds is not known here.
    """
    if drill.target.get("selector") is not None:
        return None
    users = address_of(drill.load.url) if drill.load else None
    own = (drill.target.get("engine"), drill.target.get("gpu"), node, users)
    return [str(one) for one in own if one]


def is_drilled(drill: Drill, node: str | None, subject: str) -> bool:
    """Whether a subject is of the drilled service: the engine, the users' address, the node. All, where none is named.

    The same alert on another engine is nothing that the drill announced.
    """
    own = subjects_of(drill, node)
    return own is None or any(subject == one or subject.startswith(f"{one}/") for one in own)


def announce(socket: Path, run: str, drill: Drill, rules: Sequence[str], until: float,
             subjects: Sequence[str] | None = None) -> None:
    """Say which alerts this drill will cause (none yet: that its prober asks), until when, on what.

    Raises Refused: the page would not say DRILL, or there is no channel that it should go to.
    """
    told = {"run": run, "drill": drill.name, "rules": list(rules), "until": until, "subjects": subjects,
            "loads": drill.load is not None, "route_to": drill.route_to}
    try:
        client.ask(socket, "/drills/announce", "POST", told)
    except SILENT as error:
        raise Refused(f"the agent cannot be told what this drill announces: {error}") from None


def end_announcement(socket: Path, run: str) -> None:
    """The drill is over. An agent that does not answer forgets it by itself at its end."""
    with suppress(*SILENT):
        client.ask(socket, f"/drills/end?run={run}", "POST")


def users(socket: Path, url: str, counted: Mapping[str, Any]) -> None:
    """What the prober has counted so far at the users' address; a silent agent is a guard's business."""
    if not counted:
        return
    outcomes: Mapping[str, int] = counted.get("outcomes", {})
    told = {"address": address_of(url), "requests": counted.get("finished", 0),
            "errors": sum(n for outcome, n in outcomes.items() if outcome not in NOT_ERRORS),
            "ttft": counted.get("ttft"), "itl": counted.get("itl")}
    with suppress(*SILENT):
        client.ask(socket, "/user", "POST", told)


def orphaned(socket: Path, run: str, left: Sequence[Left]) -> bool:
    """Page for what a run left in the world, with the exact commands; nothing left ends that page. False: not told."""
    text = "; ".join(f"{one.what}: {one.command}" for one in left) or None
    return _tell(socket, "drill_orphaned", run, text)


def overdue(socket: Path, drill: str, why: str | None) -> bool:
    """A ticket for a drill that was due and did not run; None ends it. False: not told."""
    return _tell(socket, "drill_overdue", drill, why)


def _tell(socket: Path, signal: str, subject: str, text: str | None) -> bool:
    try:
        client.ask(socket, "/drills/tell", "POST", {"signal": signal, "subject": subject, "text": text})
    except SILENT:
        return False
    return True
