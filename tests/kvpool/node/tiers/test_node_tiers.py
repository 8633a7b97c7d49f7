"""A node process with an SSD below its memory: what is there after a kill, and after a reboot."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from pdserve.kvpool.admin.node_client import fetch_status
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config.node import PoolNodeConfig, TierConfig
from pdserve.kvpool.protocol.messages import Done, DropNamespace, StatusReport
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from tests.support.kvpool.pools import ProcessPool, arena_dir, remove_arena
from tests.support.kvpool.tier_tools import KIB, contents, key

PAGE = 60 * KIB
MIB = KIB * KIB
HOUR_NS = 3600 * 10**9


class Rig:
    """A node of 4 MiB (64 pages) over an SSD tier of 32 MiB, and a directory of 32 MiB below."""

    def __init__(self, directory: Path, write: Literal["cold", "all"] = "cold") -> None:
        self.directory = directory
        self.config = PoolNodeConfig(
            name="tiers",
            arena_dir=arena_dir(),
            capacity_bytes=4 * MIB,
            slab_bytes=MIB,
            min_slot_bytes=64 * KIB,
            max_reserved_share=1.0,
            tier_watermark=0.5,
            promotion_timeout_s=5.0,
            tiers=[
                TierConfig(
                    kind="ssd",
                    path=directory / "ssd",
                    capacity_bytes=32 * MIB,
                    write=write,
                    options={"segment_bytes": "2MiB"},
                ),
                TierConfig(kind="directory", path=directory / "far", capacity_bytes=32 * MIB),
            ],
        )
        self.pool = self.start()

    def start(self) -> ProcessPool:
        return ProcessPool(self.config, self.directory, "shm")

    def reboot(self) -> None:
        """Everything in memory is gone."""
        self.pool.kill()
        remove_arena(self.config)
        self.pool.restart()

    def status(self) -> StatusReport:
        return fetch_status(self.pool.address, time.monotonic() + 5)

    def until(self, condition: Callable[[StatusReport], bool]) -> StatusReport:
        deadline = time.monotonic() + 20
        while not condition(report := self.status()):
            assert time.monotonic() < deadline, report
            time.sleep(0.02)
        return report

    def until_stored(self, pages: int) -> None:
        self.until(lambda report: report.tiers[0].counters["stored"] >= pages)

    def client(self, namespace: str = "ns") -> PoolClient:
        nodes = [PoolNodeRef(node="tiers", address=self.pool.address)]
        config = PoolClientConfig(nodes=nodes, data_path="shm", get_timeout_s=20.0, put_timeout_s=20.0)
        return PoolClient(config, namespace, {"g": "1"}, name="test")

    def close(self) -> None:
        if self.pool._process.poll() is None:
            self.pool.kill()
        remove_arena(self.config)
        if arena_dir().exists():
            arena_dir().rmdir()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


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


def drop_namespace(rig: Rig, name: str) -> None:
    deadline = time.monotonic() + 5
    channel = ControlChannel.connect(rig.pool.address, make_hello("test", "", "none"), deadline)
    assert isinstance(channel.call(DropNamespace(1, name), deadline), Done)
    channel.close()


def fill(rig: Rig, client: PoolClient, pages: int) -> None:
    """Put pages no faster than the tier writes them."""
    for first in range(0, pages, 16):
        put(client, range(first, first + 16))
        rig.until_stored(first + 16 - 40)


def test_pages_beyond_memory_are_served_from_ssd_also_after_a_reboot(rig: Rig) -> None:
    client = rig.client()
    fill(rig, client, 256)
    assert get(client, range(200)) == 200
    stored = rig.until(lambda report: report.tiers[0].pages >= 190)
    assert stored.counters["promoted"] > 100
    client.close()
    rig.reboot()
    client = rig.client()
    assert rig.until(lambda report: report.tiers[0].pages >= 190).pages == 0
    assert sum(client.exists([key(n) for n in range(200)])) >= 190
    assert get(client, range(200)) >= 190
    client.close()


def test_with_write_all_a_reboot_loses_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, write="all")
    try:
        client = rig.client()
        put(client, range(32))
        rig.until(lambda report: report.tiers[0].pages == 32)
        client.close()
        rig.reboot()
        client = rig.client()
        rig.until(lambda report: report.tiers[0].pages == 32)
        assert get(client, range(32)) == 32
        [space] = rig.until(lambda _: True).namespaces
        assert (space.hits, space.counters["hits_below"], client.counters.pages_ssd) == (32, 32, 32)
        assert get(client, range(32)) == 32  # from memory now
        [space] = rig.until(lambda _: True).namespaces
        assert (space.hits, space.counters["hits_below"], client.counters.pages_ssd) == (64, 32, 32)
        client.close()
        # and memory as it was, after a kill without a reboot
        rig.pool.kill()
        rig.pool.restart()
        client = rig.client()
        assert get(client, range(32)) == 32
        client.close()
    finally:
        rig.close()


def test_pages_that_a_killed_node_had_not_stored_yet_are_stored_after_its_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)  # below the watermark it stores nothing
    try:
        client = rig.client()
        put(client, range(24))
        client.close()
        assert rig.status().tiers[0].counters["stored"] == 0
        rig.pool.kill()
        every = TierConfig(**{**msgspec.structs.asdict(rig.config.tiers[0]), "write": "all"})
        rig.config = msgspec.structs.replace(rig.config, tiers=[every, *rig.config.tiers[1:]])
        rig.pool = rig.start()
        rig.until_stored(24)
        rig.reboot()
        rig.until(lambda report: report.tiers[0].pages == 24)
        client = rig.client()
        assert get(client, range(24)) == 24
        client.close()
    finally:
        rig.close()


def test_what_leaves_the_first_tier_goes_to_the_second(rig: Rig) -> None:
    client = rig.client()
    fill(rig, client, 800)  # of 48 MiB; the SSD has room for 32
    report = rig.until(lambda report: report.tiers[1].pages > 20)
    assert report.tiers[0].used_bytes <= 32 * MIB
    assert get(client, range(800)) >= 700
    client.close()


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_pages_that_were_dropped_stay_so_after_a_reboot_right_after_the_answer(rig: Rig, how: str) -> None:
    client, other = rig.client(), rig.client("other")
    fill(rig, client, 128)
    put(other, range(64))
    fill_up = rig.client("third")
    put(fill_up, range(64))
    put(client, range(1000, 1032))  # stores are under way
    if how == "drop":
        drop_namespace(rig, "ns")
    else:
        assert client.clear() >= 128
    rig.pool.kill()
    for one in (client, other, fill_up):
        one.close()
    remove_arena(rig.config)
    rig.pool.restart()
    rig.until(lambda report: report.tiers[0].pages > 0)
    again = rig.client()
    assert sum(again.exists([key(n) for n in range(128)])) == 0
    assert get(again, range(16)) == 0
    again.close()


def test_pages_written_after_a_clear_outlive_a_clock_that_was_set_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, write="all")
    try:
        client = rig.client()
        put(client, range(8))
        rig.until_stored(8)
        assert client.clear() >= 8
        client.close()
        rig.pool.code = f"import time; right = time.time_ns; time.time_ns = lambda: right() - {HOUR_NS}; "
        rig.pool.code += ProcessPool.code
        rig.reboot()
        client = rig.client()
        put(client, range(16))
        rig.until_stored(16)
        client.close()
        rig.reboot()
        rig.until(lambda report: report.tiers[0].pages == 16)
        client = rig.client()
        assert get(client, range(16)) == 16
        client.close()
    finally:
        rig.close()


def names_in(rig: Rig) -> set[str]:
    """Of the namespaces in the list that the tier keeps."""
    text = (rig.directory / "ssd" / "namespaces.json").read_bytes()
    return {namespace["name"] for namespace in msgspec.json.decode(text)["namespaces"]}


def test_a_tier_that_was_away_when_memory_was_lost_brings_nothing_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, write="all")
    ssd = rig.config.tiers[0]

    def start_again(tiers: list[TierConfig], *, reboot: bool = False) -> None:
        rig.pool.kill()
        if reboot:
            remove_arena(rig.config)
        rig.config = msgspec.structs.replace(rig.config, tiers=tiers)
        rig.pool = rig.start()
        rig.until(lambda report: len(report.tiers) == len(tiers))

    try:
        a, b = rig.client("a"), rig.client("b")
        for first in range(0, 24, 4):  # side by side in the segments
            put(a, range(first, first + 4))
            put(b, range(100 + first, 104 + first))
        rig.until_stored(48)
        a.close()
        b.close()
        start_again([], reboot=True)
        a, c = rig.client("a"), rig.client("c")  # c has the number that b had
        put(a, range(50, 51))
        put(c, range(200, 201))
        a.close()
        c.close()
        for _ in range(2):
            start_again([ssd])
            rig.until(lambda report: report.tiers[0].pages == 2 and names_in(rig) == {"a", "c"})
            a, c = rig.client("a"), rig.client("c")
            assert not any(c.exists([key(n) for n in range(100, 124)]))
            assert get(c, range(200, 201)) == get(a, range(50, 51)) == 1
            assert get(a, range(24)) == 0, "its list began anew while the tier was away"
        a.close()
        c.close()
    finally:
        rig.close()


def test_a_flipped_bit_on_the_disk_is_a_miss(rig: Rig) -> None:
    client = rig.client()
    fill(rig, client, 192)
    client.close()
    rig.pool.kill()
    remove_arena(rig.config)
    flipped = 0
    for path in sorted((rig.directory / "ssd").glob("*.seg")):
        data = bytearray(path.read_bytes())
        for n in range(0, 150, 10):
            at = data.find(contents(n, PAGE)[1000:1064].tobytes())
            if at >= 0:
                data[at] ^= 0x20
                flipped += 1
        path.write_bytes(bytes(data))
    assert flipped >= 10
    rig.pool.restart()
    client = rig.client()
    rig.until(lambda report: report.tiers[0].pages > 140)
    hits = get(client, range(150))
    assert 150 - flipped - 10 <= hits <= 150 - flipped
    assert rig.status().counters["promotions_failed"] == flipped
    client.close()


def test_a_clean_stop_seals_and_a_start_finds_all(rig: Rig) -> None:
    client = rig.client()
    fill(rig, client, 128)
    pages = rig.until(lambda report: report.tiers[0].pages >= 88).tiers[0].pages
    client.close()
    rig.pool.close()  # keep = false: the arena goes
    rig.pool.restart()
    rig.until(lambda report: report.tiers[0].pages >= pages)
    assert "not sealed" not in rig.pool.log.read_text()


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ('kind = "tape"\npath = "{dir}/t"\ncapacity_bytes = "1GiB"', "no tier of kind 'tape'"),
        ('kind = "ssd"\npath = "{dir}/file"\ncapacity_bytes = "1GiB"', "cannot use"),
        ('kind = "ssd"\npath = "{dir}/t"\ncapacity_bytes = "900TiB"', "more than its file system"),
        ('kind = "ssd"\npath = "{dir}/t"\ncapacity_bytes = "1GiB"\noptions = {{ direkt = true }}', "direkt"),
    ],
)
def test_a_tier_that_cannot_be_used_is_an_error_in_one_line(tmp_path: Path, tier: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    config = PoolNodeConfig(name="bad", arena_dir=arena_dir(), capacity_bytes=4 * MIB, slab_bytes=MIB)
    with pytest.raises(AssertionError) as caught:
        ProcessPool(config, tmp_path, "shm", extra="[[tiers]]\n" + tier.format(dir=tmp_path))
    log = (tmp_path / "bad.log").read_text().strip()
    assert words in log, str(caught.value)
    assert len(log.splitlines()) == 1
    assert not (arena_dir() / "bad").exists()
    shutil.rmtree(arena_dir(), ignore_errors=True)


def test_two_tiers_of_one_path_are_refused() -> None:
    tier = TierConfig(kind="ssd", path=Path("/x"), capacity_bytes="1GiB")
    with pytest.raises(ValueError, match="different paths"):
        PoolNodeConfig(tiers=[tier, tier])
