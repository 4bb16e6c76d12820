"""Torture of the agent: SIGKILL at random instants of `tocsin run`; no receiver may miss a page, or get two for one.

    python -m tests.torture.agent --kills 1000 [--seed 7] [--agents 3]

Engines whose pages breach and clear on cue are the truth; the next cue comes when the agent says that it has saved the
last one. Behind each agent are two webhooks and an Alertmanager's API, which answer 200, 429, 500, nothing at all, or
take what they were sent and then cut the connection. Each must have got, of each engine, exactly its breaches and ends,
in their order; what came twice must be the same by the key that a receiver joins by. The last line says how it ended.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from agent import client
from tests.agent_process import ROOT, AgentProcess
from tests.page_server import PageServer
from tests.receiver import Arrival, Receiver, Reply

AGENTS = 3
ENGINES = 4  # of each agent
RULE, ALERT = "kv-cache-utilization", "KvCacheUtilization"
PAGE = """vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:kv_cache_usage_perc{model_name="m"} %s
vllm:generation_tokens_total{model_name="m"} %d
"""
BREACH, CLEAR = "0.93", "0.31"
DWELL_S = 0.4  # at most, after a change was seen
LIVES_S = 2.4  # at most: a third of it is the start
AT_A_SEND = 0.5  # of the kills come within a moment of what a receiver got
MOMENT_S = 0.02
WITHIN_S = 120.0  # of whatever is awaited; a machine may be busy
# What a receiver says, and how often: taken, refused for now, refused, no answer, taken and then cut.
MOODS: Mapping[str, Mapping[str, int]] = {
    "steady": {"ok": 100}, "moody": {"ok": 60, "429": 10, "500": 15, "hang": 5, "cut": 10},
}  # fmt: skip
REPLIES = {
    "ok": Reply(), "429": Reply(429, {"Retry-After": "1"}), "500": Reply(500), "hang": Reply(hang=True),
    "cut": Reply(drop=True),
}  # fmt: skip


class Told(NamedTuple):
    """One alert as a receiver got it. `start` is what joins it: with the engine, it names one breach."""

    engine: str
    start: str
    status: str
    taken: bool  # it answered 200


@dataclass
class Ear:
    """A receiver, and all that it got."""

    name: str
    mood: Mapping[str, int]
    dice: random.Random
    heard: Callable[[], None]
    got: list[Told] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def judge(self, arrival: Arrival) -> Reply:
        """Write it down and answer as the mood is."""
        how = self.dice.choices(list(self.mood), list(self.mood.values()))[0]
        self.answers[how] += 1
        self.got += [Told(*one, taken=how in ("ok", "cut")) for one in alerts_of(arrival.json)]
        self.heard()
        return REPLIES[how]


def alerts_of(body: Any) -> list[tuple[str, str, str]]:
    """(engine, start, status) of what was posted in Alertmanager's webhook format or to its API."""
    if isinstance(body, dict):
        return [(one["labels"]["subject"], one["startsAt"], one["status"]) for one in body["alerts"]]
    return [(one["labels"]["subject"], one["startsAt"], "resolved" if over(one["endsAt"]) else "firing")
            for one in body if one["labels"]["alertname"] == ALERT]


def over(text: str) -> bool:
    """Whether an RFC 3339 time is past."""
    return datetime.fromisoformat(text).timestamp() <= time.time()


@dataclass
class Engine:
    """An engine whose page is the truth. `breaches` are those that were begun."""

    name: str
    server: PageServer
    tokens: int = 0
    usage: str = CLEAR
    breaches: int = 0

    def page(self) -> str:
        """As it is now; tokens flow."""
        self.tokens += 100
        return PAGE % (self.usage, self.tokens)


class Stage:
    """One agent, its engines and its receivers."""

    def __init__(self, number: int, folder: Path, kills: int, dice: random.Random) -> None:
        self.number, self.folder, self.kills, self.dice = number, folder, kills, dice
        self.heard = threading.Event()
        self.over = threading.Event()  # no more breaches
        self.done = threading.Event()
        self.saved: dict[str, list[str]] = defaultdict(list)  # engine -> firing, resolved, … as the agent saved them
        self.wrong: list[str] = []
        self.killed: Counter[str] = Counter()
        self.ears: list[Ear] = []
        self.engines: list[Engine] = []

    def play(self) -> None:
        """All of it; `wrong` tells."""
        with ExitStack() as stack:
            for n in range(ENGINES):
                server = stack.enter_context(PageServer())
                self.engines.append(Engine(f"a{self.number}e{n}", server))
                server.set_page(self.engines[-1].page)
            urls = []
            for name, mood in (("hook", "steady"), ("hook-moody", "moody"), ("alertmanager", "moody")):
                ear = Ear(name, MOODS[mood], random.Random(self.dice.random()), self.heard.set)
                urls.append(stack.enter_context(Receiver(ear.judge)).url)
                self.ears.append(ear)
            self.agent = AgentProcess(self.folder, config(self.number, self.engines, urls))
            with ThreadPoolExecutor(ENGINES + 1) as pool:
                told = pool.submit(self._listen)
                cues = [pool.submit(self._cue, engine, random.Random(self.dice.random())) for engine in self.engines]
                try:
                    for _ in range(self.kills):
                        self._live_and_die()
                    self.over.set()
                    self._start()
                    for cue in cues:
                        cue.result()
                    self._settle()
                finally:
                    self.over.set()
                    self.done.set()
                    self._end()
                told.result()
        self.wrong += [fault for ear in self.ears for engine in self.engines for fault in judge(ear, engine)]

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.torture.hurried", "--config", str(self.agent.path)]
        with self.agent.log.open("ab") as out:
            self.agent.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    def _live_and_die(self) -> None:
        """A life that ends after a random time, or when a receiver has just got something."""
        self._start()
        at_a_send = self.dice.random() < AT_A_SEND
        lives_s = self.dice.uniform(0.0, LIVES_S)
        if at_a_send:
            time.sleep(lives_s / 2)  # else it would always be the first
            self.heard.clear()
            at_a_send = self.heard.wait(LIVES_S)
            time.sleep(self.dice.uniform(0.0, MOMENT_S))
        else:
            time.sleep(lives_s)
        assert self.agent.process is not None
        if self.agent.process.poll() is not None:
            raise RuntimeError(f"the agent ended by itself: {self.agent.log.read_text()[-3000:]}")
        self.agent.kill(signal.SIGKILL)
        self.killed["at a send" if at_a_send else "any time"] += 1

    def _end(self) -> None:
        process = self.agent.process
        if process is not None and process.poll() is None:
            self.agent.kill(signal.SIGTERM)

    def _listen(self) -> None:
        """Note what the agent has saved, whichever process tells it."""
        last = 0
        while not self.done.wait(0.05):
            with suppress(client.NotRunning, client.AgentError):
                for row in self.agent.ask(f"/transitions?after={last}"):
                    last = row["id"]
                    if row["rule"] == RULE and row["state"] in ("firing", "resolved"):
                        self.saved[row["subject"]].append(row["state"])

    def _cue(self, engine: Engine, dice: random.Random) -> None:
        """Breach and clear, each until it is saved."""
        while not self.over.is_set():
            engine.breaches += 1
            engine.usage = BREACH
            self._await(lambda: len(self.saved[engine.name]) >= 2 * engine.breaches - 1, f"{engine.name} fires")
            self.over.wait(dice.uniform(0.0, DWELL_S))
            engine.usage = CLEAR
            self._await(lambda: len(self.saved[engine.name]) >= 2 * engine.breaches, f"{engine.name} resolves")
            self.over.wait(dice.uniform(0.0, DWELL_S))

    def _settle(self) -> None:
        """The receivers are well again; wait until nothing is owed."""
        for ear in self.ears:
            ear.mood = MOODS["steady"]

        def nothing_owed() -> bool:
            with suppress(client.NotRunning, client.AgentError):
                return not any(one["pending"] for one in self.agent.ask("/healthz")["channels"].values())
            return False

        self._await(nothing_owed, "nothing is owed")

    def _await(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WITHIN_S
        while not true():
            if self.done.is_set():
                return
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {WITHIN_S:g} s; {self.agent.log}")
            time.sleep(0.02)


def config(number: int, engines: Sequence[Engine], urls: Sequence[str]) -> dict[str, Any]:
    """Its configuration: what breaches fires at the next poll."""
    match = {"rule": [RULE]}
    notify = [{"webhook": {"url": urls[0]}, "match": match}, {"webhook": {"url": urls[1]}, "match": match},
              {"alertmanager": {"urls": [urls[2]], "resend": "1s", "min_visible": "0s"}, "match": match}]
    return {"node": f"torture-{number}", "poll": "1s", "nvml": "off",
            "engines": [{"name": one.name, "url": one.server.url} for one in engines],
            "rules": {"override": {RULE: {"for": "0s", "keep": "0s", "severity": "page"}}}, "notify": notify}


def judge(ear: Ear, engine: Engine) -> list[str]:
    """What is wrong with what a receiver got of an engine."""
    judged = of_state if ear.name == "alertmanager" else in_order
    mine = [one for one in ear.got if one.engine == engine.name]
    return [f"{ear.name}, {engine.name}: {fault}" for fault in judged(mine, engine.breaches)]


def in_order(got: Sequence[Told], breaches: int) -> Iterator[str]:
    """A webhook gets each change once, in order, but for the same thing again right after itself."""
    wanted = ["firing", "resolved"] * breaches
    for what, told in (("sent", got), ("taken", [one for one in got if one.taken])):
        joined = [key for key, _ in groupby((one.start, one.status) for one in told)]
        starts = [start for start, status in joined if status == "firing"]
        ends = [start for start, status in joined if status == "resolved"]
        if [status for _, status in joined] != wanted or starts != ends or starts != sorted(set(starts)):
            yield f"{what} {len(joined)} of {len(wanted)}, or out of order: {joined}"


def of_state(got: Sequence[Told], breaches: int) -> Iterator[str]:
    """An Alertmanager is told what fires now, again and again: each breach and its end, and no breach after its end."""
    taken = [(one.start, one.status) for one in got if one.taken]
    ended: set[str] = set()
    for start, status in taken:
        if status == "firing" and start in ended:
            yield f"{start} was opened anew after its end: {[how for at, how in taken if at == start]}"
        if status == "resolved":
            ended.add(start)
    fired = {start for start, status in taken if status == "firing"}
    if not len(fired) == len(ended) == breaches or fired != ended:
        yield f"{len(fired)} fired and {len(ended)} ended of {breaches}"


@dataclass
class Result:
    """All stages."""

    stages: Sequence[Stage]

    @property
    def wrong(self) -> list[str]:
        """What must not be."""
        return [fault for stage in self.stages for fault in stage.wrong]

    @property
    def kills(self) -> int:
        """How often an agent was killed."""
        return sum(sum(stage.killed.values()) for stage in self.stages)

    @property
    def transitions(self) -> int:
        """Breaches and ends, each owed to three receivers."""
        return sum(2 * engine.breaches for stage in self.stages for engine in stage.engines)

    def line(self) -> str:
        """The line that counts."""
        return f"kills {self.kills}, transitions {self.transitions}, lost or out of order {len(self.wrong)}"

    def summary(self) -> str:
        """Where the kills fell, what the receivers answered, and how much came twice."""
        ears = [ear for stage in self.stages for ear in stage.ears]
        answers = sum((ear.answers for ear in ears), Counter[str]())
        killed = sum((stage.killed for stage in self.stages), Counter[str]())
        hooks = [ear.got for ear in ears if ear.name.startswith("hook")]
        again = sum(len(got) - len({one[:3] for one in got}) for got in hooks)
        return f"killed {dict(killed)}; answered {dict(answers)}; {again} came again to a webhook, joined by their key"


def torture(kills: int, seed: int, agents: int = AGENTS, say: Callable[[str], None] = print) -> Result:
    """So many kills, shared by agents that run side by side."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tocsin-torture-") as folder:
        shares = [kills // agents + (n < kills % agents) for n in range(agents)]
        seeds = [random.Random(dice.random()) for _ in shares]
        stages = [Stage(n, Path(folder) / str(n), shares[n], seeds[n]) for n in range(agents)]
        with ThreadPoolExecutor(agents) as pool:
            running = [pool.submit(stage.play) for stage in stages]
            told = 0
            while not all(one.done() for one in running):
                time.sleep(0.5)
                done = sum(sum(stage.killed.values()) for stage in stages)
                if done // 50 > told:
                    told = done // 50
                    say(f"{done} kills")
            for one in running:
                one.result()
    result = Result(stages)
    for fault in result.wrong:
        say(fault)
    return result


def main() -> int:
    """Torture, print, and fail where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.agent")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    begun = time.monotonic()
    result = torture(asked.kills, asked.seed, asked.agents, lambda line: print(line, flush=True))
    print(f"{time.monotonic() - begun:.0f} s; {result.summary()}")
    print(result.line())
    return int(bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
