"""The session table: which decode worker answered a session last, and with which request.

Bounded in size (the longest unseen session goes first) and in time (TTL). It holds no truth that cannot be
lost: without an entry the rendezvous hash of the key finds the same worker at every router, and the
worker's pages are in the pool.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class SessionEntry(msgspec.Struct, frozen=True, gc=False):
    """The last turn of one session."""

    request_id: str
    decode_id: str
    seen_s: float


class SessionTable:
    """`capacity` sessions at most, each forgotten `ttl_s` after it was last recorded."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._entries: OrderedDict[str, SessionEntry] = OrderedDict()
        # Ordered by `seen_s`, oldest first: `record` moves to the end, and time does not go backwards.

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str, now_s: float) -> SessionEntry | None:
        """The session's last turn, unless it is older than the TTL."""
        entry = self._entries.get(key)
        if entry is not None and now_s - entry.seen_s > self.ttl_s:
            del self._entries[key]
            return None
        return entry

    def record(self, key: str, request_id: str, decode_id: str, now_s: float) -> None:
        """The session's turn `request_id` is being answered by `decode_id`."""
        entries = self._entries
        entries[key] = SessionEntry(request_id, decode_id, now_s)
        entries.move_to_end(key)
        if len(entries) > self.capacity:
            entries.popitem(last=False)
        self.expire(now_s, limit=2)

    def expire(self, now_s: float, limit: int) -> None:
        """Forget up to `limit` sessions that are past their TTL; two per new record keep the table clean."""
        for _ in range(min(limit, len(self._entries))):
            key = next(iter(self._entries))
            if now_s - self._entries[key].seen_s <= self.ttl_s:
                return
            del self._entries[key]
