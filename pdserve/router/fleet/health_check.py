"""Active health checks of workers: `GET /pd/ready` often, `GET /pd/info` at the join and sometimes later.

A server without these routes is asked for `/health` and `/v1/models` instead.

The prober sends the requests, reports results to the `Fleet`, which decides, and writes log lines. It closes
the connections to a dead prefill worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Container
from typing import Final, NamedTuple

import msgspec

from pdserve.errors import StartupError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.config.limits import Probe
from pdserve.router.fleet.membership import Orders
from pdserve.router.fleet.registry import Fleet, joining_order
from pdserve.router.fleet.worker import Worker, WorkerInfo, WorkerLoad, foreign_info
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats

logger = logging.getLogger(__name__)

INFO_EVERY = 10
"""Every tenth probe asks a ready worker for `/pd/info` again: it may have restarted between two probes."""
LOOKS = 2
"""Probes of a worker whose connection was lost: a process may close its port a moment after it."""
LOOK_AGAIN_S = 0.05
MAX_ANSWER_BYTES: Final = 4 << 20
_info_decoder = msgspec.json.Decoder(WorkerInfo)


class FirstRound(NamedTuple):
    """Facts about the workers for a router process that starts."""

    strict: bool = True
    """Do not start if the configuration lists incompatible workers."""
    refused: Container[str] = ()
    """Ids of workers that another process refuses. This process prefers to refuse the same ones."""
    orders: Orders = {}  # noqa: RUF012 - a tuple's default, which nobody changes
    """What administrators have ordered."""


STRICT = FirstRound()


class _Ready(msgspec.Struct):
    """The fields of a worker's answer to `/pd/ready` that the router uses."""

    load: WorkerLoad | None = None
    pool: str = "down"
    draining: bool = False
    info_tag: str = ""
    """Another one when its `/pd/info` has changed; empty: it does not say."""


_ready_decoder = msgspec.json.Decoder(_Ready)


class _NotReadyError(Exception):
    """The worker has answered, and cannot be used; the text says why."""


def _ready_in(answer: bytes) -> _Ready:
    """The decoded answer; defaults if it is not the answer of a pdserve worker."""
    try:
        return _ready_decoder.decode(answer)
    except UNREADABLE:
        return _Ready()


class Prober:
    """Probes every worker of the fleet."""

    def __init__(
        self, config: Probe, fleet: Fleet, upstream: Upstream, probes: Upstream, stats: Stats
    ) -> None:
        """`upstream`: the connections of requests; `probes`: those of probes, which `close` closes. A worker
        with as many requests as it may have is probed all the same.
        """
        self._config = config
        self._fleet = fleet
        self._upstream = upstream
        self._probes = probes
        self._stats = stats
        self._looking: dict[Worker, asyncio.Task[None]] = {}
        """Workers whose connection was lost, until it is known whether they are there."""
        fleet.on_doubt = self._look_soon
        self._probed: set[Worker] = set()
        """Workers that have a probing task of `run`."""
        self._said: dict[str, str] = {}
        """Worker id → the last logged problem. A lasting problem is logged once."""

    async def close(self) -> None:
        """Close the probes' connections, after `run` was cancelled."""
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        self._probes.close()

    async def first_round(self, first: FirstRound) -> None:
        """Probe all workers once. Workers that do not answer may join later.

        Raises StartupError if `first.strict` and a listed worker is incompatible with the others. An
        incompatible worker from another source is only refused.
        """
        self._fleet.members.take(first.orders)
        listed = [worker for worker in self._fleet.workers if "config" in worker.sources]
        others = [worker for worker in self._fleet.workers if worker not in listed]
        await self._probe_first(listed, first.refused)  # first: other workers must be compatible with these
        refused = [worker.refused for worker in listed if worker.refused]
        if first.strict and refused:
            raise StartupError(refused[0])
        await self._probe_first(others, first.refused)

    async def _probe_first(self, workers: list[Worker], refused: Container[str]) -> None:
        """Ask all `workers` at once. Join them in an order that does not depend on who answered first."""
        answers = await asyncio.gather(*(self._ask(worker, asks_info=True) for worker in workers))
        infos = {worker.id: info for worker, info in zip(workers, answers, strict=True) if info is not None}
        found = [(worker, infos[worker.id]) for worker in workers if worker.id in infos]
        for worker in joining_order(found, refused):
            self._is_ready(worker, infos[worker.id])

    async def run(self) -> None:
        """Probe every worker periodically, each in its own task, until cancelled."""
        self._probed.clear()
        async with asyncio.TaskGroup() as probing:
            while True:
                await asyncio.sleep(self._config.interval_s)
                for worker in self._fleet.workers:
                    if worker not in self._probed:
                        self._probed.add(worker)
                        probing.create_task(self._keep_probing(worker))
                for gone in self._said.keys() - self._fleet.by_id.keys():
                    del self._said[gone]

    async def _keep_probing(self, worker: Worker) -> None:
        """Probe the worker periodically while it is a member."""
        for count in itertools.count(1):
            await self.probe(worker, asks_info=count % INFO_EVERY == 0)
            await asyncio.sleep(self._config.interval_s)
            if self._fleet.by_id.get(worker.id) is not worker:
                break
        self._probed.discard(worker)

    def _look_soon(self, worker: Worker) -> None:
        """Probe the worker now, and not when it is due: it may be dead."""
        if worker not in self._looking:
            self._looking[worker] = asyncio.create_task(self._look(worker))
            self._looking[worker].add_done_callback(lambda _: self._looking.pop(worker))

    async def _look(self, worker: Worker) -> None:
        for number in range(LOOKS):
            await asyncio.sleep(number * LOOK_AGAIN_S)
            await self.probe(worker, asks_info=False)

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """(status, body). Raises UpstreamError, TimeoutError."""
        timeout_s = self._config.timeout_s
        async with asyncio.timeout(timeout_s):  # the client's own deadlines are those of single steps
            answer = await self._probes.fetch(
                worker,
                path,
                b"",
                b"",
                limit_s=timeout_s,
                limit_bytes=MAX_ANSWER_BYTES,
                method=b"GET",
            )
            return answer.status, answer.body

    async def probe(self, worker: Worker, *, asks_info: bool) -> None:
        """Probe one worker and report to the fleet. Takes at most twice `timeout_s`.

        A healthy worker that the router knows is asked for `/pd/info` only if `asks_info`.
        """
        if (info := await self._ask(worker, asks_info=asks_info)) is not None:
            self._is_ready(worker, info)

    async def _ask(self, worker: Worker, *, asks_info: bool) -> WorkerInfo | None:
        """The worker's info if it is ready. None if not; then the fleet has been told."""
        fleet, config = self._fleet, self._config
        try:
            return await self._answer(worker, asks_info=asks_info)
        except _NotReadyError as error:
            went_down, what = fleet.on_probe_not_ready(worker), str(error)
        except UpstreamError as error:
            if error.kind == "busy":  # a fault of this machine says nothing
                went_down, what = False, f"cannot be probed: {error}"
            elif error.is_down:  # a closed port, or a wrong URL
                went_down, what = fleet.on_probe_not_ready(worker), f"cannot be reached: {error}"
            else:
                went_down = fleet.on_probe_unanswered(worker, config.failures_to_down)
                what = f"does not answer probes: {error}"
        except TimeoutError:
            went_down = fleet.on_probe_unanswered(worker, config.failures_to_down)
            what = f"does not answer probes within {config.timeout_s:g} s"
        self._lost(worker, went_down, what)
        return None

    async def _answer(self, worker: Worker, *, asks_info: bool) -> WorkerInfo | None:
        """As `_ask`; None: it stops. Raises _NotReadyError, UpstreamError, TimeoutError."""
        if worker.ready and worker.lacks("info") and not asks_info:
            return await self._foreign(worker, asks_info=False)
        status, answer = await self._get(worker, "/pd/ready")
        if status == 404:
            return await self._foreign(worker, asks_info=True)
        said = _ready_in(answer)
        if status != 200 and not said.draining:
            raise _NotReadyError("is not ready")
        self._fleet.on_load(worker, said.load, pool_up=said.pool == "up")
        if said.draining:
            if self._fleet.on_probe_stopping(worker):
                logger.info("%s worker %s stops: it finishes what it has", worker.role, worker.id)
            return None
        is_new = worker.info is not None and said.info_tag not in ("", worker.info.info_tag)
        if worker.ready and not (worker.stopping or worker.refused or asks_info or is_new):
            return worker.info
        what = "does not describe itself on /pd/info ({}); is it a pdserve worker?"
        return await self._described(worker, "/pd/info", _info_decoder.decode, what)

    async def _foreign(self, worker: Worker, *, asks_info: bool) -> WorkerInfo:
        """As `_answer`, of a server without `/pd/ready`."""
        status, _ = await self._get(worker, "/health")
        if status != 200:
            raise _NotReadyError("is not ready")
        self._fleet.on_load(worker, None)
        if worker.info is not None and not asks_info:
            return worker.info
        what = "has no /pd/ready and is no server of vLLM ({}); is it a pdserve worker?"

        def read(answer: bytes) -> WorkerInfo:
            return WorkerInfo.of_foreign(foreign_info(answer), worker.role)

        return await self._described(worker, "/v1/models", read, what)

    async def _described(
        self, worker: Worker, path: str, read: Callable[[bytes], WorkerInfo], what: str
    ) -> WorkerInfo:
        """What the worker says of itself. A worker that says nothing valid is not used."""
        status, answer = await self._get(worker, path)
        try:
            if status != 200:
                raise ValueError(f"{path} has status {status}")
            return read(answer)
        except (*UNREADABLE, ValueError) as error:
            worker.info = None
            raise _NotReadyError(what.format(error)) from None

    def _is_ready(self, worker: Worker, info: WorkerInfo) -> None:
        """Tell the fleet that the worker is ready and has this info."""
        if info != worker.info or worker.refused is not None or not worker.ready:
            was_refused = worker.refused
            refused = self._fleet.on_info(worker, info)
            if refused is not None and refused != was_refused:
                self._stats.joins_refused += 1
                logger.error("refused: %s", refused)
        if self._fleet.on_probe_ready(worker) and worker.refused is None:
            self._said.pop(worker.id, None)
            logger.info(
                "%s worker %s joined: model %r, context %d tokens, page size %d",
                worker.role,
                worker.id,
                info.model,
                info.context_length,
                info.page_size,
            )

    def _lost(self, worker: Worker, went_down: bool, what: str) -> None:
        if self._said.get(worker.id) != what:
            self._said[worker.id] = what
            logger.warning("%s worker %s %s", worker.role, worker.id, what)
        if went_down and worker.role == "prefill":
            self._upstream.cut_worker(worker)  # so decode workers take over now, not at the deadline
