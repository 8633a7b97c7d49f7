"""How others name our pages as objects: what SGLang tells at `/get_hicache_l3_cache_layout`. Pure.

A page is one object, `NAMESPACE_PAGE__k`, in the events of a pool node too (`protocol/kv_events.py`). The
part PAGE is SGLang's name of the page, which a router makes from a prompt's tokens. That works where the
pool keeps one object for each page under that name. Where ranks or parts have objects of their own, their
names are hashes that say nothing of the page. Then there is no layout, and the reason is told.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.kvpool.protocol.kv_events import OBJECT_SUFFIX
from pdserve.pages import KV, KvGeometry

BACKEND: Final = "pdserve"


def no_layout(geometry: KvGeometry) -> str:
    """Why pages of this geometry have no layout; empty where they have one."""
    if geometry.tp_size not in ("1", "replicated") or geometry.pp_size != "1":
        return "ranks have objects of their own, which cannot be named from tokens alone"
    if geometry.window_pages.keys() != {KV}:
        return "pages have parts beside KV, which cannot be named from tokens alone"
    return ""


def object_layout(namespace: str, geometry: KvGeometry) -> dict[str, Any]:
    """SGLang's form of it (`MooncakeStore.describe_l3_object_layout`)."""
    reason = no_layout(geometry)
    pool = {"pool": KV, "suffixes": [OBJECT_SUFFIX], "hit_policy": "all_pages"}
    return {
        "enabled": not reason,
        "backend": BACKEND,
        "page_size": int(geometry.page_size),
        "hicache_object_layout": {
            "pools": [] if reason else [pool],
            "key_prefix": namespace,
            "is_mla_backend": geometry.tp_size == "replicated",
            "pp_rank": 0,
            "pp_size": int(geometry.pp_size),
        },
        **({"reason": reason} if reason else {}),
    }
