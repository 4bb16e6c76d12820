"""`drills:` of tocsin.yaml -> Drills, checked against the faults, the rules and the calendar.

The form of the keys is agent.config's; here is what a drill of that form may still not be. Every fault at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from agent import daytime
from agent.config import ON_GPUS, TARGET_WAYS, Config, DrillConfig, DrillHolds, EngineConfig, day_window, target_name
from agent.model import Rule
from agent.strict import ConfigErrors, Fault, Unfit, cut, did_you_mean
from drills import cron
from drills.model import Drill, Holds, Load, Schedule, announces, port_of

# What each fault takes under `target` (one of them) and under `params`.
TARGETS: Mapping[str, Sequence[str]] = {
    "process-kill": ("engine", "port", "pid", "selector"),
    "engine-hang": ("engine", "port", "pid", "selector"),
    "packet-loss": ("engine", "port", "pid", "selector"),
    "upstream-timeout": ("engine", "port", "upstream", "selector"),
    "disk-full": ("path",),
    "gpu-reset": ("engine", "gpu"),  # or both: which of the engine's
    "slow-rank": ("engine",),
    "pod-kill": ("selector",),
}
PARAMS: Mapping[str, Sequence[str]] = {
    "process-kill": (),
    "engine-hang": (),
    "packet-loss": ("share", "direction", "peer", "loopback"),
    "upstream-timeout": ("delay", "mode", "after_bytes", "status", "retry_after"),
    "disk-full": ("leave",),
    "gpu-reset": ("mode",),
    "slow-rank": ("share",),
    "pod-kill": ("mode",),
}
MODES: Mapping[str, Sequence[str]] = {
    "upstream-timeout": ("turn", "chunk", "hang", "status"),
    "gpu-reset": ("synthetic", "reset"),
    "pod-kill": ("delete", "evict"),
}
# key of `params` -> what the fault calls it, with its unit
NAMES: Mapping[str, str] = {"delay": "delay_s", "retry_after": "retry_after_s", "leave": "leave_bytes"}
XID_RULES = announces("gpu-reset", None)  # what sees the kernel's line of a synthetic gpu-reset
WITH_PARTS = frozenset({"process-kill", "engine-hang", "slow-rank"})
# Faults between the user and the engine: the engine's own page begins behind them.
OUTSIDE = frozenset({"packet-loss", "upstream-timeout"})
DETECT_S = 30.0  # for a signal to be computed and a breach to be seen, besides two polls
FEWEST_REQUESTS = 473  # k = 1 failed request of n still proves 1 %: Clopper-Pearson, one-sided 95 %
JITTER_S = 300.0  # spread by the run's id; the window caps it


def drills_of(config: Config, rules: Sequence[Rule]) -> list[Drill]:
    """All drills of the configuration, defaults filled in. `rules`: those that are on. Raises ConfigErrors."""
    faults = [fault for drill in config.drills for fault in _faults(config, drill, rules)]
    if faults:
        raise ConfigErrors(faults)
    return [_drill(config, drill) for drill in config.drills]


# ---- what may be wrong ----


def _faults(config: Config, drill: DrillConfig, rules: Sequence[Rule]) -> Iterator[Fault]:
    places = config.rules.places
    yield from _form_faults(config, drill)
    yield from _target_faults(config, drill)
    yield from _schedule_faults(config, drill)
    on = {rule.id: rule for rule in rules}
    names = {*on, *config.rules.disable}  # one that is off fails the drill: that is what the drill is for
    for index, name in enumerate(drill.expects):
        if name not in names:
            message = f"rule {cut(name)!r} is unknown"
            yield places.fault(f"{drill.at}.expects[{index}]", message, did_you_mean(name, names, "known rules"))
    announced = [on[name] for name in drill.expects or announced_by(drill) if name in on]
    kinds = sorted({channel.kind for channel in config.notify} - {"heartbeat"})
    if drill.route_to is not None and drill.route_to.partition("-")[0] not in kinds:
        message = f"no channel {cut(drill.route_to)!r} is under notify"
        yield places.fault(f"{drill.at}.route_to", message, f"name one of {', '.join(kinds) or 'those that you add'}")
    yield from _length_faults(config, drill, announced)
    yield from _holds_faults(config, drill)
    unseen = why_unseen(config, drill, announced)
    if unseen:
        yield places.fault(drill.at, *unseen)


def announced_by(drill: DrillConfig) -> Sequence[str]:
    """The rules that a fault announces where `expects` is not written."""
    return announces(drill.fault, drill.params.mode)


def _form_faults(config: Config, drill: DrillConfig) -> Iterator[Fault]:
    """Keys that belong to another fault."""
    places, target = config.rules.places, drill.target
    ways = TARGETS[drill.fault]
    given = next((way for way in TARGET_WAYS if getattr(target, way) is not None), "")
    if given and given not in ways:
        message = f"{drill.fault} has no target {given}"
        yield places.fault(f"{drill.at}.target.{given}", message, f"write one of {', '.join(ways)}")
    if target.part is not None and drill.fault not in WITH_PARTS:
        yield places.fault(f"{drill.at}.target.part", f"{drill.fault} has no parts", "remove it")
    for name in drill.params.__struct_fields__:
        if getattr(drill.params, name) is not None and name not in PARAMS[drill.fault]:
            takes = ", ".join(PARAMS[drill.fault]) or "none"
            message = f"{drill.fault} takes no {name}"
            yield places.fault(f"{drill.at}.params.{name}", message, f"remove it; it takes {takes}")
    mode, modes = drill.params.mode or "turn", MODES.get(drill.fault, ())
    if drill.params.mode and modes and mode not in modes:
        message = f"{drill.fault} has no mode {mode}"
        yield places.fault(f"{drill.at}.params.mode", message, f"write {' or '.join(modes)}")
    for name, wanted in (("after_bytes", "hang"), ("status", "status"), ("retry_after", "status")):
        if getattr(drill.params, name) is not None and mode != wanted and name in PARAMS[drill.fault]:
            message = f"mode {mode} has no {name}"
            yield places.fault(f"{drill.at}.params.{name}", message, f"write mode: {wanted}, or remove it")


def _target_faults(config: Config, drill: DrillConfig) -> Iterator[Fault]:
    """A target that means more than its owner does."""
    places, target = config.rules.places, drill.target
    by_port_alone = target.port is not None and target.address is None and target.netns is None
    same = [target_name(one) for one in config.engines if by_port_alone and port_of(one.url) == target.port]
    if len(same) > 1:
        message = f"port {target.port} is that of {len(same)} engines: {', '.join(same)}"
        yield places.fault(f"{drill.at}.target.port", message, "name one of them: target.engine")
    if target.selector is not None and target.namespace is None:
        yield places.fault(f"{drill.at}.target", "selector without a namespace", "add namespace: NAME beside it")
    if target.namespace is not None and target.selector is None:
        yield places.fault(f"{drill.at}.target.namespace", "a namespace without a selector", "add one, or remove it")
    if target.selector is not None and not target.selector.strip():
        yield places.fault(f"{drill.at}.target.selector", "an empty selector chooses every pod of the namespace",
                           "write the labels of the service's pods, as app=llama-70b")
    if target.namespace is not None and not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", target.namespace):
        message = f"{cut(target.namespace)!r} is no name of a namespace"
        yield places.fault(f"{drill.at}.target.namespace", message, "`kubectl get namespaces` lists them")


def _schedule_faults(config: Config, drill: DrillConfig) -> Iterator[Fault]:
    """A cron line that is never due, or never when it may run."""
    schedule, places = drill.schedule, config.rules.places
    if schedule is None:
        return
    try:
        cron.check(schedule.cron)
    except Unfit as unfit:
        yield places.fault(f"{drill.at}.schedule.cron", unfit.message, unfit.remedy, cut(schedule.cron))
        return
    window = None if schedule.window is None else day_window(schedule.window)
    minutes = cron.minutes_of_day(schedule.cron)
    if window is not None and not any(daytime.in_window(window, minute) for minute in minutes):
        due = f"{minutes[0] // 60:02d}:{minutes[0] % 60:02d}"
        message = f"cron is due at {due}, which is never inside the window {schedule.window}"
        yield places.fault(f"{drill.at}.schedule.window", message, "move one of them into the other")


def own_time_s(rule: Rule) -> float:
    """How long a breach must last until a rule fires: its `for`, and what its signal waits for by itself."""
    return rule.for_s + (float(rule.params.get("flat", 0.0)) if rule.signal == "engine_stuck" else 0.0)


def _length_faults(config: Config, drill: DrillConfig, announced: Sequence[Rule]) -> Iterator[Fault]:
    """A fault too short for its alarm, or for a judgement of 1 %."""
    places = config.rules.places
    for rule in announced:
        if rule.signal in _AS_LONG_AS_AWAY and rule.id not in drill.expects:
            continue
        needed_s = math.ceil(own_time_s(rule) + 2 * config.poll + DETECT_S)
        if drill.for_ < needed_s:
            message = f"{drill.for_:g} s are too short for {rule.id} to fire (its own {own_time_s(rule):g} s"
            message += f" + 2 polls + {DETECT_S:g} s)"
            yield places.fault(f"{drill.at}.for", message, f"write for: {needed_s}s or more")
    if drill.load is None or drill.load.rate * drill.for_ >= FEWEST_REQUESTS:
        return
    rate, span_s = math.ceil(FEWEST_REQUESTS / drill.for_), math.ceil(FEWEST_REQUESTS / drill.load.rate)
    message = f"{drill.load.rate:g}/s for {drill.for_:g} s are {drill.load.rate * drill.for_:g} requests"
    message += f"; under {FEWEST_REQUESTS}, one failure leaves 1 % unproven"
    yield places.fault(f"{drill.at}.for", message, f"write load.rate: {rate}/s, or for: {span_s}s")


def _holds_faults(config: Config, drill: DrillConfig) -> Iterator[Fault]:
    """What is asked for users, and nobody would see. Without load the defaults leave a drill INCONCLUSIVE."""
    if drill.load is not None:
        return
    usual = DrillHolds()
    for name in ("goodput", "ttft_p99", "itl_p99", "error_ratio", "degraded"):
        if getattr(drill.holds, name) not in (None, getattr(usual, name)):
            yield config.rules.places.fault(f"{drill.at}.holds.{name}", "without load nobody can tell",
                                            "add load: {url: …}, or remove it")


def why_unseen(config: Config, drill: DrillConfig, announced: Sequence[Rule]) -> tuple[str, str] | None:
    """Why no signal can see this fault at the address it hits, and what would change that; None where one can."""
    if drill.fault in OUTSIDE:
        if drill.load is None:
            return (
                f"no signal can see {drill.fault}: an engine's own latency begins behind it",
                "add load: {url: …}: the prober measures what users see",
            )
        blind = [rule.id for rule in announced if rule.signal in _OWN_PAGE]
        if drill.expects and blind and len(blind) == len(drill.expects):
            return (
                f"{', '.join(blind)} cannot see {drill.fault}: the engine measures it itself, behind the fault",
                "expect user-ttft-p99, user-itl-p99 or user-error-rate",
            )
        return _why_unseen_by_users(config, drill, announced)
    if drill.fault == "gpu-reset":
        return _why_reset_unseen(config, drill, announced)
    if drill.target.selector is not None and drill.load is None and not config.engines:
        message = f"no signal can see {drill.fault}: no engine is configured, and nobody asks as users do"
        return message, "add load: {url: …}"
    if drill.fault in WITH_PARTS and drill.target.port is not None and _engine_at(config, drill.target.port) is None:
        message = f"no signal can see {drill.fault} at port {drill.target.port}: the agent watches no engine there"
        return message, "add the engine under engines, and name it"
    if drill.load is None and announced and all(rule.signal == "engine_stuck" for rule in announced):
        return (
            "no signal can see a hung engine without work in flight: one that idles is not stuck",
            "add load: {url: …}",
        )
    return None


def _why_unseen_by_users(config: Config, drill: DrillConfig, announced: Sequence[Rule]) -> tuple[str, str] | None:
    """Why what users see of a fault between them and the engine cannot fire."""
    if announced and all(rule.signal in _BY_STREAMS for rule in announced):
        if drill.load is not None and not drill.load.streaming:
            names = ", ".join(rule.id for rule in announced)
            return f"without streaming nobody sees a first token: {names} cannot fire", "write streaming: true"
        limit_s = config.slo.ttft_p99
        if drill.fault == "upstream-timeout" and drill.params.delay is not None and drill.params.delay <= limit_s:
            message = f"a delay of {drill.params.delay:g} s is inside the SLO of {limit_s:g} s"
            return f"{message}: {announced[0].id} cannot fire", "write a longer delay"
    return None


def _why_reset_unseen(config: Config, drill: DrillConfig, announced: Sequence[Rule]) -> tuple[str, str] | None:
    if drill.params.mode == "reset":
        if _engine_of(config, drill) is not None:
            return None
        told = "no engine is" if not config.engines else "several engines are"
        return f"no signal can see gpu-reset: which engine does it hit? {told} configured", "name target.engine"
    if drill.target.gpu is None:
        return "no alert can be told to be of a synthetic gpu-reset: on which GPU?", "name target.gpu by its UUID"
    if announced:
        return None
    return "no rule that is on sees a line of an Xid in the kernel's log", f"enable {XID_RULES[0]}, or write expects"


# Not the drill says how long these last, but who brings a replica back.
_AS_LONG_AS_AWAY = frozenset({"replicas_missing"})
_BY_STREAMS = frozenset({"user_ttft_slow_share", "user_itl_slow_share"})
# Signals that an engine's own page gives: they do not contain the way from the user to it.
_OWN_PAGE = frozenset(
    {
        "queue_age", "kv_cache_utilization", "preemptions", "graph_fallback", "ttft_slow_share", "itl_slow_share",
        "ttft_possibly_slow_share", "itl_possibly_slow_share", "e2e_slow_share", "e2e_possibly_slow_share",
        "error_burn", "node_error_burn", "error_rate", "prefix_cache_hit_rate", "swapped", "spec_decode_acceptance",
    }
)  # fmt: skip


def _engine_of(config: Config, drill: DrillConfig) -> EngineConfig | None:
    """The engine that a target means: by name or port; for a GPU the one that there is."""
    written = drill.target
    if written.engine is not None:
        return next((one for one in config.engines if target_name(one) == written.engine), None)
    if written.port is not None:
        return _engine_at(config, written.port)
    return config.engines[0] if written.gpu is not None and len(config.engines) == 1 else None


def _engine_at(config: Config, port: int) -> EngineConfig | None:
    return next((engine for engine in config.engines if port_of(engine.url) == port), None)


# ---- what it becomes ----


def _drill(config: Config, drill: DrillConfig) -> Drill:
    return Drill(
        name=drill.name,
        fault=drill.fault,
        target=_target(config, drill),
        schedule=_schedule(drill),
        load=_load(drill),
        for_s=drill.for_,
        baseline_s=drill.baseline,
        recovery_s=drill.recovery,
        resolve_within_s=drill.resolve_within,
        expects=drill.expects,
        holds=_holds(drill),
        params=_params(drill),
        enabled=drill.enabled,
        dry_run=drill.dry_run,
        echo=drill.echo,
        route_to=drill.route_to,
        owner=drill.owner,
    )


def _target(config: Config, drill: DrillConfig) -> dict[str, Any]:
    """The target with all that a fault asks of it: an engine's url, port and address, and where our state is."""
    written = drill.target
    target: dict[str, Any] = {
        name: str(value) if name == "path" else value
        for name in written.__struct_fields__
        if name != "upstream" and (value := getattr(written, name)) is not None
    }
    engine = _engine_of(config, drill)
    if engine is not None:
        target = {"engine": target_name(engine), "url": engine.url, "port": port_of(engine.url), **target}
        target.setdefault("address", urlsplit(engine.url).hostname)
    if written.upstream is not None:
        target["address"], target["port"] = written.upstream
    if drill.fault in ON_GPUS:
        target |= {"gpus": [] if engine is None else list(engine.gpus), "socket": str(config.socket),
                   "node": config.node, "other_watchers_ok": list(config.drill_guards.other_watchers_ok)}
    if written.selector is not None:
        target["node"] = config.node
    target["state_dir"] = str(config.state_dir)
    return target


def _schedule(drill: DrillConfig) -> Schedule | None:
    written = drill.schedule
    if written is None:
        return None
    window = None if written.window is None else day_window(written.window)
    # As written the last day is one of it; a person who writes 2027-01-06 means to be left alone on the 6th.
    blackouts = tuple((a, _day_after(b)) for a, b in written.blackouts)
    return Schedule(written.cron, written.zone, window, blackouts, written.grace, JITTER_S)


def _day_after(day: str) -> str:
    """The day after one; of the calendar's last day (who writes it means for ever) itself."""
    return (min(date.fromisoformat(day), date.max - timedelta(days=1)) + timedelta(days=1)).isoformat()


def _load(drill: DrillConfig) -> Load | None:
    written = drill.load
    if written is None:
        return None
    load = Load(
        url=written.url,
        model=written.model,
        rate_per_s=written.rate,
        streaming=written.streaming,
        retries=written.retries,
        connections=written.connections,
        deadline_s=written.deadline,
        max_tokens=written.max_tokens,
        api_key_file=None if written.api_key_file is None else str(written.api_key_file),
    )
    return load if written.prompt is None else replace(load, prompt=written.prompt)


def _holds(drill: DrillConfig) -> Holds:
    written = drill.holds
    degraded = None
    if written.degraded is not None:
        by = {name: value for name in ("model", "header") if (value := getattr(written.degraded.by, name)) is not None}
        degraded = {"within_s": written.degraded.within, "by": by}
    goodput = written.goodput
    holds = Holds(
        goodput=None if goodput is None else goodput.share,
        ttft_p99=_level(written.ttft_p99),
        itl_p99=_level(written.itl_p99),
        error_ratio=written.error_ratio,
        restart_within_s=written.restart_within,
        degraded=degraded,
        retry_storm=written.retry_storm,
    )
    return holds if goodput is None else replace(holds, goodput_within_s=goodput.within_s)


def _level(value: float | str | None) -> Literal["slo"] | float | None:
    return cast("Literal['slo']", value) if isinstance(value, str) else value


def _params(drill: DrillConfig) -> dict[str, Any]:
    """The fault's numbers as plain values, with their units in their names; what is not written is left out."""
    found: dict[str, Any] = {}
    for name in PARAMS[drill.fault]:
        value = getattr(drill.params, name)
        if value is not None:
            found[NAMES.get(name, name)] = {"netns": value.netns} if name == "peer" else value
    if drill.fault == "disk-full":
        found["path"] = str(drill.target.path)
    return found
