"""Bounds of open waits."""

from __future__ import annotations

from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import key, opened


def test_keys_of_open_waits_are_bounded_by_connection_and_by_node() -> None:
    node, first, namespace = opened(max_waited_keys=10)
    next_key = iter(range(1000))

    def wait(connection: int, keys: int) -> int:
        """The request's id."""
        request = m.Wait(node.next_id(), namespace, [key(next(next_key)) for _ in range(keys)], 5.0)
        node.send(connection, request)
        return request.id

    def is_open(connection: int, request_id: int) -> bool:
        return request_id in node.state.sessions[connection].waiters

    assert is_open(first, wait(first, 9))
    assert not is_open(first, wait(first, 2))
    assert is_open(first, wait(first, 1))
    others = [node.connect() for _ in range(4)]
    for other in others:
        node.open(other, "innocent", model="m")
    assert [is_open(other, wait(other, 10)) for other in others] == [True, True, True, False]
    node.disconnect(first)
    assert is_open(others[3], wait(others[3], 10))
    assert node.state.sessions[others[3]].waited_keys == 10
