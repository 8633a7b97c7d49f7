"""A pool node's Prometheus metrics: the whole list. Pure.

A hit rate is a quotient of two: hits over hits and misses, each as `rate(...[5m])`.
"""

from __future__ import annotations

from typing import Final

from pdserve.metric import Definition

PREFIX: Final = "pdserve_pool_"

_OF_NAMESPACE = ("namespace",)
METRICS: Final = (
    Definition(
        "responding",
        "gauge",
        (),
        "1: the node's event loop answered in time; 0: it did not, and all others are absent.",
    ),
    Definition("node_info", "gauge", ("node",), "1; names the node."),
    Definition("uptime_seconds", "gauge", (), "Since the start of this process."),
    Definition(
        "operations",
        "counter",
        ("namespace", "operation", "outcome"),
        "Requests by message; outcome ok or refused.",
    ),
    Definition(
        "operation_seconds",
        "histogram",
        ("namespace", "operation"),
        "From a request's arrival to its answer, queueing included.",
    ),
    Definition("hits", "counter", _OF_NAMESPACE, "Pages asked for and found."),
    Definition(
        "misses", "counter", _OF_NAMESPACE, "Pages asked for and not found, or beyond what may be pinned."
    ),
    Definition("read_bytes", "counter", _OF_NAMESPACE, "Bytes of pages found."),
    Definition(
        "found_pages",
        "counter",
        ("namespace", "place"),
        "The hits by where the page was: dram, or below (SSD, directory) and brought up.",
    ),
    Definition("written_bytes", "counter", _OF_NAMESPACE, "Bytes of pages committed."),
    Definition("written_pages", "counter", _OF_NAMESPACE, "Pages committed."),
    Definition("evictions", "counter", ("namespace", "reason"), "Pages that had to go, by why."),
    Definition("pages", "gauge", ("namespace", "place"), "Pages; place dram or below (all tiers)."),
    Definition("page_bytes", "gauge", ("namespace", "place"), "Bytes of those pages."),
    Definition(
        "slot_bytes", "gauge", _OF_NAMESPACE, "Memory in slots, reservations included: what the quota bounds."
    ),
    Definition("quota_bytes", "gauge", _OF_NAMESPACE, "Quota in memory; absent where there is none."),
    Definition("replicas", "gauge", _OF_NAMESPACE, "Pages held as replicas of hot pages of other nodes."),
    Definition(
        "namespace_events", "counter", ("namespace", "event"), "What else happened to a namespace, by what."
    ),
    Definition(
        "memory_bytes",
        "gauge",
        ("state",),
        "The arena by state: free, used, reserved, quarantined; in sum its capacity.",
    ),
    Definition("tail_bytes", "gauge", (), "Ends of slabs that no slot of their size fits in; part of free."),
    Definition("pins", "gauge", (), "Leases of readers on pages."),
    Definition("waits", "gauge", (), "`Wait` requests that are open."),
    Definition("connections", "gauge", (), "Clients that shook hands."),
    Definition("sockets", "gauge", (), "All sockets, also before their clients said hello."),
    Definition("checksum_failures", "counter", (), "Pages dropped because a reader found them damaged."),
    Definition("reservations_expired", "counter", (), "Reservations that their writers let run out."),
    Definition("leases_expired", "counter", (), "Leases that their readers let run out."),
    Definition("requests_waiting", "gauge", (), "Requests that wait for their namespace's turn."),
    Definition("requests_held_back", "counter", (), "Requests that had to wait for it."),
    Definition("requests_overloaded", "counter", (), "Requests refused because too many waited."),
    Definition("pulled_pages", "counter", (), "Pages pulled from other nodes."),
    Definition("pulled_bytes", "counter", (), "Bytes of those pages."),
    Definition("pulls_failed", "counter", (), "Pages that could not be pulled; they are tried again."),
    Definition("sweeping_bytes", "gauge", (), "Slots of dropped pages that are still being freed."),
    Definition("recovered_pages", "gauge", (), "Pages taken over from the process before this one."),
    Definition("dropped_rows", "gauge", (), "Rows of the slot table that were found bad at the start."),
    Definition("events", "counter", ("event",), "What else happened on the node, by what."),
    Definition("tier_capacity_bytes", "gauge", ("tier", "kind"), "Size of a tier."),
    Definition("tier_used_bytes", "gauge", ("tier", "kind"), "Of which is used."),
    Definition("tier_pages", "gauge", ("tier", "kind"), "Pages in the tier."),
    Definition("tier_writable", "gauge", ("tier", "kind"), "1; 0 when writing to it failed."),
    Definition("tier_events", "counter", ("tier", "event"), "What happened in a tier, by what."),
    Definition("epoch", "gauge", (), "Epoch of the ring as this node knows it."),
    Definition("members", "gauge", ("status",), "Nodes this one knows, by status."),
    Definition("moving", "gauge", (), "1: this node pulls pages from others."),
    Definition(
        "pages_to_move", "gauge", (), "Pages it knows it has yet to pull; it learns of them by parts."
    ),
    Definition("hot_pages", "gauge", (), "Pages of this node that have, or get, replicas on others."),
    Definition("replica_bytes", "gauge", (), "Memory taken by replicas of other nodes' pages."),
    Definition("settled", "gauge", (), "1: this node has pulled everything that it owns."),
    Definition(
        "event_loop_lag_seconds", "histogram", (), "How late the event loop comes to what is due; sampled."
    ),
)
