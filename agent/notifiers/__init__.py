"""The channels, in one table, and which of them wants which alert."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from agent.config import (
    ChannelKind,
    Config,
    HeartbeatConfig,
    Match,
    NotifyConfig,
    SecretUnreadable,
    WebhookConfig,
    day_window,
    read_secret,
)
from agent.model import ROUTE, SILENCED, AlertMessage, IncidentMessage, Severity, TryLater
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.channel import Channel, Hours
from agent.notifiers.chat import MISSING, Chat
from agent.notifiers.heartbeat import Heartbeat
from agent.notifiers.pagerduty import EVENTS_URL, PagerDuty
from agent.notifiers.slack import Slack
from agent.notifiers.webhook import Webhook
from agent.phase import phase_of
from agent.silences import is_of

__all__ = ["NOTIFIERS", "Channel", "Needs", "Route", "Wanted", "build_channels", "channel_names", "not_installed",
           "owed_for_incidents", "owed_to"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What channels ask of the loop. All are called from the channels' threads."""

    firing: Callable[[], Iterable[AlertMessage]]  # everything that fires now
    healthy: Callable[[], bool]  # the tick is on time
    external_url: str | None = None
    incidents: Callable[[], Iterable[IncidentMessage]] = tuple  # all that are open
    node: str = ""  # as Kubernetes knows it


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a channel is told: these severities, of rules and subjects that one of the patterns matches.

    `silenced`: of what is silenced here, too. Alertmanager has silences of its own, and others may be told through it.
    """

    channel: str
    severities: frozenset[Severity]
    rules: Sequence[str] = ("*",)
    subjects: Sequence[str] = ("*",)
    silenced: bool = False

    def __call__(self, message: AlertMessage) -> bool:
        """Whether it is told of an alert."""
        rule, subject = (message.labels.get(name, "") for name in ("rule", "subject"))
        return (message.severity in self.severities
                # A drill may have its alerts told to one channel alone, so that no other is woken.
                and message.annotations.get(ROUTE, self.channel) == self.channel
                and (self.silenced or SILENCED not in message.annotations)
                and any(fnmatchcase(rule, pattern) for pattern in self.rules)
                and any(is_of(subject, pattern) for pattern in self.subjects))


class Route(NamedTuple):
    """A channel and what it is told."""

    channel: Channel
    wants: Wanted


Build = Callable[[str, NotifyConfig, Needs], Channel]


def _alertmanager(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    config = item.alertmanager
    assert config is not None  # noqa: S101  (the table below is keyed by it)
    return Alertmanager(name, config.urls, needs.firing, config.resend, config.min_visible,
                        phase_of(needs.node, config.resend))


def _webhook(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.webhook is not None  # noqa: S101
    return Webhook(name, _address(item.webhook), needs.external_url)


def _heartbeat(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    assert item.heartbeat is not None  # noqa: S101
    every_s = item.heartbeat.every
    return Heartbeat(name, _address(item.heartbeat), every_s, needs.healthy, phase_of(needs.node, every_s))


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


def _apprise(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    del needs
    assert item.apprise is not None  # noqa: S101
    return Chat(name, _secret(item.apprise.url_file, item.apprise.url_env))


def _kubernetes(name: str, item: NotifyConfig, needs: Needs) -> Channel:
    from agent.notifiers.kubernetes import Kubernetes  # where there is none, nothing of it is loaded

    config = item.kubernetes
    assert config is not None  # noqa: S101
    return Kubernetes(name, needs.node, needs.firing, events=config.events, condition=config.condition)


NOTIFIERS: Mapping[ChannelKind, Build] = {
    "alertmanager": _alertmanager,
    "webhook": _webhook,
    "pagerduty": _pagerduty,
    "slack": _slack,
    "apprise": _apprise,
    "kubernetes": _kubernetes,
    "heartbeat": _heartbeat,
}
# Keys of a channel that say how, not where.
NO_ADDRESS = frozenset({"resend", "min_visible", "every", "events", "condition"})


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


def not_installed(config: Config) -> list[str]:
    """A sentence where a channel is configured whose library is not here."""
    wanted = any(item.kind == "apprise" for item in config.notify)
    return [f"notify: {MISSING}"] if wanted and find_spec("apprise") is None else []


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
        name, match = names[identity], item.match or Match()
        severities: tuple[Severity, ...] = () if item.kind == "heartbeat" else item.severities
        wants = Wanted(name, frozenset(severities), match.rule, match.subject, item.kind == "alertmanager")
        own = replace(needs, firing=partial(_firing, wants, needs))
        channel = NOTIFIERS[item.kind](name, item, own)
        channel.hours = _hours(item, own if not channel.by_incident else replace(
            needs, firing=partial(_told_now, Route(channel, wants), needs)))
        routes.append(Route(channel, wants))
    return routes


def _firing(wants: Wanted, needs: Needs) -> list[AlertMessage]:
    """What fires now and a channel is told: it may be told of it again and again."""
    return list(filter(wants, needs.firing()))


def _told_now(route: Route, needs: Needs) -> list[AlertMessage]:
    """What fires now as a channel is told it that is told by incident."""
    owed = owed_to([route], needs.firing()) + owed_for_incidents([route], needs.incidents())
    return [message for _, message in owed]


def _hours(item: NotifyConfig, needs: Needs) -> Hours:
    """Quiet hours, and how often what still fires is told again."""
    hours, quiet = Hours(repeat_s=item.repeat, firing=needs.firing), item.quiet
    if quiet is None:
        return hours
    from agent import daytime  # time zones: only where they are asked for

    window, zone, severities = day_window(quiet.window), quiet.zone, quiet.severity

    def quiet_until(severity: Severity, now: float) -> float | None:
        is_quiet = severity in severities and daytime.in_window(window, daytime.minute_of_day(zone, now))
        return now + daytime.left_s(window, zone, now) if is_quiet else None

    return replace(hours, quiet_until=quiet_until)


def owed_to(routes: Sequence[Route], messages: Iterable[AlertMessage]) -> list[tuple[str, AlertMessage]]:
    """Who must be told what, as Store.commit_tick takes it."""
    return [(route.channel.name, m) for m in messages for route in routes
            if route.wants(m) and not (route.channel.by_incident and m.severity == "page")]


def owed_for_incidents(routes: Sequence[Route], told: Iterable[IncidentMessage]) -> list[tuple[str, AlertMessage]]:
    """The same for those that are told one page an incident: where they want one of its alerts."""
    return [(route.channel.name, one.message) for one in told for route in routes
            if route.channel.by_incident and _is_owed(route, one)]


def _is_owed(route: Route, one: IncidentMessage) -> bool:
    """Whether a channel is told of what changed in an incident.

    An update pages where the channel has not been told of this incident yet: it wanted none of what was in it before.
    """
    if one.change == "updated" and not route.channel.updates and any(map(route.wants, one.before)):
        return False
    # its end is told to whoever wanted any of it; until then what is over speaks for nobody
    return any(route.wants(alert) for alert in one.alerts if one.change == "resolved" or alert.status == "firing")


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
