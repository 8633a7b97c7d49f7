"""Questions to the parts of a cluster over HTTP. Whoever answers may be hostile, and gets no more than this:

| an answer that                | becomes                                                           |
|-------------------------------|-------------------------------------------------------------------|
| is slow, or has no end        | TooLate, once the time for all of it is over                      |
| is longer than MAX_BODY_BYTES | NoAnswer                                                          |
| is compressed                 | NoAnswer: a few bytes of it could become many                     |
| names another place (3xx)     | an answer of that status: following it could carry a secret there |
| is no HTTP                    | NoAnswer                                                          |
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import httpx
import msgspec

from pdserve.errors import PdserveError

T = TypeVar("T")

MAX_BODY_BYTES: Final = 16 << 20  # a worker's metrics, and SGLang's arguments, are below 1 MiB
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NoAnswer(PdserveError):
    """Nothing came that can be used. The text says why."""


class TooLate(NoAnswer):
    """The whole answer did not come in time."""


class Answer(msgspec.Struct, frozen=True):
    """Of whatever status."""

    path: str
    status: int
    headers: httpx.Headers
    body: bytes

    def decoded(self, type_: type[T]) -> T:
        """The JSON of the body. Raises NoAnswer."""
        try:
            return msgspec.json.decode(self.body, type=type_)
        except UNREADABLE as error:
            raise NoAnswer(f"{self.path}: {error}") from None


class Asker:
    """Asks. Threads may share it; they must run no event loop."""

    def __init__(self, secret: str, trust: ssl.SSLContext | None = None, *, asks_all: bool = True) -> None:
        """A secret is sent only to whom we trust: `trust`, else the system's authorities. Without a secret,
        everybody is asked if `asks_all`.
        """
        self.has_secret = bool(secret)
        self._headers = {"accept-encoding": "identity"}
        if secret:
            self._headers["authorization"] = f"Bearer {secret}"
        needs_trust = self.has_secret or not asks_all
        self._tls = trust if needs_trust and trust else httpx.create_ssl_context(verify=needs_trust)

    def get(self, url: str, total_s: float) -> Answer:
        """The answer. Raises NoAnswer."""
        return asyncio.run(self._ask("GET", url, total_s, {}, None))

    def post(self, url: str, body: Any, headers: Mapping[str, str], total_s: float) -> Answer:
        """The answer to `body`, sent as JSON. Raises NoAnswer."""
        return asyncio.run(self._ask("POST", url, total_s, headers, body))

    async def _ask(
        self, method: str, url: str, total_s: float, headers: Mapping[str, str], body: Any
    ) -> Answer:
        try:
            async with (
                asyncio.timeout(total_s),
                httpx.AsyncClient(
                    headers=self._headers, timeout=None, trust_env=False, verify=self._tls
                ) as client,
                client.stream(method, url, headers=dict(headers), json=body) as response,
            ):
                whole = await _body(response)
                return Answer(response.url.path, response.status_code, response.headers, whole)
        except TimeoutError:
            raise TooLate(f"{url}: no whole answer within {total_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoAnswer(f"{error}" or type(error).__name__) from None


async def _body(response: httpx.Response) -> bytes:
    """Raises NoAnswer."""
    where = response.url.path
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NoAnswer(f"{where}: the answer is compressed, which nobody asked for")
    whole = bytearray()
    async for piece in response.aiter_raw():
        whole += piece
        if len(whole) > MAX_BODY_BYTES:
            raise NoAnswer(f"{where}: the answer is longer than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(whole)
