"""Advice on scaling: the seed's hysteresis as stories with a time column, and a load of any form that must not flap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import advise, scaling
from agent.model import Batch, EngineFacts
from agent.node import Node
from agent.scaling import Advice, Seen, asking, from_plain, look, met, to_plain
from agent.words import scaling_lines
from tests.scenes import T0, hist, samples
from tests.test_node import node, restarted

LOOK_S = scaling.LOOK_EVERY_S


def play(ages_s: Iterable[float | None], known: Advice | None = None, at: float = T0, every_s: float = LOOK_S,
         ) -> list[tuple[float, Advice]]:
    """A queue's age at each look -> the advice after it, with the second of the story."""
    advice, told = known or Advice(), []
    for n, age_s in enumerate(ages_s):
        advice = look(advice, Seen(age_s), at + n * every_s)
        told.append((n * every_s, advice))
    return told


def changes(told: Sequence[tuple[float, Advice]]) -> list[tuple[float, str]]:
    """When "out", "in" and nothing began to be advised."""
    said = [(at, "out" if one.out else "in" if one.into else "") for at, one in told]
    return [(at, now) for (at, now), before in zip(said, ["", *(word for _, word in said)], strict=False)
            if now != before]


@pytest.mark.parametrize(("story", "ages_s", "want"), [
    ("two looks over 2 s are a spike", [0.0, 2.5, 2.5, 0.1], []),
    ("three in a row are a lack of capacity", [0.0, 2.1, 2.1, 2.1], [(45, "out")]),
    ("2 s is not over 2 s", [2.0] * 9, []),
    ("between 0.5 and 2 s is where it should be", [0.7] * 90, []),
    ("short for ten minutes", [0.1] * 42, [(600, "in")]),
    ("0.5 s is not under 0.5 s", [0.5] * 90, []),
    ("one longer wait begins the ten minutes anew", [0.1] * 30 + [0.6] + [0.1] * 42, [(31 * 15 + 600, "in")]),
    ("no number neither asks nor lets go", [2.5, 2.5, None, 2.5], [(45, "out")]),
    ("said for a minute at least, then taken back", [2.5] * 3 + [0.1] * 10, [(30, "out"), (90, "")]),
    ("no in within ten minutes of an out", [2.5] * 3 + [0.1] * 60, [(30, "out"), (90, ""), (675, "in")]),
    ("an in is taken back at once", [0.1] * 41 + [0.6] + [0.1] * 3, [(600, "in"), (615, "")]),
    ("an in does not outlive what it was said by", [0.1] * 41 + [None] * 3, [(600, "in"), (615, "")]),
    ("what is not known takes no out back", [2.5] * 3 + [None] * 3, [(30, "out")]),
    ("one look of four known is no ten quiet minutes", [0.1, None, None, None] * 40, []),
    ("every second look", [0.1, None] * 90, []),
    # three known in a row are 30 s of quiet a minute: 600 s at the third look of the twentieth minute
    ("what is known is counted, and no more", [0.1, 0.1, 0.1, None] * 20, [(1170, "in"), (1185, "")]),
    ("who has just said in waits for a start before it says out", [0.1] * 41 + [9.0] * 25,
     [(600, "in"), (615, ""), (900, "out")]),
])
def test_what_is_advised_when(story: str, ages_s: list[float | None], want: list[tuple[float, str]]) -> None:
    """Checklist 9, step 4: out over 2 s several looks in a row, in under 0.5 s for ten minutes."""
    assert changes(play(ages_s)) == want, story


@pytest.mark.parametrize(("story", "seen", "why"), [
    ("nothing", Seen(0.0, 0.0, 4.0), ""),
    ("a queue", Seen(3.25), "the oldest request waits for 3.25 s, over 2 s"),
    ("more wait than find room", Seen(0.3, 5.0, 4.0), "5 wait and the KV cache has room for 4"),
    ("as many wait as find room", Seen(0.3, 4.0, 4.0), ""),
    ("nobody waits before a full cache", Seen(0.3, 0.0, 0.0), ""),
    ("TTFT rises over half of what was promised", Seen(0.3, ttft_p95_s=0.6, ttft_before_s=0.3, limit_s=1.0),
     "TTFT rises: its p95 is 600 ms in the last minute, 300 ms in the last ten"),
    ("it rises and hurts nobody", Seen(0.3, ttft_p95_s=0.06, ttft_before_s=0.03, limit_s=1.0), ""),
    ("it is as it was", Seen(0.3, ttft_p95_s=0.9, ttft_before_s=0.8, limit_s=1.0), ""),
])
def test_what_asks_for_a_replica(story: str, seen: Seen, why: str) -> None:
    """Queue age, TTFT's trend, requests waiting for a free KV slot. GPU utilization is not even an input."""
    assert asking(seen) == why, story
    assert not any("util" in name for name in Seen._fields)


def test_a_start_is_measured_from_the_process_to_its_first_page() -> None:
    """It went down, its process began at 40, its page came at 220: no replica helps sooner than 180 s."""
    known = met(Advice(), 7.0, T0, up=True)  # it ran before we did: nothing is known of its start
    assert (known.starts, known.startup_s) == ((), 300.0)
    known = down(known, 15, 210)
    known = met(known, T0 + 40, T0 + 220, up=True)
    assert (known.starts, known.startup_s) == ((180.0,), 180.0)
    known = met(known, T0 + 40.4, T0 + 225, up=True)  # the same process, its clock read otherwise
    assert known.starts == (180.0,)
    known = down(known, 240, 285)  # it hung
    known = met(known, T0 + 40, T0 + 300, up=True)
    assert known.starts == (180.0,)
    known = met(known, T0 + 301, T0 + 360, up=True)  # it was back before anybody saw it down
    assert (known.starts, known.startup_s) == ((180.0, 59.0), 180.0)  # plan for the slower


def down(known: Advice, start_s: int, end_s: int) -> Advice:
    """Looks at a replica that does not answer."""
    for at_s in range(start_s, end_s + 1, 15):
        known = met(known, None, T0 + at_s, up=False)
    return known


@pytest.mark.parametrize(("story", "known", "began_s", "page_s"), [
    ("ours began before its page was read, and it ran for 5 h", down(Advice(), 0, 0), -18_000, 15),
    ("ours was away for 2 h, and it was restarted meanwhile", met(Advice(), T0 - 1e5, T0, up=True), 600, 7200),
    ("it was down when ours went, and came while ours was away", down(Advice(), 0, 60), 30, 400),
    ("ours came back while it loaded", down(met(Advice(), T0 - 1e5, T0, up=True), 300, 400), 200, 405),
    ("the clock was set back", down(Advice(), 0, 600), 30, 200),
    ("it never told its start before", met(Advice(), None, T0, up=True), 5, 15),
])
def test_a_start_that_nobody_saw_teaches_nothing(story: str, known: Advice, began_s: float, page_s: float) -> None:
    """5 h and 2 h were taken for starts: for as long nothing was advised after a change."""
    assert met(known, T0 + began_s, T0 + page_s, up=True).starts == (), story


def test_a_new_replica_s_start_is_seen_from_before_it_began() -> None:
    """Its pod is there, its process begins at 40 and answers at 220, and a restart of ours in between is short."""
    known = from_plain(to_plain(down(Advice(), 0, 120)))
    assert met(down(known, 150, 210), T0 + 40, T0 + 220, up=True).starts == (180.0,)


def test_a_start_of_a_toy_does_not_let_it_flap() -> None:
    """Two seconds to start: one change in two seconds would be no calm."""
    assert Advice(starts=(2.0,)).startup_s == 60.0


@pytest.mark.parametrize(("served", "told"), [
    (7.0, 7.0),
    (0.0, None),  # it served nobody: nothing to divide by
    (None, None),  # nobody waited: what it could serve is not known
])
def test_a_replica_tells_its_own_part_of_the_warm_pool(served: float | None, told: float | None) -> None:
    """It once told a number of replicas "in all", of what had come to it alone: deploy/autoscaling sums the fleet."""
    known = scaling.row("llama", look(Advice(), Seen(0.1, arrived_per_s=31.0, served_per_s=served), T0))
    assert (known["peak_per_s"], known["served_per_s"], "warm_pool" in known) == (31.0, told, False)


def test_a_replica_s_peak_is_no_number_of_replicas_and_a_fleet_s_is() -> None:
    """24 requests/s at 7 a replica: 3.4, so 4 in all. One look at 2.5 s asks for nothing: advise said "out"."""
    (line,) = scaling_lines([scaling.row("llama", Advice(out=True, why="w", peak_per_s=24.0, served_per_s=7.0))])
    assert "brought 24 requests/s, and the most that it served was 7: 3.4 times that." in line
    assert "in all" not in line
    said = "a spike shorter than a start must meet a warm pool: 24 requests/s at its height ÷ 7 of a replica = 4 in all"
    decided = advise.autoscaling(startup_s=300.0, spike_per_s=24.0, replica_per_s=7.0, queue_age_s=2.5)
    assert said in decided.why
    assert decided.answer.endswith("; now 2.5 s: out, if it lasts")
    assert look(Advice(), Seen(queue_age_s=2.5), T0).out is False


def test_a_spike_is_forgotten_after_a_day() -> None:
    """The peak of a launch day is no plan for the year."""
    known = look(Advice(), Seen(0.1, arrived_per_s=50.0, served_per_s=5.0), T0)
    known = look(known, Seen(0.1, arrived_per_s=6.0, served_per_s=5.0), T0 + 3600)
    assert known.peak_per_s == 50.0
    known = look(known, Seen(0.1, arrived_per_s=6.0, served_per_s=5.0), T0 + 90_000)
    assert (known.peak_per_s, known.served_per_s) == (6.0, 5.0)


SEEN = st.builds(Seen, st.sampled_from([None, 0.0, 0.3, 0.7, 2.5, 60.0]), st.sampled_from([None, 0.0, 5.0]),
                 st.sampled_from([None, 0.0, 9.0]), st.sampled_from([None, 0.2, 0.9]), st.sampled_from([None, 0.3]),
                 st.just(1.0))
PACES_S = [0.5, 5.0, 15.0, 45.0]
JUMPS_S = [-86400.0, -600.0, -30.0, 120.0, 700.0, 86400.0]  # of the wall clock; what LOST_S says of shorter ones holds


@settings(max_examples=60)
@given(st.lists(st.tuples(SEEN, st.integers(1, 60)), max_size=30), st.sampled_from(PACES_S),
       st.dictionaries(st.integers(0, 400), st.sampled_from(JUMPS_S), max_size=3),
       st.dictionaries(st.integers(0, 400), st.integers(0, 900), max_size=3),
       st.lists(st.floats(1.0, 900.0), max_size=5).map(tuple))
def test_no_load_makes_it_flap(runs: list[tuple[Seen, int]], every_s: float, jumps: dict[int, float],
                               away: dict[int, int], starts: tuple[float, ...]) -> None:
    """Any load, any pace of looks, restarts of ours and clocks that are set: one change a start, no in after an out.

    Measured by a clock that nobody sets.
    """
    known, real, wall, out_at, raised_at = Advice(starts=starts), 0.0, T0, -1e9, -1e9
    for n, seen in enumerate(seen for seen, many in runs for _ in range(many)):
        if n in away:
            known, real, wall = from_plain(to_plain(known)), real + away[n], wall + away[n]  # another process, later
        wall += jumps.get(n, 0.0)
        before, known = known, look(known, seen, wall)
        assert not (known.out and known.into)
        assert not (known.into and seen.queue_age_s is None)
        if known.into:
            assert real - out_at >= 600.0
        if (known.out and not before.out) or (known.into and not before.into):
            assert real - raised_at >= known.startup_s
            raised_at = real
        out_at = real if known.out else out_at
        real, wall = real + every_s, wall + every_s


# --- on a node -------------------------------------------------------------------------------------------------------


def live(here: Node, start_s: float, end_s: float, waiting: float = 0.0, first_tokens: float = 0.0) -> None:
    """An engine read and judged every 5 s; `waiting` requests wait and nothing is served."""
    for at_s in range(int(start_s), int(end_s) + 1, 5):
        told = {"running": 4.0, "waiting": waiting, "kv_usage": 0.5, "finished.stop": first_tokens,
                **hist("ttft", {"0.5": first_tokens, "+Inf": first_tokens}), "prompt_tokens": 1.0 + at_s,
                "generation_tokens": 1.0 + at_s}
        at = T0 + at_s
        of = (*samples("llama", at, told), *samples("llama", at, {"rung": 3.0, "process_start": T0 - 1e5}))
        here.take(Batch("engine:llama", at, 0.0, of))
        here.step(at, 5.0)


def advised(here: Node) -> dict[str, tuple[bool, bool]]:
    """Replica -> (out, in) as `check` tells it."""
    return {row["subject"]: (row["out"], row["in"]) for row in here.check()["scaling"]}


def test_a_node_advises_by_its_queue_and_says_why() -> None:
    """Ten wait and no first token comes: after a minute it asks for a replica; a restart of ours forgets nothing."""
    here = node("queue-age")
    live(here, 0, 30)
    assert advised(here) == {"llama": (False, False)}
    live(here, 35, 120, waiting=10.0)
    assert advised(here) == {"llama": (True, False)}
    assert scaling_lines(here.check()["scaling"])[0].startswith("Advice for llama: one replica more: the oldest")

    later = restarted(here)
    assert advised(later) == {}  # nothing was looked at yet: no number of the past is told as one of now
    live(later, 300, 310)
    assert advised(later) == {"llama": (True, False)}  # it is said for a minute that somebody watched
    live(later, 315, 895)
    assert advised(later) == {"llama": (False, False)}  # out was said at 300 the last time
    live(later, 900, 905)
    assert advised(later) == {"llama": (False, True)}


def seen_by(here: Node) -> Seen:
    """The numbers of the one replica."""
    (target,) = here.scene.targets.values()
    return scaling.watch(here.scene, target, here.signals)


def tell(here: Node, start_s: int, end_s: int, numbers: Callable[[int], dict[str, float]]) -> None:
    """An engine of two ranks read and judged every 5 s, and what each rank tells ("1 waiting": rank 1 alone)."""
    for at_s in range(start_s, end_s + 1, 5):
        told = {**hist("ttft", {"0.5": at_s / 2, "+Inf": at_s / 2}), "prompt_tokens": 1.0 + at_s,
                "generation_tokens": 1.0 + at_s, **numbers(at_s)}
        of = [r for n in (0, 1) for r in samples(f"llama/{n}", T0 + at_s, {
            key: value for key, value in told.items() if key[0] != str(1 - n)})]
        of += samples("llama", T0 + at_s, {"rung": 3.0, "process_start": T0 - 1e5})
        of = [r._replace(name=r.name.removeprefix("0 ").removeprefix("1 ")) for r in of]
        here.take(Batch("engine:llama", T0 + at_s, 0.0, tuple(of), EngineFacts("llama", ("llama/0", "llama/1"))))
        here.step(T0 + at_s, 5.0)


def test_ours_begins_beside_a_steady_engine() -> None:
    """2 × 128 run and one request a second: the load was taken for 5 a second, and the pool for five replicas."""
    here = node("queue-age")
    tell(here, 0, 30, lambda at_s: {"running": 128.0, "waiting": 0.0, "finished.stop": at_s / 2})
    assert seen_by(here)[-2:] == (None, None)
    tell(here, 35, 300, lambda at_s: {"running": 128.0, "waiting": 0.0, "finished.stop": at_s / 2})
    assert seen_by(here)[-2:] == (1.0, None)  # nobody waits: it could serve more, and nobody knows how much
    assert here.check()["scaling"][0]["served_per_s"] is None
    assert here.facts_told(here.scene.targets["llama"])["llama/0"]["replica_per_s"] is None
    tell(here, 305, 420, lambda at_s: {"running": 128.0, "waiting": at_s - 300.0, "finished.stop": at_s / 2})
    assert seen_by(here)[-2:] == (3.0, 1.0)  # 2 more wait each second and 1 is served
    (row,) = here.check()["scaling"]
    assert (row["peak_per_s"], row["served_per_s"]) == (3.0, 1.0)
    assert here.facts_told(here.scene.targets["llama"])["llama/0"]["replica_per_s"] == 1.0


def test_a_rank_where_nothing_runs_has_room_that_nobody_can_count() -> None:
    """Five wait on a rank that has just become empty, three on one with room for four: nobody lacks a slot."""
    here = node("queue-age")
    tell(here, 0, 5, lambda _: {"0 running": 4.0, "0 waiting": 3.0, "1 running": 0.0, "1 waiting": 5.0,
                                "0 kv_usage": 0.5, "1 kv_usage": 0.0})
    assert (seen_by(here).waiting, seen_by(here).free) == (3.0, 4.0)


def test_a_replica_that_went_spares_nobody() -> None:
    """It said "in" and is down at the next look: that is taken back at once."""
    here = node("queue-age")
    live(here, 0, 630)
    assert advised(here) == {"llama": (False, True)}
    for at_s in range(635, 665, 5):
        gone = tuple(samples("llama", T0 + at_s, {"rung": 0.0}))
        here.take(Batch("engine:llama", T0 + at_s, 0.0, gone, error="refused"))
        here.step(T0 + at_s, 5.0)
    assert advised(here) == {"llama": (False, False)}


def test_a_quiet_agent_that_was_away_begins_its_ten_minutes_anew() -> None:
    """Nine quiet minutes, a restart of five, and a quiet look: nobody saw what happened in between."""
    here = node("queue-age")
    live(here, 0, 540)
    later = restarted(here)
    live(later, 840, 1100)
    assert advised(later) == {"llama": (False, False)}
    assert asdict(later.learned)["scaling"]["llama"]["under_s"] == 255.0
