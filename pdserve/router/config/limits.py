"""Deadlines of each phase, bounds on what a router holds, health checks, the service level, Redis, traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.security.tokens import Secret


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long each phase of a request may take, in seconds. A phase that ends late has a defined outcome."""

    head_s: Annotated[float, Meta(gt=0)] = 20.0
    """Time to receive a client's request line and headers; after it, the answer is 408."""
    body_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time to receive a client's body, plus 1 s for every 4 KiB; after it, the answer is 408."""
    connect_s: Annotated[float, Meta(gt=0)] = 2.0
    """Time of a TCP connect to a worker; after it, the next worker is tried."""
    settle_s: Annotated[float, Meta(ge=0)] = 2.0
    """A session's next turn waits for the last one's pages until so long after its answer; 0: no wait."""
    prefill_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time to compute the prompt and publish its pages; after it, the decode worker computes the prompt."""
    wait_for_worker_s: Annotated[float, Meta(ge=0)] = 30.0
    """Longest wait of a request while its model has no worker that is ready: at a restart, a scale from
    nothing, or after the last worker was lost; after it, the answer is 503. It does not count for
    admission.queue_s. 0: no wait.
    """
    direct_s: Annotated[float, Meta(gt=0)] = 10.0
    """Direct hand-off: time until the prefill worker has computed the prompt and sent its KV; after it, the
    request goes through the pool. prefill_s counts where no worker computes prompts.
    """
    first_byte_s: Annotated[float, Meta(gt=0)] = 300.0
    """Streams: time until the decode worker's first byte; after it, the answer is 504."""
    early_head_s: Annotated[float, Meta(ge=0)] = 2.5
    """Streams: time until the answer's head is sent though no event has come yet. Then an error is an event
    of the stream, and the head lacks what is known later.
    """
    whole_answer_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Time until the decode worker begins an answer that is not a stream, to compute it; after it, the answer
    is 504.
    """
    between_chunks_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest gap between two chunks of a stream; after it, the stream ends with an error event."""
    client_read_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time for which a client may take nothing of what is sent to it; after it, its connection is cut."""
    total_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Time of the whole request, including the client's reading."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what one router holds."""

    body_bytes: Annotated[int, Meta(ge=1024)] | None = None
    """Largest request body; a larger one is answered with 413. None: 64 bytes for each token of the workers'
    longest context, from 4 MiB to 32 MiB; 32 MiB for models that embed or take media.
    """
    prompts: Annotated[int, Meta(ge=1)] = 2048
    """Most prompts in one request; each counts as a request of its tenant."""
    choices: Annotated[int, Meta(ge=1)] = 128
    """Most answers to each prompt (`n`, `best_of`); each counts as a request of its tenant."""
    held_body_bytes: Annotated[int, Meta(ge=1024)] = 2 * 1024**3
    """Request bodies of all requests that a process reads, queues or serves together; beyond it, the answer
    is 503.
    """
    worker_connections: Annotated[int, Meta(ge=1)] = 4096
    """Most connections to one worker; beyond it, another worker is tried, or the answer is 503."""
    decode_attempts: Annotated[int, Meta(ge=1)] = 2
    """Most decode workers tried for one request, including those that continue its stream."""


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active health checks, and the circuit breaker fed by the outcome of requests."""

    interval_s: Annotated[float, Meta(gt=0)] = 1.0
    """Time between two probes of a worker."""
    timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """A probe without an answer for this long has failed."""
    failures_to_down: Annotated[int, Meta(ge=1)] = 2
    """Unanswered probes in a row that make a worker unhealthy."""
    circuit_failures: Annotated[int, Meta(ge=1)] = 3
    """Failed requests in a row that open a worker's circuit."""


Kept = Literal["met", "ttft", "itl", "both"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each request should get: counted for streams, and used for the number of workers wanted."""

    ttft_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Longest time to the first token, in ms; 0: no level."""
    itl_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Longest mean time between two tokens of an answer, in ms; 0: no level."""

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

    url: str = ""
    """`redis://HOST:PORT/DB`, `rediss://` or `unix://`. Empty: routers share nothing."""
    password: Secret = Secret("")
    """Password, if Redis requires one; also from PDSERVE_REDIS_PASSWORD."""
    prefix: Annotated[str, Meta(min_length=1)] = "pdserve:"
    """Begins the name of the channel in Redis; one for each set of routers that share."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with what the router served, without texts, names and keys: for replays."""

    file: str = ""
    """Append a line in Mooncake's format for each answer: time, lengths, hashed blocks and session, up to 1
    GB. FILE.secret, beside it, is the key of the hashes, not to be shared. Empty: none.
    """
