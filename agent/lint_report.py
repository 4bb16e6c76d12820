"""What `tocsin lint` prints: an engine after the other, the worst first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from agent.words import clean

HEADS = {"at odds": "AT ODDS", "cannot tell": "CANNOT TELL", "kept": "KEPT"}
WIDTH = 100


def report(answer: Mapping[str, Any]) -> list[str]:
    """All lines. What cannot be looked at comes first."""
    lines = [f"Not looked at: {clean(error)}" for error in answer["errors"]]
    for engine in answer["engines"]:
        lines += ["", *_engine(engine)] if lines else _engine(engine)
    if not answer["engines"] and not lines:
        lines.append("No engine to look at: name one, as `tocsin lint http://127.0.0.1:8000`")
    return lines


def _engine(engine: Mapping[str, Any]) -> list[str]:
    found = engine["findings"]
    about = " ".join(str(engine[key]) for key in ("kind", "version") if engine[key])
    model = f", {engine['model']}" if engine["model"] else ""
    counts = ", ".join(f"{n} {word}" for word in HEADS if (n := sum(one["verdict"] == word for one in found)))
    lines = [clean(f"{engine['engine']} ({about}{model}): {counts}")]
    for word, head in HEADS.items():
        own = [one for one in found if one["verdict"] == word]
        lines += ["", head] * bool(own)
        for one in own:
            lines += _finding(one)
    return lines


def _finding(one: Mapping[str, Any]) -> list[str]:
    lines = [f"{one['number']:>3}. {one['principle']}"]
    lines += [line for told in one["evidence"] for line in _folded("", told)]
    for key, head in (("costs", "Costs: "), ("change", "Change: "), ("would_tell", "Would tell: ")):
        lines += _folded(head, one[key]) if one[key] else []
    return lines


def _folded(head: str, text: str) -> Sequence[str]:
    return wrap(head + clean(text), WIDTH, initial_indent="     ", subsequent_indent=" " * (5 + len(head)),
                break_long_words=False, break_on_hyphens=False)
