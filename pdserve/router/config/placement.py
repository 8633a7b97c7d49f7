"""Settings of placement: sessions, and the weights of the cost function."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Stickiness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How closely sessions keep to their worker in one pool of workers."""

    mode: Annotated[
        Literal["soft", "hard"],
        Meta(
            description="soft: the session's worker is preferred, and left when overloaded; hard: never left."
        ),
    ] = "soft"
    overload_factor: Annotated[
        float,
        Meta(ge=1, description="soft: left when it has more than this times the mean of requests ..."),
    ] = 1.5
    overload_min_requests: Annotated[int, Meta(ge=1, description="... and more than this many requests.")] = 8
    when_gone: Annotated[
        Literal["move", "refuse"],
        Meta(
            description="The session's worker is gone: move to another, or refuse with 503 (a prefill "
            "worker: skip the stage) until it is back or the session is forgotten."
        ),
    ] = "move"
    without_key: Annotated[
        str, Meta(description="Policy for requests without a session key: any but affinity.")
    ] = "least_loaded"


class SharedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session table in Redis, shared by router replicas. Needs the package `redis`."""

    url: Annotated[
        str, Meta(description="`redis://HOST:PORT/DB`, `rediss://` or `unix://`; empty: no shared table.")
    ] = ""
    timeout_s: Annotated[
        float,
        Meta(gt=0, description="A look-up that takes longer is given up: the router's own table serves."),
    ] = 0.05
    retry_s: Annotated[
        float, Meta(gt=0, description="After a failure Redis is left alone for this long.")
    ] = 5.0
    prefix: Annotated[str, Meta(description="What its keys begin with.")] = "pdserve:session:"


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request's session key comes from, and how closely a session keeps to its workers."""

    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="Where the session key is looked for, in this order: `header:NAME`, `cookie:NAME`, "
            "`user` (the body's field), `body:PATH` (dotted path into the body), `messages` (hash chain of "
            "the messages after the system prompt)."
        ),
    ] = ("header:x-session-id", "header:x-user-id", "user")
    ttl_s: Annotated[float, Meta(gt=0, description="A session unseen for this long is forgotten.")] = 3600.0
    capacity: Annotated[
        int, Meta(ge=1, description="Sessions remembered; the longest unseen is forgotten first.")
    ] = 100_000
    prefill: Stickiness = Stickiness()
    decode: Stickiness = Stickiness()
    redis: SharedTable = SharedTable()


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the cost function, and how long a prefix is thought to stay where it was."""

    prefill_ms_per_token: Annotated[
        float, Meta(ge=0, description="Computing one prompt token; 0.1 is 10,000 tokens/s. Queued ones too.")
    ] = 0.1
    pool_ms_per_token: Annotated[float, Meta(ge=0, description="Reading one token's KV from the pool.")] = (
        0.01
    )
    host_ms_per_token: Annotated[
        float, Meta(ge=0, description="Reading one token's KV from the worker's own host memory.")
    ] = 0.002
    running_ms_per_request: Annotated[
        float, Meta(ge=0, description="What each request already at a worker delays a new one.")
    ] = 2.0
    missing_kv_ms_per_token: Annotated[
        float, Meta(ge=0, description="Each token of the prompt for which the worker has no free KV memory.")
    ] = 0.2
    leave_ms: Annotated[
        float, Meta(ge=0, description="Not going back to the worker of the session's last turn.")
    ] = 0.0
    device_half_life_s: Annotated[
        float, Meta(gt=0, description="After this long half of a prefix has left a worker's device memory.")
    ] = 120.0
    host_half_life_s: Annotated[
        float, Meta(gt=0, description="After this long half of a prefix has left a worker's host memory.")
    ] = 900.0
    pool_half_life_s: Annotated[
        float, Meta(gt=0, description="After this long half of a prefix has left the pool.")
    ] = 7200.0
    capacity_blocks: Annotated[
        int, Meta(ge=1, description="Blocks of prompt text (1 KiB and more) whose places are remembered.")
    ] = 50_000
    queue_share: Annotated[
        float,
        Meta(
            ge=0,
            description="Tokens added to min_prefill_tokens for each token by which the prefill worker's "
            "queue is longer than the decode worker's, and taken from it where it is shorter.",
        ),
    ] = 0.5
    max_direct_tokens: Annotated[
        int, Meta(ge=0, description="A long queue raises that threshold no higher than this.")
    ] = 8192
