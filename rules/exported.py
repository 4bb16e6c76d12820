"""The files of deploy/ that are made from the rules as they ship; `python -m rules.exported` writes them anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.model import Slo
from agent.signals import CATALOGUE
from rules import RulesConfig, alertmanager, grafana, load_rules, prometheus

DEPLOY = Path(__file__).parents[1] / "deploy"
POLL_S = 5.0  # as `poll:` is by default


def files() -> Mapping[str, str]:
    """Path under deploy/ -> text, as `tocsin rules export` writes it where nothing is configured."""
    slo = Slo()
    rules = load_rules(RulesConfig(dirs=()), slo, CATALOGUE).rules
    return {
        "prometheus/tocsin-engines.rules.yml": prometheus.over_engines(rules, slo, POLL_S),
        "prometheus/tocsin.rules.yml": prometheus.over_tocsin(rules, CATALOGUE),
        "prometheus/alertmanager.yml": alertmanager.export(rules),
        **{f"grafana/{name}": text for name, text in grafana.written().items()},
    }


if __name__ == "__main__":
    for name, text in files().items():
        (DEPLOY / name).write_text(text, encoding="utf-8")
