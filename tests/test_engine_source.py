"""One engine over real HTTP: what it does when the engine is slow, gone, lying or somewhere else."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent.model import Batch, Gap, Sample, Source, Why
from agent.sources.connections import foreign
from agent.sources.engine import EngineSource
from tests.engine_pages import PAGES, trtllm_json
from tests.page_server import Fault, PageServer

DATA = Path(__file__).parent / "data"
PAGE = gzip.decompress((DATA / "pages/vllm-0.32-one-engine.txt.gz").read_bytes())
RECORDING = DATA / "recordings/vllm-0.32-kv-pressure.jsonl.xz"
SHORT_S = 0.6  # the whole deadline in tests that run into it


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(PAGE) as it:
        yield it


@pytest.fixture
def source(server: PageServer) -> Iterator[EngineSource]:
    """One with short deadlines, that has read the page and heard /health."""
    it = EngineSource("t", server.url, connect_s=0.3, total_s=SHORT_S, health_total_s=SHORT_S)
    until(lambda: it.read(1.0).error is None and it._health.look() is not None)
    yield it
    it.close()


def until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def reading(batch: Batch, name: str) -> Sample | Gap:
    found = [r for r in batch.readings if r.name == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def ladder(batch: Batch) -> tuple[float | Why, float, float]:
    """(down, slow, rung); a Gap as its code."""
    down, slow, rung = (reading(batch, name) for name in ("down", "slow", "rung"))
    assert isinstance(slow, Sample)
    assert isinstance(rung, Sample)
    return down.value if isinstance(down, Sample) else down.code, slow.value, rung.value


def gap_of_kv(batch: Batch) -> Gap:
    it = reading(batch, "kv_usage")
    assert isinstance(it, Gap)
    return it


def is_whole(batch: Batch) -> bool:
    return batch.error is None and isinstance(reading(batch, "kv_usage"), Sample)


# -- well --------------------------------------------------------------------------------------------------------------


def test_a_healthy_engine_is_read_over_one_kept_connection(server: PageServer) -> None:
    """A new connection a scrape costs the engine's event loop; nothing is asked of it twice."""
    source: Source = EngineSource("llama", server.url)
    batches = [source.read(float(i)) for i in range(5)]
    until(lambda: server.healths == 1)

    assert source.name == "engine:llama"
    assert all(is_whole(batch) for batch in batches)
    assert batches[3].at == 3.0
    assert {r.at for r in batches[3].readings} == {3.0}
    assert 0 < batches[3].took_s < 1
    facts = batches[3].engine
    assert facts is not None
    assert facts.engines == ("llama",)
    assert server.scrapes == 5
    assert server.connections == 2  # the other is /health's
    assert ladder(batches[4]) == (0, 0, 3)
    source.close()


def test_we_say_what_we_read(server: PageServer, source: EngineSource) -> None:
    """The Rust frontend answers what it is asked for; without an Accept header it chose a form that broke a parser."""
    source.read(2.0)
    headers = next(headers for path, headers in reversed(server.seen) if path == "/metrics")

    assert "application/openmetrics-text;version=1.0.0" in headers["accept"]
    assert "text/plain;version=0.0.4" in headers["accept"]
    assert headers["accept-encoding"] == "identity"


def test_connections_of_others_are_counted_and_not_our_own(server: PageServer) -> None:
    """Ours to /metrics and /health are there all the time; whether anybody else is tells whether anything can run."""
    def connections() -> list[float]:
        source = EngineSource("t", server.url)
        source.read(1.0)
        batch = source.read(2.0)
        source.close()
        return [r.value for r in batch.readings if isinstance(r, Sample) and r.name == "connections"]

    until(lambda: connections() == [0.0])
    # a client of another process: what our own process holds is ours, the canary too
    hold = ("import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
            " print('ready', flush=True); sys.stdin.read()")
    command = [sys.executable, "-c", hold, str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        until(lambda: connections() == [1.0])
    assert foreign(9) is None  # nobody listens there, and we hold no connection to it


def test_a_url_that_ends_in_metrics_is_the_same_target(server: PageServer) -> None:
    """People copy the address from Prometheus's configuration."""
    source = EngineSource("t", server.url + "/metrics")

    assert is_whole(source.read(1.0))
    source.close()


def test_proxies_of_the_environment_are_not_for_the_engine(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """http_proxy was set on the node, and every engine there was down."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    source = EngineSource("t", server.url)

    assert is_whole(source.read(1.0))
    source.close()


def test_a_compressed_page_is_read(server: PageServer, source: EngineSource) -> None:
    """Some proxy compresses whatever was asked for."""
    server.set_page(gzip.compress(PAGE), headers={"Content-Encoding": "gzip"})

    assert is_whole(source.read(2.0))


def test_a_connection_that_the_server_has_closed_is_no_outage(server: PageServer, source: EngineSource) -> None:
    """uvicorn closes an idle connection after 5 s, which is just when the next poll is sent."""
    for i in range(3):
        server.stop()
        server.start()

        assert ladder(source.read(float(i))) == (0, 0, 3)


def test_a_server_that_ends_the_connection_after_each_answer(server: PageServer, source: EngineSource) -> None:
    """No keep-alive is no fault."""
    server.set_page(PAGE, headers={"Connection": "close", "Content-Length": ""})

    assert all(is_whole(source.read(float(i))) for i in range(3))


# -- slow --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", "drip", "drip-headers"])
def test_an_answer_that_does_not_end_is_left_at_the_deadline(
    server: PageServer, source: EngineSource, fault: Fault
) -> None:
    """A byte each 0.2 s is never late for a deadline that starts again with each byte; the thread hung for ever."""
    server.fault(fault)
    batch = source.read(2.0)

    assert SHORT_S * 0.9 < batch.took_s < SHORT_S + 0.5
    assert gap_of_kv(batch).code is Why.TIMEOUT
    assert gap_of_kv(batch).why == (
        f"/metrics of {server.url} fails: connected, but no whole answer within {SHORT_S:g} s"
    )
    assert batch.error == gap_of_kv(batch).why
    assert ladder(batch) == (Why.TIMEOUT, 1, 2)  # nobody knows whether it is down; /health was well
    server.fault("none")
    assert is_whole(source.read(3.0))


def test_a_connection_that_is_not_taken_is_slow_and_stands_on_no_rung() -> None:
    """A full listen queue or a firewall that drops: no TCP, and no refusal either."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        source = EngineSource("t", f"http://127.0.0.1:{address[1]}", connect_s=0.2, total_s=0.4, health_total_s=0.4)
        batch = source.read(1.0)
        source.close()
        for filler in fillers:
            filler.close()

    assert gap_of_kv(batch).why.endswith("fails: no connection within 0.2 s")
    assert gap_of_kv(batch).why.startswith("TCP of ")
    assert ladder(batch) == (Why.TIMEOUT, 1, 0)


def test_a_health_that_hangs_delays_no_metrics(server: PageServer) -> None:
    """Some engines run a generation in /health; under load it hung, and the numbers went with it."""
    server.set_health(200, delay_s=30)
    source = EngineSource("t", server.url, health_total_s=1.5)
    batches = [source.read(float(i)) for i in range(20)]

    assert max(batch.took_s for batch in batches) < 1.0
    assert all(is_whole(batch) for batch in batches)
    until(lambda: ladder(source.read(21.0)) == (0, 1, 1))  # /metrics well, /health late: slow, on TCP's rung
    server.set_health(200)
    until(lambda: ladder(source.read(22.0)) == (0, 0, 3))
    source.close()


# -- gone --------------------------------------------------------------------------------------------------------------


def test_a_port_that_refuses_is_down(server: PageServer, source: EngineSource) -> None:
    """The process has ended: every number is a Gap, none a 0, and the first rung is named."""
    server.stop()
    batch = source.read(2.0)

    assert ladder(batch) == (1, 0, 0)
    assert gap_of_kv(batch).code is Why.UNREACHABLE
    assert gap_of_kv(batch).why == f"TCP of {server.url} fails: refused: nothing listens there"
    assert not [r for r in batch.readings if isinstance(r, Sample) and r.name not in {"down", "slow", "rung"}]
    server.start()
    until(lambda: ladder(source.read(3.0)) == (0, 0, 3))


@pytest.mark.parametrize("fault", ["reset", "close"])
def test_a_connection_cut_without_an_answer_is_down(server: PageServer, source: EngineSource, fault: Fault) -> None:
    """Twice in a row it is no idle connection that was closed."""
    before = server.scrapes
    server.fault(fault)
    batch = source.read(2.0)

    assert ladder(batch)[:2] == (1, 0)
    assert gap_of_kv(batch).code is Why.UNREACHABLE
    assert server.scrapes - before == 2


def test_a_health_of_503_is_down_though_the_page_is_served(server: PageServer, source: EngineSource) -> None:
    """The engine core died; for seconds its API server went on to serve frozen gauges."""
    server.set_health(503)
    source = EngineSource("t", server.url)
    until(lambda: ladder(source.read(2.0)) == (1, 0, 1))

    assert is_whole(source.read(3.0))
    asked = server.healths
    source.read(4.0)
    until(lambda: server.healths > asked)  # while it is bad it is asked at every read
    source.close()


def test_tgis_health_under_load_is_slow_and_not_down(server: PageServer) -> None:
    """TGI#3241: /health said 503 under mere backpressure, and the replica was taken for dead."""
    server.set_page(PAGES["tgi-3.3.7"](600.0))
    server.set_health(503)
    source = EngineSource("t", server.url, connect_s=0.3, total_s=SHORT_S, health_total_s=SHORT_S)
    until(lambda: source.read(1.0).error is None and source._health.look() is not None)

    assert ladder(source.read(2.0)) == (0, 1, 1)
    server.set_page(PAGE)  # vLLM's 503 says that the core is dead
    assert ladder(source.read(3.0)) == (1, 0, 1)
    source.close()


def test_a_health_that_is_well_is_left_alone(server: PageServer) -> None:
    """It costs some engines a slot: as often as is said, however often the page is read."""
    source = EngineSource("t", server.url, health_every_s=0.4)
    began, scrapes = time.monotonic(), server.scrapes
    until(lambda: source.read(1.0).error is None and server.healths >= 3)
    took_s, scrapes = time.monotonic() - began, server.scrapes - scrapes
    source.close()

    assert took_s >= 2 * 0.4
    assert scrapes > 2 * server.healths


def test_a_page_that_is_none_is_told_as_such_before_health_was_heard(server: PageServer) -> None:
    """Its /health hangs for now: that /metrics serves a web page is known, and no other rung is blamed for it."""
    server.set_health(200, delay_s=30)
    server.set_page(b"<html>Sign in</html>", headers={"Content-Type": "text/html"})
    source = EngineSource("t", server.url)
    batch = source.read(1.0)
    source.close()

    assert (batch.error or "").startswith(f"/metrics of {server.url} fails: ")
    assert ladder(batch) == (0, 0, 2)


def test_a_server_without_health_has_answered(server: PageServer) -> None:
    """404 at /health is a server that has none."""
    server.set_health(404)
    source = EngineSource("t", server.url)
    source.read(1.0)
    until(lambda: server.healths == 1)

    assert ladder(source.read(2.0)) == (0, 0, 3)
    source.close()


def test_a_host_name_without_address_says_so() -> None:
    """A typing error in the configuration."""
    source = EngineSource("t", "http://no-such-host.invalid:8000", connect_s=0.5, total_s=1.0)
    batch = source.read(1.0)
    source.close()

    assert gap_of_kv(batch).code is Why.UNREACHABLE
    assert "the host name has no address" in gap_of_kv(batch).why
    assert ladder(batch) == (Why.UNREACHABLE, 0, 0)


# -- wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "headers", "code", "text"),
    [
        (PAGE, 500, {}, Why.BAD_STATUS, "HTTP 500"),
        (PAGE, 404, {}, Why.BAD_STATUS, "is it the engine's own port"),
        (PAGE, 401, {}, Why.BAD_STATUS, "it wants credentials"),
        (PAGE, 206, {}, Why.BAD_STATUS, "HTTP 206"),
        (b"[]", 200, {"Content-Type": "application/json"}, Why.NO_DATA, "it calls itself application/json"),
        (b"[]", 200, {}, Why.NO_DATA, "enable_iter_perf_stats is off"),
        (b'[{"a": 1}]', 200, {}, Why.BAD_PAGE, "not of TensorRT-LLM's iterations"),
        (b"[1", 200, {}, Why.BAD_PAGE, "no list of iterations"),
        (b"<html>\n<p>Sign in</p>\n", 200, {"Content-Type": "text/html"}, Why.BAD_PAGE, "it calls itself text/html"),
        (PAGE, 200, {"Content-Encoding": "gzip"}, Why.BAD_PAGE, "gzip"),
        (PAGE, 200, {"Content-Encoding": "br"}, Why.BAD_PAGE, "only gzip"),
        (gzip.compress(PAGE)[:-9], 200, {"Content-Encoding": "gzip"}, Why.BAD_PAGE, "incomplete"),
        (gzip.compress(bytes(33 << 20)), 200, {"Content-Encoding": "gzip"}, Why.TOO_LARGE, "33554432"),
        (b"", 200, {"Content-Length": str(33 << 20)}, Why.TOO_LARGE, "the answer has 34603008 bytes"),
    ],
)
def test_what_is_no_page_is_a_gap_and_not_an_outage(
    server: PageServer,
    source: EngineSource,
    body: bytes,
    status: int,
    headers: dict[str, str],
    code: Why,
    text: str,
) -> None:
    """A scrape that fails is not an engine that fails: it answered."""
    server.set_page(body, status=status, headers=headers)
    batch = source.read(2.0)

    assert gap_of_kv(batch).code is code
    assert text in gap_of_kv(batch).why
    assert ladder(batch) == (0, 0, 2)
    server.set_page(PAGE)
    assert is_whole(source.read(3.0))


def test_trtllms_json_is_read_where_there_is_nothing_else(server: PageServer, source: EngineSource) -> None:
    """aibrix#2004: /metrics of trtllm-serve is JSON; the last iteration counts, and doctor says where it is from."""
    server.set_page(trtllm_json(600.0), headers={"Content-Type": "application/json"})
    batch = source.read(2.0)

    told = {r.name: r.value for r in batch.readings if isinstance(r, Sample)}
    assert (told["waiting"], told["running"], told["kv_usage"], told["kv_blocks"]) == (2, 3, 0.83, 8000)
    assert isinstance(reading(batch, "ttft"), Gap)
    assert batch.engine is not None
    assert batch.engine.kind == "trtllm-serve"
    note = next(f.note for f in batch.engine.found if f.name == "kv_usage")
    assert note == "usedNumBlocks / maxNumBlocks of the JSON page"


def test_trtllms_prometheus_page_is_found_and_its_json_left_alone(server: PageServer) -> None:
    """Each read empties the JSON list: another monitor saw half of it. We read it once, at first sight."""
    server.set_page(trtllm_json(600.0), headers={"Content-Type": "application/json"})
    server.others["/prometheus/metrics"] = PAGES["trtllm-1.3"](600.0).encode()
    source = EngineSource("t", server.url)
    batches = [source.read(float(i)) for i in range(3)]

    assert [reading(batch, "kv_usage") for batch in batches] == [Sample("kv_usage", "t", 0.83, i) for i in range(3)]
    assert isinstance(next(r for r in batches[0].readings if r.name == "ttft"), Sample)
    assert server.scrapes == 1
    server.others.clear()
    server.set_page(PAGE)  # another engine listens here now
    assert is_whole(source.read(4.0))
    source.close()


def test_a_body_without_end_is_left_at_the_limit(server: PageServer) -> None:
    """No Content-Length, and more bytes than anybody should hold."""
    source = EngineSource("t", server.url)
    server.set_page(b"# x\n" * (9 << 20), headers={"Content-Length": ""})
    batch = source.read(1.0)
    source.close()

    assert gap_of_kv(batch).code is Why.TOO_LARGE


def test_half_a_page_is_no_page(server: PageServer, source: EngineSource) -> None:
    """The server died in the middle; its last number may be 5 of 53."""
    server.fault("truncate")
    batch = source.read(2.0)

    assert gap_of_kv(batch).code is Why.BAD_PAGE
    assert "incomplete read" in gap_of_kv(batch).why
    server.fault("none")
    assert is_whole(source.read(3.0))


def chunked(body: bytes) -> bytes:
    """Transfer-Encoding: chunked, in pieces of 1,000 bytes."""
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_page_in_chunks_is_read_and_half_of_it_is_not(server: PageServer, source: EngineSource) -> None:
    """A proxy before the engine sends no Content-Length: the end is told by the last chunk alone."""
    headers = {"Transfer-Encoding": "chunked", "Content-Length": ""}
    server.set_page(chunked(PAGE), headers=headers)
    assert is_whole(source.read(2.0))
    server.set_page(chunked(PAGE)[:30_000], headers=headers)
    batch = source.read(3.0)

    assert gap_of_kv(batch).code is Why.BAD_PAGE
    assert "incomplete read" in gap_of_kv(batch).why


def test_chunks_tell_the_end_whatever_length_stands_beside_them(server: PageServer, source: EngineSource) -> None:
    """A proxy compressed or re-chunked the page and left the old length there: chunks override it (RFC 9112, 6.3)."""
    server.set_page(chunked(PAGE), headers={"Transfer-Encoding": "chunked", "Content-Length": str(len(PAGE) + 11)})
    assert is_whole(source.read(2.0))


def test_what_is_not_http_is_said(server: PageServer) -> None:
    """The port of something else: it answers, though nothing that we know."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        source = EngineSource("t", f"http://127.0.0.1:{other.getsockname()[1]}", health_total_s=SHORT_S)

        def greet() -> None:
            with suppress(OSError):  # until it is shut down
                while True:
                    with other.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1000):  # what is left unread would reset it
                            pass

        thread = threading.Thread(target=greet)
        thread.start()
        batch = source.read(1.0)
        source.close()
        other.shutdown(socket.SHUT_RDWR)
        thread.join(30)

    assert gap_of_kv(batch).code is Why.ERROR
    assert gap_of_kv(batch).why.endswith("fails: no HTTP answer: BadStatusLine")


def test_a_redirect_to_what_is_no_address_is_a_gap(server: PageServer, source: EngineSource) -> None:
    """Half an IPv6 address (found by tests.fuzz): the read failed with a fault of ours."""
    server.set_page(b"", status=302, headers={"Location": "http://[::1/metrics"})

    assert "it sends us to 'an address that is not valid'" in gap_of_kv(source.read(2.0)).why


def test_a_redirect_to_elsewhere_is_not_followed(server: PageServer, source: EngineSource) -> None:
    """An engine's port was taken over by something that sends us to another host, with a secret in the address."""
    with PageServer(PAGE) as elsewhere:
        there = f"http://user:hunter2@127.0.0.1:{elsewhere.port}/metrics?token=hunter2"
        server.set_page(b"", status=302, headers={"Location": there})
        batch = source.read(2.0)

        assert gap_of_kv(batch).code is Why.BAD_STATUS
        assert f"it sends us to 'http://127.0.0.1:{elsewhere.port}/metrics'" in gap_of_kv(batch).why
        assert "hunter2" not in repr(batch)
        assert elsewhere.scrapes == 0


def test_a_slash_at_the_end_is_followed_and_remembered(server: PageServer, source: EngineSource) -> None:
    """Old vLLM sends /metrics to /metrics/ with a 307."""
    server.set_page(b"", status=307, headers={"Location": "/metrics/"})
    source.read(2.0)
    assert server.seen[-1][0] == "/metrics/"
    server.set_page(PAGE)

    assert is_whole(source.read(3.0))
    assert server.seen[-1][0] == "/metrics/"


def test_the_password_of_an_address_is_never_shown() -> None:
    """Whatever goes wrong, the text goes to pages, logs and tickets."""
    source = EngineSource("t", "http://user:hunter2@127.0.0.1:1")
    batch = source.read(1.0)
    source.close()

    assert "hunter2" not in repr(batch)
    assert "http://127.0.0.1:1" in (batch.error or "")


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_engines_of_a_target_keep_their_names_while_it_is_gone(server: PageServer, source: EngineSource) -> None:
    """The Gaps must be of the subjects whose timers they hold."""
    two = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % i for i in range(2))
    source = EngineSource("t", server.url)
    server.set_page(two)
    source.read(1.0)
    server.stop()
    batch = source.read(2.0)
    source.close()

    assert {r.subject for r in batch.readings if r.name == "running"} == {"t/0", "t/1"}
    assert batch.engine is not None
    assert batch.engine.engines == ("t/0", "t/1")


def test_the_shape_of_an_earlier_run_is_kept(server: PageServer) -> None:
    """After a restart of ours the one engine that is left keeps the name that its alert has."""
    source = EngineSource("t", server.url, shape=True)
    batch = source.read(1.0)
    source.close()

    assert batch.engine is not None
    assert batch.engine.engines == ("t/0",)


def test_it_stops_when_it_is_closed(server: PageServer) -> None:
    """A reload of the configuration leaves no thread behind."""
    before = threading.active_count()
    source = EngineSource("t", server.url)
    source.read(1.0)
    until(lambda: server.healths == 1)
    source.close()

    until(lambda: not [t for t in threading.enumerate() if t.name == "health"] or threading.active_count() <= before)


def test_a_recording_replays_in_time() -> None:
    """The replay server itself: at 100 times the speed its 281 s last 2.8 s, and the cache is full in between."""
    with PageServer.replay(RECORDING, factor=100) as replay:
        source = EngineSource("t", replay.url)
        kv: list[float] = []

        def is_over() -> bool:
            it = reading(source.read(1.0), "kv_usage")
            assert isinstance(it, Sample)
            kv.append(it.value)
            return max(kv) == 1.0 and kv[-1] == 0.0

        until(is_over, 60.0)
        source.close()
