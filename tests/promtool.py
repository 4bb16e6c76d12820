"""A recording as promtool's input series, and what a back-test says as promtool's expectations."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.model import Rule
from tests.needs import find, need

Row = Mapping[str, Any]
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def series(rows: Sequence[Row], wanted: str, instance: str) -> list[dict[str, str]]:
    """One sample a second, that of the last scrape of it, `_` where there was none, stale after a scrape that failed.

    Of the page's families those that `wanted` (the rule file) names. promtool's clock starts at 0: so do start times.
    """
    start, seconds = rows[0]["t"], int(rows[-1]["t"] - rows[0]["t"]) + 1
    columns: dict[str, list[str]] = {}
    for row in rows:
        at = -int(-(row["t"] - start) // 1)
        if row["body"] is None:
            for column in columns.values():
                column[at] = "stale"
            continue
        for found in filter(None, map(SAMPLE.fullmatch, row["body"].splitlines())):
            name, value = found["name"], found["value"]
            if re.sub(r"_(bucket|count|sum)$", "", name) not in wanted:
                continue
            if name == "process_start_time_seconds":
                value = f"{float(value) - start:.3f}"
            labels = ",".join(filter(None, (found["labels"], f'job="engines",instance="{instance}"')))
            columns.setdefault(f"{name}{{{labels}}}", ["_"] * (seconds + 1))[at] = value
    return [{"series": name, "values": " ".join(column)} for name, column in columns.items()]


def run(folder: Path, rule_file: Path, inputs: list[dict[str, str]], expectations: list[dict[str, Any]],
        every_s: int = 5, step_s: int = 1) -> None:
    """`promtool test rules`; fails with what it says."""
    need("promtool")
    test = {"rule_files": [str(rule_file)], "evaluation_interval": f"{every_s}s",
            "tests": [{"interval": f"{step_s}s", "input_series": inputs, "promql_expr_test": expectations}]}
    path = folder / "promtool-test.yml"
    path.write_text(json.dumps(test))  # JSON is YAML
    done = subprocess.run([find("promtool") or "", "test", "rules", str(path)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


class Told:
    """What a back-test says of each (rule, subject), as far as Prometheus must say the same.

    It must not where a page is missing: the agent holds its timers then (Gap-holding), and Prometheus cannot.
    """

    def __init__(self, result: Mapping[str, Any], rules: Mapping[str, Rule], every_s: float) -> None:
        self.result, self.rules, self.every_s = result, rules, every_s
        self.gaps: list[tuple[float, float]] = [tuple(gap) for gap in result["gaps"]]

    def firing(self, rule: str) -> list[tuple[float, float]]:
        """From when to when a rule fired."""
        found, begun = [], None
        for change in self.result["transitions"]:
            if change["rule"] == rule and change["state"] == "firing":
                begun = change["at_s"]
            elif change["rule"] == rule and change["state"] == "resolved" and begun is not None:
                found.append((begun, change["at_s"]))
                begun = None
        return found if begun is None else [*found, (begun, float("inf"))]

    def expected(self, rule: str, at_s: float) -> bool | None:
        """Whether it must fire at an evaluation, or must not; None: within one interval of a change, or a gap."""
        if any(a < at_s <= b for a, b in self.gaps):
            return None
        for begun, ended in self.firing(rule):
            if begun - self.every_s < at_s < begun + self.every_s or abs(at_s - ended) < self.every_s:
                return None
            if begun < at_s < ended:
                return True if self._is_sure(rule, begun, at_s) else None
        return False

    def _is_sure(self, rule: str, begun: float, at_s: float) -> bool:
        pending = [c["at_s"] for c in self.result["transitions"] if c["rule"] == rule and c["state"] == "pending"]
        window_s = self.rules[rule].window_s or 0.0
        since = min(max(at for at in pending if at <= begun), at_s - window_s)
        last_gap = max((b for a, b in self.gaps if b > since and a < at_s), default=None)
        if last_gap is None:
            return True
        spans = [(s["from_s"], s["to_s"]) for s in self.result["breaches"] if s["rule"] == rule and s["judged"]]
        settled_s = window_s + self.rules[rule].for_s + self.every_s
        return any(max(a, last_gap) + settled_s <= at_s <= b for a, b in spans)


def expectations(told: Told, rules: Iterable[str], subject: str, until_s: float, every_s: int = 5,
                 ) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """An expression for each evaluation, over those rules of which something is expected; how often each must fire."""
    found, fires = [], dict.fromkeys(rules, 0)
    for at_s in range(every_s, int(until_s), every_s):
        expected = {rule: told.expected(rule, at_s) for rule in fires}
        known = [rule for rule, fired in expected.items() if fired is not None]
        for rule in known:
            fires[rule] += bool(expected[rule])
        samples = [{"labels": f'{{rule="{rule}",subject="{subject}"}}', "value": 1} for rule in known if expected[rule]]
        which = f'ALERTS{{alertstate="firing",rule=~"{"|".join(known)}"}}'
        found.append({"expr": f"sum by (rule, subject) ({which})", "eval_time": f"{at_s}s", "exp_samples": samples})
    return found, fires
