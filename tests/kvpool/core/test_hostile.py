"""Well-formed messages from somebody who means harm: whatever they say, a node answers or ends that
connection, and nothing of the others changes. Every step checks conservation: see node_model.

The messages are made from their own types, so a new message is attacked from the day it is there.
"""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import FrameError
from pdserve.kvpool.core.events import CancelTransfers, Close, StartReceive, StartSend, TransferDone
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import HEADER_BYTES, decode_request, encode_frame
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.kvpool.odd_messages import INTS, KEYS, message_of
from tests.support.kvpool.served import Served
from tests.support.suite.extended import examples

REQUESTS = [kind for kind in get_args(m.Request) if kind is not m.Hello]
PATHS: tuple[m.DataPathName, ...] = ("shm", "ucx", "none")
MANY = m.MAX_PAGES
FLAT = [part for kind in REQUESTS for part in (get_args(kind) or (kind,))]


ANY_REQUEST = st.one_of([st.deferred(lambda kind=kind: message_of(kind)) for kind in FLAT])  # type: ignore[misc]


def through_the_wire(message: m.Request) -> m.Request | None:
    """As a node would receive it; None where the decoder refuses it."""
    try:
        return decode_request(encode_frame(message)[HEADER_BYTES:])
    except (FrameError, OverflowError):
        return None


class Victim:
    """A node on which two innocents have what nobody else may take from them."""

    def __init__(self) -> None:
        self.node = Node(slabs=4, slab_bytes=16 * KIB, lease_s=1e6, reservation_lease_s=1e6, max_waiters=4)
        self.served = served = Served(node=self.node)
        node, one, two = self.node, served.connect(data_path="shm"), served.connect(data_path="ucx")
        self.one = one
        self.hostile = [served.connect(data_path=path) for path in PATHS]
        self.ns = node.open(one.number, "innocent", model="m")
        node.put(one.number, self.ns, 20, 21, 22)
        self.pins = node.get(one.number, self.ns, 20, 21)
        [self.reserved] = node.reserve(one.number, self.ns, 23)
        self.waiting = m.Wait(node.next_id(), self.ns, [key(23)], 500.0)
        node.send(two.number, self.waiting)
        self.transfers: list[tuple[int, int]] = []

    def attack(self, who: int, message: m.Request, ok: bool) -> None:
        served, hostile = self.served, self.hostile[who]
        served.serving.received(hostile, message)
        served.loop.turns()
        for client in served.clients.values():
            for reply in client.sent:
                encode_frame(reply)  # whatever was said can be sent
                assert getattr(reply, "id", 0) >= 0, "the answer to a part"
            assert client is not self.one or not client.sent
            client.sent.clear()
        actions, served.actions = served.actions, []
        for action in actions:
            if isinstance(action, Close):
                assert action.connection == hostile.number
                served.disconnect(hostile, by_peer=False)
                self.hostile[who] = served.connect(data_path=PATHS[who])
            elif isinstance(action, StartSend | StartReceive):
                slots = self.node.state.store.slots
                slot_bytes = slots.slab_class[action.offset // slots.slab_bytes]
                assert action.offset % slots.slab_bytes % slot_bytes == 0
                assert sum(action.segment_bytes) <= slot_bytes, "more than the page's own slot"
                self.transfers.append((action.connection, action.tag))
            elif isinstance(action, CancelTransfers):
                ok = False
        while self.transfers:
            self.node.do(TransferDone(*self.transfers.pop(), ok))

    def innocents_are_whole(self) -> None:
        """What they had pinned lies where it lay, what they reserved can be committed."""
        store = self.node.state.store
        for pin in self.pins:
            assert store.facts.sequence[pin.slot] == pin.sequence
        assert store.facts.sequence[self.reserved.slot] == self.reserved.sequence

    def end(self) -> None:
        for client in self.hostile:
            self.served.disconnect(client)
        self.served.loop.turns()
        self.innocents_are_whole()


# what most is to be had by: pages of the innocents' namespace, in lengths that are not theirs
LENGTHS = st.lists(st.sampled_from([1, 4 * KIB, 8 * KIB, 64 * KIB, 1 << 40]), min_size=1, max_size=2)
OF_PAGES = st.one_of(
    [
        st.builds(kind, id=INTS, namespace=st.just(1), keys=st.lists(KEYS, max_size=6), segment_bytes=LENGTHS)
        for kind in (m.Get, m.Reserve)
    ]
)
MANY_KEYS = KEYS.map(lambda key: [key] * MANY)
LARGE = st.one_of(  # divided into parts
    [
        st.builds(
            kind, id=INTS, namespace=st.just(1), keys=KEYS.map(lambda k: [k] * MANY), segment_bytes=LENGTHS
        )
        for kind in (m.Get, m.Reserve)
    ]
    + [st.builds(lambda n, slot: m.Commit(n, [slot] * MANY, [slot] * MANY, [0] * MANY), INTS, INTS)]
)
AIMED_OR_NOT = st.sampled_from([OF_PAGES, ANY_REQUEST, LARGE]).flatmap(lambda some: some)


@given(st.lists(st.tuples(st.integers(0, 2), AIMED_OR_NOT, st.booleans()), min_size=1, max_size=12))
@settings(max_examples=examples(100), deadline=None)
def test_nothing_that_a_client_can_say_harms_the_node_or_the_others(
    attack: list[tuple[int, m.Request, bool]],
) -> None:
    victim = Victim()
    for who, message, ok in attack:
        received = through_the_wire(message)
        if received is None:
            continue
        if "innocent" in (getattr(received, name, "") for name in ("name", "old", "new")):
            continue
        if getattr(received, "namespace", None) == victim.ns and isinstance(received, m.Clear):
            continue  # open to all here: a right of everybody
        victim.attack(who, received, ok)
        victim.innocents_are_whole()
    victim.end()
