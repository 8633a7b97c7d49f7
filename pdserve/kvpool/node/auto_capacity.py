"""`capacity_bytes = "auto"`: decided by the node itself when it starts, so that it holds on every host.

A node takes a quarter of the memory that its host or container may use: workers beside it need the rest for
weights and for their own host memory. It takes no more than three quarters of what the file system of its
arena (or its huge pages) has free. On a host without a GPU, where workers compute in host memory, it takes at
most 2 GiB. A node that has an arena already keeps its size, since an arena of another size is made anew and
its pages are lost.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final, Self

from msgspec.structs import replace

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.memory.placement import free_huge_pages
from pdserve.kvpool.node.memory.slab_size import SLAB_BYTES, least_slab
from pdserve.resources.machine import has_nvidia_gpu
from pdserve.resources.memory import limit_bytes

logger = logging.getLogger(__name__)

MEMORY_PARTS: Final = 4
WITHOUT_GPU_BYTES: Final = 2 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Host:
    """What is looked at of this host."""

    memory_bytes: int
    has_gpus: bool

    @classmethod
    def of_this_process(cls) -> Self:
        """Its memory is that of the container, where this runs in one."""
        return cls(limit_bytes(), has_nvidia_gpu())


def auto_capacity(host: Host, where: str, free_bytes: int) -> tuple[int, str]:
    """(bytes for pages, why so many). `free_bytes`: of `where`, the file system of the arena."""
    choices = [
        (host.memory_bytes // MEMORY_PARTS, "a quarter of this host's memory"),
        (free_bytes // 4 * 3, f"three quarters of what {where} has free"),
    ]
    if not host.has_gpus:
        choices.append((WITHOUT_GPU_BYTES, "no GPU is here"))
    return min(choices)


def with_capacity(config: PoolNodeConfig, host: Host | None = None) -> PoolNodeConfig:
    """The configuration with a capacity in bytes. Raises StartupError where there is less room than a slab of
    the usual size, ConfigError where sizes do not fit to it.
    """
    if not config.is_auto:
        return config
    found, why = _wanted(config, host or Host.of_this_process())
    unit = max(least_slab(found), config.placement.huge_page_bytes)
    capacity = found // unit * unit
    if capacity < SLAB_BYTES:
        raise StartupError(
            f'node {config.name}: capacity_bytes = "auto" leaves {found / _MIB:.0f} MiB in '
            f"{config.arena_dir} ({why}), less than {SLAB_BYTES // _MIB} MiB: enlarge that file system "
            "(docker: --shm-size), choose another arena_dir, or set capacity_bytes"
        )
    try:
        sized = replace(config, capacity_bytes=capacity)
        while sized.capacity != capacity:  # so that the same slabs follow from it at the next start
            capacity = sized.capacity
            sized = replace(config, capacity_bytes=capacity)
    except ValueError as error:
        raise ConfigError(f'capacity_bytes = "auto" is {capacity} here ({why}): {error}') from None
    logger.info('node %s: capacity_bytes = "auto" is %d MiB: %s', config.name, capacity // _MIB, why)
    return sized


def _wanted(config: PoolNodeConfig, host: Host) -> tuple[int, str]:
    arena = config.arena_dir / config.name / "arena"
    if arena.exists():
        return arena.stat().st_size, "as before"
    huge = config.placement.huge_page_bytes
    if huge:
        return auto_capacity(host, "the huge pages", free_huge_pages(huge, config.numa_node) * huge)
    place = config.arena_dir
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    return auto_capacity(host, str(place), space.f_bavail * space.f_frsize)
