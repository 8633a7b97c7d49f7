"""The pool as SGLang's `dynamic` storage backend: its settings.

SGLang calls a backend's zero-copy methods (interface v1) only where its extra config asks for them. Otherwise
every page would be copied through Python, or no page would be found.
"""

from __future__ import annotations

import os
import secrets
from typing import Any, Final

import msgspec

from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.pages import KvGeometry
from pdserve.security.tokens import withhold_secret

HUGE_PAGES_ENV: Final = "SGLANG_HUGEPAGE_SIZE"


def pool_storage(
    pool: PoolClientConfig, namespace: str, geometry: KvGeometry, longest_tokens: int = 0
) -> dict[str, Any]:
    """Extra config of SGLang's `dynamic` storage backend, which is read by `hicache.BackendSettings`. It
    holds no secret: SGLang logs and shows it. `longest_tokens`: of a request, to be checked against host
    memory. The ranks of one start on one host get one group.
    """
    return {
        "backend_name": "pdserve",
        "module_path": "pdserve.kvpool.hicache.backend",
        "class_name": "PdserveHiCache",
        "interface_v1": 1,
        **_allocator(geometry),
        "pdserve": {
            "pool": msgspec.to_builtins(pool, enc_hook=withhold_secret),
            "namespace": namespace,
            "geometry": geometry.as_dict(),
            "longest_tokens": longest_tokens,
            "group": secrets.token_hex(8),
        },
    }


def _allocator(geometry: KvGeometry) -> dict[str, str]:
    """Where ranks hold the same bytes: host memory that other ranks of the host can map, and copy from it
    what this one has read. SGLang makes none of it of huge pages.
    """
    is_shared = geometry.tp_size == "replicated" and not os.environ.get(HUGE_PAGES_ENV)
    return {"allocator": "shm"} if is_shared else {}
