"""Session affinity: soft stickiness by session table, else rendezvous hashing, both with bounded load.

Rendezvous (highest random weight) hashing: every router scores each worker by hash(session key, worker id)
and takes the best score, so replicas agree without shared state, and a worker that leaves moves only its
own sessions. Bounded load: a worker is overloaded when it has more than `overload_factor` times the mean
requests in flight (and more than `overload_min_requests`); then the next best score is taken. At least one
worker is at or below the mean, so one is always found. Source: Thaler & Ravishankar 1998; Mirrokni, Thorup
& Zadimoghaddam, "Consistent hashing with bounded loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from pdserve.router.fleet import Worker
from pdserve.router.policies.base import Choice, Policy
from pdserve.router.schema import Facts


class Affinity:
    """Prefers the session's last worker, then its rendezvous order; without a session key, asks
    `fallback`.
    """

    def __init__(self, fallback: Policy, *, overload_factor: float, overload_min_requests: int) -> None:
        self._fallback = fallback
        self._overload_factor = overload_factor
        self._overload_min_requests = overload_min_requests

    def choose(self, facts: Facts, workers: Sequence[Worker], last_id: str | None) -> Choice:
        """The session's worker unless it is gone or overloaded."""
        key = facts.session_key
        if key is None:
            return self._fallback.choose(facts, workers, last_id)
        limit = self.load_limit(workers)
        if last_id is not None:
            for worker in workers:
                if worker.id == last_id and worker.in_flight < limit:
                    return Choice(worker, "session")
        ranked = rendezvous_order(key, workers)
        for worker in ranked:
            if worker.in_flight < limit:
                return Choice(worker, "rendezvous")
        return Choice(ranked[0], "rendezvous")

    def load_limit(self, workers: Sequence[Worker]) -> float:
        """Requests in flight at which a worker is overloaded, the one to be placed counted into the mean."""
        mean = (sum(worker.in_flight for worker in workers) + 1) / len(workers)
        return max(self._overload_factor * mean, self._overload_min_requests)


def rendezvous_order(key: str, workers: Sequence[Worker]) -> list[Worker]:
    """`workers`, best score for `key` first; the order does not depend on the order given."""
    prefix = key.encode("utf-8", "surrogatepass") + b"\0"
    return sorted(
        workers, key=lambda w: (xxhash.xxh3_64_intdigest(prefix + w.id.encode()), w.id), reverse=True
    )
