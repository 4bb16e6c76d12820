"""What every script of bench/ shares: its line a figure, its progress, and what /proc says of a process.

A script is run as `python -m bench.NAME [--short]`, tells its progress on stderr, and ends with its figures on stdout:
`name value unit goal ok|short`. It exits 0, 1 when a figure is short of its goal, 2 when this machine lacks what it
needs.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"\S+ \S+ \S+ (?:-|[<>]=\S+) (?:ok|short)")
MIB = 1024.0 * 1024.0


class Figure(NamedTuple):
    """One measured number. `goal`: at most this, or with `at_least` no less; None: it is only told."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False

    @property
    def is_short(self) -> bool:
        """Whether it misses its goal; what is not a number does."""
        if self.goal is None:
            return False
        return not (self.value >= self.goal if self.at_least else self.value <= self.goal)

    def __str__(self) -> str:
        goal = "-" if self.goal is None else f"{'>=' if self.at_least else '<='}{self.goal:g}"
        return f"{self.name} {float(f'{self.value:.3g}'):g} {self.unit} {goal} {'short' if self.is_short else 'ok'}"


def tell(figures: Iterable[Figure]) -> int:
    """Print each on its line; the exit status: 1 when one is short."""
    told = list(figures)
    for figure in told:
        print(figure, flush=True)
    return int(any(figure.is_short for figure in told))


def say(text: str) -> None:
    """How far it is: in place on a terminal, else a line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
    else:
        print(f"# {text}", file=sys.stderr, flush=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all scripts take."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="the form of at most 90 s, with less to stand on")
    return parser


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, from /proc/PID/stat (fields 14 and 15, after the command's bracket)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Peak resident size of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MIB


def own_peak_mib() -> float:
    """Of this process."""
    return peak_mib(os.getpid())


def free_port() -> int:
    """One of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
