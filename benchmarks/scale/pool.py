"""Of the pool: gossip, views and rings of growing numbers of nodes.

Messages are those of the protocol, encoded. Times are processor times of the code that nodes and clients run.
Rates follow from the intervals of `failure_detector.Timing`. The nodes exist as records alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from benchmarks.scale.figure import Figure
from pdserve.kvpool.cluster.failure_detector import Timing
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.cluster.state import epoch_of, owners_of
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import ClusterState, Gossip, Gossiped, Member
from pdserve.kvpool.protocol.frames import HEADER_BYTES, decode_request, encode_frame

NODE_GIB: Final = 512
"""Memory of a node, which is its weight on the ring."""
WORKERS_PER_NODE: Final = 10
STARTED_MS: Final = 1_790_000_000_000
INCARNATION: Final = 1 << 62
RECEIVED: Final = 15
BUILT: Final = 3


def node(number: int) -> NodeAddress:
    """As a pod of a StatefulSet is called."""
    name = f"pool-{number}"
    return NodeAddress(name, f"tcp:{name}.pool.serving.svc.cluster.local:7700", NODE_GIB)


def calm_state(nodes: int) -> ClusterState:
    """All nodes are up and have settled."""
    members = [
        Member(one.node, one.address, one.weight, INCARNATION + i, STARTED_MS + i)
        for i, one in enumerate(map(node, range(nodes)))
    ]
    members.sort(key=lambda member: member.node)
    epoch = epoch_of(ClusterState("pool", members, []))
    settled = [replace(member, settled=epoch) for member in members]
    return ClusterState("pool", settled, [], epoch, owners_of(settled))


def pool_figures(nodes: int) -> Iterator[Figure]:
    """All figures of so many nodes."""
    state, timing = calm_state(nodes), Timing()
    cluster = Cluster("pool", node(0), INCARNATION, STARTED_MS)
    cluster.receive(state)
    nothing, digest = ClusterState("pool", [], []), cluster.digest
    answer = len(encode_frame(Gossiped(1, nothing, digest)))
    ping = len(encode_frame(Gossip(1, cluster.name, nothing, digest))) + answer
    push = len(encode_frame(Gossip(1, cluster.name, cluster.state, digest))) + answer
    sent_s = timing.watched / timing.ping_interval_s * ping + push / timing.sync_interval_s
    yield Figure("gossip_calm", nodes, 2 * sent_s / 1e3)  # each node is also told by others, as often
    yield Figure("gossip_change_mb", nodes, 2 * (nodes - 1) * push / 1e6)
    yield Figure("gossip_change_s", nodes, (nodes - 1) * _received_s(cluster))
    view = len(encode_frame(cluster.view))
    yield Figure("view_kb", nodes, view / 1e3)
    yield Figure("view_push_mb", nodes, WORKERS_PER_NODE * nodes * view / 1e6)
    owners = owners_of(state.members)
    ring = Ring(owners)
    yield Figure("ring_s", nodes, _median_s(BUILT, lambda: Ring(owners)))
    yield Figure("ring_mb", nodes, ring.nbytes / 1e6)


def _received_s(cluster: Cluster) -> float:
    """To take in what one node says of itself: the frame of its whole state, with one news in it."""
    times = []
    for number in range(min(RECEIVED, len(cluster.state.members) - 1)):
        members = list(cluster.state.members)
        at = next(i for i, member in enumerate(members) if member.node == f"pool-{number + 1}")
        members[at] = replace(members[at], version=members[at].version + 1)
        told = replace(cluster.state, members=members)
        frame = encode_frame(Gossip(1, members[at].node, told, b""))
        began_s = time.thread_time()
        request = decode_request(memoryview(frame)[HEADER_BYTES:])
        assert isinstance(request, Gossip)
        cluster.receive(request.state)
        times.append(time.thread_time() - began_s)
    return statistics.median(times)


def _median_s(times: int, work: Callable[[], object]) -> float:
    taken = []
    for _ in range(times):
        began_s = time.thread_time()
        work()
        taken.append(time.thread_time() - began_s)
    return statistics.median(taken)
