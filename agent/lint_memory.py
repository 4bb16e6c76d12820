"""Principle 2: the memory budget of an engine: what fits by arithmetic, else what was seen. Pure.

Seats × the longest sequence over the KV cache is usual: who finds no room waits. So where not all fit at full length,
the peak of the KV cache and the preemptions decide, and only where nobody has seen them nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent import budget
from agent.advise import gb
from agent.binds import KV_FULL
from agent.lint_case import (
    Facts,
    Verdict,
    at_odds,
    cannot,
    fewest_seats,
    form_of,
    kept,
    kv_dtype,
    more_room,
    most_seats,
    sequences,
    speculates,
)
from agent.weights import Held, held, kv_form
from agent.words import quantity, span

SEEN_S = 600.0  # ours: so long it was watched before "was not full" says something
OFFLOADS = ("cpu-offload-gb",)  # of vLLM and SGLang
ALIKE = 1.25  # ours: drafting apart, our bytes of a token are the engine's to the byte; more is another model


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
    token: float | None = None  # bytes of one in the KV cache over all ranks, as the engine tells it
    other: float | None = None  # the same by a config.json that is of another model
    runs: bool = False  # it was seen to: what does not fit by arithmetic does
    offloads: bool = False  # part of its weights lies in the host's memory, nobody tells how much

    @property
    def asked(self) -> float | None:
        """Tokens."""
        return self.seqs * self.context if self.seqs and self.context else None

    @property
    def one(self) -> float | None:
        """Bytes of one sequence at full length, each key and value once."""
        if self.shape is None or self.number_bytes is None or not self.context:
            return self.token * self.context if self.token and self.context else None
        return budget.kv_sequence_bytes(self.shape, self.number_bytes, self.context, is_whole=self.ranks.is_whole)

    @property
    def kv(self) -> float | None:
        """Bytes of what is asked for."""
        return self.one * self.seqs if self.one is not None and self.seqs else None

    @property
    def refused(self) -> bool:
        """Whether weights, temporaries and one sequence do not fit with headroom; one that was seen to run does."""
        return (not self.holds and not self.runs and not self.offloads and self.weights is not None
                and bool(self.gpu_bytes) and not self.summed(self.one or 0.0, spread=self.spread).fits)

    @property
    def fit(self) -> int | None:
        """How many sequences of full length find room: in its own KV cache, else in what its GPUs leave for one."""
        if self.holds and self.context:
            return int(self.holds // self.context)
        if self.doubtful or self.offloads or (fit := self._left(spread=False)) is None:
            return None
        return None if self.runs and not fit else fit  # no room at all, and it runs: the sum is not its own

    def _left(self, *, spread: bool) -> int | None:
        """The same by arithmetic."""
        if self.weights is None or not self.gpu_bytes or not self.one:
            return None
        sum_ = self.summed(0.0, spread=spread)
        left = self.gpu_bytes / (1 + budget.HEADROOM) - sum_.weight_bytes - sum_.temporary_bytes
        return max(0, int(left * self.ranks.gpus / self.copies / self.one + 1e-9))

    @property
    def doubtful(self) -> str:
        """Why nobody can say what lies on a GPU: experts of data parallelism that may be spread; "": one can."""
        if self.holds or self.weights is None or not self.gpu_bytes or self.kv is None or not self.spread:
            return ""
        least, most = self.summed(self.kv, spread=True), self.summed(self.kv)
        low, high = self._left(spread=False), self._left(spread=True)
        if most.fits or (least.fits == most.fits and low == high):
            return ""
        said = (f"between {gb(least.need_bytes)} and {gb(most.need_bytes)} of {gb(most.gpu_bytes)} on a GPU, with"
                " headroom")
        if not least.fits:
            said = f"room for between {low} and {high} sequences of full length"
        return f"{said}: experts are spread over the {self.ranks.data} engines of data parallelism, the rest is on each"

    @property
    def copies(self) -> float:
        """How many ranks hold the same keys and values."""
        return 1.0 if self.shape is None else budget.kv_copies(self.shape, self.ranks)

    @property
    def spread(self) -> bool:
        """Whether weights may be spread over the other engines of data parallelism: of experts, vLLM does it."""
        return self.ranks.data > 1 and (self.shape is None or self.shape.experts)

    def summed(self, kv: float, *, spread: bool = False) -> budget.Budget:
        """On each of its GPUs."""
        weights = 0.0 if self.weights is None else self.weights.size_bytes
        return budget.budget(weights=weights / (self.ranks.data if spread else 1), kv=kv,
                             gpu_bytes=self.gpu_bytes or 0.0, gpus=self.ranks.gpus,
                             copies=self.copies)


def memory(facts: Facts) -> Verdict:
    """2: weights + KV cache + temporaries + 20 %; where not every sequence fits at full length, what was seen."""
    has, seen = sizes(facts), _seen(facts)
    said = _said(facts, has)
    if has.refused:
        return _refused(facts, has, said)
    said += seen.said
    fit = has.fit
    if seen.preempted or seen.full or fit == 0:
        if not seen.preempted and has.holds and fit and has.seqs and fit >= has.seqs:
            return kept(*said, "all of full length find room at once")
        return _too_full(facts, has, seen, said)
    if fit is not None and has.seqs and fit >= has.seqs:
        return kept(*said)
    if seen.spare:
        return kept(*said, *_find_room(has))
    watch = f"the same from a running agent that has watched its usual load for {span(SEEN_S)}: KV peak and preemptions"
    if has.doubtful:
        return cannot([has.doubtful, *said], would_tell="what its log says that the weights took, at its start")
    if fit is not None and has.seqs:
        return cannot([*said, *_find_room(has)], would_tell=watch)
    parts = {"weights": has.weights, "KV bytes a token": has.number_bytes or has.token, "sequences": has.seqs,
             "longest sequence": has.context, "the GPU's memory": has.gpu_bytes}
    lacking = [name for name, value in parts.items() if value is None]
    if not lacking:
        why = ("part of its weights lies in the host's memory, and nobody tells how much of its GPUs is left"
               if has.offloads else "by this sum not one sequence of full length finds room, and it runs: something"
               " takes less than is known here")
        return cannot([*said, why], would_tell=watch)
    return cannot("; ".join([*said, f"not known: {', '.join(lacking)}"]),
                  would_tell=f"{watch}; or {facts.flags.sequences} and {_longest(facts)} on its command line, the"
                             " model's folder readable here, NVML; or `tocsin advise kv-cache` with your numbers")


class _Seen(NamedTuple):
    """What the KV cache was seen to do. `full`: too full to take more; `spare`: 20 % to spare, for long enough."""

    preempted: float
    full: bool
    spare: bool
    said: Sequence[str]


def _seen(facts: Facts) -> _Seen:
    numbers = facts.numbers
    peak, preempted, most = numbers.get("kv_usage"), numbers.get("preemptions"), numbers.get("sequences")
    watched_s = numbers.get("watched_s") or 0.0
    if peak is None and not preempted:
        return _Seen(0.0, full=False, spare=False, said=[])
    said = [] if peak is None else [f"its KV cache was at most {quantity(peak, 'ratio')} full"]
    said += [] if most is None else [f"at most {most:.0f} ran at once"]
    said += [] if preempted is None else [f"{preempted:.0f} were preempted" if preempted else "none was preempted"]
    line = "seen" + (f" in {span(watched_s)}" if watched_s else "") + f": {', '.join(said)}"
    room = peak is not None and peak * (1 + budget.HEADROOM) <= 1 and most is not None
    return _Seen(preempted or 0.0, full=peak is not None and peak >= KV_FULL,
                 spare=room and not preempted and watched_s >= SEEN_S, said=[line])


def _find_room(has: Sizes) -> list[str]:
    """The arithmetic as arithmetic."""
    if has.fit is None or not has.seqs:
        return []
    if not has.holds and has.fit >= has.seqs:  # by the size of its GPUs, of which it may take any part
        return [("by the size of its GPUs all of full length would find room; how much of it the engine set aside is"
                 " not told")]
    fit = min(has.fit, int(has.seqs))
    return [f"{fit} of {has.seqs:.0f} sequences of full length find room at once; who comes after them waits"]


def sizes(facts: Facts) -> Sizes:
    """Its weights by their files, else by the model's shape; the rest as it is told.

    Where the engine's own bytes of a token are others than config.json makes, that one is of another model.
    """
    shape = None if facts.model is None else budget.shape_of(facts.model)
    dtype = facts.option("dtype") or "auto"
    told = facts.cache.get("kv_cache_size_tokens")  # blocks × tokens of one are more, where layers have windows
    numbers = {name: budget.number_of(facts.numbers.get(name)) for name in ("capacity_tokens", "gpu_bytes", "gpus")}
    ranks = budget.ranks_of(facts.options, numbers["gpus"])
    token = _token_bytes(facts, shape, ranks)
    has = Sizes(held(shape, form_of(facts), files_bytes=facts.weight_bytes, dtype=dtype), shape,
                None if shape is None else _number_bytes(facts, shape, dtype, token), ranks,
                sequences(facts), budget.number_of(facts.context_tokens),
                budget.number_of(told) or numbers["capacity_tokens"], numbers["gpu_bytes"],
                token,
                runs=any(facts.numbers.get(name) is not None for name in ("sequences", "kv_usage", "watched_s")),
                offloads=facts.option(*OFFLOADS) not in (None, "0"))
    ours = None if shape is None or not has.number_bytes else budget.kv_token_bytes(shape, has.number_bytes)
    if ours and has.token and not speculates(facts) and not _alike(has.token, ours):
        return has._replace(weights=None, shape=None, number_bytes=None, other=ours)
    return has


def _number_bytes(facts: Facts, shape: budget.Shape, dtype: str, token: float | None) -> float | None:
    """Of a number in the KV cache. An engine may not follow what its checkpoint wants: its own bytes tell."""
    size, plain = (budget.kv_dtype_bytes(shape, cache, dtype) for cache in (kv_dtype(facts), "auto"))
    follows_not = token and plain and kv_form(facts.model) and _alike(token, budget.kv_token_bytes(shape, plain))
    return plain if follows_not else size


def _alike(told: float, ours: float) -> bool:
    return 1 / ALIKE <= told / ours <= ALIKE


def _token_bytes(facts: Facts, shape: budget.Shape | None, ranks: budget.Ranks) -> float | None:
    """Of a token over all ranks, by what the engine tells: bytes of a rank's KV cache ÷ its tokens.

    None where it tells neither, where blocks are overridden (the bytes are not theirs), where layers have windows.
    """
    size, tokens = (budget.number_of(facts.cache.get(f"kv_cache_{name}")) for name in ("memory_bytes", "size_tokens"))
    overridden = facts.cache.get("num_gpu_blocks_override", "None") != "None" or \
        facts.option("num-gpu-blocks-override") is not None
    if not size or not tokens or overridden:
        return None
    if shape is not None and shape.windowed and not ranks.is_whole:
        return None
    return size * ranks.gpus / (1.0 if shape is None else budget.kv_copies(shape, ranks)) / tokens


def _said(facts: Facts, has: Sizes) -> list[str]:
    """The sum where it is known, what a token takes, what is asked for, what the KV cache holds."""
    shape, size, said = has.shape, has.number_bytes, []
    if has.weights is not None:
        said.append(f"weights {gb(has.weights.size_bytes)} (by {has.weights.by})" if has.holds or not has.gpu_bytes
                    else _line(has, has.summed(has.kv or 0.0)))
    if has.other and has.token:
        said.append(f"a token takes {has.token:,.0f} bytes of KV cache as the engine tells, and {has.other:,.0f} by the"
                    " config.json that was found: that is of another model, and is left out")
    if shape is not None and size is not None:
        said.append(budget.kv_said(shape, size, is_whole=has.ranks.is_whole))
        if has.copies > 1:
            what = "the latent numbers cannot be split" if shape.latent else f"there are {shape.kv_heads} KV heads"
            said.append(f"{what}: of {has.ranks.tensor} ranks {has.copies:g} each hold the same")
    if has.asked is not None:
        said.append(f"asked for at most: {has.seqs:.0f} sequences × {has.context:,.0f} tokens = {has.asked:,.0f} tokens"
                    + ("" if has.kv is None else f", {gb(has.kv)}"))
    if has.holds is not None:
        holds = _held_bytes(facts, has)
        said.append(f"its KV cache holds {has.holds:,.0f} tokens" + ("" if holds is None else f", {gb(holds)}"))
        if has.asked and has.holds >= has.asked:
            times = has.holds / has.asked
            more = f"{times:,.0f} times what is" if times >= 3 else f"{quantity(times - 1, 'ratio')} more than is"
            said.append(f"{more if has.holds > has.asked else 'just what is'} asked for")
    return said


def _held_bytes(facts: Facts, has: Sizes) -> float | None:
    """Of its KV cache over all ranks, each key and value once. What the engine tells in bytes is one rank's."""
    shape, told = has.shape, budget.number_of(facts.cache.get("kv_cache_memory_bytes"))
    if shape is not None and has.number_bytes and (not shape.windowed or has.ranks.is_whole):
        return (has.holds or 0.0) * budget.kv_token_bytes(shape, has.number_bytes)
    if told is None:
        return None
    return told * has.ranks.gpus / has.copies


def _longest(facts: Facts) -> str:
    return facts.flag("--max-model-len", "longest sequence")


def _line(has: Sizes, sum_: budget.Budget) -> str:
    all_ = "" if sum_.fits or has.refused else "with all sequences at full length "
    return f"{all_}{sum_.said} (weights by {has.weights.by if has.weights else 'nobody'})"


def _too_full(facts: Facts, has: Sizes, seen: _Seen, said: Sequence[str]) -> Verdict:
    """Its KV cache was full, or takes not even one sequence of full length. What to do is a choice, and theirs."""
    longest = f"a shorter {_longest(facts)}"
    longest += f", where nobody needs {has.context:,.0f} tokens" if has.context else ""
    room = ", ".join([*more_room(facts), "more GPUs"])
    if not seen.preempted and not seen.full:
        return at_odds(said, costs="not one sequence of full length finds room: it is refused, or never ends",
                       change=f"{longest}; or more room for the KV cache: {room}")
    costs = "what is preempted is computed anew, while its user waits" if seen.preempted else \
        "newcomers wait for room, and what runs may be preempted as it grows"
    fewer = _fewer_seats(facts, has)
    return at_odds([*said, *_find_room(has)], costs=costs,
                   change="one of these, as you choose: more room for the KV cache ("
                          f"{room}, or another replica); {fewer}{longest}")


def _fewer_seats(facts: Facts, has: Sizes) -> str:
    """As many as fit at the lengths that were seen, never fewer than principle 1's table has; "": it is there."""
    least, most = fewest_seats(facts), most_seats(facts)
    fits = ((facts.binds or {}).get("evidence") or {}).get("fits")
    to = least if not fits else max(least, min(int(fits), most or int(fits)))
    ran = budget.number_of(facts.numbers.get("sequences"))  # seats over those that ever ran are not what filled it
    if not has.seqs or to >= min(has.seqs, ran or has.seqs):
        return ""
    return (f"fewer seats, so that who comes waits instead: {facts.flags.sequences} {to} (not under {least}: principle"
            " 1); ")


def _refused(facts: Facts, has: Sizes, said: Sequence[str]) -> Verdict:
    """Not one sequence fits on its GPUs beside the weights."""
    sum_ = has.summed(has.one or 0.0, spread=has.spread)
    if has.spread:  # on how few it fits depends on what is spread, which nobody can tell
        said = [*said, "and so it is with its experts spread over all the engines of data parallelism"]
    least = budget.least_gpus(weights=has.weights.size_bytes if has.weights else 0.0, kv=has.one or 0.0,
                              gpu_bytes=sum_.gpu_bytes, pipeline=has.ranks.pipeline,
                              shards=64.0 if has.shape is None else budget.kv_shards(has.shape, has.ranks))
    over = sum_.weight_bytes + sum_.temporary_bytes > sum_.gpu_bytes
    costs = "it does not start: the weights alone do not fit" if over else (
        "beside the weights no sequence of full length finds room with 20 % to spare; vLLM does not start where none"
        " finds room at all")
    tensor, stages = facts.flag("--tensor-parallel-size", "tensor parallelism over GPUs:"), ""
    if least is not None and (least.pipeline > 1 or has.ranks.pipeline > 1):
        stages = f" {facts.flag('--pipeline-parallel-size', 'and pipeline stages:')} {least.pipeline}"
    change = "a smaller or quantized model: no 64 GPUs hold it" if least is None else f"{tensor} {least.tensor}{stages}"
    change = "more GPUs, or a smaller or quantized model" if has.spread else change
    return at_odds(said, costs=costs, change=change + ("" if over else f", or a shorter {_longest(facts)}"))
