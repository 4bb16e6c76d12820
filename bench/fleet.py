"""1,000 agents that page at once through two clustered Alertmanagers, one of which is killed in the middle.

    python -m bench.fleet [--short] [--agents N]        (from the repository's root)

An agent here is what pages: its own database on disk, outbox thread and Alertmanager channel, all of the product; the
1,000 share four processes (the short form has 300). Both Alertmanagers (Debian's) are one cluster and tell one
webhook receiver. All alerts are told in one moment; the first Alertmanager is killed (SIGKILL) once it has received
half of them; then all resend while they fire, and all resolve in one moment. Counted is what came to the receiver:
each alert's firing and its end, by its labels and start. What came again must carry the group key of the first.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import structlog

from agent.model import AlertMessage, Book
from agent.notifiers.alertmanager import Alertmanager
from agent.outbox import Outbox
from agent.phase import FIRST_WITHIN_S, first_two, phase_of
from agent.sources.asking import EVERY_S as ASKED_EVERY_S
from agent.store import Store
from bench.figures import Figure, arguments, free_port, say, tell
from tests.alertmanager import RealAlertmanager
from tests.receiver import Arrival, Receiver

AGENTS, SHORT_AGENTS, PROCESSES = 1000, 300, 4
RESEND_S, SHORT_RESEND_S = 60.0, 10.0
POLL_S = 5.0
PATIENCE_S = 300.0
CHANNEL = "alertmanager"


class Came(NamedTuple):
    """One alert of one request at the receiver."""

    node: str
    status: str
    starts_at: str
    group: str


def name_of(n: int) -> str:
    """The name of a node, as a fleet has them."""
    return f"gpu-{n:04}"


class Member:
    """What pages of one agent: the loop's part is `fire` and `resolve`."""

    def __init__(self, folder: Path, name: str, urls: Sequence[str], resend_s: float) -> None:
        self.store = Store(folder / f"{name}.db")
        self.firing: list[AlertMessage] = []
        channel = Alertmanager(CHANNEL, urls, lambda: self.firing, resend_s, 0.0, phase_of(name, resend_s))
        self.outbox = Outbox(self.store, [channel], time.time)
        self.name = name

    def fire(self) -> None:
        """Its alert is owed: on disk, not yet sent."""
        labels = {"alertname": "GpuTemperature", "rule": "gpu-temperature", "node": self.name, "subject": "GPU-0",
                  "severity": "page"}
        texts = {"summary": f"GPU-0 of {self.name} is at 91 °C", "evidence": "91 °C, limit 85 °C, for 60 s"}
        message = AlertMessage(f"{self.name}/gpu-temperature/GPU-0", "firing", "page", labels, texts, time.time())
        self.store.commit_tick(message.starts_at, Book(), (), [(CHANNEL, message)])
        self.firing = [message]

    def resolve(self) -> None:
        """So is its end."""
        (was,) = self.firing
        now = time.time()
        ended = AlertMessage(was.key, "resolved", "page", was.labels, was.annotations, was.starts_at, now)
        self.store.commit_tick(now, Book(), (), [(CHANNEL, ended)])
        self.firing = []


def crew(names: Sequence[str], folder: str, urls: Sequence[str], resend_s: float, steps: Barrier) -> None:
    """A process of members, in step with the others at each barrier; the last is their end."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    members = [Member(Path(folder), name, urls, resend_s) for name in names]
    for change in (Member.fire, Member.resolve):
        for member in members:
            change(member)
        steps.wait()  # all that is owed is on disk
        steps.wait()  # now
        for member in members:
            if change is Member.fire:
                member.outbox.start(phase_of(member.name, POLL_S))
            member.outbox.wake()
        steps.wait()  # it has come
    for member in members:
        member.outbox.stop(5.0)
        member.store.close()


def received(url: str) -> float:
    """How many firing alerts an Alertmanager has been told of."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.findall(r'^alertmanager_alerts_received_total\{status="firing".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def is_settled(url: str) -> bool:
    """Whether an Alertmanager has found its peer and tells what it is told: until then it holds all back."""
    with urllib.request.urlopen(f"{url}/api/v2/status", timeout=20) as answer:
        cluster = json.load(answer)["cluster"]
    return bool(cluster["status"] == "ready" and len(cluster["peers"]) == 2)


def came(arrivals: Sequence[Arrival]) -> list[Came]:
    """Every alert of every request."""
    bodies = [json.loads(arrival.body) for arrival in arrivals]
    return [Came(alert["labels"]["node"], alert["status"], alert["startsAt"], body["groupKey"])
            for body in bodies for alert in body["alerts"]]


def told(receiver: Receiver, status: str) -> int:
    """Of how many nodes a status has come."""
    return len({one.node for one in came(list(receiver.arrivals)) if one.status == status})


def wait(enough: Callable[[], bool], limit_s: float, every_s: float = 0.5) -> bool:
    """Whether it came true in time."""
    until = time.monotonic() + limit_s
    while not enough():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


def resends(url: str, resend_s: float) -> list[float]:
    """How many alerts an Alertmanager was told of in each second of one resend."""
    began, before, counts = time.monotonic(), received(url), list[float]()
    for second in range(1, int(resend_s) + 1):
        time.sleep(max(0.0, began + second - time.monotonic()))
        now = received(url)
        counts.append(now - before)
        before = now
    return counts


def run(agents: int, resend_s: float, patience_s: float) -> tuple[list[Came], list[float], Mapping[str, float]]:
    """Everything that came; the resends of each second; how long things took in seconds, and what the dead had."""
    took: dict[str, float] = {}
    names = [name_of(n) for n in range(agents)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        receiver = stack.enter_context(Receiver())
        gossip = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        doomed, other = (
            stack.enter_context(RealAlertmanager(Path(folder) / f"am-{n}", free_port(), receiver.url,
                                                 cluster=(gossip[n], gossip[1 - n]))) for n in range(2))
        steps = mp.get_context("spawn").Barrier(PROCESSES + 1)
        crews = [mp.get_context("spawn").Process(target=crew, args=(
            names[n::PROCESSES], folder, [doomed.url, other.url], resend_s, steps), daemon=True)
            for n in range(PROCESSES)]
        for one in crews:
            one.start()
            stack.callback(one.join, 60.0)
        stack.callback(steps.abort)
        say(f"{agents} databases")
        steps.wait(PATIENCE_S)
        if not wait(lambda: is_settled(doomed.url) and is_settled(other.url), patience_s):
            raise RuntimeError(f"the two Alertmanagers in {folder} did not become one cluster")
        say("all page at once")
        steps.wait(PATIENCE_S)
        began = time.monotonic()
        if not wait(lambda: received(doomed.url) >= agents / 2, patience_s, 0.02):
            raise RuntimeError(f"the first Alertmanager was told of {received(doomed.url):g} alerts, of {agents / 2:g}")
        took["dead_had"] = received(doomed.url)
        doomed.kill()
        say(f"killed one after {time.monotonic() - began:.1f} s, with {took['dead_had']:.0f} alerts")
        wait(lambda: told(receiver, "firing") >= agents, patience_s)
        took["firing"] = time.monotonic() - began
        say(f"{told(receiver, 'firing')} firing came in {took['firing']:.1f} s; {resend_s:.0f} s of resends")
        counts = resends(other.url, resend_s)
        steps.wait(PATIENCE_S)
        steps.wait(PATIENCE_S)
        steps.wait(PATIENCE_S)
        began = time.monotonic()
        wait(lambda: told(receiver, "resolved") >= agents, patience_s)
        took["resolved"] = time.monotonic() - began
        say(f"{told(receiver, 'resolved')} resolved came in {took['resolved']:.1f} s")
        steps.wait(PATIENCE_S)
        for one in crews:
            one.join(60.0)
        return came(list(receiver.arrivals)), counts, took


def peak(times: Sequence[float], span_s: float) -> float:
    """The fullest second of a span ÷ the mean one."""
    return max(Counter(int(at % span_s) for at in times).values()) / (len(times) / span_s)


def phases(every_s: float) -> list[float]:
    """When in a period each node of a fleet does what all do once in it."""
    return [phase_of(name_of(n), every_s) for n in range(AGENTS)]


def figures(agents: int, found: Sequence[Came], counts: Sequence[float], took: Mapping[str, float]) -> list[Figure]:
    """What came, counted by key."""
    names = {name_of(n) for n in range(agents)}
    lost = sum(len(names - {one.node for one in found if one.status == status}) for status in ("firing", "resolved"))
    groups = {(one.node, one.group) for one in found}  # a node has one alert: one group key
    tellings = Counter((one.node, one.status, one.starts_at) for one in found)
    keys = {(one.node, one.starts_at) for one in found}
    asked = [first_two(phase_s, ASKED_EVERY_S) for phase_s in phases(ASKED_EVERY_S)]  # a shared Prometheus
    return [
        Figure("fleet_agents", agents, "agents"),
        Figure("fleet_lost", lost, f"of_{2 * agents}", 0.0),
        Figure("fleet_came_again", sum(tellings.values()) - len(tellings), "notifications"),
        Figure("fleet_not_joined_by_key", len(groups) + len(keys) - 2 * len({one.node for one in found}), "keys", 0.0),
        Figure("fleet_killed_after", took["dead_had"], f"of_{agents}"),
        Figure("fleet_firing_all_told", took["firing"], "s"),
        Figure("fleet_resolved_all_told", took["resolved"], "s"),
        Figure("fleet_resend_peak", max(counts) / (agents / len(counts)), "x_mean", 2.0),
        Figure("fleet_poll_peak", peak(phases(POLL_S), POLL_S), "x_mean", 2.0),  # and a start's first deliveries
        Figure("fleet_resend_60s_peak", peak(phases(RESEND_S), RESEND_S), "x_mean", 2.0),  # and heartbeats
        Figure("fleet_first_asked_peak", peak([first for first, _ in asked], FIRST_WITHIN_S), "x_mean", 2.0),
        Figure("fleet_asked_peak", peak([second for _, second in asked], ASKED_EVERY_S), "x_mean", 2.0),
    ]


def main() -> int:
    """Measure and tell."""
    parser = arguments(__doc__)
    parser.add_argument("--agents", type=int, metavar="N", help=f"{AGENTS}, in the short form {SHORT_AGENTS}")
    asked = parser.parse_args()
    agents = asked.agents or (SHORT_AGENTS if asked.short else AGENTS)
    if shutil.which("prometheus-alertmanager") is None:
        print("bench.fleet needs prometheus-alertmanager: apt-get install prometheus-alertmanager", file=sys.stderr)
        return 2
    resend_s = SHORT_RESEND_S if asked.short else RESEND_S
    return tell(figures(agents, *run(agents, resend_s, 30.0 if asked.short else 120.0)))


if __name__ == "__main__":
    sys.exit(main())
