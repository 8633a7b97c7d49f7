"""What happens to a pool node and what it does about it: the records that `NodeState.handle` takes and
returns.

The shell (`node.py`, or the in-process transport) turns sockets, timers and UCX completions into events,
hands each to `NodeState.handle(event, now_s)`, and carries out the returned actions strictly in order. The
order is part of the contract: table rows are written before the replies that make them known are sent, and a
transfer is started before the reply that announces its tag.

Tiers. Everything that changes a tier is carried out by that tier's one writer thread in the order of the
actions, and reported in that order; loads are carried out beside it. For every StorePages and LoadPages the
shell reports each of its slots exactly once, in any number of PagesStored or PagesLoaded; until then the
tier's thread may be reading or writing the slot's bytes.

Transfers (UCX only). A page of segments [b0, b1, ...] is one transfer, named by its first segment's `tag`;
segment i is the UCX message with tag `tag + i` and lies at arena offset `offset + b0 + ... + b(i-1)`. For
every StartSend and StartReceive the shell reports exactly one TransferDone with the same connection and tag,
after which nothing touches the slot's bytes any more: when all segments completed (ok), when any failed (not
ok, the others having been cancelled), when it was cancelled, and also after the connection is gone. Tags are
unique within an incarnation of a node and are never below FIRST_TAG, so smaller ones are free for the
transport's own messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord
from pdserve.kvpool.protocol.messages import DataPathName, Reply, Request
from pdserve.kvpool.tiers.base import PageName, TierPage

FIRST_TAG = 1 << 32
LOCAL = 0  # the connection of the node's own session (local.py)

# --- events


class Connected(msgspec.Struct, frozen=True):
    """A client shook hands. `connection` is a number never used before in this incarnation."""

    connection: int
    data_path: DataPathName
    client: str
    pid: int
    peer: bool = False  # a node of this pool, or the node itself
    token: str = ""  # SHA-256 hex digest of what it presented (access.py)


class Disconnected(msgspec.Struct, frozen=True):
    """The connection is gone. `by_peer` false: we closed it, so a mapped writer may still be writing."""

    connection: int
    by_peer: bool = True


class Received(msgspec.Struct, frozen=True):
    """A request of a connected client (never Hello: the shell does the handshake)."""

    connection: int
    message: Request


class TransferDone(msgspec.Struct, frozen=True):
    """The transfer `tag` of `connection` ended; its slot's bytes are not touched by UCX any more."""

    connection: int
    tag: int
    ok: bool


class Tick(msgspec.Struct, frozen=True):
    """Time passed: expire what is due. Wanted at `NodeState.next_deadline_s`; early or late is harmless."""


class ViewChanged(msgspec.Struct, frozen=True):
    """The ring is another one, or pages have stopped moving (`stable`: every owner has settled)."""

    ring: Ring
    stable: bool


class ReplicasMade(msgspec.Struct, frozen=True):
    """A node answered AskReplicas: `mask[i]`, whether it holds a replica of `keys[i]` now."""

    node: str
    namespace: int
    keys: Sequence[bytes]
    mask: Sequence[bool]


class RecordsLearned(msgspec.Struct, frozen=True):
    """Another node told what it knows of namespaces."""

    records: list[NamespaceRecord]


class RecordsForgotten(msgspec.Struct, frozen=True):
    """These namespaces are remembered no more, and the floors (registry.py) are others."""

    names: list[str]
    floors: list[tuple[int, int]]


class PagesFound(msgspec.Struct, frozen=True):
    """Pages are in a tier: they survived there, or came down from the tier above. `last`: it has reported
    all that survived. `failed`: so many more came down and could not be written.
    """

    tier: int
    pages: tuple[TierPage, ...]
    used_bytes: int
    last: bool = False
    failed: int = 0


class PagesStored(msgspec.Struct, frozen=True):
    """Stores ended; `statuses` are those of tiers/base.py. `failed`: the tier cannot write at present."""

    tier: int
    slots: tuple[int, ...]
    statuses: tuple[int, ...]
    used_bytes: int
    failed: bool = False


class PagesGone(msgspec.Struct, frozen=True):
    """Pages left a tier: for lack of room, or because they were forgotten (ForgetPages)."""

    tier: int
    names: tuple[PageName, ...]
    used_bytes: int


class PagesLoaded(msgspec.Struct, frozen=True):
    """Loads ended; the slots' bytes are not touched by the tier any more. `checksums`: the writers'."""

    tier: int
    slots: tuple[int, ...]
    statuses: tuple[int, ...]
    checksums: tuple[int, ...]


class NamespacesSaved(msgspec.Struct, frozen=True):
    """The list of this revision, or a newer one, is durable. Where `problem` is not empty, it is not, and
    `problem` says why. A list that could not be saved is tried again, and reported again.
    """

    revision: int
    problem: str = ""


Event: TypeAlias = (
    Connected
    | Disconnected
    | Received
    | TransferDone
    | Tick
    | ViewChanged
    | ReplicasMade
    | RecordsLearned
    | RecordsForgotten
    | PagesFound
    | PagesStored
    | PagesGone
    | PagesLoaded
    | NamespacesSaved
)

# --- actions (`gc=False`: they hold no cycles, and there may be several per page)


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to the client."""

    connection: int
    message: Reply


class Close(msgspec.Struct, frozen=True, gc=False):
    """Close the connection after what was already answered is sent; Disconnected(by_peer=False) follows."""

    connection: int
    reason: str


class ReserveRows(msgspec.Struct, frozen=True, gc=False):
    """Mark rows of the slot table reserved, for pages whose rows will carry `space`; then set these bytes of
    the arena, each from and to, to zero.
    """

    slots: list[int]
    space: int
    wipe: list[tuple[int, int]] = []


class CommitRows(msgspec.Struct, frozen=True, gc=False):
    """Fill reserved rows of the slot table, and mark them committed: columns of one length."""

    slots: list[int]
    keys: list[bytes]
    spaces: list[int]
    lengths: list[int]
    checksums: list[int]
    sequences: list[int]
    committed_s: float


class FreeRows(msgspec.Struct, frozen=True, gc=False):
    """Mark rows free."""

    slots: list[int]


class AssignSlab(msgspec.Struct, frozen=True, gc=False):
    """The slab now holds slots of `slot_bytes` each (0: unassigned)."""

    slab: int
    slot_bytes: int


class SaveNamespaces(msgspec.Struct, frozen=True, gc=False):
    """Save this text (JSON) in place of the earlier one: beside the memory before later actions, and, where
    there are tiers, durably, in the background. Of lists that wait for that, only the newest is written.
    NamespacesSaved follows.
    """

    text: str
    revision: int = 0


class PublishNamespace(msgspec.Struct, frozen=True, gc=False):
    """Tell the other nodes of this change."""

    record: NamespaceRecord


class StartSend(msgspec.Struct, frozen=True, gc=False):
    """UCX: send the page's segments from the arena to the client."""

    connection: int
    tag: int
    offset: int
    segment_bytes: tuple[int, ...]


class StartReceive(msgspec.Struct, frozen=True, gc=False):
    """UCX: receive the page's segments from the client straight into the arena."""

    connection: int
    tag: int
    offset: int
    segment_bytes: tuple[int, ...]


class CancelTransfers(msgspec.Struct, frozen=True, gc=False):
    """UCX: cancel these transfers (first segments' tags); each is still reported by a TransferDone."""

    connection: int
    tags: tuple[int, ...]


class AskReplicas(msgspec.Struct, frozen=True):
    """Ask the node for replicas of these pages of ours, or to renew them; exactly one ReplicasMade follows,
    with the same node and namespace.
    """

    node: str
    namespace: int
    keys: Sequence[bytes]
    lengths: Sequence[int]


class EndReplicasAt(msgspec.Struct, frozen=True):
    """Tell the node that these replicas are not wanted any more."""

    node: str
    namespace: int
    keys: Sequence[bytes]


class SlotPage(msgspec.Struct, frozen=True, gc=False):
    """A page and the slot at byte `offset` of the arena that it is in, or is to be in."""

    slot: int
    offset: int
    page: TierPage


class StorePages(msgspec.Struct, frozen=True):
    """Write the slots' pages to the tier."""

    tier: int
    pages: tuple[SlotPage, ...]


class LoadPages(msgspec.Struct, frozen=True):
    """Read the pages from the tier into the slots, and check them. Checksum and sequence are not theirs."""

    tier: int
    pages: tuple[SlotPage, ...]


class ForgetPages(msgspec.Struct, frozen=True):
    """The tier shall find these no more. It reports one PagesGone of them."""

    tier: int
    names: tuple[PageName, ...]


class ForgetSpace(msgspec.Struct, frozen=True):
    """All tiers: free the room of the space's pages that were put so far. Nothing is reported."""

    space: int


Action: TypeAlias = (
    Answer
    | Close
    | ReserveRows
    | CommitRows
    | FreeRows
    | AssignSlab
    | SaveNamespaces
    | PublishNamespace
    | StartSend
    | StartReceive
    | CancelTransfers
    | AskReplicas
    | EndReplicasAt
    | StorePages
    | LoadPages
    | ForgetPages
    | ForgetSpace
)
