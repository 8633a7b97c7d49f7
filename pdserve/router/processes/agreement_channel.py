"""The channel of `agreement`: publish and subscribe in Redis, beside all requests."""

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
from pdserve.router.processes.shared_limits import REPORT_S
from pdserve.router.sessions.redis_client import connect

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 12
CLOSE_S: Final = 1.0


class AgreementChannel:
    """Tells and hears. The constructor raises ConfigError; later failures only put off the next try."""

    def __init__(self, router: Router, settings: RedisSettings) -> None:
        self._stats = router.stats
        self._gate = router.gate
        self._settings = settings
        self._channel = f"{settings.prefix}limits"
        self._loop = asyncio.get_running_loop()
        self._redis, self._errors = connect(settings, settings.away_s)
        self.agreement = Agreement(
            router.gate.tenants,
            router.gate.queue.held_back,
            secrets.token_hex(NAME_BYTES),
            away_s=settings.away_s,
            processes=settings.processes,
            now_s=self._loop.time(),
        )

    async def hear(self) -> None:
        """Until the connection fails, or is silent: this process itself speaks every half second."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            async with asyncio.timeout(self._settings.away_s):
                await channel.subscribe(self._channel)
            self.agreement.listen()
            heard_s = self._loop.time()
            while self._loop.time() - heard_s < 2 * self._settings.away_s:
                message = await channel.get_message(timeout=self._settings.away_s)
                if message is not None:
                    heard_s = self._loop.time()
                    if self.agreement.hear(message.get("data"), heard_s):
                        self._gate.fill()

    async def tell(self) -> None:
        """What is to be told now. Whether it arrived shows when it is heard."""
        now_s = self._loop.time()
        if self.agreement.tick(now_s):
            self._note()
        data = self.agreement.message(now_s)
        if data is not None:
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

    def _note(self) -> None:
        self._stats.limits_apart = int(self.agreement.is_away)
        if self.agreement.is_away:
            logger.warning(
                "Redis does not answer; this process holds %.0f %% of the tenants' limits until it does",
                100 * self.agreement.share,
            )
        else:
            logger.info("the tenants' limits are shared again")
        self._gate.fill()


@contextlib.asynccontextmanager
async def shared_limits(router: Router) -> AsyncIterator[Agreement | None]:
    """Tenants' limits are shared as the configuration says, as long as the block runs. None: they are not.
    Raises ConfigError.
    """
    settings = router.config.redis
    if not settings.shares_limits:
        yield None
        return
    channel = AgreementChannel(router, settings)
    steps = channel.tell, channel.hear
    tasks = [asyncio.create_task(channel.keep(step), name="router-limits") for step in steps]
    try:
        yield channel.agreement
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
