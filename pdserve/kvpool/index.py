"""Which slot holds which page. Pure; about 200 bytes per page in all, lookups O(1) at any size.

`Index` maps (namespace, key) to a slot, once per page: committed pages, and apart from them pages being
written, so that nobody can find a page that is not committed. What else is known of a slot lies in typed
arrays by slot number (`Facts`), because a Python object per page would cost more than the page's whole share
here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NONE = -1


class Facts:
    """What is known of each slot, by slot number. Meaningless where the slot is free."""

    def __init__(self, slots: int) -> None:
        self.key: list[bytes | None] = [None] * slots  # the index's own object
        self.namespace = array("I", bytes(4 * slots))
        self.length_bytes = array("I", bytes(4 * slots))
        self.checksum = array("Q", bytes(8 * slots))
        self.sequence = array("Q", bytes(8 * slots))
        self.last_use = array("Q", bytes(8 * slots))  # by the store's counter of uses


class NamespacePages:
    """The pages of one namespace."""

    __slots__ = (
        "committed",
        "evictions",
        "hits",
        "misses",
        "operations",
        "page_bytes",
        "read_bytes",
        "writing",
        "written",
        "written_bytes",
    )

    def __init__(self) -> None:
        self.committed: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}
        self.page_bytes = 0  # lengths of the committed ones, added up
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.operations = 0  # requests that name it, refused ones included
        self.read_bytes = 0  # of the hits
        self.written = 0  # pages committed
        self.written_bytes = 0


class Index:
    """(namespace number, key) -> slot."""

    def __init__(self) -> None:
        self._namespaces: dict[int, NamespacePages] = {}

    def namespace(self, number: int) -> NamespacePages:
        """Its pages; made empty at the first call."""
        pages = self._namespaces.get(number)
        if pages is None:
            pages = self._namespaces[number] = NamespacePages()
        return pages

    def forget(self, number: int) -> None:
        """Forget a namespace that has no pages any more."""
        pages = self._namespaces.pop(number, None)
        assert pages is None or not (pages.committed or pages.writing)

    def find(self, number: int, key: bytes) -> int:
        """The slot of the committed page, or NONE."""
        pages = self._namespaces.get(number)
        return NONE if pages is None else pages.committed.get(key, NONE)

    def __len__(self) -> int:
        return sum(len(pages.committed) for pages in self._namespaces.values())

    def __iter__(self) -> Iterator[tuple[int, NamespacePages]]:
        return iter(self._namespaces.items())
