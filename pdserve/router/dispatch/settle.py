"""The settle stage: wait until the pages of the session's last turn are in the pool.

It never fails a call: pages that are missing then are computed again.
"""

from __future__ import annotations

import time

import msgspec

from pdserve.router.dispatch.worker_request import FAILURES, WorkerRequests, outcome_of
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import Settle
from pdserve.router.request.call import Call

SLACK_S = 0.25
"""Added to the time that the worker itself may wait."""


class SettledReport(msgspec.Struct):
    """A decode worker's answer to `/pd/settled`."""

    known: bool
    settled: bool


_decoder = msgspec.json.Decoder(SettledReport)


class SettleStage:
    """Asks the worker of the last turn."""

    def __init__(self, wait_s: float, workers: WorkerRequests, stats: Stats) -> None:
        self._wait_s = wait_s
        self._workers = workers
        self._stats = stats

    async def run(self, call: Call, settle: Settle) -> str:
        """Wait, bounded. Returns the outcome as a word of the plan."""
        if self._wait_s <= 0:
            return "settle=off"
        if settle.worker.lacks("settled"):
            return "settle=absent"
        call.phase = "settle"
        begun_s = time.monotonic()
        question = msgspec.json.encode({"request_id": settle.request_id, "timeout_s": self._wait_s})
        try:
            answer = await self._workers.post(
                call, settle.worker, "/pd/settled", question, self._wait_s + SLACK_S
            )
            report = _decoder.decode(answer)
            outcome = "unknown" if not report.known else "settled" if report.settled else "unsettled"
        except FAILURES as error:
            outcome = outcome_of(error)
        self._stats.settle[outcome] += 1
        call.parts_s["settle"] = time.monotonic() - begun_s
        return f"settle={outcome}"
