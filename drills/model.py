"""The nouns of a drill. Nothing here reads the clock, a file or the network.

Times are unix seconds (`at`, `*_at`), spans seconds (`*_s`), shares ratios 0 to 1. What is written down (ledger,
report) is plain JSON: every type here turns into it with `msgspec.to_builtins`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit


class State(StrEnum):
    """Where a run is. Each is in the ledger before it is acted on."""

    PLANNED = "PLANNED"
    DEFERRED = "DEFERRED"  # due, and a guard said no: tried again each day until `grace` ends
    SKIPPED = "SKIPPED"
    LOCKED = "LOCKED"
    PREFLIGHT = "PREFLIGHT"
    BASELINE = "BASELINE"
    ARMED = "ARMED"  # ledger on disk, holder up
    INJECTING = "INJECTING"
    PROVEN = "PROVEN"
    INVALID = "INVALID"  # the fault could not be proven
    OBSERVING = "OBSERVING"
    REVERTING = "REVERTING"
    REVERTED = "REVERTED"
    ORPHANED = "ORPHANED"  # something of ours is left: page, print the commands, go on trying
    RECOVERED = "RECOVERED"
    REPORTED = "REPORTED"


REFUSED = frozenset({State.SKIPPED, State.DEFERRED})  # nothing was put in
DAY_S = 86_400.0


def is_past(at: float, now: float) -> bool:
    """Whether a time that was remembered may be: one of tomorrow or later is of a clock that was wrong."""
    return at <= now + DAY_S


class Verdict(StrEnum):
    """How a run ended. ORPHANED outranks all."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    ABORTED = "ABORTED"
    SKIPPED = "SKIPPED"
    DEFERRED = "DEFERRED"
    ORPHANED = "ORPHANED"


class Refused(Exception):  # noqa: N818  (it says what a guard or a plan did)
    """A drill may not run, or cannot be planned; the text says why and what would change that."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, told apart from a later one with its number."""

    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat
    boot_id: str
    comm: str = ""
    netns: int = 0  # inode of /proc/PID/ns/net


@dataclass(frozen=True, slots=True)
class Load:
    """The prober's load at the address that users use."""

    url: str  # with /v1
    model: str | None = None  # None: asked of /v1/models
    rate_per_s: float = 5.0
    streaming: bool = True
    retries: int = 0
    connections: Literal["kept", "new"] = "kept"
    deadline_s: float = 30.0  # of one request
    max_tokens: int = 32
    prompt: str = "Count slowly from one to twenty, one number a line."
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Holds:
    """What must hold. None: not asked."""

    goodput: float | None = 0.95  # share of the asked rate, reached within goodput_within_s
    goodput_within_s: float = 30.0
    ttft_p99: Literal["slo"] | float | None = "slo"  # s
    itl_p99: Literal["slo"] | float | None = "slo"  # s
    error_ratio: float | None = 0.01
    restart_within_s: float | None = None  # the fault's own default where None and it kills
    degraded: Mapping[str, Any] | None = None  # {"within_s": 2.0, "by": {"model": "small"}} or {"by": {"header": …}}
    retry_storm: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a drill is due. `window`: minutes of the day in `zone`, may wrap midnight; `blackouts`: [start, end)."""

    cron: str
    zone: str = "UTC"
    window: tuple[int, int] | None = None
    blackouts: tuple[tuple[str, str], ...] = ()
    grace_s: float = 20 * 86400.0
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drill:
    """A drill, as its owner wrote it, defaults filled in."""

    name: str
    fault: str
    target: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    load: Load | None = None
    for_s: float = 300.0
    baseline_s: float = 120.0
    recovery_s: float = 600.0
    resolve_within_s: float = 600.0
    expects: tuple[str, ...] = ()  # rule ids; the fault's own default where empty
    holds: Holds = field(default_factory=Holds)
    params: Mapping[str, Any] = field(default_factory=dict)  # the fault's own: share, delay_s, leave_bytes, part …
    enabled: bool = True
    dry_run: bool = False
    echo: str | None = None  # URL of a receiver that tells what reached it
    route_to: str | None = None  # the one channel that is told of what it announces; None: the normal route
    owner: str | None = None


# What each fault announces where `expects` is not written.
ANNOUNCES: Mapping[str, tuple[str, ...]] = {
    "process-kill": ("engine-down",), "engine-hang": ("engine-stuck",), "upstream-timeout": ("user-ttft-p99",),
    "packet-loss": ("user-ttft-p99", "user-itl-p99"), "pod-kill": ("engine-stopped", "engine-down", "replicas-missing"),
    "slow-rank": ("rank-spread", "rank-straggler", "rank-clock-spread", "itl-p99"), "gpu-reset": ("xid-ticket",),
}  # fmt: skip
ANNOUNCES_IN_MODE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("upstream-timeout", "chunk"): ("user-ttft-p99", "user-itl-p99"),
    ("upstream-timeout", "hang"): ("user-error-rate",),
    ("upstream-timeout", "status"): ("user-error-rate",),
    ("gpu-reset", "reset"): ("engine-down",),
}
# Of these nobody can say that they must fire: TCP spares some clients, a router answers for another, an engine tells
# no step time.
MAY_FIRE = frozenset({"packet-loss", "pod-kill", "slow-rank"})
MAY_FIRE_IN_MODE = frozenset({("upstream-timeout", "hang"), ("upstream-timeout", "status")})


def announces(fault: str, mode: str | None) -> tuple[str, ...]:
    """The rules that a fault announces by itself."""
    return ANNOUNCES_IN_MODE.get((fault, mode or ""), ANNOUNCES.get(fault, ()))


def may_fire(drill: Drill) -> bool:
    """Whether what a drill announces may fire and need not: never so what its owner expects."""
    mode = str(drill.params.get("mode") or "")
    return not drill.expects and (drill.fault in MAY_FIRE or (drill.fault, mode) in MAY_FIRE_IN_MODE)


@dataclass(frozen=True, slots=True)
class Command:
    """Something that would be done, as a person would type it."""

    text: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a fault would do, before anything is touched. `facts` is all that inject and undo need, as plain JSON."""

    fault: str
    run: str  # tags everything of ours: tocsin-<run>
    targets: Sequence[str]  # for people: "process 4242 (vllm serve), port 8000"
    commands: Sequence[Command]
    undo: Sequence[Command]
    facts: Mapping[str, Any]
    exemptions: Sequence[str] = ()
    notes: Sequence[str] = ()  # "inbound only", "old connections not covered", "PREROUTING shows our address"
    needs: Sequence[str] = ()  # capabilities: CAP_NET_ADMIN …
    expects: Sequence[str] = ()  # rule ids that the fault announces by default
    blast: Mapping[str, Any] = field(default_factory=dict)  # {"replicas": 1, "of": 2}
    restarts: bool = False  # the target must come back by itself


@dataclass(frozen=True, slots=True)
class Left:
    """Something of ours that is still in the world, and the exact command that ends it."""

    what: str
    command: str


class Held(Protocol):
    """A fault that is in, inside the holder. It ends with the holder's process whatever happens."""

    def sample(self) -> Mapping[str, Any]:
        """Evidence now: counters, process states. Called each second."""

    def undo(self) -> None:
        """End it in good order; may be called twice."""


class Fault(Protocol):
    """A fault. `plan`, `left` and `undo` run anywhere; `inject` only in the holder, which owns what it returns."""

    name: str

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find and check the targets; touches nothing. Raises Refused."""

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Held:
        """Put it in. Every subprocess that injects must inherit `injector_fds` (pass_fds), no other may.

        Identity is checked again first. Raises Refused, OSError.
        """

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Do the samples prove the fault; and the sentence for the report. Pure."""

    def left(self, plan: Plan) -> list[Left]:
        """What of ours is still in the world: looks at it, never at the ledger's state. Needs no network, no API."""

    def undo(self, plan: Plan) -> None:
        """End what outlives its holder. Idempotent."""


Outcome = Literal["ok", "http_4xx", "http_429", "http_5xx", "refused", "reset", "timeout", "broken", "bad_answer"]


@dataclass(frozen=True, slots=True)
class Request:
    """One logical request of the prober, all its attempts together. Times are unix seconds; None: it did not happen."""

    id: str
    due_at: float  # when the open loop meant it to start
    sent_at: float
    first_at: float | None  # first token (streaming) or the whole answer
    ended_at: float
    outcome: Outcome
    attempts: int = 1
    status: int | None = None
    chunks: int = 0
    itl_s: Sequence[float] = ()  # gaps between chunks
    model: str | None = None  # as the answer says
    headers: Mapping[str, str] = field(default_factory=dict)  # those of the answer that a must-hold asks for
    finish_reason: str | None = None
    error: str | None = None  # a class in words, never an address with secrets

    @property
    def late_s(self) -> float:
        """How late the open loop was."""
        return self.sent_at - self.due_at


@dataclass(frozen=True, slots=True)
class Row:
    """One must-hold, guard or piece of evidence as judged."""

    name: str
    verdict: Verdict
    asked: str
    got: str
    before: str = "unknown"
    during: str = "unknown"
    after: str = "unknown"
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """One row of the timeline, with its evidence."""

    at: float
    what: str
    evidence: str = ""


def port_of(url: str) -> int:
    """The port of an address, its scheme's own where none is written."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
