"""tocsin-probe inside vLLM, and the agent's reading of it: real files in memory, real processes that end.

vLLM is tests/fake_vllm.py, one for each of its ages; a real one is in tests/engine/test_probe.py.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tocsin_probe import page as written
from tocsin_probe.ranks import compute_s_of
from tocsin_probe.seams import SEAMS

from agent.model import Gap, Sample
from agent.sources import engine_probe
from agent.sources.engine_probe import ProbeSource
from tests.fake_vllm import ROOT, FakeVllm
from tests.needs import need

NOW = 1_700_000_000.0
IMPORTS = ("from vllm.v1.engine.output_processor import OutputProcessor\n"
           "from vllm.v1.core.sched.scheduler import Scheduler\nfrom vllm.v1.worker.gpu_worker import Worker\n")
IMPORT_ALL = """
import importlib, pkgutil
for module in pkgutil.walk_packages(vllm.__path__, "vllm."):
    importlib.import_module(module.name)
"""
AGES = ["0.8.0", "0.8.5", "0.9.2", "0.10.2", "0.11.2", "0.16.0", "0.32.0", "0.33.0"]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a file system in memory, as /run is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tocsin-test-") as folder:
        yield Path(folder)


def reading(engine: FakeVllm, now: float = NOW, *, engines: tuple[str, ...] = ("e",),
            source: ProbeSource | None = None) -> dict[tuple[str, str, str], Sample | Gap]:
    """What the agent reads, as (name, subject, key) -> reading."""
    source = source or ProbeSource(engine.folder)
    source.owners = {engine.pid: ("t", engines)}
    return {(r.name, r.subject, r.key): r for r in source.read(now).readings}


def value(found: dict[tuple[str, str, str], Sample | Gap], name: str, subject: str = "e", key: str = "") -> float:
    got = found[name, subject, key]
    assert isinstance(got, Sample), got
    return got.value


# --- every age of vLLM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", AGES)
def test_every_age_of_vllm_tells_its_queue_and_its_first_tokens(memory: Path, version: str) -> None:
    """Three requests came 30, 20 and 10 s ago: the first has a token, the second is scheduled, the third waits."""
    imports = IMPORTS.replace("core.sched.scheduler", "core.scheduler") if version == "0.8.0" else IMPORTS
    with FakeVllm(memory, version) as engine:
        engine.run(imports + f"""
front, core = OutputProcessor(), Scheduler()
for name, ago in (("a", 30), ("b", 20), ("c", 10)):
    front.add_request(Request(name, {NOW} - ago), "prompt")
    core.add_request(Request(name, {NOW} - ago))
""")
        found = reading(engine)
        assert value(found, "probe_first_token_age_s", "t") == 30.0
        assert value(found, "probe_queue_age_s") == 30.0
        assert value(found, "probe_queued") == 3.0
        answer = engine.run("""
core.next = order({"a": 8, "b": 8}, new=["a", "b"])
core.schedule()
core.update_from_output(None)
answer = front.process_outputs([("a", False)], None, None)
""")
        found = reading(engine)
        assert answer == "processed"
        assert value(found, "probe_first_token_age_s", "t") == 20.0
        assert value(found, "probe_queue_age_s") == 10.0
        assert value(found, "probe_steps") == 1.0
        # nobody moves any more: both ages grow with the reader's clock
        found = reading(engine, NOW + 60)
        assert (value(found, "probe_first_token_age_s", "t"), value(found, "probe_queue_age_s")) == (80.0, 70.0)
        engine.run("front.abort_requests(['b', 'c']); core.finish_requests(['b', 'c'], None)\n" + IMPORT_ALL)
        source = ProbeSource(engine.folder)
        found = reading(engine, source=source)
        assert (value(found, "probe_first_token_age_s", "t"), value(found, "probe_queue_age_s")) == (0.0, 0.0)
        (facts,) = source.read(NOW).probes or ()
        told = version in ("0.8.0", "0.8.5", "0.9.2")  # all other seams work
        assert list(facts.aside) == told * [f"graphs: vLLM {version} has no dispatcher that would tell (since 0.10)"]
        assert facts.vllm == version


def test_a_request_that_was_preempted_is_no_longer_never_scheduled(memory: Path) -> None:
    """It stands at the head of vLLM's queue again with its old arrival; the age is that of the next one."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"""
core = Scheduler()
core.add_request(Request("a", {NOW} - 90)); core.add_request(Request("b", {NOW} - 5))
core.next = order({{"a": 8}}, new=["a"]); core.schedule()
core.requests["a"].status = Status.PREEMPTED
core.next = order({{}}); core.schedule()
""")
        found = reading(engine)
        assert value(found, "probe_queue_age_s") == 5.0
        assert value(found, "probe_steps") == 1.0  # the second step scheduled nothing, and is no progress


def test_ten_thousand_requests_behind_one_that_stays_are_not_kept(memory: Path) -> None:
    """The head waits for its remote KV for hours; all others come and go. Memory stays small."""
    with FakeVllm(memory, "0.32.0") as engine:
        kept = engine.run(IMPORTS + f"""
core, front = Scheduler(), OutputProcessor()
core.add_request(Request("head", {NOW} - 90)); front.add_request(Request("head", {NOW} - 90), "")
for n in range(10000):
    front.add_request(Request(str(n), {NOW}), ""); front.process_outputs([(str(n), True)])
    core.add_request(Request(str(n), {NOW})); core.finish_requests([str(n)], None)
    core.next = order({{}}); core.schedule()
from tocsin_probe import seams
answer = [len(seams._probe.front._oldest.held), len(seams._probe.queue._oldest.held)]
""")
        assert max(kept) < 1100
        assert value(reading(engine), "probe_queue_age_s") == 90.0


def test_several_engines_of_one_server_are_told_apart(memory: Path) -> None:
    """Data parallel: core 1 of two has its own queue, and its own subject."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"""
core = Scheduler(config(index=1)); core.add_request(Request("a", {NOW} - 7))
""")
        found = reading(engine, engines=("e/0", "e/1"))
        assert value(found, "probe_queue_age_s", "e/1") == 7.0
        assert ("probe_queue_age_s", "e/0", "") not in found


# --- ranks and CUDA graphs -------------------------------------------------------------------------------------------


def test_a_rank_that_waits_in_collectives_does_not_compute_meanwhile(memory: Path) -> None:
    """32 steps, each with a wait of 4 ms in one all-reduce: next to nothing of it is compute, all of it is waiting."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + """
from vllm.distributed.parallel_state import GroupCoordinator
group = GroupCoordinator(); group.waits_s = 0.004
worker = Worker(config(tp=2), rank=1)
worker.work = lambda: group.broadcast(None)  # calls the all-reduce: counted once
for _ in range(33):
    worker.execute_model(order({"a": 1})); worker.sample_tokens(None)
""")
        found = reading(engine)
        assert value(found, "probe_rank_steps", key="1") == 32.0
        assert value(found, "probe_rank_seconds", key="1") / 32 < 0.002
        assert value(found, "probe_tp_size") == 2.0


def test_a_step_in_which_the_host_saw_no_collective_is_not_taken_for_compute(memory: Path) -> None:
    """A compiled model holds them inside: the wall time of the ranks is alike then, and says nothing."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + "worker = Worker(config(tp=2)); worker.execute_model(order({'a': 1}))")
        got = reading(engine)["probe_rank_seconds", "e", ""]
        assert isinstance(got, Gap)
        assert "hide the waiting" in got.why


@pytest.mark.parametrize("version", ["0.10.2", "0.16.0", "0.33.0"])
def test_decode_steps_are_counted_by_how_they_ran(memory: Path, version: str) -> None:
    """Captured up to 8 tokens: 3 by graph, 2 eager within, 1 eager above; a prefill is none of these."""
    runner = ("from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager\nd = CudaGraphManager()\n"
              "runner = Plain(cudagraph_manager=d)\n") if version == "0.33.0" else (
              "from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher\nd = CudagraphDispatcher()\n"
              "runner = Plain(cudagraph_dispatcher=d)\n")
    with FakeVllm(memory, version) as engine:
        engine.run(IMPORTS + runner + """
worker = Worker(config(mode=Mode.FULL_AND_PIECEWISE, sizes=(1, 2, 4, 8)), device="cuda", runner=runner)
worker.work = lambda: d.dispatch(0)
d.dispatch(0)  # of a warm-up: not in a step
def step(says, tokens, drafts=None):
    d.says = says; worker.execute_model(order(tokens, drafts=drafts))
for _ in range(3):
    step(Mode.FULL, {"a": 1, "b": 1})
step(Mode.NONE, {"a": 1, "b": 1})
step(Mode.NONE, {"a": 3}, {"a": [7, 9]})             # speculative: one token and two drafts
step(Mode.NONE, {str(n): 1 for n in range(9)})       # over the largest size
step(Mode.NONE, {"a": 7})                            # a prefill
""")
        found = reading(engine)
        assert [value(found, "probe_graph_steps", key=key) for key in ("graph", "eager", "over")] == [3.0, 2.0, 1.0]
        assert value(found, "probe_graph_largest") == 8.0


@pytest.mark.parametrize(("device", "mode", "why"), [
    ("cuda", "NONE", "CUDA graphs are off"), ("cpu", "FULL", "CUDA graphs are off"),
    ("cuda", "FULL", "chooses CUDA graphs where the probe cannot see it")])
def test_where_there_are_no_cuda_graphs_it_is_said(memory: Path, device: str, mode: str, why: str) -> None:
    """--enforce-eager is not a fallback of 100 %; nor is a runner whose choice nobody tells."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"worker = Worker(config(mode=Mode.{mode}, sizes=(1, 2)), device={device!r})\n"
                   "worker.execute_model(order({'a': 1}))")
        got = reading(engine)["probe_graph_steps", "e", ""]
        assert isinstance(got, Gap)
        assert got.code == "not_supported"
        assert why in got.why


DEVICE = '''
import sys
from vllm.distributed.parallel_state import GroupCoordinator
class Event:
    """A device on which a mark comes 1 ms after the one before, and is done once somebody says so."""
    clock, done = 0.0, False
    def __init__(self, enable_timing): pass
    def record(self):
        Event.clock += 1.0; self.at = Event.clock
    def query(self): return Event.done
    def elapsed_time(self, other): return other.at - self.at
sys.modules["torch"].cuda = Plain(Event=Event, is_current_stream_capturing=lambda: False)
group = GroupCoordinator(); worker = Worker(config(tp=2), device="cuda")
worker.work = lambda: (group._all_reduce_out_place(1), group._all_reduce_out_place(2))
def steps(n):
    for _ in range(n):
        worker.execute_model(order({"a": 1}))
'''


def test_on_a_device_one_step_in_64_is_timed_by_its_own_clock(memory: Path) -> None:
    """Marks 1 ms apart: begin, 2 collectives of 2 marks, end. 5 ms in all, 2 of them waiting; read when it is done."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + DEVICE + "steps(64)")
        assert ("probe_rank_steps", "e", "0") not in reading(engine)  # nobody waits for the device
        engine.run("Event.done = True; steps(1)")
        found = reading(engine)
        assert value(found, "probe_rank_steps", key="0") == 1.0
        assert value(found, "probe_rank_seconds", key="0") == pytest.approx(0.003)


def test_a_step_that_captures_a_graph_gets_no_event_in_it(memory: Path) -> None:
    """An event with a clock in a stream under capture breaks the capture: that step, the 64th, is not timed."""
    with FakeVllm(memory, "0.32.0") as engine:
        marks = engine.run(IMPORTS + DEVICE + """
steps(63)
torch = sys.modules["torch"]; torch.cuda.is_current_stream_capturing = lambda: True
Event.done = True; steps(1)
answer = Event.clock
""")
        assert marks == 1.0  # the one at the step's begin, before the capture
        assert engine.run("from tocsin_probe import seams; answer = list(seams._probe.ended)") == []
        assert ("probe_rank_steps", "e", "0") not in reading(engine)
        engine.run("torch.cuda.is_current_stream_capturing = lambda: False; steps(64)")
        assert value(reading(engine), "probe_rank_steps", key="0") == 1.0


def test_a_profiled_step_counts_the_kernels_that_are_no_collectives() -> None:
    """By the names that NCCL, vLLM's own all-reduce and FlashInfer give their kernels."""
    names = {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL": 900, "void vllm::cross_device_reduce_1stage<bf16>": 90,
             "allreduce_fusion_kernel_oneshot_lamport": 9, "sm90_xmma_gemm_bf16": 3000, "flash_fwd_kernel": 500}
    events = [SimpleNamespace(name=lambda n=n: n, duration_ns=lambda ns=ns: 1000 * ns) for n, ns in names.items()]
    assert compute_s_of(events) == pytest.approx(0.0035)


def test_one_profiled_step_is_asked_for_and_timed(memory: Path) -> None:
    """TOCSIN_PROBE_PROFILE_MINUTES is set: a step whose number all ranks share is profiled once in that time."""
    with FakeVllm(memory, "0.32.0", env={"TOCSIN_PROBE_PROFILE_MINUTES": "0.001"}) as engine:
        engine.run(IMPORTS + DEVICE + """
import time
class Profile:
    def __init__(self, activities): self.profiler = self; self.kineto_results = self
    def start(self): pass
    def stop(self): pass
    def events(self): return [Plain(name=lambda: "gemm", duration_ns=lambda: 2_000_000)]
torch = sys.modules["torch"]
torch.profiler = Plain(profile=Profile, ProfilerActivity=Plain(CUDA=1)); torch.cuda.synchronize = lambda: None
time.sleep(0.07); steps(16)
""")
        found = reading(engine)
        assert value(found, "probe_profiled_steps", key="0") == 1.0
        assert value(found, "probe_profiled_seconds", key="0") == pytest.approx(0.002)


# --- nothing of it may touch the engine ------------------------------------------------------------------------------


def test_a_seam_that_is_gone_stands_aside_and_the_others_work(memory: Path) -> None:
    """A vLLM to come calls `schedule` otherwise: no queue age, and a reason; the front end is told as ever."""
    with FakeVllm(memory, "0.33.0", without=("schedule",)) as engine:
        engine.run(IMPORTS + f"core = Scheduler(); core.add_request(Request('a', {NOW}))\n"
                   f"OutputProcessor().add_request(Request('a', {NOW} - 3), '')")
        source = ProbeSource(engine.folder)
        found = reading(engine, source=source)
        assert value(found, "probe_first_token_age_s", "t") == 3.0
        assert ("probe_queue_age_s", "e", "") not in found
        (facts,) = source.read(NOW).probes or ()
        assert facts.aside == (
            "queue: AttributeError: vllm.v1.core.sched.scheduler.Scheduler has no schedule",)
        assert "stands aside" in engine.log.read_text()


CLOSED = "from tocsin_probe import seams; seams._probe._page._map.close(); core.add_request(Request('a', 1))"


@pytest.mark.parametrize(("story", "code", "seam"), [
    ("a request without an arrival", "r = Request('a', 0); del r.arrival_time; core.add_request(r)", "queue"),
    ("an arrival that is no number", "front.add_request(Request('a', 'now'), '')", "front end"),
    ("an order of another shape", "answer = worker.execute_model(Plain())", "rank"),
    ("a file that cannot be written", CLOSED, "queue"),
])
def test_what_fails_on_our_side_ends_its_seam_and_not_the_engine(memory: Path, story: str, code: str, seam: str,
                                                                      ) -> None:
    """The call returns what it returned, a second one too, and the reason is kept."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + "front, core, worker = OutputProcessor(), Scheduler(), Worker(config())")
        assert engine.run(code) in (None, "ran"), story
        assert engine.run(code) in (None, "ran"), story
        assert seam in engine.run("from tocsin_probe import seams; answer = list(seams._probe.ended)"), story


@pytest.mark.parametrize("code", [
    ("import logging\nclass No(logging.Filter):\n    def filter(self, record): raise ValueError('a filter')\n"
     "logging.getLogger('vllm.tocsin_probe').addFilter(No())\nr = Request('a', 'now')"),
    ("class Mute(ValueError):\n    def __str__(self): raise RuntimeError('no words')\n"
     "class When:\n    def __float__(self): raise Mute\nr = Request('a', When())")])
def test_a_seam_ends_also_where_its_end_cannot_be_logged(memory: Path, code: str) -> None:
    """The operator's log filter raises, or the error has no words: the engine's call returns all the same."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + "core = Scheduler()\n" + code)
        assert engine.run("core.add_request(r)") is None
        assert engine.run("from tocsin_probe import seams; answer = list(seams._probe.ended)") == ["queue"]


def test_what_the_engine_raises_passes_through(memory: Path) -> None:
    """The wrapper is no place where an error of the engine ends, or changes."""
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + "core, front, worker = Scheduler(), OutputProcessor(), Worker(config())\n"
                   "def fail(): raise KeyError('mine')\nworker.work = fail")
        assert engine.run("core.add_request(Request('refused', 1))") == "ValueError: refused"
        assert engine.run("worker.execute_model(order({'a': 1}))") == "KeyError: 'mine'"
        assert engine.run("front.process_outputs([('nobody', False)])") == "KeyError: 'nobody'"
        assert engine.run("from tocsin_probe import seams; answer = list(seams._probe.ended)") == []


@pytest.mark.parametrize(("version", "env", "why"), [
    ("0.7.3", {}, "older than 0.8"), ("0.9.2", {"VLLM_USE_V1": "0"}, "V0 engine")])
def test_an_engine_without_the_seams_says_so(memory: Path, version: str, env: dict[str, str], why: str) -> None:
    """`doctor` gets a reason in place of numbers, and the engine is not touched."""
    with FakeVllm(memory, version, env=env) as engine:
        source = ProbeSource(engine.folder)
        source.owners = {engine.pid: ("t", ("e",))}
        (facts,) = source.read(NOW).probes or ()
        assert why in facts.aside[0]
        sewn = "answer = hasattr(OutputProcessor.add_request, '_tocsin')"
        assert engine.run(f"{IMPORTS.splitlines()[0]}\n{sewn}") is False


def test_a_disk_is_no_place_for_it(memory: Path) -> None:
    """A write-back of a disk would make the engine wait: it stands aside and names the way out."""
    with FakeVllm(memory, "0.32.0", probe_folder="/var/tmp") as engine:
        assert engine.run(IMPORTS + "core = Scheduler(); core.add_request(Request('a', 1)); answer = 1") == 1
        assert "a disk could make the engine wait" in engine.log.read_text()
        assert not list(Path("/var/tmp").glob("*.probe"))


def test_a_folder_that_cannot_be_made_costs_one_line_in_the_log(memory: Path) -> None:
    """/run/tocsin is not there and vLLM runs as an ordinary user."""
    (memory / "file").touch()
    with FakeVllm(memory, "0.32.0", probe_folder=str(memory / "file/probe")) as engine:
        assert engine.run(IMPORTS + "core = Scheduler(); core.add_request(Request('a', 1)); answer = 1") == 1
        assert engine.log.read_text().count("stands aside") == 1


def test_an_empty_folder_name_turns_it_off(memory: Path) -> None:
    """TOCSIN_PROBE_DIR= in the engine's environment."""
    with FakeVllm(memory, "0.32.0", probe_folder="") as engine:
        assert engine.run(IMPORTS + "answer = hasattr(Scheduler.schedule, '_tocsin')") is False


def test_a_forked_process_writes_a_file_of_its_own(memory: Path) -> None:
    """vLLM forks its API servers and workers: the child must not write into its parent's file."""
    with FakeVllm(memory, "0.32.0") as engine:
        child = engine.run(IMPORTS + f"""
import os, signal
core = Scheduler(); core.add_request(Request("a", {NOW} - 5))
answer = os.fork()
if not answer:
    try:
        core = Scheduler(); core.add_request(Request("b", {NOW} - 50)); signal.pause()
    finally:
        os._exit(0)
""")
        try:
            source = ProbeSource(engine.folder)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                source.owners = {engine.pid: ("t", ("e",)), child: ("u", ("f",))}
                found = {(r.name, r.subject): r for r in source.read(NOW).readings}
                if ("probe_queue_age_s", "f") in found:
                    break
                time.sleep(0.01)
            told = [found["probe_queue_age_s", name] for name in "ef"]
            assert [got.value for got in told if isinstance(got, Sample)] == [5.0, 50.0]
        finally:
            os.kill(child, signal.SIGKILL)


def test_it_depends_on_nothing_and_leaves_vllms_statistics_alone() -> None:
    """To be in the group of stat loggers would turn them on against --disable-log-stats. Python 3.9 can read it."""
    project = tomllib.loads((ROOT / "probe/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["entry-points"] == {"vllm.general_plugins": {"tocsin": "tocsin_probe:register"}}
    for path in (ROOT / "probe/tocsin_probe").glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"tocsin_probe"}
        assert not foreign, path


def test_an_older_python_runs_it(memory: Path) -> None:
    """vLLM 0.8 still runs on Python 3.9."""
    python = next((found for found in map(shutil.which, ("python3.9", "python3.10")) if found and subprocess.run(
        [found, "-c", ""], capture_output=True, check=False).returncode == 0), sys.executable)
    with FakeVllm(memory, "0.8.5", python=python) as engine:
        engine.run(IMPORTS + f"core = Scheduler(); core.add_request(Request('a', {NOW} - 4))")
        assert value(reading(engine), "probe_queue_age_s") == 4.0


# --- who writes, and what is believed --------------------------------------------------------------------------------


def test_a_writer_that_was_killed_leaves_gaps_and_no_numbers(memory: Path) -> None:
    """kill -9 of a core with a request in its queue: its age must not grow for ever. The next start sweeps its file."""
    source = ProbeSource(memory / "probe")
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"core = Scheduler(); core.add_request(Request('a', {NOW} - 9))")
        assert value(reading(engine, source=source), "probe_queue_age_s") == 9.0
        engine.signal(signal.SIGKILL)
        got = reading(engine, NOW + 5, source=source)["probe_queue_age_s", "e", ""]
        assert isinstance(got, Gap)
        assert got.code == "lost"
        assert "1 of processes that have ended" in source.note
        assert reading(engine, NOW + 700, source=source) == {}
    assert len(list((memory / "probe").iterdir())) == 1
    with FakeVllm(memory, "0.32.0") as engine:
        (left,) = (memory / "probe").iterdir()
        assert f"-{engine.pid}-" in left.name
    assert not list((memory / "probe").iterdir())  # who ends in peace takes its file along


def test_a_stopped_writer_is_a_hang_whose_age_grows(memory: Path) -> None:
    """SIGSTOP: nobody writes, the process is there, and the request of 9 s ago is one of 39 s ago half a minute on."""
    source = ProbeSource(memory / "probe")
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"front = OutputProcessor(); front.add_request(Request('a', {NOW} - 9), '')")
        engine.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
        assert value(reading(engine, NOW + 30, source=source), "probe_first_token_age_s", "t") == 39.0
        (facts,) = source.read(NOW + 30).probes or ()
        assert facts.stopped == (engine.pid,)
        engine.signal(signal.SIGCONT)


def fresh(raw: bytearray, section: written.Section, *numbers: float) -> None:
    """Write a section as the probe would, with any numbers."""
    data = section.numbers.pack(*numbers)
    written.GUARD.pack_into(raw, section.offset, 2, zlib.crc32(data), 0)
    raw[section.offset + 16:section.offset + 16 + len(data)] = data


def odd(raw: bytearray) -> None:
    struct.pack_into("<Q", raw, written.SCHEDULER.offset, 7)


def flip(raw: bytearray) -> None:
    raw[written.SCHEDULER.offset + 20] ^= 1


@pytest.mark.parametrize(("story", "damage", "why"), [
    ("its writer was stopped in the middle", odd, "torn"),
    ("a bit has flipped", flip, "torn"),
    ("it came in the year 57081", lambda raw: fresh(raw, written.FRONT, 1.7e12, NOW, 1, 1), "arrived at 1.7e+12"),
    ("it never came", lambda raw: fresh(raw, written.FRONT, float("nan"), NOW, 1, 1), "arrived at nan"),
    ("engine of a number that none has", lambda raw: fresh(raw, written.SCHEDULER, 0, NOW, 1, 1, -1), "number -1"),
    ("more steps timed than made", lambda raw: fresh(
        raw, written.RANK, 1, 1, 9, 8, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0), "cannot be"),
    ("a group of no ranks", lambda raw: fresh(
        raw, written.RANK, 1, 1, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0), "cannot be"),
    ("another version's", lambda raw: raw.__setitem__(slice(0, 8), b"TOCSINP2"), "another version's"),
    ("another process's", lambda raw: struct.pack_into("<I", raw, 12, 1), "have ended"),
    ("of one before in its place", lambda raw: struct.pack_into("<Q", raw, 16, 1), "have ended"),
    ("cut", lambda raw: raw.__delitem__(slice(100, None)), "100 bytes"),
    ("grown", lambda raw: raw.extend(b"x" * 10_000_000), "must have 4096"),
])
def test_a_file_that_cannot_be_is_not_believed(memory: Path, story: str, damage: Callable[[bytearray], None],
                                               why: str) -> None:
    """Torn, damaged or made up: no number of it is taken, and the source says why."""
    source = ProbeSource(memory / "probe")
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"core = Scheduler(); core.add_request(Request('a', {NOW} - 9))")
        assert value(reading(engine, source=source), "probe_queue_age_s") == 9.0
        (path,) = (memory / "probe").iterdir()
        raw = bytearray(path.read_bytes())
        damage(raw)
        path.unlink()
        path.write_bytes(raw)
        got = reading(engine, source=source)["probe_queue_age_s", "e", ""]
        assert isinstance(got, Gap), story
        assert why in source.note, story


def test_a_file_of_somebody_else_or_of_no_plain_kind_is_not_believed(memory: Path) -> None:
    """Anybody may write into a folder like /tmp: only the process's own user may speak for it."""
    need("root")
    source = ProbeSource(memory / "probe")
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"core = Scheduler(); core.add_request(Request('a', {NOW} - 9))")
        (path,) = (memory / "probe").iterdir()
        os.chown(path, 12345, 12345)
        assert reading(engine, source=source) == {}
        assert "is forged" in source.note
        os.chown(path, 0, 0)
        path.chmod(0o666)
        assert reading(engine, source=source) == {}
        assert "others than its owner" in source.note
        path.rename(memory / "elsewhere")
        path.symlink_to(memory / "elsewhere")
        assert reading(engine, source=source) == {}
        path.unlink()
        os.mkfifo(path)  # must not be waited for
        assert reading(engine, source=source) == {}
        assert "no plain file" in source.note
        path.unlink()


def test_a_folder_full_of_files_is_read_up_to_a_bound(memory: Path) -> None:
    """1,000 of them cost no more than 256."""
    for number in range(300):
        (memory / f"{number:04}-1-1.probe").write_bytes(b"")
    source = ProbeSource(memory)
    began = time.monotonic()
    batch = source.read(NOW)
    assert batch.readings == ()
    assert "44 more were not read" in source.note
    assert time.monotonic() - began < 5.0


def test_a_page_is_read_while_it_is_written(memory: Path) -> None:
    """100,000 writes beside it: every read is whole, and no reader is turned away for good."""
    source = ProbeSource(memory / "probe")
    with FakeVllm(memory, "0.32.0") as engine:
        engine.run(IMPORTS + f"""
import threading
core, held = Scheduler(), order({{}})
core.next = held
def write():
    for n in range(30000):
        core.add_request(Request("a", {NOW} - 9)); core.schedule(); core.finish_requests(["a"], None)
thread = threading.Thread(target=write); thread.start()
""")
        seen = set()
        for _ in range(300):
            got = reading(engine, source=source).get(("probe_queue_age_s", "e", ""))
            seen.add(got.value if isinstance(got, Sample) else None)
        engine.run("thread.join()")
        assert {0.0, 9.0} & seen
        assert seen <= {0.0, 9.0, None}


def test_a_container_s_process_is_found_by_its_number_there(memory: Path) -> None:
    """Its file says process 7 of another PID namespace: among an engine's processes, who is 7 inside and began then."""
    proc = memory / "proc"
    for pid, inside, ticks in ((4711, 7, 500), (4712, 8, 500)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / f"{pid}/stat").write_text(f"{pid} (a) b) S {' '.join(['0'] * 18)} {ticks} 0")
        (proc / f"{pid}/status").write_text(f"Name:\tx\nUid:\t0\t{os.geteuid()}\t0\t0\nNSpid:\t{pid}\t{inside}\n")
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to("pid:[1]")
    raw = bytearray(4096)
    written.HEAD.pack_into(raw, 0, written.MAGIC, 4096, 7, 500, 99, NOW)
    fresh(raw, written.SCHEDULER, NOW - 6, NOW, 1, 1, 0)
    (memory / "probe").mkdir()
    (memory / "probe/99-7-500.probe").write_bytes(raw)
    source = ProbeSource(memory / "probe", proc)
    source.owners = {4711: ("t", ("e",)), 4712: ("u", ("f",))}
    assert [(r.name, r.subject) for r in source.read(NOW).readings] == [
        ("probe_queue_age_s", "e"), ("probe_queued", "e"), ("probe_steps", "e")]
    source.owners = {}
    assert source.read(NOW).readings[0].name == "probe_queue_age_s"  # a Gap now
    assert "not seen from here" in source.note


def test_ranks_write_after_the_same_step() -> None:
    """Two ranks of 4 ms a step, begun 0.1 s apart: 62 steps between two writes, and rings of 31 that must overlap."""
    assert [written.next_write_s(now) for now in (100.13, 100.23, 100.249, 100.25)] == [100.25, 100.25, 100.25, 100.5]


def test_how_late_each_host_enters_a_step_is_told_by_the_steps_that_all_share(memory: Path) -> None:
    """Rank 1 enters 2 ms after rank 0; the ring of 32 has moved on at one of them."""
    (memory / "probe").mkdir()
    source = ProbeSource(memory / "probe")
    ticks, space = written.start_ticks("self"), written.pid_namespace()
    for rank, steps, late_s in ((0, 40, 0.0), (1, 38, 0.002)):
        raw = bytearray(4096)
        written.HEAD.pack_into(raw, 0, written.MAGIC, 4096, os.getpid(), ticks, space, NOW)
        fresh(raw, written.RANK, 0, 0, 0, steps, 0, 0, 0, 0, 0, 0, rank, rank, 2, 0, 0, 3, 2, 0)
        ring = [0.0] * 32
        for step in range(1, steps + 1):
            ring[step % 32] = 100.0 + 0.01 * step + late_s
        fresh(raw, written.STEPS, *ring)
        (memory / f"probe/{space}-{rank}-{ticks}.probe").write_bytes(raw)
    source.owners = {os.getpid(): ("t", ("e",))}
    told = [reading for reading in source.read(NOW).readings if isinstance(reading, Sample)]
    late = {reading.key: reading.value for reading in told if reading.name == "probe_rank_late_s"}
    assert late == {"0": 0.0, "1": pytest.approx(0.002)}


def test_both_sides_have_the_same_layouts() -> None:
    """The probe is installed elsewhere: what it writes and what the agent reads are written down twice."""
    for name in ("FRONT", "SCHEDULER", "RANK", "STEPS", "TEXT"):
        mine, theirs = getattr(engine_probe, name), getattr(written, name)
        assert (mine[0], mine[1].format) == (theirs.offset, theirs.numbers.format), name
    assert (engine_probe.MAGIC, engine_probe.SIZE, engine_probe.RING) == (written.MAGIC, written.SIZE, written.RING)
    assert engine_probe.HEAD.format == written.HEAD.format
    places = sorted([(s.offset, s.offset + 16 + s.numbers.size) for s in (
        written.FRONT, written.SCHEDULER, written.RANK, written.STEPS, written.TEXT)])
    assert all(end <= start for (_, end), (start, _) in zip(places, [*places[1:], (4096, 0)], strict=True))


def test_the_table_of_seams_is_told_in_its_readme() -> None:
    """Every module that it is sewn to is named there, with the versions."""
    readme = (ROOT / "probe/README.md").read_text()
    for seam in SEAMS:
        assert re.search(rf"`{re.escape(seam.module)}\.{seam.owner}`", readme), seam
