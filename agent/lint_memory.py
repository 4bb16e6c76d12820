"""Principle 2: the memory budget of an engine, of what is known of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent import budget
from agent.advise import gb
from agent.lint_case import Facts, Verdict, at_odds, cannot, form_of, kept, sequences
from agent.weights import Held, held
from agent.words import quantity


class Sizes(NamedTuple):
    """What is known of its memory. `asked`: tokens of all sequences at full length; `holds`: those of its KV cache."""

    weights: Held | None
    shape: budget.Shape | None
    number_bytes: float | None  # of a number in the KV cache
    ranks: budget.Ranks
    seqs: float | None
    context: float | None  # tokens
    holds: float | None
    gpu_bytes: float | None

    @property
    def asked(self) -> float | None:
        """Tokens."""
        return self.seqs * self.context if self.seqs and self.context else None

    @property
    def kv(self) -> float | None:
        """Bytes of what is asked for, each key and value once."""
        if self.shape is None or self.number_bytes is None or not self.seqs or not self.context:
            return None
        return self.seqs * budget.kv_sequence_bytes(self.shape, self.number_bytes, self.context,
                                                    is_whole=self.ranks.is_whole)

    @property
    def spread(self) -> bool:
        """Whether weights may be spread over the other engines of data parallelism: of experts, vLLM does it."""
        return self.ranks.data > 1 and (self.shape is None or self.shape.experts)

    def summed(self, kv: float, *, spread: bool = False) -> budget.Budget:
        """On each of its GPUs."""
        weights = 0.0 if self.weights is None else self.weights.size_bytes
        return budget.budget(weights=weights / (self.ranks.data if spread else 1), kv=kv,
                             gpu_bytes=self.gpu_bytes or 0.0, gpus=self.ranks.gpus,
                             copies=1.0 if self.shape is None else budget.kv_copies(self.shape, self.ranks))


def memory(facts: Facts) -> Verdict:
    """2: weights + KV cache + temporaries + 20 %: of the GPU where all are known, else of the KV cache alone."""
    has = sizes(facts)
    said = _said(facts, has)
    if has.asked and has.holds and has.asked > has.holds:
        return _too_small(facts, has, said)
    if has.weights is not None and has.gpu_bytes:
        least = has.summed(has.kv or 0.0, spread=has.spread)
        most = has.summed(has.kv or 0.0)
        if not least.fits:
            return _over(facts, said, has, least)
        if has.kv is not None and most.fits:
            return kept(_line(has, most), *said)
        if has.kv is not None:
            room = f"between {gb(least.need_bytes)} and {gb(most.need_bytes)} of {gb(most.gpu_bytes)} on a GPU"
            why = f"experts are spread over the {has.ranks.data} engines of data parallelism, the rest is on each"
            return cannot([f"{room}, with headroom: {why}", *said],
                          would_tell="what its log says that the weights took, at its start")
    if has.weights is not None:
        said.insert(0, f"weights {gb(has.weights.size_bytes)} (by {has.weights.by})")
    if has.asked and has.holds:
        times = has.holds / has.asked
        more = f"{times:,.0f} times what" if times >= 3 else f"{quantity(times - 1, 'ratio')} more than"
        said.append(f"{more} is asked for, by its KV cache alone")
        return kept(*said) if times - 1 >= budget.HEADROOM else _too_small(facts, has, said)
    parts = {"weights": has.weights, "KV bytes a token": has.number_bytes, "sequences": has.seqs,
             "longest sequence": has.context, "the GPU's memory": has.gpu_bytes}
    lacking = [name for name, value in parts.items() if value is None]
    return cannot("; ".join([*said, f"not known: {', '.join(lacking)}"]),
                  would_tell=f"{facts.flags.sequences} and {_longest(facts)} on its command line, the model's folder"
                             " readable here, NVML; or `tocsin advise kv-cache` with your numbers")


def sizes(facts: Facts) -> Sizes:
    """Its weights by their files, else by the model's shape; the rest as it is told."""
    shape = None if facts.model is None else budget.shape_of(facts.model)
    dtype = facts.option("dtype") or "auto"
    cache = facts.cache.get("cache_dtype") or facts.option("kv-cache-dtype") or "auto"
    told = facts.cache.get("kv_cache_size_tokens", "")  # blocks × tokens of one are more, where layers have windows
    return Sizes(held(shape, form_of(facts), files_bytes=facts.weight_bytes, dtype=dtype), shape,
                 None if shape is None else budget.kv_dtype_bytes(shape, cache, dtype),
                 budget.ranks_of(facts.options, facts.numbers.get("gpus")), sequences(facts), facts.context_tokens,
                 float(told) if told.isdigit() else facts.numbers.get("capacity_tokens"),
                 facts.numbers.get("gpu_bytes"))


def _said(facts: Facts, has: Sizes) -> list[str]:
    """What a token takes, what is asked for, what the KV cache holds."""
    shape, size, said = has.shape, has.number_bytes, []
    if shape is not None and size is not None:
        said.append(budget.kv_said(shape, size, is_whole=has.ranks.is_whole))
        copies = budget.kv_copies(shape, has.ranks)
        if copies > 1:
            what = "the latent numbers cannot be split" if shape.latent else f"there are {shape.kv_heads} KV heads"
            said.append(f"{what}: of {has.ranks.tensor} ranks {copies:g} each hold the same")
    if has.asked is not None:
        said.append(f"asked for: {has.seqs:.0f} sequences × {has.context:,.0f} tokens = {has.asked:,.0f} tokens"
                    + ("" if has.kv is None else f", {gb(has.kv)}"))
    if has.holds is not None:
        holds = _held_bytes(facts, has)
        said.append(f"its KV cache holds {has.holds:,.0f} tokens" + ("" if holds is None else f", {gb(holds)}"))
    return said


def _held_bytes(facts: Facts, has: Sizes) -> float | None:
    """Of its KV cache over all ranks, each key and value once. What the engine tells in bytes is one rank's."""
    shape, told = has.shape, facts.cache.get("kv_cache_memory_bytes", "")
    if shape is not None and has.number_bytes and (not shape.windowed or has.ranks.is_whole):
        return (has.holds or 0.0) * budget.kv_token_bytes(shape, has.number_bytes)
    if not told.isdigit():
        return None
    return float(told) * has.ranks.gpus / (1.0 if shape is None else budget.kv_copies(shape, has.ranks))


def _longest(facts: Facts) -> str:
    return facts.flag("--max-model-len", "longest sequence")


def _line(has: Sizes, sum_: budget.Budget) -> str:
    return f"{sum_.said} (weights by {has.weights.by if has.weights else 'nobody'})"


def _too_small(facts: Facts, has: Sizes, said: Sequence[str]) -> Verdict:
    """The KV cache has no room for what is asked, or none to spare."""
    holds, context, seqs = has.holds or 0.0, has.context or 1.0, has.seqs or 0.0
    fit, fit_well = int(holds // context), int(holds / (1 + budget.HEADROOM) // context)
    rest = "the rest" if fit < seqs else "what the sum forgets"
    costs = f"{min(fit, int(seqs))} of {seqs:.0f} full sequences find room; {rest} is preempted and computed anew"
    return at_odds(said, costs=costs, change=f"{facts.flags.sequences} {max(1, fit_well)}"
                   f" ({budget.HEADROOM * 100:.0f} % spare), a shorter {_longest(facts)}, or more KV cache:"
                   f" {facts.flags.kv}")


def _over(facts: Facts, said: Sequence[str], has: Sizes, sum_: budget.Budget) -> Verdict:
    """It does not fit on its GPUs."""
    least = budget.least_gpus(weights=has.weights.size_bytes if has.weights else 0.0, kv=has.kv or 0.0,
                              gpu_bytes=sum_.gpu_bytes, pipeline=has.ranks.pipeline,
                              shards=64.0 if has.shape is None else budget.kv_shards(has.shape, has.ranks))
    over = sum_.weight_bytes + sum_.temporary_bytes > sum_.gpu_bytes
    costs = "it does not start: the weights alone do not fit" if over else (
        "preemptions, or out of memory on the first day when all sequences are long")
    change = f"{facts.flag('--tensor-parallel-size', 'tensor parallelism over GPUs:')} {least}" if least else \
        "a smaller or quantized model: no 64 GPUs hold it"
    fewer = "" if over else f", or a smaller {facts.flags.sequences}, or a shorter {_longest(facts)}"
    return at_odds([_line(has, sum_), *said], costs=costs, change=change + fewer)
