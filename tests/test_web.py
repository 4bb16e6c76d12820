"""The agent's web side: what it tells whom, what it refuses, and its own metrics, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import re
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent import client, noise, review, sdnotify
from agent import silences as mutes
from agent.model import Alert, AlertKey, Announcement, Book, IncidentMessage, Rule, Signal, SignalSpec, Slo, Why
from agent.signals import SIGNALS
from agent.web.app import PRIVATE, PUBLIC, Point, allowed_hosts, host_name, make_app
from agent.web.metrics import SourceStat, metric_name
from agent.web.server import CannotServe, Server, serve_tcp, serve_unix, split_address
from tests import told_incident
from tests.needs import need

NOW = 1_000_000.0
ROOT = Path(__file__).parents[1]
CATALOGUE = {
    spec.id: spec
    for spec in (
        SignalSpec("queue_age", "s", "engine", "Age of the oldest request never yet scheduled"),
        SignalSpec("kv_cache_utilization", "ratio", "engine", "Share of KV blocks in use"),
        SignalSpec("gpu_temperature", "celsius", "gpu", "Temperature of the GPU"),
        SignalSpec("preemptions", "count", "engine", "Requests preempted in the window"),
        SignalSpec("ttft_slow_share", "ratio", "target", "Share of requests over the SLO"),
    )
}


class FakeView:
    """An agent that watches one engine and one GPU; the GPU is hot, and the KV gauge is missing."""

    def __init__(self) -> None:
        self.late = False
        self.broken = False
        self.nvml: list[float | None] = []
        self.told: list[tuple[Any, ...]] = []
        self.muted: tuple[mutes.Silence, ...] = ()
        self.changes: list[dict[str, Any]] = []
        self.days: list[dict[str, Any]] = []
        self.slo = Slo(written=True)
        self.checked: dict[str, Any] = {"verdict": "page", "node": "gpu-17", "signals": []}

    def check(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("the database is locked at /var/lib/tocsin/secret-name.db")
        return self.checked

    def gpus(self) -> dict[str, Any]:
        found = [{"code": "temperature.limit"}, {"code": "temperature.high"}]
        return {"verdict": "page", "node": "gpu-17", "why": None, "node_findings": [], "node_unchecked": [], "gpus": [
            {"subject": "GPU-1", "verdict": "DRAIN", "findings": found, "unchecked": []}]}

    def scaling(self) -> list[dict[str, Any]]:
        return [{"subject": "llama", "out": True, "in": False, "startup_s": 212.0, "peak_per_s": 7.0,
                 "served_per_s": None}]

    def incident_list(self, since: float) -> list[dict[str, Any]]:
        return [one for one in (told_incident.record(), told_incident.record(3.0)) if one["opened_at"] >= since]

    def incident_told(self, name: str) -> dict[str, Any] | None:
        return told_incident.told() if name in ("last", told_incident.record()["id"]) else None

    def pages_of(self, incident: Mapping[str, Any]) -> Mapping[str, int]:
        return {"pagerduty": 1}

    def review(self, last_s: float) -> dict[str, Any]:
        end = told_incident.START + 1000.0
        return review.review(self.days, self.incident_list(0.0), [], lambda name: self.slo, end - last_s, end)

    def alerts(self, include_resolved: bool) -> list[dict[str, Any]]:
        firing = {"rule": "gpu-temperature", "subject": "GPU-1", "state": "firing", "severity": "ticket",
                  "since": NOW - 60, "until": None, "summary": "gpu-temperature 91 °C, limit 85 °C: GPU 1 on gpu-17",
                  "description": "gpu_temperature of GPU 1 is 91 °C.\nLook at cooling."}
        past = firing | {"state": "resolved", "since": NOW - 7200, "until": NOW - 3600,
                         "silenced": "until 2001-09-09 01:46 UTC by anna: fans"}
        return [firing, *([past, past | {"rule": "kv-cache-utilization", "subject": "llm/llama#0/1"}]
                          if include_resolved else [])]

    def doctor(self) -> dict[str, Any]:
        return {"targets": [], "gpus": [], "sources": []}

    def healthz(self) -> tuple[bool, dict[str, Any]]:
        return not self.late, {"sources": {"engine a": {"ok": False, "error": "refused"}}, "age_s": float("nan")}

    def livez(self, now: float) -> tuple[bool, str]:
        return not self.late, f"the last tick was {now - NOW + 1:g} s ago"

    def transitions(self, after_id: int) -> list[dict[str, Any]]:
        return [{"id": n, "rule": "gpu-temperature"} for n in (1, 2, 3) if n > after_id]

    def silences(self) -> dict[str, Any]:
        held = [row | {"mutes": [], "text": str(one)} for one, row in zip(
            mutes.active(self.muted, NOW), mutes.to_plain(mutes.active(self.muted, NOW)), strict=True)]
        return {"silences": held, "expected": [], "ended": []}

    def silence(self, rule: str, subject: str, for_s: float, why: str, by: str) -> dict[str, Any]:
        self.muted, made = mutes.add(self.muted, rule, subject, for_s, why, by, NOW)
        shown: dict[str, Any] = self.silences()["silences"][-1]
        assert shown["id"] == made.id
        return shown

    def unsilence(self, wanted: Collection[int], by: str) -> list[dict[str, Any]]:
        ended = [one for one in self.muted if one.id in wanted]
        if not ended:
            raise ValueError("there is no such silence")
        self.muted = mutes.end(self.muted, wanted, by, NOW)
        return mutes.to_plain(ended)

    def alert_stats(self, last_s: float) -> dict[str, Any]:
        return noise.stats(self.changes, NOW - last_s, NOW)

    def readings(self) -> list[Signal]:
        return [Signal("router_requests", "edge", "value", NOW, value=8.0, unit="count")]

    def signals(self) -> list[Signal]:
        return [
            Signal("queue_age", "llama", "value", NOW - 2, value=0.25, unit="s", evidence={"high": float("inf")}),
            Signal("kv_cache_utilization", "llama", "gap", NOW, unit="ratio", code=Why.MISSING, why="it is gone"),
            Signal("gpu_temperature", "GPU-1", "value", NOW - 1, value=91.0, unit="celsius", method="exact"),
            Signal("preemptions", "llama", "idle", NOW, value=4.0),
            Signal("ttft_slow_share", "edge", "value", NOW, value=0.5, unit="ratio"),
            Signal("gpu_temperature", "GPU-1", "value", NOW - 1, value=91.0, unit="celsius"),  # for a second rule
            Signal("ttft_slow_share", "llama", "na", NOW, why="not told"),
        ]

    def book(self) -> Book:
        hot = Alert("gpu-temperature", "GPU-1", "firing", "ticket", since=NOW - 60,
                    labels={"node": "gpu-17", "gpu": "GPU-1"})
        slow = Alert("queue-age", "llama", "pending", "page", since=NOW - 5)
        return Book({("gpu-temperature", "GPU-1"): hot, ("queue-age", "llama"): slow})

    def release_nvml(self, for_s: float | None) -> dict[str, Any]:
        self.nvml.append(for_s)
        return {"released": True}

    def reopen_nvml(self) -> dict[str, Any]:
        return {"released": False}

    def gpu_processes(self) -> dict[int, int] | None:
        return {41: 1024}

    def take_user(self, address: str, counted: Mapping[str, Any]) -> None:
        self.told.append(("user", address, counted["requests"], counted["errors"]))

    def announce(self, told: Announcement) -> None:
        if told.route_to == "nobody":
            raise LookupError("there is no channel 'nobody' to route to")
        self.told.append(("announce", told))

    def traffic(self, since: float) -> dict[str, dict[str, Any]]:
        rows = [(at, count) for at, count in ((NOW - 10, 3.0), (NOW - 5, 8.0)) if at >= since]
        return {"replicas": {"llama": rows}, "routers": {}}

    def end_announcement(self, run: str) -> None:
        self.told.append(("end", run))

    def trend(self, span_s: float, wanted: frozenset[AlertKey] | None = None) -> dict[AlertKey, list[Point]]:
        return {}

    def incidents(self) -> list[IncidentMessage]:
        return []

    def rules(self) -> list[Rule]:
        return []

    def expect_kernel_line(self, message: str, for_s: float = 10.0) -> bool:
        self.told.append(("kernel line", message, for_s))
        return True

    def tell(self, signal: str, subject: str, text: str | None) -> None:
        self.told.append(("tell", signal, subject, text))

    def tick_at(self) -> float | None:
        return NOW - 1

    def source_stats(self) -> list[SourceStat]:
        return [SourceStat("engine llama", 0.012, 3), SourceStat("nvml", None, 0)]

    def saved(self) -> bool:
        return True

    def outbox_counts(self) -> Mapping[str, Mapping[str, int]]:
        return {"alertmanager": {"pending": 2}}

    def delivery_counts(self) -> Mapping[str, Mapping[str, int]]:
        return {"alertmanager": {"delivered": 7}}


@pytest.fixture
def view() -> FakeView:
    return FakeView()


@pytest.fixture
def tcp(view: FakeView) -> Iterator[Server]:
    hosts = allowed_hosts("127.0.0.1:0", "https://tocsin.example/gpu-17")
    server = serve_tcp(make_app(view, CATALOGUE, lambda: NOW, routes=PUBLIC, hosts=hosts), "127.0.0.1:0")
    yield server
    server.close()


@pytest.fixture
def unix(view: FakeView, tmp_path: Path) -> Iterator[Server]:
    server = serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), tmp_path / "run" / "t.sock")
    yield server
    server.close()


def fetch(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body, over TCP or the unix socket."""
    connection = http.client.HTTPConnection(server.address if ":" in server.address else "localhost", timeout=10)
    if "/" in server.address:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(10)
        connection.sock.connect(server.address)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()
    finally:
        connection.close()


def test_a_late_tick_fails_livez_and_nothing_else_does(view: FakeView, tcp: Server) -> None:
    """An engine was down, the kubelet restarted the agent for it, and the page about the engine never left."""
    status, _, text = fetch(tcp, "/livez")
    assert (status, text) == (200, "the last tick was 1 s ago\n")
    view.late = True
    assert fetch(tcp, "/livez")[0] == 503
    status, _, text = fetch(tcp, "/healthz")
    assert status == 200
    assert json.loads(text) == {
        "ok": False,
        "sources": {"engine a": {"ok": False, "error": "refused"}},
        "age_s": None,
    }


def test_the_links_of_a_page_open(tcp: Server) -> None:
    """A phone at night: the page's two links lead to the alert as it is, and to what to do, as text."""
    status, headers, text = fetch(tcp, "/alerts/gpu-temperature/GPU-1")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    since = datetime.fromtimestamp(NOW - 60, UTC)
    assert text.splitlines()[:4] == [
        f"FIRING (ticket)  gpu-temperature of GPU-1  since {since:%Y-%m-%d %H:%M:%S} UTC",
        "  gpu-temperature 91 °C, limit 85 °C: GPU 1 on gpu-17",
        "  gpu_temperature of GPU 1 is 91 °C.",
        "  Look at cooling.",
    ]
    assert "RESOLVED (ticket)" in text
    assert text.count("  Silenced until 2001-09-09 01:46 UTC by anna: fans\n") == 1
    assert "/runbooks/gpu-temperature" in text
    status, _, text = fetch(tcp, "/runbooks/gpu-temperature")
    assert (status, text) == (200, (ROOT / "runbooks" / "gpu-temperature.md").read_text())


def test_a_subject_with_slashes_has_its_page(tcp: Server) -> None:
    """In Kubernetes a subject is a path of its own, and comes quoted."""
    status, _, text = fetch(tcp, "/alerts/kv-cache-utilization/llm%2Fllama%230%2F1")
    assert (status, text.startswith("RESOLVED (ticket)  kv-cache-utilization of llm/llama#0/1")) == (200, True)


@pytest.mark.parametrize("path", [
    "/runbooks/", "/runbooks/no-such-rule", "/runbooks/../agent/web/app.py", "/runbooks/%2e%2e%2fREADME",
    "/runbooks/__init__.py", "/runbooks/Queue-Age", "/alerts/", "/alerts/gpu-temperature", "/alerts/queue-age/x%FF",
])
def test_what_has_no_page_is_not_found(tcp: Server, path: str) -> None:
    """And no path leads out of the runbooks' folder."""
    assert fetch(tcp, path)[0] == 404


@pytest.mark.parametrize("path", ["/check", "/alerts", "/silences", "/silences/end", "/nvml/release", "/nvml/reopen",
                                  "/transitions", "/doctor"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_network_gets_no_actions(view: FakeView, tcp: Server, path: str, method: str) -> None:
    """A pod next door posted /nvml/release in a loop and blinded the agent."""
    assert fetch(tcp, path, method)[0] == 404
    assert view.nvml == []


def test_drilld_and_its_prober_are_heard_on_the_socket_alone(view: FakeView, unix: Server, tcp: Server) -> None:
    """An announcement, what users got, and an orphan arrive as they were said; the network may say none of it."""
    path = Path(unix.address)
    told = {"run": "run-1", "drill": "process-kill", "rules": ["engine-down"], "until": NOW + 600,
            "subjects": ["llama"], "loads": True, "route_to": "webhook"}

    client.ask(path, "/drills/announce", "POST", told)
    client.ask(path, "/user", "POST", {"address": "llm.internal", "requests": 100, "errors": 3, "ttft": {"0.5": 97}})
    orphan = {"signal": "drill_orphaned", "subject": "run-1", "text": "a table is left"}
    client.ask(path, "/drills/tell", "POST", orphan)
    client.ask(path, "/drills/end?run=run-1", "POST")

    said = Announcement("run-1", "process-kill", ("engine-down",), NOW + 600, ("llama",), True, "webhook")
    assert view.told == [("announce", said),
                         ("user", "llm.internal", 100, 3), ("tell", "drill_orphaned", "run-1", "a table is left"),
                         ("end", "run-1")]
    assert all(fetch(tcp, url, "POST")[0] == 404 for url in ("/user", "/drills/announce", "/drills/tell"))


def test_drilld_asks_where_the_traffic_went(unix: Server) -> None:
    """Arrivals of each engine, as its page counted them, from a time on."""
    assert client.ask(Path(unix.address), f"/traffic?since={NOW - 7}") == {
        "replicas": {"llama": [[NOW - 5, 8.0]]}, "routers": {}}
    assert client.ask(Path(unix.address), "/nvml/processes") == {"processes": {"41": 1024}}
    with pytest.raises(client.AgentError, match="unix seconds"):
        client.ask(Path(unix.address), "/traffic?since=noon")


@pytest.mark.parametrize(("url", "body", "said"), [
    ("/drills/announce", {"run": "x"}, "until"),
    ("/drills/announce", {"run": "x", "drill": "d", "rules": [], "until": 1, "route_to": "nobody"}, "no channel"),
    ("/user", {"address": "x"}, "requests"), ("/user", [], "requests"),
    ("/drills/tell", {"signal": "queue_age", "subject": "x"}, "drill_orphaned"),
])
def test_what_drilld_says_wrongly_is_refused_by_name(unix: Server, url: str, body: Any, said: str) -> None:
    """A field that is missing is named; nothing is taken over."""
    with pytest.raises(client.AgentError, match=said) as error:
        client.ask(Path(unix.address), url, "POST", body)
    assert error.value.status == 400


def test_a_silence_says_who_made_it_as_the_kernel_tells(view: FakeView, unix: Server) -> None:
    """Not as the request says: the next person on call asks that one."""
    path, me = Path(unix.address), pwd.getpwuid(os.getuid()).pw_name
    wish = {"rule": "gpu-temperature", "subject": "GPU-1", "for_s": 7200, "why": "fans", "by": "the other team"}

    made = client.ask(path, "/silences", "POST", wish)

    assert (made["by"], made["until"], made["mutes"]) == (me, NOW + 7200, [])
    assert [one["id"] for one in client.ask(path, "/silences")["silences"]] == [made["id"]]
    (ended,) = client.ask(path, "/silences/end", "POST", {"rule": "gpu-temperature", "subject": "GPU-1"})
    assert (ended["id"], view.muted[0].ended_by) == (made["id"], me)


@pytest.mark.parametrize(("url", "body", "said"), [
    ("/silences", {"rule": "x"}, '"for_s": seconds'), ("/silences", [], '"for_s": seconds'),
    ("/silences", {"rule": "x", "for_s": 1e9, "why": "y"}, "at most 7 d"),
    ("/silences", {"rule": "x", "for_s": "nan", "why": "y"}, "at most 7 d"),
    ("/silences", {"rule": "x", "for_s": 60, "why": " "}, "a reason"),
    ("/silences/end", {}, '"ids"'), ("/silences/end", {"ids": [77]}, "no such silence"),
    ("/silences/end", {"rule": "x"}, "no such silence"),
])
def test_a_silence_without_an_end_or_a_reason_is_refused(unix: Server, url: str, body: Any, said: str) -> None:
    """A mute that nobody ends and nobody can explain is found after the outage."""
    with pytest.raises(client.AgentError, match=re.escape(said)) as error:
        client.ask(Path(unix.address), url, "POST", body)
    assert error.value.status == 400


def test_a_line_of_the_kernel_s_log_is_announced_by_root_alone(view: FakeView, unix: Server, tcp: Server) -> None:
    """Whoever may use the socket could have made a forged Xid line the driver's own."""
    mine = client.expect_kernel_line if os.geteuid() == 0 else None
    line = "NVRM: Xid (PCI:0000:1a:00): 56, drill x mark 0a1b"
    if mine is not None:
        assert mine(Path(unix.address), line, 10.0) == {"expected": True}
        assert view.told == [("kernel line", line, 10.0)]
        for wrong in ({"line": line}, {"line": f"{line}\nNVRM: Xid: 79", "for_s": 5}, {"line": line, "for_s": 60}):
            with pytest.raises(client.AgentError) as error:
                client.ask(Path(unix.address), "/drills/kernel-line", "POST", wrong)
            assert error.value.status == 400
    view.told.clear()
    said: list[str] = []
    app = make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE)
    for uid in ({"tocsin.peer_uid": 1000}, {}):
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/drills/kernel-line", **uid}
        assert b"only root" in b"".join(app(environ, lambda status, _: said.append(status)))  # type: ignore[arg-type]
    assert said == ["403 Forbidden"] * 2
    assert fetch(tcp, "/drills/kernel-line", "POST")[0] == 404
    assert view.told == []


def test_the_socket_gets_everything(view: FakeView, unix: Server) -> None:
    """drilld and the command line ask on the socket what the page does not show."""
    assert json.loads(fetch(unix, "/check")[2]) == view.checked
    assert [a["state"] for a in json.loads(fetch(unix, "/alerts")[2])] == ["firing", "resolved", "resolved"]
    assert [a["state"] for a in json.loads(fetch(unix, "/alerts?resolved=0")[2])] == ["firing"]
    assert [t["id"] for t in json.loads(fetch(unix, "/transitions?after=1")[2])] == [2, 3]
    assert json.loads(fetch(unix, "/doctor")[2]) == {"targets": [], "gpus": [], "sources": []}
    queue, kv = json.loads(fetch(unix, "/signals")[2])[:2]
    assert (queue["id"], queue["value"], queue["evidence"]) == ("queue_age", 0.25, {"high": None})
    assert (kv["state"], kv["code"], kv["value"]) == ("gap", "missing", None)
    assert fetch(unix, "/metrics")[0] == fetch(unix, "/livez")[0] == 200


@pytest.mark.parametrize(
    ("query", "want"), [("", None), ("?for=60s", 60.0), ("?for=500ms", 0.5), ("?for=1.5m", 90.0), ("?for=1h", 3600.0)]
)
def test_nvml_is_released_for_a_time(view: FakeView, unix: Server, query: str, want: float | None) -> None:
    """A driver reload waits for every open handle; the agent lets go and comes back by itself."""
    assert json.loads(fetch(unix, "/nvml/release" + query, "POST")[2]) == {"released": True}
    assert view.nvml == [want]
    assert json.loads(fetch(unix, "/nvml/reopen", "POST")[2]) == {"released": False}


@pytest.mark.parametrize(
    ("path", "method", "status", "says"),
    [
        ("/nvml/release?for=60", "POST", 400, "for=60: missing unit in duration 60; write 60s, 60ms or 60m"),
        ("/transitions?after=-1", "GET", 400, "after='-1' is not the id of a transition"),
        ("/nvml/release", "GET", 405, "use POST"),
        ("/check", "DELETE", 405, "use GET, HEAD"),
        ("/wp-login.php", "GET", 404, "There is no '/wp-login.php' here. There is: / /alerts /alerts/ /alerts/stats"),
        ("/alerts/stats?last=soon", "GET", 400, "last=soon"),
        ("/silences", "DELETE", 405, "use GET, POST, HEAD"),
    ],
)
def test_a_wrong_request_is_told_what_to_do(unix: Server, path: str, method: str, status: int, says: str) -> None:
    """'400 Bad Request' without a word costs ten minutes with the source."""
    got, headers, text = fetch(unix, path, method)
    assert (got, says in text) == (status, True), text
    assert ("Allow" in headers) == (status == 405)


def test_a_rebound_name_reads_nothing(tcp: Server) -> None:
    """A web page rebound its own name to 127.0.0.1 and read the node's metrics through the admin's browser."""
    port = tcp.address.rpartition(":")[2]
    status, _, text = fetch(tcp, "/metrics", Host=f"evil.example:{port}")
    assert status == 421
    assert "external_url" in text
    assert "tocsin_" not in text
    ours = (f"localhost:{port}", "127.0.0.1", "127.8.8.8:80", f"[::1]:{port}", "tocsin.example", "TOCSIN.example.")
    for host in ours:
        assert fetch(tcp, "/metrics", Host=host)[0] == 200, host


@pytest.mark.parametrize(
    ("listen", "external", "want"),
    [
        ("127.0.0.1:9959", None, frozenset({"127.0.0.1"})),
        ("localhost:9959", "https://T.example:8443/x", frozenset({"localhost", "t.example"})),
        ("[::1]:9959", None, frozenset({"::1"})),
        ("0.0.0.0:9959", None, None),
        ("[::]:9959", None, None),
        ("10.0.0.7:9959", "https://t.example", None),
    ],
)
def test_which_names_are_ours(listen: str, external: str | None, want: frozenset[str] | None) -> None:
    """Bound to the network, kubelet and Prometheus ask by pod IP, node name or service name: none of them is known."""
    assert allowed_hosts(listen, external) == want


def test_host_names_are_cut_from_ports() -> None:
    """An unbracketed IPv6 address has colons and no port."""
    assert [host_name(h) for h in ("a:1", "[::1]", "[fe80::1%eth0]:9", "::1", "A.", "")] == [
        "a", "::1", "fe80::1%eth0", "::1", "a", "",
    ]  # fmt: skip


def test_head_is_get_without_a_body(tcp: Server) -> None:
    """Load balancers probe with HEAD."""
    status, headers, body = fetch(tcp, "/livez", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, "", "26")  # "the last tick was 1 s ago\n"


def test_pages_cannot_be_framed_sniffed_or_cached(tcp: Server) -> None:
    """The headers are there on every answer, errors too."""
    for path in ("/", "/healthz", "/metrics", "/none"):
        headers = fetch(tcp, path)[1]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["Server"] == "tocsin"


def test_an_own_fault_is_a_short_id(view: FakeView, unix: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback in an answer shows paths and values to whoever asks; the log has it under an id."""
    view.broken = True
    status, _, text = fetch(unix, "/check")
    assert status == 500
    assert "secret-name" not in text
    assert "Traceback" not in text
    error_id = text.split("error_id ")[1].strip()
    assert len(error_id) == 8
    assert error_id in "".join(capsys.readouterr())
    view.broken = False
    assert fetch(unix, "/check")[0] == 200


def metrics_of(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(fetch(server, "/metrics")[2])
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_what_routers_count_stands_beside_the_signals(unix: Server) -> None:
    """A drill's judge asks how the load was shared: the socket tells it, and no metric of ours does."""
    edge = json.loads(fetch(unix, "/signals")[2])[-1]
    assert (edge["id"], edge["subject"], edge["value"]) == ("router_requests", "edge", 8.0)


def test_metrics_say_what_the_signals_say(tcp: Server) -> None:
    """A Gap's series must be absent, not 0 and not its last value: an alert on it would resolve or lie."""
    got = metrics_of(tcp)
    assert got["tocsin_queue_age_seconds", (("engine", "llama"), ("subject", "llama"))] == 0.25
    assert got["tocsin_gpu_temperature_celsius", (("gpu", "GPU-1"), ("subject", "GPU-1"))] == 91.0
    assert got["tocsin_signal_age_seconds", (("signal", "queue_age"), ("subject", "llama"))] == 2.0
    gap = (("reason", "missing"), ("signal", "kv_cache_utilization"), ("subject", "llama"))
    assert got["tocsin_signal_gap", gap] == 1.0
    hot = (("engine", ""), ("gpu", "GPU-1"), ("node", "gpu-17"), ("rule", "gpu-temperature"), ("severity", "ticket"),
           ("subject", "GPU-1"))
    assert got["tocsin_alert_state", hot] == 2.0
    slow = (("engine", ""), ("gpu", ""), ("node", ""), ("rule", "queue-age"), ("severity", "page"),
            ("subject", "llama"))
    assert got["tocsin_alert_state", slow] == 1.0
    assert got["tocsin_source_duration_seconds", (("source", "engine llama"),)] == 0.012
    assert got["tocsin_source_errors_total", (("source", "engine llama"),)] == 3.0
    assert got["tocsin_outbox_notices", (("channel", "alertmanager"), ("state", "pending"))] == 2.0
    llama = (("subject", "llama"),)
    assert (got["tocsin_scale_out", llama], got["tocsin_scale_in", llama]) == (1.0, 0.0)
    assert got["tocsin_scale_startup_seconds", llama] == 212.0
    assert got["tocsin_scale_peak_requests_per_second", llama] == 7.0
    assert ("tocsin_scale_served_requests_per_second", llama) not in got  # what is not known has no series
    assert got["tocsin_notifications_total", (("channel", "alertmanager"), ("outcome", "delivered"))] == 7.0
    assert got["tocsin_tick_timestamp_seconds", ()] == NOW - 1
    assert got["tocsin_database_saved", ()] == 1.0
    names = {name for name, _ in got}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= names
    assert got["tocsin_ttft_slow_share_ratio", (("engine", "edge"), ("subject", "edge"))] == 0.5
    assert not names & {"tocsin_kv_cache_utilization_ratio", "tocsin_preemptions"}
    assert [dict(labels)["subject"] for name, labels in got if name == "tocsin_ttft_slow_share_ratio"] == ["edge"]


def test_metrics_come_as_openmetrics_to_who_asks(tcp: Server) -> None:
    """Prometheus asks for OpenMetrics first; it must get what the content type says."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    _, headers, text = fetch(tcp, "/metrics", Accept=accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert fetch(tcp, "/metrics")[1]["Content-Type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("signal", "unit", "want"),
    [
        ("queue_age", "s", "tocsin_queue_age_seconds"),
        ("kv_cache_utilization", "ratio", "tocsin_kv_cache_utilization_ratio"),
        ("gpu_temperature", "celsius", "tocsin_gpu_temperature_celsius"),
        ("gpu_thermal_margin", "kelvin", "tocsin_gpu_thermal_margin_kelvin"),
        ("gpu_memory_free", "bytes", "tocsin_gpu_memory_free_bytes"),
        ("preemptions", "count", "tocsin_preemptions"),
        ("error_burn", "of limit", "tocsin_error_burn"),
    ],
)
def test_metric_names_end_in_their_base_unit(signal: str, unit: str, want: str) -> None:
    """The field's habit; dashboards and promtool hold one to it."""
    assert metric_name(SignalSpec(signal, unit, "engine", "help")) == want


@pytest.mark.heavy
def test_promtool_likes_the_page(tcp: Server) -> None:
    """Prometheus's own linter reads the page and has nothing to say."""
    need("promtool")
    page = fetch(tcp, "/metrics")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_socket_is_for_owner_and_group(unix: Server) -> None:
    """Anyone on the node could have released NVML; only owner and group may connect."""
    assert stat.S_IMODE(Path(unix.address).stat().st_mode) == 0o660


def test_a_killed_agent_s_socket_is_replaced(view: FakeView, tmp_path: Path) -> None:
    """After kill -9 the file stays behind; the next start must not need a person to remove it."""
    path = tmp_path / "t.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    server = serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), path)
    assert fetch(server, "/livez")[0] == 200
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_agent_s_socket_is_not_taken(view: FakeView, unix: Server) -> None:
    """A second `tocsin run` must not steal the first one's socket, nor remove it when it gives up."""
    with pytest.raises(CannotServe, match="an agent answers there already; stop it first"):
        serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), Path(unix.address))
    assert fetch(unix, "/livez")[0] == 200


def test_closing_leaves_a_successor_s_socket_alone(view: FakeView, tmp_path: Path) -> None:
    """The old agent was still stopping when the new one had its socket in place already."""
    path = tmp_path / "t.sock"
    app = make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE)
    old = serve_unix(app, path)
    path.unlink()
    new = serve_unix(app, path)
    old.close()
    assert fetch(new, "/livez")[0] == 200
    new.close()


def test_what_cannot_be_served_says_why(view: FakeView, tcp: Server, tmp_path: Path) -> None:
    """'OSError: [Errno 98]' at 3 a.m.; the message names the key, the value and the next step."""
    app = make_app(view, CATALOGUE, lambda: NOW, routes=PUBLIC)
    with pytest.raises(CannotServe, match=r"listen: '127\.0\.0\.1:\d+': Address already in use; .*ss -ltnp"):
        serve_tcp(app, tcp.address)
    with pytest.raises(CannotServe, match="no such address"):
        serve_tcp(app, "192.0.2.1:0")
    with pytest.raises(CannotServe, match="is not host:port; write 127"):
        serve_tcp(app, "9959")
    plain = tmp_path / "file"
    plain.write_text("precious")
    with pytest.raises(CannotServe, match="exists and is no socket"):
        serve_unix(app, plain)
    assert plain.read_text() == "precious"
    with pytest.raises(CannotServe, match="must be a folder that this user may write"):
        serve_unix(app, plain / "t.sock")
    with pytest.raises(CannotServe, match="longer than 106 bytes"):
        serve_unix(app, tmp_path / ("x" * 120))


def test_addresses_are_split() -> None:
    """IPv6 needs its brackets, else the port cannot be told from the address."""
    assert split_address("127.0.0.1:9959") == ("127.0.0.1", 9959)
    assert split_address("[::1]:9959") == ("::1", 9959)
    assert split_address(":9959") == ("", 9959)
    for wrong in ("::1:9959", "host", "host:", "host:http", "host:70000"):
        with pytest.raises(CannotServe):
            split_address(wrong)


def test_a_stuck_client_does_not_keep_the_server_from_stopping(view: FakeView) -> None:
    """SIGTERM has 5 s; a half-sent request must not use them up."""
    server = serve_tcp(make_app(view, CATALOGUE, lambda: NOW, routes=PUBLIC), "127.0.0.1:0")
    host, port = split_address(server.address)
    with socket.create_connection((host, port)) as stuck:
        stuck.sendall(b"GET /livez HT")
        assert fetch(server, "/livez")[0] == 200
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < 5.0
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


def test_a_loop_that_is_awake_closes_before_it_is_woken(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has just ended, so the loop runs our wish at once, and its own pipe is gone when we write to it."""
    server = serve_tcp(make_app(view, CATALOGUE, lambda: NOW, routes=PUBLIC), "127.0.0.1:0")
    trigger = server._server.trigger
    write = trigger._physical_pull

    def late() -> None:
        write()  # as the worker did
        server._thread.join(30)
        write()

    monkeypatch.setattr(trigger, "_physical_pull", late)
    server.close()

    assert not server._thread.is_alive()


def test_many_ask_at_once(tcp: Server) -> None:
    """Eight scrapers at once all get whole pages from two threads."""
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(len(fetch(tcp, "/healthz")[2]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == 8
    assert len(set(got)) == 1


def test_systemd_is_told(tmp_path: Path) -> None:
    """Type=notify waits for READY=1; without systemd nothing happens."""
    assert not sdnotify.notify("READY=1", env={})
    assert not sdnotify.notify("READY=1", env={"NOTIFY_SOCKET": str(tmp_path / "gone")})
    for address in (str(tmp_path / "n"), f"@tocsin-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind("\0" + address[1:] if address[0] == "@" else address)
            systemd.settimeout(5)
            assert sdnotify.notify("READY=1", "STATUS=watching 8 GPUs", env={"NOTIFY_SOCKET": address})
            assert systemd.recv(1000) == b"READY=1\nSTATUS=watching 8 GPUs"


@pytest.mark.parametrize("spec", [spec for spec, _ in SIGNALS.values()], ids=lambda spec: str(spec.id))
def test_every_signal_has_a_name_as_a_metric(spec: SignalSpec) -> None:
    """A signal with a new unit was added, and the first scrape that met it failed as a whole."""
    assert metric_name(spec).startswith("tocsin_")
    assert spec.help


def test_incidents_and_reviews_are_told_on_the_socket(view: FakeView, tmp_path: Path) -> None:
    """For `tocsin report incident` and `tocsin review`: an id has slashes in it, and a wrong one says what to do."""
    server = serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), tmp_path / "s")
    try:
        name = told_incident.record()["id"]
        assert client.ask(tmp_path / "s", f"/incidents/{name}") == told_incident.told()
        assert client.ask(tmp_path / "s", "/incidents?since=0")[0]["id"] == name
        assert client.ask(tmp_path / "s", "/review?last=30d")["pages"]["incidents"] == 2
        for wrong, status in (("/incidents/none", 404), ("/incidents?since=x", 400), ("/review?last=soon", 400)):
            with pytest.raises(client.AgentError) as error:
                client.ask(tmp_path / "s", wrong)
            assert error.value.status == status
    finally:
        server.close()
