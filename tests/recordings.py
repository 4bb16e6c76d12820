"""Recordings of a real engine, kept small in tests/data, as `tocsin record` writes them."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "recordings"
KV_PRESSURE = "vllm-0.32-kv-pressure"
STARVED_HOST = "vllm-0.32-starved-host"
RECORDINGS = (KV_PRESSURE, STARVED_HOST)


def lines(name: str) -> bytes:
    """A recording's JSON lines."""
    return lzma.decompress((FOLDER / f"{name}.jsonl.xz").read_bytes())


def rows(name: str) -> list[dict[str, Any]]:
    """A recording's rows."""
    return [json.loads(line) for line in lines(name).splitlines()]


def unpacked(name: str, into: Path) -> Path:
    """The recording as the file that a user has."""
    path = into / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(lines(name), compresslevel=1))
    return path


def truth(name: str) -> dict[str, Any]:
    """What is true of it, computed apart from Tocsin."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.truth.json").read_text())
    return found
