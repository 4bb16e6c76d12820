"""The dashboards: no plot is of a metric that nobody tells, and Prometheus understands each."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.engines import KINDS, load_map
from agent.signals import CATALOGUE
from agent.web.metrics import make_renderer, metric_name
from rules.grafana import written
from tests.needs import find, need
from tests.test_web import CATALOGUE as FAKE_CATALOGUE
from tests.test_web import NOW, FakeView

SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(?=[\[{])")  # each of ours has labels or a range behind its name


def queries(name: str) -> list[str]:
    """Every query of a dashboard."""
    return [target["expr"] for panel in json.loads(written()[name])["panels"]
            for target in panel["targets"]]


def metrics(name: str) -> set[str]:
    """What a dashboard plots."""
    return {found for expr in queries(name) for found in SELECTOR.findall(re.sub(r'"[^"]*"', '""', expr))}


@pytest.mark.parametrize(("name", "text"), written().items())
def test_the_plots_do_not_lie_on_each_other(name: str, text: str) -> None:
    """Each has a place of its own."""
    assert name in ("tocsin.json", "engines.json")
    panels = json.loads(text)["panels"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(panels) >= 12
    assert len(set(places)) == len(places)


def test_the_agent_tells_every_metric_of_its_dashboard() -> None:
    """From the catalogue of signals and from a scrape of the agent's own numbers."""
    page = make_renderer(FakeView(), FAKE_CATALOGUE, lambda: NOW)("")[0].decode()
    told = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    told |= {metric_name(spec) for spec in CATALOGUE.values()}

    plotted = metrics("tocsin.json")

    assert sorted(plotted - told) == []
    assert len(plotted) >= 18
    assert {metric_name(CATALOGUE[name]) for name in ("queue_age", "kv_cache_utilization", "preemptions",
            "graph_fallback", "ttft_slow_share", "itl_slow_share", "error_burn", "rank_step_spread", "gpu_temperature",
            "prefix_cache_hit_rate")} <= plotted  # the ten  # fmt: skip


def test_some_engine_tells_every_metric_of_the_other_one() -> None:
    """By the maps of agent/engines; of a histogram its buckets and counts."""
    told = set()
    for kind in KINDS:
        for quantity in load_map(kind).quantities.values():
            names = [*(alias.name for alias in quantity.names), *(also.name for also in quantity.also)]
            told |= {f"{family}{suffix}" for family in names for suffix in ("", "_bucket", "_count", "_sum")}
            told |= {alias.over.name for alias in quantity.names if alias.over}

    plotted = metrics("engines.json")

    assert sorted(plotted - told) == []
    assert {"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"} <= plotted


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """promtool takes each as a recording rule, with Grafana's variables filled in."""
    need("promtool")
    asked = [expr for name in written() for expr in queries(name)]
    rules = [{"record": f"q:{n}", "expr": expr.replace("$instance", ".*")} for n, expr in enumerate(asked)]
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "q", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run([find("promtool") or "", "check", "rules", str(path)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
