"""What the twelve principles judge, and how: the facts of a deployment, the verdicts, and what several of them ask."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agent import weights
from agent.binds import ANY, FLAGS, KV_FULL, Flags
from agent.budget import number_of

Word = Literal["kept", "at odds", "cannot tell"]
LEAST_DEFAULT = 128.0  # vLLM's own --max-num-seqs: 128 on a CPU, 256 or 1,024 on GPUs (0.32, arg_utils.py)
FEWEST_SEQS, LATENCY_SEQS, THROUGHPUT_SEQS = 16, 32, 64  # principle 1: 16–32; 64–128 or 256+
# Of a number in the KV cache, in each engine's words; anything else is quantized (vLLM 0.32's CacheDType has 16 such).
PLAIN_KV = frozenset({"auto", "", "bfloat16", "bf16", "float16", "fp16", "half", "f16", "float32", "float", "f32"})
SHARES = ("gpu-memory-utilization", "mem-fraction-static", "kv-cache-free-gpu-memory-fraction", "cache-max-entry-count")
ALL_TAKEN = r"0?\.9[5-9]\d*|1(\.0*)?"  # ours: 95 % of a GPU or more; the rest is for what a step computes
SEQUENCES = ("max-num-seqs", "max-running-requests", "max-batch-size", "parallel", "np")
QUANTIZATION = ("quantization", "quantize", "q")  # of vLLM and SGLang, TGI, LMDeploy
DRAFTS = ("sc", "speculate", "model-draft", "md")  # of vLLM, TGI, llama.cpp; others begin with speculative- or spec-


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one engine and of how it is run. None: nobody could tell; `no_*` says why where it helps.

    `options`: its command line's, name without dashes -> value ("" where it has none). `numbers`: as agent.facts has
    them. `signals`: rows of `check`. `changes`: {"at", "what"} of each change of its configuration that the agent saw,
    oldest first. `canaries`: those that named this engine, {"at": their end, "started", "verdict", "side": "old" or
    "new"}. `drills`: rows of `drill history`. `evidence`: of the file, see docs/lint.md.
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
    strangers: Sequence[str] = ()  # addresses at which users' waits are measured, of other models or nobody knows which
    changes: Sequence[Mapping[str, Any]] | None = None
    watched_since: float | None = None
    canaries: Sequence[Mapping[str, Any]] = ()
    drills: Sequence[Mapping[str, Any]] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    configured: str = ""  # its name under `engines`
    pods_of: str = ""  # namespace/workload, where it runs in pods
    served: str = ""  # the model's name in its answers
    now: float = 0.0

    def option(self, *names: str) -> str | None:
        """The value of the first of these options that its command line has; None: none of them."""
        options = self.options or {}
        return next((options[name] for name in names if name in options), None)

    def hides(self, *names: str) -> bool:
        """Whether one of these options stands there with a value that nobody here sees."""
        return any(is_hidden(self.option(name)) for name in names)

    @property
    def flags(self) -> Flags:
        """What this engine calls its knobs."""
        return FLAGS.get(self.kind, ANY)

    def flag(self, of_vllm: str, words: str) -> str:
        """An option by vLLM's name, for others in words."""
        return of_vllm if self.kind == "vllm" else words

    @property
    def is_whole(self) -> bool:
        """Whether an option that is not on its command line has its default, and we know that one: vLLM's."""
        return self.kind == "vllm" and self.options is not None and "config" not in self.options


class Verdict(NamedTuple):
    """On one principle. `costs`, `change`: where it is at odds; `would_tell`: where nobody can say."""

    word: Word
    evidence: Sequence[str] = ()
    costs: str = ""
    change: str = ""
    would_tell: str = ""


def kept(*evidence: str) -> Verdict:
    """It is as it should be, by this."""
    return Verdict("kept", evidence)


def at_odds(evidence: str | Sequence[str], *, costs: str, change: str) -> Verdict:
    """It is not; what that costs, and what to change."""
    return Verdict("at odds", [evidence] if isinstance(evidence, str) else evidence, costs, change)


def cannot(why: str | Sequence[str], *, would_tell: str) -> Verdict:
    """Nothing here shows it; what would."""
    return Verdict("cannot tell", [why] if isinstance(why, str) else why, would_tell=would_tell)


SEE_OPTIONS = ("`tocsin lint` on the engine's own machine, where /proc shows its command line; in Kubernetes the agent"
               " of its node with overlays/discovery, or components/node-processes where an image or a shell hides it")
NO_AGENT = "only a running agent knows"
ASK_AGENT = "`tocsin lint` without an address, on the node where the agent runs"


def unseen(facts: Facts, what: str, option: str, *said: str) -> Verdict:
    """An option decides, and is not on its command line."""
    if facts.options is None:
        why = "its command line was not seen: it runs elsewhere, or in a container of its own"
        return cannot([*said, f"{what} is not known: {why}"], would_tell=SEE_OPTIONS)
    hidden = facts.option(option.lstrip("-"))
    if is_hidden(hidden):
        return cannot([*said, f"{what} is not known: {option} {hidden} is of its pod's environment"],
                      would_tell=f"the value itself after {option}, or components/node-processes")
    if option.lstrip("-") in SEQUENCES and hidden is not None:
        return cannot([*said, f"{what} is not known: {option} {hidden[:20]} is none"],
                      would_tell=f"{option} with a whole number over 0 on its command line")
    why = "its --config file may say it" if "config" in facts.options else "what this engine does without is not known"
    return cannot([*said, f"{what} is not known: its command line does not say, and {why}"],
                  would_tell=f"{option} on its command line")


def is_hidden(value: str | None) -> bool:
    """Whether a value stands in the environment of its pod, and a variable in its place (agent.sources.pods)."""
    return value is not None and re.search(r"\$[({]?\w", value) is not None


def sequences(facts: Facts) -> float | None:
    """How many sequences it runs at once at most, where its command line says it; none is no number of them."""
    return number_of(facts.option(*SEQUENCES)) or None


def seats(facts: Facts) -> tuple[float, str] | None:
    """The same with vLLM's default (at least that), and in words; None: nobody knows."""
    most, name = sequences(facts), facts.flags.sequences
    if most is not None:
        return most, f"{name} {most:.0f}"
    default = LEAST_DEFAULT, f"{name} is not given: vLLM's own is {LEAST_DEFAULT:.0f} or more"
    return default if facts.is_whole and facts.option(*SEQUENCES) is None else None


def fewest_seats(facts: Facts) -> int:
    """The least of principle 1's table for what comes first here; of both, where nobody said what does."""
    return THROUGHPUT_SEQS if facts.profile == "throughput" else FEWEST_SEQS


def most_seats(facts: Facts) -> int | None:
    """The most of that table; None: no limit, or nobody said what comes first."""
    return LATENCY_SEQS if facts.profile == "latency" else None


def speculates(facts: Facts) -> bool | None:
    """Whether it drafts tokens."""
    if facts.numbers.get("acceptance") is not None:
        return True
    drafts = [name for name in facts.options or () if name in DRAFTS or name.startswith(("speculative-", "spec-"))]
    if facts.hides(*drafts):
        return None
    if drafts:
        return True
    return False if facts.is_whole else None


def short_of_kv(facts: Facts) -> bool:
    """Whether its KV cache was seen to be too small for what runs: then more seats only preempt."""
    full = (facts.numbers.get("kv_usage") or 0.0) >= KV_FULL
    return full or bool(facts.numbers.get("preemptions")) or (facts.binds or {}).get("by") == "kv-bound"


def kv_dtype(facts: Facts) -> str:
    """Of a number in its KV cache: as it was told, else as its checkpoint wants it; "auto": as the model computes."""
    told = facts.cache.get("cache_dtype") or facts.option("kv-cache-dtype") or "auto"
    return weights.kv_form(facts.model) or told if told == "auto" else told


def quantized_kv(facts: Facts) -> list[str]:
    """The forms of its KV cache that are quantized, as a person would say them."""
    told = kv_dtype(facts)
    forms = [told] if told != "auto" else [facts.option("cache-type-k", "ctk"), facts.option("cache-type-v", "ctv")]
    return [f"KV cache {form}" for form in dict.fromkeys(forms)
            if form and form.lower() not in PLAIN_KV and not is_hidden(form)]


def more_room(facts: Facts) -> list[str]:
    """How its KV cache gets more room, of what is not taken already."""
    is_taken = re.fullmatch(ALL_TAKEN, facts.option(*SHARES) or "") is not None
    if facts.kind != "vllm":
        return [facts.flags.kv] * (not is_taken)
    fp8 = "--kv-cache-dtype fp8 after an evaluation of your own (principle 11)"
    return ["--gpu-memory-utilization"] * (not is_taken) + [fp8] * (not quantized_kv(facts))


def chunks(facts: Facts) -> bool | None:
    """Whether long prompts are computed in parts; vLLM does since 0.8, unless told not to."""
    if facts.hides("enable-chunked-prefill", "no-enable-chunked-prefill", "chunked-prefill-size"):
        return None
    told, size = facts.option("enable-chunked-prefill"), facts.option("chunked-prefill-size")  # SGLang's is a size
    if facts.option("no-enable-chunked-prefill") is not None or size == "-1":
        return False
    if told is not None:
        return told.lower() not in ("false", "0")
    return True if size is not None or facts.is_whole else None


def form_of(facts: Facts) -> weights.Form:
    """In which form its weights are, by its flag and its model's config.json."""
    return weights.form_of(facts.option(*QUANTIZATION) or "", facts.model)


def quantized(facts: Facts) -> tuple[str, bool | None] | None:
    """(form, whether activations are quantized, too; None: only a config.json says so); ("", False): not at all.

    None: nobody knows.
    """
    if facts.hides(*QUANTIZATION):
        return None
    form = form_of(facts)
    if not form.name:
        return None if facts.model is None or not facts.is_whole else ("", False)
    return form.name, form.activations


def rows(facts: Facts, *rules: str) -> list[Mapping[str, Any]]:
    """The rows of `check` of these rules."""
    return [row for row in facts.signals or () if row["rule"] in rules]


def measured(facts: Facts, *rules: str) -> Mapping[str, Any] | None:
    """The first of them that has a value."""
    return next((row for row in rows(facts, *rules) if row.get("value") is not None), None)
