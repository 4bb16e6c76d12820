"""A back-test tells of a recording what was worked out apart from Tocsin (truth.json), and what would have paged."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agent.backtest import BadRecording, backtest
from tests.recordings import KV_PRESSURE, RECORDINGS, STARVED_HOST, rows, truth, unpacked

COUNTS = ("requests_finished", "preemptions", "generation_tokens", "http_2xx", "http_4xx", "http_5xx")
QUANTILES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p99_s", "queue_p99_s")


@pytest.fixture(scope="module", params=RECORDINGS)
def replayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Each recording, replayed once on the default rules."""
    name = str(request.param)
    return name, backtest([unpacked(name, tmp_path_factory.mktemp("recordings"))])


def engine_of(result: dict[str, Any]) -> dict[str, Any]:
    (facts,) = result["engines"].values()
    found: dict[str, Any] = facts
    return found


def spans(result: dict[str, Any], rule: str, *, judged: bool = True) -> list[tuple[float, float]]:
    return [(b["from_s"], b["to_s"]) for b in result["breaches"] if b["rule"] == rule and b["judged"] is judged]


def test_totals_peaks_and_quantiles_are_as_worked_out_apart(replayed: tuple[str, dict[str, Any]]) -> None:
    """Counts are exact, ratios within 0.001, quantiles within 1 % of Prometheus's."""
    name, result = replayed
    want, got = truth(name), engine_of(result)

    assert {key: got[key] for key in COUNTS} == {key: want[key] for key in COUNTS}
    assert got["kv_peak"] == pytest.approx(want["kv_peak"], abs=0.001)
    assert got["prefix_hit_ratio"] == pytest.approx(want["prefix_hit_ratio"], abs=0.001)
    assert {k: got[k] for k in QUANTILES} == pytest.approx({k: want[k] for k in QUANTILES}, rel=0.01)
    assert got["errors"] == 0  # clients that give up and bad requests are no errors of the engine


def test_spans_over_the_kv_limit_are_as_worked_out_apart(replayed: tuple[str, dict[str, Any]]) -> None:
    """Within two scrapes, and none joined over a stretch that nobody watched."""
    name, result = replayed
    want = [tuple(span) for span in truth(name)["kv_at_or_over_0.85_s"]]

    assert [pytest.approx(span, abs=2.3) for span in spans(result, "kv-cache-utilization")] == want


def test_scrapes_and_gaps_are_counted(replayed: tuple[str, dict[str, Any]]) -> None:
    """Failed scrapes are counted, and each lies inside a gap."""
    name, result = replayed
    want = truth(name)

    assert result["recording"]["scrapes"] == want["scrapes"]
    assert result["recording"]["missing"] == want["missing_scrapes"]
    assert result["recording"]["seconds"] == pytest.approx(want["seconds"], abs=0.1)
    start = rows(name)[0]["t"]
    failed = [row["t"] - start for row in rows(name) if row["body"] is None]
    assert all(any(a <= at <= b for a, b in result["gaps"]) for at in failed)
    assert (result["gaps"] == []) is (name == KV_PRESSURE)


def test_a_young_engine_is_not_judged_by_its_queue(tmp_path: Path) -> None:
    """The engine started 33 s before the recording: the queue of its first 3 minutes is shown, and pages nobody."""
    result = backtest([unpacked(KV_PRESSURE, tmp_path)])

    assert spans(result, "queue-age") == []
    (shown,) = spans(result, "queue-age", judged=False)
    assert shown == pytest.approx((91.4, 124.5), abs=2)
    assert [t for t in result["transitions"] if t["rule"] == "queue-age"] == []
    # 22 of 124 first tokens took over 0.5 s: that breaches once there are 100, and fires a minute later
    assert [t["state"] for t in result["transitions"] if t["rule"] == "ttft-p99"] == ["pending", "firing"]


def test_what_nobody_promised_pages_nobody(tmp_path: Path) -> None:
    """Without --slo the same rules are tickets, and the result says so; with one they page."""
    path = unpacked(KV_PRESSURE, tmp_path)

    unpromised, promised = backtest([path]), backtest([path], slo_overrides={"ttft_p99": "500ms"})

    assert unpromised["pages"] == []
    assert "no --slo is given" in unpromised["notes"][0]
    assert [p["rule"] for p in promised["pages"]] == ["ttft-p99"]
    assert promised["notes"] == []


def test_the_kv_cache_is_over_for_too_short_a_time_to_ticket(tmp_path: Path) -> None:
    """Over 0.85 for 34 s with dips: with `for: 60s` it goes pending and inactive and never fires."""
    result = backtest([unpacked(KV_PRESSURE, tmp_path)])

    states = {t["state"] for t in result["transitions"] if t["rule"] == "kv-cache-utilization"}
    assert states == {"pending", "inactive"}


def test_a_starved_engine_pages_for_its_queue(tmp_path: Path) -> None:
    """The truth says that requests waited for over a minute: queue-age pages, and resolves when they are gone."""
    result = backtest([unpacked(STARVED_HOST, tmp_path)], slo_overrides={"ttft_p99": "500ms"})

    states = [t["state"] for t in result["transitions"] if t["rule"] == "queue-age"]
    assert states == ["pending", "firing", "resolved"]
    assert [p["rule"] for p in result["pages"]] == ["queue-age"]


def test_it_takes_seconds(tmp_path: Path) -> None:
    """Five minutes of an engine's life are replayed in a moment."""
    path = unpacked(KV_PRESSURE, tmp_path)
    began = time.monotonic()

    backtest([path])

    assert time.monotonic() - began < 10


def test_a_recording_that_was_cut_short_gives_what_it_holds(tmp_path: Path) -> None:
    """kill -9 of the recorder leaves half a gzip stream: all whole rows count."""
    path = unpacked(KV_PRESSURE, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])

    result = backtest([path])

    assert 10 < result["recording"]["scrapes"] < 281


@pytest.mark.parametrize(("text", "said"), [
    ("", "no complete row"),
    ("not json\n", ":1: not a line of a recording"),
    ('{"t": 1, "target": "http://a:1", "body": null}\n{"target": "x"}\n', ":2: not a line of a recording"),
])
def test_what_is_no_recording_is_refused_by_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    """An error names the file, the line and what makes a recording."""
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))

    with pytest.raises(BadRecording, match=said) as error:
        backtest([path])
    assert str(path) in str(error.value)


def test_gpu_rows_are_judged_too(tmp_path: Path) -> None:
    """A recorded GPU at 91 °C for a minute: gpu-temperature fires after its 30 s."""
    path = tmp_path / "gpu.jsonl"
    gpu = {"uuid": "GPU-1", "index": 0, "name": "H200", "bdf": "0000:1b:00", "values": {"gpu_temp_c": 91.0}}
    told = [{"t": 1000.0 + 5 * i, "target": "nvml", "gpus": [gpu]} for i in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in told))

    result = backtest([path])

    hot = [t for t in result["transitions"] if t["rule"] == "gpu-temperature"]
    assert [(t["state"], t["at_s"]) for t in hot] == [("pending", 0.0), ("firing", 30.0)]
