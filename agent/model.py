"""The nouns of Tocsin. Nothing here reads the clock, a file or the network, and nothing imports ours.

Times are unix seconds (`at`, `*_at`), spans are seconds (`*_s`), shares are ratios 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

Severity = Literal["page", "ticket", "info"]
SubjectKind = Literal["engine", "target", "gpu", "node", "group", "user", "workload", "source", "any"]
OLD_S = 300.0  # a number whose own time is further off is no reading; after as long Prometheus forgets a series, too
SEVERITY_RANK: Mapping[str, int] = {"info": 0, "ticket": 1, "page": 2}


class Why(StrEnum):
    """The closed list of reasons for which something is not a number (label `reason` of tocsin_signal_gap)."""

    MISSING = "missing"  # the family or call is not there
    NOT_A_NUMBER = "not_a_number"  # NaN or infinite
    SENTINEL = "sentinel"  # -1, a DCGM or NVML blank
    OUT_OF_RANGE = "out_of_range"  # a ratio over 1, a timestamp of the year 57081
    NO_DATA = "no_data"  # 0/0
    STALE = "stale"  # unchanged although it must have moved
    LATE = "late"  # the source did not answer within 3 intervals
    NOT_COVERED = "not_covered"  # the window is less than half covered
    OFF_SCALE = "off_scale"  # the SLO lies above the histogram's last bound
    UNREACHABLE = "unreachable"  # refused, reset, no route
    TIMEOUT = "timeout"
    BAD_STATUS = "bad_status"  # an HTTP status that is not 200
    BAD_PAGE = "bad_page"  # the page as a whole does not parse
    BAD_LINE = "bad_line"  # one line does not parse
    TOO_LARGE = "too_large"
    LOST = "lost"  # the GPU is lost
    HUNG = "hung"  # a call into the driver has not returned
    ERROR = "error"  # any other error, named in the text
    NOT_SUPPORTED = "not_supported"  # this card or version has no such thing: becomes N/A, never blind


class Sample(NamedTuple):
    """One measured number. `key` tells series of one name apart (a bucket's `le`, an HTTP status, a finish reason)."""

    name: str
    subject: str
    value: float
    at: float
    key: str = ""


class Gap(NamedTuple):
    """A number that should be there and is not, and why. `key` as in Sample."""

    name: str
    subject: str
    code: Why
    why: str
    at: float
    key: str = ""


class Found(NamedTuple):
    """How one quantity was had, for `tocsin doctor`: `how` names the metric or call; None, and `why` says why not.

    `code`: the same as one of a closed list; what is NOT_SUPPORTED is no such thing here, everything else is missing.
    """

    name: str
    subject: str
    how: str | None
    note: str = ""
    why: str | None = None
    remedy: str | None = None
    code: Why | None = None
    at_end: bool = False  # it moves only when a request ends
    drifts: bool = False  # it may rise for ever


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a target says of itself: its engines (subjects), model, engine kind, names that were found and lost."""

    target: str
    engines: tuple[str, ...]  # subjects, in the order of their index
    kind: str = "unknown"
    model: str | None = None
    build: str | None = None  # changes when the set of families changes
    found: tuple[Found, ...] = ()
    closed: tuple[str, ...] = ()  # subjects that a change of shape ended
    shows: Mapping[int, str] = field(default_factory=dict)  # deployment pattern -> the family that shows it
    role: str = ""  # "prefill" or "decode", where it says so


class MigFacts(NamedTuple):
    """One MIG instance of a GPU as NVML names it: a compute instance in a GPU instance, by its own UUID."""

    uuid: str
    gi: int
    ci: int
    name: str = ""  # with its profile, as in "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    pids: tuple[int, ...] = ()  # of processes that compute on it, where NVML tells


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as NVML names it. `bdf` is domain:bus:device in lower-case hex, without the function."""

    uuid: str
    index: int
    name: str
    bdf: str
    limit_c: float | None = None  # the card's own limit, where it tells one; 127 is none
    found: tuple[Found, ...] = ()
    pids: tuple[int, ...] = ()  # of processes that compute on it, where NVML tells
    instances: tuple[MigFacts, ...] = ()


class FoundEngine(NamedTuple):
    """An engine that discovery found. `pids`: its processes; `ranks`: process -> rank, where it says so.

    `port`: on this machine; 0 in another network: of a pod, or, without a `pod`, of a container, which is read only
    where it is configured. `pod`: the uid of the pod that it is, where that is known; `workload`: then its subject is
    `namespace/workload#n`, with the lowest `n` that is free on this node. `options`: of its command line, without
    secrets, {} where that was not seen; in a pod's own words a value of its environment is `$(VAR)`. `version`: as it
    tells it, "" where it tells none, None where it was not asked.
    """

    name: str  # host:port, the subject that it gets
    url: str
    kind: str
    how: str
    port: int
    pids: tuple[int, ...] = ()
    ranks: Mapping[int, int] = {}
    pod: str = ""
    workload: str = ""
    options: Mapping[str, str] = {}
    version: str | None = None


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod on this node, as the API tells, or the kubelet, which knows no uid. `gpus`: the UUIDs that it was given."""

    namespace: str
    name: str
    uid: str = ""
    phase: str = ""  # Pending, Running, Succeeded, Failed; "": not told
    stopping: bool = False  # it was asked to stop
    gpus: tuple[str, ...] = ()


class ProbeFacts(NamedTuple):
    """What tocsin-probe in a target's processes says of itself."""

    target: str
    vllm: str  # version
    parts: tuple[str, ...]  # what it watches: "front end", "queue", "2 ranks"
    aside: tuple[str, ...]  # what it does not, and why
    stopped: tuple[int, ...]  # processes that are stopped (SIGSTOP)


EventKind = Literal["xid", "sxid", "lost", "map", "limited", "forged", "overrun", "boot"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a device; equal ones of one read are one, with a count.

    "xid" and "sxid" are errors by `number`, "lost" is a GPU gone without one, "map" tells a device's UUID, "limited"
    that equal lines are left out; "forged" is a line that only looks like the kernel's, "overrun" are records that
    were overwritten before they were read, "boot" that the machine has started anew.
    `device`: domain:bus:device, or "". `detail`: what else was told, in plain JSON values.
    """

    kind: EventKind
    device: str
    number: int | None
    at: float  # of the last
    first_at: float
    count: int = 1
    origin: Literal["log", "nvml"] = "log"
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one read of one source gave. `error` is set when the source as a whole failed.

    `hung_s`: for how long a call of it has not returned that the read itself no longer waits for; 0: there is none.
    `cursor`: up to where a log was read; saved together with what its `events` became.
    """

    source: str
    at: float
    took_s: float
    readings: tuple[Sample | Gap, ...] = ()
    engine: EngineFacts | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    error: str | None = None
    hung_s: float = 0.0
    router: EngineFacts | None = None  # what a router says of itself; it has no engines
    found: tuple[FoundEngine, ...] | None = None  # engines on this machine, where one looked for them
    pods: tuple[PodFacts, ...] | None = None  # of this node, where one looked for them
    workloads: tuple[str, ...] | None = None  # namespace/name of those that are watched in the whole cluster
    events: tuple[Event, ...] = ()
    cursor: Mapping[str, Any] | None = None
    probes: tuple[ProbeFacts, ...] | None = None  # of each target that has tocsin-probe, where one looked


class Source(Protocol):
    """Something to read, in its own thread. `read` never raises for bad input: it returns Gaps."""

    name: str

    def read(self, now: float) -> Batch:
        """Read once; blocks no longer than its own deadlines."""

    def close(self) -> None:
        """Let go of sockets and handles. May be called from another thread."""


# What samples are called, whatever the engine calls them. A counter only rises but for restarts; a histogram is a set
# of counters, one a bucket (key = its upper bound as repr(float), "+Inf" for the last) and the keys "sum" and "count".
Kind = Literal["gauge", "counter", "histogram"]
SAMPLES: Mapping[str, Kind] = {
    # of an engine (subject: engine)
    "waiting": "gauge",  # requests
    "running": "gauge",  # requests
    "kv_usage": "gauge",  # ratio
    "swapped": "gauge",  # requests
    "asleep": "gauge",  # 0 or 1
    "prefix_caching": "gauge",  # 0 or 1
    "kv_blocks": "gauge",  # blocks in the KV cache
    "kv_block_tokens": "gauge",  # tokens in one of them
    "preemptions": "counter",
    "ttft": "histogram",  # s
    "itl": "histogram",  # s
    "e2e": "histogram",  # s
    "queue_time": "histogram",  # s, observed at finish: for display only
    "finished": "counter",  # key: finish reason
    "prefix_queries": "counter",  # tokens
    "prefix_hits": "counter",  # tokens
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "spec_draft": "counter",  # tokens
    "spec_accepted": "counter",  # tokens
    "graph_fallback": "gauge",  # ratio; no stock vLLM tells it
    "graph_passes": "counter",  # decode steps; key: "graph" or "eager", whatever their sizes
    "steps": "counter",  # steps of the engine: they move while a long answer is written, as tokens do not everywhere
    "rank_seconds": "counter",  # s of compute of each rank; key: rank
    "paused": "gauge",  # requests that were running and had to give way
    "throughput": "gauge",  # tokens/s as the engine works it out: sticks when idle, shown and never judged
    "prefix_hit_ratio": "gauge",  # ratio as the engine works it out, where it counts no tokens
    "spec_acceptance": "gauge",  # ratio as the engine works it out, where it counts no tokens
    # of a target (subject: target)
    "http": "counter",  # key: status class or code, inference routes only
    "rejections": "counter",  # key: reason
    "process_start": "gauge",  # unix s
    "down": "gauge",  # 1: refused, reset or /health 5xx at this read; 0: it answered
    "slow": "gauge",  # 1: timed out at this read
    "rung": "gauge",  # how far the ladder was climbed: 0 nothing, 1 TCP, 2 /health, 3 /metrics
    "connections": "gauge",  # to its port, but for our own; only where this machine's table shows them
    # of tocsin-probe inside vLLM (subject: the engine)
    "probe_queue_age_s": "gauge",  # s since the oldest request arrived that was never scheduled; 0: there is none
    "probe_queued": "gauge",  # requests never scheduled, at most
    "probe_steps": "counter",  # steps that scheduled a token
    "probe_graph_steps": "counter",  # decode steps; key: "graph", "eager" though captured, "over" the captured sizes
    "probe_graph_largest": "gauge",  # tokens, the largest captured size
    "probe_tp_size": "gauge",  # ranks of a tensor-parallel group
    "probe_rank_seconds": "counter",  # s of compute without waiting in collectives; key: rank
    "probe_rank_steps": "counter",  # steps timed so; key: rank
    "probe_rank_late_s": "gauge",  # s by which a rank's host enters a step after the first one does; key: rank
    "probe_profiled_seconds": "counter",  # s of kernels that are no collectives, in profiled steps; key: rank
    "probe_profiled_steps": "counter",  # key: rank
    # the same of its API servers (subject: target)
    "probe_first_token_age_s": "gauge",  # s since the oldest request arrived that has no token yet; 0: there is none
    "probe_unanswered": "gauge",  # requests without a token, at most
    # of a router (subject: the router); shares per replica have the replica's address, as it names it, as key
    "router_requests": "counter",  # arrived or completed, as its map says
    "router_errors": "counter",  # key: kind of error
    "router_responses": "counter",  # key: HTTP status
    "router_retries": "counter",
    "router_worker_requests": "counter",  # key: replica
    "router_worker_errors": "counter",  # key: replica
    "router_worker_up": "gauge",  # 0 or 1; key: replica
    "router_worker_inflight": "gauge",  # requests; key: replica
    "router_inflight": "gauge",  # requests
    "router_queue": "gauge",  # requests that wait in the router
    # of a GPU (subject: its UUID); of a MIG instance (subject: its own UUID) only its memory
    "gpu_temp_c": "gauge",
    "gpu_margin_c": "gauge",  # kelvins left to the card's own limit; <= 0 is at or past it
    "gpu_util": "gauge",  # ratio
    "gpu_mem_used": "gauge",  # bytes
    "gpu_mem_total": "gauge",  # bytes
    "gpu_mem_free": "gauge",  # bytes
    "gpu_sm_clock_mhz": "gauge",
    "gpu_sm_clock_max_mhz": "gauge",
    "gpu_throttle": "gauge",  # NVML's bit mask of clock event reasons
    "gpu_thermal_ns": "counter",  # ns spent throttled for heat
    "gpu_power_ns": "counter",  # ns spent throttled for power
    "gpu_power_w": "gauge",
    "gpu_power_limit_w": "gauge",
    "gpu_recovery": "gauge",  # NVML's number of what must be done to the GPU; 0: nothing
    "gpu_ecc_corrected": "counter",  # since the driver was loaded
    "gpu_ecc_uncorrected": "counter",
    "gpu_ecc_corrected_ever": "counter",
    "gpu_ecc_uncorrected_ever": "counter",
    "gpu_remapped_corrected": "gauge",  # rows
    "gpu_remapped_uncorrected": "gauge",
    "gpu_remap_pending": "gauge",  # 0 or 1
    "gpu_remap_failed": "gauge",  # 0 or 1
    "gpu_banks_exhausted": "gauge",  # memory banks without a spare row
    "gpu_retired": "gauge",  # pages
    "gpu_retired_pending": "gauge",
    "gpu_pcie_gen": "gauge",
    "gpu_pcie_gen_max": "gauge",
    "gpu_pcie_width": "gauge",  # lanes
    "gpu_pcie_width_max": "gauge",
    "gpu_pcie_replays": "counter",
    "gpu_memory_temp_c": "gauge",
    "gpu_memory_temp_max_c": "gauge",
    "gpu_nvlink_up": "gauge",  # bit mask of the links that are up
    "gpu_nvlink_count": "gauge",
    "gpu_nvlink_replays": "counter",
    "gpu_nvlink_recoveries": "counter",
    "gpu_nvlink_crc": "counter",
    "gpu_fabric": "gauge",  # NVML's number of the fabric's state
    "gpu_fabric_status": "gauge",
    "gpu_persistence": "gauge",  # 0 or 1
    "gpu_energy_mj": "gauge",  # since the driver was loaded: what falls was loaded anew
    "gpu_mig": "gauge",  # 0 or 1
    # of the node's devices (subject: "gpu_devices"), told by the kernel
    "gpus_pci": "gauge",
    "gpus_proc": "gauge",  # in /proc/driver/nvidia/gpus
    "gpus_dev": "gauge",  # /dev/nvidia0, 1, …
    "driver_differs": "gauge",  # 1: the driver's library on disk is of another version than the module that is loaded
    "nvml_error": "gauge",  # NVML's number of why it does not start (subject: "nvml")
    "gpus_allocatable": "gauge",  # that the kubelet would give to pods (subject: "kubelet")
    # of a workload in Kubernetes (subject: namespace/name)
    "replicas_desired": "gauge",
    "replicas_ready": "gauge",
    "rollout": "gauge",  # 1 while one progresses
    # of an engine, read only on nodes of a deployment pattern (subject: engine)
    "frontend_cpu": "counter",  # s of CPU that the process has used that writes the page (subject: target)
    "handover_waiting": "gauge",  # requests between prefill and decode; key: what they wait for
    "handover_held": "gauge",  # requests whose KV blocks prefill holds for decode
    "handover_expired": "counter",  # requests whose KV blocks nobody fetched in time
    "kv_transfer_failures": "counter",  # key: what failed
    "external_hits": "counter",  # tokens that came from outside the engine's own cache
    "kv_up": "counter",  # moved into GPU memory from below, in the engine's own unit (bytes or tokens)
    "kv_down": "counter",  # the other way
    "kv_up_seconds": "counter",  # s that moving up took; key: "rank" of one, "" all ranks' added
    "expert_balance_sum": "counter",  # of mean ÷ largest load of an expert's GPU, a pass
    "expert_balance_count": "counter",  # passes
    "prefill_seconds": "counter",  # s of prefill of requests that have finished
    "prefill_count": "counter",
    "weight_updates": "counter",  # new weights taken (subject: target); key: the operation that says so
    # of a PromQL or JSON source (subject: its name, with labels where its query gives several series)
    "sourced": "gauge",
    "sourced_1d": "gauge",  # the same a day ago
    "sourced_7d": "gauge",  # the same a week ago
    # of what users see (subject: the address that they use), told by a prober from outside
    "user_ttft": "histogram",  # s
    "user_itl": "histogram",  # s
    "user_whole": "histogram",  # s, of answers that were asked for whole, not as a stream
    "user_requests": "counter",
    "user_errors": "counter",
    # of our own canary (subject: the target that it asks)
    "canary_age_s": "gauge",  # s for which it has waited for an answer; 0: it does not wait
    "canary_requests": "counter",
    "canary_errors": "counter",  # those that the engine counts as errors too
    # of the kernel log (subject: "kernel_log")
    "kernel_log_open": "gauge",  # 1 while it is read
    "nvml_events_open": "gauge",  # 1 while NVML tells Xids (subject: "nvml")
    # of ourselves (subject: a source or a channel)
    "source_late_s": "gauge",  # s since a source was last on time
    "delivery_failing_s": "gauge",  # s since when a channel could not deliver
}


SignalState = Literal["value", "gap", "idle", "na"]


class Signal(Struct, frozen=True):
    """What a rule compares. `low` and `high` bound an estimate: where they disagree about the limit it is undecided."""

    id: str
    subject: str
    state: SignalState
    at: float
    value: float | None = None  # may be kept while idle, for display
    unit: str = ""
    method: str = "exact"
    evidence: Mapping[str, Any] = {}
    why: str | None = None
    code: Why | None = None
    low: float | None = None
    high: float | None = None
    quiet: str | None = None  # in breach by design, and why: shown, never starts an alert


@dataclass(frozen=True, slots=True)
class SignalSpec:
    """A row of the signal catalogue, enough to check a rule.

    `params`: name -> kind, one of "duration", "ratio", "number", "slo", "pairs", "name". `most`: it is never over that.
    """

    id: str
    unit: str
    subject: SubjectKind
    help: str
    windowed: bool = False
    counted: bool = False  # takes min_count and min_bad
    params: Mapping[str, str] = field(default_factory=dict)
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Slo:
    """The service levels promised. Seconds and shares; None: not promised."""

    ttft_p99: float = 0.5
    itl_p99: float = 0.150
    e2e_p99: float | None = None
    availability: float = 0.999
    window: float = 30 * 86400.0
    written: bool = False  # someone wrote `slo:`; defaults never page


Op = Literal[">", ">=", "<", "<="]
COMPARE: Mapping[Op, Any] = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One comparison, one severity. The limit is `factor`, or `factor` x slo.`slo` of the subject's service levels."""

    id: str
    signal: str
    op: Op
    factor: float
    severity: Severity
    for_s: float = 0.0
    keep_s: float = 0.0
    slo: str | None = None
    number: str | None = None
    window_s: float | None = None
    min_count: int | None = None
    min_bad: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    needs_slo: bool = False  # its limit or its params name slo.*
    required: bool = False  # a Gap of it makes the subject blind (L3)
    causes: tuple[str, ...] = ()
    action: str = ""
    where: str = ""  # file:line, for messages
    patterns: tuple[int, ...] = ()  # deployment patterns whose nodes it runs on; none: all

    def limit(self, slo: Slo) -> float | None:
        """The number to compare with, in the signal's unit; None where the SLO that it needs is not promised."""
        if self.slo is None:
            return self.factor
        promised: float | None = getattr(slo, self.slo)
        return None if promised is None else self.factor * promised


AlertState = Literal["pending", "firing"]
TransitionKind = Literal["pending", "firing", "resolved", "inactive"]


@dataclass(frozen=True, slots=True)
class Alert:
    """The state of (rule, subject) while it is not absent. `labels` are set when it fires and never change."""

    rule: str
    subject: str
    state: AlertState
    severity: Severity
    since: float  # first sample in breach
    fired_at: float | None = None
    breach_s: float | None = None  # watched seconds in breach, 0 at the first sample; None while only undecided
    clear_s: float | None = None  # watched seconds back in range; None while in breach
    blind_s: float = 0.0
    idle_s: float = 0.0
    seen_at: float = 0.0  # time of the last signal that counted
    value: float | None = None
    limit: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transition:
    """An alert changed its state. `resolved` follows `firing`; `inactive` follows `pending`."""

    kind: TransitionKind
    at: float
    alert: Alert  # as it was after the change (for resolved and inactive: as it was last)
    why: str = ""  # "", "no traffic", "asleep", "subject removed", "rule removed"


AlertKey = tuple[str, str]  # (rule id, subject)


@dataclass(frozen=True, slots=True)
class Book:
    """All open alerts, and when each (rule, subject) last resolved: older observations never count towards it again."""

    alerts: Mapping[AlertKey, Alert] = field(default_factory=dict)
    resolved_at: Mapping[AlertKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """An alert as receivers get it. `ends_at` is set when it is resolved; `key` joins firing and resolved."""

    key: str  # "<rule>/<subject>" with the node: stable from firing to resolved
    status: Literal["firing", "resolved"]
    severity: Severity
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: float
    ends_at: float | None = None
    generator_url: str = ""


ROUTE = "route_to"  # annotation of an alert of a drill that only one channel is told of: its name
SILENCED = "silenced"  # annotation of an alert that a silence mutes: until when, by whom, why


@dataclass(frozen=True, slots=True)
class IncidentMessage:
    """An incident as one page, and the alerts that it is made of as they would be told one by one.

    `before`: of which alerts it was before this step.
    """

    change: Literal["opened", "updated", "resolved"]
    message: AlertMessage
    alerts: tuple[AlertMessage, ...]
    before: tuple[AlertMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Announcement:
    """Which alerts a drill will cause, until when (unix seconds), and on what.

    `subjects`: these and their engines; None: any. `loads`: its prober asks the service, which changes its rate.
    `route_to`: the one channel that is told of them; None: the normal route.
    """

    run: str
    drill: str
    rules: tuple[str, ...]
    until: float
    subjects: tuple[str, ...] | None = None
    loads: bool = False
    route_to: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """One delivery owed to one channel, saved with its transition and before anything is sent."""

    id: int
    channel: str
    message: AlertMessage
    created_at: float
    due_at: float
    tries: int = 0
    last_error: str | None = None


class Rejected(Exception):  # noqa: N818  (it says what the receiver did)
    """A receiver refused for a reason that a person must mend (most 4xx). To send again as things are is pointless."""


class TryLater(Exception):  # noqa: N818
    """A delivery failed and may succeed later (5xx, 429, no connection). `after_s`: the receiver's own Retry-After."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


def alert_name(rule_id: str) -> str:
    """The field's CamelCase of a rule id: kv-cache-utilization -> KvCacheUtilization."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^0-9A-Za-z]+", rule_id) if part)
