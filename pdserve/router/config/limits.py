"""Deadlines of each phase, bounds on what a router holds, and settings of health checks."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long each phase of a request may take, in seconds. A phase that ends late has a defined outcome."""

    head_s: Annotated[
        float, Meta(gt=0, description="A client's request line and headers; later, it gets a 408.")
    ] = 20.0
    body_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A client's body, and a second more for every 4 KiB of it; later, it gets a 408.",
        ),
    ] = 30.0
    connect_s: Annotated[
        float, Meta(gt=0, description="TCP connect to a worker; later, the next worker is tried.")
    ] = 2.0
    settle_s: Annotated[
        float,
        Meta(
            ge=0, description="Wait for the previous turn's pages before a session's next turn; 0: no wait."
        ),
    ] = 2.0
    prefill_s: Annotated[
        float,
        Meta(gt=0, description="The prefill worker's computing; later, the decode worker does it alone."),
    ] = 120.0
    publish_s: Annotated[
        float,
        Meta(ge=0, description="Added to prefill_s for the prefill worker to publish the prompt's pages."),
    ] = 5.0
    hedge_prefill_s: Annotated[
        float,
        Meta(
            ge=0,
            description="A prefill not done by then is asked of a second worker too, the faster one wins; "
            "0: never.",
        ),
    ] = 0.0
    first_byte_s: Annotated[
        float, Meta(gt=0, description="Decode worker's first byte; later, the client gets a 504.")
    ] = 300.0
    between_chunks_s: Annotated[
        float, Meta(gt=0, description="Gap between two chunks of a stream; longer ends it in an error event.")
    ] = 120.0
    total_s: Annotated[
        float, Meta(gt=0, description="The whole request, reading by the client included.")
    ] = 3600.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what one router holds."""

    body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body; larger is answered 413.")] = (
        32 * 1024 * 1024
    )
    worker_connections: Annotated[
        int, Meta(ge=1, description="Connections to one worker; at the bound, another worker or 503.")
    ] = 4096
    idle_connections: Annotated[
        int, Meta(ge=0, description="Idle keep-alive connections kept to one worker.")
    ] = 256
    decode_attempts: Annotated[
        int,
        Meta(ge=1, description="Decode workers tried for one request, for the rest of a stream included."),
    ] = 2
    retry_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Second tries (and hedges) for each request, beside retries_per_s."),
    ] = 0.2
    retries_per_s: Annotated[
        float, Meta(ge=0, description="Second tries allowed in each second, however few the requests.")
    ] = 10.0


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active health checks, and the circuit breaker fed by the outcome of requests."""

    interval_s: Annotated[float, Meta(gt=0, description="Time between two probes of a worker.")] = 1.0
    timeout_s: Annotated[float, Meta(gt=0, description="A probe unanswered for this long has failed.")] = 2.0
    failures_to_down: Annotated[
        int, Meta(ge=1, description="Unanswered probes in a row that make a worker unhealthy.")
    ] = 2
    circuit_failures: Annotated[
        int, Meta(ge=1, description="Failed requests in a row that open a worker's circuit.")
    ] = 3
    circuit_open_s: Annotated[
        float, Meta(gt=0, description="An open circuit lets one request try the worker after this long.")
    ] = 5.0
