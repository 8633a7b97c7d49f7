"""Workers that compute nothing and answer at once: a process, to be put behind a router.

Run as `python -m tests.support.router.fast_worker ROLE PORT...`. They know what the routers that are measured
ask of a worker: SGLang's and vLLM's generation routes, what they read to learn about a worker, and `/pd/*`. A
request for a stream says by `max_tokens` how many chunks it wants, and by `seed` how many microseconds are to
lie between two of them; 0: one in each turn of the event loop, as a worker under full load gives them. Every
chunk carries the time at which it was sent (CLOCK_MONOTONIC: any process of the host can compare).

The process ends when its standard input does, so with its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

MODEL: Final = "mock-model"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1760000000,"model":"mock-model","choices":[{"index":0,"delta":{"content":"T%020d;"},'
    b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_LAST: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1760000000,"model":"mock-model","choices":[{"index":0,"delta":{},"logprobs":null,'
    b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
_END: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST), _LAST)
_ANSWER: Final = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion",
    "created": 1760000000,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
    "kv_transfer_params": {"remote_engine_id": "e0"},
}
_PREFILLED: Final = {
    "prompt_tokens": 12,
    "published_pages": 1,
    "missing_pages": 0,
    "cached": {"device": 0, "host": 0, "pool": 0},
}
_SETTLED: Final = {"known": True, "settled": True}


class _Asked(msgspec.Struct):
    """What a generation request wants of a mock worker."""

    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """What some routers make of the other."""
    seed: int | None = None


_asked = msgspec.json.Decoder(_Asked)


def answers(role: str) -> dict[str, bytes]:
    """Whole answers by path; any other GET is answered `{}`."""
    card = {"id": MODEL, "object": "model", "created": 1760000000, "owned_by": "sglang", "root": MODEL}
    server = {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": role,
        "version": "0.5.23",
        "context_length": 32768,
        "max_running_requests": 4096,
        "internal_states": [{"last_gen_throughput": 1000.0}],
    }
    model = {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}
    info = {
        "role": role,
        "model": MODEL,
        "context_length": 32768,
        "page_size": 64,
        "namespace": "mock",
        "kv_geometry": {},
    }
    plain: dict[str, Any] = {
        "/health": {},
        "/v1/models": {"object": "list", "data": [{**card, "max_model_len": 32768}]},
        "/server_info": server,
        "/get_server_info": server,
        "/model_info": model,
        "/get_model_info": model,
        "/pd/info": info,
        "/pd/ready": {"ready": True, "pool": "up"},
        "/pd/prefill": _PREFILLED,
        "/pd/settled": _SETTLED,
        "": _ANSWER,
    }
    return {path: _whole(json.dumps(value).encode()) for path, value in plain.items()}


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


class Mock(asyncio.Protocol):
    """One connection. A prefill worker's streams have one chunk: the first token, which decode repeats."""

    def __init__(self, role: str, answers: dict[str, bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._is_prefill = role == "prefill"
        self._answers = answers
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._target = b""
        self._body = b""
        self._left = 0
        self._pause_s = 0.0
        self._due_s = 0.0
        self._is_open = True
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._left:
            self._chunk()

    # --- httptools

    def on_message_begin(self) -> None:
        self._target = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._target.partition(b"?")[0].decode("latin-1")
        whole = self._answers.get(path)
        if whole is not None or self._parser.get_method() != b"POST":
            self._transport.write(whole or self._answers["/health"])
            return
        asked = _asked.decode(self._body)
        if not asked.stream:
            self._transport.write(self._answers[""])
            return
        self._left = 1 if self._is_prefill else asked.max_tokens or asked.max_completion_tokens or 1
        self._pause_s = (asked.seed or 0) / 1e6
        self._due_s = self._loop.time()
        self._transport.write(_STREAM_HEAD)
        self._chunk()

    def _chunk(self) -> None:
        """Send one, and have the next one sent in its time."""
        if not self._is_open or self._is_full:
            return
        event = _EVENT % time.monotonic_ns()
        self._left -= 1
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        if not self._left:
            self._transport.write(chunk + _END)
            return
        self._transport.write(chunk)
        if self._is_full:
            return
        if self._pause_s:
            self._due_s += self._pause_s
            self._loop.call_at(self._due_s, self._chunk)
        else:
            self._loop.call_soon(self._chunk)


async def serve(role: str, ports: list[int]) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    known = answers(role)
    for port in ports:
        await loop.create_server(lambda: Mock(role, known, loop), "127.0.0.1", port, backlog=4096)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], list(map(int, sys.argv[2:]))))
