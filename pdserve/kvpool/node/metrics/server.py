"""A node's metrics over HTTP: a handler of GET in the node's event loop, which takes a snapshot for each
scrape. The text is made in a thread, since a node of a thousand namespaces has 100,000 samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from pdserve.errors import StartupError
from pdserve.kvpool.node.metrics.families import NodeSnapshot, families
from pdserve.kvpool.node.metrics.meter import Series
from pdserve.security.tokens import bearer, digest, same

HTTP_TIMEOUT_S: Final = 10.0  # for a scraper to send its request, and to read the answer
MAX_HEAD_BYTES: Final = 16 << 10
MAX_SCRAPERS: Final = 16  # connections at a time
LAG_INTERVAL_S: Final = 0.5
_NO_TOKEN: Final = b"the metrics ask for a token: `Authorization: Bearer TOKEN` (metrics_token_file)\n"


class MetricsServer:
    """Serves `http://ADDRESS/metrics` from `start` to `close`, in the event loop's thread.

    Where there are too many connections the oldest one is closed: an honest scraper has its answer soon, and
    a silent client does not keep its place.
    """

    def __init__(self, snapshot: Callable[[], NodeSnapshot], lag: Series, token: str = "") -> None:
        """`lag`: takes how late the event loop comes to what is due. `token`: of scrapers, empty for none."""
        self._snapshot = snapshot
        self._lag = lag
        self._token = digest(token) if token else ""
        self._process = ProcessCollector(registry=None)
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen at `address`, which is host:port. Returns the URL. Raises StartupError."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            [(*_, where), *_] = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            self._server = await asyncio.start_server(
                self._accept, str(where[0]), int(port), limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise StartupError(
                f"metrics cannot be served at {address}: {error.strerror or error}: choose another address, "
                "or metrics = '' for none"
            ) from None
        self._due_s = loop.time() + LAG_INTERVAL_S
        self._timer = loop.call_later(LAG_INTERVAL_S, self._tick)
        return f"http://{host}:{self._server.sockets[0].getsockname()[1]}/metrics"

    def close(self) -> None:
        """Stop serving: the address is free at once."""
        if self._server is not None:
            self._timer.cancel()
            self._server.close()
            for task in self._open:
                task.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._lag.observe(max(0.0, now_s - self._due_s))
        self._due_s = now_s + LAG_INTERVAL_S
        self._timer = loop.call_later(LAG_INTERVAL_S, self._tick)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open[task] = None
        task.add_done_callback(lambda ended: self._open.pop(ended, None))
        if len(self._open) > MAX_SCRAPERS:
            next(iter(self._open)).cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection. What a stranger sends or leaves out is not logged."""
        try:
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # TimeoutError is an OSError
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, head: bytes) -> bytes:
        request, *lines = head.split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        if self._token and not same(digest(bearer(fields.get(b"authorization", b""))), self._token):
            return _response("401 Unauthorized", "text/plain", _NO_TOKEN, "WWW-Authenticate: Bearer\r\n")
        method, target, *_ = [*request.split(b" "), b"", b""]
        if method != b"GET":
            return _response("405 Method Not Allowed", "text/plain", b"", "Allow: GET\r\n")
        if target.partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "text/plain", b"the metrics are at /metrics\n")
        text = await asyncio.to_thread(self._text, self._snapshot())
        return _response("200 OK", CONTENT_TYPE_PLAIN_0_0_4, text)

    def _text(self, snapshot: NodeSnapshot) -> bytes:
        return generate_latest(_Found([*families(snapshot), *self._process.collect()]))


class _Found(CollectorRegistry):
    """Metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _response(status: str, kind: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode("latin-1") + body
