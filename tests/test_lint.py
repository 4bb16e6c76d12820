"""The twelve principles: each with a deployment that keeps it and one that does not; the seed's arithmetic by hand."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from msgspec import convert

from agent import lint, lint_facts, lint_report, lint_running
from agent.__main__ import main
from agent.budget import Layout, Shape, budget, kv_token_bytes, least_gpus, shape_of
from agent.config import CanaryConfig, Config, EngineConfig, ProbeConfig, load_all
from agent.daemon import setup_of
from agent.lint_case import Facts
from agent.model import FoundEngine
from agent.signals import CATALOGUE, Target
from agent.sources.discovery import Process, options_of
from agent.weights import Form, Held, held
from drills.config import drills_of
from tests.test_node import node, restarted

NOW = 1_000_000_000.0
DAY = 86400.0
LLAMA_2_7B = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
              "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000, "torch_dtype": "float16"}
LLAMA_3_8B = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16"}
LLAMA_70B = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
             "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "torch_dtype": "bfloat16"}
GPU = {"gpu_bytes": 80e9, "gpus": 1.0}
LATENCY: dict[str, Any] = {"profile": "latency"}
THROUGHPUT: dict[str, Any] = {"profile": "throughput"}
SPECULATES = {"speculative-config": "{}"}


def facts(options: dict[str, str] | None = None, **more: Any) -> Facts:
    """An engine of vLLM's whose command line has these options."""
    return Facts("llama", "vllm", options={} if options is None else options, now=NOW, **more)


def row(rule: str, value: float | None = 1.0, state: str = "OK") -> dict[str, Any]:
    """A row of `check`."""
    return {"rule": rule, "subject": "llama", "state": state, "value": value, "unit": "s", "text": ""}


def canary(*, from_: float, to: float, verdict: str = "pass", side: str = "new") -> dict[str, Any]:
    """One that named this engine; when it began and ended, in days ago."""
    return {"started": NOW - from_ * DAY, "at": NOW - to * DAY, "verdict": verdict, "side": side}


def drill(fault: str, days_ago: float = 3.0, verdict: str = "PASS") -> dict[str, Any]:
    """A row of `drill history`."""
    return {"drill": fault, "fault": fault, "verdict": verdict, "started": NOW - days_ago * DAY}


ALL_DRILLS = [drill(fault) for fault in ("process-kill", "gpu-reset", "packet-loss", "upstream-timeout")]
ALL_RULES = [row(rules[0]) for rules in lint_running.WATCHED.values()]
CHANGED = [{"at": NOW - 4 * DAY, "what": "--max-num-seqs 32 → 64"}]
YOUNG = {**row("outside-engine", None, "UNKNOWN"), "window_s": 900.0, "evidence": {"young": True}}
CAP = {"by": "sequence-cap", "name": "sequence cap", "why": "4 wait and exactly 32 run in every read",
       "knob": "--max-num-seqs over 32 (up to 90: at this length so many fit in the KV cache)",
       "no_help": "a larger chunk", "evidence": {"running": 32.0, "fits": 90}}
BINDS = {"name": "KV-bound", "why": "KV cache 98 % full", "knob": "more KV blocks", "no_help": "a larger chunk"}


def long(options: dict[str, str] | None = None, **numbers: float | None) -> Facts:
    """Llama 3 8B with a context of 131,072 tokens on a card of 80 GB, for people who wait."""
    return facts(options or {"max-num-seqs": "32"}, model=LLAMA_3_8B, context_tokens=131072.0, **LATENCY,
                 numbers={**GPU, "capacity_tokens": 430_000.0, **numbers})


def finding(number: int, of: Facts) -> dict[str, Any]:
    """What is found on one principle."""
    return next(one for one in lint.judge(of) if one["number"] == number)


@pytest.mark.parametrize(("number", "right", "wrong", "change"), [
    (1, facts({"max-num-seqs": "32"}, **LATENCY), facts({"max-num-seqs": "64"}, **LATENCY), "--max-num-seqs 32"),
    (1, facts({"max-num-seqs": "128"}, **THROUGHPUT), facts({"max-num-seqs": "16"}, **THROUGHPUT), "--max-num-seqs"),
    (1, facts({"max-num-seqs": "16", **SPECULATES}, **LATENCY), facts({"max-num-seqs": "256", **SPECULATES},
     **THROUGHPUT), "--speculative-config"),
    (1, facts({"max-num-seqs": "16"}, **LATENCY), facts({"max-num-seqs": "16", "no-enable-chunked-prefill": ""},
     **LATENCY), "--enable-chunked-prefill"),
    (2, facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=4096.0, numbers={**GPU, "gpus": 4.0}),
     facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=4096.0, numbers=GPU), "--tensor-parallel-size 4"),
    (2, facts({"max-num-seqs": "4"}, context_tokens=1024.0, numbers={"capacity_tokens": 8192.0}),
     facts({"max-num-seqs": "32"}, context_tokens=1024.0, numbers={"capacity_tokens": 8192.0, "kv_usage": 0.97,
                                                                   "preemptions": 3.0}), "more room for the KV cache"),
    (3, facts(signals=[row("outside-engine", 0.004)]), facts(signals=[row("outside-engine", 0.08)]), "proxies"),
    (4, facts(evidence={"streamed": 0.97}), facts(evidence={"streamed": 0.2}), "stream"),
    (5, facts(binds={**BINDS, "by": "kv-bound"}), facts(binds={**BINDS, "by": "hardware-bound"}), "cool or feed"),
    (5, facts(binds={**BINDS, "by": "decode-bound"}),
     facts(binds={**BINDS, "by": "upstream", "evidence": {"router_queue": 7.0}}), "the router's limits"),
    (6, facts({"quantization": "fp8"}, evidence={"outlier_ratio": 40.0}),
     facts({"quantization": "fp8"}, evidence={"outlier_ratio": 180.0}), "weights only"),
    (6, facts({"quantization": "awq"}), facts({"quantization": "fp8"}), "outlier_ratio"),
    (7, facts({"max-num-seqs": "16", **SPECULATES}), facts({"max-num-seqs": "64", **SPECULATES}), "--max-num-seqs 16"),
    (7, facts({"max-num-seqs": "16", **SPECULATES}, numbers={"acceptance": 0.7, "drafted": 1000.0}),
     facts({"max-num-seqs": "16", **SPECULATES}, numbers={"acceptance": 0.3, "drafted": 1000.0}), "draft"),
    (8, facts(changes=CHANGED, canaries=[canary(from_=3, to=2)]),
     facts(changes=CHANGED, canaries=[canary(from_=3, to=2, verdict="fail")]), "tocsin canary"),
    (9, facts(signals=ALL_RULES), facts(signals=[*ALL_RULES[:-1], row("ttft-p99", None, "UNKNOWN")]), "business"),
    (10, facts(drills=ALL_DRILLS), facts(drills=[*ALL_DRILLS[1:], drill("process-kill", verdict="ABORTED")]),
     "process-kill"),
    (10, facts(drills=ALL_DRILLS), facts(drills=[*ALL_DRILLS[1:], drill("process-kill", 40.0)]), "process-kill"),
    (11, facts({"quantization": "awq"}, evidence={"score_before": 71.2, "score_after": 70.9}),
     facts({"quantization": "awq"}, evidence={"score_before": 71.2, "score_after": 66.0}), "loses less"),
    (10, facts(drills=ALL_DRILLS), facts(drills=[drill(one["fault"], verdict="FAIL") for one in ALL_DRILLS]),
     "tocsin report gpu-reset` says what did not hold"),
    (11, facts(model=LLAMA_70B), facts(cache={"cache_dtype": "fp8_e4m3"}), "score_before"),
    (12, facts(signals=[row("user-ttft-p99", 0.4)]), facts(signals=[row("ttft-p99", 0.4)]), "canary"),
])
def test_a_right_and_a_wrong_deployment(number: int, right: Facts, wrong: Facts, change: str) -> None:
    """Each finding has its evidence; what is at odds says what it costs and what to change."""
    judged = [finding(number, of) for of in (right, wrong)]
    assert [one["verdict"] for one in judged] == ["kept", "at odds"], judged
    assert all(one["evidence"] for one in judged)
    assert judged[1]["costs"]
    assert change in judged[1]["change"]


FEWER_DRAFTS = {"speculative-config": '{"num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 512, 0]]}'}


def of_kind(kind: str, options: dict[str, str] | None = None, **more: Any) -> Facts:
    """Another engine whose command line has these options."""
    return replace(facts(options, **more), kind=kind)


@pytest.mark.parametrize(("story", "number", "of", "verdict", "words"), [
    # Principle 1: each column of the seed's table.
    ("nobody said", 1, facts({"max-num-seqs": "32"}), "cannot tell", "profile: latency"),
    ("drafting is said", 1, facts({"max-num-seqs": "32"}, **LATENCY), "kept", "whether to draft: principle 7"),
    ("fewer than the table's", 1, facts({"max-num-seqs": "4"}, **LATENCY), "kept", "fewer than 16"),
    ("chunks are said", 1, facts({"max-num-seqs": "128"}, **THROUGHPUT), "kept", "chunked prefill may stay on"),
    ("both are wrong", 1, facts({"max-num-seqs": "64", "no-enable-chunked-prefill": ""}, **LATENCY), "at odds",
     "--max-num-seqs 32 (16 to 32), or, if nobody waits for its answers, profile: throughput; --enable-chunked"),
    ("vLLM's default of 128 or more", 1, facts(**LATENCY), "at odds", "--max-num-seqs is not given"),
    ("it may stand in the engine's file", 1, facts({"config": "/etc/vllm.yaml"}, **LATENCY), "cannot tell",
     "its --config file may say it"),
    ("SGLang's default is its own", 1, of_kind("sglang", **LATENCY), "cannot tell", "--max-running-requests"),
    ("SGLang's own name", 1, of_kind("sglang", {"max-running-requests": "64", "chunked-prefill-size": "4096"},
     **LATENCY), "at odds", "--max-running-requests 32"),
    ("SGLang's way to turn it off", 1, of_kind("sglang", {"max-running-requests": "32", "chunked-prefill-size": "-1"},
     **LATENCY), "at odds", "turn chunked prefill on"),
    ("whether SGLang drafts", 1, of_kind("sglang", {"max-running-requests": "128"}, **THROUGHPUT), "cannot tell",
     "speculative decoding is not known"),
    # Principle 2: 4 × 1,024 = 4,096 tokens are asked for. What the engine set aside for all of them is enough, ...
    ("all at full length", 2, facts({"max-num-seqs": "4"}, context_tokens=1024.0, numbers={"capacity_tokens": 4096.0}),
     "kept", "just what is asked for"),
    ("4 % spare, its GPU known", 2, facts({"max-num-seqs": "4"}, context_tokens=1024.0, weight_bytes=70e9,
     numbers={"capacity_tokens": 4260.0, **GPU}), "kept", "4 % more than is asked for"),
    ("4 % spare, its GPU unknown", 2, facts({"max-num-seqs": "4"}, context_tokens=1024.0,
     numbers={"capacity_tokens": 4260.0}), "kept", "4 % more than is asked for"),
    ("all fit, and it was full", 2, facts({"max-num-seqs": "4"}, context_tokens=1024.0,
     numbers={"capacity_tokens": 4096.0, "kv_usage": 0.97}), "kept", "all of full length find room at once"),
    # ... and where it did not, what was seen decides. 8B: 430,000 ÷ 131,072 = 3.3 sequences.
    ("nobody has seen it", 2, long(), "cannot tell", "3 of 32 sequences of full length find room at once"),
    ("seen for five seconds", 2, long(kv_usage=0.4, sequences=9.0, preemptions=0.0, watched_s=5.0), "cannot tell",
     "that has watched its usual load for 10 min"),
    ("seen for an hour", 2, long(kv_usage=0.8, sequences=30.0, preemptions=0.0, watched_s=3600.0), "kept",
     "seen in 60 min: its KV cache was at most 80 % full, at most 30 ran at once, none was preempted"),
    ("84 %: not 20 % to spare, and not full", 2, long(kv_usage=0.84, sequences=30.0, watched_s=3600.0), "cannot tell",
     "at most 84 % full"),
    ("nothing ran", 2, long(kv_usage=0.0, watched_s=3600.0), "cannot tell", "at most 0 % full"),
    ("full", 2, long(kv_usage=0.96, sequences=32.0, watched_s=60.0), "at odds", "newcomers wait for room"),
    ("preempted", 2, long(kv_usage=0.7, sequences=32.0, preemptions=2.0), "at odds", "--max-num-seqs 16 (not under 16"),
    ("at the table's least", 2, long({"max-num-seqs": "16"}, kv_usage=0.97), "at odds",
     "or another replica); a shorter --max-model-len, where nobody needs 131,072 tokens"),
    ("no capacity is told, and the weights are 16 GB of 80", 2, long(capacity_tokens=None), "cannot tell",
     "2 of 32 sequences of full length find room at once"),  # 66.7 − 16.1 − 1.5 = 49.1 GB, of 17.2 each
    ("one card of 24 GB has no room for one of 17.2", 2, long(capacity_tokens=None, gpu_bytes=24e9), "at odds",
     "--tensor-parallel-size 2, or a shorter --max-model-len"),  # 1.2 × (8 + 8.6 + 1.5) = 21.8
    ("SGLang's names", 2, of_kind("sglang", {"max-running-requests": "40"}, context_tokens=1024.0,
     numbers={"capacity_tokens": 4096.0, "kv_usage": 0.99}), "at odds", "a shorter longest sequence, where"),
    # What its GPU's size makes is not what it set aside, and one that runs is not refused.
    ("SGLang, 30 % of the card set aside", 2, of_kind("sglang", {"max-running-requests": "16",
     "mem-fraction-static": "0.3"}, model=LLAMA_3_8B, context_tokens=8192.0, numbers={
         **GPU, "kv_usage": 1.0, "sequences": 9.0, "watched_s": 3600.0}, **LATENCY), "at odds",
     "how much of it the engine set aside is not told | newcomers wait for room"),
    ("it runs on a card that has no room for one", 2, long(capacity_tokens=None, gpu_bytes=24e9, watched_s=60.0),
     "cannot tell", "not one sequence of full length finds room, and it runs"),
    ("it runs, with room to spare", 2, long(capacity_tokens=None, gpu_bytes=24e9, kv_usage=0.5, sequences=9.0,
     watched_s=3600.0), "kept", "at most 50 % full"),
    ("weights in the host's memory", 2, long({"max-num-seqs": "32", "cpu-offload-gb": "12"}, capacity_tokens=None,
     gpu_bytes=24e9), "cannot tell", "part of its weights lies in the host's memory"),
    ("of 32 seats ten were ever taken", 2, long({"max-num-seqs": "32"}, kv_usage=0.97, sequences=10.0,
     preemptions=2.0), "at odds", "or another replica); a shorter --max-model-len"),
    ("no seats at all", 1, facts({"max-num-seqs": "0"}, **LATENCY), "cannot tell", "--max-num-seqs 0 is none"),
    # What is taken already is not offered, and a quantized KV cache only after an evaluation.
    ("room that is left", 2, long(kv_usage=0.97), "at odds",
     "(--gpu-memory-utilization, --kv-cache-dtype fp8 after an evaluation of your own (principle 11), more GPUs, or"),
    ("97 % of the card", 2, long({"max-num-seqs": "32", "gpu-memory-utilization": "0.97"}, kv_usage=0.97), "at odds",
     "(--kv-cache-dtype fp8 after an evaluation of your own (principle 11), more GPUs, or"),
    ("and fp8", 5, facts({"gpu-memory-utilization": ".95", "kv-cache-dtype": "fp8"}, binds={**BINDS, "by": "kv-bound"}),
     "kept", "more KV blocks: more GPUs, or another replica; until then fewer"),
    ("SGLang, 88 %", 5, of_kind("sglang", {"mem-fraction-static": "0.88"}, binds={**BINDS, "by": "kv-bound"}), "kept",
     "more KV blocks: --mem-fraction-static, more GPUs"),
    # More seats into a KV cache that is full, or for drafts that pay at few: no two principles pull apart.
    ("throughput, preempted", 1, facts({"max-num-seqs": "16"}, numbers={"preemptions": 3.0}, **THROUGHPUT), "at odds",
     "more seats would only preempt; or, if people wait for its answers, profile: latency"),
    ("throughput, KV-bound", 1, facts({"max-num-seqs": "16", **SPECULATES}, binds={**BINDS, "by": "kv-bound"},
     **THROUGHPUT),
     "at odds", "first more room for the KV cache"),
    ("drafts that fall with the batch", 1, facts({"max-num-seqs": "128", **FEWER_DRAFTS}, **THROUGHPUT), "kept",
     "it drafts the less, the more run: principle 7"),
    ("16 seats and drafts", 1, facts({"max-num-seqs": "16", **SPECULATES}, **THROUGHPUT), "at odds",
     "profile: latency; with so many take --speculative-config away"),
    ("16 seats and drafts", 7, facts({"max-num-seqs": "16", **SPECULATES}, **THROUGHPUT), "kept",
     "not with as many seats as throughput wants: see principle 1"),
    ("seats in a cache that was full", 5, facts(binds=CAP, numbers={"preemptions": 3.0}, **THROUGHPUT), "kept",
     "turn there: another replica, or first more room"),
    ("TGI", 1, of_kind("tgi", {}, **LATENCY), "cannot tell", "no option of TGI's bounds it on a GPU"),
    ("at the table's least", 5, facts({"max-num-seqs": "16"}, binds={**BINDS, "by": "decode-bound"}, **LATENCY), "kept",
     "no fewer seats: 16 are the least of principle 1"),
    # Principle 5: seats only as principle 1 has them; few requests bind nothing.
    ("it waits for work", 5, facts(binds={**BINDS, "by": "upstream", "evidence": {"gpu_util": 0.3}}), "cannot tell",
     "the same under load"),
    ("32 seats are the most for latency", 5, facts(binds=CAP, **LATENCY), "kept", "another replica: 32 sequences"),
    ("24 seats", 5, facts(binds={**CAP, "evidence": {"running": 24.0, "fits": 90}}, **LATENCY), "kept",
     "--max-num-seqs up to 32 (principle 1: 32 at most)"),
    ("24 seats, room for 28", 5, facts(binds={**CAP, "evidence": {"running": 24.0, "fits": 28}}, **LATENCY), "kept",
     "--max-num-seqs up to 28"),
    ("nobody waits", 5, facts(binds=CAP, **THROUGHPUT), "kept", "turn there: --max-num-seqs over 32"),
    ("nobody said", 5, facts(binds=CAP), "kept", "where people wait for its answers not over 32 (principle 1)"),
    # Principles 6 and 11: not to have seen it is not to be sure.
    ("no flag, no file", 6, facts(), "cannot tell", "config.json cannot be read here"),
    ("no flag, no file", 11, facts(), "cannot tell", "config.json cannot be read here"),
    ("the model's own word", 6, facts(model=LLAMA_70B), "kept", "not quantized"),
    ("another file may", 11, facts({"config": "/etc/vllm.yaml"}, model=LLAMA_70B), "cannot tell", "another file may"),
    ("TGI may by its environment", 11, of_kind("tgi", model=LLAMA_70B), "cannot tell", "another file may"),
    ("quantized in the file", 11, of_kind("tgi", model={"quantization_config": {"quant_method": "awq"}}), "at odds",
     "awq"),
    ("a KV cache of FP8 alone, measured", 11, facts(cache={"cache_dtype": "fp8"}, evidence={
        "score_before": 71.2, "score_after": 71.0}), "kept", "KV cache fp8"),
    # Principle 7: a night in which one ran must not hide a day with 64.
    ("EAGLE pays, in 64 seats", 7, facts({"max-num-seqs": "64", **SPECULATES}, numbers={"running": 0.4,
     "sequences": 3.0}), "at odds", "--max-num-seqs 16 to 32 (it was never more than 3)"),
    ("EAGLE pays, in vLLM's seats", 7, facts(SPECULATES, numbers={"sequences": 3.0, "acceptance": 0.8,
     "drafted": 9e4}, **LATENCY), "at odds", "keep drafting, and hold it to small batches: --max-num-seqs 16 to 32"),
    ("40 ran, and people wait", 7, facts(SPECULATES, numbers={"sequences": 40.0}, **LATENCY), "at odds",
     "--max-num-seqs 16 to 32 first, as principle 1 has it, and replicas for the rest; else take --speculative"),
    ("nobody waits", 7, facts(SPECULATES, numbers={"sequences": 3.0}, **THROUGHPUT), "at odds",
     "take --speculative-config away"),
    ("2 of 5 drafted tokens", 7, facts({"max-num-seqs": "16", **SPECULATES}, numbers={"acceptance": 0.4,
     "drafted": 5.0}), "cannot tell", "40 % of 5 drafted tokens were accepted: too few to judge by"),
    ("EAGLE and vLLM's default", 7, facts(SPECULATES, numbers={"running": 0.4}), "at odds", "128 or more"),
    ("fewer drafts the more run", 7, facts({"max-num-seqs": "64", **FEWER_DRAFTS}), "kept", "fewer drafts"),
    ("from afar the most that was seen", 7, replace(facts(numbers={"acceptance": 0.7, "sequences": 40.0}),
     options=None), "at odds", "at most 40 ran at once"),
    ("from afar, idle", 7, replace(facts(numbers={"acceptance": 0.7}), options=None), "cannot tell", "batch size"),
    ("small batches in 256 seats", 7, facts({"max-num-seqs": "256"}, numbers={"sequences": 9.0}), "cannot tell",
     "at 16 or fewer it may pay"),
    ("the agent does not see it", 8, facts(signals=[]), "cannot tell", "the agent did not see its command line"),
    ("SGLang drafts", 7, of_kind("sglang", {"speculative-algorithm": "EAGLE", "max-running-requests": "64"}), "at odds",
     "--max-running-requests 16 to 32 where people wait for its answers (replicas for the rest), turn speculative"),
    ("vLLM's short names", 7, facts({"max-num-seqs": "64", "spec-method": "ngram"}), "at odds", "drafting is a loss"),
    # Principles 3, 9 and 12: what has begun is neither lost nor kept.
    ("an agent of two minutes", 3, facts(signals=[YOUNG]), "cannot tell", "when the agent has watched for 15 min"),
    ("at the engine's own address alone", 3, facts(signals=[{**row("outside-engine", None, "N/A"),
     "subject": "http://a:8000", "why": "an engine's own address"}]), "cannot tell", "http://a:8000: an engine's own"),
    ("a canary with three answers", 3, facts(signals=[row("outside-engine", None, "IDLE")]), "cannot tell",
     "when its canary has had more answers"),
    ("an agent of two minutes", 12, facts(signals=[YOUNG]), "cannot tell", "when the agent has watched for 15 min"),
    ("an agent of two minutes", 9, facts(signals=[*ALL_RULES[:-1], {**YOUNG, "rule": "business-metric"}]),
     "cannot tell", "not for long enough yet: a business metric"),
    # Principles 3 and 12: a canary of another model is none.
    ("another model's users", 12, facts(signals=[], strangers=["https://qwen.internal"]), "at odds",
     "measured at https://qwen.internal: of another engine"),
    ("another model's users", 3, facts(signals=[], strangers=["https://qwen.internal"]), "cannot tell",
     'urls: ["http://USERS", "http://127.0.0.1:8000"]'),
    # Principle 3: an estimate, and a wait of less than nothing.
    ("the engines' median of other prompts", 3, facts(signals=[{**row("outside-engine", 0.3),
     "method": "estimate: the engines' own median"}]), "cannot tell", "of other prompts: an estimate"),
    ("-300 ms", 3, facts(signals=[row("outside-engine", -0.3)]), "cannot tell", "no wait is negative"),
    ("whole answers", 3, facts(signals=[row("outside-engine-whole", 0.08)]), "at odds", "80 ms on every whole answer"),
    ("of two the one that is no estimate", 3, facts(signals=[{**row("outside-engine", -0.3), "method": "estimate: x"},
     row("outside-engine-whole", 0.02)]), "kept", "20 ms outside"),
    # Principle 8: a minute without a change is none.
    ("a minute", 8, facts(changes=[], watched_since=NOW - 60), "cannot tell", "seen so far, in 60 s"),
    ("eight days", 8, facts(changes=[], watched_since=NOW - 8 * DAY), "kept", "was seen in 8 d"),
    # Principle 9: what is not there is not watched.
    ("none of the nine", 9, facts(signals=[{**one, "state": "N/A"} for one in ALL_RULES]), "cannot tell",
     "0 of the 9 are watched"),
    ("no prefix cache", 9, facts(signals=[{**one, "state": "N/A" if one["rule"] == "prefix-cache-hit-rate" else "OK"}
     for one in ALL_RULES]), "kept", "8 of the 9 are watched"),
    # Principle 11: a KV cache of four bits is quantized, whatever it is called.
    ("NVFP4", 11, facts(model=LLAMA_70B, cache={"cache_dtype": "nvfp4"}), "at odds", "KV cache nvfp4"),
    ("TurboQuant", 11, facts({"kv-cache-dtype": "turboquant_4bit_nc"}, model=LLAMA_70B), "at odds", "turboquant_4bit"),
    ("INT4", 11, facts(model=LLAMA_70B, cache={"cache_dtype": "int4_per_token_head"}), "at odds", "int4_per_token"),
    ("16 bits by name", 11, facts(model=LLAMA_70B, cache={"cache_dtype": "bfloat16"}), "kept", "not quantized"),
    # Principle 10: the last drill of each failure counts.
    ("it failed, and then it passed", 10, facts(drills=[drill("gpu-reset", 9.0, "FAIL"), *ALL_DRILLS]), "kept",
     "5 drills held"),
    ("it passed, and then it failed", 10, facts(drills=[*ALL_DRILLS, drill("gpu-reset", 1.0, "FAIL")]), "at odds",
     "`tocsin drill run gpu-reset` again"),
    # Principle 10: a rank that is slow is no GPU that is lost.
    ("slow-rank", 10, facts(drills=[*(one for one in ALL_DRILLS if one["fault"] != "gpu-reset"), drill("slow-rank")]),
     "at odds", "not drilled: a GPU failure"),
])
def test_what_is_known_decides_and_nothing_else(story: str, number: int, of: Facts, verdict: str, words: str) -> None:
    """No option seen is no default known; what an engine calls its knobs is said to who runs that engine."""
    found = finding(number, of)
    said = " | ".join([*found["evidence"], *(found[key] or "" for key in ("costs", "change", "would_tell"))])
    assert (found["verdict"], words in said) == (verdict, True), (story, found)


@pytest.mark.parametrize(("story", "changed_days_ago", "canaries", "verdict"), [
    ("its canary after the change", [4], [canary(from_=3, to=2)], "kept"),
    ("one before it judged something else", [4], [canary(from_=6, to=5)], "at odds"),
    ("one that ran while it came judged both", [4], [canary(from_=5, to=3)], "at odds"),
    ("too late", [10], [canary(from_=2, to=1)], "at odds"),
    ("the first try failed, the second passed", [5], [canary(from_=4, to=3, verdict="fail"), canary(from_=2, to=1)],
     "kept"),
    ("one canary is not for two changes", [5, 3], [canary(from_=2, to=1)], "at odds"),
    ("one for each", [5, 3], [canary(from_=4.5, to=3.5), canary(from_=2, to=1)], "kept"),
    ("another engine had it first, this one was the old", [4], [canary(from_=6, to=5, side="old")], "kept"),
    ("and then it changed twice", [4, 3], [canary(from_=6, to=5, side="old")], "at odds"),
    ("old is not new", [4], [canary(from_=3, to=2, side="old")], "at odds"),
    ("32 days ago", [32], [], "kept"),
])
def test_each_change_has_its_own_canary(story: str, changed_days_ago: list[int], canaries: list[dict[str, Any]],
                                        verdict: str) -> None:
    """A change is judged by what ran under it alone, and is not told of for ever."""
    changes = [{"at": NOW - days * DAY, "what": "--max-num-seqs 32 → 64"} for days in changed_days_ago]
    assert finding(8, facts(changes=changes, canaries=canaries))["verdict"] == verdict, story


def test_a_deployment_as_most_are_is_not_sent_in_two_directions() -> None:
    """32 seats of 131,072 tokens each, three of which fit: not one principle asks for fewer than 16 or more than 32."""
    of = replace(long(kv_usage=0.5, sequences=32.0, preemptions=0.0, watched_s=3600.0), binds=CAP)
    found = {one["number"]: one for one in lint.judge(of)}
    assert [found[number]["verdict"] for number in (1, 2, 5)] == ["kept"] * 3
    said = " ".join(str(line) for number in (1, 2, 5) for line in (*found[number]["evidence"], found[number]["change"]))
    assert "--max-num-seqs over" not in said
    assert "--max-num-seqs 2" not in said


def test_a_config_json_of_another_model_is_said_and_left_out() -> None:
    """The engine has 4 GB for 30,517 tokens, 131 KB each; the folder that was found says 327,680 bytes, a 70B's."""
    cache = {"kv_cache_size_tokens": "30517", "kv_cache_memory_bytes": "4000000000", "num_gpu_blocks_override": "None"}
    found = finding(2, facts({"max-num-seqs": "8"}, model=LLAMA_70B, weight_bytes=140e9, context_tokens=8192.0,
                             cache=cache, numbers=GPU))
    assert (found["verdict"], found["evidence"]) == ("cannot tell", [
        ("a token takes 131,074 bytes of KV cache as the engine tells, and 327,680 by the config.json that was found:"
         " that is of another model, and is left out"),
        "asked for at most: 8 sequences × 8,192 tokens = 65,536 tokens, 8.59 GB",
        "its KV cache holds 30,517 tokens, 4 GB",
        "3 of 8 sequences of full length find room at once; who comes after them waits"])
    overridden = facts({"max-num-seqs": "8"}, model=LLAMA_70B, cache={**cache, "num_gpu_blocks_override": "160"})
    assert "another model" not in " ".join(finding(2, overridden)["evidence"])  # these bytes are not of these blocks


@pytest.mark.parametrize("quantization", [
    {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}])
def test_a_checkpoint_that_wants_its_kv_cache_in_fp8_is_no_other_model(quantization: dict[str, Any]) -> None:
    """Llama 3 8B: 2 × 32 × 8 × 128 × 1 byte are 65,536 a token; 4 GB for 61,035 tokens are as many."""
    cache = {"kv_cache_size_tokens": "61035", "kv_cache_memory_bytes": "4000000000", "cache_dtype": "auto"}
    of = facts({"max-num-seqs": "4"}, model={**LLAMA_3_8B, "quantization_config": quantization}, cache=cache,
               context_tokens=8192.0, numbers=GPU)
    memory = finding(2, of)
    assert memory["verdict"] == "kept"
    assert any(line.startswith("a token takes 65,536 bytes") for line in memory["evidence"]), memory
    assert any("KV cache fp8" in line for line in finding(11, of)["evidence"])
    kept_plain = {**cache, "kv_cache_size_tokens": "30517"}  # 131,074 bytes: this engine does not do so
    assert any(line.startswith("a token takes 131,072 bytes") for line in finding(2, replace(of, cache=kept_plain)
                                                                                  )["evidence"])
    unquantized = replace(of, cache={**cache, "cache_dtype": "bfloat16"})
    assert "KV cache fp8" not in " ".join(finding(11, unquantized)["evidence"])


@pytest.mark.parametrize("size", ["²", "٣", "9" * 400, "9" * 5000, "-1", "1e3", "nan"])
def test_what_is_no_number_is_not_known_and_stops_nobody(size: str) -> None:
    """One page with "²" on it, and lint ended for all engines of the node."""
    told = dict.fromkeys(("kv_cache_size_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override"), size)
    options = dict.fromkeys(("max-num-seqs", "tensor-parallel-size", "data-parallel-size", "dcp"), size)
    found = lint.judge(facts(options, cache=told, model=LLAMA_3_8B, context_tokens=8192.0, numbers=GPU, **LATENCY))
    assert [found[number - 1]["verdict"] for number in (1, 2)] == ["cannot tell"] * 2


@pytest.mark.parametrize("size", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_number_that_nothing_here_has_is_not_known(size: float) -> None:
    """Of a page as of NVML."""
    numbers = dict.fromkeys(("capacity_tokens", "gpu_bytes", "gpus", "sequences"), size)
    of = facts({"max-num-seqs": "16"}, model={**LLAMA_3_8B, "num_hidden_layers": 10**400}, numbers=numbers,
               context_tokens=size, cache={"kv_cache_size_tokens": "0"})
    assert "not known: weights, KV bytes a token, longest sequence, the GPU's memory" in finding(2, of)["evidence"][0]


def blocks(text: str) -> str:
    """What is to be written down of what lint says, without the spaces that all of it has before it."""
    return dedent("\n".join(line for line in text.split("\n") if line.startswith("  ")))


@pytest.mark.parametrize(("story", "of", "words"), [
    ("a configured engine", {"configured": "chat", "served": "meta/llama: 8"}, ["{engine: chat}", "process-kill"]),
    ("one that was found", {}, ["{engine: engine-8000}", "name: engine-8000"]),
    ("pods", {"pods_of": "llm/vllm"}, ["pod-kill", 'namespace: llm, selector: "app=vllm"', "gpu: GPU-UUID"]),
])
def test_what_lint_says_to_write_down_loads(story: str, of: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """As `config check` loads it: in JSON as it stands, and as it is folded on the page; with the schedule as well."""
    judged = lint.judge(facts({}, signals=[], drills=[], **{"url": "http://127.0.0.1:8000", **of}))
    said = {one["number"]: one["change"] or one["would_tell"] for one in judged}
    assert all(word in said[10] for word in words), (story, said[10])
    assert all(f"name: {name}," in said[10] for name in ("crash", "gpu-failure", "partition", "slow-upstream"))
    assert "`tocsin drill plan crash`, which touches nothing" in said[10]
    for number in (1, 3, 10, 12):
        page = "\n".join(lint_report._folded("Change: ", said[number]))
        inner = "\n".join(line[13:] for line in page.split("\n")[1:])
        for text in (blocks(said[number]), blocks(inner), blocks(said[number]).replace(
                "load:", 'schedule: {cron: "0 10 * * TUE#1"}, load:')):
            path = tmp_path / "tocsin.yaml"
            engines = "engines: [{name: chat, url: 'http://127.0.0.1:8000'}]\n"
            path.write_text(engines * (number == 10 and "configured" in of) + text)
            config, rules = load_all(path, {}, CATALOGUE)
            assert len(drills_of(config, rules.rules)) == (4 if number == 10 else 0), story


def test_an_engine_of_which_nothing_is_known_is_not_called_right() -> None:
    """No command line, no agent, no model: each of the twelve says what would tell, and none is kept."""
    found = lint.judge(Facts("llama", now=NOW))
    assert [one["verdict"] for one in found] == ["cannot tell"] * 12
    assert all(one["would_tell"] for one in found)


def test_what_the_cache_cannot_hold_is_at_odds_however_large_the_gpu_is() -> None:
    """8 sequences of 32,768 tokens on four GPUs that have room for them, and a cache that was made for 20,000."""
    of = facts({"max-num-seqs": "8"}, model=LLAMA_70B, context_tokens=32768.0,
               numbers={**GPU, "gpus": 8.0, "capacity_tokens": 20000.0})
    memory = finding(2, of)
    assert (memory["verdict"], "not one sequence of full length" in memory["costs"]) == ("at odds", True), memory


def test_the_worst_comes_first_and_the_page_says_what_to_do() -> None:
    """A colleague reads from the top."""
    found = lint.judge(facts({"max-num-seqs": "64", **SPECULATES}, evidence={"streamed": 0.97}, **LATENCY))
    head = {"engine": "llama", "url": "http://a:8000", "kind": "vllm", "model": "m", "version": "0.32.0"}
    lines = lint_report.report({"engines": [{**head, "findings": found}], "errors": ["b: refused"]})
    assert lines[0] == "Not looked at: b: refused"
    assert lines[2] == "llama (vllm 0.32.0, m): 2 at odds, 9 cannot tell, 1 kept"
    assert lines.index("AT ODDS") < lines.index("CANNOT TELL") < lines.index("KEPT")
    assert ("Change: --max-num-seqs 32 (16 to 32), or, if nobody waits for its answers, profile: throughput"
            in " ".join(" ".join(lines).split()))


def told(number: int, verdict: str, why: str, would_tell: str | None = None) -> dict[str, Any]:
    """A finding as `judge` has it."""
    return {"number": number, "principle": f"P{number}", "verdict": verdict, "evidence": [why], "costs": None,
            "change": None, "would_tell": would_tell, "section": ""}


def test_what_one_thing_would_tell_is_said_once() -> None:
    """Who looks on the engine's machine has answers to three; the page does not ask for it three times."""
    one = {"engine": "a", "url": "http://a:8000", "kind": "vllm", "model": "m", "version": None, "findings": [
        told(6, "cannot tell", "quantized?", "look there"), told(7, "cannot tell", "drafts?", "look there"),
        told(8, "cannot tell", "changed?", "an agent"), told(11, "cannot tell", "quantized?", "look there")]}
    assert lint_report.report({"engines": [one], "errors": []})[2:] == [
        "CANNOT TELL", "  6. P6", " 11. P11", "     quantized?", "  7. P7", "     drafts?",
        "     Would tell: look there", "  8. P8", "     changed?", "     Would tell: an agent"]


def test_what_is_so_of_all_engines_is_said_once() -> None:
    """Eight engines on a node, and one drill that nobody holds."""
    engines = [{"engine": name, "url": None, "kind": "vllm", "model": None, "version": None, "findings": [
        told(10, "at odds", "0 drills"), told(1, "kept", name)]} for name in "ab"]
    assert lint_report.report({"engines": engines, "errors": []}) == [
        "All 2 engines: 1 at odds", "", "AT ODDS", " 10. P10", "     0 drills",
        "", "a (vllm): 1 kept", "", "KEPT", "  1. P1", "     a",
        "", "b (vllm): 1 kept", "", "KEPT", "  1. P1", "     b"]


# --- the seed's arithmetic -------------------------------------------------------------------------------------------


def test_a_70b_model_on_one_80_gb_card_is_refused() -> None:
    """140 GB of weights: no KV cache is small enough. With 20 % on top it takes four such cards, not two."""
    assert held(Shape(80, 8, 128, parameters=70e9), Form("")) == Held(140e9, "70,000,000,000 parameters")
    assert not budget(weights=140e9, kv=0.0, gpu_bytes=80e9).fits
    assert least_gpus(weights=140e9, kv=0.0, gpu_bytes=80e9) == Layout(4, 1)  # on two: 1.2 × (70 + 1.5) = 85.8 GB


def test_the_seed_s_line_for_llama_2_7b_and_ours() -> None:
    """14 GB of weights; of its KV cache the seed prints 2.1 GB, its formula makes 68.7 GB, its text says 8 GB."""
    assert held(Shape(32, 32, 128, parameters=7e9), Form("")) == Held(14e9, "7,000,000,000 parameters")
    assert 2 * 32 * 128 * 4096 * 32 * 2 == 2_147_483_648  # as printed
    assert 2 * 32 * 4096 * 4096 * 32 * 2 == 68_719_476_736  # its formula, with the hidden size
    shape = shape_of(LLAMA_2_7B)
    assert shape is not None
    assert (shape.parameters, kv_token_bytes(shape, 2.0)) == (6_738_415_616.0, 524_288.0)  # 6.74 billion, 512 KiB
    assert kv_token_bytes(shape, 2.0) * 4096 * 32 == 68_719_476_736.0
    assert budget(weights=14e9, kv=8e9, gpu_bytes=40e9).fits  # the seed's 23.5 GB: 28.2 GB with 20 %
    assert not budget(weights=14e9, kv=32e9, gpu_bytes=40e9).fits  # its counterexample, 47.5 GB
    assert "2.1 GB" in " ".join(lint.explained(2))


@pytest.mark.parametrize(("story", "config", "token_bytes"), [
    ("Atlas: 320 KiB a token", LLAMA_70B, 327_680.0),
    ("MLA keeps one vector", {**LLAMA_70B, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
     61 * 576 * 2.0),
    ("a state is no KV cache", {**LLAMA_70B, "layer_types": ["linear_attention", "full_attention"]}, None),
    ("not told", {"model_type": "x"}, None),
])
def test_kv_bytes_of_a_token(story: str, config: dict[str, Any], token_bytes: float | None) -> None:
    """From the model's own file; what is not attention has no answer rather than a wrong one."""
    shape: Shape | None = shape_of(config)
    assert (None if shape is None else kv_token_bytes(shape, 2.0)) == token_bytes, story


# --- what is asked of the world --------------------------------------------------------------------------------------


def test_a_command_line_is_remembered_without_its_secrets() -> None:
    """`--api-key` in the agent's database would be one secret more to lose."""
    line = ("python -m vllm.entrypoints.openai.api_server --model /m --max_num_seqs=32 --enforce-eager --api-key s3cret"
            " --hf-token=s3cret --max-num-batched-tokens 2048")
    assert options_of(line.split()) == {"model": "/m", "max-num-seqs": "32", "enforce-eager": "",
                                "max-num-batched-tokens": "2048"}
    assert options_of(["vllm", "serve", "org/m", "--port", "8000"])["model"] == "org/m"
    assert options_of(["vllm", "serve", "/m", "--skip-tokenizer-init"]) == {"model": "/m", "skip-tokenizer-init": ""}


@pytest.mark.parametrize(("line", "want"), [
    ("/m --lora-modules a=/x b=/y --max-num-seqs 8", {"model": "/m", "lora-modules": "a=/x b=/y", "max-num-seqs": "8"}),
    ("--served-model-name chat chat-2 --model /m", {"served-model-name": "chat chat-2", "model": "/m"}),
    ("--max-num-seqs 8 org/m", {"max-num-seqs": "8", "model": "org/m"}),
    ("/m --tokenizer org/t --tokenizer-mode slow --long-prefill-token-threshold 512 --max-num-batched-tokens=2048",
     {"model": "/m", "tokenizer": "org/t", "tokenizer-mode": "slow", "long-prefill-token-threshold": "512",
      "max-num-batched-tokens": "2048"}),
    ("/m --seed -1 --ssl-keyfile /etc/k.pem", {"model": "/m", "seed": "-1", "ssl-keyfile": "/etc/k.pem"}),
    ('/m --speculative-config {"method":"mtp","num_speculative_tokens":3} --limit-mm-per-prompt image=4', {
        "model": "/m", "speculative-config": '{"method":"mtp","num_speculative_tokens":3}',
        "limit-mm-per-prompt": "image=4"}),
    ('/m --x {"bucket":"b","secret_key":"k","is_auth":true} --y me:pw@h:1', {
        "model": "/m", "x": '{"bucket":"b","secret_key":"…","is_auth":true}', "y": "…@h:1"}),
    ("s3://b/a --otlp-traces-endpoint http://t:4317/v1/traces", {
        "model": "s3://b/a", "otlp-traces-endpoint": "http://t:4317/v1/traces"}),
])
def test_what_an_engine_was_started_with_is_whole(line: str, want: dict[str, str]) -> None:
    """A second adapter, or another tokenizer, was a change that nobody saw."""
    assert options_of(["vllm", "serve", *line.split()]) == want


@pytest.mark.parametrize("words", [
    "--api-key S3CRET1 S3CRET2 --model /m", "--api-key S3CRET1 S3CRET2", "--api_key=S3CRET1", "/m --hf-token S3CRET1",
    "/m --token S3CRET1", "/m --admin-api-key S3CRET1", "/m --ssl-keyfile-password S3CRET1",
    "/m --client-secret S3CRET1", "/m --auth-tokens S3CRET1 S3CRET2", "/m --authtoken S3CRET1",
    "/m --HF_TOKEN S3CRET1", "/m --aws-credentials S3CRET1",
    "/m --redis-url redis://me:S3CRET1/x@cache:6379/0", "/m --from https://h/m?sig=S3CRET1",
    '/m --kv-transfer-config {"api_key":"S3CRET1"}', "/m --header Authorization:S3CRET1", "/m --x hf_S3CRET1S3CRET1",
    "https://bob:S3CRET1@host/m?sig=S3CRET1#S3CRET1", "--port 8000 s3://AKIA:S3CRET1@bucket/m",
    '/m --x {"secret_key":"S3CRET1"}', '/m --x {"a":[{"private_key":"S3CRET1"}]}', '/m --x {"secret":["S3CRET1"]}',
    '/m --x {"passphrase":"S3CRET1"}', '/m --x {"pwd":"S3CRET1"}', '/m --x {"auth":{"a":"S3CRET1"}}',
    '/m --x {"secret":"S3CRET1","secret":1}', '/m --x {"redis":"user:S3CRET1@h:1"}', "/m --x user:S3\"CRET1S3CRET@h:1",
    '/m --x {"a":"{\\"secret_key\\":\\"S3CRET1\\"}"}', "/m --x {'secret_key':'S3CRET1'}", "/m --x secretKey=S3CRET1",
    "/m --x a=b,pwd:one S3CRET1", "/m -hft S3CRET1", "/m --api-key -S3CRET1 --x",
    "/m --basic-auth user:S3CRET1", "/m --x.secret_key S3CRET1",
    "/m --otlp-traces-headers x-auth=S3CRET1", "/m --x x-auth=S3CRET1", "/m --api-k S3CRET1", "/m --api S3CRET1",
    "/m --admin-api-k S3CRET1", "/m --hf-to S3CRET1", "/m --ssl-keyfile-pass S3CRET1",
])
def test_no_secret_of_a_command_line_comes_through(words: str) -> None:
    """The second of two keys was taken for the model, and written into the database."""
    found = options_of(["vllm", "serve", *words.split()])
    assert "S3CRET" not in repr(found)
    assert "/m" not in words.split() or found["model"] == "/m"


def test_a_change_is_said_and_survives_a_restart() -> None:
    """The agent remembers under which options and version each engine ran, since when."""
    here, name = node("queue-age"), "llama"
    here.setup = replace(here.setup, targets=(Target(name, (name,), port=8000),))
    engine = FoundEngine("127.0.0.1:8000", "http://127.0.0.1:8000", "vllm", "its command line", 8000)
    for at, options, version in [(1.0, {"max-num-seqs": "32"}, None), (2.0, {"max-num-seqs": "32"}, "0.31.0"),
                                 (3.0, {"max-num-seqs": "32"}, "0.31.0")]:
        here.see([engine._replace(options=options, version=version)], at)
    later = restarted(here)
    later.see([engine._replace(options={"max-num-seqs": "64", "enforce-eager": ""}, version="0.32.0")], 9.0)
    assert [one["at"] for one in later.learned.configs[name]] == [2.0, 9.0]
    assert lint_facts.changes(later.learned.configs[name]) == [
        {"at": 9.0, "what": "version 0.31.0 → 0.32.0, --enforce-eager absent → given, --max-num-seqs 32 → 64"}]


@pytest.mark.parametrize(("story", "versions", "options", "what"), [
    ("it answered later", ["", "0.32.0"], ["32", "32"], []),
    ("it did not answer once", ["0.32.0", "", "0.32.0"], ["32", "32", "32"], []),
    ("it came back as another", ["0.31.0", "", "0.32.0"], ["32", "32", "32"], ["version 0.31.0 → 0.32.0"]),
    ("and with other options", ["0.31.0", "", "0.32.0"], ["32", "64", "64"],
     ["version 0.31.0 → 0.32.0, --max-num-seqs 32 → 64"]),
])
def test_a_version_that_nobody_could_read_is_no_change(story: str, versions: list[str], options: list[str],
                                                       what: list[str]) -> None:
    """A 503 while it loads was told as "version ? → 0.32.0", and asked for a canary."""
    here = node("queue-age")
    here.setup = replace(here.setup, targets=(Target("llama", ("llama",), port=8000),))
    engine = FoundEngine("127.0.0.1:8000", "http://127.0.0.1:8000", "vllm", "its command line", 8000)
    for at, (version, seats) in enumerate(zip(versions, options, strict=True)):
        here.see([engine._replace(options={"max-num-seqs": seats}, version=version)], float(at))
    assert [one["what"] for one in lint_facts.changes(here.learned.configs["llama"])] == what, story
    remembered = [{"at": float(at), "version": version, "options": {}} for at, version in enumerate(versions)]
    assert len(lint_facts.changes(remembered)) == ("0.31.0" in versions)  # as an earlier Tocsin remembered it


@pytest.mark.parametrize(("text", "fault"), [
    ("llama: {streamd: 0.9}", "streamd"),
    ("llama: {streamed: many}", "float"),
    ("llama: [", "flow"),
])
def test_a_wrong_evidence_file_says_where(text: str, fault: str, tmp_path: Path) -> None:
    """A misspelt key would be evidence that nobody reads."""
    path = tmp_path / "evidence.yaml"
    path.write_text(text)
    with pytest.raises(lint_facts.Unusable, match=fault):
        lint_facts.evidence_in(path, must=True)


def test_canaries_are_written_down_and_read_past_a_torn_line(tmp_path: Path) -> None:
    """A power cut in the midst of a line costs that line."""
    ran = lint_facts.Ran(5.0, "pass", 1.0, ("http://a:8000",), ("http://b:8000",))
    assert lint_facts.note_canary(tmp_path, ran) is None
    with (tmp_path / lint_facts.CANARIES).open("a") as out:
        out.write('{"at": 6.0, "ver\n')
    assert lint_facts.canaries(tmp_path / lint_facts.CANARIES) == [ran]


@pytest.mark.parametrize(("story", "row", "sides"), [
    ("it was new", {"old": ["http://127.0.0.1:8001"], "new": ["http://localhost:8000"]}, ["new"]),
    ("it was old", {"old": ["http://127.0.0.1:8000"], "new": ["http://127.0.0.1:8001"]}, ["old"]),
    ("others", {"old": ["http://10.0.0.1:8000"], "new": ["http://10.0.0.2:8000"]}, []),
    ("written by an earlier version", {}, []),
])
def test_a_canary_is_of_the_engines_that_it_named(story: str, row: dict[str, Any], sides: list[str]) -> None:
    """However their addresses were written."""
    ran = convert({"at": 5.0, "verdict": "pass", **row}, lint_facts.Ran)
    found = lint_facts.of_url([ran], "http://127.0.0.1:8000")
    assert [(one["side"], one["started"]) for one in found] == [(side, 5.0) for side in sides], story


@pytest.mark.parametrize(("story", "models", "asks", "address", "its"), [
    ("one engine", ["llama"], None, "https://llm.internal", True),
    ("replicas", ["llama", "llama"], None, "https://llm.internal", True),
    ("two models, and nobody said which", ["llama", "qwen"], None, "https://llm.internal", False),
    ("two models, this one", ["llama", "qwen"], "llama", "https://llm.internal", True),
    ("two models, the other", ["llama", "qwen"], "qwen", "https://llm.internal", False),
    ("its own address", ["llama", "qwen"], None, "http://localhost:8000", True),
    ("the other's own", ["llama", "llama"], None, "http://127.0.0.1:8001", False),
])
def test_a_canary_tells_of_the_engines_that_serve_its_model(story: str, models: list[str], asks: str | None,
                                                            address: str, *, its: bool) -> None:
    """A gateway before another model says nothing of what users of this one wait for."""
    targets = [{"model": model, "url": f"http://127.0.0.1:{8000 + n}"} for n, model in enumerate(models)]
    config = Config(probe=ProbeConfig(canary=CanaryConfig(model=asks)))
    assert lint_facts.address_of_its(targets[0], targets, config)(address) is its, story


def test_nobody_s_default_is_a_declaration() -> None:
    """It is judged as latency, as ever; that somebody wants it so is another thing."""
    config = Config(engines=(EngineConfig(url="http://127.0.0.1:8000"),))
    assert config.engines[0].profile is None
    assert setup_of(config, ()).targets[0].profile == "latency"


@pytest.mark.parametrize(("story", "of", "errors", "code", "verdict"), [
    ("one is at odds, and one is away", facts(SPECULATES), ["b: refused"], 1, "at odds"),
    ("nobody can tell", Facts("llama", now=NOW), [], 0, "cannot tell"),
    ("one of two is away", Facts("llama", now=NOW), ["b: refused"], 3, "cannot tell"),
    ("all are away", None, ["b: refused"], 3, "cannot tell"),
])
def test_an_engine_that_is_away_is_not_fine(
        story: str, of: Facts | None, errors: list[str], code: int, verdict: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline reads the exit code, and would ship."""
    head = {"engine": "llama", "url": "http://a:8000", "kind": "vllm", "model": "m", "version": "0.32.0"}
    looked = lint_facts.Looked([] if of is None else [(head, of)], errors)
    monkeypatch.setattr(lint_facts, "look", lambda *_, **__: looked)
    monkeypatch.setattr(sys, "argv", ["tocsin", "lint", "http://a:8000", "http://b:8000", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, json.loads(capsys.readouterr().out)["verdict"]) == (code, verdict), story


def target_at(port: int, model: str) -> dict[str, Any]:
    """One of `doctor`'s, with one engine."""
    return {"target": model, "url": f"http://127.0.0.1:{port}", "kind": "vllm", "model": model, "error": None,
            "engines": [model], "found": [], "configs": [], "facts": {}, "binds": []}


@pytest.mark.parametrize("words", [
    "python -m sglang.launch_server --model-path {} --port 30000",
    "text-generation-launcher --model-id {} --port 30000",
    "vllm serve {} --port 30000",
])
def test_the_model_s_folder_is_found_by_what_each_engine_calls_it(
        words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody can tell what the weights take, and whether they are quantized."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    monkeypatch.setattr(lint_facts, "doctor", lambda *_, **__: {"targets": [target_at(30000, "m")], "gpus": []})
    monkeypatch.setattr(lint_facts, "processes", lambda _: [Process(2**30, tuple(words.format(tmp_path).split()))])
    monkeypatch.setattr(lint_facts, "_text", lambda _: "")
    ((_, found),) = lint_facts.look(Config(), ["http://127.0.0.1:30000"]).engines
    assert (found.model, found.url) == (LLAMA_70B, "http://127.0.0.1:30000")


def test_what_is_written_down_names_the_engine_as_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name under `engines`, or by the workload of its pods."""
    targets = [target_at(30000, "chat"), {**target_at(30001, "qwen"), "target": "llm/vllm#0"}]
    monkeypatch.setattr(lint_facts, "doctor", lambda *_, **__: {"targets": targets, "gpus": []})
    monkeypatch.setattr(lint_facts, "_text", lambda _: "")
    config = Config(engines=(EngineConfig(url="http://127.0.0.1:30000", name="chat"),))
    found = [one for _, one in lint_facts.look(config, ["http://127.0.0.1:30000"]).engines]
    assert [(one.configured, one.pods_of, one.served) for one in found] == [
        ("chat", "", "chat"), ("", "llm/vllm", "qwen")]


def test_what_the_agent_measures_for_one_model_is_not_told_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway before llama is watched; of qwen nobody knows what its users wait for."""
    gateway = "https://llm.internal"
    told = {"/doctor": {"targets": [target_at(30000, "llama"), target_at(30001, "qwen")], "gpus": []},
            "/check": {"signals": [{**row("outside-engine", 0.004), "subject": gateway}, row("ttft-p99", 0.2)]}}
    monkeypatch.setattr(lint_facts, "ask", lambda _, path: told[path])
    monkeypatch.setattr(lint_facts, "_text", lambda _: "")
    config = Config(probe=ProbeConfig(canary=CanaryConfig(model="llama")))
    llama, qwen = (found for _, found in lint_facts.look(config, []).engines)
    assert (finding(3, llama)["verdict"], llama.strangers) == ("kept", [])
    assert (finding(3, qwen)["verdict"], finding(12, qwen)["verdict"], qwen.strangers) == (
        "cannot tell", "at odds", [gateway])


@pytest.mark.parametrize(("story", "cache", "name", "is_found"), [
    ("root in a container", "root/.cache/huggingface/hub", "org/m", True),
    ("a user", "home/llm/.cache/huggingface/hub", "org/m", True),
    ("TGI", "data", "org/m", True),
    ("another model", "data", "org/other", False),
    ("no name of the hub", "data", "../org/m", False),
])
def test_a_model_of_the_hub_is_found_in_its_cache(story: str, cache: str, name: str, is_found: bool, tmp_path: Path,
                                                  ) -> None:
    """Most engines are given a name, no folder; of two revisions the one that was fetched last."""
    for day, revision in enumerate(("b0", "a1")):
        folder = tmp_path / cache / "models--org--m/snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder, (day, day))
    found = lint_facts.folder_of([None, name], [tmp_path])
    assert found == (tmp_path / cache / "models--org--m/snapshots/a1" if is_found else None), story
