"""What a page that is gone leaves in its slot: not for another namespace to read, and not wiped in vain."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core.events import ReserveRows
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.inproc import InprocNode
from tests.support.kvpool.node_model import KIB, Node, key, opened

SLAB_BYTES = 68 * KIB  # with slots of 8 KiB and more: every class leaves a tail
LENGTHS = (100, 8 * KIB, 10 * KIB, 12 * KIB, 20 * KIB)
NAMES = ("a", "b", "c")


class Writers:
    """Writers of a node in this process, who fill a page with a number of their namespace's own, or a part of
    it only, or nothing; every page that they are granted is looked at before.
    """

    def __init__(self, seed: int) -> None:
        limits = Limits(lease_s=1e6, reservation_lease_s=1e6, quarantine_s=0.0)
        self.node = InprocNode("n0", TableLayout(3 * SLAB_BYTES, SLAB_BYTES, 8 * KIB), limits)
        self.draw = random.Random(seed)
        self.marks: dict[str, int] = {}  # of a namespace, the bytes that its writers write
        self.restart(first=True)

    def restart(self, first: bool = False) -> None:
        if not first:
            self.node.restart()
        self.connection = self.node.connect("writer")
        self.numbers = {name: self.open(name) for name in NAMES}

    def ask(self, request: m.Request) -> m.Reply:
        return self.node.call(self.connection, request, float("inf"))

    def open(self, name: str) -> int:
        opened = self.ask(m.OpenNamespace(1, name, {}))
        assert isinstance(opened, m.Opened)
        self.marks.setdefault(name, self.draw.randint(1, 255))
        return opened.namespace

    def put(self, name: str) -> None:
        draw, number, length = self.draw, self.numbers[name], self.draw.choice(LENGTHS)
        keys = [key(n) for n in draw.sample(range(100), draw.randint(1, 8))]
        reserved = self.ask(m.Reserve(2, number, keys, [length]))
        assert isinstance(reserved, m.Reserved)
        grants = [grant for grant in reserved.grants if grant.status == m.GRANTED]
        for grant in grants:
            slot = self.memory_of(grant)
            assert set(np.unique(slot).tolist()) <= {0, self.marks[name]}, "another namespace's bytes"
            slot[: draw.choice((0, 1, length, length))] = self.marks[name]
        slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
        if draw.random() < 0.2:
            self.node.post(self.connection, m.Abort(slots, sequences))
        elif draw.random() < 0.95:  # else it is reserved still when the node restarts
            self.ask(m.Commit(3, slots, sequences, [0] * len(slots)))

    def memory_of(self, grant: m.Grant) -> np.ndarray:  # type: ignore[type-arg]
        slot_bytes = self.node.state.store.slots.slot_bytes(grant.slot)
        return self.node.memory[grant.offset : grant.offset + slot_bytes]

    def step(self) -> None:
        name, chance = self.draw.choice(NAMES), self.draw.random()
        if chance < 0.8:
            self.put(name)
        elif chance < 0.9:
            self.ask(m.Clear(4, self.numbers[name]))
        elif chance < 0.95:
            self.ask(m.DropNamespace(5, name))
            del self.marks[name]
            self.numbers[name] = self.open(name)
        else:
            self.restart()


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_no_namespace_is_granted_a_slot_with_bytes_of_another(seed: int) -> None:
    writers = Writers(seed)
    for _ in range(60):
        writers.step()


def wiped(node: Node) -> int:
    """Bytes that the last step had wiped."""
    rows = [action for action in node.actions if isinstance(action, ReserveRows)]
    return sum(end - start for action in rows for start, end in action.wipe)


def test_one_namespace_has_nothing_wiped_whatever_it_does() -> None:
    node, c, ns = opened(slabs=2, slab_bytes=64 * KIB)
    for n in range(60):
        node.reserve(c, ns, n, length=(4 * KIB, 12 * KIB)[n % 20 > 9])
        assert wiped(node) == 0
        node.disconnect(c)
        c = node.connect()
        node.put(c, ns, n, length=(4 * KIB, 12 * KIB)[n % 20 > 9])
    node.send(c, m.Clear(9, ns))
    node.reserve(c, ns, *range(10))
    assert wiped(node) == 0


@pytest.mark.parametrize("length", [100, 4 * KIB], ids=["short", "full"])
def test_a_slot_that_changes_hands_is_wiped_whole_and_once(length: int) -> None:
    node = Node(slabs=1, slab_bytes=16 * KIB)
    c = node.connect()
    a, b = node.open(c, "a"), node.open(c, "b")
    node.put(c, a, 1, 2, 3, 4, length=length)
    node.reserve(c, b, 5, 6, length=length)
    assert wiped(node) == 8 * KIB
    node.disconnect(c)
    c = node.connect()
    node.reserve(c, b, 5, 6, length=length)
    assert wiped(node) == 0
