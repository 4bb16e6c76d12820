"""What a run's report is made from: run.json, written from the first moment and after each step.

Until it is finished it says ABORTED, so that a run whose runner was killed has a report that is true.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from agent.escape import instant, number
from drills import ledger, owner, report
from drills.judge import Judgement
from drills.model import Drill, Left, Moment, Plan, State, Verdict

SCHEMA = 1
END_OF_TIME = 253_402_300_800.0  # unix seconds: no calendar here goes beyond the year 9999
UNFINISHED = "the run ended without saying how: it was killed, or the node went down"


class Record:
    """The growing record of one run. Every method writes run.json and the reports anew."""

    def __init__(self, folder: Path, drill: Drill, clock: Callable[[], float], *, started_by: str,
                 due_at: float | None = None) -> None:
        self._folder, self._clock = folder, clock
        fresh = blank(folder.name, msgspec.to_builtins(drill), clock()) | {
            "started_by": started_by, "due_at": due_at, "node": _node(folder)}
        self.data: dict[str, Any] = load(folder) or fresh
        self.save()

    def enter(self, state: State) -> None:
        """The run is in another state."""
        self.data["state"] = state
        if state is State.LOCKED:
            self.data["started_at"] = self._clock()
        self.save()

    def planned(self, plan: Plan) -> None:
        """What it would do, to what, and why these."""
        self.data["plan"] = msgspec.to_builtins(plan)
        self.save()

    def guarded(self, checks: Sequence[Any]) -> None:
        """What each guard said."""
        self.data["guards"] = [asdict(check) for check in checks]
        self.save()

    def moment(self, what: str, evidence: str = "", at: float | None = None) -> None:
        """A row of the timeline."""
        self.data["timeline"].append(asdict(Moment(self._clock() if at is None else at, what, evidence)))
        self.save()

    def orphaned(self, left: Sequence[Left]) -> None:
        """Something of ours is still in the world."""
        self.data["left"] = [asdict(x) for x in left]
        self.save()

    def judged(self, judgement: Judgement, spans: Mapping[str, Sequence[float]], samples: Sequence[Mapping[str, Any]],
               transitions: Sequence[Mapping[str, Any]]) -> None:
        """The verdict's rows and what they were made from."""
        built = msgspec.to_builtins(judgement)
        self.data |= {"rows": built["rows"], "times": built["times"], "impact": built["impact"],
                      "replicas": built["replicas"],
                      "spans": {k: list(v) for k, v in spans.items()}, "samples": list(samples),
                      "transitions": list(transitions)}
        self.save()

    def finish(self, verdict: Verdict, why: str) -> None:
        """How it ended."""
        self.data |= {"verdict": verdict, "why": why, "ended_at": self._clock()}
        self.save()

    def save(self) -> None:
        """Write run.json and the reports; a full disk costs the report, never the drill."""
        with suppress(OSError):
            store(self._folder, self.data)


def _node(folder: Path) -> str | None:
    """Where it runs, as whoever made the folder wrote it into the ledger."""
    with suppress(OSError):
        node = next((entry.data.get("node") for entry in ledger.read(folder)), None)
        return None if node is None else str(node)
    return None


def blank(run: str, definition: Mapping[str, Any], planned_at: float) -> dict[str, Any]:
    """The record of a run of which nothing is known but that it was planned."""
    return {
        "schema": SCHEMA, "run": run, "drill": dict(definition), "definition_hash": hash_of(definition),
        "node": None, "started_by": "unknown", "due_at": None, "planned_at": planned_at, "started_at": None,
        "ended_at": None,
        "state": State.PLANNED, "verdict": Verdict.ABORTED, "why": UNFINISHED, "plan": None, "guards": [],
        "timeline": [], "rows": [], "times": {}, "impact": {}, "replicas": [], "spans": {}, "samples": [],
        "transitions": [], "left": [], "tocsin": _version(),
    }


def _version() -> str:
    """Of Tocsin: a drill that went otherwise than the last one may have been judged otherwise."""
    try:
        return metadata.version("tocsin")
    except metadata.PackageNotFoundError:  # it runs from a checkout
        return "unknown"


def store(folder: Path, told: Mapping[str, Any]) -> None:
    """Write run.json, whole or not at all, and the reports. Raises OSError."""
    aside = folder / ".run.json"
    aside.write_bytes(msgspec.json.encode(told))
    aside.replace(folder / "run.json")
    report.write(folder, told)
    owner.give(folder)


def load(folder: Path) -> dict[str, Any] | None:
    """The record of a run; None where there is none that can be read.

    One of another version, or of another hand, has what is missing or of no use as a blank one has it.
    """
    try:
        found = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # the last: a thousand brackets in it
        return None
    drill = found.get("drill") if isinstance(found, dict) else None
    if not isinstance(drill, dict) or not isinstance(drill.get("name"), str):
        return None
    empty = {**blank(folder.name, drill, 0.0), "verdict": "unknown", "planned_at": None}
    fit = {key: _fit(key, found[key], empty[key]) for key in found.keys() & empty.keys()}
    left = [one for one in fit.get("left", ()) if isinstance(one, dict) and {"what", "command"} <= one.keys()]
    times = {key: number(value) for key, value in fit.get("times", {}).items()}
    return {**empty, **found, **fit, "left": left, "times": times}


def _fit(key: str, value: Any, empty: Any) -> Any:
    """A value of a record, or the blank one's where it is of another kind."""
    if key.endswith("_at"):
        at = instant(value)
        return at if at is not None and 0.0 <= at < END_OF_TIME else empty
    if value is None and key in ("plan", "node"):
        return None
    kind: type = {"plan": dict, "node": str}.get(key) or next(k for k in (str, list, dict, int) if isinstance(empty, k))
    return value if isinstance(value, kind) else empty


def hash_of(definition: Mapping[str, Any]) -> str:
    """What tells two definitions of one drill apart."""
    return hashlib.sha256(json.dumps(definition, sort_keys=True, default=str).encode()).hexdigest()[:12]
