"""The client of the unix socket: what it says when the agent is absent, forbidden, hung or broken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent import client
from agent.client import AgentError, NotPermitted, NotRunning, ask
from agent.web.app import PRIVATE, make_app
from agent.web.server import serve_unix
from tests.test_web import CATALOGUE, NOW, FakeView


@contextmanager
def answering(path: Path, answer: bytes | None) -> Iterator[None]:
    """Somebody on the socket `path` who sends `answer` to one caller and hangs up (None: never says a word)."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        release = threading.Event()

        def serve() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(65536)
                if answer is None:
                    release.wait(30)
                else:
                    caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        release.set()
        thread.join(10)


def test_the_agent_answers(tmp_path: Path) -> None:
    """One question, one decoded answer; actions go by POST."""
    view = FakeView()
    server = serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), tmp_path / "t.sock")
    assert ask(tmp_path / "t.sock", "/check") == view.checked
    assert [t["id"] for t in ask(tmp_path / "t.sock", "/transitions?after=2")] == [3]
    assert client.release_nvml(tmp_path / "t.sock", 60) == {"released": True}
    assert client.release_nvml(tmp_path / "t.sock") == {"released": True}
    assert view.nvml == [60.0, None]
    assert client.reopen_nvml(tmp_path / "t.sock") == {"released": False}
    view.broken = True
    with pytest.raises(AgentError, match="answered 500: Tocsin failed to answer; its log has the reason") as caught:
        ask(tmp_path / "t.sock", "/check")
    assert caught.value.status == 500
    server.close()


def test_no_agent_says_how_to_start_one(tmp_path: Path) -> None:
    """A missing file, and the file of a killed agent, both mean: it does not run."""
    with pytest.raises(NotRunning, match="systemctl start tocsin"):
        ask(tmp_path / "t.sock", "/check")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    with pytest.raises(NotRunning, match=r"dead\.sock"):
        ask(tmp_path / "dead.sock", "/check")


def test_a_forbidden_socket_says_whom_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """'Not running' would be a lie: it runs, and this user may not ask it. (Root may everything, so it is played.)"""

    def refuse(self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("agent.client._UnixConnection.connect", refuse)
    with pytest.raises(NotPermitted, match=r"use sudo, or join the group that owns the socket \(`ls -l "):
        ask(tmp_path / "t.sock", "/check")


def test_a_hung_agent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and never answers: the person at the terminal gets a sentence, not a frozen prompt."""
    monkeypatch.setattr(client, "ANSWER_S", 0.2)
    with (
        answering(tmp_path / "t.sock", None),
        pytest.raises(AgentError, match=r"did not answer within 0\.2 s; look at `journalctl -u tocsin`"),
    ):
        ask(tmp_path / "t.sock", "/check")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "broke off"),
        (b"220 mail.example ESMTP\r\n", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "is not JSON: is that Tocsin's socket?"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone", "answered 404: none"),
    ],
)
def test_a_broken_answer_is_an_error_not_a_traceback(tmp_path: Path, answer: bytes, says: str) -> None:
    """An agent killed in mid-answer, and a socket that is somebody else's."""
    with answering(tmp_path / "t.sock", answer), pytest.raises(AgentError, match=says):
        ask(tmp_path / "t.sock", "/check")
