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

    sources: tuple[str, ...] = AGENTS_NAMES
    """Sources of the session key, in order of preference: `header:NAME`, `cookie:NAME`, `user` (the body's
    field), `user:messages` (each conversation of that user), `prompt_cache_key` (each conversation under that
    key), `metadata.user_id` (the session that it holds), `body:PATH` (dotted path into the body), `messages`
    (hash chain of the messages after the system prompt). The default are the names that agents give.
    """
    ttl_s: Annotated[float, Meta(gt=0)] = 3600.0
    """A session without a request for this long is forgotten."""
    capacity: Annotated[int, Meta(ge=1)] = 100_000
    """Number of sessions in the session table; the least recently seen is dropped first."""
    mode: Literal["soft", "hard"] = "soft"
    """soft: sessions leave their worker while it is overloaded; hard: they never leave it."""
    overload_factor: Annotated[float, Meta(ge=1)] = 1.5
    """soft: a worker is overloaded if its requests exceed this factor times the mean, and
    overload_min_requests.
    """
    overload_min_requests: Annotated[int, Meta(ge=1)] = 8
    """soft: a worker with at most this many requests is never overloaded."""
    when_gone: Literal["move", "refuse"] = "move"
    """When the session's worker is gone: move to another worker; or refuse with 503 (prefill: skip the stage)
    until the worker is back or the session is forgotten.
    """
    without_key: str = "least_loaded"
    """Policy for requests without a session key: any but affinity."""


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the cost function, and what is remembered of prompts."""

    prefill_ms_per_token: Annotated[float, Meta(ge=0)] = 0.1
    """Cost of computing one prompt token, also of queued ones; 0.1 is 10,000 tokens/s."""
    pool_ms_per_token: Annotated[float, Meta(ge=0)] = 0.01
    """Cost of reading one token's KV from the pool."""
    host_ms_per_token: Annotated[float, Meta(ge=0)] = 0.002
    """Cost of reading one token's KV from the worker's host memory."""
    running_ms_per_request: Annotated[float, Meta(ge=0)] = 2.0
    """Delay of a new request by each request that the worker already has."""
    missing_kv_ms_per_token: Annotated[float, Meta(ge=0)] = 0.2
    """Cost of each prompt token for which the worker has no free KV memory."""
    pool_from_tokens: Annotated[int, Meta(ge=0)] = 4096
    """With handoff = "auto": a prompt of which some cache has so many tokens (estimated) goes through the
    pool.
    """
