"""The status page as people use it: Debian's Chromium, driven by Playwright, on a real agent and the NVML stand-in."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from agent import client
from tests.agent_process import ROOT, AgentProcess
from tests.drills.stand_ins import tmpfs, wait_for
from tests.engine_pages import GOLDEN
from tests.fake_nvml.build import build
from tests.fake_nvml.reader import write_scenario
from tests.hardware.stories import gpus
from tests.needs import find, need
from tests.page_server import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOKEN = "correct horse battery"
LONG = "x" * 300
RIGHT_TO_LEFT = "‮evil‬ שלום"
HOSTILE = "<script>document.title='owned'</script>"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
WITHIN_MS = 180_000
SERIOUS = ("serious", "critical")


def vllm(kv: float, model: str = "m") -> bytes:
    """The page of an engine that is not busy, its KV cache so full."""
    text = (GOLDEN / "vllm-0.30.txt").read_text().replace('model_name="m"', f'model_name="{model}"')
    for name, value in (("kv_cache_usage_perc", kv), ("num_requests_waiting", 0.0)):
        text = re.sub(rf"^(vllm:{name}{{[^}}]*}}) .*$", rf"\g<1> {value}", text, flags=re.MULTILINE)
    return text.encode()


class Node:
    """A node of 16 GPUs and three engines, they and their models of hostile names."""

    def __init__(self, folder: Path) -> None:
        scenario = folder / "gpus.json"
        write_scenario(scenario, gpus(16, gpu3={"temperature": 97, "margin": -10}))
        self.engines = [PageServer(vllm(0.4, model)) for model in (RIGHT_TO_LEFT, HOSTILE, LONG)]
        names = (HOSTILE, LONG[:200], "שלום")  # a configured name has at most 200 characters, a model any
        listed = [{"name": name, "url": engine.url, "gpus": [n]}
                  for n, (name, engine) in enumerate(zip(names, self.engines, strict=True))]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"  # the same when it is killed and started again
        config = {"node": "gpu-17", "poll": "1s", "engines": listed, "web": {"token_env": "PAGE_TOKEN"},
                  "rules": {"override": {"kv-cache-utilization": {"for": "1s", "keep": "1s"},
                                         "gpu-thermal-limit": {"for": "1s"}}},
                  "listen": self.url.removeprefix("http://")}
        env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario), "PAGE_TOKEN": TOKEN}
        self.agent = AgentProcess(folder / "agent", config, env)
        self.agent.start()

    def fill(self, kv: float) -> None:
        """So full is the first engine's KV cache."""
        self.engines[0].set_page(vllm(kv, RIGHT_TO_LEFT))

    def close(self) -> None:
        """End all of it."""
        self.agent.kill()
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node for all."""
    need("chromium", "gcc")
    made = Node(tmp_path_factory.mktemp("node"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find("chromium"), args=list(FLAGS))
        yield started
        started.close()


class Seen:
    """A tab, and what went wrong in it: errors on its console, requests to anybody else."""

    def __init__(self, browser: Browser, url: str, width: int = 1440,
                 scheme: Literal["light", "dark"] = "light") -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(WITHIN_MS)
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.url = url
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.foreign.append(request.url)

    def open(self, path: str) -> Page:
        """Go to a view."""
        self.page.goto(self.url + path)
        return self.page

    def looked_at(self, what: str) -> None:
        """axe-core finds nothing that a screen reader, or weak eyes, cannot use; and it is no wider than the window."""
        from axe_playwright_python.sync_playwright import Axe

        small = self.page.evaluate("[...document.querySelectorAll('.ten a')].map(one => one.getBoundingClientRect()"
                                   ".height).filter(px => px < 24)")
        assert small == [], f"{what}: links that no thumb meets, in px"
        size = self.page.viewport_size
        assert size is not None
        wide = self.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], f"{what} is {wide} px wide on {size['width']}"
        found = Axe().run(self.page).response["violations"]
        bad = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in SERIOUS]
        assert bad == [], f"{what} at {size['width']} px"

    def close(self) -> None:
        """Nothing went wrong."""
        self.page.close()
        assert self.errors == []
        assert self.foreign == []


HOT = "GPU-fa4e0000-0000-4000-8000-000000000003"
VIEWS = ("/", "/engines", "/gpus", "/alerts", f"/alerts/gpu-thermal-limit/{HOT}", "/incidents", "/incidents/last",
         "/silences", "/drills", "/runbooks", "/runbooks/queue-age", "/rules", "/numbers/H2",
         f"/signals/gpu-temperature/{HOT}")  # fmt: skip
IN_THE_DARK = ("/", "/incidents/last", "/silences", "/runbooks/queue-age")  # what is drawn in a colour of its own


@pytest.mark.heavy
def test_each_view_in_both_widths(node: Node, browser: Browser) -> None:
    """At 390 px a table ran out of the phone at night; axe-core finds what a screen reader cannot use."""
    wait_for(lambda: node.agent.ask("/incidents") != [], WITHIN_MS / 1000)  # of GPU 3, which is too hot
    for width, scheme, views in ((1440, "light", VIEWS), (390, "light", VIEWS), (390, "dark", IN_THE_DARK)):
        seen = Seen(browser, node.url, width, "dark" if scheme == "dark" else "light")
        for path in views:
            page = seen.open(path)
            page.wait_for_selector("h1", state="attached")
            seen.looked_at(f"{path}, {scheme},")
        seen.close()


@pytest.mark.heavy
def test_a_table_on_a_phone_is_heard_as_one(node: Node, browser: Browser) -> None:
    """Its rows are drawn as cards; a screen reader finds table, heads and cells all the same, and hears a curve."""
    seen = Seen(browser, node.url, 390)
    page = seen.open("/numbers/H2")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = [one["role"]["value"] for one in tree if not one["ignored"]]
    assert [roles.count(role) for role in ("table", "rowheader", "columnheader")] == [1, 3, 7]
    assert roles.count("row") == 4
    assert sum(roles.count(role) for role in ("cell", "gridcell")) == 3 * 6
    names = [one["name"]["value"] for one in tree if one["role"]["value"] == "image"]
    told = "KV cache utilization, the worst of each minute, last hour: 40 % throughout, limit 85 %"
    assert told in names, names
    seen.close()


@pytest.mark.heavy
def test_a_breach_comes_and_goes_without_a_reload(node: Node, browser: Browser) -> None:
    """The engineer watches: OK, BREACH, OK, in one tab that was never loaded again."""
    seen = Seen(browser, node.url)
    page = seen.open("/")
    page.evaluate("window.never = 'reloaded'")
    before = page.locator(".verdict .line").inner_text()
    row = page.locator("tr", has=page.locator(".number", has_text="H2"))
    row.locator(".state.ok").wait_for()
    node.fill(0.97)
    row.locator(".state.breach").wait_for()
    assert "97 %" in row.inner_text()
    assert page.locator(".verdict .line").inner_text() != before  # one more is out of range
    assert page.title() == "PAGE · gpu-17 · Tocsin"
    seen.looked_at("the node after a live change")
    node.fill(0.4)
    row.locator(".state.ok").wait_for()
    assert page.evaluate("window.never") == "reloaded"
    seen.close()


@pytest.mark.heavy
def test_why_there_is_no_number_breaks_on_a_phone(node: Node, browser: Browser) -> None:
    """What a silent engine does not tell is said with its name, of 200 letters and no space: the row was 1,667 px."""
    node.engines[1].set_page(b"")
    seen = Seen(browser, node.url, 390)
    page = seen.open("/")
    page.locator("td.quiet", has_text=f"of {LONG[:200]}").first.wait_for()
    seen.looked_at("an engine of a long name that tells nothing")
    seen.close()
    node.engines[1].set_page(vllm(0.4, HOSTILE))


@pytest.mark.heavy
def test_hostile_names_are_text(node: Node, browser: Browser) -> None:
    """A name that is a script, one of 300 characters, one that turns the line around."""
    seen = Seen(browser, node.url, 390)
    page = seen.open("/engines")
    text = page.locator("main").inner_text()
    for name in (HOSTILE, LONG, RIGHT_TO_LEFT):
        assert name in text
    assert "owned" not in page.title()
    assert page.locator("main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    seen.close()


@pytest.mark.heavy
def test_a_silence_by_keyboard_with_and_without_the_token(node: Node, browser: Browser) -> None:
    """Whoever has the token mutes the hot GPU, and ends it, without touching the mouse; whoever has not is told so."""
    seen = Seen(browser, node.url)

    def silence(token: str) -> Page:
        page = seen.open(f"/silences?rule=gpu-temperature&subject={HOT}")
        page.get_by_label("Why").focus()
        for text in ("the fan is on its way", "eve", token):
            page.keyboard.type(text)
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the button
        return page

    silence(TOKEN).get_by_role("heading", name="Silenced", exact=True).wait_for()
    page = seen.open("/silences")
    assert "the fan is on its way" in page.locator("main").inner_text()
    page.get_by_text("End it before its time").focus()
    for key in ("Enter", "Tab", "bob", "Tab", TOKEN, "Enter"):
        (page.keyboard.press if key in ("Enter", "Tab") else page.keyboard.type)(key)
    page.get_by_role("heading", name="Ended", exact=True).wait_for()
    page = silence("guess")
    page.get_by_role("alert").get_by_role("heading", name="Not silenced", exact=True).wait_for()
    assert page.get_by_label("Why").input_value() == "the fan is on its way"
    assert page.get_by_label("Token").first.input_value() == ""
    seen.looked_at("a refusal")
    seen.errors = [text for text in seen.errors if "403" not in text]  # Chromium logs the refusal that was asked for
    seen.close()


@pytest.mark.heavy
def test_what_was_chosen_outlives_a_poll(node: Node, browser: Browser) -> None:
    """She chose 8 h, went to ask for the token, and the silence that she made was one of 2 h."""
    seen = Seen(browser, node.url)
    page = seen.open("/silences")
    page.evaluate("refresh()")  # the first answer is put in place
    page.get_by_label("For").select_option("8h")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("last = ''; refresh()")
    assert page.get_by_label("For").input_value() == "8h"
    seen.close()


@pytest.mark.heavy
def test_an_agent_that_is_killed_is_seen_and_its_return_too(node: Node, browser: Browser) -> None:
    """It was killed; the tab went on showing its last verdict for an hour."""
    seen = Seen(browser, node.url)
    page = seen.open("/")
    page.locator(".verdict").wait_for()
    page.evaluate("window.never = 'reloaded'")
    node.agent.kill()
    lost = page.get_by_role("alert")
    page.locator("#lost", has_text="No answer from the agent since").wait_for()
    assert re.search(r"since \d\d:\d\d:\d\d UTC: what stands below is old", lost.inner_text())
    assert page.evaluate("getComputedStyle(document.querySelector('main')).opacity") == "0.55"
    node.agent.start()
    page.locator("#lost").wait_for(state="hidden")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).opacity") == "1"
    assert page.evaluate("window.never") == "reloaded"
    seen.page.close()
    assert seen.foreign == []


@pytest.mark.heavy
def test_focus_stays_and_a_second_incident_is_told(browser: Browser, tmp_path: Path) -> None:
    """On a node of one engine links occur twice, and every 5 s the focus jumped; a second incident was not read out."""
    with PageServer(vllm(0.4)) as engine, AgentProcess(
            tmp_path / "agent", {"node": "gpu-17", "poll": "1s", "nvml": "off", "listen": "127.0.0.1:0",
                                 "engines": [{"name": "a", "url": engine.url}]}) as agent:
        seen = Seen(browser, agent.url())
        page = seen.open("/")
        twice = page.locator(".cards .ten a").evaluate_all("""all => all.map(one => one.getAttribute("href")).filter(
            href => document.querySelectorAll(`main a[href="${href}"]`).length > 1)""")
        link = page.locator(f".cards .ten a[href='{twice[0]}']")
        link.focus()
        page.evaluate("refresh()")
        page.wait_for_function("last !== ''")
        assert page.evaluate("Boolean(document.activeElement.closest('.cards'))")
        heard = [page.evaluate("""ids => {
            said.textContent = "";
            tell(new DOMParser().parseFromString(`<p data-title="PAGE" data-said="PAGE: hot"></p>` + ids.map((id) =>
                `<article class="incident"><h2>incident ${id}</h2><details id="${id}"></details></article>`).join(""),
                "text/html"));
            return said.textContent;
        }""", ids) for ids in ([], ["i1"], ["i1"], ["i2", "i1"], ["i2"])]
        assert heard == ["PAGE: hot", "PAGE: hot. incident i1", "", "PAGE: hot. incident i2", ""]
        seen.close()


# --- drills ----------------------------------------------------------------------------------------------------------


class Drilled:
    """A node whose drilld could fill a disk of 32 MiB, after five minutes of baseline."""

    def __init__(self, folder: Path, disk: Path, stack: ExitStack) -> None:
        engines = [stack.enter_context(PageServer(vllm(0.4))) for _ in range(2)]
        drill = {"name": "full", "fault": "disk-full", "target": {"path": str(disk)}, "params": {"leave": "4MiB"},
                 "baseline": "300s", "for": "60s", "recovery": "60s",
                 "holds": dict.fromkeys(("goodput", "ttft_p99", "itl_p99", "error_ratio"))}
        config = {"node": "gpu-17", "poll": "1s", "nvml": "off", "web": {"token_env": "PAGE_TOKEN"}, "drills": [drill],
                  "engines": [{"name": f"e{n}", "url": engine.url} for n, engine in enumerate(engines)],
                  "drill_guards": {"lever_file": str(folder / "NO-DRILLS")}}
        self.agent = stack.enter_context(AgentProcess(folder / "agent", config, {"PAGE_TOKEN": TOKEN}))
        self.socket = self.agent.socket.with_name("drilld.sock")
        log = stack.enter_context((folder / "drilld.log").open("wb"))
        self.drilld = subprocess.Popen([sys.executable, "-m", "drills.daemon", "--config", str(self.agent.path)],
                                       cwd=ROOT, stdout=log, stderr=log)
        stack.callback(self.drilld.wait)
        stack.callback(self.drilld.terminate)
        wait_for(self.answers)

    def answers(self) -> bool:
        """Whether drilld does."""
        try:
            return bool(client.ask(self.socket, "/drills"))
        except (client.NotRunning, client.AgentError):
            return False

    def state(self, run: str) -> str:
        """Of a run."""
        return str(client.ask(self.socket, f"/runs/{run}")["state"])

    @property
    def url(self) -> str:
        """Where the page is."""
        return self.agent.url()


@pytest.mark.heavy
def test_a_drill_is_aborted_with_the_token_and_its_report_opens(browser: Browser, tmp_path: Path) -> None:
    """A drill at the wrong moment, and a phone: whoever has the token ends it, and reads what it was."""
    with ExitStack() as stack:
        drilled = Drilled(tmp_path, stack.enter_context(tmpfs(tmp_path / "disk", "32m")), stack)
        run = client.ask(drilled.socket, "/run", "POST", {"name": "full", "accept_unknown_budget": True})["run"]
        wait_for(lambda: drilled.state(run) == "BASELINE")
        seen = Seen(browser, drilled.url, 390)
        for token, told in (("guess", "Not aborted"), (TOKEN, "Aborted")):
            page = seen.open("/drills")
            page.get_by_text(f"Under way: {run}").wait_for()
            seen.looked_at("/drills with a drill under way")
            page.get_by_label("Token").fill(token)
            with page.expect_navigation():
                page.keyboard.press("Enter")
            assert page.locator("h1").inner_text() == told
            assert token == TOKEN or drilled.state(run) == "BASELINE"
        wait_for(lambda: drilled.state(run) == "REPORTED")
        page.get_by_role("link", name="Back").click()
        page.locator("tr", has_text="ABORTED").get_by_role("link", name=run).click()
        page.get_by_role("heading", name=re.compile("ABORTED")).wait_for()
        assert "aborted by the page's token" in page.locator("body").inner_text()
        seen.looked_at("a drill's report")
        seen.errors = [text for text in seen.errors if "403" not in text]
        seen.close()
