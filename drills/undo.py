"""Undo one fault by its plan, and look at what is left: for the holder, the runner and heal. Never writes a ledger."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

from drills.faults.table import FAULTS
from drills.ledger import LEDGER
from drills.model import Left, Plan


def wait_unheld(folder: Path, wait_s: float) -> bool:
    """Wait until neither the holder nor a process that it started to inject is alive: they share a lock on the ledger.

    Undoing before would be too early: what is still injecting would do it after.
    """
    try:
        fd = os.open(folder / LEDGER, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    until = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.01)
            else:
                return True
    finally:
        os.close(fd)


def undo_plan(plan: Plan) -> list[Left]:
    """Undo a fault by its plan and look at what is left. Never raises: an error is something left."""
    fault = FAULTS.get(plan.fault)
    if fault is None:
        return [Left(f"run {plan.run}: this version does not know its fault {plan.fault!r}", _by_hand(plan))]
    try:
        fault.undo(plan)
    except Exception as error:  # of whatever fault: what it left is looked for, and says why
        return [replace(one, what=f"{one.what} (undo: {error})") for one in look(plan)]
    return look(plan)


def look(plan: Plan) -> list[Left]:
    """What of a fault is still in the world. Never raises: not being able to look is something left."""
    try:
        return FAULTS[plan.fault].left(plan)
    except Exception as error:
        return [Left(f"run {plan.run}: could not look at what {plan.fault} left: {error}", _by_hand(plan))]


def _by_hand(plan: Plan) -> str:
    return "; ".join(command.text for command in plan.undo) or "tocsin drill heal"
