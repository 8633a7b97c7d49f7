"""One process's metrics, from its counters, its fleet, its gate and its connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from pdserve.metric import Labels
from pdserve.router.admission.gate import Gate, gate_metrics
from pdserve.router.fleet.registry import Fleet
from pdserve.router.metrics.stats import Histogram, Snapshot, Stats
from pdserve.router.placement.elastic import ElasticRoles
from pdserve.router.placement.placer import Placer
from pdserve.router.upstream.client import Upstream

V = TypeVar("V")


def collect(
    stats: Stats, fleet: Fleet, gate: Gate, upstream: Upstream, placer: Placer, now_s: float
) -> Snapshot:
    """All metrics as they are now. The snapshot shares nothing with the counters."""
    values: dict[str, Mapping[Labels, float] | float] = {
        "requests": stats.requests,
        "requests_in_flight": stats.in_flight,
        "turn_tokens": stats.turn_tokens,
        "client_aborts": _keyed(stats.client_aborts),
        "stream_errors": _keyed(stats.stream_errors),
        "placements": stats.placements,
        "prefill": _keyed(stats.prefill),
        "direct": _keyed(stats.direct),
        "settle": _keyed(stats.settle),
        "pull_ahead": _keyed(stats.pull_ahead),
        "decode_retries": _keyed(stats.decode_retries),
        "streams_continued": _keyed(stats.continued),
        "retries_refused": stats.retries_refused,
        "nonces": stats.nonces,
        "poisoned_requests": stats.poisoned,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_cached_tokens": _keyed(stats.cached_tokens),
        "prefill_missing_pages": stats.missing_pages,
        "processes_silent": 0,  # whoever adds up adds the processes that do not answer
        "joins_refused": stats.joins_refused,
        "task_failures": _keyed(stats.task_failures),
        "sessions": len(placer.sessions),
        "limits_apart": stats.limits_apart,
        "slo_streams": stats.slo_streams,
        **_of_elastic(fleet, placer.elastic, now_s),
        "upstream_connections": _keyed(msgspec.structs.asdict(upstream.counts)),
        "upstream_connections_open": upstream.open_count,
        "upstream_connections_idle": upstream.idle_count,
        **_of_workers(fleet),
        **gate_metrics(gate),
    }
    histograms: dict[str, Mapping[Labels, Histogram]] = {
        "time_to_first_byte_seconds": _keyed(stats.first_byte),
        "first_token_seconds": _keyed(stats.first_token),
        "model_request_seconds": _keyed(stats.model_request),
        "model_first_token_seconds": _keyed(stats.model_first_token),
        "model_inter_token_seconds": _keyed(stats.model_inter_token),
        "queue_wait_seconds": {(): gate.queue_wait},
    }
    return Snapshot(
        {name: dict(of) if isinstance(of, Mapping) else {(): of} for name, of in values.items()},
        {name: {key: one + Histogram() for key, one in of.items()} for name, of in histograms.items()},
    )


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


def _keyed(values: Mapping[str, V]) -> dict[Labels, V]:
    """With the key as the only label."""
    return {(key,): value for key, value in values.items()}
