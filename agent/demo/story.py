"""Plays a scenario on a demo node and tells it: what is done, what the pager got, and what the agent's API says of it.

Nothing is claimed that was not asked of the agent, of drilld or of the receiver just before.
"""

from __future__ import annotations

import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from agent import client
from agent.demo.node import SHORTENED, Node
from agent.demo.scenario import Expect, Step
from agent.words import verdict_line

LOOK_S = 0.25
DRILL_WITHIN_S = 240.0
REPORT_WITHIN_S = 30.0
BUSY = 503  # reports are read by one at a time
JUDGED = ("PASS", "FAIL", "INCONCLUSIVE")  # the drill was held, and says how it went
WIDTH = 110


class Unmet(RuntimeError):  # noqa: N818  (it says what is the case)
    """What the scenario expects did not come; the text says what did."""


class TimeIsUp(Exception):  # noqa: N818
    """`--for` is over."""


class Narrator:
    """Writes for a person: with rich on a terminal, elsewhere plain lines."""

    def __init__(self, out: TextIO, *, plain: bool) -> None:
        self._out, self._began = out, time.monotonic()
        self._console: Any = None
        if not plain:
            from rich.console import Console

            self._console = Console(file=out, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """A line, with the seconds since the start before it."""
        at = f"{time.monotonic() - self._began:4.0f} s  "
        body = textwrap.fill(text, WIDTH, initial_indent=at, subsequent_indent=" " * len(at), break_on_hyphens=False)
        if self._console is None:
            self._out.write(f"{body}\n")
            self._out.flush()
        else:
            self._console.print(body, style=style, markup=False, soft_wrap=True)

    def show(self, heading: str, lines: Sequence[str], style: str = "red") -> None:
        """Something that was received, as it is read there."""
        if self._console is None:
            self._out.write("".join(f"        | {line}\n" for line in (heading, *lines)))
            self._out.flush()
            return
        from rich.panel import Panel
        from rich.text import Text

        self._console.print(Panel(Text("\n".join(lines)), title=Text(heading), title_align="left", border_style=style))


class Story:
    """One play. `until`: monotonic seconds at which it is cut short, None for never."""

    def __init__(self, node: Node, narrator: Narrator, *, until: float | None = None,
                 answer: Callable[[str], object] | None = None) -> None:
        """`answer` asks the person a question and waits for them; None: no quiz."""
        self.node, self.say, self.show = node, narrator.say, narrator.show
        self._until, self._answer = until, answer
        self._shown: dict[str, tuple[float, Sequence[str]]] = {}  # incidents on the pager: since when, what was read
        self._rang = 0
        self._began_at = time.time()
        self._read = 0  # events of the pager that were told

    def introduce(self) -> None:
        """What there is, what of it is simulated, and what is set otherwise than by default."""
        router = "nginx" if self.node.nginx else "a small router (nginx is not installed)"
        engines = ", ".join(f"{name} http://127.0.0.1:{port}" for name, port in self.node.engines.items())
        self.say(f"SIMULATED: 8 GPUs, 2 engines ({engines}) and their users; the engines say that they have run for an "
                 f"hour. REAL: {router}, tocsin run, tocsin drilld, and all they say.")
        self.say(f"The node's page: {self.node.url}/   (Ctrl-C ends everything and leaves nothing behind)", "bold")
        changed = "; ".join(f"{rule} {', '.join(f'{key} {value}' for key, value in told.items())}"
                            for rule, told in SHORTENED.items())
        self.say(f"So that the story fits, these rules are quicker than by default: {changed}. SLO: TTFT p99 1 s, "
                 "ITL p99 150 ms. Otherwise than on a real node, too: all is read every second (5 s), drills need not "
                 "be apart (drill_guards.min_gap 0 s), and this one may run before the month's error budget is known.")

    def play(self) -> None:
        """All steps. Raises Unmet, TimeIsUp."""
        for step in self.node.scenario.steps:
            self._step(step)

    def linger(self, for_s: float) -> None:
        """Leave the node up for a while, and go on telling of its pages."""
        end = time.monotonic() + for_s
        self._wait(lambda: time.monotonic() >= end, for_s + 1)

    def sum_up(self) -> None:
        """What the agent's own API says of all this."""
        users = self.node.users
        incidents = self.node.ask("/incidents")
        self.say(f"The agent's API (/incidents): {len(incidents)} incident(s). The pager rang {self._rang} time(s).")
        for one in incidents:
            alerts = ", ".join(f"{member['rule']} on {member['subject']}" for member in one["members"])
            lasted = "open" if one["ended_at"] is None else f"lasted {one['ended_at'] - one['began_at']:.0f} s"
            drill = f", drill {one['drill']}" if one["drill"] else ""
            self.say(f"{one['id']}: {alerts} ({lasted}{drill})")
        if users is not None:
            self.say(f"Users: {users.answered} streams answered in full, {users.failed} broken.")

    # --- one step ---

    def _step(self, step: Step) -> None:
        if step.after:
            end = time.monotonic() + step.after
            self._wait(lambda: time.monotonic() >= end, step.after + 1)
        if step.say:
            self.say(step.say, "bold cyan")
        if step.ask and self._answer is not None:
            self.say(f"QUIZ  {step.ask}", "bold magenta")
            self._answer("       Your answer, then Enter: ")
        self._act(step)
        if step.expect is not None:
            self._expect(step.expect)
        if step.answer and self._answer is not None:
            self.say(f"ANSWER  {step.answer}", "bold magenta")

    def _act(self, step: Step) -> None:
        node = self.node
        if step.cooling is not None:
            node.cool(step.cooling.gpu, step.cooling.share)
        elif step.xid is not None:
            node.xid(step.xid.gpu, step.xid.number, step.xid.text)
        elif step.reset is not None:
            node.reset(step.reset)
        elif step.users is not None and node.users is not None:
            node.users.rate_per_s = step.users
        elif step.kill is not None:
            node.kill(step.kill)
        elif step.drill is not None:
            self._drill(step.drill)

    def _wait(self, true: Callable[[], bool], within_s: float) -> bool:
        """Whether it came true in time; the pager is told of meanwhile. Raises TimeIsUp."""
        end = time.monotonic() + within_s
        while True:
            self._tell_pages()
            with suppress(client.NotRunning, client.AgentError):  # a busy machine: asked again
                if true():
                    return True
            if self._until is not None and time.monotonic() >= self._until:
                raise TimeIsUp
            if time.monotonic() >= end:
                return False
            time.sleep(LOOK_S)

    # --- what is seen ---

    def _expect(self, expect: Expect) -> None:
        """Wait for it, by the agent's API. Raises Unmet, TimeIsUp."""
        began = time.monotonic()
        rule = expect.fires or expect.resolves

        def seen() -> bool:
            if expect.healthy:
                return bool(self.node.ask("/check")["verdict"] == "healthy")
            firing = self.node.firing()
            if rule is None:
                return not firing
            fires = any(row["rule"] == rule for row in firing)
            return fires if expect.fires else not fires and self._resolved(rule)

        what = f"{rule} {'fires' if expect.fires else 'is resolved'}" if rule is not None else \
            "the verdict is healthy" if expect.healthy else "nothing fires"
        if not self._wait(seen, expect.within):
            firing = ", ".join(f"{row['rule']} on {row['subject']}" for row in self.node.firing()) or "nothing"
            told = f" ({verdict_line(self.node.ask('/check'))})" if expect.healthy else ""
            raise Unmet(f"expected within {expect.within:g} s: {what}; what fires is: {firing}{told}")
        took_s = time.monotonic() - began
        for row in self.node.firing():
            if row["rule"] == rule:
                self.say(f"The agent's API (/alerts): {rule} fires on {row['subject']}, {row['severity']}, "
                         f"{took_s:.0f} s later.", "green")
        if not expect.fires:
            self.say(f"The agent's API ({'/check' if expect.healthy else '/alerts'}): {what}, {took_s:.0f} s later.",
                     "green")
        end = time.monotonic() + 2.0  # for what is owed to the pager
        self._wait(lambda: time.monotonic() >= end, 3.0)

    def _resolved(self, rule: str) -> bool:
        """Whether it fired in this play and was resolved: what never fired has not come to its end."""
        return any((row["rule"], row["state"]) == (rule, "resolved") and row["until"] >= self._began_at
                   for row in self.node.ask("/alerts"))

    def _tell_pages(self) -> None:
        events = self.node.receiver.events[self._read :]
        self._read += len(events)
        for event in events:
            key = str(event["dedup_key"])
            before = self._shown.get(key)
            if event["event_action"] == "resolve":
                if before is not None:
                    del self._shown[key]
                    self.show(f"RESOLVED, {event['at'] - before[0]:.0f} s after it rang: {before[1][0]}", (), "green")
                continue
            title, lines = str(event["payload"]["summary"]), page_lines(event)
            self._shown[key] = (event["at"] if before is None else before[0], (title, *lines))
            if before is None:
                self._rang += 1
                self.show(f"THE PAGER RINGS: {title}", lines)
            elif new := [line for line in lines if line not in before[1]]:
                self.show(f"THE SAME PAGE, and what of it is new: {title}", new, "yellow")

    # --- the drill ---

    def _drill(self, engine: str) -> None:
        """Have drilld hold it, and open its report. Raises Unmet, TimeIsUp."""
        asked = {"name": f"kill-{engine}", "accept_unknown_budget": True}
        run = str(client.ask(self.node.drilld_socket, "/run", "POST", asked)["run"])
        self.say(f"drilld holds {asked['name']}: run {run}", "bold")
        told: dict[str, Any] = {}
        states: list[str] = []

        def over() -> bool:
            told.update(client.ask(self.node.drilld_socket, f"/runs/{run}"))
            if told["state"] is not None and told["state"] not in states:
                states.append(told["state"])
                self.say(f"drill: {told['state']}", "dim")
            return bool(told["over"])

        if not self._wait(over, DRILL_WITHIN_S):
            raise Unmet(f"the drill {run} is not over after {DRILL_WITHIN_S:g} s; its state is {told['state']}")
        row = told["row"] or {}
        if row.get("verdict") not in JUDGED:
            raise Unmet(f"the drill {run} was not held: {row.get('verdict')}: {row.get('why')}")
        good = row["verdict"] == "PASS"
        self.say(f"The drill's verdict: {row['verdict']}: {row['why']}", "bold green" if good else "bold red")
        self.show("What was asked, and what was seen", [
            f"{one['verdict']:<13}{one['name']}: {one['got']}" for one in told["rows"]], "green" if good else "red")
        address = f"{self.node.url}/reports/{run}"
        size = len(self._report(address))
        self.say(f"Its report opens: {address} ({size / 1024:.0f} kB)", "bold")
        if row["verdict"] == "FAIL":
            raise Unmet(f"the drill {run} failed: {row['why']}")

    def _report(self, address: str) -> bytes:
        """A drill's report, as the page has it. Raises Unmet, TimeIsUp."""
        read: list[bytes] = []

        def opens() -> bool:
            try:
                with urllib.request.urlopen(address, timeout=30) as page:  # noqa: S310  (our own agent's)
                    read.append(page.read())
            except urllib.error.HTTPError as error:
                if error.code == BUSY:
                    return False
                raise
            return True

        try:
            if not self._wait(opens, REPORT_WITHIN_S):
                raise Unmet(f"the report does not open: {address}: somebody else reads one all the time")
        except urllib.error.URLError as error:
            raise Unmet(f"the report does not open: {address}: {error}") from error
        return read[0]


def page_lines(event: Mapping[str, Any]) -> list[str]:
    """What a pager's person reads under the title."""
    details = event["payload"].get("custom_details", {})
    text = details.get("description") or "\n".join(f"{name}: {value}" for name, value in details.items())
    return str(text).splitlines()
