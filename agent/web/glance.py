"""What the status page shows, made of what the agent tells: pure functions from answers to rows. Nothing is drawn here.

Every state is said in a word beside its colour, every number has its unit, and what is unknown never looks healthy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from agent.model import AlertKey, IncidentMessage
from agent.words import TEN, binds_lines, clean, measured, quantity, root_of, span, verdict_line

Answer = Mapping[str, Any]
Curve = Sequence[tuple[float, float]]
Row = dict[str, Any]

NOTHING = "–"
HOUR_S = 3600.0
STATES = ("BREACH", "PENDING", "UNKNOWN", "OK", "IDLE", "N/A")  # the worst first
LOUD = STATES[:3]
NAMES = {"H1": "queue age", "H2": "KV cache utilization", "H3": "preemptions", "H4": "graph fallback",
         "H5": "slow first tokens (TTFT)", "H6": "slow token gaps (ITL)", "H7": "error budget burn",
         "H8": "rank spread", "H9": "GPU temperature", "H10": "prefix cache hit rate"}
WIDTH, HEIGHT = 120.0, 24.0  # of a small curve
HOLE_S = 150.0  # two minutes without a value are a hole in a curve
SVG_DIGITS = 1


def of_signal(row: Answer, curve: Curve = (), now: float = 0.0) -> Row:
    """One signal as a row: words, and its small curve of the last hour."""
    unit = row.get("unit") or ""
    value = quantity(row.get("value"), unit)
    told = row.get("text") or ""
    name = str(NAMES.get(row.get("number") or "", row["rule"]))
    if unit == "count" and row.get("number") and row.get("window_s"):
        name += f" in {span(row['window_s'])}"
    return {
        "number": row.get("number") or "", "rule": row["rule"], "name": name,
        "subject": row["subject"], "state": row["state"], "sign": sign(row["state"]), "value": value,
        "limit": quantity(row.get("limit"), unit), "severity": row.get("severity") or "",
        "method": row.get("method") or "", "age": NOTHING if row.get("age_s") is None else span(round(row["age_s"])),
        "why": row.get("why") or ("" if told == value else told), "silenced": row.get("silenced") or "",
        "action": row.get("action") or "",
        "href": link("signals", row["rule"], row["subject"]), "spark": spark(curve, row.get("limit"), now, unit),
    }  # fmt: skip


def sign(state: str) -> str:
    """The class of a state: a name that a style sheet can have."""
    return re.sub(r"[^a-z]", "", state.lower()) or "unknown"


def sign_id(key: str) -> str:
    """An id for an element of the page, of any text."""
    return "i" + key.encode().hex()


def link(*parts: str) -> str:
    """A path of ours; each part is quoted whole, so that no name leads elsewhere."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def severity_rank(row: Answer) -> tuple[int, int]:
    """Where a row stands: the worst state first, a page before a ticket."""
    state = STATES.index(row["state"]) if row["state"] in STATES else len(STATES)
    return state, {"page": 0, "ticket": 1}.get(row.get("severity") or "", 2)


def status(answer: Answer, tick: str, problems: Sequence[str]) -> Row:
    """The verdict: a word, the number that made it, when it was judged, and what is wrong with Tocsin itself."""
    word, _, line = verdict_line(answer).partition(": ")
    muted = [f"Silenced: {clean(one['text'])}" for one in answer.get("silences") or ()]
    muted += [f"Expected until {moment(one['until'])} by the drill {clean(one['drill'])}: {', '.join(one['rules'])}"
              for one in answer.get("expected") or () if one["rules"]]
    why = [answer["why"]] if answer.get("why") and answer["verdict"] != "unknown" else []
    return {"word": word, "line": line, "sign": sign(answer["verdict"]), "tick": tick, "problems": [*why, *problems],
            "muted": muted, "title": f"{word} · {clean(answer['node'])} · Tocsin"}


def the_ten(rows: Sequence[Answer], curves: Mapping[AlertKey, Curve], now: float) -> list[Row]:
    """The ten, the worst subject of each, and in how many of how many subjects it is not well."""
    found = []
    for number in TEN:
        own = sorted((row for row in rows if row["number"] == number), key=severity_rank)
        if not own:
            continue
        worst = own[0]
        row = of_signal(worst, curves.get((worst["rule"], worst["subject"]), ()), now)
        subjects = {one["subject"] for one in own}
        loud = {one["subject"] for one in own if one["state"] in LOUD}
        found.append(row | {"subjects": len(subjects), "loud": len(loud),
                            "href": link("numbers", number) if len(own) > 1 else row["href"]})
    return found


def out_of_range(rows: Sequence[Answer], curves: Mapping[AlertKey, Curve], now: float) -> list[Row]:
    """Of the rest what is out of range, pending or unknown, the worst first."""
    loud = [row for row in rows if row["number"] not in TEN and row["state"] in LOUD]
    return [of_signal(row, curves.get((row["rule"], row["subject"]), ()), now)
            for row in sorted(loud, key=lambda row: (*severity_rank(row), row["rule"], row["subject"]))]


def incidents(told: Sequence[IncidentMessage]) -> list[Row]:
    """The open incidents, as they are paged: title, cause and effects, what to do."""
    found = []
    for one in told:
        texts = one.message.annotations
        found.append({"id": sign_id(one.message.key), "title": clean(texts.get("summary", "")),
                      "text": texts.get("description", ""), "since": moment(one.message.starts_at),
                      "href": link("runbooks", rule) if (rule := one.message.labels.get("rule")) else ""})
    return found


def past(records: Sequence[Answer], pages: Sequence[Mapping[str, int]], now: float) -> list[Row]:
    """Incidents from their records, the open ones too: title, cause, when, for how long, how many pages by channel."""
    found = []
    for one, told in zip(records, pages, strict=True):
        root, end = root_of(one), one["ended_at"]
        by_channel = [f"{count} by {clean(channel)}" for channel, count in told.items()]
        found.append({
            "title": clean(root["summary"] or root["rule"]), "cause": clean(f"{root['rule']} on {root['place']}"),
            "state": "open" if end is None else "over", "sign": "breach" if end is None else "ok",
            "began": moment(one["began_at"]), "lasted": span(round(max(0.0, (now if end is None else end)
                                                                       - one["began_at"]))),
            "pages": ", ".join(by_channel) or "0", "alerts": str(len(one["members"])),
            "drill": clean(one.get("drill") or ""),
            "href": link("incidents", one["id"]), "runbook": link("runbooks", root["rule"]),
        })  # fmt: skip
    return found


def engines(answer: Answer, doctor: Answer, curves: Mapping[AlertKey, Curve], now: float) -> list[Row]:
    """One row an engine: what it is, what binds it, the ten of it, and what else is not well with it or its target."""
    rows, found = answer["signals"], []
    bound = {row["engine"]: row for row in answer.get("binds") or ()}
    for target in doctor["targets"]:
        for engine in target["engines"] or [target["target"]]:
            cells = []
            for number in TEN:
                own = sorted((row for row in rows if row["number"] == number and row["subject"] in (
                    engine, target["target"])), key=severity_rank)
                if own:
                    curve = curves.get((own[0]["rule"], own[0]["subject"]), ())
                    cells.append(of_signal(own[0], curve, now) | {"short": TEN[number], "measured": measured(own[0])})
            others = [of_signal(row, curves.get((row["rule"], row["subject"]), ()), now)
                      for row in sorted(rows, key=severity_rank) if row["number"] not in TEN and _counts(row)
                      and row["subject"] in (engine, target["target"])]
            worst = min((STATES.index(cell["state"]) for cell in (*cells, *others) if cell["state"] in STATES),
                        default=2)
            found.append({"name": engine, "url": target.get("url") or "", "kind": target.get("kind") or "unknown kind",
                          "model": target.get("model") or "unknown model", "build": target.get("build") or "",
                          "error": target.get("error") or "", "notes": list(target.get("notes") or ()),
                          "binds": binds_lines([bound[engine]] if engine in bound else [], answer.get("at")),
                          "cells": cells, "others": others, "state": STATES[worst], "sign": sign(STATES[worst])})
    return found


def _counts(row: Answer) -> bool:
    """Whether a row of none of the ten makes a verdict: what is for information alone does not, see agent.node."""
    if row["state"] == "UNKNOWN":
        return bool(row.get("required"))
    return row["state"] in LOUD and row.get("severity") in ("page", "ticket")


GPU_NUMBERS: Mapping[str, str] = {"gpu-temperature": "temperature", "gpu-utilization": "utilization",
                                  "gpu-memory": "memory"}
GPU_SIGNS = {"HEALTHY": "ok", "WATCH": "pending", "DRAIN": "breach", "REPLACE": "breach", "UNKNOWN": "unknown"}


def gpus(told: Answer, rows: Sequence[Answer], curves: Mapping[AlertKey, Curve], now: float) -> list[Row]:
    """One card a GPU: verdict, temperature with its curve, utilization, memory, and what speaks against it."""
    by_key = {(row["rule"], row["subject"]): row for row in rows if row["rule"] in GPU_NUMBERS}
    found = []
    for gpu in told["gpus"]:
        subject = gpu["subject"]
        numbers = {name: quantity(by_key[key]["value"], by_key[key]["unit"]) if key in by_key else NOTHING
                   for rule, name in GPU_NUMBERS.items() for key in [(rule, subject)]}
        limit = by_key.get(("gpu-temperature", subject), {}).get("limit")
        found.append({
            "index": NOTHING if gpu["index"] is None else str(gpu["index"]), "subject": subject,
            "name": gpu["name"] or "", "bdf": gpu["bdf"] or "", "verdict": gpu["verdict"], "code": gpu["code"] or "",
            "sign": GPU_SIGNS.get(gpu["verdict"], "unknown"), "text": gpu["text"], "numbers": numbers,
            "findings": gpu["findings"], "unchecked": [u for u in gpu["unchecked"] if u["state"] == "UNKNOWN"],
            "href": link("signals", "gpu-temperature", subject),
            "spark": spark(curves.get(("gpu-temperature", subject), ()), limit, now, "celsius"),
        })  # fmt: skip
    return found


def alerts(rows: Sequence[Answer], now: float) -> list[Row]:
    """Open alerts, then past ones: when, for how long, in which incident, and who muted or announced it."""
    order = {"firing": 0, "pending": 1}
    found = []
    for row in sorted(rows, key=lambda row: (order.get(row["state"], 2), -(row["since"] or 0.0))):
        lasted_s = (row["until"] or now) - row["since"]
        found.append({
            "rule": row["rule"], "subject": row["subject"], "state": row["state"], "severity": row["severity"],
            "sign": {"firing": "breach", "pending": "pending"}.get(row["state"], "ok"), "since": moment(row["since"]),
            "until": "" if row["until"] is None else moment(row["until"]), "lasted": span(round(max(0.0, lasted_s))),
            "value": quantity(row["value"], row["unit"]), "limit": quantity(row["limit"], row["unit"]),
            "summary": row["summary"], "description": row.get("description") or "",
            "silenced": clean(row.get("silenced") or ""), "drill": clean(row.get("expected_by") or ""),
            "incident": link("incidents", row["incident"]) if row.get("incident") else "",
            "href": link("alerts", row["rule"], row["subject"]),
        })  # fmt: skip
    return found


def moment(at: float) -> str:
    """A moment as the page writes it: a node's page is read from other zones."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_words(curve: Curve, limit: float | None, unit: str, *, worst: bool = False) -> str:
    """A curve for who does not see it: its least, greatest and last value, and the limit.

    `worst`: it is of the worst of each minute, of which the last is no value of now.
    """
    values = [value for _, value in curve]
    if not values:
        return "no value yet"
    least, most, last = (quantity(value, unit) for value in (min(values), max(values), values[-1]))
    around = f"{least} throughout" if least == most else f"between {least} and {most}"
    around += "" if least == most or worst else f", last {last}"
    return around + ("" if limit is None else f", limit {quantity(limit, unit)}")


def spark(curve: Curve, limit: float | None, now: float, unit: str) -> Row | None:
    """A small curve, of the worst of each minute of the last hour, as SVG; None: no value.

    {"paths", "limit" (its height or None), "text"}.
    """
    shown = [(at, value) for at, value in curve if now - HOUR_S <= at <= now]
    if not shown:
        return None
    values = [value for _, value in shown]
    top = max([*values, *([limit] if limit is not None else [])])
    low = min([*values, 0.0])
    height = (top - low) or 1.0

    def y(value: float) -> float:
        return round(HEIGHT - 1.0 - (value - low) / height * (HEIGHT - 2.0), SVG_DIGITS)

    paths: list[str] = []
    last = float("-inf")
    for at, value in shown:
        point = f"{round((at - now + HOUR_S) / HOUR_S * WIDTH, SVG_DIGITS)},{y(value)}"
        if at - last > HOLE_S:
            paths.append(f"M{point}")
        else:
            paths[-1] += f"L{point}"
        last = at
    drawn = [path if "L" in path else f"{path}h1" for path in paths]  # a lone value is a dot
    return {"paths": drawn, "limit": None if limit is None or limit > top else y(limit),
            "text": in_words(shown, limit, unit, worst=True)}
