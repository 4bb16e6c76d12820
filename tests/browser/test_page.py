"""The status page as people use it: Debian's Chromium, driven by Playwright, on a real agent and the NVML stand-in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent_process import AgentProcess
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
        write_scenario(scenario, gpus(16, gpu3={"temperature": 91}))
        self.engines = [PageServer(vllm(0.4, model)) for model in (RIGHT_TO_LEFT, HOSTILE, LONG)]
        names = (HOSTILE, LONG[:200], "שלום")  # a configured name has at most 200 characters, a model any
        listed = [{"name": name, "url": engine.url, "gpus": [n]}
                  for n, (name, engine) in enumerate(zip(names, self.engines, strict=True))]
        config = {"node": "gpu-17", "poll": "1s", "engines": listed, "web": {"token_env": "PAGE_TOKEN"},
                  "rules": {"override": {"kv-cache-utilization": {"for": "1s", "keep": "1s"}}},
                  "listen": "127.0.0.1:0"}
        env = {"LD_LIBRARY_PATH": str(build()), "TOCSIN_FAKE_NVML": str(scenario), "PAGE_TOKEN": TOKEN}
        self.agent = AgentProcess(folder / "agent", config, env)
        self.agent.start()

    @property
    def url(self) -> str:
        """Where the page is, as the agent's log says."""
        told = (json.loads(line) for line in self.agent.log.read_text().splitlines() if line.startswith("{"))
        return next(f"http://{one['listen']}" for one in told if one.get("event") == "started")

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

    def __init__(self, browser: Browser, node: Node, width: int = 1440) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.set_default_timeout(WITHIN_MS)
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.node = node
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.node.url):
            self.foreign.append(request.url)

    def open(self, path: str) -> Page:
        """Go to a view."""
        self.page.goto(self.node.url + path)
        return self.page

    def close(self) -> None:
        """Nothing went wrong."""
        self.page.close()
        assert self.errors == []
        assert self.foreign == []


VIEWS = ("/", "/engines", "/gpus", "/alerts", "/silences", "/drills", "/runbooks", "/runbooks/queue-age", "/rules",
         "/numbers/H2", "/signals/gpu-temperature/GPU-fa4e0000-0000-4000-8000-000000000003")  # fmt: skip


@pytest.mark.heavy
def test_each_view_in_both_widths(node: Node, browser: Browser) -> None:
    """At 390 px a table ran out of the phone at night; axe-core finds what a screen reader cannot use."""
    from axe_playwright_python.sync_playwright import Axe

    for width in (1440, 390):
        seen = Seen(browser, node, width)
        for path in VIEWS:
            page = seen.open(path)
            page.wait_for_selector("h1", state="attached")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{path} is {wide} px wide on {width}"
            found = Axe().run(page).response["violations"]
            bad = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in SERIOUS]
            assert bad == [], f"{path} at {width} px"
        seen.close()


@pytest.mark.heavy
def test_a_breach_comes_and_goes_without_a_reload(node: Node, browser: Browser) -> None:
    """The engineer watches: OK, BREACH, OK, in one tab that was never loaded again."""
    seen = Seen(browser, node)
    page = seen.open("/")
    page.evaluate("window.never = 'reloaded'")
    row = page.locator("tr", has=page.locator(".number", has_text="H2"))
    row.locator(".state.ok").wait_for()
    node.fill(0.97)
    row.locator(".state.breach").wait_for()
    assert "97 %" in row.inner_text()
    assert "HEALTHY" not in page.title()
    node.fill(0.4)
    row.locator(".state.ok").wait_for()
    assert page.evaluate("window.never") == "reloaded"
    seen.close()


@pytest.mark.heavy
def test_hostile_names_are_text(node: Node, browser: Browser) -> None:
    """A name that is a script, one of 300 characters, one that turns the line around."""
    seen = Seen(browser, node, 390)
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
    """Whoever has the token mutes the hot GPU without touching the mouse; whoever has not is told so."""
    seen = Seen(browser, node)
    for token, told in ((TOKEN, "Silenced"), ("guess", "Not silenced")):  # after a guess none is taken for a second
        page = seen.open("/silences?rule=gpu-temperature&subject=GPU-fa4e0000-0000-4000-8000-000000000003")
        page.get_by_label("Why").focus()
        page.keyboard.type("the fan is on its way")
        page.keyboard.press("Tab")
        page.keyboard.type("eve")
        page.keyboard.press("Tab")
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=told, exact=True).wait_for()
    assert "the fan is on its way" in seen.open("/silences").locator("main").inner_text()
    seen.errors = [text for text in seen.errors if "403" not in text]  # Chromium logs the refusal that was asked for
    seen.close()


@pytest.mark.heavy
def test_an_agent_that_is_gone_is_seen(node: Node, browser: Browser) -> None:
    """It was killed; the tab went on showing HEALTHY for an hour."""
    seen = Seen(browser, node)
    page = seen.open("/")
    page.locator(".verdict").wait_for()
    page.route("**/*part=1", lambda route: route.abort())
    page.locator("#lost", has_text="No answer from the agent since").wait_for()
    page.unroute("**/*part=1")
    page.locator("#lost").wait_for(state="hidden")
    seen.page.close()
    assert seen.foreign == []
