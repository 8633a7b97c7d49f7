"""The session table: the workers and the request id of each session's last turn.

The table is bounded in size (the least recently seen session is dropped first) and in time (TTL). Losing an
entry is harmless: the rendezvous hash of the key finds the same worker at every router, and the session's
pages are in the pool.

Turns that other processes had are merged into it (`sharing.gossip`): of two turns the later one counts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from pdserve.router.sessions.keys import SessionKey

MAX_WORKERS: Final = 16
OTHERS: Final = ("", 0)
MAX_NEWS: Final = 10_000
"""Sessions whose last turn the others have yet to be told; the oldest is dropped first."""


class SessionEntry(msgspec.Struct, gc=False, array_like=True):
    """The last turn of one session, while it is that. Processes tell it each other: fields are only added, at
    the end.
    """

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
    """Of the decode worker: a restarted worker has lost its cache. Empty: another process knew it."""
    turns: int = 1
    """Number of turns that the session has had, including this one."""
    shared_tokens: int = 0
    """Of its first prompt, those that a cache had: other sessions may begin with them too."""
    workers: tuple[tuple[str, int], ...] = ()
    """Of a session that its client names, all workers that have computed for it: `WorkerInfo.info_tag`, and
    the number of the first turn there. The last of `MAX_WORKERS` stands for more."""


def with_workers(
    known: tuple[tuple[str, int], ...], more: Iterable[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """All of a session's workers, each with the first of its turns; `known` itself where they are no more."""
    first = dict(known)
    is_more = False
    for tag, turn in more:
        if tag not in first or turn < first[tag]:
            first[tag] = turn
            is_more = True
    if not is_more:
        return known
    found = tuple(first.items())
    if len(found) >= MAX_WORKERS:
        found = (*[one for one in found if one != OTHERS][: MAX_WORKERS - 1], OTHERS)
    return known if found == known else found


def digest(link: str) -> str:
    """What stands for a link where others than this host's processes may see it."""
    return hashlib.blake2b(link.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


class SessionTable:
    """At most `capacity` sessions. Each is forgotten `ttl_s` after its last record."""

    def __init__(self, capacity: int, ttl_s: float, *, is_private: bool = False) -> None:
        """`is_private`: the table holds digests of links, and so what is told of it does."""
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.news: dict[str, tuple[SessionEntry | None, tuple[str, ...]]] | None = None
        """Link → (a new entry, or None where the session is over; links that it has replaced), to be told
        others. Whoever tells them makes it a dictionary, and takes it away."""
        self.on_news: Callable[[], None] | None = None
        """Is called at the first of `news`."""
        self._name: Callable[[str], str] = digest if is_private else str
        self._entries: OrderedDict[str, SessionEntry] = OrderedDict()
        self._due_s = 0.0
        """Before this time no session is older than the TTL."""
        # Ordered by `seen_s`, oldest first, but for turns of others, which come a moment later.

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[str, SessionEntry]]:
        """All sessions as they are now, by link, the oldest first."""
        return list(self._entries.items())

    def get(self, key: SessionKey, now_s: float) -> SessionEntry | None:
        """The session's last turn, by its last known link. None: unknown, or older than the TTL."""
        for link in map(self._name, key.links[::-1]):
            entry = self._entries.get(link)
            if entry is not None:
                if now_s - entry.seen_s <= self.ttl_s:
                    return entry
                del self._entries[link]
        return None

    def record(self, key: SessionKey, entry: SessionEntry) -> None:
        """Store the session's last turn, which is being answered. `entry.seen_s` is the present time."""
        *earlier, link = map(self._name, key.links)
        replaced = [one for one in earlier if one in self._entries] if earlier else earlier
        self._put(link, replaced, entry)
        if self.news is not None:
            self._tell(self.news, link, replaced, entry)

    def complete(self, key: SessionKey, entry: SessionEntry, answer_tokens: int, now_s: float) -> None:
        """The turn is answered, with so many tokens. Nothing happens where it is no longer the last one."""
        link = self._name(key.links[-1])
        if self._entries.get(link) is entry:
            entry.tokens += answer_tokens
            entry.seen_s, entry.answered = now_s, True
            self._entries.move_to_end(link)
            if self.news is not None:
                self._tell(self.news, link, (), entry)

    def _tell(
        self,
        news: dict[str, tuple[SessionEntry | None, tuple[str, ...]]],
        link: str,
        replaced: Iterable[str],
        entry: SessionEntry | None,
    ) -> None:
        told = news.pop(link, None)
        if len(news) >= MAX_NEWS:
            del news[next(iter(news))]
        news[link] = entry, (*(told[1] if told else ()), *replaced)
        if len(news) == 1 and self.on_news is not None:
            self.on_news()

    def merge(self, link: str, replaced: tuple[str, ...], entry: SessionEntry | None, seen_s: float) -> None:
        """Another process had this turn at `seen_s`, or was told then that the session is over (None). It
        counts unless a later turn is known; the workers of both are the session's.
        """
        entries = self._entries
        if entry is None:
            for one in (link, *replaced):
                if one in entries and entries[one].seen_s <= seen_s:
                    del entries[one]
            return
        known = entries.get(link)
        if known is not None:
            workers = with_workers(known.workers, entry.workers)
            if entry.seen_s <= known.seen_s:
                known.workers = workers
                return
            entry.workers = workers
        self._put(link, replaced, entry)

    def _put(self, link: str, replaced: Iterable[str], entry: SessionEntry) -> None:
        entries = self._entries
        entries[link] = entry
        entries.move_to_end(link)
        for earlier in replaced:  # the turn before is not needed any more
            entries.pop(earlier, None)
        if len(entries) > self.capacity:
            entries.popitem(last=False)
        if entry.seen_s >= self._due_s:
            self.expire(entry.seen_s, limit=2)

    def forget(self, key: SessionKey) -> None:
        """The session is over, here and at the other processes."""
        *replaced, link = map(self._name, key.links)
        for one in (*replaced, link):
            self._entries.pop(one, None)
        if self.news is not None:
            self._tell(self.news, link, replaced, None)

    def expire(self, now_s: float, limit: int) -> None:
        """Forget at most `limit` sessions older than the TTL. Two per new record suffice."""
        entries = self._entries
        while entries:
            key = next(iter(entries))
            self._due_s = entries[key].seen_s + self.ttl_s
            if now_s <= self._due_s or not limit:
                return
            del entries[key]
            limit -= 1
