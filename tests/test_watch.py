"""`tocsin watch` on a terminal of its own (a pty), in a pipe, and on an agent that goes and comes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.web.app import PRIVATE, make_app
from agent.web.server import Server, serve_unix
from tests.agent_process import ROOT
from tests.test_cli import HOT
from tests.test_web import CATALOGUE, NOW, FakeView

WITHIN_S = 60.0


def serve(folder: Path, view: FakeView) -> Server:
    """An agent's socket."""
    return serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), folder / "sock")


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "tocsin.yaml").write_text(f"socket: {tmp_path}/sock\n")
    return [sys.executable, "-m", "agent", "watch", "--every", "100ms", "--config", str(tmp_path / "tocsin.yaml")]


class Paged(FakeView):
    """One whose alert belongs to an incident, once it has one."""

    incident: str | None = None

    def alerts(self, include_resolved: bool) -> list[dict[str, Any]]:
        """As they are told, with their incident."""
        return [row | {"incident": self.incident} for row in super().alerts(include_resolved)]


class Terminal:
    """A command on a terminal; `seen` is all that it drew."""

    def __init__(self, command: list[str], lines: int = 40, columns: int = 120) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (lines, columns))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
                                        start_new_session=True, env={**os.environ, "TERM": "xterm"})  # fmt: skip
        self.seen = ""

    def until(self, holds: Callable[[str], bool]) -> None:
        """Read on until it holds."""
        deadline = time.monotonic() + WITHIN_S
        os.set_blocking(self.ours, False)
        while not holds(self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            try:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize(("end", "status"), [
    (lambda terminal: os.write(terminal.ours, b"q"), 0),
    (lambda terminal: terminal.process.send_signal(signal.SIGINT), 0),
    (lambda terminal: terminal.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM)])
def test_q_ends_it_and_the_terminal_is_as_before(tmp_path: Path, command: list[str],
                                                 end: Callable[[Terminal], object], status: int) -> None:
    """It left the terminal without echo and in the other screen, and the engineer typed blindly."""
    view = FakeView()
    view.checked = {"verdict": "page", "node": "gpu-17", "signals": [HOT], "why": None}
    server, terminal = serve(tmp_path, view), Terminal(command)
    try:
        terminal.until(lambda seen: "PAGE: gpu-temperature" in seen and "91 °C" in seen)
        end(terminal)
        assert terminal.process.wait(WITHIN_S) == status
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        other_screen, cursor = ("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")
        terminal.until(lambda seen: all(0 <= seen.rfind(taken) < seen.rfind(given) for taken, given in (
            other_screen, cursor)))
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()
        server.close()


def test_on_a_small_terminal_what_is_out_of_range_is_seen_and_the_rest_is_counted(tmp_path: Path,
                                                                                 command: list[str]) -> None:
    """On 24 lines of 80 H7 to H10 and all that was out of range were cut off without a mark, and whose they were."""
    view = FakeView()
    fine = [{**HOT, "number": f"H{n}", "rule": f"rule-{n}", "state": "OK"} for n in range(1, 11)]
    more = [{**HOT, "number": f"H{n}", "rule": f"rule-{n}b", "state": "OK"} for n in range(1, 11)]
    hot = [{**HOT, "subject": f"GPU-{n}", "number": "M9", "rule": "outside-the-ten"} for n in (1, 2)]
    view.checked = {"verdict": "page", "node": "gpu-17", "signals": [*fine, *more, *hot], "why": None}
    server, terminal = serve(tmp_path, view), Terminal(command, 24, 80)
    try:
        terminal.until(lambda seen: "make the window taller" in seen)
        screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.seen)
        lines = [line.rstrip() for line in screen[: screen.index("taller") + 6].split("\n")]
        assert len(lines) <= 24
        assert all(len(line.strip("\r")) <= 80 for line in lines)
        of_gpus = [re.findall(r"GPU-[12]", line) for line in lines if "outside-the-ten" in line and "BREACH" in line]
        assert of_gpus == [["GPU-1"], ["GPU-2"]]
        # head, verdict, empty; title, heads, 2 rows, empty; title, heads, 20 rows: 30, of which 23 fit above the mark
        assert "… 7 more lines: make the window taller" in screen
    finally:
        terminal.close()
        server.close()


def test_an_agent_that_goes_is_said_and_the_last_is_old(tmp_path: Path, command: list[str]) -> None:
    """The agent was killed; the screen went on showing HEALTHY."""
    view = FakeView()
    view.checked = {"verdict": "healthy", "node": "gpu-17", "signals": [{**HOT, "state": "OK"}], "why": None}
    server, terminal = serve(tmp_path, view), Terminal(command)
    try:
        terminal.until(lambda seen: "HEALTHY" in seen)
        server.close()
        terminal.until(lambda seen: "no agent answers" in seen and "is old" in seen)
        terminal.seen = ""
        server = serve(tmp_path, view)
        terminal.until(lambda seen: "HEALTHY" in seen)
    finally:
        terminal.close()
        server.close()


def test_in_a_pipe_it_is_quiet(tmp_path: Path, command: list[str]) -> None:
    """One line at each change of the verdict; as JSON the whole of it; Ctrl-C is no fault."""
    view = Paged()
    view.checked = {"verdict": "healthy", "node": "gpu-17", "signals": [{**HOT, "state": "OK"}], "why": None}
    server = serve(tmp_path, view)
    running = [subprocess.Popen([*command, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True)
               for more in ([], ["--json"])]
    try:
        plain, as_json = (process.stdout for process in running)
        assert plain is not None
        assert as_json is not None
        assert "HEALTHY: 1 in range" in plain.readline()
        assert json.loads(as_json.readline())["verdict"] == "healthy"
        view.checked = {"verdict": "page", "node": "gpu-17", "signals": [HOT], "why": None}
        assert "PAGE: gpu-temperature" in plain.readline()
        assert json.loads(as_json.readline())["signals"][0]["rule"] == "gpu-temperature"
        view.incident = "gpu-17/queue-age/1"  # a second one at the same verdict was never told
        assert "INCIDENT  gpu-temperature 91 °C" in plain.readline()
        for process in running:
            process.send_signal(signal.SIGINT)
        assert [process.wait(WITHIN_S) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.communicate()
        server.close()


def test_who_reads_no_more_ends_it(tmp_path: Path, command: list[str]) -> None:
    """`tocsin watch | head -1` ran for ever in the background."""
    server = serve(tmp_path, FakeView())
    try:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            server.close()  # the verdict changes: there is something to write
            assert process.wait(WITHIN_S) == 0
    finally:
        server.close()
