"""Gets that wait for pages that are not in memory yet. Pure.

Pages come from tiers of this node (tiering/promotion.py) and from other nodes (sharding/fetches.py): both
join the Get to what they have under way, and say what became of it. The Get is answered once: when the last
of its pages has come or is known not to come, or at its deadline. What is not there by then is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from pdserve.kvpool.core.events import Action, Answer
from pdserve.kvpool.core.sessions import PendingGet, Session
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import HIT, MISS, Get, Got, Pin

PinPage: TypeAlias = Callable[[Session, int, Get, float, list[Action]], Pin]
"""Gives a page in a slot to a client."""


class Source(Protocol):
    """Where pages come from."""

    def begin(self, get: PendingGet, missing: Sequence[int], now_s: float, out: list[Action]) -> list[int]:
        """Join the Get to loads of its pages at the indices `missing`. The indices that this source lacks."""
        ...

    def leave(self, get: PendingGet, *, late: bool) -> None:
        """The Get waits no longer. `late`: its deadline is over."""
        ...


class PendingGets:
    """All of a node. Each is in its session's `gets`. `pin` gives a page to its client."""

    def __init__(self, store: PageStore, pin: PinPage) -> None:
        self._store = store
        self._pin = pin

    def begin(
        self, get: PendingGet, missing: list[int], sources: Sequence[Source], now_s: float, out: list[Action]
    ) -> bool:
        """Have the pages brought from the first source that has them. True if the Get waits."""
        if get.request.id in get.session.gets:
            return False  # a Get with this id waits already
        for source in sources:
            left = source.begin(get, missing, now_s, out) if missing else []
            get.missing += len(missing) - len(left)
            missing = left
        if get.missing:
            get.session.gets[get.request.id] = get
        return bool(get.missing)

    def arrived(
        self,
        waiting: Mapping[PendingGet, list[int]],
        slot: int,
        now_s: float,
        out: list[Action],
        *,
        from_tier: bool,
    ) -> None:
        """A page that Gets wait for, at these indices of theirs, is in `slot`; NONE: it does not come."""
        for get, indices in waiting.items():
            for index in indices if slot != NONE else ():
                pin = get.pins[index] = self._pin(get.session, slot, get.request, now_s, out)
                if pin.status == HIT and from_tier:
                    get.promoted.append(index)
            get.missing -= len(indices)
            if not get.missing:
                self._answer(get, out)

    def expire(self, session: Session, sources: Sequence[Source], now_s: float, out: list[Action]) -> None:
        """Answer those of the session whose deadline is over."""
        for get in [get for get in session.gets.values() if get.deadline_s <= now_s]:
            for source in sources:
                source.leave(get, late=True)
            self._answer(get, out)

    def disconnected(self, session: Session, sources: Sequence[Source]) -> None:
        """End all of the session. What is under way goes on: other clients may want the pages."""
        for get in session.gets.values():
            for source in sources:
                source.leave(get, late=False)
        session.gets.clear()

    def _answer(self, get: PendingGet, out: list[Action]) -> None:
        del get.session.gets[get.request.id]
        if not get.session.peer:
            pages = self._store.index.namespace(get.request.namespace)
            pages.misses += sum(pin.status == MISS for pin in get.pins)
            pages.tier_hits += len(get.promoted)
        held = get.request.hold or get.session.mapped
        out.append(Answer(get.session.connection, Got(get.request.id, get.pins, [], get.promoted, held)))
