"""What the agent tells over HTTP: one small WSGI application, once for the network and once for the unix socket.

The network's side (`listen`) only reads: the agent's health, its metrics, and what alerts link to; agent.web.pages adds
the status page, whose forms ask for a token. The unix socket's side, guarded by the file's mode, adds what the command
line and drilld ask for, and do.
"""

from __future__ import annotations

import ipaddress
import pwd
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec
import structlog

from agent.model import AlertKey, Announcement, Book, IncidentMessage, Rule, Signal, SignalSpec
from agent.strict import Unfit, duration_s
from agent.web.metrics import SourceStat, make_renderer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = structlog.get_logger()
Point = tuple[float, float]  # unix seconds, value


class View(Protocol):
    """What the web asks of the agent. Every method is called from web threads, several at once, and must not block."""

    def check(self) -> dict[str, Any]:
        """The contract's `check`: verdict, node, signals; each signal also has severity, evidence and text."""

    def gpus(self) -> dict[str, Any]:
        """A verdict on each GPU: {"verdict", "node", "why", "gpus": […], "node_findings": […]}."""

    def scaling(self) -> list[dict[str, Any]]:
        """Advice on each replica: {"subject", "out", "in", "why", "startup_s", "peak_per_s", …}."""

    def alerts(self, include_resolved: bool) -> list[dict[str, Any]]:
        """The contract's `alerts`, newest first."""

    def doctor(self) -> dict[str, Any]:
        """How each quantity is had: {"targets": [...], "routers": [...], "gpus": [...], "sources": [...]}.

        A target: {"target", "url", "kind", "model", "build", "engines": [...], "error": text or null, "found": [...]};
        a router the same; a GPU: {"uuid", "index", "name", "bdf", "found": [...]}; an item of "found" is a `Found` as a
        dict, with "required": true where a Gap of it makes its subject blind; a source: {"name", "age_s", "took_s",
        "error", "note"}.
        """

    def healthz(self) -> tuple[bool, dict[str, Any]]:
        """Whether the agent itself is whole, and every part of it by name."""

    def livez(self, now: float) -> tuple[bool, str]:
        """Whether the tick is in time (not older than the longer of 3 polls and 30 s), and a sentence that says so."""

    def transitions(self, after_id: int) -> list[dict[str, Any]]:
        """The saved transitions with a larger id, oldest first: {"id", "at", "rule", "subject", "state", …}."""

    def signals(self) -> list[Signal]:
        """All signals of the last tick."""

    def silences(self) -> dict[str, Any]:
        """{"silences": those that hold, "expected": what drills have announced, "ended": past ones, newest first}.

        A silence: {"id", "rule", "subject", "since", "until", "why", "by", "ended_by"}; one that holds also has "mutes"
        (the open alerts that it covers, each {"rule", "subject"}) and "text".
        """

    def silence(self, rule: str, subject: str, for_s: float, why: str, by: str) -> dict[str, Any]:
        """Mute a rule's pages on a subject; "*" is all of either. Raises ValueError for what cannot be."""

    def unsilence(self, wanted: Collection[int], by: str) -> list[dict[str, Any]]:
        """End silences by their ids, before their time. Raises ValueError where none of them holds."""

    def alert_stats(self, last_s: float) -> dict[str, Any]:
        """{"since", "until", "short_s", "rules": [{"rule", "fired", "total_s", "short", …}]}, the noisiest first."""

    def readings(self) -> list[Signal]:
        """What is told and judged by no rule (router_requests and so on), in the form of signals."""

    def book(self) -> Book:
        """The open alerts of the last tick."""

    def release_nvml(self, for_s: float | None) -> dict[str, Any]:
        """Close all NVML handles, and open them again after `for_s` seconds (None: when asked to)."""

    def reopen_nvml(self) -> dict[str, Any]:
        """Open NVML again now."""

    def gpu_processes(self) -> dict[int, int] | None:
        """Bytes of GPU memory by pid; None where nobody can tell."""

    def take_user(self, address: str, counted: Mapping[str, Any]) -> None:
        """What a prober has counted so far at an address that users use."""

    def announce(self, told: Announcement) -> None:
        """A drill says which alerts it will cause, and on what. Raises LookupError: no channel of that name."""

    def incident_list(self, since: float) -> list[dict[str, Any]]:
        """The records of incidents that were open at `since` or later, the newest first."""

    def incident_told(self, name: str) -> dict[str, Any] | None:
        """All that a postmortem is made of, by an incident's id, the end of it, or "last"; None: there is no such."""

    def pages_of(self, incident: Mapping[str, Any]) -> Mapping[str, int]:
        """How often each channel has accepted something new of an incident, by the channel's name; updates are none."""

    def review(self, last_s: float) -> dict[str, Any]:
        """Service levels kept, budget spent and pages of the last so many seconds."""

    def traffic(self, since: float) -> dict[str, dict[str, Any]]:
        """Requests since a time, (unix seconds, count so far): {"replicas": {engine: rows}, "routers": {router:
        {"requests": rows, "attempts": rows or []}}}.
        """

    def end_announcement(self, run: str) -> None:
        """The drill is over."""

    def trend(self, span_s: float, wanted: frozenset[AlertKey] | None = None) -> Mapping[AlertKey, Sequence[Point]]:
        """How signals went in the last `span_s`: (unix seconds, value) of each (rule, subject) that had one."""

    def incidents(self) -> Sequence[IncidentMessage]:
        """Every open incident, as it is told."""

    def rules(self) -> Sequence[Rule]:
        """All rules that are judged here."""

    def expect_kernel_line(self, message: str, for_s: float = 10.0) -> bool:
        """A drill will write exactly this to /dev/kmsg: once, within `for_s`, it counts. False: the log is not read."""

    def tell(self, signal: str, subject: str, text: str | None) -> None:
        """What drilld says of a run (drill_orphaned) or a drill (drill_overdue); None: it is no longer so."""

    def tick_at(self) -> float | None:
        """When the last tick was finished, unix seconds; None before the first."""

    def source_stats(self) -> Iterable[SourceStat]:
        """One row a source."""

    def saved(self) -> bool:
        """Whether the database could be written."""

    def outbox_counts(self) -> Mapping[str, Mapping[str, int]]:
        """How many notices there are: channel -> state -> number."""

    def delivery_counts(self) -> Mapping[str, Mapping[str, int]]:
        """How many deliveries were tried since the start: channel -> outcome -> number."""


# What a browser may do with an answer, as a Content-Security-Policy: nothing of ours runs scripts or is framed.
NOTHING = "default-src 'none'; frame-ancestors 'none'"


class Reply(NamedTuple):
    """An answer. `body` is sent with its length; a HEAD request gets the same without it. `allows`: of the browser."""

    status: str
    content_type: str
    body: bytes
    allows: str = NOTHING


@dataclass(frozen=True, slots=True)
class Request:
    """What a handler is given. `now` is unix seconds; `query` holds the last value of each parameter."""

    view: View
    now: float
    query: Mapping[str, str]
    accept: str
    metrics: Callable[[str], tuple[bytes, str]]
    body: Callable[[], Any]  # the JSON that was sent; raises BadRequest
    form: Callable[[], Mapping[str, str]] = dict  # what a page's form has sent; raises BadRequest
    rest: str = ""  # of the path, after a route that ends with a slash
    uid: int | None = None  # of the asking process, as the kernel tells it; None: over the network


class BadRequest(Exception):  # noqa: N818  (named as HTTP names it)
    """The request's own fault; the text goes back to the caller with status 400."""


Handler = Callable[[Request], Reply]
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
OK = "200 OK"
PEER_UID = "tocsin.peer_uid"  # in the environ of a request over the unix socket, as agent.web.server writes it
MAX_KERNEL_LINE = 900  # the kernel cuts a record at 1 KiB
EXPECTED_AT_MOST_S = 10.0


def _jsonable(thing: object) -> object:
    if isinstance(thing, Mapping):
        return dict(thing)
    raise TypeError(f"{type(thing).__name__} has no JSON form")


def to_json(thing: object) -> bytes:
    """JSON with NaN and infinity as null (unknown values are null), indented: people read it with curl."""
    return msgspec.json.format(msgspec.json.encode(thing, enc_hook=_jsonable), indent=2) + b"\n"


def _json(thing: object) -> Reply:
    return Reply(OK, JSON, to_json(thing))


def plain_text(status: str, text: str) -> Reply:
    return Reply(status, TEXT, (text.rstrip("\n") + "\n").encode())


def index(_: Request) -> Reply:
    lines = ["Tocsin watches this node. Here are:", "  /healthz   what works and what does not, by name (JSON)"]
    lines += ["  /livez     503 only when the agent's own tick is late", "  /metrics   for Prometheus"]
    lines += ["  /runbooks/RULE          what a rule means, how to confirm it, what to do"]
    lines += ["  /alerts/RULE/SUBJECT    an alert, as it is and as it was"]
    return plain_text(OK, "\n".join([*lines, "", "On the node itself: tocsin check, tocsin alerts, tocsin doctor"]))


def _livez(request: Request) -> Reply:
    alive, why = request.view.livez(request.now)
    return plain_text(OK if alive else "503 Service Unavailable", why)


def _healthz(request: Request) -> Reply:
    # Always 200: a kubelet pointed here by mistake would restart the agent because an engine is down. `ok` decides.
    ok, parts = request.view.healthz()
    return _json({"ok": ok, **parts})


def _metrics(request: Request) -> Reply:
    body, content_type = request.metrics(request.accept)
    return Reply(OK, content_type, body)


def runbook(request: Request) -> Reply:
    """The page of a rule, or of a checklist. Nothing but such a name is looked up: no path leads out of the folder."""
    if re.fullmatch(r"(checklists/)?[a-z0-9-]{1,80}", request.rest):
        page = files("runbooks").joinpath(f"{request.rest}.md")
        if page.is_file():
            return plain_text(OK, page.read_text(encoding="utf-8"))
    no = f"No runbook ships for {request.rest!r}; `tocsin rules list` has each rule's action."
    return plain_text("404 Not Found", no)


def alert(request: Request) -> Reply:
    """One alert for who follows the link of a page: what is open, else how it last ended."""
    rule, _, subject = request.rest.partition("/")
    rows = [a for a in request.view.alerts(True) if (a["rule"], a["subject"]) == (rule, subject)]
    if not rows:
        no = f"{rule} of {subject} is not open, and is not among the last alerts that ended."
        return plain_text("404 Not Found", no)
    lines = []
    for row in rows:
        since, until = (None if row[key] is None else f"{_moment(row[key])} UTC" for key in ("since", "until"))
        lines.append(f"{row['state'].upper()} ({row['severity']})  {rule} of {subject}  since {since}"
                     + (f" until {until}" if until else ""))
        lines += [f"  Silenced {row['silenced']}"] if row.get("silenced") else []
        lines += [f"  {line}" for line in (row.get("summary"), *str(row.get("description") or "").splitlines()) if line]
    return plain_text(OK, "\n".join([*lines, "", f"What to do: /runbooks/{rule}"]))


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _check(request: Request) -> Reply:
    return _json(request.view.check())


def _gpus(request: Request) -> Reply:
    return _json(request.view.gpus())


def _alerts(request: Request) -> Reply:
    return _json(request.view.alerts(request.query.get("resolved", "1") != "0"))


def _over_last(request: Request, default: str, ask: Callable[[float], object]) -> Reply:
    """What there is to tell of the last so long (`?last=30d`)."""
    last = request.query.get("last", default)
    try:
        return _json(ask(duration_s(last)))
    except Unfit as fault:
        raise BadRequest(f"last={last}: {fault}") from fault


def _alert_stats(request: Request) -> Reply:
    return _over_last(request, "30d", request.view.alert_stats)


def _silences(request: Request) -> Reply:
    return _json(request.view.silences())


def _silence(request: Request) -> Reply:
    told = request.body()
    try:
        rule, subject, for_s, why = str(told["rule"]), told.get("subject"), float(told["for_s"]), str(told["why"])
        return _json(request.view.silence(rule, "*" if subject is None else str(subject), for_s, why, _who(request)))
    except (TypeError, KeyError, AttributeError):
        raise BadRequest('send {"rule", "subject" or null for all, "for_s": seconds, "why"}') from None
    except ValueError as fault:
        raise BadRequest(str(fault)) from None


def _unsilence(request: Request) -> Reply:
    """By ids, or by the rule and subject that a silence was made for."""
    told = request.body()
    if not isinstance(told, dict) or not (isinstance(told.get("ids"), list) or told.get("rule")):
        raise BadRequest('send {"ids": […]} or {"rule", "subject" or null for all}')
    meant = (told.get("rule"), told.get("subject") or "*")
    ids = told.get("ids") or [one["id"] for one in request.view.silences()["silences"]
                              if (one["rule"], one["subject"]) == meant]
    try:
        return _json(request.view.unsilence([one for one in ids if isinstance(one, int)], _who(request)))
    except ValueError as fault:
        raise BadRequest(str(fault)) from None


def _who(request: Request) -> str:
    """Who asks over the unix socket, as the kernel tells it."""
    if request.uid is None:
        return "unknown"
    try:
        return pwd.getpwuid(request.uid).pw_name
    except KeyError:
        return f"uid {request.uid}"


def _doctor(request: Request) -> Reply:
    return _json(request.view.doctor())


def _signals(request: Request) -> Reply:
    return _json([*request.view.signals(), *request.view.readings()])


def _transitions(request: Request) -> Reply:
    after = request.query.get("after", "0")
    if not re.fullmatch(r"[0-9]{1,18}", after):
        raise BadRequest(f"after={after!r} is not the id of a transition; give a whole number, 0 for all")
    return _json(request.view.transitions(int(after)))


def _release(request: Request) -> Reply:
    span = request.query.get("for")
    try:
        for_s = None if span is None else duration_s(span)
    except Unfit as fault:
        raise BadRequest(f"for={span}: {fault}") from fault
    return _json(request.view.release_nvml(for_s))


def _reopen(request: Request) -> Reply:
    return _json(request.view.reopen_nvml())


def _gpu_processes(request: Request) -> Reply:
    return _json({"processes": request.view.gpu_processes()})


def _user(request: Request) -> Reply:
    counted = request.body()
    if not isinstance(counted, dict) or not {"address", "requests", "errors"} <= counted.keys():
        raise BadRequest('send {"address", "requests", "errors", "ttft": {…}, "itl": {…}}, all counted since the start')
    request.view.take_user(str(counted["address"]), counted)
    return _json({"ok": True})


def _announce(request: Request) -> Reply:
    try:
        told = msgspec.convert(request.body(), Announcement)
        request.view.announce(told)
    except (msgspec.ValidationError, LookupError) as fault:
        raise BadRequest(f'{fault}; send {{"run", "drill", "rules": […], "until": unix seconds, "subjects": […],'
                         ' "loads", "route_to": a channel}') from None
    return _json({"ok": True})


def _since(request: Request, ask: Callable[[float], object]) -> Reply:
    """What there is to tell since a moment (`?since=1790000000`; else all)."""
    since = request.query.get("since", "0")
    try:
        return _json(ask(float(since)))
    except ValueError:
        raise BadRequest(f"since={since}: write unix seconds") from None


def _traffic(request: Request) -> Reply:
    return _since(request, request.view.traffic)


def _incidents(request: Request) -> Reply:
    return _since(request, request.view.incident_list)


def _incident(request: Request) -> Reply:
    told = request.view.incident_told(request.rest)
    if told is None:
        return plain_text("404 Not Found", f"there is no incident {request.rest!r}; /incidents lists them")
    return _json(told)


def _review(request: Request) -> Reply:
    return _over_last(request, "90d", request.view.review)


def _end_announcement(request: Request) -> Reply:
    request.view.end_announcement(request.query.get("run", ""))
    return _json({"ok": True})


def _expect_kernel_line(request: Request) -> Reply:
    """Only root's word counts: an Xid line that anybody else could announce would page for everybody."""
    if request.uid != 0:
        return plain_text("403 Forbidden", "only root may announce a line of the kernel's log")
    told = request.body()
    try:
        line, for_s = str(told["line"]), float(told["for_s"])
    except (TypeError, KeyError, ValueError):
        raise BadRequest('send {"line": the exact text, "for_s": seconds}') from None
    if not line.isprintable() or not 0 < len(line) <= MAX_KERNEL_LINE or not 0 < for_s <= EXPECTED_AT_MOST_S:
        raise BadRequest(f"a line of 1 to {MAX_KERNEL_LINE} characters, for at most {EXPECTED_AT_MOST_S:g} s")
    return _json({"expected": request.view.expect_kernel_line(line, for_s)})


def _tell(request: Request) -> Reply:
    told = request.body()
    signals = ("drill_orphaned", "drill_overdue")
    if not isinstance(told, dict) or told.get("signal") not in signals or not told.get("subject"):
        raise BadRequest(f'send {{"signal", "subject", "text" or null}}; signal is one of {", ".join(signals)}')
    text = told.get("text")
    request.view.tell(told["signal"], str(told["subject"]), None if text is None else str(text))
    return _json({"ok": True})


Routes = Mapping[str, Mapping[str, Handler]]  # path -> method -> handler; one that ends with / takes what follows it
PUBLIC: Routes = {
    "/": {"GET": index},
    "/livez": {"GET": _livez},
    "/healthz": {"GET": _healthz},
    "/metrics": {"GET": _metrics},
    "/runbooks/": {"GET": runbook},
    "/alerts/": {"GET": alert},
}
PRIVATE: Routes = {
    **PUBLIC,
    "/check": {"GET": _check},
    "/gpus": {"GET": _gpus},
    "/alerts": {"GET": _alerts},
    "/alerts/stats": {"GET": _alert_stats},
    "/silences": {"GET": _silences, "POST": _silence},
    "/silences/end": {"POST": _unsilence},
    "/doctor": {"GET": _doctor},
    "/signals": {"GET": _signals},
    "/transitions": {"GET": _transitions},
    "/nvml/release": {"POST": _release},
    "/nvml/reopen": {"POST": _reopen},
    "/nvml/processes": {"GET": _gpu_processes},
    "/traffic": {"GET": _traffic},
    "/incidents": {"GET": _incidents},
    "/incidents/": {"GET": _incident},
    "/review": {"GET": _review},
    "/user": {"POST": _user},
    "/drills/announce": {"POST": _announce},
    "/drills/end": {"POST": _end_announcement},
    "/drills/kernel-line": {"POST": _expect_kernel_line},
    "/drills/tell": {"POST": _tell},
}
# Nothing of ours is cached or read by another site's page.
SECURITY_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]


def host_name(host: str) -> str:
    """The name in a Host header or a `listen`, without port and brackets, in lower case: "[::1]:9959" -> "::1"."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::[0-9]*)?", host)
    if bracketed:
        return bracketed[1].lower()
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() and ":" not in name else host).rstrip(".").lower()


def is_loopback(name: str) -> bool:
    """Whether a bare host name or address means this machine to itself."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def allowed_hosts(listen: str, external_url: str | None) -> frozenset[str] | None:
    """The Host names to answer to besides loopback's own; None: any (bound to the network, names are not ours to know).

    A page that a browser fetched from evil.example can rebind that name to 127.0.0.1 and read us as its own origin;
    its requests still say `Host: evil.example`.
    """
    bound = host_name(listen)
    if not is_loopback(bound):
        return None
    outside = urlsplit(external_url).hostname if external_url else None
    return frozenset({bound, *([outside.lower()] if outside else [])})


def _refusal(environ: WSGIEnvironment, routes: Routes, hosts: frozenset[str] | None) -> Reply | None:
    """Why a request is not for us, as an answer; None where it is."""
    host = host_name(str(environ.get("HTTP_HOST", "")))
    if host and hosts is not None and host not in hosts and not is_loopback(host):
        return plain_text(
            "421 Misdirected Request",
            f"This agent listens on loopback and does not answer to the name {host!r}. Ask for 127.0.0.1 or localhost;"
            " behind a proxy, set `external_url` to the address that people use.",
        )
    path = environ.get("PATH_INFO", "/")
    if _route(path, routes) is None:
        return plain_text("404 Not Found", f"There is no {path!r} here. There is: {' '.join(sorted(routes))}")
    return None


def _route(path: str, routes: Routes) -> str | None:
    """The route of a path."""
    if path in routes:
        return path
    return next((route for route in routes if route.endswith("/") and route != "/" and path.startswith(route)), None)


def _handle(request: Request, handlers: Mapping[str, Handler], method: str) -> tuple[Reply, list[tuple[str, str]]]:
    handler = handlers.get("GET" if method == "HEAD" else method)
    if handler is None:
        allowed = ", ".join([*handlers, *(["HEAD"] if "GET" in handlers else [])])
        no = f"{method} is not possible here; use {allowed}"
        return plain_text("405 Method Not Allowed", no), [("Allow", allowed)]
    try:
        return handler(request), []
    except BadRequest as fault:
        return plain_text("400 Bad Request", str(fault)), []
    except Exception:
        error_id = secrets.token_hex(4)
        log.exception("request_failed", error_id=error_id)
        sentence = f"Tocsin failed to answer; its log has the reason under error_id {error_id}"
        return plain_text("500 Internal Server Error", sentence), []


def _sent(environ: WSGIEnvironment) -> Any:
    """The JSON of a request's body; the server has bounded its size."""
    try:
        return msgspec.json.decode(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    except (ValueError, msgspec.DecodeError) as fault:
        raise BadRequest(f"the body is not JSON: {fault}") from None


def _form(environ: WSGIEnvironment) -> Mapping[str, str]:
    """The fields of a form; the last of each name."""
    if str(environ.get("CONTENT_TYPE", "")).partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise BadRequest("send the page's own form")
    text = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode("utf-8", "replace")
    return {key: values[-1] for key, values in parse_qs(text, keep_blank_values=True).items()}


def make_app(
    view: View,
    catalogue: Mapping[str, SignalSpec],
    clock: Callable[[], float],
    *,
    routes: Routes,
    hosts: frozenset[str] | None = None,
) -> WSGIApplication:
    """The application for one listener: PUBLIC routes for the network, PRIVATE ones for the unix socket.

    `clock` gives unix seconds. `hosts`: see allowed_hosts; leave it None for a unix socket, which no browser reaches.
    """
    metrics = make_renderer(view, catalogue, clock)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = str(environ["REQUEST_METHOD"])
        extra: list[tuple[str, str]] = []
        reply = _refusal(environ, routes, hosts)
        if reply is None:
            query = {key: values[-1] for key, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
            accept = str(environ.get("HTTP_ACCEPT", ""))
            path = str(environ["PATH_INFO"])
            route = _route(path, routes) or path
            rest = path.removeprefix(route).encode("latin-1", "replace").decode("utf-8", "replace")  # as WSGI has it
            uid = environ.get(PEER_UID)
            request = Request(view, clock(), query, accept, metrics, lambda: _sent(environ), lambda: _form(environ),
                              rest, uid)
            reply, extra = _handle(request, routes[route], method)
        status, content_type, body, allows = reply
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body))),
                   ("Content-Security-Policy", allows), *SECURITY_HEADERS, *extra]
        start_response(status, headers)
        return [] if method == "HEAD" else [body]

    return app
