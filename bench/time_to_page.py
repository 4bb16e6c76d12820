"""From a breach in an engine's page, or an Xid in the kernel log, to the webhook behind a real Alertmanager.

    python -m bench.time_to_page [--short]        (from the repository's root: it builds tests' stand-in)

`tocsin run` with our Alertmanager's route, beside Prometheus and Alertmanager tuned to our poll (scrapes and judges
every 5 s, waits 1 s for a group) and both on their defaults (1 min, 30 s, and 5 min before a group is told anew), on
the same engines at the same time. A breach is put into a page at a random moment: a preemption (`for: 0`), and a KV
cache over its limit. From then on the time runs until the request with an alert that fired since is whole at the
receiver. Our Alertmanager's group_wait of 1 s is taken off where a row says so. Windows are shortened to 1 min, so that
an engine can break more than once. The defaults need minutes for one alert: the long form alone measures them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import Figure, arguments, free_port, say, tell
from tests.agent_process import AgentProcess
from tests.alertmanager import RealAlertmanager
from tests.engine_pages import GOLDEN
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.page_server import PageServer
from tests.receiver import Receiver

POLL_S, GROUP_WAIT_S, GPUS = 5.0, 1.0, 8
XIDS = (79, 95, 74, 94)  # each another rule's
PREEMPTION, KV, XID = "preemption", "kv", "xid"
ALERT_OF = {"preemptions": PREEMPTION, "Preemptions": PREEMPTION, "kv-cache-utilization": KV, "KvCache": KV}


class Plan(NamedTuple):
    """How long, and how much. `rounds`: how often each engine breaks, `apart_s` of each other."""

    engines: int
    rounds: int
    apart_s: float
    kv_for_s: float
    xids: int
    warm_up_s: float
    wait_s: float  # for the last ones
    defaults: bool


LONG = Plan(40, 5, 160.0, 60.0, 32, 70.0, 400.0, True)
SHORT = Plan(25, 1, 20.0, 10.0, 8, 31.0, 20.0, False)


@dataclass
class Engine:
    """A page whose counters move, and which breaks when it is told."""

    preempted: int = 0
    kv: float = 0.5
    began: float = field(default_factory=time.monotonic)

    def page(self) -> bytes:
        """Its page now: the golden one of vLLM 0.30 with these numbers."""
        numbers = {"num_preemptions_total": self.preempted, "kv_cache_usage_perc": self.kv,
                   "generation_tokens_total": 1000 + int(50 * (time.monotonic() - self.began))}
        text = PAGE
        for name, value in numbers.items():
            text = re.sub(rf"^(vllm:{name}{{[^}}]*}}) \S+$", rf"\g<1> {value}", text, flags=re.MULTILINE)
        return text.encode()


PAGE = (GOLDEN / "vllm-0.30.txt").read_text()


class Contender(NamedTuple):
    """Who watches, and where its pages arrive."""

    name: str
    receiver: Receiver
    kinds: tuple[str, ...]


class Broken(NamedTuple):
    """One injection."""

    kind: str
    subject: str
    at: float


def rules(kv_for_s: float, window: str) -> dict[str, Any]:
    """The two rules as Prometheus has them."""
    return {"groups": [{"name": "bench", "rules": [
        {"alert": "Preemptions", "expr": f"increase(vllm:num_preemptions_total[{window}]) > 0"},
        {"alert": "KvCache", "expr": "vllm:kv_cache_usage_perc >= 0.85", "for": f"{kv_for_s:g}s"}]}]}


def prometheus(stack: ExitStack, folder: Path, urls: Sequence[str], alertmanager: str, plan: Plan, *,
               tuned: bool) -> None:
    """Prometheus on the engines, tuned to our poll or as it comes."""
    folder.mkdir()
    (folder / "rules.yml").write_text(json.dumps(rules(plan.kv_for_s, "1m" if tuned else "5m")))
    every = {"scrape_interval": f"{POLL_S:g}s", "evaluation_interval": f"{POLL_S:g}s"} if tuned else {}
    config = {"global": every, "rule_files": [str(folder / "rules.yml")],
              "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]},
              "scrape_configs": [{"job_name": "vllm", "static_configs": [
                  {"targets": [url.removeprefix("http://")], "labels": {"subject": f"engine-{n}"}}
                  for n, url in enumerate(urls)]}]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
         f"--web.listen-address=127.0.0.1:{free_port()}"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


AM_DEFAULTS = """
route: {{receiver: hook}}
receivers: [{{name: hook, webhook_configs: [{{url: '{url}'}}]}}]
"""
AM_TUNED = """
route: {{receiver: hook, group_by: [rule, alertname, subject], group_wait: {wait}, group_interval: 5s}}
receivers: [{{name: hook, webhook_configs: [{{url: '{url}'}}]}}]
"""


def contenders(stack: ExitStack, folder: Path, urls: Sequence[str], plan: Plan) -> tuple[list[Contender], Path]:
    """All that watch, running; and the kernel log that ours reads."""
    def pager(name: str, config: str) -> tuple[Receiver, str]:
        receiver = stack.enter_context(Receiver())
        manager = stack.enter_context(RealAlertmanager(folder / f"am-{name}", free_port(), receiver.url,
                                                       f"{GROUP_WAIT_S:g}s", config))
        return receiver, manager.url

    found = []
    for name, route in (("prometheus_tuned", AM_TUNED), ("prometheus_defaults", AM_DEFAULTS)):
        if route is AM_TUNED or plan.defaults:
            receiver, url = pager(name, route)
            prometheus(stack, folder / name, urls, url, plan, tuned=route is AM_TUNED)
            found.append(Contender(name, receiver, (PREEMPTION, KV)))
    receiver, url = pager("tocsin", AM_TUNED)
    log, scenario = folder / "kmsg", folder / "gpus.json"
    log.touch()
    write_scenario(scenario, gpus(GPUS, **{f"gpu{n}": {"uuid": f"GPU-{n}"} for n in range(GPUS)}))
    config = {"node": "bench", "poll": f"{POLL_S:g}s", "kernel_log": str(log),
              "engines": [{"name": f"engine-{n}", "url": url_of} for n, url_of in enumerate(urls)],
              "rules": {"override": {"preemptions": {"window": "60s"},
                                     "kv-cache-utilization": {"for": f"{plan.kv_for_s:g}s", "keep": "5s"}}},
              "notify": [{"alertmanager": {"urls": [url], "min_visible": "0s"}}]}
    stack.enter_context(AgentProcess(folder / "tocsin", config, {
        "LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario)}))
    return [Contender("tocsin", receiver, (PREEMPTION, KV, XID)), *found], log


def schedule(plan: Plan, engines: Sequence[Engine], log: Path, broken: list[Broken],
             ) -> list[tuple[float, Callable[[], None]]]:
    """What happens when, in seconds from now, at random phases."""
    due: list[tuple[float, Callable[[], None]]] = []

    def note(kind: str, subject: str) -> None:
        broken.append(Broken(kind, subject, time.time()))

    for n, engine in enumerate(engines):
        for nth in range(plan.rounds):
            def preempt(engine: Engine = engine, n: int = n) -> None:
                engine.preempted += 1
                note(PREEMPTION, f"engine-{n}")

            def fill(engine: Engine = engine, n: int = n) -> None:
                engine.kv = 0.93
                note(KV, f"engine-{n}")

            def drain(engine: Engine = engine) -> None:
                engine.kv = 0.5

            start = nth * plan.apart_s
            due.append((start + random.uniform(0, 20), preempt))
            filled = start + random.uniform(0, 20)
            due += [(filled, fill), (filled + plan.kv_for_s + 30, drain)]
    for n in range(plan.xids):
        def line(gpu: int = n % GPUS, number: int = XIDS[n // GPUS]) -> None:
            with log.open("a") as out:
                out.write(f"3,{number},1,-;NVRM: Xid (PCI:0000:{0x1b + gpu:02x}:00): {number}, pid=1, name=a, x\n")
            note(XID, f"GPU-{gpu}")
        due.append((n // GPUS * plan.apart_s + random.uniform(0, 20), line))
    return sorted(due, key=lambda one: one[0])


def arrived(contender: Contender) -> list[tuple[float, float, str, Mapping[str, str]]]:
    """(when it was there, since when it fires, kind, labels) of every firing alert that came, in order."""
    found = []
    for arrival in list(contender.receiver.arrivals):
        for alert in arrival.json["alerts"] if arrival.body else []:
            labels = alert["labels"]
            name = labels.get("rule") or labels["alertname"]
            kind = XID if name.startswith("xid-") else ALERT_OF.get(name, "")
            if alert["status"] == "firing" and kind:
                since = time_of(alert["startsAt"])
                found.append((arrival.at, since, kind, labels))
    return found


def time_of(text: str) -> float:
    """Unix seconds of an RFC 3339 time, nanoseconds cut."""
    plain = re.sub(r"(\.\d{1,6})\d*", r"\1", text).replace("Z", "+00:00")
    return datetime.fromisoformat(plain).timestamp()


def waits(contender: Contender, broken: Sequence[Broken], kind: str) -> tuple[list[float], int]:
    """Seconds from each injection of a kind to its page; and how many have none."""
    told, found, missing = [one for one in arrived(contender) if one[2] == kind], [], 0
    for one in (b for b in broken if b.kind == kind):
        pages = [at for at, since, _, labels in told
                 if labels.get("subject") == one.subject and since >= one.at - 0.01]
        if pages:
            found.append(min(pages) - one.at)
        else:
            missing += 1
    return found, missing


def run(plan: Plan) -> tuple[list[Contender], list[Broken]]:
    """Everything from the start to the last page."""
    broken: list[Broken] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [Engine() for _ in range(plan.engines)]
        urls = [stack.enter_context(PageServer(engine.page)).url for engine in engines]
        found, log = contenders(stack, folder, urls, plan)
        say(f"{plan.engines} engines; {plan.warm_up_s:.0f} s until a minute's window is covered")
        time.sleep(plan.warm_up_s)
        began = time.monotonic()
        for n, (at, act) in enumerate(todo := schedule(plan, engines, log, broken)):
            time.sleep(max(0.0, began + at - time.monotonic()))
            act()
            if n % 20 == 0:
                say(f"{n} of {len(todo)} acts, {sum(len(c.receiver.arrivals) for c in found)} pages came")
        say(f"the last pages, {plan.wait_s:.0f} s at most")
        until = time.monotonic() + plan.wait_s
        while time.monotonic() < until and any(waits(c, broken, kind)[1] for c in found for kind in c.kinds):
            time.sleep(1.0)
    return found, broken


def main() -> int:
    """Measure and tell."""
    plan = SHORT if arguments(__doc__).parse_args().short else LONG
    lacking = [name for name in ("prometheus", "prometheus-alertmanager") if shutil.which(name) is None]
    if lacking:
        print(f"bench.time_to_page needs {' and '.join(lacking)}: apt-get install {' '.join(lacking)}", file=sys.stderr)
        return 2
    found, broken = run(plan)
    told: list[Figure] = []
    medians: dict[tuple[str, str], float] = {}
    for contender in found:
        for kind in contender.kinds:
            took, missing = waits(contender, broken, kind)
            name, ours = f"page_{contender.name}_{kind}", contender.name == "tocsin"
            p99 = sorted(took)[int(0.99 * (len(took) - 1))] if took else float("inf")
            medians[contender.name, kind] = statistics.median(took) if took else float("inf")
            told += [Figure(f"{name}_p50", medians[contender.name, kind], "s"),
                     Figure(f"{name}_p99", p99, "s"),
                     Figure(f"{name}_missing", missing, f"of_{len(took) + missing}", 0.0 if ours else None)]
            if ours:
                goal_s = {PREEMPTION: 0.0, XID: 0.0, KV: plan.kv_for_s}[kind] + POLL_S + 1.0
                told.append(Figure(f"{name}_p99_without_group_wait", p99 - GROUP_WAIT_S, "s", goal_s))
    for name in [c.name for c in found if c.name != "tocsin"]:
        goal = 10.0 if name == "prometheus_defaults" else None
        told.append(Figure(f"page_sooner_than_{name}", medians[name, PREEMPTION] / medians["tocsin", PREEMPTION], "x",
                           goal, at_least=True))
    return tell(told)


if __name__ == "__main__":
    sys.exit(main())
