"""The proof of a token by both sides, and what others can do with what they saw of it."""

from __future__ import annotations

import secrets

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PoolRefused
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, Challenged, key_id, prove, without_token
from pdserve.security.tokens import digest

TOKENS = st.text(min_size=1, max_size=200).filter(lambda text: not text.endswith("\0"))
LONG_TOKENS = st.text(min_size=8, max_size=200).filter(
    lambda text: not text.endswith("\0")
)  # nobody hits by chance


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def naming(hello: m.Hello) -> m.Hello:
    """As it is sent."""
    return without_token(hello, nonce())


def hello_with(token: str) -> m.Hello:
    return m.Hello(1, "worker", 7, "host", "shm", token)


@given(TOKENS)
def test_who_knows_the_token_is_accepted_with_what_he_asked_for(token: str) -> None:
    sent = naming(hello_with(token))
    node = Challenged(sent, digest(token), "n0", nonce())
    accepted = node.accept(prove(sent, node.challenge, token))
    assert accepted is not None
    assert accepted.token == token
    assert msgspec.structs.replace(accepted, token="", key_id=b"", nonce=b"") == hello_with("")


@given(TOKENS.filter(lambda token: len(token) > 3))
def test_the_token_is_in_none_of_the_messages(token: str) -> None:
    sent = naming(hello_with(token))
    node = Challenged(sent, digest(token), "n0", nonce())
    proof = prove(sent, node.challenge, token)
    said = b"".join(encode_frame(message) for message in (sent, node.challenge, proof))
    assert token.encode() not in said
    assert digest(token).encode() not in said
    assert bytes.fromhex(digest(token)) not in said


@given(TOKENS, TOKENS)
def test_a_node_that_does_not_know_the_token_gets_no_proof(token: str, other: str) -> None:
    sent = naming(hello_with(token))
    stranger = Challenged(sent, digest(other), "n0", nonce())
    if token != other:
        with pytest.raises(PoolRefused, match="does not know the token"):
            prove(sent, stranger.challenge, token)


@given(LONG_TOKENS, TOKENS)
def test_a_client_that_does_not_know_the_token_is_not_accepted(token: str, guess: str) -> None:
    sent = msgspec.structs.replace(naming(hello_with(guess)), key_id=key_id(digest(token)))
    node = Challenged(sent, digest(token), "n0", nonce())
    forged = Challenged(sent, digest(guess), "n0", nonce()).challenge
    if token != guess:
        assert node.accept(prove(sent, forged, guess)) is None
        assert node.accept(m.Proof(guess.encode())) is None
        assert node.accept(m.Proof(b"")) is None


@pytest.mark.parametrize("changed", ["data_path", "host_id", "node", "version"])
def test_a_proof_is_good_only_for_what_the_client_asked_for(changed: str) -> None:
    """Somebody on the wire who changes the Hello is noticed."""
    other: object = 2 if changed == "version" else "other"
    sent = naming(hello_with("the token"))
    heard = msgspec.structs.replace(sent, **{changed: other})
    with pytest.raises(PoolRefused):
        prove(sent, Challenged(heard, digest("the token"), "n0", nonce()).challenge, "the token")


def test_a_proof_that_was_recorded_is_good_for_no_other_connection() -> None:
    sent = naming(hello_with("the token"))
    first, second = (Challenged(sent, digest("the token"), "n0", nonce()) for _ in range(2))
    proof = prove(sent, first.challenge, "the token")
    assert first.accept(proof) is not None
    assert second.accept(proof) is None


def test_a_challenge_that_was_recorded_is_good_for_no_other_connection() -> None:
    first, second = (naming(hello_with("the token")) for _ in range(2))
    recorded = Challenged(first, digest("the token"), "n0", nonce()).challenge
    with pytest.raises(PoolRefused):
        prove(second, recorded, "the token")


def test_masked_tokens_of_usual_lengths_are_equally_long() -> None:
    def masked(token: str) -> int:
        sent = naming(hello_with(token))
        return len(prove(sent, Challenged(sent, digest(token), "n0", nonce()).challenge, token).masked_token)

    assert masked("t" * 16) == masked("t" * 43) == 64
    assert masked("t" * 65) == 128


def test_without_a_token_nothing_is_named() -> None:
    assert naming(hello_with("")) == hello_with("")
