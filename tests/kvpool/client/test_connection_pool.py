"""The breaker before a node: one failure ends all asking, a probe in the background begins it again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.errors import PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable, StartupError
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.protocol import messages as m

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
        self.restarting = False
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
        if self.restarting:
            raise PoolRestarting("upgrading")
        self.made.append(Scripted(self.opens))
        return self.made[-1]


def make(node: Node, limit: int = 2, retry_after_s: float = 0.01, restart_wait_s: float = SOON_S) -> NodeLink:
    return NodeLink(
        "n",
        node.connect,
        namespace="ns",
        geometry={},
        limit=limit,
        connect_timeout_s=1.0,
        retry_after_s=retry_after_s,
        restart_wait_s=restart_wait_s,
    )


def soon() -> Deadline:
    return within(SOON_S)


def within(timeout_s: float, restart_wait_s: float = 0.0) -> Deadline:
    return Deadline(time.monotonic() + timeout_s, restart_wait_s)


def wait_for(condition: Any, conditions: Sequence[threading.Condition]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        with conditions[0]:
            conditions[0].wait(0.01)


def test_connections_are_reused() -> None:
    node = Node()
    link = make(node)
    for _ in range(3):
        with link.acquire(soon()) as opened:
            assert opened.namespace == 7
    assert node.attempts == 1


def test_a_failure_closes_the_connection_and_refuses_at_once_without_the_network() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    with pytest.raises(PoolTimeout), link.acquire(soon()):
        raise PoolTimeout("late")
    assert node.made[0].closed
    assert not link.up
    for _ in range(5):
        with pytest.raises(PoolUnavailable), link.acquire(soon()):
            raise AssertionError("not reached")
    assert node.attempts == 1
    link.close()


def test_a_node_that_came_back_is_found_by_the_probe() -> None:
    node = Node()
    link = make(node)
    node.alive = False
    with pytest.raises(PoolUnavailable), link.acquire(soon()):
        raise AssertionError("not reached")
    wait_for(lambda: node.attempts >= 3, [node.attempted])  # it is being probed
    node.alive = True
    wait_for(lambda: link.up, [node.attempted])
    with link.acquire(soon()):
        pass
    link.close()


def test_a_node_that_nobody_could_connect_to_is_tried_more_often() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    node.alive = False
    with pytest.raises(PoolUnavailable), link.acquire(soon()):
        raise AssertionError("not reached")
    wait_for(lambda: node.attempts >= 3, [node.attempted])
    node.alive = True
    wait_for(lambda: link.up, [node.attempted])
    link.close()


def test_idle_connections_of_before_a_failure_are_not_used_after_it() -> None:
    node = Node()
    link = make(node, limit=2)
    with link.acquire(soon()), pytest.raises(PoolUnavailable), link.acquire(soon()):
        raise PoolUnavailable("gone")
    wait_for(lambda: link.up, [node.attempted])
    assert [connection.closed for connection in node.made[:2]] == [True, True]
    link.close()


def test_at_most_limit_operations_run_and_others_wait_for_their_deadline_only() -> None:
    node = Node()
    link = make(node, limit=1)
    with link.acquire(soon()):
        started_s = time.monotonic()
        with pytest.raises(PoolTimeout), link.acquire(within(0.05)):
            raise AssertionError("not reached")
        assert time.monotonic() - started_s < SOON_S
    assert link.up  # a full link is no failed node
    with link.acquire(soon()):
        pass


@pytest.mark.parametrize("failure", [PoolUnavailable, PoolRestarting])
def test_a_node_is_tried_again_though_no_thread_could_be_had_when_it_failed(
    monkeypatch: pytest.MonkeyPatch, failure: type[PoolUnavailable]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    node = Node()
    link = make(node)
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        with pytest.raises(failure), link.acquire(soon()):
            raise failure("gone")
        for _ in range(2):
            with pytest.raises(PoolUnavailable, match="is down"):
                link.check(soon())
    deadline = time.monotonic() + SOON_S
    while not link.up:
        assert time.monotonic() < deadline, "nobody tries the node"
        with contextlib.suppress(PoolUnavailable):
            link.check(soon())
    link.close()


def test_a_refused_namespace_is_a_refusal_and_closes_the_connection() -> None:
    node = Node()
    node.opens = False
    link = make(node, retry_after_s=60.0)
    with pytest.raises(PoolRefused, match="page_size is 32"), link.acquire(soon()):
        raise AssertionError("not reached")
    assert node.made[0].closed
    link.close()


def test_a_closed_link_refuses_and_closes_what_is_given_back() -> None:
    node = Node()
    link = make(node)
    with link.acquire(soon()):
        link.close()
    assert node.made[0].closed
    with pytest.raises(PoolUnavailable), link.acquire(soon()):
        raise AssertionError("not reached")


def test_any_exception_inside_an_operation_closes_its_connection() -> None:
    node = Node()
    link = make(node)
    with pytest.raises(ValueError, match="bug"), link.acquire(soon()):
        raise ValueError("bug")
    assert node.made[0].closed
    assert link.up


def test_a_late_failure_of_an_old_connection_does_not_end_a_node_that_is_up_again() -> None:
    node = Node()
    link = make(node, limit=2)

    def slow() -> None:
        with link.acquire(soon()):
            with pytest.raises(PoolUnavailable), link.acquire(soon()):
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
            with link.acquire(soon()):
                pass
        except PoolUnavailable as error:
            outcome.append(str(error))

    waiter = threading.Thread(target=wait)

    def fail() -> None:
        with link.acquire(soon()):
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
    with pytest.raises(PoolTimeout), link.acquire(within(-1.0)):
        raise AssertionError("not reached")
    assert link.up
    assert node.attempts == 0


def test_the_probe_survives_what_it_does_not_expect() -> None:
    node = Node()
    link = make(node)
    with pytest.raises(PoolTimeout), link.acquire(soon()):
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
    with link.acquire(soon()):
        pass
    assert node.made[0].closed


# --- repeated, because nothing is known to be wrong with the node


def fails_first(times: int, error: Exception, *, answered: bool = False) -> tuple[Any, list[OpenConnection]]:
    """An operation that fails so often, and the connections it was tried on."""
    tried: list[OpenConnection] = []

    def operation(opened: OpenConnection) -> int:
        tried.append(opened)
        opened.answered = answered
        if len(tried) <= times:
            raise error
        return opened.namespace

    return operation, tried


def test_a_connection_found_closed_is_replaced_without_a_failure() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    operation, tried = fails_first(1, PoolUnavailable("closed"))
    assert link.use(soon(), operation) == 7
    assert link.up
    assert [opened.reused for opened in tried] == [True, False]
    assert node.made[0].closed
    assert node.attempts == 2


def test_idle_connections_beside_one_found_closed_are_not_tried_one_after_the_other() -> None:
    node = Node()
    link = make(node, limit=4, retry_after_s=60.0)
    with link.acquire(soon()), link.acquire(soon()), link.acquire(soon()):
        pass
    operation, tried = fails_first(1, PoolUnavailable("closed"))
    assert link.use(soon(), operation) == 7
    assert len(tried) == 2
    assert [connection.closed for connection in node.made] == [True, True, True, False]


def test_only_one_such_connection_is_excused() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    operation, tried = fails_first(2, PoolUnavailable("closed"))
    with pytest.raises(PoolUnavailable):
        link.use(soon(), operation)
    assert len(tried) == 2
    assert not link.up
    link.close()


def test_a_new_connection_that_fails_is_a_failure() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    operation, tried = fails_first(1, PoolUnavailable("closed"))
    with pytest.raises(PoolUnavailable):
        link.use(soon(), operation)
    assert len(tried) == 1
    assert not link.up
    link.close()


def test_a_node_that_does_not_answer_is_not_asked_twice() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    operation, tried = fails_first(1, PoolTimeout("late"))
    with pytest.raises(PoolTimeout):
        link.use(soon(), operation)
    assert len(tried) == 1
    assert not link.up
    link.close()


@pytest.mark.parametrize("answered", [False, True])
def test_what_may_have_had_an_effect_is_repeated_only_if_the_node_had_not_answered(answered: bool) -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    operation, _ = fails_first(1, PoolUnavailable("closed"), answered=answered)
    if answered:
        with pytest.raises(PoolUnavailable):
            link.use(soon(), operation, repeatable=False)
        assert not link.up
    else:
        assert link.use(soon(), operation, repeatable=False) == 7
        assert link.up
    link.close()


def test_an_announced_restart_is_waited_for_by_all_operations_and_is_no_failure() -> None:
    node = Node()
    link = make(node, limit=4, retry_after_s=60.0)
    link.check(soon())
    node.restarting = True
    operation, _ = fails_first(1, PoolRestarting("upgrading"))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(link.use(soon(), operation))) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: node.attempts >= 3, [node.attempted])  # refused, with the same word
    assert found == []
    assert not link.up
    assert link.reachable
    node.restarting = False
    for thread in threads:
        thread.join(SOON_S)
    assert found == [7] * 4
    assert link.up


def test_waiting_for_a_restart_ends_at_the_deadline_that_it_put_off_and_leaves_the_node_alone() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    node.restarting = True
    operation, _ = fails_first(1, PoolRestarting("upgrading"))
    started_s = time.monotonic()
    with pytest.raises(PoolTimeout, match="restarting"):
        link.use(within(0.1, restart_wait_s=0.2), operation)
    assert 0.3 <= time.monotonic() - started_s < 1.3
    assert link.reachable
    node.restarting = False
    wait_for(lambda: link.up, [node.attempted])
    assert link.use(soon(), operation) == 7


def test_operations_begun_before_and_during_a_restart_outlast_their_own_time_out() -> None:
    node = Node()
    link = make(node)
    link.check(soon())
    node.restarting = True
    operation, _ = fails_first(1, PoolRestarting("upgrading"))
    deadlines = [within(0.01, restart_wait_s=SOON_S) for _ in range(3)]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda d=deadline: found.append(link.use(d, operation)))  # type: ignore[misc]
        for deadline in deadlines
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(time.monotonic() > d.at_s - SOON_S for d in deadlines), [node.attempted])
    assert found == []
    node.restarting = False
    for thread in threads:
        thread.join(SOON_S)
    assert found == [7] * 3


def test_a_restart_that_never_ends_costs_its_time_once() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0, restart_wait_s=0.1)
    link.check(soon())
    node.restarting = True
    operation, _ = fails_first(1, PoolRestarting("upgrading"))
    with pytest.raises(PoolUnavailable, match="down"):
        link.use(soon(), operation)
    for _ in range(5):
        with pytest.raises(PoolUnavailable, match="down"):
            link.use(soon(), operation)
    link.close()


def test_who_waits_for_a_restart_is_let_go_when_the_link_closes() -> None:
    node = Node()
    link = make(node, retry_after_s=60.0)
    link.check(soon())
    node.restarting = True
    operation, _ = fails_first(1, PoolRestarting("upgrading"))
    errors: list[PoolUnavailable] = []

    def wait() -> None:
        try:
            link.use(soon(), operation)
        except PoolUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: node.attempts >= 3, [node.attempted])
    link.close()
    thread.join(SOON_S)
    assert len(errors) == 1
