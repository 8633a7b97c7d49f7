"""Request bodies: read within bounds, decoded, counted, and the rest of those that are refused."""

from __future__ import annotations

import contextlib
from typing import Final

from pdserve.errors import RequestError
from pdserve.router.api.content_coding import CodedBody
from pdserve.router.api.errors import error_headers, error_of
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import LARGEST_BODY_BYTES, SMALLEST_BODY_BYTES
from pdserve.router.http.driven import in_task, pass_on
from pdserve.router.request.request import Request

BODY_BYTES_S: Final = 4096
"""A body that comes at this rate and faster is not too slow."""
DECODED_AT_ONCE_BYTES: Final = 256 * 1024
DRAIN_S: Final = 5.0
"""How long the rest of a refused body is read, so that the client, still sending, gets to see the answer."""


class Bodies:
    """Those of all requests in progress."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._fleet = fleet
        self._limits = config.limits
        self._total_s = config.deadlines.total_s
        self.limit_s = min(config.deadlines.body_s, self._total_s)
        """For the body of a request."""
        self.limit_bytes = config.limits.held_body_bytes
        self.at_once_bytes = min(SMALLEST_BODY_BYTES, config.limits.body_bytes or SMALLEST_BODY_BYTES)
        """A body that is no longer is within every bound of one."""
        self.held_bytes = 0
        """Of all requests in progress; each gives back its own in the end."""

    def release(self, request: Request) -> None:
        """The request is over, or its body is not needed."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    async def read(self, request: Request) -> bytes | None:
        """The request's body, None if the client left before its end. Raises RequestError 413, or 503
        where the bodies of all requests together are too much.
        """
        limit = self._limits.body_bytes or self._fleet.body_limit_bytes
        length = request.fields.get(b"content-length", b"0")
        if length.isdigit() and int(length.lstrip(b"0")[:20] or b"0") > limit:  # int() has a bound
            raise _too_large(limit)
        coded = None
        if b"content-encoding" in request.fields:
            coded = CodedBody((said for name, said in request.headers if name == b"content-encoding"), limit)
        parts: list[bytes] = []
        size = 0
        while (piece := await request.read()) is not None:
            part, more = piece
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if coded is not None:
                await self._decode(request, coded, part, parts)
                if not more:
                    coded.end()
            else:
                self._hold(request, len(part))
                if not more and not parts:
                    return part
                parts.append(part)
            if not more:
                return b"".join(parts)
            request.total_s = request.started_s + min(self._total_s, self.limit_s + size / BODY_BYTES_S)
        return None

    async def _decode(self, request: Request, coded: CodedBody, data: bytes, parts: list[bytes]) -> None:
        """Add what `data` stands for to `parts`. Others have their turns meanwhile: it may be a thousand
        times as long. Raises RequestError.
        """
        unyielded = 0
        for decoded in coded.feed(data):
            self._hold(request, len(decoded))
            parts.append(decoded)
            unyielded += len(decoded)
            if unyielded >= DECODED_AT_ONCE_BYTES:
                unyielded = 0
                await pass_on()

    def _hold(self, request: Request, size: int) -> None:
        """Count bytes of a body that are held. Raises RequestError (503) where all together are too many."""
        request.held_bytes += size
        self.held_bytes += size
        if self.held_bytes > self.limit_bytes:
            raise RequestError(503, "The router holds too many large requests.", code="router_busy")

    async def refuse(self, request: Request, error: RequestError) -> None:
        """Answer while the client still sends: take in, bounded, what it sends until it reads, then close."""
        body = error_of(error, request.endpoint.errors)
        lines = b"content-type: application/json\r\n"
        for pair in error_headers(error):
            lines += b"%b: %b\r\n" % pair
        self.release(request)
        request.answer(error.status, lines, len(body), closes=True)
        await request.pass_on(body, more=True)
        if request.more_body:
            with contextlib.suppress(TimeoutError):
                await in_task(_drain(request, self._limits.body_bytes or LARGEST_BODY_BYTES), DRAIN_S)
        await request.pass_on(b"", more=False)


async def _drain(request: Request, left_bytes: int) -> None:
    while left_bytes > 0 and (piece := await request.read()) is not None:
        part, more = piece
        left_bytes = left_bytes - len(part) if more else 0


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(413, f"The request body is larger than {limit_bytes} bytes.", code="body_too_large")
