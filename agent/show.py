"""What the command line prints for people: pure functions from an answer to lines and tables, and one that prints them.

On a terminal rich draws (colours, folding, what does not fit is left out by rank); elsewhere it is plain aligned text,
whole, so that grep and awk see everything. rich is imported only for a terminal.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, TextIO

from agent.words import (
    LOUD,
    beside,
    binds_lines,
    clean,
    loudest_first,
    place,
    quantity,
    root_of,
    scaling_lines,
    span,
    verdict_line,
)

Answer = Mapping[str, Any]
NOTHING = "–"
PAST_SHOWN = 20  # silences that have ended
STYLES = {
    "OK": "green",
    "PENDING": "yellow",
    "BREACH": "bold red",
    "UNKNOWN": "bold magenta",
    "IDLE": "dim",
    "N/A": "dim",
    "MISSING": "bold magenta",
    "pending": "yellow",
    "firing": "bold red",
    "resolved": "green",
    "inactive": "dim",
    "page": "bold red",
    "ticket": "yellow",
}
VERDICT_STYLES = {"HEALTHY": "bold green", "TICKET": "bold yellow", "PAGE": "bold red", "UNKNOWN": "bold magenta"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head; `drop`: columns with the largest number go first where the terminal is narrow, 0 stays."""

    head: str
    drop: int = 0
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under columns. The last column may be folded, the others never are."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""


Report = list[Table | str]


# ---- numbers and times, as people write them ----


def duration(seconds: float) -> str:
    """A duration as the configuration has it: 10s, 5m, 2h, 90s."""
    for size, word in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{word}"
    return f"{seconds:g}s"


def moment(at: float | None) -> str:
    """A time of day with its date, in local time."""
    return NOTHING if at is None else datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


# ---- tocsin check ----


CHECK_COLUMNS = (
    Column("#", drop=3),
    Column("RULE"),
    Column("STATE"),
    Column("VALUE", right=True),
    Column("LIMIT", right=True),
    Column("SUBJECT", drop=1),
    Column("AGE", drop=4, right=True),
    Column("METHOD", drop=5),
    Column("WHY"),
)


def watch_report(answer: Answer, alerts: Sequence[Answer], told_at: float) -> Report:
    """The node at a glance, the verdict first: what pages, what is out of range, then the ten and what is unknown."""
    report = check_report(answer, show_all=False, loud_first=True)
    verdict = report.pop(report.index(verdict_line(answer)))
    paging = [f"INCIDENT  {clean(a['summary'])}" for a in alerts if (a["state"], a["severity"]) == ("firing", "page")]
    return [f"{clean(answer['node'])}  {moment(told_at)}  (q ends)", verdict, *paging, "", *report]


def _is_ten(signal: Answer) -> bool:
    return place(signal)[0] == 0


def _why(signal: Answer, value: str) -> str:
    """Why there is no value, or what was measured where that says more than the value."""
    told = signal.get("why") or signal.get("text") or ""
    return "" if told == value else str(told)


def _row(signals: Sequence[Answer]) -> list[str]:
    """One row for one signal, or for several of one rule that are in the same quiet state."""
    first = signals[0]
    unit = first.get("unit") or ""
    values = sorted(s["value"] for s in signals if s.get("value") is not None)
    shown = quantity(values[0], unit) if values else NOTHING
    if len(values) > 1 and quantity(values[-1], unit) != shown:
        shown = f"{shown} to {quantity(values[-1], unit)}"
    ages = [s["age_s"] for s in signals if s.get("age_s") is not None]
    subject = first["subject"] if len(signals) == 1 else f"{len(signals)} subjects"
    methods = ", ".join(dict.fromkeys(s.get("method") or "" for s in signals))
    limit = quantity(first.get("limit"), unit)
    age = span(max(ages)) if ages else NOTHING
    why = _why(first, shown) if len(signals) == 1 else first.get("why") or ""
    cells = (first.get("number") or "", first["rule"], first["state"], shown, limit, subject, age, methods, why)
    return [clean(cell) for cell in cells]


def _grouped(signals: Sequence[Answer], *, apart: bool) -> list[list[str]]:
    """Rows in order; what is quiet for the same reason is one row a rule, unless `apart`."""
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for n, signal in enumerate(sorted(signals, key=lambda s: (place(s), str(s["rule"]), str(s["subject"])))):
        loud = apart or signal["state"] in (*LOUD, "UNKNOWN")
        key = (place(signal), signal["rule"], signal["state"], signal.get("limit"), signal.get("why"), n if loud else 0)
        groups.setdefault(key, []).append(signal)
    return [_row(group) for group in groups.values()]


def _check_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """Where a rule has several rows the subject tells them apart: the reason goes before it."""
    rules = [row[1] for row in rows]
    if len(set(rules)) == len(rules):
        return Table(CHECK_COLUMNS, rows, title)
    drops = {"SUBJECT": 0, "WHY": 1}
    return Table([replace(column, drop=drops.get(column.head, column.drop)) for column in CHECK_COLUMNS], rows, title)


def check_report(answer: Answer, *, show_all: bool, loud_first: bool = False) -> Report:
    """The ten first, then of the rest what is not quiet (all of it with `show_all`), then the verdict.

    `loud_first`: what is out of range comes before all of them, in a table of its own.
    """
    signals: Sequence[Answer] = answer["signals"]
    above = sorted((s for s in signals if s["state"] in LOUD), key=loudest_first) if loud_first else []
    ten = [s for s in signals if _is_ten(s) and s not in above]
    rest = [s for s in signals if not _is_ten(s) and s not in above]
    shown = rest if show_all else [s for s in rest if s["state"] in (*LOUD, "UNKNOWN")]
    report: Report = []
    if above:
        report.append(_check_table("Out of range", [_row([one]) for one in above]))
    if ten:
        report.append(_check_table(f"The ten on {clean(answer['node'])}", _grouped(ten, apart=show_all)))
    if shown:
        report.append(_check_table("The rest", _grouped(shown, apart=show_all)))
    if len(rest) > len(shown):
        report.append(f"{len(rest) - len(shown)} of the rest are in range, idle or not applicable; --all shows them.")
    looked = answer.get("looked_for") or ()
    report += [f"Looked for {clean(what)}" for what in looked]
    report += binds_lines(answer.get("binds") or (), answer.get("at"))
    report += scaling_lines(answer.get("scaling") or ())
    report += [clean(f"Deployment: {one['text']}") for one in answer.get("patterns") or ()]
    report += [f"Silenced: {clean(one['text'])}" for one in answer.get("silences") or ()]
    report += [clean(f"Expected until {moment(one['until'])} by the drill {one['drill']}: {', '.join(one['rules'])}")
               for one in answer.get("expected") or () if one["rules"]]
    report.append(verdict_line(answer))
    report += [f"Mind: {clean(answer['why'])}"] if answer.get("why") and answer["verdict"] != "unknown" else []
    loud = sorted((s for s in signals if s["state"] in LOUD), key=loudest_first)
    if loud and loud[0].get("action"):
        report.append(f"Do: {clean(loud[0]['action'])}")
    return report


# ---- tocsin check --gpus ----


def gpus_report(answer: Answer, *, show_all: bool) -> Report:
    """A row a GPU, what else speaks against it, what could not be checked, then the verdict."""
    report: Report = []
    gpus: Sequence[Answer] = answer["gpus"]
    columns = (Column("GPU"), Column("VERDICT"), Column("CODE"), Column("PCI", drop=2), Column("UUID", drop=3),
               Column("NAME", drop=4), Column("WHY"))
    rows = []
    for gpu in gpus:
        uuid = gpu["subject"] if gpu["index"] is not None else ""
        rows.append([clean(cell) for cell in (_numbered(gpu), gpu["verdict"], gpu["code"] or "", gpu["bdf"] or "", uuid,
                                              gpu["name"] or "", gpu["text"])])
    if rows:
        report.append(Table(columns, rows, f"GPUs of {clean(answer['node'])}"))
    of_all = [(_named(g), g["findings"]) for g in gpus]
    for name, found in (*of_all, (answer["node"], answer["node_findings"])):
        report += [clean(f"{name}: {f['code']} ({f['severity']}{', pending' if f['pending'] else ''}): {f['text']}")
                   + ("" if f["text"].endswith(f["do"]) else clean(f". Do: {f['do']}")) for f in found]
    report += _unchecked(answer, show_all=show_all)
    report += [f"Looked for {clean(what)}" for what in answer.get("looked_for") or ()]
    worst = str(answer["verdict"]).upper()
    counts = _counts([g for g in gpus if not g.get("mig")])
    of_mig = _counts([g for g in gpus if g.get("mig")])
    counts += f"; MIG: {of_mig}" if of_mig else ""
    report.append(f"{worst}: {counts}" if counts else f"{worst}: {clean(answer.get('why') or 'found no GPU')}")
    if counts and answer.get("why"):
        report.append(f"Mind: {clean(answer['why'])}")
    return report


def _counts(gpus: Sequence[Answer]) -> str:
    verdicts = [g["verdict"] for g in gpus]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))


def _numbered(gpu: Answer) -> str:
    """3, a MIG instance of it 3:5/0 (GPU instance / compute instance)."""
    if gpu["index"] is None:
        return NOTHING
    return f"{gpu['index']}" + (f":{mig['gi']}/{mig['ci']}" if (mig := gpu.get("mig")) else "")


def _named(gpu: Answer) -> str:
    if gpu["index"] is None:
        return str(gpu["subject"])
    mig = gpu.get("mig")
    return f"MIG {mig['gi']}/{mig['ci']} of GPU {gpu['index']}" if mig else f"GPU {gpu['index']}"


def _unchecked(answer: Answer, *, show_all: bool) -> Report:
    """What could not be checked, and why: one line for GPUs of which the same holds; N/A where all is asked for."""
    lines: dict[tuple[str, str], list[str]] = {}
    for gpu in answer["gpus"]:
        for item in gpu["unchecked"]:
            if show_all or item["state"] == "UNKNOWN":
                lines.setdefault((item["code"], item["why"]), []).append(_named(gpu))
    for item in answer.get("node_unchecked") or ():
        if show_all or item["state"] == "UNKNOWN":
            lines.setdefault((item["code"], item["why"]), []).append(answer["node"])
    shown: Report = [clean(f"Not checked: {code} of {', '.join(names)}: {why}") for (code, why), names in lines.items()]
    hidden = len({item["code"] for gpu in answer["gpus"] for item in gpu["unchecked"] if item["state"] == "N/A"})
    if hidden and not show_all:
        shown.append(f"Not applicable here: {hidden} checks; --all shows them.")
    return shown


# ---- tocsin alerts, doctor, rules list ----


def alerts_report(alerts: Sequence[Answer]) -> Report:
    """Open alerts first, then past ones, newest first."""
    if not alerts:
        return ["No alert is open, and none is remembered."]
    heads = ("STATE", "SEVERITY", "RULE", "SUBJECT", "SINCE", "UNTIL", "VALUE", "LIMIT", "SUMMARY")
    drops = {"SEVERITY": 4, "UNTIL": 3, "LIMIT": 2, "VALUE": 1}
    columns = [Column(head, drops.get(head, 0), head in ("VALUE", "LIMIT")) for head in heads]
    order = {"firing": 0, "pending": 1}
    rows = []
    for alert in sorted(alerts, key=lambda a: (order.get(a["state"], 2), -(a["since"] or 0.0))):
        unit = alert.get("unit") or ""
        times = (moment(alert["since"]), moment(alert["until"]))
        numbers = (quantity(alert["value"], unit), quantity(alert["limit"], unit))
        names = (alert["state"], alert["severity"], alert["rule"], alert["subject"])
        muted = f" (silenced {alert['silenced']})" if alert.get("silenced") else ""
        rows.append([clean(cell) for cell in (*names, *times, *numbers, (alert.get("summary") or "") + muted)])
    return [Table(columns, rows)]


# ---- tocsin silence, alerts stats ----


def silence_of(one: Answer) -> str:
    """What a silence mutes."""
    if (one["rule"], one["subject"]) == ("*", "*"):
        return "all of this node"
    return clean(one["rule"] if one["subject"] == "*" else f"{one['rule']} of {one['subject']}")


def silenced_report(made: Answer, there: Sequence[str]) -> Report:
    """What is muted from now on, what that is just now, and what it does not reach."""
    until = moment(made["until"])
    report: Report = [f"Silence {made['id']}: {silence_of(made)} until {until}: {clean(made['why'])}"]
    mutes = [clean(f"{one['rule']} of {one['subject']}") for one in made["mutes"]]
    report.append(f"Mutes now: {', '.join(mutes)}" if mutes else "No open alert is muted by it now.")
    report.append(f"End it earlier: tocsin unsilence {made['id']}")
    report += [f"Alertmanager is told as ever; to mute it there: {clean(command)}" for command in there]
    return report


def silences_report(answer: Answer) -> Report:
    """The silences that hold, what drills have announced, and what has ended lately."""
    report: Report = []
    columns = (Column("ID"), Column("RULE"), Column("SUBJECT"), Column("SINCE", drop=2), Column("UNTIL"),
               Column("BY", drop=1), Column("MUTES NOW", right=True), Column("WHY"))

    def row(one: Answer, mutes: str) -> list[str]:
        return [clean(cell) for cell in (one["id"], one["rule"], one["subject"], moment(one["since"]),
                                         moment(one["until"]), one["by"], mutes, one["why"])]

    if answer["silences"]:
        report.append(Table(columns, [row(one, str(len(one["mutes"]))) for one in answer["silences"]], "Silences"))
    else:
        report.append("No silence holds: everything that pages does.")
    report += [clean(f"Expected until {moment(one['until'])}, and told all the same: {', '.join(one['rules'])}"
                     f" of {', '.join(one['subjects']) if one['subjects'] else 'any subject'}, announced by the drill"
                     f" {one['drill']}") for one in answer["expected"] if one["rules"]]
    if answer["ended"]:
        kept = [n for n, column in enumerate(columns) if column.head != "MUTES NOW"]
        rows = [[row(one, "")[n] for n in kept] for one in answer["ended"][:PAST_SHOWN]]
        report.append(Table([columns[n] for n in kept], rows, "Ended"))
    return report


def stats_report(answer: Answer) -> Report:
    """A row a rule, the noisiest first."""
    since = moment(answer["since"])
    if not answer["rules"]:
        return [f"No alert has fired since {since}."]
    heads = ("RULE", "SEVERITY", "FIRED", "SHORT", "FIRING", "SILENCED", "TOTAL", "LONGEST", "SUBJECTS", "LAST")
    drops = {"SEVERITY": 1, "SUBJECTS": 4, "LAST": 2, "SILENCED": 3}
    columns = [Column(head, drops.get(head, 0), head not in ("RULE", "SEVERITY", "LAST")) for head in heads]
    rows = [[clean(cell) for cell in (
        one["rule"], one["severity"], one["fired"], one["short"], one["firing"], one["silenced"],
        span(round(one["total_s"])), span(round(one["longest_s"])), one["subjects"], moment(one["last_at"]))]
        for one in answer["rules"]]
    report: Report = [Table(columns, rows, f"Alerts since {since}")]
    short = span(answer["short_s"])
    return report + [
        clean(f"{one['rule']}: {one['short']} of {one['fired']} pages were over within {short}; a longer `for:`"
              f" (rules.override.{one['rule']}) would have let people sleep")
        for one in answer["rules"] if one["severity"] == "page" and one["short"] * 2 > one["fired"] - one["firing"]]


def incidents_report(incidents: Sequence[Answer]) -> Report:
    """A row an incident, the newest first."""
    if not incidents:
        return ["No incident has paged yet."]
    columns = (Column("INCIDENT"), Column("STATE"), Column("CAUSE"), Column("OPENED", drop=1),
               Column("OPEN FOR", right=True), Column("ALERTS", drop=2, right=True))
    rows = []
    for one in incidents:
        root, ended = root_of(one), one["ended_at"]
        rows.append([clean(cell) for cell in (
            one["id"], "open" if ended is None else "over", f"{root['rule']} on {root['place']}",
            moment(one["opened_at"]), "" if ended is None else span(round(ended - one["opened_at"])),
            len(one["members"]))])
    return [Table(columns, rows, "Incidents"), "Its postmortem: tocsin report incident ID"]


def release_report(answer: Answer) -> Report:
    """The verdict on a release, and each criterion."""
    columns = (Column("CRITERION"), Column("STATE"), Column("NEW", right=True), Column("OLD", right=True),
               Column("ASKED"), Column("WHY", drop=1))
    rows = [[clean(cell) for cell in (row["name"], row["state"], row["new"] or NOTHING, row["old"] or NOTHING,
                                      row["asked"], row["why"])] for row in answer["criteria"]]
    title = f"New against old, watched for {span(round(answer['watched_s']))}"
    head = {"pass": "PASS", "fail": "FAIL: roll back", "unknown": "UNKNOWN"}[answer["verdict"]]
    report: Report = [Table(columns, rows, title), clean(f"{head}: {answer['why']}")]
    report += [clean(note) for note in answer["notes"]]
    fired = answer["rollback"]
    if fired is not None:
        failed = "" if fired["ok"] else f" and FAILED: {fired['why']}"
        report.append(clean(f"The way back was fired ({fired['how']}){failed}."))
    elif answer["verdict"] == "fail":
        report.append("No way back was given (--rollback, --rollback-webhook): roll back by hand.")
    return report


def review_report(answer: Answer) -> Report:
    """Service levels, pages, drills, what is to do."""
    report: Report = []
    columns = (Column("TARGET"), Column("SERVICE LEVEL"), Column("PROMISED", right=True),
               Column("ATTAINED", right=True), Column("KEPT"), Column("OF", drop=1, right=True),
               Column("BUDGET SPENT", right=True))
    rows = [[clean(cell) for cell in (
        row["target"], level["name"] + (f" {span(level['limit_s'])}" if "limit_s" in level else ""),
        quantity(level["promised"], "ratio"), beside(level["attained"], level["promised"], "ratio"),
        {True: "yes", False: "NO", None: "unknown"}[level["kept"]], f"{level['n']:.0f}",
        quantity(row["budget_spent"], "ratio") if level["name"] == "availability" else "")]
        for row in answer["targets"] for level in row["slo"]]
    since = f"{moment(answer['since'])} to {moment(answer['until'])}"
    if rows:
        report.append(Table(columns, rows, f"Service levels, {since}"))
        report += [clean(f"{row['target']}: counted on {row['days']} day{'s' if row['days'] != 1 else ''}"
                         + ("" if row["written"] else "; no `slo:` is written: these are defaults"))
                   for row in answer["targets"]]
    else:
        report.append(f"No request was counted, {since}.")
    return report + [clean(line) for line in (_pages_line(answer["pages"]), *_cause_lines(answer["causes"]),
                                              _drills_line(answer["drills"]), *_action_lines(answer["actions"]))]


def _pages_line(pages: Answer) -> str:
    all_s, longest_s = round(pages["open_s"]), pages["longest_s"]
    longest = "" if longest_s is None else f", {span(all_s)} in all, the longest {span(round(longest_s))}"
    many = [f"{pages[key]} {key.removesuffix('s') if pages[key] == 1 else key}" for key in ("incidents", "alerts")]
    return (f"Pages: {' of '.join(many)}{longest}; {pages['short']} over within"
            f" {span(pages['short_s'])}, {pages['open']} still open, {pages['of_drills']} of drills beside them."
            f" Unacknowledged: unknown ({pages['unacknowledged_why']}).")


def _cause_lines(causes: Sequence[Answer]) -> list[str]:
    return [f"  {cause['rule']}: {cause['incidents']} incident{'s' if cause['incidents'] != 1 else ''},"
            f" {span(round(cause['open_s']))}, last {cause['last']}" for cause in causes[:PAST_SHOWN]]


def _drills_line(drills: Answer) -> str:
    if drills["why"]:
        return f"Drills: unknown ({drills['why']})."
    ended = ", ".join(f"{n} {verdict}" for verdict, n in sorted(drills["verdicts"].items()))
    missed = f"; missed: {', '.join(drills['missed'])}" if drills["missed"] else ""
    return f"Drills: {drills['held']} held" + (f" ({ended})" if ended else "") + missed + "."


def _action_lines(actions: Sequence[Answer]) -> list[str]:
    if not actions:
        return ["Nothing is known to be still to do."]
    return ["Still to do:", *(f"  {one['what']}" + ("" if one["run"] is None else
                              f" (run {one['run']}, owner {one['owner']}, due {moment(one['due_at'])})")
                              for one in actions)]


def is_missing(found: Answer) -> bool:
    """Whether an item of `doctor` is a required number that cannot be had."""
    return found.get("how") is None and bool(found.get("required")) and found.get("code") != "not_supported"


def _found_table(told: Sequence[object], found: Sequence[Answer]) -> Table | str:
    title = "  ".join(dict.fromkeys(clean(word) for word in told if word))
    if not found:
        return title
    several = len({item.get("subject") for item in found}) > 1
    columns = (Column("STATE"), Column("WHAT"), Column("OF", drop=1), Column("HOW, OR WHY NOT AND WHAT TO DO"))
    rows: list[tuple[str, list[str], str, str]] = []
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for item in found:
        absent = "N/A" if item.get("code") in (None, "not_supported") else "UNKNOWN"
        state = "OK" if item.get("how") is not None else "MISSING" if is_missing(item) else absent
        said = [item.get("how") or item.get("why") or "not told", item.get("note"), item.get("remedy")]
        subject = clean(item.get("subject") or "") if several else ""
        text = clean("; ".join(s for s in said if s))
        names = by_reason.get((state, subject, text)) if state != "OK" else None
        if names is not None:  # one reason for several numbers is said once
            names.append(item["name"])
            continue
        names = by_reason[state, subject, text] = [item["name"]]
        rows.append((state, names, subject, text))
    order = ("MISSING", "UNKNOWN", "OK", "N/A")
    rows.sort(key=lambda row: order.index(row[0]))
    return Table(columns, [[state, _few(names), subject, text] for state, names, subject, text in rows], title)


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def pattern_lines(pattern: Answer) -> Report:
    """A deployment pattern, whence it is known, and its watch list: by which rule, or why not."""
    report: Report = [clean(f"Deployment: {pattern['text']}")]
    for item in pattern["watch"]:
        said = [f"{by['rule']} {by['state']}" + (f" ({by['why']})" if by["why"] and by["state"] in (
            "UNKNOWN", "N/A") else "") for by in item["rules"]]
        said += [f"not told: {item['gap']}"] if item["gap"] else []
        report.append("  " + clean(f"watch {item['what']}: {'; '.join(said)}"))
    return report


def asks_others(answer: Answer) -> bool:
    """Whether PromQL or JSON sources are watched: an agent for a cluster may have nothing else."""
    return any(str(source["name"]).startswith(("promql:", "json:")) for source in answer["sources"])


def doctor_report(answer: Answer) -> Report:
    """For each target and GPU how every quantity is had, or why not; then the sources."""
    report: Report = []
    for target in answer["targets"]:
        told = tuple(target.get(key) for key in ("target", "url", "kind", "model"))
        report.append(_found_table(told, target.get("found") or ()))
        report += binds_lines(target.get("binds") or (), None)
        report += [f"{'MIND':8} {clean(note)}" for note in target.get("notes") or ()]
        if target.get("error"):
            report.append(f"MISSING  target {clean(target.get('target'))}: {clean(target['error'])}")
    for router in answer.get("routers") or ():
        told = ("router", *(router.get(key) for key in ("target", "url", "kind")))
        report.append(_found_table(told, router.get("found") or ()))
    for gpu in answer["gpus"]:
        told = (f"GPU {gpu.get('index')}", gpu.get("name"), gpu.get("bdf"), gpu.get("uuid"))
        report.append(_found_table(told, gpu.get("found") or ()))
    for pattern in answer.get("patterns") or ():
        report += pattern_lines(pattern)
    for source in answer["sources"]:
        told_of = source.get("error") or f"read {span(source.get('age_s') or 0.0)} ago"
        if source.get("note") and not source.get("error"):
            told_of += f"; {source['note']}"
        report.append(clean(f"{'MISSING' if source.get('error') else 'OK':8} source {source['name']}: {told_of}"))
    if not answer["targets"] and not answer["gpus"] and not asks_others(answer):
        report += [f"Looked for {clean(what)}" for what in answer.get("looked_for") or ()]
        report.append("Found no engine and no GPU. Name an engine: tocsin doctor http://127.0.0.1:8000")
    return report


def rules_report(rules: Sequence[Answer]) -> Report:
    """The catalogue of rules, in the order of their numbers."""
    columns = (
        Column("#"), Column("ID"), Column("SEVERITY"), Column("FIRES"), Column("FOR", drop=2), Column("KEEP", drop=3),
        Column("SIGNAL", drop=1), Column("ACTION", drop=4),
    )  # fmt: skip
    rows = []
    for rule in sorted(rules, key=lambda r: (place({**r, "rule": r["id"]}), r["id"])):
        spans = (duration(rule["for_s"]), duration(rule["keep_s"]))
        names = (rule["number"] or "", rule["id"], rule["severity"], rule["fires"])
        rows.append([clean(cell) for cell in (*names, *spans, rule["signal"], rule["action"])])
    return [Table(columns, rows)]


# ---- tocsin backtest ----


ENGINE_UNITS = {"_s": "s", "_ratio": "ratio", "_peak": "ratio"}


def backtest_report(answer: Answer) -> Report:
    """What the engines did, what broke a limit and when, and what would have paged."""
    recording = answer["recording"]
    counts = f"{recording['missing']} missing, {len(answer['gaps'])} gaps"
    report: Report = [f"{recording['scrapes']} scrapes in {span(recording['seconds'])}; {counts}"]
    engines = answer["engines"]
    keys = list(dict.fromkeys(key for engine in engines.values() for key in engine))
    if keys:
        rows = []
        for key in keys:
            unit = next((unit for ending, unit in ENGINE_UNITS.items() if key.endswith(ending)), "count")
            rows.append([key, *(quantity(engine.get(key), unit) for engine in engines.values())])
        columns = [Column(""), *(Column(clean(name), right=True) for name in engines)]
        report.append(Table(columns, rows, "Over the whole recording"))
    spans = [[b["rule"], clean(b["subject"]), f"{b['from_s']:.1f}", f"{b['to_s']:.1f}"] for b in answer["breaches"]]
    if spans:
        columns = [Column("RULE"), Column("SUBJECT"), Column("FROM s", right=True), Column("TO s", right=True)]
        report.append(Table(columns, spans, "Out of range, whatever `for` says"))
    ends: Sequence[Answer] = answer.get("signals") or ()
    if ends:
        report.append(Table(CHECK_COLUMNS, _grouped(ends, apart=False), "At the end"))
    units = {signal["rule"]: signal.get("unit") or "" for signal in ends}
    moves = [
        [f"{t['at_s']:.1f}", t["state"], t["rule"], clean(t["subject"]), quantity(t["value"], units.get(t["rule"], ""))]
        for t in answer["transitions"]
    ]
    if moves:
        columns = [Column("AT s", right=True), Column("STATE"), Column("RULE"), Column("SUBJECT"), Column("VALUE")]
        report.append(Table(columns, moves, "Transitions"))
    report.append(_would_have(answer["transitions"]))
    return report


def _would_have(transitions: Sequence[Answer]) -> str:
    fired = [t for t in transitions if t["state"] == "firing"]
    paged = [t for t in fired if t.get("severity") == "page"]
    if not fired:
        return "Nothing would have fired."
    told = {
        verb: ", ".join(dict.fromkeys(clean(f"{t['rule']} ({t['subject']})") for t in those))
        for verb, those in (("paged", paged), ("fired", [t for t in fired if t not in paged]))
    }
    return "; ".join(f"would have {verb}: {which}" for verb, which in told.items() if which).capitalize()


# ---- printing ----


def _fitting(table: Table, width: int) -> list[int]:
    """The columns that fit in `width`, by number: the last one may be folded down to 24, the others are whole."""
    widths = [max(len(column.head), *(len(row[n]) for row in table.rows), 0) for n, column in enumerate(table.columns)]
    widths[-1] = min(widths[-1], 24)
    kept = list(range(len(table.columns)))
    for n in sorted(kept, key=lambda n: -table.columns[n].drop):
        if sum(widths[k] + 2 for k in kept) <= width or table.columns[n].drop == 0:
            break
        kept.remove(n)
    return kept


def _without_empty(table: Table) -> Table:
    kept = [n for n in range(len(table.columns)) if any(row[n] for row in table.rows)]
    return Table([table.columns[n] for n in kept], [[row[n] for n in kept] for row in table.rows], table.title)


def plain(report: Report) -> str:
    """A report as text: aligned, whole, without colours."""
    lines: list[str] = []
    for part in report:
        if isinstance(part, str):
            lines.append(part)
            continue
        table = _without_empty(part)
        grid = [[column.head for column in table.columns], *table.rows]
        widths = [max(len(row[n]) for row in grid) for n in range(len(table.columns))]
        lines += [part.title] if part.title else []
        for row in grid:
            cells = zip(row, widths, table.columns, strict=True)
            padded = (cell.rjust(width) if column.right else cell.ljust(width) for cell, width, column in cells)
            lines.append("  ".join(padded).rstrip())
        lines.append("")
    return "\n".join(lines) + "\n"


def drawn(report: Report, width: int) -> list[Any]:
    """The report as rich draws it on a terminal so wide."""
    from rich.table import Table as RichTable
    from rich.text import Text

    found: list[Any] = []
    for part in report:
        if isinstance(part, str):
            found.append(Text(part, VERDICT_STYLES.get(part.partition(":")[0], "")))
            continue
        table = _without_empty(part)
        kept = _fitting(table, width)
        made = RichTable(box=None, pad_edge=False, header_style="dim", title_style="bold", title_justify="left")
        made.title = part.title or None
        for n in kept:
            column = table.columns[n]
            align: Literal["left", "right"] = "right" if column.right else "left"
            made.add_column(column.head, justify=align, no_wrap=n != kept[-1], overflow="fold")
        for row in table.rows:
            made.add_row(*(Text(row[n], STYLES.get(row[n], "")) for n in kept))
        found += [made, ""]
    return found


def show(report: Report, out: TextIO) -> None:
    """Print a report: drawn where `out` is a terminal, as plain text elsewhere."""
    if not out.isatty():
        out.write(plain(report))
        return
    from rich.console import Console

    width = shutil.get_terminal_size().columns
    console = Console(file=out, width=width, highlight=False)
    for part in drawn(report, width):
        console.print(part)
