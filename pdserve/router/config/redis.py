"""The Redis in which routers agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.security.tokens import Secret


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What several routers share: sessions, and tenants' limits. Needs the package `redis`."""

    url: Annotated[
        str,
        Meta(description="`redis://HOST:PORT/DB`, `rediss://` or `unix://`. Empty: routers share nothing."),
    ] = ""
    password: Annotated[
        Secret, Meta(description="Password, if Redis requires one; also from PDSERVE_REDIS_PASSWORD.")
    ] = Secret("")
    password_file: Annotated[Path | None, Meta(description="File that holds this secret instead.")] = None
    prefix: Annotated[
        str,
        Meta(
            min_length=1,
            description="Begins the keys and the channel in Redis; one for each set of routers that share.",
        ),
    ] = "pdserve:"
    sessions: Annotated[
        bool,
        Meta(description="Share the table of sessions: a conversation goes on at any router, as it was."),
    ] = True
    limits: Annotated[
        bool, Meta(description="Tenants' rates and concurrency are those of all routers together.")
    ] = True
    lookup_s: Annotated[
        float,
        Meta(gt=0, description="Longest look-up of a session; after it, the router's own table is used."),
    ] = 0.05
    retry_s: Annotated[
        float, Meta(gt=0, description="No session is looked up for so long after a failure.")
    ] = 5.0
    away_s: Annotated[
        float,
        Meta(
            ge=1,
            description="Redis counts as away when a process does not hear its own word through it for so "
            "long. Then it holds an equal share of the limits. No request waits for Redis.",
        ),
    ] = 1.0
    processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Least number of router processes, of all routers together, that limits are divided "
            "by while Redis is away. More are counted where they were heard before.",
        ),
    ] = 1

    @property
    def shares_sessions(self) -> bool:
        """There is a Redis, and sessions are in it."""
        return bool(self.url) and self.sessions

    @property
    def shares_limits(self) -> bool:
        """There is a Redis, and routers tell each other by it what tenants use."""
        return bool(self.url) and self.limits
