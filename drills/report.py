"""The postmortem of a run: Markdown, JSON, one HTML page and JUnit XML, from the record that drills.record keeps.

Written from the first moment and after each step, so that a crash leaves a report too. Pure but for the run's own
folder and those beside it: no clock, no network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as tree  # noqa: N813  (it writes; nothing foreign is read)

import msgspec
from markupsafe import Markup

from agent import escape, forms
from agent.escape import DAY_S, UNKNOWN, instant, number
from drills import definition, plots
from drills.judge import EVIDENCE, k_of_n
from drills.model import Request, Verdict

SCHEMA = 1
EARLIER_READ = 60  # runs of the same drill, of which so many are looked at
EARLIER_SHOWN = 5
DUE_S = 30 * DAY_S
NEAR = 0.8  # of a limit: that it held was luck too
TIMELINE_ROWS = 300  # an alert may flap for hours
SHOWN_ROWS = 8  # of a list of findings
MAX_REQUESTS_BYTES = 1 << 30
FILES: Mapping[str, str] = {"md": "report.md", "json": "report.json", "html": "report.html",
                            "junit": "report.junit.xml"}
BAD = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID)
TIMES: Mapping[str, str] = {"detect": "alert firing", "deliver": "notification at the receiver",
                            "mitigate": "traffic back at the asked rate", "recover": "all as before"}
PHASES = ("before", "during", "after")
UNPHASED = ("alarm.", "not_ended_early", "no_other_stream_cut", "restart", "no_orphans", "gpu_memory_free",
            "as_before", "rank_named", "deadline_respected", "user_seen", "nothing_unexpected", *EVIDENCE)  # fmt: skip
FIRST = ("alarm.", "goodput", "restart", "degraded")  # of what went well: what the drill is for
Map = Mapping[str, Any]


def write(folder: Path, record: Map) -> None:
    """Write all four reports into a run's folder, each whole or not at all. Raises OSError, and nothing else."""
    try:
        found = view(record, folder)
        texts = {name: form(found) for name, form in FORMATS.items()}
    except Exception as error:  # whatever is odd in a record, its run goes on and what it says is told
        texts = {"md": _bare(record, folder, error)}
    for name, text in texts.items():
        aside = folder / f".{FILES[name]}"
        aside.write_text(text, encoding="utf-8", errors="replace")
        aside.replace(folder / FILES[name])


def render(record: Map, folder: Path, form: str) -> str:
    """One report: `form` is one of FORMATS."""
    return FORMATS[form](view(record, folder))


def _bare(record: Map, folder: Path, error: Exception) -> str:
    """The least that a report says."""
    verdict, why = (escape.cell(record.get(key)) for key in ("verdict", "why"))
    return (f"# Run {escape.cell(folder.name)}: {verdict}\n\n{why}\n\nMore cannot be shown ({type(error).__name__}):"
            " run.json beside this report holds it.\n")


def _loaded(paths: Sequence[Path]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            record = json.loads(path.read_bytes())
            if isinstance(record, dict):
                found.append(record)
    return sorted(found, key=_began)


def _began(record: Map) -> float:
    return instant(record.get("started_at")) or instant(record.get("planned_at")) or 0.0


def earlier_runs(record: Map, folder: Path) -> list[dict[str, Any]]:
    """Runs of the same drill that ended before this one began, oldest first; the ids of a drill's runs sort by time."""
    name = str(_map(record.get("drill")).get("name"))
    paths = sorted(folder.parent.glob(f"{_literal(name)}-*/run.json"))
    near = [p for p in paths if p.parent.name < folder.name][-EARLIER_READ:]
    return [r for r in _loaded(near) if _map(r.get("drill")).get("name") == name and _began(r) <= _began(record)]


def _was_held(run: Map) -> bool:
    """Whether a run was more than a refusal: of these there may be one a day, and they compare with nothing."""
    return run.get("verdict") not in (Verdict.SKIPPED, Verdict.DEFERRED)


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text.replace("/", ""))


# --- the record may be of any age and any hand ------------------------------------------------------------------------


def _map(value: Any) -> Map:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> list[Map]:
    return [x for x in value if isinstance(x, Mapping)] if isinstance(value, list | tuple) else []


def _texts(value: Any) -> list[str]:
    return [str(x) for x in value] if isinstance(value, list | tuple) else []


# --- the view: what every form of the report says --------------------------------------------------------------------


def view(record: Map, folder: Path) -> dict[str, Any]:
    """All that the report says, as plain data, without secrets; `plots` stand apart, since they are our own."""
    earlier, replicas = earlier_runs(record, folder), _replicas(record)
    window = fault_window(record)
    is_over = instant(record.get("ended_at")) is not None
    counted = _counted(record, folder, window) if is_over and window is not None else None
    rows = [_row(row) for row in _maps(record.get("rows"))]
    found = {
        "schema": SCHEMA, "header": _header(record, folder, earlier), "hypothesis": hypothesis(record),
        "left": [dict(x) for x in _maps(record.get("left"))], "blast": _blast(record), "proof": _proof(record, rows),
        "timeline": timeline(record, window, counted), "times": _times(record, rows, earlier),
        "guards": [dict(g) for g in _maps(record.get("guards"))],
        "evidence": [row for row in rows if row["name"] in EVIDENCE],
        "must_holds": [row for row in rows if row["name"] not in EVIDENCE],
        "impact": _impact(record, counted), "replicas": replicas, "findings": findings(record, rows),
        "actions": actions(record, earlier),
        "comparison": [_summary(r) for r in [*filter(_was_held, earlier), record][-EARLIER_SHOWN - 1:]],
        "reproduce": {"command": f"tocsin drill run {_map(record.get('drill')).get('name', UNKNOWN)}",
                      "definition": definition.as_written(_map(record.get("drill")))},
        "samples": _maps(record.get("samples"))[-3:], "transitions": _maps(record.get("transitions")),
    }
    plain: dict[str, Any] = escape.scrubbed(found)
    plain["plots"] = [] if counted is None or window is None else plots.plots(counted, window, {
        name: next((number(r["detail"].get("limit_s")) for r in rows if r["name"] == f"{name}_p99"), None)
        for name in ("ttft", "itl")}, {str(r["name"]): [(a, b) for a, b in r["rates"]] for r in replicas})
    return plain


def fault_window(record: Map) -> tuple[float, float] | None:
    """From when to when the fault was in; None where it never was. A killed run tells it by its timeline alone."""
    given = _map(record.get("spans")).get("fault")
    pair = [instant(x) for x in given] if isinstance(given, list | tuple) else []
    start = pair[0] if len(pair) == 2 else _moment(record, "fault injected")
    end = pair[1] if len(pair) == 2 else _moment(record, "fault removed") or instant(record.get("ended_at"))
    return None if start is None else (start, max(start, start if end is None else end))


def _moment(record: Map, what: str) -> float | None:
    return next((instant(m.get("at")) for m in _maps(record.get("timeline")) if m.get("what") == what), None)


def _counted(record: Map, folder: Path, window: tuple[float, float]) -> plots.Course | None:
    """The run's requests, counted in steps; None where there are none."""
    spans = [instant(x) for pair in _map(record.get("spans")).values() if isinstance(pair, list | tuple) for x in pair]
    known = [x for x in spans if x is not None] or [window[0] - 120.0, window[1] + 600.0]
    found = plots.course(_requests(folder / "requests.jsonl"), window, (min(known), max(known)))
    return found if found.requests else None


def _requests(path: Path) -> Iterator[Request]:
    """As the prober wrote them, one at a time; half a line is passed over, and no file is no requests."""
    decode = msgspec.json.Decoder(Request).decode
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            with suppress(msgspec.DecodeError):
                yield decode(line)
            if file.tell() > MAX_REQUESTS_BYTES:
                return


def _row(row: Map) -> dict[str, Any]:
    texts = {key: str(row.get(key) or UNKNOWN) for key in ("name", "verdict", "asked", "got", *PHASES)}
    if texts["name"].startswith(UNPHASED) and {texts[key] for key in PHASES} == {UNKNOWN}:
        texts |= dict.fromkeys(PHASES, "–")  # it has none, so nothing of it is unknown
    detail = dict(_map(row.get("detail")))
    k, n = (number(detail.get(key)) for key in ("k", "n"))
    return {**texts, "k_of_n": f"{k:.0f} of {n:.0f}" if k is not None and n is not None else "", "detail": detail}


def _header(record: Map, folder: Path, earlier: Sequence[Map]) -> dict[str, Any]:
    drill = _map(record.get("drill"))
    hashes = [str(r.get("definition_hash")) for r in earlier]
    own = str(record.get("definition_hash") or UNKNOWN)
    changed = bool(hashes) and hashes[-1] != own
    return {
        "drill": drill.get("name"), "fault": drill.get("fault"), "run": record.get("run") or folder.name,
        "verdict": str(record.get("verdict") or UNKNOWN), "why": record.get("why"), "state": record.get("state"),
        "definition_hash": own, "definition_version": len(dict.fromkeys([*hashes, own])),
        "definition_changed": changed, "tocsin": record.get("tocsin"), "node": record.get("node"),
        "planned_at": instant(record.get("due_at")) or instant(record.get("planned_at")),
        "started_at": instant(record.get("started_at")),
        "ended_at": instant(record.get("ended_at")), "started_by": record.get("started_by"),
        "zone": _map(drill.get("schedule")).get("zone"), "owner": drill.get("owner") or "unassigned",
    }


def hypothesis(record: Map) -> str:
    """What the drill says will hold, in one sentence."""
    drill = _map(record.get("drill"))
    holds, load = _map(drill.get("holds")), _map(drill.get("load"))
    said = []
    if load:
        goodput, within = number(holds.get("goodput")), holds.get("goodput_within_s")
        if goodput is not None:
            said.append(f"{escape.share(goodput)} of {forms.count(load.get('rate_per_s'))} requests/s are answered well"
                        f" within {escape.span(within)}")
        for name in ("ttft", "itl"):
            limit = holds.get(f"{name}_p99")
            if limit is not None:
                kept = "the service level" if limit == "slo" else escape.span(limit)
                said.append(f"{name.upper()} p99 keeps to {kept}")
        if holds.get("error_ratio") is not None:
            said.append(f"at most {escape.share(holds['error_ratio'])} of requests fail")
    if _map(record.get("plan")).get("restarts"):
        said.append(f"the target is back by itself within {escape.span(holds.get('restart_within_s') or 600)}")
    expects = _texts(drill.get("expects")) or _texts(_map(record.get("plan")).get("expects"))
    if expects:
        said.append(f"{' and '.join(expects)} reaches a person and resolves by itself")
    where = f" at {load['url']}" if load.get("url") else ""
    return f"While {drill.get('fault') or UNKNOWN} lasts{where}: {'; '.join(said) or 'nothing is asked'}."


def _blast(record: Map) -> dict[str, Any]:
    plan, drill = _map(record.get("plan")), _map(record.get("drill"))
    blast = _map(plan.get("blast"))
    target = _map(drill.get("target"))
    named = {k: v for k, v in target.items() if k not in ("reserved", "state_dir", "node") and v is not None}
    return {
        "targets": _texts(plan.get("targets")), "replicas": blast.get("replicas"), "of": blast.get("of"),
        "why": "the definition names " + (", ".join(f"{k} {v}" for k, v in named.items()) or UNKNOWN),
        "exemptions": _texts(plan.get("exemptions")), "notes": _texts(plan.get("notes")),
        "commands": [dict(c) for c in _maps(plan.get("commands"))], "undo": [dict(c) for c in _maps(plan.get("undo"))],
    }


def _proof(record: Map, rows: Sequence[Map]) -> str:
    judged = next((row["got"] for row in rows if row["name"] == "fault_proven"), None)
    told = next((m.get("evidence") for m in _maps(record.get("timeline"))
                 if str(m.get("what", "")).startswith(("fault proven", "fault NOT proven"))), None)
    return str(judged or told or UNKNOWN)


# --- the timeline ----------------------------------------------------------------------------------------------------

ALERT_STATES: Mapping[str, str] = {"pending": "threshold crossed, alert pending", "firing": "alert firing",
                                   "resolved": "alert resolved", "inactive": "alert back in range before it fired"}
AT_OF_ROWS: Sequence[tuple[str, str, str]] = (  # key of a row's detail -> what happened then
    ("delivered_at", "notification delivered", "stamped by the receiver"),
    ("shifted_at", "traffic shifted", "first step of 5 s with its goodput"),
    ("slow_until", "p99 back", "first step of 5 s within the limit, for good"),
    ("down_at", "target down", "its port no longer answers"), ("port_at", "port open again", "GET /health is answered"),
    ("ready_at", "Ready", "GET /health says 200"),
    ("completion_at", "first good completion", "asked of the target itself"),
)


def timeline(record: Map, window: tuple[float, float] | None, counted: plots.Course | None) -> list[dict[str, Any]]:
    """What happened when, by the instant (never by its text), with its evidence."""
    rows = [(instant(m.get("at")), str(m.get("what") or UNKNOWN), str(m.get("evidence") or ""))
            for m in _maps(record.get("timeline"))]
    start = window[0] if window is not None else None
    for t in _maps(record.get("transitions")):
        what = ALERT_STATES.get(str(t.get("state")), f"alert {t.get('state')}")
        why = f": {t['why']}" if t.get("why") else ""
        rows.append((instant(t.get("at")), what,
                     f"{t.get('rule')} on {t.get('subject')}{why} (transition {t.get('id', UNKNOWN)})"))
    for row in _maps(record.get("rows")):
        for key, what, evidence in AT_OF_ROWS:
            at = instant(_map(row.get("detail")).get(key))
            if at is not None:
                rows.append((at, what, f"{row.get('name')}: {evidence}"))
    if counted is not None and counted.first_error is not None:
        error = counted.first_error
        rows.append((error.ended_at, "first user-visible error",
                     f"request {error.id}: {error.outcome}{f' {error.status}' if error.status else ''}"))
    rows.sort(key=lambda r: (r[0] is None, r[0] or 0.0))
    if len(rows) > TIMELINE_ROWS:
        rows[TIMELINE_ROWS:] = [(None, f"{len(rows) - TIMELINE_ROWS} more", "run.json holds them")]
    return [{"at": at, "offset_s": None if at is None or start is None else round(at - start, 3), "what": what,
             "evidence": evidence} for at, what, evidence in rows]


def _times(record: Map, rows: Sequence[Map], earlier: Sequence[Map]) -> list[dict[str, Any]]:
    """Each time, its limit, and what it was in the last run that had it."""
    own = _map(record.get("times"))
    last = next((_map(r.get("times")) for r in reversed(earlier) if _map(r.get("times"))), {})
    fired, delivered = (_limit(rows, "alarm.", suffix) for suffix in (".fired", ".delivered"))
    limits = {"detect": fired, "deliver": None if fired is None or delivered is None else fired + delivered,
              "mitigate": _limit(rows, "goodput"), "recover": _limit(rows, "restart", key="limit_s")
              or _limit(rows, "ttft_p99", key="back_limit_s")}
    return [{"name": name, "until": until, "took_s": number(own.get(f"{name}_s")), "limit_s": limits[name],
             "last_s": number(last.get(f"{name}_s"))} for name, until in TIMES.items()]


def _limit(rows: Sequence[Map], start: str, end: str = "", key: str = "limit_s") -> float | None:
    found = [number(r["detail"].get(key)) for r in rows if r["name"].startswith(start) and r["name"].endswith(end)]
    return min((x for x in found if x is not None), default=None)


# --- what it cost, what it taught ------------------------------------------------------------------------------------


def _impact(record: Map, counted: plots.Course | None) -> dict[str, Any]:
    told = _map(record.get("impact"))
    keys = ("requests", "failed", "slow_first_token", "broken_streams", "second_attempts", "budget_minutes",
            "budget_share")
    return {**{key: number(told.get(key)) for key in keys},
            "requests_in_all": None if counted is None else counted.requests}


def _replicas(record: Map) -> list[dict[str, Any]]:
    """What each replica got: shares by phase, and its rate over time; a point that is not two numbers is left out."""
    found = []
    for replica in _maps(record.get("replicas")):
        points = replica.get("rates")
        pairs = [(instant(p[0]), number(p[1])) for p in points if isinstance(p, list | tuple) and len(p) == 2] \
            if isinstance(points, list | tuple) else []
        found.append({"name": replica.get("name"), **{phase: number(replica.get(phase)) for phase in PHASES},
                      "rates": [(at, rate) for at, rate in pairs if at is not None and rate is not None]})
    return found


def tickets(record: Map) -> list[str]:
    """The tickets that fired while the drill ran, but those that it announced: no verdict, and worth a look."""
    drill = _map(record.get("drill"))
    announced = _texts(drill.get("expects")) or _texts(_map(record.get("plan")).get("expects"))
    fired: dict[str, int] = {}
    for t in _maps(record.get("transitions")):
        rule = str(t.get("rule"))
        if t.get("state") == "firing" and t.get("severity") == "ticket" and rule not in announced:
            own = " (drill load)" if rule == "qps-change" and _map(drill.get("load")) else ""
            text = f"ticket: {rule} on {t.get('subject')} fired meanwhile{own}"
            fired[text] = fired.get(text, 0) + 1
    return [text if times == 1 else f"{text}, {times} times" for text, times in fired.items()]


def findings(record: Map, rows: Sequence[Map]) -> dict[str, list[str]]:
    """Went well, went badly, got lucky, and what nobody can tell. Each says only what a row says."""
    held = [r for r in rows if r["verdict"] == Verdict.PASS and r["name"] not in EVIDENCE]
    held.sort(key=lambda r: not r["name"].startswith(FIRST))
    said = {"well": [f"{r['name']}: {r['got']} (asked: {r['asked']})" for r in held],
            "badly": [f"{r['name']} is {r['verdict']}: {r['got']} (asked: {r['asked']})" for r in rows
                      if r["verdict"] in BAD],
            "lucky": [x for r in rows if r["verdict"] == Verdict.PASS and (x := _luck(r))],
            "unknown": [f"{r['name']}: {r['got']}" for r in rows if r["verdict"] == Verdict.SKIPPED]}
    if not rows and str(record.get("verdict")) not in (Verdict.SKIPPED, Verdict.DEFERRED):
        said["badly"].append(f"nothing could be judged: {record.get('why') or UNKNOWN}")
    said["badly"] += [f"left in the world: {x.get('what')}" for x in _maps(record.get("left"))]
    said["badly"] += tickets(record)
    return {key: [*texts[:SHOWN_ROWS], *([f"and {len(texts) - SHOWN_ROWS} more"] if len(texts) > SHOWN_ROWS else [])]
            for key, texts in said.items()}


def _luck(row: Map) -> str:
    """Why a row that held nearly did not; "" where it held well."""
    detail = row["detail"]
    took_s, limit_s = number(detail.get("took_s")), number(detail.get("limit_s"))
    if took_s is not None and limit_s is not None and took_s > NEAR * limit_s:
        return f"{row['name']}: it took {escape.span(took_s)} of the {escape.span(limit_s)} that it may take"
    k, n, allowed = (number(detail.get(key)) for key in ("k", "n", "allowed"))
    if k is None or n is None or allowed is None or k_of_n(int(k) + 1, int(n), allowed) is Verdict.PASS:
        return ""
    return f"{row['name']}: {row['k_of_n']}; one more, and it would not have been proven"


def actions(record: Map, earlier: Sequence[Map]) -> list[dict[str, Any]]:
    """What follows from each row that did not hold, carried over from run to run until a run shows that it does."""
    open_: dict[str, dict[str, Any]] = {}
    for run in earlier:
        for name, action in _opened(run).items():
            open_.setdefault(name, action)
        for name in _held(run):
            open_.pop(name, None)
    own, held = _opened(record), _held(record)
    found = [{**action, "carried": True, "state": "done: this run confirms it" if name in held else
              "open: again in this run" if name in own else "open: this run could not tell"}
             for name, action in open_.items()]
    return found + [{**action, "carried": False, "state": "open"} for name, action in own.items() if name not in open_]


def _opened(run: Map) -> dict[str, dict[str, Any]]:
    at = instant(run.get("ended_at")) or _began(run)
    owner = _map(run.get("drill")).get("owner") or "unassigned"
    wanted = {str(r.get("name")): f"{r.get('verdict')}: {r.get('got')}; asked: {r.get('asked')}"
              for r in _maps(run.get("rows")) if str(r.get("verdict")) in BAD}
    left = [f"{x.get('what')}; end it: {x.get('command')}" for x in _maps(run.get("left"))]
    if left:
        wanted["left_in_the_world"] = f"ORPHANED: {'; '.join(left)}"
    return {name: {"row": name, "text": text, "owner": owner, "due_at": at + DUE_S, "run": run.get("run")}
            for name, text in wanted.items()}


def _held(run: Map) -> set[str]:
    held = {str(r.get("name")) for r in _maps(run.get("rows")) if str(r.get("verdict")) == Verdict.PASS}
    return held | (set() if _maps(run.get("left")) or not held else {"left_in_the_world"})


def _summary(run: Map) -> dict[str, Any]:
    times, impact = _map(run.get("times")), _map(run.get("impact"))
    return {"run": run.get("run"), "at": _began(run) or None, "verdict": str(run.get("verdict") or UNKNOWN),
            "definition_hash": run.get("definition_hash"), "tocsin": run.get("tocsin"),
            **{f"{name}_s": number(times.get(f"{name}_s")) for name in TIMES},
            "failed": number(impact.get("failed")), "requests": number(impact.get("requests"))}


# --- the forms -------------------------------------------------------------------------------------------------------

SIGNS: Mapping[str, str] = {"PASS": "good", "FAIL": "bad", "ORPHANED": "bad", "INVALID": "unsure", "ABORTED": "unsure",
                            "INCONCLUSIVE": "unsure"}


MARKDOWN, HTML = (forms.environment("drills", autoescape=autoescape, filters={"sign": lambda x: SIGNS.get(x, "none")})
                  for autoescape in (False, True))


def _markdown(found: Map) -> str:
    return MARKDOWN.get_template("report.md.j2").render(found)


def _html(found: Map) -> str:
    drawn = [{"title": p.title, "svg": Markup(p.svg)} for p in found["plots"]]  # noqa: S704  (drawn by us from numbers)
    css = "".join(p.css for p in found["plots"])
    return forms.page(HTML.get_template("report.html.j2"), {**found, "plots": drawn}, css)


def _json(found: Map) -> str:
    return forms.as_json({key: value for key, value in found.items() if key != "plots"})


def _junit(found: Map) -> str:
    """One test case a row, and one for the verdict: FAIL is a failure, what could not be told an error."""
    header, text = found["header"], escape.xml_text
    rows = [*found["evidence"], *found["must_holds"]]
    verdict = {"name": "verdict", "verdict": header["verdict"], "got": header["why"] or UNKNOWN, "asked": "PASS"}
    suite = tree.Element("testsuite", name=text(f"drill {header['drill']}"))
    if header["started_at"] is not None:
        suite.set("timestamp", escape.utc(header["started_at"]).replace(" ", "T"))
    kinds = {"FAIL": "failure", "PASS": "", "SKIPPED": "skipped", "DEFERRED": "skipped"}
    counts = {"tests": 0, "failure": 0, "error": 0, "skipped": 0}
    for row in [*rows, verdict]:
        case = tree.SubElement(suite, "testcase", classname=text(f"drill.{header['drill']}"), name=text(row["name"]))
        counts["tests"] += 1
        kind = kinds.get(row["verdict"], "error")
        if kind:
            counts[kind] += 1
            tree.SubElement(case, kind, message=text(f"{row['verdict']}: {row['got']} (asked: {row['asked']})"))
    for name, key in (("tests", "tests"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(counts[key]))
    tree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tree.tostring(suite, encoding="unicode") + "\n"


FORMATS: Mapping[str, Callable[[Map], str]] = {"md": _markdown, "json": _json, "html": _html, "junit": _junit}
