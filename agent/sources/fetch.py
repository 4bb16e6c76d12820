"""One bounded GET of one address: it ends at its deadline, whatever the other side does, and never goes elsewhere.

requests prepares what is asked; the connection is ours, for two reasons. requests' read timeout is one for each recv,
so a server that sends a byte a second is never late: here the time that is left goes into every recv, those of the
headers included. And its way through urllib3 costs 1.1 ms of CPU between two polls, where caches are cold: more than
all else that is done with a page. What a page nearly always is, a 200 that tells its length, is taken apart here; every
other answer is read by http.client, from its first byte on.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import ipaddress
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests

from agent.model import Why

_BUFFER_BYTES = 64 * 1024
_LARGEST_HEAD_BYTES = 16 * 1024  # of an answer that is taken apart here
_LENGTH = re.compile(r"[0-9]{1,18}")
_PLAIN_HEAD = re.compile(rb"HTTP/1\.1 200(?: [^\r\n]*+)?((?:\r\n[!#-'*+.^-z|~A-Z0-9-]++:[^\r\n]*+){1,100})\r\n\r\n")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NOBODY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class Answer(NamedTuple):
    """What came back, as it was on the wire: the body may be compressed."""

    status: int
    headers: Mapping[str, str]  # names in lower case; of a name that came twice the first
    body: bytes


class FetchError(Exception):
    """No answer to use. `connected`: TCP went through. `is_down`: refused or reset, so nobody serves there."""

    def __init__(self, code: Why, message: str, *, connected: bool = True, is_down: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.connected = connected
        self.is_down = is_down


class Fetcher:
    """GETs one URL again and again over one kept connection. For one thread.

    Args:
        url: the whole address.
        headers: to send.
        connect_s: for each address that the host name has.
        total_s: from the start to the last byte.
        limit_bytes: of the body on the wire.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, connect_s: float, total_s: float, limit_bytes: int
    ) -> None:
        self._request = requests.Request("GET", url, headers).prepare()
        self._wire = _wire(self._request)
        self._connect_s = connect_s
        self._total_s = total_s
        self._limit_bytes = limit_bytes
        self._sock: socket.socket | None = None

    def get(self) -> Answer:
        """One answer.

        Raises:
            FetchError: there is none that can be used.
        """
        deadline = time.monotonic() + self._total_s
        answer = self._get(deadline)
        if answer.status in _REDIRECTS and self._follows(answer.headers.get("location", "")):
            answer = self._get(deadline)
        return answer

    def close(self) -> None:
        """Close the kept connection."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _follows(self, location: str) -> bool:
        """Follow, and remember, only a slash more or less at the end of the same address: old vLLM wants it so."""
        here = self._request.url or ""
        try:
            there = urljoin(here, location)
        except ValueError:  # half an IPv6 address
            return False
        if not location or there.rstrip("/") != here.rstrip("/") or there == here:
            return False
        self._request.url = there
        self._wire = _wire(self._request)
        return True

    def _get(self, deadline: float) -> Answer:
        """One exchange. A kept connection that the server has closed meanwhile (uvicorn: after 5 s) is made anew."""
        is_kept = self._sock is not None
        try:
            try:
                return self._exchange(deadline)
            except ConnectionError:
                if not is_kept:
                    raise
                self.close()
                return self._exchange(deadline)
        except (http.client.HTTPException, OSError) as e:
            is_connected = self._sock is not None
            self.close()
            raise self._told(e, is_connected) from e
        except FetchError:
            self.close()  # the rest of the answer is still to come
            raise

    def _exchange(self, deadline: float) -> Answer:
        if self._sock is not None and _is_readable(self._sock):  # closed by the server, or what it says is no answer
            self.close()
        sock = self._sock
        if sock is None:
            sock = self._sock = self._connect()
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        sock.sendall(self._wire)
        received = _receive(sock, deadline)
        while received and b"\r\n\r\n" not in received and len(received) < _LARGEST_HEAD_BYTES:
            more = _receive(sock, deadline)
            if not more:
                break
            received += more
        return self._plain(sock, deadline, received) or self._any(sock, deadline, received)

    def _plain(self, sock: socket.socket, deadline: float, received: bytes) -> Answer | None:
        """The rest of a 200 that tells its length; None if this is another answer."""
        head = _PLAIN_HEAD.match(received)
        headers = {} if head is None else _headers(head[1])
        length = headers.get("content-length", "")
        if head is None or "transfer-encoding" in headers or not _LENGTH.fullmatch(length):
            return None
        length_bytes = int(length)
        self._check_size(length_bytes)
        parts = [received[head.end():]]
        missing_bytes = length_bytes - len(parts[0])
        while missing_bytes > 0:
            parts.append(_receive(sock, deadline, missing_bytes))
            missing_bytes -= len(parts[-1])
            if not parts[-1]:
                break  # the caller sees that it is too short
        if missing_bytes or "close" in headers.get("connection", "").lower():
            self.close()
        return Answer(200, headers, b"".join(parts)[:length_bytes])

    def _any(self, sock: socket.socket, deadline: float, received: bytes) -> Answer:
        with _TimedResponse(sock, deadline, received) as answer:
            answer.begin()
            body = self._body(answer)
            if answer.will_close:
                self.close()
            headers = {name.lower(): value for name, value in reversed(answer.headers.items())}
            if answer.chunked:  # the chunks tell the end, whatever length a proxy left there (RFC 9112, 6.3)
                headers.pop("content-length", None)
            return Answer(answer.status, headers, body)

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._request.url or "")
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        sock = socket.create_connection((host, parts.port or (443 if is_tls else 80)), self._connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return ssl.create_default_context().wrap_socket(sock, server_hostname=host) if is_tls else sock
        except OSError:
            sock.close()
            raise

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        limit = self._limit_bytes
        self._check_size(answer.length or 0)
        body = answer.read(limit + 1)
        if len(body) > limit:
            raise FetchError(Why.TOO_LARGE, f"the answer has more than {limit} bytes")
        return body

    def _check_size(self, length_bytes: int) -> None:
        limit = self._limit_bytes
        if length_bytes > limit:
            raise FetchError(Why.TOO_LARGE, f"the answer has {length_bytes} bytes; the limit is {limit}")

    def _told(self, error: Exception, is_connected: bool) -> FetchError:
        """What went wrong in our words: an error's own text may hold the address with its password."""
        if isinstance(error, TimeoutError):
            if not is_connected:
                return FetchError(Why.TIMEOUT, f"no connection within {self._connect_s:g} s", connected=False)
            return FetchError(Why.TIMEOUT, f"connected, but no whole answer within {self._total_s:g} s")
        if isinstance(error, http.client.IncompleteRead):
            return FetchError(Why.BAD_PAGE, "incomplete read: the connection ended before the answer did")
        if isinstance(error, ConnectionRefusedError):
            return FetchError(Why.UNREACHABLE, "refused: nothing listens there", connected=False, is_down=True)
        if isinstance(error, ConnectionError):
            return FetchError(Why.UNREACHABLE, "reset: the connection was closed without an answer", is_down=True)
        if isinstance(error, socket.gaierror):
            return FetchError(Why.UNREACHABLE, f"the host name has no address ({error.strerror})", connected=False)
        if isinstance(error, ssl.SSLError):
            advice = "trust its certificate by SSL_CERT_FILE, or give its http:// address"
            return FetchError(Why.ERROR, f"no TLS: {getattr(error, 'verify_message', error.reason)}: {advice}")
        if isinstance(error, OSError) and error.errno in _NOBODY:
            return FetchError(Why.UNREACHABLE, f"no way there ({error.strerror})", connected=False, is_down=True)
        text = getattr(error, "strerror", None) or type(error).__name__
        return FetchError(Why.ERROR, f"no HTTP answer: {text}", connected=is_connected)


def _wire(request: requests.PreparedRequest) -> bytes:
    """The request as it goes out, the same each time."""
    host = urlsplit(request.url or "").netloc.rpartition("@")[2]
    lines = [f"GET {request.path_url} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _receive(sock: socket.socket, deadline: float, most_bytes: int = _BUFFER_BYTES) -> bytes:
    """What has come, at least a byte of it; b"" at the end of the connection."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
    return sock.recv(min(most_bytes, _BUFFER_BYTES))


def _headers(lines: bytes) -> dict[str, str]:
    """The header lines of an answer, each of them preceded by its line end."""
    headers: dict[str, str] = {}
    for line in lines.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), value.lstrip(" \t"))
    return headers


class _TimedReader(io.RawIOBase):
    """A connection's bytes until a deadline (monotonic), those first that are already here."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float, received: bytes) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline
        self._received = received

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._received:
            first, self._received = self._received[: len(buffer)], self._received[len(buffer) :]
            buffer[: len(first)] = first
            return len(first)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """The standard library's parser of an answer, with every byte of it under the deadline."""

    def __init__(self, sock: socket.socket, deadline: float, received: bytes) -> None:
        super().__init__(sock, method="GET")
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline, received), _BUFFER_BYTES)


def shown_address(url: str) -> str:
    """An address to show: without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:  # what a server sends us to may be anything
        return "an address that is not valid"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_local(host: str) -> bool:
    """Whether a host is this machine: an address of ours, or our name, as far as that tells without asking DNS."""
    if host == "localhost" or host.partition(".")[0] == os.uname().nodename.partition(".")[0]:
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return False
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as ours:
        ours.bind((host, 0))  # only an address of this machine can be bound to
        return True
    return False
