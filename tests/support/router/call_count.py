"""What one request costs in Python, without sockets and without a clock: frames entered, C functions called,
and bytecodes.

A router before fake transports gets the same request again and again, and answers of workers come from fakes,
so the figures are exact. The event loop and these fakes do not count. A call of the loop counts as one C
function, as it is one in uvloop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest

from pdserve.router.admission.gate import Gate
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import WorkerInfo
from pdserve.router.http.client_connection import ClientConnection
from pdserve.router.http.connections import Connections
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.proxy.handle import Proxy

MODEL = "mock-model"
REPORT = {
    "prompt_tokens": 12,
    "published_pages": 1,
    "missing_pages": 0,
    "cached": {"device": 0, "host": 0, "pool": 0},
    "cached_by_prompt": [[0, 0, 0]],
    "prefill_ms": 1.0,
    "publish_ms": 0.2,
    "turns": "0",
    "first": "4021x9f0c6d1f3c1b4d0c8e5a7b2d6f1e3a90",
}
USAGE = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
WHOLE = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
_CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1760000000,
    "model": MODEL,
    "choices": [{"index": 0, "delta": {"content": "word"}, "logprobs": None, "finish_reason": None}],
    "usage": None,
}
EVENT = b"data: %b\n\n" % json.dumps(_CHUNK).encode()
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-pdserve-cached: device=0, host=0, pool=12, computed=0\r\nserver-timing: pull;dur=1.0\r\n"
    b"x-pdserve-marks: 1\r\ntransfer-encoding: chunked\r\n\r\n"
)
"""Of pdserve's worker."""


class Cost(NamedTuple):
    """Of one request."""

    frames: float
    c_calls: float
    bytecodes: float


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


_REPORT_ANSWER = _json(REPORT)
_SETTLED_ANSWER = _json({"known": True, "settled": True})
_WHOLE_ANSWER = _json(WHOLE)


class _Transport(asyncio.Transport):
    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 8)}.get(name, default)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

    def writelines(self, data: Any) -> None:
        self.write(b"".join(data))


class _ToWorker(_Transport):
    """Answers as a worker does, `chunks` events a stream; 0: whole answers."""

    chunks = 0

    def write(self, data: Any) -> None:
        if b"/pd/prefill" in data[:64]:
            self._loop.call_soon(self.protocol.data_received, _REPORT_ANSWER)
        elif b"/pd/settled" in data[:64]:
            self._loop.call_soon(self.protocol.data_received, _SETTLED_ANSWER)
        elif not self.chunks:
            self._loop.call_soon(self.protocol.data_received, _WHOLE_ANSWER)
        else:
            self._loop.call_soon(self._send, STREAM_HEAD, 1)

    def _send(self, head: bytes, number: int) -> None:
        mark = b": pd %d %d 7\n\n" % (4 * number, number - 1)
        is_last = number == self.chunks
        if not is_last:
            self._loop.call_soon(self._send, b"", number + 1)
        end = _framed(b": pd-usage 12 %d\n\ndata: [DONE]\n\n" % number) + b"0\r\n\r\n" if is_last else b""
        self.protocol.data_received(head + _framed(EVENT + mark) + end)


class _ToClient(_Transport):
    """Sends a request as soon as the last one is answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any, request: bytes) -> None:
        super().__init__(loop, protocol)
        self._request = request
        self._left = 0
        self.is_over: asyncio.Future[None] | None = None
        self.sent = b""

    def ask(self, times: int) -> asyncio.Future[None]:
        self._left, self.is_over = times, self._loop.create_future()
        self._loop.call_soon(self.protocol.data_received, self._request)
        return self.is_over

    def write(self, data: Any) -> None:
        self.sent += data
        if not (data.endswith(b"0\r\n\r\n") or b"content-length" in data):
            return
        self._left -= 1
        if self._left:
            self._loop.call_soon(self.protocol.data_received, self._request)
        elif self.is_over is not None:
            self.is_over.set_result(None)


class Bench:
    """One router, one client, and what its requests cost."""

    def __init__(self, make_client: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._make_client = make_client
        self._loop = loop
        self._counted = _Counts(), 1

    def most(self, of: str) -> list[tuple[str, float]]:
        """What cost most the last time, by a field of `Cost`, and how much of it a request took."""
        counts, times = self._counted
        return [(name, count / times) for name, count in getattr(counts, of).most_common()]

    async def cost(self, chunks: int, times: int = 50, headers: str = "", **more: Any) -> Cost:
        """Of one request, as the mean of `times` equal ones; `chunks`: see `_ToWorker`."""
        _ToWorker.chunks = chunks
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello, how are you?"}],
            "max_tokens": 16,
        }
        body = json.dumps(asked | ({"stream": True} if chunks else {}) | more).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n{headers}"
        protocol = self._make_client()
        client = _ToClient(self._loop, protocol, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        client.protocol = protocol
        protocol.connection_made(client)
        await client.ask(20)
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.sent.count(b"HTTP/1.1 200 OK") == 20, client.sent[:2000]
        if chunks:
            assert client.sent.count(b"data: {") == 20 * chunks
        counts = _Counts()
        for count, counter in ((sys.setprofile, counts), (sys.settrace, counts.trace)):
            over = client.ask(times)
            count(counter)
            try:
                await over
                for _ in range(5):
                    await asyncio.sleep(0)
            finally:
                count(None)
        self._counted = counts, times
        found = counts.frames, counts.c_calls, counts.bytecodes
        return Cost(*(sum(one.values()) / times for one in found))


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename.rpartition('/pdserve/')[2]}:{code.co_qualname}"


class _Counts:
    """A function for `sys.setprofile`, and `trace` for `sys.settrace`."""

    def __init__(self) -> None:
        self.frames: Counter[str] = Counter()
        self.c_calls: Counter[str] = Counter()
        self.bytecodes: Counter[str] = Counter()
        self._asyncio = asyncio.__file__.rpartition("/")[0]
        self._kinds: dict[str, str] = {}

    def _kind(self, filename: str) -> str:
        """router, or what does not count: asyncio, fake."""
        kind = self._kinds.get(filename)
        if kind is None:
            kind = "router"
            if filename.startswith(self._asyncio):
                kind = "asyncio"
            elif any(part in filename for part in ("/tests/", "selectors", "_pytest")):
                kind = "fake"
            self._kinds[filename] = kind
        return kind

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.bytecodes[_name(frame)] += 1
        elif event == "call":
            if self._kind(frame.f_code.co_filename) != "router":
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.trace

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        kind = self._kind(code.co_filename)
        if event == "call":
            if kind == "router":
                self.frames[_name(frame)] += 1
            elif frame.f_back is not None and self._kind(frame.f_back.f_code.co_filename) == "router":
                self.c_calls[code.co_qualname] += 1
        elif event == "c_call" and kind == "router":
            self.c_calls[getattr(argument, "__qualname__", str(argument))] += 1


@asynccontextmanager
async def bench(monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[Bench]:
    """A router with one prefill and one decode worker that are ready."""
    loop = asyncio.get_running_loop()
    settings = RouterConfig(
        prefill=("http://127.0.0.1:1",), decode=("http://127.0.0.1:2",), min_prefill_tokens=0, **config
    )
    fleet, stats = Fleet.from_config(settings), Stats()
    for worker in fleet.workers:
        fleet.on_info(worker, WorkerInfo(worker.role, MODEL, is_multimodal=False))
        fleet.on_probe_ready(worker)

    async def create_connection(make: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        protocol = make()
        transport = _ToWorker(loop, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    monkeypatch.setattr(loop, "create_connection", create_connection)
    gate, upstream = Gate(settings, fleet), Upstream(settings.limits)
    upstream.deadlines.close()  # no sweep now and then among what is counted
    proxy = Proxy(settings, fleet, gate, upstream, stats)
    shared = Connections(proxy.request, proxy, keep_alive_s=60, head_s=20.0, client_read_s=120.0)
    try:
        yield Bench(lambda: ClientConnection(shared, loop), loop)
    finally:
        gate.close()
        upstream.close()
