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
from typing import NamedTuple

from pdserve.router.config.limits import Deadlines
from pdserve.router.dispatch.decode import DecodeStage
from pdserve.router.dispatch.job import Claim, Failure, Job, WorkerRequests, outcome_of
from pdserve.router.dispatch.prefill import GOOD, PrefillStage
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.call import Call
from pdserve.router.upstream.connection import UpstreamError

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


class DirectStage:
    """Has a pair of workers answer."""

    def __init__(
        self,
        deadlines: Deadlines,
        workers: WorkerRequests,
        prefill: PrefillStage,
        decode: DecodeStage,
        stats: Stats,
    ) -> None:
        self._deadlines = deadlines
        self._workers = workers
        self._prefill = prefill
        self._decode = decode
        self._stats = stats
        self._loop = asyncio.get_running_loop()

    async def run(self, call: Call, job: Job, prefill: Worker, claim: Claim) -> Outcome:
        """Have the claimed decode worker answer with what `prefill` computes. If it is lost the client may
        have a part of a stream. Raises WorkerAnswerError when the request itself is at fault.
        """
        deadlines = self._deadlines
        limit_s = deadlines.direct_s if job.plan.has_fallback else deadlines.prefill_s
        job.room_line = room_line(prefill)
        asking = self._loop.create_task(self._prefill.ask(call, job, prefill, limit_s))
        failure: Failure | None = None
        try:
            async with asyncio.timeout(None) as cut:

                def on_report(_: object) -> None:
                    if not call.answer.is_started and _word(asking) not in GOOD:
                        cut.reschedule(self._loop.time())

                asking.add_done_callback(on_report)
                try:
                    failure = await self._decode.attempt(call, job, claim)
                finally:
                    asking.remove_done_callback(on_report)
            if failure is None and not asking.done():
                await asyncio.wait({asking}, timeout=REPORT_GRACE_S)
        except TimeoutError:
            outcome = self._cut(call, job, prefill, claim.worker, asking)
        else:
            outcome = Outcome("ok")
            if failure is not None:
                outcome = Outcome(f"decode-{outcome_of(failure)}", claim.worker, failure)
        finally:
            job.room_line = b""
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        self._stats.direct[outcome.word] += 1
        return outcome

    def _cut(
        self, call: Call, job: Job, prefill: Worker, decode: Worker, asking: asyncio.Task[str]
    ) -> Outcome:
        """The prefill worker has failed, and the decode worker was hung up on. Raises WorkerAnswerError."""
        if call.answer.is_complete:
            return Outcome("ok")
        if call.answer.is_started:  # at the moment of the cut
            return Outcome("decode-cut", decode, UpstreamError("cut", "the answer began too late"))
        word = asking.result()
        if word == "timeout":  # it may have waited for the decode worker, in vain
            late = UpstreamError("timeout", "the prefill worker was not done in time")
            self._workers.on_failure(job, decode, late, "another way is taken")
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
