"""Answers to Clear and DropNamespace: they wait until every tier has made the change durable. Pure.

After "done" a client may write other pages under the same keys. It must never read the old ones again, not
even after a power failure. In memory this holds at once: the list of namespaces is saved before the answer. A
tier needs time: it records what is void after the stores under way.

So the answer waits for the tiers, at most FORGET_TIMEOUT_S. When a tier fails, or is late, the client gets a
Fault `not_durable`: its pages are gone now, but may come back at a restart. The client can ask again. For
that a drop is remembered by name until all tiers have it, because the namespace's number is unknown by then.
(A Clear needs no memory: each voids all earlier pages.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from pdserve.kvpool.core.events import Action, Answer, ForgetNamespace, TierForgotNamespace
from pdserve.kvpool.protocol.messages import Done, Fault, Reply

FORGET_TIMEOUT_S: Final = 4.0
MAX_NAMES: Final = 1024  # dropped namespaces that are remembered

Forgetting: TypeAlias = tuple[int, int, int]  # tier, namespace, before_sequence


@dataclass(slots=True)
class _Pending:
    """A Done that waits for the tiers. `problem`: the first failure."""

    connection: int
    done: Done
    waiting: set[Forgetting]
    deadline_s: float
    problem: str = ""


class DurableAnswers:
    """Of all connections, closed ones too: the shell drops answers to these."""

    def __init__(self, node: str, tiers: int) -> None:
        self._node = node
        self._tiers = tiers
        self._pending: list[_Pending] = []  # by deadline
        self._undone: dict[str, set[Forgetting]] = {}  # by name of a dropped namespace

    @property
    def next_deadline_s(self) -> float:
        return self._pending[0].deadline_s if self._pending else float("inf")

    def answer(
        self, connection: int, reply: Reply, now_s: float, out: list[Action], dropped: str = ""
    ) -> None:
        """Answer the client. Where the actions so far let the tiers forget pages, a Done waits for the tiers.

        `dropped` is the namespace that the request dropped. What the tiers have not forgotten since an
        earlier drop of that name, they are asked to forget again.
        """
        if not isinstance(reply, Done):
            out.append(Answer(connection, reply))
            return
        before = {(namespace, sequence) for _, namespace, sequence in self._undone.get(dropped, ())}
        out += [ForgetNamespace(*one) for one in sorted(before)]
        waiting = {
            (tier, action.namespace, action.before_sequence)
            for action in out
            if isinstance(action, ForgetNamespace)
            for tier in range(self._tiers)
        }
        if not waiting:
            out.append(Answer(connection, reply))
            return
        deadline_s = now_s + FORGET_TIMEOUT_S
        self._pending.append(_Pending(connection, reply, waiting.copy(), deadline_s))
        if dropped:
            self._undone.setdefault(dropped, set()).update(waiting)
            while len(self._undone) > MAX_NAMES:
                del self._undone[next(iter(self._undone))]

    def forgotten(self, event: TierForgotNamespace, out: list[Action]) -> None:
        """A tier has forgotten a namespace, or could not."""
        one = (event.tier, event.namespace, event.before_sequence)
        if not event.problem:
            for name, undone in list(self._undone.items()):
                undone.discard(one)
                if not undone:
                    del self._undone[name]
        for pending in self._pending:
            if one in pending.waiting:
                pending.waiting.discard(one)
                pending.problem = pending.problem or event.problem
                if not pending.waiting:
                    out.append(self._answer(pending))
        self._pending = [pending for pending in self._pending if pending.waiting]

    def expire(self, now_s: float, out: list[Action]) -> None:
        while self._pending and self._pending[0].deadline_s <= now_s:
            pending = self._pending.pop(0)
            pending.problem = pending.problem or f"it did not answer within {FORGET_TIMEOUT_S:.0f} s"
            out.append(self._answer(pending))

    def _answer(self, pending: _Pending) -> Answer:
        if not pending.problem:
            return Answer(pending.connection, pending.done)
        message = (
            f"node {self._node}: the pages are gone, but a tier could not write that down, so that they may "
            f"come back at a restart ({pending.problem}): see to that tier, then ask again"
        )
        return Answer(pending.connection, Fault(pending.done.id, "not_durable", message))
