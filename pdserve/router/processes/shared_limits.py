"""A tenant's limits hold over all processes of a router: what they tell the parent, how it divides. Pure.

*Rates.* Every process has the tenant's whole token buckets. What one charges the others hear of, and charge
too, so each has the tenant's one bucket, late by the time of telling. What is let in at several processes
within that time is paid back: the tenant waits that much longer. A process that starts knows of no debt.

*Concurrency* is exact. A process runs no more of a tenant's requests than the parent has granted to it. A
grant that is lowered counts until the process has said that it knows, and what runs above it until it ends:

    held(p) = max(running(p), the grant that p knows, the grant that is on its way),   sum of held <= limit

A process is sent no other grant while one is on its way. The limit is divided by max-min fairness over what
runs and waits at each process; what nobody wants is spread evenly, so that who comes is let in without
asking. What cannot be divided goes to whose turn was longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState

TELL_S: Final = 0.1
"""A process tells what changed so often."""


class Want(msgspec.Struct, frozen=True):
    """What a process says of a tenant. `limit`: its concurrency, 0: none. `waiting`: for a larger share.
    `number`: of the last share that it got. `requests`, `tokens`: charged to the buckets since it last said.
    """

    limit: int
    running: int
    waiting: int
    number: int
    requests: float
    tokens: float


class Share(msgspec.Struct, frozen=True):
    """What a process hears of a tenant. `granted` requests at a time are its share of the concurrency (None:
    as before), told under a `number`. `requests`, `tokens`: charged by the others since it last heard so.
    """

    number: int
    granted: int | None
    requests: float
    tokens: float


Shares = dict[int, dict[str, Share]]
"""By process and tenant."""


class SharedLimits:
    """A process's part. From its beginning it runs nothing of who has a limit, until that is granted."""

    def __init__(self, tenants: Tenants, held_back: Callable[[TenantState], int]) -> None:
        """`held_back`: how many of a tenant's requests here wait for nothing but a larger share."""
        self._tenants = tenants
        self._held_back = held_back
        self._said: dict[str, Want] = {}
        tenants.granted = 0

    def changed(self) -> dict[str, Want]:
        """What is new since the last call, to be told."""
        wants = {}
        for tenant in self._tenants.known:
            if tenant.limits.is_limited:
                want = _want(tenant, self._held_back(tenant))
                if want != self._said.get(tenant.name):
                    wants[tenant.name] = want
                    self._said[tenant.name] = msgspec.structs.replace(want, requests=0.0, tokens=0.0)
                    tenant.spent_requests = tenant.spent_tokens = 0.0
        return wants

    def apply(self, shares: Mapping[str, Share], now_s: float) -> None:
        """What the parent says."""
        for name, share in shares.items():
            tenant = self._tenants.get(name)
            assert tenant is not None, "told of what was told there"
            tenant.charge_elsewhere(share.requests, share.tokens, now_s)
            if share.granted is not None:
                tenant.granted, tenant.grant_number = share.granted, share.number


def _want(tenant: TenantState, waiting: int) -> Want:
    return Want(
        tenant.limits.concurrency,
        tenant.running,
        waiting,
        tenant.grant_number,
        tenant.spent_requests,
        tenant.spent_tokens,
    )


class _Part:
    """A process, as far as one tenant goes."""

    __slots__ = ("known", "number", "sent", "served", "want")

    def __init__(self, want: Want) -> None:
        self.want = want
        self.served = 0
        """When it last said that it runs something, or got more, in messages."""
        self.number = 0
        self.sent = 0
        """The grant that was sent last, under `number`."""
        self.known = 0
        """The grant that it is known to have got."""

    @property
    def held(self) -> int:
        return max(self.want.running, self.known, self.sent)

    @property
    def demand(self) -> int:
        return self.want.running + self.want.waiting


class Divider:
    """The parent's part, for processes known by a number."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[int, _Part]] = {}
        self._told = 0

    def told(self, process: int, wants: Mapping[str, Want]) -> Shares:
        """A process has said this; what is to be said now, and to whom."""
        shares: Shares = {}
        for name, want in wants.items():
            parts = self._tenants.setdefault(name, {})
            part = parts.setdefault(process, _Part(want))
            part.want = want
            self._told += 1
            if want.running:
                part.served = self._told
            if want.number == part.number:
                part.known = part.sent
            if want.requests or want.tokens:
                for other in parts.keys() - {process}:
                    shares.setdefault(other, {})[name] = Share(0, None, want.requests, want.tokens)
            self._divide(name, parts, shares)
        return shares

    def gone(self, process: int) -> Shares:
        """A process has ended."""
        shares: Shares = {}
        for name, parts in list(self._tenants.items()):
            if parts.pop(process, None) is not None and parts:
                self._divide(name, parts, shares)
            elif not parts:
                del self._tenants[name]
        return shares

    def held(self, name: str) -> int:
        """At most so many of a tenant's requests run now."""
        return sum(part.held for part in self._tenants.get(name, {}).values())

    def _divide(self, name: str, parts: Mapping[int, _Part], shares: Shares) -> None:
        limit = parts[max(parts)].want.limit  # of the newest: others may have an earlier configuration
        given = sum(part.sent for part in parts.values())
        content = all(part.demand <= part.sent and part.number for part in parts.values())
        if not limit or (content and given == limit):
            return
        in_turn = sorted(parts, key=lambda process: parts[process].served)
        ideal = split(limit, {process: parts[process].demand for process in in_turn})
        settled = {process: part for process in in_turn if (part := parts[process]).known == part.sent}
        grants = {process: min(part.sent, ideal[process]) for process, part in settled.items()}
        free = limit - self.held(name)
        for process, part in settled.items():
            more = min(ideal[process], part.held + max(0, free)) - grants[process]
            if more > 0:
                free -= max(0, grants[process] + more - part.held)
                grants[process] += more
        for process, granted in grants.items():
            part = settled[process]
            if granted > part.sent:
                part.served = self._told
            if granted != part.sent:
                part.sent, part.number = granted, part.number + 1
                charged = shares.get(process, {}).get(name, Share(0, None, 0.0, 0.0))
                share = msgspec.structs.replace(charged, number=part.number, granted=granted)
                shares.setdefault(process, {})[name] = share


def split(limit: int, demands: Mapping[int, int]) -> dict[int, int]:
    """`limit` divided by max-min fairness over `demands`; what nobody demands, evenly. Adds up to `limit`.
    Who stands first in `demands` gets what cannot be divided.
    """
    left, level = limit, max(demands.values())
    for place, demand in enumerate(sorted(demands.values())):
        if demand > left // (len(demands) - place):
            level = left // (len(demands) - place)
            break
        left -= demand
    given = {process: min(demand, level) for process, demand in demands.items()}
    left = limit - sum(given.values())
    for process, demand in demands.items():
        more = min(1, left, demand - given[process])
        given[process] += more
        left -= more
    for place, process in enumerate(demands):
        more = -(-left // (len(demands) - place))
        given[process] += more
        left -= more
    return given
