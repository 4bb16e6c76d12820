"""One number inside a JSON answer: where the business tells its own figure and no Prometheus has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from agent.json_path import steps_of
from agent.model import Sample, Why
from agent.sources.asking import CONNECT_S, EVERY_S, TOTAL_S, Asking, NoValue, Told, refusal


def number_at(body: Any, steps: tuple[str | int, ...]) -> float:
    """The number at the end of a path. Raises NoValue, which says how far the path leads."""
    here, way = body, ""
    for step in steps:
        if isinstance(step, int):
            is_there = isinstance(here, list) and -len(here) <= step < len(here)
        else:
            is_there = isinstance(here, dict) and step in here
        if not is_there:
            there = f"only {', '.join(map(str, list(here)[:5]))}" if isinstance(here, dict) else \
                f"a list of {len(here)}" if isinstance(here, list) else f"a {type(here).__name__}"
            raise NoValue(Why.MISSING, f"the answer has no {step!r} under {way or 'its top'}: there is {there}")
        here, way = here[step], f"{way}[{step}]" if isinstance(step, int) else f"{way}.{step}".lstrip(".")
    if here is None:
        raise NoValue(Why.NO_DATA, f"{way} is null")
    if isinstance(here, bool) or not isinstance(here, (int, float, str)):
        raise NoValue(Why.NOT_A_NUMBER, f"{way} is a {type(here).__name__}, not a number")
    try:
        value = float(here)  # some write their decimals as text
    except ValueError:
        raise NoValue(Why.NOT_A_NUMBER, f"{way} is a text, not a number") from None
    if not math.isfinite(value):
        raise NoValue(Why.NOT_A_NUMBER, f"{way} is {value}")
    return value


class JsonSource(Asking):
    """Asks one address for one number; fulfils agent.model.Source. Arguments as Asking has them.

    Args:
        path: the way to the number, as `data.orders[0].count`.
    """

    def __init__(self, source: str, url: str, path: str, *, token: Callable[[], str] | None = None,
                 judged_by: str = "", every_s: float = EVERY_S, connect_s: float = CONNECT_S,
                 total_s: float = TOTAL_S, phase_s: float = 0.0) -> None:
        super().__init__(source, "json", url, token=token, judged_by=judged_by, every_s=every_s, connect_s=connect_s,
                         total_s=total_s, phase_s=phase_s)
        self._address, self._steps = url, steps_of(path)

    def ask(self, start: float) -> Told:
        """The number now."""
        del start
        answer = self.get(self._address)
        if answer.status != 200:
            raise NoValue(Why.BAD_STATUS, refusal(answer.status, "JSON"))
        try:
            body = msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NoValue(Why.BAD_PAGE, "the answer is not JSON") from None
        return Told((Sample("sourced", self.source, number_at(body, self._steps), 0.0),))
