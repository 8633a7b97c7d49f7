"""First in, first out: evict the page that was committed first; being read does not help it."""

from __future__ import annotations

from pdserve.kvpool.policies.lru import Lru


class Fifo(Lru):
    """An EvictionPolicy; a linked list in order of commit. No memory beside the links."""

    def on_hit(self, slot: int, now_s: float) -> None:
        pass
