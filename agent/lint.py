"""A deployment against the twelve design principles: facts in, findings out. Pure; agent.lint_facts gathers the facts.

A principle is "kept", "at odds", or one "cannot tell", with what would tell. Limits without a source are those of the
principle in the seed "deployment design principles", section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agent import budget
from agent.advise import ACCEPTED_ENOUGH, BATCH_EVEN, BATCH_GOLDEN, OUTLIERS, gb
from agent.words import quantity, span

Word = Literal["kept", "at odds", "cannot tell"]
WORST_FIRST: Mapping[Word, int] = {"at odds": 0, "cannot tell": 1, "kept": 2}
LATENCY_SEQS, THROUGHPUT_SEQS = 32, 64  # principle 1: 16–32 at most, 64–128 or 256+ at least
HOP_S = 0.05  # principle 3: an extra 50 ms of network more than doubles p99
STREAMED = 0.9  # ours: the seed says "default to streaming"
MOST_DROP = 1.0  # principle 11: points lost on the business's own evaluation
DRILL_EVERY_S = 31 * 86400.0  # principle 10: monthly
CANARY_BEFORE_S = 7 * 86400.0  # ours: a gray release of four days, and a weekend
FAULTS: Mapping[str, tuple[str, ...]] = {  # principle 10: the four that are drilled at least
    "a crash": ("process-kill", "pod-kill", "engine-hang"), "a GPU failure": ("gpu-reset", "slow-rank"),
    "a network partition": ("packet-loss",), "an upstream timeout": ("upstream-timeout",)}
WATCHED: Mapping[str, tuple[str, ...]] = {  # principle 9: the minimal set -> the rules that watch it
    "QPS": ("qps-change",), "p99 latency": ("ttft-p99", "latency-p99"), "GPU utilization": ("gpu-utilization",),
    "GPU memory": ("gpu-memory",), "GPU temperature": ("gpu-temperature",),
    "KV cache hit rate": ("prefix-cache-hit-rate",), "swapped or preempted requests": ("swapped", "preemptions"),
    "error rate": ("error-rate",), "a business metric": ("business-metric", "business-metric-day")}
DRAFTS = ("speculative-config", "speculative-model", "speculative-algorithm", "num-speculative-tokens", "model-draft")
LAYER: Mapping[str, str] = {  # principle 5: what binds -> the layer where that is turned
    "kv-bound": "system layer", "sequence-cap": "system layer", "upstream": "before the engine",
    "hardware-bound": "below all three layers", "prefill-bound": "model layer (compute)",
    "decode-bound": "operator layer (memory bandwidth)"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one engine and of how it is run. None: nobody could tell; `no_*` says why where it helps.

    `options`: its command line's, name without dashes -> value ("" where it has none). `numbers`: as agent.facts has
    them. `signals`: rows of `check`. `changes`: {"at", "what"} of each change of its configuration that the agent saw.
    `canaries`: {"at", "verdict"}. `drills`: rows of `drill history`. `evidence`: of the file, see docs/lint.md.
    """

    engine: str
    kind: str = "unknown"
    profile: Literal["latency", "throughput"] | None = None
    options: Mapping[str, str] | None = None
    cache: Mapping[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info
    model: Mapping[str, Any] | None = None  # its config.json
    weight_bytes: float | None = None  # of its files
    context_tokens: float | None = None  # the longest sequence that it takes
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    binds: Mapping[str, Any] | None = None
    signals: Sequence[Mapping[str, Any]] | None = None
    lost: Sequence[str] = ()  # required numbers that cannot be had
    changes: Sequence[Mapping[str, Any]] | None = None
    watched_since: float | None = None
    canaries: Sequence[Mapping[str, Any]] = ()
    drills: Sequence[Mapping[str, Any]] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def option(self, *names: str) -> str | None:
        """The value of the first of these options that its command line has; None: none of them."""
        options = self.options or {}
        return next((options[name] for name in names if name in options), None)


class Verdict(NamedTuple):
    """On one principle. `costs`, `change`: where it is at odds; `would_tell`: where nobody can say."""

    word: Word
    evidence: Sequence[str] = ()
    costs: str = ""
    change: str = ""
    would_tell: str = ""


class Principle(NamedTuple):
    """One of the twelve. `why`: in our words."""

    number: int
    name: str
    judge: Callable[[Facts], Verdict]
    why: str


def kept(*evidence: str) -> Verdict:
    """It is as it should be, by this."""
    return Verdict("kept", evidence)


def at_odds(evidence: str | Sequence[str], *, costs: str, change: str) -> Verdict:
    """It is not; what that costs, and what to change."""
    return Verdict("at odds", [evidence] if isinstance(evidence, str) else evidence, costs, change)


def cannot(why: str, *, would_tell: str) -> Verdict:
    """Nothing here shows it; what would."""
    return Verdict("cannot tell", [why], would_tell=would_tell)


# --- what several ask --------------------------------------------------------------------------------------------


def sequences(facts: Facts) -> float | None:
    """How many sequences it runs at once at most, where its command line says it."""
    told = facts.option("max-num-seqs", "max-running-requests", "max-batch-size", "parallel")
    return float(told) if told is not None and told.isdigit() else None


def speculates(facts: Facts) -> bool | None:
    """Whether it drafts tokens."""
    if facts.numbers.get("acceptance") is not None:
        return True
    return None if facts.options is None else facts.option(*DRAFTS) is not None


def chunks(facts: Facts) -> bool | None:
    """Whether long prompts are computed in parts; vLLM does since 0.8, unless told not to."""
    if facts.options is None:
        return None
    if facts.option("no-enable-chunked-prefill") is not None or facts.option("chunked-prefill-size") == "-1":
        return False
    told = facts.option("enable-chunked-prefill")
    return told is None or told.lower() not in ("false", "0")


def quantized(facts: Facts) -> tuple[str, bool] | None:
    """(form, whether activations are quantized, too); ("", False): not at all; None: nobody knows."""
    form = facts.option("quantization", "quantize", "q") or ""
    told = (facts.model or {}).get("quantization_config")
    if isinstance(told, Mapping) and not form:
        form = str(told.get("quant_method") or "")
        groups = told.get("config_groups")
        if isinstance(groups, Mapping):
            return form, any(isinstance(one, Mapping) and one.get("input_activations") for one in groups.values())
    if not form:
        return None if facts.options is None and facts.model is None else ("", False)
    return form, any(word in form.lower() for word in ("fp8", "w8a8", "smooth", "int8", "modelopt", "compressed"))


def batch(facts: Facts) -> tuple[float, str] | None:
    """Sequences at once: what ran on average, else what it allows."""
    if running := facts.numbers.get("running"):
        return running, f"{running:.3g} requests run at once on average"
    most = sequences(facts)
    return None if most is None else (most, f"up to {most:.0f} requests run at once")


def rows(facts: Facts, *rules: str) -> list[Mapping[str, Any]]:
    """The rows of `check` of these rules."""
    return [row for row in facts.signals or () if row["rule"] in rules]


def measured(facts: Facts, *rules: str) -> Mapping[str, Any] | None:
    """The first of them that has a value."""
    return next((row for row in rows(facts, *rules) if row.get("value") is not None), None)


NO_OPTIONS = "its command line was not seen: it runs elsewhere, or in a container of its own"
SEE_OPTIONS = "`tocsin lint` on the engine's own machine, where /proc shows its command line"
NO_AGENT = "only a running agent knows"
ASK_AGENT = "`tocsin lint` without an address, on the node where the agent runs"


# --- the twelve ------------------------------------------------------------------------------------------------------


def direction(facts: Facts) -> Verdict:
    """1: latency or throughput."""
    if facts.profile is None:
        return cannot("nobody declared whether latency or throughput comes first",
                      would_tell=f"engines: [{{name: {facts.engine}, url: …, profile: latency}}] in tocsin.yaml"
                                 " (or throughput), or --profile latency")
    if facts.options is None:
        return cannot(f"profile: {facts.profile}; {NO_OPTIONS}", would_tell=SEE_OPTIONS)
    most, flag = sequences(facts), "--max-num-seqs" if facts.kind == "vllm" else "its number of sequences at once"
    said = f"{flag} {most:.0f}" if most is not None else f"{flag} is not given: the engine's own default, 128 or more"
    declared = f"profile: {facts.profile}"
    if facts.profile == "latency":
        if most is None or most > LATENCY_SEQS:
            return at_odds([declared, f"{said}; the table says 16 to {LATENCY_SEQS}"],
                           costs="each further sequence in a step lengthens every user's gap between tokens and p99",
                           change=f"{flag} {LATENCY_SEQS} (16 to {LATENCY_SEQS}), or declare profile: throughput")
        if chunks(facts) is False:
            return at_odds([declared, said, "chunked prefill is off"],
                           costs="a long prompt holds up everybody's next token for its whole prefill",
                           change="--enable-chunked-prefill")
        return kept(declared, said, "chunked prefill on")
    if most is not None and most < THROUGHPUT_SEQS:
        return at_odds([declared, f"{said}; the table says {THROUGHPUT_SEQS} to 128, offline 256 or more"],
                       costs="the GPU computes small batches: fewer tokens a second for the same money",
                       change=f"{flag} 128 (see principle 2), or declare profile: latency")
    if speculates(facts):
        return at_odds([declared, said, "speculative decoding is on"],
                       costs="at large batches drafting only takes compute and memory", change="take"
                       " --speculative-config away")
    return kept(declared, said, "speculative decoding off")


def memory(facts: Facts) -> Verdict:
    """2: weights + KV cache + temporaries + 20 %."""
    shape = None if facts.model is None else budget.shape_of(facts.model)
    weights, how = facts.weight_bytes, "its files"
    if weights is None and shape is not None and shape.parameters is not None:
        form = facts.option("dtype") or shape.dtype
        weights = budget.weight_bytes(shape.parameters, form if form in budget.BYTES_OF else "bfloat16")
        how = f"{shape.parameters:,.0f} parameters"
    token = None if shape is None else _token_bytes(facts, shape)
    seqs, context, holds = sequences(facts), facts.context_tokens, facts.numbers.get("capacity_tokens")
    asked = seqs * context if seqs and context else None
    gpu_bytes, gpus = facts.numbers.get("gpu_bytes"), max(1, int(facts.numbers.get("gpus") or 1))
    said = []
    if token is not None and shape is not None:
        said.append(f"a token takes {token:,.0f} bytes of KV cache ({_token_line(shape, token)})")
    if asked is not None and seqs and context:
        said.append(f"asked for: {seqs:.0f} sequences × {context:,.0f} tokens = {asked:,.0f} tokens"
                    + ("" if token is None else f", {gb(asked * token)}"))
    if holds is not None:
        told = facts.cache.get("kv_cache_memory_bytes", "")
        held = float(told) if told.isdigit() else None if token is None else holds * token
        said.append(f"its KV cache holds {holds:,.0f} tokens" + ("" if held is None else f", {gb(held)}"))
    is_over = asked is not None and holds is not None and asked > holds
    if weights is not None and asked is not None and token is not None and gpu_bytes and not is_over:
        return _budgeted(said, how, budget.budget(weights=weights, kv=asked * token, gpu_bytes=gpu_bytes, gpus=gpus),
                         weights, asked * token)
    if weights is not None and gpu_bytes:
        bare = budget.budget(weights=weights, kv=0.0, gpu_bytes=gpu_bytes, gpus=gpus)
        if not bare.fits:
            return _budgeted(said, how, bare, weights, 0.0)
    if weights is not None:
        said.insert(0, f"weights {gb(weights)} (by {how})")
    if asked is not None and holds is not None:
        if asked > holds and context:
            fit = int(holds // context)
            return at_odds(said, costs=f"{fit} of {seqs:.0f} full sequences find room; the rest is preempted and"
                                       " computed anew", change=f"--max-num-seqs {max(1, fit)}, a shorter"
                                       " --max-model-len, or a larger KV cache")
        return kept(*said, f"{quantity(1 - asked / holds, 'ratio')} of the KV cache is spare when all are full")
    parts = {"weights": weights, "KV bytes a token": token, "sequences": seqs, "longest sequence": context,
             "the GPU's memory": gpu_bytes}
    lacking = [name for name, value in parts.items() if value is None]
    return cannot("; ".join([*said, f"not known: {', '.join(lacking)}"]),
                  would_tell="--max-num-seqs and --max-model-len on its command line, the model's folder readable here,"
                             " NVML; or `tocsin advise kv-cache` with your numbers")


def _token_bytes(facts: Facts, shape: budget.Shape) -> float | None:
    told = facts.cache.get("cache_dtype") or facts.option("kv-cache-dtype") or "auto"
    size = budget.kv_dtype_bytes(shape, told, facts.option("dtype") or "auto")
    return None if size is None else budget.kv_token_bytes(shape, size)


def _token_line(shape: budget.Shape, token: float) -> str:
    if shape.latent:
        return f"{shape.layers} layers × {shape.latent} latent numbers × {token / shape.layers / shape.latent:g} bytes"
    size = token / (2 * shape.layers * shape.kv_heads * shape.head_dim)
    return f"2 × {shape.layers} layers × {shape.kv_heads} KV heads × {shape.head_dim} × {size:g} bytes"


def _budgeted(said: Sequence[str], how: str, sum_: budget.Budget, weights: float, kv: float) -> Verdict:
    line = f"{sum_.said} (weights by {how})"
    if sum_.fits:
        return kept(line, *said)
    least = budget.least_gpus(weights=weights, kv=kv, gpu_bytes=sum_.gpu_bytes)
    over = sum_.weight_bytes + sum_.temporary_bytes > sum_.gpu_bytes
    costs = "it does not start: the weights alone do not fit" if over else (
        "preemptions, or out of memory on the first day when all sequences are long")
    change = f"--tensor-parallel-size {least}" if least else "a smaller or quantized model: no 64 GPUs hold it"
    fewer = "" if over else ", or fewer sequences (--max-num-seqs), or a shorter --max-model-len"
    return at_odds([line, *said], costs=costs, change=change + fewer)


def hops(facts: Facts) -> Verdict:
    """3: pre- and post-processing in the engine's service."""
    if facts.option("skip-tokenizer-init") is not None:
        return at_odds("--skip-tokenizer-init: tokens are made in another service",
                       costs="two more hops a request, in each first token", change="take --skip-tokenizer-init away"
                       " and send text")
    told = measured(facts, "outside-engine", "outside-engine-whole")
    if told is None:
        return cannot("nobody measures what users wait outside the engine",
                      would_tell="probe.canary: {urls: [the address that users use]} in tocsin.yaml: end-to-end minus"
                                 " in-engine")
    said = f"users wait {span(told['value'])} outside the engine ({told['rule']}, end-to-end minus in-engine)"
    if told["value"] >= HOP_S:
        return at_odds(said, costs=f"{span(told['value'])} on every first token; {span(HOP_S)} more than double a"
                       " p99 of a lightly loaded service", change="tokenizer, template and filter into the engine's"
                       " service; else on its host; look at the proxies in between")
    return kept(said)


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
    """5: the layer of the bottleneck."""
    if facts.binds is None or facts.binds["by"] in ("idle", "cannot-tell"):
        why = "it was not looked at for long enough" if facts.binds is None else str(facts.binds["why"])
        return cannot(f"what binds it is not to be seen: {why}", would_tell="the same under load")
    by = str(facts.binds["by"])
    said = [f"{facts.binds['name']}, {LAYER.get(by, 'unknown layer')}: {facts.binds['why']}"]
    if by in ("kv-bound", "sequence-cap", "upstream", "hardware-bound"):
        no = facts.binds.get("no_help")
        return at_odds(said, costs="what is tuned at another layer changes nothing" + (f": {no}" if no else ""),
                       change=str(facts.binds.get("knob") or "what stands before the engine, or the hardware below it"))
    return kept(*said, f"turn there: {facts.binds.get('knob') or 'nothing'}")


def outliers(facts: Facts) -> Verdict:
    """6: activation outliers before quantizing."""
    form = quantized(facts)
    if form is None:
        return cannot("whether it is quantized is not known", would_tell=SEE_OPTIONS)
    name, activations = form
    if not name:
        return kept("not quantized")
    ratio = facts.evidence.get("outlier_ratio")
    said = [f"{name}: {'weights and activations' if activations else 'weights only'}"]
    if not isinstance(ratio, int | float):
        if not activations:
            return kept(*said, "weights alone bear activation outliers; no measurement on file")
        return at_odds([*said, "no measurement of activations on file"],
                       costs="a model with many outliers loses quality for no visible reason",
                       change="measure max ÷ mean of each layer's activations, and write outlier_ratio into the"
                              " evidence file")
    said.append(f"largest max ÷ mean of a layer's activations: {ratio:g} (evidence file)")
    if activations and ratio > OUTLIERS:
        return at_odds(said, costs=f"over {OUTLIERS:.0f}: its outliers are cut off", change="quantize weights only"
                       " (AWQ, GPTQ): --quantization awq")
    return kept(*said)


def speculation(facts: Facts) -> Verdict:
    """7: speculative decoding by batch size."""
    on, size, acceptance = speculates(facts), batch(facts), facts.numbers.get("acceptance")
    if on is None:
        return cannot(f"whether it speculates is not known: {NO_OPTIONS}", would_tell=SEE_OPTIONS)
    told = [] if acceptance is None else [f"{quantity(acceptance, 'ratio')} of the drafted tokens are accepted"]
    if on:
        if acceptance is not None and acceptance < ACCEPTED_ENOUGH:
            return at_odds([*told, f"under {quantity(ACCEPTED_ENOUGH, 'ratio')}"], costs="most drafting is thrown away",
                           change="take --speculative-config away, or a draft that fits the traffic")
        if size is None:
            return cannot("it speculates, and its batch size is not known", would_tell="--max-num-seqs, or the same"
                          " under load")
        if size[0] > BATCH_EVEN:
            return at_odds(["it speculates", size[1], *told], costs=f"over {BATCH_EVEN} at once drafting is a loss: the"
                           " GPU has no compute to spare", change="take --speculative-config away, or send small"
                           f" batches to a replica of their own (--max-num-seqs {BATCH_GOLDEN})")
        pays = "where it pays" if size[0] <= BATCH_GOLDEN else f"between {BATCH_GOLDEN} and {BATCH_EVEN}: profile it"
        return kept("it speculates", size[1], pays, *told)
    if size is None or size[0] > BATCH_GOLDEN or facts.profile == "throughput":
        return kept("it does not speculate", *([size[1]] if size else []))
    return cannot(f"it does not speculate, and {size[1]}: at {BATCH_GOLDEN} or fewer it may pay",
                  would_tell="a canary with --speculative-config (`tocsin canary`), by its acceptance and gap between"
                             " tokens")


def gray(facts: Facts) -> Verdict:
    """8: changes go to 5 % of the traffic first."""
    if facts.changes is None:
        return cannot(f"whether its configuration changed is not known: {NO_AGENT}", would_tell=ASK_AGENT)
    since = "" if facts.watched_since is None else f" in {span(max(0.0, facts.now - facts.watched_since))}"
    wild = [one for one in facts.changes if not any(0 <= one["at"] - c["at"] <= CANARY_BEFORE_S
                                                    and c["verdict"] == "pass" for c in facts.canaries)]
    if not wild:
        many = len(facts.changes)
        return kept(f"no change of its configuration was seen{since}" if not many else
                    f"{many} change{'s' * (many != 1)}{since}, each after a canary that passed")
    last = wild[-1]
    return at_odds([f"changed {span(max(0.0, facts.now - last['at']))} ago without a canary: {last['what']}"]
                   + ([f"{len(wild)} such changes{since}"] if len(wild) > 1 else []),
                   costs="what goes wrong goes wrong for everybody at once",
                   change="`tocsin canary --old URL… --new URL… --for 24h` on 5 % of the traffic before the next")


def monitoring(facts: Facts) -> Verdict:
    """9: more than QPS."""
    if facts.signals is None:
        if facts.lost:
            return at_odds(f"cannot be had of this engine: {', '.join(facts.lost)}", costs="these fail unseen",
                           change="`tocsin doctor` says for each what to do")
        return cannot("its own numbers are there; whether anybody watches them is not known", would_tell=ASK_AGENT)
    words = {name: {row["state"] for row in rows(facts, *rules)} for name, rules in WATCHED.items()}
    lost = [name for name, states in words.items() if "UNKNOWN" in states]
    absent = [name for name, states in words.items() if not states]
    off = [name for name, states in words.items() if states == {"N/A"}]
    said = [f"{len(words) - len(lost) - len(absent) - len(off)} of the {len(words)} are watched"]
    said += [f"not known now: {', '.join(lost)}"] * bool(lost) + [f"not watched: {', '.join(absent)}"] * bool(absent)
    said += [f"not there on this engine: {', '.join(off)}"] * bool(off)
    if not lost and not absent:
        return kept(*said)
    change = "`tocsin doctor` says for each what to do"
    if "a business metric" in absent:
        change += "; sources: {promql: …} and rule business-metric for the business metric"
    return at_odds(said, costs="QPS stays as it is while these fail unseen", change=change)


def drills(facts: Facts) -> Verdict:
    """10: failure drills, monthly."""
    if facts.drills is None:
        return cannot("whether drills were held is not known: none of their records can be read here",
                      would_tell="`tocsin lint` without an address on drilld's node, as who may read its folder")
    held = [row for row in facts.drills if row["verdict"] in ("PASS", "FAIL")  # what was judged
            and facts.now - (row["started"] or 0.0) <= DRILL_EVERY_S]
    done = {name for name, faults in FAULTS.items() for row in held if row.get("fault") in faults}
    failed = [f"{row['drill']} ({row['verdict']})" for row in held if row["verdict"] != "PASS"]
    said = [f"{len(held)} drill{'s' * (len(held) != 1)} held in the last 31 days"]
    missing = [name for name in FAULTS if name not in done]
    said += [f"not PASS: {', '.join(failed)}"] * bool(failed)
    if not missing:
        return kept(*said, "all four failures were drilled")
    return at_odds([*said, f"not drilled: {', '.join(missing)}"],
                   costs="the missing runbook is found when it really breaks",
                   change="drills: [{name: …, fault: "
                          f"{FAULTS[missing[0]][0]}, schedule: {{cron: \"0 10 * * TUE#1\"}}}}] in tocsin.yaml")


def tradeoff(facts: Facts) -> Verdict:
    """11: quantization costs accuracy."""
    form = quantized(facts)
    kv = facts.cache.get("cache_dtype") or facts.option("kv-cache-dtype") or "auto"
    if form is None:
        return cannot("whether it is quantized is not known", would_tell=SEE_OPTIONS)
    names = [name for name in (form[0], f"KV cache {kv}" if kv.startswith(("fp8", "int8")) else "") if name]
    if not names:
        return kept("not quantized")
    before, after = facts.evidence.get("score_before"), facts.evidence.get("score_after")
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return at_odds(f"{', '.join(names)}; no evaluation of your own before and after on file",
                       costs="quality falls, and general benchmarks do not show it",
                       change="run your own evaluation on both forms, and write score_before and score_after into the"
                              " evidence file; until then do not ship it")
    said = f"{', '.join(names)}; your own evaluation: {before:g} points before, {after:g} after (evidence file)"
    if before - after >= MOST_DROP:
        return at_odds(said, costs=f"{before - after:.2g} points of quality; under {MOST_DROP:g} may ship",
                       change="a form that loses less: weights only, INT8 at most, or none")
    return kept(said)


def end_to_end(facts: Facts) -> Verdict:
    """12: measured end to end."""
    if facts.signals is None:
        return cannot(f"whether anybody measures from the users' side is not known: {NO_AGENT}", would_tell=ASK_AGENT)
    outside = measured(facts, "user-ttft-p99", "user-itl-p99", "outside-engine", "outside-engine-whole")
    inside = facts.numbers.get("ttft_s")
    if outside is not None:
        own = [] if inside is None else [f"in-engine: a mean TTFT of {span(inside)}"]
        told = outside.get("text") or quantity(outside["value"], outside["unit"])
        return kept(f"end to end: {outside['rule']} is {told}", *own)
    return at_odds("only the engine's own numbers are known, none from the users' side",
                   costs="a slow proxy, tokenizer or client is not seen by anybody",
                   change="probe: {canary: {urls: [the address that users use]}} in tocsin.yaml")


PRINCIPLES: tuple[Principle, ...] = (
    Principle(1, "latency or throughput first", direction,
              "A step of the engine serves all sequences in it. More of them a step raise tokens a second and lengthen"
              " each one's wait; one number cannot serve both. Declare which comes first, then hold the number of"
              f" sequences to it: up to {LATENCY_SEQS} where a person waits, {THROUGHPUT_SEQS} and more where nobody"
              " does."),
    Principle(2, "memory budget first", memory,
              "Weights, the KV cache of all sequences at full length, and temporaries must fit with 20 % to spare."
              " The KV bytes of a token are 2 × layers × KV heads × head size × bytes of a number. The seed's worked"
              " line for Llama-2-7B does not add up: its printed numbers make 2.1 GB, its own formula with the hidden"
              " size of 4,096 makes 68.7 GB, its text says 8 GB; ours is 68.7 GB for that model, less with fewer KV"
              " heads than heads, and equals what a real engine reports (a test holds it against vLLM)."),
    Principle(3, "processing beside the model", hops,
              "Each service between the user and the engine adds a hop to every first token. End-to-end minus"
              " in-engine shows what they cost together."),
    Principle(4, "streaming", streaming,
              "People judge by the first token. A streamed answer shows it after the TTFT, a whole one only after the"
              " last token."),
    Principle(5, "the bottleneck's layer", bottleneck,
              "A busy GPU says nothing of where the limit is. What binds the engine (memory, seats, compute, bandwidth,"
              " what comes before it, the hardware below) has one knob each, and the others do not help."),
    Principle(6, "outliers before quantizing", outliers,
              "Activations with a few very large values are cut off by quantizing them. Measure max ÷ mean a layer"
              f" first; over {OUTLIERS:.0f} only weights may be quantized."),
    Principle(7, "speculation by batch size", speculation,
              f"Drafting uses compute that small batches leave idle. Up to {BATCH_GOLDEN} sequences at once it pays,"
              f" about {BATCH_EVEN} it is even, beyond it costs; and only where most drafts are accepted."),
    Principle(8, "gray release", gray,
              "A new configuration has effects that nobody foresaw. On 5 % of the traffic they hurt few and are undone"
              " fast. The agent remembers each engine's configuration, and `tocsin canary` its verdicts."),
    Principle(9, "monitoring beyond QPS", monitoring,
              "Traffic looks the same while latency, cache hits or temperature go wrong. Nine numbers are the least;"
              " one that is lost, or that nobody watches, fails unseen."),
    Principle(10, "failure drills", drills,
              "Crash, GPU failure, network partition and upstream timeout will come. Drilled each month, they find the"
              " alarm and the failover tested."),
    Principle(11, "quantization is a trade-off", tradeoff,
              "Quantized weights or KV cache lose accuracy, on your own task perhaps more than on public ones. Evaluate"
              f" before and after; under {MOST_DROP:g} point may ship."),
    Principle(12, "end to end", end_to_end,
              "Users wait for all of it: network, tokenizer, engine, filter. The engine's own numbers are one part;"
              " measure from the users' side as well, and report both."),
)


def section_of(principle: Principle) -> str:
    """Where the seed has it."""
    return f"deployment design principles, section 2, principle {principle.number}"


def judge(facts: Facts) -> list[dict[str, Any]]:
    """A finding a principle, the worst first; keys are stable."""
    found = []
    for principle in PRINCIPLES:
        said = principle.judge(facts)
        found.append({"number": principle.number, "principle": principle.name, "verdict": said.word,
                      "evidence": list(said.evidence), "costs": said.costs or None, "change": said.change or None,
                      "would_tell": said.would_tell or None, "section": section_of(principle)})
    return sorted(found, key=lambda one: (WORST_FIRST[one["verdict"]], one["number"]))


def explained(number: int) -> list[str]:
    """A principle in our words, and where the seed has it. Raises LookupError: there is no such."""
    principle = next(one for one in PRINCIPLES if one.number == number) if 1 <= number <= len(PRINCIPLES) else None
    if principle is None:
        raise LookupError(f"there is no principle {number}; there are 1 to {len(PRINCIPLES)}")
    return [f"Principle {number}: {principle.name}", principle.why, f"The seed: {section_of(principle)}"]
