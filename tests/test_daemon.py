"""`tocsin run` as a process: it stops in time, reloads without loss, refuses in a sentence, tells systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from agent import client
from agent.config import Config, EngineConfig, load_all
from agent.daemon import DATABASE, build, serve, setup_of, sources_of, try_places
from agent.model import AlertMessage, Book
from agent.notifiers import owed_to
from agent.signals import CATALOGUE
from agent.store import Store
from agent.web.server import CannotServe
from tests.agent_process import ROOT, AgentProcess
from tests.page_server import PageServer
from tests.receiver import Receiver, Reply, wait_until
from tests.scenes import built_in

QUIET: Mapping[str, Any] = {"node": "gpu-17", "poll": "1s", "nvml": "off", "discover": False}
STOP_WITHIN_S = 5.0
PAGE = """vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:kv_cache_usage_perc{model_name="m"} 0.93
vllm:generation_tokens_total{model_name="m"} %d
"""


class Ready:
    """A service manager's datagram socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.settimeout(10)
        self.lines: list[str] = []
        self._coming: list[str] = []

    def wait_for(self, start: str, timeout_s: float = 60.0) -> str:
        """The next line that begins so; all that came are in `lines`."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._coming:
                self.lines.append(self._coming.pop(0))
                if self.lines[-1].startswith(start):
                    return self.lines[-1]
            assert time.monotonic() < deadline, f"no {start} came: {self.lines[-9:]}"
            self._coming = self.sock.recv(4096).decode().splitlines()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Ready]:
    """A service manager."""
    ready = Ready(tmp_path / "notify")
    yield ready
    ready.sock.close()


def full() -> Callable[[], str]:
    """An engine whose KV cache is over its limit while tokens flow."""
    count = [0]

    def page() -> str:
        count[0] += 100
        return PAGE % count[0]

    return page


def rewrite(agent: AgentProcess, **changed: Any) -> None:
    """Edit its configuration: another value for these keys."""
    agent.path.write_text(json.dumps(json.loads(agent.path.read_text()) | changed))


def events(agent: AgentProcess, name: str) -> list[dict[str, Any]]:
    """What it logged under this name."""
    rows = [json.loads(line) for line in agent.log.read_text().splitlines() if line.startswith("{")]
    return [row for row in rows if row["event"] == name]


def stop(agent: AgentProcess, signum: int = signal.SIGTERM) -> float:
    """Seconds that it took to end well."""
    began = time.monotonic()
    assert agent.kill(signum) == 0, agent.log.read_text()[-2000:]
    return time.monotonic() - began


def refusal(folder: Path, **changed: Any) -> str:
    """What the daemon says when it refuses to start; its exit status must be 2, without a traceback."""
    config = {**QUIET, "state_dir": str(folder / "state"), "socket": str(folder / "sock"), "listen": "127.0.0.1:0"}
    path = folder / "refused.yaml"
    path.write_text(json.dumps(config | changed))
    done = subprocess.run([sys.executable, "-m", "agent.daemon", "--config", str(path)], cwd=ROOT, text=True,
                          capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_sigterm_ends_it_in_time_whatever_hangs(tmp_path: Path, manager: Ready) -> None:
    """An engine that never answers and an Alertmanager that never does either: still out within 5 s, with status 0."""
    with PageServer() as engine, Receiver(lambda _: Reply(hang=True)) as alertmanager:
        engine.fault("hang")
        engine.set_health(200, delay_s=60)
        config = {**QUIET, "engines": [{"url": engine.url, "startup_within": "1s"}],
                  "notify": [{"alertmanager": {"urls": [alertmanager.url, "http://127.0.0.1:9"]}},
                             {"heartbeat": {"url": alertmanager.url, "every": "1s"}}]}
        with AgentProcess(tmp_path / "a", config, {"NOTIFY_SOCKET": str(manager.path)}) as agent:
            manager.wait_for("READY=1")
            alertmanager.wait_for(1)  # its sender hangs there now
            wait_until(lambda: engine.scrapes > 0, 30, "a read that hangs")

            took_s = stop(agent)

        manager.wait_for("STOPPING=1")
        assert took_s < STOP_WITHIN_S
        assert "Traceback" not in agent.log.read_text()
        assert not agent.socket.exists()


@pytest.mark.heavy
def test_ctrl_c_is_a_stop(tmp_path: Path) -> None:
    """In a terminal: no traceback, status 0."""
    with AgentProcess(tmp_path, QUIET) as agent:
        assert stop(agent, signal.SIGINT) < STOP_WITHIN_S
        assert "Traceback" not in agent.log.read_text()


@pytest.mark.heavy
def test_sigterm_ends_it_in_time_even_where_the_disk_hangs(tmp_path: Path) -> None:
    """Somebody holds the database: every write waits, and the stop does not wait for it."""
    with PageServer(full()) as engine, AgentProcess(tmp_path, {**QUIET, "engines": [{"url": engine.url}]}) as agent:
        db = sqlite3.connect(tmp_path / "state" / DATABASE, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        try:
            read = engine.scrapes
            # One that was about to be saved as the database was taken gives up after 5 s; the next read comes after it.
            wait_until(lambda: engine.scrapes > read, 30, "a read")
            time.sleep(0.2)  # its tick waits to be saved now; one that does not yet would end sooner still
            took_s = stop(agent)
        finally:
            db.close()

    assert took_s < STOP_WITHIN_S
    assert events(agent, "stop_forced")


# --- the service manager ----------------------------------------------------------------------------------------------


def test_systemd_is_told_ready_alive_and_stopping(tmp_path: Path, manager: Ready) -> None:
    """READY once it serves, WATCHDOG at each tick, STOPPING at the end: Type=notify with WatchdogSec rests on it."""
    with AgentProcess(tmp_path / "a", QUIET, {"NOTIFY_SOCKET": str(manager.path)}) as agent:
        manager.wait_for("READY=1")
        status = manager.wait_for("STATUS=")
        for _ in range(2):
            manager.wait_for("WATCHDOG=1")
        agent.kill(signal.SIGTERM)
        manager.wait_for("STOPPING=1")

    assert re.fullmatch(r"STATUS=gpu-17: 0 engines, \d+ rules, 0 channels", status)
    assert manager.lines[0] == "READY=1"


# --- reloading --------------------------------------------------------------------------------------------------------


def test_sighup_takes_a_good_configuration_and_loses_nothing(tmp_path: Path, manager: Ready) -> None:
    """The same process, the new rules, the alert that fires on with its labels and its start."""
    with PageServer(full()) as engine:
        config = {**QUIET, "engines": [{"name": "llama", "url": engine.url}],
                  "rules": {"override": {"kv-cache-utilization": {"for": "1s"}}}}
        with AgentProcess(tmp_path / "a", config, {"NOTIFY_SOCKET": str(manager.path)}) as agent:
            manager.wait_for("READY=1")

            def kv() -> list[dict[str, Any]]:
                found = agent.ask("/alerts")
                return [a for a in found if a["rule"] == "kv-cache-utilization" and a["state"] == "firing"]

            wait_until(lambda: bool(kv()), 10, "the alert")
            [before] = kv()
            pid, moves = agent.pid(), agent.ask("/transitions?after=0")
            rewrite(agent, rules={"override": {"kv-cache-utilization": {"for": "1s", "fires": ">= 0.90"}}})
            assert agent.process is not None
            agent.process.send_signal(signal.SIGHUP)
            manager.wait_for("RELOADING=1")
            manager.wait_for("MONOTONIC_USEC=")
            manager.wait_for("READY=1")
            wait_until(lambda: limit_of(agent, "kv-cache-utilization") == 0.9, 10, "the new limit")
            [after] = kv()

            assert agent.process.poll() is None
            assert agent.pid() == pid
            assert len(events(agent, "started")) == 2
            assert {k: after[k] for k in ("since", "severity", "subject")} == {
                k: before[k] for k in ("since", "severity", "subject")}
            assert agent.ask("/transitions?after=0")[:len(moves)] == moves
            assert "STOPPING=1" not in manager.lines
            stop(agent)


def limit_of(agent: AgentProcess, rule: str) -> float | None:
    """The limit in force; None while it does not answer."""
    try:
        found = [r["limit"] for r in agent.ask("/check")["signals"] if r["rule"] == rule]
    except (client.NotRunning, client.AgentError):
        return None
    return found[0] if found else None


def test_sighup_keeps_the_old_configuration_where_the_new_one_is_wrong(tmp_path: Path, manager: Ready) -> None:
    """Every fault with its file and line in the log; the old one goes on, in the same process."""
    with AgentProcess(tmp_path / "a", QUIET, {"NOTIFY_SOCKET": str(manager.path)}) as agent:
        manager.wait_for("READY=1")
        good = agent.path.read_text()
        agent.path.write_text(f"{good[:-1]},\n\"pol\": \"5s\",\n\"slo\": {{\"ttft_p99\": 500}}}}")
        assert agent.process is not None
        agent.process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        status = manager.wait_for("STATUS=")

        faults = " ".join(row["fault"] for row in events(agent, "configuration_fault"))
        assert "the new configuration is wrong, the old one is kept" in status
        assert f"{agent.path}:2" in faults
        assert f"{agent.path}:3" in faults
        assert "poll" in faults  # did you mean
        assert len(events(agent, "started")) == 1
        assert agent.ask("/check")["node"] == "gpu-17"
        manager.wait_for("WATCHDOG=1")
        stop(agent)


@pytest.mark.heavy
def test_sighup_keeps_the_old_one_where_the_new_address_or_state_cannot_be_had(tmp_path: Path, manager: Ready) -> None:
    """A file without a fault that would not start: found out before the old one is let go."""
    with socket.create_server(("127.0.0.1", 0)) as taken, \
            AgentProcess(tmp_path / "a", QUIET, {"NOTIFY_SOCKET": str(manager.path)}) as agent:
        manager.wait_for("READY=1")
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "file").write_text("")
        for changed, says in (({"listen": address}, address), ({"state_dir": str(tmp_path / "file" / "x")}, "file/x"),
                              ({"socket": str(tmp_path / "file" / "x")}, "file/x")):
            before = agent.path.read_text()
            rewrite(agent, **changed)
            assert agent.process is not None
            agent.process.send_signal(signal.SIGHUP)
            manager.wait_for("RELOADING=1")
            manager.wait_for("READY=1")
            assert says in events(agent, "configuration_fault")[-1]["fault"]
            agent.path.write_text(before)

        assert len(events(agent, "started")) == 1
        stop(agent)


def test_another_host_on_the_port_that_we_hold_ourselves_can_be_had(tmp_path: Path) -> None:
    """`listen` from loopback to all addresses is a good change: that we are on the port is no reason to refuse it."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        running = Config(node="n", listen=f"127.0.0.1:{port}", state_dir=tmp_path, socket=tmp_path / "sock")

        try_places(msgspec.structs.replace(running, listen=f"0.0.0.0:{port}"), running)
        try_places(msgspec.structs.replace(running, listen=f"[::1]:{port}"), running)
        with pytest.raises(CannotServe, match=r"192\.0\.2\.1"):
            try_places(msgspec.structs.replace(running, listen=f"192.0.2.1:{port}"), running)


# --- refusing to start ------------------------------------------------------------------------------------------------


def test_an_address_that_is_taken_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Exit 2: which address, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refusal(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}")

    assert "tocsin run: listen:" in said
    assert "ss -ltnp" in said


def test_a_state_that_another_agent_holds_is_refused(tmp_path: Path) -> None:
    """Two agents on one state would page twice: the second names the first's process."""
    store = Store(tmp_path / "state" / DATABASE)
    try:
        said = refusal(tmp_path)
    finally:
        store.close()

    assert f"another tocsin (process {os.getpid()}) uses it" in said
    assert "state_dir" in said


def test_a_state_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Which file, and which key to change."""
    (tmp_path / "file").write_text("")

    said = refusal(tmp_path, state_dir=str(tmp_path / "file" / "state"))

    assert f"{tmp_path}/file/state/{DATABASE}: cannot be opened" in said
    assert "set state_dir in tocsin.yaml" in said


def test_every_fault_of_a_configuration_is_told_at_start(tmp_path: Path) -> None:
    """All at once, each with its line."""
    said = refusal(tmp_path, pol="5s", slo={"ttft_p99": "500"})

    assert "refused.yaml:1" in said
    assert "pol" in said
    assert "ttft_p99" in said


# --- what it keeps to itself ------------------------------------------------------------------------------------------


def test_no_secret_is_in_the_log(tmp_path: Path) -> None:
    """A webhook's path and a heartbeat's are secrets; each is used, each fails, and none is logged or shown."""
    secret = "T0CS1NS3CR3T"
    with PageServer(full()) as engine, Receiver(lambda _: Reply(500)) as receiver:
        (tmp_path / "hook").write_text(f"{receiver.url}/{secret}-hook\n")
        config = {**QUIET, "engines": [{"name": "llama", "url": engine.url}],
                  "rules": {"override": {"kv-cache-utilization": {"for": "0s"}}},
                  "notify": [{"webhook": {"url_file": str(tmp_path / "hook")},
                              "match": {"severity": ["page", "ticket"]}},
                             {"heartbeat": {"url_env": "BEAT", "every": "1s"}}]}
        with AgentProcess(tmp_path / "a", config, {"BEAT": f"http://127.0.0.1:9/{secret}-beat"}) as agent:
            receiver.wait_for(1)
            wait_until(lambda: len(events(agent, "delivery_failed")) >= 2, 10, "both to fail")
            told = json.dumps(agent.ask("/healthz"))
            stop(agent)

    assert any(secret in arrival.path for arrival in receiver.arrivals)
    assert secret not in agent.log.read_text()
    assert secret not in told


def test_the_process_has_nothing_of_the_command_line_or_the_tests(tmp_path: Path) -> None:
    """Megabytes that a daemon would carry for months: every import of the real process, by Python's own account."""
    with AgentProcess(tmp_path, {**QUIET, "nvml": "auto"}, {"PYTHONPROFILEIMPORTTIME": "1"}) as agent:
        stop(agent)

    names = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", agent.log.read_text(), re.MULTILINE))
    packages = {name.partition(".")[0] for name in names if "." in name}  # `rich` alone is our refusal of it
    assert {"agent.loop", "rules", "structlog", "waitress", "pynvml"} <= names
    assert packages.isdisjoint({"typer", "rich", "click", "flask", "jinja2", "pytest", "_pytest", "tests"})


# --- a start after kill -9 --------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_what_was_owed_at_a_kill_is_delivered_by_the_next_process(tmp_path: Path) -> None:
    """The receiver was down when the alert fired and the agent died: the page comes all the same, once."""
    with PageServer(full()) as engine, Receiver() as receiver:
        away = receiver.url
        receiver.script(Reply(503))
        config = {**QUIET, "engines": [{"name": "llama", "url": engine.url}],
                  "rules": {"override": {"kv-cache-utilization": {"for": "0s", "severity": "page"}}},
                  "notify": [{"webhook": {"url": away}}]}
        with AgentProcess(tmp_path, config) as agent:
            receiver.wait_for(1)  # refused with 503
            agent.kill()
            receiver.arrivals.clear()
            agent.start()
            receiver.wait_until(lambda got: ("firing", "KvCacheUtilization") in receiver.alerts(), 15, "the page")
            stop(agent)

    assert receiver.alerts().count(("firing", "KvCacheUtilization")) == 1


def test_a_channel_that_is_taken_out_costs_the_others_no_page(tmp_path: Path) -> None:
    """Two webhooks are each owed a page; the first is removed and SIGHUP sent: the second still gets its own."""
    with Receiver() as first, Receiver() as second:
        hooks = [{"webhook": {"url": first.url}}, {"webhook": {"url": second.url}}]
        page = AlertMessage("n/r/s", "firing", "page", {"alertname": "R"}, {}, 1.0)
        path = tmp_path / "tocsin.yaml"
        for notify in (hooks, hooks[1:]):
            path.write_text(json.dumps({**QUIET, "state_dir": str(tmp_path), "notify": notify}))
            agent = build(*load_all(path, {}, CATALOGUE))
            if notify is hooks:
                agent.store.commit_tick(1.0, Book(), (), owed_to(agent.routes, [page]))
                agent.store.close()
        assert agent.outbox is not None
        agent.outbox.start()
        second.wait_for(1)
        wait_until(lambda: agent.store.outbox_counts()["webhook-2"].get("delivered") == 1)
        agent.outbox.stop(2.0)
        agent.collector.stop()
        counts = agent.store.outbox_counts()
        agent.store.close()

    assert second.alerts() == [("firing", "R")]
    assert first.arrivals == []
    assert counts == {"webhook": {"pending": 0, "rejected": 1}, "webhook-2": {"pending": 0, "delivered": 1}}


# --- how it is put together -------------------------------------------------------------------------------------------


def test_a_check_alone_does_not_wait_for_a_start() -> None:
    """`tocsin check` sees an engine that refuses: that is down, however long it may take to start."""
    config = Config(node="n", engines=(EngineConfig(url="http://h:1", startup_within=600.0),))
    rules = tuple(built_in().values())

    assert setup_of(config, rules).targets[0].startup_within_s == 600
    assert setup_of(config, rules, clip_windows=True).targets[0].startup_within_s == 0


def test_without_nvml_no_gpu_is_awaited() -> None:
    """`nvml: off`: no source, and GPUs of before are no longer in the configuration."""
    config = Config(node="n", nvml="off", kernel_log="off")

    assert sources_of(config, {}) == []
    assert not setup_of(config, ()).watches_gpus
    assert [s.name for s in sources_of(Config(node="n"), {})] == ["nvml", "nvml_events", "gpu_devices", "kernel_log"]


def test_a_page_token_that_cannot_be_read_is_a_problem_and_logged_once(tmp_path: Path) -> None:
    """Each poll of an open page wrote the same line; /healthz said that all is well."""
    path, secret = tmp_path / "tocsin.yaml", tmp_path / "page-token"
    path.write_text(json.dumps({**QUIET, "state_dir": str(tmp_path), "socket": str(tmp_path / "agent.sock"),
                                "listen": "127.0.0.1:0", "web": {"token_file": str(secret)}}))
    config, rules = load_all(path, {}, CATALOGUE)
    agent = build(config, rules)
    servers = serve(agent, config)
    try:
        with capture_logs() as logged:
            for _ in range(3):
                (said,) = (one for one in agent.healthz()[1]["problems"] if "token" in one)
                assert said.startswith(f"web: the page is read-only: its token cannot be read: {secret}")
            secret.write_text("correct horse\n")
            assert not any("token" in one for one in agent.healthz()[1]["problems"])
            secret.write_text("")
            assert any("is empty" in one for one in agent.healthz()[1]["problems"])
        assert [one["event"] for one in logged] == ["page_token_unreadable"] * 2
    finally:
        for server in servers:
            server.close()
        agent.store.close()
