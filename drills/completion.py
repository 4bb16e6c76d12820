"""One attempt at one completion of the OpenAI API, timed as its user sees it, whatever the other side does.

The standard library's http.client reads the answer; the connection under it is ours, for three reasons. The time that
is left of the deadline goes into every single read, so that a server that sends a byte a second is late all the same.
An error arrives as what it is (refused, reset, cut off), not wrapped four times. And a kept connection that broke while
a request was under way is told as broken, never silently tried again: that would hide what a drill looks for.

Proxies in the environment are not used: the drill is about the address that it was given.

Definitions. The first token is the first chunk with text in it, said or thought, or a tool call; a chunk with only a
role, only a usage or nothing is no token; an answer that ends in good order without any text has its first token at its
finish reason. A chunk may hold several tokens, and counts once.
"""

from __future__ import annotations

import errno
import http.client
import io
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from drills.model import Load, Outcome, Refused

IDLE_S = 4.0  # of a kept connection: uvicorn and Node close theirs after 5 s, and a race with that reads as a reset
DRAIN_S = 1.0  # for the end of an answer after its last word, so that its connection can be kept
RENEW_S = 0.25  # how much too late a deadline may be noticed
MAX_BYTES = 4 << 20  # of an answer that is no stream, and of one event
PIECE_BYTES = 64 * 1024
FAILED_REASONS = frozenset({"error", "abort"})  # an engine's way to say in a 200 that it failed
OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
CHAT = "/chat/completions"
COMPLETIONS = "/completions"


class OwnFault(Exception):  # noqa: N818  (it says whose fault it is)
    """This side ran out of something: nothing is learnt about the other."""


@dataclass(slots=True)
class Attempt:
    """What one attempt came to. Times are monotonic seconds."""

    outcome: Outcome = "ok"
    first: float | None = None  # its first token; without a stream the whole answer
    ended: float = 0.0
    last: float = 0.0  # its latest chunk
    status: int | None = None
    chunks: int = 0
    gaps_s: list[float] = field(default_factory=list)
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    finish_reason: str | None = None
    retry_after: str | None = None
    error: str | None = None

    def take(self, now: float) -> None:
        """A chunk with something in it has come."""
        if self.first is None:
            self.first = now
        else:
            self.gaps_s.append(now - self.last)
        self.last = now
        self.chunks += 1


class _Part(msgspec.Struct):
    """A piece of a chat answer. The names for thoughts differ between servers."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        """Whether there is anything in it."""
        part = self.delta or self.message
        return bool(self.text) or (
            part is not None and bool(part.content or part.reasoning_content or part.reasoning or part.tool_calls)
        )


class _Answer(msgspec.Struct):
    """A whole answer, or a chunk of one."""

    choices: list[_Choice] = []
    model: str | None = None
    object: str | None = None
    error: Any = None
    message: Any = None

    @property
    def fault(self) -> str | None:
        """What an error inside a good status says; None where it is none."""
        if self.error is None and self.object != "error":
            return None
        error = self.error if self.error is not None else self.message
        return str(error.get("message", error) if isinstance(error, dict) else error)


class _Bad(Exception):  # noqa: N818
    """The other side answered, and the answer cannot be used."""

    def __init__(self, words: str, outcome: Outcome | None = None) -> None:
        super().__init__(words)
        self.outcome = outcome  # None: broken after the first token, else bad_answer


class Place(NamedTuple):
    """An address, taken apart."""

    host: str
    port: int
    is_tls: bool
    netloc: str  # as the Host header says it
    path: str  # of completions
    models_path: str

    @property
    def is_chat(self) -> bool:
        """Whether its users speak the chat form."""
        return self.path.endswith(CHAT)


def place_of(url: str) -> Place:
    """The address of completions behind `url`: as written where it ends in /completions or /chat/completions, else
    `url`/completions, which serves models with and without a chat template.

    Raises:
        Refused: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused("load.url: it must begin with http:// or https:// and name a host")
    if "@" in parts.netloc:
        raise Refused("load.url: it holds a user or a password, which would end in reports; use load.api_key_file")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise Refused("load.url: write it in ASCII, without blanks (xn--… and %20)")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    base = path.removesuffix(COMPLETIONS).removesuffix("/chat")
    return Place(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.netloc,
                 path if path.endswith(COMPLETIONS) else path + COMPLETIONS, f"{base}/models")  # fmt: skip


class Client:
    """Asks one address for completions; for many threads. `api_key` is sent, and appears nowhere else.

    Args:
        load: `model` may be None until `ask_model`.
        api_key: for the Authorization header.
        keep_headers: names of answer headers that are remembered with each attempt.
    """

    def __init__(self, load: Load, api_key: str | None = None, keep_headers: Sequence[str] = ()) -> None:
        self.place = place_of(load.url)
        self.model = load.model
        self._load = load
        self._api_key = api_key
        self._keep_headers = keep_headers
        self._kept: deque[tuple[socket.socket, float]] = deque()  # idle connections, the longest idle one first
        self._tls = ssl.create_default_context() if self.place.is_tls else None
        self._decode = msgspec.json.Decoder(_Answer).decode

    def attempt(self, key: str, number: int, prompt: str, deadline: float) -> Attempt:
        """Ask once. `key` names the logical request, `number` counts its attempts from 1; `deadline` is monotonic.

        Raises:
            OwnFault: this side could not even ask.
        """
        got = Attempt()
        sock: socket.socket | None = None
        try:
            sock = self._take() or self._connect(deadline)
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.sendall(self._wire(key, number, prompt))
            timed = _Timed(sock, deadline)
            with timed.response() as answer:
                answer.begin()
                try:
                    self._read(answer, got)
                except _Bad as e:
                    got.outcome, got.error = self._told(e, got, is_connected=True)
                got.ended = time.monotonic()
                if self._load.connections == "kept" and timed.drain(answer):
                    self._kept.append((sock, time.monotonic()))
                    sock = None
        except (http.client.HTTPException, OSError) as e:
            got.ended = time.monotonic()
            got.outcome, got.error = self._told(e, got, is_connected=sock is not None)
        finally:
            if sock is not None:
                sock.close()
        return got

    def ask_model(self, deadline: float) -> str:
        """The first model that the address lists.

        Raises:
            Refused: it lists none, with why.
        """
        where = f"{self._load.url}: /models"
        try:
            with self._connect(deadline) as sock:
                sock.sendall(self._head("GET", self.place.models_path, "close").encode("latin-1") + b"\r\n")
                with _Timed(sock, deadline).response() as answer:
                    answer.begin()
                    body = _body(answer)
            if answer.status != 200:
                raise Refused(f"{where}: HTTP {answer.status}; name the model in load.model")
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (http.client.HTTPException, OSError, _Bad, OwnFault) as e:
            words = self._told(e, Attempt(), is_connected=True)[1] if not isinstance(e, OwnFault) else str(e)
            raise Refused(f"{where}: {words}; is the address right, and does it serve?") from e
        except (msgspec.DecodeError, LookupError, TypeError) as e:
            raise Refused(f"{where}: it lists no model; name it in load.model") from e

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close the kept connections that were not used for so long."""
        while self._kept:
            try:
                sock, since = self._kept.popleft()
            except IndexError:  # a thread was faster
                return
            if time.monotonic() - since < idle_s:
                self._kept.appendleft((sock, since))
                return
            sock.close()

    def _take(self) -> socket.socket | None:
        """The connection that was used last and is still good: so few of them idle for long."""
        while self._kept:
            try:
                sock, since = self._kept.pop()
            except IndexError:
                return None
            if time.monotonic() - since < IDLE_S and not _is_readable(sock):
                return sock
            sock.close()  # the server has closed it, or speaks unasked
        return None

    def _connect(self, deadline: float) -> socket.socket:
        """A connection to the first address that takes one. All of them share the deadline."""
        error = OSError("the host name has no address")
        for family, kind, proto, _, address in _addresses(self.place):
            try:
                sock = socket.socket(family, kind, proto)
            except OSError as e:
                error = e
                continue
            try:
                sock.settimeout(max(deadline - time.monotonic(), 1e-3))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._tls.wrap_socket(sock, server_hostname=self.place.host) if self._tls else sock
            except OSError as e:
                sock.close()
                error = e
        if error.errno in OWN_ERRNOS:
            raise OwnFault(f"no socket: {error.strerror}") from error
        raise error

    def _head(self, method: str, path: str, connection: str) -> str:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.place.netloc}", "User-Agent: tocsin-drill",
                 "Accept-Encoding: identity", f"Connection: {connection}"]  # fmt: skip
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return "\r\n".join(lines) + "\r\n"

    def _wire(self, key: str, number: int, prompt: str) -> bytes:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": self._load.max_tokens,
                                 "stream": self._load.streaming}  # fmt: skip
        if self.place.is_chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        body = msgspec.json.encode(asked)
        head = self._head("POST", self.place.path, "keep-alive" if self._load.connections == "kept" else "close")
        # Every attempt has the same Idempotency-Key, which is the logical request. X-Request-Id differs: vLLM takes it
        # for its own id and answers 400 to one that is still running there, which a second attempt often finds.
        request_id = key if number == 1 else f"{key}-{number}"
        head += (
            f"X-Request-Id: {request_id}\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\n"
            f"Accept: {'text/event-stream' if self._load.streaming else 'application/json'}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    def _read(self, answer: http.client.HTTPResponse, got: Attempt) -> None:
        """Fill `got` from an answer. Raises _Bad, HTTPException, OSError."""
        got.status = answer.status
        headers: Message = answer.headers
        got.headers = {name: str(headers[name]) for name in self._keep_headers if name in headers}
        got.retry_after = headers.get("Retry-After")
        if answer.status != 200:
            raise _Bad(self._words(answer), _outcome_of(answer.status))
        kind = headers.get_content_type()
        if not self._load.streaming:
            self._read_whole(answer, got)
        elif kind == "text/event-stream":
            self._read_stream(answer, got)
        else:
            raise _Bad(f"asked for a stream, got {kind[:60]}")
        if got.finish_reason in FAILED_REASONS:
            raise _Bad(f"finish_reason {got.finish_reason!r}")

    def _read_whole(self, answer: http.client.HTTPResponse, got: Attempt) -> None:
        chunk = self._chunk(_body(answer))
        now = time.monotonic()
        got.model = chunk.model
        reasons = [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        if not reasons:
            raise _Bad("no finish_reason in the answer")
        got.finish_reason = reasons[0]
        got.take(now)

    def _read_stream(self, answer: http.client.HTTPResponse, got: Attempt) -> None:
        is_done = False
        for kind, data in _events(answer):
            now = time.monotonic()
            if data.strip() == b"[DONE]":
                is_done = True
                break
            if kind == b"error":
                raise _Bad("an error inside the stream")
            chunk = self._chunk(data)
            got.model = got.model or chunk.model
            reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), None)
            if any(choice.says for choice in chunk.choices) or (reason and got.first is None):
                got.take(now)
            got.finish_reason = got.finish_reason or reason
        if got.finish_reason is None:
            if is_done:
                raise _Bad("the stream ended without a finish_reason", "bad_answer")
            raise _Bad("the stream ended before its answer did")

    def _chunk(self, data: bytes) -> _Answer:
        try:
            chunk = self._decode(data)
        except msgspec.DecodeError as e:  # ValidationError is one
            raise _Bad("what came is no JSON of this API", "bad_answer") from e
        if chunk.fault is not None:
            raise _Bad("an error inside a 200")
        return chunk

    def _words(self, answer: http.client.HTTPResponse) -> str:
        """`HTTP 404`, and for a fault of our own asking what the server says about it."""
        words = f"HTTP {answer.status}"
        try:
            body = _body(answer)
            if answer.status not in (400, 404, 405, 413, 422):  # what the others say may hold the key, or is no help
                return words
            said = self._decode(body).fault or ""
        except (msgspec.DecodeError, http.client.HTTPException, OSError, _Bad):
            return words
        said = " ".join(said.split())
        if self._api_key:
            said = said.replace(self._api_key, "***")
        return f"{words}: {said[:120]}" if said else words

    def _told(self, error: Exception, got: Attempt, *, is_connected: bool) -> tuple[Outcome, str]:
        """The class of a failure, and its words: an error's own text may hold more than a report shall."""
        cut: Outcome = "reset" if got.first is None else "broken"
        if isinstance(error, _Bad):
            return error.outcome or ("bad_answer" if got.first is None else "broken"), str(error)
        if isinstance(error, TimeoutError):
            where = "no connection" if not is_connected else "no answer" if got.first is None else "no end"
            return "timeout", f"{where} within the deadline of {self._load.deadline_s:g} s"
        if isinstance(error, ssl.SSLError) and not is_connected:
            return "refused", f"no TLS: {getattr(error, 'verify_message', '') or error.reason or 'it ended'}"
        if not is_connected:
            return "refused", f"no connection: {_why(error)}"
        if isinstance(error, http.client.HTTPException) and not isinstance(error, _CUT):
            return "bad_answer", f"no HTTP: {type(error).__name__}"
        return cut, "cut off before the first token" if got.first is None else f"cut off after {got.chunks} chunks"


_CUT = (http.client.IncompleteRead, http.client.RemoteDisconnected)


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return str(getattr(error, "strerror", None) or type(error).__name__)


def _outcome_of(status: int) -> Outcome:
    if status == 429:
        return "http_429"
    if status >= 500:
        return "http_5xx"
    return "http_4xx" if status >= 400 else "bad_answer"  # a redirect: users are not told to follow one with a POST


def _addresses(place: Place) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[bytes, bytes]]:
    """(event name, data) of each event, as it arrives; one that the end of the stream cuts short comes too."""
    rest, kind, data = b"", b"", list[bytes]()
    while piece := answer.read1(PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_BYTES:
            raise _Bad(f"an event of over {MAX_BYTES} bytes", "bad_answer")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name == b"event":
                kind = value.strip()
            elif name == b"error":  # llama.cpp
                yield b"error", value
            elif not name and not value and data:
                yield kind, b"\n".join(data)
                kind, data = b"", []
    if data:
        yield kind, b"\n".join(data)


def _body(answer: http.client.HTTPResponse) -> bytes:
    """A whole body. Raises _Bad, HTTPException, OSError."""
    body = answer.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise _Bad(f"an answer of over {MAX_BYTES} bytes", "bad_answer")
    if answer.length:  # read() with a size does not mind a connection that ends early
        raise http.client.IncompleteRead(body, answer.length)
    return body


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class _Timed(io.RawIOBase):
    """A socket's bytes until a deadline (monotonic seconds). Closing it leaves the socket open."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._renew_at = 0.0

    def response(self) -> http.client.HTTPResponse:
        """The answer that is to be read from it."""
        return http.client.HTTPResponse(cast("socket.socket", self), method="POST")

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002
        """All that http.client asks of a socket."""
        return io.BufferedReader(self, PIECE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError
        if now >= self._renew_at:  # not each time: it is a system call, and a hundred threads wait for one lock
            self._sock.settimeout(self._deadline - now)
            self._renew_at = now + RENEW_S
        return self._sock.recv_into(buffer)

    def drain(self, answer: http.client.HTTPResponse) -> bool:
        """Read on to the end of the answer, which is near; whether its connection is good for another."""
        if answer.will_close:
            return False
        self._deadline, self._renew_at = min(self._deadline, time.monotonic() + DRAIN_S), 0.0
        try:
            for _ in range(2):
                if not answer.isclosed():
                    answer.read1(PIECE_BYTES)
        except (OSError, http.client.HTTPException):
            return False
        return answer.isclosed()
