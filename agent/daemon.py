"""`tocsin run`: builds the agent from its configuration, serves until it is told to stop.

Its own module, so that the command line's libraries are never in the daemon's memory (`python -m agent.daemon`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":  # structlog would take rich along for tracebacks in colour: 4 MiB in a daemon that has none
    sys.modules["rich"] = None  # type: ignore[assignment]

import structlog

from agent import patterns, sdnotify
from agent.config import (
    Config,
    SecretUnreadable,
    address_of,
    business_of,
    host_port,
    load_all,
    read_secret,
    rules_for,
    slo_for,
    source_names,
    target_name,
    without_function,
)
from agent.config import JsonSource as JsonSourceConfig
from agent.config import PromqlSource as PromqlSourceConfig
from agent.loop import Agent, Collector
from agent.model import FoundEngine, Rule, Source
from agent.node import Node, Setup
from agent.notifiers import Needs, build_channels, channel_names, not_installed
from agent.outbox import Outbox
from agent.phase import phase_of
from agent.signals import CATALOGUE, Target
from agent.sources.asking import EVERY_S as ASKED_EVERY_S
from agent.sources.discovery import DiscoverySource
from agent.sources.engine import EngineSource
from agent.sources.engine_probe import ProbeSource
from agent.sources.fetch import is_local
from agent.sources.gpu_devices import GpuDevices
from agent.sources.kernel_log import KernelLog
from agent.sources.pod_resources import PodResourcesSource, may_ask
from agent.sources.pods import PodsSource
from agent.sources.probe import CanarySource
from agent.sources.router import RouterSource
from agent.store import Store, StoreError
from agent.strict import ConfigErrors
from agent.threads import NoThread, begin
from agent.web.app import PRIVATE, PUBLIC, allowed_hosts, make_app
from agent.web.pages import Site, make_pages
from agent.web.server import CannotServe, Server, serve_tcp, serve_unix
from drills import cluster
from rules import RuleSet, severity_of

log = structlog.get_logger()

STOP_WITHIN_S = 4.0
OUTBOX_STOP_S = 1.0
M_ARENA_MAX = -8  # malloc.h
YOUNG_OBJECTS = 25_000
SIGNALS_OBEYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DATABASE = "tocsin.db"
CHANNELS = "channels"  # which channel has which name: its debts are kept by that


def tune_memory() -> None:
    """Let all threads share two heaps: one for each, as glibc has it, holds 3 MiB more with 8 engines, in pieces.

    Look for cycles after 25,000 new objects, not 700: a tick makes none, and looked for them for a fifth of its CPU.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def setup_of(config: Config, rules: Sequence[Rule], *, clip_windows: bool = False) -> Setup:
    """What a configuration says of the node."""
    targets = tuple(
        Target(target_name(e), (), slo_for(config, target_name(e)), e.profile or "latency", e.gpus,
               startup_within_s=0.0 if clip_windows else e.startup_within,  # a check alone waits for no start
               address=address_of(e.url), port=local_port(e.url))
        for e in config.engines)
    return Setup(config.node or "", config.poll, slo_for(config), targets, tuple(rules), severity_of,
                 config.external_url, config.nvml != "off", clip_windows,
                 xid_severity={number: over.severity for number, over in config.rules.xid.items()},
                 gpus_expected=config.gpus.expected,
                 sourced=tuple(source_names(config)) if judges_all(config) else (),
                 business=frozenset(business_of(config, rules)) if judges_all(config) else frozenset(),
                 judges_all=judges_all(config),
                 patterns=None if config.pattern is None else patterns.parse(config.pattern))


def adopt(config: Config, found: FoundEngine, shape: bool | None) -> tuple[Target, Source]:
    """An engine that nobody configured, as a target and its source."""
    target = Target(found.name, (), slo_for(config), address=address_of(found.url), port=found.port)
    return target, EngineSource(found.name, found.url, kind=found.kind, shape=shape,
                                patterned=config.pattern is not None)


def local_port(url: str) -> int:
    """The port of an address of this machine; 0 where it is another's."""
    host, _, port = address_of(url).rpartition(":")
    return int(port) if is_local(host.strip("[]")) else 0


def is_same(one: str, other: str) -> bool:
    """Whether two addresses are of one engine, however each is written."""
    return address_of(one) == address_of(other) or 0 != local_port(one) == local_port(other)


def real_gpus() -> list[Source]:
    """What tells of this machine's GPUs."""
    from agent.sources.nvml import NvmlSource  # 4 MiB that a node without GPUs need not hold

    nvml = NvmlSource()
    return [nvml, nvml.events, GpuDevices()]


Clock = Callable[[], float]
Gpus = Callable[[], list[Source]]  # real_gpus, but for `tocsin demo`, whose GPUs are simulated


def sources_of(config: Config, shapes: dict[str, bool], cursor: Mapping[str, Any] | None = None,
               *, once: bool = False, gpus: Gpus = real_gpus) -> list[Source]:
    """Everything that a configuration has read. `shapes`: which targets had several engines at first sight.

    `cursor`: up to where the kernel log was read; `once`: for a single look.
    """
    sources: list[Source] = [EngineSource(target_name(e), e.url, kind=e.kind, shape=shapes.get(target_name(e)),
                                          patterned=config.pattern is not None)
                             for e in config.engines]
    sources += canaries_of(config, once=once)
    if config.cluster_rules and cluster.configured():
        from agent.sources.workloads import WorkloadsSource  # for one agent of a cluster

        sources.append(WorkloadsSource())
    if source_names(config) and judges_all(config):
        sources += asked_sources(config, once=once)
    sources += [RouterSource(target_name(router), router.url, kind=router.kind) for router in config.routers]
    if config.nvml != "off":
        sources += gpus()
    if config.kernel_log != "off":
        path = None if config.kernel_log == "auto" else Path(config.kernel_log)
        sources.append(KernelLog(path, cursor, undated=once))
    return sources


def judges_all(config: Config) -> bool:
    """Whether what spans nodes is judged here: PromQL and JSON sources, a router's shares of all its replicas.

    On the nodes of a cluster by the one agent of `cluster_rules`.
    """
    return config.cluster_rules or not os.environ.get("NODE_NAME")


def not_asked(config: Config) -> list[str]:
    """A sentence for each thing that is configured and that another agent shall judge."""
    if judges_all(config):
        return []
    why = "each node would tell the same: give one agent `cluster_rules: true`"
    names, routers = source_names(config), [target_name(router) for router in config.routers]
    said = [f"sources: {', '.join(names)} are not asked here, where {why}"] if names else []
    if routers:
        said.append(f"routers: how {', '.join(routers)} shares requests out (replica-hotspot) is not judged here,"
                    f" where {why}")
    return said


def asked_sources(config: Config, *, once: bool = False) -> list[Source]:
    """The PromQL and JSON sources of a configuration. `once`: for a single look, which has no time to wait."""
    from agent.sources.json_address import JsonSource  # for those who have any
    from agent.sources.promql import PromqlSource

    own: dict[str, list[str]] = {}
    rules = rules_for(config, CATALOGUE).rules
    for rule in rules:
        if "source" in rule.params:
            own.setdefault(str(rule.params["source"]), []).append(rule.id)
    business = business_of(config, rules)

    def judged(name: str) -> str:
        by = own.get(name) or [rule.id for rule in rules if rule.signal == "business_drop"]
        if name in patterns.FEEDS and name not in own:
            feed = patterns.FEEDS[name]
            return f"judged by {feed.rule}, where pattern {feed.pattern} is"
        return f"judged by {', '.join(by) or 'no rule'}"

    def token(source: PromqlSourceConfig | JsonSourceConfig) -> Callable[[], str] | None:
        if source.token_file is None and source.token_env is None:
            return None
        return partial(read_secret, source.token_file, source.token_env)

    phase_s = 0.0 if once else phase_of(config.node or "", ASKED_EVERY_S)
    found: list[Source] = [PromqlSource(one.name, one.url, one.query, with_past=one.name in business, token=token(one),
                                        judged_by=judged(one.name), phase_s=phase_s) for one in config.sources.promql]
    return found + [JsonSource(one.name, one.url, one.path, token=token(one), judged_by=judged(one.name),
                               phase_s=phase_s) for one in config.sources.json]


def discoveries(config: Config, env: Mapping[str, str]) -> list[Source]:
    """Who looks for engines: in the processes of this machine, and where we are a pod with an account, in its pods."""
    if not config.discover:
        return []
    found: list[Source] = [DiscoverySource()]
    if env.get("NODE_NAME") and cluster.configured():  # a person's KUBECONFIG alone makes this machine no node
        found.append(PodsSource(env["NODE_NAME"]))
    if may_ask():
        found.append(PodResourcesSource())
    return found


def without_api(config: Config) -> list[str]:
    """A sentence where cluster rules are asked for and there is no cluster."""
    if not config.cluster_rules or cluster.configured():
        return []
    why = "there is no Kubernetes API here: it takes a ServiceAccount's token, or KUBECONFIG"
    return [f"cluster_rules: replicas-missing is N/A: {why}"]


def canaries_of(config: Config, *, once: bool = False) -> list[Source]:
    """A canary for each address that the configuration names; through an engine's own it also sees that one hang."""
    phase_s = 0.0 if once else phase_of(config.node or "", config.probe.canary.every)
    asked = config.probe.canary
    has_key = asked.api_key_file is not None or asked.api_key_env is not None
    slo_s = (config.slo.ttft_p99, config.slo.itl_p99)
    return [CanarySource(url, asks=engine_at(config, url), model=asked.model, every_s=asked.every, slo_s=slo_s,
                         api_key=partial(read_secret, asked.api_key_file, asked.api_key_env) if has_key else None,
                         phase_s=phase_s)
            for url in dict.fromkeys(asked.urls)]


def engine_at(config: Config, url: str) -> str | None:
    """The target whose own address this is, however it is written; one on this machine may be found later."""
    configured = next((e for e in config.engines if is_same(e.url, url)), None)
    if configured is not None:
        return target_name(configured)
    port = local_port(url)
    return f"127.0.0.1:{port}" if port and config.discover else None


def set_up_logging(stream: TextIO) -> None:
    """One line an event: for people on a terminal, as JSON elsewhere."""
    render: structlog.typing.Processor = structlog.dev.ConsoleRenderer() if stream.isatty() else \
        structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True),
                    structlog.processors.format_exc_info, render],
        logger_factory=structlog.PrintLoggerFactory(stream), cache_logger_on_first_use=True)


def build(config: Config, rules: RuleSet, gpus: Gpus = real_gpus, clock: Clock = time.time,
          monotonic: Clock = time.monotonic) -> Agent:
    """The agent with its sources, store and channels, its memory taken back. Raises StoreError."""
    store = Store(config.state_dir / DATABASE)
    learned = store.meta("learned") or {}
    shapes = {name: len(known["engines"]) > 1 or known["engines"][0] != name
              for name, known in (learned.get("targets") or {}).items() if known.get("engines")}
    sources = [*sources_of(config, shapes, learned.get("kernel_log"), gpus=gpus), *discoveries(config, os.environ)]
    if config.discover:  # whose process is whose, only discovery knows
        sources.append(ProbeSource(config.probe.folder))
    agent = Agent(Node(setup_of(config, rules.rules)), Collector(sources, clock, monotonic), store,
                  notes=[*without_function(config), *not_installed(config), *without_api(config), *not_asked(config),
                         *rules.notes],
                  clock=clock, monotonic=monotonic)
    if config.discover:
        agent.adopt = lambda found: adopt(config, found, shapes.get(found.name))
    agent.restore()
    names = channel_names(config, store.meta(CHANNELS) or {})
    node = os.environ.get("NODE_NAME") or config.node or ""
    needs = Needs(agent.firing, agent.healthy, config.external_url, agent.incidents, node)
    routes = build_channels(config, needs, names)
    agent.routes = routes
    agent.outbox = Outbox(store, [route.channel for route in routes], clock)
    agent.outbox.give_up_unknown()
    store.set_meta(CHANNELS, names)  # after that: a name that is free may be given anew
    return agent


def serve(agent: Agent, config: Config) -> list[Server]:
    """The page's address and the unix socket. Raises CannotServe."""
    hosts = allowed_hosts(config.listen, config.external_url)
    servers = [serve_unix(make_app(agent, CATALOGUE, time.time, routes=PRIVATE), config.socket)]
    try:
        token = _token_reader(config)
        agent.other_problems = lambda: _token_problems(token)
        site = Site(config.node or "", config.socket.with_name("drilld.sock"), token, CATALOGUE)
        public = make_app(agent, CATALOGUE, time.time, routes={**PUBLIC, **make_pages(site)}, hosts=hosts)
        servers.append(serve_tcp(public, config.listen))
    except CannotServe:
        servers[0].close()
        raise
    return servers


def _token_reader(config: Config) -> Callable[[], str | None]:
    """Reads the token that the page's forms ask for; None where none is configured. It raises SecretUnreadable.

    It is asked at each poll of a page, and says once in the log what is wrong, until that changes.
    """
    web, said = config.web, [""]

    def read() -> str | None:
        if web.token_file is None and web.token_env is None:
            return None
        try:
            token = read_secret(web.token_file, web.token_env)
        except SecretUnreadable as error:
            if said[0] != str(error):
                said[0] = str(error)
                log.warning("page_token_unreadable", error=str(error))
            raise
        said[0] = ""
        return token

    return read


def _token_problems(read: Callable[[], str | None]) -> list[str]:
    """For /healthz."""
    try:
        read()
    except SecretUnreadable as error:
        return [f"web: the page is read-only: its token cannot be read: {error}"]
    return []


def run(config: Config, rules: RuleSet, path: Path | None, gpus: Gpus = real_gpus) -> bool:
    """Serve until SIGTERM or SIGINT (False), or until SIGHUP brings a good new configuration (True)."""
    agent = build(config, rules, gpus)
    reload = threading.Event()
    begin(obey, "signals", agent, config, path, reload)
    servers = serve(agent, config)
    assert agent.outbox is not None  # noqa: S101  (build made it)
    agent.outbox.start(phase_of(config.node or "", config.poll))
    log.info("started", node=config.node, listen=servers[1].address, socket=str(config.socket),
             engines=[target_name(e) for e in config.engines], channels=[r.channel.name for r in agent.routes],
             poll_s=config.poll)
    for note in agent.notes:
        log.warning("note", text=note)
    if not agent.routes:
        log.warning("nobody_is_told", text="no channel is configured under `notify:`: alerts show only here")
    sdnotify.ready(status_line(agent, config))
    agent.run(sdnotify.alive)
    if not reload.is_set():
        sdnotify.stopping()
    close(agent, servers)
    return reload.is_set()


def obey(agent: Agent, config: Config, path: Path | None, reload: threading.Event) -> None:
    """Wait for signals in a thread of its own: a handler could interrupt the very lock that it needs."""
    while True:
        got = signal.Signals(signal.sigwait(SIGNALS_OBEYED))
        log.info("signal", signal=got.name)
        if got is not signal.SIGHUP:
            break
        sdnotify.reloading()
        if is_good(path, config):
            reload.set()
            agent.stop()
        else:
            sdnotify.ready(status_line(agent, config) + "; the new configuration is wrong, the old one is kept")
    reload.clear()  # who reloads and is told to stop, stops
    agent.stop()
    time.sleep(STOP_WITHIN_S)
    log.error("stop_forced", text=f"not ended after {STOP_WITHIN_S:g} s (a disk that hangs?); all that was saved stays")
    os._exit(0)  # a kill by the service manager would come later and do the same


def close(agent: Agent, servers: Sequence[Server]) -> None:
    """Let go of everything, within STOP_WITHIN_S. What is owed stays in the store."""
    agent.collector.stop()
    for server in servers:
        server.close()
    if agent.outbox is not None:
        agent.outbox.stop(OUTBOX_STOP_S)
    agent.store.close()


def is_good(path: Path | None, running: Config) -> bool:
    """Whether the configuration, as it is now, would start in place of the running one; its faults go to the log."""
    try:
        config, _ = load_all(path, os.environ, CATALOGUE)
        try_places(config, running)
    except ConfigErrors as errors:
        faults = [str(fault) for fault in errors.faults]
    except (CannotServe, StoreError) as error:
        faults = [f"{path}: {error}"]
    else:
        return True
    for fault in faults:
        log.error("configuration_fault", fault=fault)
    log.error("configuration_kept", text="the new configuration is wrong; the old one stays")
    return False


def try_places(config: Config, running: Config) -> None:
    """See that what a new configuration names otherwise can be had. Raises CannotServe, StoreError."""
    if config.state_dir != running.state_dir:
        store = Store(config.state_dir / DATABASE)
        store.close()
        if store.problem:
            raise StoreError(store.problem)
    if config.socket != running.socket:
        serve_unix(_nobody, config.socket).close()
    if config.listen != running.listen:
        host, port = host_port(config.listen)
        if port == host_port(running.listen)[1]:
            port = 0  # we have it ourselves: only whether the host is ours can be tried
        serve_tcp(_nobody, f"[{host}]:{port}" if ":" in host else f"{host}:{port}").close()


def _nobody(_: object, start_response: Callable[..., object]) -> list[bytes]:
    start_response("503 Service Unavailable", [])
    return []


def status_line(agent: Agent, config: Config) -> str:
    """The line that `systemctl status` shows."""
    rules = len(agent.node.setup.rules)
    return f"{config.node}: {len(config.engines)} engines, {rules} rules, {len(agent.routes)} channels"


def main(argv: Sequence[str] | None = None, gpus: Gpus = real_gpus) -> int:
    """The daemon's entry: 0 after a stop, 2 on a wrong configuration or a taken address, 1 for want of threads."""
    parser = argparse.ArgumentParser(prog="tocsin run", description="The monitoring daemon, in the foreground.")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE")
    path: Path | None = parser.parse_args(argv).config
    tune_memory()
    set_up_logging(sys.stderr)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OBEYED)  # before any thread is: they all inherit it
    try:
        config, rules = load_all(path, os.environ, CATALOGUE)
        again = run(config, rules, path, gpus)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)  # noqa: T201  (a person started this)
        return 2
    except (CannotServe, StoreError) as error:
        print(f"tocsin run: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except NoThread as error:  # half an agent would be silent where nobody expects it; the service manager tries again
        print(f"tocsin run: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if again:  # a reload is a restart that only the database survives: there is one way to begin
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  (ourselves, as we were called)
    return 0


if __name__ == "__main__":
    sys.exit(main())
