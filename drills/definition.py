"""A drill back in the form in which its owner writes it: the reverse of drills.config. Pure.

What has its default is left out; a prompt is not told, and secrets are cut by whoever writes it (drills.escape).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from drills.model import Drill, Holds, Load

UNITS: Mapping[str, str] = {"delay_s": "delay", "retry_after_s": "retry_after", "leave_bytes": "leave"}
WHOLE: Mapping[str, Any] = msgspec.to_builtins(Drill("", "", holds=Holds(), load=Load("")))


def as_written(definition: Mapping[str, Any]) -> str:
    """`drills:` with this one drill, as YAML."""
    try:
        return yaml.safe_dump({"drills": [_drill(definition)]}, sort_keys=False, allow_unicode=True, width=100)
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError):  # of another version, or by another hand
        return yaml.safe_dump({"unreadable definition": str(definition)}, allow_unicode=True, width=100)


def _drill(drill: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {"name": drill["name"], "fault": drill["fault"], "target": _target(drill)}
    if drill.get("schedule"):
        written["schedule"] = _schedule(drill["schedule"])
    if drill.get("load"):
        written["load"] = _load(drill["load"])
    for key, name in (("for_s", "for"), ("baseline_s", "baseline"), ("recovery_s", "recovery"),
                      ("resolve_within_s", "resolve_within")):
        if drill.get(key, WHOLE[key]) != WHOLE[key]:
            written[name] = _seconds(drill[key])
    if drill.get("expects"):
        written["expects"] = list(drill["expects"])
    holds = _holds(drill.get("holds") or {})
    params = {UNITS.get(k, k): _param(k, v) for k, v in (drill.get("params") or {}).items() if k != "path"}
    written |= {k: v for k, v in (("holds", holds), ("params", params)) if v}
    rest = ("enabled", "dry_run", "echo", "route_to", "owner")
    return written | {k: drill[k] for k in rest if drill.get(k, WHOLE[k]) != WHOLE[k]}


def _param(name: str, value: Any) -> Any:
    if name == "leave_bytes":
        return f"{value / 2**20:g}MiB" if value % 2**20 == 0 else f"{value:.0f}B"
    return _seconds(value) if name.endswith("_s") else _share(value) if name == "share" else value


def _target(drill: Mapping[str, Any]) -> dict[str, Any]:
    """By the one way that names it."""
    target = drill.get("target") or {}
    found = {k: target[k] for k in ("part", "netns", "gpu") if target.get(k) is not None}
    if target.get("engine") is not None:
        address = target.get("address")
        if address and address != urlsplit(str(target.get("url", ""))).hostname:
            found["address"] = address
        return {"engine": target["engine"], **found}
    if drill["fault"] == "upstream-timeout" and target.get("address"):
        host = f"[{target['address']}]" if ":" in str(target["address"]) else target["address"]
        return {"upstream": f"{host}:{target['port']}", **found}
    ways = ("port", "pid", "path", "namespace", "selector", "address")
    return {**{k: target[k] for k in ways if target.get(k) is not None}, **found}


def _schedule(schedule: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {"cron": schedule["cron"], "zone": schedule.get("zone", "UTC")}
    if schedule.get("window"):
        written["window"] = "-".join(f"{m // 60:02d}:{m % 60:02d}" for m in schedule["window"])
    if schedule.get("blackouts"):  # as a person writes it, the last day is one of it
        written["blackouts"] = [f"{a}/{(date.fromisoformat(b) - timedelta(days=1)).isoformat()}"
                                for a, b in schedule["blackouts"]]
    if schedule.get("grace_s", 20 * 86400.0) != 20 * 86400.0:
        written["grace"] = _seconds(schedule["grace_s"])
    return written


def _load(load: Mapping[str, Any]) -> dict[str, Any]:
    usual = WHOLE["load"]
    written: dict[str, Any] = {"url": load["url"], "rate": f"{load.get('rate_per_s', 5.0):g}/s"}
    for key in ("model", "streaming", "retries", "connections", "max_tokens", "api_key_file"):
        if load.get(key, usual[key]) != usual[key]:
            written[key] = load[key]
    if load.get("deadline_s", usual["deadline_s"]) != usual["deadline_s"]:
        written["deadline"] = _seconds(load["deadline_s"])
    if load.get("prompt", usual["prompt"]) != usual["prompt"]:
        written["prompt"] = f"(not shown: {len(load['prompt'])} characters)"
    return written


def _holds(holds: Mapping[str, Any]) -> dict[str, Any]:
    usual, written = WHOLE["holds"], dict[str, Any]()
    pair = [holds.get(k, usual[k]) for k in ("goodput", "goodput_within_s")]
    if pair != [usual["goodput"], usual["goodput_within_s"]]:
        written["goodput"] = None if pair[0] is None else f"{_share(pair[0])} in {_seconds(pair[1])}"
    for key, name, form in (("ttft_p99", "ttft_p99", _seconds), ("itl_p99", "itl_p99", _seconds),
                            ("error_ratio", "error_ratio", _share), ("restart_within_s", "restart_within", _seconds)):
        value = holds.get(key, usual[key])
        if value != usual[key]:
            written[name] = value if value is None or isinstance(value, str) else form(value)
    if holds.get("degraded"):
        written["degraded"] = {"within": _seconds(holds["degraded"]["within_s"]), "by": dict(holds["degraded"]["by"])}
    if not holds.get("retry_storm", True):
        written["retry_storm"] = False
    return written


def _seconds(value: float) -> str:
    return f"{value:g}s" if value < 1e5 else f"{int(value)}s"


def _share(value: float) -> str:
    return f"{value * 100:g}%"
