"""Session affinity: the worker of the session's last turn, else rendezvous hashing with bounded load.

Rendezvous (highest random weight) hashing: every router scores each worker by hash(session name, worker id)
and takes the best score. So replicas agree without shared state, also after a restart, and a worker that
leaves moves only its own sessions. Source: Thaler & Ravishankar, 1998.

Bounded load (mode soft): a worker is overloaded if it has more than `overload_factor` times the mean of
requests, and more than `overload_min_requests`. Then the worker with the next best score is taken. At least
one worker is at or below the mean, so one is always found. Mode hard ignores load. Source: Mirrokni, Thorup &
Zadimoghaddam, "Consistent hashing with bounded loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.placement import Session
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Choice, Policy


class Affinity:
    """Sends a session to one worker. `fallback` places requests without a session."""

    def __init__(self, stickiness: Session, fallback: Policy) -> None:
        self._stickiness = stickiness
        self._fallback = fallback
        self.needs_places = fallback.needs_places

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The session's worker, or another one if it is gone or overloaded.

        Raises NoWorkerError if the session's worker is gone and `when_gone` is refuse.
        """
        if ask.session is None:
            return self._fallback.choose(ask, workers)
        limit = self.load_limit(workers)
        why = "rendezvous"
        if ask.last_id is not None:
            last = next((worker for worker in workers if worker.id == ask.last_id), None)
            if last is not None and last.load < limit:
                return Choice(last, "session")
            if last is not None:
                why = "overloaded"
            elif self._stickiness.when_gone == "refuse":
                raise NoWorkerError("The worker of this session is gone; try again shortly.")
            else:
                why = "gone"
        ranked = rendezvous_order(ask.session, workers)
        for worker in ranked:
            if worker.load < limit:
                return Choice(worker, why)
        return Choice(ranked[0], why)

    def load_limit(self, workers: Sequence[Worker]) -> float:
        """Number of requests above which a worker is overloaded. The mean includes the new request."""
        if self._stickiness.mode == "hard":
            return float("inf")
        mean = (sum(worker.load for worker in workers) + 1) / len(workers)
        return max(self._stickiness.overload_factor * mean, self._stickiness.overload_min_requests)


def rendezvous_order(session: str, workers: Sequence[Worker]) -> list[Worker]:
    """`workers` by their score for the session, best first. The input order does not matter."""
    prefix = session.encode("utf-8", "surrogatepass") + b"\0"
    return sorted(
        workers, key=lambda w: (xxhash.xxh3_64_intdigest(prefix + w.id.encode()), w.id), reverse=True
    )
