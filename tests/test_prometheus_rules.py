"""The rules for Prometheus: promtool takes them, they are what ships, and they fire when a back-test does."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from agent.backtest import backtest
from agent.config import Config, load_all, slo_for
from agent.engines import KINDS, load_map
from agent.model import Rule, Slo
from agent.signals import CATALOGUE
from rules import prometheus
from rules.exported import DEPLOY, files
from rules.prometheus import at_least, over, over_engines, over_tocsin
from tests import promtool
from tests.needs import find, need
from tests.recordings import KV_PRESSURE, RECORDINGS, STARVED_HOST, rows, unpacked
from tests.scenes import built_in

SHIPPED = DEPLOY / "prometheus"
FILES = files()
UNWRITTEN = Slo()
DEFAULT = "poll: 1s\nslo: {ttft_p99: 500ms, itl_p99: 150ms}\nrules: {dirs: []}\n"
# Recordings are minutes long: shorter windows and tighter levels, so that each rule has something to say.
TIGHT = """
poll: 1s
slo: {ttft_p99: 500ms, itl_p99: 50ms}
rules:
  dirs: []
  override:
    preemptions: {window: 2m}
    preemption-storm: {window: 2m, fires: "> 20"}
    kv-cache-utilization: {fires: ">= 0.5", for: 20s, keep: 30s}
    queue-age: {fires: ">= 0.1 * slo.ttft_p99"}
"""
RULES = ("queue-age", "kv-cache-utilization", "preemptions", "preemption-storm", "ttft-p99", "itl-p99")
MUST_FIRE = {  # at how many evaluations at least, as the back-test has it
    (KV_PRESSURE, DEFAULT): {"ttft-p99": 2}, (STARVED_HOST, DEFAULT): {"queue-age": 1},
    (KV_PRESSURE, TIGHT): {"kv-cache-utilization": 5, "preemptions": 20, "preemption-storm": 10, "ttft-p99": 2,
                           "itl-p99": 10},
    (STARVED_HOST, TIGHT): {"queue-age": 1},
}


def configured(folder: Path, text: str) -> tuple[Config, Mapping[str, Rule]]:
    """A configuration and its rules by id."""
    path = folder / "tocsin.yaml"
    path.write_text(text)
    config, ruleset = load_all(path, {}, CATALOGUE)
    return config, {rule.id: rule for rule in ruleset.rules}


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "text"), MUST_FIRE, ids=lambda x: x if x in RECORDINGS else "tight" if x == TIGHT else
                         "as shipped")
def test_prometheus_fires_what_a_backtest_does_within_one_evaluation(tmp_path: Path, name: str, text: str) -> None:
    """H1, H2, H3, H5, H6 on every recording, at every evaluation: each fires when the agent's does, and else does not.

    Scraped each second as it was recorded, evaluated each 5 s. Not compared are one interval around each change, and
    what follows a missing page: the agent holds its timers then, and Prometheus cannot.
    """
    config, rules = configured(tmp_path, text)
    out = tmp_path / "engines.rules.yml"
    out.write_text(over_engines(list(rules.values()), slo_for(config), config.poll).partition("  - name: tocsin-eng"
                                                                                              "ines-budget")[0])
    result = backtest([unpacked(name, tmp_path)], config=config)
    (subject,) = result["engines"]

    wanted, fires = promtool.expectations(promtool.Told(result, rules, 5.0), RULES, subject,
                                          result["recording"]["seconds"])
    promtool.run(tmp_path, out, promtool.series(rows(name), out.read_text(), subject), wanted)

    assert {rule: fires[rule] >= least for rule, least in MUST_FIRE[name, text].items()} == dict.fromkeys(
        MUST_FIRE[name, text], True)


def test_every_recording_is_compared() -> None:
    """One that was added later, too."""
    assert {name for name, _ in MUST_FIRE} == set(RECORDINGS)


@pytest.mark.heavy
def test_the_other_rules_fire_where_it_was_worked_out_by_hand(tmp_path: Path) -> None:
    """An engine scraped each minute that fails 12 of 600 requests a minute, and one whose page is gone after 30 min.

    error-rate: of 5 min 60 of 3,000 are over 30 + 0.195 x sqrt(3,000) = 40.7. error-burn-fast: Wilson's lower bound
    of 2 % is 1.83 % after 45 min, a burn of 18.3; of the hour's budget that is 14.4 x after 47 min. The slow one:
    3 x over a day needs 4 h. Prefix cache: 800 of 2,000 tokens a minute, 10,000 after 5 min, and then 10 min of `for`.
    """
    config, rules = configured(tmp_path, "poll: 1m\nslo: {ttft_p99: 500ms}\nrules: {dirs: []}\n")
    out = tmp_path / "engines.rules.yml"
    out.write_text(over_engines(list(rules.values()), slo_for(config), config.poll))
    a, b = ('job="engines",instance="a"', 'job="engines",instance="b"')
    http = f'http_requests_total{{handler="/v1/completions",method="POST",status="%s",{a}}}'
    inputs = [{"series": name, "values": values} for name, values in (
        (f"up{{{a}}}", "1x60"), (f"up{{{b}}}", "1x29 0x30"),
        (f'vllm:num_requests_waiting{{engine="0",{a}}}', "0x60"),
        (f'vllm:num_requests_waiting{{engine="0",{b}}}', "0x29 stale"),
        (http % "2xx", "0+588x60"), (http % "5xx", "0+12x60"),
        (f'vllm:prefix_cache_queries_total{{engine="0",{a}}}', "0+2000x60"),
        (f'vllm:prefix_cache_hits_total{{engine="0",{a}}}', "0+800x60"))]

    def fires(at_min: int, *wanted: tuple[str, str]) -> dict[str, object]:
        return {"expr": 'sum by (rule, subject) (ALERTS{alertstate="firing"})', "eval_time": f"{at_min}m",
                "exp_samples": [{"labels": f'{{rule="{rule}",subject="{subject}"}}', "value": 1}
                                for rule, subject in wanted]}

    errors, cache, down = ("error-rate", "a"), ("prefix-cache-hit-rate", "a"), ("engine-down", "b")
    promtool.run(tmp_path, out, inputs, [
        fires(2), fires(8, errors), fires(14, errors), fires(20, errors, cache), fires(32, errors, cache),
        fires(36, errors, cache, down), fires(43, errors, cache, down),
        fires(52, errors, cache, down, ("error-burn-fast", "a"))], every_s=60, step_s=60)


@pytest.mark.parametrize(("file", "text"), FILES.items(), ids=[name.partition("/")[2] for name in FILES])
def test_what_ships_is_made_from_the_rules_as_they_are(file: str, text: str) -> None:
    """A rule was changed, and the file for Prometheus went on with the old one."""
    same = (DEPLOY / file).read_text() == text
    assert same, f"deploy/{file} is of older rules: `python -m rules.exported` writes it anew"


@pytest.mark.parametrize("file", ["tocsin-engines.rules.yml", "tocsin.rules.yml"])
def test_promtool_takes_what_ships(file: str) -> None:
    """Nothing is wrong in it, and nothing stands in it twice."""
    need("promtool")
    checked = subprocess.run([find("promtool") or "", "check", "rules", str(SHIPPED / file)], capture_output=True,
                             text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("limit", [0.5, 0.15, 0.3, 1.0, 2.5, 10.0, 0.75, 500.0, 0.099, 3.99, 0.25])
def test_the_bounds_around_a_limit_are_found_by_their_text(limit: float) -> None:
    """Whatever buckets a version has, as Python, Go, Rust and C++ write them; compared as numbers here."""
    bounds = ("0.001 0.005 0.01 0.1 0.15 0.2 0.25 0.3 0.4 0.5 0.75 1.0 1 2 2.5 5.0 5 7.5 10.0 10 20.0 40.0 80.0 160.0"
              " 640.0 2560.0 0.099 0.0990 0.09900001 3.99 3.9 4 100 499 499.9 500 500.000 501 1e+06 1e-05 +Inf 0.50001")
    for text in bounds.split():
        assert bool(re.fullmatch(at_least(limit), text)) is (float(text) >= limit), text
        assert bool(re.fullmatch(over(limit), text)) is (float(text) > limit), text


def test_every_name_of_every_engine_through_its_versions_is_in_the_file() -> None:
    """An engine that is a version older or newer than the ones on this screen."""
    text = (SHIPPED / "tocsin-engines.rules.yml").read_text()
    for kind in KINDS:
        engine_map = load_map(kind)
        for name in ("waiting", "ttft", "itl", "kv_usage", "preemptions", "prefix_hits", "spec_draft", "finished"):
            quantity = engine_map.quantities.get(name)
            for alias in quantity.names if quantity else ():
                want = alias.name.replace("vllm:", "vllm[:_]").removesuffix("_total") if kind == "ray-serve-llm" else \
                    alias.name
                assert want in text or want.startswith("trtllm_json"), (kind, alias.name)


def test_what_cannot_be_said_is_listed_and_nothing_else_is_left_out() -> None:
    """The list of the specification; every other rule is there as an alert."""
    text = (SHIPPED / "tocsin-engines.rules.yml").read_text()
    head, _, body = text.partition("groups:")
    groups = yaml.safe_load(f"groups:{body}")["groups"]
    there = {entry["labels"]["rule"] for group in groups for entry in group["rules"] if "alert" in entry}
    listed = " ".join(head.replace("#", " ").split())

    missing = {rule for rule in built_in(UNWRITTEN) if rule not in there}
    assert {rule for rule in missing if rule not in listed} == set()
    numbers = {rule.number for rule in built_in(UNWRITTEN).values() if rule.id in missing}
    assert {"H4", "H8", "H9", "M3", "M4"} <= numbers
    assert {rule.number for rule in built_in(UNWRITTEN).values() if rule.id in there} == {
        "H1", "H2", "H3", "H5", "H6", "H7", "H10", "M1", "M5", "M6", "M8", "L1"}
    assert "M7 business-metric" in listed
    assert "Gap-holding" in listed


def test_each_alert_says_what_its_number_counts() -> None:
    """"ttft-p99: 22" is no sentence: 22 of what?"""
    groups = yaml.safe_load(over_engines(list(built_in(Slo(e2e_p99=10.0, written=True)).values()),
                                         Slo(e2e_p99=10.0, written=True), 5.0))["groups"]
    said = {e["labels"]["rule"]: (e["annotations"]["summary"].partition("}: ")[2] or e["annotations"]["summary"])
            for group in groups for e in group["rules"] if "alert" in e}
    assert said["ttft-p99"] == "{{ $value | humanize }} slower than 0.5 s, over 1 % of all"
    assert said["itl-p99-undecided"] == "{{ $value | humanize }} possibly slower than 0.15 s, over 1 % of all"
    assert said["latency-p99"] == "{{ $value | humanize }} slower than 15 s, over 1 % of all"
    assert said["queue-age"] == "{{ $value | humanize }} requests have waited for over 6s"
    assert said["kv-cache-utilization"] == "{{ $value | humanizePercentage }} in use, limit 85 %"
    assert [rule for rule, text in said.items() if len(text.split()) < 4] == []


def test_a_promise_that_is_not_written_pages_nobody_and_says_so() -> None:
    """The same as the agent: what needs `slo:` is a ticket until somebody promises it."""
    def severities(slo: Slo) -> dict[str, str]:
        groups = yaml.safe_load(over_engines(list(built_in(slo).values()), slo, 5.0))["groups"]
        return {entry["labels"]["rule"]: entry["labels"]["severity"] for group in groups for entry in group["rules"]
                if "alert" in entry}

    unwritten, written = severities(UNWRITTEN), severities(Slo(e2e_p99=10.0, written=True))
    assert (unwritten["ttft-p99"], written["ttft-p99"], unwritten["engine-down"]) == ("ticket", "page", "page")
    assert {"latency-p99", "latency-p99-undecided"} == written.keys() - unwritten.keys()
    assert "Nobody has written `slo:`" in over_engines([], UNWRITTEN, 5.0)


def test_over_tocsin_s_own_metrics_every_rule_is_an_alert_and_the_dead_man_is_one_too(tmp_path: Path) -> None:
    """promtool's word: gpu-temperature fires with what the agent measured; an agent that stands still is a page."""
    rules = list(built_in(UNWRITTEN).values())
    out = tmp_path / "tocsin.rules.yml"
    out.write_text(over_tocsin(rules, CATALOGUE))
    names = [entry["alert"] for entry in yaml.safe_load(out.read_text())["groups"][0]["rules"]]
    assert len(names) == len(set(names)) == len(rules) + 4

    need("promtool")
    where = 'instance="a:9959",job="tocsin"'
    hot = {"rule": "gpu-temperature", "subject": "GPU-3", "severity": "ticket", "node": "gpu-17", "gpu": "GPU-3"}
    labels = ",".join([where, *(f'{name}="{value}"' for name, value in hot.items())])
    test = {
        "rule_files": [str(out)], "evaluation_interval": "15s",
        "tests": [{
            "interval": "15s",
            "input_series": [
                {"series": f"up{{{where}}}", "values": "1x20"},
                {"series": f"tocsin_tick_timestamp_seconds{{{where}}}", "values": "0+15x10 150x10"},
                {"series": f"tocsin_alert_state{{{labels}}}", "values": "1 1 2x18"},
                {"series": f'tocsin_gpu_temperature_celsius{{subject="GPU-3",{where}}}', "values": "91x20"}],
            "alert_rule_test": [
                {"eval_time": "15s", "alertname": "GpuTemperature", "exp_alerts": []},
                {"eval_time": "45s", "alertname": "GpuTemperature", "exp_alerts": [{
                    "exp_labels": hot | {"number": "H9", "instance": "a:9959", "job": "tocsin"},
                    "exp_annotations": {"summary": "gpu-temperature of GPU-3 on a:9959", "value": "91",
                                        "action": "Look at cooling and airflow; move load away."}}]},
                {"eval_time": "195s", "alertname": "TocsinDown", "exp_alerts": []},
                {"eval_time": "225s", "alertname": "TocsinDown", "exp_alerts": [{
                    "exp_labels": {"rule": "tocsin-down", "severity": "page", "instance": "a:9959", "job": "tocsin"},
                    "exp_annotations": {
                        "summary": "Tocsin on a:9959 is gone or no longer judges: nobody is paged for that node",
                        "action": "systemctl status tocsin; journalctl -u tocsin"}}]},
            ]}]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test))
    done = subprocess.run([find("promtool") or "", "test", "rules", str(path)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_of_one_s_own_has_a_place_in_both_files(tmp_path: Path) -> None:
    """A rule on a signal that has a form is exported; overrides and `disable` count."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "x.yaml").write_text("- id: kv-nearly-full\n  signal: kv_cache_utilization\n  fires: '>= 0.7'\n"
                                             "  for: 5m\n  severity: info\n  action: Look.\n")
    text = f"rules: {{dirs: ['{tmp_path}/own'], disable: [swapped], override: {{preemptions: {{window: 30m}}}}}}\n"
    config, rules = configured(tmp_path, text)
    told = over_engines(list(rules.values()), slo_for(config), config.poll)
    assert "alert: KvNearlyFull" in told
    assert "alert: Swapped" not in told
    assert "tocsin:preemptions:increase30m > 0" in told
    assert 'tocsin_alert_state{rule="kv-nearly-full"} == 2' in prometheus.over_tocsin(list(rules.values()), CATALOGUE)
