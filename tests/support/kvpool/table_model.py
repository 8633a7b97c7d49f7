"""A slot table in memory that follows a node's actions, as the shell would write it."""

from __future__ import annotations

import msgspec

from pdserve.kvpool.core.events import Action, AssignSlab, CommitRows, FreeRows, ReserveRows, SaveNamespaces
from pdserve.kvpool.core.store.table_scan import TableContents, scan
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol.slot_table import RowWriter, TableLayout
from tests.support.kvpool.node_model import KIB, Node

LAYOUT = TableLayout(4 * 64 * KIB, 64 * KIB, 4 * KIB)


class Table:
    """A table that follows a Node's actions, as the shell would write it."""

    def __init__(self, layout: TableLayout = LAYOUT) -> None:
        self.layout = layout
        self.buffer = bytearray(layout.table_bytes)
        self.rows = layout.table_rows(self.buffer)
        self.classes = layout.slab_class(self.buffer)
        self.writer = RowWriter(self.buffer, layout)
        self.namespaces = ""

    def follow(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, ReserveRows):
                self.writer.reserve(action.slots, action.space)
            elif isinstance(action, CommitRows):
                self.writer.commit(*msgspec.structs.astuple(action))
            elif isinstance(action, FreeRows):
                self.writer.free(action.slots)
            elif isinstance(action, AssignSlab):
                self.classes[action.slab] = action.slot_bytes
            elif isinstance(action, SaveNamespaces):
                self.namespaces = action.text

    def scan(self) -> TableContents:
        return scan(self.layout, self.classes, self.rows, self.spaces)

    @property
    def spaces(self) -> dict[int, int]:
        """The number of each namespace by its space."""
        return Namespaces.load(self.namespaces).numbers_of_spaces if self.namespaces else {}

    @property
    def space(self) -> int:
        """Of the first namespace."""
        return min(self.spaces, key=self.spaces.__getitem__)


def following_table(table: Table) -> Node:
    """A node whose actions the table follows."""
    node = Node()
    node.followers.append(table.follow)
    return node
