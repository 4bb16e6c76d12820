"""The eight deployment patterns: how each is recognised, what is to be watched on it, by which rule or why not. Pure.

A pattern is chosen by `pattern:` or recognised from what is there. Its rules (rules/patterns/*.yaml) run only where it
is. What no engine tells may come from a PromQL or JSON source of a certain name (FEEDS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """One thing to watch: the rules that do it, and what cannot be told (`gap`: why, and what would give it)."""

    what: str
    rules: tuple[str, ...] = ()
    gap: str = ""


class Pattern(NamedTuple):
    """A pattern as `pattern:` names it (its number or its word)."""

    number: int
    word: str
    title: str
    watch: tuple[Item, ...]


class Feed(NamedTuple):
    """What a source of this name is taken for: each of its series is one of `of`, its value is `what`."""

    pattern: int
    rule: str
    of: str
    what: str


FEEDS: Mapping[str, Feed] = {
    "replica-hit-ratio": Feed(2, "cache-fragmented", "replica", "its prefix-cache hit ratio, 0 to 1"),
    "replica-uptime": Feed(2, "restarts-together", "replica", "seconds since its start"),
    "replica-queue-age": Feed(2, "overload-everywhere", "replica", "age of its oldest waiting request in seconds"),
    "pipeline-bubble": Feed(3, "pipeline-bubble", "pipeline stage", "share of time in which it waits, 0 to 1"),
    "expert-load": Feed(4, "experts-hot", "expert or expert rank", "tokens that it was given in the query's window"),
    "expert-rebalances": Feed(4, "experts-rebalancing", "service", "how often experts were moved within an hour"),
    "feature-transfer-failures": Feed(6, "feature-transfer-failed", "encoder",
                                      "transfers of features that failed in the query's window"),
    "weights-version": Feed(8, "weights-stale", "trainer or engine", "the number of the weights that it has"),
}

_MEMORY = ("gpu-memory", "gpu-memory-low", "gpu-memory-growth", "kv-cache-utilization", "preemptions")
_SLOW_RANKS = ("rank-spread", "rank-straggler", "rank-clock-spread")
PATTERNS: Mapping[int, Pattern] = {pattern.number: pattern for pattern in (
    Pattern(1, "one-device", "one device", (
        Item("CPU preprocessing", ("cpu-preprocessing", "outside-engine")),
        Item("memory headroom", _MEMORY),
        Item("cold against steady behaviour", ("cold-start-slow",)),
    )),
    Pattern(2, "replicas", "replicas on single nodes", (
        Item("fragmented caches", ("cache-fragmented", "prefix-cache-hit-rate")),
        Item("synchronized cold starts", ("restarts-together",)),
        Item("global overload", ("overload-everywhere", "queue-age")),
    )),
    Pattern(3, "multi-node", "a model over several nodes", (
        Item("stragglers in collectives", _SLOW_RANKS),
        Item("pipeline bubbles", ("pipeline-bubble",)),
        Item("membership", ("members-missing", "replicas-missing")),
        Item("rank-to-topology mapping", ("gpu-nvlink-down", "gpu-pcie-link", "gpu-fabric"),
             "no engine tells which rank sits on which node and rail: compare `nvidia-smi topo -m` with its start line"
             " at each rollout"),
    )),
    Pattern(4, "expert-parallel", "experts on several GPUs", (
        Item("hot experts", ("experts-hot",)),
        Item("rebalancing", ("experts-rebalancing",)),
        Item("membership", ("members-missing",)),
        Item("network rails", (), "the network cards' counters are node_exporter's (node_infiniband_port_…): a PromQL"
                                  " source and a rule of your own on it (source_value)"),
        Item("grouped-GEMM shapes", ("graph-fallback",), "kernels by shape are in no engine's page: a profile tells"),
    )),
    Pattern(5, "pd-disaggregated", "prefill and decode apart", (
        Item("coupled queues", ("handover-queue",)),
        Item("transfer failures", ("kv-transfer-failed",)),
        Item("pool ratio", ("pool-ratio",)),
        Item("state that accumulates between the stages", ("handover-state",)),
    )),
    Pattern(6, "epd-disaggregated", "encoder, prefill and decode apart", (
        Item("the encoder's transfer boundary", ("feature-transfer-failed",)),
        Item("the KV transfer boundary", ("kv-transfer-failed", "handover-queue", "handover-state")),
        Item("first-output attribution", ("first-output-elsewhere",)),
        Item("dynamic media shapes", (), "no engine tells them: graph-fallback sees decode's batches alone, a profile"
                                         " of the encoder tells"),
        Item("feature identity", (), "that features are those of the request no counter tells: compare answers to known"
                                     " media, as the canary of a release does"),
    )),
    Pattern(7, "hierarchical-cache", "a cache of several tiers", (
        Item("promotion traffic", ("promotion-traffic",)),
        Item("cache-aware hotspots", ("replica-hotspot",)),
        Item("write policy", ("promotion-traffic",), "what was written down and never read is in its evidence; no"
                                                     " engine tells it by entry"),
        Item("isolation of tenants", (), "no engine counts hits by tenant: test it with prompts of two tenants"),
    )),
    Pattern(8, "post-training", "a post-training loop", (
        Item("long-tail groups", ("rollout-tail",)),
        Item("stale weights", ("weights-stale",)),
        Item("mixed-rank failure", ("members-missing", *_SLOW_RANKS)),
        Item("peak memory during updates", ("gpu-memory-low", "gpu-memory-growth")),
    )),
)}
WORDS: Mapping[str, int] = {pattern.word: pattern.number for pattern in PATTERNS.values()}


def parse(text: str) -> tuple[int, ...]:
    """`replicas`, `2`, or several, as `replicas + hierarchical-cache`. Raises ValueError with the word that is none."""
    found = []
    for word in (part.strip() for part in text.split("+")):
        number = WORDS.get(word, int(word) if word.isdecimal() and len(word) == 1 else 0)
        if number not in PATTERNS:
            raise ValueError(word)
        found.append(number)
    return tuple(dict.fromkeys(found))


class Seen(NamedTuple):
    """One target as it is known: its model, engines, GPUs and ranks, and what its page shows of patterns."""

    name: str
    model: str = ""
    engines: int = 1
    gpus: int = 0
    ranks: int = 0
    shows: Mapping[int, str] = {}
    role: str = ""


def recognise(targets: Sequence[Seen], routers: Mapping[str, int], node_gpus: int, sources: Iterable[str],
              ) -> dict[int, str]:
    """Pattern -> from what it is recognised. `routers`: name -> replicas that it tells of."""
    found: dict[int, str] = {}
    for name in sources:
        if name in FEEDS:
            found.setdefault(FEEDS[name].pattern, f"the source {name}")
    behind = f" behind the router {', '.join(routers)}" if routers else ""
    models: dict[str, list[str]] = {}
    for target in targets:
        models.setdefault(target.model, []).append(target.name)
        for number, family in target.shows.items():
            found.setdefault(number, f"{family} on the page of {target.name}")
        if target.role:
            found.setdefault(5, f"{target.name}, which is a {target.role} engine")
        if target.ranks > node_gpus > 0:
            found.setdefault(3, f"{target.ranks} ranks of {target.name} on a node of {node_gpus} GPUs")
    apart = any(target.role for target in targets) or 5 in found
    for model, names in models.items():
        if len(names) > 1 and model and not apart:
            found.setdefault(2, f"{len(names)} replicas of {model} ({_few(names)}){behind}")
    for router, count in routers.items():
        if count > 1 and not apart:
            found.setdefault(2, f"{count} replicas that the router {router} tells of")
    only = targets[0] if len(targets) == 1 else None
    on_one = only is not None and (only.gpus == 1 or node_gpus <= 1)  # 0: not known, which of a node of 8 may be all
    if not found and only is not None and on_one and not routers and only.engines == 1 and only.ranks <= 1:
        found[1] = f"one engine ({only.name}) on {'one GPU' if only.gpus else 'no GPU that is seen'}, and no router"
    return dict(sorted(found.items()))


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def told(number: int, why: str) -> str:
    """A pattern and whence it is known, as a line: "pattern 2, replicas on single nodes: recognised from …"."""
    return f"pattern {number}, {PATTERNS[number].title} ({PATTERNS[number].word}): {why}"


def report(active: Mapping[int, str], rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """What is watched of each active pattern and how it stands. `rows`: as `check` tells signals."""
    order = ("BREACH", "PENDING", "UNKNOWN", "OK", "IDLE", "N/A")
    states: dict[str, list[tuple[int, str, str]]] = {}
    for row in rows:
        state = str(row["state"])
        states.setdefault(str(row["rule"]), []).append((order.index(state), state, str(row.get("why") or "")))
    found: list[dict[str, object]] = []
    for number, why in active.items():
        items = []
        for item in PATTERNS[number].watch:
            by = [{"rule": rule, "state": worst[1], "why": worst[2]}
                  for rule in item.rules if (worst := min(states.get(rule, [(9, "N/A", "")])))]
            items.append({"what": item.what, "rules": by, "gap": item.gap or None})
        found.append({"number": number, "word": PATTERNS[number].word, "title": PATTERNS[number].title, "why": why,
                      "text": told(number, why), "watch": items})
    return found
