"""One query to a Prometheus, Thanos or Mimir: what spans nodes, or belongs to the business.

An instant query; each of its series is a subject, `name{label="value"}`. An empty answer, NaN and an answer in part are
Gaps and never zeros. Where it is to be compared with its own past, the same query is asked of a day and of a week ago.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from agent.model import OLD_S, Gap, Sample, Why
from agent.sources.asking import CONNECT_S, EVERY_S, TOTAL_S, Asking, NoValue, Told, refusal
from agent.sources.fetch import Answer, FetchError
from agent.words import span

PAST_EVERY_S = 60.0  # yesterday changes no faster than today
PAST: Mapping[str, float] = {"sourced_1d": 86400.0, "sourced_7d": 7 * 86400.0}
MOST_SERIES = 50
LONGEST_SUBJECT = 160
MARGIN = 0.8  # of the deadline: it gives the query up itself, and says so
# Annotations of a query whose numbers are whole all the same; any other warning says that a part is missing.
HARMLESS = ("PromQL warning", "PromQL info")
PATH = "/api/v1/query"


class Vector(NamedTuple):
    """A good answer: the number of each series by its labels, when it holds (unix s), and what was said beside it."""

    values: tuple[tuple[Mapping[str, str], float], ...]
    at: float
    notes: tuple[str, ...] = ()


def vector_of(answer: Answer, asked_at: float) -> Vector:
    """The numbers of an instant query's answer. Raises NoValue in words, whatever came instead.

    `asked_at`: the time that they must hold at (unix s), give or take OLD_S.
    """
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict) or body.get("status") not in ("success", "error"):
        if answer.status != 200:
            raise NoValue(Why.BAD_STATUS, refusal(answer.status, "Prometheus API"))
        raise NoValue(Why.BAD_PAGE, "the answer is not Prometheus's: is this the address of its API?")
    if body["status"] == "error":
        raise failed_query(str(body.get("errorType")), one_line(body.get("error")), answer.status)
    warnings = [one_line(text) for text in body.get("warnings") or ()]
    partial = [text for text in warnings if not text.startswith(HARMLESS)]
    if partial:
        raise NoValue(Why.ERROR, f"the answer is only a part: {partial[0]}")
    try:
        return Vector(*numbers_of(body["data"], asked_at), tuple(warnings))
    except (KeyError, TypeError, ValueError, IndexError):
        raise NoValue(Why.BAD_PAGE, "the answer has another form than Prometheus's") from None


def numbers_of(data: Any, asked_at: float) -> tuple[tuple[tuple[Mapping[str, str], float], ...], float]:
    """(labels and number of each series, when they hold). Raises NoValue."""
    kind, result = data["resultType"], data["result"]
    if kind == "scalar":
        return (({}, float(result[1])),), _fresh(float(result[0]), asked_at)
    if kind != "vector":
        raise NoValue(Why.BAD_PAGE, f"the query gives a {kind}, not one number a series: a range needs a function over"
                                    " it, as rate(…[5m])")
    if not result:
        raise NoValue(Why.NO_DATA, "the query is right and its answer is empty: no such series now")
    if len(result) > MOST_SERIES:
        raise NoValue(Why.TOO_LARGE, f"the answer has {len(result)} series, and at most {MOST_SERIES} are read: take"
                                     " them together, as sum by (region) (…)")
    if any("value" not in one for one in result):
        raise NoValue(Why.BAD_PAGE, "the query gives histograms: take a number of them, as histogram_quantile(…)")
    found = tuple(({name: str(word) for name, word in one["metric"].items()}, float(one["value"][1])) for one in result)
    return found, max(_fresh(float(one["value"][0]), asked_at) for one in result)


def _fresh(at: float, asked_at: float) -> float:
    """When a number holds. Raises NoValue: at another time than it was asked of."""
    off_s = asked_at - at
    if abs(off_s) <= OLD_S:
        return at
    way = "before" if off_s > 0 else "after"
    by = f"{span(abs(off_s))} {way} the one asked of" if math.isfinite(off_s) else "which it does not tell"
    raise NoValue(Why.STALE, f"the answer is of another time, {by}: a cache stands before this address, or a clock is"
                             " wrong")


def failed_query(kind: str, text: str, status: int) -> NoValue:
    """Why Prometheus has not answered a query, and what to do."""
    if kind == "bad_data":
        return NoValue(Why.BAD_STATUS, f"the query is wrong: {text}")
    if kind in ("timeout", "canceled"):
        return NoValue(Why.TIMEOUT, "the query takes too long, and it was given up there: make a recording rule of it, "
                                    f"and ask for that ({text})")
    if kind == "execution":
        return NoValue(Why.ERROR, f"the query cannot be worked out: {text}")
    return NoValue(Why.BAD_STATUS, f"HTTP {status}: {kind}: {text}")


def one_line(text: object, most: int = 200) -> str:
    """Another's words in one line, without control characters."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def subject_of(source: str, labels: Mapping[str, str]) -> str:
    """A series as a subject: the source's name with the labels that tell it from the others."""
    told = [(name, word) for name, word in sorted(labels.items()) if name != "__name__"]
    if not told:
        return source
    pairs = ",".join(f"{name}={msgspec.json.encode(one_line(word)).decode()}" for name, word in told)
    subject = f"{source}{{{pairs}}}"
    if len(subject) <= LONGEST_SUBJECT:
        return subject
    digest = hashlib.sha256(pairs.encode()).hexdigest()[:8]
    return f"{subject[:LONGEST_SUBJECT - 11]}…{digest}}}"


class PromqlSource(Asking):
    """Asks one query; fulfils agent.model.Source.

    Args:
        source: its configured name.
        url: of the API, without /api/v1/query.
        query: PromQL.
        with_past: ask it of a day and of a week ago, too.
        token, judged_by, every_s, connect_s, total_s: as Asking has them.
    """

    def __init__(self, source: str, url: str, query: str, *, with_past: bool = False,
                 token: Callable[[], str] | None = None, judged_by: str = "", every_s: float = EVERY_S,
                 connect_s: float = CONNECT_S, total_s: float = TOTAL_S, phase_s: float = 0.0) -> None:
        super().__init__(source, "promql", url, token=token, judged_by=judged_by, every_s=every_s,
                         connect_s=connect_s, total_s=total_s, phase_s=phase_s)
        self._base = url.rstrip("/").removesuffix(PATH) + PATH
        # what Thanos would answer in part it shall refuse; Prometheus and Mimir do not know the word, and ignore it
        self._asked = {"query": query, "timeout": f"{MARGIN * total_s * 1000:.0f}ms", "partial_response": "false"}
        self._with_past = with_past
        self._past: tuple[Sample | Gap, ...] = ()
        self._past_at = -math.inf  # monotonic

    def ask(self, start: float) -> Told:
        """The query now, and now and then of the past."""
        vector = vector_of(self.get(f"{self._base}?{urlencode(self._asked)}"), start + self.wall_s)
        readings, told = list[Sample | Gap](), dict[str, float]()
        for labels, value in vector.values:
            subject = subject_of(self.source, labels)
            told[subject] = value
            readings.append(Sample("sourced", subject, value, 0.0) if math.isfinite(value) else
                            Gap("sourced", subject, Why.NOT_A_NUMBER, f"the query gives {value}", 0.0))
        readings += self.missing(told, Why.MISSING, "this series is not in the answer any more")
        if self._with_past and start - self._past_at >= PAST_EVERY_S - 1.0:
            self._past, self._past_at = tuple(self._of_the_past(vector.at, list(told))), start
        return Told((*readings, *self._past), None, vector.notes)

    def _of_the_past(self, at: float, subjects: Sequence[str]) -> list[Sample | Gap]:
        """What the same query gave then. Where that is not told it is a Gap of that day alone."""
        found: list[Sample | Gap] = []
        for name, back_s in PAST.items():
            asked = urlencode({**self._asked, "time": f"{at - back_s:.3f}"})
            try:
                values = vector_of(self.get(f"{self._base}?{asked}", again=False), at - back_s).values
            except (FetchError, NoValue) as fault:
                found += [Gap(name, subject, fault.code, str(fault), 0.0) for subject in subjects]
                continue
            found += [Sample(name, subject_of(self.source, labels), value, 0.0) for labels, value in values
                      if math.isfinite(value)]
        return found
