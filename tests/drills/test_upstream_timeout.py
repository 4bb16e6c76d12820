"""upstream-timeout: what is planned and proven, and the fault itself between network namespaces."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drills import nft
from drills.faults import upstream_timeout
from drills.faults.upstream_timeout import FAULT, shape_of
from drills.model import Drill, Plan, Refused
from drills.old_connections import parse_old
from drills.proxy import enter_netns
from tests.drills.netns import NEEDS, Lab, Netns, ask, lab, says
from tests.needs import need

PORT = 8000
PACE_S = 0.05  # of a client after each answer or error
RUN = "slow-answers-20261129T220000Z-0a1b"
CLIENT, ENGINE, CLIENT6, ENGINE6 = "10.77.0.1", "10.77.0.2", "fd77::1", "fd77::2"

# An engine: GET /fast answers at once, /stream?n sends n chunks, one each 0.1 s; kept connections, HTTP/1.1, v4 and v6.
SERVER = """
import socket, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self):
        if self.path.startswith("/stream"):
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            for n in range(int(self.path.partition("?")[2])):
                self.wfile.write(b"7\\r\\ntoken%02d\\r\\n" % n); time.sleep(0.1)
            self.wfile.write(b"0\\r\\n\\r\\n")
        else:
            body = self.client_address[0].encode()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    def handle_error(self, *words): pass
    request_queue_size = 128
server = Server(("::", int(sys.argv[1])), Handler)
print("up", flush=True)
server.serve_forever()
"""

# A holder in short: puts the plan in, then does what it is told.
HOLDER = """
import json, sys, msgspec
from drills.faults.upstream_timeout import FAULT
from drills.model import Plan
held = FAULT.inject(msgspec.json.decode(sys.argv[1], type=Plan), (sys.stdout.fileno(),))
print("in", flush=True)
for line in sys.stdin:
    print(json.dumps(held.sample() if line.strip() == "sample" else held.undo()), flush=True)
"""


def drill(params: Mapping[str, Any], **target: Any) -> Drill:
    """A drill of this fault."""
    return Drill("slow-answers", "upstream-timeout", target={"port": PORT, **target}, params=params, for_s=20.0)


# Read and judged: pure


SS_LINE = (
    "{queues} {local} {peer} cubic wscale:10,10 rto:204 rtt:0.06/0.03 bytes_sent:12 send 465bps lastsnd:{snd}"
    " lastrcv:{rcv} lastack:4 pacing_rate 1085bps delivered:2\n"
)


@pytest.mark.parametrize(
    ("story", "queues", "answered_ms", "asked_ms", "idle"),
    [
        ("answered, then quiet", "0 0", 600, 650, True),
        ("a stream between two tokens", "0 0", 300, 5000, False),
        ("a request that waits for its first token", "0 0", 9000, 3000, False),
        ("the next request came within the clock's tick after an answer", "0 0", 1000, 1000, False),
        ("an answer within the clock's tick, long ago", "0 0", 2500, 2500, True),
        ("opened long ago and never used", "0 0", 60_000, 60_000, True),
        ("its answer is still on the way", "0 3", 600, 650, False),
    ],
)  # fmt: skip
def test_only_idle_connections_are_ended(story: str, queues: str, answered_ms: int, asked_ms: int, idle: bool) -> None:
    """The drill killed streams that ran, and counted its own kills as the engine's errors."""
    names = {"queues": queues, "local": "10.0.0.2:8000", "peer": "10.0.0.1:5555"}
    at_server = SS_LINE.format(**names, snd=answered_ms, rcv=asked_ms)
    at_client = SS_LINE.format(**names, snd=asked_ms, rcv=answered_ms)

    assert [one.idle for one in parse_old(at_server, set(), at_server=True)] == [idle], story
    assert [one.idle for one in parse_old(at_client, set(), at_server=False)] == [idle], story


def test_connections_through_the_proxy_are_not_old() -> None:
    """Each second the drill killed those very connections that it delayed."""
    lines = [
        SS_LINE.format(queues="0 0", local="[::ffff:10.0.0.2]:8000", peer=peer, snd=900, rcv=950)
        for peer in ("[::ffff:10.0.0.1]:5555", "[::ffff:10.0.0.2]:40001")
    ]
    found = list(parse_old("".join(lines), {("10.0.0.2", 40001)}, at_server=True))

    assert [(one.local, one.peer) for one in found] == [("[::ffff:10.0.0.2]:8000", "[::ffff:10.0.0.1]:5555")]


LOG = {
    "connections": 3, "answers": 200, "off": 0, "hung": 0, "status": 0, "passed_tls": 0, "min_s": 5.0,
    "median_s": 5.001, "max_s": 5.1, "redirected": 3, "armed": True, "old_ended": 2, "old_left": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "change", "want", "says_"),
    [
        ({}, {}, True, "200 answers delayed by 5.000 / 5.001 / 5.100 s (min / median / max), asked 5 ± 0.2"),
        ({}, {"off": 10}, True, "10 beyond that"),
        ({}, {"off": 11}, False, "11 beyond that"),
        ({}, {"answers": 0}, False, "no answer was delayed (3 connections were redirected)"),
        ({}, {"armed": False}, False, "the kernel's deadline has ended it"),
        ({}, {"old_left": 4}, True, "old connections not covered: 4"),
        ({}, {"old_left": None}, True, "old connections not covered: unknown"),
        ({"mode": "hang"}, {"hung": 7}, True, "7 answers were held"),
        ({"mode": "status", "status": 429}, {"status": 0, "passed_tls": 9}, False, "9 TLS connections passed"),
    ],
)
def test_the_proxy_s_log_is_the_proof(
    params: dict[str, Any], change: dict[str, Any], want: bool, says_: str
) -> None:
    """A drill passed although its proxy had delayed nobody: the router had kept its old connections."""
    ok, words = FAULT.proven(plan_with(params), [{"error": "too early"}, {**LOG, **change}])

    assert ok is want
    assert says_ in words


def test_no_log_is_no_proof() -> None:
    """The proxy had died; what it had counted before proved nothing about the rest."""
    assert FAULT.proven(plan_with({}), []) == (False, "the proxy's log was never read")
    assert FAULT.proven(plan_with({}), [LOG, {"error": "the proxy ended"}]) == (False, "the proxy ended")


def plan_with(params: Mapping[str, Any]) -> Plan:
    """A plan as far as the proof reads it."""
    return Plan("upstream-timeout", RUN, [], [], [], facts={"shape": msgspec.to_builtins(shape_of(params))})


@pytest.mark.parametrize(
    ("params", "says_"),
    [
        ({"mode": "slow"}, "mode 'slow': write one of turn, chunk, hang, status"),
        ({"delay_s": 0.0}, "delay_s 0: write more than 0"),
        ({"mode": "status", "status": 500}, "status 500: write 429 or 503"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], says_: str) -> None:
    """A typing error in a drill became its default, and the drill proved something else."""
    with pytest.raises(Refused, match=says_.replace("(", r"\(")):
        shape_of(params)


def test_a_retry_after_is_never_nothing() -> None:
    """`retry_after: 500ms` was written as `Retry-After: 0`, and every client asked again at once."""
    assert shape_of({"mode": "status", "retry_after_s": 0.5}).retry_after_s == 1
    assert shape_of({"mode": "status", "retry_after_s": 2.0}).retry_after_s == 2


def test_status_inside_tls_is_refused_at_once() -> None:
    """Nobody can answer 503 inside somebody else's TLS: said before the drill, not by a report without proof."""
    with pytest.raises(Refused, match="cannot answer inside TLS"):
        FAULT.plan(drill({"mode": "status"}, url="https://127.0.0.1:8000"), RUN)
    with pytest.raises(Refused, match="port 22 is ssh"):
        FAULT.plan(drill({}, port=22), RUN)
    with pytest.raises(Refused, match="needs a port"):
        FAULT.plan(replace(drill({}), target={"pid": 1}), RUN)


# Between namespaces


@dataclass
class Scene:
    """A client and an engine, each in its namespace."""

    net: Lab
    client: Netns
    engine: Netns
    before: dict[str, str]

    def rulesets(self) -> dict[str, str]:
        """What nft knows in each of them."""
        return {one.name: one.ruleset() for one in (self.client, self.engine)}

    def plan(self, params: Mapping[str, Any], **target: Any) -> Plan:
        """The plan, which touches nothing."""
        plan = FAULT.plan(drill(params, **{"netns": self.engine.path, **target}), RUN)
        assert self.rulesets() == self.before
        return msgspec.json.decode(msgspec.json.encode(plan), type=Plan)  # as the ledger gives it back

    @contextmanager
    def fault(self, plan: Plan, fds: tuple[int, ...] = ()) -> Iterator[upstream_timeout.Redirect]:
        """The fault, in; afterwards nothing of it is there."""
        held = FAULT.inject(plan, fds)
        try:
            yield held
        finally:
            held.undo()
            held.undo()
            self.is_clean(plan)

    def is_clean(self, plan: Plan) -> None:
        """Every ruleset as it was, byte by byte; nobody listens; nothing is left."""
        assert FAULT.left(plan) == []
        assert self.rulesets() == self.before
        assert listening(self.engine, plan.facts["proxy_port"]) == ""
        assert listening(self.client, plan.facts["proxy_port"]) == ""


def listening(netns: Netns, port: int) -> str:
    """Who listens on a port."""
    return netns.run("ss", "-Hltn", f"sport = :{port}")


@pytest.fixture
def scene() -> Iterator[Scene]:
    """client | engine, over IPv4 and IPv6; a ruleset of somebody else's is in each."""
    need(*NEEDS, "ss")
    with lab() as net:
        client, engine = net.namespace("client"), net.namespace("engine")
        net.link(client, f"{CLIENT}/24", engine, f"{ENGINE}/24")
        net.link(client, f"{CLIENT6}/64", engine, f"{ENGINE6}/64")
        for one in (client, engine):
            one.run("nft", "-f", "-", stdin="table inet theirs { chain in { type filter hook input priority 0; }; }\n")
        assert says(net.start(engine, sys.executable, "-c", SERVER, str(PORT))) == "up"
        yield Scene(net, client, engine, {one.name: one.ruleset() for one in (client, engine)})


def dial(netns: Netns, address: str, port: int = PORT) -> socket.socket:
    """A connection that was made in a namespace; it may be used from anywhere."""
    made: list[socket.socket | OSError] = []

    def connect() -> None:
        enter_netns(Path(netns.path))
        try:
            made.append(socket.create_connection((address, port), timeout=10.0))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


@dataclass
class Answer:
    """What a client got."""

    status: int
    first_byte_s: float
    body: str
    retry_after: str | None


def get(sock: socket.socket, path: str = "/fast") -> Answer:
    """One request on a kept connection."""
    start = time.monotonic()
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: engine\r\n\r\n".encode())
    response = http.client.HTTPResponse(sock)
    response.begin()  # returns with the head
    first_s = time.monotonic() - start
    return Answer(response.status, first_s, response.read().decode(), response.getheader("Retry-After"))


def get_new(netns: Netns, address: str, path: str = "/fast") -> Answer:
    """One request on a connection of its own."""
    with dial(netns, address) as sock:
        return get(sock, path)


def at_once(*calls: Callable[[], Answer]) -> list[Answer]:
    """The answers to requests that are made side by side."""
    answers: dict[int, Answer] = {}
    threads = [threading.Thread(target=lambda n=n, c=c: answers.update({n: c()})) for n, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[n] for n in range(len(calls))]


def late(answer: Answer, delay_s: float) -> bool:
    """Whether an answer came that much later, or a little more: this machine may be busy."""
    return delay_s <= answer.first_byte_s <= delay_s + 0.5


def counted(held: upstream_timeout.Redirect, answers: int) -> Mapping[str, Any]:
    """The proxy's log once it has counted so many: it counts when it has sent."""
    until(lambda: held.sample()["answers"] == answers)
    return held.sample()


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


@pytest.mark.heavy
def test_every_way_to_the_engine_is_delayed(scene: Scene) -> None:
    """Clients from elsewhere, by IPv4 and IPv6, and those on the node itself: a fault at one door is no proof."""
    ways = [(scene.client, ENGINE), (scene.client, ENGINE6)]
    ways += [(scene.engine, address) for address in ("127.0.0.1", "::1", ENGINE, ENGINE6)]
    plan = scene.plan({"delay_s": 1.0})
    with scene.fault(plan) as held:
        answers = at_once(*(partial(get_new, *way, "/stream?3") for way in ways))
        log = counted(held, 6)

    assert all(late(answer, 1.0) for answer in answers), answers
    assert {(answer.status, answer.body) for answer in answers} == {(200, "token00token01token02")}
    assert (log["redirected"], log["armed"]) == (6, True)
    assert FAULT.proven(plan, [log])[0]
    assert get_new(scene.client, ENGINE).first_byte_s < 0.5
    assert any("this machine's address" in note for note in plan.notes)
    assert get_new(scene.client, ENGINE).body.endswith(CLIENT)


@pytest.mark.heavy
def test_five_seconds(scene: Scene) -> None:
    """The number of the drill: every answer 5 s ± 0.2 later, the second on a kept connection too."""
    plan = scene.plan({"delay_s": 5.0})
    with scene.fault(plan) as held, dial(scene.client, ENGINE) as kept:
        took_s = [get(kept).first_byte_s for _ in range(2)]
        log = counted(held, 2)

    assert all(4.8 <= each <= 5.2 for each in took_s), took_s
    assert 5.0 <= log["min_s"] <= log["max_s"] <= 5.2
    assert FAULT.proven(plan, [log])[1].startswith("2 answers delayed by 5.0")


@pytest.mark.heavy
@pytest.mark.parametrize("address", [ENGINE, ENGINE6])
def test_idle_connections_of_before_meet_the_fault_too(scene: Scene, address: str) -> None:
    """The router kept its connections: the redirect saw none of them, and users saw no delay for an hour."""
    plan = scene.plan({"delay_s": 0.5})
    with dial(scene.client, address) as idle, dial(scene.client, address) as busy:
        assert get(idle).first_byte_s < 0.2
        streamed: list[Answer] = []
        stream = threading.Thread(target=lambda: streamed.append(get(busy, "/stream?60")))
        stream.start()
        with scene.fault(plan) as held:
            until(lambda: held.sample()["old_ended"] == 1)
            with pytest.raises(OSError, match=r"reset|abort|peer"):
                get(idle)
            assert held.sample()["old_left"] == 1
            with dial(scene.client, address) as delayed:
                assert late(get(delayed), 0.5)
                time.sleep(2.5)  # idle as well, but ours
                held.sample()
                assert late(get(delayed), 0.5)
            stream.join()
            assert streamed[0].body.endswith("token58token59")
            until(lambda: held.sample()["old_left"] == 0)
            assert held.sample()["old_ended"] == 2


@pytest.mark.heavy
@pytest.mark.parametrize(("side", "address"), [("engine", ENGINE), ("engine", ENGINE6), ("client", ENGINE)])
def test_busy_connections_of_before_are_ended_between_two_answers(scene: Scene, side: str, address: str) -> None:
    """A router under load never let its kept connections rest: not one answer was delayed, the drill proved nothing."""
    where = {"netns": scene.client.path, "address": address} if side == "client" else {}
    plan = scene.plan({"delay_s": 0.5}, **where)
    answers: list[Answer] = []
    errors: list[Exception] = []

    def ask_on(sock: socket.socket, path: str) -> None:
        with sock:
            try:
                while True:
                    answers.append(get(sock, path))
                    time.sleep(0.05)  # a router's next request is not there yet
            except http.client.IncompleteRead as error:
                errors.append(error)
            except (OSError, http.client.HTTPException):
                return  # between two answers

    paths = ["/fast", "/stream?3", "/stream?9"]
    clients = [threading.Thread(target=ask_on, args=(dial(scene.client, address), path)) for path in paths]
    for client in clients:
        client.start()
    until(lambda: len(answers) >= 6)
    with scene.fault(plan) as held:
        until(lambda: (seen := held.sample())["old_left"] == 0 and seen["old_ended"] == 3)
        for client in clients:
            client.join()
        assert late(get_new(scene.client, address), 0.5)

    assert errors == []
    assert {answer.status for answer in answers} == {200}


@pytest.mark.heavy
@pytest.mark.parametrize("address", [ENGINE, ENGINE6])
def test_at_the_client_of_the_upstream(scene: Scene, address: str) -> None:
    """One router's upstream is slow; whoever else asks the same engine is not to notice."""
    plan = scene.plan({"delay_s": 0.5}, netns=scene.client.path, address=address)
    with dial(scene.client, address) as idle:
        assert get(idle).status == 200
        with scene.fault(plan) as held:
            assert late(get_new(scene.client, address), 0.5)
            assert get_new(scene.engine, address).first_byte_s < 0.5
            until(lambda: held.sample()["old_ended"] == 1)
            with pytest.raises(OSError, match=r"reset|abort|peer"):
                get(idle)


@pytest.mark.heavy
def test_status_and_hang(scene: Scene) -> None:
    """A 429 with Retry-After for every request; then an upstream that stops in the middle of an answer."""
    plan = scene.plan({"mode": "status", "status": 429, "retry_after_s": 3})
    with scene.fault(plan) as held:
        answer = get_new(scene.client, ENGINE)
        assert (answer.status, answer.retry_after) == (429, "3")
        assert FAULT.proven(plan, [held.sample()]) == (
            True, "1 requests were answered 429, 0 TLS connections passed; 0 connections of before were ended",
        )  # fmt: skip
    plan = scene.plan({"mode": "hang", "after_bytes": 200})
    with ExitStack() as stack:
        with scene.fault(plan) as held:
            sock = stack.enter_context(dial(scene.client, ENGINE))
            sock.sendall(b"GET /stream?20 HTTP/1.1\r\nHost: engine\r\n\r\n")
            got = b""
            until(lambda: held.sample()["hung"] == 1)
            while len(got) < 200:
                got += sock.recv(200)
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            sock.settimeout(10)
        while not got.endswith(b"0\r\n\r\n"):  # what was held came when the fault ended, and the rest behind it
            got += sock.recv(4096)
        assert b"token19" in got


@pytest.mark.heavy
def test_undo_lets_running_answers_end(scene: Scene) -> None:
    """The end of the fault cut every stream that ran: more errors than the fault itself had made."""
    plan = scene.plan({"delay_s": 0.3})
    held = FAULT.inject(plan, ())
    streamed: list[Answer] = []
    stream = threading.Thread(target=lambda: streamed.append(get_new(scene.client, ENGINE, "/stream?15")))
    stream.start()
    until(lambda: held.sample()["answers"] == 1)
    undo = threading.Thread(target=held.undo)
    undo.start()
    until(lambda: get_new(scene.client, ENGINE).first_byte_s < 0.3, 1.0)  # new ones go straight at once
    assert undo.is_alive()
    stream.join()
    undo.join()

    assert streamed[0].body.endswith("token14")
    scene.is_clean(plan)


@pytest.mark.heavy
def test_nobody_waits_for_a_drain_that_nobody_waits_for(scene: Scene) -> None:
    """The runner was killed; its holder went on draining for half a minute, and the sweep found a table of ours."""
    plan = scene.plan({"delay_s": 0.3})
    reads, writes = os.pipe()
    held = FAULT.inject(plan, (writes,))
    with dial(scene.client, ENGINE) as sock:
        sock.sendall(b"GET /stream?50 HTTP/1.1\r\nHost: engine\r\n\r\n")
        until(lambda: held.sample()["answers"] == 1)
        os.close(reads)
        start = time.monotonic()
        held.undo()
        assert time.monotonic() - start < 10.0
    os.close(writes)
    scene.is_clean(plan)


@pytest.mark.heavy
def test_a_killed_proxy_takes_its_redirect_along(scene: Scene) -> None:
    """The proxy was killed and its redirect was not: every connection was refused until somebody came by."""
    plan = scene.plan({"delay_s": 1.0})
    words = [sys.executable, "-c", HOLDER, msgspec.json.encode(plan).decode()]
    holder = scene.net.start(scene.client, *words)  # elsewhere: it must find the engine's namespace by itself
    assert says(holder) == "in"
    assert late(get_new(scene.client, ENGINE), 1.0)
    until(lambda: json.loads(ask(holder, "sample"))["answers"] == 1)
    assert [one.command.split()[0] for one in FAULT.left(plan)] == ["kill"]
    results: list[str] = []

    def ask_on() -> None:
        while len(results) < 20:
            try:
                results.append("late" if get_new(scene.client, ENGINE).first_byte_s >= 1.0 else "ok")
            except (OSError, http.client.HTTPException):
                results.append("error")
            time.sleep(PACE_S)

    client = threading.Thread(target=ask_on)
    holder.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    client.start()
    until(lambda: scene.rulesets() == scene.before, 1.0)
    gone_s = time.monotonic() - killed_at  # 12 ms; more where the machine is busy
    client.join()

    assert results.count("error") <= 1 + int(gone_s / PACE_S), (results, gone_s)
    assert results[-15:] == ["ok"] * 15, results
    scene.is_clean(plan)


@pytest.mark.heavy
def test_heal_ends_what_a_stuck_holder_holds(scene: Scene) -> None:
    """The holder was stopped by a debugger: no end-of-file comes, and nobody else may delete its table."""
    plan = scene.plan({"delay_s": 0.1})
    holder = scene.net.start(scene.client, sys.executable, "-c", HOLDER, msgspec.json.encode(plan).decode())
    assert says(holder) == "in"
    holder.send_signal(signal.SIGSTOP)
    FAULT.undo(plan)
    FAULT.undo(plan)

    assert scene.rulesets() == scene.before
    assert get_new(scene.client, ENGINE).first_byte_s < 0.1
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_the_kernel_s_own_deadline(scene: Scene) -> None:
    """All of ours hung, and the redirect still ended at its time."""
    plan = scene.plan({"delay_s": 0.4})
    assert "timeout 110s" in plan.facts["text"]
    short = replace(plan, facts={**plan.facts, "text": plan.facts["text"].replace("timeout 110s", "timeout 1s")})
    with scene.fault(short) as held:
        assert get_new(scene.client, ENGINE).first_byte_s >= 0.4
        until(lambda: not held.sample()["armed"], 3.0)
        assert get_new(scene.client, ENGINE).first_byte_s < 0.2


@pytest.mark.heavy
def test_what_cannot_be_is_refused(scene: Scene) -> None:
    """No engine there, another one since the plan, a port taken meanwhile: nothing is touched, and it says why."""
    with pytest.raises(Refused, match="no process that we can see listens"):
        scene.plan({}, netns=scene.client.path)
    plan = scene.plan({})
    main = {**plan.facts["main"], "start_ticks": 1}
    with pytest.raises(Refused, match="ended since the plan was made"):
        FAULT.inject(replace(plan, facts={**plan.facts, "main": main}), ())
    with pytest.raises(Refused, match=f"cannot listen on port {PORT}: .*in use"):
        FAULT.inject(replace(plan, facts={**plan.facts, "proxy_port": PORT}), ())
    broken = replace(plan, facts={**plan.facts, "text": plan.facts["text"].replace("redirect", "rediret")})
    with pytest.raises(nft.NftError, match="syntax error"):
        FAULT.inject(broken, ())
    scene.is_clean(plan)


@pytest.mark.heavy
def test_a_dial_of_the_proxy_itself_is_refused(scene: Scene) -> None:
    """Somebody scanned the node's ports and found an open relay to the engine, or a loop."""
    plan = scene.plan({"delay_s": 0.1})
    with scene.fault(plan) as held:
        for netns, address in ((scene.client, ENGINE), (scene.client, ENGINE6), (scene.engine, "127.0.0.1")):
            with pytest.raises(ConnectionResetError), dial(netns, address, plan.facts["proxy_port"]) as sock:
                get(sock)
        log = held.sample()

    assert (log["refused"], log["connections"], log["redirected"]) == (3, 0, 0)
    with suppress(OSError):
        dial(scene.client, ENGINE, plan.facts["proxy_port"]).close()
        pytest.fail("it still listens")


RUNNER = """
import sys, time, msgspec
from pathlib import Path
from drills import holder
from drills.ledger import Ledger
from drills.model import Plan, State
folder = Path(sys.argv[1])
ledger = Ledger.create(folder, {"drill": "slow-answers"})
ledger.write(State.ARMED, plan=msgspec.json.decode(sys.argv[2]))
held = holder.start(folder, 60.0)
held.inject(10.0)
print(held.process_id.pid, flush=True)
for line in sys.stdin:
    print([one.what for one in held.revert(40.0)], flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("ends", ["reverted", "runner killed", "holder killed", "both killed"])
def test_with_the_real_holder(scene: Scene, tmp_path: Path, ends: str) -> None:
    """The whole chain, ended in each way while a stream runs: after a second nothing of it is left."""
    plan = scene.plan({"delay_s": 0.3})
    words = [sys.executable, "-c", RUNNER, str(tmp_path / RUN), msgspec.json.encode(plan).decode()]
    runner = scene.net.start(scene.client, *words)
    holder_pid = int(says(runner))
    assert len(FAULT.left(plan)) == 2  # the table; the holder that listens
    with dial(scene.client, ENGINE) as sock:
        sock.sendall(b"GET /stream?20 HTTP/1.1\r\nHost: engine\r\n\r\n")
        assert sock.recv(1) == b"H"
        if ends == "reverted":
            assert ask(runner, "revert") == "[]"
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(4096)
        if ends in {"runner killed", "both killed"}:
            runner.kill()
        if ends in {"holder killed", "both killed"}:
            os.kill(holder_pid, signal.SIGKILL)
        until(lambda: FAULT.left(plan) == [] and scene.rulesets() == scene.before, 1.0)
    assert get_new(scene.client, ENGINE).first_byte_s < 0.2
    scene.is_clean(plan)
