"""Which connection goes when strangers hold too many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.security.connection_limits import ConnectionLimit


def test_the_oldest_of_the_address_that_has_most_goes() -> None:
    connection_limit: ConnectionLimit[int] = ConnectionLimit(4)
    assert [connection_limit.came(number, address) for number, address in enumerate("baab")] == [None] * 4
    assert connection_limit.came(4, "a") == 1
    assert connection_limit.came(5, "c") == 0
    assert sorted(connection_limit) == [2, 3, 4, 5]


def test_one_that_may_not_go_stays_and_the_newest_goes_where_none_may() -> None:
    connection_limit: ConnectionLimit[int] = ConnectionLimit(2)
    connection_limit.came(0, "a")
    connection_limit.came(1, "a")
    assert connection_limit.came(2, "a", lambda one: one == 1) == 1
    assert connection_limit.came(3, "a", lambda _: False) == 3
    assert sorted(connection_limit) == [0, 2]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abc")), max_size=200), st.integers(1, 8))
def test_no_more_are_kept_than_the_bound_and_only_the_largest_address_loses(
    steps: list[tuple[int, str]], most: int
) -> None:
    connection_limit: ConnectionLimit[int] = ConnectionLimit(most)
    model: dict[int, str] = {}
    for one, address in steps:
        if one in model:
            assert connection_limit.left(one) == model.pop(one)
            assert connection_limit.left(one) == connection_limit.address(one) == ""
            continue
        goes = connection_limit.came(one, address)
        model[one] = address
        if goes is not None:
            sizes = Counter(model.values())
            assert sizes[model.pop(goes)] == max(sizes.values())
        assert set(connection_limit) == set(model)
        assert len(connection_limit) == len(model) <= most
