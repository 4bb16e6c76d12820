"""/proc: who a process is, whatever it calls itself; who listens; who descends from whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drills import proc
from drills.proc import Stat, parse_stat
from drills.targets import processes_of
from tests.drills.stand_ins import engine, wait_for
from tests.needs import need

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_a_name_with_parentheses() -> None:
    """A process called itself `a) R 1 (x`: split at blanks, its start time was its number of threads."""
    line = "4242 (a) R 1 (x) S 17 4242 4242 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 11 12 13 14\n"
    assert parse_stat(line) == Stat(4242, "a) R 1 (x", "S", 17, 987654)


def test_start_time_is_what_the_machine_says() -> None:
    """Of a process that called itself so, for real: `ps` knows the same parent, and the start is between two reads."""
    hertz = os.sysconf("SC_CLK_TCK")
    before = float(Path("/proc/uptime").read_text().split()[0])
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (x', 0, 0, 0)"
    script = f"{rename}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        after = float(Path("/proc/uptime").read_text().split()[0])
        who = proc.identify(process.pid)
        assert proc.stat(process.pid).ppid == os.getpid()
        process.communicate()
    assert who.comm == "a) R 1 (x"
    assert before - 0.05 <= who.start_ticks / hertz <= after + 0.05


def test_the_number_of_an_ended_process_is_not_it() -> None:
    """The pid was given to the next process, and the undo of a drill continued a stranger."""
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as process:
        who = proc.identify(process.pid)
        assert proc.is_same(who)
        for other in (replace(who, start_ticks=who.start_ticks - 1), replace(who, boot_id="another")):
            assert not proc.is_same(other)
            with pytest.raises(ProcessLookupError, match="is gone; the number may be another's"):
                proc.open_pidfd(other)
            assert proc.end(other, 1.0)
        assert process.poll() is None
        assert not proc.wait_ended(who, 0.0)
        assert proc.end(who, 5.0)
        # Not waited for yet: a zombie has its number still, and nothing of it can act.
        assert proc.stat(process.pid).state == "Z"
        assert not proc.is_same(who)
        assert proc.wait_ended(who, 0.0)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        proc.identify(process.pid)


def test_a_main_thread_that_ended_first() -> None:
    """The first thread was gone, /proc said Z, and the drill took an engine that served on for dead."""
    script = (
        "import ctypes, platform, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60.0,)).start()\n"
        "print(1, flush=True)\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60}.get(platform.machine(), 93), 0)\n"  # exit, of this thread
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(lambda: proc.stat(process.pid).state == "Z")
        who = proc.identify(process.pid)
        assert proc.is_same(who)
        assert process.pid in proc.processes()
        assert len(proc.threads(process.pid)) == 1
        assert proc.end(who, 5.0)
        assert not proc.is_same(who)


def test_who_listens(tmp_path: Path) -> None:
    """The port of an engine names its page, not the client that is connected to it nor the core below."""
    with engine(tmp_path) as stub:
        with socket.create_connection(("127.0.0.1", stub.port)) as client:
            assert proc.listeners(stub.port) == [stub.process.pid]
            assert proc.listeners(client.getsockname()[1]) == []
        assert proc.listeners(stub.port, proc.netns_of(stub.process.pid)) == [stub.process.pid]
        assert proc.listeners(stub.port, 1) == []


def test_listener_on_ipv6() -> None:
    """An engine that listens on :: is in another table of the kernel."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        assert proc.listeners(listening.getsockname()[1]) == [os.getpid()]


@pytest.mark.heavy
def test_who_listens_in_another_network() -> None:
    """Two engines on port 8000, each in a network of its own: the one outside was killed for the one inside."""
    need("root", "unshare")
    listen = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)"
    script = f"{listen}; sys.stdin.read()"
    command = ["unshare", "--net", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inside:
        assert inside.stdout is not None
        port = int(inside.stdout.readline())
        with socket.socket() as outside:
            outside.bind(("127.0.0.1", port))
            outside.listen()
            netns = proc.netns_of(inside.pid)
            assert netns not in {0, proc.netns_of(os.getpid())}
            assert proc.listeners(port, netns) == [inside.pid]
            assert proc.listeners(port) == [os.getpid()]
            assert [who.pid for who in processes_of({"port": port, "netns": inside.pid})["main"]] == [inside.pid]
        inside.communicate()


def test_descent(tmp_path: Path) -> None:
    """The core is below the page, and both are below the test."""
    with engine(tmp_path) as stub:
        assert [one.pid for one in proc.descendants(stub.process.pid)] == [stub.core.pid]
        assert proc.ancestors(stub.core.pid)[:2] == [stub.process.pid, os.getpid()]
        assert len(proc.threads(stub.core.pid)) == 4
        assert proc.command_line(stub.core.pid)[1:] == ["-m", "tests.drills.engine_stub", str(tmp_path), "core"]
        assert proc.tracer_of(stub.core.pid) == 0
    assert proc.threads(stub.core.pid) == {}
    assert proc.command_line(stub.core.pid) == []
