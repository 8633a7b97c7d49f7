"""Settings of placement: sessions, and the weights of the cost function."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

AGENTS_NAMES: Final = (
    "header:x-session-id",  # OpenCode too
    "header:x-claude-code-agent-id",  # an agent below Claude Code's
    "header:x-claude-code-session-id",
    "header:session-id",  # Codex, as the two that follow
    "header:session_id",
    "header:conversation_id",
    "header:x-opencode-session",  # OpenCode with its own provider, and with others
    "header:x-session-affinity",
    "header:x-openwebui-chat-id",
    "header:x-dynamo-session-id",
    "prompt_cache_key",
    "metadata.user_id",
    "header:x-user-id",
    "user:messages",
)
"""Where clients name their session, in the order in which it counts, and two sources for all others."""


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request's session key comes from, and how closely a session keeps to its workers."""

    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="Sources of the session key, in order of preference: `header:NAME`, "
            "`cookie:NAME`, `user` (the body's field), `user:messages` (each conversation of that user), "
            "`prompt_cache_key` (each conversation under that key), `metadata.user_id` (the session that it "
            "holds), `body:PATH` (dotted path into the body), `messages` (hash chain of the messages after "
            "the system prompt). The default are the names that agents give."
        ),
    ] = AGENTS_NAMES
    ttl_s: Annotated[
        float, Meta(gt=0, description="A session without a request for this long is forgotten.")
    ] = 3600.0
    capacity: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of sessions in the session table; the least recently seen is dropped first.",
        ),
    ] = 100_000
    mode: Annotated[
        Literal["soft", "hard"],
        Meta(
            description="soft: sessions leave their worker while it is overloaded; hard: they never leave it."
        ),
    ] = "soft"
    overload_factor: Annotated[
        float,
        Meta(
            ge=1,
            description="soft: a worker is overloaded if its requests exceed this factor times the mean, "
            "and overload_min_requests.",
        ),
    ] = 1.5
    overload_min_requests: Annotated[
        int, Meta(ge=1, description="soft: a worker with at most this many requests is never overloaded.")
    ] = 8
    when_gone: Annotated[
        Literal["move", "refuse"],
        Meta(
            description="When the session's worker is gone: move to another worker; or refuse with 503 "
            "(prefill: skip the stage) until the worker is back or the session is forgotten."
        ),
    ] = "move"
    without_key: Annotated[
        str, Meta(description="Policy for requests without a session key: any but affinity.")
    ] = "least_loaded"


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the cost function, and what is remembered of prompts."""

    prefill_ms_per_token: Annotated[
        float,
        Meta(
            ge=0,
            description="Cost of computing one prompt token, also of queued ones; 0.1 is 10,000 tokens/s.",
        ),
    ] = 0.1
    pool_ms_per_token: Annotated[
        float, Meta(ge=0, description="Cost of reading one token's KV from the pool.")
    ] = 0.01
    host_ms_per_token: Annotated[
        float, Meta(ge=0, description="Cost of reading one token's KV from the worker's host memory.")
    ] = 0.002
    running_ms_per_request: Annotated[
        float, Meta(ge=0, description="Delay of a new request by each request that the worker already has.")
    ] = 2.0
    missing_kv_ms_per_token: Annotated[
        float, Meta(ge=0, description="Cost of each prompt token for which the worker has no free KV memory.")
    ] = 0.2
    pool_from_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description='With handoff = "auto": a prompt of which some cache has so many tokens (estimated) '
            "goes through the pool.",
        ),
    ] = 4096
