"""The health of a node as a client sees it: the rules of the threads' client and the asyncio client. Pure.

    UP          operations use connections
    RESTARTING  the node announced a short restart (an upgrade): operations wait for it with an extended
                deadline (deadline.py), while one runner tries to connect for `restart_wait_s`. Its pauses
                grow with the time that has passed: tries take processor time from the node that starts
    DOWN        every operation is refused at once, without network traffic, while one runner tries to
                connect every `retry_after_s`. If the port is closed, a try costs little and a restart is
                likely. Then the pauses are shorter: a twentieth of the time since the node went down

So a dead pool costs a request only one short deadline in total, not one per page. No request pays for the
tries that notice a node's return.

    state        event            next         actions
    UP           Lost STALE       UP           DropIdle
    UP           Lost REFUSED     UP           DropIdle
    UP           Lost RESTARTING  RESTARTING   DropIdle, Try at once
    UP           Lost FAILED      DOWN         DropIdle, Try after a pause
    UP           Lost ABSENT      DOWN         DropIdle, Try after a short pause
    other        Lost             same         DropIdle
    RESTARTING   TryFailed        RESTARTING   Try again; DOWN when `restart_wait_s` are over
    DOWN         TryFailed        DOWN         Try again
    not UP       TrySucceeded     UP
    not UP       NoRunner         DOWN         none; Asked makes it Try, once `retry_after_s` are over
    any          Close            CLOSED       DropIdle

At most one Try is open at a time. A Lost of an earlier `generation` of connections changes nothing. The
runners (connection_pool.py, async_link.py) carry out the actions and report events.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from pdserve.errors import PoolError, PoolRestarting, PoolUnavailable, RequestRefused

RESTART_RETRY_S: Final = 0.02
RETRY_SHARE: Final = 0.05  # of the time since the node went down, or began to restart


PASSING: Final = frozenset(("overloaded", "too_many_waiters", "not_durable", "not_erased", "not_everywhere"))
"""Codes of Faults after which the connection is as good as before."""


class NodeState(enum.Enum):
    """The states in the module's table."""

    UP = "up"
    RESTARTING = "restarting"
    DOWN = "down"
    CLOSED = "closed"


class Cause(enum.Enum):
    """The reason why a connection was lost."""

    STALE = "stale"  # an idle connection was found closed: it does not count against the node
    RESTARTING = "restarting"  # the node announced it
    ABSENT = "absent"  # no connection could be opened
    REFUSED = "refused"  # the node refused one request, of a namespace that was dropped, say
    FAILED = "failed"


def cause_of(error: PoolError, *, connected: bool, excusable: bool) -> Cause:
    """The cause of an error.

    `excusable`: the connection may have been closed before, and a repeat is safe.
    """
    if isinstance(error, PoolRestarting):
        return Cause.RESTARTING
    if isinstance(error, RequestRefused) and connected:
        return Cause.REFUSED  # where the next connection is refused too, that counts
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
    """A Try has connected and opened our namespace."""


@dataclass(frozen=True, slots=True)
class TryFailed:
    """A Try has failed."""


@dataclass(frozen=True, slots=True)
class NoRunner:
    """The action Try cannot be carried out now, because no thread can be started."""


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
    """In the background: wait until `at_s`, connect, and report the outcome."""

    at_s: float


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
        self.generation = 0  # connections of an earlier generation are closed, not reused
        self._retry_after_s = retry_after_s
        self._restart_wait_s = restart_wait_s
        self._restart_until_s = 0.0
        self._down_since_s = 0.0
        self._absent = False  # its port was closed when it went DOWN
        self._try_when_asked_at_s = float("inf")

    @property
    def reachable(self) -> bool:
        """The node is up or restarting."""
        return self.state in (NodeState.UP, NodeState.RESTARTING)

    def check(self) -> None:
        """Raises PoolUnavailable if operations are refused at present."""
        if self.state is NodeState.CLOSED:
            raise PoolUnavailable(f"pool node {self.name}: the client is closed")
        if self.state is NodeState.DOWN:
            raise PoolUnavailable(f"pool node {self.name} is down")

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Process the event. Returns the actions; none after Close."""
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
        if self.state is not NodeState.UP or event.cause in (Cause.STALE, Cause.REFUSED):
            return [DropIdle()]
        if event.cause is Cause.RESTARTING:
            self.state = NodeState.RESTARTING
            self._restart_until_s = now_s + self._restart_wait_s
            return [DropIdle(), Log(logging.INFO, f"restarts: {event.error}"), Try(now_s)]
        text = f"cannot be used, its pages are recomputed: {event.error}"
        retry = self._go_down(now_s, absent=event.cause is Cause.ABSENT)
        return [DropIdle(), Log(logging.WARNING, text), retry]

    def _try_failed(self, now_s: float) -> list[Action]:
        if self.state is NodeState.UP:
            return []
        if self.state is NodeState.DOWN:
            return [self._try_later(now_s)]
        since_s = now_s - (self._restart_until_s - self._restart_wait_s)
        pause_s = max(RESTART_RETRY_S, RETRY_SHARE * since_s)
        if now_s + pause_s < self._restart_until_s:
            return [Try(now_s + pause_s)]
        text = f"did not come back within {self._restart_wait_s:.0f} s: it is down, its pages are recomputed"
        return [Log(logging.WARNING, text), self._go_down(now_s, absent=False)]

    def _go_down(self, now_s: float, *, absent: bool) -> Try:
        self.state = NodeState.DOWN
        self._down_since_s = now_s
        self._absent = absent
        return self._try_later(now_s)

    def _try_later(self, now_s: float) -> Try:
        pause_s = self._retry_after_s
        if self._absent:
            pause_s = min(pause_s, max(RESTART_RETRY_S, RETRY_SHARE * (now_s - self._down_since_s)))
        return Try(now_s + pause_s)
