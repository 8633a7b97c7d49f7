"""A node with two tiers through clears, drops, kills and reboots: pages said to be gone never come back.

What the node promises, and what this model holds it to:

- Pages that were cleared or dropped are not found again by this start of the node, killed or not.
- `Done` says that the list of namespaces in the first tier has the change. No later start that has this tier
  finds the pages again. `not_durable` says that a reboot may bring them back.
- A start that has not written its list yet promises nothing for later ones: an older list still counts then.
  Whether the list was written before a crash depends on timing, so the model looks at the disk of the crash,
  but only while the node has promised nothing: after `Done` the list has to be there.
- A tier that was away does not hear of what is voided meanwhile. If it comes back without the tier that has
  the newer list, its own list counts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.node.config import PoolNodeConfig, TierConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.inproc import InprocNode
from tests.support.kvpool.tier_tools import KIB, key
from tests.support.suite.extended import examples

LENGTH = 4 * KIB
WAIT_S = 20.0
NAMES = ["a", "b"]
KEYS = range(6)
FOLDERS = ["near", "far"]


def copy_what_is_there(source: Path, target: Path) -> None:
    """Copy a folder whose files come and go meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        entries = list(os.scandir(source))
        target.mkdir(mode=0o700, parents=True)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                copy_what_is_there(Path(entry.path), target / entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(entry.path, target / entry.name)


class Restarts(RuleBasedStateMachine):
    """Each page says how many times pages had been voided when it was written: its age.

    `spaces`: a number for each namespace, another one after each clear and drop. `ages`: those that a page
    may have, by space. `stored`: keys that must be found after a reboot. `durable`: the spaces in the list
    that this boot has written, None before it has. `lists`: for each tier that may keep a list, the boot that
    wrote it and its spaces. `obstructed`: tiers that cannot write a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.directory = self.root / "0"
        self.copies = 0
        self.age = 0
        self.last_space = 0
        self.ages: dict[int, set[int]] = {}
        self.spaces = {name: self.new_space() for name in NAMES}
        self.written: dict[str, set[int]] = {name: set() for name in NAMES}
        self.stored: dict[str, set[int]] = {name: set() for name in NAMES}
        self.obstructed: set[int] = set()
        self.boots = 0
        self.durable: dict[str, int] | None = None
        self.lists: dict[int, tuple[int, dict[str, int]]] = {}

    @initialize()
    def start(self) -> None:
        self.boot((0, 1))

    def boot(self, tiers: tuple[int, ...]) -> None:
        """A node whose memory is new."""
        self.boots += 1
        self.tiers = tiers
        self.durable, self.earlier_list = None, self.list_on_disk()
        self.config = PoolNodeConfig(
            promotion_timeout_s=WAIT_S,
            tiers=[
                TierConfig(
                    kind="ssd",
                    path=self.folder(n),
                    capacity_bytes=KIB * KIB,
                    write="all" if n == tiers[0] else "cold",
                    options={"segment_bytes": 64 * KIB},
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

    def folder(self, tier: int) -> Path:
        return self.directory / FOLDERS[tier]

    def list_on_disk(self) -> bytes:
        """What the first tier keeps; each list that is written differs from all before."""
        path = self.folder(self.tiers[0]) / "namespaces.json"
        return path.read_bytes() if path.exists() else b""

    @property
    def listed(self) -> bool:
        """The list of namespaces can be written."""
        return self.tiers[0] not in self.obstructed

    def new_space(self) -> int:
        self.last_space += 1
        self.ages[self.last_space] = set()
        return self.last_space

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
            self.node.post(self.connection, m.Release([], []))  # this node looks at its clock when asked

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
            self.ages[self.spaces[name]].add(self.age)
            slots, sequences = [g.slot for _, g in mine], [g.sequence for _, g in mine]
            assert isinstance(self.ask(m.Commit(self.id(), slots, sequences, [0] * len(slots))), m.Committed)
        self.written[name] |= keys

    @rule()
    def settle(self) -> None:
        """All pages are in tiers. Those in the first one are there after a reboot with it."""
        tiers = self.node.state.tiers
        want = {name: {key(k) for k in self.written[name]} for name in NAMES}
        self.until(lambda: all(want[name] <= set(tiers.keys(n)) for name, n in self.numbers.items()))
        if self.listed:
            self.until_durable()
            first = f"ssd:{self.folder(self.tiers[0])}"
            self.stored = {
                name: {k for k in self.written[name] if tiers.place(n, key(k))[0] == first}
                for name, n in self.numbers.items()
            }

    def until_durable(self) -> None:
        """The list on the disk is the newest: the answer waits for it. An attempt that began before the
        obstacle went may still fail; then the client asks again, as it is told.
        """
        self.until(lambda: isinstance(self.ask(m.DropNamespace(self.id(), "none")), m.Done))
        self.is_durable()

    def is_durable(self) -> None:
        """The first tier has the newest list, and older ones were removed from the others."""
        self.durable = dict(self.spaces)
        for tier in self.tiers[1:]:
            self.lists.pop(tier, None)

    @rule(name=st.sampled_from(NAMES), drop=st.booleans())
    def void(self, name: str, drop: bool) -> None:
        request = m.DropNamespace(self.id(), name) if drop else m.Clear(self.id(), self.numbers[name])
        reply = self.ask(request)
        self.age += 1
        self.stored[name], self.written[name] = set(), set()
        self.spaces[name] = self.new_space()
        if isinstance(reply, m.Done):
            assert self.listed
            self.is_durable()
        else:
            assert isinstance(reply, m.Fault)
            assert reply.code == "not_durable"
            if self.listed:  # a slow disk is no fault of the node; later it has to be durable
                assert "did not answer" in reply.message
                self.until_durable()
        if drop:
            self.numbers[name] = self.open(name)

    @rule()
    def read(self) -> None:
        """What is found was written to the namespace's space; what is in memory or was settled is found."""
        for name, number in self.numbers.items():
            reply = self.ask(m.Get(self.id(), number, [key(k) for k in KEYS], [LENGTH]))
            assert isinstance(reply, m.Got)
            for k, pin in zip(KEYS, reply.pins, strict=True):
                if pin.status != m.HIT:
                    assert k not in self.stored[name] | self.written[name]
                    continue
                found = self.node.memory[pin.offset : pin.offset + LENGTH]
                ages = self.ages[self.spaces[name]]
                assert any((found == self.bytes_of(name, k, age)).all() for age in ages)
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
            self.crash()
        self.node.close()
        if self.listed and not crash:
            self.is_durable()
        if self.durable is not None:
            self.lists[self.tiers[0]] = self.boots, self.durable
        if self.tiers[0] != tiers[0]:
            self.stored = {name: set() for name in NAMES}
        self.written = {name: set(keys) for name, keys in self.stored.items()}
        found = [self.lists[tier] for tier in tiers if tier in self.lists]
        _, newest = max(found, key=lambda of: of[0], default=(0, {}))
        self.spaces = {name: newest[name] if name in newest else self.new_space() for name in NAMES}
        self.boot(tiers)
        self.read()

    def crash(self) -> None:
        """The first tier is copied last: what it has written by then may have been removed from others."""
        self.copies += 1
        before, self.directory = self.directory, self.root / str(self.copies)
        for tier in sorted(range(len(FOLDERS)), key=lambda tier: tier == self.tiers[0]):
            copy_what_is_there(before / FOLDERS[tier], self.folder(tier))
        if self.durable is None and self.list_on_disk() != self.earlier_list:
            self.durable = dict(self.spaces)

    @rule()
    def obstruct(self) -> None:
        """The list cannot be written to the first tier, or can again."""
        tier = self.tiers[0]
        obstacle = self.folder(tier) / "namespaces.new"
        if self.listed:
            self.until_durable()  # nothing is being written
            obstacle.mkdir()
            self.obstructed.add(tier)
        else:
            obstacle.rmdir()
            self.obstructed.remove(tier)
            self.until_durable()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.close()
        shutil.rmtree(self.root)


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=examples(50), stateful_step_count=20, deadline=None)


def walk(*steps: Callable[[Restarts], None]) -> None:
    """These rules in this order, with a read at the end."""
    model = Restarts()
    try:
        model.start()
        for step in steps:
            step(model)
        model.read()
    finally:
        model.teardown()


def test_older_list_of_a_lower_tier_does_not_bring_voided_pages_back() -> None:
    walk(
        lambda model: model.put("a", {1, 2}),
        lambda model: model.settle(),
        lambda model: model.reboot((1,), crash=False),
        lambda model: model.void("a", drop=False),
        lambda model: model.reboot((1, 0), crash=False),
        lambda model: model.until_durable(),
        lambda model: model.reboot((0,), crash=True),
    )
