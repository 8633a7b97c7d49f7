"""The control session without a socket: a table of what a node may say, and streams cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.errors import FrameError, PoolError, PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, Challenged
from pdserve.kvpool.transports.session import (
    ControlSession,
    Ended,
    Event,
    Greeted,
    Proving,
    make_hello,
)
from pdserve.security.tokens import digest
from tests.support.suite.extended import examples

HELLO = make_hello("test", "host", "auto")
TOKEN = "the token of this pool"
WITH_TOKEN = make_hello("test", "host", "auto", TOKEN)
WELCOME = m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "shm", 30.0)
SENT = 6  # requests 1 to 6 are sent after the greeting

MESSAGES: st.SearchStrategy[m.Reply] = st.one_of(
    st.builds(m.Done, st.integers(0, SENT + 1), st.integers(0, 9)),
    st.builds(
        m.Fault, st.integers(0, SENT + 1), st.sampled_from(["upgrading", "stopping", "no"]), st.just("why")
    ),
    st.builds(View, st.integers(0, SENT), st.integers(0, 9), st.just([])),
    st.builds(m.Present, st.integers(1, SENT), st.binary(max_size=300)),
    st.just(WELCOME),
)


def session_of(*sent: m.Request) -> ControlSession:
    session = ControlSession("unix:/n", HELLO)
    for request in sent:
        session.send(request)
    return session


def pings() -> list[m.Request]:
    return [m.Ping(n) for n in range(1, SENT + 1)]


def feed(session: ControlSession, pieces: Sequence[bytes]) -> list[str]:
    """What the pieces bring, in words that can be compared."""
    return [said(event) for piece in pieces if piece for event in session.receive(piece)]


def said(event: Event) -> str:
    error = getattr(event, "error", None)
    return f"{type(error).__name__}: {error}" if error is not None else repr(event)


def expected_of(replies: Sequence[m.Reply]) -> list[str]:
    """The table of session.py, once more, in the words of `kinds`."""
    words: list[str] = []
    greeted, open_ids = False, set(range(1, SENT + 1))
    for reply in replies:
        reply_id = getattr(reply, "id", 0)
        restarting = isinstance(reply, m.Fault) and reply.code in ("upgrading", "stopping")
        if not greeted:
            greeted = isinstance(reply, m.Welcome)
            words.append(
                "Greeted"
                if greeted
                else "PoolRestarting"
                if restarting
                else "PoolRefused"
                if isinstance(reply, m.Fault)
                else "FrameError"
            )
        elif reply_id in open_ids:
            open_ids.discard(reply_id)
            words.append("Answered")
        elif reply_id == 0 and isinstance(reply, m.Fault):
            words.append("PoolRestarting" if restarting else "PoolUnavailable")
        else:
            words.append("FrameError")
        if words[-1] not in ("Greeted", "Answered"):
            break
    return words


def kinds(words: Sequence[str]) -> list[str]:
    return [word.partition("(")[0].partition(":")[0] for word in words]


@settings(max_examples=examples(200), deadline=None)
@given(st.booleans(), st.lists(MESSAGES, max_size=12), st.data())
def test_any_splitting_of_what_a_node_says_gives_the_same_events_and_they_are_the_table_s(
    welcomes: bool, later: list[m.Reply], data: st.DataObject
) -> None:
    replies = [WELCOME, *later] if welcomes else later
    stream = b"".join(encode_frame(reply) for reply in replies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, cut = session_of(*pings()), session_of(*pings())
    events = feed(whole, [stream])
    assert feed(cut, pieces) == events
    assert kinds(events) == expected_of(replies)
    ended = kinds(events)[-1:] not in ([], ["Greeted"], ["Answered"])
    assert (whole.ended is not None) == (cut.ended is not None) == ended
    assert whole.greeted == cut.greeted == (kinds(events)[:1] == ["Greeted"])


@settings(max_examples=examples(300), deadline=None)
@given(st.booleans(), st.binary(min_size=1, max_size=200))
@example(True, b"HTTP/1.1 400 Bad Request\r\n\r\n")
@example(True, (5).to_bytes(4, "little") + b"\x95" * 5)
def test_garbage_never_raises_and_ends_the_session_by_a_frame_error_if_at_all(
    greeted: bool, data: bytes
) -> None:
    session = session_of(*pings())
    before = feed(session, [encode_frame(WELCOME)]) if greeted else []
    events = feed(session, [data, data])
    assert all(word.startswith("FrameError") for word in events if "Error" in word)
    assert session.ended is None or isinstance(session.ended, PoolError)
    assert len(before) == greeted
    if session.ended is not None:
        assert feed(session, [encode_frame(WELCOME), b"x"]) == []
        with pytest.raises(PoolUnavailable, match="broken"):
            session.send(m.Ping(99))


@pytest.mark.parametrize(
    ("end", "raised"),
    [
        (PoolTimeout("late"), PoolUnavailable),
        (FrameError("noise"), PoolUnavailable),
        (PoolRestarting("upgrading"), PoolRestarting),
        (PoolUnavailable("gone"), PoolUnavailable),
    ],
)
def test_every_use_after_the_end_raises_and_says_why(end: PoolError, raised: type[PoolError]) -> None:
    session = session_of()
    session.receive(encode_frame(WELCOME))
    assert len(session.fail(end)) == 1
    assert session.fail(PoolUnavailable("again")) == []
    assert session.receive(b"") == session.receive(encode_frame(m.Done(1))) == []
    for use in (lambda: session.send(m.Ping(1)), session.check):
        with pytest.raises(PoolUnavailable, match=str(end)) as caught:
            use()
        assert type(caught.value) is raised


def test_a_reply_comes_once() -> None:
    session = session_of(m.Ping(1))
    frames = [encode_frame(WELCOME), encode_frame(m.Done(1)), encode_frame(m.Done(1))]
    assert kinds(feed(session, frames)) == ["Greeted", "Answered", "FrameError"]


def test_the_end_of_the_stream_is_the_node_s_going() -> None:
    session = session_of(m.Ping(1))
    session.receive(encode_frame(WELCOME)[:-1])
    [event] = session.receive(b"")
    assert said(event).startswith("PoolUnavailable: pool node unix:/n closed the connection before it answer")


def challenged(session: ControlSession, token: str) -> Challenged:
    """The node's side after our Hello, where it knows this token."""
    [hello] = [decode_request(body) for body in FrameBuffer().feed(session.greeting)]
    assert isinstance(hello, m.Hello)
    return Challenged(hello, digest(token), "node", bytes(NONCE_BYTES))


def test_a_node_that_proves_to_know_the_token_gets_the_proof_of_it() -> None:
    session = ControlSession("unix:/s", WITH_TOKEN)
    node = challenged(session, TOKEN)
    [proving] = session.receive(encode_frame(node.challenge))
    assert isinstance(proving, Proving)
    [proof] = [decode_request(body) for body in FrameBuffer().feed(proving.data)]
    assert isinstance(proof, m.Proof)
    accepted = node.accept(proof)
    assert accepted is not None
    assert accepted.token == TOKEN
    assert not session.greeted
    assert session.receive(encode_frame(WELCOME)) == [Greeted(WELCOME)]


@pytest.mark.parametrize("answers", ["a welcome", "a false challenge", "its own nonce", "two challenges"])
def test_a_node_that_does_not_prove_to_know_the_token_is_refused(answers: str) -> None:
    session = ControlSession("unix:/s", WITH_TOKEN)
    right = challenged(session, TOKEN).challenge
    false = challenged(session, "another token").challenge
    [hello] = [decode_request(body) for body in FrameBuffer().feed(session.greeting)]
    assert isinstance(hello, m.Hello)
    said = {"a welcome": [WELCOME], "a false challenge": [false, WELCOME], "two challenges": [right, right]}
    said["its own nonce"] = [m.Challenge("node", hello.nonce, hello.nonce), WELCOME]
    events = session.receive(b"".join(encode_frame(reply) for reply in said[answers]))
    assert isinstance(events[-1], Ended)
    assert not session.greeted
    assert type(session.ended) is (FrameError if answers == "two challenges" else PoolRefused)
    sent = b"".join(event.data for event in events if isinstance(event, Proving))
    assert bool(sent) == (answers == "two challenges")


def test_a_node_that_asks_for_a_token_that_there_is_not_breaks_the_protocol() -> None:
    session = session_of()
    session.receive(encode_frame(m.Challenge("node", bytes(NONCE_BYTES), bytes(32))))
    assert isinstance(session.ended, FrameError)
