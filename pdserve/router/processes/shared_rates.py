"""Rates of tenants over the processes of one or several routers: what they tell each other. Pure.

Every process has whole token buckets for a tenant. What it charges it tells the
others, and each charges that too. So together they are one bucket, and no request waits. An overshoot is that
of the time until the others hear, and is deducted later.

- What is told is the sum that a process has charged since its start, so a lost message is made up for by the
  next one. Of a process that was not heard before, only what is new counts.
- Who speaks is trusted with the rates, but not with sense: nobody costs a tenant more than a debt of four
  full buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState
from pdserve.router.tenants.token_bucket import TokenBucket

MAX_DEBT: Final = 4
"""In full buckets."""


class Charged(msgspec.Struct, array_like=True):
    """What a process has charged one tenant: all of it, and what is new since its last message."""

    requests: float
    tokens: float
    new_requests: float
    new_tokens: float


class SharedRates:
    """One process's part. Processes have names."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._sums: dict[str, tuple[float, float]] = {}
        self._heard: dict[str, dict[str, tuple[float, float]]] = {}
        """Another process → tenant → (requests, tokens) as it last told them."""

    def new(self, *, is_told: bool) -> dict[str, Charged]:
        """What was charged here since the last call. Nothing where nobody is to be told."""
        found = {}
        for tenant in self._tenants.known:
            if not tenant.has_rates:
                continue
            new = tenant.take_spent()
            if any(new) and is_told:
                sums = self._sums.get(tenant.name, (0.0, 0.0))
                sums = self._sums[tenant.name] = (sums[0] + new[0], sums[1] + new[1])
                found[tenant.name] = Charged(*sums, *new)
        return found

    def hear(self, sender: str, told: Mapping[str, Charged], now_s: float, *, is_charged: bool) -> None:
        """Another process has charged tenants. `is_charged` false: it came out of shares, and is noted."""
        sums = self._heard.setdefault(sender, {})
        for name, charged in told.items():
            tenant = self._tenants.get(name)
            numbers = (charged.requests, charged.tokens, charged.new_requests, charged.new_tokens)
            if tenant is None or not all(map(math.isfinite, numbers)):
                continue
            before = sums.get(name)
            if before is None:
                before = charged.requests - charged.new_requests, charged.tokens - charged.new_tokens
            sums[name] = charged.requests, charged.tokens
            if is_charged:
                _charge(tenant, charged.requests - before[0], charged.tokens - before[1], now_s)

    def forget(self, sender: str) -> None:
        """That process was not heard any more."""
        self._heard.pop(sender, None)


def _charge(tenant: TenantState, requests: float, tokens: float, now_s: float) -> None:
    tenant.charge_elsewhere(
        _bounded(tenant.requests, requests, now_s), _bounded(tenant.tokens, tokens, now_s), now_s
    )


def _bounded(bucket: TokenBucket | None, amount: float, now_s: float) -> float:
    """Of `amount` what may be charged, or given back."""
    if bucket is None:
        return 0.0
    most = max(0.0, bucket.held(now_s) + MAX_DEBT * bucket.capacity)
    return max(-bucket.capacity, min(most, amount))
