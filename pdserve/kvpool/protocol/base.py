"""The base of all messages, and the records that several kinds of messages share. Pure."""

from __future__ import annotations

import msgspec

KEY_BYTES = 32


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=False, gc=False):
    """Base of every message; array_like so that appended fields cost nothing to old peers."""


class NodeAddress(Message, tag=90, frozen=True):
    """One node as the ring sees it. `weight` is proportional to its capacity."""

    node: str
    address: str
    weight: int = 1
