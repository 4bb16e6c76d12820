"""drills.supervisor: heals however drilld ended, passes signals on, and leaves no zombie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from drills import proc
from drills.supervisor import HEALS_WITHIN_S, STOPS_WITHIN_S
from tests.drills.stand_ins import ROOT, wait_for

# A supervisor whose drilld and heal are scripts.
SUPERVISOR = """
import sys
from drills.supervisor import Supervisor
words = [sys.executable, "-c"]
sys.exit(Supervisor(["--config", "c"], drilld=[*words, sys.argv[1]], heal=[*words, sys.argv[2]],
                    stops_within_s=float(sys.argv[3]), heals_within_s=5.0).run())
"""
HEAL = "import pathlib; pathlib.Path('healed').write_text('yes')"
WAITS = """
import pathlib, signal, sys
def got(number, _):
    with open("got", "a") as f: f.write(f"{signal.Signals(number).name}\\n")
    if number == signal.SIGTERM: sys.exit(0)
for one in (signal.SIGTERM, signal.SIGHUP): signal.signal(one, got)
pathlib.Path("up").touch()
while True: signal.pause()
"""
STUBBORN = """
import pathlib, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("up").touch()
signal.pause()
"""
# Its grandchild outlives it, as the prober and the holder of a killed runner do.
LEAVES_ORPHANS = """
import os, pathlib, subprocess, sys
script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.3)'])"
for _ in range(3): subprocess.run([sys.executable, "-c", script])
pathlib.Path("pid").write_text(str(os.getpid()))
pathlib.Path("up").touch()
sys.stdin.read()
"""


@contextmanager
def supervised(
    folder: Path, drilld: str, heal: str = HEAL, stops_within_s: float = 30.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor whose drilld is up."""
    command = [sys.executable, "-c", SUPERVISOR, drilld, heal, str(stops_within_s)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.PIPE) as process:
        try:
            wait_for(lambda: (folder / "up").exists())
            yield process
        finally:
            process.kill()


def drilld_of(process: subprocess.Popen[bytes]) -> int:
    """Its child."""
    (child,) = [one for one in proc.descendants(process.pid) if one.ppid == process.pid]
    return child.pid


def test_drilld_that_was_killed_is_healed(tmp_path: Path) -> None:
    """drilld was killed for memory; nobody healed, and the pod's network stayed lossy until the next start."""
    with supervised(tmp_path, WAITS) as process:
        os.kill(drilld_of(process), signal.SIGKILL)
        assert process.wait(30) == 128 + signal.SIGKILL
    assert (tmp_path / "healed").exists()


def test_signals_go_on_and_the_end_is_in_good_order(tmp_path: Path) -> None:
    """kubectl delete pod: drilld hears SIGTERM, ends its run, and then it is healed. SIGHUP reloads."""
    with supervised(tmp_path, WAITS) as process:
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: (tmp_path / "got").exists() and bool((tmp_path / "got").read_text()))
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0
    assert (tmp_path / "got").read_text().split() == ["SIGHUP", "SIGTERM"]
    assert (tmp_path / "healed").exists()


@pytest.mark.heavy
def test_drilld_that_does_not_stop_is_killed_and_healed(tmp_path: Path) -> None:
    """At the end of its grace the kubelet would have killed all, heal as well."""
    with supervised(tmp_path, STUBBORN, stops_within_s=0.3) as process:
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGKILL
    assert (tmp_path / "healed").exists()


@pytest.mark.heavy
def test_orphans_are_reaped(tmp_path: Path) -> None:
    """After a month of drills the pod had 4,000 zombies and no process number left."""
    with supervised(tmp_path, LEAVES_ORPHANS) as process:
        child = int((tmp_path / "pid").read_text())

        def zombies() -> list[int]:
            found = []
            for pid in proc.pids():
                try:
                    seen = proc.stat(pid)
                except ProcessLookupError:
                    continue
                if seen.ppid == process.pid and seen.pid != child:
                    found.append(pid)
            return found

        wait_for(lambda: zombies() == [])
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.heavy
def test_what_could_not_be_healed_is_told(tmp_path: Path) -> None:
    """An exit status of 0 said that all was well."""
    with supervised(tmp_path, WAITS, heal="import sys; sys.exit(7)") as process:
        process.terminate()
        assert process.wait(30) == 7


def test_the_pod_waits_long_enough() -> None:
    """The kubelet's patience ended before heal did."""
    told = yaml.safe_load((ROOT / "deploy/kubernetes/overlays/drills/daemonset.yaml").read_text())
    assert told["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > STOPS_WITHIN_S + HEALS_WITHIN_S


@pytest.mark.heavy
def test_the_real_drilld_under_it(tmp_path: Path) -> None:
    """drilld's own module and heal's command are those that it starts."""
    config = tmp_path / "tocsin.yaml"
    config.write_text(f'state_dir: "{tmp_path}/state"\nsocket: "{tmp_path}/tocsin.sock"\n')
    command = [sys.executable, "-m", "drills.supervisor", "--config", str(config)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for(lambda: (tmp_path / "drilld.sock").exists())
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Clean: nothing of a drill is left." in said
