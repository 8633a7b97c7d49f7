"""A worker's weights do not change while it runs.

SGLang can replace them in place (`/update_weights_from_*`). A namespace of the pool is named after the
weights, and would then hold pages of the old and the new weights. Nobody could tell them apart. So new
weights need a new worker, and so do new LoRA adapters. An adapter that is loaded later gets a random id,
which is a part of its pages' keys, so no other worker would find its pages.
"""

from __future__ import annotations

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
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
ADAPTER_PATHS = frozenset({"/load_lora_adapter", "/load_lora_adapter_from_tensors"})
_REFUSAL = RequestError(
    403,
    "a worker's pages in the pool are of the weights it started with: start a worker with the new weights",
    code="weights_fixed",
)
_ADAPTER_REFUSAL = RequestError(
    403,
    "pages of an adapter that is loaded later would be found by no other worker: start all with --lora-paths",
    code="weights_fixed",
)


class FixedWeights:
    """ASGI middleware: refuses the routes that change or add weights."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        if path in PATHS:
            await answer(send, _REFUSAL)
        elif path in ADAPTER_PATHS:
            await answer(send, _ADAPTER_REFUSAL)
        else:
            await self._app(scope, receive, send)
