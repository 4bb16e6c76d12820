"""The rules: YAML files beside this module and in `rules.dirs`, laid over with `rules.override`, checked as one.

A rule is data: one comparison, one severity. What is wrong in any file is raised together as ConfigErrors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from agent.model import Op, Rule, Severity, SignalSpec, Slo
from agent.patterns import PATTERNS
from agent.strict import (
    NUMBER,
    AbsolutePath,
    ConfigErrors,
    Decoded,
    Duration,
    Fault,
    Parse,
    Places,
    PositiveDuration,
    Unfit,
    cut,
    did_you_mean,
    duration_s,
    load,
    read_text,
    share,
)

BUILTIN_DIR = Path(__file__).parent
DEFAULT_DIR = Path("/etc/tocsin/rules.d")  # need not be there
SLO_UNITS: Mapping[str, str] = {"ttft_p99": "s", "itl_p99": "s", "e2e_p99": "s", "availability": "ratio"}
# What a throughput profile does not wait for: latency of the queue, of first tokens and between tokens.
LATENCY_NUMBERS = frozenset({"H1", "H5", "H6"})
MAX_BARE_RATIO = 10.0  # `>= 85` of a ratio is a forgotten %, `> 2` may be a change by a factor


# ---- the form of a rule ----


OPS: Mapping[str, Op] = {">": ">", ">=": ">=", "<": "<", "<=": "<="}


class Fires(NamedTuple):
    """A comparison as it is written: `>= 0.5 * slo.ttft_p99` is (">=", "0.5", "ttft_p99")."""

    op: Op
    number: str  # with its unit, "" for none
    slo: str | None


def fires(text: str) -> Fires:
    """`>= 0.85`, `> 85`, `>= 250ms`, `>= 85%`, `> slo.itl_p99` or `>= 0.5 * slo.ttft_p99`. Raises Unfit."""
    match = re.fullmatch(
        r"(?P<op>>=|<=|>|<)\s*(?:(?P<number>-?[0-9.]+[a-zA-Z%]*)(?:\s*(?P<times>\*)\s*(?=slo\.))?)?(?:slo\.(?P<slo>\w+))?",
        text.strip(),
    )
    if match is None or not (match["number"] or match["slo"]) or bool(match["slo"] and match["number"]) != bool(
        match["times"]
    ):
        raise Unfit(f"{cut(text)!r} is not a comparison", 'write it as ">= 0.85", "> 250ms" or ">= 0.5 * slo.ttft_p99"')
    return Fires(OPS[match["op"]], match["number"] or "", match["slo"])


def _rule_id(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", text) or len(text) > 80:
        raise Unfit(f"{cut(text)!r} is not a rule id", "write small letters, digits and single dashes, as gpu-too-hot")
    return text


def _one_line(text: str) -> str:
    if not text.strip():
        raise Unfit("is empty", "say what a person should do")
    return " ".join(text.split())


Comparison = Annotated[Fires, Parse(fires, what='a comparison, as ">= 0.85"')]


class RuleForm(Struct, frozen=True, kw_only=True):
    """A rule as it stands in a file. `at` is its key path there."""

    id: Annotated[str, Parse(_rule_id, text=True)]
    signal: str
    fires: Comparison
    severity: Severity
    number: str | None = None
    window: PositiveDuration | None = None  # s
    min_count: int | None = None
    min_bad: int | None = None
    params: Mapping[str, Any] = {}
    for_: Duration = msgspec.field(name="for", default=0.0)  # s
    keep: Duration = 0.0  # s
    required: bool = False
    patterns: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    action: Annotated[str, Parse(_one_line, text=True)] = ""
    at: str = msgspec.field(name="_at", default="")


class RuleOverride(Struct, frozen=True, kw_only=True):
    """One of `rules.override`: what is otherwise than in the rule's file. UNSET: as there."""

    fires: Comparison | UnsetType = UNSET
    window: PositiveDuration | UnsetType = UNSET
    min_count: int | UnsetType = UNSET
    min_bad: int | UnsetType = UNSET
    params: Mapping[str, Any] | UnsetType = UNSET
    for_: Duration | UnsetType = msgspec.field(name="for", default=UNSET)
    keep: Duration | UnsetType = UNSET
    severity: Severity | UnsetType = UNSET


class XidOverride(Struct, frozen=True, kw_only=True):
    """One of `rules.xid`."""

    severity: Literal["page", "ticket", "info", "log"]


class RulesConfig(Struct, frozen=True, kw_only=True):
    """`rules` of tocsin.yaml. `places` is where its keys stand there, under their whole path (`rules.override.x`)."""

    dirs: tuple[AbsolutePath, ...] = (DEFAULT_DIR,)
    disable: tuple[str, ...] = ()
    override: Mapping[str, RuleOverride] = {}
    xid: Mapping[int, XidOverride] = {}
    places: Places = msgspec.field(name="_places", default=Places())


# ---- severity and burn, pure ----


def severity_of(rule: Rule, slo: Slo, profile: str = "latency") -> Severity:
    """The severity of a rule for a subject with these service levels: one for as long as the configuration holds.

    What nobody promised pages nobody, and an engine that runs for throughput is not woken for its latency.
    """
    if profile == "throughput" and rule.number in LATENCY_NUMBERS:
        return "info"
    if rule.needs_slo and not slo.written and rule.severity == "page":
        return "ticket"
    return rule.severity


def burn_factor(budget: float, slo_window_s: float, long_s: float) -> float:
    """How many times faster than allowed errors come when this share of the whole budget is spent in `long_s`."""
    return budget * slo_window_s / long_s


def highest_burn(availability: float) -> float:
    """The burn when every request fails: no burn rate is over it."""
    return 1 / (1 - availability)


# ---- loading ----


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules that run, in the order of their files, and what must be said of them (`notes`); `known`: every id."""

    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()


def load_rules(
    config: RulesConfig,
    slo: Slo,
    catalogue: Mapping[str, SignalSpec],
    builtin_dir: Path = BUILTIN_DIR,
    *,
    engine_slos: Mapping[str, Slo] | None = None,
) -> RuleSet:
    """Read, lay over and check all rules. Raises ConfigErrors with every fault.

    In `params`, kind "slo" becomes (factor, key of slo), or seconds for a plain duration; "pairs" becomes a tuple of
    {"budget", "long", "short", "factor"} (ratio, s, s, and the factor by `slo.window`), without those under 1.
    `engine_slos` are the engines' own service levels by name: a burn that one of them can never reach is refused too.
    """
    files, faults = _read_files(config, builtin_dir)
    entries, more = _entries(files, config)
    faults += more
    known = {entry.form.id for entry in entries}.union(*(_ids_in(read.file) for _, read in files if read.faults))
    faults += _name_faults(config, known)
    promises = {"slo": slo, **(engine_slos or {})}
    rules: list[Rule] = []
    notes: list[str] = []
    for entry in entries:
        checked = _Check(entry, catalogue, known, promises)
        rule = checked.rule()
        faults += checked.faults
        notes += checked.notes
        if rule is not None and rule.id not in config.disable:
            rules.append(rule)
    if faults:
        raise ConfigErrors(faults)
    return RuleSet(tuple(rules), tuple(notes), tuple(sorted(known & set(config.disable))), frozenset(known))


def _read_files(config: RulesConfig, builtin_dir: Path) -> tuple[list[tuple[bool, Decoded[Any]]], list[Fault]]:
    """All rule files, each with whether it is ours, and the faults of their form."""
    faults: list[Fault] = []
    folders = (builtin_dir, builtin_dir / "patterns")
    paths = [(True, path) for folder in folders for path in sorted(folder.glob("*.yaml"))]
    for index, directory in enumerate(config.dirs):
        try:
            found = sorted(path for path in directory.iterdir() if path.suffix.lower() in (".yaml", ".yml"))
        except OSError as error:
            if directory != DEFAULT_DIR or not isinstance(error, FileNotFoundError):
                message = f"{cut(str(directory))} cannot be read: {error.strerror}"
                remedy = "create the directory, or take it out of rules.dirs"
                faults.append(config.places.fault(f"rules.dirs[{index}]", message, remedy))
            continue
        paths += [(False, path) for path in found if not path.name.startswith(".")]
    files: list[tuple[bool, Decoded[Any]]] = [(ours, load(path, tuple[RuleForm, ...])) for ours, path in paths]
    for _, read in files:
        faults += read.faults
    return files, faults


def _ids_in(file: str) -> set[str]:
    """The rule ids in a file that has faults, so that those who name its rules are not blamed too."""
    text = read_text(Path(file))
    return set() if isinstance(text, Fault) else set(re.findall(r"\bid:\s*['\"]?([a-z][a-z0-9-]*)", text))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule, laid over with its override, and where each of its keys stands."""

    form: RuleForm
    file: str
    lines: Mapping[str, int]
    override: RuleOverride
    places: Places
    raw_params: Mapping[str, Any]

    def line(self, key: str = "id") -> int:
        return Places(self.file, self.lines).line(f"{self.form.at}.{key}")

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line()}"

    def fault(self, key: str, message: str, remedy: str) -> Fault:
        """A fault at one of the rule's keys: in tocsin.yaml where it is laid over there, else in the rule's file."""
        name, _, param = key.partition(".")
        over = getattr(self.override, "for_" if name == "for" else name, UNSET)
        if over is not UNSET and (not param or re.split(r"[.\[]", param)[0] in over):
            return self.places.fault(f"rules.override.{self.form.id}.{key}", message, remedy)
        return Fault(self.file, self.line(key), f"{self.form.id}.{key}", "", message, remedy)


def _entries(files: Sequence[tuple[bool, Decoded[Any]]], config: RulesConfig) -> tuple[list[_Entry], list[Fault]]:
    """Every rule once; a second one with the same id is a fault that names both places."""
    entries: dict[str, _Entry] = {}
    faults: list[Fault] = []
    builtin: set[str] = set()
    for ours, read in files:
        for form in read.value or ():
            override = config.override.get(form.id, RuleOverride())
            params = {**form.params, **(override.params if isinstance(override.params, Mapping) else {})}
            entry = _Entry(_laid_over(form, override), read.file, read.lines, override, config.places, params)
            first = entries.setdefault(form.id, entry)
            if first is entry:
                faults += _turned(entry, form.fires.op)
                builtin |= {form.id} if ours else set()
                continue
            if form.id in builtin and not ours:
                remedy = f"change it with rules.override.{form.id} in tocsin.yaml, or give this one its own id"
                message = f"the rule {form.id} is built in ({first.where})"
            else:
                message, remedy = f"the rule {form.id} stands at {first.where} already", "rename or remove one of them"
            faults.append(Fault(read.file, entry.line(), f"{form.id}.id", form.id, message, remedy))
    return list(entries.values()), faults


def _turned(entry: _Entry, op: Op) -> list[Fault]:
    """An override that would fire on what is well."""
    if entry.form.fires.op[0] == op[0]:
        return []
    message = f"{entry.form.id} fires where the number is {op}, and this turns it around"
    return [entry.fault("fires", message, f"write it with {op[0]}, or a rule of your own")]


def _laid_over(form: RuleForm, override: RuleOverride) -> RuleForm:
    changes = {
        name: value
        for name in override.__struct_fields__
        if name != "params" and (value := getattr(override, name)) is not UNSET
    }
    return msgspec.structs.replace(form, **changes)


def _name_faults(config: RulesConfig, known: set[str]) -> Iterator[Fault]:
    """Rules that are named in tocsin.yaml and are nowhere."""
    for index, rule_id in enumerate(config.disable):
        if rule_id not in known:
            message = f"the rule {cut(rule_id)} is unknown"
            yield config.places.fault(f"rules.disable[{index}]", message, did_you_mean(rule_id, known, "known rules"))
    for rule_id in config.override:
        if rule_id not in known:
            remedy = did_you_mean(rule_id, known, "known rules")
            yield config.places.fault(f"rules.override.{rule_id}", f"the rule {cut(rule_id)} is unknown", remedy)


class _Check:
    """One rule against the catalogue and the promises: collects its faults and notes."""

    def __init__(
        self, entry: _Entry, catalogue: Mapping[str, SignalSpec], known: set[str], promises: Mapping[str, Slo]
    ) -> None:
        self.entry, self.catalogue, self.known, self.promises = entry, catalogue, known, promises
        self.faults: list[Fault] = []
        self.notes: list[str] = []

    def fault(self, key: str, message: str, remedy: str) -> None:
        self.faults.append(self.entry.fault(key, message, remedy))

    def attempt(self, key: str, convert: Callable[..., Any], *args: Any) -> Any:
        """What `convert` makes of it, or None with its fault noted."""
        try:
            return convert(*args)
        except Unfit as unfit:
            self.fault(key, unfit.message, unfit.remedy)
            return None

    def rule(self) -> Rule | None:
        """The rule; None where it has a fault, or nothing left to fire on."""
        form = self.entry.form
        spec = self.catalogue.get(form.signal)
        self.check_causes()
        if spec is None:
            remedy = did_you_mean(form.signal, self.catalogue, "known signals")
            self.fault("signal", f"the signal {cut(form.signal)} is unknown", remedy)
            return None
        self.check_counts(spec)
        for index, number in enumerate(form.patterns):
            if number not in PATTERNS:
                self.fault(f"patterns[{index}]", f"there is no pattern {number}", f"write one of 1 to {max(PATTERNS)}")
        limit = self.attempt("fires", limit_of, form.fires, spec)
        params = self.params(spec)
        if self.faults or params.get("pairs") == ():
            return None
        needs_slo = form.fires.slo is not None or any(
            kind == "pairs" or (kind == "slo" and isinstance(params[name], tuple)) for name, kind in spec.params.items()
        )
        return Rule(
            id=form.id,
            signal=form.signal,
            op=form.fires.op,
            factor=limit,
            severity=form.severity,
            for_s=form.for_,
            keep_s=form.keep,
            slo=form.fires.slo,
            number=form.number,
            window_s=form.window,
            min_count=form.min_count,
            min_bad=form.min_bad,
            params=params,
            needs_slo=needs_slo,
            required=form.required,
            causes=form.causes,
            action=form.action,
            where=self.entry.where,
            patterns=form.patterns,
        )

    def check_causes(self) -> None:
        for index, cause in enumerate(self.entry.form.causes):
            if cause not in self.known:
                key = f"causes[{index}]"
                self.fault(key, f"the rule {cut(cause)} is unknown", did_you_mean(cause, self.known, "known rules"))
            elif cause == self.entry.form.id:
                self.fault(f"causes[{index}]", "a rule cannot explain itself", "remove it")

    def check_counts(self, spec: SignalSpec) -> None:
        form = self.entry.form
        if form.window is not None and not spec.windowed:
            self.fault("window", f"the signal {spec.id} has no window", "remove the key")
        for key, number in (("min_count", form.min_count), ("min_bad", form.min_bad)):
            if number is not None and not spec.counted:
                self.fault(key, f"the signal {spec.id} counts nothing", "remove the key")
            elif number is not None and number < 0:
                self.fault(key, f"{number} is below 0", "write a number from 0")

    def params(self, spec: SignalSpec) -> dict[str, Any]:
        given = self.entry.raw_params
        for name in given:
            if name not in spec.params:
                remedy = did_you_mean(name, spec.params, f"the params of {spec.id}")
                self.fault(f"params.{name}", "unknown param", remedy)
        params: dict[str, Any] = {}
        for name, kind in spec.params.items():
            if name not in given:
                self.fault("params", f"the param {name} of the signal {spec.id} is missing", f"add {name}: …")
            elif kind == "pairs":
                params[name] = self.pairs(name, given[name])
            else:
                params[name] = self.attempt(f"params.{name}", PARAMS[kind], given[name])
        return params

    def pairs(self, name: str, value: Any) -> tuple[dict[str, float], ...]:
        key = f"params.{name}"
        if not isinstance(value, tuple) or not value:
            self.fault(key, "wanted a list of pairs", "write [{budget: 2%, long: 1h, short: 5m}]")
            return ()
        kept = []
        for index, item in enumerate(value):
            pair = self.attempt(f"{key}[{index}]", burn_pair, item, self.promises["slo"])
            if pair is not None and self.is_reachable(f"{key}[{index}]", pair):
                kept.append(pair)
        if not kept and not self.faults:
            self.notes.append(f"{self.entry.where}: {self.entry.form.id} has no pair left and cannot fire: it is off")
        return tuple(kept)

    def is_reachable(self, key: str, pair: Mapping[str, float]) -> bool:
        """False where the pair is dropped; a burn that no outage can reach is a fault."""
        hours = f"{pair['long'] / 3600:g} h"
        for name, slo in self.promises.items():
            factor, most = burn_factor(pair["budget"], slo.window, pair["long"]), highest_burn(slo.availability)
            if factor >= most * (1 - 1e-9):
                whose = "slo.availability" if name == "slo" else f"the availability of {name}"
                self.fault(
                    key,
                    f"a burn of {factor:.4g} over {hours} can never be reached: with {whose} {slo.availability:.6g}"
                    f" it is at most {most:.4g}",
                    f"promise a higher availability, lower this pair's budget, or disable {self.entry.form.id}",
                )
                return True
        if pair["factor"] < 1 - 1e-9:
            self.notes.append(
                f"{self.entry.where}: {self.entry.form.id} drops its pair over {hours}: with slo.window "
                f"{self.promises['slo'].window / 86400:g} d its factor is {pair['factor']:.3g}, and a burn under 1 is "
                "within the budget"
            )
            return False
        return True


# ---- values whose meaning depends on the signal ----


def limit_of(comparison: Fires, spec: SignalSpec) -> float:
    """The factor of a comparison in the signal's unit, or before slo.*. Raises Unfit."""
    number = comparison.number
    if comparison.slo is not None:
        if comparison.slo not in SLO_UNITS:
            remedy = did_you_mean(comparison.slo, SLO_UNITS, "known in slo")
            raise Unfit(f"slo.{cut(comparison.slo)} is unknown", remedy)
        unit = SLO_UNITS[comparison.slo]
        if unit != spec.unit:
            message = f"slo.{comparison.slo} is in {unit}, the signal {spec.id} in {spec.unit}"
            raise Unfit(message, "compare with a number, or with an slo in the same unit")
        return _plain(number, "the factor before slo.*") if number else 1.0
    if spec.unit == "s":
        return 0.0 if re.fullmatch(r"0(\.0*)?", number) else duration_s(number)
    if spec.unit == "ratio" and number.endswith("%"):
        value = round(_plain(number[:-1], "a share") / 100, 12)
    else:
        value = _plain(number, f"the signal {spec.id}, in {spec.unit},")
        if spec.unit == "ratio" and (abs(value) >= MAX_BARE_RATIO or (spec.most is not None and value > spec.most)):
            raise Unfit(f"the signal {spec.id} is a ratio, and {number} is {value * 100:g} %", f"write {number}%")
    if spec.most is not None and (value > spec.most or (value == spec.most and comparison.op == ">")):
        raise Unfit(f"the signal {spec.id} is never over {'100 %' if spec.unit == 'ratio' else f'{spec.most:g}'}",
                    "write a limit that it can pass")
    return value


def _plain(number: str, what: str) -> float:
    if not re.fullmatch(r"-?" + NUMBER, number):
        digits = re.match(r"-?[0-9]+(\.[0-9]+)?", number)
        raise Unfit(f"{what} takes a plain number, not {cut(number)}", f"write {digits[0] if digits else 'a number'}")
    if not math.isfinite(float(number)):
        raise Unfit(f"{what} takes a finite number", "write a smaller one")
    return float(number)


def _as_text(value: Any, wanted: str) -> str:
    """A param as it was written."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Unfit(f"wanted {wanted}", f"write {wanted}")
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _duration(value: Any) -> float:
    return duration_s(_as_text(value, "a duration, as 30s"))


def _ratio(value: Any) -> float:
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    return share(_as_text(value, "a share, as 85%"))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unfit("wanted a number", "write a plain number, without quotes or unit")
    return value


def _source_name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Unfit("wanted the name of a source", "write the name that it has under sources: in tocsin.yaml")
    return value


def slo_param(value: Any) -> tuple[float, str] | float:
    """`slo.ttft_p99` or `1.5 * slo.e2e_p99` as (factor, key), a duration as seconds. Raises Unfit."""
    text = _as_text(value, "slo.ttft_p99, or a duration")
    match = re.fullmatch(rf"(?:{NUMBER}\s*\*\s*)?slo\.(?P<key>\w+)", text.strip())
    if match is None:
        return duration_s(text)
    timed = {key: unit for key, unit in SLO_UNITS.items() if unit == "s"}
    if match["key"] not in timed:
        raise Unfit(f"slo.{cut(match['key'])} is no time", did_you_mean(match["key"], timed, "known in slo"))
    return float(match["number"] or 1), match["key"]


def burn_pair(value: Any, slo: Slo) -> dict[str, float]:
    """{budget: 2%, long: 1h, short: 5m} as numbers, with its factor. Raises Unfit."""
    if not isinstance(value, Mapping) or set(value) != {"budget", "long", "short"}:
        raise Unfit("a pair has budget, long and short, and no other keys", "write {budget: 2%, long: 1h, short: 5m}")
    budget, long_s, short_s = _ratio(value["budget"]), _duration(value["long"]), _duration(value["short"])
    if not 0 < short_s < long_s:  # one that is longer than slo.window has a factor under 1, and is dropped
        raise Unfit("a pair's windows must rise: 0 < short < long", "write {…, long: 1h, short: 5m}")
    if budget <= 0:
        raise Unfit("a budget of 0 fires always", "write the share that may be spent, as 2%")
    return {"budget": budget, "long": long_s, "short": short_s, "factor": burn_factor(budget, slo.window, long_s)}


PARAMS: Mapping[str, Callable[[Any], Any]] = {
    "duration": _duration,
    "ratio": _ratio,
    "number": _number,
    "slo": slo_param,
    "name": _source_name,
}
