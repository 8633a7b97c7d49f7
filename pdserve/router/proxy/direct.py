"""The direct way: a prefill worker and a decode worker get the request at the same time.

Both get the header `x-pdserve-room: HOST PORT NUMBER`. In this room the decode worker meets the prefill
worker, takes the prompt's KV and the first token from it, and goes on. So the answer is the decode worker's.

| trouble before the answer begins | what happens |
|---|---|
| the prefill worker finds the request at fault (400, 413, 422) | the client gets that answer |
| the prefill worker fails, or is late (`direct_s`) | the decode worker is hung up on: another way |
| the decode worker fails | the prefill worker is hung up on: another way |

SGLang's decode worker alone would wait 14 s for a prefill worker that is gone, and 300 s for one that hangs.
Once the answer has begun, the prefill worker does not matter.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple

from pdserve.router.api.errors import NoWorkerError
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import Waiter
from pdserve.router.placement.planner import Plan
from pdserve.router.proxy.decode import Decode
from pdserve.router.proxy.failures import Failure, outcome_of
from pdserve.router.proxy.parts import Parts
from pdserve.router.proxy.place import plan
from pdserve.router.proxy.prefill import GOOD, ask, settle
from pdserve.router.proxy.recover import Recovery
from pdserve.router.request.request import Request
from pdserve.router.sessions.table import SessionEntry

ROOMS = 2**62
"""Taken by chance: routers that do not know each other take different ones. SGLang has 64 bits, signed."""
REPORT_GRACE_S = 0.25
"""The prefill worker reports that its KV is sent, which can be after a short answer."""


class Outcome(NamedTuple):
    """What became of a direct hand-off."""

    word: str
    """ok, or the role of the worker that failed and how."""
    lost: Worker | None = None
    """The worker that failed."""
    failure: Failure | None = None
    """Of the decode worker."""


class DirectWay:
    """Has pairs of workers answer."""

    def __init__(self, parts: Parts, decode: Decode, recovery: Recovery) -> None:
        self._parts = parts
        self._decode = decode
        self._recovery = recovery
        self._most_pairs = parts.config.limits.decode_attempts

    async def answer(self, request: Request, last: SessionEntry | None) -> bool:
        """Have a pair of workers answer, as planned. If one of them is lost first, another pair. False: the
        pool is the way now, as the request's new plan says. Raises RequestError, and WorkerAnswerError when
        the request itself is at fault.
        """
        parts = self._parts
        lost: dict[Worker, int] = {}
        pairs = 0
        end_s = parts.loop.time() + parts.limits_s.wait_for_worker_s - request.outage_s
        while request.plan.handoff == "direct":
            outcome = await self._pair(request)
            if outcome.lost is None:
                return True
            request.words += (f"direct={outcome.word}",)
            if request.is_started and outcome.failure is not None:
                await self._recovery.retry(request, outcome.lost, outcome.failure)
                return True
            lost[outcome.lost] = outcome.lost.probes_ready
            pairs += 1
            await parts.suspects.check(request)
            try:
                await self._next_plan(request, last, lost, end_s, has_pairs_left=pairs < self._most_pairs)
            except NoWorkerError:
                if outcome.failure is None:
                    raise
                await self._recovery.give_up(request, outcome.lost, outcome.failure)
                return True
        return False

    async def _next_plan(
        self,
        request: Request,
        last: SessionEntry | None,
        lost: dict[Worker, int],
        end_s: float,
        *,
        has_pairs_left: bool,
    ) -> None:
        """A plan without the workers that failed the direct way and have not said since that they are ready;
        until `end_s` it waits for a worker. `lost`: what their `probes_ready` was. Raises NoWorkerError.
        """
        refusal = NoWorkerError("No worker is ready to serve this model; try again shortly.")

        def find() -> Plan | None:
            nonlocal refusal
            gone = [worker.id for worker, probes_ready in lost.items() if worker.probes_ready <= probes_ready]
            try:
                return plan(self._parts, request, last, self._parts.loop.time(), gone)
            except NoWorkerError as error:
                refusal = error
                return None

        found = await self._parts.wait.until(find, end_s if has_pairs_left else 0.0)
        if found is None:
            raise refusal
        if found.handoff == "direct" and not has_pairs_left:
            raise NoWorkerError("Several pairs of workers failed this request; try again shortly.")

    async def _pair(self, request: Request) -> Outcome:
        """One try."""
        parts, made, now_s = self._parts, request.plan, self._parts.loop.time()
        assert made.prefill is not None
        parts.fleet.on_selected(made.prefill, now_s, made.uncached_tokens)
        request.trial = parts.fleet.on_selected(made.decode, now_s)
        try:
            if made.settle is not None:
                word = await settle(parts, request, made.settle)
                request.words += (word,)
            request.phase, request.asked_s = "decode", time.monotonic()
            return await hand_over(parts, self._decode, request, made.prefill, made.decode)
        finally:
            parts.fleet.on_released(made.prefill, made.uncached_tokens)
            parts.fleet.on_released(made.decode)


class _PrefillLost(BaseException):
    """Raised where the request waits for the decode worker."""


async def hand_over(
    parts: Parts, decode: Decode, request: Request, prefill: Worker, worker: Worker
) -> Outcome:
    """Have the claimed decode `worker` answer with what `prefill` computes. If it is lost the client may have
    a part of a stream. Raises WorkerAnswerError when the request itself is at fault.
    """
    limits_s = parts.limits_s
    limit_s = limits_s.direct_s if request.plan.has_fallback else limits_s.prefill_s
    request.room_line = room_line(prefill)
    asking = parts.loop.create_task(ask(parts, request, prefill, limit_s, Waiter(request)))

    def on_report(_: object) -> None:
        if not request.is_started and _word(asking) not in GOOD:
            request.throw(_PrefillLost())

    try:
        asking.add_done_callback(on_report)
        try:
            failure = await decode.attempt(request, worker)
        finally:
            asking.remove_done_callback(on_report)
        if failure is None and not asking.done():
            await asyncio.wait({asking}, timeout=REPORT_GRACE_S)
    except _PrefillLost:
        outcome = _cut(parts, request, prefill, worker, asking)
    else:
        outcome = Outcome("ok")
        if failure is not None:
            outcome = Outcome(f"decode-{outcome_of(failure)}", worker, failure)
    finally:
        request.room_line = b""
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    parts.stats.direct[outcome.word] += 1
    return outcome


def _cut(
    parts: Parts, request: Request, prefill: Worker, decode: Worker, asking: asyncio.Task[str]
) -> Outcome:
    """The prefill worker has failed, and the decode worker was hung up on. Raises WorkerAnswerError."""
    word = asking.result()
    if word == "timeout":  # it may have waited for the decode worker, in vain
        late = UpstreamError("timeout", "the prefill worker was not done in time")
        parts.on_failure(request, decode, late, "another way is taken")
    return Outcome(f"prefill-{word}", prefill)


def _word(asking: asyncio.Task[str]) -> str:
    """How asking the prefill worker has ended."""
    if asking.cancelled():
        return "cut"
    return "client-error" if asking.exception() is not None else asking.result()


def room_line(prefill: Worker) -> bytes:
    """The header line that names a new room at `prefill`."""
    assert prefill.info is not None
    place = f"{prefill.host} {prefill.info.bootstrap_port} {random.randrange(1, ROOMS)}"
    return b"x-pdserve-room: %b\r\n" % place.encode("ascii", "replace")
