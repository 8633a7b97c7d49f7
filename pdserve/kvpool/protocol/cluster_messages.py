"""The messages between nodes, and between an administrator and a node. Pure: records only.

Nodes tell each other about members and namespaces. These messages use the same connections, frames and rules
as those of messages.py; pages go from node to node by a client's messages.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.kvpool.protocol.base import MAX_KEYS, Id, Message, Name, NodeAddress
from pdserve.sizes import Size

Media: TypeAlias = Literal["dram", "ssd", "dram+ssd"]
# Status of a Member
ACTIVE: Final = 0  # owns its part of the ring
LEAVING: Final = 1  # owns nothing any more; pushes its pages to the others
LEFT: Final = 2
DEAD: Final = 3  # no other node could reach it
MAX_MEMBERS: Final = 1024  # of a pool; at 100 bytes each they fit a frame many times


class NamespaceSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a namespace may do on each node, in messages, in the nodes' lists and in their configuration
    (node/config.py); namespaces/registry.py says what is possible. Tokens are SHA-256 hex
    digests of the tokens that clients send. Encoded by names, without what is as its default.
    """

    media: Media = "dram+ssd"
    """Media of its pages; `dram+ssd`: memory, and the tiers below it for cold pages."""
    policy: str = "lru"
    """Order of eviction: lru, lfu, fifo, arc or ttl; keep: nothing is evicted, and writes beyond the memory
    are refused.
    """
    ttl_s: float = 0.0
    """Lifetime of a page after its write; such pages are not written to tiers. 0: unlimited."""
    quota_bytes: Size = 0
    """Most memory on each node, including pages that are being written, like `4GiB`; 0: no limit."""
    tier_quota_bytes: Size = 0
    """Most bytes in the tiers on each node, like `4GiB`; 0: no limit."""
    tenant_quota_bytes: Size = 0
    """As quota_bytes, for each tenant of the namespace that has no quota of its own (`pdserve pool ns set
    NAMESPACE#TENANT quota_bytes=4GiB`).
    """
    tenant_tier_quota_bytes: Size = 0
    """As tier_quota_bytes, for each tenant that has none of its own."""
    operations_s: float = 0.0
    """Keys requested per second on each node; further requests wait. 0: no limit."""
    bytes_s: Size = 0
    """Bytes read and written per second on each node, like `2GB`; 0: no limit."""
    weight: float = 1.0
    """Share of a busy node, relative to the weights of other namespaces."""
    copies: int = 1
    """Nodes that hold each page. With 2 or more the namespace survives the loss of a node's memory, and takes
    so much more.
    """
    read_token: str = ""
    write_token: str = ""
    admin_token: str = ""


class NamespaceRecord(Message, tag=97, frozen=True):
    """A namespace as all nodes know it. namespaces/registry.py says which of two records of one name is
    newer.

    `generation` grows when the namespace is dropped: pages of an older generation are void. `geometry` is
    empty until the first worker opens the namespace. `replaced_by` names the revision that took its place;
    opening the old one is refused. `voided`: when, in the clock's milliseconds, single pages were erased that
    these nodes may have: what they had before is void. `registry.EVERYBODY` are all that did not run then.
    """

    name: str
    version: int
    generation: int
    geometry: dict[str, str]
    settings: NamespaceSettings = NamespaceSettings()
    dropped: bool = False
    replaced_by: str = ""
    voided: dict[str, int] = {}


class Member(Message, tag=98, frozen=True):
    """A node as other nodes know it. Of two records the one with the larger `version` is newer, whatever the
    incarnations (cluster/state.py says more).

    `settled` is the epoch for which nothing is left here that another node owns. `renewed` is when the node
    last renewed its record, on the scale of versions; 0 if not since its version.
    """

    node: str
    address: str
    weight: int
    incarnation: int
    version: int
    status: int = ACTIVE
    settled: int = 0
    renewed: int = 0


class ClusterState(Message, tag=99, frozen=True):
    """All that a node knows of the pool. `stable` is the last ring for which every node had settled. Members
    older than `horizon` are forgotten; their versions are in `folded`.
    """

    cluster: str
    members: list[Member]
    namespaces: list[NamespaceRecord]
    stable_epoch: int = 0
    stable: list[NodeAddress] = []
    horizon: int = 0
    folded: int = 0


class TierStatus(Message, tag=100, frozen=True):
    """One storage tier of a node."""

    name: str
    kind: str
    capacity_bytes: int
    used_bytes: int
    pages: int
    writable: bool = True
    counters: dict[str, int] = {}


# --- views


class View(Message, tag=29, frozen=True):
    """The ring: the answer to GetView.

    `previous` is the ring before, while pages are still moving: a page that its new owner lacks may be there.
    """

    id: Id
    epoch: int
    nodes: list[NodeAddress]
    previous: list[NodeAddress] = []


class GetView(Message, tag=30, frozen=True):
    id: Id


# --- namespaces


class PutNamespace(Message, tag=31, frozen=True):
    """Create the namespace, or change its settings, on all nodes. Answered with Done."""

    id: Id
    name: Name
    settings: NamespaceSettings


class ReplaceNamespace(Message, tag=32, frozen=True):
    """`new` takes over the settings of `old`, unless it has its own, and `old` is dropped for good."""

    id: Id
    old: Name
    new: Name


class ListNamespaces(Message, tag=33, frozen=True):
    id: Id


class NamespaceList(Message, tag=34, frozen=True):
    id: Id
    namespaces: list[NamespaceRecord]


class ListPages(Message, tag=35, frozen=True):
    """Pages of a namespace on this node: at most `limit`, from `cursor` on (0 is the start)."""

    id: Id
    name: Name
    cursor: int
    limit: Annotated[int, Meta(ge=1, le=MAX_KEYS)]


class PageEntry(Message, tag=101, frozen=True):
    """One page. `place`: "dram", or the name of a tier."""

    key: bytes
    length_bytes: int
    place: str
    pins: int = 0
    replica: bool = False


class PageList(Message, tag=36, frozen=True):
    """`cursor` is for the next request; 0 at the end."""

    id: Id
    pages: list[PageEntry]
    cursor: int


# --- the node


class Drain(Message, tag=37, frozen=True):
    """Leave the ring: the node pushes its pages to the others. Answered with Done at once; views show the
    progress.
    """

    id: Id


class Upgrade(Message, tag=38, frozen=True):
    """Replace this process by a new one on the same memory. Answered with Done before."""

    id: Id


# --- between nodes


class Gossip(Message, tag=40, frozen=True):
    """The sender's state, or a part of it; answered with the receiver's. Also a sign of life.

    `digest` is of the sender's whole state. Where both have the same digest, the answer carries no state.
    """

    id: Id
    node: Name
    state: ClusterState
    digest: bytes = b""


class Gossiped(Message, tag=41, frozen=True):
    """`state` is empty when the digests were equal."""

    id: Id
    state: ClusterState
    digest: bytes = b""


class ProbePeer(Message, tag=42, frozen=True):
    """Try to reach this node. Answered with Done: count 1 if it could be reached."""

    id: Id
    node: Name


ClusterRequest: TypeAlias = (
    GetView
    | PutNamespace
    | ReplaceNamespace
    | ListNamespaces
    | ListPages
    | Drain
    | Upgrade
    | Gossip
    | ProbePeer
)
ClusterReply: TypeAlias = View | NamespaceList | PageList | Gossiped
