"""A real Alertmanager (Debian's) on a free port of loopback, with a webhook receiver behind it.

    with Receiver() as receiver, RealAlertmanager(tmp_path, port, receiver.url) as alertmanager:
        ... post to alertmanager.url ...
        receiver.alerts()
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.needs import find, need
from tests.served import Served

CONFIG = """
route: {{receiver: hook, group_by: ['...'], group_wait: {wait}, group_interval: {wait}, repeat_interval: 4h}}
receivers:
  - name: hook
    webhook_configs: [{{url: '{url}', send_resolved: true}}]
"""


class RealAlertmanager(Served):
    """Starts at once, on `port`; `stop` and `start` again keep its data, as a restart does.

    `cluster`: the address that it gossips on, and its peer's; None: it is alone.
    """

    def __init__(self, folder: Path, port: int, hook_url: str, wait: str = "1s", config: str = CONFIG,
                 cluster: tuple[str, str] | None = None) -> None:
        need("alertmanager")
        alone = ["--cluster.listen-address="]
        super().__init__(f"http://127.0.0.1:{port}", [
            find("alertmanager") or "", f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            *(alone if cluster is None else [
                f"--cluster.listen-address={cluster[0]}", f"--cluster.advertise-address={cluster[0]}",
                f"--cluster.peer={cluster[1]}"]),
        ], folder / "alertmanager.log", within_s=20.0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "alertmanager.yml").write_text(config.format(url=hook_url, wait=wait))

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
