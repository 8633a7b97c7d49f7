"""Connections of strangers that a port keeps, by address, and which one goes when there are too many. Pure.

A stranger opens connections as fast as the kernel makes them. So for one more than the bound, one goes of the
address that has most: the oldest that may go. Clients of other addresses keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """At most `most` connections; each is a key."""

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
        """A connection came. Which one to close for it, if any: it is not counted any more. It is the new one
        itself where no other of its address `may_go`.
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
        """A connection is closed, or is no stranger's any more. Its address; empty if it is not here."""
        address = self._address_of.pop(one, None)
        if address is None:
            return ""
        of_it = self._by_address[address]
        del of_it[one]
        if not of_it:
            del self._by_address[address]
        return address
