"""The channels, in one table, and which of them wants which alert."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent.config import (
    ChannelKind,
    Config,
    HeartbeatConfig,
    NotifyConfig,
    SecretUnreadable,
    WebhookConfig,
    read_secret,
)
from agent.model import ROUTE, AlertMessage, Severity, TryLater
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.channel import Channel
from agent.notifiers.heartbeat import Heartbeat
from agent.notifiers.pagerduty import EVENTS_URL, PagerDuty
from agent.notifiers.slack import Slack
from agent.notifiers.webhook import Webhook

__all__ = ["NOTIFIERS", "Channel", "Needs", "Route", "build_channels", "channel_names", "owed_to"]


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
    # It is told again and again of what fires: not of what a drill had routed to another channel.
    return Alertmanager(name, config.urls, lambda: [m for m in needs.firing() if _is_for(m, name)], config.resend,
                        config.min_visible)


def _webhook(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.webhook is not None  # noqa: S101
    return Webhook(name, _address(item.webhook), needs.external_url)


def _heartbeat(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.heartbeat is not None  # noqa: S101
    return Heartbeat(name, _address(item.heartbeat), item.heartbeat.every, needs.healthy)


def _pagerduty(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    del needs
    config = item.pagerduty
    assert config is not None  # noqa: S101
    return PagerDuty(name, _secret(config.routing_key_file, config.routing_key_env), config.url or EVENTS_URL)


def _slack(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    del needs
    config = item.slack
    assert config is not None  # noqa: S101
    file, env = config.webhook_file or config.token_file, config.webhook_env or config.token_env
    return Slack(name, _secret(file, env), config.channel)


NOTIFIERS: Mapping[ChannelKind, Build] = {
    "alertmanager": _alertmanager,
    "webhook": _webhook,
    "pagerduty": _pagerduty,
    "slack": _slack,
    "heartbeat": _heartbeat,
}
NO_ADDRESS = frozenset({"resend", "min_visible", "every"})  # keys of a channel that say how, not where


def channel_names(config: Config, known: Mapping[str, str]) -> dict[str, str]:
    """What each configured channel is called, by its identity; `known` is what this returned last time.

    Notices are owed by name, so a name must stay with its receiver whatever is written before or after it. One that is
    new takes the first free name of its kind, never one that was in use until now: it would inherit another's debts.
    But where of a kind one is gone and one is new, its address was mended, and what is owed goes there.
    """
    wanted = {identity: item.kind for identity, item in _identities(config)}
    names = {identity: name for identity, name in known.items() if identity in wanted}
    taken = set(known.values())
    for identity, kind in wanted.items():
        if identity in names:
            continue
        gone = [name for other, name in known.items() if other not in wanted and name.partition("-")[0] == kind]
        new = [other for other, of in wanted.items() if of == kind and other not in known]
        free = (f"{kind}-{n}" if n > 1 else kind for n in range(1, len(taken) + 2))
        names[identity] = gone[0] if len(gone) == len(new) == 1 else next(name for name in free if name not in taken)
        taken.add(names[identity])
    return names


def _identities(config: Config) -> list[tuple[str, NotifyConfig]]:
    """Each channel with what it is known by: a digest of its kind and addresses, since an address may be a secret."""
    found: list[tuple[str, NotifyConfig]] = []
    for item in config.notify:
        channel = getattr(item, item.kind)
        places = [getattr(channel, name) for name in channel.__struct_fields__ if name not in NO_ADDRESS]
        digest = hashlib.sha256(json.dumps([item.kind, *places], default=str).encode()).hexdigest()
        again = sum(identity.startswith(digest) for identity, _ in found)  # one receiver, told of several severities
        found.append((f"{digest}/{again}" if again else digest, item))
    return found


def build_channels(config: Config, needs: Needs, names: Mapping[str, str]) -> list[Route]:
    """Every configured channel, by its name."""
    routes: list[Route] = []
    for identity, item in _identities(config):
        severities: tuple[Severity, ...] = () if item.kind == "heartbeat" else item.severities
        routes.append(Route(NOTIFIERS[item.kind](names[identity], item, needs), frozenset(severities)))
    return routes


def owed_to(routes: Sequence[Route], messages: Iterable[AlertMessage]) -> list[tuple[str, AlertMessage]]:
    """Who must be told what, as Store.commit_tick takes it."""
    return [(route.channel.name, m) for m in messages for route in routes
            if m.severity in route.severities and _is_for(m, route.channel.name)]


def _is_for(message: AlertMessage, channel: str) -> bool:
    """Whether a channel is told; a drill may have its alerts told to one alone, so that no other is woken."""
    return message.annotations.get(ROUTE, channel) == channel


def _address(config: WebhookConfig | HeartbeatConfig) -> Callable[[], str]:
    url = config.url
    return (lambda: url) if url is not None else _secret(config.url_file, config.url_env)


def _secret(file: Path | None, env: str | None) -> Callable[[], str]:
    """A secret, read at each use; TryLater while it cannot be read: a person may mend it."""

    def read() -> str:
        try:
            return read_secret(file, env)
        except SecretUnreadable as error:
            failure = TryLater(str(error))
        raise failure

    return read
