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

    model_path: Annotated[str, Meta(min_length=1)]
    """Hugging Face model directory."""
    served_model_name: str = ""
    """Name of the model for clients; empty: the directory's name."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 30000
    """SGLang's --port; Dynamo serves nothing there."""
    page_size: Annotated[int, Meta(ge=1)] = 64
    """Tokens per KV page; the same on all workers of a pool."""
    page_pieces: Annotated[int, Meta(ge=0)] = 0
    """As at pdserve's own workers: the largest --tp-size of those that share."""
    hicache_size_gb: Annotated[int, Meta(ge=0)] = 0
    """Host memory for KV of each rank in GB; 0: as at pdserve's own workers."""
    extra_args: list[str] = []
    """Flags passed to SGLang unchanged."""

    def as_engine(self) -> EngineConfig:
        """The engine of a worker of pdserve with the same pages."""
        return EngineConfig(**msgspec.structs.asdict(self))


class DynamoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker of NVIDIA Dynamo with its pages in the pool."""

    engine: DynamoEngine
    """SGLang."""
    pool: PoolClientConfig = PoolClientConfig()
    """The KV page pool."""
    direct: DirectConfig = DirectConfig()
    """SGLang's transfer from prefill to decode workers."""
    kv_events: Annotated[str, Meta(pattern=r"^(tcp://.+:\d+)?$")] = "tcp://127.0.0.1:5560"
    """Address at which SGLang publishes the blocks of its memory to Dynamo; each worker has its own. Empty:
    Dynamo guesses them.
    """
    pool_events: str = ""
    """`events.address` of a pool node with `events.format = "objects"`, for Dynamo's router
    (--shared-cache-type hicache). Empty: the router does not know what the pool has.
    """

    @property
    def kv_events_host(self) -> str:
        """The one address at which `kv_events` are heard; empty: all addresses of this host, or none."""
        host = urlsplit(self.kv_events).hostname or ""
        return "" if host in ALL_INTERFACES else host
