"""`[[command]]`: a process that is not pdserve's, by its command line. Pure.

The supervisor starts, watches and stops it like its own processes: another engine's worker behind the
router, a cache server between that and the pool, another stack's frontend. In `argv`, `env`, `ready` and the
strings of `config` it fills in:

    {host} {port}           where it listens; a port of 0 is a free one
    {port2} {port3} ...     further free ports of its own
    {host:NAME} {port:NAME} {url:NAME}    where another process of the cluster listens, and its http:// URL
    {pool}                  the pool's nodes, as JSON; where it is a whole string of `config`, the list itself
    {model}                 worker.engine.model_path of the cluster file, which --model gives
    {config}                the path of a TOML file with its `config`
    {run_dir}               the cluster's
    {token}                 the token of the cluster; in `env` alone, since others can read command lines
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError

PLACEHOLDER: Final = re.compile(
    r"\{(host|port\d?|url|pool|model|config|run_dir|token)(?::([A-Za-z0-9._-]+))?\}"
)
OF_OTHERS: Final = ("host", "port", "url")
POOL: Final = "{pool}"


class CommandConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[command]]`: one process by its command line."""

    argv: Annotated[list[str], Meta(min_length=1)]
    """Its command line."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    port: int = 0
    """Port that it listens on; 0 takes a free one."""
    ready: str = "http://{host}:{port}/health"
    """It is ready when this URL answers 200, or tcp:HOST:PORT takes a connection."""
    role: Literal["", "prefill", "decode", "agg"] = ""
    """The router's list that it stands in, as http://HOST:PORT; empty: none."""
    stage: Annotated[int, Meta(ge=0, le=9)] = 0
    """It starts once the commands of lower stages are ready."""
    config: dict[str, Any] = {}
    """Content of the file that {config} names."""


Find = Callable[[str, str], str]
"""The value of a placeholder, by its name and that of another process, or nothing. Raises ConfigError."""


def filled(text: str, find: Find) -> str:
    """With its placeholders filled in. Raises ConfigError."""

    def found(match: re.Match[str]) -> str:
        name, of = match[1], match[2] or ""
        if of and name not in OF_OTHERS:
            raise ConfigError(f"{match[0]}: only host, port and url may be another process's")
        return find(name, of)

    return PLACEHOLDER.sub(found, text)


def filled_table(value: Any, find: Find) -> Any:
    """The same of all strings of a table. Raises ConfigError."""
    if isinstance(value, Mapping):
        return {key: filled_table(one, find) for key, one in value.items()}
    if isinstance(value, list):
        return [filled_table(one, find) for one in value]
    if value == POOL:
        return json.loads(find("pool", ""))
    return filled(value, find) if isinstance(value, str) else value
