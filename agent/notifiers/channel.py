"""What every channel shares: what it is, how it speaks HTTP, what an answer means, and what may be told of an address.

The address of a webhook is often its credential. So an error of ours is built from the host and from words of our own,
never from the text of an exception (requests puts the whole URL there), and carries no exception inside it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import requests
import requests.auth
import urllib3

from agent.model import AlertMessage, Notice, Rejected, Severity, TryLater
from agent.proxy import proxies_for
from agent.retry_after import retry_after_s

CONNECT_S = 3.05
ANSWER_S = 10.0
BODY_LIMIT = 4096  # bytes of an answer that anyone would read


class BadMessage(Rejected):
    """Refused for what is in it: another message may pass."""


def _never_quiet(severity: Severity, now: float) -> float | None:  # noqa: ARG001
    return None


@dataclass(frozen=True, slots=True)
class Hours:
    """When a channel is told. `quiet_until`: until when what has a severity waits, None where it does not.

    What `firing` gives, everything that fires now and that it is told, is told again every `repeat_s`.
    """

    quiet_until: Callable[[Severity, float], float | None] = _never_quiet
    repeat_s: float | None = None
    firing: Callable[[], Iterable[AlertMessage]] = tuple


class Channel:
    """A way out. A channel writes `send`, `pulse` or both; one thread calls them, one call at a time.

    `batch` is how many notices one `send` takes; `min_visible_s` is how long a firing must have been accepted before
    its resolve is sent. One that is told `by_incident` gets one page for all that belongs together, and more of it only
    where it can change what it showed (`updates`).
    """

    name: str
    by_incident: bool = False
    updates: bool = False
    batch: int = 1
    min_visible_s: float = 0.0
    hours: Hours = Hours()

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """Deliver `notices`, oldest first; returns those that were refused, by id. The others are delivered.

        Raises TryLater or Rejected when that is true of all of them.
        """
        raise NotImplementedError

    def pulse(self, now: float, held: Sequence[AlertMessage]) -> float:  # noqa: ARG002
        """Do what is due without a notice (a resend, a heartbeat); returns when to be called next.

        `held` are the resolves still owed and never tried. Raises as `send`; then it is called again after
        a pause.
        """
        return math.inf

    def address(self) -> str:
        """Where it sends to, secrets included; what was refused is sent again when this has changed.

        Raises TryLater while it cannot be read.
        """
        return ""

    def close(self) -> None:
        """Let go of the sockets."""


def post_json(url: str, payload: Any, now: float, *, tell_body: bool = False) -> None:
    """POST `payload` as JSON. Raises Rejected or TryLater.

    With `tell_body` the receiver's own words are added to a refusal, if they hold nothing of the URL's secret parts.
    """
    request("POST", url, now, msgspec.json.encode(payload), tell_body=tell_body)


def request(method: str, url: str, now: float, body: bytes | None = None, *, tell_body: bool = False,
            secrets: Sequence[str] = (), bearer: str | None = None,
            judge: Callable[[bytes], None] | None = None) -> None:
    """One request, without redirects. The answer's status decides; its body is read for `tell_body` and `judge` alone.

    `secrets` are cut out of what is told; `judge` is handed the body of a 2xx, and raises what that says. Raises
    Rejected or TryLater. A connection is used once: one that idles until the next page may be dead by then.
    """
    headers = {"User-Agent": "tocsin", "Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    failure: Rejected | TryLater | None = None
    options: dict[str, Any] = {"timeout": (CONNECT_S, ANSWER_S), "allow_redirects": False, "stream": True,
                               "proxies": proxies_for(url)}
    try:
        with _session(url) as session, session.request(method, url, data=body, headers=headers, **options) as response:
            try:
                status_outcome(response.status_code, response.headers, now, safe_url(url))
                if judge is not None:
                    judge(response.raw.read(BODY_LIMIT, decode_content=True))
            except Rejected as error:
                told = _body_text(url, response, secrets) if tell_body else ""
                failure = type(error)(str(error) + told) if told else error
    except TryLater as error:
        failure = error
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        failure = TryLater(f"{safe_url(url)}: {cause_of(error)}")
    if failure is not None:
        raise failure  # out here, so that it carries no __context__: that one has the URL in its text


def no_web_page(answer: bytes) -> None:
    """Raises TryLater where a 2xx holds a web page: a proxy's or a login's in between, not the receiver's answer."""
    if answer.lstrip().startswith(b"<"):
        raise TryLater("it answers with a web page, as a proxy or a login in between does: nothing was delivered")


def _session(url: str) -> requests.Session:
    """Credentials only as `url` carries them; proxies (but to loopback) and CAs from the environment, as ever."""
    # urllib3 warns with the full URL ("Failed to parse headers", "Retrying"); its debug lines have it too.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    session = requests.Session()
    user, password = requests.utils.get_auth_from_url(url)
    # Without any `auth` requests would look into ~/.netrc.
    session.auth = requests.auth.HTTPBasicAuth(user, password) if user or password else lambda request: request
    return session


def status_outcome(status: int, headers: Mapping[str, str], now: float, where: str) -> None:
    """What an HTTP status means for a delivery to `where` (a safe_url): None is delivered.

    Raises TryLater for 408, 425, 429, 5xx and 1xx (with Retry-After, seconds or a date), Rejected for the rest.
    """
    if 200 <= status < 300:
        return
    said = f"{where}: {status} {_phrase(status)}"
    if 300 <= status < 400:
        location = headers.get("Location", "")
        target = safe_url(location) if "//" in location else "another path"
        raise Rejected(f"{said}: redirects to {target} are not followed; configure the final address")
    if status in (408, 425, 429) or status >= 500 or status < 200:
        raise TryLater(said, retry_after_s(headers.get("Retry-After"), now))
    if status in (400, 413, 422):
        raise BadMessage(f"{said}; the receiver does not take this message")
    raise Rejected(f"{said}; {_REMEDIES.get(status, 'see what the receiver expects')}")


_REMEDIES = {
    401: "see the credentials of this channel",
    403: "see the credentials of this channel",
    404: "see the path of this channel's address",
    405: "see the path of this channel's address",
    410: "this address was closed: make a new one",
}


def safe_url(url: str) -> str:
    """scheme://host:port, all of an address that may be told."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "an address that is not valid"
    if not host or not parts.scheme:
        return "an address without a scheme or host"
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


def cause_of(error: BaseException) -> str:
    """Why a request failed, in words that hold nothing of its URL."""
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_S:.0f} s"
    if isinstance(error, requests.Timeout):
        return f"no answer within {ANSWER_S:.0f} s"
    for inner in _chain(error):
        if isinstance(inner, ssl.SSLCertVerificationError):
            return f"TLS: {inner.verify_message}"
        if isinstance(inner, ssl.SSLError):
            return f"TLS: {inner.reason or 'failed'}"
        if isinstance(inner, socket.gaierror):
            return "its name cannot be resolved"
        if isinstance(inner, TimeoutError):
            return f"no answer within {ANSWER_S:.0f} s"
        if isinstance(inner, OSError) and inner.errno and not isinstance(inner, requests.RequestException):
            return os.strerror(inner.errno)
    return type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """The exceptions inside an exception: by cause, context, `reason` and arguments."""
    seen: list[BaseException] = []
    todo: list[Any] = [error]
    while todo and len(seen) < 20:
        one = todo.pop(0)
        if isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            todo += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
    return seen


def _body_text(url: str, response: requests.Response, secrets: Sequence[str]) -> str:
    """The receiver's words, in one line; nothing if they may hold a secret: some echo what they were asked."""
    try:
        body = response.raw.read(BODY_LIMIT, decode_content=True)
    except (urllib3.exceptions.HTTPError, OSError, ValueError):
        return ""
    parts = urlsplit(url)
    text = " ".join(body.decode("utf-8", "replace").split())
    for secret in secrets:
        text = text.replace(secret, "…")
    text = text[:300]
    if not text or parts.username or parts.password or parts.query:
        return ""
    if any(len(piece) > 5 and unquote(piece) in unquote(text) for piece in parts.path.split("/")):
        return ""
    return f": {text}"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "(no such status)"


def sendable(text: str) -> str:
    """The text with what is none in UTF-8 replaced: half a character could not be sent."""
    return text.encode("utf-8", "replace").decode()


def cut_to(text: str, length: int) -> str:
    """At most `length` characters (not bytes), marked as cut; what is no text in UTF-8 is replaced."""
    text = sendable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def rfc3339(at: float) -> str:
    """2026-11-29T07:30:38.120Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clean_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as Prometheus and Alertmanager take them: names of [a-zA-Z0-9_] that begin with no digit, nothing empty.

    The same labels always give the same result, in the order of their names.
    """
    clean: dict[str, str] = {}
    for name, value in sorted(labels.items()):
        if name and value:
            word = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            word = f"_{word}" if word[0].isdigit() else word
            clean.setdefault(word, sendable(value))
    return dict(sorted(clean.items()))


def web_address(url: str) -> str:
    """`url` if it is one that a receiver may show as a link, else ""."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return ""
    return url if whole and url.isascii() and not re.search(r"[\s<>\"{}|\\^`]", url) else ""
