"""What tests of the drills' processes share: an engine, a runner to be killed, a fault with a known bad end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from drills import holder, proc
from drills.faults.table import FAULTS
from drills.ledger import Ledger
from drills.model import Command, Drill, Left, Plan, ProcessId, State

ROOT = Path(__file__).resolve().parents[2]
HOLDER = (sys.executable, "-m", "tests.drills.stand_ins", "hold")


def wait_for(condition: Callable[[], bool], within_s: float = 30.0) -> float:
    """Wait for a condition; the seconds that it took. Fails the test when it does not come true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"not within {within_s:g} s"
        time.sleep(0.002)
    return time.monotonic() - start


class Engine:
    """A page and a core, see engine_stub."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, port: int) -> None:
        self.process = process
        self.folder = folder
        self.port = port
        self.page = proc.identify(process.pid)
        (core,) = proc.descendants(process.pid)
        self.core: ProcessId = proc.identify(core.pid)

    def count(self) -> int:
        """How far the core has counted."""
        return int((self.folder / "core.count").read_text() or 0)

    def runs_on(self) -> bool:
        """Whether the core counts, and none of its threads is stopped."""
        if set(proc.threads(self.core.pid).values()) & {"t", "T"}:
            return False
        before = self.count()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            if self.count() > before:
                return True
            time.sleep(0.002)
        return False


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """Start one, and end all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.drills.engine_stub", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        started = Engine(process, folder, int(process.stdout.readline()))
        try:
            yield started
        finally:
            process.stdin.close()
            process.wait(30)
            assert proc.wait_ended(started.core, 5.0)


@contextmanager
def streaming(port: int) -> Iterator[subprocess.Popen[str]]:
    """An engine of two processes (streaming_engine.py) on loopback, once it listens."""
    words = ["--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "tests.drills.streaming_engine", *words], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own, as root."""
    from tests.needs import need  # which has pytest in it, and a runner has not

    need("root")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tocsin-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder of root's that others may look into, unlike pytest's own."""
    from tests.needs import need

    need("root")
    with tempfile.TemporaryDirectory(prefix="tocsin-test-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """To files and sockets this thread is another user, without root's rights."""
    libc = ctypes.CDLL(None)
    libc.setfsgid(NOBODY)
    libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)


# A runner that ends in good order when it is told to, if it heeds that.
RUNNER = """
import os, signal, sys, time
from pathlib import Path
import msgspec
from drills import ledger, proc
from drills.model import State
folder, heeds = Path(sys.argv[1]), sys.argv[2] == "heeds"
opened = ledger.Ledger.open(folder)
opened.note(runner=msgspec.to_builtins(proc.identify(os.getpid())))
told = []  # no Event: a handler that sets one can interrupt the wait that holds its lock
signal.signal(signal.SIGTERM, lambda *_: told.append(1) if heeds else None)
opened.write(State.BASELINE)
print("up", flush=True)
while not told:
    time.sleep(0.05)
time.sleep(0.2)
opened.write(State.REVERTED)
opened.write(State.REPORTED, by=ledger.aborted_by(folder))
sys.exit(5)
"""


@contextmanager
def runner_of(folder: Path, *, heeds: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a run, as far as its ledger tells."""
    command = [sys.executable, "-c", RUNNER, str(folder), "heeds" if heeds else "not"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def new_run(root: Path, plan: Plan) -> tuple[Path, Ledger]:
    """The folder and ledger of a run in BASELINE, of a runner that is this process."""
    folder = root / plan.run
    ledger = Ledger.create(folder, {"run": plan.run, "runner": msgspec.to_builtins(proc.identify(os.getpid()))})
    ledger.write(State.BASELINE)
    return folder, ledger


def arm(
    folder: Path, ledger: Ledger, plan: Plan, deadline_s: float = 20.0, command: Sequence[str] = holder.COMMAND
) -> holder.Holder:
    """Start the holder and write the plan down, as a runner does."""
    held = holder.start(folder, deadline_s, command)
    held.wait_up(10.0)
    ledger.write(State.ARMED, plan=msgspec.to_builtins(plan), holder=msgspec.to_builtins(held.process_id))
    return held


def run_once(root: Path, fault: str, run: str, target: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """A whole run with next to no time between its states, to be killed in one of them."""
    plan = FAULTS[fault].plan(Drill("torture", fault, target=target, params=params), run)
    folder, ledger = new_run(root, plan)
    held = arm(folder, ledger, plan, 10.0)
    ledger.write(State.INJECTING)
    held.inject(5.0)
    ledger.write(State.PROVEN)
    time.sleep(params.get("hold_s", 0.1))
    ledger.write(State.REVERTING)
    left = held.revert(5.0)
    ledger.write(State.ORPHANED if left else State.REVERTED)
    ledger.write(State.REPORTED)


class Marker:
    """A fault that outlives every process: a file. `bad` in its facts makes the injection end badly."""

    name = "marker"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Name the file."""
        return Plan(self.name, run, [], [], [Command(f"rm {drill.params['file']}")], dict(drill.params))

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Marker:
        """Make the file, slowly or by a slow child, or fail half-way."""
        file = Path(plan.facts["file"])
        bad = plan.facts.get("bad")
        if bad == "hangs":
            file.with_suffix(".hangs").touch()
            time.sleep(60.0)
        if bad == "child":
            script = f"import time, pathlib; time.sleep(0.4); pathlib.Path({str(file)!r}).touch()"
            child = subprocess.Popen([sys.executable, "-c", script], pass_fds=injector_fds)
            file.with_suffix(".child").write_text(str(child.pid))
            child.wait()
        file.touch()
        if bad == "fails":
            raise OSError(5, "half-way")
        return self

    def sample(self) -> Mapping[str, Any]:
        """No evidence."""
        raise ValueError("the counter is gone")

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Never."""
        return False, "no evidence"

    def left(self, plan: Plan) -> list[Left]:
        """The file."""
        file = plan.facts["file"]
        return [Left(f"file {file}", f"rm {file}")] if Path(file).exists() else []

    def undo(self, plan: Plan | None = None) -> None:
        """Remove the file; without a plan it is the holder's undo, which does nothing here."""
        if plan is not None and not plan.facts.get("stays"):
            Path(plan.facts["file"]).unlink(missing_ok=True)


MARKER = Marker()


def main(arguments: Sequence[str]) -> int:
    """Be a holder that knows `marker`, or a runner."""
    if arguments[0] == "hold":
        FAULTS["marker"] = MARKER
        return holder.main(arguments[1:])
    root, fault, run, target, params = arguments[1:]
    run_once(Path(root), fault, run, msgspec.json.decode(target), msgspec.json.decode(params))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
