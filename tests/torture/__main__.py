"""The loop: a drill, a kill at a random instant, a look at the world. The last line says how it ended."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from agent import client
from drills import ledger, lock, proc, record, report
from drills.model import Drill, State, Verdict
from tests.torture.processes import DRILLS
from tests.torture.scene import FAULTS, TAG, Scene, scene, tagged

ROOT = Path(__file__).resolve().parents[2]
# The kill comes between one of these and what follows it.
STATES = (
    State.PLANNED, State.LOCKED, State.PREFLIGHT, State.BASELINE, State.ARMED, State.INJECTING, State.PROVEN,
    State.OBSERVING, State.REVERTING, State.REVERTED, State.RECOVERED,
)  # fmt: skip
KILLED = ("runner", "drilld and runner", "all but the holder", "all")
CLEAN_WITHIN_S = 1.0
LOADED = 0.25  # of the runs have a prober
RESTARTED = 0.8  # of the killed daemons start again without a `tocsin drill heal` before
FIRST_GUESS_S = 0.3  # how long a state lasts, until it was seen
LOOK_AROUND_S = 0.01  # it takes to find those that are to be killed
STARTS_WITHIN_S = 30.0  # of whatever is waited for; a machine may be busy
COMMAND_S = 120.0


@dataclass
class Result:
    """One run."""

    fault: str
    killed: str
    wanted: State
    run: str = ""
    last: State | None = None  # in the ledger, when it was over
    clean_s: float | None = None  # after the kill; None: not within CLEAN_WITHIN_S
    residue: list[str] = field(default_factory=list)  # what was left then, or after heal
    report: str = ""  # what is wrong with it

    def __str__(self) -> str:
        return f"{self.fault}, killed {self.killed} in {self.last} ({self.run})"


def wait_for(condition: Callable[[], bool], what: str, every_s: float = 0.02) -> None:
    """Wait for a condition. Raises TimeoutError."""
    until = time.monotonic() + STARTS_WITHIN_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {STARTS_WITHIN_S:g} s")
        time.sleep(every_s)


class Torturer:
    """The drill daemon of the moment, and what is done to it."""

    def __init__(self, stage: Scene, dice: random.Random) -> None:
        self.stage, self.dice = stage, dice
        self.daemon: subprocess.Popen[bytes] | None = None
        self.drills = {fault: Drill(fault, fault) for fault in FAULTS}
        self.lasted_s: dict[tuple[str, State], list[float]] = defaultdict(list)
        self.log = (stage.folder / "drilld.log").open("ab")
        self.env = {**os.environ, TAG: str(os.getpid()), DRILLS: str(stage.folder / "drills.json")}

    # --- a drill ----------------------------------------------------------------------------------------------------

    def one(self, fault: str, killed: str, wanted: State) -> Result:
        """A drill, killed between `wanted` and what follows it."""
        result = Result(fault, killed, wanted)
        self.drills[fault] = self.stage.drill(fault, loaded=self.dice.random() < LOADED)
        (self.stage.folder / "drills.json").write_bytes(msgspec.json.encode(list(self.drills.values())))
        self._ensure_daemon()
        self.stage.remember()
        result.run = client.ask(
            self.stage.folder / "drilld.sock", "/run", "POST", {"name": fault, "accept_unknown_budget": True}
        )["run"]
        self.stage.runs.add(result.run)
        folder = self.stage.root / "runs" / result.run
        self._wait_in(folder, fault, wanted)
        killed_at = time.monotonic()
        spared = self._kill(killed)
        over_at = time.time()
        self._look(result, killed_at, spared)
        self._heal(result, folder)
        self._judge(result, folder, killed_at, over_at)
        return result

    def _ensure_daemon(self) -> None:
        """A drilld that answers."""
        if self.daemon is None or self.daemon.poll() is not None:
            command = [sys.executable, "-m", "tests.torture.processes", "drilld", "--config", str(self.stage.config)]
            self.daemon = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=self.log, stderr=self.log)
        wait_for(self._answers, "drilld answers")

    def _answers(self) -> bool:
        if self.daemon is None or self.daemon.poll() is not None:
            raise RuntimeError(f"drilld ended by itself: {(self.stage.folder / 'drilld.log').read_text()}")
        with suppress(client.NotRunning, client.AgentError):
            return client.ask(self.stage.folder / "drilld.sock", "/")["run"] is None
        return False

    def _wait_in(self, folder: Path, fault: str, wanted: State) -> None:
        """Wait for the state, and then a part of the time that it lasts, at random."""
        sign = f'"state":"{wanted}"'.encode()
        over = f'"state":"{State.REPORTED}"'.encode(), f'"state":"{State.SKIPPED}"'.encode()

        def reached() -> bool:
            told = (folder / ledger.LEDGER).read_bytes()
            if b'"healed":true' in told:
                raise RuntimeError(f"{folder.name} ended by itself: {(self.stage.folder / 'drilld.log').read_text()}")
            return sign in told or any(one in told for one in over)

        wait_for(reached, f"{folder.name} in {wanted}", every_s=0.002)
        seen_s = self.lasted_s[fault, wanted]
        wait_s = self.dice.uniform(0.0, median(seen_s) if seen_s else FIRST_GUESS_S)
        time.sleep(max(0.0, wait_s - LOOK_AROUND_S))

    def _kill(self, killed: str) -> frozenset[int]:
        """SIGKILL, in any order; what of ours may live."""
        assert self.daemon is not None
        ours = {pid: proc.command_line(pid) for pid in tagged()}
        runners = [pid for pid, words in ours.items() if "tests.torture.processes" in words and "runner" in words]
        doomed = {
            "runner": runners,
            "drilld and runner": [self.daemon.pid, *runners],
            "all but the holder": [pid for pid, words in ours.items() if "drills.holder" not in words],
            "all": list(ours),
        }[killed]
        self.dice.shuffle(doomed)
        kill(doomed)
        if killed == "all":
            kill(tagged())  # what was started meanwhile
        if killed == "runner":
            return frozenset({self.daemon.pid})
        self.daemon.wait()
        return frozenset()

    def _look(self, result: Result, killed_at: float, spared: frozenset[int]) -> None:
        """Nothing of ours is left after a second."""
        # What drilld, alive, starts to heal: it looks at tables.
        result.residue, clean_s = self._left(
            killed_at, lambda: spared | {one.pid for pid in spared for one in proc.descendants(pid)})
        result.clean_s = None if result.residue else clean_s

    def _left(self, killed_at: float, spared: Callable[[], frozenset[int]]) -> tuple[list[str], float]:
        """What is left, once nothing is or the time is over, and how long after the kill that was."""
        while True:
            at_s = time.monotonic() - killed_at
            left = self.stage.left(spared())
            if not left or at_s > CLEAN_WITHIN_S:
                return left, at_s
            time.sleep(0.02)

    def _heal(self, result: Result, folder: Path) -> None:
        """What a supervisor does: ExecStopPost=, or another start; drilld itself heals where it lives."""
        if result.killed == "runner" or self.dice.random() < RESTARTED:
            self._ensure_daemon()
            with suppress(TimeoutError):
                wait_for(lambda: (record.load(folder) or {}).get("ended_at") is not None, "drilld heals")
                wait_for(lambda: not lock.unsettled(self.stage.root), "drilld heals")
                wait_for(lambda: not self.stage.agent.announced, "drilld tells the agent")
            return
        command = [sys.executable, "-m", "agent", "drill", "heal", "--config", str(self.stage.config)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            result.residue.append(f"heal: exit {done.returncode}: {done.stdout}{done.stderr}")

    def _judge(self, result: Result, folder: Path, killed_at: float, over_at: float) -> None:
        """After heal: a clean world, a lock that the next one gets, and a report that is true."""
        entries = ledger.read(folder)
        result.last = ledger.last_state(entries)
        named = [(entry.state, entry.at) for entry in entries if entry.state is not None]
        for (state, begun), (_, ended) in pairwise(named):
            self.lasted_s[result.fault, state].append(ended - begun)
        assert self.daemon is not None
        alive = frozenset({self.daemon.pid}) if self.daemon.poll() is None else frozenset[int]()
        # Its second is not over: one that was in the middle of its exec has had neither a name nor a mark before.
        result.residue += [f"after heal: {one}" for one in self._left(killed_at, lambda: alive)[0]]
        result.residue += [f"after heal: {run} {why}" for run, why in lock.unsettled(self.stage.root)]
        result.residue += [f"after heal: {run} is still announced" for run in self.stage.agent.announced]
        self.stage.agent.announced.clear()
        result.report = report_fault(folder, over_at)
        if not result.residue and not result.report:
            shutil.rmtree(folder, ignore_errors=True)  # drilld may be writing its report anew

    def close(self) -> None:
        """End what is left."""
        kill(tagged())
        if self.daemon is not None:
            self.daemon.wait()
        self.log.close()


def kill(pids: Sequence[int]) -> None:
    """SIGKILL, for those that are there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def report_fault(folder: Path, over_at: float) -> str:
    """What is wrong with the report of a run that was killed before `over_at`; "" where it is there and true."""
    told = record.load(folder)
    missing = [name for name in report.FILES.values() if not (folder / name).is_file()]
    if told is None or missing:
        return f"missing: {', '.join(missing) or 'run.json'}"
    verdict = told["verdict"]
    if verdict in {Verdict.SKIPPED, Verdict.DEFERRED}:
        return f"it never began: {told['why']}"
    finished = told["ended_at"] is not None and told["ended_at"] <= over_at
    if told["ended_at"] is None or (verdict != Verdict.ABORTED and not finished):
        return f"it says {verdict} ({told['why']})"
    return "" if verdict in (folder / report.FILES["md"]).read_text() else f"the Markdown does not say {verdict}"


def cells(dice: random.Random) -> Iterator[tuple[str, str, State]]:
    """Each fault, each set of killed and each state; 220 are all of them once, 60 are each state with each set."""
    number = 0
    while True:
        pairs = [(killed, state) for killed in KILLED for state in STATES]
        dice.shuffle(pairs)
        for killed, state in pairs:
            yield FAULTS[number % len(FAULTS)], killed, state
            number += 1


def torture(runs: int, seed: int, faults: Sequence[str], say: Callable[[str], None]) -> list[Result]:
    """So many runs."""
    dice = random.Random(seed)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="tocsin-torture-") as folder, scene(Path(folder)) as stage:
        torturer = Torturer(stage, dice)
        try:
            for fault, killed, wanted in cells(dice):
                if len(results) == runs:
                    break
                if fault not in faults:
                    continue
                results.append(torturer.one(fault, killed, wanted))
                for wrong in [*results[-1].residue, *([results[-1].report] if results[-1].report else [])]:
                    say(f"{results[-1]}: {wrong}")
                if len(results) % 20 == 0:
                    say(f"{len(results)} runs; {summary(results)}")
        finally:
            torturer.close()
    return results


def summary(results: Sequence[Result]) -> str:
    """How fast the world was clean, and where the kills fell."""
    clean = sorted(one.clean_s for one in results if one.clean_s is not None) or [float("nan")]
    fell = Counter(str(one.last) for one in results)
    return f"clean after {median(clean):.3f} s (median), {clean[-1]:.3f} s (max); killed in {dict(fell)}"


def last_line(results: Sequence[Result]) -> str:
    """The line that counts."""
    residue = sum(bool(one.residue) for one in results)
    return f"runs {len(results)}, residue {residue}, reports missing {sum(bool(one.report) for one in results)}"


def main() -> int:
    """Run, print, and fail where anything was left or any report is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--fault", choices=FAULTS, action="append")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # cleans up
    print(f"seed {asked.seed}", flush=True)
    begun = time.monotonic()
    results = torture(asked.runs, asked.seed, asked.fault or FAULTS, lambda line: print(line, flush=True))
    print(f"{time.monotonic() - begun:.0f} s; {summary(results)}")
    print(last_line(results))
    return int(any(one.residue or one.report for one in results))


if __name__ == "__main__":
    sys.exit(main())
