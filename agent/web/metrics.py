"""Our own /metrics: the signals of the last tick, the alerts, and how the agent itself is doing.

Everything is read at scrape time into a registry of our own; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from agent.model import Book, Signal, SignalSpec, SubjectKind

# unit of the catalogue -> (suffix of the metric's name, factor to Prometheus's base unit). "" is a plain count.
UNITS: Mapping[str, tuple[str, float]] = {
    "s": ("_seconds", 1.0),
    "ms": ("_seconds", 0.001),
    "ratio": ("_ratio", 1.0),
    "celsius": ("_celsius", 1.0),
    "C": ("_celsius", 1.0),
    "°C": ("_celsius", 1.0),
    "K": ("_kelvin", 1.0),
    "kelvin": ("_kelvin", 1.0),
    "bytes": ("_bytes", 1.0),
    "W": ("_watts", 1.0),
    "watts": ("_watts", 1.0),
    "MHz": ("_hertz", 1e6),
}
# Endings with which a signal's id may tell its unit; the metric's name says it in full.
SHORT_UNITS = ("_s", "_ms", "_c", "_bytes", "_w", "_mhz", "_ratio", "_seconds", "_celsius")
# What identifies a subject, besides `subject`. A tensor-parallel group is its engine.
IDENTITY: Mapping[SubjectKind, str] = {"gpu": "gpu", "engine": "engine", "group": "engine"}
ALERT_STATES = {"pending": 1.0, "firing": 2.0}


class SourceStat(NamedTuple):
    """How one source is doing: seconds of its last read, and how many reads failed as a whole since the start."""

    name: str
    took_s: float | None
    errors: int


class Measured(Protocol):
    """The part of agent.web.app.View that is shown as metrics."""

    def signals(self) -> list[Signal]: ...
    def book(self) -> Book: ...
    def tick_at(self) -> float | None: ...
    def source_stats(self) -> Iterable[SourceStat]: ...
    def outbox_counts(self) -> Mapping[tuple[str, str], int]: ...
    def delivery_counts(self) -> Mapping[tuple[str, str], int]: ...


def metric_name(spec: SignalSpec) -> str:
    """A signal's name as a metric, with its base unit: queue_age_s (s) -> tocsin_queue_age_seconds."""
    suffix = UNITS.get(spec.unit, ("", 1.0))[0]
    stem = spec.id
    for ending in SHORT_UNITS:
        if suffix and stem.endswith(ending):
            stem = stem.removesuffix(ending)
            break
    return f"tocsin_{stem}{suffix}"


def _signal_families(signals: list[Signal], catalogue: Mapping[str, SignalSpec]) -> Iterator[Metric]:
    by_id: dict[str, list[Signal]] = {}
    for signal in signals:
        if signal.state == "value" and signal.value is not None and signal.id in catalogue:
            by_id.setdefault(signal.id, []).append(signal)
    for signal_id, having in sorted(by_id.items()):
        spec = catalogue[signal_id]
        identity = IDENTITY.get(spec.subject)
        family = GaugeMetricFamily(
            metric_name(spec), spec.help or signal_id, labels=["subject", *([identity] if identity else [])]
        )
        factor = UNITS.get(spec.unit, ("", 1.0))[1]
        for signal in having:
            labels = [signal.subject, *([signal.subject] if identity else [])]
            family.add_metric(labels, factor * (signal.value or 0.0))
        yield family


def _gap_families(signals: list[Signal], now: float) -> Iterator[Metric]:
    age = GaugeMetricFamily(
        "tocsin_signal_age_seconds", "Age of what a signal was last had from", labels=["signal", "subject"]
    )
    gap = GaugeMetricFamily(
        "tocsin_signal_gap",
        "1 while a signal that should be there cannot be had, by reason; its own series is absent then",
        labels=["signal", "subject", "reason"],
    )
    for signal in signals:
        if signal.state == "gap":
            gap.add_metric([signal.id, signal.subject, signal.code.value if signal.code else "error"], 1.0)
        elif signal.state == "value":
            age.add_metric([signal.id, signal.subject], max(0.0, now - signal.at))
    yield age
    yield gap


def _alert_family(book: Book) -> Metric:
    family = GaugeMetricFamily(
        "tocsin_alert_state",
        "1 while an alert is pending, 2 while it is firing; absent otherwise",
        labels=["rule", "subject", "severity"],
    )
    for alert in book.alerts.values():
        family.add_metric([alert.rule, alert.subject, alert.severity], ALERT_STATES[alert.state])
    return family


def _own_families(view: Measured) -> Iterator[Metric]:
    took = GaugeMetricFamily("tocsin_source_duration_seconds", "Time the last read of a source took", labels=["source"])
    errors = CounterMetricFamily("tocsin_source_errors", "Reads of a source that failed as a whole", labels=["source"])
    for stat in view.source_stats():
        if stat.took_s is not None:
            took.add_metric([stat.name], stat.took_s)
        errors.add_metric([stat.name], stat.errors)
    yield took
    yield errors
    owed = GaugeMetricFamily("tocsin_outbox_notices", "Notices in the outbox", labels=["channel", "state"])
    for (channel, state), count in sorted(view.outbox_counts().items()):
        owed.add_metric([channel, state], count)
    yield owed
    tried = CounterMetricFamily("tocsin_notifications", "Deliveries tried, by outcome", labels=["channel", "outcome"])
    for (channel, outcome), count in sorted(view.delivery_counts().items()):
        tried.add_metric([channel, outcome], count)
    yield tried
    tick_at = view.tick_at()
    if tick_at is not None:
        yield GaugeMetricFamily("tocsin_tick_timestamp_seconds", "When the last tick was finished", value=tick_at)


class AgentCollector(Collector):
    """All of it, read from the view when a scrape asks."""

    def __init__(self, view: Measured, catalogue: Mapping[str, SignalSpec], clock: Callable[[], float]) -> None:
        self._view, self._catalogue, self._clock = view, catalogue, clock

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape, all from the same signals."""
        signals = self._view.signals()
        yield from _signal_families(signals, self._catalogue)
        yield from _gap_families(signals, self._clock())
        yield _alert_family(self._view.book())
        yield from _own_families(self._view)


def make_renderer(
    view: Measured, catalogue: Mapping[str, SignalSpec], clock: Callable[[], float]
) -> Callable[[str], tuple[bytes, str]]:
    """A function from an Accept header to (page, content type): the text format, or OpenMetrics for who asks for it."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(view, catalogue, clock))
    ProcessCollector(registry=registry)

    def render(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return render
