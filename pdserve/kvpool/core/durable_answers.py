"""Answers that wait until what was voided or erased is so for good. Pure.

**Durable clears and drops.** Their answers wait until the list of namespaces is durable.

After the answer a client may write other pages under the same keys. It must never read the old pages again,
not even after a power failure. A clear or drop changes the spaces in the list of namespaces. The list beside
the memory is saved before the answer, which covers a killed process. After a reboot the list in the first
tier counts, and it is written in the background. So the answer waits for it, for at most SAVE_TIMEOUT_S. If
the list was not written in time, the client gets a Fault `not_durable`: its pages are gone now, but may
return at a reboot. Repeating the request starts another attempt. Without tiers no page survives a reboot, and
no answer waits.

**Erasures.** Requests that erase pages are answered once no byte of the pages is left on this node. The pages
are gone for everybody as soon as the request was carried out. Their bytes take longer:

    memory    slots are set to zero as they are freed: little by little, and those that a reader or writer
              still holds when it lets go (`SlotStates.to_wipe`)
    tiers     one after the other, from the top: what goes from tier to tier meanwhile is erased there too

After ERASE_S the client gets a Fault `not_erased` that says what is left. The work goes on, and repeating the
request waits for it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.kvpool.core.events import (
    Action,
    Answer,
    ForgetSpace,
    NamespacesSaved,
    PagesErased,
    SaveNamespaces,
)
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol.messages import Done, Fault, Reply

SAVE_TIMEOUT_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that waits for the list of this revision."""

    connection: int
    done: Done
    revision: int
    deadline_s: float


class DurableAnswers:
    """The waiting answers of all connections. The shell discards answers of closed connections."""

    def __init__(self, node: str, namespaces: Namespaces, *, tiers: bool) -> None:
        """`tiers`: whether the node has tiers."""
        self._node = node
        self._namespaces = namespaces
        self._tiers = tiers
        self._pending: list[_Pending] = []  # ordered by deadline and by revision
        self._saved = 0  # the newest revision that is durable
        self._failed = False  # the last attempt

    @property
    def next_deadline_s(self) -> float:
        return self._pending[0].deadline_s if self._pending else float("inf")

    def answer(
        self, connection: int, reply: Reply, now_s: float, out: list[Action], *, voids: bool = False
    ) -> None:
        """Answer the client. A Done that voids pages waits until this is durable.
        `voids`: the request voids pages. This also holds if `out` frees a space in the tiers.
        """
        voids = voids or any(isinstance(action, ForgetSpace) for action in out)
        durable = not self._tiers or self._saved >= self._namespaces.revision
        if not isinstance(reply, Done) or not voids or durable:
            out.append(Answer(connection, reply))
            return
        if self._failed and not any(isinstance(action, SaveNamespaces) for action in out):
            out.append(SaveNamespaces(self._namespaces.dump(), self._namespaces.revision))
        deadline_s = now_s + SAVE_TIMEOUT_S
        self._pending.append(_Pending(connection, reply, self._namespaces.revision, deadline_s))

    def saved(self, event: NamespacesSaved, out: list[Action]) -> None:
        """The list of this revision is durable, or could not be written."""
        self._failed = bool(event.problem)
        if not event.problem:
            self._saved = max(self._saved, event.revision)
        done = [pending for pending in self._pending if pending.revision <= event.revision]
        self._pending = self._pending[len(done) :]
        out.extend(self._answer(pending, event.problem) for pending in done)

    def expire(self, now_s: float, out: list[Action]) -> None:
        """Answer requests at their deadline."""
        while self._pending and self._pending[0].deadline_s <= now_s:
            problem = f"it did not answer within {SAVE_TIMEOUT_S:.0f} s"
            out.append(self._answer(self._pending.pop(0), problem))

    def _answer(self, pending: _Pending, problem: str) -> Answer:
        if not problem:
            return Answer(pending.connection, pending.done)
        message = (
            f"node {self._node}: the pages are gone, but its first tier could not write that down, so that "
            f"they may come back at a reboot ({problem}): see to that tier, then ask again"
        )
        return Answer(pending.connection, Fault(pending.done.id, "not_durable", message))


ERASE_S: Final = 60.0
LOOK_S: Final = 0.05  # between looks at what is left


@dataclass(slots=True)
class _Erasing:
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
        self._pending: list[_Erasing] = []
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
        self._pending.append(_Erasing(connection, done, set(self._open), now_s + ERASE_S, voids))
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
