"""Each guard once says no and nothing else does; what cannot be found out is a no with its reason."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from agent.config import AlertmanagerConfig, Config, DrillGuards, EngineConfig, NotifyConfig
from drills import guards, lock
from drills.guards import Budget, DuringFacts, Fact, Facts
from drills.ledger import Ledger
from drills.model import Drill, Plan, Refused, Schedule
from tests.receiver import Receiver, Reply

NOW = 1_795_995_200.0  # Sunday 2026-11-29 23:33:20 UTC
RUN = "net-20261129T233320Z-0a1b"
SCHEDULE = Schedule("0 23 * * *", "UTC", (22 * 60, 60), (("2026-12-20", "2027-01-07"),))
DRILL = Drill("net", "packet-loss", {"port": 8000, "engine": "llama"}, SCHEDULE)
PLAN = Plan("packet-loss", RUN, ["port 8000"], [], [], {"port": 8000}, blast={"replicas": 1})
FACTS = Facts(
    now=NOW,
    run=RUN,
    limits=DrillGuards(),
    replicas=2,
    accept_unknown_budget=False,
    planning=False,
    lever=Fact(""),
    lock_holder=Fact(RUN),
    ledger=Fact(""),
    pages=Fact([]),
    alertmanager=Fact([]),
    silences=Fact([]),
    stale=Fact([]),
    healthy=Fact(2),
    budget=Fact(Budget(0.8, 7200.0, "llama")),
    reserved=Fact({22: "ssh", 9093: "the alert path"}),
    rehearsal=Fact("armed in a scratch namespace"),
)
DURING = DuringFacts(DrillGuards(), 2, 1.0, 30.0, Fact(""), 2, Budget(0.8, 7200.0, "llama"))


def noes(drill: Drill = DRILL, plan: Plan = PLAN, facts: Facts = FACTS) -> dict[str, str]:
    return {check.name: check.why for check in guards.before(drill, plan, facts) if not check.ok}


def test_all_say_yes() -> None:
    """On a quiet node, in its window, with two healthy replicas, nothing holds a drill up."""
    assert noes() == {}
    assert len(guards.before(DRILL, PLAN, FACTS)) == 15


@pytest.mark.parametrize(
    ("name", "drill", "plan", "facts", "said"),
    [
        ("enabled", {"enabled": False}, {}, {}, "drills: net: enabled is false"),
        ("not a dry run", {"dry_run": True}, {}, {}, "it stops before it touches anything"),
        ("lever file", {}, {}, {"lever": Fact("audit until Friday")}, "/etc/tocsin/NO-DRILLS is there: audit"),
        ("window", {}, {}, {"now": NOW + 7200}, "01:33 is outside the window 22:00-01:00 UTC"),
        ("window", {}, {}, {"now": NOW + 22 * 86400}, "2026-12-21 is in the blackout 2026-12-20/2027-01-06 UTC"),
        ("window", {}, {}, {"now": NOW + 38 * 86400}, "2027-01-06 is in the blackout"),
        ("lock", {}, {}, {"lock_holder": Fact("disk-1")}, "held by run disk-1"),
        ("lock", {}, {}, {"lock_holder": Fact("")}, "the lock is not held by this run"),
        ("ledger", {}, {}, {"ledger": Fact("the disk of /x is full")}, "the disk of /x is full"),
        ("pages", {}, {}, {"pages": Fact(["engine-down on a"])}, "engine-down on a fires on this node"),
        ("Alertmanager", {}, {}, {"alertmanager": Fact(["x on b"])}, "x on b fires in Alertmanager"),
        ("silences", {}, {}, {"silences": Fact(["silence 3 mutes all of this node, until"])}, "silence 3 mutes all of"),
        ("telemetry", {}, {}, {"stale": Fact(["what the agent tells of a is 40 s old"])}, "of a is 40 s old"),
        ("healthy replicas", {}, {}, {"healthy": Fact(1)}, "1 of 2 replicas are healthy, 0 after the fault; at"),
        ("healthy replicas", {}, {}, {"replicas": 3}, "2 of 3 replicas are healthy, 1 after the fault; at least 2"),
        ("healthy replicas", {}, {}, {"limits": DrillGuards(min_healthy=2)}, "at least 2 (drill_guards.min_healthy)"),
        ("blast radius", {}, {"blast": {"replicas": 2}}, {"healthy": Fact(4)}, "2 of 2 replicas; at most 1"),
        ("error budget", {}, {}, {"budget": Fact(Budget(0.49, 9e9, "a"))}, "49% of the error budget of a is left; at"),
        ("error budget", {}, {}, {"budget": Fact(Budget(0.9, 3540.0))}, "watched for 59 of at least 60 min; allow it"),
        ("error budget", {}, {}, {"budget": Fact(Budget(None, None))}, "allow it with --accept-unknown-budget"),
        ("target", {}, {"facts": {"port": 9093}}, {}, "port 9093 is the alert path"),
        ("target", {"target": {"port": 22}}, {}, {}, "port 22 is ssh"),
        ("rehearsal", {}, {}, {"rehearsal": Fact(unknown="ssh lost 3 of 200 packets")}, "ssh lost 3 of 200 packets"),
    ],
)
def test_each_guard_says_no_and_nothing_else_does(
    name: str, drill: dict[str, Any], plan: dict[str, Any], facts: dict[str, Any], said: str
) -> None:
    """One thing is wrong: the report names that one, with its number and where it is set."""
    found = noes(replace(DRILL, **drill), replace(PLAN, **plan), replace(FACTS, **facts))

    assert list(found) == [name]
    assert said in found[name]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("lever", "lever file"),
        ("lock_holder", "lock"),
        ("ledger", "ledger"),
        ("pages", "pages"),
        ("alertmanager", "Alertmanager"),
        ("silences", "silences"),
        ("stale", "telemetry"),
        ("healthy", "healthy replicas"),
        ("budget", "error budget"),
        ("reserved", "target"),
        ("rehearsal", "rehearsal"),
    ],
)
def test_not_to_know_is_a_no(field: str, name: str) -> None:
    """The Alertmanager did not answer, and the drill began on top of a page."""
    unknown: dict[str, Any] = {field: Fact(unknown="no route to host")}

    found = noes(facts=replace(FACTS, **unknown))

    assert found == {name: "no route to host"}


def test_a_guard_that_breaks_is_a_no() -> None:
    """A fault of ours in a guard must never let a drill through."""
    found = noes(plan=replace(PLAN, blast={"replicas": "many"}))

    assert sorted(found) == ["blast radius", "healthy replicas"]
    assert "this guard failed, a fault of Tocsin's: ValueError" in found["blast radius"]


def test_what_is_allowed_all_the_same() -> None:
    """No schedule, no window; the first run may go without a known budget if asked; a plan takes no lock."""
    unknown = Fact(Budget(0.9, 60.0))

    assert noes(replace(DRILL, schedule=None), facts=replace(FACTS, now=NOW + 7200)) == {}
    assert noes(facts=replace(FACTS, budget=unknown, accept_unknown_budget=True)) == {}
    assert noes(facts=replace(FACTS, lock_holder=Fact(""), planning=True)) == {}
    assert noes(plan=replace(PLAN, blast={"replicas": 0}), facts=replace(FACTS, healthy=Fact(1), replicas=1)) == {}
    spent = replace(FACTS, budget=Fact(Budget(0.1, 60.0)), accept_unknown_budget=True)
    assert list(noes(facts=spent)) == ["error budget"]


@pytest.mark.parametrize(
    ("facts", "name", "said"),
    [
        ({"lever": Fact("stop")}, "lever file", "is there: stop"),
        ({"lever": Fact(unknown="Input/output error")}, "lever file", "Input/output error"),
        ({"stale_s": 31.0}, "telemetry", "the agent last answered 31 s ago; at most 30 s"),
        ({"healthy": 0}, "healthy replicas", "0 of 2 replicas are healthy; at least 1"),
        ({"budget": Budget(0.3, 60.0, "a")}, "error budget", "30% of the error budget of a is left"),
    ],
)
def test_each_guard_ends_a_running_drill(facts: dict[str, Any], name: str, said: str) -> None:
    """The second replica failed by itself while the first was in the drill."""
    found = [check for check in guards.during(DRILL, replace(DURING, **facts)) if not check.ok]

    assert [check.name for check in found] == [name]
    assert said in found[0].why


def test_one_silent_second_ends_no_drill() -> None:
    """The agent restarts within seconds: how long it may be silent is one guard, not four."""
    assert all(check.ok for check in guards.during(DRILL, replace(DURING, healthy=None, budget=None)))


# ---- looking ----


def row(rule: str, subject: str, state: str = "OK", age_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"rule": rule, "signal": rule.replace("-", "_"), "subject": subject, "state": state, "age_s": age_s,
            "evidence": {}} | more  # fmt: skip


def burn(subject: str, **evidence: float) -> dict[str, Any]:
    return row("error-burn-slow", subject) | {"signal": "error_burn", "evidence": evidence}


def test_the_budget_is_what_the_burn_rules_watched() -> None:
    """A burn of 6 over 3 of 30 days has spent 60 % of the budget; the worst engine decides."""
    rows = [burn("a", burn_1d=3.0, burn_3d=6.0, watched_s=2e5), burn("a", burn_6h=9.0, watched_s=21_600.0)]
    rows.append(burn("b", burn_1h=14.4, burn_3d=1.0, watched_s=7200.0))

    found = guards.budget_of({"signals": rows}, 30 * 86400.0)

    assert found.left == pytest.approx(0.4)
    assert (found.watched_s, found.subject) == (7200.0, "a")
    assert guards.budget_of({"signals": [row("queue-age", "a")]}, 1.0) == Budget(None, None)


@pytest.mark.parametrize(
    ("checked", "said"),
    [
        ({"at": NOW - 31, "signals": []}, ["the agent's last tick was 31 s ago"]),
        ({"at": NOW, "signals": [row("queue-age", "llama2")]}, ["the agent tells nothing of engine llama"]),
        ({"at": NOW, "signals": [row("queue-age", "llama", "UNKNOWN")]}, ["the agent tells nothing of engine llama"]),
        ({"at": NOW, "signals": [row("a", "llama/1", age_s=99)]}, ["what the agent tells of llama is 99 s old"]),
        ({"at": NOW, "signals": [row("a", "llama", age_s=99), row("b", "llama/1", "IDLE")]}, []),
    ],
)
def test_what_the_agent_tells_may_be_too_old(checked: Mapping[str, Any], said: list[str]) -> None:
    """The engine had not been read for a minute, and the drill's alarm was judged by that."""
    assert guards.stale_of(checked, DRILL, NOW, 30.0) == said


def held(rule: str, subject: str) -> dict[str, Any]:
    """A silence as the agent's check tells it, until an hour from now."""
    return {"id": 3, "rule": rule, "subject": subject, "since": NOW, "until": NOW + 3600, "why": "new driver",
            "by": "anna", "ended_by": None, "mutes": [], "text": "…"}


@pytest.mark.parametrize(("rule", "subject", "mutes"), [
    ("*", "*", True), ("engine-stopped", "*", True), ("engine-*", "llama", True), ("engine-stopped", "llama/1", True),
    ("engine-stopped", "qwen", False), ("engine-stopped", "llama-2", False), ("gpu-temperature", "*", False),
    ("*", "GPU-8f6a", False),
])
def test_a_silence_under_which_nobody_would_hear_of_the_drill(rule: str, subject: str, mutes: bool) -> None:
    """The drill of the month was held in a maintenance, and its report said that the page had not been delivered."""
    found = guards.muting({"silences": [held(rule, subject)]}, DRILL, ["engine-stopped"], "gpu-17")

    assert bool(found) is mutes


@pytest.mark.parametrize(("rule", "subject", "severity", "state", "holds_up"), [
    ("engine-down", "qwen", "page", "firing", True), ("rank-spread", "llama/0", "ticket", "firing", True),
    ("rank-spread", "qwen", "ticket", "firing", False), ("rank-spread", "llama", "ticket", "pending", False),
    ("kv-cache-utilization", "llama", "ticket", "firing", False), ("rank-spread", "llama-2", "ticket", "firing", False),
])  # fmt: skip
def test_what_a_drill_does_not_begin_under(rule: str, subject: str, severity: str, state: str, holds_up: bool) -> None:
    """A ticket that the drill announces fired already: "it never fired", said the report of the drill."""
    row = {"rule": rule, "subject": subject, "severity": severity, "state": state}

    found = guards.firing_of([row], DRILL, ["rank-spread"], "gpu-17")

    assert found == ([f"{rule} on {subject}"] if holds_up else [])


def test_a_maintenance_holds_up_a_drill_that_announces_nothing_too() -> None:
    """Somebody works on the node; a silence of one rule is no reason then."""
    assert guards.muting({"silences": [held("engine-*", "*")]}, DRILL, [], None) == []
    assert guards.muting({"silences": [held("*", "*")]}, DRILL, [], None) == [
        "silence 3 mutes all of this node, until 2026-11-30 00:33 UTC by anna: new driver"]


class Agent(socketserver.ThreadingUnixStreamServer):
    """A unix socket that answers JSON by path."""

    daemon_threads = True
    answers: Mapping[str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: Agent

    def do_GET(self) -> None:
        body = json.dumps(self.server.answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        pass


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    server = Agent(str(tmp_path / "agent.sock"), _Handler)
    rows = [row("engine-down", "llama", "BREACH"), burn("llama", burn_3d=1.0, watched_s=7200.0)]
    server.answers = {
        "/check": {"at": NOW - 2, "signals": rows, "silences": [held("*", "*")]},
        "/alerts?resolved=0": [
            {"rule": "engine-down", "subject": "llama", "state": "firing", "severity": "page"},
            {"rule": "blind", "subject": "llama", "state": "firing", "severity": "ticket"},
            {"rule": "queue-age", "subject": "llama", "state": "pending", "severity": "page"},
        ],
    }
    with server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_an_agent_of_an_older_version_tells_no_silences(agent: Agent, tmp_path: Path) -> None:
    """drilld was upgraded, the agent not yet: the drill waits, and says what to look at."""
    del agent.answers["/check"]["silences"]
    config = Config(socket=tmp_path / "agent.sock", drill_guards=DrillGuards(lever_file=tmp_path / "LEVER"))
    facts = guards.collect(config, DRILL, PLAN, root=tmp_path, run=RUN, now=NOW, accept_unknown_budget=True,
                           planning=True)
    assert facts.silences.unknown == "the answer has no 'silences': do agent and drilld have the same version?"


def test_facts_are_looked_up_in_the_world(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent, Alertmanager, engines, lever file, lock and ledger, each from where it is."""
    monkeypatch.setitem(guards.REHEARSALS, "packet-loss", lambda plan: None)
    alert = {"labels": {"alertname": "PodDown", "severity": "page", "subject": "pod-3"}, "status": {"state": "active"}}
    root = tmp_path / "drills"
    Ledger.create(root / "runs" / RUN, {}).close()
    held = lock.take(root, RUN)
    with (
        Receiver(lambda arrival: Reply(body=json.dumps([alert]).encode())) as alertmanager,
        Receiver() as engine,
        Receiver(lambda arrival: Reply(503)) as ill,
    ):
        config = Config(
            engines=(EngineConfig(url=engine.url), EngineConfig(url=ill.url), EngineConfig(url="http://127.0.0.1:1")),
            notify=(NotifyConfig(alertmanager=AlertmanagerConfig(urls=(alertmanager.url,))),),
            socket=tmp_path / "agent.sock",
            drill_guards=DrillGuards(lever_file=tmp_path / "LEVER"),
        )
        facts = guards.collect(config, DRILL, PLAN, root=root, run=RUN, now=NOW, accept_unknown_budget=True)
        asked = [arrival.path for arrival in alertmanager.arrivals + engine.arrivals]
    held.release()

    assert facts == Facts(
        now=NOW,
        run=RUN,
        limits=config.drill_guards,
        replicas=3,
        accept_unknown_budget=True,
        planning=False,
        lever=Fact(""),
        lock_holder=Fact(RUN),
        ledger=Fact(""),
        pages=Fact(["engine-down on llama"]),
        alertmanager=Fact(["PodDown on pod-3"]),
        silences=Fact(["silence 3 mutes all of this node, until 2026-11-30 00:33 UTC by anna: new driver"]),
        stale=Fact([]),
        healthy=Fact(1),
        budget=Fact(Budget(0.9, 7200.0, "llama")),
        reserved=facts.reserved,
        rehearsal=Fact("armed in a scratch namespace: the target port is lossy, everything else is not"),
    )
    assert facts.reserved.value is not None
    assert facts.reserved.value[int(alertmanager.url.rpartition(":")[2])] == "the alert path"
    assert asked == ["/api/v2/alerts?filter=severity%3D%22page%22", "/health"]
    now = guards.collect_during(config, DRILL, 1.5, NOW)
    assert (now.stale_limit_s, now.healthy, now.budget) == (30.0, 2, Budget(0.9, 7200.0, "llama"))
    # Told 2 s ago: an agent that answers and no longer ticks is as stale as its last tick.
    assert [guards.collect_during(config, DRILL, age_s, NOW).stale_s for age_s in (1.5, 9.0)] == [2.0, 9.0]


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent, no Alertmanager, no engine, a rehearsal that finds something: each is a no with its own text."""

    def fails(plan: Plan) -> None:
        raise Refused("port 22 lost packets")

    monkeypatch.setitem(guards.REHEARSALS, "packet-loss", fails)
    (tmp_path / "LEVER").symlink_to(tmp_path / "nowhere")
    config = Config(
        notify=(NotifyConfig(alertmanager=AlertmanagerConfig(urls=("http://127.0.0.1:1",))),),
        socket=tmp_path / "agent.sock",
        drill_guards=DrillGuards(lever_file=tmp_path / "LEVER"),
    )

    facts = guards.collect(config, DRILL, PLAN, root=tmp_path, run=RUN, now=NOW, accept_unknown_budget=False)
    found = noes(facts=facts)

    assert sorted(found) == [
        "Alertmanager", "error budget", "healthy replicas", "lever file", "lock", "pages", "rehearsal", "silences",
        "telemetry",
    ]  # fmt: skip
    assert "no agent answers on" in found["telemetry"]
    assert "name the engines of this node under engines" in found["healthy replicas"]
    assert "not readable" in found["lever file"]
    assert found["rehearsal"] == "port 22 lost packets"
    assert guards.collect_during(config, DRILL, 3.0, NOW).healthy is None


@pytest.mark.parametrize(
    ("story", "engine", "rows", "want"),
    [
        ("only the drilled one", "llama", [], 1),
        ("it is down, as it should be", "llama", [("engine-down", "llama", "BREACH")], 1),
        ("another one hangs", "llama", [("engine-slow", "qwen", "BREACH")], 2),
        ("another one is stuck, by its index", "llama", [("engine-stuck", "qwen/1", "BREACH")], 2),
        ("another one was slow", "llama", [("engine-slow", "qwen", "OK")], 1),
        ("a target without a name", None, [("engine-down", "qwen", "BREACH")], 2),
    ],
)
def test_who_serves_nobody_while_it_runs(story: str, engine: str | None, rows: list[tuple[str, str, str]],
                                         want: int) -> None:
    """The other replica hung: a ticket, and the drill killed the last one that served."""
    told = {"signals": [{"rule": rule, "subject": subject, "state": state} for rule, subject, state in rows]}
    assert guards.away(told, Drill("d", "process-kill", target={"engine": engine})) == want, story
    assert guards.away({"signals": []}, Drill("d", "disk-full", target={"path": "/data"})) == 0


def test_the_lever_does_not_wait_for_the_agent(agent: Agent, tmp_path: Path) -> None:
    """The agent hung, and for its 10 s nobody looked whether somebody had pulled the lever."""
    (tmp_path / "LEVER").write_text("stop\n")
    agent.answers = {}  # to be asked would be an error
    config = Config(socket=tmp_path / "agent.sock", drill_guards=DrillGuards(lever_file=tmp_path / "LEVER"))
    asked: list[str] = []
    agent.finish_request = lambda *_: asked.append("asked")  # type: ignore[method-assign]

    found = guards.collect_during(config, DRILL, 1.0, NOW)

    assert (found.lever, asked) == (Fact("stop"), [])


def test_a_plan_rehearses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tocsin drill plan` changes nothing, not for a second."""

    def never(plan: Plan) -> None:
        raise AssertionError

    monkeypatch.setitem(guards.REHEARSALS, "packet-loss", never)

    facts = guards.collect(
        Config(), DRILL, PLAN, root=tmp_path, run=RUN, now=NOW, accept_unknown_budget=False, planning=True
    )

    assert facts.rehearsal == Fact("")
    assert not (tmp_path / "runs").exists()


def test_the_lever_says_why(tmp_path: Path) -> None:
    """Whoever pulled it wrote why; an empty file is pulled too."""
    lever = tmp_path / "LEVER"
    assert guards.lever_of(lever) == ""

    lever.touch()
    assert guards.lever_of(lever) == "(empty)"

    lever.write_text("audit\x1b[31m until Friday\nask Kim\n")
    assert guards.lever_of(lever) == "audit�[31m until Friday"


def test_a_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    """A read-only disk is told before the fault, not by it."""
    assert guards.unwritable(tmp_path / "runs" / RUN) == ""
    assert guards.unwritable(Path("/proc/1")) != ""
