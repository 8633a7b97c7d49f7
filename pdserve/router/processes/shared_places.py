"""Concurrency of tenants over the processes of one or several routers. Pure.

A tenant's limit is a number of *places*. Each process holds some of them, and runs no more of the tenant's
requests than it holds. All processes hear all messages in one order, their own ones too: Redis, or the parent
of one router's processes, gives each that order. So all of them come to the same count of who holds what, and
nobody decides for others:

- A process may give up places by itself. It tells what it still holds.
- A process that wants more tells how many. It gets them when it hears its own message: as many as nobody
  held at that point of the order. All others count the same.
- A process tells nothing new before it has heard its last message. What is heard late, behind a later
  message of the same sender, counts for nothing (`agreement` drops it).

Whether to give up or to want places is decided by each for itself, by max-min fairness over what runs and
waits everywhere (`split`). Places that nobody needs are spread evenly, so that a new request
need not wait. A place that cannot be divided goes to the process that has waited longest for its turn.

- A process that has just begun to listen does not know yet what others hold. It wants nothing until each
  of them has had time to tell.
- Without the channel a process holds an equal share of each limit, at least one place (`part`). What then
  runs beyond the limit ends by itself: it counts as held when the channel is back, and nobody gets more until
  then.
- Who speaks is trusted to tell the truth, and numbers are bounded. A limit is never exceeded by one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState

P = TypeVar("P")
"""What processes are known by."""
MAX_PLACES: Final = 1_000_000
MAX_TURN: Final = 1 << 53


class Place(msgspec.Struct, array_like=True, frozen=True):
    """What a process tells of one tenant."""

    limit: int
    held: int
    """It runs at most so many. Never more than others know."""
    wanted: int
    """It wants to hold so many."""
    running: int
    waiting: int
    """Requests that wait for nothing but more places."""
    turn: int = 0
    """When it last ran something or wanted more, by a count that all of them continue (Lamport's clock)."""

    @property
    def is_sensible(self) -> bool:
        """No number is one that no process would tell."""
        if not 0 <= self.turn <= MAX_TURN:
            return False
        return all(
            0 <= n <= MAX_PLACES for n in (self.limit, self.held, self.wanted, self.running, self.waiting)
        )


class _Holding:
    """What is known of one tenant at one process."""

    __slots__ = ("demand", "held", "turn")

    def __init__(self) -> None:
        self.held = 0
        self.demand = 0
        self.turn = 0


class _Book:
    """What is known of one tenant. `changes` counts them, so that a tenant at rest costs nothing."""

    __slots__ = ("changes", "of")

    def __init__(self) -> None:
        self.of: dict[str, _Holding] = {}
        self.changes = 0

    @property
    def next_turn(self) -> int:
        """Behind all others."""
        return min(MAX_TURN, max((one.turn for one in self.of.values()), default=0) + 1)

    def others(self, process: str) -> int:
        """The places that all others hold."""
        return sum(one.held for name, one in self.of.items() if name != process)

    def turn_of(self, process: str) -> int:
        """As it was heard."""
        holding = self.of.get(process)
        return 0 if holding is None else holding.turn

    def forget(self, process: str) -> None:
        if self.of.pop(process, None) is not None:
            self.changes += 1


class SharedPlaces:
    """One process's part. Until it may want places, tenants with a limit run nothing here."""

    def __init__(self, tenants: Tenants, held_back: Callable[[TenantState], int], name: str) -> None:
        """`held_back`: how many of a tenant's requests here wait for nothing but more places."""
        self._tenants = tenants
        self._held_back = held_back
        self._name = name
        self._books: dict[str, _Book] = {}
        self._told: dict[str, tuple[tuple[int, ...], Place]] = {}
        """Tenant → (what its place was computed from, that place)."""
        tenants.granted = 0

    def tell(self, processes: Collection[str], *, wants: bool) -> tuple[dict[str, Place], bool]:
        """(what this process holds and wants, whether that is new). Gives up what others need. `processes`:
        all that are there, this one too. `wants`: it knows what others hold, and has heard its last message.
        """
        places, is_new = {}, False
        for tenant in self._tenants.known:
            limit = tenant.limits.concurrency
            if not limit:
                continue
            book = self._books.setdefault(tenant.name, _Book())
            running, waiting = tenant.running, self._held_back(tenant)
            state = (limit, running, waiting, tenant.granted or 0, book.changes, len(processes), int(wants))
            before = self._told.get(tenant.name)
            if before is None or before[0] != state:
                place = self._place(tenant, book, processes, running, waiting, wants=wants)
                is_new |= before is None or place != before[1]
                self._told[tenant.name] = state, place
            place = self._told[tenant.name][1]
            turn = book.next_turn if running or place.wanted > place.held else book.turn_of(self._name)
            places[tenant.name] = msgspec.structs.replace(place, turn=turn)
        return places, is_new

    def hear(self, sender: str, places: Mapping[str, Place], *, is_mine: bool) -> bool:
        """A message came. `is_mine`: of this process, which wanted what it says. True if it got places."""
        has_more = False
        for name, place in places.items():
            if place.is_sensible and (tenant := self._tenants.get(name)) is not None:
                held = self._take_in(sender, name, place)
                if is_mine and held > place.held:  # else it holds for what still runs, and may start no more
                    tenant.granted, has_more = held, True
        for name in self._books.keys() - places.keys():
            self._books[name].forget(sender)
        return has_more

    def _take_in(self, sender: str, name: str, place: Place) -> int:
        """Note what a process holds now. Returns it."""
        book = self._books.setdefault(name, _Book())
        held = place.held + max(0, min(place.wanted, place.limit - book.others(sender)) - place.held)
        holding = book.of.setdefault(sender, _Holding())
        demand = place.running + place.waiting
        if (held, demand, place.turn) != (holding.held, holding.demand, holding.turn):
            holding.held, holding.demand, holding.turn = held, demand, place.turn
            book.changes += 1
        return held

    def forget(self, sender: str) -> None:
        """That process was not heard any more: what it held is free."""
        for book in self._books.values():
            book.forget(sender)

    def forget_all(self) -> None:
        """What was heard counts no more: messages may have been lost."""
        self._books.clear()
        self._told.clear()

    def part(self, processes: int) -> None:
        """The channel is away: hold an equal share of each limit."""
        for tenant in self._tenants.known:
            tenant.granted = max(1, tenant.limits.concurrency // processes)

    def _place(
        self,
        tenant: TenantState,
        book: _Book,
        processes: Iterable[str],
        running: int,
        waiting: int,
        *,
        wants: bool,
    ) -> Place:
        limit, granted = tenant.limits.concurrency, tenant.granted or 0
        if not wants:
            held = max(running, granted)
            return Place(limit, held, held, running, waiting)
        holdings = {process: book.of.get(process) or _Holding() for process in processes}
        demands = {process: one.demand for process, one in holdings.items()}
        demands[self._name] = running + waiting
        by_turn = sorted(holdings, key=lambda process: (holdings[process].turn, process))
        fair = split(limit, {process: demands[process] for process in by_turn})[self._name]
        others = book.others(self._name)
        is_short = any(
            demands[process] > one.held or not (one.held or limit < len(holdings))
            for process, one in holdings.items()
            if process != self._name
        )
        if is_short or others + granted > limit:
            granted = tenant.granted = min(granted, fair)
        held = max(running, granted)
        wanted = max(held, min(fair, limit - others))
        return Place(limit, held, wanted, running, waiting)


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
