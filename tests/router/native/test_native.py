"""The C module and what stands in for it say the same."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.native import answers, heads, scan, slots

COMPILED: Any = None
with contextlib.suppress(ImportError):
    COMPILED = importlib.import_module("pdserve.router.native._native")
LINES = pytest.mark.parametrize(
    "lines_of",
    [heads.PlainLines, *([COMPILED.HeaderLines] if COMPILED else [])],
    ids=["python", "c"][: 1 + bool(COMPILED)],
)
WORDS = st.binary(max_size=6)
TEXTS = st.lists(st.sampled_from([b'"', b"\\", b"image", b"im", b"u005", b"x", b"\0"]), max_size=30).map(
    b"".join
)


@LINES
def test_lines_are_kept_in_order_with_names_in_lower_case_up_to_one_too_many(lines_of: Any) -> None:
    lines = lines_of(2)
    assert (lines.is_open, lines.take()) == (False, [])
    for number in range(2):
        lines.begin()
        assert lines.is_open
        for name in (b"X-Aa", b"x-aa", b"\xc4@[Z", b"more"):
            lines.add(name, b"V%d" % number)
        assert lines.count == 3
        assert lines.take() == [
            (b"x-aa", b"V%d" % number),
            (b"x-aa", b"V%d" % number),
            (b"\xc4@[z", b"V%d" % number),
        ]
        lines.add(b"trailer", b"")
        assert (lines.is_open, lines.count, lines.take()) == (False, 0, [])
    lines.add(b"a", b"")
    lines.begin()
    lines.add(b"a", b"")
    lines.begin()  # what was not taken is not of the next head
    assert lines.count == 0


@given(st.lists(st.tuples(WORDS, WORDS), max_size=8), st.frozensets(WORDS, max_size=4))
def test_joined_lines_are_those_of_a_head_but_some(
    pairs: list[tuple[bytes, bytes]], but: frozenset[bytes]
) -> None:
    said = b"".join(b"%b: %b\r\n" % pair for pair in pairs if pair[0] not in but)
    assert heads.joined(pairs, but) == heads.plain_joined(pairs, but) == said


@given(
    TEXTS,
    st.sampled_from([b'"', b"\\"]),
    st.lists(st.sampled_from([b'image"', b"u005", b"i", b"\0"]), max_size=3),
)
def test_a_word_is_found_only_behind_its_mark(text: bytes, mark: bytes, words: list[bytes]) -> None:
    found = any(
        text.startswith(word, at + 1)
        for at in range(len(text))
        if text[at : at + 1] == mark
        for word in words
    )
    assert scan.has_after(text, mark, tuple(words)) == found
    assert not words or scan.plain_has_after(text, mark, tuple(words)) == found


@LINES
@given(data=st.data())
def test_a_parser_fills_them_as_it_would_fill_a_list(lines_of: Any, data: Any) -> None:
    """Whatever it takes for a header, in whatever pieces it comes."""
    alphabet = st.sampled_from(
        [b"A", b"b", b":", b" ", b"\r\n", b"\n", b"\r", b"\t", b"\0", b"content-length: 0", b"x-y: z"]
    )
    head = b"POST / HTTP/1.1\r\n" + b"".join(data.draw(st.lists(alphabet, max_size=20))) + b"\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(head)), max_size=3)))

    class Said:
        def __init__(self) -> None:
            self.pairs: list[tuple[bytes, bytes]] = []
            self.lines = lines_of(256)
            self.heads: list[tuple[list[Any], list[Any]]] = []

        def on_message_begin(self) -> None:
            self.pairs = []
            self.lines.begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self.pairs.append((name.lower(), value))
            self.lines.add(name, value)

        def on_headers_complete(self) -> None:
            self.heads.append((self.pairs, self.lines.take()))

    said = Said()
    parser = httptools.HttpRequestParser(said)
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(head)], strict=True):
            parser.feed_data(head[begin:end])
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        pass
    assert all(one == other for one, other in said.heads)


@pytest.mark.skipif(COMPILED is None, reason="the C module was not built")
@pytest.mark.parametrize(
    "call",
    [
        lambda: COMPILED.HeaderLines(9).add("a", b""),
        lambda: COMPILED.HeaderLines(9).add(b"a"),
        lambda: COMPILED.HeaderLines("x"),
        lambda: COMPILED.joined([(b"a", "b")], frozenset()),
        lambda: COMPILED.joined([b"ab"], frozenset()),
        lambda: COMPILED.joined(((b"a", b"b"),), frozenset()),
        lambda: COMPILED.joined([(b"a", b"b")], [b"a"]),
        lambda: COMPILED.has_after("text", b'"', (b"x",)),
        lambda: COMPILED.has_after(b'"x', b'""', (b"x",)),
        lambda: COMPILED.has_after(b'"x', b'"', (b"x", "y")[::-1]),
    ],
)
def test_arguments_of_another_type_are_refused(call: Any) -> None:
    with pytest.raises(TypeError):
        call()


@given(
    st.lists(
        st.sampled_from([b'"n":', b'"n"', b" ", b"\n", b"0", b"12", b"123456789", b"x", b"_", b",", b"-"])
    )
)
def test_the_number_behind_the_last_mark_is_found(parts: list[bytes]) -> None:
    text, mark = b"".join(parts), b'"n":'
    found = re.findall(rb'"n":(?!.*"n":)\s*(\d{1,15})\b', text, re.DOTALL)
    assert (
        scan.number_after(text, mark) == scan.plain_number_after(text, mark) == int(found[0] if found else 0)
    )


class Base:
    __slots__ = ("first", "second")


class Derived(Base):
    __slots__ = ("third",)


class Open(Base):
    """Has a dictionary."""


@pytest.mark.parametrize("copied", [slots.plain_copied, slots.copied], ids=["python", "compiled"])
def test_a_copy_has_the_same_values_and_a_life_of_its_own(copied: Any) -> None:
    made = Derived()
    made.first, made.third = [1], "x"
    copy = copied(made)
    assert (type(copy), copy.first, copy.third, hasattr(copy, "second")) == (Derived, [1], "x", False)
    shared = made.first
    before = sys.getrefcount(shared)
    copy.first, copy.second = 2, 3
    after = sys.getrefcount(shared)
    assert (made.first is shared, hasattr(made, "second"), after) == (True, False, before - 1)
    for other in (Open(), [], 1, copied, heads.HeaderLines(1)):
        with pytest.raises((TypeError, KeyError)):
            copied(other)


ANSWERS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\nHTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\nx-b: t\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\n!",
        b"HTTP/1.1 700 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
    ]
)


@given(st.lists(ANSWERS, min_size=1, max_size=4), st.lists(st.integers(1, 40), min_size=1), st.data())
def test_answers_are_gathered_alike(sent: list[bytes], cuts: list[int], data: st.DataObject) -> None:
    """Answers in pieces of any length; before some of them, who asks gets ready for another one."""
    text, at = b"".join(sent), 0
    made = [kind() for kind in {answers.PlainAnswer, answers.Answer}]
    for one in made:
        one.parser = httptools.HttpResponseParser(one)
    while at < len(text):
        piece, at = text[at : at + cuts[at % len(cuts)]], at + cuts[at % len(cuts)]
        is_next = data.draw(st.booleans())
        seen = []
        for one in made:
            if one.is_whole and is_next:
                one.status, one.is_whole = 0, False
            error = ""
            try:
                one.parser.feed_data(piece)
            except httptools.HttpParserError as broken:
                error = str(broken.__context__ or broken)
            seen.append((one.status, one.pairs, one.pieces, one.rest, one.is_whole, one.keeps, error))
        assert seen[0] == seen[-1]
        if seen[0][-1]:
            break
    for one in made:
        one.parser = None
