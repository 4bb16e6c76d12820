"""`make demo ARGS=--headless`, whole: what it tells on its screen is what the agent's own API told meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent import client
from tests.agent_process import ROOT

pytestmark = pytest.mark.heavy

WITHIN_S = 600.0  # only against a hang: it takes two minutes
# The target as it is typed; what it sets up is here: these tests run in it.
COMMAND = ["make", "--old-file=setup", "demo", "ARGS=--headless", f"BIN={Path(sys.executable).parent}"]
GPU_3 = "GPU-de300000-0000-4000-8000-000000000003"


def play(folder: Path) -> tuple[str, int, list[dict[str, Any]], list[dict[str, Any]]]:
    """What it said, its exit status, and the last that its agent's API told: incidents and transitions."""
    incidents: list[dict[str, Any]] = []
    transitions: list[dict[str, Any]] = []
    deadline = time.monotonic() + WITHIN_S
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(COMMAND, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=os.environ | {"TMPDIR": str(folder)})
        try:
            while process.poll() is None and time.monotonic() < deadline:
                for path in folder.glob("tocsin-demo-*/tocsin.sock"):
                    with suppress(client.NotRunning, client.AgentError):
                        incidents = client.ask(path, "/incidents")
                        transitions = client.ask(path, "/transitions?after=0")
                time.sleep(0.5)
            status = process.wait(1.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return said.read(), status, incidents, transitions


def test_the_story_is_what_the_agent_s_api_told(tmp_path: Path) -> None:
    """A demo whose pages were print statements convinced nobody twice."""
    said, status, incidents, transitions = play(tmp_path)
    assert status == 0, said
    fired = [(row["rule"], row["subject"]) for row in transitions if row["state"] == "firing"]
    resolved = [(row["rule"], row["subject"]) for row in transitions if row["state"] == "resolved"]
    pages = [("gpu-thermal-limit", GPU_3), ("itl-p99", "llama-a"), ("engine-down", "llama-b")]
    assert [one for one in fired if one in pages] == pages, said
    assert set(pages) <= set(resolved), said
    drill, heat = incidents  # the newest first
    assert (heat["root"], drill["root"]) == (list(pages[0]), list(pages[2]))
    assert [member["rule"] for member in heat["members"]] == ["gpu-thermal-limit", "itl-p99"]
    assert (heat["drill"], drill["drill"]) == (None, "kill-llama-b")
    rings = re.findall(r"THE PAGER RINGS: (.*)", said)
    assert len(rings) == 2, said
    assert rings[0].startswith("GPU 3 on demo-node: ")
    assert rings[1].startswith("DRILL  engine-down on demo-node, as announced by kill-llama-b")
    assert re.search(r"The drill's verdict: (PASS|INCONCLUSIVE): ", said)
    assert re.search(r"Its report opens: http://127.0.0.1:\d+/reports/kill-llama-b-", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said"]
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in cmdline(path)]
    assert left == []


def cmdline(path: Path) -> str:
    """Of a process that may have ended by now."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
