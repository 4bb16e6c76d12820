"""The same rules for Prometheus: over the engines' own metrics as far as those can say it, and over Tocsin's.

Pure: rules to the text of a rule file, for Prometheus 2.42 and later (`keep_firing_for`). What an engine calls its
metrics through its versions comes from agent/engines/*.yaml, all names joined by `or`, the newest first.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent.engines import KINDS, Alias, EngineMap, Over, Quantity, load_map
from agent.model import Rule, SignalSpec, Slo, alert_name
from agent.stats import Z_95
from agent.web.metrics import metric_name
from rules import severity_of

LATE_INTERVALS = 3  # as agent.windows has it
MARGIN_S = 1.0  # a scrape is in the database a moment after the time that it has there
ENGINE, TARGET = "(job, instance, engine)", "(job, instance)"
YOUNG_S, COLD_S, HUSH_S = 180, 600, 900  # as agent.signals has them
SUBJECT = '{{ $labels.instance }}{{ with $labels.engine }}{{ if ne . "0" }}/{{ . }}{{ end }}{{ end }}'

HEAD = """\
# Tocsin's rules over the engines' own metrics, for Prometheus 2.42 and later, for fleets without an agent on each node.
# Written by `tocsin rules export --format prometheus`, with the rules, `slo:` and `poll:` of a configuration.
#
# Scrape the engines every {poll} (`poll:`): one whose scrapes are {late} apart is not watched.
# Promised: TTFT p99 {ttft}, ITL p99 {itl}{e2e}, availability {availability}. An engine's own `slo:` has no place here.
{promised}#
# What raw metrics cannot express, and the agent can:
{cannot}
"""
UNPROMISED = "# Nobody has written `slo:`: these are defaults, what needs them is a ticket. Write it and export anew.\n"
# Of how the agent judges, what no rule here does.
BEHAVIOUR = (
    ("Gap-holding: to Prometheus a number that is missing is back in range: an alert resolves when its engine's page is"
     " gone, and starts anew when it is back. What rose meanwhile is not seen"),
    "idle-holding: an alert resolves when the traffic ends",
    "a frozen page (a gauge that stands while no counter moves), a queue whose age is undecided: taken as they are",
    "what was seen before an alert's last resolve counts again while it is in the window",
    "requests of the canary, and what routers count, are not told apart",
)
YOURS = "needs a query of yours: `Q <= 0.95 * Q offset 7d` (or `offset 1d`) for 10 m says the same"
CANNOT: Mapping[str, str] = {
    "business-metric": YOURS, "business-metric-day": YOURS,
    "graph-fallback": "no stock engine tells which decode steps should have had a graph",
    "rank-spread": "needs seconds of compute for each rank", "rank-straggler": "needs seconds of compute for each rank",
    "rank-clock-spread": "needs clocks and their reasons from NVML",
    "gpu-temperature": "needs NVML", "gpu-thermal-limit": "needs NVML", "gpu-utilization": "needs NVML",
    "gpu-memory": "needs NVML", "gpu-memory-low": "needs NVML", "gpu-memory-growth": "needs NVML",
    "engine-slow": "a scrape that failed does not say how", "engine-stopped": "needs the supervisor's word",
    "engine-stuck": "a hung engine's page can stay green: needs a canary, a probe or connections",
    "drill-orphaned": "is the drill daemon's", "no-drill": "is the drill daemon's",
    "blind": "that is Gap-holding", "watcher": "is about the agent",
    "node-error-burn-fast": "which engines share a node is not in their metrics",
    "node-error-burn-slow": "which engines share a node is not in their metrics",
}
ELSEWHERE: Mapping[str, str] = {  # by the letter of a rule's number
    "X": "needs the kernel log, NVML or the devices", "L": "needs the kernel log, NVML or the devices",
    "P": "belongs to a deployment pattern: the agent runs it where that is, over several engines and sources",
    "U": "is measured from outside, by a canary, a prober or a router", "K": "needs the Kubernetes API",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One rule of a Prometheus group: a recording, or an alert."""

    name: str
    expr: str
    alert: bool = False
    for_s: float = 0.0
    keep_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    says: str = ""  # a comment above it


# --- names of metrics through kinds and versions ----------------------------------------------------------------------


def series(engine_map: EngineMap, name: str, suffix: str, matchers: Sequence[str]) -> str:
    """A selector; under Ray in both of its spellings, since it has none of its own."""
    within = list(matchers)
    if engine_map.kind == "ray-serve-llm":
        bare = name.removeprefix("ray_").removesuffix("_total").replace("vllm:", "vllm[:_]")
        within.insert(0, f'__name__=~"ray_{bare}{suffix or "(_total)?"}"')
        return "{" + ", ".join(within) + "}"
    return f"{name}{suffix}" + ("{" + ", ".join(within) + "}" if within else "")


def matchers_of(engine_map: EngineMap, quantity: Quantity, select: Mapping[str, Sequence[str]] | None) -> list[str]:
    """Which series count: those of the inference routes, of the lowest rank, of no breakdown."""
    chosen = quantity.select if select is None else select
    found = [f'{label}=~"{"|".join(values)}"' for label, values in chosen.items()]
    found += [f'{label}!~"{"|".join(values)}"' for label, values in quantity.skip.items()]
    found += [f'{label}=~"0?"' for label in engine_map.ranks if quantity.merge == "sum"]
    return found + [f'{label}=""' for label in engine_map.breakdowns]


def term(engine_map: EngineMap, quantity: Quantity, of: Alias | Over, by: str, wrap: Callable[[str], str],
         suffix: str = "", more: Sequence[str] = ()) -> str:
    """One name, wrapped (`increase(…[5m])`), its copies taken once, added (or the largest taken) by engine, target."""
    part = getattr(of, "part", None)
    matchers = [*matchers_of(engine_map, quantity, of.select or None), *more]
    inner = wrap(series(engine_map, of.name, suffix or (f"_{part}" if part else ""), matchers))
    if engine_map.copies:
        inner = f"max without ({', '.join(engine_map.copies)}) ({inner})"
    label = next(iter(engine_map.engine_labels), "engine")
    if label != "engine" and "engine" in by:
        inner = f'label_replace({inner}, "engine", "$1", "{label}", "(.*)")'
    return f"{quantity.merge} by {by} ({inner})"


def aliases(name: str) -> Iterator[tuple[EngineMap, Quantity, Alias]]:
    """Every name of a quantity that stands on a page for Prometheus, kind by kind, the newest first."""
    known: set[tuple[str, str]] = set()
    for kind in KINDS:
        engine_map = load_map(kind)
        quantity = engine_map.quantities.get(name)
        for alias in () if quantity is None else quantity.names:
            selects = alias.select if alias.select is not None else {} if quantity is None else quantity.select
            key = (series(engine_map, alias.name, "", []), str(selects))
            if quantity is None or key in known or alias.name.startswith("trtllm_json"):  # told as JSON elsewhere
                continue
            known.add(key)
            yield engine_map, quantity, alias


def through(name: str, by: str, wrap: Callable[[str], str], suffix: str = "", unit: str | None = None) -> str:
    """A quantity under all of its names (or those in one unit): the first that is there counts, the newest."""
    terms = []
    for engine_map, quantity, alias in aliases(name):
        if unit is not None and (alias.unit or quantity.unit) != unit:
            continue
        text = term(engine_map, quantity, alias, by, wrap, suffix)
        text += "".join(f" + {term(engine_map, quantity, Alias(also.name, select=also.select), by, wrap)}"
                        for also in quantity.also)
        terms.append(f"{text} / {term(engine_map, quantity, alias.over, by, wrap)}" if alias.over else text)
    return "\nor\n".join(dict.fromkeys(terms))


def last(window_s: float, offset: str = "") -> Callable[[str], str]:
    """The last sample that is not too old: one failed scrape is bridged, as the agent does."""
    return lambda selector: f"last_over_time({selector}[{span(window_s)}]{offset})"


def rise(window_s: float, offset: str = "") -> Callable[[str], str]:
    """What a counter rose in a window."""
    return lambda selector: f"increase({selector}[{span(window_s)}]{offset})"


# --- numbers of buckets -----------------------------------------------------------------------------------------------


def at_least(limit: float) -> str:
    """A regular expression for the `le` of every bound at or over a limit, whatever bounds a version has."""
    whole, _, fraction = f"{limit:.9f}".rstrip("0").partition(".")
    larger = [f"[1-9][0-9]{{{len(whole)},}}", *_larger(whole)] if whole != "0" else ["[1-9][0-9]*"]
    same = [f"{whole}[.]{tail}[0-9]*" for tail in _larger(fraction, rest=False)]
    equal = f"{whole}[.]{fraction}[0-9]*" if fraction else f"{whole}([.][0-9]+)?"
    return "|".join([f"({'|'.join(larger)})([.][0-9]+)?", *same, equal, "[0-9.]+e[+]?[0-9]+", "[+]Inf"])


def over(limit: float) -> str:
    """The same for every bound over it."""
    whole, _, fraction = f"{limit:.9f}".rstrip("0").partition(".")
    equal = f"{whole}[.]{fraction}[0-9]*" if fraction else f"{whole}([.][0-9]+)?"
    more = f"{whole}[.]{fraction}[0-9]*[1-9][0-9]*"
    return at_least(limit).replace(f"|{equal}|", f"|{more}|")


def _larger(digits: str, *, rest: bool = True) -> list[str]:
    """Digits of the same length that are more; `rest`: with those that follow."""
    after = [f"[0-9]{{{n}}}" if rest and n else "" for n in range(len(digits) - 1, -1, -1)]
    return [f"{digits[:i]}[{int(d) + 1}-9]{after[i]}" for i, d in enumerate(digits) if d != "9"]


UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


def span(seconds: float) -> str:
    """A duration as Prometheus has it."""
    if seconds == 0:
        return "0s"
    size, unit = next((row for row in UNITS if seconds % row[0] == 0), (0.001, "ms"))
    return f"{seconds / size:.0f}{unit}"


def beyond(bad: str, n: str, share: float) -> str:
    """Wilson's 95 % lower bound of bad in n is over a share, solved for bad: bad > L n + z sqrt(L (1 - L) n)."""
    return f"{bad} > {share:g} * {n} + {Z_95 * math.sqrt(share * (1 - share)):.6g} * sqrt({n})"


# --- the rules over raw metrics ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One rule, and what its expression is made for. Recordings that several need are written once."""

    rule: Rule
    slo: Slo
    poll_s: float

    @property
    def limit(self) -> float:
        """The number to compare with."""
        found = self.rule.limit(self.slo)
        assert found is not None  # noqa: S101  (who has none is left out)
        return found

    @property
    def window_s(self) -> float:
        """Of the rule."""
        return self.rule.window_s or 300.0

    def slo_limit(self) -> float | None:
        """The `limit` of its params in seconds; None where the SLO is not promised."""
        value = self.rule.params["limit"]
        if not isinstance(value, tuple):
            return float(value)
        promised: float | None = getattr(self.slo, value[1])
        return None if promised is None else round(float(value[0]) * promised, 9)


Written = tuple[list[Entry], str, float]  # recordings, expression, seconds of `for` that the expression has in it


def watched(window_s: float, poll_s: float, by: str = ENGINE) -> str:
    """A window less than half covered tells nothing."""
    step_s = max(poll_s, math.ceil(window_s / 60))
    count = f"count_over_time(tocsin:waiting[{span(window_s)}:{span(step_s)}])"
    half = f"{count if by == ENGINE else f'max by {by} ({count})'} > {window_s / 2 / step_s:g}"
    return f"and on {by}\n({half})"


def unless(*names: str, by: str = ENGINE) -> str:
    """What is judged by nothing: an engine that sleeps, or is young."""
    what = {"asleep": f"max by {by} (tocsin:awake) == 0", "young": "tocsin:young", "cold": "tocsin:cold"}
    return "\n".join(f"unless on {by if name == 'asleep' else TARGET} ({what[name]})" for name in names)


def queue_age(ask: Ask) -> Written:
    """H1. The head of the queue had arrived by then: first tokens + waiting of then are more than first tokens now."""
    ago_s = max(ask.limit, ask.poll_s + MARGIN_S)
    window_s, then = LATE_INTERVALS * ask.poll_s, f" offset {span(ago_s)}"
    entries = [
        Entry("tocsin:first_tokens", through("ttft", ENGINE, last(window_s), "_count"),
              says="Requests that have got their first token, each engine."),
        Entry("tocsin:arrived:before", f"({through('waiting', ENGINE, last(window_s, then))})\n+\n"
              f"({through('ttft', ENGINE, last(window_s, then), '_count')})",
              says=f"Requests that had arrived {span(ago_s)} ago: never the same scrape as now."),
    ]
    expr = f"(tocsin:arrived:before - tocsin:first_tokens > 0 and tocsin:waiting > 0)\n{unless('young', 'asleep')}"
    return entries, expr, ask.poll_s


def gauge(name: str) -> Callable[[Ask], Written]:
    """H2, M5. In breach at every scrape since the last evaluation: a dip between two starts `for` anew."""
    def write(ask: Ask) -> Written:
        least = "min" if ask.rule.op in (">", ">=") else "max"
        since = f"[{span(ask.poll_s)}]"
        told = through(name, ENGINE, lambda s: f"{least}_over_time({s}{since})")
        entry = Entry(f"tocsin:{name}", f"{told}\nor\n{through(name, ENGINE, last(LATE_INTERVALS * ask.poll_s))}")
        return [entry], f"tocsin:{name} {ask.rule.op} {ask.limit:g}\n{unless('asleep')}", ask.poll_s
    return write


def rises(name: str) -> Callable[[Ask], Written]:
    """H3. How often in the window."""
    def write(ask: Ask) -> Written:
        record = f"tocsin:{name}:increase{span(ask.window_s)}"
        return [Entry(record, through(name, ENGINE, rise(ask.window_s)))], (
            f"({record} {ask.rule.op} {ask.limit:g})\n{watched(ask.window_s, ask.poll_s)}\n{unless('asleep')}"), 0.0
    return write


def buckets(name: str, limit_s: float, window_s: float) -> list[Entry]:
    """Observations in a window, how many were certainly, and how many possibly slower than a limit."""
    stem = f"tocsin:{name}:%s{span(window_s)}"

    def up_to(pick: str, matcher: Callable[[float], str]) -> str:
        terms = []
        for engine_map, quantity, alias in aliases(name):
            unit = 1000.0 if (alias.unit or quantity.unit) == "ms" else 1.0
            added = term(engine_map, quantity, alias, "(job, instance, le)", rise(window_s), "_bucket",
                         [matcher(limit_s * unit)])
            terms.append(f"{pick} by {TARGET} ({added})")
        return "\nor\n".join(dict.fromkeys(terms))

    n = stem % "n"
    return [
        Entry(n, through(name, TARGET, rise(window_s), "_count"), says=f"{name} in {span(window_s)}: observations; how"
              f" many were certainly, and possibly, slower than {limit_s:g} s, by the bucket bounds around it."),
        Entry(stem % "slow", f"{n} - (\n{up_to('min', lambda x: f'le=~{quoted(at_least(x))}')}\n)"),
        Entry(stem % "possibly_slow", f"{n} - (\n{up_to('max', lambda x: f'le!~{quoted(over(x))}')}\nor {n} * 0\n)"),
    ]


def slow_share(name: str, *, undecided: bool) -> Callable[[Ask], Written]:
    """H5, H6, M2. Certainly (or only possibly) over 1 % of the window's observations; 30 m where 5 m have too few."""
    def write(ask: Ask) -> Written:
        limit_s = ask.slo_limit()
        assert limit_s is not None  # noqa: S101
        entries, parts = [], []
        needed, requests = ask.rule.min_count or 1, ask.rule.params.get("min_requests")
        for window_s in dict.fromkeys((ask.window_s, 1800.0)):
            stem = f"tocsin:{name}:%s{span(window_s)}"
            n, slow, possibly = (stem % word for word in ("n", "slow", "possibly_slow"))
            entries += buckets(name, limit_s, window_s)

            def breach(bad: str, n: str = n) -> str:
                return f"{bad} >= {ask.rule.min_bad or 0} and {beyond(bad, n, ask.rule.factor)}"

            part = f"({breach(slow)})" if not undecided else f"({breach(possibly)})\n  unless ({breach(slow)})"
            part += f"\n  and {n} >= {needed}"
            if requests is not None:
                told = f"tocsin:ttft:n{span(window_s)}"
                entries.insert(0, Entry(told, through("ttft", TARGET, rise(window_s), "_count")))
                part += f"\n  and {told} >= {requests:g}"
            part += "\n  " + watched(window_s, ask.poll_s, TARGET).replace("\n", " ")
            if window_s != ask.window_s:
                part += f"\n  unless tocsin:{name}:n{span(ask.window_s)} >= {needed}"
            parts.append(f"(\n  {part}\n)")
        short = watched(ask.window_s, ask.poll_s, TARGET)
        return entries, f"({' or '.join(parts)})\n{short}\n{unless('young', 'asleep', by=TARGET)}", 0.0
    return write


def errors(window_s: float) -> list[Entry]:
    """Errors and requests of a target: the larger of HTTP's 5xx and of (finished with error + refused), never both."""
    wrap, size = rise(window_s), span(window_s)
    http, failed, ended = [], [], []
    for engine_map, quantity, alias in aliases("http"):
        text = term(engine_map, quantity, alias, TARGET, wrap)
        bad = term(engine_map, quantity, alias, TARGET, wrap, more=[f'{quantity.key}=~"5.*|429"'])
        http.append((bad, text))
    for engine_map, quantity, alias in aliases("finished"):
        ended.append(" + ".join([term(engine_map, quantity, alias, TARGET, wrap), *(
            f"({also} or {term(engine_map, quantity, alias, TARGET, wrap)} * 0)" for also in _also(
                engine_map, quantity, wrap, lambda _: True))]))
        failed += _also(engine_map, quantity, wrap, lambda key: key == "error")
        if quantity.key is not None:
            kept = "|".join(key for key, word in quantity.keys.items() if word != "error" and key != "*")
            matcher = f'{quantity.key}!~"{kept}"' if quantity.keys else f'{quantity.key}="error"'
            failed.append(term(engine_map, quantity, alias, TARGET, wrap, more=[matcher]))
    refused = through("rejections", TARGET, wrap)
    all_http = "\nor\n".join(dict.fromkeys(text for _, text in http))
    bad_http = "\nor\n".join(dict.fromkeys(bad for bad, _ in http))
    of_engine = f"tocsin:failed:increase{size}"
    return [
        Entry(of_engine, f"sum by {TARGET} (\n" + "\nor\n".join(
            f'label_replace({text}, "what", "{n}", "", "")' for n, text in enumerate([*dict.fromkeys(failed), refused]))
            + "\n)", says=f"Errors and requests in {size}, by HTTP's status and by the engines' own word."),
        Entry(f"tocsin:answered:increase{size}", all_http),
        Entry(f"tocsin:finished:increase{size}", "\nor\n".join(dict.fromkeys(ended))),
        Entry(f"tocsin:errors:increase{size}", f'max by {TARGET} (\nlabel_replace({bad_http}, "what", "http", "", "")'
              f'\nor label_replace({of_engine}, "what", "engine", "", "")\n)\n'
              f"or tocsin:answered:increase{size} * 0 or tocsin:finished:increase{size} * 0"),
        Entry(f"tocsin:requests:increase{size}",
              f"tocsin:answered:increase{size} > 0 or tocsin:finished:increase{size} + ({of_engine} * 0 or"
              f" tocsin:finished:increase{size} * 0)"),
    ]


def _also(engine_map: EngineMap, quantity: Quantity, wrap: Callable[[str], str], wanted: Callable[[str], bool],
          ) -> list[str]:
    return [term(engine_map, quantity, Alias(also.name, select=also.select), TARGET, wrap) for also in quantity.also
            if wanted(also.as_key or "")]


ERRORS_S = 300.0  # longer windows of errors are sums of this one
SHORT_S = 6 * 3600.0


def error_rate(ask: Ask) -> Written:
    """M6."""
    size = span(ask.window_s)
    bad, n = f"tocsin:errors:increase{size}", f"tocsin:requests:increase{size}"
    expr = (f"({bad} >= {ask.rule.min_bad or 0} and {beyond(bad, n, ask.limit)})\n"
            f"{watched(ask.window_s, ask.poll_s, TARGET)}\n{unless('asleep', by=TARGET)}")
    return [] if ask.window_s == ERRORS_S else errors(ask.window_s), expr, 0.0


def error_burn(ask: Ask) -> Written:
    """H7. Both windows of a pair burn faster than its factor; a window that was watched in part has spent that part."""
    entries, parts = [], []
    for pair in ask.rule.params["pairs"]:
        both = []
        for window_s in (pair["long"], pair["short"]):
            size, step_s = span(window_s), 60.0 if window_s <= SHORT_S else ERRORS_S
            n, bad, seen = f"tocsin:requests:increase{size}", f"tocsin:errors:increase{size}", f"tocsin:watched:{size}"
            for name in (bad, n) if window_s != ERRORS_S else ():
                told = f"sum_over_time({name.removesuffix(size)}{span(ERRORS_S)}[{size}:{span(step_s)}])"
                entries.append(Entry(name, told if step_s == ERRORS_S else f"{told} * {step_s / ERRORS_S:g}"))
            count = f"count_over_time(tocsin:waiting[{size}:{span(step_s)}])"
            entries.append(Entry(seen, f"clamp_max(max by {TARGET} ({count}) / {window_s / step_s:g}, 1)"))
            share = f"({pair['factor'] * (1 - ask.slo.availability):.6g} / {seen})"
            both.append(f"{bad} > {share} * {n} + {Z_95:.6g} * sqrt({share} * (1 - {share}) * {n})")
        parts.append(f"({both[0]}\n and {both[1]})")
    return entries, "(" + "\nor ".join(parts) + f")\n{unless('asleep', by=TARGET)}", 0.0


def ratio(part: str, whole: str, *, cold: bool) -> Callable[[Ask], Written]:
    """H10, M8. One counter's rise ÷ another's, where there is enough of it."""
    def write(ask: Ask) -> Written:
        size = span(ask.window_s)
        names = [f"tocsin:{name}:increase{size}" for name in (part, whole)]
        entries = [Entry(name, through(of, ENGINE, rise(ask.window_s))) for name, of in
                   zip(names, (part, whole), strict=True)]
        expr = (f"({names[0]} / {names[1]} {ask.rule.op} {ask.limit:g} and {names[1]} >= {ask.rule.min_count or 1})\n"
                f"{watched(ask.window_s, ask.poll_s)}\n{unless('asleep', *(('cold',) if cold else ()))}")
        if cold:
            preempted = f"tocsin:preemptions:increase{size}"
            entries.append(Entry(preempted, through("preemptions", ENGINE, rise(ask.window_s))))
            off = 'max by (job, instance, engine) (vllm:cache_config_info{enable_prefix_caching="False"})'
            expr += f"\nunless on {ENGINE} ({preempted} > 0)\nunless on {ENGINE} ({off})"
        return entries, expr, 0.0
    return write


def qps_change(ask: Ask) -> Written:
    """M1. Arrivals against the 30 m before and, once they are known, yesterday's."""
    w, minutes = span(ask.window_s), 1800.0 / ask.window_s
    now = (f"({through('ttft', TARGET, rise(ask.window_s), '_count')})\n+ (sum by {TARGET} (tocsin:waiting)"
           f" - sum by {TARGET} (tocsin:waiting offset {w}))")
    before = through("ttft", TARGET, rise(1800.0, f" offset {w}"), "_count")
    day = through("ttft", TARGET, rise(1800.0, " offset 23h45m"), "_count")
    entries = [
        Entry("tocsin:arrivals:now", now, says=f"Arrivals in {w}: now, on average of the 30 m before, and a day ago."),
        Entry("tocsin:arrivals:before", f"({before}) / {minutes:g}"),
        Entry("tocsin:arrivals:yesterday", f"({day}) / {minutes:g}"),
    ]
    off, needed = "abs(tocsin:arrivals:now / tocsin:arrivals:%s - 1)", ask.rule.min_count or 1
    expr = (f"({off % 'before'} {ask.rule.op} {ask.limit:g} and tocsin:arrivals:before >= {needed})\n"
            f"unless ({off % 'yesterday'} <= {ask.limit:g} or tocsin:arrivals:yesterday < {needed})\n"
            f"{watched(1800.0, ask.poll_s, TARGET)}\n"
            f"unless on {TARGET} (tocsin:started < {HUSH_S})\n{unless('young', 'asleep', by=TARGET)}")
    return entries, expr, 0.0


def engine_down(ask: Ask) -> Written:
    """L1. A target that was an engine within the last day is not scraped any more."""
    seen = f"max by {TARGET} (present_over_time(tocsin:waiting[1d]))"
    return [], f"up == 0 and on {TARGET} {seen}", -ask.limit * ask.poll_s  # so many scrapes in a row


WRITERS: Mapping[str, Callable[[Ask], Written]] = {
    "queue_age": queue_age,
    "kv_cache_utilization": gauge("kv_usage"),
    "preemptions": rises("preemptions"),
    "ttft_slow_share": slow_share("ttft", undecided=False),
    "ttft_possibly_slow_share": slow_share("ttft", undecided=True),
    "itl_slow_share": slow_share("itl", undecided=False),
    "itl_possibly_slow_share": slow_share("itl", undecided=True),
    "e2e_slow_share": slow_share("e2e", undecided=False),
    "e2e_possibly_slow_share": slow_share("e2e", undecided=True),
    "error_burn": error_burn,
    "error_rate": error_rate,
    "prefix_cache_hit_rate": ratio("prefix_hits", "prefix_queries", cold=True),
    "spec_decode_acceptance": ratio("spec_accepted", "spec_draft", cold=False),
    "swapped": gauge("swapped"),
    "qps_change": qps_change,
    "engine_down": engine_down,
}
BY_ENGINE = frozenset({"queue_age", "kv_cache_utilization", "preemptions", "prefix_cache_hit_rate", "swapped",
                       "spec_decode_acceptance"})
SLOW_GROUP_S = 60.0  # windows of days need not be looked through every few seconds
IN_SLOW_GROUP = frozenset({"error_burn"})


def common(poll_s: float) -> list[Entry]:
    """What every rule asks of an engine."""
    window_s = LATE_INTERVALS * poll_s
    start = f"max by {TARGET} (last_over_time(process_start_time_seconds[{span(window_s)}]))"
    counters = through("ttft", TARGET, lambda s: f"resets({s}[{span(YOUNG_S)}])", "_count").replace("sum by", "max by")
    return [
        Entry("tocsin:waiting", through("waiting", ENGINE, last(window_s)), says="Requests that wait, each engine."),
        Entry("tocsin:awake", through("asleep", ENGINE, last(window_s)), says="0: the engine sleeps."),
        Entry("tocsin:started", f"time() - {start} and on {TARGET} tocsin:waiting", says="Seconds since its start."),
        Entry("tocsin:young", f"tocsin:started < {YOUNG_S}\nor (max by {TARGET} (changes(process_start_time_seconds"
              f"[{span(YOUNG_S)}])) > 0 and on {TARGET} tocsin:waiting)\nor ((\n{counters}\n) > 0)",
              says="(Re)started within the last 3 minutes."),
        Entry("tocsin:cold", f"tocsin:started < {COLD_S} or tocsin:young"),
    ]


def over_engines(rules: Sequence[Rule], slo: Slo, poll_s: float) -> str:
    """The rule file over raw engine metrics, and in its head which rules those cannot express, and why."""
    fast, slow = [*common(poll_s), *errors(ERRORS_S)], list[Entry]()
    cannot: dict[str, list[str]] = {}
    for rule in sorted(rules, key=lambda rule: (place(rule.number), rule.id)):
        why = unwritten(rule, slo)
        if why is not None:
            cannot.setdefault(why, []).append(f"{rule.number} {rule.id}" if rule.number else rule.id)
            continue
        ask = Ask(rule, slo, poll_s)
        entries, expr, has_s = WRITERS[rule.signal](ask)
        labels = {"rule": rule.id, "number": rule.number or "", "severity": severity_of(rule, slo),
                  "subject": SUBJECT if rule.signal in BY_ENGINE else "{{ $labels.instance }}"}
        alert = Entry(alert_name(rule.id), expr, alert=True, for_s=max(0.0, rule.for_s - has_s), keep_s=rule.keep_s,
                      labels=labels | {"engine": labels["subject"]}, annotations=texts(ask, labels["subject"]),
                      says=f"{rule.number or ''} {rule.id}".strip())
        (slow if rule.signal in IN_SLOW_GROUP else fast).extend([*entries, alert])
    lines = [*(f"{', '.join(names)}: {why}" for why, names in cannot.items()), *BEHAVIOUR]
    head = HEAD.format(
        promised="" if slo.written else UNPROMISED, poll=span(poll_s), late=f"over {span(LATE_INTERVALS * poll_s)}",
        ttft=f"{slo.ttft_p99:g} s",
        itl=f"{slo.itl_p99:g} s", e2e="" if slo.e2e_p99 is None else f", e2e p99 {slo.e2e_p99:g} s",
        availability=f"{slo.availability:.5%}".rstrip("%").rstrip("0").rstrip(".") + " %",
        cannot="\n".join(textwrap.fill(line, 116, initial_indent="# - ", subsequent_indent="#   ",
                                       break_on_hyphens=False) for line in lines))
    return (head + "groups:\n" + group("tocsin-engines", poll_s, fast)
            + group("tocsin-engines-budget", SLOW_GROUP_S, slow))


def place(number: str | None) -> tuple[int, int]:
    """The order of the catalogue: H1 to H10, then the rest by letter."""
    letter, digits = (number or "Z0")[0], (number or "Z0")[1:]
    return "HMLUKPXZ".find(letter), int(digits) if digits.isdigit() else 0


def unwritten(rule: Rule, slo: Slo) -> str | None:
    """Why raw metrics cannot express a rule; None where they can."""
    if rule.id in CANNOT:
        return CANNOT[rule.id]
    if rule.signal not in WRITERS:
        return ELSEWHERE.get((rule.number or " ")[0], "its signal has no form in PromQL yet")
    limit = rule.params.get("limit")
    if isinstance(limit, tuple) and getattr(slo, limit[1]) is None:
        return f"slo.{limit[1]} is not set"
    return None if rule.limit(slo) is not None else f"slo.{rule.slo} is not set"


def texts(ask: Ask, subject: str) -> dict[str, str]:
    """What a person reads: the number with what it counts, and what to do."""
    rule, number, share = ask.rule, "{{ $value | humanize }}", "{{ $value | humanizePercentage }}"
    limit = f"{ask.limit * 100:g} %"
    said = {
        "queue_age": f"{number} requests have waited for over {span(max(ask.limit, ask.poll_s + MARGIN_S))}",
        "kv_cache_utilization": f"{share} in use, limit {limit}",
        "preemptions": f"{number} in {span(ask.window_s)}, limit {ask.limit:g}",
        "swapped": f"{number} requests are swapped out",
        "error_rate": f"{number} errors in {span(ask.window_s)}, certainly over {limit}",
        "error_burn": f"{number} errors burn the budget of availability too fast",
        "prefix_cache_hit_rate": f"{share} of the tokens looked up, limit {limit}",
        "spec_decode_acceptance": f"{share} of the drafted tokens, limit {limit}",
        "qps_change": f"arrivals are off by {share} from the 30 minutes before",
        "engine_down": "its page is not to be had",
    }.get(rule.signal)
    if said is None:
        slow = "possibly slower" if rule.signal.endswith("possibly_slow_share") else "slower"
        said = f"{number} {slow} than {ask.slo_limit():g} s, over {limit} of all"
    return {"summary": f"{rule.id} of {subject}: {said}", "action": rule.action}


# --- over Tocsin's own metrics ----------------------------------------------------------------------------------------

OWN_HEAD = """\
# Tocsin's rules over Tocsin's own metrics (`job="tocsin"`), for Prometheus 2.42 and later: every alert as the agent
# judges it, gaps, idle engines and undecided queues included, and who watches the agent.
# Written by `tocsin rules export --format prometheus --over tocsin`.
#
# Where the agents tell Alertmanager themselves, take TocsinDown, TocsinBlind, TocsinCannotDeliver and TocsinCannotSave
# alone: else each alert comes twice.
"""
DEAD = 'up{job="tocsin"} == 0 or time() - tocsin_tick_timestamp_seconds > 60'
WATCHERS = (
    Entry("TocsinDown", DEAD, alert=True, labels={"rule": "tocsin-down", "severity": "page"}, annotations={
        "summary": "Tocsin on {{ $labels.instance }} is gone or no longer judges: nobody is paged for that node",
        "action": "systemctl status tocsin; journalctl -u tocsin"}, says="The dead-man rule."),
    Entry("TocsinBlind", "count by (job, instance, subject) (tocsin_signal_gap) > 0", alert=True, for_s=300.0,
          labels={"rule": "tocsin-blind", "severity": "ticket"}, annotations={
        "summary": "{{ $value }} signals of {{ $labels.subject }} cannot be had on {{ $labels.instance }}",
        "action": "tocsin doctor"}),
    Entry("TocsinCannotDeliver", 'sum by (job, instance, channel) (tocsin_outbox_notices{state="pending"}) > 0',
          alert=True, for_s=300.0, labels={"rule": "tocsin-cannot-deliver", "severity": "page"}, annotations={
        "summary": "{{ $value }} notices to {{ $labels.channel }} wait on {{ $labels.instance }}",
        "action": "Look at /healthz of that agent, and at the receiver"}),
    Entry("TocsinCannotSave", "tocsin_database_saved == 0", alert=True, for_s=300.0,
          labels={"rule": "tocsin-cannot-save", "severity": "ticket"}, annotations={
        "summary": "Tocsin on {{ $labels.instance }} cannot save: alerts go on, but not through a restart",
        "action": "Look at /healthz of that agent; it names the file and what its disk says"}),
)


def over_tocsin(rules: Sequence[Rule], catalogue: Mapping[str, SignalSpec]) -> str:
    """The rule file over the agent's own metrics: all rules, and the dead-man rule."""
    entries = list(WATCHERS)
    for rule in rules:
        metric = metric_name(catalogue[rule.signal])
        value = (f'{{{{ with printf "{metric}{{subject=%q,instance=%q}}" $labels.subject $labels.instance | query }}}}'
                 "{{ . | first | value | humanize }}{{ end }}")
        entries.append(Entry(
            alert_name(rule.id), f'tocsin_alert_state{{rule="{rule.id}"}} == 2', alert=True,
            labels={"number": rule.number or ""}, says=f"{rule.number or ''} {rule.id}".strip(),
            annotations={"summary": f"{rule.id} of {{{{ $labels.subject }}}} on {{{{ $labels.instance }}}}",
                         "value": value, "action": rule.action}))
    return OWN_HEAD + "groups:\n" + group("tocsin", 15.0, entries)


# --- the text ---------------------------------------------------------------------------------------------------------


def group(name: str, every_s: float, entries: Iterable[Entry]) -> str:
    """A group, each recording once; "" where there is nothing in it."""
    seen: dict[str, Entry] = {}
    for entry in entries:
        seen.setdefault(entry.name, entry)
    if not seen:
        return ""
    return f"  - name: {name}\n    interval: {span(every_s)}\n    rules:\n" + "".join(map(_text, seen.values()))


def _text(entry: Entry) -> str:
    lines = [f"      # {entry.says}"] if entry.says else []
    lines.append(f"      - {'alert' if entry.alert else 'record'}: {entry.name}")
    lines += ["        expr: |", *(f"          {line}" for line in entry.expr.splitlines())]
    lines += [f"        for: {span(entry.for_s)}"] if entry.for_s else []
    lines += [f"        keep_firing_for: {span(entry.keep_s)}"] if entry.keep_s else []
    for key, texts_ in (("labels", entry.labels), ("annotations", entry.annotations)):
        kept = [f"          {name}: {quoted_yaml(text)}" for name, text in texts_.items() if text]
        lines += [f"        {key}:", *kept] if kept else []
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A string of PromQL."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quoted_yaml(text: str) -> str:
    """A string of YAML."""
    return "'" + text.replace("'", "''") + "'"
