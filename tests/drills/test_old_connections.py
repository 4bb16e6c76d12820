"""When an answer is complete, read from the server's packets."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.old_connections import Answers, Packet, Watch, parse_packet
from tests.needs import need

SERVER, CLIENT, OTHER = ("10.0.0.2", 8000), ("10.0.0.1", 5555), ("10.0.0.1", 6666)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


def packet(payload: bytes, sequence: int = 1000, client: tuple[str, int] = CLIENT) -> Packet:
    """A packet of the server's."""
    return Packet(SERVER, client, sequence, payload)


def test_an_answer_with_a_length_ends_where_it_says() -> None:
    """Head and body came in two packets, and one was sent twice: the end is a place in the stream, not a sum."""
    answers = Answers()
    body_at = 1000 + len(HEAD)
    stream = [(HEAD, 1000), (b"12345", body_at), (b"12345", body_at), (b"67890", body_at + 5)]

    assert [answers.complete(packet(payload, at)) for payload, at in stream] == [False, False, False, True]
    assert answers.complete(packet(HEAD + b"1234567890", 5000))
    assert not answers.complete(packet(b"12345", body_at, OTHER))


def test_a_sequence_number_starts_again_at_zero() -> None:
    """After four gigabytes of tokens no answer ever seemed to end."""
    answers = Answers()
    at = (1 << 32) - len(HEAD) - 4
    assert not answers.complete(packet(HEAD, at))
    assert answers.complete(packet(b"1234567890", (at + len(HEAD)) % (1 << 32)))


@pytest.mark.parametrize(
    ("payload", "ends"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"7\r\ntoken00\r\n", False),
        (b"0\r\n\r\n", True),
        (b"7\r\ntoken01\r\n0\r\n\r\n", True),
        (b"a\r\n1234567890\r\n", False),
        (b"", False),
    ],
)
def test_a_stream_ends_with_its_empty_chunk(payload: bytes, ends: bool) -> None:
    """A connection was taken for idle between two tokens, and the stream was cut."""
    assert Answers().complete(packet(payload)) is ends


def test_packets_are_read() -> None:
    """Padding behind a short packet is no payload; neither are the options of the TCP header."""
    tcp = struct.pack("!HHIIBBHHH", 8000, 5555, 77, 0, 6 << 4, 0x18, 0, 0, 0) + b"opts"
    v4 = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + 24 + 3, 0, 0, 64, 6, 0, bytes([10, 0, 0, 2]), bytes([10, 0, 0, 1]))
    v6 = struct.pack("!IHBB", 6 << 28, 24 + 3, 6, 64) + bytes(15) + b"\x02" + bytes(15) + b"\x01"

    assert parse_packet(v4 + tcp + b"abc" + bytes(9)) == Packet(SERVER, CLIENT, 77, b"abc")
    assert parse_packet(v6 + tcp + b"abc") == Packet(("::2", 8000), ("::1", 5555), 77, b"abc")
    assert parse_packet(v4[:9] + b"\x11" + v4[10:] + tcp) is None
    assert parse_packet(v4) is None


@given(st.binary(max_size=200))
def test_no_packet_breaks_the_reader(raw: bytes) -> None:
    """Anything may be on a wire."""
    parse_packet(raw)
    parse_packet(b"\x45" + raw)
    parse_packet(b"\x60" + raw)


@pytest.mark.heavy
def test_only_what_is_wanted_is_ended() -> None:
    """The watch ended a connection that had begun after it: a client of the fault, or of nobody's."""
    need("root")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as wanted,
        socket.create_connection(listener.getsockname()) as other,
    ):
        at_server = [listener.accept()[0] for _ in range(2)]
        watch = Watch(listener.getsockname()[1], at_server=True)
        watch.want([wanted.getsockname()])
        watch.start(None)
        for sock in at_server:
            sock.sendall(HEAD + b"1234567890")
        for sock in (wanted, other):
            sock.settimeout(2.0)
            assert sock.recv(99) == HEAD + b"1234567890"  # whole, before its end
        with pytest.raises(ConnectionResetError):
            wanted.recv(1)
        at_server[1].sendall(HEAD)
        assert other.recv(99) == HEAD
        watch.stop()
        for sock in at_server:
            sock.close()
    assert (watch.ended, watch.why) == (1, "")
