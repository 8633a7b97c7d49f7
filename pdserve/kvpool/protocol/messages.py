"""The messages between a pool client and a pool node. Pure: records only; frames.py turns them into bytes.

A connection is one stream (Unix socket or TCP). Each frame is a little-endian u32 length, then that many
bytes of msgpack: one message, an array whose first item is the message's number. Page bytes do not travel
here. They go through mapped memory, UCX or another TCP connection; these messages say where.

    client                    node
    Hello              ->     Welcome, or Fault and close
    Hello with key_id  ->     Challenge, or Fault and close
    Proof              ->     Welcome, or Fault and close
    request(id)        ->     reply(id), or Fault(id); any number in flight, replies in any order
    Abort, Release     ->     (no reply)

Writing a page: Reserve -> the client fills the slot -> Commit. Readers see committed pages only.
Reading a page: Get pins it under a lease -> the client copies -> Release. A pinned page is not evicted.

Compatibility: message numbers are never reused; fields are only ever appended, with defaults.
`PROTOCOL_VERSION` changes only when a peer could misread another; a node refuses other versions by name.
tests/kvpool/protocol/test_messages.py pins the bytes of every message.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from pdserve.kvpool.protocol.base import MAX_KEYS as MAX_KEYS
from pdserve.kvpool.protocol.base import Id, Keys, Message, Name, Slots
from pdserve.kvpool.protocol.base import NodeAddress as NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ClusterReply,
    ClusterRequest,
    Member,
    NamespaceSettings,
    TierStatus,
)

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 * 1024 * 1024  # 4,096 grants take ~200 KB; the rest is room for status reports
MAX_HELLO_BYTES = 4096  # of a connection's first frame, before its sender has shown a token
MAX_PAGES: Final = 128  # of one Get, Reserve, Commit, Abort or Discard: about 0.4 ms of a node
MAX_BATCH_BYTES: Final = 32 * 1024 * 1024  # of one Get or Reserve of several pages: about 4 ms to wipe
MAX_FATES: Final = 64  # told in one answer
NOWHERE: Final = 0  # a place in `Present`
IN_MEMORY: Final = 1
MAX_KEPT_KEYS: Final = 256  # kept or moved by one Exists: about 0.3 ms of a node's time
UP, DOWN = 1, -1  # ways of a page between memory and tiers
MAX_KEEP_S: Final = 24 * 3600  # pages are kept no longer, whoever wishes
MAX_SEGMENTS = 1024  # per page; HiCache's layer_first layout has two per layer


def pages_a_message(page_bytes: int) -> int:
    """How many pages of this size one Get or Reserve may be for."""
    return max(1, min(MAX_PAGES, MAX_BATCH_BYTES // max(1, page_bytes)))


# "none": a connection that moves no pages; it asks (exists, wait, status)
DataPathName: TypeAlias = Literal["shm", "ucx", "tcp", "none"]
DataPathChoice: TypeAlias = Literal["auto", "shm", "ucx", "tcp", "none"]

# Of a page's place: others would fail in the middle of a batch, where they are packed
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Tag: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Segments: TypeAlias = Annotated[list[Annotated[int, Meta(gt=0)]], Meta(min_length=1, max_length=MAX_SEGMENTS)]

# Status of one key in `Reserved`
GRANTED = 0  # the slot is the client's to fill
PRESENT = 1  # already committed: nothing to do
BUSY = 2  # another client is writing the same key: nothing to do, `Wait` for it if it matters
FULL = 3  # no space: every other page is pinned, or the quota is reached
TOO_LARGE = 4  # the page is larger than a slab
MOVED = 5  # another node owns it under this node's newer view: ask that node

# Status of one key in `Got`
HIT = 0
MISS = 1

# What a client may do in a namespace: a sum of these
READ: Final = 1
WRITE: Final = 2
ADMIN: Final = 4
ALL: Final = READ | WRITE | ADMIN


class Hello(Message, tag=1, frozen=True):
    """First frame of a client. `host_id` names the machine (boot id): both sides see whether mapping can
    work. `key_id` names the token that the client is going to prove (handshake.py). `token` is never sent: a
    client keeps it there before it sends the message, and the node after it was proved.
    """

    version: int
    client: str
    pid: int
    host_id: str
    data_path: DataPathChoice = "auto"
    token: str = ""
    node: Name = ""  # the pool node that this client is, if it is one
    key_id: bytes = b""
    nonce: bytes = b""


class Challenge(Message, tag=5, frozen=True):
    """The node's answer to a Hello that names a token: it knows the token, and the client is to prove the
    same (handshake.py).
    """

    node: str
    nonce: bytes
    proof: bytes


class Proof(Message, tag=6, frozen=True):
    """The client's second frame, after a Challenge. The answer is Welcome, or Fault and close."""

    masked_token: bytes


class ArenaInfo(Message, tag=91, frozen=True):
    """Where a client on the node's host gets its memory, to map it whole.

    `socket_path`: of a Unix socket that gives descriptors of arena and table.
    """

    socket_path: str
    arena_bytes: int
    table_bytes: int


class UcxInfo(Message, tag=92, frozen=True):
    """How a client reaches the node's UCX worker: its listener's host and port.

    `connection` is the number of this connection. The client sends it as its first UCX message, so that the
    node knows to which connection the endpoint belongs.
    """

    host: str
    port: int
    connection: int


class TcpInfo(Message, tag=102, frozen=True):
    """How a client opens its data connection: the port, and the host if it is not the control connection's.

    `ticket` is good for one connection, for a few seconds. The client sends it as the first bytes, after the
    TLS handshake where `tls` is set.
    """

    host: str
    port: int
    ticket: bytes
    tls: bool


class Welcome(Message, tag=2, frozen=True):
    """The node's answer to Hello. `incarnation` changes at every start of the node. `data_path` is the path
    that the node chose: it decides whether `arena`, `ucx` or `tcp` is set (none of them for none).
    """

    version: int
    node: str
    incarnation: int
    host_id: str
    data_path: DataPathName
    lease_s: float
    arena: ArenaInfo | None = None
    ucx: UcxInfo | None = None
    epoch: int = 0
    nodes: list[NodeAddress] = []
    previous: list[NodeAddress] = []  # as in View
    tcp: TcpInfo | None = None


class Fault(Message, tag=3, frozen=True):
    """The request `id` was refused (id 0: the connection). `code` is for programs, `message` one line for
    people.
    """

    id: Id
    code: str
    message: str


class Done(Message, tag=4, frozen=True):
    """The request `id` was done; `count` is a number of pages: those that a drop freed, for example."""

    id: Id
    count: int = 0


class OpenNamespace(Message, tag=10, frozen=True):
    """Create the namespace, or open it. All clients of a namespace have the same `geometry`, key for key.
    Otherwise a Fault `geometry_mismatch` names the field and both values.
    """

    id: Id
    name: Name
    geometry: dict[str, str]
    generation: int = 0  # of a node's pages: pages of two generations are never mixed


class Opened(Message, tag=11, frozen=True):
    """`namespace` is the number used in the messages below; it holds for this incarnation of the node.
    `rights`: what the client may do there, a sum of read 1, write 2, admin 4. `largest_page_bytes`: larger
    pages never fit.
    """

    id: Id
    namespace: int
    rights: int = 7
    largest_page_bytes: int = 0


class Exists(Message, tag=12, frozen=True):
    """`fates`: tell those of the first MAX_FATES keys too. `places`: tell where the pages are. `keep_s`: keep
    those of the first MAX_KEPT_KEYS that are in memory here for so long, whatever was said before; below 0:
    no longer; 0: as before. `move`: UP has those of them loaded into memory that only a tier has; DOWN has
    those in memory evicted before others. `keep_s` and DOWN need the right to write, and are passed over
    without.
    """

    id: Id
    namespace: int
    keys: Keys
    fates: bool = False
    places: bool = False
    keep_s: float = 0.0
    move: int = 0


class Fate(Message, tag=103, frozen=True):
    """What became of a page at this node. Times in s, of this incarnation; None: never, or forgotten.

    `stored_ago_s`: for how long it has been in memory. `reason`, `removed_ago_s`: its last removal.
    """

    stored_ago_s: float | None = None
    reason: str = ""
    removed_ago_s: float | None = None


class Present(Message, tag=13, frozen=True):
    """Answer to Exists and Wait. `mask`: one byte per key, 1 where committed. `fates`, `places`: where asked
    for. A place is a byte per key: NOWHERE, IN_MEMORY, or 2 and more, in a tier of kind `tiers[place - 2]`.
    """

    id: Id
    mask: bytes
    fates: list[Fate] = []
    places: bytes = b""
    tiers: list[str] = []


class Reserve(Message, tag=14, frozen=True):
    """Ask for a slot per key. A page has `sum(segment_bytes)` bytes. Over UCX each segment is one message,
    over TCP a page."""

    id: Id
    namespace: int
    keys: Keys
    segment_bytes: Segments
    replica: bool = False  # a copy of a page that another node owns
    written: bool = False  # a client of the node that asks has written it, and waits


class Grant(Message, tag=93, frozen=True):
    """One key's answer. With status GRANTED: the slot, its byte offset in the arena, the sequence that names
    this filling of the slot, and the UCX tag of its first segment (segment i has tag + i).
    """

    status: int
    slot: Natural = 0
    offset: Natural = 0
    sequence: Natural = 0
    tag: Tag = 0


class Reserved(Message, tag=15, frozen=True):
    id: Id
    grants: list[Grant]


class Commit(Message, tag=16, frozen=True):
    """The slots are filled. `checksums`: XXH3-64 of each page's bytes in order, or 0 where the writer
    computed none. `ages_s`: for how long the pages have been in the pool, where a node moves them.
    """

    id: Id
    slots: Slots
    sequences: list[int]
    checksums: list[int]
    ages_s: list[float] = []


class Committed(Message, tag=17, frozen=True):
    """`mask`: one byte per slot, 1 where the page is now readable (by this commit)."""

    id: Id
    mask: bytes


class Abort(Message, tag=18, frozen=True):
    """Give reservations back unfilled. No reply."""

    slots: Slots
    sequences: list[int]


class Get(Message, tag=19, frozen=True):
    """Pin the pages for reading. `segment_bytes` as in Reserve, for this reader's buffers; a page of another
    length is a miss. Over UCX and TCP the node starts sending at once.

    `hold`: until Release, or the lease ends. Without it what is sent is pinned until then, and what the
    reader copies itself is not: it finds in the slot table whether the page was there to the end.
    """

    id: Id
    namespace: int
    keys: Keys
    segment_bytes: Segments
    hold: bool = True


class Pin(Message, tag=94, frozen=True):
    """One key's answer. With status HIT: slot and byte offset in the arena, checksum (0: none), and the UCX
    tag of the first segment. Release names the `sequence`, and a mapped reader compares it with the slot
    table after copying.
    """

    status: int
    slot: Natural = 0
    offset: Natural = 0
    checksum: int = 0
    sequence: Natural = 0
    tag: Tag = 0


class Got(Message, tag=20, frozen=True):
    """`ages_s`: for how long each page has been in the pool, in s; for other nodes, where pages expire.
    `below`: the places in `pins` of pages that this Get loaded from a tier (SSD, directory). `held`: the
    pages are pinned until Release, whether or not that was asked for.
    """

    id: Id
    pins: list[Pin]
    ages_s: list[float] = []
    below: list[int] = []
    held: bool = True


class Release(Message, tag=21, frozen=True):
    """Unpin. No reply."""

    slots: Slots
    sequences: list[int]


class Wait(Message, tag=22, frozen=True):
    """Answered with Present once all keys are committed, or after `timeout_s` with those that are."""

    id: Id
    namespace: int
    keys: Keys
    timeout_s: float


class Discard(Message, tag=23, frozen=True):
    """Drop these pages: a reader found them corrupt. Only a page with its sequence given here is dropped.
    Without sequences: the pages are no longer wanted, whichever filling they are. Answered with Done.
    """

    id: Id
    namespace: int
    keys: Keys
    sequences: list[int]


class DropNamespace(Message, tag=24, frozen=True):
    id: Id
    name: Name


class Clear(Message, tag=25, frozen=True):
    """Drop every page of the namespace, keep the namespace. Answered with Done."""

    id: Id
    namespace: int


class Erase(Message, tag=43, frozen=True):
    """Drop these pages, those that are being written too, and overwrite their bytes in memory and tiers.
    Answered with Done when nothing of them is left on this node, or with a Fault `not_erased`. `away`: the
    nodes that cannot be told now, as the client's node says to itself.
    """

    id: Id
    namespace: int
    keys: Keys
    away: list[str] | None = None


class Ping(Message, tag=26, frozen=True):
    id: Id


class Status(Message, tag=27, frozen=True):
    id: Id


class NamespaceStatus(Message, tag=95, frozen=True):
    name: str
    pages: int
    page_bytes: int
    geometry: dict[str, str]
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    slot_bytes: int = 0  # of all its slots, reservations included; limited by its quota
    replicas: int = 0
    tier_pages: int = 0
    tier_bytes: int = 0
    settings: NamespaceSettings = NamespaceSettings()
    counters: dict[str, int] = {}
    generation: int = 0


class StatusReport(Message, tag=28, frozen=True):
    """`slots_*` conserve: free + used + reserved + quarantined = total, in bytes of slots."""

    id: Id
    node: str
    incarnation: int
    uptime_s: float
    capacity_bytes: int
    free_bytes: int
    used_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    pages: int
    pins: int
    waiters: int
    connections: int
    namespaces: list[NamespaceStatus]
    counters: dict[str, int] = {}
    epoch: int = 0
    members: list[Member] = []
    tiers: list[TierStatus] = []


Request: TypeAlias = (
    Hello
    | Proof
    | OpenNamespace
    | Exists
    | Reserve
    | Commit
    | Abort
    | Get
    | Release
    | Wait
    | Discard
    | DropNamespace
    | Clear
    | Erase
    | Ping
    | Status
    | ClusterRequest
)
Reply: TypeAlias = (
    Welcome
    | Challenge
    | Fault
    | Done
    | Opened
    | Present
    | Reserved
    | Committed
    | Got
    | StatusReport
    | ClusterReply
)
