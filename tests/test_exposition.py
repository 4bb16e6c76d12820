"""Exposition pages as servers really send them; every expected number is from the page's text or the case, by hand."""

from __future__ import annotations

import gc
import gzip
import json
import lzma
import math
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.exposition import (
    ACCEPT,
    MAX_BYTES,
    MAX_LINE_BYTES,
    BadLine,
    Page,
    PageError,
    Reader,
    Series,
    check_length,
    decode,
)
from agent.model import Why

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4"
DATA = Path(__file__).parent / "data"
ENGINE_FAMILIES = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_success",
    "http_requests",
    "process_start_time_seconds",
]


def read(body: str | bytes, content_type: str = TEXT, wanted: list[str] | None = None) -> Page:
    return Reader(wanted).read(body.encode() if isinstance(body, str) else body, content_type)


def values(page: Page) -> dict[str, float]:
    """name{label=value,…} -> value, for pages small enough to write down."""
    return {
        f"{s.name}{{{','.join(f'{k}={v}' for k, v in s.labels.items())}}}" if s.labels else s.name: s.value
        for s in page.series
    }


def stored_page(name: str) -> str:
    return gzip.decompress((DATA / "pages" / f"{name}.txt.gz").read_bytes()).decode()


def recorded_bodies() -> list[bytes]:
    rows = lzma.decompress((DATA / "recordings" / "vllm-0.32-kv-pressure.jsonl.xz").read_bytes()).splitlines()
    return [body.encode() for body in (json.loads(row)["body"] for row in rows) if body is not None]


# ---- the public cases, by their ids


def test_c001_exemplar_without_label_set() -> None:
    """A broken exemplar costs its own bucket, by name and reason; its 5.9 is never a value nor a time."""
    body = (
        '# TYPE d histogram\nd_bucket{le="5000.0"} 3 %s5.9 1697141781.44\n'
        'd_bucket{le="+Inf"} 3\nd_count 3\nd_sum 9\n# EOF\n'
    )

    page = read(body % "# ", OPENMETRICS)

    assert values(page) == {"d_bucket{le=+Inf}": 3, "d_count": 3, "d_sum": 9}
    assert [(bad.line, bad.name) for bad in page.bad] == [(2, "d_bucket")]
    assert page.error is not None
    assert page.error.startswith("line 2: exemplar without a label set (at least {} is required)")

    page = read(body % "# {} ", OPENMETRICS)

    assert page.bad == []
    assert page.series[0] == Series("d_bucket", {"le": "5000.0"}, 3.0, None)


def test_c003_missing_eof() -> None:
    """OpenMetrics says where it ends, so a cut-off page is known as one; the classic format has no such mark."""
    with pytest.raises(PageError, match="does not end with # EOF") as refused:
        read("# TYPE m gauge\nm 1\n", OPENMETRICS)

    assert refused.value.code is Why.BAD_PAGE
    assert values(read("# TYPE m gauge\nm 1\n", TEXT)) == {"m": 1}


def test_c004_data_after_eof() -> None:
    """A proxy glued two pages together: using only the first would hide half of the truth."""
    with pytest.raises(PageError, match="unexpected data after # EOF: line 4"):
        read("# TYPE a gauge\na 1\n# EOF\n# TYPE b gauge\nb 2\n# EOF\n", OPENMETRICS)


def test_c006_escapes() -> None:
    """An escaped backslash before an n is a backslash and an n, not a line feed."""
    page = read('m{p="C:\\\\DIR\\\\n",q="say \\"hi\\"\\nbye"} 1\n')

    (series,) = page.series
    assert series.labels == {"p": "C:\\DIR\\n", "q": 'say "hi"\nbye'}
    assert len(series.labels["p"]) == 8
    assert series.value == 1


def test_c007_unescaped_quote() -> None:
    """One quote too many on one line must not blind us for the whole target, and must not go unsaid."""
    bad_line = 't_days{name="Rack 14" unit R/W",id="2"} -794'
    page = read(f't_days{{name="ok",id="1"}} 12\n{bad_line}\nt_days{{name="ok2",id="3"}} 5\n')

    assert values(page) == {"t_days{name=ok,id=1}": 12, "t_days{name=ok2,id=3}": 5}
    (bad,) = page.bad
    assert (bad.line, bad.text, bad.name) == (2, bad_line, "t_days")
    assert 'got \'unit R/W"' in str(bad)


def test_c009_interleaved_families() -> None:
    """A reader that keeps the last block of a family loses every other line here."""
    page = read('m_a {h="w"} 0 0\nm_b {h="w"} 0 0\nm_a {h="u"} 0 0\nm_b {h="u"} 0 0\n')

    assert values(page) == {"m_a{h=w}": 0, "m_b{h=w}": 0, "m_a{h=u}": 0, "m_b{h=u}": 0}
    assert {s.at for s in page.series} == {0.0}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (
            OPENMETRICS,
            '# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{model_name="m"} 1234.0\n@1.7e9\n# EOF\n',
        ),
        (
            TEXT,
            (
                '# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{model_name="m"} 1234.0\n'
                "# TYPE vllm:prompt_tokens_created gauge\n@1700000000.0\n"
            ),
        ),
        (TEXT, 'vllm:prompt_tokens_total{model_name="m"} 1234\n@1.7e9\n'),
    ],
)
@pytest.mark.parametrize("wanted", [None, ["vllm:prompt_tokens"], ["vllm:prompt_tokens_total"]])
def test_c010_created_is_no_value(content_type: str, body: str, wanted: list[str] | None) -> None:
    """When a counter was born looks like 1.7 billion tokens to who takes it for a second value."""
    page = read(body.replace("@", 'vllm:prompt_tokens_created{model_name="m"} '), content_type, wanted)

    assert values(page) == {"vllm:prompt_tokens_total{model_name=m}": 1234}
    assert page.has("vllm:prompt_tokens")
    assert not any("created" in family for family in page.families)


def test_a_gauge_that_is_called_created() -> None:
    """kube_pod_created is a value of its own: nothing else is called kube_pod."""
    body = "# TYPE kube_pod_created gauge\nkube_pod_created 1.7e9\n"

    assert values(read(body)) == values(read(body, wanted=["kube_pod_created"])) == {"kube_pod_created": 1.7e9}


def test_c012_timestamps() -> None:
    """Milliseconds in one format, seconds in the other; mixed up they say 1970 or the year 57081."""
    (a,) = read("m 1 1739184970553\n").series
    (b,) = read("# TYPE m gauge\nm 1 1739184970.553\n# EOF\n", OPENMETRICS).series
    c = read("# TYPE m gauge\nm 1 1739184970553\n# EOF\n", OPENMETRICS)

    assert a.at == b.at == datetime(2025, 2, 10, 10, 56, 10, 553000, UTC).timestamp()
    assert c.series == []
    assert "out of bounds; it looks like milliseconds" in c.bad[0].reason
    assert "m" in c.families


def test_c013_byte_order_mark() -> None:
    """An editor's invisible mark at the start is no reason to see nothing; a second one is not ours to swallow."""
    assert values(read("\ufeff# HELP m x\n# TYPE m gauge\nm 1\n")) == {"m": 1}
    assert values(read("\ufeffm 1\n")) == {"m": 1}
    assert [bad.line for bad in read("\ufeff\ufeffm 1\nn 2\n").bad] == [1]


def test_c015_no_last_line_feed() -> None:
    """The last line counts without its line feed, unless the length says that something is missing."""
    assert values(read("m 1\nn 2")) == {"m": 1, "n": 2}
    check_length(7, "7")
    check_length(7, None)
    with pytest.raises(PageError, match=r"incomplete read: 7 of 8 bytes"):
        check_length(7, "8")


def test_c016_gzip_without_content_encoding() -> None:
    """Compressed bytes that nobody announced are told as such, wherever they stand; not as zero metrics."""
    body = bytes.fromhex("1f8b0800000000000003") + b"m 1\n"
    for broken in (body, b"m 1\n" + body):
        for use in (lambda b: decode(b, None), lambda b: Reader().read(b, TEXT)):
            with pytest.raises(PageError, match=r"compressed or binary data without Content-Encoding.*1f 8b"):
                use(broken)


def test_c018_accept_header() -> None:
    """Servers know `allow-utf-8`, not `allow-utf8`; whichever way they answer, we read it."""
    assert "escaping=allow-utf-8" in ACCEPT
    assert ACCEPT.count("escaping=") == ACCEPT.count("escaping=allow-utf-8")
    assert values(read('{"gpu.temp"} 1\n', "text/plain; version=1.0.0; escaping=allow-utf-8")) == {"gpu.temp": 1}
    assert values(read("gpu_temp 1\n", "text/plain; version=1.0.0; escaping=underscores")) == {"gpu_temp": 1}


def test_c019_quoted_names() -> None:
    """The name may stand in the braces, in quotes; a line without any name is an error, not a series called ''."""
    content_type = "text/plain; version=1.0.0; escaping=allow-utf-8"
    page = read('{"gpu.queue.age","node.name"="n1",unit="s"} 42\n{a="ok"} 1\n', content_type, ["gpu.queue.age"])

    assert page.series == [Series("gpu.queue.age", {"node.name": "n1", "unit": "s"}, 42.0, None)]
    assert page.bad == [BadLine(2, '{a="ok"} 1', "metric name not set", None)]
    assert read('# TYPE "gpu.age" gauge\n', content_type).families == {"gpu.age": "gauge"}
    with pytest.raises(PageError, match="metric name not set"):
        read('{a="ok"} 1\n', content_type)


def test_c021_not_available_is_not_zero() -> None:
    """An exporter that writes N/A has no number there: the others stand, this one is a bad line."""
    page = read('gpu_temp{gpu="0"} 55\ngpu_util{gpu="0"} N/A\n')

    assert values(page) == {"gpu_temp{gpu=0}": 55}
    assert page.error == """line 2: expected float as value, got 'N/A': 'gpu_util{gpu="0"} N/A'"""
    assert page.bad[0].name == "gpu_util"


def test_c022_duplicates() -> None:
    """The same series twice is neither a sum nor the last one: the first counts, and it is told."""
    page = read('# TYPE q gauge\nq{pod="a"} 7\nq{pod="a"} 9\n')

    assert values(page) == {"q{pod=a}": 7}
    assert page.duplicates == ['q{pod="a"}']
    assert read('h_bucket{le="1"} 1\nh_bucket{le="1.0"} 2\n').duplicates == ['h_bucket{le="1.0"}']
    assert read('m{a="1",b="2"} 1\nm{b="2",a="1"} 2\n').duplicates == ['m{b="2",a="1"}']
    assert read("m 1 1000\nm 2 1000\n").duplicates == ["m{}"]
    empty = read('m{a="",b="1"} 7\nm{b="1"} 9\n')  # an empty label is none (OpenMetrics)
    assert ([s.value for s in empty.series], len(empty.duplicates)) == ([7.0], 1)


def test_several_points_of_one_series() -> None:
    """OpenMetrics may tell a series at several times; its value is the newest, and no duplicate."""
    page = read("# TYPE m gauge\nm 1 100\nm 3 102\nm 2 101\n# EOF\n", OPENMETRICS)

    assert (page.series, page.duplicates) == ([Series("m", {}, 3.0, 102.0)], [])


def test_c024_native_histogram() -> None:
    """A histogram in one line: its buckets are counted from the deltas, and a p99 can be had from them."""
    body = (
        "# TYPE nh histogram\nnh {count:12,sum:30.5,schema:1,zero_threshold:0.002,zero_count:2,"
        "positive_spans:[0:2,1:1],positive_deltas:[3,1,-1]}\n# EOF\n"
    )
    page = read(body, OPENMETRICS, ["nh"])

    assert page.series == []
    assert page.bad == []
    (nh,) = page.natives
    assert (nh.name, dict(nh.labels)) == ("nh", {})
    assert (nh.count, nh.sum, nh.zero_count) == (12, 30.5, 2)
    assert list(nh.positive) == [(0, 3.0), (1, 4.0), (3, 3.0)]
    # The p99 is observation 11.88 of 12: in the last bucket, index 3, which ends at (2 ** 0.5) ** 3.
    bounds = nh.cumulative()
    assert [count for _, count in bounds] == [2, 5, 9, 12, 12]
    assert bounds[0][0] == 0.002
    assert bounds[3][0] == pytest.approx(2.828427)
    assert bounds[4][0] == math.inf


@pytest.mark.parametrize(
    "struct",
    [
        "{count:12,sum:30.5}",
        "{count:12,sum:1,schema:99,zero_threshold:0,zero_count:0}",
        "{count:1,sum:1,schema:0,zero_threshold:0,zero_count:2}",
        "{count:9,sum:1,schema:0,zero_threshold:0,zero_count:0,positive_spans:[0:2],positive_deltas:[1]}",
        "{count:9,sum:1,schema:0,zero_threshold:0,zero_count:0,positive_spans:[0:1],positive_deltas:[-1]}",
        "{count:9,sum:1,schema:0,zero_threshold:0,zero_count:0,positive_spans:[0:999999999],positive_deltas:[1]}",
        "{count:9,sum:1,schema:0,zero_threshold:0,zero_count:0,positive_spans:[x],positive_deltas:[1]}",
        "{count:9,count:9,sum:1,schema:0,zero_threshold:0,zero_count:0}",
        "{count:9;sum:1}",
    ],
)
def test_broken_native_histograms(struct: str) -> None:
    """A native histogram that contradicts itself costs its line, and no memory for the buckets that it claims."""
    page = read(f"# TYPE nh histogram\nnh {struct}\nm 1\n# EOF\n", OPENMETRICS)

    assert (page.natives, values(page), [bad.name for bad in page.bad]) == ([], {"m": 1}, ["nh"])


def test_native_histogram_below_zero_and_with_labels() -> None:
    """Negative buckets count downwards from zero; labels, timestamp and exemplars may stand around the braces."""
    page = read(
        '# TYPE nh histogram\nnh{a="b"} {count:6,sum:-3,schema:0,zero_threshold:0.5,zero_count:1,'
        'negative_spans:[1:2],negative_deltas:[2,1]} 12.5 # {trace="x"} 1\n# EOF\n',
        OPENMETRICS,
    )

    (nh,) = page.natives
    assert (nh.labels, nh.at, nh.negative) == ({"a": "b"}, 12.5, ((1, 2), (2, 3)))
    # Index 2 lies in [-4, -2), index 1 in [-2, -1), then the zero bucket.
    assert nh.cumulative() == ((-2, 3), (-1, 5), (0.5, 6), (math.inf, 6))


def test_c025_floats_of_the_format() -> None:
    """float() takes an underscore; the format does not. A bucket's bound is a number, however it is written."""
    page = read("foo 1_2\nbar 3\n")
    assert values(page) == {"bar": 3}
    assert [bad.name for bad in page.bad] == ["foo"]

    reader = Reader()
    before = reader.read(b'h_bucket{le="1"} 5\n', TEXT)
    after = reader.read(b'# TYPE h histogram\nh_bucket{le="1.0"} 8\n# EOF\n', OPENMETRICS)
    assert (before.series[0].labels, after.series[0].labels) == ({"le": "1.0"}, {"le": "1.0"})


# ---- more of their kind


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("+5", 5.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1E3", 1000.0),
        ("2.5e-3", 0.0025),
        ("Inf", math.inf),
        ("+INF", math.inf),
        ("-inf", -math.inf),
        ("infinity", math.inf),
    ],
)
def test_numbers(text: str, value: float) -> None:
    """What Prometheus's own reader takes (tried with promtool 2.42 check metrics)."""
    assert values(read(f"m {text}\n")) == {"m": value}


@pytest.mark.parametrize("text", ["NaN", "nan", "-nan", "+NaN"])
def test_not_a_number(text: str) -> None:
    """C prints -nan where it divides by zero; it is as much a number as NaN is."""
    (series,) = read(f"m {text}\n").series

    assert math.isnan(series.value)


@pytest.mark.parametrize(
    "text",
    ["1_2", "0x10", "0x1p3", "1e999", "-1e999", "++1", "1e", ".", "--", "1,5", "true", "٣", "inf1", "nan()", "5C"],
)
def test_no_numbers(text: str) -> None:
    """What Prometheus's own reader refuses (tried with promtool 2.42 check metrics) costs this one line."""
    for reader in (Reader(), warmed("m 1\nn 2\n")):
        page = reader.read(f"m {text}\nn 2\n".encode(), TEXT)

        assert values(page) == {"n": 2}, text
        assert [bad.line for bad in page.bad] == [1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("m{", "expected a label name"),
        ("m{} ", "expected a value"),
        ("m", "expected a metric name, then a value"),
        ("m{a} 1", 'label a: expected ="value"'),
        ("m{a=b} 1", 'label a: expected ="value"'),
        ('m{a="b} 1', 'label a: expected ="value"'),
        ('m{a="b\\"} 1', 'label a: expected ="value"'),
        ('m{a="b" 1', "expected , or }"),
        ('m{,a="b"} 1', "expected a label name"),
        ('m{a="b",,c="d"} 1', "expected a label name"),
        ('m{a="b",a="c"} 1', "'a' is there twice"),
        ('m{a:b="c"} 1', "label a: expected"),
        ('m{1a="c"} 1', "expected a label name"),
        ('m{__name__="x"} 1', "label name '__name__' is not allowed"),
        ('m{""="x"} 1', "label name '' is not allowed"),
        ('m{"x"} 1', "the metric name is set twice"),
        ('{"m","x"} 1', "the metric name is set twice"),
        ('{""} 1', "the metric name is set twice or empty"),
        ("1m 2", "expected a metric name"),
        ("m-x 2", "expected a metric name"),
        ("m 1 2.5", "expected whole milliseconds as timestamp"),
        ("m 1 NaN", "expected whole milliseconds as timestamp"),
        ("m 1 99999999999999999999999", "expected whole milliseconds as timestamp"),
        ("m 1 1739184970553000", "looks like microseconds"),
        ("m 1 2 3", "expected a value and perhaps a timestamp"),
        ('m 1 # {a="b"} 2', "an exemplar (#) has no place in the classic format"),
        ("# TYPE m nonsense", "unknown type 'nonsense'"),
        ("# TYPE m", "expected a type"),
        ("# TYPE", "expected a metric name after TYPE"),
        ("# HELP 9", "expected a metric name after HELP"),
        (b'm{a="\xff"} 1', "not UTF-8: byte 0xff at column 6"),
    ],
)
def test_bad_lines(line: str | bytes, reason: str) -> None:
    """A line that does not parse is told by number, text and reason, and its neighbours live on."""
    raw = line if isinstance(line, bytes) else line.encode()

    page = read(b"# TYPE before gauge\nbefore 1\n" + raw + b"\nafter 2\n")

    assert values(page) == {"before": 1, "after": 2}
    (bad,) = page.bad
    assert bad.line == 3
    assert reason in bad.reason
    assert len(bad.text) <= 200


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("m_total 1 # {} ", "exemplar: expected a value"),
        ("m_total 1 # {} x", "expected float as exemplar's value"),
        ("m_total 1 # {} 1 x", "expected float as timestamp"),
        ('m_total 1 # {a="b" 1', "expected , or }"),
        ('m_total 1 # {"a"} 1', "an exemplar has no name"),
        ('m_total 1# {a="b"} 1', "expected a space before the exemplar"),
        ("m_total 1 #", "exemplar without a label set"),
        ("m_total # {} 1", "expected a value"),
        ("m_total 1 NaN", "out of bounds"),
        ("m_total 1 Inf", "out of bounds"),
    ],
)
def test_bad_openmetrics_lines(line: str, reason: str) -> None:
    """A broken exemplar or timestamp costs its line, and is never read as the value."""
    page = read(f"# TYPE m counter\n{line}\n# TYPE n gauge\nn 2\n# EOF\n", OPENMETRICS)

    assert values(page) == {"n": 2}
    assert reason in page.bad[0].reason
    assert page.bad[0].name == "m_total"


def test_exemplars_and_times() -> None:
    """Exemplars with every sign that could confuse a reader in their labels; the values are those before the #."""
    page = read(
        '# TYPE m counter\nm_total{a="# {"} 1 # {t="} 9 # \\" "} 5 6.5\nm_total{a="2"} 2 100.5 # {} 7\n# EOF',
        OPENMETRICS,
    )

    assert page.bad == []
    assert page.series == [Series("m_total", {"a": "# {"}, 1.0, None), Series("m_total", {"a": "2"}, 2.0, 100.5)]


def test_line_ends_and_spaces() -> None:
    """Carriage returns, tabs and blanks between the tokens change nothing."""
    page = read('# TYPE m gauge\r\n\r\n \t m\t{ a = "b c" , d="e", }  1\t1000 \r\n  # a comment\r\nn 2\r\n\r\n')

    assert page.bad == []
    assert page.series == [Series("m", {"a": "b c", "d": "e"}, 1.0, 1.0), Series("n", {}, 2.0, None)]
    assert values(read("# TYPE m gauge\r\nm 1\r\n# EOF\r\n", OPENMETRICS)) == {"m": 1}


def test_label_values_that_look_like_lines() -> None:
    """Braces, hashes, NULs and line separators that are none are text within quotes."""
    label = "a} 7 # {b\u2028\x85\x0b\x00é,=#"

    (series,) = read(f'm{{a="{label}",le="x"}} 1\n').series

    assert series.labels == {"a": label, "le": "x"}


def test_bounds_are_numbers() -> None:
    """Bounds are written in one way, whatever the library; a label that only shares the name is left alone."""
    page = read(
        'h_bucket{le="1e-3"} 1\nh_bucket{le="+Inf"} 2\nh_bucket{le="inf"} 3\ns{quantile="0.990"} 4\n'
        'g{le="1"} 5\nh_bucket{le="wide"} 6\ns{quantile="p99"} 7\n'
    )

    assert [next(iter(s.labels.values())) for s in page.series] == ["0.001", "+Inf", "0.99", "1", "wide", "p99"]
    assert page.duplicates == ['h_bucket{le="+Inf"}']


def test_families_tell_presence() -> None:
    """A family that is declared without samples is there (zero so far); one that is neither is missing."""
    page = read(
        "# TYPE vllm:num_preemptions_total counter\n# HELP old_total x\n# TYPE old_total counter\n"
        "# TYPE vllm:iteration_tokens_total histogram\nvllm:iteration_tokens_total_sum 1\n"
        "# HELP lone text\nplain_bucket 1\n",
        wanted=["vllm:num_preemptions"],
    )

    assert dict(page.families) == {
        "vllm:num_preemptions": "counter",
        "old": "counter",
        "vllm:iteration_tokens_total": "histogram",
        "lone": "unknown",
        "plain_bucket": "unknown",
    }
    assert page.has("plain")
    assert page.has("vllm:num_preemptions")
    assert not page.has("vllm:kv_cache_usage_perc")


def test_only_what_was_asked_for() -> None:
    """A wanted family takes its suffixes along; faults of lines that nobody asked for are nobody's gap."""
    page = read(
        'a_total 1\na 2\na_bucket{le="1"} 3\na_sum 4\na_count 5\nab 6\nb N/A\nb{x="y} 1\nxa 7\n???\n', wanted=["a"]
    )

    assert [s.value for s in page.series] == [1, 2, 3, 4, 5]
    assert [(bad.line, bad.name) for bad in page.bad] == [(10, None)]


@pytest.mark.parametrize(
    "body",
    [
        "<html>\n<body>502 Bad Gateway</body></html>\n",
        "[]\n",
        '{"error": "not found"}\n',
        "Internal Server Error\n",
        "upstream connect error or disconnect\nreset before headers\n",
        "\x00\x01\x02",
    ],
)
def test_something_else_than_metrics(body: str) -> None:
    """A proxy's error page with status 200 is a broken target, not an engine without metrics."""
    reader = Reader(["vllm:num_requests_waiting"])
    for _ in range(2):
        with pytest.raises(PageError, match="no line of the page reads as a metric: line 1") as refused:
            reader.read(body.encode(), "text/html")
        assert refused.value.code is Why.BAD_PAGE


def test_a_page_that_is_one_json_string() -> None:
    """llama.cpp's builds of November 2025 (#17384): text within quotes, and every line feed a backslash and an n."""
    text = '# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred{a="C:\\\\n"} 5\n'
    page = read(json.dumps(text), "application/json", ["llamacpp:requests_deferred"])

    assert (values(page), page.bad) == ({"llamacpp:requests_deferred{a=C:\\n}": 5.0}, [])
    for other in ('"', '"abc', json.dumps("not found")):
        with pytest.raises(PageError, match="no line of the page reads as a metric"):
            read(other, wanted=["a"])


def test_a_page_without_anything_asked_for() -> None:
    """Another exporter on the engine's port: it parses, and the families asked for are missing."""
    page = read("other 1\n", wanted=["vllm:num_requests_waiting"])

    assert (page.series, page.bad, page.has("vllm:num_requests_waiting")) == ([], [], False)
    assert read("") == Page()
    assert read("# nothing yet\n", wanted=["a"]) == Page()


# ---- bounds


def test_gzip() -> None:
    """A compressed page is read as long as it is whole and as small as it should be."""
    packed = gzip.compress(b"m 1\n")

    assert decode(packed, "gzip") == decode(packed, " GZIP ") == decode(b"m 1\n", None) == b"m 1\n"
    assert decode(packed + gzip.compress(b"n 2\n") + b"\0\0", "x-gzip") == b"m 1\nn 2\n"
    for broken in (packed[:-3], packed[:12], b"m 1\n", b"", packed[:-6] + b"xxxxxx", packed + b"rest"):
        with pytest.raises(PageError, match="gzip"):
            decode(broken, "gzip")
    with pytest.raises(PageError, match="only gzip was asked for"):
        decode(b"m 1\n", "br")
    with pytest.raises(PageError, match="without Content-Encoding"):
        Reader().read(decode(gzip.compress(packed), "gzip"), TEXT)


def test_gzip_bomb() -> None:
    """A gigabyte in a megabyte must not take our memory, whatever it would have said."""
    bomb = gzip.compress(b"# " + b"a" * (64 * 1024 * 1024), 6)
    tracemalloc.start()
    try:
        with pytest.raises(PageError, match="holds more than 1000000") as refused:
            decode(bomb, "gzip", limit_bytes=1_000_000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert refused.value.code is Why.TOO_LARGE
    assert peak_bytes < 8_000_000
    with pytest.raises(PageError, match="the limit is 3") as refused:
        decode(b"m 1\n", None, limit_bytes=3)
    assert refused.value.code is Why.TOO_LARGE


HOSTILE: list[tuple[str, Callable[[], bytes]]] = [
    ("a line of a megabyte", lambda: b'm{a="' + b"x" * 2**20 + b'"} 1\nok 1\n'),
    ("backslashes to the limit", lambda: b'm{a="' + b"\\" * (MAX_BYTES - 64) + b'"} 1\nok 1\n'),
    ("lines of backslashes", lambda: (b'm{a="' + b"\\" * 60_000 + b"\n") * 500 + b"ok 1\n"),
    ("lines of quotes", lambda: (b"m{" + b'"' * 60_000 + b"\n") * 500 + b"ok 1\n"),
    ("lines of braces", lambda: (b"m" + b"{" * 60_000 + b"\n") * 500 + b"ok 1\n"),
    ("lines of blanks", lambda: (b"m" + b" " * 60_000 + b"{\n") * 500 + b"ok 1\n"),
    ("lines of digits", lambda: (b"m " + b"9" * 60_000 + b"\n") * 500 + b"ok 1\n"),
    ("lines of hashes", lambda: (b"m 1 " + b"# {} 1 " * 9_000 + b"\n") * 500 + b"ok 1\n"),
    ("lines of labels", lambda: (b"m{" + b'a="b",' * 9_000 + b"} x\n") * 500 + b"ok 1\n"),
    ("comments to the limit", lambda: b"#" * (MAX_BYTES - 64) + b"\nok 1\n"),
    ("a name to the limit", lambda: b"m" * (MAX_BYTES - 64) + b" 1\nok 1\n"),
    ("native histograms", lambda: (b"m {count:" + b"1,a:[" * 12_000 + b"}\n") * 500 + b"ok 1\n"),
    ("half a million line feeds", lambda: b"\n" * 499_998 + b"ok 1\n"),
]


@pytest.mark.parametrize(("story", "body"), HOSTILE, ids=[story for story, _ in HOSTILE])
@pytest.mark.parametrize("content_type", [TEXT, OPENMETRICS])
def test_hostile_pages(story: str, body: Callable[[], bytes], content_type: str) -> None:
    """A page made to take our time takes seconds of CPU at the very most, and the honest line on it is still read."""
    page_bytes = body() + (b"# EOF\n" if content_type is OPENMETRICS else b"")
    started_s = time.thread_time()

    page = Reader().read(page_bytes, content_type)

    assert time.thread_time() - started_s < 10, story
    assert values(page) == {"ok": 1}
    assert len(page.bad) <= 500


def test_too_much() -> None:
    """More lines, series, families, bad lines or bytes than any engine has: the page is refused, with its reason."""
    many = b"".join(b'm{a="%d"} 1\n' % i for i in range(101))
    for reader, body, code in [
        (Reader(max_series=100), many, Why.TOO_LARGE),
        (Reader(max_series=100), b"m 1\n" * 101, Why.TOO_LARGE),
        (Reader([]), b"".join(b"m%d 1\n" % i for i in range(50_001)), Why.TOO_LARGE),
        (Reader(), b"m 1\n" * 500_001, Why.TOO_LARGE),
        (Reader(), b"m" * (MAX_BYTES + 1), Why.TOO_LARGE),
        (Reader(), b"?\n" * 1_001 + b"m 1\n", Why.BAD_PAGE),
    ]:
        with pytest.raises(PageError) as refused:
            reader.read(body, TEXT)
        assert refused.value.code is code
    assert len(Reader(max_series=101).read(many, TEXT).series) == 101


def test_bad_lines_beyond_the_list() -> None:
    """Ten thousand lines of N/A cost ten thousand series, not the others, and every metric hit is named."""
    page = read("m 1\n" + "".join(f'n{{a="{i}"}} N/A\n' for i in range(9_999)) + "late N/A\n?\n")

    assert values(page) == {"m": 1}
    assert (len(page.bad), page.bad_count) == (1_001, 10_001)
    assert page.bad[-1].name == "late"
    assert str(page.error).endswith("(and 10000 more)")


def test_a_long_label_is_read_whole() -> None:
    """Adapter lists make labels of many kilobytes; up to the limit they are read, beyond it they cost their line."""
    for length, read_whole in [(10_000, True), (MAX_LINE_BYTES - 9, True), (MAX_LINE_BYTES - 8, False)]:
        page = read(f'm{{a="{"x" * length}"}} 1\nn 2\n')

        assert len(page.series) == (2 if read_whole else 1)
        assert [(bad.name, len(bad.text)) for bad in page.bad] == ([] if read_whole else [("m", 200)])


def kept_bytes() -> int:
    """What exposition.py has allocated since tracemalloc started and still holds.

    Without blocks of a megabyte: the table of interned strings, which doubles at a time of its own choice.
    """
    gc.collect()
    mine = tracemalloc.Filter(True, "*/agent/exposition.py")
    sizes = [trace.size for trace in tracemalloc.take_snapshot().filter_traces([mine]).traces]
    return sum(size for size in sizes if size < 1_000_000)


def test_memory_of_a_reader() -> None:
    """Eight engines must fit into 64 MiB with all else: one reader remembers a few hundred KB."""
    bodies = recorded_bodies()[:8]
    tracemalloc.start()
    try:
        reader = Reader(ENGINE_FAMILIES)
        for body in bodies:
            reader.read(body, TEXT)
        kept = kept_bytes()
    finally:
        tracemalloc.stop()

    assert 50_000 < kept < 400_000


def test_what_a_reader_remembers_is_bounded() -> None:
    """A page of a new adapter's series at every scrape leaves nothing behind but the last page."""
    tracemalloc.start()
    try:
        reader = Reader(["lora"])
        sizes = {}
        for scrape in range(1, 41):
            reader.read(b"".join(b'lora{a="%d-%d"} 1\n' % (scrape, i) for i in range(200)), TEXT)
            if scrape in (5, 40):
                sizes[scrape] = kept_bytes()
    finally:
        tracemalloc.stop()

    assert sizes[40] < 1.2 * sizes[5]


# ---- what a reader remembers never shows


def warmed(*bodies: str) -> Reader:
    reader = Reader()
    for body in bodies:
        reader.read(body.encode(), TEXT)
    return reader


def outcome(reader: Reader, body: bytes, content_type: str) -> Any:
    """A page as something to compare: NaN equals NaN, a refusal is its text."""
    try:
        page = reader.read(body, content_type)
    except PageError as e:
        return (str(e), e.code)
    series = [(s.name, dict(s.labels), repr(s.value), s.at) for s in page.series]
    return (series, dict(page.families), page.bad, page.duplicates, repr(page.natives), page.openmetrics)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a 1\nb 2\n", "b 2\na 1\n"),
        ("a 1\nb 2\n", "a 1\nc 2\n"),
        ("a 1\nb 2\n", "a 1\n"),
        ("a 1\n", "a 1\na 2\n"),
        ("x 1\na 2\n", "a 1\na 2\n"),
        ("a 1\n", "a{b=\"c\"} 1\n"),
        ("a 1\n", "a  1\n"),
        ('x{b="1"} 1\n', 'xa{b="1"} 1\n'),
        ('x{b="1"} 1\n', 'x?{b="1"} 1\n'),
        ('a{b="1"} 1\n', 'a{b="1"}2 1\n'),
        ("a 1\n", "a 1 2\n"),
        ("a 1 2\n", "a 1\n"),
        ("a 1\n", "a 1e999\n"),
        ("a 1\n", "a \n"),
        ("a 1\n", "a 1\r\n"),
        ("a 1\n", "a NaN\n"),
        ("a 1\n", "a 1 # {} 2\n"),
        ("# x\na 1\n", "# y\na 1\n"),
        ("# x\na 1\n", "# TYPE a counter\na 1\n"),
        ("# x\na 1\n", "# EOF\na 1\n"),
        ("# TYPE a gauge\na 1\n", "# TYPE a counter\na 1\n"),
        ("x 1\na 1\n", "x" * (MAX_LINE_BYTES + 1) + " 1\na 1\n"),
        ("x 1\na 1\n", 'x 1' + "0" * MAX_LINE_BYTES + "\na 1\n"),
        ("a 1\n", "a 1"),
        ('{"a","b"="c"} 1\n', '{"a","b"="d"} 1\n'),
        ('a{b="1"} 1\na{b="2"} 2\n', 'a{b="1"} 1\na{b="1"} 2\n'),
        ("a 1\n", "\ufeffa 1\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content_type", [TEXT, OPENMETRICS])
def test_a_line_changes(before: str, after: str, content_type: str) -> None:
    """Lines change place, kind, unit or health between two scrapes: with and without memory we see the same."""
    eof = "# EOF\n" if content_type is OPENMETRICS else ""
    for wanted in (None, ["a"]):
        reader = Reader(wanted)
        for body in (before, after, before, after, after):
            raw = (body + eof).encode()
            assert outcome(reader, raw, content_type) == outcome(Reader(wanted), raw, content_type)


ENDS = ["", "\n", "\n# EOF\n"]
LINES = st.sampled_from(
    [
        *("# TYPE a counter", "# TYPE a_total counter", "# TYPE a histogram", "# HELP a text", "# a comment", "# EOF"),
        *("a 1", "a 2", "a 1 1000", "a N/A", "a -nan", "a 1e999", "a 1 # {} 2", 'a{x="1} 1', 'a{x="é"} 1'),
        *("a_total 1", 'a_total{x="1"} 1', 'a_total{x="1"} 2', 'a_total{x="2"} 2', 'a_total{x="1"}  3'),
        *('a_bucket{le="1"} 5', 'a_bucket{le="1.0"} 6', "a {count:2,sum:1,schema:0,zero_threshold:0,zero_count:2}"),
        *("b 1", "b 2", 'b{x="1"} N/A', '{"a",x="1"} 4', '{"b",x="1"} 4', "a_created 1.7e9", 'a_total{x="1"} 7\r'),
        *("c", "???", ""),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    pages=st.lists(
        st.tuples(st.lists(LINES, max_size=8), st.sampled_from([TEXT, OPENMETRICS]), st.sampled_from(ENDS)),
        min_size=2,
        max_size=5,
    ),
    wanted=st.sampled_from([None, ("a",), ("a", "b"), ()]),
)
def test_memory_never_shows(pages: list[tuple[list[str], str, str]], wanted: tuple[str, ...] | None) -> None:
    """Any pages in any order: a reader that saw the others gives what a fresh one gives."""
    reader = Reader(wanted)
    for lines, content_type, end in pages:
        body = ("\n".join(lines) + end).encode()
        assert outcome(reader, body, content_type) == outcome(Reader(wanted), body, content_type)


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(LINES, min_size=1, max_size=10),
    edits=st.lists(st.tuples(st.integers(0, 9), LINES | st.integers(0, 10**6)), min_size=1, max_size=8),
    wanted=st.sampled_from([None, ("a",)]),
)
def test_one_line_after_another_changes(
    lines: list[str], edits: list[tuple[int, str | int]], wanted: tuple[str, ...] | None
) -> None:
    """A live page: one line at a time gets another value, or becomes another line."""
    reader = Reader(wanted)
    for place, edit in edits:
        i = place % len(lines)
        lines[i] = edit if isinstance(edit, str) else f"{lines[i].rpartition(' ')[0]} {edit}"
        body = ("\n".join(lines) + "\n").encode()
        assert outcome(reader, body, TEXT) == outcome(Reader(wanted), body, TEXT)


SPLICES = st.tuples(
    st.integers(0, 4000),
    st.sampled_from([0, 0, 1, 2, 40]),
    st.sampled_from(
        [
            *(" ", "\n", "\r", "\t", '"', "\\", "{", "}", ",", "=", "#", "_", "1", "N/A", "NaN", "e999", "inf", ""),
            *("# TYPE ", "\n# EOF\n", "_created", "_total", " 1000", " # {} 1", "\xff", "\x1f\x8b"),
        ]
    ),
)


@settings(max_examples=150, deadline=None)
@given(edits=st.lists(SPLICES, min_size=1, max_size=8), content_type=st.sampled_from([TEXT, OPENMETRICS]))
def test_memory_never_shows_on_a_page_gone_wrong(edits: list[tuple[int, int, str]], content_type: str) -> None:
    """Bytes lost, put in or turned over anywhere in a real page: still what a fresh reader sees."""
    page = bytearray(stored_page("vllm-router-0.1.17").encode())
    wanted = ["vllm_router_retries", "vllm_router_cb_state", "vllm_router_retry_backoff_duration_seconds"]
    reader = Reader(wanted)
    for position, cut, inserted in edits:
        body = bytes(page) + (b"# EOF\n" if content_type is OPENMETRICS else b"")
        assert outcome(reader, body, content_type) == outcome(Reader(wanted), body, content_type)
        page[position : position + cut] = inserted.encode("latin-1")


def test_memory_never_shows_on_a_real_recording() -> None:
    """Five minutes of a real engine: what is remembered from scrape to scrape changes no number."""
    reader = Reader(ENGINE_FAMILIES)
    for body in recorded_bodies()[::5]:
        assert outcome(reader, body, TEXT) == outcome(Reader(ENGINE_FAMILIES), body, TEXT)


# ---- equal to prometheus_client's parsers


def theirs(families: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, float | None]]:
    """Their samples, with bounds written as numbers and without `_created`, as we promise ours."""
    out: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, float | None]] = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            for bound in ("le", "quantile"):
                if bound in labels:
                    labels[bound] = repr(float(labels[bound])).replace("inf", "+Inf")
            if not sample.name.endswith("_created"):
                at = None if sample.timestamp is None else float(sample.timestamp)
                out[sample.name, tuple(sorted(labels.items()))] = (repr(float(sample.value)), at)
    return out


def ours(page: Page) -> dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, float | None]]:
    return {(s.name, tuple(sorted(s.labels.items()))): (repr(s.value), s.at) for s in page.series}


@pytest.mark.parametrize("name", ["vllm-0.32-one-engine", "vllm-0.32-two-api-servers", "vllm-router-0.1.17"])
def test_real_pages_as_prometheus_client_reads_them(name: str) -> None:
    """Whole real pages, every series."""
    text = stored_page(name)

    page = read(text)

    assert (page.bad, page.duplicates) == ([], [])
    assert ours(page) == theirs(parse_text(text))


def test_wanted_families_of_a_real_page() -> None:
    """The numbers an engine source lives on, by hand from the page's text."""
    page = read(stored_page("vllm-0.32-one-engine"), wanted=ENGINE_FAMILIES)

    by_name = {s.name: s for s in page.series}
    assert by_name["process_start_time_seconds"].value == 1795975177.66
    assert by_name["vllm:kv_cache_usage_perc"] == Series(
        "vllm:kv_cache_usage_perc", {"engine": "0", "model_name": "tiny"}, 0.0, None
    )
    assert sum(s.name == "vllm:time_to_first_token_seconds_bucket" for s in page.series) == 23
    assert sum(s.name == "vllm:request_success_total" for s in page.series) == 5
    assert not any(s.name.startswith("vllm:e2e") for s in page.series)
    assert page.families["vllm:e2e_request_latency_seconds"] == "histogram"


NAMES = st.from_regex(r"[a-z_:][a-z0-9_:]{0,8}", fullmatch=True).filter(
    lambda n: not n.endswith(("_created", "_total", "_bucket", "_sum", "_count", "_info", "_gcount", "_gsum"))
)
LABEL_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(lambda n: n not in {"le", "quantile"})
LABEL_VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LABEL_SETS = st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=3)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**15), 10**15)


def written(labels: dict[str, str]) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    return "{" + ",".join(f'{k}="{escape(v)}"' for k, v in labels.items()) + "}" if labels else ""


def told(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """What tells series apart: an empty label is none."""
    return tuple(sorted(filter(itemgetter(1), labels.items())))


@st.composite
def pages(draw: st.DrawFn, openmetrics: bool) -> str:
    lines: list[str] = []
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        kind = draw(st.sampled_from(["gauge", "counter", "unknown" if openmetrics else "untyped"]))
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"# TYPE {name}{'' if openmetrics else suffix} {kind}")
        sets = draw(st.lists(LABEL_SETS, max_size=3, unique_by=told))
        stamped = draw(st.booleans())
        for labels in sets:
            number = draw(st.integers(0, 10**9)) if kind == "counter" else draw(NUMBERS)
            at = draw(st.integers(0, 4 * 10**9)) if stamped else None
            stamp = "" if at is None else f" {at}" if openmetrics else f" {at}123"
            with_exemplar = openmetrics and kind == "counter" and draw(st.booleans())
            exemplar = ' # {trace_id="a b"} 0.5 12.5' if with_exemplar else ""
            lines.append(f"{name}{suffix}{written(labels)} {number!r}{stamp}{exemplar}")
    return "".join(line + "\n" for line in lines) + ("# EOF\n" if openmetrics else "")


@settings(max_examples=200, deadline=None)
@given(text=pages(openmetrics=False))
def test_text_as_prometheus_client_reads_it(text: str) -> None:
    """Whatever a client library may write in the classic format."""
    page = read(text)

    assert page.bad == []
    assert ours(page) == theirs(parse_text(text))


@settings(max_examples=200, deadline=None)
@given(text=pages(openmetrics=True))
def test_openmetrics_as_prometheus_client_reads_it(text: str) -> None:
    """Whatever a client library may write in OpenMetrics."""
    try:
        expected = theirs(parse_openmetrics(text))  # type: ignore[no-untyped-call]
    except ValueError:
        return  # names that clash with each other's suffixes: not a page both accept
    page = read(text, OPENMETRICS)

    assert page.bad == []
    assert ours(page) == expected
