"""One bounded GET of one address: it ends at its deadline, whatever the other side does, and never goes elsewhere.

requests' own read timeout is one for each recv: a server that sends a byte a second is never late. Here the time that
is left goes into every recv, those of the status line and headers included.
"""

from __future__ import annotations

import errno
import functools
import http.client
import io
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin

import requests
import urllib3
from requests.adapters import HTTPAdapter

from agent.model import Why

_BUFFER_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TIMEOUTS = (TimeoutError, urllib3.exceptions.TimeoutError)  # urllib3 counts NewConnectionError among its own
_NOBODY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class Answer(NamedTuple):
    """What came back, as it was on the wire: the body may be compressed."""

    status: int
    headers: Mapping[str, str]  # looked up without regard to case
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
        self._connect_s = connect_s
        self._total_s = total_s
        self._limit_bytes = limit_bytes
        self._deadline = _Deadline()
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy or .netrc of the environment is not meant for an engine on this node
        self._session.headers.clear()
        self._session.headers.update(headers)
        adapter = _Adapter(self._deadline)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        self._request = self._session.prepare_request(requests.Request("GET", url))

    def get(self) -> Answer:
        """One answer.

        Raises:
            FetchError: there is none that can be used.
        """
        self._deadline.at = time.monotonic() + self._total_s
        try:
            answer = self._get()
        except FetchError as e:
            # A kept connection that the server has just closed (uvicorn: after 5 s) looks like a reset: ask again.
            if not (e.is_down and e.connected) or self._deadline.left_s() <= 0:
                raise
            answer = self._get()
        if answer.status in _REDIRECTS and self._follows(answer.headers.get("Location", "")):
            answer = self._get()
        return answer

    def close(self) -> None:
        """Close the kept connection."""
        self._session.close()

    def _get(self) -> Answer:
        try:
            response = self._session.send(
                self._request,
                stream=True,
                timeout=(self._connect_s, self._total_s),
                allow_redirects=False,
                proxies={},
                verify=True,
                cert=None,
            )
            with response:
                return Answer(response.status_code, response.headers, self._body(response))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as e:
            raise self._told(e) from e

    def _body(self, response: requests.Response) -> bytes:
        limit = self._limit_bytes
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > limit:
            raise FetchError(Why.TOO_LARGE, f"the answer has {length} bytes; the limit is {limit}")
        body: bytes = response.raw.read(limit + 1, decode_content=False)
        if len(body) > limit:
            raise FetchError(Why.TOO_LARGE, f"the answer has more than {limit} bytes")
        return body

    def _follows(self, location: str) -> bool:
        """Follow, and remember, only a slash more or less at the end of the same address: old vLLM wants it so."""
        here = self._request.url or ""
        there = urljoin(here, location)
        if not location or there.rstrip("/") != here.rstrip("/") or there == here:
            return False
        self._request.url = there
        return True

    def _told(self, error: Exception) -> FetchError:
        """What went wrong, by its root and in our words: a library's text may hold the address with its password."""
        chain = list(_causes(error))
        connected = not any(isinstance(e, urllib3.exceptions.ConnectTimeoutError) for e in chain)
        for e in chain:
            if isinstance(e, (http.client.IncompleteRead, urllib3.exceptions.IncompleteRead)):
                return FetchError(Why.BAD_PAGE, "incomplete read: the connection ended before the answer did")
            if isinstance(e, ConnectionRefusedError):
                return FetchError(Why.UNREACHABLE, "refused: nothing listens there", connected=False, is_down=True)
            if isinstance(e, ConnectionError):  # the built-in one: reset, aborted, broken pipe
                return FetchError(Why.UNREACHABLE, "reset: the connection was closed without an answer", is_down=True)
            if isinstance(e, socket.gaierror):
                return FetchError(Why.UNREACHABLE, f"the host name has no address ({e.strerror})", connected=False)
            if isinstance(e, _TIMEOUTS) and not isinstance(e, urllib3.exceptions.NewConnectionError):
                return self._late(connected)
            if isinstance(e, OSError) and e.errno in _NOBODY:
                return FetchError(Why.UNREACHABLE, f"no way there ({e.strerror})", connected=False, is_down=True)
        root = chain[-1]
        text = root.strerror if isinstance(root, OSError) and root.strerror else type(root).__name__
        return FetchError(Why.ERROR, f"no answer: {text}", connected=connected)

    def _late(self, connected: bool) -> FetchError:
        if not connected:
            return FetchError(Why.TIMEOUT, f"no connection within {self._connect_s:g} s", connected=False)
        return FetchError(Why.TIMEOUT, f"connected, but no whole answer within {self._total_s:g} s")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was made from, wherever requests and urllib3 put that; the outermost first."""
    todo: list[BaseException] = [error]
    seen: set[int] = set()
    while todo:
        e = todo.pop(0)
        if id(e) in seen:
            continue
        seen.add(id(e))
        yield e
        inner = (e.__cause__, e.__context__, getattr(e, "reason", None), *e.args)
        todo += [i for i in inner if isinstance(i, BaseException)]


class _Deadline:
    """When the exchange that runs must end, in monotonic seconds."""

    def __init__(self) -> None:
        self.at = 0.0

    def left_s(self) -> float:
        return self.at - time.monotonic()


class _TimedReader(io.RawIOBase):
    """A socket's bytes until a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline.left_s()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """http.client's response, with its status line and headers under the deadline, too."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: _Deadline, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline), _BUFFER_BYTES)


class _Adapter(HTTPAdapter):
    """One kept connection, whose responses end at the deadline."""

    def __init__(self, deadline: _Deadline) -> None:
        self._deadline = deadline
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        new_pool = functools.partial(_new_pool, self._deadline)
        self.poolmanager.pool_classes_by_scheme = {
            "http": functools.partial(new_pool, urllib3.HTTPConnectionPool),
            "https": functools.partial(new_pool, urllib3.HTTPSConnectionPool),
        }


def _new_pool(
    deadline: _Deadline, pool_class: Callable[..., urllib3.HTTPConnectionPool], *args: Any, **kwargs: Any
) -> urllib3.HTTPConnectionPool:
    pool = pool_class(*args, **kwargs)
    connection_class: Any = pool.ConnectionCls

    def new_connection(*args: Any, **kwargs: Any) -> Any:
        connection = connection_class(*args, **kwargs)
        connection.response_class = functools.partial(_TimedResponse, deadline=deadline)
        return connection

    pool.ConnectionCls = new_connection  # type: ignore[assignment,unused-ignore]
    return pool
