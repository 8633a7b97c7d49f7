"""Configuration of how a node moves pages from and to the others."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


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
