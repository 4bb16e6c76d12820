"""The systemd drop-in of drilld: what its enabled drills need beyond the unit, and no more. Pure.

The unit itself has no capability. Which of them each fault cannot do without is tried in tests/drills/test_unit.py.
A GPU is reset or slowed, and a line of the kernel's log written, by root alone: those drop-ins say so, with few of
root's capabilities. CAP_NET_RAW is not among any of them: with it upstream-timeout would reach busy connections of
before as well as idle ones, and all drills together would be open to more than 3.0 of 10. The report says that those
were not covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from drills.model import Drill

# To see which process of another user listens on a port: /proc/PID/fd, and where its links lead.
LOOK = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
ON_GPUS = frozenset({"gpu-reset", "slow-rank"})
# Root, in folders that stay tocsin's: with StateDirectory= systemd would give root the agent's state.
ROOT = ("User=root", "StateDirectory=", "RuntimeDirectory=", "ReadWritePaths=-/var/lib/tocsin -/run/tocsin")
# nft, ip and ss speak netlink.
NETLINK = "RestrictAddressFamilies=AF_NETLINK"
# Folders that the unit hides, and what shows them.
HIDDEN = {
    "/home": "ProtectHome=no",
    "/root": "ProtectHome=no",
    "/tmp": "PrivateTmp=no",  # noqa: S108  (nothing of ours is put there)
    "/var/tmp": "PrivateTmp=no",  # noqa: S108
}


def drop_in(drills: Iterable[Drill], drill_group: str | None = None) -> str:
    """The text of /etc/systemd/system/tocsin-drilld.service.d/faults.conf."""
    enabled = [drill for drill in drills if drill.enabled]
    names = ", ".join(sorted({drill.fault for drill in enabled})) or "none"
    lines = [
        "# Written by `tocsin drill unit`: what the enabled drills need, and no more. Write it anew when they change.",
        f"# Faults: {names}",
        "[Service]",
    ]
    if any(map(_as_root, enabled)):
        lines += ROOT
    capabilities = " ".join(sorted({one for drill in enabled for one in capabilities_of(drill)}))
    if capabilities:
        lines += [f"CapabilityBoundingSet={capabilities}", f"AmbientCapabilities={capabilities}"]
    if namespaces := " ".join(sorted({one for drill in enabled for one in _namespaces(drill)})):
        lines.append(f"RestrictNamespaces={namespaces}")
    lines += dict.fromkeys(line for drill in enabled for line in _settings(drill))
    if drill_group is not None:
        lines += [
            "# drilld.sock is handed to drill_group; to reach it, its members must be in the group tocsin as well.",
            f"SupplementaryGroups={drill_group}",
            "SystemCallFilter=chown fchownat",
        ]
    return "\n".join(lines) + "\n"


def capabilities_of(drill: Drill) -> Sequence[str]:
    """The capabilities without which a drill can be neither planned nor held."""
    if drill.fault == "process-kill":
        return ("CAP_KILL", *LOOK)
    if drill.fault == "engine-hang":
        return LOOK
    if drill.fault == "packet-loss":
        return ("CAP_NET_ADMIN", *(LOOK if "pid" in drill.target else ()), *_to_enter(drill))
    if drill.fault == "upstream-timeout":
        # Where the upstream is on another machine there is no process to be found.
        return ("CAP_NET_ADMIN", *(LOOK if _is_local(drill) else ()), *_to_enter(drill))
    if drill.fault in ON_GPUS:
        # The state is tocsin's, and root without DAC_OVERRIDE a stranger there. SYS_ADMIN is what the driver asks of
        # whoever sets something, and systemd of whoever has it read its units.
        more = {"gpu-reset": ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_KILL"), "slow-rank": ("CAP_SYS_ADMIN",)}
        return ("CAP_DAC_OVERRIDE", *(("CAP_SYSLOG",) if _is_synthetic(drill) else more[drill.fault]))
    return ()


def _as_root(drill: Drill) -> bool:
    """Whether capabilities alone do not suffice: somebody asks for uid 0."""
    return drill.fault in ON_GPUS


def _is_synthetic(drill: Drill) -> bool:
    return drill.fault == "gpu-reset" and drill.params.get("mode", "synthetic") == "synthetic"


def _is_local(drill: Drill) -> bool:
    """Whether an upstream is written as an engine or a port, rather than by the address of another machine."""
    return "engine" in drill.target or "address" not in drill.target


def _to_enter(drill: Drill) -> Sequence[str]:
    """For another network namespace, that of a pod, a container or a peer; to find it under a process takes more."""
    places = _places(drill)
    by_process = any(isinstance(place, int) or place.startswith("/proc/") for place in places)
    return (*(("CAP_SYS_ADMIN",) if places else ()), *(("CAP_SYS_PTRACE",) if by_process else ()))


def _places(drill: Drill) -> Sequence[str | int]:
    """The other network namespaces that it works in: a path, or a process that is in it."""
    peer = drill.params.get("peer") or {}
    pid = drill.target.get("pid") if drill.fault == "packet-loss" else None
    return [place for place in (drill.target.get("netns"), peer.get("netns"), pid) if place is not None]


def _namespaces(drill: Drill) -> Sequence[str]:
    """Which kinds it enters, or makes: packet-loss is rehearsed in a scratch namespace, as root of its own users."""
    if drill.fault == "packet-loss":
        return ("net", "user")
    return ("net",) if _places(drill) else ()


def _settings(drill: Drill) -> Iterable[str]:
    if drill.fault in {"packet-loss", "upstream-timeout"}:
        yield NETLINK
    if drill.fault == "engine-hang":
        yield "SystemCallFilter=ptrace"
    if drill.fault in ON_GPUS:
        yield "PrivateDevices=no"
        yield "DeviceAllow=char-nvidia* rw"
        # NVIDIA's library has not been tried under it.
        yield "MemoryDenyWriteExecute=no"
        if _is_synthetic(drill):
            yield "ProtectKernelLogs=no"
            yield "DeviceAllow=/dev/kmsg rw"
        elif drill.fault == "gpu-reset":
            yield "# The gate that holds a service's restart."
            yield "ReadWritePaths=/run/systemd/system"
    if drill.fault == "disk-full":
        path = str(drill.params.get("path") or drill.target.get("path"))
        yield f"# The user tocsin must be able to write in {path}: setfacl -m u:tocsin:rwx {path}"
        yield f'ReadWritePaths="{path.replace("%", "%%")}"'
        # A file system in memory is filled with memory that is counted as the unit's; the fault has its own limit.
        yield "MemoryMax=infinity"
        yield from (setting for folder, setting in HIDDEN.items() if PurePosixPath(path).is_relative_to(folder))
