"""The options of engines in pods: what pods and /proc show, what the agent remembers, what lint makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import lint, lint_facts, lint_report, oneshot
from agent.config import Config, EngineConfig
from agent.daemon import DATABASE, adopt, setup_of
from agent.lint_case import Facts
from agent.model import Batch, FoundEngine, PodFacts
from agent.sources.discovery import DiscoverySource, Process, options_of
from agent.sources.pods import PodsSource, kept, options_in
from drills.cluster import Object
from tests.engine_pages import PAGES
from tests.kube.scene import Api
from tests.kube.test_discovery import pod
from tests.page_server import PageServer
from tests.receiver import wait_until
from tests.test_discovery import CGROUPS, TRIE, FakeProc
from tests.test_lint import finding, target_at
from tests.test_loop import Life, Scripted
from tests.test_node import node, restarted

LONG_S = 60.0
SECRET = "s3cr3t-of-a-test"
SERVE = ["vllm", "serve", "m"]


def of_shell(script: str) -> dict[str, Any]:
    """A container whose shell runs a script."""
    return {"image": "vllm/vllm-openai:v0.32", "command": ["/bin/sh", "-c"], "args": [script]}


@pytest.mark.parametrize(("story", "container", "want"), [
    ("a command and its args", {"command": SERVE, "args": ["--max-num-seqs", "32", "--enforce-eager"]},
     {"model": "m", "max-num-seqs": "32", "enforce-eager": ""}),
    ("the image of vLLM's makers, which has the command", {
        "image": "r:5000/vllm/vllm-openai:v0.32@sha256:aa", "args": ["--model", "m", "--max-num-seqs=32"]},
     {"model": "m", "max-num-seqs": "32"}),
    ("TGI's", {"image": "ghcr.io/huggingface/text-generation-inference:3", "args": ["--model-id", "m"]},
     {"model-id": "m"}),
    ("somebody's own image: what it adds, nobody sees", {"image": "corp/llm", "args": ["--max-num-seqs", "32"]}, {}),
    ("a secret", {"command": SERVE, "args": ["--api-key", SECRET, f"--hf-token={SECRET}", "--max-num-seqs", "32"]},
     {"model": "m", "max-num-seqs": "32"}),
    ("the kubelet's variable: a value nobody looks up", {"command": SERVE, "args": ["--max-num-seqs", "$(SEATS)"]},
     {"model": "m", "max-num-seqs": "$(SEATS)"}),
    ("one that may be more options", {"command": SERVE, "args": ["--max-num-seqs", "32", "$(EXTRA_ARGS)"]}, {}),
    ("a word of which nobody knows what it is", {"command": SERVE, "args": ["--max-num-seqs", "32", "$(X)"]}, {}),
    ("its model", {"command": ["vllm", "serve", "$(MODEL)"], "args": ["--max-num-seqs", "32"]},
     {"model": "$(MODEL)", "max-num-seqs": "32"}),
    ("vLLM's own example for Kubernetes", of_shell("vllm serve m --trust-remote-code --max_num_batched_tokens 1024"),
     {"model": "m", "trust-remote-code": "", "max-num-batched-tokens": "1024"}),
    ("a script", of_shell("set -e\npip install x && \\\nHF_HOME=/m exec vllm serve m \\\n  --max-num-seqs ${SEATS} "
                          "--port $(PORT) 2>&1 | tee /log\n"),
     {"model": "m", "max-num-seqs": "$(SEATS)", "port": "$(PORT)"}),
    ("a script with all that its caller says", of_shell('exec vllm serve m --max-num-seqs 32 "$@"'), {}),
    ("an array of a script", of_shell('exec vllm serve m "${MORE[@]}" --max-num-seqs 32'), {}),
    ("a default of a script", of_shell('vllm serve m --max-num-seqs "${SEATS:-64}" --enforce-eager'),
     {"model": "m", "max-num-seqs": "${SEATS:-64}", "enforce-eager": ""}),
    ("one that counts the GPUs: what comes after is not read", of_shell(
        "vllm serve m --tensor-parallel-size $(nvidia-smi -L | wc -l) --max-num-seqs 32"), {}),
    ("the same, as it was written of old", of_shell("vllm serve m -tp `nproc` --max-num-seqs 32"), {}),
    ("a comment is none of its options", of_shell(
        f"vllm serve m --max-num-seqs 32 # --max-num-seqs 256 {SECRET}\n# vllm serve it's not this"),
     {"model": "m", "max-num-seqs": "32"}),
    ("a comment ends a command that went on", of_shell("vllm serve m \\\n  # --max-num-seqs 256\n  --enforce-eager\n"),
     {"model": "m"}),
    ("a mark in a word or in quotes is no comment", of_shell("vllm serve m#1 --chat-template '# a\n# b' --port 8000"),
     {"model": "m#1", "chat-template": "# a\n# b", "port": "8000"}),
    ("a word after one that has no value", of_shell("vllm serve m --enable-prefix-caching $MORE"), {}),
    ("the same of the kubelet", {"command": SERVE, "args": ["--enable-expert-parallel", "$(MORE)"]}, {}),
    ("what its caller says", of_shell("vllm serve m --max-num-seqs 32 --enforce-eager $1"), {}),
    ("options that may be there", of_shell("vllm serve m --max-num-seqs 32 ${QUANT:+--quantization fp8}"), {}),
    ("a value that may be there", of_shell('vllm serve m --max-num-seqs "${SEATS:+32}"'), {}),
    ("a name that nobody sees", of_shell("vllm serve m --$NAME=1"), {}),
    ("a document in it", of_shell("cat <<E >/c\nvllm serve m --max-num-seqs 256\nE\nexec /start"), {}),
    ("a script with two", of_shell("if a; then b; fi; vllm serve m --max-num-seqs 32 || vllm serve m"), {}),
    ("a script that no shell would read", of_shell("vllm serve 'm"), {}),
    ("a script of another program", of_shell("python serve.py --max-num-seqs 32"), {}),
    ("nothing at all", {}, {}),
])
def test_what_a_pod_shows_of_its_engine_s_options(story: str, container: dict[str, Any], want: dict[str, str]) -> None:
    """Half of lint could not tell on Kubernetes, although the pod says it. What shows but a part of them is unknown."""
    for one in (pod(container), kept(pod(container))):
        assert options_in(one, 8000) == want, story


def test_of_two_engines_in_a_pod_each_has_its_own() -> None:
    """By the port; where both are at one or at neither, nobody knows whose it is."""
    two = pod({"command": [*SERVE, "--port", "8001", "--max-num-seqs", "16"]})
    two["spec"]["containers"].append({"name": "d", "command": [*SERVE, "--port", "8002", "--max-num-seqs", "256"]})
    assert [options_in(two, port).get("max-num-seqs") for port in (8001, 8002, 8003)] == ["16", "256", None]


@pytest.mark.parametrize(("story", "seats", "verdict", "words"), [
    ("a number", "64", "at odds", "--max-num-seqs 64"),
    ("a default of a script is no number", "${SEATS:-64}", "cannot tell", "--max-num-seqs ${SEATS:-64}"),
    ("one of the pod's environment is no default of 128", "$(SEATS)", "cannot tell", "--max-num-seqs $(SEATS)"),
])
def test_a_value_that_nobody_sees_is_not_vllm_s_default(story: str, seats: str, verdict: str, words: str) -> None:
    """`--max-num-seqs $(SEATS)` was judged as if it were not there."""
    of = Facts("e", "vllm", profile="latency", options={"model": "m", "max-num-seqs": seats})
    found = finding(1, of)
    assert (found["verdict"], words in "; ".join(found["evidence"])) == (verdict, True), (story, found)


@pytest.mark.parametrize(("number", "options", "more"), [
    (1, {"max-num-seqs": "32", "enable-chunked-prefill": "$(C)"}, {"profile": "latency"}),
    (1, {"max-num-seqs": "64", "speculative-config": "$(S)"}, {"profile": "throughput"}),
    (1, {"np": "64", "speculative-config": "$(S)"}, {"profile": "throughput", "numbers": {"acceptance": 0.9}}),
    (6, {"quantization": "$(Q)"}, {"model": {}}), (11, {"quantization": "${Q}"}, {"model": {}}),
    (7, {"max-num-seqs": "128", "speculative-config": "$(S)"}, {}),
    (7, {"max-num-seqs": "128", "speculative-config": "$(S)"}, {"numbers": {"acceptance": 0.9, "drafted": 9e5}}),
    (11, {"kv-cache-dtype": "$(KV)"}, {"model": {}}),
])
def test_no_judge_takes_a_variable_for_a_value(number: int, options: dict[str, str], more: dict[str, Any]) -> None:
    """`--kv-cache-dtype "$(KV)"` was at odds, as quantized; `--quantization "$(Q)"` stood not on the command line."""
    found = finding(number, Facts("e", "vllm", options=options, **more))
    name, value = list(options.items())[-1]
    assert found["verdict"] == "cannot tell"
    assert f"--{name} {value} is of its pod's environment" in "; ".join(found["evidence"])


def test_no_block_pins_the_address_of_a_pod() -> None:
    """What is configured is no found pod any more, and after the next rollout its address is nobody's: engine-down."""
    of = Facts("llm/vllm#0", "vllm", pods_of="llm/vllm", url="http://10.42.0.7:8000", signals=[])
    told = json.dumps(lint.judge(of))
    assert "10.42.0.7" not in told
    assert '"--profile latency (or throughput) on this command"' in told
    assert 'urls: [\\"http://USERS\\"]' in told
    assert "10.42.0.7" in json.dumps(lint.judge(replace(of, configured="e")))  # somebody wrote it down


# ---- what the agent remembers ----


def in_pod(at: str, seats: str, *, uid: str = "u-1", by: str = "pods", version: str | None = "0.32.0",
           workload: str = "llm/chat") -> FoundEngine:
    """An engine of a pod, as one of the discoveries finds it."""
    return FoundEngine(at, f"http://{at}", "vllm", "its command line", 0, pod=uid, version=version,
                       workload=workload if by == "pods" else "", options={"max-num-seqs": seats},
                       pids=() if by == "pods" else (100,))


def test_two_pods_at_one_port_are_two_engines_and_a_rollout_changes_one() -> None:
    """All engines of a cluster are at port 8000: what one of them runs with was nobody's."""
    here = node("queue-age", targets=())
    chat, batch = in_pod("10.244.3.7:8000", "32"), in_pod("10.244.3.8:8000", "256", uid="u-2", workload="llm/batch")
    here.see([chat, batch], 1.0, "pods")
    later = restarted(here)
    later.see([chat, batch], 8.0, "pods")
    later.see([in_pod("10.244.3.9:8000", "64", uid="u-3"), batch], 9.0, "pods")
    told = later.learned.configs
    assert {name: [one["options"]["max-num-seqs"] for one in known] for name, known in told.items()} == {
        "llm/chat#0": ["32", "64"], "llm/batch#0": ["256"]}
    assert lint_facts.changes(told["llm/chat#0"]) == [{"at": 9.0, "what": "--max-num-seqs 32 → 64"}]


def test_a_pod_that_comes_before_the_old_one_goes_is_a_change_of_its_workload() -> None:
    """A rollout with a surge: the new pod is #1 and has no past of its own, and nothing was told of it."""
    here = node("queue-age", targets=())
    here.take(Batch("pods", 1.0, 0.0, pods=tuple(PodFacts("llm", uid, uid, "Running") for uid in ("u-1", "u-3"))))
    old = in_pod("10.244.3.7:8000", "32")
    here.see([old], 1.0, "pods")
    here.see([old, in_pod("10.244.3.9:8000", "64", uid="u-3")], 9.0, "pods")
    assert lint_facts.changes(here.learned.configs["llm/chat#1"]) == [{"at": 9.0, "what": "--max-num-seqs 32 → 64"}]
    here.see([old, in_pod("10.244.3.9:8000", "64", uid="u-3")], 10.0, "pods")
    assert len(here.learned.configs["llm/chat#0"]) == 1


def test_one_whose_version_is_not_told_yet_is_not_noted() -> None:
    """It loads: a version of None, then 0.32.0, would be a change."""
    here = node("queue-age", targets=())
    here.see([in_pod("10.244.3.7:8000", "32", version=None)], 1.0, "pods")
    assert here.learned.configs == {}


def test_proc_is_nearer_to_the_truth_than_the_api_and_no_change() -> None:
    """With both rights the two tell by turns, one `$(SEATS)` and the other 64: a change every half minute."""
    here, at = node("queue-age", targets=()), "10.244.3.7:8000"
    spec, seen = in_pod(at, "$(SEATS)"), in_pod(at, "64", by="discovery")
    for when, (by, engine) in enumerate([("pods", spec), ("discovery", seen)] * 3):
        here.see([engine], float(when), by)
    rolled_spec, rolled = in_pod(at, "$(SEATS)", uid="u-2"), in_pod(at, "128", uid="u-2", by="discovery")
    for when, (by, engine) in enumerate([("pods", rolled_spec), ("discovery", rolled)] * 3, 10):
        here.see([engine], float(when), by)
    known = here.learned.configs["llm/chat#0"]
    assert lint_facts.changes(known) == [{"at": 11.0, "what": "--max-num-seqs 64 → 128"}]
    assert {name for name, of in here.learned.configs.items() if of} == {"llm/chat#0"}


def test_a_value_that_nobody_sees_is_no_change() -> None:
    """The right to see processes was taken away: `$(SEATS)` may well be the 64 that it was."""
    configs = [{"at": float(at), "version": "0.32.0", "options": {"max-num-seqs": seats}}
               for at, seats in enumerate(["64", "$(SEATS)", "$(SEATS)"])]
    assert lint_facts.changes(configs) == []


def test_engines_that_are_gone_are_not_remembered_for_ever() -> None:
    """Without the API a pod is its address, and each new one another: a year of rollouts filled the state."""
    here = node("queue-age", targets=())
    for n in range(100):
        here.see([in_pod(f"10.244.3.{n}:8000", "32", uid=f"u-{n}", by="discovery")], float(n))
        here.learned.found.clear()
    assert len(here.learned.configs) == 33
    assert "10.244.3.99:8000" in here.learned.configs


# ---- what /proc shows ----


def in_network(proc: FakeProc, pid: int, line: str, *, address: str, cgroup: str = "") -> None:
    """A process in a network namespace of its own, that listens there."""
    proc.add(pid, line, namespace=f"net:[{pid}]", sockets=(pid + 7,))
    home = proc.folder / str(pid)
    (home / "net").mkdir()
    (home / "net" / "fib_trie").write_text(TRIE.replace("10.244.3.7", address))
    (home / "net" / "tcp").write_text(f"  sl\n 0: 00000000:1F40 00000000:0000 0A 0:0 0:0 0 0 0 {pid + 7}\n")
    if cgroup:
        (home / "cgroup").write_text(cgroup)


def test_a_process_in_a_pod_has_its_options_and_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the port of both, and each asked for its version once, at its own address."""
    proc, asked = FakeProc(tmp_path / "proc"), list[str]()
    other = CGROUPS["systemd"].replace("00000000000a", "00000000000b")
    in_network(proc, 100, f"vllm serve m --max-num-seqs 32 --api-key {SECRET}", address="10.244.3.7",
               cgroup=CGROUPS["systemd"])
    in_network(proc, 200, "vllm serve m --max-num-seqs 256", address="10.244.3.8", cgroup=other)

    def version_at(url: str) -> str:
        asked.append(url)
        return "0.32.0"

    monkeypatch.setattr("agent.sources.discovery.version_at", version_at)
    source = DiscoverySource(proc=proc.folder, every_s=0.0)
    for _ in range(3):
        found = source.read(1.0).found or ()
    assert [(one.name, one.options["max-num-seqs"], one.version) for one in found] == [
        ("10.244.3.7:8000", "32", "0.32.0"), ("10.244.3.8:8000", "256", "0.32.0")]
    assert SECRET not in repr(found)
    assert asked == ["http://10.244.3.7:8000", "http://10.244.3.8:8000"]


def test_a_container_on_a_bridge_is_read_where_it_is_configured_and_its_options_are_remembered(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options were nobody's. What nobody configured is said with its address, and not read."""
    proc = FakeProc(tmp_path / "proc")
    monkeypatch.setattr("agent.sources.discovery.version_at", lambda _: "0.32.0")
    in_network(proc, 100, "vllm serve m --max-num-seqs 32", address="172.17.0.2")
    in_network(proc, 200, "vllm serve m --max-num-seqs 256", address="172.17.0.3")
    found, note = proc.look()
    assert note.split("; ")[1] == ("a vLLM (process 200) in another network namespace: name its address under engines"
                                   " (http://172.17.0.3:8000)")
    config = Config(engines=(EngineConfig(name="chat", url="http://172.17.0.2:8000"),))
    here = node("queue-age", targets=tuple(setup_of(config, ()).targets))
    here.see(found, 1.0)
    here.see([found[0]._replace(options={"max-num-seqs": "64"})], 2.0)
    assert lint_facts.changes(here.learned.configs["chat"]) == [{"at": 2.0, "what": "--max-num-seqs 32 → 64, --model m"
                                                                 " → absent"}]
    assert (here.learned.found, list(here.learned.configs)) == ({}, ["chat"])
    monkeypatch.setattr(oneshot, "DiscoverySource", lambda: DiscoverySource(proc=proc.folder))
    assert oneshot._discovered(Config())[0].engines == ()


def test_lint_on_the_machine_knows_whose_process_an_address_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               ) -> None:
    """Pods and containers on a docker bridge: two networks with the same port, and one of this machine."""
    proc = FakeProc(tmp_path / "proc")
    in_network(proc, 100, "vllm serve m --max-num-seqs 32", address="172.17.0.2")
    in_network(proc, 200, "vllm serve m --max-num-seqs 256", address="172.17.0.3")
    here = [Process(pid, tuple((proc.folder / str(pid) / "cmdline").read_text().rstrip("\0").split("\0")))
            for pid in (100, 200)]
    monkeypatch.setattr(lint_facts, "PROC", proc.folder)

    def seats(url: str) -> str | None:
        process = lint_facts._process(url, here)
        return None if process is None else options_of(process.argv)["max-num-seqs"]

    assert [seats(f"http://{at}:8000") for at in ("172.17.0.2", "172.17.0.3", "172.17.0.4", "127.0.0.1")] == [
        "32", "256", None, None]  # of the last: published by one of them, and nothing says by which
    proc.add(300, "vllm serve m --max-num-seqs 64")
    here.append(Process(300, ("vllm", "serve", "m", "--max-num-seqs", "64")))
    assert seats("http://127.0.0.1:8000") == "64"


# ---- the story ----


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """An agent without a target of its own, which reads what it finds."""
    one = Life(tmp_path / "state")
    one.folder.mkdir()
    one.targets, one.rules = (), ("engine-down",)
    yield one
    one.kill()


def lint_of(life: Life, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, dict[int, dict[str, Any]]], str]:
    """Engine -> principle -> finding, by what the agent's socket answers; and the page."""
    assert life.agent is not None
    told = {path: json.loads(json.dumps(answer)) for path, answer in (
        ("/doctor", life.agent.doctor()), ("/check", life.agent.check()))}
    assert SECRET not in json.dumps(told)
    monkeypatch.setattr(lint_facts, "ask", lambda _, path: told[path])
    monkeypatch.setattr(lint_facts, "time", SimpleNamespace(time=lambda: life.clocks.unix))
    looked = lint_facts.look(Config(state_dir=life.folder), [], profile="latency")
    heads = [dict(head) | {"findings": lint.judge(facts)} for head, facts in looked.engines]
    page = "\n".join(lint_report.report({"engines": heads, "errors": looked.errors}))
    return {head["engine"]: {one["number"]: one for one in head["findings"]} for head in heads}, page


def test_two_engines_of_a_node_are_judged_each_by_its_own_and_a_rollout_of_one_is_told(
        api: Api, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """chat has 32 seats and batch 256; then chat is rolled to 64. All that lint knows comes through the API."""
    of_node, pages = api.node(), dict[str, PageServer]()
    source = PodsSource(of_node, again_s=0.2)
    agent = life.start(Scripted("pods", source.read))
    agent.adopt = lambda found: adopt(Config(), found, None)

    def start(name: str, seats: int, workload: str) -> Object:
        pages[name] = PageServer(PAGES["vllm-0.32"](600))
        pages[name].others["/version"] = b'{"version": "0.32.0"}'
        args = ["m", "--port", str(pages[name].port), "--max-num-seqs", str(seats), "--api-key", SECRET]
        return api.pod(name, node=of_node, owner=workload, container={"command": ["vllm", "serve"], "args": args})

    def until(is_so: Callable[[], bool], what: str) -> None:
        def ticked() -> bool:
            life.tick()
            return is_so()
        wait_until(ticked, LONG_S, what)

    def seats() -> dict[str, list[str]]:
        return {name.rpartition("/")[2]: [one["options"]["max-num-seqs"] for one in known]
                for name, known in agent.node.learned.configs.items()}

    try:
        chat = start("chat-a", 32, "chat")
        start("batch-a", 256, "batch")
        until(lambda: len(agent.node.facts) == 2 and all(one.engines for one in agent.node.facts.values()), "both")
        until(lambda: seats() == {"chat#0": ["32"], "batch#0": ["256"]}, "their options")
        found, _ = lint_of(life, monkeypatch)
        mine = {name.rpartition("/")[2]: of for name, of in found.items()}
        assert [mine[name][1]["verdict"] for name in ("chat#0", "batch#0")] == ["kept", "at odds"]
        assert "--max-num-seqs 256" in mine["batch#0"][1]["evidence"]
        assert all("no change of its configuration" in mine[name][8]["evidence"][0] for name in ("chat#0", "batch#0"))

        api.gone(chat)
        start("chat-b", 64, "chat")
        until(lambda: seats() == {"chat#0": ["32", "64"], "batch#0": ["256"]}, "the rollout")
        until(lambda: all(one.engines for one in agent.node.facts.values()), "its page")
        found, page = lint_of(life, monkeypatch)
        mine = {name.rpartition("/")[2]: of for name, of in found.items()}
        assert mine["chat#0"][8]["verdict"] == "at odds"
        assert "--max-num-seqs 32 → 64" in mine["chat#0"][8]["evidence"][0]
        assert "no change of its configuration" in mine["batch#0"][8]["evidence"][0]
        assert "own machine" not in page
        assert SECRET not in page
    finally:
        source.close()
        for one in pages.values():
            one.stop()
    life.kill()
    stored = b"".join(file.read_bytes() for file in life.folder.glob(f"{DATABASE}*"))
    assert b"max-num-seqs" in stored
    assert SECRET.encode() not in stored


def test_lint_of_an_address_asks_the_agent_for_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl exec … tocsin lint http://10.244.3.7:8000` in the agent's own pod, which sees no other process."""
    target = {**target_at(8000, "m"), "target": "10.244.3.7:8000", "url": "http://10.244.3.7:8000"}
    known = {**target, "target": "llm/chat#0", "configs": [
        {"at": float(at), "version": "0.32.0", "options": {"max-num-seqs": seats}}
        for at, seats in ((1, "8"), (2, "9"))]}
    monkeypatch.setattr(lint_facts, "doctor", lambda *_, **__: {"targets": [target], "gpus": []})
    monkeypatch.setattr(lint_facts, "ask", lambda *_: {"targets": [{**known, "url": "http://10.244.3.8:8000",
                                                                    "configs": []}, known]})
    monkeypatch.setattr(lint_facts, "_text", lambda _: "")
    ((head, found),) = lint_facts.look(Config(), ["http://10.244.3.7:8000"]).engines
    assert (found.options, head["version"]) == ({"max-num-seqs": "9"}, "0.32.0")


def test_an_engine_that_is_configured_by_its_pod_s_address_has_its_options() -> None:
    """It is read under the name of the configuration."""
    config = Config(engines=(EngineConfig(name="chat", url="http://10.244.3.7:8000"),))
    here = node("queue-age", targets=tuple(setup_of(config, ()).targets))
    here.see([in_pod("10.244.3.7:8000", "32")], 1.0, "pods")
    assert [one["options"] for one in here.learned.configs["chat"]] == [{"max-num-seqs": "32"}]
    assert here.learned.found == {}


def test_a_version_is_asked_once_a_run_and_where_it_is_ready(api: Api) -> None:
    """Another image of the same tag is another version; one that loads is not asked."""
    of_node = api.node()
    with PageServer(PAGES["vllm-0.32"](600)) as page:
        page.others["/version"] = b'{"version": "0.32.0"}'
        container = {"command": [*SERVE, "--port", str(page.port)]}
        made = api.pod("vllm-a", node=of_node, ready=False, container=container)
        source = PodsSource(of_node, again_s=0.2)

        def version() -> str | None:
            batch: Batch = source.read(time.time())
            return batch.found[0].version if batch.found else "no engine"

        try:
            wait_until(lambda: version() is None, LONG_S, "the pod")
            assert page.seen == []
            runs: dict[str, Any] = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
            for run, told in (("c://1", "0.32.0"), ("c://2", "0.33.0")):
                page.others["/version"] = json.dumps({"version": told}).encode()
                api.be_ready("pods", api.namespace, made["metadata"]["name"], **runs, containerStatuses=[
                    {"name": "engine", "containerID": run, "image": "x", "imageID": "x", "ready": True,
                     "restartCount": 0}])
                wait_until(lambda told=told: version() == told, LONG_S, "its version")  # type: ignore[misc]
                version()
            assert [path for path, _ in page.seen] == ["/version"] * 2
        finally:
            source.close()
