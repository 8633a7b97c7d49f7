"""One tenant: its limits and its use. Pure."""

from __future__ import annotations

import msgspec

from pdserve.router.api.errors import TooManyError
from pdserve.router.config.tenants import TenantLimits
from pdserve.router.tenants.token_bucket import TokenBucket

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
        "granted",
        "limits",
        "name",
        "requests",
        "running",
        "share",
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
        """Requests let in and not over. The fair queue counts them."""
        self.waiting = 0
        """Requests in the queue. The fair queue counts them."""
        self.granted = granted
        """Its share of concurrency in this process (`shared_places`). None: all of it."""
        self.share = 1.0
        """Of its rates, in this process (`processes.agreement`)."""
        self.spent_requests = 0.0
        self.spent_tokens = 0.0
        """Tokens charged to its bucket and not yet reported to the other processes."""
        self.use = Use()
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_limits(limits, now_s)

    @property
    def cache(self) -> str:
        """The tenant's cache namespace."""
        return self.limits.cache or self.name

    @property
    def has_rates(self) -> bool:
        """Its requests or tokens have a rate."""
        return self.requests is not None or self.tokens is not None

    @property
    def is_free(self) -> bool:
        """The tenant's concurrency allows one more request."""
        most = self.limits.concurrency
        if not most:
            return True
        return self.running < (most if self.granted is None else min(self.granted, most))

    def set_limits(self, limits: TenantLimits, now_s: float) -> None:
        """Change the limits from now on. Past use still counts."""
        self.limits = limits
        rate_s, tokens_min = limits.requests_s * self.share, limits.tokens_min * self.share
        self.requests = _bucket(self.requests, rate_s, max(1.0, rate_s), now_s)
        self.tokens = _bucket(self.tokens, tokens_min / 60, tokens_min, now_s)

    def set_share(self, share: float, now_s: float) -> None:
        """Hold this share of the rates from now on, above 0 and at most 1."""
        if share != self.share:
            self.share = share
            self.set_limits(self.limits, now_s)

    def take_spent(self) -> tuple[float, float]:
        """(requests, tokens) that were charged since the last call, and not by `charge_elsewhere`."""
        spent = self.spent_requests, self.spent_tokens
        self.spent_requests = self.spent_tokens = 0.0
        return spent

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
            self.spent_requests += requests
        if self.tokens is not None:
            self.tokens.charge(tokens, now_s)
            self.spent_tokens += tokens

    def settle(self, charged_tokens: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Correct the charge of a finished request from `charged_tokens` to its real use."""
        self.use.prompt_tokens += prompt_tokens
        self.use.output_tokens += output_tokens
        if self.tokens is not None:
            self.tokens.charge(prompt_tokens + output_tokens - charged_tokens, now_s)
            self.spent_tokens += prompt_tokens + output_tokens - charged_tokens

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
