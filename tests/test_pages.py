"""The status page without a browser: what each view shows, to whom, what it costs, and what it never does."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

import pytest
from structlog.testing import capture_logs

from agent import client, words
from agent.config import SecretUnreadable
from agent.loop import Agent
from agent.model import Batch, GpuFacts
from agent.notifiers.pagerduty import PagerDuty
from agent.signals import CATALOGUE, Target
from agent.web import app, glance, pages
from agent.web.app import PUBLIC, make_app
from agent.web.pages import Site, make_pages
from agent.web.server import Server, serve_tcp
from drills import daemon, heal, ledger, record
from drills.model import Drill, State
from tests import told_incident
from tests.receiver import Receiver
from tests.scenes import SLO, samples
from tests.test_loop import Life, Scripted, engine

HOSTILE = "<script>alert(1)</script>"
TOKEN = "correct horse"
NUMBERS: dict[str, float | None] = {"kv_usage": 0.5, "waiting": 0.0, "running": 3.0}


def hardware(now: float) -> Batch:
    """Two GPUs, one of them hot."""
    read, facts = [], []
    for index, temp_c in enumerate((61.0, 91.0)):
        uuid = f"GPU-{index:04d}"
        read += samples(uuid, now, {"gpu_temp_c": temp_c, "gpu_util": 0.5, "gpu_mem_used": 7e10, "gpu_mem_total": 8e10})
        facts.append(GpuFacts(uuid, index, "H200", f"0000:{index:02x}:00"))
    return Batch("nvml", now, 0.01, tuple(read), gpus=tuple(facts))


class Page:
    """An agent with one engine of a hostile name and two GPUs, and its page on a real socket."""

    def __init__(self, life: Life, folder: Path, token: str | None) -> None:
        self.life, self.numbers = life, dict(NUMBERS)
        life.targets = (Target(HOSTILE, (), SLO, gpus=(0,)),)
        source = Scripted(f"engine:{HOSTILE}", engine(self.numbers, HOSTILE))
        self.agent = life.start(Scripted("nvml", hardware), source)
        life.tick(3)
        self.site = Site("gpu-17", folder / "drilld.sock", lambda: token, CATALOGUE)
        self.serve(self.agent)

    def serve(self, agent: Agent) -> None:
        """The page of this agent from now on."""
        if hasattr(self, "server"):
            self.server.close()
        self.agent = agent
        app_ = make_app(agent, CATALOGUE, lambda: self.life.clocks.unix, routes={**PUBLIC, **make_pages(self.site)})
        self.server: Server = serve_tcp(app_, "127.0.0.1:0")

    def ask(self, path: str, accept: str = "text/html", **form: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body; a form is posted."""
        headers = {"Accept": accept, **({"Content-Type": "application/x-www-form-urlencoded"} if form else {})}
        with closing(http.client.HTTPConnection(self.server.address, timeout=30)) as connection:
            connection.request("POST" if form else "GET", path, urlencode(form) if form else None, headers)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read().decode()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Makes the one page of a test."""
    with ExitStack() as stack:

        def make(token: str | None = None) -> Page:
            life = Life(tmp_path)
            stack.callback(life.kill)
            page = Page(life, tmp_path, token)
            stack.callback(lambda: page.server.close())
            return page

        yield make


VIEWS = ("/", "/engines", "/gpus", "/alerts", "/incidents", "/numbers/H2", "/rules", "/runbooks", "/runbooks/queue-age",
         "/drills", "/silences",
         f"/signals/kv-cache-utilization/{quote(HOSTILE, safe='')}",
         "/alerts/gpu-temperature/GPU-0001")  # fmt: skip


def test_every_view_is_whole_and_asks_nobody_else(opened: Callable[..., Page]) -> None:
    """A page that fetched a font from elsewhere told the world which node was in trouble."""
    page = opened()
    page.life.tick(30)
    for path in VIEWS:
        status, headers, body = page.ask(path)
        assert status == 200, path
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert not re.search(r'(?:src|href|action)="(?!/(?!/)|#)', body), path
        assert not re.search(r"\sstyle=|\son[a-z]+=|<script>", body), path
        assert body.count("<h1") == 1, path


def test_a_hostile_name_is_text(opened: Callable[..., Page]) -> None:
    """An engine called <script>…, whose page could have run in the browser of the engineer on call."""
    page = opened()
    for path in ("/", "/engines"):
        body = page.ask(path)[2]
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
        assert HOSTILE not in body
    assert HOSTILE not in page.ask(f"/signals/kv-cache-utilization/{quote(HOSTILE, safe='')}")[2]


def test_curl_gets_the_text(opened: Callable[..., Page]) -> None:
    """Scripts that asked for / and for a runbook get what they always got."""
    page = opened()
    assert page.ask("/", "*/*")[2].startswith("Tocsin watches this node.")
    assert page.ask("/runbooks/queue-age", "*/*")[1]["Content-Type"].startswith("text/plain")
    assert page.ask("/runbooks/queue-age")[1]["Content-Type"].startswith("text/html")


def test_a_breach_comes_and_goes(opened: Callable[..., Page]) -> None:
    """The view that the script asks for tells of it at the next tick; between two ticks it is drawn once."""
    page = opened()

    def row() -> str:
        found = re.search(r'<tr role="row" class="(\w+)">\s*<th[^>]*><a href="[^"]*"><span class="number">H2</span>',
                          page.ask("/?part=1")[2])
        assert found is not None
        return found[1]

    assert row() == "ok"
    page.numbers["kv_usage"] = 0.93
    assert row() == "ok"  # no tick has seen it
    page.life.tick()
    assert row() == "pending"
    page.life.tick(12)
    assert row() == "breach"
    page.numbers["kv_usage"] = 0.5
    page.life.tick(25)
    assert row() == "ok"


def test_what_is_unknown_never_looks_healthy(opened: Callable[..., Page]) -> None:
    """The engine's page lost its KV gauge: no green cell, no old number."""
    page = opened()
    page.numbers["kv_usage"] = None
    page.life.tick()
    body = page.ask("/?part=1")[2]
    row = body[body.index(">H2<"):][:700]
    assert '<span class="state unknown">UNKNOWN</span>' in row
    assert 'class="amount">–</td>' in row


def test_an_agent_that_stands_still_says_so(opened: Callable[..., Page]) -> None:
    """The tick hung; the page that had been drawn before went on saying HEALTHY."""
    page = opened()
    assert "no longer judges" not in page.ask("/")[2]
    page.life.clocks.go(60.0)
    assert "no longer judges" in page.ask("/")[2]


def test_a_runbook_is_text_and_not_markup(opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    """A runbook of somebody's rules folder must not bring a script into the page."""
    page = opened()
    plain = app.Reply("200 OK", "text/plain", b"# a\n\n<script>alert(1)</script>\n\n[x](javascript:alert(1))")
    monkeypatch.setattr(app, "runbook", lambda request: plain)
    body = page.ask("/runbooks/queue-age")[2]
    assert "<h1>a</h1>" in body
    assert "<script>alert" not in body
    assert 'href="javascript' not in body


def test_a_plot_is_a_picture_with_its_limit(opened: Callable[..., Page]) -> None:
    """Of the last two hours and of the day; of what is not there it is a 404."""
    page = opened()
    page.life.tick(40)
    for span in ("2h", "24h"):
        status, headers, body = page.ask(f"/plots/gpu-temperature/GPU-0001?span={span}")
        assert (status, headers["Content-Type"]) == (200, "image/svg+xml")
        text = "".join(ElementTree.fromstring(body).itertext())
        assert "limit 85 °C" in text
        assert "<script" not in body
    assert page.ask("/plots/gpu-temperature/GPU-7")[0] == 404
    assert page.ask("/plots/gpu-temperature/GPU-0001?span=1y")[0] == 404


def test_a_curve_has_holes_where_nothing_was_measured() -> None:
    """120 wide, 24 high, 1 px inside; an hour is 120, so 10 minutes are 20; 0.5 lies in the middle of 0 and 1."""
    drawn = glance.spark([(0.0, 0.0), (60.0, 1.0), (600.0, 0.5)], 2.0, 3600.0, "s")
    assert drawn == {"paths": ["M0.0,23.0L2.0,12.0", "M20.0,17.5h1"], "limit": 1.0,
                     "text": "between 0 s and 1 s, limit 2 s"}
    assert glance.spark([(0.0, 1.0)], None, 7200.0, "s") is None  # over an hour ago
    assert glance.spark([(3600.0, 0.0)], 0.0, 3600.0, "celsius") == {
        "paths": ["M120.0,23.0h1"], "limit": 23.0, "text": "0 °C throughout, limit 0 °C"}


def test_a_curve_is_heard(opened: Callable[..., Page]) -> None:
    """"Temperature of GPU 1, the last hour", said the screen reader, and nothing more."""
    page = opened()
    page.life.tick(30)
    said = "temperature of GPU 1, the worst of each minute, last hour: 91 °C throughout, limit 85 °C"
    assert f'aria-label="{said}"' in page.ask("/gpus")[2]
    body = page.ask("/signals/gpu-temperature/GPU-0001")[2]
    for span in ("the last 2 hours", "the worst of each minute of the last 24 hours"):
        assert f'alt="gpu-temperature, {span}: 91 °C throughout, limit 85 °C"' in body


def test_what_is_heard_of_a_curve_is_no_value_of_now(opened: Callable[..., Page]) -> None:
    """"Between 7.8 % and 22.9 %, last 7.8 %", said the curve, and the value was 4.6 %: it is of each minute's worst."""
    curve = [(60.0, 0.229), (120.0, 0.078)]
    assert glance.in_words(curve, 0.85, "ratio") == "between 7.8 % and 22.9 %, last 7.8 %, limit 85 %"
    assert glance.in_words(curve, 0.85, "ratio", worst=True) == "between 7.8 % and 22.9 %, limit 85 %"
    page = opened()
    for kv in (0.8, 0.2, 0.3) * 10:
        page.numbers["kv_usage"] = kv
        page.life.tick()
    for path in ("/", "/numbers/H2", f"/signals/kv-cache-utilization/{quote(HOSTILE, safe='')}"):
        assert re.search(r'aria-label="KV cache utilization, the worst of each minute, last hour: [^"]*80 %',
                         page.ask(path)[2]), path


def signal(rule: str, state: str, subject: str, **more: Any) -> dict[str, Any]:
    """A row of `check`."""
    return {"number": None, "rule": rule, "signal": rule.replace("-", "_"), "subject": subject, "state": state,
            "value": 1.0, "unit": "count", "limit": 0.0, "method": "exact", "age_s": 1.0, "why": None,
            "severity": "page", "required": False, "window_s": None, "evidence": {}, "text": "", "silenced": None,
            "action": "", **more}


KV = signal("kv-cache-utilization", "OK", "llama/0", number="H2", value=0.5, unit="ratio", limit=0.85)


@pytest.mark.parametrize(("row", "state", "named"), [
    (signal("engine-stuck", "BREACH", "llama/0"), "BREACH", ["engine-stuck"]),
    (signal("engine-down", "PENDING", "llama"), "PENDING", ["engine-down"]),  # of its target
    (signal("engine-down", "BREACH", "mistral"), "OK", []),
    (signal("canary-info", "BREACH", "llama", severity="info"), "OK", []),  # the node is HEALTHY with it
    (signal("some-extra", "UNKNOWN", "llama"), "OK", []),
    (signal("engine-stuck", "UNKNOWN", "llama", required=True), "UNKNOWN", ["engine-stuck"]),
])
def test_an_engine_on_which_a_rule_pages_is_not_green(row: dict[str, Any], state: str, named: list[str]) -> None:
    """engine-stuck paged, and the engine's card was green: only the ten were asked, and all of them were idle."""
    doctor = {"targets": [{"target": "llama", "engines": ["llama/0"]}]}
    (found,) = glance.engines({"signals": [KV, row], "binds": [], "at": 0.0}, doctor, {}, 0.0)
    assert (found["state"], [one["rule"] for one in found["others"]]) == (state, named)


def test_the_rule_that_pages_is_named_on_the_card(opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    """On both views, with a link; and a breach of the ten is told by more than its colour."""
    page = opened()
    answer = page.agent.check()
    rows = [signal("engine-stuck", "BREACH", HOSTILE, why="no token for 40 s"),
            *(row | ({"state": "BREACH"} if row["number"] == "H2" else {}) for row in answer["signals"])]
    monkeypatch.setattr(page.agent, "check", lambda: answer | {"signals": rows})
    for path in ("/", "/engines"):
        body = page.ask(path)[2]
        card = body[body.rindex(">Engines</h"):]
        assert f'<a href="{glance.link("signals", "engine-stuck", HOSTILE)}">engine-stuck</a>' in card, path
        assert "no token for 40 s" in card
    assert 'KV 50 %!<span class="unseen"> BREACH</span></a>' in page.ask("/")[2]


def test_names_say_what_the_numbers_are() -> None:
    """"Preemptions, limit 60": in a minute or a day? And "p99 TTFT 0.4 %" is no time, but the share of slow ones."""
    rows = [signal("preemption-storm", "OK", "llama", number="H3", value=4.0, limit=60.0, window_s=3600.0),
            signal("ttft-p99", "OK", "llama", number="H5", value=0.004, unit="ratio", evidence={"p99_s": 0.212})]
    assert [(one["name"], one["value"]) for one in glance.the_ten(rows, {}, 0.0)] == [
        ("preemptions in 60 min", "4"), ("slow first tokens (TTFT)", "0.4 %")]
    (engine,) = glance.engines({"signals": rows}, {"targets": [{"target": "llama", "engines": []}]}, {}, 0.0)
    assert [cell["measured"] for cell in engine["cells"]] == ["4", "212 ms"]


def test_who_muted_an_alert_stands_beside_it(opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alice had silenced it, and the page showed an alert like any other: a second engineer went to work on it."""
    page = opened()
    path = "/alerts/gpu-temperature/GPU-0001"
    row: dict[str, Any] = {
        "rule": "gpu-temperature", "subject": "GPU-0001", "state": "firing", "severity": "page", "since": 100.0,
        "until": None, "value": 91.0, "limit": 85.0, "incident": None, "summary": "hot", "description": "", "unit":
        "celsius", "silenced": None, "expected_by": None}
    rows = [row]
    monkeypatch.setattr(page.agent, "alerts", lambda past: rows)
    for view in ("/alerts", path):
        body = page.ask(view)[2]
        assert not re.search("silenced|expected by|incident</a>|at the end", body), view
    rows[0] = row | {"silenced": "until 02:00 UTC by alice: <fan>", "incident": "gpu-17/gpu-thermal-limit/7"}
    page.life.tick()
    for view in ("/alerts", path):
        body = page.ask(view)[2]
        assert "silenced <bdi>until 02:00 UTC by alice: &lt;fan&gt;</bdi>" in body, view
        assert 'href="/incidents/gpu-17%2Fgpu-thermal-limit%2F7"' in body, view
    rows[0] = row | {"expected_by": "loss"}
    page.life.tick()
    for view in ("/alerts", path):
        assert "expected by the drill <bdi>loss</bdi>" in page.ask(view)[2], view
    rows[0] = row | {"state": "resolved", "until": 200.0, "value": 70.0}
    page.life.tick()
    assert re.search(r'class="amount">70 °C <span class="quiet">at the end</span>', page.ask("/alerts")[2])


def test_a_table_stays_one_where_it_is_drawn_as_cards(opened: Callable[..., Page], drilld: daemon.Daemon) -> None:
    """On a phone its rows are blocks, which browsers take for no table, unless it says that it is one."""
    page = opened(TOKEN)
    page.life.tick(30)
    for path in VIEWS:
        body = page.ask(path)[2]
        for tag, role in (("table", "table"), ("tbody", "rowgroup"), ("thead", "rowgroup"), ("tr", "row"),
                          ("td", "cell"), ("th", "rowheader|columnheader")):
            # What a runbook's own Markdown brings stays a table at every width.
            bare = re.findall(rf"<{tag}(?![a-z])(?! (?:class=\"\w+\" )?role=\"(?:{role})\")[^>]*>", body)
            assert path.startswith("/runbooks/") or bare == [], path


# --- incidents -------------------------------------------------------------------------------------------------------


def test_past_incidents_and_their_postmortems(opened: Callable[..., Page]) -> None:
    """The morning after: what paged, for how long, how many pages, and a draft that needs two sentences of a person."""
    page = opened()
    assert "No incident has paged yet." in page.ask("/incidents")[2]
    life = page.life
    with Receiver() as receiver:
        agent = life.start(*life.sources, channels=[PagerDuty("pagerduty", lambda: "k" * 32, receiver.url)])
        page.serve(agent)
        life.tick(20)
        assert agent.outbox is not None
        for worker in agent.outbox.workers:
            worker.step()
        body = page.ask("/incidents")[2]
        cells = re.findall(r'data-head="(\w+)"[^>]*>(?:<[^>]+>)*([^<]*)<', body)
        (record,) = agent.incident_list(0.0)
        assert dict(cells) == {
            "state": "open", "cause": "gpu-thermal-limit on GPU 1 on gpu-17", "pages": "1 by pagerduty", "alerts": "1",
            "began": glance.moment(record["began_at"]), "lasted": words.span(life.clocks.unix - record["began_at"]),
            "postmortem": "draft"}
    (href,) = re.findall(r'href="(/incidents/[^"]+)"', body)
    status, headers, report = page.ask(href)
    assert status == 200
    assert "unsafe" not in headers["Content-Security-Policy"]
    for text in (f"<h1>Incident {record['id']}</h1>", "<td>gpu-thermal-limit on GPU 1 on gpu-17</td>",
                 "firing delivered to pagerduty", f"tocsin report incident {record['id']}"):
        assert text in report, text
    for form, begins, kind in (("md", "# Incident", "text/markdown"), ("html", "<!DOCTYPE", "text/html"),
                               ("json", "{", "application/json")):
        _, headers, body = page.ask(f"{href}?format={form}")
        assert body.lstrip().startswith(begins)
        assert headers["Content-Type"].startswith(kind)
    assert page.ask(f"{href}?format=pdf")[0] == 400
    assert page.ask("/incidents/none")[0] == 404


def test_an_incident_of_a_hostile_name_is_text(opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of an engine that is markup, in HTML or in Markdown, reads in the list and in the postmortem as it is."""
    page = opened()
    name = f"{HOSTILE}[x](javascript:alert(1))|**b**"
    told = told_incident.told()
    for member in told["incident"]["members"]:
        member |= {"place": name, "summary": name}
    monkeypatch.setattr(page.agent, "incident_list", lambda since: [told["incident"]])
    monkeypatch.setattr(page.agent, "incident_told", lambda _: told)
    for path in ("/incidents", "/incidents/last"):
        body = page.ask(path)[2]
        assert "&lt;script&gt;alert(1)&lt;/script&gt;[x](javascript:alert(1))|**b**" in body, path
        assert HOSTILE not in body


def test_nothing_but_our_own_files_is_served(opened: Callable[..., Page]) -> None:
    """No path leads out of the folder."""
    page = opened()
    assert page.ask("/static/page.css")[1]["Content-Type"].startswith("text/css")
    for path in ("/static/../pages.py", "/static/%2e%2e/pages.py", "/static/", "/reports/../../etc/passwd",
                 "/reports/"):
        assert page.ask(path)[0] == 404, path


def test_a_silence_asks_for_the_token(opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could reach the page could have muted the node; what is muted says by whom and why."""
    monkeypatch.setattr(pages, "WRONG_TOKEN_S", 0.0)
    page = opened(TOKEN)
    wanted = {"rule": "gpu-temperature", "subject": "GPU-0001", "for": "2h", "why": "<b>fan</b> is on its way",
              "by": "eve"}
    assert page.ask("/silences", **wanted, token="guess")[0] == 403
    assert page.agent.silences()["silences"] == []
    assert page.ask("/silences", **wanted | {"rule": "gpu-temprature"}, token=TOKEN)[0] == 400
    status, _, body = page.ask("/silences", **wanted | {"for": "2 weeks"}, token=TOKEN)
    assert status == 400
    assert ">Not silenced</h2>" in body
    assert 'value="&lt;b&gt;fan&lt;/b&gt; is on its way"' in body  # what was typed is typed once
    assert TOKEN not in body
    assert "data-live" not in body  # nor is it refreshed away
    assert page.ask("/silences", **wanted, token=TOKEN)[0] == 200
    (made,) = page.agent.silences()["silences"]
    assert (made["rule"], made["subject"], made["by"]) == ("gpu-temperature", "GPU-0001", "eve, on the page")
    assert made["until"] - page.life.clocks.unix == 7200.0
    body = page.ask("/silences")[2]
    assert "&lt;b&gt;fan&lt;/b&gt; is on its way" in body
    assert ">2 h left<" in body
    assert "<bdi>gpu-temperature of GPU-0001</bdi><br>" in body  # what it mutes now
    status, _, body = page.ask("/silences/end", id=str(made["id"]), by="bob", token="guess")
    assert status == 403
    assert "Not ended</h2><p>That is not the token" in body
    assert page.ask("/silences/end", id="x", by="bob", token=TOKEN)[0] == 400
    status, _, body = page.ask("/silences/end", id=str(made["id"]), by="bob", token=TOKEN)
    assert status == 200
    assert "gpu-temperature of GPU-0001 pages again" in body
    told = page.agent.silences()
    assert (told["silences"], [one["ended_by"] for one in told["ended"]]) == ([], ["bob, on the page"])


def test_without_a_token_there_is_no_form(opened: Callable[..., Page]) -> None:
    """Read-only, and what to do on the node instead."""
    body = opened().ask("/silences")[2]
    assert "<form" not in body
    assert "tocsin silence RULE" in body


# --- drills ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drilld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[daemon.Daemon]:
    """A real drilld with one run that passed."""
    monkeypatch.setattr(heal, "heal_strays", list)
    from agent.config import load_config

    (tmp_path / "tocsin.yaml").write_text(f"node: gpu-17\nstate_dir: {tmp_path}/state\nsocket: {tmp_path}/agent.sock\n")
    config = load_config(tmp_path / "tocsin.yaml", {})
    made = daemon.Daemon(config, [Drill("loss", "process-kill", target={"engine": "llama"})], (), None, time.time)
    folder = daemon.root_of(config) / "runs" / "loss-20261129T210000Z-ab12"
    folder.mkdir(parents=True)
    ledger.Ledger.create(folder, {"drill": "loss", "started_by": "root"}).close()
    told = record.blank(folder.name, {"name": "loss"}, 1_790_000_000.0)
    told |= {"state": State.REPORTED, "verdict": "PASS", "why": "it rang", "started_at": 1_790_000_000.0,
             "ended_at": 1_790_000_600.0, "times": {"detect_s": 12.0, "recover_s": 44.0}}
    record.store(folder, told)
    server = daemon.serve(made)
    yield made
    server.shutdown()
    server.server_close()


def test_without_drilld_the_page_says_what_to_start(opened: Callable[..., Page]) -> None:
    """No empty table: why it is empty."""
    body = opened().ask("/drills")[2]
    assert "No drill daemon answers" in body
    assert "systemctl start tocsin-drilld" in body


def test_drills_and_their_reports(opened: Callable[..., Page], drilld: daemon.Daemon) -> None:
    """What was held, how it ended, and the postmortem by its address."""
    page = opened()
    body = page.ask("/drills")[2]
    for text in ("loss-20261129T210000Z-ab12", "PASS", "12 s", "44 s", "it rang", "by hand"):
        assert text in body
    assert "<form" not in body  # read-only without a token
    status, headers, report = page.ask("/reports/loss-20261129T210000Z-ab12")
    assert status == 200
    assert "script-src" not in headers["Content-Security-Policy"]  # default-src 'none' holds for it
    assert "Drill loss" in report


def test_an_abort_asks_for_the_token(opened: Callable[..., Page], drilld: daemon.Daemon,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Another site's page could have ended the drill, or whoever passed by."""
    asked: list[str] = []

    def abort(by: str) -> str:
        asked.append(by)
        return "loss-1"

    monkeypatch.setattr(drilld, "abort", abort)
    monkeypatch.setattr(drilld, "active", lambda: "loss-1")
    monkeypatch.setattr(pages, "WRONG_TOKEN_S", 0.0)
    page = opened(TOKEN)
    assert 'action="/drills/abort"' in page.ask("/drills")[2]
    assert page.ask("/drills/abort", token="wrong")[0] == 403
    assert page.ask("/drills/abort", other="field")[0] == 403
    assert page.ask("/drills/abort")[0] == 405  # a link does nothing
    assert asked == []
    status, _, body = page.ask("/drills/abort", token=TOKEN)
    assert status == 200
    assert len(asked) == 1
    assert asked[0].startswith("the page's token (")
    assert "loss-1 is told to end" in body


def test_without_a_token_nothing_can_be_done(opened: Callable[..., Page], drilld: daemon.Daemon) -> None:
    """No token is configured: not even an empty one fits."""
    status, _, body = opened().ask("/drills/abort", token="")
    assert status == 403
    assert "web.token_file" in body


def test_who_guesses_does_not_lock_out_who_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of one guess a second, and the engineer on call could not end the drill: 23 of 23 tries were refused."""
    now = [1000.0]
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pages, "_guessed_at", -1e9)
    site = Site("gpu-17", tmp_path / "drilld.sock", lambda: TOKEN, CATALOGUE)
    with capture_logs() as logged:
        for given in ("a guess", "the next guess", ""):
            assert pages.refused(site, given) == "That is not the token of `web.token_file`."
            assert pages.refused(site, TOKEN) is None
        assert [one["event"] for one in logged] == ["page_token_wrong"]  # a thousand guesses do not fill the log
        now[0] += 1.0
        assert pages.refused(site, "a guess") is not None
    assert len(logged) == 2


def test_a_token_that_cannot_be_read_is_told_as_that(opened: Callable[..., Page]) -> None:
    """root owned the file; the page said that none was configured, and the engineer wrote it a second time."""
    page = opened()

    def token() -> str:
        raise SecretUnreadable("/etc/tocsin/page-token: permission denied")

    page.site = page.site._replace(token=token)
    page.serve(page.agent)
    why = "its token cannot be read: /etc/tocsin/page-token: permission denied"
    body = page.ask("/silences")[2]
    assert why in body
    assert "<form" not in body
    assert why in page.ask("/drills/abort", token="")[2]
    assert "web.token_file" not in body


@pytest.fixture
def hung_drilld(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """It was asked, and it hangs until the second one is set."""
    asked, hangs = threading.Event(), threading.Event()

    def ask(*_: Any, **__: Any) -> Any:
        asked.set()
        assert hangs.wait(60.0)
        raise client.AgentError("it hangs")

    monkeypatch.setattr(client, "ask", ask)
    return asked, hangs


def test_a_drilld_that_hangs_is_asked_by_one(opened: Callable[..., Page],
                                             hung_drilld: tuple[threading.Event, threading.Event]) -> None:
    """Two tabs on /drills held both threads of the server, and /livez with them."""
    page, (asked, hangs) = opened(), hung_drilld
    first = threading.Thread(target=page.ask, args=("/drills",))
    first.start()
    assert asked.wait(60.0)
    assert "has not answered yet" in page.ask("/drills")[2]
    assert page.ask("/livez", "*/*")[0] == 200
    hangs.set()
    first.join()
    assert "no answer in time" in page.ask("/drills")[2]


def test_a_report_is_asked_for_by_one(opened: Callable[..., Page],
                                      hung_drilld: tuple[threading.Event, threading.Event]) -> None:
    """Eight tabs on reports of a drilld that hung, and /livez took 5.75 s: the kubelet would have ended the agent."""
    page, (asked, hangs) = opened(), hung_drilld
    told: list[Any] = []
    first = threading.Thread(target=lambda: told.append(page.ask("/reports/a")))
    first.start()
    assert asked.wait(60.0)
    for path in ("/reports/a", "/reports/b"):
        status, _, body = page.ask(path)
        assert (status, "is being asked" in body) == (503, True)
    assert "has not answered yet" in page.ask("/drills")[2]
    assert page.ask("/livez", "*/*")[0] == 200
    hangs.set()
    first.join()
    assert told[0][0] == 503
    assert "no answer in time" in told[0][2]


def test_a_report_that_is_not_there(opened: Callable[..., Page], drilld: daemon.Daemon) -> None:
    """A run that nobody held is a 404; of a drilld that is dead nobody knows."""
    page = opened()
    status, _, body = page.ask("/reports/nonesuch")
    assert (status, body) == (404, "There is no such run: 'nonesuch'; /drills lists them.\n")
    page.site.drilld.unlink()
    status, _, body = page.ask("/reports/nonesuch")
    assert status == 503
    assert "systemctl start tocsin-drilld" in body


def test_a_page_of_sixteen_gpus_is_drawn_by_glance_alone(opened: Callable[..., Page]) -> None:
    """What is asked of the agent for one page does not grow with those who look."""
    page = opened()
    page.life.tick(30)
    counted: list[Any] = []
    check, alerts = page.agent.check, page.agent.alerts
    page.agent.check = lambda: counted.append(1) or check()  # type: ignore[method-assign,func-returns-value]
    page.agent.alerts = lambda past: counted.append(1) or alerts(past)  # type: ignore[assignment,func-returns-value]
    told = told_incident.told()
    page.agent.incident_told = lambda _: counted.append(1) or told  # type: ignore[assignment,func-returns-value]
    for path in ("/", "/engines", "/gpus", "/alerts", "/incidents/last", "/numbers/H2",
                 "/signals/gpu-temperature/GPU-0001", "/alerts/gpu-temperature/GPU-0001",
                 "/plots/gpu-temperature/GPU-0001"):
        counted.clear()
        for _ in range(20):
            assert page.ask(f"{path}?part=1")[0] == 200, path
        assert len(counted) == 1, path


def test_what_is_drawn_is_not_remembered_for_ever(opened: Callable[..., Page],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's script walked over every address, guessed ones too, and all of it stood in the agent's memory."""
    monkeypatch.setattr(pages, "MOST_DRAWN", 2)
    page = opened()
    counted: list[Any] = []
    check = page.agent.check
    page.agent.check = lambda: counted.append(1) or check()  # type: ignore[method-assign,func-returns-value]

    def drawn(*paths: str) -> int:
        counted.clear()
        for path in paths:
            page.ask(path)
        return len(counted)

    assert drawn("/", "/engines", "/", "/engines") == 2
    assert drawn("/numbers/H2", "/numbers/H2", "/engines") == 1
    assert drawn("/") == 1  # the oldest had to go
    assert drawn(*(f"/numbers/none-{n}" for n in range(5)), "/", "/numbers/H2") == 5
