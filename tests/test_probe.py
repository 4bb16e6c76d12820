"""The canary over real HTTP: what it counts as an error, what as nobody's fault, and how long it has waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.config import CanaryConfig, Config, EngineConfig, ProbeConfig
from agent.daemon import canaries_of, engine_at
from agent.model import Batch, Gap, Sample
from agent.sources.probe import CanarySource, piece_of
from tests.drills.openai_server import Behaviour, OpenAiServer

LONG_S = 30.0  # for what only hangs when it is broken


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with OpenAiServer(Behaviour(chunks=4, pace_s=0.01)) as it:
        yield it


@pytest.fixture
def canary(server: OpenAiServer) -> Iterator[CanarySource]:
    it = CanarySource(server.url, asks="llama", every_s=0.02, slo_s=(0.333,), answer_s=0.3, whole_every=0)
    yield it
    it.close()


def numbers(batch: Batch) -> dict[str, float]:
    return {f"{r.name}{'.' if r.key else ''}{r.key}": r.value for r in batch.readings if isinstance(r, Sample)}


def until(canary: CanarySource, is_so: Callable[[dict[str, float]], Any]) -> dict[str, float]:
    """Read it until something is so."""
    end = time.monotonic() + LONG_S
    while not is_so(told := numbers(canary.read(1.0))):
        assert time.monotonic() < end, told
        time.sleep(0.01)
    return told


def test_an_answer_is_timed_as_a_user_sees_it(server: OpenAiServer, canary: CanarySource) -> None:
    """One first token and three gaps a question; the service level is a bound of its own, so it can be judged."""
    told = until(canary, lambda told: told["user_requests"] >= 3)

    assert told["user_errors"] == 0
    assert told["user_ttft.count"] >= 3
    assert told["user_itl.count"] == 3 * told["user_ttft.count"]
    assert told["user_ttft.0.333"] == told["user_ttft.+Inf"] == told["user_ttft.count"]
    assert told["canary_requests"] == told["user_requests"]
    subjects = {(r.name, r.subject) for r in canary.read(1.0).readings}
    assert ("user_requests", server.url.removesuffix("/v1")) in subjects
    assert ("canary_age_s", "llama") in subjects
    asked = server.log[-1].asked
    assert len(str(asked["prompt"]).split()) >= 8  # vLLM's CPU worker dies of four tokens
    assert asked["model"] == "tiny"


@pytest.mark.parametrize(
    ("story", "behaviour"),
    [
        ("an error inside a stream that began with HTTP 200", Behaviour(fault="error")),
        ("a stream that is cut", Behaviour(fault="cut")),
        ("a stream without a finish reason", Behaviour(finish_reason=None)),
        ("a finish reason that says abort", Behaviour(finish_reason="abort")),
        ("a chunk that is no JSON", Behaviour(fault="json")),
        ("no stream, but one JSON", Behaviour(is_stream=False)),
        ("a reset connection", Behaviour(fault="reset")),
        ("HTTP 503", Behaviour(status=503)),
        ("HTTP 429", Behaviour(status=429)),
    ],
)
def test_what_a_user_would_call_an_error(server: OpenAiServer, canary: CanarySource, story: str, behaviour: Behaviour,
                                         ) -> None:
    """vLLM counts most of these as 2xx, or not at all."""
    server.set(behaviour)
    told = until(canary, lambda told: told["user_requests"] >= 2)

    assert told["user_errors"] == told["user_requests"], story
    assert told["user_ttft.count"] == 0
    assert (told["canary_errors"] > 0) == (behaviour.status == 503)


def test_nobody_listens(server: OpenAiServer, canary: CanarySource) -> None:
    """Refused connections are errors to a user; they are no hang."""
    server.stop()
    told = until(canary, lambda told: told["user_errors"] >= 2)
    assert told["canary_age_s"] < LONG_S


def test_the_wait_goes_on_through_questions_that_time_out(server: OpenAiServer, canary: CanarySource) -> None:
    """Each question is given up after its time; a hang is as long as all of them together."""
    until(canary, lambda told: told["user_requests"] >= 1)
    server.set(Behaviour(fault="hang"))
    told = until(canary, lambda told: told["canary_age_s"] > 0.8)  # the time for one answer is 0.3 s
    assert told["user_errors"] >= 2
    server.set(Behaviour())
    until(canary, lambda told: told["canary_age_s"] == 0)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_an_address_that_takes_no_canary_is_nobodys_outage(server: OpenAiServer, canary: CanarySource, status: int,
                                                           ) -> None:
    """A wrong key, an engine for embeddings: said, and counted as no user's error."""
    server.set(Behaviour(status=status, says="not for you"))
    end = time.monotonic() + LONG_S
    while (batch := canary.read(1.0)).error is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "takes no canary: HTTP" in batch.error
    assert {r.name for r in batch.readings if isinstance(r, Gap)} == {
        "user_requests", "user_errors", "user_ttft", "user_itl", "user_whole", "canary_age_s"}
    server.set(Behaviour())
    until(canary, lambda told: told.get("user_requests", 0) >= 1)


def test_an_engine_that_sleeps_is_not_asked(server: OpenAiServer) -> None:
    """The question would wake it."""
    canary = CanarySource(server.url, asks="llama", every_s=0.01)
    canary.held = True
    canary.read(1.0)
    time.sleep(0.1)
    assert len(server.log) == 0
    canary.held = False
    until(canary, lambda told: told["user_requests"] >= 1)
    canary.close()


def test_the_configuration_says_whom_it_asks(server: OpenAiServer) -> None:
    """Through an engine's own address it is a witness of that engine; through the users' it is theirs alone."""
    config = Config(engines=(EngineConfig(url="http://127.0.0.1:8000", name="llama"),), probe=ProbeConfig(
        canary=CanaryConfig(urls=("http://127.0.0.1:8000", "http://edge:8080/v1"))))
    found = canaries_of(config)
    assert [getattr(one, "asks", "") for one in found] == ["llama", None]
    assert [one.name for one in found] == ["canary:http://127.0.0.1:8000", "canary:http://edge:8080"]
    assert canaries_of(Config()) == []
    by_name = EngineConfig(url="http://localhost:8000", name="llama")
    assert engine_at(Config(engines=(by_name,)), "http://127.0.0.1:8000/v1") == "llama"
    assert engine_at(Config(), "http://localhost:8001") == "127.0.0.1:8001"  # discovery may find one there
    assert engine_at(Config(discover=False), "http://localhost:8001") is None


def test_a_key_that_cannot_be_read_is_said(server: OpenAiServer) -> None:
    """The file of the secret was not mounted."""
    def key() -> str:
        raise RuntimeError("/run/secrets/key cannot be read")

    canary = CanarySource(server.url, api_key=key, every_s=0.01, model="tiny")
    end = time.monotonic() + LONG_S
    while (batch := canary.read(1.0)).error is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "/run/secrets/key cannot be read" in batch.error
    canary.close()


def test_whole_answers_are_timed_apart(server: OpenAiServer) -> None:
    """Three of four questions are streamed: 4 pieces, 10 ms apart. The fourth comes whole, and is no first token."""
    canary = CanarySource(server.url, every_s=0.02)
    told = until(canary, lambda told: told["user_whole.count"] >= 2)
    canary.close()
    assert told["user_errors"] == 0
    assert told["user_requests"] == told["user_ttft.count"] + told["user_whole.count"]
    assert told["user_ttft.count"] >= 3 * told["user_whole.count"]
    asked = [one.asked["stream"] for one in server.log if one.asked]
    assert asked[:8] == [True, True, True, False] * 2


@pytest.mark.parametrize(
    ("story", "behaviour"),
    [("HTTP 503", Behaviour(status=503)), ("half of a body", Behaviour(fault="truncate")),
     ("a finish reason that says abort", Behaviour(finish_reason="abort"))],
)
def test_a_whole_answer_that_is_an_error(server: OpenAiServer, story: str, behaviour: Behaviour) -> None:
    """The same words as for a stream."""
    server.set(behaviour)
    canary = CanarySource(server.url, every_s=0.02, whole_every=1, model="tiny")
    told = until(canary, lambda told: told["user_requests"] >= 2)
    canary.close()
    assert (told["user_errors"], told["user_whole.count"]) == (told["user_requests"], 0), story


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_the_first_thought_is_a_first_token(name: str) -> None:
    """A reasoning model thinks aloud first, under two names by version: without them its first token was never seen."""
    assert piece_of(f'data: {{"choices":[{{"delta":{{"{name}":"so"}}}}]}}'.encode(), None) == ("so", None)
