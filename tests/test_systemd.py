"""deploy/systemd: the units are clean, hardened, and still able to do their work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from drills.faults.table import FAULTS
from drills.model import Drill
from drills.unit import drop_in
from tests.needs import find, need

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "systemd"
UNIT = (FOLDER / "tocsin.service").read_text()
DRILLD = (FOLDER / "tocsin-drilld.service").read_text()
EXPOSURE_LIMIT = 2.5
# Of the drill daemon: as it stands, with the enabled drills, where one works in another network namespace, as root.
DRILLD_LIMIT, DROP_IN_LIMIT, ELSEWHERE_LIMIT, ROOT_LIMIT = 2.0, 3.0, 3.7, 3.7
HERE = {
    "process-kill": Drill("d", "process-kill", target={"engine": "a", "port": 8000}),
    "engine-hang": Drill("d", "engine-hang", target={"engine": "a", "port": 8000}),
    "packet-loss": Drill("d", "packet-loss", target={"engine": "a", "port": 8000}),
    "upstream-timeout": Drill("d", "upstream-timeout", target={"engine": "a", "port": 8000, "address": "127.0.0.1"}),
    "disk-full": Drill("d", "disk-full", target={"path": "/srv/spool"}, params={"path": "/srv/spool"}),
    "pod-kill": Drill("d", "pod-kill", target={"namespace": "llm", "selector": "app=vllm"}),
}
AS_ROOT = {
    "gpu-reset": Drill("d", "gpu-reset", target={"gpu": "GPU-1"}, params={"mode": "reset"}),
    "gpu-reset synthetic": Drill("d", "gpu-reset", target={"gpu": "GPU-1"}),
    "slow-rank": Drill("d", "slow-rank", target={"engine": "a", "gpus": [0, 1]}),
}
ELSEWHERE = Drill("d", "packet-loss", target={"engine": "a", "port": 8000, "netns": 4242})


def settings(key: str, unit: str = UNIT) -> list[str]:
    """All values that a unit gives to `key`, in order."""
    return re.findall(rf"^{key}=(.*)$", unit, flags=re.MULTILINE)


def analyze(unit: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on a unit file; it needs no running systemd."""
    command = [find("systemd-analyze") or "", *arguments, str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy that starts a program which is here: verify refuses a unit whose binary is absent."""
    need("systemd-analyze", "kill")
    unit = tmp_path / "tocsin.service"
    unit.write_text(UNIT.replace("/opt/tocsin/bin/tocsin", "/bin/true"))
    return unit


def test_verify_is_clean(installed: Path) -> None:
    """An unknown key is only a line on stderr and exit 0: a hardening that never was, behind a typing error."""
    verified = analyze(installed, "verify")
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    installed.write_text(installed.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in analyze(installed, "verify").stderr


def test_exposure_stays_low(installed: Path) -> None:
    """A watcher that reads every engine and talks to the network must be no way into the node."""
    assert exposure(installed) <= EXPOSURE_LIMIT


def exposure(unit: Path) -> float:
    """0 (all closed) to 10, as systemd-analyze judges a unit and its drop-ins."""
    told = analyze(unit, "security", "--offline=true", "--no-pager")
    found = re.search(rf"Overall exposure level for {re.escape(unit.name)}: ([0-9.]+)", told.stdout)
    assert found, told.stdout + told.stderr
    return float(found[1])


def test_the_unit_leaves_the_agent_what_it_needs() -> None:
    """Hardened until NVML could not open its devices, the agent saw a node without GPUs, and said healthy."""
    assert settings("CapabilityBoundingSet") == settings("AmbientCapabilities") == ["CAP_SYSLOG"]
    assert settings("DeviceAllow") == ["char-nvidia* rw", "/dev/kmsg r"]
    assert not {"PrivateDevices", "ProtectKernelLogs", "PrivateNetwork", "PrivateUsers"} & set(
        re.findall(r"^(\w+)=", UNIT, flags=re.MULTILINE)
    )
    assert settings("StateDirectory") == settings("RuntimeDirectory") == ["tocsin"]  # /var/lib/tocsin, /run/tocsin


def test_a_hung_or_dead_agent_comes_back() -> None:
    """The agent died at 3 a.m., systemd gave up after five tries, and the quiet night was no quiet night."""
    assert settings("Type") == ["notify"]
    assert settings("NotifyAccess") == ["main"]
    assert settings("WatchdogSec") == ["60"]
    assert settings("Restart") == ["always"]
    assert settings("StartLimitIntervalSec") == ["0"]


def test_the_user_is_made(tmp_path: Path) -> None:
    """The unit named a user that nothing had created: 217/USER."""
    need("systemd-sysusers", "root")
    command = [find("systemd-sysusers") or "", f"--root={tmp_path}", str(FOLDER / "tocsin.sysusers")]
    (tmp_path / "etc").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"\n{settings('User')[0]}:" in "\n" + (tmp_path / "etc" / "passwd").read_text()


# The drill daemon


def install_drilld(folder: Path, faults: str) -> Path:
    """The drill daemon's unit with a drop-in, as `tocsin drill unit -o` writes it, and a program that is here."""
    need("systemd-analyze", "kill")
    unit = folder / "tocsin-drilld.service"
    unit.write_text(DRILLD.replace("/opt/tocsin/bin/tocsin", "/bin/true"))
    (folder / f"{unit.name}.d").mkdir()
    (folder / f"{unit.name}.d" / "faults.conf").write_text(faults)
    return unit


def test_drilld_without_a_drill_has_no_capability(tmp_path: Path) -> None:
    """Installed for later, the one daemon that can break things ran with all that it might need one day."""
    unit = install_drilld(tmp_path, drop_in([]))
    verified = analyze(unit, "verify")
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    assert settings("CapabilityBoundingSet", DRILLD) == settings("AmbientCapabilities", DRILLD) == [""]
    assert exposure(unit) <= DRILLD_LIMIT
    (tmp_path / f"{unit.name}.d" / "faults.conf").write_text("[Service]\nAmbientCapability=\n")
    assert "AmbientCapability" in analyze(unit, "verify").stderr  # a drop-in is looked at as well


@pytest.mark.parametrize(
    ("drills", "limit"),
    [
        *(([drill], DROP_IN_LIMIT) for drill in HERE.values()),
        (list(HERE.values()), DROP_IN_LIMIT),
        ([ELSEWHERE], ELSEWHERE_LIMIT),
        ([*HERE.values(), ELSEWHERE], ELSEWHERE_LIMIT),
        *(([drill], ROOT_LIMIT) for drill in AS_ROOT.values()),
    ],
    ids=[*HERE, "all", "elsewhere", "all-and-elsewhere", *AS_ROOT],
)
def test_drop_ins_open_little(tmp_path: Path, drills: list[Drill], limit: float) -> None:
    """One drill was enabled, and the daemon got root: each drop-in is understood as a whole, and opens little."""
    unit = install_drilld(tmp_path, drop_in(drills, "operators"))
    verified = analyze(unit, "verify")
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    assert exposure(unit) <= limit


def test_every_fault_has_its_drop_in() -> None:
    """A fault was added, and its drill refused for want of a capability that nobody had written down."""
    assert sorted({*HERE, *(drill.fault for drill in AS_ROOT.values())}) == sorted(FAULTS)


def test_a_drop_in_of_root_leaves_the_agent_its_state(tmp_path: Path) -> None:
    """systemd gave /var/lib/tocsin to root, whose drilld had StateDirectory= as well, and the agent could not start."""
    faults = drop_in(AS_ROOT.values())
    assert settings("User", faults) == ["root"]
    assert settings("StateDirectory", faults) == settings("RuntimeDirectory", faults) == [""]
    assert "StateDirectory=tocsin" in DRILLD
    assert settings("ReadWritePaths", faults) == ["-/var/lib/tocsin -/run/tocsin", "/run/systemd/system"]
    assert "User" not in drop_in(HERE.values())


def test_what_a_dead_drilld_left_is_undone() -> None:
    """drilld was killed for memory in the middle of a drill, and a node stayed cordoned until somebody looked."""
    assert settings("ExecStopPost", DRILLD) == ["/opt/tocsin/bin/tocsin drill heal"]
    assert settings("Type", DRILLD) == ["notify"]
    assert settings("Restart", DRILLD) == ["always"]
    assert settings("StartLimitIntervalSec", DRILLD) == ["0"]
    # By control-group, its first SIGTERM would reach runner, injectors and prober all at once.
    assert settings("KillMode", DRILLD) == ["mixed"]


def test_agent_and_drilld_share_their_folders() -> None:
    """A restart of the agent took /run/tocsin away, and drilld's socket with it: `tocsin drill abort` found nobody."""
    for unit in (UNIT, DRILLD):
        assert settings("User", unit) == settings("StateDirectory", unit) == settings("RuntimeDirectory", unit)
        assert settings("RuntimeDirectoryPreserve", unit) == ["yes"]
