"""docs/hardware.md and the issue's own lists: each promise has a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hardware.cases import cases

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/hardware.md").read_text()
FILES = [*ROOT.glob("tests/**/test_*.py")]
TESTS = {f"{path.name}::{test}" for path in FILES
         for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}
ROWS = [line.split("|")[1:-1] for line in DOC.splitlines() if line.startswith("| ") and line.count("|") == 7]


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[0].strip()[:40])
def test_each_row_names_tests_that_exist(row: list[str]) -> None:
    """A comparison that names a test which was renamed years ago shows nothing."""
    named = [name.strip() for name in row[-1].split(",")]
    assert named
    assert [name for name in named if name not in TESTS] == []


def test_the_table_is_read() -> None:
    """A row of another shape would be left out of the test above."""
    assert len(ROWS) - 1 == DOC.partition("## What is compared")[2].count("\n| ") - 1 >= 23
    assert ROWS[0][-1].strip() == "shown by"


@pytest.mark.parametrize("case", sorted(cases()))
def test_each_public_case_has_a_test_by_its_id(case: str) -> None:
    """The cases are real complaints; one without a test is one that comes back."""
    assert [test for test in TESTS if re.search(rf"_{case.lower()}(_|$)", test)] != []
