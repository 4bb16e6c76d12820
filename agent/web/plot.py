"""One signal's curve with its limit, as an SVG picture that is read on light and dark ground alike."""

from __future__ import annotations

from collections.abc import Sequence

from agent import forms
from agent.words import quantity, span

LINE, LIMIT, GREY = "#1a73e8", "#d93025", "#808589"
X_LABELS = 4
HOLE_FACTOR = 90.0  # a hole is wider than a 90th of the plot: 80 s of 2 h, 16 min of a day


def draw(points: Sequence[tuple[float, float]], limit: float | None, unit: str, now: float, span_s: float) -> bytes:
    """The picture. `points`: (unix seconds, value), by time; the axis counts back from now."""
    from xml.etree import ElementTree  # it writes; nothing foreign is read

    pygal = forms.pygal()
    values = [value for _, value in points]
    low, top = min([0.0, *values]), max([*values, limit or 0.0, 1e-9])
    style = pygal.style.Style(
        background="transparent", plot_background="transparent", colors=(LINE, LIMIT), transition="none",
        font_family="system-ui, sans-serif", guide_stroke_color=GREY, major_guide_stroke_color=GREY, foreground=GREY,
        foreground_strong=GREY, foreground_subtle=GREY, label_font_size=11, major_label_font_size=11,
        legend_font_size=12)  # fmt: skip
    chart = pygal.XY(
        width=900, height=260, style=style, js=[], show_dots=len(points) < 3, allow_interruptions=True,
        range=(low, low + (top - low) * 1.05), xrange=(-span_s, 0.0), legend_at_bottom=True, legend_box_size=10,
        max_scale=6, margin=6, show_x_guides=False, disable_xml_declaration=True, no_data_text="no value yet",
        x_value_formatter=lambda x: "now" if x > -1.0 else f"-{span(-x)}",
        value_formatter=lambda y: quantity(y, unit))  # fmt: skip
    chart.x_labels = [-span_s * n / X_LABELS for n in range(X_LABELS, -1, -1)]
    if points:
        chart.add("value", _broken(points, now, span_s), stroke_style={"width": "2"})
    if limit is not None and points:
        chart.add(f"limit {quantity(limit, unit)}", [(-span_s, limit), (0.0, limit)], show_dots=False,
                  stroke_style={"width": "1.5", "dasharray": "6, 4"})
    drawn: bytes = ElementTree.tostring(forms.drawn(chart), encoding="utf-8")
    return drawn


def _broken(points: Sequence[tuple[float, float]], now: float, span_s: float) -> list[tuple[float, float | None]]:
    """The points, with an interruption where values are missing for long."""
    found: list[tuple[float, float | None]] = []
    for at, value in points:
        x = at - now
        if found and x - found[-1][0] > span_s / HOLE_FACTOR:
            found.append((x, None))
        found.append((x, value))
    return found
