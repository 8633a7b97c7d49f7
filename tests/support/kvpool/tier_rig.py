"""A node of 16 pages over tiers that do what they were asked only when told to."""

from __future__ import annotations

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import QUARANTINED, RESERVED
from pdserve.kvpool.tiers.base import (
    GONE,
    LOADED,
    STORED,
    WRITE_FAILED,
    TierPage,
)
from tests.support.kvpool.node_model import KIB, Node, answers, key, statuses

SSD = TierSpec("ssd:/a", "ssd", 1 << 30)
FAR = TierSpec("far:/b", "far", 1 << 30)
JUNK = (-1, b"")


class Rig:
    """A node of 16 slots of 4 KiB, and what its tiers hold: carried out when told to."""

    def __init__(self, *tiers: TierSpec, ready: bool = True, **limits: float) -> None:
        """`ready`: the tiers have told that they hold nothing."""
        bounds = TieringLimits(**{"watermark": 0.0, **limits})  # type: ignore[arg-type]
        specs = tiers or (SSD,)
        self.node = Node(slabs=4, slab_bytes=16 * KIB, lease_s=10, tiers=specs, tiering=bounds)
        self.writes: list[list[ev.Action | TierPage]] = [[] for _ in specs]
        self.loads: list[ev.LoadPages] = []
        self.disks: list[dict[tuple[int, bytes], TierPage]] = [{} for _ in specs]
        self.saves: list[ev.SaveNamespaces] = []
        self.contents: dict[int, tuple[int, bytes]] = {}  # of slots: space and key
        self.node.followers.append(self.follow)
        self.c = self.node.connect()
        self.ns = self.node.open(self.c)
        for tier in range(len(specs)) if ready else ():
            self.node.do(ev.PagesFound(tier, (), 0, last=True))

    @property
    def space(self) -> int:
        """Of its namespace."""
        return self.node.state.namespaces[self.ns].space

    def follow(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.StorePages | ev.ForgetPages):
                self.writes[action.tier].append(action)
            elif isinstance(action, ev.ForgetSpace):
                for writes in self.writes:
                    writes.append(action)
            elif isinstance(action, ev.SaveNamespaces):
                self.saves.append(action)
            elif isinstance(action, ev.LoadPages):
                self.loads.append(action)

    def put(self, *keys: int, ns: int | None = None, length: int = 4 * KIB) -> list[int]:
        ns = self.ns if ns is None else ns
        grants = self.node.put(self.c, ns, *keys, length=length)
        for k, grant in zip(keys, grants, strict=True):
            if grant.status == m.GRANTED:
                self.contents[grant.slot] = (self.node.state.namespaces[ns].space, key(k))
        return statuses(grants)

    def write(self, tier: int = 0, status: int = STORED) -> None:
        """Carry out the first of the tier's writes."""
        action = self.writes[tier].pop(0)
        disk = self.disks[tier]
        if isinstance(action, ev.StorePages):
            for one in action.pages:
                assert self.contents[one.slot] == (one.page.space, one.page.key), "the slot was changed"
                if status == STORED:
                    disk[one.page.space, one.page.key] = one.page
            slots = tuple(one.slot for one in action.pages)
            event = ev.PagesStored(tier, slots, (status,) * len(slots), len(disk), status == WRITE_FAILED)
            self.node.do(event)
        elif isinstance(action, TierPage):
            if status == STORED:
                disk[action.space, action.key] = action
            stored = (action,) if status == STORED else ()
            self.node.do(ev.PagesFound(tier, stored, 0, failed=int(status == WRITE_FAILED)))
        elif isinstance(action, ev.ForgetPages):
            for name in action.names:
                disk.pop((name.space, name.key), None)
            self.node.do(ev.PagesGone(tier, action.names, len(disk)))
        elif isinstance(action, ev.ForgetSpace):
            for where in [where for where in disk if where[0] == action.space]:
                del disk[where]

    def save(self, problem: str = "") -> list[ev.Action]:
        """The newest list is durable, or it could not be written."""
        return self.node.do(ev.NamespacesSaved(self.saves[-1].revision, problem))

    def load(self, at: int = 0, status: int | None = None) -> list[ev.Action]:
        """Carry out one of the loads."""
        action = self.loads.pop(at)
        found = [self._load(action.tier, one, status) for one in action.pages]
        return self.node.do(
            ev.PagesLoaded(
                action.tier, tuple(one.slot for one in action.pages), *map(tuple, zip(*found, strict=True))
            )
        )

    def _load(self, tier: int, one: ev.SlotPage, status: int | None) -> tuple[int, int]:
        where = (one.page.space, one.page.key)
        assert self.node.state.store.state(one.slot) in (RESERVED, QUARANTINED), "not ours to write into"
        page = self.disks[tier].get(where)
        if page is None or page.length_bytes != one.page.length_bytes:
            return GONE, 0
        self.contents[one.slot] = where if status is None else JUNK
        return (LOADED, page.checksum) if status is None else (status, 0)

    def drain(self, *tiers: int) -> None:
        """Carry out all writes of these tiers, or of all."""
        for tier in tiers or range(len(self.writes)):
            while self.writes[tier]:
                self.write(tier)

    def ask(self, *keys: int, length: int = 4 * KIB, c: int | None = None) -> list[list[int]]:
        """The answers at once, as statuses."""
        request = m.Get(self.node.next_id(), self.ns, [key(k) for k in keys], [length])
        c = self.c if c is None else c
        return self.replies(self.node.send(c, request), c)

    def replies(self, actions: list[ev.Action], c: int | None = None) -> list[list[int]]:
        found = []
        for reply in answers(actions, self.c if c is None else c):
            assert isinstance(reply, m.Got)
            for pin in reply.pins:
                assert pin.status == m.MISS or self.contents[pin.slot] != JUNK
            found.append([pin.status for pin in reply.pins])
        return found

    def sink(self, *keys: int) -> None:
        """Put pages, have them stored, and push them out of memory."""
        for k in keys:
            self.put(k)
        for k in range(1000, 1020):
            self.commits()
            self.drain()
            assert self.put(k) == [m.GRANTED]
        assert all(self.node.state.store.find(self.ns, key(k)) < 0 for k in keys)

    def commits(self) -> None:
        """Enough for a pass over the coldest pages."""
        self.node.state.tiers._demotions._scan = True
        self.node.pass_time(0.0)

    def counter(self, name: str) -> int:
        return self.node.status().counters[name]
