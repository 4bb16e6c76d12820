"""What binds an engine: which limit sets its pace now, the number that shows it, the knob to turn, what will not help.

`look` takes the numbers of the last minute from a scene, `judge` decides by the table ORDER: the first row that holds.
Pure. What no number shows is "cannot-tell", with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from agent.model import GpuFacts, Sample
from agent.signals import HW_POWER_BRAKE, HW_THERMAL, Scene, Target
from agent.words import quantity, span

WINDOW_S = 60.0
KV_FULL = 0.85  # checklist 10, row 2 of the seeds: over it a newcomer finds no room
KV_LOW = 0.5
HALF = 0.5
MOST = 0.8  # of the reads
MOST_FIT = 1e9  # requests; no engine runs so many
LEAST_INSIDE = 0.5  # requests in it on average: under that it mostly does nothing
LEAST_READS = 2  # one read shows no rate, and no standing still

By = Literal["kv-bound", "sequence-cap", "prefill-bound", "decode-bound", "upstream", "hardware-bound", "idle",
             "cannot-tell"]
NAMES: Mapping[By, str] = {
    "kv-bound": "KV-bound", "sequence-cap": "sequence cap", "prefill-bound": "prefill-bound",
    "decode-bound": "decode-bound", "upstream": "upstream", "hardware-bound": "hardware-bound", "idle": "idle",
    "cannot-tell": "cannot tell",
}


class Flags(NamedTuple):
    """What an engine calls its three knobs."""

    sequences: str
    kv: str
    chunk: str


# As each engine's own help has them. Of others, and of Dynamo's workers, which are any engine's, ANY says it in words.
FLAGS: Mapping[str, Flags] = {
    "vllm": Flags("--max-num-seqs", "--gpu-memory-utilization (or --kv-cache-dtype fp8, once evaluated)",
                  "--max-num-batched-tokens"),
    "sglang": Flags("--max-running-requests", "--mem-fraction-static", "--chunked-prefill-size"),
    "trtllm-serve": Flags("--max_batch_size", "--kv_cache_free_gpu_memory_fraction", "--max_num_tokens"),
    "tgi": Flags("number of sequences at once (by --max-batch-total-tokens)",  # --max-batch-size is not for GPUs
                 "--max-batch-total-tokens", "--max-batch-prefill-tokens"),
    "llamacpp": Flags("--parallel", "--ctx-size", "--batch-size"),  # --ubatch-size splits it, and delays nobody more
    "lmdeploy": Flags("--max-batch-size", "--cache-max-entry-count", "--max-prefill-token-num"),
    "ray-serve-llm": Flags("max_num_seqs (engine_kwargs)", "gpu_memory_utilization (engine_kwargs)",
                           "max_num_batched_tokens (engine_kwargs)"),
}
ANY = Flags("number of sequences at once", "a larger KV cache", "size of a prefill chunk")


class GpuSeen(NamedTuple):
    """One GPU of an engine. `held`: share of the window's reads in which hardware slowed it, for heat or power."""

    number: int
    held: float
    by: str
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    temp_c: float | None = None
    util: float | None = None  # mean over the window


class Read(NamedTuple):
    """One read of an engine's page: requests, and the share of KV blocks in use (None: it is not told)."""

    running: float
    waiting: float
    kv: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine over the last `window_s` seconds. Increases are of this window; None: the engine does not tell it.

    `peak`: the most requests that were ever seen running. `trouble`: why it cannot be judged at all.
    """

    engine: str
    kind: str = "unknown"
    window_s: float = WINDOW_S
    reads: Sequence[Read] = ()
    peak: float = 0.0
    preemptions: float | None = None
    ttft_s: float | None = None  # seconds that requests spent until their first token, added
    ttft_n: float | None = None
    itl_s: float | None = None  # seconds that requests spent between tokens, added
    itl_n: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    kv_tokens: float | None = None  # what the KV cache holds
    router_queue: float | None = None  # requests that wait in a router before this engine
    gpus: Sequence[GpuSeen] = ()
    asleep: bool = False
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """The verdict on one engine: `by` is stable, for scripts; the sentences are for people. `knob` "": none helps."""

    engine: str
    by: By
    why: str
    knob: str = ""
    no_help: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it."""
        return NAMES[self.by]


def judge(seen: Seen) -> Bound:
    """The first row of ORDER that holds; none does: cannot tell."""
    for test in ORDER:
        found = test(seen)
        if found is not None:
            return found
    running, waiting = _mean(seen, "running"), _mean(seen, "waiting")
    return _cannot(seen, f"{running:.3g} run and {waiting:.3g} wait, and it tells neither first tokens nor gaps")


# --- the rows, in the order in which they are asked ------------------------------------------------------------------


def _blind(seen: Seen) -> Bound | None:
    """Nothing to judge by."""
    if seen.asleep:
        return Bound(seen.engine, "idle", "it is asleep")
    if seen.trouble is not None:
        return _cannot(seen, seen.trouble)
    if len(seen.reads) < LEAST_READS:
        return _cannot(seen, f"{len(seen.reads)} read{'s' * (len(seen.reads) != 1)} so far, it takes {LEAST_READS}")
    return None


def _hardware(seen: Seen) -> Bound | None:
    """Work runs on a GPU that its hardware slows down: that GPU paces all ranks."""
    if not any(read.running > 0 for read in seen.reads):
        return None
    held = max(seen.gpus, key=lambda gpu: gpu.held, default=None)
    if held is None or held.held < HALF:
        return None
    clock = "" if held.clock_mhz is None or not held.clock_max_mhz else \
        f", SM clock {held.clock_mhz:.0f} of {held.clock_max_mhz:.0f} MHz"
    heat = "" if held.temp_c is None else f", {held.temp_c:.0f} °C"
    others = " and paces every rank with it" if len(seen.gpus) > 1 else ""
    return Bound(
        seen.engine, "hardware-bound",
        f"GPU {held.number} was slowed by {held.by} in {quantity(held.held, 'ratio')} of the last"
        f" {span(round(seen.window_s))}{heat}{clock}{others}",
        "", "any flag of the engine: cool or feed that GPU, or move its load",
        {"gpu": held.number, "held": held.held, "by": held.by, "sm_clock_mhz": held.clock_mhz, "temp_c": held.temp_c})


def _idle(seen: Seen) -> Bound | None:
    """Nothing ran and nothing waited, and no token came."""
    if any(read.running or read.waiting for read in seen.reads) or (seen.generation_tokens or 0.0) > 0:
        return None
    if seen.router_queue:
        return None
    return Bound(seen.engine, "idle", f"nothing ran or waited in the last {span(round(seen.window_s))}")


def _stands(seen: Seen) -> Bound | None:
    """It has work and does none: no limit explains that."""
    if all(read.running <= 0 < read.waiting for read in seen.reads):
        return _cannot(seen, f"{seen.reads[-1].waiting:.0f} wait and none runs; see engine-stuck")
    told = (seen.generation_tokens, seen.prompt_tokens, seen.ttft_n, seen.itl_n)
    if all(read.running > 0 for read in seen.reads) and any(n is not None for n in told) and not any(told):
        return _cannot(seen, f"{seen.reads[-1].running:.0f} run and no token came in {span(round(seen.window_s))};"
                             " a long prompt, or see engine-stuck")
    return None


def _kv(seen: Seen) -> Bound | None:
    """The cache is full while somebody waits for room, or was thrown out."""
    kv = max((read.kv for read in seen.reads if read.kv is not None), default=None)
    queued = [read.kv for read in seen.reads if read.waiting > 0 and read.kv is not None]
    waits = bool(queued) and max(queued) >= KV_FULL
    if kv is None or not (waits or seen.preemptions):
        return None
    said = f"KV cache {quantity(kv, 'ratio')} full" + (f", {_most(seen, 'waiting'):.0f} wait" if waits else "")
    if seen.preemptions:  # vLLM counts one at its victim's next output, when the cache may be empty again
        said += f", {seen.preemptions:.0f} preempted in {span(round(seen.window_s))}"
    fits = concurrency_that_fits(seen)
    flags = FLAGS.get(seen.kind, ANY)
    room = "" if fits is None else f" (at this length {fits} fit under {quantity(KV_FULL, 'ratio')})"
    return Bound(
        seen.engine, "kv-bound", said + room,
        f"more KV blocks: {flags.kv}; until then fewer requests at once",
        f"a larger {flags.sequences} (it buys preemptions), a larger chunk",
        {"kv_usage": kv, "waiting": _most(seen, "waiting"), "preemptions": seen.preemptions, "fits": fits})


def _sequences(seen: Seen) -> Bound | None:
    """Requests wait though the cache has room, and as many run as ever ran: the seats are taken.

    In a read between the end of one request and the next step a seat is free: the same in most reads is enough.
    """
    queued, seat = _queued(seen), seen.peak
    taken = sum(read.running >= seat for read in queued)
    if not queued or seat <= 0 or taken < MOST * len(queued):
        return None
    kv = max((read.kv for read in queued if read.kv is not None), default=None)
    flags = FLAGS.get(seen.kind, ANY)
    fits = concurrency_that_fits(seen)
    room = "" if kv is None else f" while the KV cache is {quantity(kv, 'ratio')} full"
    upto = "" if fits is None or fits <= seat else f" (up to {fits}: at this length so many fit in the KV cache)"
    return Bound(
        seen.engine, "sequence-cap",
        f"{queued[-1].waiting:.0f} wait and exactly {seat:.0f} run in "
        f"{'every read' if taken == len(queued) else f'{taken} of {len(queued)} reads'}{room}",
        f"{flags.sequences} over {seat:.0f}{upto}",
        "more KV blocks (they are not used up), a larger chunk",
        {"running": seat, "waiting": queued[-1].waiting, "kv_usage": kv, "fits": fits})


def _prefill_queue(seen: Seen) -> Bound | None:
    """Requests wait though the cache and the seats have room: the tokens of a step are used up by prompts."""
    queued = _queued(seen)
    if not queued:
        return None
    if all(read.kv is None for read in queued):
        return _cannot(seen, f"{queued[-1].waiting:.0f} wait, and it does not tell how full its KV cache is")
    if not seen.prompt_tokens:
        return _cannot(seen, f"{queued[-1].waiting:.0f} wait though the KV cache and the seats have room, and no prompt"
                             " was computed: for a KV transfer, an adapter, or by priority; its page does not say")
    kv = max(read.kv for read in queued if read.kv is not None)
    return _prefill(seen, f"{queued[-1].waiting:.0f} wait while the KV cache is {quantity(kv, 'ratio')} full and"
                          f" {queued[-1].running:.0f} of {seen.peak:.0f} seats are taken;"
                          f" {seen.prompt_tokens / seen.window_s:.0f} prompt tokens/s are computed", kv_usage=kv)


def _before(seen: Seen) -> Bound | None:
    """It has room and nothing waits in it: what limits comes from before it."""
    if seen.reads[-1].waiting > 0:
        return None
    running, kv = _mean(seen, "running"), max((read.kv or 0.0 for read in seen.reads), default=0.0)
    no_help = "any flag of this engine, more KV blocks, another replica"
    if seen.router_queue and kv < KV_FULL:
        return Bound(seen.engine, "upstream",
                     f"{seen.router_queue:.0f} wait in the router while {running:.3g} run here and none waits", "",
                     no_help, {"router_queue": seen.router_queue, "running": running})
    busy = [gpu.util for gpu in seen.gpus if gpu.util is not None]
    if busy and running > 0 and max(busy) < HALF and kv < KV_LOW:
        return Bound(seen.engine, "upstream",
                     f"none waits, {running:.3g} run, and its GPUs are busy {quantity(max(busy), 'ratio')} of the time:"
                     " what arrives, or the CPU side, sets the pace", "", no_help,
                     {"gpu_util": max(busy), "running": running})
    return None


def _phase(seen: Seen) -> Bound | None:
    """Nothing waits: what requests spend their time in, by seconds of TTFT against seconds between tokens.

    By Little's law these seconds ÷ the window are the mean numbers of requests in prefill and in decode.
    """
    if seen.ttft_s is None or seen.itl_s is None or seen.ttft_s + seen.itl_s <= 0:
        return None
    share = seen.ttft_s / (seen.ttft_s + seen.itl_s)
    inside, decoding = ((seen.ttft_s + seen.itl_s) / seen.window_s, seen.itl_s / seen.window_s)
    told = {"prefill_share": share, "ttft_mean_s": _ratio(seen.ttft_s, seen.ttft_n),
            "itl_mean_s": _ratio(seen.itl_s, seen.itl_n), "inside": inside, "decoding": decoding}
    if inside < LEAST_INSIDE:
        return Bound(seen.engine, "idle", f"nearly: {inside:.2g} requests were in it on average; what arrives sets"
                     " the pace", evidence=told)
    if share >= HALF:
        return _prefill(seen, f"none waits; {quantity(share, 'ratio')} of the requests' time is before their first"
                              f" token (mean {span(told['ttft_mean_s'] or 0.0)})", **told)
    gap_s = told["itl_mean_s"]
    pace = f", {span(gap_s)} a token" if gap_s else ""
    flags = FLAGS.get(seen.kind, ANY)
    return Bound(
        seen.engine, "decode-bound",
        f"none waits; {quantity(1 - share, 'ratio')} of the requests' time is between tokens, at a batch of"
        f" {decoding:.2g}{pace}",
        f"replicas for more tokens a second; a smaller {flags.sequences} for a shorter gap between tokens",
        "more KV blocks, a larger chunk", told)


ORDER: tuple[Callable[[Seen], Bound | None], ...] = (_blind, _hardware, _idle, _stands, _kv, _sequences,
                                                     _prefill_queue, _before, _phase)


# --- what they share -------------------------------------------------------------------------------------------------


def concurrency_that_fits(seen: Seen) -> int | None:
    """How many requests as long as those that run now fit under 85 % of the KV cache: 0.85 × running ÷ usage."""
    used = [(read.running, read.kv) for read in seen.reads if read.kv and read.kv > 0 and read.running > 0]
    if not used:
        return None
    fits = KV_FULL * sum(running for running, _ in used) / sum(kv for _, kv in used)
    return int(min(fits, MOST_FIT))  # a page may say that a cache is 1e-320 full


def _prefill(seen: Seen, why: str, **evidence: float | None) -> Bound:
    flags = FLAGS.get(seen.kind, ANY)
    return Bound(seen.engine, "prefill-bound", why,
                 f"{flags.chunk}: larger for a shorter queue (it lengthens the gaps between tokens); then replicas",
                 f"a larger {flags.sequences}, more KV blocks",
                 {"prompt_tokens_per_s": _ratio(seen.prompt_tokens, seen.window_s)} | evidence)


def _queued(seen: Seen) -> list[Read]:
    """The reads with a queue, where at least two had one and the last is one of them."""
    queued = [read for read in seen.reads if read.waiting > 0]
    return queued if len(queued) >= LEAST_READS and seen.reads[-1].waiting > 0 else []


def _cannot(seen: Seen, why: str) -> Bound:
    return Bound(seen.engine, "cannot-tell", why)


def _mean(seen: Seen, name: str) -> float:
    return float(sum(getattr(read, name) for read in seen.reads)) / max(1, len(seen.reads))


def _most(seen: Seen, name: str) -> float:
    return float(max((getattr(read, name) for read in seen.reads), default=0.0))


def _ratio(a: float | None, b: float | None) -> float | None:
    """a ÷ b; None where either is not told or b is 0."""
    return None if a is None or not b else a / b


# --- looking ---------------------------------------------------------------------------------------------------------


def look(scene: Scene, target: Target, engine: str, kind: str = "unknown") -> Seen:
    """One engine's numbers over the last minute, or as long as was watched where `check` samples alone."""
    windows, now = scene.windows, scene.now
    window_s = min(WINDOW_S, scene.clip_windows_to_s or WINDOW_S)
    start = now - window_s
    for name in ("running", "waiting"):
        got = windows.latest(engine, name, now)
        if not isinstance(got, Sample) and not scene.sleeps(engine):
            return Seen(engine, kind, window_s, trouble=f"it does not tell how many are {name}: {got.why}")
    kv = dict(windows.history(engine, "kv_usage", start))
    reads = [Read(running, waiting, kv.get(at)) for at, running, waiting in
             _since(windows.backward(engine, ("running", ""), ("waiting", "")), start)][::-1]
    peak = windows.highest(engine, "running") or 0.0

    rise = partial(rise_of, scene, target, engine, start)
    return Seen(engine, kind, window_s, reads, peak, rise("preemptions"), rise("ttft", "sum"), rise("ttft", "count"),
                rise("itl", "sum"), rise("itl", "count"), rise("prompt_tokens"), rise("generation_tokens"),
                kv_tokens(scene, engine), router_queue(scene), gpus_seen(scene, target, start), scene.sleeps(engine))


def rise_of(scene: Scene, target: Target, engine: str, start: float, name: str, key: str = "") -> float | None:
    """What a counter of an engine rose since `start`, as it tells or its target for all; None where neither does."""
    told, by = scene.windows.keys_now(engine, name), engine
    if not told:
        by = next(iter(scene.tellers(target, name)), engine)
        told = scene.windows.keys_now(by, name)
    return scene.windows.increase(by, name, start, key=key) if key in told else None


def kv_tokens(scene: Scene, engine: str) -> float | None:
    """What an engine's KV cache holds in tokens: blocks × tokens a block; None where it tells either not."""
    told = [scene.windows.latest(engine, name, scene.now) for name in ("kv_blocks", "kv_block_tokens")]
    blocks, size = (got.value if isinstance(got, Sample) else None for got in told)
    return blocks * size if blocks and size else None


def _since(rows: Iterable[tuple[float, ...]], start: float) -> Iterator[tuple[float, ...]]:
    for row in rows:
        if row[0] < start:
            return
        yield row


def router_queue(scene: Scene) -> float | None:
    """Requests that wait in the routers of this node; None where none tells."""
    told = [got.value for router in scene.routers
            if isinstance(got := scene.windows.latest(router, "router_queue", scene.now), Sample)]
    return sum(told) if told else None


def gpus_seen(scene: Scene, target: Target, start: float) -> list[GpuSeen]:
    """The GPUs of a target that are known, each over the window."""
    return [_gpu(scene, gpu, start) for gpu in scene.gpus.values() if gpu.index in target.gpus]


def _gpu(scene: Scene, gpu: GpuFacts, start: float) -> GpuSeen:
    windows = scene.windows
    reasons = list(map(int, windows.levels(gpu.uuid, "gpu_throttle", start)))
    hot, braked = (sum(bool(reason & bit) for reason in reasons) for bit in (HW_THERMAL, HW_POWER_BRAKE))
    held = sum(bool(reason & (HW_THERMAL | HW_POWER_BRAKE)) for reason in reasons)
    busy = windows.levels(gpu.uuid, "gpu_util", start)

    def now(name: str) -> float | None:
        got = windows.latest(gpu.uuid, name, scene.now)
        return got.value if isinstance(got, Sample) else None

    return GpuSeen(gpu.index, held / len(reasons) if reasons else 0.0, "heat" if hot >= braked else "the power brake",
                   now("gpu_sm_clock_mhz"), now("gpu_sm_clock_max_mhz"), now("gpu_temp_c"),
                   sum(busy) / len(busy) if busy else None)


# --- marking a change ------------------------------------------------------------------------------------------------

HOLD_S = 30.0  # another verdict must hold for so long before it counts: one read in between is no change


@dataclass(frozen=True, slots=True)
class Mark:
    """What binds an engine since when, what did before, and what may be about to. Times are unix seconds."""

    by: By
    since: float
    was: By | None = None
    next: By | None = None
    next_since: float = 0.0


def mark(known: Mark | None, by: By, now: float) -> Mark:
    """The mark after one more verdict."""
    if known is None or (known.by == "cannot-tell" and known.was is None):  # the first verdict needs not last
        return Mark(by, now if known is None or by != known.by else known.since)
    if by == known.by:
        return Mark(by, known.since, known.was)
    since = known.next_since if known.next == by else now
    if now - since >= HOLD_S:
        return Mark(by, since, known.by)
    return Mark(known.by, known.since, known.was, by, since)
