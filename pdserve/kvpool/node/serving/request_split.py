"""Large requests are served in parts of PART_KEYS (Commits in smaller ones, see serving.py), so that others
have their turn between. Pure.

Where slots may have to be wiped (remains.py), for a Reserve and for a Get that brings pages up from a tier,
a part is for no more than PART_BYTES, or one page.

A client knows nothing of it: the parts' answers become one, in the order of its keys. A part that was refused
(its namespace was dropped meanwhile, or it waited too long) counts as misses, or as pages the node has no
room for; only where every part was refused is the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from pdserve.kvpool.protocol.messages import (
    FULL,
    MISS,
    Commit,
    Committed,
    Fault,
    Get,
    Got,
    Grant,
    Pin,
    Reply,
    Reserve,
    Reserved,
)

Divisible: TypeAlias = Get | Reserve | Commit

PART_KEYS: Final = 128  # about 0.4 ms of a node's time
PART_BYTES: Final = 32 * 1024 * 1024  # about 4 ms to wipe, which is rare
MAX_PARTS: Final = 1024  # of one request, whatever it asks for
_REFUSED: Final[dict[type, Any]] = {Get: Pin(MISS), Reserve: Grant(FULL), Commit: 0}


def size(request: Divisible) -> int:
    """How many pages it is for."""
    return len(request.slots if isinstance(request, Commit) else request.keys)


def part_keys(request: Divisible, page_bytes: int, *, wipes: bool) -> int:
    """How many of its pages, of so many bytes each, are served at a time. `wipes`: slots may need a wipe."""
    if not wipes:
        return PART_KEYS
    return max(1, min(PART_KEYS, PART_BYTES // max(1, page_bytes)), -(-size(request) // MAX_PARTS))


def divide(request: Divisible, keys: int, new_id: Callable[[], int]) -> list[Divisible]:
    """The request in parts of so many keys, each with an id of its own."""
    parts: list[Divisible] = []
    for start in range(0, size(request), keys):
        part = slice(start, start + keys)
        if isinstance(request, Commit):
            columns = request.slots[part], request.sequences[part], request.checksums[part]
            parts.append(Commit(new_id(), *columns, request.ages_s[part]))
        else:
            parts.append(replace(request, id=new_id(), keys=request.keys[part]))
    return parts


class Gathered:
    """What the parts of one request were answered so far."""

    def __init__(self, request: Divisible, parts: Sequence[Divisible]) -> None:
        self.request = request
        self._sizes = {part.id: size(part) for part in parts}
        self._answers: dict[int, Sequence[Any] | None] = dict.fromkeys(self._sizes)
        self._ages_s: dict[int, list[float]] = {}
        self._below: dict[int, list[int]] = {}
        self._open = len(parts)
        self._refused = 0

    def add(self, reply: Reply) -> Reply | None:
        """A part's answer, once for each part. The whole's answer when this was the last."""
        answer: Sequence[Any]
        if isinstance(reply, Got):
            answer = reply.pins
            if reply.ages_s:
                self._ages_s[reply.id] = reply.ages_s
            if reply.below:
                self._below[reply.id] = reply.below
        elif isinstance(reply, Reserved):
            answer = reply.grants
        elif isinstance(reply, Committed):
            answer = reply.mask
        else:
            assert isinstance(reply, Fault)
            answer = [_REFUSED[type(self.request)]] * self._sizes[reply.id]
            self._refused += 1
        self._answers[reply.id] = answer
        self._open -= 1
        if self._open:
            return None
        if isinstance(reply, Fault) and self._refused == len(self._sizes):
            return replace(reply, id=self.request.id)
        items = [item for found in self._answers.values() for item in found or ()]
        if isinstance(self.request, Get):
            ages_s = [self._ages_s.get(part, [0.0] * size) for part, size in self._sizes.items()]
            starts = accumulate(self._sizes.values(), initial=0)
            below = [
                s + i for s, part in zip(starts, self._sizes, strict=False) for i in self._below.get(part, ())
            ]
            return Got(self.request.id, items, list(chain(*ages_s)) if self._ages_s else [], below)
        if isinstance(self.request, Reserve):
            return Reserved(self.request.id, items)
        return Committed(self.request.id, bytes(items))
