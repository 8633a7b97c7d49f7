"""How long a node's requests take, by operation and namespace. Counting is a few dictionary and list
operations in the event loop, no lock; a snapshot is taken there too.

A request's time runs from the moment when its bytes were read off the socket (what waits behind others in the
same read counts) to the moment when its answer is written: waiting for a UCX transfer, for a tier or for its
namespace's turn included. `Wait` waits on purpose, and is counted as any other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from time import perf_counter
from typing import Final, NamedTuple

from pdserve.kvpool.protocol.messages import Commit, Fault, Reply, Request

BUCKETS_S: Final = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
FIRST_FORGET: Final = 256  # series; then namespaces that are gone are looked for
NO_NAMESPACE: Final = 0  # of requests that name none, or one that is not there


class Open(NamedTuple):
    """A request without an answer so far."""

    kind: type
    namespace: int
    since_s: float


class Series:
    """How long things took: the requests of one kind to one namespace, or the timers of the event loop."""

    __slots__ = ("counts", "refused", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0
        self.refused = 0  # answered with a Fault

    def observe(self, seconds: float) -> None:
        """One took so long."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def add(self, other: Series) -> None:
        """Count what the other counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s
        self.refused += other.refused

    def copy(self) -> Series:
        """As it is now."""
        new = Series()
        new.add(self)
        return new


class Meter:
    """Counts the requests of all connections of a node. `namespace_of_slot` is by slot number, `known` the
    namespaces there are.
    """

    def __init__(
        self,
        namespace_of_slot: Sequence[int],
        known: Container[int],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.clock = clock
        self._namespace_of_slot = namespace_of_slot
        self._known = known
        self._series: dict[tuple[type, int], Series] = {}
        self._forget_at = FIRST_FORGET

    def begin(self, message: Request, since_s: float) -> Open:
        """A request came."""
        kind = type(message)
        namespace = getattr(message, "namespace", NO_NAMESPACE)
        if kind is Commit:  # the one request that names its namespace by the slots it has
            slots: list[int] = message.slots  # type: ignore[union-attr]
            if slots and 0 <= slots[0] < len(self._namespace_of_slot):
                namespace = self._namespace_of_slot[slots[0]]
        return Open(kind, namespace, since_s)

    def end(self, request: Open, reply: Reply) -> None:
        """It was answered."""
        series = self._series.get(request[:2])
        if series is None:
            series = self._add(request)
        series.observe(self.clock() - request.since_s)
        if type(reply) is Fault:
            series.refused += 1

    def _add(self, request: Open) -> Series:
        if len(self._series) >= self._forget_at:  # nobody may ask for snapshots
            self._forget()
            self._forget_at = 2 * len(self._series) + FIRST_FORGET
        namespace = request.namespace if request.namespace in self._known else NO_NAMESPACE
        return self._series.setdefault((request.kind, namespace), Series())

    def snapshot(self) -> dict[tuple[str, int], Series]:
        """By name of the request and number of the namespace; namespaces that are gone are forgotten."""
        self._forget()
        return {(kind.__name__, number): series.copy() for (kind, number), series in self._series.items()}

    def _forget(self) -> None:
        """Namespaces that are gone."""
        for kind, namespace in list(self._series):
            if namespace != NO_NAMESPACE and namespace not in self._known:
                del self._series[kind, namespace]
