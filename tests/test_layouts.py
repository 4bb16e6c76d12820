"""The numbers of the columns of saved frames: told once, forgotten with their engine, never given out twice."""

from __future__ import annotations

from agent.layouts import IDLE_S, Layouts
from agent.windows import SeriesKey


def keys(engine: str) -> tuple[SeriesKey, ...]:
    """The columns of an engine."""
    return (("kv_usage", engine, ""), ("waiting", engine, ""))


def test_pods_that_come_and_go_all_day_are_forgotten() -> None:
    """A pod a minute for a day: the columns of each stood in the daemon's memory until its next start."""
    layouts, held, numbers = Layouts(), [], set()
    for minute in range(1440):
        mono = 60.0 * minute
        for track, engine in (("trend", f"pod-{minute}"), ("llama", "llama")):
            numbers.add(layouts.number(track, keys(engine), mono)[0])
        layouts.forget(mono)
        held.append(len(layouts))
    assert max(held) == IDLE_S / 60.0 + 2  # of the last ten minutes, both ends, and of the one that stays
    assert len(numbers) == 1441
    assert set(layouts.of_track("llama").values()) == {keys("llama")}


def test_one_that_stays_keeps_its_number() -> None:
    """It is told once, however long it is written."""
    layouts = Layouts()
    told = []
    for minute in range(60):
        number, is_new = layouts.number("llama", keys("llama"), 60.0 * minute)
        layouts.forget(60.0 * minute)
        told.append((number, is_new))
    assert told == [(1, True), *[(1, False)] * 59]


def test_one_that_comes_back_has_a_new_number() -> None:
    """Its frames of before are read by the old one, which is in the store."""
    layouts = Layouts()
    assert layouts.number("llama", keys("llama"), 0.0) == (1, True)
    layouts.forget(IDLE_S + 1.0)
    assert layouts.number("llama", keys("llama"), IDLE_S + 2.0) == (2, True)


def test_what_the_store_has_no_more_is_told_anew() -> None:
    """Its frames were lost on a full disk, and so its row was pruned: the next frame of it could not be read."""
    layouts = Layouts()
    layouts.take_back("llama", keys("llama"), 7, 0.0)
    layouts.number("trend", keys("llama"), 0.0)
    layouts.forget(1.0, kept={("llama", 7)})
    assert layouts.number("llama", keys("llama"), 2.0) == (7, False)
    assert layouts.number("trend", keys("llama"), 2.0) == (9, True)
