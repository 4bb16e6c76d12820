"""Undo whatever any ledger says, offline: what `tocsin drill heal`, ExecStopPost= and the sweep at start do.

Looks at the world, never at the ledger's state alone, and needs no successful write: on a full or read-only disk it
undoes the same, and does it again the next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from drills import proc
from drills.ledger import LEDGER, Entry, Ledger, last_state, plan_of, process_of, read, run_folders
from drills.model import Left, State
from drills.strays import heal_strays
from drills.undo import undo_plan, wait_unheld

log = structlog.get_logger()

# A holder ends by itself when its runner does; after this it is ended.
HOLDER_ENDS_WITHIN_S = 5.0
ENDED_WITHIN_S = 5.0
_OVER = frozenset({State.REPORTED, State.SKIPPED, State.DEFERRED})


def heal(root: Path, *, finish: Callable[[Path, list[Entry], list[Left]], None]) -> list[Left]:
    """End and undo every run under `<state_dir>/drills/runs` that is not known to be clean; a live one is ended first.

    And what of ours is in the world without a ledger, by its tags.

    `finish` is called for each of them with what is left, to write its report. What could not be undone is returned,
    with the commands that do it. Never raises for a single run: the others are waiting.
    """
    remaining: list[Left] = []
    for folder in run_folders(root):
        try:
            entries = read(folder)
            if is_clean(entries):
                continue
            left = heal_run(folder, entries)
        except Exception as error:  # one damaged run must not keep the others broken
            log.exception("heal_failed", run=folder.name)
            entries, left = [], [Left(f"run {folder.name}: {error}", f"cat {folder / LEDGER}")]
        remaining += left
        try:
            finish(folder, entries, left)
        except Exception:  # a report that cannot be written changes nothing in the world
            log.exception("heal_report_failed", run=folder.name)
        if not left:
            _note_healed(folder)  # last: one who is killed before it leaves the report to the next
    return remaining + heal_strays()


def is_clean(entries: Sequence[Entry]) -> bool:
    """Whether a run ended and its ledger says that nothing of it is left: healed, or reported and not ORPHANED."""
    if entries and entries[-1].data.get("healed"):
        return True
    ends = [entry.state for entry in entries if entry.state in {State.REVERTED, State.ORPHANED}]
    return last_state(entries) in _OVER and (not ends or ends[-1] == State.REVERTED)


def heal_run(folder: Path, entries: Sequence[Entry]) -> list[Left]:
    """End the processes of one run and undo its fault. Raises OSError, msgspec.ValidationError."""
    left = end_processes(folder, entries)
    plan = plan_of(entries)
    if plan is not None and not left:
        left = undo_plan(plan)
    log.info("healed", run=folder.name, left=[one.what for one in left])
    return left


def _note_healed(folder: Path) -> None:
    """Note in the ledger that nothing is left, where that can be written."""
    try:
        ledger = Ledger.open(folder)
        try:
            ledger.note(healed=True)
        finally:
            ledger.close()
    except OSError as error:
        log.warning("healed_not_noted", run=folder.name, error=str(error), next="it is healed again next time")


def end_processes(folder: Path, entries: Sequence[Entry]) -> list[Left]:
    """End the runner; its holder then undoes and ends by itself, or is ended. What would not end is returned."""
    runner, holder = process_of(entries, "runner"), process_of(entries, "holder")
    left: list[Left] = []
    for role, process, grace_s in (("runner", runner, 0.0), ("holder", holder, HOLDER_ENDS_WITHIN_S)):
        if process is None or process.pid == os.getpid() or proc.wait_ended(process, grace_s):
            continue
        log.info("ending", run=folder.name, role=role, pid=process.pid)
        if not proc.end(process, ENDED_WITHIN_S):
            left.append(Left(f"{role} {process.pid} of {folder.name} does not end", f"kill -KILL {process.pid}"))
    if not left and not wait_unheld(folder, HOLDER_ENDS_WITHIN_S):
        left.append(Left(f"a process still injects the fault of {folder.name}", f"fuser -k {folder / LEDGER}"))
    return left
