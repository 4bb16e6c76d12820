"""Connections that began before a redirect, and so go past it: find them, and end each between two requests.

Many stand idle for a second, and `ss` tells (`parse_old`). Those of a busy router never do: it sends the next request
some milliseconds after an answer. `Watch` therefore reads a copy of the server's packets, as tcpdump does, and ends a
connection when an answer over plain HTTP/1 is complete. Never in the middle of an answer: that would be an error of
ours in the drill's own measure.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from drills.proxy import enter_netns, plain_address

QUIET_S = 0.5
# Two events within one tick of the kernel's clock cannot be told apart: such a connection must be quiet for longer.
TICK_S, UNSURE_QUIET_S = 0.010, 2.0
SETTLE_S = 0.001  # from the last packet of an answer, which we see on its way, until its receiver has it
LOOK_S = 0.2
ETH_P_ALL, PACKET_HOST, PACKET_OUTGOING = 0x0003, 0, 4
SO_ATTACH_FILTER = 26
NETLINK_SOCK_DIAG, SOCK_DESTROY, NLM_F_REQUEST, NLM_F_ACK = 4, 21, 1, 4
TCP, MOST_BYTES, SEQUENCES = 6, 0x40000, 1 << 32

End = tuple[str, int]  # address and port


@dataclass(frozen=True, slots=True)
class Old:
    """A connection to the target that does not run through the proxy."""

    local: str  # as ss writes it
    peer: str
    idle: bool


def parse_old(text: str, ours: set[End], *, at_server: bool) -> Iterator[Old]:
    """Connections in `ss -tnOHi`, those through the proxy (known by the client's or our dial's end) left out.

    Idle: nothing queued, quiet, and the server spoke last: it owes no answer.
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or {end_of(words[2]), end_of(words[3])} & ours:
            continue
        last_s = {key: int(ms) / 1000.0 for key, ms in re.findall(r"\blast(snd|rcv):(\d+)", line)}
        asked_s, answered_s = (last_s.get(key, 0.0) for key in (("rcv", "snd") if at_server else ("snd", "rcv")))
        quiet_s = QUIET_S if asked_s - answered_s > TICK_S else UNSURE_QUIET_S
        idle = words[:2] == ["0", "0"] and asked_s >= answered_s - TICK_S and min(asked_s, answered_s) >= quiet_s
        yield Old(words[2], words[3], idle)


def end_of(text: str) -> End:
    """One end, as ss writes it: 10.0.0.1:80, [::1]:80, [fe80::1]%eth0:80."""
    host, _, port = text.rpartition(":")
    return plain_address(host), int(port)


@dataclass(frozen=True, slots=True)
class Packet:
    """A TCP packet of the server's."""

    server: End
    client: End
    sequence: int
    payload: bytes


def parse_packet(raw: bytes) -> Packet | None:
    """An IPv4 or IPv6 packet with TCP in it; None: another, or cut."""
    if len(raw) < 40:
        return None
    if raw[0] >> 4 == 4:
        at, total = (raw[0] & 15) * 4, int.from_bytes(raw[2:4], "big")
        hosts, protocol = (raw[12:16], raw[16:20]), raw[9]
    else:
        at, total = 40, 40 + int.from_bytes(raw[4:6], "big")
        hosts, protocol = (raw[8:24], raw[24:40]), raw[6]
    if protocol != TCP or len(raw) < at + 20:
        return None
    source, target, sequence = struct.unpack_from("!HHI", raw, at)
    # Segments joined by the network card may be longer than the length field can say: it is 0 then.
    body = raw[at + (raw[at + 12] >> 4) * 4 : total if total > at else len(raw)]
    server, client = (plain_address(str(ip_address(host))) for host in hosts)
    return Packet((server, source), (client, target), sequence, body)


class Answers:
    """Follows answers over plain HTTP/1 in the server's packets. An end that it misses is followed by another."""

    def __init__(self) -> None:
        self._ends: dict[End, int] = {}  # where an answer with a Content-Length ends

    def complete(self, packet: Packet) -> bool:
        """Whether this packet is the last of an answer."""
        payload, client = packet.payload, packet.client
        if payload.startswith(b"HTTP/1."):
            head, whole, _ = payload.partition(b"\r\n\r\n")
            length = re.search(rb"\r\nContent-Length: *(\d+)", head, re.IGNORECASE)
            self._ends.pop(client, None)
            if whole and length:
                self._ends[client] = (packet.sequence + len(head) + 4 + int(length[1])) % SEQUENCES
        if client in self._ends:
            return (packet.sequence + len(payload)) % SEQUENCES == self._ends[client]
        return payload == b"0\r\n\r\n" or payload.endswith(b"\r\n0\r\n\r\n")


class Watch:
    """A thread that ends connections, each when its answer is complete. `ended`: how many so far."""

    def __init__(self, port: int, *, at_server: bool) -> None:
        self._port, self._at_server = port, at_server
        self._wanted: set[End] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.ended = 0
        self.why = ""  # it cannot watch

    def want(self, clients: Iterable[End]) -> None:
        """From now on end these, and no others."""
        self._wanted = set(clients)

    def start(self, netns: Path | None) -> None:
        """Begin; returns once it watches, or `why` says that it cannot (it needs CAP_NET_RAW)."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(netns, ready), name="old-connections", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """End none any more. May be called twice."""
        self._stopping = True
        self.want(())
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self, netns: Path | None, ready: threading.Event) -> None:
        try:
            if netns is not None:
                enter_netns(netns)
            with packets_from(self._port) as copies, socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG
            ) as diag:
                ready.set()
                self._follow(copies, diag)
        except OSError as error:
            self.why = str(error)
        finally:
            ready.set()

    def _follow(self, copies: socket.socket, diag: socket.socket) -> None:
        answers, way = Answers(), PACKET_OUTGOING if self._at_server else PACKET_HOST
        copies.settimeout(LOOK_S)
        while not self._stopping:
            try:
                raw, address = copies.recvfrom(MOST_BYTES)
            except TimeoutError:
                continue
            # Over the loopback interface each packet is seen on its way out and in.
            packet = parse_packet(raw) if self._wanted and address[2] == way else None
            # What came before the filter was there is of any port.
            if packet is None or packet.server[1] != self._port or packet.client not in self._wanted:
                continue
            if not answers.complete(packet):
                continue
            time.sleep(SETTLE_S)
            ends = (packet.server, packet.client) if self._at_server else (packet.client, packet.server)
            self._wanted.discard(packet.client)
            self.ended += destroy(diag, *ends)


def packets_from(port: int) -> socket.socket:
    """Copies of the TCP packets that come from `port`, on any device of this namespace. Raises OSError."""
    program = [
        (0x30, 0, 0, 0), (0x74, 0, 0, 4),  # the version:
        (0x15, 0, 5, 4), (0x30, 0, 0, 9), (0x15, 0, 9, TCP), (0xB1, 0, 0, 0), (0x48, 0, 0, 0), (0x15, 5, 6, port),
        (0x15, 0, 5, 6), (0x30, 0, 0, 6), (0x15, 0, 3, TCP), (0x28, 0, 0, 40), (0x15, 0, 1, port),
        (0x06, 0, 0, MOST_BYTES), (0x06, 0, 0, 0),  # take it, leave it
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    copies = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
    try:
        copies.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
    except OSError:
        copies.close()
        raise
    return copies


def destroy(diag: socket.socket, local: End, remote: End) -> bool:
    """End the TCP connection with these ends in this namespace, both sides told; False where there is none."""
    hosts = [ip_address(host) for host, _ in (local, remote)]
    family = socket.AF_INET if hosts[0].version == 4 else socket.AF_INET6
    ends = b"".join(host.packed.ljust(16, b"\0") for host in hosts)
    ports = struct.pack("!HH", local[1], remote[1])
    any_device_and_cookie = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    request = struct.pack("=BBBxI", family, TCP, 0, 0xFFFFFFFF) + ports + ends + any_device_and_cookie
    diag.send(struct.pack("=IHHII", 16 + len(request), SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + request)
    with contextlib.suppress(TimeoutError):
        diag.settimeout(LOOK_S)
        answer = diag.recv(4096)
        return len(answer) >= 20 and struct.unpack_from("=i", answer, 16)[0] == 0
    return False
