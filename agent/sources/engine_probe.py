"""What tocsin-probe writes inside vLLM: one small file for each of its processes, read at every poll.

Layouts: probe/tocsin_probe/page.py, here a second time, since the probe is installed elsewhere. Nothing in a file is
believed unasked: it must be a plain file of the right size that belongs to the user of the very process that it names,
in one piece by its sequence and its CRC, with numbers that can be. Ages are made here: the probe writes when a request
arrived, so that they grow while the engine hangs.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from agent.model import Batch, Gap, ProbeFacts, Sample, Why

FOLDER = Path("/run/tocsin/probe")
MAGIC, SIZE, SUFFIX = b"TOCSINP1", 4096, ".probe"
HEAD, GUARD = struct.Struct("<8sIIQQd"), struct.Struct("<QII")
RING = 32
FRONT, SCHEDULER = (64, struct.Struct("<ddQQ")), (192, struct.Struct("<ddQQq"))
RANK, STEPS = (320, struct.Struct("<dd6QdQ5q3q")), (640, struct.Struct(f"<{RING}d"))
TEXT = (1024, struct.Struct("<I1536s"))
HOST_CLOCK, DEVICE_EVENTS, HIDDEN = 1, 2, 3
GRAPHS_USED, GRAPHS_OFF, GRAPHS_NOT_TOLD = 1, 2, 3

MOST_FILES = 256
TRIES, AGAIN_S = 5, 0.0005  # one that is being written is read again
AHEAD_S = 5.0  # a clock that was set back may make an arrival lie in the future, but not by much
MOST_RANKS, MOST_AGE_S = 4096, 30 * 86400.0
GONE_S = 600.0  # for so long it is said that a writer has ended

Reading = Sample | Gap
Owners = Mapping[int, tuple[str, tuple[str, ...]]]  # process -> its target and that one's engines, in order


class Unreadable(Exception):  # noqa: N818  (what the file is)
    """A file that is not believed, and why."""

    def __init__(self, code: Why, why: str) -> None:
        super().__init__(why)
        self.code = code


class Head(NamedTuple):
    """Whose file it is: a process's number in its own PID namespace, and when it started, in clock ticks since boot."""

    pid: int
    ticks: int
    space: int


class Rank(NamedTuple):
    """What one rank tells: seconds, counts so far, its place, and the entries of its last steps by their number."""

    compute_s: float
    waited_s: float
    timed: int
    steps: int
    graph: int
    eager: int
    over: int
    profiled: int
    profiled_s: float
    last_profiled: int
    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    engine: int
    basis: int
    graphs: int
    largest: int


@dataclass(frozen=True, slots=True)
class File:
    """One file that was believed. `pid`: as we see the process; `owner`: None where no engine known here has it."""

    head: Head
    pid: int
    stopped: bool
    owner: tuple[str, tuple[str, ...]] | None
    front: tuple[float, int] | None  # oldest arrival (0: none), how many
    queue: tuple[float, int, int, int] | None  # oldest arrival, how many, steps, engine index
    rank: Rank | None
    entries: Mapping[int, float]  # step -> monotonic s
    told: Mapping[str, Any]


class ProbeSource:
    """Reads the folder; fulfils agent.model.Source. `owners` is set at each tick, as discovery knows it."""

    name = "engine_probe"

    def __init__(self, folder: Path = FOLDER, proc: Path = Path("/proc")) -> None:
        self.owners: Owners = {}
        self.note = "not read yet"
        self._folder, self._proc = folder, proc
        self._told: dict[tuple[str, str, str], float] = {}  # (name, subject, key) -> when it was last told

    def read(self, now: float) -> Batch:
        """Read every file once. A few hundred microseconds."""
        start = time.monotonic()
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(SUFFIX))  # noqa: PTH208
        except FileNotFoundError:
            self.note = f"no engine here has tocsin-probe: there is no folder {self._folder}"
            names = []
        except OSError as error:
            self.note = f"{self._folder}: {error.strerror}"
            return Batch(self.name, now, time.monotonic() - start, tuple(self._silent({}, now)), error=self.note)
        files, faults, ended = self._files(names[:MOST_FILES], now)
        readings = list(self._readings(files, now))
        readings += self._silent({(r.name, r.subject, r.key): r for r in readings if isinstance(r, Sample)}, now)
        facts = tuple(facts_of(files))
        if names or facts:
            self.note = note_of(files, faults, ended, len(names))
        return Batch(self.name, now, time.monotonic() - start, tuple(readings), probes=facts,
                     error="; ".join(faults[:3]) or None)

    def close(self) -> None:
        """Nothing is held."""

    # --- files ------------------------------------------------------------------------------------------------------

    def _files(self, names: Sequence[str], now: float) -> tuple[list[File], list[str], int]:
        """(those that are believed, why others are not, how many are of processes that have ended)."""
        files: list[File] = []
        faults, ended = [], 0
        for name in names:
            try:
                file = self._file(self._folder / name, now)
            except FileNotFoundError:
                continue  # it ended just now
            except OSError as error:
                faults.append(f"{name}: {error.strerror}")
                continue
            except Unreadable as why:
                if why.code is Why.LOST:
                    ended += 1
                else:
                    faults.append(f"{name}: {why}")
                continue
            files.append(file)
        return files, faults, ended

    def _file(self, path: Path, now: float) -> File:
        raw, uid, handle = read_page(path)
        try:
            head = head_of(raw)
            pid, stopped = self._process(head, uid)
            for _ in range(TRIES):
                try:
                    return file_of(raw, head, pid, stopped, self.owners.get(pid), now)
                except Unreadable as why:
                    if why.code is not Why.BAD_PAGE:
                        raise
                    torn = why
                time.sleep(AGAIN_S)
                raw = os.pread(handle, SIZE, 0)
            raise torn
        finally:
            os.close(handle)

    def _process(self, head: Head, uid: int) -> tuple[int, bool]:
        """(the process as we see it, it is stopped). Raises Unreadable."""
        ours = namespace_of(self._proc / "self")
        if head.space in (0, ours):
            state = state_of(self._proc, head.pid)
            found = None if state is None or state[0] != head.ticks else head.pid
        else:  # a container has numbers of its own; among an engine's processes its start tells it
            found = next((pid for pid in self.owners if _is(self._proc, pid, head)), None)
            state = None if found is None else state_of(self._proc, found)
        if found is None or state is None or state[1] in "ZX":
            raise Unreadable(Why.LOST, f"its process {head.pid} has ended")
        owner = uid_of(self._proc, found)
        if uid not in (0, owner):
            raise Unreadable(Why.ERROR, f"it belongs to user {uid} and its process {found} to {owner}: it is forged")
        return found, state[1] in "Tt"

    # --- readings ---------------------------------------------------------------------------------------------------

    def _readings(self, files: Sequence[File], now: float) -> Iterator[Reading]:
        by_target: dict[str, list[File]] = {}
        for file in files:
            if file.owner is not None:
                by_target.setdefault(file.owner[0], []).append(file)
        for target, those in by_target.items():
            fronts = [file.front for file in those if file.front is not None]
            if fronts:  # of several API servers the worst one
                oldest = min((arrived for arrived, _ in fronts if arrived), default=0.0)
                yield Sample("probe_first_token_age_s", target, age_s(oldest, now), now)
                yield Sample("probe_unanswered", target, float(sum(count for _, count in fronts)), now)
            for subject, own in by_engine(those).items():
                yield from engine_readings(subject, own, now)

    def _silent(self, told: Mapping[tuple[str, str, str], object], now: float) -> list[Gap]:
        """What was told within the last 10 min and is not now."""
        names = {(name, subject) for name, subject, _ in told}
        self._told |= dict.fromkeys(told, now)
        self._told = {key: at for key, at in self._told.items() if now - at < GONE_S}
        gone = {(name, subject) for name, subject, _ in self._told} - names
        why = "the engine's process that wrote it has ended, or its file is not believed"
        return [Gap(name, subject, Why.LOST, why, now) for name, subject in sorted(gone)]


def read_page(path: Path) -> tuple[bytes, int, int]:
    """(bytes, owner, descriptor) of a file that may be one of ours. Raises Unreadable, OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
        check_form(about)
        return os.pread(handle, SIZE, 0), about.st_uid, handle
    except BaseException:
        os.close(handle)
        raise


def check_form(about: os.stat_result) -> None:
    """A plain file of the right size that its owner alone may write. Raises Unreadable."""
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        raise Unreadable(Why.ERROR, "it is no plain file of its own")
    if about.st_mode & 0o022:
        raise Unreadable(Why.ERROR, "others than its owner may write to it")
    if about.st_size != SIZE:
        raise Unreadable(Why.ERROR, f"it has {about.st_size} bytes and must have {SIZE}")


def head_of(raw: bytes) -> Head:
    """Whose it is. Raises Unreadable."""
    magic, size, pid, ticks, space, _ = HEAD.unpack_from(raw, 0)
    if magic != MAGIC or size != SIZE or not 0 < pid < 2**22 + 1:
        raise Unreadable(Why.ERROR, f"it begins with {magic!r}: another version's, or no file of tocsin-probe")
    return Head(pid, ticks, space)


def section(raw: bytes, at: tuple[int, struct.Struct]) -> tuple[Any, ...] | None:
    """The numbers of a section; None: never written. Raises Unreadable where it is torn."""
    offset, numbers = at
    sequence, crc, _ = GUARD.unpack_from(raw, offset)
    if sequence == 0:
        return None
    data = raw[offset + GUARD.size:offset + GUARD.size + numbers.size]
    if sequence % 2 or zlib.crc32(data) != crc:
        raise Unreadable(Why.BAD_PAGE, "it is torn: half written, or damaged")
    return numbers.unpack(data)


def file_of(raw: bytes, head: Head, pid: int, stopped: bool, owner: tuple[str, tuple[str, ...]] | None, now: float,
            ) -> File:
    """A file in its parts, each checked. Raises Unreadable."""
    front, queue, numbers = section(raw, FRONT), section(raw, SCHEDULER), section(raw, RANK)
    entries, text = section(raw, STEPS), section(raw, TEXT)
    for arrived in (part[0] for part in (front, queue) if part is not None):
        if arrived != 0 and not now - MOST_AGE_S <= arrived <= now + AHEAD_S:
            raise Unreadable(Why.OUT_OF_RANGE, f"a request that arrived at {arrived:g}, unix seconds")
    rank = None if numbers is None else Rank(*numbers)
    if rank is not None and not sane(rank):
        raise Unreadable(Why.OUT_OF_RANGE, "a rank's numbers that cannot be")
    if queue is not None and not 0 <= queue[4] < MOST_RANKS:
        raise Unreadable(Why.OUT_OF_RANGE, f"an engine of number {queue[4]}")
    ring = {}
    if rank is not None and entries is not None and all(map(math.isfinite, entries)):
        ring = {step: entries[step % RING] for step in range(max(1, rank.steps - RING + 2), rank.steps + 1)}
    return File(head, pid, stopped, owner, None if front is None else (front[0], front[3]),
                None if queue is None else (queue[0], queue[3], queue[2], queue[4]), rank, ring, told_of(text))


def sane(rank: Rank) -> bool:
    """Whether these can be a rank's numbers."""
    spans = (rank.compute_s, rank.waited_s, rank.profiled_s)
    places = (rank.rank, rank.tp_rank, rank.pp_rank, rank.engine)
    return (all(math.isfinite(s) and s >= 0 for s in spans) and all(0 <= n < MOST_RANKS for n in places)
            and 0 < rank.tp_size <= MOST_RANKS and rank.timed <= rank.steps
            and rank.graph + rank.eager + rank.over <= rank.steps)


def told_of(text: tuple[Any, ...] | None) -> Mapping[str, Any]:
    """What a file says in words; nothing where it cannot be read."""
    if text is None or text[0] > len(text[1]):
        return {}
    try:
        told = json.loads(text[1][:text[0]])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(told, dict):
        return {}
    seams = told.get("seams")
    shown = {_plain(k): _plain(v) for k, v in seams.items()} if isinstance(seams, dict) else {}
    return {"probe": _plain(told.get("probe")), "vllm": _plain(told.get("vllm")), "seams": shown}


def _plain(value: object) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", str(value))[:200]


def age_s(arrived: float, now: float) -> float:
    """How long ago; 0 where nobody waits."""
    return max(0.0, now - arrived) if arrived else 0.0


def by_engine(files: Sequence[File]) -> dict[str, list[File]]:
    """The files of one target's cores and ranks, by the subject of their engine."""
    found: dict[str, list[File]] = {}
    for file in files:
        assert file.owner is not None  # noqa: S101  (those without are left out)
        engines = file.owner[1]
        for index in {part for part in (file.queue and file.queue[3], file.rank and file.rank.engine)
                      if part is not None}:
            if len(engines) == 1 or index < len(engines):
                found.setdefault(engines[0] if len(engines) == 1 else engines[index], []).append(file)
    return found


def engine_readings(subject: str, files: Sequence[File], now: float) -> Iterator[Reading]:
    """What the core and the ranks of one engine tell."""
    queues = [file.queue for file in files if file.queue is not None]
    if queues:
        oldest = min((queue[0] for queue in queues if queue[0]), default=0.0)
        yield Sample("probe_queue_age_s", subject, age_s(oldest, now), now)
        yield Sample("probe_queued", subject, float(sum(queue[1] for queue in queues)), now)
        yield Sample("probe_steps", subject, float(sum(queue[2] for queue in queues)), now)
    ranks = {file.rank.rank: file for file in files if file.rank is not None}
    if not ranks:
        return
    first = ranks[min(ranks)].rank
    assert first is not None  # noqa: S101
    yield from graph_readings(subject, first, now)
    if first.tp_size > 1:
        yield from rank_readings(subject, ranks, now)


def graph_readings(subject: str, rank: Rank, now: float) -> Iterator[Reading]:
    """Decode steps by how they ran. All ranks of an engine run alike: the first one tells."""
    why = {GRAPHS_OFF: "CUDA graphs are off (--enforce-eager, or a device without)",
           GRAPHS_NOT_TOLD: "this vLLM chooses CUDA graphs where the probe cannot see it"}.get(rank.graphs)
    if why is not None:
        yield Gap("probe_graph_steps", subject, Why.NOT_SUPPORTED, why, now)
    elif rank.graphs == GRAPHS_USED:
        for key, count in (("graph", rank.graph), ("eager", rank.eager), ("over", rank.over)):
            yield Sample("probe_graph_steps", subject, float(count), now, key)
        yield Sample("probe_graph_largest", subject, float(rank.largest), now)


def rank_readings(subject: str, ranks: Mapping[int, File], now: float) -> Iterator[Reading]:
    """Compute time by rank where it can be had, else how late each rank's host enters a step."""
    told = {number: file.rank for number, file in sorted(ranks.items()) if file.rank is not None}
    yield Sample("probe_tp_size", subject, float(next(iter(told.values())).tp_size), now)
    for number, late_s in lateness(ranks).items():
        yield Sample("probe_rank_late_s", subject, late_s, now, str(number))
    for number, rank in told.items():
        if rank.profiled:
            yield Sample("probe_profiled_seconds", subject, rank.profiled_s, now, str(number))
            yield Sample("probe_profiled_steps", subject, float(rank.profiled), now, str(number))
    if any(rank.basis == HIDDEN for rank in told.values()):
        yield Gap("probe_rank_seconds", subject, Why.NOT_SUPPORTED, "CUDA graphs, or a compiled model, hide the waiting"
                  " for other ranks from the host", now)
        return
    for number, rank in told.items():
        if rank.basis in (HOST_CLOCK, DEVICE_EVENTS):
            yield Sample("probe_rank_seconds", subject, rank.compute_s, now, str(number))
            yield Sample("probe_rank_steps", subject, float(rank.timed), now, str(number))


def lateness(ranks: Mapping[int, File]) -> dict[int, float]:
    """By how much each rank enters a step after the first one does: the median over the steps that all still tell."""
    if len(ranks) < 2:
        return {}
    common = set.intersection(*(set(file.entries) for file in ranks.values()))
    late: dict[int, list[float]] = {number: [] for number in ranks}
    for step in common:
        first = min(file.entries[step] for file in ranks.values())
        for number, file in ranks.items():
            late[number].append(file.entries[step] - first)
    return {number: median(values) for number, values in late.items() if values}


def facts_of(files: Sequence[File]) -> Iterator[ProbeFacts]:
    """What a person should know of each target's probe."""
    by_target: dict[str, list[File]] = {}
    for file in files:
        if file.owner is not None:
            by_target.setdefault(file.owner[0], []).append(file)
    for target, those in by_target.items():
        seams: dict[str, str] = {}
        for file in those:
            for name, state in file.told.get("seams", {}).items():
                if not state.startswith("not imported") and seams.get(name) in (None, "works"):
                    seams[name] = state
        aside = [f"{name}: {state}" for name, state in sorted(seams.items()) if state != "works"]
        ranks = sum(file.rank is not None for file in those)
        parts = [part for part, has in (
            ("front end", any(file.front for file in those)), ("queue", any(file.queue for file in those)),
            ("1 rank" if ranks == 1 else f"{ranks} ranks", ranks > 0)) if has]
        stopped = [file.pid for file in those if file.stopped]
        yield ProbeFacts(target, next((file.told["vllm"] for file in those if file.told), "?"),
                         tuple(parts), tuple(aside), tuple(stopped))


def note_of(files: Sequence[File], faults: Sequence[str], ended: int, names: int) -> str:
    """The state of the folder in one line."""
    strangers = sum(file.owner is None for file in files)
    said = [f"{len(files)} files of tocsin-probe"]
    said += [f"{strangers} of processes that belong to no engine known here"] if strangers else []
    said += [f"{ended} of processes that have ended, or are not seen from here"] if ended else []
    said += [f"{len(faults)} not believed: {faults[0]}"] if faults else []
    said += [f"{names - MOST_FILES} more were not read"] if names > MOST_FILES else []
    return "; ".join(said)


# --- processes -------------------------------------------------------------------------------------------------------


def state_of(proc: Path, pid: int) -> tuple[int, str] | None:
    """(start in clock ticks since boot, state letter) of a process; None: there is none."""
    try:
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]), fields[0]
    except (OSError, ValueError, IndexError):
        return None


def uid_of(proc: Path, pid: int) -> int | None:
    """The effective user of a process."""
    try:
        told = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^Uid:\s+\d+\s+(\d+)", told, re.MULTILINE)
    return None if found is None else int(found[1])


def namespace_of(process: Path) -> int:
    """The number of a process's PID namespace; 0 where we may not look."""
    try:
        return int(str((process / "ns" / "pid").readlink()).partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0


def _is(proc: Path, pid: int, head: Head) -> bool:
    """Whether a process, as we see it, is the one that calls itself `head` in a namespace of its own."""
    state = state_of(proc, pid)
    if state is None or state[0] != head.ticks:
        return False
    try:
        told = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    found = re.search(r"^NSpid:(.*)$", told, re.MULTILINE)
    return found is not None and found[1].split()[-1:] == [str(head.pid)]

