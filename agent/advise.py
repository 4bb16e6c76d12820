"""The nine decision checklists of the seeds as calculators: numbers in, a decision with its reasons out. Pure.

Names carry their unit (`_bytes`, `_tokens`, `_s`, `_per_s`; shares are 0 to 1); GB is 10^9 bytes, GiB 2^30. A formula
without a source is that of the checklist of the function's name ("checklist 2": Appendix D, deployment patterns
and decision checklists); "principle 7" is of the deployment design principles. runbooks/checklists/ has them in words.
What a running engine can fill in: `TOLD`, as agent.facts has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.scaling import IN_FOR_S, IN_S, OUT_S
from agent.words import quantity, span

FITS = 0.8  # checklist 1: share of a GPU's memory that weights may take
TIGHT = 0.7
KV_NEARLY_FULL = 0.85  # checklist 10, row 2
CHUNK_START_TOKENS = 512  # checklist 3: where to begin, and where the efficiency knee typically is
PAYS_OFF = 0.15  # checklist 4: under 10 to 15 % of hits the cache is not paying for itself
ACCEPTED_WELL, ACCEPTED_ENOUGH = 0.70, 0.50  # checklist 7
BATCH_GOLDEN, BATCH_EVEN, BATCH_LOSS = 16, 32, 64  # principle 7
LITTLE_GAIN = 5.0  # prefill avoided ÷ transfer; ours: the seed says "little gain" of 256 tokens without a number
OUTLIERS = 100.0  # principle 6: max ÷ mean of a layer's activations
MIB = 2.0**20


class Missing(ValueError):  # noqa: N818  (it says what is)
    """A number without which a checklist decides nothing, and the options that give it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What a checklist decides. `decision`: stable, for scripts; `answer`: the same for people; `why`: step by step.

    `numbers`: what went in and came out, each name with its unit. `then`: the checklists that depend on this one.
    """

    checklist: str
    decision: str
    answer: str
    why: Sequence[str]
    numbers: Mapping[str, Any]
    then: Sequence[str] = field(default_factory=tuple)


# What an engine's page or NVML can fill in: input -> what it is, in words. Everything else is given by hand.
TOLD: Mapping[str, str] = {
    "gpu_bytes": "memory of its smallest GPU", "gpus": "GPUs that it runs on",
    "capacity_tokens": "KV blocks × tokens a block", "sequences": "the most requests that it ran at once",
    "kv_usage": "share of the KV cache in use, at most", "running": "requests at once, on average",
    "prompt_tokens": "mean prompt", "output_tokens": "mean answer", "decode_step_s": "mean gap between tokens",
    "prefill_s_per_token": "(mean TTFT − mean wait in the queue) ÷ mean prompt",
    "prefill_s": "mean TTFT − mean wait in the queue", "queue_s": "mean wait in the queue",
    "hit_rate": "prefix-cache hits ÷ tokens looked up", "acceptance": "accepted ÷ drafted tokens",
    "replica_per_s": "the most requests that it finished in a minute in which others waited",
    "replicas": "engines that the agent watches; give --replicas where not all serve this model",
    "queue_age_s": "age of the oldest request in the queue",
    "preemptions": "preemptions seen", "itl_target_s": "slo.itl_p99",
}


def gb(size_bytes: float) -> str:
    """A size as hardware is sold: 35 GB, 2.75 TB; under a gigabyte in MB."""
    for unit_bytes, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.3g} {name}"
    return f"{size_bytes:.0f} B"


def shown(name: str, value: float) -> str:
    """An input with its name and unit: prompt 812 tokens, 45 ms."""
    words = name.replace("_", " ")
    if name.endswith("_per_s"):
        return f"{words.removesuffix(' per s')} {value:.3g}/s"
    if name.endswith(("_s", "_s_per_token")):
        return f"{words.removesuffix(' s') if name.endswith('_s') else 'prefill per token'} {span(value)}"
    if name.endswith("_bytes"):
        return f"{words.removesuffix(' bytes')} {gb(value)}"
    if name in ("kv_usage", "hit_rate", "acceptance"):
        return f"{words} {quantity(value, 'ratio')}"
    return f"{words} {value:,.4g}" if value < 1e4 else f"{words} {value:,.0f}"


def size_bytes(text: str) -> float:
    """Bytes from how people write them: 140GB, 80 GiB, 327680, 320KiB. Raises ValueError that says how to write it."""
    found = re.fullmatch(r"\s*([0-9][0-9_.,]*)\s*([kKMGT]?)(i?)B?(/s)?\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 140GB, 80GiB or 327680")
    number = float(found[1].replace("_", "").replace(",", ""))
    step = 1024.0 if found[3] else 1000.0
    return number * step ** " KMGT".index(found[2].upper() or " ")


# --- 1 ---------------------------------------------------------------------------------------------------------------


def parallelism(*, weight_bytes: float, gpu_bytes: float, gpus: int, moe: bool = False,
                micro_batches: int = 8) -> Advice:
    """How many GPUs, and how they share the model. `gpus`: of one node, `gpu_bytes`: of one GPU."""
    most_bytes = FITS * gpu_bytes
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    fitting = next((n for n in sizes if weight_bytes / n < most_bytes), None)
    shard_bytes = weight_bytes / (fitting or gpus)
    why = [f"weights {gb(weight_bytes)}; a GPU may hold {FITS} × {gb(gpu_bytes)} = {gb(most_bytes)} of them"]
    numbers: dict[str, Any] = {"weight_bytes": weight_bytes, "gpu_bytes": gpu_bytes, "gpus": gpus,
                               "weight_bytes_per_gpu": shard_bytes, "tensor_parallel": fitting or gpus,
                               "pipeline_parallel": 1, "bubble": 0.0}
    if fitting == 1:
        why.append(f"{gb(weight_bytes)} < {gb(most_bytes)}: it fits on one GPU; more replicas, not more ranks")
        if weight_bytes > TIGHT * gpu_bytes:
            why.append(f"over {TIGHT} × {gb(gpu_bytes)}: tight; weight-only quantization leaves room for the KV cache")
        decision, answer = "one-gpu", "one GPU, no parallelism"
    elif fitting is not None:
        why.append(f"{gb(weight_bytes)} ÷ {fitting} = {gb(shard_bytes)} a GPU < {gb(most_bytes)}: it fits in the node")
        close = next((n for n in sizes if n < fitting and weight_bytes / n < gpu_bytes), None)
        if close is not None:
            why.append(f"over {close} it would be {gb(weight_bytes / close)} of {gb(gpu_bytes)} each: the weights alone"
                       f" find room, but the {quantity(1 - FITS, 'ratio')} for KV cache and temporaries are gone")
        why.append("all ranks of a group need NVLink or the like between them")
        decision, answer = f"tp{fitting}", f"tensor parallel over {fitting} GPUs of one node (TP{fitting})"
        if fitting < gpus:
            answer += f", {gpus // fitting} replicas on its {gpus} GPUs"
    else:
        nodes = math.floor(weight_bytes / (most_bytes * gpus)) + 1
        bubble = (nodes - 1) / micro_batches
        numbers |= {"pipeline_parallel": nodes, "weight_bytes_per_gpu": weight_bytes / nodes / gpus, "bubble": bubble}
        why.append(f"{gb(weight_bytes)} ÷ {gpus} = {gb(weight_bytes / gpus)} a GPU: one node does not hold it")
        why.append(f"(a) {nodes} nodes: pipeline parallel {nodes}, TP{gpus} in each;"
                   f" bubbles about ({nodes} − 1) ÷ {micro_batches} micro-batches = {quantity(bubble, 'ratio')}")
        fewer = [name for name, part in (("FP8", 0.5), ("INT4", 0.25)) if weight_bytes * part / gpus < most_bytes]
        why.append(f"(b) quantize: {' or '.join(fewer)} fits one node" if fewer else "(b) not even INT4 fits one node")
        decision, answer = f"pp{nodes}-tp{gpus}", f"pipeline parallel over {nodes} nodes, TP{gpus} in each; or quantize"
    if moe:
        why.append("MoE: experts across nodes (they bear a slower link), tensor parallel inside each")
    return Advice("parallelism", decision, answer, why, numbers, ("kv-cache",))


# --- 2 ---------------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: float = 2.0) -> float:
    """Checklist 2: 2 (key and value) × layers × KV heads × head dimension × bytes of a number. All ranks together."""
    return 2.0 * layers * kv_heads * head_dim * dtype_bytes


def kv_cache(*, context_tokens: int, sequences: int, token_bytes: float | None = None, gpu_bytes: float | None = None,
             gpus: int = 1, weight_bytes_per_gpu: float = 0.0, activation_bytes: float = 3e9, graph_bytes: float = 2e9,
             margin_bytes: float | None = None, capacity_tokens: float | None = None) -> Advice:
    """Whether the KV cache holds `sequences` of `context_tokens`. `capacity_tokens`: what a running engine holds.

    `token_bytes`: KV bytes a token, all ranks together. Raises Missing: neither memory nor a capacity is known.
    """
    asked_tokens = float(context_tokens) * sequences
    why: list[str] = []
    numbers: dict[str, Any] = {"context_tokens": context_tokens, "sequences": sequences, "demand_tokens": asked_tokens}
    if token_bytes is not None:
        demand_bytes = token_bytes * asked_tokens
        why.append(f"{token_bytes:,.0f} bytes a token × {context_tokens:,} tokens × {sequences} sequences ="
                   f" {gb(demand_bytes)}")
        numbers |= {"kv_bytes_per_token": token_bytes, "demand_bytes": demand_bytes}
    if capacity_tokens is None:
        if token_bytes is None or gpu_bytes is None:
            raise Missing("it takes --kv-bytes-per-token (or --layers, --kv-heads, --head-dim) and --gpu-memory, or"
                          " --from an engine that tells its KV blocks")
        margin = 0.05 * gpu_bytes if margin_bytes is None else margin_bytes
        per_gpu_bytes = gpu_bytes - weight_bytes_per_gpu - activation_bytes - graph_bytes - margin
        available_bytes = max(0.0, per_gpu_bytes) * gpus
        parts = " − ".join(f"{part / 1e9:.3g}" for part in (gpu_bytes, weight_bytes_per_gpu, activation_bytes,
                                                              graph_bytes, margin))
        why.append(f"a GPU has {parts} = {per_gpu_bytes / 1e9:.3g} GB left (memory − weights − activations − graphs −"
                   f" margin), × {gpus} = {gb(available_bytes)}")
        capacity_tokens = available_bytes / token_bytes
        numbers |= {"available_bytes_per_gpu": per_gpu_bytes, "available_bytes": available_bytes}
    else:
        why.append(f"the engine's KV cache holds {capacity_tokens:,.0f} tokens; {asked_tokens:,.0f} are asked for")
    fits = asked_tokens <= capacity_tokens
    most_sequences = int(capacity_tokens // context_tokens)
    most_context = int(capacity_tokens // sequences)
    numbers |= {"capacity_tokens": capacity_tokens, "fits": fits, "sequences_that_fit": most_sequences,
                "context_tokens_that_fit": most_context, "share_used": asked_tokens / max(1.0, capacity_tokens)}
    if fits:
        used = quantity(asked_tokens / capacity_tokens, "ratio")
        answer = f"fits: {sequences} × {context_tokens:,} tokens take {used} of it; {most_sequences} such would fit"
        return Advice("kv-cache", "fits", answer, why, numbers, ("chunked-prefill", "prefix-caching"))
    why += [f"first choice: at most {most_sequences} sequences of {context_tokens:,} tokens",
            f"second: at most {most_context:,} tokens for {sequences} sequences, if the workload permits",
            f"third: an FP8 or INT8 KV cache, {int(2 * capacity_tokens // context_tokens)} sequences (measure quality)",
            f"last: {asked_tokens / max(1.0, capacity_tokens):.2g} × the KV memory, so more GPUs"]
    answer = f"does not fit: {most_sequences} of {sequences} sequences of {context_tokens:,} tokens do"
    return Advice("kv-cache", "does-not-fit", answer, why, numbers, ("quantization", "parallelism"))


# --- 3 ---------------------------------------------------------------------------------------------------------------


def chunked_prefill(*, decode_step_s: float, prefill_s_per_token: float, itl_target_s: float,
                    knee_tokens: int = CHUNK_START_TOKENS) -> Advice:
    """The chunk size: (ITL target − decode step) ÷ time of a prompt token at most, the efficiency knee at least."""
    left_s = itl_target_s - decode_step_s
    most_tokens = math.floor(left_s / prefill_s_per_token + 1e-6) if left_s > 0 else 0
    numbers = {"decode_step_s": decode_step_s, "prefill_s_per_token": prefill_s_per_token,
               "itl_target_s": itl_target_s, "knee_tokens": knee_tokens, "max_chunk_tokens": most_tokens}
    spent = f"({span(itl_target_s)} − {span(decode_step_s)}) ÷ {span(prefill_s_per_token)} a token"
    why = [f"{spent} = {most_tokens:,} tokens at most"]
    then = ("prefix-caching", "disaggregation")
    if left_s <= 0:
        why.append("a decode step alone breaks the ITL target: no chunk is small enough")
        return Advice("chunked-prefill", "decode-too-slow", "lower the batch (--max-num-seqs), or add replicas", why,
                      numbers, then)
    if most_tokens < knee_tokens:
        why.append(f"under the knee of {knee_tokens} tokens prefill loses throughput to per-step overhead")
        return Advice("chunked-prefill", "below-knee", f"{most_tokens} tokens hold the ITL and cost throughput: a"
                      " smaller batch, or prefill on GPUs of its own", why, numbers, then)
    why += [f"the knee is typically at 256 to 1,024 tokens; from {knee_tokens} to {most_tokens:,} any size works",
            "profile again when concurrency changes: a larger batch has a longer decode step"]
    return Advice("chunked-prefill", "chunk", f"{knee_tokens} to {most_tokens:,} tokens: start at {knee_tokens}, larger"
                  " if prefill throughput matters more than tight ITL", why, numbers, then)


# --- 4 ---------------------------------------------------------------------------------------------------------------

REUSE: Mapping[str, str] = {
    "system-prompt": "system prompts are shared: strong benefit",
    "multi-turn": "conversations: the benefit grows with their turns",
    "rag": "retrieval templates repeat: their part can be cached, the passages cannot",
    "unique": "prompts share nothing: low benefit, memory and hashing for nothing",
}


def prefix_caching(*, reuse: str | None = None, hit_rate: float | None = None, kv_usage: float | None = None,
                   prompt_tokens: float | None = None, prefill_s_per_token: float | None = None) -> Advice:
    """Whether to cache prefixes. `reuse`: one of REUSE; `hit_rate`: as measured. Raises Missing: neither is known."""
    if reuse is None and hit_rate is None:
        raise Missing(f"it takes --reuse ({', '.join(REUSE)}) or a measured --hit-rate, or --from an engine")
    why = [] if reuse is None else [REUSE[reuse]]
    if hit_rate is not None:
        why.append(f"measured: {quantity(hit_rate, 'ratio')} of the tokens looked up were there; under 10 to 15 % it"
                   " does not pay for itself")
        if prompt_tokens and prefill_s_per_token:
            saved_s = hit_rate * prompt_tokens * prefill_s_per_token
            why.append(f"it saves {span(saved_s)} of prefill a request ({prompt_tokens:,.0f} tokens ×"
                       f" {quantity(hit_rate, 'ratio')} × {span(prefill_s_per_token)})")
    if kv_usage is not None and kv_usage >= KV_NEARLY_FULL:
        why.append(f"the KV cache is {quantity(kv_usage, 'ratio')} full: held blocks may cost concurrency; an FP8 KV"
                   " cache helps")
    pays = hit_rate >= PAYS_OFF if hit_rate is not None else reuse != "unique"
    why.append("watch evictions: high churn is a wrong block size or too little memory for the cache")
    numbers = {"reuse": reuse, "hit_rate": hit_rate, "kv_usage": kv_usage}
    if pays:
        return Advice("prefix-caching", "on", "turn it on, and keep sessions on the replica that has their prefix", why,
                      numbers, ("routing",))
    return Advice("prefix-caching", "off", "turn it off: it does not pay for itself", why, numbers, ("routing",))


# --- 5 ---------------------------------------------------------------------------------------------------------------


def transfer(tokens: float, token_bytes: float, link_bytes_per_s: float) -> dict[str, float]:
    """A prompt's KV over a link: KV size ÷ bandwidth. `seed_*`: as the seed counts, 1,280 MiB called 1.28 GB."""
    size = tokens * token_bytes
    seed_gb = size / MIB / 1000
    return {"transfer_bytes": size, "transfer_gib": size / 2**30, "transfer_s": size / link_bytes_per_s,
            "seed_transfer_gb": seed_gb, "seed_transfer_s": seed_gb * 1e9 / link_bytes_per_s}


def disaggregation(*, prompt_tokens: float, token_bytes: float, link_bytes_per_s: float, prefill_s: float,
                   output_tokens: float | None = None, spikes_with_long_prompts: bool | None = None,
                   gpus: int | None = None) -> Advice:
    """Whether prefill and decode get GPUs of their own. `prefill_s`: the prefill that a request would queue behind."""
    moved = transfer(prompt_tokens, token_bytes, link_bytes_per_s)
    numbers: dict[str, Any] = {"prompt_tokens": prompt_tokens, "kv_bytes_per_token": token_bytes,
                               "link_bytes_per_s": link_bytes_per_s, "prefill_s": prefill_s, **moved}
    size = f"{gb(moved['transfer_bytes'])} ({moved['transfer_gib']:.3g} GiB)"
    seed = f"{moved['seed_transfer_gb']:.3g} GB, {moved['seed_transfer_s'] * 1000:.0f} ms"
    link = f"over {gb(link_bytes_per_s)}/s: {span(moved['transfer_s'])}"
    why = [f"{prompt_tokens:,.0f} tokens × {token_bytes:,.0f} bytes = {size}, {link}",
           f"counted as the seed does (MiB ÷ 1,000 as GB): {seed}"]
    if spikes_with_long_prompts is False:
        why.append("ITL does not spike when long prompts come: prefill is not in the way")
        return Advice("disaggregation", "no", "no: chunked prefill is probably enough", why, numbers,
                      ("chunked-prefill",))
    if output_tokens:
        skew = prompt_tokens / output_tokens
        numbers["prompt_per_output"] = skew
        kind = "prefill-heavy" if skew >= 4 else "decode-heavy" if skew <= 0.25 else "balanced: less benefit"
        why.append(f"prompt ÷ answer = {skew:.3g}: {kind}")
    if moved["transfer_s"] >= prefill_s:
        why.append(f"the transfer takes longer than the {span(prefill_s)} of prefill that it avoids")
        return Advice("disaggregation", "no", "no: the transfer costs more than the wait that it saves", why, numbers,
                      ("chunked-prefill",))
    gain = prefill_s / moved["transfer_s"]
    why.append(f"it avoids waiting behind {span(prefill_s)} of prefill: {gain:.2g} × the transfer")
    if gain < LITTLE_GAIN:
        return Advice("disaggregation", "little-gain", "no: little gain for its overhead; keep these prompts colocated",
                      why, numbers, ("chunked-prefill",))
    if gpus is not None and gpus < 4:
        why.append(f"{gpus} GPUs: two pools leave no spare in either; keep a colocated path")
    answer = "worth a trial: a prefill pool, with a colocated path for short prompts"
    if spikes_with_long_prompts is None:
        answer += "; first see whether ITL spikes when long prompts come"
    return Advice("disaggregation", "try", answer, why, numbers, ("autoscaling",))


# --- 6 ---------------------------------------------------------------------------------------------------------------


def quantization(*, weight_bytes: float, gpu_bytes: float, gpus: int, fp8: bool = True, kv_fits: bool | None = None,
                 outlier_ratio: float | None = None, quality_drop: float | None = None) -> Advice:
    """Which quantization. `fp8`: the hardware has it (H100, MI300X and newer); `quality_drop`: measured, 0 to 1.

    `outlier_ratio`: max ÷ mean of a layer's activations, the worst layer (principle 6).
    """
    most_bytes = FITS * gpu_bytes * gpus
    forms = {"bf16": weight_bytes, "fp8": weight_bytes / 2, "int4": weight_bytes / 4}
    sizes = f"BF16 {gb(forms['bf16'])}, FP8 {gb(forms['fp8'])}, INT4 {gb(forms['int4'])}"
    why = [f"weights: {sizes}; {gpus} × {gb(gpu_bytes)} × {FITS} = {gb(most_bytes)} may hold them"]
    numbers: dict[str, Any] = {f"{name}_bytes": size for name, size in forms.items()} | {
        "most_weight_bytes": most_bytes, "quality_drop": quality_drop, "outlier_ratio": outlier_ratio}
    then = ("parallelism", "kv-cache")
    if quality_drop is not None and quality_drop >= 0.01:
        why.append(f"measured {quantity(quality_drop, 'ratio')} lost on your own task; under 1 point may ship"
                   " (principle 11)")
        return Advice("quantization", "do-not-ship", "do not ship this form: it loses too much on your task", why,
                      numbers, then)
    if forms["bf16"] < most_bytes and kv_fits is not False:
        why.append("BF16 fits" + ("" if kv_fits is None else " and leaves the KV cache its room"))
        return Advice("quantization", "skip", "none: BF16 fits", why, numbers, ())
    weight_only = outlier_ratio is not None and outlier_ratio > OUTLIERS
    if weight_only:
        why.append(f"activations reach {outlier_ratio:.0f} × their mean (over {OUTLIERS:.0f}: many outliers): only"
                   " weights")
    always = "measure on your own task before and after, and see that kernels exist for your shapes"
    if fp8 and not weight_only and forms["fp8"] < most_bytes:
        why += ["FP8 first: the least loss (under 0.5 % on most tasks), often one flag", always]
        return Advice("quantization", "fp8", "FP8", why, numbers, then)
    if forms["int4"] < most_bytes:
        why += ["GPTQ or AWQ: weights alone, calibrated offline; the loss depends on the task", always]
        return Advice("quantization", "weight-only", "weight-only INT8 or INT4 (GPTQ, AWQ)", why, numbers, then)
    why.append("not even INT4 weights fit: more GPUs")
    return Advice("quantization", "more-gpus", "more GPUs: no quantization is enough", why, numbers, then)


# --- 7 ---------------------------------------------------------------------------------------------------------------


def speculative(*, batch: float | None = None, acceptance: float | None = None, prompt_tokens: float | None = None,
                output_tokens: float | None = None, draft_bytes: float | None = None, free_bytes: float | None = None,
                draft_tokens: int | None = None, grammar: bool = False) -> Advice:
    """Whether to speculate. `batch`: sequences at once. Raises Missing: neither batch nor acceptance is known."""
    if batch is None and acceptance is None:
        raise Missing("it takes --batch or a measured --acceptance, or --from an engine")
    why: list[str] = []
    against: list[str] = []
    doubts: list[str] = []
    if acceptance is not None:
        said = f"{quantity(acceptance, 'ratio')} of the drafted tokens are accepted"
        if acceptance < ACCEPTED_ENOUGH:
            against.append(f"{said}: under {quantity(ACCEPTED_ENOUGH, 'ratio')} it wastes compute")
        elif acceptance <= ACCEPTED_WELL:
            doubts.append(f"{said}: {quantity(ACCEPTED_WELL, 'ratio')} or less is marginal, profile it")
        else:
            why.append(f"{said}: likely beneficial")
        if draft_tokens and acceptance < 1:
            gained = (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)  # Leviathan et al. 2023, eq. 1
            why.append(f"{draft_tokens} drafted tokens give {gained:.2g} tokens a step on average")
    if batch is not None:
        said = f"batch {batch:.3g}"
        if batch > BATCH_LOSS:
            against.append(f"{said}: over {BATCH_LOSS} it is a net loss, the GPU computes at its limit already")
        elif batch > BATCH_GOLDEN:
            doubts.append(f"{said}: over {BATCH_GOLDEN} it gains less, {BATCH_EVEN} is about break-even")
        else:
            why.append(f"{said}: at {BATCH_GOLDEN} or fewer the GPU has compute to spare")
    if draft_bytes is not None and free_bytes is not None and draft_bytes > free_bytes:
        against.append(f"the draft's {gb(draft_bytes)} do not fit the {gb(free_bytes)} left: it would evict KV cache;"
                       " take a smaller draft, Medusa heads or EAGLE")
    if prompt_tokens and output_tokens and prompt_tokens > 4 * output_tokens:
        doubts.append(f"long prompts ({prompt_tokens:,.0f} tokens), short answers ({output_tokens:,.0f}): most time is"
                      " prefill")
    if grammar:
        doubts.append("grammars: see that their state reaches the draft, else few tokens are accepted")
    numbers = {"batch": batch, "acceptance": acceptance, "draft_bytes": draft_bytes, "free_bytes": free_bytes}
    decision, answer = ("off", "turn it off") if against else (
        ("profile", "marginal: profile it on your own traffic") if doubts else ("on", "turn it on"))
    return Advice("speculative", decision, answer, [*against, *doubts, *why], numbers, ("kv-cache",))


# --- 8 ---------------------------------------------------------------------------------------------------------------


def routing(*, replicas: int, prefix_reuse: bool = False, adapters: bool = False, uniform_cost: bool = False,
            telemetry_age_s: float = 0.0, prefill_saved_s: float | None = None,
            longer_wait_s: float | None = None) -> Advice:
    """How to spread requests. `prefill_saved_s`: by a cache hit; `longer_wait_s`: at the replica that has it."""
    numbers = {"replicas": replicas, "prefill_saved_s": prefill_saved_s, "longer_wait_s": longer_wait_s,
               "telemetry_age_s": telemetry_age_s}
    if replicas < 2:
        return Advice("routing", "none", "nothing to decide: one replica", ["one replica"], numbers)
    terms = ["queue depth or estimated wait"]
    why = [f"{replicas} replicas"]
    if not prefix_reuse and not adapters:
        decision = "least-connections" if uniform_cost else "least-estimated-work"
        why.append("no prefixes or adapters to keep together; " + (
            "requests cost the same" if uniform_cost else "costs differ: estimate prompt + expected answer length"))
        answer = decision.replace("-", " ")
    else:
        decision = "hybrid"
        terms += ["prefix-cache hit that can be expected"] * prefix_reuse
        terms += ["adapter already loaded, else the most free adapter slots"] * adapters
        answer = f"a cost of {', '.join(terms)}"
    if prefix_reuse and prefill_saved_s is not None and longer_wait_s is not None:
        worth = prefill_saved_s > longer_wait_s + telemetry_age_s
        why.append(f"a hit saves {span(prefill_saved_s)}, the queue there is {span(longer_wait_s)} longer and known"
                   f" {span(telemetry_age_s)} ago: {'go there' if worth else 'go elsewhere'}")
        numbers["go_to_the_hit"] = worth
    why += ["a penalty that grows with the age of what is known of a replica",
            "where the chosen one refuses, the next best"]
    return Advice("routing", decision, answer, why, numbers, ("autoscaling",))


# --- 9 ---------------------------------------------------------------------------------------------------------------


def autoscaling(*, startup_s: float, spike_per_s: float | None = None, replica_per_s: float | None = None,
                queue_age_s: float | None = None, intervals: int = 3, cold_start_ok: bool = False) -> Advice:
    """When to scale, and how many stand ready. `startup_s`: image + weights + graphs + warm-up + health, end to end.

    `spike_per_s`: requests at a spike's height, all that come; `replica_per_s`: the most that one
    finishes. `queue_age_s`: now, at one look: a spike of one asks for nothing. Raises Missing: a spike alone.
    """
    if spike_per_s is not None and not replica_per_s:
        raise Missing("it takes --per-replica beside --spike, or --from an engine that was seen for a minute in which"
                      " requests waited (at an address: --watch-for 75s): what one finishes that could do more is not"
                      " its most")
    why = [f"a replica takes {span(startup_s)} to start: no reaction is faster"]
    numbers: dict[str, Any] = {"startup_s": startup_s, "scale_out_queue_age_s": OUT_S,
                               "scale_in_queue_age_s": IN_S, "scale_in_for_s": IN_FOR_S,
                               "intervals": intervals, "min_replicas": 0 if cold_start_ok else 1, "warm_pool": None}
    warm = ""
    if spike_per_s is not None and replica_per_s:
        pool = math.ceil(spike_per_s / replica_per_s - 1e-9)
        numbers |= {"warm_pool": pool, "spike_per_s": spike_per_s, "replica_per_s": replica_per_s}
        why.append(f"a spike shorter than a start must meet a warm pool: {spike_per_s:.3g} requests/s at its height ÷"
                   f" {replica_per_s:.3g} of a replica = {pool} in all")
        warm = f", {pool} warm"
    out, back = f"over {span(OUT_S)}", f"under {span(IN_S)} for {span(IN_FOR_S)}"
    by = f"queue age {out}, TTFT rising or more waiting than free KV slots"
    why += [f"out: {by}, in {intervals} intervals in a row; never by GPU utilization, it trails",
            f"in: queue age {back}; in doubt slower: each flap costs a start",
            "down to none: every first user waits for a start" if cold_start_ok else "never down to none"]
    now = ""
    if queue_age_s is not None:
        numbers["queue_age_s"] = queue_age_s
        state = "out, if it lasts" if queue_age_s > OUT_S else "in, if it lasts" if queue_age_s < IN_S else "as it is"
        now = f"; now {span(queue_age_s)}: {state}"
    return Advice("autoscaling", "scale-on-queue-age", f"by queue age: out {out}, in {back}{warm}{now}", why, numbers)


CHECKLISTS = ("parallelism", "kv-cache", "chunked-prefill", "prefix-caching", "disaggregation", "quantization",
              "speculative", "routing", "autoscaling")
