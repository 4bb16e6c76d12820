"""Our own /metrics: the signals of the last tick, the alerts, and how the agent itself is doing.

Everything is read at scrape time into a registry of our own; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from agent.model import Book, Signal, SignalSpec, SubjectKind

# unit of the catalogue -> suffix of the metric's name. All of them are Prometheus's base units already.
SUFFIXES: Mapping[str, str] = {
    "s": "_seconds",
    "ratio": "_ratio",
    "celsius": "_celsius",
    "kelvin": "_kelvin",
    "bytes": "_bytes",
    "count": "",
    "per second": "_per_second",
    "of limit": "",
}
# Which label says what a subject is, beside `subject`: as in the alerts' own labels.
IDENTITY: Mapping[SubjectKind, str] = {"gpu": "gpu", "engine": "engine", "group": "engine", "target": "engine"}
ALERT_PLACE = ("node", "engine", "gpu")  # labels of an alert by which Alertmanager's inhibition goes
ALERT_STATES = {"pending": 1.0, "firing": 2.0}


class SourceStat(NamedTuple):
    """How one source is doing: seconds of its last read, and how many reads failed as a whole since the start."""

    name: str
    took_s: float | None
    errors: int


class Measured(Protocol):
    """The part of agent.web.app.View that is shown as metrics."""

    def signals(self) -> list[Signal]: ...
    def gpus(self) -> dict[str, Any]: ...
    def scaling(self) -> list[dict[str, Any]]: ...
    def book(self) -> Book: ...
    def tick_at(self) -> float | None: ...
    def source_stats(self) -> Iterable[SourceStat]: ...
    def saved(self) -> bool: ...
    def outbox_counts(self) -> Mapping[str, Mapping[str, int]]: ...
    def delivery_counts(self) -> Mapping[str, Mapping[str, int]]: ...


def metric_name(spec: SignalSpec) -> str:
    """A signal's name as a metric, with its base unit: queue_age (s) -> tocsin_queue_age_seconds."""
    return f"tocsin_{spec.id}{SUFFIXES[spec.unit]}"


def _once(signals: Iterable[Signal]) -> list[Signal]:
    """One of each (signal, subject), the first: two rules on one signal must not make one series twice."""
    first: dict[tuple[str, str], Signal] = {}
    for signal in signals:
        first.setdefault((signal.id, signal.subject), signal)
    return list(first.values())


def _signal_families(signals: list[Signal], catalogue: Mapping[str, SignalSpec]) -> Iterator[Metric]:
    by_id: dict[str, list[Signal]] = {}
    for signal in signals:
        if signal.state == "value" and signal.value is not None:
            by_id.setdefault(signal.id, []).append(signal)
    for signal_id, having in sorted(by_id.items()):
        spec = catalogue[signal_id]
        identity = IDENTITY.get(spec.subject)
        family = GaugeMetricFamily(
            metric_name(spec), spec.help, labels=["subject", *([identity] if identity else [])]
        )
        for signal in having:
            family.add_metric([signal.subject, *([signal.subject] if identity else [])], signal.value or 0.0)
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
        labels=["rule", "subject", "severity", *ALERT_PLACE],
    )
    for alert in book.alerts.values():
        place = [alert.labels.get(name, "") for name in ALERT_PLACE]  # known from the moment on that it fires
        family.add_metric([alert.rule, alert.subject, alert.severity, *place], ALERT_STATES[alert.state])
    return family


def _gpu_families(report: Mapping[str, Any]) -> Iterator[Metric]:
    verdict = GaugeMetricFamily(
        "tocsin_gpu_verdict", "1 for the verdict on a GPU as it is now", labels=["subject", "gpu", "verdict"]
    )
    finding = GaugeMetricFamily(
        "tocsin_gpu_finding", "1 for each thing that speaks against a GPU", labels=["subject", "gpu", "code"]
    )
    for gpu in report["gpus"]:
        verdict.add_metric([gpu["subject"], gpu["subject"], gpu["verdict"]], 1.0)
        for code in dict.fromkeys(found["code"] for found in gpu["findings"]):
            finding.add_metric([gpu["subject"], gpu["subject"], code], 1.0)
    yield verdict
    yield finding


# key of a row of `check`'s scaling -> metric, and what it says
SCALING: Mapping[str, tuple[str, str]] = {
    "out": ("tocsin_scale_out", "1 while one replica more is advised, by queue age, TTFT or KV slots, thrice in a row"),
    "in": ("tocsin_scale_in", "1 while one replica fewer is advised: a short queue for ten minutes"),
    "startup_s": ("tocsin_scale_startup_seconds", "Slowest start seen of late, from process to first page; else 300"),
    "peak_per_s": ("tocsin_scale_peak_requests_per_second", "What came to this one in its highest minute of a day"),
    "served_per_s": ("tocsin_scale_served_requests_per_second",
                     "The most that this one finished in a minute of that day in which others waited"),
}


def _scaling_families(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    for key, (name, help_) in SCALING.items():
        family = GaugeMetricFamily(name, help_, labels=["subject"])
        for row in rows:
            if row[key] is not None:
                family.add_metric([row["subject"]], float(row[key]))
        yield family


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
    tried = CounterMetricFamily("tocsin_notifications", "Deliveries tried, by outcome", labels=["channel", "outcome"])
    for family, counts in ((owed, view.outbox_counts()), (tried, view.delivery_counts())):
        for channel, by_word in sorted(counts.items()):
            for word, count in sorted(by_word.items()):
                family.add_metric([channel, word], count)
        yield family
    yield GaugeMetricFamily("tocsin_database_saved", "1 while all is saved on disk, 0 while it is in memory only",
                            value=float(view.saved()))
    tick_at = view.tick_at()
    if tick_at is not None:
        yield GaugeMetricFamily("tocsin_tick_timestamp_seconds", "When the last tick was finished", value=tick_at)


class AgentCollector(Collector):
    """All of it, read from the view when a scrape asks."""

    def __init__(self, view: Measured, catalogue: Mapping[str, SignalSpec], clock: Callable[[], float]) -> None:
        self._view, self._catalogue, self._clock = view, catalogue, clock

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape, all from the same signals."""
        signals = _once(self._view.signals())
        yield from _signal_families(signals, self._catalogue)
        yield from _gap_families(signals, self._clock())
        yield _alert_family(self._view.book())
        yield from _gpu_families(self._view.gpus())
        yield from _scaling_families(self._view.scaling())
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
