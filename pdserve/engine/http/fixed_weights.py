"""Refusal of SGLang's routes that replace weights or load adapters, at a worker whose pages go to a storage.

The pool's namespace and the keys of its pages are made of the weights that the worker started with. Other
weights would read and write pages of the old ones. Workers of a trainer that replaces weights run with
`storage = "none"`. An adapter that is loaded later gets a random id, which is a part of its pages' keys, so
no other worker would find its pages.
"""

from __future__ import annotations

from typing import Final

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
from pdserve.errors import RequestError

UPDATE_PATHS: Final = frozenset(
    {
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
    }
)
ADAPTER_PATHS: Final = frozenset({"/load_lora_adapter", "/load_lora_adapter_from_tensors"})
_WEIGHTS_REFUSAL: Final = RequestError(
    403,
    "pages in this storage are of the weights that the worker started with: start a worker with the new "
    'ones, or take storage = "none"',
    code="weights_fixed",
)
_ADAPTER_REFUSAL: Final = RequestError(
    403,
    "pages of an adapter that is loaded later would be found by no other worker: start all with --lora-paths",
    code="weights_fixed",
)


class FixedWeights:
    """ASGI middleware; see the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        if path in ADAPTER_PATHS:
            await answer(send, _ADAPTER_REFUSAL)
        elif path in UPDATE_PATHS:
            await answer(send, _WEIGHTS_REFUSAL)
        else:
            await self._app(scope, receive, send)
