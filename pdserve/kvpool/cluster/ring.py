"""Which node owns a page: a consistent-hash ring with virtual nodes weighted by capacity. Pure.

Each node puts `POINTS_PER_WEIGHT * weight` points on a circle of 2^64 positions. A key's position is its
first 8 bytes (keys are SHA-256 digests, so they are uniform). Its owner is the node of the first point at or
after that position. A node's points depend on its own name and weight alone. So when a node joins, only keys
that it now owns move; when it leaves, only keys that it owned. With 1,024 points a node's share has a
standard deviation of about 3 % of its weight.

Every process that builds a ring from the same nodes gets the same ring. Where points of two nodes collide,
their names decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.base import KEY_BYTES, NodeAddress

POINTS_PER_WEIGHT = 1024
MAX_WEIGHT_SUM = 16384  # 16 million points: 200 MB and a second to build
Positions: TypeAlias = npt.NDArray[np.uint64]


class Ring:
    """An immutable ring. `epoch` says which of two rings is newer."""

    def __init__(self, nodes: Iterable[NodeAddress], epoch: int = 0) -> None:
        """Raises ConfigError: two nodes of one name, or weights out of bounds."""
        self.nodes = tuple(sorted(nodes, key=lambda node: node.node))
        self.epoch = epoch
        names = [node.node for node in self.nodes]
        if len(set(names)) != len(names):
            raise ConfigError(f"pool ring: two nodes have one name among {', '.join(names)}")
        weights = [node.weight for node in self.nodes]
        if any(weight < 1 for weight in weights) or sum(weights) > MAX_WEIGHT_SUM:
            raise ConfigError(
                f"pool ring: weights {weights} must be at least 1 and add up to at most {MAX_WEIGHT_SUM}"
            )
        self._positions, self._owners = in_order([_points(node) for node in self.nodes])

    @property
    def nbytes(self) -> int:
        """Memory of its points."""
        return self._positions.nbytes + self._owners.nbytes

    def owner(self, key: bytes) -> NodeAddress:
        """The node that owns a key of 32 bytes. Raises LookupError when the ring is empty."""
        return self.nodes[int(self.owners([key])[0])]

    def owners(self, keys: Sequence[bytes]) -> npt.NDArray[np.int32]:
        """Index into `nodes` of each key's owner, shape [len(keys)]. Raises LookupError when empty."""
        if len(self.nodes) == 1:
            return np.zeros(len(keys), np.int32)
        return self.owners_at(positions_of(keys))

    def owners_at(self, positions: Positions) -> npt.NDArray[np.int32]:
        """Index into `nodes` of the owner of each position, shape [n]. Raises LookupError when empty."""
        if not self.nodes:
            raise LookupError("the pool ring has no nodes")
        return self._owners[self._places(positions)]

    def number(self, name: str) -> int:
        """The node's index into `nodes`; -1 when it owns nothing here."""
        return next((i for i, node in enumerate(self.nodes) if node.node == name), -1)

    def sources(self, before: Ring, name: str) -> list[str]:
        """The nodes that owned in `before` what the node owns here, judged by points; the largest loser
        first.
        """
        me = self.number(name)
        if me < 0 or not before.nodes:
            return []
        # its own points took keys from others' ranges; it inherited ranges of points that are gone
        entered = before.owners_at(self._positions[self._owners == me])
        inherited = before._owners[self.owners_at(before._positions) == me]
        points = np.bincount(np.concatenate([entered, inherited]), minlength=len(before.nodes))
        ordered = np.argsort(-points, kind="stable").tolist()
        return [before.nodes[i].node for i in ordered if points[i] and before.nodes[i].node != name]

    def split(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The places of `keys` by owner's name, each list ascending; owners of nothing are left out."""
        if len(self.nodes) == 1:
            return {self.nodes[0].node: list(range(len(keys)))} if keys else {}
        owners = self.owners(keys)
        return {self.nodes[i].node: np.flatnonzero(owners == i).tolist() for i in np.unique(owners)}

    def successors(self, key: bytes, count: int) -> list[NodeAddress]:
        """The first `count` different nodes from the key's position on, its owner first; fewer on a small
        ring.
        """
        found: list[int] = []
        if self.nodes:
            start = int(self._places(positions_of([key]))[0])
            wanted = min(count, len(self.nodes))
            total = len(self._owners)
            for step in range(total):
                if len(found) >= wanted:
                    break
                node = int(self._owners[(start + step) % total])
                if node not in found:
                    found.append(node)
        return [self.nodes[i] for i in found]

    def _places(self, positions: Positions) -> npt.NDArray[np.intp]:
        places = np.searchsorted(self._positions, positions)
        places[places == len(self._positions)] = 0
        return places


def positions_of(keys: Sequence[bytes]) -> Positions:
    """Where keys of 32 bytes lie on the ring, shape [len(keys)]."""
    return np.frombuffer(b"".join(keys), dtype="<u8")[:: KEY_BYTES // 8]


def in_order(points: Sequence[Positions]) -> tuple[Positions, npt.NDArray[np.int32]]:
    """The points of all nodes, sorted, and the number of each one's node. Where two are equal, the first node
    comes first. Both have the shape [all points].

    NumPy sorts numbers several times faster than it finds their order. So all points are sorted twice: as
    they are, and with their node's number in place of the lowest bits. Only of points that differ in these
    bits alone the two orders may differ. There are almost never such points.
    """
    if not points:
        return np.empty(0, np.uint64), np.empty(0, np.int32)
    bits = np.uint64(len(points).bit_length())
    lowest = np.uint64((1 << int(bits)) - 1)
    positions = np.concatenate(points)
    numbered = np.concatenate([each & ~lowest | np.uint64(number) for number, each in enumerate(points)])
    positions.sort()
    numbered.sort()
    owners = np.empty(len(numbered), np.int32)
    np.bitwise_and(numbered, lowest, out=owners, casting="unsafe")  # without a copy of all in between
    numbered >>= bits
    for high in np.unique(numbered[1:][numbered[1:] == numbered[:-1]]):
        begin, end = np.searchsorted(numbered, [high, high + np.uint64(1)])
        near = {int(i): points[i][points[i] >> bits == high] for i in owners[begin:end]}
        owners[begin:end] = [i for _, i in sorted((at, i) for i in near for at in near[i].tolist())]
    return positions, owners


def _points(node: NodeAddress) -> Positions:
    """Its positions: SplitMix64 seeded with a digest of its name, shape [weight * POINTS_PER_WEIGHT]."""
    seed = int.from_bytes(hashlib.blake2b(node.node.encode(), digest_size=8).digest(), "little")
    steps = np.arange(1, node.weight * POINTS_PER_WEIGHT + 1, dtype=np.uint64)
    state = np.uint64(seed) + steps * np.uint64(0x9E37_79B9_7F4A_7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return state ^ (state >> np.uint64(31))
