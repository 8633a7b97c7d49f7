"""The spaces of this node whose namespaces are known, and the space of the same pages at all nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pdserve.kvpool.tiers.base import PageName, SpaceFacts, TierPage
from pdserve.kvpool.tiers.object.inventory import shared_space

NO_SPACE = -1


class OpenSpaces:
    """Thread-safe. `facts`: see `TierSettings`."""

    def __init__(self, facts: Callable[[int], SpaceFacts | None]) -> None:
        self._facts = facts
        self._lock = threading.Lock()
        self._namespaces: dict[int, str] = {}  # by space of this node
        self._spaces: dict[int, int] = {}  # by shared space
        self._closed: set[int] = set()

    def open(self, space: int, *, again: bool = False) -> str | None:
        """The namespace (`SpaceFacts.shared`); None: nothing is known of the space, or it was closed.

        `again`: also one that was closed.
        """
        with self._lock:
            if again:
                self._closed.discard(space)
            namespace = self._namespaces.get(space)
            known = namespace is not None or space in self._closed
            facts = None if known else self._facts(space)
            if facts is not None:
                namespace = self._namespaces[space] = facts.shared
                self._spaces[shared_space(namespace)] = space
        return namespace

    def close(self, space: int) -> str | None:
        """Forget the space; its namespace, or None."""
        with self._lock:
            self._closed.add(space)
            namespace = self._namespaces.pop(space, None)
            if namespace is not None and self._spaces.get(shared_space(namespace)) == space:
                del self._spaces[shared_space(namespace)]
        return namespace

    def is_closed(self, space: int) -> bool:
        """Whether its namespace was dropped or cleared: nobody asks for its pages any more."""
        return space in self._closed

    def namespaces(self) -> set[str]:
        with self._lock:
            return set(self._namespaces.values())

    def namespace_of(self, shared: int) -> str | None:
        """The open namespace with this shared space."""
        with self._lock:
            return self._namespaces.get(self._spaces.get(shared, NO_SPACE))

    def shared_name(self, name: PageName) -> PageName:
        """The name at all nodes; one that no page has, for an unknown space."""
        namespace = self._namespaces.get(name.space)
        return replace(name, space=NO_SPACE if namespace is None else shared_space(namespace))

    def own_names(self, names: Sequence[PageName]) -> list[PageName]:
        """The names at this node, without those of spaces that are closed."""
        with self._lock:
            return [
                replace(name, space=self._spaces[name.space]) for name in names if name.space in self._spaces
            ]

    def own_pages(self, pages: Sequence[TierPage]) -> list[TierPage]:
        """The pages as this node names them, without those of spaces that are closed."""
        with self._lock:
            return [
                replace(page, space=self._spaces[page.space]) for page in pages if page.space in self._spaces
            ]
