"""Arm a ruleset where it can hurt nobody, and count: the port that it is for loses packets, all else loses none.

The place is a scratch network namespace with a veth pair to a second one, made by a child process and gone with it.
Packets are headers without a payload, some thousands, and never leave the two. A fault's guard calls `rehearse`;
`python -m drills.rehearsal` is that child, and with `send` the child's sender in the second namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import ip_address

from drills import nft
from drills.model import Refused

MODULE = "drills.rehearsal"  # __name__ is another in the child
COUNTERS = "scratch_counters"
LOSSY_PACKETS = 4_000  # three points are then 3.8 sigma or more
EXEMPT_PACKETS = 200
ARRIVE = 0.9  # of what was sent must reach the hook, else the rehearsal says nothing
TIMEOUT_S = 30.0
NEAR, FAR = "tocsin0", "tocsin1"  # the two ends of the pair
TCP_ACK, TCP_WINDOW = 0x10, 512
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Probe:
    """Packets of one kind, sent towards the ruleset, and whether it is for them."""

    name: str
    protocol: str  # tcp or udp
    source: str
    target: str
    source_port: int
    target_port: int
    lossy: bool = False

    @property
    def local(self) -> bool:
        """Over the loopback interface: its own address speaks to itself."""
        return self.source == self.target

    @property
    def packets(self) -> int:
        """How many are sent."""
        return LOSSY_PACKETS if self.lossy else EXEMPT_PACKETS


def tolerance(share: float, packets: int) -> float:
    """How far a counted share may lie from the asked one: the larger of 3 points and 3 sigma."""
    return float(max(0.03, 3.0 * (share * (1.0 - share) / packets) ** 0.5)) if packets else 1.0


def rehearse(table: str, text: str, share: float, probes: Sequence[Probe]) -> None:
    """Arm `text` in a scratch namespace, send the probes and count. Raises Refused with what came out otherwise."""
    asked = [asdict(probe) for probe in probes]
    order = json.dumps({"table": table, "text": text, "share": share, "probes": asked, "parent": os.getpid()})
    # Without root it is root of a user namespace of its own: CAP_NET_ADMIN alone makes no namespaces.
    words = [nft.find("unshare"), *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]
    try:
        done = subprocess.run(
            [*words, sys.executable, "-m", MODULE],
            input=order,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"the rehearsal in a scratch network namespace did not end: {error}") from None
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Refused(f"rehearsal in a scratch network namespace: {why}")


def verdicts(share: float, probes: Sequence[Probe], came: Sequence[int], passed: Sequence[int]) -> list[str]:
    """What is wrong with the counts before and after the ruleset, one sentence each. Pure."""
    wrong = []
    for probe, before, after in zip(probes, came, passed, strict=True):
        lost = before - after
        if before < ARRIVE * probe.packets:
            wrong.append(f"{probe.name}: only {before} of {probe.packets} packets arrived to be judged")
        elif not probe.lossy and lost:
            wrong.append(f"{probe.name} is exempt and lost {lost} of {before} packets")
        elif probe.lossy and abs(lost / before - share) > tolerance(share, before):
            wrong.append(f"{probe.name} lost {lost} of {before} packets, {share:.1%} was asked")
    return wrong


# The child, in the scratch namespace


def main(arguments: Sequence[str]) -> int:
    """Rehearse what stdin says; exit status 1 and one line on stderr where it does not come out."""
    # A runner that is killed meanwhile needs no answer, and nothing of ours may outlive it by a second: neither the
    # child nor its sender. One whose parent had gone before reads end-of-file, or half an order, and ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    order = json.load(sys.stdin)
    probes = [Probe(**probe) for probe in order["probes"]]
    if arguments == ["send"]:
        send(probes)
        return 0
    if os.getppid() != order["parent"]:
        return 1
    try:
        wrong = _count(order["table"], order["text"], order["share"], probes)
    except (OSError, Refused, subprocess.SubprocessError) as error:
        wrong = [str(error)]
    if wrong:
        print("; ".join(wrong), file=sys.stderr)  # noqa: T201  (the parent reads it)
    return 1 if wrong else 0


def _count(table: str, text: str, share: float, probes: Sequence[Probe]) -> list[str]:
    here = nft.place_of(None)
    with _peer(probes) as far:
        nft.run(here, "nft", "-f", "-", stdin=_counting(probes))
        owner = nft.Owner(here, table, text)
        try:
            send([probe for probe in probes if probe.local])
            _send_from(far, [probe for probe in probes if not probe.local])
            counted = _counts(here)
        finally:
            owner.close()
        if nft.tables(here):
            return [f"table {table} is still there after its owner's end"]
    came, passed = ([counted[f"{when}{n}"] for n in range(len(probes))] for when in ("came", "passed"))
    return verdicts(share, probes, came, passed)


@contextmanager
def _peer(probes: Sequence[Probe]) -> Iterator[int]:
    """A second namespace at the other end of a veth pair, routes both ways; its process ends with our pipe."""
    with subprocess.Popen(
        [nft.find("unshare"), "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as far:
        until = time.monotonic() + nft.COMMAND_S
        while nft.place_of(far.pid).path is None:  # still ours: it has not unshared yet
            if time.monotonic() > until or far.poll() is not None:
                raise nft.NftError("no second network namespace could be made")
            time.sleep(0.002)
        here, there = nft.place_of(None), nft.place_of(far.pid)
        nft.run(here, "ip", "link", "set", "lo", "up")
        nft.run(here, "ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", str(far.pid))
        remote = [probe for probe in probes if not probe.local]
        ends = [(here, NEAR, {p.target for p in remote}, {p.source for p in remote})]
        ends.append((there, FAR, ends[0][3], ends[0][2]))
        for place, device, mine, others in ends:
            nft.run(place, "ip", "-batch", "-", stdin=_wiring(device, sorted(mine), sorted(others)))
        yield far.pid
        assert far.stdin is not None  # noqa: S101
        far.stdin.close()


def _wiring(device: str, mine: Sequence[str], others: Sequence[str]) -> str:
    lines = [f"link set {device} up"]
    for address in mine:
        # Without nodad an IPv6 address takes a second before it may be used.
        length, more = (128, " nodad") if ip_address(address).version == 6 else (32, "")
        lines.append(f"address add {address}/{length} dev {device}{more}")
    lines += [f"route add {address} dev {device}" for address in others]
    return "\n".join(lines) + "\n"


def _counting(probes: Sequence[Probe]) -> str:
    """Each kind of packet counted before the ruleset (hook priority -300) and after it."""
    counters = "".join(f"counter came{n} {{ }}; counter passed{n} {{ }}; " for n in range(len(probes)))
    chains = ""
    for when, priority in (("came", -310), ("passed", -290)):
        rules = "".join(f"{_match(probe)} counter name {when}{n}; " for n, probe in enumerate(probes))
        chains += f"chain {when} {{ type filter hook input priority {priority}; {rules}}}; "
    return f"table inet {COUNTERS} {{ {counters}{chains}}}\n"


def _match(probe: Probe) -> str:
    family = "ip6" if ip_address(probe.target).version == 6 else "ip"
    return (
        f"meta l4proto {probe.protocol} {family} saddr {probe.source} {family} daddr {probe.target}"
        f" th sport {probe.source_port} th dport {probe.target_port}"
    )


def _counts(here: nft.Place) -> Mapping[str, int]:
    listed = json.loads(nft.run(here, "nft", "-j", f"list counters table inet {COUNTERS}"))["nftables"]
    return {entry["counter"]["name"]: int(entry["counter"]["packets"]) for entry in listed if "counter" in entry}


def _send_from(pid: int, probes: Sequence[Probe]) -> None:
    if probes:
        words = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-m", MODULE, "send"]
        order = json.dumps({"probes": [asdict(probe) for probe in probes]})
        subprocess.run(words, input=order, text=True, timeout=TIMEOUT_S, check=True)


def send(probes: Sequence[Probe]) -> None:
    """Send each probe's packets from its own address: a bare header, which no service takes for a request."""
    for probe in probes:
        family = socket.AF_INET6 if ip_address(probe.target).version == 6 else socket.AF_INET
        number = socket.IPPROTO_TCP if probe.protocol == "tcp" else socket.IPPROTO_UDP
        packet = _header(probe)
        with socket.socket(family, socket.SOCK_RAW, number) as raw:
            raw.bind((probe.source, 0))
            for _ in range(probe.packets):
                raw.sendto(packet, (probe.target, 0))


def _header(probe: Probe) -> bytes:
    """A TCP acknowledgement of nothing, or an empty UDP datagram, without checksum."""
    if probe.protocol == "udp":
        return struct.pack("!HHHH", probe.source_port, probe.target_port, 8, 0)
    offset = 5 << 4
    return struct.pack("!HHIIBBHHH", probe.source_port, probe.target_port, 0, 0, offset, TCP_ACK, TCP_WINDOW, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
