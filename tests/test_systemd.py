"""deploy/systemd: the unit is clean, hardened, and still able to do the agent's work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.needs import find, need

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "systemd"
UNIT = (FOLDER / "tocsin.service").read_text()
EXPOSURE_LIMIT = 2.5


def settings(key: str) -> list[str]:
    """All values that the unit gives to `key`, in order."""
    return re.findall(rf"^{key}=(.*)$", UNIT, flags=re.MULTILINE)


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
    told = analyze(installed, "security", "--offline=true", "--no-pager")
    found = re.search(r"Overall exposure level for tocsin\.service: ([0-9.]+)", told.stdout)
    assert found, told.stdout + told.stderr
    assert float(found[1]) <= EXPOSURE_LIMIT, told.stdout


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
