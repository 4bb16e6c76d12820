"""The one that watches a rank: its compute time per step without the wait for the others, and what ran by CUDA graph.

Ranks move in lock-step, so the wall time of a step is alike on all of them: what tells the slow one is the time that it
does not wait in collectives. Where the host waits in them (CPU, eager), that is measured; where the device does (CUDA,
eager), one step in DEVICE_EVERY is, by events in its stream; inside CUDA graphs nobody can see them, and it is said.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tocsin_probe import page as pages
from tocsin_probe.page import BASIS, GRAPHS, RANK, RING, STEPS, Page
from tocsin_probe.requests import engine_index

DEVICE_EVERY = 64
BLOCK = 16  # steps of which the middle one counts for all: a process that was pushed aside for one is no slow rank
MOST_PENDING = 4  # steps timed on the device and not yet read
PROFILE_NAME = "TOCSIN_PROBE_PROFILE_MINUTES"
ALIGN = 16  # a step to profile is chosen by its number, which all ranks share, never by a clock alone
COLLECTIVE = re.compile(
    r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|multimem|one_?shot|two_?shot|cross_device", re.IGNORECASE)


class Rank:
    """The rank of this process: `begin` and `end` around execute_model, `again` and `end` around sample_tokens."""

    def __init__(self, page: Callable[[], Page]) -> None:
        self._page = page
        self.samples = False  # the time of sample_tokens counts too
        self.inside = False  # a step runs
        self.timing = False  # and its collectives are timed
        self.depth = 0  # of collectives that call each other
        self._place: tuple[int, int, int, int, int] | None = None  # rank, tp rank, tp size, pp rank, engine index
        self._several = False  # ranks to compare with
        self._is_host = True
        self._dispatcher: Any = None
        self._largest = 0
        self._graphs = GRAPHS["unknown"]
        self._has_mode = False  # a dispatcher that tells has been seen
        self._mode: int | None = None  # of the step under way: 0 eager
        self._tokens = 0
        self._is_decode = False
        self._counts = {"steps": 0, "timed": 0, "graph": 0, "eager": 0, "over": 0, "profiled": 0}
        self._compute_s = self._waited_s = self._profiled_s = 0.0
        self._last_profiled = 0
        self._basis = BASIS["nothing yet"]
        self._entries = [0.0] * RING
        self._began = self._waits_s = 0.0
        self._step_s: float | None = None  # compute of the step under way; None: it is not timed by the host
        self._block: list[float] = []
        self._calls = 0
        self._due = 0.0  # monotonic s of the next write
        self._spans: list[tuple[Any, Any]] | None = None  # of a step that is timed on the device
        self._first: Any = None
        self._pending: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()
        minutes = os.environ.get(PROFILE_NAME, "")
        self._profile_s = 60.0 * float(minutes) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", minutes) else 0.0
        self._profiled_in = int(time.monotonic() / self._profile_s) if self._profile_s else 0
        self._profiler: Any = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, worker: Any, order: Any) -> None:
        """Before execute_model. `order`: vLLM's SchedulerOutput."""
        total = int(order.total_num_scheduled_tokens)
        if total <= 0:
            return
        if self._place is None:
            self._learn(worker)
        drafts = order.scheduled_spec_decode_tokens
        drafted = sum(map(len, drafts.values())) if drafts else 0
        self._is_decode = total == len(order.num_scheduled_tokens) + drafted
        self._mode, self._tokens = None, total
        steps = self._counts["steps"] = self._counts["steps"] + 1
        self._calls, self._waits_s = 0, 0.0
        self._began = time.monotonic()
        self._entries[steps % RING] = self._began
        several = self._several
        if several and not self._is_host:
            self._begin_on_device(steps)
        self.inside, self.timing = True, several and (self._is_host or self._spans is not None)

    def again(self) -> None:
        """Before sample_tokens, which ends the step."""
        self._began, self._waits_s = time.monotonic(), 0.0
        self.inside = self.timing = True

    def end(self, *, ran: bool) -> None:
        """After execute_model (`ran`) or sample_tokens."""
        if not self.inside:
            return
        self.inside = self.timing = False
        now = time.monotonic()
        took_s = now - self._began
        if ran:
            self._count_graph()
            if self._several and self._is_host:
                self._basis = BASIS["host clock"] if self._calls else BASIS["hidden"]
                self._count_host(took_s - self._waits_s)
            elif self._several:
                self._end_on_device()
            if now >= self._due:
                self._due = pages.next_write_s(now)
                self._write()
        elif self._step_s is not None:
            self._step_s += took_s - self._waits_s
            self._waited_s += self._waits_s

    def _count_host(self, step_s: float) -> None:
        """The step before is whole now: its sampling has ended."""
        if self._step_s is not None:
            self._block.append(self._step_s)
        if len(self._block) == BLOCK:
            self._compute_s += BLOCK * sorted(self._block)[BLOCK // 2]
            self._counts["timed"] += BLOCK
            self._block.clear()
        self._step_s = step_s if self._calls else None
        self._waited_s += self._waits_s

    def _write(self) -> None:
        assert self._place is not None  # noqa: S101
        count, page = self._counts, self._page()
        page.write(RANK, self._compute_s, self._waited_s, count["timed"], count["steps"], count["graph"],
                   count["eager"], count["over"], count["profiled"], self._profiled_s, self._last_profiled,
                   *self._place, self._basis, self._graphs, self._largest)
        if self._several:
            page.write(STEPS, *self._entries)

    def _learn(self, worker: Any) -> None:
        """Which rank this is, and what its CUDA graphs were captured for."""
        config = worker.vllm_config
        parallel = config.parallel_config
        size, rank = int(parallel.tensor_parallel_size), int(worker.rank)
        within = rank % (size * int(parallel.pipeline_parallel_size))
        self._place = (within, within % size, size, within // size, engine_index(parallel))
        self._several = size > 1
        self._is_host = str(getattr(getattr(worker, "device", None), "type", "cpu")) == "cpu"
        self.samples = self._several and self._is_host
        runner = getattr(worker, "model_runner", None)
        self._dispatcher = getattr(runner, "cudagraph_dispatcher", None) or getattr(runner, "cudagraph_manager", None)
        compilation = config.compilation_config
        sizes = getattr(compilation, "cudagraph_capture_sizes", None) or ()
        self._largest = int(getattr(compilation, "max_cudagraph_capture_size", None) or max(sizes, default=0))
        mode = getattr(self._dispatcher, "cudagraph_mode", None)
        if mode is None:
            mode = getattr(compilation, "cudagraph_mode", None)
        if self._is_host or (mode is not None and mode.name == "NONE") or not self._largest:
            self._graphs = GRAPHS["off"]
        elif self._dispatcher is None or getattr(config.cache_config, "kv_sharing_fast_prefill", False):
            self._graphs = GRAPHS["not told"]  # who dispatches twice a step tells of its second half
        else:
            self._graphs = GRAPHS["used"]

    # --- CUDA graphs ------------------------------------------------------------------------------------------------

    def dispatched(self, dispatcher: Any, decision: Any) -> None:
        """After a dispatcher chose how a batch runs; of the runner's own the last word of a step counts."""
        if not self.inside or dispatcher is not self._dispatcher:
            return
        mode = decision[0] if isinstance(decision, tuple) else decision.cg_mode
        self._mode, self._has_mode = int(mode.value), True

    def _count_graph(self) -> None:
        if self._graphs != GRAPHS["used"] or not self._is_decode or not self._has_mode:
            return
        if self._mode:
            self._counts["graph"] += 1
        else:  # NONE, or the runner asked nobody: eager
            self._counts["eager" if self._tokens <= self._largest else "over"] += 1

    # --- collectives ------------------------------------------------------------------------------------------------

    def enter(self) -> Any:
        """Before a collective that is timed; what it returns is handed to `leave`."""
        self._calls += 1
        if self._spans is not None:
            if sys.modules["torch"].cuda.is_current_stream_capturing():  # an event would spoil the graph
                self._spans, self.timing = None, False
                return None
            return _mark()
        return time.monotonic() if self._is_host else None

    def leave(self, entered: Any) -> None:
        """After it."""
        if self._spans is not None:
            self._spans.append((entered, _mark()))
        elif self._is_host:
            self._waits_s += time.monotonic() - entered

    # --- on the device ----------------------------------------------------------------------------------------------

    def _begin_on_device(self, step: int) -> None:
        if self._profile_s and step % ALIGN == 0 and int(time.monotonic() / self._profile_s) != self._profiled_in:
            self._profiled_in = int(time.monotonic() / self._profile_s)
            torch = sys.modules["torch"]
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        elif step % DEVICE_EVERY == 0 and len(self._pending) < MOST_PENDING:
            self._spans, self._first = [], _mark()

    def _end_on_device(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            sys.modules["torch"].cuda.synchronize()
            profiler.stop()
            self._profiled_s += compute_s_of(profiler.profiler.kineto_results.events())
            self._counts["profiled"] += 1
            self._last_profiled = self._counts["steps"]
        spans, self._spans = self._spans, None
        if self._mode or (spans is not None and not spans):
            self._basis = BASIS["hidden"]
        elif spans:
            self._pending.append((self._first, _mark(), spans))
        while self._pending and self._pending[0][1].query():  # done: nobody waits for it
            first, last, waits = self._pending.popleft()
            waited_s = sum(before.elapsed_time(after) for before, after in waits) / 1000.0
            self._compute_s += first.elapsed_time(last) / 1000.0 - waited_s
            self._waited_s += waited_s
            self._counts["timed"] += 1
            self._basis = BASIS["device events"]


def _mark() -> Any:
    """An event in the device's stream, now."""
    event = sys.modules["torch"].cuda.Event(enable_timing=True)
    event.record()
    return event


def compute_s_of(events: Any) -> float:
    """Seconds of kernels that are no collectives, of a profile's events."""
    return float(sum(event.duration_ns() for event in events if not COLLECTIVE.search(event.name()))) / 1e9
