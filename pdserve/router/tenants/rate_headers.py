"""Headers that tell a client how much of its rates is left. Pure.

    x-ratelimit-limit-requests: 20            anthropic-ratelimit-requests-limit: 20
    x-ratelimit-remaining-requests: 19        anthropic-ratelimit-requests-remaining: 19
    x-ratelimit-reset-requests: 50ms          anthropic-ratelimit-requests-reset: 2026-11-25T03:10:00Z

`tokens` likewise. Limit: what may be used at once when nothing was used for a while. Reset: when all of it is
there again. A tenant without limits gets none of them. Sources: https://platform.openai.com/docs/guides/rate-limits,
https://docs.anthropic.com/en/api/rate-limits
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

from pdserve.router.api.errors import ErrorForm
from pdserve.router.tenants.tenant import TenantState
from pdserve.router.tenants.token_bucket import TokenBucket

MAX_RESET_S = 7 * 24 * 3600.0


def rate_headers(
    tenant: TenantState, form: ErrorForm, now_s: float, unix_s: float
) -> list[tuple[bytes, bytes]]:
    """The headers of an answer to the tenant. `now_s`: on the buckets' clock; `unix_s`: the same moment."""
    headers: list[tuple[bytes, bytes]] = []
    for kind, bucket in ((b"requests", tenant.requests), (b"tokens", tenant.tokens)):
        if bucket is not None:
            headers += _openais(kind, bucket, now_s)
            if form == "anthropic":
                headers += _anthropics(kind, bucket, now_s, unix_s)
    return headers


def _openais(kind: bytes, bucket: TokenBucket, now_s: float) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-%b" % kind, b"%d" % bucket.capacity),
        (b"x-ratelimit-remaining-%b" % kind, b"%d" % _left(bucket, now_s)),
        (b"x-ratelimit-reset-%b" % kind, duration(_reset_s(bucket, now_s)).encode()),
    ]


def _anthropics(kind: bytes, bucket: TokenBucket, now_s: float, unix_s: float) -> list[tuple[bytes, bytes]]:
    full = datetime.fromtimestamp(math.ceil(unix_s + _reset_s(bucket, now_s)), UTC)
    return [
        (b"anthropic-ratelimit-%b-limit" % kind, b"%d" % bucket.capacity),
        (b"anthropic-ratelimit-%b-remaining" % kind, b"%d" % _left(bucket, now_s)),
        (b"anthropic-ratelimit-%b-reset" % kind, full.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
    ]


def _left(bucket: TokenBucket, now_s: float) -> int:
    return max(0, math.floor(bucket.held(now_s)))


def _reset_s(bucket: TokenBucket, now_s: float) -> float:
    return min(MAX_RESET_S, bucket.wait_s(bucket.capacity, now_s))


def duration(seconds: float) -> str:
    """A length of time as OpenAI writes it: `50ms`, `1.5s`, `6m0s`, `1h2m3s`. Rounded up."""
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1e3:g}s"
    whole = math.ceil(milliseconds / 1e3)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
