"""vLLM workers and LMCache servers in a cluster file: their tables, and the command lines made of them. Pure.

Both run in an environment of their own, with their own versions of torch. vLLM keeps pages in its LMCache
server, and the server in the pool (`pdserve.integrations.lmcache`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

ADAPTER: Final = "pdserve.integrations.lmcache"
VllmRole = Literal["prefill", "decode", "agg"]
LmcacheStorage = Literal["pool", "none"]
ALONE: Final = "none"
"""The name of no LMCache server."""
Arguments = Annotated[list[str], Meta(description="Further arguments of its command line.")]


class LmcacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[lmcache]]`: one LMCache server."""

    python: Annotated[str, Meta(description="Interpreter of the environment with LMCache, vLLM and pdserve.")]
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port for vLLM; 0 takes a free one.")] = 0
    http_port: Annotated[
        int, Meta(description="Port of its HTTP interface and metrics; 0 takes a free one.")
    ] = 0
    l1_size_gb: Annotated[float, Meta(gt=0, description="Its own memory for pages.")] = 1.0
    chunk_size: Annotated[int, Meta(ge=1, description="Tokens of a page.")] = 256
    storage: Annotated[
        LmcacheStorage,
        Meta(
            description="Where it stores pages of its memory: `pool`; or `none`, and what `--l2-adapter` in "
            "`args` names."
        ),
    ] = "pool"
    revision: Annotated[
        str, Meta(description="What else changes KV, see the adapter's `revision`; same for all servers.")
    ] = ""
    pool: Annotated[dict[str, Any], Meta(description="How it reaches the pool, as at a worker.")] = {}
    args: Arguments = []


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[vllm]]`: one vLLM worker."""

    python: Annotated[str, Meta(description="Interpreter of the environment with vLLM and LMCache.")]
    model_path: Annotated[str, Meta(description="Directory or name of the model.")]
    role: Annotated[VllmRole, Meta(description="The router's list that it stands in.")] = "agg"
    served_model_name: Annotated[
        str, Meta(description="Its name for clients; empty: the last part of model_path.")
    ] = ""
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port; 0 takes a free one.")] = 0
    lmcache: Annotated[
        str,
        Meta(
            description="Name of its LMCache server; empty: the first one. `none`: vLLM alone, and no pool."
        ),
    ] = ""
    save_answers: Annotated[bool, Meta(description="Store the pages of answers too, for next turns.")] = True
    args: Arguments = []


def lmcache_argv(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line of a server. `config`: fields of `LmcacheConfig`, with all ports."""
    params = {"pool": config["pool"], "revision": config.get("revision", "")}
    adapter = {"type": "plugin", "module_path": ADAPTER, "class_name": "PdserveL2", "adapter_params": params}
    below = ("--l2-adapter", json.dumps(adapter)) if config.get("storage", "pool") == "pool" else ()
    return (
        config["python"],
        *("-m", "lmcache.cli.main", "server"),
        *("--host", config["host"], "--port", str(config["port"])),
        *("--http-host", config["host"], "--http-port", str(config["http_port"])),
        *(
            "--l1-size-gb",
            str(config.get("l1_size_gb", 1.0)),
            "--chunk-size",
            str(config.get("chunk_size", 256)),
        ),
        *("--eviction-policy", "LRU"),
        *below,
        *config.get("args", ()),
    )


def vllm_argv(config: Mapping[str, Any], server: tuple[str, int] | None) -> tuple[str, ...]:
    """The command line of a worker. `server`: host and port of its LMCache server; None: vLLM alone."""
    model = config["model_path"]
    return (
        config["python"],
        *("-m", "vllm.entrypoints.openai.api_server"),
        *(
            "--model",
            model,
            "--served-model-name",
            config.get("served_model_name") or model.rstrip("/").split("/")[-1],
        ),
        *("--host", config["host"], "--port", str(config["port"])),
        "--enable-prompt-tokens-details",
        *(() if server is None else _transfer(config, server)),
        *config.get("args", ()),
    )


def _transfer(config: Mapping[str, Any], server: tuple[str, int]) -> tuple[str, ...]:
    said = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{server[0]}",
            "lmcache.mp.port": server[1],
            "lmcache.mp.save_decode_cache": config.get("save_answers", True),
        },
    }
    return "--kv-transfer-config", json.dumps(said)


def environment(token: str) -> dict[str, str]:
    """Of both: no reports to others. `token`: what vLLM asks of who uses it; empty: nothing."""
    quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
    return {**quiet, "VLLM_API_KEY": token} if token else quiet


def server_of(
    config: Mapping[str, Any], servers: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[str, int] | None:
    """Host and port of a worker's LMCache server, of the named `servers`; None: it has none. Raises
    StopIteration.
    """
    wanted = config.get("lmcache")
    if wanted == ALONE:
        return None
    found = next(table for name, table in servers if wanted in ("", None, name))
    return found["host"], found["port"]
