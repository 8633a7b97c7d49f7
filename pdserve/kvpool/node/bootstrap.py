"""What a node starts with: its memory and tiers, and the state of what they hold."""

from __future__ import annotations

import time
from typing import Final

from pdserve.errors import PdserveError
from pdserve.kvpool.core.events import SaveNamespaces
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.sharding.handover import MAX_TARGETS
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.memory.slab_size import MIN_SLOT_BYTES
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.node.timers import clock_ms
from pdserve.kvpool.protocol.slot_table import TableLayout

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
