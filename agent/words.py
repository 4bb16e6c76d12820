"""Numbers and alerts in words: every number has its unit, every alert its subject, value, limit and action. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.model import Alert, Rule, Signal

_BIG = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit, short enough for a table: 85 %, 212 ms, 4.1 s, 91 °C, 12, 2.4×."""
    if value is None:
        return "–"
    if unit == "s":
        return span(value)
    if unit == "ratio":
        return f"{value:.1%}".replace(".0%", "%").replace("%", " %")
    if unit == "bytes":
        size, name = next(((s, n) for s, n in _BIG if value >= s), (1.0, "B"))
        return f"{value / size:.3g} {name}"
    signs = {"celsius": " °C", "kelvin": " K", "of limit": "×", "count": ""}
    digits = f"{value:.0f}" if value == int(value) else f"{value:.3g}"
    return digits + signs.get(unit, f" {unit}")


def span(seconds: float) -> str:
    """A span of time: 250 ms, 4.1 s, 90 s, 12 min, 3.5 h, 2 d."""
    if abs(seconds) < 1.0:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    if abs(seconds) < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if abs(seconds) < 172800 else f"{seconds / 86400:.3g} d"


SIGNS = {">": "over", ">=": "at or over", "<": "under", "<=": "at or under"}


def what(signal: Signal | None, unit: str) -> str:
    """What was measured, in the words that a person would use: a slow share is told with its p99."""
    evidence: Mapping[str, Any] = {} if signal is None else signal.evidence
    if evidence.get("p99_s") is not None:
        over = "over " if evidence.get("p99_over") else ""
        return (f"p99 {over}{span(evidence['p99_s'])} (SLO {span(evidence['slo_s'])}), "
                f"{evidence['slow']:.0f} to {evidence['possibly_slow']:.0f} of {evidence['n']:.0f} slow")
    burns = {k.removeprefix("burn_"): v for k, v in evidence.items() if k.startswith("burn_")}
    if burns:
        return "burn " + ", ".join(f"{v:.3g}× over {k}" for k, v in burns.items())
    if evidence.get("lost"):
        return "; ".join(f"{name}: {why}" for name, why in evidence["lost"].items())
    return quantity(None if signal is None else signal.value, unit)


def summary(rule: Rule, alert: Alert, signal: Signal | None, unit: str, node: str) -> str:
    """One line for a phone: what, how bad, where. At most 100 characters."""
    limit = "" if alert.limit is None else f", limit {quantity(alert.limit, unit)}"
    measured = what(signal, unit) if signal is not None and signal.state == "value" else \
        quantity(alert.value, unit)
    if any(word in measured for word in ("SLO", "burn", ";")) or rule.signal in ("blind", "watcher"):
        limit = ""
    text = f"{rule.id} {measured}{limit}: {alert.subject} on {node}"
    return text if len(text) <= 100 else text[:99] + "…"


def description(rule: Rule, alert: Alert, signal: Signal | None, unit: str) -> str:
    """The body: what was measured against what, why there is no number now, and what to do."""
    measured, limit = quantity(alert.value, unit), quantity(alert.limit, unit)
    lines = [f"{rule.signal} of {alert.subject} is {measured} ({SIGNS[rule.op]} {limit} breaches)."]
    if signal is not None and signal.state == "value":
        told = what(signal, unit)
        lines += [f"Measured: {told} ({signal.method})."] if told != quantity(alert.value, unit) else []
    elif signal is not None and signal.why:
        lines.append(f"No number now: {signal.why}.")
    lines.append(rule.action)
    return "\n".join(line for line in lines if line)
