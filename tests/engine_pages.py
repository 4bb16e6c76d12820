"""Pages of every engine and each of its name eras, written from what is known of them, not from agent/engines.

One story for all: a steady load, told as each engine would tell it (what it does not tell is not on its page). From the
second 0: 2 requests a second, one of a hundred more fails; 2 wait, 3 run; a first token after 0.3 s, one of ten after
0.9 s; 20 gaps a request of 0.03 s, one of fifty of 0.4 s; the cache 83 % full, a preemption a minute for 25 of them,
1,000 prompt tokens a second of which 600 hit; 20 decode steps a second, one of forty eager; rank 1 of 2 computes 12 %
longer.

`python -m tests.engine_pages` writes tests/golden/pages anew, as they are at second 600.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "pages"
GOLDEN_AT_S = 600.0
STARTED = 999_990_000.0  # unix s

TTFT = ((0.3, 1.8), (0.9, 0.2))  # (s, how many a second)
ITL = ((0.03, 39.2), (0.4, 0.8))
E2E = ((0.9, 1.8), (1.5, 0.2))
QUEUE = ((0.2, 2.0),)
HIT_SHARES = ((0.6, 2.0),)

VLLM_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10)
VLLM_TTFT_LONG = (*VLLM_TTFT, 20, 40, 80, 160, 640, 2560)
VLLM_ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_E2E = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
SGLANG_TTFT = (.1, .2, .4, .6, .8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_ITL = (.002, .004, .006, .008, .01, .015, .02, .025, .03, .04, .06, .08, .1, .15, .2, .4, .6, .8, 1, 2, 4, 6, 8)
TGI_BOUNDS = tuple(1.5e-4 * 1.5**n for n in range(35))
REPLICA = '{ReplicaId="r1",WorkerId="w1",'
MODEL = '{model="m",'
TENTHS = tuple(n / 10 for n in range(1, 11))

Lines = Iterator[str]
Page = Callable[[float], str]


def preempted(t: float) -> float:
    """One a minute for the first 25."""
    return min(t, 1500.0) // 60


def _labelled(name: str, labels: Mapping[str, str]) -> str:
    return name + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else "")


def gauge(name: str, value: float, /, **labels: str) -> Lines:
    yield f"# TYPE {name} gauge"
    yield f"{_labelled(name, labels)} {value:g}"


def total(name: str, value: float, /, **labels: str) -> Lines:
    """A counter, written under the name given (with `_total` where the engine writes it)."""
    yield f"# TYPE {name} counter"
    yield f"{_labelled(name, labels)} {value:.10g}"


def many(kind: str, name: str, values: Mapping[tuple[tuple[str, str], ...], float], /) -> Lines:
    """A family of several series."""
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{_labelled(name, dict(labels))} {value:.10g}"


def histogram(name: str, bounds: Sequence[float], rates: Sequence[tuple[float, float]], t: float, /,
              **labels: str) -> Lines:
    """`rates`: (value, how many a second)."""
    yield f"# TYPE {name} histogram"
    for bound in bounds:
        count = round(sum(rate for value, rate in rates if value <= bound) * t)
        yield f'{_labelled(f"{name}_bucket", {**labels, "le": f"{bound:.10g}"})} {count}'
    whole = round(sum(rate for _, rate in rates) * t)
    yield f'{_labelled(f"{name}_bucket", {**labels, "le": "+Inf"})} {whole}'
    yield f'{_labelled(f"{name}_sum", labels)} {sum(value * rate for value, rate in rates) * t:.10g}'
    yield f'{_labelled(f"{name}_count", labels)} {whole}'


def _page(*parts: Lines) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)


def _of(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(labels.items())


def _when(holds: bool, part: Lines) -> Lines:
    return part if holds else iter(())


def vllm(version: str, *, v1: bool = True, muted: bool = False) -> Page:
    """vLLM by its version. `v1`: its newer engine (the only one after 0.9.0)."""
    v = tuple(map(int, version.split(".")))

    def page(t: float) -> str:
        of = {"model_name": "m"} | ({"engine": "0"} if v >= (0, 8, 5) else {})
        late = {"error": (0, 13), "repetition": (0, 20)}
        reasons = ["stop", "length", "abort", *(reason for reason, since in late.items() if v >= since)]
        counts = {"stop": 2 * t, "error": 0.02 * t}
        post = {"method": "POST", "handler": "/v1/completions"}
        long = v >= (0, 9)
        parts = [
            gauge("process_start_time_seconds", STARTED),
            many("counter", "http_requests_total", {
                _of(status="2xx", **post): 2 * t, _of(status="5xx", **post): 0.02 * t,
                _of(status="2xx", method="GET", handler="/v1/models"): 50 * t}),
        ]
        if muted:
            return _page(*parts)
        parts += [
            gauge("vllm:num_requests_running", 3, **of),
            gauge("vllm:num_requests_waiting", 2, **of),
            _when(v >= (0, 20), many("gauge", "vllm:num_requests_waiting_by_reason", {
                _of(reason="capacity", **of): 2, _of(reason="deferred", **of): 0})),
            _when(not v1, gauge("vllm:num_requests_swapped", 0, **of)),
            _when(not v1, gauge("vllm:cpu_cache_usage_perc", 0, **of)),
            _when(v <= (0, 6, 6), gauge("vllm:avg_generation_throughput_toks_per_s", 40, **of)),
            _when(v < (0, 11), gauge("vllm:gpu_cache_usage_perc", 0.83, **of)),
            _when(v >= (0, 9, 2), gauge("vllm:kv_cache_usage_perc", 0.83, **of)),
            _when(not v1 and v >= (0, 5, 5), gauge("vllm:gpu_prefix_cache_hit_rate", 0.6, **of)),
            _when(v1 and (0, 7, 3) <= v < (0, 11), total("vllm:gpu_prefix_cache_queries_total", 1000 * t, **of)),
            _when(v1 and (0, 7, 3) <= v < (0, 11), total("vllm:gpu_prefix_cache_hits_total", 600 * t, **of)),
            _when(v >= (0, 9, 2), total("vllm:prefix_cache_queries_total", 1000 * t, **of)),
            _when(v >= (0, 9, 2), total("vllm:prefix_cache_hits_total", 600 * t, **of)),
            _when(not v1 or v >= (0, 8), total("vllm:num_preemptions_total", preempted(t), **of)),
            _when(v >= (0, 30), histogram("vllm:request_num_preemptions", (0, 1, 2), ((0, 2.0),), t, **of)),
            histogram("vllm:time_to_first_token_seconds", VLLM_TTFT_LONG if long else VLLM_TTFT, TTFT, t, **of),
            _when(v < (0, 12), histogram("vllm:time_per_output_token_seconds", VLLM_ITL, ITL, t, **of)),
            _when(v >= (0, 10, 2), histogram("vllm:inter_token_latency_seconds", VLLM_ITL, ITL, t, **of)),
            _when(v >= (0, 11), histogram(
                "vllm:request_time_per_output_token_seconds", VLLM_ITL, ((0.04, 2.0),), t, **of)),
            histogram("vllm:e2e_request_latency_seconds", VLLM_E2E, E2E, t, **of),
            _when(v >= (0, 6, 6), histogram("vllm:request_queue_time_seconds", VLLM_E2E, QUEUE, t, **of)),
            _when(v >= (0, 13), histogram(
                "vllm:request_prefill_kv_computed_tokens", (100, 1000), ((400, 2.0),), t, **of)),
            many("counter", "vllm:request_success_total",
                 {_of(finished_reason=reason, **of): counts.get(reason, 0) for reason in reasons}),
            total("vllm:prompt_tokens_total", 1000 * t, **of),
            total("vllm:generation_tokens_total", 40 * t, **of),
            _when(v >= (0, 16), total("vllm:prompt_tokens_by_source_total", 400 * t, source="local_compute", **of)),
            _when(v >= (0, 32), total("vllm:prompt_tokens_cached_by_source_total", 600 * t, source="local", **of)),
            _when(v >= (0, 11, 2), many("gauge", "vllm:engine_sleep_state", {
                _of(sleep_state="awake", **of): 1, _of(sleep_state="weights_offloaded", **of): 0,
                _of(sleep_state="discard_all", **of): 0})),
            _when(v >= (0, 32), many("counter", "vllm:admission_rejections_total", {
                _of(reason="max_num_queued_reqs"): 0, _of(reason="max_num_queued_tokens"): 0})),
            gauge("vllm:cache_config_info", 1, enable_prefix_caching="True", num_gpu_blocks="8192", **of),
        ]
        return _page(*parts)

    return page


def ray(prefix: str) -> Page:
    """vLLM 0.11 under Ray Serve: names in Ray's spelling; preemptions are absent until there is one."""

    def page(t: float) -> str:
        lines = []
        for line in vllm("0.11.2")(t).splitlines():
            if "num_preemptions" in line or "vllm:" not in line:
                continue
            name = line.removeprefix("# TYPE ")
            ours = name.replace("_total", "", 1).replace("vllm:", prefix, 1).replace("{", REPLICA, 1)
            lines.append(("# TYPE " if line.startswith("#") else "") + ours)
        served = {_of(route="/", method="POST", status_code="200", application="llm"): 2 * t,
                  _of(route="/", method="POST", status_code="500", application="llm"): 0.02 * t,
                  _of(route="/-/healthz", method="GET", status_code="200", application=""): 50 * t}
        return "\n".join(lines) + "\n" + _page(many("counter", "ray_serve_num_http_requests_total", served))

    return page


def sglang(version: str, *, ranks: int = 1, dp: int = 0) -> Page:
    """SGLang by its version. `ranks`: that tell (all with --enable-metrics-for-all-schedulers). `dp`: engines."""
    v = tuple(map(int, version.split(".")))

    def page(t: float) -> str:
        model = {"model_name": "m"}
        places = [{"dp_rank": str(i)} for i in range(dp)] or [{}]
        of = [{**model, "engine_type": "unified", "pp_rank": "0", "tp_rank": str(rank), **place}
              for place in places for rank in range(ranks)]
        share = 1 / len(places)

        def each(value: float) -> dict[tuple[tuple[str, str], ...], float]:
            return {_of(**labels): value for labels in of}

        def split(value: float) -> dict[tuple[tuple[str, str], ...], float]:
            """With priority scheduling: the total under no priority, and what it is made of beside it."""
            if v < (0, 5, 12):
                return each(value)
            return {_of(**labels, priority=priority): part for labels in of
                    for priority, part in {"": value, "0": value - 1, "5": 1}.items()}

        passes = {"decode_cuda_graph": 19.5, "decode_none": 0.5, "prefill_cuda_graph": 0, "prefill_none": 2}
        seconds = "sglang:forward_execution_seconds_total" if v >= (0, 5, 12) else "sglang:gpu_execution_seconds_total"
        retracted = "sglang:num_retracted_requests_total" if v >= (0, 5, 8) else "sglang:total_retracted_reqs"
        served = {_of(endpoint="/v1/completions", method="POST", status_code="200"): 2 * t,
                  _of(endpoint="/v1/completions", method="POST", status_code="500"): 0.02 * t,
                  _of(endpoint="/health", method="GET", status_code="200"): 50 * t}
        return _page(
            many("gauge", "sglang:num_running_reqs", split(3)),
            many("gauge", "sglang:num_queue_reqs", split(2)),
            many("gauge", "sglang:token_usage", each(0.83)),
            many("gauge", "sglang:cache_hit_rate", each(0.1)),  # of the last batch: not to be used
            many("gauge", "sglang:gen_throughput", each(40 * share)),
            _when(v >= (0, 4, 6), many("gauge", "sglang:num_grammar_queue_reqs", each(0))),
            _when(v == (0, 5, 1) or v >= (0, 5, 8), many("counter", retracted, each(preempted(t)))),
            _when((0, 5, 6) <= v < (0, 5, 8), histogram(
                "sglang:num_retractions", (0, 1, 2), ((1, 1 / 60),), preempted(t) * 60, **model)),
            _when(v >= (0, 5, 3), many("gauge", "sglang:num_retracted_reqs", each(0))),
            _when(v >= (0, 5, 8), many("counter", "sglang:cuda_graph_passes_total", {
                _of(mode=mode, **labels): rate * t for labels in of for mode, rate in passes.items()})),
            _when(v >= (0, 5, 8), many("counter", seconds, {
                _of(category="decode", **labels): (0.56 if labels["tp_rank"] == "1" else 0.5) * t for labels in of})),
            histogram("sglang:time_to_first_token_seconds", SGLANG_TTFT, TTFT, t, **model),
            _when(v >= (0, 4, 6), histogram("sglang:inter_token_latency_seconds", SGLANG_ITL, ITL, t, **model)),
            _when(v < (0, 4, 6), histogram("sglang:time_per_output_token_seconds", SGLANG_ITL, ITL, t, **model)),
            histogram("sglang:e2e_request_latency_seconds", SGLANG_TTFT, E2E, t, **model),
            _when(v >= (0, 5, 3), histogram("sglang:queue_time_seconds", SGLANG_TTFT, QUEUE, t, **model)),
            total("sglang:prompt_tokens_total", 1000 * t, **model),
            total("sglang:generation_tokens_total", 40 * t, **model),
            _when(v >= (0, 5, 8), many("counter", "sglang:realtime_tokens_total", {
                _of(mode=mode, **labels): rate * share * t for labels in of
                for mode, rate in {"decode": 40, "prefill_compute": 400, "prefill_cache": 600}.items()})),
            _when(v >= (0, 4, 6), total("sglang:cached_tokens_total", 600 * t, **model)),
            _when(v >= (0, 4, 6), total("sglang:num_requests_total", 2 * t, **model)),
            _when(v >= (0, 5, 3), total("sglang:num_aborted_requests_total", 0, **model)),
            _when(v >= (0, 5, 1), many("counter", "sglang:http_responses_total", served)),
        )

    return page


def trtllm(prefix: str) -> Page:
    """trtllm-serve at /prometheus/metrics; without its prefix to about 1.2, with fewer families."""

    def page(t: float) -> str:
        undefined = "m" if prefix else "undefined"
        of = {"model_name": undefined, "engine_type": undefined}
        return _page(
            _when(bool(prefix), gauge("trtllm_num_requests_running", 3, **of)),
            _when(bool(prefix), gauge("trtllm_num_requests_waiting", 2, **of)),
            _when(bool(prefix), gauge("trtllm_num_paused_requests", 0, **of)),
            gauge(f"{prefix}kv_cache_utilization", 0.83, **of),
            gauge(f"{prefix}kv_cache_hit_rate", 0.6, **of),
            _when(bool(prefix), gauge("trtllm_kv_cache_max_blocks", 8192, **of)),
            _when(bool(prefix), total("trtllm_kv_cache_reused_blocks_total", 600 * t, **of)),
            _when(bool(prefix), total("trtllm_kv_cache_missed_blocks_total", 400 * t, **of)),
            histogram(f"{prefix}time_to_first_token_seconds", VLLM_TTFT_LONG, TTFT, t, **of),
            histogram(f"{prefix}time_per_output_token_seconds", VLLM_ITL, ((0.04, 2.0),), t, **of),
            histogram(f"{prefix}e2e_request_latency_seconds", VLLM_E2E, E2E, t, **of),
            histogram(f"{prefix}request_queue_time_seconds", VLLM_E2E, QUEUE, t, **of),
            total(f"{prefix}request_success_total", 2 * t, finished_reason="stop", **of),
            _when(bool(prefix), many("counter", "trtllm_request_error_total", {
                _of(http_code="500", **of): 0.02 * t, _of(http_code="400", **of): t})),
        )

    return page


def trtllm_json(t: float) -> str:
    """trtllm-serve at /metrics: the iterations since the last reader came."""
    last = int(20 * t)
    one = {"iter": last, "iterLatencyMS": 48.2, "gpuMemUsage": 76_000_000_000, "numQueuedRequests": 2,
           "kvCacheStats": {"usedNumBlocks": 6640, "maxNumBlocks": 8000, "cacheHitRate": 0.6},
           "inflightBatchingStats": {"numPausedRequests": 0, "numScheduledRequests": 3}}
    return json.dumps([{**one, "iter": last - 1, "numQueuedRequests": 9}, one])


def triton(*, backend: bool, fraction: bool = True) -> Page:
    """Triton; `backend`: with TensorRT-LLM's own families (23.11), `fraction`: the share of blocks among them."""

    def page(t: float) -> str:
        of = {"model": "tensorrt_llm", "version": "1"}
        kinds = {"waiting": 2, "scheduled": 3, "context": 1, "max": 512, "active": 5}
        blocks = {"used": 6640, "free": 1360, "max": 8000, "tokens_per": 64} | ({"fraction": 0.83} if fraction else {})
        return _page(
            total("nv_inference_request_success", 2 * t, **of),
            many("counter", "nv_inference_request_failure", {
                _of(reason="BACKEND", **of): 0.02 * t, _of(reason="CANCELED", **of): t}),
            gauge("nv_inference_pending_request_count", 2, **of),
            total("nv_inference_queue_duration_us", 4e5 * t, **of),
            total("nv_inference_request_duration_us", 1e6 * t, **of),
            _when(backend, histogram("nv_inference_first_response_histogram_ms", (100, 500, 2000, 5000),
                                     [(1000 * s, rate) for s, rate in TTFT], t, **of)),
            _when(backend, many("gauge", "nv_trt_llm_request_metrics", {
                _of(request_type=kind, **of): n for kind, n in kinds.items()})),
            _when(backend, many("gauge", "nv_trt_llm_kv_cache_block_metrics", {
                _of(kv_cache_block_type=kind, **of): n for kind, n in blocks.items()})),
            gauge("nv_gpu_utilization", 0.9, gpu_uuid="GPU-aa"),
        )

    return page


def tgi(t: float) -> str:
    return _page(
        gauge("tgi_queue_size", 2),
        gauge("tgi_batch_current_size", 3),
        gauge("tgi_batch_current_max_tokens", 8300),
        gauge("tgi_batch_max_total_tokens", 10000),
        many("counter", "tgi_batch_inference_count", {_of(method="prefill"): 2 * t, _of(method="decode"): 20 * t}),
        total("tgi_request_count", 2.02 * t, method="generate"),
        total("tgi_request_success", 2 * t, method="generate"),
        many("counter", "tgi_request_failure", {
            _of(err="overloaded"): 0.02 * t, _of(err="validation"): t, _of(err="template"): t}),
        histogram("tgi_request_duration", TGI_BOUNDS, E2E, t),
        histogram("tgi_request_queue_duration", TGI_BOUNDS, QUEUE, t),
        histogram("tgi_request_mean_time_per_token_duration", TGI_BOUNDS, ((0.04, 2.0),), t),
        histogram("tgi_request_input_length", (256, 512, 1024), ((500, 2.0),), t),
        histogram("tgi_request_generated_tokens", (16, 32, 64), ((20, 2.0),), t),
    )


def llamacpp(*, with_kv: bool) -> Page:
    """llama.cpp; `with_kv`: before May 2025."""

    def page(t: float) -> str:
        return _page(
            gauge("llamacpp:requests_processing", 3),
            gauge("llamacpp:requests_deferred", 2),
            _when(with_kv, gauge("llamacpp:kv_cache_usage_ratio", 0.83)),
            total("llamacpp:prompt_tokens_total", (1000 if with_kv else 400) * t),
            total("llamacpp:tokens_predicted_total", 40 * t),
            total("llamacpp:prompt_seconds_total", 0.2 * t),
            total("llamacpp:n_decode_total", 20 * t),
            total("llamacpp:tokens_predicted_seconds_total", 0.8 * t),
            gauge("llamacpp:predicted_tokens_seconds", 56),
            _when(not with_kv, total("llamacpp:prompt_tokens_cached_total", 600 * t)),
            _when(not with_kv, total("llamacpp:n_tokens_max", 4000)),
        )

    return page


def lmdeploy(version: str) -> Page:
    v = tuple(map(int, version.split(".")))

    def page(t: float) -> str:
        of = {"model_name": "m", "engine": "0"}
        done = "lmdeploy:num_requests_succeeded" if v >= (0, 12, 3) else "lmdeploy:num_requests_completed"
        return _page(
            gauge("lmdeploy:num_requests_running", 3, **of),
            gauge("lmdeploy:num_requests_waiting", 2, **of),
            gauge("lmdeploy:num_api_requests_waiting", 5, **of),
            gauge("lmdeploy:gpu_cache_usage_perc", 0.83, **of),
            many("gauge", done, {_of(**of): 2 * t}),
            many("gauge", "lmdeploy:num_requests_failed", {_of(**of): 0.02 * t}),
            _when(v >= (0, 11, 1), gauge("lmdeploy:prefix_cache_hit_rate", 0.6, **of)),
            histogram("lmdeploy:time_to_first_token_seconds", VLLM_TTFT_LONG, TTFT, t, **of),
            histogram("lmdeploy:iter_token_latency", VLLM_ITL, ITL, t, **of),
            histogram("lmdeploy:time_per_output_token_seconds", VLLM_ITL, ((0.04, 2.0),), t, **of),
            histogram("lmdeploy:e2e_request_latency_seconds", VLLM_E2E, E2E, t, **of),
            histogram("lmdeploy:request_queue_time_seconds", VLLM_E2E, QUEUE, t, **of),
            total("lmdeploy:prompt_tokens_total", 1000 * t, **of),
            total("lmdeploy:generation_tokens_total", 40 * t, **of),
        )

    return page


def dynamo(t: float) -> str:
    of = {"model": "m"}
    served = {"endpoint": "completions", "request_type": "stream", **of}
    return _page(
        gauge("dynamo_frontend_model_context_length", 8192, **of),
        gauge("dynamo_frontend_disconnected_clients", 0),
        gauge("dynamo_frontend_inflight_requests", 3, **of),
        gauge("dynamo_frontend_queued_requests", 2, **of),
        many("counter", "dynamo_frontend_requests_total", {
            _of(status="success", error_type="", **served): 2 * t,
            _of(status="error", error_type="internal", **served): 0.02 * t,
            _of(status="error", error_type="validation", **served): 0.01 * t}),
        histogram("dynamo_frontend_time_to_first_token_seconds", VLLM_TTFT_LONG, TTFT, t, **of),
        histogram("dynamo_frontend_inter_token_latency_seconds", VLLM_ITL, ITL, t, **of),
        histogram("dynamo_frontend_request_duration_seconds", VLLM_E2E, E2E, t, **of),
        histogram("dynamo_frontend_input_sequence_tokens", (256, 512, 1024), ((500, 2.0),), t, **of),
        total("dynamo_frontend_output_tokens_total", 40 * t, **of),
        histogram("dynamo_frontend_kv_hit_rate", TENTHS, HIT_SHARES, t),
    )


def dynamo_worker(*, passes_on: bool) -> Page:
    """A Dynamo worker; `passes_on`: vLLM's families stand on its page, too."""

    def page(t: float) -> str:
        of = {"dynamo_component": "backend", "dynamo_namespace": "d"}
        engine = ""
        if passes_on:
            lines = vllm("0.20")(t).splitlines()
            engine = "".join(f'{line.replace("{", MODEL, 1)}\n'
                             for line in lines if "vllm:" in line)
        return engine + _page(
            gauge("dynamo_component_uptime_seconds", t + 9000, **of),
            gauge("dynamo_component_inflight_requests", 3, **of),
            gauge("dynamo_component_gpu_cache_usage_percent", 0.83, **of),
            total("dynamo_component_requests_total", 2 * t, **of),
            total("dynamo_component_errors_total", 0.02 * t, error_type="generate", **of),
        )

    return page


PAGES: Mapping[str, Page] = {
    "vllm-0.4.3": vllm("0.4.3", v1=False),
    "vllm-0.6.6": vllm("0.6.6", v1=False),
    "vllm-0.7.3": vllm("0.7.3", v1=False),
    "vllm-0.7.3-v1": vllm("0.7.3"),
    "vllm-0.8.5": vllm("0.8.5"),
    "vllm-0.9.0": vllm("0.9.0", v1=False),
    "vllm-0.9.2": vllm("0.9.2"),
    "vllm-0.10.2": vllm("0.10.2"),
    "vllm-0.11.2": vllm("0.11.2"),
    "vllm-0.12": vllm("0.12"),
    "vllm-0.16": vllm("0.16"),
    "vllm-0.20": vllm("0.20"),
    "vllm-0.30": vllm("0.30"),
    "vllm-0.32": vllm("0.32"),
    "vllm-muted": vllm("0.32", muted=True),
    "ray-2.49": ray("ray_vllm:"),
    "ray-2.50": ray("ray_vllm_"),
    "sglang-0.4.0": sglang("0.4.0"),
    "sglang-0.4.6": sglang("0.4.6"),
    "sglang-0.5.1": sglang("0.5.1"),
    "sglang-0.5.3": sglang("0.5.3"),
    "sglang-0.5.6": sglang("0.5.6"),
    "sglang-0.5.8": sglang("0.5.8"),
    "sglang-0.5.12-tp2": sglang("0.5.12", ranks=2),
    "sglang-0.5.23-dp2": sglang("0.5.23", dp=2),
    "trtllm-1.1": trtllm(""),
    "trtllm-1.3": trtllm("trtllm_"),
    "triton-23.10": triton(backend=False),
    "triton-25.03": triton(backend=True),
    "triton-25.03-no-fraction": triton(backend=True, fraction=False),
    "tgi-3.3.7": tgi,
    "llamacpp-b5000": llamacpp(with_kv=True),
    "llamacpp-b10519": llamacpp(with_kv=False),
    "lmdeploy-0.9.2": lmdeploy("0.9.2"),
    "lmdeploy-0.12.3": lmdeploy("0.12.3"),
    "dynamo": dynamo,
    "dynamo-worker": dynamo_worker(passes_on=True),
    "dynamo-worker-silent": dynamo_worker(passes_on=False),
}


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for name, page in PAGES.items():
        (GOLDEN / f"{name}.txt").write_text(page(GOLDEN_AT_S))


if __name__ == "__main__":
    main()
