"""The namespaces as all nodes know them: one record per name, merged without consensus. Pure.

Any node may change a record, and any two nodes may meet in any order, twice, or late. So records are joined
as a semilattice, whose join is commutative, associative and idempotent (Shapiro et al., "Conflict-free
Replicated Data Types", 2011): of two records of one name the larger (version, dropped, encoding) wins whole,
but for the generation, which is the larger of both. A generation grows when a namespace is dropped, and
nothing makes it smaller: pages that a node keeps of a smaller one are nobody's, even if another change of the
namespace wins over the drop.

Records of dropped namespaces stay, without their geometry: a node that was away must learn of the drop. They
keep their settings too, so that a protected name does not become an unprotected one.

**Forgetting.** Names would pile up where every revision has one, so those dropped long ago, and not
protected, are forgotten; that a node which was away brings one back is excluded by numbers, not by time. A
name belongs to one of `FLOORS` buckets, and each has a floor: no record whose version is not above its
bucket's floor exists, whoever tells of it. A dropped namespace is forgotten by raising the floor to its
version (or its generation, if larger), which merging keeps, as floors merge by maximum. A new name begins
above its floor, in version and generation, so nothing of before is newer than it. Floors are not raised over
what lives. Should a name be made at that very moment by who does not know of the floor, it is gone: its
clients open it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from pdserve.errors import PoolRefused
from pdserve.kvpool.namespaces.access import is_guarded
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings

Floors: TypeAlias = list[tuple[int, int]]  # bucket, version; by bucket

FLOORS: Final = 4096
MAX_NAMESPACES = 1024  # not dropped
MAX_NAME_CHARS = 512
MAX_GEOMETRY_CHARS = 64 * 1024  # keys and values together
MAX_REGISTRY_BYTES = 2 << 20  # all records encoded; nodes send them in one frame, of which this is half

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class NamespaceError(PoolRefused):
    """`code` and one line for a Fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def join(one: NamespaceRecord, other: NamespaceRecord) -> NamespaceRecord:
    """What two nodes that know these records of one name agree on."""
    newer = max(one, other, key=_order)
    generation = max(one.generation, other.generation)
    return newer if newer.generation == generation else msgspec.structs.replace(newer, generation=generation)


def bucket_of(name: str) -> int:
    """Which floor is the name's; the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") % FLOORS


def highest(one: Floors, other: Floors) -> Floors:
    """The floors that both know of."""
    if one == other or not other:
        return one
    floors = dict(one)
    for bucket, floor in other:
        floors[bucket] = max(floor, floors.get(bucket, 0))
    return sorted(floors.items())


def above(records: Iterable[NamespaceRecord], floors: Floors) -> list[NamespaceRecord]:
    """Those that are not forgotten."""
    if not floors:
        return list(records)
    floor_of = dict(floors)
    return [record for record in records if record.version > floor_of.get(bucket_of(record.name), -1)]


def floors_over(old: Iterable[NamespaceRecord], others: Iterable[NamespaceRecord]) -> Floors:
    """The floors at which `old` are forgotten; without those that one of the `others` is not above."""
    floors: dict[int, int] = {}
    for record in old:
        bucket = bucket_of(record.name)
        floors[bucket] = max(floors.get(bucket, 0), record.version, record.generation)
    for record in others if floors else ():
        if record.version <= floors.get(bucket_of(record.name), -1):
            del floors[bucket_of(record.name)]
    return sorted(floors.items())


class Dropped:
    """When this node learnt that namespaces were dropped. They are forgotten after `forget_ms`, or, when
    there are more than `many`, after `sooner_ms`.
    """

    def __init__(self, forget_ms: int, sooner_ms: int, many: int) -> None:
        self._forget_ms = forget_ms
        self._sooner_ms = sooner_ms
        self._many = many
        self._since_ms: dict[tuple[str, int], int] = {}  # by name and version

    def due(self, records: Iterable[NamespaceRecord], now_ms: int, kept: Container[str]) -> Floors:
        """The floors to be raised now. Names that are protected, or `kept`, are not forgotten."""
        dropped: list[NamespaceRecord] = []
        others: list[NamespaceRecord] = []
        old: list[NamespaceRecord] = []
        for record in records:
            forgettable = record.dropped and record.name not in kept and not is_guarded(record.settings)
            (dropped if forgettable else others).append(record)
        names = [(record.name, record.version) for record in dropped]
        self._since_ms = {name: self._since_ms.get(name, now_ms) for name in names}
        after_ms = self._forget_ms if len(dropped) <= self._many else self._sooner_ms
        for record, name in zip(dropped, names, strict=True):
            (old if now_ms - self._since_ms[name] >= after_ms else others).append(record)
        return floors_over(old, others)


def _order(record: NamespaceRecord) -> tuple[int, bool, bytes]:
    encoding = _encoder.encode(msgspec.structs.replace(record, generation=0))
    return record.version, record.dropped, encoding


class Registry:
    """Records by name."""

    def __init__(self, records: Iterable[NamespaceRecord] = (), floors: Floors | None = None) -> None:
        self.floors: Floors = floors or []
        self._records: dict[str, NamespaceRecord] = {}
        self._encoded_bytes = 0
        self._live = 0
        for record in records:
            self.learn(record)

    def get(self, name: str) -> NamespaceRecord | None:
        return self._records.get(name)

    def __iter__(self) -> Iterator[NamespaceRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def learn(self, record: NamespaceRecord) -> NamespaceRecord | None:
        """Join what another node knows; the record as it is now if that is news, else None."""
        known = self._records.get(record.name)
        if known == record:
            return None  # nearly always
        joined = record if known is None else join(known, record)
        if joined == known:
            return None
        self._put(joined)
        return joined

    def fresh(self, name: str, settings: NamespaceSettings) -> NamespaceRecord:
        """What a name begins with that is not known: its first change makes it newer than all forgotten."""
        floor = dict(self.floors).get(bucket_of(name), 0)
        return NamespaceRecord(name, floor, floor + 1, {}, settings)

    def forget(self, name: str) -> None:
        """A floor was raised over it."""
        known = self._records.pop(name, None)
        if known is not None:
            self._encoded_bytes -= len(_encoder.encode(known))
            self._live -= not known.dropped

    def change(self, record: NamespaceRecord) -> None:
        """This node's own change. Raises NamespaceError when a namespace more cannot be held."""
        known = self._records.get(record.name)
        if known is None or known.dropped:
            self._check_room(record)
        self._put(record)

    def _put(self, record: NamespaceRecord) -> None:
        known = self._records.get(record.name)
        if known is not None:
            self._encoded_bytes -= len(_encoder.encode(known))
            self._live -= not known.dropped
        self._encoded_bytes += len(_encoder.encode(record))
        self._live += not record.dropped
        self._records[record.name] = record

    def _check_room(self, record: NamespaceRecord) -> None:
        if not record.dropped and self._live >= MAX_NAMESPACES:
            raise NamespaceError(
                "too_many_namespaces",
                f"the pool holds {MAX_NAMESPACES} namespaces: drop one that is not used",
            )
        if self._encoded_bytes + len(_encoder.encode(record)) > MAX_REGISTRY_BYTES:
            raise NamespaceError(
                "too_many_namespaces",
                f"all that the nodes know of namespaces takes {MAX_REGISTRY_BYTES >> 20} MiB: drop those "
                "that are not used",
            )


def check_name(name: str) -> None:
    """Raises NamespaceError."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise NamespaceError(
            "bad_namespace",
            f"a namespace's name must have 1 to {MAX_NAME_CHARS} printable characters, no space at its ends",
        )


def check_geometry(name: str, known: Mapping[str, str], geometry: Mapping[str, str]) -> None:
    """Whether a worker of this geometry may use the namespace of the `known` one, empty when nobody has
    opened it. Raises NamespaceError naming the field.
    """
    if sum(len(key) + len(value) for key, value in geometry.items()) > MAX_GEOMETRY_CHARS:
        raise NamespaceError(
            "bad_namespace", f"a namespace's geometry may have at most {MAX_GEOMETRY_CHARS} characters"
        )
    for key in sorted({*known, *geometry}):
        theirs, ours = known.get(key, "(absent)"), geometry.get(key, "(absent)")
        if theirs != ours:
            raise NamespaceError(
                "geometry_mismatch",
                f"namespace '{name}' has {key} = {theirs}, this client has {key} = {ours}: "
                "give the client the same setting, or a namespace of its own",
            )
