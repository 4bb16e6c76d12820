"""A small real server of the OpenAI API on loopback: streams at a given pace, and misbehaves on request.

    with OpenAiServer(Behaviour(chunks=20, pace_s=0.01)) as server:
        server.set(Behaviour(status=503))                          # from now on
        server.script(Behaviour(status=429, retry_after="1"))      # the next one only; then as set
        server.stop(); server.start()                              # refuses, then listens on the same port again
        server.log                                                 # every request: its id, key, attempt, connection

By hand: `python -m tests.drills.openai_server --port 8000 --chunks 32 --pace 0.02`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, Self

from tests.cut_server import CutServer, reset

# hang: never an answer. reset, close: the connection ends instead of one. drip: a byte of the headers each 0.1 s.
# The others come after `after` chunks. break: RST. cut: FIN within the chunk framing. stall: nothing more comes.
# json: a chunk that is none. error: an error event, then [DONE]. truncate (no stream): half of the body, then FIN.
Fault = Literal["none", "hang", "reset", "close", "drip", "break", "cut", "stall", "json", "error", "truncate"]


@dataclass(frozen=True)
class Behaviour:
    """How a request for a completion is answered."""

    chunks: int = 5
    pace_s: float = 0.0  # between chunks
    first_s: float = 0.0  # until the first, after the headers
    fault: Fault = "none"
    after: int = 2  # chunks before the fault
    status: int = 200
    retry_after: str | None = None
    says: str = "no"  # the message of an error
    finish_reason: str | None = "length"
    is_done: bool = True  # [DONE] at the end
    model: str | None = None  # as the answer says; None: the one that was asked for
    headers: Mapping[str, str] = field(default_factory=dict)
    is_stream: bool = True  # False: a stream that was asked for comes as one JSON
    raw: bytes | None = None  # the body of a stream, byte for byte; it ends with the connection


@dataclass(frozen=True)
class Seen:
    """One request for a completion as it arrived."""

    at: float  # monotonic
    path: str
    request_id: str  # X-Request-Id
    key: str  # Idempotency-Key
    attempt: int  # how many with this key have come, with this one
    connection: int  # counts connections from 1
    headers: Mapping[str, str]  # names in lower case
    asked: Mapping[str, Any]


class OpenAiServer:
    """Serves /v1/models, /v1/completions and /v1/chat/completions; `url` ends in /v1."""

    def __init__(self, behaviour: Behaviour | None = None, *, models: tuple[str, ...] = ("tiny",), port: int = 0,
                 host: str = "127.0.0.1") -> None:  # fmt: skip
        self._behaviour = behaviour or Behaviour()
        self._script: deque[Behaviour] = deque()
        self._address = (host, port)
        self._changed = threading.Condition()
        self._attempts: Counter[str] = Counter()
        self._connections = itertools.count(1)
        self._http: CutServer | None = None
        self.released = threading.Event()  # lets those that hang end
        self.models = models
        self.log: list[Seen] = []
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port, the same after stop and start."""
        return self._address[1]

    @property
    def url(self) -> str:
        """The address as a user has it."""
        return f"http://{self._address[0]}:{self._address[1]}/v1"

    @property
    def connections(self) -> int:
        """How many connections have been seen with a request."""
        return len({seen.connection for seen in self.log})

    def set(self, behaviour: Behaviour) -> None:
        """Answer like this from now on."""
        self._behaviour = behaviour

    def script(self, *behaviours: Behaviour) -> None:
        """Answer the next requests like these."""
        self._script.extend(behaviours)

    def start(self) -> None:
        """Listen (again, on the same port)."""
        self.released = threading.Event()
        self._http = CutServer(self._address, type("Handler", (_Handler,), {"owner": self}))
        self._address = (self._address[0], self._http.server_address[1])
        threading.Thread(target=self._http.serve_forever, args=(0.02,), name="openai-server", daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and reset those that are open, as the end of a process does."""
        server, self._http = self._http, None
        if server is None:
            return
        self.released.set()
        server.shutdown()
        server.server_close()
        for connection in server.open_connections():
            reset(connection)

    def wait_until(self, enough: Callable[[list[Seen]], bool], timeout_s: float = 60.0) -> list[Seen]:
        """What arrived, once `enough` says so; AssertionError if it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self.log), timeout_s):
                raise AssertionError(f"waited {timeout_s} s; {len(self.log)} requests came")
            return list(self.log)

    def next_connection(self) -> int:
        """A number for a new connection."""
        return next(self._connections)

    def take(self, path: str, headers: Mapping[str, str], asked: Mapping[str, Any], connection: int) -> Behaviour:
        """Note a request; how to answer it."""
        request_id, key = headers.get("x-request-id", ""), headers.get("idempotency-key", "")
        with self._changed:
            self._attempts[key] += 1
            self.log.append(
                Seen(time.monotonic(), path, request_id, key, self._attempts[key], connection, headers, asked)
            )
            self._changed.notify_all()
            return self._script.popleft() if self._script else self._behaviour


class _Gone(Exception):  # noqa: N818
    """The connection is to end here."""


class _Handler(BaseHTTPRequestHandler):
    owner: OpenAiServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and the first chunk in one segment; each chunk is flushed
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._connection_number = self.owner.next_connection()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Quiet."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._json(404, {"error": {"message": f"nothing at {self.path}"}})
            return
        self._json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.owner.models]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._json(404, {"error": {"message": f"nothing at {self.path}"}})
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        behaviour = self.owner.take(self.path, headers, asked, self._connection_number)
        try:
            self._complete(behaviour, asked)
        except _Gone:
            self.close_connection = True

    def _complete(self, how: Behaviour, asked: Mapping[str, Any]) -> None:
        if how.fault in ("hang", "reset", "close", "drip"):
            self._no_answer(how.fault)
        if how.status != 200:
            extra = {"Retry-After": how.retry_after} if how.retry_after else {}
            self._json(how.status, {"error": {"message": how.says, "type": "Error", "code": how.status}}, extra)
        elif how.raw is not None:
            self._raw(how.raw)
        elif asked["stream"] and how.is_stream:
            self._stream(how, asked)
        else:
            self._whole(how, asked)

    def _no_answer(self, fault: Fault) -> None:
        if fault == "hang":
            self.owner.released.wait(60)
        elif fault == "drip":
            for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 600:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.owner.released.wait(0.1):
                    break
        elif fault == "reset":
            reset(self.connection)
        raise _Gone

    def _json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)),
                            **(headers or {})}.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _whole(self, how: Behaviour, asked: Mapping[str, Any]) -> None:
        self.owner.released.wait(how.first_s + how.chunks * how.pace_s)
        if how.fault == "error":
            self._json(200, {"error": {"message": how.says}})
            return
        text = " ".join(str(n) for n in range(how.chunks))
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        body = self._envelope(how, asked, [{"index": 0, **said, "finish_reason": how.finish_reason}])
        if how.fault == "truncate":
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            raise _Gone
        self._json(200, body, how.headers)

    @property
    def _is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def _envelope(self, how: Behaviour, asked: Mapping[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": how.model or asked["model"],
                "choices": choices}  # fmt: skip

    def _raw(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        raise _Gone

    def _stream(self, how: Behaviour, asked: Mapping[str, Any]) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked",
                            **how.headers}.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        start = time.monotonic()
        if self._is_chat:  # its role comes first, and is no token
            self._event(self._envelope(how, asked, [_choice({"delta": {"role": "assistant", "content": ""}})]))
        else:
            self.wfile.flush()
        for number, data in enumerate(self._chunks(how, asked)):
            if how.fault != "none" and number == how.after:
                self._misbehave(how)
            wait_s = start + how.first_s + number * how.pace_s - time.monotonic()
            if wait_s > 0 and self.owner.released.wait(wait_s):
                raise _Gone
            self._event(data)
        if how.is_done:
            self._event(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunks(self, how: Behaviour, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for n in range(how.chunks):
            is_last = n == how.chunks - 1
            said = {"delta": {"content": f" {n}"}} if self._is_chat else {"text": f" {n}"}
            yield self._envelope(how, asked, [_choice(said, how.finish_reason if is_last else None)])

    def _event(self, data: Mapping[str, Any] | bytes) -> None:
        body = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.wfile.flush()

    def _misbehave(self, how: Behaviour) -> None:
        if how.fault == "break":
            reset(self.connection)
        elif how.fault == "stall":
            self.owner.released.wait(60)
        elif how.fault == "json":
            self._event(b'{"choices": [')
        elif how.fault == "error":
            self._event({"error": {"message": how.says, "code": 500}})
            self._event(b"[DONE]")
            self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()
        raise _Gone


def _choice(said: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A small server of the OpenAI API, for tests.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds between chunks")
    parser.add_argument("--first", type=float, default=0.0, help="seconds until the first chunk")
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    behaviour = Behaviour(chunks=args.chunks, pace_s=args.pace, first_s=args.first)
    with OpenAiServer(behaviour, models=(args.model,), port=args.port, host=args.host) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
