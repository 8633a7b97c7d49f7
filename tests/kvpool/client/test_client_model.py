"""Both clients over nodes that die, hang up, restart and are upgraded, against what they must answer then.

A node that is healthy and that a client has reached since its last failure must answer exactly. A connection
found closed is no failure, nor is an announced restart: neither may cost a page.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.clients import SOON_S, Blocking, config_of, doors_of, until
from tests.support.kvpool.door import UPGRADING, DoorConnector, Manner
from tests.support.kvpool.faulty import empty_page, holds, keys, page_of

KEYS = keys(24)
NODES = 1  # that the client asks
PATIENT = {f"{what}_timeout_s": SOON_S for what in ("connect", "exists", "get", "put")}

nodes = st.integers(0, NODES - 1)
some_keys = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=12, unique=True)
which = st.sampled_from(["sync", "async"])


class FaultyNodes(RuleBasedStateMachine):
    """The model: which keys are stored, which nodes are healthy, and who has reached them since."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pdserve-doors-"))
        self.doors = doors_of(self.directory, NODES)
        config = config_of(self.doors, restart_wait_s=SOON_S, **PATIENT)
        connector = DoorConnector(self.doors)
        self.sync = PoolClient(config, "ns", {}, connector=connector)
        self.asking = Blocking(config, "ns", {})
        self.clients = {"sync": self.sync, "async": self.asking}
        self.stored: set[int] = set()
        self.dead: set[int] = set()
        self.settled = {(kind, i) for kind in self.clients for i in range(NODES)}

    def teardown(self) -> None:
        if not hasattr(self, "doors"):
            return
        for client in self.clients.values():
            client.close()
        for door in self.doors:
            door.close()
            door.node.check()
        shutil.rmtree(self.directory)

    def owner(self, number: int) -> int:
        return 0

    def certain(self, kind: str, number: int) -> bool:
        """Whether the client's answer for the key can only be one."""
        return number not in self.stored or (kind, self.owner(number)) in self.settled

    def unsettle(self, i: int) -> None:
        self.settled -= {("sync", i), ("async", i)}

    # --- faults

    @rule(i=nodes)
    def hang_up(self, i: int) -> None:
        self.doors[i].hang_up()

    @rule(i=nodes)
    @precondition(lambda self: not self.dead)
    def kill(self, i: int) -> None:
        self.doors[i].kill()
        self.dead.add(i)
        self.unsettle(i)

    @rule()
    @precondition(lambda self: self.dead)
    def restart_and_be_found_again(self) -> None:
        for i in self.dead:
            self.doors[i].restart()
        self.dead.clear()
        self.settle()

    @rule(i=nodes)
    @precondition(lambda self: not self.dead)
    def killed_and_started_between_two_questions(self, i: int) -> None:
        """Its connections here are closed: no failure, and no page is missed."""
        self.doors[i].kill()
        self.doors[i].restart()

    @rule(i=nodes)
    @precondition(lambda self: not self.dead)
    def drop_the_namespace(self, i: int) -> None:
        door = self.doors[i]
        connection = door.node.connect("admin")
        door.node.call(connection, m.DropNamespace(1, "ns"), time.monotonic() + SOON_S)
        door.node.disconnect(connection)
        self.stored = {number for number in self.stored if self.owner(number) != i}
        for kind, client in self.clients.items():
            assert len(client.exists(KEYS)) == len(KEYS), kind  # refused by this node: it opens it again
        self.unsettle(i)
        self.settle()

    @rule(i=nodes, numbers=some_keys, kind=which)
    @precondition(lambda self: not self.dead)
    def ask_while_the_node_is_upgraded(self, i: int, numbers: list[int], kind: str) -> None:
        door = self.doors[i]
        wanted = [(kind, number) for number in numbers if self.certain(kind, number)]
        door.manner = Manner.UPGRADES
        door.hang_up(UPGRADING)
        found: list[list[bool]] = []
        asking = threading.Thread(
            target=lambda: found.append(self.clients[kind].exists([KEYS[n] for _, n in wanted]))
        )
        asking.start()
        door.manner = Manner.SERVES
        asking.join(SOON_S)
        assert found == [[n in self.stored for _, n in wanted]]
        for other in self.clients:
            self.settled.discard((other, i))
        self.settle()

    def settle(self) -> None:
        """Every client reaches every node again, by itself."""
        for kind, client in self.clients.items():
            until(lambda client=client: not any(client.check().values()))  # type: ignore[misc]
            self.settled |= {(kind, i) for i in range(NODES)}

    # --- questions

    @rule(numbers=some_keys, kind=which)
    def exists(self, numbers: list[int], kind: str) -> None:
        found = self.clients[kind].exists([KEYS[n] for n in numbers])
        assert len(found) == len(numbers)
        for number, there in zip(numbers, found, strict=True):
            assert there <= (number in self.stored), "a page that nobody stored"
            assert there == (number in self.stored) or not self.certain(kind, number)

    @rule(numbers=some_keys)
    def wait(self, numbers: list[int]) -> None:
        found = self.asking.wait([KEYS[n] for n in numbers], 0.0)
        for number, there in zip(numbers, found, strict=True):
            assert there == (number in self.stored) or not self.certain("async", number)

    @rule(numbers=some_keys)
    def put(self, numbers: list[int]) -> None:
        stored = self.sync.put([KEYS[n] for n in numbers], [page_of(KEYS[n]) for n in numbers])
        for number, done in zip(numbers, stored, strict=True):
            assert done or ("sync", self.owner(number)) not in self.settled
            if done:
                self.stored.add(number)

    @rule(numbers=some_keys)
    def get(self, numbers: list[int]) -> None:
        pages = [empty_page() for _ in numbers]
        found = self.sync.get([KEYS[n] for n in numbers], pages)
        for number, there, page in zip(numbers, found, pages, strict=True):
            assert there == (number in self.stored) or not self.certain("sync", number)
            assert not there or holds(page, KEYS[number])

    @invariant()
    def nothing_is_held(self) -> None:
        for i, door in enumerate(getattr(self, "doors", [])):
            if i not in self.dead:
                until(lambda door=door: door.node.held == (0, 0, 0))  # type: ignore[misc]


TestClientsOfFaultyNodes = FaultyNodes.TestCase
TestClientsOfFaultyNodes.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
