"""One drill at a time in a fleet: a Kubernetes Lease that binds, beside the lock of each node.

Who holds it is told by (Lease uid, leaseTransitions), the fence. It is written by PUT with the resourceVersion that was
read. A holder goes by the time since it *sent* its last good renewal, on CLOCK_BOOTTIME, and stops before the Lease
ends; another takes an ended one over only after it has itself seen it unchanged for its whole length: no two clocks are
compared. What a run did is written into the Lease before it does it: a schedule fires once in a fleet.

A Lease that ended with its run's targets still in it is an orphan: its own node undoes it when it comes back, and until
then nobody takes it, and one of the others pages.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import structlog

from drills.cluster import (
    OPT_IN,
    Cluster,
    ClusterError,
    Object,
    configured,
    has_condition,
    is_schedulable,
    labels_or,
    text_of,
    uid_of,
)
from drills.model import Refused, Verdict, is_past

log = structlog.get_logger()

NAME = "tocsin-drill"
# Annotations of the Lease.
RUN = "tocsin.dev/run"
TARGETS = "tocsin.dev/targets"
HELD = "tocsin.dev/held"  # drill -> its last Mark, as JSON
REPORTER = "tocsin.dev/orphan-reported-by"
YEAR_S = 366 * 86_400.0
ANSWER_S = 5.0  # of the API: a renewal that takes longer is tried again
MAX_TARGETS = 1024  # characters
ORPHANED_AFTER = 3.0  # its lengths: by then a node that lives has healed what a run left there, and given it back
STALE = "the fleet's drill lease is not good any more: this process was stopped, or the API was silent, for too long"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds."""

    lease_s: float = 60.0
    renew_s: float = 10.0
    margin_s: float = 5.0  # a fault is out so long before its Lease ends
    rank_s: float = 30.0
    look_s: float = 2.0


PACE = Pace()


class HeldElsewhere(Refused):
    """Another node has held this drill for this time."""


@dataclass(frozen=True, slots=True)
class Mark:
    """That a drill was held for a time. `verdict` "": it goes on, or it never said."""

    due_at: float | None
    node: str
    run: str
    at: float
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What a Lease says. `node` "": nobody holds it. `targets` "": its run has not bound itself to any yet."""

    uid: str
    transitions: int
    node: str
    run: str
    targets: str
    lease_s: float
    marks: Mapping[str, Mark]
    reporter: str
    namespace: str

    @property
    def fence(self) -> tuple[str, int]:
        """Whose turn it is: another one has another fence."""
        return self.uid, self.transitions


# ---- pure ----


def said_of(lease: Mapping[str, Any]) -> Said:
    """What a Lease says, whatever hand wrote it."""
    spec, notes = lease.get("spec") or {}, labels_or(lease, "annotations")
    return Said(uid_of(lease), int(spec.get("leaseTransitions") or 0), str(spec.get("holderIdentity") or ""),
                notes.get(RUN, ""), notes.get(TARGETS, ""), float(spec.get("leaseDurationSeconds") or 0),
                marks_of(notes.get(HELD, "")), notes.get(REPORTER, ""), str(lease["metadata"].get("namespace", "")))


def marks_of(text: str) -> dict[str, Mark]:
    """The marks of all drills; what cannot be read is none."""
    try:
        return {str(drill): Mark(**told) for drill, told in json.loads(text or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _text_of(marks: Mapping[str, Mark]) -> str:
    return json.dumps({drill: {name: getattr(mark, name) for name in Mark.__slots__} for drill, mark in marks.items()},
                      sort_keys=True)


def free(namespace: str) -> Object:
    """A Lease that nobody holds."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME, "namespace": namespace},
            "spec": {"leaseTransitions": 0}}


def changed(lease: Mapping[str, Any], notes: Mapping[str, str | None], **spec: Any) -> Object:
    """A Lease with other annotations (None: without) and another spec; all else as it was read."""
    found = {k: v for k, v in {**labels_or(lease, "annotations"), **notes}.items() if v is not None}
    whole = {k: v for k, v in {**(lease.get("spec") or {}), **spec}.items() if v is not None}
    return {**lease, "metadata": {**lease["metadata"], "annotations": found}, "spec": whole}


def candidates(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The nodes on which a scheduled drill may run: opted in, Ready, and not cordoned."""
    able = (node for node in nodes if has_condition(node, "Ready") and is_schedulable(node))
    return [str(node["metadata"]["name"]) for node in able if labels_or(node, "labels").get(OPT_IN) == "true"]


def order_of(nodes: Iterable[str], drill: str, due_at: float) -> list[str]:
    """The rendezvous order of the nodes for one time of one drill: who tries first."""
    return sorted(nodes, key=lambda one: hashlib.sha256(f"{drill}/{due_at:.0f}/{one}".encode()).digest())


def boot_s() -> float:
    """Seconds since the boot, a suspended host's too: no step of a clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ---- the edge ----


class Held:
    """The Lease, held. `keep` renews it in a thread; what it must end when it is lost is told by a callback."""

    def __init__(self, cluster: Cluster, lease: Object, sent_at: float, node: str, run: str, pace: Pace,
                 clock: Callable[[], float]) -> None:
        self._cluster, self._lease, self._node, self._run = cluster, lease, node, run
        self._pace, self._clock = pace, clock
        self.fence = said_of(lease).fence
        self.good_until = sent_at + pace.lease_s - pace.margin_s  # boot seconds
        self.lost = ""  # why it is ours no more
        self._lock = threading.Lock()  # one writer
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def fresh(self) -> bool:
        """Whether a fault may be in: nobody can have taken it over by now."""
        return not self.lost and boot_s() < self.good_until

    def keep(self, on_renewed: Callable[[float], None], on_lost: Callable[[str], None]) -> None:
        """Renew it from now on. `on_renewed` is told until when it is good."""

        def run() -> None:
            while not self._stop.wait(self._pace.renew_s):
                with self._lock:
                    self._renew()
                if self.lost:
                    on_lost(self.lost)
                    return
                on_renewed(self.good_until)

        self._thread = threading.Thread(target=run, name="lease", daemon=True)
        self._thread.start()

    def _renew(self, notes: Mapping[str, str | None] | None = None) -> bool:
        """One renewal, with what else is to be written. Whether it is written; `lost` where it is another's."""
        for _ in range(2):
            if not self.fresh():
                self.lost = self.lost or STALE
                return False
            sent_at = boot_s()
            asked = changed(self._lease, notes or {}, renewTime=text_of(self._clock(), micro=True))
            try:
                self._lease = self._cluster.put_lease(asked)
            except ClusterError as error:
                if error.code not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND) or not self._read_again():
                    log.warning("lease_not_renewed", run=self._run, error=str(error))
                    return False
            else:
                self.good_until = sent_at + self._pace.lease_s - self._pace.margin_s
                return True
        return False

    def _read_again(self) -> bool:
        """After a conflict: somebody wrote beside us, an answer was lost, or it is another's now."""
        try:
            lease = self._cluster.lease(self._cluster.namespace, NAME)
        except ClusterError:
            return False
        said = None if lease is None else said_of(lease)
        if lease is None or said is None or (said.fence, said.node, said.run) != (self.fence, self._node, self._run):
            holder = "nobody" if said is None or not said.node else f"run {said.run} of node {said.node}"
            self.lost = f"the fleet's drill lease is not ours any more: {holder} holds it"
            return False
        self._lease = lease
        return True

    def bind(self, drill: str, due_at: float | None, targets: Sequence[str]) -> None:
        """Write down what is about to be hit, and that this drill was held for this time. Raises Refused."""
        with self._lock:
            mark = Mark(due_at, self._node, self._run, self._clock())
            marks = {**said_of(self._lease).marks, drill: mark}
            notes = {TARGETS: ("; ".join(targets) or "none")[:MAX_TARGETS], HELD: _text_of(marks)}
            if not self._renew(notes):
                raise Refused(self.lost or "the fleet's drill lease cannot be written: no drill without")

    def release(self, drill: str, verdict: Verdict | None) -> None:
        """Give it back, with how the drill ended (None: it touched nothing, and another node may hold it).

        Where the API gives no answer, the node's drilld does it later.
        """
        self._renew_no_more()
        with self._lock:
            marks = dict(said_of(self._lease).marks)
            mark = marks.get(drill)
            if mark is not None and mark.run == self._run:
                marks |= {drill: replace(mark, verdict="" if verdict is None else str(verdict))}
                if verdict is None:
                    del marks[drill]
            notes = {RUN: None, TARGETS: None, REPORTER: None, HELD: _text_of(marks)}
            for _ in range(2):
                try:
                    self._cluster.put_lease(changed(self._lease, notes, holderIdentity=None))
                except ClusterError as error:
                    if error.code != HTTPStatus.CONFLICT or not self._read_again():
                        log.warning("lease_not_released", run=self._run, error=str(error))
                        break
                else:
                    break
            self._cluster.close()

    def end(self) -> None:
        """Renew it no more, and leave it as it is: what is left in the world keeps it."""
        self._renew_no_more()
        self._cluster.close()

    def _renew_no_more(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * ANSWER_S)


class Fleet:
    """The Lease as one node sees it. `sleep` returns early when the run is to stop; `stopped` then says why."""

    def __init__(self, node: str, *, pace: Pace = PACE, clock: Callable[[], float] = time.time,
                 sleep: Callable[[float], object] = time.sleep, stopped: Callable[[], str] = lambda: "") -> None:
        self.node, self.pace, self.clock = node, pace, clock
        self._sleep, self._stopped = sleep, stopped
        self._seen, self._since = "", 0.0  # the Lease's version that was last seen held, and since when

    def take(self, run: str, drill: str, due_at: float | None, *, min_gap_s: float = 0.0) -> Held:
        """Wait for the node's turn, then take it. Raises HeldElsewhere, Refused."""
        try:
            cluster = Cluster(answer_s=ANSWER_S)
        except ClusterError as error:
            raise Refused(f"the fleet's drill lease: {error}") from error
        try:
            if due_at is not None:
                self._wait_turn(cluster, drill, due_at)
            return self._take(cluster, run, drill, due_at, min_gap_s)
        except ClusterError as error:
            cluster.close()
            raise Refused(f"the fleet's drill lease: {error}; no drill without") from error
        except BaseException:
            cluster.close()
            raise

    def _nap(self, span_s: float) -> None:
        self._sleep(span_s)
        if self._stopped():
            raise Refused(self._stopped())

    def _wait_turn(self, cluster: Cluster, drill: str, due_at: float) -> None:
        """The node of rank k waits k times `rank_s`, unless another has held the drill by then."""
        able = candidates(cluster.nodes())
        if self.node not in able:
            told = f"opted in (`kubectl label node {self.node} {OPT_IN}=true`), Ready and not cordoned"
            raise Refused(f"node {self.node} is not one that drills may use: {told}")
        for _ in range(order_of(able, drill, due_at).index(self.node)):
            refuse_held(self._read(cluster), drill, due_at)
            self._nap(self.pace.rank_s)

    def _read(self, cluster: Cluster) -> Object:
        """The Lease; a free one is made where there is none."""
        while True:
            lease = cluster.lease(cluster.namespace, NAME)
            if lease is not None:
                return lease
            try:
                return cluster.create_lease(free(cluster.namespace))
            except ClusterError as error:
                if error.code != HTTPStatus.CONFLICT:
                    raise

    def _take(self, cluster: Cluster, run: str, drill: str, due_at: float | None, min_gap_s: float) -> Held:
        self._seen = ""
        while True:
            lease = self._read(cluster)
            said = said_of(lease)
            if due_at is not None:
                refuse_held(lease, drill, due_at)
                self._refuse_gap(said, min_gap_s)
            if said.node:  # our own node's, too: its name may be another's by a mistake
                before = self._seen
                if not self._has_ended(lease, said):
                    if before not in ("", self._seen):
                        who = f"run {said.run} of node {said.node}"
                        raise Refused(f"{who} holds the fleet's drill lease; one at a time")
                    self._nap(self.pace.look_s)
                    continue
                if said.node != self.node:  # what our own left was healed: this node's lock is ours
                    self._refuse_orphan(cluster, lease, said)
            sent_at, now_text = boot_s(), text_of(self.clock(), micro=True)
            notes = {RUN: run, TARGETS: None, REPORTER: None}
            asked = changed(lease, notes, holderIdentity=self.node, leaseDurationSeconds=round(self.pace.lease_s),
                            leaseTransitions=said.transitions + 1, acquireTime=now_text, renewTime=now_text)
            try:
                taken = cluster.put_lease(asked)
            except ClusterError as error:
                if error.code != HTTPStatus.CONFLICT:
                    raise
                self._seen = ""  # somebody was faster: look who
                continue
            return Held(cluster, taken, sent_at, self.node, run, self.pace, self.clock)

    def _has_ended(self, lease: Object, said: Said, lengths: float = 1.0) -> bool:
        """Whether we ourselves have seen it unchanged for its whole length; each other form of it begins that anew."""
        version, now = str(lease["metadata"]["resourceVersion"]), boot_s()
        if self._seen != version:
            self._seen, self._since = version, now
        return now - self._since >= lengths * max(self.pace.lease_s, said.lease_s)

    def _refuse_gap(self, said: Said, min_gap_s: float) -> None:
        now = self.clock()
        known = (mark for mark in said.marks.values() if is_past(mark.at, now))
        last = max(known, key=lambda mark: mark.at, default=None)
        if last is not None and now - last.at < min_gap_s:
            gap = f"{max(0.0, now - last.at) / 3600:.1f} h ago; drill_guards.min_gap is {min_gap_s / 3600:g} h"
            raise Refused(f"another drill ran in the fleet {gap} (run {last.run} of node {last.node})")

    def _refuse_orphan(self, cluster: Cluster, lease: Object, said: Said) -> None:
        """An ended Lease whose run had bound itself: its fault may be in, for as long as its node is there."""
        if not said.targets or _is_gone(cluster, said.node):
            return
        if not said.reporter:  # one pages for it
            cluster.put_lease(changed(lease, {REPORTER: self.node}))
        raise Refused(orphan_text(said))

    # --- what drilld asks ---------------------------------------------------------------------------------------------

    def held(self, drill: str, due_at: float) -> tuple[Verdict, str] | None:
        """How a drill ended that some node has held for this time; DEFERRED while it goes on. None: nobody has.

        Asked while no run of this node goes on. Raises ClusterError.
        """
        with Cluster(answer_s=ANSWER_S) as cluster:
            lease = cluster.lease(cluster.namespace, NAME)
        if lease is None:
            return None
        said = said_of(lease)
        mark = said.marks.get(drill)
        if mark is None or not is_held(mark, due_at):
            return None
        told = f"node {mark.node} held it: run {mark.run}"
        if mark.verdict:
            return Verdict(mark.verdict), f"{told}, {mark.verdict}"
        if said.run == mark.run and mark.node != self.node:
            return Verdict.DEFERRED, f"node {mark.node} holds it: run {mark.run}"
        return Verdict.ABORTED, f"{told}, which never said how it ended"

    def tidy(self, is_over: Callable[[], bool]) -> Said | None:
        """Give back what a run of this node left when it was cut off, once nothing of it is left here (`is_over`).

        Another node's that is an orphan by now gets us as its reporter, where it has none: the next drill may be a
        month away. Asked from time to time: one that has not been seen to end is left alone, whose ever it is. What the
        Lease says afterwards; None where there is none. Raises ClusterError.
        """
        with Cluster(answer_s=ANSWER_S) as cluster:
            lease = cluster.lease(cluster.namespace, NAME)
            if lease is None:
                return None
            said = said_of(lease)
            if said.node not in ("", self.node):
                return self._reported(cluster, lease, said)
            if not said.node or not self._has_ended(lease, said) or not is_over():
                return said
            marks = {drill: replace(mark, verdict=str(Verdict.ABORTED)) if mark.run == said.run and not mark.verdict
                     else mark for drill, mark in said.marks.items()}
            notes = {RUN: None, TARGETS: None, REPORTER: None, HELD: _text_of(marks)}
            log.info("lease_given_back", run=said.run)
            return said_of(cluster.put_lease(changed(lease, notes, holderIdentity=None)))

    def _reported(self, cluster: Cluster, lease: Object, said: Said) -> Said:
        """Another node's Lease, with us as the one that pages where its node does not come back."""
        may_be = said.targets and not said.reporter and self._has_ended(lease, said, ORPHANED_AFTER)
        if not may_be or _is_gone(cluster, said.node):
            return said
        try:
            return said_of(cluster.put_lease(changed(lease, {REPORTER: self.node})))
        except ClusterError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            return said  # another one was faster, or its node is back


def _is_gone(cluster: Cluster, node: str) -> bool:
    """Whether the cluster has no such node any more: what was on it is gone with it. Raises ClusterError."""
    try:
        return cluster.node(node) is None
    except ClusterError as error:
        if error.code != HTTPStatus.FORBIDDEN:
            raise
        return False


def is_held(mark: Mark, due_at: float) -> bool:
    """Whether a drill was held for this time, or a later one; one of years later is of a node whose clock was wrong."""
    return mark.due_at is not None and 0.0 <= mark.due_at - due_at <= YEAR_S


def refuse_held(lease: Mapping[str, Any], drill: str, due_at: float) -> None:
    """Raise HeldElsewhere where a drill was held for this time, or a later one."""
    mark = said_of(lease).marks.get(drill)
    if mark is not None and is_held(mark, due_at):
        raise HeldElsewhere(f"node {mark.node} held it: run {mark.run}")


def orphan_text(said: Said) -> str:
    """What is known of a run whose node is away, and what ends it."""
    let_go = f"kubectl annotate lease -n {said.namespace} {NAME} {RUN}- {TARGETS}-"
    back = f"its node undoes it when it is back; where a person has, `{let_go}`"
    return f"run {said.run} of node {said.node} is ORPHANED ({said.targets}): {back}"


def fleet_of(node: str | None, **more: Any) -> Fleet | None:
    """The fleet, where there is a cluster; None on a host without."""
    return Fleet(node or "", **more) if configured() else None
