"""How reports are written, a drill's and an incident's alike: Markdown and one HTML page from templates, and JSON.

Every text goes through agent.escape: in Markdown by the filter `cell`, in HTML by jinja's own. Plots are pygal's. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from agent import escape
from agent.escape import UNKNOWN, number

Filters = Mapping[str, Callable[..., Any]]


def environment(package: str, *, autoescape: bool, filters: Filters | None = None,
                undefined: type[jinja2.Undefined] = jinja2.Undefined) -> jinja2.Environment:
    """Templates of a package, with the filters that all reports share. `undefined`: what a missing name is."""
    # Markdown is escaped by the filter `cell`, which every text goes through there.
    made = jinja2.Environment(loader=jinja2.PackageLoader(package), autoescape=autoescape, trim_blocks=True,  # noqa: S701
                              lstrip_blocks=True, keep_trailing_newline=True, undefined=undefined)
    made.filters |= {"utc": escape.utc, "day": escape.day, "span": escape.span, "offset": escape.offset,
                     "share": escape.share, "cell": escape.cell, "fenced": escape.fenced, "count": count,
                     "known": known, **(filters or {})}
    return made


def known(value: Any) -> Any:
    """What is not known says so."""
    return UNKNOWN if value is None or value == "" or isinstance(value, jinja2.Undefined) else value


def count(value: object) -> str:
    """A number without needless digits."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:g}" if found != int(found) else f"{found:.0f}"


def page(template: jinja2.Template, found: Mapping[str, Any], more_css: str = "") -> str:
    """One page, which loads nothing, runs nothing, and has one style: its own, known by its hash."""
    css = files("agent").joinpath("templates/report.css").read_text("utf-8") + more_css
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return template.render({**found, "css": Markup(css), "digest": digest})  # noqa: S704  (ours)


_loading = threading.Lock()


def pygal() -> Any:
    """The library that draws plots, of some megabytes: imported only by who draws, and by one of them."""
    with _loading:
        return _pygal()


@cache
def _pygal() -> Any:
    import pygal as library

    # It hangs a finder for its maps into every later import, of a kind that Python 3.11 warns of and 3.12 ignores.
    for finder in [finder for finder in sys.meta_path if type(finder).__module__ == library.__name__]:
        sys.meta_path.remove(finder)  # the list itself, and no other of it: other threads import meanwhile
    return library


def drawn(chart: Any) -> Any:
    """A chart of pygal's as a tree of SVG. A picture needs no script."""
    root = chart.render_tree()
    for parent in list(root.iter()):
        for script in [child for child in parent if str(child.tag).rpartition("}")[2] == "script"]:
            parent.remove(script)
    return root


def as_json(found: Mapping[str, Any]) -> str:
    """Plain data as JSON."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n"
