"""Pages of other origins that may ask this router (CORS). Pure.

A browser lets a page read the answer of another origin only if the answer says so. Before a request with a
key it asks first (`OPTIONS`, the preflight), without the key. The router says yes for the origins in
`access.cors_origins` and stays silent for all others. Source: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from pdserve.router.http.client_request import Headers

_SHOWN: Final = (
    *("retry-after", "server-timing", "x-request-id", "x-pdserve-plan", "x-pdserve-cached"),
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)
"""Headers of answers that a page may read, beside those that it always may."""
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
MAX_AGE_S: Final = 600


class Cors:
    """The origins that are let in."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as browsers write them, `https://app.example.com`; `*`: all."""
        self._origins = frozenset(origin.rstrip("/").encode("ascii", "replace") for origin in origins)
        self._shown = ", ".join(_SHOWN).encode()

    def headers(self, request: Mapping[bytes, bytes]) -> Headers:
        """For the answer to a request with these headers. Empty: no origin, or one that is not let in."""
        origin = request.get(b"origin", b"")
        if not origin or not (origin in self._origins or b"*" in self._origins):
            return []
        return [
            (b"access-control-allow-origin", b"*" if b"*" in self._origins else origin),
            (b"access-control-expose-headers", self._shown),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, request: Mapping[bytes, bytes]) -> Headers | None:
        """The headers of the answer to a preflight (status 200, no body). None: the request is none, or its
        origin is not let in.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in request:
            return None
        headers = self.headers(request)
        if not headers:
            return None
        wanted = request.get(b"access-control-request-headers", b"")
        if _NAMES.fullmatch(wanted):
            headers.append((b"access-control-allow-headers", wanted))
        headers.append((b"access-control-allow-methods", b"GET, POST"))
        headers.append((b"access-control-max-age", b"%d" % MAX_AGE_S))
        return headers
