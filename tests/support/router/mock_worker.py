"""A scripted worker on a real socket: SGLang's wire format and the `/pd/*` routes, and every way to break
them.

Scripts are queued per path; without one the worker answers as it should. A script that holds waits for an
event that the test sets, and tells that it was reached, so that tests order things without sleeping.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

GEOMETRY = {"layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "layout": "page_first"}


@dataclass
class Received:
    """One request as it came over the wire."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Gate:
    """A place in a script: `reached` is set there, and the script goes on when `open` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def passed(self) -> None:
        self.reached.set()
        await self.open.wait()


class CloseConnection(Exception):
    """A script ends the connection here."""


Script = Callable[["Wire", Received], Awaitable[None]]


class Wire:
    """Writing an answer piece by piece."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int, content_type: str, length: int | None = None, extra: str = "") -> None:
        how = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        await self.raw(
            f"HTTP/1.1 {status} X\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
            f"content-type: {content_type}\r\n{how}\r\n{extra}\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, status: int, value: Any) -> None:
        await self.body(status, json.dumps(value).encode())

    async def body(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        await self.head(status, content_type, len(body))
        await self.raw(body)


def event(content: str, finish: str | None = None, model: str = "m") -> bytes:
    """One chat chunk as SGLang sends it."""
    chunk = {
        "id": "0123",
        "object": "chat.completion.chunk",
        "created": 1760000000,
        "model": model,
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": content},
                "logprobs": None,
                "finish_reason": finish,
                "matched_stop": None,
            }
        ],
        "usage": None,
    }
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENTS = [event("Hé"), event("llo"), event("", "stop"), DONE]
STREAM = b"".join(EVENTS)
ANSWER = (
    b'{"id":"0123","object":"chat.completion","created":1760000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello","tool_calls":null},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}'
)
TOLD = (
    "x-pdserve-cached: device=0, host=0, pool=0, computed=3\r\n"
    "server-timing: queue;dur=0.1, compute;dur=1.0\r\n"
)
"""What every worker says in the head of an answer."""
MARKS = [b": pd 2 0 7 8\n\n", b": pd 5 2 9 10\n\n"]
"""After the first two of `EVENTS`, for a caller that asks for them."""
REPORT = {
    "prompt_tokens": 40,
    "cached": {"device": 8, "host": 0, "pool": 16},
    "cached_by_prompt": [[8, 0, 16]],
    "missed": "evicted=16;age_s=3.5",
    "published_pages": 2,
    "missing_pages": 0,
    "prefill_ms": 1.5,
    "publish_ms": 0.5,
}


class MockWorker:
    """A worker of one role. `requests` holds what came; `disconnected` counts clients that left before an
    answer's end.
    """

    def __init__(self, role: str, model: str = "m", **info: Any) -> None:
        self.role = role
        self.info: dict[str, Any] = {
            "role": role,
            "model": model,
            "model_path": "/models/m",
            "context_length": 4096,
            "page_size": 16,
            "namespace": "ns",
            "kv_geometry": dict(GEOMETRY),
            "pdserve_version": "0.1.0",
            "sglang_version": "0.5.23",
        } | info
        self.ready = True
        self.draining = False
        self.token = ""
        """What it asks for on every path but `/pd/ready`, as a worker with a cluster's token does."""
        self.load: dict[str, int] | None = None
        self.tls: ssl.SSLContext | None = None
        self.requests: list[Received] = []
        self.disconnected = 0
        self.connections = 0
        self.scripts: dict[str, deque[Script]] = {}
        self._arrived = asyncio.Condition()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    def script(self, path: str, *scripts: Script) -> None:
        """Answer the next requests for `path` so, one script each."""
        self.scripts.setdefault(path, deque()).extend(scripts)

    def got(self, path: str) -> list[Received]:
        return [request for request in self.requests if request.path == path]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; looked at whenever something happens here."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(condition), 10)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._servers.append(await asyncio.start_server(self._serve, host, port, ssl=self.tls))
        self.port = self._servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listener and every connection, as a killed process would."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while (request := await _read(reader, number)) is not None:
                if not request.path.startswith(("/pd/ready", "/pd/info")):
                    self.requests.append(request)
                    await self._notify()
                await self._answer(request, reader, writer)
        except (CloseConnection, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run the script for the request, and end it when the client goes away, as SGLang's abort does."""
        queue = self.scripts.get(request.path)
        script = queue.popleft() if queue else self._default
        shown = request.headers.get("authorization")
        if self.token and request.path != "/pd/ready" and shown != f"Bearer {self.token}":
            script = answer(401, {"error": {"message": "no token"}})
        answering = asyncio.create_task(script(Wire(writer), request))
        leaving = asyncio.create_task(_until_gone(reader))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or isinstance(answering.exception(), ConnectionError):
                self.disconnected += 1
                await self._notify()
                raise CloseConnection
        finally:
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        answering.result()

    async def _default(self, wire: Wire, request: Received) -> None:
        if request.path == "/pd/ready":
            ready = self.ready and not self.draining
            said = {"ready": ready, "draining": self.draining, "pool": "up", "load": self.load}
            said["info_tag"] = self.info.get("info_tag", "")
            await wire.json(200 if ready else 503, said)
        elif request.path == "/pd/info":
            await wire.json(200, self.info)
        elif request.path == "/pd/prefill":
            try:
                request.json()
                await wire.json(200, REPORT)
            except ValueError:
                await wire.json(400, {"error": {"message": "no JSON"}})
        elif request.path == "/pd/settled":
            await wire.json(
                200,
                {
                    "request_id": request.json()["request_id"],
                    "known": True,
                    "settled": True,
                    "committed_pages": 1,
                    "missing_pages": 0,
                    "waited_ms": 0.1,
                },
            )
        elif request.path == "/pd/pull":
            await wire.json(200, {"pulled_tokens": 0})
        elif request.path == "/pd/continue":
            await _continue(wire, request)
        elif request.method == "POST" and request.json().get("stream"):
            marks = request.headers.get("x-pdserve-marks") == "1"
            await (marked_from(0) if marks else stream(EVENTS))(wire, request)
        elif request.method == "POST":
            await answered_with(TOLD)(wire, request)
        else:
            await wire.json(404, {"detail": "Not Found"})


async def _read(reader: asyncio.StreamReader, number: int) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body, number)


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Until the client closes. The router does not pipeline, so nothing else can come while an answer is
    under way.
    """
    while not reader.at_eof():
        if reader._buffer:  # type: ignore[attr-defined]  # the next request: the answer is read already
            await asyncio.Event().wait()
        await reader._wait_for_data("until_gone")  # type: ignore[attr-defined]  # peeks, does not consume


# --- scripts


def stream(events: list[bytes], gate: Gate | None = None, gate_after: int = 0) -> Script:
    """A stream of chunks; with a gate, held after `gate_after` of them."""

    async def run(wire: Wire, request: Received) -> None:
        if gate is not None and gate_after < 0:
            await gate.passed()
        await wire.head(200, "text/event-stream; charset=utf-8", extra=TOLD)
        for i, data in enumerate(events):
            if gate is not None and i == gate_after:
                await gate.passed()
            await wire.chunk(data)
        if gate is not None and gate_after == len(events):
            await gate.passed()
        await wire.end()

    return run


def marked_from(characters: int) -> Script:
    """The usual stream behind so many characters of it, with marks."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream; charset=utf-8", extra=TOLD + "x-pdserve-marks: 1\r\n")
        for data, mark in zip(EVENTS, MARKS, strict=False):
            if int(mark.split()[2]) > characters:
                await wire.chunk(data + mark)
        await wire.chunk(b"".join(EVENTS[len(MARKS) :]))
        await wire.end()

    return run


async def _continue(wire: Wire, request: Received) -> None:
    """The rest of the usual stream, from the mark that the caller has."""
    try:
        so_far = json.loads(request.body.partition(b"\n")[0])
        script = marked_from(int(so_far["characters"]))
    except ValueError:
        script = answer(400, {"error": {"message": "no mark"}})
    await script(wire, request)


def hang(gate: Gate | None = None) -> Script:
    """Nothing, until the gate is opened; then the connection is closed."""

    async def run(wire: Wire, request: Received) -> None:
        await (gate or Gate()).passed()
        raise CloseConnection

    return run


def close(after: bytes = b"") -> Script:
    """Send these bytes as they are and close the connection."""

    async def run(wire: Wire, request: Received) -> None:
        if after:
            await wire.raw(after)
            wire.writer.write_eof()
        raise CloseConnection

    return run


def answer(status: int, value: Any) -> Script:
    """A JSON answer, of bytes or of a value."""
    gate = Gate()
    gate.open.set()
    return held(gate, value, status)


def held(gate: Gate, value: Any = ANSWER, status: int = 200) -> Script:
    """A JSON answer, of bytes or of a value, once the gate is open."""

    async def run(wire: Wire, request: Received) -> None:
        await gate.passed()
        await wire.body(status, value if isinstance(value, bytes) else json.dumps(value).encode())

    return run


def answered_with(headers: str) -> Script:
    """The usual answer, with more header lines."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.head(200, "application/json", len(ANSWER), headers)
        await wire.raw(ANSWER)

    return run


def raw_answer(data: bytes) -> Script:
    """These bytes as they are; the connection stays."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.raw(data)

    return run


@asynccontextmanager
async def workers(*made: MockWorker) -> AsyncIterator[None]:
    """Started workers, stopped at the end."""
    for worker in made:
        await worker.start()
    try:
        yield
    finally:
        for worker in made:
            await worker.stop()
