"""Prometheus text 0.0.4 / 1.0.0 and OpenMetrics 1.0 to numbers. Pure: bytes in, a Page out; no clock, no network.

A line that does not parse costs the series on that line and is told in `Page.bad`; a page that may be cut off,
compressed or no page at all raises PageError. Only the families that were asked for are looked at beyond their name.

Between scrapes of one target almost every byte stays: `Reader` remembers the last page line by line, compares it with
the new one in C, and parses only what changed. Anything unexpected is read afresh, so what it returns never depends on
what it remembers.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import compress, repeat
from operator import itemgetter, ne
from typing import NamedTuple

from agent.model import Why

ACCEPT = (
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,"
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "application/openmetrics-text;version=1.0.0;q=0.3,*/*;q=0.1"
)
"""What we tell a server that we can read. Text first: every engine writes it, and no lost `# EOF` can cost a page."""

MAX_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024
MAX_SERIES = 50_000
MAX_FAMILIES = 50_000
MAX_LINES = 500_000
MAX_BAD_LINES = 1_000  # listed one by one; of more of them only the first of each name is, so that no Gap is missed
MAX_REMEMBERED_BYTES = 2 * 1024 * 1024  # larger pages are read afresh each time: memory is a feature of ours
LATEST_AT_S = 1e10  # the year 2286; a timestamp above is in the wrong unit (milliseconds passed it in April 1970)

_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_gsum", "_gcount", "_info")
_TYPES = frozenset({"counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset", "unknown"})
_GZIP = b"\x1f\x8b"
_NUMBER_BYTES = b"0123456789.eE+-"  # float() of a text of these alone reads it exactly as Prometheus does
_OTHER_NUMBERS = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
_BLANK = b" \t\r"

_NAME = re.compile(rb"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t{]")
_DECLARES = re.compile(rb"#[ \t]++(TYPE|HELP)(?:[ \t]++|$)")
_DECLARED = re.compile(rb'(?:([a-zA-Z_:][a-zA-Z0-9_:]*+)|"([^"\\]++(?:\\.[^"\\]*+)*+)")(?:[ \t]++|$)')
_TERM = re.compile(
    r'[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|"([^"\\]*+(?:\\.[^"\\]*+)*+)")[ \t]*+'
    r'(?:=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*+)?'
)
_TOKEN = re.compile(r"[^ \t\r]++")
_SPACE = re.compile(r"[ \t]*+")
_ESCAPED = re.compile(r'\\([\\"n])')
_MILLISECONDS = re.compile(r"[+-]?[0-9]{1,19}\Z")
_NATIVE = re.compile(r"\{([ \t]*+(?:count|sum|schema)[ \t]*+:[^{}]*+)\}")
_NATIVE_FIELD = re.compile(r"[ \t]*+([a-z_]++)[ \t]*+:[ \t]*+(\[[^\]\[]*+\]|[^,\[\]{}]++)[ \t]*+(?:,|$)")


class PageError(Exception):
    """The page as a whole must not be used. `code` says which kind: Why.BAD_PAGE or Why.TOO_LARGE."""

    def __init__(self, message: str, code: Why = Why.BAD_PAGE) -> None:
        super().__init__(message)
        self.code = code


class Series(NamedTuple):
    """One value. `name` is written as on the page (`x_total`, `x_bucket`); do not change `labels`, pages share them.

    `le` and `quantile` are written as repr(float), "+Inf" for infinity. `at`: unix seconds, None where none is given.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    at: float | None


@dataclass(frozen=True, slots=True)
class NativeHistogram:
    """A histogram whose buckets follow from `schema`: one growth factor, 2 ** (2 ** -schema), between bounds.

    `positive` and `negative` are (index, count), each bucket's own count, not cumulative; empty ones are left out.
    """

    name: str
    labels: Mapping[str, str]
    count: float
    sum: float
    schema: int
    zero_threshold: float
    zero_count: float
    positive: tuple[tuple[int, float], ...]
    negative: tuple[tuple[int, float], ...]
    at: float | None

    def cumulative(self) -> tuple[tuple[float, float], ...]:
        """As (upper bound, cumulative count), rising, the last bound infinite: what a classic histogram would show."""
        base = 2.0 ** (2.0**-self.schema)
        parts = [(-(base ** (i - 1)), n) for i, n in sorted(self.negative, reverse=True)]
        parts.append((self.zero_threshold, self.zero_count))
        parts += [(base**i, n) for i, n in sorted(self.positive)]
        total, out = 0.0, []
        for upper, own in parts:
            total += own
            out.append((upper, total))
        return (*out, (math.inf, self.count))


class BadLine(NamedTuple):
    """A line that was not used. `line` counts from 1, `text` is cut to 200 characters; `name`: the metric, if known."""

    line: int
    text: str
    reason: str
    name: str | None

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}: {self.text!r}"


@dataclass(slots=True)
class Page:
    """What one page says of the families asked for, in the page's order.

    `families`: family -> type, of every family that is declared (with or without samples) or has a sample; a counter
    goes without its `_total`, an info with its `_info`. `duplicates` names series that came again (the first value
    counts), one entry a repeat. `bad_count` counts the bad lines, of which `bad` lists the first 1,000 and at least
    one of each name.
    """

    series: list[Series] = field(default_factory=list)
    families: Mapping[str, str] = field(default_factory=dict)
    bad: list[BadLine] = field(default_factory=list)
    bad_count: int = 0
    duplicates: list[str] = field(default_factory=list)
    natives: list[NativeHistogram] = field(default_factory=list)
    openmetrics: bool = False

    @property
    def error(self) -> str | None:
        """The first bad line in words, and how many more there are; None on a clean page."""
        if not self.bad:
            return None
        more = f" (and {self.bad_count - 1} more)" if self.bad_count > 1 else ""
        return f"{self.bad[0]}{more}"

    def has(self, family: str) -> bool:
        """Is the family on the page, declared or seen, whatever suffix its samples carry?"""
        return family in self.families or any(family + suffix in self.families for suffix in _SUFFIXES)


def check_length(received_bytes: int, content_length: str | None) -> None:
    """Refuse a body of another length than its header said (both before decompression): its last number may be cut."""
    if content_length is None or not content_length.strip().isdecimal():
        return
    announced_bytes = int(content_length)
    if received_bytes != announced_bytes:
        raise PageError(f"incomplete read: {received_bytes} of {announced_bytes} bytes (Content-Length) arrived")


def decode(body: bytes, content_encoding: str | None, limit_bytes: int = MAX_BYTES) -> bytes:
    """Undo Content-Encoding: none, identity or gzip. Never makes more than `limit_bytes` out of it.

    Raises:
        PageError: too large, cut off, not what the header says, or compressed without saying so.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding in {"gzip", "x-gzip"}:
        return _gunzip(body, limit_bytes)
    if encoding not in {"identity", ""}:
        raise PageError(f"Content-Encoding {encoding[:50]!r}: only gzip was asked for")
    if len(body) > limit_bytes:
        raise PageError(f"the body has {len(body)} bytes, the limit is {limit_bytes}", Why.TOO_LARGE)
    _refuse_compressed(body)
    return body


def _gunzip(body: bytes, limit_bytes: int) -> bytes:
    if not body.startswith(_GZIP):
        raise PageError(f"Content-Encoding says gzip, but the body starts with {body[:8].hex(' ') or 'nothing'}")
    parts: list[bytes] = []
    left_bytes, rest = limit_bytes, body
    while rest:  # a gzip file may have several members
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(rest, left_bytes + 1))
        except zlib.error as e:
            raise PageError(f"the gzip body is broken: {e}") from e
        left_bytes -= len(parts[-1])
        if left_bytes < 0:
            raise PageError(f"the gzip body of {len(body)} bytes holds more than {limit_bytes}", Why.TOO_LARGE)
        if not member.eof:
            raise PageError(f"incomplete read: the gzip body ends early ({len(body)} bytes arrived)")
        rest = member.unused_data.lstrip(b"\0")  # zeros may pad the end
    return b"".join(parts)


def _refuse_compressed(body: bytes) -> None:
    # No UTF-8 text holds 1f 8b, so this needs no look at what stands around it.
    # (One byte is looked for in a twentieth of the time of two, and text holds no 1f either.)
    position = body.find(_GZIP) if _GZIP[:1] in body else -1
    if position >= 0:
        line = body.count(b"\n", 0, position) + 1
        raise PageError(f"compressed or binary data without Content-Encoding (first bytes 1f 8b on line {line})")


class _Bad(Exception):  # noqa: N818  (it never leaves this module)
    """Why this line does not parse."""


def _unescape(text: str) -> str:
    if "\\" not in text:
        return sys.intern(text)
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _number(token: str, what: str) -> float:
    """What Go's strconv.ParseFloat takes, which is less than float() does; and a NaN with a sign, as C prints it."""
    if not token.strip("0123456789.eE+-"):
        try:
            value = float(token)
        except ValueError:
            value = math.inf
        if math.isfinite(value):
            return value
    else:
        sign = -1.0 if token.startswith("-") else 1.0
        other = _OTHER_NUMBERS.get(token[token[0] in "+-" :].lower())
        if other is not None:
            return sign * other
    raise _Bad(f"expected float as {what}, got {token[:50]!r}")


def _timestamp(token: str, openmetrics: bool) -> float:
    """Unix seconds: OpenMetrics writes them so, the classic format writes whole milliseconds."""
    if openmetrics:
        at = _number(token, "timestamp")
        hint = "; it looks like milliseconds, OpenMetrics wants seconds"
    else:
        if not _MILLISECONDS.match(token):
            raise _Bad(f"expected whole milliseconds as timestamp, got {token[:50]!r}")
        at = int(token) / 1000
        hint = "; it looks like microseconds or nanoseconds, the classic format wants milliseconds"
    if not -LATEST_AT_S <= at <= LATEST_AT_S:
        raise _Bad(f"timestamp {token[:50]} is out of bounds{hint if at > 0 else ''}")
    return at


def _value_and_time(rest: str, openmetrics: bool) -> tuple[float, float | None]:
    """What follows name and labels: a value, perhaps a timestamp, perhaps (OpenMetrics) an exemplar, checked only."""
    before, hash_sign, exemplar = rest.partition("#")
    tokens = _TOKEN.findall(before)
    if not 1 <= len(tokens) <= 2:
        raise _Bad(f"expected a value and perhaps a timestamp, got {rest[:50]!r}")
    if hash_sign:
        if not openmetrics:
            raise _Bad("an exemplar (#) has no place in the classic format")
        if before[-1:] not in {" ", "\t"}:
            raise _Bad("expected a space before the exemplar (#)")
        _check_exemplar(exemplar)
    return _number(tokens[0], "value"), _timestamp(tokens[1], openmetrics) if len(tokens) == 2 else None


def _check_exemplar(text: str) -> None:
    start = _SPACE.match(text)
    position = start.end() if start else 0
    if text[position : position + 1] != "{":
        raise _Bad(f"exemplar without a label set (at least {{}} is required): '#{text[:50]}'")
    name, _, end = _labels(text, position + 1)
    if name is not None:
        raise _Bad("an exemplar has no name")
    tokens = _TOKEN.findall(text, end)
    if not 1 <= len(tokens) <= 2:
        raise _Bad(f"exemplar: expected a value and perhaps a timestamp, got {text[end : end + 50]!r}")
    _number(tokens[0], "exemplar's value")
    if len(tokens) == 2:
        _timestamp(tokens[1], openmetrics=True)


def _labels(text: str, position: int) -> tuple[str | None, dict[str, str], int]:
    """The label set whose brace opened just before `position`: (quoted metric name or None, labels, where it ends)."""
    name: str | None = None
    labels: dict[str, str] = {}
    while True:
        term = _TERM.match(text, position)
        if term is None:
            start = _SPACE.match(text, position)
            position = start.end() if start else position
            if text[position : position + 1] != "}":
                raise _Bad(f"expected a label name, got {text[position : position + 30]!r}")
            return name, labels, position + 1
        bare, quoted, value = term.groups()
        if value is not None:
            label = bare or _unescape(quoted)
            _check_label(label, labels)
            labels[label if bare is None else sys.intern(bare)] = _unescape(value)
        elif bare is not None:
            raise _Bad(f'label {bare[:50]}: expected ="value", got {text[term.end() : term.end() + 30]!r}')
        elif name is not None or not quoted:
            raise _Bad("the metric name is set twice or empty")
        else:
            name = _unescape(quoted)
        position = term.end()
        following = text[position : position + 1]
        if following == "}":
            return name, labels, position + 1
        if following != ",":
            raise _Bad(f"expected , or }} after {text[term.start() : position][-50:]!r}, got {text[position:][:30]!r}")
        position += 1


def _check_label(label: str, labels: Mapping[str, str]) -> None:
    if label in labels:
        raise _Bad(f"label {label[:50]!r} is there twice")
    if label in {"", "__name__"}:
        raise _Bad(f"label name {label!r} is not allowed")


def _normalise_bounds(name: str, labels: dict[str, str]) -> None:
    """`le="1"` and `le="1.0"` are one series: formats and libraries write the same bound in different ways."""
    for label in ("le", "quantile"):
        text = labels.get(label)
        if text is None or (label == "le" and not name.endswith("_bucket")):
            continue
        try:
            bound = _number(text, label) if text else math.nan
        except _Bad:
            continue  # a label that only shares the name
        labels[label] = sys.intern({math.inf: "+Inf", -math.inf: "-Inf"}.get(bound, repr(bound)))


def _native(name: str, labels: Mapping[str, str], struct: str, at: float | None) -> NativeHistogram:
    """One native histogram from between its braces. OpenMetrics 1.x writes deltas, 2.0 each bucket's own count."""
    fields: dict[str, str] = {}
    position = 0
    while position < len(struct):
        match = _NATIVE_FIELD.match(struct, position)
        if match is None or match[1] in fields:
            raise _Bad(f"native histogram: cannot read {struct[position : position + 30]!r}")
        fields[match[1]] = match[2].strip()
        position = match.end()
    missing = [key for key in ("count", "sum", "schema", "zero_threshold", "zero_count") if key not in fields]
    if missing:
        raise _Bad(f"native histogram without {', '.join(missing)}")
    number = {key: _number(text, f"native histogram's {key}") for key, text in fields.items() if text[0] != "["}
    if number["schema"] not in range(-4, 9):
        raise _Bad(f"native histogram: schema {fields['schema'][:20]} is not supported, -4 to 8 are")
    histogram = NativeHistogram(
        name, labels, number["count"], number["sum"], int(number["schema"]), number["zero_threshold"],
        number["zero_count"], _native_buckets(fields, "positive"), _native_buckets(fields, "negative"), at,
    )  # fmt: skip
    observed = histogram.zero_count + sum(n for _, n in histogram.positive + histogram.negative)
    if observed > histogram.count:
        raise _Bad(f"native histogram: its buckets hold {observed:g}, more than its count {histogram.count:g}")
    return histogram


def _native_buckets(fields: Mapping[str, str], side: str) -> tuple[tuple[int, float], ...]:
    spans = [pair.split(":") for pair in _list(fields.get(f"{side}_spans"))]
    deltas = [_number(text, "delta") for text in _list(fields.get(f"{side}_deltas"))]
    counts = [_number(text, "bucket") for text in _list(fields.get(f"{side}_buckets"))]
    if deltas:
        total = 0.0
        counts = [total := total + delta for delta in deltas]
    indices: list[int] = []
    index = 0
    for pair in spans:
        offset, length = (int(part) if re.fullmatch("-?[0-9]{1,9}", part) else -1 for part in (*pair, "", "")[:2])
        if len(pair) != 2 or not 0 <= length <= len(counts):
            raise _Bad(f"native histogram: {side}_spans do not fit its buckets")
        index += offset
        indices += range(index, index + length)
        index += length
    if len(indices) != len(counts) or any(count < 0 for count in counts):
        raise _Bad(f"native histogram: {side}_spans do not fit its buckets")
    return tuple((i, count) for i, count in zip(indices, counts, strict=True) if count)


def _list(text: str | None) -> list[str]:
    inner = (text or "[]").strip("[]").strip()
    return [part.strip() for part in inner.split(",")] if inner else []


_NO_LINE_STARTS_SO = b"\n"  # the head of a line that may not change at all
_COMMENT_HEAD = b"#"


class _Scan:
    """One page being read from the first line to the last, without any memory of earlier ones."""

    def __init__(self, wanted: frozenset[str] | None, openmetrics: bool, max_series: int, remember: bool) -> None:
        self.wanted = wanted
        self.max_series = max_series
        self.remember = remember
        self.page = Page(openmetrics=openmetrics)
        self.families: dict[str, str] = {}
        # What to remember of it: how each line begins, and for each series the index of its line and where it is cut.
        self.heads: list[bytes] = []
        self.positions: list[int] = []
        self.cuts: list[int] = []
        self._seen: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}
        self._names: dict[bytes, tuple[str, bool]] = {}
        self._unwanted: dict[bytes, bytes] = {}  # a head to itself: equal ones share their memory
        self._bad_names: set[str] = set()
        self._eof_line = 0
        self._declared = False

    def read(self, body: bytes) -> Page:
        """Read the whole page; raises PageError."""
        unwanted, heads = self._unwanted, self.heads
        for number, raw in enumerate(io.BytesIO(body), 1):
            match = _NAME.match(raw)
            head = unwanted.get(match[0]) if match else None
            if head is not None and len(raw) <= MAX_LINE_BYTES and not self._eof_line:
                if self.remember:  # most lines by far end here
                    heads.append(head)
            else:
                self.line(number, raw.rstrip(b"\n"))
        page = self.page
        page.families = self.families
        if page.openmetrics and not self._eof_line:
            raise PageError("data does not end with # EOF: the page may be cut off")
        if not (self._declared or page.series or page.natives or any(bad.name for bad in page.bad)):
            self.remember = False
            _refuse_other_text(body, page.openmetrics)
        return page

    def line(self, number: int, line: bytes) -> None:
        """Take in one line, without its line feed."""
        match = _NAME.match(line[:MAX_LINE_BYTES])  # no name may be longer, and what is longer is not kept
        name, wanted = (self._names.get(match[1]) or self._name(match[1])) if match else (None, True)
        head = _NO_LINE_STARTS_SO
        try:
            _check_line_length(line)
            if self._eof_line:
                self._after_eof(number, line)
            elif match is None or name is None:
                head = self._other(number, line)
            elif wanted:
                head = self._sample(number, line, name, match.end(1))
            else:
                head = self._unwanted.setdefault(match[0], match[0])
        except _Bad as e:
            self._bad(BadLine(number, _shown(line), str(e), name))
        if self.remember:
            self.heads.append(head)

    def _after_eof(self, number: int, line: bytes) -> None:
        if line.strip(_BLANK):
            raise PageError(f"unexpected data after # EOF: line {number}: {_shown(line)!r}")

    def _other(self, number: int, line: bytes) -> bytes:
        """A line that does not begin with a metric name: blank, a comment, or a name in quotes within braces."""
        stripped = line.strip(_BLANK)
        if not stripped:
            return _NO_LINE_STARTS_SO
        if not stripped.startswith(b"#"):
            return self._quoted(number, line)
        if stripped == b"# EOF" and self.page.openmetrics:
            self._eof_line = number
        elif not self._declaration(stripped):
            return _COMMENT_HEAD
        return _NO_LINE_STARTS_SO

    def _bad(self, bad: BadLine) -> None:
        page = self.page
        self.remember = False
        page.bad_count += 1
        if page.bad_count <= MAX_BAD_LINES or (bad.name and bad.name not in self._bad_names):
            page.bad.append(bad)
        elif not self.families:
            raise PageError(f"no line of the page reads as a metric: {page.error}")
        if bad.name:
            self._bad_names.add(bad.name)

    def _declaration(self, line: bytes) -> bool:
        """A HELP or TYPE line makes its family known; False: only a comment."""
        start = _DECLARES.match(line)
        if start is None:
            return False
        match = _DECLARED.match(line, start.end())
        if match is None:
            raise _Bad(f"expected a metric name after {start[1].decode()}")
        name = match[1].decode() if match[1] else _unescape(_utf8(match[2]))
        kind = _utf8(line[match.end() :]) if start[1] == b"TYPE" else ""
        kind = "unknown" if kind == "untyped" else kind
        if kind and kind not in _TYPES:
            raise _Bad(f"unknown type {kind[:50]!r}")
        if start[1] == b"TYPE" and not kind:
            raise _Bad("expected a type after the metric name")
        self._declared = True
        if not self._is_created(name):
            if kind == "counter":
                self.families.pop(name, None)  # from its HELP line
                name = name.removesuffix("_total")
            elif kind == "info" and not name.endswith("_info"):
                self.families.pop(name, None)
                name += "_info"
            self._declare(name, kind)
        return True

    def _declare(self, family: str, kind: str) -> None:
        if kind or family not in self.families:
            self.families[sys.intern(family)] = sys.intern(kind or "unknown")
            if len(self.families) > MAX_FAMILIES:
                raise PageError(f"more than {MAX_FAMILIES} families", Why.TOO_LARGE)

    def _is_created(self, name: str) -> bool:
        """When a counter or histogram was born is no value; the classic format shows it as a gauge of its own."""
        if not name.endswith("_created"):
            return False
        base = name.removesuffix("_created")
        return self.families.get(base, "gauge") not in {"gauge", "unknown"} or any(
            base + suffix in self.families for suffix in _SUFFIXES
        )

    def _name(self, raw: bytes) -> tuple[str, bool]:
        name = sys.intern(raw.decode())
        found = (name, self._place(name))
        self._names[raw] = found
        return found

    def _place(self, name: str) -> bool:
        """Count a sample's name to its family; True when it was asked for."""
        created = self._is_created(name)
        if not created and not any(name.removesuffix(suffix) in self.families for suffix in ("", *_SUFFIXES)):
            self._declare(name, "")
        return not created if self.wanted is None else name in self.wanted

    def _quoted(self, number: int, line: bytes) -> bytes:
        text = _utf8(line)
        start = _SPACE.match(text)
        position = start.end() if start else 0
        if text[position : position + 1] != "{":
            raise _Bad("expected a metric name, then a value")
        name, labels, end = _labels(text, position + 1)
        if name is None:
            raise _Bad("metric name not set")
        name = sys.intern(name)
        if not self._place(name):
            return text[:end].encode()
        return self._series(number, text, name, labels, end)

    def _sample(self, number: int, line: bytes, name: str, end: int) -> bytes:
        text = _utf8(line)
        start = _SPACE.match(text, end)
        position = start.end() if start else end
        if text[position : position + 1] != "{" or _NATIVE.match(text, position):
            return self._series(number, text, name, {}, end)
        quoted, labels, end = _labels(text, position + 1)
        if quoted is not None:
            raise _Bad("the metric name is set twice")
        return self._series(number, text, name, labels, end)

    def _series(self, number: int, text: str, name: str, labels: dict[str, str], end: int) -> bytes:
        """Read the rest of a wanted line. Returns the bytes that stand for the series: all before the value."""
        start = _SPACE.match(text, end)
        end = start.end() if start else end
        page = self.page
        native = _NATIVE.match(text, end)
        if native:
            tokens = _TOKEN.findall(text[native.end() :].partition(" # ")[0])
            at = _timestamp(tokens[0], page.openmetrics) if tokens else None
            page.natives.append(_native(name, labels, native[1], at))
            self.remember = False
            return b""
        value, at = _value_and_time(text[end:], page.openmetrics)
        if "le" in labels or "quantile" in labels:
            _normalise_bounds(name, labels)
        head = text[:end].encode()
        self._add(Series(name, labels, value, at))
        self.positions.append(number - 1)
        self.cuts.append(len(head))
        return head

    def _add(self, series: Series) -> None:
        page = self.page
        if len(page.series) + len(page.duplicates) >= self.max_series:
            raise PageError(f"more than {self.max_series} samples of the families asked for", Why.TOO_LARGE)
        labels = series.labels
        told = labels.items() if all(labels.values()) else [(k, v) for k, v in labels.items() if v]  # "" is not there
        slot = self._seen.setdefault((series.name, frozenset(told)), len(page.series))
        if slot == len(page.series):
            page.series.append(series)
            return
        self.remember = False
        first = page.series[slot]
        if first.at is None or series.at is None or first.at == series.at:
            page.duplicates.append(_written(series))
        elif series.at > first.at:  # several points in time of one series: the newest is its value
            page.series[slot] = series


def _unquoted(body: bytes) -> bytes:
    """A page that its server wrote as one JSON string, as llama.cpp's builds of November 2025 did (its #17384)."""
    try:
        text = json.loads(body)
    except ValueError:
        return body
    return text.encode(errors="surrogatepass") if isinstance(text, str) else body


def _refuse_other_text(body: bytes, openmetrics: bool) -> None:
    """Nothing was asked for of this page and it declares nothing: is there one metric on it, or is it HTML, JSON, …?"""
    probe = _Scan(None, openmetrics, max_series=1, remember=False)
    for number, raw in enumerate(io.BytesIO(body), 1):
        probe.line(number, raw.rstrip(b"\n"))
        if probe.page.series or probe.page.natives:
            return
    if probe.page.bad:
        raise PageError(f"no line of the page reads as a metric: {probe.page.error}")


def _check_line_length(line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise _Bad(f"the line has {len(line)} bytes, the limit is {MAX_LINE_BYTES}")


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise _Bad(f"not UTF-8: byte {raw[e.start]:#04x} at column {e.start + 1}") from e


def _shown(line: bytes) -> str:
    return line[:800].decode(errors="replace").strip()[:200]


def _written(series: Series) -> str:
    labels = ",".join(f'{label}="{value[:50]}"' for label, value in series.labels.items())
    return f"{series.name}{{{labels}}}"[:200]


class Reader:
    """Reads one target's pages, one after another, and remembers the last to be fast. One thread at a time.

    Args:
        wanted: families to read, without suffix: `x` also takes x_total, x_bucket, x_sum, x_count. None: all.
        max_series: more samples of these than this is a PageError (TOO_LARGE).
    """

    def __init__(self, wanted: Collection[str] | None = None, max_series: int = MAX_SERIES) -> None:
        self._wanted = None if wanted is None else _suffixed(frozenset(wanted))
        self._max_series = max_series
        self._forget()

    def _forget(self) -> None:
        self._openmetrics = False
        self._lines: list[bytes] = []
        self._heads: list[bytes] = []
        self._comments: list[int] = []
        self._positions: list[int] = []
        self._cuts: list[int] = []
        self._series: list[Series] = []
        self._families: Mapping[str, str] = {}

    def read(self, body: bytes, content_type: str = "") -> Page:
        """Read one page, already decompressed (`decode`).

        Raises:
            PageError: the page may be cut off, is compressed, too large, or nothing on it reads as metrics.
        """
        openmetrics = content_type.partition(";")[0].strip().lower() == "application/openmetrics-text"
        body = body.removeprefix(b"\xef\xbb\xbf")
        if body.startswith(b'"'):
            body = _unquoted(body)
        _refuse_compressed(body)
        if len(body) > MAX_BYTES or (len(body) > MAX_LINES and body.count(b"\n") > MAX_LINES):
            self._forget()
            limits = f"{MAX_BYTES} bytes, {MAX_LINES} lines"
            raise PageError(f"the page has {len(body)} bytes; the limits are {limits}", Why.TOO_LARGE)
        if len(body) > MAX_REMEMBERED_BYTES:
            self._forget()
            return _Scan(self._wanted, openmetrics, self._max_series, remember=False).read(body)
        lines = body.split(b"\n")
        if openmetrics == self._openmetrics and len(lines) == len(self._lines) and self._take_over(body, lines):
            self._lines = lines
            return Page(series=self._series.copy(), families=self._families, openmetrics=openmetrics)
        return self._read_afresh(body, lines, openmetrics)

    def _read_afresh(self, body: bytes, lines: list[bytes], openmetrics: bool) -> Page:
        self._forget()
        scan = _Scan(self._wanted, openmetrics, self._max_series, remember=True)
        page = scan.read(body)
        if scan.remember:
            if len(scan.heads) < len(lines):  # after the last line feed
                scan.heads.append(_NO_LINE_STARTS_SO)
            self._lines, self._heads, self._positions, self._cuts = lines, scan.heads, scan.positions, scan.cuts
            self._comments = [i for i, head in enumerate(scan.heads) if head is _COMMENT_HEAD]
            self._openmetrics, self._families, self._series = openmetrics, page.families, page.series.copy()
        return page

    def _take_over(self, body: bytes, lines: list[bytes]) -> bool:
        """Read the values of the wanted lines that changed, if every changed line begins as the remembered one did.

        Loops run inside the interpreter's C here where they can. False: unsure, read the page afresh.
        """
        changed = list(map(ne, lines, self._lines))
        if not all(map(bytes.startswith, compress(lines, changed), compress(self._heads, changed))):
            return False
        if len(body) > MAX_LINE_BYTES and max(map(len, lines)) > MAX_LINE_BYTES:
            return False
        if any(_DECLARES.match(lines[i]) or lines[i].startswith(b"# EOF") for i in self._comments if changed[i]):
            return False
        fresh = [changed[i] for i in self._positions]
        found = [lines[i][cut:] for i, cut, new in zip(self._positions, self._cuts, fresh, strict=True) if new]
        try:
            values, times = _points(found, self._openmetrics)
        except (ValueError, _Bad):
            return False
        old = list(compress(self._series, fresh))
        new = map(_SERIES_OF, zip(map(itemgetter(0), old), map(itemgetter(1), old), values, times))  # noqa: B905
        for slot, series in zip(compress(range(len(fresh)), fresh), new, strict=True):
            self._series[slot] = series
        return True


_SERIES_OF = partial(tuple.__new__, Series)  # a third of the time of Series(...), for many


def _points(texts: list[bytes], openmetrics: bool) -> tuple[Iterable[float], Iterable[float | None]]:
    """Values and times in texts that follow name and labels; where all are plain numbers, as nearly always, at once."""
    if b"\n".join(texts).translate(None, _NUMBER_BYTES + b"\n"):
        points = [_value_and_time(text.decode(), openmetrics) for text in texts]
        return [value for value, _ in points], [at for _, at in points]
    values = list(map(float, texts))
    if math.inf in values or -math.inf in values:
        raise _Bad("out of a float's range")
    return values, repeat(None)


@lru_cache(4)
def _suffixed(wanted: frozenset[str]) -> frozenset[str]:
    """One set for all readers that want the same."""
    return frozenset(_with_suffixes(wanted))


def _with_suffixes(wanted: Iterable[str]) -> Iterable[str]:
    for family in wanted:
        yield family
        for suffix in _SUFFIXES:
            yield family + suffix
