"""The channels of `agreement`, beside all requests: the parent of one router's processes (see `peer`), and
publish and subscribe in Redis for those of several routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from pdserve.router.app.router import Router
from pdserve.router.config.redis import RedisSettings
from pdserve.router.processes.agreement import Agreement
from pdserve.router.sessions.redis_client import connect

logger = logging.getLogger(__name__)

REPORT_S: Final = 0.1
"""Between two looks whether there is something to tell."""
NAME_BYTES: Final = 12
CLOSE_S: Final = 1.0


class TenantLimits:
    """One process's agreement, and what follows from it for the process."""

    def __init__(self, router: Router, *, away_s: float, processes: int) -> None:
        """`processes`: the fewest that shares are made of where nobody is heard."""
        self._stats = router.stats
        self._gate = router.gate
        self._loop = asyncio.get_running_loop()
        self.agreement = Agreement(
            router.gate.tenants,
            router.gate.queue.held_back,
            secrets.token_hex(NAME_BYTES),
            away_s=away_s,
            processes=processes,
            now_s=self._loop.time(),
        )

    def news(self) -> bytes | None:
        """The message that is to be told now, if any. Whether it arrived shows when it is heard."""
        now_s = self._loop.time()
        if self.agreement.tick(now_s):
            self._note()
        return self.agreement.message(now_s)

    def hear(self, data: object) -> None:
        """A message of any process came, this one's too."""
        if self.agreement.hear(data, self._loop.time()):
            self._gate.fill()

    def _note(self) -> None:
        self._stats.limits_apart = int(self.agreement.is_away)
        if self.agreement.is_away:
            logger.warning(
                "other processes are not heard; this one holds %.0f %% of the tenants' limits until they are",
                100 * self.agreement.share,
            )
        else:
            logger.info("the tenants' limits are shared again")
        self._gate.fill()


class RedisChannel:
    """Tells and hears. The constructor raises ConfigError; later failures only put off the next try."""

    def __init__(self, router: Router, settings: RedisSettings) -> None:
        self._stats = router.stats
        self._settings = settings
        self._channel = f"{settings.prefix}limits"
        self._loop = asyncio.get_running_loop()
        self._redis, self._errors = connect(settings, settings.away_s)
        self.limits = TenantLimits(router, away_s=settings.away_s, processes=settings.processes)

    async def hear(self) -> None:
        """Until the connection fails, or is silent: this process itself speaks every half second."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            async with asyncio.timeout(self._settings.away_s):
                await channel.subscribe(self._channel)
            self.limits.agreement.listen()
            heard_s = self._loop.time()
            while self._loop.time() - heard_s < 2 * self._settings.away_s:
                message = await channel.get_message(timeout=self._settings.away_s)
                if message is not None:
                    heard_s = self._loop.time()
                    self.limits.hear(message.get("data"))

    async def tell(self) -> None:
        """What is to be told now."""
        if (data := self.limits.news()) is not None:
            async with asyncio.timeout(self._settings.away_s / 2):
                await self._redis.publish(self._channel, data)

    async def keep(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, until cancelled."""
        while True:
            try:
                await step()
            except self._errors:
                pass  # it shows as silence
            except Exception:  # boundary: a background task, and Redis may answer what its client cannot take
                logger.exception("the channel of tenants' limits failed; it begins again")
                self._stats.task_failures["limits"] += 1
            await asyncio.sleep(REPORT_S)

    async def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(*self._errors):
            async with asyncio.timeout(CLOSE_S):
                await self._redis.aclose()


@contextlib.asynccontextmanager
async def shared_limits(router: Router) -> AsyncIterator[Agreement | None]:
    """Tenants' limits are shared over Redis, if it is configured, while the block runs. None: it is not.
    Raises ConfigError.
    """
    settings = router.config.redis
    if not settings.shares_limits:
        yield None
        return
    channel = RedisChannel(router, settings)
    steps = channel.tell, channel.hear
    tasks = [asyncio.create_task(channel.keep(step), name="router-limits") for step in steps]
    try:
        yield channel.limits.agreement
    finally:
        await _end(tasks)
        await channel.close()


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them until they have ended: redis-py can take a cancellation at a deadline for the deadline."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CLOSE_S)
