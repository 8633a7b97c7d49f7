"""Messages of a WebSocket are counted, however its bytes come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.server.websocket import MessageCounter

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, is_masked: bool = False) -> bytes:
    """RFC 6455, section 5.2. The mask is left at zero, so the payload is as it was."""
    size, masked = len(payload), 0x80 * is_masked
    if size < 126:
        length = bytes([masked | size])
    elif size < 1 << 16:
        length = bytes([masked | 126]) + size.to_bytes(2)
    else:
        length = bytes([masked | 127]) + size.to_bytes(8)
    return bytes([0x80 * is_last | opcode]) + length + b"\0\0\0\0" * is_masked + payload


FRAMES = st.tuples(
    st.sampled_from([CONTINUED, TEXT, BINARY, PING, PONG]),
    st.sampled_from([0, 1, 125, 126, 127, 65_535, 65_536, 70_000]),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_messages_are_counted_however_the_bytes_come(
    frames: list[tuple[int, int, bool, bool]], sizes: list[int]
) -> None:
    # payloads of 0xff would be read as heads, if a head or a length were taken wrongly
    way = b"".join(
        frame(opcode, b"\xff" * size, is_last=is_last, is_masked=is_masked)
        for opcode, size, is_last, is_masked in frames
    )
    counter, at, number, added = MessageCounter(), 0, 0, 0
    while at < len(way):
        added += counter.take(way[at : at + sizes[number % len(sizes)]])
        at += sizes[number % len(sizes)]
        number += 1
    expected = sum(is_last and opcode in (CONTINUED, TEXT, BINARY) for opcode, _, is_last, _ in frames)
    assert counter.messages == added == expected
    assert not counter.has_closed


def test_a_message_in_parts_is_one_and_pings_between_them_are_none() -> None:
    counter = MessageCounter()
    counter.take(frame(TEXT, b"he", is_last=False) + frame(PING, b"?") + frame(CONTINUED, b"llo"))
    assert counter.messages == 1


def test_the_end_of_a_session_is_seen() -> None:
    counter = MessageCounter()
    for byte in frame(TEXT, b"bye", is_masked=True) + frame(CLOSE, b"\x03\xe8", is_masked=True):
        assert not counter.has_closed or counter.messages == 1
        counter.take(bytes([byte]))
    assert counter.has_closed


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_what_is_no_websocket_does_no_harm(pieces: list[bytes]) -> None:
    counter = MessageCounter()
    for piece in pieces:
        counter.take(piece)
    assert counter.messages <= sum(map(len, pieces))
