"""packet-loss: dropped as asked, proven by counters, and not a byte of it left; with the kernel's own nftables."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drills import holder, nft, rehearsal
from drills.faults import packet_loss
from drills.faults.packet_loss import FAULT, Match, foreign_loss, loss_text, probes_of, rehearse
from drills.ledger import Ledger
from drills.model import Drill, Plan, Refused, State
from tests.drills.netns import NEEDS, Lab, Netns, ask, lab, says
from tests.needs import need

CLIENT, ENGINE, PORT, NEIGHBOUR = "10.77.0.1", "10.77.0.2", 8000, 8001
PACKETS = 20_000
OWNED = "table ip owned { chain in { type filter hook input priority 0; accept; }; }"

# An engine's port, and what a test asks of its namespace: how many datagrams came to each of two ports.
SERVER = """
import socket, sys
bind, *ports = sys.argv[1:]
family = socket.AF_INET6 if ":" in bind else socket.AF_INET
listener = socket.create_server((bind, int(ports[0])), family=family)
came = []
for port in ports:
    taker = socket.socket(family, socket.SOCK_DGRAM)
    taker.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: all of them wait until they are counted
    taker.bind((bind, int(port)))
    taker.settimeout(0.0)
    came.append(taker)
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("send"):
        _, address, count = line.split()
        for _ in range(int(count)):
            came[0].sendto(b"x", (address, 9))
        print("sent", flush=True)
    else:
        counts = []
        for taker in came:
            count = 0
            try:
                while True:
                    taker.recv(64)
                    count += 1
            except BlockingIOError:
                counts.append(str(count))
        print(" ".join(counts), flush=True)
"""
SEND = """
import socket, sys
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((address, port))
    for _ in range(count):
        s.send(b"x")
"""
# What the holder does with a fault, and no more.
HOLDER = """
import json, sys
import msgspec
from drills.faults.packet_loss import FAULT
from drills.model import Plan
held = FAULT.inject(msgspec.convert(json.loads(sys.argv[1]), Plan), [])
print("injected", flush=True)
for line in sys.stdin:
    print(json.dumps(held.sample()), flush=True)
"""


@dataclass
class Scene:
    """A client and an engine, a cable between them."""

    net: Lab
    client: Netns
    engine: Netns
    server: subprocess.Popen[str]

    def plan(self, *, protocol: str = "udp", run: str = "loss-20260105T100000Z-aaaa", **params: Any) -> Plan:
        """A plan for the engine's port; the tests' packets are datagrams, which nobody sends again."""
        target = {"port": PORT, "netns": self.engine.path, "address": ENGINE}
        plan = FAULT.plan(Drill("loss", "packet-loss", target, params=params, for_s=5.0), run)
        return by(plan, protocol)

    def send(self, count: int, port: int = PORT) -> None:
        """Datagrams from the client to the engine; returns when they are there."""
        self.client.run(sys.executable, "-c", SEND, ENGINE, str(port), str(count))

    def came(self) -> tuple[int, int]:
        """Datagrams that reached the engine since it was last asked: to its port, to the one beside it."""
        first, second = ask(self.server, "count").split()
        return int(first), int(second)

    def hold(self, plan: Plan) -> subprocess.Popen[str]:
        """A process that holds the fault."""
        words = [sys.executable, "-c", HOLDER, msgspec.json.encode(plan).decode()]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.net.started.append(holder)
        assert says(holder) == "injected"
        return holder


def by(plan: Plan, protocol: str, deadline_s: float | None = None) -> Plan:
    """The same plan for another protocol, or with another deadline in the kernel."""
    facts = json.loads(json.dumps(dict(plan.facts)))
    for entry in facts["places"]:
        entry["match"]["protocol"] = protocol
        deadline = deadline_s or facts["deadline_s"]
        entry["text"] = loss_text(facts["table"], plan.run, Match(**entry["match"]), facts["per_mille"], deadline)
    return replace(plan, facts=facts)


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Two namespaces and a server."""
    need(*NEEDS)
    with lab() as net:
        client, engine = net.namespace("client"), net.namespace("engine")
        net.link(client, f"{CLIENT}/24", engine, f"{ENGINE}/24")
        server = net.start(engine, sys.executable, "-c", SERVER, "0.0.0.0", str(PORT), str(NEIGHBOUR))
        assert says(server) == "ready"
        # What a host has already: it must neither be touched nor touch us.
        for netns in (client, engine):
            netns.run("nft", "-f", "-", stdin=OWNED)
        yield Scene(net, client, engine, server)


def within(limit_s: float, what: Callable[[], bool]) -> float:
    """Seconds until `what` is so; the test fails where it takes longer than `limit_s`."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < limit_s, f"not within {limit_s:g} s"
        time.sleep(0.005)
    return time.monotonic() - start


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("share", "least", "most"),  # of 20,000, by hand: the larger of 3 points (600) and 3 sigma (127 at 10 %)
    [(0.05, 400, 1600), (0.10, 1400, 2600), (0.30, 5400, 6600), (1.0, 20_000, 20_000)],
)
def test_as_asked_and_nothing_else(scene: Scene, share: float, least: int, most: int) -> None:
    """A drill once said 10 % and dropped none, another dropped the neighbour's packets too."""
    before = scene.engine.ruleset()
    plan = scene.plan(share=share)
    held = FAULT.inject(plan, [])
    try:
        scene.send(PACKETS)
        scene.send(1000, NEIGHBOUR)
        came, beside = scene.came()
        sample = held.sample()
    finally:
        held.undo()

    counted = sample["tables"]["engine"]
    assert least <= PACKETS - came <= most
    assert counted == {"arrived": PACKETS, "met": PACKETS, "dropped": PACKETS - came, "armed": True}
    assert beside == 1000
    assert FAULT.proven(plan, [sample])[0]
    held.undo()
    assert scene.engine.ruleset() == before
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_killed_holder_leaves_nothing(scene: Scene) -> None:
    """The agent was killed by the OOM killer in the middle of a drill, and the engine lost packets until Monday."""
    before = scene.engine.ruleset()
    plan = scene.plan()
    for _ in range(5):
        holder = scene.hold(plan)
        assert plan.facts["table"] in scene.engine.ruleset()
        scene.engine.run("nft", "flush", "ruleset")
        assert plan.facts["table"] in scene.engine.ruleset()
        scene.engine.run("nft", "-f", "-", stdin=before)

        holder.send_signal(signal.SIGKILL)

        within(1.0, lambda: scene.engine.ruleset() == before and FAULT.left(plan) == [])


@pytest.mark.heavy
def test_the_printed_command_ends_it(scene: Scene) -> None:
    """The runbook said `nft delete table`; the kernel said EPERM, since the table's owner was alive."""
    before = scene.engine.ruleset()
    plan = scene.plan()
    holder = scene.hold(plan)
    with pytest.raises(AssertionError, match="Operation not permitted"):
        scene.engine.run("nft", "delete", "table", "inet", plan.facts["table"])
    (left,) = FAULT.left(plan)
    assert plan.facts["table"] in left.what

    subprocess.run(shlex.split(left.command), check=True)

    within(1.0, lambda: FAULT.left(plan) == [])
    assert scene.engine.ruleset() == before
    # And the holder's next sample says so: what vanished is no proof.
    sample = json.loads(ask(holder, "sample"))
    assert "No such file or directory" in sample["tables"]["engine"]["gone"]
    assert FAULT.proven(plan, [sample])[0] is False


@pytest.mark.heavy
def test_a_table_without_an_owner(scene: Scene) -> None:
    """Whatever the reason for which it is there, the command that is printed deletes it, and so does heal, twice."""
    before = scene.engine.ruleset()
    plan = scene.plan()
    make = f"table inet {plan.facts['table']} {{ }}"
    scene.engine.run("nft", "-f", "-", stdin=make)
    (left,) = FAULT.left(plan)
    subprocess.run(shlex.split(left.command), check=True)
    assert FAULT.left(plan) == []

    scene.engine.run("nft", "-f", "-", stdin=make)
    FAULT.undo(plan)
    FAULT.undo(plan)
    assert FAULT.left(plan) == []
    assert scene.engine.ruleset() == before


@pytest.mark.heavy
def test_undo_ends_a_living_owner(scene: Scene) -> None:
    """heal ran while an `nft -i` was still alive in a process tree that nobody knew any more."""
    before = scene.engine.ruleset()
    plan = scene.plan()
    scene.hold(plan)

    FAULT.undo(plan)

    assert FAULT.left(plan) == []
    assert scene.engine.ruleset() == before


@pytest.mark.heavy
def test_deadline_in_the_kernel(scene: Scene) -> None:
    """Everything hung, holder included; the packets passed again at the deadline all the same."""
    plan = by(scene.plan(share=1.0), "udp", deadline_s=1.0)
    held = FAULT.inject(plan, [])
    try:
        scene.send(100)
        assert scene.came() == (0, 0)
        took_s = within(2.0, lambda: not held.sample()["tables"]["engine"]["armed"])
        scene.send(100)
        assert scene.came() == (100, 0)
        proven, why = FAULT.proven(plan, [held.sample()])
    finally:
        held.undo()
    assert took_s < 1.5
    assert (proven, why.partition(": ")[2]) == (False, "the fault stood still while 100 of 200 packets passed")


@pytest.mark.heavy
def test_both_directions(scene: Scene) -> None:
    """A drill lost packets on the way in only and its report said "10 % loss"; answers never lost one."""
    before = scene.client.ruleset(), scene.engine.ruleset()
    plan = scene.plan(share=0.1, direction="both", peer={"netns": scene.client.path})
    rehearse(plan)
    held = FAULT.inject(plan, [])
    try:
        scene.send(PACKETS)
        assert ask(scene.server, f"send {CLIENT} {PACKETS}") == "sent"
        sample = held.sample()
        proven, why = FAULT.proven(plan, [sample])
    finally:
        held.undo()

    for where in ("engine", "peer"):  # 3 points of 20,000 are 600
        assert 1400 <= sample["tables"][where]["dropped"] <= 2600
    assert proven, why
    assert "udp to 10.77.0.2 port 8000: dropped" in why
    assert "udp from 10.77.0.2 port 8000: dropped" in why
    assert not any("inbound only" in note for note in plan.notes)
    assert (scene.client.ruleset(), scene.engine.ruleset()) == before


@pytest.mark.heavy
def test_plan_touches_nothing(scene: Scene) -> None:
    """`tocsin drill plan` on a production node must be as harmless as ls."""
    before = scene.client.ruleset(), scene.engine.ruleset()

    plan = scene.plan(protocol="tcp", direction="both")

    assert (scene.client.ruleset(), scene.engine.ruleset()) == before
    assert plan.notes[0].startswith("inbound only; direction both needs peer.netns")
    assert "CAP_SYS_ADMIN" in plan.needs
    assert f"nsenter --net={scene.engine.path} nft -i" in plan.commands[0].text
    assert msgspec.convert(json.loads(msgspec.json.encode(plan)), Plan).facts == plan.facts


@pytest.mark.heavy
def test_by_pid(scene: Scene) -> None:
    """A pod has no name in /run/netns: the process leads to its namespace and its port."""
    other = scene.net.start(scene.engine, sys.executable, "-c", SERVER, "::", "8100", "8101")
    assert says(other) == "ready"

    plan = FAULT.plan(Drill("loss", "packet-loss", {"pid": other.pid}), "r")

    (place,) = plan.facts["places"]
    assert place["place"]["path"] == f"/proc/{other.pid}/ns/net"
    assert (place["match"]["port"], place["match"]["address"]) == (8100, None)


@pytest.mark.heavy
def test_c094_undo_looks_where_the_fault_went(scene: Scene) -> None:
    """Clean-up went to the usual place while the fault was elsewhere; here even the namespace's name was taken away."""
    plan = scene.plan()
    scene.hold(plan)
    scene.net.start(scene.engine, "cat")
    subprocess.run(scene.client.words("ip", "netns", "delete", scene.engine.name), check=True)
    (left,) = FAULT.left(plan)
    assert "kill -KILL" in left.command

    FAULT.undo(plan)

    assert FAULT.left(plan) == []
    assert "nsenter --net=/proc/" in nft.typed(nft.Place(**plan.facts["places"][0]["place"]), "nft")


@pytest.mark.heavy
def test_another_namespace_under_the_same_name(scene: Scene) -> None:
    """Between plan and injection the pod was replaced, and the new one got the fault of the old."""
    plan = scene.plan()
    scene.server.kill()
    scene.server.wait()
    subprocess.run(scene.client.words("ip", "netns", "delete", scene.engine.name), check=True)
    subprocess.run(scene.client.words("ip", "netns", "add", scene.engine.name), check=True)
    # Where the kernel gave the new one the old one's number, nothing tells them apart, and it is an empty namespace.
    if nft.place_of(scene.engine.path).inode != plan.facts["places"][0]["place"]["inode"]:
        with pytest.raises(nft.GoneError, match="is gone"):
            FAULT.inject(plan, [])
    assert scene.engine.ruleset() == ""
    assert FAULT.left(plan) == []


@pytest.mark.heavy
def test_c093_two_faults_do_not_add_up(scene: Scene) -> None:
    """50 % was put on top of 50 % that an earlier run had left: 75 % was lost, and neither could be told."""
    plan, other = scene.plan(), scene.plan(run="other")
    held = FAULT.inject(other, [])
    before = scene.engine.ruleset()
    with pytest.raises(Refused, match=rf"{other.facts['table']} is in .* already"):
        FAULT.inject(plan, [])  # its holder lives
    assert scene.engine.ruleset() == before
    held.undo()


@pytest.mark.heavy
def test_c093_what_we_left_ourselves_is_cleaned_first(scene: Scene) -> None:
    """A table with our name that nobody holds: the drill was refused until somebody had cleaned by hand."""
    before = scene.engine.ruleset()
    scene.engine.run("nft", "-f", "-", stdin="table inet tocsin_00000000 { }")

    FAULT.inject(scene.plan(), []).undo()

    assert scene.engine.ruleset() == before


def test_c093_a_foreign_netem_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tc qdisc show` tells of somebody else's delay: nothing is put in, and nothing is deleted."""
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'qdisc noqueue 0: dev lo root refcnt 2'\n"
                  "echo 'qdisc netem 8001: root refcnt 2 limit 1000 delay 100ms'\n"
                  f"echo \"$@\" >>{tmp_path}/asked\n")
    tc.chmod(0o755)
    need("nft", "ip", "unshare", "nsenter")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        drill = Drill("loss", "packet-loss", {"port": server.getsockname()[1]})
        with pytest.raises(Refused, match="root qdisc present: netem 8001"):
            FAULT.plan(drill, "r")
    assert (tmp_path / "asked").read_text().split() == ["qdisc", "show"]


RULESET = """table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy accept;
		tcp dport 8001 counter packets 0 bytes 0 drop
		meta random & 2147483647 < 644245094 counter packets 0 bytes 0 jump KUBE-SEP-A
		numgen random mod 2 vmap { 0 : goto endpoint-5OJB2KTY-ns1/air-drop/tcp/p80__10.180.0.1/80 }
		masquerade fully-random comment "no drop here"
%s
	}
}
table inet tocsin_00000000 {
	chain in {
		meta l4proto tcp th dport @armed counter name "met" numgen random mod 1000 < 100 counter name "dropped" drop
	}
}
"""


@pytest.mark.parametrize("rule", [
    "tcp dport 8000 meta random & 2147483647 < 1073741824 counter packets 0 bytes 0 drop",  # iptables -m statistic
    'tcp dport 8000 # xt_statistic counter packets 3 bytes 180 drop comment "left by a chaos tool"',
    "tcp dport 8000 numgen random mod 100 < 50 counter packets 9 bytes 540 drop",
    "",
])
def test_another_tool_s_loss_is_not_added_to(rule: str) -> None:
    """A chaos tool had left 50 % behind: with the drill's own 50 % three of four packets were lost (reference 4.1)."""
    assert foreign_loss(RULESET % f"\t\t{rule}") == rule


@pytest.mark.heavy
def test_c096_a_kernel_that_cannot(scene: Scene) -> None:
    """A kernel without the module: the drill was shown as done though nothing was put in. All is put in, or nothing."""
    before = scene.client.ruleset(), scene.engine.ruleset()
    plan = scene.plan(direction="both", peer={"netns": scene.client.path})
    # The second of two tables names an expression that there is not.
    plan.facts["places"][1]["text"] = plan.facts["places"][1]["text"].replace("numgen random", "nosuchgen random")

    with pytest.raises(nft.NftError, match=r"could not be armed: .*nosuchgen"):
        FAULT.inject(plan, [])

    assert (scene.client.ruleset(), scene.engine.ruleset()) == before
    assert FAULT.left(plan) == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("match", "per_mille"),
    [
        (Match(8000, "dport", None, loopback=False), 100),
        (Match(8000, "dport", "10.1.2.3", loopback=False), 300),
        (Match(8000, "dport", "127.0.0.1", loopback=True), 100),
        (Match(8000, "dport", "fd00::7", loopback=False), 1000),
        (Match(8000, "sport", "10.1.2.3", loopback=False), 100),
        (Match(8000, "dport", "10.1.2.3", loopback=True), 100),
    ],
)
def test_rehearsal(match: Match, per_mille: int) -> None:
    """The ruleset is armed first where nobody is: port lossy, ssh, DNS, API, loopback and other addresses not."""
    need(*NEEDS)
    text = loss_text("tocsin_12345678", "r", match, per_mille, 30.0)

    rehearsal.rehearse("tocsin_12345678", text, per_mille / 1000.0, probes_of(match, [22, 53, 6443]))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("good", "bad", "says_why"),
    [
        ("th dport @armed", "th dport != 1", "port 22 is exempt and lost"),
        ("th dport @armed", "th dport { 53, 8000 }", "DNS over UDP is exempt and lost 200 of 200|port 53 is exempt"),
        ("1000 < 100", "1000 < 300", r"port 8000 lost 1\d\d\d of 4000 packets, 10.0% was asked"),
        ('iifname != "lo" ip daddr 10.1.2.3 meta l4proto tcp th dport @armed', "tcp dport @armed",
         "of another address is exempt and lost .* the loopback interface is exempt and lost"),
        ("numgen", "nosuchgen", "could not be armed"),
    ],
)  # fmt: skip
def test_rehearsal_refuses(good: str, bad: str, says_why: str) -> None:
    """A ruleset that also hit ssh was found out on the production node, from the outside."""
    need(*NEEDS)
    match = Match(8000, "dport", "10.1.2.3", loopback=False)
    text = loss_text("tocsin_12345678", "r", match, 100, 30.0)
    assert good in text

    with pytest.raises(Refused, match=says_why):
        rehearsal.rehearse("tocsin_12345678", text.replace(good, bad), 0.1, probes_of(match, [22, 53]))


@pytest.mark.heavy
def test_c096_rehearsal_on_a_kernel_without_nftables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel: refused before anything is touched, and the reason says what is missing and not offered."""
    need(*NEEDS)
    fake = tmp_path / "nft"
    fake.write_text("#!/bin/sh\necho 'Error: cache initialization failed: Protocol not supported' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    match = Match(8000, "dport", None, loopback=False)

    with pytest.raises(Refused, match=r"this kernel's nftables lacks something .* There is no iptables form"):
        rehearsal.rehearse("tocsin_1", loss_text("tocsin_1", "r", match, 100, 30.0), 0.1, probes_of(match, []))


@pytest.mark.heavy
def test_real_holder_killed_at_any_moment(scene: Scene, tmp_path: Path) -> None:
    """The one kill in fifty that came between the pipe and the table: nft injected after the undo had looked."""
    before = scene.engine.ruleset()
    takes_s = 0.0
    for number in range(9):
        plan = scene.plan()
        folder = tmp_path / f"loss-{number}"
        ledger = Ledger.create(folder, {"drill": "loss"})
        ledger.write(State.ARMED, plan=msgspec.to_builtins(plan))
        ledger.close()
        held = holder.start(folder, 30.0)
        held.wait_up(10.0)
        if number == 0:  # the whole of an injection, to know how long one takes under today's load
            start = time.monotonic()
            held.inject(10.0)
            takes_s = time.monotonic() - start
        else:
            assert held._process.stdin is not None
            held._process.stdin.write(b"inject\n")
            held._process.stdin.flush()
            time.sleep(takes_s * number / 8)
        os.kill(held.process_id.pid, signal.SIGKILL)

        assert held.wait_gone(1.0)  # the holder and whatever injects for it
        assert FAULT.left(plan) == []
        assert scene.engine.ruleset() == before


# Pure: what counters prove.


def counts(arrived: int, met: int, dropped: int, armed: bool = True) -> dict[str, Any]:
    """One sample of the engine's table."""
    return {"tables": {"engine": {"arrived": arrived, "met": met, "dropped": dropped, "armed": armed}}}


@pytest.mark.parametrize(
    ("story", "share", "samples", "proven", "why"),
    [
        ("10.2 % of 5,021", 0.10, [counts(5021, 5021, 512)], True, "dropped 512 of 5,021 packets, 10.2%"),
        ("three points are allowed", 0.10, [counts(10_000, 10_000, 1300)], True, "± 3.0%"),
        ("and not more", 0.10, [counts(10_000, 10_000, 1301)], False, "13.0% (asked 10.0% ± 3.0%)"),
        # 3 × sqrt(0.1 × 0.9 / 400) = 4.5 points: 18 of 400 packets either way.
        ("three sigma where that is more", 0.10, [counts(400, 400, 58)], True, "± 4.5%"),
        ("and not more than that", 0.10, [counts(400, 400, 59)], False, "± 4.5%"),
        # At 10 % three sigma reach nought below 9 × 0.9 / 0.1 = 81 packets.
        ("too few to tell from none", 0.10, [counts(80, 80, 8)], False, "too few packets to tell"),
        ("all of them are few enough", 1.0, [counts(3, 3, 3)], True, "dropped 3 of 3"),
        ("none of many at 1 %", 0.01, [counts(2000, 2000, 0)], False, "dropped 0 of 2,000"),
        ("no traffic", 0.10, [counts(0, 0, 0), counts(0, 0, 0)], False,
         "no packet came: the load does not go to this port and address; what comes over the loopback interface is"),
        ("no sample", 0.10, [], False, "no counter was read"),
        ("a sample that failed is none", 0.10, [{"error": "nft: no answer"}], False, "no counter was read"),
        ("stands still under traffic", 0.10, [counts(500, 500, 50), counts(900, 500, 50)], False,
         "stood still while 400 of 900 packets passed"),
        ("two counters are read one after the other", 0.10, [counts(1010, 1000, 100)], True, "dropped 100 of 1,000"),
        ("vanished", 0.10, [counts(500, 500, 50), {"tables": {"engine": {"gone": "no table"}}}], False,
         "the counters vanished: no table"),
        ("came back from nought", 0.10, [counts(5000, 5000, 500), counts(400, 400, 40)], False, "went backwards"),
        ("over before its time", 0.10, [counts(500, 500, 50, armed=False)], False, "deadline has ended it"),
    ],
)  # fmt: skip
def test_proven(story: str, share: float, samples: Sequence[Mapping[str, Any]], proven: bool, why: str) -> None:
    """A drill that did nothing passed, as every client was well."""
    match = {"port": 8000, "side": "dport", "address": None, "loopback": False, "protocol": "tcp"}
    facts = {"per_mille": round(share * 1000), "places": [{"where": "engine", "match": match}]}

    got, said = FAULT.proven(Plan("packet-loss", "r", [], [], [], facts), samples)

    assert got is proven, story
    assert why in said, story


@pytest.mark.parametrize(
    ("bound", "given", "params", "address", "loopback"),
    [
        (["0.0.0.0"], None, {}, None, False),
        (["0.0.0.0"], "10.0.0.5", {}, "10.0.0.5", False),
        (["0.0.0.0", "::"], "127.0.0.1", {}, None, False),  # the agent's own way is no user's
        (["::"], "::ffff:10.0.0.5", {}, "10.0.0.5", False),
        (["10.0.0.5"], None, {}, "10.0.0.5", False),
        (["10.0.0.5"], "10.0.0.9", {}, "10.0.0.5", False),  # a service's address: packets carry the other
        (["127.0.0.1"], "127.0.0.1", {}, "127.0.0.1", True),
        (["127.0.0.1", "::1"], None, {}, None, True),
        (["0.0.0.0"], None, {"loopback": True}, None, True),
        (["0.0.0.0"], "engine.internal", {}, None, False),
    ],
)
def test_which_packets(
    bound: Sequence[str], given: str | None, params: Mapping[str, Any], address: str | None, loopback: bool
) -> None:
    """An engine was read at 127.0.0.1 and served at 10.0.0.5; the drill hit the reader."""
    addresses = [ip_address(one) for one in bound]

    match = packet_loss._match({"address": given}, params, 8000, addresses)

    assert match == Match(8000, "dport", address, loopback)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, True, "10%", 0.0004])
def test_no_such_share(share: object) -> None:
    """`share: 10` meant percent to one, tenfold to another."""
    need("nft", "ip")
    with pytest.raises(Refused, match=r"from 0\.1% to 100%"):
        FAULT.plan(Drill("loss", "packet-loss", {"port": 8000}, params={"share": share}), "r")


def test_the_line_that_nft_gets() -> None:
    """`< 1000` is invalid to nft, so 100 % is a plain drop; a brace without `;` before it is invalid on one line."""
    match = Match(8000, "dport", "fd00::7", loopback=False)

    assert loss_text("tocsin_1", 'a "b" {', match, 1000, 90.4) == (
        'add table inet tocsin_1 { flags owner; comment "tocsin drill a__b___"; '
        "set armed { type inet_service; flags timeout; elements = { 8000 timeout 90s }; }; "
        "counter arrived { }; counter met { }; counter dropped { }; "
        "chain in { type filter hook input priority -300; policy accept; "
        'iifname != "lo" ip6 daddr fd00::7 meta l4proto tcp th dport 8000 counter name arrived; '
        'iifname != "lo" ip6 daddr fd00::7 meta l4proto tcp th dport @armed counter name met counter name dropped drop'
        "; }; }"
    )
    assert "numgen random mod 1000 < 999 counter" in loss_text("tocsin_1", "r", match, 999, 90.0)
