"""Where the probe is sewn into vLLM: a table by version, and the sewing.

A module that vLLM has not imported yet is met when it is; none is imported for the probe's sake. Each wrapper calls
what it wraps exactly once, with what it was given, and gives back what that gave or raised. What fails on our side ends
that seam, with its reason in the file, and vLLM runs on as if there had been none.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tocsin_probe.page import Page
from tocsin_probe.ranks import Rank
from tocsin_probe.requests import FrontEnd, Queue

OLDEST, NEWEST = (0, 8), (0, 33)  # what was looked at; a newer one is tried, seam by seam


class Seam(NamedTuple):
    """One place. `methods`: all must be there but those that end in "?"; `kind` says what is done with them."""

    name: str
    since: tuple[int, ...]
    until: tuple[int, ...]  # the first version that no longer has it there
    module: str
    owner: str
    methods: tuple[str, ...]


END = (10 ** 6,)
SEAMS: tuple[Seam, ...] = (
    Seam("front end", (0, 8), END, "vllm.v1.engine.output_processor", "OutputProcessor",
         ("add_request", "process_outputs", "abort_requests")),
    Seam("queue", (0, 8), END, "vllm.v1.core.sched.scheduler", "Scheduler",
         ("add_request", "schedule", "finish_requests", "update_from_output")),
    Seam("queue", (0, 8), (0, 9), "vllm.v1.core.scheduler", "Scheduler",  # the first of the 0.8 have it there
         ("add_request", "schedule", "finish_requests", "update_from_output")),
    # CPU workers have execute_model of their own before 0.11, and inherit it since
    Seam("rank", (0, 8), (0, 11), "vllm.v1.worker.cpu_worker", "CPUWorker", ("execute_model",)),
    Seam("rank", (0, 8), END, "vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens?")),
    Seam("collectives", (0, 8), END, "vllm.distributed.parallel_state", "GroupCoordinator",
         ("_all_reduce_out_place", "_all_gather_out_place?", "_reduce_scatter_out_place?", "all_gatherv?",
          "reduce_scatterv?", "gather?", "broadcast?", "broadcast_tensor_dict?", "recv_tensor_dict?", "recv?",
          "barrier?")),
    Seam("graphs", (0, 10), END, "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", ("dispatch",)),
    Seam("graphs", (0, 17), END, "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", ("dispatch",)),
)
WORKS, WAITS = "works", "not imported by this process"


class Probe:
    """What this process has: its file, what watches, and what became of each seam."""

    def __init__(self, folder: str, version: str) -> None:
        self.folder, self.version = folder, version
        self.seams: dict[str, str] = {}
        self.ended: set[str] = set()
        self._start()
        os.register_at_fork(after_in_child=self._start)  # the file is the parent's

    def _start(self) -> None:
        self._page: Page | None = None
        self.front, self.queue, self.rank = FrontEnd(self.page), Queue(self.page), Rank(self.page)

    def page(self) -> Page:
        """The file of this process, made when it is first needed."""
        if self._page is None:
            self._page = Page(self.folder)
            self.tell()
        return self._page

    def tell(self) -> None:
        """Write what each seam is."""
        from tocsin_probe import __version__

        self.page().say({"probe": __version__, "vllm": self.version, "seams": self.seams})

    def end(self, name: str, error: BaseException) -> None:
        """A seam has failed on our side: it does nothing from now on. Never raises, whatever logging and words do."""
        self.ended.add(name)
        try:
            from tocsin_probe import log

            self.seams[name] = type(error).__name__
            self.seams[name] = f"{type(error).__name__}: {error}"[:200]
            log.warning("tocsin-probe: the seam %r stands aside: %s", name, self.seams[name])
        except Exception:  # a filter of the operator's own, or an error without words
            self.seams.setdefault(name, "it failed")
        try:
            if self._page is not None:
                self.tell()
        except Exception:  # there is nobody left to tell
            return


_probe: Probe | None = None


def install(folder: str) -> None:
    """Sew all that this vLLM has. Raises what is wrong with the folder or the version."""
    global _probe
    if _probe is not None:
        return
    version = str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
    probe = _probe = Probe(folder, version)
    probe.page()  # where there is no place to write to, nothing is sewn
    number = number_of(version)
    if number is not None and number < OLDEST:
        probe.seams["all"] = f"vLLM {version} is older than 0.8: its engine is another"
        probe.tell()
        return
    if os.environ.get("VLLM_USE_V1") == "0":
        probe.seams["all"] = "VLLM_USE_V1=0: vLLM's V0 engine has none of these seams"
        probe.tell()
        return
    if number is not None and number < (0, 10):
        probe.seams["graphs"] = f"vLLM {version} has no dispatcher that would tell (since 0.10)"
    waited: dict[str, list[Seam]] = {}
    for seam in SEAMS:
        if number is None or seam.since <= number < seam.until:
            probe.seams.setdefault(seam.name, WAITS)
            if seam.module in sys.modules:
                sew(probe, seam, sys.modules[seam.module])
            else:
                waited.setdefault(seam.module, []).append(seam)
    sys.meta_path.insert(0, Tailor(probe, waited))
    probe.tell()


def number_of(version: str) -> tuple[int, ...] | None:
    """(0, 11, 2) of "0.11.2.post1+cpu"; None of a version that is no number (a build from source: all is tried)."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None or ".dev" in version:
        return None
    return tuple(int(part) for part in match.groups() if part is not None)


class Tailor(importlib.abc.MetaPathFinder):
    """Sees modules being imported, and sews those that are waited for once they are."""

    def __init__(self, probe: Probe, waited: dict[str, list[Seam]]) -> None:
        self._probe, self._waited = probe, waited

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that calls us when it has loaded; None: it is no business of ours."""
        seams = self._waited.pop(name, None)
        if seams is None:
            return None
        try:
            spec = next((found for finder in sys.meta_path if finder is not self
                         and (found := finder.find_spec(name, path, target)) is not None), None)
            if spec is not None and hasattr(spec.loader, "exec_module"):  # another kind is not met: it stays as it is
                spec.loader = _Loader(spec.loader, lambda module: self._loaded(seams, module))
        except Exception as error:
            self._probe.end(seams[0].name, error)
            return None
        return spec

    def _loaded(self, seams: Sequence[Seam], module: Any) -> None:
        for seam in seams:
            sew(self._probe, seam, module)
        try:
            self._probe.tell()
        except Exception as error:
            self._probe.end(seams[0].name, error)


class _Loader(importlib.abc.Loader):
    """Another loader, and a word after it."""

    def __init__(self, loader: Any, loaded: Callable[[Any], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader  # as if we had not been
        self._loaded(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_data: what tracebacks and resources ask for
        return getattr(self._loader, name)


def sew(probe: Probe, seam: Seam, module: Any) -> None:
    """Wrap the methods of one seam, all or none. Never raises."""
    try:
        owner = getattr(module, seam.owner)
        wanted = [method.rstrip("?") for method in seam.methods if not method.endswith("?") or
                  method[:-1] in vars(owner)]
        missing = [method for method in wanted if method not in vars(owner)]
        if missing:
            raise AttributeError(f"{seam.module}.{seam.owner} has no {', '.join(missing)}")  # noqa: TRY301
        for method in wanted:
            original = vars(owner)[method]
            if not hasattr(original, "_tocsin"):
                wrapped = functools.wraps(original)(WRAPPERS[seam.name](probe, method, original))
                wrapped._tocsin = True  # type: ignore[attr-defined]
                setattr(owner, method, wrapped)
        if probe.seams.get(seam.name) in (None, WAITS):
            probe.seams[seam.name] = WORKS
    except Exception as error:
        probe.end(seam.name, error)


# --- the wrappers ----------------------------------------------------------------------------------------------------


# They are written out rather than made of one another: each runs in every step, and a call more is half a microsecond.


def _front_end(probe: Probe, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    added = method == "add_request"

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            if "front end" not in probe.ended:
                try:
                    if added:
                        probe.front.added(self, _first(args, kwargs, "request"))
                    else:
                        probe.front.looked(self)
                except Exception as error:
                    probe.end("front end", error)
    return wrapper


def _queue(probe: Probe, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    scheduled, added = method == "schedule", method == "add_request"

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = original(self, *args, **kwargs)
        if "queue" not in probe.ended:
            try:
                if scheduled:
                    probe.queue.scheduled(self, given)
                elif added:
                    probe.queue.added(self, _first(args, kwargs, "request"))
                else:
                    probe.queue.left(self)
            except Exception as error:
                probe.end("queue", error)
        return given
    return wrapper


def _rank(probe: Probe, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    ran = method == "execute_model"

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "rank" in probe.ended or not (ran or probe.rank.samples):
            return original(self, *args, **kwargs)
        try:
            if ran:
                probe.rank.begin(self, _first(args, kwargs, "scheduler_output"))
            else:
                probe.rank.again()
        except Exception as error:
            probe.end("rank", error)
        try:
            return original(self, *args, **kwargs)
        finally:
            if probe.rank.inside:
                try:
                    probe.rank.end(ran=ran)
                except Exception as error:
                    probe.end("rank", error)
    return wrapper


def _collectives(probe: Probe, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    del method
    compiler = sys.modules["torch"].compiler
    compiling = getattr(compiler, "is_dynamo_compiling", compiler.is_compiling)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling():  # what is traced would be traced without a clock
            return original(self, *args, **kwargs)
        rank = probe.rank
        if not rank.timing or rank.depth:  # one that another one calls is timed with it
            return original(self, *args, **kwargs)
        rank.depth = 1
        try:
            entered = rank.enter()
        except Exception as error:
            probe.end("rank", error)
            rank.timing = False
        try:
            return original(self, *args, **kwargs)
        finally:
            rank.depth = 0
            if rank.timing:
                try:
                    rank.leave(entered)
                except Exception as error:
                    probe.end("rank", error)
                    rank.timing = False
    return wrapper


def _graphs(probe: Probe, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    del method

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        decision = original(self, *args, **kwargs)
        if "graphs" not in probe.ended:
            try:
                probe.rank.dispatched(self, decision)
            except Exception as error:
                probe.end("graphs", error)
        return decision
    return wrapper


def _first(args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    return args[0] if args else kwargs[name]


WRAPPERS: dict[str, Callable[[Probe, str, Callable[..., Any]], Callable[..., Any]]] = {
    "front end": _front_end, "queue": _queue, "rank": _rank, "collectives": _collectives, "graphs": _graphs,
}
