"""The postmortem: what it says of a run, in which words, and what it never says."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent import escape
from drills import history, ledger, plots, report
from drills.config import drills_of
from drills.judge import Alarm, Counts, Delivery, Evidence, Restart, judge
from drills.model import Command, Drill, Left, Load, Plan, Request, State, Verdict
from drills.record import Record
from tests.drills.test_config import RULES, configured
from tests.needs import find, need

GOLDEN = Path(__file__).parents[1] / "golden" / "drill-report.md"
T = datetime.fromisoformat("2026-12-01T09:00:00+00:00").timestamp()
DRILL = Drill(
    "monthly-loss", "process-kill", {"engine": "llama", "url": "http://127.0.0.1:8000", "port": 8000, "part": "core"},
    load=Load("http://router.internal/v1"), owner="serving", echo="http://receiver.internal/echo",
)  # fmt: skip
EARLIER, LATER = "monthly-loss-20261103T090000Z-00aa", "monthly-loss-20261201T085800Z-01bb"
RULE = "engine-down"
SECRETS = ("SECRETPART", "hunter2", "SECRET2", "0123456789abcdef0123456789abcdef", "sk-abcdefghijkl")


def plan(run: str) -> Plan:
    """What process-kill would do."""
    return Plan("process-kill", run, ["process 4242 (VLLM::EngineCore), port 8000"],
                [Command("kill -KILL 4242", "by pidfd: no later process with this number")],
                [Command("systemctl start vllm", "if its supervisor does not")], {}, expects=[RULE],
                blast={"replicas": 1, "of": 2}, restarts=True)  # fmt: skip


def requests(at: float) -> list[Request]:
    """5/s from -120 s to 400 s: three fail right after the injection, and the first tokens are slow for 20 s."""
    chance, found = random.Random(7), []
    for k in range(-600, 2000):
        sent, failed = at + k / 5, 0 <= k < 3
        slow_s = 0.45 if 0 <= k < 100 else 0.1
        found.append(Request(f"r{k}", sent, sent, None if failed else sent + slow_s + chance.random() / 50, sent + 1.0,
                             "refused" if failed else "ok", status=None,
                             itl_s=() if failed else tuple(round(chance.uniform(0.02, 0.04), 4) for _ in range(5))))
    return found


def arrivals(at: float) -> dict[str, list[tuple[float, float]]]:
    """5/s shared by two replicas, read every 5 s; the killed one gets nothing while the fault lasts."""
    killed = [(at + s, 1000.0 + 2.5 * (min(s, 0) + max(s - 300, 0))) for s in range(-120, 401, 5)]
    other = [(at + s, 50.0 + 2.5 * s + 2.5 * min(max(s, 0), 300)) for s in range(-120, 401, 5)]
    return {"llama-a": killed, "llama-b": other}


def evidence(at: float, delivered_at: float | None) -> Evidence:
    """Of one run, injected at `at`."""
    alarm = Alarm(RULE, 30.0, True, at + 5, at + 35, delivered_at, at + 320)
    back = Restart(600.0, at + 0.4, at + 41, at + 88, at + 90, gpu_free=None)
    return Evidence(DRILL, (at - 120, at), (at, at + 300), (at + 300, at + 400), 0.5, 0.15, True,
                    "process 4242 ended by signal 9; 1 of 1 gone", requests(at), alarms=[alarm],
                    delivery=Delivery(True, 1.0, 0.0), restart=back,
                    arrivals=arrivals(at), counts=Counts([(at + s, 5.0 * s, 5.0 * s) for s in range(-120, 400)]),
                    slo_availability=0.999, slo_window_s=30 * 86400.0)  # fmt: skip


def finished(root: Path, run: str, at: float, delivered_at: float | None, drill: Drill = DRILL) -> Path:
    """The folder of a run as the runner leaves it."""
    folder = root / run
    folder.mkdir(parents=True)
    lines = b"".join(msgspec.json.encode(r) + b"\n" for r in requests(at))
    (folder / "requests.jsonl").write_bytes(lines + b'{"id": "half a li')
    now = [at - 125.0]
    record = Record(folder, drill, lambda: now[0], started_by="the schedule", due_at=at - 130)
    record.data |= {"tocsin": "0.1.0"}
    record.enter(State.LOCKED)
    record.planned(plan(run))
    record.data["guards"] = [{"name": "window", "ok": True, "why": "10:00 is inside 10:00-16:00 Europe/Berlin"}]
    record.moment("fault injected", "holder pid 4711", at)
    record.moment("fault proven", "process 4242 ended by signal 9; 1 of 1 gone", at + 1)
    record.moment("fault removed", "nothing of ours is left", at + 300)
    found = judge(replace(evidence(at, delivered_at), drill=drill))
    told = [{"id": i, "at": at + s, "state": state, "rule": RULE, "subject": "engine:llama", "severity": "page"}
            for i, s, state in ((17, 5, "pending"), (18, 35, "firing"), (19, 320, "resolved"))]
    record.judged(found, {"baseline": (at - 120, at), "fault": (at, at + 300), "recovery": (at + 300, at + 400)},
                  [{"at": at + s, "alive": False} for s in range(5)], told)
    now[0] = at + 401
    record.enter(State.REPORTED)
    record.finish(found.verdict, found.why)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one drill: in the first the notification was not delivered, in the second it was."""
    root = tmp_path_factory.mktemp("runs")
    first = finished(root, EARLIER, T - 28 * 86400, None)
    return first, finished(root, LATER, T, T + 37)


def read(folder: Path) -> dict[str, Any]:
    """report.json."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_bytes())
    return found


def record_of(folder: Path) -> dict[str, Any]:
    """run.json."""
    found: dict[str, Any] = json.loads((folder / "run.json").read_bytes())
    return found


def written(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """All four forms of a record, as files."""
    folder.mkdir(exist_ok=True)
    report.write(folder, record)
    return {form: (folder / name).read_text() for form, name in report.FILES.items()}


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_whole_of_it(runs: tuple[Path, Path]) -> None:
    """A person reads it from top to bottom: it is kept as a file, and a change to it is looked at.

    TOCSIN_GOLDEN=1 writes it anew.
    """
    text = (runs[1] / "report.md").read_text()
    if os.environ.get("TOCSIN_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_block_that_is_asked_for(runs: tuple[Path, Path]) -> None:
    """The specification names them; one was dropped with a template once and nobody saw it for a year."""
    found = read(runs[1])
    assert found["schema"] == 1
    assert found.keys() == {
        "schema", "header", "hypothesis", "left", "blast", "proof", "timeline", "times", "guards", "evidence",
        "must_holds", "impact", "replicas", "findings", "actions", "comparison", "reproduce", "samples", "transitions",
    }  # fmt: skip
    assert [(row["what"], row["offset_s"]) for row in found["timeline"]] == [
        ("fault injected", 0.0), ("target down", 0.4), ("fault proven", 1.0), ("first user-visible error", 1.0),
        ("threshold crossed, alert pending", 5.0), ("traffic shifted", 5.0), ("alert firing", 35.0),
        ("notification delivered", 37.0), ("port open again", 41.0), ("Ready", 88.0), ("first good completion", 90.0),
        ("fault removed", 300.0), ("alert resolved", 320.0),
    ]  # fmt: skip
    assert all(row["evidence"] for row in found["timeline"])


def test_times_against_limit_and_last_run(runs: tuple[Path, Path]) -> None:
    """35 s to detect of the 60 + 30 that are allowed, 37 to deliver; the last run never delivered."""
    times = {row["name"]: (row["took_s"], row["limit_s"], row["last_s"]) for row in read(runs[1])["times"]}
    assert times == {"detect": (35.0, 90.0, 35.0), "deliver": (37.0, 106.0, None), "mitigate": (5.0, 30.0, 5.0),
                     "recover": (90.0, 600.0, 90.0)}  # fmt: skip


def test_actions_are_carried_until_a_run_confirms_them(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The receiver was dead in November; in December the drill says whether somebody has mended it."""
    (opened,) = read(runs[0])["actions"]
    assert (opened["row"], opened["owner"], opened["state"]) == ("alarm.engine-down.delivered", "serving", "open")
    assert opened["due_at"] == T - 28 * 86400 + 401 + 30 * 86400
    (carried,) = read(runs[1])["actions"]
    assert (carried["run"], carried["state"]) == (EARLIER, "done: this run confirms it")
    third = finished(tmp_path / "a", "monthly-loss-20270105T090000Z-0001", T, T + 37)
    (third.parent / EARLIER).symlink_to(runs[0])
    silent = {**record_of(third), "rows": [], "verdict": "ABORTED"}
    report.write(third, silent)
    assert read(third)["actions"][0]["state"] == "open: this run could not tell"


def test_a_confirmed_action_is_not_carried_on(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """What was done in December stood in every report of the next year."""
    third = finished(tmp_path, "monthly-loss-20270105T090000Z-0001", T + 35 * 86400, T + 35 * 86400 + 37)
    for folder in runs:
        (tmp_path / folder.name).symlink_to(folder)
    report.write(third, record_of(third))
    assert read(third)["actions"] == []
    assert [row["run"] for row in read(third)["comparison"]] == [EARLIER, LATER, third.name]


def test_owner_of_nobody(tmp_path: Path) -> None:
    """An action without an owner says so."""
    folder = finished(tmp_path, EARLIER, T, None, replace(DRILL, owner=None))
    assert read(folder)["actions"][0]["owner"] == "unassigned"


def test_luck_is_told(tmp_path: Path) -> None:
    """It held by a second, and the report called it a success like any other."""
    folder = finished(tmp_path, LATER, T, T + 50)
    record = record_of(folder)
    lucky = read(folder)["findings"]["lucky"]
    assert lucky == ["alarm.engine-down.delivered: it took 15 s of the 16 s that it may take"]
    for row in record["rows"]:
        if row["name"] == "error_ratio":
            row["detail"] |= {"k": 1, "n": 473}
    report.write(folder, record)
    assert "error_ratio: 1 of 473; one more, and it would not have been proven" in read(folder)["findings"]["lucky"]


def test_a_changed_definition_is_seen(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """"Slower than last time" was a drill of twice the load."""
    changed = finished(tmp_path, "monthly-loss-20270105T090000Z-0001", T, T + 37, replace(DRILL, for_s=400.0))
    assert read(changed)["header"]["definition_version"] == 1
    (tmp_path / EARLIER).symlink_to(runs[0])
    report.write(changed, record_of(changed))
    header = read(changed)["header"]
    assert (header["definition_version"], header["definition_changed"]) == (2, True)


def test_another_drill_s_runs_are_not_its_own(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """`loss` took over the actions of `loss-2`, whose runs begin with the same letters."""
    drill = replace(DRILL, name="monthly")
    folder = finished(tmp_path, "monthly-20270105T090000Z-0001", T, T + 37, drill)
    (tmp_path / EARLIER).symlink_to(runs[0])
    report.write(folder, record_of(folder))
    assert read(folder)["actions"] == []


# --- from the first moment -------------------------------------------------------------------------------------------


def test_there_is_a_report_at_every_moment(tmp_path: Path) -> None:
    """The runner was killed in the middle: the report stood there, and said ABORTED."""
    folder = tmp_path / LATER
    folder.mkdir()
    record = Record(folder, DRILL, lambda: T, started_by="uid 0")
    steps: tuple[Callable[[], None], ...] = (
        lambda: record.enter(State.LOCKED), lambda: record.planned(plan(LATER)),
        lambda: record.moment("fault injected", "holder pid 1"),
    )  # fmt: skip
    for step in steps:
        step()
        assert "ABORTED" in (folder / "report.md").read_text().splitlines()[0]
        assert read(folder)["header"]["verdict"] == "ABORTED"
        assert "<h1>" in (folder / "report.html").read_text()
        ElementTree.parse(folder / "report.junit.xml")
    assert "the run ended without saying how" in (folder / "report.md").read_text()
    assert read(folder)["findings"]["badly"][0].startswith("nothing could be judged: the run ended")


def test_a_killed_run_has_its_plots(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """heal finishes the record of a run that never judged: its requests and its timeline are there all the same."""
    never: dict[str, object] = {"spans": {}, "rows": [], "transitions": [], "times": {}, "replicas": []}
    killed = {**record_of(runs[1]), **never, "verdict": "ABORTED"}
    folder = tmp_path / LATER
    folder.mkdir()
    (folder / "requests.jsonl").write_bytes((runs[1] / "requests.jsonl").read_bytes())
    page = written(folder, killed)["html"]
    assert page.count("<svg") == 4
    assert "first user-visible error" in page


def test_refused_runs_have_one_too(tmp_path: Path) -> None:
    """SKIPPED by a guard, nothing touched: why, and no complaint that nothing was judged."""
    folder = tmp_path / LATER
    folder.mkdir()
    record = Record(folder, DRILL, lambda: T, started_by="uid 0")
    record.finish(Verdict.SKIPPED, "lever: /etc/tocsin/NO-DRILLS is there")
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[:3] == ["# Drill monthly-loss: SKIPPED", "", "lever: /etc/tocsin/NO-DRILLS is there"]
    assert read(folder)["findings"]["badly"] == []


def test_refusals_compare_with_nothing(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Put off for six days, a run was compared with six refusals and with no run."""
    for run in runs:
        (tmp_path / run.name).symlink_to(run)
    for day in range(2, 8):
        refused = tmp_path / f"monthly-loss-2026120{day}T085800Z-0000"
        refused.mkdir()
        record = Record(refused, DRILL, lambda: T + 86400, started_by="schedule")
        record.finish(Verdict.DEFERRED, "pages: engine-down on a")
    last = tmp_path / "monthly-loss-20261209T085800Z-02cc"
    last.mkdir()
    Record(last, DRILL, lambda: T + 8 * 86400, started_by="schedule").finish(Verdict.PASS, "")
    assert [row["run"] for row in read(last)["comparison"]] == [*(run.name for run in runs), last.name]


def test_c094_what_is_left_comes_with_its_commands(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """"Clean-up failed", said the report; which command ends it had to be found out at night."""
    left = Left("table inet tocsin_0badcafe", "nsenter --net=/run/netns/a nft delete table inet tocsin_0badcafe")
    record = {**record_of(runs[1]), "verdict": "ORPHANED", "left": [msgspec.to_builtins(left)]}
    forms = written(tmp_path / LATER, record)
    for form in ("md", "html", "json"):
        assert left.command in forms[form]
    assert "## Left in the world\n" in forms["md"]
    assert read(tmp_path / LATER)["actions"][-1]["row"] == "left_in_the_world"


def test_c096_not_injected_is_no_pass(tmp_path: Path) -> None:
    """The module was missing; the report of INVALID says what is missing, and counts no success."""
    folder = tmp_path / LATER
    folder.mkdir()
    hint = "the kernel cannot do it: Error: Specified qdisc not found"
    found = judge(replace(evidence(T, None), proven=False, proof=hint, alarms=[]))
    record = Record(folder, DRILL, lambda: T, started_by="uid 0")
    record.judged(found, {}, [], [])
    record.finish(found.verdict, found.why)
    suite = ElementTree.parse(folder / "report.junit.xml").getroot()
    assert suite.get("errors") == "2"  # the row, and the verdict
    assert read(folder)["header"]["verdict"] == "INVALID"
    assert hint in read(folder)["proof"]


def test_unknown_is_written_unknown(tmp_path: Path) -> None:
    """An empty cell was read as "none"."""
    forms = written(tmp_path / "x", {})
    for wanted in ("| drill | unknown |", "| started | unknown |", "| failed | unknown |",
                   "| detect | alert firing | unknown | unknown | unknown |",
                   "| unknown | unknown of unknown | the definition names unknown |"):  # fmt: skip
        assert wanted in forms["md"], wanted
    assert not re.search(r"\bNone\b|\bnan\b", forms["md"] + forms["html"])


@given(st.dictionaries(
    st.sampled_from(sorted({"drill", "run", "rows", "timeline", "spans", "times", "plan", "left", "samples", "ended_at",
                            "started_at", "planned_at", "transitions", "impact", "guards", "verdict", "why"})),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                     st.sampled_from(["name", "verdict", "at", "what", "detail", "fault", "k", "n", "target", "load",
                                      "schedule", "holds", "window", "k", "limit_s", "blast", "commands", "text"]),
                     inner, max_size=4), max_leaves=12)))  # fmt: skip
def test_an_odd_record_costs_the_report_nothing(record: dict[str, Any]) -> None:
    """A record of another version: the report raised, and with it the runner ended in the middle of its drill."""
    folder = Path("/nonexistent/run")
    found = report.view(record, folder)
    for form in report.FORMATS:
        report.FORMATS[form](found)


def test_what_cannot_be_shown_is_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a template trips over, there is a file that says how the run ended."""
    monkeypatch.setattr(report, "view", lambda record, folder: 1 / 0)
    report.write(tmp_path, {"verdict": "FAIL", "why": "a|b"})
    assert (tmp_path / "report.md").read_text().splitlines()[0].endswith(": FAIL")
    assert "a\\|b" in (tmp_path / "report.md").read_text()


# --- text of others --------------------------------------------------------------------------------------------------


def markdown_cells(line: str) -> list[str]:
    """The cells of a table row as GitHub's renderer reads it: split at bare pipes, then backslashes undone."""
    cells = re.split(r"(?<!\\)(?:\\\\)*\|", line.strip().strip("|"))
    return [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell.strip()) for cell in cells]


def test_c103_log_text_does_not_break_the_table(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A pipe in a log line moved every later cell; a backslash before it un-escaped the escape."""
    assert escape.cell("a\\|b | c\nd") == "a\\\\\\|b \\| c d"
    record = record_of(runs[1])
    record["timeline"] = [{"at": T, "what": "a\\|b | c\nd", "evidence": "x|y|z"}]
    text = written(tmp_path / LATER, record)["md"]
    (row,) = [line for line in text.splitlines() if "x\\|y\\|z" in line]
    assert row == "| 2026-12-01 09:00:00Z | +0 s | a\\\\\\|b \\| c d | x\\|y\\|z |"


@given(st.text())
def test_any_text_is_one_cell(text: str) -> None:
    """Whatever it holds, it is one cell: no bare pipe, no line break, no control character."""
    cell = escape.cell(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*\|", cell.replace("\\|", ""))
    assert cell.isprintable()
    assert len(markdown_cells(f"| {cell} | end |")) >= 2


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("**bold** [a](http://evil.example/x) `x`", "\\*\\*bold\\*\\* \\[a\\](http://evil.example/…) \\`x\\`"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("<!channel> a&b &lt;", "&lt;!channel> a&b &amp;lt;"),
        ("p99 <= 500 ms of ttft_p99, _not_ __init__", "p99 <= 500 ms of ttft_p99, \\_not\\_ \\_\\_init\\_\\_"),
        ("## title", "#\\# title"), (">quote", "\\>quote"), ("---", "\\---"), ("===", "\\==="),
        ("# title", "\\# title"), ("- item", "\\- item"), ("1. one", "1\\. one"), ("3.5 s", "3.5 s"),
        ("a\u202eb\x00c\x1b[31m", "a\ufffdb\ufffdc\ufffd\\[31m"),
        (None, "unknown"),
    ],
)  # fmt: skip
def test_markup_of_others_is_text(said: object, shown: str) -> None:
    """A process name that was a link, in a report that people trust."""
    assert escape.cell(said) == shown


EVIL = "<!channel> <https://evil.example/pwn|remediate> a&b <script>alert(1)</script> ]]> ``` \" '"


class Page(HTMLParser):
    """Tags, text, and what a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.said = ""
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.said += data


def test_c112_text_of_others_in_every_form(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A process called `<script>`: in the page, in the Markdown, in the JUnit file and in the JSON it is only text."""
    record = json.loads(json.dumps(record_of(runs[1])).replace("VLLM::EngineCore", json.dumps(EVIL)[1:-1]))
    record |= {"why": EVIL, "timeline": [{"at": T, "what": EVIL, "evidence": EVIL}],
               "left": [{"what": EVIL, "command": EVIL}]}  # fmt: skip
    for row in record["rows"]:
        row |= {"got": EVIL, "asked": EVIL}
    record["drill"] |= {"name": EVIL, "owner": EVIL}
    forms = written(tmp_path / LATER, record)
    shown = EVIL.replace("https://evil.example/pwn", "https://evil.example/…")
    page = Page(forms["html"])
    assert not {"script", "img", "iframe", "object", "a", "link"} & set(page.tags)
    assert shown in page.said
    assert shown in "".join(str(f.get("message")) for f in ElementTree.fromstring(forms["junit"]).iter())
    assert json.loads(forms["json"])["header"]["why"] == shown
    outside = re.sub(r"(`{3,})\w*\n.*?\n\1", "", forms["md"], flags=re.DOTALL)
    assert "<script" not in outside
    assert "<!channel" not in outside
    assert "````" in forms["md"]  # a fence longer than the one in the text


def test_c109_secrets_never_enter(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A failed POST: the exception named the whole webhook, which is the credential, and the report went to a wiki."""
    leaky = [
        "POST https://hooks.slack.example/services/T000/B000/SECRETPART failed: ConnectTimeout",
        "https://u:hunter2@hook.example/x?token=SECRET2", "https://u:hun/ter2:hunter2@hook.example/",
        "Authorization: Bearer SECRETPARTxyz", "{'api_key': 'hunter2'}", "routing_key=0123456789abcdef0123456789abcdef",
        "sent 0123456789abcdef0123456789abcdef", "key sk-abcdefghijkl", "password=hunter2",
        "vllm serve m --api-key hunter2 --port 8000", "AWS_SECRET_ACCESS_KEY=SECRET2xyz", "Cookie: session=hunter2",
        "eyJhbGciOiJIUzI1NiJ9.SECRET2SECRET2.hunter2", 'password="correct hunter2 horse"', "{'passwd': 'a hunter2'}",
        "-----BEGIN PRIVATE KEY-----\nMIIEhunter2\nSECRET2==\n-----END PRIVATE KEY-----",
        "client-key-data: SECRET2SECRET2", "nvapi-SECRET2SECRET2", "github_pat_11SECRET2_SECRET2",
        "bot123456789:AAEhBOweik6adSECRET2QXMENQjcrbGbqCr",
    ]  # fmt: skip
    record = record_of(runs[1])
    record["timeline"] = [{"at": T + i, "what": text, "evidence": text} for i, text in enumerate(leaky)]
    record["samples"] = [{text: text} for text in leaky]
    record |= {"why": " ".join(leaky), "left": [{"what": t, "command": t} for t in leaky], "started_by": leaky[1]}
    load = {**record["drill"]["load"], "url": leaky[1], "prompt": "hunter2 SECRET2"}
    record["drill"] |= {"echo": leaky[1], "load": load}
    forms = written(tmp_path / LATER, record)
    for form, text in forms.items():
        assert [s for s in SECRETS if s in text] == [], form
    assert "https://hooks.slack.example/… failed: ConnectTimeout" in forms["md"]


def test_a_password_may_be_a_number() -> None:
    """`token: 0.25` says when the first one came; `password: 12345678` is one."""
    assert escape.clean("password: 12345678, pwd='1 2 3', token: 0.25") == "password: …, pwd='…', token: 0.25"


@pytest.mark.parametrize(("text", "shown"), [
    ("--api-key abcdefgh,ijklmnop --port 1", "--api-key … --port 1"),
    ('{"Authorization": "Bearer abcdefghijkl', '{"Authorization": "…'),  # the line was cut
    ('Authorization: "Basic dXNlcjpwYXNzd29y', 'Authorization: "…'),
    ('{"token": "8412907716253344", "x": 1}', '{"token": "…", "x": 1}'),
    ("access_token=1234567890, next", "access_token=…, next"),
    ("token='abcdef, don't go away, it's", "token='…, don't go away, it's"),
    ("unexpected token: '<' in JSON", "unexpected token: '<' in JSON"),
    ("npm_config_registry of zone ASIA-SOUTHEAST1", "npm_config_registry of zone ASIA-SOUTHEAST1"),
    ("key AKIAIOSFODNN7EXAMPLE", "key …"),
])  # fmt: skip
def test_a_secret_ends_where_it_ends(text: str, shown: str) -> None:
    """A key with a comma, a line cut within its quotes, a token of digits; and words that are no secret."""
    assert escape.clean(text) == shown


@pytest.mark.parametrize(
    "text",
    ["http://router.internal:8080/v1", "http://[::1]:8000/v1/chat/completions.", "max_tokens: 32", "first token: 0.25",
     "boot id 6f2b1b1e-7f3a-4f0e-9f0e-0d9d1f3f2a11", "a token came after 3 s", "GPU-5d4f12ab-1234",
     "vllm serve m --max-num-batched-tokens 8192 --tokenizer slow --hf-token -1"],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    """A report of nothing but dots helps nobody."""
    assert escape.clean(text) == text


# --- times -----------------------------------------------------------------------------------------------------------


def test_c102_timeline_is_sorted_on_instants(tmp_path: Path) -> None:
    """Offsets of two zones, sorted as text: the alert came before the fault, and times went negative."""
    events = [("2026-11-29T10:00:00+02:00", "fault injected"), ("2026-11-29T08:30:00+00:00", "alert fired"),
              ("2026-11-29t08:05:00z", "first error"), ("2026-11-29T10:59:00+02:00", "recovered")]  # fmt: skip
    record = {"drill": {"name": "x", "fault": "process-kill"}, "started_at": events[0][0],
              "timeline": [{"at": at, "what": what, "evidence": "log"} for at, what in events],
              "times": {"detect_s": 1800.0, "recover_s": 3540.0}}  # fmt: skip
    forms = written(tmp_path / "x-1", record)
    rows = [line for line in forms["md"].splitlines() if line.endswith("| log |")]
    assert rows == [
        "| 2026-11-29 08:00:00Z | +0 s | fault injected | log |",
        "| 2026-11-29 08:05:00Z | +5 min | first error | log |",
        "| 2026-11-29 08:30:00Z | +30 min | alert fired | log |",
        "| 2026-11-29 08:59:00Z | +59 min | recovered | log |",
    ]
    assert "| started | Sunday 2026-11-29 08:00:00 UTC |" in forms["md"]
    assert "| detect | alert firing | 30 min |" in forms["md"]
    assert "| recover | all as before | 59 min |" in forms["md"]


def test_a_flapping_alert_does_not_make_a_book(tmp_path: Path) -> None:
    """An alert that flapped all night: the page had 40,000 rows, and nobody saw the first."""
    told = [{"id": i, "at": T + i, "state": "firing", "rule": RULE, "subject": "engine:a"} for i in range(1000)]
    rows = report.view({"transitions": told}, tmp_path)["timeline"]
    assert (len(rows), rows[0]["at"], rows[-1]["what"]) == (301, T, "700 more")


@pytest.mark.parametrize(
    ("value", "want"),
    [(0.04, "0 s"), (59.96, "60 s"), (119.9, "119.9 s"), (120, "2 min"), (3661, "1 h 1 min 1 s"), (-3.26, "-3.3 s"),
     (None, "unknown"), (float("nan"), "unknown"), (True, "unknown"), ("5", "unknown")],
)  # fmt: skip
def test_spans(value: object, want: str) -> None:
    """"Recovered after 3540" is read as minutes by one and as seconds by the other."""
    assert escape.span(value) == want


@pytest.mark.parametrize("value", ["2026-11-29T08:00:00", "yesterday", None, float("inf"), 1e30, "", True])
def test_a_time_without_a_zone_is_no_time(value: object) -> None:
    """A naive local time was two hours off in summer only."""
    assert escape.utc(value) == "unknown"


# --- the forms -------------------------------------------------------------------------------------------------------


def test_junit(runs: tuple[Path, Path]) -> None:
    """A pipeline reads it: each row a case, the verdict one, what could not be told no success."""
    suite = ElementTree.parse(runs[0] / "report.junit.xml").getroot()
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert suite.get("timestamp") == "2026-11-03T08:57:55Z"
    assert [suite.get(n) for n in ("tests", "failures", "errors", "skipped")] == ["18", "2", "0", "1"]
    assert cases["alarm.engine-down.delivered"] == cases["verdict"] == ["failure"]
    assert cases["gpu_memory_free"] == ["skipped"]
    assert cases["goodput"] == []


def test_the_page_stands_alone(runs: tuple[Path, Path]) -> None:
    """The report of a dead router was opened behind the dead router, and its plots came from a CDN."""
    text = (runs[1] / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 5
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "xlink:href", "style", "srcset", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"url\(|@import", text)
    assert page.tags.count("style") == 1
    assert "default-src 'none'; style-src 'sha256-" in text
    assert len(text) < 200_000


def test_definition_can_be_pasted_back(tmp_path: Path) -> None:
    """"How to reproduce" held the tool's inner names, which its own configuration refused."""
    text = """drills:
  - name: a
    fault: upstream-timeout
    target: {upstream: "10.0.0.7:8001"}
    schedule: {cron: "0 10 * * TUE#1", zone: Europe/Berlin, window: "08:00-12:30", blackouts: [2026-12-20/2027-01-06],
               grace: 5d}
    load: {url: "http://router/v1", model: m, rate: 12.5/s, retries: 2, connections: new, deadline: 20s, max_tokens: 8,
           api_key_file: /run/secrets/key}
    for: 6m
    baseline: 90s
    recovery: 3m
    expects: [user-ttft-p99]
    holds: {goodput: 90% in 45s, ttft_p99: 800ms, itl_p99: null, error_ratio: 2.5%, retry_storm: false,
            degraded: {within: 2s, by: {model: small}}}
    params: {delay: 2500ms, mode: chunk}
    dry_run: true
    owner: serving
  - {name: b, fault: packet-loss, target: {engine: llama, netns: /run/netns/x}, load: {url: "http://router/v1"},
     params: {share: 30%, direction: both, peer: {netns: /run/netns/r}}}
  - {name: c, fault: disk-full, target: {path: /srv/data}, params: {leave: 2MiB}}
  - {name: d, fault: process-kill, target: {port: 8001, part: all}, holds: {goodput: null}}
  - {name: e, fault: upstream-timeout, target: {upstream: "[::1]:9000"}, load: {url: "http://router/v1"}}
"""
    asked = drills_of(configured(text, tmp_path), RULES)
    views = [report.view({"drill": msgspec.to_builtins(one)}, tmp_path / "x") for one in asked]
    shown = [view["reproduce"]["definition"] for view in views]
    again = yaml.safe_dump({"drills": [yaml.safe_load(one)["drills"][0] for one in shown]})
    assert drills_of(configured(again, tmp_path), RULES) == asked
    assert "- 2026-12-20/2027-01-06\n" in shown[0]


def test_render_is_what_is_written(runs: tuple[Path, Path]) -> None:
    """`tocsin report RUN --format …` shows what lies in the folder."""
    for form, name in report.FILES.items():
        assert report.render(record_of(runs[1]), runs[1], form) == (runs[1] / name).read_text(), form


def test_templates_are_in_the_package() -> None:
    """From a checkout it worked; the wheel had no templates."""
    wheel = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = {"drills": ["report.html.j2", "report.md.j2"],
               "agent": ["incident.html.j2", "incident.md.j2", "report.css"]}
    for package, names in shipped.items():
        assert package in wheel["targets"]["wheel"]["packages"]
        assert sorted(p.name for p in (Path(__file__).parents[2] / package / "templates").iterdir()) == names


# --- plots -----------------------------------------------------------------------------------------------------------


def test_course_by_hand() -> None:
    """Four requests in two steps of a second: counted where they were sent, the failed one seen first by a user."""
    asked = [Request("a", 99.5, 99.5, 99.6, 100.5, "ok", itl_s=(0.02, 0.04)),
             Request("b", 100.1, 100.1, None, 100.2, "refused"), Request("c", 100.2, 100.2, None, 130.2, "timeout"),
             Request("d", 100.3, 100.3, 100.4, 101.0, "ok")]  # fmt: skip
    found = plots.course(asked, (100.0, 101.0), (99.0, 102.0))
    assert found.step_s == 1
    assert {n: (s.sent, s.failed, s.ttft.total(), s.itl.total()) for n, s in found.steps.items()} == {
        -1: (1, 0, 1, 2), 0: (3, 2, 2, 0)}  # fmt: skip
    assert found.first_error is not None
    assert found.first_error.id == "b"
    slow_ms = plots.quantile_ms(found.steps[0].ttft, 0.99)
    assert slow_ms is not None
    assert abs(slow_ms / 30_000 - 1) < 0.03  # who gave up waited 30 s at least


def test_a_long_run_has_no_more_points_than_eyes_can_see() -> None:
    """A day of requests made a page of 40 MB."""
    found = plots.course((Request(str(k), k, k, k + 0.1, k + 1, "ok") for k in range(0, 86_400, 9)), (3600, 7200),
                         (0, 86_400))  # fmt: skip
    assert len(found.steps) <= plots.MOST_STEPS
    drawn = plots.plots(found, (3600, 7200), {"ttft": 0.5})
    assert sum(len(p.svg) + len(p.css) for p in drawn) < 100_000


def test_where_the_traffic_went(runs: tuple[Path, Path]) -> None:
    """Half each, then all to the one that lived, then half each; 2.5/s is 2.5/s in each step of 5 s."""
    told = {r["name"]: r for r in read(runs[1])["replicas"]}
    shares = {name: [told[name][phase] for phase in ("before", "during", "after")] for name in told}
    assert shares == {"llama-a": [0.5, 0.0, 0.5], "llama-b": [0.5, 1.0, 0.5]}
    assert [rate for at, rate in told["llama-b"]["rates"] if T + 50 < at < T + 60] == [5.0, 5.0]
    assert len(told["llama-a"]["rates"]) == 104
    assert (runs[1] / "report.html").read_text().count(">Rate per replica, requests/s<") == 1


def test_tickets_meanwhile_are_findings(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """No verdict hangs on them; that more arrived was the drill's own doing, and says so. What it announced is none."""
    record = record_of(runs[1])
    record["transitions"] += [
        {"id": 20 + i, "at": T + 40 + i, "state": state, "rule": rule, "subject": "llama", "severity": severity}
        for i, (state, rule, severity) in enumerate([
            ("firing", "qps-change", "ticket"), ("firing", "gpu-temperature", "ticket"),
            ("resolved", "gpu-temperature", "ticket"), ("firing", "gpu-temperature", "ticket"),
            ("pending", "queue-age", "ticket"), ("firing", RULE, "ticket")])]
    written(tmp_path / "tickets", record)
    badly = read(tmp_path / "tickets")["findings"]["badly"]
    assert [text for text in badly if text.startswith("ticket")] == [
        "ticket: qps-change on llama fired meanwhile (drill load)",
        "ticket: gpu-temperature on llama fired meanwhile, 2 times"]


def test_no_requests_no_plots() -> None:
    """A drill without load."""
    assert plots.plots(plots.course([], (0, 1), (0, 1)), (0, 1), {}) == []


# --- in a real browser -----------------------------------------------------------------------------------------------

CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr")  # fmt: skip


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as Chromium has built it, and what it wrote to its console."""
    command = [str(find("chromium")), *CHROMIUM, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in io.StringIO(done.stderr) if ":CONSOLE:" in line]


@pytest.mark.heavy
def test_in_chromium(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The page was right for every parser but the one that people use: its plots were blank, its console red."""
    need("chromium")
    built, console = browse(runs[1] / "report.html", tmp_path / "profile")
    assert console == []
    assert built.count("<svg") == 5
    assert built.count("</table>") == (runs[1] / "report.html").read_text().count("</table>")
    bad = tmp_path / "bad.html"
    bad.write_text((runs[1] / "report.html").read_text().replace("</body>", "<script>1</script></body>"))
    assert len(browse(bad, tmp_path / "profile")[1]) == 1  # the policy holds, and the console is really read


# --- the review of a quarter -----------------------------------------------------------------------------------------


def test_a_review_counts_what_was_held_and_missed_and_what_is_still_open(tmp_path: Path) -> None:
    """The first run lost its notification: open, until the next delivers it. One that was due and skipped is missed."""
    folders = [finished(tmp_path / "runs", EARLIER, T - 28 * 86400, None)]
    (folders[0] / ledger.LEDGER).touch()
    found = history.reviewed(tmp_path, T - 90 * 86400)
    assert (found["held"], found["missed"]) == (1, [])
    assert [(one["what"].partition(":")[0], one["run"]) for one in found["actions"]] == [
        (f"alarm.{RULE}.delivered", EARLIER)]

    folders += [finished(tmp_path / "runs", LATER, T, T + 37), finished(tmp_path / "runs", f"{LATER}x", T + 60, None)]
    for folder in folders:
        (folder / ledger.LEDGER).touch()
    skipped = record_of(folders[2])
    (folders[2] / "run.json").write_text(json.dumps({**skipped, "verdict": "SKIPPED"}))
    found = history.reviewed(tmp_path, T - 90 * 86400)
    assert (found["held"], found["missed"], found["actions"]) == (2, [skipped["run"]], [])
    assert history.reviewed(tmp_path, T - 7 * 86400)["held"] == 1  # the first is of last month
