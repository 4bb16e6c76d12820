"""How the cost grows: CPU time of a tick by engines, GPUs, rules and the size of a page; each line's slope and bend.

    python -m bench.growth [--short]        (from the repository's root: it builds tests' stand-in)

The real agent with real HTTP sources, the C stand-in's GPUs and a store on disk, its time handed in, so that ticks
follow each other at once; each point in a process of its own, the least of several groups of ticks, since a busy
machine only adds. The bend is the slope of the upper part over that of the lower: 1 is a straight line, and less is
less than one. Memory is the peak resident size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.daemon import tune_memory
from bench.figures import MIB, Figure, arguments, own_peak_mib, say, tell
from bench.replay import ROOT, Engines, Replay, environment

GROUPS, TICKS, WARM_UP_TICKS = 6, 10, 40
GOAL_BEND = 1.5


class Line(NamedTuple):
    """What grows, from where, in which steps. `scale`: of a step in what the slope is told of."""

    name: str
    key: str
    points: tuple[int, ...]
    few: tuple[int, ...]  # of the short form
    other: dict[str, int]
    scale: float = 1.0


LINES = (
    Line("engine", "engines", (1, 2, 4, 8, 16, 32, 64), (1, 16, 64), {"gpus": 0}),
    Line("gpu", "gpus", (1, 2, 4, 8, 16), (1, 4, 16), {"engines": 1}),
    Line("74_rules_on_8_engines", "rules", (1, 2, 4, 6, 8, 10), (1, 4, 10), {"engines": 8, "gpus": 8}),
    Line("mib_of_page", "bytes", (50_000, 200_000, 1_000_000, 2_500_000, 5_000_000), (50_000, 1_000_000, 5_000_000),
         {"engines": 1, "gpus": 0}, MIB),
)


def point(engines: int = 1, gpus: int = 0, rules: int = 1, bytes: int = 0) -> dict[str, float]:  # noqa: A002
    """CPU milliseconds of a tick here, and the peak memory of this process."""
    tune_memory()
    with tempfile.TemporaryDirectory() as folder, Engines(engines, bytes) as served, \
            Replay(Path(folder), served.urls, {} if gpus else {"nvml": "off"}, rules) as replay:
        replay.tick(WARM_UP_TICKS)
        spent = []
        for _ in range(GROUPS):
            began = time.process_time()
            replay.tick(TICKS)
            spent.append((time.process_time() - began) / TICKS)
        return {"ms": 1000 * min(spent), "mib": own_peak_mib()}


def measure(line: Line, at: int) -> dict[str, float]:
    """The same in a process that sees so many GPUs."""
    asked = line.other | {line.key: at}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "bench.growth", "--point", json.dumps(asked)], cwd=ROOT,
                              env=environment(Path(folder), asked.get("gpus", 0)), stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    say(f"{line.key} {at}: {found['ms']:.2f} ms a tick, {found['mib']:.1f} MiB")
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line that fits best (least squares)."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def bend(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the upper part over that of the lower, which end and begin at the middle one."""
    middle = len(xs) // 2
    return slope(xs[middle:], ys[middle:]) / slope(xs[:middle + 1], ys[:middle + 1])


def main() -> int:
    """Measure and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        asked: dict[str, Any] = json.loads(args.point)
        print(json.dumps(point(**asked)))
        return 0
    told = []
    for line in LINES:
        xs = [float(x) for x in (line.few if args.short else line.points)]
        found = [measure(line, int(x)) for x in xs]
        spent = [one["ms"] for one in found]
        told += [Figure(f"growth_cpu_per_{line.name}", line.scale * slope(xs, spent), "ms_a_tick"),
                 Figure(f"growth_bend_{line.key}", bend(xs, spent), "x", GOAL_BEND),
                 Figure(f"growth_memory_per_{line.name}", line.scale * slope(xs, [one["mib"] for one in found]), "MiB")]
    return tell(told)


if __name__ == "__main__":
    sys.exit(main())
