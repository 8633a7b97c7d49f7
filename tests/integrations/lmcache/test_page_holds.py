"""Holds: pages stay while they are held, and nothing of a hold is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.integrations.lmcache import page_holds
from pdserve.integrations.lmcache.page_holds import PageHolds
from tests.support.kvpool.faulty import PAGE_BYTES, Pool, key, keys, put


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Three nodes; at the end their books are in order and nothing is held."""
    with Pool() as pool:
        yield pool


@pytest.fixture
def held(pool: Pool) -> Iterator[Any]:
    made: list[PageHolds] = []

    def make(**options: Any) -> PageHolds:
        clock = options.pop("clock", None)
        more = {} if clock is None else {"clock": clock}
        made.append(PageHolds(pool.config(**options), "ns", {}, PAGE_BYTES, connector=pool.connector, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pins(pool: Pool) -> int:
    return sum(node.state.status(0, 0.0).pins for node in pool.nodes)


def test_pages_that_are_there_are_held_until_they_are_let_go(pool: Pool, held: Any) -> None:
    put(pool.client(), keys(10))
    ours = held()
    ours.hold([*keys(10), key(99)])
    assert (len(ours), pins(pool)) == (10, 10)
    ours.let_go(keys(4))
    assert (len(ours), pins(pool)) == (6, 6)
    ours.let_go([*keys(10), key(99)])
    assert (len(ours), pins(pool)) == (0, 0)


def test_a_page_that_is_held_twice_is_let_go_twice(pool: Pool, held: Any) -> None:
    put(pool.client(), keys(1))
    ours = held()
    for _ in range(2):
        ours.hold(keys(1))
    ours.let_go(keys(1))
    assert pins(pool) == 1
    ours.let_go(keys(1))
    assert pins(pool) == 0


def test_the_end_of_a_connection_ends_its_holds(pool: Pool, held: Any) -> None:
    put(pool.client(), keys(5))
    ours = held()
    ours.hold(keys(5))
    ours.close()
    assert (len(ours), pins(pool)) == (0, 0)


def test_what_nobody_lets_go_is_forgotten_with_its_lease(pool: Pool, held: Any) -> None:
    put(pool.client(), keys(6))
    now_s = [0.0]
    ours = held(clock=lambda: now_s[0])
    ours.hold(keys(5))
    now_s[0] = 1000.0
    ours.hold(keys(6)[5:])
    assert len(ours) == 1


def test_holds_are_bounded(pool: Pool, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(pool.client(), keys(20))
    monkeypatch.setattr(page_holds, "MAX_HELD", 8)
    ours = held()
    ours.hold(keys(5))
    ours.hold(keys(20))
    assert len(ours) <= 8
    ours.let_go(keys(20))
    assert pins(pool) == 0


def test_nodes_that_are_away_cost_nothing_but_their_holds(pool: Pool, held: Any) -> None:
    put(pool.client(), keys(20))
    pool.nodes[0].stop()
    ours = held()
    ours.hold(keys(20))
    assert 0 < len(ours) < 20
    ours.let_go(keys(20))
