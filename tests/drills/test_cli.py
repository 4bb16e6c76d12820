"""The drill commands where something of ours goes wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from agent import client
from agent.config import Config
from drills import cli, daemon, runner
from drills.model import Drill, Left, State


def test_a_fault_of_ours_in_the_foreground_is_no_verdict_of_the_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exited 1, which says FAIL, and nobody looked what it had left."""
    healed: list[Config] = []

    def breaks(folder: Path, *, accept_unknown_budget: bool) -> None:
        raise KeyError(folder.name)

    def heals(config: Config) -> list[Left]:
        healed.append(config)
        return []

    monkeypatch.setattr(runner, "execute", breaks)
    monkeypatch.setattr(daemon, "heal_all", heals)
    config = Config(node="gpu-17", state_dir=tmp_path)

    folder = cli.run_here(None, config, Drill("loss", "process-kill"), accept_unknown_budget=False)

    assert healed == [config]
    assert folder.name.startswith("loss-")
    assert "KeyError" in capsys.readouterr().err


def test_a_run_s_states_are_told_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline's log has one line a state, and neither a bar nor a control character; stdout is the verdict's."""
    states = iter(["PLANNED", "BASELINE", "BASELINE", "OBSERVING", "REPORTED"])
    row = {"verdict": "PASS"}

    def ask(_: Path, path: str) -> dict[str, object]:
        assert path == "/runs/loss-1"
        state = next(states)
        return {"run": "loss-1", "state": state, "over": state == "REPORTED", "row": row, "rows": []}

    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(cli, "LOOK_EVERY_S", 0.0)

    told = cli.wait_for(Config(state_dir=tmp_path), "loss-1", Drill("loss", "process-kill"))

    assert told["row"] == row
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"loss-1: {s}" for s in ("PLANNED", "BASELINE", "OBSERVING", "REPORTED")]


def test_a_run_in_the_foreground_tells_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty minutes of nothing, and the engineer ended it by Ctrl-C in the middle of its fault."""
    seen = threading.Event()

    def write(course: cli.Course, state: str | None) -> None:
        see(course, state)
        if state == State.OBSERVING:
            seen.set()

    def executes(folder: Path, *, accept_unknown_budget: bool) -> None:
        for state in (State.BASELINE, State.OBSERVING):
            (folder / "run.json").write_text(json.dumps({"drill": {"name": "loss"}, "state": state}))
        assert seen.wait(60.0)
        (folder / "run.json").write_text(json.dumps({"drill": {"name": "loss"}, "state": "REPORTED"}))

    see = cli.Course.see
    monkeypatch.setattr(cli.Course, "see", write)
    monkeypatch.setattr(cli, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(runner, "execute", executes)

    folder = cli.run_here(None, Config(node="gpu-17", state_dir=tmp_path), Drill("loss", "process-kill"),
                          accept_unknown_budget=False)

    states = [line.removeprefix(f"{folder.name}: ") for line in capsys.readouterr().err.splitlines()]
    assert states[-2:] == ["OBSERVING", "REPORTED"]
