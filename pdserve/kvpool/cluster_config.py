"""Configuration of how pool nodes find and watch each other."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where etcd is, and what of it is ours."""

    endpoints: Annotated[
        list[str], Meta(description="etcd's client URLs, e.g. `http://10.0.0.1:2379`; tried in order.")
    ] = []
    prefix: Annotated[str, Meta(min_length=1, description="Keys lie under `<prefix>/<cluster>/`.")] = (
        "/pdserve"
    )
    username: Annotated[str, Meta(description="User of etcd, where it asks for one.")] = ""
    password: Annotated[str, Meta(description="The user's password.")] = ""
    ca_file: Annotated[
        str, Meta(description="Certificates to check an https endpoint by; empty: the system's.")
    ] = ""
    timeout_s: Annotated[float, Meta(gt=0, description="Time for one request to etcd.")] = 2.0
    lease_s: Annotated[
        int, Meta(ge=1, description="A key goes when its owner has not renewed it for so long.")
    ] = 5
    retry_s: Annotated[float, Meta(gt=0, description="Pause before etcd is tried again after a failure.")] = (
        1.0
    )


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
