"""upstream-timeout: every answer of one upstream takes longer, hangs, or is an error, behind a transparent proxy.

The holder is the proxy. Its redirect is a table that lives as long as the holder's `nft -i`, with a timed set inside: a
killed proxy takes its redirect along. Only connections that begin (SYN) are redirected, so that those of before go
on undisturbed; of these the idle ones are ended, since their clients would otherwise never meet the fault.
"""

from __future__ import annotations

import ipaddress
import json
import math
import select
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from drills import nft, proc, targets
from drills.ledger import short_tag
from drills.model import Command, Drill, Left, Plan, ProcessId, Refused, announces
from drills.old_connections import Old, Watch, end_of, parse_old
from drills.proxy import MARK, TOLERANCE_S, Mode, Proxy, Shape, plain_address

NAME = "upstream-timeout"
FIRST_PORT, PORTS = 20_000, 10_000  # of the proxy: below the ephemeral ports and Kubernetes' NodePorts
ARMED_MORE_S = 60.0  # the redirect falls silent so long after the fault's time, if all else hangs
DRAIN_S = 30.0
MOST_OFF = 0.05  # of the answers may have been delayed otherwise than asked: a busy machine is late
SS_WORDS = 40  # connections that one `ss -K` names
NAT_PRIORITY = -150  # before Docker's and Kubernetes' own (-100), after conntrack (-200)


class UpstreamTimeout:
    """See drills.model.Fault."""

    name = NAME

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find the upstream and on whose side we are. Raises Refused."""
        for program in ("nft", "nsenter", "ip"):  # ss comes with ip
            nft.find(program)
        shape, target = shape_of(drill.params), drill.target
        if target.get("port") is None:
            raise Refused("upstream-timeout needs a port: write `target: {engine: NAME}` or `{port: N}`")
        port = int(target["port"])
        targets.refuse(port, target.get("reserved"))
        if shape.mode == "status" and urlsplit(str(target.get("url", ""))).scheme == "https":
            raise Refused("mode status cannot answer inside TLS: use mode turn, chunk or hang, or a plain upstream")
        place = nft.place_of(target.get("netns"))
        remote = remote_addresses(place, target)
        main = None
        if not remote:
            main = targets.main_of(target)
            targets.refuse_processes([main])
            place = nft.place_of(target.get("netns") or main.pid)
        table, own_port = f"{nft.PREFIX}{short_tag(run)}", free_port(place, run)
        text = table_text(table, run, port, own_port, remote, drill.for_s + DRAIN_S + ARMED_MORE_S)
        facts = {
            "netns": place.path,
            "netns_inode": place.inode,
            "table": table,
            "proxy_port": own_port,
            "port": port,
            "remote": remote,
            "main": None if main is None else asdict(main),
            "shape": asdict(shape),
            "text": text,
            "drain_s": DRAIN_S,
        }
        who = f"{targets.describe(main)}, port {port}" if main else " and ".join(f"{one} port {port}" for one in remote)
        return Plan(
            fault=NAME,
            run=run,
            targets=[who],
            commands=[
                Command(
                    f"(echo {shlex.quote(text)}; cat) | {nft.typed(place, 'nft', '-i')}",
                    "the table lives as long as this pipe, whose only writer is the holder: the proxy",
                ),
                Command(
                    nft.typed(place, "ss", "-tnOi", "state", "established", listing(port, remote)),
                    "each second: connections of before; the idle ones are ended, by `ss -K src A:P dst B:Q` each",
                ),
            ],
            undo=[
                Command("tocsin drill heal", "ends the holder; the kernel takes its table with it"),
                Command(nft.typed(place, "nft", "list", "table", "inet", table), "then: No such file or directory"),
            ],
            facts=facts,
            exemptions=[
                "all but TCP connections to this port that begin while the fault is in, and idle ones of before",
                f"the proxy's own connections (mark {MARK:#x})",
            ],
            notes=notes(shape, own_port, remote),
            needs=["CAP_NET_ADMIN", "CAP_NET_RAW", *(["CAP_SYS_ADMIN", "CAP_SYS_PTRACE"] if place.path else [])],
            expects=announces(NAME, shape.mode),
            blast={"replicas": 1},
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Redirect:
        """Listen, then redirect. Raises Refused, OSError."""
        facts = plan.facts
        if facts["main"] is not None and not proc.is_same(ProcessId(**facts["main"])):
            raise Refused(f"process {facts['main']['pid']} ended since the plan was made; plan the drill again")
        place = place_of(plan)
        proxy = Proxy(Shape(**facts["shape"]), int(facts["port"]))
        watch = Watch(int(facts["port"]), at_server=not facts["remote"])
        try:
            with nft.entrance(place) as (_, descriptors):
                netns = Path(f"/proc/self/fd/{descriptors[0]}") if descriptors else None
                proxy.start(int(facts["proxy_port"]), netns)
                watch.start(netns)
        except OSError as error:
            raise Refused(f"the proxy cannot listen on port {facts['proxy_port']}: {error}") from error
        try:
            table = Table(place, str(facts["table"]), str(facts["text"]), injector_fds)
        except BaseException:
            watch.stop()
            proxy.close()
            raise
        return Redirect(plan, proxy, table, watch, injector_fds)

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """By the proxy's own log: answers were delayed, each as asked. Pure."""
        shape = Shape(**plan.facts["shape"])
        log = samples[-1] if samples else {"error": "the proxy's log was never read"}
        if "error" in log:
            return False, str(log["error"])
        if not log["armed"]:
            return False, "the kernel's deadline has ended it"
        uncovered = log["old_left"]
        tail = f"; {log['old_ended']} connections of before were ended"
        if uncovered is None or uncovered:
            tail += f"; old connections not covered: {'unknown' if uncovered is None else uncovered}"
            tail += f" (their packets could not be read: {log['old_why']})" if log.get("old_why") else ""
        if shape.mode in {"hang", "status"}:
            n = int(log["hung" if shape.mode == "hang" else "status"])
            what = "answers were held" if shape.mode == "hang" else f"requests were answered {shape.status}"
            return n > 0, f"{n} {what}, {log['passed_tls']} TLS connections passed{tail}"
        n, off = int(log["answers"]), int(log["off"])
        if not n:
            return False, f"no answer was delayed ({log['redirected']} connections were redirected){tail}"
        measured = " / ".join(f"{float(log[key]):.3f}" for key in ("min_s", "median_s", "max_s"))
        what = "answers" if shape.mode == "turn" else "chunks"
        said = f"{n} {what} delayed by {measured} s (min / median / max), asked {shape.delay_s:g} ± {TOLERANCE_S:g}"
        return off <= MOST_OFF * n, f"{said}, {off} beyond that{tail}"

    def left(self, plan: Plan) -> list[Left]:
        """The table, its nft, and a holder that still listens."""
        place, port = place_of(plan), int(plan.facts["proxy_port"])
        found = nft.left(place, str(plan.facts["table"]))
        for pid in proc.listeners(port, place.inode):
            if "drills.holder" in proc.command_line(pid):
                found.append(Left(f"the delay proxy (process {pid}) listens on port {port}", f"kill -KILL {pid}"))
        return found

    def undo(self, plan: Plan) -> None:
        """End the redirect, whoever holds it."""
        nft.end(place_of(plan), str(plan.facts["table"]))


def shape_of(params: Mapping[str, Any]) -> Shape:
    """The fault's own parameters. Raises Refused."""
    mode: Mode = params.get("mode", "turn")
    retry_after_s = params.get("retry_after_s")
    shape = Shape(
        mode=mode,
        delay_s=float(params.get("delay_s", 5.0)),
        after_bytes=int(params.get("after_bytes") or 0),
        status=int(params.get("status") or 503),
        retry_after_s=None if retry_after_s is None else math.ceil(retry_after_s),  # 0 would mean: ask again at once
    )
    if mode not in get_args(Mode):
        raise Refused(f"mode {mode!r}: write one of {', '.join(get_args(Mode))}")
    if not 0.0 < shape.delay_s <= 600.0:
        raise Refused(f"delay_s {shape.delay_s:g}: write more than 0 and at most 600 seconds")
    if mode == "status" and shape.status not in {429, 503}:
        raise Refused(f"status {shape.status}: write 429 or 503, which mean `try again later`")
    return shape


def remote_addresses(place: nft.Place, target: Mapping[str, Any]) -> list[str]:
    """The upstream's addresses where it is elsewhere, and we stand at its client; none where it is here."""
    named = target.get("address")
    if named is None:
        return []
    try:
        found = {plain_address(str(info[4][0])) for info in socket.getaddrinfo(str(named), None)}
    except OSError as error:
        raise Refused(f"address {named!r} of the target: {error.strerror}") from None
    links = json.loads(nft.run(place, "ip", "-j", "address", "show"))
    here = {plain_address(one["local"]) for link in links for one in link.get("addr_info", ()) if "local" in one}
    local = {one for one in found if one in here or _anywhere_local(one)}
    return [] if local else sorted(found)


def _anywhere_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or parsed.is_unspecified


def free_port(place: nft.Place, run: str) -> int:
    """A port that nobody listens on; the same for the same run, so that it can be looked for later."""
    taken = {int(line.split()[2].rpartition(":")[2]) for line in nft.run(place, "ss", "-Hltn").splitlines() if line}
    start = int(short_tag(run), 16) % PORTS
    return next(port for n in range(PORTS) if (port := FIRST_PORT + (start + n) % PORTS) not in taken)


def table_text(table: str, run: str, port: int, own_port: int, remote: Sequence[str], deadline_s: float) -> str:
    """The redirect. `remote`: where the upstream is elsewhere; else all local addresses are meant."""
    # Only SYN: connections of before keep their way, whether conntrack knew them or first sees them now.
    start = f"meta mark != {MARK:#x} tcp flags & (syn | ack) == syn"
    redirect = f"th dport @armed counter name redirected redirect to :{own_port}"
    if remote:
        rules = [f"{start} {_family(one)} daddr {one} {redirect}" for one in remote]
        chains = [_chain("outgoing", "output", rules)]
    else:
        chains = [
            _chain("incoming", "prerouting", [f"{start} fib daddr type local {redirect}"]),
            _chain("own", "output", [f'{start} oifname "lo" {redirect}']),
        ]
    body = ["counter redirected { }", *chains]
    return nft.table_text(table, run_id=run, ports=[port], deadline_s=deadline_s, body=body)


def _chain(name: str, hook: str, rules: Sequence[str]) -> str:
    return f"chain {name} {{ type nat hook {hook} priority {NAT_PRIORITY}; {''.join(f'{rule}; ' for rule in rules)}}}"


def _family(address: str) -> str:
    return "ip6" if ":" in address else "ip"


def listing(port: int, remote: Sequence[str]) -> str:
    """ss's filter for connections to the target, our own dials excepted."""
    ours = f"not fwmark = {MARK:#x}"
    if not remote:
        return f"sport = :{port} and {ours}"
    where = " or ".join(f"dst {f'[{one}]' if ':' in one else one}" for one in remote)
    return f"dport = :{port} and ( {where} ) and {ours}"


def notes(shape: Shape, own_port: int, remote: Sequence[str]) -> list[str]:
    """What a reader of the report must know."""
    found = []
    if remote:
        found.append("at the upstream's client: other clients of it are not affected")
    else:
        found.append("the engine sees this machine's address as peer of redirected connections, not the client's")
        found.append(f"a packet filter on INPUT must let redirected connections in: they arrive at port {own_port}")
    found.append("spared: GETs by this agent and by kube-probe over plain HTTP (over TLS they are late too)")
    found.append("old connections: ended when idle or just answered (plain HTTP/1); others are not covered")
    if shape.mode == "turn":
        found.append("over HTTP/2 each message of the client during an answer begins a turn")
    if shape.mode == "status":
        found.append("TLS and HTTP/2 connections pass untouched: there the fault does not act")
    return found


class Table(nft.Owner):
    """The redirect's table."""

    def disarm(self) -> None:
        """Redirect nothing more; what runs through the proxy keeps its translation. Raises OSError."""
        self._tell(f"flush set inet {self.table} armed\n")
        end = time.monotonic() + nft.COMMAND_S
        while self.state().armed and time.monotonic() < end:
            time.sleep(0.005)


class Redirect:
    """The fault while it is in."""

    def __init__(
        self, plan: Plan, proxy: Proxy, table: Table, watch: Watch, injector_fds: Sequence[int]
    ) -> None:
        self._facts, self._proxy, self._table, self._watch = plan.facts, proxy, table, watch
        self._place = table.place
        self._listeners = tuple(injector_fds)
        self._undone = False
        self._ended = 0

    def sample(self) -> dict[str, Any]:
        """The proxy's log so far, the redirect, and what became of the connections of before."""
        if not self._proxy.alive:
            self._table.close()  # the redirect would lead nowhere
            raise nft.GoneError("the proxy ended: its redirect is gone")
        state = self._table.state()
        left = self._end_old() if state.armed else 0
        if not state.armed:  # what begins now goes straight, and is nobody's to end
            self._watch.stop()
        return {
            **self._proxy.tally.snapshot(),
            "open": self._proxy.open,
            "armed": state.armed,
            "redirected": state.packets.get("redirected", 0),
            "old_ended": self._ended + self._watch.ended,
            "old_left": left,
            "old_why": self._watch.why,
        }

    def _end_old(self) -> int | None:
        """End the idle connections of before; how many are left. None: we cannot look."""
        try:
            old = self._old()
            idle = [one for one in old if one.idle]
            for at in range(0, len(idle), SS_WORDS):
                words = " or ".join(f"( src {one.local} and dst {one.peer} )" for one in idle[at : at + SS_WORDS])
                killed = nft.run(
                    self._place, "ss", "-K", "-tnH", "state", "established",
                    f"( {words} ) and not fwmark = {MARK:#x}",
                )  # fmt: skip
                self._ended += len(killed.splitlines())
            busy = self._old() if idle else old
            self._watch.want(end_of(one.local if self._facts["remote"] else one.peer) for one in busy)
            return len(busy)
        except (OSError, Refused):
            return None

    def _old(self) -> list[Old]:
        port, remote = int(self._facts["port"]), list(self._facts["remote"])
        ours = self._proxy.endpoints()
        text = nft.run(self._place, "ss", "-tnOHi", "state", "established", listing(port, remote))
        # Asked before and after ss: those of ours that began or ended meanwhile are known to be ours.
        return list(parse_old(text, ours | self._proxy.endpoints(), at_server=not remote))

    def undo(self) -> None:
        """Redirect nothing more, at once; let what runs through us end, while the runner waits; then be gone."""
        if self._undone:
            return
        self._undone = True
        self._watch.stop()
        with suppress(OSError):  # else the table is gone already
            self._table.disarm()
        limit_s = float(self._facts["drain_s"])
        alarm_s = signal.getitimer(signal.ITIMER_REAL)[0]  # the holder's end
        if alarm_s:
            limit_s = max(0.0, min(limit_s, alarm_s - 1.0))
        # The kernel translates the addresses of running connections only while the table is there.
        self._proxy.drain(limit_s, lambda: not _reader_gone(self._listeners))
        self._proxy.close()
        self._table.close()


def _reader_gone(pipes: Sequence[int]) -> bool:
    """Whether nobody reads one of these pipes any more: the runner is dead, nobody waits for an orderly end."""
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


def place_of(plan: Plan) -> nft.Place:
    """The namespace that the plan means."""
    return nft.Place(plan.facts["netns"], int(plan.facts["netns_inode"]))


FAULT = UpstreamTimeout()
