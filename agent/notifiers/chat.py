"""Everything else that people are reached by (Discord, Telegram, Teams, Matrix, mail, SMS …), through Apprise.

An Apprise address is a secret whole: token and host are one word of it. So nothing of it is ever told but the service's
name. Each message is sent by a process of its own (apprise_send.py), which follows no redirect.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.model import AlertMessage, Notice, Rejected, TryLater
from agent.notifiers.channel import Channel, sendable, status_outcome, web_address
from agent.notifiers.slack import title

SENT_WITHIN_S = 30.0
SCRIPT = Path(__file__).with_name("apprise_send.py")
TYPES: Mapping[str, str] = {"page": "failure", "ticket": "warning", "info": "info", "resolved": "success"}
MISSING = "apprise is not installed; pip install 'tocsin[chat]'"
# What calls a whole channel somewhere, or becomes a mention: a zero-width space makes it text.
_CALLS = re.compile(r"(@)(?=everyone|here|channel|all\b|room)|(<)(?=[!@#])", re.IGNORECASE)
Run = Callable[[Mapping[str, str]], Mapping[str, Any]]


def in_a_process(asked: Mapping[str, str]) -> Mapping[str, Any]:
    """Have apprise_send.py send. Raises TryLater where it does not end well."""
    command = [sys.executable, "-P", str(SCRIPT)]
    try:
        done = subprocess.run(command, input=json.dumps(asked).encode(), stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=SENT_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        failure = TryLater(f"Apprise did not send within {SENT_WITHIN_S:.0f} s")
    else:
        try:
            told: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            failure = TryLater(f"Apprise's process ended with {done.returncode} and told nothing")
        else:
            return told
    raise failure  # out here, so that it carries no __context__: that one has the address in it


class Chat(Channel):
    """`url` gives Apprise's address at each message, so that a rotated one is taken; it may raise TryLater."""

    by_incident = True

    def __init__(self, name: str, url: Callable[[], str], run: Run = in_a_process) -> None:
        self.name = name
        self._url = url
        self._run = run

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """Send each notice. Raises Rejected or TryLater."""
        for notice in notices:
            outcome(self._run(asked(notice.message, self._url())), now)
        return {}

    def address(self) -> str:
        """As its file or variable holds it now."""
        return self._url()


def asked(message: AlertMessage, url: str) -> dict[str, str]:
    """A message as the sender takes it."""
    texts = message.annotations
    lines = [texts.get("description", "")]
    if message.status == "firing" and "Do now:" not in lines[0] and texts.get("action", "") not in lines[0]:
        lines.append(f"Do now: {texts['action']}")
    lines += [f"{name}: {href}" for name, href in (
        ("Runbook", web_address(texts.get("runbook_url", ""))), ("Alert", web_address(message.generator_url))) if href]
    body = "\n".join(line for line in lines if line) or title(message)
    kind = TYPES["resolved" if message.status == "resolved" else message.severity]
    return {"url": url, "title": quiet(title(message)), "body": quiet(body), "type": kind}


def quiet(text: str) -> str:
    """Text in which nothing calls a whole channel: it comes from logs and labels of others."""
    return _CALLS.sub(lambda found: f"{found[0]}\N{ZERO WIDTH SPACE}", sendable(text))


def outcome(told: Mapping[str, Any], now: float) -> None:
    """What the sender told: None is delivered. Raises Rejected or TryLater."""
    if told.get("missing"):
        raise Rejected(MISSING)
    if told.get("unknown"):
        raise Rejected("Apprise knows no such address; `apprise --details` lists what it takes")
    service, status = f"{told.get('service') or 'a service'} (by Apprise)", told.get("status")
    if status is not None:
        status_outcome(int(status), told.get("headers") or {}, now, service)
    if told.get("ok"):
        return
    if status is not None:
        raise TryLater(f"{service}: HTTP {status}, and Apprise does not take that for a delivery")
    if told.get("error"):
        raise TryLater(f"{service}: {told['error']}")
    raise TryLater(f"{service}: not delivered" + (f": {told['words']}" if told.get("words") else ""))
