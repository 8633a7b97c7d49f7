"""A pool node's Prometheus metrics: the whole list. Pure.

A hit rate is a quotient of two: hits over hits and misses, each as `rate(...[5m])`.
"""

from __future__ import annotations

from typing import Final

from pdserve.metric import Definition

PREFIX: Final = "pdserve_pool_"

_OF_NAMESPACE = ("namespace",)
METRICS: Final = (
    Definition("node_info", "gauge", ("node",), "1; names the node."),
    Definition("uptime_seconds", "gauge", (), "Time since the start of this process."),
    Definition(
        "operations",
        "counter",
        ("namespace", "operation", "outcome"),
        "Requests by message and outcome (ok, refused).",
    ),
    Definition(
        "operation_seconds",
        "histogram",
        ("namespace", "operation"),
        "Time from a request's arrival to its answer, including its time in the queue.",
    ),
    Definition("hits", "counter", _OF_NAMESPACE, "Requested pages that were found."),
    Definition(
        "misses",
        "counter",
        _OF_NAMESPACE,
        "Requested pages that were not found, or that exceeded the limit of pins.",
    ),
    Definition("read_bytes", "counter", _OF_NAMESPACE, "Bytes of found pages."),
    Definition(
        "found_pages",
        "counter",
        ("namespace", "place"),
        "Hits by place of the page: dram, or below (a tier) and loaded to memory.",
    ),
    Definition("written_bytes", "counter", _OF_NAMESPACE, "Bytes of committed pages."),
    Definition("written_pages", "counter", _OF_NAMESPACE, "Committed pages."),
    Definition("evictions", "counter", ("namespace", "reason"), "Evicted pages, by reason."),
    Definition("pages", "gauge", ("namespace", "place"), "Pages by place: dram, or below (all tiers)."),
    Definition("page_bytes", "gauge", ("namespace", "place"), "Bytes of those pages."),
    Definition(
        "slot_bytes",
        "gauge",
        _OF_NAMESPACE,
        "Memory in slots, including reservations. The quota limits this figure.",
    ),
    Definition("quota_bytes", "gauge", _OF_NAMESPACE, "Quota of memory; absent if there is none."),
    Definition(
        "tenant_bytes",
        "gauge",
        ("tenant", "place"),
        "Bytes of a tenant's pages of all models: dram, slots included; below: in tiers. Of the largest "
        "tenants; the others together are `(others)`.",
    ),
    Definition("replicas", "gauge", _OF_NAMESPACE, "Replicas of other nodes' pages."),
    Definition(
        "namespace_events", "counter", ("namespace", "event"), "Other events of a namespace, by kind."
    ),
    Definition(
        "memory_bytes",
        "gauge",
        ("state",),
        "Bytes of the arena by state: free, used, reserved, quarantined. Their sum is the capacity.",
    ),
    Definition("tail_bytes", "gauge", (), "Remainders of slabs, too small for a slot; part of free."),
    Definition("pins", "gauge", (), "Leases of readers on pages."),
    Definition("waits", "gauge", (), "Open `Wait` requests."),
    Definition("connections", "gauge", (), "Clients with a completed handshake."),
    Definition("sockets", "gauge", (), "All open sockets, including those before the handshake."),
    Definition("checksum_failures", "counter", (), "Pages dropped because a reader found them damaged."),
    Definition("reservations_expired", "counter", (), "Reservations that were not committed in time."),
    Definition("leases_expired", "counter", (), "Leases that readers did not release in time."),
    Definition("requests_waiting", "gauge", (), "Requests that wait in the fair queue of namespaces."),
    Definition("requests_held_back", "counter", (), "Requests that had to wait in the fair queue."),
    Definition("requests_overloaded", "counter", (), "Requests that waited for too long in that queue."),
    Definition(
        "requests_failed",
        "counter",
        (),
        "Requests that met an unexpected error, which cost their clients their connections. Above 0: a bug.",
    ),
    Definition("pushed_pages", "counter", (), "Pages pushed to the nodes that own them now."),
    Definition("pushed_bytes", "counter", (), "Bytes of those pages."),
    Definition("pushes_failed", "counter", (), "Pages that could not be pushed; they are tried again."),
    Definition("kept_bytes", "gauge", (), "Slots of pages that clients want kept for a while."),
    Definition("sweeping_bytes", "gauge", (), "Slots of dropped pages that are still being freed."),
    Definition("recovered_pages", "gauge", (), "Pages taken over from the previous process."),
    Definition("dropped_rows", "gauge", (), "Damaged rows of the slot table at the start."),
    Definition("events", "counter", ("event",), "Other events of the node, by kind."),
    Definition("tier_capacity_bytes", "gauge", ("tier", "kind"), "Size of a tier."),
    Definition("tier_used_bytes", "gauge", ("tier", "kind"), "Used bytes of a tier."),
    Definition("tier_pages", "gauge", ("tier", "kind"), "Pages in the tier."),
    Definition(
        "tier_writable", "gauge", ("tier", "kind"), "1: the tier accepts writes; 0: writing to it has failed."
    ),
    Definition("tier_events", "counter", ("tier", "event"), "Events of a tier, by kind."),
    Definition("epoch", "gauge", (), "Epoch of the ring, as known to this node."),
    Definition("members", "gauge", ("status",), "Nodes known to this node, by status."),
    Definition("moving", "gauge", (), "1: this node has pages that others own, or looks for them."),
    Definition(
        "pages_to_move",
        "gauge",
        (),
        "Pages that this node has still to push, as far as it has found them.",
    ),
    Definition("replica_bytes", "gauge", (), "Memory taken by replicas of other nodes' pages."),
    Definition("settled", "gauge", (), "1: nothing is left on this node that others own."),
    Definition("event_loop_lag_seconds", "histogram", (), "Lateness of the event loop for a timer, sampled."),
)
