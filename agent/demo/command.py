"""`tocsin demo`: start the node, play the story, end everything."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent import client
from agent.config import load_all
from agent.demo.node import Node, NotStarted
from agent.demo.scenario import STORY, read
from agent.demo.story import Narrator, Story, TimeIsUp, Unmet
from agent.signals import CATALOGUE
from agent.strict import ConfigErrors

LINGER_S = 60.0
USAGE = 2


def show(scenario: Path | None, for_s: float | None, *, headless: bool, quiz: bool) -> int:
    """Play it; the exit status: 0, 1 where the story did not come true, 2 for a scenario with faults.

    `for_s`: from when the node is up; None: to the story's end, and on a terminal LINGER_S more.
    """
    plain = headless or not sys.stdout.isatty()
    narrator = Narrator(sys.stdout, plain=plain)
    try:
        rules = load_all(Path(os.devnull), {}, CATALOGUE)[1].rules
        wanted = read(scenario or STORY, {rule.id: rule.severity for rule in rules})
    except ConfigErrors as errors:
        sys.stderr.write(f"{errors}\n")
        return USAGE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    began = time.monotonic()
    try:
        narrator.say(f"{wanted.name}. Starting the node …", "bold")
        with Node(wanted) as node, _undisturbed_end():
            until = None if for_s is None else time.monotonic() + for_s
            story = Story(node, narrator, until=until, answer=_ask if quiz else None)
            story.introduce()
            try:
                story.play()
                story.sum_up()
                left_s = LINGER_S if until is None else until - time.monotonic()
                if until is not None or not plain:
                    narrator.say(f"The story is told. {node.url}/ stays for {max(0.0, left_s):.0f} s more; Ctrl-C ends "
                                 "it now, --for 10m keeps it longer.", "bold")
                    story.linger(max(0.0, left_s))
            except TimeIsUp:
                narrator.say("The time of --for is over.", "bold")
                story.sum_up()
    except (Unmet, NotStarted, client.NotRunning, client.AgentError) as fault:
        sys.stderr.write(f"tocsin demo: {fault}\n")
        return 1
    except KeyboardInterrupt:
        narrator.say("Ended by hand.")
    narrator.say(f"Everything is ended, nothing is left. It took {time.monotonic() - began:.0f} s.")
    return 0


@contextmanager
def _undisturbed_end() -> Iterator[None]:
    """Who presses Ctrl-C twice is in a hurry, and yet nothing may be left behind."""
    try:
        yield
    finally:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)


def _ask(prompt: str) -> str:
    """A person's answer is not judged: it is for them. Without anybody to ask, the story goes on."""
    if not sys.stdin.isatty():
        return ""
    try:
        return input(prompt)
    except EOFError:
        return ""
