"""Who may import whom: the table. What is pure stays pure, the daemon stays small, and only the edges ask the clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agent", "drills", "rules", "runbooks")


class Row(NamedTuple):
    """What a module may import: modules of ours, and foreign ones beyond SAFE (None: any but COMMAND_LINE)."""

    ours: str = ""
    foreign: str | None = ""


# These compute and nothing else. No file, no network, no clock, no thread; `datetime` is for forms, see `clock_calls`.
SAFE = """
    __future__ abc array bisect collections contextlib copy dataclasses datetime decimal difflib email.utils enum
    fractions functools hashlib heapq io ipaddress itertools json math operator re statistics string struct textwrap
    types typing unicodedata urllib.parse wsgiref.types zlib
""".split()  # noqa: SIM905  (forty quoted strings say less)
COMMAND_LINE = ("typer", "click", "rich")  # megabytes that the daemon never loads
WORLD = None

# A module that is not here fails the test. Write its row when you write the module; a wider row needs a reason.
MAY_IMPORT: dict[str, Row] = {
    # The nouns, and what only computes.
    "agent": Row(),
    "agent.model": Row("", "msgspec"),  # a Signal is made 480 times a tick: a Struct in 0.3 µs, a dataclass in 3.3
    "agent.retry_after": Row(),
    "agent.proxy": Row(),
    "agent.json_path": Row(),
    "agent.phase": Row(),
    "agent.patterns": Row(),
    "agent.watchlist": Row("agent.model agent.patterns agent.signals agent.stats agent.words"),
    "agent.daytime": Row("", "zoneinfo"),
    "agent.stats": Row(),
    "agent.exposition": Row("agent.model", "sys"),  # sys.intern
    "agent.windows": Row("agent.model"),
    "agent.signals": Row(
        "agent agent.hardware.history agent.hardware.signals agent.hardware.table agent.model agent.stats"
        " agent.watchlist agent.windows"
    ),
    "agent.evaluate": Row("agent.model"),
    "agent.words": Row("agent.model"),
    "agent.incidents": Row("agent.model"),
    "agent.impact": Row("agent.signals agent.stats agent.windows"),
    "agent.records": Row("agent agent.impact agent.incidents agent.model agent.signals"),
    "agent.review": Row("agent agent.model agent.noise"),
    # What reports are written with, an incident's and a drill's.
    "agent.escape": Row(),
    "agent.forms": Row("agent agent.escape", "base64 importlib jinja2 markupsafe msgspec pygal sys threading"),
    "agent.postmortem": Row("agent agent.escape agent.forms agent.noise agent.words"),
    "agent.release": Row("agent.model agent.signals agent.stats agent.words"),
    "agent.trend": Row("agent.model"),
    "agent.layouts": Row("agent.windows"),
    "agent.advise": Row("agent.scaling agent.words"),
    "agent.budget": Row("agent.advise"),
    "agent.weights": Row("agent.budget"),
    "agent.lint": Row("agent agent.advise agent.lint_case agent.lint_design agent.lint_memory agent.lint_running"),
    "agent.lint_blocks": Row("agent.lint_case"),
    "agent.lint_case": Row("agent agent.binds agent.budget agent.weights"),
    "agent.lint_design": Row("agent.advise agent.lint_blocks agent.lint_case agent.words"),
    "agent.lint_memory": Row("agent agent.advise agent.binds agent.budget agent.lint_case agent.weights agent.words"),
    "agent.lint_running": Row("agent.lint_blocks agent.lint_case agent.words"),
    "agent.lint_report": Row("agent.words"),
    "agent.facts": Row("agent.binds agent.model agent.signals"),
    "agent.spark": Row("agent.model"),
    "agent.page": Row("agent.binds agent.facts agent.model agent.words", "shlex"),
    "agent.binds": Row("agent.model agent.signals agent.words"),
    "agent.scaling": Row("agent.model agent.signals agent.stats agent.words"),
    "agent.silences": Row("", "fnmatch"),
    "agent.noise": Row(),
    "agent.node": Row(
        "agent agent.binds agent.evaluate agent.facts agent.hardware agent.hardware.history agent.hardware.signals"
        " agent.hardware.table agent.hardware.verdict agent.impact agent.incidents agent.model agent.page"
        " agent.patterns agent.records agent.scaling agent.signals agent.silences agent.spark agent.windows agent.words"
    ),
    "agent.engines": Row("agent.model", "importlib msgspec yaml"),  # its maps, read from the package
    "agent.engines.trtllm_json": Row("agent.exposition agent.model", "msgspec"),
    "agent.engines.pages": Row("agent.engines agent.exposition agent.model"),
    "agent.hardware": Row(),
    "agent.hardware.lines": Row(),
    "agent.hardware.table": Row("", "importlib yaml"),  # its tables, read from the package
    "agent.hardware.history": Row("agent.hardware.table agent.model"),
    "agent.hardware.verdict": Row("agent.model"),
    "agent.hardware.signals": Row(
        "agent.hardware.history agent.hardware.table agent.model agent.signals agent.windows agent.words"
    ),
    # Files of the user's, read once.
    "agent.strict": Row("", "msgspec pathlib yaml"),
    "agent.config": Row(
        "agent agent.engines agent.json_path agent.model agent.patterns agent.stats agent.strict rules",
        "fnmatch msgspec os pathlib socket zoneinfo",
    ),
    "rules": Row("agent.model agent.patterns agent.strict", "msgspec pathlib"),
    "rules.alertmanager": Row("agent.incidents agent.model"),
    "rules.exported": Row(
        "agent.model agent.signals rules rules.alertmanager rules.grafana rules.prometheus", "pathlib"
    ),
    "rules.grafana": Row("rules.prometheus"),
    "rules.prometheus": Row("agent.engines agent.model agent.stats agent.web.metrics rules"),
    "agent.backtest": Row(
        "agent.config agent.engines.pages agent.evaluate agent.exposition agent.model agent.node agent.signals"
        " agent.stats agent.strict agent.windows rules",
        "gzip msgspec pathlib",
    ),
    # The edges, which touch the world.
    "agent.threads": Row("", "threading"),
    "agent.sources": Row(),
    "agent.sources.engine": Row(
        "agent.engines.pages agent.engines.trtllm_json agent.exposition agent.model agent.sources.connections"
        " agent.sources.fetch agent.threads",
        WORLD,
    ),
    "agent.sources.connections": Row("", WORLD),
    "agent.sources.fetch": Row("agent.model", WORLD),
    "agent.sources.discovery": Row(
        "agent.engines agent.escape agent.exposition agent.model agent.sources.fetch", WORLD
    ),
    "agent.sources.pod_resources": Row("agent.model", "h2 os pathlib socket time"),
    "agent.sources.pods": Row(
        "agent.engines agent.model agent.sources.discovery agent.threads drills.cluster", "re shlex threading time"
    ),
    "agent.sources.workloads": Row("agent.model agent.sources.pods agent.threads drills.cluster", "threading"),
    "agent.sources.engine_probe": Row("agent.model", WORLD),
    "agent.sources.probe": Row("agent.model agent.phase agent.sources.fetch agent.threads", WORLD),
    "agent.sources.router": Row(
        "agent.engines agent.engines.pages agent.exposition agent.model agent.sources.fetch", WORLD
    ),
    "agent.sources.asking": Row("agent.model agent.phase agent.sources.fetch agent.threads", WORLD),
    "agent.sources.promql": Row("agent.model agent.sources.asking agent.sources.fetch agent.words", "msgspec"),
    "agent.sources.json_address": Row("agent.json_path agent.model agent.sources.asking", "msgspec"),
    "agent.sources.kernel_log": Row(
        "agent.hardware.lines agent.model agent.sources.journal agent.sources.log_files agent.threads", WORLD
    ),
    "agent.sources.journal": Row("agent.hardware.lines agent.sources.log_files", WORLD),
    "agent.sources.log_files": Row("agent.hardware.lines", WORLD),
    "agent.sources.nvml": Row(
        "agent.model agent.sources.gpu_devices agent.sources.nvml_events agent.sources.nvml_mig"
        " agent.sources.nvml_state agent.sources.nvml_values agent.threads", WORLD
    ),
    "agent.sources.nvml_events": Row("agent.model agent.sources.nvml_values agent.threads", WORLD),
    "agent.sources.gpu_devices": Row("agent.model", WORLD),
    "agent.sources.nvml_mig": Row("agent.model agent.sources.nvml_values", "pynvml"),
    "agent.sources.nvml_state": Row("agent.sources agent.sources.nvml_values", "ctypes pynvml"),
    "agent.sources.nvml_values": Row("agent.hardware.lines agent.model", "pynvml"),
    "agent.notifiers": Row(
        "agent agent.config agent.daytime agent.model agent.notifiers.alertmanager agent.notifiers.channel"
        " agent.notifiers.chat agent.notifiers.heartbeat agent.notifiers.kubernetes agent.notifiers.pagerduty"
        " agent.notifiers.slack"
        " agent.notifiers.webhook agent.phase agent.silences",
        "fnmatch importlib pathlib",
    ),
    "agent.notifiers.channel": Row("agent.model agent.proxy agent.retry_after", WORLD),
    "agent.notifiers.alertmanager": Row("agent.model agent.notifiers.channel agent.phase"),
    "agent.notifiers.heartbeat": Row("agent.model agent.notifiers.channel agent.phase"),
    "agent.notifiers.kubernetes": Row("agent.model agent.notifiers.channel drills.cluster", "http"),
    "agent.notifiers.webhook": Row("agent.model agent.notifiers.channel"),
    "agent.notifiers.trial": Row("agent.model agent.notifiers", "time"),
    "agent.notifiers.pagerduty": Row("agent.model agent.notifiers.channel", "msgspec"),
    "agent.notifiers.slack": Row("agent.model agent.notifiers.channel", "msgspec"),
    "agent.notifiers.chat": Row("agent.model agent.notifiers.channel agent.notifiers.slack", "pathlib subprocess sys"),
    "agent.notifiers.apprise_send": Row("", "apprise logging requests sys"),  # a process of its own
    "agent.store": Row("agent.model", WORLD),
    "agent.outbox": Row("agent.model agent.notifiers.channel agent.store agent.threads", WORLD),
    "agent.web": Row(),
    "agent.web.app": Row("agent.model agent.strict agent.web.metrics", "importlib msgspec pwd secrets structlog"),
    "agent.web.metrics": Row("agent.model", "prometheus_client"),
    "agent.web.glance": Row("agent.model agent.words"),
    "agent.web.pages": Row(
        "agent agent.client agent.config agent.forms agent.model agent.postmortem agent.strict agent.web agent.web.app"
        " agent.web.glance agent.web.plot agent.words",
        "http hmac importlib jinja2 markdown_it markupsafe pathlib structlog threading time",
    ),
    "agent.web.plot": Row("agent agent.forms agent.words", "xml.etree"),
    "agent.web.server": Row("agent.threads", WORLD),
    "agent.sdnotify": Row("", "os socket time"),
    "agent.client": Row("", "http pathlib socket"),
    "agent.loop": Row(
        "agent agent.impact agent.layouts agent.model agent.node agent.noise agent.notifiers agent.outbox agent.phase"
        " agent.review agent.signals agent.silences agent.store agent.threads agent.trend agent.web.metrics"
        " agent.windows",
        WORLD,
    ),
    "agent.daemon": Row(
        "agent agent.config agent.loop agent.model agent.node agent.notifiers agent.outbox agent.patterns agent.phase"
        " agent.sdnotify agent.signals"
        " agent.sources.asking agent.sources.discovery agent.sources.engine agent.sources.engine_probe"
        " agent.sources.fetch agent.sources.gpu_devices agent.sources.json_address agent.sources.kernel_log"
        " agent.sources.nvml agent.sources.pod_resources agent.sources.pods agent.sources.probe agent.sources.promql"
        " agent.sources.router agent.sources.workloads agent.store agent.strict agent.threads"
        " agent.web.app agent.web.pages agent.web.server drills drills.cluster rules",
        WORLD,
    ),
    # The command line, which no daemon imports.
    "agent.oneshot": Row(
        "agent.config agent.daemon agent.loop agent.model agent.node agent.progress agent.signals"
        " agent.sources.discovery agent.sources.engine_probe agent.windows",
        "msgspec time",
    ),
    "agent.record": Row("agent.exposition agent.model agent.progress agent.sources.fetch agent.threads", WORLD),
    "agent.release_watch": Row(
        "agent agent.loop agent.model agent.notifiers.channel agent.progress agent.release agent.sources.engine"
        " agent.sources.fetch agent.words", WORLD,
    ),
    "agent.lint_facts": Row(
        "agent.budget agent.client agent.config agent.daemon agent.exposition agent.lint_case agent.oneshot"
        " agent.silences agent.sources.discovery agent.sources.fetch",
        "msgspec pathlib time yaml",
    ),
    "agent.show": Row("agent.words", "rich shutil"),
    "agent.advise_commands": Row(
        "agent agent.advise agent.client agent.config agent.oneshot agent.progress agent.show agent.strict",
        "inspect msgspec os pathlib sys typer",
    ),
    # `tocsin demo`: its node is simulated, its agent and its drilld are processes of their own.
    "agent.demo": Row(),
    "agent.demo.agent": Row("agent agent.daemon agent.demo.gpus", "os pathlib sys"),
    "agent.demo.command": Row(
        "agent agent.client agent.config agent.demo.node agent.demo.scenario agent.demo.story agent.signals"
        " agent.strict", WORLD,
    ),
    "agent.demo.engine": Row("agent.demo agent.demo.gpus agent.demo.scheduler", WORLD),
    "agent.demo.gpus": Row("agent.model", "os pathlib time"),
    "agent.demo.node": Row(
        "agent agent.client agent.demo agent.demo.gpus agent.demo.receiver agent.demo.router agent.demo.scenario"
        " agent.demo.users", WORLD,
    ),
    "agent.demo.receiver": Row("", WORLD),
    "agent.demo.router": Row("", WORLD),
    "agent.demo.scenario": Row("agent.demo.gpus agent.strict", "msgspec pathlib"),
    "agent.demo.scheduler": Row(),
    "agent.demo.story": Row("agent agent.client agent.demo.node agent.demo.scenario agent.words", "rich time urllib"),
    "agent.demo.users": Row("", WORLD),
    "agent.progress": Row("agent.threads agent.words", "os rich signal sys threading time"),
    "agent.watch": Row(
        "agent.client agent.progress agent.show agent.words", "json os rich select shutil sys termios time tty"
    ),
    "agent.__main__": Row(
        "agent agent.advise_commands agent.backtest agent.client agent.config agent.demo.command agent.lint"
        " agent.lint_facts agent.lint_report agent.model"
        " agent.notifiers agent.notifiers.trial agent.oneshot agent.postmortem agent.progress agent.record"
        " agent.release_watch agent.show"
        " agent.signals agent.silences agent.sources.nvml agent.strict agent.threads agent.watch agent.words drills"
        " drills.cli"
        " drills.config rules rules.alertmanager rules.prometheus",
        "msgspec os pathlib shlex shutil signal sys threading typer",
    ),
    "runbooks": Row(),
    # The drills. What they may know of the agent: AGENT_FOR_DRILLS.
    "drills": Row(),
    "drills.completion": Row("drills.model", WORLD),
    "drills.prober": Row("agent.retry_after drills.completion drills.model", WORLD),
    "drills.model": Row(),
    "drills.judge": Row("drills.model"),
    "drills.definition": Row("drills.model", "msgspec yaml"),
    "drills.plots": Row("agent agent.forms drills.model", "xml.etree"),
    # Its run's own folder and those beside it; no clock, no network.
    "drills.report": Row(
        "agent agent.escape agent.forms drills drills.definition drills.judge drills.model drills.plots",
        "markupsafe msgspec pathlib xml.etree",
    ),
    "drills.cron": Row("agent agent.daytime agent.strict drills.model", "cronsim zoneinfo"),
    "drills.config": Row("agent agent.config agent.daytime agent.model agent.strict drills drills.cron drills.model"),
    "drills.guards": Row(
        "agent agent.client agent.config agent.proxy agent.silences agent.strict drills drills.cron drills.faults"
        " drills.faults.packet_loss drills.ledger drills.lock drills.model drills.targets drills.tell drills.watch",
        "concurrent http os pathlib requests",
    ),
    "drills.schedule": Row("drills drills.cron drills.ledger drills.lock drills.model drills.owner", WORLD),
    "drills.cluster": Row("", WORLD),
    "drills.in_pod": Row(
        "drills drills.cluster drills.faults.pod_kill drills.gpu drills.model drills.pods drills.proc", WORLD
    ),
    "drills.lease": Row("drills.cluster drills.model", WORLD),
    "drills.pods": Row("drills.cluster", "random"),
    "drills.pod_watch": Row("drills drills.cluster drills.pods drills.watch", WORLD),
    "drills.faults.pod_kill": Row("drills drills.cluster drills.model drills.pods", WORLD),
    "drills.lock": Row("drills drills.ledger drills.model drills.owner", "fcntl os pathlib"),
    "drills.proxy": Row("", WORLD),
    "drills.old_connections": Row("drills.proxy", WORLD),
    "drills.faults.upstream_timeout": Row(
        "drills drills.ledger drills.model drills.nft drills.old_connections drills.proc drills.proxy drills.targets",
        WORLD,
    ),
    "drills.faults": Row(),
    "drills.proc": Row("drills.model", WORLD),
    "drills.ledger": Row("drills.model drills.proc", WORLD),
    "drills.owner": Row("", "os pathlib stat"),
    "drills.targets": Row("agent.config drills.model drills.proc drills", "os pathlib socket"),
    "drills.heal": Row("drills drills.ledger drills.model drills.owner drills.proc drills.strays drills.undo", WORLD),
    "drills.strays": Row("drills drills.model drills.nft drills.proc", WORLD),
    "drills.undo": Row("drills.faults.table drills.ledger drills.model", WORLD),
    "drills.holder": Row("drills.faults.table drills.ledger drills.model drills.proc drills.undo", WORLD),
    "drills.faults.table": Row(
        "drills.faults.disk_full drills.faults.engine_hang drills.faults.gpu_reset drills.faults.packet_loss"
        " drills.faults.pod_kill drills.faults.process_kill drills.faults.slow_rank drills.faults.upstream_timeout"
        " drills.model"
    ),
    "drills.nft": Row("drills drills.model drills.proc", WORLD),
    "drills.rehearsal": Row("drills drills.model drills.nft", WORLD),
    "drills.faults.packet_loss": Row(
        "drills drills.ledger drills.model drills.nft drills.proc drills.rehearsal drills.targets", "shlex"
    ),
    "drills.faults.process_kill": Row("drills.model drills.proc drills.targets", WORLD),
    "drills.faults.engine_hang": Row("drills.model drills.proc drills.targets", WORLD),
    "drills.faults.disk_full": Row("drills.model drills.proc", WORLD),
    "drills.gpu": Row("drills drills.model drills.proc", WORLD),
    "drills.gate": Row("drills.ledger drills.model", WORLD),
    "drills.faults.gpu_reset": Row(
        "agent agent.client drills drills.cluster drills.gate drills.gpu drills.model drills.proc drills.targets"
        " drills.xid_line", WORLD
    ),
    "drills.supervisor": Row("", WORLD),
    "drills.xid_line": Row("agent agent.client drills drills.gpu drills.model drills.proc", WORLD),
    "drills.faults.slow_rank": Row("drills drills.gpu drills.model", WORLD),
    "drills.watch": Row("agent agent.client agent.proxy drills.judge", WORLD),
    "drills.tell": Row("agent agent.client drills.model", "pathlib"),
    "drills.record": Row(
        "agent.escape drills drills.judge drills.ledger drills.model drills.owner drills.report",
        "importlib msgspec pathlib"
    ),
    "drills.history": Row("drills drills.ledger drills.model drills.proc drills.record drills.report", WORLD),
    "drills.unit": Row("drills.model", "pathlib"),
    "drills.hit": Row("agent.config drills drills.model drills.proc drills.targets"),
    "drills.runner": Row(
        "agent agent.client agent.config agent.model agent.signals agent.strict agent.threads drills drills.cluster"
        " drills.config drills.faults.table drills.guards drills.hit drills.holder drills.in_pod drills.judge"
        " drills.ledger drills.lease drills.lock drills.model drills.owner drills.pod_watch drills.prober drills.proc"
        " drills.record drills.targets drills.tell drills.watch", WORLD
    ),
    "drills.daemon": Row(
        "agent agent.client agent.config agent.model agent.sdnotify agent.signals agent.strict agent.threads drills"
        " drills.cluster drills.config drills.cron drills.heal drills.history drills.ledger drills.lease drills.lock"
        " drills.model drills.owner drills.record drills.report drills.runner drills.schedule drills.tell", WORLD
    ),
    "drills.cli": Row(
        "agent agent.client agent.config agent.progress agent.signals agent.strict drills drills.config drills.daemon"
        " drills.faults.table drills.guards drills.heal drills.history drills.in_pod drills.lock drills.model"
        " drills.record drills.report drills.runner drills.schedule drills.targets drills.tell drills.unit",
        "getpass json msgspec os pathlib structlog sys threading time traceback typer",
    ),
}
# The agent's client, nouns and configuration file, the catalogue by which rules are checked, what reports are written
# with, the command line's progress, and what goes through a proxy; never its inside.
AGENT_FOR_DRILLS = {
    "agent", "agent.client", "agent.config", "agent.daytime", "agent.escape", "agent.forms", "agent.model",
    "agent.progress", "agent.proxy", "agent.retry_after", "agent.sdnotify", "agent.signals", "agent.silences",
    "agent.strict", "agent.threads",
}
# The one module that speaks to Kubernetes, for both: imports nothing of ours, and loads its library where it is used.
CLUSTER_FOR_AGENT = {"drills", "drills.cluster"}
# What only an edge may do: ask what time it is. Everybody else is told.
CLOCK_READERS = {
    "drills.ledger": "stamps its entries",
    "drills.holder": "stamps its events",
    "agent.notifiers.trial": "stamps its test alert",
    "drills.in_pod": "how long a pod ought to be gone",
    "drills.lease": "the wall clock, for people; what it goes by is CLOCK_BOOTTIME",
    "drills.runner": "the run's own clock",
    "drills.daemon": "when drills are due",
    "drills.history": "stamps the end of a run that was killed",
    "drills.cli": "names a run that is planned or started by hand",
    "drills.prober": "hangs its monotonic times on the wall clock, once",
    "agent.loop": "the tick",
    "agent.daemon": "hands the clock to the outbox and the web threads",
    "agent.oneshot": "a check without a running agent",
    "agent.release_watch": "hands the clock to what reads the two groups",
    "agent.lint_facts": "how long ago things were",
    "agent.record": "stamps what it records",
    "agent.watch": "says when it looked",
    "agent.demo.engine": "tells since when it runs, as every process does",
    "agent.demo.node": "dates its lines of the kernel log",
    "agent.demo.receiver": "stamps what it got",
    "agent.demo.story": "tells what was resolved since it began",
    "agent.store": "names a damaged file that it moves aside",
    "drills.schedule": "the timetable; its decisions are told the time",
    "drills.faults.pod_kill": "how long a pod ought to be gone",
    "drills.pod_watch": "stamps what it sees while a drill runs",
    "drills.watch": "stamps what it sees while a drill runs",
}
CLOCK_CALLS = frozenset(
    {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}
)


def name_of(path: Path) -> str:
    """agent/sources/nvml.py -> agent.sources.nvml."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imports_of(source: str) -> Iterator[str]:
    """Every module that a source imports, at whatever depth: inside a function it is imported all the same."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by full name, so that the table can be read"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


def within(name: str, allowed: Iterable[str]) -> bool:
    """Whether a dotted name is one of `allowed`, or inside of it."""
    return any(f"{name}.".startswith(f"{other}.") for other in allowed)


def faults(module: str, source: str) -> list[str]:
    """What `module` imports and may not."""
    row = MAY_IMPORT.get(module)
    if row is None:
        return [f"{module} has no row: add one to MAY_IMPORT in tests/test_imports.py"]
    found = []
    for name in sorted(set(imports_of(source))):
        if name.partition(".")[0] in PACKAGES:
            allowed = name in row.ours.split()
        elif row.foreign is WORLD:
            allowed = not within(name, COMMAND_LINE)
        else:
            allowed = within(name, (*SAFE, *row.foreign.split()))
        if not allowed:
            found.append(f"{module} may not import {name} (MAY_IMPORT in tests/test_imports.py)")
    return found


def clock_calls(source: str) -> list[str]:
    """Where a source reads the wall clock, or hands the function that does to somebody: `time.time in line 7`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            found += [f"{call} in line {node.lineno}" for call in CLOCK_CALLS if f".{dotted}".endswith(f".{call}")]
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"from time import {a.name} in line {node.lineno}" for a in node.names if a.name != "monotonic"]
    return found


@pytest.mark.parametrize("module", FILES)
def test_only_what_the_table_allows(module: str) -> None:
    """The state machine once asked a socket for the time, and no test of it was true any more."""
    assert faults(module, FILES[module].read_text()) == []


@pytest.mark.parametrize("module", sorted(FILES.keys() - CLOCK_READERS.keys()))
def test_only_edges_read_the_clock(module: str) -> None:
    """A suspended host: what asked the clock by itself saw nine hours of breach, what counted watched time none."""
    assert clock_calls(FILES[module].read_text()) == []


def test_neither_daemon_knows_the_other_s_inside() -> None:
    """A drill that reached into the agent's store judged the alarm by what the agent meant to do."""
    for module, row in MAY_IMPORT.items():
        ours = row.ours.split()
        if module.startswith("drills"):
            assert {name for name in ours if name.startswith("agent")} <= AGENT_FOR_DRILLS, module
        elif module != "agent.__main__":
            assert {name for name in ours if name.startswith("drills")} <= CLUSTER_FOR_AGENT, module
    assert MAY_IMPORT["drills.cluster"].ours == MAY_IMPORT["drills"].ours == ""


def test_no_row_outlives_its_module() -> None:
    """A permission nobody uses is the first one to be used wrongly."""
    assert sorted(MAY_IMPORT.keys() - FILES.keys()) == []
    assert sorted(CLOCK_READERS.keys() - FILES.keys()) == []


def test_the_daemon_stays_small() -> None:
    """A table for people, drawn by a library, stood in the daemon's memory for ever."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['agent.daemon', '--help']\n"
        "try: runpy.run_module('agent.daemon', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(*sorted(name for name, module in sys.modules.items() if module), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stderr.split()
    assert "agent.loop" in loaded, done.stdout
    unwanted = {"agent.__main__", "agent.budget", "agent.lint", "agent.lint_blocks", "agent.lint_case",
                "agent.lint_facts", "agent.lint_report", "agent.show", "agent.record", "agent.weights", "apprise",
                "click", "flask", "hypothesis", "pytest", "typer"}
    assert sorted(unwanted.intersection(loaded)) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("agent.evaluate", "import time", "agent.evaluate may not import time"),
        ("agent.evaluate", "def f():\n    import os.path", "agent.evaluate may not import os.path"),
        ("agent.model", "from agent import stats", "agent.model may not import agent.stats"),
        ("agent.store", "from rich.table import Table", "agent.store may not import rich.table"),
        ("agent.brandnew", "", "agent.brandnew has no row: add one to MAY_IMPORT"),
    ],
)
def test_the_table_bites(module: str, source: str, fault: str) -> None:
    """A check that cannot fail is decoration."""
    assert any(found.startswith(fault) for found in faults(module, source))


def test_the_clock_check_bites() -> None:
    """The same for the clock: called, handed on, or imported under its bare name."""
    assert clock_calls("import time\nx = time.time()") == ["time.time in line 2"]
    assert clock_calls("f(now=datetime.datetime.now)") == ["datetime.now in line 1"]
    assert clock_calls("from time import time") == ["from time import time in line 1"]
    assert clock_calls("import time\nfrom time import monotonic\nx = time.monotonic() + at.time.hour") == []
