"""A small real HTTP server on loopback that serves given pages, and misbehaves on request.

    with PageServer(page) as server:
        server.set_page(other, status=500)          # from now on
        server.set_health(503)
        server.fault("hang")                        # none hang reset close truncate drip drip-headers
        server.stop(); server.start()               # refuses, then listens on the same port again

    with PageServer.replay("x.jsonl.gz", factor=10) as server: ...      # a recording (.gz or .xz), ten times as fast

By hand: `python -m tests.page_server RECORDING [--factor 10] [--port 8000]`.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import lzma
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from tests.cut_server import CutServer, reset

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
Fault = Literal["none", "hang", "reset", "close", "truncate", "drip", "drip-headers"]


class Reply(NamedTuple):
    """One answer to GET /metrics."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


Page = bytes | str | Reply | Callable[[], "bytes | str | Reply"]


class PageServer:
    """Serves one target: /metrics (and /metrics/) as set by set_page, /health as set by set_health, else 404."""

    def __init__(self, page: Page = b"", *, port: int = 0) -> None:
        self._page: Page = page
        self._fault: Fault = "none"
        self._health = (200, 0.0)
        self.others: dict[str, bytes] = {}  # path -> page, beside /metrics and /health
        self._port = port
        self._http: CutServer | None = None
        self._released = threading.Event()  # lets hanging and dripping handlers end
        self.scrapes = 0
        self.healths = 0
        self.connections = 0
        self.seen: list[tuple[str, dict[str, str]]] = []  # the last 50 requests: path, headers in lower case
        self.start()

    @classmethod
    def replay(cls, recording: str | Path, *, factor: float = 1.0, port: int = 0) -> Self:
        """Serve a recording in time from now on; a row without a body is a 503; its last page stays at the end."""
        return cls(_Replay(Path(recording), factor), port=port)

    @property
    def url(self) -> str:
        """The address of the target, without a path."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The port, the same after stop and start."""
        return self._port

    def set_page(self, page: Page, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Serve this from now on: bytes, a text, a Reply, or a function that is called for each request."""
        if isinstance(page, str):
            page = page.encode()
        self._page = Reply(page, status, headers or {}) if isinstance(page, bytes) else page

    def set_health(self, status: int, delay_s: float = 0.0) -> None:
        """Answer /health with this status, so late."""
        self._health = (status, delay_s)

    def fault(self, kind: Fault) -> None:
        """Misbehave on /metrics from now on; "none" ends it and lets go of those that hang."""
        self._fault = kind
        if kind == "none":
            self._released.set()
            self._released = threading.Event()

    def start(self) -> None:
        """Listen (again, on the same port)."""
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = CutServer(("127.0.0.1", self._port), handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), name="page-server", daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and cut those that are open."""
        http, self._http = self._http, None
        if http is None:
            return
        self.fault("none")
        http.shutdown()
        http.server_close()
        for connection in http.open_connections():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # cut what keep-alive holds open, as the end of a process would

    def close(self) -> None:
        """Stop for good."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def reply(self) -> Reply:
        """What /metrics says now."""
        page = self._page() if callable(self._page) else self._page
        if isinstance(page, Reply):
            return page
        return Reply(page.encode() if isinstance(page, str) else page)

    def wait(self, seconds: float) -> bool:
        """Sleep for a handler that hangs or drips; True when it shall end."""
        return self._released.wait(seconds)

    @property
    def current_fault(self) -> Fault:
        """The fault set now."""
        return self._fault

    @property
    def current_health(self) -> tuple[int, float]:
        """(status, delay in seconds) set now."""
        return self._health


class _Handler(BaseHTTPRequestHandler):
    owner: PageServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one segment, else Nagle and delayed ACK add 40 ms
    disable_nagle_algorithm = True

    def setup(self) -> None:
        self.owner.connections += 1
        super().setup()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Quiet."""

    def do_GET(self) -> None:
        owner = self.owner
        owner.seen = [*owner.seen[-49:], (self.path, {k.lower(): v for k, v in self.headers.items()})]
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            owner.healths += 1
            status, delay_s = owner.current_health
            if delay_s and owner.wait(delay_s):
                self.close_connection = True
                return
            self._send(Reply(b"", status))
        elif path == "/metrics":
            owner.scrapes += 1
            self._metrics(owner.reply())
        elif path in owner.others:
            self._send(Reply(owner.others[path]))
        else:
            self._send(Reply(b"not found\n", 404))

    def _metrics(self, reply: Reply) -> None:
        fault = self.owner.current_fault
        if fault == "none":
            self._send(reply)
            return
        self.close_connection = True
        if fault == "hang":
            self.owner.wait(60)
        elif fault == "reset":
            reset(self.connection)
        elif fault == "truncate":
            self._send(reply, body=reply.body[: len(reply.body) // 2])
        elif fault == "drip-headers":
            self._drip(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 600)
        elif fault == "drip":
            self._send(reply, body=b"")
            self._drip(reply.body)

    def _send(self, reply: Reply, body: bytes | None = None) -> None:
        self.send_response(reply.status)
        headers = {"Content-Type": PLAIN, "Content-Length": str(len(reply.body)), **reply.headers}
        for name, value in headers.items():
            if value:  # an empty value leaves the header out
                self.send_header(name, value)
        if headers["Content-Length"] == "":
            self.close_connection = True
        self.end_headers()
        self.wfile.write(reply.body if body is None else body)
        self.wfile.flush()

    def _drip(self, data: bytes) -> None:
        """A byte each 0.2 s: more often than any deadline for one read, for ever."""
        for i in range(len(data)):
            self.wfile.write(data[i : i + 1])
            self.wfile.flush()
            if self.owner.wait(0.2):
                return


class _Replay:
    """A recording as a page that moves with the time."""

    def __init__(self, path: Path, factor: float) -> None:
        with (lzma if path.suffix == ".xz" else gzip).open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if row["target"] != "nvml"]
        self._at = [float(row["t"]) - float(rows[0]["t"]) for row in rows]
        self._bodies: list[bytes | None] = [None if row["body"] is None else row["body"].encode() for row in rows]
        self._factor = factor
        self._start: float | None = None

    def __call__(self) -> Reply:
        now = time.monotonic()
        if self._start is None:  # time runs from the first scrape
            self._start = now
        i = bisect.bisect_right(self._at, (now - self._start) * self._factor) - 1
        body = self._bodies[max(i, 0)]
        return Reply(b"no scrape was recorded here\n", 503) if body is None else Reply(body)


def main() -> None:
    """Serve a recording until interrupted; prints the address."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    with PageServer.replay(args.recording, factor=args.factor, port=args.port) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
