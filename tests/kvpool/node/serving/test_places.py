"""Which sockets a node keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.node.serving.places import MAX_HALF_FRAMES_BYTES, MIN_GREETING, Places

MIB = 1 << 20


def test_the_oldest_socket_of_the_most_crowded_address_goes() -> None:
    places = Places(max_connections=4)
    assert places.accepted(1, "honest") is None
    for number in range(2, MIN_GREETING + 1):
        assert places.accepted(number, "stranger") is None
    assert [places.accepted(100 + i, "stranger") for i in range(3)] == [2, 3, 4]
    assert places.accepted(200, "honest") == 5
    assert places.sockets == MIN_GREETING


def test_clients_with_a_token_find_places_beside_any_number_without() -> None:
    places = Places(max_connections=8)

    def come(number: int, address: str, *, has_token: bool, tokens_in_use: bool = True) -> bool:
        places.accepted(number, address)
        if places.refusal(number, token="t" * has_token, tokens_in_use=tokens_in_use):
            places.closed(number)
            return False
        places.greeted(number, token="t" * has_token)
        return True

    assert [come(i, "a", has_token=False) for i in range(3)] == [True, True, False], "of one address"
    assert [come(10 + i, f"b{i}", has_token=False) for i in range(3)] == [True, True, False], "of all"
    assert [come(20 + i, "a", has_token=True) for i in range(5)] == [True] * 4 + [False]
    places.closed(0)
    assert come(30, "c", has_token=False)
    places.closed(30)
    assert come(31, "a", has_token=False, tokens_in_use=False)


def test_the_holder_of_one_token_leaves_places_for_those_of_others() -> None:
    places = Places(max_connections=8)

    def come(number: int, token: str, *, operator: bool = False) -> bool:
        places.accepted(number, "a")
        if places.refusal(number, token=token, tokens_in_use=True, operator=operator):
            places.closed(number)
            return False
        places.greeted(number, token=token)
        return True

    assert [come(i, "one") for i in range(8)] == [True] * 6 + [False] * 2
    assert come(10, "other")
    assert come(11, "root", operator=True)
    assert not come(12, "root", operator=True), "all are taken"


def test_the_socket_that_holds_most_of_unfinished_frames_goes() -> None:
    places = Places(max_connections=100)
    assert places.holds(1, 3 * MIB) is None
    left = MAX_HALF_FRAMES_BYTES - 3 * MIB
    assert [places.holds(10 + i, 2 * MIB) for i in range(left // (2 * MIB))] == [None] * (left // (2 * MIB))
    assert places.holds(2, MIB + 1) == 1
    assert places.holds(1, 0) is None
    assert places.half_frames_bytes <= MAX_HALF_FRAMES_BYTES


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("acgh"), st.booleans(), st.integers(0, 9))))
def test_nothing_is_left_of_a_socket_that_is_closed(steps: list[tuple[int, str, bool, int]]) -> None:
    places = Places(max_connections=4)
    open_sockets = set()
    for number, step, has_token, size in steps:
        if step == "a" and number not in open_sockets:
            open_sockets.add(number)
            open_sockets.discard(places.accepted(number, f"address {size % 3}") or -1)
        elif step == "g" and number in open_sockets:
            if not places.refusal(number, token="t" * has_token, tokens_in_use=True):
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
