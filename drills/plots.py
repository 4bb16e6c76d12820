"""What a run's requests looked like over time, as plots in SVG that stand in the page itself.

The requests are read once, one at a time, and only counted: a run of a million of them costs no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent import forms
from drills.model import Request

MOST_STEPS = 150  # points of a line: more of them nobody sees apart
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 21600, 86400)
MOST_REPLICAS = 8
MOST_GAPS = 20_000  # of one step are counted: its p99 needs no more
GROWTH = 1.03  # a latency is counted by its size to 3 %
MILLI = 1000.0
HUNDRED = 100.0


@dataclass(slots=True)
class Step:
    """The requests that were sent in one step of time."""

    sent: int = 0
    failed: int = 0
    ttft: Counter[int] = field(default_factory=Counter)  # by size
    itl: Counter[int] = field(default_factory=Counter)
    gaps: int = 0  # that were counted in itl


@dataclass(slots=True)
class Course:
    """Steps by their number from the injection on (negative before it), and the first request that a user saw fail."""

    step_s: float
    steps: dict[int, Step] = field(default_factory=dict)
    first_error: Request | None = None
    requests: int = 0


def course(requests: Iterable[Request], window: tuple[float, float], around: tuple[float, float]) -> Course:
    """Count the requests that were sent within `around`; `window`: the fault's."""
    span_s = max(1.0, around[1] - around[0])
    found = Course(next((s for s in STEPS_S if span_s / s <= MOST_STEPS), STEPS_S[-1]))
    for request in requests:
        found.requests += 1
        failed = request.outcome != "ok"
        if failed and request.ended_at >= window[0] and (
                found.first_error is None or request.ended_at < found.first_error.ended_at):
            found.first_error = request
        if not around[0] <= request.sent_at <= around[1]:
            continue
        step = found.steps.setdefault(math.floor((request.sent_at - window[0]) / found.step_s), Step())
        step.sent += 1
        step.failed += failed
        if request.first_at is not None or request.outcome == "timeout":
            step.ttft[size(max(0.0, (request.first_at or request.ended_at) - request.sent_at))] += 1
        if step.gaps < MOST_GAPS:
            step.itl.update(size(gap_s) for gap_s in request.itl_s)
            step.gaps += len(request.itl_s)
    return found


def size(value_s: float) -> int:
    """Which power of GROWTH a latency is nearest to; 0.1 ms and less are one."""
    return round(math.log(max(value_s, 1e-4)) / math.log(GROWTH))


def quantile_ms(sizes: Counter[int], q: float) -> float | None:
    """The q-quantile by nearest rank, in ms; None of nothing."""
    rank = math.ceil(q * sizes.total())
    for one in sorted(sizes):
        rank -= sizes[one]
        if rank <= 0:
            return float(f"{GROWTH**one * MILLI:.3g}")
    return None


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot, and the style sheet that it needs (by its own id)."""

    title: str
    svg: str
    css: str


LINE_COLORS = ("#1a73e8", "#d93025", "#f29900", "#9334e6", "#12b5cb", "#e52592", "#795548", "#5f6368")
Line = Sequence[tuple[float, float | None]]


def plots(found: Course, window: tuple[float, float], limits_s: Mapping[str, float | None],
          replicas: Mapping[str, Sequence[tuple[float, float]]] | None = None) -> list[Plot]:
    """TTFT, ITL, error rate and rate over the seconds from the injection.

    `replicas`: the rate of each over time, as (unix seconds, requests/s); only the busiest are drawn.
    """
    if not found.steps:
        return []
    steps = {n: found.steps.get(n, Step()) for n in range(min(found.steps), max(found.steps) + 1)}
    at = {n: (n + 0.5) * found.step_s for n in steps}

    def line(value: Any) -> Line:
        return [(at[n], value(step)) for n, step in steps.items()]

    drawn: list[tuple[str, str, dict[str, Line], float | None]] = []
    for name in ("ttft", "itl"):
        lines = {quantile: line(lambda s, q=q, name=name: quantile_ms(getattr(s, name), q))
                 for quantile, q in (("p50", 0.5), ("p99", 0.99))}
        limit_s = limits_s.get(name)
        if any(y is not None for points in lines.values() for _, y in points):
            drawn.append((name.upper(), "ms", lines, None if limit_s is None else limit_s * MILLI))
    drawn.append(("Error rate", "% of requests", {
        "failed": line(lambda s: HUNDRED * s.failed / s.sent if s.sent else None)}, None))
    rates = {"sent": line(lambda s: s.sent / found.step_s),
             "answered well": line(lambda s: (s.sent - s.failed) / found.step_s)}
    drawn.append(("Rate at the user's address", "requests/s", rates, None))
    by_replica: dict[str, Line] = {
        name: [(at - window[0], rate) for at, rate in points] for name, points in busiest(replicas or {}) if points}
    if by_replica:
        drawn.append(("Rate per replica", "requests/s", by_replica, None))
    lasts_s = window[1] - window[0]
    return [_plot(f"plot-{i}", f"{title}, {unit}", lines, limit, lasts_s)
            for i, (title, unit, lines, limit) in enumerate(drawn)]


def busiest(replicas: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[str, Sequence[tuple[float, float]]]]:
    """The replicas that got most, in the order of their names: more lines than these nobody tells apart."""
    got = sorted(replicas, key=lambda name: -sum(rate for _, rate in replicas[name]))[:MOST_REPLICAS]
    return [(name, replicas[name]) for name in sorted(got)]


def _plot(identity: str, title: str, lines: Mapping[str, Line], limit: float | None, lasts_s: float) -> Plot:
    """One plot. The fault's window lies shaded behind its lines."""
    pygal = forms.pygal()
    ys = [y for points in lines.values() for _, y in points if y is not None]
    xs = [x for points in lines.values() for x, _ in points]
    top = max([*ys, limit or 0.0, 1e-9]) * 1.05
    colors = ("#9aa0a6", *(LINE_COLORS[:len(lines)] if len(lines) > 1 else LINE_COLORS[1:2]))
    style = pygal.style.Style(
        background="transparent", plot_background="transparent", colors=(*colors, "#188038"), transition="none",
        font_family="system-ui, sans-serif", opacity=".22", opacity_hover=".22", guide_stroke_color="#8884",
        major_guide_stroke_color="#8888", foreground="#777", foreground_strong="#777", foreground_subtle="#777",
        label_font_size=11, major_label_font_size=11, legend_font_size=12,
    )  # fmt: skip
    chart = pygal.XY(
        width=900, height=260, style=style, js=[], show_dots=False, allow_interruptions=True, range=(0.0, top),
        xrange=(min([0.0, *xs]), max([lasts_s, *xs])), legend_at_bottom=True,
        legend_at_bottom_columns=len(lines) + 1 + (limit is not None),
        legend_box_size=10, max_scale=6, margin=6, x_title="", show_x_guides=False, disable_xml_declaration=True,
        x_value_formatter=lambda x: f"{x:g} s", value_formatter=lambda y: f"{y:g}", classes=("pygal-chart",),
    )
    chart.uuid = identity
    chart.add("fault", [(0, 0), (0, top), (lasts_s, top), (lasts_s, 0)], fill=True, stroke_style={"width": "0.01"})
    for name, points in lines.items():
        chart.add(name, points, stroke_style={"width": "2"})
    if limit is not None:
        chart.add("limit", [(min([0.0, *xs]), limit), (max([lasts_s, *xs]), limit)],
                  stroke_style={"width": "1.5", "dasharray": "6, 4"})
    svg, css = _plain(forms.drawn(chart), title)
    return Plot(title, svg, css)


def _plain(root: Any, title: str) -> tuple[str, str]:
    """The SVG and its style sheet apart: the page allows one style of its own, and no script at all."""
    from xml.etree import ElementTree as tree  # noqa: N813  (it writes; nothing foreign is read)

    css = ""
    for parent in list(root.iter()):
        parent.attrib.pop("style", None)
        for child in list(parent):
            name = str(child.tag).rpartition("}")[2]
            if name == "style":
                css += child.text or ""
            if child.tag is tree.Comment or name in {"style", "title"} or "tooltip" in child.get("class", ""):
                parent.remove(child)
    root.set("role", "img")
    root.set("aria-label", title)
    return tree.tostring(root, encoding="unicode"), css
