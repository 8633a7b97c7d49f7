"""Deadlines of each phase, bounds on what a router holds, health checks, the service level, and Redis.

Deadlines of each phase, bounds on what a router holds, and settings of health checks.

The service level that requests are measured against.

The Redis by which routers of several hosts hear each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.security.tokens import Secret


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long each phase of a request may take, in seconds. A phase that ends late has a defined outcome."""

    head_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time to receive a client's request line and headers; after it, the answer is 408.",
        ),
    ] = 20.0
    body_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time to receive a client's body, plus 1 s for every 4 KiB; after it, the answer "
            "is 408.",
        ),
    ] = 30.0
    connect_s: Annotated[
        float,
        Meta(gt=0, description="Time of a TCP connect to a worker; after it, the next worker is tried."),
    ] = 2.0
    settle_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Longest wait for the previous turn's pages before a session's next turn; 0: no "
            "wait.",
        ),
    ] = 2.0
    prefill_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time to compute the prompt and publish its pages; after it, the decode worker "
            "computes the prompt.",
        ),
    ] = 120.0
    wait_for_worker_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Longest wait of a request while its model has no worker that is ready: at a "
            "restart, a scale from nothing, or after the last worker was lost; after it, the answer is 503. "
            "It does not count for admission.queue_s. 0: no wait.",
        ),
    ] = 30.0
    direct_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Direct hand-off: time until the prefill worker has computed the prompt and sent its "
            "KV; after it, the request goes through the pool. prefill_s counts where no worker computes "
            "prompts.",
        ),
    ] = 10.0
    first_byte_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Streams: time until the decode worker's first byte; after it, the answer is 504.",
        ),
    ] = 300.0
    early_head_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Streams: time until the answer's head is sent though no event has come yet. Then an "
            "error is an event of the stream, and the head lacks what is known later.",
        ),
    ] = 2.5
    whole_answer_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time until the decode worker begins an answer that is not a stream, to compute it; "
            "after it, the answer is 504.",
        ),
    ] = 1800.0
    between_chunks_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest gap between two chunks of a stream; after it, the stream ends with an "
            "error event.",
        ),
    ] = 120.0
    client_read_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time for which a client may take nothing of what is sent to it; after it, its "
            "connection is cut.",
        ),
    ] = 120.0
    total_s: Annotated[
        float, Meta(gt=0, description="Time of the whole request, including the client's reading.")
    ] = 3600.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what one router holds."""

    body_bytes: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="Largest request body; a larger one is answered with 413. None: 64 bytes for each "
            "token of the workers' longest context, from 4 MiB to 32 MiB; 32 MiB for models that embed or "
            "take media."
        ),
    ] = None
    prompts: Annotated[
        int, Meta(ge=1, description="Most prompts in one request; each counts as a request of its tenant.")
    ] = 2048
    choices: Annotated[
        int,
        Meta(
            ge=1,
            description="Most answers to each prompt (`n`, `best_of`); each counts as a request of its "
            "tenant.",
        ),
    ] = 128
    held_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Request bodies of all requests that a process reads, queues or serves together; "
            "beyond it, the answer is 503.",
        ),
    ] = 2 * 1024**3
    worker_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Most connections to one worker; beyond it, another worker is tried, or the "
            "answer is 503.",
        ),
    ] = 4096
    decode_attempts: Annotated[
        int,
        Meta(
            ge=1,
            description="Most decode workers tried for one request, including those that continue its "
            "stream.",
        ),
    ] = 2


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active health checks, and the circuit breaker fed by the outcome of requests."""

    interval_s: Annotated[float, Meta(gt=0, description="Time between two probes of a worker.")] = 1.0
    timeout_s: Annotated[
        float, Meta(gt=0, description="A probe without an answer for this long has failed.")
    ] = 2.0
    failures_to_down: Annotated[
        int, Meta(ge=1, description="Unanswered probes in a row that make a worker unhealthy.")
    ] = 2
    circuit_failures: Annotated[
        int, Meta(ge=1, description="Failed requests in a row that open a worker's circuit.")
    ] = 3


Kept = Literal["met", "ttft", "itl", "both"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each request should get: counted for streams, and used for the number of workers wanted."""

    ttft_ms: Annotated[
        float, Meta(ge=0, description="Longest time to the first token, in ms; 0: no level.")
    ] = 0.0
    itl_ms: Annotated[
        float,
        Meta(ge=0, description="Longest mean time between two tokens of an answer, in ms; 0: no level."),
    ] = 0.0

    def kept(self, ttft_ms: float, itl_ms: float) -> Kept:
        """What was missed by an answer with these times."""
        is_late = bool(self.ttft_ms) and ttft_ms > self.ttft_ms
        is_slow = bool(self.itl_ms) and itl_ms > self.itl_ms
        if is_late and is_slow:
            return "both"
        return "ttft" if is_late else "itl" if is_slow else "met"

    @property
    def is_set(self) -> bool:
        """There is a level to keep."""
        return bool(self.ttft_ms or self.itl_ms)


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How routers of several hosts tell each other of sessions and tenants. Needs the package `redis`."""

    url: Annotated[
        str,
        Meta(description="`redis://HOST:PORT/DB`, `rediss://` or `unix://`. Empty: routers share nothing."),
    ] = ""
    password: Annotated[
        Secret, Meta(description="Password, if Redis requires one; also from PDSERVE_REDIS_PASSWORD.")
    ] = Secret("")
    prefix: Annotated[
        str,
        Meta(
            min_length=1,
            description="Begins the name of the channel in Redis; one for each set of routers that share.",
        ),
    ] = "pdserve:"


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with what the router served, without texts, names and keys: for replays."""

    file: Annotated[
        str,
        Meta(
            description="Append a line in Mooncake's format for each answer: time, lengths, hashed blocks "
            "and session, up to 1 GB. FILE.secret, beside it, is the key of the hashes, not to be shared. "
            "Empty: none."
        ),
    ] = ""
