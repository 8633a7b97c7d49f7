"""When a worker that was asked to stop may end.

    serving --begin--> draining --is_over--> closed

A draining worker says so on `/pd/ready`, so that routers send it nothing new. A router learns of it at its
next probe, so requests that arrive until then are served. The drain is over when three things hold: every
connected router knows, no request runs, and no page of an answered request is on its way to the pool. It is
also over when its time is up, or when the worker is asked to stop once more. Requests that still run then are
aborted.

Pure: `now_s` is any clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TypeAlias

Client: TypeAlias = tuple[str, int]
"""Host and port at the other end of a connection."""

ASKED_LATELY_S = 10.0
"""A client that has not asked for this long is no router that probes."""


class Drain:
    """The end of one worker. `connected` gives the clients that hold a connection to it now."""

    def __init__(self, grace_s: float, notice_s: float, connected: Callable[[], Set[Client]]) -> None:
        """`grace_s`: longest drain; `notice_s`: longest wait for routers to hear of it."""
        self.is_closed = False
        """New requests are refused."""
        self.running = 0
        """HTTP requests being answered."""
        self._grace_s = grace_s
        self._notice_s = notice_s
        self._connected = connected
        self._pending: list[Callable[[], int]] = []
        self._asked_s: dict[Client, float] = {}
        self._begun_s: float | None = None
        self._is_hurried = False

    @property
    def is_draining(self) -> bool:
        """The worker was asked to stop."""
        return self._begun_s is not None

    def add(self, pending: Callable[[], int]) -> None:
        """Wait also until `pending` returns 0."""
        self._pending.append(pending)

    def asked(self, client: Client, now_s: float) -> None:
        """A client asks whether the worker is ready, and is answered."""
        self._asked_s.pop(client, None)
        if not self.is_draining:
            self._asked_s[client] = now_s
            while now_s - self._asked_s[first := next(iter(self._asked_s))] > ASKED_LATELY_S:
                del self._asked_s[first]

    def begin(self, now_s: float) -> None:
        """The worker is asked to stop. A second call ends the drain at once."""
        self._is_hurried = self.is_draining
        self._begun_s = now_s if self._begun_s is None else self._begun_s

    def left_s(self, now_s: float) -> float:
        """How long the drain may take from now on."""
        if self._begun_s is None or self._is_hurried:
            return 0.0
        return max(0.0, self._begun_s + self._grace_s - now_s)

    def is_over(self, now_s: float) -> bool:
        """Nothing is left to wait for. From then on new requests are refused."""
        assert self._begun_s is not None
        since_s = now_s - self._begun_s
        self.is_closed = self.left_s(now_s) == 0.0 or (
            self.running == 0
            and not any(pending() for pending in self._pending)
            and (since_s >= self._notice_s or not self._to_be_told(now_s))
        )
        return self.is_closed

    def _to_be_told(self, now_s: float) -> Set[Client]:
        lately = {client for client, at_s in self._asked_s.items() if now_s - at_s <= ASKED_LATELY_S}
        return lately & self._connected() if lately else lately
