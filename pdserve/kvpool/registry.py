"""The namespaces as all nodes know them: one record per name, merged without consensus. Pure.

Any node may change a record, and any two nodes may meet in any order, twice, or late. So records are joined
as a semilattice, whose join is commutative, associative and idempotent (Shapiro et al., "Conflict-free
Replicated Data Types", 2011): of two records of one name the larger (version, dropped, encoding) wins whole,
but for the generation, which is the larger of both. A generation grows when a namespace is dropped, and
nothing makes it smaller: pages that a node keeps of a smaller one are nobody's, even if another change of the
namespace wins over the drop.

Records of dropped namespaces stay, without their geometry: a node that was away must learn of the drop. They
keep their settings too, so that a protected name does not become an unprotected one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pdserve.errors import PoolRefused
from pdserve.kvpool.cluster_messages import NamespaceRecord

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


def _order(record: NamespaceRecord) -> tuple[int, bool, bytes]:
    encoding = _encoder.encode(msgspec.structs.replace(record, generation=0))
    return record.version, record.dropped, encoding


class Registry:
    """Records by name."""

    def __init__(self, records: Iterable[NamespaceRecord] = ()) -> None:
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
