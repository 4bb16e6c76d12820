"""The signals of the deployment patterns: what the seed says to watch on each, from metrics that exist.

One small function each, as in agent.signals, whose table takes them from ROWS. What no engine tells comes from a PromQL
or JSON source of a certain name (agent.patterns.FEEDS); where there is none it is a Gap that names it, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import combinations, islice
from typing import TYPE_CHECKING

from agent.model import Gap, Sample, Signal, SubjectKind, Why
from agent.patterns import FEEDS
from agent.stats import add_buckets, in_last_bucket, quantile
from agent.words import span

if TYPE_CHECKING:
    from agent.signals import Ask, Target

COLD_S, STEADY_FROM_S, STEADY_S = 300.0, 600.0, 600.0  # of an engine's life: cold, steady from, and so long at least
STARTED_WITHIN_S = 3600.0  # rows are kept a little longer
LEAST_MEAN = 20.0  # requests that a mean is made of, at least
DOWN_READS = 3  # as in the rule engine-down
LEAST_WAITING = 4.0  # fewer requests between two stages are none that pile up
CAME_S = 120.0  # before a number is at its least: the traffic that it goes with
MORE = 1.1  # times the prompt tokens of before: traffic has risen
RISING = 8.0  # requests held by which the floor must rise
ROOM = 0.5  # of its KV cache in use: a pool under that has room
LOADED_S = 120.0  # after the first page of an engine that has just loaded its weights
FAR_SHARE = 0.5  # of the prompt's tokens from elsewhere: a decode engine


def engines(ask: Ask) -> Iterator[tuple[Target, str]]:
    """Every engine that is not asleep, with its target."""
    for target in ask.scene.targets.values():
        for engine in target.engines:
            if target.ever_up and not ask.scene.sleeps(engine):
                yield target, engine


def groups(ask: Ask) -> dict[str, list[tuple[Target, str]]]:
    """Model -> its engines: those are replicas of one another. A pool of prefill and one of decode are not."""
    found: dict[str, list[tuple[Target, str]]] = {}
    for target, engine in engines(ask):
        key = f"{ask.scene.models.get(target.name, '')} {ask.scene.roles.get(target.name, '')}".strip()
        found.setdefault(key, []).append((target, engine))
    return found


def fed(ask: Ask, source: str) -> dict[str, float] | Signal | None:
    """The series of a source that has this name, or why one is not told; None: nobody has configured one.

    What was told within a day (of a pod: within 10 m) is a member: were it left out, the rest would resolve an alert,
    or fire it.
    """
    subjects = ask.scene.sourced.get(source)
    if subjects is None:
        return None
    values: dict[str, float] = {}
    for subject in subjects:
        got = ask.windows.latest(subject, "sourced", ask.now)
        if not isinstance(got, Sample):
            member = "" if subject == source else f"{subject}: "
            return ask.gap(got.code, f"the source {source}: {member}{got.why}")
        values[subject] = got.value
    return values


def untold_of(ask: Ask, group: list[tuple[Target, str]], *names: str) -> Signal | None:
    """The first engine of a group that does not tell one of these numbers: without it the rest decide nothing."""
    for target, engine in group:
        for name in names:
            tellers = ask.scene.tellers(target, name)
            by = engine if engine in tellers or not tellers else tellers[0]
            gap = ask.windows.problem(by, name, ask.now)
            if gap is not None:
                return ask.gap(gap.code, f"{by}: {gap.why}")
    return None


def untold(ask: Ask, why: str, source: str) -> Signal:
    """Nothing here tells it: a Gap that names what would."""
    feed = FEEDS[source]
    return ask.gap(Why.MISSING, f"{why}: a PromQL or JSON source named {source} would tell it (one series a {feed.of}:"
                                f" {feed.what})")


def absent(ask: Ask, gap: Gap, why: str) -> Signal:
    """A target that does not tell a number: N/A where another here does (the other pool), else a Gap."""
    if gap.code is not Why.MISSING:
        return ask.gap(gap.code, gap.why)
    others = (e for t in ask.scene.targets.values() for e in t.engines)
    return ask.na(why) if any(ask.windows.keys_now(e, gap.name) for e in others) else ask.gap(Why.MISSING, why)


def largest(ask: Ask, source: str, why: str, what: Callable[[str, float], str]) -> Signal:
    """The largest number of a source, for what no engine tells at all."""
    got = fed(ask, source)
    if got is None:
        return untold(ask, why, source)
    if isinstance(got, Signal):
        return got
    worst = max(got, key=got.__getitem__)
    return ask.value(got[worst], method=f"source {source}", evidence={"text": what(worst, got[worst])})


def mean(ask: Ask, subject: str, name: str, start: float, end: float | None = None) -> tuple[float, float] | None:
    """(how many, mean) of a histogram's observations between two times; None: there were none."""
    n, total = (ask.windows.increase(subject, name, start, end, key) for key in ("count", "sum"))
    return (n, total / n) if n > 0 else None


# --- 1: one device ----------------------------------------------------------------------------------------------------


def frontend_cpu(ask: Ask) -> Signal:
    """CPU time of the process that takes requests apart and puts answers together, as a share of one core."""
    gap = ask.windows.problem(ask.subject, "frontend_cpu", ask.now)
    if gap is not None:
        why = gap.why if ask.windows.track_of(ask.subject, "frontend_cpu") is not None else \
            "its page does not tell the CPU time of its front end (vLLM's does, with one API server)"
        return ask.gap(gap.code, f"{why}: `top -H` shows it, and process-exporter by a rule of your own (source_value)")
    young = ask.uncovered("frontend_cpu")
    if young:
        return young
    start = ask.start()
    watched_s = ask.windows.watched_s(ask.subject, "frontend_cpu", start)
    if watched_s <= 0:
        return ask.idle("nothing watched yet")
    share = ask.count("frontend_cpu", ask.subject, start) / watched_s
    return ask.value(share, at=ask.told_at("frontend_cpu"), evidence={
        "text": f"its front end uses {share:.0%} of one core, and Python has one for it"})


def cold_ttft(ask: Ask) -> Signal:
    """TTFT in the first 5 minutes after a start as a multiple of that from 10 minutes on, for an hour after it."""
    assert ask.target is not None  # noqa: S101
    tellers = ask.scene.tellers(ask.target, "ttft")
    up_s = ask.started_s("waiting", ask.target.engines[0])
    if up_s is None or up_s > STARTED_WITHIN_S:
        return ask.idle("it was started over an hour ago" if up_s else "its start is not known")
    if up_s < STEADY_FROM_S + STEADY_S:
        return ask.idle(f"started {span(round(up_s))} ago: judged from {span(STEADY_FROM_S + STEADY_S)} on")
    began = ask.now - up_s
    if ask.windows.watched_s(tellers[0], "ttft", began) < 0.8 * up_s:
        return ask.idle("its start was not watched")
    cold, steady = (mean(ask, tellers[0], "ttft", a, b) for a, b in (
        (began, began + COLD_S), (began + STEADY_FROM_S, None)))
    if cold is None or steady is None or min(cold[0], steady[0]) < LEAST_MEAN or steady[1] <= 0:
        return ask.idle(f"fewer than {LEAST_MEAN:.0f} requests cold or steady")
    return ask.value(cold[1] / steady[1], evidence={
        "text": f"TTFT {span(cold[1])} in the first {span(COLD_S)} after its start, {span(steady[1])} since",
        "requests_cold": cold[0], "requests_steady": steady[0]})


# --- 2: replicas ------------------------------------------------------------------------------------------------------


def hit_ratio(ask: Ask, target: Target, engine: str) -> float | None:
    """Prefix-cache hits ÷ lookups of one engine over the window; None: too few, or counters that cannot be."""
    tellers = ask.scene.tellers(target, "prefix_queries")
    by = engine if engine in tellers or not tellers else tellers[0]
    queries, hits = (ask.windows.increase(by, name, ask.start()) for name in ("prefix_queries", "prefix_hits"))
    rate = hits / queries if queries >= (ask.rule.min_count or 1) else math.inf
    return rate if math.isfinite(rate) else None


def cache_spread(ask: Ask) -> Signal:
    """How far the prefix-cache hit ratios of replicas of one model are apart."""
    found: list[tuple[float, Mapping[str, float]]] = []
    for group in groups(ask).values():
        if len(group) > 1 and (lost := untold_of(ask, group, "prefix_queries", "prefix_hits")) is not None:
            return lost
        rates = {e: rate for t, e in group if (rate := hit_ratio(ask, t, e)) is not None}
        if len(rates) > 1:
            found.append((max(rates.values()) - min(rates.values()), rates))
    method = "exact"
    if not found:
        got = fed(ask, "replica-hit-ratio")
        if isinstance(got, Signal):
            return got
        if got is None and max(map(len, groups(ask).values()), default=0) < 2:
            return untold(ask, "only one replica is seen from here", "replica-hit-ratio")
        if got is None or len(got) < 2:
            return ask.idle("fewer than two replicas have looked up enough tokens")
        found, method = [(max(got.values()) - min(got.values()), got)], "source replica-hit-ratio"
    spread, ratios = max(found, key=lambda one: one[0])
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return ask.value(spread, method=method, evidence={
        "text": f"{low} finds {ratios[low]:.0%} of its prompt tokens in its cache, {high} {ratios[high]:.0%}"})


def restarts_together(ask: Ask) -> Signal:
    """How many replicas of one model have (re)started within the window: all of them are cold at once."""
    window_s = ask.window_s()
    of_model: list[list[str]] = []
    most = 0
    for group in groups(ask).values():
        names = list(dict.fromkeys(t.name for t, _ in group))
        most = max(most, len(names))
        of_model.append([name for name in names if _started(ask, name, window_s)])
    method = "exact"
    if most < 2:
        got = fed(ask, "replica-uptime")
        if isinstance(got, Signal):
            return got
        if got is None:
            return untold(ask, "only one replica is seen from here", "replica-uptime")
        of_model, method = [[s for s, up_s in got.items() if up_s <= window_s]], "source replica-uptime"
    young = max(of_model, key=len)
    what = f"{len(young)} replicas started within {span(window_s)}: {', '.join(young)}" if young else \
        f"no replica started within {span(window_s)}"
    return ask.value(float(len(young)), method=method, evidence={"text": what})


def _started(ask: Ask, target: str, within_s: float) -> bool:
    up_s = ask.started_s("waiting", ask.scene.targets[target].engines[0])
    return up_s is not None and up_s <= within_s


def overload_everywhere(ask: Ask, queue_age: Callable[[Ask, str], Signal]) -> Signal:
    """The least queue age of all replicas of a model: over its limit no routing helps."""
    found: list[tuple[float, dict[str, float], int]] = []
    for group in groups(ask).values():
        ages, down = dict[str, float](), 0
        for target, engine in group:
            if is_down(ask, target):  # no routing helps by it
                down += 1
                continue
            age = queue_age(ask, engine)
            if age.state == "gap" and len(group) > 1:
                return ask.gap(age.code or Why.MISSING, f"the queue of {engine}: {age.why}")
            if age.state == "value" and age.value is not None:
                ages[engine] = age.value
        if ages and len(ages) + down > 1:
            found.append((min(ages.values()), ages, down))
    method = "exact"
    if not found:
        got = fed(ask, "replica-queue-age")
        if isinstance(got, Signal):
            return got
        if got is None and max(map(len, groups(ask).values()), default=0) < 2:
            return untold(ask, "only one replica is seen from here", "replica-queue-age")
        if got is None or len(got) < 2:
            return ask.idle("fewer than two replicas are awake and warm")
        found, method = [(min(got.values()), got, 0)], "source replica-queue-age"
    least, ages, down = max(found, key=lambda one: one[0])
    return ask.value(least, method=method, evidence={
        "text": f"each of {len(ages)} replicas has a request that has queued {span(least)} or longer"
                + (f"; {down} more do not answer (engine-down)" if down else "")})


def is_down(ask: Ask, target: Target) -> bool:
    """Whether so many reads in a row were refused that engine-down fires."""
    rows = list(islice(ask.windows.backward(target.name, ("down", "")), DOWN_READS))
    return len(rows) == DOWN_READS and all(value > 0 for _, value in rows)


# --- 3: several nodes -------------------------------------------------------------------------------------------------


def pipeline_bubble(ask: Ask) -> Signal:
    """The largest share of time in which a pipeline stage waits."""
    return largest(ask, "pipeline-bubble", "no engine tells how long a pipeline stage waits (a GPU that spins in NCCL"
                   " looks busy)", lambda stage, share: f"{stage} waits {share:.0%} of the time")


def members_missing(ask: Ask) -> Signal:
    """Engines or ranks of a target that were there, or must be there by their numbers, and are not told now."""
    assert ask.target is not None  # noqa: S101
    alive = [e for e in ask.target.engines if isinstance(ask.windows.latest(e, "running", ask.now), Sample)]
    missing = [f"engine {e}" for e in ask.target.engines if e not in alive]
    if not alive:
        return ask.idle("the target as a whole does not answer: engine-down tells")
    numbers = sorted(int(e.rpartition("/")[2]) for e in ask.target.engines
                     if e != ask.target.name and e.rpartition("/")[2].isdecimal())
    missing += [f"engine index {n}" for n in range(numbers[0], numbers[-1]) if n not in numbers] if numbers else []
    ranks = 0
    for engine in alive:
        told = _ranks(ask, engine)
        if isinstance(told, Gap):
            return ask.gap(told.code, f"the ranks of {engine}: {told.why}")
        known, there, size = told
        ranks += len(known)
        missing += [f"rank {rank} of {engine}" for rank in sorted(known - there)]
        if len(known) < size:
            missing.append(f"{size - len(known)} of {size} ranks of {engine}")
    if not numbers and not ranks:
        return ask.gap(Why.MISSING, "neither ranks nor engine indices are told: vLLM tells ranks by tocsin-probe,"
                                    " SGLang with --enable-metrics-for-all-schedulers")
    text = f"missing: {', '.join(missing)}" if missing else f"all {ranks or len(numbers)} are there"
    return ask.value(float(len(missing)), evidence={"text": text, "missing": missing})


def _ranks(ask: Ask, engine: str) -> tuple[Set[str], Set[str], int] | Gap:
    """(ranks that were ever told, those told now, how many there must be); a Gap: whoever told them is lost.

    The group may have been restarted with fewer: a rank beyond its size is not missing.
    """
    for name in ("probe_rank_seconds", "rank_seconds"):
        known = set(ask.windows.keys(engine, name))
        if known:
            gap = ask.windows.problem(engine, name, ask.now, "")
            if gap is not None:
                return gap
            told = ask.windows.latest(engine, "probe_tp_size", ask.now)
            size = int(told.value) if isinstance(told, Sample) else 0
            gone = {rank for rank in known if size and rank.isdecimal() and int(rank) >= size}
            return known - gone, ask.windows.keys_now(engine, name), size
    return set(), set(), 0


# --- 4: experts -------------------------------------------------------------------------------------------------------


def expert_imbalance(ask: Ask) -> Signal:
    """The load of the busiest expert (or its GPU) as a multiple of the mean."""
    found: dict[str, float] = {}
    tellers = [engine for _, engine in engines(ask) if ask.windows.track_of(engine, "expert_balance_count")]
    for engine in tellers:
        gap = ask.windows.problem(engine, "expert_balance_count", ask.now)
        if gap is not None:
            return ask.gap(gap.code, f"{engine}: {gap.why}")
        total, passes = (sum(ask.windows.increases(engine, f"expert_balance_{part}", ask.start()).values())
                         for part in ("sum", "count"))
        if passes >= (ask.rule.min_count or 1) and total > 0:
            found[engine] = passes / total
    if found:
        worst = max(found, key=found.__getitem__)
        return ask.value(found[worst], method="engine's own balance", evidence={
            "text": f"the busiest expert GPU of {worst} has {found[worst]:.1f}× the mean load"})
    if tellers:
        return ask.idle(f"fewer than {ask.rule.min_count} passes in {span(ask.window_s())}")
    got = fed(ask, "expert-load")
    if isinstance(got, Signal):
        return got
    if got is None:
        return untold(ask, "load by expert is on no page here (SGLang tells its balance with"
                           " --expert-balancedness-report-mode prometheus; vLLM only logs it)", "expert-load")
    average = sum(got.values()) / len(got)
    if average <= 0:
        return ask.idle("no expert was given a token")
    worst = max(got, key=got.__getitem__)
    return ask.value(got[worst] / average, method="source expert-load", evidence={
        "text": f"{worst} has {got[worst] / average:.1f}× the mean load"})


def expert_rebalances(ask: Ask) -> Signal:
    """How often experts were moved within an hour."""
    return largest(ask, "expert-rebalances", "no engine counts how often it moves experts",
                   lambda _, count: f"experts were moved {count:.0f} times within an hour")


# --- 5: prefill and decode --------------------------------------------------------------------------------------------


def handover_queue(ask: Ask) -> Signal:
    """Of the requests at a decode engine the share that waits for what prefill has made."""
    assert ask.target is not None  # noqa: S101
    waiting, running, by = 0.0, 0.0, dict[str, float]()
    for engine in ask.target.engines:
        gap = ask.windows.problem(engine, "handover_waiting", ask.now)
        if gap is not None:
            return absent(ask, gap, "its page tells no requests between prefill and decode (vLLM from 0.32 at a"
                                    " consumer of KV does, and SGLang)")
        for stage in ask.windows.keys_now(engine, "handover_waiting"):
            got = ask.windows.latest(engine, "handover_waiting", ask.now, stage)
            if isinstance(got, Sample):
                waiting += got.value
                by[stage] = by.get(stage, 0.0) + got.value
        alive = ask.latest("running", engine)
        if isinstance(alive, Signal):
            return alive
        running += alive.value
    stages = ", ".join(f"{count:.0f} {stage.replace('_', ' ')}" for stage, count in by.items() if count)
    if waiting < LEAST_WAITING:
        return ask.value(0.0, evidence={"text": f"{waiting:.0f} wait for their KV cache from prefill"})
    return ask.value(waiting / (waiting + running), at=ask.told_at("handover_waiting", *ask.target.engines), evidence={
        "text": f"{waiting:.0f} wait for their KV cache from prefill ({stages}), {running:.0f} run"})


def kv_transfer_failures(ask: Ask) -> Signal:
    """Transfers of KV blocks between engines that failed in the window."""
    return _counted(ask, "kv_transfer_failures", "its page counts no failed transfers of KV blocks (vLLM's NIXL"
                                                 " connector and SGLang do)", "failed")


def handover_state(ask: Ask) -> Signal:
    """Requests whose KV blocks prefill holds and decode does not fetch: expired ones, or a floor that rises.

    More traffic raises the floor as well (Little: held = arrivals/s × time held): such a rise says nothing.
    """
    assert ask.target is not None  # noqa: S101
    if any(ask.windows.keys_now(e, "handover_expired") for e in ask.target.engines):
        return _counted(ask, "handover_expired", "", "expired at prefill before anybody fetched them")
    half_s, middle = ask.window_s() / 2, ask.now - ask.window_s() / 2
    floors, came = [0.0, 0.0], [0.0, 0.0]  # of each half
    for engine in ask.target.engines:
        rows = list(ask.windows.history(engine, "handover_held", middle - half_s))
        before, after = [(v, at) for at, v in rows if at < middle], [(v, at) for at, v in rows if at >= middle]
        if not before or not after:
            gap = ask.windows.problem(engine, "handover_held", ask.now)
            return ask.idle("not watched for long enough") if gap is None else absent(
                ask, gap, "its page tells nothing of what prefill holds for decode (vLLM's NIXL and SGLang do)")
        for half, (least, at) in enumerate((min(before), min(after))):
            floors[half] += least
            came[half] += ask.windows.increase(engine, "prompt_tokens", at - CAME_S, at)
    risen = floors[1] - floors[0]
    if risen >= RISING and came[1] > MORE * came[0]:
        return ask.gap(Why.NO_DATA, f"prefill holds {risen:.0f} requests more than {span(half_s)} ago, and its traffic"
                                    " has risen, too: whether they are fetched is not known until it is steady")
    left = risen if risen >= RISING else 0.0
    return ask.value(left, at=ask.told_at("handover_held", *ask.target.engines), evidence={
        "text": f"prefill holds {floors[1]:.0f} requests or more that decode has not fetched, {risen:+.0f} in"
                f" {span(half_s)}"})


def _counted(ask: Ask, name: str, untold_: str, what: str) -> Signal:
    """A counter's rise over the window, all engines and keys added."""
    assert ask.target is not None  # noqa: S101
    rises: dict[str, float] = {}
    for engine in ask.target.engines:
        gap = ask.windows.problem(engine, name, ask.now)
        if gap is not None:
            return absent(ask, gap, untold_)
        for key, rise in ask.windows.increases(engine, name, ask.start()).items():
            rises[key] = rises.get(key, 0.0) + rise
    total = sum(rises.values())
    kinds = ", ".join(f"{rise:.0f} {key}" for key, rise in rises.items() if rise and key)
    return ask.value(total, at=ask.told_at(name, *ask.target.engines), evidence={
        "text": f"{total:.0f} KV transfers {what} in {span(ask.window_s())}" + (f" ({kinds})" if kinds else "")})


def role_of(ask: Ask, target: Target) -> str:
    """"prefill" or "decode", as it says or as its tokens show: who gets its prompts' KV from elsewhere decodes."""
    told = ask.scene.roles.get(target.name, "")
    if told:
        return told
    start = ask.now - STARTED_WITHIN_S  # as long as is remembered: a quiet minute makes no other role
    prompt = sum(ask.windows.increase(e, "prompt_tokens", start) for e in target.engines)
    far = [ask.windows.increase(e, "external_hits", start) for e in target.engines
           if ask.windows.keys_now(e, "external_hits")]
    transfers = any(ask.windows.keys_now(e, "kv_transfer_failures") for e in target.engines)
    if prompt <= 0 or not transfers:
        return ""
    return "decode" if sum(far) >= FAR_SHARE * prompt else "prefill"


def pool_ratio(ask: Ask) -> Signal:
    """Requests that wait in one pool, an engine of it, while the other pool has room and no queue."""
    pools: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    guessed: list[str] = []
    for target in ask.scene.targets.values():
        role = role_of(ask, target)
        guessed += [f"{target.name} {role}"] if role and not ask.scene.roles.get(target.name) else []
        for engine in target.engines if role else ():
            if ask.scene.sleeps(engine):
                continue
            waiting, kv = ask.latest("waiting", engine), ask.latest("kv_usage", engine)
            if isinstance(waiting, Signal):
                return waiting
            if isinstance(kv, Signal):
                return kv
            pools[role].append((waiting.value, kv.value))
    if not all(pools.values()):
        lacks = " and no ".join(role for role, known in pools.items() if not known)
        return ask.gap(Why.MISSING, f"no {lacks} engine is seen from here: name both pools under engines: on one"
                                    " agent")
    queues = {role: sum(w for w, _ in known) / len(known) for role, known in pools.items()}
    short = max(queues, key=queues.__getitem__)
    other = "decode" if short == "prefill" else "prefill"
    fullest = max(kv for _, kv in pools[other])
    has_room = queues[other] == 0 and fullest < ROOM
    text = (f"{queues[short]:.1f} requests wait at each of {len(pools[short])} {short} engines; of {len(pools[other])}"
            f" {other} engines the fullest KV cache is {fullest:.0%} full")
    method = "exact"
    if guessed:
        method = "estimate: roles"
        text += f"; roles estimated by where the last hour's prompt tokens came from: {', '.join(guessed)}"
    return ask.value(queues[short] if has_room else 0.0, method=method, evidence={"text": text})


# --- 6: encoder, prefill, decode --------------------------------------------------------------------------------------


def feature_transfers(ask: Ask) -> Signal:
    """Transfers of an encoder's features that failed."""
    return largest(ask, "feature-transfer-failures", "no engine counts transfers from the encoder",
                   lambda who, count: f"{count:.0f} transfers of features failed at {who}")


def first_output_elsewhere(ask: Ask) -> Signal:
    """Of the mean time to the first token the share that is neither the engine's queue nor its prefill."""
    assert ask.target is not None  # noqa: S101
    start, whole_s, inside_s = ask.start(), 0.0, 0.0
    for engine in ask.target.engines:
        for name in ("ttft", "queue_time", "prefill_count"):
            if ask.windows.problem(engine, name, ask.now):
                return ask.gap(Why.MISSING, f"{engine} does not tell {name}: traces (OpenTelemetry) show what the first"
                                            " output waits for")
        ttft, queue = (mean(ask, engine, name, start) for name in ("ttft", "queue_time"))
        n, prefill_s = (ask.windows.increase(engine, f"prefill_{part}", start) for part in ("count", "seconds"))
        if ttft is None or queue is None or min(ttft[0], queue[0], n) < (ask.rule.min_count or 1):
            continue
        if ttft[1] > whole_s:  # the slowest engine of it
            whole_s, inside_s = ttft[1], queue[1] + prefill_s / n
    if whole_s <= 0:
        return ask.idle("too few requests")
    share = max(0.0, 1 - inside_s / whole_s)
    return ask.value(share, method="estimate: means", evidence={
        "text": f"of the mean {span(whole_s)} to the first token {span(max(0.0, whole_s - inside_s))} is neither queue"
                " nor prefill: encoder, transfer or front end"})


# --- 7: tiers of cache ------------------------------------------------------------------------------------------------


def rank_count(ask: Ask, engine: str) -> int:
    """How many ranks an engine has: as its probe tells, else its share of its target's GPUs; 0: not known."""
    assert ask.target is not None  # noqa: S101
    size = ask.windows.latest(engine, "probe_tp_size", ask.now)
    if isinstance(size, Sample) and size.value >= 1:
        return int(size.value)
    return len(ask.target.gpus) // len(ask.target.engines)


def promotion_busy(ask: Ask) -> Signal:
    """Share of time in which KV blocks are moved up into GPU memory."""
    assert ask.target is not None  # noqa: S101
    busy, up, down = 0.0, 0.0, 0.0
    for engine in ask.target.engines:
        gap = ask.windows.problem(engine, "kv_up_seconds", ask.now)
        if gap is not None:
            return absent(ask, gap, "its page does not tell how long cache is moved up (vLLM's offloading connector and"
                                    " SGLang's HiCache do)")
        if (young := ask.uncovered("kv_up_seconds", engine)) is not None:
            return young
        start = ask.start()
        watched_s = ask.windows.watched_s(engine, "kv_up_seconds", start)
        took = ask.windows.increases(engine, "kv_up_seconds", start)
        ranks = 1 if "rank" in took else rank_count(ask, engine)
        if not ranks:
            return ask.gap(Why.MISSING, f"{engine} adds the time of all its ranks, and how many they are is not known:"
                                        " write gpus: of it")
        busy = max(busy, sum(took.values()) / ranks / max(watched_s, 1.0))
        up += ask.windows.increase(engine, "kv_up", start)
        down += ask.windows.increase(engine, "kv_down", start)
    wasted = f"; {down / up:.1f} times as much was written down" if up > 0 else \
        "; nothing of what was written down was read" if down > 0 else ""
    return ask.value(busy, evidence={"text": f"cache is moved up for {busy:.0%} of the time{wasted}", "up": up,
                                     "down": down})


def replica_hotspot(ask: Ask) -> Signal:
    """Arrivals at the busiest replica as a multiple of the mean; quiet while it has no queue."""
    best: tuple[float, str, dict[str, float]] | None = None
    for group in groups(ask).values():
        if len(group) > 1 and (lost := untold_of(ask, group, "ttft", "waiting")) is not None:
            return lost
        counts = {e: ask.windows.increase(e, "ttft", ask.start(), None, "count") for _, e in group
                  if "count" in ask.windows.keys_now(e, "ttft")}
        best = _hottest(ask, counts, best)
    method = "exact"
    if best is None and ask.scene.routers and not ask.scene.judges_all:
        return ask.na("the agent of the cluster that has `cluster_rules: true` judges how a router shares requests out")
    if best is None:
        for router in ask.scene.routers:
            best = _hottest(ask, ask.windows.increases(router, "router_worker_requests", ask.start()), best)
        method = "router"
    if best is None:
        return ask.idle("fewer than two replicas, or too few requests")
    value, hot, counts = best
    at = hot.partition("://")[2].rstrip("/") or hot  # as a router names it
    behind = (t.engines[0] for t in ask.scene.targets.values() if method == "router" and t.address == at)
    queue = ask.windows.latest(next(behind, hot), "waiting", ask.now)
    if not isinstance(queue, Sample):
        return ask.gap(queue.code, f"{hot} got {value:.1f}× its share, and whether it has a queue is not known: name it"
                                   " under engines:")
    calm = queue.value <= 0
    return ask.value(value, method=method, quiet="the busiest has no queue" if calm else None, evidence={
        "text": f"{hot} got {counts[hot]:.0f} of {sum(counts.values()):.0f} requests, {value:.1f}× its share of"
                f" {len(counts)} replicas"})


def _hottest(ask: Ask, counts: Mapping[str, float], best: tuple[float, str, dict[str, float]] | None,
             ) -> tuple[float, str, dict[str, float]] | None:
    total = sum(counts.values())
    if len(counts) < 2 or total < (ask.rule.min_count or 1):
        return best
    hot = max(counts, key=counts.__getitem__)
    value = counts[hot] * len(counts) / total
    return (value, hot, dict(counts)) if best is None or value > best[0] else best


# --- 8: post-training -------------------------------------------------------------------------------------------------


def rollout_tail(ask: Ask) -> Signal:
    """The p99 of whole answers as a multiple of their median: the group waits for its longest."""
    assert ask.target is not None  # noqa: S101
    tellers = ask.scene.tellers(ask.target, "e2e")
    missing = next((trouble for teller in tellers if (trouble := ask.problem("e2e", teller, "count"))), None)
    if missing:
        return missing
    buckets = add_buckets([_buckets(ask, teller) for teller in tellers])
    n = buckets[-1][1] if buckets else 0.0
    if n < (ask.rule.min_count or 1):
        return ask.idle(f"{n:.0f} of at least {ask.rule.min_count} answers")
    median_s, p99_s = quantile(0.5, buckets), quantile(0.99, buckets)
    if not median_s or not p99_s:
        return ask.idle("no answer takes any time")
    over = "over " if in_last_bucket(0.99, buckets) else ""
    return ask.value(p99_s / median_s, method="histogram", evidence={
        "text": f"p99 of whole answers {over}{span(p99_s)}, median {span(median_s)}"})


def _buckets(ask: Ask, teller: str) -> dict[float, float]:
    rises = ask.windows.increases(teller, "e2e", ask.start())
    return {float(key): count for key, count in rises.items() if key not in ("sum", "count")}


def weights_lag(ask: Ask) -> Signal:
    """How many versions of the weights the last engine is behind the first."""
    got = fed(ask, "weights-version")
    if isinstance(got, Signal):
        return got
    if got is None:
        return updates_apart(ask)
    if len(got) < 2:
        return untold(ask, "of fewer than two engines the version of the weights is known", "weights-version")
    last, first = min(got, key=got.__getitem__), max(got, key=got.__getitem__)
    return ask.value(got[first] - got[last], method="source weights-version", evidence={
        "text": f"{last} is {got[first] - got[last]:.0f} versions behind {first}"})


def updates_apart(ask: Ask) -> Signal:
    """Of any two engines how many updates one has taken less since the younger was started, as far as is remembered."""
    known = {name: keys for name in ask.scene.targets if (keys := ask.windows.keys(name, "weight_updates"))}
    if len(known) < 2:
        return untold(ask, "of fewer than two engines the version of the weights is known", "weights-version")
    for name in known:
        gap = ask.windows.problem(name, "weight_updates", ask.now)
        if gap is not None:
            return ask.gap(gap.code, f"{name}: {gap.why}")
    # a version may come in many an `update`; where the trainer ends it with `finish`, that is what counts
    ends = "finish" if any("finish" in keys for keys in known.values()) else "update"

    def taken(name: str, start: float, end: float | None = None) -> float:
        return ask.windows.increase(name, "weight_updates", start, end, ends)

    worst, last, first = 0.0, "", ""
    begun = {name: ask.windows.restarted_at(name, "weight_updates") or 0.0 for name in known}
    seen = {name: ask.windows.known_since(name, "weight_updates") or 0.0 for name in known}
    for one, other in combinations(known, 2):
        young, old = (one, other) if begun[one] >= begun[other] else (other, one)
        both = max(seen[young], seen[old])
        since = max(begun[young], both)
        before = max(begun[old], both)
        if before < since and taken(old, before, since) < taken(young, before, since):
            return untold(ask, f"{old} was behind {young} when that was started anew", "weights-version")
        # what it loaded at its start is as new as the updates while it loaded
        for behind, ahead, lag in ((young, old, taken(old, since + LOADED_S) - taken(young, since)),
                                   (old, young, taken(young, since) - taken(old, since))):
            if lag > worst:
                worst, last, first = lag, behind, ahead
    text = f"{last} has taken {worst:.0f} updates less than {first}" if last else \
        f"all {len(known)} engines have taken the same updates"
    return ask.value(worst, method="updates since the younger was started", evidence={"text": text})


# (id, unit, subject, help, function, windowed, counted)
Row = tuple[str, str, SubjectKind, str, Callable[["Ask"], Signal], bool, bool]


def rows(queue_age: Callable[[Ask, str], Signal]) -> tuple[Row, ...]:
    """The rows of the catalogue. `queue_age`: H1 of an engine, which is agent.signals' own."""
    return (
        ("frontend_cpu", "ratio", "target", "CPU time of the front end, of one core", frontend_cpu, True, False),
        ("cold_ttft", "of limit", "target", "TTFT after a start as a multiple of the later one", cold_ttft, False,
         False),
        ("cache_spread", "ratio", "node", "how far hit ratios of replicas are apart", cache_spread, True, True),
        ("restarts_together", "count", "node", "replicas that started within the window", restarts_together, True,
         False),
        ("overload_everywhere", "s", "node", "least queue age of all replicas",
         lambda ask: overload_everywhere(ask, queue_age), False, False),
        ("pipeline_bubble", "ratio", "node", "time in which a pipeline stage waits", pipeline_bubble, False, False),
        ("members_missing", "count", "target", "ranks and engines that are not told any more", members_missing, False,
         False),
        ("expert_imbalance", "of limit", "node", "load of the busiest expert as a multiple of the mean",
         expert_imbalance, True, True),
        ("expert_rebalances", "count", "node", "moves of experts within an hour", expert_rebalances, False, False),
        ("handover_queue", "ratio", "target", "requests that wait for prefill's output", handover_queue, False, False),
        ("kv_transfer_failures", "count", "target", "KV transfers that failed", kv_transfer_failures, True, False),
        ("handover_state", "count", "target", "requests that prefill holds in vain", handover_state, True, False),
        ("pool_ratio", "count", "node", "requests that wait at an engine of the short pool", pool_ratio, True, False),
        ("feature_transfers", "count", "node", "transfers from encoders that failed", feature_transfers, False, False),
        ("first_output_elsewhere", "ratio", "target", "TTFT that is neither queue nor prefill", first_output_elsewhere,
         True, True),
        ("promotion_busy", "ratio", "target", "time in which cache is moved up", promotion_busy, True, False),
        ("replica_hotspot", "of limit", "node", "arrivals at the busiest replica as a multiple of the mean",
         replica_hotspot, True, True),
        ("rollout_tail", "of limit", "target", "p99 of whole answers as a multiple of the median", rollout_tail, True,
         True),
        ("weights_lag", "count", "node", "versions of the weights that engines are apart", weights_lag, False, False),
    )
