"""tocsin-probe in a real vLLM with two ranks: what it tells is what the clients saw, and which rank was made slow.

The last story stops the engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.budget import kv_dtype_bytes, kv_token_bytes, shape_of
from agent.lint_facts import cache_labels
from agent.model import Batch, Sample, Signal
from agent.sources.engine_probe import ProbeSource
from agent.windows import Windows
from tests.agent_process import ROOT, AgentProcess
from tests.engine.load import Load, words
from tests.engine.vllm import VllmServer, descendants
from tests.receiver import wait_until
from tests.scenes import T0, ask, scene

pytestmark = pytest.mark.engine

LONG_S = 120.0  # guards against a wait without end
CLOSE_S = 0.2
DELAY_MS = 5
STEPS = 1000  # what rank-straggler asks for
TRIES = 8  # of the windows of a healthy engine: a page needs two minutes of them, all in breach

# vLLM loads this too: it makes rank 1 sleep before each step for as many milliseconds as a file says.
SLOW_RANK = """\
import os, time

def slow():
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    run = GPUModelRunner.execute_model

    def delayed(self, *args, **kwargs):
        if get_tp_group().rank_in_group == 1:
            with open(os.environ["TOCSIN_TEST_SLOW"]) as file:
                time.sleep(float(file.read() or 0) / 1000)
        return run(self, *args, **kwargs)

    GPUModelRunner.execute_model = delayed
"""


class Probed(NamedTuple):
    """A vLLM with the probe in it, and where it writes."""

    server: VllmServer
    folder: Path
    slow: Path

    def source(self) -> ProbeSource:
        """The agent's reader, which knows whose processes these are."""
        source = ProbeSource(self.folder)
        source.owners = dict.fromkeys(descendants(os.getpid()), ("e", ("e",)))
        return source


def as_plugin(folder: Path, name: str, entry: str) -> None:
    """Let Python take `name` in a folder on PYTHONPATH for an installed plugin of vLLM."""
    about = folder / f"{name}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {entry}\n")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """The engine: two ranks, four requests at a time. The probe is loaded as if it were installed."""
    folder = tmp_path_factory.mktemp("probed")
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "slow_rank.py").write_text(SLOW_RANK)
    as_plugin(plugins, "slow_rank", "slow_rank:slow")
    project = tomllib.loads((ROOT / "probe/pyproject.toml").read_text())["project"]
    as_plugin(plugins, "tocsin_probe", project["entry-points"]["vllm.general_plugins"]["tocsin"])
    slow = folder / "slow-ms"
    slow.write_text("0")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tocsin-probe-") as memory:
        env = {"PYTHONPATH": f"{plugins}:{ROOT / 'probe'}", "TOCSIN_PROBE_DIR": memory, "TOCSIN_TEST_SLOW": str(slow)}
        with VllmServer(folder / "vllm", "--tensor-parallel-size", "2", "--max-num-seqs", "4", env=env) as server:
            yield Probed(server, Path(memory), slow)


def test_lint_s_kv_line_is_the_engine_s_to_the_byte(probed: Probed) -> None:
    """KV heads × head size: what both ranks hold in bytes is what it tells in tokens × ours; nobody had to be asked."""
    labels = cache_labels(probed.server.get("/metrics")[1])
    shape = shape_of(json.loads((probed.server.folder / "model/config.json").read_text()))
    assert shape is not None
    token_bytes = kv_token_bytes(shape, kv_dtype_bytes(shape) or 0.0)
    assert token_bytes == 2 * 2 * 2 * 32 * 2  # key and value, layers, KV heads, head size, BF16
    assert int(labels["kv_cache_size_tokens"]) * token_bytes == 2 * int(labels["kv_cache_memory_bytes"])

    done = subprocess.run([sys.executable, "-m", "agent", "lint", probed.server.url, "--profile", "throughput",
                           "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (engine,) = json.loads(done.stdout)["engines"]
    found = {one["number"]: one for one in engine["findings"]}
    assert (engine["version"], found[1]["verdict"], found[2]["verdict"]) == ("0.32.0", "at odds", "kept")
    assert "--max-num-seqs 4" in found[1]["evidence"][1]
    assert any("512 bytes of KV cache" in line for line in found[2]["evidence"])


@contextmanager
def watching(source: ProbeSource, every_s: float) -> Iterator[list[tuple[float, dict[str, float]]]]:
    """(unix s, what the files told by name) every so often, while it is open."""
    seen: list[tuple[float, dict[str, float]]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(every_s):
            now = time.time()
            told = source.read(now).readings
            seen.append((now, {r.name: r.value for r in told if isinstance(r, Sample) and not r.key}))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_every_seam_works_and_vllm_runs_as_ever(probed: Probed) -> None:
    """None stands aside in vLLM 0.32, and its log has no word of ours."""
    with Load(probed.server.port) as load:
        load.ask(words(20, 1), 5)
    (facts,) = probed.source().read(time.time()).probes or ()
    assert facts.vllm == "0.32.0"
    assert facts.parts == ("front end", "queue", "2 ranks")
    assert facts.aside == ()
    assert "tocsin-probe" not in probed.server.log.read_text()


def test_h1_ages_are_those_of_the_clients(probed: Probed) -> None:
    """24 requests at once, 4 at a time: the age without a first token to 0.2 s, the queue's age never more."""
    with Load(probed.server.port) as load:
        with watching(probed.source(), 0.05) as seen:
            for seed in range(24):
                load.send(words(300, 100 + seed), 60)
            load.wait()
            time.sleep(0.3)
        began, ended = load.seen[0].sent_at, max(one.ended_at or 0.0 for one in load.seen)
        assert [one.error for one in load.seen] == [""] * 24
        during = [(at, told) for at, told in seen if began <= at <= ended]
        assert len(during) >= 5  # of 20 a second: a busy machine reads late
        for at, told in during:
            may_s = CLOSE_S + load.noise_s(at - 1, at + 1)
            near = [load.oldest_wait_s(at + shift) for shift in (-may_s, -may_s / 2, 0.0, may_s / 2, may_s)]
            age_s = told.get("probe_first_token_age_s", 0.0)
            assert min(near) - may_s <= age_s <= max(near) + may_s, (at - began, age_s, near)
            assert told.get("probe_queue_age_s", 0.0) <= max(near) + may_s
        longest = max(load.ttfts_s())
        told_s = max(told.get("probe_first_token_age_s", 0.0) for _, told in during)
        queue_s = max(told.get("probe_queue_age_s", 0.0) for _, told in during)
        assert told_s > longest / 2  # of 20 reads a second some are late, where the machine is busy
        assert 0 < queue_s <= told_s
        assert seen[-1][1]["probe_first_token_age_s"] == 0.0
        assert seen[-1][1]["probe_queue_age_s"] == 0.0
        print(f"longest wait {longest:.2f} s, told {told_s:.2f} s; queue {queue_s:.2f} s; {len(during)} reads")


def spread(probed: Probed, slow_ms: int) -> Signal:
    """What rank-straggler is compared with, over a thousand steps and more of two requests at a time."""
    probed.slow.write_text(str(slow_ms))
    windows, source = Windows(1.0), probed.source()
    began = time.time()

    def read() -> float:
        now = time.time()
        batch = source.read(now)
        windows.ingest(Batch(batch.source, T0 + now - began, 0.0, tuple(
            reading._replace(at=T0 + now - began) for reading in batch.readings)))
        return now - began

    with Load(probed.server.port) as load:
        read()
        load.ask(words(20, 1), 5)
        start_s = read()
        while windows.increase("e", "probe_steps", T0 + start_s) < STEPS + 50:
            for seed in range(2):
                load.send(words(20, seed), 300)
            while not all(one.ended_at for one in load.seen):
                time.sleep(0.5)
                read()
            assert [one.error for one in load.seen] == [""] * len(load.seen)
        end_s = read()
    return ask(scene(windows, end_s, clip_windows_to_s=end_s - start_s), "rank-straggler")


def test_h8_the_slow_rank_is_named_and_a_healthy_engine_pages_nobody(probed: Probed) -> None:
    """5 ms into each step of rank 1, then none. The rule pages over 15 %."""
    slow = spread(probed, DELAY_MS)
    assert (slow.state, slow.method) == ("value", "exact: probe"), slow
    assert slow.value is not None
    assert slow.value > 0.15, slow
    assert slow.evidence["slow_rank"] == "1"
    healthy = []
    for _ in range(TRIES):
        healthy.append(spread(probed, 0))
        assert healthy[-1].state == "value"
        if (healthy[-1].value or 0.0) <= 0.15:
            break
    print(f"spread {slow.value:.3f} with {DELAY_MS} ms in rank 1, {[round(s.value or 0, 3) for s in healthy]} without;"
          f" {slow.evidence}")
    assert (healthy[-1].value or 0.0) <= 0.15, healthy


def test_l2_a_hang_behind_a_green_page_is_seen_by_the_probe(probed: Probed, tmp_path: Path) -> None:
    """No canary, no router: the agent finds the engine's processes itself, and reads who has waited for how long."""
    server = probed.server
    config = {"node": "n", "nvml": "off", "poll": "1s", "discover": True, "probe": {"folder": str(probed.folder)},
              "engines": [{"name": "e", "url": server.url}],
              "rules": {"override": {"engine-stuck": {"keep": "10s"}}}}
    with AgentProcess(tmp_path, config, module="tests.engine.warm_agent") as agent, Load(server.port) as load:
        load.ask(words(20, 5), 5)
        wait_until(lambda: any(s["id"] == "no_first_token_age" and s["subject"] == "e" for s in agent.ask("/signals")),
                   LONG_S, "the probe's files to be known as this engine's")
        stopped = [*server.pids("EngineCore"), *server.pids("Worker")]
        server.signal(signal.SIGSTOP, stopped)
        stopped_at = time.time()
        try:
            for seed in range(3):
                load.send(words(20, 3000 + seed), 20)
            wait_until(lambda: stuck(agent), LONG_S, "engine-stuck")
            found_s = time.time() - stopped_at
            assert server.get("/health")[0] == 200
            told = next(s for s in agent.ask("/signals") if s["id"] == "engine_stuck" and s["subject"] == "e")
            assert told["evidence"]["no_first_token_age_s"] > 15.0
        finally:
            server.signal(signal.SIGCONT, stopped)
        load.wait()
        assert found_s < 50 + load.noise_s(stopped_at, time.time()), found_s
        wait_until(lambda: not stuck(agent), LONG_S, "the end of engine-stuck")
        print(f"found after {found_s:.1f} s")


def stuck(agent: AgentProcess) -> bool:
    """engine-stuck fires."""
    return any(alert["rule"] == "engine-stuck" and alert["state"] == "firing" for alert in agent.ask("/alerts"))
