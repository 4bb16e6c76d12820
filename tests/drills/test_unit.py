"""`tocsin drill unit`: each drill's capabilities suffice for a user who has nothing else, and not one is too many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drills.ledger import read
from drills.model import Drill, State
from drills.unit import capabilities_of, drop_in
from tests.drills.netns import NEEDS, lab, says
from tests.drills.stand_ins import ROOT, tmpfs
from tests.needs import need

# An engine of two processes that belong to another user. Made a stranger here, without a second exec: that user may
# not be able to reach this interpreter. A process that changed its user hides from /proc, as one that was started
# by that user does not: PR_SET_DUMPABLE makes it like any other.
ENGINE = """
import ctypes, os, socket, sys
listening = socket.create_server(("", 0))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)
if os.fork():
    print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""
FORMS = ["process-kill", "engine-hang", "disk-full", "packet-loss", "packet-loss named", "packet-loss elsewhere",
         "upstream-timeout", "upstream-timeout remote", "upstream-timeout named"]  # fmt: skip


@dataclass
class Scene:
    """What the drills act upon."""

    port: int  # of an engine in this network namespace
    elsewhere: tuple[str, int, int]  # of one in another: its name, a process in it, the port
    disk: Path
    folder: Path

    def drill(self, form: str) -> Drill:
        """A drill of one form, as the configuration would make it."""
        fault, _, how = form.partition(" ")
        target: dict[str, Any] = {"port": self.port}
        params: dict[str, Any] = {}
        if how in {"named", "elsewhere"}:
            name, pid, port = self.elsewhere
            target = {"netns": name if how == "named" else pid, "port": port}
        elif how == "remote":
            target = {"port": 8000, "address": "198.51.100.7"}
        elif fault == "disk-full":
            target, params = {"state_dir": str(self.folder)}, {"path": str(self.disk), "leave_bytes": 1 << 20}
        return Drill("d", fault, target=target, params=params)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """An engine of another user's, one more in a network namespace of its own, a small disk."""
    need("setpriv", *NEEDS)
    words = (sys.executable, "-c", ENGINE)
    with lab() as net, tmpfs(tmp_path / "disk", "16m") as disk:
        away = net.namespace("engine")
        there = net.start(away, *words)
        here = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        net.started.append(here)
        yield Scene(int(says(here)), (away.path, there.pid, int(says(there))), disk, tmp_path)


def cannot(scene: Scene, drill: Drill, capabilities: list[str], run: str) -> str:
    """Why one who has only these capabilities cannot plan the drill, put its fault in and take it out; "" if it can.

    Its number is 0, which under `noroot` is a number like any other.
    """
    wanted = "".join(f",+{one.removeprefix('CAP_').lower()}" for one in capabilities)
    command = ["setpriv", "--securebits=+noroot,+noroot_locked", "--no-new-privs"]
    command += [f"--{kind}=-all{wanted}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    command += [sys.executable, "-m", "tests.drills.stand_ins", "run", str(scene.folder / "runs"), drill.fault, run]
    command += [json.dumps(dict(one)) for one in (drill.target, drill.params)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    states = [entry.state for entry in read(scene.folder / "runs" / run)]
    if done.returncode == 0:
        assert {State.PROVEN, State.REVERTED} <= set(states), done.stderr
        return ""
    assert State.PROVEN not in states, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.heavy
@pytest.mark.parametrize("form", FORMS)
def test_each_capability_is_needed_and_no_other(scene: Scene, form: str) -> None:
    """The drop-in lacked CAP_DAC_READ_SEARCH: the drill was refused for want of an engine that it could see."""
    drill = scene.drill(form)
    needed = list(dict.fromkeys(capabilities_of(drill)))
    for number, one in enumerate(needed):
        less = [other for other in needed if other != one]
        assert cannot(scene, drill, less, f"without-{number}") != "", f"{form} does without {one}"
    assert cannot(scene, drill, needed, "with-all") == ""


def settings(*drills: Drill, drill_group: str | None = None) -> list[str]:
    """The lines of a drop-in that say something to systemd."""
    return [line for line in drop_in(drills, drill_group).splitlines() if not line.startswith("#")]


def test_the_enabled_drills_and_no_others_count() -> None:
    """A drill was switched off, and its CAP_NET_ADMIN stayed."""
    kill = Drill("a", "process-kill", target={"engine": "e", "port": 8000})
    loss = Drill("b", "packet-loss", target={"engine": "e", "port": 8000}, enabled=False)
    capabilities = "CAP_DAC_READ_SEARCH CAP_KILL CAP_SYS_PTRACE"

    assert settings() == ["[Service]"]
    assert settings(kill, loss) == [
        "[Service]",
        f"CapabilityBoundingSet={capabilities}",
        f"AmbientCapabilities={capabilities}",
    ]


def test_busy_connections_of_before_are_not_worth_a_capability() -> None:
    """Reading all packets of a node, for the few answers that were under way: the report says what was not covered."""
    late = settings(Drill("a", "upstream-timeout", target={"port": 8000, "address": "10.0.0.7"}))

    assert "AmbientCapabilities=CAP_NET_ADMIN" in late
    assert not [line for line in late if "AF_PACKET" in line]


def test_what_a_filled_disk_needs() -> None:
    """ProtectSystem=strict made the disk read-only for the one that should fill it; and a % means something there."""
    spool = Drill("a", "disk-full", params={"path": "/srv/100% spool"})
    temporary = Drill("b", "disk-full", params={"path": "/var/tmp/x"})

    assert settings(spool) == ["[Service]", 'ReadWritePaths="/srv/100%% spool"', "MemoryMax=infinity"]
    assert settings(temporary) == ["[Service]", 'ReadWritePaths="/var/tmp/x"', "MemoryMax=infinity", "PrivateTmp=no"]


def test_the_socket_can_be_handed_to_the_drill_group() -> None:
    """drill_group was set, and its members were still refused: the unit filters chown, and was not in the group."""
    assert settings(drill_group="operators") == [
        "[Service]",
        "SupplementaryGroups=operators",
        "SystemCallFilter=chown fchownat",
    ]
