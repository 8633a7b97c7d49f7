"""A node with two tiers through clears, drops, kills and reboots: pages said to be gone never come back."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.node.config.node import PoolNodeConfig, TierConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.testing.inproc import InprocNode
from tests.support.kvpool.tier_tools import KIB, key
from tests.support.suite.extended import examples

LENGTH = 4 * KIB
WAIT_S = 20.0
NAMES = ["a", "b"]
KEYS = range(6)


def copy_if_there(source: str, target: str) -> None:
    """The node goes on while its files are copied."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


class Restarts(RuleBasedStateMachine):
    """Each page says how often its namespace had been voided when it was written: its age.

    `ages`: those that a page of the namespace may have. `stored`: keys that must be found after a reboot.
    `lists`: of each tier that may keep a list of namespaces, the boot that wrote it last, and the ages by it.
    A tier that was away does not hear of what is voided meanwhile: when it comes back without the tier that
    has the newer list, its own list counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.directory = self.root / "0"
        self.copies = 0
        self.age = 0
        self.ages: dict[str, set[int]] = {name: {0} for name in NAMES}
        self.written: dict[str, set[int]] = {name: set() for name in NAMES}
        self.stored: dict[str, set[int]] = {name: set() for name in NAMES}
        self.listed = True  # the list of namespaces can be written
        self.boots = 0
        self.lists: dict[int, tuple[int, dict[str, set[int]]]] = {}

    @initialize()
    def start(self) -> None:
        self.boot((0, 1))

    def boot(self, tiers: tuple[int, ...]) -> None:
        """A node whose memory is new."""
        self.boots += 1
        kinds = [("ssd", {"segment_bytes": 64 * KIB}), ("directory", {})]
        self.tiers = tiers
        self.config = PoolNodeConfig(
            promotion_timeout_s=WAIT_S,
            tiers=[
                TierConfig(
                    kind=kinds[n][0],
                    path=self.directory / kinds[n][0],
                    capacity_bytes=KIB * KIB,
                    write="all" if n == tiers[0] else "cold",
                    options=kinds[n][1],  # type: ignore[arg-type]
                )
                for n in tiers
            ],
        )
        self.node = InprocNode("n0", TableLayout(256 * KIB, 64 * KIB, LENGTH), Limits(), self.config)
        self.connect()

    def connect(self) -> None:
        self.ids = 0
        self.connection = self.node.connect("test")
        self.until(lambda: self.node.state.tiers.ready)
        self.numbers = {name: self.open(name) for name in NAMES}

    def ask(self, request: m.Request) -> m.Reply:
        return self.node.call(self.connection, request, time.monotonic() + WAIT_S)

    def id(self) -> int:
        self.ids += 1
        return self.ids

    def open(self, name: str) -> int:
        reply = self.ask(m.OpenNamespace(self.id(), name, {"g": "1"}))
        assert isinstance(reply, m.Opened)
        return reply.namespace

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def bytes_of(self, name: str, k: int, age: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.full(LENGTH, 1 + age * 16 + k * 2 + NAMES.index(name), np.uint64).astype(np.uint8)

    # --- what clients do

    @rule(name=st.sampled_from(NAMES), keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def put(self, name: str, keys: set[int]) -> None:
        number, ordered = self.numbers[name], sorted(keys)
        reply = self.ask(m.Reserve(self.id(), number, [key(k) for k in ordered], [LENGTH]))
        assert isinstance(reply, m.Reserved)
        mine = [(k, g) for k, g in zip(ordered, reply.grants, strict=True) if g.status == m.GRANTED]
        for k, grant in mine:
            self.node.memory[grant.offset : grant.offset + LENGTH] = self.bytes_of(name, k, self.age)
        if mine:
            slots, sequences = [g.slot for _, g in mine], [g.sequence for _, g in mine]
            assert isinstance(self.ask(m.Commit(self.id(), slots, sequences, [0] * len(slots))), m.Committed)
        self.ages[name].add(self.age)
        self.written[name] |= keys

    @rule()
    def settle(self) -> None:
        """All pages are in the first tier that there is."""
        want = {name: {key(k) for k in self.written[name]} for name in NAMES}
        self.until(
            lambda: all(
                want[name] <= set(self.node.state.tiers.keys(number)) for name, number in self.numbers.items()
            )
        )
        if self.listed:
            self.until_durable()
            self.stored = {name: set(keys) for name, keys in self.written.items()}

    def until_durable(self) -> None:
        """The list on the disk is the newest: the answer waits for it. An attempt that began before the
        obstacle went may still fail; then the client asks again, as it is told.
        """
        self.until(lambda: isinstance(self.ask(m.DropNamespace(self.id(), "none")), m.Done))

    @rule(name=st.sampled_from(NAMES), drop=st.booleans())
    def void(self, name: str, drop: bool) -> None:
        request = m.DropNamespace(self.id(), name) if drop else m.Clear(self.id(), self.numbers[name])
        reply = self.ask(request)
        self.age += 1
        self.stored[name], self.written[name] = set(), set()
        if isinstance(reply, m.Done):
            self.ages[name] = set()
        else:
            assert isinstance(reply, m.Fault)
            assert (reply.code, self.listed) == ("not_durable", False)
        if drop:
            self.numbers[name] = self.open(name)

    @rule()
    def read(self) -> None:
        """Whatever is found is of an age that counts; what is in memory or was settled is found."""
        for name, number in self.numbers.items():
            reply = self.ask(m.Get(self.id(), number, [key(k) for k in KEYS], [LENGTH]))
            assert isinstance(reply, m.Got)
            for k, pin in zip(KEYS, reply.pins, strict=True):
                if pin.status != m.HIT:
                    assert k not in self.stored[name] | self.written[name]
                    continue
                found = self.node.memory[pin.offset : pin.offset + LENGTH]
                assert any((found == self.bytes_of(name, k, age)).all() for age in self.ages[name])
                self.node.post(self.connection, m.Release([pin.slot], [pin.sequence]))

    # --- what happens to the node

    @rule()
    def kill(self) -> None:
        """The memory stays."""
        self.node.restart()
        self.connect()

    @rule(tiers=st.sampled_from([(0, 1), (0, 1), (0, 1), (0,), (1,), (1, 0)]), crash=st.booleans())
    def reboot(self, tiers: tuple[int, ...], crash: bool) -> None:
        """The memory is lost, the configuration may be another. `crash`: nothing was written in the end."""
        if crash:
            self.copies += 1
            before, self.directory = self.directory, self.root / str(self.copies)
            shutil.copytree(before, self.directory, copy_function=copy_if_there)
        self.node.close()
        if self.tiers[0] != tiers[0]:
            self.stored = {name: set() for name in NAMES}
        self.written = {name: set(keys) for name, keys in self.stored.items()}
        self.lists[self.tiers[0]] = self.boots, self.ages
        if self.listed and not crash:
            for tier in self.tiers[1:]:
                self.lists.pop(tier, None)  # it was removed
        newest = max(
            (self.lists[tier] for tier in tiers if tier in self.lists), key=lambda of: of[0], default=None
        )
        self.ages = {name: set(newest[1][name]) if newest else set() for name in NAMES}
        self.boot(tiers)
        self.read()

    @precondition(lambda self: self.tiers == (0, 1))
    @rule()
    def obstruct(self) -> None:
        """The list cannot be written, or can again."""
        obstacle = self.directory / "ssd" / "namespaces.new"
        if self.listed:
            self.until_durable()  # nothing is being written
            obstacle.mkdir()
        else:
            obstacle.rmdir()
            self.until_durable()
        self.listed = not self.listed

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.close()
        shutil.rmtree(self.root)


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=examples(50), stateful_step_count=20, deadline=None)
