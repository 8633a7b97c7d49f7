"""How messages of `gossip` get to other processes: by sockets to siblings, by Redis to other hosts.

A carrier publishes bytes and hands over what others have published. It never fails to its caller: what cannot
be sent is dropped, and what cannot be read is for the receiver to judge. A message has at most
`MAX_MESSAGE_BYTES`.

Siblings have a datagram socket each, `NAME.sock`, in the router's runtime directory, which only this user can
enter. The kernel keeps few datagrams for a receiver (net.unix.max_dgram_qlen, 10 on many hosts), so what does
not fit waits here for a moment, up to `MAX_UNSENT` messages for each sibling.

Routers of several hosts share a channel of Redis, which stores nothing. Who may write there can use up the
tenants' limits, and make sessions be forgotten; it learns and changes nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from pdserve.errors import ConfigError
from pdserve.extras import needed_by
from pdserve.router.config.limits import RedisSettings
from pdserve.router.sharing.gossip import AWAY_S, MAX_MESSAGE_BYTES
from pdserve.security.tokens import given_secret

logger = logging.getLogger(__name__)

SUFFIX: Final = ".sock"
MAX_UNSENT: Final = 512
RETRY_S: Final = 0.005
"""Until a sibling whose queue is full is sent more: it takes messages in as soon as its loop turns."""
READ_AT_ONCE: Final = 64
MAX_UNPUBLISHED: Final = 1024
AGAIN_S: Final = 0.5
"""Between two tries to reach Redis."""
CLOSE_S: Final = 2.0
GONE: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTCONN, errno.EPIPE, errno.EMSGSIZE})


class UnixCarrier:
    """The siblings. Make it inside the running loop."""

    def __init__(self, directory: Path, name: str, on_message: Callable[[bytes], None]) -> None:
        """`directory`: the router's own. Raises OSError."""
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._path = f"/proc/self/fd/{self._directory}"
        """Short, however long that of the directory is: the kernel takes 107 bytes for a socket's."""
        self._own = f"{name}{SUFFIX}"
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._unsent: dict[str, deque[bytes]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(f"{self._path}/{self._own}")
        except OSError:
            self._socket.close()
            os.close(self._directory)
            raise
        self._loop.add_reader(self._socket.fileno(), self._read)

    def publish(self, data: bytes, to: str | None = None) -> None:
        """Send to one sibling, or to all."""
        for file in [f"{to}{SUFFIX}"] if to is not None else os.listdir(self._directory):  # noqa: PTH208 - a descriptor
            if file.endswith(SUFFIX) and file != self._own:
                self._unsent.setdefault(file, deque(maxlen=MAX_UNSENT)).append(data)
        self._flush()

    async def close(self) -> None:
        """Send what waits, for a moment at most."""
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._unsent:
                    await asyncio.sleep(RETRY_S)
                    self._flush()
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._own, dir_fd=self._directory)
        os.close(self._directory)

    def _flush(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for file in list(self._unsent):
            self._send(file, self._unsent[file])
        if self._unsent:
            self._retry = self._loop.call_later(RETRY_S, self._flush)

    def _send(self, file: str, unsent: deque[bytes]) -> None:
        try:
            while unsent:
                self._socket.sendto(unsent[0], f"{self._path}/{file}")
                unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in GONE and error.errno != errno.ENOBUFS:
                logger.debug("a message to %s is lost: %s", file, error)
        del self._unsent[file]

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return
            self._on_message(data)


class RedisCarrier:
    """All processes of all routers, this one too. Make it inside the running loop; it connects by itself."""

    def __init__(self, settings: RedisSettings, on_message: Callable[[bytes], None]) -> None:
        """Raises ConfigError; later failures show only in that nothing is heard."""
        self._channel = f"{settings.prefix}routers"
        self._on_message = on_message
        self._redis, self._errors = connect(settings, AWAY_S)
        self._unpublished: deque[bytes] = deque(maxlen=MAX_UNPUBLISHED)
        self._wake = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._keep(step), name="router-redis") for step in (self._hear, self._tell)
        ]

    def publish(self, data: bytes, to: str | None = None) -> None:
        """Send to all. What is for a sibling alone is not sent."""
        if to is None:
            self._unpublished.append(data)
            self._wake.set()

    async def close(self) -> None:
        """Hang up, once what waits is sent, or after a moment."""
        with contextlib.suppress(TimeoutError, *self._errors):
            async with asyncio.timeout(CLOSE_S):
                while self._unpublished:
                    await self._redis.publish(self._channel, self._unpublished.popleft())
        running = set(self._tasks)
        while running:  # redis-py can take a cancellation at a deadline for the deadline
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CLOSE_S)
        with contextlib.suppress(TimeoutError, *self._errors):
            async with asyncio.timeout(CLOSE_S):
                await self._redis.aclose()

    async def _hear(self) -> None:
        """Until the connection fails, or is silent: this process itself speaks every half second."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            async with asyncio.timeout(AWAY_S):
                await channel.subscribe(self._channel)
            loop = asyncio.get_running_loop()
            heard_s = loop.time()
            while loop.time() - heard_s < 2 * AWAY_S:
                message = await channel.get_message(timeout=AWAY_S)
                if message is not None:
                    heard_s = loop.time()
                    data = message.get("data")
                    self._on_message(data if isinstance(data, bytes) else b"")

    async def _tell(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        while self._unpublished:
            data = self._unpublished.popleft()
            async with asyncio.timeout(AWAY_S):
                await self._redis.publish(self._channel, data)

    async def _keep(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, until cancelled."""
        while True:
            try:
                await step()
                continue
            except self._errors:  # it shows as silence
                self._unpublished.clear()
            except Exception:  # boundary: a background task, and Redis may answer what its client cannot take
                logger.exception("the channel of routers failed; it begins again")
            await asyncio.sleep(AGAIN_S)


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
            max_connections=4,  # one listens, one speaks
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
