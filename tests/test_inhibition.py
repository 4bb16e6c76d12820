"""The configuration for Alertmanager: who mutes whom, and that a second alert does not wait for 5 minutes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agent.model import Rule
from agent.silences import matchers
from rules.alertmanager import ROUTE, export, inhibitions
from tests.alertmanager import RealAlertmanager
from tests.needs import find, need
from tests.receiver import Receiver, wait_until
from tests.scenes import built_in
from tests.test_alertmanager import Node

ROOT = Path(__file__).parents[1]
RULES = list(built_in().values())


def rule(name: str, *causes: str, severity: str = "page") -> Rule:
    """A rule of which only its causes count."""
    return Rule(name, "signal", ">", 1.0, "page" if severity == "page" else "ticket", causes=causes)


def test_a_page_mutes_what_it_can_cause_also_through_others() -> None:
    """A hot GPU makes a rank slow, which fills the queue. A ticket mutes nothing, and may be muted."""
    found = inhibitions([rule("gpu", "rank"), rule("rank", "queue"), rule("queue"),
                         rule("kv", "queue", severity="ticket"), rule("storm", "kv")])
    assert found == {"gpu": ["queue", "rank"], "rank": ["queue"], "storm": ["kv", "queue"]}


def test_two_that_cause_each_other_do_not_both_fall_silent() -> None:
    """In Alertmanager each would have muted the other, and nobody had heard of either."""
    assert inhibitions([rule("a", "b", "c"), rule("b", "a"), rule("c")]) == {"a": ["c"], "b": ["c"]}


def test_both_sides_name_an_engine_and_are_of_one_node() -> None:
    """Of the shipped rules: each cause once, as the specification has it, and amtool takes the file as it is."""
    told = yaml.safe_load(export(RULES))
    assert (told["route"]["group_by"], told["route"]["group_wait"], told["route"]["group_interval"]) == (
        ["node", "rule", "subject"], "1s", "1m")
    assert len(told["inhibit_rules"]) == len({r["source_matchers"][0] for r in told["inhibit_rules"]}) > 10
    for one in told["inhibit_rules"]:
        assert one["equal"] == ["node", "engine"]
        assert 'engine=~".+"' in one["source_matchers"]
        assert 'engine=~".+"' in one["target_matchers"]
    hot = next(r for r in told["inhibit_rules"] if r["source_matchers"][0] == 'rule="gpu-thermal-limit"')
    assert set(hot["target_matchers"][0].removeprefix('rule=~"').removesuffix('"').split("|")) == {
        "gpu-thermal-slowdown", "rank-straggler", "rank-clock-spread", "rank-spread", "itl-p99", "queue-age",
        "ttft-p99", "latency-p99"}


def test_amtool_takes_the_file_that_ships() -> None:
    """As it is, without a word of the user's."""
    path = ROOT / "deploy" / "prometheus" / "alertmanager.yml"
    need("amtool")
    checked = subprocess.run([find("amtool") or "", "check-config", str(path)], capture_output=True, text=True,
                             check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.heavy
def test_a_cause_mutes_its_symptom_of_the_same_engine_and_nobody_else_s(tmp_path: Path, free_port: Callable[[], int],
                                                                       ) -> None:
    """With the real Alertmanager: GPU 3, llama's, is hot; qwen runs on GPUs 4-7, and nobody knows whose GPU 9 is."""
    hook = "  - name: on-call\n    webhook_configs: [{{url: '{url}', send_resolved: true}}]\n"
    text = export(RULES).replace("{", "{{").replace("}", "}}").replace(ROUTE.rpartition("receivers:\n")[2], hook)
    with Receiver() as receiver, RealAlertmanager(tmp_path / "am", free_port(), receiver.url, config=text) as real:
        node = Node(tmp_path / "tocsin.db", [real.url])
        try:
            node.fire("Hot", rule="gpu-thermal-limit", subject="GPU-3", gpu="GPU-3", engine="llama")
            node.fire("HotToo", rule="gpu-thermal-limit", subject="GPU-9", gpu="GPU-9")
            wait_until(lambda: len(real.alerts()) == 2, 60.0, "both causes")
            began = time.monotonic()
            node.fire("SlowLlama", rule="itl-p99", subject="llama", engine="llama")
            node.fire("SlowNode", rule="node-error-burn-fast", subject="n1")
            node.fire("SlowQwen", rule="itl-p99", subject="qwen", engine="qwen")
            node.fire("LlamaFull", rule="kv-cache-utilization", subject="llama", engine="llama", severity="ticket")
            want = {("firing", name) for name in ("Hot", "HotToo", "SlowNode", "SlowQwen", "LlamaFull")}
            receiver.wait_until(lambda _: want <= set(receiver.alerts()), 60.0, str(want))
            assert time.monotonic() - began < 100.0  # on the defaults it is 5 minutes; no busy machine takes so long

            by_name = {alert["labels"]["alertname"]: alert["status"] for alert in real.alerts()}
            assert by_name["SlowLlama"]["inhibitedBy"] != []
            assert [name for name, status in by_name.items() if status["inhibitedBy"]] == ["SlowLlama"]
            silence = [find("amtool") or "", "silence", "add", f"--alertmanager.url={real.url}", "--author=anna",
                       *matchers("itl-p99", "qwen", "n1"), "--duration=60s", "--comment=as tocsin silence prints it"]
            subprocess.run(silence, check=True, capture_output=True)
            wait_until(lambda: [a["labels"]["alertname"] for a in real.alerts() if a["status"]["silencedBy"]]
                       == ["SlowQwen"], 60.0, "the same silence there")
            node.resolve("Hot")  # its group is looked at again a minute later: the symptom pages then
            wait_until(lambda: not next(a for a in real.alerts() if a["labels"]["alertname"] == "SlowLlama")
                       ["status"]["inhibitedBy"], 60.0, "the symptom is free")
            assert ("firing", "SlowLlama") not in receiver.alerts()[:5]
        finally:
            node.close()
