"""Durable clears and drops: their answers wait until the list of namespaces is durable. Pure.

After the answer a client may write other pages under the same keys. It must never read the old pages again,
not even after a power failure. A clear or drop changes the spaces in the list of namespaces. The list beside
the memory is saved before the answer, which covers a killed process. After a reboot the list in the first
tier counts, and it is written in the background. So the answer waits for it, for at most SAVE_TIMEOUT_S. If
the list was not written in time, the client gets a Fault `not_durable`: its pages are gone now, but may
return at a reboot. Repeating the request starts another attempt. Without tiers no page survives a reboot, and
no answer waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.kvpool.core.events import Action, Answer, ForgetSpace, NamespacesSaved, SaveNamespaces
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
