"""A few lines to systemd: ready, alive, reloading, stopping. Without systemd they do nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


def notify(*lines: str, env: Mapping[str, str] = os.environ) -> bool:
    """Send lines such as "READY=1" or "STATUS=…" to the service manager; False where there is none. Never raises."""
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.sendall("\n".join(lines).encode())
    except OSError:
        return False
    return True


def ready(status: str) -> bool:
    """Started, or done with reloading; `status` is the line that `systemctl status` shows."""
    return notify("READY=1", f"STATUS={status}")


def alive() -> bool:
    """Feed the watchdog."""
    return notify("WATCHDOG=1")


def reloading() -> bool:
    """Reading the configuration again; `ready` must follow. systemd wants the monotonic time with it, in µs."""
    return notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping() -> bool:
    """Ending."""
    return notify("STOPPING=1")
