"""Whether a client tries a node: one set of rules for the threads' client and the asyncio client. Pure.

    UP          operations use connections
    RESTARTING  the node said that it would be back in a moment (an upgrade): operations wait for it, their
                deadline put off (deadline.py), while one runner connects anew for `restart_wait_s`
    DOWN        every operation is refused at once, without touching the network, while one runner connects
                anew every `retry_after_s`. Where nobody listens, trying costs next to nothing and a restart
                is likely: such a node is tried whenever it has been away for a twentieth longer

So a dead pool costs a request one short deadline in all, not one per page, and a node that came back is
noticed without a request paying for the attempt.

    state        event            next         actions
    UP           Lost STALE       UP           DropIdle
    UP           Lost RESTARTING  RESTARTING   DropIdle, Try at once
    UP           Lost FAILED      DOWN         DropIdle, Try after a pause
    UP           Lost ABSENT      DOWN         DropIdle, Try after a short pause
    other        Lost             same         DropIdle
    RESTARTING   TryFailed        RESTARTING   Try again; DOWN when `restart_wait_s` are over
    DOWN         TryFailed        DOWN         Try again
    not UP       TrySucceeded     UP
    not UP       NoRunner         DOWN         none; Asked makes it Try, once `retry_after_s` are over
    any          Close            CLOSED       DropIdle

At most one Try is open at a time. A Lost of a connection that was opened before the last one changes nothing:
`generation` tells. The runners (connection_pool.py, async_link.py) carry actions out and feed events back.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from pdserve.errors import PoolError, PoolRestarting, PoolUnavailable

RESTART_RETRY_S: Final = 0.02
RETRY_SHARE: Final = 0.05  # of the time that a node has been away


class NodeState(enum.Enum):
    """See above."""

    UP = "up"
    RESTARTING = "restarting"
    DOWN = "down"
    CLOSED = "closed"


class Cause(enum.Enum):
    """Why a connection is of no use any more."""

    STALE = "stale"  # it was idle, and is found closed: that says nothing of the node
    RESTARTING = "restarting"  # the node said so
    ABSENT = "absent"  # nobody could be connected to
    FAILED = "failed"


def cause_of(error: PoolError, *, connected: bool, excusable: bool) -> Cause:
    """`excusable`: the connection may have been closed before this operation, which can be repeated."""
    if isinstance(error, PoolRestarting):
        return Cause.RESTARTING
    if not isinstance(error, PoolUnavailable):
        return Cause.FAILED
    if not connected:
        return Cause.ABSENT
    return Cause.STALE if excusable else Cause.FAILED


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection of `generation`, or the attempt to open one, ended by `error`."""

    generation: int
    cause: Cause
    error: PoolError


@dataclass(frozen=True, slots=True)
class TrySucceeded:
    """The node takes connections, and has opened our namespace."""


@dataclass(frozen=True, slots=True)
class TryFailed:
    """It does not."""


@dataclass(frozen=True, slots=True)
class NoRunner:
    """The action Try cannot be carried out now: no thread is to be had."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation wanted the node while it was DOWN."""


@dataclass(frozen=True, slots=True)
class Close:
    """The client closes."""


Event: TypeAlias = Lost | TrySucceeded | TryFailed | NoRunner | Asked | Close


@dataclass(frozen=True, slots=True)
class DropIdle:
    """Close the connections that are not in use: they were opened under an earlier `generation`."""


@dataclass(frozen=True, slots=True)
class Try:
    """In the background: wait until `at_s`, connect, and feed the outcome. `lost`: first tell that the node
    cannot be reached.
    """

    at_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the operator."""

    level: int
    text: str


Action: TypeAlias = DropIdle | Try | Log


class NodeHealth:
    """One node, as one client sees it. Not thread-safe. Times are of `time.monotonic()`."""

    def __init__(self, name: str, *, retry_after_s: float, restart_wait_s: float) -> None:
        self.name = name
        self.state = NodeState.UP
        self.generation = 0  # connections opened under an earlier one are closed, not reused
        self._retry_after_s = retry_after_s
        self._restart_wait_s = restart_wait_s
        self._restart_until_s = 0.0
        self._down_since_s = 0.0
        self._absent = False  # nobody listened when it went DOWN
        self._tell_lost_at_s = 0.0
        self._try_when_asked_at_s = float("inf")

    @property
    def reachable(self) -> bool:
        """Up, or back in a moment."""
        return self.state in (NodeState.UP, NodeState.RESTARTING)

    def check(self) -> None:
        """Raises PoolUnavailable where operations are refused at once."""
        if self.state is NodeState.CLOSED:
            raise PoolUnavailable(f"pool node {self.name}: the client is closed")
        if self.state is NodeState.DOWN:
            raise PoolUnavailable(f"pool node {self.name} is down")

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done about it. Nothing after Close."""
        if self.state is NodeState.CLOSED:
            return []
        match event:
            case Lost():
                return self._lost(event, now_s) if event.generation == self.generation else []
            case TrySucceeded():
                was, self.state = self.state, NodeState.UP
                return [Log(logging.INFO, "is up again")] if was is not NodeState.UP else []
            case TryFailed():
                return self._try_failed(now_s)
            case NoRunner():
                self.state = NodeState.DOWN
                self._try_when_asked_at_s = now_s + self._retry_after_s
                return [Log(logging.WARNING, "is not tried for now: no thread can be started")]
            case Asked():
                if self.state is not NodeState.DOWN or now_s < self._try_when_asked_at_s:
                    return []
                self._try_when_asked_at_s = float("inf")
                return [self._go_down(now_s, absent=True)]
            case Close():
                self.state = NodeState.CLOSED
                self.generation += 1
                return [DropIdle()]
            case _:
                assert_never(event)

    def _lost(self, event: Lost, now_s: float) -> list[Action]:
        self.generation += 1
        if self.state is not NodeState.UP or event.cause is Cause.STALE:
            return [DropIdle()]
        if event.cause is Cause.RESTARTING:
            self.state = NodeState.RESTARTING
            self._restart_until_s = now_s + self._restart_wait_s
            return [DropIdle(), Log(logging.INFO, f"restarts: {event.error}"), Try(now_s)]
        text = f"is down, its pages are recomputed: {event.error}"
        retry = self._go_down(now_s, absent=event.cause is Cause.ABSENT)
        return [DropIdle(), Log(logging.WARNING, text), retry]

    def _try_failed(self, now_s: float) -> list[Action]:
        if self.state is NodeState.UP:
            return []
        if self.state is NodeState.DOWN:
            return [self._try_later(now_s)]
        if now_s + RESTART_RETRY_S < self._restart_until_s:
            return [Try(now_s + RESTART_RETRY_S)]
        text = f"did not come back within {self._restart_wait_s:.0f} s: it is down, its pages are recomputed"
        return [Log(logging.WARNING, text), self._go_down(now_s, absent=False)]

    def _go_down(self, now_s: float, *, absent: bool) -> Try:
        self.state = NodeState.DOWN
        self._down_since_s = self._tell_lost_at_s = now_s
        self._absent = absent
        return self._try_later(now_s)

    def _try_later(self, now_s: float) -> Try:
        pause_s = self._retry_after_s
        if self._absent:
            pause_s = min(pause_s, max(RESTART_RETRY_S, RETRY_SHARE * (now_s - self._down_since_s)))
        lost = now_s >= self._tell_lost_at_s
        if lost:
            self._tell_lost_at_s = now_s + self._retry_after_s
        return Try(now_s + pause_s, lost)
