"""An L2 adapter for LMCache's server mode: what vLLM, and whatever else LMCache serves, keeps in the pool.

LMCache loads it by name (`"module_path": "pdserve.integrations.lmcache", "class_name": "PdserveL2"`), in its
own environment, which needs no SGLang. Only `adapter` imports LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.integrations.lmcache.adapter import PdserveL2 as PdserveL2


def __getattr__(name: str) -> Any:
    """`PdserveL2` when it is asked for: the other modules work without LMCache."""
    if name == "PdserveL2":
        from pdserve.integrations.lmcache.adapter import PdserveL2

        return PdserveL2
    raise AttributeError(f"module {__name__} has no attribute {name}")
