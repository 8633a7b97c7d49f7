"""A node's connections, used by threads: bounded, reused, repeated where that does no harm, waited for.

When the node is tried is in test_node_health.py; here is what the threads make of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.errors import (
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
    RequestRefused,
    StartupError,
)
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.protocol import messages as m
from tests.support.waiting import SOON_S, until

NEVER_S = 600.0


class Scripted:
    """A connection that opens any namespace, or none."""

    def __init__(self, opens: bool = True) -> None:
        self.welcome = m.Welcome(1, "n", 1, "h", "shm", 1.0)
        self.is_mapped = True
        self.closed = False
        self._opens = opens

    def call(self, request: m.Request, deadline_s: float) -> m.Reply:
        assert isinstance(request, m.OpenNamespace)
        if not self._opens:
            return m.Fault(request.id, "geometry_mismatch", "page_size is 32 here, not 64")
        return m.Opened(request.id, 7)

    def call_all(self, requests: Any, deadline_s: float) -> list[m.Reply]:
        return [self.call(request, deadline_s) for request in requests]

    def post(self, message: Any) -> None: ...

    def write_pages(self, grants: Any, pages: Any, deadline_s: float) -> list[int]:
        return []

    def read_pages(self, pins: Any, pages: Any, deadline_s: float) -> list[int]:
        return []

    def close(self) -> None:
        self.closed = True


class Node:
    """Connects or fails as told; keeps the connections that it handed out."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opens = True
        self.attempts = 0
        self.made: list[Scripted] = []
        self.before: Callable[[], None] = lambda: None

    def connect(self, deadline_s: float) -> Scripted:
        self.attempts += 1
        self.before()
        if self.error is not None:
            raise self.error
        self.made.append(Scripted(self.opens))
        return self.made[-1]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def make(node: Node) -> Iterator[Callable[..., NodeLink]]:
    made: list[NodeLink] = []

    def link(limit: int = 2, retry_after_s: float = 0.01, restart_wait_s: float = SOON_S) -> NodeLink:
        one = NodeLink(
            "n",
            node.connect,
            namespace="ns",
            geometry={},
            limit=limit,
            connect_timeout_s=1.0,
            retry_after_s=retry_after_s,
            restart_wait_s=restart_wait_s,
        )
        made.append(one)
        return one

    yield link
    for one in made:
        one.close()


MakeLink = Callable[..., NodeLink]


def soon() -> Deadline:
    return within(SOON_S)


def within(timeout_s: float, restart_wait_s: float = 0.0) -> Deadline:
    return Deadline(time.monotonic() + timeout_s, restart_wait_s)


def fail(link: NodeLink, error: Exception, deadline: Deadline | None = None) -> None:
    """An operation that ends by this error."""

    def operation(_: OpenConnection) -> None:
        raise error

    with pytest.raises((type(error), PoolUnavailable)):  # a restarting node is asked again
        link.use(deadline or soon(), operation)


def check(link: NodeLink, deadline: Deadline) -> None:
    """An operation that does nothing."""
    link.use(deadline, lambda opened: None)


def refused(link: NodeLink, match: str = "is down") -> None:
    with pytest.raises(PoolUnavailable, match=match):
        check(link, soon())


def test_connections_are_reused_and_closed_with_the_link(node: Node, make: MakeLink) -> None:
    link = make()
    for _ in range(3):
        assert link.use(soon(), lambda opened: opened.namespace) == 7
    assert node.attempts == 1
    link.use(soon(), lambda opened: link.close())
    assert node.made[0].closed
    refused(link, "closed")


@pytest.mark.parametrize("error", [PoolTimeout("late"), PoolUnavailable("gone"), PoolRefused("no")])
def test_a_failure_closes_the_connection_and_refuses_at_once_without_the_network(
    node: Node, make: MakeLink, error: PoolError
) -> None:
    link = make(retry_after_s=NEVER_S)
    fail(link, error)
    assert node.made[0].closed
    assert not link.up
    for _ in range(5):
        refused(link)
    assert node.attempts == 1


@pytest.mark.parametrize("error", [PoolUnavailable("refused"), StartupError("UCX cannot be loaded")])
def test_a_node_that_came_back_is_found_whatever_went_wrong_meanwhile(
    node: Node, make: MakeLink, error: Exception
) -> None:
    link = make()

    def late(_: OpenConnection) -> None:
        node.error = error  # from the first try on
        raise PoolTimeout("late")

    with pytest.raises(PoolTimeout):
        link.use(soon(), late)
    until(lambda: node.attempts >= 3)
    node.error = None
    until(lambda: link.up)
    check(link, soon())


def test_at_most_limit_operations_run_and_others_wait_for_their_deadline_only(
    node: Node, make: MakeLink
) -> None:
    link = make(limit=1)

    def meanwhile(_: OpenConnection) -> None:
        for timeout_s in (0.02, -1.0):
            with pytest.raises(PoolTimeout, match="came free"):
                check(link, within(timeout_s))

    link.use(soon(), meanwhile)
    with pytest.raises(PoolTimeout, match="no time was left"):
        check(link, within(-1.0))
    assert link.up  # neither a full link nor a late caller is a failed node
    assert node.attempts == 1


@pytest.mark.parametrize("failure", [PoolUnavailable, PoolRestarting])
def test_a_node_is_tried_again_though_no_thread_could_be_had_when_it_failed(
    monkeypatch: pytest.MonkeyPatch, make: MakeLink, failure: type[PoolUnavailable]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    link = make()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        fail(link, failure("gone"))
        for _ in range(2):
            refused(link)

    def up() -> bool:
        with contextlib.suppress(PoolUnavailable):
            check(link, soon())
        return link.up

    until(up)


def test_a_refused_namespace_is_a_refusal_and_closes_the_connection(node: Node, make: MakeLink) -> None:
    node.opens = False
    link = make(retry_after_s=NEVER_S)
    with pytest.raises(PoolRefused, match="page_size is 32"):
        check(link, soon())
    assert node.made[0].closed


@pytest.mark.parametrize("code", ["overloaded", "unknown_namespace"])
def test_one_refused_request_does_not_take_the_node_from_all_others(
    node: Node, make: MakeLink, code: str
) -> None:
    link = make(retry_after_s=NEVER_S)
    fail(link, RequestRefused("no", code))
    assert link.up
    check(link, soon())
    assert len(node.made) == (1 if code == "overloaded" else 2)  # the second has the namespace's new number
    assert node.made[0].closed == (code != "overloaded")


def test_a_connection_opened_while_the_link_closes_is_closed(node: Node, make: MakeLink) -> None:
    link = make()
    node.before = link.close  # between the check and the connection
    check(link, soon())
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


CLOSED, LATE = PoolUnavailable("closed"), PoolTimeout("late")


@pytest.mark.parametrize(
    ("idle", "times", "error", "answered", "repeatable", "tries"),
    [
        (True, 1, CLOSED, False, True, 2),
        (True, 1, CLOSED, True, True, 2),
        (True, 1, CLOSED, False, False, 2),
        (True, 1, CLOSED, True, False, 0),  # it may have had an effect
        (True, 2, CLOSED, False, True, 0),  # one connection is excused
        (False, 1, CLOSED, False, True, 0),  # a new connection
        (True, 1, LATE, False, True, 0),
    ],
)
def test_only_a_connection_found_closed_is_replaced_without_a_failure_and_once(
    node: Node,
    make: MakeLink,
    idle: bool,
    times: int,
    error: PoolError,
    answered: bool,
    repeatable: bool,
    tries: int,
) -> None:
    """`tries`: after which it succeeds; 0: never."""
    link = make(retry_after_s=NEVER_S)
    if idle:
        check(link, soon())
    operation, tried = fails_first(times, error, answered=answered)
    if tries:
        assert link.use(soon(), operation, repeatable=repeatable) == 7
        assert [opened.reused for opened in tried] == [True, False]
        assert node.made[0].closed
    else:
        with pytest.raises(type(error)):
            link.use(soon(), operation, repeatable=repeatable)
        assert len(tried) == times
    assert link.up == (tries > 0)


def test_idle_connections_beside_one_found_closed_are_not_tried_one_after_the_other(
    node: Node, make: MakeLink
) -> None:
    link = make(limit=4, retry_after_s=NEVER_S)
    link.use(soon(), lambda _: link.use(soon(), lambda _: check(link, soon())))
    operation, tried = fails_first(1, CLOSED)
    assert link.use(soon(), operation) == 7
    assert len(tried) == 2
    assert [connection.closed for connection in node.made] == [True, True, True, False]


# --- restarts


def restarting(node: Node, link: NodeLink) -> Any:
    """The node restarts at the next operation, which is returned."""
    check(link, soon())
    node.error = PoolRestarting("upgrading")
    return fails_first(1, PoolRestarting("upgrading"))[0]


@pytest.mark.parametrize("timeout_s", [SOON_S, 0.01])
def test_an_announced_restart_is_waited_for_by_all_operations_whatever_their_time_and_is_no_failure(
    node: Node, make: MakeLink, timeout_s: float
) -> None:
    link = make(limit=4, retry_after_s=NEVER_S)
    operation = restarting(node, link)
    _, *others = deadlines = [within(SOON_S), *(within(timeout_s, restart_wait_s=SOON_S) for _ in range(3))]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda d=deadline: found.append(link.use(d, operation)))  # type: ignore[misc]
        for deadline in deadlines
    ]
    threads[0].start()
    until(lambda: node.attempts >= 3)  # refused, with the same word
    for thread in threads[1:]:
        thread.start()
    until(lambda: timeout_s == SOON_S or all(time.monotonic() > d.at_s - SOON_S for d in others))
    assert found == []
    assert not link.up
    assert link.reachable
    node.error = None
    for thread in threads:
        thread.join(SOON_S)
    assert found == [7] * 4
    assert link.up


def test_waiting_for_a_restart_ends_at_the_deadline_that_it_put_off_and_leaves_the_node_alone(
    node: Node, make: MakeLink
) -> None:
    link = make(retry_after_s=NEVER_S)
    operation, deadline = restarting(node, link), within(0.02, restart_wait_s=0.05)
    end_s = deadline.at_s + 0.05
    with pytest.raises(PoolTimeout, match="restarting"):
        link.use(deadline, operation)
    assert time.monotonic() >= end_s
    assert link.reachable
    node.error = None
    until(lambda: link.up)
    assert link.use(soon(), operation) == 7


def test_who_waits_for_a_restart_is_let_go_when_the_link_closes(node: Node, make: MakeLink) -> None:
    link = make(retry_after_s=NEVER_S)
    operation = restarting(node, link)
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(PoolUnavailable) as caught:
            link.use(soon(), operation)
        errors.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: node.attempts >= 3)
    link.close()
    thread.join(SOON_S)
    assert errors == ["pool node n: the client is closed"]
