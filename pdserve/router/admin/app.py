"""The admin API: workers, tenants and metrics. It has its own port and its own key.

GET    /workers                    all workers and their state
POST   /workers                    {"url": "http://HOST:PORT", "role": one of prefill, decode, agg, elastic}
DELETE /workers/HOST:PORT          remove a worker; it finishes its requests
POST   /workers/HOST:PORT/drain    give a worker no new requests
POST   /workers/HOST:PORT/undrain  give it new requests again
POST   /models/M/update_weights_from_disk   new weights for all workers of model M
GET    /tenants                    limits and use of each tenant, and its bytes in the pool
POST   /pages/erase                {"tenant": T}, perhaps with "session": S or "request": BODY: erase pages
POST   /reload                     read the API keys again (SIGHUP: the configuration too)
GET    /metrics                    Prometheus metrics
GET    /live/                      the live page; a browser asks for the key as a password
GET    /health                     state of this process; needs no key

Figures of workers and tenants are sums over all processes of this router. If one of them does not answer,
they are null, or the answer is an error.

A browser cannot open a page with `Authorization: Bearer`. So the live page, and `/metrics` that it reads,
also take the admin key as the password of HTTP Basic. Only these do, because they only read: a browser also
sends a stored password with requests that another site causes (CSRF), and the other routes change things.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from pathlib import Path
from typing import Any, Final

import fastapi
import msgspec
from fastapi.responses import RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve import __version__
from pdserve.errors import ConfigError, RequestError
from pdserve.router.admin.pages import Pages
from pdserve.router.admin.weights import Weights
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.app.router import Router, add_error_handlers, refused
from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.worker import Role, Worker
from pdserve.router.http.asgi import Receive, Scope, Send, address_of
from pdserve.router.metrics.exposition import exposition
from pdserve.router.metrics.stats import Snapshot

MAX_BODY_BYTES = 64 * 1024
IN_FLIGHT = "worker_requests_in_flight"
BASIC: Final = 'Basic realm="pdserve: any name, and the admin key as password", charset="UTF-8"'
READ_BY_BROWSERS: Final = frozenset(("/", "/live", "/live/", "/metrics"))
PAGE: Final = Path(__file__).parent / "static" / "page.html"
_STATUS = {"unknown_worker": 404, "bad_url": 400, "other_role": 409}


class Joining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /workers`."""

    url: str
    role: Role


class AdminApp:
    """ASGI application: checks the key and the size of the body, then calls FastAPI."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._app = _make_app(router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            answer = refused(error)
            answer.headers["connection"] = "close"
            if error.status == 401 and scope["path"] in READ_BY_BROWSERS:
                answer.headers["www-authenticate"] = BASIC
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = dict(scope["headers"])
        if scope["path"] in READ_BY_BROWSERS:
            if b"authorization" not in headers:  # a browser's first request has none: no failed attempt
                return RequestError(401, "The admin key is needed.", type_="authentication_error")
            password_as_bearer(headers)
        try:
            if scope["path"] != "/health":
                self._router.gate.authenticate_admin(headers, address_of(scope))
        except RequestError as error:
            return error
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return RequestError(413, f"A body has at most {MAX_BODY_BYTES} bytes, and says how many.")
        return None


def _make_app(router: Router) -> fastapi.FastAPI:
    app = fastapi.FastAPI(title="pdserve router, administration", version=__version__)
    add_error_handlers(app)

    async def on_fleet(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, FleetError)
        return refused(RequestError(_STATUS.get(error.code, 409), str(error), code=error.code))

    app.add_exception_handler(FleetError, on_fleet)
    _add_worker_routes(app, router)
    _add_weight_routes(app, Weights(router))
    pages = Pages(router)
    _add_live_page(app)

    @app.get("/tenants")
    async def tenants() -> dict[str, Any]:
        """Limits of tenants, their use since the router's start, and the bytes of their pages in the pool;
        those of tenants with one cache are of all of them.
        """
        totals, held = await asyncio.gather(_totals(router), pages.of_tenants())
        if totals is None:
            raise RequestError(503, "Not every process of the router says what tenants use; ask again.")
        return {
            "tenants": [
                {
                    "name": tenant.name,
                    "limits": {
                        name: getattr(tenant.limits, name)
                        for name in ("requests_s", "tokens_min", "concurrency", "weight")
                    },
                    "cache": tenant.cache,
                    "pool": held.get(tenant.cache),
                    **_use_of(tenant.name, totals),
                }
                for tenant in router.gate.tenants.all
            ]
        }

    @app.post("/pages/erase")
    async def erase(request: fastapi.Request) -> dict[str, Any]:
        """Erase the pages of a tenant, a session or a prompt, in all tiers and copies on all nodes."""
        return await pages.erase(await request.body())

    @app.post("/reload")
    async def reload() -> dict[str, Any]:
        """Read the API keys again."""
        try:
            router.reload_all()
        except ConfigError as error:
            message = f"Nothing was changed: {error}"
            raise RequestError(409, message, code="bad_configuration") from None
        return {"tenants": [tenant.name for tenant in router.gate.tenants.all]}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(exposition(await router.metrics()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process of the router runs."""
        return {"status": "ok", "version": __version__}

    return app


async def _totals(router: Router) -> Snapshot | None:
    """The metrics of all processes, added up. None if one of them does not answer in time."""
    try:
        totals = await router.metrics()
    except RequestError:
        return None
    return totals if totals.is_whole else None


def _use_of(tenant: str, totals: Snapshot) -> dict[str, Any]:
    """The tenant's requests now, and its use since the router's start."""
    return {
        "running": totals.value("tenant_running", tenant),
        "waiting": totals.value("tenant_waiting", tenant),
        "use": {
            "requests": totals.value("tenant_requests", tenant, "admitted"),
            "refused": totals.value("tenant_requests", tenant, "refused"),
            "prompt_tokens": totals.value("tenant_tokens", tenant, "prompt"),
            "output_tokens": totals.value("tenant_tokens", tenant, "output"),
        },
    }


def _add_worker_routes(app: fastapi.FastAPI, router: Router) -> None:
    fleet = router.fleet

    async def in_flight(worker: Worker) -> int | None:
        totals = await _totals(router)
        return None if totals is None else totals.value(IN_FLIGHT, worker.id, worker.role)

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """All workers. `in_flight` is null if a router process does not report its requests."""
        totals = await _totals(router)
        listed = [
            {
                **said,
                "in_flight": None if totals is None else totals.value(IN_FLIGHT, said["id"], said["role"]),
            }
            for said in router.readiness()["workers"]
        ]
        return {"workers": listed}

    @app.post("/workers", status_code=201)
    async def join(request: fastapi.Request) -> dict[str, Any]:
        """Add a worker. It is used as soon as a probe finds it ready and compatible."""
        try:
            joining = msgspec.json.decode(await request.body(), type=Joining)
        except UNREADABLE as error:
            raise RequestError(400, str(error)) from None
        return {"id": fleet.members.join(joining.url, joining.role).id}

    @app.delete("/workers/{worker_id}")
    async def leave(worker_id: str) -> dict[str, Any]:
        """Remove a worker. It finishes its requests."""
        worker = fleet.members.leave(worker_id)
        return {"id": worker.id, "in_flight": await in_flight(worker)}

    async def drain(worker_id: str, draining: bool) -> dict[str, Any]:
        worker = fleet.members.drain(worker_id, draining)
        return {"id": worker.id, "draining": worker.draining, "in_flight": await in_flight(worker)}

    @app.post("/workers/{worker_id}/drain")
    async def drain_worker(worker_id: str) -> dict[str, Any]:
        """Give a worker no new requests. It may be stopped when `in_flight` is 0; null: unknown."""
        return await drain(worker_id, True)

    @app.post("/workers/{worker_id}/undrain")
    async def undrain_worker(worker_id: str) -> dict[str, Any]:
        """Give a worker new requests again."""
        return await drain(worker_id, False)


def _add_weight_routes(app: fastapi.FastAPI, weights: Weights) -> None:
    @app.post("/models/{model:path}/update_weights_from_disk")
    async def update(model: str, request: fastapi.Request) -> dict[str, Any]:
        """New weights for all workers of a model. The body is SGLang's; `timeout_s` bounds the wait for
        running requests. Fails with 409 if nothing was changed, with 502 if a worker did not take them.
        """
        return await weights.update_from_disk(model, await request.body())


def _add_live_page(app: fastapi.FastAPI) -> None:
    page = PAGE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": f"default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; frame-ancestors 'none'",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @app.get("/", include_in_schema=False)
    @app.get("/live", include_in_schema=False)
    async def to_page() -> Response:
        return RedirectResponse("/live/")

    @app.get("/live/", include_in_schema=False)
    async def live_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def password_as_bearer(headers: dict[bytes, bytes]) -> None:
    """Replace a HTTP Basic `authorization` in `headers` by a bearer token: its password."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"basic":
        try:
            password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            password = b""
        headers[b"authorization"] = b"Bearer " + password
