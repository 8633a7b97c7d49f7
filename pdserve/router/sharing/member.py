"""One router process among others: it tells them what is new, and does what follows from what they tell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError
from pdserve.router.app.router import Router
from pdserve.router.fleet.membership import Order
from pdserve.router.metrics.stats import Snapshot
from pdserve.router.sharing.carriers import RedisCarrier, UnixCarrier
from pdserve.router.sharing.files import Acts, ActsFile, MetricsFiles
from pdserve.router.sharing.gossip import REPORT_S, SETTLE_S, Gossip, Outgoing

logger = logging.getLogger(__name__)

WRITE_S: Final = 1.0
"""Between two writings of the metrics that nobody asks for: a process that is killed loses as much."""
ANSWER_S: Final = 1.0
"""For a sibling to write its metrics. One that takes longer is silent, and its older ones count."""
LOOK_S: Final = 0.005
"""Between two looks whether siblings have written, or whether there is something to tell them."""


class Member:
    """Makes a router one of several processes. Make it inside the running loop, and `close` it."""

    def __init__(self, router: Router, directory: Path, name: str, acts: ActsFile, keys: int) -> None:
        """`directory`: of the router, for this process and its siblings. `acts`: as it has begun with them,
        `keys` among them. Raises ConfigError, OSError.
        """
        self._router = router
        self._name = name
        self._acts = acts
        self._keys = keys
        self._files = MetricsFiles(directory)
        self._loop = asyncio.get_running_loop()
        sessions, redis = router.proxy.placer.sessions, router.config.redis
        self.gossip = Gossip(
            name,
            router.gate.tenants,
            sessions,
            router.gate.queue.held_back,
            siblings=router.config.processes,
            is_remote=bool(redis.url),
            now_s=self._loop.time(),
            unix_s=time.time(),
        )
        self._unix = UnixCarrier(directory, name, self._hear_sibling)
        self._redis = RedisCarrier(redis, self._hear_host) if redis.url else None
        self._looked_s = self._told_s = self._written_s = 0.0
        self._has_failed = False
        router.metrics = self.metrics
        router.fleet.members.told = self._ordered
        router.told_reload = self._reloaded
        sessions.on_news = self._tell_soon
        self._due_s = self._loop.time()
        self._timer = self._loop.call_later(0.0, self._tick)  # uvloop's has no `when` then

    async def settle(self) -> None:
        """Wait until the siblings, if there are any, have told this process everything."""
        if self._files.stamps(but=self._name):
            await asyncio.sleep(SETTLE_S)

    async def close(self) -> None:
        """Say the last word, and leave the metrics to the parent."""
        self._timer.cancel()
        self._router.proxy.placer.sessions.on_news = None
        self._publish(self.gossip.last(time.time(), self._loop.time()))
        self._write()
        await self._unix.close()
        if self._redis is not None:
            await self._redis.close()

    async def metrics(self) -> Snapshot:
        """Those of all of the router's processes, as they are now."""
        before = self._files.stamps(but=self._name)
        silent = set(before)
        if before:
            self._unix.publish(self.gossip.ask())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    while silent:
                        await asyncio.sleep(LOOK_S)
                        now = self._files.stamps(but=self._name)
                        silent = {name for name in silent if now.get(name) == before[name]}
        return self._files.add_up(self._name, self._router.own_metrics(), len(silent))

    # --- telling

    def _tick(self) -> None:
        now_s = self._looked_s = self._loop.time()
        self._due_s = now_s + REPORT_S
        self._timer = self._loop.call_later(REPORT_S, self._tick)
        was_away = self.gossip.is_away
        if messages := self.gossip.tick(now_s, time.time()):
            self._told_s = now_s
            self._publish(messages)
        if was_away != self.gossip.is_away:
            self._note_away()
        self._fill()
        self._do_acts()
        if now_s - self._written_s >= WRITE_S:
            self._write()

    def _tell_soon(self) -> None:
        """Now, if nothing was told for `REPORT_S`, and nobody has just looked."""
        due_s = max(self._loop.time(), self._told_s + REPORT_S, self._looked_s + LOOK_S)
        if self._due_s > due_s:
            self._due_s = due_s
            self._timer.cancel()
            self._timer = self._loop.call_at(due_s, self._tick)

    def _publish(self, messages: list[Outgoing]) -> None:
        for data, to in messages:
            self._unix.publish(data, to)
            if self._redis is not None:
                self._redis.publish(data, to)

    def _note_away(self) -> None:
        self._router.stats.limits_apart = int(self.gossip.is_away)
        if self.gossip.is_away:
            logger.warning(
                "Redis is away: routers of other hosts are not heard, and this one holds %.0f %% of the "
                "tenants' limits until they are",
                100 * self.gossip.share,
            )
        else:
            logger.info("Redis is back: the tenants' limits are shared again")

    def _write(self) -> None:
        self._written_s = self._loop.time()
        try:
            self._files.write(self._name, self._router.own_metrics())
        except OSError as error:
            if not self._has_failed:
                logger.error("metrics cannot be written to the runtime directory: %s", error)  # noqa: TRY400 - one line
            self._has_failed = True

    # --- hearing

    def _hear_sibling(self, data: bytes) -> None:
        self._hear(data, is_sibling=True)

    def _hear_host(self, data: bytes) -> None:
        self._hear(data, is_sibling=False)

    def _hear(self, data: bytes, *, is_sibling: bool) -> None:
        news = self.gossip.hear(data, self._loop.time(), time.time(), is_sibling=is_sibling)
        if news is not None and news.asks and is_sibling:
            self._do_acts()  # an act's answer has the metrics of all: whoever reads it finds the act done
            self._write()
        self._fill()

    def _fill(self) -> None:
        if self.gossip.has_more:
            self.gossip.has_more = False
            self._router.gate.fill()

    # --- acts of administrators

    def _ordered(self, worker: str, order: Order) -> None:
        self._note(lambda: self._acts.order(worker, order))

    def _reloaded(self) -> None:
        def again(acts: Acts) -> Acts:
            return Acts(acts.orders, acts.keys + 1)

        self._keys += 1
        self._note(lambda: self._acts.change(again))

    def _note(self, note: Callable[[], None]) -> None:
        try:
            note()
        except OSError as error:
            logger.error("the router's other processes are not told of an act: %s", error)  # noqa: TRY400 - one line

    def _do_acts(self) -> None:
        try:
            acts = self._acts.changed()
        except OSError as error:
            logger.error("it cannot be read what administrators have done: %s", error)  # noqa: TRY400 - one line
            return
        if acts is None:
            return
        self._router.fleet.members.take(acts.orders)
        if acts.keys != self._keys:
            self._keys = acts.keys
            try:
                self._router.reload()
            except ConfigError as error:
                logger.error("the API keys are not changed: %s", error)  # noqa: TRY400 - one line
