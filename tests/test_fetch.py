"""One answer over one connection: the short way for plain ones against the standard library's."""

from __future__ import annotations

import http.client
import socket
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources.fetch import Answer, Fetcher, FetchError

LIMIT_BYTES = 40
HEADERS = st.lists(st.sampled_from([
    "Content-Length: {n}", "content-length:{n}", "Content-Length: 3", "Content-Length: 99", "Content-Length: {n} ",
    "Content-Length: +{n}", "Content-Length: " + "9" * 5000, "Content-Length: -1", "Transfer-Encoding: chunked",
    "Content-Type: text/plain", "Connection: close", "Connection: keep-alive", "Date: \t now", "X-Empty:",
    " folded: x", "no colon", "Bad Name: x", "X-Latin: \xe4", "X-Lone: a\rb", "Server : x"]), max_size=5)


def answered(raw: bytes, first_bytes: int, *, plain: bool) -> Answer | str | None:
    """What one way makes of an answer of which some bytes came at first; an error by its name."""
    here, there = socket.socketpair()
    fetcher = Fetcher("http://127.0.0.1/metrics", {}, connect_s=1, total_s=1, limit_bytes=LIMIT_BYTES)
    with here, there:
        there.sendall(raw[first_bytes:])
        there.close()
        way = fetcher._plain if plain else fetcher._any
        try:
            return way(here, time.monotonic() + 5.0, raw[:first_bytes])
        except (FetchError, http.client.HTTPException, OSError) as error:
            return f"{type(error).__name__} {error if isinstance(error, FetchError) else ''}"


@settings(max_examples=500)
@given(st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.1 503 Busy", "HTTP/1.0 200 OK", "HTTP/1.1 204 -"]),
       HEADERS, st.sampled_from(["\r\n", "\r\n", "\n"]), st.binary(max_size=60), st.integers(0, 60))
def test_the_short_way_gives_what_the_library_gives(status: str, headers: list[str], end: str, body: bytes,
                                                    rest_bytes: int) -> None:
    """A server's odd answer is read by the library or as the library reads it: never otherwise."""
    head = end.join([status, *headers, "", ""]).format(n=len(body)).encode("latin-1")
    raw = head + body
    short = answered(raw, max(len(head), len(raw) - rest_bytes), plain=True)
    if short is not None:
        assert short == answered(raw, 0, plain=False)


def test_a_page_as_an_engine_answers_it_goes_the_short_way() -> None:
    """Else each poll costs twice what it must, and nobody sees it."""
    raw = b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 21:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 4\r\n\r\na 1\n"
    assert answered(raw, len(raw) - 2, plain=True) == Answer(200, {
        "date": "Sun, 29 Nov 2026 21:00:00 GMT", "server": "uvicorn", "content-length": "4"}, b"a 1\n")
