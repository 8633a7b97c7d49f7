"""Random messages of the protocol, thousands a second, with edge values in every field: digits, long and
exotic text, numbers at the ends of their ranges. Whatever comes, `NodeState.handle` raises nothing, what it
answers can be encoded, and what it tells of pages can be told to subscribers.

test_hostile.py looks for harm to others, with a check of the whole node after each message; this test looks
for what nobody thought of, so it must be quick.
"""

from __future__ import annotations

import os
import random
import types
import typing
from typing import Any, get_args, get_origin

import msgspec
import pytest

from pdserve.errors import FrameError
from pdserve.kvpool.core.events import (
    Action,
    Answer,
    Close,
    Connected,
    Disconnected,
    LoadPages,
    OpenSpace,
    PagesFound,
    PagesLoaded,
    PagesMoved,
    PagesStored,
    Received,
    StartReceive,
    StartSend,
    StorePages,
    Tick,
    TransferDone,
)
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.namespaces.catalog import page_tokens
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    Drain,
    GetView,
    Gossip,
    NamespaceSettings,
    ProbePeer,
    PullPages,
    Upgrade,
)
from pdserve.kvpool.protocol.frames import HEADER_BYTES, decode_request, encode_frame
from pdserve.kvpool.protocol.kv_events import Blocks, Told
from pdserve.kvpool.tiers.base import CORRUPT, GONE, LOADED, REFUSED, STORED
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.suite.extended import examples

KINDS = [part for kind in get_args(m.Request) for part in (get_args(kind) or (kind,))]
KEYS = [key(n) for n in range(12)]
INTS = [0, 1, 2, 3, 7, 63, 64, -1, -2, 255, 4 * KIB, 64 * KIB, 1 << 31, 1 << 32, 1 << 40]
INTS += [(1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "b", "c", "9" * 25, "9" * 5000, "float" + "9" * 5000, "int0", "float16", "٣٣", "²", "-1"]
TEXTS += ["x" * 600, "x" * 70_000, "a\nb", "a b ", "..", "\0", "\u202e", "🂡", "NaN", "inf", "lru", "arc"]
TEXTS += ["ttl", "keep", "dram", "ssd", "dram+ssd", "set", digest("t"), "0x10", "1e5", "١" * 5000]
FIELDS = ["dtype", "kv_dtype", "page_size", "parts"]
NUMBERS = [
    "64",
    "9" * 25,
    "9" * 5000,
    "float" + "9" * 5000,
    "int" + "9" * 20,
    "int0",
    "٣٣",
    "²",
    "-1",
    "auto",
]
LENGTHS = [1, 4 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 64 * KIB, 1 << 40, 0, -1]
SEEDS = max(examples(80), int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "0")) // 100)  # 400 messages each
RARE = (m.Clear, m.DropNamespace, m.Hello, m.Proof, GetView, Gossip, ProbePeer, PullPages, Drain, Upgrade)
SETTINGS = [name for name in NamespaceSettings.__struct_fields__ if not name.endswith("_token")]
PATHS: tuple[m.DataPathName, ...] = ("shm", "ucx", "tcp", "none")


def value_of(annotation: Any, name: str, random_: random.Random) -> Any:
    """A value of a field's type, an odd one more often than not."""
    pick = random_.choice
    if name == "geometry" and random_.random() < 0.8:
        return {pick(FIELDS): pick(NUMBERS)}
    if name == "name" and random_.random() < 0.5:
        return f"n{random_.randint(0, 1000)}"
    if name in ("segment_bytes", "lengths"):
        return [pick(LENGTHS) for _ in range(random_.randint(0, 2))]
    if annotation is bytes:
        return pick(KEYS) if random_.random() < 0.9 else random_.randbytes(random_.randint(0, 40))
    if annotation is NamespaceSettings and random_.random() < 0.8:  # one odd value, or all are refused
        odd = pick(SETTINGS)
        hint = typing.get_type_hints(NamespaceSettings)[odd]
        return NamespaceSettings(**{odd: value_of(hint, odd, random_)})
    plain = {int: INTS, str: TEXTS, bool: [False, True], float: FLOATS, type(None): [None]}
    if annotation in plain:
        return pick(plain[annotation])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return [value_of(arguments[0], "", random_) for _ in range(random_.randint(0, 4))]
    if origin is dict:
        return {pick(TEXTS): value_of(arguments[1], "", random_) for _ in range(random_.randint(0, 3))}
    if origin is tuple:
        return tuple(value_of(one, "", random_) for one in arguments)
    if origin is typing.Literal:
        return pick(arguments)
    if origin in (typing.Union, types.UnionType):
        return value_of(pick(arguments), name, random_)
    return message_of(annotation, random_)


HINTS: dict[type, dict[str, Any]] = {}


def message_of(kind: type[Any], random_: random.Random) -> Any:
    hints = HINTS.get(kind) or HINTS.setdefault(kind, typing.get_type_hints(kind))
    defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
    fields = {}
    for name in kind.__struct_fields__:
        if name in defaults and random_.random() < 0.6:
            continue
        fields[name] = value_of(hints[name], name, random_)
    return kind(**fields)


class Fuzzed:
    """A node with a tier, four clients and a peer, and a shell that carries out what a node's shell does."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        tiers = (TierSpec("ssd:a", "ssd", 1 << 30, "all"),)
        self.node = Node(slabs=4, slab_bytes=64 * KIB, rules=rules, tiers=tiers, max_waiters=4)
        self.state = self.node.state
        self.connections: list[int] = []
        self.last = 0
        self.pending: list[Any] = []  # events that the shell owes
        self.namespaces: list[int] = []
        self.held: list[tuple[int, int, int]] = []  # connection, slot and sequence of grants and pins
        self.handle(PagesFound(0, (), 0, last=True))
        for path in PATHS:
            self.connect(path)
        self.connect("shm", peer=True)

    def connect(self, path: m.DataPathName, *, peer: bool = False) -> None:
        self.last += 1
        self.connections.append(self.last)
        self.handle(Connected(self.last, path, "fuzz", 1, peer, digest("t")))

    def step(self) -> None:
        connection, kind = self.random.choice(self.connections), self.random.choice(KINDS)
        if kind in RARE and self.random.random() < 0.9:
            kind = self.random.choice([m.Reserve, m.Get, m.Exists, m.Commit])
        message = self.aimed(connection, message_of(kind, self.random))
        try:
            received = decode_request(encode_frame(message)[HEADER_BYTES:])
        except FrameError:
            return
        self.handle(Received(connection, received))
        chance = self.random.random()
        if chance < 0.05:
            self.node.now_s += self.random.choice([0.01, 1.0, 40.0])
            self.handle(Tick())
        elif chance < 0.3 and self.pending:
            self.handle(self.pending.pop(self.random.randrange(len(self.pending))))

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

    def carry_out(self, action: Action) -> None:
        match action:
            case Answer():
                encode_frame(action.message)
                self.remember(action.connection, action.message)
            case Close():
                if action.connection in self.connections:
                    place = self.connections.index(action.connection)
                    del self.connections[place]
                    self.pending.append(Disconnected(action.connection, by_peer=False))
                    self.connect(self.random.choice(PATHS), peer=self.random.random() < 0.3)
            case StartSend() | StartReceive():
                self.pending.append(TransferDone(action.connection, action.tag, self.random.random() < 0.8))
            case StorePages():
                slots = tuple(one.slot for one in action.pages)
                statuses = tuple(self.random.choice([STORED, STORED, REFUSED]) for _ in slots)
                self.pending.append(PagesStored(action.tier, slots, statuses, 0, False))
            case LoadPages():
                slots = tuple(one.slot for one in action.pages)
                statuses = tuple(self.random.choice([LOADED, LOADED, CORRUPT, GONE]) for _ in slots)
                self.pending.append(PagesLoaded(action.tier, slots, statuses, tuple(7 for _ in slots)))
            case PagesMoved():
                known = self.state.namespaces
                if action.namespace in known:
                    tokens = page_tokens(known[action.namespace].geometry)
                    Blocks().batch([Told("a", tokens, one, "dram") for one in action.keys], 1.0)
            case OpenSpace():
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
        fuzzed = Fuzzed(seed, rules)
        for name in "abc":
            fuzzed.handle(Received(fuzzed.connections[0], m.OpenNamespace(1, name, {})))
        for step in range(400):
            try:
                fuzzed.step()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {step}") from error
        fuzzed.state.check()
