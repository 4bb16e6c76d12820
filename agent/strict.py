"""Strict YAML: text -> typed values, or every fault at once, each with file:line, key and remedy.

YAML is read into nodes only (PyYAML's `compose`): what a value means is decided by the type that is wanted, from the
text as it was written. So nothing runs at minute 1350 because someone wrote 22:30 without quotes.
Values of keys that look like secrets are never printed, and URLs only without user info and query.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

T = TypeVar("T")

MAX_BYTES = 1 << 20  # of one file
MAX_VALUES = 20_000  # after aliases are followed: an alias bomb of 1 KB means 10^9 values
MAX_DEPTH = 40
MAX_FAULTS = 100
SHOWN_CHARS = 60
MAX_LISTED = 25  # known words in one remedy

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 10 x faster where libyaml is built in
_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")
)
_SECRET = r"(?:token|secret|passw(?:or)?d|passphrase|(?:api|routing|private|access|auth)_?key|credentials?|authorization|bearer)"  # noqa: E501, S105
_INLINE_SECRET = re.compile(rf"(?:^|[_-]){_SECRET}$", re.IGNORECASE)  # a value that must not stand in the file
_HIDDEN = re.compile(rf"{_SECRET}|webhook|dsn|_file\b|_env\b", re.IGNORECASE)  # a value that is not printed
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?")
_TIME = re.compile(r"[0-9]{1,3}(?::[0-9]{2})+(?:\.[0-9]*)?")
_TRUTH: Mapping[str, bool] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in one file. `line` 0: the file as a whole; `value` is cut, "" where it may be secret."""

    file: str
    line: int
    key: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        what = f"{self.key}: {self.message}" if self.key else self.message
        return f"{place}: {what}; {self.remedy}" if self.remedy else f"{place}: {what}"


class ConfigErrors(Exception):  # noqa: N818  (it carries many)
    """All that is wrong in the configuration, in the order of file and line."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults, key=lambda fault: (fault.file, fault.line)))
        super().__init__("\n".join(str(fault) for fault in self.faults))


class Unfit(Exception):  # noqa: N818  (it says what the value is)
    """A value is not what is wanted: `message` says why, `remedy` what to write instead."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Parse:
    """In `Annotated[T, Parse(f)]`: f turns the text as written into T, or raises Unfit.

    `text`: wanted is text, so an unquoted 22:30, NO or 012 is refused first, unless it is one of `words`.
    """

    to: Callable[[str], Any]
    text: bool = False
    words: tuple[str, ...] = ()
    what: str = "one value"  # in words, with an example


class Places(msgspec.Struct, frozen=True):
    """Where each key path of a file stands, for checks that come after reading it."""

    file: str = ""
    lines: Mapping[str, int] = {}

    def line(self, key: str) -> int:
        """The line of a key path, or of the nearest path around it that is written; 0 for none."""
        while key and key not in self.lines:
            key = re.sub(r"(?:(?:\.|^)[^.\[\]]*|\[[0-9]+\])$", "", key)
        return self.lines.get(key, 0)

    def fault(self, key: str, message: str, remedy: str, value: str = "") -> Fault:
        """A fault at a key path."""
        return Fault(self.file, self.line(key), key, value, message, remedy)


@dataclass(frozen=True, slots=True)
class Decoded(Generic[T]):
    """A file's value (None: too broken to have one), its faults, and the line of each key path, for later checks."""

    file: str
    value: T | None
    faults: tuple[Fault, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)


# ---- what is shown of a value ----


def without_secrets(text: str) -> str:
    """The text with user info and query cut out of every URL in it. Takes linear time: a file may be one long word."""
    text = re.sub(r"(?<=\w://)[^/\s@]*@", "…@", text)
    return re.sub(r"\S+", lambda word: _without_query(word[0]), text)


def _without_query(word: str) -> str:
    scheme = re.search(r"\w://", word)
    query = re.compile(r"[?#]").search(word, scheme.end()) if scheme else None
    return f"{word[: query.start()]}?…" if query else word


def cut(text: str) -> str:
    """The text as a message may show it: one line, short, URLs without user info and query."""
    text = without_secrets(text)
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant; None where none is near."""
    import difflib  # only a faulty file pays for it

    plain = {name.lower().replace("-", "_"): name for name in known}
    meant = word.lower().replace("-", "_")
    begun = [name for name in plain if len(meant) > 2 and name.startswith(meant)]  # half a name is nearer than another
    found = begun if len(begun) == 1 else difflib.get_close_matches(meant, plain, 1, 0.6)
    return plain[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], what: str = "known") -> str:
    """A remedy for an unknown word: the nearest known one, else the list."""
    names = sorted(known)
    near = nearest(word, names)
    if near:
        return f"did you mean {near}?"
    if len(names) > MAX_LISTED:
        return f"none of the {len(names)} {what} is near; `tocsin rules list` shows them"
    return f"{what}: {', '.join(names) or 'none'}"


# ---- quantities ----

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LIKELY_UNIT = {"sec": "s", "secs": "s", "second": "s", "seconds": "s", "min": "m", "mins": "m", "minute": "m"}
_LIKELY_UNIT |= {"minutes": "m", "hr": "h", "hour": "h", "hours": "h", "day": "d", "days": "d", "msec": "ms"}
_LIKELY_UNIT |= {"week": "w", "weeks": "w"}
NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?)"


def duration_s(text: str) -> float:
    """`500ms 15s 5m 2h 30d` in seconds. Raises Unfit, also for a number without its unit."""
    text = text.strip()
    match = re.fullmatch(rf"{NUMBER}\s*(?P<unit>[A-Za-zµ]*)", text)
    if match is None:
        raise Unfit(f"{cut(text)!r} is not a duration", "write a number and its unit, as 500ms, 15s, 5m, 2h or 30d")
    number, unit = match["number"], match["unit"]
    if not unit:
        raise Unfit(f"missing unit in duration {number}", f"write {number}s, {number}ms or {number}m")
    if unit not in _UNITS_S or f"{number}{unit}" != text:
        right = _LIKELY_UNIT.get(unit.lower(), unit.lower())
        if right not in {*_UNITS_S, "w"}:
            raise Unfit(f"{cut(text)!r} is not a duration", "write it in ms, s, m, h or d")
        meant = f"{float(number) * 7:g}d" if right == "w" else f"{number}{right}"
        raise Unfit(f"{cut(text)!r} is not a duration", f"write {meant} (the units are ms, s, m, h, d)")
    seconds = float(number) * _UNITS_S[unit]
    if seconds > 3660 * _UNITS_S["d"]:
        raise Unfit(f"{cut(text)!r} is over ten years", "write a shorter duration")
    return seconds


def share(text: str) -> float:
    """`85%` or `0.85` as a ratio from 0 to 1. Raises Unfit, also for a bare 1, which may mean 1 % or 100 %."""
    text = text.strip()
    match = re.fullmatch(rf"{NUMBER}\s*(?P<percent>%?)", text)
    if match is None:
        raise Unfit(f"{cut(text)!r} is not a share", "write 85% or 0.85")
    number = match["number"]
    value = round(float(number) / 100, 12) if match["percent"] else float(number)  # 99.9% is 0.999 exactly
    if value > 1:
        meant = f"{number}%" if not match["percent"] and float(number) <= 100 else "a share from 0% to 100%"
        raise Unfit(f"{cut(text)!r} is over 100 %", f"write {meant}")
    if text == "1":
        raise Unfit("a bare 1 may mean 1 % or 100 %", "write 1% or 100%")
    return value


def size_bytes(text: str) -> float:
    """`32MiB` in bytes (B, kB, MB, GB, KiB, MiB, GiB). Raises Unfit."""
    match = re.fullmatch(rf"{NUMBER}(?P<unit>[A-Za-z]*)", text.strip())
    if match is not None and not match["unit"]:
        number = match["number"]
        raise Unfit(f"missing unit in size {number}", f"write {number}MiB, {number}KiB or {number}B")
    if match is None or match["unit"] not in _UNITS_BYTES:
        raise Unfit(f"{cut(text)!r} is not a size", "write a number and its unit, as 32MiB")
    return float(match["number"]) * _UNITS_BYTES[match["unit"]]


def rate_per_s(text: str) -> float:
    """`5/s` (or /m, /h) in events per second. Raises Unfit."""
    match = re.fullmatch(rf"{NUMBER}/(?P<unit>s|m|h)", text.strip())
    if match is None:
        number = re.match(NUMBER, text.strip())
        remedy = f"write {number['number']}/s" if number else "write 5/s, 300/m or 100/h"
        raise Unfit(f"{cut(text)!r} is not a rate", remedy)
    return float(match["number"]) / _UNITS_S[match["unit"]]


AS_DURATION, AS_SHARE = "a duration, as 30s", "a share, as 85%"


def within(to: Callable[[str], float], low: str, high: str, what: str = AS_DURATION) -> Parse:
    """A quantity with bounds, written as a person would: within(duration_s, "1s", "60s")."""
    lowest, highest = to(low), to(high)

    def bounded(text: str) -> float:
        value = to(text)
        if not lowest <= value <= highest:
            raise Unfit(f"{cut(text)} is not within {low} and {high}", f"write {low if value < lowest else high}")
        return value

    return Parse(bounded, what=what)


def above_zero(to: Callable[[str], float], what: str = AS_DURATION) -> Parse:
    """A quantity that must not be 0."""

    def positive(text: str) -> float:
        value = to(text)
        if value <= 0:
            raise Unfit(f"{cut(text)} must be over 0", "leave the key out for its default")
        return value

    return Parse(positive, what=what)


def without_variables(text: str) -> str:
    """The text. Raises Unfit, without it, where it holds a variable: as written it would be taken for the value."""
    if re.search(r"\$[({]|\{\{|^\$[A-Za-z_]+$|/\$[A-Z_]+", text):
        raise Unfit("holds a variable, and none is expanded here", "write the value itself")
    return text


def absolute_path(text: str) -> Path:
    """An absolute path. Raises Unfit, whose message does not hold the text: it may be a secret put in the wrong key."""
    without_variables(text)
    if not text.startswith("/") or "\0" in text:
        raise Unfit("is not an absolute path", "write the whole path, from /")
    return Path(text)


def env_name(text: str) -> str:
    """The name of an environment variable; in capitals, so that a secret is hardly taken for one. Raises Unfit."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,127}", text):
        raise Unfit(
            "is not the name of an environment variable",
            "write its name, in capitals, as PAGERDUTY_KEY, never the secret itself",
        )
    return text


Duration = Annotated[float, Parse(duration_s, what=AS_DURATION)]  # s
PositiveDuration = Annotated[float, above_zero(duration_s)]  # s
Share = Annotated[float, Parse(share, what=AS_SHARE)]  # ratio
Size = Annotated[float, Parse(size_bytes, what="a size, as 32MiB")]  # bytes
Rate = Annotated[float, Parse(rate_per_s, what="a rate, as 5/s")]  # 1/s
AbsolutePath = Annotated[Path, Parse(absolute_path, text=True)]
EnvName = Annotated[str, Parse(env_name, text=True)]


# ---- files and syntax ----


def read_text(path: Path) -> str | Fault:
    """A file's text, or the fault that it cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        return Fault(str(path), 0, "", "", f"cannot be read: {error.strerror}", "check the path and its permissions")
    if len(raw) > MAX_BYTES:
        return Fault(str(path), 0, "", "", "is over 1 MiB", "this is hardly the file that was meant; check the path")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Fault(str(path), line, "", "", "is not UTF-8", "save the file as UTF-8")


def load(path: Path, kind: type[T] | Any) -> Decoded[T]:
    """Read one file as `kind` (see `decode`). Never raises for what is in the file."""
    text = read_text(path)
    if isinstance(text, Fault):
        return Decoded(str(path), None, (text,))
    return decode(text, kind, str(path))


def decode(text: str, kind: type[T] | Any, file: str) -> Decoded[T]:
    """YAML text as `kind`: a msgspec.Struct, tuple[T, ...], Mapping[str, T], or one of the scalars above.

    With faults, the value holds the defaults in the faulty places, so that more can be checked; do not use it.
    """
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        return Decoded(file, None, (_syntax_fault(error, text, file),))
    reader = _Reader(file)
    value = reader.value(node, kind, "") if node is not None else reader.empty(kind)
    faults = tuple(sorted(reader.faults, key=lambda fault: fault.line))
    return Decoded(file, None if value is _BAD else value, faults, reader.lines)


# PyYAML's words -> ours and a remedy. Ours, because its own texts may quote the file, and a password may start with *.
_SYNTAX: Sequence[tuple[str, str, str]] = (
    ("another document", "holds more than one YAML document", "keep one, and remove the line `---`"),
    ("undefined alias", "a value that begins with * is an alias of nothing", "quote the value"),
    ("duplicate anchor", "the same anchor (&) is set twice", "quote a value that begins with &, or rename one"),
    ("second occurrence", "the same anchor (&) is set twice", "quote a value that begins with &, or rename one"),
    ("tab character", "a tab is used for indentation", "indent with spaces"),
    ("mapping values are not allowed", "a second `: ` in one line", "quote the value, or check the indentation"),
    ("unknown escape", "a backslash in double quotes", "use single quotes, or write the backslash twice"),
    ("nesting depth", "is nested too deeply", "check for a stray [ or {"),
    ("indicator", "the indentation does not fit the lines above", "align the keys, or the dashes, of one list"),
    ("tag", "an unquoted ! or % begins a YAML tag or directive", "quote the value"),
    ("directive", "an unquoted ! or % begins a YAML tag or directive", "quote the value"),
    ("unexpected end of stream", "a quote is opened and never closed", "close the quote"),
    ("flow", "a [ or { is opened and never closed", "close it, or quote the value"),
    ("expected ',' or", "a [ or { is opened and never closed", "close it, or quote the value"),
    ("could not find expected ':'", "a line without `key: value`", "write `key: value`, or indent it under its key"),
    ("block scalar", "an unquoted > or | begins a block of text", 'quote the value, as fires: ">= 0.85"'),
    ("cannot start any token", "a value cannot begin like this", "quote the value"),
)


def _syntax_fault(error: Exception, text: str, file: str) -> Fault:
    if isinstance(error, RecursionError):
        return Fault(file, 0, "", "", "is nested too deeply", "check for a stray [ or {")
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    line = mark.line + 1 if mark is not None else text.count("\n", 0, position) + 1 if position is not None else 1
    if position is not None:
        return Fault(file, line, "", "", "holds a control character", "remove it")
    lines = text.splitlines()
    here = lines[line - 1] if line <= len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return Fault(file, line, "", "", "a tab is used for indentation", "indent with spaces")
    said = f"{getattr(error, 'problem', '')} {getattr(error, 'context', '')}"
    for words, message, remedy in _SYNTAX:
        if words in said:
            return Fault(file, line, "", "", f"broken YAML: {message}", remedy)
    return Fault(file, line, "", "", "broken YAML", "check this line and the one before it")


# ---- nodes to values ----

_BAD: Any = object()  # there is a fault; the default takes its place


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: str
    kind: Any
    required: bool


@cache
def _fields(kind: type[msgspec.Struct]) -> Mapping[str, _Field]:
    """The fields of a Struct by the key that is written. A name that begins with _ is not a key."""
    return {
        info.encode_name: _Field(info.name, info.encode_name, info.type, info.required)
        for info in msgspec.structs.fields(kind)
        if not info.encode_name.startswith("_")
    }


def _is_plain(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style in (None, "")


Form = Literal["text", "null", "truth", "integer", "number", "odd number", "time", "date", "odd"]


def _form(node: Any) -> Form:
    """What a scalar looks like as it is written: YAML 1.1's answer, and where YAML 1.2 or a person would differ."""
    raw: str = node.value
    tag = node.tag.rpartition(":")[2]
    if not _is_plain(node):
        return "text"
    if _TIME.fullmatch(raw):
        return "time"
    if _INT.fullmatch(raw):
        return "integer"
    if _FLOAT.fullmatch(raw):
        return "number"
    if re.fullmatch(r"[-+]?0[0-9_]+|0o[0-7]+", raw):
        return "odd number"
    forms: Mapping[str, Form] = {"null": "null", "bool": "truth", "timestamp": "date", "str": "text"}
    forms = {**forms, "int": "odd number", "float": "odd number"}
    return forms.get(tag, "odd")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _Reader:
    """Walks the nodes of one file and collects what is wrong."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self.lines: dict[str, int] = {}
        self.budget = MAX_VALUES
        self.depth = 0

    def fault(self, node: Any, path: str, message: str, remedy: str = "", *, value: str | None = None) -> Any:
        if len(self.faults) < MAX_FAULTS:
            if value is None:
                value = self.shown(node, path)
            self.faults.append(Fault(self.file, node.start_mark.line + 1, path, value, message, remedy))
        return _BAD

    @staticmethod
    def shown(node: Any, path: str) -> str:
        """A scalar as a message may show it."""
        return cut(node.value) if isinstance(node, yaml.ScalarNode) and not _HIDDEN.search(path) else ""

    def found(self, node: Any, path: str) -> str:
        """What stands there, in words."""
        if isinstance(node, yaml.MappingNode):
            return "a mapping"
        if isinstance(node, yaml.SequenceNode):
            return "a list"
        form = _form(node)
        if form == "null":
            return "nothing"
        if _HIDDEN.search(path):
            return "a value that is not shown"
        shown = cut(node.value)
        words = {"text": f"the text {shown!r}", "truth": f"{shown}, a truth value", "time": f"{shown}, a time"}
        words["odd number"] = f"{shown}, a number in YAML"
        return words.get(form, f"the {form} {shown}" if form != "odd" else shown)

    @staticmethod
    def empty(kind: Any) -> Any:
        """What an empty file means."""
        return () if get_origin(kind) is tuple else {} if get_origin(kind) is Mapping else kind()

    def value(self, node: Any, kind: Any, path: str) -> Any:
        """The node as `kind`, or _BAD with a fault noted."""
        self.budget -= 1
        if self.budget <= 0 or self.depth >= MAX_DEPTH:
            if self.budget >= 0:
                self.budget = 0
                self.fault(node, path, "holds too many values", "write less, and without aliases (*)", value="")
            return _BAD
        if node.tag not in _TAGS:
            return self.fault(node, path, "an unquoted ! begins a YAML tag", "quote the value", value="")
        self.depth += 1
        try:
            return self.dispatch(node, kind, path)
        finally:
            self.depth -= 1

    def dispatch(self, node: Any, kind: Any, path: str) -> Any:
        origin = get_origin(kind)
        if kind is Any:
            return self.anything(node, path)
        if origin in (Union, types.UnionType):
            members = [m for m in get_args(kind) if m not in (type(None), msgspec.UnsetType)]
            if type(None) in get_args(kind) and isinstance(node, yaml.ScalarNode) and _form(node) == "null":
                return None
            return self.dispatch(node, members[0], path)
        if origin is Annotated:
            return self.parsed(node, get_args(kind)[1], path)
        if origin is Literal:
            return self.choice(node, get_args(kind), path)
        if origin is tuple:
            return self.sequence(node, get_args(kind)[0], path)
        if origin is Mapping:
            return self.mapping(node, get_args(kind), path)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(node, kind, path)
        scalars: Mapping[Any, Callable[[Any, str], Any]]
        scalars = {str: self.text, bool: self.truth, int: self.integer, float: self.number}
        return scalars[kind](node, path)

    # scalars

    def is_scalar(self, node: Any, path: str, wanted: str, remedy: str = "") -> bool:
        if isinstance(node, yaml.ScalarNode) and _form(node) != "null":
            return True
        if isinstance(node, yaml.ScalarNode):
            remedy = "give a value, or leave the key out for its default"
        self.fault(node, path, f"wanted {wanted}, found {self.found(node, path)}", remedy or f"write {wanted}")
        return False

    def text(self, node: Any, path: str) -> Any:
        if not self.is_scalar(node, path, "text"):
            return _BAD
        form, raw = _form(node), node.value
        if form == "text":
            return raw
        shown = "…" if _HIDDEN.search(path) else cut(raw)
        if form == "time":
            return self.fault(node, path, _time_surprise(node, shown), f'quote the time: "{shown}"')
        if form == "truth":
            return self.fault(node, path, f"{shown} without quotes is a truth value in YAML", f'quote it: "{shown}"')
        return self.fault(node, path, f"wanted text, found {self.found(node, path)}", f'quote it: "{shown}"')

    def truth(self, node: Any, path: str) -> Any:
        if not self.is_scalar(node, path, "true or false"):
            return _BAD
        if _form(node) == "truth":
            return _TRUTH[node.value.lower()]
        return self.fault(
            node, path, f"wanted true or false, found {self.found(node, path)}", "write true or false, without quotes"
        )

    def integer(self, node: Any, path: str) -> Any:
        if not self.is_scalar(node, path, "a whole number"):
            return _BAD
        if _form(node) == "integer" and len(node.value) < 19:
            return int(node.value)
        return self.fault(
            node, path, f"wanted a whole number, found {self.found(node, path)}", self.plainly(node, "a whole number")
        )

    def number(self, node: Any, path: str) -> Any:
        if not self.is_scalar(node, path, "a number"):
            return _BAD
        if _form(node) in ("integer", "number") and math.isfinite(float(node.value)):
            return float(node.value)
        return self.fault(
            node, path, f"wanted a number, found {self.found(node, path)}", self.plainly(node, "a number")
        )

    @staticmethod
    def plainly(node: Any, wanted: str) -> str:
        raw = node.value
        if _form(node) == "odd number" and re.fullmatch(r"0[0-7]+", raw):
            return f"write {int(raw, 8)} or {int(raw)}: YAML 1.1 reads it as octal, YAML 1.2 does not"
        if _form(node) == "text" and _FLOAT.fullmatch(raw):
            return f"write {wanted} without quotes"
        return f"write {wanted}, in plain decimal"

    def parsed(self, node: Any, parse: Parse, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.value in parse.words:
            return node.value
        if parse.words and isinstance(node, yaml.ScalarNode) and _form(node) == "truth":
            return self.fault(node, path, f"wanted {parse.what}, found {self.found(node, path)}", f"write {parse.what}")
        if (parse.text and self.text(node, path) is _BAD) or not self.is_scalar(node, path, parse.what):
            return _BAD
        try:
            return parse.to(node.value)
        except Unfit as unfit:
            return self.fault(node, path, unfit.message, unfit.remedy)

    def choice(self, node: Any, words: Sequence[str], path: str) -> Any:
        """One of some words; they are told apart by their text, so `off` needs no quotes here."""
        wanted = " or ".join(words) if len(words) < 3 else "one of " + ", ".join(words)
        if not self.is_scalar(node, path, wanted, f"write {wanted}"):
            return _BAD
        if node.value in words:
            return node.value
        near = nearest(node.value, words)
        remedy = f"did you mean {near}?" if near else f"write {wanted}"
        return self.fault(node, path, f"wanted {wanted}, found {self.found(node, path)}", remedy)

    # containers

    def is_empty(self, node: Any) -> bool:
        """A key whose whole content is commented out."""
        return isinstance(node, yaml.ScalarNode) and _form(node) == "null"

    def sequence(self, node: Any, kind: Any, path: str) -> Any:
        if self.is_empty(node):
            return ()
        if not isinstance(node, yaml.SequenceNode):
            found = "a mapping" if isinstance(node, yaml.MappingNode) else "a single value"
            return self.fault(
                node, path, f"wanted a list, found {found}", "write a list: [a, b], or one `- ` a line", value=""
            )
        values = []
        for index, item in enumerate(node.value):
            here = f"{path}[{index}]"
            self.lines[here] = item.start_mark.line + 1
            values.append(self.value(item, kind, here))
        return tuple(value for value in values if value is not _BAD)

    def pairs(self, node: Any, path: str) -> list[tuple[Any, Any]] | None:
        """The members of a mapping whose keys are text and stand there once; None with a fault noted."""
        if self.is_empty(node):
            return []
        if not isinstance(node, yaml.MappingNode):
            found = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            # the value is not shown: `pagerduty: <the key itself>` is an easy mistake
            self.fault(
                node, path, f"wanted keys and values, found {found}", "write `key: value` lines, indented", value=""
            )
            return None
        members, first = [], dict[str, int]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fault(key, path, "a key must be one word", "write `key: value`", value="")
                continue
            here, line = _join(path, cut(key.value)), key.start_mark.line + 1
            if key.value == "<<" and _is_plain(key):
                self.fault(key, here, "merge keys are not read", "write the keys out", value="")
            elif key.value in first:
                self.fault(key, here, f"duplicate key, first on line {first[key.value]}", "keep one of them", value="")
            else:
                first[key.value] = line
                self.lines[here] = line
                members.append((key, value))
        return members

    def key_is_text(self, key: Any, path: str) -> bool:
        form, shown = _form(key), cut(key.value)
        if form == "text":
            return True
        what = {"truth": "a truth value", "null": "nothing", "time": "a number of seconds or minutes"}
        message = f"the key {shown} is {what.get(form, 'not text')} in YAML"
        self.fault(key, path, message, f'quote it: "{shown}"', value="")
        return False

    def mapping(self, node: Any, kinds: Sequence[Any], path: str) -> Any:
        key_kind, kind = kinds
        pairs = self.pairs(node, path)
        if pairs is None:
            return _BAD
        result = {}
        for key, value in pairs:
            here = _join(path, cut(key.value))
            name: Any = _BAD
            if key_kind is int:
                name = self.integer(key, here)
            elif self.key_is_text(key, here):
                name = key.value
            if kind is Any and self.is_inline_secret(key, value, here, None):
                continue
            decoded = self.value(value, kind, here)
            if name is not _BAD and decoded is not _BAD:
                result[name] = decoded
        return result

    def struct(self, node: Any, kind: type[msgspec.Struct], path: str) -> Any:
        pairs = self.pairs(node, path)
        if pairs is None:
            return _BAD
        fields, given, bad = _fields(kind), {}, False
        for key, value in pairs:
            here, wanted = _join(path, cut(key.value)), fields.get(key.value)
            if wanted is None:
                if self.is_inline_secret(key, value, here, fields):
                    continue
                if self.is_empty(value) and not nearest(key.value, fields) and re.search("[0-9]", key.value):
                    here = _join(path, "…")  # `pagerduty: {<the key itself>}` is a mapping with a secret as its key
                self.fault(key, here, "unknown key", did_you_mean(key.value, fields, "known keys here"), value="")
                continue
            decoded = self.value(value, wanted.kind, here) if self.key_is_text(key, here) else _BAD
            if decoded is not _BAD:
                given[wanted.name] = decoded
            elif wanted.required:
                bad = True
        if "_at" in kind.__struct_encode_fields__:  # a Struct that wants to know where it stands
            given[kind.__struct_fields__[kind.__struct_encode_fields__.index("_at")]] = path
        written = {key.value for key, _ in pairs}
        missing = [name for name, wanted in fields.items() if wanted.required and name not in written]
        for name in missing:
            self.fault(node, path, f"the key {name} is missing", f"add {name}: …", value="")
        return _BAD if bad or missing else kind(**given)

    def is_inline_secret(self, key: Any, value: Any, path: str, fields: Mapping[str, _Field] | None) -> bool:
        """Refuse a secret that stands in the file itself, without showing it. `fields` None: any key is allowed."""
        name = key.value
        ways = [f"{name}_file", f"{name}_env"]
        if fields is not None:
            ways = [way for way in ways if way in fields]
        if fields is None and (not _INLINE_SECRET.search(name) or self.is_empty(value)):
            return False
        if not ways and not _INLINE_SECRET.search(name):
            return False
        remedy = " or ".join(f"{way}: {'/path' if way.endswith('_file') else 'NAME'}" for way in ways)
        self.fault(
            key,
            path,
            "a secret must not stand in the configuration",
            f"write {remedy}" if remedy else "remove it: no such key is known here",
            value="",
        )
        return True

    # whatever it is

    def anything(self, node: Any, path: str) -> Any:
        """Plain values, for keys whose form is checked later. YAML's surprises are refused here too."""
        if isinstance(node, yaml.SequenceNode):
            return self.sequence(node, Any, path)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, (str, Any), path)
        form, raw = _form(node), node.value
        if form in ("text", "date"):
            return raw
        if form == "null":
            return None
        if form == "integer":
            return self.integer(node, path)
        if form == "number":
            return self.number(node, path)
        if form == "truth" and raw.lower() in ("true", "false"):
            return raw.lower() == "true"
        if form == "odd number":
            return self.fault(
                node, path, f"{self.shown(node, path)} is not a plain number", self.plainly(node, "a number")
            )
        return self.text(node, path)


def _time_surprise(node: Any, shown: str) -> str:
    """What YAML 1.1 makes of an unquoted time."""
    if node.tag.endswith((":int", ":float")):
        total = 0.0
        for part in node.value.split(":"):
            total = total * 60 + float(part)
        return f"{shown} without quotes is the number {total:g} in YAML"
    return f"the time {shown} is without quotes"
