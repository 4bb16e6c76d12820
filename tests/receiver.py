"""A small real webhook receiver on loopback: records what arrives and when, and answers as it is told.

    with Receiver() as receiver:
        receiver.script(Reply(503), Reply(429, {"Retry-After": "1"}))   # then 200 for ever
        ...
        receiver.wait_for(3)
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.cut_server import reset


@dataclass(frozen=True)
class Reply:
    """An answer. `hang`: none comes until the receiver closes. `drop`: the connection is reset instead."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: bool = False
    drop: bool = False


@dataclass(frozen=True)
class Arrival:
    """One request. `at` is unix seconds, when its body had arrived."""

    at: float
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Receiver:
    """Listens on 127.0.0.1; `url` has no path. `judge` may answer by what arrived, after the script is used up."""

    def __init__(
        self, judge: Callable[[Arrival], Reply] | None = None, port: int = 0, *, echoes: bool = False
    ) -> None:
        self._judge = judge
        self._port = port
        self._echoes = echoes  # a GET is told what was posted here, as `drills[].echo` asks for it
        self._replies: deque[Reply] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self.arrivals: list[Arrival] = []

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                super().handle_one_request()
                self.close_connection = True

            def answer(self) -> None:
                receiver._answer(self)

            do_GET = do_POST = answer  # noqa: N815  (http.server's names)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def url(self) -> str:
        """http://127.0.0.1:port"""
        return f"http://127.0.0.1:{self._port}"

    def script(self, *replies: Reply) -> None:
        """Answer the next requests with these."""
        self._replies.extend(replies)

    def wait_for(self, count: int, timeout_s: float = 60.0) -> list[Arrival]:
        """What arrived, once there are `count`; AssertionError if they do not come."""
        return self.wait_until(lambda got: len(got) >= count, timeout_s, f"{count} requests")

    def wait_until(
        self, enough: Callable[[list[Arrival]], bool], timeout_s: float = 60.0, what: str = "it"
    ) -> list[Arrival]:
        """What arrived, once `enough` says so; AssertionError if it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self.arrivals), timeout_s):
                raise AssertionError(f"waited {timeout_s} s for {what}; came: {[a.body[:200] for a in self.arrivals]}")
            return list(self.arrivals)

    def alerts(self) -> list[tuple[str, str]]:
        """(status, alertname) of every alert that arrived in Alertmanager's webhook format, in order."""
        with self._changed:
            bodies = [arrival.json for arrival in self.arrivals if arrival.body]
        return [(alert["status"], alert["labels"]["alertname"]) for body in bodies for alert in body["alerts"]]

    def _echo(self) -> bytes:
        with self._changed:
            posted = [(arrival.at, arrival.json) for arrival in self.arrivals if arrival.body]
        return json.dumps([{"at": at, "alerts": told["alerts"]} for at, told in posted]).encode()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        arrival = Arrival(time.time(), handler.command, handler.path, dict(handler.headers.items()), body)
        with self._changed:
            self.arrivals.append(arrival)
            reply = self._replies.popleft() if self._replies else None
            self._changed.notify_all()
        if reply is None and self._echoes and arrival.method == "GET":
            reply = Reply(body=self._echo())
        if reply is None:
            reply = self._judge(arrival) if self._judge else Reply()
        if reply.hang:
            self._closing.wait(60)
            return
        if reply.drop:
            reset(handler.connection)
            return
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(reply.body)))
        handler.end_headers()
        handler.wfile.write(reply.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with socketserver's 5 a burst of pages waits a second for its SYN to be sent again

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of many a test; anything else is a fault of the test's own."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handle_error(request, client_address)


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0, what: str = "it") -> None:
    """Poll for a condition; AssertionError if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        time.sleep(0.01)
