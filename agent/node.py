"""All that is known of one node, and one step of judging it. Time is handed in; nothing is read or sent here.

The loop, a back-test and `tocsin check` without an agent all drive this one thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import isnan
from typing import Any
from urllib.parse import quote

from agent import binds, incidents, page, patterns, records, scaling, spark, words
from agent import evaluate as machine
from agent import signals as catalogue
from agent import silences as mutes
from agent.facts import LONGEST_S, Facts, facts_of
from agent.hardware import signals as hardware
from agent.hardware import verdict as gpu_verdict
from agent.hardware.history import History
from agent.hardware.table import Severity as XidSeverity
from agent.impact import Counted, since_last
from agent.incidents import Incident
from agent.model import (
    ROUTE,
    SEVERITY_RANK,
    SILENCED,
    Alert,
    AlertKey,
    AlertMessage,
    Announcement,
    Batch,
    Book,
    EngineFacts,
    Event,
    FoundEngine,
    Gap,
    GpuFacts,
    IncidentMessage,
    MigFacts,
    PodFacts,
    ProbeFacts,
    Rule,
    Sample,
    Severity,
    Signal,
    Slo,
    Transition,
    Why,
    alert_name,
)
from agent.signals import SIGNALS, Scene, Target
from agent.silences import Silence
from agent.spark import Sparks
from agent.windows import RAW_KEEP_S, Windows

SETTLED_S = 600.0  # a GPU's memory 10 m after its engine's start is what the engine is meant to use
CONFIGS_KEPT = 8  # of each engine
GONE_CONFIGS_KEPT = 32  # engines that are gone, whose are
USER_GONE_S = 60.0  # an address of which no prober tells any more
TOGETHER_S = 300.0  # GPUs that were reset within so long of each other were reset together
PAGE_SPAN_S = 300.0  # what a page's numbers are means of
GONE_S = 600.0  # a GPU that NVML no longer names for so long has ended
RECOGNISE_EVERY_S, SEEN_EVERY_S = 30.0, 300.0
SOURCED_KEPT_S = 86400.0  # a series that a source tells no more is a Gap for so long
OF_A_POD = re.compile(r'[{,](exported_pod|kubernetes_pod_name|pod|pod_name)="')  # it ends with its pod: GONE_S
MOST_SOURCED = 200  # series of one source: labels may change with every pod
Traffic = dict[str, dict[str, Any]]  # "replicas", "routers"
OF_OURSELVES = frozenset({"blind", "watcher", "kernel_log_forged", "kernel_log_lost"})
LEARN_EVERY_S = 3600.0  # that a GPU tells a number of its state is known to the hour
HARDWARE_NAMES = frozenset({"gpu_temp_c", "gpu_energy_mj", "gpu_nvlink_up", "gpus_dev"})
ALERT_STATES = {"firing": "BREACH", "pending": "PENDING"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What configuration says: the node's name, its promises, its targets and rules."""

    node: str
    poll_s: float
    slo: Slo
    targets: tuple[Target, ...]
    rules: tuple[Rule, ...]
    severity_of: Callable[[Rule, Slo, str], Severity]
    external_url: str | None = None
    watches_gpus: bool = True
    clip_windows: bool = False  # `tocsin check` without an agent
    raw_keep_s: float = RAW_KEEP_S  # a back-test keeps its whole recording
    xid_severity: Mapping[int, XidSeverity] = field(default_factory=dict)  # number -> as its owner wants it
    gpus_expected: int | None = None  # None: as many as were ever seen
    sourced: tuple[str, ...] = ()  # PromQL and JSON sources, by name
    business: frozenset[str] = frozenset()  # those that business-metric judges
    judges_all: bool = True  # what spans nodes, as a router's shares of all its replicas, and not another agent does
    patterns: tuple[int, ...] | None = None  # deployment patterns as written; None: recognised from what is there


@dataclass
class Learned:
    """What outlives a restart beside windows and book: engines, GPUs, first sights."""

    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpu_full_at_start: dict[str, list[float]] = field(default_factory=dict)  # uuid -> [engine's start, share]
    announced: dict[str, dict[str, Any]] = field(default_factory=dict)  # run -> a drill's Announcement
    diverted: list[list[str]] = field(default_factory=list)  # [rule, subject] told to one channel alone
    told: dict[str, dict[str, str]] = field(default_factory=dict)  # signal -> subject -> what drilld says of it
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> an open Incident
    worst: dict[str, list[float]] = field(default_factory=dict)  # "rule subject" of an incident -> [value, when]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # engine that discovery found -> how, and when last
    hardware: dict[str, Any] = field(default_factory=dict)  # as History.saved gives it
    kernel_log: dict[str, Any] = field(default_factory=dict)  # up to where it was read
    gpu_count: int = 0  # the most that were seen at once
    gpus_allocatable: int = 0  # the most that the kubelet gave to pods
    energy: dict[str, float] = field(default_factory=dict)  # uuid -> mJ since it was reset
    nvlinks: dict[str, int] = field(default_factory=dict)  # uuid -> bit mask of links that were up in this boot
    gpu_state: dict[str, dict[str, float]] = field(default_factory=dict)  # uuid -> what it told of its state, when
    marks: dict[str, Any] = field(default_factory=dict)  # engine -> what binds it since when, a binds.Mark
    scaling: dict[str, dict[str, Any]] = field(default_factory=dict)  # target -> a scaling.Advice
    configs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # target -> command lines, versions, since
    sourced: dict[str, dict[str, float]] = field(default_factory=dict)  # PromQL or JSON source -> subject -> when told
    patterns: dict[str, list[Any]] = field(default_factory=dict)  # recognised pattern -> [from what, when last]


class Node:
    """The state of one node. `signals`, `book` and `scene` are as of the last step."""

    def __init__(self, setup: Setup, sources: Sequence[str] = ()) -> None:
        self.setup = setup
        self.sources = tuple(sources)
        self.windows = Windows(setup.poll_s, setup.raw_keep_s)
        self.book = Book()
        self.learned = Learned()
        self.signals: dict[AlertKey, Signal] = {}
        self.facts: dict[str, EngineFacts] = {}
        self._moves: dict[str, dict[str, Any]] = {}  # target -> its samples that move as few do
        self.routers: dict[str, EngineFacts] = {}
        self._looked_at: dict[str, float] = {}  # discovery -> when it last told what there is
        self._pods: dict[str, tuple[PodFacts, ...]] = {}  # who tells -> pods of this node
        self.workloads: tuple[str, ...] = ()  # that are watched in the whole cluster
        self.processes: dict[str, FoundEngine] = {}  # address -> the engine in a pod here that listens there
        self.pids: dict[int, FoundEngine] = {}  # port -> the engine on this machine that listens there
        self.probes: dict[str, ProbeFacts] = {}  # target -> what tocsin-probe in its processes says of itself
        self.gpus: dict[str, GpuFacts] = {}
        self.gpu_seen_at: dict[str, float] = {}
        self.gone: dict[str, GpuFacts] = {}  # GPUs that have ended: what closes with them is told by their index
        self.history = History()
        self._lost: set[str] = set()  # GPUs of which NVML says so
        self._events: list[Event] = []  # taken, not yet folded: first all of a tick must have told which GPU is where
        self.canaries: dict[str, str | None] = {}  # address -> the target whose own it is; None: users'
        self.users: dict[str, float] = {}  # address that users use -> when a prober last told of it
        self.first_at: float | None = None
        self.rules = {rule.id: rule for rule in setup.rules}
        self.causes = incidents.can_cause(setup.rules)
        self.incidents: Mapping[str, Incident] = {}
        self.incident_changes: Sequence[tuple[incidents.Change, Incident]] = ()
        self._incidents_before: Mapping[str, Incident] = {}  # as they were until this step
        self.silences: tuple[Silence, ...] = ()  # those that have ended, too
        self.unmuted: tuple[AlertKey, ...] = ()  # alerts whose silence has ended by this step while they fire
        self.scene = Scene(self.windows, 0.0, setup.node, setup.slo, {})  # nothing is known before the first step
        self.sparks = Sparks()
        self.bounds: dict[str, binds.Bound] = {}  # engine -> what binds it, as of the last step
        self.marks: dict[str, binds.Mark] = {}
        self._recognised_at = 0.0
        self._recognised_by: tuple[int, ...] = ()  # how many of each there were then
        self._rules: tuple[frozenset[int], list[Rule]] | None = None  # those of these patterns, and of none
        self.newly_bound: list[str] = []  # engines that the last step found bound by something else than before
        self.scaling: dict[str, scaling.Advice] = {}  # target -> whether another replica is needed
        self._scaled_at: float | None = None  # when that was last looked at

    # --- learning ---------------------------------------------------------------------------------------------------

    def restore(self, book: Book, learned: Mapping[str, Any]) -> None:
        """Take back what an earlier run knew, but of what is no longer configured: its alerts close."""
        self.book = book
        self.learned = Learned(**{k: v for k, v in learned.items() if k in Learned.__dataclass_fields__})
        self.incidents = {name: incidents.from_plain(told) for name, told in self.learned.incidents.items()}
        self.history = History.restored(self.learned.hardware)
        self.marks = {engine: binds.Mark(**told) for engine, told in self.learned.marks.items()}
        self.scaling = {target: scaling.from_plain(told) for target, told in self.learned.scaling.items()}
        configured = {target.name for target in self.setup.targets} | self.learned.found.keys()
        for name, known in list(self.learned.targets.items()):
            if name not in configured or "first_seen_at" not in known:  # without it: a damaged file
                del self.learned.targets[name]
        for uuid, known in self.learned.gpus.items():
            instances = tuple(MigFacts(*row) for row in known.get("instances", ()))
            self.gpus[uuid] = GpuFacts(uuid, known["index"], known["name"], known["bdf"], known["limit_c"],
                                       instances=instances)
        self.learned.sourced = {name: told for name, told in self.learned.sourced.items() if name in self.setup.sourced}
        if not self.setup.watches_gpus:
            for uuid in list(self.gpus):
                self._forget_gpu(uuid)

    def take(self, batch: Batch) -> None:
        """Learn from one read of one source."""
        self.windows.ingest(batch)
        self._events.extend(batch.events)
        if batch.cursor is not None:
            self.learned.kernel_log = dict(batch.cursor)
        for reading in batch.readings:
            if reading.name in HARDWARE_NAMES:
                self._take_hardware(reading)
        self._learn_state(reading for reading in batch.readings if reading.name in hardware.LEARNED)
        if self.first_at is None:
            self.first_at = batch.at
        if batch.engine is not None:
            self._take_engine(batch.engine, batch.at)
        if batch.source.startswith("canary:"):
            self._take_canary(batch)
            self.users |= {reading.subject: batch.at for reading in batch.readings if reading.name == "user_requests"}
        self._take_sourced(batch)
        self._take_kubernetes(batch)
        if batch.probes is not None:
            self.probes = {facts.target: facts for facts in batch.probes}
        if batch.router is not None:
            self.routers[batch.router.target] = batch.router
        for gpu in batch.gpus or ():
            self._take_gpu(gpu, batch.at)
        self.learned.gpu_count = max(self.learned.gpu_count, len(batch.gpus or ()))
        if batch.gpus is not None and batch.error is None:  # () says that there is none, a failed read says nothing
            for uuid in [u for u in self.gpus if batch.at - self.gpu_seen_at.setdefault(u, batch.at) > GONE_S]:
                self._forget_gpu(uuid)

    def _take_sourced(self, batch: Batch) -> None:
        """Which series a PromQL or JSON source has told within a day: a restart of either side loses none of them.

        One that has a pod's name ends 10 m after its last value, if others of its source are told: each rollout leaves
        as many behind as there are replicas.
        """
        kind, _, name = batch.source.partition(":")
        if kind not in ("promql", "json") or name not in self.setup.sourced:
            return
        known = self.learned.sourced.setdefault(name, {})
        told = {r.subject: batch.at for r in batch.readings if r.name == "sourced" and isinstance(r, Sample)}
        known |= told
        gone = [subject for subject, at in known.items()
                if batch.at - at > (GONE_S if told and OF_A_POD.search(subject) else SOURCED_KEPT_S)]
        for subject in (*gone, *sorted(known, key=known.__getitem__)[:-MOST_SOURCED]):
            known.pop(subject, None)
            self.windows.forget(subject)

    def _sourced(self) -> dict[str, tuple[str, ...]]:
        """The subjects of each PromQL or JSON source; one that has told nothing yet has its name."""
        return {name: tuple(self.learned.sourced.get(name, ())) or (name,) for name in self.setup.sourced}

    def _take_kubernetes(self, batch: Batch) -> None:
        if batch.pods is not None:
            self._pods[batch.source] = batch.pods
        if batch.workloads is not None:
            self.workloads = batch.workloads
        for reading in batch.readings if batch.source == "pod-resources" else ():
            if isinstance(reading, Sample):
                self.learned.gpus_allocatable = max(self.learned.gpus_allocatable, int(reading.value))

    def _take_gpu(self, gpu: GpuFacts, at: float) -> None:
        before = self.gpus.get(gpu.uuid)
        for instance in () if before is None else before.instances:
            if instance.uuid not in [one.uuid for one in gpu.instances]:  # it was destroyed
                self._forget_instance(instance.uuid)
        self.gpus[gpu.uuid] = gpu
        self.gpu_seen_at[gpu.uuid] = at
        self.learned.gpus[gpu.uuid] = {
            "index": gpu.index, "name": gpu.name, "bdf": gpu.bdf, "limit_c": gpu.limit_c,
            "instances": [[one.uuid, one.gi, one.ci, one.name] for one in gpu.instances]}

    def _forget_instance(self, uuid: str) -> None:
        self.learned.gpu_full_at_start.pop(uuid, None)
        self.windows.forget(uuid)

    def _take_canary(self, batch: Batch) -> None:
        """Whose address a canary asks: a target's own, or the users'."""
        asks = next((r.subject for r in batch.readings if r.name == "canary_age_s"), None)
        for address in {r.subject for r in batch.readings if r.name == "user_requests"}:
            self.canaries[address] = asks

    def _take_hardware(self, reading: Sample | Gap) -> None:
        """Learn what is usual here, and when a GPU began anew."""
        name, subject = reading.name, reading.subject
        if isinstance(reading, Gap):
            if name == "gpu_temp_c" and reading.code is Why.LOST:
                self._lost.add(subject)
            return
        if name == "gpu_temp_c" and subject in self._lost:  # whoever comes back was reset
            self._lost.discard(subject)
            self._mended(subject, reading.at)
        elif name == "gpu_energy_mj":
            if 0 < reading.value < self.learned.energy.get(subject, 0.0):  # 0 is what a broken sensor tells
                self._mended(subject, reading.at)
            self.learned.energy[subject] = reading.value or self.learned.energy.get(subject, 0.0)
        elif name == "gpu_nvlink_up":
            self.learned.nvlinks[subject] = self.learned.nvlinks.get(subject, 0) | int(reading.value)
        elif name == "gpus_dev":  # at first sight a GPU may have fallen already
            self.learned.gpu_count = max(self.learned.gpu_count, int(reading.value))

    def _learn_state(self, readings: Iterable[Sample | Gap]) -> None:
        """Learn which numbers of its state a GPU tells: what it stops telling is not N/A."""
        for reading in readings:
            if isinstance(reading, Sample):
                told = self.learned.gpu_state.setdefault(reading.subject, {})
                if not 0 <= reading.at - told.get(reading.name, 0.0) < LEARN_EVERY_S:
                    told[reading.name] = reading.at

    def _mended(self, uuid: str, at: float) -> None:
        self.history.reset(uuid, at)
        if uuid in self.gpus:  # what came while nobody knew its UUID
            self.history.reset(self.gpus[uuid].bdf, at)
        if all(at - self.history.mended.get(gpu, 0.0) <= TOGETHER_S for gpu in self.gpus):
            for switch in {e.subject for e in self.history.entries.values() if e.kind == "sxid"}:
                self.history.reset(switch, at)  # with all its GPUs
        self.learned.hardware = self.history.saved()

    def take_user(self, address: str, readings: Sequence[Sample], at: float) -> None:
        """What a prober counted so far at an address that users use."""
        self.users[address] = at
        self.windows.ingest(Batch(f"user:{address}", at, 0.0, tuple(readings)))

    def see(self, found: Sequence[FoundEngine], at: float, by: str = "discovery") -> None:
        """What a discovery sees now. What is configured is read as configured; of it only the processes are learnt."""
        self._looked_at[by] = at
        ports = {target.port for target in self.setup.targets if target.name not in self.learned.found and target.port}
        addresses = {target.address for target in self.setup.targets if target.name not in self.learned.found}
        addresses |= {_address(known) for known in self.learned.found.values() if known.get("by", by) != by}
        for engine in found:
            if engine.port:
                self.pids[engine.port] = engine
            elif engine.pids:
                self.processes[engine.name] = engine
            if engine.name in addresses or engine.port in ports:
                self.learned.found.pop(engine.name, None)
            elif engine.port or engine.pod:
                self._learn_found(engine, at, by)
            self._note_config(engine, at, by)
        self._note_stopping(at)

    def _note_config(self, engine: FoundEngine, at: float, by: str) -> None:
        """Remember with which options and which version an engine runs, since when; of the last few changes.

        Of a pod /proc is nearer to the truth than what the API has of it: an image and a shell add to that.
        """
        name = self._name_of(engine)
        if name is None or not engine.options or engine.version is None:
            return
        now = {"options": dict(engine.options), "version": engine.version}
        known, seen = self._configs_of(name, at), {"by": by, "pod": engine.pod}
        last = known[-1] if known else {}
        is_same = last.get("pod") == engine.pod
        if (by, last.get("by")) == ("pods", "discovery") and (is_same or self.processes):
            return
        if (by, last.get("by"), is_same) == ("discovery", "pods", True):  # looked at more closely
            at = last["at"]
            del known[-1]
        if known and _is_config(known[-1], now):
            known[-1] |= seen | {"version": engine.version or known[-1]["version"]}
        else:
            known.append({"at": at, **now, **seen})
            del known[:-CONFIGS_KEPT]

    def _name_of(self, engine: FoundEngine) -> str | None:
        """The target that an engine is: by its port on this machine, or by its address and pod."""
        if engine.port:
            return next((target.name for target in self.setup.targets if target.port == engine.port), None)
        here = {pod.uid for pod in self.pods("pods")}
        for name, known in self.learned.found.items():  # another pod may have had its address
            if _address(known) == engine.name and (known.get("pod") == engine.pod or engine.pod not in here):
                return name
        return next((target.name for target in self.setup.targets
                     if target.name not in self.learned.found and target.address == engine.name), None)

    def _configs_of(self, name: str, at: float) -> list[dict[str, Any]]:
        """What is remembered of a target; a further pod of a workload begins with what was known of those before."""
        all_ = self.learned.configs
        if name not in all_:
            workload, mark, _ = name.rpartition("#")
            others = [known for other, known in all_.items()
                      if mark and other.startswith(f"{workload}#") and known and known[-1]["at"] < at]
            here = {target.name for target in self.setup.targets} | self.learned.found.keys()
            gone = sorted((known[-1]["at"] if known else 0.0, other) for other, known in all_.items()
                          if other not in here)
            for _, other in gone[:max(0, len(gone) - GONE_CONFIGS_KEPT)]:  # each new address is a name
                del all_[other]
            all_[name] = [dict(one) for one in max(others, key=lambda known: known[-1]["at"], default=[])]
        return all_[name]

    def _learn_found(self, engine: FoundEngine, at: float, by: str) -> None:
        name = self._pod_subject(engine) if engine.workload else engine.name
        before = self.learned.found.get(name, {})
        known = {"url": engine.url, "kind": engine.kind, "how": engine.how, "port": engine.port, "seen_at": at,
                 "by": by, "pod": engine.pod, "stopping_at": None}
        if engine.pod and engine.pod == before.get("pod"):
            known["stopping_at"] = before.get("stopping_at")
        elif engine.pod and before:  # another pod in its place: it begins anew
            self.learned.targets.setdefault(name, {}).update(first_seen_at=at, ever_up=False)
        self.learned.found[name] = known

    def _pod_subject(self, engine: FoundEngine) -> str:
        """`namespace/workload#n`: a pod keeps its n, a new one gets the lowest that no pod of this node has."""
        here = {pod.uid for pod in self.pods("pods")}
        number = 0
        while known := self.learned.found.get(f"{engine.workload}#{number}"):
            if known.get("pod") == engine.pod or known.get("pod") not in here:
                break
            number += 1
        kept = (name for name, known in self.learned.found.items()
                if known.get("pod") == engine.pod and name.rpartition("#")[0] == engine.workload)
        return next(kept, f"{engine.workload}#{number}")

    def _note_stopping(self, at: float) -> None:
        """Note whose pod was told to stop, or is gone from the API; one that failed was not told."""
        pods = {pod.uid: pod for pod in self.pods("pods")}
        for known in self.learned.found.values():
            uid = known.get("pod")
            if not uid or known["by"] != "pods" or "pods" not in self._looked_at:
                continue
            pod = pods.get(uid)
            if pod is None:  # scaled away perhaps: it is let go of in 10 m, and never down
                known["stopping_at"] = at
            elif pod.stopping:
                known["stopping_at"] = known.get("stopping_at") or at

    def pods(self, by: str = "") -> list[PodFacts]:
        """The pods of this node, as one source tells, or as all do."""
        return [self._by_uuid(pod) for source, pods in self._pods.items() if by in ("", source) for pod in pods]

    def _by_uuid(self, pod: PodFacts) -> PodFacts:
        """A pod whose GPUs the kubelet calls by their devices (nvidia0), as GKE's plugin does, with their UUIDs."""
        if not any(name.startswith("nvidia") for name in pod.gpus):
            return pod
        uuids = {f"nvidia{gpu.index}": gpu.uuid for gpu in self.gpus.values()}
        return replace(pod, gpus=tuple(uuids.get(name, name) for name in pod.gpus))

    def found_engines(self) -> dict[str, FoundEngine]:
        """The engines that discovery found, those of before a restart of ours included."""
        return {name: FoundEngine(name, known["url"], known["kind"], known["how"], known["port"])
                for name, known in self.learned.found.items()}

    def lost_engines(self) -> list[str]:
        """Those whose process or pod has ended and not come back; what depends on them closes.

        By the looks of who found it: one that is told nothing any more has seen nothing end.
        """
        return [name for name, known in self.learned.found.items()
                if self._looked_at.get(known.get("by", "discovery"), 0.0) - known["seen_at"] > GONE_S]

    def add_target(self, target: Target) -> None:
        """One more target, as discovery found it."""
        others = tuple(known for known in self.setup.targets if known.name != target.name)
        self.setup = replace(self.setup, targets=(*others, target))

    def drop_target(self, name: str) -> None:
        """A target that discovery saw end; with it end the series of sources that a label says are its own."""
        words = {f'"{word}"' for target in self.setup.targets if target.name == name
                 for word in (name, target.address) if word}
        for told in self.learned.sourced.values():
            for series in [s for s in told if any(word in s for word in words)]:
                del told[series]
        self.setup = replace(self.setup, targets=tuple(t for t in self.setup.targets if t.name != name))
        self.learned.found.pop(name, None)
        self.facts.pop(name, None)
        self._moves.pop(name, None)
        for subject in (name, *self.learned.targets.pop(name, {}).get("engines", ())):
            self.windows.forget(subject)

    def owners(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Process -> its target and that one's engines in order, as discovery last saw the processes."""
        found: dict[int, tuple[str, tuple[str, ...]]] = {}
        for target in self.setup.targets:
            engine = self.pids.get(target.port)
            engines = tuple(self.learned.targets.get(target.name, {}).get("engines", (target.name,)))
            found |= dict.fromkeys(() if engine is None else engine.pids, (target.name, engines))
        return found

    def _gpus_of(self, target: Target) -> tuple[int, ...]:
        """The GPUs of a target, by rank where its processes tell theirs: as configured, else by NVML's processes."""
        engine = self._processes_of(target)
        given = self._gpus_given(self._pod_of(target.name))
        if target.gpus or given:
            return target.gpus or tuple(sorted(given))
        if engine is None:
            return ()
        on = {gpu.index: set(gpu.pids) & set(engine.pids) for gpu in self.gpus.values()}
        rank = {index: min((engine.ranks.get(pid, len(on)) for pid in pids), default=0) for index, pids in on.items()}
        return tuple(sorted((index for index, pids in on.items() if pids), key=lambda index: (rank[index], index)))

    def _processes_of(self, target: Target) -> FoundEngine | None:
        """A target as its processes were found, on this machine or in a pod on it."""
        return self.pids.get(target.port) if target.port else self.processes.get(target.address)

    def _pod_of(self, name: str) -> PodFacts | None:
        """The pod that a target is, as far as it is known."""
        uid = self.learned.found.get(name, {}).get("pod")
        return None if not uid else next((pod for pod in self.pods() if pod.uid == uid), None)

    def _gpus_given(self, pod: PodFacts | None) -> list[int]:
        """The indices of the GPUs that a pod was given, or a MIG instance of."""
        uuids = self._given(pod)
        return [gpu.index for gpu in self.gpus.values() if uuids & {gpu.uuid, *(one.uuid for one in gpu.instances)}]

    def _given(self, pod: PodFacts | None) -> set[str]:
        """The UUIDs of the GPUs and MIG instances that a pod was given, as the kubelet tells."""
        return set() if pod is None else {uuid for one in self.pods() for uuid in one.gpus
                                          if (one.namespace, one.name) == (pod.namespace, pod.name)}

    def pods_of(self, subject: str) -> list[PodFacts]:
        """The pods that an alert of this subject touches: the engine's own, or those on a GPU, Running or not."""
        target = self.scene.target_of(subject)
        own = None if target is None else self._pod_of(target.name)
        if own is not None:
            return [own]
        if target is not None:  # its name is not known: whoever alone has its GPUs
            uuids = {gpu.uuid for gpu in self.gpus.values() if gpu.index in target.gpus}
            holders = self._told_whole(pod for pod in self.pods() if not uuids.isdisjoint(pod.gpus))
            return holders if len(holders) == 1 else []
        if not {subject} & {*self.gpus, *self.gone, *self.scene.instances}:
            return []
        parts = {one.uuid for gpu in (self.gpus.get(subject),) if gpu is not None for one in gpu.instances}
        on = [pod for pod in self.pods() if not {subject, *parts}.isdisjoint(pod.gpus)]
        owners = (self._pod_of(t.name) for t in self.scene.targets.values() if subject in t.instances
                  or (subject in self.gpus and self.gpus[subject].index in t.gpus))
        return self._told_whole([*on, *(pod for pod in owners if pod is not None)])

    def _told_whole(self, pods: Iterable[PodFacts]) -> list[PodFacts]:
        """Each pod once, with what the API says of it where it says anything."""
        told = {(pod.namespace, pod.name): pod for pod in self.pods("pods")}
        return list({(pod.namespace, pod.name): told.get((pod.namespace, pod.name), pod) for pod in pods}.values())

    def _instances_of(self, target: Target) -> tuple[str, ...]:
        """The MIG instances that a target's pod was given, or on which its processes compute."""
        engine, given = self._processes_of(target), self._given(self._pod_of(target.name))
        pids = set() if engine is None else set(engine.pids)
        return tuple(one.uuid for gpu in self.gpus.values() for one in gpu.instances
                     if one.uuid in given or not pids.isdisjoint(one.pids))

    def advice(self, name: str) -> list[str]:
        """What a person should know of a target beside its numbers: what nothing here can see, and what would."""
        target = self._targets(self.scene.now or 0.0).get(name)
        if target is None:
            return []
        found = self.learned.found.get(name)
        said = [] if found is None else [f"found by {found['how']}; nobody configured it"]
        canary = self.windows.track_of(name, "canary_age_s") is not None
        routed = any(catalogue.replica_of(target, key) for router in self.routers
                     for key in self.windows.keys(router, "router_worker_inflight"))
        probe = self.probes.get(name)
        if not canary and not routed and (probe is None or "front end" not in probe.parts):
            where = target.address or "its address"
            said.append("not seen: a hang in which its page stays green (vLLM: running 0, waiting 0, /health 200);"
                        f' probe.canary: {{urls: ["http://{where}"]}} would show it')
        said += probe_advice(probe, self.facts.get(name))
        if target.gpus and target.port in self.pids:
            said.append(f"on GPUs {', '.join(map(str, target.gpus))}")
        told = {engine: got.value for engine in target.engines
                if isinstance(got := self.windows.latest(engine, "throughput", self.scene.now), Sample)}
        apart = catalogue.imbalance(told)
        if apart is not None:
            fast = f", fast: {', '.join(apart['fast'])}" if apart["fast"] else ""
            said.append(f"its engines' own throughput (it sticks when idle, and is not judged): {apart['total']:.2f}"
                        f" tokens/s together, largest ÷ smallest {apart['max_over_min']:.1f}{fast}")
        return said

    def announce(self, told: Announcement) -> None:
        """A drill says which alerts it will cause: they go their normal way, and say so first."""
        self.learned.announced[told.run] = asdict(told)

    def end_announcement(self, run: str) -> None:
        """The drill is over; what still fires was announced, and goes on saying so."""
        self.learned.announced.pop(run, None)

    def tell(self, signal: str, subject: str, text: str | None) -> None:
        """What drilld says of a run or a drill (drill_orphaned, drill_overdue); None: it is no longer so."""
        if text is None:
            self.learned.told.get(signal, {}).pop(subject, None)
        else:
            self.learned.told.setdefault(signal, {})[subject] = text

    def _take_engine(self, facts: EngineFacts, at: float) -> None:
        before = self.facts.get(facts.target)
        if before is not facts:  # a page that tells the same series has the same facts
            self._moves[facts.target] = {"at_end": frozenset(one.name for one in facts.found if one.at_end),
                                         "drifting": frozenset(one.name for one in facts.found if one.drifts)}
        self.facts[facts.target] = facts
        known = self.learned.targets.setdefault(facts.target, {"first_seen_at": at})
        if facts.engines:
            known.update(ever_up=True, engines=list(facts.engines))
        for subject in set(facts.closed).difference(() if before is None else before.closed):
            self.windows.forget(subject)

    def _forget_gpu(self, uuid: str) -> None:
        self.gone[uuid] = self.gpus[uuid]
        for instance in self.gpus[uuid].instances:
            self._forget_instance(instance.uuid)
        for known in (self.gpus, self.gpu_seen_at, self.learned.gpus, self.learned.gpu_full_at_start,
                      self.learned.energy, self.learned.nvlinks, self.learned.gpu_state):
            known.pop(uuid, None)
        self.windows.forget(uuid)

    def _targets(self, now: float) -> dict[str, Target]:
        found = {}
        for target in self.setup.targets:
            known = self.learned.targets.setdefault(target.name, {"first_seen_at": now})
            # one that never told its engines is judged as one engine: what is not known of it has a row and a reason
            found[target.name] = replace(target, engines=tuple(known.get("engines", (target.name,))),
                                         stopping_at=self.learned.found.get(target.name, {}).get("stopping_at"),
                                         gpus=self._gpus_of(target), instances=self._instances_of(target),
                                         first_seen_at=known["first_seen_at"], ever_up=known.get("ever_up", False),
                                         **self._moves.get(target.name, {}))
        return found

    def _scene(self, now: float) -> Scene:
        watched_s = None if not self.setup.clip_windows or self.first_at is None else max(1.0, now - self.first_at)
        targets = self._targets(now)
        self.users = {address: at for address, at in self.users.items() if now - at < USER_GONE_S}
        users = {address: Target(address, (address,), self.setup.slo) for address in self.users}
        full = {u: share for u, (_, share) in self.learned.gpu_full_at_start.items()}
        return Scene(self.windows, now, self.setup.node, self.setup.slo, targets, self.gpus, self.sources, users,
                     self.learned.told, full, watched_s, tuple(self.routers), self.history, self.setup.xid_severity,
                     self.learned.gpu_count if self.setup.gpus_expected is None else self.setup.gpus_expected,
                     self.learned.nvlinks, self.workloads, self.learned.gpus_allocatable, self.canaries,
                     state_told=self.learned.gpu_state, sourced=self._sourced(), business=self.setup.business,
                     judges_all=self.setup.judges_all,
                     models={name: facts.model for name, facts in self.facts.items() if facts.model},
                     roles={name: facts.role for name, facts in self.facts.items() if facts.role})

    def _fold(self) -> None:
        """Take what happened into the history, now that every source of this tick has told which GPU is where."""
        if not self._events:
            return
        if any(event.kind == "boot" for event in self._events):
            self.learned.nvlinks.clear()
        by_address = {gpu.bdf: uuid for uuid, gpu in self.gpus.items()}
        self.history.fold(self._events, by_address.get, self._instance_at)
        self._events = []
        self.learned.hardware = self.history.saved()

    def _instance_at(self, device: str, gi: int, ci: int | None) -> str | None:
        """The MIG instance that a line means; None where it is none or several of those that NVML shows."""
        found = [one.uuid for gpu in self.gpus.values() if gpu.bdf == device for one in gpu.instances
                 if one.gi == gi and ci in (None, one.ci)]
        return found[0] if len(found) == 1 else None

    def _learn_full_gpus(self) -> None:
        """What share of a GPU's memory its engine holds 10 m after its start: what is so by design wakes nobody."""
        scene, full = self.scene, self.learned.gpu_full_at_start
        for uuid in (*self.gpus, *scene.instances):
            target = scene.target_on(uuid)
            if target is None or not target.engines:
                continue
            told_at = self.windows.restarted_at(target.engines[0], "running")
            started_at = told_at or 0.0
            if uuid in full and told_at is not None and abs(full[uuid][0] - told_at) > 1.0:
                del full[uuid]  # another process holds it now
            if uuid in full or scene.now - started_at < SETTLED_S:
                continue
            used = self.windows.latest(uuid, "gpu_mem_used", scene.now)
            total = self.windows.latest(uuid, "gpu_mem_total", scene.now)
            if isinstance(used, Sample) and isinstance(total, Sample) and total.value > 0:
                full[uuid] = [started_at, used.value / total.value]

    # --- judging ----------------------------------------------------------------------------------------------------

    def step(self, now: float, dt_s: float) -> list[Transition]:
        """Compute every signal, move every alert. `dt_s`: watched seconds since the last step."""
        self._fold()
        self.scene = self._scene(now)
        if self.gpus:
            known = dict(self.learned.gpu_full_at_start)
            self._learn_full_gpus()
            if self.learned.gpu_full_at_start != known:
                self.scene = self._scene(now)
        self._recognise(now)
        rules = self._rules_now()
        self.signals = catalogue.compute(self.scene, rules, self.book.resolved_at)
        book, transitions = machine.evaluate(self.book, rules, self.signals, now, dt_s, poll_s=self.setup.poll_s,
                                             limit_of=self.limit_of, severity_of=self.severity_of)
        self._bind(now)
        self._scale(now)
        self._trend(now)
        alerts = dict(book.alerts)
        named = []
        for change in transitions:
            alert = change.alert
            if change.kind == "firing":
                alert = self._named(alert)
                alerts[(alert.rule, alert.subject)] = alert
            named.append(replace(change, alert=alert))
        self.unmuted = tuple(key for key, alert in alerts.items() if is_muted(alert) and self.silence_of(key) is None)
        for key in self.unmuted:
            texts = {name: text for name, text in alerts[key].annotations.items() if name != SILENCED}
            alerts[key] = replace(alerts[key], annotations=texts)
        self.book = Book(alerts, book.resolved_at)
        self.scene.memo.pop(("pages", "rows"), None)  # they were told with the book of before
        self._group(now)
        return named

    @property
    def deployment(self) -> dict[int, str]:
        """The deployment patterns of this node, and whence that is known."""
        if self.setup.patterns is not None:
            return dict.fromkeys(self.setup.patterns, "as `pattern:` says")
        return {int(number): f"recognised from {why}" for number, (why, _) in self.learned.patterns.items()}

    def _recognise(self, now: float) -> None:
        """Look now and then which patterns are there; one whose signs are gone stays as long as an engine does."""
        by = (len(self.facts), len(self.routers), len(self.scene.targets))
        if self.setup.patterns is not None or (by == self._recognised_by
                                               and 0 <= now - self._recognised_at < RECOGNISE_EVERY_S):
            return
        self._recognised_by, self._recognised_at = by, now
        found = patterns.recognise([self._seen(target) for target in self.scene.targets.values() if target.ever_up],
                                   {router: len(self.windows.keys(router, "router_worker_up"))
                                    for router in self.routers}, len(self.gpus), self.setup.sourced)
        known = {number: told for number, told in self.learned.patterns.items() if now - told[1] <= GONE_S}
        if found and 1 not in found:
            known.pop("1", None)  # it was one device until others came
        for number, why in found.items():
            before = known.get(str(number))
            if before is None or before[0] != why or not 0 <= now - before[1] < SEEN_EVERY_S:
                known[str(number)] = [why, now]
        self.learned.patterns = dict(sorted(known.items()))

    def _seen(self, target: Target) -> patterns.Seen:
        facts = self.facts.get(target.name) or EngineFacts(target.name, ())
        ranks = max((len(self.windows.keys(engine, name)) for engine in target.engines
                     for name in ("probe_rank_seconds", "rank_seconds")), default=0)
        return patterns.Seen(target.name, facts.model or "", len(target.engines), len(target.gpus), ranks, facts.shows,
                             facts.role)

    def _rules_now(self) -> list[Rule]:
        """The rules that run here: those of no pattern, and those of this node's."""
        active = frozenset(self.deployment)
        if self._rules is None or self._rules[0] != active:
            self._rules = active, [rule for rule in self.setup.rules
                                   if not rule.patterns or not active.isdisjoint(rule.patterns)]
        return self._rules[1]

    def _trend(self, now: float) -> None:
        """How each signal goes."""
        told = ((key, page.trending(signal, SIGNALS[self.rules[key[0]].signal][0].unit)[0])
                for key, signal in self.signals.items() if signal.state == "value")
        self.sparks.take(now, {key: value for key, value in told if value is not None})

    def _trend_of(self, key: AlertKey, unit: str) -> str:
        """The bars of the last ten minutes, with their first and last value; "" where too little is known."""
        values = self.sparks.values(key)
        known = [value for value in values if not isnan(value)]
        signal = self.signals.get(key)
        if len(known) < 2:
            return ""
        unit = unit if signal is None else page.trending(signal, unit)[1]
        ends = [words.quantity(float(f"{value:.4g}"), unit) for value in (known[0], known[-1])]
        return f"{spark.line(values)} {' → '.join(ends) if ends[0] != ends[1] else ends[0]}"

    def _bind(self, now: float) -> None:
        """What binds each engine now, and since when."""
        kinds = {target: facts.kind for target, facts in self.facts.items()}
        self.bounds = {engine: binds.judge(binds.look(self.scene, target, engine, kinds.get(target.name, "unknown")))
                       for target in self.scene.targets.values() for engine in target.engines}
        before = self.marks
        self.marks = {engine: binds.mark(before.get(engine), bound.by, now) for engine, bound in self.bounds.items()}
        self.newly_bound = [e for e, mark in self.marks.items() if e in before and mark.by != before[e].by]
        self.learned.marks = self.marks

    def _scale(self, now: float) -> None:
        """Whether a replica more is needed, or one fewer; not at each step: a start takes minutes."""
        if self.setup.clip_windows or 0.0 <= now - (self._scaled_at or 0.0) < scaling.LOOK_EVERY_S:
            return
        self._scaled_at = now
        advised = {}
        for target in self.scene.targets.values():
            up, process = scaling.start_of(self.scene, target)
            known = scaling.met(self.scaling.get(target.name, scaling.Advice()), process, now, up=up)
            seen = scaling.watch(self.scene, target, self.signals) if up else scaling.Seen()
            advised[target.name] = scaling.look(known, seen, now)
        self.scaling = advised
        self.learned.scaling = {name: scaling.to_plain(one) for name, one in advised.items()}

    def scaling_rows(self) -> list[dict[str, Any]]:
        """Advice on each replica that was looked at lately."""
        return [scaling.row(name, one) for name, one in self.scaling.items()
                if 0.0 <= self.scene.now - one.at <= scaling.LOST_S]

    def _group(self, now: float) -> None:
        """Which alert is of which incident from now on."""
        firing = [a for a in self.book.alerts.values() if a.state == "firing" and not is_muted(a)]
        step = incidents.group(self.incidents, firing, self.causes, self._related, self.setup.node, now,
                               audience_of=self._audience_of)
        self._incidents_before = self.incidents
        self.incidents, self.incident_changes = step.open, step.changes
        known = [*step.open.values(), *(incident for _, incident in step.changes if incident.ended_at is not None)]
        self.learned.worst = records.worst_of(self.learned.worst, known, self.signals, self.rules)
        self.learned.incidents = {name: asdict(incident) for name, incident in step.open.items()}

    def incident_records(self) -> list[dict[str, Any]]:
        """What is to be kept of each incident that this step changed."""
        return [self.incident_record(incident) for _, incident in self.incident_changes]

    def incident_record(self, incident: Incident) -> dict[str, Any]:
        """An incident as it is kept, as of this step."""
        drills = [drill["drill"] for drill in self.learned.announced.values() for m in incident.members
                  if m.rule in drill["rules"] and m.onset <= drill["until"] and is_of(m.subject, drill.get("subjects"))]
        return records.record(incident, self.scene, self.rules, self.causes, self.learned.worst,
                              lambda subject: self._place(subject)[0], self.limit_of, node=self.setup.node,
                              drill=drills[0] if drills else None)

    def count_days(self, last: dict[str, float]) -> tuple[list[Counted], dict[str, float]]:
        """What each target did since it was last counted, and up to where that is now."""
        return since_last(self.scene, last)

    def _related(self, one: str, other: str) -> bool:
        """Whether two subjects belong together: one engine's, or that of the GPU below it; all are the node's."""
        if one == other or self.setup.node in (one, other):
            return True
        return bool(self._owners(one) & self._owners(other))

    def _owners(self, subject: str) -> frozenset[str]:
        """The targets that a subject is of; a GPU or MIG instance is of every one that computes on it."""
        target, gpu = self.scene.target_of(subject), self.scene.gpus.get(subject)
        if target is not None:
            return frozenset({target.name})
        return frozenset(t.name for t in self.scene.targets.values() if subject in t.instances
                         or (gpu is not None and gpu.index in t.gpus))

    def _audience_of(self, alert: Alert) -> str:
        """The one channel that is told of an alert; "" for all."""
        drill = self._announced_by(alert)
        return "" if drill is None else str(drill.get("route_to") or "")

    def incident_of(self, key: AlertKey) -> Incident | None:
        """The incident that an alert is of, or was of until this step."""
        ended = [incident for _, incident in self.incident_changes if incident.ended_at is not None]
        return next((i for i in (*self.incidents.values(), *ended) if any(m.key == key for m in i.members)), None)

    def incident_message(self, incident: Incident) -> AlertMessage:
        """An incident as those channels get it that are told of one page, not of every alert."""
        root, over = incident.members[0], incident.ended_at
        root = next((m for m in incident.members if m.key == incident.root), root)
        alert = self.book.alerts.get(incident.root)
        lead = alert or next((self.book.alerts[m.key] for m in incident.members
                              if m.ended_at is None and m.key in self.book.alerts), None)  # the cause is over first
        texts = {} if lead is None else self.annotations(lead)
        fired = [m for m in incident.members if m.key != incident.root]
        texts["summary"] = texts.get("summary") or root.summary
        if over is not None:
            now = [page.standing(about) for m in (root, *fired) if (about := self._about_member(m)) is not None]
            texts["description"] = page.resolved(incident.opened_at, over, list(dict.fromkeys(filter(None, now)))) + \
                "\n" + "\n".join(m.summary for m in (root, *fired))
        elif lead is not None and (fired or "description" not in texts):
            self._tell_incident(incident, lead, texts)
            if alert is None:
                texts["description"] = f"It began with this, which is over: {root.summary}\n{texts['description']}"
        texts["incident"] = incident.id
        labels = {"alertname": alert_name(root.rule), "rule": root.rule, "node": self.setup.node,
                  "subject": root.subject, "severity": "page"} if alert is None else dict(alert.labels)
        url = "" if not self.setup.external_url else f"{self.setup.external_url}/"
        return AlertMessage(incident.id, "firing" if over is None else "resolved", "page", labels, texts,
                            incident.opened_at, over, url)

    def incidents_told(self, told: Sequence[AlertMessage], undiverted: Sequence[AlertMessage]) -> list[IncidentMessage]:
        """What this step changed of incidents, with the alerts that it told; what all must now hear of opens anew."""
        by_key = {message.key: message for message in told}
        found = []
        for change, incident in self.incident_changes:
            earlier = self._incidents_before.get(incident.id)
            before = () if earlier is None else self._alerts_of(earlier, {})
            found.append(IncidentMessage(change, self.incident_message(incident), self._alerts_of(incident, by_key),
                                         before))
        known = {one.message.key for one in found}
        anew = {m.annotations.get("incident") for m in undiverted} - known
        return found + [self._open(incident) for incident in self.incidents.values() if incident.id in anew]

    def incidents_open(self) -> list[IncidentMessage]:
        """Every open incident."""
        return [self._open(incident) for incident in self.incidents.values()]

    def _open(self, incident: Incident) -> IncidentMessage:
        return IncidentMessage("opened", self.incident_message(incident), self._alerts_of(incident, {}))

    def _alerts_of(self, incident: Incident, told: Mapping[str, AlertMessage]) -> tuple[AlertMessage, ...]:
        """All that it was ever made of: its alerts that fire, those that were just told, and those that are over.

        Who was told of the first of them must hear of the end, whichever ended last.
        """
        found = {}
        for member in incident.members:
            key, alert = f"{self.setup.node}/{member.rule}/{member.subject}", self.book.alerts.get(member.key)
            if member.ended_at is None and alert is not None:
                found[key] = self.message(alert)
            else:
                found[key] = AlertMessage(key, "resolved", "page", {"rule": member.rule, "subject": member.subject},
                                          {ROUTE: incident.audience} if incident.audience else {}, member.onset,
                                          member.ended_at)
        return tuple((found | {key: told[key] for key in found if key in told}).values())

    def _tell_incident(self, incident: Incident, lead: Alert, texts: dict[str, str]) -> None:
        """Title and body of an incident of several alerts: the cause, or what is left of it, then what it brought."""
        key = (lead.rule, lead.subject)
        about = self._about(lead, self.signals.get(key))
        if about is None:
            return
        effects: list[tuple[str, page.About | None]] = []
        for member in incident.members:
            alert = self.book.alerts.get(member.key)
            if member.key == key or alert is None or member.ended_at is not None:
                continue
            effects.append((member.summary, self._about(alert, self.signals.get(member.key))))
        if self._announced_by(lead) is None:
            since = words.span(round(max(0.0, self.scene.now - lead.since)))
            texts["summary"] = page.title(about, since, [one for _, one in effects if one is not None])
        texts["description"] = self._body(about, effects)

    def _about_member(self, member: incidents.Member) -> page.About | None:
        """What is known now of an alert that an incident was made of, whether it fires or not."""
        signal = self.signals.get(member.key)
        if signal is None or member.rule not in self.rules:
            return None
        return self._about(Alert(member.rule, member.subject, "firing", "page", member.onset), signal)

    def _about(self, alert: Alert, signal: Signal | None) -> page.About | None:
        """An alert with what is known around it; None: its rule is gone."""
        rule = self.rules.get(alert.rule)
        if rule is None:
            return None
        scene, unit = self.scene, SIGNALS[rule.signal][0].unit
        short, full = self._place(alert.subject)
        target = scene.target_of(alert.subject) or scene.target_on(alert.subject)
        engine = "" if target is None else alert.subject if alert.subject in target.engines else \
            (target.engines or (target.name,))[0]
        told: Facts = {} if target is None or not target.engines else facts_of(scene, target, engine, PAGE_SPAN_S)
        kind = "unknown" if target is None or target.name not in self.facts else self.facts[target.name].kind
        return page.About(rule, alert, signal, unit, short, full, self.setup.node,
                          self._trend_of((alert.rule, alert.subject), unit), engine,
                          "" if target is None else target.address, kind, told, self.bounds.get(engine),
                          self._gpus_now(), () if target is None else target.gpus)

    def _gpus_now(self) -> list[page.Gpu]:
        """Every GPU of the node as its page tells it."""
        if ("pages", "gpus") not in self.scene.memo:
            def now(uuid: str, name: str) -> float | None:
                got = self.windows.latest(uuid, name, self.scene.now)
                return got.value if isinstance(got, Sample) else None

            self.scene.memo["pages", "gpus"] = [
                page.Gpu(gpu.index, gpu.uuid, now(gpu.uuid, "gpu_temp_c"), gpu.limit_c,
                         now(gpu.uuid, "gpu_sm_clock_mhz"), now(gpu.uuid, "gpu_sm_clock_max_mhz"),
                         None if (reasons := now(gpu.uuid, "gpu_throttle")) is None else int(reasons))
                for gpu in sorted(self.gpus.values(), key=lambda gpu: gpu.index)]
        found: list[page.Gpu] = self.scene.memo["pages", "gpus"]
        return found

    def _rows_now(self) -> list[dict[str, Any]]:
        """Of the rows of `check` those that a page tells of the whole node, once a step: every page asks for them."""
        if ("pages", "rows") not in self.scene.memo:
            told = {rule.id for rule in self.setup.rules if rule.number in words.TEN or rule.signal in dict(page.FINE)}
            self.scene.memo["pages", "rows"] = [self._row(key, signal, 0.0) for key, signal in self.signals.items()
                                                if key[0] in told]
        found: list[dict[str, Any]] = self.scene.memo["pages", "rows"]
        return found

    def _body(self, about: page.About, effects: Sequence[tuple[str, page.About | None]] = (),
              more: Sequence[str] = ()) -> str:
        rows = self._rows_now()
        url, told = self.setup.external_url, [about, *(one for _, one in effects if one is not None)]
        return page.body(about, effects, fine=page.still_fine(rows, told), ten=words.the_ten(rows),
                         runbook=f"{url}/runbooks/{about.rule.id}" if url else "", more=more)

    def limit_of(self, rule: Rule, subject: str) -> float | None:
        """The limit that holds for a subject; None where the SLO that it needs is not promised."""
        return rule.limit(self.scene.slo_of(subject))

    def severity_of(self, rule: Rule, subject: str) -> Severity:
        """One severity for ever: SLOs that nobody wrote down never page; a throughput profile lowers H1, H5, H6."""
        target = self.scene.target_of(subject)
        return self.setup.severity_of(rule, self.scene.slo_of(subject), "latency" if target is None else target.profile)

    def traffic(self, since: float) -> Traffic:
        """Requests at each engine and router: (unix seconds, count so far), one row a read since a time.

        At an engine those that arrived, as `signals.arrivals` has it: first tokens + waiting. At a router its requests,
        and how often it sent one to a replica where it tells that. A restart makes no count begin anew.
        """
        engines = [engine for target in self.scene.targets.values() for engine in target.engines]
        replicas = {engine: [(at, count + (self.windows.level(engine, "waiting", at) or 0.0))
                             for at, count in self.windows.history(engine, "ttft", since, "count")]
                    for engine in engines}
        routers = {}
        for router in self.routers:
            requests, retries, sent = (self._counted(router, name, since) for name in (
                "router_requests", "router_retries", "router_worker_requests"))
            attempts = sent or {at: requests[at] + count for at, count in retries.items() if at in requests}
            routers[router] = {"requests": list(requests.items()), "attempts": list(attempts.items())}
        return {"replicas": replicas, "routers": routers}

    def _counted(self, subject: str, name: str, since: float) -> dict[float, float]:
        """A counter's total over all its keys at each read that told one of them."""
        found: dict[float, float] = {}
        for key in self.windows.keys(subject, name):
            for at, count in self.windows.history(subject, name, since, key):
                found[at] = found.get(at, 0.0) + count
        return dict(sorted(found.items()))

    def _named(self, alert: Alert) -> Alert:
        rule = self.rules[alert.rule]
        labels = {"alertname": alert_name(rule.id)} | catalogue.alert_labels(self.scene, rule, alert)
        return replace(alert, labels=labels, annotations=self.annotations(alert))

    def annotations(self, alert: Alert) -> dict[str, str]:
        """What may change while an alert fires: its texts and numbers."""
        if self._is_of_before(alert):
            return dict(alert.annotations) | self._role_of((alert.rule, alert.subject))
        signal = self.signals.get((alert.rule, alert.subject))
        return self._texts(alert, signal, words.span(round(max(0.0, self.scene.now - alert.since))))

    def _is_of_before(self, alert: Alert) -> bool:
        """Whether it is from before a restart, and nothing newer is known yet."""
        is_known = (alert.rule, alert.subject) in self.signals
        return alert.rule not in self.rules or (not is_known and bool(alert.annotations))

    def _texts(self, alert: Alert, signal: Signal | None, when: str) -> dict[str, str]:
        rule = self.rules[alert.rule]
        unit = SIGNALS[rule.signal][0].unit
        about = self._about(alert, signal)
        assert about is not None  # noqa: S101  (its rule is there)
        more = [note for note in (slo_note(rule, self.scene.slo_of(alert.subject)),) if note]
        texts = {
            "summary": page.title(about, when),
            "value": words.beside(alert.value, alert.limit, unit),
            "limit": words.quantity(alert.limit, unit),
            "action": rule.action if signal is None else action_of(rule, signal),
            "evidence": "" if signal is None else evidence_text(signal),
        }
        drill = self._announced_by(alert)
        if drill is not None:
            until = datetime.fromtimestamp(drill["until"], UTC)
            texts["summary"] = (f"DRILL  {rule.id} on {self.setup.node}, as announced by {drill['drill']}"
                                f" (until {until:%H:%M} UTC)")
            texts[ROUTE] = drill.get("route_to") or ""
        elif rule.signal == "qps_change" and (loads := self._drills_that_load()):
            texts["summary"] += f" (drill load of {', '.join(loads)})"
        silence = self.silence_of((alert.rule, alert.subject))
        if silence is not None:
            texts[SILENCED] = silence.text()
        if self.setup.external_url:
            texts["runbook_url"] = f"{self.setup.external_url}/runbooks/{rule.id}"
        pods = self.pods_of(alert.subject)
        if pods:
            texts["pod"] = ", ".join(pod.name for pod in pods)
            texts["namespace"] = ", ".join(dict.fromkeys(pod.namespace for pod in pods))
            more.append("Affected: " + ", ".join(
                f"pod {pod.namespace}/{pod.name}" + (f" ({pod.phase})" if pod.phase else "") for pod in pods))
        texts["description"] = self._body(about, more=more)
        return {k: v for k, v in texts.items() if v} | self._role_of((alert.rule, alert.subject))

    def _announced_by(self, alert: Alert) -> dict[str, Any] | None:
        """The drill that announced an alert, while its announcement holds."""
        return next((drill for drill in self.learned.announced.values()
                     if alert.rule in drill["rules"] and self.scene.now <= drill["until"]
                     and is_of(alert.subject, drill.get("subjects"))), None)

    def _drills_that_load(self) -> list[str]:
        """The drills whose prober asks just now: what arrives is not the users' alone."""
        return [drill["drill"] for drill in self.learned.announced.values()
                if drill.get("loads") and self.scene.now <= drill["until"]]

    def silence_of(self, key: AlertKey) -> Silence | None:
        """The silence that mutes an alert now."""
        return mutes.over(self.silences, *key, self.scene.now) if self.silences else None

    def silences_now(self, now: float | None = None) -> list[dict[str, Any]]:
        """The silences that hold (at the last step, or `now`), each with the open alerts that it mutes."""
        held = mutes.active(self.silences, self.scene.now if now is None else now)
        return [row | {"mutes": [{"rule": rule, "subject": subject} for rule, subject in self.book.alerts
                                 if one.covers(rule, subject)], "text": str(one)}
                for one, row in zip(held, mutes.to_plain(held), strict=True)]

    def expected(self) -> list[dict[str, Any]]:
        """What drills have announced: those alerts are no surprise, and are told all the same."""
        return [{key: drill.get(key) for key in ("drill", "run", "rules", "subjects", "until")}
                for drill in self.learned.announced.values() if self.scene.now <= drill["until"]]

    def no_longer_muted(self) -> list[AlertMessage]:
        """What fires on although its silence is over: it pages now."""
        return [self.message(self.book.alerts[key]) for key in self.unmuted]

    def no_longer_diverted(self) -> list[AlertMessage]:
        """What fires on although the drill that had it told to one channel alone is over: all must hear of it now.

        Asked once after each step: it notes what is diverted from now on.
        """
        before = {(rule, subject) for rule, subject in self.learned.diverted}
        firing = [(key, alert) for key, alert in self.book.alerts.items() if alert.state == "firing"]
        diverted = {key for key, alert in firing if self._is_diverted(alert)}
        self.learned.diverted = [list(key) for key, _ in firing if key in diverted]
        return [self.message(alert) for key, alert in firing if key in before - diverted]

    def _is_diverted(self, alert: Alert) -> bool:
        """What `annotations` tells as ROUTE, without the texts."""
        return ROUTE in alert.annotations if self._is_of_before(alert) else self._audience_of(alert) != ""

    def _place(self, subject: str) -> tuple[str, str]:
        """A subject for a title and for a text: people know a GPU by its index on a node."""
        gpu, node = self.gpus.get(subject) or self.gone.get(subject), self.setup.node
        for owner in (*self.gpus.values(), *self.gone.values()):
            for one in owner.instances:
                if one.uuid == subject:
                    place = f"MIG {one.gi}/{one.ci} of GPU {owner.index}"
                    return f"{place} on {node}", f"{place} ({', '.join(filter(None, (subject, one.name)))})"
        if gpu is None and re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", subject):
            return f"device {subject} on {node}", f"device {subject}"
        if gpu is not None:
            known = ", ".join(word for word in (subject, gpu.bdf) if word)
            return f"GPU {gpu.index} on {node}", f"GPU {gpu.index} ({known})"
        if subject == node or subject in self.scene.workloads or self.scene.is_sourced(subject):
            return subject, subject
        return f"{subject} on {node}", subject

    def message(self, alert: Alert, ended_at: float | None = None, why: str = "") -> AlertMessage:
        """An alert as receivers get it. Labels are those with which it fired."""
        starts_at = alert.since if alert.fired_at is None else alert.fired_at
        annotations = self.annotations(alert) if ended_at is None else self._at_end(alert, ended_at - starts_at, why)
        url = "" if not self.setup.external_url else \
            f"{self.setup.external_url}/alerts/{quote(alert.rule)}/{quote(alert.subject, safe='')}"
        return AlertMessage(f"{self.setup.node}/{alert.rule}/{alert.subject}",
                            "firing" if ended_at is None else "resolved", alert.severity, alert.labels, annotations,
                            starts_at, ended_at, url)

    def _role_of(self, key: AlertKey) -> dict[str, str]:
        """Of which incident an alert is, and as what."""
        incident = self.incident_of(key)
        return {} if incident is None else {"incident": incident.id, "role": incident.role(key)}

    def _at_end(self, alert: Alert, open_s: float, why: str) -> dict[str, str]:
        """The texts of an alert that has ended: with its last number, and why it ended."""
        ended = words.ending(max(0.0, open_s), why)
        if alert.rule not in self.rules:
            return dict(alert.annotations) | {"description": f"{alert.rule} of {alert.subject}: {ended}."}
        texts = self._texts(alert, None, ended)
        texts.pop(SILENCED, None)  # who was told that it fires hears of its end, whatever is silenced since
        if is_muted(alert):
            texts[SILENCED] = alert.annotations[SILENCED]
        unit = SIGNALS[self.rules[alert.rule].signal][0].unit
        last = "" if alert.value is None else f" Last: {words.beside(alert.value, alert.limit, unit)}" + (
            "." if alert.limit is None else f", limit {words.quantity(alert.limit, unit)}.")
        texts["description"] = f"{alert.rule} of {self._place(alert.subject)[1]}: {ended}.{last}"
        return texts

    def firing(self) -> list[AlertMessage]:
        """Everything that fires now."""
        return [self.message(a) for a in self.book.alerts.values() if a.state == "firing"]

    # --- telling ----------------------------------------------------------------------------------------------------

    def check(self, since_s: float = 0.0) -> dict[str, Any]:
        """The contract of `tocsin check --json`; the last step was `since_s` ago."""
        rows = [self._row(key, signal, since_s) for key, signal in self.signals.items()]
        return {"verdict": verdict(rows), "why": None, "node": self.setup.node, "at": self.scene.now, "signals": rows,
                "binds": self.bound_rows(), "patterns": patterns.report(self.deployment, rows),
                "scaling": self.scaling_rows(), "silences": self.silences_now(), "expected": self.expected()}

    def facts_told(self, target: Target, span_s: float = LONGEST_S) -> dict[str, Facts]:
        """What each engine of a target tells of itself, for the checklists."""
        found = {}
        known = self.scaling.get(target.name)
        served = known.served_per_s if known is not None else scaling.flow(self.scene, target)[1]
        for engine in target.engines:
            queue = self.signals.get(("queue-age", engine))
            age_s = None if queue is None or queue.state != "value" else queue.value
            found[engine] = facts_of(self.scene, target, engine, span_s) | {
                "queue_age_s": age_s, "replica_per_s": served or None}
        return found

    def bound_rows(self, target: str | None = None) -> list[dict[str, Any]]:
        """What binds each engine, or those of one target; `by` is stable, `since` and `was` come from a minute or more.

        `by` is of this moment; where it differs from `held`, which has been so since `since`, it has not lasted yet.
        """
        engines = self.bounds if target is None else self.scene.targets[target].engines
        return [{"engine": bound.engine, "by": bound.by, "name": bound.name, "why": bound.why,
                 "knob": bound.knob or None, "no_help": bound.no_help or None, "held": mark.by, "since": mark.since,
                 "was": mark.was, "evidence": dict(bound.evidence)}
                for engine in engines if (bound := self.bounds.get(engine)) and (mark := self.marks.get(engine))]

    def gpus_report(self, since_s: float = 0.0) -> dict[str, Any]:
        """The contract of `tocsin check --gpus --json`: a verdict on each GPU."""
        rows = [self._row(key, signal, since_s) for key, signal in self.signals.items() if key[0] in gpu_verdict.RULES]
        return gpu_verdict.verdicts(rows, self.gpus, self.setup.node) | {"at": self.scene.now}

    def _row(self, key: AlertKey, signal: Signal, since_s: float) -> dict[str, Any]:
        rule, alert = self.rules[key[0]], self.book.alerts.get(key)
        unit = SIGNALS[rule.signal][0].unit
        limit = self.limit_of(rule, signal.subject)
        state = self._state(rule, signal, alert, limit)
        return {
            "number": rule.number, "rule": rule.id, "signal": rule.signal, "subject": signal.subject, "state": state,
            "value": signal.value, "unit": unit, "limit": limit, "method": signal.method,
            "age_s": round(max(0.0, self.scene.now - signal.at) + since_s, 3), "why": signal.why or signal.quiet,
            "severity": alert.severity if alert is not None else self.severity_of(rule, signal.subject),
            "required": rule.required, "window_s": rule.window_s, "evidence": dict(signal.evidence),
            "action": action_of(rule, signal),
            "text": words.what(signal, unit) if signal.state in ("value", "idle") else "",
            "silenced": None if (silence := self.silence_of(key)) is None else silence.text(),
        }

    def _state(self, rule: Rule, signal: Signal, alert: Alert | None, limit: float | None) -> str:
        judged = machine.judge(rule, signal, limit)
        if alert is not None and not self.setup.clip_windows:
            # for information alone, it must not hide that nothing is known
            return "UNKNOWN" if judged == "gap" and alert.severity == "info" else ALERT_STATES[alert.state]
        if rule.signal == "blind" and judged == "breach":  # sampling alone, who can tell for how long
            return "PENDING"
        # a signal that is in breach by design ("quiet") starts no alert, and is shown all the same
        return {"gap": "UNKNOWN", "idle": "IDLE", "na": "N/A", "breach": "BREACH", "undecided": "PENDING",
                "clear": "OK"}[judged]

    def alerts(self) -> list[dict[str, Any]]:
        """The open alerts, in the contract of `tocsin alerts --json`."""
        return [self.alert_row(a) for a in self.book.alerts.values()]

    def alert_row(self, alert: Alert, until: float | None = None) -> dict[str, Any]:
        """One row of `tocsin alerts --json`, resolved where `until` is given."""
        rule = self.rules.get(alert.rule)
        texts = self.annotations(alert) if until is None else alert.annotations
        return {"rule": alert.rule, "subject": alert.subject, "state": alert.state if until is None else "resolved",
                "severity": alert.severity, "since": alert.since, "until": until, "value": alert.value,
                "limit": alert.limit, "incident": texts.get("incident"), "summary": texts.get("summary", ""),
                "description": texts.get("description", ""), "silenced": texts.get(SILENCED),
                "expected_by": self._expected_by(alert) if until is None else None,
                "unit": SIGNALS[rule.signal][0].unit if rule else ""}

    def _expected_by(self, alert: Alert) -> str | None:
        drill = self._announced_by(alert)
        return None if drill is None else str(drill["drill"])


def is_muted(alert: Alert) -> bool:
    """Whether it fired under a silence, and nobody of ours was told so far. Saved with the alert, as one thing."""
    return SILENCED in alert.annotations


def _is_config(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether these are the same options and version; one that could not be read ("") is no other."""
    versions = {known["version"], now["version"]} - {""}
    return bool(known["options"] == now["options"]) and len(versions) <= 1


def _address(known: Mapping[str, Any]) -> str:
    """host:port of an engine that discovery found."""
    return str(known["url"]).rpartition("//")[2]


def is_of(subject: str, announced: Sequence[str] | None) -> bool:
    """Whether a drill announced something of this subject; one of an older version does not say of which."""
    return announced is None or any(subject == one or subject.startswith(f"{one}/") for one in announced)


def probe_advice(probe: ProbeFacts | None, facts: EngineFacts | None) -> list[str]:
    """What tocsin-probe in a target's processes tells and what it does not; of a vLLM without it, what it would."""
    if probe is None:
        missing = ("no tocsin-probe in it: installed into vLLM's environment (0.8 and later), it tells the queue's age"
                   " exactly, CUDA-graph fallbacks and compute time by rank (probe/README.md)")
        return [missing] if facts is not None and facts.kind == "vllm" else []
    said = [f"tocsin-probe tells of its {', '.join(probe.parts) or 'processes nothing yet'} (vLLM {probe.vllm})"]
    said += [f"tocsin-probe stands aside at the {what}" for what in probe.aside]
    return said + [f"process {pid} of it is stopped (SIGSTOP)" for pid in probe.stopped]


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Page beats ticket beats unknown beats healthy; a required signal makes it unknown, or nothing judged at all.

    To be blind is to be unknown, until it has lasted and is a ticket; that we ourselves are well judges nothing.
    """
    worst = max((SEVERITY_RANK[r["severity"]] for r in rows if r["state"] == "BREACH"
                 or (r["state"] == "PENDING" and r["signal"] != "blind")), default=0)
    if worst:
        return "page" if worst == SEVERITY_RANK["page"] else "ticket"
    lost = any(r["state"] == "UNKNOWN" and r["required"] for r in rows)
    judged = any(r["state"] == "OK" and r["signal"] not in OF_OURSELVES for r in rows)
    return "healthy" if judged and not lost else "unknown"


def action_of(rule: Rule, signal: Signal) -> str:
    """What to do: the rule's word, or what this very case asks for."""
    return str(signal.evidence.get("do") or rule.action)


def slo_note(rule: Rule, slo: Slo) -> str:
    """A limit that nobody promised says so."""
    return "Mind: no `slo:` is written in the configuration; this uses the default." \
        if rule.needs_slo and not slo.written else ""


def evidence_text(signal: Signal) -> str:
    """The numbers behind a signal, as one line."""
    parts = []
    for name, value in signal.evidence.items():
        if isinstance(value, float):
            parts.append(f"{name}={value:.6g}")
        elif isinstance(value, list):
            parts.append(f"{name}={'..'.join(f'{v:g}' if isinstance(v, float) else str(v) for v in value)}")
        elif value is not None and not isinstance(value, dict):
            parts.append(f"{name}={value}")
    return ", ".join(parts)
