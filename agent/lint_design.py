"""Principles 1, 6, 7 and 11: how an engine is configured. Pure."""

from __future__ import annotations

from typing import Literal

from agent.advise import ACCEPTED_ENOUGH, BATCH_EVEN, BATCH_GOLDEN, OUTLIERS
from agent.lint_blocks import profile_block
from agent.lint_case import (
    FEWEST_SEQS,
    LATENCY_SEQS,
    QUANTIZATION,
    THROUGHPUT_SEQS,
    Facts,
    Verdict,
    at_odds,
    cannot,
    chunks,
    is_hidden,
    kept,
    quantized,
    quantized_kv,
    seats,
    short_of_kv,
    speculates,
    unseen,
)
from agent.words import quantity

TABLE = {"latency": f"{FEWEST_SEQS} to {LATENCY_SEQS} sequences at once, chunked prefill on, speculative decoding on",
         "throughput": f"{THROUGHPUT_SEQS} to 128 sequences at once (offline 256 or more), chunked prefill off,"
                       " speculative decoding off"}
ON = {True: "on", False: "off", None: "not told"}
MOST_DROP = 1.0  # principle 11: points lost on the business's own evaluation
READ_MODEL = "`tocsin lint` on the engine's machine, as who may read its model's folder or the cache of the hub"
LEAST_DRAFTED = 1000.0  # ours: tokens; 400 of 1,000 are 37 to 43 % (Wilson, 95 %), 2 of 5 are 12 to 77 %
KV_DTYPES = ("kv-cache-dtype", "cache-type-k", "ctk", "cache-type-v", "ctv")
FALLS = "num_speculative_tokens_per_batch_size"  # of vLLM's --speculative-config: fewer drafts the more run


# --- 1: latency or throughput ----------------------------------------------------------------------------------------


def direction(facts: Facts) -> Verdict:
    """1: latency or throughput."""
    if facts.profile is None:
        return cannot("nobody declared whether latency or throughput comes first",
                      would_tell=profile_block(facts))
    most, chunked, drafts = seats(facts), chunks(facts), speculates(facts)
    said = [f"profile: {facts.profile}; the table says {TABLE[facts.profile]}",
            "how many sequences run at once is not told" if most is None else most[1],
            f"chunked prefill {ON[chunked]}, speculative decoding {ON[drafts]}"]
    wrong = against(facts, facts.profile)
    if wrong:
        return at_odds(said, costs="; ".join(costs for costs, _ in wrong), change="; ".join(do for _, do in wrong))
    if most is None and facts.kind == "tgi":
        return cannot([*said, "no option of TGI's bounds it on a GPU: as many run as --max-batch-total-tokens hold"],
                      would_tell="its load: how many ran at once stands under principles 2 and 7")
    if most is None:
        return unseen(facts, "the number of sequences", facts.flags.sequences, *said)
    if facts.profile == "latency":
        if chunked is None:
            return unseen(facts, "chunked prefill", facts.flag("--enable-chunked-prefill", facts.flags.chunk), *said)
        few = f"fewer than {FEWEST_SEQS}: short gaps, and who comes while all {most[0]:.0f} are taken waits"
        return kept(*said, *[few] * (most[0] < FEWEST_SEQS),
                    *["whether to draft: principle 7"] * (drafts is not True))
    fewer = falls(facts)
    if drafts is None or fewer is None:
        return unseen(facts, "speculative decoding", facts.flag("--speculative-config", "speculative decoding"), *said)
    return kept(*said, *["chunked prefill may stay on: vLLM warns that without it it may crash or answer wrongly"]
                * (chunked is not False), *["it drafts the less, the more run: principle 7"] * fewer)


def against(facts: Facts, profile: Literal["latency", "throughput"]) -> list[tuple[str, str]]:
    """(what it costs, what to change) of each row of the table that is broken for certain."""
    most, flag, found = seats(facts), facts.flags.sequences, []
    if profile == "latency":
        if most is not None and most[0] > LATENCY_SEQS:
            fewer = f"{flag} {LATENCY_SEQS} ({FEWEST_SEQS} to {LATENCY_SEQS})"
            found.append(("each further sequence in a step lengthens every user's gap between tokens and p99",
                          f"{fewer}, or, if nobody waits for its answers, profile: throughput"))
        if chunks(facts) is False:
            found.append(("a long prompt holds up everybody's next token for its whole prefill",
                          facts.flag("--enable-chunked-prefill", "turn chunked prefill on")))
        return found
    few = most is not None and most[0] < THROUGHPUT_SEQS
    if few:
        more = "first more room for the KV cache, which was full (principle 2): more seats would only preempt" \
            if short_of_kv(facts) else f"{flag} 128 (see principle 2)"
        found.append(("the GPU computes small batches: fewer tokens a second for the same money",
                      f"{more}; or, if people wait for its answers, profile: latency"))
    if speculates(facts) and falls(facts) is False and not (few and short_of_kv(facts)):
        found.append(("at large batches drafting only takes compute and memory",
                      f"with so many {no_drafts(facts)}" if few else no_drafts(facts)))
    return found


def falls(facts: Facts) -> bool | None:
    """Whether it drafts the less the more run, and nothing at large batches; None: a variable says it."""
    told = facts.option("speculative-config", "sc") or ""
    return None if is_hidden(told) else FALLS in told


def no_drafts(facts: Facts) -> str:
    """The change that ends drafting."""
    return facts.flag("take --speculative-config away", "turn speculative decoding off")


# --- 6, 7, 11: quantization and speculation --------------------------------------------------------------------------


def _form_unknown(facts: Facts) -> Verdict:
    if facts.options is None:
        return unseen(facts, "whether it is quantized", "its form")
    if facts.hides(*QUANTIZATION):
        return unseen(facts, "whether it is quantized", f"--{next(name for name in QUANTIZATION if facts.hides(name))}")
    if facts.model is None:
        return cannot("whether it is quantized is not known: no option says so, and its model's config.json cannot be"
                      " read here", would_tell=READ_MODEL)
    return cannot("whether it is quantized is not known: neither its command line nor its model's config.json says so,"
                  " and another file may", would_tell="what its log says at its start")


def outliers(facts: Facts) -> Verdict:
    """6: activation outliers before quantizing."""
    form = quantized(facts)
    if form is None:
        return _form_unknown(facts)
    name, activations = form
    if not name:
        return kept("not quantized")
    if activations is None:
        return cannot(f"{name} quantizes activations or not: its model's config.json says it, and cannot be read here",
                      would_tell=READ_MODEL)
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
                       " (AWQ, GPTQ)")
    return kept(*said)


def tradeoff(facts: Facts) -> Verdict:
    """11: quantization costs accuracy."""
    form = quantized(facts)
    names = [name for name in (form[0] if form else "", *quantized_kv(facts)) if name]
    hidden = next((name for name in KV_DTYPES if facts.hides(name)), None)
    if not names and form is not None and hidden is not None and not facts.cache.get("cache_dtype"):
        return unseen(facts, "whether its KV cache is quantized", f"--{hidden}")
    if not names:
        return _form_unknown(facts) if form is None else kept("not quantized")
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


def speculation(facts: Facts) -> Verdict:
    """7: speculative decoding by batch size: what it allows, else the most that was seen. A mean counts idle hours."""
    on, acceptance, most = speculates(facts), facts.numbers.get("acceptance"), seats(facts)
    drafting = facts.flag("--speculative-config", "speculative decoding")
    if on is None:
        return unseen(facts, "whether it speculates", drafting)
    peak = facts.numbers.get("sequences")
    seen = None if peak is None else (peak, f"at most {peak:.0f} ran at once while it was watched")
    if not on:
        return _without(facts, seen or most, drafting)
    told = _accepted(facts)
    if acceptance is not None and acceptance < ACCEPTED_ENOUGH and enough_drafted(facts):
        return at_odds([*told, f"under {quantity(ACCEPTED_ENOUGH, 'ratio')}"], costs="most drafting is thrown away",
                       change=f"{no_drafts(facts)}, or a draft that fits the traffic")
    if falls(facts) is None:
        return unseen(facts, "it speculates, and whether with fewer drafts the more run", drafting, *told)
    if falls(facts):
        return kept(f"it speculates, with fewer drafts the more run ({FALLS})", *told)
    size = most or seen
    if size is None:
        return unseen(facts, "it speculates, and its batch size", facts.flags.sequences)
    said = ["it speculates", size[1], *([seen[1]] if seen and most else []), *told]
    if size[0] > BATCH_EVEN:
        return at_odds(said, costs=f"over {BATCH_EVEN} at once drafting is a loss: the GPU has no compute to spare",
                       change=_for_small_batches(facts, peak))
    if acceptance is not None and not enough_drafted(facts):
        return cannot(said, would_tell=f"the same when {LEAST_DRAFTED:,.0f} tokens were drafted")
    pays = "where it pays" if size[0] <= BATCH_GOLDEN else f"between {BATCH_GOLDEN} and {BATCH_EVEN}: profile it"
    more = facts.profile == "throughput" and size[0] < THROUGHPUT_SEQS
    return kept(*said[:2], pays, *said[2:], *["not with as many seats as throughput wants: see principle 1"] * more)


def enough_drafted(facts: Facts) -> bool:
    """Whether its acceptance is made of enough tokens to say anything."""
    return (facts.numbers.get("drafted") or 0.0) >= LEAST_DRAFTED


def _accepted(facts: Facts) -> list[str]:
    acceptance, drafted = facts.numbers.get("acceptance"), facts.numbers.get("drafted") or 0.0
    if acceptance is None:
        return []
    said = f"{quantity(acceptance, 'ratio')} of {drafted:,.0f} drafted tokens were accepted"
    return [said if enough_drafted(facts) else f"{said}: too few to judge by"]


def _for_small_batches(facts: Facts, peak: float | None) -> str:
    """What to do where drafting is on and its seats allow large batches: as principle 1's table has it."""
    flag = facts.flags.sequences
    if facts.profile == "throughput":
        return no_drafts(facts)
    fewer = f"{flag} {BATCH_GOLDEN} to {BATCH_EVEN}"
    if peak is not None and peak <= BATCH_EVEN:
        return (f"keep drafting, and hold it to small batches: {fewer} (it was never more than {peak:.0f}); only where"
                f" more must run at once {no_drafts(facts)}")
    if facts.profile == "latency":
        return f"{fewer} first, as principle 1 has it, and replicas for the rest; else {no_drafts(facts)}"
    return (f"a choice: {fewer} where people wait for its answers (replicas for the rest), {no_drafts(facts)} where"
            " more must run at once")


def _without(facts: Facts, size: tuple[float, str] | None, drafting: str) -> Verdict:
    """It does not speculate, and so many run at once."""
    if facts.profile == "throughput" or (size is not None and size[0] > BATCH_GOLDEN):
        return kept("it does not speculate", *([size[1]] if size else []))
    if size is None:
        return cannot("it does not speculate, and how many run at once is not known", would_tell="the same under load")
    return cannot(f"it does not speculate, and {size[1]}: at {BATCH_GOLDEN} or fewer it may pay",
                  would_tell=f"a canary with {drafting} (`tocsin canary`), by its acceptance and gap between tokens")
