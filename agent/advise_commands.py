"""`tocsin advise CHECKLIST`: the decision checklists, from given numbers and from an engine that runs.

What is given counts; what is not is taken from the engine that `--from` names, where it tells it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from agent import advise
from agent.advise import Advice, Missing, size_bytes
from agent.show import Report, show

USAGE, UNKNOWN = 2, 3

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# What stands for one value on the command line, and how it is read.


def _size(text: str) -> float:
    try:
        return size_bytes(text)
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from fault


def _seconds(text: str) -> float:
    """Seconds; finer than the configuration's durations: 0.035ms is what a prompt token takes."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit():
            return float(number) * size
    raise typer.BadParameter(f"{text!r} is not a time; write 45ms, 0.035ms, 2s or 5m")


def _share(text: str) -> float:
    number = text.removesuffix("%")
    if not number.replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{text!r} is not a share; write 70% or 0.7")
    found = float(number) / (100.0 if number != text else 1.0)
    if found > 1:
        raise typer.BadParameter(f"{text} is over 1; write {text}% or {found / 100:g}")
    return found


def _option(name: str, help_: str, read: Callable[[str], float] | None = None, metavar: str | None = None) -> Any:
    return typer.Option(name, help=help_) if read is None else typer.Option(
        name, help=help_, parser=read, metavar=metavar)


Size = float | None
Time = float | None
Share = float | None
From = Annotated[str | None, typer.Option("--from", metavar="ENGINE", help=(
    "Take what is not given from this engine: its address, or its name as the running agent has it."))]
Watch = Annotated[str, typer.Option("--watch-for", metavar="SPAN", help="How long to read the engine at an address.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]
Weights = Annotated[Size, _option("--weights", "All weights, as 140GB.", _size, "SIZE")]
GpuMemory = Annotated[Size, _option("--gpu-memory", "Memory of one GPU, as 80GB.", _size, "SIZE")]
Gpus = Annotated[int | None, _option("--gpus", "GPUs of one node.")]
KvBytes = Annotated[Size, _option("--kv-bytes-per-token", "KV bytes of one token over all ranks, as 327680 or 320KiB.",
                                  _size, "SIZE")]
Layers = Annotated[int | None, _option("--layers", "Layers of the model.")]
KvHeads = Annotated[int | None, _option("--kv-heads", "KV heads of a layer.")]
HeadDim = Annotated[int | None, _option("--head-dim", "Numbers in a head.")]
KvDtype = Annotated[float, _option("--kv-dtype-bytes", "Bytes of a number in the KV cache: 2 is BF16, 1 FP8.")]
PromptTokens = Annotated[float | None, _option("--prompt-tokens", "Tokens of a prompt.")]
OutputTokens = Annotated[float | None, _option("--output-tokens", "Tokens of an answer.")]
PerToken = Annotated[Time, _option("--prefill-per-token", "Time of one prompt token, as 0.035ms.", _seconds, "TIME")]
HitRate = Annotated[Share, _option("--hit-rate", "Prefix-cache hits per token looked up, as 61%.", _share, "SHARE")]


@app.callback()
def remember_config(context: typer.Context, config: ConfigFile = None) -> None:
    """Decide by the nine decision checklists, from given numbers or a running engine (--from)."""
    if config is not None:
        context.find_root().obj = config


class Engine(NamedTuple):
    """What `--from` told, and by whom. Without it nothing is told."""

    name: str
    facts: Mapping[str, float | None]


class Asked(NamedTuple):
    """What every checklist is asked with."""

    engine: str | None
    watch_for: str
    config: Path | None
    as_json: bool


def _fail(text: str, code: int = UNKNOWN) -> NoReturn:
    """A sentence on stderr, and exit 3: the engine is not there, or nobody can tell; 2 where it was asked wrongly."""
    typer.echo(f"tocsin advise: {text}", err=True)
    raise typer.Exit(code)


def engine_of(context: typer.Context, asked: Asked) -> Engine:
    """The facts of the engine that a person named; where it is not there it says so and exits 3."""
    word = asked.engine
    if word is None:
        return Engine("", {})
    is_address = "://" in word or word.rpartition(":")[2].isdigit()
    answer = _answer(context, asked, word if is_address else None)
    known = {engine: facts for target in answer["targets"] for engine, facts in (target.get("facts") or {}).items()}
    name = next(iter(known), "") if is_address else word
    errors = [target["error"] for target in answer["targets"] if target.get("error")
              and (is_address or name in (target.get("facts") or ()))]
    if errors:
        _fail(f"{word}: {errors[0]}")
    if name not in known:
        _fail(f"no engine is called {word!r}; there are: {', '.join(known) or 'none'}")
    return Engine(name, known[name] | ({} if is_address else {"replicas": float(len(answer["targets"]))}))


def _answer(context: typer.Context, asked: Asked, address: str | None) -> Any:
    """What `doctor` says: of an address by looking, else the running agent's."""
    from agent.client import AgentError, NotPermitted, NotRunning, ask
    from agent.config import ConfigErrors, load_config
    from agent.strict import Unfit, duration_s

    try:
        settings = load_config(asked.config or context.find_root().obj, os.environ)
        if address is None:
            return ask(settings.socket, "/doctor")
        from agent.oneshot import doctor
        from agent.progress import Progress, in_order

        with in_order(), Progress() as progress:
            return doctor(settings, [address], progress, max(1, ceil(duration_s(asked.watch_for))))
    except (ConfigErrors, Unfit) as fault:
        _fail(str(fault), USAGE)
    except (AgentError, NotPermitted, NotRunning) as absent:
        _fail(f"{absent}; or name the engine by its address: --from http://127.0.0.1:8000")


def decide(context: typer.Context, checklist: Callable[..., Advice], given: Mapping[str, Any], asked: Asked,
           of: Engine | None = None) -> None:
    """Fill in what is not given, decide, print."""
    of = engine_of(context, asked) if of is None else of
    wanted = inspect.signature(checklist).parameters
    taken: dict[str, Any] = {name: value for name in wanted if given.get(name) is None
                             and (value := of.facts.get(name)) is not None and (value > 0 or name not in OVER_0)}
    taken = {name: int(value) if name in COUNTS else value for name, value in taken.items()}
    inputs = {name: value for name, value in given.items() if value is not None} | taken
    lacking = [OPTIONS.get(name, f"--{name.replace('_', '-')}") for name, one in wanted.items()
               if one.default is one.empty and name not in inputs]
    for name in OVER_0.intersection(inputs):
        if inputs[name] <= 0:
            _fail(f"{OPTIONS.get(name, '--' + name.replace('_', '-'))} must be over 0", USAGE)
    if lacking:
        why = f"; {of.name} does not tell it" if of.name else ", or --from an engine that tells it"
        _fail(f"it takes {', '.join(lacking)}{why}", USAGE)
    try:
        found = checklist(**inputs)
    except Missing as fault:
        _fail(str(fault), USAGE)
    if asked.as_json:
        import msgspec

        answer = asdict(found) | {"from": of.name or None, "taken": taken}
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return
    show(report(found, of.name, taken), sys.stdout)


def report(found: Advice, engine: str, taken: Mapping[str, Any]) -> Report:
    """The decision, then its reasons, then what the engine told."""
    lines: Report = [f"{found.checklist}: {found.answer}", *(f"  {n}. {why}" for n, why in enumerate(found.why, 1))]
    lines += [f"From {engine}: {advise.shown(name, value)} ({advise.TOLD[name]})" for name, value in taken.items()]
    if found.then:
        lines.append(f"Next: {', '.join(f'tocsin advise {name}' for name in found.then)}")
    return [*lines, f"The checklist: runbooks/checklists/{found.checklist}.md"]


OVER_0 = frozenset({"context_tokens", "sequences", "gpus", "gpu_bytes", "weight_bytes", "token_bytes", "micro_batches",
                    "prefill_s_per_token", "link_bytes_per_s", "prompt_tokens", "batch"})  # what is divided by
COUNTS = frozenset({"sequences", "gpus", "replicas"})  # an engine tells them as any number
OPTIONS: Mapping[str, str] = {
    "weight_bytes": "--weights", "gpu_bytes": "--gpu-memory", "token_bytes": "--kv-bytes-per-token",
    "context_tokens": "--context", "itl_target_s": "--itl", "decode_step_s": "--decode-step",
    "prefill_s_per_token": "--prefill-per-token", "link_bytes_per_s": "--link", "prefill_s": "--prefill",
    "startup_s": "--startup",
}


def _token_bytes(given: float | None, layers: int | None, kv_heads: int | None, head_dim: int | None,
                 dtype_bytes: float) -> float | None:
    if given is None and layers and kv_heads and head_dim:
        return advise.kv_bytes_per_token(layers, kv_heads, head_dim, dtype_bytes)
    return given


@app.command("parallelism")
def parallelism(context: typer.Context, weights: Weights = None, gpu_memory: GpuMemory = None, gpus: Gpus = None,
                moe: Annotated[bool, _option("--moe", "Mixture of experts.")] = False,
                micro_batches: Annotated[int, _option("--micro-batches", "Of a pipeline.")] = 8,
                engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                as_json: AsJson = False) -> None:
    """How many GPUs, and how they share a model (checklist 1)."""
    given = {"weight_bytes": weights, "gpu_bytes": gpu_memory, "gpus": gpus, "moe": moe,
             "micro_batches": micro_batches}
    decide(context, advise.parallelism, given, Asked(engine, watch_for, config, as_json))


@app.command("kv-cache")
def kv_cache(context: typer.Context,
             at_length: Annotated[int | None, _option("--context", "Tokens of a sequence, prompt and answer.")] = None,
             sequences: Annotated[int | None, _option("--sequences", "Sequences at once.")] = None,
             kv_bytes: KvBytes = None, layers: Layers = None, kv_heads: KvHeads = None, head_dim: HeadDim = None,
             kv_dtype_bytes: KvDtype = 2.0, gpu_memory: GpuMemory = None, gpus: Gpus = None,
             shard: Annotated[Size, _option("--weights-per-gpu", "Weights on one GPU, as 35GB.", _size, "SIZE")] = None,
             activations: Annotated[Size, _option("--activations", "On one GPU [3GB].", _size, "SIZE")] = None,
             graphs: Annotated[Size, _option("--graphs", "CUDA graphs on one GPU [2GB].", _size, "SIZE")] = None,
             margin: Annotated[Size, _option("--margin", "On one GPU [5 % of it].", _size, "SIZE")] = None,
             engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
             as_json: AsJson = False) -> None:
    """How many sequences the KV cache holds (checklist 2)."""
    given = {"context_tokens": at_length, "sequences": sequences, "gpu_bytes": gpu_memory, "gpus": gpus,
             "token_bytes": _token_bytes(kv_bytes, layers, kv_heads, head_dim, kv_dtype_bytes),
             "weight_bytes_per_gpu": shard, "activation_bytes": activations, "graph_bytes": graphs,
             "margin_bytes": margin}
    decide(context, advise.kv_cache, given, Asked(engine, watch_for, config, as_json))


@app.command("chunked-prefill")
def chunked_prefill(context: typer.Context,
                    decode_step: Annotated[Time, _option("--decode-step", "At the target batch, as 45ms.", _seconds,
                                                         "TIME")] = None,
                    prefill_per_token: PerToken = None,
                    itl: Annotated[Time, _option("--itl", "ITL target, as 150ms.", _seconds, "TIME")] = None,
                    knee: Annotated[int, _option("--knee", "Tokens from which prefill is efficient.")] = 512,
                    engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                    as_json: AsJson = False) -> None:
    """The chunk size of chunked prefill (checklist 3)."""
    given = {"decode_step_s": decode_step, "prefill_s_per_token": prefill_per_token, "itl_target_s": itl,
             "knee_tokens": knee}
    decide(context, advise.chunked_prefill, given, Asked(engine, watch_for, config, as_json))


@app.command("prefix-caching")
def prefix_caching(context: typer.Context,
                   reuse: Annotated[str | None, _option("--reuse", f"One of {', '.join(advise.REUSE)}.")] = None,
                   hit_rate: HitRate = None,
                   kv_usage: Annotated[Share, _option("--kv-usage", "KV cache used, as 90%.", _share, "SHARE")] = None,
                   prompt_tokens: PromptTokens = None, prefill_per_token: PerToken = None,
                   engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                   as_json: AsJson = False) -> None:
    """Whether to cache prefixes (checklist 4)."""
    if reuse is not None and reuse not in advise.REUSE:
        raise typer.BadParameter(f"{reuse!r} is none of {', '.join(advise.REUSE)}", param_hint="--reuse")
    given = {"reuse": reuse, "hit_rate": hit_rate, "kv_usage": kv_usage, "prompt_tokens": prompt_tokens,
             "prefill_s_per_token": prefill_per_token}
    decide(context, advise.prefix_caching, given, Asked(engine, watch_for, config, as_json))


@app.command("disaggregation")
def disaggregation(context: typer.Context, prompt_tokens: PromptTokens = None, output_tokens: OutputTokens = None,
                   kv_bytes: KvBytes = None, layers: Layers = None, kv_heads: KvHeads = None,
                   head_dim: HeadDim = None, kv_dtype_bytes: KvDtype = 2.0,
                   link: Annotated[Size, _option("--link", "Bandwidth between the pools, as 25GB/s.", _size,
                                                 "SIZE")] = None,
                   prefill: Annotated[Time, _option("--prefill", "Prefill that a request queues behind, as 2s.",
                                                    _seconds, "TIME")] = None,
                   spikes: Annotated[bool | None, typer.Option(
                       "--spikes/--no-spikes", help="Whether ITL spikes when long prompts come.")] = None,
                   gpus: Gpus = None, engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                   as_json: AsJson = False) -> None:
    """Whether to split prefill from decode (checklist 5)."""
    given = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "link_bytes_per_s": link,
             "token_bytes": _token_bytes(kv_bytes, layers, kv_heads, head_dim, kv_dtype_bytes), "prefill_s": prefill,
             "spikes_with_long_prompts": spikes, "gpus": gpus}
    decide(context, advise.disaggregation, given, Asked(engine, watch_for, config, as_json))


@app.command("quantization")
def quantization(context: typer.Context, weights: Weights = None, gpu_memory: GpuMemory = None, gpus: Gpus = None,
                 fp8: Annotated[bool, typer.Option("--fp8/--no-fp8", help="Whether the hardware has FP8.")] = True,
                 kv_fits: Annotated[bool | None, typer.Option("--kv-fits/--kv-does-not-fit",
                                                              help="What checklist 2 said of BF16.")] = None,
                 outliers: Annotated[float | None, _option("--outliers", "Max ÷ mean of activations.")] = None,
                 quality_drop: Annotated[Share, _option("--quality-drop", "Lost on your own task, as 0.4%.", _share,
                                                        "SHARE")] = None,
                 engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                 as_json: AsJson = False) -> None:
    """Which quantization, if any (checklist 6)."""
    given = {"weight_bytes": weights, "gpu_bytes": gpu_memory, "gpus": gpus, "fp8": fp8, "kv_fits": kv_fits,
             "outlier_ratio": outliers, "quality_drop": quality_drop}
    decide(context, advise.quantization, given, Asked(engine, watch_for, config, as_json))


@app.command("speculative")
def speculative(context: typer.Context,
                batch: Annotated[float | None, _option("--batch", "Sequences at once.")] = None,
                acceptance: Annotated[Share, _option("--acceptance", "Accepted per drafted token, as 72%.", _share,
                                                     "SHARE")] = None,
                prompt_tokens: PromptTokens = None, output_tokens: OutputTokens = None,
                draft: Annotated[Size, _option("--draft", "Weights and KV of the draft model.", _size, "SIZE")] = None,
                free: Annotated[Size, _option("--free", "Memory left for it.", _size, "SIZE")] = None,
                draft_tokens: Annotated[int | None, _option("--draft-tokens", "Tokens drafted a step.")] = None,
                grammar: Annotated[bool, _option("--grammar", "Structured output is used.")] = False,
                engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                as_json: AsJson = False) -> None:
    """Whether to decode speculatively (checklist 7)."""
    asked = Asked(engine, watch_for, config, as_json)
    of = engine_of(context, asked)
    given = {"batch": of.facts.get("running") if batch is None else batch, "acceptance": acceptance,
             "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "draft_bytes": draft, "free_bytes": free,
             "draft_tokens": draft_tokens, "grammar": grammar}
    decide(context, advise.speculative, given, asked, of)


@app.command("routing")
def routing(context: typer.Context,
            replicas: Annotated[int | None, _option("--replicas", "Replicas behind the router.")] = None,
            prefixes: Annotated[bool, _option("--prefixes", "Requests share prefixes.")] = False,
            adapters: Annotated[bool, _option("--adapters", "LoRA adapters are used.")] = False,
            uniform: Annotated[bool, _option("--uniform", "Requests cost about the same.")] = False,
            age: Annotated[Time, _option("--telemetry-age", "Age of what the router knows.", _seconds, "TIME")] = None,
            saved: Annotated[Time, _option("--prefill-saved", "By a cache hit, as 500ms.", _seconds, "TIME")] = None,
            longer: Annotated[Time, _option("--longer-wait", "At the replica that has it.", _seconds, "TIME")] = None,
            engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
            as_json: AsJson = False) -> None:
    """How to spread requests over replicas (checklist 8)."""
    asked = Asked(engine, watch_for, config, as_json)
    of = engine_of(context, asked)
    hit_rate = of.facts.get("hit_rate")
    given = {"replicas": replicas, "adapters": adapters, "uniform_cost": uniform,
             "prefix_reuse": prefixes or (hit_rate is not None and hit_rate >= advise.PAYS_OFF),
             "telemetry_age_s": age, "prefill_saved_s": saved, "longer_wait_s": longer}
    decide(context, advise.routing, given, asked, of)


@app.command("autoscaling")
def autoscaling(context: typer.Context,
                startup: Annotated[Time, _option("--startup", "End to end, as 5m.", _seconds,
                                                 "TIME")] = None,
                spike: Annotated[float | None, _option("--spike", "Requests/s at a spike's height, in all.")] = None,
                replica: Annotated[float | None, _option("--per-replica", "Requests/s of one at its most.")] = None,
                intervals: Annotated[int, _option("--intervals", "In a row, before scaling out.")] = 3,
                cold_start_ok: Annotated[bool, _option("--cold-start-ok", "Users may wait for a start.")] = False,
                engine: From = None, watch_for: Watch = "10s", config: ConfigFile = None,
                as_json: AsJson = False) -> None:
    """When to scale, and how many stand ready (checklist 9)."""
    given = {"startup_s": startup, "spike_per_s": spike, "replica_per_s": replica, "intervals": intervals,
             "cold_start_ok": cold_start_ok}
    decide(context, advise.autoscaling, given, Asked(engine, watch_for, config, as_json))
