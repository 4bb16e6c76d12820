"""`tocsin record`: a recording is whole whatever ends it, and says what it could not have."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent import backtest
from agent.model import Batch, Gap, GpuFacts, Sample, Why
from agent.progress import quiet
from agent.record import CannotRecord, Row, gpu_row, page_url, record, recording, scraper, target_of
from tests.page_server import PageServer

ROOT = Path(__file__).resolve().parents[1]
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} %d\n# Grüße\n"


class Engine:
    """A page on 127.0.0.1 whose number grows; every third request fails where `flaky`."""

    def __init__(self, *, flaky: bool = False) -> None:
        self.asked = 0
        self.paths: list[str] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.asked += 1
                engine.paths.append(self.path)
                failing = flaky and engine.asked % 3 == 0
                body = (PAGE % engine.asked).encode()
                self.send_response(503 if failing else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    yield running
    running.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a recording, also of one that was cut short (read with zlib alone)."""
    text = zlib.decompressobj(wbits=31).decompress(path.read_bytes()) if path.exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it is so, for at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def start(out: Path, *urls: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    config = out.with_suffix(".yaml")
    config.write_text("nvml: off\n")
    fixed = ("--every", "100ms", "--for", "60s", "--config", str(config))
    command = [sys.executable, "-m", "agent", "record", *urls, "-o", str(out), *fixed, *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_whole_recording(engine: Engine, tmp_path: Path, wish: signal.Signals) -> None:
    """A person sees enough after two minutes of ten and presses Ctrl-C."""
    out = tmp_path / "node.jsonl.gz"
    process = start(out, engine.url)
    wait_for(lambda: len(lines_of(out)) >= 3, "three rows")
    process.send_signal(wish)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (0, ""), stderr
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert stderr.splitlines()[-1] == f"{out}: {len(rows)} rows. Next: tocsin backtest {out}"
    assert "Traceback" not in stderr
    for n, row in enumerate(rows, start=1):
        assert {**row, "t": 0} == {"t": 0, "target": engine.url, "body": PAGE % n}
        assert abs(row["t"] - time.time()) < 60
    assert set(engine.paths) == {"/metrics"}


def test_kill_9_costs_at_most_the_last_row(engine: Engine, tmp_path: Path) -> None:
    """The machine ran out of memory in mid-recording: what was there before must be readable."""
    out = tmp_path / "node.jsonl.gz"
    process = start(out, engine.url)
    wait_for(lambda: len(lines_of(out)) >= 5, "five rows")
    process.kill()
    process.communicate(timeout=20)
    rows = list(backtest.read(out))
    assert len(rows) >= 5
    assert engine.asked - len(rows) <= 2  # one on its way, one being written
    assert [row.body for row in rows] == [PAGE % n for n in range(1, len(rows) + 1)]


def test_a_failed_scrape_is_a_row_without_a_body(tmp_path: Path) -> None:
    """A gap is part of the truth; left out, the back-test would take it for a slow rhythm."""
    flaky = Engine(flaky=True)
    out = tmp_path / "node.jsonl.gz"
    process = start(out, flaky.url, "127.0.0.1:1", options=("--for", "1s"))
    _, stderr = process.communicate(timeout=30)
    flaky.close()
    rows = lines_of(out)
    assert process.returncode == 0, stderr
    assert [(r["body"], r.get("error")) for r in rows if r["target"] == flaky.url][:3] == [
        (PAGE % 1, None),
        (PAGE % 2, None),
        (None, "HTTP 503"),
    ]
    dead = [r for r in rows if r["target"] == "http://127.0.0.1:1"]
    assert len(dead) > 3
    assert {(r["body"], r["error"]) for r in dead} == {(None, "refused: nothing listens there")}
    said = stderr.splitlines()
    assert sum("http://127.0.0.1:1: " in line for line in said) == 1  # once, not at every scrape
    assert f"{flaky.url}: HTTP 503" in said
    assert f"{flaky.url}: answers again" in said
    assert f", {len(dead)} of http://127.0.0.1:1 failed" in said[-1]


def test_nothing_is_overwritten_unasked(engine: Engine, tmp_path: Path) -> None:
    """Yesterday's incident was in that file."""
    out = tmp_path / "node.jsonl.gz"
    out.write_bytes(b"yesterday")
    process = start(out, engine.url, options=("--for", "300ms"))
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, out.read_bytes()) == (2, b"yesterday")
    assert f"{out} is there already; choose another name, or --force to overwrite it" in stderr
    process = start(out, engine.url, options=("--for", "300ms", "--force"))
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert lines_of(out)[0]["body"] == PAGE % 1


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A typing error in a folder's name must be known before the incident, not after it."""
    with (
        pytest.raises(CannotRecord, match="No such file or directory; choose a place with room"),
        recording(tmp_path / "none" / "x.gz", force=False),
    ):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")  # noqa: PTH110
def test_a_full_disk_is_said() -> None:
    """It fills up in the middle of the recording; the message names the file, not errno."""
    with (
        pytest.raises(CannotRecord, match="/dev/full: No space left on device; choose a place with room"),
        recording(Path("/dev/full"), force=True) as write,
    ):
        write({"t": 1.0, "target": "a", "body": "x"})


@pytest.mark.parametrize(
    ("given", "page", "target"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("http://e:8000/", "http://e:8000/metrics", "http://e:8000"),
        ("https://u:secret@e/v1/metrics?token=secret", "https://u:secret@e/v1/metrics?token=secret", "https://e/v1"),
        ("http://e:8000/prometheus", "http://e:8000/prometheus", "http://e:8000/prometheus"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics", "http://[::1]:8000"),
    ],
)
def test_targets_are_named_without_secrets(given: str, page: str, target: str) -> None:
    """A recording is mailed around; the password that it was made with must not travel in it."""
    assert page_url(given) == page
    assert target_of(page) == target


@pytest.mark.parametrize("wrong", ["ftp://e/metrics", "http://", "http://e:99999", "http://[::1"])
def test_what_is_no_url_is_refused(wrong: str) -> None:
    """Before the ten minutes, not after them."""
    with pytest.raises(CannotRecord, match="write http://127"):
        page_url(wrong)


def test_a_slow_target_does_not_hold_up_the_others() -> None:
    """One engine hangs in its scrape; the rhythm of the other one is the evidence."""
    release = threading.Event()
    rows: list[Row] = []
    stop = threading.Event()

    def hanging(_: float) -> Row:
        release.wait(20)
        return {"t": 0.0, "target": "hung", "body": None}

    def write(row: Row) -> None:
        rows.append(row)
        if len(rows) == 5:
            stop.set()

    def quick(now: float) -> Row:
        return {"t": now, "target": "quick", "body": ""}

    tally = record([hanging, quick], write, stop, quiet, every_s=0.02, for_s=20)
    release.set()
    assert {row["target"] for row in rows} == {"quick"}
    assert tally.rows == len(rows) >= 5


def test_a_late_page_skips_beats() -> None:
    """A scrape of 3 intervals is followed by one on the beat, not by three at once."""
    at: list[float] = []
    stop = threading.Event()

    def read(_: float) -> Row:
        at.append(time.monotonic())
        if len(at) == 1:
            time.sleep(0.35)
        if len(at) == 4:
            stop.set()
        return {"t": 0.0, "target": "a", "body": ""}

    record([read], lambda row: None, stop, quiet, every_s=0.1, for_s=20)
    assert at[3] - at[0] > 0.58  # on the beats 0, 4, 5 and 6 at the earliest


def test_an_endless_page_is_cut_off(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """An address that streams for ever filled the recorder's memory."""
    monkeypatch.setattr("agent.record.MAX_BYTES", 10)
    row = scraper(engine.url, 5.0)(1.0)
    assert row is not None
    assert (row["body"], row["error"]) == (None, f"the answer has {len(PAGE % 1) + 2} bytes; the limit is 10")


def test_a_page_that_was_cut_off_is_no_page() -> None:
    """The engine died in the middle of its answer: half a page, replayed, would be a restart with lost counters."""
    with PageServer(PAGE.encode()) as server:
        server.fault("truncate")
        row = scraper(server.url + "/metrics", 5.0)(1.0)
    assert row is not None
    assert row["body"] is None
    assert "incomplete read" in row["error"]


def test_gpus_are_recorded_with_what_they_do_not_tell() -> None:
    """The back-test must see a value that was missing as missing, with its reason."""
    readings = (
        Sample("gpu_temp_c", "GPU-1", 91.0, 10.0),
        Gap("gpu_util", "GPU-1", Why.NOT_SUPPORTED, "MIG", 10.0),
        Sample("gpu_temp_c", "GPU-2", 50.0, 10.0),
    )
    facts = (GpuFacts("GPU-1", 0, "H200", "0000:1b:00", 87.0), GpuFacts("GPU-2", 1, "H200", "0000:1c:00"))
    row = gpu_row(Batch("nvml", 10.00049, 0.01, readings, gpus=facts, error="GPU-2 hangs"))
    assert json.loads(json.dumps(row)) == {
        "t": 10.0,
        "target": "nvml",
        "gpus": [
            {
                "uuid": "GPU-1", "index": 0, "name": "H200", "bdf": "0000:1b:00", "limit_c": 87.0,
                "values": {"gpu_temp_c": 91.0}, "gaps": {"gpu_util": ["not_supported", "MIG"]},
            },
            {
                "uuid": "GPU-2", "index": 1, "name": "H200", "bdf": "0000:1c:00", "limit_c": None,
                "values": {"gpu_temp_c": 50.0}, "gaps": {},
            },
        ],
        "error": "GPU-2 hangs",
    }  # fmt: skip
