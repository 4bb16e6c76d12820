"""The command line: verdicts and exit codes that others script against, and sentences that say what to do next."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import show
from agent.__main__ import main
from agent.advise import CHECKLISTS
from agent.model import Rule
from agent.web.app import PRIVATE, make_app
from agent.web.server import serve_unix
from agent.words import place
from rules.exported import files
from tests import told_incident
from tests.receiver import Receiver, Reply
from tests.test_web import CATALOGUE, NOW, FakeView

ROOT = Path(__file__).resolve().parents[1]
RECORDING = Path(__file__).parent / "data"


def signal(number: str | None, rule: str, state: str, value: float | None = None, **more: Any) -> dict[str, Any]:
    """A row of `check`; what is not given is as for a healthy engine `llama`."""
    row: dict[str, Any] = {
        "number": number, "rule": rule, "subject": "llama", "state": state, "value": value, "unit": "ratio",
        "limit": 0.85, "method": "exact", "age_s": 1.2, "why": None, "severity": "ticket", "required": True,
        "evidence": {}, "text": "",
    }  # fmt: skip
    return {**row, **more}


HOT = signal(
    "H9", "gpu-temperature", "BREACH", 91.0, subject="GPU-1", unit="celsius", limit=85.0, method="NVML", text="91 °C"
)
SLOW = signal(
    "H5", "ttft-p99", "PENDING", 0.034, limit=0.01, severity="page", method="histogram",
    text="p99 612 ms (SLO 500 ms), 34 to 40 of 1000 slow",
)  # fmt: skip
BLIND = signal("H2", "kv-cache-utilization", "UNKNOWN", why="vllm:kv_cache_usage_perc is gone")
FINE = signal("H2", "kv-cache-utilization", "OK", 0.42)
NOT_HERE = signal("H4", "graph-fallback", "N/A", required=False, why="vLLM does not tell it")
STUCK = signal("L2", "engine-stuck", "OK", 0.0, unit="of limit", limit=1.0)


def answer(verdict: str, *signals: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": verdict, "node": "gpu-17", "signals": list(signals)}


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `tocsin …` in this process, with a configuration of its own: exit code, stdout, stderr."""
    config = tmp_path / "tocsin.yaml"
    config.write_text(f"node: gpu-17\nnvml: off\ndiscover: false\nsocket: {tmp_path}/t.sock\nrules: {{dirs: []}}\n")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tocsin", "--config", str(config), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int | None)
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def view(tmp_path: Path) -> Iterator[FakeView]:
    """An agent that answers on the socket of `cli`'s configuration."""
    view = FakeView()
    server = serve_unix(make_app(view, CATALOGUE, lambda: NOW, routes=PRIVATE), tmp_path / "t.sock")
    yield view
    server.close()


@pytest.fixture
def oneshot(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What the command line asks where no agent runs, played."""
    module = types.ModuleType("agent.oneshot")
    monkeypatch.setitem(sys.modules, "agent.oneshot", module)
    return module


# ---- check ----


@pytest.mark.parametrize(
    ("verdict", "signals", "code", "says"),
    [
        ("healthy", [FINE, NOT_HERE, STUCK], 0, "HEALTHY: 2 in range"),
        ("ticket", [FINE, HOT], 1, "TICKET: gpu-temperature on GPU-1 is 91 °C (limit 85 °C)"),
        (
            "page",
            [BLIND, HOT, SLOW],
            2,
            f"PAGE: ttft-p99 on llama is 3.4 % (limit 1 %): {SLOW['text']}, pending, and 1 more out of range",
        ),
        (
            "unknown",
            [BLIND, NOT_HERE],
            3,
            "UNKNOWN: cannot tell kv-cache-utilization of llama, because vllm:kv_cache_usage_perc is gone",
        ),
        ("unknown", [], 3, "UNKNOWN: found nothing to watch"),
        ("unknown", [signal("H7", "node-error-burn-fast", "IDLE")], 3, "UNKNOWN: found nothing to watch"),
    ],
)
def test_check_is_a_verdict_in_words_and_an_exit_code(
    cli: Cli, view: FakeView, verdict: str, signals: list[dict[str, Any]], code: int, says: str
) -> None:
    """A cron job looks at the exit code, a person at the last line; both must say the same."""
    view.checked = answer(verdict, *signals)
    got, out, err = cli("check")
    assert (got, out.splitlines()[-1], err) == (code, says, "")
    got, out, _ = cli("check", "--json")
    assert (got, json.loads(out)) == (code, view.checked)


def test_check_shows_the_ten_first(cli: Cli, view: FakeView) -> None:
    """H10 comes after H9, not after H1; of the rest only what is not in range; a pipe gets it plain and whole."""
    h10 = signal("H10", "prefix-cache-hit-rate", "OK", 0.61, limit=0.5)
    hot = dict(HOT)
    errors = signal("M6", "error-rate", "BREACH", 0.021, limit=0.01, method="engine (lower bound)")
    view.checked = answer("ticket", STUCK, h10, errors, NOT_HERE, hot, FINE)
    _, out, _ = cli("check")
    assert out == (
        "The ten on gpu-17\n"
        "#    RULE                   STATE   VALUE  LIMIT  SUBJECT    AGE  METHOD  WHY\n"
        "H2   kv-cache-utilization   OK       42 %   85 %  llama    1.2 s  exact\n"
        "H4   graph-fallback         N/A         –   85 %  llama    1.2 s  exact   vLLM does not tell it\n"
        "H9   gpu-temperature        BREACH  91 °C  85 °C  GPU-1    1.2 s  NVML\n"
        "H10  prefix-cache-hit-rate  OK       61 %   50 %  llama    1.2 s  exact\n"
        "\n"
        "The rest\n"
        "#   RULE        STATE   VALUE  LIMIT  SUBJECT    AGE  METHOD\n"
        "M6  error-rate  BREACH  2.1 %    1 %  llama    1.2 s  engine (lower bound)\n"
        "\n"
        "1 of the rest are in range, idle or not applicable; --all shows them.\n"
        "TICKET: gpu-temperature on GPU-1 is 91 °C (limit 85 °C), and 1 more out of range\n"
    )
    view.checked["signals"][4]["action"] = "Look at cooling."
    _, out, _ = cli("check", "--all")
    assert out.endswith("and 1 more out of range\nDo: Look at cooling.\n")
    assert "L2  engine-stuck  OK" in out
    assert "--all shows them" not in out


def test_what_is_quiet_on_eight_engines_is_one_row(cli: Cli, view: FakeView) -> None:
    """Ten rules on eight engines are eighty rows, and the one that matters is on the screen before."""
    quiet = [signal("H2", "kv-cache-utilization", "OK", n / 10, subject=f"e{n}") for n in range(1, 8)]
    full = signal("H2", "kv-cache-utilization", "BREACH", 0.97, subject="e8")
    view.checked = answer("ticket", *quiet, full)
    _, out, _ = cli("check")
    rows = [re.split(" {2,}", line) for line in out.splitlines() if line.startswith("H2")]
    assert [row[2:6] for row in rows] == [
        ["OK", "10 % to 70 %", "85 %", "7 subjects"],
        ["BREACH", "97 %", "85 %", "e8"],
    ]
    assert cli("check", "--all")[1].count("H2 ") == 8


def test_an_engine_cannot_steer_the_terminal(cli: Cli, view: FakeView) -> None:
    """A page's bad line, quoted as the reason, held an escape sequence that renamed the window."""
    view.checked = answer("unknown", {**BLIND, "why": "bad line \x1b]0;owned\x07 [red]x[/red]\nPAGE: no"})
    _, out, _ = cli("check")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[red]x[/red] PAGE: no" in out.splitlines()[-1]


def test_check_without_an_agent_looks_for_itself(cli: Cli, oneshot: types.ModuleType, tmp_path: Path) -> None:
    """On a laptop: no GPU, no engine, no configuration. It says what it looked for, and exits 3."""
    asked: list[float] = []

    def sample(settings: Any, watch_for_s: float, progress: Callable[[str], None], *, gpus: bool) -> dict[str, Any]:
        asked.append(watch_for_s)
        assert not gpus
        progress("looking")
        return {**answer("unknown"), "looked_for": ["GPUs: no libnvidia-ml.so.1", "engines: none is configured"]}

    oneshot.sample = sample  # type: ignore[attr-defined]
    code, out, err = cli("check", "--watch-for", "2m")
    assert (code, asked) == (3, [120.0])
    assert out == (
        "Looked for GPUs: no libnvidia-ml.so.1\n"
        "Looked for engines: none is configured\n"
        "UNKNOWN: found nothing to watch\n"
    )  # fmt: skip
    assert err == f"tocsin: no agent answers on {tmp_path}/t.sock; sampling for myself, 120 s\n"
    code, out, _ = cli("check", "--json")
    assert (code, json.loads(out)["verdict"], asked[-1]) == (3, "unknown", 15.0)


def test_an_agent_that_fails_is_not_healthy(cli: Cli, view: FakeView) -> None:
    """A broken agent must not be replaced by a quick look that finds everything fine."""
    view.broken = True
    code, out, err = cli("check")
    assert code == 3
    assert "HEALTHY" not in out
    assert re.search(r"answered 500: .* error_id [0-9a-f]{8}\n$", err)


def test_ctrl_c_is_quiet(cli: Cli, oneshot: types.ModuleType) -> None:
    """The person lost patience; they do not want a traceback for it."""

    def sample(*_: object, **__: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    oneshot.sample = sample  # type: ignore[attr-defined]
    code, out, err = cli("check")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# ---- the others ----


def test_alerts_are_the_agent_s(cli: Cli, view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fires first; what is over keeps its times."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    row = {
        "rule": "queue-age", "subject": "llama", "severity": "page", "value": 4.0, "limit": 0.25, "incident": None,
        "since": 0.0, "until": None, "summary": "queue-age 4 s, limit 250 ms: llama on gpu-17",
    }  # fmt: skip
    over = {**row, "state": "resolved", "until": 60.0}
    monkeypatch.setattr(view, "alerts", lambda include_resolved: [over, {**row, "state": "firing", "since": 86400.0}])
    code, out, _ = cli("alerts")
    assert code == 0
    lines = [re.split(" {2,}", line) for line in out.splitlines()[1:3]]
    assert lines[0][:6] == ["firing", "page", "queue-age", "llama", "1970-01-02 00:00:00", "–"]
    assert lines[1][:6] == ["resolved", "page", "queue-age", "llama", "1970-01-01 00:00:00", "1970-01-01 00:01:00"]
    assert json.loads(cli("alerts", "--json")[1])[0] == over
    monkeypatch.setattr(view, "alerts", lambda include_resolved: [])
    assert cli("alerts")[:2] == (0, "No alert is open, and none is remembered.\n")


def test_alerts_stats_are_a_row_a_rule(cli: Cli, view: FakeView) -> None:
    """Two pages of which one was over within 5 minutes: no word about noise; with another one there is."""
    def fired(at: float, lasted_s: float) -> list[dict[str, Any]]:
        row = {"rule": "itl-p99", "subject": "llama", "severity": "page", "silenced": False}
        return [row | {"kind": "firing", "at": at}, row | {"kind": "resolved", "at": at + lasted_s}]

    assert cli("alerts", "stats")[1].startswith("No alert has fired since ")
    view.changes = [*fired(NOW - 9000, 60), *fired(NOW - 5000, 660)]
    code, out, _ = cli("alerts", "stats", "--last", "7d")
    assert (code, out.splitlines()[2].split()[:8]) == (0, ["itl-p99", "page", "2", "1", "0", "0", "12", "min"])
    assert "let people sleep" not in out
    view.changes += fired(NOW - 1000, 60)
    assert "itl-p99: 2 of 3 pages were over within 5 min; a longer `for:`" in cli("alerts", "stats")[1]
    told = json.loads(cli("alerts", "stats", "--json")[1])
    assert {key: told["rules"][0][key] for key in ("rule", "fired", "short", "total_s")} == {
        "rule": "itl-p99", "fired": 3, "short": 2, "total_s": 780.0}
    assert cli("alerts", "stats", "--last", "soon")[0] == 2


def test_a_silence_is_made_listed_and_ended(cli: Cli, view: FakeView) -> None:
    """What it mutes and until when; and its end, by number or by what it was made for."""
    assert "No silence holds" in cli("silence", "--list")[1]
    code, out, err = cli("silence", "gpu-temperature", "GPU-1", "--for", "2h", "--why", "fans are swapped")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("Silence 1: gpu-temperature of GPU-1 until ")
    assert out.splitlines()[-1] == "End it earlier: tocsin unsilence 1"
    assert (view.muted[0].until, view.muted[0].why) == (NOW + 7200, "fans are swapped")
    assert "gpu-temperature" in cli("silence", "--list")[1]
    assert json.loads(cli("silence", "--list", "--json")[1])["silences"][0]["subject"] == "GPU-1"
    assert cli("unsilence", "gpu-temperature", "GPU-1")[:2] == (
        0, "Ended: gpu-temperature of GPU-1; what fires pages from now on\n")
    assert cli("maintenance", "--for", "30m", "--why", "driver")[1].startswith("Silence 2: all of this node until")
    assert cli("maintenance", "--end")[:2] == (0, "Ended: all of this node; what fires pages from now on\n")


@pytest.mark.parametrize(("words", "says"), [
    (["silence"], "name a RULE"), (["silence", "itl-p99"], "an end and a reason"),
    (["silence", "itl-p99", "--for", "2h"], "an end and a reason"),
    (["silence", "itl-p99", "--for", "2h", "--why", " "], "an end and a reason"),
    (["silence", "itl-p99", "--for", "8d", "--why", "x"], "at most 7d"),
    (["silence", "itl-p99", "--for", "2", "--why", "x"], "missing unit"),
    (["silence", "itl-p99", "--list"], "--list alone"), (["unsilence", "77"], "no such silence"),
    (["maintenance", "--end", "--for", "2h"], "--end stands alone"), (["maintenance", "--for", "2h"], "an end and a"),
])
def test_a_silence_that_cannot_be_is_refused_with_the_remedy(cli: Cli, view: FakeView, words: list[str], says: str,
                                                            ) -> None:
    """Exit 2, one sentence, and nothing muted."""
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert view.muted == ()


def test_a_silence_says_how_to_mute_alertmanager_too(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """There every alert goes on arriving: whoever is paged by it would wonder."""
    del view
    config = tmp_path / "tocsin.yaml"
    config.write_text(config.read_text() + 'notify: [{alertmanager: {urls: ["http://am:9093"]}}]\n')
    out = cli("silence", "gpu-*", "--for", "2h", "--why", "it's me")[1]
    assert out.splitlines()[-1] == (
        "Alertmanager is told as ever; to mute it there: amtool silence add --alertmanager.url=http://am:9093"
        """ 'node="gpu-17"' 'rule=~"gpu-.*"' --duration=7200s '--comment=it'"'"'s me'""")


@pytest.mark.parametrize(("words", "file"), [
    (["prometheus"], "tocsin-engines.rules.yml"), (["prometheus", "--over", "tocsin"], "tocsin.rules.yml"),
    (["alertmanager"], "alertmanager.yml"),
])
def test_rules_export_writes_what_ships(cli: Cli, tmp_path: Path, words: list[str], file: str) -> None:
    """Where nothing is configured; to stdout, or to a file."""
    code, out, err = cli("rules", "export", "--format", *words)
    assert (code, out, err) == (0, files()[f"prometheus/{file}"], "")
    assert cli("rules", "export", "--format", *words, "-o", str(tmp_path / "x")) == (0, "", "")
    assert (tmp_path / "x").read_text() == out
    code, out, err = cli("rules", "export", "--format", *words, "-o", str(tmp_path / "no" / "x"))
    assert (code, out, "No such file" in err) == (2, "", True)


def test_alerts_without_an_agent_say_how_to_start_one(cli: Cli) -> None:
    """An empty list would read as: all is well."""
    code, out, err = cli("alerts")
    assert (code, out) == (3, "")
    assert "start it with `systemctl start tocsin` or `tocsin run`" in err


FOUND = {"name": "kv_usage", "subject": "llama", "how": "vllm:kv_cache_usage_perc", "note": "", "why": None,
         "remedy": None, "required": True}  # fmt: skip
GONE = {**FOUND, "how": None, "why": "vllm:kv_cache_usage_perc is gone", "remedy": "look at the engine's version"}


@pytest.mark.parametrize(
    ("found", "error", "code", "says"),
    [
        (FOUND, None, 0, "OK     kv_usage  vllm:kv_cache_usage_perc"),
        (
            GONE,
            None,
            3,
            "MISSING  kv_usage  vllm:kv_cache_usage_perc is gone; look at the engine's version",
        ),
        ({**GONE, "required": False, "code": "missing"}, None, 0, "UNKNOWN kv_usage vllm:kv_cache_usage_perc is gone"),
        ({**GONE, "required": False, "code": "not_supported"}, None, 0, "N/A kv_usage vllm:kv_cache_usage_perc is go"),
        (FOUND, "connection refused", 3, "MISSING  target llama: connection refused"),
    ],
)
def test_doctor_tells_how_a_number_is_had(
    cli: Cli, oneshot: types.ModuleType, found: dict[str, Any], error: str | None, code: int, says: str
) -> None:
    """After an upgrade a metric had another name; the person must see which, and what to do."""
    target = {"target": "llama", "url": "http://e:8000", "kind": "vllm", "model": "m", "build": None, "error": error}
    told = {"targets": [{**target, "engines": ["llama"], "found": [found]}], "gpus": [], "sources": []}
    asked: list[list[str]] = []

    def look(settings: Any, urls: list[str], progress: Callable[[str], None]) -> dict[str, Any]:
        progress("looking")
        asked.append(urls)
        return told

    oneshot.doctor = look  # type: ignore[attr-defined]
    got, out, _ = cli("doctor", "http://e:8000")
    assert (got, asked) == (code, [["http://e:8000"]])
    assert out.startswith("llama  http://e:8000  vllm  m\n")
    assert re.sub(" +", " ", says) in re.sub(" +", " ", out)
    assert json.loads(cli("doctor", "--json")[1]) == told
    assert asked[-1] == []


def test_doctor_asks_the_agent_where_one_runs(cli: Cli, view: FakeView) -> None:
    """Nothing to look at is not fine."""
    code, out, _ = cli("doctor")
    assert code == 3
    assert "Found no engine and no GPU. Name an engine: tocsin doctor http://127.0.0.1:8000" in out


def test_config_check_names_every_fault_at_once(cli: Cli, tmp_path: Path) -> None:
    """One fault a restart, five restarts at night: faults of the rules come with those of the file."""
    assert cli("config", "check")[0] == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text("poll: 5\nrules: {dirs: [], disable: [gpu-utilisation]}\nnodes: x\n")
    code, out, err = cli("config", "check", "--config", str(bad))
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"{bad}:1: poll: missing unit in duration 5; write 5s")
    assert any(line.startswith(f"{bad}:2: rules.disable[0]: ") and "gpu-utilization" in line for line in lines)
    assert any(line.startswith(f"{bad}:3: nodes: ") for line in lines)
    assert lines[-1] == "3 faults"
    code, out, err = cli("config", "check", "--json", "--config", str(bad))
    told = json.loads(out)
    assert (code, err, told["ok"], {fault["line"] for fault in told["faults"]}) == (2, "", False, {1, 2, 3})


def test_a_faulty_configuration_stops_every_command(cli: Cli, tmp_path: Path) -> None:
    """'Healthy' by the built-in defaults, while the file that was meant is not read, would be a lie."""
    gone = tmp_path / "gone.yaml"
    for words in (["check"], ["doctor"], ["alerts"], ["rules", "list"], ["record", "e:1", "-o", f"{tmp_path}/x"]):
        code, out, err = cli(*words, "--config", str(gone))
        assert (code, out) == (2, ""), words
        assert f"{gone}: cannot be read: No such file or directory" in err


def test_rules_list_is_the_catalogue(cli: Cli) -> None:
    """What fires, for how long, how loud, what to do."""
    code, out, _ = cli("rules", "list")
    assert code == 0
    rows = {words[1]: words for line in out.splitlines()[1:] if len(words := re.split(" {2,}", line)) > 6}
    assert rows["queue-age"][:7] == ["H1", "queue-age", "page", ">= 0.5 × slo.ttft_p99", "10s", "30s", "queue_age"]
    assert rows["kv-cache-utilization"][2:6] == ["ticket", ">= 85 %", "1m", "2m"]
    numbers = [line.partition(" ")[0] for line in out.splitlines()[1:]]
    assert numbers.index("H10") > numbers.index("H9") > numbers.index("H1")
    told = {rule["id"]: rule for rule in json.loads(cli("rules", "list", "--json")[1])}
    assert (told["queue-age"]["for_s"], told["queue-age"]["signal"]) == (10.0, "queue_age")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "--watch-for", "5"], "--watch-for 5: missing unit in duration 5; write 5s"),
        (["record", "e:1", "-o", "x", "--every", "1ms"], "--every 1ms is too short; the least is 0.1s"),
        (["record", "e:1"], "Missing option '-o'"),
        (["backtest", "no-such-file"], "no-such-file"),
        (["backtest", "ttft_p99=1s"], "no recording is named"),
        (["backtest", "x", "--slo", "fast"], "--slo fast is not NAME=VALUE"),
        (["backtest", "x", "--slo", "availability=100%"], "100% leaves no error budget to count; write 99.9%"),
        (["backtest", "x", "--slo", "ttft_p99=0s"], "0s must be over 0"),
        (["backtest", "x", "--config", "gone.yaml"], "gone.yaml: cannot be read"),
        (["doctor", "ftp://127.0.0.1:1"], "tocsin doctor: 'ftp://127.0.0.1:1' is not an http(s) URL"),
        (["doctor", "http://user:secret@127.0.0.1:1"], "tocsin doctor: credentials stand in the URL"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["check", "--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_a_wrong_call_says_what_to_write(cli: Cli, words: list[str], says: str) -> None:
    """Usage errors exit 2, on stderr, without a traceback."""
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_backtest_levels_may_follow_one_slo(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--slo ttft_p99=500ms itl_p99=80ms` is how the contract writes it."""
    calls: list[tuple[Any, ...]] = []
    empty: dict[str, Any] = {"recording": {"scrapes": 2, "missing": 1, "seconds": 90.0}, "engines": {}, "gaps": []}

    def replay(*given: Any) -> dict[str, Any]:
        calls.append(given)
        return {**empty, "breaches": [], "transitions": []}

    monkeypatch.setattr("agent.backtest.backtest", replay)
    code, out, _ = cli("backtest", "a.gz", "b.gz", "--rules", "/r", "--slo", "ttft_p99=500ms", "itl_p99=80ms")
    assert code == 0
    [(paths, rules, levels, settings)] = calls
    assert (paths, rules) == ([Path("a.gz"), Path("b.gz")], Path("/r"))
    assert levels == {"ttft_p99": "500ms", "itl_p99": "80ms"}
    assert settings.node == "gpu-17"
    assert out == "2 scrapes in 90 s; 1 missing, 0 gaps\nNothing would have fired.\n"


def test_backtest_says_what_would_have_paged() -> None:
    """The sentence that decides whether a limit is right."""
    change = {"at_s": 101.44, "rule": "queue-age", "subject": "e", "state": "firing", "value": 1.2, "severity": "page"}
    other = {**change, "rule": "kv-cache-utilization", "severity": "ticket", "value": 0.9}
    told = {
        "recording": {"scrapes": 9, "missing": 0, "seconds": 9.0},
        "engines": {"e": {"preemptions": 31.0, "kv_peak": 1.0, "ttft_p99_s": 19.3, "prefix_hit_ratio": None}},
        "breaches": [{"rule": "queue-age", "subject": "e", "from_s": 91.4, "to_s": 124.5}],
        "gaps": [], "transitions": [change, change, other],
        "signals": [signal("H1", "queue-age", "OK", 0.0, unit="s", limit=0.25)],
    }  # fmt: skip
    text = show.plain(show.backtest_report(told))
    assert text.endswith("Would have paged: queue-age (e); would have fired: kv-cache-utilization (e)\n")
    for row in ("preemptions 31", "kv_peak 100 %", "queue-age e 91.4 124.5", "101.4 firing queue-age e 1.2 s"):
        assert f"\n{row}\n" in re.sub(" +", " ", text)


# ---- on a terminal ----


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, columns: int, report: show.Report) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    show.show(report, out)
    return out.getvalue().splitlines()


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file full of escape sequences cannot be searched."""
    report = show.check_report(answer("ticket", FINE, HOT), show_all=False)
    assert any("\x1b[1;31mBREACH" in line for line in drawn(monkeypatch, 120, report))
    assert "\x1b" not in show.plain(report)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_narrow_terminals_lose_columns_not_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """On a phone over ssh: the rule, its state and its value are there; the method goes first, then the age."""
    report = show.check_report(answer("page", FINE, HOT, SLOW, NOT_HERE), show_all=True)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn(monkeypatch, columns, report)]
    tables = lines[: lines.index(next(line for line in lines if line.startswith("PAGE")))]
    assert max(len(line) for line in tables) <= columns
    text = "\n".join(tables)
    for word in ("gpu-temperature", "BREACH", "91 °C", "ttft-p99", "PENDING", "3.4 %"):
        assert word in text
    assert ("METHOD" in text) == (columns >= 120)


# ---- the program as a whole ----


def test_help_has_one_line_for_each_command(cli: Cli) -> None:
    """A line that is cut off with ... helps nobody."""
    code, out, _ = cli("--help")
    lines = out[out.index("Commands:") :].splitlines()[1:]
    told = dict(line.strip().split(None, 1) for line in lines if line.strip())
    assert code == 0
    assert set(told) == {"run", "check", "doctor", "alerts", "record", "backtest", "config", "notify", "rules", "drill",
                         "drilld", "report", "review", "silence", "unsilence", "maintenance", "advise", "canary",
                         "demo", "watch", "lint"}
    assert not [line for line in lines if line.endswith("...")]
    assert "config check" in told["config"]
    assert "rules list" in told["rules"]
    own = ("config", "notify", "rules", "drill", "advise", "demo")  # demo's configuration is its own, and no answer
    plain = [[name] for name in told if name not in own]
    plain += [["advise", name] for name in CHECKLISTS]
    drill = [["drill", name] for name in ("list", "plan", "run", "abort", "heal", "history", "unit")]
    for words in (*plain, *drill, ["config", "check"], ["notify", "test"], ["rules", "list"]):
        out = cli(*words, "--help")[1]
        assert "--config FILE" in out, words
        silent = words[0] in ("run", "record", "drilld") or words == ["drill", "unit"]
        assert ("--json" in out) is not silent, words


def test_run_becomes_the_daemon(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Called in a folder that has an `agent` of its own, it must start ours; and with the file that was named."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    class Replaced(BaseException):
        pass

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        calls.append((program, command, environment))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    for words in (["run"], ["run", "--config", "/x.yaml"]):
        with pytest.raises(Replaced):
            cli(*words)
    files = [str(tmp_path / "tocsin.yaml"), "/x.yaml"]
    for (program, command, environment), file in zip(calls, files, strict=True):
        assert program == sys.executable
        assert command == [sys.executable, "-P", "-m", "agent.daemon", "--config", file]
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def tocsin(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent", *words]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=60, **more)


def test_a_reader_that_has_gone_is_no_fault(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """`tocsin check | head -1` ended in a BrokenPipeError, and in its exit code."""
    view.checked = answer("ticket", *(signal("H2", "kv", "BREACH", 0.9, subject=f"e{n}") for n in range(5000)))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "agent", "check", "--config", str(tmp_path / "tocsin.yaml")]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_degrees_gets_an_answer(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """A serial console with an ASCII locale: a question mark, not a UnicodeEncodeError."""
    view.checked = answer("ticket", HOT)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = tocsin("check", "--config", str(tmp_path / "tocsin.yaml"), env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "TICKET: gpu-temperature on GPU-1 is 91 ?C (limit 85 ?C)"


FOREIGN = ("typer", "click", "flask", "pytest", "pydantic", "agent.show")
HEAVY = ("requests", "pynvml", "rich", "prometheus_client", "waitress", "structlog", "agent.loop")


def test_check_imports_little(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """`tocsin check` in a loop of a status bar: what it does not need it does not load."""
    code = (
        "import sys\nfrom agent.__main__ import main\n"
        f"sys.argv = ['tocsin', 'check', '--json', '--config', {str(tmp_path / 'tocsin.yaml')!r}]\n"
        "try: main()\n"
        f"except SystemExit: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stderr == "[]\n"


LIBRARIES_ALONE = "import typer._adapters, msgspec, yaml"  # what its libraries cost: 0.2 s on an idle machine


def cpu_s(call: Callable[[], object]) -> float:
    """The CPU time of the processes that a call started and awaited."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.heavy
def test_check_answers_within_half_a_second(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """The promise is wall time on a machine at rest. A busy one stretches CPU time, too, by what its cores share: so
    the answer is measured against its libraries, loaded in the same moment."""
    view.checked = answer("ticket", *(signal("H2", "kv", "OK", 0.1, subject=f"e{n}") for n in range(300)), HOT)

    def ask() -> None:
        assert tocsin("check", "--config", str(tmp_path / "tocsin.yaml")).returncode == 1

    def load() -> None:
        subprocess.run([sys.executable, "-c", LIBRARIES_ALONE], check=True)

    ratios = [cpu_s(ask) / cpu_s(load) for _ in range(7)]
    assert min(ratios) <= 0.5 / 0.2, ratios


def test_the_daemon_loads_no_command_line() -> None:
    """typer costs megabytes that the daemon would carry for months."""
    code = (
        "import runpy, sys\nsys.argv = ['agent.daemon', '--help']\n"
        "try: runpy.run_module('agent.daemon', run_name='__main__', alter_sys=True)\n"
        f"except SystemExit: print([m for m in {FOREIGN} if sys.modules.get(m)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stderr == "[]\n"


def test_numbers_of_rules_sort_as_people_read_them() -> None:
    """H2 before H10; what has no number comes last."""
    rows = [{"number": n, "rule": r} for n, r in (("H10", "a"), (None, "own"), ("L1", "b"), ("M1", "c"), ("H2", "d"))]
    assert [row["number"] for row in sorted(rows, key=place)] == ["H2", "H10", "M1", "L1", None]


def test_rule_fires_are_words() -> None:
    """The unit and the SLO stand where a person looks for them."""
    from agent.__main__ import _rule_row

    fires = [
        _rule_row(Rule("a", "s", ">=", 0.5, "page", slo="ttft_p99"), "s")["fires"],
        _rule_row(Rule("a", "s", ">", 1.0, "page", slo="itl_p99"), "s")["fires"],
        _rule_row(Rule("a", "s", ">", 85.0, "page"), "celsius")["fires"],
    ]
    assert fires == [">= 0.5 × slo.ttft_p99", "> slo.itl_p99", "> 85 °C"]


# ---- notify test ----


def test_every_channel_is_tried_with_a_marked_alert_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One works, one is refused, the heartbeat beats; whoever reads it sees that nothing is wrong."""
    with Receiver() as good, Receiver(lambda _: Reply(401)) as bad:
        monkeypatch.setenv("HOOK", f"{bad.url}/services/SECRETPART")
        config = tmp_path / "notify.yaml"
        config.write_text(f"""
node: gpu-17
notify:
  - webhook: {{url: "{good.url}/hook"}}
  - slack: {{webhook_env: HOOK}}
  - heartbeat: {{url: "{good.url}/beat"}}
""")
        monkeypatch.setattr(sys, "argv", ["tocsin", "--config", str(config), "notify", "test"])
        with pytest.raises(SystemExit) as ended:
            main()

    out = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert out[0] == "webhook: delivered"
    assert out[1].startswith(f"slack: NOT delivered: {bad.url}: 401 Unauthorized")
    assert out[2] == "heartbeat: delivered"
    fired, resolved = (arrival.json for arrival in good.arrivals if arrival.path == "/hook")
    assert (fired["status"], resolved["status"]) == ("firing", "resolved")
    assert fired["alerts"][0]["labels"] == resolved["alerts"][0]["labels"]
    assert fired["commonAnnotations"]["summary"].startswith("TEST of Tocsin's channels from gpu-17: nothing is wrong")


def test_nobody_to_tell(cli: Cli) -> None:
    """No channel at all: that is what a test should find first."""
    code, _, err = cli("notify", "test")
    assert (code, "nobody is told" in err) == (3, True)


# ---- incidents, reviews ----


def test_an_incident_s_postmortem(cli: Cli, view: FakeView, tmp_path: Path) -> None:
    """By its id, as Markdown, to a file as HTML; the list where none is named; a wrong id says how to find it."""
    code, out, _ = cli("report", "incident", "last")
    assert (code, out.splitlines()[0]) == (0, f"# Incident {told_incident.record()['id']}")
    name = told_incident.record()["id"]
    assert cli("report", "incident", name, "--format", "html", "-o", f"{tmp_path}/x.html")[0] == 0
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(cli("report", "incident", "last", "--json")[1])["times"]["detect_s"] == 30.0
    code, out, _ = cli("report", "incident")
    assert code == 0
    assert "gpu-thermal-limit on GPU 3 on gpu-17" in out
    code, _, err = cli("report", "incident", "nine")
    assert (code, "`tocsin report incident` lists them" in err) == (2, True)
    assert cli("report", "incident", "last", "--format", "junit")[0] == 2
    code, out, err = cli("report", "incident", "last", "-o", str(tmp_path / "no" / "x.md"))
    assert (code, out) == (2, "")
    assert err.startswith(f"tocsin: {tmp_path}/no/x.md: No such file or directory; name a file that can be written")


def test_a_review_and_its_exit_code(cli: Cli, view: FakeView) -> None:
    """0 where what was promised was kept, 1 where it was not; drills that nobody ran are none."""
    code, out, _ = cli("review", "--last", "30d")
    assert code == 0
    assert "No request was counted" in out
    assert "Pages: 2 incidents of 4 alerts, 20 min in all, the longest 10 min; 0 over within 5 min" in out.replace(
        "300 s", "5 min")
    view.days = [{"day": 20_000, "target": "llama", "requests": 1000.0, "errors": 10.0, "ttft": 0.0, "ttft_slow": 0.0,
                  "itl": 0.0, "itl_slow": 0.0}]
    code, out, _ = cli("review")
    assert code == 1
    assert "NO" in out
    answer = json.loads(cli("review", "--json")[1])
    assert answer["targets"][0]["budget_spent"] == pytest.approx(10.0)  # 1 % failed, 0.1 % was allowed
    assert answer["drills"]["held"] in (0, None)


def test_without_an_agent_there_is_nothing_to_review(cli: Cli) -> None:
    """Exit 3, and what to do."""
    assert cli("review")[0] == 3
    assert cli("report", "incident", "last")[0] == 3
