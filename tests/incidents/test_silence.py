"""The real agent, a webhook and the command line: a silence mutes a page through kill -9, and its end pages."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agent_process import ROOT, AgentProcess
from tests.page_server import PageServer
from tests.receiver import Receiver, wait_until
from tests.recordings import KV_PRESSURE, rows

pytestmark = pytest.mark.heavy


def tocsin(agent: AgentProcess, *words: str) -> Any:
    """`tocsin … --json`, as a person would."""
    done = subprocess.run([sys.executable, "-m", "agent", *words, "--config", str(agent.path), "--json"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 2, 3), done.stderr
    return json.loads(done.stdout)


def test_a_dead_engine_under_maintenance_wakes_nobody_until_it_ends(tmp_path: Path) -> None:
    """The engine is taken down in a maintenance; the agent is killed meanwhile; the maintenance ends too early."""
    page = rows(KV_PRESSURE)[-1]["body"].encode()
    with ExitStack() as stack:
        receiver = stack.enter_context(Receiver())
        engine = stack.enter_context(PageServer(page))
        agent = stack.enter_context(AgentProcess(tmp_path, {
            "node": "gpu-17", "poll": "1s", "nvml": "off", "engines": [{"name": "llama", "url": engine.url}],
            "rules": {"override": {"engine-down": {"keep": "2s"}}}, "notify": [{"webhook": {"url": receiver.url}}]}))
        wait_until(lambda: any(row["rule"] == "engine-down" and row["state"] == "OK" for row in
                               agent.ask("/check")["signals"]), 60, "the engine is seen")

        made = tocsin(agent, "maintenance", "--for", "1h", "--why", "new driver")
        engine.stop()
        wait_until(lambda: any(row["rule"] == "engine-down" and row["state"] == "firing" for row in
                               agent.ask("/alerts")), 60, "the alert")
        agent.kill()
        agent.start()
        (held,) = tocsin(agent, "silence", "--list")["silences"]
        down = next(row for row in tocsin(agent, "alerts") if row["rule"] == "engine-down")
        assert (held["id"], held["why"], down["state"]) == (made["id"], "new driver", "firing")
        assert down["silenced"].endswith("new driver")
        assert receiver.alerts() == []

        assert [one["id"] for one in tocsin(agent, "unsilence", str(made["id"]))] == [made["id"]]
        receiver.wait_until(lambda _: ("firing", "EngineDown") in receiver.alerts(), 60.0, "the page")
        engine.start()
        receiver.wait_until(lambda _: ("resolved", "EngineDown") in receiver.alerts(), 90.0, "its end")
        counted = {row["rule"]: row for row in tocsin(agent, "alerts", "stats")["rules"]}["engine-down"]
        assert (counted["fired"], counted["silenced"], counted["short"]) == (1, 1, 1)
    assert [status for status, name in receiver.alerts() if name == "EngineDown"] == ["firing", "resolved"]
