"""A server of streams that costs little, so that a measured prober is what is measured: one thread, no faults.

`python -m tests.drills.fast_stream CHUNKS PACE_S` prints its address, ends with its stdin, answers every POST alike.
"""

from __future__ import annotations

import asyncio
import json
import sys


def event(data: bytes) -> bytes:
    """One event in its chunk framing."""
    body = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


def chunk(finish_reason: str | None) -> bytes:
    """One token."""
    choice = {"index": 0, "text": " 1", "logprobs": None, "finish_reason": finish_reason}
    answer = {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice]}
    return event(json.dumps(answer).encode())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN, LAST, END = chunk(None), chunk("length"), event(b"[DONE]") + b"0\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunks: int, pace_s: float) -> None:
    """Every request on one connection."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
            start = loop.time()
            writer.write(HEAD + TOKEN)
            for number in range(1, chunks):
                await asyncio.sleep(start + number * pace_s - loop.time())
                writer.write(TOKEN if number < chunks - 1 else LAST + END)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(chunks: int, pace_s: float) -> None:
    """Until stdin ends."""
    server = await asyncio.start_server(lambda r, w: answer(r, w, chunks, pace_s), "127.0.0.1", 0, backlog=500)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
