"""Numbers and alerts in words: every number has its unit, every alert its subject, value, limit and action. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.model import Rule, Signal

SUMMARY_LENGTH = 100
MOST_DIGITS = 4  # more than the usual ones, to tell a value from its limit
_BIG = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))
_SPANS = ((1.0, 0.001, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h"))
_SIGNS = {"celsius": " °C", "kelvin": " K", "of limit": "×", "count": "", "per second": "/s"}
NOTHING = "–"
Evidence = Mapping[str, Any]


def quantity(value: float | None, unit: str, more: int = 0) -> str:
    """A number with its unit, short enough for a table: 85 %, 212 ms, 4.1 s, 91 °C, 12, 2.4×.

    `more`: so many digits beyond the usual ones.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if unit == "s":
        return span(value, more)
    if unit == "ratio":
        return _percent(value, more)
    if unit == "bytes":
        size, name = next(((s, n) for s, n in _BIG if abs(value) >= s), (1.0, "B"))
        return f"{_digits(value / size, more)} {name}"
    return _digits(value, more) + _SIGNS.get(unit, f" {unit}")


def _digits(value: float, more: int) -> str:
    """Three significant digits (and `more`), of a whole number all; never an exponent."""
    if value == int(value):
        return str(int(value))
    places = min(6, max(0, 2 - math.floor(math.log10(abs(value)))) + more)
    return _plain(f"{value:.{places}f}")


def _plain(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number else number


def _percent(value: float, more: int) -> str:
    """One decimal; more where it would say nothing or all of what is neither: 99.95 % is not 100 %."""
    for places in range(1 + more, 2 + MOST_DIGITS):
        text = _plain(f"{value * 100 + 0.0:.{places}f}")  # + 0.0: no "-0"
        if text not in ("0", "-0", "100") or value in (0.0, 1.0):
            break
    return f"{text} %"


def span(seconds: float, more: int = 0) -> str:
    """A span of time: 250 ms, 4.1 s, 90 s, 12 min, 3.5 h, 2 d."""
    if not math.isfinite(seconds):
        return NOTHING
    if not seconds:
        return "0 s"
    _, size, name = next((row for row in _SPANS if abs(seconds) < row[0]), (0.0, 86400.0, "d"))
    return f"{_digits(seconds / size, more)} {name}"


def beside(value: float | None, limit: float | None, unit: str) -> str:
    """A value as it is told beside its limit: with as many digits as it takes to read otherwise than that."""
    text = quantity(value, unit)
    if value is None or limit is None or value == limit:
        return text
    fuller = (quantity(value, unit, more) for more in range(MOST_DIGITS + 1))
    return next((t for t in fuller if t != quantity(limit, unit)), text)


def root_of(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of an incident's record the alert that caused it."""
    members: Sequence[Mapping[str, Any]] = incident["members"]
    return next((m for m in members if [m["rule"], m["subject"]] == list(incident["root"])), members[0])


# --- what was measured, where a number alone says too little ---------------------------------------------------------


def _slow(e: Evidence) -> str:
    over = "over " if e.get("p99_over") else ""
    slow, possibly = f"{e['slow']:.0f}", f"{e['possibly_slow']:.0f}"
    count = slow if slow == possibly else f"{slow} to {possibly}"
    return f"p99 {over}{span(e['p99_s'])} (SLO {span(e['slo_s'])}), {count} of {e['n']:.0f} slow"


def _burn(e: Evidence) -> str:
    rates = [(k.removeprefix("burn_"), v) for k, v in e.items() if k.startswith("burn_")]
    return "burn " + ", ".join(f"{_digits(v, 0)}× over {k}" for k, v in rates)


def _lost(e: Evidence) -> str:
    return "; ".join(f"{name}: {why}" for name, why in e["lost"].items())


def _stuck(e: Evidence) -> str:
    if e["flat_s"] <= 0 < e.get("waiting_alone_s", 0):
        return f"{e['waiting']:.0f} waiting and none running for {span(e['waiting_alone_s'])}"
    what = "no answer" if e.get("unanswered") else "no token"
    return f"{what} for {span(e['flat_s'])} with {e['running']:.0f} running, {e['waiting']:.0f} waiting"


def _free(e: Evidence) -> str:
    return f"{quantity(e['free_bytes'], 'bytes')} free and falling, limit {quantity(e['floor_bytes'], 'bytes')}"


def _heat(e: Evidence) -> str:
    """A margin of kelvins says little at night; the temperature does."""
    own = e.get("own_limit_c")
    limit = "" if own is None else f", its own limit {quantity(own, 'celsius')}"
    return quantity(e["gpu_temp_c"], "celsius") + limit + (", slowed by its hardware" if e["slowed"] else "")


def _in_a_row(reads: float) -> str:
    return "1 read" if reads == 1 else f"{reads:.0f} reads in a row"


# The first key of evidence that is there decides; what is told by one of these needs no limit beside it.
TELLERS: Mapping[str, Callable[[Evidence], str]] = {
    "p99_s": _slow,
    "burn_1h": _burn,
    "burn_1d": _burn,
    "lost": _lost,
    "late_s": lambda e: f"no answer for {span(e['late_s'])}",
    "failing_s": lambda e: f"nothing delivered for {span(e['failing_s'])}",
    "flat_s": _stuck,
    "waiting_alone_s": _stuck,
    "floor_bytes": _free,
    "failed_reads": lambda e: f"{e.get('failing') or 'the engine'} fails, {_in_a_row(e['failed_reads'])}",
    "late_reads": lambda e: f"no answer in time, {_in_a_row(e['late_reads'])}",
    "user_s": lambda e: f"{span(e['user_s'])} at the users' address, {span(e['inside_s'])} at the engine",
    "slowed": _heat,
    "own_limit_c": _heat,
    "text": lambda e: str(e["text"]),
}


def told(signal: Signal | None) -> str | None:
    """What was measured, in the words that a person would use; None where the number alone says it."""
    if signal is None:
        return None
    evidence = signal.evidence
    teller = next((t for key, t in TELLERS.items() if evidence.get(key)), None)
    if teller is None:
        teller = _burn if any(key.startswith("burn_") for key in evidence) else None
    return None if teller is None else teller(evidence)


def what(signal: Signal, unit: str) -> str:
    """What was measured: in words, else the number."""
    return told(signal) or quantity(signal.value, unit)


# --- an alert ---------------------------------------------------------------------------------------------------------

def fires(rule: Rule, unit: str) -> str:
    """When a rule fires, as its owner wrote it: ">= 0.5 × slo.ttft_p99", "> 85 %"."""
    limit = f"{rule.factor:g} × slo.{rule.slo}".removeprefix("1 × ") if rule.slo else quantity(rule.factor, unit)
    return f"{rule.op} {limit}"


SIGNS = {">": "over", ">=": "at or over", "<": "under", "<=": "at or under"}


def cut(text: str, length: int) -> str:
    """At most `length` characters, cut between words where there are any."""
    if len(text) <= length:
        return text
    whole = text[:length].rpartition(" ")[0].rstrip(" ,;:(")
    return (whole if len(whole) > length // 2 else text[: length - 1]) + "…"


TEN: Mapping[str, str] = {"H1": "queue", "H2": "KV", "H3": "preempt", "H4": "graph", "H5": "TTFT", "H6": "ITL",
                          "H7": "burn", "H8": "ranks", "H9": "GPU", "H10": "prefix"}
_WORST = ("BREACH", "PENDING", "UNKNOWN", "OK", "IDLE", "N/A")
_STATES = {"UNKNOWN": "?", "IDLE": "idle", "N/A": "n/a"}


def measured(row: Mapping[str, Any]) -> str:
    """What a row of `check` measured, in a word: a p99 says more than the share of slow ones."""
    p99_s = (row.get("evidence") or {}).get("p99_s")
    return span(p99_s) if p99_s else quantity(row["value"], row["unit"])


def the_ten(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ten thresholds in one line, the worst of each: `!` is a breach, `?` unknown. Rows as `check` tells them."""
    parts = []
    for number, name in TEN.items():
        own = sorted((row for row in rows if row["number"] == number), key=lambda row: _WORST.index(row["state"]))
        if not own:
            continue
        row = own[0]
        text = _STATES.get(row["state"]) or measured(row)
        parts.append(f"{name} {text}{'!' if row['state'] == 'BREACH' else ''}")
    return "The ten: " + " · ".join(parts)


def ending(open_s: float, why: str) -> str:
    """How an alert ended: back in range, or closed for another reason."""
    return f"closed after {span(round(open_s))}: {why}" if why else f"back in range after {span(round(open_s))}"


# --- a verdict on the whole node, from the rows of `check` ------------------------------------------------------------

Row = Mapping[str, Any]
_SEVERITIES = {"page": 0, "ticket": 1, "info": 2}
LOUD = ("BREACH", "PENDING")


def clean(text: object) -> str:
    """Text in one line without control characters: an engine's page must not steer the terminal that shows it."""
    return "".join(c if c.isprintable() else "�" for c in re.sub(r"\s+", " ", str(text)))


def place(signal: Row) -> tuple[int, int, str]:
    """Where a signal stands in the list: H1 to H10, then the rest by letter and number, then what has no number."""
    found = re.fullmatch(r"([A-Z]+)([0-9]+)", signal.get("number") or "")
    if not found:
        return (9, 0, str(signal.get("rule")))
    return ("HMLUKP".find(found[1]) if found[1] in "HMLUKP" else 8, int(found[2]), "")


def _sentence(signal: Row) -> str:
    unit, name = signal.get("unit") or "", f"{signal['rule']} on {signal['subject']}"
    if signal.get("value") is None:
        return clean(f"{name} was out of range, and is unknown now: {signal.get('why')}")
    measured = quantity(signal["value"], unit)
    limit = f" (limit {quantity(signal['limit'], unit)})" if signal.get("limit") is not None else ""
    told = f": {signal['text']}" if signal.get("text") not in (None, "", measured) else ""
    pending = "" if signal["state"] == "BREACH" else ", pending"
    return clean(f"{name} is {measured}{limit}{told}{pending}")


def _and_more(count: int, what: str) -> str:
    return f", and {count} more {what}" if count > 0 else ""


def loudest_first(signal: Row) -> tuple[Any, ...]:
    """Where a signal that is out of range stands: a page before a ticket, what is in breach before what is pending."""
    return (_SEVERITIES.get(signal.get("severity") or "", 3), LOUD.index(signal["state"]), place(signal))


def verdict_line(answer: Row) -> str:
    """The verdict in words, with the number that made it."""
    verdict, signals = answer["verdict"], answer["signals"]
    loud = sorted((s for s in signals if s["state"] in LOUD), key=loudest_first)
    unknown = [s for s in signals if s["state"] == "UNKNOWN"]
    word = str(verdict).upper()
    if verdict == "unknown" and answer.get("why"):
        return f"{word}: {clean(answer['why'])}"
    if verdict in ("page", "ticket") and loud:
        return f"{word}: {_sentence(loud[0])}{_and_more(len(loud) - 1, 'out of range')}"
    if verdict == "unknown" and all(s["state"] in ("IDLE", "N/A") for s in signals):
        return f"{word}: found nothing to watch"
    if verdict == "unknown" and unknown:
        first = next((s for s in unknown if s.get("required")), unknown[0])
        why = first.get("why") or "it was not told"
        return clean(f"{word}: cannot tell {first['rule']} of {first['subject']}, because {why}") + _and_more(
            len(unknown) - 1, "unknown"
        )
    in_range = sum(s["state"] == "OK" for s in signals)
    noted = f"; {len(loud)} noted for information" if loud else ""
    return f"{word}: {in_range} in range{noted}" + (f"; cannot tell {len(unknown)}" if unknown else "")


def binds_lines(rows: Sequence[Row], at: float | None) -> list[str]:
    """What binds each engine, the number that shows it, the one knob, what would not help, and when it changed."""
    lines = []
    for row in rows:
        age_s = (at or row["since"]) - row["since"]
        since = f" for {span(round(age_s))}" if row["by"] == row["held"] and age_s >= 1 else ""
        was = f" (before: {row['was']})" if row["by"] == row["held"] and row.get("was") else ""
        was = f" (just now; before: {row['held']})" if row["by"] != row["held"] else was
        line = f"What binds {row['engine']}: {str(row['name']).upper()}{since}{was}: {row['why']}."
        line += f" Turn: {row['knob']}." if row.get("knob") else ""
        line += f" Would not help: {row['no_help']}." if row.get("no_help") else ""
        lines.append(clean(line))
    return lines


def own_peak(peak_per_s: float, served_per_s: float) -> str:
    """A replica's own part of the warm pool: what came to it alone, so never the number of replicas of a fleet."""
    return (f"Its own highest minute of a day brought {peak_per_s:.3g} requests/s, and the most that it served was"
            f" {served_per_s:.3g}: {peak_per_s / served_per_s:.2g} times that")


def scaling_lines(rows: Sequence[Row]) -> list[str]:
    """Who needs a replica more or can spare one, by which number, and how soon a new one helps."""
    said = []
    for row in rows:
        if not (row["out"] or row["in"]):
            continue
        wish = "one replica more" if row["out"] else "one replica fewer"
        by = "the slowest start seen" if row["starts_seen"] else "assumed, no start was seen"
        helps = f" A new one helps after {span(row['startup_s'])} ({by})." if row["out"] else ""
        pool = f" {own_peak(row['peak_per_s'], row['served_per_s'])}." if row["out"] and row["served_per_s"] else ""
        said.append(clean(f"Advice for {row['subject']}: {wish}: {row['why']}.{helps}{pool}"))
    return said
