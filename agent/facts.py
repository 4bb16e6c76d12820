"""What an engine tells of itself and its GPUs over a span: inputs of the checklists, numbers of a page. Pure."""

from __future__ import annotations

from functools import partial

from agent.binds import kv_tokens, rise_of
from agent.model import Sample
from agent.signals import Scene, Target

LONGEST_S = 3600.0
Facts = dict[str, float | None]


def facts_of(scene: Scene, target: Target, engine: str, span_s: float = LONGEST_S) -> Facts:
    """Means and rates over the last `span_s` seconds, as far as was watched; None: it does not tell, or did nothing.

    Keys are those of agent.advise.TOLD, and two for lint: `drafted` tokens, `watched_s`. These, peaks, acceptance and
    preemptions are since the engine last came back: it may have other options now. The wait in the queue is counted
    when requests finish (agent.model.SAMPLES), so the split of TTFT into queue and prefill is an estimate.
    """
    windows, now = scene.windows, scene.now
    start = now - min(span_s, scene.clip_windows_to_s or span_s)

    rise = partial(rise_of, scene, target, engine, start)
    ttft_s, queue_s = (_ratio(rise(name, "sum"), rise(name, "count")) for name in ("ttft", "queue_time"))
    prompt = _ratio(rise("prompt_tokens"), rise("ttft", "count"))
    prefill_s = None if ttft_s is None or queue_s is None else max(0.0, ttft_s - queue_s)
    lived = max(start, windows.restarted_at(engine, "running") or start)  # it may have come back with other options
    running, usage = (windows.levels(engine, name, lived) for name in ("running", "kv_usage"))
    gpus = [gpu for gpu in scene.gpus.values() if gpu.index in target.gpus]
    memory = [got.value for gpu in gpus
              if isinstance(got := windows.latest(gpu.uuid, "gpu_mem_total", now), Sample)]
    since = partial(rise_of, scene, target, engine, lived)
    return {
        "gpu_bytes": min(memory, default=None), "gpus": float(len(gpus)) if gpus else None,
        "capacity_tokens": kv_tokens(scene, engine), "sequences": max(running, default=0.0) or None,
        "kv_usage": max(usage, default=None), "running": _ratio(sum(running), len(running)) or None,
        "prompt_tokens": prompt, "output_tokens": _ratio(rise("generation_tokens"), rise("ttft", "count")),
        "decode_step_s": _ratio(rise("itl", "sum"), rise("itl", "count")), "ttft_s": ttft_s, "queue_s": queue_s,
        "prefill_s": prefill_s, "prefill_s_per_token": _ratio(prefill_s, prompt),
        "hit_rate": _ratio(rise("prefix_hits"), rise("prefix_queries")),
        "acceptance": _ratio(since("spec_accepted"), since("spec_draft")), "drafted": since("spec_draft"),
        "preemptions": since("preemptions"), "watched_s": windows.watched_s(engine, "running", lived),
        "itl_target_s": target.slo.itl_p99,
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
