"""The two dashboards for Grafana, as they stand in deploy/grafana. Pure.

tocsin.json is over what the agents tell on /metrics, engines.json over the engines' own metrics, by all of their names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rules.prometheus import ENGINE, TARGET, last, rise, through

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
WINDOW_S = 300.0
LATE_S = 60.0  # dashboards are for scrapes of up to 20 s, too
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Query = tuple[str, str]  # PromQL, legend


class Panel(NamedTuple):
    """One plot. `limit`: a line where its rule fires. `unit`: Grafana's name of it."""

    title: str
    unit: str
    queries: Sequence[Query]
    limit: float | None = None
    says: str = ""


def of_node(metric: str) -> str:
    """A metric of the agents that were chosen."""
    return metric + '{job="tocsin", instance=~"$instance"}'


TOCSIN = (
    Panel("Alerts that fire", "short", [(f"sum by (rule, subject) ({of_node('tocsin_alert_state')} == bool 2)",
                                         "{{rule}} {{subject}}")], says="As in `tocsin alerts`, but for pending ones"),
    Panel("Cannot be had", "short", [(f"sum by (signal, reason) ({of_node('tocsin_signal_gap')})",
                                      "{{signal}}: {{reason}}")], says="UNKNOWN is not OK; tocsin doctor says why"),
    Panel("Agent's last tick", "s", [(f"time() - {of_node('tocsin_tick_timestamp_seconds')}", "{{instance}}")], 60.0),
    Panel("H1 queue age", "s", [(of_node("tocsin_queue_age_seconds"), "{{subject}}")],
          says="Limit: half of slo.ttft_p99"),
    Panel("H2 KV cache", "percentunit", [(of_node("tocsin_kv_cache_utilization_ratio"), "{{subject}}")], 0.85),
    Panel("H3 preemptions in an hour", "short", [(of_node("tocsin_preemptions"), "{{subject}}")], 0.0),
    Panel("H4 graph fallbacks", "percentunit", [(of_node("tocsin_graph_fallback_ratio"), "{{subject}}")], 0.0),
    Panel("H5 TTFT: share over the SLO", "percentunit", [(of_node("tocsin_ttft_slow_share_ratio"), "{{subject}}")],
          0.01, says="95 % lower bound"),
    Panel("H6 ITL: share over the SLO", "percentunit", [(of_node("tocsin_itl_slow_share_ratio"), "{{subject}}")], 0.01,
          says="95 % lower bound"),
    Panel("H7 error budget burn, × its limit", "short", [(of_node("tocsin_error_burn"), "{{subject}}")], 1.0),
    Panel("H8 ranks apart", "percentunit", [
        (of_node("tocsin_rank_step_spread_ratio"), "{{subject}} step time"),
        (of_node("tocsin_rank_clock_spread_ratio"), "{{subject}} clocks")], 0.05),
    Panel("H9 GPU temperature", "celsius", [(of_node("tocsin_gpu_temperature_celsius"), "{{gpu}}")], 85.0),
    Panel("H10 prefix cache hits", "percentunit", [(of_node("tocsin_prefix_cache_hit_rate_ratio"), "{{subject}}")],
          0.5),
    Panel("GPU memory", "percentunit", [(of_node("tocsin_gpu_memory_ratio"), "{{gpu}}")], 0.95),
    Panel("GPUs by verdict", "short", [(f"sum by (verdict) ({of_node('tocsin_gpu_verdict')})", "{{verdict}}")]),
    Panel("Notices owed", "short", [(f"sum by (channel, state) ({of_node('tocsin_outbox_notices')})",
                                     "{{channel}} {{state}}")]),
    Panel("Deliveries", "short", [
        (f"sum by (channel, outcome) (rate({of_node('tocsin_notifications_total')}[5m])) * 60",
         "{{channel}} {{outcome}} a minute")]),
    Panel("Time a source takes", "s", [(of_node("tocsin_source_duration_seconds"), "{{source}}")]),
)


def p99(name: str) -> list[Query]:
    """Prometheus's quantiles of a histogram in seconds."""
    buckets = through(name, "(job, instance, le)", rise(WINDOW_S), "_bucket", unit="s")
    return [(f"histogram_quantile({q}, \n{buckets}\n)", f"p{q * 100:g} {{{{instance}}}}") for q in (0.5, 0.99)]


def shown(name: str, by: str = ENGINE) -> list[Query]:
    """A gauge, each engine."""
    return [(through(name, by, last(LATE_S)), "{{instance}} {{engine}}")]


def per_second(name: str, suffix: str = "") -> list[Query]:
    """A counter's rate."""
    return [(f"(\n{through(name, TARGET, rise(WINDOW_S), suffix)}\n) / {WINDOW_S:g}", "{{instance}}")]


ENGINES = (
    Panel("Waiting", "short", shown("waiting"), says="H1 is about the oldest of them: queue-age in the rules"),
    Panel("Running", "short", shown("running")),
    Panel("KV cache", "percentunit", shown("kv_usage"), 0.85),
    Panel("TTFT", "s", p99("ttft"), 0.5),
    Panel("ITL", "s", p99("itl"), 0.15),
    Panel("End to end", "s", p99("e2e")),
    Panel("Preemptions in an hour", "short", [
        (through("preemptions", ENGINE, rise(3600.0)), "{{instance}} {{engine}}")], 0.0),
    Panel("First tokens a second", "reqps", per_second("ttft", "_count")),
    Panel("Tokens a second", "short", per_second("generation_tokens")),
    Panel("Prefix cache hits", "percentunit", [(
        f"(\n{through('prefix_hits', ENGINE, rise(600.0))}\n) / (\n{through('prefix_queries', ENGINE, rise(600.0))}\n)",
        "{{instance}} {{engine}}")], 0.5),
    Panel("Requests that ended, a second", "reqps", per_second("finished")),
    Panel("Accepted drafts", "percentunit", [(
        f"(\n{through('spec_accepted', ENGINE, rise(600.0))}\n) / (\n{through('spec_draft', ENGINE, rise(600.0))}\n)",
        "{{instance}} {{engine}}")], 0.5),
)


def dashboard(uid: str, title: str, panels: Sequence[Panel], variables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Grafana's JSON model (schema 39, Grafana 10.4 and later)."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid, "title": title, "tags": ["tocsin", "llm"], "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "timezone": "browser", "graphTooltip": 1,
        "templating": {"list": [source, *variables]}, "annotations": {"list": []}, "links": [],
        "panels": [_panel(n, panel) for n, panel in enumerate(panels)],
    }


def _panel(n: int, panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    line = {"mode": "off" if panel.limit is None else "dashed"}
    lines = {"thresholdsStyle": line, "fillOpacity": 5, "spanNulls": False}
    return {
        "id": n + 1, "type": "timeseries", "title": panel.title, "description": panel.says, "datasource": SOURCE,
        "gridPos": {"x": n % COLUMNS * WIDTH, "y": n // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": lines,
                                     "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
                    for i, (expr, legend) in enumerate(panel.queries)],
    }


def written() -> dict[str, str]:
    """File name -> text."""
    instance = {"name": "instance", "label": "Agent", "type": "query", "datasource": SOURCE, "multi": True,
                "includeAll": True, "current": {"text": "All", "value": "$__all"}, "refresh": 2,
                "query": {"query": "label_values(tocsin_tick_timestamp_seconds, instance)", "refId": "instance"}}
    models = {"tocsin.json": dashboard("tocsin", "Tocsin: the node's health", TOCSIN, [instance]),
              "engines.json": dashboard("tocsin-engines", "Tocsin: the engines' own metrics", ENGINES, [])}
    return {name: json.dumps(model, indent=1, ensure_ascii=False) + "\n" for name, model in models.items()}
