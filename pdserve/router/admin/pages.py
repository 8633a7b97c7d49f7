"""Pages of tenants and sessions in the pool: how many bytes, and their end. The workers ask the pool
(`decode/erase.py`).

An erasure goes to all workers at once: each empties its own caches, and then has all nodes of the pool erase
the pages. The last one to do so finds none, so what a worker was still storing is erased as well.

Of a session each worker erases what its requests made there. The session table says which workers these were
and since which turn, so that a worker that is gone, or has forgotten turns, is told as a problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pdserve.errors import PdserveError, RequestError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.app.router import Router
from pdserve.router.config.tenants import SHARED
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError
from pdserve.router.sessions.keys import SessionKey, named
from pdserve.router.sessions.table import SessionEntry, digest
from pdserve.router.tenants.rights import salt_line

TENANTS: Final = "/pool/tenants"
ERASE: Final = "/pool/erase"
ASK_S: Final = 10.0
ERASE_S: Final = 120.0
"""A worker lets its requests end, and the nodes answer, within 94 s."""
MAX_ANSWER_BYTES: Final = 4 << 20
_JSON: Final = b"content-type: application/json\r\n"


class _Held(msgspec.Struct):
    tenants: dict[str, dict[str, tuple[int, int]]]
    problems: dict[str, str]


class _Erased(msgspec.Struct):
    pages: dict[str, int]
    problems: dict[str, str]
    turn: int = 0


class Erasing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /pages/erase`. `request`: the body of a generation, whose prompt's pages are meant;
    `session`: the name that a client gives its session; else all pages of the tenant. `model`: of one model;
    empty: of all.
    """

    tenant: str = ""
    session: str = ""
    model: str = ""
    request: msgspec.Raw = msgspec.Raw(b"")


class _Refused(PdserveError):
    """A worker answered with another status than 200."""


_FAILED: Final = (UpstreamError, _Refused, *UNREADABLE)


class Pages:
    """Of all models behind this router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def of_tenants(self) -> dict[str, dict[str, int]]:
        """By the name of their cache: bytes in memory and in tiers, over all nodes and models that answer."""
        workers = self._workers("")
        # by model, tenant and node: workers share nodes
        told: dict[tuple[str, str, str], tuple[int, int]] = {}
        for worker, held in zip(workers, await asyncio.gather(*map(self._held, workers)), strict=True):
            namespace = worker.info.namespace if worker.info is not None else ""
            for tenant, nodes in held.items():
                told.update({(namespace, tenant, node): amounts for node, amounts in nodes.items()})
        sums: dict[str, dict[str, int]] = {}
        for (_, tenant, _), (memory_bytes, tier_bytes) in told.items():
            total = sums.setdefault(tenant, {"memory_bytes": 0, "tier_bytes": 0})
            total["memory_bytes"] += memory_bytes
            total["tier_bytes"] += tier_bytes
        return sums

    async def erase(self, body: bytes) -> dict[str, Any]:
        """Erase pages; what was erased, and who could not do so. Raises RequestError: 400, 404, 409."""
        try:
            asked = msgspec.json.decode(body, type=Erasing)
        except UNREADABLE as error:
            raise RequestError(400, str(error)) from None
        cache, by_prompt = self._cache(asked.tenant), bool(bytes(asked.request))
        whole = not by_prompt and not asked.session
        if not asked.tenant and (whole or (asked.session and self._router.gate.tenants.has_keys)):
            raise RequestError(400, "Name a tenant, or a request.", param="tenant")
        if by_prompt and asked.session:
            raise RequestError(400, "Name a session or a request, not both.", param="session")
        if whole and cache == SHARED:
            raise RequestError(
                409, "This tenant shares its cache with others: name a session or a request.", param="tenant"
            )
        workers = self._workers(asked.model)
        if not workers:
            raise RequestError(404, "No worker of the pool is known.", code="model_not_found")
        lines, sent = _JSON, msgspec.json.encode({"tenant": cache})
        if by_prompt:
            lines, sent = _JSON + salt_line(msgspec.Raw(b""), cache), bytes(asked.request)
        elif asked.session:
            sent = msgspec.json.encode({"session": digest(self._key(asked, "").name)})
        answers = await asyncio.gather(*(self._erase(one, lines, sent) for one in workers))
        told = list(zip(workers, answers, strict=True))
        if not asked.session:
            return _told(told, {})
        turns = self._turns(asked)
        if not turns and not any(erased.turn for erased in answers):
            raise RequestError(404, "Nobody knows this session.", param="session")
        return _told(told, _gaps(turns, told)) | {"turns": sum(one.turns for one in turns)}

    def _key(self, asked: Erasing, model: str) -> SessionKey:
        tenant = asked.tenant if self._router.gate.tenants.has_keys else ""
        return named(asked.session).of_model(model, tenant)

    def _turns(self, asked: Erasing) -> list[SessionEntry]:
        """The last turn of a session, for each model that has served it."""
        fleet = self._router.fleet
        served = [*fleet.tasks, *(f"{m}:{one}" for m, names in fleet.adapters.items() for one in names)]
        table, now_s = self._router.proxy.placer.sessions, asyncio.get_running_loop().time()
        found = [table.get(self._key(asked, one), now_s) for one in served if asked.model in ("", one)]
        return [entry for entry in found if entry is not None]

    def _cache(self, tenant: str) -> str:
        known = self._router.gate.tenants.get(tenant)
        return (known.cache if known is not None else tenant) or SHARED

    def _workers(self, model: str) -> Sequence[Worker]:
        """Those whose pages are in a pool, of one model or of all."""
        with_pool = [w for w in self._router.fleet.workers if w.info is not None and w.info.namespace]
        return [w for w in with_pool if w.info is not None and model in ("", w.info.model)]

    async def _held(self, worker: Worker) -> dict[str, dict[str, tuple[int, int]]]:
        try:
            said = await self._fetch(worker, TENANTS, _JSON, b"", ASK_S, b"GET")
            return msgspec.json.decode(said, type=_Held).tenants
        except _FAILED:
            return {}

    async def _erase(self, worker: Worker, lines: bytes, body: bytes) -> _Erased:
        try:
            said = await self._fetch(worker, ERASE, lines, body, ERASE_S, b"POST")
            return msgspec.json.decode(said, type=_Erased)
        except _FAILED as error:
            return _Erased({}, {"worker": str(error)})

    async def _fetch(
        self, worker: Worker, target: str, lines: bytes, body: bytes, limit_s: float, method: bytes
    ) -> bytes:
        """Raises UpstreamError, _Refused."""
        said = await self._router.upstream.fetch(
            worker,
            target,
            lines,
            body,
            limit_s=limit_s,
            limit_bytes=MAX_ANSWER_BYTES,
            method=method,
        )
        if said.status != 200:
            raise _Refused(f"status {said.status}: {said.body[:500].decode(errors='replace')}")
        return said.body


def _gaps(turns: Sequence[SessionEntry], answers: Iterable[tuple[Worker, _Erased]]) -> dict[str, str]:
    """What is not known of a session's pages."""
    if not turns:
        return {"session": "the router has forgotten it, or has restarted since: workers may be missing"}
    first = {worker.info.info_tag: erased.turn for worker, erased in answers if worker.info is not None}
    computed = [one for entry in turns for one in entry.workers]
    gaps = [turn for tag, turn in computed if not 0 < first.get(tag, 0) <= turn]
    if not gaps:
        return {}
    text = "computed since turn %d at a worker that is gone, or does not know all of its pages any more"
    return {"session": text % min(gaps)}


def _told(answers: Iterable[tuple[Worker, _Erased]], gaps: dict[str, str]) -> dict[str, Any]:
    """Of each node the largest count that a worker was told: the first one to come found the pages."""
    pages: dict[str, int] = {}
    problems = dict(gaps)
    for worker, erased in answers:
        for node, count in erased.pages.items():
            pages[node] = max(count, pages.get(node, 0))
        for where, problem in erased.problems.items():
            problems[f"{worker.id} {where}"] = problem
    return {"erased": not problems, "pages": pages, "problems": problems}
