"""Messages of a WebSocket, counted by the heads of its frames (RFC 6455, section 5.2). Pure."""

from __future__ import annotations

from typing import Final

_DATA: Final = frozenset((0, 1, 2))
"""Opcodes of messages: continued, text, binary."""
_CLOSE: Final = 8


class MessageCounter:
    """Counts one way of a WebSocket, whose bytes come in pieces. Payloads are skipped. Any bytes are taken as
    frames, so this never fails.
    """

    def __init__(self) -> None:
        self.messages = 0
        """Those whose last frame has begun."""
        self.has_closed = False
        """This end has said that the session is over."""
        self._head = b""
        self._left_bytes = 0
        """Of the current frame's payload."""

    def take(self, piece: bytes) -> int:
        """The bytes that come next. Returns how many messages they add."""
        before, at = self.messages, 0
        while at < len(piece):
            if self._left_bytes:
                skipped = min(self._left_bytes, len(piece) - at)
                self._left_bytes -= skipped
                at += skipped
                continue
            more = piece[at : at + _head_bytes(self._head) - len(self._head)]
            self._head += more
            at += len(more)
            if len(self._head) == _head_bytes(self._head):
                self._on_head()
        return self.messages - before

    def _on_head(self) -> None:
        head, self._head = self._head, b""
        is_last, opcode, length = head[0] & 0x80, head[0] & 0x0F, head[1] & 0x7F
        if length >= 126:
            length = int.from_bytes(head[2 : 4 if length == 126 else 10])
        self._left_bytes = length
        if is_last and opcode in _DATA:
            self.messages += 1
        self.has_closed = self.has_closed or opcode == _CLOSE


def _head_bytes(head: bytes) -> int:
    """The length of a frame's head, as far as its first bytes tell: 2 to 14."""
    if len(head) < 2:
        return 2
    return 2 + {126: 2, 127: 8}.get(head[1] & 0x7F, 0) + (4 if head[1] & 0x80 else 0)
