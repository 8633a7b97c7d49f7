"""The session table: the workers and the request id of each session's last turn.

The table is bounded in size (the least recently seen session is dropped first) and in time (TTL). Losing an
entry is harmless: the rendezvous hash of the key finds the same worker at every router, and the session's
pages are in the pool.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from pdserve.router.sessions.keys import SessionKey


class SessionEntry(msgspec.Struct, frozen=True, gc=False):
    """The last turn of one session."""

    request_id: str
    decode_id: str
    seen_s: float
    prefill_id: str = ""
    """The prefill worker of the session's last turn that had one."""
    tokens: int = 0
    """Tokens of the conversation (prompt and answer) in the decode worker's memory. 0: unknown."""
    answered: bool = False
    """The answer is complete. The client's next turn cannot start earlier."""
    incarnation: str = ""
    """Of the decode worker: a restarted worker has lost its cache. Empty: unknown (other router)."""
    turns: int = 1
    """Number of turns that the session has had, including this one."""

    def is_after(self, other: SessionEntry) -> bool:
        """Whether this turn is later. Times decide: a forgotten session counts its turns from 1 again."""
        is_same = (self.request_id, self.turns) == (other.request_id, other.turns)
        return not is_same and self.seen_s > other.seen_s


class SessionTable:
    """At most `capacity` sessions. Each is forgotten `ttl_s` after its last record."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._entries: OrderedDict[str, SessionEntry] = OrderedDict()
        # Ordered by `seen_s`, oldest first: `record` moves to the end, and time does not go backwards.

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: SessionKey, now_s: float) -> SessionEntry | None:
        """The session's last turn, by its last known link. None: unknown, or older than the TTL."""
        entries = self._entries
        for link in reversed(key.links):
            entry = entries.get(link)
            if entry is not None:
                if now_s - entry.seen_s <= self.ttl_s:
                    return entry
                del entries[link]
        return None

    def record(self, key: SessionKey, entry: SessionEntry) -> None:
        """Store the session's last turn (answering or answered). `entry.seen_s` is the present time."""
        entries, last = self._entries, key.links[-1]
        entries[last] = entry
        entries.move_to_end(last)
        for link in key.links[:-1]:  # the turn before is not needed any more
            entries.pop(link, None)
        if len(entries) > self.capacity:
            entries.popitem(last=False)
        self.expire(entry.seen_s, limit=2)

    def expire(self, now_s: float, limit: int) -> None:
        """Forget at most `limit` sessions older than the TTL. Two per new record suffice."""
        for _ in range(min(limit, len(self._entries))):
            key = next(iter(self._entries))
            if now_s - self._entries[key].seen_s <= self.ttl_s:
                return
            del self._entries[key]
