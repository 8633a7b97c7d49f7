"""What a worker tells Dynamo's KV router of the pool. Pure.

The router (1.6.1, `lib/llm/src/kv_router/shared_cache.rs`) knows one kind of shared cache: Mooncake below
SGLang's HiCache. It makes the names of a prompt's pages from its tokens, then names of objects from these and
from what workers say of their layout, and looks them up among the objects that an event stream named.
Nothing of it asks a Mooncake server. So the pool speaks this protocol: its nodes publish such events
(`events.format = "objects"`), and workers say the layout that makes the same names.
"""

from __future__ import annotations

from typing import Any

from pdserve.kvpool.hicache.object_layout import no_layout, object_layout
from pdserve.pages import KvGeometry


def shared_cache(namespace: str, geometry: KvGeometry, *, pairs: bool, events: str) -> dict[str, Any] | None:
    """Dynamo's runtime data `sglang_hicache_mooncake`. None: its router cannot name the pool's pages.
    `events`: where it hears of them.
    """
    if not events or no_layout(geometry):
        return None
    layout = object_layout(namespace, geometry)["hicache_object_layout"]
    return {
        "backend": "mooncake",
        "page_size": int(geometry.page_size),
        "tp_size": 1,
        "pp_size": 1,
        # one object `PREFIX_PAGE__k` for each page, which 1.6.1 knows of models with latent attention only
        "is_mla_model": True,
        "is_eagle": pairs,
        "tp_lcm_size": None,
        "should_split_heads": False,
        "extra_backend_tag": None,
        "key_prefix": namespace,
        "kv_events_endpoint": events,
        "hicache_object_layout": layout,  # later versions read the names there
    }
