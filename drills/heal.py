"""Undo whatever any ledger says, offline: what `tocsin drill heal`, ExecStopPost= and the sweep at start do.

Looks at the world, never at the ledger's state alone, and needs no successful write: on a full or read-only disk it
undoes the same, and does it again the next time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from drills import owner, proc
from drills.ledger import (
    LEDGER,
    Entry,
    Ledger,
    aborted_by,
    last_state,
    plan_of,
    process_of,
    read,
    run_folders,
    say_aborted_by,
)
from drills.model import REFUSED, Left, ProcessId, State
from drills.strays import heal_strays
from drills.undo import undo_plan, wait_unheld

log = structlog.get_logger()

# A holder ends by itself when its runner does; after this it is ended.
HOLDER_ENDS_WITHIN_S = 5.0
ENDED_WITHIN_S = 5.0
# So long a live runner has to end its run in good order, with a report; more where its fault lets users drain.
RUNNER_ENDS_WITHIN_S = 20.0
_OVER = REFUSED | {State.REPORTED}


def heal(
    root: Path, *, finish: Callable[[Path, list[Entry], list[Left]], None], by: str = "tocsin drill heal"
) -> list[Left]:
    """End and undo every run under `<state_dir>/drills/runs` that is not known to be clean.

    A live one is aborted first, in the name of `by`. And what of ours is in the world without a ledger, by its tags.

    `finish` is called for each of them with what is left, to write its report. What could not be undone is returned,
    with the commands that do it. Never raises for a single run: the others are waiting.
    """
    remaining: list[Left] = []
    for folder in run_folders(root):
        owner.give(folder)
        try:
            entries = read(folder)
            if is_clean(entries):
                continue
            entries, left = heal_run(folder, entries, by)
        except PermissionError as error:
            log.warning("heal_not_permitted", run=folder.name, error=str(error))
            # Another user's: whoever may look says what became of it, and pages for what is left.
            remaining.append(Left(f"run {folder.name}: {error}", "sudo tocsin drill heal"))
            continue
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


def heal_run(folder: Path, entries: Sequence[Entry], by: str) -> tuple[list[Entry], list[Left]]:
    """End the processes of one run and undo its fault; its ledger as it is then, and what is left.

    Raises OSError, msgspec.ValidationError.
    """
    left = end_runner(folder, entries, by)
    now = read(folder)  # it may have gone on until it ended: to a fault, or to its report
    left += end_holder(folder, now) if not left else []
    plan = plan_of(now)
    if plan is not None and not left:
        left = undo_plan(plan)
    log.info("healed", run=folder.name, left=[one.what for one in left])
    return now, left


def _note_healed(folder: Path) -> None:
    """Note in the ledger that nothing is left, where that can be written."""
    try:
        ledger = Ledger.open(folder)
        try:
            by = aborted_by(folder)
            ledger.note(healed=True, **({"aborted_by": by} if by else {}))
        finally:
            ledger.close()
    except OSError as error:
        log.warning("healed_not_noted", run=folder.name, error=str(error), next="it is healed again next time")


def end_runner(folder: Path, entries: Sequence[Entry], by: str) -> list[Left]:
    """Abort a live runner, and end one that does not heed it. What would not end is returned. Raises OSError."""
    runner, plan = process_of(entries, "runner"), plan_of(entries)
    if runner is None or runner.pid == os.getpid() or proc.wait_ended(runner, 0.0):
        return []
    log.info("aborting", run=folder.name, by=by, pid=runner.pid)
    with suppress(ProcessLookupError):
        os.kill(runner.pid, 0)  # of another user's run nothing is said
    say_aborted_by(folder, by)
    drain_s = float(plan.facts.get("drain_s", 0.0)) if plan is not None else 0.0
    if proc.end(runner, RUNNER_ENDS_WITHIN_S + drain_s, signal.SIGTERM):
        return []
    return _end(folder, "runner", runner)


def end_holder(folder: Path, entries: Sequence[Entry]) -> list[Left]:
    """The holder undoes and ends by itself once its runner is gone, or is ended. Raises OSError."""
    holder = process_of(entries, "holder")
    left: list[Left] = []
    if holder is not None and holder.pid != os.getpid() and not proc.wait_ended(holder, HOLDER_ENDS_WITHIN_S):
        left = _end(folder, "holder", holder)
    if not left and not wait_unheld(folder, HOLDER_ENDS_WITHIN_S):
        left.append(Left(f"a process still injects the fault of {folder.name}", f"fuser -k {folder / LEDGER}"))
    return left


def _end(folder: Path, role: str, process: ProcessId) -> list[Left]:
    log.info("ending", run=folder.name, role=role, pid=process.pid)
    if proc.end(process, ENDED_WITHIN_S):
        return []
    return [Left(f"{role} {process.pid} of {folder.name} does not end", f"kill -KILL {process.pid}")]
