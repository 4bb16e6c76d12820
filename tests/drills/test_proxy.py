"""The delay proxy over real sockets of this machine; who redirects to it is another test's business."""

from __future__ import annotations

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drills.proxy import HELD_BYTES, PIECE_COST, RECV_BYTES, Proxy, Shape, Shaper, TlsRecords, plain_address

Handler = Callable[[socket.socket], None]
CLIENT_HELLO = b"\x16\x03\x01\x00\x05hello"


@contextmanager
def server(handler: Handler, rcvbuf: int | None = None) -> Iterator[tuple[str, int]]:
    """A listener that gives each connection to `handler`, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    if rcvbuf:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            handler(sock)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def proxied(shape: Shape, goal: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy all whose connections were going to `goal`."""
    proxy = Proxy(shape, goal[1], mark=0, original=lambda _: goal)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
        assert not proxy.alive
        assert proxy.open == 0


def dial(proxy: Proxy) -> socket.socket:
    """A client's connection."""
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def echo(sock: socket.socket) -> None:
    """Say everything again, to the end."""
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def read_all(sock: socket.socket) -> bytes:
    """All that comes until the end of the stream."""
    got = bytearray()
    while data := sock.recv(65536):
        got += data
    return bytes(got)


# When bytes may leave: pure


def test_only_the_first_bytes_after_a_request_wait() -> None:
    """Each token came five seconds late, and a stream of 300 took 25 minutes instead of five seconds more."""
    shaper = Shaper(Shape("turn", 5.0))
    shaper.asked(b"POST")
    shaper.asked(b" body")
    first, = shaper.answered(b"a", 100.0)
    second, = shaper.answered(b"b", 100.5)
    shaper.asked(b"POST again")
    third, = shaper.answered(b"c", 200.0)

    assert [first.release_at, second.release_at, third.release_at] == [105.0, 100.5, 205.0]
    assert [first.since, second.since, third.since] == [100.0, None, 200.0]


def test_go_on_is_no_answer() -> None:
    """curl asked `Expect: 100-continue`; both the go-ahead and the answer waited, and it measured ten seconds."""
    shaper = Shaper(Shape("turn", 5.0))
    shaper.asked(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\n\r\n")
    go_on, = shaper.answered(b"HTTP/1.1 100 Continue\r\n\r\n", 10.0)
    shaper.asked(b"body")
    answer, = shaper.answered(b"HTTP/1.1 200 OK\r\n", 11.0)

    assert (go_on.release_at, answer.release_at) == (10.0, 16.0)


def test_chunks_wait_one_after_the_other() -> None:
    """Three tokens came at once and left at once: the gap between tokens was meant to grow, and did not."""
    shaper = Shaper(Shape("chunk", 0.2))
    shaper.asked(b"x")
    pieces = [shaper.answered(data, now)[0] for data, now in ((b"a", 1.0), (b"b", 1.0), (b"c", 9.0))]

    assert [round(piece.release_at, 6) for piece in pieces] == [1.2, 1.4, 9.2]
    assert [piece.since for piece in pieces] == [1.0, 1.2, 9.0]


def test_a_hang_lets_the_first_bytes_through() -> None:
    """A stream that stops after 5 bytes; the next request on the same connection does not free it."""
    shaper = Shaper(Shape("hang", after_bytes=5))
    shaper.asked(b"x")
    pieces = shaper.answered(b"abc", 1.0) + shaper.answered(b"defg", 2.0) + shaper.answered(b"h", 3.0)

    assert [(piece.data, piece.release_at) for piece in pieces] == [
        (b"abc", 1.0), (b"de", 2.0), (b"fg", math.inf), (b"h", math.inf),
    ]  # fmt: skip
    assert [piece.since is not None for piece in pieces] == [False, False, True, False]


def test_a_tls_handshake_is_no_request() -> None:
    """Each answer over new TLS connections came 15 s late: the two turns of the handshake had waited too."""
    shaper = Shaper(Shape("turn", 5.0))
    shaper.asked(CLIENT_HELLO)
    hello, = shaper.answered(b"\x16\x03\x03...", 1.0)
    shaper.asked(b"\x14\x03\x03\x00\x01\x01" + b"\x16\x03\x03\x00\x03fin")
    finished, = shaper.answered(b"\x16...", 2.0)
    shaper.asked(b"\x17\x03\x03\x00\x07request")
    answer, = shaper.answered(b"\x17...", 3.0)

    assert (hello.release_at, finished.release_at, answer.release_at) == (1.0, 2.0, 8.0)


@pytest.mark.parametrize(
    ("request_", "spared"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nUser-Agent: tocsin\r\n\r\n", True),
        (b"GET /health HTTP/1.1\r\nuser-agent: kube-probe/1.36\r\n\r\n", True),
        (b"GET /metrics HTTP/1.1\r\nUser-Agent: Prometheus/2.42\r\n\r\n", False),
        (b"POST /v1/completions HTTP/1.1\r\nUser-Agent: tocsin\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nX: User-Agent: tocsin\r\n\r\n", False),
    ],
)
def test_the_agent_s_own_reads_are_spared(request_: bytes, spared: bool) -> None:
    """The agent's read of /metrics was late as well: it paged engine-down, and aborted the drill that it judged."""
    for shape in (Shape("turn", 5.0), Shape("chunk", 5.0), Shape("hang")):
        shaper = Shaper(shape)
        assert shaper.asked(request_) is spared
        assert [piece.release_at == 1.0 for piece in shaper.answered(b"page", 1.0)] == [spared]
        shaper.asked(b"POST / HTTP/1.1")
        assert shaper.answered(b"answer", 2.0)[0].release_at > 2.0


@given(st.lists(st.tuples(st.sampled_from([20, 22, 23]), st.binary(min_size=1, max_size=40)), min_size=1), st.randoms())
def test_tls_records_are_followed_through_any_cut(records: list[tuple[int, bytes]], chance: random.Random) -> None:
    """A record's header lay across two packets, and a byte of its body was taken for the next one's kind."""
    stream = b"".join(bytes([kind, 3, 3]) + len(body).to_bytes(2, "big") + body for kind, body in records)
    follower = TlsRecords()
    found = [follower.feed(part) for part in cut(stream, chance)]

    assert any(found) == any(kind == 23 for kind, _ in records)


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=20),
    st.sampled_from([Shape("turn", 5.0), Shape("chunk", 0.1), Shape("hang", after_bytes=100)]),
)
def test_a_shape_moves_bytes_in_time_only(chunks: list[bytes], shape: Shape) -> None:
    """Whatever is delayed, no byte is lost, doubled or moved before another."""
    shaper = Shaper(shape)
    shaper.asked(b"x")
    pieces = [piece for n, chunk in enumerate(chunks) for piece in shaper.answered(chunk, float(n))]

    assert b"".join(bytes(piece.data) for piece in pieces) == b"".join(chunks)
    assert all(piece.release_at >= 0.0 for piece in pieces)


def cut(stream: bytes, chance: random.Random) -> Sequence[bytes]:
    """A stream in pieces of any size."""
    parts = []
    while stream:
        size = chance.choice((1, 2, 3, 7, 100, 1448, 70_000))
        parts.append(stream[:size])
        stream = stream[size:]
    return parts


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("[fe80::1%eth0]", "fe80::1"),
        ("[fe80::1]%eth0", "fe80::1"),
        ("10.1.2.3", "10.1.2.3"),
    ],
)
def test_an_address_has_one_name(written: str, plain: str) -> None:
    """ss writes an address in brackets, with its device, or as v4 inside v6; it is the same client."""
    assert plain_address(written) == plain


# Over sockets


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_every_byte_arrives_as_it_was_sent(seed: int) -> None:
    """Chunked streaming behind a proxy that lost the start of a chunk: clients saw broken JSON, hours later."""
    chance = random.Random(seed)
    sent = chance.randbytes(chance.choice((1, 1000, 300_000)))
    answer = chance.randbytes(chance.choice((0, 1, 5000, 700_000)))

    def handler(sock: socket.socket) -> None:
        got = read_all(sock)
        for part in cut(answer + got, chance):
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)

    with server(handler) as goal, proxied(Shape("turn", 0.01), goal) as proxy, dial(proxy) as client:
        for part in cut(sent, random.Random(seed + 1)):
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == answer + sent


def test_each_answer_on_a_kept_connection_waits() -> None:
    """Only the first answer of each connection was late: a client that keeps its connections saw almost nothing."""
    with server(echo) as goal, proxied(Shape("turn", 0.3), goal) as proxy, dial(proxy) as client:
        waited = []
        for _ in range(3):
            start = time.monotonic()
            client.sendall(b"ask")
            assert client.recv(99) == b"ask"
            waited.append(time.monotonic() - start)
        until(lambda: proxy.tally.snapshot()["answers"] == 3)  # it counts when it has sent
        log = proxy.tally.snapshot()

    assert all(each >= 0.3 for each in waited), waited
    assert log["connections"] == 1
    assert 0.3 <= log["min_s"] <= log["median_s"] <= log["max_s"] <= max(waited)
    assert min(waited) < 0.5


def test_a_hundred_clients_wait_side_by_side() -> None:
    """A proxy of one thread slept for each client in turn: the hundredth waited a hundred delays."""
    with server(echo) as goal, proxied(Shape("turn", 0.5), goal) as proxy:
        clients = [dial(proxy) for _ in range(100)]
        start = time.monotonic()
        for client in clients:
            client.sendall(b"ask")
        assert [client.recv(99) for client in clients] == [b"ask"] * 100
        took_s = time.monotonic() - start
        for client in clients:
            client.close()
        until(lambda: proxy.tally.snapshot()["answers"] == 100)

    assert 0.5 <= took_s < 5.0


def test_a_slow_reader_costs_no_memory() -> None:
    """A client that does not read made the proxy keep a whole model's answers in memory, and the node swapped."""
    done = threading.Event()

    def flood(sock: socket.socket) -> None:
        sock.recv(99)
        sock.settimeout(0.3)
        with suppress(TimeoutError):
            while True:
                sock.sendall(bytes(65536))
        done.set()  # the sender feels it

    with server(flood) as goal, proxied(Shape("turn", 0.05), goal) as proxy, dial(proxy) as client:
        client.sendall(b"ask")
        assert done.wait(20)
        (connection,) = list(proxy._connections)
        held = connection.down.held
        counted = sum(len(piece.data) + PIECE_COST for piece in connection.down.queue)

    assert held == counted
    assert held <= HELD_BYTES + RECV_BYTES + PIECE_COST


def test_a_half_closed_connection_is_still_answered() -> None:
    """A client that had ended its side got no answer: the proxy had ended both."""
    with server(echo) as goal, proxied(Shape("turn", 0.2), goal) as proxy, dial(proxy) as client:
        client.sendall(b"all I have to say")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b"all I have to say"
        until(lambda: proxy.open == 0)


def test_a_client_that_gives_up_is_known_to_the_server_at_once() -> None:
    """The client hung up after its deadline; the engine, told only five seconds later, went on generating."""
    told = threading.Event()

    def handler(sock: socket.socket) -> None:
        sock.recv(99)
        sock.sendall(b"late")
        assert sock.recv(99) == b""
        told.set()

    with server(handler) as goal, proxied(Shape("turn", 30.0), goal) as proxy:
        with dial(proxy) as client:
            client.sendall(b"ask")
            until(lambda: proxy.tally.snapshot()["connections"] == 1)
        assert told.wait(30)


def test_who_hangs_up_on_a_hang_costs_nothing_more() -> None:
    """Clients gave up after their deadline, 30 each second, until the proxy had no descriptor left and all waited."""

    def handler(sock: socket.socket) -> None:
        sock.recv(99)
        sock.sendall(b"never seen")
        until(lambda: sock.recv(99) == b"")

    with server(handler) as goal, proxied(Shape("hang"), goal) as proxy:
        with dial(proxy) as client:
            client.sendall(b"ask")
            until(lambda: proxy.tally.snapshot()["hung"] == 1)
        until(lambda: proxy.open == 0)


def test_a_reset_stays_a_reset() -> None:
    """An engine that crashed looked, through the proxy, like one that had ended its answer well."""

    def crash(sock: socket.socket) -> None:
        sock.recv(99)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with server(crash) as goal, proxied(Shape("turn", 0.1), goal) as proxy, dial(proxy) as client:
        client.sendall(b"ask")
        with pytest.raises(ConnectionResetError):
            client.recv(99)


def test_an_upstream_that_refuses_is_passed_on() -> None:
    """Nobody listens where the connection was going: the client hears so at once, it does not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        goal = gone.getsockname()
    with proxied(Shape(), goal) as proxy:
        with pytest.raises(ConnectionResetError), dial(proxy) as client:
            client.recv(99)
        assert proxy.tally.snapshot()["unreachable"] == 1


def test_it_refuses_to_call_itself() -> None:
    """Somebody dialled the proxy's own port: it called itself, and that call itself, until no descriptor was left."""
    proxy = Proxy(Shape(), 8000, mark=0)  # asks the kernel: nobody redirected this
    proxy.start()
    try:
        with pytest.raises(ConnectionResetError), dial(proxy) as client:
            client.recv(1)
        assert proxy.tally.snapshot()["refused"] == 1
        assert proxy.open == 0
    finally:
        proxy.close()


@pytest.mark.parametrize(("status", "retry_after_s"), [(503, None), (429, 7)])
def test_status_is_answered_in_place_of_the_engine(status: int, retry_after_s: int | None) -> None:
    """The engine must not see a request that was answered for it, and the client must be able to read when to retry."""
    asked = threading.Event()

    def handler(sock: socket.socket) -> None:
        asked.set()

    shape = Shape("status", status=status, retry_after_s=retry_after_s)
    with server(handler) as goal, proxied(shape, goal) as proxy, dial(proxy) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-")
        client.sendall(b"Length: 4\r\n\r\n")
        client.sendall(b"body")
        head, _, body = read_all(client).partition(b"\r\n\r\n")

    lines = head.decode().split("\r\n")
    assert lines[0].startswith(f"HTTP/1.1 {status} ")
    assert f"Content-Length: {len(body)}" in lines
    assert (f"Retry-After: {retry_after_s}" in lines) == (retry_after_s is not None)
    assert not asked.is_set()


def test_status_spares_the_agent() -> None:
    """The agent asked for the engine's page and got the drill's 503: the engine was down, it said."""
    page = b"GET /metrics HTTP/1.1\r\nUser-Agent: tocsin\r\n\r\n"
    with server(echo) as goal, proxied(Shape("status"), goal) as proxy, dial(proxy) as client:
        for _ in range(2):
            client.sendall(page)
            assert client.recv(99) == page
        log = proxy.tally.snapshot()

    assert (log["spared"], log["status"], log["passed_other"]) == (2, 0, 0)


def test_status_does_not_touch_tls() -> None:
    """An HTTP answer in the middle of a TLS handshake is no 503 but garbage: pass it on, and say so."""
    with server(echo) as goal, proxied(Shape("status"), goal) as proxy, dial(proxy) as client:
        client.sendall(CLIENT_HELLO)
        assert client.recv(99) == CLIENT_HELLO
        log = proxy.tally.snapshot()

    assert (log["passed_tls"], log["status"]) == (1, 0)


def test_release_lets_go_of_what_is_held() -> None:
    """The fault was over, and the clients that were waiting waited for the rest of their delay."""
    with server(echo) as goal, proxied(Shape("turn", 60.0), goal) as proxy, dial(proxy) as client:
        client.sendall(b"ask")
        until(lambda: any(c.down.queue for c in list(proxy._connections)))
        start = time.monotonic()
        proxy.release()
        assert client.recv(99) == b"ask"
        client.sendall(b"again")
        assert client.recv(99) == b"again"
        assert time.monotonic() - start < 20.0
        assert proxy.tally.snapshot()["answers"] == 0  # cut short by us: no measure of the fault


def test_c097_removing_a_timeout_does_not_hang() -> None:
    """Removing a fault hung for a minute because of one open connection, which stayed broken for ever."""
    with server(echo) as goal, proxied(Shape("hang"), goal) as proxy, dial(proxy) as client, dial(proxy) as other:
        client.sendall(b"ask")
        until(lambda: proxy.tally.snapshot()["hung"] == 1)
        start = time.monotonic()
        running = proxy.drain(5.0)
        took_s = time.monotonic() - start
        assert client.recv(99) == b"ask"  # what was held is not lost
        assert client.recv(99) == other.recv(99) == b""  # idle: ended in good order
        with dial(proxy) as new:
            new.sendall(b"new")
            assert new.recv(99) == b"new"

    assert (running, took_s < 3.0) == (0, True)


def test_draining_ends_though_a_client_never_does() -> None:
    """A stream that ran for an hour would have kept the fault's table for an hour."""

    def talk(sock: socket.socket) -> None:
        while True:
            sock.sendall(b"token")
            time.sleep(0.02)

    with server(talk) as goal, proxied(Shape("turn", 0.1), goal) as proxy, dial(proxy) as client:
        assert client.recv(5) == b"token"
        start = time.monotonic()
        assert proxy.drain(0.5) == 1
        assert 0.4 < time.monotonic() - start < 20.0
        assert proxy.drain(60.0, lambda: False) == 1  # the runner is dead: nobody waits
        proxy.close()
        with suppress(ConnectionResetError):
            read_all(client)
