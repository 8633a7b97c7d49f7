"""One process's metrics: its counters, and what its fleet, its gate and its connections keep."""

from __future__ import annotations

import msgspec

from pdserve.metric import Labels
from pdserve.router.admission.gate import Gate, gate_metrics
from pdserve.router.fleet.registry import Fleet
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Snapshot, Stats
from pdserve.router.placement.elastic import ElasticRoles
from pdserve.router.proxy.handle import Proxy


def collect(
    stats: Stats, fleet: Fleet, gate: Gate, upstream: Upstream, proxy: Proxy, now_s: float
) -> Snapshot:
    """All metrics as they are now."""
    kinds = msgspec.structs.asdict(upstream.counts)
    stats.show(
        {
            "requests_in_flight": len(proxy.running),
            "sessions": len(proxy.placer.sessions),
            "upstream_connections": {(kind,): count for kind, count in kinds.items()},
            "upstream_connections_open": upstream.open_count,
            "upstream_connections_idle": upstream.idle_count,
            **_of_elastic(fleet, proxy.placer.elastic, now_s),
            **_of_workers(fleet),
            **gate_metrics(gate),
        }
    )
    stats.queue_wait = gate.queue_wait
    return stats.snapshot()


def _of_workers(fleet: Fleet) -> dict[str, dict[Labels, int]]:
    workers = {(worker.id, worker.role): worker for worker in fleet.workers}
    in_flight: dict[Labels, int] = dict.fromkeys(workers, 0)
    for worker in fleet.members.at_work:
        key = worker.id, worker.role
        in_flight[key] = in_flight.get(key, 0) + worker.in_flight
    return {
        "worker_requests_in_flight": in_flight,
        "worker_healthy": {key: int(w.ready and w.refused is None) for key, w in workers.items()},
        "worker_draining": {key: int(w.draining) for key, w in workers.items()},
        "worker_circuit_open": {key: int(w.circuit.retry_at_s > 0) for key, w in workers.items()},
        "worker_refused": {key: int(w.refused is not None) for key, w in workers.items()},
    }


def _of_elastic(fleet: Fleet, elastic: ElasticRoles, now_s: float) -> dict[str, dict[Labels, float]]:
    wanted: dict[Labels, float] = {}
    prefills: dict[Labels, float] = {}
    for model in fleet.models:
        snapshot = fleet.snapshot(model, now_s)
        if elastic.counts(snapshot):
            roles = {w.role for w in fleet.workers if w.info is not None and w.info.model == model}
            of_role = elastic.wanted_of_role(snapshot, roles, now_s)
            wanted |= {(model, role): round(workers, 3) for role, workers in of_role.items()}
        prefilling = elastic.prefilling(model)
        prefills |= {(w.id, w.role): float(w.id in prefilling) for w in snapshot.elastic}
    return {
        "workers_wanted": wanted,
        "worker_prefills": prefills,
        "duty_changes": {(model,): float(count) for model, count in elastic.changes().items()},
    }
