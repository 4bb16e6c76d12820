"""A bad day of the machine below the agent: it says so, pages all the same, loses nothing, and is well again after.

Each on the real process: names that no longer resolve, a certificate that ran out, a proxy that came with the shell.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.agent_process import ROOT, AgentProcess
from tests.needs import need
from tests.page_server import PageServer
from tests.receiver import Receiver, Reply, wait_until

pytestmark = pytest.mark.heavy

PAGE = """vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:kv_cache_usage_perc{model_name="m"} %s
vllm:generation_tokens_total{model_name="m"} %d
"""
FIRED, RESOLVED = ("firing", "KvCacheUtilization"), ("resolved", "KvCacheUtilization")
NO_SUCH_NAME = "tocsin-test.invalid"  # RFC 6761: no resolver answers it


class Engine(PageServer):
    """An engine whose KV cache is as full as `usage` says, while tokens flow."""

    def __init__(self) -> None:
        self.usage = 0.5
        self._tokens = 0
        super().__init__(self._told)

    def _told(self) -> str:
        self._tokens += 100
        return PAGE % (self.usage, self._tokens)


def config(engine: Engine, *urls: str, **more: Any) -> dict[str, Any]:
    """An agent that pages at once of a full KV cache, and looks each second."""
    return {"node": "gpu-17", "poll": "1s", "nvml": "off", "engines": [{"name": "llama", "url": engine.url}],
            "rules": {"override": {"kv-cache-utilization": {"for": "0s", "keep": "1s", "severity": "page"}}},
            "notify": [{"webhook": {"url": url}} for url in urls], **more}


def state(agent: AgentProcess, rule: str = "kv-cache-utilization", subject: str = "llama") -> str:
    """Of one signal, as `tocsin check` has it."""
    rows = agent.ask("/check")["signals"]
    return str(next((r["state"] for r in rows if (r["rule"], r["subject"]) == (rule, subject)), "absent"))


def wait_for_state(agent: AgentProcess, wanted: str, subject: str = "llama") -> None:
    """Until the KV cache's signal is in this state."""
    wait_until(lambda: state(agent, subject=subject) == wanted, 60, f"{subject} to be {wanted}")


def problems(agent: AgentProcess) -> str:
    """What a person should look at, as /healthz has it."""
    return " | ".join(agent.ask("/healthz")["problems"])


def channels_of(agent: AgentProcess) -> dict[str, Any]:
    """How each channel does, as /healthz has it."""
    found: dict[str, Any] = agent.ask("/healthz")["channels"]
    return found


def logged(agent: AgentProcess, event: str) -> int:
    """How many lines of its log tell this."""
    return agent.log.read_text().count(f'"event": "{event}"')


def ends_well(agent: AgentProcess, engine: Engine, receiver: Receiver) -> None:
    """The cache empties; the receiver has been told of both, once each and in order."""
    engine.usage = 0.5
    receiver.wait_until(lambda _: RESOLVED in receiver.alerts(), 60, "the end")
    assert [told for told in receiver.alerts() if told[1] == FIRED[1]] == [FIRED, RESOLVED]


# --- the network ------------------------------------------------------------------------------------------------------


def test_a_dead_resolver_costs_only_what_has_a_name(tmp_path: Path) -> None:
    """A receiver's and an engine's name no longer resolve: the other receiver is told in time, and both are named."""
    with Engine() as engine, Receiver() as receiver:
        made = config(engine, f"http://hooks.{NO_SUCH_NAME}/x", receiver.url)
        made["engines"].append({"name": "named", "url": f"http://engine.{NO_SUCH_NAME}:8000"})
        with AgentProcess(tmp_path, made) as agent:
            wait_for_state(agent, "OK")
            engine.usage = 0.97
            receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
            wait_until(lambda: "name cannot be resolved" in problems(agent), 60, "the receiver to be named")
            wait_until(lambda: "has no address" in problems(agent), 60, "the engine to be named")
            assert state(agent, subject="named") == "UNKNOWN"
            ends_well(agent, engine, receiver)
            # The receiver has it a moment before the agent has the answer.
            wait_until(lambda: channels_of(agent)["webhook-2"]["pending"] == 0, 60, "all to be delivered to the other")
            channels = channels_of(agent)

    assert channels["webhook"]["delivered"] == 0
    assert channels["webhook"]["pending"] >= 2  # the page and its end are owed until the name is back


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_read_only_at_the_start_costs_no_page(tmp_path: Path) -> None:
    """The node came up with its disk read-only: judged, paged and said all the same, and saved once it is writable."""
    need("root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=16m", "tmpfs", str(place)], check=True)
    try:
        with Engine() as engine, Receiver() as receiver:
            made = config(engine, receiver.url, state_dir=str(place / "state"))
            with AgentProcess(tmp_path / "a", made) as agent:
                wait_for_state(agent, "OK")
                engine.usage = 0.97
                receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
                assert "Read-only file system" in problems(agent)
                assert "database_in_memory" in agent.log.read_text()
                subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
                wait_until(lambda: agent.ask("/healthz")["store"] == "ok", 60, "the database to be on the disk")
                wait_until(lambda: channels_of(agent)["webhook"]["pending"] == 0, 60, "the answer to be noted")
                agent.kill()
                agent.start()  # it knows that it paged, from what was saved late
                ends_well(agent, engine, receiver)
                agent.kill()
    finally:
        subprocess.run(["umount", str(place)], check=True)


class ThinDisk:
    """A real ext4 whose blocks a store beneath it gives when they are first written: thin provisioning. It may run out.

    Then a new block is an I/O error, at the first of which the kernel makes the file system read-only. It is mounted
    in a mount namespace of its own (`inside` are the words before a command that sees it): in ours, a namespace that
    another test makes meanwhile would hold it, and umount would not take its read-only state back.
    """

    def __init__(self, folder: Path) -> None:
        self.place, self._store = folder / "disk", folder / "thin"
        self.place.mkdir()
        self._store.mkdir()
        self._holder = subprocess.Popen(["unshare", "--mount", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"x")
        self._holder.stdin.flush()
        assert self._holder.stdout.read(1) == b"x"  # it is inside
        self.inside = ("nsenter", "--mount", f"--target={self._holder.pid}")
        self._device = ""
        self._run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", self._store)
        image = self._store / "image"
        with self._seen(image).open("wb") as file:
            file.truncate(16 << 20)
        self._run("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0", "-e", "remount-ro", image)
        self._device = self._run("losetup", "--find", "--show", image)
        self._run("mount", self._device, self.place)

    def _run(self, *words: str | Path, check: bool = True) -> str:
        """What a command prints that sees the disk; CalledProcessError where it fails."""
        return subprocess.run([*self.inside, *words], check=check, capture_output=True, text=True).stdout.strip()

    def _seen(self, path: Path) -> Path:
        """A path on the disk, as it is reached from here."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def run_out(self) -> None:
        """No block more: what is written from now on fails when it is to be on the disk."""
        for place in (self._store, self.place):  # the second takes what the first left in blocks that were begun
            with suppress(OSError), self._seen(place / "others").open("wb", buffering=0) as others:
                while True:
                    others.write(bytes(4096))
                    os.fsync(others.fileno())

    def give(self) -> None:
        """There are blocks again."""
        self._seen(self._store / "others").unlink()

    def mend(self) -> None:
        """As a person does whose kernel has made it read-only: nobody may hold a file there."""
        self._run("umount", self.place)
        self._run("e2fsck", "-p", "-f", self._device, check=False)  # 1: it has mended it
        self._run("mount", self._device, self.place)

    def remove(self) -> None:
        """It is gone, whatever state it is in: with its namespace go its mounts."""
        if self._device:
            self._run("umount", "--lazy", self.place, check=False)
            self._run("losetup", "--detach", self._device, check=False)
        self._holder.communicate()


def test_a_disk_that_fails_while_the_agent_runs_costs_no_page(tmp_path: Path) -> None:
    """An I/O error made the kernel set it read-only: paged and said, and all that is owed is saved once it is mended.

    One receiver answers, the other is owed the page through it all, a SIGKILL after it included.
    """
    need("root", "loop", "mkfs.ext4")
    disk, is_well = ThinDisk(tmp_path), Event()
    try:
        with Engine() as engine, Receiver() as receiver, \
                Receiver(lambda _: Reply(200 if is_well.is_set() else 503)) as ill:
            made = config(engine, receiver.url, ill.url, state_dir=str(disk.place / "state"))
            with AgentProcess(tmp_path / "a", made, under=disk.inside) as agent:
                wait_for_state(agent, "OK")
                disk.run_out()
                told: list[tuple[str, str]] = []
                while "cannot be written" not in problems(agent) or told[-1] == RESOLVED:  # not before a change
                    assert len(told) < 20
                    engine.usage, change = (0.97, FIRED) if len(told) % 2 == 0 else (0.5, RESOLVED)
                    told.append(change)
                    receiver.wait_until(lambda _: receiver.alerts() == told, 60, f"{len(told)} changes")
                assert "Read-only file system" in problems(agent)
                assert metric(agent, "tocsin_database_saved") == 0.0
                seen = engine.scrapes
                wait_until(lambda: engine.scrapes >= seen + 3, 60, "three ticks more")
                assert logged(agent, "database_not_saved") == 1
                disk.give()
                disk.mend()
                wait_until(lambda: agent.ask("/healthz")["store"] == "ok", 60, "the database to be on the disk")
                assert metric(agent, "tocsin_database_saved") == 1.0
                wait_until(lambda: channels_of(agent)["webhook"]["pending"] == 0, 60, "the answer to be noted")
                agent.kill()
                is_well.set()
                ill.arrivals.clear()  # what it refused
                agent.start()
                engine.usage = 0.5
                told.append(RESOLVED)
                receiver.wait_until(lambda _: receiver.alerts() == told, 60, "the end, and nothing again")
                ill.wait_until(lambda _: ill.alerts() == told, 60, "all that it was owed")
                agent.kill()
    finally:
        disk.remove()


def metric(agent: AgentProcess, name: str) -> float:
    """One of its own metrics."""
    with urllib.request.urlopen(f"{agent.url()}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_stepped_clock_and_a_suspend_make_and_lose_no_alert(tmp_path: Path) -> None:
    """The process wakes an hour later with an alert open; then the clock steps back two hours while a page is owed."""
    need("faketime")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    # As in a suspend, CLOCK_MONOTONIC does not go on.
    env = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
           "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    with Engine() as engine, Receiver() as receiver, \
            AgentProcess(tmp_path / "a", config(engine, receiver.url), env) as agent:
        wait_for_state(agent, "OK")
        engine.usage = 0.97
        receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
        os.kill(agent.pid(), signal.SIGSTOP)
        clock.write_text("+1h")
        os.kill(agent.pid(), signal.SIGCONT)
        seen = engine.scrapes
        wait_until(lambda: engine.scrapes >= seen + 3, 60, "three looks after it woke")
        assert (state(agent), receiver.alerts()) == ("BREACH", [FIRED])
        ends_well(agent, engine, receiver)
        assert abs(agent_clock_s(agent) - 3600.0) < 120.0

        receiver.arrivals.clear()
        receiver.script(Reply(503))
        engine.usage = 0.97
        receiver.wait_for(1)
        clock.write_text("-1h")
        receiver.arrivals.clear()
        receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page, as soon as without the step")
        ends_well(agent, engine, receiver)
        assert abs(agent_clock_s(agent) + 3600.0) < 120.0
        fired = [row["rule"] for row in agent.ask("/transitions?after=0") if row["state"] == "firing"]

    assert fired == ["kv-cache-utilization"] * 2


def agent_clock_s(agent: AgentProcess) -> float:
    """By how much its clock is ahead of the machine's, by the last line of its log."""
    line = json.loads(agent.log.read_text().splitlines()[-1])
    return datetime.datetime.fromisoformat(line["timestamp"]).timestamp() - time.time()


# --- what the kernel has no more of -----------------------------------------------------------------------------------


def test_without_descriptors_it_says_so_and_owes_the_page(tmp_path: Path) -> None:
    """Its limit of open files is reached while somebody asks it: no storm in the log, and all is well after it."""
    with Engine() as engine, Receiver() as receiver, AgentProcess(tmp_path, config(engine, receiver.url)) as agent:
        wait_for_state(agent, "OK")
        _, hard = resource.prlimit(agent.pid(), resource.RLIMIT_NOFILE)
        resource.prlimit(agent.pid(), resource.RLIMIT_NOFILE, (4, hard))
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(agent.socket))
            asking.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            engine.usage = 0.97
            wait_until(lambda: logged(agent, "delivery_failed") >= 2, 60, "the page to fail twice")  # seconds apart
            told = agent.log.read_text()
            assert logged(agent, "connection_not_taken") == 1
            assert receiver.arrivals == []
            resource.prlimit(agent.pid(), resource.RLIMIT_NOFILE, (hard, hard))
            asking.settimeout(60)
            assert b" 200 OK" in asking.recv(4096)
        receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
        ends_well(agent, engine, receiver)

    assert "Too many open files" in told
    assert len(told) < 50_000  # it was 1 MB a second


# A user of nobody's: root's threads the kernel does not count. That it may read all is for the test's folder.
NOBODY = ("setpriv", "--reuid", "64317", "--regid", "64317", "--clear-groups", "--inh-caps=-all,+dac_override",
          "--ambient-caps=-all,+dac_override", "--bounding-set=-all,+dac_override")


def test_without_threads_it_ticks_says_so_pages_and_recovers(tmp_path: Path) -> None:
    """Its user's limit of threads is reached at the first tick: no source can be read, and the agent says so itself.

    The limit is lifted: every source is read, nobody had to restart it. Nor does one start that gets no threads.
    """
    need("root", "setpriv")
    (tmp_path / "kern.log").touch()
    with Engine() as engine, Receiver() as receiver:
        engine.others["/orders"] = b'{"n": 7}'
        made = config(engine, receiver.url, kernel_log=str(tmp_path / "kern.log"),
                      sources={"json": [{"name": "orders", "url": f"{engine.url}/orders", "path": "n"}]})
        sources = {"engine:llama", "kernel_log", "json:orders"}
        with AgentProcess(tmp_path, made, module="tests.incidents.starved", under=NOBODY) as agent:
            receiver.wait_until(lambda _: ("firing", "Watcher") in receiver.alerts(), 60, "its word that it is blind")
            wait_until(lambda: all(f"source {one}: no thread for" in problems(agent) for one in sources), 60, "names")
            assert "TasksMax" in problems(agent)
            assert state(agent) in ("UNKNOWN", "absent")
            assert agent.ask("/check")["verdict"] == "ticket"
            assert "last tick" not in problems(agent)
            told = agent.log.read_text()
            assert logged(agent, "source_without_thread") == len(sources)
            subprocess.run([*NOBODY, "prlimit", f"--pid={agent.pid()}", "--nproc=4096:"], check=True)
            wait_for_state(agent, "OK")
            engine.usage = 0.97
            receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
            wait_until(lambda: all(one["error"] is None for one in agent.ask("/healthz")["sources"].values()), 60,
                       "every source to be read")
            ends_well(agent, engine, receiver)
            agent.kill()
        late = subprocess.run([*NOBODY, "prlimit", "--nproc=2", sys.executable, "-m", "agent.daemon", "--config",
                               str(agent.path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert "tick_failed" not in told
    assert len(told) < 20_000
    assert (late.returncode, "tocsin run: no thread for" in late.stderr) == (1, True)


def certificate(folder: Path, days: int) -> tuple[Path, Path]:
    """A self-made certificate for 127.0.0.1 that began ten days ago and holds for so many; and its key."""
    need("openssl", "faketime")
    began = (datetime.datetime.now(tz=datetime.UTC) - datetime.timedelta(days=10)).strftime("%Y-%m-%d %H:%M:%S")
    cert, key = folder / f"cert-{days}", folder / f"key-{days}"
    subprocess.run(["faketime", began, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days),
                    "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
                    "-out", str(cert)], check=True, capture_output=True, env={"TZ": "UTC", "PATH": "/usr/bin:/bin"})
    return cert, key


@contextmanager
def tls(receiver: Receiver, cert: Path, key: Path) -> Iterator[ssl.SSLContext]:
    """The receiver behind real TLS; a certificate that is loaded into the context later is shown from then on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    plain = receiver._server.socket
    receiver._server.socket = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    yield context


def test_an_expired_certificate_is_named_and_the_page_stays_owed(tmp_path: Path) -> None:
    """The receiver's certificate ran out nine days ago; once it shows a new one, the page comes, once."""
    old, new = certificate(tmp_path, 1), certificate(tmp_path, 30)
    trusted = tmp_path / "trusted"
    trusted.write_text(old[0].read_text() + new[0].read_text())
    with Engine() as engine, Receiver() as receiver, tls(receiver, *old) as context:
        url = receiver.url.replace("http:", "https:")
        with AgentProcess(tmp_path / "a", config(engine, url), {"REQUESTS_CA_BUNDLE": str(trusted)}) as agent:
            wait_for_state(agent, "OK")
            engine.usage = 0.97
            wait_until(lambda: "certificate has expired" in problems(agent), 60, "the certificate to be named")
            assert url in problems(agent)
            assert channels_of(agent)["webhook"]["pending"] == 1
            assert receiver.arrivals == []
            context.load_cert_chain(*new)
            receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
            ends_well(agent, engine, receiver)


def test_a_proxy_of_the_environment_blinds_nobody(tmp_path: Path) -> None:
    """A shell's proxy answers everything: engines and a receiver on loopback never go there; a distant one does."""
    with Engine() as engine, Receiver() as receiver, Receiver() as proxy:
        away = "http://198.51.100.7/hook"  # RFC 5737: nobody's
        env = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"), proxy.url)
        with AgentProcess(tmp_path, config(engine, receiver.url, away), {**env, "no_proxy": ""}) as agent:
            wait_for_state(agent, "OK")
            engine.usage = 0.97
            receiver.wait_until(lambda _: FIRED in receiver.alerts(), 60, "the page")
            proxy.wait_for(1)
            ends_well(agent, engine, receiver)
            proxy.wait_for(2)

    assert {arrival.path for arrival in proxy.arrivals} == {away}  # what is asked of a proxy is the whole address
