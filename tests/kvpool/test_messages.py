"""The wire, pinned: a change here breaks running clients and nodes of other versions."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import FrameError
from pdserve.kvpool import messages as m

K = bytes(range(32))
L = bytes(reversed(range(32)))

GOLDEN = [
    pytest.param(
        m.Hello(1, "w", 7, "host", "shm", "tok"),
        "13000000970101a17707a4686f7374a373686da3746f6b",
        id="hello",
    ),
    pytest.param(
        m.Welcome(
            1,
            "n0",
            9,
            "host",
            "shm",
            30.0,
            m.ArenaInfo("/a", 16, "/t", 8),
            None,
            3,
            [m.NodeAddress("n0", "unix:/s", 2)],
        ),
        (
            "340000009b0201a26e3009a4686f7374a373686dcb403e000000000000955ba22f6110a22f7408c00391945a"
            "a26e30a7756e69783a2f7302"
        ),
        id="welcome_shm",
    ),
    pytest.param(
        m.Welcome(1, "n0", 9, "host", "ucx", 30.0, None, m.UcxInfo("h", 5, 6)),
        "220000009b0201a26e3009a4686f7374a3756378cb403e000000000000c0945ca16805060090",
        id="welcome_ucx",
    ),
    pytest.param(
        m.Fault(4, "code", "text"),
        "0d000000940304a4636f6465a474657874",
        id="fault",
    ),
    pytest.param(
        m.Done(4, 2),
        "0400000093040402",
        id="done",
    ),
    pytest.param(
        m.OpenNamespace(1, "ns", {"dtype": "bf16"}),
        "12000000940a01a26e7381a56474797065a462663136",
        id="open_namespace",
    ),
    pytest.param(
        m.Opened(1, 5),
        "04000000930b0105",
        id="opened",
    ),
    pytest.param(
        m.Exists(2, 5, [K]),
        "27000000940c020591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        id="exists",
    ),
    pytest.param(
        m.Present(2, b"\x01\x00"),
        "07000000930d02c4020100",
        id="present",
    ),
    pytest.param(
        m.Reserve(3, 5, [K, L], [100, 200]),
        (
            "4d000000950e030592c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4"
            "201f1e1d1c1b1a191817161514131211100f0e0d0c0b0a090807060504030201009264ccc8"
        ),
        id="reserve",
    ),
    pytest.param(
        m.Reserved(3, [m.Grant(m.GRANTED, 1, 4096, 77, 1 << 40), m.Grant(m.BUSY)]),
        "1c000000930f0392965d0001cd10004dcf0000010000000000965d0200000000",
        id="reserved",
    ),
    pytest.param(
        m.Commit(4, [1], [77], [(1 << 64) - 1]),
        "110000009510049101914d91cfffffffffffffffff",
        id="commit",
    ),
    pytest.param(
        m.Committed(4, b"\x01"),
        "06000000931104c40101",
        id="committed",
    ),
    pytest.param(
        m.Abort([1], [77]),
        "0600000093129101914d",
        id="abort",
    ),
    pytest.param(
        m.Get(5, 5, [K], [300]),
        ("2b0000009513050591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f91cd012c"),
        id="get",
    ),
    pytest.param(
        m.Got(5, [m.Pin(m.HIT, 1, 4096, 99, 77, 1 << 40), m.Pin(m.MISS)]),
        "1e00000093140592975e0001cd1000634dcf0000010000000000975e010000000000",
        id="got",
    ),
    pytest.param(
        m.Release([1], [77]),
        "0600000093159101914d",
        id="release",
    ),
    pytest.param(
        m.Wait(6, 5, [K], 1.5),
        (
            "300000009516060591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcb"
            "3ff8000000000000"
        ),
        id="wait",
    ),
    pytest.param(
        m.Discard(7, 5, [K], [77]),
        ("290000009517070591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f914d"),
        id="discard",
    ),
    pytest.param(
        m.DropNamespace(8, "ns"),
        "06000000931808a26e73",
        id="drop_namespace",
    ),
    pytest.param(
        m.Clear(9, 5),
        "0400000093190905",
        id="clear",
    ),
    pytest.param(
        m.Ping(10),
        "03000000921a0a",
        id="ping",
    ),
    pytest.param(
        m.Status(11),
        "03000000921b0b",
        id="status",
    ),
    pytest.param(
        m.StatusReport(
            11,
            "n0",
            9,
            1.5,
            100,
            60,
            30,
            8,
            2,
            3,
            1,
            4,
            5,
            [m.NamespaceStatus("ns", 3, 30, {"a": "b"}, 1, 2, 3)],
            {"x": 1},
        ),
        (
            "2f000000dc00101c0ba26e3009cb3ff8000000000000643c1e08020301040591985fa26e73031e81a161a162"
            "01020381a17801"
        ),
        id="status_report",
    ),
]
KINDS = {
    kind
    for kind in vars(m).values()
    if isinstance(kind, type) and issubclass(kind, m.Message) and kind is not m.Message
}
PARTS = {m.NodeAddress, m.ArenaInfo, m.UcxInfo, m.Grant, m.Pin, m.NamespaceStatus}
REQUESTS = set(m.Request.__args__)
REPLIES = set(m.Reply.__args__)


@pytest.mark.parametrize(("message", "frame_hex"), GOLDEN)
def test_every_message_has_these_very_bytes(message: m.Request | m.Reply, frame_hex: str) -> None:
    frame = bytes.fromhex(frame_hex)
    assert m.encode_frame(message) == frame
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    decode = m.decode_request if type(message) in REQUESTS else m.decode_reply
    assert decode(frame[4:]) == message


def test_the_golden_list_is_complete() -> None:
    assert {type(p.values[0]) for p in GOLDEN} == KINDS - PARTS == REQUESTS | REPLIES


def test_no_two_messages_have_one_number() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(("message", "frame_hex"), GOLDEN)
def test_fields_that_a_newer_peer_appended_are_passed_over(
    message: m.Request | m.Reply, frame_hex: str
) -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(frame_hex)[4:])
    newer = msgspec.msgpack.encode([*fields, "a new field", {"of": 1}])
    decode = m.decode_request if type(message) in REQUESTS else m.decode_reply
    assert decode(newer) == message


def test_fields_with_defaults_may_be_absent() -> None:
    assert m.decode_request(msgspec.msgpack.encode([1, 1, "w", 7, "host"])) == m.Hello(1, "w", 7, "host")


@pytest.mark.parametrize("kind", [m.Exists, m.Reserve, m.Get, m.Wait])
def test_more_keys_than_allowed_are_refused(kind: type) -> None:
    def request(count: int) -> m.Request:
        keys = [bytes(32)] * count
        if kind is m.Exists:
            return m.Exists(1, 1, keys)
        return m.Wait(1, 1, keys, 1.0) if kind is m.Wait else kind(1, 1, keys, [1])

    assert m.decode_request(m.encode_frame(request(m.MAX_KEYS))[4:])
    with pytest.raises(FrameError, match="4097 keys"):
        m.decode_request(m.encode_frame(request(m.MAX_KEYS + 1))[4:])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(FrameError, match=f"{length} bytes"):
        m.decode_request(m.encode_frame(m.Exists(1, 1, [bytes(32), bytes(length)]))[4:])


@pytest.mark.parametrize("segments", [[], [0], [-1], [1] * (m.MAX_SEGMENTS + 1)])
def test_impossible_segments_are_refused(segments: list[int]) -> None:
    with pytest.raises(FrameError, match="segment"):
        m.decode_request(m.encode_frame(m.Reserve(1, 1, [], segments))[4:])


def test_a_page_may_have_two_segments_for_each_of_many_layers() -> None:
    request = m.Reserve(1, 1, [bytes(32)], [4096] * 2 * 256)
    assert m.decode_request(m.encode_frame(request)[4:]) == request


def test_the_largest_batch_fits_a_frame() -> None:
    top = (1 << 63) - 1
    m.encode_frame(m.Reserved(1, [m.Grant(0, top, top, top, top)] * m.MAX_KEYS))
    m.encode_frame(m.Got(1, [m.Pin(0, top, top, top, top, top)] * m.MAX_KEYS))
    with pytest.raises(FrameError, match="frame limit"):
        m.encode_frame(m.OpenNamespace(1, "x" * m.MAX_FRAME_BYTES, {}))


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_arbitrary_bytes_raise_nothing_but_frame_errors(chunks: list[bytes]) -> None:
    frames = m.FrameBuffer()
    try:
        for chunk in chunks:
            for body in frames.feed(chunk):
                for decode in (m.decode_request, m.decode_reply):
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
    for decode in (m.decode_request, m.decode_reply):
        with contextlib.suppress(FrameError):
            assert type(decode(body)) in KINDS


def test_deep_nesting_is_a_frame_error() -> None:
    with pytest.raises(FrameError):
        m.decode_request(b"\x91" * 100_000)


@given(st.lists(st.sampled_from([p.values[1] for p in GOLDEN]), max_size=8), st.data())
def test_frames_survive_any_chunking(frames_hex: list[str], data: st.DataObject) -> None:
    stream = b"".join(map(bytes.fromhex, frames_hex))
    frames, bodies, at = m.FrameBuffer(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 64))
        bodies += list(frames.feed(stream[at : at + size]))
        at += size
    assert [body.hex() for body in bodies] == [frame[8:] for frame in frames_hex]


@pytest.mark.parametrize("length", [0, m.MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_an_impossible_length_is_refused_before_anything_is_kept(length: int) -> None:
    with pytest.raises(FrameError, match="does not speak"):
        list(m.FrameBuffer().feed(length.to_bytes(4, "little")))
