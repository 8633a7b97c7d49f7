"""What a node starts with: its memory and tiers, and the state of what they hold.

`capacity_bytes = "auto"`: decided by the node itself when it starts, so that it holds on every host.

A node takes a quarter of the memory that its host or container may use: workers beside it need the rest for
weights and for their own host memory. It takes no more than three quarters of what the file system of its
arena (or its huge pages) has free. On a host without a GPU, where workers compute in host memory, it takes at
most 2 GiB. A node that has an arena already keeps its size, since an arena of another size is made anew and
its pages are lost.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Final, Self

from msgspec.structs import replace

from pdserve.errors import ConfigError, PdserveError, StartupError
from pdserve.kvpool.core.events import SaveNamespaces
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.sharding.handover import MAX_TARGETS
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.memory.placement import MIN_SLOT_BYTES, SLAB_BYTES, free_huge_pages, least_slab
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.node.timers import clock_ms
from pdserve.kvpool.protocol.slot_table import TableLayout
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


KEPT_SHARE: Final = 0.25  # of the capacity that all clients together may want kept
EXCHANGE_SHARE: Final = 0.25  # of the capacity: pages on their way from other nodes, and as much to them
PUSH_BATCH_BYTES: Final = 8 << 20  # in a request to another node, at least one page
MAX_MESSAGES: Final = 65_536  # in flight for a connection: segments over UCX, pages over TCP


def take_memory(config: PoolNodeConfig, incarnation: int, lock_fd: int | None) -> tuple[Arena, NodeTiers]:
    """Arena and tiers. Where they cannot be had, a new arena is removed again. `lock_fd`: the lock on the
    arena's directory, after an upgrade. Raises StartupError, ConfigError.
    """
    arena = Arena(
        config.name,
        config.arena_dir / config.name,
        TableLayout(config.capacity, config.slab, MIN_SLOT_BYTES),
        incarnation,
        fresh=config.fresh and lock_fd is None,
        placement=config.placement,
        lock_fd=lock_fd,
    )
    try:
        tiers = NodeTiers(config, arena.memory, arena.namespaces, takes_over=lock_fd is not None)
    except PdserveError:
        arena.close(keep=arena.kept)
        raise
    arena.recover(tiers.namespaces)
    return arena, tiers


def make_state(
    config: PoolNodeConfig, incarnation: int, arena: Arena, tiers: NodeTiers, rules: Rules, now_s: float
) -> NodeState:
    """With all that the arena held."""
    slots = SlotAllocator(config.capacity, config.slab, MIN_SLOT_BYTES)
    state = NodeState(
        config.name,
        incarnation,
        PageStore(slots, arena.namespaces.begin_sequences(time.time_ns() // 1000)),
        _limits_of(config),
        now_s,
        arena.namespaces,
        rules,
        tiers.specs,
        tiers.limits,
        follows_places=bool(config.events.address),
        started_ms=clock_ms(),
    )
    arena.save_namespaces(SaveNamespaces(arena.namespaces.dump()))
    if arena.contents is not None:
        state.restore(arena.contents, now_s)
        arena.contents = None  # a copy of the whole index
    arena.adopt(slots)
    return state


def _limits_of(config: PoolNodeConfig) -> Limits:
    """Those of NodeState."""
    of_client = max(config.slab, int(config.capacity * config.max_client_share))
    return Limits(
        lease_s=config.lease_s,
        reservation_lease_s=config.lease_s,
        quarantine_s=config.lease_s,
        max_reserved_bytes=of_client,
        max_pinned_bytes=of_client,
        max_kept_bytes=int(config.capacity * KEPT_SHARE),
        max_messages=MAX_MESSAGES,
        exchange_bytes=max(config.slab, int(config.capacity * EXCHANGE_SHARE)),
        push_bytes_s=float(config.moving.bytes_s),
        # what is pinned for all pushes under way must leave room for other requests of the node to itself
        push_batch_bytes=min(PUSH_BATCH_BYTES, of_client // (2 * MAX_TARGETS)),
    )
