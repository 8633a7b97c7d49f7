"""What a node decides, action by action."""

from __future__ import annotations

import pytest

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key, opened, statuses
from tests.support.kvpool.profiled import calls_of

HIT, MISS = m.HIT, m.MISS
GRANTED, FULL = m.GRANTED, m.FULL


def test_rows_are_written_before_the_replies_that_tell_of_them() -> None:
    node, c, ns = opened()
    space = node.state.namespaces[ns].space
    actions = node.send(c, m.Reserve(9, ns, [key(1)], [100, 200]))
    [grant] = answers(actions, c)[0].grants  # type: ignore[union-attr]
    assert actions == [
        ev.AssignSlab(0, 4 * KIB),
        ev.ReserveRows([grant.slot], space),
        ev.Answer(c, m.Reserved(9, [grant])),
    ]
    assert node.send(c, commit(10, grant, checksum=5)) == [
        ev.CommitRows([grant.slot], [key(1)], [space], [300], [5], [grant.sequence], node.now_s),
        ev.Answer(c, m.Committed(10, b"\1")),
    ]
    cleared = node.send(c, m.Clear(11, ns))
    assert cleared[:2] == [ev.FreeRows([0]), ev.AssignSlab(0, 0)]
    assert isinstance(cleared[2], ev.SaveNamespaces)
    assert cleared[3:] == [ev.Answer(c, m.Done(11, 1))]


def test_exists_is_no_use_of_a_page_but_get_is() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=8 * KIB)
    node.put(c, ns, 1, 2)
    node.exists(c, ns, 1)
    node.put(c, ns, 3)
    assert node.exists(c, ns, 1, 2, 3) == [0, 1, 1]
    node.release(c, *node.get(c, ns, 2))
    node.put(c, ns, 4)
    assert node.exists(c, ns, 2, 3, 4) == [1, 0, 1]


def test_a_new_size_class_takes_over_the_slab_unused_for_longest() -> None:
    node, c, ns = opened(slabs=2, slab_bytes=16 * KIB)
    node.put(c, ns, *range(8))
    node.release(c, *node.get(c, ns, 0))  # the slab of 0..3 is the fresher one now
    node.put(c, ns, 100, length=16 * KIB)
    assert node.exists(c, ns, *range(8)) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert node.status().namespaces[0].evictions == 4


def test_a_busy_class_grows_at_the_cost_of_an_idle_one() -> None:
    node, c, ns = opened(slabs=3, slab_bytes=16 * KIB)
    node.put(c, ns, *range(8))
    for k in range(100, 110):
        node.put(c, ns, k, length=8 * KIB)
    assert node.exists(c, ns, *range(100, 110))[-4:] == [1, 1, 1, 1]
    assert sum(node.exists(c, ns, *range(8))) < 8


def test_takeover_leaves_slabs_alone_that_hold_pins_or_reservations() -> None:
    node, c, ns = opened(slabs=2, slab_bytes=8 * KIB)
    reader = node.connect()
    node.put(c, ns, 1, 2, 3)
    node.get(reader, ns, 1)
    node.reserve(c, ns, 4)
    assert statuses(node.reserve(c, ns, 9, length=8 * KIB)) == [FULL]
    assert node.exists(c, ns, 1, 2, 3) == [1, 1, 1], "a slab with a held page was emptied"


# --- leases


@pytest.mark.parametrize("end", ["commit", "abort", "disconnect", "we hung up"])
def test_an_overdue_mapped_reservation_is_quarantined_until_its_writer_stops(end: str) -> None:
    node, slow, ns = opened(reservation_lease_s=10, quarantine_s=20)
    other = node.connect()
    [grant] = node.reserve(slow, ns, 1)
    if end != "we hung up":
        node.pass_time(10)
    else:
        node.disconnect(slow, by_peer=False)
    assert (node.status().reserved_bytes, node.status().quarantined_bytes) == (0, 4 * KIB)
    [other_grant] = node.reserve(other, ns, 1)  # the key is free at once, the slot is not
    assert other_grant.slot != grant.slot
    assert node.commit(other, other_grant) == [1]
    if end == "commit":
        assert node.commit(slow, grant) == [0]
    elif end == "abort":
        node.abort(slow, grant)
    elif end == "disconnect":
        node.disconnect(slow)
    else:
        node.pass_time(20)
    assert node.status().quarantined_bytes == 0


def test_a_read_renews_the_lease_of_its_own_page_alone() -> None:
    node, c, ns = opened(lease_s=10.0)
    node.put(c, ns, 1, 2)
    node.get(c, ns, 1)
    node.pass_time(6)
    node.get(c, ns, 2)
    node.pass_time(4)
    assert node.status().pins == 1


# --- waiting


def test_an_endless_wait_ends() -> None:
    node, c, ns = opened()
    node.send(c, m.Wait(50, ns, [key(1)], float("inf")))
    assert len(node.pass_time(601)) == 1


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


def test_ucx_pages_that_came_together_are_committed_together_and_one_that_failed_is_not() -> None:
    node = Node()
    c = node.connect("ucx")
    grants = node.reserve(c, node.open(c), 1, 2, 3)
    assert answers(node.send(c, commit(9, *grants)), c) == []
    ends = zip(grants, (True, False, True), strict=True)
    actions = node.do(ev.TransfersDone([ev.TransferDone(c, grant.tag, ok) for grant, ok in ends]))
    [rows] = [one for one in actions if isinstance(one, ev.CommitRows)]
    assert rows.slots == [grants[0].slot, grants[2].slot]
    assert answers(actions, c) == [m.Committed(9, b"\1\0\1")]


# --- bad clients


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (m.Commit(1, [0], [1], [-1]), "bad_request"),
        (m.Commit(1, [0], [1], [1 << 64]), "bad_request"),
        (m.Commit(1, [0], [1, 2], [1]), "bad_request"),
        (m.Reserve(1, 1, [key(1)], [1]), "no_data_path"),
        (m.Get(1, 1, [key(1)], [1]), "no_data_path"),
    ],
)
def test_what_contradicts_itself_or_cannot_be_carried_out_is_refused(request_: m.Request, code: str) -> None:
    node = Node()
    c = node.connect("none")
    ns = node.open(c)
    assert node.ask(c, request_, m.Fault).code == code
    assert node.exists(c, ns, 1) == [0]


def test_a_second_hello_closes_the_connection_and_what_a_closed_one_asks_is_passed_over() -> None:
    node = Node()
    c = node.connect()
    assert node.send(c, m.Hello(1, "x", 1, "h")) == [ev.Close(c, "a second Hello")]
    assert node.do(ev.Received(99, m.Ping(1))) == []


def test_a_tick_costs_nothing_for_connections_of_which_nothing_ends() -> None:
    calls = []
    for connections in (10, 1000):
        node, client, ns = opened()
        node.put(client, ns, 1)
        for number in range(connections):
            node.state.handle(ev.Connected(1000 + number, "shm", "idle", 1), node.now_s)
        node.get(client, ns, 1)
        calls.append(calls_of(lambda: node.state.handle(ev.Tick(), node.now_s + 0.5)))  # noqa: B023
    assert calls[1] <= calls[0] + 10
