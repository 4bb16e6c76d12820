"""One real vLLM for all stories of this folder, with so few blocks of KV cache that requests are preempted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.load import Load
from tests.engine.vllm import VllmServer
from tests.needs import need

KV_BLOCKS = 13  # of 14, one is vLLM's own


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The engine. Who stops or kills a part of it comes last, in test_vllm.py."""
    need("vllm")
    with VllmServer(tmp_path_factory.mktemp("vllm"), "--num-gpu-blocks-override", str(KV_BLOCKS + 1),
                    "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def load(vllm: VllmServer) -> Iterator[Load]:
    """Requests to it, and what became of them."""
    with Load(vllm.port) as load:
        yield load
