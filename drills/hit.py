"""Which engine of the configuration a target is, where it is written as a process or an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agent.config import Config, EngineConfig, target_name
from drills import proc
from drills.model import port_of
from drills.targets import is_elsewhere


def with_engine(target: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The target, with `engine` and `url` of the engine that it hits, where it is one that the agent watches.

    Its alerts are then those of this engine, and of no other: the same alert elsewhere is a real one.
    """
    found = None if target.get("engine") is not None else next((e for e in config.engines if _is(e, target)), None)
    if found is None:
        return dict(target)
    return {**target, "engine": target_name(found), "url": target.get("url", found.url)}


def _is(engine: EngineConfig, target: Mapping[str, Any]) -> bool:
    parts = urlsplit(engine.url)
    port = port_of(engine.url)
    if target.get("address") is not None and target.get("port") is not None:
        return (target["address"], target["port"]) == (parts.hostname, port)
    if target.get("pid") is None or is_elsewhere(engine.url):
        return False
    pid = int(target["pid"])
    own = {pid, *(one.pid for one in proc.descendants(pid)), *proc.ancestors(pid)} - {0, 1}
    return bool(own & set(proc.listeners(port)))
