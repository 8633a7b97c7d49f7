"""A node's bounds as its configuration says. Pure."""

from __future__ import annotations

from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.leases import Limits, ReplicationLimits


def limits_of(config: PoolNodeConfig) -> Limits:
    """Those of NodeState."""
    return Limits(
        lease_s=config.lease_s,
        reservation_lease_s=config.reservation_lease_s,
        quarantine_s=config.quarantine_s,
        max_waiters=config.max_waiters,
        max_reserved_bytes=max(config.slab, int(config.capacity * config.max_reserved_share)),
        replication=ReplicationLimits(
            max_replicas=config.replicas.max_replicas,
            hot_reads_s=config.replicas.hot_reads_s,
            half_life_s=config.replicas.half_life_s,
            lease_s=config.replicas.lease_s,
            max_share=config.replicas.max_share,
        ),
        max_pinned_bytes=max(config.slab, int(config.capacity * config.max_pinned_share)),
        max_messages=config.max_messages,
    )
