"""A short fuzz, as part of the heavier tests; the long one is `python -m tests.fuzz --pages 1000000`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz import GROWTH_MIB, fuzz

PAGES = 50_000


@pytest.mark.heavy
def test_nothing_crashes_or_hangs_on_what_it_reads(tmp_path: Path) -> None:
    """A proxy cut a page in the middle, a receiver answered with half a header, and a disk lost a byte."""
    seed = int.from_bytes(os.urandom(4), "big")
    said = [f"seed {seed}"]

    result = fuzz(PAGES, seed, tmp_path, say=said.append)

    assert result.told["pages"].done == PAGES
    assert result.wrong == [], "\n".join(said)
    assert result.growth_mib <= GROWTH_MIB
