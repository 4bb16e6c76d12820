"""A gate before one systemd service: its supervisor starts it again, and it waits there until the gate is gone.

A runtime unit that waits for a file to go is put before the service (Wants=, After=), ahead of all that the service
itself would start. Nothing but systemd starts the service: that is what the drill wants to see. The gate opens by
itself after its time, whoever died meanwhile; its three files are named after the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from drills.ledger import short_tag
from drills.model import Command, Left, Refused

RUNTIME = Path("/run/systemd/system")
ANSWERS_WITHIN_S = 30.0
_STEP_S = 0.2


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of one run before one service. All of it follows from the three."""

    run: str
    unit: str
    folder: Path

    @property
    def name(self) -> str:
        """The unit that waits."""
        return f"tocsin-gate-{short_tag(self.run)}.service"

    @property
    def flag(self) -> Path:
        """While this is there, the gate is shut."""
        return self.folder / f"tocsin-gate-{short_tag(self.run)}.shut"

    @property
    def waits(self) -> Path:
        """The unit's file."""
        return self.folder / self.name

    @property
    def drop_in(self) -> Path:
        """What puts it before the service."""
        return self.folder / f"{self.unit}.d" / f"tocsin-gate-{short_tag(self.run)}.conf"

    @property
    def files(self) -> list[Path]:
        """In the order in which they are removed: the first lets the service go."""
        return [self.flag, self.drop_in, self.waits]

    def undo_command(self) -> Command:
        """What a person types."""
        return Command(f"rm -f {' '.join(map(str, self.files))}; systemctl daemon-reload", f"lets {self.unit} start")


def check(unit: str) -> None:
    """Raise Refused where no gate can be put before a service: a template's form is well, a path or a blank is not."""
    if not re.fullmatch(r"[\w.@:\\-]{1,200}\.service", unit, re.ASCII):
        raise Refused(f"{unit!r} is no service of systemd that a gate can be put before")
    if not RUNTIME.is_dir():
        raise Refused(f"{RUNTIME} is not there: systemd does not run here, and nothing else's restart can be gated")
    if not os.access(RUNTIME, os.W_OK):
        raise Refused(f"{RUNTIME} cannot be written: gating a restart needs root; `tocsin drill unit` writes how")


def shut(gate: Gate, at_most_s: float) -> None:
    """Put it up; it opens by itself after `at_most_s`. Raises OSError, Refused (systemd did not take it)."""
    steps = int(at_most_s / _STEP_S)
    path = str(gate.flag).replace("%", "%%").replace("$", "$$")
    loop = f"i=0; while [ -e {path} ] && [ $$i -lt {steps} ]; do sleep {_STEP_S:g}; i=$$((i+1)); done"
    gate.drop_in.parent.mkdir(exist_ok=True)
    gate.waits.write_text(
        f"# Of Tocsin's drill {gate.run}. Opens by itself after {at_most_s:g} s.\n"
        "[Unit]\nDefaultDependencies=no\nCollectMode=inactive-or-failed\n"
        f"[Service]\nType=oneshot\nTimeoutStartSec=infinity\nExecStart=/bin/sh -c '{loop}'\n"
    )
    gate.drop_in.write_text(
        f"# Of Tocsin's drill {gate.run}: it starts when the gate is gone.\n"
        f"[Unit]\nWants={gate.name}\nAfter={gate.name}\n"
    )
    gate.flag.touch()
    reload()


def open_again(gate: Gate) -> None:
    """Take it away, whatever of it there is. Raises OSError, Refused."""
    there = [file for file in gate.files if file.exists()]
    for file in gate.files:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others have drop-ins there, or it is gone
        gate.drop_in.parent.rmdir()
    if there:
        reload()


def left(gate: Gate) -> list[Left]:
    """What of it is still there."""
    there = [str(file) for file in gate.files if file.exists()]
    if not there:
        return []
    return [Left(f"the gate before {gate.unit}: {', '.join(there)}", gate.undo_command().text)]


def reload() -> None:
    """Have systemd read its units. Raises Refused: it did not."""
    try:
        done = subprocess.run(
            ["systemctl", "daemon-reload"], capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"systemctl daemon-reload: {error}") from None
    if done.returncode != 0:
        raise Refused(f"systemctl daemon-reload: {done.stderr.strip() or f'exit {done.returncode}'}")
