"""Send one message through Apprise, in a process of its own: `python apprise_send.py`, JSON in, JSON out.

Apprise and its hundred services are megabytes that a watching daemon need not hold, and it tells yes or no where a
sender must know which no. So this process asks it, and listens to its HTTP: no redirect is followed, and the last
answer's status is told. It imports nothing of ours, and its address comes on stdin, where no `ps` shows it.

    in:  {"url", "title", "body", "type": "info|success|warning|failure"}
    out: {"ok": bool, "service": "Discord", "status": 429, "headers": {"Retry-After": "1"}, "error": "…", "words": "…"}
         or {"missing": true}: no Apprise is installed; {"unknown": true}: it knows no such address
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import requests
import requests.auth

WORDS_CHARS = 200
SHORT = 3  # a piece of an address no longer than this is no secret, and would hide every word that holds it


class _Heard(logging.Handler):
    """What Apprise complains of, for the services that speak no HTTP."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last line."""
        with suppress(Exception):
            self.last = record.getMessage()


def send(asked: Mapping[str, str]) -> dict[str, Any]:
    """Send what was asked, and tell how it went."""
    try:
        import apprise
    except ImportError:
        return {"missing": True}
    heard, log = _Heard(), logging.getLogger("apprise")
    log.addHandler(heard)
    log.propagate = False
    try:
        plugin = apprise.Apprise.instantiate(asked["url"])
        if plugin is None:
            return {"ok": False, "unknown": True}
        plugin.overflow_mode = apprise.OverflowMode.TRUNCATE  # else what is too long is refused whole
        with _listening() as answer:
            ok = plugin.notify(body=asked["body"], title=asked["title"], notify_type=asked["type"],
                               body_format=apprise.NotifyFormat.TEXT)
        words = "" if ok else without(heard.last, asked["url"])
        return {"ok": bool(ok), "service": str(plugin.service_name), "words": words, **answer}
    finally:
        log.removeHandler(heard)
        log.propagate = True


@contextmanager
def _listening() -> Iterator[dict[str, Any]]:
    """What the last HTTP request was answered, in the dict that this gives; no redirect is followed meanwhile."""
    answer: dict[str, Any] = {}
    whole = requests.Session.send

    def listened(session: requests.Session, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        answer.clear()
        try:
            response = whole(session, request, **{**how, "allow_redirects": False})
        except requests.RequestException as error:
            answer["error"] = type(error).__name__  # never its text: that has the whole address
            raise
        told = {name: response.headers[name] for name in ("Retry-After", "Location") if name in response.headers}
        answer.update(status=response.status_code, headers=told)
        return response

    requests.Session.send = listened  # type: ignore[method-assign, assignment]
    try:
        yield answer
    finally:
        requests.Session.send = whole  # type: ignore[method-assign]


def without(text: str, url: str) -> str:
    """Apprise's words in one line, with nothing of an address's user, password, path and query in them."""
    line = " ".join(text.split())
    _, _, rest = url.partition("://")
    pieces = {piece for part in (url, rest, urlsplit(f"x://{rest}").hostname or "")
              for piece in (part, *re.split(r"[/?&=]", part), *re.split(r"[/?&=@:#]", part))}
    for piece in sorted({*pieces, *map(unquote_plus, pieces)}, key=len, reverse=True):
        if len(piece) > SHORT:
            line = re.sub(re.escape(piece), "…", line, flags=re.IGNORECASE)
    return line[:WORDS_CHARS]


def main() -> None:
    """One message from stdin; what became of it to stdout."""
    json.dump(send(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
