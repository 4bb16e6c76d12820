"""Ask the running agent over its unix socket. The standard library speaks it (requests does not), and starts fast.

Used by the command line and by the drills.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

CONNECT_S = 1.0
ANSWER_S = 5.0


class NotRunning(Exception):  # noqa: N818  (it says what is the case)
    """No agent answers on this socket; the text says so and what to do."""


class AgentError(Exception):
    """An agent is there and did not give the answer: it hangs, refused or failed. `status`: HTTP's; None: none came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NotPermitted(AgentError):  # noqa: N818
    """The agent runs, and this user may not ask it."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, answer_s: float | None = None) -> None:
        super().__init__("localhost")
        self._path, self.answer_s = path, ANSWER_S if answer_s is None else answer_s

    def connect(self) -> None:
        """Connect to the socket's path instead of a host and port."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.answer_s)


def ask(path: Path, url: str, method: str = "GET", body: Any = None, answer_s: float | None = None) -> Any:
    """The decoded JSON that the agent on the socket `path` answers to `url` ("/check", "/transitions?after=7").

    `body` is sent as JSON. `answer_s`: how long may pass without a byte of the answer; None: ANSWER_S.

    Raises:
        NotRunning: no agent is there.
        NotPermitted: this user may not talk to it.
        AgentError: it does not answer in time, or answers with an error.
    """
    connection = _UnixConnection(path, answer_s)
    try:
        connection.request(method, url, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        answer = reply.read()
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as fault:
        raise NotRunning(
            f"no agent answers on {path}; start it with `systemctl start tocsin` or `tocsin run`,"
            " or name its configuration with --config"
        ) from fault
    except PermissionError as fault:
        raise NotPermitted(
            f"{path}: permission denied; use sudo, or join the group that owns the socket (`ls -l {path}` tells)"
        ) from fault
    except TimeoutError as fault:
        raise AgentError(
            f"the agent on {path} did not answer within {connection.answer_s:g} s; look at `journalctl -u tocsin`"
        ) from fault
    except (OSError, http.client.HTTPException) as fault:
        raise AgentError(f"the agent on {path} broke off: {fault!r}; look at `journalctl -u tocsin`") from fault
    finally:
        connection.close()
    return _decoded(path, url, reply.status, answer)


def _decoded(path: Path, url: str, status: int, body: bytes) -> Any:
    if status != http.client.OK:
        raise AgentError(f"the agent on {path} answered {status}: {body.decode(errors='replace').strip()}", status)
    try:
        return json.loads(body)
    except ValueError as fault:
        raise AgentError(f"{path}{url} is not JSON: is that Tocsin's socket?", status) from fault


def release_nvml(path: Path, for_s: float | None = None) -> Any:
    """Have the agent close its NVML handles, for `for_s` seconds or until reopen_nvml. Raises as `ask` does."""
    return ask(path, "/nvml/release" if for_s is None else f"/nvml/release?for={for_s:.3f}s", "POST")


def expect_kernel_line(path: Path, line: str, for_s: float) -> Any:
    """Tell the agent that root is about to write exactly this line into the kernel's log. Raises as `ask` does."""
    return ask(path, "/drills/kernel-line", "POST", {"line": line, "for_s": for_s})


def reopen_nvml(path: Path) -> Any:
    """Have the agent open NVML again. Raises as `ask` does."""
    return ask(path, "/nvml/reopen", "POST")
