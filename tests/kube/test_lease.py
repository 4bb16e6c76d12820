"""One drill in the fleet: who takes the Lease, who may not, who stops, and what a schedule of fifty nodes comes to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from drills import cluster, lease
from drills.cluster import OPT_IN, Cluster, ClusterError
from drills.lease import Fleet, Held, HeldElsewhere, Mark, Pace, candidates, changed, free, order_of, said_of
from drills.model import Refused, Verdict
from tests.drills.stand_ins import wait_for
from tests.kube.scene import Api

PACE = Pace(renew_s=0.05, look_s=1.0)  # the real one, but for how often it really looks
DUE = 1_796_000_000.0


class Boot:
    """A clock since the boot of its own: whoever naps moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    def nap(self, span_s: float) -> None:
        """So much later, at once."""
        self.now += span_s
        self.naps.append(span_s)

    def doze(self, span_s: float) -> None:
        """The same for one who watches others, who are alive and need a moment."""
        self.nap(span_s)
        time.sleep(0.1)


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Time as the lease sees it."""
    made = Boot()
    monkeypatch.setattr(lease, "boot_s", lambda: made.now)
    return made


def fleet(node: str, boot: Boot, pace: Pace = PACE, **more: Any) -> Fleet:
    """The fleet as a node sees it."""
    return Fleet(node, pace=pace, **({"sleep": boot.nap} | more))


def keep(held: Held, lost: list[str] | None = None) -> Held:
    """Renewed from now on."""
    held.keep(lambda until: None, (lost if lost is not None else []).append)
    return held


def died(held: Held) -> Held:
    """Its process is gone, the Lease is as it was."""
    held.end()
    return held


def died_bound(node: str, boot: Boot) -> Held:
    """The node's process died with its fault in."""
    held = fleet(node, boot).take("run-1", "kill", None)
    held.bind("kill", DUE, ["GPU-7"])
    return died(held)


def now(api: Api) -> lease.Said:
    """What the Lease says."""
    found = api.cluster.lease(api.namespace, lease.NAME)
    assert found is not None
    return said_of(found)


# Who has it


def test_one_at_a_time(api: Api, boot: Boot) -> None:
    """Two nodes drilled at once, and the service lost two replicas: the second is told who has it."""
    first = keep(fleet("n1", boot).take("run-1", "kill", None))
    with pytest.raises(Refused, match="run run-1 of node n1 holds the fleet's drill lease; one at a time"):
        fleet("n2", boot, sleep=boot.doze).take("run-2", "kill", None)
    first.release("kill", None)
    second = fleet("n2", boot).take("run-2", "kill", None)
    assert (now(api).node, now(api).run, now(api).transitions) == ("n2", "run-2", 2)
    assert second.fence == (first.fence[0], first.fence[1] + 1)
    second.release("kill", None)
    assert (now(api).node, now(api).run) == ("", "")


def test_eight_want_it_at_once(api: Api) -> None:
    """Each of them read a free lock; one has it."""
    won: list[Held] = []
    refused: list[str] = []

    def want(number: int) -> None:
        try:
            won.append(keep(Fleet(f"n{number}", pace=replace(PACE, look_s=0.1)).take(f"run-{number}", "kill", None)))
        except Refused as no:
            refused.append(str(no))

    threads = [threading.Thread(target=want, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert (len(won), len(refused)) == (1, 7), refused
    won[0].release("kill", None)


def test_one_that_ended_is_taken_over(api: Api, boot: Boot) -> None:
    """The node died before it had bound itself to a target: nothing is in the world, and the next one may."""
    dead = died(fleet("n1", boot).take("run-1", "kill", None))
    start = boot.now
    second = fleet("n2", boot).take("run-2", "kill", None)
    assert boot.now - start >= PACE.lease_s  # as long as n2 has itself seen it unchanged, whatever the clocks say
    assert not dead.fresh()
    assert second.fence != dead.fence
    second.release("kill", None)


def test_our_own_that_was_cut_off(api: Api, boot: Boot) -> None:
    """Two nodes had one name by a mistake, and each took the other's lease for its own of before."""
    first = keep(fleet("n1", boot).take("run-1", "kill", None))
    with pytest.raises(Refused, match="run run-1 of node n1 holds the fleet's drill lease"):
        fleet("n1", boot, sleep=boot.doze).take("run-2", "kill", None)
    first.bind("kill", DUE, ["GPU-7"])
    died(first)
    start = boot.now
    second = fleet("n1", boot).take("run-2", "kill", None)  # its own: healed, or this node's lock were not to be had
    assert boot.now - start >= PACE.lease_s
    second.release("kill", None)


def test_a_silent_api_is_a_no(api: Api, boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer, no drill."""
    if api.stand_in is None:
        pytest.skip("a real server answers")
    api.stand_in.fail_next(503, "ServiceUnavailable", "etcd is down", of="GET /apis/coordination")
    with pytest.raises(Refused, match="etcd is down; no drill without"):
        fleet("n1", boot).take("run-1", "kill", None)


# Who must stop


def test_renewals_keep_it(api: Api, boot: Boot) -> None:
    """A drill of many minutes on a lease of one."""
    held = keep(fleet("n1", boot).take("run-1", "kill", None))
    for _ in range(5):
        until = held.good_until
        boot.nap(40.0)
        wait_for(lambda until=until: held.good_until > until)  # type: ignore[misc]
    assert held.fresh()
    held.release("kill", None)


def test_one_who_lost_it_is_told(api: Api, boot: Boot) -> None:
    """Somebody took the lease by hand: the drill that had it ends, and does not write over the other's."""
    lost: list[str] = []
    held = keep(fleet("n1", boot).take("run-1", "kill", None), lost)
    found = api.cluster.lease(api.namespace, lease.NAME)
    assert found is not None
    while True:
        try:
            api.cluster.put_lease(changed(found, {lease.RUN: "run-2"}, holderIdentity="n2",
                                          leaseTransitions=found["spec"]["leaseTransitions"] + 1))
            break
        except ClusterError:  # a renewal was faster
            found = api.cluster.lease(api.namespace, lease.NAME)
            assert found is not None
    wait_for(lambda: bool(lost))
    assert lost == ["the fleet's drill lease is not ours any more: run run-2 of node n2 holds it"]
    assert not held.fresh()
    held.release("kill", Verdict.ABORTED)
    assert (now(api).node, now(api).run) == ("n2", "run-2")


def test_one_that_was_stopped_past_it(api: Api, boot: Boot) -> None:
    """The runner slept for a minute and woke up in the middle of another's drill: it renews nothing, and stops."""
    lost: list[str] = []
    held = fleet("n1", boot).take("run-1", "kill", None)
    version = (api.cluster.lease(api.namespace, lease.NAME) or {})["metadata"]["resourceVersion"]
    boot.nap(PACE.lease_s - PACE.margin_s)
    keep(held, lost)
    wait_for(lambda: bool(lost))
    assert lost == [lease.STALE]
    # Nobody had taken it, and it was not renewed all the same.
    assert (api.cluster.lease(api.namespace, lease.NAME) or {})["metadata"]["resourceVersion"] == version
    held.release("kill", None)


def test_time_counts_from_the_sending(api: Api, boot: Boot) -> None:
    """The answer came after 20 s: a lease counted from its arrival was longer than the one that others see."""
    if api.stand_in is None:
        pytest.skip("a real server answers at once")
    held = fleet("n1", boot).take("run-1", "kill", None)
    before = boot.now
    api.stand_in.faults.append(lambda method, path: boot.nap(20.0) if method == "PUT" else None)
    held.bind("kill", None, ["pod a"])
    assert (boot.now, held.good_until) == (before + 20.0, before + PACE.lease_s - PACE.margin_s)
    api.stand_in.faults.clear()
    held.release("kill", None)


def test_an_answer_that_was_lost(api: Api, boot: Boot) -> None:
    """The renewal arrived, its answer did not: the next one conflicts with our own, and goes on."""
    held = fleet("n1", boot).take("run-1", "kill", None)
    found = api.cluster.lease(api.namespace, lease.NAME)
    assert found is not None
    api.cluster.put_lease(changed(found, {"a-person": "was here"}))
    held.bind("kill", DUE, ["pod a"])
    assert now(api).targets == "pod a"
    held.release("kill", Verdict.PASS)


# What is written into it


def test_what_binds_is_written_before(api: Api, boot: Boot) -> None:
    """Run, node and targets stand there before anything is touched; afterwards the drill's mark, with its verdict."""
    held = fleet("n1", boot).take("run-1", "kill", None)
    held.bind("kill", DUE, ["pod llm/a (uid u-1)", "pod llm/b"])
    said = now(api)
    assert (said.node, said.run, said.targets) == ("n1", "run-1", "pod llm/a (uid u-1); pod llm/b")
    assert (said.marks["kill"].due_at, said.marks["kill"].verdict) == (DUE, "")
    held.release("kill", Verdict.PASS)
    said = now(api)
    assert (said.node, said.run, said.targets) == ("", "", "")
    assert (said.marks["kill"].run, said.marks["kill"].verdict) == ("run-1", "PASS")


def test_a_lease_that_cannot_be_bound_is_a_no(api: Api, boot: Boot) -> None:
    """What is not written down is not done."""
    if api.stand_in is None:
        pytest.skip("a real server takes it")
    held = fleet("n1", boot).take("run-1", "kill", None)
    api.stand_in.fail_next(500, "InternalError", "etcd is full", of="PUT ")
    with pytest.raises(Refused, match="cannot be written: no drill without"):
        held.bind("kill", DUE, ["pod a"])
    held.release("kill", None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kill": 7}', '{"kill": {"due_at": 1}}'])
def test_marks_that_a_person_wrote(text: str) -> None:
    """An annotation that cannot be read is none: the drill would otherwise never be held again."""
    assert lease.marks_of(text) == {}


def test_annotations_of_others_stay() -> None:
    """What others wrote on the Lease is theirs."""
    had = {"metadata": {"annotations": {"theirs": "1", lease.RUN: "x"}, "name": "n"}, "spec": {"strategy": "s"}}
    told = changed(had, {lease.RUN: None, lease.TARGETS: "t"}, holderIdentity="n1")
    assert told["metadata"]["annotations"] == {"theirs": "1", lease.TARGETS: "t"}
    assert told["spec"] == {"strategy": "s", "holderIdentity": "n1"}
    assert free("ns")["metadata"]["namespace"] == "ns"


# A dead holder's drill


def test_an_orphan_is_nobody_else_s(api: Api, boot: Boot) -> None:
    """Its node died with the fault in: nobody drills until it has healed, one node pages, the healed one gives back."""
    dead, here = api.node(), api.node()
    held = died_bound(dead, boot)
    assert held.fresh()
    for node in (here, "another"):
        with pytest.raises(Refused, match=rf"run run-1 of node {dead} is ORPHANED \(GPU-7\): its node undoes it"):
            fleet(node, boot).take("run-2", "kill", None)
    assert now(api).reporter == here
    assert fleet(here, boot).tidy(lambda: True) == now(api)  # not its own
    back = fleet(dead, boot)
    back.tidy(lambda: True)
    boot.nap(PACE.lease_s)
    back.tidy(lambda: False)  # not healed yet
    assert now(api).node == dead
    back.tidy(lambda: True)
    said = now(api)
    assert (said.node, said.targets, said.reporter) == ("", "", "")
    assert said.marks["kill"].verdict == "ABORTED"
    fleet(here, boot).take("run-3", "other", None).release("other", None)


def test_an_orphan_whose_node_is_gone(api: Api, boot: Boot) -> None:
    """The machine was given back to the cloud: what was on it is gone with it."""
    died_bound("gone", boot)
    fleet("n2", boot).take("run-2", "kill", None).release("kill", None)


def test_a_lease_that_lives_is_not_tidied_away(api: Api, boot: Boot) -> None:
    """A run by hand, with a state of its own, on the same node: drilld knew nothing of it, and gave its lease back."""
    held, sweeper = keep(fleet("n1", boot).take("run-1", "kill", None)), fleet("n1", boot)
    for _ in range(3):
        sweeper.tidy(lambda: True)
        until = held.good_until
        boot.nap(40.0)
        wait_for(lambda until=until: held.good_until > until)  # type: ignore[misc]
    assert now(api).node == "n1"
    held.release("kill", None)


def test_no_lease_no_tidying(api: Api, boot: Boot) -> None:
    """Before the first drill there is none."""
    assert fleet("n1", boot).tidy(lambda: True) is None
    assert fleet("n1", boot).held("kill", DUE) is None


# The schedule of a fleet


def test_held_once_for_a_time(api: Api, boot: Boot) -> None:
    """Fifty nodes have the same schedule: what one has held the others do not, and each knows how it ended."""
    one, two = api.node(), api.node()
    held = fleet(one, boot).take("run-1", "kill", DUE)
    held.bind("kill", DUE, ["pod a"])
    assert fleet(two, boot).held("kill", DUE) == (Verdict.DEFERRED, f"node {one} holds it: run run-1")
    held.release("kill", Verdict.FAIL)
    with pytest.raises(HeldElsewhere, match=f"node {one} held it: run run-1"):
        fleet(two, boot).take("run-2", "kill", DUE)
    assert fleet(two, boot).held("kill", DUE) == (Verdict.FAIL, f"node {one} held it: run run-1, FAIL")
    assert fleet(two, boot).held("kill", DUE + 1) is None
    assert fleet(two, boot).held("other", DUE) is None
    fleet(two, boot).take("run-3", "kill", DUE + 1).release("kill", None)


def test_one_that_touched_nothing_leaves_it_to_the_next(api: Api, boot: Boot) -> None:
    """The first node could not announce its drill: the month is not lost for the fleet."""
    one, two = api.node(), api.node()
    held = fleet(one, boot).take("run-1", "kill", DUE)
    held.bind("kill", DUE, ["pod a"])
    held.release("kill", None)
    fleet(two, boot).take("run-2", "kill", DUE).release("kill", None)


def test_one_that_never_said_how_it_ended(api: Api, boot: Boot) -> None:
    """Its own node's, too: it was held, and it is not held again."""
    one = api.node()
    died_bound(one, boot)
    told = f"node {one} held it: run run-1, which never said how it ended"
    assert fleet(one, boot).held("kill", DUE) == (Verdict.ABORTED, told)


def test_drills_of_a_fleet_keep_their_distance(api: Api, boot: Boot) -> None:
    """The gap counts over all nodes: another node had drilled an hour ago."""
    one, two = api.node(), api.node()
    held = fleet(one, boot).take("run-1", "kill", DUE)
    held.bind("kill", DUE, ["pod a"])
    held.release("kill", Verdict.PASS)
    with pytest.raises(Refused, match=r"another drill ran in the fleet 0\.0 h ago; drill_guards\.min_gap is 20 h"):
        fleet(two, boot).take("run-2", "hang", DUE, min_gap_s=72_000.0)


def test_a_node_that_was_in_another_century_holds_no_drill_up(api: Api, boot: Boot) -> None:
    """Its battery was empty: what it had held in 2099 was held for all times before, and the fleet drilled no more."""
    one, two = api.node(), api.node()
    later = datetime(2099, 1, 1, tzinfo=UTC).timestamp()
    held = fleet(one, boot, clock=lambda: later).take("run-1", "kill", later)
    held.bind("kill", later, ["pod a"])
    held.release("kill", Verdict.PASS)

    assert fleet(two, boot).held("kill", DUE) is None
    fleet(two, boot).take("run-2", "kill", DUE, min_gap_s=72_000.0).release("kill", None)
    assert [lease.is_held(Mark(DUE + days * 86_400.0, one, "r", DUE), DUE) for days in (-1, 0, 90, 400)] == [
        False, True, True, False]


def test_a_node_that_may_not(api: Api, boot: Boot) -> None:
    """Not opted in, not Ready, cordoned: the schedule leaves it alone, and says what would change that."""
    here = api.node(opted_in=False)
    with pytest.raises(Refused, match=f"kubectl label node {here} {OPT_IN}=true"):
        fleet(here, boot).take("run-1", "kill", DUE)
    names = [api.node(), api.node(ready=False), api.node()]
    api.cluster.cordon(names[2], "a person")
    assert set(candidates(api.cluster.nodes())) & {here, *names} == {names[0]}
    fleet(here, boot).take("run-1", "kill", None).release("kill", None)  # a person who starts it chooses the node


def test_the_order_is_fair_and_the_same_for_all() -> None:
    """Always the same node was first: it had every drill, and the other 49 were never proven."""
    nodes = [f"n{number}" for number in range(50)]
    first = Counter(order_of(nodes, "kill", DUE + month)[0] for month in range(1200))
    assert len(first) == 50
    assert max(first.values()) < 60
    assert order_of(nodes[::-1], "kill", DUE) == order_of(nodes, "kill", DUE)
    assert sorted(order_of(nodes, "kill", DUE)) == sorted(nodes)


def test_each_waits_for_its_turn(api: Api, boot: Boot) -> None:
    """The node of rank k waits k times 30 s; one who is asked to stop stops."""
    nodes = {api.node() for _ in range(4)}
    order = order_of(candidates(api.cluster.nodes()), "kill", DUE)
    naps: list[float] = []
    last = next(node for node in reversed(order) if node in nodes)
    fleet(last, boot, sleep=naps.append).take("run-1", "kill", DUE).release("kill", None)
    assert naps == [30.0] * order.index(last)
    with pytest.raises(Refused, match="aborted by SIGTERM"):
        fleet(last, boot, sleep=naps.append, stopped=lambda: "aborted by SIGTERM").take("run-2", "kill", DUE)


def test_only_where_there_is_a_cluster(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without Kubernetes has its own lock, and asks nobody."""
    assert lease.fleet_of("n1") is not None
    monkeypatch.delenv("KUBECONFIG")
    assert lease.fleet_of("n1") is None
    assert not cluster.configured()
    assert Mark(None, "n", "r", 0.0).verdict == ""
    with pytest.raises(ClusterError):
        Cluster()
