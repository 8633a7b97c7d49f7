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


class DynamoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker of NVIDIA Dynamo with its pages in the pool."""

    engine: Annotated[EngineConfig, Meta(description="SGLang; Dynamo serves no port of it.")]
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
        """The one address at which `kv_events` are heard; empty: at all of this host, or nowhere."""
        host = urlsplit(self.kv_events).hostname or ""
        return "" if host in ALL_INTERFACES else host
