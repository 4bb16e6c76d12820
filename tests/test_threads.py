"""The kernel gives no thread: said by whoever wanted one, asked for again, and the rest goes on.

With the kernel's own limit: tests/incidents/test_adversity.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent.loop import Collector
from agent.model import Batch, Gap, Sample, Source
from agent.sources.engine import EngineSource
from agent.sources.json_address import JsonSource
from agent.sources.kernel_log import KernelLog
from agent.sources.nvml import NvmlSource
from agent.sources.nvml_events import XidEvents
from agent.sources.nvml_values import Gpu
from agent.sources.pods import PodsSource
from agent.sources.probe import CanarySource
from agent.sources.workloads import WorkloadsSource
from agent.threads import NoThread, begin, beginning
from tests.page_server import PageServer
from tests.receiver import wait_until
from tests.scenes import T0

PAGE = 'vllm:num_requests_running{model_name="m"} 3\n'
NOWHERE = "http://127.0.0.1:9"


@contextmanager
def starved(after: int = 0) -> Iterator[None]:
    """The kernel gives us so many threads more, then none: as `_thread` says it of EAGAIN. Servers of tests go on."""
    real, left = threading.Thread.start, after

    def start(thread: threading.Thread) -> None:
        nonlocal left
        is_ours = not thread.name.startswith("Thread-")
        left -= is_ours
        if is_ours and left < 0:
            raise RuntimeError("can't start new thread")
        real(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_what_it_says() -> None:
    """For what, why, and where the limits stand; another RuntimeError is not taken for it."""
    with starved(), pytest.raises(NoThread, match=r"^no thread for nvml: can't start new thread: .*TasksMax= of the"):
        begin(print, "nvml")
    with pytest.raises(RuntimeError, match=r"^another$"), beginning("nvml"):
        raise RuntimeError("another")


@pytest.mark.parametrize("make", [
    lambda folder: KernelLog(folder / "kern.log"),
    lambda folder: CanarySource(NOWHERE),
    lambda folder: JsonSource("orders", f"{NOWHERE}/orders", "n", total_s=0.2),
    lambda folder: PodsSource("gpu-17"),
    lambda folder: WorkloadsSource(),
], ids=["kernel_log", "canary", "json", "pods", "workloads"])
def test_a_source_that_wants_a_thread_says_so_until_it_has_one(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """The kernel log was told as open for ever, and the others not at all, where their thread had not begun at once."""
    (tmp_path / "kern.log").touch()
    source = make(tmp_path)
    with starved():
        for _ in range(2):
            with pytest.raises(NoThread):
                source.read(T0)

    source.read(T0)
    source.close()


def test_workloads_that_get_one_thread_of_three_ask_for_the_others() -> None:
    """Each kind of workload is followed by one."""
    source = WorkloadsSource(again_s=60.0)
    with starved(after=1), pytest.raises(NoThread, match="statefulsets"):
        source.read(T0)

    source.read(T0)
    source.close()
    assert [thread.name for thread in source._threads] == ["deployments", "statefulsets", "daemonsets"]


def test_an_engine_is_read_though_nobody_can_ask_its_health() -> None:
    """The page is worth more; that /health is not asked is told, and it is asked once that is possible."""
    with PageServer(PAGE) as server:
        source = EngineSource("llama", server.url, kind="vllm")
        with starved():
            batch = source.read(T0)
        assert batch.error is not None
        assert batch.error.startswith(f"/health of {server.url} is not asked: no thread for health:")
        told = {r.name: r.value for r in batch.readings if isinstance(r, Sample)}
        assert (told["running"], told["down"], told["rung"]) == (3.0, 0.0, 3.0)
        assert source.read(T0).error is None
        wait_until(lambda: server.healths > 0, 60, "/health to be asked")
        source.close()


def test_gpus_are_told_unknown_and_read_again() -> None:
    """NVML's worker is one thread; what asks it from elsewhere is told, too."""
    source = NvmlSource()
    with starved():
        batch = source.read(T0)
        assert source.processes() is None
        assert (source.release(1.0) or "").startswith("no thread for nvml")
    assert (batch.error or "").startswith("no thread for nvml")
    source.reopen()
    assert not (source.read(T0).error or "").startswith("no thread")
    source.close()


def test_xid_events_that_nobody_waits_for_are_no_open_eye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are registered, and the thread that would wait is wanting: a Gap, until the next read of the GPUs."""
    def wait(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def call(name: str, *_: object) -> Any:
        return name

    monkeypatch.setattr("pynvml.nvmlEventSetWait_v2", wait)
    events = XidEvents()
    gpu = Gpu(0, ctypes.c_void_p(1), "GPU-1", "NVIDIA H100", "0000:01:00")
    with starved():
        events.register(call, [gpu])
    [gap] = events.read(T0).readings
    assert isinstance(gap, Gap)
    assert gap.why.startswith("no thread for nvml events")
    events.register(call, [gpu])
    assert isinstance(events.read(T0).readings[0], Sample)
    events.close()


class Still:
    """A source with nothing to tell."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, now: float) -> Batch:
        """Nothing."""
        return Batch(self.name, now, 0.0)

    def close(self) -> None:
        """Nothing to close."""


def test_one_thread_for_two_sources_costs_one_of_them() -> None:
    """The other is told as late, once a round as an error, and is read as soon as there is a thread."""
    now = [100.0]
    sources: list[Source] = [Still("a"), Still("b")]
    collector = Collector(sources, lambda: T0, lambda: now[0])
    with starved(after=1):
        for _ in range(2):
            told = {batch.source: batch.error for batch in collector.gather(60.0)}
            now[0] += 5.0
    assert told["a"] is None
    assert (told["b"] or "").startswith("no thread for source b")
    assert collector.late_s() == {"a": 0.0, "b": 10.0}
    assert collector.slots["b"].errors == 2

    assert {batch.source: batch.error for batch in collector.gather(60.0)} == {"a": None, "b": None}
    assert collector.late_s() == {"a": 0.0, "b": 0.0}
    collector.stop()
