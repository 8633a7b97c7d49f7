"""Whose pages the pool has, and their end: for the router's admin API.

    GET  /pool/tenants    bytes of each tenant's pages of this worker's model, at the nodes that it may ask
    POST /pool/erase      {"tenant": NAME}, {"session": NAME}, or a body as for `/v1/kv/lookup` with its salt

An erasure empties this worker's own caches first, whosever they are, once no request runs. Then each node of
the pool erases the pages, in memory and tiers. The answer says of each node how many pages there were (of a
whole tenant: those in memory and those in tiers), or why it cannot say so; nothing is hidden by a sum. A node
that was away erases them when it returns.

Of a session each worker erases the pages that its requests made here (`session_pages`), and says from which
turn on it knows them.

These paths are not among those that a worker without a token serves to all (`engine/http/guard.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pdserve.decode.lookup import Asked, Lookup, decoded
from pdserve.decode.session_pages import SessionPages
from pdserve.errors import PoolError, RequestError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.namespaces.tenants import is_tenant_name

TENANTS: Final = "/pool/tenants"
ERASE: Final = "/pool/erase"
FLUSH_S: Final = 20.0
"""For running requests to end, before this worker's caches are emptied."""
IDLE_S: Final = 10.0
"""For a session's requests that are answered, until their pages are stored."""


class Caches(Protocol):
    """What is asked here of an `Engine`."""

    async def flush(self, timeout_s: float) -> str: ...


class Erasing(Asked):
    """The body of an erasure."""

    tenant: str = ""
    session: str = ""


class Erased(msgspec.Struct):
    """The answer. `pages`: by node. `problems`: by node that cannot say that nothing is left, and under
    `caches` why this worker's own were not emptied. `turn`: of a session, this worker knew the pages of all
    its turns from that one on; 0: it did not.
    """

    pages: dict[str, int] = {}
    problems: dict[str, str] = {}
    turn: int = 0


class Erase:
    """The routes."""

    def __init__(self, caches: Caches, pool: AsyncPoolClient, lookup: Lookup, sessions: SessionPages) -> None:
        self._caches = caches
        self._pool = pool
        self._lookup = lookup
        self._sessions = sessions

    def router(self) -> APIRouter:
        """The FastAPI router with the routes."""
        router = APIRouter()
        router.add_api_route(TENANTS, self.tenants, methods=["GET"], response_model=None)
        router.add_api_route(ERASE, self.erase, methods=["POST"], response_model=None)
        return router

    async def tenants(self) -> Response:
        """Answer with `{"tenants": {NAME: {NODE: [MEMORY, TIERS]}}, "problems": {NODE: TEXT}}`, in bytes. The
        tenant "" is nobody: pages that all share.
        """
        found: dict[str, dict[str, tuple[int, int]]] = {}
        problems = {}
        for node, held in (await self._pool.tenants()).items():
            if isinstance(held, PoolError):
                problems[node] = str(held)
                continue
            for tenant, amounts in held.items():
                found.setdefault(tenant, {})[node] = amounts
        return JSONResponse({"tenants": found, "problems": problems})

    async def erase(self, request: Request) -> Response:
        """Answer with an `Erased`."""
        try:
            erased = await self._erased(request)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        return Response(msgspec.json.encode(erased), media_type="application/json")

    async def _erased(self, request: Request) -> Erased:
        body = await request.body()
        asked = decoded(body, Erasing)
        prompt: Any = None
        if asked.tenant and not is_tenant_name(asked.tenant):
            raise RequestError(400, "no tenant has such a name", param="tenant")
        if not asked.tenant and not asked.session:
            prompt = await self._lookup.prompt(request, asked, body)
        problem = await self._caches.flush(FLUSH_S)
        if asked.session:
            erased = await self._session(asked.session)
        elif prompt is None:
            erased = _told(await self._pool.erase_tenant(asked.tenant))
        else:
            keys = await asyncio.to_thread(prompt.pages.all_keys)
            erased = _told(await self._pool.erase(keys, prompt.pages.tenant))
        if problem:
            erased.problems["caches"] = problem
        return erased

    async def _session(self, name: str) -> Erased:
        known = await self._sessions.known(name, IDLE_S)
        erased = _told(await self._pool.erase(known.keys, known.tenant)) if known.keys else Erased()
        erased.turn = known.turn
        if not known.is_idle:
            erased.problems["session"] = f"its pages are still being stored after {IDLE_S:.0f} s: ask again"
        return erased


def _told(outcomes: Mapping[str, int | PoolError]) -> Erased:
    pages = {node: one for node, one in outcomes.items() if isinstance(one, int)}
    return Erased(pages, {node: str(one) for node, one in outcomes.items() if isinstance(one, PoolError)})
