"""`tocsin check` and `tocsin doctor` where no agent runs: what was looked for, and the last sample decides."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent import oneshot
from agent.config import Config, EngineConfig
from tests.agent_process import ROOT
from tests.page_server import PageServer
from tests.recordings import KV_PRESSURE, rows

WATCH_S = 1.0


def full(utilization: float = 0.93) -> Callable[[], str]:
    """An engine whose KV cache is so full while tokens flow; no histograms."""
    count = [0]

    def page() -> str:
        count[0] += 100
        return (f'vllm:num_requests_running{{model_name="m"}} 1\nvllm:num_requests_waiting{{model_name="m"}} 0\n'
                f'vllm:kv_cache_usage_perc{{model_name="m"}} {utilization}\n'
                f'vllm:generation_tokens_total{{model_name="m"}} {count[0]}\n')

    return page


@pytest.fixture
def engine() -> Iterator[PageServer]:
    """An engine with a full cache."""
    with PageServer(full()) as server:
        yield server


def refused_url() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def config(*urls: str, **more: Any) -> Config:
    """These engines, no NVML, no kernel log."""
    engines = tuple(EngineConfig(url=url, name=f"e{i}") for i, url in enumerate(urls))
    return Config(node="gpu-17", engines=engines, nvml="off", kernel_log="off", discover=False, **more)


def look(settings: Config, watch_s: float = WATCH_S) -> tuple[dict[str, Any], list[str]]:
    """The answer, and the lines of progress."""
    lines: list[str] = []

    def tell(line: str, left_s: float | None = None, **_: bool) -> None:
        lines.append(f"{line}, {left_s:g} s left")

    return oneshot.sample(settings, watch_s, tell), lines


def state(answer: dict[str, Any], rule: str, subject: str = "e0") -> str:
    """The state of one signal."""
    return str(next(r["state"] for r in answer["signals"] if (r["rule"], r["subject"]) == (rule, subject)))


def tocsin(folder: Path, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
    """The real command, on a configuration of its own."""
    path = folder / "tocsin.yaml"
    own = {"node": "gpu-17", "nvml": "off", "kernel_log": "off", "discover": False, "socket": str(folder / "none.sock"),
           "state_dir": str(folder / "s")}
    path.write_text(json.dumps(own | settings))
    return subprocess.Popen([sys.executable, "-m", "agent", *arguments, "--config", str(path)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "200"})


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


# --- nothing to look at -----------------------------------------------------------------------------------------------


def test_with_nothing_to_watch_it_says_at_once_what_it_looked_for() -> None:
    """No engine, no GPU: unknown, in sentences that say where to name them, without waiting for 60 s."""
    began = time.monotonic()

    answer, _ = look(config(), 60.0)

    assert time.monotonic() - began < 30
    assert answer["verdict"] == "unknown"
    told = "\n".join(answer["looked_for"])
    assert "engines: none is configured or found" in told
    assert "`engines:` in /etc/tocsin/tocsin.yaml" in told
    assert "NVML: off in the configuration" in told


def test_the_command_exits_3_with_nothing_to_watch(tmp_path: Path) -> None:
    """As monitoring plugins do; no traceback."""
    code, out, err = finish(tocsin(tmp_path, "check", nvml="auto"))

    assert code == 3
    assert "UNKNOWN: " in out
    assert "NVML" in out
    assert "Traceback" not in out + err


# --- an engine --------------------------------------------------------------------------------------------------------


def test_the_last_sample_decides_whatever_for_says(engine: PageServer) -> None:
    """Over its limit now is BREACH, though the rule waits for a minute; back in range at the end is OK."""
    answer, lines = look(config(engine.url))

    assert state(answer, "kv-cache-utilization") == "BREACH"
    assert answer["verdict"] == "ticket"
    assert lines == ["looking for engines and GPUs, 6 s left", "watching 1 source, 1 s left"]
    pages = [full(0.93)] * 2 + [full(0.5)] * 50
    engine.set_page(lambda: pages.pop(0)())
    answer, _ = look(config(engine.url))
    assert state(answer, "kv-cache-utilization") == "OK"


def test_an_engine_that_refuses_is_down() -> None:
    """Nobody listens: that is a page at once, and not an engine that may still be starting."""
    answer, _ = look(config(refused_url()), 1.5)

    assert state(answer, "engine-down") == "BREACH"
    assert answer["verdict"] == "page"
    assert "refused" in "\n".join(answer["looked_for"])


def test_an_engine_whose_required_numbers_are_lost_is_unknown() -> None:
    """A page that is none: exit 3, and not the ticket that blindness becomes only after five minutes."""
    with PageServer("<html>it works!</html>") as server:
        answer, _ = look(config(server.url))

    assert answer["verdict"] == "unknown"
    assert state(answer, "engine-down") == "OK"


@pytest.mark.heavy
def test_a_real_engines_page_is_judged(tmp_path: Path) -> None:
    """The recording's crisis over the real command: exit 1 or 2, the KV cache named, JSON as in the contract."""
    bodies = [row["body"].encode() for row in rows(KV_PRESSURE)[104:109]]  # all over 0.85: no dip to end in
    began = time.monotonic()
    with PageServer(lambda: bodies[min(4, int(time.monotonic() - began))]) as server:
        engines = [{"name": "llama", "url": server.url}]
        code, out, _ = finish(tocsin(tmp_path, "check", "--watch-for", "2s", "--json", engines=engines))

    answer = json.loads(out)
    kv = next(r for r in answer["signals"] if r["rule"] == "kv-cache-utilization")
    assert code in (1, 2)
    assert kv["state"] == "BREACH"
    assert 0.85 < kv["value"] <= 1


def test_ctrl_c_is_clean(tmp_path: Path, engine: PageServer) -> None:
    """Interrupted while it watches: no traceback, no table of half a look, at once."""
    process = tocsin(tmp_path, "check", "--watch-for", "60s", engines=[{"url": engine.url}])
    deadline = time.monotonic() + 20
    while engine.scrapes == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)

    code, out, err = finish(process)

    assert code == 130
    assert out == ""
    assert "Traceback" not in err


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_doctor_of_an_address_tells_how_each_number_is_had(tmp_path: Path) -> None:
    """A whole vLLM page: exit 0, and the metric behind each number."""
    with PageServer(rows(KV_PRESSURE)[60]["body"].encode()) as server:
        code, out, _ = finish(tocsin(tmp_path, "doctor", server.url))

    assert code == 0, out
    assert "vllm:kv_cache_usage_perc" in out


@pytest.mark.heavy
@pytest.mark.parametrize("page", ["<html>it works!</html>", full()()])
def test_doctor_exits_3_where_a_required_number_is_missing(tmp_path: Path, page: str) -> None:
    """A page that is none, and one without histograms."""
    with PageServer(page) as server:
        code, out, err = finish(tocsin(tmp_path, "doctor", server.url))

    assert (code, err) == (3, "")
    assert "MISSING" in out


def test_doctor_of_nobody_exits_3(tmp_path: Path) -> None:
    """Refused: said with the address."""
    url = refused_url()

    code, out, _ = finish(tocsin(tmp_path, "doctor", url))

    assert code == 3
    assert url in out
    assert "refused" in out


@pytest.mark.parametrize(("urls", "want"), [
    (["{url}", "{url}"], 1), (["{url}", "{url}/"], 1), (["{url}/metrics"], 1)])
def test_doctor_takes_an_address_as_a_person_writes_it(
    engine: PageServer, urls: Sequence[str], want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with a slash, with /metrics: one target, read three times to see what moves."""
    monkeypatch.setattr(oneshot, "DOCTOR_POLL_S", 0.01)
    report = oneshot.doctor(config(), [url.format(url=engine.url) for url in urls])

    assert len(report["targets"]) == want
    assert report["targets"][0]["error"] is None
    assert engine.scrapes == 1 + oneshot.DOCTOR_ROUNDS


def test_doctor_takes_an_address_without_a_scheme(engine: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """host:port, as ss and curl have it."""
    monkeypatch.setattr(oneshot, "DOCTOR_POLL_S", 0.01)
    report = oneshot.doctor(config(), [engine.url.removeprefix("http://")])

    assert [(t["target"], t["error"]) for t in report["targets"]] == [(engine.url.removeprefix("http://"), None)]


def test_doctor_says_what_binds_an_engine_without_agent_or_configuration(
    engine: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command and an address: KV full, four wait, and the knob that belongs to it."""
    monkeypatch.setattr(oneshot, "DOCTOR_POLL_S", 0.01)
    page = full(0.93)
    engine.set_page(lambda: page().replace('waiting{model_name="m"} 0', 'waiting{model_name="m"} 4'))

    bound = oneshot.doctor(config(), [engine.url])["targets"][0]["binds"][0]

    assert (bound["by"], bound["knob"][:14]) == ("kv-bound", "more KV blocks")
