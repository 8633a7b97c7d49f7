"""A node process with an SSD below its memory: what is there after a kill, and after a reboot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.node.config import TierConfig
from pdserve.kvpool.protocol.messages import StatusReport
from tests.support.kvpool.node_processes import client_of
from tests.support.kvpool.nodes import StartProcess, start_fails
from tests.support.kvpool.pools import arena_dir, remove_arena, remove_arena_dir
from tests.support.kvpool.tier_tools import KIB, contents, key
from tests.support.waiting import until

PAGE = 60 * KIB
MIB = KIB * KIB


class Rig:
    """A node of 4 MiB (64 pages) over two SSD tiers of 32 MiB each."""

    def __init__(self, start: StartProcess, directory: Path) -> None:
        options = {"segment_bytes": "2MiB"}
        self.tiers = [
            TierConfig(kind="ssd", path=directory / name, capacity_bytes=32 * MIB, options=options)
            for name in ("ssd", "far")
        ]
        self.filled = 0
        self.pool = start(capacity_bytes=4 * MIB, promotion_timeout_s=5.0, tiers=self.tiers)

    def reboot(self) -> None:
        """Everything in memory is gone."""
        self.pool.kill()
        remove_arena(self.pool.config)
        self.pool.restart()

    def until(self, condition: Callable[[StatusReport], bool]) -> StatusReport:
        until(lambda: condition(self.pool.status()))
        return self.pool.status()

    def until_stored(self, pages: int) -> None:
        self.until(lambda report: report.tiers[0].counters["stored"] >= pages)

    def client(self) -> PoolClient:
        config = client_of([self.pool], get_timeout_s=20.0, put_timeout_s=20.0)
        return PoolClient(config, "ns", {"g": "1"}, name="test")


@pytest.fixture
def rig(start_process: StartProcess, tmp_path: Path) -> Rig:
    return Rig(start_process, tmp_path)


def put(client: PoolClient, numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, 8):
        some = range(first, min(first + 8, numbers.stop))
        assert all(client.put([key(n) for n in some], [(contents(n, PAGE),) for n in some]))


def get(client: PoolClient, numbers: range) -> int:
    """How many were there, each byte for byte."""
    hits = 0
    for first in range(numbers.start, numbers.stop, 8):
        some = range(first, min(first + 8, numbers.stop))
        into = [np.zeros(PAGE, np.uint8) for _ in some]
        for n, data, ok in zip(
            some, into, client.get([key(n) for n in some], [(d,) for d in into]), strict=True
        ):
            hits += ok
            assert not ok or np.array_equal(data, contents(n, PAGE))
    return hits


def fill(rig: Rig, client: PoolClient, pages: int) -> None:
    """Put pages no faster than the tier writes them. It writes above four fifths of the 64 pages of memory:
    at most 51 pages stay unwritten, and 8 more find room.
    """
    for first in range(0, pages, 8):
        put(client, range(first, first + 8))
        rig.filled += 8
        rig.until_stored(rig.filled - 52)


def flip_bits(directory: Path, numbers: range) -> int:
    """Flip a bit of each copy of these pages on the SSD; how many."""
    flipped = 0
    for path in sorted((directory / "ssd").glob("*.seg")):
        data = bytearray(path.read_bytes())
        for n in numbers:
            at = data.find(contents(n, PAGE)[1000:1064].tobytes())
            if at >= 0:
                data[at] ^= 0x20
                flipped += 1
        path.write_bytes(bytes(data))
    return flipped


def test_pages_beyond_memory_are_served_from_ssd_also_after_a_stop_and_a_damaged_one_is_a_miss(
    rig: Rig, tmp_path: Path
) -> None:
    client = rig.client()
    fill(rig, client, 256)
    assert get(client, range(200)) == 200
    stored = rig.until(lambda report: report.tiers[0].pages >= 190)
    assert stored.counters["promoted"] > 100
    client.close()
    rig.pool.close()  # keep = false: the arena goes
    flipped = flip_bits(tmp_path, range(0, 150, 10))
    assert flipped >= 10
    rig.pool.restart()
    client = rig.client()
    found = rig.until(lambda report: report.tiers[0].pages >= stored.tiers[0].pages)
    assert found.pages == 0
    assert "not sealed" not in rig.pool.log()
    assert sum(client.exists([key(n) for n in range(200)])) >= 190
    assert 190 - flipped <= get(client, range(200)) <= 200 - flipped
    assert rig.pool.status().counters["promotions_failed"] == flipped
    client.close()


def test_what_a_killed_node_had_not_stored_yet_is_stored_after_its_restart_and_outlives_a_reboot(
    rig: Rig,
) -> None:
    def check(hits: int, from_tier: int) -> None:
        assert get(client, range(24)) == 24
        [space] = rig.pool.status().namespaces
        counted = (space.hits, space.counters["hits_below"], client.counters.pages_ssd)
        assert counted == (hits, from_tier, from_tier)

    client = rig.client()
    put(client, range(24))
    client.close()
    assert rig.pool.status().tiers[0].counters["stored"] == 0  # below the watermark
    rig.pool.kill()
    first, second = rig.tiers
    rig.pool.restart(tiers=[replace(first, write="all"), second])
    rig.until_stored(24)
    rig.reboot()
    rig.until(lambda report: report.tiers[0].pages == 24)
    client = rig.client()
    check(24, 24)
    check(48, 24)  # from memory now
    client.close()
    rig.pool.kill()
    rig.pool.restart()
    client = rig.client()
    check(24, 0)
    client.close()


def test_what_leaves_the_first_tier_goes_to_the_second(rig: Rig) -> None:
    client = rig.client()
    fill(rig, client, 800)  # of 48 MiB; the SSD has room for 32
    report = rig.until(lambda report: report.tiers[1].pages > 20)
    assert report.tiers[0].used_bytes <= 32 * MIB
    assert get(client, range(800)) >= 700
    client.close()


def test_a_tier_that_cannot_be_used_is_an_error_in_one_line(tmp_path: Path) -> None:
    tier = TierConfig(kind="ssd", path=tmp_path / "t", capacity_bytes=1 << 30, options={"direkt": True})
    assert "direkt" in start_fails(tiers=[tier])
    assert not (arena_dir() / "second").exists()
    remove_arena_dir()
