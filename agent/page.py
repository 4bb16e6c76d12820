"""What the person on call reads: a title of at most 100 characters, and a body that fits a phone. Pure.

Title: where, what, how bad, since when. Body: the cause with its number, limit and trend; what it brought; what is
still fine; what to do now with this engine's numbers; what to type; runbook and silence; the ten in one line. What is
not known is not said. docs/pages.md shows the page of every rule.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from agent.binds import ANY, FLAGS, KV_FULL, Bound
from agent.facts import Facts
from agent.model import Alert, Rule, Signal
from agent.words import SIGNS, SUMMARY_LENGTH, beside, cut, quantity, span, told

NEAR_C = 5.0  # a neighbour so near to the limit is hot, too
POWER_BRAKE = 0x80
THROTTLES = ((0x40, "hardware thermal slowdown"), (POWER_BRAKE, "power brake of the server"),
             (0x20, "thermal slowdown by the driver"), (0x4, "power cap"))  # nvml.h: nvmlClocksEventReason…


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it is now. `reasons`: NVML's bit mask of what holds its clock back; None: not told."""

    index: int
    uuid: str
    temp_c: float | None = None
    limit_c: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    reasons: int | None = None


@dataclass(frozen=True, slots=True)
class About:
    """One alert and what is known around it. `place`: "GPU 3 on gpu-17"; `who`: the same with its names in full.

    `address`: host:port of its engine; `engine`: what its engine is called; `gpus`: all of the node; `ranks`: indices
    of the GPUs of its engine, by rank; `kind`: of engine. `trend`: bars and range of the last ten minutes.
    """

    rule: Rule
    alert: Alert
    signal: Signal | None
    unit: str
    place: str
    who: str
    node: str
    trend: str = ""
    engine: str = ""
    address: str = ""
    kind: str = "unknown"
    facts: Facts = field(default_factory=dict)
    bound: Bound | None = None
    gpus: Sequence[Gpu] = ()
    ranks: Sequence[int] = ()

    @property
    def evidence(self) -> Mapping[str, Any]:
        """What the signal says beside its number; nothing where it has none now."""
        return {} if self.signal is None or self.signal.state != "value" else self.signal.evidence

    @property
    def value(self) -> str:
        """The number, with as many digits as it takes beside its limit."""
        return beside(self.alert.value, self.alert.limit, self.unit)

    @property
    def limit(self) -> str:
        """The limit as a clause; "" where none is promised."""
        return "" if self.alert.limit is None else f", limit {quantity(self.alert.limit, self.unit)}"

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that it is about: its subject, or that of the slow rank."""
        names = (self.alert.subject, self.evidence.get("slow_gpu"))
        return next((gpu for gpu in self.gpus if gpu.uuid in names), None)


# --- what: one clause a signal ---------------------------------------------------------------------------------------

Say = Callable[[About], str]


def _number(form: str) -> Say:
    """A clause around the number and its limit: {v}, {l}."""
    return lambda a: form.format(v=a.value, l=a.limit)


def _p99(what: str, limit: str = "SLO") -> Say:
    """`limit`: what the number beside it is; that of whole answers is 1.5 × the SLO, not the SLO."""
    def say(a: About) -> str:
        e = a.evidence
        if not e.get("p99_s"):
            return f"{what} too slow for {a.value}{a.limit}"
        return f"{what} p99 {'over ' if e.get('p99_over') else ''}{span(e['p99_s'])} ({limit} {span(e['slo_s'])})"
    return say


def _text(before: str = "") -> Say:
    """The sentence that the signal itself tells."""
    def say(a: About) -> str:
        words = told(a.signal) if a.signal is not None and a.signal.state == "value" else None
        last = "no number now" if a.alert.value is None else f"{a.value}{a.limit}"
        return f"{before}{words or last}"
    return say


def _burn(a: About) -> str:
    rates = {k.removeprefix("burn_"): v for k, v in a.evidence.items() if k.startswith("burn_")}
    worst = max(rates, key=lambda k: rates[k], default=None)
    if worst is None:
        return f"errors spend their budget {a.value} too fast"
    return f"errors spend their budget {quantity(rates[worst], 'of limit')} too fast (last {worst})"


def _errors(a: About) -> str:
    e = a.evidence
    if not e.get("requests"):
        return f"at least {a.value} of requests fail{a.limit}"
    return f"{e['errors']:.0f} of {e['requests']:.0f} requests failed (surely {a.value} or more){a.limit}"


def _traffic(a: About) -> str:
    """Which way it went, against the nearer of what was usual."""
    now, usual = a.evidence.get("requests"), [a.evidence[k] for k in ("30 min before", "yesterday") if k in a.evidence]
    if now is None or not usual:
        return f"traffic {a.value} off its usual{a.limit}"
    nearest = min(usual, key=lambda count: abs(now / count - 1) if count else float("inf"))
    way = "under" if now < nearest else "over"
    window = span(a.rule.window_s or 60.0)
    return f"traffic {a.value} {way} its usual: {now:.0f} requests in {window}, usually {nearest:.0f}"


def _slow_rank(a: About) -> str:
    rank, gpu = a.evidence.get("slow_rank"), a.gpu
    on = "" if gpu is None else f" (GPU {gpu.index})"
    return f"{'a rank' if rank is None else f'rank {rank}'}{on} {a.value} slower{a.limit}"


def _slow_clock(a: About) -> str:
    rank, gpu = a.evidence.get("slow_rank"), a.gpu
    on = "" if gpu is None else f" (GPU {gpu.index})"
    return f"{'one rank' if rank is None else f'rank {rank}'}{on} at a {a.value} lower clock{a.limit}"


def _margin(a: About) -> str:
    """A margin of kelvins says little at night; the temperature does."""
    e = a.evidence
    if "gpu_temp_c" not in e:
        return f"{a.value} left to its own limit"
    own = "" if e.get("own_limit_c") is None else f", its limit {e['own_limit_c']:.0f} °C"
    return f"{e['gpu_temp_c']:.0f} °C{own}" + (", slowed" if e.get("slowed") else "")


def _heat_of_memory(a: About) -> str:
    e = a.evidence
    if "memory_temp_c" not in e:
        return f"its memory is {a.value} over its limit"
    return f"memory {e['memory_temp_c']:.0f} °C, its limit {e['memory_limit_c']:.0f} °C"


def _outside(what: str) -> Say:
    def said(about: About) -> str:
        e = about.evidence
        if "user_s" not in e:
            return _number("{v} of the wait is not the engine's{l}")(about)
        return f"{about.value} of {span(e['user_s'])} to {what} are not the engine's{about.limit}"

    return said


def _fall(a: About) -> str:
    """What the business got, and what it got then."""
    e = a.evidence
    if "before" not in e:
        return f"{a.value} less than it was{a.limit}"
    return f"{a.value} less than {e['back']}: {e['now']:.6g}, then {e['before']:.6g}"


PHRASES: Mapping[str, Say] = {
    "queue_age": _number("oldest request has queued {v}{l}"),
    "kv_cache_utilization": _number("KV cache {v} full{l}"),
    "preemptions": _number("{v} requests preempted in 1 h{l}"),
    "graph_fallback": _number("{v} of decode steps without CUDA graph{l}"),
    "ttft_slow_share": _p99("TTFT"), "ttft_possibly_slow_share": _p99("perhaps too slow: TTFT"),
    "itl_slow_share": _p99("ITL"), "itl_possibly_slow_share": _p99("perhaps too slow: ITL"),
    "e2e_slow_share": _p99("whole answer", "limit"),
    "e2e_possibly_slow_share": _p99("perhaps too slow: whole answer", "limit"),
    "user_ttft_slow_share": _p99("users' TTFT"), "user_itl_slow_share": _p99("users' ITL"),
    "error_burn": _burn, "node_error_burn": _burn, "error_rate": _errors, "user_error_rate": _errors,
    "outside_engine": _outside("a first token"), "outside_engine_whole": _outside("a whole answer"),
    "rank_step_spread": _slow_rank, "rank_clock_spread": _slow_clock,
    "gpu_temperature": _number("{v}{l}"), "gpu_thermal_margin": _margin,
    "prefix_cache_hit_rate": _number("only {v} of prefix lookups hit{l}"),
    "qps_change": _traffic,
    "gpu_utilization": _number("busy only {v} of the time{l}"), "gpu_memory": _number("memory {v} full{l}"),
    "gpu_memory_low": _text("memory "), "gpu_memory_growth": _number("memory in use grew by {v} of it in 1 h{l}"),
    "swapped": _number("{v} requests swapped out to the host"),
    "spec_decode_acceptance": _number("only {v} of drafted tokens accepted{l}"),
    "business_drop": _fall,
    "engine_down": _text("down: "), "engine_slow": _text("slow: "), "engine_stopped": _text("not up: "),
    "engine_stuck": _text("stuck: "), "blind": _text("cannot see "), "watcher": _text(),
    "gpu_memory_heat": _heat_of_memory, "drill_orphaned": _text("a drill is not undone: "),
    "drill_overdue": _text("a drill is overdue: "), "replicas_missing": _text(), "gpus_unallocatable": _text(),
    "gpu_spare_rows": _text(), "gpu_recovery": _text(), **{name: _text() for name in (
        "frontend_cpu", "cold_ttft", "cache_spread", "restarts_together", "overload_everywhere", "pipeline_bubble",
        "members_missing", "expert_imbalance", "expert_rebalances", "handover_queue", "kv_transfer_failures",
        "handover_state", "pool_ratio", "feature_transfers", "first_output_elsewhere", "promotion_busy",
        "replica_hotspot", "rollout_tail", "weights_lag")},
}


def phrase(about: About) -> str:
    """What is wrong and how bad, as a clause: "ITL p99 212 ms (SLO 150 ms)"."""
    return PHRASES.get(about.rule.signal, _text())(about)


def title(about: About, when: str, effects: Sequence[About] = ()) -> str:
    """Where: what and how bad; what it brought, as far as there is room; since when. At most 100 characters.

    `when`: "4 min", or how it ended. What is wrong is cut before the place is.
    """
    head, tail = f"{about.place}: ", f", {when}"
    room = SUMMARY_LENGTH - len(head) - len(tail)
    if room < 8:
        return cut(head + phrase(about) + tail, SUMMARY_LENGTH)
    text = cut(" ".join(phrase(about).split()), room)
    for effect in effects:
        more = f"{text}; {' '.join(phrase(effect).split())}"
        text = more if len(more) <= room else text
    return head + text + tail


# --- why it matters: one sentence a signal ---------------------------------------------------------------------------

_TTFT = "TTFT is the time to the first token: people look at an empty answer."
_ITL = "ITL is the time between two tokens: answers stutter."
_E2E = "Whole answers take longer than promised."
_BUDGET = "At this rate the error budget of the SLO is gone long before its window ends."
_PACE = "A rank is one GPU's share of the model; the slowest one paces all."
MEANS: Mapping[str, str] = {
    "queue_age": "It is not scheduled yet, and half of the time to its first token is gone: users are about to wait.",
    "kv_cache_utilization": "The KV cache is the memory of running requests: soon newcomers wait or are thrown out.",
    "preemptions": "Each was thrown out for want of KV memory, and is computed again from its start: its user waits.",
    "graph_fallback": "Such a step runs 2 to 5 times slower: its shape was not captured at warm-up.",
    "ttft_slow_share": _TTFT, "user_ttft_slow_share": _TTFT, "itl_slow_share": _ITL, "user_itl_slow_share": _ITL,
    "ttft_possibly_slow_share": "The SLO lies inside a bucket of the engine's histogram, so nobody can tell for sure.",
    "itl_possibly_slow_share": "The SLO lies inside a bucket of the engine's histogram, so nobody can tell for sure.",
    "e2e_possibly_slow_share": "The limit lies inside a bucket of the engine's histogram, so nobody can tell for sure.",
    "e2e_slow_share": _E2E, "error_burn": _BUDGET, "node_error_burn": _BUDGET,
    "error_rate": "The engine's own count is a lower bound: clients that gave up are in none.",
    "user_error_rate": "This is what users get at their own address.",
    "outside_engine": "The same question, streamed, at users' address and engine: between lie network, router, proxy.",
    "outside_engine_whole": "The same question, not streamed, at users' address and engine.",
    "rank_step_spread": _PACE, "rank_clock_spread": _PACE,
    "gpu_temperature": "Near its own limit the card lowers its clock, and slows every rank of its engine.",
    "gpu_thermal_margin": "The card lowers its clock by itself now, and slows every rank of its engine.",
    "gpu_thermal_slowdown": "The card lowers its clock because of heat, and slows every rank of its engine.",
    "gpu_power_brake": "The server tells the card to slow down for want of power.",
    "prefix_cache_hit_rate": "Prompts that could be reused are computed anew: TTFT pays for it.",
    "qps_change": "Requests went elsewhere, or clients give up or storm in.",
    "gpu_utilization": "It waits for something while requests run.",
    "gpu_memory": "Little is left for a spike, and an allocation may fail.",
    "gpu_memory_low": "When it is gone the engine dies with out-of-memory.",
    "gpu_memory_growth": "A server's memory is steady after its warm-up: something leaks.",
    "swapped": "Their KV cache is in host memory: they stand still until it is back.",
    "spec_decode_acceptance": "Speculation costs more than it gains: rejected tokens are computed for nothing.",
    "business_drop": "Engines may be green and answers useless: what the business gets is what counts.",
    "engine_down": "Nobody can reach this engine.", "engine_slow": "It takes connections, and answers too late.",
    "engine_stopped": "It is starting, or somebody asked it to stop: it takes no requests.",
    "engine_stuck": "Requests are in it and nothing moves: users wait for ever.",
    "blind": "What is not measured cannot alert. Nothing else says that it is healthy.",
    "watcher": "Tocsin itself is not well: pages may be late.",
    "xid_gpu": "The driver reports a fault of the GPU (an Xid).",
    "xid_memory": "The driver reports a fault of GPU memory.",
    "xid_link": "The driver reports a fault of an NVLink, the path between GPUs.",
    "xid_app": "The driver contained a fault of GPU memory: it ended the one application that was hurt.",
    "replicas_missing": "The others carry its load, and one more loss may be too many.",
    "gpus_unallocatable": "Kubernetes gives this GPU to no new pod; one that runs on it runs on.",
    "xid_ticket": "The driver reports a fault that can wait until the morning.",
    "xid_note": "The driver notes it; nothing is broken.",
    "kernel_log_forged": "No GPU is broken by it; somebody may try to make you act.",
    "kernel_log_lost": "An Xid may have been among them.",
    "gpu_lost": "The GPU no longer answers; what ran on it is dead or soon will be.",
    "gpu_count": "A GPU that was there, or that is written down, is not.",
    "driver_mismatch": "Running engines go on; none can start.",
    "device_access": "The GPUs are there; the rights are not.",
    "gpu_recovery": "The driver itself says what this GPU needs.",
    "gpu_ecc_uncorrected": "A bit of memory was lost; the driver has ended what used it.",
    "gpu_ecc_rate": "Each is harmless; so many foretell memory that fails.",
    "gpu_remap_pending": "A faulty row of memory is still in use until the GPU is reset.",
    "gpu_remap_failed": "A faulty row of memory can no longer be replaced: data may be wrong.",
    "gpu_spare_rows": "The next fault there cannot be repaired.",
    "gpu_retired_pages": "Pages of memory are taken out of use; their table has an end.",
    "gpu_memory_heat": "Hot memory makes errors, and the card slows down.",
    "gpu_nvlink_down": "GPUs that work together talk through it: they stop, or crawl over PCIe.",
    "gpu_nvlink_recovered": "A link that has to recover fails for good within days.",
    "gpu_nvlink_errors": "Every one is sent again: the ranks wait for it.",
    "gpu_pcie_loss": "Loading and swapping take longer.",
    "gpu_pcie_replays": "Every one is sent again; the link is bad.",
    "gpu_fabric": "CUDA does not start on this GPU until the fabric (NVSwitch) has taken it in.",
    "gpu_persistence_off": "An idle GPU is set up anew at each first use, for seconds.",
    "frontend_cpu": "One Python process takes requests apart and puts answers together: at one core it is the limit.",
    "cold_ttft": "Who comes first after a restart waits several times as long.",
    "cache_spread": "Prompts that one replica has cached go to another, and are computed anew there.",
    "restarts_together": "All caches are cold at once, and the others carry the whole load meanwhile.",
    "overload_everywhere": "Every replica is late: there is nowhere to route to.",
    "pipeline_bubble": "GPUs that are paid for stand still while a stage waits.",
    "members_missing": "A group that has lost a member hangs, or answers with fewer than it was planned for.",
    "expert_imbalance": "All wait for the GPU of the busiest expert at each layer.",
    "expert_rebalances": "Each time weights are copied while requests run.",
    "handover_queue": "Prefill is done and nobody decodes: the first token waits at the boundary.",
    "kv_transfer_failures": "The request is computed anew at decode, or fails.",
    "handover_state": "KV blocks that nobody fetches are missing at prefill for new prompts.",
    "pool_ratio": "One pool is too small and the other too large for this traffic.",
    "feature_transfers": "What the encoder has made is lost on its way.",
    "first_output_elsewhere": "More than queue and prefill together lies outside of them.",
    "promotion_busy": "The link between GPU and host is busy with cache: decode and loading wait for it.",
    "replica_hotspot": "Routing by cache sends everybody to one replica while others idle.",
    "rollout_tail": "The step waits for its longest answer, and the GPUs of the others idle.",
    "weights_lag": "It makes training data with old weights.",
    "drill_orphaned": "Something that was broken on purpose is still broken.",
    "drill_overdue": "What is not practised does not work when it must.",
}


# --- the numbers that belong to it -----------------------------------------------------------------------------------


def _fits(facts: Facts) -> int | None:
    """How many requests as long as those that run now fit under 85 % of the KV cache."""
    running, usage = facts.get("running"), facts.get("kv_usage")
    return int(KV_FULL * running / usage) if running and usage else None


def kv_room(about: About) -> str:
    """What the KV cache holds, what a request takes of it, and how many fit."""
    facts = about.facts
    running, usage, tokens = facts.get("running"), facts.get("kv_usage"), facts.get("capacity_tokens")
    parts = [f"The cache holds {tokens:,.0f} tokens"] if tokens else []
    if running and usage:
        each = f", {tokens * usage / running:,.0f} tokens each" if tokens else ""
        parts.append(f"{running:.3g} run at once on average{each}: {_fits(facts)} of that length fit under"
                     f" {quantity(KV_FULL, 'ratio')}")
    return "; ".join(parts) + "." if parts else ""


def ttft_split(about: About) -> str:
    """How much of the time to the first token is queue, and how much prefill."""
    ttft_s, queue_s = about.facts.get("ttft_s"), about.facts.get("queue_s")
    if not ttft_s or queue_s is None:
        return ""
    share = min(1.0, queue_s / ttft_s)
    return (f"Of the mean {span(ttft_s)} to the first token {quantity(share, 'ratio')} is queue and"
            f" {quantity(1 - share, 'ratio')} prefill (the computing of the prompt), as an estimate.")


def throttles(reasons: int | None) -> str:
    """What holds a clock back, in words."""
    return ", ".join(name for bit, name in THROTTLES if reasons is not None and reasons & bit)


def gpu_now(gpu: Gpu | None) -> str:
    """Its clock, temperature, and what holds it back."""
    if gpu is None:
        return ""
    parts = [] if gpu.temp_c is None else [f"{gpu.temp_c:.0f} °C"]
    if gpu.clock_mhz is not None and gpu.clock_max_mhz:
        parts.append(f"SM clock {gpu.clock_mhz:.0f} of {gpu.clock_max_mhz:.0f} MHz")
    parts += [f"held back by {held}"] if (held := throttles(gpu.reasons)) else []
    return f"GPU {gpu.index}: {', '.join(parts)}." if parts else ""


def neighbours(about: About) -> str:
    """Whether it is one card or the chassis."""
    gpu = about.gpu
    temps = {g.index: g.temp_c for g in about.gpus if gpu is not None and g.uuid != gpu.uuid and g.temp_c is not None}
    if gpu is None or gpu.temp_c is None or not temps:
        return ""
    hot = sorted(index for index, temp_c in temps.items() if temp_c > gpu.temp_c - 2 * NEAR_C)
    if hot:
        which = ", ".join(f"GPU {index} {temps[index]:.0f} °C" for index in hot[:3])
        return f"Others are hot, too ({which}): the chassis or the inlet, not one card."
    low, high = min(temps.values()), max(temps.values())
    rest = f"{low:.0f} °C" if low == high else f"{low:.0f} to {high:.0f} °C"
    return f"The other GPUs are at {rest}: this card or its slot, not the room."


def also_braked(about: About) -> str:
    """Whether the server slows one card or more for want of power; "" where this one is not slowed just now."""
    gpu = about.gpu
    if gpu is None or gpu.reasons is None or not gpu.reasons & POWER_BRAKE:
        return ""
    others = [str(g.index) for g in about.gpus if g.uuid != gpu.uuid and g.reasons is not None
              and g.reasons & POWER_BRAKE]
    return f"So are GPU {', '.join(others)}: the supply or the feed of the whole server." if others else \
        "No other GPU is: look at this card's power cables first."


def binding(about: About) -> str:
    """What binds its engine, where that is known."""
    bound = about.bound
    if bound is None or bound.by in ("idle", "cannot-tell"):
        return ""
    return f"What binds {about.engine}: {bound.name}, {bound.why}."


LOAD = frozenset({"queue_age", "kv_cache_utilization", "preemptions", "ttft_slow_share", "itl_slow_share",
                  "e2e_slow_share", "swapped", "user_ttft_slow_share", "user_itl_slow_share"})
OF_KV = frozenset({"kv_cache_utilization", "preemptions", "swapped", "queue_age"})
OF_RANK = frozenset({"rank_step_spread", "rank_clock_spread"})
OF_HEAT = frozenset({"gpu_temperature", "gpu_thermal_margin", "gpu_thermal_slowdown"})
OF_POWER = frozenset({"gpu_power_brake"})


TRENDING = (("p99_s", "s"), ("gpu_temp_c", "celsius"), ("memory_temp_c", "celsius"))


def trending(signal: Signal, unit: str) -> tuple[float | None, str]:
    """The number whose way a person wants to see, and its unit: a p99 before a share, a temperature before a margin."""
    for key, own in TRENDING if unit == "kelvin" else TRENDING[:1]:
        if isinstance(signal.evidence.get(key), float):
            return signal.evidence[key], own
    return signal.value, unit


def runs_here(about: About) -> str:
    """Which engine, and which rank of it, is on the GPU."""
    gpu = about.gpu
    if gpu is None or not about.engine or gpu.index not in about.ranks or about.alert.subject != gpu.uuid:
        return ""
    rank = about.ranks.index(gpu.index)
    return f"{about.engine} runs on it" + (f" (rank {rank} of {len(about.ranks)})." if len(about.ranks) > 1 else ".")


def details(about: About) -> list[str]:
    """The numbers that a person would ask for next, as sentences."""
    signal = about.rule.signal
    found = [runs_here(about), kv_room(about) if signal in OF_KV else "",
             ttft_split(about) if signal == "ttft_slow_share" else "",
             gpu_now(about.gpu) if signal in OF_RANK | OF_HEAT | OF_POWER else "",
             neighbours(about) if signal in OF_HEAT else also_braked(about) if signal in OF_POWER else "",
             binding(about) if signal in LOAD else ""]
    note = about.evidence.get("note")
    return [text for text in (*found, f"Note: {note}." if note else "") if text]


# --- what to do ------------------------------------------------------------------------------------------------------


def _leave(about: About) -> str:
    return f"Send {about.engine or 'this engine'} on {about.node} less traffic: less weight at the router, or none."


def _scale(about: About) -> list[str]:
    """What takes load off, then the knob of what binds."""
    steps = [_leave(about)]
    bound = about.bound
    if bound is not None and bound.knob:
        steps.append(f"Then, at its next restart: {bound.knob}. Would not help: {bound.no_help}.")
    return steps


def _kv_steps(about: About) -> list[str]:
    flags, fits = FLAGS.get(about.kind, ANY), _fits(about.facts)
    first = _leave(about) if about.rule.severity == "page" else \
        "Nothing tonight if its queue, TTFT and ITL are fine."
    upto = "" if fits is None else f" to at most {fits} (that many of today's length fit)"
    fewer = f"Fewer at once: {flags.sequences}{upto}."
    more = f"Or more room: {flags.kv}, or another replica (tocsin advise kv-cache)."
    return [first, fewer, more]


def _ttft_steps(about: About) -> list[str]:
    ttft_s, queue_s = about.facts.get("ttft_s"), about.facts.get("queue_s")
    steps = _scale(about)
    if ttft_s and queue_s is not None:
        queue = queue_s >= ttft_s / 2
        steps.append("It is mostly queue: more replicas or seats help, a larger prefill chunk does not." if queue else
                     "It is mostly prefill: look for longer prompts and a fallen prefix-cache hit rate;"
                     " tocsin advise chunked-prefill.")
    return steps


def _itl_steps(about: About) -> list[str]:
    steps = _scale(about)
    held = [gpu for gpu in about.gpus if gpu.index in about.ranks and throttles(gpu.reasons)]
    if held:
        said = "; ".join(gpu_now(gpu).rstrip(".") for gpu in held)
        steps.insert(0, f"A GPU below it is held back, and paces all: {said}.")
    return [*steps, "Long prompts between the tokens: a smaller prefill chunk (tocsin advise chunked-prefill)."]


def _rank_steps(about: About) -> list[str]:
    gpu = about.gpu
    if gpu is None:
        return [_leave(about), about.rule.action]
    held = throttles(gpu.reasons)
    why = f"Mend what holds GPU {gpu.index} back ({held}): fans, inlet, power supplies." if held else \
        f"Nothing holds GPU {gpu.index}'s clock back: see its Xids and links (tocsin check --gpus), then swap the card."
    return [_leave(about), why, "Until then the other ranks wait for it: more load will not get through."]


def _heat_steps(about: About) -> list[str]:
    one = "this card" in neighbours(about)
    return [_leave(about) if about.engine else "Move its load to another node.",
            "Look at this card: its heat sink, slot and the cables in its air." if one else
            "Look at fans and inlet: ipmitool sdr type Fan; ipmitool sdr type Temperature.",
            "If it stays hot without load: power-cycle, then have it replaced (RMA)."]


def _down_steps(about: About) -> list[str]:
    rung = {"TCP": "Nobody listens: read its last log lines and exit status (journalctl, docker logs), start it.",
            "/health": "It calls itself unhealthy: its core has died under the server; restart the whole engine.",
            "/metrics": "It serves and does not tell its numbers: see its log."}.get(
        str(about.evidence.get("failing")), "Read its last log lines and its exit status; restart it.")
    return ["See that the router has taken it out; else take it out.", rung,
            "Killed by the host or the GPU? journalctl -k --since -15min | grep -iE 'oom|NVRM: Xid'"]


def _stuck_steps(about: About) -> list[str]:
    return [f"Take {about.engine or 'it'} out of the router: whoever is sent there waits for ever.",
            "Save its stacks for the morning, then restart it: py-spy dump --pid PID (its core, then each worker).",
            "Where ranks hang together, see their links and Xids: tocsin check --gpus."]


def _error_steps(about: About) -> list[str]:
    first = "Which errors: the engine's log, and the router's by status."
    return [_leave(about) if about.rule.severity == "page" and about.engine else first,
            "Out of memory or a fault of a GPU? journalctl -k --since -15min | grep -iE 'oom|NVRM: Xid'",
            "Time-outs: see its queue and KV cache in the ten below. 503: it refuses what it cannot queue.",
            "None of these: the router, a proxy or what the engine itself calls (upstream)."]


def _user_steps(about: About) -> list[str]:
    own = "error burn rate" if about.rule.signal == "user_error_rate" else "queue, TTFT or ITL"
    return [f"An engine's {own} is over its limit too (! in the ten below)? It is the cause: go on with its own page.",
            "Else it lies between: ask once yourself with what stands below. 401 is an answer, too.",
            "Look at the router first: its queue, retries, a replica that it took out; then proxies, lost packets."]


def _outside_steps(about: About) -> list[str]:
    other = "outside-engine-whole" if about.rule.signal == "outside_engine" else "outside-engine"
    alone = "a proxy gathers the stream before it passes it on: turn its buffering off"
    if not other.endswith("whole"):
        alone = "something reads whole bodies: a content filter, a log, compression"
    return [f"Is {other} fine (tocsin check)? Then {alone}.",
            "Both: every request waits: the router's queue, its retries, or TLS anew for each request.",
            "Ask once yourself, through the address and past it, with what stands below."]


def _watcher_steps(about: About) -> list[str]:
    if "failing_s" not in about.evidence:
        return [about.rule.action]
    return [f"{about.alert.subject} wakes nobody until it is mended (what is owed is kept): watch `tocsin alerts`.",
            "Send a test (below; it goes through every channel): it prints what the receiver answers."]


STEPS: Mapping[str, Callable[[About], list[str]]] = {
    "queue_age": _scale, "kv_cache_utilization": _kv_steps, "preemptions": _kv_steps, "swapped": _kv_steps,
    "ttft_slow_share": _ttft_steps, "itl_slow_share": _itl_steps, "e2e_slow_share": _scale,
    "rank_step_spread": _rank_steps, "rank_clock_spread": _rank_steps, "gpu_temperature": _heat_steps,
    "gpu_thermal_margin": _heat_steps, "gpu_thermal_slowdown": _heat_steps, "engine_down": _down_steps,
    "engine_stuck": _stuck_steps, "error_burn": _error_steps, "error_rate": _error_steps,
    "watcher": _watcher_steps, "outside_engine": _outside_steps, "outside_engine_whole": _outside_steps,
    "user_error_rate": _user_steps, "user_ttft_slow_share": _user_steps, "user_itl_slow_share": _user_steps,
}


def steps(about: About) -> list[str]:
    """What to do now, in this order: for this case where it is known, else the rule's own word."""
    own = str(about.evidence.get("do") or "")
    if about.rule.signal in STEPS and not own:
        return STEPS[about.rule.signal](about)
    said = [own[:1].upper() + own[1:].rstrip(".") + "."] if own else [about.rule.action] * bool(about.rule.action)
    of_gpu = about.gpu is not None and about.engine and about.rule.severity == "page"
    return [_leave(about), *said] if of_gpu else said


SMI: tuple[tuple[str, str], ...] = (  # start of a signal's name -> nvidia-smi's words; the first that fits
    ("gpu_memory_heat", "-q -d TEMPERATURE"), ("gpu_memory", "--query-compute-apps=pid,used_memory --format=csv"),
    ("gpu_ecc", "-q -d ECC"), ("gpu_remap", "-q -d ROW_REMAPPER"), ("gpu_spare", "-q -d ROW_REMAPPER"),
    ("gpu_retired", "-q -d PAGE_RETIREMENT"), ("gpu_pcie", "-q -d PCIE"), ("gpu_utilization", "-q -d UTILIZATION"),
)


def _nvidia_smi(gpu: Gpu, signal: str) -> str:
    if signal.startswith("gpu_nvlink"):
        return f"nvidia-smi nvlink -s -i {gpu.uuid}"
    if signal in ("gpu_fabric", "gpu_recovery", "gpu_persistence_off"):
        return f"nvidia-smi -i {gpu.uuid} -q | grep -iE -A3 'fabric|recovery|persistence'"
    words = next((words for start, words in SMI if signal.startswith(start)), "-q -d TEMPERATURE,CLOCK,PERFORMANCE")
    return f"nvidia-smi -i {gpu.uuid} {words}"


TIMES = r"%{http_code}, connected after %{time_connect} s, first byte after %{time_starttransfer} s\n"  # for curl -w


def commands(about: About) -> list[str]:
    """What to paste, on the node."""
    gpu, address, signal = about.gpu, about.address, about.rule.signal
    if signal.startswith("drill_"):
        return ["tocsin drill history", *(["sudo tocsin drill heal"] if signal == "drill_orphaned" else [])]
    if signal.startswith(("xid_", "kernel_log")):
        return ["journalctl -k --since -1h | grep NVRM", "tocsin check --gpus"]
    if signal in ("replicas_missing", "gpus_unallocatable"):
        return ["kubectl get pods -A -o wide | grep -v Running", "kubectl describe node " + shlex.quote(about.node)]
    if signal in ("watcher", "blind"):
        test = ["tocsin notify test"] if "failing_s" in about.evidence else []
        return ["tocsin doctor", *test, *(["systemctl status tocsin"] if signal == "watcher" else [])]
    if signal in ("engine_down", "engine_slow", "engine_stopped") and address:
        return [f"curl -sv -m 5 -o /dev/null http://{address}/health", f"tocsin doctor http://{address}"]
    if signal.startswith(("user_", "outside_")):
        where = about.alert.subject.rstrip("/").removesuffix("/v1")
        return [f"curl -sS -m 10 -o /dev/null -w '{TIMES}' {shlex.quote(where)}/v1/models", "tocsin check"]
    if signal in ("business_drop", "source_value"):
        return ["tocsin doctor", "tocsin check --all"]
    if signal == "engine_stuck":
        return ["pgrep -af 'EngineCore|Worker'", *([f"tocsin doctor http://{address}"] if address else [])]
    if signal == "gpu_count":
        return ["lspci -d 10de:", "journalctl -k --since -1h | grep -E 'NVRM|pcie'", "tocsin check --gpus"]
    if signal == "gpu_lost":
        return ["nvidia-smi -L", "journalctl -k --since -1h | grep -E 'NVRM|pcie'", "tocsin check --gpus"]
    found = [_nvidia_smi(gpu, signal)] if gpu is not None else []
    found += [f"tocsin doctor http://{address}"] if address and not signal.startswith("gpu_") else []
    return found or (["tocsin check --gpus"] if signal.startswith(("gpu_", "driver", "device")) else ["tocsin check"])


# --- the whole -------------------------------------------------------------------------------------------------------


def cause(about: About) -> list[str]:
    """Who, what, against which limit, since when it went so, and why there is no number now."""
    what, limit = phrase(about), about.alert.limit
    if limit and about.unit not in ("count", "of limit") and not any(w in what for w in ("limit", "SLO")):
        what += f" ({SIGNS[about.rule.op]} {quantity(limit, about.unit)} breaches)"
    lines = [f"Cause: {about.who}: {what}. {MEANS.get(about.rule.signal, '')}".rstrip()]
    if about.signal is not None and about.signal.state != "value" and about.signal.why:
        lines.append(f"No number now: {about.signal.why}. What stands here is the last that was known.")
    if about.trend:
        lines.append(f"Last 10 min: {about.trend}")
    return lines + details(about)


def body(about: About, effects: Sequence[tuple[str, About | None]] = (), *, fine: str = "", ten: str = "",
         runbook: str = "", more: Sequence[str] = ()) -> str:
    """The whole page. `effects`: rule and what is known of each alert that it brought, the latest known line else.

    `runbook`: an address that a phone can open, or "".
    """
    lines = cause(about)
    shown = [f"- {phrase(one)} ({one.rule.id})" if one is not None else f"- {text}" for text, one in effects]
    lines += ["Effect:", *shown] if shown else []
    lines += [fine] if fine else []
    todo = list(dict.fromkeys([*steps(about), *(s for _, one in effects if one is not None and
                                                (one.gpu is None or one.gpu != about.gpu) for s in steps(one)[1:2])]))
    lines += ["Do now:", *(f"{n}. {step}" for n, step in enumerate(todo[:5], 1))]
    lines += [f"On {about.node}:", *(f"    {command}" for command in commands(about))]
    lines += more
    lines.append(f"Runbook: {runbook}" if runbook else f"Runbook: {about.rule.id} (on {about.node}: tocsin check)")
    lines += [silence(about)]
    return "\n".join([*lines, *([ten] if ten else [])])


def silence(about: About) -> str:
    """What to type where it is known and shall not ring again for a while."""
    words = f"{shlex.quote(about.rule.id)} {shlex.quote(about.alert.subject)}"
    return f'Silence: tocsin silence {words} --for 2h --why "…"'


FINE: tuple[tuple[str, str], ...] = (("queue_age", "queue"), ("ttft_slow_share", "TTFT"), ("itl_slow_share", "ITL"),
                                     ("error_burn", "errors"), ("kv_cache_utilization", "KV cache"),
                                     ("gpu_temperature", "GPUs"))


OF_ERRORS = frozenset({"error_burn", "node_error_burn", "error_rate", "user_error_rate"})
OF_LIFE = frozenset({"engine_down", "engine_stuck", "engine_slow", "engine_stopped"})


def still_fine(rows: Sequence[Mapping[str, Any]], told: Sequence[About] = ()) -> str:
    """What is in range on the whole node, with its number; rows as `check` tells them.

    `told`: what the page is about. Nothing is fine of an engine that does not answer, whatever it told last; and where
    requests fail, nobody wants to read that the budget bears it.
    """
    parts = []
    dead = {name for one in told if one.rule.signal in OF_LIFE
            for name in (one.alert.subject, one.alert.subject.partition("/")[0])}
    failing = any(one.rule.signal in OF_ERRORS for one in told)
    for signal, name in FINE:
        own = [row for row in rows if row["signal"] == signal and row["subject"] not in dead
               and not (failing and signal == "error_burn")]
        judged = [row for row in own if row["state"] not in ("N/A", "IDLE")]
        if not judged or any(row["state"] != "OK" for row in judged):
            continue
        worst = max(judged, key=lambda row: row["value"] or 0.0)
        if signal == "error_burn":
            parts.append("no errors" if not worst["value"] else "errors within their budget")
        elif signal.endswith("slow_share") and worst["evidence"].get("p99_s") is not None:
            parts.append(f"{name} p99 {span(worst['evidence']['p99_s'])} (SLO {span(worst['evidence']['slo_s'])})")
        else:
            most = "at most " if len(judged) > 1 else ""
            parts.append(f"{name} {most}{quantity(worst['value'], worst['unit'])}")
    return f"Still fine: {', '.join(parts)}" if parts else ""


def resolved(opened_at: float, ended_at: float, now: Sequence[str]) -> str:
    """How it ended: resolved at 03:41 UTC after 29 min; GPU 3 at 74 °C; ITL p99 96 ms."""
    at = datetime.fromtimestamp(ended_at, UTC)
    return "; ".join([f"resolved at {at:%H:%M} UTC after {span(round(max(0.0, ended_at - opened_at)))}", *now])


def standing(about: About) -> str:
    """Where it stands now, for its end: "GPU 3: 74 °C"; "" where there is no number."""
    signal = about.signal
    if signal is None or signal.state not in ("value", "idle") or signal.value is None:
        return ""
    evidence = signal.evidence
    if evidence.get("p99_s"):
        return f"{about.place.partition(' on ')[0]}: {_p99_name(about.rule.signal)} p99 {span(evidence['p99_s'])}"
    if about.unit not in ("celsius", "s", "ratio"):
        return ""
    return f"{about.place.partition(' on ')[0]}: {quantity(signal.value, about.unit)}"


def _p99_name(signal: str) -> str:
    return next((name for start, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "whole answer"),
                                          ("user_ttft", "users' TTFT"), ("user_itl", "users' ITL"))
                 if signal.startswith(start)), "latency")
