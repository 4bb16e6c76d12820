"""`tocsin watch`: the node at a glance on a terminal, drawn anew every few seconds until q.

Where it does not write to a terminal it is quiet: one line at each change of the verdict and each new incident, for a
log or a pipe.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from agent.client import AgentError, NotRunning
from agent.progress import in_order
from agent.show import Report, drawn, moment, watch_report
from agent.words import clean, verdict_line

Answer = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]  # what `check` and `alerts` tell
Ask = Callable[[], Answer]


def on_terminal(ask: Ask, every_s: float, out: TextIO, clock: Callable[[], float] = time.time) -> None:
    """Draw it until q, Ctrl-C or the end of what is typed; an agent that does not answer is said, and asked again."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, highlight=False)
    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with in_order(), screen as live, keys(sys.stdin) as hit:
        last: Report = []
        while True:
            try:
                last = watch_report(*ask(), clock())
                report = last
            except (NotRunning, AgentError) as error:
                report = [f"UNKNOWN: {error}", *(["What stands below is old.", *last] if last else [])]
            live.update(fitting(console, report, *shutil.get_terminal_size()), refresh=True)
            if hit(every_s) in ("q", "Q", ""):
                return


def fitting(console: Any, report: Report, width: int, height: int) -> Any:
    """The report as rich draws it, at most so many lines; what is cut off is counted in the last one."""
    from rich.console import Group
    from rich.segment import Segments

    lines = console.render_lines(Group(*drawn(report, width)), console.options.update(width=width), new_lines=True)
    while lines and not "".join(part.text for part in lines[-1]).strip():
        lines.pop()
    if len(lines) <= height:
        return Segments([part for line in lines for part in line])
    kept = Segments([part for line in lines[: height - 1] for part in line])
    return Group(kept, f"… {len(lines) - height + 1} more lines: make the window taller")


@contextmanager
def keys(stdin: TextIO) -> Iterator[Callable[[float], str | None]]:
    """Single keys, without Enter: the key that is hit within so many seconds; None: none was, "": there are no more."""
    fd = stdin.fileno()
    if not stdin.isatty():
        yield lambda timeout_s: time.sleep(timeout_s)
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def hit(timeout_s: float) -> str | None:
        return os.read(fd, 1).decode(errors="replace") if select.select([fd], [], [], timeout_s)[0] else None

    try:
        yield hit
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def as_lines(ask: Ask, every_s: float, out: TextIO, *, as_json: bool, clock: Callable[[], float] = time.time) -> None:
    """One line at each change of the verdict and each new incident, until Ctrl-C.

    Raises BrokenPipeError where nobody reads any more.
    """
    before, known = None, dict[str, str]()
    while True:
        try:
            answer, alerts = ask()
            line = verdict_line(answer)
            incidents = {a["incident"]: clean(a["summary"]) for a in reversed(alerts)
                         if a["state"] == "firing" and a.get("incident")}
        except (NotRunning, AgentError) as error:
            answer, line = {"verdict": "unknown", "why": str(error)}, f"UNKNOWN: {error}"
            incidents = known
        new = [summary for incident, summary in incidents.items() if incident not in known]
        known = incidents
        if answer["verdict"] != before or new:  # that one of several has ended is no news
            before = answer["verdict"]
            line = "  INCIDENT  ".join((line, *new))
            out.write(f"{json.dumps(answer) if as_json else f'{moment(clock())}  {line}'}\n")
            out.flush()
        time.sleep(every_s)
