"""A router in this process on a real port before mock workers, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
import uvloop

from pdserve.router.app.lifespan import open_router
from pdserve.router.app.router import Router
from pdserve.router.config.limits import Deadlines, Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.http.listening import bind
from pdserve.router.http.serving import make_server
from pdserve.router.metrics.stats import Stats
from pdserve.tracing import Tracer
from tests.support.router.mock_worker import MockWorker, workers

CHAT = "/v1/chat/completions"
PATIENT = Deadlines(
    connect_s=30.0,
    settle_s=1.0,
    prefill_s=60.0,
    first_byte_s=60.0,
    early_head_s=60.0,
    whole_answer_s=60.0,
    between_chunks_s=60.0,
    total_s=120.0,
    wait_for_worker_s=0.0,  # tests that want a wait say so
)
"""Of tests that are not about deadlines: the machine may be busy with others."""


def run(main: Coroutine[Any, Any, None], timeout_s: float = 60.0) -> None:
    """Run an async test on the router's own kind of event loop; one that hangs fails here."""
    uvloop.run(asyncio.wait_for(main, timeout_s))


@dataclass
class Response:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's form, its shape checked."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error


class Connection:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def leave(self) -> None:
        """Go away without a word."""
        self.writer.transport.abort()

    async def send(
        self, path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> None:
        given = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\nhost: test\r\n{lines}\r\n".encode("latin-1") + body)
        await self.writer.drain()

    async def head(self) -> Response:
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.split("\r\n")
        assert first.startswith("HTTP/1.1 "), text  # nothing of an earlier answer stands before it
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        return Response(int(first.split(" ")[1]), headers, b"")

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" at its end. Raises IncompleteReadError when it is cut short."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def response(self) -> Response:
        response = await self.head()
        try:
            if "content-length" in response.headers:
                response.body = await self.reader.readexactly(int(response.headers["content-length"]))
            else:
                while data := await self.chunk():
                    response.body += data
        except asyncio.IncompleteReadError:
            response.is_whole = False
        return response


class Harness:
    """A router under test."""

    def __init__(self, router: Router, port: int) -> None:
        self.router = router
        self.port = port
        self._clients: list[Connection] = []

    @property
    def stats(self) -> Stats:
        """The router's counters, with all that was observed counted."""
        self.router.stats.count()
        return self.router.stats

    @property
    def in_flight(self) -> int:
        """Requests that the router serves now."""
        return len(self.router.proxy.running)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> Connection:
        """A client, which leaves at the test's end at the latest."""
        self._clients.append(Connection(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self._clients[-1]

    def hang_up(self) -> None:
        """All clients leave."""
        for client in self._clients:
            client.leave()

    async def asking(
        self, headers: dict[str, str] | None = None, path: str = CHAT, **more: Any
    ) -> Connection:
        """A client that has asked for a chat and not read its answer."""
        client = await self.connect()
        await client.send(path, json.dumps(chat_body(**more)).encode(), headers)
        return client

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = await self.connect()
        try:
            await connection.send(path, data, headers)
            return await connection.response()
        finally:
            connection.leave()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Response:
        connection = await self.connect()
        try:
            await connection.send(path, b"", headers, method="GET")
            return await connection.response()
        finally:
            connection.leave()

    async def chat(self, headers: dict[str, str] | None = None, **more: Any) -> Response:
        return await self.post(CHAT, chat_body(**more), headers)

    async def settle(self) -> None:
        """Let the router's own callbacks run until it has nothing in flight."""
        while self.in_flight:  # noqa: ASYNC110 - the router has no event for this, and needs none
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the router's own callbacks run until `condition` holds."""
        while not condition():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)

    async def until_in_flight(self) -> None:
        """Let the router's own callbacks run until it has seen a request."""
        while not self.in_flight:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)

    async def assert_nothing_leaked(self) -> None:
        """No load counted, no deadline watched, no connection in use, no task but the server's and the
        probes'.
        """
        await self.settle()
        upstream = self.router.upstream
        loads = {(one.in_flight, one.prefilling, one.queued_here) for one in self.router.fleet.workers}
        assert loads <= {(0, 0, 0)}
        assert len(upstream.deadlines) == 0
        assert upstream.open_count == upstream.idle_count
        for _ in range(3):
            await asyncio.sleep(0)
        of_requests = ("ask", "_pull_ahead", "_OrdinaryRequest")
        tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert [name for name in tasks if name.partition(".")[0] in of_requests] == []


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | more


@asynccontextmanager
async def served(server: uvicorn.Server) -> AsyncIterator[int]:
    """The server on a free port, which is yielded. At the end it is cut off: uvicorn's stop takes 0.2 s."""
    with bind("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            assert not serving.done()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for one in server.servers:
                one.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)


@asynccontextmanager
async def routed(config: RouterConfig, tracer: Tracer | None = None) -> AsyncIterator[Harness]:
    """A router with this configuration on a free port. Its probes are patient unless it says more of them."""
    if config.probe == Probe():
        config = msgspec.structs.replace(config, probe=Probe(timeout_s=60.0))
    async with (
        open_router(config, tracer) as router,
        served(make_server(router, config, proxied=router.proxy)) as port,
    ):
        harness = Harness(router, port)
        yield harness
        harness.hang_up()
        await harness.assert_nothing_leaked()


@asynccontextmanager
async def disagg(
    prefill: int = 1,
    decode: int = 1,
    make: Callable[[str], MockWorker] = MockWorker,
    tracer: Tracer | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Harness, list[MockWorker], list[MockWorker]]]:
    """A router before so many mock workers."""
    prefills = [make("prefill") for _ in range(prefill)]
    decodes = [make("decode") for _ in range(decode)]
    async with workers(*prefills, *decodes):
        settings = RouterConfig(
            prefill=tuple(w.url for w in prefills),
            decode=tuple(w.url for w in decodes),
            deadlines=PATIENT,
            min_prefill_tokens=0,  # also short prompts have both stages
        )
        async with routed(msgspec.structs.replace(settings, **config), tracer) as harness:
            yield harness, prefills, decodes


@asynccontextmanager
async def before(*made: MockWorker, **config: object) -> AsyncIterator[Harness]:
    """A router before these workers."""
    async with workers(*made):
        urls = {role: tuple(w.url for w in made if w.role == role) for role in ("prefill", "decode")}
        defaults = {"deadlines": PATIENT, "min_prefill_tokens": 0}
        async with routed(RouterConfig(**urls, **(defaults | config))) as harness:  # type: ignore[arg-type]
            yield harness
