"""Build the stand-in library; needs make and a C compiler. By hand: `make -C tests/fake_nvml`."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios"


@cache
def build() -> Path:
    """Build it if a source is newer, and return the folder to put into LD_LIBRARY_PATH."""
    done = subprocess.run(["make", "-s", "-C", str(HERE)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"make -C {HERE} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return HERE / "build"
