"""Weights that are replaced while a worker runs, as reinforcement learning does: new weights, new namespace.

    serving --hold--> held --(SGLang's update routes)--> held --release--> serving

No page of old weights is read or written under new ones, since

- `hold` lets nothing new in, waits until no request runs, and detaches SGLang's storage backend, which SGLang
  does only when no page is on its way; so the backend, its page mover and their connections are gone;
- `release` empties SGLang's device and host caches and attaches a backend with another namespace, and only
  then lets requests in.

The new namespace is named after the fingerprint of the directory, or of the pool's model, that the weights
came from: workers that start with it share its pages. Otherwise it is named after the id that the caller
gives, the same for all workers of a model, and after nothing that anybody else has if there is none, or if an
update failed half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta
from msgspec.structs import replace

from pdserve.engine.http.held import Door
from pdserve.errors import ConfigError, RequestError, StartupError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.pages import KvGeometry

logger = logging.getLogger(__name__)

HOLD_S: Final = 120.0
"""For running requests to end, and for pages to get to the pool."""
STEP_S: Final = 60.0
"""For SGLang to empty its caches, or to attach or detach its storage."""
POLL_S: Final = 0.05
_TAG: Final = "weights="


class HoldQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /weights/hold`. `abort`: end what runs instead of waiting for it."""

    abort: bool = False
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = HOLD_S


class ReleaseQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /weights/release`. `id`: of these weights, the same for all workers that have them."""

    id: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")] = ""


class DropQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /weights/drop`."""

    namespace: str


class Engine(Protocol):
    """What is asked of `engine.sglang.engine.Engine`. Each returns why it did not work, empty if it did."""

    @property
    def door(self) -> Door: ...
    @property
    def unfinished(self) -> int: ...

    def abort_all(self) -> None: ...
    async def flush(self) -> str: ...
    async def detach_storage(self) -> str: ...
    async def attach_storage(self, extra_config: Mapping[str, Any]) -> str: ...
    def keep_name(self) -> None: ...


@dataclass
class _Change:
    """What was done to the weights while the worker is held."""

    updates: int = 0
    is_whole: bool = True
    """None of them failed."""
    model_path: str | None = None
    """Where all weights are from, if the only update read them from there: a directory, or a pool's URL."""
    fingerprint: str = ""
    """That model's, before it was read."""


class Weights:
    """Those of one worker. `name`: what its namespaces begin with. `storage_of(namespace, geometry)`:
    SGLang's extra config. `fingerprint`: of a model's directory or URL, raises StartupError, ConfigError.
    """

    def __init__(
        self,
        engine: Engine,
        pool: AsyncPoolClient,
        geometry: KvGeometry,
        *,
        name: str,
        storage_of: Callable[[str, KvGeometry], Mapping[str, Any]],
        fingerprint: Callable[[str], str],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._geometry = geometry
        self._name = name
        self._storage_of = storage_of
        self._fingerprint = fingerprint
        self._change: _Change | None = None  # while it is held
        self._old: dict[str, KvGeometry] = {}  # namespaces of earlier weights
        self._steps = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_held(self) -> bool:
        """No request runs, and the pool is detached."""
        return self._change is not None

    @property
    def earlier(self) -> list[str]:
        """Namespaces of earlier weights that were not dropped."""
        return list(self._old)

    async def hold(self, *, abort: bool = False, timeout_s: float = HOLD_S) -> None:
        """Raises RequestError 409 where requests run for longer; then all is as before."""
        await self._whole(self._hold(abort, time.monotonic() + timeout_s))

    async def release(self, id_: str = "") -> None:
        """Serve again. `id_`: see `ReleaseQuestion`. Raises RequestError: 409 where it is not held, 500 where
        it cannot serve, or serves without the pool.
        """
        await self._whole(self._release(id_))

    async def check(self, model_path: str) -> None:
        """Raises RequestError 400 where it is no model's directory, and none of a pool that is there: SGLang
        would look for it elsewhere.
        """
        try:
            await asyncio.to_thread(self._fingerprint, model_path)
        except (StartupError, ConfigError, OSError, ValueError) as error:
            said = (
                f"model_path {model_path!r} is no local directory of a model, and no model of a pool: {error}"
            )
            raise RequestError(400, said) from None

    async def replacing(self, model_path: str | None) -> None:
        """Weights are about to be replaced: by those of a model, or by others. The worker is held."""
        assert self._change is not None
        self._change.updates += 1
        only = model_path is not None and self._change.updates == 1
        self._change.model_path = model_path if only else None
        self._change.fingerprint = await self._fingerprint_of(self._change.model_path)

    def replaced(self, done: bool) -> None:
        """They were, or perhaps a part of them."""
        assert self._change is not None
        self._change.is_whole &= done
        self._engine.keep_name()

    async def drop(self, namespace: str) -> int:
        """Drop the pages of earlier weights. Returns their number. Raises RequestError 404."""
        if (geometry := self._old.pop(namespace, None)) is None:
            raise RequestError(404, f"{namespace} is no namespace of this worker's earlier weights")
        return await asyncio.to_thread(_clear, self._pool, namespace, geometry)

    async def _whole(self, step: Coroutine[Any, Any, None]) -> None:
        """Do it to its end, also where the caller leaves."""
        task = asyncio.create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _hold(self, abort: bool, deadline_s: float) -> None:
        async with self._steps:
            if self.is_held:
                raise RequestError(409, "this worker is held already", code="held")
            self._engine.door.shut()
            try:
                await self._quiet(abort, deadline_s)
                self._change = _Change()
            finally:
                if not self.is_held:
                    self._engine.door.open()

    async def _quiet(self, abort: bool, deadline_s: float) -> None:
        if abort:
            self._engine.abort_all()
        while self._engine.unfinished:
            if time.monotonic() > deadline_s:
                said = f"{self._engine.unfinished} requests still run: wait, or let them be aborted"
                raise RequestError(409, said, code="still_running")
            await asyncio.sleep(POLL_S)
        if why := await _until_done(self._engine.detach_storage, deadline_s):
            # it may still detach it, after we gave up; where it did not, this changes nothing
            await self._attach_storage(time.monotonic())
            raise RequestError(409, f"SGLang keeps its storage: {why}", code="still_writing")

    async def _release(self, id_: str) -> None:
        async with self._steps:
            if (change := self._change) is None:
                raise RequestError(409, "this worker is not held", code="not_held")
            geometry = self._geometry
            if change.updates:
                if why := await _until_done(self._engine.flush, time.monotonic() + STEP_S):
                    said = (
                        f"SGLang's caches still hold pages of the old weights: {why}: start this worker again"
                    )
                    raise RequestError(500, said, type_="server_error", code="not_flushed")
                geometry = await self._geometry_of(change, id_)
            await self._attach(geometry)

    async def _attach(self, geometry: KvGeometry) -> None:
        if geometry != self._geometry:
            namespace = self._pool.namespace
            self._old[namespace] = self._geometry
            namespace = geometry.namespace(self._name)
            self._old.pop(namespace, None)
            self._geometry = geometry
            self._pool.use(namespace, geometry.as_dict())
            logger.info("new weights, namespace %s", namespace)
        why = await self._attach_storage(time.monotonic() + STEP_S)
        self._change = None
        self._engine.door.open()
        if why:
            said = f"this worker serves, but without the pool: {why}: start it again"
            raise RequestError(500, said, type_="server_error", code="not_attached")

    async def _attach_storage(self, deadline_s: float) -> str:
        """Why it did not work; empty if it did."""
        extra_config = self._storage_of(self._pool.namespace, self._geometry)
        return await _until_done(partial(self._engine.attach_storage, extra_config), deadline_s)

    async def _geometry_of(self, change: _Change, id_: str) -> KvGeometry:
        """Of the weights that SGLang has now."""
        options = [one for one in self._geometry.options.split(",") if one and not one.startswith(_TAG)]
        found = await self._fingerprint_of(change.model_path) if change.is_whole else ""
        if found and found == change.fingerprint:
            return replace(self._geometry, model=found, options=",".join(options))
        known = id_ if change.is_whole and change.model_path is None else ""
        return replace(self._geometry, options=",".join([*options, _TAG + (known or uuid.uuid4().hex)]))

    async def _fingerprint_of(self, model_path: str | None) -> str:
        """Empty where it has none: SGLang will say what is wrong with it."""
        if model_path is not None:
            with contextlib.suppress(StartupError, ConfigError, OSError, ValueError):
                return await asyncio.to_thread(self._fingerprint, model_path)
        return ""


def _clear(pool: AsyncPoolClient, namespace: str, geometry: KvGeometry) -> int:
    with contextlib.closing(PoolClient(pool.config, namespace, geometry.as_dict(), name="weights")) as client:
        return client.clear()


async def _until_done(step: Callable[[], Awaitable[str]], deadline_s: float) -> str:
    """Try until SGLang does it; why it does not. It refuses while pages are on their way."""
    while True:
        try:
            why = await asyncio.wait_for(step(), max(POLL_S, deadline_s - time.monotonic()))
        except TimeoutError:
            return "it did not answer in time"
        if not why or time.monotonic() > deadline_s:
            return why
        await asyncio.sleep(POLL_S)


def routes(weights: Weights) -> APIRouter:
    """`/weights/*`: for the cluster's token, or this host."""
    router = APIRouter()

    async def hold(request: Request) -> Response:
        asked = _asked(await request.body(), HoldQuestion)
        await weights.hold(abort=asked.abort, timeout_s=asked.timeout_s)
        return JSONResponse({"held": True})

    async def release(request: Request) -> Response:
        await weights.release(_asked(await request.body(), ReleaseQuestion).id)
        return JSONResponse({"held": False, "earlier_namespaces": weights.earlier})

    async def drop(request: Request) -> Response:
        asked = _asked(await request.body(), DropQuestion)
        return JSONResponse({"dropped_pages": await weights.drop(asked.namespace)})

    for path, route in (("hold", hold), ("release", release), ("drop", drop)):
        router.add_api_route(f"/weights/{path}", _told(route), methods=["POST"], response_model=None)
    return router


def _told(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def told(request: Request) -> Response:
        try:
            return await route(request)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)

    return told


Q = TypeVar("Q")


def _asked(body: bytes, type_: type[Q]) -> Q:
    """Raises RequestError 400."""
    try:
        return msgspec.json.decode(body or b"{}", type=type_)
    except msgspec.MsgspecError as error:
        raise RequestError(400, str(error)) from None
