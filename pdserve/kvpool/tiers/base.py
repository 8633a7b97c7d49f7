"""What a storage tier is: a place beside the arena where committed pages are kept, found again by name.

A page's name is its space, its key and its length. A space is a number of 64 bits that stands for a namespace
(catalog.py). The node never gives a space to anything else, not even after a restart. It will not ask again
for pages of a space that it does not know.

A tier is a small class of blocking methods, called from that tier's own threads and never from the node's
event loop:

    one writer thread     `scan` first, to its end; then `put`, `forget`, `forget_space`, `maintain`, in any
                          order
    some reader threads   `read`, at any time, several at once, beside everything above
    any thread            `namespaces`, `save_namespaces`: one call at a time, beside everything above

It holds its own index. The node keeps another one of what it was told (`scan`, `put`, `leaving`), so that a
lookup asks no disk. Both may be wrong in one direction only: a page that is thought to be here and is not
is a miss.

What a tier promises:

- `read` answers OK only with exactly the bytes that were put under that name: each page is stored with a
  checksum (the writer's where there is one, else the tier's own) and checked when it is read.
- Errors are data: one page that cannot be written or read spoils no other page of the batch, and no method
  but the constructor raises.
- `used_bytes` never exceeds `capacity_bytes`. Pages that go for lack of room are given to `leaving` while
  they can still be read.
- What was put and scanned survives `close`, and a process that was killed, except what a crash tore. A torn
  page is detected and left out.
- A text that was saved survives a power failure once `save_namespaces` has returned.

A tier is found by the entry point group `pdserve.kvpool.tiers`; the entry point's name is its `kind` in the
node's configuration. tests/contracts/test_tier_contract.py holds every tier to the above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

TIER_ALIGN_BYTES: Final = 4096

# What became of one page in `put`
STORED: Final = 0
REFUSED: Final = 1  # it does not fit this tier, or there is no room: nothing is wrong with the tier
WRITE_FAILED: Final = 2  # the tier cannot write now; try again later

# What became of one page in `read`
LOADED: Final = 0
GONE: Final = 1  # it is not here (any more), or has another length
CORRUPT: Final = 2  # what is here is not what was put
READ_FAILED: Final = 3  # the device could not read it

# One page's memory, 1-D uint8: starts on a 4 KiB boundary and has `padded(length_bytes)` bytes, of which the
# first `length_bytes` count. The rest may be written out and may be overwritten.
PageMemory: TypeAlias = npt.NDArray[np.uint8]
Option: TypeAlias = str | int | float | bool


def padded(length_bytes: int) -> int:
    """The length rounded up to whole blocks."""
    return -(-length_bytes // TIER_ALIGN_BYTES) * TIER_ALIGN_BYTES


class PageName(msgspec.Struct, frozen=True, gc=False):
    """A page that is looked for: another length under the same key is another page."""

    space: int
    key: bytes
    length_bytes: int


class TierPage(msgspec.Struct, frozen=True, gc=False):
    """All that is known of a stored page. `checksum` is the writer's (0: none), `sequence` that of the
    filling it was stored from. A tier whose `scan` opens no page reports both as 0 there.
    """

    space: int
    key: bytes
    length_bytes: int
    checksum: int
    sequence: int


class PutResult(msgspec.Struct, frozen=True):
    """`statuses` as the pages were; `error` in words when one is WRITE_FAILED."""

    statuses: list[int]
    error: str = ""


class ReadResult(msgspec.Struct, frozen=True):
    """`page` is set when the status is LOADED."""

    status: int
    page: TierPage | None = None


@dataclass(frozen=True)
class TierSettings:
    """What a tier is opened with. `leaving` is called in the writer's thread with pages that are about to go
    for lack of room, while `read` still finds them; it may read them, and does not keep the tier long.
    """

    node: str
    path: Path
    capacity_bytes: int
    options: Mapping[str, Option]
    leaving: Callable[[Sequence[PageName]], None]


class Tier(Protocol):
    """See the module's text. `Kind(settings)` opens it; it raises StartupError when the path cannot be used
    and ConfigError when an option is wrong, both one line for a person.
    """

    capacity_bytes: int

    @property
    def used_bytes(self) -> int:
        """Of the device, overheads included. From any thread."""
        ...

    def namespaces(self) -> str | None:
        """The text last saved by `save_namespaces`, or None."""
        ...

    def save_namespaces(self, text: str | None) -> str:
        """Keep this text through a reboot, or none; "" or what went wrong, in words."""
        ...

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """Report what survived since the tier was last open, in batches of bounded size; the last word on
        a page counts. Pages may be read as soon as they were reported.

        `known`: the spaces whose pages may still be asked for. The room of other pages is free soon.
        """
        ...

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """Store a batch; a page under a name that is there already replaces it."""
        ...

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """Read a batch into the given memory, whose contents are undefined where the status is not LOADED."""
        ...

    def forget(self, names: Sequence[PageName]) -> None:
        """Find these no more. They may be found again after a restart."""
        ...

    def forget_space(self, space: int) -> None:
        """Find none of the pages that were put so far in the space; their room is free soon. They may be
        found again after a restart, if the space is known then.
        """
        ...

    def maintain(self) -> bool:
        """One short step of work in the background; whether there is more to do."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


@runtime_checkable
class NumberedTier(Protocol):
    """A tier that may hold pages of an earlier version, stored under the number of their namespace."""

    def adopt_numbers(self, spaces: Mapping[int, int]) -> str:
        """From now on, pages that were stored under a number are pages of this space; other numbers' pages
        are void. Called before `scan` when the list that the tier keeps is of that version, and again after a
        crash before the list was replaced. "" or what went wrong, in words: then all these pages are void.
        """
        ...
