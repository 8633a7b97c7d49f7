"""How many tokens one address may try."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.security.failed_logins import BURST, FORGIVEN_S, MAX_ADDRESSES, MAX_PROVED, FailedLogins

MINE, OTHER = b"key id of a token", b"key id of another"
FAR, NEAR = "192.0.2.9", "192.0.2.10"


def guessed(guesses: FailedLogins, address: str, times: int, now_s: float) -> int:
    """How many of so many guesses the node looked at."""
    looked_at = 0
    for number in range(times):
        if guesses.may_try(address, number.to_bytes(16, "little"), now_s):
            guesses.failed(address, now_s)
            looked_at += 1
    return looked_at


def test_an_address_tries_no_more_tokens_than_its_burst_and_then_one_a_second() -> None:
    guesses = FailedLogins()
    assert guessed(guesses, FAR, 10 * BURST, 0.0) == BURST
    assert guessed(guesses, FAR, 10 * BURST, 5.0) == 5 * FORGIVEN_S
    assert guessed(guesses, NEAR, 1, 5.0) == 1, "another address is not bound by it"
    assert guessed(guesses, FAR, 10 * BURST, 5.0 + BURST / FORGIVEN_S) == BURST


def test_a_right_token_is_not_looked_at_either_from_an_address_that_guesses() -> None:
    """Else the answer would tell it from the wrong ones."""
    guesses = FailedLogins()
    guessed(guesses, FAR, BURST, 0.0)
    assert not guesses.may_try(FAR, MINE, 0.0)
    assert guesses.may_try(FAR, MINE, 1 / FORGIVEN_S)


def test_who_proved_a_token_there_before_is_not_locked_out() -> None:
    guesses = FailedLogins()
    guesses.proved(FAR, MINE)
    guessed(guesses, FAR, BURST, 0.0)
    assert guesses.may_try(FAR, MINE, 0.0)
    assert not guesses.may_try(FAR, OTHER, 0.0)
    assert guesses.may_try(NEAR, MINE, 0.0)


def test_users_who_may_read_the_nodes_memory_have_no_bound() -> None:
    guesses = FailedLogins({"uid 0"})
    assert guessed(guesses, "uid 0", 2 * BURST, 0.0) == 2 * BURST
    assert guessed(guesses, "uid 65534", 2 * BURST, 0.0) == BURST


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.9", "192.0.2.9", True),
        ("192.0.2.9", "192.0.2.10", False),
        ("uid 1", "uid 2", False),
        ("unknown", "unknown", True),
    ],
)
def test_a_host_has_one_bound_for_all_its_addresses_of_ipv6(one: str, other: str, same: bool) -> None:
    guesses = FailedLogins()
    guessed(guesses, one, BURST, 0.0)
    assert guesses.may_try(other, MINE, 0.0) == (not same)


def test_what_is_kept_of_addresses_is_bounded() -> None:
    guesses = FailedLogins()
    guesses.proved(FAR, MINE)
    for number in range(MAX_ADDRESSES + 1):
        guesses.failed(f"uid {number}", 0.0)
    assert len(guesses._failures) == MAX_ADDRESSES
    guessed(guesses, FAR, BURST, 0.0)
    assert guesses.may_try(FAR, MINE, 0.0), "strangers do not crowd out those who proved a token"
    for number in range(MAX_PROVED + 1):
        guesses.proved(NEAR, number.to_bytes(16, "little"))
    assert len(guesses._proved) == MAX_PROVED


@given(st.lists(st.floats(0, 3), max_size=300))
def test_at_no_time_were_more_looked_at_than_the_burst_and_what_was_forgiven(pauses_s: list[float]) -> None:
    guesses, now_s, looked_at = FailedLogins(), 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        looked_at += guessed(guesses, FAR, 3, now_s)
        assert looked_at <= BURST + now_s * FORGIVEN_S + 1e-6
