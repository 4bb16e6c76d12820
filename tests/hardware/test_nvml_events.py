"""Xids by NVML's events: counted, bounded, and one thread in the driver, whatever hangs there."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agent.model import Sample
from agent.sources.nvml_events import MOST, XidEvents
from agent.sources.nvml_values import Gpu

NONE = 0xFFFFFFFF


def gpu(address: int) -> Gpu:
    """An open GPU whose handle is at this address."""
    return Gpu(0, ctypes.c_void_p(address), f"GPU-{address}", "NVIDIA H100", f"0000:{address:02x}:00")


def told(address: int, number: int, gi: int = NONE, ci: int = NONE) -> Any:
    """What nvmlEventSetWait gives."""
    return SimpleNamespace(device=ctypes.c_void_p(address), eventType=pynvml.nvmlEventTypeXidCriticalError,
                           eventData=number, gpuInstanceId=gi, computeInstanceId=ci)


class Driver:
    """NVML's part: `call` as the worker has it; waits that hang until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.waits = 0
        self.go = threading.Event()
        monkeypatch.setattr("pynvml.nvmlEventSetWait_v2", self.wait)
        monkeypatch.setattr("agent.sources.nvml_events.STOP_S", 0.05)

    def call(self, name: str, whose: str, *args: Any) -> Any:
        """Every call succeeds."""
        del whose, args
        self.calls.append(name)
        return "a set"

    def wait(self, event_set: Any, timeout_ms: int) -> Any:
        """A wait that does not return although its time is over."""
        del event_set, timeout_ms
        self.waits += 1
        self.go.wait(60)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that hangs in its wait until the test ends."""
    one = Driver(monkeypatch)
    yield one
    one.go.set()


def until(met: Any) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_wait_that_hangs_is_one_thread(driver: Driver) -> None:
    """NVML is started anew every five minutes while the wait of before hangs: each start left one thread more."""
    events = XidEvents()
    for _ in range(5):
        events.register(driver.call, [gpu(1)])
        until(lambda: driver.waits >= 1)
        events.stop(driver.call)
    assert driver.waits == 1
    assert "nvmlEventSetFree" not in driver.calls  # the set is in use by whoever hangs
    assert not isinstance(events.read(1.0).readings[0], Sample)
    assert events.note.endswith("a wait of before has not returned")

    driver.go.set()
    until(lambda: not events._hangs())
    events.register(driver.call, [gpu(1)])
    until(lambda: driver.waits >= 2)
    assert isinstance(events.read(2.0).readings[0], Sample)
    events.stop(driver.call)


def test_a_storm_of_events_is_counted(driver: Driver) -> None:
    """Ten thousand of one Xid are one event with a count; a thousand kinds do not push each other out of memory."""
    events = XidEvents()
    events.register(driver.call, [gpu(1), gpu(2)])
    for _ in range(10_000):
        events._take(told(1, 95))
    events._take(told(2, 95))
    events._take(told(1, 95, gi=5))
    events._take(told(1, 95, gi=5, ci=1))
    events._take(told(7, 95))  # of a device that nobody registered
    got = events.read(1.0).events
    assert [(e.device, e.count, dict(e.detail)) for e in got] == [
        ("0000:01:00", 10_000, {}), ("0000:02:00", 1, {}), ("0000:01:00", 1, {"instance": 5}),
        ("0000:01:00", 1, {"instance": 5, "compute_instance": 1})]
    assert events.read(2.0).events == ()
    for number in range(2 * MOST):
        events._take(told(1, number))
    assert len(events.read(3.0).events) == MOST


def test_a_driver_that_cannot_be_waited_for_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver has no nvmlEventSetWait_v2: nobody heard its Xids, and the source was told as open."""
    asked = threading.Event()

    def wait(event_set: Any, timeout_ms: int) -> Any:
        del event_set, timeout_ms
        asked.set()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr("pynvml.nvmlEventSetWait_v2", wait)
    source = XidEvents()
    source.register(lambda *_: "a set", [gpu(0x1B)])
    assert asked.wait(60)
    end = time.monotonic() + 60
    while isinstance(source.read(1.0).readings[0], Sample) and time.monotonic() < end:
        time.sleep(0.01)
    source.stop(lambda *_: None)
    assert source.note == "nvmlEventSetWait_v2: Function Not Found"
