"""What all steps of a request share: the fleet, the connections to workers, the counters, and small acts on
them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final

from pdserve.logs import ThrottledLog
from pdserve.router.admission.gate import Gate
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.proxy.failures import (
    RetryBudget,
    WorkerAnswerError,
    WorkerWait,
    is_workers_fault,
    words_of,
)
from pdserve.router.proxy.shared_prefill import SharedPrefills
from pdserve.router.proxy.suspicion import Suspects
from pdserve.router.request.request import Request

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES: Final = 1024 * 1024
"""Of a worker's answer that the router reads itself."""


class Parts:
    """Those of one router process. Its constructor needs a running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        gate: Gate,
        upstream: Upstream,
        stats: Stats,
    ) -> None:
        self.config = config
        self.limits_s = config.deadlines
        self.pull_ahead_tokens = config.pull_ahead_tokens or math.inf
        self.fleet = fleet
        self.gate = gate
        self.upstream = upstream
        self.stats = stats
        self.plans = stats.plans
        self.loop = asyncio.get_running_loop()
        self.placer = Placer(config, fleet)
        self.wait = WorkerWait(fleet)
        self.suspects = Suspects(fleet, upstream, stats, self.wait)
        self.suspicion = self.suspects.suspicion
        self.budget = RetryBudget(self.loop.time())
        self.shared_prefills = SharedPrefills()
        self._log = ThrottledLog(logger)

    def on_failure(
        self,
        request: Request,
        worker: Worker,
        error: BaseException,
        consequence: str,
        *,
        is_blamed: bool = True,
    ) -> None:
        """Log the failure. Count it against the worker's circuit if it is the worker's fault and `is_blamed`.

        A 500 can be the request's doing. Its worker is a suspect until another worker has answered the same
        request (`on_answered`): else a worker that fails fast would draw all requests.
        """
        request.name_logs()
        said = words_of(error)
        self._log.warning(worker.id, "%s worker %s: %s; %s", worker.role, worker.id, said, consequence)
        if is_blamed and is_workers_fault(error):
            self._blame(worker)
        elif isinstance(error, WorkerAnswerError) and error.status >= 500:
            request.suspects += (worker,)

    def on_answered(self, request: Request) -> None:
        """A worker has answered the request well, so the errors of the suspects were theirs."""
        request.name_logs()
        for worker in request.suspects:
            self._blame(worker)
        request.suspects = ()

    def _blame(self, worker: Worker) -> None:
        if self.fleet.on_failure(worker, self.loop.time()):
            logger.warning("%s worker %s: circuit opened", worker.role, worker.id)
