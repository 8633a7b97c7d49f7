"""A secondary tier of vLLM's own KV offloading (`TieringOffloadingSpec`): its chunks in the pool, without
LMCache.

vLLM loads it by name (`"module_path": "pdserve.integrations.vllm", "type": "PdserveTier"`). Only `tier`
imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.integrations.vllm.tier import PdserveTier as PdserveTier


def __getattr__(name: str) -> Any:
    """`PdserveTier` when it is asked for."""
    if name == "PdserveTier":
        from pdserve.integrations.vllm.tier import PdserveTier

        return PdserveTier
    raise AttributeError(f"module {__name__} has no attribute {name}")
