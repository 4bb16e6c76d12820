"""What goes through a proxy of the environment (`http_proxy`, `https_proxy`, `no_proxy`), and what never does.

Engines are asked by sockets of ours, which know no proxy. What is asked by `requests` would take any that a shell or a
container happens to have, also for an address of this machine: the proxy would be asked for its own loopback.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

# What `requests` takes for "no proxy, whatever the environment says": a key that is there is not looked up.
DIRECT: dict[str, str] = {"http": "", "https": ""}


def proxies_for(url: str) -> dict[str, str] | None:
    """What to hand to `requests` as `proxies`: DIRECT to loopback, None (then the environment's) to all others."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # half an IPv6 address: whoever asks it will say so
        return None
    if host == "localhost" or host.endswith(".localhost"):
        return DIRECT
    try:
        return DIRECT if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None
