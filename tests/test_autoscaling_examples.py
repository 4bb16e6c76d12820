"""deploy/autoscaling: promtool's word on the rule, Kubernetes' own definitions on the objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.models.autoscaling_v2 import HorizontalPodAutoscalerBehavior
from lightkube.resources.autoscaling_v2 import HorizontalPodAutoscaler

from tests import promtool
from tests.needs import ROOT

EXAMPLES = ROOT / "deploy/autoscaling"
RULE = 'tocsin:replicas_advised{namespace="llm", deployment="vllm"}'


def load(name: str) -> Any:
    """One of the examples."""
    return yaml.safe_load((EXAMPLES / name).read_text())


def told(tmp_path: Path, rows: dict[str, str], metric: str, want: list[tuple[str, int | None]]) -> None:
    """promtool's word on one of the rules: rows with a look every 15 s -> its value at a time."""
    labels = f'{metric}{{namespace="llm", deployment="vllm"}}'
    promtool.run(tmp_path, EXAMPLES / "replicas.rules.yml",
                 [{"series": name, "values": values} for name, values in rows.items()],
                 [{"expr": metric, "eval_time": at,
                   "exp_samples": [{"labels": labels, "value": value}] if value is not None else []}
                  for at, value in want], every_s=15, step_s=15)


def test_what_the_agents_advise_together(tmp_path: Path) -> None:
    """#0 and #1 ask for a minute; #1 needs all from 450 to 735 s; #2 is down from 840, and all are from 990."""
    rows = {"kube_deployment_spec_replicas{namespace='llm',deployment='vllm'}": "3x80"}
    for subject, out, into in [("llm/vllm#0", "1x4 0x59 stale", "0x4 1x59 stale"),
                               ("llm/vllm#1", "1x4 0x59 stale", "0x4 1x24 0x19 1x14 stale"),
                               ("llm/vllm#2", "0x55 stale", "1x55 stale"), ("llm/other#0", "1x80", "0x80")]:
        rows |= {f"tocsin_scale_out{{subject='{subject}'}}": out, f"tocsin_scale_in{{subject='{subject}'}}": into}
    told(tmp_path, rows, "tocsin:replicas_advised", [
        ("60s", 4),
        ("300s", 3),  # all can spare one, 4 minutes after one asked for one more
        ("705s", 3),  # #1 cannot
        ("780s", 2),  # all can
        ("900s", 3),  # two of three say so, and of #2 nothing is known
        ("990s", None)])


@pytest.mark.parametrize(("tell", "ask", "want"), [
    (1, 1, 2),  # it is the only one
    (2, 1, 2), (2, 2, 3),
    (8, 1, 8),  # a slow card: it asked for ever, and the fleet grew by one each period up to maxReplicas
    (8, 2, 9), (9, 2, 9),  # a quarter of 9 is 2.25: two bad ones of eight make nine of them, and no more
    (9, 3, 10), (12, 2, 12), (12, 3, 13),
])
def test_one_bad_replica_moves_no_fleet(tmp_path: Path, tell: int, ask: int, want: int) -> None:
    """A quarter of those that tell must ask, and two at least: none but a single one asks alone."""
    rows = {"kube_deployment_spec_replicas{namespace='llm',deployment='vllm'}": f"{tell}x9"}
    for n in range(tell):
        rows |= {f"tocsin_scale_out{{subject='llm/vllm#{n}'}}": f"{int(n < ask)}x9",
                 f"tocsin_scale_in{{subject='llm/vllm#{n}'}}": "0x9"}
    told(tmp_path, rows, "tocsin:replicas_advised", [("60s", want)])


@pytest.mark.parametrize(("peaks", "served", "want"), [
    ([7.0] * 8, [10.0] + [9.0] * 7, 6),  # 56 ÷ 10 = 5.6; each replica alone said 1
    ([24.0], [7.0], 4),  # 3.43
    ([7.0] * 4, [7.0], 4),
    ([0.1] * 3, [0.1], 3),  # 0.1 + 0.1 + 0.1 is over 0.3
    ([7.0] * 8, [], None),  # nobody waited: what one could serve is not known
])
def test_the_fleet_s_warm_pool(tmp_path: Path, peaks: list[float], served: list[float], want: int | None) -> None:
    """Eight replicas with 7 requests/s of the 10 that one can: who set minReplicas by one's own number went to 1."""
    rows = {f"tocsin_scale_peak_requests_per_second{{subject='llm/vllm#{n}'}}": f"{one}x9"
            for n, one in enumerate(peaks)}
    rows |= {f"tocsin_scale_served_requests_per_second{{subject='llm/vllm#{n}'}}": f"{one}x9"
             for n, one in enumerate(served)}
    told(tmp_path, rows, "tocsin:warm_pool_replicas", [("60s", want)])


def test_both_autoscalers_change_one_pod_in_a_start_s_time() -> None:
    """Every field is one that Kubernetes knows, and both follow the rule that ships."""
    hpa, keda = load("hpa.yaml"), load("keda.yaml")
    assert HorizontalPodAutoscaler.from_dict(hpa).to_dict() == hpa
    behaviours = [hpa["spec"]["behavior"], keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]]
    for of in behaviours:
        assert HorizontalPodAutoscalerBehavior.from_dict(of).to_dict() == of
        assert of["scaleUp"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]
        assert of["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert keda["spec"]["triggers"][0]["metadata"]["query"] == RULE
    rule, _ = load("replicas.rules.yml")["groups"][0]["rules"]
    assert rule["record"].replace(":", "_") == hpa["spec"]["metrics"][0]["external"]["metric"]["name"]
    assert (hpa["spec"]["minReplicas"], keda["spec"]["minReplicaCount"]) == (2, 2)
