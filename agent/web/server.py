"""Waitress on a TCP address and on a unix socket, each with its own threads: the network cannot starve the CLI."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import WSGITask

from agent.threads import begin, beginning

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

log = structlog.get_logger()

SOCKET_MODE = 0o660
PEER_UID = "tocsin.peer_uid"  # who asks over the unix socket, in the environ of his request
_PEER_CRED = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED
MAX_SOCKET_PATH = 107  # bytes, of Linux
WORKERS = 2
STOP_WITHIN_S = 1.0
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
EXHAUSTED_PAUSE_S = 0.2
EXHAUSTED_SAID_EVERY_S = 60.0
LIMITS: dict[str, Any] = {
    "connection_limit": 64,
    "asyncore_use_poll": True,  # select() cannot watch descriptors over 1023
    "asyncore_loop_timeout": 10,  # s between looks for idle connections: an idle server need not wake every second
    "channel_timeout": 30,  # s that an idle or half-sent request may hold a connection
    "max_request_header_size": 16 * 1024,
    "max_request_body_size": 16 * 1024,  # forms and small JSON
    "ident": "tocsin",
}


class CannotServe(Exception):  # noqa: N818  (it says what happened)
    """An address or socket cannot be had; the text says why and what to do."""


class _Task(WSGITask):  # type: ignore[misc]
    """A request over the unix socket: with it goes who asks, as the kernel tells it."""

    def get_environment(self) -> dict[str, Any]:
        """WSGI's environ."""
        environ: dict[str, Any] = super().get_environment()
        told = self.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CRED.size)
        return {**environ, PEER_UID: _PEER_CRED.unpack(told)[1]}


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection over the unix socket."""

    task_class = _Task


class Server:
    """A running server: `address` is what to connect to ("127.0.0.1:9959", or the socket's path)."""

    def __init__(self, app: WSGIApplication, sock: socket.socket, address: str, after: Callable[[], None]) -> None:
        self.address = address
        self._after = after
        self._map: dict[int, Any] = {}
        # It warns of every request that waits a millisecond for one of two threads.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        with beginning(f"the web server at {address}"):
            self._server: Any = create_server(app, map=self._map, sockets=[sock], threads=WORKERS, **LIMITS)
        self._server.accept = _patient(self._server.accept, address)
        if sock.family == socket.AF_UNIX:
            self._server.channel_class = _Channel
        self._thread = begin(self._server.run, f"web {address}")

    def close(self) -> None:
        """Stop listening, cut connections, end the threads. Takes at most 2 x STOP_WITHIN_S; may be called twice."""
        if self._thread.is_alive():
            # The loop's own thread must do it: it sleeps in select() on these very descriptors.
            with suppress(OSError):  # it was awake, and has closed what would wake it
                self._server.trigger.pull_trigger(lambda: wasyncore.close_all(self._map))
            self._thread.join(STOP_WITHIN_S)
        self._server.task_dispatcher.shutdown(timeout=STOP_WITHIN_S)
        self._after()


def _patient(accept: Callable[[], Any], address: str) -> Callable[[], Any]:
    """`accept`, which waits a little where no connection can be taken for want of descriptors or memory.

    The caller stays readable: waitress would ask again at once, for ever, and write a traceback each time.
    """
    said_at = -EXHAUSTED_SAID_EVERY_S

    def patient() -> Any:
        nonlocal said_at
        try:
            return accept()
        except OSError as fault:
            if fault.errno not in EXHAUSTED:
                raise
            if time.monotonic() - said_at >= EXHAUSTED_SAID_EVERY_S:
                said_at = time.monotonic()
                log.error("connection_not_taken", address=address, error=fault.strerror)  # noqa: TRY400
            time.sleep(EXHAUSTED_PAUSE_S)
            return None

    return patient


def split_address(listen: str) -> tuple[str, int]:
    """("127.0.0.1", 9959) of "127.0.0.1:9959"; IPv6 in brackets, as in "[::1]:9959".

    Raises:
        CannotServe: it is not host:port.
    """
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not port.isdigit() or int(port) > 65535 or (":" in host and not listen.startswith("[")):
        raise CannotServe(f"listen: {listen!r} is not host:port; write 127.0.0.1:9959, or [::1]:9959 for IPv6")
    return host, int(port)


def serve_tcp(app: WSGIApplication, listen: str) -> Server:
    """Serve on "host:port" (port 0: any free one; see `address`). Of a name's addresses the first IPv4 one is taken.

    Raises:
        CannotServe: the name is unknown, or the address is taken, foreign or not permitted.
    """
    host, port = split_address(listen)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
    except OSError as fault:
        raise CannotServe(f"listen: {listen!r}: {fault.strerror}; give an address of this machine") from fault
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as fault:
        sock.close()
        remedy = {
            errno.EADDRINUSE: "another program (another tocsin?) has it: `ss -ltnp` names it; or choose another port",
            errno.EADDRNOTAVAIL: "this machine has no such address",
            errno.EACCES: "ports under 1024 are root's: choose one above",
        }.get(fault.errno or 0, "choose another address")
        raise CannotServe(f"listen: {listen!r}: {fault.strerror}; {remedy}") from fault
    bound_host, bound_port = sock.getsockname()[:2]
    shown = f"[{bound_host}]" if family == socket.AF_INET6 else bound_host
    return Server(app, sock, f"{shown}:{bound_port}", after=lambda: None)


def _refuse_a_living_one(path: Path) -> None:
    """Raise where somebody answers on the socket `path`, or it is no socket; the file of a dead one is no obstacle."""
    if not path.exists():
        return
    if not path.is_socket():
        raise CannotServe(f"socket: {path} exists and is no socket; move it away, or set `socket:` to another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as fault:
            raise CannotServe(f"socket: {path}: {fault.strerror or fault}; is another agent using it?") from fault
    raise CannotServe(
        f"socket: {path}: an agent answers there already; stop it first (`systemctl stop tocsin`),"
        " or give this one its own `socket:`, `listen:` and `state_dir:`"
    )


def serve_unix(app: WSGIApplication, path: Path) -> Server:
    """Serve on the unix socket `path`, mode 0660; makes its folder, replaces the file that a killed agent left.

    Raises:
        CannotServe: another agent is alive there, or the path cannot be used.
    """
    if len(os.fsencode(path)) >= MAX_SOCKET_PATH:
        raise CannotServe(f"socket: {path}: longer than {MAX_SOCKET_PATH - 1} bytes, which Linux cannot; shorten it")
    _refuse_a_living_one(path)
    # Bound beside its place and then renamed: nobody ever sees it with a wider mode, and a stale file is replaced.
    beside = path.with_name(path.name + "~")
    sock = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        sock.bind(str(beside))
        beside.chmod(SOCKET_MODE)
        sock.listen()
        beside.rename(path)
        ours = path.stat()
    except OSError as fault:
        sock.close()
        remedy = f"{path.parent} must be a folder that this user may write; or set `socket:` to a path in one"
        raise CannotServe(f"socket: {path}: {fault.strerror}; {remedy}") from fault

    def remove() -> None:
        try:
            if os.path.samestat(path.stat(), ours):
                path.unlink()
        except OSError:
            pass  # somebody else removed it, or we may not: a dead socket file harms nobody

    return Server(app, sock, str(path), after=remove)
