"""The store: what was acknowledged is there after a crash, a full disk, a damaged file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.model import Alert, AlertMessage, Book, Transition
from agent.store import FrameRow, LayoutRow, NotSaved, Store, StoreError
from tests.needs import need

HOT = Alert("gpu-temperature", "GPU-1", "firing", "ticket", since=100.0, fired_at=130.0, value=91.0, limit=85.0)
DAY_S = 86400.0


def message(key: str = "n1/gpu-temperature/GPU-1", status: str = "firing", at: float = 130.0) -> AlertMessage:
    """An alert as a receiver gets it."""
    labels = {"alertname": "GpuTemperature", "subject": "GPU-1"}
    ends_at = None if status == "firing" else at + 60.0
    return AlertMessage(key, "firing" if status == "firing" else "resolved", "ticket", labels, {}, at, ends_at)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database goes."""
    return tmp_path / "state" / "tocsin.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """A new store."""
    opened = Store(path)
    yield opened
    opened.close()


def reopened(store: Store) -> Store:
    """What a new process would see after this one ended."""
    store.close()
    return Store(store.path)


def test_a_tick_survives_a_restart(store: Store) -> None:
    """The agent restarted while a GPU was hot: the alert, its history and the page owed must be there."""
    book = Book({("gpu-temperature", "GPU-1"): HOT}, {("queue-age", "llama"): 90.0})
    ids = store.commit_tick(130.0, book, [Transition("firing", 130.0, HOT)], [("webhook", message())])
    again = reopened(store)
    try:
        assert again.load_book() == book
        (row,) = again.transitions()
        assert (row["kind"], row["rule"], row["subject"], row["at"]) == ("firing", "gpu-temperature", "GPU-1", 130.0)
        assert (row["value"], row["limit"], row["severity"], row["why"]) == (91.0, 85.0, "ticket", "")
        assert row["alert"]["fired_at"] == 130.0
        (owed,) = again.owed("webhook")
        assert ([owed.id], owed.message, owed.due_at, owed.tries) == (ids, message(), 130.0, 0)
    finally:
        again.close()


def test_only_what_changed_is_written(store: Store) -> None:
    """A node with 40 open alerts wrote all of them every 5 s, for ever, to an SD card."""
    many = {("r", str(n)): replace(HOT, rule="r", subject=str(n)) for n in range(40)}
    store.commit_tick(1.0, Book(many))
    before = store._db.total_changes
    store.commit_tick(2.0, Book(many))
    assert store._db.total_changes == before
    changed = many | {("r", "7"): replace(many["r", "7"], value=92.0)}
    del changed["r", "8"]
    store.commit_tick(3.0, Book(changed, {("r", "8"): 3.0}))
    assert store._db.total_changes == before + 3
    assert store.load_book().alerts == changed


def test_history_is_asked_by_place(store: Store) -> None:
    """A reader that was away asks for what came after the last row it saw."""
    for n in range(6):
        alert = replace(HOT, subject="GPU-1" if n % 2 else "GPU-2")
        store.commit_tick(float(n), Book(), [Transition("pending", float(n), alert)])
    assert [row["at"] for row in store.transitions(last=2)] == [4.0, 5.0]
    assert [row["at"] for row in store.transitions(since_id=2, last=3)] == [2.0, 3.0, 4.0]


def test_a_notice_goes_through_its_states(store: Store) -> None:
    """The receiver was down, then took one notice and refused the other."""
    first, second = store.commit_tick(10.0, Book(), (), [("webhook", message("a")), ("webhook", message("b"))])
    store.notice_retry(first, at=11.0, due_at=15.0, error="503")
    assert [n.id for n in store.owed("webhook") if n.due_at <= 12.0] == [second]
    assert store.failing_since("webhook") == 11.0
    store.notice_retry(first, at=15.0, due_at=30.0, error="503")
    assert store.failing_since("webhook") == 11.0
    (tried,) = [n for n in store.owed("webhook") if n.id == first]
    assert (tried.tries, tried.last_error, tried.due_at) == (2, "503", 30.0)
    store.notice_delivered(first, 31.0)
    assert store.failing_since("webhook") is None
    store.notice_rejected(second, 32.0, "403")
    assert store.failing_since("webhook") is None
    assert store.outbox_counts() == {"webhook": {"pending": 0, "delivered": 1, "rejected": 1}}
    again = reopened(store)
    assert again.outbox_counts() == {"webhook": {"pending": 0, "delivered": 1, "rejected": 1}}
    assert again.owed("webhook") == []
    assert again.accepted_at("webhook") == {"a": 31.0}
    again.close()


def test_a_failing_channel_is_still_failing_after_a_restart(store: Store) -> None:
    """A restart every 4 minutes must not hide for ever that nothing is delivered (the limit is 5 minutes)."""
    (number,) = store.commit_tick(10.0, Book(), (), [("webhook", message())])
    store.notice_retry(number, at=11.0, due_at=15.0, error="refused")
    again = reopened(store)
    assert again.failing_since("webhook") == 10.0
    again.close()


def test_frames_come_back_in_the_order_in_which_they_were_told_over_many_pages(store: Store) -> None:
    """The clock stepped back in between; a preemption 50 minutes before the restart must count all the same."""
    moments = [float(n // 3) for n in range(1000, 2000)] + [float(n // 3) for n in range(1000)]
    rows = [FrameRow(f"t{n % 3}", at, 1, b"%d" % n) for n, at in enumerate(moments)]
    store.commit_tick(0.0, Book(), frames=rows, layouts=[LayoutRow("t0", 1, "[]")])
    store.commit_tick(0.0, Book(), frames=[FrameRow("t0", 5.0, 1, b"c", res="coarse")])
    again = reopened(store)
    got = list(again.frames(100.0))
    assert got == [row for row in rows if row.at >= 100.0]
    assert [row.blob for row in again.frames(0.0, "coarse")] == [b"c"]
    assert again.layouts() == [LayoutRow("t0", 1, "[]")]
    again.close()


def test_a_thousand_frames_of_one_moment(store: Store) -> None:
    """More rows share one time than a page holds: reading must neither loop nor lose one."""
    store.commit_tick(0.0, Book(), frames=[FrameRow("t", 7.0, 1, b"%d" % n) for n in range(1300)])
    assert [row.blob for row in store.frames(0.0)] == [b"%d" % n for n in range(1300)]


def test_pruning_keeps_what_somebody_may_ask_for(store: Store) -> None:
    """Last year's incident is looked up in the yearly review; a delivered notice of last month by nobody."""
    now = 500 * DAY_S
    for age_days in (401, 399, 8, 6):
        at = now - age_days * DAY_S
        ids = store.commit_tick(at, Book(), [Transition("firing", at, HOT)], [("w", message()), ("w", message("b"))])
        store.notice_delivered(ids[0], at)
    store.commit_tick(now, Book(), frames=[FrameRow("t", now - age, 1, b"") for age in (4000.0, 3000.0)])
    store.prune(now, {"raw": 3900.0})
    assert [(now - row["at"]) / DAY_S for row in store.transitions()] == [399.0, 8.0, 6.0]
    assert store.outbox_counts() == {"w": {"pending": 4, "delivered": 1}}
    sent = store.notices_of([message().key], 0.0, now)
    assert [(now - row["done_at"]) / DAY_S for row in sent] == [399.0, 8.0, 6.0]  # that it was sent is kept, not what
    assert [now - row.at for row in store.frames(0.0)] == [3000.0]


def test_facts_are_remembered(store: Store) -> None:
    """The number of GPUs was learned before the restart; one that is lost now must be missed."""
    assert store.meta("gpus") is None
    store.set_meta("gpus", {"count": 8})
    again = reopened(store)
    assert again.meta("gpus") == {"count": 8}
    again.close()


def test_the_file_is_nobody_elses(store: Store, path: Path) -> None:
    """Alert texts name hosts and models: another user of the node must not read them."""
    store.commit_tick(1.0, Book({("a", "b"): HOT}))
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file


def test_two_agents_do_not_share_one_state(store: Store, path: Path) -> None:
    """Somebody ran `tocsin run` by hand beside the service: everyone would have been paged twice."""
    with pytest.raises(StoreError, match=rf"{path}: another tocsin \(process {os.getpid()}\) uses it; stop that one"):
        Store(path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """state_dir pointed below a file; 'unable to open database file' told nobody where."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/x/tocsin\.db: cannot be opened .*set state_dir"):
        Store(tmp_path / "file" / "x" / "tocsin.db")


def test_a_newer_schema_is_not_touched(store: Store, path: Path) -> None:
    """After a downgrade the old version must not guess at tables that it does not know."""
    store._db.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(StoreError, match=r"written by a newer Tocsin \(schema 99, this one knows 2\); install"):
        Store(path)


def test_an_older_schema_is_brought_up_to_date(store: Store, path: Path) -> None:
    """An upgrade in the middle of a night: what was owed and known is there, and what is new can be kept."""
    book = Book({("gpu-temperature", "GPU-1"): HOT})
    store.commit_tick(130.0, book, [Transition("firing", 130.0, HOT)], [("webhook", message())])
    for name in ("TABLE incidents", "TABLE days", "INDEX transitions_by_time", "INDEX notices_by_key"):
        store._db.execute(f"DROP {name}")
    store._db.execute("PRAGMA user_version=1")
    again = reopened(store)
    try:
        assert again.load_book() == book
        assert len(again.owed("webhook")) == 1
        assert again.incidents() == []
        again.add_days([(20_000, "llama", 10.0, 1.0, 9.0, 2.0, 90.0, 3.0)], {"llama": 5.0})
        assert len(again.days(0)) == 1
    finally:
        again.close()


def incident(name: str, opened_at: float, ended_at: float | None) -> dict[str, object]:
    """A record, as far as the store knows it."""
    return {"id": name, "opened_at": opened_at, "ended_at": ended_at, "members": []}


def test_incidents_are_kept_with_their_tick_and_changed_by_a_later_one(store: Store) -> None:
    """Killed right after the page: the incident is there; its end replaces it, and an old one goes."""
    now = 500 * DAY_S
    store.commit_tick(now, Book(), incidents=[incident("a", 10.0, 20.0), incident("b", now, None)])
    again = reopened(store)
    try:
        again.commit_tick(now, Book(), incidents=[incident("b", now, now + 60.0)])
        assert [(one["id"], one["ended_at"]) for one in again.incidents()] == [("a", 20.0), ("b", now + 60.0)]
        assert [one["id"] for one in again.incidents(now)] == ["b"]
        again.prune(now, {})
        assert [one["id"] for one in again.incidents()] == ["b"]
    finally:
        again.close()


def test_days_add_up_and_none_counts_twice(store: Store) -> None:
    """Each minute adds to its day in one transaction with up to where it was counted; handed in again it is nothing."""
    for at in (60.0, 120.0, 120.0):
        store.add_days([(0, "llama", 10.0, 1.0, 9.0, 2.0, 90.0, 3.0)], {"llama": at})
    assert store.days(0) == [{"day": 0, "target": "llama", "requests": 20.0, "errors": 2.0, "ttft": 18.0,
                              "ttft_slow": 4.0, "itl": 180.0, "itl_slow": 6.0}]
    assert store.meta("accounted") == {"llama": 120.0}


@pytest.mark.parametrize("damage", ["no database at all", "a page of zeros"])
def test_a_damaged_file_is_moved_aside(store: Store, path: Path, damage: str) -> None:
    """A power cut damaged the file: the agent must start and watch, and say what it no longer knows."""
    book = Book({("r", str(n)): replace(HOT, rule="r", subject=str(n)) for n in range(400)})
    store.commit_tick(1.0, book)
    store.close()
    if damage == "no database at all":
        path.write_bytes(b"not a database, but long enough to be looked at " * 100)
    else:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(size - 8192))
    again = Store(path)
    assert again.load_book() == Book()
    (note,) = again.notes
    assert f"{path} is damaged" in note
    assert "alerts that were open fire again" in note
    (aside,) = [p for p in path.parent.iterdir() if ".broken-" in p.name]
    assert str(aside) in note
    again.commit_tick(2.0, book)
    assert reopened(again).load_book() == book


def test_a_bit_that_turned_over_costs_its_row_alone(store: Store, path: Path) -> None:
    """A bad disk made a byte of an alert no text and a fact no JSON. Its pages are in order, so SQLite sees nothing."""
    store.commit_tick(1.0, Book({("r", str(n)): replace(HOT, rule="r", subject=str(n)) for n in range(3)}), (),
                      [("hook", message("a"))])
    store.set_meta("boot", "b1")
    store.set_meta("learned", {"targets": {}})
    store.close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE alerts SET alert=CAST(REPLACE(CAST(alert AS BLOB), CAST('firing' AS BLOB), X'66ff') AS TEXT)"
                " WHERE subject='1'")
    raw.execute("UPDATE meta SET value='{\"targets\": {' WHERE name='learned'")
    raw.commit()
    raw.close()
    again = Store(path)
    assert set(again.load_book().alerts) == {("r", "0"), ("r", "2")}
    assert [notice.message.key for notice in again.owed("hook")] == ["a"]
    assert (again.meta("boot"), again.meta("learned")) == ("b1", None)
    assert [note.partition(": ")[2].partition(" cannot")[0] for note in again.notes] == ["the fact learned",
                                                                                     "the alert r of 1"]
    again.close()


def test_a_row_of_another_kind_moves_the_file_aside(store: Store, path: Path) -> None:
    """What cannot be read at all must not keep the agent from starting, again and again."""
    store.commit_tick(1.0, Book(), (), [("hook", message("a"))])
    store.close()
    raw = sqlite3.connect(path)
    raw.execute("ALTER TABLE resolved RENAME COLUMN at TO other")
    raw.commit()
    raw.close()
    again = Store(path)
    assert again.owed("hook") == []
    (aside,) = [p for p in path.parent.iterdir() if ".broken-" in p.name]
    assert any(str(aside) in note for note in again.notes)
    again.commit_tick(2.0, Book(), (), [("hook", message("b"))])
    assert [notice.message.key for notice in again.owed("hook")] == ["b"]
    again.close()


def test_a_file_that_breaks_while_in_use_costs_no_alert(store: Store, path: Path) -> None:
    """The disk went bad under a running agent: what memory holds goes into a new file, and the page goes out."""
    hot = {("gpu-temperature", "GPU-1"): HOT}
    store.set_meta("boot", "b1")
    (first,) = store.commit_tick(1.0, Book(hot), (), [("webhook", message("a"))])
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    store._db.execute("PRAGMA shrink_memory")  # pages in SQLite's cache hide the damage until they are read again
    (second,) = store.commit_tick(2.0, Book(hot), [Transition("firing", 2.0, HOT)], [("webhook", message("b"))])
    assert len(store.notes) == 1
    assert store.problem is None
    again = reopened(store)
    assert [n.id for n in again.owed("webhook")] == [first, second]
    assert again.load_book() == Book(hot)
    assert again.meta("boot") == "b1"
    assert len(again.transitions()) == 1
    again.close()


def fill(store: Store) -> None:
    """Leave the database no room to grow."""
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")


def free(store: Store) -> None:
    """Somebody freed some space."""
    store._db.execute("PRAGMA max_page_count=1000000")


def test_a_full_disk_does_not_silence_a_page(store: Store) -> None:
    """The log filled the disk, which is why the engine broke: the page about it must ring, and be saved later."""
    big = replace(HOT, annotations={"evidence": "x" * 40000})
    fill(store)
    with pytest.raises(NotSaved, match=r"the disk is full; free some space on .*/state"):
        store.commit_tick(1.0, Book({("a", "b"): big}), [Transition("firing", 1.0, big)], [("webhook", message())])
    assert "disk is full" in (store.problem or "")
    (owed,) = store.owed("webhook")
    assert [row["kind"] for row in store.transitions()] == ["firing"]
    store.notice_delivered(owed.id, 2.0)
    assert store.owed("webhook") == []
    free(store)
    store.commit_tick(3.0, Book({("a", "b"): big}))
    assert store.problem is None
    again = reopened(store)
    assert again.load_book().alerts == {("a", "b"): big}
    assert len(again.transitions()) == 1
    assert again.outbox_counts() == {"webhook": {"pending": 0, "delivered": 1}}
    assert again.accepted_at("webhook") == {message().key: 2.0}
    again.close()


def test_a_disk_that_is_full_for_a_day_is_two_lines_in_the_log(store: Store) -> None:
    """It was two lines a tick, 34,000 a day, on the very disk that was full; and the next outage is told anew."""
    frame = FrameRow("t", 1.0, 7, bytes(40000))
    with capture_logs() as logged:
        for _ in range(2):
            fill(store)
            for now in range(100):
                with pytest.raises(NotSaved):
                    store.commit_tick(float(now), Book(), frames=[frame])
                store.set_meta("learned", "x" * 40000 + str(now))
            free(store)
            store.commit_tick(100.0, Book(), frames=[frame])
    assert [line["event"] for line in logged] == ["database_not_saved", "database_saved"] * 2


def test_a_small_write_that_fits_does_not_hide_that_ticks_are_not_saved(store: Store) -> None:
    """On the full disk a fact and a short tick still fit; what is said ends when the tick's own frames are saved."""
    fill(store)
    frames = [FrameRow("t", 1.0, 7, bytes(40000))]
    for now in (1.0, 2.0):
        with pytest.raises(NotSaved, match="the disk is full"):
            store.commit_tick(now, Book(), frames=[frames[0]._replace(at=now)])
        store.set_meta("learned", now)  # fits
        assert "the disk is full" in (store.problem or "")
    with pytest.raises(NotSaved, match="the disk is full"):
        store.commit_tick(3.0, Book())  # it has nothing to save but what the one before it left
    free(store)
    store.set_meta("learned", 3.0)
    assert "the disk is full" in (store.problem or "")
    store.commit_tick(4.0, Book())
    assert store.problem is None
    again = reopened(store)
    assert again.meta("learned") == 3.0
    assert [row.at for row in again.frames(0.0)] == [2.0]
    again.close()


def test_a_row_that_cannot_be_stored_spoils_one_tick_only(store: Store) -> None:
    """A label held half a surrogate pair: that commit fails aloud, its page goes out, and the next one works."""
    bad = replace(HOT, subject="\ud800")
    with pytest.raises(UnicodeEncodeError):
        store.commit_tick(1.0, Book(), [Transition("firing", 1.0, bad)], [("webhook", message())])
    assert len(store.owed("webhook")) == 1
    store.commit_tick(2.0, Book({("a", "b"): HOT}))
    assert len(reopened(store).load_book().alerts) == 1


def test_a_number_that_is_taken_is_a_file_that_is_damaged(store: Store) -> None:
    """A page of the file was lost, and with it what the largest number is: each tick that paged failed, unsaved."""
    store.commit_tick(1.0, Book(), (), [("webhook", message("1"))])
    store._next_notice = 1
    store.commit_tick(2.0, Book({("a", "b"): HOT}), (), [("webhook", message("2"))])
    assert "is damaged" in store.notes[-1]
    again = reopened(store)
    assert [notice.message.key for notice in again.owed("webhook")][-1] == message("2").key
    assert again.load_book().alerts == {("a", "b"): HOT}
    again.close()


def test_layouts_outlive_a_full_disk(store: Store) -> None:
    """Of the full hours the last frames are kept, and those after it must be readable: their layout was told once."""
    fill(store)
    with pytest.raises(NotSaved):
        store.commit_tick(1.0, Book(), frames=[FrameRow("t", 1.0, 7, b"x")], layouts=[LayoutRow("t", 7, "k" * 40000)])
    free(store)
    store.commit_tick(2.0, Book(), frames=[FrameRow("t", 2.0, 7, b"y")])
    again = reopened(store)
    assert [row.blob for row in again.frames(0.0)] == [b"x", b"y"]
    assert [row.layout for row in again.layouts()] == [7]
    again.close()


@pytest.mark.heavy
def test_a_file_system_that_is_read_only_at_the_start(tmp_path: Path) -> None:
    """The node came up with its disk read-only: what was owed goes out, what is new is kept, and is on disk later."""
    need("root")
    path = tmp_path / "tocsin.db"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    try:
        before = Store(path)
        before.commit_tick(1.0, Book({("a", "b"): HOT}), [Transition("firing", 1.0, HOT)], [("webhook", message("1"))])
        before.close()
        for owed in (1, 2):  # the second time with what a killed process left: a -wal
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
            store = Store(path)
            assert "Read-only file system" in (store.problem or "")
            assert store.load_book().alerts == {("a", "b"): HOT}
            assert len(store.owed("webhook")) == owed
            store.commit_tick(2.0, Book({("a", "b"): HOT}), (), [("webhook", message(str(owed + 1)))])
            assert "Read-only file system" in (store.problem or "")
            subprocess.run(["mount", "-o", "remount,rw", str(tmp_path)], check=True)
            store.commit_tick(3.0, Book({("a", "b"): HOT}))
            assert store.problem is None
            with pytest.raises(StoreError, match="another tocsin"):
                Store(path)
            left = tmp_path / "left"  # as kill -9 leaves them
            left.mkdir(exist_ok=True)
            names = [f"{path.name}{end}" for end in ("", "-wal", "-shm")]
            for name in names:
                shutil.copy(tmp_path / name, left / name)
            store.close()
            for name in names:
                shutil.copy(left / name, tmp_path / name)
        again = reopened(before)
        assert len(again.owed("webhook")) == 3
        assert [row["kind"] for row in again.transitions()] == ["firing"]
        again.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.heavy
def test_a_really_full_file_system(tmp_path: Path) -> None:
    """The same on a real tmpfs: SQLite's own files meet ENOSPC, and the process must not die of SIGBUS."""
    need("root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    try:
        store = Store(tmp_path / "tocsin.db")
        store.commit_tick(0.0, Book({("a", "b"): HOT}))
        ballast = tmp_path / "ballast"
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(5_000_000))
        change = [Transition("firing", 1.0, replace(HOT, annotations={"e": "x" * 20000}))]
        for tick in range(20):
            with pytest.raises(NotSaved, match="disk is full"):
                store.commit_tick(float(tick), Book(), change, [("webhook", message(str(tick)))])
        assert len(store.owed("webhook")) == 20
        ballast.unlink()
        store.commit_tick(99.0, Book())
        again = reopened(store)
        assert len(again.owed("webhook")) == 20
        assert len(again.transitions()) == 20
        again.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


CHILD = """
import sys
from pathlib import Path
from agent.model import Alert, AlertMessage, Book, Transition
from agent.store import FrameRow, Store

store = Store(Path(sys.argv[1]))
number = len(store.transitions(last=10**9))
while True:
    alert = Alert("r", str(number), "firing", "page", since=1.0, value=float(number))
    message = AlertMessage(str(number), "firing", "page", {"alertname": "R"}, {}, 1.0)
    frames = [FrameRow("t", float(number), 1, bytes(2000))]
    store.commit_tick(1.0, Book({("r", "s"): alert}), [Transition("firing", 1.0, alert)], [("w", message)], frames)
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.heavy)])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    """The kernel killed the agent for memory in the middle of a page, again and again."""
    path = tmp_path / "tocsin.db"
    dice = random.Random(7)
    acknowledged = 0
    for _ in range(kills):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline()  # it works; from here on any moment will do
        time.sleep(dice.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")[:-1]
        acknowledged = int(rest[-1]) if rest else acknowledged + 1
        child.wait()
        child.stdout.close()
        store = Store(path)
        assert store.notes == []
        rows = store.transitions(last=10**9)
        assert len(rows) >= acknowledged
        assert [row["subject"] for row in rows] == [str(n) for n in range(len(rows))]
        assert [n.message.key for n in store.owed("w")] == [row["subject"] for row in rows]
        assert store.load_book().alerts["r", "s"].value == len(rows) - 1
        assert len(list(store.frames(0.0))) == len(rows)
        acknowledged = len(rows)
        store.close()


def test_channels_and_the_tick_write_at_once(store: Store) -> None:
    """Four channel threads mark their notices while the tick commits: no 'database is locked', nothing lost."""
    names = [f"c{n}" for n in range(4)]

    def deliver(name: str) -> None:
        done = 0
        while done < 50:
            for notice in store.owed(name):
                store.notice_delivered(notice.id, 1.0)
                done += 1

    threads = [threading.Thread(target=deliver, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for n in range(50):
        store.commit_tick(1.0, Book(), (), [(name, message(str(n))) for name in names])
    for thread in threads:
        thread.join(20)
    assert store.outbox_counts() == {name: {"pending": 0, "delivered": 50} for name in names}
