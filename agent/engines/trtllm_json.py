"""trtllm-serve's own page, a JSON list of what its iterations counted since somebody last read it, as an exposition.

The names (`trtllm_json_…`) are ours, so that the map can say of each number where it comes from. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agent.exposition import PageError
from agent.model import Why

EMPTY = ("an empty list of iterations: enable_iter_perf_stats is off, it has done nothing since the last read, or"
         " somebody else reads this page too (each read empties it)")


def is_json(body: bytes) -> bool:
    """Whether a page is a JSON list rather than an exposition, whatever it calls itself."""
    return body.lstrip()[:1] == b"["


def as_page(body: bytes) -> bytes:
    """The last iteration of the list as an exposition.

    Raises:
        PageError: it is another list, or an empty one, which says nothing.
    """
    try:
        iterations = msgspec.json.decode(body, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise PageError(f"a JSON page that is no list of iterations ({error})") from error
    if not iterations:
        raise PageError(EMPTY, Why.NO_DATA)
    last = iterations[-1]
    kv, batch = _part(last, "kvCacheStats"), _part(last, "inflightBatchingStats")
    if not kv and not batch and "numQueuedRequests" not in last:
        raise PageError("a JSON list, and not of TensorRT-LLM's iterations")
    used, most = kv.get("usedNumBlocks"), kv.get("maxNumBlocks")
    is_share = isinstance(used, int | float) and isinstance(most, int | float) and most > 0
    told = {
        "iterations": len(iterations), "requests_waiting": last.get("numQueuedRequests"),
        "requests_running": batch.get("numScheduledRequests"), "requests_paused": batch.get("numPausedRequests"),
        "kv_blocks": most, "kv_usage": used / most if is_share and used is not None and most else None,
        "prefix_hit_ratio": kv.get("cacheHitRate"),
    }
    lines = [f"trtllm_json_{name} {value}\n" for name, value in told.items() if isinstance(value, int | float)]
    return "".join(lines).encode()


def _part(of: dict[str, Any], name: str) -> dict[str, Any]:
    part = of.get(name)
    return part if isinstance(part, dict) else {}
