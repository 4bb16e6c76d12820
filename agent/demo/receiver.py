"""Where the demo's alerts arrive: PagerDuty's Events API and Alertmanager's webhook, small, on loopback.

`events` is what a pager was sent, in order; a GET tells what the webhook got and when, as a drill's `echo` asks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGER, HOOK = "/v2/enqueue", "/hook"


class Receiver(ThreadingHTTPServer):
    """Listens in a thread of this process."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.events: list[Mapping[str, Any]] = []
        self.hooked: list[Mapping[str, Any]] = []
        threading.Thread(target=self.serve_forever, name="receiver", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Quiet."""

    def do_POST(self) -> None:
        """Take it, as both would."""
        told = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if self.path == PAGER:
            self.server.events.append({"at": time.time(), **told})
        else:
            self.server.hooked.append({"at": time.time(), "alerts": told.get("alerts", [])})
        self._send(202 if self.path == PAGER else 200, b'{"status": "success"}')

    def do_GET(self) -> None:
        """What the webhook got."""
        self._send(200, json.dumps(self.server.hooked).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
