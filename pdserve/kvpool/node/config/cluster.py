"""Configuration of how pool nodes find and watch each other."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.discovery.config import EtcdConfig


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that a node belongs to. Intervals are for a loss to be noticed within 2 s."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the pool; others are refused."
        ),
    ] = "pool"
    membership: Annotated[
        Literal["static", "etcd"], Meta(description="Where a node finds the first others.")
    ] = "static"
    peers: Annotated[
        list[str],
        Meta(
            description="Addresses of other nodes, this one's own may be among them. One that answers "
            "is enough: it knows the rest."
        ),
    ] = []
    etcd: Annotated[EtcdConfig, Meta(description='For membership = "etcd".')] = EtcdConfig()
    advertise: Annotated[
        str, Meta(description="Address that clients and nodes reach this node by; empty: first of `listen`.")
    ] = ""
    weight: Annotated[
        int, Meta(ge=0, le=16384, description="Share of the ring; 0: the capacity in GiB, at least 1.")
    ] = 0
    token: Annotated[str, Meta(description="Secret of the pool's nodes; all must have the same.")] = ""
    leave_on_stop: Annotated[
        bool, Meta(description="Tell the others at a clean stop, instead of letting them find out.")
    ] = False
    join_timeout_s: Annotated[
        float,
        Meta(gt=0, description="How long a starting node waits for another's answer before it goes on."),
    ] = 1.0
    ping_interval_s: Annotated[
        float, Meta(gt=0, description="How often a node is asked whether it lives.")
    ] = 0.3
    ping_timeout_s: Annotated[
        float, Meta(gt=0, description="A node not heard of for so long is suspected; others are asked.")
    ] = 1.0
    indirect_timeout_s: Annotated[
        float, Meta(gt=0, description="A suspect that no other reached within this time is dead.")
    ] = 0.5
    sync_interval_s: Annotated[
        float, Meta(gt=0, description="How often some other node, alive or dead, is told everything.")
    ] = 1.0


class MovingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node pulls when the ring has changed. Sizes may be written like `4GiB`."""

    bytes_s: Annotated[
        int | str, Meta(description="Bytes per second that it pulls at most; 0: as fast as it goes.")
    ] = "500MB"
    batch_bytes: Annotated[int | str, Meta(description="Bytes asked for at a time, at least a page.")] = (
        "8MiB"
    )
    max_peers: Annotated[int, Meta(ge=1, le=64, description="Nodes that it pulls from at a time.")] = 4
    timeout_s: Annotated[
        float,
        Meta(gt=0, description="Time for one request to another node; a batch gets more for its bytes."),
    ] = 5.0


class ReplicasConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of pages that are read much, on the nodes that follow their owner on the ring."""

    max_replicas: Annotated[
        int, Meta(ge=0, le=15, description="Copies of a hot page beside its owner's; 0: none are made.")
    ] = 2
    hot_reads_s: Annotated[
        float, Meta(gt=0, description="A page read more often than this is hot; at half of it, no more.")
    ] = 20.0
    half_life_s: Annotated[float, Meta(gt=0, description="Time in which a past read counts half.")] = 10.0
    lease_s: Annotated[
        float, Meta(gt=0, description="A copy that its owner has not renewed for so long is dropped.")
    ] = 10.0
    max_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of a node's memory that copies may take.")
    ] = 0.1
