"""`tocsin check` and `tocsin doctor` without a running agent: sample for a while, judge once, remember nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from agent.config import DEFAULT_PATH, Config, EngineConfig, address_of, engine_url, rules_for
from agent.daemon import local_port, setup_of, sources_of
from agent.loop import GRACE_S, Collector, doctor_report, tell_sources
from agent.model import FoundEngine, Source
from agent.node import Node
from agent.progress import Tell, quiet
from agent.signals import CATALOGUE
from agent.sources.discovery import DiscoverySource
from agent.sources.engine_probe import ProbeSource
from agent.windows import LATE_INTERVALS

READ_WITHIN_S = 5.0  # the longest that one read of any source may take
ROUNDS = 5  # at least: three failed reads in a row are an engine that is down
SHORTEST_POLL_S = 0.5
DOCTOR_ROUNDS = 2  # reads after the first
DOCTOR_POLL_S = 1.0


def sample(config: Config, watch_for_s: float, progress: Tell, *, gpus: bool = False) -> dict[str, Any]:
    """The contract's `check`, by watching for a while: windows are as long as that, and the last sample decides.

    Extra key `looked_for`: what was looked for, in sentences. `gpus`: `check --gpus`, a verdict on each GPU.
    """
    progress("looking for engines and GPUs", READ_WITHIN_S + watch_for_s, at_most=True)
    poll_s = min(config.poll, max(SHORTEST_POLL_S, watch_for_s / ROUNDS))
    config, seen = _discovered(config)
    node, sources = _prepare(config, poll_s)
    node.see(seen.found, time.time())
    collector = Collector(sources)
    try:
        found = _round(node, collector, READ_WITHIN_S)
        looked_for = [*seen.said, *_looked_for(config, sources, found)]
        if gpus:
            looked_for = [what for what in looked_for if not what.startswith("engines:")]
        if node.setup.targets or node.gpus or node.setup.sourced:
            _watch(node, collector, watch_for_s, progress)
    finally:
        collector.stop()
    return (node.gpus_report() if gpus else node.check()) | {"looked_for": looked_for}


def _watch(node: Node, collector: Collector, watch_for_s: float, progress: Tell) -> None:
    poll_s = node.setup.poll_s
    end = time.monotonic() + watch_for_s
    progress(f"watching {_sources(collector)}", watch_for_s)
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(poll_s, left_s))
        _round(node, collector, GRACE_S)


def _sources(collector: Collector) -> str:
    return f"{len(collector.slots)} source{'s' if len(collector.slots) != 1 else ''}"


def _round(node: Node, collector: Collector, wait_s: float) -> dict[str, str | None]:
    """One read of every source and one judgement; returns each source's error."""
    tell_sources(node, collector)
    for batch in collector.gather(wait_s):
        node.take(batch)
    node.step(time.time(), LATE_INTERVALS * node.setup.poll_s)
    return {name: slot.last.error if slot.last else "it did not answer in time"
            for name, slot in collector.slots.items()}


def _prepare(config: Config, poll_s: float) -> tuple[Node, Sequence[Source]]:
    setup = setup_of(config, rules_for(config, CATALOGUE).rules, clip_windows=True)
    sources = sources_of(config, {}, once=True)
    if config.discover and config.engines and config.probe.folder.is_dir():
        sources.append(ProbeSource(config.probe.folder))
    return Node(replace(setup, poll_s=poll_s)), sources


def _discovered(config: Config) -> tuple[Config, Seen]:
    """The configuration with the engines that run here and are not in it, and what was seen."""
    if not config.discover:
        return config, Seen((), ["engines: discovery is off in the configuration"])
    source = DiscoverySource()
    found = source.read(time.time()).found or ()
    ports, addresses = {local_port(e.url) for e in config.engines} - {0}, {address_of(e.url) for e in config.engines}
    new = [one for one in found if one.port not in ports and one.name not in addresses and (one.port or one.pod)]
    said = [f"found {one.name}, {one.kind}, by {one.how}" for one in new]
    said += [source.note] if source.note else []
    engines = (*config.engines, *(EngineConfig(url=one.url, kind=one.kind) for one in new))
    return msgspec.structs.replace(config, engines=engines), Seen(found, said)


class Seen(NamedTuple):
    """What discovery saw, and the same in sentences."""

    found: Sequence[FoundEngine]
    said: Sequence[str]


def _looked_for(config: Config, sources: Sequence[Source], errors: dict[str, str | None]) -> list[str]:
    said = []
    if not config.engines:
        said.append(f"engines: none is configured or found; name them under `engines:` in {DEFAULT_PATH} (or"
                    " --config FILE), or look at one with `tocsin doctor URL`")
    for source in sources:
        if source.name == "nvml":
            said.append(f"NVML: {errors['nvml'] or getattr(source, 'note', '')}")
        else:
            told = errors[source.name] or getattr(source, "note", "answers")
            said.append(f"{source.name.replace(':', ' ', 1)}: {told}")
    if config.nvml == "off":
        said.append("NVML: off in the configuration")
    return said


def doctor(config: Config, urls: Sequence[str], progress: Tell = quiet, rounds: int = DOCTOR_ROUNDS,
           ) -> dict[str, Any]:
    """How each quantity is had, by reading everything; `urls` are looked at instead of the configured engines.

    An engine is read `rounds` times more, a second apart, for what only moves.

    Raises Unfit where one of them is no address.
    """
    if urls:
        engines = tuple(EngineConfig(url=url) for url in dict.fromkeys(map(_address, urls)))
        config = Config(engines=engines, nvml=config.nvml, node=config.node, discover=False)
    progress("looking for engines and GPUs", READ_WITHIN_S + rounds * DOCTOR_POLL_S, at_most=True)
    config, seen = _discovered(config)
    node, sources = _prepare(config, min(config.poll, DOCTOR_POLL_S))
    node.see(seen.found, time.time())
    collector = Collector(sources)
    try:
        progress(f"reading {_sources(collector)}", READ_WITHIN_S + rounds * node.setup.poll_s, at_most=True)
        errors = _round(node, collector, READ_WITHIN_S)
        more = rounds if any(node.windows.keys_now(e, "running") for e in node.bounds) else 0
        progress("looking what moves", more * node.setup.poll_s)
        for _ in range(more):
            time.sleep(node.setup.poll_s)  # what binds an engine is seen by what moves between two reads
            _round(node, collector, GRACE_S)
        return doctor_report(node, collector.slots, time.monotonic()) | {
            "looked_for": [*([] if urls else seen.said), *_looked_for(config, sources, errors)]}
    finally:
        collector.stop()


def _address(word: str) -> str:
    """An engine's address as people write it: host:port, with a last slash, with /metrics or /v1. Raises Unfit."""
    return engine_url(word if "://" in word else f"http://{word}")
