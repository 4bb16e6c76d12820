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
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal was closed


def show(scenario: Path | None, for_s: float | None, *, headless: bool, quiz: bool) -> int:
    """Play it; the exit status: 0, 1 where the story did not come true, 2 for a scenario with faults.

    Ended by a signal before it is told: 128 and the signal's number, as 130 for Ctrl-C and 143 for SIGTERM.

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
    for one in ENDING:
        if signal.getsignal(one) != signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(one, _end_by)
    began = time.monotonic()
    is_told, status = False, 0
    node = Node(wanted)
    try:
        narrator.say(f"{wanted.name}. Starting the node …", "bold")
        with node, _undisturbed_end():
            until = None if for_s is None else time.monotonic() + for_s
            story = Story(node, narrator, until=until, answer=_ask if quiz else None)
            story.introduce()
            try:
                story.play()
                story.sum_up()
                is_told = True
                left_s = LINGER_S if until is None else until - time.monotonic()
                if until is not None or not plain:
                    narrator.say(f"The story is told. {node.url}/ stays for {max(0.0, left_s):.0f} s more; Ctrl-C ends "
                                 "it now, --for 10m keeps it longer.", "bold")
                    story.linger(max(0.0, left_s))
            except TimeIsUp:
                narrator.say("The time of --for is over.", "bold")
                story.sum_up()
                is_told = True
    except (Unmet, NotStarted, client.NotRunning, client.AgentError) as fault:
        sys.stderr.write(f"tocsin demo: {fault}\n")
        return 1
    except Ended as end:
        narrator.say("Ended by hand.")
        status = 0 if is_told else 128 + end.signal
    if left := node.left():
        sys.stderr.write(f"tocsin demo: left behind: {', '.join(left)}; end and remove them by hand\n")
        return 1
    narrator.say(f"Everything is ended, nothing is left. It took {time.monotonic() - began:.0f} s.")
    return status


class Ended(BaseException):
    """A signal asks to end. No handler of faults may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def _end_by(number: int, _: object) -> None:
    """Raises Ended. Where the terminal was closed nobody can be told any more."""
    if number == signal.SIGHUP:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
    raise Ended(number)


@contextmanager
def _undisturbed_end() -> Iterator[None]:
    """Who presses Ctrl-C twice is in a hurry, and yet nothing may be left behind."""
    try:
        yield
    finally:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)


def _ask(prompt: str) -> str:
    """A person's answer is not judged: it is for them. Without anybody to ask, the story goes on."""
    if not sys.stdin.isatty():
        return ""
    try:
        return input(prompt)
    except EOFError:
        return ""
