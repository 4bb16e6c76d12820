"""What a test needs of the machine beyond Python: a compiler, root, a Debian package.

Missing, the test is skipped and says what to install; under TOCSIN_CI=1 (`.ci/run`) it fails, since there a skip
would hide that something was never tried.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# Where a need has another name than its program, or its package has another name than both.
PROGRAMS = {"alertmanager": "prometheus-alertmanager"}
PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "gcc": "gcc libc6-dev",
    "ip": "iproute2",
    "kubectl": "kubernetes-client",
    "mkfs.ext4": "e2fsprogs",
    "nft": "nftables",
    "nginx": "nginx-light",
    "promtool": "prometheus",
    "setpriv": "util-linux",
    "kill": "procps",
    "journalctl": "systemd",
    "systemctl": "systemd",
    "systemd-analyze": "systemd",
    "systemd-sysusers": "systemd",
    "unshare": "util-linux",
}
ROOT = Path(__file__).resolve().parents[1]
FROM_PYPI = ("vllm-router", "vllm")  # not Debian's
VLLM = ROOT / ".venv-vllm/.installed"  # written when it is whole; it is run by its own Python
# Debian keeps iptables, nft and ip where an ordinary user's PATH does not look.
EXTRA_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/lib/systemd", str(ROOT / ".venv-router/bin"))


def find(tool: str) -> str | None:
    """The path of a program, on PATH or in the sbin folders; None where it is not installed."""
    program = PROGRAMS.get(tool, tool)
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *EXTRA_PATH)))


def missing(tool: str) -> str | None:
    """Why `tool` ("root", "loop", or a program by name) cannot be had here and what to do; None where it can."""
    if tool == "root":
        return None if os.geteuid() == 0 else "needs root: run it as root, or in a container"
    if tool == "loop":
        return None if Path("/dev/loop-control").exists() else "needs loop devices: a container that has them, or a VM"
    if VLLM.exists() if tool == "vllm" else find(tool):
        return None
    if tool in FROM_PYPI:
        return f"needs {tool}: make {tool}, which installs it into a virtual environment of its own"
    package = PACKAGES.get(tool, PROGRAMS.get(tool, tool))
    return f"needs {tool}: apt-get install {package}"


def need(*tools: str) -> None:
    """Skip the running test unless every one of `tools` is here; under TOCSIN_CI=1 fail it instead."""
    reasons = [reason for tool in tools if (reason := missing(tool))]
    if not reasons:
        return
    if os.environ.get("TOCSIN_CI") == "1":
        pytest.fail(f"{'; '.join(reasons)} (TOCSIN_CI=1: nothing may be skipped)", pytrace=False)
    pytest.skip("; ".join(reasons))
