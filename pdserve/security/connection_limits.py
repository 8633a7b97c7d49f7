"""A bound on the connections of a port, fair between client addresses. Pure.

One client can open connections as fast as the kernel accepts them. So when there is one connection more than
the bound, the oldest evictable connection of the address that has most of them is closed. Clients at other
addresses keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """At most `most` connections, each of which is a hashable key."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._address_of: dict[T, str] = {}
        self._by_address: dict[str, dict[T, None]] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._address_of)

    def __iter__(self) -> Iterator[T]:
        return iter(self._address_of)

    def address(self, one: T) -> str:
        """Empty for one that is not here."""
        return self._address_of.get(one, "")

    def came(self, one: T, address: str, may_go: Callable[[T], bool] = lambda _: True) -> T | None:
        """Count a new connection. Returns the connection that the caller must close for it, which is counted
        no more, or None. That is the new one itself where no other of the largest address `may_go`.
        """
        self._address_of[one] = address
        self._by_address.setdefault(address, {})[one] = None
        if len(self) <= self.most:
            return None
        crowded = max(self._by_address.values(), key=len)
        goes = next((each for each in crowded if may_go(each)), one)
        self.left(goes)
        return goes

    def left(self, one: T) -> str:
        """Count a connection no more: it was closed, or its client authenticated. Returns its address, or ""
        for one that was not counted.
        """
        address = self._address_of.pop(one, None)
        if address is None:
            return ""
        of_it = self._by_address[address]
        del of_it[one]
        if not of_it:
            del self._by_address[address]
        return address
