"""What lint says to write into tocsin.yaml: blocks that load as they stand, in lines with two spaces before them. Pure.

`http://USERS` stands for the address that users use, NAMESPACE, WORKLOAD and GPU-UUID for themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from agent.lint_case import Facts

USERS = "http://USERS"


class Drilled(NamedTuple):
    """A failure of principle 10: the drill's name, and its fault on a host and on pods."""

    name: str
    fault: str
    on_pods: str


DRILLED: Mapping[str, Drilled] = {
    "a crash": Drilled("crash", "process-kill", "pod-kill"), "a GPU failure": Drilled("gpu-failure", "gpu-reset",
                                                                                        "gpu-reset"),
    "a network partition": Drilled("partition", "packet-loss", "packet-loss"),
    "an upstream timeout": Drilled("slow-upstream", "upstream-timeout", "upstream-timeout")}


def profile_block(facts: Facts) -> str:
    """That latency comes first. The address of a pod ends with it: it is never written down."""
    if facts.pods_of and not facts.configured:
        return "--profile latency (or throughput) on this command"
    name = f"name: {_word(facts.configured)}, " if facts.configured else ""
    return (f"this in tocsin.yaml (or throughput), or --profile latency:\n"
            f"  engines: [{{{name}url: {_word(_url(facts))}, profile: latency}}]")


def canary_block(facts: Facts, why: str) -> str:
    """A canary at users' address and the engine's own; of a pod at users' alone, which outlives it."""
    model = f", model: {_word(facts.served)}" if facts.served else ""
    if facts.pods_of and not facts.configured:
        return ("a canary where users ask; this in tocsin.yaml, with the address of its gateway or its Service in place"
                f" of {USERS}:\n"
                f"  probe: {{canary: {{urls: [{_word(USERS)}]{model}}}}}")
    return (f"{why}; this in tocsin.yaml, with the address that users use in place of {USERS}:\n"
            f"  probe: {{canary: {{urls: [{_word(USERS)}, {_word(_url(facts))}]{model}}}}}")


def drills_block(facts: Facts, missing: Sequence[str]) -> str:
    """Drills of these failures, by hand until they have passed once."""
    drilled = [DRILLED[name] for name in missing]
    engine = facts.configured or f"engine-{urlsplit(_url(facts)).port or 80}"
    lines = ["  drills:", *(f"    - {_drill(facts, engine, one)}" for one in drilled)]
    if not facts.configured and not facts.pods_of:
        lines.insert(0, f"  engines: [{{name: {_word(engine)}, url: {_word(_url(facts))}}}]")
    first = drilled[0].name
    then = (f"then `tocsin drill plan {first}`, which touches nothing, and `tocsin drill run {first}` while somebody"
            " looks; what has passed once gets schedule: {cron: \"0 10 * * TUE#1\"}, monthly")
    places = f"{USERS} (the address that users use)" + ", the selector of its pods" * bool(facts.pods_of)
    places += " and GPU-UUID" * ("a GPU failure" in missing)
    return "\n".join([f"this in tocsin.yaml, with your own in place of {places}:", *lines, then])


def _drill(facts: Facts, engine: str, one: Drilled) -> str:
    target = f"engine: {_word(engine)}" + ", gpu: GPU-UUID" * (one.fault == "gpu-reset")
    if facts.pods_of:
        namespace, _, workload = facts.pods_of.partition("/")
        target = "gpu: GPU-UUID" if one.fault == "gpu-reset" else \
            f"namespace: {_word(namespace)}, selector: {_word(f'app={workload}')}"
    return (f"{{name: {one.name}, fault: {one.on_pods if facts.pods_of else one.fault}, target: {{{target}}},"
            f" load: {{url: {_word(f'{USERS}/v1')}}}}}")


def _url(facts: Facts) -> str:
    return facts.url or "http://127.0.0.1:8000"


def _word(text: str) -> str:
    """A string of YAML."""
    return text if re.fullmatch(r"[A-Za-z][\w.-]*", text) else json.dumps(text)
