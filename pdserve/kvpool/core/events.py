"""Events and actions: the records that `NodeState.handle` takes and returns.

The shell (node/node.py) turns sockets, timers and UCX completions into events. It hands
each to `NodeState.handle(event, now_s)`, and carries out the returned actions strictly in order. The order is
part of the contract: a row of the table is written before the reply that makes its page known, and a transfer
starts before the reply that announces its tag.

Tiers. One writer thread per tier carries out everything that changes the tier, and reports it, in the order
of the actions. Loads run beside it. For every StorePages and LoadPages the shell reports each slot exactly
once, in any number of PagesStored or PagesLoaded. Until then the tier's thread may read or write the slot's
bytes.

Transfers (UCX and TCP). A page of segments [b0, b1, ...] is one transfer, named by its first segment's `tag`.
Over UCX segment i is the message with tag `tag + i`; it lies at arena offset `offset + b0 + ... + b(i-1)`.
Over TCP the page is one message. The sends of a connection begin in the order of their tags. For
every StartSend and StartReceive the shell reports one TransferDone with the same connection and tag: when all
segments completed (ok), when one failed and the others are cancelled (not ok), when the transfer was
cancelled; also after the connection is gone. From then on nothing touches the slot's bytes. Tags are unique
in an incarnation of a node. They start at FIRST_TAG: the transport uses smaller ones for messages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord
from pdserve.kvpool.protocol.messages import DataPathName, Exists, Present, Reply, Request
from pdserve.kvpool.tiers.base import PageName, SpaceFacts, TierPage

FIRST_TAG = 1 << 32
LOCAL = 0  # the connection of the node's own session (`LocalSession`)

# --- events


class Connected(msgspec.Struct, frozen=True):
    """A client has connected. `connection` is a number not used before in this incarnation."""

    connection: int
    data_path: DataPathName
    client: str
    pid: int
    peer: bool = False  # a node of this pool, or the node itself
    token: str = ""  # SHA-256 hex digest of the client's token


class Disconnected(msgspec.Struct, frozen=True):
    """The connection is gone. `by_peer` False: the node closed it, a mapped writer may still be writing."""

    connection: int
    by_peer: bool = True


class Received(msgspec.Struct, frozen=True):
    """A request of a connected client. Not Hello: the shell does the handshake."""

    connection: int
    message: Request


class TransferDone(msgspec.Struct, frozen=True):
    """The transfer `tag` of `connection` ended: nothing touches the slot's bytes for it any more."""

    connection: int
    tag: int
    ok: bool


class TransfersDone(msgspec.Struct, frozen=True):
    """These transfers ended, of any connections; their pages are committed together."""

    done: list[TransferDone]


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Due at `NodeState.next_deadline_s`; a tick too early or too late does no harm."""


class ViewChanged(msgspec.Struct, frozen=True):
    """The ring changed, or pages have stopped moving (`stable`: every node has settled). `previous`: the ring
    before, while pages that it gave to other nodes may still be there.
    """

    ring: Ring
    stable: bool
    previous: Ring | None = None


# How a page of a push ended
TAKEN: Final = 0  # the other node has it
LATER: Final = 1  # it could not take it now
NO_ROOM: Final = 2  # it is full
REFUSED: Final = 3  # it never takes it: too large, for example
GONE: Final = 4  # it is not here any more
FAILED: Final = 5  # the other node did not answer


class PagesPushed(msgspec.Struct, frozen=True):
    """A push has ended. `outcomes[i]`: what became of `push.keys[i]`, a number above. The node did not have
    `copied` of the pages before, of `copied_bytes`.
    """

    push: PushPages
    outcomes: bytes
    copied: int = 0
    copied_bytes: int = 0


class PagesFetched(msgspec.Struct, frozen=True):
    """A fetch has ended: nothing writes into its slots any more. `outcomes[i]` of `fetch.keys[i]`: TAKEN (its
    bytes are in the slot, and are right), GONE (the other node has it not) or FAILED. `checksums`: the
    writers'. `ages_s`: for how long the pages have been in the pool.
    """

    fetch: FetchPages
    outcomes: bytes
    checksums: list[int]
    ages_s: list[float]


class PagesSeen(msgspec.Struct, frozen=True):
    """Another node has these pages."""

    namespace: int
    keys: list[bytes]


class RecordsLearned(msgspec.Struct, frozen=True):
    """Another node sent records of namespaces."""

    records: list[NamespaceRecord]


class PagesFound(msgspec.Struct, frozen=True):
    """Pages are in a tier: they survived a restart there, or came from the tier above. `last`: the tier has
    reported all pages that survived. `failed`: how many pages from above it could not write.
    """

    tier: int
    pages: tuple[TierPage, ...]
    used_bytes: int
    last: bool = False
    failed: int = 0


class PagesStored(msgspec.Struct, frozen=True):
    """Stores ended, with a status of tiers/base.py each. `failed`: the tier cannot write at present."""

    tier: int
    slots: tuple[int, ...]
    statuses: tuple[int, ...]
    used_bytes: int
    failed: bool = False


class PagesGone(msgspec.Struct, frozen=True):
    """Pages left a tier: it had no room, or was told to forget them (ForgetPages)."""

    tier: int
    names: tuple[PageName, ...]
    used_bytes: int


class PagesLoaded(msgspec.Struct, frozen=True):
    """Loads ended: the tier does not touch the slots' bytes any more. `checksums` are the writers'."""

    tier: int
    slots: tuple[int, ...]
    statuses: tuple[int, ...]
    checksums: tuple[int, ...]


class PagesErased(msgspec.Struct, frozen=True):
    """All tiers have carried out the ErasePages of this ticket. With a `problem` not to the end."""

    ticket: int
    problem: str = ""


class NamespacesSaved(msgspec.Struct, frozen=True):
    """The list of this revision, or a newer one, is durable. With a `problem` it is not: the text says why.
    The shell tries again, and reports again.
    """

    revision: int
    problem: str = ""


Event: TypeAlias = (
    Connected
    | Disconnected
    | Received
    | TransfersDone
    | Tick
    | ViewChanged
    | PagesPushed
    | PagesFetched
    | PagesSeen
    | RecordsLearned
    | PagesFound
    | PagesStored
    | PagesGone
    | PagesLoaded
    | PagesErased
    | NamespacesSaved
)

# --- actions (`gc=False`: they hold no cycles, and there may be several per page)


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to the client."""

    connection: int
    message: Reply


class Close(msgspec.Struct, frozen=True, gc=False):
    """Close the connection once earlier answers are sent; Disconnected(by_peer=False) follows."""

    connection: int
    reason: str


class ReserveRows(msgspec.Struct, frozen=True, gc=False):
    """Mark rows of the slot table reserved for pages of `space`. Then set byte ranges of the arena,
    half-open, to zero.
    """

    slots: list[int]
    space: int
    wipe: list[tuple[int, int]] = []


class CommitRows(msgspec.Struct, frozen=True, gc=False):
    """Fill reserved rows of the slot table, and mark them committed. The lists are columns of one length."""

    slots: list[int]
    keys: list[bytes]
    spaces: list[int]
    lengths: list[int]
    checksums: list[int]
    sequences: list[int]
    committed_s: float


class FreeRows(msgspec.Struct, frozen=True, gc=False):
    """Mark rows free. Then set byte ranges of the arena, half-open, to zero."""

    slots: list[int]
    wipe: list[tuple[int, int]] = []


class AssignSlab(msgspec.Struct, frozen=True, gc=False):
    """The slab holds slots of `slot_bytes` each from now on (0: unassigned)."""

    slab: int
    slot_bytes: int


class SaveNamespaces(msgspec.Struct, frozen=True, gc=False):
    """Save this JSON text in place of the earlier one: beside the memory, before the next action. Where there
    are tiers, also durably, in the background: only the newest of the waiting texts, then NamespacesSaved.
    """

    text: str
    revision: int = 0


class PublishNamespace(msgspec.Struct, frozen=True, gc=False):
    """Send this record to the other nodes."""

    record: NamespaceRecord


class StartSend(msgspec.Struct, frozen=True, gc=False):
    """UCX, TCP: send the page's segments from the arena to the client."""

    connection: int
    tag: int
    offset: int
    segment_bytes: tuple[int, ...]


class StartReceive(msgspec.Struct, frozen=True, gc=False):
    """UCX, TCP: receive the page's segments from the client straight into the arena."""

    connection: int
    tag: int
    offset: int
    segment_bytes: tuple[int, ...]


class CancelTransfers(msgspec.Struct, frozen=True, gc=False):
    """UCX, TCP: cancel these transfers (first segments' tags); each is still reported by a TransferDone."""

    connection: int
    tags: tuple[int, ...]


TransferAction: TypeAlias = StartSend | StartReceive | CancelTransfers


def failures(actions: Sequence[TransferAction]) -> list[TransferDone]:
    """That transfers which were to begin have failed."""
    begun = [action for action in actions if not isinstance(action, CancelTransfers)]
    return [TransferDone(action.connection, action.tag, False) for action in begun]


class PushPages(msgspec.Struct, frozen=True):
    """Give these pages to another node, those that it has not: for good, or (`replica`) under a lease that
    this renews. `written`: a client has just written them here, and waits. One PagesPushed follows.
    """

    node: str
    namespace: int
    keys: list[bytes]
    lengths: list[int]
    replica: bool = False
    written: bool = False


class FetchPages(msgspec.Struct, frozen=True):
    """Copy pages of `length_bytes` from another node into reserved slots, which begin at these offsets of the
    arena. One PagesFetched follows.
    """

    node: str
    namespace: int
    length_bytes: int
    keys: list[bytes]
    slots: list[int]
    offsets: list[int]


class AskOwners(msgspec.Struct, frozen=True):
    """Answer this Exists of a client with `present`, and with what other nodes say about keys of theirs.
    `others`: by node, the indices of the keys that it is asked about.
    """

    connection: int
    request: Exists
    present: Present
    others: dict[str, list[int]]


class WatchOwners(msgspec.Struct, frozen=True):
    """Clients wait for pages of other nodes, for `timeout_s` at most. `others`: the keys by node. PagesSeen
    says which of them are there, once or several times, as long as it may help.
    """

    namespace: int
    timeout_s: float
    others: dict[str, list[bytes]]


class Settled(msgspec.Struct, frozen=True):
    """Every page here that another node owns in this epoch's ring is there, or was given up."""

    epoch: int


class SlotPage(msgspec.Struct, frozen=True, gc=False):
    """A page, and its slot at byte `offset` of the arena."""

    slot: int
    offset: int
    page: TierPage


class StorePages(msgspec.Struct, frozen=True):
    """Write the slots' pages to the tier."""

    tier: int
    pages: tuple[SlotPage, ...]


class LoadPages(msgspec.Struct, frozen=True):
    """Read the pages from the tier into the slots, and check them. Their checksum and sequence are unset."""

    tier: int
    pages: tuple[SlotPage, ...]


class ForgetPages(msgspec.Struct, frozen=True):
    """The tier drops these pages, and reports one PagesGone."""

    tier: int
    names: tuple[PageName, ...]


class ForgetSpace(msgspec.Struct, frozen=True):
    """All tiers drop the pages that they have of the space. Nothing is reported."""

    space: int


class ErasePages(msgspec.Struct, frozen=True):
    """All tiers forget these pages of the space, or (None) all that they have of it, and erase their bytes.
    Each tier reports those keys as gone once more, and one PagesErased follows.
    """

    ticket: int
    space: int
    keys: tuple[bytes, ...] | None = None


class OpenSpace(msgspec.Struct, frozen=True):
    """This is the space of a namespace from now on. Before the first action that names the space."""

    space: int
    facts: SpaceFacts


class PagesMoved(msgspec.Struct, frozen=True):
    """Pages came to the node, left it, or are in another tier. `places[i]`: where `keys[i]` is now, as in
    `PageEntry.place`; empty: nowhere. Only where places are followed.
    """

    namespace: int
    keys: list[bytes]
    places: list[str]


class PlacesVoid(msgspec.Struct, frozen=True):
    """Many pages went at once: what was told of places before is void."""


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
    | PushPages
    | FetchPages
    | AskOwners
    | WatchOwners
    | Settled
    | StorePages
    | LoadPages
    | ForgetPages
    | ForgetSpace
    | ErasePages
    | OpenSpace
    | PagesMoved
    | PlacesVoid
)
