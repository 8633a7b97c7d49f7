"""The namespaces of a node: names, spaces, geometry. Pure; `dump` and `load` are their persistent form.

A namespace says everything about its pages that their keys do not: model, revision, dtypes, page size,
layout, geometry. Workers may share pages only when they agree on all of it. What all nodes know of namespaces
is the `registry`. Here are the namespaces that have been opened on this node.

Clients use the number of a namespace instead of its name, for as long as the process lives. Its pages carry
its *space*, in rows of the slot table and in records of tiers: 64 random bits that no other namespace ever
had. A page counts only while its space is the current one of a namespace. So a namespace is voided by giving
it a new space, and no page is touched; and pages on a disk that comes back years later are void.

The list is kept twice: with the memory, and by the first tier, for a start after a reboot. `take_over`
chooses between them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.registry import FORGET_MS, Registry
from pdserve.kvpool.namespaces.tenants import settings_of, split
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings

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


class Namespace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One namespace of this node. `generation`: of the registry's record whose pages these are. `number`: of
    this process; not in the persistent form.
    """

    name: str
    geometry: dict[str, str]
    generation: int
    space: int
    number: int = 0


class NamespaceFile(msgspec.Struct, frozen=True):
    """The persistent form. `lineage`: random, of the first list of this history. `revision`: larger than that
    of every earlier list of the history. `sequences_end`: above all sequences given out so far.
    """

    lineage: int
    revision: int
    sequences_end: int
    namespaces: list[Namespace]
    records: list[NamespaceRecord]
    configured: dict[str, NamespaceSettings]


class Namespaces:
    """Names to namespaces. `incarnation`: random, of this start of the node; new spaces are made from it.

    `sequences_end` and `revision` only grow. `configured`: the namespaces of the configuration, as it had
    them at the last start.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self.registry = Registry()
        self.lineage = incarnation
        self.revision = 0
        self.configured: dict[str, NamespaceSettings] = {}
        self.sequences_end = 0
        self.incarnation = incarnation
        self._spaces = 0  # made at this start
        self._last_number = 0
        self._by_name: dict[str, Namespace] = {}
        self._by_number: dict[int, Namespace] = {}
        self._tenants: dict[str, dict[str, None]] = {}  # names of tenants' namespaces by their models'

    @classmethod
    def load(cls, text: str | bytes, incarnation: int = 0) -> Namespaces:
        """From `dump`'s text. Raises FrameError when it is not that."""
        try:
            stored = msgspec.json.decode(text, type=NamespaceFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"not a list of namespaces: {error}") from error
        found = cls(incarnation)
        found.lineage, found.revision = stored.lineage, stored.revision
        found.sequences_end = stored.sequences_end
        found.registry = Registry(stored.records)
        found.configured = dict(stored.configured)
        geometries = {namespace.name: namespace.geometry for namespace in stored.namespaces}
        for namespace in stored.namespaces:
            if not namespace.geometry:
                geometry = geometries.get(split(namespace.name)[0], {})
                namespace = msgspec.structs.replace(namespace, geometry=geometry)
            known = found.registry.get(namespace.name)
            if known is not None and not known.dropped and known.generation <= namespace.generation:
                found._add(namespace)
        return found

    def dump(self) -> str:
        """JSON of everything that must outlive the process. Each dump is a new revision, which also tells
        when it was made, in microseconds.
        """
        self.revision = max(self.revision + 1, 1000 * self.registry.now_ms)
        file = NamespaceFile(
            self.lineage,
            self.revision,
            self.sequences_end,
            [self._stored(namespace) for namespace in self],
            list(self.registry),
            self.configured,
        )
        return msgspec.json.encode(file).decode()

    def _stored(self, namespace: Namespace) -> Namespace:
        """As it is in the persistent form: there may be thousands of tenants, which have their model's
        geometry.
        """
        model = self.find(split(namespace.name)[0])
        if model is not None and model is not namespace and model.geometry == namespace.geometry:
            return msgspec.structs.replace(namespace, number=0, geometry={})
        return msgspec.structs.replace(namespace, number=0)

    def add(self, record: NamespaceRecord) -> Namespace:
        """Open the namespace here; it was not."""
        assert record.name not in self._by_name
        return self._add(Namespace(record.name, dict(record.geometry), record.generation, self._new_space()))

    def find(self, name: str) -> Namespace | None:
        return self._by_name.get(name)

    def drop(self, name: str) -> Namespace | None:
        """Forget the namespace's number; what it was, or None."""
        namespace = self._by_name.pop(name, None)
        if namespace is not None:
            del self._by_number[namespace.number]
            self._tenants.get(split(name)[0], {}).pop(name, None)
        return namespace

    def settings(self, number: int) -> NamespaceSettings:
        """Of a namespace of this node."""
        name = self._by_number[number].name
        record, (model, tenant) = self.registry.get(name), split(name)
        assert record is not None
        if not tenant:
            return record.settings
        parent = self.registry.get(model)
        return settings_of(NamespaceSettings() if parent is None else parent.settings, record.settings)

    def model(self, number: int) -> int:
        """The number of the namespace that a tenant's is of: its own where it is of nobody, or where that one
        is not open here.
        """
        parent = self._by_name.get(split(self._by_number[number].name)[0])
        return number if parent is None else parent.number

    def tenants(self, model: str) -> list[Namespace]:
        """The namespaces of its tenants that are open here."""
        return [self._by_name[name] for name in self._tenants.get(model, ())]

    def clear(self, number: int) -> int:
        """Give the namespace a new space, which is returned: all its pages are void."""
        namespace = msgspec.structs.replace(self._by_number[number], space=self._new_space())
        self._by_name[namespace.name] = self._by_number[number] = namespace
        return namespace.space

    def forget(self) -> None:
        """Keep only the records of protected names, and no pages."""
        self.registry.forget_unprotected()
        self.configured.clear()
        self._by_name.clear()
        self._tenants.clear()
        self._by_number.clear()

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
        """The number of each namespace by its space: pages of other spaces are void."""
        return {namespace.space: number for number, namespace in self._by_number.items()}

    def _add(self, namespace: Namespace) -> Namespace:
        self._last_number += 1
        namespace = msgspec.structs.replace(namespace, number=self._last_number)
        model, tenant = split(namespace.name)
        if tenant:
            self._tenants.setdefault(model, {})[namespace.name] = None
        self._by_name[namespace.name] = self._by_number[namespace.number] = namespace
        return namespace

    def _new_space(self) -> int:
        self._spaces += 1
        seed = f"{self.incarnation} {self._spaces}".encode()
        return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")


def take_over(
    memory: Namespaces, saved: Sequence[str | None], now_us: int = 0
) -> tuple[Namespaces, list[str]]:
    """The newest list of namespaces, and what is wrong with the others, in words.

    `memory`: as it was left with the memory. `saved`: the list of each tier, None where it keeps none. Where
    memory has a list, that of a tier counts only if it has the same history and is newer: the memory was full
    when its own was to be saved. Where memory has none, as after a reboot, the newest of all counts. From a
    list that is older at `now_us` than tombstones are kept, only protected names are taken.
    """
    lists, problems = [memory], []
    for text in saved:
        try:
            found = None if text is None else Namespaces.load(text, memory.incarnation)
        except FrameError as error:
            problems.append(str(error))
            continue
        if found is not None and (not memory.revision or found.lineage == memory.lineage):
            lists.append(found)
    chosen = max(lists, key=lambda found: found.revision)
    chosen.sequences_end = max(found.sequences_end for found in lists)
    if chosen.revision and now_us - chosen.revision > 1000 * FORGET_MS:
        chosen.forget()
    return chosen, problems
