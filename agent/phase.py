"""When in its period a node does what all nodes do: agents that were started together must not stay in step."""

from __future__ import annotations

import hashlib

FIRST_WITHIN_S = 5.0


def phase_of(node: str, every_s: float) -> float:
    """Seconds into a period of `every_s`, 0 ≤ phase < `every_s`: always the same for a name, even over many names."""
    digest = hashlib.blake2b(node.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48 * every_s


def first_two(phase_s: float, every_s: float, within_s: float = FIRST_WITHIN_S) -> tuple[float, float]:
    """When a node does for the first and the second time what it does each `every_s` after that, in s from its start.

    For the first time soon, so that it is known, and yet not when all others do; from then on at its phase, that the
    others of its fleet, started with it, keep as well. Between the two is at least half a period.
    """
    first_s = phase_s * min(1.0, within_s / every_s)
    return first_s, phase_s if phase_s - first_s >= every_s / 2 else phase_s + every_s


def next_at(now: float, every_s: float, phase_s: float) -> float:
    """The first time after `now` that is `phase_s` into a period; periods are counted from 0."""
    return now + every_s - (now - phase_s) % every_s
