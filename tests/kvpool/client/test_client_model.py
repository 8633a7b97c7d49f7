"""Both clients over a node that dies, hangs up, restarts and is upgraded, against what they must answer then.

A node that is healthy and that a client has reached since its last failure must answer exactly. A connection
found closed is no failure, nor is an announced restart: neither may cost a page.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.errors import PoolError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.clients import config_of, doors_of
from tests.support.kvpool.door import UPGRADING, DoorConnector, Manner
from tests.support.kvpool.faulty import empty_page, holds, keys, page_of
from tests.support.waiting import SOON_S, until

KEYS = keys(24)
PATIENT = {f"{what}_timeout_s": SOON_S for what in ("connect", "exists", "get", "put")}

some_keys = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=12, unique=True)
which = st.sampled_from(["sync", "async"])


class Asking:
    """The asyncio client, whose loop runs while it is asked."""

    def __init__(self, config: PoolClientConfig) -> None:
        self._runner = asyncio.Runner()
        self._inner = self._runner.run(self._make(config))

    async def _make(self, config: PoolClientConfig) -> AsyncPoolClient:
        return AsyncPoolClient(config, "ns", {})

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._runner.run(self._inner.exists(keys))

    def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        return self._runner.run(self._inner.wait(keys, timeout_s))

    def check(self) -> dict[str, PoolError | None]:
        return self._runner.run(self._inner.check())

    def close(self) -> None:
        self._runner.get_loop().call_soon(self._inner.close)
        self._runner.close()


class FaultyNode(RuleBasedStateMachine):
    """The model: which keys are stored, whether the node is healthy, and who has reached it since."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pdserve-doors-"))
        [self.door] = doors_of(self.directory)
        config = config_of([self.door], restart_wait_s=SOON_S, **PATIENT)
        self.sync = PoolClient(config, "ns", {}, connector=DoorConnector([self.door]))
        self.asking = Asking(config)
        self.clients = {"sync": self.sync, "async": self.asking}
        self.stored: set[int] = set()
        self.is_dead = False
        self.settled = set(self.clients)

    def teardown(self) -> None:
        if not hasattr(self, "door"):
            return
        for client in self.clients.values():
            client.close()
        self.door.close()
        self.door.node.check()
        shutil.rmtree(self.directory)

    def certain(self, kind: str, number: int) -> bool:
        """Whether the client's answer for the key can only be one."""
        return number not in self.stored or kind in self.settled

    # --- faults

    @rule()
    def hang_up(self) -> None:
        self.door.hang_up()

    @rule()
    @precondition(lambda self: not self.is_dead)
    def kill(self) -> None:
        self.door.kill()
        self.is_dead = True
        self.settled.clear()

    @rule()
    @precondition(lambda self: self.is_dead)
    def restart_and_be_found_again(self) -> None:
        self.door.restart()
        self.is_dead = False
        self.settle()

    @rule()
    @precondition(lambda self: not self.is_dead)
    def killed_and_started_between_two_questions(self) -> None:
        """Its connections here are closed: no failure, and no page is missed."""
        self.door.kill()
        self.door.restart()

    @rule()
    @precondition(lambda self: not self.is_dead)
    def drop_the_namespace(self) -> None:
        node = self.door.node
        connection = node.connect("admin")
        node.call(connection, m.DropNamespace(1, "ns"), time.monotonic() + SOON_S)
        node.disconnect(connection)
        self.stored.clear()
        for kind, client in self.clients.items():
            assert len(client.exists(KEYS)) == len(KEYS), kind  # refused by the node: it opens it again
        self.settle()

    @rule(numbers=some_keys, kind=which)
    @precondition(lambda self: not self.is_dead)
    def ask_while_the_node_is_upgraded(self, numbers: list[int], kind: str) -> None:
        wanted = [number for number in numbers if self.certain(kind, number)]
        self.door.manner = Manner.UPGRADES
        self.door.hang_up(UPGRADING)
        found: list[list[bool]] = []
        asking = threading.Thread(
            target=lambda: found.append(self.clients[kind].exists([KEYS[n] for n in wanted]))
        )
        asking.start()
        self.door.manner = Manner.SERVES
        asking.join(SOON_S)
        assert found == [[n in self.stored for n in wanted]]
        self.settle()

    def settle(self) -> None:
        """Every client reaches the node again, by itself."""
        for client in self.clients.values():
            until(lambda client=client: not any(client.check().values()))  # type: ignore[misc]
        self.settled = set(self.clients)

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
            assert done or "sync" not in self.settled
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
        if hasattr(self, "door") and not self.is_dead:
            until(lambda: self.door.node.held == (0, 0, 0))


TestClientsOfAFaultyNode = FaultyNode.TestCase
TestClientsOfAFaultyNode.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
