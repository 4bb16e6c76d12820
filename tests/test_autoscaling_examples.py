"""deploy/autoscaling: promtool's word on the rule, Kubernetes' own definitions on the objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_what_the_agents_advise_together(tmp_path: Path) -> None:
    """promtool's word, a look every 15 s: one asks for one; some can spare one; all can; no agent tells."""
    asks, spares = "1x4 0x9 stale", "0x9 1x4 stale"
    rows = {"kube_deployment_spec_replicas{namespace='llm',deployment='vllm'}": "3x30"}
    for subject, out, into in [("llm/vllm#0", asks, spares), ("llm/vllm#1", "0x14 stale", spares),
                               ("llm/vllm#2", "0x14 stale", "1x14 stale"), ("llm/other#0", "1x30", "0x30")]:
        rows |= {f"tocsin_scale_out{{subject='{subject}'}}": out, f"tocsin_scale_in{{subject='{subject}'}}": into}
    promtool.run(tmp_path, EXAMPLES / "replicas.rules.yml",
                 [{"series": name, "values": values} for name, values in rows.items()],
                 [{"expr": "tocsin:replicas_advised", "eval_time": at,
                   "exp_samples": [{"labels": RULE, "value": replicas}] if replicas else []}
                  for at, replicas in [("60s", 4), ("120s", 3), ("195s", 2), ("240s", None)]], every_s=15, step_s=15)


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
    (rule,) = load("replicas.rules.yml")["groups"][0]["rules"]
    assert rule["record"].replace(":", "_") == hpa["spec"]["metrics"][0]["external"]["metric"]["name"]
    assert (hpa["spec"]["minReplicas"], keda["spec"]["minReplicaCount"]) == (2, 2)
