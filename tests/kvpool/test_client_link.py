"""The breaker before a node: one failure ends all asking, a probe in the background begins it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.errors import PoolRefused, PoolTimeout, PoolUnavailable, StartupError
from pdserve.kvpool import messages as m
from pdserve.kvpool.link import NodeLink

SOON_S = 10.0


class Scripted:
    """A connection that opens any namespace; `fail` decides what other calls do."""

    def __init__(self, opens: bool = True) -> None:
        self.welcome = m.Welcome(1, "n", 1, "h", "inproc", 1.0)
        self.closed = False
        self._opens = opens

    def call(self, request: m.Request, deadline: float) -> m.Reply:
        assert isinstance(request, m.OpenNamespace)
        if not self._opens:
            return m.Fault(request.id, "geometry_mismatch", "page_size is 32 here, not 64")
        return m.Opened(request.id, 7)

    def post(self, message: Any) -> None: ...

    def write_pages(self, grants: Any, pages: Any, deadline: float) -> list[int]:
        return []

    def read_pages(self, pins: Any, pages: Any, deadline: float) -> list[int]:
        return []

    def close(self) -> None:
        self.closed = True


class Node:
    """Connects or not, as told; keeps what it handed out."""

    def __init__(self) -> None:
        self.alive = True
        self.opens = True
        self.attempts = 0
        self.made: list[Scripted] = []
        self.attempted = threading.Condition()

    def connect(self, deadline: float) -> Scripted:
        with self.attempted:
            self.attempts += 1
            self.attempted.notify_all()
        if not self.alive:
            raise PoolUnavailable("refused")
        self.made.append(Scripted(self.opens))
        return self.made[-1]


def make(node: Node, limit: int = 2, retry_after_s: float = 0.01) -> NodeLink:
    return NodeLink(
        "n",
        node.connect,
        namespace="ns",
        geometry={},
        limit=limit,
        connect_timeout_s=1.0,
        retry_after_s=retry_after_s,
    )


def soon() -> float:
    return time.monotonic() + SOON_S


def wait_for(condition: Any, conditions: Sequence[threading.Condition]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        with conditions[0]:
            conditions[0].wait(0.01)


def test_connections_are_reused() -> None:
    node = Node()
    link = make(node)
    for _ in range(3):
        with link.borrow(soon()) as opened:
            assert opened.namespace == 7
    assert node.attempts == 1


def test_a_failure_closes_the_connection_and_refuses_at_once_without_the_network() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    with pytest.raises(PoolTimeout), link.borrow(soon()):
        raise PoolTimeout("late")
    assert node.made[0].closed
    assert not link.up
    for _ in range(5):
        with pytest.raises(PoolUnavailable), link.borrow(soon()):
            raise AssertionError("not reached")
    assert node.attempts == 1
    link.close()


def test_a_node_that_came_back_is_found_by_the_probe() -> None:
    node = Node()
    link = make(node)
    node.alive = False
    with pytest.raises(PoolUnavailable), link.borrow(soon()):
        raise AssertionError("not reached")
    wait_for(lambda: node.attempts >= 3, [node.attempted])  # it is being probed
    node.alive = True
    wait_for(lambda: link.up, [node.attempted])
    with link.borrow(soon()):
        pass
    link.close()


def test_idle_connections_of_before_a_failure_are_not_used_after_it() -> None:
    node = Node()
    link = make(node, limit=2)
    with link.borrow(soon()), pytest.raises(PoolUnavailable), link.borrow(soon()):
        raise PoolUnavailable("gone")
    wait_for(lambda: link.up, [node.attempted])
    assert [connection.closed for connection in node.made[:2]] == [True, True]
    link.close()


def test_at_most_limit_operations_run_and_others_wait_for_their_deadline_only() -> None:
    node = Node()
    link = make(node, limit=1)
    with link.borrow(soon()):
        started_s = time.monotonic()
        with pytest.raises(PoolTimeout), link.borrow(time.monotonic() + 0.05):
            raise AssertionError("not reached")
        assert time.monotonic() - started_s < SOON_S
    assert link.up  # a full link is no failed node
    with link.borrow(soon()):
        pass


def test_a_refused_namespace_is_a_refusal_and_closes_the_connection() -> None:
    node = Node()
    node.opens = False
    link = make(node, retry_after_s=60.0)
    with pytest.raises(PoolRefused, match="page_size is 32"), link.borrow(soon()):
        raise AssertionError("not reached")
    assert node.made[0].closed
    link.close()


def test_a_closed_link_refuses_and_closes_what_is_given_back() -> None:
    node = Node()
    link = make(node)
    with link.borrow(soon()):
        link.close()
    assert node.made[0].closed
    with pytest.raises(PoolUnavailable), link.borrow(soon()):
        raise AssertionError("not reached")


def test_any_exception_inside_an_operation_closes_its_connection() -> None:
    node = Node()
    link = make(node)
    with pytest.raises(ValueError, match="bug"), link.borrow(soon()):
        raise ValueError("bug")
    assert node.made[0].closed
    assert link.up


def test_a_late_failure_of_an_old_connection_does_not_end_a_node_that_is_up_again() -> None:
    node = Node()
    link = make(node, limit=2)

    def slow() -> None:
        with link.borrow(soon()):
            with pytest.raises(PoolUnavailable), link.borrow(soon()):
                raise PoolUnavailable("gone")
            wait_for(lambda: link.up, [node.attempted])
            raise PoolTimeout("late")

    with pytest.raises(PoolTimeout):
        slow()
    assert link.up
    link.close()


def test_who_waited_for_a_connection_of_a_node_that_failed_does_not_try_it() -> None:
    node = Node()
    link = make(node, limit=1, retry_after_s=60.0)
    outcome: list[str] = []

    def wait() -> None:
        try:
            with link.borrow(soon()):
                pass
        except PoolUnavailable as error:
            outcome.append(str(error))

    waiter = threading.Thread(target=wait)

    def fail() -> None:
        with link.borrow(soon()):
            waiter.start()
            raise PoolTimeout("late")

    with pytest.raises(PoolTimeout):
        fail()
    waiter.join(SOON_S)
    assert outcome == ["pool node n is down"]
    assert node.attempts == 1
    link.close()


def test_a_deadline_that_is_over_is_not_held_against_the_node() -> None:
    node = Node()
    link = make(node)
    with pytest.raises(PoolTimeout), link.borrow(time.monotonic() - 1):
        raise AssertionError("not reached")
    assert link.up
    assert node.attempts == 0


def test_the_probe_survives_what_it_does_not_expect() -> None:
    node = Node()
    link = make(node)
    with pytest.raises(PoolTimeout), link.borrow(soon()):
        raise PoolTimeout("late")
    fine, tries = node.connect, []

    def broken(deadline: float) -> Scripted:
        tries.append(deadline)
        if len(tries) < 3:
            raise StartupError("UCX cannot be loaded")
        return fine(deadline)

    link._connect = broken
    wait_for(lambda: link.up, [node.attempted])
    link.close()


def test_a_connection_opened_while_the_link_closes_is_closed() -> None:
    node = Node()
    link = make(node)
    fine = node.connect

    def closing(deadline: float) -> Scripted:
        link._closed.set()  # between the check and the connection
        return fine(deadline)

    link._connect = closing
    with link.borrow(soon()):
        pass
    assert node.made[0].closed
