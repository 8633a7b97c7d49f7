"""The wire, pinned: a change here breaks running clients and nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import FrameError
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import Message
from pdserve.kvpool.protocol.frames import (
    HEADER_BYTES,
    FrameBuffer,
    decode_reply,
    decode_request,
    encode_frame,
)
from tests.support.kvpool.golden import GOLDEN

KINDS = set(Message.__subclasses__())
REQUESTS = set(m.Request.__args__)
REPLIES = set(m.Reply.__args__)
golden = pytest.mark.parametrize(
    ("message", "frame_hex"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN]
)


@golden
def test_every_message_has_these_very_bytes(message: m.Request | m.Reply, frame_hex: str) -> None:
    frame = bytes.fromhex(frame_hex)
    assert encode_frame(message) == frame
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    decode = decode_request if type(message) in REQUESTS else decode_reply
    assert decode(frame[4:]) == message


def test_the_golden_list_is_complete() -> None:
    assert {type(message) for message, _ in GOLDEN} == REQUESTS | REPLIES


@golden
def test_fields_that_a_newer_peer_appended_are_passed_over(
    message: m.Request | m.Reply, frame_hex: str
) -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(frame_hex)[4:])
    newer = msgspec.msgpack.encode([*fields, "a new field", {"of": 1}])
    decode = decode_request if type(message) in REQUESTS else decode_reply
    assert decode(newer) == message


@pytest.mark.parametrize(
    ("make", "allowed", "says"),
    [
        (lambda count: m.Exists(1, 1, [bytes(32)] * count), m.MAX_KEYS, "length <= 4096"),
        (lambda count: m.Wait(1, 1, [bytes(32)] * count, 1.0), m.MAX_KEYS, "length <= 4096"),
        (lambda count: m.Abort([0] * count, [0] * count), m.MAX_PAGES, "Abort of 129 pages"),
        (lambda count: m.Discard(1, 1, [bytes(32)] * count, []), m.MAX_PAGES, "Discard of 129 pages"),
        (lambda count: m.Release([0] * count, [0] * count), m.MAX_KEYS, "length <= 4096"),
        (lambda count: m.Commit(1, *[[0] * count] * 3), m.MAX_PAGES, "Commit of 129 pages"),
    ],
    ids=["Exists", "Wait", "Abort", "Discard", "Release", "Commit"],
)
def test_more_than_allowed_in_a_message_is_refused(
    make: Callable[[int], m.Request], allowed: int, says: str
) -> None:
    assert decode_request(encode_frame(make(allowed))[4:])
    with pytest.raises(FrameError, match=says):
        decode_request(encode_frame(make(allowed + 1))[4:])


@pytest.mark.parametrize("kind", [m.Reserve, m.Get])
@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [(1, 128), (1 << 18, 128), ((1 << 18) + 1, 127), (1 << 20, 32), (1 << 24, 2), (1 << 25, 1), (1 << 40, 1)],
)
def test_more_pages_than_allowed_are_refused(kind: type, page_bytes: int, pages: int) -> None:
    def request(count: int) -> m.Request:
        made: m.Request = kind(1, 1, [bytes(32)] * count, [page_bytes])
        return made

    assert m.pages_a_message(page_bytes) == pages
    assert decode_request(encode_frame(request(pages))[4:])
    with pytest.raises(FrameError, match=f"{kind.__name__} of {pages + 1} pages "):
        decode_request(encode_frame(request(pages + 1))[4:])


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        *((m.Ping(number), ">= 0") for number in (-1, -(1 << 63))),
        *((m.Exists(1, 1, [bytes(32), bytes(length)]), "length [<>]= 32") for length in (0, 31, 33)),
        *((m.Reserve(1, 1, [], some), r"\[4\]") for some in ([], [0], [-1], [1] * (m.MAX_SEGMENTS + 1))),
    ],
)
def test_impossible_ids_keys_and_segments_are_refused(request_: m.Request, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode_request(encode_frame(request_)[4:])


def test_a_page_may_have_two_segments_for_each_of_many_layers() -> None:
    request = m.Reserve(1, 1, [bytes(32)], [4096] * 2 * 256)
    assert decode_request(encode_frame(request)[4:]) == request


def test_the_largest_batch_fits_a_frame() -> None:
    top = (1 << 63) - 1
    encode_frame(m.Reserved(1, [m.Grant(0, top, top, top, top)] * m.MAX_KEYS))
    encode_frame(m.Got(1, [m.Pin(0, top, top, top, top, top)] * m.MAX_KEYS))
    with pytest.raises(FrameError, match="frame limit"):
        encode_frame(m.OpenNamespace(1, "x" * m.MAX_FRAME_BYTES, {}))


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_arbitrary_bytes_raise_nothing_but_frame_errors(chunks: list[bytes]) -> None:
    frames = FrameBuffer()
    try:
        for chunk in chunks:
            for body in frames.feed(chunk):
                for decode in (decode_request, decode_reply):
                    with contextlib.suppress(FrameError):
                        decode(body)
    except FrameError:
        pass


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.integers(0, 40), st.lists(VALUES, max_size=8))
def test_well_formed_nonsense_raises_nothing_but_frame_errors(tag: int, fields: list[object]) -> None:
    body = msgspec.msgpack.encode([tag, *fields])
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(FrameError):
            assert type(decode(body)) in KINDS


def test_pages_of_an_older_node_are_held_until_they_are_released() -> None:
    assert decode_reply(msgspec.msgpack.encode([20, 5, [[94, m.HIT, 1]], [], []])).held  # type: ignore[union-attr]


def test_deep_nesting_is_a_frame_error() -> None:
    with pytest.raises(FrameError):
        decode_request(b"\x91" * 100_000)


@given(st.lists(st.sampled_from([frame for _, frame in GOLDEN]), max_size=8), st.data())
def test_frames_survive_any_chunking(frames_hex: list[str], data: st.DataObject) -> None:
    stream = b"".join(map(bytes.fromhex, frames_hex))
    frames, bodies, at = FrameBuffer(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 64))
        bodies += list(frames.feed(stream[at : at + size]))
        at += size
    assert [body.hex() for body in bodies] == [frame[8:] for frame in frames_hex]


@pytest.mark.parametrize("length", [0, m.MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_an_impossible_length_is_refused_before_anything_is_kept(length: int) -> None:
    with pytest.raises(FrameError, match="does not speak"):
        list(FrameBuffer().feed(length.to_bytes(4, "little")))


@pytest.mark.parametrize(
    ("field", "number"), [("slot", -1), ("offset", -1), ("sequence", -1), ("tag", -1), ("tag", (1 << 64) - 1)]
)
def test_places_that_no_node_has_are_refused(field: str, number: int) -> None:
    for reply in (
        m.Reserved(1, [m.Grant(m.GRANTED), replace(m.Grant(m.GRANTED), **{field: number})]),
        m.Got(1, [m.Pin(m.HIT), replace(m.Pin(m.HIT), **{field: number})]),
    ):
        with pytest.raises(FrameError, match="not a pool reply: Expected `int`"):
            decode_reply(encode_frame(reply)[HEADER_BYTES:])
