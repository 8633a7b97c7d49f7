"""The base of all messages, and the records that several kinds of messages share. Pure."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

KEY_BYTES = 32
MAX_KEYS: Final = 4096  # keys or slots per message; clients split longer batches

# what a message may carry: whoever decodes it refuses others
Id: TypeAlias = Annotated[int, Meta(ge=0)]  # of a request; 0: of none
Name: TypeAlias = Annotated[str, Meta(max_length=1024)]  # in a request: those of namespaces have 512 at most
Keys: TypeAlias = Annotated[
    list[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]], Meta(max_length=MAX_KEYS)
]
Slots: TypeAlias = Annotated[list[int], Meta(max_length=MAX_KEYS)]


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=False, gc=False):
    """Base of every message; array_like so that appended fields cost nothing to old peers."""


class NodeAddress(Message, tag=90, frozen=True):
    """One node as the ring sees it. `weight` is proportional to its capacity."""

    node: str
    address: str
    weight: int = 1
