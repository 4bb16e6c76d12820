"""The prober: open-loop load at the address that users use, in a process of its own.

`python -m drills.prober '{"load": {…}, "out": ".../requests.jsonl"}'` sends until its stdin ends (its parent is gone:
it ends at once) or says `stop` (it waits for what is in flight, then ends). Each logical request that has ended becomes
a line of `out` (a `Request`); each second a line on stdout tells the counts since the start.

**Open-loop**: request k is due at start + (k + j) / rate with j in [0, 0.5) from a fixed seed, whatever became of those
before. A request for which no thread is free, or that the prober itself would send over a second late, is not sent at
all: a burst later would be a storm of our own making. It counts in `asked` and `dropped`, and its second says so.

**Latency** counts from the moment that the logical request was sent first, its back-off and second attempts included.
One that meets its deadline before its first token counts in the TTFT histogram with the deadline, which is its lower
bound; without streaming nobody sees a first token, and the TTFT histogram stays empty.

**Retries** (`load.retries`) are like those of OpenAI's own client: upon refused, reset, 429 and 5xx, never once a token
has come, after 0.5 s, 1 s, 2 s … at most 8 s, or as long as Retry-After asks; the deadline is one for all attempts.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import random
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from agent.retry_after import retry_after_s
from drills.completion import Attempt, Client, OwnFault
from drills.model import Load, Outcome, Refused, Request

OUT = "requests.jsonl"
LOG = "prober.log"
MAX_THREADS = 2000
SPARE_THREADS = 16
LATE_S = 0.1  # a second whose p99 is later did not keep its rate
TOO_LATE_S = 1.0
BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
RETRIED: frozenset[Outcome] = frozenset({"refused", "reset", "http_429", "http_5xx"})

# vLLM's bounds, and 0.15 and 0.5 s, where the service levels lie.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
          80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_S = (0.15, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
         960.0, 1920.0, 7680.0)  # fmt: skip


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, value_s: float) -> None:
        """One more."""
        self._counts[bisect.bisect_left(self._bounds_s, value_s)] += 1
        self._sum_s += value_s

    def told(self) -> dict[str, float]:
        """{le: how many were at most that, "sum": s, "count": n}."""
        totals = list(itertools.accumulate(self._counts))
        names = [*(f"{bound:g}" for bound in self._bounds_s), "+Inf"]
        return {**dict(zip(names, totals, strict=True)), "sum": round(self._sum_s, 6), "count": totals[-1]}


class Counts:
    """What was asked, sent and answered since the start; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._asked = self._sent = self._dropped = self._attempts = self._finished = self._unwritten = 0
        self._started = 0  # sent, or about to be
        self._outcomes: dict[str, int] = {}
        self._ttft, self._itl, self._e2e = Histogram(TTFT_S), Histogram(ITL_S), Histogram(E2E_S)
        self._late_s: list[float] = []  # of this second
        self._why: dict[str, int] = {}  # of this second: why how many were not sent

    def asked(self) -> None:
        """One more is due, and will be sent or dropped."""
        with self._lock:
            self._asked += 1
            self._started += 1

    def sent(self, late_s: float) -> None:
        """It goes out."""
        with self._lock:
            self._sent += 1
            self._late_s.append(late_s)

    def attempt(self) -> None:
        """One attempt more."""
        with self._lock:
            self._attempts += 1

    def dropped(self, why: str, *, was_sent: bool = False) -> None:
        """It was not sent after all, by our own fault."""
        with self._ended:
            self._dropped += 1
            self._started -= 1
            self._sent -= was_sent
            self._why[why] = self._why.get(why, 0) + 1
            self._ended.notify_all()

    def ended(self, request: Request, *, streaming: bool, is_written: bool) -> None:
        """It came to its end."""
        with self._ended:
            self._finished += 1
            self._started -= 1
            self._unwritten += not is_written
            self._outcomes[request.outcome] = self._outcomes.get(request.outcome, 0) + 1
            if request.first_at is not None:
                if streaming:
                    self._ttft.add(request.first_at - request.sent_at)
                for gap_s in request.itl_s:
                    self._itl.add(gap_s)
            elif streaming and request.outcome == "timeout":
                self._ttft.add(request.ended_at - request.sent_at)
            if request.outcome == "ok":
                self._e2e.add(request.ended_at - request.sent_at)
            self._ended.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False where that takes longer."""
        with self._ended:
            return self._ended.wait_for(lambda: self._started == 0, timeout_s)

    def line(self, at: float) -> dict[str, Any]:
        """What the second that ends now has to tell. `why` is empty while the rate is kept."""
        with self._lock:
            late_s, why = sorted(self._late_s), [f"{n} not sent: {text}" for text, n in self._why.items()]
            self._late_s, self._why = [], {}
            late_p99_s = p99(late_s)
            if late_p99_s > LATE_S:
                why.append(f"sent late: p99 {late_p99_s:.3f} s")
            return {
                "at": round(at, 3), "asked": self._asked, "sent": self._sent, "dropped": self._dropped,
                "late_p99_s": round(late_p99_s, 6), "kept_rate": not why, "why": "; ".join(why),
                "finished": self._finished, "in_flight": self._started, "attempts": self._attempts,
                "outcomes": dict(self._outcomes), "unwritten": self._unwritten, "ttft": self._ttft.told(),
                "itl": self._itl.told(), "e2e": self._e2e.told(),
            }  # fmt: skip


def p99(values: Sequence[float]) -> float:
    """Of sorted values; 0 of none."""
    return values[ceil(0.99 * len(values)) - 1] if values else 0.0


class Records:
    """requests.jsonl, written line by line and never kept."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._is_torn = False

    def write(self, request: Request) -> bool:
        """Append it; False where the disk does not take it."""
        line = msgspec.json.encode(request) + b"\n"
        with self._lock:
            if self._is_torn:  # a full disk took half of a line: that one is lost, not this one too
                line = b"\n" + line
            try:
                self._is_torn = os.write(self._fd, line) < len(line)
            except OSError:
                return False
            return not self._is_torn


class Sender:
    """Sends logical requests. `epoch` is the unix time at monotonic 0, read once: a stepped clock bends no latency."""

    def __init__(self, load: Load, client: Client, counts: Counts, records: Records, epoch: float) -> None:
        self._load = load
        self._client = client
        self._counts = counts
        self._records = records
        self._epoch = epoch
        self._run = secrets.token_hex(4)
        self._random = random.Random(0)  # noqa: S311  (spreads back-offs)
        self.threads = min(MAX_THREADS, ceil(load.rate_per_s * load.deadline_s) + SPARE_THREADS)

    def run(self, stopping: threading.Event) -> None:
        """Send at the rate until told to stop."""
        free = threading.Semaphore(self.threads)
        pool = ThreadPoolExecutor(self.threads, "request")
        start = time.monotonic()
        jitter = random.Random(0)  # noqa: S311  (the same spacing each time)
        for k in itertools.count():
            due = start + (k + 0.5 * jitter.random()) / self._load.rate_per_s
            if stopping.wait(max(0.0, due - time.monotonic())):
                return
            self._counts.asked()
            if time.monotonic() - due > TOO_LATE_S:
                self._counts.dropped("the prober itself was held up")
            elif not free.acquire(blocking=False):
                self._counts.dropped(f"all {self.threads} threads wait for answers")
            else:
                try:
                    pool.submit(self._send, k, due, free)
                except RuntimeError:  # no thread to be had: a limit of this system
                    free.release()
                    self._counts.dropped("no new thread can be started")

    def _send(self, k: int, due: float, free: threading.Semaphore) -> None:
        sent = time.monotonic()
        self._counts.sent(sent - due)
        try:
            request = self._logical(k, due, sent)
            is_written = self._records.write(request)
            self._counts.ended(request, streaming=self._load.streaming, is_written=is_written)
        except OwnFault as e:
            self._counts.dropped(str(e), was_sent=True)
        except Exception as e:  # a bug of ours is no failure of theirs, and must be seen
            self._counts.dropped(f"a fault of the prober: {e!r}", was_sent=True)
        finally:
            free.release()

    def _logical(self, k: int, due: float, sent: float) -> Request:
        """One logical request: attempts until one is final."""
        key = f"tocsin-{self._run}-{k}"
        # Its own beginning for each: else a cache answers, and a router that knows prefixes sends all to one replica.
        # It is also long enough by itself: a prompt of 4 tokens ends vLLM's engine on CPUs.
        prompt = f"This is request number {k} of probe {self._run}. {self._load.prompt}"
        deadline = sent + self._load.deadline_s
        for number in itertools.count(1):
            self._counts.attempt()
            got = self._client.attempt(key, number, prompt, deadline)
            wait_s = self._wait_s(got, number)
            if wait_s is None or time.monotonic() + wait_s >= deadline:
                break
            time.sleep(wait_s)
        return Request(
            id=key, due_at=self._unix(due), sent_at=self._unix(sent),
            first_at=None if got.first is None else self._unix(got.first), ended_at=self._unix(got.ended),
            outcome=got.outcome, attempts=number, status=got.status, chunks=got.chunks,
            itl_s=[round(gap_s, 5) for gap_s in got.gaps_s], model=got.model, headers=got.headers,
            finish_reason=got.finish_reason, error=got.error,
        )  # fmt: skip

    def _wait_s(self, got: Attempt, number: int) -> float | None:
        """How long until the next attempt; None: this one is final."""
        if number > self._load.retries or got.outcome not in RETRIED:
            return None
        backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (number - 1)) * (1 - 0.25 * self._random.random())
        return max(backoff_s, retry_after_s(got.retry_after, self._unix(got.ended)) or 0.0)

    def _unix(self, monotonic_s: float) -> float:
        return round(self._epoch + monotonic_s, 6)


# The child.


class Asked(msgspec.Struct):
    """What the parent asks for, on the command line."""

    load: Load
    out: str
    headers: Sequence[str] = ()


def read_key(path: str | None) -> str | None:
    """The API key in a file. Raises Refused, without a byte of it."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise Refused(f"load.api_key_file: {path}: {why}; name a file that holds the key alone") from e
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise Refused(f"load.api_key_file: {path}: it must hold the key alone, on one line")
    return key


def prepare(asked: Asked) -> tuple[Load, Client]:
    """A client that knows its model. Raises Refused."""
    load = asked.load
    if not (load.rate_per_s > 0 and load.deadline_s > 0 and load.retries >= 0):
        raise Refused("load: rate_per_s and deadline_s must be above 0, and retries at least 0")
    client = Client(load, read_key(load.api_key_file), asked.headers)
    if client.model is None:
        client.model = client.ask_model(time.monotonic() + load.deadline_s)
    return replace(load, model=client.model), client


def main(argv: Sequence[str]) -> int:
    """The child. Its exit status is of no use; its last line is."""
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(stopping,), name="stdin", daemon=True).start()
    asked = msgspec.json.decode(argv[1], type=Asked)
    try:
        load, client = prepare(asked)
        records = Records(Path(asked.out))
    except (Refused, OSError) as e:
        _tell({"refused": str(e)})
        return 1
    _allow_files()
    counts = Counts()
    epoch = time.time() - time.monotonic()
    ended = threading.Event()
    reporter = threading.Thread(target=_report, args=(counts, client, epoch, ended), name="report")
    _tell({**counts.line(epoch + time.monotonic()), "model": client.model})
    reporter.start()
    Sender(load, client, counts, records, epoch).run(stopping)
    counts.wait_idle(load.deadline_s + 1.0)
    ended.set()
    reporter.join()
    os._exit(0)  # a thread that hangs in the resolver does not hold the end up


def _listen(stopping: threading.Event) -> None:
    while said := os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when Python ends
        if b"stop" in said:
            stopping.set()
    os._exit(0)  # the parent is gone, and so shall its load be


def _report(counts: Counts, client: Client, epoch: float, ended: threading.Event) -> None:
    """A line each second, and one at the end."""
    start = time.monotonic()
    for second in itertools.count(1):
        is_last = ended.wait(max(0.0, start + second - time.monotonic()))
        client.close_idle()
        _tell(counts.line(epoch + time.monotonic()))
        if is_last:
            return


def _tell(line: Mapping[str, Any]) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:  # nobody listens any more
        os._exit(0)


def _allow_files() -> None:
    """As many open connections as the system lets us have: the usual 1,024 end within a hang of 10 s at 100/s."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# The parent.


class Prober:
    """A prober that runs. Made by `start`; `stop` it, or leave it with `with`."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, load: Load) -> None:
        assert process.stdin is not None and process.stdout is not None  # noqa: S101,PT018  (for mypy)
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._out = out
        self._load = load
        self._first = threading.Event()
        self.latest: Mapping[str, Any] = {}
        self.slips: list[tuple[float, str]] = []  # (at, why) of each second that did not keep the rate
        self._reader = threading.Thread(target=self._read, name="prober", daemon=True)
        self._reader.start()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def wait_first(self, timeout_s: float) -> None:
        """Wait for its first line. Raises Refused where it says that it cannot, or says nothing."""
        self._first.wait(timeout_s)
        if "at" not in self.latest:
            self.kill()
            silent = f"the prober said nothing; look at {self._out.with_name(LOG)}"
            raise Refused(str(self.latest.get("refused", silent)))

    def stop(self) -> Mapping[str, Any]:
        """Send nothing more, wait for what is in flight (at most its deadline), end; the last line. May be repeated."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this was called before
            self._stdin.write(b"stop\n")
            self._stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._load.deadline_s + 3.0)
        self.kill()
        return self.latest

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def requests(self) -> list[Request]:
        """Every logical request that has ended and was written so far, in the order of their ends."""
        return list(read_requests(self._out))

    def kept(self) -> tuple[float, float]:
        """(sent ÷ asked, p99 in seconds of how late those that have ended were sent)."""
        asked, sent = self.latest["asked"], self.latest["sent"]
        return (sent / asked if asked else 1.0), p99(sorted(r.late_s for r in read_requests(self._out)))

    def _read(self) -> None:
        for line in self._stdout:
            with contextlib.suppress(msgspec.DecodeError):  # half a line, of one that was killed
                self.latest = msgspec.json.decode(line)
                if self.latest.get("why"):
                    self.slips.append((self.latest["at"], self.latest["why"]))
            self._first.set()
        self._first.set()


def start(load: Load, folder: Path, headers: Sequence[str] = ()) -> Prober:
    """Start a prober that appends to `folder`/requests.jsonl; `headers`: names of answer headers to remember.

    Raises:
        Refused: it cannot send, and why: the address, the key's file, no model.
        OSError: the process or its log cannot be made.
    """
    out = folder / OUT
    asked = msgspec.json.encode(Asked(load, str(out), headers)).decode()
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "drills.prober", asked],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True,  # Ctrl-C is for the runner, which ends it in good order
        )  # fmt: skip
    prober = Prober(process, out, load)
    prober.wait_first(load.deadline_s + 10.0)
    return prober


def read_requests(path: Path) -> Iterator[Request]:
    """The requests in a file, one at a time; half a line (killed, disk full) is passed over, no file is no requests."""
    decode = msgspec.json.Decoder(Request).decode
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError):
                yield decode(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
