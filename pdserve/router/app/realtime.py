"""`/v1/realtime`: OpenAI's WebSocket for speech, from client to worker.

The router reads the head alone. Whose connection it is, which worker gets it, and how many a tenant may have
are decided as for requests. Once the worker has said 101, bytes are passed on both ways. Only the heads of
frames are looked at, to count messages.

- The query's `model` names the model. The worker gets a head of the router's own: no key, no query, no
  compression, no subprotocol. So what tenants are charged is what they send.
- A client's bytes are charged as sound (`BYTES_PER_TOKEN`). Where its tokens have a rate, it is read no
  faster.
- A page of another origin needs `access.cors_origins`, also without API keys: CORS does not cover WebSockets.
- Limits: `deadlines.connect_s` and `first_byte_s` for the worker, `client_read_s` for an end that takes
  nothing, `total_s` for all.

SGLang (0.5.23) serves it for models that hear, where its environment has the package `websockets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import msgspec

from pdserve.errors import RequestError
from pdserve.logs import served_request
from pdserve.router.admission.gate import Gate
from pdserve.router.api.endpoints import AUDIO_BYTES_PER_TOKEN
from pdserve.router.api.errors import NoWorkerError, TooManyError, error_headers, error_of
from pdserve.router.app.realtime_session import ROUTE, EndedBy, Session, Side
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.job import Claim
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.answer import JSON
from pdserve.router.request.call import request_id
from pdserve.router.server.cors import Cors
from pdserve.router.server.upgrade import PIECE_BYTES, Upgraded
from pdserve.router.tenants.cache_salt import salt_line
from pdserve.router.tenants.tenant import RATE_EXCEEDED, TenantState
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.response import UpstreamError

logger = logging.getLogger(__name__)

PATH: Final = ROUTE.encode("ascii")
BYTES_PER_TOKEN: Final = AUDIO_BYTES_PER_TOKEN * 4 // 3
"""Sound is sent in base64."""
MAX_SESSIONS: Final = 1000
"""Of one process of the router."""
MAX_TRIED: Final = 3
PAUSE_S: Final = 1.0
"""Longest sleep before a tenant's rate is looked at again."""
_PASSED_ON: Final = (b"sec-websocket-key", b"sec-websocket-version")
_SWITCHED: Final = b"HTTP/1.1 101 "


class Realtime:
    """See `server.upgrade.UpgradeHandler`."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, gate: Gate, upstream: Upstream, stats: Stats
    ) -> None:
        self._cors = Cors(config.access.cors_origins)
        self._deadlines = config.deadlines
        self._fleet = fleet
        self._gate = gate
        self._upstream = upstream
        self._stats = stats
        self._logs_access = config.access_log
        self._loop = asyncio.get_running_loop()
        self._sessions = 0

    def takes(self, target: bytes) -> bool:
        """Only `/v1/realtime`."""
        return target.partition(b"?")[0] == PATH

    async def serve(self, client: Upgraded) -> None:
        """One connection, until one end leaves."""
        headers = dict(client.headers)
        served_request.set(request_id(headers.get(b"x-request-id", b"")))
        session = Session(self._stats, self._loop.time())
        try:
            await self._serve(client, headers, session)
        except RequestError as error:
            session.status = error.status
            client.writer.write(_answer(error))
        except TimeoutError:
            session.ended_by = session.ended_by or "deadline"
        except OSError as error:
            logger.debug("a realtime session ended: %s", error)
        except Exception:  # the boundary of a session: a bug in the router ends this one alone
            logger.exception("a realtime session failed inside the router")
        finally:
            session.end(self._loop.time())
            if self._logs_access:
                session.log(self._loop.time())
            await self._end(client.writer)

    async def _serve(self, client: Upgraded, headers: dict[bytes, bytes], session: Session) -> None:
        tenant = self._gate.authenticate(headers, client.address)
        session.tenant = tenant.name
        self._check_origin(headers)
        if headers.get(b"upgrade", b"").lower() != b"websocket":
            raise RequestError(400, "Only WebSockets are served here.")
        query = parse_qs(client.target.partition(b"?")[2].decode("latin-1"), max_num_fields=16)
        session.model = model = self._gate.served_model(query.get("model", [None])[0])
        lines = self._lines(headers, tenant, model)
        with self._turn(tenant):
            async with asyncio.timeout(self._deadlines.total_s), self._opened(model, lines) as upstream:
                worker, reader, writer, head = upstream
                session.open(worker.id_header, self._loop.time())
                client.writer.write(head)
                ended_by = await self._relay(client, reader, writer, tenant, session)
                session.ended_by = session.ended_by or ended_by

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        origin = headers.get(b"origin", b"")
        is_own = origin.partition(b"://")[2] == headers.get(b"host")
        if origin and not is_own and not self._cors.headers(headers):
            raise RequestError(403, "Pages of this origin are not let in.", type_="permission_error")

    def _lines(self, headers: Mapping[bytes, bytes], tenant: TenantState, model: str) -> bytes:
        """The head for the worker. Raises NoWorkerError where tenants cannot be kept apart."""
        lines = b"connection: Upgrade\r\nupgrade: websocket\r\n"
        lines += b"".join(b"%b: %b\r\n" % (name, headers[name]) for name in _PASSED_ON if name in headers)
        if not self._gate.tenants.has_keys:
            return lines
        if not self._fleet.takes_salt_header(model):
            raise NoWorkerError("Some workers cannot keep tenants apart here yet; try again later.")
        return lines + salt_line(msgspec.Raw(), tenant.cache)

    @contextlib.contextmanager
    def _turn(self, tenant: TenantState) -> Iterator[None]:
        """Count the session while it lasts. Raises TooManyError."""
        if not tenant.is_free or self._sessions >= MAX_SESSIONS:
            raise TooManyError("There are too many sessions.", 1.0, RATE_EXCEEDED)
        tenant.take(0, self._loop.time())
        tenant.use.requests += 1
        tenant.running += 1
        self._sessions += 1
        try:
            yield
        finally:
            self._sessions -= 1
            tenant.running -= 1
            self._gate.fill()

    @contextlib.asynccontextmanager
    async def _opened(
        self, model: str, lines: bytes
    ) -> AsyncIterator[tuple[Worker, asyncio.StreamReader, asyncio.StreamWriter, bytes]]:
        """A worker, its connection, a WebSocket now, and the head that says so. Raises RequestError."""
        snapshot = self._fleet.snapshot(model, self._loop.time())
        workers = sorted((*snapshot.decode, *snapshot.direct_decode), key=lambda worker: worker.load)
        error: RequestError = NoWorkerError("No worker is ready to serve this model; try again shortly.")
        for worker in workers[:MAX_TRIED]:
            claim = Claim(self._fleet, worker, self._loop.time())
            try:
                try:
                    reader, writer = await self._upstream.open_stream(
                        worker, PATH, lines, self._deadlines.connect_s
                    )
                except UpstreamError as problem:
                    error = RequestError(502, f"No worker could be reached ({problem.kind}).")
                    continue
                try:
                    yield worker, reader, writer, await self._switched(reader, worker)
                    return
                finally:
                    await self._end(writer)
            finally:
                claim.release()
        raise error

    async def _switched(self, reader: asyncio.StreamReader, worker: Worker) -> bytes:
        """The worker's head. Raises RequestError unless it says 101: nothing else may follow an HTTP answer
        on its connection.
        """
        try:
            async with asyncio.timeout(self._deadlines.first_byte_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise RequestError(502, "The worker gave no answer.", type_="server_error") from None
        if not head.startswith(_SWITCHED):
            logger.warning("worker %s takes no WebSocket at %s: %r", worker.id, PATH.decode(), head[:40])
            raise RequestError(502, "The worker takes no WebSocket here.", type_="server_error")
        return head

    async def _relay(
        self,
        client: Upgraded,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tenant: TenantState,
        session: Session,
    ) -> EndedBy:
        """Until one end leaves; says who. The other one then gets what was sent to it, and its end."""
        up = asyncio.create_task(self._copy(client.reader, writer, session, "client", tenant))
        down = asyncio.create_task(self._copy(reader, client.writer, session, "worker"))
        try:
            done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            return (down if down in done else up).result()
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: Session,
        sender: Side,
        tenant: TenantState | None = None,
    ) -> EndedBy:
        """Until `reader` ends, or `writer` takes nothing for its time. `sender`: whose bytes these are.
        `tenant`: who pays. Returns who ended it.
        """
        owed_bytes = 0
        while piece := await _read(reader):
            if tenant is not None:
                tokens, owed_bytes = divmod(owed_bytes + len(piece), BYTES_PER_TOKEN)
                tenant.settle(0, tokens, 0, self._loop.time())
                session.tokens += tokens
                await self._allowed(tenant, reader)
            session.pass_on(piece, sender)
            writer.write(piece)
            try:
                async with asyncio.timeout(self._deadlines.client_read_s):
                    await writer.drain()
            except TimeoutError:
                return "slow"
            except OSError:
                return "worker" if sender == "client" else "client"
        return sender

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        """Close after what was written was sent, or cut off an end that does not take it."""
        writer.close()
        try:
            async with asyncio.timeout(self._deadlines.client_read_s):
                await writer.wait_closed()
        except (OSError, TimeoutError):
            writer.transport.abort()

    async def _allowed(self, tenant: TenantState, client: asyncio.StreamReader) -> None:
        """Until the tenant has no debt, or the client has left: then nothing keeps its worker and its turn. A
        worker's time has no bound, so the client waits unread.
        """
        while (left_s := _debt_s(tenant, self._loop.time())) > 0 and not client.at_eof():  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, PAUSE_S))  # its limits may change, too


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What comes next; nothing where the other end has closed the connection, or has broken it off."""
    try:
        return await reader.read(PIECE_BYTES)
    except OSError:
        return b""


def _debt_s(tenant: TenantState, now_s: float) -> float:
    """Seconds until the tenant has paid what it has used."""
    return 0.0 if tenant.tokens is None else tenant.tokens.wait_s(0, now_s)


def _answer(error: RequestError) -> bytes:
    """A whole answer in HTTP, the last one on its connection."""
    body = error_of(error)
    headers = [
        (b"content-type", JSON),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *error_headers(error),
    ]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    reason = HTTPStatus(error.status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status, reason, lines, body)
