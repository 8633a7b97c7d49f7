"""The channel of `shared_rates`: publish and subscribe in Redis, beside all requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from pdserve.router.app.router import Router
from pdserve.router.config.tenants import SharedRates as Settings
from pdserve.router.processes.shared_limits import REPORT_S
from pdserve.router.processes.shared_rates import SharedRates
from pdserve.router.sessions.redis_client import connect

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 12
CLOSE_S: Final = 1.0


class RatesChannel:
    """Tells and hears. The constructor raises ConfigError; later failures only put off the next try."""

    def __init__(self, router: Router, settings: Settings) -> None:
        self._stats = router.stats
        self._gate = router.gate
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._redis, self._errors = connect(settings, "shared_rates")
        self.rates = SharedRates(
            router.gate.tenants,
            secrets.token_hex(NAME_BYTES),
            away_s=settings.timeout_s,
            processes=settings.processes,
            now_s=self._loop.time(),
        )

    async def hear(self) -> None:
        """Until the connection fails, or is silent: this process itself speaks every half second."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            async with asyncio.timeout(self._settings.timeout_s):
                await channel.subscribe(self._settings.channel)
            heard_s = self._loop.time()
            while self._loop.time() - heard_s < 2 * self._settings.timeout_s:
                message = await channel.get_message(timeout=self._settings.timeout_s)
                if message is not None:
                    heard_s = self._loop.time()
                    self.rates.hear(message.get("data"), heard_s)

    async def tell(self) -> None:
        """What is to be told now. Whether it arrived shows when it is heard."""
        now_s = self._loop.time()
        if self.rates.tick(now_s):
            self._note()
        data = self.rates.message(now_s)
        if data is not None:
            async with asyncio.timeout(self._settings.timeout_s / 2):
                await self._redis.publish(self._settings.channel, data)

    async def keep(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, until cancelled."""
        while True:
            try:
                await step()
            except self._errors:
                pass  # it shows as silence
            except Exception:  # boundary: a background task, and Redis may answer what its client cannot take
                logger.exception("the channel of shared_rates failed; it begins again")
                self._stats.task_failures["rates"] += 1
            await asyncio.sleep(REPORT_S)

    async def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(*self._errors):
            async with asyncio.timeout(CLOSE_S):
                await self._redis.aclose()

    def _note(self) -> None:
        self._stats.rates_apart = int(self.rates.is_away)
        if self.rates.is_away:
            logger.warning(
                "Redis does not answer for shared_rates; this process holds %.0f %% of the tenants' rates",
                100 * self.rates.share,
            )
        else:
            logger.info("the tenants' rates are shared again")
        self._gate.fill()


@contextlib.asynccontextmanager
async def shared_rates(router: Router) -> AsyncIterator[SharedRates | None]:
    """Rates are shared as the configuration says, as long as the block runs. None: they are not. Raises
    ConfigError.
    """
    settings = router.config.shared_rates
    if not settings.url:
        yield None
        return
    channel = RatesChannel(router, settings)
    steps = channel.tell, channel.hear
    tasks = [asyncio.create_task(channel.keep(step), name="router-rates") for step in steps]
    try:
        yield channel.rates
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
