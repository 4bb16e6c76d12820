"""The API that the tests of this folder speak to: the stand-in, or a real server (`make test-k8s KUBECONFIG=…`)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills.cluster import Cluster
from tests.kube.scene import Api, has_controllers, kubeconfig
from tests.kube.stand_in import StandIn

REAL = os.environ.get("TOCSIN_TEST_KUBECONFIG", "")  # by name: a person's own KUBECONFIG may be of a live cluster


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API, a namespace in it that is opted in, and KUBECONFIG for whatever connects to it."""
    namespace = f"tocsin-test-{uuid.uuid4().hex[:8]}"
    if REAL:
        own = kubeconfig(tmp_path, namespace, like=Path(REAL))
        monkeypatch.setenv("KUBECONFIG", own)
        try:
            with Cluster() as cluster:
                made = Api(cluster, namespace, None, has_controllers(cluster))
                made.make_namespace()
                with made.heartbeats():
                    yield made
                made.clear()
        finally:
            Path(own).unlink()
        return
    with StandIn() as stand_in:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, namespace, url=stand_in.url))
        with Cluster() as cluster:
            made = Api(cluster, namespace, stand_in)
            made.make_namespace()
            yield made
