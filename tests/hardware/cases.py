"""The public hardware cases by id, and the lines that the driver writes, each with what it says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Every case, by id."""
    lines = (DATA / "hardware_cases.jsonl").read_text().splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


@cache
def golden() -> list[dict[str, Any]]:
    """[{"line", "want"}]: what a line says, by the names of Line's fields; None: nothing."""
    found: list[dict[str, Any]] = json.loads((DATA / "kernel_lines.json").read_text())
    return found
