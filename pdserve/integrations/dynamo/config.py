"""Configuration of a Dynamo worker. Dynamo's own options are its environment variables (DYN_...)."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pdserve.engine.config import EngineConfig
from pdserve.engine.handoff import DirectConfig
from pdserve.kvpool.client.config import PoolClientConfig

ALL_INTERFACES: Final = ("*", "0.0.0.0", "::")


class DynamoEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang below Dynamo: what decides the pages of the pool. All else are SGLang's own flags."""

    model_path: Annotated[str, Meta(min_length=1, description="Hugging Face model directory.")]
    served_model_name: Annotated[
        str, Meta(description="Name of the model for clients; empty: the directory's name.")
    ] = ""
    port: Annotated[
        int, Meta(ge=1, le=65535, description="SGLang's --port; Dynamo serves nothing there.")
    ] = 30000
    page_size: Annotated[
        int, Meta(ge=1, description="Tokens per KV page; the same on all workers of a pool.")
    ] = 64
    page_pieces: Annotated[
        int, Meta(ge=0, description="As at pdserve's own workers: the largest --tp-size of those that share.")
    ] = 0
    hicache_size_gb: Annotated[
        int, Meta(ge=0, description="Host memory for KV of each rank in GB; 0: as at pdserve's own workers.")
    ] = 0
    extra_args: Annotated[list[str], Meta(description="Flags passed to SGLang unchanged.")] = []

    def as_engine(self) -> EngineConfig:
        """The engine of a worker of pdserve with the same pages."""
        return EngineConfig(**msgspec.structs.asdict(self))


class DynamoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker of NVIDIA Dynamo with its pages in the pool."""

    engine: Annotated[DynamoEngine, Meta(description="SGLang.")]
    pool: Annotated[PoolClientConfig, Meta(description="The KV page pool.")] = PoolClientConfig()
    direct: Annotated[DirectConfig, Meta(description="SGLang's transfer from prefill to decode workers.")] = (
        DirectConfig()
    )
    kv_events: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://.+:\d+)?$",
            description="Address at which SGLang publishes the blocks of its memory to Dynamo; each worker "
            "has its own. Empty: Dynamo guesses them.",
        ),
    ] = "tcp://127.0.0.1:5560"
    pool_events: Annotated[
        str,
        Meta(
            description='`events.address` of a pool node with `events.format = "objects"`, for Dynamo\'s '
            "router (--shared-cache-type hicache). Empty: the router does not know what the pool has."
        ),
    ] = ""

    @property
    def kv_events_host(self) -> str:
        """The one address at which `kv_events` are heard; empty: all addresses of this host, or none."""
        host = urlsplit(self.kv_events).hostname or ""
        return "" if host in ALL_INTERFACES else host
