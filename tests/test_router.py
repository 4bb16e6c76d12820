"""Routers as sources: arrivals, errors and shares per replica from their own pages; never an engine's numbers."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.config import Config, RouterConfig
from agent.daemon import setup_of, sources_of
from agent.model import Batch, EngineFacts, Gap, Sample, Signal, Why
from agent.node import Node
from agent.signals import Target, replica_of, router_signals
from agent.sources.engine import EngineSource
from agent.sources.router import RouterSource
from tests.engine_pages import PAGES
from tests.page_server import PageServer

DATA = Path(__file__).parent / "data"
RECORDED = gzip.decompress((DATA / "pages/vllm-router-0.1.17.txt.gz").read_bytes())
T0 = 1_000_000_000.0

# One story in each router's words: 100 requests, 3 errors, 40 to the first replica and 60 to the second.
STACK = """
vllm:num_requests_running{server="http://a:8000"} 3
vllm:num_incoming_requests_total{model="m"} 100
vllm:request_errors_total{server="http://a:8000",model="m",error_type="timeout"} 3
vllm:request_latency_seconds_bucket{server="http://a:8000",le="+Inf"} 40
vllm:request_latency_seconds_count{server="http://a:8000"} 40
vllm:request_latency_seconds_bucket{server="http://b:8000",le="+Inf"} 60
vllm:request_latency_seconds_count{server="http://b:8000"} 60
vllm:healthy_pods_total{server="http://a:8000"} 1
vllm:healthy_pods_total{server="http://b:8000"} 0
"""
SGL = """
sgl_router_requests_total{route="/v1/completions",method="POST"} 100
sgl_router_request_errors_total{route="/v1/completions",error_type="upstream"} 3
sgl_router_retries_total{route="/v1/completions"} 7
sgl_router_processed_requests_total{worker="http://a:8000"} 40
sgl_router_processed_requests_total{worker="http://b:8000"} 60
sgl_router_cb_outcomes_total{worker="http://a:8000",outcome="failure"} 3
sgl_router_cb_outcomes_total{worker="http://a:8000",outcome="success"} 37
sgl_router_worker_health{worker="http://a:8000"} 1
sgl_router_running_requests{worker="http://a:8000"} 5
sgl_router_active_workers 0
"""
SMG = """
smg_router_requests_total{model="m",endpoint="chat",streaming="true"} 100
smg_http_requests_total{path="/health"} 5000
smg_router_request_errors_total{error_type="upstream"} 3
smg_http_responses_total{status_code="200",error_code=""} 97
smg_http_responses_total{status_code="502",error_code="upstream"} 3
smg_worker_retries_total{worker="http://a:8000"} 7
smg_worker_selection_total{policy="round_robin"} 100
smg_worker_requests_total{worker="http://a:8000",model="m"} 40
smg_worker_requests_total{worker="http://b:8000",model="m"} 60
smg_worker_cb_outcomes_total{worker="http://a:8000",outcome="failure"} 3
smg_worker_cb_outcomes_total{worker="http://a:8000",outcome="success"} 37
smg_worker_health{worker="http://a:8000"} 1
smg_worker_requests_active{worker="http://a:8000"} 5
smg_scheduler_queue_depth 2
"""
EPP = """
inference_objective_request_total{model_name="m"} 100
inference_objective_request_error_total{model_name="m",error_code="Internal"} 3
inference_pool_ready_pods{name="pool"} 2
inference_extension_flow_control_queue_size 2
"""
EPP_V0 = EPP.replace("inference_objective_", "inference_model_")
LLMD = """
llm_d_epp_request_total{model_name="m"} 100
llm_d_epp_request_error_total{model_name="m",error_code="Internal"} 3
llm_d_epp_ready_endpoints 2
llm_d_epp_average_queue_size 2
"""
LLMD_OLD = LLMD.replace("llm_d_epp_", "llm_d_router_epp_")
PAGES_OF = {"production-stack-router": STACK, "sglang-router": SGL, "smg": SMG, "gateway-api-epp": EPP,
            "smg without shares": SMG.replace("smg_worker_requests_total", "smg_worker_requests_unheard_of"),
            "gateway-api-epp v0": EPP_V0, "llm-d-router": LLMD, "llm-d-router old": LLMD_OLD}


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(RECORDED) as it:
        yield it


def told_by(batches: list[Batch]) -> dict[tuple[str, str], Signal]:
    """The router's signals after these reads, by (name, key)."""
    node = Node(setup_of(Config(node="n"), ()))
    for batch in batches:
        node.take(batch)
    node.step(batches[-1].at, 5.0)
    return {(s.id, s.evidence.get("key", "")): s for s in router_signals(node.scene)}


def at(source: RouterSource, second: float) -> Batch:
    return source.read(T0 + second)


def test_the_recorded_page_of_vllm_router(server: PageServer) -> None:
    """One of two replicas was dead: 8 requests, 7 retries, 7 tries at the dead one and 8 at the other."""
    source = RouterSource("edge", server.url)
    batch = at(source, 0)
    dead, well = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
    read = {(r.name, r.key): r.value for r in batch.readings if isinstance(r, Sample)}

    assert read["router_requests", ""] == 8
    assert read["router_retries", ""] == 7
    assert (read["router_worker_requests", dead], read["router_worker_requests", well]) == (7, 8)
    assert (read["router_worker_errors", dead], read.get(("router_worker_errors", well), 0)) == (7, 0)
    assert read["router_worker_up", dead] == 1  # and it was dead: the map says so
    assert batch.router is not None
    assert batch.router.kind == "vllm-router"
    assert batch.engine is None
    source.close()


def test_counts_are_what_came_since_they_were_first_read_through_a_restart(server: PageServer) -> None:
    """Restarted, it counts from 0: 10 more, then a restart and 5 more are 15, of which 5 in the last minute."""
    source, batches = RouterSource("edge", server.url), []
    for second, count in enumerate([8, 18, 18, 5]):
        server.set_page(RECORDED.replace(b'requests_total{route="/v1/completions"} 8',
                                         f'requests_total{{route="/v1/completions"}} {count}'.encode()))
        batches.append(at(source, 40.0 * second))
    signal = told_by(batches)["router_requests", ""]

    assert (signal.subject, signal.value, signal.unit) == ("edge", 15, "count")
    assert signal.evidence["rise_60s"] == 5
    source.close()


@pytest.mark.parametrize("name", PAGES_OF)
def test_every_router_in_its_own_words(server: PageServer, name: str) -> None:
    """What it counts, by the names of our own; what it does not count is N/A with the reason."""
    server.set_page(PAGES_OF[name])
    source = RouterSource("edge", server.url)
    batch = at(source, 0)
    read = {(r.name, r.key): r.value for r in batch.readings if isinstance(r, Sample)}

    assert batch.router is not None
    assert batch.router.kind == name.partition(" ")[0]
    assert read["router_requests", ""] == 100
    assert sum(v for (n, _), v in read.items() if n == "router_errors") == 3
    shares = {key: v for (n, key), v in read.items() if n == "router_worker_requests"}
    assert shares in ({}, {"http://a:8000": 40, "http://b:8000": 60})
    assert shares or told_by([batch])["router_worker_requests", ""].state == "na"
    assert not [r for r in batch.readings if isinstance(r, Gap) and r.code is not Why.NOT_SUPPORTED]
    source.close()


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ("vllm_router_retries_exhausted_total 1", {"retries exhausted": 1}),
        ('vllm_router_retries_exhausted_total 1\nvllm_router_request_errors_total{error_type="timeout"} 2',
         {"retries exhausted": 1, "timeout": 2}),
        ("", {}),
    ],
)
def test_a_request_that_was_tried_in_vain_is_an_error(server: PageServer, lines: str, want: dict[str, float]) -> None:
    """vllm-router 0.1.17 counts it neither as a request nor as an error, but as retries that are exhausted."""
    server.set_page(RECORDED.decode() + lines + "\n")
    source = RouterSource("edge", server.url)
    batch = at(source, 0)
    errors = {r.key: r.value for r in batch.readings if isinstance(r, Sample) and r.name == "router_errors"}
    assert errors == want
    assert not [r for r in batch.readings if isinstance(r, Gap) and r.name == "router_errors"]
    source.close()


def test_a_router_that_does_not_answer_is_a_gap_and_no_engine(server: PageServer) -> None:
    """Its port was closed: the numbers are unknown, and no engine is down by that."""
    source = RouterSource("edge", server.url)
    batches = [at(source, 0)]
    server.stop()
    batches.append(at(source, 5))

    assert batches[1].error is not None
    assert told_by(batches)["router_requests", ""].state == "gap"
    assert not [r for r in batches[1].readings if r.name == "down"]
    source.close()


@pytest.mark.parametrize(
    ("page", "role", "says"),
    [
        (RECORDED, "engine", "this is vllm-router, a router"),
        (SGL.encode(), "engine", "this is sglang-router, a router"),
        (PAGES["vllm-0.32"](60).encode(), "router", "this is vLLM, an engine"),
        (PAGES["tgi-3.3.7"](60).encode(), "router", "this is TGI, an engine"),
    ],
)
def test_what_stands_in_the_wrong_list_is_told_so(server: PageServer, page: bytes, role: str, says: str) -> None:
    """A router's address was written under engines, and the other way round."""
    server.set_page(page)
    make: Callable[[str, str], EngineSource | RouterSource] = EngineSource if role == "engine" else RouterSource
    source = make("t", server.url)
    batch = source.read(T0)
    gap = next(r for r in batch.readings if isinstance(r, Gap) and r.code is Why.MISSING)

    assert says in gap.why
    assert f"write it under {'routers' if role == 'engine' else 'engines'}:" in gap.why
    of_the_connection = ("down", "slow", "rung", "connections")
    assert not [r for r in batch.readings if isinstance(r, Sample) and r.name not in of_the_connection]
    source.close()


def test_the_configuration_gives_each_router_a_source() -> None:
    """`routers` was checked and did nothing."""
    config = Config(routers=(RouterConfig(url="http://127.0.0.1:29000", name="edge"),), nvml="off", kernel_log="off")
    sources = sources_of(config, {})
    assert [source.name for source in sources] == ["router:edge"]
    for source in sources:
        source.close()


@pytest.mark.parametrize(
    ("worker", "is_it"),
    [("http://10.0.0.1:8000", True), ("10.0.0.1:8000", True), ("http://10.0.0.1:8000/v1", True),
     ("http://10.0.0.1:80001", False), ("http://10.0.0.11:8000", False), ("", False)],
)
def test_a_replica_is_known_by_its_address(worker: str, is_it: bool) -> None:
    """Routers write it with and without scheme and path."""
    assert replica_of(Target("t", ("t",), address="10.0.0.1:8000"), worker) is is_it
    assert not replica_of(Target("t", ("t",)), worker)


def test_a_router_s_word_survives_what_is_no_number(server: PageServer) -> None:
    """A NaN of one replica costs that one."""
    page = SGL.replace('processed_requests_total{worker="http://a:8000"} 40',
                       'processed_requests_total{worker="http://a:8000"} NaN')
    server.set_page(page)
    source = RouterSource("edge", server.url)
    found = at(source, 0)
    assert [(r.key, r.code) for r in found.readings if isinstance(r, Gap) and r.name == "router_worker_requests"] == [
        ("http://a:8000", Why.NOT_A_NUMBER)]
    assert isinstance(found.router, EngineFacts)
    source.close()
