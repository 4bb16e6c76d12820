"""What `tocsin lint` prints: what is so of all engines, then each with its own; the worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from agent.words import clean

Finding = Mapping[str, Any]
HEADS = {"at odds": "AT ODDS", "cannot tell": "CANNOT TELL", "kept": "KEPT"}
WIDTH = 100


def report(answer: Mapping[str, Any]) -> list[str]:
    """All lines. What cannot be looked at comes first."""
    engines = answer["engines"]
    parts = [[f"Not looked at: {clean(error)}" for error in answer["errors"]]] if answer["errors"] else []
    shared = [one for one in engines[0]["findings"] if all(one in other["findings"] for other in engines[1:])
              ] if len(engines) > 1 else []
    parts += [_part(f"All {len(engines)} engines", shared)] if shared else []
    for engine in engines:
        about = " ".join(str(engine[key]) for key in ("kind", "version") if engine[key])
        model = f", {engine['model']}" if engine["model"] else ""
        parts.append(_part(f"{engine['engine']} ({about}{model})",
                           [one for one in engine["findings"] if one not in shared]))
    if not parts:
        parts = [["No engine to look at: name one, as `tocsin lint http://127.0.0.1:8000`"]]
    return [line for i, part in enumerate(parts) for line in ([""] * bool(i) + part)]


def _part(head: str, findings: Sequence[Finding]) -> list[str]:
    counts = ", ".join(f"{n} {word}" for word in HEADS if (n := sum(one["verdict"] == word for one in findings)))
    lines = [clean(f"{head}: {counts or 'as all of them'}")]
    for word, title in HEADS.items():
        own = [one for one in findings if one["verdict"] == word]
        lines += ["", title] * bool(own)
        for same in _by_what_would_tell(own):
            lines += _told(same)
    return lines


def _by_what_would_tell(findings: Sequence[Finding]) -> Iterator[list[Finding]]:
    """Those that one and the same would tell, side by side; each of the others alone."""
    first = [one["would_tell"] or i for i, one in enumerate(findings)]
    whys = [one["evidence"] for one in findings]
    placed = [(first.index(one["would_tell"] or i), whys.index(one["evidence"]), i) for i, one in enumerate(findings)]
    for _, same in groupby(sorted(placed), key=lambda place: place[0]):
        yield [findings[i] for *_, i in same]


def _told(same: Sequence[Finding]) -> list[str]:
    """Their evidence, then what they share."""
    lines, one = [], same[-1]
    for why, of in groupby(same, key=lambda one: one["evidence"]):
        lines += [f"{each['number']:>3}. {each['principle']}" for each in of]
        lines += [line for told in why for line in _folded("", told)]
    for key, head in (("costs", "Costs: "), ("change", "Change: "), ("would_tell", "Would tell: ")):
        lines += _folded(head, one[key]) if one[key] else []
    return lines


def _folded(head: str, text: str) -> Sequence[str]:
    """Its lines, each folded. A line with spaces before it is to be written down: what is folded of it stays YAML."""
    lines, indent = [], " " * (5 + len(head))
    for i, line in enumerate(text.split("\n")):
        own = line[:len(line) - len(line.lstrip(" "))]
        lines += wrap(clean(line[len(own):]), WIDTH, initial_indent=indent + own if i else f"     {head}{own}",
                      subsequent_indent=indent + own + "  " * bool(own), break_long_words=False, break_on_hyphens=False)
    return lines
