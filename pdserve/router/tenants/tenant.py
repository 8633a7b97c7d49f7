"""Tenants: their limits, what they use, what they are told of it, and the registry of all. Pure: keys come
here as digests.

Rates. A token bucket admits a request if it holds the estimated use, or is full and the request is larger.
The estimate is charged at once, and the difference to the real use at the end of the request. So the level
can fall below zero, and the tenant waits until the debt is refilled. In any time t a tenant gets at most
`capacity + rate * t` tokens and one request more.

Headers tell a client how much of its rates is left:

    x-ratelimit-limit-requests: 20            anthropic-ratelimit-requests-limit: 20
    x-ratelimit-remaining-requests: 19        anthropic-ratelimit-requests-remaining: 19
    x-ratelimit-reset-requests: 50ms          anthropic-ratelimit-requests-reset: 2026-11-25T03:10:00Z

`tokens` likewise. Limit: what may be used at once when nothing was used for a while. Reset: when all of it is
there again. A tenant without limits gets none of them. Sources: https://platform.openai.com/docs/guides/rate-limits,
https://docs.anthropic.com/en/api/rate-limits
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from pdserve.errors import ConfigError
from pdserve.router.api.errors import ErrorForm, TooManyError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.security.tokens import same


class TokenBucket:
    """A bucket that holds at most `capacity` and gains `rate_s` per second."""

    __slots__ = ("at_s", "capacity", "level", "rate_s")

    def __init__(self, rate_s: float, capacity: float, now_s: float) -> None:
        self.rate_s = rate_s
        self.capacity = capacity
        self.level = capacity
        self.at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if `amount` exceeds its capacity."""
        self._refill(now_s)
        missing = min(amount, self.capacity) - self.level
        return missing / self.rate_s if missing > 1e-9 * self.capacity else 0.0

    def held(self, now_s: float) -> float:
        """What the bucket holds now. Negative: a debt."""
        self._refill(now_s)
        return self.level

    def charge(self, amount: float, now_s: float) -> None:
        """Take `amount`; the level may fall below zero. A negative amount is returned to the bucket."""
        self._refill(now_s)  # before the charge: a past overflow must not pay for later use
        self.level = min(self.capacity, self.level - amount)

    def resized(self, rate_s: float, capacity: float, now_s: float) -> None:
        """Change rate and capacity from now on. A debt stays."""
        self._refill(now_s)
        self.rate_s, self.capacity = rate_s, capacity
        self.level = min(self.level, capacity)

    def _refill(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.level = min(self.capacity, self.level + (now_s - self.at_s) * self.rate_s)
            self.at_s = now_s


RATE_EXCEEDED = "rate_limit_exceeded"


class Use(msgspec.Struct):
    """A tenant's use since this router process started."""

    requests: int = 0
    """Requests let in."""
    refused: int = 0
    """Requests answered 429."""
    prompt_tokens: int = 0
    output_tokens: int = 0


class TenantState:
    """A tenant as the router knows it."""

    __slots__ = (
        "cache", "charged_requests", "charged_tokens", "granted", "has_rates", "kept", "kept_elsewhere",
        "limits", "mark", "name", "requests", "running", "share", "tokens", "use", "waiting",
    )  # fmt: skip
    limits: TenantLimits
    cache: str
    """Its cache namespace."""

    def __init__(self, name: str, limits: TenantLimits, now_s: float, granted: int | None = None) -> None:
        self.name = name
        self.mark = f"{name}:".encode("ascii")
        """Before the ids of its requests at the workers: two tenants may use one id."""
        self.running = 0
        """Requests let in and not over. The fair queue counts them."""
        self.waiting = 0
        """Requests in the queue. The fair queue counts them."""
        self.granted = granted
        """The most requests that it may run in this process (`sharing.gossip`). None: its concurrency."""
        self.share = 1.0
        """Of its rates, for the processes that hear each other (`sharing.gossip`)."""
        self.charged_requests = 0.0
        self.charged_tokens = 0.0
        """Charged in this process since its start."""
        self.kept: dict[str, tuple[int, float]] = {}
        """Conversation → (tokens, until when): what is kept in the pool, by this process (`retained`)."""
        self.kept_elsewhere = 0
        """Tokens that other processes have kept for it (`sharing.gossip`)."""
        self.use = Use()
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_limits(limits, now_s)

    @property
    def is_free(self) -> bool:
        """The tenant's concurrency allows one more request."""
        most = self.limits.concurrency
        if not most:
            return True
        return self.running < (most if self.granted is None else min(self.granted, most))

    def kept_tokens(self, now_s: float) -> int:
        """Those that this process has kept for it."""
        return sum(tokens for tokens, until_s in self.kept.values() if until_s > now_s)

    def set_limits(self, limits: TenantLimits, now_s: float) -> None:
        """Change the limits from now on. Past use still counts."""
        self.limits, self.cache = limits, limits.cache or self.name
        rate_s, tokens_min = limits.requests_s * self.share, limits.tokens_min * self.share
        self.requests = _bucket(self.requests, rate_s, max(1.0, rate_s), now_s)
        self.tokens = _bucket(self.tokens, tokens_min / 60, tokens_min, now_s)
        self.has_rates = self.requests is not None or self.tokens is not None

    def set_share(self, share: float, now_s: float) -> None:
        """Hold this share of the rates from now on, above 0 and at most 1."""
        if share != self.share:
            self.share = share
            self.set_limits(self.limits, now_s)

    def take(self, tokens: int, now_s: float, requests: int = 1) -> None:
        """Charge a request of `tokens` (an estimate), which counts as `requests`. Raises TooManyError, and
        charges nothing then.
        """
        if self.requests is not None and (wait_s := self.requests.wait_s(requests, now_s)):
            self.use.refused += 1
            limit = f"{self.limits.requests_s:g} requests per second"
            raise TooManyError(f"You may send {limit}.", wait_s, RATE_EXCEEDED)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(tokens, now_s)):
            self.use.refused += 1
            limit = f"{self.limits.tokens_min:,} tokens per minute"
            raise TooManyError(f"You may use {limit}.", wait_s, RATE_EXCEEDED)
        if self.requests is not None:
            self.requests.charge(requests, now_s)
            self.charged_requests += requests
        if self.tokens is not None:
            self.tokens.charge(tokens, now_s)
            self.charged_tokens += tokens

    def settle(self, charged_tokens: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Correct the charge of a finished request from `charged_tokens` to its real use."""
        self.use.prompt_tokens += prompt_tokens
        self.use.output_tokens += output_tokens
        if self.tokens is not None:
            self.tokens.charge(prompt_tokens + output_tokens - charged_tokens, now_s)
            self.charged_tokens += prompt_tokens + output_tokens - charged_tokens

    def charge_elsewhere(self, requests: float, tokens: float, now_s: float) -> None:
        """Charge what other processes have charged."""
        if self.requests is not None:
            self.requests.charge(requests, now_s)
        if self.tokens is not None:
            self.tokens.charge(tokens, now_s)


def _bucket(old: TokenBucket | None, rate_s: float, capacity: float, now_s: float) -> TokenBucket | None:
    if not rate_s:
        return None
    if old is None:
        return TokenBucket(rate_s, capacity, now_s)
    old.resized(rate_s, capacity, now_s)
    return old


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


ANONYMOUS = "anonymous"
"""The one tenant of a router without keys."""
_PREFIX_CHARS = 16


class Tenants:
    """All tenants, found by the digest of a key."""

    anonymous: TenantState
    """The tenant of a router without keys."""

    def __init__(self) -> None:
        self._by_name: dict[str, TenantState] = {}
        self._known: dict[str, TenantState] = {}
        """Also tenants whose keys were removed: their requests may still run, and a key may come back."""
        self.by_prefix: dict[str, list[tuple[str, TenantState]]] = {}
        """The keys, by how their digests begin. Another dictionary whenever they were read."""
        self.has_keys = False
        self._granted: int | None = None

    @property
    def granted(self) -> int | None:
        """Share of its concurrency that a tenant may use in this process. Setting it changes all tenants."""
        return self._granted

    @granted.setter
    def granted(self, granted: int | None) -> None:
        self._granted = granted
        for state in self.known:
            state.granted = granted

    def configure(
        self,
        keys: Mapping[str, str],
        tenants: Iterable[Tenant],
        defaults: TenantLimits,
        now_s: float,
    ) -> None:
        """Take over keys (digest -> tenant) and limits. The use of known tenants stays. Raises ConfigError,
        and then changes nothing.
        """
        limits: dict[str, TenantLimits] = {}
        for tenant in tenants:
            if tenant.name in limits:
                raise ConfigError(f"tenant {tenant.name} is listed twice in [[tenants]]")
            limits[tenant.name] = tenant
        names = list(dict.fromkeys(keys.values())) or [ANONYMOUS]
        if keys and (keyless := [name for name in limits if name not in names]):
            raise ConfigError(
                f"tenant {keyless[0]} of [[tenants]] has no API key: add one to the keys, or drop it"
            )
        states = {}
        for name in names:
            state = self._known.get(name)
            if state is None:
                state = self._known[name] = TenantState(name, limits.get(name, defaults), now_s, self.granted)
            else:
                state.set_limits(limits.get(name, defaults), now_s)
            states[name] = state
        self._by_name = states
        self.by_prefix = {}
        for key, name in keys.items():
            self.by_prefix.setdefault(key[:_PREFIX_CHARS], []).append((key, states[name]))
        self.has_keys = bool(keys)
        if not keys:
            self.anonymous = states[ANONYMOUS]

    @property
    def all(self) -> tuple[TenantState, ...]:
        """Tenants that have a key, in the order of the keys."""
        return tuple(self._by_name.values())

    @property
    def known(self) -> tuple[TenantState, ...]:
        """All tenants, also those whose keys were removed."""
        return tuple(self._known.values())

    def get(self, name: str) -> TenantState | None:
        """The tenant of this name. None: there is none."""
        return self._known.get(name)

    def find(self, key_digest: str) -> TenantState | None:
        """The tenant whose key has this digest, or None. A client cannot steer the digest that is looked up,
        and the whole digest is compared in constant time.
        """
        for known, tenant in self.by_prefix.get(key_digest[:_PREFIX_CHARS], ()):
            if same(key_digest, known):
                return tenant
        return None
