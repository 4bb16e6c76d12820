"""A real Prometheus (Debian's) on a port of loopback, with a past of its own where the test wants one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.needs import find, need
from tests.served import Served


class RealPrometheus(Served):
    """`stop` and `start` again keep its data, as a restart does. `targets`: host:port that it scrapes every second."""

    def __init__(self, folder: Path, port: int, targets: Iterable[str] = (), query_timeout: str = "30s") -> None:
        need("prometheus", "promtool")
        self._folder = folder
        super().__init__(f"http://127.0.0.1:{port}", [
            find("prometheus") or "", f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}", "--storage.tsdb.retention.time=30d",
            f"--web.listen-address=127.0.0.1:{port}", f"--query.timeout={query_timeout}",
        ], folder / "prometheus.log", within_s=60.0)
        folder.mkdir(parents=True, exist_ok=True)
        named = ", ".join(f'"{target}"' for target in targets)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: t, static_configs: [{{targets: [{named}]}}]}}]\n")

    def remember(self, lines: Iterable[str]) -> None:
        """Give it a past, before it starts: lines of OpenMetrics, each with its time in unix seconds."""
        file = self._folder / "past.om"
        file.write_text("\n".join([*lines, "# EOF", ""]))
        subprocess.run([find("promtool") or "", "tsdb", "create-blocks-from", "openmetrics", str(file),
                        str(self._folder / "data")], check=True, capture_output=True)
