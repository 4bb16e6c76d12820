"""All that bench/ measures, one after the other; then all figures once more.

    python -m bench [--short] [NAME…]        (from the repository's root; `make bench`, `make nightly`)

A figure that is short, or a script that could not measure, stops no other; the exit status says it: 1 where a figure is
short, 2 where a script could not measure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.figures import LINE

ROOT = Path(__file__).parents[1]
# In the order in which they are run: a name is a module of this folder.
BENCHES = (
    "parse", "cost", "growth", "time_to_page", "soak", "hardware", "page", "probe_cost",
    "torture", "fuzz", "fleet",
)


def measure(name: str, *, short: bool) -> tuple[list[str], str | None]:
    """Run one; its figures, and what is wrong with the script itself (None: nothing)."""
    figures = []
    command = [sys.executable, "-u", "-m", f"bench.{name}", *(["--short"] if short else [])]
    print(f"== {' '.join(command[2:])}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if LINE.fullmatch(line.strip()):
                figures.append(line.strip())
    if process.returncode == 2:
        return figures, "this machine lacks what it needs, see above"
    return figures, f"it ended with status {process.returncode}" if process.returncode not in (0, 1) else None


def main() -> int:
    """Run those that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="the short form of each: all in under 10 minutes")
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], metavar="NAME", help=", ".join(BENCHES))
    args = parser.parse_args()
    began, told, wrong = time.monotonic(), [], {}
    for name in args.names or BENCHES:
        figures, fault = measure(name, short=args.short)
        told += figures
        if fault is not None:
            wrong[name] = fault
    print(f"== all figures, in {time.monotonic() - began:.0f} s", flush=True)
    for line in told:
        print(line)
    for name, fault in wrong.items():
        print(f"# {name}: not measured: {fault}")
    return 2 if wrong else int(any(line.endswith(" short") for line in told))


if __name__ == "__main__":
    sys.exit(main())
