"""Room for arenas: by file system, less what an earlier arena of the same node holds."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from pdserve.doctor import arenas
from pdserve.kvpool.node.config.node import PoolNodeConfig


def node(name: str, directory: Path) -> PoolNodeConfig:
    return PoolNodeConfig(name=name, arena_dir=directory, capacity_bytes="64MiB")


def held(directory: Path, size: int) -> None:
    """An arena that a stopped node left."""
    directory.mkdir(parents=True)
    with (directory / "arena").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_nodes_of_one_file_system_need_room_together(tmp_path: Path) -> None:
    found = arenas.gather([node("a", tmp_path / "here"), node("b", tmp_path / "there")])
    (room,) = found
    space = os.statvfs(tmp_path)
    assert (room.nodes, room.needed_bytes) == (("a", "b"), 128 << 20)
    assert 0 < room.free_bytes <= space.f_blocks * space.f_frsize
    assert tmp_path.is_relative_to(room.place)


def test_what_an_earlier_arena_of_the_node_holds_is_not_needed_again(tmp_path: Path) -> None:
    held(tmp_path / "a", 48 << 20)
    held(tmp_path / "b", 96 << 20)
    (room,) = arenas.gather([node("a", tmp_path)])
    assert room.needed_bytes == 16 << 20
    (room,) = arenas.gather([node("a", tmp_path), node("b", tmp_path), node("c", tmp_path)])
    assert room.needed_bytes == 80 << 20


def test_file_systems_are_looked_at_one_by_one(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    assert memory.stat().st_dev != tmp_path.stat().st_dev
    rooms = arenas.gather([node("a", tmp_path), node("b", memory / "pdserve-test-none")])
    assert [(room.nodes, room.needed_bytes) for room in rooms] == [(("a",), 64 << 20), (("b",), 64 << 20)]
    assert rooms[1].place == "/dev/shm"


def test_huge_pages_without_a_place_are_an_error_of_that_node_alone(tmp_path: Path) -> None:
    huge = PoolNodeConfig(name="h", arena_dir=tmp_path, huge_pages="1GiB", huge_pages_dir=tmp_path)
    wrong, room = arenas.gather([huge, node("a", tmp_path)])
    assert (wrong.nodes, room.nodes, room.needed_bytes) == (("h",), ("a",), 64 << 20)
    assert "hugetlbfs" in wrong.error


def test_a_node_that_decides_its_capacity_itself_is_asked_what_it_would_take(tmp_path: Path) -> None:
    [room] = arenas.gather([replace(node("a", tmp_path), capacity_bytes="auto")])
    assert 0 < room.needed_bytes <= room.free_bytes
