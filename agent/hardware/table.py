"""The tables of Xid and SXid numbers (xid.yaml, sxid.yaml): what a number means, who is told, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import yaml

Severity = Literal["page", "ticket", "info", "log"]
Group = Literal["gpu", "memory", "link"]
# From the mildest to the strongest. NVML's own numbers are not in this order.
ACTIONS = ("none", "restart_app", "drain_p2p", "reset", "drain_reset", "imex", "reboot", "check", "replace")
RANK: Mapping[str, int] = {action: rank for rank, action in enumerate(ACTIONS)}
IN_WORDS: Mapping[str, str] = {
    "none": "nothing now",
    "restart_app": "restart the application; the GPU stays usable",
    "drain_p2p": "drain what uses peer-to-peer on this GPU",
    "reset": "take load off this GPU and reset it (nvidia-smi -r)",
    "drain_reset": "drain this GPU, then reset it (nvidia-smi -r)",
    "imex": "recover the IMEX domain",
    "reboot": "drain the node and reboot it",
    "check": "look at the hardware, call its support",
    "replace": "take it out of service; RMA",
}
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and what Xid 154 says in the same numbers.
RECOVERY: Mapping[int, str] = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_reset", 5: "imex",
                               6: "reset", 7: "reboot"}
UNKNOWN_NUMBER = 999  # how NVML calls a number that it does not know
FALLEN = 79


class Xid(NamedTuple):
    """What one number means."""

    means: str
    severity: Severity
    action: str
    group: Group = "gpu"
    repeat: int | None = None  # so many in 24 h on one GPU alone are a ticket
    by_line: bool = False  # the line says whether it is fatal
    then: str | None = None


class Switch(NamedTuple):
    """The SXid numbers by kind."""

    fatal: frozenset[int]
    reboot: frozenset[int]
    corrected: frozenset[int]
    means: Mapping[int, str]


def _load(name: str) -> Any:
    return yaml.safe_load(files("agent.hardware").joinpath(name).read_text(encoding="utf-8"))


@cache
def xids() -> Mapping[int, Xid]:
    """The table by number."""
    table: dict[int, Xid] = {}
    for row in _load("xid.yaml"):
        numbers = row.pop("xid")
        table |= dict.fromkeys(numbers if isinstance(numbers, list) else [numbers], Xid(**row))
    return table


@cache
def switch() -> Switch:
    """The table of NVSwitch errors."""
    told = _load("sxid.yaml")
    fatal, reboot, corrected = (frozenset(told[name]) for name in ("fatal", "reboot", "corrected"))
    return Switch(fatal, reboot, corrected, told["means"])


def xid(number: int) -> Xid:
    """What a number means; one that nobody has told us of is a ticket."""
    return xids().get(number) or Xid("an error that this version does not know", "ticket", "none")


def stronger(*actions: str | None) -> str:
    """The strongest of several actions; None is no word at all."""
    return max((action for action in actions if action is not None), key=RANK.__getitem__, default="none")
