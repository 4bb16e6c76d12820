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
    """promtool's word, a look every 15 s. #0 asks for a minute; #1 needs all from 450 to 735 s; #2 is down from 840."""
    rows = {"kube_deployment_spec_replicas{namespace='llm',deployment='vllm'}": "3x80"}
    for subject, out, into in [("llm/vllm#0", "1x4 0x59 stale", "0x4 1x59 stale"),
                               ("llm/vllm#1", "0x64 stale", "1x29 0x19 1x14 stale"),
                               ("llm/vllm#2", "0x55 stale", "1x55 stale"), ("llm/other#0", "1x80", "0x80")]:
        rows |= {f"tocsin_scale_out{{subject='{subject}'}}": out, f"tocsin_scale_in{{subject='{subject}'}}": into}
    promtool.run(tmp_path, EXAMPLES / "replicas.rules.yml",
                 [{"series": name, "values": values} for name, values in rows.items()],
                 [{"expr": "tocsin:replicas_advised", "eval_time": at,
                   "exp_samples": [{"labels": RULE, "value": replicas}] if replicas else []}
                  for at, replicas in [("60s", 4),
                                       ("300s", 3),  # all can spare one, 4 minutes after one asked for one more
                                       ("705s", 3),  # #1 cannot
                                       ("780s", 2),  # all can
                                       ("900s", 3),  # two of three say so, and of #2 nothing is known
                                       ("990s", None)]], every_s=15, step_s=15)


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
