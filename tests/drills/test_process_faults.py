"""process-kill and engine-hang on real processes: proven, ended whatever dies, and never on a stranger."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import (
    AlertmanagerConfig,
    Config,
    DrillConfig,
    DrillTarget,
    EngineConfig,
    NotifyConfig,
    WebhookConfig,
)
from drills import proc, targets
from drills.faults import packet_loss
from drills.faults.engine_hang import FAULT as HANG
from drills.faults.process_kill import FAULT as KILL
from drills.holder import Holder, HolderError
from drills.model import Drill, Fault, Left, Plan, Refused
from tests.drills.stand_ins import ROOT, Engine, arm, engine, new_run, wait_for
from tests.needs import need

RUN = "hang-20261129T210000Z-ab12"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Engine]:
    """An engine of a page and a core."""
    with engine(tmp_path / "engine") as started:
        yield started


@pytest.fixture
def may_trace() -> None:
    """Yama allows an ordinary user to trace its own children only."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        need("root")


def planned(fault: Fault, stub: Engine, part: str | None = None) -> Plan:
    """The plan for a part of the engine that listens on the stub's port."""
    target = {"port": stub.port} if part is None else {"port": stub.port, "part": part}
    return fault.plan(Drill("d", fault.name, target=target), RUN)


def held(tmp_path: Path, plan: Plan, deadline_s: float = 20.0) -> Holder:
    """A holder with the fault in."""
    folder, ledger = new_run(tmp_path / "runs", plan)
    started = arm(folder, ledger, plan, deadline_s)
    ledger.close()
    try:
        started.inject(5.0)
    except HolderError:
        assert started.revert(5.0) == []
        raise
    return started


# engine-hang


@pytest.mark.usefixtures("may_trace")
def test_a_hung_core(tmp_path: Path, stub: Engine) -> None:
    """The port accepts, the page answers its health check, and no token comes: every thread of the core stands."""
    plan = planned(HANG, stub)
    assert [victim["pid"] for victim in plan.facts["victims"]] == [stub.core.pid]
    assert plan.expects == ("engine-stuck",)
    started = held(tmp_path, plan)
    assert proc.threads(stub.core.pid) == dict.fromkeys(proc.threads(stub.core.pid), "t")
    before = stub.count()
    socket.create_connection(("127.0.0.1", stub.port), timeout=1.0).close()
    wait_for(lambda: len(started.samples) >= 2)
    assert stub.count() == before
    assert HANG.left(plan) == [
        Left(f"process {stub.core.pid} is stopped by holder {started.process_id.pid}",
             f"kill -KILL {started.process_id.pid}")
    ]  # fmt: skip
    assert started.revert(5.0) == []
    assert stub.runs_on()
    told = f"4 of 4 threads in state t (ptrace stop) in each of {len(started.samples)} samples"
    assert HANG.proven(plan, started.samples) == (True, told)


@pytest.mark.usefixtures("may_trace")
@pytest.mark.parametrize(
    ("part", "stopped"), [("core", {"core"}), ("api", {"page"}), ("main", {"page"}), ("all", {"page", "core"})]
)
def test_parts(tmp_path: Path, stub: Engine, part: str, stopped: set[str]) -> None:
    """Whatever hangs, the port accepts: engine-stuck, and never engine-down, which no drill could have proven."""
    plan = planned(HANG, stub, part)
    assert plan.expects == ("engine-stuck",)
    started = held(tmp_path, plan)
    states = {"page": proc.threads(stub.page.pid), "core": proc.threads(stub.core.pid)}
    assert {name for name, seen in states.items() if set(seen.values()) == {"t"}} == stopped
    assert started.revert(5.0) == []
    assert stub.runs_on()


@pytest.mark.usefixtures("may_trace")
def test_threads_that_begin_meanwhile() -> None:
    """An engine begins threads all the time: those that one began while it was being stopped were left running."""
    script = (
        "import threading, time, sys\n"
        "def work(): time.sleep(0.003)\n"
        "def spawn():\n"
        "    while True: threading.Thread(target=work, daemon=True).start()\n"
        "for _ in range(4): threading.Thread(target=spawn, daemon=True).start()\n"
        "print(1, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        plan = HANG.plan(Drill("d", "engine-hang", target={"pid": process.pid}), RUN)
        for _ in range(5):
            fault = HANG.inject(plan, ())
            try:
                samples = [fault.sample() for _ in range(20)]
                proven, told = HANG.proven(plan, samples)
            finally:
                fault.undo()
            assert proven, told
            wait_for(lambda: "t" not in proc.threads(process.pid).values())
            time.sleep(0.02)
        assert proc.is_same(proc.identify(process.pid))
        process.kill()


@pytest.mark.usefixtures("may_trace")
def test_the_real_parent_sees_a_death(tmp_path: Path) -> None:
    """The kubelet kills the hung engine; its parent waited for it for ever, since the tracer had the news."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        plan = HANG.plan(Drill("d", "engine-hang", target={"pid": process.pid}), RUN)
        started = held(tmp_path, plan)
        wait_for(lambda: len(started.samples) > 0)
        process.kill()
        assert process.wait(0.5) == -signal.SIGKILL
        count = len(started.samples)
        wait_for(lambda: len(started.samples) > count)
        proven, told = HANG.proven(plan, started.samples)
        assert (proven, f"process {process.pid} ended while it was stopped" in told) == (True, True)  # a finding
        ended = [sample for sample in started.samples if not sample["threads"].get(str(process.pid))]
        assert not HANG.proven(plan, ended)[0]  # of one that was never seen stopped
        assert started.revert(5.0) == []


@pytest.mark.usefixtures("may_trace")
def test_a_signal_that_came_meanwhile_is_not_lost(tmp_path: Path) -> None:
    """Stopped in the instant in which SIGUSR1 came, the engine never rotated its log again."""
    script = (
        "import signal, sys\n"
        "got = 0\n"
        "def count(*_):\n"
        "    global got; got += 1; print(got, flush=True)\n"
        "signal.signal(signal.SIGUSR1, count)\n"
        "print(0, flush=True)\n"
        "while True: sys.stdin.readline()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        plan = HANG.plan(Drill("d", "engine-hang", target={"pid": process.pid}), RUN)
        for n in range(1, 21):
            os.kill(process.pid, signal.SIGUSR1)  # so that it may be on its way when the stop comes
            HANG.inject(plan, ()).undo()
            assert process.stdout.readline() == f"{n}\n".encode()
        process.kill()


@pytest.mark.usefixtures("may_trace")
def test_a_debugger_is_attached(tmp_path: Path, stub: Engine) -> None:
    """py-spy looks at the engine: a process has one tracer, and the drill must say who is in the way."""
    started = held(tmp_path, planned(HANG, stub))
    with pytest.raises(Refused, match=f"is traced by {started.process_id.pid} .*drills.holder"):
        planned(HANG, stub)
    assert started.revert(5.0) == []


def test_a_hang_that_did_nothing() -> None:
    """One thread of the core slept in the driver and never stopped; no sample at all is no proof either."""
    plan = Plan("engine-hang", RUN, [], [], [], {"victims": [{"pid": 7, "start_ticks": 1, "boot_id": "b"}]})
    assert HANG.proven(plan, []) == (False, "no sample was taken")
    samples = [{"threads": {"7": "tttt"}}, {"threads": {"7": "Dttt"}}, {"threads": {"7": "tttt"}}]
    assert HANG.proven(plan, samples) == (False, "1 of 4 threads were not stopped in one of 3 samples")


# process-kill


def test_a_killed_page(tmp_path: Path, stub: Engine) -> None:
    """vLLM's core outlives its API server: the kill is proven, and what lives on is named."""
    plan = planned(KILL, stub)
    assert (plan.restarts, plan.expects, plan.undo) == (True, ("engine-down",), [])
    assert [command.text for command in plan.commands] == [f"kill -KILL {stub.page.pid}"]
    started = held(tmp_path, plan)
    assert stub.process.wait(1.0) == -signal.SIGKILL
    wait_for(lambda: len(started.samples) >= 1)
    assert KILL.proven(plan, started.samples) == (
        True,
        f"1 of 1 killed processes have ended (pidfd); of the same engine still alive: {stub.core.pid}",
    )
    assert started.revert(5.0) == []
    assert proc.is_same(stub.core)


def test_all_of_it(tmp_path: Path, stub: Engine) -> None:
    """`part: all`, as a node's OOM killer or `kill -9 -PGID` does it."""
    plan = planned(KILL, stub, "all")
    started = held(tmp_path, plan)
    wait_for(lambda: len(started.samples) >= 1)
    assert KILL.proven(plan, started.samples) == (True, "2 of 2 killed processes have ended (pidfd)")
    assert not proc.is_same(stub.core)
    assert started.revert(5.0) == []


def test_a_stranger_with_the_number_lives(tmp_path: Path, stub: Engine) -> None:
    """The engine restarted between plan and injection, and its number went to somebody else."""
    plan = planned(KILL, stub, "all")
    page, core = plan.facts["victims"]
    facts: dict[str, Any] = {**plan.facts, "victims": [page, {**core, "start_ticks": core["start_ticks"] - 1}]}
    with pytest.raises(HolderError, match=r"process-kill: process \d+ .* is gone.*plan again"):
        held(tmp_path, replace(plan, facts=facts))
    assert stub.process.poll() is None  # none or all: the page was found, the core was not
    assert proc.is_same(stub.core)


def test_a_kill_that_is_not_allowed(stub: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was ours to kill and the core was another user's: half a kill is no drill."""
    plan = planned(KILL, stub, "all")
    sent: list[int] = []

    def send(_fd: int, sig: int) -> None:
        sent.append(sig)
        if len(sent) == 2:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    with pytest.raises(Refused, match="Operation not permitted; it needs root or CAP_KILL"):
        KILL.inject(plan, ())
    assert sent == [0, 0]


def test_a_kill_that_did_nothing() -> None:
    """No sample says that it ended: then it is not known to have ended."""
    plan = Plan("process-kill", RUN, [], [], [], {"victims": [{"pid": 7}, {"pid": 8}], "others": []})
    assert KILL.proven(plan, []) == (False, "0 of 2 killed processes have ended (pidfd)")
    samples = [{"ended": {"7": True, "8": False}, "outlive": []}]
    assert KILL.proven(plan, samples) == (False, "1 of 2 killed processes have ended (pidfd)")


# Targets


def test_no_drill_touches_these(tmp_path: Path, stub: Engine) -> None:
    """A copied port number was that of ssh, and nobody could log in to stop the drill."""
    for port, why in ((22, "ssh"), (53, "DNS"), (6443, "the Kubernetes API")):
        with pytest.raises(Refused, match=f"port {port} is {why}"):
            KILL.plan(Drill("d", "process-kill", target={"port": port}), RUN)
    reserved = {stub.port: "the alert path"}
    with pytest.raises(Refused, match=f"port {stub.port} is the alert path"):
        KILL.plan(Drill("d", "process-kill", target={"port": stub.port, "reserved": reserved}), RUN)
    for pid in (stub.page.pid, os.getpid()):  # the alert path by another name; and one above it
        with pytest.raises(Refused, match=rf"process {pid} \(.*\) listens on port {stub.port}, the alert path"):
            KILL.plan(Drill("d", "process-kill", target={"pid": pid, "reserved": reserved}), RUN)
    for pid, why in ((1, "the first process"), (os.getpid(), "Tocsin itself"), (os.getppid(), "Tocsin itself")):
        with pytest.raises(Refused, match=rf"process {pid} \(.*\) is {why}"):
            HANG.plan(Drill("d", "engine-hang", target={"pid": pid}), RUN)


def test_ports_of_the_alert_path() -> None:
    """Packets to the Alertmanager were lost in a drill, and the alarm that it should prove never came."""
    config = Config(
        listen="[::1]:9959",
        notify=(
            NotifyConfig(alertmanager=AlertmanagerConfig(urls=("http://127.0.0.1:9093", "http://[::1]:9094/am"))),
            NotifyConfig(webhook=WebhookConfig(url="http://localhost:9095/hook")),
            NotifyConfig(webhook=WebhookConfig(url_env="HOOK")),
        ),
    )
    found = targets.reserved_ports(config)
    assert {port: found[port] for port in (9959, 9093, 9094, 9095)} == {
        9959: "the agent", 9093: "the alert path", 9094: "the alert path", 9095: "the alert path",
    }  # fmt: skip
    assert (found[22], found[53], found[6443]) == ("ssh", "DNS", "the Kubernetes API")
    assert 8000 not in found


@pytest.mark.parametrize(
    ("story", "url", "why"),
    [
        ("another machine's", "http://pager.internal:8000/hook", None),
        ("another machine's, by address", "http://192.0.2.7:8000", None),
        ("this one's, by its name", f"http://{socket.gethostname().upper()}:8000", "the alert path"),
        ("this one's, by the node's name", "http://gpu-17:8000", "the alert path"),
        ("this one's, by an address", "http://127.0.0.2:8000", "the alert path"),
        ("this one's, as IPv6 tells IPv4", "http://[::ffff:127.0.0.1]:8000", "the alert path"),
        ("drilled over the network", "http://llm-9.internal:8000", "the alert path"),
        ("perhaps drilled over the network", "http://192.0.2.9:8000",
         "the alert path, if 192.0.2.9 is llm-9.internal"),
    ],
)  # fmt: skip
def test_the_port_of_an_alert_path_elsewhere(story: str, url: str, why: str | None) -> None:
    """The pager of the fleet listened on 8000, so no engine on 8000 of any node could be drilled."""
    target = DrillTarget(upstream=("llm-9.internal", 8000) if "llm-9" in f"{why}{url}" else ("a.internal", 80))
    config = Config(
        node="gpu-17.example.org",
        notify=(NotifyConfig(webhook=WebhookConfig(url=url)),),
        engines=(EngineConfig(url="http://127.0.0.1:8000", name="llama"),),
        drills=(DrillConfig(name="slow", fault="upstream-timeout", target=target),),
    )
    assert targets.reserved_ports(config).get(8000) == why, story


@pytest.mark.parametrize(
    ("title", "why"),
    [
        (["sshd", "60"], "ssh"),
        (["/usr/bin/alertmanager", "60"], "the alert path"),
        (["python", "-m", "agent.daemon"], "Tocsin itself"),
        (["python", "-m", "drills.daemon"], "Tocsin itself"),
    ],
)
def test_by_name(title: list[str], why: str) -> None:
    """ssh was on port 2222, and the alert path behind a name."""
    command = [title[0], "-c", "read x", *title[1:]]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE) as process:
        with pytest.raises(Refused, match=rf"process {process.pid} \(.*\) is {why}"):
            HANG.plan(Drill("d", "engine-hang", target={"pid": process.pid}), RUN)
        process.communicate()


def test_vllm_by_its_titles() -> None:
    """Under one page: a tracker of multiprocessing, a second API server, a core, and its ranks in no order."""
    names = ("PP1_TP0", "PP0_TP1", "PP0_TP0", "PP1_TP1")
    ranks = " ".join(f"(exec -a VLLM::Worker_{name} sleep 60) &" for name in names)
    script = (
        "(exec -a 'python -c from multiprocessing.resource_tracker import main' sleep 60) & sleep 0.02;"
        " (exec -a VLLM::APIServer_1 sleep 60) &"
        f" (exec -a VLLM::EngineCore_DP0 bash -c '{ranks} wait') & wait"
    )
    with subprocess.Popen(["vllm", "-c", script], executable="/bin/bash", start_new_session=True) as process:
        try:
            titles: dict[str, list[str]] = {}

            def all_up() -> bool:
                parts = targets.processes_of({"pid": process.pid})
                titles.update({part: [proc.command_line(one.pid)[0] for one in found] for part, found in parts.items()})
                return len(parts["workers"]) == 4 and len(parts["api"]) == 2 and len(parts["all"]) == 7

            wait_for(all_up)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert titles["api"] == ["vllm", "VLLM::APIServer_1"]
    assert titles["core"] == ["VLLM::EngineCore_DP0"]
    assert [titles[f"rank:{n}"][0][len("VLLM::Worker_") :] for n in range(4)] == [
        "PP0_TP0", "PP0_TP1", "PP1_TP0", "PP1_TP1",
    ]  # fmt: skip
    assert not any("tracker" in title for title in titles["all"])


def test_what_there_is_not(stub: Engine) -> None:
    """The error names what was asked, what there is, and the next step."""
    with pytest.raises(Refused, match=r"target.part 'rank:7': .* it has main, api, core, all, rank:0"):
        planned(KILL, stub, "rank:7")
    with pytest.raises(Refused, match=r"target.pid 4194304: no such process"):
        KILL.plan(Drill("d", "process-kill", target={"pid": 4194304}), RUN)
    with pytest.raises(Refused, match="target names no process"):
        KILL.plan(Drill("d", "process-kill"), RUN)
    with pytest.raises(Refused, match=r"target.netns '/run/netns/nowhere': No such file"):
        KILL.plan(Drill("d", "process-kill", target={"port": stub.port, "netns": "/run/netns/nowhere"}), RUN)


@pytest.mark.parametrize("fault", [KILL, HANG, packet_loss.FAULT])
def test_an_engine_of_another_machine(fault: Fault, stub: Engine) -> None:
    """litmus#2461's like: engine a was 10.255.0.7:8000, and what was killed was engine b, on port 8000 of this node."""
    away = {"engine": "a", "port": stub.port, "address": "192.0.2.7", "url": f"http://192.0.2.7:{stub.port}"}
    with pytest.raises(Refused, match=rf"192\.0\.2\.7 is not this machine: port {stub.port} here is another service's"):
        fault.plan(Drill("d", fault.name, target=away), RUN)
    with pytest.raises(Refused, match=r"address 'nowhere\.invalid' of the target: "):
        fault.plan(Drill("d", fault.name, target={**away, "address": "nowhere.invalid"}), RUN)


LISTENS = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(1, flush=True); input()"


def test_two_engines_on_one_port_of_two_addresses(free_port: Any) -> None:
    """Both have port 8000, each an address of its own: the older one was killed, whichever was named."""
    port, killed = free_port(), dict[str, int]()
    with contextlib.ExitStack() as stack:
        started = {}
        for address in ("127.0.0.2", "127.0.0.3"):
            started[address] = one = stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", LISTENS, address, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert one.stdout is not None
            one.stdout.readline()
        for address in started:
            main = targets.main_of({"port": port, "address": address})
            killed[address] = main.pid
        assert len(proc.listeners(port)) == len(proc.listeners(port, None, ["127.0.0.4"])) == 2
        for one in started.values():
            one.kill()

    assert killed == {address: one.pid for address, one in started.items()}


def test_nobody_listens(free_port: Any) -> None:
    """The engine is down already, or the user may not look: both are said."""
    with pytest.raises(Refused, match="no process that we can see listens there; is the engine up"):
        KILL.plan(Drill("d", "process-kill", target={"port": free_port()}), RUN)


# Torture


def tortured(tmp_path: Path, stub: Engine, chance: random.Random, victims: str, number: int) -> str:
    """One run killed at a random instant: of the runner, the holder or both. What is left after 1 s, "" for nothing."""
    run = f"torture-20261129T210000Z-{number:04x}"
    target = json.dumps({"pid": stub.page.pid, "part": "core"})
    command = [sys.executable, "-m", "tests.drills.stand_ins", "run", str(tmp_path), "engine-hang", run, target, "{}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as runner:
        wait_for(lambda: (tmp_path / run).exists() or runner.poll() is not None)
        time.sleep(chance.uniform(0.0, 0.45))
        holders = [one.pid for one in proc.descendants(runner.pid)]
        if victims in {"runner", "both"}:
            runner.kill()
        if victims in {"holder", "both"}:
            for pid in holders:
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    os.kill(pid, signal.SIGKILL)
        runner.wait(30)

    def residue() -> str:
        stopped = [letter for letter in proc.threads(stub.core.pid).values() if letter in "tT"]
        alive = [pid for pid in proc.pids() if run in " ".join(proc.command_line(pid))]
        return f"{len(stopped)} threads stopped, processes {alive}" if stopped or alive else ""

    deadline = time.monotonic() + 3.0  # 1 s by tests/torture; other tests run beside this one
    while residue() and time.monotonic() < deadline:
        time.sleep(0.005)
    if not residue() and not stub.runs_on():
        return "the core does not count"
    return residue()


def play_torture(tmp_path: Path, stub: Engine, runs: int) -> list[str]:
    """Several such runs with one seed; what they left."""
    chance = random.Random(2026)
    victims = ("runner", "holder", "both")
    return [left for n in range(runs) if (left := tortured(tmp_path, stub, chance, victims[n % 3], n))]


@pytest.mark.usefixtures("may_trace")
def test_killed_at_random_instants(tmp_path: Path, stub: Engine) -> None:
    """Whatever died, and whenever: nothing of the fault is left."""
    assert play_torture(tmp_path, stub, 3) == []


@pytest.mark.heavy
@pytest.mark.usefixtures("may_trace")
def test_killed_at_many_random_instants(tmp_path: Path, stub: Engine) -> None:
    """The same, 30 times."""
    assert play_torture(tmp_path, stub, 30) == []
