"""`make demo ARGS=--headless`, whole: what it tells on its screen is what the agent's own API told meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from agent import client
from tests.agent_process import ROOT

pytestmark = pytest.mark.heavy

WITHIN_S = 600.0  # only against a hang: it takes two minutes
# The target as it is typed; what it sets up is here: these tests run in it.
COMMAND = ["make", "--old-file=setup", "demo", "ARGS=--headless", f"BIN={Path(sys.executable).parent}"]
GPU_3 = "GPU-de300000-0000-4000-8000-000000000003"


class Told(NamedTuple):
    """The last that the demo's own agent and drilld told while it went on."""

    incidents: Sequence[dict[str, Any]] = ()  # the newest first
    transitions: Sequence[dict[str, Any]] = ()
    open: Sequence[dict[str, Any]] = ()  # alerts
    notices: Mapping[str, list[dict[str, Any]]] = {}  # by incident
    runs: Sequence[dict[str, Any]] = ()
    reports: Mapping[str, str] = {}  # run -> its report, by its address on the page
    verdicts: tuple[str, ...] = ()  # each change


def ask_all(folder: Path, before: Told) -> Told:
    """What they tell now; what the page had before is kept."""
    agent, drilld = folder / "tocsin.sock", folder / "drilld.sock"
    page = json.loads((folder / "tocsin.yaml").read_text())["external_url"]
    incidents = client.ask(agent, "/incidents")
    notices = {one["id"]: client.ask(agent, f"/incidents/{quote(one['id'])}")["notices"] for one in incidents}
    runs = client.ask(drilld, "/runs")
    reports = dict(before.reports)
    for run in (one["run"] for one in runs if one["ended"] is not None and one["run"] not in reports):
        with urllib.request.urlopen(f"{page}/reports/{run}", timeout=30) as reply:
            reports[run] = reply.read().decode()
    verdict = client.ask(agent, "/check")["verdict"]
    verdicts = before.verdicts if before.verdicts[-1:] == (verdict,) else (*before.verdicts, verdict)
    return Told(incidents, client.ask(agent, "/transitions?after=0"), client.ask(agent, "/alerts?resolved=0"), notices,
                runs, reports, verdicts)


def play(folder: Path) -> tuple[str, int, Told]:
    """What it said, its exit status, and the last that its agent and drilld told."""
    told = Told()
    deadline = time.monotonic() + WITHIN_S
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(COMMAND, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=os.environ | {"TMPDIR": str(folder)})
        try:
            while process.poll() is None and time.monotonic() < deadline:
                for path in folder.glob("tocsin-demo-*/tocsin.sock"):
                    with suppress(client.NotRunning, client.AgentError, OSError):  # it comes up, or ends
                        told = ask_all(path.parent, told)
                time.sleep(0.2)
            status = process.wait(1.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return said.read(), status, told


def test_the_story_is_what_the_agent_s_api_told(tmp_path: Path) -> None:
    """A demo whose pages were print statements convinced nobody twice: each thing it says is asked of the API, too."""
    began = time.monotonic()
    said, status, told = play(tmp_path)
    took_s = time.monotonic() - began
    assert status == 0, said
    line = re.sub(r"\s+", " ", said)
    fired = [(row["rule"], row["subject"]) for row in told.transitions if row["state"] == "firing"]
    resolved = [(row["rule"], row["subject"]) for row in told.transitions if row["state"] == "resolved"]
    pages = [("gpu-thermal-limit", GPU_3), ("itl-p99", "llama-a"), ("engine-down", "llama-b")]
    assert [one for one in fired if one in pages] == pages, said
    assert re.findall(r"The agent's API \(/alerts\): (\S+) fires on (\S+), page,", line) == pages[:2]
    assert set(pages) <= set(resolved), said
    assert line.count("The agent's API (/check): the verdict is healthy") == 2  # when it begins, and when it is told
    assert line.count("The agent's API (/alerts): nothing fires") == 1
    well = [number for number, verdict in enumerate(told.verdicts) if verdict == "healthy"]
    assert "page" in told.verdicts[well[0] : well[-1]], told.verdicts  # what is pending for a moment is no fault
    assert took_s < 360.0  # promised: the story is told within 6 minutes
    assert [row for row in told.open if (row["state"], row["severity"]) == ("firing", "page")] == []
    drill, heat = told.incidents
    assert (heat["root"], drill["root"]) == (list(pages[0]), list(pages[2]))
    assert [member["rule"] for member in heat["members"]] == ["gpu-thermal-limit", "itl-p99"]
    assert (heat["drill"], drill["drill"]) == (None, "kill-llama-b")
    assert "The agent's API (/incidents): 2 incident(s). The pager rang 2 time(s)." in line
    for incident in told.incidents:
        assert incident["id"] in line
        assert f"(lasted {incident['ended_at'] - incident['began_at']:.0f} s" in line  # as /incidents has it
        rang = {one["key"] for one in told.notices[incident["id"]]
                if (one["channel"], one["status"], one["state"]) == ("pagerduty", "firing", "delivered")}
        assert rang == {incident["id"]}  # one page, whatever joined it
    rings = re.findall(r"THE PAGER RINGS: (.*)", said)
    assert len(rings) == 2, said
    assert rings[0].startswith("GPU 3 on demo-node: ")
    assert rings[1].startswith("DRILL  engine-down on demo-node, as announced by kill-llama-b")
    (run,) = told.runs
    assert run["verdict"] in ("PASS", "INCONCLUSIVE"), run["why"]  # on a busy machine some must-hold is not proven
    assert f"The drill's verdict: {run['verdict']}: {run['why']}" in line
    assert re.search(rf"Its report opens: http://127.0.0.1:\d+/reports/{re.escape(run['run'])} ", line)
    assert "Drill kill-llama-b" in told.reports[run["run"]]
    assert run["verdict"] in told.reports[run["run"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said"]
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in cmdline(path)]
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_all_of_it(tmp_path: Path, number: signal.Signals) -> None:
    """A closed terminal left its folder, and SIGTERM in the middle was a success."""
    process = subprocess.Popen([sys.executable, "-m", "agent", "demo", "--headless"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        assert any("The node's page" in line for line in process.stdout)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
    finally:
        process.kill()
        process.wait()
    assert ("Everything is ended, nothing is left" in rest) == (number != signal.SIGHUP)  # nobody is there any more
    assert list(tmp_path.iterdir()) == []


def cmdline(path: Path) -> str:
    """Of a process that may have ended by now."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
