"""Random messages of the protocol, thousands a second, with edge values in every field: digits, long and
exotic text, numbers at the ends of their ranges. Whatever comes, `NodeState.handle` raises nothing, what it
answers can be encoded, what it tells of pages can be told to subscribers, and an innocent client keeps what
it has pinned and reserved.

The messages are made from their own types, so a new message is attacked from the day it is there.
"""

from __future__ import annotations

import os
import random
from typing import Any, get_args

import msgspec
import pytest

from pdserve.errors import FrameError
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.namespaces.catalog import page_tokens
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Drain, GetView, Gossip, ProbePeer, Upgrade
from pdserve.kvpool.protocol.frames import HEADER_BYTES, decode_request, encode_frame
from pdserve.kvpool.protocol.kv_events import Blocks, Told
from pdserve.kvpool.tiers.base import CORRUPT, GONE, LOADED, REFUSED, STORED
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node
from tests.support.kvpool.odd_messages import FLOATS, INTS, message_of
from tests.support.suite.extended import examples

KINDS = [part for kind in get_args(m.Request) for part in (get_args(kind) or (kind,))]
SEEDS = max(examples(80), int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "0")) // 100)  # 400 messages each
RARE = (m.Clear, m.DropNamespace, m.Hello, m.Proof, GetView, Gossip, ProbePeer, Drain, Upgrade)
PATHS: tuple[m.DataPathName, ...] = ("shm", "ucx", "tcp", "none")


class Fuzzed:
    """A node with a tier, four clients and a peer, and a shell that carries out what a node's shell does."""

    def __init__(self, seed: int, rules: Rules, *, innocent: bool) -> None:
        """`innocent`: with a client whose leases outlast the test."""
        self.random = random.Random(seed)
        tiers = (TierSpec("ssd:a", "ssd", 1 << 30, "all"),)
        leases = {"lease_s": 1e6, "reservation_lease_s": 1e6} if innocent else {}
        self.node = Node(slabs=4, slab_bytes=64 * KIB, rules=rules, tiers=tiers, max_waiters=4, **leases)
        self.state = self.node.state
        self.innocent, self.protected = -1, dict[int, int]()
        self.connections: list[int] = []
        self.last = 0
        self.pending: list[Any] = []  # events that the shell owes
        self.namespaces: list[int] = []
        self.held: list[tuple[int, int, int]] = []  # connection, slot and sequence of grants and pins
        self.handle(ev.PagesFound(0, (), 0, last=True))
        if innocent:
            self.protect()
        for path in PATHS:
            self.connect(path)
        self.connect("shm", peer=True)

    def protect(self) -> None:
        """An innocent client holds pages and a reservation, in a namespace that is open to all."""
        client = self.last = self.node.connect()
        namespace = self.innocent = self.node.open(client, "innocent")
        self.node.put(client, namespace, 20, 21)
        held = [*self.node.get(client, namespace, 20, 21), *self.node.reserve(client, namespace, 22)]
        self.protected = {one.slot: one.sequence for one in held}

    def check(self) -> None:
        """The node adds up, and what the innocent client holds lies where it lay."""
        self.state.check()
        for slot, sequence in self.protected.items():
            assert self.state.store.facts.sequence[slot] == sequence

    def connect(self, path: m.DataPathName, *, peer: bool = False) -> None:
        self.last += 1
        self.connections.append(self.last)
        self.handle(ev.Connected(self.last, path, "fuzz", 1, peer, digest("t")))

    def step(self) -> None:
        connection, kind = self.random.choice(self.connections), self.random.choice(KINDS)
        if kind in RARE and self.random.random() < 0.9:
            kind = self.random.choice([m.Reserve, m.Get, m.Exists, m.Commit])
        message = self.aimed(connection, message_of(kind, self.random))
        try:
            received = decode_request(encode_frame(message)[HEADER_BYTES:])
        except FrameError:
            return
        if isinstance(received, m.Clear) and received.namespace == self.innocent:
            return  # everybody may
        self.handle(ev.Received(connection, received))
        chance = self.random.random()
        if chance < 0.05:
            self.node.now_s += self.random.choice([0.01, 1.0, 40.0])
            self.handle(ev.Tick())
        elif chance < 0.3 and self.pending:
            owed = self.pending.pop(self.random.randrange(len(self.pending)))
            if isinstance(owed, ev.TransferDone):
                owed = ev.TransfersDone([owed, *self.ended(self.random.randrange(4))])
            self.handle(owed)

    def ended(self, most: int) -> list[ev.TransferDone]:
        """Further transfers that have ended by now."""
        found = [one for one in self.pending if isinstance(one, ev.TransferDone)][:most]
        self.pending = [one for one in self.pending if one not in found]
        return found

    def aimed(self, connection: int, message: Any) -> Any:
        """The message, mostly at something that is there."""
        known = {}
        if self.random.random() < 0.1:
            return message
        if hasattr(message, "namespace") and self.namespaces:
            known["namespace"] = self.random.choice(self.namespaces)
        if isinstance(message, m.Commit | m.Abort | m.Release):
            mine = [held for held in self.held if held[0] == connection][-4:]
            known |= {"slots": [held[1] for held in mine], "sequences": [held[2] for held in mine]}
            if isinstance(message, m.Commit):
                odd = self.random.choice(INTS)
                known["checksums"] = [odd if odd >= 0 and self.random.random() < 0.2 else 7 for _ in mine]
                known["ages_s"] = (
                    [self.random.choice(FLOATS) for _ in mine] if self.random.random() < 0.5 else []
                )
        return msgspec.structs.replace(message, **known)

    def handle(self, event: Any) -> None:
        for action in self.state.handle(event, self.node.now_s):
            self.carry_out(action)

    def carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Answer():
                encode_frame(action.message)
                self.remember(action.connection, action.message)
            case ev.Close():
                if action.connection in self.connections:
                    place = self.connections.index(action.connection)
                    del self.connections[place]
                    self.pending.append(ev.Disconnected(action.connection, by_peer=False))
                    self.connect(self.random.choice(PATHS), peer=self.random.random() < 0.3)
            case ev.StartSend() | ev.StartReceive():
                slots = self.state.store.slots
                slot_bytes = slots.slab_class[action.offset // slots.slab_bytes]
                assert action.offset % slots.slab_bytes % slot_bytes == 0
                assert sum(action.segment_bytes) <= slot_bytes, "more than the page's own slot"
                self.pending.append(
                    ev.TransferDone(action.connection, action.tag, self.random.random() < 0.8)
                )
            case ev.StorePages():
                slots = tuple(one.slot for one in action.pages)
                statuses = tuple(self.random.choice([STORED, STORED, REFUSED]) for _ in slots)
                self.pending.append(ev.PagesStored(action.tier, slots, statuses, 0, False))
            case ev.LoadPages():
                slots = tuple(one.slot for one in action.pages)
                statuses = tuple(self.random.choice([LOADED, LOADED, CORRUPT, GONE]) for _ in slots)
                self.pending.append(ev.PagesLoaded(action.tier, slots, statuses, tuple(7 for _ in slots)))
            case ev.PagesMoved():
                known = self.state.namespaces
                if action.namespace in known:
                    tokens = page_tokens(known[action.namespace].geometry)
                    Blocks().batch([Told("a", tokens, one, "dram") for one in action.keys], 1.0)
            case ev.OpenSpace():
                assert 1 <= action.facts.item_bytes <= 16
                msgspec.msgpack.encode(action.facts.item_bytes)

    def remember(self, connection: int, reply: m.Reply) -> None:
        if isinstance(reply, m.Opened) and reply.namespace not in self.namespaces:
            self.namespaces = [*self.namespaces[-5:], reply.namespace]
        for one in reply.grants if isinstance(reply, m.Reserved) else ():
            if one.status == m.GRANTED:
                self.held.append((connection, one.slot, one.sequence))
        for pin in reply.pins if isinstance(reply, m.Got) else ():
            if pin.status == m.HIT:
                self.held.append((connection, pin.slot, pin.sequence))
        self.held = self.held[-64:]


@pytest.mark.parametrize("rules", [Rules(), Rules(admin_token=digest("root"))], ids=["open", "guarded"])
def test_no_message_that_can_be_decoded_raises_in_the_node(rules: Rules) -> None:
    for seed in range(SEEDS):
        fuzzed = Fuzzed(seed, rules, innocent=not rules.admin_token and seed % 2 == 1)
        for name in "abc":
            fuzzed.handle(ev.Received(fuzzed.connections[0], m.OpenNamespace(1, name, {})))
        for step in range(400):
            try:
                fuzzed.step()
                if step % 20 == 19:
                    fuzzed.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {step}") from error
        fuzzed.check()
