"""Xids by NVML's events: told at once, also where the kernel log cannot be read; lost while nobody waits for them.

The handles are NvmlSource's: its worker registers them and lets go of them; a thread here waits.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pynvml

from agent.model import Batch, Event, Gap, Sample, Why
from agent.sources.nvml_values import UNSUPPORTED, Gpu
from agent.threads import NoThread, begin

WAIT_MS = 500
STOP_S = 2.0  # how long the end of a wait is awaited
MOST = 1024  # different events that were not handed over yet
NO_INSTANCE = 0xFFFFFFFF
OPEN, SUBJECT = "nvml_events_open", "nvml"

Call = Callable[..., Any]


def address(handle: Any) -> int | None:
    """What tells one handle from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class XidEvents:
    """NVML's Xid events as a Source: the sample nvml_events_open while at least one GPU is registered."""

    name = "nvml_events"

    def __init__(self) -> None:
        self.note = "not read yet"
        self._wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._events: dict[tuple[Any, ...], Event] = {}
        self._at: tuple[float, float] = (0.0, time.monotonic())
        self._set: Any = None
        self._places: dict[int | None, str] = {}  # a handle's address -> its PCI address
        self._refused: set[str] = set()  # UUIDs
        self._thread: threading.Thread | None = None
        self._unheard = ""  # why nobody waits for the events of GPUs that are registered
        self._ending = threading.Event()  # of that thread

    # --- the loop's side --------------------------------------------------------------------------------------------

    def wake_with(self, wake: Callable[[], object]) -> None:
        """`wake` is called from a thread of ours when an event has come."""
        self._wake = wake

    def read(self, now: float) -> Batch:
        """Hand over what has come since the last read. Never blocks."""
        began = time.monotonic()
        self._at = (now, began)
        with self._lock:
            events, self._events = tuple(self._events.values()), {}
        reading: Sample | Gap = Sample(OPEN, SUBJECT, 1.0, now)
        if self._set is None or not self._places:
            hangs = "; a wait of before has not returned" if self._hangs() else ""
            self.note = f"no GPU is registered for Xid events{hangs}"
            reading = Gap(OPEN, SUBJECT, Why.NOT_SUPPORTED, self.note, now)
        elif self._unheard:
            self.note = self._unheard
            reading = Gap(OPEN, SUBJECT, Why.ERROR, self.note, now)
        else:
            self.note = f"Xid events of {len(self._places)} GPU(s)"
        return Batch(self.name, now, time.monotonic() - began, (reading,), events=events)

    def close(self) -> None:
        """End the wait; the set is freed by who registered it."""
        self._ending.set()

    # --- the side of NvmlSource's worker ----------------------------------------------------------------------------

    def register(self, call: Call, gpus: Iterable[Gpu]) -> None:
        """Have NVML tell the Xids of these GPUs, those that are not registered yet.

        Not while a wait of before still hangs in the driver: with each start of NVML there would be one thread more.
        """
        if self._hangs():
            return
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        for gpu in gpus:
            place = address(gpu.handle)
            if place in self._places or gpu.uuid in self._refused or gpu.lost is not None:
                continue
            try:
                if self._set is None:
                    self._set = call("nvmlEventSetCreate", "")
                kinds = pynvml.nvmlEventTypeXidCriticalError
                call("nvmlDeviceRegisterEvents", gpu.label, gpu.handle, kinds, self._set)
            except pynvml.NVMLError as error:
                if error.value in UNSUPPORTED:
                    self._refused.add(gpu.uuid)
                continue
            self._places[place] = gpu.bdf
        if self._places and self._thread is None:
            self._ending = threading.Event()
            self._unheard = ""
            try:
                self._thread = begin(self._wait, "nvml events", self._set, self._ending)
            except NoThread as error:  # what the GPUs tell is worth more; it is tried again at the next read of theirs
                self._unheard = str(error)

    def stop(self, call: Call) -> None:
        """Let go of the handles, before NVML is shut down."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if not self._hangs():
            self._thread = None
        known, self._set = self._set, None
        self._places, self._refused = {}, set()
        if known is not None and self._thread is None:
            try:
                call("nvmlEventSetFree", "", known)
            except pynvml.NVMLError:
                return  # it goes with NVML

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _hangs(self) -> bool:
        """Whether a thread that was told to end has not."""
        return self._thread is not None and self._ending.is_set() and self._thread.is_alive()

    def _wait(self, event_set: Any, ending: threading.Event) -> None:
        while not ending.is_set():
            try:
                data = pynvml.nvmlEventSetWait_v2(event_set, WAIT_MS)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_UNINITIALIZED:
                    return
                if error.value in UNSUPPORTED:  # a driver of before 2020
                    self._unheard = f"nvmlEventSetWait_v2: {error}"
                if error.value != pynvml.NVML_ERROR_TIMEOUT:  # a GPU that is lost, a driver that goes
                    ending.wait(1.0)
                continue
            self._take(data)

    def _take(self, data: Any) -> None:
        place = self._places.get(address(data.device), "")
        if data.eventType != pynvml.nvmlEventTypeXidCriticalError or not place:
            return
        now, mono = self._at
        at = now + time.monotonic() - mono
        told = {"instance": data.gpuInstanceId, "compute_instance": data.computeInstanceId}
        detail = {name: int(number) for name, number in told.items() if number != NO_INSTANCE}
        number = int(data.eventData)
        key = (place, number, *detail.items())
        with self._lock:
            known = self._events.get(key)
            if known is not None:
                self._events[key] = replace(known, at=at, count=known.count + 1)
            elif len(self._events) < MOST:
                self._events[key] = Event("xid", place, number, at, at, origin="nvml", detail=detail)
        self._wake()
