"""Network namespaces for tests: made, wired, run in, and gone at the end whatever happened.

    with lab() as net:
        client, engine = net.namespace("client"), net.namespace("engine")
        net.link(client, "10.77.0.1/24", engine, "10.77.0.2/24")
        server = net.start(engine, sys.executable, "-c", SERVER)

Nothing leaves them: there is no route to the machine's own network. Needs root: `need(*NEEDS)` first.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.needs import find

NEEDS = ("root", "ip", "nft")
TIMEOUT_S = 30.0
_numbers = itertools.count()


def _run(*words: str, stdin: str | None = None) -> str:
    """What a command prints; its own words in the error where it fails."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout


@dataclass(frozen=True)
class Netns:
    """A named network namespace."""

    name: str

    @property
    def path(self) -> str:
        """Where `nsenter --net=` finds it."""
        return f"/run/netns/{self.name}"

    def words(self, *words: str) -> list[str]:
        """A command as it is run in here; the process that is started becomes the command, its pid is the same."""
        return [find("nsenter") or "nsenter", f"--net={self.path}", find(words[0]) or words[0], *words[1:]]

    def run(self, *words: str, stdin: str | None = None) -> str:
        """What a command prints that is run in here and must succeed."""
        return _run(*self.words(*words), stdin=stdin)

    def ruleset(self) -> str:
        """All of its nftables, without counters: for comparison byte by byte."""
        return self.run("nft", "-s", "list", "ruleset")


@dataclass
class Lab:
    """What one test made."""

    made: list[Netns] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def namespace(self, name: str) -> Netns:
        """A new namespace, its loopback interface up."""
        netns = Netns(f"tocsin-test-{os.getpid()}-{next(_numbers)}-{name}")
        _run(find("ip") or "ip", "netns", "add", netns.name)
        self.made.append(netns)
        netns.run("ip", "link", "set", "lo", "up")
        return netns

    def link(self, one: Netns, one_address: str, other: Netns, other_address: str) -> None:
        """A cable between two namespaces; addresses with their prefix length, IPv4 or IPv6."""
        devices = f"to{next(_numbers)}", f"to{next(_numbers)}"
        one.run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1], "netns", other.name)
        for netns, device, address in ((one, devices[0], one_address), (other, devices[1], other_address)):
            # An IPv6 address is otherwise not to be used for a second.
            netns.run("ip", "address", "add", address, "dev", device, *(["nodad"] if ":" in address else []))
            netns.run("ip", "link", "set", device, "up")

    def start(self, netns: Netns, *words: str, stdin: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
        """A process in a namespace; stdin and stdout are pipes (text, a line at a time). Ended with the lab."""
        process = subprocess.Popen(netns.words(*words), stdin=stdin, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.started.append(process)
        return process

    def close(self) -> None:
        """End the processes, delete the namespaces."""
        for process in reversed(self.started):
            process.terminate()  # nginx ends its worker so, and one that is killed leaves it behind
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()
        for netns in reversed(self.made):
            if os.path.exists(netns.path):  # noqa: PTH110  (one may have been deleted by its test)
                _run(find("ip") or "ip", "netns", "delete", netns.name)


@contextmanager
def lab() -> Iterator[Lab]:
    """A lab for one test."""
    net = Lab()
    try:
        yield net
    finally:
        net.close()


def says(process: subprocess.Popen[str]) -> str:
    """The next line of a process, without its end; empty where it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Tell a process a line and hear its next one."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return says(process)
