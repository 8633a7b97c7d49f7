"""Tenants: whose key is it, what may they use, what have they used. Pure; keys come here as digests.

Rates are token buckets. A request is let in when the bucket holds what it is estimated to use (or is full,
for one larger than the bucket), is charged that at once, and the difference to what it really used when it
ends. So a bucket may go below zero by what running requests turn out to use, and the tenant waits until that
is paid back: over any time t a tenant is let in for at most `capacity + rate * t` tokens and one request, and
every token used is paid for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from pdserve.errors import ConfigError, RequestError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.tokens import same

ANONYMOUS = "anonymous"
"""The one tenant of a router without keys."""
RATE_EXCEEDED = "rate_limit_exceeded"
_PREFIX_CHARS = 16


class Bucket:
    """`capacity` at most, refilled by `rate_s` a second."""

    __slots__ = ("at_s", "capacity", "level", "rate_s")

    def __init__(self, rate_s: float, capacity: float, now_s: float) -> None:
        self.rate_s = rate_s
        self.capacity = capacity
        self.level = capacity
        self.at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` (at most the capacity counts) is there; 0: it is."""
        self._refill(now_s)
        missing = min(amount, self.capacity) - self.level
        return missing / self.rate_s if missing > 1e-9 * self.capacity else 0.0

    def charge(self, amount: float, now_s: float) -> None:
        """Take `amount`, below zero if need be; a negative one gives back."""
        self._refill(now_s)  # first: what overflowed until now pays for nothing later
        self.level = min(self.capacity, self.level - amount)

    def resized(self, rate_s: float, capacity: float, now_s: float) -> None:
        """Another rate from now on; a debt stays."""
        self._refill(now_s)
        self.rate_s, self.capacity = rate_s, capacity
        self.level = min(self.level, capacity)

    def _refill(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.level = min(self.capacity, self.level + (now_s - self.at_s) * self.rate_s)
            self.at_s = now_s


class Use(msgspec.Struct):
    """What a tenant has used since this router process started."""

    requests: int = 0
    """Those let in."""
    refused: int = 0
    """Answered 429."""
    prompt_tokens: int = 0
    output_tokens: int = 0


class TenantState:
    """A tenant as the router knows it."""

    __slots__ = (
        "grant_number",
        "granted",
        "limits",
        "name",
        "requests",
        "running",
        "spent_requests",
        "spent_tokens",
        "tokens",
        "use",
        "waiting",
    )

    def __init__(self, name: str, limits: TenantLimits, now_s: float, granted: int | None = None) -> None:
        self.name = name
        self.limits = limits
        self.running = 0
        """Requests let in and not over; kept by `Admission`."""
        self.waiting = 0
        """Requests in the queue; kept by `Admission`."""
        self.granted = granted
        """How much of its concurrency this process may use, if there are several; see `shares`."""
        self.grant_number = 0
        self.spent_requests = 0.0
        self.spent_tokens = 0.0
        """Charged to its buckets, and not told to other processes yet."""
        self.use = Use()
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.set_limits(limits, now_s)

    @property
    def cache(self) -> str:
        """The tenant's cache namespace."""
        return self.limits.cache or self.name

    @property
    def is_free(self) -> bool:
        """It may run one more request."""
        most = self.limits.concurrency
        if not most:
            return True
        return self.running < (most if self.granted is None else min(self.granted, most))

    def set_limits(self, limits: TenantLimits, now_s: float) -> None:
        """Other limits from now on; what was used stays used."""
        self.limits = limits
        self.requests = _bucket(self.requests, limits.requests_s, max(1.0, limits.requests_s), now_s)
        self.tokens = _bucket(self.tokens, limits.tokens_min / 60, float(limits.tokens_min), now_s)

    def take(self, tokens: int, now_s: float) -> None:
        """Charge a request of `tokens` (an estimate). Raises TooManyError, and charges nothing then."""
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            self.use.refused += 1
            limit = f"{self.limits.requests_s:g} requests per second"
            raise TooManyError(f"You may send {limit}.", wait_s, RATE_EXCEEDED)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(tokens, now_s)):
            self.use.refused += 1
            limit = f"{self.limits.tokens_min:,} tokens per minute"
            raise TooManyError(f"You may use {limit}.", wait_s, RATE_EXCEEDED)
        if self.requests is not None:
            self.requests.charge(1, now_s)
            self.spent_requests += 1
        if self.tokens is not None:
            self.tokens.charge(tokens, now_s)
            self.spent_tokens += tokens

    def settle(self, charged_tokens: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request that was charged by `take` is over and used so much."""
        self.use.prompt_tokens += prompt_tokens
        self.use.output_tokens += output_tokens
        if self.tokens is not None:
            self.tokens.charge(prompt_tokens + output_tokens - charged_tokens, now_s)
            self.spent_tokens += prompt_tokens + output_tokens - charged_tokens

    def charge_elsewhere(self, requests: float, tokens: float, now_s: float) -> None:
        """Other processes have charged this."""
        if self.requests is not None:
            self.requests.charge(requests, now_s)
        if self.tokens is not None:
            self.tokens.charge(tokens, now_s)


def _bucket(old: Bucket | None, rate_s: float, capacity: float, now_s: float) -> Bucket | None:
    if not rate_s:
        return None
    if old is None:
        return Bucket(rate_s, capacity, now_s)
    old.resized(rate_s, capacity, now_s)
    return old


class TooManyError(RequestError):
    """429 with `Retry-After`."""

    def __init__(self, message: str, wait_s: float, code: str) -> None:
        retry_after_s = max(1, math.ceil(wait_s))
        super().__init__(
            429,
            f"{message} Try again in {retry_after_s} s.",
            type_="rate_limit_error",
            code=code,
            retry_after_s=retry_after_s,
        )


class Tenants:
    """All tenants, found by the digest of a key."""

    def __init__(self) -> None:
        self._by_name: dict[str, TenantState] = {}
        self._known: dict[str, TenantState] = {}
        """Those, too, that have no key any more: their requests may still run, and they may come back."""
        self._by_prefix: dict[str, list[tuple[str, TenantState]]] = {}
        self.has_keys = False
        self._granted: int | None = None

    @property
    def granted(self) -> int | None:
        """What new tenants may use of their concurrency here; setting it sets that of all."""
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
        """Take over keys (digest -> tenant) and limits; what known tenants have used stays. Raises
        ConfigError, and changes nothing then.
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
        self._by_prefix = {}
        for key, name in keys.items():
            self._by_prefix.setdefault(key[:_PREFIX_CHARS], []).append((key, states[name]))
        self.has_keys = bool(keys)

    @property
    def all(self) -> tuple[TenantState, ...]:
        """In the order of the keys."""
        return tuple(self._by_name.values())

    @property
    def known(self) -> tuple[TenantState, ...]:
        """And those that had a key before."""
        return tuple(self._known.values())

    def get(self, name: str) -> TenantState | None:
        """The tenant of this name, of those known."""
        return self._known.get(name)

    @property
    def anonymous(self) -> TenantState:
        """The tenant of a router without keys."""
        return self._by_name[ANONYMOUS]

    def find(self, key_digest: str) -> TenantState | None:
        """Whose key has this digest; None: nobody's. What is looked up is a digest that nobody can steer, and
        the last word is a comparison in constant time.
        """
        for known, tenant in self._by_prefix.get(key_digest[:_PREFIX_CHARS], ()):
            if same(key_digest, known):
                return tenant
        return None
