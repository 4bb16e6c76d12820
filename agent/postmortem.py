"""The draft of a real incident's postmortem: what happened when, what it cost, what caused what, what is to be done.

Written from what the agent kept (`incident_told`), in the form of a drill's report: Markdown, one HTML page, JSON. What
a person must still say (root cause, actions, owners) stands in it as a line to fill in. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent import escape, forms, noise
from agent.escape import DAY_S, UNKNOWN, instant, number
from agent.words import beside, quantity, root_of, span

SCHEMA = 1
EARLIER_SHOWN = 5
LATE_S = 60.0  # a page that took longer to be accepted is something to mend
OFTEN_S, OFTEN = 30 * DAY_S, 3  # so many of one cause in so long are no accidents
TIMELINE_ROWS = 300
FILL_IN = "to be filled in"
Map = Mapping[str, Any]
STATES: Mapping[str, str] = {"pending": "threshold crossed", "firing": "alert firing", "resolved": "alert resolved",
                             "inactive": "back in range before it fired"}


def render(told: Map, form: str) -> str:
    """One report: `form` is one of FORMATS."""
    return FORMATS[form](view(told))


def view(told: Map) -> dict[str, Any]:
    """All that the report says, as plain data, without secrets."""
    incident, now = told["incident"], float(told["now"])
    earlier = sorted(told["earlier"], key=lambda one: float(one["opened_at"]))
    times = _times(incident, told["notices"], now)
    found = {
        "schema": SCHEMA, "header": _header(incident, now), "chain": chain(incident), "alerts": alerts(incident),
        "timeline": timeline(incident, told["transitions"], told["notices"]), "times": times,
        "deliveries": deliveries(told["notices"]), "impact": impact(incident),
        "latency_s": _latency_s(incident), "findings": findings(incident, times, now),
        "actions": actions(incident, earlier, times),
        "comparison": [_summary(one, now) for one in [*earlier, incident][-EARLIER_SHOWN - 1:]]}
    plain: dict[str, Any] = escape.scrubbed(found)
    return plain


def _header(incident: Map, now: float) -> dict[str, Any]:
    root = root_of(incident)
    end = instant(incident["ended_at"])
    return {"incident": incident["id"], "node": incident["node"], "title": root["summary"] or root["rule"],
            "cause": f"{root['rule']} on {root['place']}", "began_at": incident["began_at"],
            "opened_at": incident["opened_at"], "ended_at": end, "state": "over" if end is not None else "open",
            "lasted_s": (now if end is None else end) - incident["opened_at"], "drill": incident.get("drill"),
            "owner": FILL_IN, "runbook": f"runbooks/{root['rule']}.md"}


def chain(incident: Map) -> list[dict[str, str]]:
    """What the rules say can have caused what, of the alerts that fired."""
    places = {m["rule"]: m["place"] for m in incident["members"]}
    return [{"cause": cause, "effect": effect, "where": f"{places.get(cause, UNKNOWN)} → {places.get(effect, UNKNOWN)}"}
            for cause, effect in incident["chain"]]


def alerts(incident: Map) -> list[dict[str, Any]]:
    """Each alert of it: cause or symptom, from when to when, and its worst value against its limit."""
    return [{"rule": m["rule"], "number": m["number"], "place": m["place"],
             "role": "cause" if [m["rule"], m["subject"]] == list(incident["root"]) else "symptom",
             "onset": m["onset"], "ended_at": m["ended_at"], "limit": quantity(number(m["limit"]), m["unit"]),
             "worst": beside(number(m["worst"]), number(m["limit"]), m["unit"]), "worst_at": m["worst_at"],
             "summary": m["summary"]} for m in incident["members"]]


def timeline(incident: Map, transitions: Sequence[Map], notices: Sequence[Map]) -> list[dict[str, Any]]:
    """What happened when: alerts, their worst moments, pages owed and delivered. The offset counts from its onset."""
    own = {(m["rule"], m["subject"]) for m in incident["members"]}
    rows: list[tuple[float, str, str]] = []
    for t in transitions:
        said = t.get("why") or (t["alert"].get("annotations") or {}).get("summary" if t["kind"] == "firing" else "")
        text = f"{t['rule']} on {t['subject']}{f': {said}' if said else ''} (transition {t['id']})"
        meanwhile = "" if (t["rule"], t["subject"]) in own else "meanwhile: "
        if not meanwhile or t["kind"] in ("firing", "resolved"):
            rows.append((t["at"], f"{meanwhile}{STATES.get(t['kind'], t['kind'])}", text))
    rows.append((incident["opened_at"], "incident opened", incident["id"]))
    rows += [(m["worst_at"], "worst value", f"{m['rule']} on {m['place']}: {quantity(number(m['worst']), m['unit'])}")
             for m in incident["members"] if m["worst_at"] is not None and m["worst_at"] >= incident["began_at"]]
    told: set[tuple[str, str]] = set()
    for one in notices:
        way = (one["channel"], one["key"])
        status = "update" if one["status"] == "firing" and way in told else one["status"]  # it pages nobody again
        told.add(way)
        tries = "" if not one["tries"] else f" after {one['tries']} failed tries"
        if one["state"] == "delivered":
            rows.append((one["done_at"], f"{status} delivered to {one['channel']}", f"{one['key']}{tries}"))
        elif one["state"] == "rejected":
            rows.append((one["done_at"], f"{one['channel']} refused", f"{one['key']}: {one['last_error']}"))
        else:
            rows.append((one["created_at"], f"{status} still owed to {one['channel']}",
                         f"{one['key']}{tries}{': ' + one['last_error'] if one['last_error'] else ''}"))
    if incident["ended_at"] is not None:
        rows.append((incident["ended_at"], "incident over", "its last alert that pages has ended"))
    rows.sort(key=lambda row: row[0])
    if len(rows) > TIMELINE_ROWS:
        rows[TIMELINE_ROWS:] = [(rows[-1][0], f"{len(rows) - TIMELINE_ROWS} more", "`tocsin alerts` has them")]
    start = incident["began_at"]
    return [{"at": at, "offset_s": round(at - start, 3), "what": what, "evidence": evidence}
            for at, what, evidence in rows]


def deliveries(notices: Sequence[Map]) -> list[dict[str, Any]]:
    """Per channel: what it was told of, how late at most, what failed."""
    found: dict[str, dict[str, Any]] = {}
    for one in notices:
        row = found.setdefault(one["channel"], {"channel": one["channel"], "owed": 0, "delivered": 0, "refused": 0,
                                                "tries": 0, "slowest_s": None, "last_error": None})
        row["owed"] += 1
        row["tries"] += one["tries"]
        row["refused"] += one["state"] == "rejected"
        row["last_error"] = one["last_error"] or row["last_error"]
        if one["state"] == "delivered":
            row["delivered"] += 1
            row["slowest_s"] = max(row["slowest_s"] or 0.0, one["done_at"] - one["created_at"])
    return list(found.values())


def _times(incident: Map, notices: Sequence[Map], now: float) -> dict[str, float | None]:
    """From the onset: to the page, to its delivery, to the end; s. None: it has not come, or nobody knows."""
    start = incident["began_at"]
    done = [one["done_at"] for one in notices if one["state"] == "delivered" and one["status"] == "firing"]
    end = instant(incident["ended_at"])
    return {"detect_s": incident["opened_at"] - start, "deliver_s": min(done) - start if done else None,
            "recover_s": None if end is None else end - start, "open_s": (now if end is None else end) - start}


def impact(incident: Map) -> list[dict[str, Any]]:
    """What each target's users met while it lasted."""
    told = incident.get("impact") or {}
    return [dict(row) for row in (told.get("targets") or {}).values()
            if any(row.get(key) for key in ("requests", "errors", "ttft", "itl"))]


def _latency_s(incident: Map) -> float | None:
    """How much of it the latencies are of, where that is not all: histograms are remembered for an hour or so."""
    told = incident.get("impact") or {}
    span_s, known_s = number(told.get("span_s")), number(told.get("latency_span_s"))
    return known_s if span_s is not None and known_s is not None and known_s < span_s else None


def findings(incident: Map, times: Map, now: float) -> list[str]:
    """What the numbers alone say; the rest is for people."""
    said = []
    if times["deliver_s"] is None:
        said.append("no channel has accepted this page: nobody was told by Tocsin")
    elif times["deliver_s"] - times["detect_s"] > LATE_S:
        late = escape.span(times["deliver_s"] - times["detect_s"])
        said.append(f"the page was delivered {late} after the alert fired")
    if incident["ended_at"] is not None and times["recover_s"] - times["detect_s"] < noise.SHORT_S:
        said.append(f"it was over {escape.span(times['recover_s'] - times['detect_s'])} after the page: too short for a"
                    " person to have helped")
    rows = impact(incident)
    if rows and not any(row["errors"] or row["ttft_slow"] or row["itl_slow"] for row in rows):
        said.append("no request is known to have failed or been slow")
    said += [f"{row['target']}: {row['errors']:.0f} of {row['requests']:.0f} requests failed, "
             f"{escape.share(row['budget_share'])} of the whole error budget" for row in rows if row["errors"]]
    if incident["ended_at"] is None:
        said.append(f"it is still open, {escape.span(now - incident['opened_at'])} after it began to page")
    return said


def actions(incident: Map, earlier: Sequence[Map], times: Map) -> list[dict[str, str]]:
    """What the numbers ask for, each with owner and day to be filled in; then a line for what only people know."""
    root = root_of(incident)
    often = [one for one in earlier if incident["opened_at"] - one["opened_at"] <= OFTEN_S]
    wanted = [("mend", f"the cause, {root['rule']} on {root['place']}: {root['action']}")]
    if len(often) + 1 >= OFTEN:
        again = f"it is number {len(often) + 1} of this cause in 30 d"
        wanted.append(("prevent", f'{again}; runbook {root["rule"]}, "If it returns"'))
    if times["deliver_s"] is None or times["deliver_s"] - times["detect_s"] > LATE_S:
        wanted.append(("detect", "the way of the page: `tocsin notify test`, and /healthz of the node"))
    if incident["ended_at"] is not None and times["recover_s"] - times["detect_s"] < noise.SHORT_S:
        wanted.append(("detect", f"should {root['rule']} wake anybody for so short? A longer `for`, or a ticket"))
    found = [*wanted, ("prevent", FILL_IN)]
    return [{"kind": kind, "what": what, "owner": FILL_IN, "due": FILL_IN} for kind, what in found]


def _summary(one: Map, now: float) -> dict[str, Any]:
    rows = impact(one)
    end = instant(one["ended_at"])
    return {"incident": one["id"], "opened_at": one["opened_at"], "where": root_of(one)["place"],
            "lasted_s": (now if end is None else end) - one["opened_at"], "alerts": len(one["members"]),
            "errors": sum(row["errors"] for row in rows) if rows else None,
            "requests": sum(row["requests"] for row in rows) if rows else None,
            "worst": quantity(number(root_of(one)["worst"]), root_of(one)["unit"])}


def _environments() -> tuple[Any, Any]:
    filters = {"many": lambda value: forms.count(None if value is None else round(float(value))),
               "short": lambda value: span(float(value)),  # 150 ms
               "sign": lambda value: {"cause": "bad", "open": "bad", "over": "good"}.get(value, "none")}
    markdown, html = (forms.environment("agent", autoescape=escaped, filters=filters) for escaped in (False, True))
    return markdown, html


def _markdown(found: Map) -> str:
    text: str = _environments()[0].get_template("incident.md.j2").render(found)
    return text


def _html(found: Map) -> str:
    return forms.page(_environments()[1].get_template("incident.html.j2"), found)


FORMATS: Mapping[str, Callable[[Map], str]] = {"md": _markdown, "html": _html, "json": forms.as_json}
