"""A migration in simulated time: the real planner, members that are dictionaries.."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.kvpool.cluster.rebalance_plan import (
    Begin,
    Elapsed,
    Failed,
    List,
    Listed,
    Migration,
    MigrationLimits,
    MoveAction,
    MoveEvent,
    Pull,
    Pulled,
    Settled,
    Survey,
    Surveyed,
)

Pages = dict[str, dict[bytes, int]]  # namespace: key: length


@dataclass
class Member:
    """Another node: the pages that are ours there, and how it answers."""

    pages: Pages = field(default_factory=dict)
    writing: int = 0
    forgets_at: int = 0  # once, at this cursor, which place in its list it is
    epoch: int = 1
    latency_s: float = 0.001
    silent: bool = False  # every request fails, after `timeout_s`
    timeout_s: float = 5.0
    at_once: int = 1 << 30  # pages that it gives out per request
    late: set[bytes] = field(default_factory=set)  # not to be had at the first attempt
    asked: int = 0
    open: int = 0


class Moving:
    """One node that pulls."""

    def __init__(
        self,
        members: dict[str, Member],
        limits: MigrationLimits | None = None,
        *,
        room_bytes: float = float("inf"),
    ) -> None:
        self.members = members
        self.planner = Migration(limits or MigrationLimits())
        self.now_s = 0.0
        self.mine: Pages = {}
        self.room_bytes = room_bytes
        self.settled: list[tuple[int, float]] = []
        self.actions: list[MoveAction] = []
        self._due: list[tuple[float, int, str, Callable[[], MoveEvent]]] = []
        self._count = 0

    def begin(self, epoch: int, *, learned: bool = True, room_bytes: float = float("inf")) -> None:
        for member in self.members.values():
            if learned:
                member.epoch = epoch
        self.handle(Begin(epoch, tuple(self.members), room_bytes))

    def handle(self, event: MoveEvent) -> None:
        for action in self.planner.handle(event, self.now_s):
            self.actions.append(action)
            if isinstance(action, Settled):
                self.settled.append((action.epoch, self.now_s))
                continue
            member = self.members.get(action.peer) or Member(silent=True)
            member.asked += 1
            member.open += 1
            assert member.open == 1, "a member has one request at a time"
            self._answer_later(action, member)
        self.planner.check()

    def _answer_later(self, action: Survey | List | Pull, member: Member) -> None:
        delay_s = member.timeout_s if member.silent else member.latency_s

        def answer() -> MoveEvent:
            member.open -= 1
            return self._answer(action, member)

        self._count += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._count, action.peer, answer))

    def _answer(self, action: Survey | List | Pull, member: Member) -> MoveEvent:
        if member.silent:
            return Failed(action.ask)
        if action.epoch != member.epoch:
            return Failed(action.ask, stale=True)
        if isinstance(action, Survey):
            return Surveyed(action.ask, tuple(member.pages))
        there, mine = member.pages.get(action.namespace, {}), self.mine.setdefault(action.namespace, {})
        if isinstance(action, List):
            if action.cursor and action.cursor == member.forgets_at:
                member.forgets_at = 0
                return Listed(action.ask, [], [], 0, 1)
            ordered = list(there.items())
            found = ordered[action.cursor : action.cursor + action.limit]
            cursor = action.cursor + len(found)
            lacking = [(key, length) for key, length in found if key not in mine]
            return Listed(
                action.ask,
                [key for key, _ in lacking],
                [length for _, length in lacking],
                cursor if cursor < len(ordered) else 0,
                member.writing,
            )
        fits = [k for k in action.keys if k in there and k not in mine]
        given = [k for k in fits if k not in member.late][: member.at_once]
        member.late -= set(fits)
        room = [k for k in given if self._take(there[k])]
        mine.update((key, there[key]) for key in room)
        missing = [k for k in action.keys if k not in given and k not in mine]
        moved_bytes = sum(there[k] for k in room)
        return Pulled(action.ask, len(room), moved_bytes, full=len(room) < len(given), missing=missing)

    def _take(self, length: int) -> bool:
        if length > self.room_bytes:
            return False
        self.room_bytes -= length
        return True

    @property
    def idle(self) -> bool:
        return not self._due and self.planner.next_deadline_s == float("inf")

    def step(self) -> None:
        """To the next answer or deadline."""
        due_s = self._due[0][0] if self._due else float("inf")
        if self.planner.next_deadline_s < due_s:
            self.now_s = max(self.now_s, self.planner.next_deadline_s)
            self.handle(Elapsed())
        else:
            self.now_s, _, _, answer = heapq.heappop(self._due)
            self.handle(answer())

    def run(self, until_s: float = 1e9) -> None:
        """Until nothing is left to do, or the time."""
        while not self.idle and self.now_s < until_s:
            self.step()
