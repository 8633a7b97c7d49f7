"""The spans of a request at a worker, children of the router's span (`traceparent`). Installed only where
traces are wanted.

    decode /v1/chat/completions        the worker's first span
      queue | pull | compute           from SGLang's times: waiting, reading from the pool, computing
      prefill, publish, pool wait ...  steps of a prefill worker (`tracing.timed`)
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send
from pdserve.engine.http.endpoints import GENERATING_PATHS
from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.tracing import Trace, Tracer, current_trace


class Traced:
    """ASGI middleware, inside of `RequestTracking`."""

    def __init__(self, app: AsgiApp, tracer: Tracer, role: str) -> None:
        self._app = app
        self._tracer = tracer
        self._role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_request()
        if record is None or scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        started_s, ended_s, status = time.monotonic(), 0.0, 0

        async def send_noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, ended_s
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended_s = time.monotonic()  # SGLang has more to do behind a stream, for seconds

        trace = self._tracer.begin(
            f"{self._role} {scope['path']}",
            dict(scope["headers"]),
            started_s,
            **{"url.path": scope["path"], "pdserve.request_id": record.request_id},
        )
        token = current_trace.set(trace)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            current_trace.reset(token)
            _end(trace, record, status, started_s, ended_s or time.monotonic())


def _end(trace: Trace, record: HttpRequest, status: int, started_s: float, ended_s: float) -> None:
    at_s = started_s
    for part, spent_s in record.first.parts_s.items() if record.first is not None else ():
        trace.part(part, at_s, at_s + spent_s)
        at_s += spent_s
    error = "the client left" if record.left.is_set() else f"status {status}" if status >= 500 else ""
    trace.end(ended_s, error, **{"http.response.status_code": status or None})
