"""A vLLM of another age in a process of its own: only the modules and methods that tocsin-probe is sewn to.

The shapes are those of the wheels of 0.8.0 to 0.33.0; what the methods do is as little as the probe needs to see.

    with FakeVllm(folder, "0.32.0") as engine:
        engine.run("core.add_request(Request('a', 1e9))")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]

COMMON = '''
import enum, sys, types

class Mode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)

class Status(enum.IntEnum):
    WAITING = 1
    WAITING_FOR_STREAMING_REQ = 2
    RUNNING = 3
    PREEMPTED = 4

class Request:
    def __init__(self, request_id, arrival_time):
        self.request_id, self.arrival_time, self.status = request_id, arrival_time, Status.WAITING

class Plain:
    def __init__(self, **told):
        self.__dict__.update(told)

def config(tp=1, mode=Mode.NONE, sizes=(), index=0):
    return Plain(parallel_config=Plain(tensor_parallel_size=tp, pipeline_parallel_size=1, data_parallel_rank=index),
                 cache_config=Plain(),
                 compilation_config=Plain(cudagraph_mode=mode, cudagraph_capture_sizes=list(sizes)))

def order(tokens, new=(), drafts=None):
    """A SchedulerOutput: request -> tokens."""
    return Plain(scheduled_new_reqs=[Plain(req_id=n) for n in new], num_scheduled_tokens=tokens,
                 total_num_scheduled_tokens=sum(tokens.values()), scheduled_spec_decode_tokens=drafts or {})
'''
OUTPUT_PROCESSOR = '''
from vllm.common import Plain
class OutputProcessor:
    def __init__(self):
        self.request_states = {}
    def add_request(self, request, prompt, parent_req=None, request_index=0, queue=None):
        self.request_states[request.request_id] = Plain(is_prefilling=True)
    def process_outputs(self, engine_core_outputs, *rest):
        for name, ended in engine_core_outputs:
            self.request_states[name].is_prefilling = False
            if ended:
                del self.request_states[name]
        return "processed"
    def abort_requests(self, request_ids, *internal):
        return [name for name in request_ids if self.request_states.pop(name, None)]
'''
SCHEDULER = '''
from vllm.common import Status, config
class Scheduler:
    def __init__(self, vllm_config=None):
        self.vllm_config = vllm_config or config()
        self.requests, self.next = {}, None
    def add_request(self, request):
        if request.request_id == "refused":
            raise ValueError("refused")
        self.requests[request.request_id] = request
    def schedule(self, *throttle):
        for name in self.next.num_scheduled_tokens:
            self.requests[name].status = Status.RUNNING
        return self.next
    def update_from_output(self, *outputs):
        return "updated"
    def finish_requests(self, request_ids, finished_status):
        for name in request_ids:
            self.requests.pop(name, None)
'''
WORKER = '''
from vllm.common import Plain
import vllm.distributed.parallel_state as parallel_state
class {owner}:
    def __init__(self, vllm_config, rank=0, device="cpu", runner=None):
        self.vllm_config, self.rank, self.device = vllm_config, rank, Plain(type=device)
        self.model_runner = runner or Plain()
        self.work = lambda: None
    def execute_model(self, scheduler_output):
        self.work()
        return "ran"
'''
SAMPLE = '''
    def sample_tokens(self, grammar_output):
        self.work()
        return "sampled"
'''
GROUP = '''
import time
import torch
class GroupCoordinator:
    waits_s = 0.0
    def _all_reduce_out_place(self, input_):
        time.sleep(self.waits_s)
        return input_
    def broadcast(self, input_, src=0):
        return self._all_reduce_out_place(input_)
'''
DISPATCHER = '''
from vllm.common import Mode
class CudagraphDispatcher:
    cudagraph_mode = Mode.FULL_AND_PIECEWISE
    says = Mode.FULL
    def dispatch(self, *args, **kwargs):
        return self.says, None
'''
MANAGER = '''
from vllm.common import Mode, Plain
class CudaGraphManager:
    cudagraph_mode = Mode.FULL_AND_PIECEWISE
    says = Mode.FULL
    def dispatch(self, *args, **kwargs):
        return Plain(cg_mode=self.says)
'''
TORCH = "compiler = __import__('types').SimpleNamespace(is_compiling=lambda: False)\n"
SCRIPT = '''
import sys
import vllm
import vllm.distributed.parallel_state
import tocsin_probe
import tocsin_probe.page
tocsin_probe.page.WRITE_EVERY_S = 1e-9  # every step of a story is looked at
tocsin_probe.register()
tocsin_probe.register()
from vllm.common import *
for line in sys.stdin:
    try:
        exec(compile(eval(line), "<test>", "exec"))
        answer = locals().pop("answer", None)
        print(repr(answer), flush=True)
    except BaseException as error:
        print(repr(f"{type(error).__name__}: {error}"), flush=True)
'''


def modules_of(version: tuple[int, ...]) -> dict[str, str]:
    """Module -> its text, as a vLLM of this version has it."""
    scheduler = "v1.core.scheduler" if version < (0, 8, 1) else "v1.core.sched.scheduler"
    found = {"common": COMMON, "v1.engine.output_processor": OUTPUT_PROCESSOR, scheduler: SCHEDULER,
             "distributed.parallel_state": GROUP,
             "v1.worker.gpu_worker": WORKER.format(owner="Worker") + (SAMPLE if version >= (0, 11, 1) else "")}
    if (0, 8, 5) <= version < (0, 11):
        found["v1.worker.cpu_worker"] = WORKER.format(owner="CPUWorker")
    if version >= (0, 10):
        found["v1.cudagraph_dispatcher"] = DISPATCHER
    if version >= (0, 17):
        found["v1.worker.gpu.cudagraph_utils"] = MANAGER
    return found


def write(folder: Path, version: str, without: tuple[str, ...] = ()) -> None:
    """The package, without some words of it: a method that has another name there."""
    number = tuple(int(part) for part in version.split("."))
    (folder / "torch.py").write_text(TORCH)
    for module, text in {"": f"__version__ = {version!r}\n", **modules_of(number)}.items():
        path = folder.joinpath("vllm", *module.split(".") if module else ["__init__"]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for word in without:
            text = text.replace(f"def {word}(", f"def other_{word}(")
        path.write_text(text)
    for parent in (folder / "vllm").rglob("*"):
        if parent.is_dir():
            (parent / "__init__.py").touch()


class FakeVllm:
    """A process that has it, with the probe, and does what it is told. Its log is `log`."""

    def __init__(self, folder: Path, version: str, *, without: tuple[str, ...] = (), python: str = sys.executable,
                 probe_folder: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "probe" if probe_folder is None else Path(probe_folder)
        package = folder / f"package-{version}"
        package.mkdir(parents=True, exist_ok=True)
        write(package, version, without)
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": f"{package}:{ROOT / 'probe'}", "PYTHONDONTWRITEBYTECODE": "1",
                     "TOCSIN_PROBE_DIR": str(self.folder) if probe_folder is None else probe_folder, **(env or {})})
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        self.run("pass")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(30)
        self._process.stdout.close()  # type: ignore[union-attr]

    def run(self, code: str) -> Any:
        """Run lines there; what they leave in `answer`, or the error that they raised, in words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        return eval(line)

    def signal(self, signum: int) -> None:
        """Send it a signal."""
        self._process.send_signal(signum)
        if signum == signal.SIGKILL:
            self._process.wait(30)
