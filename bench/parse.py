"""Reading an engine's metrics page: ours against prometheus_client's parser, one process, one run, one after the other.

    python -m bench.parse [--short]

The pages are five minutes of a real vLLM 0.32 under changing load (tests/data/recordings), in their order, each
different from the one before. Ours reads what an engine source asks for; prometheus_client has no such choice.
"""

from __future__ import annotations

import json
import lzma
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from agent.exposition import Reader
from bench.figures import Figure, arguments, tell

RECORDING = Path(__file__).parent.parent / "tests" / "data" / "recordings" / "vllm-0.32-kv-pressure.jsonl.xz"
ROUNDS = 5
GOAL_RATIO = 40.0
ENGINE_FAMILIES = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_swapped",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_success",
    "http_requests",
    "vllm:admission_rejections",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_draft_acceptance_rate",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
    "process_start_time_seconds",
)


def recorded_pages() -> list[bytes]:
    """Every page of the recording, in order."""
    rows = lzma.decompress(RECORDING.read_bytes()).splitlines()
    return [body.encode() for body in (json.loads(row)["body"] for row in rows) if body is not None]


def ms_a_page(read: Callable[[bytes], object], pages: list[bytes]) -> float:
    """Mean wall milliseconds for one page; the mean, since rare slow pages count in the daemon's CPU too."""
    started = time.perf_counter()
    for page in pages:
        read(page)
    return (time.perf_counter() - started) / len(pages) * 1000


def read_theirs(page: bytes) -> int:
    """What anyone would write with prometheus_client: walk all families and samples."""
    return sum(len(family.samples) for family in text_string_to_metric_families(page.decode()))


def main() -> int:
    """Measure and tell."""
    rounds = 2 if arguments(__doc__).parse_args().short else ROUNDS
    pages = recorded_pages()
    reader = Reader(ENGINE_FAMILIES)
    series = len(reader.read(pages[0]).series)
    ours: list[float] = []
    cold: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):  # in turns, so that a busy machine is as unkind to both
        ours.append(ms_a_page(reader.read, pages))
        cold.append(ms_a_page(lambda page: Reader(ENGINE_FAMILIES).read(page), pages[::20]))
        theirs.append(ms_a_page(read_theirs, pages[::20]))
    warm_ms, cold_ms, theirs_ms = statistics.median(ours), statistics.median(cold), statistics.median(theirs)
    print(f"# {len(pages)} pages of about {len(pages[0])} bytes, {series} series asked for, medians of {rounds} rounds")
    return tell([Figure("parse_prometheus_client", theirs_ms, "ms"), Figure("parse_first_page", cold_ms, "ms"),
                 Figure("parse_first_page_ratio", theirs_ms / cold_ms, "x"),
                 Figure("parse_next_page", warm_ms, "ms"),
                 Figure("parse_next_page_ratio", theirs_ms / warm_ms, "x", GOAL_RATIO, at_least=True)])


if __name__ == "__main__":
    sys.exit(main())
