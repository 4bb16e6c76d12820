"""A back-test tells of a recording what was worked out apart from Tocsin (truth.json), and what would have paged."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from agent.backtest import BadRecording, backtest
from agent.config import load_config
from tests.engine_pages import PAGES
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


def written(path: Path, told: list[dict[str, Any]]) -> Path:
    """These rows as a recording."""
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


def pages(*at: float, target: str = "http://e:8000", failed: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    """Scrapes of an engine whose cache is full, some of which failed."""
    def page(t: float) -> str:
        return f'vllm:kv_cache_usage_perc{{model_name="m"}} 0.93\nvllm:generation_tokens_total{{model_name="m"}} {t}\n'
    return [{"t": 1000.0 + t, "target": target, "body": None if t in failed else page(t)} for t in at]


@pytest.mark.parametrize(("story", "failed", "want"), [
    ("it was down at the end", (3, 4), [[2, 4]]),
    ("it was down at the start", (0, 1), [[0, 2]]),
    ("it never answered", (0, 1, 2, 3, 4), [[0, 4]]),
    ("it was down in between", (1,), [[0, 2]]),
    ("it was always there", (), []),
])
def test_gaps_reach_to_the_ends(tmp_path: Path, story: str, failed: tuple[float, ...], want: list[list[float]]) -> None:
    """An engine that was dead when the recording ended has a gap to its end."""
    path = written(tmp_path / "r.jsonl", pages(0, 1, 2, 3, 4, failed=failed))

    assert backtest([path])["gaps"] == want, story


def test_the_configuration_counts(tmp_path: Path) -> None:
    """Its limits, its promises, and what it calls the engine at that address: else it is another node's back-test."""
    file = tmp_path / "tocsin.yaml"
    file.write_text("""
slo: {ttft_p99: 2s}
engines: [{name: llama-70b, url: "http://e:8000", slo: {ttft_p99: 3s}}]
rules: {dirs: [], override: {kv-cache-utilization: {fires: ">= 0.95"}}}
""")
    path = written(tmp_path / "r.jsonl", pages(0, 5, 10))

    alone, configured = backtest([path]), backtest([path], config=load_config(file, {}))

    over = [{(b["rule"], b["subject"]) for b in r["breaches"] if b["rule"] != "blind"} for r in (alone, configured)]
    assert over == [{("kv-cache-utilization", "e:8000")}, set()]
    assert list(configured["engines"]) == ["llama-70b"]
    limit = {s["rule"]: s["limit"] for s in configured["signals"]}["queue-age"]
    assert limit == pytest.approx(1.5)  # half of the engine's own
    assert configured["notes"] == []


def test_what_a_recorded_gpu_could_not_tell_is_replayed_as_such(tmp_path: Path) -> None:
    """No power limit on this card (N/A), a temperature that failed: not "never told"."""
    gpu = {"uuid": "GPU-1", "index": 0, "name": "H200", "bdf": "0000:1b:00", "values": {"gpu_mem_used": 1.0},
           "gaps": {"gpu_temp_c": ["error", "nvmlDeviceGetTemperature: Unknown Error"],
                    "gpu_util": ["not_supported", "MIG does not tell it"]}}
    told = [{"t": 1000.0 + 5 * i, "target": "nvml", "gpus": [gpu]} for i in range(3)]

    result = backtest([written(tmp_path / "r.jsonl", told)])

    shown = {s["rule"]: (s["state"], s["why"]) for s in result["signals"]}
    assert shown["gpu-temperature"] == ("UNKNOWN", "nvmlDeviceGetTemperature: Unknown Error")
    assert shown["gpu-utilization"] == ("N/A", "MIG does not tell it")


def test_files_and_late_rows_are_put_in_order(tmp_path: Path) -> None:
    """Two recorders on one node, and a slow read that was written after faster ones: one life, by its times."""
    first, second = pages(0, 10, 5, 15, 20), pages(2, 7, 12, target="http://f:8000")

    result = backtest([written(tmp_path / "a.jsonl", first), written(tmp_path / "b.jsonl", second)])

    assert result["recording"] == {"scrapes": 8, "missing": 0, "seconds": 20.0, "poll_s": 5.0}
    assert sorted(result["engines"]) == ["e:8000", "f:8000"]
    assert result["engines"]["e:8000"]["generation_tokens"] == 20  # out of order it would read as a restart: 10 + 5 + …


def test_a_long_recording_does_not_stand_in_memory(tmp_path: Path) -> None:
    """8 h of pages of 100 KB are 3 GB: 10 minutes of them must not cost their 24 MB."""
    body = "x" * 40_000
    told = ({"t": 1000.0 + t, "target": "http://e:8000", "body": f"# {body}\n" + pages(t)[0]["body"]}
            for t in range(600))
    path = tmp_path / "r.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in told)
    tracemalloc.start()
    try:
        result = backtest([path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert result["recording"]["scrapes"] == 600
    assert peak < 12e6


def recording_of(era: str, folder: Path) -> Path:
    """Ten minutes of one of tests/engine_pages.py's engines, every 5 s."""
    path = folder / f"{era}.jsonl.gz"
    with gzip.open(path, "wt") as out:
        for n in range(1, 121):
            row = {"t": 1_000_000_000.0 + 5 * n, "target": "http://e:1", "body": PAGES[era](5.0 * n)}
            out.write(json.dumps(row) + "\n")
    return path


def test_every_engine_can_be_replayed_and_what_one_does_not_count_is_not_0(tmp_path: Path) -> None:
    """llama.cpp counts no requests: null, not none finished; SGLang's two engines count first tokens together, once."""
    (llama,) = backtest([recording_of("llamacpp-b10519", tmp_path)])["engines"].values()
    assert (llama["requests_finished"], llama["errors"], llama["http_2xx"], llama["kv_peak"]) == (None,) * 4
    assert llama["generation_tokens"] == pytest.approx(40 * 595)
    assert llama["prefix_hit_ratio"] == pytest.approx(0.6, abs=0.001)

    engines = backtest([recording_of("sglang-0.5.23-dp2", tmp_path)])["engines"]
    assert set(engines) == {"e:1", "e:1/0", "e:1/1"}
    assert engines["e:1"]["requests_finished"] == pytest.approx(2 * 595)
    assert engines["e:1"]["ttft_p99_s"] == pytest.approx(0.98, abs=0.05)
    assert (engines["e:1/0"]["requests_finished"], engines["e:1/0"]["kv_peak"]) == (None, 0.83)
    assert engines["e:1/0"]["generation_tokens"] == pytest.approx(20 * 595)
