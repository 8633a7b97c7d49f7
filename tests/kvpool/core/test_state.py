"""What a node decides, action by action."""

from __future__ import annotations

import pytest

from pdserve.kvpool.core.events import (
    Answer,
    AssignSlab,
    CancelTransfers,
    Close,
    CommitRows,
    Connected,
    FreeRows,
    Received,
    ReserveRows,
    SaveNamespaces,
    StartReceive,
    StartSend,
    Tick,
    TransferDone,
)
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key, opened, statuses
from tests.support.kvpool.profiled import calls_of

HIT, MISS = m.HIT, m.MISS
GRANTED, PRESENT, BUSY, FULL, TOO_LARGE = m.GRANTED, m.PRESENT, m.BUSY, m.FULL, m.TOO_LARGE


def test_rows_are_written_before_the_replies_that_tell_of_them() -> None:
    node, c, ns = opened()
    space = node.state.namespaces[ns].space
    actions = node.send(c, m.Reserve(9, ns, [key(1)], [100, 200]))
    [grant] = answers(actions, c)[0].grants  # type: ignore[union-attr]
    assert actions == [
        AssignSlab(0, 4 * KIB),
        ReserveRows([grant.slot], space),
        Answer(c, m.Reserved(9, [grant])),
    ]
    assert node.send(c, commit(10, grant, checksum=5)) == [
        CommitRows([grant.slot], [key(1)], [space], [300], [5], [grant.sequence], node.now_s),
        Answer(c, m.Committed(10, b"\1")),
    ]
    cleared = node.send(c, m.Clear(11, ns))
    assert cleared[:2] == [FreeRows([0]), AssignSlab(0, 0)]
    assert isinstance(cleared[2], SaveNamespaces)
    assert cleared[3:] == [Answer(c, m.Done(11, 1))]


def test_the_slot_of_an_evicted_page_is_reserved_as_it_is() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=8 * KIB)
    old = node.put(c, ns, 1, 2)[0]
    actions = node.send(c, m.Reserve(9, ns, [key(3)], [100]))
    [grant] = answers(actions, c)[0].grants  # type: ignore[union-attr]
    assert (grant.slot, grant.sequence > old.sequence) == (old.slot, True)
    assert actions[:-1] == [ReserveRows([grant.slot], node.state.namespaces[ns].space)]
    assert node.exists(c, ns, 1, 2, 3) == [0, 1, 0]
    assert node.status().counters["evictions"] == node.status().namespaces[0].evictions == 1


def test_full_when_everything_is_pinned_or_reserved() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=16 * KIB)
    reader = node.connect()
    node.put(c, ns, 1, 2)
    pins = node.get(reader, ns, 1, 2)
    assert statuses(node.reserve(c, ns, 3, 4, 5)) == [GRANTED, GRANTED, FULL]
    node.release(reader, *pins)
    assert statuses(node.reserve(c, ns, 5)) == [GRANTED]


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


def test_an_overdue_mapped_reservation_is_quarantined_until_its_writer_stops() -> None:
    node, slow, ns = opened(reservation_lease_s=10)
    other = node.connect()
    [grant] = node.reserve(slow, ns, 1)
    node.pass_time(10)
    status = node.status()
    assert (status.reserved_bytes, status.quarantined_bytes) == (0, 4 * KIB)
    [other_grant] = node.reserve(other, ns, 1)  # the key is free at once, the slot is not
    assert other_grant.slot != grant.slot
    assert node.commit(slow, grant) == [0]
    assert node.status().quarantined_bytes == 0
    assert node.commit(other, other_grant) == [1]


@pytest.mark.parametrize("end", ["abort", "disconnect"])
def test_quarantine_ends_when_the_writer_aborts_or_is_gone(end: str) -> None:
    node, c, ns = opened(reservation_lease_s=10)
    d = node.connect()
    [grant] = node.reserve(c, ns, 1)
    node.pass_time(10)
    if end == "abort":
        node.abort(c, grant)
    else:
        node.disconnect(c)
    assert node.status().quarantined_bytes == 0
    assert statuses(node.reserve(d, ns, 1)) == [GRANTED]


def test_slots_of_a_writer_that_we_hung_up_on_stay_quarantined_for_a_while() -> None:
    node, c, ns = opened(quarantine_s=20)
    other = node.connect()
    node.reserve(c, ns, 1)
    node.disconnect(c, by_peer=False)
    assert node.status().quarantined_bytes == 4 * KIB
    assert statuses(node.reserve(other, ns, 1)) == [GRANTED]
    assert node.state.next_deadline_s == node.now_s + 20
    node.pass_time(20)
    assert node.status().quarantined_bytes == 0


def test_one_connection_may_reserve_only_its_share() -> None:
    node, a, ns = opened(max_reserved_bytes=8 * KIB)
    b = node.connect()
    grants = node.reserve(a, ns, 1, 2, 3)
    assert statuses(grants) == [GRANTED, GRANTED, FULL]
    assert statuses(node.reserve(b, ns, 3)) == [GRANTED]
    node.commit(a, grants[0])
    assert statuses(node.reserve(a, ns, 4)) == [GRANTED]


# --- waiting


def test_an_endless_wait_ends() -> None:
    node, c, ns = opened()
    node.send(c, m.Wait(50, ns, [key(1)], float("inf")))
    assert len(node.pass_time(601)) == 1


# --- namespaces


def test_dropping_a_namespace_frees_its_pages_ends_its_writes_and_its_number() -> None:
    node, c, ns = opened()
    d = node.connect()
    node.put(c, ns, 1, 2)
    [pin] = node.get(d, ns, 1)
    [grant] = node.reserve(c, ns, 3)
    node.send(d, m.Wait(50, ns, [key(3)], 5))
    actions = node.send(c, m.DropNamespace(51, "ns"))
    assert answers(actions, c) == [m.Done(51, 2)]
    assert answers(actions, d) == [m.Present(50, b"\0")]
    assert any(isinstance(action, SaveNamespaces) for action in actions)
    assert node.ask(d, m.Exists(52, ns, [key(1)]), m.Fault).code == "unknown_namespace"
    assert node.commit(c, grant) == [0]
    assert node.status().used_bytes == 4 * KIB  # the page that is still being read
    node.release(d, pin)
    assert node.status().free_bytes == node.status().capacity_bytes
    assert node.open(c) == ns + 1


# --- UCX


def ucx_node() -> tuple[Node, int, int]:
    node = Node(reservation_lease_s=10, lease_s=10)
    c = node.connect("ucx")
    return node, c, node.open(c)


def test_ucx_receives_are_started_before_the_grant_and_commit_waits_for_them() -> None:
    node, c, ns = ucx_node()
    actions = node.send(c, m.Reserve(9, ns, [key(1), key(2)], [100, 200, 300]))
    [one, two] = answers(actions, c)[0].grants  # type: ignore[union-attr]
    receives = [action for action in actions if isinstance(action, StartReceive)]
    assert receives == [
        StartReceive(c, one.tag, one.offset, (100, 200, 300)),
        StartReceive(c, two.tag, two.offset, (100, 200, 300)),
    ]
    assert actions.index(receives[1]) < len(actions) - 1
    assert two.tag == one.tag + 3
    assert node.do(TransferDone(c, one.tag, True)) == []
    assert answers(node.send(c, commit(10, one, two)), c) == []
    assert node.exists(c, ns, 1, 2) == [1, 0]
    assert answers(node.do(TransferDone(c, two.tag, True)), c) == [m.Committed(10, b"\1\1")]


def test_ucx_an_overdue_receive_is_cancelled_and_freed_when_that_is_done() -> None:
    node, c, ns = ucx_node()
    [grant] = node.reserve(c, ns, 1)
    node.send(c, commit(10, grant))
    actions = node.pass_time(10)
    assert actions == [CancelTransfers(c, (grant.tag,)), Answer(c, m.Committed(10, b"\0"))]
    assert node.status().quarantined_bytes == 4 * KIB
    assert statuses(node.reserve(c, ns, 1)) == [GRANTED]
    node.do(TransferDone(c, grant.tag, False))
    assert node.status().quarantined_bytes == 0


def test_ucx_a_lost_client_keeps_slots_busy_until_its_transfers_are_done() -> None:
    node, c, ns = ucx_node()
    [written] = node.reserve(c, ns, 1)
    node.do(TransferDone(c, written.tag, True))
    node.send(c, commit(9, written))
    [sent] = node.get(c, ns, 1)
    [receiving] = node.reserve(c, ns, 2)
    assert node.disconnect(c) == [CancelTransfers(c, (sent.tag, receiving.tag))]
    assert node.status().quarantined_bytes == 4 * KIB
    other = node.connect()
    node.send(other, m.Clear(11, ns))
    assert node.status().used_bytes == 4 * KIB
    node.do(TransferDone(c, sent.tag, False))
    node.do(TransferDone(c, receiving.tag, True))
    assert node.status().free_bytes == node.status().capacity_bytes


def test_ucx_sends_start_before_the_answer_and_hold_the_page_beyond_its_release() -> None:
    node, c, ns = ucx_node()
    [grant] = node.reserve(c, ns, 1)
    node.do(TransferDone(c, grant.tag, True))
    node.send(c, commit(9, grant))
    actions = node.send(c, m.Get(10, ns, [key(1), key(2)], [2 * KIB, 2 * KIB]))
    pin = answers(actions, c)[0].pins[0]  # type: ignore[union-attr]
    assert actions == [
        StartSend(c, pin.tag, pin.offset, (2 * KIB, 2 * KIB)),
        Answer(c, m.Got(10, [pin, m.Pin(MISS)])),
    ]
    node.release(c, pin)
    node.send(c, m.Clear(11, ns))
    assert node.status().used_bytes == 4 * KIB
    node.do(TransferDone(c, pin.tag, True))
    assert node.status().used_bytes == 0


def test_ucx_leases_that_end_together_cancel_their_sends_at_once() -> None:
    node, c, ns = ucx_node()
    grants = node.reserve(c, ns, 1, 2)
    for grant in grants:
        node.do(TransferDone(c, grant.tag, True))
    node.send(c, commit(9, *grants))
    one, two, again = node.get(c, ns, 1, 2, 1)
    assert node.pass_time(10) == [CancelTransfers(c, (one.tag, two.tag, again.tag))]


# --- bad clients


def test_a_second_hello_closes_the_connection() -> None:
    node = Node()
    c = node.connect()
    assert node.send(c, m.Hello(1, "x", 1, "h")) == [Close(c, "a second Hello")]


def test_requests_of_a_closed_connection_are_passed_over() -> None:
    assert Node().do(Received(99, m.Ping(1))) == []


@pytest.mark.parametrize("checksum", [-1, 1 << 64])
def test_commits_that_contradict_themselves_are_refused(checksum: int) -> None:
    node = Node()
    c = node.connect()
    node.open(c)
    assert node.ask(c, m.Commit(1, [0], [1], [checksum]), m.Fault).code == "bad_request"
    assert node.ask(c, m.Commit(1, [0], [1, 2], [1]), m.Fault).code == "bad_request"


def test_a_connection_without_a_data_path_may_not_reserve() -> None:
    node = Node()
    c = node.connect("none")
    ns = node.open(c)
    assert node.ask(c, m.Reserve(1, ns, [key(1)], [1]), m.Fault).code == "no_data_path"
    assert node.exists(c, ns, 1) == [0]


def test_a_get_without_a_data_path_pins_pages_and_is_no_read() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=16 * KIB)
    node.put(c, ns, 1)
    holder = node.connect("none")
    pins = node.get(holder, node.open(holder), 1, 2)
    assert [pin.status for pin in pins] == [HIT, MISS]
    assert [type(action) for action in node.actions] == [Answer]  # nothing is sent
    assert (node.status().namespaces[0].hits, node.status().namespaces[0].misses) == (0, 0)
    node.put(c, ns, 3, 4, 5, 6)
    assert node.exists(c, ns, 1) == [1]
    node.release(holder, pins[0])
    node.put(c, ns, 7, 8, 9)
    assert node.exists(c, ns, 1) == [0]


def test_a_tick_costs_nothing_for_connections_of_which_nothing_ends() -> None:
    calls = []
    for connections in (10, 1000):
        node, client, ns = opened()
        node.put(client, ns, 1)
        for number in range(connections):
            node.state.handle(Connected(1000 + number, "shm", "idle", 1), node.now_s)
        node.get(client, ns, 1)
        calls.append(calls_of(lambda: node.state.handle(Tick(), node.now_s + 0.5)))  # noqa: B023
    assert calls[1] <= calls[0] + 10


def test_leases_of_many_connections_end_in_time_each() -> None:
    node, client, ns = opened(lease_s=10.0)
    node.put(client, ns, 1)
    readers = [node.connect() for _ in range(5)]
    for reader in readers:
        node.get(reader, ns, 1)
        node.pass_time(1.0)
    assert node.status().pins == 5
    for left in (4, 3, 2):
        node.pass_time(node.state.next_deadline_s - node.now_s)
        assert node.status().pins == left
    node.get(readers[3], ns, 1)  # it is renewed, and looked at when it would have ended
    node.pass_time(1.0)
    assert node.status().pins == 3
    node.pass_time(10.0)
    assert node.status().pins == 0
