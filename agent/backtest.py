"""`tocsin backtest`: the rules over a recording, as fast as it can: what was so, what would have paged and when."""

from __future__ import annotations

import gzip
import heapq
import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from agent.config import Config, rules_for, slo_for, target_name, with_slo
from agent.engines.pages import PageReader
from agent.evaluate import judge
from agent.exposition import PageError
from agent.model import COMPARE, Batch, Gap, GpuFacts, MigFacts, Rule, Sample, Why
from agent.node import Node, Setup
from agent.signals import CATALOGUE, Target, tellers
from agent.stats import quantile
from agent.windows import LATE_INTERVALS, bound
from rules import RulesConfig, severity_of

SLOWEST_READ_S = 60.0  # a recorder gives a read up long before
_T = TypeVar("_T")
HISTOGRAMS = {"ttft": (0.5, 0.99), "itl": (0.5, 0.99), "e2e": (0.99,), "queue_time": (0.99,)}


NOT_PROMISED = "no --slo is given: rules that need one are judged by the defaults, and are tickets"


class BadRecording(Exception):  # noqa: N818  (it says what is wrong)
    """A file is no recording; the text names file, line and what is wrong."""


class Row(NamedTuple):
    """One line of a recording: one read of one target. `body` None: the scrape failed; `gpus`: an NVML row."""

    at: float
    target: str
    body: str | None
    gpus: list[dict[str, Any]] | None


class Scrape(NamedTuple):
    """A row without what it brought: of these a whole recording is held, of pages never more than a few."""

    at: float
    target: str
    has_page: bool
    is_gpus: bool


class _Outline(msgspec.Struct):
    t: float
    target: str
    body: msgspec.Raw = msgspec.Raw(b"null")
    gpus: msgspec.Raw = msgspec.Raw(b"null")


_OUTLINE = msgspec.json.Decoder(_Outline)


def read(path: Path) -> Iterator[Row]:
    """The rows of a recording (gzip or plain JSON lines). One that was cut short gives what it holds.

    Raises:
        BadRecording: the file cannot be read, or a line is not as `tocsin record` writes it.
    """
    return _each_line(path, _row)


def _each_line(path: Path, understood: Callable[[bytes], _T]) -> Iterator[_T]:
    line_no = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            for line in gzip.GzipFile(fileobj=raw) if packed else raw:
                line_no += 1
                yield understood(line)
    except (EOFError, zlib.error):
        return  # the recorder was killed: all whole lines have been given
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        what = f"{path}:{line_no}: not a line of a recording ({error})"
        raise BadRecording(f"{what}; `tocsin record` makes one, plain or gzip") from None


def _row(line: bytes) -> Row:
    row = json.loads(line)
    return Row(float(row["t"]), str(row["target"]), row.get("body"), row.get("gpus"))


def _outlined(line: bytes) -> Scrape:
    row = _OUTLINE.decode(line)
    return Scrape(row.t, row.target, bytes(row.body) != b"null", bytes(row.gpus) != b"null")


def in_order(rows: Iterable[Row]) -> Iterator[Row]:
    """One file's rows by their time: a slow read is written down after those that began later and were sooner done."""
    held: list[tuple[float, int, Row]] = []
    for n, row in enumerate(rows):
        heapq.heappush(held, (row.at, n, row))
        while row.at - held[0][0] > SLOWEST_READ_S:
            yield heapq.heappop(held)[2]
    while held:
        yield heapq.heappop(held)[2]


@dataclass
class Whole:
    """What windows do not keep of one engine. `http_from`: the first page that has HTTP's counts.

    Those appear with the first answer; totals over a recording begin there, as Prometheus's increase() would.
    """

    target: str
    http_from: float | None = None
    kv_peak: float | None = None


@dataclass
class Span:
    """A stretch in which a rule's comparison held. `judged` is false while it was only shown (warming up)."""

    rule: str
    subject: str
    from_s: float
    to_s: float
    judged: bool = True


@dataclass
class Replay:
    """The state of one back-test."""

    node: Node
    start: float
    wholes: dict[str, Whole] = field(default_factory=dict)
    open_spans: dict[tuple[str, str], Span] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)


def backtest(paths: Sequence[Path], rules_dir: Path | None = None, slo_overrides: Mapping[str, str] | None = None,
             config: Config | None = None) -> dict[str, Any]:
    """Replay recordings of one node through the rules; the contract of `tocsin backtest --json`.

    `config`: whose rules, service levels and engines (found by their address) count; `rules_dir` adds rules, and
    `slo_overrides` (ttft_p99=500ms) service levels.

    Raises:
        BadRecording, agent.strict.ConfigErrors, agent.strict.Unfit (an SLO that does not parse).
    """
    config = _laid_over(config or Config(rules=RulesConfig(dirs=())), rules_dir, slo_overrides or {})
    rules = rules_for(config, CATALOGUE).rules
    scrapes = sorted((scrape for path in paths for scrape in _each_line(path, _outlined)), key=lambda s: s.at)
    if not scrapes:
        raise BadRecording(f"{', '.join(map(str, paths))}: no complete row")
    poll_s = typical_step_s(scrapes)
    targets = {s.target: target_of(s.target, config) for s in scrapes if not s.is_gpus}
    by_name = {target.name: target for target in targets.values()}
    node = Node(Setup("recording", poll_s, slo_for(config), tuple(by_name.values()), tuple(rules), severity_of,
                      raw_keep_s=math.inf))
    replay = Replay(node, scrapes[0].at)
    names = {url: target.name for url, target in targets.items()}
    readers = {name: PageReader(name) for name in by_name}
    before = None
    rows = heapq.merge(*(in_order(read(path)) for path in paths), key=lambda row: row.at)
    for at, group in moments(rows, poll_s):
        for row in group:
            node.take(batch_of(row, at, names, readers))
        _step(replay, at, 0.0 if before is None else min(at - before, LATE_INTERVALS * poll_s))
        before = at
        for reader in readers.values() if node.deployment else ():
            reader.read_patterns()
    return _result(replay, scrapes, poll_s)


def _laid_over(config: Config, rules_dir: Path | None, levels: Mapping[str, str]) -> Config:
    dirs = (*config.rules.dirs, rules_dir) if rules_dir else config.rules.dirs
    rules = msgspec.structs.replace(config.rules, dirs=dirs)
    return with_slo(msgspec.structs.replace(config, rules=rules), levels)


def target_of(url: str, config: Config) -> Target:
    """What was recorded under an address: the configured engine there, else one that is called host:port."""
    name = name_of(url)
    engine = next((engine for engine in config.engines if name_of(engine.url) == name), None)
    if engine is None:
        return Target(name, (), slo_for(config))
    name = target_name(engine)
    return Target(name, (), slo_for(config, name), engine.profile or "latency", engine.gpus)


def typical_step_s(rows: Sequence[Scrape]) -> float:
    """How often the recording's busiest target was read: the median step."""
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(row.target, []).append(row.at)
    busiest = max(times.values(), key=len)
    steps = [b - a for a, b in pairwise(busiest) if b > a]
    return statistics.median(steps) if steps else 1.0


def moments(rows: Iterable[Row], poll_s: float) -> Iterator[tuple[float, list[Row]]]:
    """Rows that belong to one round: within half a step, no target twice."""
    group: list[Row] = []
    for row in rows:
        if group and (row.at - group[0].at > poll_s / 2 or any(row.target == g.target for g in group)):
            yield group[-1].at, group
            group = []
        group.append(row)
    if group:
        yield group[-1].at, group


def name_of(url: str) -> str:
    """A target's subject: host:port."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    return parts.netloc or url


def batch_of(row: Row, at: float, names: Mapping[str, str], readers: Mapping[str, PageReader]) -> Batch:
    """One recorded read, as its source would have given it."""
    if row.gpus is not None:
        return gpu_batch(row, at)
    name = names[row.target]
    reader = readers[name]
    if row.body is None:
        readings = reader.failed(Why.UNREACHABLE, "the recording has no page here", at, is_down=True)
        readings += [Sample("down", name, 1.0, at)]
        return Batch(f"engine:{name}", at, 0.0, tuple(readings))
    try:
        readings = reader.read(row.body.encode(), "", at)
    except PageError as error:
        readings = reader.failed(error.code, str(error), at)
        return Batch(f"engine:{name}", at, 0.0, (*readings, Sample("down", name, 0.0, at)))
    return Batch(f"engine:{name}", at, 0.0, (*readings, Sample("down", name, 0.0, at), Sample("slow", name, 0.0, at)),
                 engine=reader.facts)


def gpu_batch(row: Row, at: float) -> Batch:
    """A recorded NVML read: each GPU is its facts and its samples by name."""
    gpus: list[GpuFacts] = []
    readings: list[Sample | Gap] = []
    for gpu in row.gpus or ():
        uuid = str(gpu["uuid"])
        instances = tuple(MigFacts(str(one["uuid"]), int(one["gi"]), int(one["ci"]), str(one.get("name", "")))
                          for one in gpu.get("mig", ()))
        gpus.append(GpuFacts(uuid, int(gpu.get("index", 0)), str(gpu.get("name", "")), str(gpu.get("bdf", "")),
                             gpu.get("limit_c"), instances=instances))
        for told in (gpu, *gpu.get("mig", ())):
            readings += _readings_of(told, at)
    return Batch("nvml", at, 0.0, tuple(readings), gpus=tuple(gpus))


def _readings_of(told: Mapping[str, Any], at: float) -> list[Sample | Gap]:
    """The samples by name and the Gaps of a recorded GPU or MIG instance."""
    uuid = str(told["uuid"])
    samples = [Sample(name, uuid, float(value), at) for name, value in told.get("values", told).items()
               if name.startswith("gpu_") and isinstance(value, int | float)]
    return [*samples, *(Gap(name, uuid, Why(code), str(why), at) for name, (code, why) in told.get("gaps", {}).items())]


def _step(replay: Replay, at: float, dt_s: float) -> None:
    node, since_start = replay.node, round(at - replay.start, 3)
    node.windows.unsaved()  # for a store that a back-test does not have
    for change in node.step(at, dt_s):
        replay.transitions.append({"at_s": since_start, "rule": change.alert.rule, "subject": change.alert.subject,
                                   "state": change.kind, "value": change.alert.value,
                                   "severity": change.alert.severity, "why": change.why or None})
    for key, signal in node.signals.items():
        rule = node.rules[key[0]]
        held = _held(rule, node.limit_of(rule, signal.subject), signal)
        if held is None:
            continue
        span = replay.open_spans.get(key)
        # a dip of a scrape or two is the same span; what nobody watched is not
        if span is None or span.judged != held or since_start - span.to_s > LATE_INTERVALS * node.setup.poll_s:
            span = replay.open_spans[key] = Span(*key, since_start, since_start, held)
            replay.spans.append(span)
        span.to_s = since_start
    for target in (t for t in node.scene.targets.values() if t.ever_up):
        together = tuple(name for name in tellers(node.windows, target, "ttft") if name not in target.engines)
        for engine in (*target.engines, *together):  # what data-parallel engines count together is the target's
            whole = replay.wholes.setdefault(engine, Whole(target.name))
            if whole.http_from is None and node.windows.keys(target.name, "http"):
                whole.http_from = at
            kv = node.windows.latest(engine, "kv_usage", at)
            if isinstance(kv, Sample):
                whole.kv_peak = kv.value if whole.kv_peak is None else max(whole.kv_peak, kv.value)


def _held(rule: Rule, limit: float | None, signal: Any) -> bool | None:
    """Did the comparison hold: True (judged), False (shown only: warming up), None (no)."""
    if judge(rule, signal, limit) == "breach":
        return True
    if signal.state == "idle" and signal.value is not None and limit is not None and str(signal.why).startswith("warm"):
        return False if COMPARE[rule.op](signal.value, limit) else None
    return None


def _result(replay: Replay, scrapes: Sequence[Scrape], poll_s: float) -> dict[str, Any]:
    pages = [scrape for scrape in scrapes if not scrape.is_gpus]
    spans = sorted(replay.spans, key=lambda s: (s.from_s, s.rule, s.subject))
    paged = [t for t in replay.transitions if t["state"] == "firing" and t["severity"] == "page"]
    return {
        "recording": {"scrapes": len(pages), "missing": sum(not scrape.has_page for scrape in pages),
                      "seconds": round(scrapes[-1].at - scrapes[0].at, 3), "poll_s": round(poll_s, 3)},
        "engines": {engine: _engine(replay.node, engine, whole) for engine, whole in replay.wholes.items()},
        "breaches": [{"rule": s.rule, "subject": s.subject, "from_s": s.from_s, "to_s": s.to_s, "judged": s.judged}
                     for s in spans],
        "gaps": gaps(pages, replay.start, poll_s),
        "transitions": replay.transitions,
        "pages": [{"rule": t["rule"], "subject": t["subject"], "at_s": t["at_s"]} for t in paged],
        "signals": replay.node.check()["signals"],
        "notes": [] if replay.node.setup.slo.written else [NOT_PROMISED],
    }


def gaps(pages: Iterable[Scrape], start: float, poll_s: float) -> list[list[float]]:
    """Stretches without a page of some target: over 3 steps, or with a failed read; from the last good to the next.

    What no good one follows, or precedes, ends, or begins, with the failed reads.
    """
    found: list[list[float]] = []
    last: dict[str, float] = {}
    failed: dict[str, float] = {}
    for page in pages:
        before = last.setdefault(page.target, page.at)
        if not page.has_page:
            failed[page.target] = page.at
            continue
        if failed.pop(page.target, None) is not None or page.at - before > LATE_INTERVALS * poll_s:
            found.append([round(before - start, 3), round(page.at - start, 3)])
        last[page.target] = page.at
    found += [[round(last[target] - start, 3), round(at - start, 3)] for target, at in failed.items()]
    return sorted(found)


def _engine(node: Node, engine: str, whole: Whole) -> dict[str, Any]:
    """What is true of an engine over the whole recording."""
    windows, start = node.windows, 0.0

    def total(name: str, subject: str = engine) -> float | None:
        rises = windows.increases(subject, name, start)
        return sum(rises.values()) if rises else None  # what an engine does not count is not 0

    http = {} if whole.http_from is None else windows.increases(whole.target, "http", whole.http_from)
    finished = windows.increases(engine, "finished", start)
    queries, hits = total("prefix_queries"), total("prefix_hits")
    errors = max(sum(v for k, v in http.items() if k.startswith("5")),
                 finished.get("error", 0.0) + (total("rejections", whole.target) or 0.0))
    facts: dict[str, Any] = {
        "requests_finished": total("finished"),
        "errors": errors if http or finished else None,
        "preemptions": total("preemptions"),
        "generation_tokens": total("generation_tokens"),
        "kv_peak": whole.kv_peak,
        "prefix_hit_ratio": hits / queries if queries and hits is not None else None,
    }
    for name, quantiles in HISTOGRAMS.items():
        rises = windows.increases(engine, name, start)
        buckets = sorted((bound(k), v) for k, v in rises.items() if k not in ("sum", "count"))
        for q in quantiles:
            facts[f"{name.removesuffix('_time')}_p{q * 100:.0f}_s"] = quantile(q, buckets)
    for status in ("2xx", "4xx", "5xx"):
        facts[f"http_{status}"] = sum(v for k, v in http.items() if k[:1] == status[:1]) if http else None
    return facts


__all__ = ["BadRecording", "Gap", "Row", "backtest", "read"]
