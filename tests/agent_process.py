"""The real agent in a process of its own, as systemd would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent import client

ROOT = Path(__file__).parents[1]


class AgentProcess:
    """`python -m agent.daemon` on a configuration; may be killed and started again.

    `module`: another that runs it; `under`: the words of a program that becomes it, as setpriv.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], env: Mapping[str, str] | None = None,
                 module: str = "agent.daemon", under: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._module, self._under = module, under
        self.folder = folder
        self.socket = folder / "sock"
        self.path = folder / "tocsin.yaml"
        self.log = folder / "agent.log"
        own = {"state_dir": str(folder / "state"), "socket": str(self.socket), "listen": "127.0.0.1:0",
               "discover": False, "kernel_log": "off"}  # what else happens on this machine is no part of a story
        self.path.write_text(json.dumps(own | dict(config)))  # JSON is YAML
        self._env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 30.0) -> None:
        """Run it until its socket answers."""
        with self.log.open("ab") as out:
            command = [*self._under, sys.executable, "-m", self._module, "--config", str(self.path)]
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=out, stderr=out)
        deadline = time.monotonic() + timeout_s
        try:
            self._wait_ready(deadline)
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, deadline: float) -> None:
        assert self.process is not None
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.ask("/check")
            except (client.NotRunning, client.AgentError):
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.05)
            else:
                return

    def ask(self, path: str) -> Any:
        """A GET over the unix socket."""
        return client.ask(self.socket, path)

    def url(self, timeout_s: float = 30.0) -> str:
        """Where its page is, as its log says; its socket may be first."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self.log.read_text().splitlines():
                if '"event": "started"' in line:
                    return f"http://{json.loads(line)['listen']}"
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def kill(self, signum: int = signal.SIGKILL) -> int:
        """End it; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(20)

    def pid(self) -> int:
        """Its process id."""
        assert self.process is not None
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
