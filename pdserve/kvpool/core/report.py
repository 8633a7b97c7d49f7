"""What a node says of itself: the answer to Status. Pure."""

from __future__ import annotations

from typing import Protocol

from pdserve.kvpool.core.events import LOCAL
from pdserve.kvpool.core.kept_pages import KeptPages
from pdserve.kvpool.core.namespace_admin import Administration
from pdserve.kvpool.core.reads import Reads
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.core.waits import Waits
from pdserve.kvpool.core.writes import Writes
from pdserve.kvpool.namespaces import access
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import COMMITTED, DOOMED, QUARANTINED, RESERVED, SWEEPING


class NodeFacts(Protocol):
    """What is reported of: a `NodeState`."""

    name: str
    incarnation: int
    started_s: float
    discarded: int
    recovered: dict[str, int]
    namespaces: Namespaces
    administration: Administration
    sessions: dict[int, Session]
    store: PageStore
    tiers: Tiers
    sharding: Sharding
    waits: Waits
    reads: Reads
    writes: Writes
    kept: KeptPages


def report(state: NodeFacts, request_id: int, now_s: float, session: Session | None = None) -> m.StatusReport:
    """The report, without namespaces that the session may not read. No session: all namespaces."""
    store = state.store
    shown = [
        number
        for number in state.namespaces.numbers
        if session is None or state.administration.rights(session, number) & m.READ
    ]
    in_state = store.bytes_in_state
    return m.StatusReport(
        id=request_id,
        node=state.name,
        incarnation=state.incarnation,
        uptime_s=now_s - state.started_s,
        capacity_bytes=store.slots.capacity_bytes,
        free_bytes=store.free_bytes,
        used_bytes=in_state[COMMITTED] + in_state[DOOMED],
        reserved_bytes=in_state[RESERVED],
        quarantined_bytes=in_state[QUARANTINED],
        pages=len(store.index),
        pins=sum(pin.count for session in state.sessions.values() for pin in session.pins.values()),
        waiters=state.waits.open,
        connections=len(state.sessions.keys() - {LOCAL}),
        namespaces=[_namespace(state, number) for number in shown],
        counters=_counters(state),
        epoch=state.sharding.ownership.epoch,
        tiers=state.tiers.status(),
    )


def _namespace(state: NodeFacts, number: int) -> m.NamespaceStatus:
    namespace = state.namespaces[number]
    pages = state.store.index.namespace(number)
    tier_pages, tier_bytes = state.tiers.held(number)
    return m.NamespaceStatus(
        name=namespace.name,
        pages=len(pages.committed),
        page_bytes=pages.page_bytes,
        geometry={} if split(namespace.name)[1] else namespace.geometry,
        hits=pages.hits,
        misses=pages.misses,
        evictions=pages.evictions,
        settings=access.redacted(state.namespaces.settings(number)),
        generation=namespace.generation,
        slot_bytes=pages.slot_bytes,
        replicas=state.sharding.replicas.count(number),
        tier_pages=tier_pages,
        tier_bytes=tier_bytes,
        counters={
            "operations": pages.operations,
            "hits_below": pages.tier_hits,
            "read_bytes": pages.read_bytes,
            "written_pages": pages.written,
            "written_bytes": pages.written_bytes,
            **{f"evicted_{reason}": count for reason, count in pages.gone.items()},
        },
    )


def _counters(state: NodeFacts) -> dict[str, int]:
    return {
        "commits": state.writes.commits,
        "commits_refused": state.writes.commits_refused,
        "reservations_expired": state.writes.reservations_expired,
        "reservations_full": state.writes.full,
        "receives_failed": state.writes.receives_failed,
        "sends_failed": state.reads.sends_failed,
        "leases_expired": state.reads.leases_expired,
        "pins_refused": state.reads.pins_refused,
        "kept_refused": state.kept.refused,
        "evictions": state.store.evictions,
        "discarded": state.discarded,
        "denied": state.administration.denials,
        "tail_bytes": state.store.slots.tail_bytes,
        "kept_bytes": state.kept.slot_bytes,
        "sweeping_bytes": state.store.bytes_in_state[SWEEPING],
        **state.recovered,
        **state.sharding.counters(),
        **state.tiers.counters(),
    }
