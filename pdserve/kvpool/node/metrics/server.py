"""A node's metrics over HTTP: prometheus_client's server in its own threads, a snapshot taken in the node's
event loop for each scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.errors import StartupError
from pdserve.kvpool.node.metrics.families import Labeller, NodeSnapshot, families
from pdserve.kvpool.node.metrics.meter import LoopLag
from pdserve.tokens import bearer, digest, same

SNAPSHOT_TIMEOUT_S: Final = 2.0  # for the event loop to give one
HTTP_TIMEOUT_S: Final = 10.0  # for a scraper to say what it wants
LAG_INTERVAL_S: Final = 0.5


class NodeCollector(Collector):
    """Asks the node for a snapshot, from any thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, snapshot: Callable[[], NodeSnapshot], max_namespaces: int
    ) -> None:
        self._loop = loop
        self._snapshot = snapshot
        self._labeller = Labeller(max_namespaces)
        self._lock = threading.Lock()  # two scrapes at once share the labeller

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering asks for no snapshot."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metrics, or that the node does not answer."""
        snapshot = self._ask()
        with self._lock:
            return list(families(snapshot, self._labeller))

    def _ask(self) -> NodeSnapshot | None:
        answer: Future[NodeSnapshot] = Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
            return answer.result(SNAPSHOT_TIMEOUT_S)
        except (TimeoutError, RuntimeError):  # the loop is stuck, or closed
            answer.cancel()
            return None

    def _answer(self, answer: Future[NodeSnapshot]) -> None:
        if answer.set_running_or_notify_cancel():
            answer.set_result(self._snapshot())


class MetricsServer:
    """Serves `http://ADDRESS/metrics` until closed. Made and closed in the event loop's thread."""

    def __init__(
        self,
        address: str,
        loop: asyncio.AbstractEventLoop,
        snapshot: Callable[[], NodeSnapshot],
        lag: LoopLag,
        max_namespaces: int,
        token: str = "",
    ) -> None:
        """`address` is host:port; `token`: of scrapers, empty for none. Raises StartupError."""
        registry = CollectorRegistry()
        registry.register(NodeCollector(loop, snapshot, max_namespaces))
        ProcessCollector(registry=registry)
        host, _, port = address.rpartition(":")
        self._server: WSGIServer
        try:
            self._server, _ = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise StartupError(
                f"metrics cannot be served at {address}: {error.strerror or error}: choose another address, "
                "or metrics = '' for none"
            ) from None
        if token:
            self._server.set_app(_guarded(self._server.get_app(), digest(token)))
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": HTTP_TIMEOUT_S})
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._loop = loop
        self._lag = lag
        self._due_s = loop.time() + LAG_INTERVAL_S
        self._timer = loop.call_later(LAG_INTERVAL_S, self._tick)

    def close(self) -> None:
        """Stop serving: the address is free at once. The server's thread ends by itself soon."""
        self._timer.cancel()
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        # in a thread, because `shutdown` waits for the server's own poll, half a second
        threading.Thread(target=self._stop, name="pdserve-metrics-stop", daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _tick(self) -> None:
        now_s = self._loop.time()
        self._lag.observe(max(0.0, now_s - self._due_s))
        self._due_s = now_s + LAG_INTERVAL_S
        self._timer = self._loop.call_later(LAG_INTERVAL_S, self._tick)


def _guarded(app: Any, token_digest: str) -> Any:
    """The WSGI application for those who show the token."""

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        shown = bearer(str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace"))
        if same(digest(shown), token_digest):
            answer: Iterable[bytes] = app(environ, start_response)
            return answer
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the metrics ask for a token: `Authorization: Bearer TOKEN` (metrics_token_file)\n"]

    return serve
