"""The drill commands where something of ours goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import Config
from drills import cli, daemon, runner
from drills.model import Drill, Left


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
