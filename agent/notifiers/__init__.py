"""The channels, in one table, and which of them wants which alert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.config import (
    ChannelKind,
    Config,
    HeartbeatConfig,
    NotifyConfig,
    SecretUnreadable,
    WebhookConfig,
    channels,
    read_secret,
)
from agent.model import AlertMessage, Severity, TryLater
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.channel import Channel
from agent.notifiers.heartbeat import Heartbeat
from agent.notifiers.webhook import Webhook

__all__ = ["NOTIFIERS", "Channel", "Needs", "Route", "build_channels", "owed_to"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What channels ask of the loop. Both are called from the channels' threads."""

    firing: Callable[[], Iterable[AlertMessage]]  # everything that fires now
    healthy: Callable[[], bool]  # the tick is on time
    external_url: str | None = None


class Route(NamedTuple):
    """A channel and the severities that it is told."""

    channel: Channel
    severities: frozenset[Severity]


Build = Callable[[str, NotifyConfig, Needs], Channel]


def _alertmanager(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    config = item.alertmanager
    assert config is not None  # noqa: S101  (the table below is keyed by it)
    return Alertmanager(name, config.urls, needs.firing, config.resend, config.min_visible)


def _webhook(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.webhook is not None  # noqa: S101
    return Webhook(name, _address(item.webhook), needs.external_url)


def _heartbeat(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.heartbeat is not None  # noqa: S101
    return Heartbeat(name, _address(item.heartbeat), item.heartbeat.every, needs.healthy)


NOTIFIERS: Mapping[ChannelKind, Build] = {
    "alertmanager": _alertmanager,
    "webhook": _webhook,
    "heartbeat": _heartbeat,
}


def build_channels(config: Config, needs: Needs) -> tuple[list[Route], list[str]]:
    """Every configured channel; and a sentence for each one that this version cannot speak to."""
    routes: list[Route] = []
    missing: list[str] = []
    for name, item in channels(config):
        build = NOTIFIERS.get(item.kind)
        if build is None:
            known = ", ".join(NOTIFIERS)
            missing.append(f"notify: {name} is not in this version and is told NOTHING; it has {known}")
            continue
        severities: tuple[Severity, ...] = () if item.kind == "heartbeat" else item.severities
        routes.append(Route(build(name, item, needs), frozenset(severities)))
    return routes, missing


def owed_to(routes: Sequence[Route], messages: Iterable[AlertMessage]) -> list[tuple[str, AlertMessage]]:
    """Who must be told what, as Store.commit_tick takes it."""
    return [(route.channel.name, m) for m in messages for route in routes if m.severity in route.severities]


def _address(config: WebhookConfig | HeartbeatConfig) -> Callable[[], str]:
    """The address, read from its file at each use; TryLater while it cannot be read: a person may mend it."""

    def read() -> str:
        if config.url is not None:
            return config.url
        try:
            return read_secret(config.url_file, config.url_env)
        except SecretUnreadable as error:
            failure = TryLater(str(error))
        raise failure

    return read
