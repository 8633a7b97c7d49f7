"""The namespaces opened on a node: names, numbers, geometry. Pure; `dump` and `load` make them persistent.

A namespace describes everything about its pages that keys do not: model, revision, dtypes, page size, layout,
geometry. Workers share pages only when they agree on all of it. registry.py has the records that all nodes
share. Here are the namespaces that clients have opened on this node. Each has a number, which clients use
instead of the name, and a space, which rows of the slot table carry: a new one after each clear. Numbers and
spaces are never used again, also after a restart: a row with an old space is void.

The catalog also keeps an upper bound of all sequences given to pages. Sequences tell pages that a clear made
void from later ones, in memory and in tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.registry import Registry
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings

SEQUENCES: Final = 1 << 40  # for one start: 100,000 pages a second for 127 days


class Namespace(msgspec.Struct, frozen=True):
    """One namespace of this node, as persisted. Rows of the slot table carry `space`; 0 means `number`."""

    number: int
    name: str
    geometry: dict[str, str]
    generation: int = 1  # of the registry's record for these pages
    space: int = 0


class NamespaceFile(msgspec.Struct, frozen=True):
    """The persistent form."""

    next_number: int
    namespaces: list[Namespace]
    records: list[NamespaceRecord] = []
    configured: dict[str, NamespaceSettings] = {}
    floors: list[tuple[int, int]] = []  # registry.py
    sequences_end: int = 0  # above all sequences given out so far


class Namespaces:
    """Names to numbers. `next_number` and `sequences_end` only grow."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.configured: dict[str, NamespaceSettings] = {}  # as the configuration had them at the last start
        self.sequences_end = 0
        self._next_number = 1
        self._by_name: dict[str, Namespace] = {}
        self._by_number: dict[int, Namespace] = {}

    @classmethod
    def load(cls, text: str | bytes) -> Namespaces:
        """From `dump`'s text. Raises FrameError when it is not that."""
        try:
            stored = msgspec.json.decode(text, type=NamespaceFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"not a list of namespaces: {error}") from error
        found = cls()
        found.registry = Registry(stored.records, stored.floors)
        found.configured = dict(stored.configured)
        for namespace in stored.namespaces:
            known = found.registry.get(namespace.name)
            if known is None:  # written before there were records
                found.registry.learn(
                    NamespaceRecord(namespace.name, 1, namespace.generation, namespace.geometry)
                )
            elif known.dropped or known.generation > namespace.generation:
                continue
            found._add(namespace)
        numbers = (max(namespace.number, namespace.space) + 1 for namespace in stored.namespaces)
        found._next_number = max([stored.next_number, *numbers])
        found.sequences_end = stored.sequences_end
        return found

    def dump(self) -> str:
        """JSON of everything that must outlive the process."""
        file = NamespaceFile(
            self._next_number,
            list(self),
            list(self.registry),
            self.configured,
            self.registry.floors,
            self.sequences_end,
        )
        return msgspec.json.encode(file).decode()

    def add(self, record: NamespaceRecord) -> Namespace:
        """Open the namespace here; it was not."""
        assert record.name not in self._by_name
        namespace = Namespace(self._next_number, record.name, dict(record.geometry), record.generation)
        self._next_number += 1
        self._add(namespace)
        return namespace

    def find(self, name: str) -> Namespace | None:
        return self._by_name.get(name)

    def drop(self, name: str) -> Namespace | None:
        """Remove the namespace; returns it, or None."""
        namespace = self._by_name.pop(name, None)
        if namespace is not None:
            del self._by_number[namespace.number]
        return namespace

    def settings(self, number: int) -> NamespaceSettings:
        """Of a namespace of this node."""
        record = self.registry.get(self._by_number[number].name)
        assert record is not None
        return record.settings

    def clear(self, number: int) -> int:
        """Give the namespace a new space, and return the space."""
        space = self._next_number
        self._next_number += 1
        self._add(msgspec.structs.replace(self._by_number[number], space=space))
        return space

    @property
    def next_number(self) -> int:
        """The number of the next new namespace."""
        return self._next_number

    def never_below(self, number: int, sequence: int) -> None:
        """Give out no smaller number and no smaller sequence from now on."""
        self._next_number = max(self._next_number, number)
        self.sequences_end = max(self.sequences_end, sequence)

    def begin_sequences(self, now_us: int) -> int:
        """The first sequence of a start: above those of all earlier starts, also when the clock was set back.
        To be saved before use. Where no catalog was left, the time alone serves.
        """
        first = max(now_us, self.sequences_end)
        self.sequences_end = first + SEQUENCES
        return first

    def __getitem__(self, number: int) -> Namespace:
        return self._by_number[number]

    def __contains__(self, number: object) -> bool:
        return number in self._by_number

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_name.values())

    @property
    def numbers(self) -> list[int]:
        """Of all namespaces."""
        return list(self._by_number)

    @property
    def numbers_of_spaces(self) -> dict[int, int]:
        """The number of each namespace by its space."""
        return {namespace.space or number: number for number, namespace in self._by_number.items()}

    def _add(self, namespace: Namespace) -> None:
        self._by_name[namespace.name] = namespace
        self._by_number[namespace.number] = namespace
