"""`GET /get_hicache_l3_cache_layout` tells of any storage backend that has a layout.

SGLang 0.5.23 asks Mooncake's backend alone, and says of others that Mooncake is not attached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.sglang_places import places

PLACES: Final = (
    *places(
        "sglang.srt.managers.scheduler",
        "Scheduler._hicache_l3_layout(self)",
        "Scheduler._hicache_l3_layout uses MooncakeStore, cache_controller, storage_backend",
        "Scheduler.get_hicache_l3_cache_layout uses _hicache_l3_layout",
    ),
)


def telling(layout_of: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap `Scheduler._hicache_l3_layout`."""

    @functools.wraps(layout_of)
    def told(scheduler: Any) -> dict[str, Any]:
        controller = getattr(scheduler.tree_cache, "cache_controller", None)
        backend: Any = getattr(controller, "storage_backend", None)
        if type(backend).__module__.startswith("pdserve."):
            layout: dict[str, Any] = backend.describe_l3_object_layout()
            return layout
        return layout_of(scheduler)

    return told


def install() -> None:
    """In this process, once, before its scheduler is made. Imports SGLang's."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler._hicache_l3_layout = telling(Scheduler._hicache_l3_layout)
