"""docs/pages.md: the page of every rule, as PagerDuty and Slack get it. `python -m tests.make_pages` writes it anew.

One node, ten minutes of its life (`made`), and of each rule a story (`STORIES`): what its signal said when it fired.
The texts are the product's own; a rule without a story is told with its number alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.model import Alert, Batch, Book, EngineFacts, GpuFacts, Rule, Signal
from agent.node import Node, Setup
from agent.page import LOAD, OF_HEAT, OF_POWER, OF_RANK
from agent.signals import SIGNALS, Target
from agent.spark import SLOT_S, SLOTS, Sparks
from rules import severity_of
from tests.scenes import SLO, T0, built_in, samples

GOLDEN = Path(__file__).resolve().parents[1] / "docs" / "pages.md"
NODE, ENGINE, USERS = "gpu-17", "llama-70b", "https://llm.example/v1"
UUIDS = [f"GPU-8f6a{n}" for n in range(4)]
HOT = UUIDS[3]
END = T0 + 600.0
SINCE_S = 240.0


@dataclass(frozen=True)
class Story:
    """What a rule's signal said: its number, its evidence, and how it came there in ten minutes (from, to)."""

    value: float
    evidence: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ENGINE
    trend: tuple[float, float] | None = None
    method: str = "exact"


def p99(p99_s: float, slo_s: float, slow: int, n: int) -> dict[str, Any]:
    """The evidence of a slow share."""
    return {"p99_s": p99_s, "p99_over": False, "n": float(n), "window_s": 300.0, "slow": float(slow),
            "possibly_slow": float(slow), "slo_s": slo_s, "bounds_s": [slo_s, slo_s]}


def xid(text: str, do: str) -> dict[str, Any]:
    """The evidence of an Xid."""
    return {"text": text, "do": do, "codes": [], "action": do}


# Of error rates the value is the Wilson 95 % lower bound: of 9 in 240 (3.75 %) 1.98 %, of 61 in 280 (21.8 %) 17.4 %.
RANK = {"slow_rank": "3", "slow_gpu": HOT, "slow_s": 171.0, "median_s": 150.0, "steps": 4200.0}
STORIES: Mapping[str, Story] = {
    "queue-age": Story(1.24, {"waiting": 9.0, "low_s": 1.0, "high_s": 1.5}, trend=(0.0, 1.24), method="bound"),
    "kv-cache-utilization": Story(0.93, trend=(0.61, 0.93)),
    "preemptions": Story(4.0, trend=(0.0, 4.0)), "preemption-storm": Story(83.0, trend=(2.0, 83.0)),
    "graph-fallback": Story(0.04, {"eager_share": 0.04, "eager_steps": 400.0, "steps": 10000.0}, trend=(0.0, 0.04)),
    "ttft-p99": Story(0.031, p99(1.25, 0.5, 19, 400), trend=(0.31, 1.25)),
    "ttft-p99-undecided": Story(0.031, p99(0.71, 0.5, 2, 400), trend=(0.31, 0.71)),
    "itl-p99": Story(0.021, p99(0.212, 0.15, 281, 11000), trend=(0.096, 0.212)),
    "itl-p99-undecided": Story(0.021, p99(0.18, 0.15, 40, 11000), trend=(0.096, 0.18)),
    "latency-p99": Story(0.03, p99(46.0, 45.0, 14, 400), trend=(31.0, 46.0)),
    "latency-p99-undecided": Story(0.03, p99(46.0, 45.0, 2, 400), trend=(31.0, 46.0)),
    "error-burn-fast": Story(1.4, {"burn_1h": 20.2, "burn_5m": 31.0, "burn_6h": 5.0, "burn_30m": 25.0}),
    "error-burn-slow": Story(1.2, {"burn_1d": 3.6, "burn_2h": 4.1, "burn_3d": 1.1, "burn_6h": 2.0}),
    "node-error-burn-fast": Story(1.4, {"burn_1h": 20.2, "burn_5m": 31.0, "burn_6h": 5.0, "burn_30m": 25.0}, NODE),
    "node-error-burn-slow": Story(1.2, {"burn_1d": 3.6, "burn_2h": 4.1, "burn_3d": 1.1, "burn_6h": 2.0}, NODE),
    "rank-spread": Story(0.12, RANK, trend=(0.01, 0.12)), "rank-straggler": Story(0.22, RANK, trend=(0.01, 0.22)),
    "rank-clock-spread": Story(0.439, RANK | {"slow_rank": 3, "sm_clock_mhz": 1110.0, "fastest_mhz": 1980.0,
                                              "reason": "hardware thermal"}, trend=(0.0, 0.439)),
    "gpu-temperature": Story(91.0, {}, HOT, trend=(63.0, 91.0)),
    "gpu-thermal-limit": Story(-2.0, {"gpu_temp_c": 91.0, "own_limit_c": 89.0, "slowed": True}, HOT,
                               trend=(63.0, 91.0)),
    "prefix-cache-hit-rate": Story(0.31, {"hits_tokens": 3100.0, "queries_tokens": 10000.0}, trend=(0.64, 0.31)),
    "qps-change": Story(0.71, {"requests": 61.0, "30 min before": 210.0}, trend=(0.05, 0.71)),
    "gpu-utilization": Story(0.31, {}, HOT, trend=(0.92, 0.31)),
    "gpu-memory": Story(0.961, {}, HOT, trend=(0.92, 0.961)),
    "gpu-memory-low": Story(0.6, {"free_bytes": 320e6, "floor_bytes": 536870912.0, "free_bytes_before": 700e6}, HOT),
    "gpu-memory-growth": Story(0.034, {"from_bytes": 66e9, "to_bytes": 69e9}, HOT, trend=(0.01, 0.034)),
    "swapped": Story(3.0, trend=(0.0, 3.0)),
    "error-rate": Story(0.0198, {"errors": 9.0, "requests": 240.0}, trend=(0.0, 0.0198)),
    "error-rate-high": Story(0.174, {"errors": 61.0, "requests": 280.0}, trend=(0.0, 0.174)),
    "outside-engine": Story(0.41, {"user_s": 0.61, "inside_s": 0.2, "n": 30.0, "n_inside": 30.0}, USERS,
                            trend=(0.02, 0.41), method="the same question at the engine"),
    "outside-engine-whole": Story(0.38, {"user_s": 0.74, "inside_s": 0.36, "n": 30.0, "n_inside": 30.0}, USERS,
                                  trend=(0.02, 0.38), method="the same question at the engine"),
    "user-error-rate": Story(0.174, {"errors": 61.0, "requests": 280.0}, USERS, trend=(0.0, 0.174)),
    "user-ttft-p99": Story(0.031, p99(1.4, 0.5, 19, 400), USERS, trend=(0.4, 1.4)),
    "user-itl-p99": Story(0.021, p99(0.25, 0.15, 281, 11000), USERS, trend=(0.1, 0.25)),
    "spec-decode-acceptance": Story(0.38, {"accepted_tokens": 3800.0, "drafted_tokens": 10000.0}, trend=(0.7, 0.38)),
    "business-metric": Story(0.207, {"now": 8120.0, "before": 10240.0, "back": "a week ago"}, 'orders{region="eu"}',
                             trend=(0.02, 0.207)),
    "business-metric-day": Story(0.11, {"now": 8120.0, "before": 9124.0, "back": "a day ago"}, 'orders{region="eu"}'),
    "cpu-preprocessing": Story(0.97, {"text": "its front end uses 97% of one core, and Python has one for it"}),
    "cold-start-slow": Story(6.1, {"text": "TTFT 1.9 s in the first 5 min after its start, 310 ms since"}),
    "cache-fragmented": Story(0.44, {"text": "llama-1 finds 21% of its prompt tokens in its cache, llama-0 65%"}, NODE),
    "restarts-together": Story(2.0, {"text": "2 replicas started within 5 min: llama-0, llama-1"}, NODE),
    "overload-everywhere": Story(0.9, {"text": "each of 3 replicas has a request that has queued 900 ms or longer"},
                                 NODE),
    "pipeline-bubble": Story(0.41, {"text": 'pipeline-bubble{stage="1"} waits 41% of the time'}, NODE),
    "members-missing": Story(1.0, {"text": "missing: rank 5 of llama-70b"}),
    "experts-hot": Story(2.3, {"text": "the busiest expert GPU of llama-70b has 2.3× the mean load"}, NODE),
    "experts-rebalancing": Story(9.0, {"text": "experts were moved 9 times within an hour"}, NODE),
    "handover-queue": Story(0.7, {"text": "21 wait for their KV cache from prefill (21 transfer), 9 run"}),
    "kv-transfer-failed": Story(3.0, {"text": "3 KV transfers failed in 10 min (3 transfer)"}),
    "handover-state": Story(14.0, {"text": (
        "prefill holds 30 requests or more that decode has not fetched, +14 in 10 min")}),
    "pool-ratio": Story(6.0, {"text": ("6.0 requests wait at each of 2 prefill engines; of 4 decode engines the fullest"
                                       " KV cache is 22% full")}, NODE),
    "feature-transfer-failed": Story(2.0, {"text": "2 transfers of features failed at encoder-0"}, NODE),
    "first-output-elsewhere": Story(0.62, {"text": "of the mean 1.6 s to the first token 990 ms is neither queue nor"
                                                   " prefill: encoder, transfer or front end"}),
    "promotion-traffic": Story(0.71, {"text": (
        "cache is moved up for 71% of the time; 12.0 times as much was written down")}),
    "replica-hotspot": Story(2.4, {"text": "llama-0 got 812 of 1015 requests, 2.4× its share of 3 replicas"}, NODE),
    "rollout-tail": Story(7.5, {"text": "p99 of whole answers 90 s, median 12 s"}),
    "weights-stale": Story(2.0, {"text": "llama-1 is 2 versions behind llama-0"}, NODE),
    "engine-down": Story(4.0, {"failing": "/health", "failed_reads": 4.0}),
    "engine-slow": Story(4.0, {"late_reads": 4.0}),
    "engine-stopped": Story(4.0, {"failed_reads": 4.0, "failing": "TCP", "starting": True}),
    "engine-stuck": Story(1.1, {"running": 3.0, "waiting": 2.0, "flat_s": 132.0, "waiting_alone_s": 0.0}),
    "blind": Story(1.0, {"lost": {"kv_cache_utilization of llama-70b": (
        "vllm:gpu_cache_usage_perc is gone; since 0.11 it is vllm:kv_cache_usage_perc")}}),
    "watcher": Story(1.2, {"failing_s": 360.0}, "pagerduty"),
    "xid-gpu": Story(1.0, xid("Xid 79 (the GPU has fallen off the bus), noticed by pid 12 python3",
                              "drain the node and reboot it"), HOT),
    "xid-memory": Story(1.0, xid("Xid 95 (uncontained memory error)", "reset the GPU"), HOT),
    "xid-link": Story(1.0, xid("Xid 74 (NVLink error) on link 5", "reset the GPUs at both ends together"), HOT),
    "xid-app": Story(1.0, xid("Xid 94 (contained memory error) at pid 812 VLLM::Worker_TP3",
                              "restart what ran on this GPU; the GPU itself stays usable"), HOT),
    "replicas-missing": Story(1.0, {"text": "1 of 3 replicas is not Ready"}, "llm/llama-70b"),
    "gpu-allocatable": Story(1.0, {"text": "Kubernetes gives 3 of 4 GPUs to pods"}, NODE),
    "xid-ticket": Story(1.0, xid("Xid 63 (a row will be remapped)", "reset the GPU at the next quiet hour"), HOT),
    "xid-note": Story(1.0, xid("Xid 43 (a process was stopped)", "nothing to do"), HOT),
    "kernel-log-forged": Story(2.0, {"text": "2 line(s) that only look like the driver's; the last: NVRM: Xid … 79"},
                               NODE),
    "kernel-log-gap": Story(40.0, {"text": "40 kernel messages were overwritten before they were read"}, NODE),
    "gpu-lost": Story(1.0, {"text": "lost: NVML says GPU is lost"}, HOT),
    "gpu-count": Story(1.0, {"text": "1 of 4 GPUs missing: NVML shows 3, PCI 3, /dev/nvidia* 4"}, NODE),
    "driver-mismatch": Story(1.0, {"text": (
        "the driver's library and the loaded kernel module are of different versions")}, NODE),
    "device-access": Story(1.0, {"text": "the kernel shows the GPUs and NVML may not use them"}, NODE),
    "gpu-recovery": Story(4.0, {"text": "the driver asks: reset the GPU", "do": "reset the GPU"}, HOT),
    "gpu-ecc-uncorrected": Story(1.0, {"text": "1 uncorrected memory error(s)"}, HOT),
    "gpu-ecc-rate": Story(14.0, {"text": "14 corrected memory errors a second"}, HOT, trend=(0.0, 14.0)),
    "gpu-remap-pending": Story(1.0, {"text": "a remapped row waits for a reset"}, HOT),
    "gpu-remap-failed": Story(1.0, {"text": "remapping a memory row has failed"}, HOT),
    "gpu-spare-rows": Story(1.0, {"text": "1 memory bank(s) without a spare row"}, HOT),
    "gpu-retired-pages": Story(1.0, {"text": "12 pages are retired, one waits for a reset"}, HOT),
    "gpu-memory-temperature": Story(3.0, {"memory_temp_c": 98.0, "memory_limit_c": 95.0}, HOT, trend=(83.0, 98.0)),
    "gpu-nvlink-down": Story(1.0, {"text": "NVLink down: link 5; 17 are up"}, HOT),
    "gpu-nvlink-recovery": Story(4.0, {"text": "NVLink recovered 4 times"}, HOT),
    "gpu-nvlink-errors": Story(31.0, {"text": "31 NVLink replays and CRC errors a second"}, HOT, trend=(0.0, 31.0)),
    "gpu-pcie-link": Story(0.5, {"text": "PCIe gen 5 x8 of gen 5 x16"}, HOT),
    "gpu-pcie-replays": Story(2.4, {"text": "74 PCIe replays a minute"}, HOT),
    "gpu-fabric": Story(1.0, {"text": "fabric state in progress, status 0"}, HOT),
    "gpu-power-brake": Story(0.78, {"text": "power brake for 7.8 min of the last 10 min"}, HOT, trend=(0.0, 0.78)),
    "gpu-thermal-slowdown": Story(0.78, {"text": "hardware thermal slowdown for 7.8 min of the last 10 min"}, HOT,
                                  trend=(0.0, 0.78)),
    "gpu-persistence": Story(1.0, {"text": "persistence mode is off"}, HOT),
    "drill-orphaned": Story(1.0, {"text": "packet-loss left its table: nft delete table inet tocsin_7f3a"},
                            "run-20261129-1000"),
    "no-drill": Story(1.0, {"text": "due since 2026-11-03: too few healthy replicas (1 of 2)"}, "monthly-engine-loss"),
}


def made(*, busy: bool = False, hot: bool = False, braked: bool = False) -> Node:
    """Ten minutes of a node without errors: four GPUs, one engine of vLLM: calm, under load, one GPU hot or braked."""
    rules = tuple(built_in().values())
    target = Target(ENGINE, (ENGINE,), SLO, gpus=(0, 1, 2, 3), address="127.0.0.1:8000", port=8000)
    here = Node(Setup(NODE, 5.0, SLO, (target,), rules, severity_of, external_url="https://tocsin.example/gpu-17"))
    for n in range(121):
        at = END - 600.0 + n * 5.0
        here.take(Batch(f"engine:{ENGINE}", at, 0.01, tuple(samples(ENGINE, at, page_at(n * 5.0, busy=busy))),
                        EngineFacts(ENGINE, (ENGINE,), "vllm")))
        told = [s for i, uuid in enumerate(UUIDS)
                for s in samples(uuid, at, gpu_at(i, n / 120 if hot else 0.0, braked=braked))]
        facts = tuple(GpuFacts(uuid, i, "NVIDIA H200", f"0000:{i + 1:x}b:00") for i, uuid in enumerate(UUIDS))
        here.take(Batch("nvml", at, 0.01, tuple(told), gpus=facts))
    here.step(END, 5.0)
    return here


def page_at(at_s: float, *, busy: bool) -> dict[str, float | None]:
    """What the engine tells: 4 requests/s of 800 + 200 tokens, ITL 45 ms; mean TTFT 200 ms, or 1.2 s (0.9 s queue)."""
    n = at_s * 4
    found: dict[str, float | None] = {
        "running": 32.0 if busy else 18.0, "waiting": 9.0 if busy else 0.0, "kv_usage": 0.93 if busy else 0.52,
        "kv_blocks": 27000.0, "kv_block_tokens": 16.0, "asleep": 0.0, "preemptions": 0.0, "prompt_tokens": n * 800,
        "generation_tokens": n * 200, "queue_time.sum": n * (0.9 if busy else 0.0), "queue_time.count": n,
        "finished.stop": n, "finished.error": 0.0, "prefix_queries": n * 800, "prefix_hits": n * 480,
        "ttft.0.25": n * (0.2 if busy else 0.9), "ttft.0.5": n * (0.6 if busy else 1), "ttft.+Inf": n,
        "ttft.sum": n * (1.2 if busy else 0.2), "ttft.count": n,
        "itl.0.05": n * 150, "itl.0.1": n * 200, "itl.0.15": n * 200, "itl.+Inf": n * 200,
        "itl.sum": n * 200 * 0.045, "itl.count": n * 200}
    return found


def gpu_at(index: int, done: float, *, braked: bool = False) -> dict[str, float | None]:
    """What NVML tells of a GPU: number 3 climbs from 63 to 91 °C and is slowed by its hardware, or by the server."""
    hot = index == 3
    slowed = hot and (done > 0.3 or braked)
    return {"gpu_temp_c": 63.0 + (28.0 * done if hot else index), "gpu_util": 0.97,
            "gpu_sm_clock_mhz": 1110.0 if slowed else 1980.0, "gpu_sm_clock_max_mhz": 1980.0,
            "gpu_throttle": (128.0 if braked else 64.0) if slowed else 0.0, "gpu_mem_total": 150e9,
            "gpu_mem_used": 130e9, "gpu_mem_free": 20e9}


def told(here: Node, rule: Rule) -> tuple[str, str]:
    """Title and body of a rule's page on a node."""
    story = STORIES.get(rule.id) or Story(rule.factor * 1.2 if rule.slo is None else 1.0)
    key, limit = (rule.id, story.subject), here.limit_of(rule, story.subject)
    signals, book, unit = dict(here.signals), here.book, SIGNALS[rule.signal][0].unit
    here.signals[key] = Signal(rule.signal, story.subject, "value", END, story.value, unit, story.method,
                               story.evidence)
    here.sparks = Sparks()
    start, stop = story.trend or (story.value, story.value)
    for n in range(SLOTS if story.trend else 0):
        share = max(0.0, (n - 7) / (SLOTS - 8))
        here.sparks.take(END - (SLOTS - 1 - n) * SLOT_S, {key: start + (stop - start) * share})
    alert = Alert(rule.id, story.subject, "firing", rule.severity, END - SINCE_S, END - SINCE_S, seen_at=END,
                  value=story.value, limit=limit)
    here.book = Book({key: alert}, book.resolved_at)
    here.scene.memo.clear()
    texts = here.annotations(alert)
    here.book, here.signals = book, signals
    return texts["summary"], texts["description"]


HEAD = """# Every page

What PagerDuty and Slack get of each rule, on a node in trouble that a test made up: `python -m tests.make_pages` writes
this file. To be read as a stranger would at night.
"""


def document() -> str:
    """The whole of docs/pages.md."""
    calm, busy, hot, braked = made(), made(busy=True), made(hot=True), made(braked=True)
    lines = [HEAD]
    for rule in sorted(built_in().values(), key=lambda rule: ("page", "ticket", "info").index(rule.severity)):
        here = busy if rule.signal in LOAD else hot if rule.signal in OF_HEAT | OF_RANK else \
            braked if rule.signal in OF_POWER else calm
        title, body = told(here, rule)
        shown = [title, "", *body.split("\n")]
        lines += [f"## {rule.id} ({rule.severity})", "", *(f"    {line}" for line in shown), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(document())
