"""The status page: HTML made here on the server, for people; what scripts read is agent.web.app's.

Every view is whole without scripts; one small script asks for the view again every 5 s. Nothing is loaded from
elsewhere, all text is escaped by the templates, and the only actions ask for the token with each form, so that no other
site's page can do them in a person's name.
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from agent import client, words
from agent.config import SecretUnreadable
from agent.model import SignalSpec
from agent.strict import Unfit, duration_s
from agent.web import app, glance
from agent.web.app import OK, BadRequest, Handler, Reply, Request, Routes

log = structlog.get_logger()
HTML = "text/html; charset=utf-8"
PAGE = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
REPORT = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"  # its own is stricter
STATIC: Mapping[str, str] = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8",
                             "icon.svg": "image/svg+xml"}
NAV = (("/", "Node"), ("/engines", "Engines"), ("/gpus", "GPUs"), ("/alerts", "Alerts"), ("/incidents", "Incidents"),
       ("/silences", "Silences"), ("/drills", "Drills"), ("/runbooks", "Runbooks"), ("/rules", "Rules"))
SPANS: Mapping[str, float] = {"2h": 7200.0, "24h": 86400.0}
FORMS: Mapping[str, str] = {"md": "text/markdown; charset=utf-8", "html": HTML, "json": app.JSON}  # of a postmortem
LIVE = "5 s"
BY_PAGE = "the page's token"
DRILLD_FRESH_S = 5.0
DRILLD_S = 2.0  # drilld answers a page within this, or the page says that it does not
TURN_S = 0.1  # for another who asks drilld: it answers in milliseconds, unless it hangs
WRONG_TOKEN_S = 1.0  # wrong tokens are logged once in so long
MOST_DRAWN = 64  # views that are remembered: some megabytes of signals' pages and plots at most
SHOWN_RUNS = 50
SHOWN_INCIDENTS = 50
SHOWN_VERDICTS = 6
SHOWN_ENDED = 20  # silences
SILENCE_SPANS = ("30m", "2h", "8h", "24h", "3d")
NAME_LENGTH = 60
VERDICTS = {"PASS": "ok", "FAIL": "breach", "ORPHANED": "breach", "INCONCLUSIVE": "pending", "INVALID": "pending",
            "ABORTED": "pending"}


class Site(NamedTuple):
    """What the pages need beside the agent: its node's name, drilld's socket, the token.

    `token` gives None where none is configured, and raises SecretUnreadable; the page is read-only in both cases.
    """

    node: str
    drilld: Path
    token: Callable[[], str | None]
    catalogue: Mapping[str, SignalSpec]


class Drilld(NamedTuple):
    """What the drill daemon tells: the run under way, its drills, what was held; `why` where something is missing."""

    run: str | None = None
    drills: Sequence[Mapping[str, Any]] = ()
    runs: Sequence[Mapping[str, Any]] = ()
    why: str = ""


class _Views:
    """The templates, and the views that many look at, drawn once a tick."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._environment: Any = None
        self._drawn: dict[tuple[str, bool], tuple[object, Reply]] = {}
        self.asking = threading.Lock()  # whoever asks drilld holds it
        self._drilld = Drilld(why="The drill daemon has not answered yet.")
        self._asked_at = -DRILLD_FRESH_S

    def drilld(self) -> Drilld:
        """What drilld tells, at most 5 s old. One asks, and the others get the last: it may hang, /livez must not."""
        if self.asking.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_at >= DRILLD_FRESH_S:
                    self._drilld = _ask_all(self.site.drilld)
                    self._asked_at = time.monotonic()
            finally:
                self.asking.release()
        return self._drilld

    def forget(self) -> None:
        """What was drawn is old: somebody has just changed what it shows."""
        with self._lock:
            self._drawn.clear()

    def draw(self, template: str, request: Request, **data: Any) -> bytes:
        """One page, or the part of it that changes (`?part=1`)."""
        with self._lock:
            if self._environment is None:
                import jinja2

                from agent import forms  # loaded when the first page is asked for

                self._environment = forms.environment("agent.web", autoescape=True, undefined=jinja2.StrictUndefined)
        page = self._environment.get_template(template)
        told = {"node": self.site.node, "nav": NAV, "part": "part" in request.query, "live": None, **data}
        drawn: str = page.render(told)
        return drawn.encode()

    def each_tick(self, name: str, request: Request, make: Callable[[], Reply]) -> Reply:
        """As `make` draws it, once for all who look at it between two ticks: twenty open pages cost no more than one.

        One that has stopped ticking is drawn afresh each time: its page must say so.
        """
        alive, _ = request.view.livez(request.now)
        if not alive:
            return make()
        key, tick = (name, "part" in request.query), request.view.tick_at()
        with self._lock:
            known = self._drawn.get(key)
        if known is None or known[0] != tick:
            known = tick, make()
            if known[1].status == OK:  # what is not there has any number of names
                with self._lock:
                    self._drawn.pop(key, None)
                    self._drawn[key] = known
                    for oldest in list(self._drawn)[:-MOST_DRAWN]:
                        del self._drawn[oldest]
        return known[1]


def _page(body: bytes, status: str = OK) -> Reply:
    return Reply(status, HTML, body, PAGE)


def _wants_html(request: Request) -> bool:
    return "text/html" in request.accept


def make_pages(site: Site) -> Routes:
    """The routes of the status page, to be laid over those of agent.web.app for the network's side."""
    views = _Views(site)

    def told(handler: Callable[[_Views, Request], Reply]) -> dict[str, Handler]:
        return {"GET": lambda request: handler(views, request)}

    def either(handler: Callable[[_Views, Request], Reply], plain: Handler) -> dict[str, Handler]:
        """For people in a browser, and as before for curl."""
        return {"GET": lambda request: handler(views, request) if _wants_html(request) or "part" in request.query
                else plain(request)}

    return {
        "/": either(_node, app.index),
        "/engines": told(_engines),
        "/gpus": told(_gpus),
        "/alerts": told(_alerts),
        "/alerts/": either(_alert, app.alert),
        "/incidents": told(_incidents),
        "/incidents/": told(_postmortem),
        "/numbers/": told(_number),
        "/signals/": told(_signal),
        "/plots/": told(_plot),
        "/rules": told(_rules),
        "/runbooks": told(_runbooks),
        "/runbooks/": either(_runbook, app.runbook),
        "/drills": told(_drills),
        "/silences": {"GET": lambda request: _silences(views, request),
                      "POST": lambda request: _silence(views, request)},
        "/silences/end": {"POST": lambda request: _unsilence(views, request)},
        "/drills/abort": {"POST": lambda request: _abort(views, request)},
        "/reports/": told(_report),
        "/static/": told(_static),
    }


def _static(_: _Views, request: Request) -> Reply:
    kind = STATIC.get(request.rest)
    if kind is None:
        return app.plain_text("404 Not Found", f"There is no {request.rest!r} here.")
    return Reply(OK, kind, files("agent.web").joinpath("static", request.rest).read_bytes())


# --- the node, its engines, its GPUs ---------------------------------------------------------------------------------


def _node(views: _Views, request: Request) -> Reply:
    def make() -> Reply:
        view, now = request.view, request.now
        answer, curves = view.check(), view.trend(glance.HOUR_S)
        rows = answer["signals"]
        _, health = view.healthz()
        status = glance.status(answer, view.livez(now)[1], health["problems"])
        return _page(views.draw(
            "node.html.j2", request, here="/", live=LIVE, title=status["title"], status=status,
            ten=glance.the_ten(rows, curves, now), rest=glance.out_of_range(rows, curves, now),
            gpus=glance.gpus(view.gpus(), rows, curves, now), engines=glance.engines(answer, view.doctor(), {}, now),
            incidents=glance.incidents(view.incidents())))

    return views.each_tick("/", request, make)


def _engines(views: _Views, request: Request) -> Reply:
    def make() -> Reply:
        view = request.view
        found = glance.engines(view.check(), view.doctor(), view.trend(glance.HOUR_S), request.now)
        return _page(views.draw("engines.html.j2", request, here="/engines", live=LIVE, engines=found,
                                title=f"Engines · {views.site.node} · Tocsin"))

    return views.each_tick("/engines", request, make)


def _gpus(views: _Views, request: Request) -> Reply:
    def make() -> Reply:
        view, now = request.view, request.now
        answer = view.gpus()
        found = glance.gpus(answer, view.check()["signals"], view.trend(glance.HOUR_S), now)
        return _page(views.draw("gpus.html.j2", request, here="/gpus", live=LIVE, gpus=found,
                                why=answer.get("why") or "", title=f"GPUs · {views.site.node} · Tocsin"))

    return views.each_tick("/gpus", request, make)


# --- one signal ------------------------------------------------------------------------------------------------------


def _number(views: _Views, request: Request) -> Reply:
    """One of the ten, of every subject."""
    def make() -> Reply:
        rows = [row for row in request.view.check()["signals"] if row["number"] == request.rest]
        return _signals(views, request, rows, f"{request.rest} {glance.NAMES.get(request.rest, '')}", [])

    return views.each_tick(f"/numbers/{request.rest}", request, make)


def _signal(views: _Views, request: Request) -> Reply:
    """One rule's signal of one subject, with its curves."""
    def make() -> Reply:
        rule, _, subject = request.rest.partition("/")
        rows = [row for row in request.view.check()["signals"] if (row["rule"], row["subject"]) == (rule, subject)]
        at = f"at={request.view.tick_at() or 0:.0f}"  # another picture each tick: a browser keeps what has one address
        plots = []
        for span, text in (("2h", "the last 2 hours"), ("24h", "the worst of each minute of the last 24 hours")):
            points = request.view.trend(SPANS[span], frozenset({(rule, subject)})).get((rule, subject), ())
            said = [glance.in_words(points, row["limit"], row["unit"], worst=span == "24h") for row in rows[:1]]
            plots.append({"src": f"{glance.link('plots', rule, subject)}?span={span}&{at}",
                          "caption": f"{rule}, {text}", "alt": f"{rule}, {text}: {''.join(said)}"})
        return _signals(views, request, rows, f"{rule} of {subject}", plots)

    return views.each_tick(f"/signals/{request.rest}", request, make)


def _signals(views: _Views, request: Request, rows: Sequence[Mapping[str, Any]], heading: str,
             plots: Sequence[Mapping[str, str]]) -> Reply:
    curves = request.view.trend(glance.HOUR_S)  # of all: the worst of each minute, as in every other view
    found = [glance.of_signal(row, curves.get((row["rule"], row["subject"]), ()), request.now)
             for row in sorted(rows, key=glance.severity_rank)]
    drawn = views.draw("signal.html.j2", request, here="", live=LIVE, heading=heading, rows=found, plots=plots,
                       title=f"{heading} · Tocsin")
    return _page(drawn, OK if found else "404 Not Found")


def _plot(views: _Views, request: Request) -> Reply:
    """The curve of one signal as a picture."""
    span = request.query.get("span", "2h")
    return views.each_tick(f"/plots/{request.rest} {span}", request, lambda: _drawn_plot(request, span))


def _drawn_plot(request: Request, span: str) -> Reply:
    from agent.web.plot import draw  # a library of some megabytes, loaded by who draws

    rule, subject = request.rest.partition("/")[::2]
    span_s = SPANS.get(span)
    row = next((row for row in request.view.check()["signals"] if (row["rule"], row["subject"]) == (rule, subject)),
               None)
    if row is None or span_s is None:
        return app.plain_text("404 Not Found", f"no curve of {request.rest!r}; spans are {', '.join(SPANS)}")
    points = request.view.trend(span_s, frozenset({(rule, subject)})).get((rule, subject), ())
    return Reply(OK, "image/svg+xml", draw(points, row["limit"], row["unit"], request.now, span_s),
                 "default-src 'none'; style-src 'unsafe-inline'")  # of the picture alone: it is no page


# --- alerts, rules, runbooks -----------------------------------------------------------------------------------------


def _alerts(views: _Views, request: Request) -> Reply:
    def make() -> Reply:
        rows = glance.alerts(request.view.alerts(True), request.now)
        return _page(views.draw("alerts.html.j2", request, here="/alerts", live=LIVE, alerts=rows,
                                title=f"Alerts · {views.site.node} · Tocsin"))

    return views.each_tick("/alerts", request, make)


def _alert(views: _Views, request: Request) -> Reply:
    """One alert for who follows the link of a page."""
    def make() -> Reply:
        rule, _, subject = request.rest.partition("/")
        own = [row for row in request.view.alerts(True) if (row["rule"], row["subject"]) == (rule, subject)]
        drawn = views.draw("alert.html.j2", request, here="/alerts", live=LIVE, rule=rule, subject=subject,
                           rows=glance.alerts(own, request.now), signal=glance.link("signals", rule, subject),
                           title=f"{rule} of {subject} · Tocsin")
        return _page(drawn, OK if own else "404 Not Found")

    return views.each_tick(f"/alerts/{request.rest}", request, make)


def _incidents(views: _Views, request: Request) -> Reply:
    """What has paged, the newest first."""
    def make() -> Reply:
        known = request.view.incident_list(0.0)
        shown = known[:SHOWN_INCIDENTS]
        rows = glance.past(shown, [request.view.pages_of(one) for one in shown], request.now)
        return _page(views.draw("incidents.html.j2", request, here="/incidents", live=LIVE, incidents=rows,
                                more=len(known) - len(shown), title=f"Incidents · {views.site.node} · Tocsin"))

    return views.each_tick("/incidents", request, make)


def _postmortem(views: _Views, request: Request) -> Reply:
    """The draft of an incident's postmortem, as `tocsin report incident` writes it; `?format=` to take it along."""
    from agent import postmortem

    form = request.query.get("format")
    if form is not None and form not in postmortem.FORMATS:
        raise BadRequest(f"format={form}: there are {', '.join(postmortem.FORMATS)}")

    def make() -> Reply:
        told = request.view.incident_told(request.rest)
        if told is None:
            return app.plain_text("404 Not Found", f"there is no incident {request.rest!r}; /incidents lists them")
        if form is not None:
            return Reply(OK, FORMS[form], postmortem.render(told, form).encode(), REPORT)
        name = told["incident"]["id"]
        return _page(views.draw("postmortem.html.j2", request, here="/incidents", forms=list(postmortem.FORMATS),
                                text=_rendered(postmortem.render(told, "md")), href=glance.link("incidents", name),
                                command=f"tocsin report incident {name}", title=f"{name} · Tocsin"))

    return views.each_tick(f"/incidents/{request.rest} {form or ''}", request, make)


def _rules(views: _Views, request: Request) -> Reply:
    rows = [{"id": rule.id, "number": rule.number or "", "severity": rule.severity, "action": rule.action,
             "fires": words.fires(rule, views.site.catalogue[rule.signal].unit), "lasts": words.span(rule.for_s),
             "causes": ", ".join(rule.causes)}
            for rule in sorted(request.view.rules(), key=lambda r: words.place({"number": r.number, "rule": r.id}))]
    return _page(views.draw("rules.html.j2", request, here="/rules", rules=rows, title="Rules · Tocsin"))


def _runbooks(views: _Views, request: Request) -> Reply:
    pages = sorted(page.name.removesuffix(".md") for page in files("runbooks").iterdir() if page.name.endswith(".md"))
    return _page(views.draw("runbooks.html.j2", request, here="/runbooks", pages=pages, title="Runbooks · Tocsin"))


def _runbook(views: _Views, request: Request) -> Reply:
    """A runbook in the page's clothes. Its own markup is Markdown's alone: HTML in it is shown as text."""
    plain = app.runbook(request)
    if plain.status != OK:
        return plain
    return _page(views.draw("runbook.html.j2", request, here="/runbooks", text=_rendered(plain.body.decode()),
                            title=f"{request.rest} · Tocsin"))


def _rendered(markdown: str) -> Any:
    """Markdown as HTML, which no template escapes again: the library has escaped all of its text."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    library = MarkdownIt("commonmark", {"html": False}).enable("table")
    # A table that is wider than a phone is moved by the keyboard, too, and stays a table for a screen reader.
    library.add_render_rule("table_open", lambda *_: '<div class="wide" role="group" aria-label="table" tabindex="0">'
                                                     '<table>\n')
    library.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return Markup(library.render(markdown))  # noqa: S704


# --- silences --------------------------------------------------------------------------------------------------------


def _silences(views: _Views, request: Request) -> Reply:
    return _page(_silences_page(views, request, request.query, live=LIVE))


def _silences_page(views: _Views, request: Request, form: Mapping[str, str], no: tuple[str, str] | None = None,
                   live: str | None = None) -> bytes:
    """The silences, and the form with what was typed. `no`: a heading and why nothing was done, which is not live."""
    told = request.view.silences()

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        left_s = max(0, round(one["until"] - request.now))
        return {**one, "until": glance.moment(one["until"]), "left": words.span(left_s) if left_s else "",
                "all": _meant(one), "mutes": [f"{m['rule']} of {m['subject']}" for m in one.get("mutes") or ()]}

    expected = [{**row(one), "rules": ", ".join(one["rules"])} for one in told["expected"] if one["rules"]]
    return views.draw(
        "silences.html.j2", request, here="/silences", live=live, title=f"Silences · {views.site.node} · Tocsin",
        can_act=not (read_only := _token_of(views.site)[1]), read_only=read_only, no=no, spans=SILENCE_SPANS,
        form={key: form.get(key, "") for key in ("rule", "subject", "for", "why", "by")},
        rules=sorted(rule.id for rule in request.view.rules()), silences=[row(one) for one in told["silences"]],
        expected=expected, ended=[row(one) for one in told["ended"][:SHOWN_ENDED]])


def _meant(one: Mapping[str, Any]) -> str:
    """What a silence mutes, in words."""
    rule = "every rule" if one.get("rule", "*") == "*" else one["rule"]
    return f"{rule} of {'every subject' if one.get('subject', '*') == '*' else one['subject']}"


def _silence(views: _Views, request: Request) -> Reply:
    """Mute a rule, for who has the token. Where it is refused, what was typed is not lost."""
    form = request.form()

    def refuse(why: str, status: str) -> Reply:
        return _page(_silences_page(views, request, form, ("Not silenced", why)), status)

    no = refused(views.site, form.get("token", ""))
    if no is not None:
        return refuse(no, "403 Forbidden")
    try:
        made = request.view.silence(form.get("rule", ""), form.get("subject") or "*", duration_s(form.get("for", "")),
                                    form.get("why", ""), _by(form))
    except (Unfit, ValueError) as fault:
        return refuse(str(fault), "400 Bad Request")
    views.forget()
    until = glance.moment(made["until"])
    return _said(views, request, "Silenced", f"{_meant(made)} pages nobody until {until}.", back="/silences")


def _unsilence(views: _Views, request: Request) -> Reply:
    """End a silence, for who has the token."""
    form = request.form()

    def refuse(why: str, status: str) -> Reply:
        return _page(_silences_page(views, request, {}, ("Not ended", why)), status)

    no = refused(views.site, form.get("token", ""))
    if no is not None:
        return refuse(no, "403 Forbidden")
    try:
        ended = request.view.unsilence([int(form.get("id", ""))], _by(form))
    except ValueError as fault:
        return refuse(str(fault) if form.get("id", "").isdecimal() else "Press the button of the silence that shall"
                      " end; its number came with no form of this page.", "400 Bad Request")
    views.forget()
    meant = ", ".join(_meant(one) for one in ended)
    return _said(views, request, "Ended", f"{meant} pages again: what fires of it, at the next tick.",
                 back="/silences")


def _by(form: Mapping[str, str]) -> str:
    """Who says that he is at the page; only the token is proven."""
    return f"{' '.join(form.get('by', '').split())[:NAME_LENGTH] or 'somebody'}, on the page"


# --- drills, which drilld knows ---------------------------------------------------------------------------------------


def _ask(drilld: Path, path: str, method: str = "GET", body: Any = None) -> tuple[Any, str]:
    """drilld's answer, or None and why there is none."""
    try:
        return client.ask(drilld, path, method, body, answer_s=DRILLD_S), ""
    except (client.NotRunning, client.AgentError) as error:
        return None, _why_not(drilld, error)


def _why_not(drilld: Path, error: Exception) -> str:
    if isinstance(error, client.NotPermitted):
        return f"The drill daemon on {drilld} is another user's, and does not answer to this agent's."
    if isinstance(error, client.AgentError):
        how = f"it answered {error.status}" if error.status else "no answer in time"
        return f"The drill daemon tells nothing: {how}; `journalctl -u tocsin-drilld` has more."
    return f"No drill daemon answers on {drilld}; `systemctl start tocsin-drilld` starts it."


def _ask_all(drilld: Path) -> Drilld:
    """All three questions; the first without an answer is the last."""
    told: list[Any] = []
    for path in ("/", "/drills", "/runs"):
        answer, why = _ask(drilld, path)
        if answer is None:
            return Drilld(run=told[0].get("run") if told else None, why=why)
        told.append(answer)
    state, drills, runs = told
    return Drilld(state.get("run"), drills, sorted(runs, key=lambda run: -(run["started"] or run["planned"] or 0.0)))


def _drills(views: _Views, request: Request) -> Reply:
    told = views.drilld()
    return _page(views.draw(
        "drills.html.j2", request, here="/drills", live=LIVE, why=told.why, run=told.run,
        can_act=not _token_of(views.site)[1], drills=[_drill(row, told.runs) for row in told.drills],
        runs=[_run(run) for run in told.runs[:SHOWN_RUNS]], title=f"Drills · {views.site.node} · Tocsin"))


def _drill(row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = [run["verdict"] for run in runs if run["drill"] == row["drill"] and run["verdict"]][:SHOWN_VERDICTS]
    due = glance.moment(row["next"]) if row["next"] else "by hand"
    return {"name": row["drill"], "fault": row["fault"], "next": due,
            "last": [{"word": verdict, "sign": VERDICTS.get(verdict, "idle")} for verdict in last]}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    times = run["times"]

    def took(name: str) -> str:
        return glance.NOTHING if times.get(name) is None else words.span(times[name])

    at = run["started"] or run["planned"]
    verdict = run["verdict"] or "under way"
    return {"run": run["run"], "verdict": verdict, "sign": VERDICTS.get(verdict, "idle"), "why": run["why"] or "",
            "when": glance.moment(at) if at else glance.NOTHING, "detected": took("detect_s"),
            "recovered": took("recover_s"), "href": glance.link("reports", run["run"])}


def _report(views: _Views, request: Request) -> Reply:
    """A drill's postmortem, as drilld wrote it. One asks at a time, and the others are told so soon."""
    none = app.plain_text("404 Not Found", f"There is no such run: {request.rest!r}; /drills lists them.")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", request.rest):
        return none
    if not views.asking.acquire(timeout=TURN_S):
        return app.plain_text("503 Service Unavailable", "The drill daemon is being asked; try again in a moment.")
    try:
        told = client.ask(views.site.drilld, f"/runs/{request.rest}/report?format=html", answer_s=DRILLD_S)
    except (client.NotRunning, client.AgentError) as error:
        if getattr(error, "status", None) == HTTPStatus.NOT_FOUND:
            return none
        return app.plain_text("503 Service Unavailable", _why_not(views.site.drilld, error))
    finally:
        views.asking.release()
    return Reply(OK, HTML, str(told["text"]).encode(), REPORT)


def _abort(views: _Views, request: Request) -> Reply:
    """End the drill that is under way, for who has the token."""
    no = refused(views.site, request.form().get("token", ""))
    if no is not None:
        return _said(views, request, "Not aborted", no, "403 Forbidden")
    told, why = _ask(views.site.drilld, "/abort", "POST", {"by": BY_PAGE})
    if told is None:
        return _said(views, request, "Not aborted", why, "502 Bad Gateway")
    run = told.get("run")
    return _said(views, request, "Aborted" if run else "Nothing to abort",
                 f"Run {run} is told to end: its fault goes out now, its report follows." if run
                 else "No drill is under way.")


def _said(views: _Views, request: Request, heading: str, text: str, status: str = OK, back: str = "/drills") -> Reply:
    return _page(views.draw("told.html.j2", request, here=back, heading=heading, text=text, back=back,
                            title=f"{heading} · Tocsin"), status)


_guessing = threading.Lock()
_guessed_at = -WRONG_TOKEN_S  # monotonic, when a wrong token was last logged


def _token_of(site: Site) -> tuple[str, str]:
    """The token, and why there is none: this page is read-only."""
    try:
        token = site.token()
    except SecretUnreadable as error:
        return "", f"This page is read-only: its token cannot be read: {error}."
    if token is None:
        return "", "This page is read-only: `web.token_file` in tocsin.yaml names the file of a token that allows more."
    return token, ""


def refused(site: Site, given: str) -> str | None:
    """Why a form with this token may do nothing; None where it may: the right one always, whoever guesses beside it.

    Nobody waits here: whoever guesses must not hold the threads that answer /livez. Guesses are logged, one a second.
    """
    global _guessed_at
    wanted, read_only = _token_of(site)
    if read_only:
        return read_only
    if hmac.compare_digest(wanted.encode(), given.encode()):
        return None
    with _guessing:
        now = time.monotonic()
        if now - _guessed_at >= WRONG_TOKEN_S:
            _guessed_at = now
            log.warning("page_token_wrong", text="a form of the page came with a wrong token")
    return "That is not the token of `web.token_file`."
