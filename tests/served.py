"""A real server as a process of the test's own: run until it is ready, ended or killed, and run again on its data."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class Served:
    """What `command` runs, which answers `url`/-/ready when it is. `within_s`: for its start, and for its end."""

    def __init__(self, url: str, command: Sequence[str], log: Path, within_s: float) -> None:
        self.url = url
        self._command, self._log, self._within_s = command, log, within_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Run it until it is ready."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        deadline = time.monotonic() + self._within_s
        while not self._ready():
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """End it (SIGTERM), so that nothing listens any more."""
        if self._process is not None:
            self._process.terminate()
            self._ended(self._process)

    def kill(self) -> None:
        """End it (SIGKILL), with all that it had not saved."""
        if self._process is not None:
            self._process.kill()
            self._ended(self._process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        process.wait(self._within_s)
        self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
