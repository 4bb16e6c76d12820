"""A kubelet's pod-resources socket: gRPC over HTTP/2, one message each way, or what else a test wants of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, RequestReceived, StreamEnded, WindowUpdated

# Written by Google's protobuf from the messages of k8s.io/kubelet's podresources/v1: pod llm/vllm-0 has GPU-a and GPU-b
# (and CPUs, memory, a NUMA node, a container without devices), dev/shared-1 a third of GPU-c and a network card,
# default/web nothing.
PODS = bytes.fromhex(
    "0a7a0a06766c6c6d2d3012036c6c6d1a070a0570726f78791a620a06656e67696e65121d0a0e6e76696469612e636f6d2f6770751205475055"
    "2d611a040a020801121d0a0e6e76696469612e636f6d2f67707512054750552d621a040a0208011a0303ac0222150a066d656d6f7279108080"
    "808080201a040a0208010a4b0a087368617265642d3112036465761a3a0a016312210a156e76696469612e636f6d2f6770752e736861726564"
    "12084750552d633a3a3312120a0872646d612f68636112066d6c78355f300a130a03776562120764656661756c741a030a0163")
# GPU-a, b, d, e, f, g, h and a network card; 64 CPUs; memory.
SEVEN_GPUS = bytes.fromhex(
    "0a1d0a0e6e76696469612e636f6d2f67707512054750552d611a040a0208010a1d0a0e6e76696469612e636f6d2f67707512054750552d621a"
    "040a0208010a1d0a0e6e76696469612e636f6d2f67707512054750552d641a040a0208010a1d0a0e6e76696469612e636f6d2f677075120547"
    "50552d651a040a0208010a1d0a0e6e76696469612e636f6d2f67707512054750552d661a040a0208010a1d0a0e6e76696469612e636f6d2f67"
    "707512054750552d671a040a0208010a1d0a0e6e76696469612e636f6d2f67707512054750552d681a040a0208010a120a0872646d612f6863"
    "6112066d6c78355f301240000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d"
    "2e2f303132333435363738393a3b3c3d3e3f1a150a066d656d6f7279108080808080401a040a020801")
ANSWERS: Mapping[str, bytes] = {"List": PODS, "GetAllocatableResources": SEVEN_GPUS}


class KubeletSocket:
    """Answers each method with `answers`; one that is not there is UNIMPLEMENTED. `raw`: these bytes for any call."""

    def __init__(self, path: Path, answers: Mapping[str, bytes] = ANSWERS, *, raw: bytes | None = None,
                 silent: bool = False) -> None:
        self.path, self.answers, self.raw, self.silent = path, dict(answers), raw, silent
        self._socket = socket.socket(socket.AF_UNIX)
        self._open: list[socket.socket] = []

    def __enter__(self) -> KubeletSocket:
        self._socket.bind(str(self.path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._socket, *self._open):
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(sock)
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        wire, method = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8")), ""
        wire.initiate_connection()
        try:
            while True:
                sock.sendall(wire.data_to_send())
                raw = sock.recv(65536)
                if not raw:
                    return
                for event in wire.receive_data(raw):
                    if isinstance(event, RequestReceived):
                        asked = {str(name): str(value) for name, value in event.headers or ()}
                        assert (asked[":method"], asked["content-type"], asked["te"]) == (
                            "POST", "application/grpc", "trailers")
                        method = asked[":path"].removeprefix("/v1.PodResourcesLister/")
                    elif isinstance(event, StreamEnded) and not self.silent:
                        self._answer(sock, wire, method)
        except OSError:
            return

    def _answer(self, sock: socket.socket, wire: H2Connection, method: str) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc")]
        message = self.answers.get(method)
        if message is None:
            wire.send_headers(1, [*head, ("grpc-status", "12"), ("grpc-message", "unknown method")], end_stream=True)
            return
        wire.send_headers(1, head)
        body = self.raw if self.raw is not None else b"\0" + len(message).to_bytes(4, "big") + message
        while body:
            size = min(len(body), wire.local_flow_control_window(1), wire.max_outbound_frame_size)
            if size == 0:
                self._wait_for_window(sock, wire)
                continue
            wire.send_data(1, body[:size])
            body = body[size:]
        wire.send_headers(1, [("grpc-status", "0")], end_stream=True)

    @staticmethod
    def _wait_for_window(sock: socket.socket, wire: H2Connection) -> None:
        while True:
            sock.sendall(wire.data_to_send())
            raw = sock.recv(65536)
            if not raw:
                raise ConnectionResetError
            events: list[Event] = wire.receive_data(raw)
            if any(isinstance(event, WindowUpdated) for event in events):
                return
