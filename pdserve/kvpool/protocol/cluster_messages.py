"""The part of the control protocol that concerns many nodes and their namespaces. Pure: records only.

Nodes speak it among themselves (membership, moving pages, replicas) and administrators to a node. It travels
on the same connections, in the same frames and under the same rules as messages.py.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pdserve.kvpool.protocol.base import Message, NodeAddress

Media: TypeAlias = Literal["dram", "ssd", "dram+ssd"]

# Status of a Member
ACTIVE: Final = 0  # owns its part of the ring
LEAVING: Final = 1  # owns nothing any more, others pull what it has
LEFT: Final = 2
DEAD: Final = 3  # the others could not reach it


class NamespaceSettings(Message, tag=96, frozen=True):
    """What a namespace may do on each node. 0 stands for no limit, an empty token for none needed.

    `quota_bytes` bounds the slots in memory, reservations included; `tier_quota_bytes` the tiers below.
    Tokens are SHA-256 hex digests of what clients present.
    """

    media: Media = "dram+ssd"
    policy: str = "lru"
    ttl_s: float = 0.0
    quota_bytes: int = 0
    tier_quota_bytes: int = 0
    operations_s: float = 0.0
    bytes_s: float = 0.0
    weight: float = 1.0
    read_token: str = ""
    write_token: str = ""
    admin_token: str = ""


class NamespaceRecord(Message, tag=97, frozen=True):
    """A namespace as all nodes know it. Of two records of one name the larger `version` is newer; equal
    versions of other content are ordered by their encoding, so that all nodes choose the same.

    `generation` grows when the namespace is dropped: pages of an older generation are nobody's any more.
    `geometry` is empty until the first worker opens the namespace. `replaced_by`: the revision that took its
    place; opening the old one is refused.
    """

    name: str
    version: int
    generation: int
    geometry: dict[str, str]
    settings: NamespaceSettings = NamespaceSettings()
    dropped: bool = False
    replaced_by: str = ""


class Member(Message, tag=98, frozen=True):
    """A node as the others know it. Of two records the one with the larger `version` is newer, whatever the
    incarnations (cluster_state.py says more).

    `settled`: the epoch for which this node has pulled everything that it owns. `renewed`: when it last said
    that it is still there, on the scale of versions; 0: not since its version.
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
    """All that nodes tell each other. `stable` is the last ring for which every owner had settled. Members
    older than `horizon` are forgotten; their versions are in `folded`. `floors`: of forgotten namespaces
    (registry.py).
    """

    cluster: str
    members: list[Member]
    namespaces: list[NamespaceRecord]
    stable_epoch: int = 0
    stable: list[NodeAddress] = []
    horizon: int = 0
    folded: int = 0
    floors: list[tuple[int, int]] = []


class TierStatus(Message, tag=100, frozen=True):
    """A storage tier below memory."""

    name: str
    kind: str
    capacity_bytes: int
    used_bytes: int
    pages: int
    writable: bool = True
    counters: dict[str, int] = {}


# --- views


class View(Message, tag=29, frozen=True):
    """The ring. Pushed with id 0 to whoever asked for it in Hello, and the answer to GetView.

    `previous`: the ring before, while pages are still moving: what a new owner lacks may still be there.
    """

    id: int
    epoch: int
    nodes: list[NodeAddress]
    previous: list[NodeAddress] = []


class GetView(Message, tag=30, frozen=True):
    id: int


# --- namespaces


class PutNamespace(Message, tag=31, frozen=True):
    """Create the namespace, or change its settings, on all nodes. Answered with Done."""

    id: int
    name: str
    settings: NamespaceSettings


class ReplaceNamespace(Message, tag=32, frozen=True):
    """`new` takes over the settings of `old`, unless it has its own, and `old` is dropped for good."""

    id: int
    old: str
    new: str


class ListNamespaces(Message, tag=33, frozen=True):
    id: int


class NamespaceList(Message, tag=34, frozen=True):
    id: int
    namespaces: list[NamespaceRecord]


class ListPages(Message, tag=35, frozen=True):
    """Pages of a namespace on this node, at most `limit` of them from `cursor` on (0: the start)."""

    id: int
    name: str
    cursor: int
    limit: int


class PageEntry(Message, tag=101, frozen=True):
    """One page. `place`: "dram", or the name of a tier."""

    key: bytes
    length_bytes: int
    place: str
    pins: int = 0
    replica: bool = False
    heat: float = 0.0


class PageList(Message, tag=36, frozen=True):
    """`cursor` to go on with; 0 when this was the end."""

    id: int
    pages: list[PageEntry]
    cursor: int


# --- the node


class Drain(Message, tag=37, frozen=True):
    """Leave the ring: own nothing, let the others pull. Answered with Done at once; the view tells when."""

    id: int


class Upgrade(Message, tag=38, frozen=True):
    """Replace this process by a new one on the same memory. Answered with Done before that."""

    id: int


# --- between nodes


class Gossip(Message, tag=40, frozen=True):
    """What I know, or a part of it; answered with what you know then. Also the sign of life.

    `digest` is of all that I know; if it is yours too, neither need say more.
    """

    id: int
    node: str
    state: ClusterState
    digest: bytes = b""


class Gossiped(Message, tag=41, frozen=True):
    """`state` is empty when the digests were equal."""

    id: int
    state: ClusterState
    digest: bytes = b""


class ProbePeer(Message, tag=42, frozen=True):
    """Can you reach this node? Answered with Done, count 1 if so."""

    id: int
    node: str


class ListOwned(Message, tag=43, frozen=True):
    """Which pages that you hold does `node` own under the ring of `epoch`?"""

    id: int
    namespace: int
    node: str
    epoch: int
    cursor: int
    limit: int


class Owned(Message, tag=44, frozen=True):
    """`cursor` to go on with, 0 at the end; `writing`: reservations of such pages that are still open, or 1:
    for another reason, too, all of it has to be asked for again.
    """

    id: int
    keys: list[bytes]
    lengths: list[int]
    cursor: int
    writing: int


class PullPages(Message, tag=45, frozen=True):
    """Make replicas of these pages of mine, or renew them. Answered with Done, count: how many there are
    now. `lengths`: of each page, in bytes.
    """

    id: int
    namespace: int
    keys: list[bytes]
    lengths: list[int] = []


class EndReplicas(Message, tag=46, frozen=True):
    """The heat is over: drop your replicas of these. Answered with Done."""

    id: int
    namespace: int
    keys: list[bytes]


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
    | ListOwned
    | PullPages
    | EndReplicas
)
ClusterReply: TypeAlias = View | NamespaceList | PageList | Gossiped | Owned
