"""Which engine a target hits that is written as a process or an address."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent.config import Config, EngineConfig
from drills.hit import with_engine

SERVER = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_process_is_the_engine_whose_port_it_serves() -> None:
    """A target by pid claimed every engine's alerts: a real outage of another one was a drill's."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        away = url.replace("127.0.0.1", "192.0.2.7")  # another machine's, on the same port
        config = Config(engines=(EngineConfig(name="other", url="http://127.0.0.1:1"),
                                 EngineConfig(name="away", url=away), EngineConfig(name="a", url=url)))
        assert with_engine({"pid": process.pid}, config) == {"pid": process.pid, "engine": "a", "url": url}
        assert with_engine({"pid": process.pid}, Config()) == {"pid": process.pid}
        process.kill()


@pytest.mark.parametrize(
    ("target", "engine"),
    [({"address": "10.0.0.7", "port": 8001}, "far"), ({"address": "10.0.0.7", "port": 8002}, None),
     ({"address": "10.0.0.8", "port": 8001}, None), ({"engine": "near"}, "near"), ({"path": "/data"}, None)],
)
def test_an_upstream_is_the_engine_at_its_address(target: dict[str, object], engine: str | None) -> None:
    """By host and port together: 8001 is a port of many machines."""
    config = Config(engines=(EngineConfig(name="far", url="http://10.0.0.7:8001"),))
    assert with_engine(target, config).get("engine") == engine
