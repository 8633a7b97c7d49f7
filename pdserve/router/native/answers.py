"""A worker's answer as its parser finds it, by the compiled module or in Python: the same to who uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self


class PlainAnswer:
    """A base of the object that `httptools.HttpResponseParser` tells what it finds; its methods are the
    parser's callbacks. Gathers one answer after the other: before each, who asks sets `status` to 0 and
    `is_whole` to False. A 1xx head is dropped: the final head follows.
    """

    __slots__ = (
        "_is_head_over",
        "is_whole",
        "keeps",
        "on_body",
        "pairs",
        "parser",
        "pieces",
        "rest",
        "status",
    )
    parser: Any
    """Whoever has made it sets it, and takes it away in the end: they refer to each other."""
    status: int
    """0 until the head has come."""
    pairs: list[tuple[bytes, bytes]]
    """The headers in order, names in lower case."""
    pieces: list[bytes]
    """What came of the body and was not taken. Always the same list."""
    rest: bytes
    """Of a whole answer, what was not taken before."""
    is_whole: bool
    keeps: bool
    """The connection can carry another request."""
    on_body: Callable[[bytes], None]
    """A piece of the body."""

    def __new__(cls, *_for_init: object) -> Self:
        """Nothing of an answer has come."""
        made = super().__new__(cls)
        made.parser, made.status, made.pairs, made.pieces, made.rest = None, 0, [], [], b""
        made.is_whole, made.keeps, made._is_head_over = False, True, True
        made.on_body = made.pieces.append
        return made

    def on_message_begin(self) -> None:
        """A head begins."""
        if not self.is_whole:
            self.pairs = []
            self._is_head_over = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line. One behind the head, a trailer, is passed over: it would override what others have
        checked.
        """
        if not self._is_head_over:
            self.pairs.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is over. Raises ValueError for a status that there is not."""
        self._is_head_over = True
        if self.status:  # a second answer to one request: out of step
            self.keeps = False
            return
        status: int = self.parser.get_status_code()
        if status > 599:
            raise ValueError(f"its status is {status}")
        if status >= 200:
            self.status = status

    def on_message_complete(self) -> None:
        """A message is over: an interim one, or the answer. What follows that is not of it."""
        if self.status and not self.is_whole:
            self.rest = b"".join(self.pieces)
            self.pieces.clear()
            self.is_whole = True
            if not self.parser.should_keep_alive():
                self.keeps = False


if TYPE_CHECKING:
    Answer = PlainAnswer
else:
    try:
        from pdserve.router.native._native import Answer
    except ImportError:
        Answer = PlainAnswer
