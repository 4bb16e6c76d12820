"""GPU 3 heats up and slows its rank, and one thing after the other breaks: one page, which names GPU 3, and its end.

What takes six minutes in a rack takes one here: the rules' `for`, `keep` and windows are about an eighth of what ships
(FASTER), and the agent polls each second. The GPUs are the C stand-in's, the engine is a page that an SGLang of four
ranks would write, PagerDuty and Slack are receivers that keep what they get, and the Alertmanager is Debian's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.model import alert_name
from tests.agent_process import ROOT, AgentProcess
from tests.alertmanager import RealAlertmanager
from tests.fake_nvml.build import build
from tests.incidents.test_spine import free_port
from tests.needs import need
from tests.page_server import PageServer
from tests.receiver import Arrival, Receiver, Reply

pytestmark = pytest.mark.heavy

# Seconds of the story at which each breaks, and at which all is well again.
HOT, SLOW, RANK, ITL, QUEUE, TTFT, COOL = 12.0, 14.0, 14.0, 20.0, 26.0, 32.0, 42.0
FASTER: dict[str, dict[str, Any]] = {
    "gpu-temperature": {"for": "2s", "keep": "4s"}, "gpu-thermal-limit": {"for": "3s", "keep": "4s"},
    "rank-straggler": {"for": "3s", "keep": "4s", "window": "8s", "params": {"steps": 100}},
    "itl-p99": {"for": "3s", "keep": "4s", "window": "8s", "min_count": 100},
    "queue-age": {"for": "2s", "keep": "4s"},
    "ttft-p99": {"for": "3s", "keep": "4s", "window": "8s", "min_count": 20},
}
PAGES = ("gpu-thermal-limit", "rank-straggler", "itl-p99", "queue-age", "ttft-p99")  # as they come
SLACK_S = 60.0  # for a machine that is busy
BOUNDS_S = (0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
Rate = Sequence[tuple[float, float]]  # (from this second on, so many a second)


def grown(rate: Rate, at_s: float) -> float:
    """What a counter has come to."""
    ends = [*(start for start, _ in rate[1:]), at_s]
    return sum(per_s * max(0.0, min(end, at_s) - start) for (start, per_s), end in zip(rate, ends, strict=True))


def spell(start: float, calm: float, broken: float) -> Rate:
    """One rate, another from `start` until all is well."""
    return ((0.0, calm), (start, broken), (COOL, calm))


def histogram(name: str, quick: Rate, slow: Rate, at_s: float) -> Iterator[str]:
    """Observations of 0.1 s and of 2.5 s."""
    few, many = int(grown(quick, at_s)), int(grown(slow, at_s))
    yield f"# TYPE {name} histogram"
    for bound in BOUNDS_S:
        yield f'{name}_bucket{{model_name="m",le="{bound:g}"}} {few + many * (bound >= 2.5)}'
    yield f'{name}_bucket{{model_name="m",le="+Inf"}} {few + many}'
    yield f'{name}_sum{{model_name="m"}} {few * 0.1 + many * 2.5:g}'
    yield f'{name}_count{{model_name="m"}} {few + many}'


def page_at(at_s: float) -> str:
    """What the engine tells at a second of the story."""
    ranks = [f'model_name="m",engine_type="unified",pp_rank="0",tp_rank="{rank}"' for rank in range(4)]
    waiting = 30 if QUEUE <= at_s < COOL else 0
    lines = ["# TYPE sglang:num_running_reqs gauge", "# TYPE sglang:num_queue_reqs gauge",
             "# TYPE sglang:token_usage gauge", "# TYPE sglang:cuda_graph_passes_total counter",
             "# TYPE sglang:forward_execution_seconds_total counter"]
    for rank, of in enumerate(ranks):
        seconds = grown(spell(RANK, 0.5, 0.65 if rank == 3 else 0.5), at_s)
        lines += [f"sglang:num_running_reqs{{{of}}} 3", f"sglang:num_queue_reqs{{{of}}} {waiting}",
                  f"sglang:token_usage{{{of}}} 0.4",
                  f'sglang:cuda_graph_passes_total{{{of},mode="decode_cuda_graph"}} {int(40 * at_s)}',
                  f'sglang:forward_execution_seconds_total{{{of},category="decode"}} {seconds:.4f}']
    # Where 30 wait and 10 a second get their first token, the oldest has waited for 3 s.
    lines += histogram("sglang:time_to_first_token_seconds", spell(TTFT, 10, 1), spell(TTFT, 0, 9), at_s)
    lines += histogram("sglang:inter_token_latency_seconds", spell(ITL, 200, 150), spell(ITL, 0, 50), at_s)
    lines += ["# TYPE sglang:num_requests_total counter", f'sglang:num_requests_total{{model_name="m"}} {int(10*at_s)}',
              "# TYPE sglang:generation_tokens_total counter",
              f'sglang:generation_tokens_total{{model_name="m"}} {int(200 * at_s)}']
    return "\n".join(lines) + "\n"


def gpus() -> dict[str, Any]:
    """GPU 3 climbs from 61 to 91 °C, its hardware holds it back from SLOW on, and it cools again."""
    hot: dict[str, Any] = {"temperature": {"ramp": [[0, 61], [HOT - 6, 61], [HOT, 91], [COOL, 91], [COOL + 2, 66]]},
                           "sm_clock": [[0, 1980], [SLOW, 1110], [COOL, 1980]],
                           "throttle": [[0, 0], [SLOW, 64], [COOL, 0]]}
    return {"start": time.time(), "gpus": [{}, {}, {}, hot],
            "defaults": {"temperature": 61, "utilization": 97, "sm_clock": 1980, "sm_clock_max": 1980, "throttle": 0,
                         "slowdown": 89, "memory": {"total": 85520809984, "used": 68383153152}}}


def said(arrivals: Sequence[Arrival]) -> list[dict[str, Any]]:
    """What a receiver was told, but for its tests."""
    return [arrival.json for arrival in arrivals]


def resolved_by(pagerduty: Receiver) -> Callable[[list[Arrival]], bool]:
    """Whether PagerDuty heard of the end."""
    return lambda _: any(event["event_action"] == "resolve" for event in said(pagerduty.arrivals))


def test_a_hot_gpu_is_one_page_that_names_it(tmp_path: Path) -> None:
    """Five rules that page broke in half a minute, and one person was woken once, by the cause."""
    need("gcc", "alertmanager")
    folder = build()
    with ExitStack() as stack:
        pagerduty, hook = stack.enter_context(Receiver()), stack.enter_context(Receiver())
        slack = stack.enter_context(Receiver(lambda _: Reply(200, body=b"ok")))
        alertmanager = stack.enter_context(RealAlertmanager(tmp_path / "am", free_port(), hook.url))
        began = time.monotonic()
        engine = stack.enter_context(PageServer(lambda: page_at(time.monotonic() - began)))
        (tmp_path / "nvml.json").write_text(json.dumps(gpus()))
        agent = stack.enter_context(AgentProcess(tmp_path, {
            "node": "gpu-17", "poll": "1s", "slo": {"ttft_p99": "500ms", "itl_p99": "150ms"},
            "engines": [{"name": "llama-70b", "url": engine.url, "kind": "sglang", "gpus": [0, 1, 2, 3],
                         "startup_within": "1s"}],
            "rules": {"override": FASTER},
            "notify": [{"pagerduty": {"routing_key_env": "TEST_PAGER", "url": f"{pagerduty.url}/v2/enqueue"}},
                       {"slack": {"webhook_env": "TEST_SLACK"}, "match": {"severity": ["page"]}},
                       {"alertmanager": {"urls": [alertmanager.url], "resend": "5s", "min_visible": "3s"}}],
        }, {"LD_LIBRARY_PATH": str(folder), "TOCSIN_FAKE_NVML": str(tmp_path / "nvml.json"), "TEST_PAGER": "k" * 32,
            "TEST_SLACK": f"{slack.url}/services/T0/B0/X"}))
        pagerduty.wait_until(resolved_by(pagerduty), COOL + 30 + SLACK_S, "PagerDuty's resolve")
        slack.wait_for(2, SLACK_S)
        hook.wait_until(lambda _: all(("resolved", alert_name(rule)) in hook.alerts() for rule in PAGES), SLACK_S,
                        "the end of each by Alertmanager")
        changes = agent.ask("/transitions?after=0")
        print("\n".join(f"{row['at'] - changes[0]['at']:6.1f} s  {row['rule']} {row['state']} {row['value']}"
                        for row in changes))
        fired = [row["rule"] for row in changes if row["state"] == "firing" and row["severity"] == "page"]
        counts = hook.alerts()
        command = [sys.executable, "-m", "agent", "report", "incident", "last", "--config", str(agent.path)]
        report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert (fired[0], sorted(fired)) == (PAGES[0], sorted(PAGES))  # the cause first, each once
    events = said(pagerduty.arrivals)
    assert len({event["dedup_key"] for event in events}) == 1
    assert [event["event_action"] for event in events] == ["trigger"] * (len(events) - 1) + ["resolve"]
    final = events[-2]["payload"]["summary"]
    assert "GPU 3 " in final
    assert "91 °C" in final
    told = events[-2]["payload"]["custom_details"]["description"]
    assert all(rule in told for rule in PAGES[1:])
    opened, ended = said(slack.arrivals)  # one message, and its end
    assert "GPU 3 " in opened["text"]
    assert "°C" in opened["text"]
    assert ended["text"].startswith("Resolved: ")
    got = {rule: [counts.count((state, alert_name(rule))) for state in ("firing", "resolved")] for rule in PAGES}
    assert got == {rule: [1, 1] for rule in PAGES}  # to Alertmanager every alert goes
    for line in ("| cause | gpu-thermal-limit on GPU 3 on gpu-17 |", "- gpu-thermal-limit can cause rank-straggler",
                 "- rank-straggler can cause itl-p99", "- queue-age can cause ttft-p99", "firing delivered to slack",
                 "resolved delivered to pagerduty", "| gpu-thermal-limit | cause | GPU 3 on gpu-17 | -2 K | 0 K |"):
        assert line in report, report
