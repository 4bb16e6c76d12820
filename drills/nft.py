"""nftables for faults: a table that is gone when the process that made it is.

A table with `flags owner` lives as long as the netlink socket that made it. Here that socket belongs to an `nft -i`
whose standard input only the holder can write: the holder dies, by whatever signal, nft reads end-of-file, and the
kernel takes the table. Nobody else can delete it meanwhile, not even `nft flush ruleset`. Each table also holds a set
`armed` whose element times out: rules that match by it fall silent at the deadline even if all of the above hangs.

Nothing here knows what a fault is: packet-loss and the redirect of upstream-timeout share it.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from drills import proc
from drills.model import Left, Refused

PREFIX = "tocsin_"  # of every table of ours
INSIDE = "TOCSIN_TABLE"  # in the environment of an `nft -i` of ours: which table it owns
# Debian keeps nft and ip where an ordinary user's PATH does not look.
SEARCH = (os.defpath, "/usr/local/sbin", "/usr/sbin", "/sbin")
PACKAGES = {"nft": "nftables", "ip": "iproute2", "ss": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
COMMAND_S = 5.0  # of one nft command; it takes 10 ms
PIECES_S = 0.2  # between two pieces of one sentence of nft
# How a kernel says that it has no nftables, no owned tables, or not one of the expressions.
OLD_KERNEL = ("Operation not supported", "Protocol not supported", "No such file or directory")
LONGEST_LINE = select.PIPE_BUF  # a line up to this reaches nft whole or not at all


class NftError(OSError):
    """What nft said when it would not."""


class GoneError(NftError):
    """The network namespace, or the table, is not there any more."""


@dataclass(frozen=True, slots=True)
class Place:
    """One network namespace, told apart from a later one under the same path."""

    path: str | None  # /run/netns/NAME or /proc/PID/ns/net; None: that of whoever made the plan
    inode: int


@dataclass(frozen=True, slots=True)
class State:
    """What a table of ours says about itself: packets by named counter, and whether `armed` still holds its port."""

    packets: Mapping[str, int]
    armed: bool


def find(program: str) -> str:
    """Full path of a program; Refused with the package to install where it is missing."""
    found = shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), *SEARCH)))
    if found is None:
        raise Refused(f"{program} is not installed: apt-get install {PACKAGES.get(program, program)}")
    return found


def place_of(netns: str | int | None) -> Place:
    """The namespace under a path, of a process (by pid), or our own (None). Raises Refused."""
    path = f"/proc/{netns}/ns/net" if isinstance(netns, int) else netns
    own = _inode("/proc/self/ns/net")
    if path is None:
        return Place(None, own)
    try:
        inode = _inode(path)
    except OSError as error:
        raise Refused(f"network namespace {path}: {error.strerror}; `ip netns list` shows the named ones") from None
    return Place(None if inode == own else path, inode)


def _inode(path: str) -> int:
    return Path(path).stat().st_ino


@contextmanager
def entrance(place: Place) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Words to put before a command so that it runs in `place`, and the descriptors that it must inherit.

    The namespace is opened, compared by inode and entered by that descriptor, so that nothing can be swapped in
    between. Raises GoneError where it is nowhere any more.
    """
    if _inode("/proc/self/ns/net") == place.inode:
        yield [], ()
        return
    descriptor = _open(place)
    try:
        yield [find("nsenter"), f"--net=/proc/self/fd/{descriptor}"], (descriptor,)
    finally:
        os.close(descriptor)


def _open(place: Place) -> int:
    """The process in the plan may have died while its namespace lives on in others: they are asked too."""
    for path in _paths(place):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(descriptor).st_ino == place.inode:
                return descriptor
            os.close(descriptor)
    if place.path is not None and _hidden(place.path):
        raise NftError(f"network namespace {place.path}: permission denied; run this as root")
    raise GoneError(f"network namespace {place.path or 'of the plan'} (inode {place.inode}) is gone")


def _paths(place: Place) -> Iterator[str]:
    if place.path is not None:
        yield place.path
    yield from (f"/proc/{pid}/ns/net" for pid in proc.pids())


def _hidden(path: str) -> bool:
    try:
        Path(path).stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def run(place: Place, *words: str, stdin: str | None = None) -> str:
    """What a short command prints when it runs in `place`. Raises NftError with what it said, GoneError."""
    with entrance(place) as (before, descriptors):
        try:
            done = subprocess.run(
                [*before, find(words[0]), *words[1:]],
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                pass_fds=descriptors,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NftError(f"{shlex.join(words)}: no answer within {COMMAND_S:g} s") from None
    if done.returncode != 0:
        said = done.stderr or f"exit status {done.returncode}"
        if "No such file or directory" in said:
            raise GoneError(f"{shlex.join(words)}: {' '.join(said.split())}")
        raise NftError(f"{shlex.join(words)}: {_why(said)}")
    return done.stdout


def typed(place: Place, *words: str) -> str:
    """A command as a person would type it to run it in `place`."""
    path = place.path
    if path is not None and not _is(path, place.inode):
        path = next((other for other in _paths(Place(None, place.inode)) if _is(other, place.inode)), path)
    return shlex.join([*([] if path is None else ["nsenter", f"--net={path}"]), *words])


def _is(path: str, inode: int) -> bool:
    try:
        return _inode(path) == inode
    except OSError:
        return False


def tables(place: Place) -> list[str]:
    """The tables of ours (of any run) in `place`."""
    # The JSON of nft 1.0.6 prints whatever lies in memory as a table's flags: names are read from the text.
    return re.findall(rf"^table inet ({PREFIX}\w+)$", run(place, "nft", "list", "tables"), re.MULTILINE)


def table_text(table: str, *, run_id: str, ports: Sequence[int], deadline_s: float, body: Sequence[str]) -> str:
    """The one line that makes a table of ours: owned, with its run's name, `armed` for `deadline_s` from then on.

    `body`: counters and chains, each whole; rules match by `th dport @armed`.
    """
    seconds = max(1, round(deadline_s))
    armed = ", ".join(f"{port} timeout {seconds}s" for port in ports)
    comment = re.sub(r"[^\w.:+-]", "_", run_id)[:100]
    parts = [
        "flags owner",
        f'comment "tocsin drill {comment}"',
        f"set armed {{ type inet_service; flags timeout; elements = {{ {armed} }}; }}",
        *body,
    ]
    return f"add table inet {table} {{ {''.join(f'{part}; ' for part in parts)}}}"


def state(place: Place, table: str) -> State:
    """Counters and set of a table of ours, now. Raises GoneError where it is not there, NftError."""
    script = f"list counters table inet {table}; list set inet {table} armed"
    packets: dict[str, int] = {}
    armed = False
    for line in run(place, "nft", "-j", script).splitlines():
        for entry in json.loads(line)["nftables"] if line else ():
            if "counter" in entry:
                packets[entry["counter"]["name"]] = int(entry["counter"]["packets"])
            elif "set" in entry:
                armed = bool(entry["set"].get("elem"))
    return State(packets, armed)


class Owner:
    """A table of ours that is in. It ends with this process, with `close`, or when its `nft -i` is killed."""

    def __init__(self, place: Place, table: str, text: str, injector_fds: Sequence[int] = ()) -> None:
        """Put `text` in, and return once the kernel has it. Raises Refused, NftError, GoneError; then nothing is in."""
        if len(text) >= LONGEST_LINE or "\n" in text:
            raise Refused(f"table {table}: its text has {len(text)} characters; it must be a line under {LONGEST_LINE}")
        for other in tables(place):
            if not owners(other):  # of a run of ours that is gone: what a kernel without owned tables leaves
                end(place, other)
        if others := tables(place):
            raise Refused(
                f"{', '.join(others)} is in {place.path or 'this network namespace'} already; two faults at once would"
                " add up: `tocsin drill heal` ends what an earlier run left"
            )
        self.place, self.table = place, table
        with entrance(place) as (before, descriptors):
            self._nft = subprocess.Popen(
                [*before, find("nft"), "-i"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # its prompts
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, INSIDE: table},
                pass_fds=(*descriptors, *injector_fds),
            )
        try:
            self._tell(f"{text}\n")
            self._until_in(COMMAND_S)
        except BaseException:
            self.close()
            raise

    def state(self) -> State:
        """As `state`."""
        return state(self.place, self.table)

    def close(self) -> None:
        """End the table in good order; may be called again."""
        if self._nft.stdin and not self._nft.stdin.closed:
            self._nft.stdin.close()
        try:
            self._nft.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._nft.kill()
            self._nft.wait()
        if self._nft.stderr:
            self._nft.stderr.close()

    def _tell(self, line: str) -> None:
        assert self._nft.stdin is not None  # noqa: S101  (a pipe, by its constructor)
        with suppress(BrokenPipeError):  # it died: what it said says why
            self._nft.stdin.write(line.encode())

    def _until_in(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.table not in tables(self.place):
            ended = self._nft.poll() is not None
            said = self._said()
            if ended or said or time.monotonic() > end:
                raise NftError(f"table {self.table} could not be armed: {_why(said)}")
            time.sleep(0.005)

    def _said(self) -> str:
        """What nft wrote, to its end: it writes a sentence in pieces."""
        assert self._nft.stderr is not None  # noqa: S101
        said, wait_s = b"", 0.0
        while select.select([self._nft.stderr], [], [], wait_s)[0]:
            part = os.read(self._nft.stderr.fileno(), 65536)
            if not part:
                break
            said, wait_s = said + part, PIECES_S
        return said.decode(errors="replace")


def _why(said: str) -> str:
    """nft's words, and for those that mean an old kernel, what to do."""
    words = " ".join(said.split()) or "nft said nothing"
    if any(sign in words for sign in OLD_KERNEL):
        words += (
            "; this kernel's nftables lacks something (needed: 5.12 or later, with inet tables, nft_numgen, nft_nat)."
            " There is no iptables form: such a rule would outlive its drill"
        )
    return words


def owners(table: str) -> list[int]:
    """The pids of `nft -i` that own `table`, by what is written in their environment."""
    return [pid for pid in proc.pids() if _owns(pid, table)]


def _owns(pid: int, table: str) -> bool:
    """Also while it is still nsenter: it has its line in the pipe, and would make the table after we looked."""
    try:
        return f"{INSIDE}={table}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def left(place: Place, table: str) -> list[Left]:
    """What of `table` is still in the world, each with the command that ends it; where nobody can look, that too."""
    alive = owners(table)
    kill = shlex.join(["kill", "-KILL", *map(str, alive)])
    where = place.path or "this network namespace"
    try:
        there = table in tables(place)
    except GoneError:
        there = False
    except (OSError, Refused) as error:
        return [Left(f"cannot look into {where}: {error}", typed(place, "nft", "list", "tables"))]
    if there and alive:  # a foreign `nft delete` gets EPERM: only the end of its owner ends it
        return [Left(f"nftables table {table} in {where}, held by `nft -i`", kill)]
    if there:
        return [Left(f"nftables table {table} in {where}", typed(place, "nft", "delete", "table", "inet", table))]
    return [Left(f"`nft -i` of table {table}", kill)] if alive else []


def end(place: Place, table: str) -> None:
    """End `table` whoever holds it. Idempotent; what it could not end, `left` tells."""
    for pid in owners(table):
        with suppress(ProcessLookupError):
            process = proc.identify(pid)
            if _owns(pid, table):  # asked again, now that we know whom we asked
                proc.end(process, COMMAND_S)
    with suppress(OSError, Refused):
        if table in tables(place):
            run(place, "nft", "delete", "table", "inet", table)

