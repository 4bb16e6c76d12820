"""The transparent delay proxy: what the kernel redirects to it, it passes on to where it was going, later.

One thread, one selector. The thread alone is in the target's network namespace, so its listener and its own dials are
there; the rest of the process stays where it is. Each direction of a connection holds at most HELD_BYTES: beyond that
we stop reading, and the sender feels it, as behind a slow upstream. Bytes leave in the order and number in which they
came; looked into are only the start of a request and the headers of TLS records.

Reads of this node's own monitoring over plain HTTP are spared: a drill must not blind the agent that judges it, nor
have the kubelet restart the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import ipaddress
import itertools
import math
import os
import re
import resource
import selectors
import socket
import statistics
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MARK = 0x70C51  # SO_MARK of our own dials; none of the bits that kube-proxy (0x4000, 0x8000) reads
TOLERANCE_S = 0.2
HELD_BYTES = 256 * 1024
PIECE_COST = 128  # what a held piece costs beside its bytes: one-byte chunks are bounded too
RECV_BYTES = 64 * 1024
HEAD_BYTES = 64 * 1024
KEPT_DELAYS = 65_536
COUNTS = ("connections", "answers", "off", "hung", "status", "spared", "passed_tls", "passed_other", "refused",
          "unreachable")
QUIET_S = 1.0  # so long without a byte after an answer, and a draining connection is closed
LINGER_S = 2.0  # after an answer of our own: so long the client may go on sending into the void
TICK_S = 0.1
BACKLOG = 4096
SO_ORIGINAL_DST = 80  # IP6T_SO_ORIGINAL_DST too
CLONE_NEWNET = 0x40000000
TLS_HANDSHAKE, TLS_DATA = 22, 23
# GETs only: a router passes the name of its client on, and a canary's completion is to meet the fault.
SPARED = re.compile(rb"GET .*\r\nUser-Agent: *(tocsin\b|kube-probe/)", re.IGNORECASE | re.DOTALL)

Mode = Literal["turn", "chunk", "hang", "status"]
Address = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is done to answers.

    turn: the first bytes after a request are held for delay_s. chunk: each chunk is, one after the other. hang: after
    `after_bytes` of an answer nothing more comes. status: we answer `status` ourselves, with Retry-After, in HTTP/1.
    """

    mode: Mode = "turn"
    delay_s: float = 5.0
    after_bytes: int = 0
    status: int = 503
    retry_after_s: int | None = None


@dataclass(slots=True)
class Piece:
    """Bytes on their way. `since`: when they came, where their delay is to be measured."""

    release_at: float  # monotonic; inf: not before the fault ends
    data: bytes | memoryview
    since: float | None = None

    @property
    def cost(self) -> int:
        """What it counts against HELD_BYTES."""
        return len(self.data) + PIECE_COST


class TlsRecords:
    """Follows the record headers of one direction: does it carry application data yet?"""

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = self._kind = 0

    def feed(self, data: bytes) -> bool:
        """Whether `data` holds (a part of) a record of application data."""
        found, at = False, 0
        while at < len(data):
            if not self._left:
                taken = data[at : at + 5 - len(self._header)]
                self._header += taken
                at += len(taken)
                if len(self._header) < 5:
                    break
                self._kind, self._left = self._header[0], int.from_bytes(self._header[3:5], "big")
                self._header.clear()
            else:
                found = found or self._kind == TLS_DATA
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
        return found


class Shaper:
    """When the bytes of one connection may leave. Pure: the time is an argument."""

    def __init__(self, shape: Shape | None) -> None:
        self.shape = shape  # None: pass on at once
        self.awaiting = False  # the client has said something since the server's last byte
        self._turn = False
        self._answer_bytes = 0
        self._free_at = -math.inf
        self._tls: TlsRecords | None = None
        self._begun = self._hung = self._spared = False

    def asked(self, data: bytes) -> bool:
        """The client said `data`; whether that begins a turn that is spared.

        In TLS only application data opens a turn: a handshake is no request.
        """
        if not self._begun:
            self._begun = True
            self._tls = TlsRecords() if data[0] == TLS_HANDSHAKE else None
        self.awaiting = True
        begins = (self._tls is None or self._tls.feed(data)) and not self._turn
        if begins:
            self._turn = True
            self._answer_bytes = 0
            self._spared = SPARED.match(data) is not None
        return begins and self._spared

    def answered(self, data: bytes, now: float) -> list[Piece]:
        """The server said `data`: in which pieces it leaves, and when."""
        first, shape = self._turn, None if self._spared else self.shape
        self.awaiting = False
        if shape is None or shape.mode == "status":
            self._turn = False
            return [Piece(now, data)]
        if first and data.startswith(b"HTTP/1.1 100"):  # "go on": the turn is still the client's
            return [Piece(now, data)]
        self._turn = False
        if shape.mode == "hang":
            room = max(0, shape.after_bytes - self._answer_bytes)
            self._answer_bytes += len(data)
            rest = Piece(math.inf, data[room:], None if self._hung else now)
            self._hung = self._hung or room < len(data)
            return [part for part in (Piece(now, data[:room]), rest) if part.data]
        if shape.mode == "chunk":
            since = max(now, self._free_at)
            self._free_at = since + shape.delay_s
            return [Piece(self._free_at, data, since)]
        return [Piece(now + shape.delay_s, data, now)] if first else [Piece(now, data)]


class Tally:
    """The proxy's own log: what it did, counted and measured. Written by its thread, read by anybody."""

    def __init__(self, asked_s: float) -> None:
        self._lock = threading.Lock()
        self._asked_s = asked_s
        self._delays_s = array("d")
        self._counts = dict.fromkeys(COUNTS, 0)

    def count(self, what: str) -> None:
        """One more of `what`."""
        with self._lock:
            self._counts[what] += 1

    def delayed(self, measured_s: float) -> None:
        """One answer left so long after it came."""
        with self._lock:
            self._counts["answers"] += 1
            self._counts["off"] += abs(measured_s - self._asked_s) > TOLERANCE_S
            if len(self._delays_s) < KEPT_DELAYS:
                self._delays_s.append(measured_s)

    def snapshot(self) -> dict[str, Any]:
        """Counts since the start; min_s, median_s and max_s of the delays (None: there was none)."""
        with self._lock:
            counts, delays = dict(self._counts), list(self._delays_s)
        if not delays:
            return {**counts, "min_s": None, "median_s": None, "max_s": None}
        return {**counts, "min_s": round(min(delays), 4), "median_s": round(statistics.median(delays), 4),
                "max_s": round(max(delays), 4)}


@dataclass(slots=True)
class Flow:
    """One direction of a connection."""

    queue: deque[Piece] = field(default_factory=deque)
    held: int = 0
    ended: bool = False  # the source has ended
    passed_end: bool = False  # and the sink knows
    blocked: bool = False  # the sink takes no more just now

    @property
    def wants(self) -> bool:
        """Whether we read from the source."""
        return not self.ended and self.held < HELD_BYTES

    def put(self, piece: Piece) -> None:
        """Take a piece in."""
        self.queue.append(piece)
        self.held += piece.cost


@dataclass(slots=True, eq=False)
class Connection:
    """A client and the server that it meant."""

    client: socket.socket
    goal: Address
    shaper: Shaper
    active_at: float
    server: socket.socket | None = None
    connected: bool = False
    closed: bool = False
    head: bytearray | None = None  # mode status: what the client said while it is not yet clear who answers
    complete: bool = False  # the last bytes of the server end an answer, in HTTP/1 with chunks
    answered: bool = False  # by ourselves: what the client still says is dropped
    up: Flow = field(default_factory=Flow)
    down: Flow = field(default_factory=Flow)
    masks: dict[socket.socket, int] = field(default_factory=dict)

    @property
    def hangs(self) -> bool:
        """Nothing goes to the client any more while the fault is in."""
        return bool(self.down.queue) and self.down.queue[0].release_at == math.inf

    @property
    def idle(self) -> bool:
        """Nothing is asked, nothing is on its way."""
        return not (self.shaper.awaiting or self.up.queue or self.down.queue or self.head)


class Proxy:
    """The proxy. `original` tells where an accepted connection was going; raises OSError where nobody redirected it."""

    def __init__(self, shape: Shape, goal_port: int, *, mark: int = MARK,
                 original: Callable[[socket.socket], Address] | None = None) -> None:
        self.tally = Tally(shape.delay_s)
        self._shape: Shape | None = shape
        self._goal_port, self._mark = goal_port, mark
        self._original = original or original_destination
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._listener: socket.socket | None = None
        self._listening = False
        self._connections: dict[Connection, tuple[tuple[str, int], ...]] = {}
        self._timers: list[tuple[float, int, Connection, Flow]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._passing = self._stopping = False
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._most = 500
        self.port = 0

    # --- from any thread --------------------------------------------------------------------------------------------

    def start(self, port: int = 0, netns: Path | None = None) -> None:
        """Listen on `port` (0: any) of `netns` (None: ours) and serve in a thread. Raises OSError."""
        self._most = _room_for_connections()
        self._thread = threading.Thread(target=self._run, args=(port, netns), name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def endpoints(self) -> set[tuple[str, int]]:
        """Address and port of each client of ours, and of each of our dials: connections that are not of before."""
        with self._lock:
            return {end for ends in self._connections.values() for end in ends}

    @property
    def open(self) -> int:
        """How many connections run."""
        with self._lock:
            return len(self._connections)

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread is not None and self._thread.is_alive()

    def release(self) -> None:
        """From now on pass on undelayed, also what is held; close what has been idle for QUIET_S."""
        self._passing = True
        self._wake()

    def drain(self, limit_s: float, wanted: Callable[[], bool] = lambda: True) -> int:
        """Release, then wait until all have ended, at most limit_s and while `wanted`; how many have not."""
        self.release()
        end = time.monotonic() + limit_s
        while self.alive and self.open and time.monotonic() < end and wanted():
            time.sleep(TICK_S / 2)
        return self.open

    def close(self) -> None:
        """End every connection in good order, the listener and the thread. May be called twice."""
        self._stopping = True
        self._wake()
        if self._thread is not None:
            self._thread.join(2.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._wake_w.send(b"!")

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self, port: int, netns: Path | None) -> None:
        try:
            if netns is not None:
                enter_netns(netns)
            self._listener = listen(port)
            self.port = self._listener.getsockname()[1]
            self._wake_r.setblocking(False)
            self._selector.register(self._wake_r, selectors.EVENT_READ)
        except BaseException as error:
            self._error = error
            self._end()
            return
        finally:
            self._ready.set()
        try:
            while not self._stopping:
                self._round()
        finally:
            self._end()

    def _round(self) -> None:
        self._mind_listener()
        for key, mask in self._selector.select(self._timeout_s()):
            if key.fileobj is self._wake_r:
                with contextlib.suppress(BlockingIOError):
                    self._wake_r.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._guarded(key.data, self._serve, key.data, key.fileobj, mask)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, connection, flow = heapq.heappop(self._timers)
            self._guarded(connection, self._pump, connection, flow)
        if self._passing:
            self._pass_on(now)

    def _timeout_s(self) -> float | None:
        due = self._timers[0][0] - time.monotonic() if self._timers else None
        if not self._passing:
            return None if due is None else max(0.0, due)
        return TICK_S if due is None else min(TICK_S, max(0.0, due))

    def _mind_listener(self) -> None:
        """Accept only while there is room: a flood waits in the backlog, it does not take our descriptors."""
        room = len(self._connections) < self._most
        if self._listener is not None and room != self._listening:
            if room:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)
            self._listening = room

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101
        try:
            client, peer = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._most = len(self._connections)
            return  # else it went away again
        try:
            goal = self._original(client)
        except OSError:
            goal = ("", 0)
        if goal[1] != self._goal_port or goal[1] == self.port:
            # Not redirected: somebody dialled us. To pass that on would be to call ourselves, for ever.
            self.tally.count("refused")
            _reset(client)
            return
        self.tally.count("connections")
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shape = None if self._passing else self._shape
        connection = Connection(client, goal, Shaper(shape), time.monotonic())
        with self._lock:
            self._connections[connection] = (_end(peer),)
        if shape is not None and shape.mode == "status":
            connection.head = bytearray()
            self._watch(connection)
        else:
            self._guarded(connection, self._dial, connection)

    def _dial(self, connection: Connection) -> None:
        """Begin our own connection to the goal, marked so that nobody redirects it to us."""
        family = socket.AF_INET6 if ":" in connection.goal[0] else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        connection.server = server
        server.setblocking(False)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._mark:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._mark)
        connection.up.blocked = True
        number = server.connect_ex(connection.goal)
        with self._lock:
            self._connections[connection] += (_end(server.getsockname()),)
        if number not in (0, errno.EINPROGRESS):
            self._fail_to_connect(number)

    def _fail_to_connect(self, number: int) -> None:
        self.tally.count("unreachable")
        raise OSError(number, os.strerror(number))

    # --- one connection ---------------------------------------------------------------------------------------------

    def _guarded(self, connection: Connection, act: Callable[..., None], *args: Any) -> None:
        """Do something with a connection. An error of either side is passed on to the other as a reset."""
        if connection.closed:
            return
        try:
            act(*args)
        except OSError:
            self._close(connection, _reset)
            return
        if connection.up.passed_end and (connection.down.passed_end or connection.hangs):
            # Whoever hangs up on a hanging answer is gone: kept, each would cost us two descriptors until the end.
            self._close(connection, socket.socket.close)
        elif not connection.closed:
            self._watch(connection)

    def _serve(self, connection: Connection, ready: socket.socket, mask: int) -> None:
        ours = ready is connection.client
        if mask & selectors.EVENT_WRITE:
            if not ours and not connection.connected:
                number = ready.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    self._fail_to_connect(number)
                connection.connected = True
            self._pump(connection, connection.down if ours else connection.up)
        if mask & selectors.EVENT_READ and not connection.closed:
            (self._from_client if ours else self._from_server)(connection)

    def _from_client(self, connection: Connection) -> None:
        data = _receive(connection.client)
        if data is None:
            return
        now = connection.active_at = time.monotonic()
        if connection.answered:
            if not data:
                self._close(connection, socket.socket.close)
        elif connection.head is not None:
            self._judge_head(connection, data)
        elif not data:
            connection.up.ended = True
            self._pump(connection, connection.up)
        else:
            if connection.shaper.asked(data):
                self.tally.count("spared")
            connection.up.put(Piece(now, data))
            self._pump(connection, connection.up)

    def _from_server(self, connection: Connection) -> None:
        assert connection.server is not None  # noqa: S101
        data = _receive(connection.server)
        if data is None:
            return
        now = connection.active_at = time.monotonic()
        if not data:
            connection.down.ended = True
        else:
            connection.complete = data.endswith(b"0\r\n\r\n")
            for piece in connection.shaper.answered(data, now):
                if piece.release_at == math.inf and piece.since is not None:
                    self.tally.count("hung")
                connection.down.put(piece)
                if now < piece.release_at < math.inf:
                    self._later(piece.release_at, connection)
        self._pump(connection, connection.down)

    def _judge_head(self, connection: Connection, data: bytes) -> None:
        """Mode status: answer an HTTP/1 request ourselves; what is none (TLS) is passed on untouched."""
        head, shape = connection.head, self._shape
        assert head is not None and shape is not None  # noqa: S101, PT018
        head += data
        is_http = 0x41 <= head[0] <= 0x5A and not head.startswith(b"PRI * HTTP/2") if head else False
        if not data:  # it never asked anything: a port check
            self._close(connection, socket.socket.close)
        elif is_http and b"\r\n\r\n" in head and SPARED.match(head):
            self.tally.count("spared")
            self._pass_head(connection)
        elif is_http and b"\r\n\r\n" in head:
            self.tally.count("status")
            connection.answered = connection.down.ended = True
            connection.down.put(Piece(0.0, answer_of(shape)))
            self._later(time.monotonic() + LINGER_S, connection)
            self._pump(connection, connection.down)
        elif not is_http or len(head) >= HEAD_BYTES:
            self.tally.count("passed_tls" if head[0] == TLS_HANDSHAKE else "passed_other")
            self._pass_head(connection)

    def _pass_head(self, connection: Connection) -> None:
        """Mode status: not ours to answer, or no more."""
        head, connection.head, connection.shaper.shape = connection.head, None, None
        if head:
            connection.shaper.asked(bytes(head))
            connection.up.put(Piece(0.0, bytes(head)))
        self._dial(connection)

    def _later(self, when: float, connection: Connection) -> None:
        """Look at what goes to the client again at `when`."""
        heapq.heappush(self._timers, (when, next(self._numbers), connection, connection.down))

    def _pump(self, connection: Connection, flow: Flow) -> None:
        """Send what is due; the end of the stream follows its last byte."""
        sink = connection.client if flow is connection.down else connection.server
        if connection.answered and flow.passed_end:
            self._close(connection, socket.socket.close)  # the linger time is over
            return
        if sink is None or (flow is connection.up and not connection.connected):
            return
        flow.blocked = False
        now = time.monotonic()
        while flow.queue and flow.queue[0].release_at <= now:
            piece = flow.queue[0]
            try:
                sent = sink.send(piece.data)
            except BlockingIOError:
                flow.blocked = True
                return
            if piece.since is not None:
                self.tally.delayed(now - piece.since)
                piece.since = None
            flow.held -= sent
            if sent < len(piece.data):
                piece.data = memoryview(piece.data)[sent:]
                continue
            flow.queue.popleft()
            flow.held -= PIECE_COST
        if flow.ended and not flow.queue and not flow.passed_end:
            flow.passed_end = True
            sink.shutdown(socket.SHUT_WR)

    def _watch(self, connection: Connection) -> None:
        """Ask the selector for what we want to know now, and no more."""
        up, down = connection.up, connection.down
        self._ask(connection, connection.client, reads=up.wants, writes=down.blocked)
        if connection.server is not None:
            reads = connection.connected and down.wants
            self._ask(connection, connection.server, reads=reads, writes=up.blocked)

    def _ask(self, connection: Connection, sock: socket.socket, *, reads: bool, writes: bool) -> None:
        mask = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
        before = connection.masks.get(sock, 0)
        if mask == before:
            return
        connection.masks[sock] = mask
        if not mask:
            self._selector.unregister(sock)
        elif not before:
            self._selector.register(sock, mask, connection)
        else:
            self._selector.modify(sock, mask, connection)

    def _close(self, connection: Connection, how: Callable[[socket.socket], None]) -> None:
        if connection.closed:
            return
        connection.closed = True
        for sock in (connection.client, connection.server):
            if sock is not None:
                self._ask(connection, sock, reads=False, writes=False)
                how(sock)
        connection.up.queue.clear()
        connection.down.queue.clear()
        with self._lock:
            self._connections.pop(connection, None)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _pass_on(self, now: float) -> None:
        """The fault is over: let go of what is held; close who has had an answer and asks nothing."""
        for connection in list(self._connections):
            connection.shaper.shape = None
            for piece in connection.down.queue:
                if piece.release_at > now:
                    piece.release_at, piece.since = now, None  # cut short by us: no measure of the fault
            if connection.head is not None:
                self._guarded(connection, self._pass_head, connection)
            if connection.down.queue and not connection.down.blocked:
                self._guarded(connection, self._pump, connection, connection.down)
            done = connection.complete or now - connection.active_at > QUIET_S
            if not connection.closed and connection.idle and done:
                self._close(connection, socket.socket.close)

    def _end(self) -> None:
        for connection in list(self._connections):
            # A reset arrives whatever is queued; an end behind data that waits would come when nobody translates it.
            self._close(connection, socket.socket.close if connection.idle else _reset)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()


def answer_of(shape: Shape) -> bytes:
    """Our own answer, as an OpenAI server would word it."""
    reason = {429: "Too Many Requests", 503: "Service Unavailable"}.get(shape.status, "Error")
    body = b'{"error": {"message": "%s", "type": "drill", "code": %d}}' % (reason.encode(), shape.status)
    lines = [f"HTTP/1.1 {shape.status} {reason}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if shape.retry_after_s is not None:
        lines.append(f"Retry-After: {shape.retry_after_s}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def original_destination(sock: socket.socket) -> Address:
    """Where a redirected connection was going: v4, v6, or v4 on our v6 listener. Raises OSError: not redirected."""
    if sock.family == socket.AF_INET6 and not sock.getsockname()[0].startswith("::ffff:"):
        raw = sock.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
        port, flow, host = struct.unpack("!2xHI16s", raw[:24])
        return (socket.inet_ntop(socket.AF_INET6, host), port, flow, struct.unpack("=I", raw[24:28])[0])
    raw = sock.getsockopt(socket.IPPROTO_IP, SO_ORIGINAL_DST, 16)
    port, host = struct.unpack("!2xH4s", raw[:8])
    return (socket.inet_ntop(socket.AF_INET, host), port)


def listen(port: int) -> socket.socket:
    """Listen on every address, v6 too where there is v6: REDIRECT picks the address that the packet came to."""
    with contextlib.suppress(OSError):
        return _listen(socket.AF_INET6, "::", port)
    return _listen(socket.AF_INET, "0.0.0.0", port)  # noqa: S104  (only what was redirected is served)


def _listen(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def enter_netns(path: Path) -> None:
    """Move this thread, and nobody else, into a network namespace. Raises OSError; needs CAP_SYS_ADMIN."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    with path.open("rb") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}", str(path))


def plain_address(text: str) -> str:
    """An address as both we and the kernel's tools write it: no scope, no brackets, v4 as v4."""
    address = ipaddress.ip_address(text.strip("[]").partition("%")[0].strip("[]"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _end(name: Address) -> tuple[str, int]:
    return plain_address(name[0]), int(name[1])


def _receive(sock: socket.socket) -> bytes | None:
    """Some bytes, b"" at the end, None where there is nothing yet."""
    try:
        return sock.recv(RECV_BYTES)
    except BlockingIOError:
        return None


def _reset(sock: socket.socket) -> None:
    """Close with a reset, as the other side did."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _room_for_connections() -> int:
    """How many connections we have descriptors for: two each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(16, (min(soft, 20_000) - 128) // 2)

