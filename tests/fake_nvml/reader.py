"""A process in which the real pynvml has loaded the stand-in, and an NvmlSource in it that a test can call.

The dynamic linker reads LD_LIBRARY_PATH when a process starts, and pynvml loads the library once a process: so this
cannot be done in the tests' own process. A child may play several stories, one source after the other.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.model import Batch, Gap, GpuFacts, Sample
from agent.sources.nvml import NvmlSource
from tests.fake_nvml.build import build

ROOT = Path(__file__).parents[2]


def write_scenario(path: Path, scenario: Mapping[str, Any]) -> None:
    """Replace the file at once, as a person's editor may not: a reader never sees half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(scenario))
    fresh.replace(path)


class Reader:
    """Runs an NvmlSource in a child. `clock_s` of its back-off stands still until `advance`."""

    def __init__(self, library: Path | None = None) -> None:
        """`library`: the folder for LD_LIBRARY_PATH, by default the one with the stand-in."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library or build())}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_nvml.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=ROOT,
        )

    def begin(self, scenario: Mapping[str, Any] | Path, folder: Path, deadline_s: float = 5.0) -> None:
        """A new source and a new story. `folder` takes the scenario, its calls, and a PCI tree, `pci`."""
        self.path = folder / "scenario.json"
        self.calls_path = folder / "calls"
        self.pci = folder / "pci"
        if isinstance(scenario, Path):
            self.path.write_bytes(scenario.read_bytes())
        else:
            self.play(scenario)
        self("begin", deadline_s, str(self.pci), str(self.path))

    def end(self) -> None:
        """End the child, by force where it does not end by itself."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.close()
        try:
            self._child.wait(30)
        finally:
            self._child.kill()
            self._child.wait()
            self._child.stdout.close()

    def play(self, scenario: Mapping[str, Any]) -> None:
        """Let the library follow another scenario from now on; its calls are written down for `calls`."""
        write_scenario(self.path, {"calls": str(self.calls_path), **scenario})

    def calls(self, function: str, gpu: int = -1) -> int:
        """How often a C function was called for a GPU (-1: for none)."""
        return self.calls_path.read_text().splitlines().count(f"{function} {gpu}") if self.calls_path.exists() else 0

    def __call__(self, method: str, *args: Any) -> Any:
        """Call a method of the child's source; `advance` moves its clock, `get` returns an attribute."""
        assert self._child.stdin
        assert self._child.stdout
        pickle.dump((method, args), self._child.stdin)
        self._child.stdin.flush()
        result = pickle.load(self._child.stdout)
        if isinstance(result, Exception):
            raise result
        return result

    def read(self, now: float = 1000.0) -> Seen:
        return Seen(self("read", now))


class Seen:
    """A Batch that is asked by GPU and name."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __getitem__(self, key: tuple[int, str]) -> Sample | Gap:
        index, name = key
        uuid = self.gpu(index).uuid
        (found,) = (r for r in self.batch.readings if (r.subject, r.name) == (uuid, name))
        return found

    def value(self, index: int, name: str) -> float | str:
        """The number, or the code of the Gap."""
        found = self[index, name]
        return found.value if isinstance(found, Sample) else found.code.value

    def gpu(self, index: int) -> GpuFacts:
        (found,) = (gpu for gpu in self.batch.gpus or () if gpu.index == index)
        return found

    def codes(self, index: int) -> set[str]:
        """Of all readings of a GPU: the codes of Gaps, "value" for a number."""
        uuid = self.gpu(index).uuid
        mine = [r for r in self.batch.readings if r.subject == uuid]
        return {r.code.value if isinstance(r, Gap) else "value" for r in mine}


class _Server:
    """The child's side: one source at a time."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.source: NvmlSource | None = None

    def begin(self, deadline_s: float, pci: str, scenario: str) -> None:
        if self.source is not None:
            self.source.close()
        os.environ["TOCSIN_FAKE_NVML"] = scenario
        self.clock_s = 0.0
        self.source = NvmlSource(deadline_s, pci=Path(pci), clock=lambda: self.clock_s)

    def answer(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "begin":
            return self.begin(*args)
        if method == "advance":
            self.clock_s += args[0]
            return None
        if method == "get":
            return getattr(self.source, args[0])
        if method == "cost":
            return _cpu_s(self.source, args[0])
        return getattr(self.source, method)(*args)

    def serve(self) -> None:
        while True:
            try:
                method, args = pickle.load(sys.stdin.buffer)
            except EOFError:
                break
            try:
                result = self.answer(method, args)
            except Exception as error:
                result = error
            pickle.dump(result, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        if self.source is not None:
            self.source.close()


def _cpu_s(source: Any, polls: int) -> float:
    """CPU seconds of this process for one poll, over many."""
    began = time.process_time()
    for _ in range(polls):
        source.read(0.0)
    return (time.process_time() - began) / polls


if __name__ == "__main__":
    _Server().serve()
