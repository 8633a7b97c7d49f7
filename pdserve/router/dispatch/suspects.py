"""Requests under suspicion of ending workers: poison is refused, suspects are sent one at a time."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from pdserve.errors import RequestError
from pdserve.router.dispatch.suspicion import WINDOW_S, Flight, Suspicion, Verdict
from pdserve.router.dispatch.worker_request import may_be_death
from pdserve.router.dispatch.worker_wait import WorkerWait
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.call import Call

VERDICT_S: Final = 10.0
"""Longest wait for the probes that tell whether a worker is dead."""
ALONE_S: Final = 10.0
"""Longest wait of a suspect for those before it. Afterwards it goes beside another one."""
POISON: Final = (
    "Two workers ended while they computed this request, so it is not sent to another one for "
    f"{WINDOW_S / 60:.0f} minutes."
)


class Attempt:
    """One attempt of a call at a worker. `end` it on every path."""

    __slots__ = ("_flight", "_has_turn", "_suspects")

    def __init__(self, suspects: Suspects, flight: Flight, *, has_turn: bool) -> None:
        self._suspects = suspects
        self._flight = flight
        self._has_turn = has_turn

    def on_first_byte(self) -> None:
        """The worker has begun to answer: it has survived the request's prefill and first token."""
        self._flight.is_young = False
        self._pass_turn()

    def on_answered(self) -> None:
        """The worker has answered to the end."""
        self._suspects.suspicion.on_answered(self._flight)

    def on_failure(self, error: BaseException) -> None:
        """The attempt failed; the worker may be dead."""
        if may_be_death(error):
            self._suspects.on_lost(self._flight)

    def end(self) -> None:
        """The attempt is over."""
        self._suspects.suspicion.end(self._flight)
        self._pass_turn()

    def _pass_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._suspects.pass_turn()


class Suspects:
    """The suspicion of one router process, and what follows from it."""

    def __init__(self, fleet: Fleet, stats: Stats, wait: WorkerWait) -> None:
        self.suspicion = Suspicion(random.getrandbits(64))
        self._fleet = fleet
        self._stats = stats
        self._wait = wait
        self._turn = asyncio.Lock()
        self._alone: Call | None = None
        """The suspect that has the turn. At a direct hand-off it has attempts at two workers."""
        self._loop = asyncio.get_running_loop()
        fleet.watchers.insert(0, self._judge)  # before those who wait for the verdict

    async def begin(self, call: Call, worker: Worker) -> Attempt:
        """Begin an attempt, alone among suspects if the call is one."""
        path, body, has_turn = call.endpoint.path, call.body, False
        if self.suspicion.is_active and self._alone is not call and self.suspicion.is_notable(path, body):
            has_turn = await self._take_turn(call)
        return Attempt(self, self.suspicion.begin(worker, path, body), has_turn=has_turn)

    async def check(self, call: Call) -> None:
        """Raises RequestError (400) if the call has ended two workers."""
        if await self.is_poison(call):
            raise RequestError(400, POISON, code="poisoned_request")

    async def is_poison(self, call: Call) -> bool:
        """Whether the call has ended two workers; it is counted then. Waits for the probes that tell."""
        if not self.suspicion.is_active:
            return False

        def verdict() -> Verdict | None:
            said = self.suspicion.verdict(call.endpoint.path, call.body, self._loop.time())
            return None if said == "undecided" else said

        is_poison = await self._wait.until(verdict, self._loop.time() + VERDICT_S) == "poison"
        self._stats.poisoned += is_poison
        return is_poison

    async def _take_turn(self, call: Call) -> bool:
        try:
            async with asyncio.timeout(ALONE_S):
                await self._turn.acquire()
        except TimeoutError:
            return False
        self._alone = call
        return True

    def pass_turn(self) -> None:
        """The suspect that has the turn needs it no longer."""
        self._alone = None
        self._turn.release()

    def on_lost(self, flight: Flight) -> None:
        """The connection to the flight's worker is lost."""
        self.suspicion.on_lost(flight)
        self._judge()
        worker = self._fleet.by_id.get(flight.worker.id)
        if self.suspicion.is_open(flight) and worker is not None and self._fleet.on_doubt is not None:
            self._fleet.on_doubt(worker)

    def _judge(self) -> None:
        if self.suspicion.is_active:
            self.suspicion.judge(self._fleet.by_id, self._loop.time())
