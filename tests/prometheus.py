"""A real Prometheus (Debian's) on a port of loopback, with a past of its own where the test wants one."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.needs import find, need


class RealPrometheus:
    """`stop` and `start` again keep its data, as a restart does. `targets`: host:port that it scrapes every second."""

    def __init__(self, folder: Path, port: int, targets: Iterable[str] = (), query_timeout: str = "30s") -> None:
        need("prometheus", "promtool")
        self.url = f"http://127.0.0.1:{port}"
        self._folder, self._port, self._query_timeout = folder, port, query_timeout
        folder.mkdir(parents=True, exist_ok=True)
        named = ", ".join(f'"{target}"' for target in targets)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: t, static_configs: [{{targets: [{named}]}}]}}]\n")
        self._process: subprocess.Popen[bytes] | None = None

    def remember(self, lines: Iterable[str]) -> None:
        """Give it a past, before it starts: lines of OpenMetrics, each with its time in unix seconds."""
        file = self._folder / "past.om"
        file.write_text("\n".join([*lines, "# EOF", ""]))
        subprocess.run([find("promtool") or "", "tsdb", "create-blocks-from", "openmetrics", str(file),
                        str(self._folder / "data")], check=True, capture_output=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0) -> None:
        """Run it until it is ready."""
        log = self._folder / "prometheus.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [find("prometheus") or "", f"--config.file={self._folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={self._folder / 'data'}", "--storage.tsdb.retention.time=30d",
                 f"--web.listen-address=127.0.0.1:{self._port}", f"--query.timeout={self._query_timeout}"],
                stdout=out, stderr=out)
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            assert self._process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """End it, so that nothing listens any more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
