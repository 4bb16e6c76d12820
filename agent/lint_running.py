"""Principles 3, 4, 5, 8, 9, 10 and 12: how an engine is run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.lint_blocks import canary_block, drills_block
from agent.lint_case import (
    ASK_AGENT,
    LATENCY_SEQS,
    NO_AGENT,
    Facts,
    Verdict,
    at_odds,
    cannot,
    fewest_seats,
    kept,
    measured,
    more_room,
    most_seats,
    rows,
    seats,
    short_of_kv,
)
from agent.words import quantity, span

HOP_S = 0.05  # principle 3: an extra 50 ms of network more than doubles p99
STREAMED = 0.9  # ours: the seed says "default to streaming"
DAY_S = 86400.0
MONTH_S = 31 * DAY_S  # principle 10: drills are monthly; ours: so long a change without a canary is told of
CANARY_WITHIN_S = 7 * DAY_S  # ours: a gray release of four days, and a weekend
LEAST_WATCHED_S = 7 * DAY_S  # ours: a week without a change says that there was none; a minute says nothing
FAULTS: Mapping[str, tuple[str, ...]] = {  # principle 10: the four that are drilled at least
    "a crash": ("process-kill", "pod-kill", "engine-hang"), "a GPU failure": ("gpu-reset",),
    "a network partition": ("packet-loss",), "an upstream timeout": ("upstream-timeout",)}
WATCHED: Mapping[str, tuple[str, ...]] = {  # principle 9: the minimal set -> the rules that watch it
    "QPS": ("qps-change",), "p99 latency": ("ttft-p99", "latency-p99"), "GPU utilization": ("gpu-utilization",),
    "GPU memory": ("gpu-memory",), "GPU temperature": ("gpu-temperature",),
    "KV cache hit rate": ("prefix-cache-hit-rate",), "swapped or preempted requests": ("swapped", "preemptions"),
    "error rate": ("error-rate",), "a business metric": ("business-metric", "business-metric-day")}
MAY_BE_ABSENT = frozenset({"KV cache hit rate", "swapped or preempted requests"})  # an engine may have neither
USERS, OUTSIDE = ("user-ttft-p99", "user-itl-p99"), ("outside-engine", "outside-engine-whole")
LAYER: Mapping[str, str] = {  # principle 5: what binds -> the layer where that is turned
    "kv-bound": "system layer", "sequence-cap": "system layer", "upstream": "before the engine",
    "hardware-bound": "below all three layers", "prefill-bound": "model layer (compute)",
    "decode-bound": "operator layer (memory bandwidth)"}
ELSEWHERE: Mapping[str, str] = {  # what binds outside of the engine -> what to do there
    "upstream": "the router's limits and how it shares requests out, before any flag of the engine",
    "hardware-bound": "cool or feed that GPU, or move its load to another"}


def hops(facts: Facts) -> Verdict:
    """3: pre- and post-processing in the engine's service."""
    if facts.option("skip-tokenizer-init") is not None:
        return at_odds("--skip-tokenizer-init: tokens are made in another service",
                       costs="two more hops a request, in each first token", change="take --skip-tokenizer-init away"
                       " and send text")
    found = [row for row in rows(facts, *OUTSIDE) if row.get("value") is not None]
    told = next((row for row in found if not why_unsure(row)), None)
    if told is None and found:
        why, of = why_unsure(found[0]), found[0]
        return cannot(f"what users wait outside the engine is not known: {of['rule']} says {span(of['value'])}, {why}",
                      would_tell=canary_block(facts, "the same question at both addresses tells it"))
    if told is None and (soon := begun(facts, *OUTSIDE)):
        return cannot("its canary has not told long enough what users wait outside the engine", would_tell=soon)
    if told is None:
        whys = dict.fromkeys(f"{row['subject']}: {row['why']}" for row in rows(facts, *OUTSIDE) if row.get("why"))
        return cannot(["nobody measures what users of it wait outside the engine", *whys, *_strangers(facts)],
                      would_tell=canary_block(facts, "end-to-end minus in-engine"))
    said = f"users wait {span(told['value'])} outside the engine ({told['rule']}, end-to-end minus in-engine)"
    if told["value"] >= HOP_S:
        each = "whole answer" if told["rule"] == "outside-engine-whole" else "first token"
        return at_odds(said, costs=f"{span(told['value'])} on every {each}; {span(HOP_S)} more than double a p99 of a"
                       " lightly loaded service", change="tokenizer, template and filter into the engine's"
                       " service; else on its host; look at the proxies in between")
    return kept(said)


def why_unsure(row: Mapping[str, Any]) -> str:
    """Why a wait outside the engine may be none; "": it is one."""
    if str(row.get("method") or "").startswith("estimate"):
        return "against the engines' median of other prompts: an estimate"
    return "and no wait is negative: the two do not compare" if row["value"] < 0 else ""


def _strangers(facts: Facts) -> list[str]:
    """Where somebody measures, and not for this engine as far as is known."""
    return [f"measured at {', '.join(facts.strangers)}: of another engine, or nobody says of which model"
            ] if facts.strangers else []


def young(facts: Facts, *rules: str) -> str:
    """What would tell, where the agent has watched too short a time for one of these rules; "": for none."""
    windows_s = [float(row["window_s"] or 0.0) for row in rows(facts, *rules) if is_young(row)]
    return f"the same when the agent has watched for {span(max(windows_s))}" if windows_s else ""


def begun(facts: Facts, *rules: str) -> str:
    """The same, also where its canary has had too few answers."""
    few = any(row["state"] == "IDLE" for row in rows(facts, *rules))
    return young(facts, *rules) or "the same when its canary has had more answers" * few


def is_young(row: Mapping[str, Any]) -> bool:
    """Whether it is not known because nobody has watched for long enough; that is nobody's fault."""
    return row["state"] == "UNKNOWN" and bool((row.get("evidence") or {}).get("young"))


def streaming(facts: Facts) -> Verdict:
    """4: streamed answers."""
    ttft, gap, out = (facts.numbers.get(name) for name in ("ttft_s", "decode_step_s", "output_tokens"))
    whole = ttft + gap * out if ttft is not None and gap is not None and out is not None else None
    gain = [] if whole is None or ttft is None else [
        f"a first token comes after {span(ttft)}, the whole answer after {span(whole)} (means)"]
    if facts.profile == "throughput":
        return kept("declared: throughput, nobody waits for a first token", *gain)
    share = facts.evidence.get("streamed")
    if not isinstance(share, int | float):
        return cannot("; ".join([*gain, "an engine's page does not tell which requests were streamed"]),
                      would_tell="the gateway's log (share of requests with \"stream\": true), as `streamed: 0.97` in"
                                 " the evidence file")
    said = f"{quantity(float(share), 'ratio')} of the requests are streamed (evidence file)"
    if share >= STREAMED:
        return kept(said, *gain)
    wait = f"who waits for the whole answer sees nothing for {span(whole)}" if whole is not None else \
        "who waits for the whole answer sees nothing until its last token"
    return at_odds([said, *gain], costs=wait, change="\"stream\": true (server-sent events) in the clients; no polling")


def bottleneck(facts: Facts) -> Verdict:
    """5: the layer of the bottleneck. Something always binds; at odds is where no flag of the engine can help."""
    seen = facts.binds or {"by": "cannot-tell", "why": "it was not looked at for long enough"}
    by, why, evidence = str(seen["by"]), str(seen["why"]), seen.get("evidence") or {}
    if by in ("idle", "cannot-tell") or (by == "upstream" and not evidence.get("router_queue")):
        return cannot(f"what binds it is not to be seen: {why}", would_tell="the same under load")
    said = [f"{seen['name']}, {LAYER.get(by, 'unknown layer')}: {why}"]
    if by in ELSEWHERE:
        return at_odds(said, costs=f"what is tuned in the engine changes nothing: {seen.get('no_help') or 'no flag'}",
                       change=ELSEWHERE[by])
    no = seen.get("no_help")
    return kept(*said, f"turn there: {_turn(facts, by) or 'nothing'}", *[f"does not help: {no}"] * bool(no))


def _turn(facts: Facts, by: str) -> str:
    """The knob, where it is not turned as far as it goes; of seats within what principle 1 has for what comes first."""
    seen = facts.binds or {}
    evidence, knob, most = seen.get("evidence") or {}, str(seen.get("knob") or ""), most_seats(facts)
    if by == "kv-bound":
        room = ", ".join([*more_room(facts), "more GPUs, or another replica"])
        return f"more KV blocks: {room}; until then fewer requests at once"
    now, least = seats(facts), fewest_seats(facts)
    if by == "decode-bound" and now is not None and now[0] <= least:
        return f"replicas for more tokens a second; no fewer seats: {least} are the least of principle 1"
    if by == "sequence-cap" and short_of_kv(facts):
        return "another replica, or first more room for the KV cache: it was full before (principle 2)"
    if by != "sequence-cap" or facts.profile == "throughput":
        return knob
    if most is None:
        return f"{knob}; where people wait for its answers not over {LATENCY_SEQS} (principle 1), then replicas"
    taken, fits = float(evidence.get("running") or 0.0), float(evidence.get("fits") or most)
    if min(most, fits) <= taken:
        return f"another replica: {most} sequences at once are the most where a person waits (principle 1)"
    return f"{facts.flags.sequences} up to {min(most, fits):.0f} (principle 1: {most} at most), then replicas"


def gray(facts: Facts) -> Verdict:
    """8: changes go to 5 % of the traffic first. One is told of for 31 days."""
    if facts.changes is None and facts.signals is not None:
        return cannot("whether its configuration changed is not known: the agent did not see its command line",
                      would_tell="the agent on the engine's own machine, where /proc shows it; in Kubernetes with"
                                 " overlays/discovery, or components/node-processes")
    if facts.changes is None:
        return cannot(f"whether its configuration changed is not known: {NO_AGENT}", would_tell=ASK_AGENT)
    since = min([facts.now, *[one["at"] for one in facts.changes]] + [facts.watched_since] * (
        facts.watched_since is not None))
    seen_s = min(MONTH_S, max(0.0, facts.now - since))
    judged = list(verdicts(facts.changes, facts.canaries))
    recent = [(one, words) for one, words in judged if facts.now - one["at"] <= MONTH_S]
    wild = [(one, words) for one, words in recent if "pass" not in words]
    if not recent and seen_s < LEAST_WATCHED_S:
        return cannot(f"no change of its configuration was seen so far, in {span(seen_s)}",
                      would_tell=f"the same when the agent has watched for {span(LEAST_WATCHED_S)}, or after a change")
    if not wild:
        many = len(recent)
        return kept(f"no change of its configuration was seen in {span(seen_s)}" if not many else
                    f"{many} change{'s' * (many != 1)} in {span(seen_s)}, each with a canary that passed")
    last, words = wild[-1]
    how = "its canary did not pass" if words else "no canary of this engine judged it"
    return at_odds([f"changed {span(max(0.0, facts.now - last['at']))} ago, and {how}: {last['what']}"]
                   + ([f"{len(wild)} such changes in {span(seen_s)}"] if len(wild) > 1 else []),
                   costs="what goes wrong goes wrong for everybody at once",
                   change=f"after its change `tocsin canary --old URL… --new {facts.url or 'URL…'} --for 24h`; where"
                          " another engine has the change first, there, with this one as --old")


def verdicts(changes: Sequence[Mapping[str, Any]], canaries: Sequence[Mapping[str, Any]],
             ) -> Iterator[tuple[Mapping[str, Any], set[str]]]:
    """Each change with the verdicts of its canaries."""
    ats = [one["at"] for one in changes]
    for before, one, after in zip([0.0, *ats], changes, [*ats[1:], float("inf")], strict=False):
        yield one, {canary["verdict"] for canary in canaries if judges(canary, one["at"], before, after)}


def judges(canary: Mapping[str, Any], change: float, before: float, after: float) -> bool:
    """Whether a canary judged this change. `before`, `after`: when this engine changed the other times, unix s.

    With this engine as new it ran between this change and the next, and ended within 7 days. With this engine as old
    another had the change first: it ran between the change before and this one, and ended at most 7 days before it.
    """
    began, ended = canary["started"], canary["at"]
    if canary["side"] == "new":
        return bool(change <= began and ended <= min(after, change + CANARY_WITHIN_S))
    return bool(before <= began and change - CANARY_WITHIN_S <= ended <= change)


def monitoring(facts: Facts) -> Verdict:
    """9: more than QPS."""
    if facts.signals is None:
        if facts.lost:
            return at_odds(f"cannot be had of this engine: {', '.join(facts.lost)}", costs="these fail unseen",
                           change="`tocsin doctor` says for each what to do")
        return cannot("its own numbers are there; whether anybody watches them is not known", would_tell=ASK_AGENT)
    words = {name: {row["state"] for row in rows(facts, *rules)} for name, rules in WATCHED.items()}
    lost = [name for name, rules in WATCHED.items()
            if any(row["state"] == "UNKNOWN" and not is_young(row) for row in rows(facts, *rules))]
    soon = {name: when for name, rules in WATCHED.items() if name not in lost and (when := young(facts, *rules))}
    absent = [name for name, states in words.items() if not states]
    off = [name for name, states in words.items() if states == {"N/A"}]
    said = [f"{len(words) - len(lost) - len(absent) - len(off)} of the {len(words)} are watched"]
    said += [f"not for long enough yet: {', '.join(soon)}"] * bool(soon)
    said += [f"not known now: {', '.join(lost)}"] * bool(lost) + [f"not watched: {', '.join(absent)}"] * bool(absent)
    said += [f"not there on this engine: {', '.join(off)}"] * bool(off)
    if lost or absent:
        change = "`tocsin doctor` says for each what to do"
        if "a business metric" in absent:
            change += "; for the business metric a source of its own (README, sources) and rule business-metric"
        return at_odds(said, costs="QPS stays as it is while these fail unseen", change=change)
    if soon:
        return cannot(said, would_tell=young(facts, *(rule for rules in WATCHED.values() for rule in rules)))
    if not MAY_BE_ABSENT.issuperset(off):
        return cannot(said, would_tell="`tocsin doctor` says for each why, and what else may tell it")
    return kept(*said)


def drills(facts: Facts) -> Verdict:
    """10: failure drills, monthly; the last of each failure counts."""
    if facts.drills is None:
        return cannot("whether drills were held is not known: none of their records can be read here",
                      would_tell="`tocsin lint` without an address on drilld's node, as who may read its folder")
    held = [row for row in facts.drills if row["verdict"] in ("PASS", "FAIL")  # what was judged
            and facts.now - (row["started"] or 0.0) <= MONTH_S]
    last = {name: row for row in sorted(held, key=lambda row: row["started"] or 0.0)
            for name, faults in FAULTS.items() if row.get("fault") in faults}
    failed = {name: row["drill"] for name, row in last.items() if row["verdict"] == "FAIL"}
    missing = [name for name in FAULTS if name not in last]
    said = [f"{len(held)} drill{'s' * (len(held) != 1)} held in the last 31 days"]
    said += [f"failed: {', '.join(f'{name} ({drill})' for name, drill in failed.items())}"] * bool(failed)
    if not missing and not failed:
        return kept(*said, "all four failures were drilled, and the last drill of each passed")
    said += [f"not drilled: {', '.join(missing)}"] * bool(missing)
    costs = ["what did not hold in the drill does not hold in the incident"] * bool(failed)
    costs += ["the missing runbook is found when it really breaks"] * bool(missing)
    change = [f"`tocsin report {drill}` says what did not hold; mend that, then `tocsin drill run {drill}` again"
              for drill in dict.fromkeys(failed.values())]
    change += [drills_block(facts, missing)] if missing else []
    return at_odds(said, costs="; ".join(costs), change="\n".join(change))


def end_to_end(facts: Facts) -> Verdict:
    """12: measured end to end."""
    if facts.signals is None:
        return cannot(f"whether anybody measures from the users' side is not known: {NO_AGENT}", would_tell=ASK_AGENT)
    outside = measured(facts, *USERS, *OUTSIDE)
    inside = facts.numbers.get("ttft_s")
    if outside is not None:
        own = [] if inside is None else [f"in-engine: a mean TTFT of {span(inside)}"]
        users_s = (outside.get("evidence") or {}).get("user_s") if outside["rule"] in OUTSIDE else None
        told = outside.get("text") or quantity(outside["value"], outside["unit"])
        if users_s is not None:
            return kept(f"end to end: users wait {span(users_s)} (by {outside['rule']})", *own)
        return kept(f"end to end: {outside['rule']} is {told}", *own)
    if soon := begun(facts, *USERS, *OUTSIDE):
        return cannot("its canary has not told long enough what users wait for", would_tell=soon)
    return at_odds(["only the engine's own numbers are known, none from the users' side", *_strangers(facts)],
                   costs="a slow proxy, tokenizer or client is not seen by anybody",
                   change=canary_block(facts, "a canary at both"))
