"""What Tocsin says of a real vLLM is what its clients saw."""

from __future__ import annotations

import pytest

from tests.engine.load import Load, words

pytestmark = pytest.mark.engine


def test_the_engine_answers(load: Load) -> None:
    """The model that the test has made speaks, one token a word."""
    seen = load.ask(words(20, 1), 30)
    assert (seen.error, seen.prompt_tokens, seen.tokens[-1]) == ("", 20, 30)
