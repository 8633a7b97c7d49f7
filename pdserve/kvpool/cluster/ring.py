"""Which node owns a page: a hash ring of equal arcs, each given to a node by its capacity. Pure.

The ring has 2^64 positions in `ARCS` equal arcs. A key's position is its first 8 bytes (keys are SHA-256
digests, so they are uniform). Each arc belongs to one node by weighted rendezvous hashing (Thaler and
Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998): for every arc each node draws a number
from an exponential distribution, by hashing its name and the arc, and divides it by its weight; the smallest
wins. So a node's share is its weight's, with a standard deviation of sqrt(nodes / ARCS): 3 % for 32 nodes. A
node's draws depend on its own name alone. So when a node joins, only arcs that it now owns move; when it
leaves, only arcs that it owned, each to the node that drew next.

Against points of virtual nodes: the table has one size for a pool of any capacity, an owner is one look into
it in place of a search, and shares follow weights however small these are.

Every process that builds a ring from the same nodes gets the same ring: only operations that IEEE 754 rounds
in one way are used, so no processor's own logarithm. Where draws are equal, names decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.base import KEY_BYTES, NodeAddress

ARC_BITS: Final = 15
ARCS: Final = 1 << ARC_BITS
MAX_WEIGHT: Final = 1 << 20  # GiB
KEPT_DRAWS: Final = 128  # nodes whose draws a process keeps, 256 KiB each
_LN_2: Final = 0.6931471805599453
_STEP: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
Positions: TypeAlias = npt.NDArray[np.uint64]


class Ring:
    """An immutable ring. `epoch` says which of two rings is newer."""

    def __init__(self, nodes: Iterable[NodeAddress], epoch: int = 0) -> None:
        """Takes half a millisecond for each node that was in no ring of this process before, else a tenth.
        Raises ConfigError: two nodes of one name, or weights out of bounds.
        """
        self.nodes = tuple(sorted(nodes, key=lambda node: node.node))
        self.epoch = epoch
        names = [node.node for node in self.nodes]
        if len(set(names)) != len(names):
            raise ConfigError(f"pool ring: two nodes have one name among {', '.join(names)}")
        weights = [node.weight for node in self.nodes]
        if not all(1 <= weight <= MAX_WEIGHT for weight in weights):
            raise ConfigError(f"pool ring: weights {weights} must be between 1 and {MAX_WEIGHT}")
        self._owners = np.zeros(ARCS, np.int32)
        if len(self.nodes) > 1:
            least = np.full(ARCS, np.inf)
            for number, node in enumerate(self.nodes):
                draws = _all_draws(node.node) / node.weight
                np.putmask(self._owners, draws < least, number)
                np.minimum(least, draws, out=least)

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
        return self._owners[_arcs_of(positions)]

    def number(self, name: str) -> int:
        """The node's index into `nodes`; -1 when it owns nothing here."""
        return next((i for i, node in enumerate(self.nodes) if node.node == name), -1)

    def split(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The indices of `keys` by owner's name, each list ascending; owners of nothing are left out."""
        if len(self.nodes) == 1:
            return {self.nodes[0].node: list(range(len(keys)))} if keys else {}
        owners = self.owners(keys)
        return {self.nodes[i].node: np.flatnonzero(owners == i).tolist() for i in np.unique(owners)}

    def successors(self, keys: Sequence[bytes], count: int) -> list[list[NodeAddress]]:
        """For each key the first `count` different nodes, its owner first; fewer on a small ring. Each is
        the next owner when those before it leave.
        """
        arcs, place = np.unique(_arcs_of(positions_of(keys)), return_inverse=True)
        draws = np.array([_draws(node.node, arcs.astype(np.uint64)) / node.weight for node in self.nodes])
        order = np.argsort(draws, axis=0, kind="stable")[:count].T[place]
        return [[self.nodes[i] for i in chain] for chain in order.tolist()]


def positions_of(keys: Sequence[bytes]) -> Positions:
    """Where keys of 32 bytes lie on the ring, shape [len(keys)]."""
    return np.frombuffer(b"".join(keys), dtype="<u8")[:: KEY_BYTES // 8]


def _arcs_of(positions: Positions) -> npt.NDArray[np.intp]:
    return (positions >> np.uint64(64 - ARC_BITS)).astype(np.intp)


@lru_cache(maxsize=KEPT_DRAWS)
def _all_draws(name: str) -> npt.NDArray[np.float64]:
    """For all arcs. A ring that has one node more than the one before costs the draws of that node."""
    return _draws(name, np.arange(ARCS, dtype=np.uint64))


def _draws(name: str, arcs: Positions) -> npt.NDArray[np.float64]:
    """The node's draw for each arc, shape [len(arcs)]: -ln of a uniform number that is SplitMix64, seeded
    with a digest of the name.
    """
    seed = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    state = (arcs + np.uint64(1)) * _STEP
    state += seed
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    state ^= state >> np.uint64(31)
    state >>= np.uint64(12)  # 52 bits: with a half more, every sum is exact
    mantissa, exponent = np.frexp(state.astype(np.float64) + 0.5)
    # ln m = 2 atanh z for z = (m - 1) / (m + 1), within 1e-5
    z = (mantissa - 1) / (mantissa + 1)
    squared = z * z
    logarithm = squared * (2 / 7)
    for factor in (2 / 5, 2 / 3, 2.0):
        logarithm += factor
        logarithm *= squared if factor < 2 else z
    draws: npt.NDArray[np.float64] = (52 - exponent) * _LN_2 - logarithm
    return draws
