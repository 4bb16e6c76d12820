"""Fuzz: whatever a page, an answer, a configuration, a ledger or the database says, no crash, no hang, no growth.

    python -m tests.fuzz --pages 1000000 [--seed 7] [--part pages]

Of each part so many inputs are made from good ones, by mutations that repeat with the seed. What is wrong with one is
printed, and the input is kept in a file. The pages of all engines go to one node that lives through them all, as the
agent's does. The last line says how it ended.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import structlog

from agent.config import load_all
from agent.engines.pages import PageReader
from agent.engines.trtllm_json import as_page, is_json
from agent.exposition import PageError, decode
from agent.loop import Agent, Collector
from agent.model import AlertMessage, Batch, Notice, Rejected, Sample, TryLater
from agent.node import Node, Setup
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.channel import Channel, request
from agent.notifiers.slack import judge_answer
from agent.notifiers.webhook import Webhook
from agent.signals import SIGNALS, Target
from agent.silences import from_plain
from agent.sources.fetch import Fetcher, FetchError
from agent.store import Store, StoreError
from agent.strict import ConfigErrors
from drills import ledger, lock, record
from drills.model import State
from rules import severity_of
from tests.engine_pages import GOLDEN
from tests.scenes import SLO, T0, built_in

DATA = Path(__file__).parent / "data"
CHUNK = 2000  # pages, or as many of the others as go with them, that one worker does at once
SHARES = {"pages": 1.0, "answers": 0.02, "configurations": 0.004, "ledgers": 0.05, "databases": 0.001}  # inputs a page
SLOWEST_S = 1.0  # of CPU; a machine may be busy
SLOWEST_ANSWER_S = 1.0  # waited for an answer that comes in no time
GROWTH_MIB = 128.0  # the windows of 39 engines fill meanwhile: an hour of all they tell, three days of it coarse
FAULTS_KEPT = 20
STEP_EVERY = 100  # pages
WHOLE = 0.1  # of the pages; of the others a stretch, since most of the time goes into what is not mutated
STRETCH_LINES = 25
JSON_PAGE = b"""[{"numQueuedRequests": 3, "kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 10, "cacheHitRate": 0.5},
 "inflightBatchingStats": {"numScheduledRequests": 2, "numPausedRequests": 1}}]"""
TOKENS = [
    *(b" ", b"\n", b"\r", b"\t", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"=", b"#", b":", b"_", b"0", b"1", b"-1"),
    *(b"NaN", b"+Inf", b"-Inf", b"1e999", b"1e308", b"-0", b"0x10", b"9" * 400, b"# TYPE ", b"# EOF\n", b"_total"),
    *(b"_bucket", b'le="', b'engine="', b"null", b"true", b"\xff", b"\xed\xa0\x80", b"\x00", b"\x1f\x8b", b"&a "),
    *(b"*a", b"\xe2\x80\xae", b"<!ELEMENT", b"!!python/object:os.system", b"\xc3\xa9" * 50),
]


class Wrong(NamedTuple):
    """What is wrong with one input, and where it is kept."""

    part: str
    number: int
    what: str
    kept: Path

    def __str__(self) -> str:
        return f"{self.part} {self.number}: {self.what}\n    the input: {self.kept}"


@dataclass
class Told:
    """What became of a chunk."""

    worker: int = 0
    done: int = 0
    good: int = 0  # taken; the rest was refused as it should be
    slowest_s: float = 0.0
    peak_mib: float = 0.0
    wrong: list[Wrong] = field(default_factory=list)


def mutated(good: bytes, other: bytes, dice: random.Random) -> bytes:
    """A good input with a few things wrong."""
    body = bytearray(good)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 8))):
        at = dice.randrange(len(body) + 1)
        how = dice.randrange(9)
        if how == 0:
            body[at : at + dice.choice((0, 1, 4, 40))] = dice.choice(TOKENS)
        elif how == 1 and body:
            body[at % len(body)] ^= 1 << dice.randrange(8)
        elif how == 2:
            del body[at : at + dice.choice((1, 10, 200, len(body)))]
        elif how == 3:
            body[at:at] = body[at : at + dice.choice((10, 200, 2000))] * dice.choice((1, 2, 20))
        elif how == 4:  # half of another
            start = dice.randrange(len(other) + 1)
            body[at:at] = other[start : start + dice.choice((20, 400, 4000))]
        elif how == 5:
            body[at:at] = dice.choice(TOKENS) * dice.choice((1, 50, 5000))
        elif how == 6:  # another number at the end of a line
            end = body.find(b"\n", at)
            space = body.rfind(b" ", 0, end)
            if 0 <= space < end:
                number = dice.choice((b"%d" % dice.randrange(10**9), b"%g" % dice.uniform(0, 2), dice.choice(TOKENS)))
                body[space + 1 : end] = number
        elif how == 7:  # a line lost, or moved
            lines = body.split(b"\n")
            line = lines.pop(dice.randrange(len(lines)))
            if dice.random() < 0.5:
                lines.insert(dice.randrange(len(lines) + 1), line)
            body = bytearray(b"\n".join(lines))
        else:
            body[at : at + 8] = dice.randbytes(8)
    return bytes(body)


# --- pages ------------------------------------------------------------------------------------------------------------


class World:
    """A node with every engine, which lives as long as its worker."""

    def __init__(self) -> None:
        self.good = {path.stem: path.read_bytes() for path in sorted(GOLDEN.glob("*.txt"))} | {"trtllm-json": JSON_PAGE}
        self.names = list(self.good)
        self.now = T0
        targets = tuple(Target(name, (), SLO) for name in self.names)
        self.readers = {name: PageReader(name) for name in self.names}
        self.node = Node(Setup("node", 5.0, SLO, targets, tuple(built_in().values()), severity_of))

    def page(self, number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
        """One page of one engine; True where it was taken."""
        name = dice.choice(self.names)
        good = self.good[name]
        if dice.random() > WHOLE:
            lines = good.splitlines(keepends=True)
            start = dice.randrange(len(lines))
            good = b"".join(lines[start : start + STRETCH_LINES])
        body = mutated(good, self.good[dice.choice(self.names)], dice)
        keep(body)
        content_type = dice.choice(("text/plain; version=0.0.4", "text/plain", "", "application/openmetrics-text"))
        self.now += 5.0 / len(self.names)
        reader = self.readers[name] if dice.random() < 0.9 else PageReader(name)
        error = None
        try:
            body = decode(body, dice.choice((None, None, None, "gzip", "identity")), 64 << 20)
            readings = reader.read(as_page(body) if is_json(body) else body, content_type, self.now)
        except PageError as refused:
            error = str(refused)
            readings = reader.failed(refused.code, error, self.now)
        for reading in readings:
            if isinstance(reading, Sample) and not isfinite(reading.value):
                raise AssertionError(f"{reading.name} of {reading.subject} is {reading.value}: no sample may be")
        self.node.take(Batch(f"engine:{name}", self.now, 0.01, tuple(readings), engine=reader.facts, error=error))
        if number % STEP_EVERY == 0:
            self.node.step(self.now, STEP_EVERY * 5.0 / len(self.names))
            list(self.node.windows.unsaved())
            for row in self.node.check()["signals"]:
                if row["value"] is not None and not isfinite(row["value"]):
                    raise AssertionError(f"{row['signal']} of {row['subject']} is {row['value']}")
        return error is None


@cache
def world() -> World:
    """This worker's."""
    return World()


def page(number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
    """A page."""
    return world().page(number, dice, keep)


# --- answers ----------------------------------------------------------------------------------------------------------

JSON = b"Content-Type: application/json\r\n"
ANSWERS = [b"HTTP/1.1 " + told for told in (
    b"200 OK\r\n" + JSON + b"Content-Length: 2\r\n\r\n{}",
    b"429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",
    b"503 -\r\nRetry-After: Mon, 30 Nov 2026 06:52:35 GMT\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbusy\r\n0\r\n\r\n",
    b"400 Bad Request\r\n" + JSON + b'Content-Length: 38\r\n\r\n{"status":"error","error":"bad label"}',
    b"302 Found\r\nLocation: http://127.0.0.1:1/elsewhere\r\nContent-Length: 0\r\n\r\n",
    b'200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 24\r\n\r\n{"ok":true,"error":null}',
)]
MESSAGE = AlertMessage("n/r/s", "firing", "page", {"alertname": "A"}, {"summary": "s"}, T0, None)


class Parrot:
    """A server that answers every request with the bytes that it was handed last, and hangs up."""

    def __init__(self) -> None:
        self.says = b""
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=(self._server.accept()[0], self.says), daemon=True).start()

    @staticmethod
    def _answer(one: socket.socket, says: bytes) -> None:
        with one, suppress(OSError):
            one.settimeout(5.0)
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += one.recv(65536) or b"\r\n\r\n"
            one.sendall(says)
            one.shutdown(socket.SHUT_WR)
            while one.recv(65536):  # else what the other still sends is answered by a reset, which eats our answer
                pass


@cache
def parrot() -> Parrot:
    """This worker's."""
    return Parrot()


def answer(number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
    """An answer to a notice, or to a scrape."""
    server = parrot()
    server.says = mutated(dice.choice(ANSWERS), dice.choice(ANSWERS), dice)
    keep(server.says)
    channels: list[Channel] = [Webhook("w", lambda: server.url), Alertmanager("a", [server.url], tuple)]
    kind = dice.randrange(4)
    began = time.monotonic()
    try:
        if kind < 2:
            channels[kind].send([Notice(number, "c", MESSAGE, T0, T0)], T0)
        elif kind == 2:
            request("POST", f"{server.url}/x", T0, b"{}", tell_body=True, judge=judge_answer)
        else:
            fetcher = Fetcher(f"{server.url}/metrics", {}, connect_s=1.0, total_s=3.0, limit_bytes=1 << 20)
            try:
                fetcher.get()
            finally:
                fetcher.close()
    except (Rejected, TryLater, FetchError):
        return False
    finally:
        took_s = time.monotonic() - began
        if took_s > SLOWEST_ANSWER_S:
            raise AssertionError(f"{took_s:.1f} s for an answer that came at once")
    return True


# --- configurations, ledgers, databases -------------------------------------------------------------------------------


@cache
def configurations() -> Sequence[bytes]:
    """Good ones and bad ones."""
    return [path.read_bytes() for path in sorted((DATA / "config").glob("*.yaml"))]


def configuration(number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
    """A configuration as `tocsin run` reads it."""
    text = mutated(dice.choice(configurations()), dice.choice(configurations()), dice)
    keep(text)
    with tempfile.TemporaryDirectory(prefix="tocsin-fuzz-") as folder:
        path = Path(folder) / "tocsin.yaml"
        path.write_bytes(text)
        try:
            load_all(path, {}, {name: spec for name, (spec, _) in SIGNALS.items()})
        except ConfigErrors as errors:
            if not errors.faults:
                raise AssertionError("refused without a fault") from errors
            return False
    return True


@cache
def ledger_text() -> bytes:
    """A whole run, as its runner writes it."""
    with tempfile.TemporaryDirectory(prefix="tocsin-fuzz-") as folder:
        made = ledger.Ledger.create(Path(folder) / "run", {"run": "r", "drill": "d"})
        for state in State:
            made.write(state, plan={"target": "x", "undo": [1, 2, None]}, why="because", share=0.5)
        made.close()
        return (Path(folder) / "run" / ledger.LEDGER).read_bytes().rstrip(b"\0")


def run_ledger(number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
    """A run's ledger and record."""
    text = mutated(ledger_text(), ledger_text(), dice)
    keep(text)
    with tempfile.TemporaryDirectory(prefix="tocsin-fuzz-") as folder:
        run = Path(folder) / "20260101T000000Z-r"
        run.mkdir()
        (run / ledger.LEDGER).write_bytes(text)
        (run / "run.json").write_bytes(text.partition(b"\n")[0])
        entries = ledger.read(run)
        ledger.last_state(entries)
        lock.trouble(entries)
        lock.unsettled(Path(folder))
        record.load(run)
        ledger.Ledger.open(run).close()
    return bool(entries)


@cache
def database() -> Path:
    """A database with something of everything in it, at rest."""
    here = world()
    folder = Path(tempfile.mkdtemp(prefix="tocsin-fuzz-"))
    store = Store(folder / "tocsin.db")
    agent = Agent(here.node, Collector([]), store, clock=lambda: here.now)
    dice = random.Random(1)
    for n in range(200):
        here.page(n, dice, lambda _: None)
    agent.tick()
    store.commit_tick(here.now, here.node.book, (), [("hook", MESSAGE)])
    store.close()
    return folder / "tocsin.db"


def stored(number: int, dice: random.Random, keep: Callable[[bytes], None]) -> bool:
    """A database that was damaged while the agent was away: it starts and can page, whatever it has lost."""
    text = bytearray(database().read_bytes())
    how = dice.randrange(4)
    if how == 0:
        del text[dice.randrange(len(text)) :]
    elif how == 1:
        start = dice.randrange(len(text)) // 512 * 512
        text[start : start + 512 * dice.randrange(1, 40)] = bytes(512)
    else:
        for _ in range(dice.choice((1, 3, 50))):
            text[dice.randrange(len(text))] ^= 1 << dice.randrange(8)
    keep(bytes(text))
    folder = Path(tempfile.mkdtemp(prefix="tocsin-fuzz-"))
    try:
        path = folder / "tocsin.db"
        path.write_bytes(text)
        store = Store(path)
        here = world()
        agent = Agent(Node(here.node.setup), Collector([]), store, clock=lambda: here.now)
        from_plain(store.meta("silences"))
        agent.restore()
        agent.tick()
        (notice,) = store.commit_tick(here.now, agent.node.book, (), [("new", MESSAGE)])
        store.notice_delivered(notice, here.now)
        store.close()
    except StoreError as error:
        if "newer Tocsin" not in str(error):
            raise
        return False
    finally:
        shutil.rmtree(folder)
    return not store.notes


PARTS: dict[str, Callable[[int, random.Random, Callable[[bytes], None]], bool]] = {
    "pages": page, "answers": answer, "configurations": configuration, "ledgers": run_ledger, "databases": stored,
}  # fmt: skip


# --- the loop ---------------------------------------------------------------------------------------------------------


def chunk(part: str, first: int, count: int, seed: int, kept: Path) -> Told:
    """So many inputs of one part, from the first on."""
    told = Told(os.getpid())
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    last = b""

    def keep(data: bytes) -> None:
        nonlocal last
        last = data

    for number in range(first, first + count):
        began_s = time.thread_time()
        what = ""
        try:
            told.good += PARTS[part](number, random.Random(f"{seed}/{part}/{number}"), keep)
        except Exception:
            what = traceback.format_exc()
        took_s = time.thread_time() - began_s
        told.slowest_s = max(told.slowest_s, took_s)
        if not what and took_s > SLOWEST_S:
            what = f"{took_s:.1f} s of CPU"
        if what:
            path = kept / f"{part}-{seed}-{number}"
            path.write_bytes(last)
            told.wrong.append(Wrong(part, number, what, path))
            if len(told.wrong) >= FAULTS_KEPT:
                break
        told.done += 1
    told.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return told


@dataclass
class Result:
    """All of it."""

    told: dict[str, Told]
    growth_mib: float  # of the worker that grew most, after its first chunk of pages

    @property
    def wrong(self) -> list[Wrong]:
        """What must not be."""
        return [one for told in self.told.values() for one in told.wrong]

    def line(self) -> str:
        """The line that counts."""
        inputs = ", ".join(f"{part} {told.done} ({told.good} taken, slowest {told.slowest_s * 1000:.0f} ms of CPU)"
                           for part, told in self.told.items())
        return f"{inputs}; crashed or hung {len(self.wrong)}, grown by {self.growth_mib:.1f} MiB"


def fuzz(pages: int, seed: int, kept: Path, parts: Sequence[str] = tuple(SHARES), workers: int = 2,
         say: Callable[[str], None] = print) -> Result:
    """So many pages, and of the other parts their share."""
    kept.mkdir(parents=True, exist_ok=True)
    found = {part: Told() for part in parts}
    at_first: dict[int, float] = {}
    growth_mib = 0.0
    with ProcessPoolExecutor(workers) as pool:
        for part in parts:
            count = max(1, round(pages * SHARES[part]))
            size = max(1, round(CHUNK * SHARES[part]))
            running = [pool.submit(chunk, part, first, min(size, count - first), seed, kept)
                       for first in range(0, count, size)]
            total = found[part]
            for n, future in enumerate(running):
                told = future.result()
                total.done += told.done
                total.good += told.good
                total.slowest_s = max(total.slowest_s, told.slowest_s)
                total.wrong += told.wrong
                if part == "pages":
                    growth_mib = max(growth_mib, told.peak_mib - at_first.setdefault(told.worker, told.peak_mib))
                for wrong in told.wrong[: max(0, FAULTS_KEPT - len(total.wrong) + len(told.wrong))]:
                    say(str(wrong))
                if (n + 1) % max(1, len(running) // 20) == 0:
                    say(f"{part}: {total.done} of {count}, {told.peak_mib:.0f} MiB")
                if len(total.wrong) >= FAULTS_KEPT:
                    for other in running:
                        other.cancel()
                    break
    return Result(found, growth_mib)


def main() -> int:
    """Fuzz, print, and fail where anything crashed, hung or grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--pages", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--part", choices=SHARES, action="append")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "tocsin-fuzz")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    begun = time.monotonic()
    result = fuzz(asked.pages, asked.seed, asked.kept, asked.part or tuple(SHARES),
                  say=lambda line: print(line, flush=True))
    print(f"{time.monotonic() - begun:.0f} s")
    print(result.line())
    return int(bool(result.wrong) or result.growth_mib > GROWTH_MIB)


if __name__ == "__main__":
    sys.exit(main())
