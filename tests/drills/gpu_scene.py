"""A node with GPUs for the drills: NVML stand-in, device files, an engine, scripted `nvidia-smi` and `systemctl`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from drills import gate, gpu, xid_line
from drills.faults import gpu_reset
from drills.model import Drill
from tests.fake_nvml.build import build

UUID = "GPU-5d1a4b3c-0000-4000-8000-000000000001"
OTHER = "GPU-5d1a4b3c-0000-4000-8000-000000000002"
BUS = "00000000:1A:00.0"
UNIT = "vllm.service"
NODE: dict[str, Any] = {
    "defaults": {"power_limit_w": 700, "power_least_w": 200, "power_most_w": 700, "sm_clock": 1980, "utilization": 97,
                 "persistence": 0, "fields": {"230": {"value": 0, "type": "uint"}}},
    "gpus": [{"uuid": UUID, "pci": "0000:1A:00.0", "minor": 3}, {"uuid": OTHER, "pci": "0000:1B:00.0", "minor": 0}],
}  # fmt: skip
# What the driver's tool says, as operators have reported it.
IN_USE = f"""The following GPUs could not be reset:
  GPU {BUS}: In use by another client

1 device is currently being used by one or more other processes (e.g. Fabric Manager, CUDA application, ...).
"""
PARTIAL = f"""GPU 00000000:1B:00.0 was successfully reset.
The following GPUs could not be reset:
  GPU {BUS}: Unknown Error
"""
DONE = f"GPU {BUS} was successfully reset.\nAll done.\n"
# `answer` holds the exit status and the text of a reset; `after` is the scenario that a reset leaves.
SMI = """#!/bin/sh
cd "$(dirname "$0")" || exit 9
echo "$*" >> asked
case "$*" in
  *"-pm 0"*) sed 's/"persistence": 1/"persistence": 0/' scenario.json > new && mv new scenario.json; exit 0;;
  *"-pm 1"*) sed 's/"persistence": 0/"persistence": 1/' scenario.json > new && mv new scenario.json; exit 0;;
  *"-pl "*) [ -e refuses ] && { echo "Insufficient Permissions"; exit 4; }
    sed "s/\\"own_w\\": 0, \\"power_limit_w\\": [0-9.]*/\\"own_w\\": 0, \\"power_limit_w\\": $4/" scenario.json > new
    mv new scenario.json; exit 0;;
esac
[ -e hang ] && exec sleep 600.0417
[ -e slow ] && sleep 0.5
tail -n +2 answer
status=$(head -n 1 answer)
[ "$status" = 0 ] && [ -e after ] && cp after new && mv new scenario.json
exit "$status"
"""
SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> "$(dirname "$0")/asked"
"""
ENGINE = """
import socket, sys
held = open(sys.argv[1])
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""
STRANGER = "import sys\nheld = open(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()\n"


class Node:
    """All of it, in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.dev, self.units, self.kmsg = folder / "dev", folder / "units", folder / "kmsg"
        for made in (self.dev, self.units):
            made.mkdir()
        for name in ("nvidia0", "nvidia3", "nvidiactl"):
            (self.dev / name).touch()
        self.kmsg.touch()
        self.opt_in = folder / "GPU-RESET-ALLOWED"
        self.opt_in.touch()
        self.socket = folder / "agent.sock"  # nobody listens: no agent holds anything
        self.units_of: dict[int, str] = {}
        self.pods_of: dict[int, str] = {}  # UIDs
        for name, script in (("nvidia-smi", SMI), ("systemctl", SYSTEMCTL)):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        self.play(NODE)
        self.answers(0, DONE)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(build()))
        monkeypatch.setenv("TOCSIN_FAKE_NVML", str(folder / "scenario.json"))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        monkeypatch.setattr(gpu, "DEV", self.dev)
        monkeypatch.setattr(gate, "RUNTIME", self.units)
        monkeypatch.setattr(gpu_reset, "OPT_IN", self.opt_in)
        monkeypatch.setattr(xid_line, "KMSG", self.kmsg)
        monkeypatch.setattr(gpu, "cgroups_of", self._cgroups_of)

    def _cgroups_of(self, pid: int) -> str:
        if pid in self.pods_of:
            return f"0::/kubepods.slice/kubepods-pod{self.pods_of[pid].replace('-', '_')}.slice/cri-x.scope\n"
        return f"0::/system.slice/{self.units_of.get(pid, 'session-1.scope')}\n"

    def play(self, scenario: Mapping[str, Any]) -> None:
        """What NVML tells from now on."""
        (self.folder / "scenario.json").write_text(json.dumps(scenario))

    def answers(self, status: int, text: str, after: Mapping[str, Any] | None = None) -> None:
        """What nvidia-smi says of a reset, and the GPUs that there are after it."""
        (self.folder / "answer").write_text(f"{status}\n{text}")
        if after is not None:
            (self.folder / "after").write_text(json.dumps(after))

    def asked(self) -> list[str]:
        """What nvidia-smi and systemctl were asked, in order."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def start(self, script: str, device: str = "nvidia3", unit: str = "") -> tuple[subprocess.Popen[str], str]:
        """A process that holds a device; what it says first."""
        process = subprocess.Popen([sys.executable, "-c", script, str(self.dev / device)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        self.stack.callback(process.wait, 30)
        self.stack.callback(process.kill)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            self.stack.callback(stream.close)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if unit:
            self.units_of[process.pid] = unit
        return process, said

    def engine(self, unit: str = UNIT) -> tuple[subprocess.Popen[str], Drill]:
        """An engine on the first GPU, and the drill that resets it."""
        process, port = self.start(ENGINE, unit=unit)
        return process, self.drill(port=int(port))

    def drill(self, mode: str = "reset", **target: Any) -> Drill:
        """As drills.config makes it."""
        whole = {"gpu": UUID, "gpus": [0], "socket": str(self.socket), "node": "n1", "other_watchers_ok": [], **target}
        return Drill("d", "gpu-reset", target=whole, params={"mode": mode})

    def shut(self) -> list[str]:
        """What of a gate is in systemd's folder."""
        return sorted(str(path.relative_to(self.units)) for path in self.units.rglob("*") if path.is_file())
