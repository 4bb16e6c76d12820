"""The way to a number inside a JSON answer, as `sources.json[].path` has it: `data.days[0]["orders.paid"]`. Pure."""

from __future__ import annotations

import re

_STEP = re.compile(r"""\.?(?:(?P<key>[^.\[\]"]+)|\[(?P<index>-?[0-9]{1,9})\]|\["(?P<quoted>[^"]+)"\])""")


def steps_of(path: str) -> tuple[str | int, ...]:
    """`data.days[0]["orders.paid"]` as ("data", "days", 0, "orders.paid"). Raises ValueError where it is no path."""
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None or (step[0].startswith(".") and (not at or step["key"] is None)) or (
                at and step["key"] is not None and not step[0].startswith(".")):
            raise ValueError(path[at:])
        steps.append(step["key"] or step["quoted"] or int(step["index"]))
        at = step.end()
    if not steps:
        raise ValueError(path)
    return tuple(steps)
