"""A real Alertmanager (Debian's) on a free port of loopback, with a webhook receiver behind it.

    with Receiver() as receiver, RealAlertmanager(tmp_path, port, receiver.url) as alertmanager:
        ... post to alertmanager.url ...
        receiver.alerts()
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.needs import find, need

CONFIG = """
route: {{receiver: hook, group_by: ['...'], group_wait: {wait}, group_interval: {wait}, repeat_interval: 4h}}
receivers:
  - name: hook
    webhook_configs: [{{url: '{url}', send_resolved: true}}]
"""


class RealAlertmanager:
    """Starts at once, on `port`; `stop` and `start` again keep its data, as a restart does.

    `cluster`: the address that it gossips on, and its peer's; None: it is alone.
    """

    def __init__(self, folder: Path, port: int, hook_url: str, wait: str = "1s", config: str = CONFIG,
                 cluster: tuple[str, str] | None = None) -> None:
        need("alertmanager")
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._port = port
        self._cluster = cluster
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "alertmanager.yml").write_text(config.format(url=hook_url, wait=wait))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = 20.0) -> None:
        """Run it until it is ready."""
        program = find("alertmanager")
        assert program is not None
        arguments = [
            f"--config.file={self._folder / 'alertmanager.yml'}",
            f"--storage.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            *(["--cluster.listen-address="] if self._cluster is None else [
                f"--cluster.listen-address={self._cluster[0]}", f"--cluster.advertise-address={self._cluster[0]}",
                f"--cluster.peer={self._cluster[1]}"]),
        ]
        log = self._folder / "alertmanager.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen([program, *arguments], stdout=out, stderr=out)
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            assert self._process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """End it (SIGTERM), so that nothing listens any more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def kill(self) -> None:
        """End it (SIGKILL), with all that it had not saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds: /api/v2/alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    def flushes(self) -> float:
        """How often it has looked into its log of notifications: once a flush of a group, after the flush before."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("alertmanager_nflog_queries_total"))

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
