"""R8: what a `kill -9` costs a node full of pages.

A node is filled with small pages, each made of its own key; killed while a client is connected; and started
again on what it left in memory. The first hit is that of the same client, which is not told: it asks again
and again, as one under load does, and connects anew by itself. Then every key is looked for, and a sample
read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.base import KEY_BYTES

GOAL_S: Final = 1.0
GOAL_KEPT: Final = 0.999
PAGE_BYTES: Final = 4096  # the smallest slot
SLAB_BYTES: Final = 4 << 20
SPARE_SLABS: Final = 4
BATCH: Final = 256
ASK_BATCH: Final = 4096
SAMPLE: Final = 4096
FIRST_HIT_WITHIN_S: Final = 60.0
ASK_AGAIN_S: Final = 0.002

Keys = npt.NDArray[np.uint8]  # shape [pages, KEY_BYTES]


class Restart(msgspec.Struct, frozen=True):
    """One kill and restart. `first_hit_s`: from the start of the process. `kept`: the share of the pages that
    are there; `read`: of a sample, the share that could be read, `wrong` of them with other bytes.
    """

    first_hit_s: float
    kept: float
    read: float
    wrong: int
    log: str  # what the node says of it


class Restarts(msgspec.Struct, frozen=True):
    """Medians are of `restarts`."""

    pages: int
    first_hit_s: float
    kept: float  # the least
    read: float  # the least
    wrong: int
    restarts: list[Restart]

    @property
    def passed(self) -> bool:
        return self.first_hit_s <= GOAL_S and min(self.kept, self.read) >= GOAL_KEPT and not self.wrong


def restart(pages: int, rounds: int, seed: int, directory: Path, say: Callable[[str], None]) -> Restarts:
    """Run it in `directory`. Raises BenchError."""
    capacity = (-(-pages * PAGE_BYTES // SLAB_BYTES) + SPARE_SLABS) * SLAB_BYTES
    settings = {"capacity_bytes": capacity, "slab_bytes": SLAB_BYTES, "min_slot_bytes": PAGE_BYTES}
    keys = np.random.default_rng(seed).integers(0, 256, (pages, KEY_BYTES), np.uint8)
    with (
        pool_of(1, directory, {**settings, "keep": False}) as (node,),
        closing(PoolClient(client_of([node]), "restart", {"restart": "1"})) as client,
    ):
        _fill(client, keys, say)
        found = []
        for number in range(rounds):
            found.append(_restart(node, client, keys))
            say(f"restart {number + 1} of {rounds}: first hit after {found[-1].first_hit_s:.3f} s")
    return Restarts(
        pages=pages,
        first_hit_s=statistics.median(one.first_hit_s for one in found),
        kept=min(one.kept for one in found),
        read=min(one.read for one in found),
        wrong=sum(one.wrong for one in found),
        restarts=found,
    )


def _fill(client: PoolClient, keys: Keys, say: Callable[[str], None]) -> None:
    for first in range(0, len(keys), BATCH):
        some = keys[first : first + BATCH]
        if not all(client.put(_names(some), [(page,) for page in _contents(some)])):
            raise BenchError(f"the pool did not store all of pages {first} to {first + len(some)}")
        if first % (100_000 // BATCH * BATCH) == 0 and first:
            say(f"{first:,} of {len(keys):,} pages stored")


def _restart(node: NodeProcess, client: PoolClient, keys: Keys) -> Restart:
    told = len(node.log())
    node.kill()
    first_key = _names(keys[:1])
    page = np.empty(PAGE_BYTES, np.uint8)
    node.spawn()
    began_s = time.monotonic()
    while not client.get(first_key, [(page,)])[0]:
        if time.monotonic() > began_s + FIRST_HIT_WITHIN_S:
            raise BenchError(f"no hit within {FIRST_HIT_WITHIN_S:.0f} s of a restart: {node.log()[-200:]}")
        time.sleep(ASK_AGAIN_S)
    first_hit_s = time.monotonic() - began_s
    kept = sum(
        sum(client.exists(_names(keys[first : first + ASK_BATCH])))
        for first in range(0, len(keys), ASK_BATCH)
    )
    lines = [line for line in node.log()[told:].splitlines() if "took over" in line]
    return Restart(round(first_hit_s, 4), kept / len(keys), *read_sample(client, keys), " ".join(lines))


def read_sample(client: PoolClient, keys: Keys) -> tuple[float, int]:
    """Of a sample: (the share that could be read, how many of those are not made of their keys)."""
    sample = keys[:: max(1, len(keys) // SAMPLE)]
    read = wrong = 0
    for first in range(0, len(sample), BATCH):
        some = sample[first : first + BATCH]
        pages = np.zeros((len(some), PAGE_BYTES), np.uint8)
        got = client.get(_names(some), [(page,) for page in pages])
        same = (pages == _contents(some)).all(axis=1)
        read += sum(got)
        wrong += sum(ok and not right for ok, right in zip(got, same.tolist(), strict=True))
    return read / len(sample), wrong


def _names(keys: Keys) -> Sequence[bytes]:
    return [key.tobytes() for key in keys]


def _contents(keys: Keys) -> npt.NDArray[np.uint8]:
    """Shape [len(keys), PAGE_BYTES]: the key, over and over."""
    return np.tile(keys, (1, PAGE_BYTES // KEY_BYTES))
