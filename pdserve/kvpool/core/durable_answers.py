"""Clearing and dropping that outlive a crash: the answer waits until the list of namespaces is durable. Pure.

A client that was told "done" may write other pages under the same keys, and must never read the old pages
again, not even after a power failure. A clear or drop changes the spaces in the list of namespaces. The list
beside the memory is saved before the answer, so a killed process is no danger. After a reboot the list that
the first tier keeps counts, and that one is written in the background. So the answer waits for it, for
SAVE_TIMEOUT_S at most. When it could not be written, or not in time, the client gets a Fault `not_durable`:
its pages are gone here and now, and may come back at a reboot. Whoever asks again starts another attempt.
Without tiers nothing outlives a reboot, and nothing waits.
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
    """Of all connections. Clients that went are answered too: the shell knows that nobody is there."""

    def __init__(self, node: str, namespaces: Namespaces, *, tiers: bool) -> None:
        """`tiers`: there are any."""
        self._node = node
        self._namespaces = namespaces
        self._tiers = tiers
        self._pending: list[_Pending] = []  # by deadline, and by revision
        self._saved = 0  # the newest revision that is durable
        self._failed = False  # the last attempt

    @property
    def next_deadline_s(self) -> float:
        return self._pending[0].deadline_s if self._pending else float("inf")

    def answer(
        self, connection: int, reply: Reply, now_s: float, out: list[Action], *, voids: bool = False
    ) -> None:
        """Answer the client. A Done that says that pages are gone waits until that is durable.
        `voids`: it says so; it also does when the actions so far free a space in the tiers.
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
        """Answer what has waited long enough."""
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
