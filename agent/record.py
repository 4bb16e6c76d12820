"""`tocsin record`: what engines and GPUs tell, scrape by scrape, into a file for `tocsin backtest`.

gzip JSON lines `{"t": unix seconds, "target": URL, "body": text or null}`; with NVML also `{"t", "target": "nvml",
"gpus": [{"uuid", "index", "name", "bdf", "limit_c", "values": {name: number}, "gaps": {name: [code, why]}}]}`; a GPU in
MIG mode has also "mig": [{"uuid", "gi", "ci", "name", "values", "gaps"}]. A row without a body or with failed GPUs says
why in "error". Names in "values" are those of agent.model.SAMPLES.
"""

from __future__ import annotations

import gzip
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agent.exposition import PageError, check_length, decode
from agent.model import Batch, Sample, Source
from agent.progress import Tell
from agent.sources.fetch import Fetcher, FetchError
from agent.threads import begin

CONNECT_S = 3.0
MAX_BYTES = 32 * 1024 * 1024  # of one page
ACCEPT = "text/plain;version=0.0.4;q=1, */*;q=0.1"
NVML = "nvml"
Row = Mapping[str, Any]
Read = Callable[[float], Row | None]  # unix seconds -> a row; None: nothing to write down


class CannotRecord(Exception):  # noqa: N818  (it says what happened)
    """The file cannot be written, or a URL is none; the text says why and what to do."""


@dataclass
class Tally:
    """What was written: rows, and by target how many scrapes failed, and why the last one did (None: it did not)."""

    rows: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    last_error: dict[str, str | None] = field(default_factory=dict)


def page_url(text: str) -> str:
    """The whole URL of a /metrics page: `host:8000` and `http://host:8000` get http and /metrics, others stay.

    Raises:
        CannotRecord: it is no http(s) URL.
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        url = urlsplit(whole)
        _ = url.port
    except ValueError as fault:
        raise CannotRecord(f"{text!r} is not a URL ({fault}); write http://127.0.0.1:8000") from fault
    if url.scheme not in ("http", "https") or not url.hostname:
        raise CannotRecord(f"{text!r} is not an http(s) URL; write http://127.0.0.1:8000")
    return urlunsplit(url._replace(path="/metrics" if url.path in ("", "/") else url.path, fragment=""))


def target_of(url: str) -> str:
    """What a page's rows are called: its URL without /metrics, and without user, password and query (secrets)."""
    parts = urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, netloc, parts.path.removesuffix("/metrics"), "", ""))


def scraper(url: str, timeout_s: float) -> Read:
    """A function that reads one page with one connection kept open, as the daemon does. A failure has body null."""
    headers = {"Accept": ACCEPT, "Accept-Encoding": "identity", "User-Agent": "tocsin"}
    fetcher = Fetcher(url, headers, connect_s=CONNECT_S, total_s=CONNECT_S + timeout_s, limit_bytes=MAX_BYTES)
    target = target_of(url)

    def read(now: float) -> Row:
        row: dict[str, Any] = {"t": round(now, 3), "target": target, "body": None}
        try:
            answer = fetcher.get()
            if answer.status == HTTPStatus.OK:
                check_length(len(answer.body), answer.headers.get("content-length"))
                page = decode(answer.body, answer.headers.get("content-encoding"), MAX_BYTES)
                row["body"] = page.decode("utf-8", "replace")
            else:
                row["error"] = f"HTTP {answer.status}"
        except (FetchError, PageError) as fault:
            row["error"] = str(fault)
        return row

    return read


def gpu_reader(source: Source) -> Read:
    """A function that reads all GPUs; None where there are none."""

    def read(now: float) -> Row | None:
        batch = source.read(now)
        return gpu_row(batch) if batch.gpus or batch.error else None

    return read


def _told(batch: Batch, uuid: str) -> dict[str, Any]:
    """The numbers of one subject, and why others are not there."""
    own = [reading for reading in batch.readings if reading.subject == uuid]
    return {"values": {r.name: r.value for r in own if isinstance(r, Sample)},
            "gaps": {r.name: [r.code.value, r.why] for r in own if not isinstance(r, Sample)}}


def gpu_row(batch: Batch) -> Row:
    """A batch of the NVML source as a row."""
    gpus = []
    for gpu in batch.gpus or ():
        who = {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "bdf": gpu.bdf, "limit_c": gpu.limit_c}
        mig = [{"uuid": one.uuid, "gi": one.gi, "ci": one.ci, "name": one.name, **_told(batch, one.uuid)}
               for one in gpu.instances]
        gpus.append({**who, **_told(batch, gpu.uuid), **({"mig": mig} if mig else {})})
    error = {"error": batch.error} if batch.error else {}
    return {"t": round(batch.at, 3), "target": NVML, "gpus": gpus, **error}


@contextmanager
def recording(path: Path, *, force: bool) -> Iterator[Callable[[Row], None]]:
    """The file, as a function that writes a row.

    Every row is flushed through the compressor to the file, so `kill -9` costs at most the row being written.

    Raises:
        CannotRecord: the file is there already (without `force`), or cannot be written.
    """
    try:
        with path.open("wb" if force else "xb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="") as packed:
            yield lambda row: _write(packed, row)
    except FileExistsError as fault:
        raise CannotRecord(f"{path} is there already; choose another name, or --force to overwrite it") from fault
    except OSError as fault:
        raise CannotRecord(f"{path}: {fault.strerror or fault}; choose a place with room that is yours") from fault


def _write(packed: gzip.GzipFile, row: Row) -> None:
    packed.write(json.dumps(row, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n")
    packed.flush()


def record(
    readers: Sequence[Read],
    write: Callable[[Row], None],
    stop: threading.Event,
    tell: Tell,
    *,
    every_s: float,
    for_s: float,
) -> Tally:
    """Let each reader read in a thread of its own every `every_s`, and write its rows, for `for_s` or until `stop`.

    A read that takes longer than `every_s` skips the beats that it missed: a late page is part of the truth.
    """
    rows: queue.SimpleQueue[Row] = queue.SimpleQueue()
    tally = Tally()
    started = time.monotonic()
    for n, read in enumerate(readers):
        # Daemons: a scrape that hangs must not keep the program from ending.
        begin(_beat, f"record {n}", read, rows, stop, every_s)
    while not stop.is_set() and (left_s := started + for_s - time.monotonic()) > 0:
        _take(rows, write, tally, tell, wait_s=min(left_s, 0.2))
        failed = sum(tally.failed.values())
        tell(f"{tally.rows} rows, {failed} failed", started + for_s - time.monotonic())
    stop.set()
    while not rows.empty():
        _take(rows, write, tally, tell, wait_s=0.0)
    return tally


def _beat(read: Read, rows: queue.SimpleQueue[Row], stop: threading.Event, every_s: float) -> None:
    next_at = time.monotonic()
    while not stop.is_set():
        row = read(time.time())
        if row is not None:
            rows.put(row)
        now = time.monotonic()
        next_at += every_s * (1 + max(0.0, now - next_at) // every_s)
        stop.wait(max(0.0, next_at - now))


def _take(rows: queue.SimpleQueue[Row], write: Callable[[Row], None], tally: Tally, tell: Tell, wait_s: float) -> None:
    try:
        row = rows.get(timeout=wait_s) if wait_s else rows.get_nowait()
    except queue.Empty:
        return
    write(row)
    tally.rows += 1
    target, error = str(row["target"]), row.get("error")
    if error is not None:
        tally.failed[target] = tally.failed.get(target, 0) + 1
    if tally.last_error.get(target) != error:
        tell(f"{target}: {error or 'answers again'}", lasting=True)
        tally.last_error[target] = error
