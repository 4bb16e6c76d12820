"""What an incident cost its users, and what a stretch of time brought each target: requests, errors, slow ones. Pure.

Counted from the same windows, by the same words, as H5, H6 and H7: slow is what is certainly over the service level.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from agent.signals import Scene, Target, count_errors, count_routed
from agent.stats import add_buckets, slow_share
from agent.windows import RAW_KEEP_S

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What one target did in a stretch of time. Counts; `how`: whose word the errors are."""

    target: str
    requests: float = 0.0
    errors: float = 0.0
    ttft: float = 0.0  # first tokens
    ttft_slow: float = 0.0  # of them, certainly over the SLO
    itl: float = 0.0  # gaps between tokens
    itl_slow: float = 0.0
    how: str = ""


def counted(scene: Scene, target: Target, start: float) -> Counted:
    """What a target did since `start`."""
    own = count_errors(scene.windows, target, start, scene.now)
    routed = count_routed(scene, target, start)
    # the router's word is better, if it is through this router that most requests come
    errors, requests, how = routed if routed is not None and 2 * routed[1] >= own[1] else own
    slow: dict[str, float] = {}
    since = max(start, scene.now - RAW_KEEP_S)  # histograms are remembered no longer
    for name, limit_s in (("ttft", target.slo.ttft_p99), ("itl", target.slo.itl_p99)):
        share = slow_share(limit_s, add_buckets(
            scene.windows.buckets(engine, name, since) for engine in scene.tellers(target, name)))
        slow |= {name: share.n, f"{name}_slow": share.certain}
    return Counted(target.name, requests, errors, how=how, **slow)


def since_last(scene: Scene, last: dict[str, float]) -> tuple[list[Counted], dict[str, float]]:
    """What each target did since it was last counted, and up to where that is: the time of its last page.

    `last`: the same of the last time. A target that is new is counted from its next page on.
    """
    rows, upto = [], dict(last)
    for target in scene.targets.values():
        told = [at for engine in target.engines if (at := scene.windows.told_at(engine, "running")) is not None]
        if not told:
            continue
        since, upto[target.name] = last.get(target.name), max(told)
        if since is None or since >= upto[target.name]:
            continue
        row = counted(scene, target, since)
        if row.requests > 0 or row.ttft > 0 or row.errors > 0:
            rows.append(row)
    known = scene.targets.keys()
    return rows, {name: at for name, at in upto.items() if name in known}


def impact(scene: Scene, start: float, end: float) -> dict[str, Any]:
    """What users of each target met from `start` until now, and how much of its error budget that was.

    Minutes of the budget, as the drills count them: the share of requests that failed x the minutes it lasted; the
    budget is (1 - availability) x the SLO's window.
    """
    minutes = max(0.0, end - start) / MINUTE_S
    found: dict[str, Any] = {}
    for target in scene.targets.values():
        row = counted(scene, target, start)
        spent = row.errors / row.requests * minutes if row.requests > 0 else None
        budget = (1 - target.slo.availability) * target.slo.window / MINUTE_S
        found[target.name] = {
            **asdict(row), "budget_minutes": spent, "budget_share": None if spent is None else spent / budget,
            "ttft_slo_s": target.slo.ttft_p99, "itl_slo_s": target.slo.itl_p99,
            "availability": target.slo.availability, "slo_window_s": target.slo.window}
    span_s = max(0.0, end - start)
    return {"span_s": span_s, "latency_span_s": min(span_s, RAW_KEEP_S), "targets": found}
