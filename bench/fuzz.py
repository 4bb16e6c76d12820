"""How many of 1,000,000 mutated pages, and of the answers, files and databases that go with them, crash or hang."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, arguments, say, tell
from tests.fuzz import GROWTH_MIB, fuzz

PAGES, SHORT_PAGES = 1_000_000, 20_000


def main() -> int:
    """Fuzz and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    say(f"seed {asked.seed}")
    pages = SHORT_PAGES if asked.short else PAGES
    result = fuzz(pages, asked.seed, Path(tempfile.gettempdir()) / "tocsin-fuzz", say=say)
    say(result.line())
    return tell([Figure("fuzzed_inputs", sum(told.done for told in result.told.values()), "inputs"),
                 Figure("fuzzed_crashed_or_hung", len(result.wrong), "inputs", 0.0),
                 Figure("fuzzed_memory_growth", result.growth_mib, "MiB", GROWTH_MIB)])


if __name__ == "__main__":
    sys.exit(main())
