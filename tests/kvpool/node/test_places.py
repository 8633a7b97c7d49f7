"""Which sockets a node keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.node.admission import MAX_HALF_FRAMES_BYTES, MIN_GREETING, Places

MIB = 1 << 20


def come(places: Places, number: int, token: str = "", address: str = "a", *, operator: bool = False) -> bool:
    """Whether a socket that shows this token may stay."""
    places.accepted(number, address)
    if places.refusal(token=token, operator=operator):
        places.closed(number)
        return False
    places.greeted(number, token=token)
    return True


@pytest.mark.parametrize("greeted", [False, True])
def test_the_oldest_stranger_of_the_most_crowded_address_goes(*, greeted: bool) -> None:
    places = Places(max_connections=4, tokens_in_use=True)

    def accepted(number: int, address: str) -> int | None:
        goes = places.accepted(number, address)
        if greeted:
            places.greeted(number, token="")
        return goes

    assert accepted(1, "honest") is None
    for number in range(2, MIN_GREETING + 1):
        assert accepted(number, "stranger") is None
    assert [accepted(100 + i, "stranger") for i in range(3)] == [2, 3, 4]
    assert accepted(200, "honest") == 5
    assert places.sockets == MIN_GREETING


def test_clients_with_a_token_find_places_beside_any_number_without() -> None:
    places = Places(max_connections=8, tokens_in_use=True)
    assert all(come(places, i) for i in range(2 * MIN_GREETING))
    assert [come(places, 1000 + i, f"token {i // 4}") for i in range(9)] == [True] * 8 + [False]
    assert come(places, 2000), "strangers take no places of clients"


def test_without_tokens_all_who_shake_hands_are_clients() -> None:
    places = Places(max_connections=8, tokens_in_use=False)
    assert [come(places, i) for i in range(9)] == [True] * 8 + [False]


def test_the_holder_of_one_token_leaves_places_for_those_of_others() -> None:
    places = Places(max_connections=8, tokens_in_use=True)
    assert [come(places, i, "one") for i in range(8)] == [True] * 6 + [False] * 2
    assert come(places, 10, "other")
    assert come(places, 11, "root", operator=True)
    assert not come(places, 12, "root", operator=True), "all are taken"


def test_the_socket_that_holds_most_of_unfinished_frames_goes() -> None:
    places = Places(max_connections=100, tokens_in_use=True)
    assert places.holds(1, 3 * MIB) is None
    left = MAX_HALF_FRAMES_BYTES - 3 * MIB
    assert [places.holds(10 + i, 2 * MIB) for i in range(left // (2 * MIB))] == [None] * (left // (2 * MIB))
    assert places.holds(2, MIB + 1) == 1
    assert places.holds(1, 0) is None
    assert places.half_frames_bytes <= MAX_HALF_FRAMES_BYTES


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("acgh"), st.booleans(), st.integers(0, 9))))
def test_nothing_is_left_of_a_socket_that_is_closed(steps: list[tuple[int, str, bool, int]]) -> None:
    places = Places(max_connections=4, tokens_in_use=True)
    open_sockets = set()
    for number, step, has_token, size in steps:
        if step == "a" and number not in open_sockets:
            open_sockets.add(number)
            open_sockets.discard(places.accepted(number, f"address {size % 3}") or -1)
        elif step == "g" and number in open_sockets:
            if not places.refusal(token="t" * has_token):
                places.greeted(number, token="t" * has_token)
        elif step == "h" and number in open_sockets:
            places.holds(number, size)
        elif step == "c":
            open_sockets.discard(number)
            places.closed(number)
        assert places.sockets <= 4 + MIN_GREETING
    for number in range(31):
        places.closed(number)
    assert places.sockets == places.half_frames_bytes == 0
