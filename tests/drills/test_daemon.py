"""drilld without a drill of its own: what it tells whom, whom it obeys, what it refuses and writes down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import structlog
from typer.testing import CliRunner

from agent import client
from agent.__main__ import app
from agent.config import load_config
from drills import cli, daemon, heal, history, ledger, lock, owner, record, runner, schedule, tell
from drills.ledger import last_state, read
from drills.model import Drill, Refused, State, Verdict
from tests.drills.stand_ins import NOBODY, as_nobody, open_folder, runner_of
from tests.test_threads import starved

CONFIG = """
node: gpu-17
discover: false
engines: [{{name: llama, url: "http://127.0.0.1:8000"}}]
state_dir: {0}
socket: {0}/agent.sock
drills: [{{name: loss, fault: process-kill, target: {{engine: llama}}, expects: [engine-down]}}]
"""
RUN = "loss-20261129T210000Z-ab12"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What drilld, in this process, logs meanwhile is no answer of the command line.

    What runs beside these tests is no stray of theirs: nobody cannot see who holds it.
    """
    monkeypatch.setattr(heal, "heal_strays", list)
    cli.log_to_stderr()
    yield
    structlog.reset_defaults()


@pytest.fixture
def folder() -> Iterator[Path]:
    """What others may look into; `drills/` in it is root's alone."""
    with open_folder() as made:
        (made / "tocsin.yaml").write_text(CONFIG.format(made))
        yield made


@pytest.fixture
def drilld(folder: Path) -> daemon.Daemon:
    """A drilld without an agent."""
    config = load_config(folder / "tocsin.yaml", {})
    return daemon.Daemon(config, [Drill("loss", "process-kill")], [], folder / "tocsin.yaml")


@contextmanager
def serving(drilld: daemon.Daemon) -> Iterator[None]:
    """Its socket, for everybody."""
    server = daemon.serve(drilld)
    daemon.socket_of(drilld.config).chmod(0o666)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def under_way(drilld: daemon.Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """A run of drilld's own, whose runner is a stand-in."""
    made = drilld._create(drilld.drills[0], RUN, started_by="schedule", due_at=None)
    record.Record(made, drilld.drills[0], time.time, started_by="schedule").enter(State.BASELINE)
    with runner_of(made) as process:
        drilld._process, drilld._run, drilld._over = process, RUN, threading.Event()
        watching = threading.Thread(target=drilld._await, args=(process, RUN, drilld._over))
        watching.start()
        try:
            yield process
        finally:
            process.kill()
            watching.join()


def tocsin(folder: Path, *words: str, by: Callable[[], AbstractContextManager[None]] = nullcontext
           ) -> tuple[int, str, str]:
    """The command line: exit status, stdout, stderr. `by` whom: nobody may be unable to read this very code."""
    config = load_config(folder / "tocsin.yaml", {})
    loaded = folder / "tocsin.yaml", config, [Drill("loss", "process-kill")]
    with patch("getpass.getuser", lambda: "ada"), patch.object(cli, "settings", lambda *_: loaded), by():
        result = CliRunner().invoke(app, [*words, "--config", str(folder / "tocsin.yaml")])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_run_that_nobody_could_see_to_its_end_is_not_begun(drilld: daemon.Daemon) -> None:
    """A limit of threads: the runner ran, and drilld thought it under way for ever. It is deferred, with the reason."""
    drill = drilld.drills[0]
    with starved():
        verdict, why = drilld.run_due(drill, RUN, 1.0)
    assert (verdict, why.partition(":")[0]) == (Verdict.DEFERRED, "no thread for run of loss")
    assert drilld.active() is None
    kept = record.load(drilld.root / "runs" / RUN)
    assert kept is not None
    assert (kept["verdict"], kept["why"]) == ("DEFERRED", why)


# --- who may not look into drilld's folders ---------------------------------------------------------------------------


def test_a_member_of_the_drill_group_hears_how_it_went(drilld: daemon.Daemon, folder: Path) -> None:
    """`tocsin drill run` of a member never came back: it waited for a file that only root may read."""
    with under_way(drilld), serving(drilld):
        status, said, _ = tocsin(folder, "drill", "run", "loss", by=as_nobody)
        assert status == 6
        assert said.startswith(f"SKIPPED: {RUN} is under way; `tocsin drill abort` ends it")
        status, said, _ = tocsin(folder, "drill", "history", "--json", by=as_nobody)
        assert status == 0
        own, refused = json.loads(said)
        assert (own["run"], refused["verdict"], refused["drill"]) == (RUN, "SKIPPED", "loss")
        assert tocsin(folder, "report", refused["run"], by=as_nobody)[1].startswith("# Drill loss: SKIPPED")
        assert "last: SKIPPED" in tocsin(folder, "drill", "list", by=as_nobody)[1]


def test_it_waits_for_the_end_of_its_run(
    drilld: daemon.Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said PASS or nothing; now it says each state, and how it ended."""
    with under_way(drilld), serving(drilld):
        monkeypatch.setattr(drilld, "start_run", lambda *_, **__: RUN)
        ends = threading.Timer(0.3, lambda: drilld.abort("ada (uid 1000)"))
        ends.start()
        status, said, states = tocsin(folder, "drill", "run", "loss", "--json", by=as_nobody)
        ends.join()
        assert f"{RUN}: BASELINE" in states
        assert (status, json.loads(said)["verdict"]) == (5, "ABORTED")


@pytest.mark.parametrize("words", [("heal",), ("history",), ("list",)])
def test_without_drilld_and_without_rights(folder: Path, words: Sequence[str]) -> None:
    """A traceback told a member of the drill group that `drills/` is not theirs."""
    (folder / "drills" / "runs").mkdir(parents=True)
    (folder / "drills").chmod(0o700)
    status, _, said = tocsin(folder, "drill", *words, by=as_nobody)
    assert status == 2
    root = folder / "drills"
    assert said == f"tocsin drill: {root}/runs: Permission denied; {root} is drilld's own: use sudo\n"


# --- whose the state is ----------------------------------------------------------------------------------------------


def test_what_root_begins_is_drilld_s(folder: Path) -> None:
    """A run of root's in the foreground was closed to drilld, and so was the lock of all drills."""
    root = folder / "drills"
    root.mkdir(mode=0o700)
    os.chown(root, NOBODY, NOBODY)
    drill = Drill("loss", "process-kill")
    lock.take(root, RUN).release()
    made = runner.create(root, drill, RUN, started_by="root, by hand", config_path=None)
    with as_nobody():
        assert last_state(read(made)) is None
    (made / "requests.jsonl").touch(mode=0o600)
    runner.write_refused(made, drill, Verdict.SKIPPED, "no", lambda: 1.0)
    schedule.write_book(root, {})
    for one in [root / "lock", root / "schedule.json", root / "runs", *made.rglob("*"), made]:
        assert (one.stat().st_uid, one.stat().st_gid) == (NOBODY, NOBODY), one
    with as_nobody():
        assert [past.verdict for past in schedule.history_of(root)] == [Verdict.SKIPPED]


def test_nothing_else_is_given_away(folder: Path) -> None:
    """Who owned the folder put a link to a file of root's into it, and root would have given them that."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    theirs = folder / "theirs"
    theirs.mkdir()
    made = theirs / "run"
    made.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    (made / "link").symlink_to(secret)
    os.link(secret, made / "name")
    (theirs / "other").symlink_to(folder)
    owner.give(made)
    owner.give(theirs / "other")
    assert (made.stat().st_uid, secret.stat().st_uid, folder.stat().st_uid) == (NOBODY, 0, 0)


def test_one_folder_that_cannot_be_read(drilld: daemon.Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """drilld ended with a traceback, systemd started it again and again, and no drill ran on this node any more."""
    ended: list[str] = []
    monkeypatch.setattr(tell, "end_announcement", lambda _, run: ended.append(run))
    runs = drilld.root / "runs"
    for number in (1, 2):
        made = runner.create(drilld.root, drilld.drills[0], f"{RUN[:-1]}{number}", started_by="x", config_path=None)
        runner.write_refused(made, drilld.drills[0], Verdict.SKIPPED, "no", time.time)
    kept = runs / f"{RUN[:-1]}1"
    for one in (drilld.root, runs):
        one.chmod(0o755)
    for one in (runs / f"{RUN[:-1]}2").iterdir():
        one.chmod(0o644)
    (runs / f"{RUN[:-1]}2").chmod(0o755)
    with as_nobody():
        drilld.tell_overdue()
        drilld.sweep(at_start=True)
        assert drilld.last_run_at() is None
        assert lock.unsettled(drilld.root) == [
            (kept.name, "cannot be read (Permission denied), and nobody knows what of it is left")]
    assert f"{RUN[:-1]}2" in ended
    drilld.root.chmod(0o777)
    (drilld.root / "lock").touch()
    (drilld.root / "lock").chmod(0o666)
    with as_nobody(), pytest.raises(Refused, match=f"run {kept.name} cannot be read .*; `tocsin drill heal` undoes it"):
        lock.take(drilld.root, "next")


# --- abort and heal ---------------------------------------------------------------------------------------------------


def test_heal_is_asked_of_drilld_and_lets_its_run_end(drilld: daemon.Daemon, folder: Path) -> None:
    """`heal` killed the runner beside drilld, who knew of nothing; the report broke off, and named nobody."""
    with under_way(drilld) as process, serving(drilld):
        status, said, _ = tocsin(folder, "drill", "heal")
        assert (status, said) == (0, "Clean: nothing of a drill is left.\n")
        assert process.wait(30) == 5
        assert last_state(read(drilld.root / "runs" / RUN)) == State.REPORTED
        assert ledger.aborted_by(drilld.root / "runs" / RUN) == "root (uid 0), by heal"


def test_root_heals_what_drilld_s_own_user_may_not(drilld: daemon.Daemon, folder: Path) -> None:
    """`sudo tocsin drill heal`, said drilld of a run of root's; and to root, who did, it said the same again."""
    for run in (RUN, f"{RUN[:-1]}3"):
        drilld._create(drilld.drills[0], run, started_by="root, by hand", due_at=None)
    for one in (drilld.root, drilld.root / "runs", *(drilld.root / "runs" / f"{RUN[:-1]}3").rglob("*"),
                drilld.root / "runs" / f"{RUN[:-1]}3"):  # fmt: skip
        os.chown(one, NOBODY, NOBODY)
    with ExitStack() as stack:
        with as_nobody():  # its threads inherit that
            server = daemon._Server(str(folder / "drills" / "drilld.sock"), daemon._Handler)
            server.daemon = drilld
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        (folder / "drilld.sock").symlink_to(folder / "drills" / "drilld.sock")
        told = client.ask(folder / "drilld.sock", "/heal", "POST", {}, 60.0)
        assert [one["command"] for one in told["left"]] == ["sudo tocsin drill heal"]
        assert tocsin(folder, "drill", "heal")[:2] == (0, "Clean: nothing of a drill is left.\n")
        assert client.ask(folder / "drilld.sock", "/heal", "POST", {}, 60.0)["left"] == []


def test_heal_without_drilld(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """drilld is dead, and its socket still lies there: heal does it by itself."""
    asked: list[str] = []

    def heals(root: Path, *, finish: Callable[..., None], by: str) -> list[Any]:
        del root, finish
        asked.append(by)
        return []

    monkeypatch.setattr(heal, "heal", heals)
    (folder / "drilld.sock").touch()
    assert tocsin(folder, "drill", "heal", "--release", "--json") == (0, '{\n  "left": [],\n  "released": []\n}\n', "")
    assert asked == ["ada, by heal"]


def test_heal_where_drilld_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not permitted there, or is not answered, heals as well as they can."""
    def hangs(*_: object) -> None:
        raise client.AgentError("it did not answer")

    monkeypatch.setattr(client, "ask", hangs)
    monkeypatch.setattr(heal, "heal", lambda *_, **__: [])
    status, said, why = tocsin(folder, "drill", "heal")
    assert (status, said) == (0, "Clean: nothing of a drill is left.\n")
    assert why == "tocsin drill: drilld does not heal (it did not answer), so it is done here\n"


def test_abort_tells_which_run(drilld: daemon.Daemon, folder: Path) -> None:
    """A script aborted, and read words that were meant for people. And the first one who aborts is named."""
    with under_way(drilld) as process, serving(drilld):
        assert tocsin(folder, "drill", "abort", "--json")[:2] == (0, f'{{\n  "run": "{RUN}"\n}}\n')
        drilld.abort("drilld, which stops")
        assert process.wait(30) == 5
        assert read(drilld.root / "runs" / RUN)[-1].data == {"by": "root (uid 0)"}
        drilld._over.wait(30)
        assert tocsin(folder, "drill", "abort", "--json")[:2] == (0, '{\n  "run": null\n}\n')


def test_a_runner_says_who_aborted_it(drilld: daemon.Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """"aborted by SIGTERM", said the report, and nobody knew whom to ask."""
    whys: list[str] = []
    made = runner.create(drilld.root, drilld.drills[0], RUN, started_by="x", config_path=drilld.path)

    class Fake:
        def __init__(self, folder: Path, *_: object, **__: object) -> None:
            self.ledger = ledger.Ledger.open(folder)

        def execute(self, *, accept_unknown_budget: bool) -> Verdict:
            os.kill(os.getpid(), signal.SIGTERM)
            ledger.say_aborted_by(made, "ada (uid 1000, group oncall)")
            os.kill(os.getpid(), signal.SIGTERM)
            return Verdict.ABORTED

        def abort(self, why: str) -> None:
            whys.append(why)

    monkeypatch.setattr(runner, "Run", Fake)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert runner.execute(made) is Verdict.ABORTED
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert whys == ["aborted by SIGTERM", "aborted by ada (uid 1000, group oncall)"]
    assert read(made)[-1].data == {"aborted_by": "ada (uid 1000, group oncall)"}


def test_a_record_that_no_reader_can_take_is_none(tmp_path: Path) -> None:
    """A disk lost a byte, and run.json was brackets from there on: the history broke off with a RecursionError."""
    (tmp_path / "run.json").write_text('{"run": ' + "[" * 100_000)
    assert record.load(tmp_path) is None


@pytest.mark.parametrize(("text", "is_one"), [
    ("[]", False), ("{}", False), ('"x"', False), ('{"run": 1, "drill": "net"}', False),
    ('{"drill": {"name": "net"}}', True),
    ('{"drill": {"name": "net"}, "verdict": 7, "why": null, "planned_at": "yesterday", "started_at": 1e300}', True),
    ('{"drill": {"name": "net"}, "times": [], "plan": [], "rows": {}, "left": [1, {"what": "x"}]}', True),
    ('{"drill": {"name": "net"}, "planned_at": "2026-11-29T08:00:00Z", "times": {"detect_s": "soon"}}', True),
])  # fmt: skip
def test_one_odd_record_hides_no_other(text: str, is_one: bool, drilld: daemon.Daemon) -> None:
    """A run.json of another version, or mended by hand: `drill history`, the page and heal broke off at it."""
    folder = drilld._create(drilld.drills[0], RUN, started_by="ada", due_at=None)
    (folder / "run.json").write_text(text)

    rows = history.runs(drilld.root)

    assert len(rows) == is_one
    assert all(row["run"] == RUN and row["planned"] in (None, 1_795_939_200.0) for row in rows)
    assert all(row["times"]["detect_s"] is None and row["verdict"] == "unknown" for row in rows)
    assert history.reviewed(drilld.root, 0.0)["missed"] == []
    assert drilld.heal("ada") == []


def test_a_runner_that_was_killed_when_it_was_aborted(drilld: daemon.Daemon) -> None:
    """It did not end in time: the report that heal writes names who wanted it to end, and the node."""
    made = drilld._create(drilld.drills[0], RUN, started_by="ada", due_at=None)
    ledger.say_aborted_by(made, "ada")
    assert drilld.heal("drilld") == []
    found = record.load(made)
    assert found is not None
    assert found["why"] == "aborted by ada: its runner ended in PLANNED; the fault was undone by its holder or by heal"
    assert (found["node"], found["started_by"]) == ("gpu-17", "ada")
    assert "| node | gpu-17 |" in (made / "report.md").read_text()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_due_while_another_runs(drilld: daemon.Daemon) -> None:
    """Its time came in the middle of another drill, and no report ever said why it did not run."""
    with under_way(drilld):
        run = "loss-20261129T220000Z-ab12"
        assert drilld.run_due(drilld.drills[0], run, 7.0) == (
            Verdict.DEFERRED, f"{RUN} is under way; `tocsin drill abort` ends it")
        found = record.load(drilld.root / "runs" / run)
        assert found is not None
        assert (found["verdict"], found["state"], found["due_at"], found["started_by"], found["node"]) == (
            "DEFERRED", "DEFERRED", 7.0, "schedule", "gpu-17")
        assert (drilld.root / "runs" / run / "report.md").read_text().startswith("# Drill loss: DEFERRED")
        assert last_state(read(drilld.root / "runs" / run)) == State.DEFERRED


def test_a_refusal_that_cannot_be_written_stops_nothing(drilld: daemon.Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the reason is in the log, and the calendar goes on."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger.Ledger, "create", full)
    drilld.defer(drilld.drills[0], RUN, 7.0, "outside the window")
    assert drilld.run_due(drilld.drills[0], RUN, 7.0)[0] is Verdict.DEFERRED


# --- the configuration changes ----------------------------------------------------------------------------------------


def test_a_drill_that_is_no_more_has_no_ticket(drilld: daemon.Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was renamed while it was overdue, and the ticket with its old name stayed for good."""
    told: list[tuple[str, str | None]] = []

    def ask(_: Path, url: str, method: str = "GET", body: Any = None) -> Any:
        if url == "/drills/tell":
            told.append((body["subject"], body["text"]))
            return {}
        assert (url, method) == ("/alerts?resolved=0", "GET")
        return [{"rule": "no-drill", "subject": "old-name"}, {"rule": "no-drill", "subject": "loss"},
                {"rule": "engine-down", "subject": "llama"}]

    monkeypatch.setattr(client, "ask", ask)
    drilld.tell_overdue()
    assert told == [("loss", None), ("old-name", None)]


def test_the_gap_is_read_anew(drilld: daemon.Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP took the new drills and the old drill_guards.min_gap."""
    taken: list[tuple[list[str], float]] = []
    table = SimpleNamespace(load=lambda drills, gap: taken.append(([one.name for one in drills], gap)), book={})
    monkeypatch.setattr(drilld, "timetable", table)
    with (folder / "tocsin.yaml").open("a") as file:
        file.write("drill_guards: {min_gap: 1h}\n")
    drilld.reload()
    assert taken == [(["loss"], 3600.0)]
