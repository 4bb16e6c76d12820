"""A generic webhook in Alertmanager's own format (version 4), so that receivers made for it work unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.model import AlertMessage, Notice, Rejected
from agent.notifiers.channel import Channel, clean_labels, post_json, rfc3339, web_address

NOT_ENDED = "0001-01-01T00:00:00Z"  # Go's zero time: how Alertmanager says that an alert has no end yet


class Webhook(Channel):
    """One notice a POST. `url` is asked at each, so that a rotated secret is taken; it may raise TryLater."""

    def __init__(self, name: str, url: Callable[[], str], external_url: str | None = None) -> None:
        self.name = name
        self._url = url
        self._external_url = external_url or ""

    def send(self, notices: Sequence[Notice], now: float) -> Mapping[int, Rejected]:
        """POST each notice. Raises Rejected or TryLater."""
        for notice in notices:
            post_json(self._url(), payload(notice.message, self.name, self._external_url), now)
        return {}

    def address(self) -> str:
        """As configured, or as its file or variable holds it now."""
        return self._url()


def payload(message: AlertMessage, receiver: str, external_url: str) -> dict[str, Any]:
    """The body that Alertmanager would POST for a group of this one alert (`group_by: ['...']`)."""
    labels, annotations = clean_labels(message.labels), clean_labels(message.annotations)
    alert = {
        "status": message.status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": rfc3339(message.starts_at),
        "endsAt": NOT_ENDED if message.ends_at is None else rfc3339(max(message.starts_at, message.ends_at)),
        "generatorURL": web_address(message.generator_url),
        "fingerprint": fingerprint(labels),
    }
    pairs = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items())
    return {
        "version": "4",
        "groupKey": f"{{}}:{{{pairs}}}",
        "truncatedAlerts": 0,
        "status": message.status,
        "receiver": receiver,
        "groupLabels": labels,
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": external_url,
        "alerts": [alert],
    }


def fingerprint(labels: Mapping[str, str]) -> str:
    """Alertmanager's own name for a label set: FNV-1a (64 bit) over names and values, each followed by a 0xff byte."""
    value = 0xCBF29CE484222325
    for name in sorted(labels):
        for byte in b"%b\xff%b\xff" % (name.encode(), labels[name].encode()):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"
