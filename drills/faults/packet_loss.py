"""packet-loss: a share of the packets of one service port never arrives.

One owner table (drills/nft.py) in the engine's network namespace drops what comes in for the port; with direction
`both` a second one, in the namespace of a peer, drops what the engine sends there. Dropping on the way out would be no
loss: the sender's kernel would tell the sender.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import pairwise
from typing import Any

from drills import nft, proc, rehearsal, targets
from drills.ledger import short_tag
from drills.model import Command, Drill, Held, Left, Plan, Refused, announces

PRIORITY = -300  # before whatever else filters, so that nobody has accepted the packet yet
# The deadline in the kernel, after the holder's own: it is for the day on which all else hangs.
DEADLINE_GRACE_S = 30.0
UNSEEN_PACKETS = 10  # may slip in between two counters that are read one after the other
UNSEEN_SHARE = 0.01
NO_PACKET = "no packet came: the load does not go to this port and address"
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Match:
    """The packets that are meant: towards the service in its own namespace, from the service in a peer's."""

    port: int
    side: str  # dport: they go to the port; sport: they come from it
    address: str | None  # of the service; None: any of its namespace
    loopback: bool  # those that never leave the machine too
    protocol: str = "tcp"

    def words(self) -> str:
        """As nft wants them, without the port."""
        words = [] if self.loopback else ['iifname != "lo"']
        if self.address is not None:
            family = "ip6" if ip_address(self.address).version == 6 else "ip"
            words.append(f"{family} {'daddr' if self.side == 'dport' else 'saddr'} {self.address}")
        return " ".join([*words, f"meta l4proto {self.protocol}", f"th {self.side}"])


def loss_text(table: str, run: str, match: Match, per_mille: int, deadline_s: float) -> str:
    """The one line that drops `per_mille` of 1000 of the packets that match, and counts all of them.

    `arrived` counts by the port itself, `armed` by the set that ends at the deadline: where only the first grows, the
    fault stands still.
    """
    share = f"numgen random mod 1000 < {per_mille} " if per_mille < 1000 else ""  # `< 1000` is none to nft
    words = match.words()
    chain = (
        f"chain in {{ type filter hook input priority {PRIORITY}; policy accept; "
        f"{words} {match.port} counter name arrived; "
        f"{words} @armed counter name met {share}counter name dropped drop; }}"
    )
    counters = [f"counter {name} {{ }}" for name in ("arrived", "met", "dropped")]
    return nft.table_text(table, run_id=run, ports=[match.port], deadline_s=deadline_s, body=[*counters, chain])


def _per_mille(params: Mapping[str, Any]) -> int:
    share = params.get("share", 0.10)
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0.001 <= share <= 1.0:
        raise Refused(f"packet-loss: share {share!r}: write a share from 0.1% to 100%, such as 10%")
    return round(float(share) * 1000)


def _listening(place: nft.Place) -> list[tuple[Address, int, int]]:
    """Address, port and socket of all that listens in a namespace; needs no right beyond that to enter it."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(nft.GoneError):  # a kernel without IPv6
            for line in nft.run(place, "cat", table).splitlines()[1:]:
                fields = line.split()
                address, port = fields[1].split(":")
                if fields[3] == _LISTEN:
                    found.append((_address(address), int(port, 16), int(fields[9])))
    return found


def _port(target: Mapping[str, Any], listening: Sequence[tuple[Address, int, int]]) -> int:
    """The port that the target names, or the only one of its process. Raises Refused."""
    if target.get("port") is not None:
        return int(target["port"])
    pid = target.get("pid")
    if pid is None:
        raise Refused("packet-loss needs a port: write `target: {engine: NAME}`, `{port: N}` or `{pid: N}`")
    mine = proc.sockets_of(int(pid))
    ports = sorted({port for _, port, socket in listening if socket in mine})
    if len(ports) != 1:
        have = ", ".join(map(str, ports)) or "no port that we may see"
        raise Refused(f"process {pid} listens on {have}: packet-loss needs one; write target.port beside target.pid")
    return ports[0]


def _who(port: int, place: nft.Place) -> str:
    """The processes behind the port, none of which may be a reserved one. Raises Refused."""
    found = [proc.identify(pid) for pid in proc.listeners(port, place.inode)]
    targets.refuse_processes(found)
    return targets.describe(found[0]) if found else "a process that we may not see"


def _address(text: str) -> Address:
    """0100007F -> 127.0.0.1: each word of four bytes is in the order of the machine, x86 and ARM alike."""
    raw = bytes.fromhex(text)
    return _plain(ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


def _plain(address: Address) -> Address:
    """A v4-mapped address is IPv4 on the wire."""
    return getattr(address, "ipv4_mapped", None) or address


def _given(target: Mapping[str, Any]) -> Address | None:
    with suppress(ValueError):
        return _plain(ip_address(str(target["address"]))) if target.get("address") else None
    return None  # a name: it says nothing about the address that packets carry


def _match(target: Mapping[str, Any], params: Mapping[str, Any], port: int, bound: Sequence[Address]) -> Match:
    """What to drop in the engine's own namespace."""
    given = _given(target)
    if all(address.is_loopback for address in bound):  # nothing else reaches it
        return Match(port, "dport", str(bound[0]) if len(bound) == 1 else None, loopback=True)
    loopback = bool(params.get("loopback", False))
    specific = {address for address in bound if not address.is_unspecified}
    if given is not None and not given.is_loopback and (given in specific or len(specific) < len(bound)):
        return Match(port, "dport", str(given), loopback)
    only = next(iter(specific)) if len(specific) == 1 == len(bound) else None
    return Match(port, "dport", None if only is None else str(only), loopback)


def _places(target: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The port, and where what is to be dropped. Raises Refused, OSError."""
    targets.addresses_here(target)  # refuses another machine's
    here = nft.place_of(target.get("netns") or target.get("pid"))
    listening = _listening(here)
    port = _port(target, listening)
    targets.refuse(port, target.get("reserved"))
    _refuse_stacking(here)
    bound = [address for address, number, _ in listening if number == port]
    if not bound:
        raise Refused(f"nothing listens on port {port} in {here.path or 'this network namespace'}: is the engine up?")
    match = _match(target, params, port, bound)
    places: list[dict[str, Any]] = [{"where": "engine", "place": here, "match": match}]
    if params.get("direction", "in") == "both" and params.get("peer"):
        places.append(_peer(params, here, match, _given(target)))
    return port, places


def _refuse_stacking(place: nft.Place) -> None:
    """Raise Refused where packets are delayed or lost already: two faults at once add up, and it is not ours to end."""
    _refuse_netem(place)
    try:
        ruleset = nft.run(place, "nft", "list", "ruleset")
    except (nft.NftError, Refused):  # we may not look: then we may put nothing in, either
        return
    rule = foreign_loss(ruleset)
    if rule:
        where = place.path or "this network namespace"
        raise Refused(f"packets are dropped by chance in {where} already ({rule}): somebody else's fault is in, and two"
                      " add up; end it first")


def foreign_loss(ruleset: str) -> str:
    """The first rule of others, iptables' too, that drops packets by chance, as `nft list ruleset` shows it; "". Pure.

    kube-proxy's rules are by chance as well: they jump, to chains that may be called drop, and drop nothing.
    """
    table = ""
    for line in map(str.strip, ruleset.splitlines()):
        table = line if line.startswith("table ") else table
        rule = re.sub(r'comment "[^"]*"', "", line)
        if f" {nft.PREFIX}" not in table and re.search(r"(?:random|statistic).*[\s:]drop(?=[\s,}]|$)", rule):
            return line[:200]
    return ""


def _refuse_netem(place: nft.Place) -> None:
    """Raise Refused where a qdisc delays or loses packets."""
    try:
        shown = nft.run(place, "tc", "qdisc", "show")
    except (nft.NftError, Refused):  # no tc, or a kernel without qdiscs: then there is no netem either
        return
    for line in shown.splitlines():
        words = line.split()
        if words[:2] == ["qdisc", "netem"]:
            where = place.path or "this network namespace"
            raise Refused(f"root qdisc present: netem {words[2].rstrip(':')} in {where} ({line.strip()}): somebody"
                          " else's fault is in; end it first")


def _peer(params: Mapping[str, Any], here: nft.Place, match: Match, given: Address | None) -> dict[str, Any]:
    """The table in the peer's namespace, which drops what comes back. Raises Refused."""
    place = nft.place_of(params["peer"]["netns"])
    address = match.address or (str(given) if given is not None else None)
    if place.inode == here.inode:
        raise Refused("packet-loss: peer.netns is the engine's own network namespace; name its router's or client's")
    _refuse_stacking(place)
    if address is None or ip_address(address).is_loopback:
        raise Refused("packet-loss: direction both needs target.address, by which the peer knows the engine's packets")
    return {"where": "peer", "place": place, "match": Match(match.port, "sport", address, loopback=False)}


class PacketLoss:
    """See drills.model.Fault."""

    name = "packet-loss"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find the port, its namespace and its addresses; touches nothing. Raises Refused."""
        for program in ("nft", "nsenter", "unshare", "ip"):
            nft.find(program)
        per_mille = _per_mille(drill.params)
        try:
            port, places = _places(drill.target, drill.params)
        except OSError as error:
            raise Refused(f"packet-loss: {error}") from None
        table = f"{nft.PREFIX}{short_tag(run)}"
        deadline_s = drill.for_s + DEADLINE_GRACE_S
        facts: dict[str, Any] = {
            "table": table,
            "per_mille": per_mille,
            "deadline_s": deadline_s,
            "reserved": _reserved(drill.target),
            "places": [_facts(entry, loss_text(table, run, entry["match"], per_mille, deadline_s)) for entry in places],
        }
        return Plan(
            fault=self.name,
            run=run,
            targets=[f"{_who(port, places[0]['place'])}, port {port}", *(_told(entry) for entry in places)],
            commands=_commands(facts),
            undo=_undo(facts, table),
            facts=facts,
            exemptions=_exemptions(places[0]["match"], facts["reserved"]),
            notes=_notes(places, both=drill.params.get("direction", "in") == "both"),
            needs=_needs(places),
            expects=announces(self.name, None),
            blast={"replicas": 1},
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Held:
        """Arm each table, or none. Raises Refused, OSError."""
        owners: dict[str, nft.Owner] = {}
        try:
            for entry in plan.facts["places"]:
                place = nft.Place(**entry["place"])
                owners[entry["where"]] = nft.Owner(place, plan.facts["table"], entry["text"], injector_fds)
        except BaseException:
            Loss(owners).undo()
            raise
        return Loss(owners)

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Whether each table dropped the asked share; counters that vanish or stand still prove nothing. Pure."""
        share = plan.facts["per_mille"] / 1000.0
        verdicts = []
        for entry in plan.facts["places"]:
            where = entry["where"]
            seen = [sample["tables"][where] for sample in samples if where in sample.get("tables", {})]
            ok, why = _proven(share, seen)
            if why == NO_PACKET and where == "engine" and not entry["match"]["loopback"]:
                why += "; what comes over the loopback interface is spared (params.loopback: true)"
            verdicts.append((ok, f"{where}, {_packets(Match(**entry['match']))}: {why}"))
        return all(ok for ok, _ in verdicts), "; ".join(why for _, why in verdicts)

    def left(self, plan: Plan) -> list[Left]:
        """Tables with our tag in each namespace of the plan, and whoever holds one."""
        found = [one for e in plan.facts["places"] for one in nft.left(nft.Place(**e["place"]), plan.facts["table"])]
        return list(dict.fromkeys(found))

    def undo(self, plan: Plan) -> None:
        """Nothing of this outlives its holder; whoever still holds a table is ended."""
        for entry in plan.facts["places"]:
            nft.end(nft.Place(**entry["place"]), plan.facts["table"])


class Loss:
    """The tables that are in."""

    def __init__(self, owners: Mapping[str, nft.Owner]) -> None:
        self._owners = owners

    def sample(self) -> Mapping[str, Any]:
        """Packets by counter of each table, and whether it is still armed; or that it is gone."""
        tables: dict[str, Any] = {}
        for where, owner in self._owners.items():
            try:
                state = owner.state()
            except nft.GoneError as error:
                tables[where] = {"gone": str(error)}
            else:
                tables[where] = {**state.packets, "armed": state.armed}
        return {"tables": tables}

    def undo(self) -> None:
        """End-of-file for each owner."""
        for owner in self._owners.values():
            owner.close()


def _proven(share: float, seen: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    if not seen:
        return False, "no counter was read"
    for sample in seen:
        if "gone" in sample:
            return False, f"the counters vanished: {sample['gone']}"
    for earlier, later in pairwise(seen):
        if later["arrived"] < earlier["arrived"] or later["dropped"] < earlier["dropped"]:
            return False, "the counters went backwards: somebody else made the table anew"
    arrived, met, dropped = (int(seen[-1][name]) for name in ("arrived", "met", "dropped"))
    if arrived - met > max(UNSEEN_PACKETS, UNSEEN_SHARE * arrived):
        return False, f"the fault stood still while {arrived - met:,} of {arrived:,} packets passed"
    if not seen[-1]["armed"]:
        return False, "the kernel's deadline has ended it"
    if met == 0:
        return False, NO_PACKET
    off = rehearsal.tolerance(share, met)
    said = f"dropped {dropped:,} of {met:,} packets, {dropped / met:.1%} (asked {share:.1%} ± {off:.1%})"
    if met < 9.0 * (1.0 - share) / share:  # 3 sigma would reach down to nothing at all
        return False, f"{said}: too few packets to tell"
    return dropped > 0 and abs(dropped / met - share) <= off, said


def _facts(entry: Mapping[str, Any], text: str) -> dict[str, Any]:
    place, match = entry["place"], entry["match"]
    return {
        "where": entry["where"],
        "place": {"path": place.path, "inode": place.inode},
        "match": {name: getattr(match, name) for name in Match.__slots__},
        "text": text,
    }


def _reserved(target: Mapping[str, Any]) -> dict[str, str]:
    found = {**targets.RESERVED_PORTS, **(target.get("reserved") or {})}
    return {str(port): str(why) for port, why in found.items()}


def _packets(match: Match) -> str:
    way = "to" if match.side == "dport" else "from"
    return f"{match.protocol} {way} {match.address or 'any address'} port {match.port}"


def _told(entry: Mapping[str, Any]) -> str:
    place = entry["place"]
    return f"{entry['where']}: network namespace {place.path or 'of this process'}, {_packets(entry['match'])}"


def _commands(facts: Mapping[str, Any]) -> list[Command]:
    return [
        Command(
            f"(echo {shlex.quote(entry['text'])}; cat) | {nft.typed(nft.Place(**entry['place']), 'nft', '-i')}",
            "the table lives as long as this pipe, whose only writer is the holder",
        )
        for entry in facts["places"]
    ]


def _undo(facts: Mapping[str, Any], table: str) -> list[Command]:
    looks = [nft.typed(nft.Place(**entry["place"]), "nft", "list", "table", "inet", table) for entry in facts["places"]]
    return [
        Command("tocsin drill heal", "ends the holder; the kernel takes its tables with it, nobody else can"),
        *(Command(look, "afterwards says: No such file or directory") for look in looks),
    ]


def _exemptions(match: Match, reserved: Mapping[str, str]) -> list[str]:
    found = [f"everything but {_packets(match)}; rehearsed: {', '.join(f'{w} ({p})' for p, w in reserved.items())}"]
    if not match.loopback:
        found.append("the loopback interface: the agent reads the engine there (params.loopback: true drops there too)")
    return found


def _notes(places: Sequence[Mapping[str, Any]], *, both: bool) -> list[str]:
    notes = []
    if len(places) == 1:
        why = "; direction both needs peer.netns, where what the engine sends can be dropped" if both else ""
        notes.append(f"inbound only{why}")
    if places[0]["match"].loopback or places[0]["place"].path is not None:
        notes.append("the agent reads this engine through the lossy port: its readings may be late")
    notes.append("TCP sends again: clients see loss as waiting, new connections as 1 s steps")
    return notes


def _needs(places: Sequence[Mapping[str, Any]]) -> list[str]:
    foreign = any(entry["place"].path is not None for entry in places)
    return ["CAP_NET_ADMIN", *(["CAP_SYS_ADMIN", "CAP_SYS_PTRACE"] if foreign else [])]


def rehearse(plan: Plan) -> None:
    """Arm the same text in a scratch namespace: the port loses its share, the exemptions nothing. Raises Refused."""
    for entry in plan.facts["places"]:
        probes = probes_of(Match(**entry["match"]), [int(port) for port in plan.facts["reserved"]])
        rehearsal.rehearse(plan.facts["table"], entry["text"], plan.facts["per_mille"] / 1000.0, probes)


def probes_of(match: Match, reserved: Sequence[int]) -> list[rehearsal.Probe]:
    """What is sent at the ruleset: the port itself, its neighbours, every reserved port, the loopback interface."""
    v6 = match.address is not None and ip_address(match.address).version == 6
    # Addresses for documentation: they are nobody's, and here they never leave the scratch namespace.
    service = match.address or "192.0.2.1"
    client, other = ("2001:db8::1", "2001:db8::2") if v6 else ("192.0.2.2", "192.0.2.3")
    only_local = ip_address(service).is_loopback

    def probe(name: str, port: int, *, protocol: str = match.protocol, at: str = service, lossy: bool = False,
              client: str = client) -> rehearsal.Probe:  # fmt: skip
        if match.side == "sport":
            return rehearsal.Probe(name, protocol, at, client, port, 40_000, lossy)
        return rehearsal.Probe(name, protocol, at if only_local else client, at, 40_000, port, lossy)

    found = [probe(f"port {match.port}", match.port, lossy=True)]
    found += [probe(f"port {port}", port) for port in (match.port - 1, match.port + 1) if 0 < port < 1 << 16]
    found += [probe(f"port {port}", port) for port in reserved]
    found.append(probe("DNS over UDP", 53, protocol="udp"))
    if match.address is not None and not only_local:
        found.append(probe(f"port {match.port} of another address", match.port, at=other))
    if not match.loopback and match.side == "dport":
        lo = "::1" if v6 else "127.0.0.1"
        found.append(rehearsal.Probe("the loopback interface", match.protocol, lo, lo, 40_000, match.port))
    return found


FAULT = PacketLoss()
