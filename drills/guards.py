"""May a drill run, and may it go on? All guards must say yes; what cannot be found out is a no that says why.

`before` and `during` are pure; `collect` and `collect_during` look at the world for them. A guard never touches it.
"""

from __future__ import annotations

import http.client
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import requests

from agent import client, silences
from agent.config import Config, DrillGuards
from agent.proxy import DIRECT
from agent.strict import duration_s
from drills import cron, lock, tell, watch
from drills.faults import packet_loss
from drills.ledger import LEDGER
from drills.model import Drill, Plan
from drills.targets import reserved_ports

T = TypeVar("T")

ANSWER_S = 2.0
STALE_S = 30.0  # or three polls, where that is longer
SERVES_NOBODY = frozenset({"engine-down", "engine-slow", "engine-stuck"})
ENOUGH_WATCHED_S = 3600.0  # to judge an error budget by
ROOM_BYTES = 1 << 20  # for the requests and the report of a run
MAX_LEVER_CHARS = 200
MAX_NAMED = 5  # in one text
# The same ruleset armed where it can hurt nobody. Raises Refused.
REHEARSALS: Mapping[str, Callable[[Plan], None]] = {"packet-loss": packet_loss.rehearse}


@dataclass(frozen=True, slots=True)
class Check:
    """What one guard said, and the sentence for the report."""

    name: str
    ok: bool
    why: str


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """Something about the world: its value, or why it could not be found out."""

    value: T | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The error budget as the agent's check tells it. `left`: share of it; None: nothing is told."""

    left: float | None
    watched_s: float | None
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that `before` judges by. `planning`: nothing will run, so the lock is free and nothing is rehearsed."""

    now: float
    run: str
    limits: DrillGuards
    replicas: int  # engines of this node's configuration
    accept_unknown_budget: bool
    planning: bool
    lever: Fact[str]  # "" where the file is not there, else its first line
    lock_holder: Fact[str]  # "" for nobody
    ledger: Fact[str]  # "" where it can be written, else why not
    pages: Fact[Sequence[str]]  # that fire here
    alertmanager: Fact[Sequence[str]]  # that fire there
    silences: Fact[Sequence[str]]  # that hold, and mute what the drill announces or all of the node
    stale: Fact[Sequence[str]]  # what is told too late
    healthy: Fact[int]  # replicas that answer
    budget: Fact[Budget]
    reserved: Fact[Mapping[int, str]]  # ports that no drill may touch
    rehearsal: Fact[str]  # how it went; "" where there is none


@dataclass(frozen=True, slots=True)
class DuringFacts:
    """All that `during` judges by. None: the agent did not tell just now; how long it may be silent is a guard too."""

    limits: DrillGuards
    replicas: int
    stale_s: float
    stale_limit_s: float
    lever: Fact[str]
    healthy: int | None
    budget: Budget | None


# ---- judging, pure ----

Said = tuple[bool, str]


def before(drill: Drill, plan: Plan, facts: Facts) -> list[Check]:
    """What each guard says before anything is touched. All must say yes."""
    return [_asked(name, guard, drill, plan, facts) for name, guard in BEFORE.items()]


def during(drill: Drill, facts: DuringFacts) -> list[Check]:
    """What each guard says while the drill runs, each second."""
    return [_asked(name, guard, drill, facts) for name, guard in DURING.items()]


def _asked(name: str, guard: Callable[..., Said], *args: Any) -> Check:
    try:
        ok, why = guard(*args)
    except Exception as error:  # a guard that fails has not said yes
        ok, why = False, f"this guard failed, a fault of Tocsin's: {type(error).__name__}: {error}"
    return Check(name, ok, why)


def _known(fact: Fact[T], judge: Callable[[T], Said]) -> Said:
    """Judge a fact; one that is not known is a no."""
    if fact.unknown is not None or fact.value is None:
        return False, fact.unknown or "it could not be found out"
    return judge(fact.value)


def _enabled(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del plan, facts
    return drill.enabled, "yes" if drill.enabled else f"drills: {drill.name}: enabled is false"


def _not_dry(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del plan, facts
    return not drill.dry_run, "dry-run: it stops before it touches anything" if drill.dry_run else "no"


def _window(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del plan
    if drill.schedule is None:
        return True, "it has no schedule: whoever starts it chooses the time"
    why = cron.closed(drill.schedule, facts.now)
    return not why, why or "open"


def _lever(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.lever, lambda text: _lever_said(facts.limits, text))


def _lever_said(limits: DrillGuards, text: str) -> Said:
    return not text, f"{limits.lever_file} is there: {text}" if text else f"{limits.lever_file} is not there"


def _lock(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan

    def judge(holder: str) -> Said:
        if not holder:
            return facts.planning, "nobody holds it" if facts.planning else "the lock is not held by this run"
        return holder == facts.run, f"held by {'this run' if holder == facts.run else f'run {holder}'}"

    return _known(facts.lock_holder, judge)


def _ledger(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.ledger, lambda why: (not why, why or "it can be written"))


def _pages(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.pages, lambda firing: _none_of(firing, "fires on this node", "no page fires on this node"))


def _alertmanager(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    quiet = "no page fires in Alertmanager, or none is configured"
    return _known(facts.alertmanager, lambda firing: _none_of(firing, "fires in Alertmanager", quiet))


def _silences(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    quiet = "none mutes what this drill announces"
    return _known(facts.silences, lambda muting: _none_of(muting, "", quiet))


def _telemetry(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.stale, lambda stale: _none_of(stale, "", "fresh"))


def _none_of(found: Sequence[str], what: str, else_say: str) -> Said:
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return not found, f"{', '.join(found[:MAX_NAMED])}{more} {what}".rstrip() if found else else_say


def hit_by(plan: Plan) -> int:
    """How many replicas a fault takes away; one where the plan does not say."""
    return int(plan.blast.get("replicas", 1))


def least_healthy(limits: DrillGuards, replicas: int) -> int:
    """`min_healthy`, or the larger of 1 and half of them."""
    return max(1, math.ceil(replicas / 2)) if limits.min_healthy is None else limits.min_healthy


def _replicas(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill
    hit, least = hit_by(plan), least_healthy(facts.limits, facts.replicas)

    def judge(healthy: int) -> Said:
        told = f"{healthy} of {facts.replicas} replicas are healthy, {healthy - hit} after the fault"
        return healthy - hit >= least, f"{told}; at least {least} (drill_guards.min_healthy)"

    return _known(facts.healthy, judge)


def _blast(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill
    hit, of = hit_by(plan), int(plan.blast.get("of") or facts.replicas)
    most = max(1.0, facts.limits.max_blast_radius * of)
    return hit <= most, f"{hit} of {of} replicas; at most {math.floor(most)} (drill_guards.max_blast_radius)"


def _budget(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.budget, lambda budget: _budget_said(budget, facts.limits, facts.accept_unknown_budget))


def _budget_said(budget: Budget, limits: DrillGuards, accept_unknown: bool) -> Said:
    if budget.left is not None and budget.left < limits.min_budget_left:
        told = f"{max(0.0, budget.left):.0%} of the error budget of {budget.subject} is left"
        return False, f"{told}; at least {limits.min_budget_left:.0%} (drill_guards.min_budget_left)"
    watched_s = budget.watched_s or 0.0
    if budget.left is None or watched_s < ENOUGH_WATCHED_S:
        told = f"unknown: errors were watched for {watched_s / 60:.0f} of at least {ENOUGH_WATCHED_S / 60:.0f} min"
        return accept_unknown, f"{told}; {'accepted' if accept_unknown else 'allow it'} with --accept-unknown-budget"
    return True, f"{budget.left:.0%} is left, by {watched_s / 3600:.0f} h of watching"


def _target(drill: Drill, plan: Plan, facts: Facts) -> Said:
    ports = {int(port) for port in (drill.target.get("port"), plan.facts.get("port")) if port is not None}

    def judge(reserved: Mapping[int, str]) -> Said:
        hit = [f"port {port} is {reserved[port]}" for port in sorted(ports) if port in reserved]
        return _none_of(hit, "", "none that all depend on")

    return _known(facts.reserved, judge)


def _rehearsal(drill: Drill, plan: Plan, facts: Facts) -> Said:
    del drill, plan
    return _known(facts.rehearsal, lambda how: (True, how or "this fault has none"))


# name -> guard: one row of the report each
BEFORE: Mapping[str, Callable[[Drill, Plan, Facts], Said]] = {
    "enabled": _enabled,
    "not a dry run": _not_dry,
    "lever file": _lever,
    "window": _window,
    "lock": _lock,
    "ledger": _ledger,
    "pages": _pages,
    "Alertmanager": _alertmanager,
    "silences": _silences,
    "telemetry": _telemetry,
    "healthy replicas": _replicas,
    "blast radius": _blast,
    "error budget": _budget,
    "target": _target,
    "rehearsal": _rehearsal,
}


def _lever_now(drill: Drill, facts: DuringFacts) -> Said:
    del drill
    return _known(facts.lever, lambda text: _lever_said(facts.limits, text))


def _telemetry_now(drill: Drill, facts: DuringFacts) -> Said:
    del drill
    told = f"the agent last answered {facts.stale_s:.0f} s ago; at most {facts.stale_limit_s:.0f} s"
    return facts.stale_s <= facts.stale_limit_s, told


def _replicas_now(drill: Drill, facts: DuringFacts) -> Said:
    del drill
    least = least_healthy(facts.limits, facts.replicas)
    if facts.healthy is None:
        return True, "not told just now"
    told = f"beside the drilled one {facts.healthy} of {facts.replicas} replicas are healthy; at least {least}"
    told += " (drill_guards.min_healthy)"
    return facts.healthy >= least, told


def _budget_now(drill: Drill, facts: DuringFacts) -> Said:
    del drill
    if facts.budget is None:
        return True, "not told just now"
    return _budget_said(facts.budget, facts.limits, accept_unknown=True)


DURING: Mapping[str, Callable[[Drill, DuringFacts], Said]] = {
    "lever file": _lever_now,
    "telemetry": _telemetry_now,
    "healthy replicas": _replicas_now,
    "error budget": _budget_now,
}


# ---- looking, at the edge ----


def collect(
    config: Config,
    drill: Drill,
    plan: Plan,
    *,
    root: Path,
    run: str,
    now: float,
    accept_unknown_budget: bool,
    planning: bool = False,
    again: bool = False,
) -> Facts:
    """Everything that `before` judges by. `root`: `<state_dir>/drills`. Never raises: what fails is not known.

    `planning`: for `tocsin drill plan`, which takes no lock and arms nothing, not even in a scratch namespace. `again`:
    right before the injection, when all was rehearsed.
    """
    checked = _found(lambda: _mapping(client.ask(config.socket, "/check")))
    rehearse = None if planning or again else REHEARSALS.get(plan.fault)
    ready = plan.facts.get("ready")  # what Kubernetes tells counts before what this node's engines tell
    return Facts(
        now=now,
        run=run,
        limits=config.drill_guards,
        replicas=len(config.engines) if ready is None else int(plan.blast["of"]),
        accept_unknown_budget=accept_unknown_budget,
        planning=planning,
        lever=_found(lambda: lever_of(config.drill_guards.lever_file)),
        lock_holder=_found(lambda: lock.holder_of(root) or ""),
        ledger=_found(lambda: unwritable(root / lock.RUNS / run)),
        pages=_found(lambda: firing_of(client.ask(config.socket, "/alerts?resolved=0"), drill,
                                       drill.expects or plan.expects, config.node)),
        alertmanager=_found(lambda: [page for url in alertmanagers(config) for page in pages_at(url)]),
        silences=_then(checked, lambda told: muting(told, drill, drill.expects or plan.expects, config.node)),
        stale=_then(checked, lambda told: stale_of(told, drill, now, stale_limit_s(config))),
        healthy=_found(lambda: healthy_engines(config) if ready is None else int(ready)),
        budget=_then(checked, lambda told: budget_of(told, config.slo.window)),
        reserved=_found(lambda: reserved_ports(config)),
        rehearsal=_found(lambda: _rehearsed(rehearse, plan)),
    )


def collect_during(config: Config, drill: Drill, stale_s: float, now: float,
                   pods: tuple[int | None, int] | None = None) -> DuringFacts:
    """Everything that `during` judges by. `stale_s`: since the agent last answered. Asks it once; never raises.

    `pods`: how many are Ready, of how many, where Kubernetes is watched. An agent that answers and no longer ticks is
    as stale as its last tick.
    """
    lever = _found(lambda: lever_of(config.drill_guards.lever_file))
    # Somebody pulled the lever: an agent that hangs is not waited for.
    checked: Fact[Mapping[str, Any]] = Fact(unknown="not asked") if lever.value else _found(
        lambda: _mapping(client.ask(config.socket, "/check")))
    replicas = len(config.engines) if pods is None else pods[1]
    return DuringFacts(
        limits=config.drill_guards,
        replicas=replicas,
        stale_s=max(stale_s, _then(checked, lambda told: now - float(told["at"])).value or 0.0),
        stale_limit_s=stale_limit_s(config),
        lever=lever,
        healthy=_then(checked, lambda told: replicas - away(told, drill)).value if pods is None else pods[0],
        budget=_then(checked, lambda told: budget_of(told, config.slo.window)).value,
    )


def _found(read: Callable[[], T]) -> Fact[T]:
    try:
        return Fact(read())
    except KeyError as error:
        return Fact(unknown=f"the answer has no {error}: do agent and drilld have the same version?")
    except Exception as error:  # whatever it is: not to know is a no
        return Fact(unknown=str(error) or type(error).__name__)


def _then(fact: Fact[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], T]) -> Fact[T]:
    told = fact.value
    return Fact(unknown=fact.unknown) if told is None else _found(lambda: read(told))


def _mapping(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise TypeError("the agent's answer is not what /check tells; do agent and drilld have the same version?")
    return answer


def _rehearsed(rehearse: Callable[[Plan], None] | None, plan: Plan) -> str:
    if rehearse is None:
        return ""
    rehearse(plan)
    return "armed in a scratch namespace: the target port is lossy, everything else is not"


def stale_limit_s(config: Config) -> float:
    """How old a signal may be: three polls, 30 s at least."""
    return max(STALE_S, 3 * config.poll)


def lever_of(file: Path) -> str:
    """The first line of the file that forbids drills, "(empty)" for none; "" where it is not there. Raises OSError."""
    try:
        os.lstat(file)  # a broken link is there too
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            line = opened.readline(MAX_LEVER_CHARS).strip()
    except OSError as error:
        return f"(not readable: {error.strerror})"
    return "".join(c if c.isprintable() else "�" for c in line) or "(empty)"


def unwritable(folder: Path) -> str:
    """Why a run's folder and ledger could not be written; "" where they can. Writes nothing. Raises OSError."""
    ledger = folder / LEDGER
    place = next(path for path in (ledger, folder, *folder.parents) if path.exists())
    size = os.statvfs(place)
    if size.f_flag & os.ST_RDONLY:
        return f"{place} is on a read-only file system"
    if not os.access(place, os.W_OK):
        return f"{place} may not be written by this user"
    if size.f_bavail * size.f_frsize < ROOM_BYTES:
        return f"the disk of {place} is full"
    return ""


def firing_of(rows: Sequence[Mapping[str, Any]], drill: Drill, announced: Sequence[str],
              node: str | None) -> list[str]:
    """What no drill begins under, of what the agent's /alerts tells: pages, and what this drill itself announces.

    Of a ticket that fires already nobody could tell that the drill made it fire.
    """
    return [f"{row['rule']} on {row['subject']}" for row in rows if row["state"] == "firing"
            and (row["severity"] == "page"
                 or (row["rule"] in announced and tell.is_drilled(drill, node, str(row["subject"]))))]


def alertmanagers(config: Config) -> list[str]:
    """Every peer that the configuration names, without a last slash."""
    return [url for channel in config.notify if channel.alertmanager is not None for url in channel.alertmanager.urls]


def pages_at(url: str) -> list[str]:
    """The pages that one Alertmanager knows of, muted ones too: somebody muted them because something is wrong.

    Raises as watch.pages_at does.
    """
    return [page_text(labels) for labels in watch.pages_at(url)]


def page_text(labels: Mapping[str, str]) -> str:
    """An alert of anybody's by its labels, in words."""
    return f"{labels.get('rule') or labels['alertname']} on {labels.get('subject', 'something')}"


def healthy_engines(config: Config) -> int:
    """How many engines of this node's configuration answer /health with 200. Raises LookupError where there is none."""
    if not config.engines:
        raise LookupError("nothing tells how many replicas there are: name the engines of this node under engines")
    with ThreadPoolExecutor(max_workers=min(16, len(config.engines))) as pool:
        return sum(pool.map(_answers, [engine.url for engine in config.engines]))


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=ANSWER_S, proxies=DIRECT).status_code == http.client.OK
    except requests.RequestException:
        return False


def away(checked: Mapping[str, Any], drill: Drill) -> int:
    """How many engines serve nobody just now: those that the agent's check calls so, and the one that is drilled."""
    gone = {str(row["subject"]).partition("/")[0] for row in checked["signals"]
            if row["rule"] in SERVES_NOBODY and row["state"] == "BREACH"}
    engine = drill.target.get("engine")
    hit = 0 if drill.target.get("path") is not None else 1  # a full disk takes no replica away
    return len(gone | {str(engine)}) if engine is not None else len(gone) + hit


def muting(checked: Mapping[str, Any], drill: Drill, announced: Sequence[str], node: str | None) -> list[str]:
    """Silences that hold, by the agent's check, and under which nobody would hear of an announced alert.

    A maintenance always counts: somebody works on this node.
    """
    subjects = tell.subjects_of(drill, node)
    return [f"silence {one.id} mutes {one}" for one in silences.from_plain(checked["silences"])
            if (one.rule, one.subject) == (silences.ALL, silences.ALL)
            or any(_mutes(one, rule, subjects) for rule in announced)]


def _mutes(one: silences.Silence, rule: str, subjects: Sequence[str] | None) -> bool:
    """Whether a silence covers an alert of a rule on one of the subjects, or on a part of it."""
    return one.covers(rule, one.subject) and (subjects is None or any(
        one.covers(rule, subject) or one.subject.startswith(f"{subject}/") for subject in subjects))


def stale_of(checked: Mapping[str, Any], drill: Drill, now: float, limit_s: float) -> list[str]:
    """What the agent tells too late to judge this drill by: its tick, or all signals of the drilled engine."""
    age_s = now - float(checked["at"])
    if age_s > limit_s:
        return [f"the agent's last tick was {age_s:.0f} s ago"]
    engine = drill.target.get("engine")
    if engine is None:
        return []
    own = re.compile(rf"{re.escape(str(engine))}(/[0-9]+)?")
    told = ("OK", "PENDING", "BREACH", "IDLE")
    rows = [row for row in checked["signals"] if own.fullmatch(row["subject"]) and row["state"] in told]
    if not rows:
        return [f"the agent tells nothing of engine {engine}"]
    youngest_s = min(float(row["age_s"]) for row in rows)
    return [f"what the agent tells of {engine} is {youngest_s:.0f} s old"] if youngest_s > limit_s else []


def budget_of(checked: Mapping[str, Any], window_s: float) -> Budget:
    """The least error budget left of any subject, and for how long the least known of them was watched.

    A burn of B over a span is B x span / window of the whole budget (`window_s`: of the SLO), already counted by what
    was watched of it.
    """
    worst = Budget(None, None)
    watched: dict[str, float] = {}
    for row in checked["signals"]:
        if row["signal"] not in ("error_burn", "node_error_burn"):
            continue
        subject, evidence = str(row["subject"]), row["evidence"]
        spent = [
            float(burn) * duration_s(name.removeprefix("burn_")) / window_s
            for name, burn in evidence.items()
            if name.startswith("burn_")
        ]
        if spent and (worst.left is None or 1.0 - max(spent) < worst.left):
            worst = Budget(1.0 - max(spent), None, subject)
        if "watched_s" in evidence:
            watched[subject] = max(watched.get(subject, 0.0), float(evidence["watched_s"]))
    return replace(worst, watched_s=min(watched.values(), default=None))
