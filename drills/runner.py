"""One run of one drill, from PLANNED to REPORTED: each state in the ledger before it is acted on.

    python -m drills.runner RUN_FOLDER [--accept-unknown-budget]

The runner decides, the holder owns the fault: whatever ends this process, the fault ends with the holder's pipe.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from agent import client
from agent.config import Config, load_all, slo_for
from agent.model import Rule
from agent.signals import CATALOGUE
from agent.strict import ConfigErrors
from agent.threads import NoThread, begin
from drills import guards, hit, holder, in_pod, lease, ledger, lock, owner, pod_watch, prober, proc, tell, watch
from drills.cluster import Cluster, ClusterError, configured
from drills.config import FEWEST_REQUESTS, drills_of, own_time_s
from drills.faults.table import FAULTS
from drills.judge import (
    BACK_WITHIN_S,
    SLOW_FAULTS,
    Alarm,
    Delivery,
    Evidence,
    Restart,
    Traffic,
    counts_of,
    judge,
)
from drills.model import Drill, Fault, Left, Plan, Refused, State, Verdict
from drills.record import Record
from drills.targets import reserved_ports

TICK_S = 1.0
PROVE_WITHIN_S = 15.0
REVERT_WITHIN_S = 10.0
HOLDER_GRACE_S = 5.0  # the holder's own timer ends it so long after the fault's time
STALE_S = 30.0
RESTART_WITHIN_S = 600.0  # where the drill does not say
STEP_S = 2.0  # by which the wall clock may leave the monotonic one
SETTLED_S = 100.0  # at least so long is looked at what came back, where `recovery` leaves it

EXIT: Mapping[Verdict, int] = {
    Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 4, Verdict.INVALID: 4, Verdict.ABORTED: 5,
    Verdict.SKIPPED: 6, Verdict.DEFERRED: 6, Verdict.ORPHANED: 7,
}
BROKE_OFF = 2  # no verdict: drilld heals
# A page of these rules says what a must-hold says: it ends the drill early, and it has failed.
COUNTERPARTS = frozenset({
    "ttft-p99", "itl-p99", "latency-p99", "error-rate-high", "error-burn-fast", "node-error-burn-fast", "queue-age",
    "user-ttft-p99", "user-itl-p99", "user-error-rate",
})



class Ended(Exception):  # noqa: N818  (it says how)
    """The run ends before its time. `early`: a must-hold failed; else it is aborted."""

    def __init__(self, why: str, *, early: bool = False) -> None:
        super().__init__(why)
        self.early = early


class Run:
    """One run. Everything that the report says is in `record`, written after each step."""

    def __init__(self, folder: Path, drill: Drill, config: Config, rules: Sequence[Rule], *,
                 started_by: str = "unknown", due_at: float | None = None,
                 clock: Callable[[], float] = time.time) -> None:
        self.folder, self.config, self.clock = folder, config, clock
        self.drill = replace(drill, target={**drill.target, "reserved": reserved_ports(config)})
        self.run = folder.name
        self.root = folder.parent.parent
        self.rules = {rule.id: rule for rule in rules}
        self.fault: Fault = FAULTS[drill.fault]
        self.ledger = ledger.Ledger.open(folder)
        self.ledger.note(runner=msgspec.to_builtins(proc.identify(os.getpid())))
        self.due_at = due_at
        self.record = Record(folder, drill, clock, started_by=started_by, due_at=due_at)
        self.wake = threading.Event()  # somebody pages, or the run is to stop
        self.stop_why = ""
        self.agent = watch.AgentWatch(config.socket, self.wake.set)
        self.elsewhere = watch.PagesElsewhere(guards.alertmanagers(config), config.node, self.rules, self.wake.set)
        self.prober: prober.Prober | None = None
        self.holder: holder.Holder | None = None
        self.way_back: watch.WayBack | pod_watch.PodsBack | None = None
        self.gpu_memory = watch.GpuMemory(lambda: watch.gpu_holders(config.socket), clock)
        self.plan: Plan | None = None
        self.spans: dict[str, list[float]] = {}
        self.failed_before: float | None = None
        self.group_wait_s = 0.0
        self.left: list[Left] = []
        self.samples: list[Mapping[str, Any]] = []
        self.unexpected: list[str] = []  # pages that nothing announced
        self.ended: Ended | None = None
        self.is_armed = False  # from now on what was announced is announced
        self.judged: list[Mapping[str, Any]] = []  # pages that were judged once
        self.accept_unknown_budget = False
        self.stalest_s = 0.0  # telemetry, at its oldest
        self.begun: dict[str, float] = {}  # monotonic, beside `spans`: a clock that is set lengthens no fault
        self.out_since = 0.0  # monotonic: the fault is out
        self.wall_s, self.stepped_s = clock() - time.monotonic(), 0.0
        self.clock_was_set = False
        self.lease: lease.Held | None = None  # the fleet's, where there is a cluster

    # --- the way through the states ---------------------------------------------------------------------------------

    def execute(self, *, accept_unknown_budget: bool = False) -> Verdict:
        """All of it. Raises nothing that a fault could outlive."""
        self.enter(State.PLANNED)
        try:
            held = lock.take(self.root, self.run)
        except Refused as no:
            return self.refuse(str(no))
        verdict: Verdict | None = None
        try:
            self.take_lease()
            self.enter(State.LOCKED)
            self.preflight(accept_unknown_budget)
            verdict = self.drill_it()
        except Refused as no:
            return self.refuse(str(no))
        except Exception as error:  # of ours: the fault is out by now, and who waits for the run need not wait on
            self.record.finish(Verdict.ORPHANED if self.left else Verdict.ABORTED,
                               f"it broke off, a fault of Tocsin's: {type(error).__name__}: {error}")
            verdict = Verdict.ABORTED
            raise
        else:
            return verdict
        finally:
            self.let_go()
            self.give_lease_back(verdict)
            if not self.left:
                held.release()

    def take_lease(self) -> None:
        """Take the fleet's lease, where there is a cluster. Raises Refused."""
        fleet = lease.fleet_of(self.config.node, clock=self.clock, sleep=self.nap, stopped=lambda: self.stop_why)
        if fleet is None:
            return
        gap_s = self.config.drill_guards.min_gap
        self.lease = fleet.take(self.run, self.drill.name, self.due_at, min_gap_s=gap_s)
        self.ledger.note(fence=self.lease.fence)
        self.record.moment("the fleet's lease taken", "fence {}, {}".format(*self.lease.fence))
        self.lease.keep(self.lease_renewed, self.lease_lost)

    def lease_renewed(self, until: float) -> None:
        """In the lease's thread: the holder is told as well, which outlives a runner that is stopped."""
        if self.holder is not None:
            self.holder.lease(until)

    def lease_lost(self, why: str) -> None:
        """In the lease's thread: another may have it, so nothing of ours stays in."""
        self.abort(why)
        self.wake.set()

    def give_lease_back(self, verdict: Verdict | None) -> None:
        """To the fleet; what is left in the world keeps it, until this node has healed it."""
        if self.lease is None:
            return
        if self.left:
            self.lease.end()
        else:
            self.lease.release(self.drill.name, verdict)

    def nap(self, span_s: float) -> None:
        """Sleep, but no longer than until the run is to stop."""
        end = time.monotonic() + span_s
        while not self.stop_why and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(TICK_S, left_s))

    def tell_node(self, reason: str, message: str) -> None:
        """An Event on our node, for whoever asks what happens to it. One that cannot be written costs nothing."""
        if self.lease is None or not configured():
            return
        about = {"kind": "Node", "name": self.config.node, "uid": self.config.node}
        with suppress(ClusterError), Cluster(answer_s=lease.ANSWER_S) as cluster:
            cluster.event(about, reason, message, now=self.clock())

    def enter(self, state: State, **data: Any) -> None:
        """Write a state down, then let it be true."""
        self.ledger.write(state, **data)
        self.record.enter(state)

    def preflight(self, accept_unknown_budget: bool) -> None:
        """Find the targets and ask every guard. Raises Refused."""
        self.enter(State.PREFLIGHT)
        self.drill = in_pod.resolve(self.drill, self.run)
        plan = in_pod.counted(self.fault.plan(self.drill, self.run), self.drill)
        known = {"of": len(self.config.engines)} if self.config.engines else {}
        self.plan = replace(plan, blast={**known, **plan.blast})
        self.record.planned(self.plan)
        self.drill = replace(self.drill, target=hit.with_engine(self.drill.target, self.config))
        named = self.drill.target.get("engine") or self.drill.target.get("pod")
        if self.drill.target.get("pid") is not None and named is None and self.announced:
            raise Refused(f"process {self.drill.target['pid']} serves no engine of the configuration: no signal can see"
                          " this drill; name the engine under engines")
        self.accept_unknown_budget = accept_unknown_budget
        unwatched: str | None = None
        try:
            self.agent.start()  # before the guards ask: a page between the two must be seen by one of them
        except (client.NotRunning, client.AgentError) as error:
            unwatched = str(error)
        checks = self.ask_guards()
        self.record.guarded(checks)
        no = [f"{check.name}: {check.why}" for check in checks if not check.ok]
        if no or unwatched:
            raise Refused("; ".join(no) or str(unwatched))
        self.elsewhere.start()
        self.failed_before = watch.failed_notifications(guards.alertmanagers(self.config))
        self.group_wait_s = watch.group_wait_s(guards.alertmanagers(self.config))
        if self.lease is not None:
            self.lease.bind(self.drill.name, self.due_at, self.plan.targets)

    def ask_guards(self, *, again: bool = False) -> list[guards.Check]:
        """What each guard says now, before anything is touched."""
        assert self.plan is not None  # noqa: S101
        facts = guards.collect(self.config, self.drill, self.plan, root=self.root, run=self.run, now=self.clock(),
                               accept_unknown_budget=self.accept_unknown_budget, again=again)
        return guards.before(self.drill, self.plan, facts)

    def refuse(self, why: str) -> Verdict:
        """SKIPPED, or DEFERRED where it was due and is tried again, with reasons and a report; nothing was touched."""
        state = State.SKIPPED if self.due_at is None else State.DEFERRED
        self.enter(state, why=why)
        self.record.finish(Verdict(state.value), why)
        return Verdict(state.value)

    def drill_it(self) -> Verdict:
        """Baseline, fault, recovery, verdict."""
        assert self.plan is not None  # noqa: S101  (preflight made it)
        proven, proof = False, "it was never put in"
        try:
            self.baseline()
            self.arm()
            proven, proof = self.inject()
            if proven:
                self.enter(State.OBSERVING)
                self.pass_time("fault", self.drill.for_s)
        except Ended as ended:
            self.ended = ended
        except (OSError, holder.HolderError) as error:  # a ledger that takes no more: what it cannot hold is not done
            self.ended = Ended(f"{type(error).__name__}: {error}")
        finally:
            self.revert()
        if self.spans.get("fault") and not self.left and (self.ended is None or self.ended.early) and proven:
            self.recover()
        return self.conclude(proven, proof)

    def baseline(self) -> None:
        """Load at the user's address before anything is touched."""
        self.enter(State.BASELINE)
        if self.drill.load is not None:
            header = (self.drill.holds.degraded or {}).get("by", {}).get("header", "")
            headers = [str(header).partition(":")[0].strip()] if header else []
            self.announce(())
            self.prober = prober.start(self.drill.load, self.folder, headers)
        self.pass_time("baseline", self.drill.baseline_s)

    def arm(self) -> None:
        """The plan on disk, the announcement at the agent, the holder up; still nothing is touched."""
        assert self.plan is not None  # noqa: S101
        self.enter(State.ARMED, plan=msgspec.to_builtins(self.plan))
        self.announce(self.announced)
        span_s = self.drill.for_s + self.prove_within_s + HOLDER_GRACE_S + self.drain_s
        self.holder = holder.start(self.folder, span_s)
        self.ledger.note(holder=msgspec.to_builtins(self.holder.process_id))
        self.holder.wait_up(PROVE_WITHIN_S)
        self.is_armed = True
        if self.plan.restarts:  # of all its processes: its core may hold the memory where its page is killed
            parts = (*self.plan.facts.get("victims", ()), *self.plan.facts.get("others", ()))
            self.gpu_memory.before(one["pid"] for one in parts)
        if self.plan.fault == "pod-kill":
            self.way_back = pod_watch.PodsBack(self.plan.facts, self.clock)
        elif self.plan.restarts and self.drill.target.get("url"):
            key_file = None if self.drill.load is None else self.drill.load.api_key_file
            self.way_back = watch.WayBack(str(self.drill.target["url"]), self.clock, prober.read_key(key_file))

    def announce(self, rules: Sequence[str]) -> None:
        """Tell the agent what is to come: these alerts, and the prober's load. Raises Refused."""
        drill = self.drill
        lasts_s = drill.for_s + max(drill.resolve_within_s, drill.recovery_s) + (0.0 if rules else drill.baseline_s)
        tell.announce(self.config.socket, self.run, drill, rules, self.clock() + lasts_s,
                      tell.subjects_of(drill, self.config.node))

    def inject(self) -> tuple[bool, str]:
        """Put the fault in and prove it; INVALID where that cannot be done."""
        assert self.plan is not None and self.holder is not None  # noqa: S101, PT018
        self.refuse_to_go_on()
        no = [f"{check.name}: {check.why}" for check in self.ask_guards(again=True) if not check.ok]
        self.judge_pages()
        if no:  # much may have changed since the first time: a replica hangs, the window is over
            raise Ended(f"right before the injection: {'; '.join(no)}")
        if self.lease is not None:
            self.holder.lease(self.lease.good_until)
        self.enter(State.INJECTING)
        if self.way_back is not None:
            self.way_back.start()
            self.gpu_memory.start()
        self.spans["fault"], self.begun["fault"] = [self.clock(), self.clock()], time.monotonic()
        try:
            injected_at = self.holder.inject(PROVE_WITHIN_S)
        except holder.HolderError as no:
            self.refuse_to_go_on()  # a fault that was ended is no fault that failed
            self.enter_quietly(State.INVALID, why=str(no))
            return False, str(no)
        self.spans["fault"], self.begun["fault"] = [injected_at, self.clock()], time.monotonic()
        self.record.moment("fault injected", f"holder pid {self.holder.process_id.pid}")
        told = f"{self.drill.fault}, run {self.run}: {'; '.join(self.plan.targets)}"
        with suppress(NoThread):  # an Event costs a drill nothing
            begin(self.tell_node, "event", "DrillInjected", told)
        begun = time.monotonic()
        proven, proof = False, "no sample came"
        while not proven and not any(sample.get("over") for sample in self.holder.samples):
            self.breathe("fault")  # first: a runner that stood still may have no right to go on
            proven, proof = self.fault.proven(self.plan, self.holder.samples)
            # While its counters grow there may be too few of them yet to tell: small shares take their time.
            within_s = max(self.prove_within_s, self.drill.for_s if is_moving(self.holder.samples) else 0.0)
            if time.monotonic() > begun + within_s:
                break
        if not proven:
            self.refuse_to_go_on()
        self.enter(State.PROVEN if proven else State.INVALID, proof=proof)
        self.record.moment("fault proven" if proven else "fault NOT proven", proof)
        return proven, proof

    def revert(self) -> None:
        """End the fault, look at the world; what is left is ORPHANED and keeps the lock."""
        if self.holder is None or self.plan is None:
            return
        self.enter_quietly(State.REVERTING)
        self.samples = list(self.holder.samples)
        told_at, told = self.clock(), time.monotonic()
        self.left = self.holder.revert(REVERT_WITHIN_S + self.drain_s)
        self.out_since = told if self.drain_s else time.monotonic()
        # What a fault let in may drain until long after its end, and only then it is undone.
        undone = [event["at"] for event in self.holder.events() if event["event"] == "undone"]
        ended_at = min([told_at if self.drain_s else self.clock(), *undone])
        if "fault" in self.spans:
            self.spans["fault"][1] = max(ended_at, self.spans["fault"][0])
            self.record.moment("fault removed", "; ".join(x.what for x in self.left) or "nothing of ours is left",
                               at=ended_at)
        self.enter_quietly(State.ORPHANED if self.left else State.REVERTED, left=[x.what for x in self.left])
        if self.left:
            self.record.orphaned(self.left)
            tell.orphaned(self.config.socket, self.run, self.left)

    @property
    def prove_within_s(self) -> float:
        """How long a fault may take until it can be proven: a reset of hardware takes its time."""
        return float(self.plan.facts.get("prove_within_s", PROVE_WITHIN_S)) if self.plan is not None else PROVE_WITHIN_S

    @property
    def drain_s(self) -> float:
        """How long a fault that is out may still serve what it let in."""
        return float(self.plan.facts.get("drain_s", 0.0)) if self.plan is not None else 0.0

    def enter_quietly(self, state: State, **data: Any) -> None:
        """As `enter`, on a disk that may be full: undoing never needs a successful write."""
        try:
            self.enter(state, **data)
        except OSError as error:
            self.record.moment(f"{state} could not be written down", type(error).__name__)

    def recover(self) -> None:
        """Watch until all is as before: `recovery`, and on for what is not back yet and has time until later."""
        longest_s = max(self.drill.recovery_s, self.drill.resolve_within_s)
        if self.way_back is not None:
            longest_s = max(longest_s, self.restart_within_s)
        try:
            self.pass_time("recovery", longest_s, done=self.is_recovered)
        except Ended as ended:
            self.ended = ended if self.ended is None else self.ended
        self.enter_quietly(State.RECOVERED)

    def is_recovered(self) -> bool:
        """The announced alerts are resolved, the target answers, and there was time enough to judge by."""
        back = self.way_back is None or self.way_back.completion_at is not None
        back = back and self.gpu_memory.is_free(None) is not False
        settled = time.monotonic() - self.out_since >= min(self.settled_s, self.drill.recovery_s)
        return back and settled and all(a.firing_at is None or a.resolved_at is not None for a in self.alarms())

    @property
    def settled_s(self) -> float:
        """How long to watch what came back: where it is judged only from some time on, for long enough after that."""
        if self.drill.fault not in SLOW_FAULTS or self.drill.load is None:
            return SETTLED_S
        return BACK_WITHIN_S + FEWEST_REQUESTS / self.drill.load.rate_per_s

    # --- time passes ------------------------------------------------------------------------------------------------

    def pass_time(self, phase: str, span_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """One phase: guards each second. Raises Ended."""
        self.spans.setdefault(phase, [self.clock(), self.clock()])
        end = self.begun.setdefault(phase, time.monotonic()) + span_s
        while time.monotonic() < end and not done():
            self.breathe(phase)

    def breathe(self, phase: str) -> None:
        """One second of a phase: feed the agent, ask the guards. Raises Ended."""
        self.wake.wait(TICK_S)
        self.wake.clear()
        self.spans[phase][1] = self.clock()
        self.mind_clock()
        self.refuse_to_go_on()
        self.judge_pages()  # before all that may take its time
        if self.prober is not None:
            if not self.prober.alive:
                raise Ended(f"the prober ended: nobody asks any more; look at {self.folder / 'prober.log'}")
            tell.users(self.config.socket, self.drill.load.url if self.drill.load else "", self.prober.latest)
        if self.holder is not None and phase == "fault" and not self.holder.alive:
            raise Ended(self.stop_why or "the holder ended before its time: the fault is gone")
        facts = guards.collect_during(self.config, self.drill, self.agent.stale_s, self.clock(), self.pods)
        self.stalest_s = max(self.stalest_s, facts.stale_s)
        no = [c for c in guards.during(self.drill, facts) if not c.ok]
        if no:
            raise Ended(self.stop_why or "; ".join(f"{c.name}: {c.why}" for c in no))

    def mind_clock(self) -> None:
        """Note that the clock was set, or the machine slept: what lies across it cannot be told by the times."""
        stepped_s = self.clock() - time.monotonic() - self.wall_s
        if abs(stepped_s - self.stepped_s) > STEP_S:
            by_s, self.stepped_s, self.clock_was_set = stepped_s - self.stepped_s, stepped_s, True
            self.record.moment(f"the clock was put {'forward' if by_s > 0 else 'back'} by {abs(by_s):.0f} s",
                               "by CLOCK_MONOTONIC, which stands still while a machine sleeps")

    def refuse_to_go_on(self) -> None:
        """Raise Ended where the run was told to stop, or the fleet's lease may be another's by now."""
        if self.stop_why:
            raise Ended(self.stop_why)
        if self.lease is not None and not self.lease.fresh():
            raise Ended(self.lease.lost or lease.STALE)

    @property
    def pods(self) -> tuple[int | None, int] | None:
        """How many pods are Ready, of how many; None where the drill is about none."""
        if self.plan is None or "ready" not in self.plan.facts:
            return None
        return self.way_back.healthy if isinstance(self.way_back, pod_watch.PodsBack) else None, self.plan.blast["of"]

    def judge_pages(self) -> None:
        """A page that a must-hold stands for fails the drill now; one that nothing announced aborts it."""
        announced = self.announced if self.is_armed else ()
        for page in (page for page in self.agent.pages() if page not in self.judged):
            self.judged.append(page)
            if page["rule"] in announced and self.is_own(str(page["subject"])):
                continue
            where = f"{page['rule']} on {page['subject']}"
            if self.is_armed and (page["rule"] in COUNTERPARTS or page["rule"] in self.caused):
                raise Ended(f"{where} paged", early=True)
            self.unexpected.append(where)
            raise Ended(f"a page that nothing announced: {where}")
        for labels in (labels for labels in self.elsewhere.pages() if labels not in self.judged):
            self.judged.append(labels)
            # The exported rules may page for what the agent does: of this node, and with its names.
            twice = labels.get("node", self.config.node) == self.config.node and self.is_own(labels.get("subject", ""))
            if twice and labels.get("rule") in announced:
                continue
            where = f"{guards.page_text(labels)} of node {labels.get('node', 'unknown')}, in Alertmanager"
            self.unexpected.append(where)
            raise Ended(f"a page that nothing announced: {where}")

    def is_own(self, subject: str) -> bool:
        """Whether an alert on this subject can be of this drill's making."""
        return tell.is_drilled(self.drill, self.config.node, subject)

    @property
    def announced(self) -> Sequence[str]:
        """The alerts that this drill says will fire."""
        return self.drill.expects or (self.plan.expects if self.plan else ())

    @property
    def caused(self) -> set[str]:
        """What the announced alerts can cause, along the rules' `causes`."""
        found, todo = set[str](), list(self.announced)
        while todo:
            for effect in getattr(self.rules.get(todo.pop()), "causes", ()):
                if effect not in found:
                    found.add(effect)
                    todo.append(effect)
        return found

    # --- the verdict ------------------------------------------------------------------------------------------------

    def alarms(self) -> list[Alarm]:
        """What became of each announced alert."""
        since = self.spans["fault"][0] if "fault" in self.spans else self.clock()
        rows = [row for row in self.agent.rows() if self.is_own(str(row["subject"]))]
        echo = self.drill.echo
        found = []
        for rule_id in self.announced:
            rule = self.rules.get(rule_id)
            echoed = watch.echoed_at(echo, rule_id, since, self.is_own) if echo is not None else None
            known = None if rule is None else {"for_s": own_time_s(rule)}
            found.append(watch.alarm_of(known, rule_id, rows, since, echoed))
        return found

    def evidence(self, proven: bool, proof: str) -> Evidence:
        """All that the run brought."""
        requests = self.prober.requests() if self.prober is not None else []
        after = watch.failed_notifications(guards.alertmanagers(self.config))
        failures = None if after is None or self.failed_before is None else after - self.failed_before
        failures = None if failures is not None and failures < 0 else failures  # it was restarted: nobody can tell
        sent_ratio, late_s = self.prober.kept() if self.prober is not None else (1.0, 0.0)
        ended = self.ended
        stalest_s, limit_s = max(self.stalest_s, self.agent.stale_s), max(STALE_S, guards.stale_limit_s(self.config))
        silent = [f"what the agent told was {stalest_s:.0f} s old"] if stalest_s > limit_s else []
        self.mind_clock()
        if self.clock_was_set:
            silent.append("the clock was set meanwhile: times across that are off")
        traffic = self.traffic()
        slo = slo_for(self.config, self.drill.target.get("engine"))
        return Evidence(
            drill=self.drill, baseline=self.span("baseline"), fault=self.span("fault"),
            recovery=self.span("recovery"), slo_ttft_p99_s=slo.ttft_p99,
            slo_itl_p99_s=slo.itl_p99, proven=proven, proof=proof, requests=requests,
            sent_ratio=sent_ratio, late_p99_s=late_s, alarms=self.alarms(),
            delivery=Delivery(bool(self.drill.echo), self.group_wait_s, failures), restart=self.restart(),
            ended_early=str(ended) if ended is not None and ended.early else None,
            aborted=str(ended) if ended is not None and not ended.early else None,
            left=[one.what for one in self.left], stale=silent, unexpected=self.unexpected,
            arrivals=traffic.replicas, counts=counts_of(traffic),
            unwatched_restart=self.plan is not None and self.plan.restarts and not self.drill.target.get("url"),
            not_as_before=self.samples[-1].get("not_as_before") if self.samples else None,
            slo_availability=slo.availability, slo_window_s=slo.window)

    def traffic(self) -> Traffic:
        """What arrived at each replica and router since the baseline, as the agent counts it; {} where it is silent."""
        try:
            told = client.ask(self.config.socket, f"/traffic?since={self.span('baseline')[0]}")
            return msgspec.convert(told, Traffic)
        except (client.NotRunning, client.AgentError, msgspec.ValidationError):
            return Traffic()

    def span(self, phase: str) -> tuple[float, float]:
        """From when to when a phase lasted; an empty one where it was not reached."""
        now = self.clock()
        start, end = self.spans.get(phase) or (now, now)
        return start, end

    @property
    def restart_within_s(self) -> float:
        """How long a killed target may take to answer again."""
        return self.drill.holds.restart_within_s or RESTART_WITHIN_S

    def restart(self) -> Restart | None:
        """The target's way back, and what of it lived on."""
        if self.way_back is None or self.plan is None:
            return None
        way = self.way_back
        # As it was when the restart would count; an orphan that ended later was one.
        counts_at = way.completion_at
        seen = next((s for s in self.samples if counts_at is not None and s.get("at", 0.0) >= counts_at),
                    self.samples[-1] if self.samples else {})
        orphans = [f"pid {pid}" for pid in seen.get("outlive", ())]
        found = Restart(self.restart_within_s, way.down_at, way.port_at, way.ready_at, way.completion_at, orphans,
                        self.gpu_memory.is_free(way.completion_at),
                        wants_key=isinstance(way, watch.WayBack) and way.wants_key)
        if isinstance(way, pod_watch.PodsBack):
            why = "" if way.completion_at is not None else way.why_not() or "it is Ready, and gives no completion"
            return replace(found, steps=dict(way.steps), why=why)
        return found

    def conclude(self, proven: bool, proof: str) -> Verdict:
        """Judge, write the report, say it."""
        self.let_go()
        # With all samples: counters that vanished later prove nothing, and one that ended while proving may have proof.
        if self.samples and self.plan is not None and (proven or self.ended is not None):
            proven, proof = self.fault.proven(self.plan, self.samples)
        judgement = judge(self.evidence(proven, proof))
        self.record.judged(judgement, self.spans, self.samples, self.agent.rows())
        self.record.finish(judgement.verdict, judgement.why)
        self.tell_node("DrillEnded", f"{self.drill.fault}, run {self.run}: {judgement.verdict}, {judgement.why}")
        self.enter_quietly(State.REPORTED, verdict=judgement.verdict)
        return judgement.verdict

    def let_go(self) -> None:
        """End the children and threads; may be called twice."""
        if self.prober is not None:
            self.prober.stop()
        if self.way_back is not None:
            self.way_back.stop()
            self.gpu_memory.stop()
        self.agent.stop()
        self.elsewhere.stop()
        tell.end_announcement(self.config.socket, self.run)

    def abort(self, why: str) -> None:
        """End the run early, in good order, within a second. From a signal handler: it may take no lock.

        The fault ends at once, whatever the run just waits for: an agent that hangs takes its time.
        """
        self.stop_why = why
        if self.holder is not None:
            self.holder.revert_now()


def is_moving(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the evidence of a fault still changes from sample to sample."""
    last = [{key: value for key, value in sample.items() if key not in ("at", "event")} for sample in samples[-3:]]
    return len(last) > 1 and any(sample != last[0] for sample in last)


def create(root: Path, drill: Drill, run_id: str, *, started_by: str, config_path: Path | None,
           due_at: float | None = None, node: str | None = None) -> Path:
    """The folder of a new run, with its header in the ledger; begun by root, it is drilld's too. Raises OSError."""
    folder = root / "runs" / run_id
    owner.make_folder(root)
    owner.make_folder(folder.parent)
    header = {"drill": drill.name, "started_by": started_by, "due_at": due_at, "node": node,
              "config": None if config_path is None else str(config_path)}
    ledger.Ledger.create(folder, header).close()
    owner.give(folder)
    return folder


def write_refused(folder: Path, drill: Drill, verdict: Verdict, why: str, clock: Callable[[], float]) -> None:
    """A run that will not be, or not now: SKIPPED or DEFERRED in its ledger and its report. Raises OSError."""
    header = ledger.read(folder)[0].data
    open_ledger = ledger.Ledger.open(folder)
    open_ledger.write(State(verdict.value), why=why)
    open_ledger.close()
    told = Record(folder, drill, clock, started_by=str(header["started_by"]), due_at=header["due_at"])
    told.data["state"] = State(verdict.value)
    told.finish(verdict, why)


def execute(folder: Path, *, accept_unknown_budget: bool = False) -> Verdict:
    """Run what `create` has made. SIGTERM and SIGINT end it in good order. Raises ConfigErrors, LookupError."""
    header = ledger.read(folder)[0].data
    config, rules = load_all(Path(header["config"]) if header.get("config") else None, os.environ, CATALOGUE)
    drill = next((d for d in drills_of(config, rules.rules) if d.name == header["drill"]), None)
    if drill is None:
        raise LookupError(f"{header['drill']}: no drill of this name in the configuration")
    run = Run(folder, drill, config, rules.rules, started_by=str(header.get("started_by", "unknown")),
              due_at=header.get("due_at"))
    aborted: list[str] = []

    def told(signum: int, _: object) -> None:
        aborted.append(ledger.aborted_by(folder) or signal.Signals(signum).name)
        run.abort(f"aborted by {aborted[-1]}")

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, told)
    try:
        return run.execute(accept_unknown_budget=accept_unknown_budget)
    finally:
        if aborted:
            with suppress(OSError):
                run.ledger.note(aborted_by=aborted[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """The runner's entry; its exit status is the verdict's."""
    parser = argparse.ArgumentParser(prog="drills.runner", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accept-unknown-budget", action="store_true")
    args = parser.parse_args(argv)
    try:
        return EXIT[execute(args.folder, accept_unknown_budget=args.accept_unknown_budget)]
    except (ConfigErrors, LookupError, OSError) as error:
        print(f"tocsin drill: {error}", file=sys.stderr)  # noqa: T201  (a person started this)
        return BROKE_OFF
    except Exception:
        traceback.print_exc()
        return BROKE_OFF


if __name__ == "__main__":
    sys.exit(main())
