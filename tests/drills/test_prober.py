"""The prober against a real server that misbehaves: what each request came to, and whether its load was as asked."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from drills import prober
from drills.completion import Attempt, Client, place_of
from drills.model import Load, Outcome, Refused, Request
from drills.prober import Counts, Histogram, Prober, Records, read_requests
from tests.drills.openai_server import Behaviour, OpenAiServer
from tests.receiver import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with OpenAiServer() as running:
        yield running


def load_of(server: OpenAiServer, **changes: Any) -> Load:
    return Load(**{"url": server.url, "model": "tiny", "deadline_s": 2.0, "max_tokens": 5, **changes})


def ask(server: OpenAiServer, *, path: str = "", keep: Sequence[str] = (), key: str | None = None,
        **changes: Any) -> Attempt:  # fmt: skip
    """One attempt in this process."""
    with client_of(server, key, keep, **{"url": server.url + path, **changes}) as client:
        return client.attempt("logical-1", 1, "Count.", time.monotonic() + changes.get("deadline_s", 2.0))


@contextlib.contextmanager
def client_of(server: OpenAiServer, key: str | None = None, keep: Sequence[str] = (), **changes: Any,
              ) -> Iterator[Client]:  # fmt: skip
    client = Client(load_of(server, **changes), key, keep)
    yield client
    client.close_idle(0.0)


# One attempt.


@pytest.mark.parametrize("path", ["", "/completions", "/chat/completions"])
def test_a_stream_is_timed_chunk_by_chunk(server: OpenAiServer, path: str) -> None:
    """A chat stream opens with a role and no text: taken for the first token, it made every TTFT look like 0."""
    server.set(Behaviour(chunks=4, first_s=0.15, pace_s=0.05))
    before = time.monotonic()

    got = ask(server, path=path)

    assert (got.outcome, got.error, got.status) == ("ok", None, 200)
    assert (got.chunks, len(got.gaps_s), got.finish_reason, got.model) == (4, 3, "length", "tiny")
    assert got.first is not None
    assert 0.14 <= got.first - before < 0.4  # 0.15 s asked; the machine is shared
    assert 0.1 <= sum(got.gaps_s) < 0.4  # three gaps of 0.05 s
    assert got.ended - before >= 0.29
    assert server.log[0].path == "/v1" + (path or "/completions")


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_without_a_stream_the_whole_answer_is_the_first_token(server: OpenAiServer, path: str) -> None:
    """heron's first token of answers without streaming was their last: it must at least be the same number."""
    server.set(Behaviour(chunks=4, pace_s=0.025, model="small"))
    before = time.monotonic()

    got = ask(server, path=path, streaming=False)

    assert (got.outcome, got.chunks, got.gaps_s, got.model, got.finish_reason) == ("ok", 1, [], "small", "length")
    assert got.first is not None
    assert 0.09 <= got.first - before < 0.3


class Case:
    """What a behaviour must be told as."""

    def __init__(self, story: str, how: Behaviour, outcome: Outcome, error: str, chunks: int = 0, **load: Any) -> None:
        self.story, self.how, self.load = story, how, load
        self.outcome, self.error, self.chunks = outcome, error, chunks


CASES = [
    Case("a wrong model name", Behaviour(status=404, says="no model `x`"), "http_4xx", "HTTP 404: no model `x`"),
    Case("a bad key: what the server says of it may hold it", Behaviour(status=401, says="sk-1 is bad"), "http_4xx",
         "HTTP 401"),
    Case("an overloaded gateway", Behaviour(status=429, retry_after="1"), "http_429", "HTTP 429"),
    Case("a dead engine behind a router", Behaviour(status=502), "http_5xx", "HTTP 502"),
    Case("a redirect is nothing a POST may follow", Behaviour(status=307), "bad_answer", "HTTP 307"),
    Case("a stopped engine that accepts", Behaviour(fault="hang"), "timeout", "no answer within the deadline of 0.4 s",
         deadline_s=0.4),
    Case("a byte of the headers each 0.1 s is never late for one read", Behaviour(fault="drip"), "timeout",
         "no answer within the deadline of 0.4 s", deadline_s=0.4),
    Case("killed before it answered", Behaviour(fault="reset"), "reset", "cut off before the first token"),
    Case("closed before it answered", Behaviour(fault="close"), "reset", "cut off before the first token"),
    Case("killed within an answer", Behaviour(fault="break"), "broken", "cut off after 2 chunks", 2),
    Case("nginx ends the chunked body of a dead upstream like this, and logs 200", Behaviour(fault="cut"), "broken",
         "cut off after 2 chunks", 2),
    Case("killed after the headers", Behaviour(fault="break", after=0), "reset", "cut off before the first token"),
    Case("a hang within a stream", Behaviour(fault="stall"), "timeout", "no end within the deadline of 0.4 s", 2,
         deadline_s=0.4),
    Case("inference-perf and guidellm counted errors inside a 200 as answers", Behaviour(fault="error"), "broken",
         "an error inside a 200", 2),
    Case("the same before any token", Behaviour(fault="error", after=0), "bad_answer", "an error inside a 200"),
    Case("a chunk that is no JSON", Behaviour(fault="json"), "bad_answer", "what came is no JSON of this API", 2),
    Case("[DONE], and nobody said why", Behaviour(finish_reason=None), "bad_answer",
         "the stream ended without a finish_reason", 5),
    Case("no [DONE] and no finish_reason: the answer is cut", Behaviour(finish_reason=None, is_done=False), "broken",
         "the stream ended before its answer did", 5),
    Case("an engine that aborts tells it by its finish_reason alone", Behaviour(finish_reason="abort"), "broken",
         "finish_reason 'abort'", 5),
    Case("a gateway that does not stream", Behaviour(is_stream=False), "bad_answer",
         "asked for a stream, got application/json"),
    Case("an error inside a 200, without streaming", Behaviour(fault="error"), "bad_answer", "an error inside a 200",
         streaming=False),
    Case("cut within a whole answer", Behaviour(fault="truncate"), "reset", "cut off before the first token",
         streaming=False),
    Case("a whole answer without a finish_reason", Behaviour(finish_reason=None), "bad_answer",
         "no finish_reason in the answer", streaming=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.story)
def test_what_went_wrong_has_its_class(server: OpenAiServer, case: Case) -> None:
    """A judge that sees one heap of errors cannot tell a broken stream from a refusal."""
    server.set(case.how)
    before = time.monotonic()

    got = ask(server, **case.load)

    assert (got.outcome, got.error, got.chunks) == (case.outcome, case.error, case.chunks)
    assert got.ended - before < case.load.get("deadline_s", 2.0) + 0.5


STREAMS: list[tuple[str, bytes, Outcome, int]] = [
    ("a comment keeps a connection alive, and is no token",
     (b': ping\n\ndata: {"choices":[{"text":"a"}]}\n\n: ping\n\n'
     b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'), "ok", 2),
    ("lines may end in CR LF, and the space is not needed",
     b'data:{"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\ndata:[DONE]\r\n\r\n', "ok", 1),
    ("the usage comes after the finish, without choices",
     (b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"error":null}\n\n'
     b'data: {"choices":[],"usage":{"total_tokens":9}}\n\ndata: [DONE]\n\n'), "ok", 1),
    ("a thought is a token, by either name, and so is a tool call",
     (b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
     b'data: {"choices":[{"delta":{"reasoning_content":"a"}}]}\n\ndata: {"choices":[{"delta":{"reasoning":"b"}}]}\n\n'
     b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]},"finish_reason":"tool_calls"}]}\n\n'), "ok", 3),
    ("an answer without a word has its first token at its end",
     b'data: {"choices":[{"text":""}]}\n\ndata: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n', "ok", 1),
    ("the last event may lack its empty line",
     b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]', "ok", 1),
    ("an error by its event's name", b'event: error\ndata: {"message":"out of memory"}\n\n', "bad_answer", 0),
    ("llama.cpp's error is a field of its own",
     b'data: {"choices":[{"text":"a"}]}\n\nerror: {"code":500}\n\n', "broken", 1),
    ("an old vLLM's error is an object", b'data: {"object":"error","message":"aborted"}\n\n', "bad_answer", 0),
    ("an array is no chunk", b"data: []\n\n", "bad_answer", 0),
    ("nothing at all", b"", "bad_answer", 0),
]  # fmt: skip


@pytest.mark.parametrize(("story", "raw", "outcome", "chunks"), STREAMS, ids=lambda value: str(value)[:40])
def test_the_dialects_of_a_stream(server: OpenAiServer, story: str, raw: bytes, outcome: Outcome, chunks: int) -> None:
    """Each server writes its events a little differently, and its errors very differently."""
    server.set(Behaviour(raw=raw))

    got = ask(server)

    assert (got.outcome, got.chunks) == (outcome, chunks), (story, got.error)
    assert (got.first is not None) == bool(chunks)


def test_an_answer_without_done_is_whole_by_its_finish_reason(server: OpenAiServer) -> None:
    """Not every server says [DONE]; its users got all they asked for."""
    server.set(Behaviour(is_done=False))

    assert ask(server).outcome == "ok"


def test_nobody_listens(server: OpenAiServer) -> None:
    """A killed engine without a router before it."""
    server.stop()

    got = ask(server)

    assert (got.outcome, got.error) == ("refused", "no connection: refused")


def test_a_host_name_that_is_not() -> None:
    """A drill against yesterday's service name read as a failing service; it is refused with the reason."""
    client = Client(Load(url="http://no-such-host.invalid/v1", model="tiny"))

    got = client.attempt("logical-1", 1, "Count.", time.monotonic() + 5)

    assert got.outcome == "refused"
    assert got.error is not None
    assert got.error.startswith("no connection: ")


def test_a_tls_client_at_a_plain_port(server: OpenAiServer) -> None:
    """https:// typed for http:// must not look like a dead service."""
    got = ask(server, url=server.url.replace("http:", "https:"))

    assert got.outcome == "refused"
    assert got.error is not None
    assert got.error.startswith("no TLS: ")


def test_what_a_degradation_is_seen_by_is_kept(server: OpenAiServer) -> None:
    """The fallback to a small model was in force, and nothing in the record showed it."""
    server.set(Behaviour(model="small", headers={"X-Served-By": "fallback", "X-Other": "1"}))

    got = ask(server, keep=["x-served-by", "x-absent"])

    assert (got.model, got.headers) == ("small", {"x-served-by": "fallback"})


def test_one_logical_request_has_one_key_and_an_id_for_each_attempt(server: OpenAiServer) -> None:
    """vLLM takes X-Request-Id for its own, and answers 400 to a second attempt with an id that still runs there."""
    with client_of(server) as client:
        for number in (1, 2):
            client.attempt("logical-7", number, "Count.", time.monotonic() + 30)

    assert [(s.key, s.request_id, s.attempt) for s in server.log] == [
        ("logical-7", "logical-7", 1), ("logical-7", "logical-7-2", 2)
    ]  # fmt: skip


@pytest.mark.parametrize(("connections", "want"), [("kept", 1), ("new", 3)])
def test_connections_are_kept_or_new_as_declared(server: OpenAiServer, connections: str, want: int) -> None:
    """Under packet loss new connections pay for lost SYNs by the second: which it was decides what a p99 means."""
    with client_of(server, connections=connections) as client:
        for how in (Behaviour(), Behaviour(status=500), Behaviour()):
            server.set(how)
            client.attempt("logical-1", 1, "Count.", time.monotonic() + 30)

    assert server.connections == want


def test_a_kept_connection_that_the_server_closed_is_no_error(server: OpenAiServer) -> None:
    """uvicorn closes an idle connection after 5 s: the next request went into it, and read as a reset."""
    with client_of(server) as client:
        first = client.attempt("logical-1", 1, "Count.", time.monotonic() + 30)
        server.stop()
        server.start()

        second = client.attempt("logical-2", 1, "Count.", time.monotonic() + 30)

    assert (first.outcome, second.outcome) == ("ok", "ok")


def test_a_connection_that_breaks_under_way_is_told(server: OpenAiServer) -> None:
    """A client that silently tries again on a fresh connection hides just what the drill looks for."""
    with client_of(server) as client:
        client.attempt("logical-1", 1, "Count.", time.monotonic() + 30)
        server.set(Behaviour(fault="reset"))

        got = client.attempt("logical-2", 1, "Count.", time.monotonic() + 30)

    assert got.outcome == "reset"
    assert len(server.log) == 2


def test_all_addresses_of_a_name_share_the_deadline(server: OpenAiServer) -> None:
    """localhost is ::1 first in many places, and nothing listens there."""
    got = ask(server, url=f"http://localhost:{server.port}/v1")

    assert got.outcome == "ok"


@pytest.mark.parametrize(
    ("url", "path", "models_path"),
    [
        ("http://h/v1", "/v1/completions", "/v1/models"),
        ("http://h:81/v1/", "/v1/completions", "/v1/models"),
        ("https://h/x/v1/chat/completions", "/x/v1/chat/completions", "/x/v1/models"),
        ("https://h/v1/completions", "/v1/completions", "/v1/models"),
    ],
)
def test_the_address_is_used_as_it_was_given(url: str, path: str, models_path: str) -> None:
    """A base, or the whole path: both are what people copy."""
    place = place_of(url)

    assert (place.path, place.models_path) == (path, models_path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("llm.internal/v1", "begin with http"),
        ("http://me:secret@h/v1", "load.api_key_file"),
        ("http://h/v 1", "without blanks"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(url: str, why: str) -> None:
    """A password in an address ends in a report."""
    with pytest.raises(Refused, match=why) as refused:
        place_of(url)

    assert "secret" not in str(refused.value)


# The process.


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Prober]]:
    running: list[Prober] = []

    def begin(load: Load, headers: Sequence[str] = ()) -> Prober:
        running.append(prober.start(load, tmp_path, headers))
        return running[-1]

    yield begin
    for each in running:
        each.kill()


@pytest.mark.heavy
def test_the_rate_is_kept_and_told(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """50 requests/s of 20 chunks for 2 s: the load is what was asked, and the server saw just that."""
    server.set(Behaviour(chunks=20, pace_s=0.005))
    running = start(load_of(server, rate_per_s=50.0, deadline_s=10.0))
    wait_until(lambda: running.latest["asked"] >= 100, what="100 requests")

    last = running.stop()

    requests = running.requests()
    assert last["asked"] == last["sent"] == last["finished"] == last["attempts"] == len(requests) == len(server.log)
    assert (last["dropped"], last["in_flight"], last["unwritten"]) == (0, 0, 0)
    assert last["outcomes"] == {"ok": len(requests)}
    assert {r.chunks for r in requests} == {20}
    assert last["ttft"]["+Inf"] == last["ttft"]["count"] == last["e2e"]["count"] == len(requests)
    assert last["itl"]["count"] == 19 * len(requests)
    due = sorted(r.due_at for r in requests)
    gaps_s = [b - a for a, b in itertools.pairwise(due)]
    assert 0.0099 < min(gaps_s) < max(gaps_s) < 0.0301  # a gap of 20 ms, less or more half of it
    assert (due[-1] - due[0]) / (len(due) - 1) == pytest.approx(0.02, rel=0.02)
    late_s = sorted(r.late_s for r in requests)
    assert late_s[len(late_s) // 2] < 0.05  # half of them within two gaps, on a machine that others use
    assert running.kept() == (1.0, late_s[-(len(late_s) // 100) - 1])  # so that at most one in a hundred is later
    assert not running.alive


def test_nobody_waits_for_answers(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """vllm#28493: a client that waits for the answer before it asks again hides the overload that it should find."""
    server.set(Behaviour(fault="hang"))
    running = start(load_of(server, rate_per_s=40.0, deadline_s=1.0))

    seen = server.wait_until(lambda log: len(log) >= 30, timeout_s=5.0)

    assert seen[29].at - seen[0].at == pytest.approx(29 / 40, abs=0.35)
    last = running.stop()
    assert set(last["outcomes"]) == {"timeout"}
    assert last["ttft"]["1"] < last["ttft"]["count"] == last["finished"]  # each waited its second, and is told so


def test_it_says_when_it_has_no_thread_left(server: OpenAiServer, start: Callable[..., Prober],
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A load that silently became a quarter of what was asked made a drill PASS."""
    server.set(Behaviour(fault="hang"))
    counts = Counts()
    load = load_of(server, rate_per_s=100.0, deadline_s=0.5)
    monkeypatch.setattr(prober, "MAX_THREADS", 5)
    records = Records(Path(os.devnull))
    sender, stopping = prober.Sender(load, Client(load), counts, records, 0.0), threading.Event()
    thread = threading.Thread(target=sender.run, args=(stopping,))
    thread.start()
    server.wait_until(lambda log: len(log) >= 5)
    time.sleep(0.1)  # ten more fall due
    line = counts.line(0.0)
    stopping.set()
    thread.join()

    assert counts.wait_idle(3.0)
    assert line["asked"] - line["sent"] == line["dropped"] > 0
    assert line["kept_rate"] is False
    assert line["why"].endswith("not sent: all 5 threads wait for answers")


@pytest.mark.heavy
def test_it_says_when_it_was_held_up_and_sends_no_burst(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """A suspended prober woke up and sent all that had fallen due at once: a storm of the drill's own making."""
    running = start(load_of(server, rate_per_s=50.0))
    wait_until(lambda: running.latest["sent"] >= 20)
    os.kill(running.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    time.sleep(2.0)
    before = len(server.log)
    stopped_s = time.monotonic() - stopped
    os.kill(running.pid, signal.SIGCONT)
    wait_until(lambda: running.latest["dropped"] > 0)

    last = running.stop()

    assert last["dropped"] == last["asked"] - last["sent"]
    assert 20 <= last["dropped"] <= 50 * stopped_s  # what fell due over 1 s before it woke: of 2 s the first
    assert running.kept()[0] == pytest.approx(last["sent"] / last["asked"])
    assert any("not sent: the prober itself was held up" in why for _, why in running.slips)
    awake_s = time.monotonic() - stopped - stopped_s
    assert len(server.log) - before <= 50 * (awake_s + 1.1) + 5


def test_retries_are_attempts_of_the_same_request(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """A retry that counts as a request of its own hides the retry storm in a higher rate."""
    server.script(Behaviour(status=503))
    running = start(load_of(server, rate_per_s=1.0, retries=1, deadline_s=5.0))
    once, again, *_ = server.wait_until(lambda log: len(log) >= 3)

    last = running.stop()

    first, *others = running.requests()
    assert (first.id, first.outcome, first.attempts, first.status) == (once.key, "ok", 2, 200)
    assert (again.key, again.attempt) == (once.key, 2)
    assert 0.37 <= again.at - once.at < 1.0  # 0.5 s, less up to a quarter
    assert {r.attempts for r in others} == {1}
    assert last["attempts"] == last["sent"] + 1 == len(server.log)


def logical(server: OpenAiServer, tmp_path: Path, **changes: Any) -> Request:
    """One logical request, in this process."""
    with client_of(server, **changes) as client:
        records = Records(tmp_path / "r.jsonl")
        sender = prober.Sender(load_of(server, **changes), client, Counts(), records, epoch=1000.0)
        now = time.monotonic()
        return sender._logical(0, now, now)


@pytest.mark.parametrize(
    ("story", "script", "outcome", "attempts"),
    [
        ("a broken stream is never sent again: its user has seen half of it", [Behaviour(fault="break")], "broken", 1),
        ("nor is our own mistake", [Behaviour(status=400)], "http_4xx", 1),
        ("nor an answer that makes no sense", [Behaviour(fault="json", after=0)], "bad_answer", 1),
        ("a reset before the first token is", [Behaviour(fault="reset")], "ok", 2),
        ("and a 5xx, until the retries are used up", [Behaviour(status=500)] * 3, "http_5xx", 3),
        ("a 429 too", [Behaviour(status=429)], "ok", 2),
    ],
)
def test_what_is_tried_again(server: OpenAiServer, tmp_path: Path, story: str, script: list[Behaviour],
                             outcome: Outcome, attempts: int) -> None:  # fmt: skip
    """OpenAI's client retries some failures and not others; a prober that differs drills another service."""
    server.script(*script)

    request = logical(server, tmp_path, retries=2, deadline_s=5.0)

    assert (request.outcome, request.attempts) == (outcome, attempts), story
    assert len(server.log) == attempts


def test_retry_after_is_waited_for(server: OpenAiServer, tmp_path: Path) -> None:
    """A client that hammers a server which asked for a pause is the storm."""
    server.script(Behaviour(status=429, retry_after="1"))

    request = logical(server, tmp_path, retries=1, deadline_s=5.0)

    assert (request.outcome, request.attempts) == ("ok", 2)
    assert 1.0 <= server.log[1].at - server.log[0].at < 1.5
    assert request.first_at is not None
    assert request.first_at - request.sent_at >= 1.0  # its user waited that long


def test_a_pause_beyond_the_deadline_ends_the_request(server: OpenAiServer, tmp_path: Path) -> None:
    """Sleeping through a deadline to ask once more is no use to anybody."""
    server.script(Behaviour(status=503, retry_after="30"))
    before = time.monotonic()

    request = logical(server, tmp_path, retries=3, deadline_s=20.0)

    assert (request.outcome, request.attempts) == ("http_5xx", 1)
    assert time.monotonic() - before < 10.0


@pytest.mark.heavy
def test_a_server_that_goes_and_comes_back(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """What a process-kill looks like at the user's address without a router: ok, refused, ok."""
    running = start(load_of(server, rate_per_s=40.0))
    wait_until(lambda: running.latest["outcomes"].get("ok", 0) >= 10)
    server.stop()
    wait_until(lambda: running.latest["outcomes"].get("refused", 0) >= 10)
    back = running.latest["outcomes"]["ok"]
    server.start()
    wait_until(lambda: running.latest["outcomes"]["ok"] >= back + 20)

    running.stop()

    requests = sorted(running.requests(), key=lambda r: r.sent_at)
    refused = [n for n, r in enumerate(requests) if r.outcome == "refused"]
    assert {r.outcome for r in requests} <= {"ok", "refused", "reset", "broken"}
    assert requests[0].outcome == requests[-1].outcome == "ok"
    assert all(r.outcome in ("refused", "reset", "broken") for r in requests[refused[0] : refused[-1] + 1])
    assert all(r.first_at is None for r in requests if r.outcome == "refused")


def test_the_model_is_asked_for(start: Callable[..., Prober]) -> None:
    """A drill without a model name takes the first that is served."""
    with OpenAiServer(models=("llama-70b", "a-lora")) as server:
        running = start(load_of(server, model=None, rate_per_s=20.0))
        first = server.wait_until(bool)[0]
        running.stop()

    assert first.asked["model"] == "llama-70b"
    assert first.asked["stream"] is True
    assert first.asked["max_tokens"] == 5


def test_each_prompt_is_its_own_and_long_enough(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """One prompt for all sat in one replica's cache; and a prompt of 4 tokens ends vLLM's engine on CPUs."""
    running = start(load_of(server, rate_per_s=40.0, prompt="Hi"))
    seen = server.wait_until(lambda log: len(log) >= 5)
    running.stop()

    prompts = [s.asked["prompt"] for s in seen]
    assert len({prompt[:40] for prompt in prompts}) == len(prompts)
    assert all(len(prompt.split()) >= 8 and prompt.endswith(" Hi") for prompt in prompts)


def test_a_load_that_cannot_be_sent_is_refused_at_once(server: OpenAiServer, start: Callable[..., Prober],
                                                       tmp_path: Path) -> None:  # fmt: skip
    """Each reason names its key, so that the person who wrote it can mend it."""
    (tmp_path / "two-lines").write_text("sk-1\nsk-2\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"url": "nowhere"}, "load.url: it must begin with http:// or https:// and name a host"),
        ({"api_key_file": f"{tmp_path}/none"}, f"load.api_key_file: {tmp_path}/none: No such file"),
        ({"api_key_file": f"{tmp_path}/two-lines"}, "it must hold the key alone, on one line"),
        ({"rate_per_s": 0.0}, "load: rate_per_s and deadline_s must be above 0"),
        ({"url": server.url + "/x", "model": None}, "HTTP 404; name the model in load.model"),
    ]
    for changes, why in cases:
        with pytest.raises(Refused) as refused:
            start(load_of(server, **changes))
        assert why in str(refused.value)
        assert "sk-1" not in str(refused.value)


def test_the_key_is_sent_and_appears_nowhere(server: OpenAiServer, start: Callable[..., Prober],
                                             tmp_path: Path) -> None:  # fmt: skip
    """A gateway quotes the key in its error, the error goes into the report, and the report goes to everybody."""
    key_file = tmp_path / "key"
    key_file.write_text("sk-topsecret\n")
    server.set(Behaviour(status=400, says="your key sk-topsecret has no right to this model"))
    running = start(load_of(server, rate_per_s=20.0, api_key_file=str(key_file)))
    seen = server.wait_until(lambda log: len(log) >= 3)
    command_line = Path(f"/proc/{running.pid}/cmdline").read_bytes()

    last = running.stop()

    assert seen[0].headers["authorization"] == "Bearer sk-topsecret"
    key_file.unlink()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"topsecret" not in written + command_line + str(last).encode()
    assert running.requests()[0].error == "HTTP 400: your key *** has no right to this model"


def test_it_ends_with_its_parent(server: OpenAiServer, tmp_path: Path) -> None:
    """A runner that was killed left a prober behind, which loaded the service for ever."""
    script = textwrap.dedent(f"""
        import os, pathlib, time
        from drills import prober
        from drills.model import Load
        running = prober.start(Load(url={server.url!r}, model="tiny", rate_per_s=20.0), pathlib.Path({str(tmp_path)!r}))
        print(running.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    server.set(Behaviour(fault="hang"))  # what is in flight does not hold it either
    server.wait_until(lambda log: len(log) >= 3)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not is_running(child), timeout_s=3.0, what="the prober's end")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_stop_waits_for_what_is_in_flight(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """Streams that the prober itself cut at its end were counted as broken by the fault."""
    server.set(Behaviour(chunks=10, pace_s=0.08))
    running = start(load_of(server, rate_per_s=20.0, deadline_s=5.0))
    server.wait_until(lambda log: len(log) >= 10)

    last = running.stop()
    seen = len(server.log)

    assert last["outcomes"] == {"ok": seen}
    assert running.stop() == last  # may be said again


def test_ctrl_c_is_for_the_runner(server: OpenAiServer, start: Callable[..., Prober]) -> None:
    """A Ctrl-C goes to the whole group: the load ended before the fault did, and nobody saw the recovery."""
    running = start(load_of(server))

    assert os.getpgid(running.pid) != os.getpgid(0)


def test_times_stand_on_a_clock_that_is_never_set(server: OpenAiServer, tmp_path: Path) -> None:
    """ntpd stepped the clock by a second, and one TTFT was negative: only the epoch is wall time."""
    server.set(Behaviour(first_s=0.1))
    before = time.monotonic()

    request = logical(server, tmp_path)

    assert 1000.0 + before <= request.sent_at <= request.due_at + 0.5
    assert request.first_at is not None
    assert request.sent_at + 0.09 <= request.first_at <= request.ended_at <= 1000.0 + time.monotonic()


# What is written down.


def a_request(**changes: Any) -> Request:
    return Request(**{"id": "a", "due_at": 10.0, "sent_at": 10.0, "first_at": 10.1, "ended_at": 11.0, "outcome": "ok",
                      "chunks": 3, "itl_s": [0.02, 0.4], **changes})  # fmt: skip


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """The judge reads what the prober wrote, field by field."""
    request = a_request(headers={"X-Served-By": "b"}, finish_reason="stop", model="m", status=200)
    path = tmp_path / "requests.jsonl"
    records = Records(path)

    assert records.write(request)

    assert list(read_requests(path)) == [request]
    assert path.stat().st_mode & 0o077 == 0


def test_half_a_line_costs_one_request(tmp_path: Path) -> None:
    """Killed in the middle of a line, or a full disk: the rest of the file is as good as before."""
    path = tmp_path / "requests.jsonl"
    records = Records(path)
    records.write(a_request(id="first"))
    with path.open("ab") as file:
        file.write(b'{"id": "torn", "due_at"\n')
    records.write(a_request(id="last"))

    assert [r.id for r in read_requests(path)] == ["first", "last"]
    assert list(read_requests(tmp_path / "none")) == []


def test_a_full_disk_ends_no_load(tmp_path: Path) -> None:
    """/dev/full is a disk without a byte left: the line is lost, and that is counted."""
    counts = Counts()
    counts.asked()
    request = a_request()

    is_written = Records(Path("/dev/full")).write(request)
    counts.ended(request, streaming=True, is_written=is_written)

    line = counts.line(0.0)
    assert (line["unwritten"], line["finished"]) == (1, 1)


def test_a_histogram_counts_as_prometheus_does() -> None:
    """A value on a bound belongs to it, and each bucket holds those below."""
    histogram = Histogram((0.1, 0.5))
    for value_s in (0.05, 0.1, 0.2, 7.0):
        histogram.add(value_s)

    assert histogram.told() == {"0.1": 2, "0.5": 3, "+Inf": 4, "sum": 7.35, "count": 4}


@pytest.mark.parametrize(
    ("story", "request_", "streaming", "want"),
    [
        ("a stream tells all three", a_request(), True, (1, 2, 1)),
        ("one that broke was still heard", a_request(outcome="broken"), True, (1, 2, 0)),
        ("a whole answer has no first token that a user sees", a_request(itl_s=[]), False, (0, 0, 1)),
        ("a refusal has no latency", a_request(first_at=None, itl_s=[], outcome="refused"), True, (0, 0, 0)),
        ("a deadline without a token is a slow one", a_request(first_at=None, itl_s=[], outcome="timeout"), True,
         (1, 0, 0)),
    ],
)  # fmt: skip
def test_what_counts_in_which_histogram(story: str, request_: Request, streaming: bool,
                                        want: tuple[int, int, int]) -> None:  # fmt: skip
    """Those who gave up were left out, and p99 got better the worse it was."""
    counts = Counts()
    counts.asked()
    counts.ended(request_, streaming=streaming, is_written=True)

    line = counts.line(0.0)

    assert (line["ttft"]["count"], line["itl"]["count"], line["e2e"]["count"]) == want, story


def test_the_bounds_have_the_service_levels() -> None:
    """A p99 between 0.1 and 0.25 s cannot be held against 0.15 s."""
    for bounds_s in (prober.TTFT_S, prober.ITL_S, prober.E2E_S):
        assert {0.15, 0.5} <= set(bounds_s)
        assert list(bounds_s) == sorted(set(bounds_s))


def test_late_sending_is_told_in_its_second() -> None:
    """Of 200, three went out 0.2 s late: p99 is one of them, by hand the 198th of the sorted."""
    counts = Counts()
    for n in range(200):
        counts.asked()
        counts.sent(0.2 if n < 3 else 0.001)

    line, after = counts.line(1.0), counts.line(2.0)

    assert (line["late_p99_s"], line["kept_rate"], line["why"]) == (0.2, False, "sent late: p99 0.200 s")
    assert (after["late_p99_s"], after["kept_rate"], after["sent"]) == (0.0, True, 200)


@pytest.mark.heavy
def test_a_hundred_a_second_of_a_hundred_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The load that the largest drill asks for: kept, told, and without memory growing with the requests."""
    command = [sys.executable, "-m", "tests.drills.fast_stream", "100", "0.01"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with prober.start(Load(url=url, model="tiny", rate_per_s=100.0), tmp_path) as running:
            wait_until(lambda: running.latest["asked"] >= 300)
            early_kib, early = memory_kib(running.pid), cpu_s(running.pid)
            start = time.monotonic()
            wait_until(lambda: running.latest["asked"] >= 1300, timeout_s=20)
            late_kib, cores = memory_kib(running.pid), (cpu_s(running.pid) - early) / (time.monotonic() - start)
            last = running.stop()

    requests = running.requests()
    late_s = sorted(r.late_s for r in requests)
    with capsys.disabled():
        print(
            f"\n100/s x 100 chunks: sent {last['sent']} of {last['asked']}, late p50 {late_s[len(late_s) // 2]:.4f} s, "
            f"p99 {late_s[int(0.99 * len(late_s))]:.4f} s; {cores:.2f} of a core, {late_kib / 1024:.0f} MiB "
            f"(+{late_kib - early_kib} KiB in 1,000 requests); {last['outcomes']}"
        )
    assert last["outcomes"] == {"ok": len(requests)}
    assert last["sent"] >= 0.99 * last["asked"]
    assert {r.chunks for r in requests} == {100}
    assert late_s[int(0.99 * len(late_s))] < 0.25  # 0.01 to 0.03 on two cores that others use
    assert late_kib < 96 * 1024
    assert late_kib - early_kib < 8 * 1024


def memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
