"""SGLang's routes that replace weights, for a worker whose pages are in the pool.

A namespace of the pool is named after the weights. So weights are replaced while the worker is *held*: no
request runs, and no page is on its way (`engine/weights.py`). `POST /update_weights_from_disk` alone holds
the worker, passes on, and releases it. The other routes need `POST /weights/hold` before them and
`POST /weights/release` after.

New LoRA adapters need new workers. An adapter that is loaded later gets a random id, which is a part of its
pages' keys, so no other worker would find its pages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any, Final, Protocol

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
from pdserve.errors import RequestError
from pdserve.kvpool.weights.names import is_pool_url

FROM_DISK: Final = "/update_weights_from_disk"
PATHS: Final = frozenset(
    {
        FROM_DISK,
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
    }
)
ADAPTER_PATHS: Final = frozenset({"/load_lora_adapter", "/load_lora_adapter_from_tensors"})
MAX_BODY_BYTES: Final = 256 * 1024
_FIXED: Final = RequestError(
    403,
    "pages in this storage are of the weights that the worker started with: start a worker with the new ones",
    code="weights_fixed",
)
_NOT_HELD: Final = RequestError(
    409,
    "weights are replaced while the worker is held: POST /weights/hold first and /weights/release after it, "
    f"or take {FROM_DISK}",
    code="not_held",
)
_ADAPTER_REFUSAL: Final = RequestError(
    403,
    "pages of an adapter that is loaded later would be found by no other worker: start all with --lora-paths",
    code="weights_fixed",
)


class Held(Protocol):
    """What the routes ask of `engine.weights.Weights`."""

    @property
    def is_held(self) -> bool: ...

    async def hold(self, *, abort: bool) -> None:
        """Raises RequestError."""

    async def release(self) -> None:
        """Raises RequestError."""

    async def check(self, model_path: str) -> None:
        """Raises RequestError where it is no model's directory, and no model of a pool."""

    async def replacing(self, model_path: str | None) -> None:
        """Weights are about to be replaced: by those of a model, or by others."""

    def replaced(self, done: bool) -> None:
        """They were, or perhaps a part of them."""


class WeightRoutes:
    """ASGI middleware; see the module's docstring. `weights`: None where storage is SGLang's own, which has
    no namespaces.
    """

    def __init__(self, app: AsgiApp, weights: Held | None) -> None:
        self._app = app
        self._weights = weights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        if path in ADAPTER_PATHS:
            await answer(send, _ADAPTER_REFUSAL)
        elif path not in PATHS:
            await self._app(scope, receive, send)
        elif self._weights is None:
            await answer(send, _FIXED)
        elif path == FROM_DISK:
            await self._from_disk(self._weights, scope, receive, send)
        elif self._weights.is_held:
            await self._replace(self._weights, None, scope, receive, send)
        else:
            await answer(send, _NOT_HELD)

    async def _from_disk(self, weights: Held, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold and release where nobody has held the worker."""
        owns = not weights.is_held
        try:
            body = await _body(receive)
            model_path, abort = _asked(body)
            await weights.check(model_path)
            body = _for_sglang(body, model_path)
            if owns:
                await weights.hold(abort=abort)
        except RequestError as error:
            await answer(send, error)
            return
        sent: list[MutableMapping[str, Any]] = []

        async def keep(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        try:
            await self._replace(weights, model_path, scope, _replay(body), keep)
        finally:
            refusal = await _released(weights) if owns else None
        if refusal is not None:
            await answer(send, refusal)
            return
        for message in sent:
            await send(message)

    async def _replace(
        self, weights: Held, model_path: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """SGLang's own answer."""
        statuses: list[int] = []

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(int(message["status"]))
            await send(message)

        await weights.replacing(model_path)
        try:
            await self._app(scope, receive, watched)
        finally:
            weights.replaced(statuses == [200])


async def _released(weights: Held) -> RequestError | None:
    try:
        await weights.release()
    except RequestError as error:
        return error
    return None


async def _body(receive: Receive) -> bytes:
    """Raises RequestError 413, 499."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(499, "the client left")
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > MAX_BODY_BYTES:
            raise RequestError(413, f"a body has at most {MAX_BODY_BYTES} bytes here")
        if not message.get("more_body", False):
            return b"".join(parts)


def _asked(body: bytes) -> tuple[str, bool]:
    """(where the new weights are, whether running requests are to be aborted). Raises RequestError 400."""
    try:
        asked = json.loads(body)
        return str(asked["model_path"]), bool(asked.get("abort_all_requests", False))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError(400, "the body must be an object with model_path") from None


def _for_sglang(body: bytes, model_path: str) -> bytes:
    """A pool's model is read by SGLang's own loader of files (`engine/sglang/pool_weights.py`), whatever
    loader the worker was started with.
    """
    if not is_pool_url(model_path):
        return body
    return json.dumps(json.loads(body) | {"load_format": "auto"}).encode()


def _replay(body: bytes) -> Receive:
    """The body once, then a connection that stays: SGLang must not stop half-way where its caller leaves."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    stays: asyncio.Future[MutableMapping[str, Any]] = asyncio.get_running_loop().create_future()

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await stays

    return receive
