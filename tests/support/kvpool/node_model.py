"""A node's state without any I/O, and shorthands to drive it. Used by the tests of the pure modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.state import NO_RULES, NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol import messages as m
from pdserve.security.tokens import digest

KIB = 1024
R = TypeVar("R")


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


class Node:
    """A NodeState with a clock that stands still unless moved. Each step is checked."""

    def __init__(
        self,
        slabs: int = 4,
        slab_bytes: int = 64 * KIB,
        min_slot_bytes: int = 4 * KIB,
        *,
        rules: Rules = NO_RULES,
        namespaces: Namespaces | None = None,
        tiers: Sequence[TierSpec] = (),
        tiering: TieringLimits | None = None,
        follows_places: bool = True,
        started_ms: int = 0,
        **limits: Any,
    ) -> None:
        self.now_s = 100.0
        slots = SlotAllocator(slabs * slab_bytes, slab_bytes, min_slot_bytes)
        self.state = NodeState(
            "n0",
            1,
            PageStore(slots, first_sequence=1),
            Limits(**limits),  # type: ignore[arg-type]
            self.now_s,
            namespaces,
            rules,
            tiers,
            tiering,
            follows_places,
            started_ms,
        )
        self._follows_places = follows_places
        self._told: dict[tuple[int, bytes], str] = {}  # where pages are, as followers know it
        self.actions: list[ev.Action] = []
        self.followers: list[Callable[[list[ev.Action]], None]] = []  # of all that it does
        self._connections = 0
        self._ids = 0

    def connect(self, data_path: m.DataPathName = "shm", token: str = "", peer: bool = False) -> int:
        self._connections += 1
        self.do(ev.Connected(self._connections, data_path, "test", 1, peer, digest(token)))
        return self._connections

    def disconnect(self, connection: int, by_peer: bool = True) -> list[ev.Action]:
        return self.do(ev.Disconnected(connection, by_peer))

    def do(self, event: object) -> list[ev.Action]:
        actions = self.state.handle(event, self.now_s)  # type: ignore[arg-type]
        for follow in self.followers:
            follow(actions)
        self.state.check()
        self.actions = [one for one in actions if not isinstance(one, ev.PagesMoved | ev.PlacesVoid)]
        if self._follows_places:
            self._check_places(actions)
        _check_order(self.actions)
        return self.actions

    def _check_places(self, actions: list[ev.Action]) -> None:
        """What followers were told is what is so."""
        for action in actions:
            if isinstance(action, ev.PlacesVoid):
                self._told = self._places()  # the shell tells all anew
            elif isinstance(action, ev.PagesMoved):
                self._told |= {
                    (action.namespace, k): p for k, p in zip(action.keys, action.places, strict=True)
                }
        assert {page: place for page, place in self._told.items() if place} == self._places()

    def _places(self) -> dict[tuple[int, bytes], str]:
        tiers, index = self.state.tiers, self.state.store.index
        below = {(n, k): tiers.place(n, k)[0] for n in tiers.namespaces() for k in tiers.keys(n)}
        return below | {(pages.number, k): "dram" for pages in index for k in pages.committed}

    def send(self, connection: int, message: m.Request) -> list[ev.Action]:
        return self.do(ev.Received(connection, message))

    def done(self, connection: int, tag: int, ok: bool) -> list[ev.Action]:
        """A transfer has ended."""
        return self.do(ev.TransfersDone([ev.TransferDone(connection, tag, ok)]))

    def pass_time(self, seconds: float) -> list[ev.Action]:
        self.now_s += seconds
        return self.do(ev.Tick())

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def ask(self, connection: int, message: m.Request, kind: type[R]) -> R:
        """The one reply. What the same client has asked before may be answered with it."""
        answered = answers(self.send(connection, message), connection)
        replies = [reply for reply in answered if reply.id == message.id]
        assert len(replies) == 1, answered
        assert isinstance(replies[0], kind), replies[0]
        return replies[0]

    # --- shorthands

    def open(self, connection: int, name: str = "ns", **geometry: str) -> int:
        return self.ask(connection, m.OpenNamespace(self.next_id(), name, geometry), m.Opened).namespace

    def reserve(self, connection: int, namespace: int, *keys: int, length: int = 4 * KIB) -> list[m.Grant]:
        request = m.Reserve(self.next_id(), namespace, [key(k) for k in keys], [length])
        return self.ask(connection, request, m.Reserved).grants

    def commit(self, connection: int, *grants: m.Grant, checksum: int = 7) -> list[int]:
        request = commit(self.next_id(), *grants, checksum=checksum)
        return list(self.ask(connection, request, m.Committed).mask)

    def put(self, connection: int, namespace: int, *keys: int, length: int = 4 * KIB) -> list[m.Grant]:
        grants = self.reserve(connection, namespace, *keys, length=length)
        granted = [grant for grant in grants if grant.status == m.GRANTED]
        assert self.commit(connection, *granted) == [1] * len(granted)
        return grants

    def get(self, connection: int, namespace: int, *keys: int, length: int = 4 * KIB) -> list[m.Pin]:
        request = m.Get(self.next_id(), namespace, [key(k) for k in keys], [length])
        return self.ask(connection, request, m.Got).pins

    def release(self, connection: int, *pins: m.Pin) -> list[ev.Action]:
        return self.send(connection, m.Release([pin.slot for pin in pins], [pin.sequence for pin in pins]))

    def abort(self, connection: int, *grants: m.Grant) -> list[ev.Action]:
        return self.send(
            connection, m.Abort([grant.slot for grant in grants], [grant.sequence for grant in grants])
        )

    def exists(self, connection: int, namespace: int, *keys: int) -> list[int]:
        request = m.Exists(self.next_id(), namespace, [key(k) for k in keys])
        return list(self.ask(connection, request, m.Present).mask)

    def status(self) -> m.StatusReport:
        return self.state.status(0, self.now_s)


def _check_order(actions: list[ev.Action]) -> None:
    """Rows are written and transfers started before a reply tells a client of them: nobody acts too early."""
    told: set[tuple[int, int]] = set()  # connection and tag
    written = committed = False
    for action in actions:
        if isinstance(action, ev.StartSend | ev.StartReceive):
            begun = action.connection, action.tag
            assert begun not in told, "a client hears of a transfer before it is started"
        elif isinstance(action, ev.CommitRows):
            assert written or not committed, "a client hears of a page whose row is not written"
            written = True
        elif isinstance(action, ev.Answer) and isinstance(action.message, m.Got | m.Reserved):
            pages = action.message.pins if isinstance(action.message, m.Got) else action.message.grants
            told.update((action.connection, page.tag) for page in pages)
        elif isinstance(action, ev.Answer) and isinstance(action.message, m.Committed):
            committed = True


def opened(**limits: Any) -> tuple[Node, int, int]:
    """A node, a client of it, and the number of a namespace that the client has opened."""
    node = Node(**limits)
    client = node.connect()
    return node, client, node.open(client)


def commit(request_id: int, *grants: m.Grant, checksum: int = 7) -> m.Commit:
    return m.Commit(
        request_id,
        [grant.slot for grant in grants],
        [grant.sequence for grant in grants],
        [checksum] * len(grants),
    )


def answers(actions: list[ev.Action], connection: int) -> list[m.Reply]:
    """What the client is answered, where other nodes that are asked know nothing."""
    mine = [
        one for one in actions if isinstance(one, ev.Answer | ev.AskOwners) and one.connection == connection
    ]
    return [one.message if isinstance(one, ev.Answer) else one.present for one in mine]


def statuses(grants: list[m.Grant]) -> list[int]:
    return [grant.status for grant in grants]
