"""Requests that erase pages: answered once no byte of the pages is left on this node. Pure.

The pages are gone for everybody as soon as the request was carried out. Their bytes take longer:

    memory    slots are set to zero as they are freed: little by little, and those that a reader or writer
              still holds when it lets go (`SlotStates.to_wipe`)
    tiers     one after the other, from the top: what goes from tier to tier meanwhile is erased there too

After ERASE_S the client gets a Fault `not_erased` that says what is left. The work goes on, and repeating the
request waits for it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.kvpool.core.durable_answers import DurableAnswers
from pdserve.kvpool.core.events import Action, Answer, PagesErased
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import Done, Fault

ERASE_S: Final = 60.0
LOOK_S: Final = 0.05  # between looks at what is left


@dataclass(slots=True)
class _Pending:
    connection: int
    done: Done
    tickets: set[int]
    deadline_s: float
    voids: bool
    problem: str = ""


class Erasures:
    """The waiting answers of all connections. `tickets`: number what the tiers are told to erase."""

    def __init__(self, node: str, store: PageStore, durable: DurableAnswers) -> None:
        self._node = node
        self._store = store
        self._durable = durable
        self._pending: list[_Pending] = []
        self._open: set[int] = set()  # tickets that the tiers have not carried out
        self._last_ticket = 0

    def begin(self, *, has_tiers: bool) -> int:
        """Pages are erased. The ticket for the tiers; 0 without any."""
        if not has_tiers:
            return 0
        self._last_ticket += 1
        self._open.add(self._last_ticket)
        return self._last_ticket

    def answer(
        self, connection: int, done: Done, now_s: float, out: list[Action], *, voids: bool = False
    ) -> None:
        """Answer when all that has begun is done: also what another node's news or an earlier request began.
        `voids`: as in `DurableAnswers`.
        """
        self._pending.append(_Pending(connection, done, set(self._open), now_s + ERASE_S, voids))
        self.pump(now_s, out)

    def erased(self, event: PagesErased, now_s: float, out: list[Action]) -> None:
        """The tiers have carried out one ticket."""
        self._open.discard(event.ticket)
        for pending in self._pending:
            if event.ticket in pending.tickets:
                pending.tickets.discard(event.ticket)
                pending.problem = event.problem or pending.problem
        self.pump(now_s, out)

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Answer what is done, or late."""
        for pending in list(self._pending):
            left = [f"{self._store.wiping} slots of memory"] if self._store.wiping else []
            left += ["tiers that have not answered"] if pending.tickets else []
            if left and now_s < pending.deadline_s:
                continue
            self._pending.remove(pending)
            problem = pending.problem or (f"left after {ERASE_S:.0f} s: {', '.join(left)}" if left else "")
            if problem:
                text = f"node {self._node}: nobody finds the pages any more, but not all bytes are erased"
                fault = Fault(pending.done.id, "not_erased", f"{text} ({problem}): ask again")
                out.append(Answer(pending.connection, fault))
            else:
                self._durable.answer(pending.connection, pending.done, now_s, out, voids=pending.voids)

    def next_deadline_s(self, now_s: float) -> float:
        """When to look again; infinite where nothing waits."""
        return now_s + LOOK_S if self._pending else float("inf")
