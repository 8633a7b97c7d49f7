"""A node's metrics over HTTP: prometheus_client's application in threads of its own, a snapshot taken in the
node's event loop for each scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.errors import StartupError
from pdserve.kvpool.node.metrics.families import Labeller, NodeSnapshot, families
from pdserve.kvpool.node.metrics.meter import LoopLag
from pdserve.security.tokens import bearer, digest, same

SNAPSHOT_TIMEOUT_S: Final = 2.0  # for the event loop to give one
HTTP_TIMEOUT_S: Final = 10.0  # for a scraper to say what it wants
MAX_SCRAPERS: Final = 16  # at a time; each takes a thread
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
        app = make_wsgi_app(registry)
        try:
            self._server = _Server(
                host.strip("[]"), int(port), _guarded(app, digest(token)) if token else app
            )
        except OSError as error:
            raise StartupError(
                f"metrics cannot be served at {address}: {error.strerror or error}: choose another address, "
                "or metrics = '' for none"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="pdserve-metrics", daemon=True).start()
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


class _Handler(WSGIRequestHandler):
    timeout = HTTP_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: strangers would write our log."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each scraper in a thread. Where there are too many, the oldest goes: an honest one has its
    answer soon, and one that holds a place does not keep it.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, app: Any) -> None:
        """Raises OSError."""
        [(self.address_family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()  # of `_open`
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection has come."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_SCRAPERS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Of the connection's own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that leaves early is no fault, and strangers would write our log."""


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
