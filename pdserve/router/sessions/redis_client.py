"""A connection to Redis by the table `redis` of the configuration. The package is optional."""

from __future__ import annotations

import os
from typing import Any

from pdserve.errors import ConfigError
from pdserve.extras import needed_by
from pdserve.router.config.redis import RedisSettings
from pdserve.security.tokens import given_secret

CONNECTIONS = 16


def connect(settings: RedisSettings, timeout_s: float) -> tuple[Any, tuple[type[BaseException], ...]]:
    """(client, exceptions that it raises). Nothing is sent yet. `timeout_s`: of one exchange. Raises
    ConfigError.
    """
    with needed_by("redis.url", "redis"):
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.connection import parse_url
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    password = given_secret(
        "redis.password", settings.password, settings.password_file, "PDSERVE_REDIS_PASSWORD", os.environ
    )
    own = {"password": password} if password else {}
    try:
        # by its own parser: a password may also stand in the query
        if any("password" in part.lower() for part in parse_url(settings.url)):
            raise ConfigError(
                "redis.url holds a password, which would be shown with it: put the password into "
                "redis.password_file, or PDSERVE_REDIS_PASSWORD"
            )
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **own,
        )
        pool.make_connection()  # connects nowhere; an unknown option fails here, not in each request
    except (ValueError, TypeError, RedisError):
        # their text may hold a part of the URL
        raise ConfigError(
            "redis.url is none that Redis' client takes: give redis://HOST:PORT/DB, rediss:// or "
            "unix://PATH, with options of redis-py's connections"
        ) from None
    return Redis(connection_pool=pool), (RedisError, OSError, TimeoutError)
