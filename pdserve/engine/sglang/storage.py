"""The pool as SGLang's `dynamic` storage backend: its settings.

SGLang calls a backend's zero-copy methods (interface v1) only where its extra config asks for them. Otherwise
every page would be copied through Python, or no page would be found.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.pages import KvGeometry
from pdserve.security.tokens import withhold_secret


def pool_storage(
    pool: PoolClientConfig, namespace: str, geometry: KvGeometry, longest_tokens: int = 0
) -> dict[str, Any]:
    """Extra config of SGLang's `dynamic` storage backend, which is read by `hicache.BackendSettings`. It
    holds no secret: SGLang logs and shows it. `longest_tokens`: of a request, to be checked against host
    memory.
    """
    return {
        "backend_name": "pdserve",
        "module_path": "pdserve.kvpool.hicache.backend",
        "class_name": "PdserveHiCache",
        "interface_v1": 1,
        "pdserve": {
            "pool": msgspec.to_builtins(pool, enc_hook=withhold_secret),
            "namespace": namespace,
            "geometry": geometry.as_dict(),
            "longest_tokens": longest_tokens,
        },
    }
