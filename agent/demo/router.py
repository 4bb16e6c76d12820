"""The router in front of the engines: a real nginx where one is installed, else a small one of ours.

Both send each request to the next engine, and one that an engine refuses to the other.
"""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

READ_BYTES = 65536
CONNECT_S = 60.0
NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
{user}
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi; client_body_buffer_size 1m;
    upstream engines {{ {servers} keepalive 32; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
            proxy_connect_timeout 1s; proxy_read_timeout 60s;
            proxy_next_upstream error timeout http_502 non_idempotent;
        }}
    }}
}}
"""


def nginx() -> str | None:
    """Where nginx is; Debian keeps it where an ordinary user's PATH does not look."""
    return shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))


def nginx_command(program: str, folder: Path, port: int, engines: Sequence[int]) -> list[str]:
    """What to start, in the foreground; writes its configuration into `folder`."""
    servers = " ".join(f"server 127.0.0.1:{one} max_fails=1 fail_timeout=10s;" for one in engines)
    user = "user root;" if os.geteuid() == 0 else ""  # its folders are ours alone
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, servers=servers, port=port, user=user))
    return [program, "-c", str(path), "-e", str(folder / "nginx.log")]


class _Handler(BaseHTTPRequestHandler):
    engines: Sequence[int]
    turns = itertools.count()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Quiet."""

    def do_GET(self) -> None:
        """Whatever it is, to the next engine."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        turn = next(self.turns)
        self.close_connection = True
        for number in range(len(self.engines)):
            port = self.engines[(turn + number) % len(self.engines)]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CONNECT_S)
            try:
                connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            self._pass_on(answer)
            connection.close()
            return
        self.send_error(502, "no engine answers")

    do_POST = do_GET  # noqa: N815  (http.server's name)

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while chunk := answer.read1(READ_BYTES):
                self.wfile.write(chunk)
                self.wfile.flush()
        except (OSError, http.client.HTTPException):  # either side has gone: the other sees a stream that breaks off
            return


class Router(ThreadingHTTPServer):
    """Ours, in a thread of this process. Says nothing of a client that gave up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, engines: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", port), type("Handler", (_Handler,), {"engines": engines}))
        threading.Thread(target=self.serve_forever, name="router", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """That is its own affair."""
