"""Huge pages and NUMA nodes: the real ones of this machine, where it lets us have some."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import StartupError
from pdserve.kvpool.node.memory import placement as placement_module
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.memory.placement import Placement, numa_nodes
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.mounts import mounted, set_huge_pages
from tests.support.kvpool.nodes import get, keys, open_namespace, put, small_config, start_fails
from tests.support.kvpool.pools import ProcessPool, arena_dir, remove_arena, remove_arena_dir

MIB = 1 << 20
PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with 2 MiB pages of which 12 are reserved."""
    with set_huge_pages(PAGES, 12), mounted(tmp_path / "huge", "hugetlbfs", "pagesize=2M") as directory:
        yield directory


def kernel_page_kib(pid: int, path: Path) -> set[int]:
    """Sizes of the pages that a process has this file mapped in."""
    sizes, ours = set(), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("KernelPageSize:"):
            sizes.add(int(line.split()[1]))
    return sizes


def write_and_read(connection: Connection, seed: int) -> None:
    ns = open_namespace(connection)
    some = keys(20, seed)
    assert put(connection, ns, some) == some
    assert get(connection, ns, some) == some


def test_a_node_on_huge_pages_serves_dies_and_comes_back(tmp_path: Path, hugetlbfs: Path) -> None:
    config = small_config(name="huge", huge_pages="2MiB", huge_pages_dir=hugetlbfs)
    pool = ProcessPool(config, tmp_path, "shm")
    try:
        connection = pool.connect()
        write_and_read(connection, 1)
        [file] = hugetlbfs.glob("*/arena")
        assert file.stat().st_size == 16 * MIB
        assert kernel_page_kib(pool.pid, file) == {2048}
        assert kernel_page_kib(os.getpid(), file) == {2048}, "the client maps the same pages"
        assert file.parent.stat().st_mode & 0o777 == 0o700
        connection.close()
        pool.kill()
        pool.restart()
        connection = pool.connect()
        assert len(get(connection, open_namespace(connection), keys(20, 1))) == 20
        connection.close()
        pool.close()  # asserts that a clean stop without keep leaves nothing
        assert list(hugetlbfs.iterdir()) == []
    finally:
        pool.kill()
        remove_arena(pool.config)
        arena_dir().rmdir()


def test_pages_of_the_other_kind_are_given_up_and_freed(tmp_path: Path, hugetlbfs: Path) -> None:
    layout = TableLayout(4 * MIB, MIB, 8192)
    huge = Placement(huge_page_bytes=2 * MIB, hugetlbfs=hugetlbfs)
    directory = tmp_path / "n"
    for at, kind in enumerate((Placement(), huge, huge, Placement())):
        arena = Arena("n", directory, layout, at + 1, fresh=False, placement=kind)
        assert arena.kept == (at == 2), "only a start with the same kind takes pages over"
        assert bool(list(hugetlbfs.glob("*/arena"))) == (kind is huge)
        arena.memory[:] = at
        arena.close(keep=True)
    arena = Arena("n", directory, layout, 9, fresh=True, placement=huge)
    arena.close(keep=False)
    assert not directory.exists()
    assert list(hugetlbfs.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"huge_pages": "advise"}, "remount,huge=advise /dev/shm"),
        ({"numa_node": 77}, "numa_node = 77: this machine's NUMA nodes are: 0"),
        ({"huge_pages": "2MiB", "huge_pages_dir": "/"}, r"mount -t hugetlbfs -o pagesize=2M"),
        (
            {"huge_pages": "2MiB", "capacity_bytes": 64 << 20, "huge_pages_dir": "hugetlbfs"},
            r"needs 32 huge pages of 2 MiB, \d+ are free: as root, 'echo \d+ > /sys/kernel",
        ),
    ],
)
def test_what_this_machine_does_not_have_is_said_with_what_to_do(
    request: pytest.FixtureRequest, options: dict[str, Any], said: str
) -> None:
    if "huge_pages_dir" in options:
        given = options["huge_pages_dir"]
        found = request.getfixturevalue("hugetlbfs") if given == "hugetlbfs" else Path(given)
        options = options | {"huge_pages_dir": found}
    assert re.search(said, start_fails(**options))
    assert not (arena_dir() / "second").exists()
    remove_arena_dir()


def test_advice_gives_transparent_huge_pages_where_the_tmpfs_has_them(tmp_path: Path) -> None:
    layout = TableLayout(8 * MIB, MIB, 8192)
    with mounted(tmp_path / "thp", "tmpfs", "size=64m,huge=advise,mode=700") as directory:
        before = huge_shmem_kib()
        arena = Arena("n", directory / "n", layout, 1, fresh=False, placement=Placement(advise=True))
        assert huge_shmem_kib() - before >= 4096, "some of four were to be had"
        assert not np.any(arena.memory)
        arena.close(keep=False)
        with pytest.raises(StartupError, match="does not fit"):
            Arena(
                "n",
                directory / "n",
                TableLayout(80 * MIB, MIB, 8192),
                1,
                fresh=False,
                placement=Placement(advise=True),
            )


def huge_shmem_kib() -> int:
    text = Path("/proc/meminfo").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("ShmemHugePages:")]
    return int(line.split()[1])


def test_a_tmpfs_that_is_full_while_its_pages_are_touched_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with mounted(tmp_path / "thp", "tmpfs", "size=8m,huge=advise,mode=700") as directory:
        fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            Placement(advise=True).allocate("n", fd, 16 * MIB)
        os.close(fd)


def test_an_arena_is_bound_to_its_numa_node(tmp_path: Path) -> None:
    node = numa_nodes()[0]
    layout = TableLayout(4 * MIB, MIB, 8192)
    directory = arena_dir() / "n"
    arena = Arena("n", directory, layout, 1, fresh=False, placement=Placement(numa_node=node))
    arena.memory[:] = 1
    [line] = [
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if f"file={directory}/arena" in line
    ]
    assert f" bind:{node} " in line
    arena.close(keep=True)
    again = Arena("n", directory, layout, 2, fresh=False, placement=Placement(numa_node=node))
    assert again.kept
    again.close(keep=False)
    arena_dir().rmdir()


def test_memory_cannot_be_bound_where_the_kernel_does_not_let_us(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 4096) as memory, pytest.raises(StartupError, match="leave numa_node out"):
        placement_module._bind("n", memory, 900)
    monkeypatch.setattr(placement_module.platform, "machine", lambda: "vax")
    with mmap.mmap(-1, 4096) as memory, pytest.raises(StartupError, match="not supported on vax"):
        placement_module._bind("n", memory, 0)
