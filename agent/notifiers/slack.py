"""Slack: a message a notice, by an incoming webhook or by a bot token and a channel.

What stands in a message comes from logs and labels of others: `&`, `<` and `>` are escaped, so that no data of theirs
becomes a link or calls a whole channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent.model import AlertMessage, Notice, Rejected, TryLater
from agent.notifiers.channel import BadMessage, Channel, cut_to, no_web_page, request, rfc3339, sendable, web_address

POST_URL = "https://slack.com/api/chat.postMessage"
# Slack's limits, in characters.
HEADER_CHARS = 150
SECTION_CHARS = 3000
PLAIN_CHARS = 4000  # of `text`; it takes more, and advises against it
COLORS: Mapping[str, str] = {"page": "#d93025", "ticket": "#f29900", "info": "#5f6368", "resolved": "#188038"}
# Errors of chat.postMessage that another message would not have, and those that pass by themselves.
OF_THE_MESSAGE = frozenset({"msg_too_long", "invalid_blocks", "invalid_blocks_format", "no_text", "invalid_attachments",
                            "too_many_attachments", "msg_blocks_too_long", "invalid_arguments"})  # fmt: skip
PASSING = frozenset({"internal_error", "fatal_error", "service_unavailable", "request_timeout", "ratelimited",
                     "rate_limited", "team_added_to_org", "message_limit_exceeded"})  # fmt: skip


class Slack(Channel):
    """`secret` gives the webhook's URL, or the bot's token where `channel` is given; it may raise TryLater."""

    by_incident = True

    def __init__(self, name: str, secret: Callable[[], str], channel: str | None = None, url: str = POST_URL) -> None:
        self.name = name
        self._secret = secret
        self._channel = channel
        self._url = url

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """POST each notice; one whose blocks are refused goes out again as plain text. Raises Rejected or TryLater."""
        for notice in notices:
            try:
                self._post(rich(notice.message), now)
            except BadMessage:
                self._post({"text": cut_lines(plain(notice.message), PLAIN_CHARS)}, now)
        return {}

    def address(self) -> str:
        """The webhook's URL or the token, and the channel."""
        return f"{self._secret()} {self._channel or ''}"

    def _post(self, body: Mapping[str, Any], now: float) -> None:
        secret = self._secret()
        if self._channel is None:
            request("POST", secret, now, msgspec.json.encode(body), judge=judge_webhook)
            return
        body = {"channel": self._channel, **body}
        request("POST", self._url, now, msgspec.json.encode(body), bearer=secret, judge=judge_answer)


def judge_webhook(answer: bytes) -> None:
    """What a webhook says in the body of its 200: "ok" or, of whoever speaks Slack's API there, what that says.

    Raises Rejected or TryLater.
    """
    no_web_page(answer)
    if answer.lstrip().startswith(b"{") and re.search(rb'"ok"\s*:', answer):
        judge_answer(answer)


def judge_answer(answer: bytes) -> None:
    """What chat.postMessage says in its body: it answers 200 to what it refused. Raises Rejected or TryLater."""
    try:
        told = msgspec.json.decode(answer)
        ok, error = bool(told["ok"]), str(told.get("error", ""))
    except (msgspec.DecodeError, TypeError, LookupError, AttributeError):
        raise TryLater("Slack answered 200 with something that is not its answer") from None
    if ok:
        return
    said = f"Slack refuses: {error[:80]}"
    if error in PASSING:
        raise TryLater(said)
    raise BadMessage(said) if error in OF_THE_MESSAGE else Rejected(f"{said}; see its token, scopes and channel")


def rich(message: AlertMessage) -> dict[str, Any]:
    """Title, body and links as blocks; `text` is what a phone's notification shows."""
    texts = message.annotations
    blocks: list[dict[str, Any]] = [{"type": "header", "text": {
        "type": "plain_text", "text": cut_to(title(message), HEADER_CHARS), "emoji": False}}]
    body = texts.get("description", "")
    if body:
        blocks.append(_section(cut_lines(escape(body), SECTION_CHARS)))
    context = [f"{message.severity} · {escape(message.labels.get('rule', ''))} · since {rfc3339(message.starts_at)}"]
    context += [f"<{href}|{text}>" for text, href in (
        ("Runbook", web_address(texts.get("runbook_url", ""))), ("Alert", web_address(message.generator_url))) if href]
    blocks.append({"type": "context", "elements": [_marked(cut_to(" · ".join(context), SECTION_CHARS))]})
    color = COLORS["resolved" if message.status == "resolved" else message.severity]
    return {"text": cut_to(escape(title(message)), PLAIN_CHARS), "attachments": [{"color": color, "blocks": blocks}]}


def plain(message: AlertMessage) -> str:
    """The whole of it as text, where blocks were refused."""
    lines = [title(message), message.annotations.get("description", ""), message.annotations.get("action", "")]
    return escape("\n".join(line for line in lines if line))


def title(message: AlertMessage) -> str:
    """One line: what ended, or the alert's own summary."""
    summary = " ".join(message.annotations.get("summary", "").split()) or message.labels.get("alertname", message.key)
    return f"Resolved: {summary}" if message.status == "resolved" else summary


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _marked(text)}


def _marked(text: str) -> dict[str, Any]:
    """Text with mark-up. `verbatim`: what only looks like a mention, a channel or an address stays text."""
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def escape(text: str) -> str:
    """The three characters that Slack's mark-up has; without `<` there is neither link nor mention.

    What is no text in UTF-8 is replaced: it could not be sent.
    """
    return sendable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut_lines(text: str, length: int) -> str:
    """At most `length` characters, cut at a line's end, and how many lines are not shown."""
    if len(text) <= length:
        return text
    lines = text.split("\n")
    shown = len(lines) - 1
    while shown > 0 and len("\n".join(lines[:shown])) + len(_rest(len(lines) - shown)) > length:
        shown -= 1
    if shown == 0:  # one line alone is too long
        return cut_to(text, length)
    return "\n".join(lines[:shown]) + _rest(len(lines) - shown)


def _rest(count: int) -> str:
    return f"\n… {count} more line{'s' if count > 1 else ''} not shown"
