"""The tables of sessions: a process's own one, and the one in Redis that routers share.

The session table: the workers and the request id of each session's last turn.

The table is bounded in size (the least recently seen session is dropped first) and in time (TTL). Losing an
entry is harmless: the rendezvous hash of the key finds the same worker at every router, and the session's
pages are in the pool.

A connection to Redis by the table `redis` of the configuration. The package is optional.

The session table that router replicas share, in Redis. Optional.

Without it replicas agree while the fleet does not change: the rendezvous hash of a session's name is equal
everywhere. The table adds memory across replicas and restarts. A session that had to move (its worker was
overloaded, gone or new) is found at its new worker, and its next turn waits for the right request's pages.

- Redis may be wrong, late or absent. A request waits at most `lookup_s`; then the router's own table serves.
  After a failure Redis is not used for `retry_s`.
- Writes are asynchronous, in batches, with the newest entry of each session. Beyond `MAX_WAITING` waiting
  sessions, new entries are dropped.
- So an entry in Redis may be older than the router's own, and the newer one counts. The number of turns does
  not show which is newer, since a forgotten session counts from 1 again. Each entry has the Unix time of its
  turn. Routers' clocks must agree to within the time between two turns.
- Keys are hashed: Redis gets no session names and no text of prompts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import time
from collections import OrderedDict
from typing import Any

import msgspec

from pdserve.errors import ConfigError
from pdserve.extras import needed_by
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.config.limits import RedisSettings
from pdserve.router.metrics.stats import Stats
from pdserve.router.sessions.keys import SessionKey
from pdserve.security.tokens import given_secret


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


CONNECTIONS = 16


def connect(settings: RedisSettings, timeout_s: float) -> tuple[Any, tuple[type[BaseException], ...]]:
    """(client, exceptions that it raises). Nothing is sent yet. `timeout_s`: of one exchange. Raises
    ConfigError.
    """
    with needed_by("redis.url", "redis"):
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.connection import parse_url
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    password = given_secret(settings.password, "PDSERVE_REDIS_PASSWORD", os.environ)
    own = {"password": password} if password else {}
    try:
        # by its own parser: a password may also stand in the query
        if any("password" in part.lower() for part in parse_url(settings.url)):
            raise ConfigError(
                "redis.url holds a password, which would be shown with it: put the password into "
                "redis.password_file, or PDSERVE_REDIS_PASSWORD"
            )
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **own,
        )
        pool.make_connection()  # connects nowhere; an unknown option fails here, not in each request
    except (ValueError, TypeError, RedisError):
        # their text may hold a part of the URL
        raise ConfigError(
            "redis.url is none that Redis' client takes: give redis://HOST:PORT/DB, rediss:// or "
            "unix://PATH, with options of redis-py's connections"
        ) from None
    return Redis(connection_pool=pool), (RedisError, OSError, TimeoutError)


logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_BATCH = 500
BATCH_TIMEOUTS = 10
"""A batch has so many times as long as a look-up."""


class _Stored(msgspec.Struct, array_like=True):
    """A value in Redis; fields are only added, at the end, with defaults."""

    request_id: str
    decode_id: str
    prefill_id: str = ""
    tokens: int = 0
    answered: bool = False
    turns: int = 1
    seen_unix_s: float = math.inf
    """inf: an older version of pdserve wrote the entry. It counts as new."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


def _first_of(values: object) -> _Stored | None:
    """The first entry that there is. None also for what another program wrote, or a newer version."""
    known = [value for value in values if value is not None] if isinstance(values, list) else []
    try:
        return _decoder.decode(known[0]) if known and isinstance(known[0], bytes) else None
    except UNREADABLE:
        return None


class SharedSessions:
    """The table in Redis. The constructor raises ConfigError; later failures are only logged."""

    def __init__(self, settings: RedisSettings, ttl_s: float, stats: Stats) -> None:
        """`ttl_s`: entries in Redis end so long after their turn."""
        self._settings = settings
        self._ttl_s = math.ceil(ttl_s)
        self._stats = stats
        self._redis, self._errors = connect(settings, settings.lookup_s)
        self._loop = asyncio.get_running_loop()
        self._away_until_s = -math.inf
        self._waiting: dict[str, tuple[SessionEntry, tuple[str, ...]]] = {}
        """Entries to write: last link → (entry, links that it replaces), oldest first."""
        self._wake = asyncio.Event()
        self._is_closing = False
        self._writer = self._loop.create_task(self._write_all(), name="router-shared-sessions")

    async def close(self) -> None:
        """Write waiting entries, for at most the time of one batch, and close the connections."""
        self._is_closing = True
        self._wake.set()
        _, late = await asyncio.wait({self._writer}, timeout=self._settings.lookup_s * BATCH_TIMEOUTS)
        if late:
            logger.warning("%d sessions were not written to Redis in time", len(self._waiting))
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._redis.aclose()

    async def get(self, key: SessionKey) -> SessionEntry | None:
        """The session's last turn, by its last known link. None: not known, or Redis does not answer."""
        if self._is_away():
            return None
        for link in reversed(key.links):
            if link in self._waiting:
                return self._waiting[link][0]
        try:
            async with asyncio.timeout(self._settings.lookup_s):
                values = await self._redis.mget([self._name(link) for link in reversed(key.links)])
        except self._errors as error:
            self._failed(error)
            return None
        self._worked()
        found = _first_of(values)
        if found is None:
            return None
        age_s = max(0.0, time.time() - found.seen_unix_s)
        return SessionEntry(
            found.request_id,
            found.decode_id,
            self._loop.time() - age_s,
            found.prefill_id,
            found.tokens,
            found.answered,
            turns=found.turns,
        )

    def record(self, key: SessionKey, entry: SessionEntry) -> None:
        """Queue the session's last turn (answering or answered) to be written."""
        last = key.links[-1]
        if self._is_away() or (len(self._waiting) >= MAX_WAITING and last not in self._waiting):
            return
        self._waiting[last] = entry, key.links[:-1]
        self._wake.set()

    async def _write_all(self) -> None:
        while not self._is_closing:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._write()

    async def _write(self) -> None:
        """Write one batch. A failed batch is lost."""
        batch = dict(list(self._waiting.items())[:MAX_BATCH])
        unix_s = time.time() - self._loop.time()
        for link in batch:
            del self._waiting[link]
        if not batch:
            return
        try:
            async with asyncio.timeout(self._settings.lookup_s * BATCH_TIMEOUTS):
                pipeline = self._redis.pipeline(transaction=False)
                for link, (entry, replaced) in batch.items():
                    value = _Stored(
                        entry.request_id,
                        entry.decode_id,
                        entry.prefill_id,
                        entry.tokens,
                        entry.answered,
                        entry.turns,
                        unix_s + entry.seen_s,
                    )
                    pipeline.set(self._name(link), _encoder.encode(value), ex=self._ttl_s)
                    if replaced:
                        pipeline.delete(*map(self._name, replaced))
                await pipeline.execute()
        except self._errors as error:
            self._failed(error)
        else:
            self._worked()

    def _name(self, link: str) -> str:
        digest = hashlib.blake2b(link.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return f"{self._settings.prefix}session:{digest}"

    def _is_away(self) -> bool:
        return self._loop.time() < self._away_until_s

    def _worked(self) -> None:
        if self._stats.sessions_apart:
            self._stats.sessions_apart = 0
            logger.info("the session table in Redis answers again")

    def _failed(self, error: BaseException) -> None:
        if not self._stats.sessions_apart:
            self._stats.sessions_apart = 1
            logger.warning(
                "the session table in Redis does not answer (%s); this router's own is used until it does",
                error or type(error).__name__,
            )
        self._away_until_s = self._loop.time() + self._settings.retry_s
        self._waiting.clear()
