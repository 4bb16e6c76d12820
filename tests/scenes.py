"""Reads of an engine or a GPU as a story, and one signal asked of them. T0 is second 0 of every story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from agent.model import Batch, Gap, GpuFacts, Rule, Sample, Signal, Slo, Why
from agent.signals import SIGNALS, Scene, Target, compute
from agent.windows import Windows
from rules import RulesConfig, load_rules

T0 = 1_000_000_000.0
GPU = "GPU-aa"
SLO = Slo(ttft_p99=0.5, itl_p99=0.15, availability=0.999, written=True)
PAGE = {"running": 1.0, "waiting": 0.0, "kv_usage": 0.5, "asleep": 0.0, "preemptions": 0.0, "ttft.count": 0.0,
        "prompt_tokens": 0.0, "generation_tokens": 0.0, "prefix_queries": 0.0, "prefix_hits": 0.0,
        "finished.stop": 0.0, "finished.error": 0.0}


@cache
def built_in(slo: Slo = SLO) -> Mapping[str, Rule]:
    """The rules as they ship."""
    config = RulesConfig(dirs=())
    return {rule.id: rule for rule in load_rules(config, slo, {k: spec for k, (spec, _) in SIGNALS.items()}).rules}


def samples(subject: str, at: float, numbers: Mapping[str, float | None]) -> list[Sample | Gap]:
    """{"ttft.0.5": 3} as samples (what stands after the first dot is the key); None is a Gap (NaN on the page)."""
    found: list[Sample | Gap] = []
    for name, value in numbers.items():
        base, _, key = name.partition(".")
        found.append(Gap(base, subject, Why.NOT_A_NUMBER, f"{base} is nan", at, key) if value is None
                     else Sample(base, subject, value, at, key))
    return found


def read(windows: Windows, at_s: float, subject: str, numbers: Mapping[str, float | None], source: str = "",
         ) -> None:
    """One read of one subject at a second of the story."""
    at = T0 + at_s
    windows.ingest(Batch(source or f"source of {subject}", at, 0.0, tuple(samples(subject, at, numbers))))


def read_many(windows: Windows, at_s: float, source: str, of: Mapping[str, Mapping[str, float | None]]) -> None:
    """One read of a source that tells several subjects."""
    at = T0 + at_s
    windows.ingest(Batch(source, at, 0.0, tuple(r for s, n in of.items() for r in samples(s, at, n))))


def hist(name: str, buckets: Mapping[str, float], total_s: float = 1.0) -> dict[str, float]:
    """A histogram's samples from its cumulative buckets."""
    return {f"{name}.{bound}": count for bound, count in buckets.items()} | {
        f"{name}.sum": total_s, f"{name}.count": buckets["+Inf"]}


def times(start: float, end: float, step: float = 5.0) -> Iterable[float]:
    """Start, start + step, … up to and with end."""
    n = round((end - start) / step)
    return (start + i * step for i in range(n + 1))


def scene(windows: Windows, at_s: float, *, engines: tuple[str, ...] = ("e",), target: str = "e", slo: Slo = SLO,
          gpus: tuple[int, ...] = (), **more: Any) -> Scene:
    """A node with one target (and one GPU, index 0, where `gpus` names any)."""
    known = {GPU: GpuFacts(GPU, 0, "H200", "0000:1b:00")} if gpus else {}
    at_target = {k: more.pop(k) for k in ("ever_up", "first_seen_at") if k in more}
    return Scene(windows, T0 + at_s, "node", slo, {target: Target(target, engines, slo, gpus=gpus, **at_target)},
                 more.pop("gpu_facts", known), **more)


def ask(here: Scene, rule: str | Rule, subject: str = "e", resolved_s: float | None = None) -> Signal:
    """The signal of one rule for one subject."""
    asked = built_in()[rule] if isinstance(rule, str) else rule
    resolved = {} if resolved_s is None else {(asked.id, subject): T0 + resolved_s}
    return compute(here, [asked], resolved)[(asked.id, subject)]
