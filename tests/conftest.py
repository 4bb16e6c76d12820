"""Shared by all tests: no skip passes in CI, and the caller's environment does not leak in."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fake_nvml.reader import Reader
from tests.needs import need

# Set, these would send requests for 127.0.0.1 through a proxy, rename the node, notify somebody's real systemd, or hold
# drills in somebody's real cluster.
LEAKS = ("NODE_NAME", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "TOCSIN_FAKE_NVML", "KUBECONFIG",
         "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("tocsin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tocsin")


def pytest_configure() -> None:
    """Take the caller's surroundings out of this process, and so out of every child that a test starts."""
    for name in list(os.environ):
        if name in LEAKS or name.lower().endswith("_proxy"):
            del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script: no child would heed Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("TOCSIN_CI") != "1" or not report.skipped or hasattr(report, "wasxfail"):
        return
    where = report.longrepr
    why = where[2] if isinstance(where, tuple) else str(where)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid or 'collection'}: {why}\nTOCSIN_CI=1: a skipped test counts as a failed one."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one in CI, whatever it was skipped by."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself (importorskip, allow_module_level)."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.fixture(scope="module")
def stand_in() -> Iterator[Reader]:
    """One child with the stand-in for NVIDIA's library for a whole file: starting Python is what would take long."""
    need("gcc", "make")
    reader = Reader()
    yield reader
    reader.end()


@pytest.fixture
def nvml(stand_in: Reader) -> Iterator[Reader]:
    """That child for one story, which `begin` begins; when the test ends, whatever hangs in it returns."""
    yield stand_in
    stand_in.play({"gpus": []})


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Give a port of 127.0.0.1 that was free a moment ago, for programs that cannot be told to take any (port 0)."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address: tuple[Any, ...] = probe.getsockname()
            return int(address[1])

    return pick
