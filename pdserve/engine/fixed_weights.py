"""A worker's weights do not change while it runs.

SGLang can replace them in place (`/update_weights_from_*`). The pool would then mix pages of the old and the
new weights under one namespace, whose name says which weights they are of; nobody could tell them apart. New
weights are a new worker.
"""

from __future__ import annotations

import json

from pdserve.engine.requests import AsgiApp, Receive, Scope, Send
from pdserve.errors import RequestError

PATHS = frozenset(
    {
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
    }
)
_REFUSAL = RequestError(
    403,
    "a worker's pages in the pool are of the weights it started with: start a worker with the new weights",
    code="weights_fixed",
)
_BODY = json.dumps(_REFUSAL.body()).encode()


class FixedWeights:
    """ASGI middleware: refuses the routes that would change weights."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
        await send({"type": "http.response.start", "status": _REFUSAL.status, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})
