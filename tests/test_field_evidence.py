"""docs/field-evidence.md: each of the 51 stories names a test that is there, or says why there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "field-evidence.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


@cache
def named_in(path: str) -> frozenset[str]:
    """The names of the tests of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_no_story_is_left_out() -> None:
    """The table is the whole list, in order."""
    assert [row[0] for row in ROWS] == [str(n) for n in range(1, 52)]


@pytest.mark.parametrize("row", ROWS, ids=[f"row {row[0]}" for row in ROWS])
def test_every_story_has_its_test_or_its_reason(row: list[str]) -> None:
    """A test was renamed, and the table went on promising it."""
    said = row[3]
    if said.startswith("Reason: "):
        assert len(said) > 40
        return
    for name in said.split(", "):
        path, _, test = name.partition("::")
        assert test in named_in(path), name
