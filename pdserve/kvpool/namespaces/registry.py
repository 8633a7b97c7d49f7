"""The namespaces as all nodes know them: one record per name, merged without consensus. Pure.

Any node may change a record, and news may arrive in any order, twice, or late. So records form a semilattice:
`join` is commutative, associative and idempotent (Shapiro et al., "Conflict-free Replicated Data Types",
2011). Of two records of one name the larger (version, dropped, encoding) wins as a whole; only the generation
is the larger of both, and `voided` has the later time for each node. A drop raises the generation, and
nothing lowers it. Pages of a smaller generation are void, even if another change of the namespace wins over
the drop. A version is the clock's millisecond of the change, or the one after the version before where the
clock is behind.

**Tombstones.** The record of a dropped namespace stays, without its geometry: a node that was away must learn
of the drop. It keeps its settings, so that a protected name does not become an unprotected one. A tombstone
that is not protected is forgotten after `FORGET_MS`, or when there are `MAX_TOMBSTONES` newer ones. A node
that was away for longer brings nothing back: it starts without its namespaces (catalog.py).

**Erased pages.** Single pages that are erased leave no tombstones, of which there would be many. Instead a
node that was away then voids all that it has of the namespace. `voided` says who was, as long as tombstones
are kept: nodes by name, and `EVERYBODY` for those whose end is so long ago that nobody remembers them.

**Settings** are checked here too. Errors are messages for the person who set them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from pdserve.errors import ConfigError, PoolRefused
from pdserve.kvpool.namespaces.access import TOKENS, is_guarded
from pdserve.kvpool.namespaces.tenants import OWN, split
from pdserve.kvpool.policies import check_policy
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings
from pdserve.security.tokens import is_digest

DAY_MS: Final = 24 * 3600 * 1000
FORGET_MS: Final = 30 * DAY_MS
EVERYBODY: Final = ""
DROPS_A_DAY: Final = 1024  # of one name, on the average of the time that its tombstone is kept
MAX_TOMBSTONES: Final = 4096  # that are not protected
MAX_NAMESPACES = 1024  # without tombstones
MAX_TENANTS = 4096  # namespaces of tenants, over all models
MAX_NAMESPACES_PER_TOKEN = MAX_NAMESPACES // 2  # made by workers; the rest is for other tokens
OPERATORS_SHARE = 4  # one part in so many of namespaces and bytes is for the nodes' administrator
MAX_NAME_CHARS = 512
MAX_GEOMETRY_CHARS = 64 * 1024  # keys and values together
MAX_REGISTRY_BYTES = 2 << 20  # of all records encoded: half a frame, in which nodes send them
MAX_LEARNED_BYTES: Final = 2 * MAX_REGISTRY_BYTES  # the same with those of other nodes: several may add some

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
    voided = dict(one.voided)
    for node, at_ms in other.voided.items():
        voided[node] = max(at_ms, voided.get(node, 0))
    if newer.generation == generation and newer.voided == voided:
        return newer
    return msgspec.structs.replace(newer, generation=generation, voided=voided)


def _order(record: NamespaceRecord) -> tuple[int, bool, bytes]:
    encoding = _encoder.encode(msgspec.structs.replace(record, generation=0, voided={}))
    return record.version, record.dropped, encoding


class Registry:
    """Records by name. `now_ms`: the clock's millisecond, set by whoever handles an event. `changes`: made so
    far.
    """

    def __init__(self, records: Iterable[NamespaceRecord] = ()) -> None:
        self.changes = 0
        self.now_ms = 0
        self.encoded_bytes = 0  # of all records
        self._records: dict[str, NamespaceRecord] = {}
        self._encoded: dict[str, tuple[int, bytes]] = {}  # length and digest of each
        self._tombstones: set[tuple[int, str]] = set()  # versions and names of those not protected
        self._live = 0  # not dropped, without tenants
        self._tenants = 0
        self._digest = (-1, b"")  # and the changes when it was made
        for record in records:
            self.learn(record)

    def get(self, name: str) -> NamespaceRecord | None:
        return self._records.get(name)

    def __iter__(self) -> Iterator[NamespaceRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    @property
    def digest(self) -> bytes:
        """Equal on nodes that have the same records."""
        if self._digest[0] != self.changes:
            texts = (digest for _, (_, digest) in sorted(self._encoded.items()))
            self._digest = self.changes, hashlib.blake2b(b"".join(texts), digest_size=16).digest()
        return self._digest[1]

    # --- what other nodes know

    def news(self, records: Iterable[NamespaceRecord]) -> list[NamespaceRecord]:
        """Those that `learn` would change something for."""
        return [record for record in records if self._joined(record) is not None]

    def added_bytes(self, records: Iterable[NamespaceRecord]) -> int:
        """By how much longer the encoded records would be with these."""
        return sum(len(_encoder.encode(one)) - self._encoded.get(one.name, (0, b""))[0] for one in records)

    def learn(self, record: NamespaceRecord) -> NamespaceRecord | None:
        """Join a record of another node; the result if it is news, otherwise None."""
        joined = self._joined(record)
        if joined is not None:
            self._put(joined)
        return joined

    def _joined(self, record: NamespaceRecord) -> NamespaceRecord | None:
        known = self._records.get(record.name)
        if known == record:
            return None  # nearly always
        if known is None:
            return None if self._is_forgotten(record) else record
        joined = join(known, record)
        return None if joined == known else joined

    def expire(self, now_ms: int) -> None:
        """Forget tombstones. Nodes forget alike: what one forgets, another does not bring back."""
        self.now_ms = max(self.now_ms, now_ms)
        for _, name in [one for one in self._tombstones if one[0] < self.now_ms - FORGET_MS]:
            self._remove(name)

    def _is_forgotten(self, record: NamespaceRecord) -> bool:
        if not _is_tombstone(record):
            return False
        too_many = len(self._tombstones) >= MAX_TOMBSTONES
        return record.version < self.now_ms - FORGET_MS or (
            too_many and (record.version, record.name) < min(self._tombstones)
        )

    # --- changes of this node

    def fresh(self, name: str, settings: NamespaceSettings) -> NamespaceRecord:
        """The first record of an unknown name. Its generation is above those of a namespace of this name
        whose tombstone was forgotten: its pages may still be in a bucket.
        """
        return NamespaceRecord(name, 0, max(1, self.now_ms // DAY_MS * DROPS_A_DAY), {}, settings)

    def changed(self, record: NamespaceRecord, **fields: Any) -> NamespaceRecord:
        """A newer record. It changes nothing yet."""
        return msgspec.structs.replace(record, version=max(record.version + 1, self.now_ms), **fields)

    def dropped(self, record: NamespaceRecord, replaced_by: str = "") -> NamespaceRecord:
        """The tombstone of a record. It changes nothing yet."""
        generation = record.generation + 1
        return self.changed(record, generation=generation, geometry={}, dropped=True, replaced_by=replaced_by)

    def voided(self, record: NamespaceRecord, away: Iterable[str]) -> NamespaceRecord:
        """The record, once pages of it were erased that these nodes may have. It changes nothing yet."""
        known = {node: at_ms for node, at_ms in record.voided.items() if at_ms > self.now_ms - FORGET_MS}
        return self.changed(record, voided=known | dict.fromkeys((EVERYBODY, *away), self.now_ms))

    def tenants_of(self, model: str) -> list[NamespaceRecord]:
        """The records of a namespace's tenants that are not dropped."""
        return [one for one in self if not one.dropped and split(one.name)[0] == model != one.name]

    def change(self, record: NamespaceRecord) -> None:
        """Make a change of this node. Raises NamespaceError when there is no room for another namespace."""
        known = self._records.get(record.name)
        if known is None or known.dropped:
            self._check_room(record)
        self._put(record)

    def forget_unprotected(self) -> None:
        """This node was away for so long that it may have missed drops."""
        for record in list(self):
            if not is_guarded(record.settings):
                self._remove(record.name)

    def check_spare(self, record: NamespaceRecord) -> None:
        """Whether one who is not the nodes' administrator may add this record. Raises NamespaceError.

        A namespace's administrator changes its tokens, and drops that are protected stay. So nothing else
        bounds what the holder of one token adds.
        """
        size = self.encoded_bytes + len(_encoder.encode(record))
        most = MAX_NAMESPACES - MAX_NAMESPACES // OPERATORS_SHARE
        most_bytes = MAX_REGISTRY_BYTES - MAX_REGISTRY_BYTES // OPERATORS_SHARE
        if (self._live >= most and not split(record.name)[1]) or size > most_bytes:
            raise NamespaceError(
                "too_many_namespaces",
                f"the pool knows {len(self)} namespaces, those dropped included: what room is left is for "
                "its administrator (`pdserve pool ns`)",
            )

    def _put(self, record: NamespaceRecord) -> None:
        self._remove(record.name)
        text = _encoder.encode(record)
        self._records[record.name] = record
        self._encoded[record.name] = len(text), hashlib.blake2b(text, digest_size=16).digest()
        self.encoded_bytes += len(text)
        self._count(record, 1)
        if _is_tombstone(record):
            self._tombstones.add((record.version, record.name))
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._remove(min(self._tombstones)[1])

    def _remove(self, name: str) -> None:
        self.changes += 1
        known = self._records.pop(name, None)
        if known is not None:
            self.encoded_bytes -= self._encoded.pop(name)[0]
            self._count(known, -1)
            self._tombstones.discard((known.version, name))

    def _count(self, record: NamespaceRecord, by: int) -> None:
        if not record.dropped and split(record.name)[1]:
            self._tenants += by
        elif not record.dropped:
            self._live += by

    def _check_room(self, record: NamespaceRecord) -> None:
        is_tenant = split(record.name)[1] != ""
        if is_tenant and not record.dropped and self._tenants >= MAX_TENANTS:
            raise NamespaceError(
                "too_many_namespaces",
                f"the pool holds pages of {MAX_TENANTS} tenants: drop one that is not used",
            )
        if not is_tenant and not record.dropped and self._live >= MAX_NAMESPACES:
            raise NamespaceError(
                "too_many_namespaces",
                f"the pool holds {MAX_NAMESPACES} namespaces: drop one that is not used",
            )
        if self.encoded_bytes + len(_encoder.encode(record)) > MAX_REGISTRY_BYTES:
            raise NamespaceError(
                "too_many_namespaces",
                f"all that the nodes know of namespaces takes {MAX_REGISTRY_BYTES >> 20} MiB: drop those "
                "that are not used",
            )


def _is_tombstone(record: NamespaceRecord) -> bool:
    """Whether it is one that is forgotten in time."""
    return record.dropped and not is_guarded(record.settings)


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


MAX_WEIGHT = 1e6
MIN_WEIGHT = 1e-3
MAX_COPIES = 16
MIN_RATE = 1e-3  # per second; below it a request would wait for ever
MAX_POLICY_CHARS = 64
QUOTAS = ("quota_bytes", "tier_quota_bytes", "tenant_quota_bytes", "tenant_tier_quota_bytes")
MAX_COUNT = 1 << 62  # above all versions and generations


def check_record(record: NamespaceRecord) -> None:
    """Whether a node can have made this record, whatever its capacity and policies. Raises NamespaceError."""
    check_name(record.name)
    check_geometry(record.name, record.geometry, record.geometry)
    counts = (record.version, record.generation)
    if not all(0 <= count < MAX_COUNT for count in counts) or len(record.replaced_by) > MAX_NAME_CHARS:
        raise NamespaceError("bad_namespace", f"an impossible record of namespace '{record.name}'")
    check_bounds(record.settings)


def check_bounds(settings: NamespaceSettings) -> None:
    """Whether the settings are possible on a node of any capacity. Raises NamespaceError."""
    for name in (*QUOTAS, "operations_s", "bytes_s", "ttl_s"):
        value = getattr(settings, name)
        if not (value >= 0 and math.isfinite(value)):
            raise _bad(f"{name} is {value}: it must be 0 (no limit) or above")
    if not 1 <= settings.copies <= MAX_COPIES:
        raise _bad(f"copies is {settings.copies}: it must be 1 (each page on its node alone) to {MAX_COPIES}")
    for name in ("operations_s", "bytes_s"):
        if 0 < getattr(settings, name) < MIN_RATE:
            raise _bad(
                f"{name} is {getattr(settings, name)}: it must be 0 (no limit) or at least {MIN_RATE:g}"
            )
    if not MIN_WEIGHT <= settings.weight <= MAX_WEIGHT:
        raise _bad(f"weight is {settings.weight}: it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:,.0f}")
    if len(settings.policy) > MAX_POLICY_CHARS:
        raise _bad(f"policy: a name has at most {MAX_POLICY_CHARS} characters")
    for name in TOKENS:
        token = getattr(settings, name)
        if token and not is_digest(token):
            raise _bad(f"{name} must be the SHA-256 digest of the token, 64 hexadecimal digits")


def check_settings(settings: NamespaceSettings, capacity_bytes: int, *, tokens_allowed: bool) -> None:
    """Whether the settings are possible on a node of this capacity. Raises NamespaceError."""
    for name in ("quota_bytes", "tenant_quota_bytes"):
        if (quota_bytes := getattr(settings, name)) > capacity_bytes:
            raise _bad(
                f"{name} is {quota_bytes:,}, and this node has {capacity_bytes:,}: a quota is per "
                "node, and cannot be larger than one (0: no limit)"
            )
    check_bounds(settings)
    _check_policy(settings)
    for name in TOKENS:
        if getattr(settings, name) and not tokens_allowed:
            raise _bad(
                f"{name} is of no use while the node has no admin_token: set that in the node's "
                "configuration first"
            )


def check_tenant_settings(name: str, settings: NamespaceSettings) -> None:
    """Whether a tenant's namespace may have these settings of its own. Raises NamespaceError."""
    rest = msgspec.structs.replace(settings, **dict.fromkeys(OWN, 0))
    if rest != NamespaceSettings():
        raise _bad(f"'{name}' is of a tenant, which has {' and '.join(OWN)} of its own, and nothing else")


def _check_policy(settings: NamespaceSettings) -> None:
    try:
        check_policy(settings.policy, settings.ttl_s or None)
    except ConfigError as error:
        raise _bad(str(error)) from None


def _bad(message: str) -> NamespaceError:
    return NamespaceError("bad_settings", message)
