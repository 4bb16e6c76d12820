"""tocsin.yaml -> Config: the contract of spec/config.md, whole and strict.

Every key has a default. What is wrong is raised together as ConfigErrors. Durations are seconds, shares are ratios.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from agent import patterns
from agent.engines import KINDS, ROUTER_KINDS
from agent.json_path import steps_of
from agent.model import Rule, Severity, SignalSpec, Slo
from agent.stats import events_needed
from agent.strict import (
    AS_SHARE,
    AbsolutePath,
    ConfigErrors,
    Decoded,
    Duration,
    EnvName,
    Fault,
    Parse,
    Places,
    PositiveDuration,
    Rate,
    Share,
    Size,
    Unfit,
    above_zero,
    absolute_path,
    cut,
    did_you_mean,
    duration_s,
    load,
    share,
    within,
    without_variables,
)
from rules import RulesConfig, RuleSet, load_rules

__all__ = ["Config", "ConfigErrors", "Fault", "SecretUnreadable", "load_config", "read_secret", "slo_for"]

DEFAULT_PATH = Path("/etc/tocsin/tocsin.yaml")
MAX_SECRET_BYTES = 64 * 1024

# ---- the forms of single values ----


def _split_url(text: str) -> SplitResult:
    """An http(s) URL in parts. Raises Unfit, without the URL's user info and query in the message."""
    shown = _origin(text)
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise Unfit(f"{shown!r} has a bad host or port", "write http://host:port") from None
    if url.scheme not in ("http", "https") or not host or re.search(r"\s", text):
        raise Unfit(f"{shown!r} is not an http(s) URL", "write it whole, as http://127.0.0.1:8000")
    if "@" in url.netloc:
        raise Unfit("credentials stand in the URL", "take user and password out of it")
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.%]+", host):
        raise Unfit(f"{shown!r} has no possible host", "write the host itself: variables are not expanded here")
    if port == 0:
        raise Unfit(f"{shown!r} has port 0, at which nobody answers", "write http://host:port")
    _whole_address(host)
    return url


def _whole_address(host: str) -> None:
    """Raises Unfit for what looks like an IP address and is none, or is read as another: 010.0.0.1 as 8.0.0.1."""
    if not re.fullmatch(r"[0-9]+(?:\.[0-9]+)+|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*", host):
        return
    try:
        ip_address(host)
    except ValueError:
        raise Unfit(f"{cut(host)!r} is no IP address", "write four numbers from 0 to 255, without leading zeros, or a"
                    " whole IPv6 address in brackets") from None


def _origin(text: str) -> str:
    """What may be shown of a URL, even a broken one: a webhook's path is a secret."""
    return re.sub(r"^((?:\w+:/*+)?+[^/]*)/.*", r"\1/…", cut(text), flags=re.DOTALL)


def base_url(text: str) -> str:
    """An address that paths are added to: no query, no fragment, no last slash. Raises Unfit."""
    url = _split_url(text)
    if url.query or url.fragment:
        raise Unfit(f"{_origin(text)!r} has a query or fragment", "write only scheme, host, port and path")
    return text.rstrip("/")


def engine_url(text: str) -> str:
    """An engine's address, also where someone wrote the one of its page or of its API. Raises Unfit."""
    return base_url(text).removesuffix("/metrics").removesuffix("/v1").rstrip("/")


def users_url(text: str) -> str:
    """The address that users use, also where someone wrote one of its API's paths. Raises Unfit."""
    return re.sub(r"/v1/(?:chat/completions|completions|models)$", "", base_url(text))


def prometheus_url(text: str) -> str:
    """A PromQL API's address, also where someone wrote the path of its queries. Raises Unfit."""
    return re.sub(r"/api/v1(?:/query)?$", "", base_url(text))


def full_url(text: str) -> str:
    """An address that is called as it is. Raises Unfit, also where a query holds what looks like a secret."""
    for name, _ in parse_qsl(_split_url(text).query):
        if re.search(r"token|secret|passw|key|sig|auth", name, re.IGNORECASE):
            raise Unfit(f"the URL holds a secret ({cut(name)}=…)", "write url_file: /path or url_env: NAME")
    return text


def hook_url(text: str) -> str:
    """An address that alerts are sent to as it is. Raises Unfit, also where its path is what a sender is known by."""
    url = _split_url(full_url(text))
    host = f".{url.hostname}"
    if host.endswith(_HOOK_HOSTS) or any(map(_is_key, url.path.split("/"))):
        raise Unfit("the URL's path is a secret", "write url_file: /path or url_env: NAME")
    return text


# Whoever knows an address there may send to it.
_HOOK_HOSTS = (".hooks.slack.com", ".discord.com", ".discordapp.com", ".office.com", ".api.telegram.org",
               ".hooks.zapier.com", ".hc-ping.com")


def _is_key(part: str) -> bool:
    """A UUID, 24 hex digits or more, or 20 characters or more of letters small and large with digits all over."""
    return bool(re.fullmatch(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{24,}", part)) or bool(
        re.fullmatch(r"(?=(?:[^0-9]*[0-9]+){2}[^0-9]+[0-9])(?=.*[a-z])(?=.*[A-Z])[\w-]{20,}", part))


def host_port(text: str) -> tuple[str, int]:
    """`127.0.0.1:9959` or `[::1]:9959` in its parts; port 0 lets the system choose. Raises Unfit."""
    match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})", text)
    if match is not None and int(match["port"]) > 65535:
        raise Unfit(f"{cut(text)!r} has a port over 65535", "write 127.0.0.1:9959")
    if match is None and re.fullmatch(r"[0-9]{1,5}", text):
        raise Unfit(f"{text!r} names no host", f"write 127.0.0.1:{text if int(text) <= 65535 else 9959}")
    if match is None:
        raise Unfit(f"{cut(text)!r} is not host:port", "write 127.0.0.1:9959, 0.0.0.0:9959 or [::1]:9959")
    host: str = match["six"] or match["host"]
    _whole_address(host)
    return host, int(match["port"])


def _listen(text: str) -> str:
    host_port(text)
    return text


def _socket_path(text: str) -> Path:
    path = absolute_path(text)
    if len(os.fsencode(path)) > 107:
        raise Unfit(f"{cut(text)!r} is over 107 bytes, the most that a unix socket takes", "choose a shorter path")
    return path


def _path_text(text: str) -> str:
    return str(absolute_path(text))


def _name(text: str) -> str:
    """A subject's or node's name: it becomes a label, and `/<number>` at its end would read as an engine's index."""
    without_variables(text)
    if not text or len(text) > 200 or not text.isprintable() or re.search(r"\s", text):
        raise Unfit(f"{cut(text)!r} is not a name", "write 1 to 200 characters without spaces")
    if re.search(r"/[0-9]+$", text):
        raise Unfit(f"{cut(text)!r} ends like an engine's index", "write it without /<number> at its end")
    return text


def day_window(text: str) -> tuple[int, int]:
    """`20:00-08:00` as (1200, 480): minutes of the day; the end may lie on the next day. Raises Unfit."""
    match = re.fullmatch(r"([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", text)
    if match is None:
        raise Unfit(f"{cut(text)!r} is not a window of the day", 'write two times, as "20:00-08:00"')
    hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
    start, end = hours[0] * 60 + minutes[0], hours[1] * 60 + minutes[1]
    if max(minutes) > 59 or start >= 1440 or end > 1440:
        raise Unfit(f"{cut(text)!r} holds a time that no day has", "write times from 00:00 to 23:59")
    if start == end:
        raise Unfit(f"{cut(text)!r} is empty", 'write "00:00-24:00" for the whole day')
    return start, end


def _day_window(text: str) -> str:
    day_window(text)
    return text


def _zone(text: str) -> str:
    import zoneinfo  # only where a quiet window or a drill's schedule is written

    try:
        zoneinfo.ZoneInfo(text)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise Unfit(
            f"time zone {cut(text)!r} is unknown on this machine",
            "write an IANA name, as Europe/Berlin, and see that tzdata is installed",
        ) from None
    return text


def _availability(text: str) -> float:
    value = share(text)
    if not 0 < value < 1:
        raise Unfit(f"an availability of {cut(text)} leaves no error budget to count", "write 99.9%")
    if value < 0.5:  # 0.999% is a slip of 0.999
        raise Unfit(f"an availability of {cut(text)} promises that more fails than not", "write 99.9% or 0.999")
    return value


def _open_share(text: str) -> float:
    value = share(text)
    if value == 0:
        raise Unfit(f"{cut(text)} allows nothing", "write a share over 0%")
    return value


def _drill_name(text: str) -> str:
    """It begins the name of a run, and so of its folder."""
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,46}[a-z0-9])?", text):
        raise Unfit(f"{cut(text)!r} is not a drill's name", "write small letters, digits, dots and dashes, at most 48")
    return text


def blackout(text: str) -> tuple[str, str]:
    """`2026-12-20/2027-01-06` as its first and last day. Raises Unfit."""
    first, slash, last = text.partition("/")
    try:
        days = (date.fromisoformat(first), date.fromisoformat(last))
    except ValueError:
        remedy = f'write "{cut(text)}/{cut(text)}"' if not slash else 'write two days, as "2026-12-20/2027-01-06"'
        raise Unfit(f"{cut(text)!r} is not a span of days", remedy) from None
    if days[1] < days[0]:
        raise Unfit(f"{cut(text)!r} ends before it begins", f'write "{last}/{first}"')
    return days[0].isoformat(), days[1].isoformat()


def _five_fields(text: str) -> str:
    if len(text.split()) != 5:
        raise Unfit(f"{cut(text)!r} has {len(text.split())} fields", 'write five, as "0 10 * * TUE#1"')
    return text


class Goodput(NamedTuple):
    """`95% in 30s`: the share of the asked rate, and after how many seconds it must be reached."""

    share: float
    within_s: float


def goodput(text: str) -> Goodput:
    """`95% in 30s` in its parts. Raises Unfit."""
    part, _, span = text.partition(" in ")
    if not span:
        raise Unfit(f"{cut(text)!r} is not a goodput", "write a share and a time, as 95% in 30s")
    return Goodput(_open_share(part), duration_s(span))


def _status(text: str) -> int:
    if text not in ("429", "503"):
        raise Unfit(f"{cut(text)!r} is no status that says: come back later", "write 503 or 429")
    return int(text)


def _part(text: str) -> str:
    if not re.fullmatch(r"main|core|api|all|rank:[0-9]{1,4}", text):
        raise Unfit(f"{cut(text)!r} is no part of an engine", "write main, core, api, all, or rank:0 and so on")
    return text


def _address(text: str) -> str:
    import ipaddress  # only where a drill names one

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise Unfit(f"{cut(text)!r} is not an IP address", "write it as 10.0.0.7 or fd00::7") from None


def _upstream(text: str) -> tuple[str, int]:
    host, port = host_port(text)
    if port == 0:
        raise Unfit(f"{cut(text)!r} has no port", "write 10.0.0.7:8000 or [fd00::7]:8000")
    return _address(host), port


def _json_path(text: str) -> str:
    try:
        steps_of(text)
    except ValueError as error:
        raise Unfit(f"{cut(text)!r} is no path, from {cut(str(error))!r} on",
                    'write it as data.orders[0].count; a key with dots as ["orders.paid"]') from None
    return text


def _pattern(text: str) -> str:
    try:
        patterns.parse(text)
    except ValueError as error:
        raise Unfit(f"{cut(str(error))!r} is no deployment pattern",
                    did_you_mean(str(error), patterns.WORDS, "several are joined by +")) from None
    return text


def _query(text: str) -> str:
    if not text.strip():
        raise Unfit("is empty", "write a query, as sum(increase(orders_total[1h]))")
    return text


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise Unfit(f"{cut(text)!r} is not a port", "write a number from 1 to 65535")
    return int(text)


def _netns(text: str) -> str | int:
    """A path, or the number of a process whose network namespace it is."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,9}", text) else str(absolute_path(text))


BaseUrl = Annotated[str, Parse(base_url, text=True)]
EngineUrl = Annotated[str, Parse(engine_url, text=True)]
UsersUrl = Annotated[str, Parse(users_url, text=True)]
PrometheusUrl = Annotated[str, Parse(prometheus_url, text=True)]
FullUrl = Annotated[str, Parse(full_url, text=True)]
HookUrl = Annotated[str, Parse(hook_url, text=True)]
Name = Annotated[str, Parse(_name, text=True)]
Zone = Annotated[str, Parse(_zone, text=True)]
Availability = Annotated[float, Parse(_availability, what=AS_SHARE)]
OpenShare = Annotated[float, Parse(_open_share, what=AS_SHARE)]
Level = Annotated[float | str, Parse(above_zero(duration_s).to, words=("slo",), what="slo, or a duration, as 500ms")]
Port = Annotated[int, Parse(_port, what="a port")]
Netns = Annotated[str | int, Parse(_netns, what="a path, as /run/netns/engine, or a process's number")]
EngineKind = Annotated[str, Parse(lambda text: _kind(text), text=True, words=("auto",), what="auto or a kind")]
RouterKind = Annotated[str, Parse(lambda text: _router_kind(text), text=True, words=("auto",), what="auto or a kind")]


def _kind(text: str) -> str:
    if text in ROUTER_KINDS:
        raise Unfit(f"{text} is a router", "write it under routers")
    if text not in KINDS:
        raise Unfit(f"engine kind {cut(text)!r} is unknown", did_you_mean(text, ("auto", *KINDS)))
    return text


def _router_kind(text: str) -> str:
    if text not in ROUTER_KINDS:
        raise Unfit(f"router kind {cut(text)!r} is unknown", did_you_mean(text, ("auto", *ROUTER_KINDS)))
    return text


class _Form(Struct, frozen=True, kw_only=True):
    """A mapping of the file. A field whose encoded name begins with _ is ours, not a key: `at` is the key path."""


# ---- the contract ----


class SloConfig(_Form, frozen=True):
    """`slo`: what was promised."""

    ttft_p99: PositiveDuration = 0.5  # s
    itl_p99: PositiveDuration = 0.150  # s
    e2e_p99: PositiveDuration | None = None  # s
    availability: Availability = 0.999  # ratio
    window: Annotated[float, within(duration_s, "1h", "366d")] = 30 * 86400.0  # s
    written: bool = field(name="_written", default=False)


class SloOverride(_Form, frozen=True):
    """`engines[].slo`: what is promised otherwise for one engine. UNSET: as in `slo`; e2e_p99 None: not promised."""

    ttft_p99: PositiveDuration | UnsetType = UNSET
    itl_p99: PositiveDuration | UnsetType = UNSET
    e2e_p99: PositiveDuration | UnsetType | None = UNSET
    availability: Availability | UnsetType = UNSET
    window: Annotated[float, within(duration_s, "1h", "366d")] | UnsetType = UNSET


class EngineConfig(_Form, frozen=True):
    """One of `engines`."""

    url: EngineUrl
    name: Name | None = None  # None: host:port, see target_name
    kind: EngineKind = "auto"
    gpus: tuple[int, ...] = ()  # NVML indices
    profile: Literal["latency", "throughput"] | None = None  # None: nobody said; judged as latency
    slo: SloOverride = SloOverride()
    startup_within: PositiveDuration = 600.0  # s
    at: str = field(name="_at", default="")


class RouterConfig(_Form, frozen=True):
    """One of `routers`."""

    url: BaseUrl
    name: Name | None = None
    kind: RouterKind = "auto"
    at: str = field(name="_at", default="")


class GpusConfig(_Form, frozen=True):
    """`gpus`. `expected` None: learned."""

    expected: int | None = None


class PromqlSource(_Form, frozen=True):
    """One of `sources.promql`."""

    name: Name
    url: PrometheusUrl
    query: Annotated[str, Parse(_query, what="a query, as sum(increase(orders_total[1h]))")]
    token_file: AbsolutePath | None = None
    token_env: EnvName | None = None
    at: str = field(name="_at", default="")


class JsonSource(_Form, frozen=True):
    """One of `sources.json`. `path` is the way to the number inside the answer."""

    name: Name
    url: FullUrl
    path: Annotated[str, Parse(_json_path, what="a path, as data.orders[0].count")]
    token_file: AbsolutePath | None = None
    token_env: EnvName | None = None
    at: str = field(name="_at", default="")


class SourcesConfig(_Form, frozen=True):
    """`sources`."""

    promql: tuple[PromqlSource, ...] = ()
    json: tuple[JsonSource, ...] = ()


class AlertmanagerConfig(_Form, frozen=True):
    """`notify[].alertmanager`: every peer is told."""

    urls: tuple[BaseUrl, ...]
    resend: PositiveDuration = 60.0  # s
    min_visible: Duration = 60.0  # s that a firing must have been accepted before its resolve is sent


class WebhookConfig(_Form, frozen=True):
    """`notify[].webhook`: exactly one of the three."""

    url: HookUrl | None = None
    url_file: AbsolutePath | None = None
    url_env: EnvName | None = None


class PagerdutyConfig(_Form, frozen=True):
    """`notify[].pagerduty`: exactly one of the two keys. `url`: of another service region (events.eu.pagerduty.com)."""

    routing_key_file: AbsolutePath | None = None
    routing_key_env: EnvName | None = None
    url: FullUrl | None = None


class SlackConfig(_Form, frozen=True):
    """`notify[].slack`: exactly one of the four: the webhook's URL, or a bot's token, which needs a `channel`."""

    webhook_file: AbsolutePath | None = None
    webhook_env: EnvName | None = None
    token_file: AbsolutePath | None = None
    token_env: EnvName | None = None
    channel: str | None = None  # its id, or #name


class AppriseConfig(_Form, frozen=True):
    """`notify[].apprise`: exactly one of the two. Its address is a secret whole, so it is never written here."""

    url_file: AbsolutePath | None = None
    url_env: EnvName | None = None


class KubernetesConfig(_Form, frozen=True):
    """`notify[].kubernetes`: Events on this node, and whether a page is a condition of it."""

    events: bool = True
    condition: bool = False


class HeartbeatConfig(_Form, frozen=True):
    """`notify[].heartbeat`: the dead man's switch; exactly one of the three addresses."""

    url: HookUrl | None = None
    url_file: AbsolutePath | None = None
    url_env: EnvName | None = None
    every: Annotated[float, within(duration_s, "1s", "1d")] = 60.0  # s


class Match(_Form, frozen=True):
    """`notify[].match`: what is not written matches all. Rules and subjects may hold * and ?.

    A target's name is its engines', too.
    """

    severity: tuple[Severity, ...] | None = None
    rule: tuple[str, ...] = ("*",)
    subject: tuple[str, ...] = ("*",)


class Quiet(_Form, frozen=True):
    """`notify[].quiet`: these severities wait until the window of the day is over."""

    window: Annotated[str, Parse(_day_window, text=True)]
    severity: tuple[Severity, ...] = ("ticket",)
    zone: Zone = "UTC"


ChannelKind = Literal["alertmanager", "webhook", "pagerduty", "slack", "apprise", "kubernetes", "heartbeat"]
CHANNEL_KINDS: tuple[ChannelKind, ...] = (
    "alertmanager", "webhook", "pagerduty", "slack", "apprise", "kubernetes", "heartbeat",
)  # fmt: skip
OF_KIND: Mapping[ChannelKind, tuple[Severity, ...]] = {"pagerduty": ("page",), "kubernetes": ("page", "ticket")}
# channel -> keys of which exactly one is written
_ONE_OF: Mapping[ChannelKind, tuple[str, ...]] = {
    "webhook": ("url", "url_file", "url_env"),
    "pagerduty": ("routing_key_file", "routing_key_env"),
    "slack": ("token_file", "token_env", "webhook_file", "webhook_env"),
    "apprise": ("url_file", "url_env"),
    "heartbeat": ("url", "url_file", "url_env"),
}


class NotifyConfig(_Form, frozen=True):
    """One of `notify`: exactly one channel is not None."""

    alertmanager: AlertmanagerConfig | None = None
    webhook: WebhookConfig | None = None
    pagerduty: PagerdutyConfig | None = None
    slack: SlackConfig | None = None
    apprise: AppriseConfig | None = None
    kubernetes: KubernetesConfig | None = None
    heartbeat: HeartbeatConfig | None = None
    match: Match | None = None
    quiet: Quiet | None = None
    repeat: PositiveDuration | None = None  # s
    at: str = field(name="_at", default="")

    @property
    def kind(self) -> ChannelKind:
        """Which channel it is."""
        return next(kind for kind in CHANNEL_KINDS if getattr(self, kind) is not None)

    @property
    def severities(self) -> tuple[Severity, ...]:
        """What it is told: `match`, else pages only for a pager, no info for Events, and everything for the others."""
        if self.match is not None and self.match.severity is not None:
            return self.match.severity
        return OF_KIND.get(self.kind, ("page", "ticket", "info"))


class CanaryConfig(_Form, frozen=True):
    """`probe.canary`."""

    urls: tuple[UsersUrl, ...] = ()
    model: str | None = None
    api_key_file: AbsolutePath | None = None
    api_key_env: EnvName | None = None
    every: Annotated[float, within(duration_s, "1s", "1d")] = 30.0  # s


class ProbeConfig(_Form, frozen=True):
    """`probe`. `folder`: where tocsin-probe writes, TOCSIN_PROBE_DIR in the engine's environment."""

    canary: CanaryConfig = CanaryConfig()
    folder: AbsolutePath = Path("/run/tocsin/probe")


class WebConfig(_Form, frozen=True):
    """`web`: the token for silences and aborts from the page."""

    token_file: AbsolutePath | None = None
    token_env: EnvName | None = None


DrillFault = Literal[
    "process-kill", "engine-hang", "packet-loss", "upstream-timeout", "disk-full", "pod-kill", "gpu-reset", "slow-rank"
]


TARGET_WAYS = ("engine", "port", "pid", "upstream", "path", "selector", "gpu")
ON_GPUS = frozenset({"gpu-reset", "slow-rank"})


class DrillTarget(_Form, frozen=True):
    """`drills[].target`: what is broken, by exactly one of TARGET_WAYS; an engine's GPU by both."""

    engine: str | None = None  # a name under `engines`
    port: Port | None = None
    pid: int | None = None
    upstream: Annotated[tuple[str, int], Parse(_upstream, text=True)] | None = None
    path: AbsolutePath | None = None  # a folder of the file system to fill
    address: Annotated[str, Parse(_address, text=True)] | None = None
    netns: Netns | None = None
    part: Annotated[str, Parse(_part, text=True)] | None = None
    namespace: str | None = None
    selector: str | None = None
    gpu: str | None = None  # UUID


class DrillSchedule(_Form, frozen=True):
    """`drills[].schedule`. `blackouts`: the first and the last day of each, in `zone`."""

    cron: Annotated[str, Parse(_five_fields, text=True)]
    zone: Zone = "UTC"
    window: Annotated[str, Parse(_day_window, text=True)] | None = None
    blackouts: tuple[Annotated[tuple[str, str], Parse(blackout, text=True)], ...] = ()
    grace: PositiveDuration = 20 * 86400.0  # s


class DrillLoad(_Form, frozen=True):
    """`drills[].load`: the prober's, at the address that users use."""

    url: BaseUrl
    model: str | None = None
    rate: Rate = 5.0  # 1/s
    streaming: bool = True
    retries: int = 0
    connections: Literal["kept", "new"] = "kept"
    deadline: PositiveDuration = 30.0  # s, of one request
    max_tokens: int = 32
    prompt: str | None = None
    api_key_file: AbsolutePath | None = None


class DrillBy(_Form, frozen=True):
    """`drills[].holds.degraded.by`: exactly one of the two, as the answer shows it."""

    model: str | None = None
    header: str | None = None


class DrillDegraded(_Form, frozen=True):
    """`drills[].holds.degraded`."""

    by: DrillBy
    within: PositiveDuration = 2.0  # s


class DrillHolds(_Form, frozen=True):
    """`drills[].holds`: what must hold. None (`null`): not asked."""

    goodput: Annotated[Goodput, Parse(goodput, text=True)] | None = Goodput(0.95, 30.0)
    ttft_p99: Level | None = "slo"  # s
    itl_p99: Level | None = "slo"  # s
    error_ratio: OpenShare | None = 0.01  # ratio
    restart_within: PositiveDuration | None = None  # s
    degraded: DrillDegraded | None = None
    retry_storm: bool = True


class DrillPeer(_Form, frozen=True):
    """`drills[].params.peer`: where the other direction can be made lossy."""

    netns: Netns


class DrillParams(_Form, frozen=True):
    """`drills[].params`: the fault's own numbers. None: its default; which fault takes which is checked in drills."""

    share: OpenShare | None = None  # ratio, packet-loss: of packets; slow-rank: of its power that the GPU keeps
    direction: Literal["in", "both"] | None = None
    peer: DrillPeer | None = None
    loopback: bool | None = None  # drop there too, where the agent reads the engine
    delay: PositiveDuration | None = None  # s, upstream-timeout
    # turn to status: upstream-timeout; synthetic and reset: gpu-reset; delete and evict: pod-kill
    mode: Literal["turn", "chunk", "hang", "status", "synthetic", "reset", "delete", "evict"] | None = None
    after_bytes: int | None = None
    status: Annotated[int, Parse(_status, what="503 or 429")] | None = None
    retry_after: Duration | None = None  # s
    leave: Size | None = None  # bytes, disk-full


class DrillConfig(_Form, frozen=True):
    """One of `drills`. drills.config makes it a Drill, and checks it against faults, rules and the calendar."""

    name: Annotated[str, Parse(_drill_name, text=True)]
    fault: DrillFault
    target: DrillTarget
    schedule: DrillSchedule | None = None
    load: DrillLoad | None = None
    for_: PositiveDuration = field(name="for", default=300.0)  # s
    baseline: Duration = 120.0  # s
    recovery: PositiveDuration = 600.0  # s
    resolve_within: PositiveDuration = 600.0  # s
    expects: tuple[str, ...] = ()  # rule ids
    holds: DrillHolds = DrillHolds()
    params: DrillParams = DrillParams()
    enabled: bool = True
    dry_run: bool = False
    echo: FullUrl | None = None  # a receiver that tells what reached it
    route_to: str | None = None  # a channel of `notify` by its name (webhook, webhook-2 …): it alone is told
    owner: str | None = None
    at: str = field(name="_at", default="")


class DrillGuards(_Form, frozen=True):
    """`drill_guards`. `min_healthy` None: the larger of 1 and half of them."""

    lever_file: AbsolutePath = Path("/etc/tocsin/NO-DRILLS")
    min_budget_left: Share = 0.5  # ratio
    max_blast_radius: OpenShare = 0.3  # ratio
    min_healthy: int | None = None  # replicas
    min_gap: Duration = 20 * 3600.0  # s
    other_watchers_ok: tuple[str, ...] = ()


class Config(_Form, frozen=True):
    """tocsin.yaml, whole."""

    node: Name | None = None  # load_config never leaves it None
    state_dir: AbsolutePath = Path("/var/lib/tocsin")
    listen: Annotated[str, Parse(_listen)] = "127.0.0.1:9959"
    external_url: BaseUrl | None = None
    socket: Annotated[Path, Parse(_socket_path, text=True)] = Path("/run/tocsin/tocsin.sock")
    poll: Annotated[float, within(duration_s, "1s", "60s")] = 5.0  # s
    slo: SloConfig = SloConfig()
    engines: tuple[EngineConfig, ...] = ()
    routers: tuple[RouterConfig, ...] = ()
    discover: bool = True
    nvml: Literal["auto", "off"] = "auto"
    gpus: GpusConfig = GpusConfig()
    kernel_log: Annotated[str, Parse(_path_text, text=True, words=("auto", "off"), what="auto, off or a path")] = "auto"
    sources: SourcesConfig = SourcesConfig()
    cluster_rules: bool = False
    pattern: Annotated[str, Parse(_pattern, text=True)] | None = None
    rules: RulesConfig = RulesConfig()
    notify: tuple[NotifyConfig, ...] = ()
    probe: ProbeConfig = ProbeConfig()
    web: WebConfig = WebConfig()
    drills: tuple[DrillConfig, ...] = ()
    drill_guards: DrillGuards = DrillGuards()
    drill_group: str | None = None


def without_function(config: Config) -> list[str]:
    """A sentence for each thing that is written and leads to nothing: nothing is ignored silently."""
    if not config.engines and not config.discover and config.sources == SourcesConfig():
        return ["engines: none is configured, and discovery is off; name them under `engines:`"]
    return []


def told_by_each(config: Config) -> list[str]:
    """A hint for whoever has a fleet: what spans nodes is told by each agent that has it in its file."""
    if config.cluster_rules:
        return []
    each, said = "in a fleet without Kubernetes each agent that has them", []
    if names := source_names(config):
        said.append(f"sources: {', '.join(names)}: {each} tells the same: write them into the file of one")
    if routers := [target_name(router) for router in config.routers]:
        said.append(f"routers: {', '.join(routers)}: {each} tells the same replica-hotspot: write rules: {{disable:"
                    " [replica-hotspot]} into the files of all but one")
    return said


# ---- reading it ----


def load_config(path: Path | None, env: Mapping[str, str]) -> Config:
    """tocsin.yaml as Config. `path` None: the default file if it is there, else the built-in defaults.

    Raises ConfigErrors with every fault. The node's name falls back to NODE_NAME in `env`, then to the host name.
    """
    config, faults = _read(path, env)
    if faults:
        raise ConfigErrors(faults)
    return config


def load_all(path: Path | None, env: Mapping[str, str], catalogue: Mapping[str, SignalSpec]) -> tuple[Config, RuleSet]:
    """The configuration and the rules under it. Raises ConfigErrors with the faults of both."""
    config, faults = _read(path, env)
    try:
        rules = rules_for(config, catalogue)
    except ConfigErrors as errors:
        raise ConfigErrors([*faults, *errors.faults]) from None
    if faults:
        raise ConfigErrors(faults)
    return config, rules


def _read(path: Path | None, env: Mapping[str, str]) -> tuple[Config, list[Fault]]:
    """The configuration, with defaults in place of what is faulty, and its faults."""
    if path is None and not _is_there(DEFAULT_PATH):
        return _with_node(Config(), env), []
    read: Decoded[Config] = load(path or DEFAULT_PATH, Config)
    if read.value is None:
        return _with_node(Config(), env), list(read.faults)
    places = Places(read.file, read.lines)
    written = any(key.startswith("slo.") for key in read.lines)
    config = msgspec.structs.replace(
        read.value,
        slo=msgspec.structs.replace(read.value.slo, written=written),
        rules=msgspec.structs.replace(read.value.rules, places=places),
    )
    return _with_node(config, env), [*read.faults, *_later_faults(read, config, places)]


def _is_there(path: Path) -> bool:
    """Also true for what cannot be read: that must be said, not taken for defaults."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _with_node(config: Config, env: Mapping[str, str]) -> Config:
    return msgspec.structs.replace(config, node=config.node or env.get("NODE_NAME") or socket.gethostname())


def _later_faults(read: Decoded[Config], config: Config, places: Places) -> list[Fault]:
    """What can be wrong between keys. Where a key's own value was refused, nothing is said about it twice."""
    faults = [*_name_faults(config, places), *_number_faults(config, places)]
    for item in config.notify:
        faults += _notify_faults(item, places)
    faults += _drill_faults(config, places)
    refused = [fault.key for fault in read.faults]
    return [
        fault for fault in faults if not any(key.startswith(fault.key) or fault.key.startswith(key) for key in refused)
    ]


def _place(url: str) -> str:
    """The same for all spellings of one address. Never a name: it has white space."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme} {parts.hostname} {port} {parts.path}"


def _name_faults(config: Config, places: Places) -> list[Fault]:
    faults, first = [], dict[str, str]()
    targets: Sequence[EngineConfig | RouterConfig] = (*config.engines, *config.routers)
    for target in targets:
        name = target_name(target)
        if name in first:
            remedy = "give each its own name"
            where = f"{target.at}.name" if target.name else f"{target.at}.url"
            faults.append(places.fault(where, f"the name {cut(name)} is taken by {first[name]}", remedy, cut(name)))
        elif (place := _place(target.url)) in first:
            message = f"the address of {first[place]} stands here again"
            faults.append(places.fault(f"{target.at}.url", message, "keep one of them: each would count twice"))
        first.setdefault(name, target.at)
        first.setdefault(_place(target.url), target.at)
    seen: set[str] = set()
    sources: Sequence[PromqlSource | JsonSource] = (*config.sources.promql, *config.sources.json)
    for source in sources:
        if source.name in seen:
            message = f"a second source {cut(source.name)}"
            faults.append(places.fault(f"{source.at}.name", message, "give each its own name"))
        elif source.name in first:
            message = f"the name {cut(source.name)} is taken by {first[source.name]}"
            faults.append(places.fault(f"{source.at}.name", message, "give each its own name"))
        seen.add(source.name)
        if source.token_file and source.token_env:
            faults.append(places.fault(source.at, "token_file and token_env are both written", "keep one of them"))
    return faults


def _number_faults(config: Config, places: Places) -> list[Fault]:
    faults = []
    for engine in config.engines:
        key = f"{engine.at}.gpus"
        if len(set(engine.gpus)) != len(engine.gpus):
            faults.append(places.fault(key, f"a GPU stands twice in {list(engine.gpus)}", "name each GPU once"))
        if any(gpu < 0 for gpu in engine.gpus):
            faults.append(places.fault(key, f"{min(engine.gpus)} is no GPU", "write NVML indices, from 0"))
    wanted = [("gpus.expected", config.gpus.expected), ("drill_guards.min_healthy", config.drill_guards.min_healthy)]
    faults += [
        places.fault(key, f"{number} is below 0", "write a number from 0")
        for key, number in wanted
        if number is not None and number < 0
    ]
    pairs = [
        ("web", config.web.token_file, config.web.token_env, "token"),
        ("probe.canary", config.probe.canary.api_key_file, config.probe.canary.api_key_env, "api_key"),
    ]
    faults += [
        places.fault(key, f"{name}_file and {name}_env are both written", "keep one of them")
        for key, file, variable, name in pairs
        if file and variable
    ]
    return faults


def _notify_faults(item: NotifyConfig, places: Places) -> list[Fault]:
    key = item.at
    kinds = [kind for kind in CHANNEL_KINDS if getattr(item, kind) is not None]
    if len(kinds) != 1:
        message = f"names {len(kinds)} channels ({', '.join(kinds)})" if kinds else "names no channel"
        return [places.fault(key, message, f"write one of {', '.join(CHANNEL_KINDS)} in each item")]
    faults, kind = [], kinds[0]
    channel = getattr(item, kind)
    ways = _ONE_OF.get(kind, ())
    given = [way for way in ways if getattr(channel, way) is not None]
    if ways and len(given) != 1:
        message = f"{' and '.join(given)} are both written" if given else f"needs one of {', '.join(ways)}"
        faults.append(places.fault(f"{key}.{kind}", message, "keep one of them" if given else f"add {ways[-2]}: …"))
    if item.alertmanager is not None and not item.alertmanager.urls:
        faults.append(places.fault(f"{key}.{kind}.urls", "names no Alertmanager", "add the URL of every peer"))
    if item.slack is not None and (item.slack.channel is None) == bool({*given} & {"token_file", "token_env"}):
        message, remedy = ("is the webhook's own", "remove it") if item.slack.channel else (
            "is missing: a bot's token reaches many", "add channel: its id, or #name")
        faults.append(places.fault(f"{key}.slack.channel", message, remedy))
    for name, part in (("match", item.match), ("quiet", item.quiet)):
        if part is not None and part.severity == ():
            remedy = "write severity: [page], or leave the key out"
            faults.append(places.fault(f"{key}.{name}.severity", "an empty list matches nothing", remedy))
        empty = [way for way in ("rule", "subject") if getattr(part, way, None) == ()]
        faults += [places.fault(f"{key}.{name}.{way}", "an empty list matches nothing", "leave the key out")
                   for way in empty]
        if part is not None and kind == "heartbeat":
            faults.append(places.fault(f"{key}.{name}", "a heartbeat is sent whatever fires", f"remove {name}"))
    if item.quiet is not None and "page" in item.quiet.severity:
        faults.append(places.fault(f"{key}.quiet.severity", "a page is never held back", "remove page from it"))
    for name in ("quiet", "repeat"):
        if getattr(item, name) is not None and kind == "alertmanager":
            message, remedy = "Alertmanager has that itself", "write it in Alertmanager's routes, and remove it here"
            faults.append(places.fault(f"{key}.{name}", message, remedy))
    if item.repeat is not None and kind == "heartbeat":
        faults.append(places.fault(f"{key}.repeat", "a heartbeat has `every`", "remove repeat"))
    return faults


def _drill_faults(config: Config, places: Places) -> list[Fault]:
    """What is wrong with a drill whatever the rules and the calendar say."""
    faults, seen = [], set[str]()
    engines = sorted(target_name(engine) for engine in config.engines)
    for drill in config.drills:
        if drill.name in seen:
            faults.append(places.fault(f"{drill.at}.name", f"a second drill {drill.name}", "give each its own name"))
        seen.add(drill.name)
        key, target = f"{drill.at}.target", drill.target
        given = [way for way in TARGET_WAYS if getattr(target, way) is not None]
        if drill.fault in ON_GPUS and target.engine is not None:
            given = [way for way in given if way != "gpu"]  # which of the engine's
        if len(given) != 1:
            message = f"{' and '.join(given)} are written" if given else "names nothing"
            faults.append(places.fault(key, message, f"write one of {', '.join(TARGET_WAYS)}"))
        if target.engine is not None and target.engine not in engines:
            message = f"engine {cut(target.engine)!r} is unknown"
            faults.append(places.fault(f"{key}.engine", message, did_you_mean(target.engine, engines, "under engines")))
        faults += _drill_number_faults(drill, places)
    return faults


def _drill_number_faults(drill: DrillConfig, places: Places) -> list[Fault]:
    load, by = drill.load, drill.holds.degraded.by if drill.holds.degraded else None
    wanted: list[tuple[str, int | float | None, int]] = [
        ("target.pid", drill.target.pid, 2),
        ("params.after_bytes", drill.params.after_bytes, 0),
        ("load.retries", load.retries if load else None, 0),
        ("load.max_tokens", load.max_tokens if load else None, 1),
    ]
    faults = [
        places.fault(f"{drill.at}.{key}", f"{number} is below {least}", f"write a number from {least}")
        for key, number, least in wanted
        if number is not None and number < least
    ]
    if load is not None and load.rate <= 0:
        faults.append(places.fault(f"{drill.at}.load.rate", "a rate of 0 sends nothing", "write 5/s"))
    if load is not None and not load.url.endswith("/v1"):
        message = "is not the address of an OpenAI API"
        faults.append(places.fault(f"{drill.at}.load.url", message, "write it with its path, as http://router/v1"))
    if by is not None and (by.model is None) == (by.header is None):
        faults.append(places.fault(f"{drill.at}.holds.degraded.by", "needs one of model, header", "write one of them"))
    return faults


# ---- what others ask of it ----


def target_name(target: EngineConfig | RouterConfig) -> str:
    """The subject of a target: its configured name, else host:port."""
    return target.name or address_of(target.url)


def address_of(url_text: str) -> str:
    """host:port of an address, with the port that its scheme means."""
    url = urlsplit(url_text)
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}"


def engine_of(config: Config, subject: str) -> EngineConfig | None:
    """The configured engine that a subject (a target, or one of its engines `target/1`) belongs to."""
    named = {target_name(engine): engine for engine in config.engines}
    return named.get(subject) or named.get(re.sub(r"/[0-9]+$", "", subject))


def slo_for(config: Config, subject: str | None = None) -> Slo:
    """The service levels of a subject (target or engine): the global ones, with its engine's own laid over them."""
    fields = ("ttft_p99", "itl_p99", "e2e_p99", "availability", "window")
    values = {name: getattr(config.slo, name) for name in fields}
    engine = engine_of(config, subject) if subject is not None else None
    own: dict[str, Any] = {}
    if engine is not None:
        own = {name: value for name in fields if (value := getattr(engine.slo, name)) is not UNSET}
    return Slo(**{**values, **own}, written=config.slo.written or bool(own))


def with_slo(config: Config, levels: Mapping[str, str]) -> Config:
    """The configuration with service levels from the command line (`ttft_p99=500ms`). Raises Unfit."""
    parse: Mapping[str, Any] = {
        **dict.fromkeys(("ttft_p99", "itl_p99", "e2e_p99", "window"), above_zero(duration_s).to),
        "availability": _availability,
    }
    changes: dict[str, Any] = {}
    for name, text in levels.items():
        if name not in parse:
            raise Unfit(f"service level {cut(name)!r} is unknown", did_you_mean(name, parse))
        changes[name] = parse[name](text)
    slo = msgspec.structs.replace(config.slo, **changes, written=config.slo.written or bool(changes))
    return msgspec.structs.replace(config, slo=slo)


def rules_for(config: Config, catalogue: Mapping[str, SignalSpec]) -> RuleSet:
    """All rules under this configuration, engines' own service levels considered. Raises ConfigErrors."""
    own = {target_name(engine): slo_for(config, target_name(engine)) for engine in config.engines}
    loaded = load_rules(config.rules, slo_for(config), catalogue, engine_slos=own)
    names = source_names(config)
    unknown = [rule for rule in loaded.rules if "source" in rule.params and rule.params["source"] not in names]
    faults = [_no_source(rule, names) for rule in unknown] + list(_told_of_nothing(config, loaded.known))
    if faults:
        raise ConfigErrors(faults)
    return replace(loaded, notes=(*loaded.notes, *_noise_notes(loaded.rules, business_of(config, loaded.rules))))


def _told_of_nothing(config: Config, known: Collection[str]) -> Iterator[Fault]:
    """Of `notify[].match.rule`, what no rule is called: the channel would wait for it in silence."""
    for item in config.notify:
        for i, pattern in enumerate(item.match.rule if item.match is not None else ()):
            if not any(fnmatchcase(name, pattern) for name in known):
                yield config.rules.places.fault(
                    f"{item.at}.match.rule[{i}]", f"no rule is called {cut(pattern)}",
                    did_you_mean(pattern, known, "known rules"))


def _no_source(rule: Rule, names: Sequence[str]) -> Fault:
    file, _, line = rule.where.rpartition(":")
    source = str(rule.params["source"])
    return Fault(file, int(line), f"{rule.id}.params.source", source, f"there is no source {cut(source)!r}",
                 did_you_mean(source, names, "under sources:"))


def business_of(config: Config, rules: Sequence[Rule]) -> tuple[str, ...]:
    """The sources that are business metrics: those that neither a rule of their own nor a pattern's rule judges."""
    own = {str(rule.params["source"]) for rule in rules if "source" in rule.params} | patterns.FEEDS.keys()
    return tuple(name for name in source_names(config) if name not in own)


def source_names(config: Config) -> list[str]:
    """The PromQL and JSON sources by name."""
    return [*(source.name for source in config.sources.promql), *(source.name for source in config.sources.json)]


def _noise_notes(rules: Sequence[Rule], business: Sequence[str]) -> list[str]:
    """From how many events on a fall is no noise: said once, at load."""
    falls = [rule for rule in rules if rule.signal == "business_drop" and rule.severity == "page"]
    return [f"{rule.id} judges {', '.join(business)}: {rule.factor:.0%} less is told from noise only where a window of"
            f" the query counts {events_needed(rule.factor):,.0f} events or more (3 sigma)"
            for rule in falls if business and rule.factor > 0]


def channels(config: Config) -> tuple[tuple[str, NotifyConfig], ...]:
    """Each channel with its name: its kind, and `-2` and so on for the second of a kind."""
    count: dict[str, int] = {}
    named = []
    for item in config.notify:
        count[item.kind] = count.get(item.kind, 0) + 1
        number = count[item.kind]
        named.append((item.kind if number == 1 else f"{item.kind}-{number}", item))
    return tuple(named)


class SecretUnreadable(Exception):  # noqa: N818  (it says what the secret is)
    """A secret cannot be read now. The text names the file or variable, never the content."""


def read_secret(file: Path | None, env: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """A secret, read when it is used, so that a rotated one is taken; white space around it is cut: none begins so.

    Raises SecretUnreadable.
    """
    if file is not None:
        where, text = str(file), _secret_in(file)
    elif env is not None:
        if env not in environ:
            raise SecretUnreadable(f"environment variable {env} is not set; set it for the daemon")
        where, text = f"environment variable {env}", environ[env]
    else:
        raise SecretUnreadable("no file and no environment variable is configured for this secret")
    text = text.strip()
    if not text:
        raise SecretUnreadable(f"{where} is empty; put the secret there")
    if not text.isprintable():
        raise SecretUnreadable(f"{where} holds more than one line, or control characters; put only the secret there")
    return text


def _secret_in(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SecretUnreadable(f"{file} cannot be read: {error.strerror}; check its path and permissions") from None
    if len(raw) > MAX_SECRET_BYTES:
        raise SecretUnreadable(f"{file} is over 64 KiB; this is hardly the secret")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SecretUnreadable(f"{file} is not UTF-8; put only the secret there") from None
