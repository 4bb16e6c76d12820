"""A real vLLM on the CPU in processes of its own, with a random model of two layers that this file makes.

    with VllmServer(folder, "--num-gpu-blocks-override", "14") as server:
        server.url, server.pid("EngineCore"), server.pid("Worker")
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.demo.node import die_with_us
from tests.needs import ROOT

PYTHON = ROOT / ".venv-vllm/bin/python"
MODEL = "tiny"
BLOCK_TOKENS = 128  # of a KV block in vLLM's CPU build
WORDS = 510
START_S = 400.0  # 25 s on a calm machine; the first one after the installation writes byte code for a minute

# vLLM loads this into each of its processes (entry point `vllm.general_plugins`): it writes down what the engine's own
# page tells late or not at all, so that what Tocsin says can be held against it.
WITNESS = """\
import os, time

def watch():
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        preempt = Scheduler._preempt_request
        if getattr(preempt, "is_watched", False):
            return

        def watched(self, request, *args, **kwargs):
            with open(os.environ["TOCSIN_TEST_WITNESS"], "a") as out:
                out.write(f"{time.time():.6f} {request.request_id}\\n")
            return preempt(self, request, *args, **kwargs)

        watched.is_watched = True
        Scheduler._preempt_request = watched
    except Exception as error:
        with open(os.environ["TOCSIN_TEST_WITNESS"], "a") as out:
            out.write(f"witness: {error!r}\\n")
"""


def write_model(folder: Path) -> Path:
    """A Llama of two layers and its tokenizer of one token a word (w0 … w509); its weights are made at load time."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    files: Mapping[str, Mapping[str, object]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(words), "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False},
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>",
            "model_max_length": 2048},
    }
    for name, said in files.items():
        (folder / name).write_text(json.dumps(said))
    return folder


def write_witness(folder: Path) -> Path:
    """A folder for PYTHONPATH in which vLLM finds the witness as an installed plugin."""
    about = folder / "tocsin_witness-0.dist-info"
    about.mkdir(parents=True)
    (folder / "tocsin_witness.py").write_text(WITNESS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tocsin-witness\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ntocsin_witness = tocsin_witness:watch\n")
    return folder


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` and its processes.

    Args:
        folder: for the model, its log and what vLLM keeps; made.
        arguments: more of the command line.
        env: more of the environment; PYTHONPATH is added to.
        threads: of each process that computes.
    """

    def __init__(self, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, threads: int = 1) -> None:
        self.folder = folder
        self.log = folder / "vllm.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._preemptions = folder / "preemptions"
        self._arguments = arguments
        self._threads = threads
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[int] = []

    def __enter__(self) -> Self:
        model, witness = write_model(self.folder / "model"), write_witness(self.folder / "witness")
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port",
                   str(self.port), "--model", str(model), "--served-model-name", MODEL, "--load-format", "dummy",
                   "--enforce-eager", "--max-model-len", "1024", "--disable-uvicorn-access-log", *self._arguments]
        paths = [str(witness), *filter(None, [self._env.pop("PYTHONPATH", "")])]
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "OMP_NUM_THREADS": str(self._threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "HOME": str(self.folder), "TOCSIN_TEST_WITNESS": str(self._preemptions), **self._env,
               "PYTHONPATH": os.pathsep.join(paths)}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(command, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out,
                                             stderr=subprocess.STDOUT, start_new_session=True,
                                             preexec_fn=die_with_us)  # pytest may be killed
        try:
            self._wait_ready(time.monotonic() + START_S)
        except BaseException:
            self.kill()
            raise
        self._children = descendants(self._process.pid)
        return self

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        while self.get("/health")[0] != 200:
            assert self._process.poll() is None, self._tail()
            assert time.monotonic() < deadline, self._tail()
            time.sleep(0.2)

    def _tail(self) -> str:
        return "\n".join(["vLLM does not come up:", *self.log.read_text(errors="replace").splitlines()[-40:]])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self.kill()

    def get(self, path: str) -> tuple[int, str]:
        """(status, body) of a GET; (0, why) where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            with connection.getresponse() as reply:
                return reply.status, reply.read().decode()
        except (OSError, http.client.HTTPException) as failure:
            return 0, str(failure)
        finally:
            connection.close()

    def pids(self, title: str) -> list[int]:
        """The processes that call themselves so: "EngineCore", "Worker"."""
        return [pid for pid in self._children if f"VLLM::{title}" in command_line(pid)]

    def signal(self, signum: int, pids: Sequence[int]) -> None:
        """Send a signal to some of its processes."""
        for pid in pids:
            os.kill(pid, signum)

    def preempted(self) -> list[float]:
        """When the scheduler preempted a request, unix s: once a preemption."""
        lines = self._preemptions.read_text().splitlines() if self._preemptions.exists() else []
        assert not any(line.startswith("witness:") for line in lines), lines
        return [float(line.split()[0]) for line in lines]

    def kill(self) -> None:
        """End all of its processes, stopped ones too."""
        assert self._process is not None
        for pid in {*self._children, *descendants(self._process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                if "vllm" in command_line(pid).lower() or str(PYTHON) in command_line(pid):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(30)


def command_line(pid: int) -> str:
    """Of a process, words apart; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, of all threads."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *descendants(child)]
    return found
