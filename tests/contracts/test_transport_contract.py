"""What every transport does: the same tests on a node in this process, over mapped memory, UCX and TCP."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK
from pdserve.kvpool.transports.ucx_client import gathers
from tests.support.kvpool.pools import KIB, ProcessPool
from tests.support.kvpool.raw_client import LAYOUTS, PAGE_BYTES, Client, _ids, client, keys, pages_of, same
from tests.support.waiting import soon, until

pytestmark = pytest.mark.long

MakePool = Callable[..., ProcessPool]
LONG_BYTES = 16 * KIB * KIB
HANGS_S = 30.0  # no bound of the product's: after it a test is taken to hang
_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"ns{next(_names)}"


@pytest.fixture(scope="module")
def mortal_pool(make_pool: MakePool) -> ProcessPool:
    """A node of two slabs that tests may kill and start again."""
    return make_pool(capacity_bytes=8 * KIB * KIB)


# --- pages


@pytest.mark.parametrize("written", LAYOUTS, ids=len)
@pytest.mark.parametrize("read", LAYOUTS, ids=len)
def test_what_is_read_is_what_was_written_also_in_other_segments(
    pool: ProcessPool, name: str, written: list[int], read: list[int]
) -> None:
    with client(pool, name, layout=written) as writer, client(pool, name, layout=read) as reader:
        names, pages = keys(3), pages_of(written, 3, seed=2)
        writer.put(names, pages)
        outcomes, got = reader.get([*names, *keys(1)])
        assert outcomes == [OK] * 3 + [-1]
        assert all(same(a, b) for a, b in zip(got, pages, strict=False))
        assert all((segment.base[:32] == 0xEE).all() for segment in got[0])  # nothing beside them was touched


@pytest.mark.parametrize("layout", [[1], [3, 5, 7], [4097, 1], [1 << 20, 300_001]], ids=str)
def test_segments_of_any_length(pool: ProcessPool, name: str, layout: list[int]) -> None:
    with client(pool, name, layout=layout) as c:
        names, pages = keys(3), pages_of(layout, 3, seed=3)
        c.put(names, pages)
        outcomes, got = c.get(names)
        assert outcomes == [OK] * 3
        assert all(same(a, b) for a, b in zip(got, pages, strict=True))


def test_uncommitted_pages_are_not_seen_and_committed_ones_at_once(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as writer, client(pool, name) as reader:
        names, pages = keys(2), pages_of(writer.layout, 2, seed=5)
        grants = writer.reserve(names)
        checksums = writer.connection.write_pages(grants, pages, soon())
        assert reader.exists(names) == [0, 0]
        assert reader.get(names)[0] == [-1, -1]
        assert writer.commit(grants[:1], checksums[:1]) == [1]
        assert reader.exists(names) == [1, 0]
        assert reader.get(names)[0] == [OK, -1]
        writer.abort(grants[1:])


def test_concurrent_writers_and_readers_never_mix_pages_up(pool: ProcessPool, name: str) -> None:
    names, pages = keys(24), pages_of(LAYOUTS[1], 24, seed=8)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with client(pool, name) as c:
            for _ in range(12):
                some = rng.choice(24, 6, replace=False).tolist()
                grants = c.reserve([names[i] for i in some])
                mine = [(i, g) for i, g in zip(some, grants, strict=True) if g.status == m.GRANTED]
                if mine:
                    granted = [g for _, g in mine]
                    sums = c.connection.write_pages(granted, [pages[i] for i, _ in mine], soon())
                    c.commit(granted, sums)
                outcomes, got = c.get([names[i] for i in some])
                for i, outcome, page in zip(some, outcomes, got, strict=True):
                    if outcome == OK and not same(page, pages[i]):
                        failures.append(f"page {i} has another's bytes")
                    if outcome not in (OK, -1):
                        failures.append(f"page {i}: outcome {outcome}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    with client(pool, name) as c:
        assert c.status().pins == 0


# --- checksums


def test_a_flipped_bit_is_found_and_discarding_the_page_makes_it_a_miss(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as c:
        names = keys(2)
        grants = c.put(names, pages_of(c.layout, 2, seed=9))
        pool.flip_bit(grants[0].offset + PAGE_BYTES // 2)
        assert c.get(names)[0] == [CORRUPT, OK]
        discard = m.Discard(next(_ids), c.namespace, names[:1], [grants[0].sequence])
        assert c.ask(discard, m.Done).count == 1
        assert c.get(names)[0] == [-1, OK]


def test_with_checksums_off_nothing_is_computed_or_checked(pool: ProcessPool, name: str) -> None:
    with client(pool, name, checksum=False) as off, client(pool, name) as on:
        unchecked, checked = keys(1), keys(1)
        grants = off.reserve(unchecked)
        assert off.connection.write_pages(grants, pages_of(off.layout, 1, seed=10), soon()) == [0]
        assert off.commit(grants, [0]) == [1]
        written = on.put(checked, pages_of(on.layout, 1, seed=11))
        for grant in (*grants, *written):
            pool.flip_bit(grant.offset)
        assert off.get(unchecked + checked)[0] == [OK, OK]
        assert on.get(unchecked + checked)[0] == [OK, CORRUPT]


# --- leases and clients that go away


def test_a_page_whose_lease_ended_during_the_read_is_lost_and_never_wrong(
    make_pool: MakePool, transport: str, name: str
) -> None:
    """The page is longer than what sockets buffer, so over UCX and TCP its send cannot end before the read
    begins.
    """
    layout = [LONG_BYTES]
    small = make_pool(capacity_bytes=2 * LONG_BYTES, page_bytes=LONG_BYTES, lease_s=0.2)
    with client(small, name, layout=layout) as reader, client(small, name, layout=layout) as writer:
        names, [other] = keys(1), pages_of(layout, 1, seed=13)
        writer.put(names, pages_of(layout, 1, seed=12))
        [pin] = reader.pin(names)

        def evicted() -> bool:
            granted = [grant for grant in writer.reserve(keys(2)) if grant.status == m.GRANTED]
            checksums = writer.connection.write_pages(granted, [other] * len(granted), soon())
            writer.commit(granted, checksums)
            return writer.exists(names) == [0]

        until(evicted, "the page outlived its lease")
        until(lambda: reader_slot_reused(writer, pin), "the slot was not used again")
        target = pages_of(layout, 1)
        if transport in ("ucx", "tcp", "tcp-tls"):  # the node cancelled its send
            with pytest.raises(PoolUnavailable):
                reader.connection.read_pages([pin], target, soon())
        else:
            assert reader.connection.read_pages([pin], target, soon()) == [LOST]


def test_a_reader_that_holds_nothing_has_nothing_to_release(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as c:
        names, pages, target = keys(3), pages_of(c.layout, 3, seed=14), pages_of(c.layout, 3)
        c.put(names, pages)
        got = c.ask(m.Get(next(_ids), c.namespace, names, c.layout, hold=False), m.Got)
        assert not got.held
        assert c.connection.read_pages(got.pins, target, soon()) == [OK] * 3
        assert all(same(a, b) for a, b in zip(target, pages, strict=True))
        until(lambda: c.status().pins == 0, "a pin was left")


def reader_slot_reused(writer: Client, pin: m.Pin) -> bool:
    grants = writer.reserve(keys(2))
    writer.abort([grant for grant in grants if grant.status == m.GRANTED])
    return any(grant.slot == pin.slot for grant in grants if grant.status == m.GRANTED)


def test_a_page_that_was_not_written_shows_nothing_of_another_namespace(
    mortal_pool: ProcessPool, transport: str, name: str
) -> None:
    if transport.startswith("tcp"):
        pytest.skip("over TCP a page that is not whole is never committed: tests/kvpool/node/tcp")
    pool = mortal_pool
    for stage in ("evicted", "dropped", "of another class", "restarted"):
        with client(pool, f"{name}-theirs") as theirs:
            names = keys(8 * KIB * KIB // PAGE_BYTES)
            theirs.put(names, pages_of(theirs.layout, len(names), seed=2))
            if stage != "evicted":
                theirs.ask(m.Clear(next(_ids), theirs.namespace), m.Done)
        if stage == "restarted":
            pool.kill()
            pool.restart()
        layout = [PAGE_BYTES + 256 * KIB] if stage == "of another class" else None
        with client(pool, f"{name}-{stage}", layout=layout, checksum=False) as mine:
            names = keys(8)
            grants = mine.reserve(names)
            assert [grant.status for grant in grants] == [m.GRANTED] * 8
            write_one_byte_at_most(mine, grants)
            assert mine.commit(grants, [0] * 8) == [1] * 8
            outcomes, pages = mine.get(names)
            assert outcomes == [OK] * 8
            assert not any(segment[1:].any() for page in pages for segment in page), stage
            mine.ask(m.Clear(next(_ids), mine.namespace), m.Done)


def write_one_byte_at_most(writer: Client, grants: list[m.Grant]) -> None:
    """A node that receives cannot tell a short message; into mapped memory nothing need be written."""
    link = getattr(writer.connection, "_link", None)
    if link is None:
        return
    byte = np.ones(1, np.uint8)
    segments = 1 if gathers(writer.layout) else len(writer.layout)
    operations = [link.send(byte, grant.tag + i) for grant in grants for i in range(segments)]
    while not all(operation.completed for operation in operations):
        link.progress()


def test_what_a_lost_writer_reserved_is_reclaimed(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as other:
        names = keys(3)
        with client(pool, name) as dying:
            dying.connection.write_pages(dying.reserve(names), pages_of(dying.layout, 3, seed=16), soon())
            dying.pin(keys(1))
        until(
            lambda: other.status().reserved_bytes + other.status().quarantined_bytes == 0,
            "bytes of a lost writer stay reserved",
        )
        assert other.exists(names) == [0, 0, 0]
        other.put(names, pages_of(other.layout, 3, seed=17))


def test_an_overdue_reservation_can_never_be_committed(make_pool: MakePool, name: str) -> None:
    pool = make_pool(lease_s=0.2)
    with client(pool, name) as slow, client(pool, name) as other:
        names = keys(1)
        grants = slow.reserve(names)

        def free_again() -> bool:
            return [grant.status for grant in other.reserve(names)] == [m.GRANTED]

        until(free_again, "the key stays busy after its reservation's lease")
        try:
            slow.connection.write_pages(grants, pages_of(slow.layout, 1, seed=18), soon(2))
            assert slow.commit(grants, [1]) == [0]
        except PoolError:
            pass  # over UCX the receive was cancelled
        assert other.exists(names) == [0]


# --- waiting


def test_wait_wakes_when_the_last_page_is_committed(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as writer, client(pool, name) as waiting:
        names, pages = keys(2), pages_of(writer.layout, 2, seed=19)
        writer.put(names[:1], pages[:1])
        masks: list[bytes] = []

        def wait() -> None:
            request = m.Wait(next(_ids), waiting.namespace, names, HANGS_S * 2)
            masks.append(waiting.ask(request, m.Present, HANGS_S * 2).mask)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: writer.status().waiters == 1, "the wait did not arrive")
        writer.put(names[1:], pages[1:])
        thread.join(HANGS_S)
        assert masks == [b"\1\1"]
        assert waiting.get(names)[0] == [OK, OK]


# --- nodes that stop, die, come back


def test_deadlines_hold_while_the_node_is_paused(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as a, client(pool, name) as b:
        names = keys(1)
        a.put(names, pages_of(a.layout, 1, seed=22))
        pins = a.pin(names)
        pool.pause()
        try:
            with pytest.raises(PoolTimeout):
                b.connection.call(m.Ping(next(_ids)), soon(0.3))
            try:
                outcomes = a.connection.read_pages(pins, pages_of(a.layout, 1), soon(0.3))
                assert outcomes == [OK]  # mapped memory needs no node
            except PoolTimeout:
                pass
            with pytest.raises((PoolTimeout, PoolUnavailable)):
                b.connection.call(m.Ping(next(_ids)), soon(0.3))  # broken by the first
        finally:
            pool.resume()
    with client(pool, name) as c:
        assert c.get(names)[0] == [OK]


def test_a_node_that_dies_is_unavailable_and_keeps_its_pages(mortal_pool: ProcessPool, name: str) -> None:
    with client(mortal_pool, name) as c, client(mortal_pool, name) as waiting:
        names, pages = keys(8), pages_of(c.layout, 8, seed=23)
        c.put(names, pages)
        unfinished = keys(2)
        c.reserve(unfinished)
        errors: list[PoolError] = []

        def wait() -> None:
            try:
                waiting.connection.call(m.Wait(next(_ids), waiting.namespace, keys(1), 99.0), soon(99.0))
            except PoolError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: c.status().waiters == 1, "the wait did not arrive")
        mortal_pool.kill()
        thread.join(HANGS_S)
        assert [type(error) for error in errors] == [PoolUnavailable]
        with pytest.raises(PoolUnavailable):
            c.ask(m.Ping(next(_ids)), m.Done)
        with pytest.raises(PoolError):
            mortal_pool.connect(timeout_s=1)
    mortal_pool.restart()
    with client(mortal_pool, name) as c:
        outcomes, got = c.get(names)
        assert outcomes == [OK] * 8
        assert all(same(a, b) for a, b in zip(got, pages, strict=True))
        assert c.exists(unfinished) == [0, 0]
        status = c.status()
        assert status.quarantined_bytes > 0
        assert status.counters["recovered_pages"] == 8
        total = status.free_bytes + status.used_bytes + status.reserved_bytes + status.quarantined_bytes
        assert total == status.capacity_bytes


def test_nothing_is_left_behind(pool: ProcessPool, name: str) -> None:
    with client(pool, name) as c:
        until(lambda: c.status().connections == 1, "connections of closed clients")
        status = c.status()
        assert (status.pins, status.waiters, status.reserved_bytes, status.quarantined_bytes) == (0, 0, 0, 0)
