"""When in its period a node does what all nodes do: agents that were started together must not stay in step."""

from __future__ import annotations

import hashlib


def phase_of(node: str, every_s: float) -> float:
    """Seconds into a period of `every_s`, 0 ≤ phase < `every_s`: always the same for a name, even over many names."""
    digest = hashlib.blake2b(node.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48 * every_s


def next_at(now: float, every_s: float, phase_s: float) -> float:
    """The first time after `now` that is `phase_s` into a period; periods are counted from 0."""
    return now + every_s - (now - phase_s) % every_s
