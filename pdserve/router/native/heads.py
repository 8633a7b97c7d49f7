"""Header lines as a parser finds them, by the compiled module or in Python: the same to who uses them."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING


class PlainLines:
    """The header lines of one message after the other. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """Of a head with more lines than `most`, one more is kept, to tell it by."""
        self._most = most
        self._pairs: list[tuple[bytes, bytes]] = []
        self._is_over = True

    @property
    def is_open(self) -> bool:
        """A head has begun, and is not over."""
        return not self._is_over

    @property
    def count(self) -> int:
        """Lines of the head that is being read."""
        return len(self._pairs)

    def add(self, name: bytes, value: bytes) -> None:
        """A line: the parser's `on_header`. One behind the head, a trailer, is passed over: it would override
        what others have checked.
        """
        if not self._is_over and len(self._pairs) <= self._most:
            self._pairs.append((name.lower(), value))

    def take(self) -> list[tuple[bytes, bytes]]:
        """The head is over: its lines in order, names in lower case."""
        taken, self._pairs = self._pairs, []
        self._is_over = True
        return taken

    def begin(self) -> None:
        """A head begins: the parser's `on_message_begin`."""
        self._pairs.clear()
        self._is_over = False


def plain_joined(pairs: list[tuple[bytes, bytes]], but: Set[bytes]) -> bytes:
    """The lines as they stand in a head, each ended by CRLF, without those whose names are in `but`."""
    return b"".join([b"%b: %b\r\n" % pair for pair in pairs if pair[0] not in but])


if TYPE_CHECKING:
    HeaderLines = PlainLines
    joined = plain_joined
else:
    try:
        from pdserve.router.native._native import HeaderLines, joined
    except ImportError:  # no C compiler was there: slower, and the same
        HeaderLines, joined = PlainLines, plain_joined
