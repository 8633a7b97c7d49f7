"""The namespaces of a node: names, numbers, geometry. Pure; `dump` and `load` are its persistent form.

A namespace says everything about its pages that their keys do not: model, revision, dtypes, page size,
layout, geometry. Workers may share pages only when they agree on all of it. What all nodes know of namespaces
is the `registry`. Here are the namespaces that have been opened on this node. Clients use the number of a
namespace instead of its name. Its pages carry its space, in memory and in tiers. A page counts only while its
space is the current one of a namespace. So a namespace is voided by giving it a new space, and no page is
touched.

A space is a number that was never used before, in two parts:

    lower 32 bits    a counter, saved with the memory; rows of the slot table carry it
    upper 32 bits    the era: random, another at each start of the node; records in tiers carry both parts

The counter may begin again when the memory is lost. The era keeps the pages of before apart then, also on a
disk that comes back years later. A namespace keeps its space through restarts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.registry import Registry
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings

_ERA_SHIFT: Final = 32
_ERA_MASK: Final = (1 << 32) - 1
SEQUENCES: Final = 1 << 40  # that one start may give out: 100,000 pages a second for 127 days

# a geometry is text of a client: a number in it counts only if it has few digits, all of them ASCII
_ITEM_BITS: Final = re.compile(r"(?:bfloat|float|uint|int)(8|16|32|64|128)(?![0-9])")
_PAGE_TOKENS: Final = re.compile(r"[0-9]{1,9}")


def item_bytes(geometry: Mapping[str, str]) -> int:
    """Bytes of one number of the KV, 1 to 16; 1 if the geometry does not say."""
    name = geometry.get("kv_dtype", "")
    found = _ITEM_BITS.match(geometry.get("dtype", "") if name in ("", "auto") else name)
    return int(found[1]) // 8 if found else 1


def page_tokens(geometry: Mapping[str, str]) -> int:
    """Tokens of one page; 0 if the geometry does not say."""
    said = geometry.get("page_size", "")
    return int(said) if _PAGE_TOKENS.fullmatch(said) else 0


class Namespace(msgspec.Struct, frozen=True):
    """One namespace of this node, as persisted. `space` is the lower part of its space; 0 stands for the
    number. `era` is the upper part; 0 in lists that were written before there were eras.
    """

    number: int
    name: str
    geometry: dict[str, str]
    generation: int = 1  # of the registry's record whose pages these are
    space: int = 0
    era: int = 0

    @property
    def row_space(self) -> int:
        """The part of its space that its rows in the slot table carry, 32 bits."""
        return self.space or self.number

    @property
    def tier_space(self) -> int:
        """Its whole space, 64 bits."""
        return self.era << _ERA_SHIFT | self.row_space


class NamespaceFile(msgspec.Struct, frozen=True):
    """The persistent form."""

    next_number: int
    namespaces: list[Namespace]
    records: list[NamespaceRecord] = []
    configured: dict[str, NamespaceSettings] = {}
    floors: list[tuple[int, int]] = []  # registry.py
    sequences_end: int = 0  # above all sequences given out so far
    lineage: int = 0  # the era in which the list began; 0 with `revision`: written before there were eras
    revision: int = 0  # of this list: larger than that of every list that was saved before


class Namespaces:
    """Names to numbers. `next_number`, `sequences_end` and `revision` only grow. `incarnation`: random, of
    this start of the node; the era of its new spaces is made from it.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self.registry = Registry()
        self.era = self.lineage = incarnation & _ERA_MASK
        self.revision = 0
        self.configured: dict[str, NamespaceSettings] = {}  # as the configuration had them at the last start
        self.sequences_end = 0
        self._next_number = 1
        self._by_name: dict[str, Namespace] = {}
        self._by_number: dict[int, Namespace] = {}

    @classmethod
    def load(cls, text: str | bytes, incarnation: int = 0) -> Namespaces:
        """From `dump`'s text. Raises FrameError when it is not that."""
        try:
            stored = msgspec.json.decode(text, type=NamespaceFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"not a list of namespaces: {error}") from error
        found = cls(incarnation)
        found.lineage = stored.lineage or found.era
        found.revision = stored.revision
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
            found._add(namespace if namespace.era else msgspec.structs.replace(namespace, era=found.era))
        numbers = (max(namespace.number, namespace.space) + 1 for namespace in stored.namespaces)
        found._next_number = max([stored.next_number, *numbers])
        found.sequences_end = stored.sequences_end
        return found

    def dump(self) -> str:
        """JSON of everything that must outlive the process. Each dump is a new revision."""
        self.revision += 1
        file = NamespaceFile(
            self._next_number,
            list(self),
            list(self.registry),
            self.configured,
            self.registry.floors,
            self.sequences_end,
            self.lineage,
            self.revision,
        )
        return msgspec.json.encode(file).decode()

    def add(self, record: NamespaceRecord) -> Namespace:
        """Open the namespace here; it was not."""
        assert record.name not in self._by_name
        geometry = dict(record.geometry)
        namespace = Namespace(
            self._next_number, record.name, geometry, record.generation, self._next_number, self.era
        )
        self._next_number += 1
        self._add(namespace)
        return namespace

    def find(self, name: str) -> Namespace | None:
        return self._by_name.get(name)

    def drop(self, name: str) -> Namespace | None:
        """Forget the namespace's number; what it was, or None."""
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
        """Give the namespace a new space; the part that its rows carry."""
        space = self._next_number
        self._next_number += 1
        self._add(msgspec.structs.replace(self._by_number[number], space=space, era=self.era))
        return space

    def void_tiers(self, number: int) -> None:
        """Give the namespace a space that differs in its era alone: its rows count, its pages in tiers do
        not. To be called before the first new space of this start.
        """
        self._add(msgspec.structs.replace(self._by_number[number], era=self.era))

    @property
    def next_number(self) -> int:
        """The number of the next new namespace."""
        return self._next_number

    def never_below(self, number: int, sequence: int) -> None:
        """Give out no number below this, and no sequence."""
        self._next_number = max(self._next_number, number)
        self.sequences_end = max(self.sequences_end, sequence)

    def begin_sequences(self, now_us: int) -> int:
        """The first sequence of a start: above those of every earlier one, also when the clock was set back
        in between. To be saved before it is used. The time alone serves where no list was left.
        """
        self.revision = max(self.revision, now_us)  # of two lists that know nothing of each other, the later
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
        """The number of each namespace by the part of its space that its rows carry."""
        return {namespace.row_space: number for number, namespace in self._by_number.items()}

    @property
    def tier_spaces(self) -> set[int]:
        """The spaces whose records in tiers count."""
        return {namespace.tier_space for namespace in self}

    def _add(self, namespace: Namespace) -> None:
        self._by_name[namespace.name] = namespace
        self._by_number[namespace.number] = namespace
