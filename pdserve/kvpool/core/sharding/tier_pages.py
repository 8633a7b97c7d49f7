"""The interface to the pages in a node's tiers, for ownership and replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.kvpool.core.events import Action


class TierPages(Protocol):
    """The pages in all tiers of the node."""

    @property
    def ready(self) -> bool:
        """Whether the tiers have reported all pages that survived a restart."""
        ...

    def namespaces(self) -> list[int]:
        """The namespaces that have pages in a tier."""
        ...

    def own_keys(self, namespace: int) -> list[bytes]:
        """The keys of all pages in tiers that are this node's alone, in a new list."""
        ...

    def length(self, namespace: int, key: bytes) -> int:
        """The length of a page in a tier, in bytes; 0 when there is none."""
        ...

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Drop pages from these tiers. In a shared tier they stay: other nodes have them too."""
        ...


class NoTiers:
    """A node without tiers. Implements TierPages."""

    ready = True

    def namespaces(self) -> list[int]:
        return []

    def own_keys(self, namespace: int) -> list[bytes]:
        return []

    def length(self, namespace: int, key: bytes) -> int:
        return 0

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        return
