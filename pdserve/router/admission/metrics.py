"""Metrics of tenants and of the queue."""

from __future__ import annotations

from pdserve.metric import Labels
from pdserve.router.admission.gate import Gate


def gate_metrics(gate: Gate) -> dict[str, dict[Labels, int]]:
    """Counters and gauges by name, then by labels. Tenants are as many as the keys file names."""
    tenants = gate.tenants.all
    requests: dict[Labels, int] = {}
    tokens: dict[Labels, int] = {}
    for tenant in tenants:
        requests[tenant.name, "admitted"] = tenant.use.requests
        requests[tenant.name, "refused"] = tenant.use.refused
        tokens[tenant.name, "prompt"] = tenant.use.prompt_tokens
        tokens[tenant.name, "output"] = tenant.use.output_tokens
    return {
        "tenant_requests": requests,
        "tenant_tokens": tokens,
        "tenant_running": {(tenant.name,): tenant.running for tenant in tenants},
        "tenant_waiting": {(tenant.name,): tenant.waiting for tenant in tenants},
        "unknown_keys": {(): gate.unknown_keys},
        "unread_keys": {(): gate.unread_keys},
    }
