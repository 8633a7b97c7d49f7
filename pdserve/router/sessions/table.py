"""The session table: which workers answered a session last, and with which request.

Bounded in size (the longest unseen session goes first) and in time (TTL). It holds no truth that cannot be
lost: without an entry the rendezvous hash of the key finds the same worker at every router, and the
worker's pages are in the pool.
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
    """The prefill worker of its last turn that had one."""
    tokens: int = 0
    """What the decode worker has of the conversation, prompt and answer, in tokens; 0: not known."""
    answered: bool = False
    """The answer is whole. Until then there is nothing to wait for: who did not see its end cannot go on."""
    incarnation: str = ""
    """Of the decode worker: another one has lost what it had. Empty: another router's word, not known."""
    turns: int = 1
    """So many turns the session has had, this one counted."""

    def is_after(self, other: SessionEntry) -> bool:
        """Whether it is of a later turn. Turns are not numbered for good: a forgotten session begins anew."""
        is_same = (self.request_id, self.turns) == (other.request_id, other.turns)
        return not is_same and self.seen_s > other.seen_s


class SessionTable:
    """`capacity` sessions at most, each forgotten `ttl_s` after it was last recorded."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._entries: OrderedDict[str, SessionEntry] = OrderedDict()
        # Ordered by `seen_s`, oldest first: `record` moves to the end, and time does not go backwards.

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: SessionKey, now_s: float) -> SessionEntry | None:
        """The session's last turn, by its last link that is known, unless it is older than the TTL."""
        entries = self._entries
        for link in reversed(key.links):
            entry = entries.get(link)
            if entry is not None:
                if now_s - entry.seen_s <= self.ttl_s:
                    return entry
                del entries[link]
        return None

    def record(self, key: SessionKey, entry: SessionEntry) -> None:
        """The session's turn is being answered, or was. `entry.seen_s` is now."""
        entries, last = self._entries, key.links[-1]
        entries[last] = entry
        entries.move_to_end(last)
        for link in key.links[:-1]:  # the turn before: it is not asked for again
            entries.pop(link, None)
        if len(entries) > self.capacity:
            entries.popitem(last=False)
        self.expire(entry.seen_s, limit=2)

    def expire(self, now_s: float, limit: int) -> None:
        """Forget up to `limit` sessions that are past their TTL; two per new record keep the table clean."""
        for _ in range(min(limit, len(self._entries))):
            key = next(iter(self._entries))
            if now_s - self._entries[key].seen_s <= self.ttl_s:
                return
            del self._entries[key]
