"""Workers among which a policy chooses, and their order by load, kept up to date. Pure.

A walk over all workers for each request costs more than the rest of a decision where there are many. So an
`Order` keeps them sorted, and moves only those whose load has changed since it was last asked: `LoadLog` has
these. What is not asked for costs nothing, and an order that nobody holds any more is simply gone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from pdserve.router.fleet.worker import Worker

MAX_MOVED: Final = 4096
"""Changes that a `LoadLog` keeps: what some hundred requests make of them."""

Key = Callable[[Worker], float]
"""By what workers are ordered: a function of their load, the same one at each call."""


class LoadLog:
    """The workers whose load has changed, in the order of the changes. Readers keep their place in it."""

    __slots__ = ("is_read", "moved")

    def __init__(self) -> None:
        self.moved: list[Worker] = []
        self.is_read = False
        """There is a reader, or was: changes need not be written before."""

    def cut(self) -> None:
        """Begin a new list where this one has grown long. Its readers sort all their workers then."""
        if len(self.moved) > MAX_MOVED:
            self.moved = []


class Order:
    """Workers, the one with the smallest key first; of equal ones, in the order given."""

    def __init__(self, workers: Sequence[Worker], key: Key, log: LoadLog) -> None:
        self._workers = workers
        self._places = {worker: place for place, worker in enumerate(workers)}
        self._key = key
        self._log = log
        log.is_read = True
        self._sort()

    @property
    def mean_load(self) -> float:
        """Requests at a worker, on average."""
        self._update()
        return self._total_load / len(self._workers)

    def least(self, turn: int) -> Worker:
        """A worker with the smallest key. Equal ones take turns by `turn`."""
        return next(self.ascending(turn))[1]

    def ascending(self, turn: int) -> Iterator[tuple[float, Worker]]:
        """(key, worker), the smallest key first; equal ones take turns by `turn`. No load may change until
        the last one was taken.
        """
        self._update()
        ranked, workers, begin = self._ranked, self._workers, 0
        while begin < len(ranked):
            key = ranked[begin][0]
            end = bisect_right(ranked, (key, math.inf), begin)
            first = begin + turn % (end - begin)
            yield key, workers[ranked[first][1]]
            for rank in (*range(first + 1, end), *range(begin, first)):
                yield key, workers[ranked[rank][1]]
            begin = end

    def _sort(self) -> None:
        self._moved, self._read = self._log.moved, len(self._log.moved)
        self._keys = [self._key(worker) for worker in self._workers]
        self._loads = [worker.load for worker in self._workers]
        self._total_load = sum(self._loads)
        self._ranked = sorted((key, place) for place, key in enumerate(self._keys))

    def _update(self) -> None:
        """Move the workers whose load has changed since the last time."""
        moved = self._moved
        if moved is not self._log.moved:
            self._sort()
            return
        if len(moved) == self._read:
            return
        news, self._read = moved[self._read :], len(moved)
        for worker in news if len(news) == 1 else set(news):
            place = self._places.get(worker)
            if place is None:
                continue
            load, key, before = worker.load, self._key(worker), self._keys[place]
            self._total_load += load - self._loads[place]
            self._loads[place] = load
            if key != before:
                del self._ranked[bisect_left(self._ranked, (before, place))]
                insort(self._ranked, (key, place))
                self._keys[place] = key


class Eligible(tuple[Worker, ...]):
    """Workers among which a policy may choose, in a fixed order. They are live, not copies."""

    log: LoadLog
    by_id: dict[str, Worker]
    by_incarnation: dict[str, Worker]
    rendezvous: tuple[int, ...]
    """Of each worker, what a session's hash is multiplied with."""
    _orders: dict[Key, Order]

    def __new__(cls, workers: Iterable[Worker], log: LoadLog) -> Eligible:
        """`log`: that of their fleet."""
        made = super().__new__(cls, workers)
        made.log, made._orders = log, {}
        made.by_id = {worker.id: worker for worker in made}
        made.by_incarnation = {worker.incarnation: worker for worker in made}
        made.rendezvous = tuple([worker.rendezvous for worker in made])
        return made

    def order(self, key: Key) -> Order:
        """Their order by this key, made at the first call."""
        found = self._orders.get(key)
        if found is None:
            found = self._orders[key] = Order(self, key, self.log)
        return found


NOBODY: Final = Eligible((), LoadLog())
