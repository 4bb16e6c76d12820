"""What a command is at, told on a terminal while somebody waits, and next to nothing elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.progress import Progress, passed
from drills.cli import left_s
from drills.model import Drill, Holds, State
from tests.agent_process import ROOT
from tests.page_server import PageServer
from tests.test_oneshot import full
from tests.test_watch import Terminal


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    """`tocsin check` where no agent runs, on one engine for 1 s."""
    with PageServer(full()) as server:
        (tmp_path / "tocsin.yaml").write_text(json.dumps({
            "node": "gpu-17", "nvml": "off", "kernel_log": "off", "discover": False, "socket": f"{tmp_path}/none.sock",
            "state_dir": f"{tmp_path}/s", "engines": [{"url": server.url, "name": "llama"}]}))
        yield [sys.executable, "-m", "agent", "check", "--watch-for", "1s", "--config", str(tmp_path / "tocsin.yaml")]


def test_elapsed_and_left_are_counted_without_a_call() -> None:
    """Nobody called it for a minute, and it went on saying 15 s left."""
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress("watching 1 source", 15.0)
    now[0] += 4.0
    assert progress.text() == "watching 1 source · 4 s elapsed · 11 s left"
    progress("OBSERVING", 1200.0, at_most=True)
    now[0] += 65.0
    assert progress.text() == "OBSERVING · 1 min 09 s elapsed · at most 18 min 55 s left"
    now[0] += 1200.0
    assert progress.text().endswith(" · 1 min 05 s over its time")
    progress("looking what moves")
    assert progress.text() == "looking what moves · 21 min 09 s elapsed"
    assert passed(7500) == "2 h 05 min"


@pytest.mark.parametrize(("state", "want_s"), [
    (State.PREFLIGHT, 120 + 300 + 900), (State.BASELINE, 120 + 300 + 900), (State.OBSERVING, 300 + 900),
    (State.REVERTED, 900), (State.REPORTED, 0), (State.SKIPPED, 0)])
def test_what_of_a_drill_is_left_is_what_its_owner_planned(state: State, want_s: float) -> None:
    """2 min of baseline, 5 of the fault, and until the target has restarted: 15, which is longer than `recovery`."""
    drill = Drill("loss", "process-kill", baseline_s=120.0, for_s=300.0, recovery_s=600.0, resolve_within_s=600.0,
                  holds=Holds(restart_within_s=900.0))
    assert left_s(drill, state) == want_s


def test_a_terminal_sees_the_time_left_and_gets_it_back(command: list[str]) -> None:
    """15 s of nothing: was it hung? Then half a line stood before the answer, and there was no cursor."""
    terminal = Terminal(command)
    try:
        terminal.until(lambda seen: "sampling for myself" in seen and re.search(
            r"watching 1 source · \d s elapsed · \d s left", seen) is not None)
        terminal.until(lambda seen: "kv-cache-utilization" in seen and "TICKET" in seen)
        assert terminal.process.wait(60.0) == 1
        answer = terminal.seen[terminal.seen.rindex("elapsed"):]
        assert "\x1b[2K" in answer  # the line is gone
        assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")
    finally:
        terminal.close()


def test_elsewhere_it_is_quiet(command: list[str]) -> None:
    """stdout is the answer's alone, and a log gets one line, without a control character."""
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
                          env={**os.environ, "TERM": "xterm"})
    assert json.loads(done.stdout)["verdict"] == "ticket"
    assert re.fullmatch(r"tocsin: no agent answers on \S+; sampling for myself, 1 s\n", done.stderr)


def test_a_signal_in_the_midst_of_the_wait_ends_it() -> None:
    """Ctrl-C came between two lines of Event.wait, whose lock the handler then waited for: nothing ended it."""
    program = """
import os, signal
from agent.progress import stop_at_signals
stop = stop_at_signals()
with stop._cond:  # as the main thread holds it for an instant of each wait
    os.kill(os.getpid(), signal.SIGINT)
print("stopped" if stop.wait(60.0) else "still there")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=True)
    assert done.stdout == "stopped\n"
