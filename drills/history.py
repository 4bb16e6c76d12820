"""What earlier runs left behind on disk: their records, in order, and the report of one whose runner was killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drills import ledger, proc, record, report
from drills.ledger import Entry
from drills.model import REFUSED, Left, State, Verdict


def runs(root: Path) -> list[dict[str, Any]]:
    """One row a run, oldest first, as `tocsin drill history --json` gives them."""
    found = (record.load(folder) for folder in ledger.run_folders(root / "runs"))
    return [row_of(one) for one in found if one is not None]


def reviewed(root: Path, since: float) -> dict[str, Any]:
    """What a review says of the drills since a time: how they ended, which were missed, and what is still to be done.

    Missed: due and never held. The actions are those that the last run of each drill leaves open.
    """
    verdicts: Counter[str] = Counter()
    missed: list[str] = []
    last: dict[str, tuple[Path, dict[str, Any]]] = {}
    for folder in ledger.run_folders(root / "runs"):
        told = record.load(folder)
        if told is None:
            continue
        if told["verdict"] not in (Verdict.SKIPPED, Verdict.DEFERRED):
            last[told["drill"]["name"]] = (folder, told)
        if (told["started_at"] or told["planned_at"] or 0.0) >= since:
            verdicts[str(told["verdict"])] += 1
            missed += [told["run"]] if told["verdict"] == Verdict.SKIPPED else []
    held = sum(n for verdict, n in verdicts.items() if verdict not in (Verdict.SKIPPED, Verdict.DEFERRED))
    actions = [{"what": f"{action['row']}: {action['text']}", "run": action["run"], "owner": action["owner"],
                "due_at": action["due_at"]} for folder, told in last.values()
               for action in report.actions(told, report.earlier_runs(told, folder))
               if action["state"].startswith("open")]
    return {"held": held, "missed": missed, "verdicts": dict(verdicts), "actions": actions, "why": None}


def row_of(told: dict[str, Any]) -> dict[str, Any]:
    """The contract's row of a run."""
    times = {name: told.get("times", {}).get(name) for name in ("detect_s", "deliver_s", "mitigate_s", "recover_s")}
    plan = told.get("plan") or {}
    return {"run": told["run"], "drill": told["drill"]["name"], "fault": told["drill"].get("fault"),
            "verdict": told["verdict"], "why": told["why"],
            "planned": told["planned_at"], "started": told["started_at"], "ended": told["ended_at"],
            "targets": plan.get("targets", []), "times": times}


def finish_killed(folder: Path, entries: Sequence[Entry], left: Sequence[Left]) -> None:
    """The report of a run that heal has ended: ABORTED, or ORPHANED where something is left."""
    told = _told_of(folder, entries)
    if told["ended_at"] is None or told["verdict"] == Verdict.ORPHANED or left:
        state = ledger.last_state(entries) or State.PLANNED
        was_orphan = told["verdict"] == Verdict.ORPHANED
        told |= {"state": state, "left": [asdict(one) for one in left], "ended_at": time.time(),
                 "verdict": Verdict.ORPHANED if left or was_orphan else Verdict.ABORTED,
                 "why": f"left in the world: {'; '.join(one.what for one in left)}" if left
                 else "it left something in the world, which heal has put back" if was_orphan
                 else f"{_by(folder)}its runner ended in {state}; the fault was undone by its holder or by heal"}
        record.store(folder, told)


def finish_refused(folder: Path) -> None:
    """The report of a run that was SKIPPED or DEFERRED, and whose process was killed before it could write it.

    Its end and the reason are in the ledger by then. Raises OSError, msgspec.ValidationError.
    """
    told = record.load(folder)
    if told is not None and told["ended_at"] is not None:
        return
    entries = ledger.read(folder)
    end = ledger.last_change(entries)
    runner = ledger.process_of(entries, "runner")
    if end is None or end.state not in REFUSED or (runner is not None and not proc.wait_ended(runner, 0.0)):
        return
    record.store(folder, _told_of(folder, entries) | {
        "state": end.state, "verdict": Verdict(end.state.value), "why": str(end.data.get("why", "")),
        "ended_at": end.at})


def _told_of(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    """The record of a run, or where there is none, one with what its ledger's header says."""
    told = record.load(folder)
    if told is None:
        header = entries[0].data if entries else {}
        planned_at = entries[0].at if entries else 0.0
        told = record.blank(folder.name, {"name": str(header.get("drill", "unknown"))}, planned_at)
        told |= {"started_by": header.get("started_by", "unknown"), "due_at": header.get("due_at"),
                 "node": header.get("node")}
    return told


def _by(folder: Path) -> str:
    by = ledger.aborted_by(folder)
    return f"aborted by {by}: " if by else ""


def left_of(folder: Path) -> list[Left] | None:
    """What a run left in the world, as its record says; None where it never was an orphan."""
    told = record.load(folder)
    if told is None or (told["verdict"] != Verdict.ORPHANED and not told.get("left")):
        return None
    return [Left(one["what"], one["command"]) for one in told["left"]]



