"""What the test servers share: connections that can be cut as the end of a process would cut them."""

from __future__ import annotations

import socket
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class CutServer(ThreadingHTTPServer):
    """Knows its open connections, so that the test's server can end them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def open_connections(self) -> tuple[socket.socket, ...]:
        return tuple(self._open)

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is what many tests are about: no traceback for it."""


def reset(sock: socket.socket) -> None:
    """RST instead of FIN, also while another thread sits in a call on it."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)
        sock.close()
    except OSError:
        return
