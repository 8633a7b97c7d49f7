"""Room for the arenas of pool nodes that are to run on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from pdserve.doctor.facts import ArenaRoom
from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.node.auto_capacity import with_capacity
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.memory.placement import free_huge_pages
from pdserve.resources.memory import mount_of


def gather(pools: Iterable[PoolNodeConfig]) -> list[ArenaRoom]:
    """What they take of each place: a file system, or huge pages of one size."""
    rooms: dict[tuple[str, int], ArenaRoom] = {}
    for pool in pools:
        directory, page_bytes = pool.arena_dir / pool.name, pool.placement.huge_page_bytes
        try:
            there = _existing(pool.placement.home(directory))
            capacity = with_capacity(pool).capacity
        except (StartupError, ConfigError) as error:
            rooms["none", len(rooms)] = ArenaRoom(nodes=(pool.name,), error=str(error))
            continue
        device = there.stat().st_dev
        place = ("huge pages", page_bytes) if page_bytes else ("device", device)
        if place not in rooms:
            rooms[place] = _room(there, page_bytes)
        room = rooms[place]
        more_bytes = max(0, capacity - _held_bytes(directory / "arena", device))
        rooms[place] = replace(
            room, nodes=(*room.nodes, pool.name), needed_bytes=room.needed_bytes + more_bytes
        )
    return list(rooms.values())


def _room(there: Path, page_bytes: int) -> ArenaRoom:
    if page_bytes:
        name, free_bytes = f"huge pages of {page_bytes >> 20} MiB", free_huge_pages(page_bytes) * page_bytes
        return ArenaRoom(place=name, page_bytes=page_bytes, free_bytes=free_bytes)
    space = os.statvfs(there)
    return ArenaRoom(place=str(mount_of(there).path), free_bytes=space.f_bavail * space.f_frsize)


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _held_bytes(arena: Path, device: int) -> int:
    """What an earlier arena of the node takes there: it is used again, or removed."""
    try:
        found = arena.stat()
    except OSError:  # there is none, or it is another user's
        return 0
    return (found.st_blocks * 512 or found.st_size) if found.st_dev == device else 0  # hugetlbfs: no blocks
