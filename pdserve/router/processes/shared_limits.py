"""Limits of tenants over all processes of a router: what a process reports, how the parent divides. Pure.

*Rates.* Every process has whole token buckets for a tenant. What one process charges, the others charge at
most `REPORT_S` later, so together they are one bucket. An overshoot within that time is deducted later: the
tenant waits that much longer. A process that starts has full buckets.

*Concurrency* is exact. A process runs no more requests of a tenant than the parent has granted to it. The
parent counts a process with all that it may run at this moment:

    held = max(running, the last grant that the process has confirmed, the grant that is on its way)

and keeps the sum of `held` at or below the limit. So a lowered grant frees nothing until the process has
confirmed it, and its surplus requests have ended. A process gets no other grant while one is on its way.

The limit is divided by max-min fairness over what runs and waits at each process. What no process needs is
spread evenly, so that a new request need not wait for a grant. Single requests that cannot be divided go to
the process that has waited longest for its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

import msgspec

from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState

P = TypeVar("P")
"""What processes are known by."""
REPORT_S: Final = 0.1
"""Between two reports of a process."""


class Report(msgspec.Struct, frozen=True):
    """One tenant at one process, from the process to the parent."""

    limit: int
    """Of its concurrency, in this process's configuration; 0: no limit."""
    running: int
    waiting: int
    """Requests that wait for nothing but a larger share."""
    number: int
    """Of the last share that the process has got."""
    requests: float
    tokens: float
    """Both charged to the tenant's buckets since the last report."""


class Share(msgspec.Struct, frozen=True):
    """One tenant at one process, from the parent to the process."""

    number: int
    granted: int | None
    """So many requests at a time; None: as before, and `number` says nothing."""
    requests: float
    tokens: float
    """Both charged by the other processes since the last share."""


Shares = dict[int, dict[str, Share]]
"""By process and tenant."""


class SharedLimits:
    """A process's part. Until the first grant, tenants with a limit run nothing."""

    def __init__(self, tenants: Tenants, held_back: Callable[[TenantState], int]) -> None:
        """`held_back`: how many of a tenant's requests here wait for nothing but a larger share."""
        self._tenants = tenants
        self._held_back = held_back
        self._reported: dict[str, Report] = {}
        tenants.granted = 0

    def changed(self) -> dict[str, Report]:
        """Reports of the tenants that have changed since the last call."""
        reports = {}
        for tenant in self._tenants.known:
            if tenant.limits.is_limited:
                report = self._report(tenant)
                if report != self._reported.get(tenant.name):
                    reports[tenant.name] = report
                    self._reported[tenant.name] = msgspec.structs.replace(report, requests=0.0, tokens=0.0)
                    tenant.take_spent()
        return reports

    def apply(self, shares: Mapping[str, Share], now_s: float) -> None:
        """Take over what the parent sends."""
        for name, share in shares.items():
            tenant = self._tenants.get(name)
            assert tenant is not None, "a share of a tenant that was never reported"
            tenant.charge_elsewhere(share.requests, share.tokens, now_s)
            if share.granted is not None:
                tenant.granted, tenant.grant_number = share.granted, share.number

    def _report(self, tenant: TenantState) -> Report:
        return Report(
            tenant.limits.concurrency,
            tenant.running,
            self._held_back(tenant),
            tenant.grant_number,
            tenant.spent_requests,
            tenant.spent_tokens,
        )


class _Portion:
    """What the parent knows of one tenant at one process."""

    __slots__ = ("confirmed", "number", "report", "sent", "served")

    def __init__(self, report: Report) -> None:
        self.report = report
        self.served = 0
        """When it last ran something or got more: a count of all reports."""
        self.number = 0
        """Of the last grant; 0: none was sent."""
        self.sent = 0
        """The last grant."""
        self.confirmed = 0
        """The last grant that the process is known to have got."""

    @property
    def is_settled(self) -> bool:
        """No grant is on its way."""
        return self.confirmed == self.sent

    @property
    def held(self) -> int:
        """The most that the process may run now."""
        return max(self.report.running, self.confirmed, self.sent)

    @property
    def demand(self) -> int:
        return self.report.running + self.report.waiting


class Divider:
    """The parent's part. It knows processes by their numbers, which grow."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[int, _Portion]] = {}
        self._reports = 0
        """How many came: the clock of `_Portion.served`."""

    def on_reports(self, process: int, reports: Mapping[str, Report]) -> Shares:
        """A process has reported. Returns the shares to be sent."""
        shares: Shares = {}
        for name, report in reports.items():
            portions = self._tenants.setdefault(name, {})
            portion = portions.setdefault(process, _Portion(report))
            portion.report = report
            self._reports += 1
            if report.running:
                portion.served = self._reports
            if report.number == portion.number:
                portion.confirmed = portion.sent
            if report.requests or report.tokens:
                for other in portions.keys() - {process}:
                    shares.setdefault(other, {})[name] = Share(0, None, report.requests, report.tokens)
            self._divide(name, portions, shares)
        return shares

    def on_end(self, process: int) -> Shares:
        """A process has ended. Returns the shares to be sent."""
        shares: Shares = {}
        for name, portions in list(self._tenants.items()):
            if portions.pop(process, None) is not None and portions:
                self._divide(name, portions, shares)
            elif not portions:
                del self._tenants[name]
        return shares

    def held(self, name: str) -> int:
        """The most requests of a tenant that may run now, at all processes together."""
        return sum(portion.held for portion in self._tenants.get(name, {}).values())

    def _divide(self, name: str, portions: Mapping[int, _Portion], shares: Shares) -> None:
        """Grant the tenant's limit anew, and add the grants that change to `shares`."""
        limit = portions[max(portions)].report.limit  # the newest has the newest configuration
        if not limit or _is_content(limit, portions.values()):
            return
        by_turn = dict(sorted(portions.items(), key=lambda item: item[1].served))
        for process, granted in new_grants(limit, by_turn).items():
            portion = portions[process]
            if granted > portion.sent:
                portion.served = self._reports
            portion.sent, portion.number = granted, portion.number + 1
            charged = shares.get(process, {}).get(name, Share(0, None, 0.0, 0.0))
            share = msgspec.structs.replace(charged, number=portion.number, granted=granted)
            shares.setdefault(process, {})[name] = share


def _is_content(limit: int, portions: Collection[_Portion]) -> bool:
    """The whole limit is granted, and no process needs more: to grant anew would gain nothing."""
    is_enough = all(portion.number and portion.demand <= portion.sent for portion in portions)
    return is_enough and sum(portion.sent for portion in portions) == limit


def new_grants(limit: int, portions: Mapping[int, _Portion]) -> dict[int, int]:
    """The grants that change. The first in `portions` gets what cannot be divided."""
    fair = split(limit, {process: portion.demand for process, portion in portions.items()})
    unheld = max(0, limit - sum(portion.held for portion in portions.values()))
    grants = {}
    for process, portion in portions.items():
        if portion.is_settled:
            granted = min(fair[process], portion.held + unheld)
            unheld -= max(0, granted - portion.held)
            if granted != portion.sent:
                grants[process] = granted
    return grants


def split(limit: int, demands: Mapping[P, int]) -> dict[P, int]:
    """`limit` divided by max-min fairness over `demands`, and what no process needs, evenly. Adds up to
    `limit`. The first in `demands` gets what cannot be divided.
    """
    needed = _max_min(limit, demands)
    spare = limit - sum(needed.values())
    evenly = _max_min(spare, dict.fromkeys(demands, spare))
    return {process: needed[process] + evenly[process] for process in demands}


def _max_min(amount: int, demands: Mapping[P, int]) -> dict[P, int]:
    """Nobody gets more than its demand, and nobody less than another but to its own demand or by 1."""
    given, left = dict.fromkeys(demands, 0), amount
    while left and (short := [process for process in demands if given[process] < demands[process]]):
        each = max(1, left // len(short))
        for process in short:
            more = min(each, demands[process] - given[process], left)
            given[process] += more
            left -= more
    return given
