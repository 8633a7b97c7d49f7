"""Which requests end workers: blame for the deaths of workers, and the verdict on a request. Pure.

Some requests end the worker that computes them (an engine's bug). Tried again elsewhere, by the router or by
its client, such a request would end one worker after the other. Others that were in flight there must not be
taken for it. The rules:

- A *death* is a lost connection to a worker that a probe then finds gone (`judge`). A worker that announced
  its end, was drained or has left the fleet did not die; neither did one that says ready twice more.
- A death is one unit of blame, shared equally by its candidates. Candidates are the attempts in flight at
  that worker which can have caused it: an engine fails on what is new to it. So those without a first byte
  that have blame from another death; else those without a first byte; else those with blame; else all.
- A request whose blame is more than 1 is poison. One death cannot do that: it takes two, and at one of them
  the request was nearly alone. Among 16 streams that two workers lose, nobody is poison.
- To tell them apart, requests with a notable share are sent to workers one at a time, until the first byte
  (`Suspects` does that): the next death then has one candidate.
- A request that is answered is innocent, and its blame is forgotten. So equal requests are no poison.
- Blame ends after `WINDOW_S`; the `MAX_BLAMED` newest requests are remembered.

A request is known by a hash of its path and body. It is computed when a worker dies, and for requests that
come while there is any blame.

Requests under suspicion of ending workers: poison is refused, suspects are sent one at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol

import xxhash

from pdserve.errors import RequestError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.proxy.failures import WorkerWait, may_be_death
from pdserve.router.request.request import Request

WINDOW_S: Final = 600.0
MAX_BLAMED: Final = 1024
"""Requests with blame, and deaths that were judged: the newest ones."""
NOTABLE_SHARE: Final = 1 / 32
"""Requests with so much blame go one at a time. Of larger crowds each would wait too long for the others."""
_ALIVE_PROBES: Final = 2
"""One that says ready can have been under way when the connection was lost."""

Verdict = Literal["innocent", "undecided", "poison"]


class Peer(Protocol):
    """What is asked of a worker."""

    id: str
    incarnation: str
    ready: bool
    probes_ready: int

    @property
    def draining(self) -> bool:
        """It was told to end, or has announced it."""
        ...


class Flight:
    """One attempt of a request at a worker, as it was when a connection to that worker was lost."""

    __slots__ = ("_body", "_digest", "_path", "incarnation", "is_young", "worker")

    def __init__(self, worker: Peer, incarnation: str, path: str, body: bytes, *, is_young: bool) -> None:
        """`incarnation`: the worker's, when it was asked. `is_young`: it has sent no byte of an answer."""
        self.worker = worker
        self.incarnation = incarnation
        self.is_young = is_young
        self._path = path
        self._body = body
        self._digest = b""

    def digest(self, seed: int) -> bytes:
        """The request's hash."""
        if not self._digest:
            self._digest = digest_of(self._path, self._body, seed)
        return self._digest


def digest_of(path: str, body: bytes, seed: int) -> bytes:
    """The hash of a request. `seed`: the process' own, so that nobody can prepare two with the same hash."""
    hashed = xxhash.xxh3_128(path.encode(), seed=seed)
    hashed.update(body)
    return hashed.digest()


class _Death:
    """A lost connection, until it is known what it means."""

    __slots__ = ("blamed", "probes_ready", "share", "worker")

    def __init__(self, worker: Peer, blamed: set[bytes], share: float) -> None:
        self.worker = worker
        self.probes_ready = worker.probes_ready
        self.blamed = blamed
        self.share = share


class Suspicion:
    """All blame of one router process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._open: dict[str, _Death] = {}
        """Deaths that are not judged yet, by incarnation."""
        self._judged: dict[str, None] = {}
        """Incarnations whose death was judged, the newest last."""
        self._blame: dict[bytes, dict[str, tuple[float, float]]] = {}
        """Request → incarnation → (share, when it was judged); the newest request last."""
        self.is_active = False
        """Some request has blame. An attribute: every request asks."""

    def _update(self) -> None:
        self.is_active = bool(self._open or self._blame)

    def on_answered(self, path: str, body: bytes) -> None:
        """A worker has answered the request to its end."""
        if self.is_active:
            digest = digest_of(path, body, self._seed)
            self._blame.pop(digest, None)
            for death in self._open.values():
                death.blamed.discard(digest)
            self._update()

    def on_lost(self, flight: Flight, beside: Iterable[Flight]) -> None:
        """The connection ended before the answer did. `beside`: the other attempts in flight at that
        worker.
        """
        incarnation = flight.incarnation
        if incarnation in self._open or incarnation in self._judged:
            return
        if flight.worker.draining:
            self._note_judged(incarnation)
            return
        candidates = self._candidates([flight, *(one for one in beside if one.incarnation == incarnation)])
        blamed = {each.digest(self._seed) for each in candidates}
        self._open[incarnation] = _Death(flight.worker, blamed, 1 / len(candidates))
        self._update()

    def _candidates(self, flights: list[Flight]) -> list[Flight]:
        """Of the attempts at a worker that died those that can have caused it."""
        young = [flight for flight in flights if flight.is_young]
        blamed = [one for one in flights if self.is_active and self._total(one.digest(self._seed))]
        return [flight for flight in blamed if flight.is_young] or young or blamed or flights

    def is_open(self, flight: Flight) -> bool:
        """Probes are to tell whether the flight's worker is dead."""
        return flight.incarnation in self._open

    def judge(self, members: Mapping[str, Peer], now_s: float) -> None:
        """Look which lost connections were deaths. `members`: the workers of the fleet, by id."""
        for incarnation, death in list(self._open.items()):
            worker = death.worker
            has_ended = worker.draining or members.get(worker.id) is not worker
            is_dead = not has_ended and not (worker.ready and worker.incarnation == incarnation)
            if not (has_ended or is_dead or worker.probes_ready >= death.probes_ready + _ALIVE_PROBES):
                continue
            del self._open[incarnation]
            if has_ended or is_dead:
                self._note_judged(incarnation)
            if is_dead:
                for digest in death.blamed:
                    shares = self._blame.pop(digest, {})
                    self._blame[digest] = shares | {incarnation: (death.share, now_s)}
        self._forget(now_s)
        self._update()

    def _note_judged(self, incarnation: str) -> None:
        self._judged[incarnation] = None
        if len(self._judged) > MAX_BLAMED:
            del self._judged[next(iter(self._judged))]

    def _forget(self, now_s: float) -> None:
        while len(self._blame) > MAX_BLAMED:
            del self._blame[next(iter(self._blame))]
        for digest, shares in list(self._blame.items()):
            if all(at_s + WINDOW_S <= now_s for _, at_s in shares.values()):
                del self._blame[digest]

    def verdict(self, path: str, body: bytes, now_s: float) -> Verdict:
        """What is known of a request. undecided: that depends on a death that is not judged yet."""
        digest = digest_of(path, body, self._seed)
        shares = self._blame.get(digest, {})
        judged = sum(share for share, at_s in shares.values() if at_s + WINDOW_S > now_s)
        if judged > 1:
            return "poison"
        return "undecided" if judged + self._unjudged(digest) > 1 else "innocent"

    def is_notable(self, path: str, body: bytes) -> bool:
        """The request's blame is so much that it should be alone among those with blame."""
        return self.is_active and self._total(digest_of(path, body, self._seed)) >= NOTABLE_SHARE

    def _total(self, digest: bytes) -> float:
        return self._unjudged(digest) + sum(share for share, _ in self._blame.get(digest, {}).values())

    def _unjudged(self, digest: bytes) -> float:
        return sum(death.share for death in self._open.values() if digest in death.blamed)


VERDICT_S: Final = 10.0
"""Longest wait for the probes that tell whether a worker is dead."""
ALONE_S: Final = 10.0
"""Longest wait of a suspect for those before it. Afterwards it goes beside another one."""
POISON: Final = (
    "Two workers ended while they computed this request, so it is not sent to another one for "
    f"{WINDOW_S / 60:.0f} minutes."
)


class Suspects:
    """The suspicion of one router process, and what follows from it."""

    def __init__(self, fleet: Fleet, upstream: Upstream, stats: Stats, wait: WorkerWait) -> None:
        self.suspicion = Suspicion(random.getrandbits(64))
        self._fleet = fleet
        self._upstream = upstream
        self._stats = stats
        self._wait = wait
        self._turn = asyncio.Lock()
        self._alone: Request | None = None
        """The suspect that has the turn. At a direct hand-off it has attempts at two workers."""
        self._loop = asyncio.get_running_loop()
        fleet.watchers.insert(0, self._judge)  # before those who wait for the verdict

    async def take_turn(self, request: Request) -> bool:
        """Wait until the request may be sent to a worker: alone among suspects, if it is one. True: it has
        the turn, and must `pass_turn` when the worker has begun to answer, and so has survived the request's
        prefill and first token, or when the attempt is over.
        """
        is_notable = self.suspicion.is_notable(request.endpoint.path, request.body)
        if not is_notable or self._alone is request:
            return False
        acquiring = self._loop.create_task(self._turn.acquire())
        try:
            done, _ = await asyncio.wait({acquiring}, timeout=ALONE_S)
        except BaseException:
            self._let_go(acquiring)
            raise
        if not done:
            self._let_go(acquiring)
            return False
        self._alone = request
        return True

    def _let_go(self, acquiring: asyncio.Task[bool]) -> None:
        acquiring.cancel()
        acquiring.add_done_callback(lambda task: None if task.cancelled() else self._turn.release())

    async def check(self, request: Request) -> None:
        """Raises RequestError (400) if the request has ended two workers."""
        if await self.is_poison(request):
            raise RequestError(400, POISON, code="poisoned_request")

    async def is_poison(self, request: Request) -> bool:
        """Whether the request has ended two workers; it is counted then. Waits for the probes that tell."""
        if not self.suspicion.is_active:
            return False

        def verdict() -> Verdict | None:
            said = self.suspicion.verdict(request.endpoint.path, request.body, self._loop.time())
            return None if said == "undecided" else said

        is_poison = await self._wait.until(verdict, self._loop.time() + VERDICT_S) == "poison"
        self._stats.poisoned += is_poison
        return is_poison

    def pass_turn(self) -> None:
        """The suspect that has the turn needs it no longer."""
        self._alone = None
        self._turn.release()

    def on_failure(self, request: Request, worker: Worker, error: BaseException) -> None:
        """An attempt failed; the worker may be dead."""
        if not may_be_death(error) or not isinstance(error, UpstreamError):
            return
        path, body = request.endpoint.path, request.body
        flight = Flight(worker, error.incarnation or worker.incarnation, path, body, is_young=error.is_young)
        beside = []
        for up in self._upstream.pool(worker).asked_by():
            other = up.asked_by
            if isinstance(other, Request) and other.phase != "settle":
                path, body = other.endpoint.path, other.body
                beside.append(Flight(worker, up.incarnation, path, body, is_young=up.is_young))
        self.suspicion.on_lost(flight, beside)
        self._judge()
        known = self._fleet.by_id.get(worker.id)
        if self.suspicion.is_open(flight) and known is not None and self._fleet.on_doubt is not None:
            self._fleet.on_doubt(known)

    def _judge(self) -> None:
        if self.suspicion.is_active:
            self.suspicion.judge(self._fleet.by_id, self._loop.time())
