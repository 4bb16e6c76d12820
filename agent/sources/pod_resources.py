"""Which pod was given which GPU, and which GPUs the kubelet gives at all: from its pod-resources socket.

No access to the API is needed, only to a socket that is root's. It speaks gRPC: HTTP/2 over a unix socket, one message
each way. `h2` does the first (it is here with lightkube's own client); of the messages four fields are read, which is
less than what a gRPC library would weigh.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from agent.model import Batch, Gap, PodFacts, Sample, Why

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
SUBJECT = "kubelet"
EVERY_S = 15.0
DEADLINE_S = 5.0
MAX_BYTES = 4 * 1024 * 1024
_SERVICE = "/v1.PodResourcesLister/"
_HEADERS = ((":method", "POST"), (":scheme", "http"), (":authority", "localhost"))
_GRPC = (("content-type", "application/grpc"), ("te", "trailers"))
_GPU = "nvidia.com/gpu"
# Of a share of a GPU the GPU: `GPU-…-3` (HAMi), `MIG-GPU-…/7/0` (before driver 470), `nvidia0/gi7` (GKE).
_SHARE = re.compile(r"(?:MIG-)?(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})[-/].*|(nvidia[0-9]+)/.*")
_ON_GPU = re.compile(r"nvidia\.com/(?:gpu|mig-.*)(?:\.shared)?")


class NoAnswer(Exception):  # noqa: N818  (it says what happened)
    """The kubelet did not answer, or not in a form that we know."""


class Given(NamedTuple):
    """Devices of one resource that a pod was given, or that there are."""

    resource: str
    ids: tuple[str, ...]


# ---- the messages ----


def fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field of a protobuf message: bytes, or a whole number. Raises NoAnswer."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, at = _varint(raw, at)
            yield number, value
            continue
        length, at = _varint(raw, at) if form == 2 else ({1: 8, 5: 4}.get(form, -1), at)
        if length < 0 or at + length > len(raw):
            raise NoAnswer("the kubelet's answer is no protobuf message that we know")
        yield number, raw[at:at + length]
        at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift < 70:
        byte = raw[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise NoAnswer("the kubelet's answer is cut off")


def _parts(raw: bytes, number: int) -> Iterator[bytes]:
    return (value for found, value in fields(raw) if found == number and isinstance(value, bytes))


def _text(raw: bytes, number: int) -> str:
    return next((value.decode(errors="replace") for value in _parts(raw, number)), "")


def _given(raw: bytes) -> Given:
    """ContainerDevices: resource_name = 1, device_ids = 2."""
    return Given(_text(raw, 1), tuple(value.decode(errors="replace") for value in _parts(raw, 2)))


def pods_in(answer: bytes) -> tuple[PodFacts, ...]:
    """ListPodResourcesResponse.pod_resources = 1: name = 1, namespace = 2, containers = 3: devices = 2."""
    found = []
    for pod in _parts(answer, 1):
        devices = [_given(one) for container in _parts(pod, 3) for one in _parts(container, 2)]
        found.append(PodFacts(_text(pod, 2), _text(pod, 1), gpus=uuids(devices)))
    return tuple(found)


def allocatable_in(answer: bytes) -> list[Given]:
    """AllocatableResourcesResponse.devices = 1."""
    return [_given(one) for one in _parts(answer, 1)]


def uuids(devices: list[Given]) -> tuple[str, ...]:
    """UUIDs of GPUs and MIG instances; on GKE, whose plugin tells none, the names of their devices (nvidia0)."""
    return tuple(dict.fromkeys(_whole(id_) for given in devices if _ON_GPU.fullmatch(given.resource)
                               for id_ in given.ids))


def _whole(id_: str) -> str:
    """The GPU or MIG instance of an id. One that is shared by time has `::0` and so on behind it."""
    own = id_.partition("::")[0]
    found = _SHARE.fullmatch(own)
    return own if found is None else found[1] or found[2]


# ---- gRPC, as much of it as this takes ----


def call(path: Path, method: str, deadline_s: float = DEADLINE_S) -> bytes:
    """One call without arguments; its answer's message. Raises NoAnswer."""
    from h2.config import H2Configuration  # where there is no kubelet, it is not loaded
    from h2.connection import H2Connection
    from h2.exceptions import ProtocolError

    end = time.monotonic() + deadline_s
    wire = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(deadline_s)
            sock.connect(str(path))
            wire.initiate_connection()
            wire.send_headers(1, [*_HEADERS, (":path", _SERVICE + method), *_GRPC])
            wire.send_data(1, bytes(5), end_stream=True)  # not compressed, and a message of no bytes
            return _message(_answer(sock, wire, end))
    except (OSError, ProtocolError) as error:
        raise NoAnswer(f"{path}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from error


def _answer(sock: socket.socket, wire: object, end: float) -> bytes:
    """What comes back on stream 1, until the server ends it with grpc-status 0."""
    from h2.connection import H2Connection
    from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

    assert isinstance(wire, H2Connection)  # noqa: S101
    body, told = bytearray(), dict[str, str]()
    while True:
        sock.sendall(wire.data_to_send())
        sock.settimeout(max(0.001, end - time.monotonic()))
        raw = sock.recv(65536)
        if not raw:
            raise NoAnswer("the kubelet closed the connection without an answer")
        for event in wire.receive_data(raw):
            if isinstance(event, DataReceived):
                body += event.data
                wire.acknowledge_received_data(event.flow_controlled_length or 0, 1)
            elif isinstance(event, ResponseReceived | TrailersReceived):
                told |= {str(name): str(value) for name, value in event.headers or ()}
            elif isinstance(event, StreamReset):
                raise NoAnswer(f"the kubelet broke the call off (HTTP/2 error {event.error_code})")
            elif isinstance(event, StreamEnded):
                if told.get("grpc-status") != "0":
                    said = told.get("grpc-message") or f"HTTP {told.get(':status', 'nothing')}"
                    raise NoAnswer(f"the kubelet says no (gRPC status {told.get('grpc-status')}): {said}")
                return bytes(body)
        if len(body) > MAX_BYTES:
            raise NoAnswer(f"the kubelet's answer has more than {MAX_BYTES} bytes")


def _message(body: bytes) -> bytes:
    """The one message in a gRPC body: a byte (compressed?), its length in four, itself."""
    if len(body) < 5 or body[0] != 0 or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise NoAnswer("the kubelet's answer is not one whole message")
    return body[5:]


# ---- the source ----


class PodResourcesSource:
    """Fulfils agent.model.Source. `Batch.pods` knows names and GPUs, and no uid."""

    name = "pod-resources"

    def __init__(self, path: Path = SOCKET, *, every_s: float = EVERY_S) -> None:
        self.note = ""
        self._path, self._every_s = path, every_s
        self._asked_at: float | None = None
        self._last: tuple[Sample | Gap, ...] = ()

    def read(self, now: float) -> Batch:
        """Ask, if it is time."""
        start = time.monotonic()
        if self._asked_at is not None and start - self._asked_at < self._every_s:
            again = tuple(one._replace(at=now) for one in self._last)  # what it said, up to so long ago
            return Batch(self.name, now, 0.0, again)
        self._asked_at = start
        try:
            holders = tuple(pod for pod in pods_in(call(self._path, "List")) if pod.gpus)
        except NoAnswer as error:
            self._last = (Gap("gpus_allocatable", SUBJECT, Why.ERROR, str(error), now),)
            return Batch(self.name, now, time.monotonic() - start, self._last, error=str(error))
        reading = self._allocatable(now)
        self._last = (reading,)
        given = reading.why if isinstance(reading, Gap) else f"{reading.value:.0f} GPUs"
        self.note = f"{len(holders)} pods hold GPUs; the kubelet gives: {given}"
        return Batch(self.name, now, time.monotonic() - start, self._last, pods=holders)

    def _allocatable(self, now: float) -> Sample | Gap:
        """How many GPUs the kubelet would give to pods: those that their device plugin calls healthy."""
        try:
            there = allocatable_in(call(self._path, "GetAllocatableResources"))
        except NoAnswer as error:
            return Gap("gpus_allocatable", SUBJECT, Why.ERROR, str(error), now)
        if any(given.resource.startswith("nvidia.com/mig-") for given in there):
            why = "parts of GPUs (MIG); how many GPUs that are is not told"
            return Gap("gpus_allocatable", SUBJECT, Why.NOT_SUPPORTED, why, now)
        whole = [given for given in there if given.resource in (_GPU, f"{_GPU}.shared")]
        return Sample("gpus_allocatable", SUBJECT, float(len(uuids(whole))), now)

    def close(self) -> None:
        """Nothing is held."""


def may_ask(path: Path = SOCKET) -> bool:
    """Whether there is a kubelet here that we may ask."""
    return os.access(path, os.W_OK)
