"""The namespaces as all nodes know them: one record per name, merged without consensus. Pure.

Any node may change a record, and news may arrive in any order, twice, or late. So records form a semilattice:
`join` is commutative, associative and idempotent (Shapiro et al., "Conflict-free Replicated Data Types",
2011). Of two records of one name the larger (version, dropped, encoding) wins as a whole; only the generation
is the larger of both. A drop raises the generation, and nothing lowers it. Pages of a smaller generation are
void, even if another change of the namespace wins over the drop.

**Tombstones.** The record of a dropped namespace stays, without its geometry: a node that was away must learn
of the drop. It keeps its settings, so that a protected name does not become an unprotected one.

**Forgetting.** Where every revision has a name of its own, tombstones would pile up. So a tombstone that is
not protected goes after a grace period. A node that was away for longer still knows the namespace, and must
not bring its pages back. Time alone cannot exclude this; a number can. Each name belongs to one of `FLOORS`
buckets. A bucket has a floor, and a record exists only if its version is above its bucket's floor. To forget
a tombstone, its floor is raised to its version (or generation, if larger); floors merge by maximum. A new
name begins above its floor, in version and generation, so it is newer than all records before. Floors are not
raised over existing namespaces. A namespace created by a node that has not seen the new floor yet is dropped
when the two meet. Its clients open it again.
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
MAX_NAMESPACES = 1024  # without tombstones
MAX_NAMESPACES_PER_TOKEN = MAX_NAMESPACES // 2  # made by workers; the rest is for other tokens
OPERATORS_SHARE = 4  # one part in so many of namespaces and bytes is for the nodes' administrator
MAX_NAME_CHARS = 512
MAX_GEOMETRY_CHARS = 64 * 1024  # keys and values together
MAX_REGISTRY_BYTES = 2 << 20  # of all records encoded: half a frame, in which nodes send them

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class NamespaceError(PoolRefused):
    """`code` and one line for a Fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def join(one: NamespaceRecord, other: NamespaceRecord) -> NamespaceRecord:
    """The record on which two nodes agree that have these records of one name."""
    newer = max(one, other, key=_order)
    generation = max(one.generation, other.generation)
    return newer if newer.generation == generation else msgspec.structs.replace(newer, generation=generation)


def bucket_of(name: str) -> int:
    """The bucket of a name; the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") % FLOORS


def highest(one: Floors, other: Floors) -> Floors:
    """The floors on which two nodes agree."""
    if one == other or not other:
        return one
    floors = dict(one)
    for bucket, floor in other:
        floors[bucket] = max(floor, floors.get(bucket, 0))
    return sorted(floors.items())


def above(records: Iterable[NamespaceRecord], floors: Floors) -> list[NamespaceRecord]:
    """The records above their floors."""
    if not floors:
        return list(records)
    floor_of = dict(floors)
    return [record for record in records if record.version > floor_of.get(bucket_of(record.name), -1)]


def floors_over(old: Iterable[NamespaceRecord], others: Iterable[NamespaceRecord]) -> Floors:
    """The floors that forget the `old` records, without floors that would forget one of the `others`."""
    floors: dict[int, int] = {}
    for record in old:
        bucket = bucket_of(record.name)
        floors[bucket] = max(floors.get(bucket, 0), record.version, record.generation)
    for record in others if floors else ():
        if record.version <= floors.get(bucket_of(record.name), -1):
            del floors[bucket_of(record.name)]
    return sorted(floors.items())


class Dropped:
    """When this node learnt of each tombstone. The grace period is `forget_ms`, or `sooner_ms` when there are
    more than `many` tombstones.
    """

    def __init__(self, forget_ms: int, sooner_ms: int, many: int) -> None:
        self._forget_ms = forget_ms
        self._sooner_ms = sooner_ms
        self._many = many
        self._since_ms: dict[tuple[str, int], int] = {}  # by name and version

    def due(self, records: Iterable[NamespaceRecord], now_ms: int, kept: Container[str]) -> Floors:
        """The floors to raise now. Names that are protected, or in `kept`, are not forgotten."""
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
        self.changes = 0  # made so far
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
        """Join a record of another node; the result if it is news, otherwise None."""
        known = self._records.get(record.name)
        if known == record:
            return None  # nearly always
        joined = record if known is None else join(known, record)
        if joined == known:
            return None
        self._put(joined)
        return joined

    def fresh(self, name: str, settings: NamespaceSettings) -> NamespaceRecord:
        """The first record of an unknown name. Its first change makes it newer than all forgotten records."""
        floor = dict(self.floors).get(bucket_of(name), 0)
        return NamespaceRecord(name, floor, floor + 1, {}, settings)

    def forget(self, name: str) -> None:
        """Remove a record: a floor was raised over it."""
        self.changes += 1
        known = self._records.pop(name, None)
        if known is not None:
            self._encoded_bytes -= len(_encoder.encode(known))
            self._live -= not known.dropped

    def change(self, record: NamespaceRecord) -> None:
        """Make a change of this node. Raises NamespaceError when there is no room for another namespace."""
        known = self._records.get(record.name)
        if known is None or known.dropped:
            self._check_room(record)
        self._put(record)

    def check_spare(self, record: NamespaceRecord) -> None:
        """Whether one who is not the nodes' administrator may add this record. Raises NamespaceError.

        A namespace's administrator changes its tokens, and drops that are protected stay. So nothing else
        bounds what the holder of one token adds.
        """
        size = self._encoded_bytes + len(_encoder.encode(record))
        most = MAX_NAMESPACES - MAX_NAMESPACES // OPERATORS_SHARE
        most_bytes = MAX_REGISTRY_BYTES - MAX_REGISTRY_BYTES // OPERATORS_SHARE
        if self._live >= most or size > most_bytes:
            raise NamespaceError(
                "too_many_namespaces",
                f"the pool knows {len(self)} namespaces, those dropped included: what room is left is for "
                "its administrator (`pdserve pool ns`)",
            )

    def _put(self, record: NamespaceRecord) -> None:
        self.changes += 1
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
    """Whether a worker of this geometry may use a namespace of the `known` geometry, which is empty before
    the first worker. Raises NamespaceError that names the field.
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
