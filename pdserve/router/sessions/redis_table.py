"""The session table that router replicas share, in Redis. Optional.

Replicas agree without it wherever nothing has changed: the rendezvous hash of a session's name is the same
everywhere. What it adds is memory across replicas and restarts: a session that had to move (its worker was
overloaded, gone or new) is found where it went, and its next turn waits for the right request's pages.

It may be wrong, late or away, and no request waits for it longer than `timeout_s`: then the router's own
table serves. After a failure it is left alone for `retry_s`. Writes are made behind the requests' back,
the newest of each session, in batches; what is more than `MAX_WAITING` is dropped. So what Redis has may be
older than what a router has itself, and the newer of the two counts. The number of turns would not tell
which that is: a session that was forgotten begins anew. Each entry has the time at which its router saw it,
so routers' clocks are to agree to within the time between a session's turns.

Keys are hashed: Redis sees neither what clients call their sessions nor anything of their prompts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from typing import Any

import msgspec

from pdserve.errors import ConfigError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.config.placement import Session
from pdserve.router.sessions.keys import SessionKey
from pdserve.router.sessions.table import SessionEntry

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_BATCH = 500
BATCH_TIMEOUTS = 10
"""A batch has so many times as long as a look-up."""
CONNECTIONS = 16


class _Stored(msgspec.Struct, array_like=True):
    """A value in Redis; fields are only added, at the end, with defaults."""

    request_id: str
    decode_id: str
    prefill_id: str = ""
    tokens: int = 0
    answered: bool = False
    turns: int = 1
    seen_unix_s: float = math.inf
    """Until a version had it: now."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


class SharedSessions:
    """The table. Raises ConfigError when it cannot be used at all; afterwards, nothing."""

    def __init__(self, session: Session) -> None:
        self._settings = session.redis
        self._ttl_s = math.ceil(session.ttl_s)
        self._redis, self._errors = _connect(session)
        self._loop = asyncio.get_running_loop()
        self._away_until_s = -math.inf
        self._waiting: dict[str, tuple[SessionEntry, tuple[str, ...]]] = {}
        """Last link → (entry, links that it replaces), oldest first."""
        self._wake = asyncio.Event()
        self._is_closing = False
        self._writer = self._loop.create_task(self._write_all(), name="router-shared-sessions")

    async def close(self) -> None:
        """Write what waits, within the time for one batch, and hang up."""
        self._is_closing = True
        self._wake.set()
        _, late = await asyncio.wait({self._writer}, timeout=self._settings.timeout_s * BATCH_TIMEOUTS)
        if late:
            logger.warning("%d sessions were not written to Redis in time", len(self._waiting))
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._redis.aclose()

    async def get(self, key: SessionKey) -> SessionEntry | None:
        """The session's last turn, by its last link that is known; None, too, while Redis is away."""
        if self._is_away():
            return None
        for link in reversed(key.links):
            if link in self._waiting:
                return self._waiting[link][0]
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                values = await self._redis.mget([self._name(link) for link in reversed(key.links)])
        except self._errors as error:
            self._failed(error)
            return None
        try:
            found = next((_decoder.decode(value) for value in values if value is not None), None)
        except UNREADABLE:  # another program's, or of a version to come
            found = None
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
        """The session's turn is being answered, or was; written soon."""
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
        """Write one batch; what fails is lost."""
        batch = dict(list(self._waiting.items())[:MAX_BATCH])
        unix_s = time.time() - self._loop.time()
        for link in batch:
            del self._waiting[link]
        if not batch:
            return
        try:
            async with asyncio.timeout(self._settings.timeout_s * BATCH_TIMEOUTS):
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

    def _name(self, link: str) -> str:
        digest = hashlib.blake2b(link.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return self._settings.prefix + digest

    def _is_away(self) -> bool:
        return self._loop.time() < self._away_until_s

    def _failed(self, error: BaseException) -> None:
        if not self._is_away():
            logger.warning(
                "the session table in Redis does not answer (%s); for %g s this router's own is used",
                error or type(error).__name__,
                self._settings.retry_s,
            )
        self._away_until_s = self._loop.time() + self._settings.retry_s
        self._waiting.clear()


def _connect(session: Session) -> tuple[Any, tuple[type[BaseException], ...]]:
    """(client, what it raises). Nothing is sent yet. Raises ConfigError."""
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    except ImportError:
        raise ConfigError(
            "session.redis.url is set, but the package 'redis' is missing; "
            "pip install '.[redis]' in the checkout"
        ) from None
    timeout_s = session.redis.timeout_s
    try:
        pool = BlockingConnectionPool.from_url(
            session.redis.url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"session.redis.url: {error}") from None
    return Redis(connection_pool=pool), (RedisError, OSError, TimeoutError)
