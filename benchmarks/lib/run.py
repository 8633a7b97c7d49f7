"""Sends a load to a server and keeps what came back of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from benchmarks.lib.client import ServerClient, asked
from benchmarks.lib.load import Load, Record, Request, Run, Session
from tests.support.processes import HarnessError

PROGRESS_EVERY_S: Final = 5.0
LAG_EVERY_S: Final = 0.02

Say = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """What to load: a base URL. The model is the first one served."""

    url: str
    silence_s: float = 120.0


def run_load(
    server: Server,
    load: Load,
    say: Say,
    *,
    concurrency: int = 0,
    lockstep: bool = False,
    tag: str = "",
    watch: Callable[[Record], None] | None = None,
    between: Callable[[int], None] | None = None,
) -> Run:
    """Send it all, in the closed loop at most `concurrency` requests at a time (0: all users at once), with
    `lockstep` each round once the one before is answered. `tag` tells the sessions of several runs apart;
    `watch` sees each record as it comes. In lockstep `between` is called in a thread before each round but
    the first, with how many there were; its time counts for nothing.
    Raises HarnessError where the server cannot be reached, or has too short a context.
    """
    return asyncio.run(_Loading(server, load, say, concurrency, lockstep, tag, watch, between).run())


def others_cpu_s() -> float:
    """Processor time of this machine that neither this process nor what it has started used."""
    busy, own = psutil.cpu_times(), 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            own += times.user + times.system + times.children_user + times.children_system
    return float(busy.user + busy.nice + busy.system + busy.irq + busy.softirq) - own


class _Loading:
    """One run."""

    def __init__(
        self,
        server: Server,
        load: Load,
        say: Say,
        concurrency: int,
        lockstep: bool,
        tag: str,
        watch: Callable[[Record], None] | None,
        between: Callable[[int], None] | None,
    ) -> None:
        self._server = server
        self._load = load
        self._say = say
        self._slots = asyncio.Semaphore(concurrency or len(load.sessions))
        self._lockstep = lockstep
        self._tag = tag or str(load.seed)
        self._watch = watch
        self._between = between
        self._records: list[Record] = []
        self._running = 0
        self._lags_s: list[float] = []

    async def run(self) -> Run:
        server = self._server
        self._client = ServerClient(server.url.rstrip("/"), server.silence_s)
        try:
            self._model, context = await self._client.model()
            if context is not None and self._load.longest_tokens > context:
                raise HarnessError(
                    f"the longest prompt with its answer has {self._load.longest_tokens:,} tokens, the "
                    f"server's context {context:,}: take a smaller --scale, fewer rounds, or --max-tokens"
                )
            return await self._measured()
        finally:
            await self._client.aclose()

    async def _measured(self) -> Run:
        watching = [asyncio.create_task(self._progress()), asyncio.create_task(self._watch_lag())]
        load = self._load
        sessions = [Session(load.seed, load.keeps_history) for _ in load.sessions]
        cpu_s, others_s = time.process_time(), others_cpu_s()
        self._began_s = time.monotonic()
        try:
            if self._lockstep:
                for round_ in range(max(map(len, self._load.sessions))):
                    if round_ and self._between is not None:
                        paused_s = time.monotonic()
                        await asyncio.to_thread(self._between, round_)
                        self._began_s += time.monotonic() - paused_s
                    due = [
                        (session, requests[round_])
                        for session, requests in zip(sessions, self._load.sessions, strict=True)
                        if round_ < len(requests)
                    ]
                    await asyncio.gather(
                        *(self._request(session, request, time.monotonic()) for session, request in due)
                    )
            else:
                pairs = zip(sessions, self._load.sessions, strict=True)
                await asyncio.gather(*(self._session(session, requests) for session, requests in pairs))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        wall_s = time.monotonic() - self._began_s
        records = sorted(self._records, key=lambda record: (record.turn, record.session))
        return Run(
            model=self._model,
            records=records,
            wall_s=wall_s,
            client_cpu=(time.process_time() - cpu_s) / wall_s,
            others_cpu=max(0.0, others_cpu_s() - others_s) / wall_s,
            lags_s=self._lags_s,
        )

    async def _session(self, session: Session, requests: tuple[Request, ...]) -> None:
        ready_s = self._began_s
        for request in requests:
            ready_s = await self._request(session, request, ready_s)

    async def _request(self, session: Session, request: Request, ready_s: float) -> float:
        """Send one request when it is due; when its answer was there. `ready_s`: when the one before was."""
        if request.at_s is not None:
            planned_s = self._began_s + request.at_s
            await asyncio.sleep(max(0.0, planned_s - time.monotonic()))
            return await self._send(session, request, planned_s, max(planned_s, ready_s))
        async with self._slots:
            now_s = time.monotonic()
            return await self._send(session, request, now_s, now_s)

    async def _send(self, session: Session, request: Request, planned_s: float, due_s: float) -> float:
        """`due_s`: when it could have been sent, had this client no delay of its own."""
        name = f"bench-{self._tag}-{request.session}"
        body = {**session.prompt(request), **asked(self._model, request.output_tokens)}
        self._running += 1
        response = await self._client.request(body, {"x-session-id": name, "x-user-id": name})
        self._running -= 1
        session.receive(request, () if response.error else response.token_ids)
        zero_s = self._began_s
        record = Record(
            session=request.session,
            turn=request.turn,
            planned_s=planned_s - zero_s,
            due_s=due_s - zero_s,
            sent_s=response.sent_s - zero_s,
            first_s=None if response.first_s is None else response.first_s - zero_s,
            done_s=response.done_s - zero_s,
            prompt_tokens=response.prompt_tokens or request.prompt_tokens,
            output_tokens=response.output_tokens,
            asked_tokens=request.output_tokens,
            reusable_tokens=request.reusable_tokens,
            cached=response.cached,
            gaps_s=response.gaps_s,
            error=response.error,
            detail=response.detail,
            server_timing=response.server_timing,
        )
        self._records.append(record)
        if self._watch is not None:
            self._watch(record)
        return response.done_s

    async def _progress(self) -> None:
        total = len(self._load.requests)
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            failed = sum(bool(record.error) for record in self._records)
            self._say(
                f"{time.monotonic() - self._began_s:5.0f} s: {len(self._records)} of {total} answered, "
                f"{self._running} under way, {failed} failed"
            )

    async def _watch_lag(self) -> None:
        """How late this process comes to what is due."""
        while True:
            due_s = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags_s.append(time.monotonic() - due_s)
