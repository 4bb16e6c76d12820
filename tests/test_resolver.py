"""Names through the versions, and one target's pages to readings: what an upgrade, a restart or a bad page does."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent.engines import EngineMap, hint, load_map, parse_map
from agent.engines.pages import PageReader
from agent.exposition import PageError
from agent.model import SAMPLES, EngineFacts, Found, Gap, Sample, Why

DATA = Path(__file__).parent / "data"
ONE_ENGINE = gzip.decompress((DATA / "pages/vllm-0.32-one-engine.txt.gz").read_bytes()).decode()
TWO_SERVERS = gzip.decompress((DATA / "pages/vllm-0.32-two-api-servers.txt.gz").read_bytes()).decode()
ROUTER = gzip.decompress((DATA / "pages/vllm-router-0.1.17.txt.gz").read_bytes()).decode()
RECORDING = DATA / "recordings/vllm-0.32-kv-pressure.jsonl.xz"

Readings = list[Sample | Gap]


def read(reader: PageReader, page: str, at: float = 1.0) -> Readings:
    return reader.read(page.encode(), "text/plain; version=0.0.4", at)


def first(page: str, **kwargs: Any) -> Readings:
    return read(PageReader("t", **kwargs), page)


def samples(readings: Readings, name: str, subject: str = "t") -> dict[str, float]:
    return {r.key: r.value for r in readings if isinstance(r, Sample) and (r.name, r.subject) == (name, subject)}


def value(readings: Readings, name: str, subject: str = "t") -> float:
    found = samples(readings, name, subject)
    assert list(found) == [""], f"{name} of {subject}: {found}, {gaps(readings, name, subject)}"
    return found[""]


def gaps(readings: Readings, name: str, subject: str = "t") -> list[Gap]:
    return [r for r in readings if isinstance(r, Gap) and (r.name, r.subject) == (name, subject)]


def gap(readings: Readings, name: str, subject: str = "t") -> Gap:
    found = gaps(readings, name, subject)
    assert len(found) == 1, f"{name} of {subject}: {found}"
    assert not samples(readings, name, subject)
    return found[0]


def facts(reader: PageReader) -> EngineFacts:
    assert reader.facts is not None
    return reader.facts


def found(reader: PageReader, name: str, subject: str = "t") -> Found:
    return next(f for f in facts(reader).found if (f.name, f.subject) == (name, subject))


def small_map(quantities: dict[str, Any], **more: Any) -> EngineMap:
    """A map of another engine, as a later file may hold it."""
    base = {"kind": "other", "title": "Other", "prefix": "o:", "detect": ["o:x"]}
    return parse_map({**base, "quantities": quantities, **more})


def vllm(lines: str, started: float | None = 100.0) -> str:
    """A page with these lines, and a process start time."""
    start = "" if started is None else f"process_start_time_seconds {started}\n"
    return start + "\n".join(line.strip() for line in lines.strip().splitlines()) + "\n"


# -- public cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["gpu_cache"], ["kv_cache"], ["gpu_cache", "kv_cache"]], ids=["a", "b", "c"])
def test_c027_kv_usage_by_its_old_name_its_new_one_and_both(names: list[str]) -> None:
    """vLLM renamed gpu_cache_usage_perc: who reads one name saw no KV pressure, who adds both saw 1.66."""
    lines = {
        "gpu_cache": 'vllm:gpu_cache_usage_perc{model_name="m"} 0.83\n',
        "kv_cache": 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.83\n',
    }

    assert value(first("".join(lines[name] for name in names)), "kv_usage") == 0.83


def test_c027_without_either_name_kv_usage_is_unknown_and_not_0() -> None:
    """A page without the metric is no empty cache."""
    missing = gap(first('vllm:num_requests_running{engine="0",model_name="m"} 1\n'), "kv_usage")

    assert missing.code is Why.MISSING
    assert "vllm:kv_cache_usage_perc is not on the page" in missing.why
    assert "vllm:gpu_cache_usage_perc" in missing.why


def test_c028_itl_by_its_new_name_and_a_hint_for_the_old_one() -> None:
    """An ITL rule was empty after an upgrade: the name it read is gone, and the mean per request is another metric."""
    page = """vllm:inter_token_latency_seconds_bucket{engine="0",le="0.05"} 90
        vllm:inter_token_latency_seconds_bucket{engine="0",le="0.1"} 100
        vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 100
        vllm:inter_token_latency_seconds_count{engine="0"} 100
        vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.05"} 7"""
    engine_map = load_map("vllm")

    assert samples(first(vllm(page)), "itl") == {"0.05": 90, "0.1": 100, "+Inf": 100, "count": 100}
    assert hint(engine_map, "vllm:time_per_output_token_seconds") == (
        "renamed to vllm:inter_token_latency_seconds (since 0.10.2; the old name is hidden since 0.12 and gone by 0.16)"
    )
    assert "another metric" in (hint(engine_map, "vllm:request_time_per_output_token_seconds") or "")
    assert hint(engine_map, "vllm:inter_token_latency_seconds") is None


def test_c028_a_page_with_only_the_mean_per_request_has_no_itl() -> None:
    """The mean over a request hides every stall within it."""
    page = 'vllm:request_time_per_output_token_seconds_bucket{engine="0",le="+Inf"} 7\nvllm:num_requests_running 0\n'

    assert gap(first(page), "itl").code is Why.MISSING


def test_c024_a_native_histogram_is_told_as_one_and_not_as_nothing_counted_yet() -> None:
    """Its buckets are not judged: a Gap that says so on every page, also where it comes in the middle."""
    native = 'vllm:time_to_first_token_seconds{engine="0"} {count:2,sum:3,schema:1,zero_threshold:0.1,zero_count:2}\n'
    lines = '# TYPE vllm:time_to_first_token_seconds histogram\nvllm:num_requests_running{engine="0"} 1\n'
    reader = PageReader("t")

    assert not [r for r in read(reader, lines) if r.name == "ttft"]
    for page in (lines + native, lines + native.replace("count:2", "count:3")):
        missing = gap(read(reader, page), "ttft")
        assert (missing.code, "is a native histogram" in missing.why) == (Why.MISSING, True)


@pytest.mark.parametrize("kind", ["summary", "histogram"])
def test_a_latency_without_buckets_is_a_gap_and_its_count_goes_on(kind: str) -> None:
    """A summary's own p99 cannot be judged over a window: it was taken for an engine without requests."""
    name = "vllm:time_to_first_token_seconds"
    quantile = f'{name}{{quantile="0.99"}} 7\n' if kind == "summary" else ""
    reader = PageReader("t")
    readings = read(reader, f"# TYPE {name} {kind}\n{quantile}{name}_sum 12\n{name}_count 30\n")

    assert samples(readings, "ttft") == {"sum": 12.0, "count": 30.0}
    [missing] = gaps(readings, "ttft")
    assert (missing.code, missing.key, "has no buckets" in missing.why) == (Why.MISSING, "+Inf", True)
    assert found(reader, "ttft").how is None
    readings = read(reader, f'{name}_bucket{{le="+Inf"}} 30\n{name}_sum 12\n{name}_count 30\n')
    assert not gaps(readings, "ttft")


def test_c022_a_person_is_told_what_stands_twice_and_what_does_not_read() -> None:
    """Two workers wrote one page. It may begin on any page, and end."""
    reader = PageReader("t")
    for more, said in (("", ""), ('vllm:num_requests_waiting{model_name="m"} 9\n', "told twice"), ("", ""),
                       ("<half a line\n", "not read: line 2: ")):
        readings = read(reader, 'vllm:num_requests_waiting{model_name="m"} 7\n' + more)
        assert value(readings, "waiting") == 7.0
        note = found(reader, "page").note
        assert [word in note for word in ("told twice", "not read: line 2: ")] == [
            word == said for word in ("told twice", "not read: line 2: ")], note
    assert "half a line" in note


def test_c012_a_number_of_an_hour_ago_is_no_reading() -> None:
    """A proxy answered from its cache for an hour, with times: the engine looked alive. 60 s are none too many."""
    page = 'vllm:num_requests_running{{engine="0"}} 1 {0}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.4\n'
    reader = PageReader("t")
    for old_s, code in ((0, None), (60, None), (3600, Why.STALE), (-3600, Why.STALE), (0, None)):
        readings = read(reader, page.format((10_000 - old_s) * 1000), 10_000.0)
        assert value(readings, "kv_usage") == 0.4
        if code is None:
            assert value(readings, "running") == 1
        else:
            missing = gap(readings, "running")
            assert (missing.code, f"3600 s {'old' if old_s > 0 else 'ahead'}" in missing.why) == (code, True)


def test_an_empty_label_is_none() -> None:
    """`engine=""` is an engine without an index, not one that is called nothing."""
    reader = PageReader("t")

    assert value(read(reader, 'vllm:num_requests_running{engine="",model_name="m"} 1\n'), "running") == 1
    assert facts(reader).engines == ("t",)


def test_c030_waiting_by_reason_is_a_breakdown_and_not_added() -> None:
    """Six requests waited; with the breakdown added they were twelve."""
    page = """vllm:num_requests_running 0
        vllm:num_requests_waiting 6
        vllm:num_requests_waiting_by_reason{reason="capacity"} 6
        vllm:kv_cache_usage_perc 0"""
    readings = first(vllm(page))

    assert value(readings, "waiting") == 6
    assert value(readings, "running") == 0
    assert value(readings, "kv_usage") == 0


@pytest.mark.parametrize(("shown", "want"), [("87.58777633289988", 0.8758777633289988), ("0.8759", 0.8759)])
def test_c033_a_share_in_percent_is_told_by_its_first_value_over_one_and_a_half(shown: str, want: float) -> None:
    """One version wrote the hit rate as 87.6, the next as 0.876; a page showed 8759 %."""
    share = {"unit": "ratio or percent", "merge": "max", "names": [{"name": "sglang:cache_hit_rate"}]}
    other = small_map({"kv_usage": share}, prefix="sglang:", detect=["sglang:cache_hit_rate"])
    readings = first(f'sglang:cache_hit_rate{{name="m"}} {shown}\n', maps=[other])

    assert value(readings, "kv_usage") == pytest.approx(want)


def test_c033_percent_once_is_percent_for_ever() -> None:
    """The hit rate fell from 87 % to 0.9 % and was taken for 90 %."""
    share = {"unit": "ratio or percent", "names": [{"name": "o:share"}]}
    reader = PageReader("t", maps=[small_map({"kv_usage": share}, detect=["o:share"])])

    assert gap(read(reader, "o:share 1.2\n"), "kv_usage").code is Why.OUT_OF_RANGE  # neither can be told yet
    assert value(read(reader, "o:share 87.0\n"), "kv_usage") == pytest.approx(0.87)
    assert value(read(reader, "o:share 0.9\n"), "kv_usage") == pytest.approx(0.009)
    assert gap(read(reader, "o:share 101\n"), "kv_usage").code is Why.OUT_OF_RANGE


def test_c033_vllms_perc_is_a_ratio() -> None:
    """0.92 of kv_cache_usage_perc is 92 %, not 0.92 %; over 1 it cannot be, and is not taken for anything."""
    assert value(first("vllm:kv_cache_usage_perc 0.92\n"), "kv_usage") == 0.92
    for wrong in ("1.2", "92"):
        odd = gap(first(f"vllm:kv_cache_usage_perc {wrong}\n"), "kv_usage")
        assert odd.code is Why.OUT_OF_RANGE
        assert odd.why == f"vllm:kv_cache_usage_perc is {wrong}; a share is at most 1"


def test_c034_every_rank_is_an_engine_of_its_own() -> None:
    """Eight data-parallel ranks: one of them was read for all, and three were four times as fast as the rest."""
    ranks = [35.42, 35.43, 35.42, 141.75, 141.74, 140.76, 35.44, 35.44]
    engine_map = small_map({"running": {"names": [{"name": "o:x"}]}}, engine_labels=["dp_rank"])
    page = "".join(f'o:x{{dp_rank="{i}",engine_type="unified"}} {v}\n' for i, v in enumerate(ranks))
    reader = PageReader("t", maps=[engine_map])
    readings = read(reader, page)

    assert facts(reader).engines == tuple(f"t/{i}" for i in range(8))
    got = [value(readings, "running", f"t/{i}") for i in range(8)]
    assert got == ranks
    assert sum(got) == pytest.approx(601.40)


def test_c042_what_an_engine_does_not_export_is_not_supported_and_the_rest_is_read() -> None:
    """llama.cpp took kv_cache_usage_ratio away; a rule that named it stayed green for ever."""
    page = """llamacpp:requests_processing 3
        llamacpp:requests_deferred 5
        llamacpp:predicted_tokens_seconds 56
        llamacpp:prompt_tokens_seconds 900"""
    quantities = {
        "running": {"names": [{"name": "llamacpp:requests_processing"}]},
        "waiting": {"names": [{"name": "llamacpp:requests_deferred"}]},
        "kv_usage": {"names": [], "absent_means": "llama.cpp no longer exports it"},
    }
    engine_map = small_map(quantities, prefix="llamacpp:", detect=["llamacpp:requests_processing"])
    readings = first(vllm(page, started=None), maps=[engine_map])

    assert value(readings, "running") == 3
    assert value(readings, "waiting") == 5
    assert gap(readings, "kv_usage") == Gap(
        "kv_usage", "t", Why.NOT_SUPPORTED, "llama.cpp no longer exports it", 1.0
    )


def test_c042_llama_cpp_as_it_is_known() -> None:
    """The page of the report by llama.cpp's own map: KV says that it was removed, the queue is read."""
    page = """llamacpp:requests_processing 3
        llamacpp:requests_deferred 5
        llamacpp:predicted_tokens_seconds 56
        llamacpp:prompt_tokens_seconds 900"""
    readings = first(vllm(page, started=None))

    assert value(readings, "running") == 3
    assert value(readings, "waiting") == 5
    assert gap(readings, "kv_usage").code is Why.NOT_SUPPORTED
    assert "llama.cpp no longer exports it" in gap(readings, "kv_usage").why


def test_c042_an_engine_that_this_version_does_not_know_is_said_with_its_families() -> None:
    """An engine was given that no map knows: nothing of it may look healthy, and the text says why."""
    reader = PageReader("t")
    readings = read(reader, "newengine:requests_processing 3\nnewengine:requests_deferred 5\n")

    unknown = gap(readings, "kv_usage")
    assert unknown.code is Why.MISSING
    assert "newengine:requests_processing, newengine:requests_deferred" in unknown.why
    assert "(only vLLM, Ray Serve LLM, SGLang, trtllm-serve, " in unknown.why
    assert facts(reader).kind == "unknown"
    assert not [r for r in readings if isinstance(r, Sample)]


# -- a real page -------------------------------------------------------------------------------------------------------


def by_prometheus_client(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The same page by another parser."""
    out = {}
    for family in text_string_to_metric_families(page):
        for s in family.samples:
            out[s.name, frozenset(s.labels.items())] = s.value
    return out


def test_a_real_page_gives_every_number_that_another_parser_finds() -> None:
    """One bucket under a wrong bound, and every quantile is wrong."""
    theirs = by_prometheus_client(ONE_ENGINE)
    readings = first(ONE_ENGINE)
    engine = {"engine": "0", "model_name": "tiny"}

    def their(name: str, **labels: str) -> float:
        return theirs[f"vllm:{name}", frozenset({**engine, **labels}.items())]

    for ours, name in [
        ("running", "num_requests_running"),
        ("waiting", "num_requests_waiting"),
        ("kv_usage", "kv_cache_usage_perc"),
        ("preemptions", "num_preemptions_total"),
        ("prefix_queries", "prefix_cache_queries_total"),
        ("prefix_hits", "prefix_cache_hits_total"),
        ("prompt_tokens", "prompt_tokens_total"),
        ("generation_tokens", "generation_tokens_total"),
    ]:
        assert value(readings, ours) == their(name), ours
    for ours, name in [
        ("ttft", "time_to_first_token_seconds"),
        ("itl", "inter_token_latency_seconds"),
        ("e2e", "e2e_request_latency_seconds"),
        ("queue_time", "request_queue_time_seconds"),
    ]:
        want = {
            "+Inf" if dict(labels)["le"] == "+Inf" else repr(float(dict(labels)["le"])): v
            for (n, labels), v in theirs.items()
            if n == f"vllm:{name}_bucket"
        }
        assert samples(readings, ours) == {**want, "sum": their(f"{name}_sum"), "count": their(f"{name}_count")}
        assert len(want) > 15
    assert samples(readings, "finished") == {"stop": 0, "length": 3, "abort": 0, "error": 0, "repetition": 0}
    assert samples(readings, "http") == {"2xx": 3}
    assert samples(readings, "rejections") == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
    assert value(readings, "asleep") == 0
    assert value(readings, "prefix_caching") == 1
    assert value(readings, "kv_blocks") == 8192
    assert value(readings, "process_start") == 1795975177.66
    names = {r.name for r in readings if isinstance(r, Gap)}
    only_of_others = {"graph_passes", "steps", "rank_seconds", "paused", "throughput", "prefix_hit_ratio",
                      "spec_acceptance"}
    assert names == {"swapped", "spec_draft", "spec_accepted", "graph_fallback"} | only_of_others
    assert all(r.code is Why.NOT_SUPPORTED for r in readings if isinstance(r, Gap))


def test_a_real_page_says_how_each_number_was_had() -> None:
    """`tocsin doctor` on a healthy engine: the metric of each, and the reason of what is not there."""
    reader = PageReader("t")
    read(reader, ONE_ENGINE)

    told = facts(reader)
    assert (told.engines, told.kind, told.model) == (("t",), "vllm", "tiny")
    assert {f.name for f in told.found} - {"page"} == set(load_map("vllm").quantities)
    assert found(reader, "page").how == "vLLM 0.32 or later, by its names"
    assert found(reader, "kv_usage") == Found(
        "kv_usage", "t", "vllm:kv_cache_usage_perc", note="vLLM's name since 0.9.2"
    )
    assert found(reader, "preemptions").how == "vllm:num_preemptions_total"
    assert found(reader, "spec_draft").why == "no speculative decoding is configured"


def test_several_api_servers_write_one_page_without_a_start_time() -> None:
    """Multiprocess mode: no process_start_time_seconds and no _created; that is said, and is no fault."""
    reader = PageReader("t")
    readings = read(reader, TWO_SERVERS)

    assert gap(readings, "process_start").code is Why.NOT_SUPPORTED
    assert "several API servers" in found(reader, "page").note
    assert value(readings, "generation_tokens") == 48
    assert samples(readings, "finished")["length"] == 6
    assert samples(readings, "http") == {"2xx": 6}


def test_several_api_servers_have_no_http_counter_before_the_first_request() -> None:
    """In multiprocess mode a labelled counter is not even declared until it counts; its neighbours are there."""
    page = re.sub(r"(?m)^.*http_requests_total.*\n", "", TWO_SERVERS)
    reader = PageReader("t")
    readings = read(reader, page)

    assert not samples(readings, "http")
    assert not gaps(readings, "http")
    assert "counts nothing yet" in (found(reader, "http").why or "")
    assert samples(read(reader, TWO_SERVERS), "http") == {"2xx": 6}


def test_openmetrics_gives_the_same_numbers() -> None:
    """vLLM's Rust frontend answers OpenMetrics, its Python one does if asked: `_total` moves from family to sample."""

    class Collector:
        def collect(self) -> list[Metric]:
            families = text_string_to_metric_families(ONE_ENGINE)
            return [family for family in families if not family.name.endswith("_created")]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    page = generate_latest(registry).decode()  # type: ignore[no-untyped-call,unused-ignore]
    assert "# TYPE vllm:num_preemptions counter" in page
    assert page.endswith("# EOF\n")
    reader = PageReader("t")
    readings = reader.read(page.encode(), "application/openmetrics-text; version=1.0.0; charset=utf-8", 1.0)

    assert set(readings) == set(first(ONE_ENGINE))


def test_what_openmetrics_calls_info_is_found_by_its_samples_name() -> None:
    """gpustack#6215: vLLM's Rust front end types `vllm:cache_config`, and its sample is `vllm:cache_config_info`."""
    page = """# HELP vllm:cache_config Configuration of the cache
        # TYPE vllm:cache_config info
        vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="100"} 1
        # EOF"""
    readings = PageReader("t").read(vllm(page).encode(), "application/openmetrics-text; version=1.0.0", 1.0)

    assert [value(readings, name) for name in ("kv_blocks", "kv_block_tokens", "prefix_caching")] == [100.0, 16.0, 1.0]


def test_a_plan_that_is_used_again_reads_the_same_as_a_new_one() -> None:
    """281 pages of a real engine, read one after another and each by itself."""
    with lzma.open(RECORDING, "rt") as lines:
        bodies = [json.loads(line)["body"] for line in lines]
    bodies = [body for body in bodies if body is not None][::4]
    reader = PageReader("t")

    for body in bodies:
        assert read(reader, body) == first(body)
    assert len(bodies) > 50


# -- versions ----------------------------------------------------------------------------------------------------------


def test_an_upgrade_that_renames_is_followed_and_said() -> None:
    """0.10 to 0.12 took gpu_cache_usage_perc away; the number goes on, and doctor says under which name."""
    reader = PageReader("t")
    read(reader, vllm("vllm:gpu_cache_usage_perc 0.5", started=1))
    old_build = facts(reader).build
    readings = read(reader, vllm("vllm:kv_cache_usage_perc 0.6", started=900))

    assert value(readings, "kv_usage") == 0.6
    assert facts(reader).build != old_build
    moved = "vllm:gpu_cache_usage_perc is gone; since 0.11 it is vllm:kv_cache_usage_perc"
    assert moved in found(reader, "kv_usage").note
    assert "vllm_gpu_cache_usage_perc" in found(reader, "page").note


def test_a_name_that_an_upgrade_took_away_is_lost_by_name() -> None:
    """Neither name is on the new page: the text of L3 says which is gone and what it became."""
    reader = PageReader("t")
    read(reader, vllm("vllm:gpu_cache_usage_perc 0.5\nvllm:num_requests_running 1", started=1))
    for _ in range(2):  # at every read, not once
        lost = gap(read(reader, vllm("vllm:num_requests_running 1", started=900)), "kv_usage")

        assert lost.code is Why.MISSING
        assert lost.why == (
            "vllm:gpu_cache_usage_perc is gone; since 0.11 it is vllm:kv_cache_usage_perc, "
            "and that is not on the page either"
        )
    assert found(reader, "kv_usage").how is None


def test_speculation_turned_off_by_a_restart_is_not_lost() -> None:
    """A conditional family that is gone after a restart was turned off; one that vanishes while it runs is lost."""
    reader = PageReader("t")
    with_spec = "vllm:spec_decode_num_draft_tokens_total 5\nvllm:num_requests_running 0"
    assert value(read(reader, vllm(with_spec, started=1)), "spec_draft") == 5

    assert gap(read(reader, vllm("vllm:num_requests_running 0", started=1)), "spec_draft").code is Why.MISSING
    assert gap(read(reader, vllm("vllm:num_requests_running 0", started=900)), "spec_draft").code is Why.NOT_SUPPORTED


def test_without_a_start_time_an_outage_is_a_restart() -> None:
    """Several API servers tell no start time; that nobody listened in between is all there is to see of a restart."""
    reader = PageReader("t")
    with_spec = "vllm:spec_decode_num_draft_tokens_total 5\nvllm:num_requests_running 0"
    read(reader, vllm(with_spec, started=None))
    reader.failed(Why.UNREACHABLE, "refused", 2.0, is_down=True)

    readings = read(reader, vllm("vllm:num_requests_running 0", started=None))
    assert gap(readings, "spec_draft").code is Why.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("vllm:kv_cache_usage_perc 0.1", "rejections"),  # 0.9.2: counted since 0.32
        ("vllm:gpu_cache_usage_perc 0.1", "asleep"),
        ("vllm:kv_cache_usage_perc 0.1", "swapped"),  # V1 never swaps
        ("vllm:kv_cache_usage_perc 0.1", "graph_fallback"),
    ],
)
def test_what_a_version_never_had_is_not_supported(page: str, name: str) -> None:
    """An old engine is not blind to what it never told."""
    assert gap(first(vllm(page)), name).code is Why.NOT_SUPPORTED


def test_what_this_version_should_have_is_missing() -> None:
    """http_requests_total is absent on some builds: no errors counted is not no errors."""
    readings = first(vllm("vllm:kv_cache_usage_perc 0.1\n# TYPE vllm:request_num_preemptions histogram"))

    assert gap(readings, "http").code is Why.MISSING
    assert "router" in gap(readings, "http").why
    assert gap(readings, "asleep").code is Why.MISSING  # 0.30, by request_num_preemptions; asleep came with 0.11.2


def test_v0_swaps() -> None:
    """An old engine with requests swapped out says so."""
    assert value(first("vllm:num_requests_swapped 2\nvllm:gpu_cache_usage_perc 0.9\n"), "swapped") == 2


def test_ray_writes_the_names_in_its_own_way() -> None:
    """Under Ray Serve every dashboard was empty: `:` had become `_`, with ray_ before it."""
    page = """ray_vllm_kv_cache_usage_perc{WorkerId="a",engine="0"} 0.4
        ray_vllm_num_preemptions{WorkerId="a",engine="0"} 7
        ray_vllm_time_to_first_token_seconds_bucket{WorkerId="a",engine="0",le="+Inf"} 3"""
    reader = PageReader("t")
    readings = read(reader, vllm(page, started=None))

    assert value(readings, "kv_usage") == 0.4
    assert value(readings, "preemptions") == 7
    assert samples(readings, "ttft") == {"+Inf": 3}
    assert found(reader, "preemptions").how == "ray_vllm_num_preemptions"


# -- engines of one target ---------------------------------------------------------------------------------------------


def dp(*indices: int, started: float | None = 100.0) -> str:
    lines = [f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {i + 1}' for i in indices]
    lines += [f'vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} 0.{i + 1}' for i in indices]
    return vllm("\n".join(lines), started)


@pytest.mark.parametrize(
    ("indices", "want"),
    [((0,), ("t",)), ((0, 1), ("t/0", "t/1")), ((3,), ("t/3",)), ((9, 10), ("t/9", "t/10"))],
)
def test_engines_are_called_by_their_index_where_there_are_several(
    indices: tuple[int, ...], want: tuple[str, ...]
) -> None:
    """Eight data-parallel engines on one page were read as one."""
    reader = PageReader("t")
    readings = read(reader, dp(*indices))

    assert facts(reader).engines == want
    assert [value(readings, "running", subject) for subject in want] == [i + 1 for i in indices]


def test_an_index_that_was_never_there_is_missing() -> None:
    """vllm-ascend#10049: the page of four data-parallel engines showed three of them from the start."""
    reader = PageReader("t")
    readings = read(reader, dp(0, 1, 3))
    assert facts(reader).engines == ("t/0", "t/1", "t/2", "t/3")
    assert gap(readings, "running", "t/2").why == "engine t/2 is not on the page"
    assert gap(readings, "waiting", "t/2").code is Why.MISSING
    assert "of the engines 0 to 3 this page tells nothing of 2" in found(reader, "page").note
    reader = PageReader("t")
    read(reader, dp(8, 9))  # an external load balancer's second node
    assert facts(reader).engines == ("t/8", "t/9")
    assert "tells nothing of" not in found(reader, "page").note
    reader = PageReader("t")
    read(reader, dp(0, 4_000_000_000))  # no count of engines: a page must not cost the agent its memory
    assert len(facts(reader).engines) == 2


def test_an_engine_of_several_that_is_gone_is_missing() -> None:
    """A router took engine 0's numbers for all; engine 1 had died."""
    reader = PageReader("t")
    read(reader, dp(0, 1))
    readings = read(reader, dp(0))

    assert value(readings, "running", "t/0") == 1
    assert gap(readings, "running", "t/1").why == "engine t/1 is gone from the page"
    assert gap(readings, "kv_usage", "t/1").code is Why.MISSING
    assert facts(reader).engines == ("t/0", "t/1")
    assert facts(reader).closed == ()


def test_a_restart_with_fewer_engines_closes_the_old_ones() -> None:
    """From two engines to one by a restart: the old subjects end, the one is called as the target."""
    reader = PageReader("t")
    read(reader, dp(0, 1, started=1))
    readings = read(reader, dp(0, started=900))

    assert value(readings, "running", "t") == 1
    assert facts(reader).engines == ("t",)
    assert facts(reader).closed == ("t/0", "t/1")
    assert reader.shape is False


def test_a_second_engine_that_appears_ends_the_name_of_the_one() -> None:
    """`t` was the engine and is now t/0; it stays the name of the target, whose counters must not be forgotten."""
    reader = PageReader("t")
    read(reader, dp(0))
    assert reader.shape is False
    read(reader, dp(0, 1))

    assert facts(reader).engines == ("t/0", "t/1")
    assert facts(reader).closed == ()
    assert reader.shape is True


def test_the_first_sight_survives_a_restart_of_ours() -> None:
    """Two engines were seen; the agent restarts while one is gone: the other keeps its name."""
    reader = PageReader("t", shape=True)
    read(reader, dp(0))
    assert facts(reader).engines == ("t/0",)

    reader = PageReader("t", shape=False)
    read(reader, dp(0, 1))
    assert facts(reader).engines == ("t/0", "t/1")


def test_a_page_without_engines_decides_nothing_about_their_names() -> None:
    """A server that starts shows Python's families first, its two engines later: they are no change of shape."""
    reader = PageReader("t", kind="vllm")
    read(reader, "process_start_time_seconds 1\n")
    assert reader.shape is None
    read(reader, dp(0, 1, started=1))

    assert facts(reader).engines == ("t/0", "t/1")
    assert facts(reader).closed == ()


# -- series ------------------------------------------------------------------------------------------------------------


def test_copies_by_pid_are_one_number() -> None:
    """In multiprocess mode a gauge came once a process; summed, the cache was 166 % full."""
    page = """vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="7"} 0.83
        vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="8"} 0.83
        vllm:num_requests_running{engine="0",model_name="m",pid="7"} 4
        vllm:num_requests_running{engine="0",model_name="m",pid="8"} 0"""
    readings = first(vllm(page))

    assert value(readings, "kv_usage") == 0.83
    assert value(readings, "running") == 4


def test_two_models_of_one_engine_add_up_and_shares_do_not() -> None:
    """Requests of two models are all requests of the engine; the cache is the fuller of the two."""
    page = """vllm:num_requests_waiting{engine="0",model_name="a"} 2
        vllm:num_requests_waiting{engine="0",model_name="b"} 3
        vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5
        vllm:kv_cache_usage_perc{engine="0",model_name="b"} 0.7
        vllm:num_preemptions_total{engine="0",model_name="a"} 10
        vllm:num_preemptions_total{engine="0",model_name="b"} 1"""
    readings = first(vllm(page))

    assert value(readings, "waiting") == 5
    assert value(readings, "kv_usage") == 0.7
    assert value(readings, "preemptions") == 11


def test_a_counter_of_several_series_goes_on_when_one_of_them_leaves() -> None:
    """A model was unloaded: the sum fell from 11 to 1 and was taken for a restart with one new preemption."""
    reader = PageReader("t")
    lines = ['vllm:num_preemptions_total{engine="0",model_name="%s"} %d', "vllm:num_requests_running 0"]

    def total(started: float = 100.0, **models: int) -> float:
        page = [lines[0] % model for model in models.items()]
        return value(read(reader, vllm("\n".join([*page, lines[1]]), started)), "preemptions")

    assert total(a=10, b=1) == 11
    assert total(b=1) == 11
    assert total(b=3) == 13
    assert total(b=3, c=2) == 15
    assert total(a=12, b=3, c=2) == 17  # back again, two more
    assert total(started=900.0, b=1) == 1  # another process counts from 0


def test_a_garbled_line_of_one_handler_does_not_drop_the_count() -> None:
    """One of two handlers could not be read for one scrape: 600 requests less, then 600 that never were."""
    reader = PageReader("t")
    page = """http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 400
        http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 600
        vllm:num_requests_running 0"""

    assert samples(read(reader, vllm(page)), "http") == {"2xx": 1000}
    assert samples(read(reader, vllm(page.replace("600", "6OO"))), "http") == {"2xx": 1000}
    assert samples(read(reader, vllm(page.replace("600", "605"))), "http") == {"2xx": 1005}


def test_only_requests_for_inference_count() -> None:
    """A dashboard polled /v1/models each second and hid every error among its 200s."""
    page = """http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 5
        http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 6
        http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 1
        http_requests_total{handler="/v1/models",method="GET",status="2xx"} 900
        http_requests_total{handler="none",method="POST",status="4xx"} 50
        http_requests_total{handler="/v1/completions",method="GET",status="4xx"} 70
        vllm:num_requests_running 0"""

    assert samples(first(vllm(page)), "http") == {"2xx": 11, "5xx": 1}


def test_a_counter_that_is_declared_and_has_not_counted_is_no_gap() -> None:
    """Before the first request http_requests_total has a TYPE line and no series."""
    readings = first(vllm("# TYPE http_requests_total counter\nvllm:num_requests_running 0"))

    assert not [r for r in readings if r.name == "http"]


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        ("NaN", Why.NOT_A_NUMBER),
        ("+Inf", Why.NOT_A_NUMBER),
        ("-Inf", Why.NOT_A_NUMBER),
        ("-1", Why.SENTINEL),
        ("-1.0", Why.SENTINEL),
        ("-0.5", Why.OUT_OF_RANGE),
        ("1.01", Why.OUT_OF_RANGE),
    ],
)
def test_what_is_no_measurement_is_a_gap(shown: str, code: Why) -> None:
    """A cache at NaN compared as "not over the limit", one at -1 as empty."""
    readings = first(vllm(f"vllm:kv_cache_usage_perc {shown}\nvllm:num_requests_running 2"))

    assert gap(readings, "kv_usage").code is code
    assert value(readings, "running") == 2


def test_what_rounding_made_of_1_is_full() -> None:
    """1.0000000000000002 is a full cache, not an impossible one."""
    assert value(first("vllm:kv_cache_usage_perc 1.0000000000000002\n"), "kv_usage") == pytest.approx(1)


@pytest.mark.parametrize(("awake", "asleep"), [("1.0", 0.0), ("0.0", 1.0)])
def test_asleep_is_the_inverse_of_awake(awake: str, asleep: float) -> None:
    """A sleeping engine keeps its last gauges and must not be judged."""
    page = f"""vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}
        vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} 1.0
        vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} 0.0"""

    assert value(first(vllm(page)), "asleep") == asleep


def test_prefix_caching_that_is_off() -> None:
    """With the cache off a hit rate of 0 is no finding."""
    page = 'vllm:cache_config_info{enable_prefix_caching="False",engine="0",num_gpu_blocks="None"} 1.0\n'
    readings = first(page)

    assert value(readings, "prefix_caching") == 0
    assert gap(readings, "kv_blocks").why == "vllm:cache_config_info: num_gpu_blocks is 'None', not a number"


def test_a_line_that_does_not_parse_costs_its_series_alone_and_only_then() -> None:
    """A garbled kv line for one scrape: KV is unknown for one read, the rest goes on, and then it is back."""
    reader = PageReader("t")
    good = vllm("vllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5")
    read(reader, good)
    readings = read(reader, good.replace("perc 0.5", "perc 0.5x"))

    spoilt = gap(readings, "kv_usage")
    assert spoilt.code is Why.BAD_LINE
    assert spoilt.why.startswith("line 3: ")
    assert value(readings, "running") == 2
    assert value(read(reader, good), "kv_usage") == 0.5


def test_a_bucket_whose_line_does_not_parse_is_that_bucket_alone() -> None:
    """The quantile must not be made of the buckets that are left."""
    reader = PageReader("t")
    read(reader, ONE_ENGINE)
    line = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny"} '
    assert line in ONE_ENGINE
    readings = read(reader, ONE_ENGINE.replace(line, line + "x"))

    assert [(g.code, g.key) for g in gaps(readings, "ttft")] == [(Why.BAD_LINE, "0.25")]
    assert "0.25" not in samples(readings, "ttft")
    assert "0.5" in samples(readings, "ttft")
    assert not gaps(readings, "itl")
    assert not gaps(read(reader, ONE_ENGINE), "ttft")


def test_a_bad_bucket_at_first_sight_is_told_of_the_whole() -> None:
    """Which bucket it was cannot be known, so the whole is in doubt."""
    line = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny"} '
    readings = first(ONE_ENGINE.replace(line, line + "x"))

    assert [(g.code, g.key) for g in gaps(readings, "ttft")] == [(Why.BAD_LINE, "")]


def test_milliseconds_become_seconds_bounds_included() -> None:
    """A later map has milliseconds: the bounds and the sum are scaled, the counts are not."""
    other = small_map({"ttft": {"unit": "s", "names": [{"name": "o:x", "unit": "ms"}]}})
    page = 'o:x_bucket{le="250"} 3\no:x_bucket{le="+Inf"} 4\no:x_sum 900\no:x_count 4\n# TYPE o:x histogram\n'

    assert samples(first(page, maps=[other]), "ttft") == {"0.25": 3, "+Inf": 4, "sum": 0.9, "count": 4}


# -- pages that are no engine's ----------------------------------------------------------------------------------------


def test_statistics_that_are_off_are_said_with_the_flag_to_remove() -> None:
    """--disable-log-stats leaves only python_, process_ and http_ families: not an idle engine, a blind one."""
    page = "\n".join(line for line in ONE_ENGINE.splitlines() if "vllm:" not in line) + "\n"

    for kind in ("auto", "vllm"):
        reader = PageReader("t", kind=kind)
        muted = gap(read(reader, page), "kv_usage")
        assert muted.code is Why.MISSING
        assert "--disable-log-stats" in muted.why
        assert found(reader, "kv_usage").remedy == "remove --disable-log-stats from the engine's command line"
    assert samples(read(PageReader("t", kind="vllm"), page), "http") == {"2xx": 3}


def test_statistics_turned_off_by_a_restart_are_lost_by_name() -> None:
    """Someone added --disable-log-stats; the flag is named, not "unknown engine"."""
    reader = PageReader("t")
    read(reader, ONE_ENGINE)
    page = "\n".join(line for line in ONE_ENGINE.splitlines() if "vllm:" not in line) + "\n"
    readings = read(reader, page.replace("1.79597517766e+09", "1.79597599999e+09"))

    assert gap(readings, "kv_usage").why == (
        "vllm:kv_cache_usage_perc is gone: the engine writes no statistics: it was started with --disable-log-stats: "
        "remove --disable-log-stats from the engine's command line"
    )
    assert samples(readings, "http") == {"2xx": 3}


def test_a_router_is_not_an_engine() -> None:
    """The port of vllm-router was given: nothing there is an engine's, and its families are shown."""
    reader = PageReader("t")
    readings = read(reader, ROUTER)

    assert facts(reader).kind == "unknown"
    assert "vllm_router_processed_requests" in gap(readings, "running").why


def test_the_production_stack_router_only_repeats_engines() -> None:
    """It writes vllm:num_requests_running for every server behind it, and 0 for what it does not know."""
    page = """vllm:num_requests_running{server="http://a"} 3
        vllm:kv_cache_usage_perc{server="http://a"} 0
        vllm:healthy_pods_total{server="http://a"} 1"""
    readings = first(vllm(page))

    assert not [r for r in readings if isinstance(r, Sample)]
    assert "production-stack router" in gap(readings, "kv_usage").why


def test_an_empty_page_tells_nothing() -> None:
    """0 bytes with HTTP 200 is not an idle engine."""
    assert gap(first(""), "running").code is Why.MISSING


@pytest.mark.parametrize("garbage", ["[]", "<html>\n<body>hello</body></html>\n", "\x00\x01\x02"])
def test_garbage_is_no_page(garbage: str) -> None:
    """TensorRT-LLM's /metrics is JSON, a proxy's is HTML."""
    with pytest.raises(PageError):
        first(garbage)


def test_a_read_that_failed_owes_all_but_what_never_was() -> None:
    """While nobody answers every timer is held; what the engine never had does not become unknown by that."""
    reader = PageReader("t")
    told = read(reader, ONE_ENGINE)
    owed = reader.failed(Why.TIMEOUT, "late", 2.0)

    assert {(r.name, r.subject) for r in owed} == {(r.name, r.subject) for r in told}
    assert gap(owed, "kv_usage") == Gap("kv_usage", "t", Why.TIMEOUT, "late", 2.0)
    assert gap(owed, "spec_draft").code is Why.NOT_SUPPORTED


def test_a_target_that_never_answered_owes_all_of_one_engine() -> None:
    """Configured and never seen: its required signals are Gaps, so it can be blind."""
    owed = PageReader("t").failed(Why.UNREACHABLE, "refused", 2.0)

    assert {r.name for r in owed} == set(load_map("vllm").quantities)
    assert {r.subject for r in owed} == {"t"}


# -- maps --------------------------------------------------------------------------------------------------------------


def test_the_map_names_samples_of_the_model_and_bounds_every_version() -> None:
    """A typing error in the data is found here, not on a node."""
    engine_map = load_map("vllm")
    of_an_engine = set(list(SAMPLES)[: list(SAMPLES).index("down")])
    versions = re.compile(r"\d+(\.\d+)*")

    assert set(engine_map.quantities) == of_an_engine
    for name, quantity in engine_map.quantities.items():
        assert quantity.names or quantity.absent_means, name
        for alias in quantity.names:
            assert all(v is None or versions.fullmatch(v) for v in (alias.since, alias.hidden, alias.gone)), alias.name
        for alias in quantity.names[1:]:
            assert alias.gone, f"{alias.name}: an older name has an end"
    assert not set(engine_map.others) & {a.name for q in engine_map.quantities.values() for a in q.names}


@pytest.mark.parametrize("wrong", [{"kv_use": {"names": []}}, {"running": {"name": []}}, {"running": {"names": "x"}}])
def test_a_map_that_breaks_its_form_is_refused(wrong: dict[str, Any]) -> None:
    """An unknown quantity or key would be read as "this engine has no such thing"."""
    with pytest.raises(msgspec.ValidationError):
        small_map(wrong)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    """`kind: vlm` in the configuration."""
    with pytest.raises(KeyError, match="'vlm' is not known; known: auto, vllm"):
        PageReader("t", kind="vlm")


def test_nothing_that_is_not_finite_gets_out() -> None:
    """Whatever the page says, a Sample is a number."""
    page = ONE_ENGINE.replace(" 0.0\n", " NaN\n")

    assert all(math.isfinite(r.value) for r in first(page) if isinstance(r, Sample))


NUMBER = st.sampled_from([0.0, 0.25, 1.0, 1.1, 7.0, -1.0, math.nan, math.inf])


@given(NUMBER, NUMBER, NUMBER)
def test_a_bad_number_costs_no_other(waiting: float, running: float, share: float) -> None:
    """All numbers of a page are taken at once where all fit: one that does not fit is a Gap, and it alone."""
    page = (f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n"
            f"vllm:kv_cache_usage_perc {share}\n")
    readings = first(page, kind="vllm")
    told = {r.name: getattr(r, "value", None) for r in readings if r.name in ("waiting", "running", "kv_usage")}
    fits = {"waiting": 0 <= waiting < math.inf, "running": 0 <= running < math.inf, "kv_usage": 0 <= share <= 1}
    values = {"waiting": waiting, "running": running, "kv_usage": share}
    assert told == {name: values[name] if fits[name] else None for name in values}
