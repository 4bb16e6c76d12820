"""PagerDuty, Events API v2: one event a notice. Firing triggers, resolved resolves, joined by the dedup key.

A trigger that is sent again joins the incident that is open under its key: acknowledged, it stays so, and nobody is
paged a second time. So sending at least once costs nothing here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent.model import AlertMessage, Notice, Rejected, Severity
from agent.notifiers.channel import BadMessage, Channel, cut_to, no_web_page, request, rfc3339, web_address

EVENTS_URL = "https://events.pagerduty.com/v2/enqueue"
# The limits of the API, in characters.
SUMMARY_CHARS = 1024
KEY_CHARS = 255
FIELD_CHARS = 1024  # of source, component, class
DETAIL_CHARS = 8192  # ours, of one text
EVENT_BYTES = 500_000  # of the whole; the API takes 512 KB, routing key and all
SAID_ABOVE = frozenset({"summary", "evidence", "runbook_url"})  # the title, the body and a link have these
SEVERITIES: Mapping[Severity, str] = {"page": "critical", "ticket": "warning", "info": "info"}


class PagerDuty(Channel):
    """`routing_key` is asked at each event, so that a rotated one is taken; it may raise TryLater."""

    by_incident = True
    updates = True  # a trigger of a known key changes what is shown, and pages nobody

    def __init__(self, name: str, routing_key: Callable[[], str], url: str = EVENTS_URL) -> None:
        self.name = name
        self._routing_key = routing_key
        self._url = url

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """POST each notice. Raises Rejected or TryLater."""
        for notice in notices:
            key = self._routing_key()
            body = msgspec.json.encode({"routing_key": key, **event(notice.message)})
            try:
                request("POST", self._url, now, body, tell_body=True, secrets=(key,), judge=no_web_page)
            except BadMessage as error:
                # A wrong key is answered like a wrong event, with 400: it is the channel's fault, for a person to mend.
                if "routing_key" in str(error) or "routing key" in str(error).lower():
                    raise Rejected(str(error)) from None
                raise
        return {}

    def address(self) -> str:
        """The key decides where an event goes."""
        return f"{self._url} {self._routing_key()}"


def event(message: AlertMessage) -> dict[str, Any]:
    """What is sent, but for the routing key."""
    found: dict[str, Any] = {"event_action": "trigger" if message.status == "firing" else "resolve",
                             "dedup_key": dedup_key(message.key)}
    if message.status == "resolved":
        return found
    labels, texts = message.labels, message.annotations
    summary = texts.get("summary") or labels.get("alertname", message.key)
    payload = {
        "summary": cut_to(summary, SUMMARY_CHARS),
        "source": cut_to(labels.get("node") or "unknown", FIELD_CHARS),
        "severity": SEVERITIES[message.severity],
        "timestamp": rfc3339(message.starts_at),
        "component": cut_to(labels.get("subject", ""), FIELD_CHARS),
        "class": cut_to(labels.get("rule", ""), FIELD_CHARS),
        "custom_details": {name: cut_to(text, DETAIL_CHARS) for name, text in {
            **({"full_summary": summary} if len(summary) > SUMMARY_CHARS else {}), **texts}.items()
            if text and name not in SAID_ABOVE},
    }
    links = [{"href": href, "text": text} for text, href in (
        ("Runbook", web_address(texts.get("runbook_url", ""))), ("Alert", web_address(message.generator_url))) if href]
    whole = {**found, "payload": {k: v for k, v in payload.items() if v}, "client": "Tocsin",
             **({"client_url": web_address(message.generator_url)} if web_address(message.generator_url) else {}),
             **({"links": links} if links else {})}
    return _fitting(whole)


def _fitting(whole: dict[str, Any]) -> dict[str, Any]:
    """An event that is not refused for its size: its longest details are left out, and how many that were is told."""
    details: dict[str, str] = whole["payload"].get("custom_details", {})
    by_length = sorted(details, key=lambda name: len(details[name]))
    left = len(by_length)
    while left and len(msgspec.json.encode(whole)) > EVENT_BYTES:
        left //= 2
        kept = {name: details[name] for name in by_length[:left]}
        whole["payload"]["custom_details"] = kept | {"left_out": f"{len(details) - left} more, for their size"}
    return whole


def dedup_key(key: str) -> str:
    """The key of an alert as PagerDuty takes it: the same from trigger to resolve, whatever its length."""
    if len(key) <= KEY_CHARS:
        return key
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
    return f"{key[: KEY_CHARS - len(digest) - 1]}-{digest}"
