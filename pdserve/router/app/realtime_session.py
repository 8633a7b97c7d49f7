"""What is noted of a session of `/v1/realtime`: metrics by model, and a line in the access log."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from pdserve.router.app.accounting import ACCESS_LOG
from pdserve.router.metrics.stats import Stats
from pdserve.router.server.websocket import MessageCounter

ROUTE: Final = "/v1/realtime"
SWITCHED: Final = 101
Side: TypeAlias = Literal["client", "worker"]
EndedBy: TypeAlias = Literal["client", "worker", "slow", "deadline", "router"]
"""client, worker: closed the WebSocket, or left. slow: one of them took nothing for its time. deadline: the
session's time was up. router: it stops, or has failed.
"""


class Session:
    """One connection, from its head until one end leaves, or until it is refused."""

    def __init__(self, stats: Stats, now_s: float) -> None:
        self._stats = stats
        self._counters: dict[Side, MessageCounter] = {"client": MessageCounter(), "worker": MessageCounter()}
        self._begun_s = now_s
        self._opened_s: float | None = None
        self.status = 0
        """Of HTTP, 101: it was opened; 0: there was no answer."""
        self.tenant = ""
        self.model = ""
        self.worker = b""
        self.tokens = 0
        """That the tenant was charged."""
        self.ended_by: EndedBy | None = None

    def open(self, worker: bytes, now_s: float) -> None:
        """The worker has said 101, and `model` is known."""
        self.worker, self.status, self._opened_s = worker, SWITCHED, now_s
        self._stats.realtime_open[self.model] += 1

    def pass_on(self, piece: bytes, sender: Side) -> None:
        """Count what one end has sent."""
        counter = self._counters[sender]
        if messages := counter.take(piece):
            self._stats.realtime_messages[self.model, sender] += messages
        if counter.has_closed and self.ended_by is None:
            self.ended_by = sender

    def end(self, now_s: float) -> None:
        """Count the session."""
        self._stats.requests[ROUTE, str(self.status or "aborted")] += 1
        if self._opened_s is None:
            return
        self._stats.realtime_open[self.model] -= 1
        self._stats.realtime_sessions[self.model, self.ended_by or "router"] += 1
        self._stats.realtime_seconds[self.model].observe(now_s - self._opened_s)

    def log(self, now_s: float) -> None:
        """Write the session's line. It holds nothing that was said, and no key."""
        opened_s = self._opened_s
        said: dict[str, Any] = {
            "route": ROUTE,
            "status": self.status or "aborted",
            "tenant": self.tenant,
            "model": self.model,
            "seconds": round(now_s - self._begun_s, 4),
            "first_byte_s": None if opened_s is None else round(opened_s - self._begun_s, 4),
            "prompt_tokens": self.tokens,
            **{f"messages_from_{side}": of.messages for side, of in self._counters.items()},
        }
        if opened_s is not None:
            said["x-pdserve-decode"] = self.worker.decode()
            said["ended_by"] = self.ended_by or "router"
        ACCESS_LOG.info("session", extra=said)
